"""The attention layers of a model that ask transformers for their function, and which of them run fastmax."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fastmax.integrations.transformers.classes import asks_interface
from fastmax.integrations.transformers.options import NAME


def attention_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig) and asks_interface(type(module)):
            yield name, module


def is_causal_self_attention(layer: nn.Module) -> bool:
    """As far as the layer itself says, with a place among the model's."""
    causal = getattr(layer, "is_causal", None) is True and not getattr(layer, "is_cross_attention", False)
    return causal and isinstance(getattr(layer, "layer_idx", None), int)


def runs_fastmax(layer: nn.Module) -> bool:
    return layer.config._attn_implementation == NAME
