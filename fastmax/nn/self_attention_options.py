"""Options of `FastmaxSelfAttention`: their defaults, and the rules for values of its attributes.

The constructor and `check_attribute`, which sees later values, share the rules.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from fastmax.core import validation
from fastmax.nn.gates import SHORTEST_HALF_LIFE

if TYPE_CHECKING:
    from fastmax.nn.self_attention import FastmaxSelfAttention

DEFAULT_EXACT_WINDOW = 128
EXPANSION_OF_EXP = (1.0, 1.0, 0.5)  # a0, a1, a2
PARTS = ("qkv_proj", "out_proj", "gate_proj", "decay_proj", "input_gate_proj", "conv", "q_norm", "k_norm", "output_norm")
SIZES = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_dim")
MADE_BY = {  # arguments of the constructor that are not attributes, and the attributes that they determine
    "qk_norm": "q_norm and k_norm (None: off)",
    "rope": "rope_dim (0: off)",
    "decay": "decay_proj (None: off)",
    "input_gate": "input_gate_proj (None: off)",
    "output_gate": "gate_proj (None: off)",
    "bias": "the biases of qkv_proj, gate_proj and out_proj",
    "norm_eps": "the eps of q_norm, k_norm and output_norm",
}


class Option:
    """Descriptor that reads and writes an entry of the layer's `options`. A new value is checked."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: FastmaxSelfAttention | None, owner: type) -> object:
        if layer is None:
            return self
        if layer.attention == "softmax":
            raise AttributeError(self.name)  # Python then calls nn.Module.__getattr__, whose message the user sees
        return layer.options[self.name]

    def __set__(self, layer: FastmaxSelfAttention, value: object) -> None:
        if layer.attention == "softmax":
            raise ValueError(f'{self.name} has no effect with attention="softmax", got {validation.describe(value)}')
        options = layer.options | {self.name: value}
        coefficients = tuple(options.pop(name) for name in ("a0", "a1", "a2"))
        options = options_of_fastmax(layer.head_dim, coefficients=coefficients, **options)
        check_kept_keys(layer.kept_keys, layer.attention, layer.input_gate_proj is not None, options)
        layer.options = options


def check_attribute(layer: FastmaxSelfAttention, name: str, value: Any) -> None:
    """Checks a new value of an attribute of the layer. `Option` checks the options of fastmax attention."""
    if name in SIZES:
        got = validation.describe(value)
        raise AttributeError(
            f"{name} cannot be set, got {got}: the weights have the shapes for {vars(layer)[name]}; make a new layer"
        )
    if name in PARTS and value is not None and not isinstance(value, nn.Module):
        raise TypeError(f"{name} must be a module or None, got {validation.describe(value)}")
    if name in _CHECKS:
        _CHECKS[name](layer, value)
    if name in _CHECKS_OF_PARTS and value is not None:
        _CHECKS_OF_PARTS[name](layer, name, value)


def check_resettable(layer: FastmaxSelfAttention) -> None:
    """Checks that `reset_parameters` knows how to initialise all parts."""
    for name in PARTS:
        part, needed = getattr(layer, name), ("weight", "bias") if name.endswith("_proj") else ("reset_parameters",)
        if part is not None and not all(hasattr(part, attribute) for attribute in needed):
            raise TypeError(f"{name} must have {' and '.join(needed)} for reset_parameters, got {type(part).__name__}")


def _check_gate(layer: FastmaxSelfAttention, name: str, value: nn.Module) -> None:
    if type(value) is not nn.Linear:
        return  # the result of a call is checked
    sizes = layer.embed_dim, layer.num_kv_heads
    if (value.in_features, value.out_features) != sizes or value.bias is None:
        got = f"{value.in_features}, {value.out_features}, bias={value.bias is not None}"
        accepted = f"an nn.Linear({sizes[0]}, {sizes[1]}) with a bias, or another kind of module"
        raise ValueError(f"{name} must be {accepted}, got nn.Linear({got})")


def _check_norm(layer: FastmaxSelfAttention, name: str, value: nn.Module) -> None:
    width = layer.value_dim if name == "output_norm" else layer.head_dim
    if isinstance(value, _NORMS_OVER_TOKENS):
        raise ValueError(f"{name} must normalise each head of a token by itself, got {validation.describe(value)}")
    if isinstance(value, (nn.RMSNorm, nn.LayerNorm)) and value.normalized_shape != (width,):
        got = f"{type(value).__name__} with normalized_shape {value.normalized_shape}"
        raise ValueError(f"{name} must normalise heads of {width} channels, got {got}")


