"""Reads and checks the options of fastmax in a model's configuration, and saves the choice of fastmax with it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fastmax.core import validation

NAME = "fastmax"
GLOBAL = "global"
SOFTMAX = "sdpa"  # what transformers calls the attention of layers that the option `layers` leaves out
OPTIONS = frozenset(
    {
        "normalize",
        "temperature",
        "a0",
        "a1",
        "a2",
        "lim",
        "p",
        "dropout",
        "rpe_matrix",
        "exact_window",
        "kept_keys",
        "log_decay",
        "algorithm",
        "use_custom_gradient",
    }
)
OF_MODELS = frozenset({"layers", "constant_memory"})  # not passed to an attention layer


def check_model(model: object) -> None:
    """Checks that `model` is a module: the model, or one around it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a transformers model, got {validation.describe(model)}")


def options_of(config: PreTrainedConfig) -> dict:
    """Returns a copy of the options of attention in a configuration.

    Raises:
        TypeError, ValueError: an unknown option; a `log_decay`, `layers` or `constant_memory` that is invalid.
    """
    return {name: value for name, value in all_options(config).items() if name not in OF_MODELS}


def all_options(config: PreTrainedConfig) -> dict:
    """Returns a copy of all options in a configuration, those of models included. Raises as `options_of`."""
    options = getattr(config, "fastmax", None)
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise TypeError(f"config.fastmax must be a dict of options, got {validation.describe(options)}")
    check_options(options)
    return dict(options)


def check_options(options: dict) -> None:
    """Checks the names of options, and the values that only Hugging Face models have."""
    known = OPTIONS | OF_MODELS
    unknown = sorted(set(options) - known)
    if unknown:
        got = ", ".join(f"{name!r} = {validation.describe(options[name])}" for name in unknown)
        raise TypeError(f"unknown fastmax option {got}; known are {', '.join(sorted(known))}")
    _check_log_decay(options.get("log_decay"))
    _check_layers(options.get("layers"))
    validation.check_bool("constant_memory", options.get("constant_memory", False))


def check_values(
    *,
    temperature: object = 1.0,
    a0: object = 1.0,
    a1: object = 1.0,
    a2: object = 0.5,
    p: object = 2,
    normalize: object = False,
    lim: object = validation.DEFAULT_LIM,
    dropout: object = 0.0,
    rpe_matrix: object = None,
    exact_window: object = 0,
    kept_keys: object = 0,
    algorithm: object = "auto",
    use_custom_gradient: object = True,
    **checked: object,
) -> None:
    """Checks options by the rules of `fastmax_attention`, which every call checks again."""
    validation.check_score(temperature, a0, a1, a2, p)
    validation.check_normalize(normalize, lim)
    validation.check_not_negative("dropout", dropout)
    validation.check_rpe_name(rpe_matrix, "a configuration holds no tensors")
    validation.check_exact_window(exact_window)
    validation.check_algorithm(algorithm, None)
    validation.check_bool("use_custom_gradient", use_custom_gradient)
    check_kept_keys(kept_keys, exact_window, dropout, rpe_matrix, normalize)


def check_kept_keys(
    kept_keys: object = 0,
    exact_window: object = 0,
    dropout: object = 0.0,
    rpe_matrix: object = None,
    normalize: object = False,
    **others: object,
) -> None:
    """Checks the option `kept_keys`, given the options that it excludes."""
    validation.check_count("kept_keys", kept_keys, least=0)
    if kept_keys == 0:
        return
    refused = {
        "exact_window": (exact_window, exact_window == 0),
        "dropout": (dropout, bool(dropout)),
        "rpe_matrix": (rpe_matrix, rpe_matrix is not None),
        "normalize": (normalize, validation.is_over_sequence(normalize)),
    }
    for name, (value, is_refused) in refused.items():
        if is_refused:
            raise ValueError(
                "kept_keys needs an exact_window, no dropout, no rpe_matrix and no normalisation over a sequence, got "
                f"{kept_keys} with {name} = {value!r}"
            )


