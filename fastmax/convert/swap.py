"""`swap`: replaces a model's softmax attention by fastmax attention with an exact window."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fastmax.convert.layers import check_module, hugging_face, is_of_transformers
from fastmax.core import validation
from fastmax.nn.gates import biases_of_half_lives, zero_gate
from fastmax.nn.self_attention import FastmaxSelfAttention
from fastmax.nn.self_attention_options import DEFAULT_EXACT_WINDOW, check_half_life, options_of_fastmax

SHORTEST_NEW_HALF_LIFE = 1 / 8  # shortest half-life of new gates, relative to the longest


def swap(
    model: nn.Module,
    *,
    exact_window: int = DEFAULT_EXACT_WINDOW,
    layers: Iterable[int | str] | str | None = None,
    temperature: float | None = None,
    decay: bool = False,
    longest_half_life: float = 8192.0,
    input_gate: bool | None = None,
    kept_keys: int = 0,
) -> list[str]:
    """Replaces softmax attention in a model by fastmax attention with an exact window, in place and with the same weights.

    It applies to layers `FastmaxSelfAttention(attention="softmax")` without a window, and to the attention of Hugging Face
    models. Keys in the window keep their softmax weights, so without `decay` outputs do not change on sequences of up to
    `exact_window` tokens. An error leaves the model unchanged. Other options in a Hugging Face model's `config.fastmax` stay (a
    polynomial, `log_decay`, `constant_memory`); a different `exact_window`, `temperature`, `layers` or `kept_keys` there is an
    error.

    Args:
        model: a module that contains such layers or is one, or a Hugging Face model. Devices, dtypes and training modes stay.
        exact_window: number of most recent keys that are weighted by exp(s), as in `fastmax_attention`; at least 1.
        layers: layers to swap, by name or by index among those that can be swapped, in the order of the model. For Hugging Face
            models, as the option `layers` of `fastmax.integrations.transformers.configure`. None: all.
        temperature: temperature of `fastmax_attention`, for keys in the window too. None: that of softmax, `sqrt(head_dim)`.
        decay: add decay gates to layers that have none. At first they do not depend on x.
        longest_half_life: half-life of the slowest head of new gates, in tokens; at least 4 in a `FastmaxSelfAttention`. The
            half-lives of a layer's heads are spaced geometrically from an eighth of it. A later `reset_parameters` of the
            layer spaces them from 4 tokens.
        input_gate: add input gates. At first they multiply by 1. None: only with `kept_keys`.
        kept_keys: number of keys beyond the window that are also weighted by exp(s), as in `FastmaxSelfAttention`. It needs
            input gates.

    Returns:
        The names of new parameters.

    Raises:
        TypeError, ValueError: an argument is invalid, or the model has no layer to swap.
    """
    check_module("model", model)
    validation.check_count("exact_window", exact_window)
    validation.check_bool("decay", decay)
    validation.check_count("kept_keys", kept_keys, least=0)
    input_gate = kept_keys > 0 if input_gate is None else input_gate
    validation.check_bool("input_gate", input_gate)
    validation.check_positive("longest_half_life", longest_half_life)
    if temperature is not None:
        validation.check_positive("temperature", temperature)
    if kept_keys > 0 and not input_gate:
        raise ValueError(f"kept_keys needs input gates, got {kept_keys} with input_gate=False")
    if is_of_transformers(model):
        half_lives = (longest_half_life, SHORTEST_NEW_HALF_LIFE * longest_half_life) if decay else None
        return hugging_face().swap(model, exact_window, layers, temperature, half_lives, input_gate, kept_keys)

    check_half_life(longest_half_life)
    chosen = _chosen(_softmax_layers(model), layers)
    before = [(layer, dict(vars(layer)), dict(layer._modules)) for layer in chosen.values()]
    gates: list[str] = []
    try:
        for name, layer in chosen.items():
            layer.options = options_of_fastmax(layer.head_dim, exact_window, temperature=temperature)
            layer.attention = "fastmax"
            if decay and layer.decay_proj is None:
                layer.decay_proj, layer.longest_half_life = _new_decay_gate(layer, longest_half_life), float(longest_half_life)
                gates.append(f"{name}.decay_proj")
            if input_gate:
                layer.input_gate_proj = _new_gate(layer)
                gates.append(f"{name}.input_gate_proj")
            layer.kept_keys = kept_keys
    except BaseException:
        for layer, attributes, modules in before:
            for current, restored in ((vars(layer), attributes), (layer._modules, modules)):
                current.clear()
                current.update(restored)
        raise
    return [f"{gate}.{part}".lstrip(".") for gate in gates for part in ("weight", "bias")]


def _softmax_layers(model: nn.Module) -> dict[str, FastmaxSelfAttention]:
    """Returns the layers with softmax attention and no window, by name."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, FastmaxSelfAttention)}
    found = {name: layer for name, layer in layers.items() if layer.attention == "softmax" and layer.window is None}
    if not found:
        got = {layer.attention + (" with a window" if layer.window else "") for layer in layers.values()}
        raise ValueError(
            f'model ({type(model).__name__}) must have layers FastmaxSelfAttention(attention="softmax") without a window, or '
            f"be a Hugging Face model; got {'layers of ' + ' and '.join(sorted(got)) if layers else 'no such layers'}"
        )
    return found


def _chosen(found: dict[str, nn.Module], layers: Iterable[int | str] | None) -> dict[str, nn.Module]:
    if layers is None:
        return found
    names, chosen = list(found), {}
    for layer in validation.entries_of(layers, "layers must be indices or names of layers, or None"):
        if isinstance(layer, bool) or not isinstance(layer, (int, str)):
            raise TypeError(f"layers must be indices or names of layers, got {validation.describe(layer)}")
        if layer not in (names if isinstance(layer, str) else range(len(names))):
            raise ValueError(f"layers must be from 0 to {len(names) - 1}, or among {', '.join(names)}; got {layer!r}")
        name = layer if isinstance(layer, str) else names[layer]
        chosen[name] = found[name]
    if not chosen:
        raise ValueError("layers must hold at least one, got none")
    return chosen


def _new_gate(layer: FastmaxSelfAttention) -> nn.Linear:
    return zero_gate(layer.embed_dim, layer.num_kv_heads, layer.qkv_proj.weight).train(layer.training)


def _new_decay_gate(layer: FastmaxSelfAttention, longest_half_life: float) -> nn.Linear:
    gate = _new_gate(layer)
    with torch.no_grad():
        gate.bias.copy_(biases_of_half_lives(layer.num_kv_heads, longest_half_life, SHORTEST_NEW_HALF_LIFE * longest_half_life))
    return gate