def _check_convolution(layer: FastmaxSelfAttention, name: str, value: nn.Module) -> None:
    if not all(hasattr(value, attribute) for attribute in ("weight", "width", "last_tokens")):
        raise TypeError(f"{name} must be a ShortConvolution, a wrapper with its attributes or None, got {type(value).__name__}")
    if value.weight.shape[0] != sum(layer.widths):
        raise ValueError(f"{name} must have {sum(layer.widths)} channels, those of q, k and v, got {value.weight.shape[0]}")


# Given heads (b, n, h, d), these take the n tokens for channels. So they mix tokens, heads or batch entries.
_NORMS_OVER_TOKENS = (nn.GroupNorm, nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm2d, nn.LocalResponseNorm)
_CHECKS_OF_PARTS: dict[str, Callable[[FastmaxSelfAttention, str, Any], None]] = {
    "conv": _check_convolution,
    "decay_proj": _check_gate,
    "input_gate_proj": _check_gate,
    "k_norm": _check_norm,
    "output_norm": _check_norm,
    "q_norm": _check_norm,
}


def _check_context(layer: FastmaxSelfAttention, value: Any) -> None:
    if value is not None and not _is_context(value):
        raise TypeError(f"context must be None or a fastmax.distributed.Context, got {validation.describe(value)}")


def _check_input_gate(layer: FastmaxSelfAttention, value: nn.Module | None) -> None:
    if value is not None and layer.attention == "softmax":
        refuse_input_gate("input_gate_proj", value)
    if "input_gate_proj" in layer._modules:  # not in the constructor
        check_kept_keys(layer.kept_keys, layer.attention, value is not None, layer.options)


def _check_window(layer: FastmaxSelfAttention, value: Any) -> None:
    if value is None:
        return
    if layer.attention != "softmax":
        refuse_window(value)
    validation.check_count("window", value)


def _check_new_kind(layer: FastmaxSelfAttention, value: Any) -> None:
    check_kind(value)
    if value == "fastmax" and not layer.options:
        raise ValueError('attention must stay "softmax" in a softmax layer, got "fastmax": use fastmax.convert.swap')
    if value == "fastmax" and layer.window is not None:
        raise ValueError(f'window must be None before attention is set to "fastmax", got {layer.window}')
    if value == "softmax" and layer.input_gate_proj is not None:
        got = validation.describe(layer.input_gate_proj)
        raise ValueError(f'input_gate_proj must be None before attention is set to "softmax", got {got}')


def _check_rope_dim(layer: FastmaxSelfAttention, value: Any) -> None:
    validation.check_count("rope_dim", value, least=0)
    if value > 0:
        rotary_channels(layer.head_dim, True, value)


def _check_kept_keys(layer: FastmaxSelfAttention, value: Any) -> None:
    check_kept_keys(value, layer.attention, layer.input_gate_proj is not None, layer.options)


def _check_steady_heads(layer: FastmaxSelfAttention, value: Any) -> None:
    check_steady_heads(value, layer.num_kv_heads, layer.decay_proj is not None)


_CHECKS: dict[str, Callable[[FastmaxSelfAttention, Any], None]] = {
    "attention": _check_new_kind,
    "context": _check_context,
    "input_gate_proj": _check_input_gate,
    "kept_keys": _check_kept_keys,
    "longest_half_life": lambda layer, x: check_half_life(x),
    "rope_base": lambda layer, x: validation.check_positive("rope_base", x),
    "rope_dim": _check_rope_dim,
    "steady_heads": _check_steady_heads,
    "use_custom_gradient": lambda layer, x: validation.check_bool("use_custom_gradient", x),
    "window": _check_window,
}


def _is_context(value: object) -> bool:
    """Returns whether `value` is a `fastmax.distributed.Context`. Does not import its module: the owner of one has done so."""
    module = sys.modules.get("fastmax.distributed.context")
    return module is not None and isinstance(value, module.Context)


def check_half_life(longest: Any) -> None:
    validation.check_positive("longest_half_life", longest)
    if longest < SHORTEST_HALF_LIFE:
        raise ValueError(f"longest_half_life must be at least {SHORTEST_HALF_LIFE:g} tokens, got {longest}")


def check_steady_heads(steady_heads: Any, num_kv_heads: int, decay: bool) -> None:
    validation.check_count("steady_heads", steady_heads, least=0)
    if steady_heads > num_kv_heads:
        raise ValueError(f"steady_heads must be at most num_kv_heads {num_kv_heads}, got {steady_heads}")
    if steady_heads > 0 and not decay:
        raise ValueError(f"steady_heads needs decay gates, got {steady_heads} without them")


