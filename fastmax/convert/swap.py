"""`swap`: Fastmax with an exact window in the place of a model's softmax attention."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fastmax.convert.layers import check_module, hugging_face, is_of_transformers
from fastmax.core import validation
from fastmax.nn.decay_gate import biases_of_half_lives
from fastmax.nn.self_attention import DEFAULT_EXACT_WINDOW, FastmaxSelfAttention, options_of_fastmax

SHORTEST_NEW_HALF_LIFE = 1 / 8  # of the longest


def swap(
    model: nn.Module,
    *,
    exact_window: int = DEFAULT_EXACT_WINDOW,
    layers: Iterable[int | str] | str | None = None,
    temperature: float | None = None,
    decay: bool = False,
    longest_half_life: float = 8192.0,
) -> list[str]:
    """Fastmax with an exact window in the place of a model's softmax attention, in place and with the same weights.

    What is exchanged are the layers `FastmaxSelfAttention(attention="softmax")`, but for those with a window of their own, and
    in a Hugging Face model its attention. Local keys weigh what they weighed: on sequences of up to `exact_window` tokens the
    model computes what it did. An error leaves it as it was. Options that a Hugging Face model's `config.fastmax` holds already
    stay (a polynomial, `log_decay`, `constant_memory`); another `exact_window`, `temperature` or `layers` there is refused.

    Args:
        model: any module that contains such layers, or is one, or a Hugging Face model. Devices, dtypes and modes stay.
        exact_window: tokens whose keys are weighed by exp(s), as in `fastmax_attention`; at least 1.
        layers: those to exchange, by name or by number: from 0, in the order of the model, among the layers that can be
            exchanged; of a Hugging Face model as the option `layers` of its `configure`. None: all.
        temperature: of `fastmax_attention`, of near keys too; None: softmax's own, `sqrt(head_dim)`.
        decay: add gates, by which older keys fade, to the layers that have none. They do not depend on x at first.
        longest_half_life: tokens after which a key of the slowest new gate weighs half at first; those of a layer's heads are
            spread geometrically from an eighth of that.

    Returns:
        Names of the parameters that are new.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what is accepted; a model with nothing to exchange.
    """
    check_module("model", model)
    validation.check_count("exact_window", exact_window)
    validation.check_bool("decay", decay)
    validation.check_positive("longest_half_life", longest_half_life)
    if temperature is not None:
        validation.check_positive("temperature", temperature)
    if is_of_transformers(model):
        half_lives = (longest_half_life, SHORTEST_NEW_HALF_LIFE * longest_half_life) if decay else None
        return hugging_face().swap(model, exact_window, layers, temperature, half_lives)

    chosen = _chosen(_softmax_layers(model), layers)
    options = {
        name: options_of_fastmax(layer.head_dim, exact_window, temperature=temperature) for name, layer in chosen.items()
    }
    gates = {name: _new_gate(layer, longest_half_life) for name, layer in chosen.items() if decay and layer.decay_proj is None}
    for name, layer in chosen.items():
        layer.options = options[name]
        layer.attention = "fastmax"
        if name in gates:
            layer.decay_proj, layer.longest_half_life = gates[name], float(longest_half_life)
    return [f"{name}.decay_proj.{part}".lstrip(".") for name in gates for part in ("weight", "bias")]


def _softmax_layers(model: nn.Module) -> dict[str, FastmaxSelfAttention]:
    """By name, those with softmax over all earlier keys."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, FastmaxSelfAttention)}
    found = {name: layer for name, layer in layers.items() if layer.attention == "softmax" and layer.window is None}
    if not found:
        got = {layer.attention + (" with a window" if layer.window else "") for layer in layers.values()}
        raise ValueError(
            f'model ({type(model).__name__}) must have layers FastmaxSelfAttention(attention="softmax") without a window, or '
            f"be a Hugging Face model; got {'layers of ' + ' and '.join(sorted(got)) if layers else 'none of these layers'}"
        )
    return found


def _chosen(found: dict[str, nn.Module], layers: Iterable[int | str] | None) -> dict[str, nn.Module]:
    if layers is None:
        return found
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(f"layers must be numbers or names of layers, or None, got {validation.describe(layers)}")
    names, chosen = list(found), {}
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, (int, str)):
            raise TypeError(f"layers must be numbers or names of layers, got {validation.describe(layer)}")
        if layer not in (names if isinstance(layer, str) else range(len(names))):
            raise ValueError(f"layers must be from 0 to {len(names) - 1}, or of the names {', '.join(names)}; got {layer!r}")
        name = layer if isinstance(layer, str) else names[layer]
        chosen[name] = found[name]
    if not chosen:
        raise ValueError("layers must name one or more, got none")
    return chosen


def _new_gate(layer: FastmaxSelfAttention, longest_half_life: float) -> nn.Linear:
    weight = layer.qkv_proj.weight
    gate = nn.Linear(layer.embed_dim, layer.num_kv_heads, device=weight.device, dtype=weight.dtype)
    nn.init.zeros_(gate.weight)
    with torch.no_grad():
        gate.bias.copy_(biases_of_half_lives(layer.num_kv_heads, longest_half_life, SHORTEST_NEW_HALF_LIFE * longest_half_life))
    return gate.train(layer.training)
