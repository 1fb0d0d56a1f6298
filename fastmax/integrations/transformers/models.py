"""Checks a model when it is made with `attn_implementation="fastmax"` or set to it, and lets its first forward be observed.

transformers has no hook for either event, nor for submodules that a configuration adds to a model (`gates`). So `watch` wraps
methods of `PreTrainedModel`.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fastmax.integrations.transformers.cross_attention import tell_cross_attention
from fastmax.integrations.transformers.gates import build_gates, refuse_gates, reset_gate
from fastmax.integrations.transformers.layers import attention_layers, implementation, options_of_parts, runs_fastmax
from fastmax.integrations.transformers.observation import INSTEAD, is_of_pytorch, observe_first_forward, refusal
from fastmax.integrations.transformers.options import (
    NAME,
    SOFTMAX,
    all_options,
    check_model,
    check_options,
    check_values,
    configurations,
    fastmax_layers,
    remember_choice,
)
from fastmax.integrations.transformers.packing import refuse_caches_of_documents


def check(model: PreTrainedModel, left_out: list[PreTrainedConfig] | None = None) -> dict[str, str]:
    """Checks a model that is set to fastmax, and lets its next forward be observed (`observation`).

    It is called whenever a model is made or gets another implementation. Call it after setting `_attn_implementation` by hand.
    Layers that run fastmax also get hooks: to refuse packed documents in a cache (`packing`), and to tell cross-attention from
    self-attention (`cross_attention`).

    Args:
        model: the model.
        left_out: configurations of parts that are meant to run another attention; by default those that do now.

    Returns:
        What each attention layer runs, by its name: "fastmax", or "sdpa" where the option `layers` leaves it out or the
        configuration of its part says so.

    Raises:
        ValueError: a part with attention of its own, by name; `layers` that the model does not have; a configuration object
            that is also another live model's, with another attention.
        TypeError, ValueError: an option that `fastmax_attention` refuses.
    """
    check_model(model)
    _refuse_configurations_of_others(model)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation == NAME:
            _check_dispatch(part)
            _check_layers(part)
    for name, layer in attention_layers(model):
        refuse_gates(name, layer)
        if layer.config._attn_implementation == NAME:
            check_values(**all_options(layer.config))
            refuse_caches_of_documents(layer)
            tell_cross_attention(layer)
    for name, module, config in list(_covered(model, None, _other(model.config) if left_out is None else left_out)):
        if isinstance(module, nn.MultiheadAttention):
            raise ValueError(refusal(model, name, module, "it is PyTorch's own"))
        if not is_of_pytorch(module):
            observe_first_forward(model, name, module, config)
    found = {name: implementation(layer) for name, layer in attention_layers(model)}
    record(model)
    return found


# The attention of each model's last check
_checked: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()


def record(model: nn.Module) -> None:
    """Records what the model runs, for checks of other models with the same configuration object."""
    for part in _parts(model):
        _checked[part] = part.config._attn_implementation


def _parts(model: nn.Module) -> Iterator[PreTrainedModel]:
    """Yields the model and its parts that are transformers models."""
    return (part for part in model.modules() if isinstance(part, PreTrainedModel))


def _refuse_configurations_of_others(model: PreTrainedModel) -> None:
    """Raises an error if a configuration object of the model is another model's too, which runs another attention.

    Models read what they run from their configuration. So the other one would run the new attention without a word.
    """
    for collected in (False, True):
        found: Any = next(_others(model), None)
        if found is None:
            return
        if not collected:
            gc.collect()  # models that are not used any more may wait for it
    part, other, before = found
    asked, part.config._attn_implementation_internal = part.config._attn_implementation, before
    raise ValueError(
        f'the configuration of this {type(part).__name__}, asked for attn_implementation="{asked}", is also that of a '
        f'{type(other).__name__} that runs "{before}", and what one of them runs the other runs too: pass a copy of the '
        "config, copy.deepcopy(config)"
    )


def _others(model: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, PreTrainedModel, str]]:
    """Yields parts of the model, other live models with the same configuration object, and the other attention that these run.

    Models that have a part in common are not others: they run the same layers.
    """
    parts = set(_parts(model))
    for other, before in list(_checked.items()):
        same = [part for part in parts if part.config is other.config]
        now = other.config._attn_implementation
        if same and now != before and NAME in (now, before) and parts.isdisjoint(_parts(other)):
            yield same[0], other, before


def configure(model: PreTrainedModel | PreTrainedConfig, **options: Any) -> None:
    """Sets the options of fastmax attention in a model's configuration, and in its sub-configurations.

    They replace all options set earlier. Equal to `config.fastmax = options` on each, with the options checked now.

    Args:
        model: the model, or its configuration. Some models give their parts copies of the configuration: configure the model
            itself once it is made.
        options: `normalize`, `temperature`, `a0`, `a1`, `a2`, `lim`, `p`, `dropout` (noise, in training mode),
            `rpe_matrix` ("sinusoidal"), `exact_window`, `algorithm`, `use_custom_gradient`, as in `fastmax_attention`;
            `kept_keys`, as in `FastmaxSelfAttention`, of layers of causal self-attention, which then need input gates
            (`add_input_gate`);
            `log_decay`, a list of a number <= 0 for each key/value head, the decay of keys with every token; `layers`, the
            indices of the layers that run fastmax, or "global" for those that `config.layer_types` calls full attention (the
            others run transformers' "sdpa" with the masks of the model); `constant_memory`, True: `generate` makes a
            `FastmaxCache` where it would make a DynamicCache.

    Raises:
        TypeError, ValueError: an option, with its value and the accepted ones; `layers` that the model does not have;
            options that its gates exclude. The configurations then stay as they were.
    """
    if not isinstance(model, PreTrainedConfig):
        check_model(model)
    check_options(options)
    check_values(**options)
    configs = list(configurations(model))
    if not configs:
        raise ValueError(f"model must hold a transformers model with its configuration, got a {type(model).__name__}")
    of_configs = options_of_parts(model, configs, options) if isinstance(model, nn.Module) else [dict(options)] * len(configs)
    before = [dict(vars(config)) for config in configs]
    try:
        for config, chosen in zip(configs, of_configs, strict=True):
            config.fastmax = dict(chosen)
        _check_configured(model, configs)
    except Exception:
        for config, earlier in zip(configs, before, strict=True):
            vars(config).clear()
            vars(config).update(earlier)
        raise


def _check_configured(model: nn.Module | PreTrainedConfig, configs: list[PreTrainedConfig]) -> None:
    """Checks the new options of the parts that run fastmax; where none does yet, that some part has the layers named."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    parts = [part for part in modules if isinstance(part, PreTrainedModel) and part.config._attn_implementation == NAME]
    for part in parts:
        _check_layers(part)
    for name, layer in attention_layers(model) if parts else ():
        refuse_gates(name, layer)
        runs_fastmax(layer)
    if not parts:
        _check_some_part_has_the_layers(configs)


def _check_some_part_has_the_layers(configs: list[PreTrainedConfig]) -> None:
    refusals = []
    for config in configs:
        try:
            fastmax_layers(config)
        except ValueError as refusal:
            refusals.append(refusal)
    if len(refusals) == len(configs):
        raise refusals[0]


def _check_layers(part: PreTrainedModel) -> None:
    """Checks that transformers has softmax attention for the layers that the option `layers` leaves out."""
    uncapped = (
        getattr(part.config, "attn_logit_softcapping", 0) is None
    )  # Gemma 2 can run sdpa without the cap, although it says otherwise
    if fastmax_layers(part.config) is not None and not part._supports_sdpa and not uncapped:
        raise ValueError(
            f'{type(part).__name__} has no attn_implementation="{SOFTMAX}" in transformers, which layers run that the option '
            "layers leaves out"
        )


def watch() -> None:
    """Lets every model be checked when it is made or set to fastmax. Called on import; a second call changes nothing."""
    if hasattr(PreTrainedModel.post_init, "watched_by_fastmax"):
        return
    accept = PreTrainedModel.get_correct_attn_implementation
    post_init = PreTrainedModel.post_init
    set_attn_implementation = PreTrainedModel.set_attn_implementation
    initialize_weights = PreTrainedModel._initialize_weights

    @functools.wraps(accept)
    def checked_accept(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention == NAME:
            _check_dispatch(self)
        self.left_out_of_fastmax = _other(self.config)
        return accept(self, requested_attention, *args, **kwargs)

    @functools.wraps(post_init)
    def checked_post_init(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        build_gates(self)
        post_init(self, *args, **kwargs)
        check(self, getattr(self, "left_out_of_fastmax", None))
        remember_choice(self.config)

    @functools.wraps(set_attn_implementation)
    def checked_set(self: PreTrainedModel, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any) -> None:
        if attn_implementation == NAME:  # transformers skips, with a warning, the parts that cannot be set
            for part in self.modules():
                if isinstance(part, PreTrainedModel):
                    _check_dispatch(part)
        before = [(config, config._attn_implementation) for config in configurations(self)]
        try:
            set_attn_implementation(self, attn_implementation, *args, **kwargs)
            _check_applied(self.config, attn_implementation)
            check(self, [] if attn_implementation == NAME else None)
        except Exception:
            for config, implementation in before:
                config._attn_implementation_internal = implementation
            raise
        for config in configurations(self):
            remember_choice(config)

    @functools.wraps(initialize_weights)
    def initialize_gates_too(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not reset_gate(module):
            initialize_weights(self, module, *args, **kwargs)

    cast(Any, checked_post_init).watched_by_fastmax = True
    PreTrainedModel._initialize_weights = initialize_gates_too
    PreTrainedModel.get_correct_attn_implementation = checked_accept
    PreTrainedModel.post_init = checked_post_init
    PreTrainedModel.set_attn_implementation = checked_set


def _check_applied(config: PreTrainedConfig, requested: str | dict) -> None:
    if isinstance(requested, dict):
        for name, part in requested.items():
            _check_applied(getattr(config, name) if name else config, part)
    elif requested == NAME and config._attn_implementation != NAME:
        raise ValueError(f'the {config.model_type} part cannot run attn_implementation="{NAME}". {INSTEAD}')


def _check_dispatch(model: PreTrainedModel) -> None:
    """Checks a model whose parts may not be made yet."""
    if not type(model)._can_set_attn_implementation() or _takes_attention_from_a_table(model):
        raise ValueError(
            f'{type(model).__name__} cannot run attn_implementation="{NAME}": it computes attention without transformers\' '
            f"attention interface. {INSTEAD}"
        )


def _takes_attention_from_a_table(model: PreTrainedModel) -> bool:
    """Returns whether attention layers have classes that the model's file lists by implementation, without fastmax.

    If the model has no parts yet, the parts are those of the same model with "eager" attention, made on the meta device.
    """
    tables = [table for table in vars(sys.modules[type(model).__module__]).values() if isinstance(table, dict)]
    kinds = [kind for table in tables if "eager" in table and NAME not in table for kind in table.values()]
    listed = tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, nn.Module))
    if not listed:
        return False
    if not any(True for _ in model.children()):
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"
        with torch.device("meta"):
            model = type(model)(config)
    return any(isinstance(module, listed) for module in model.modules())


def _other(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    return [part for part in configurations(config) if part._attn_implementation != NAME]


def _covered(
    module: nn.Module, config: PreTrainedConfig | None, left_out: list[PreTrainedConfig], name: str = ""
) -> Iterator[tuple[str, nn.Module, PreTrainedConfig]]:
    """Yields the modules that are to run fastmax: name, module, and the configuration whose choice holds for it.

    Some models make configurations for their parts, which the choice of fastmax does not reach (MaskFormer's backbone). There
    the choice for the whole model holds.
    """
    own = getattr(module, "config", None)
    if isinstance(own, PreTrainedConfig):
        if own._attn_implementation == NAME:
            config = own
        elif any(own is part for part in left_out):
            config = None
    if config is not None:
        yield name, module, config
    for child_name, child in module.named_children():
        yield from _covered(child, config, left_out, f"{name}.{child_name}".lstrip("."))
