"""Learned gates: modules in the attention layers of a model, listed in its configuration.

A gate reads the hidden states of its layer. A forward pre-hook of the layer computes its values and passes them as an argument,
which transformers' layers pass on to the attention function. Gates that the configuration lists are built when a model is made,
before its weights are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization

from fastmax.core import validation
from fastmax.integrations.transformers import hooks
from fastmax.integrations.transformers.layers import (
    attention_layers,
    implementation,
    is_causal_self_attention,
    runs_fastmax,
)
from fastmax.integrations.transformers.options import NAME, check_model, configurations, options_of
from fastmax.nn.gates import SHORTEST_HALF_LIFE, biases_of_half_lives, log_decay_of, log_input_gate_of


class Gate(nn.Module):
    """A gate for each key/value head, of the hidden states x that a layer receives."""

    TITLE: ClassVar[str]
    PLACE: ClassVar[str]  # name of the submodule of a layer, and of the entry of the configuration
    ARGUMENT: ClassVar[str]  # of the attention function
    ADDED_BY: ClassVar[str]

    def __init__(self, embed_dim: int, heads: int, **made: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, embed_dim, **made))
        self.bias = nn.Parameter(torch.empty(heads, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets parameters that were not loaded, as in `FastmaxSelfAttention`."""
        initialization.zeros_(self.weight)
        initialization.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"embed_dim={self.weight.shape[1]}, heads={self.weight.shape[0]}"


class DecayGate(Gate):
    """A gate `log_decay = logsigmoid(x W + b)`: (b, n, embed_dim) -> (b, heads, n)."""

    TITLE, PLACE, ARGUMENT, ADDED_BY = "a decay gate", "fastmax_decay", "log_decay", "add_decay"

    def __init__(self, embed_dim: int, heads: int, longest_half_life: float, shortest_half_life: float, **made: Any):
        self.longest_half_life, self.shortest_half_life = longest_half_life, shortest_half_life
        super().__init__(embed_dim, heads, **made)

    def reset_parameters(self) -> None:
        """Sets parameters that were not loaded: weights 0, and biases by half-lives, as in `FastmaxSelfAttention`."""
        initialization.zeros_(self.weight)
        biases = biases_of_half_lives(self.bias.shape[0], self.longest_half_life, self.shortest_half_life)
        initialization.copy_(self.bias, biases)

    def forward(self, x: Tensor) -> Tensor:
        return log_decay_of(x, self.weight, self.bias).transpose(1, 2)


class InputGate(Gate):
    """A gate `log_input_gate = 8 tanh((x W + b) / 8)`: (b, n, embed_dim) -> (b, heads, n)."""

    TITLE, PLACE, ARGUMENT, ADDED_BY = "an input gate", "fastmax_input_gate", "log_input_gate", "add_input_gate"

    def forward(self, x: Tensor) -> Tensor:
        return log_input_gate_of(x, self.weight, self.bias).transpose(1, 2)


KINDS = DecayGate, InputGate


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
    return _add(model, DecayGate, layers, longest_half_life=longest_half_life, shortest_half_life=shortest_half_life)


def add_input_gate(model: PreTrainedModel, *, layers: Iterable[int] | None = None) -> list[str]:
    """Adds an input gate to attention layers of a model, in place: `log_input_gate = 8 tanh((x W + b) / 8)` for each key/value
    head.

    The weight of a key beyond the exact window, or of any key where there is no window, is multiplied by
    `exp(log_input_gate)`. The gates' parameters are the model's (`...fastmax_input_gate.weight`, `...fastmax_input_gate.bias`):
    trained, saved and loaded with it; `config.fastmax_input_gate` lists the layers. They are 0 at first, which leaves the model
    as it is. Generation with cached keys needs `FastmaxCache`. The arguments, the result and the errors are those of
    `add_decay`.
    """
    check_model(model)
    return _add(model, InputGate, layers)


def _add(model: PreTrainedModel, kind: type[Gate], layers: Iterable[int] | None, **options: float) -> list[str]:
    chosen = _chosen(model, kind, layers)
    first = next(iter(chosen.values()))
    listed: dict[str, Any] = {"layers": sorted({layer.layer_idx for layer in chosen.values()})}
    listed |= {name: float(value) for name, value in options.items()}
    for layer in chosen.values():
        _attach(layer, kind, listed, device=next(layer.parameters()).device, dtype=model.dtype)
        getattr(layer, kind.PLACE)._is_hf_initialized = True  # transformers must not initialise it again
    for config in configurations(model):
        if type(config) is type(first.config):
            setattr(config, kind.PLACE, listed)
    return list(chosen)


def gates(model: PreTrainedModel) -> list[tuple[nn.Module, type[Gate]]]:
    """Returns the attention layers that have gates, and the kinds of these."""
    return [
        (layer, kind) for _, layer in attention_layers(model) for kind in KINDS if getattr(layer, kind.PLACE, None) is not None
    ]


def detach(layer: nn.Module, kind: type[Gate]) -> None:
    """Removes a gate from a layer, and the hook that passes its values. The configuration stays."""
    delattr(layer, kind.PLACE)
    hooks.remove(layer, lambda hook: isinstance(hook, partial) and hook.func is _pass_gate and hook.args == (kind,))


