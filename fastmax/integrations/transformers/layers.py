"""Finds the attention layers of a model that transformers' attention functions serve, and those that run fastmax."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fastmax.integrations.transformers.options import NAME, SOFTMAX, fastmax_layers


def attention_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yields the names and modules of the attention layers."""
    for name, module in model.named_modules():
        if is_attention_layer(module):
            yield name, module


def is_attention_layer(module: nn.Module) -> bool:
    """Returns whether a module has the attributes that transformers' attention functions read from a layer."""
    has_both = isinstance(getattr(module, "config", None), PreTrainedConfig) and hasattr(module, "is_causal")
    return has_both and not isinstance(module, PreTrainedModel)


def is_causal_self_attention(layer: nn.Module) -> bool:
    """Returns whether a layer says that it is causal self-attention and which layer of the model it is."""
    causal = getattr(layer, "is_causal", None) is True and not getattr(layer, "is_cross_attention", False)
    return causal and isinstance(getattr(layer, "layer_idx", None), int)


def options_of_parts(model: nn.Module, configs: list[PreTrainedConfig], options: dict) -> list[dict]:
    """Returns the options for each of a model's configurations: `kept_keys` only for parts with causal self-attention.

    Raises:
        ValueError: `kept_keys`, and no layer of the model is causal self-attention.
    """
    if not options.get("kept_keys"):
        return [dict(options) for _ in configs]
    layers = [layer for _, layer in attention_layers(model)]
    if layers and not any(map(is_causal_self_attention, layers)):
        got = f"got {options['kept_keys']} for {type(model).__name__}"
        raise ValueError(f"kept_keys needs layers of causal self-attention, {got}, which has none")
    others = {name: x for name, x in options.items() if name != "kept_keys"}
    chosen = []
    for config in configs:
        own = [layer for layer in layers if layer.config is config]
        chosen.append(dict(options) if not own or any(map(is_causal_self_attention, own)) else others)
    return chosen


def runs_fastmax(layer: nn.Module) -> bool:
    """Returns whether an attention layer runs fastmax.

    Raises:
        ValueError: the configuration names layers, and this one does not say which it is.
    """
    if layer.config._attn_implementation != NAME:
        return False
    layers = fastmax_layers(layer.config)
    if layers is None:
        return True
    index = getattr(layer, "layer_idx", None)
    if not isinstance(index, int):
        raise ValueError(
            f"{type(layer).__name__} has no layer_idx, by which the option layers could tell whether it runs {NAME}: leave the "
            "option out, or choose the parts of a composite model by attn_implementation"
        )
    return index in layers


def implementation(layer: nn.Module) -> str:
    """Returns the name of the attention that a layer runs."""
    chosen = layer.config._attn_implementation
    return SOFTMAX if chosen == NAME and not runs_fastmax(layer) else chosen
