"""Learned decay gates: modules in the attention layers of a model, listed in its configuration.

A gate reads the hidden states of its layer. A forward pre-hook of the layer computes the decays and passes them as an argument,
which transformers' layers pass on to the attention function. Gates that the configuration lists are built when a model is made,
before its weights are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization

from fastmax.core import validation
from fastmax.integrations.transformers.layers import (
    attention_layers,
    implementation,
    is_causal_self_attention,
    runs_fastmax,
)
from fastmax.integrations.transformers.options import NAME, check_model, configurations, options_of
from fastmax.nn.gates import SHORTEST_HALF_LIFE, biases_of_half_lives, log_decay_of

GATE = "fastmax_decay"  # the submodule of a layer, and the entry of the configuration
ARGUMENT = "log_decay"


class DecayGate(nn.Module):
    """A gate `log_decay = logsigmoid(x W + b)` for each key/value head, of the hidden states x that a layer receives."""

    def __init__(self, embed_dim: int, heads: int, longest_half_life: float, shortest_half_life: float, **made):
        super().__init__()
        self.longest_half_life, self.shortest_half_life = longest_half_life, shortest_half_life
        self.weight = nn.Parameter(torch.empty(heads, embed_dim, **made))
        self.bias = nn.Parameter(torch.empty(heads, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets parameters that were not loaded: weights 0, and biases by half-lives, as in `FastmaxSelfAttention`."""
        biases = biases_of_half_lives(self.bias.shape[0], self.longest_half_life, self.shortest_half_life)
        initialization.zeros_(self.weight)
        initialization.copy_(self.bias, biases)

    def forward(self, x: Tensor) -> Tensor:
        """Computes log decays: (b, n, embed_dim) -> (b, heads, n)."""
        return log_decay_of(x, self.weight, self.bias).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"embed_dim={self.weight.shape[1]}, heads={self.weight.shape[0]}"


def add_decay(
    model: PreTrainedModel,
    longest_half_life: float = 1024.0,
    *,
    shortest_half_life: float = SHORTEST_HALF_LIFE,
    layers: Iterable[int] | None = None,
) -> list[str]:
    """Adds a decay gate to attention layers of a model, in place: `log_decay = logsigmoid(x W + b)` for each key/value head.

    The gates' parameters are the model's (`...fastmax_decay.weight`, `...fastmax_decay.bias`): trained, saved and loaded with
    it; `config.fastmax_decay` lists the layers. At first the decays do not depend on x, and the half-lives of a layer's heads
    form a geometric sequence. Generation with cached keys needs `FastmaxCache`.

    Args:
        model: a model that runs fastmax.
        longest_half_life: initial half-life of the slowest head, in tokens; for training from scratch, the context length is
            a good value.
        shortest_half_life: initial half-life of the fastest head; a layer with one head has the longest. Two large numbers,
            such as 1e6, leave a trained model nearly unchanged.
        layers: indices of layers; None = all causal layers that run fastmax.

    Returns:
        The names of the layers that have a gate now.

    Raises:
        TypeError, ValueError: an invalid argument, or a layer that cannot have a gate: one of softmax attention, one that is
            not causal, or one with a gate.
    """
    check_model(model)
    validation.check_positive("longest_half_life", longest_half_life)
    validation.check_positive("shortest_half_life", shortest_half_life)
    if shortest_half_life > longest_half_life:
        raise ValueError(
            f"shortest_half_life must be at most longest_half_life, got {shortest_half_life} and {longest_half_life}"
        )
    chosen = _chosen(model, layers)
    first = next(iter(chosen.values()))
    listed = {
        "layers": sorted({layer.layer_idx for layer in chosen.values()}),
        "longest_half_life": float(longest_half_life),
        "shortest_half_life": float(shortest_half_life),
    }
    for layer in chosen.values():
        _attach(layer, listed, device=next(layer.parameters()).device, dtype=model.dtype)
        gate_of(layer)._is_hf_initialized = True  # transformers must not initialise it again
    for config in configurations(model):
        if type(config) is type(first.config):
            setattr(config, GATE, listed)
    return list(chosen)


def build_gates(model: PreTrainedModel) -> None:
    """Builds the gates that the configurations list and the layers lack, when the model is made."""
    for name, layer in attention_layers(model):
        listed = getattr(layer.config, GATE, None)
        if listed and is_causal_self_attention(layer) and layer.layer_idx in listed["layers"] and gate_of(layer) is None:
            refuse_layer(name, layer)
            _attach(layer, listed)


def gate_of(layer: nn.Module) -> DecayGate | None:
    """Returns the decay gate of a layer."""
    return getattr(layer, GATE, None)