def _check_log_decay(log_decay: object) -> None:
    accepted = "log_decay must be a list of numbers <= 0, one for each key/value head"
    if log_decay is None:
        return
    if not isinstance(log_decay, (list, tuple)) or not all(
        isinstance(x, (int, float)) and not isinstance(x, bool) for x in log_decay
    ):
        raise TypeError(f"{accepted}, got {log_decay!r}")
    if not all(x <= 0 for x in log_decay):
        raise ValueError(f"{accepted}, got {log_decay}")


def _check_layers(layers: object) -> None:
    accepted = f'layers must be a list of different indices >= 0, or "{GLOBAL}"'
    if layers is None or layers == GLOBAL:
        return
    if not isinstance(layers, (list, tuple)) or not all(isinstance(x, int) and not isinstance(x, bool) for x in layers):
        raise TypeError(f"{accepted}, got {layers!r}")
    if not layers or min(layers) < 0 or len(set(layers)) < len(layers):
        raise ValueError(f"{accepted}, got {layers}")


def fastmax_layers(config: PreTrainedConfig) -> frozenset[int] | None:
    """Returns the indices of the layers that run fastmax in a model that is set to it; None = all.

    Raises:
        ValueError: `layers` that the model does not have.
    """
    layers = all_options(config).get("layers")
    if layers is None:
        return None
    if layers == GLOBAL:
        kinds = getattr(config, "layer_types", None) or ()
        layers = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
        if not layers:
            raise ValueError(
                f'layers="{GLOBAL}" needs full_attention in config.layer_types, got {sorted(set(kinds))} in {config.model_type}'
            )
    count = getattr(config, "num_hidden_layers", None)
    if count is None:
        raise ValueError(
            f"layers must be indices of the layers of one part, got {list(layers)} in {config.model_type}, which has no "
            "num_hidden_layers of its own: choose the part, as in "
            f'attn_implementation={{"text_config": "{NAME}"}}'
        )
    if max(layers) >= count:
        raise ValueError(f"layers must be indices of the {count} layers of {config.model_type}, got {list(layers)}")
    return frozenset(layers)


def wants_constant_memory(config: PreTrainedConfig) -> bool:
    """Returns the option `constant_memory`."""
    return all_options(config).get("constant_memory", False)


def configurations(model: PreTrainedModel | PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yields every configuration that a model's layers may read, once: its own, the sub-configurations, and copies."""
    seen = set()
    waiting = [model] if isinstance(model, PreTrainedConfig) else [getattr(part, "config", None) for part in model.modules()]
    while waiting:
        config = waiting.pop(0)
        if isinstance(config, PreTrainedConfig) and id(config) not in seen:
            seen.add(id(config))
            yield config
            waiting += [getattr(config, name, None) for name in config.sub_configs]


def remember_choice(config: PreTrainedConfig) -> None:
    """Sets `attn_implementation` in a configuration that chose fastmax, to be saved with it, and removes it from others.

    transformers drops the choice on saving, but reads the key `attn_implementation` of a saved configuration. So a model
    comes back as it was saved. Where this package is not imported, transformers refuses the name.
    """
    chosen = _chosen(config)
    if chosen is not None:
        config.attn_implementation = chosen
    elif hasattr(config, "attn_implementation"):
        del config.attn_implementation


def _chosen(config: PreTrainedConfig) -> str | dict | None:
    """Returns the implementations of a configuration and its parts, as transformers takes them; None without fastmax."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    parts = {name: _chosen(part) or part._attn_implementation for name, part in parts.items() if part is not None}
    if all(part == config._attn_implementation for part in parts.values()):
        return NAME if config._attn_implementation == NAME else None
    if NAME not in (config._attn_implementation, *parts.values()) and not any(
        isinstance(part, dict) for part in parts.values()
    ):
        return None
    return {"": config._attn_implementation, **parts}
