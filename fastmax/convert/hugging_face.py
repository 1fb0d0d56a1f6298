"""Conversion of Hugging Face models. `layers.hugging_face` imports this module, which needs transformers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedConfig

from fastmax.convert.masks import MaskOfTeacher
from fastmax.core import validation
from fastmax.integrations.transformers import add_decay, add_input_gate, options
from fastmax.integrations.transformers.gates import DecayGate, InputGate, detach, gates
from fastmax.integrations.transformers.layers import (
    attention_layers,
    is_causal_self_attention,
    options_of_parts,
    runs_fastmax,
)
from fastmax.integrations.transformers.models import record

__all__ = ["MaskOfTeacher", "fastmax_layers", "is_causal_self_attention", "options_to_change", "swap"]


def fastmax_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers with fastmax attention, by name."""
    return {name: layer for name, layer in attention_layers(model) if runs_fastmax(layer)}


def options_to_change(model: nn.Module) -> list[dict]:
    """Returns the option dicts of the configurations whose layers run fastmax. The caller changes them in place."""
    configs = [config for config in options.configurations(model) if config._attn_implementation == options.NAME]
    for config in configs:
        config.fastmax = options.all_options(config)
    return [config.fastmax for config in configs]


def swap(
    model: nn.Module,
    exact_window: int,
    layers: Iterable[int] | str | None,
    temperature: float | None,
    half_lives: tuple[float, float] | None,
    input_gate: bool,
    kept_keys: int,
) -> list[str]:
    """Switches the model to fastmax attention with these options. Returns the names of the parameters of new gates.

    Decay gates are added if `half_lives` (longest, shortest) is given. An error restores the model.
    """
    configs = list(options.configurations(model))
    before = [(config, config._attn_implementation, dict(vars(config))) for config in configs]
    if any(implementation == options.NAME for _, implementation, _ in before):
        raise ValueError(f'model ({type(model).__name__}) must run softmax attention, got attn_implementation="fastmax"')
    if layers is not None and not isinstance(layers, str):
        layers = validation.entries_of(layers, 'layers must be indices of layers, "global" or None')
    chosen = {"exact_window": exact_window, "temperature": temperature, "layers": layers, "kept_keys": kept_keys}
    of_configs = options_of_parts(model, configs, chosen)
    gated = gates(model)
    merged = [_merged(config, {"kept_keys": 0} | of_config) for config, of_config in zip(configs, of_configs, strict=True)]
    try:
        for config, each in zip(configs, merged, strict=True):
            options.check_options(each)
            options.check_values(**each)
            config.fastmax = each
        model.set_attn_implementation(options.NAME)
        new = []
        if half_lives is not None:
            longest, shortest = half_lives
            new += [f"{name}.{DecayGate.PLACE}" for name in add_decay(model, longest, shortest_half_life=shortest)]
        if input_gate:
            new += [f"{name}.{InputGate.PLACE}" for name in add_input_gate(model)]
    except Exception:
        for layer, kind in gates(model):
            if (layer, kind) not in gated:
                detach(layer, kind)
        for config, _, attributes in before:
            vars(config).clear()
            vars(config).update(attributes)
        record(model)
        raise
    return [f"{gate}.{part}" for gate in new for part in ("weight", "bias")]


def _merged(config: PreTrainedConfig, chosen: dict) -> dict:
    """Returns the options of the configuration, updated with the chosen ones that are not None. No `kept_keys` are 0."""
    before = options.all_options(config)
    if before.get("kept_keys") == 0:
        del before["kept_keys"]
    for name, value in chosen.items():
        there = list(before[name]) if isinstance(before.get(name), tuple) else before.get(name)
        if there not in (None, value):
            raise ValueError(
                f"config.fastmax of {config.model_type} has {name} = {there!r}, but swap got {value!r}: pass the same value, "
                "or reset the configuration with fastmax.integrations.transformers.configure(model)"
            )
    return before | {name: value for name, value in chosen.items() if value is not None and (name, value) != ("kept_keys", 0)}