def refuse_layer(name: str, layer: nn.Module) -> None:
    """Refuses a gate in a layer that would ignore or misuse it."""
    if not runs_fastmax(layer):
        raise ValueError(
            f"a decay gate is for layers that run fastmax, and {name} ({type(layer).__name__}) runs softmax attention "
            f'({implementation(layer)!r}): attn_implementation="{NAME}", or a configuration without {GATE}'
        )
    if not is_causal_self_attention(layer):
        raise ValueError(
            f"a decay gate is for causal self-attention with a layer_idx, which {name} ({type(layer).__name__}) is not"
        )
    if options_of(layer.config).get(ARGUMENT) is not None:
        raise ValueError(
            f"{name} ({type(layer).__name__}) has constant decays, the option log_decay: no decay gate beside them"
        )


def refuse_missing(layer: nn.Module, log_decay: Tensor | None) -> None:
    """Refuses a layer whose gate and configuration disagree, or whose gate's decays do not reach the attention function."""
    listed = getattr(layer.config, GATE, None)
    listed = bool(listed) and is_causal_self_attention(layer) and layer.layer_idx in listed["layers"]
    kind = type(layer).__name__
    if listed != (gate_of(layer) is not None):
        raise ValueError(
            f"config.{GATE} {'lists' if listed else 'does not list'} layer {getattr(layer, 'layer_idx', None)} ({kind}), which "
            f"{'has no' if listed else 'has a'} decay gate: fastmax.integrations.transformers.add_decay sets both"
        )
    if listed and log_decay is None:
        raise ValueError(
            f"{kind} keeps the argument {ARGUMENT} of its decay gate from the attention function: add_decay cannot be used"
        )


def reset_gate(module: nn.Module) -> bool:
    """Initialises a gate whose weights were not loaded. Returns whether the module is a gate."""
    if isinstance(module, DecayGate) and not getattr(module, "_is_hf_initialized", False):
        module.reset_parameters()
        module._is_hf_initialized = True
    return isinstance(module, DecayGate)


def _chosen(model: PreTrainedModel, layers: Iterable[int] | None) -> dict[str, nn.Module]:
    found = dict(attention_layers(model))
    if layers is None:
        chosen = {name: layer for name, layer in found.items() if runs_fastmax(layer) and is_causal_self_attention(layer)}
        if not chosen:
            raise ValueError(
                f"{type(model).__name__} has no causal layer that runs fastmax: attn_implementation={NAME!r} first"
            )
    else:
        accepted = f"layers must be indices of attention layers of {type(model).__name__}"
        if isinstance(layers, str) or not isinstance(layers, Iterable):
            raise TypeError(f"{accepted}, or None, got {validation.describe(layers)}")
        layers = list(layers)
        if not all(isinstance(index, int) and not isinstance(index, bool) for index in layers):
            raise TypeError(f"{accepted}, or None, got {validation.describe(layers)}")
        layers = set(layers)
        chosen = {name: layer for name, layer in found.items() if getattr(layer, "layer_idx", None) in layers}
        missing = layers - {layer.layer_idx for layer in chosen.values()}
        if missing or not layers:
            raise ValueError(f"{accepted}, got {sorted(missing)}")
        causal = {name: layer for name, layer in chosen.items() if is_causal_self_attention(layer)}
        if {layer.layer_idx for layer in causal.values()} == layers:  # without the cross-attention of the same index
            chosen = causal
    for name, layer in chosen.items():
        refuse_layer(name, layer)
    with_gate = [name for name, layer in found.items() if gate_of(layer) is not None]
    if with_gate:
        raise ValueError(
            f"{', '.join(with_gate[:3])} of {type(model).__name__} has a decay gate already: add_decay adds all at once"
        )
    return chosen


def _attach(layer: nn.Module, listed: dict, **made) -> None:
    half_lives = listed["longest_half_life"], listed["shortest_half_life"]
    layer.add_module(GATE, DecayGate(layer.config.hidden_size, _kv_heads(layer), *half_lives, **made))
    layer.register_forward_pre_hook(_pass_decay, with_kwargs=True)


def _kv_heads(layer: nn.Module) -> int:
    if getattr(layer.config, "multi_query", False):  # GPT-BigCode
        return 1
    asked = [(layer, "num_key_value_heads"), (layer.config, "num_key_value_heads"), (layer, "num_heads")]  # BART: of its part
    known = (getattr(owner, name, None) for owner, name in (*asked, (layer.config, "num_attention_heads")))
    return next(heads for heads in known if heads)


def _pass_decay(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Forward pre-hook of the layer. A function of this module, it is copied and pickled with the model."""
    refuse_layer("this layer", layer)
    if not args and "hidden_states" not in kwargs:
        raise ValueError(f"the decay gate of {type(layer).__name__} needs its hidden_states, got {sorted(kwargs)}")
    return args, kwargs | {ARGUMENT: gate_of(layer)(args[0] if args else kwargs["hidden_states"])}