def refuse_input_gate(name: str, value: object) -> NoReturn:
    raise ValueError(f'{name} needs attention="fastmax", got {validation.describe(value)} with "softmax"')


def check_kept_keys(kept: Any, attention: str, has_gate: bool, options: dict) -> None:
    validation.check_count("kept_keys", kept, least=0)
    if kept == 0:
        return
    if attention == "softmax":
        raise ValueError(f'kept_keys needs attention="fastmax", got {kept} with "softmax", which weights all keys by exp')
    if not has_gate:
        raise ValueError(f"kept_keys needs an input gate, which chooses the keys, got {kept} with input_gate=False")
    if options["exact_window"] == 0:
        raise ValueError(f"kept_keys needs an exact_window of at least 1, got {kept} with exact_window 0")


def refuse_window(window: object) -> NoReturn:
    got = validation.describe(window)
    raise ValueError(f'window needs attention="softmax", got {got} with "fastmax", which has exact_window')


def check_kind(attention: object) -> None:
    if not isinstance(attention, str) or attention not in ("fastmax", "softmax"):
        raise ValueError(f'attention must be "fastmax" or "softmax", got {validation.describe(attention)}')


def rotary_channels(head_dim: int, rope: bool, rope_dim: int | None) -> int:
    """Returns the checked number of rotated channels of a head; 0 without rotary positions."""
    if not rope:
        if rope_dim is not None:
            raise ValueError(f"rope_dim needs rope=True, got {rope_dim!r} with rope=False")
        return 0
    if head_dim == 1:
        raise ValueError("head_dim must be at least 2 for rope, which rotates pairs of channels, got 1; or pass rope=False")
    if rope_dim is None:
        # Measured with 64 channels and 25 M parameters: all 0.771, half 0.760, a quarter 0.767 nats (docs/learning.md).
        return 2 * math.ceil(head_dim / 4)
    validation.check_count("rope_dim", rope_dim)
    if rope_dim % 2 != 0 or rope_dim > head_dim:
        raise ValueError(f"rope_dim must be even and at most head_dim {head_dim}, got {rope_dim}")
    return rope_dim


def options_of_fastmax(
    head_dim: int,
    exact_window: int | None,
    p: int = 2,
    temperature: float | None = None,
    normalize: bool | str | None = None,
    algorithm: str = "auto",
    coefficients: tuple[float, float, float] = EXPANSION_OF_EXP,
) -> dict:
    """Returns the checked options of fastmax attention. None takes the default for p and the exact window."""
    exact_window = DEFAULT_EXACT_WINDOW if exact_window is None else exact_window
    validation.check_exact_window(exact_window)
    validation.check_degree(p)
    if temperature is None:
        # Measured for p = 2 with a window, 25 M parameters: sqrt(64) 0.749, 2.83 0.793, 1 0.840 nats (docs/parameters.md).
        temperature = 1.1 if p == 1 else math.sqrt(head_dim) if exact_window else 1.0
    if normalize is None:
        normalize = "token" if p == 1 else False
    if validation.check_normalize(normalize, validation.DEFAULT_LIM) == "sequence":
        raise ValueError(f'normalize must be False or "token" in a causal layer, got {normalize!r}, which uses later tokens')
    p = validation.check_score(temperature, *coefficients, p).order
    validation.check_algorithm(algorithm, None)
    options = {"exact_window": exact_window, "p": p, "temperature": temperature, "normalize": normalize, "algorithm": algorithm}
    return options | dict(zip(("a0", "a1", "a2"), map(float, coefficients), strict=True))


def refuse_options_of_fastmax(
    exact_window: int | None,
    p: int,
    temperature: float | None,
    normalize: bool | str | None,
    algorithm: str,
    coefficients: tuple[float, float, float],
) -> None:
    given = {"temperature": temperature, "normalize": normalize, "algorithm": algorithm, "exact_window": exact_window, "p": p}
    given |= zip(("a0", "a1", "a2"), coefficients, strict=True)
    defaults: dict[str, tuple[object, ...]] = {"algorithm": ("auto",), "exact_window": (None, 0), "p": (2,)}
    defaults |= {name: (x,) for name, x in zip(("a0", "a1", "a2"), EXPANSION_OF_EXP, strict=True)}
    for name, value in given.items():
        if not isinstance(value, (Real, str, type(None))) or value not in defaults.get(name, (None,)):
            why = ", which weights all keys by exp" if name == "exact_window" else ""
            raise ValueError(f'{name} has no effect with attention="softmax"{why}, got {validation.describe(value)}')