def build_gates(model: PreTrainedModel) -> None:
    """Builds the gates that the configurations list and the layers lack, when the model is made."""
    for name, layer in attention_layers(model):
        for kind in KINDS:
            if _is_listed(layer, kind) and getattr(layer, kind.PLACE, None) is None:
                refuse_layer(name, layer, kind)
                _attach(layer, kind, getattr(layer.config, kind.PLACE))


def has_gates(config: PreTrainedConfig) -> bool:
    """Returns whether a configuration lists layers with gates."""
    return any(getattr(config, kind.PLACE, None) for kind in KINDS)


def refuse_gates(name: str, layer: nn.Module) -> None:
    """Refuses gates in a layer that would ignore or misuse them."""
    for kind in KINDS:
        if getattr(layer, kind.PLACE, None) is not None:
            refuse_layer(name, layer, kind)


def _is_listed(layer: nn.Module, kind: type[Gate]) -> bool:
    listed: Any = getattr(layer.config, kind.PLACE, None)
    return bool(listed) and is_causal_self_attention(layer) and layer.layer_idx in listed["layers"]


def refuse_layer(name: str, layer: nn.Module, kind: type[Gate]) -> None:
    """Refuses a gate in a layer that would ignore or misuse it."""
    if not runs_fastmax(layer):
        raise ValueError(
            f"{kind.TITLE} is for layers that run fastmax, and {name} ({type(layer).__name__}) runs softmax attention "
            f'({implementation(layer)!r}): attn_implementation="{NAME}", or a configuration without {kind.PLACE}'
        )
    if not is_causal_self_attention(layer):
        raise ValueError(
            f"{kind.TITLE} is for causal self-attention with a layer_idx, which {name} ({type(layer).__name__}) is not"
        )
    if options_of(layer.config).get(kind.ARGUMENT) is not None:
        raise ValueError(
            f"{name} ({type(layer).__name__}) has constant decays, the option log_decay: no decay gate beside them"
        )


def refuse_missing(layer: nn.Module, kind: type[Gate], values: Tensor | None) -> None:
    """Refuses a layer whose gate and configuration disagree, or whose gate's values do not reach the attention function."""
    listed, name = _is_listed(layer, kind), type(layer).__name__
    if listed != (getattr(layer, kind.PLACE, None) is not None):
        bare = kind.TITLE.split(" ", 1)[1]
        raise ValueError(
            f"config.{kind.PLACE} {'lists' if listed else 'does not list'} layer {getattr(layer, 'layer_idx', None)} ({name}), "
            f"which has {f'no {bare}' if listed else kind.TITLE}: fastmax.integrations.transformers.{kind.ADDED_BY} sets both"
        )
    if listed and values is None:
        raise ValueError(
            f"{name} keeps the argument {kind.ARGUMENT} of its gate from the attention function: {kind.ADDED_BY} cannot be used"
        )


def reset_gate(module: nn.Module) -> bool:
    """Initialises a gate whose weights were not loaded. Returns whether the module is a gate."""
    if isinstance(module, Gate) and not getattr(module, "_is_hf_initialized", False):
        module.reset_parameters()
        module._is_hf_initialized = True
    return isinstance(module, Gate)


def _chosen(model: PreTrainedModel, kind: type[Gate], layers: Iterable[int] | None) -> dict[str, nn.Module]:
    found = dict(attention_layers(model))
    if layers is None:
        chosen = {name: layer for name, layer in found.items() if runs_fastmax(layer) and is_causal_self_attention(layer)}
        if not chosen:
            raise ValueError(
                f"{type(model).__name__} has no causal layer that runs fastmax: attn_implementation={NAME!r} first"
            )
    else:
        accepted = f"layers must be indices of attention layers of {type(model).__name__}"
        layers = validation.entries_of(layers, f"{accepted}, or None")
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
        refuse_layer(name, layer, kind)
    with_gate = [name for name, layer in found.items() if getattr(layer, kind.PLACE, None) is not None]
    if with_gate:
        raise ValueError(
            f"{', '.join(with_gate[:3])} of {type(model).__name__} has {kind.TITLE} already: {kind.ADDED_BY} adds all at once"
        )
    return chosen


def _attach(layer: nn.Module, kind: type[Gate], listed: dict, **made: Any) -> None:
    options = {name: value for name, value in listed.items() if name != "layers"}
    layer.add_module(kind.PLACE, kind(layer.config.hidden_size, _kv_heads(layer), **options, **made))
    layer.register_forward_pre_hook(partial(_pass_gate, kind), with_kwargs=True)


def _kv_heads(layer: nn.Module) -> int:
    if getattr(layer.config, "multi_query", False):  # GPT-BigCode
        return 1
    asked = [(layer, "num_key_value_heads"), (layer.config, "num_key_value_heads"), (layer, "num_heads")]  # BART: of its part
    known = (getattr(owner, name, None) for owner, name in (*asked, (layer.config, "num_attention_heads")))
    return next(heads for heads in known if heads)


def _pass_gate(kind: type[Gate], layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Forward pre-hook of the layer. A function of this module, it is copied and pickled with the model."""
    refuse_layer("this layer", layer, kind)
    if not args and "hidden_states" not in kwargs:
        raise ValueError(f"the gate {kind.PLACE} of {type(layer).__name__} needs its hidden_states, got {sorted(kwargs)}")
    gate = getattr(layer, kind.PLACE)
    return args, kwargs | {kind.ARGUMENT: gate(args[0] if args else kwargs["hidden_states"])}
