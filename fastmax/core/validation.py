"""All rules about arguments. They are checked before anything is computed.

Messages name the argument, its value and what is accepted.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fastmax.core.call import ALGORITHMS
from fastmax.core.score import Score
from fastmax.core.transforms import in_functorch
from fastmax.core.warning import warn

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NORMALIZE = (False, True, "sequence", "token")
DEFAULT_LIM = 1.0
OF_POSITIONS = {"exact_window": 0, "rpe_matrix": None}  # options that compare positions of queries and keys -> their defaults
LARGEST_FLOAT = torch.finfo(torch.float32).max  # kernels hold numbers in float32
LARGEST_COUNT = 2**31 - 1  # of tokens, channels or batch entries: kernels hold these numbers in 32 bits

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 2, 3, 3, 3


def describe(value: object) -> str:
    """Returns a short description of a value, for error messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{_SHORT.repr(value)} ({type(value).__name__})"


def entries_of(value: Any, accepted: str) -> list:
    """Returns the entries of an iterable. A string is refused, and so are tensors and arrays without dimensions.

    Args:
        accepted: beginning of the message of the error, which says what the argument must be.
    """
    try:
        entries = None if isinstance(value, str) else iter(value)
    except TypeError:
        entries = None
    if entries is None:
        raise TypeError(f"{accepted}, got {describe(value)}")
    return list(entries)


def _check_tensor(name: str, value: object, accepted: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be {accepted}, got {describe(value)}")
    check_dense(name, value)


def check_dense(name: str, x: Tensor) -> None:
    """Checks that a tensor is strided: neither nested, quantized nor sparse."""
    if x.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor, got a nested one: pad it (torch.nested.to_padded_tensor), and in attention pass "
            "an attention_mask"
        )
    if x.is_quantized:
        raise TypeError(f"{name} must be a dense tensor, got a quantized one ({x.dtype}): pass {name}.dequantize()")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one of layout {x.layout}: pass {name}.to_dense()")


def check_in_graph(condition: Tensor, message: str) -> None:
    """Adds an assertion to a compiled graph, which raises a RuntimeError when the graph runs.

    The message is changed, because Inductor copies it into a C++ string literal without escapes: double quotes become single
    ones, backslashes become slashes, and line breaks become spaces.

    Args:
        condition: bool tensor of one element. Its value is unknown while the graph is compiled.
        message: the text of the error that an eager call raises.
    """
    torch._assert_async(condition, message.replace('"', "'").replace("\\", "/").replace("\n", " "))


def check_qkv(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """Checks ranks, shapes, dtypes and devices of q, k and v."""
    # Every call runs this code. For speed it reads each attribute of a tensor once, and formats messages only after a fault.
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.is_nested or x.is_quantized or x.layout is not torch.strided:
            _check_tensor(name, x, "a torch.Tensor")
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    rank = len(q_shape)
    if rank not in (3, 4) or not rank == len(k_shape) == len(v_shape):
        name = "q" if rank not in (3, 4) else "k" if len(k_shape) != rank else "v"
        raise ValueError(
            f"{name} must be 4-d (batch, heads, tokens, head_dim) or 3-d (batch * heads, tokens, head_dim), "
            f"with q, k and v alike; got q, k, v of {rank}, {len(k_shape)}, {len(v_shape)} dimensions"
        )
    dtype = q.dtype
    if dtype not in DTYPES or not dtype == k.dtype == v.dtype:
        _refuse_dtypes(q, k, v)
    if not q.device == k.device == v.device:
        name, x = ("k", k) if k.device != q.device else ("v", v)
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
    *batch, h, n, d = q_shape
    *k_batch, hk, m, k_width = k_shape
    *v_batch, v_heads, v_tokens, dv = v_shape
    if d == 0 or k_width == 0 or dv == 0:
        name, shape = next((name, x.shape) for name, x in (("q", q), ("k", k), ("v", v)) if x.shape[-1] == 0)
        raise ValueError(f"{name} must have a head_dim of at least 1, got shape {tuple(shape)}")
    if not batch == k_batch == v_batch:
        raise ValueError(f"q, k and v must have one batch size, got {batch[0]}, {k_batch[0]} and {v_batch[0]}")
    if k_width != d:
        raise ValueError(f"k must have q's head_dim {d}, got {k_width}")
    if hk != v_heads or m != v_tokens:
        raise ValueError(f"v must have k's heads and tokens {(hk, m)}, got {(v_heads, v_tokens)}")
    if h != hk and (hk == 0 or h % hk != 0):
        raise ValueError(f"the heads of q must be a multiple of those of k and v, got {h} and {hk}")
    if causal and n > m:
        raise ValueError(
            f"causal attention takes at most as many queries as keys, got n = {n} and m = {m} "
            "(query i sees keys up to i + m - n)"
        )


def _refuse_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, x.dtype)
    name, x = ("k", k) if k.dtype != q.dtype else ("v", v)
    raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")


def check_flag(name: str, value: object) -> None:
    """Checks `causal` or `mask`, which must be a bool."""
    if isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a bool (True = causal), got {describe(value)}; "
            "to leave out keys pass attention_mask, a bool tensor of shape (batch, keys)"
        )
    check_bool(name, value, " (True = causal)")


def check_bool(name: str, value: object, meaning: str = "") -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool{meaning}, got {describe(value)}")


def _number(name: str, value: object) -> float:
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a real number, got {describe(value)}")
        try:
            value = float(value)
        except OverflowError:  # an int or a Fraction that is too large
            raise ValueError(f"{name} must be finite as a float, got {describe(value)}") from None
    if not -math.inf < value < math.inf:  # math.isfinite does not take the symbolic floats of torch.compile
        raise ValueError(f"{name} must be finite, got {value}")
    if not -LARGEST_FLOAT <= value <= LARGEST_FLOAT:
        raise ValueError(f"{name} must be a number of float32, at most {LARGEST_FLOAT:.5g}, got {value}")
    return value


def check_positive(name: str, value: object) -> None:
    """Checks that a value is a finite number above 0."""
    if _number(name, value) <= 0.0:
        raise ValueError(f"{name} must be > 0, got {value}")


def check_not_negative(name: str, value: object) -> float:
    """Checks that a value is a finite number of at least 0; returns it as a float."""
    number = _number(name, value)
    if number < 0.0:
        raise ValueError(f"{name} must be >= 0, got {number}")
    return number


def check_count(name: str, value: object, least: int = 1, most: int = LARGEST_COUNT) -> None:
    """Checks that a value is an int from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {describe(value)}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {_SHORT.repr(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {_SHORT.repr(value)}")


def check_dtype(name: str, dtype: object) -> None:
    """Checks that a dtype is one that q, k and v may have."""
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        got = dtype if isinstance(dtype, torch.dtype) else describe(dtype)
        raise TypeError(f"{name} must be float64, float32, float16 or bfloat16, got {got}")


def check_device(device: Any) -> None:
    """Checks that a value is a device of PyTorch or None. Whether the device is there shows when memory is allocated."""
    if device is None or isinstance(device, torch.device):
        return
    accepted = 'device must be None, a torch.device, a name such as "cuda:0" or the index of an accelerator'
    if isinstance(device, bool) or not isinstance(device, (str, int)):
        raise TypeError(f"{accepted}, got {describe(device)}")
    try:
        torch.device(device)
    except (RuntimeError, ValueError) as error:  # a ValueError for large ints
        raise ValueError(f"{accepted}, got {describe(device)}") from error


def check_degree(p: Any) -> None:
    """Checks that p is 1 or 2."""
    if isinstance(p, bool) or not isinstance(p, Real) or p not in (1, 2):
        raise ValueError(f"p must be 1 or 2, got {describe(p)}")


def check_score(temperature: object, a0: object, a1: object, a2: object, p: Any) -> Score:
    """Checks the parameters of the polynomial; returns it."""
    temperature = _number("temperature", temperature)
    if temperature <= 0.0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    scale = 1.0 / temperature
    if scale > LARGEST_FLOAT:
        raise ValueError(f"temperature must be > 0 with an inverse of at most {LARGEST_FLOAT:.5g}, got {temperature}")
    check_degree(p)
    return Score(scale, _number("a0", a0), _number("a1", a1), _number("a2", a2), int(p))


def check_scale(scale: object, head_dim: int) -> float:
    """Checks and returns the factor of the scores of softmax attention; None becomes 1 / sqrt(head_dim)."""
    if scale is None:
        return head_dim**-0.5
    scale = _number("scale", scale)
    if scale <= 0.0:
        raise ValueError(f"scale must be > 0 or None (1 / sqrt(head_dim)), got {scale}")
    return scale


def is_over_sequence(normalize: object) -> bool:
    """Returns whether an option `normalize` divides rows by the longest row of their sequence."""
    return normalize in (True, "sequence")


def options_of_positions(options: dict) -> dict:
    """Returns the options that compare positions of queries and keys, where they are not their defaults."""
    return {name: options[name] for name, default in OF_POSITIONS.items() if options.get(name, default) != default}


def check_normalize(normalize: object, lim: object) -> str | None:
    """Checks `normalize` and `lim`; returns None, "sequence" or "token"."""
    if not isinstance(normalize, (bool, str)) or normalize not in NORMALIZE:
        raise ValueError(f'normalize must be False, True, "sequence" or "token", got {describe(normalize)}')
    check_positive("lim", lim)
    if normalize is False:
        if lim != DEFAULT_LIM:
            raise ValueError(f"lim has no effect without normalize, got lim = {lim} and normalize = False")
        return None
    return "sequence" if normalize is True else normalize


def check_drop_noise(drop_noise: Any, dropout: float, q: Tensor, dv: int) -> None:
    """Checks that drop_noise is None or a tensor of the output's shape, and has an effect."""
    if drop_noise is None:
        return
    if isinstance(drop_noise, bool) or (isinstance(drop_noise, Tensor) and drop_noise.dtype == torch.bool):
        raise TypeError(
            f"drop_noise must be a floating-point tensor of the output's shape or None, got {describe(drop_noise)}"
            f"{'' if isinstance(drop_noise, bool) else ' of torch.bool'}: a mask of keys is attention_mask, a bool tensor of "
            "shape (batch, keys); a causal mask is causal=True (of a module mask=True)"
        )
    _check_tensor("drop_noise", drop_noise, "a tensor of the output's shape or None")
    expected = (*q.shape[:-1], dv)
    if tuple(drop_noise.shape) != expected:
        raise ValueError(
            f"drop_noise must have the output's shape {tuple(expected)}, got {tuple(drop_noise.shape)}; masks are "
            "attention_mask and causal=True (of a module mask=True)"
        )
    if drop_noise.dtype not in DTYPES:
        raise TypeError(f"drop_noise must be floating point, got {drop_noise.dtype}")
    if drop_noise.device != q.device:
        raise ValueError(f"drop_noise must be on q's device {q.device}, got {drop_noise.device}")
    if dropout == 0.0:
        raise ValueError("drop_noise has no effect without dropout, which is its strength: got a drop_noise and dropout = 0")


def check_rpe_name(rpe_matrix: Any, why: str) -> None:
    """Checks that rpe_matrix is None or "sinusoidal"; `why` is the reason that no tensor is accepted."""
    if rpe_matrix is not None and not (isinstance(rpe_matrix, str) and rpe_matrix == "sinusoidal"):
        raise TypeError(f'rpe_matrix must be "sinusoidal" or None here, got {describe(rpe_matrix)}; {why}')


def check_rpe(rpe_matrix: Any, q: Tensor, k: Tensor) -> None:
    """Checks that rpe_matrix is None, "sinusoidal", or an (n + m - 1, d) tensor."""
    if rpe_matrix is None or (isinstance(rpe_matrix, str) and rpe_matrix == "sinusoidal"):
        return
    accepted = 'a tensor of shape (n + m - 1, head_dim), "sinusoidal" or None'
    if isinstance(rpe_matrix, bool):
        raise TypeError(
            f"rpe_matrix must be {accepted}, got {describe(rpe_matrix)}; a causal mask is causal=True "
            "(of a module mask=True, the argument after rpe_matrix)"
        )
    _check_tensor("rpe_matrix", rpe_matrix, accepted)
    n, m, d = q.shape[-2], k.shape[-2], q.shape[-1]
    if rpe_matrix.dim() != 2 or rpe_matrix.shape[0] != max(n + m - 1, 0) or rpe_matrix.shape[1] != d:
        raise ValueError(
            f"rpe_matrix must have shape (n + m - 1, head_dim) = ({n + m - 1}, {d}), got {tuple(rpe_matrix.shape)}"
        )
    if rpe_matrix.dtype != q.dtype:
        raise TypeError(f"rpe_matrix must have q's dtype {q.dtype}, got {rpe_matrix.dtype}")
    if rpe_matrix.device != q.device:
        raise ValueError(f"rpe_matrix must be on q's device {q.device}, got {rpe_matrix.device}")


def check_attention_mask(mask: Any, q: Tensor, k: Tensor) -> None:
    """Checks that a mask is None or a bool (batch, m) tensor. For 3-d q the batch must divide batch * heads of q and of k."""
    if mask is None:
        return
    _check_tensor("attention_mask", mask, "a bool tensor of shape (batch, keys) or None")
    if mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask must be bool (True = the key is attended), got {mask.dtype}; for a mask of 0 and -inf pass "
            "mask == 0"
        )
    if mask.device != q.device:
        raise ValueError(f"attention_mask must be on q's device {q.device}, got {mask.device}")
    m = k.shape[-2]
    if mask.dim() == 2 and mask.shape[1] == m:
        batch = mask.shape[0]
        if q.dim() == 4 and batch == q.shape[0]:
            return
        if q.dim() == 3 and (batch == k.shape[0] == 0 or (batch > 0 and k.shape[0] % batch == 0)):
            return
    accepted = (q.shape[0], m) if q.dim() == 4 else f"(batch, {m}) with a batch that divides {k.shape[0]}"
    raise ValueError(f"attention_mask must have shape {accepted}, got {tuple(mask.shape)}")


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    attention_mask: Any = None,
    log_decay: Any = None,
    log_input_gate: Any = None,
) -> None:
    """Checks the tensors that every attention function takes: q, k, v, attention_mask, log_decay and log_input_gate."""
    check_qkv(q, k, v, causal)
    check_attention_mask(attention_mask, q, k)
    check_log_decay(log_decay, q, k, causal)
    check_log_input_gate(log_input_gate, q, k, causal)


def check_algorithm(algorithm: object, rpe_matrix: Any) -> None:
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(map(repr, ALGORITHMS))}, got {describe(algorithm)}")
    if algorithm == "linear" and isinstance(rpe_matrix, Tensor):
        raise ValueError(
            'an rpe_matrix tensor has no linear algorithm: use algorithm="auto" or "quadratic", or rpe_matrix="sinusoidal"'
        )


def algorithm_without_state(algorithm: str) -> str:
    """Checks and returns the algorithm of packed sequences without causal, where a state of all keys would mix sequences."""
    if algorithm == "linear":
        raise ValueError(
            'cu_seqlens without causal has no linear algorithm: use algorithm="auto" or "quadratic", or causal=True'
        )
    return "quadratic"


def check_log_decay(log_decay: Any, q: Tensor, k: Tensor, causal: bool) -> None:
    """Checks that log_decay is None or a floating-point tensor of k's shape without head_dim, and that the call is causal."""
    if log_decay is None:
        return
    check_number_per_key("log_decay", log_decay, q, k)
    if not causal:
        raise ValueError("log_decay needs causal=True: weights decay with the tokens after each key, got causal = False")


def check_log_input_gate(log_input_gate: Any, q: Tensor, k: Tensor, causal: bool) -> None:
    """Checks that log_input_gate is None or a floating-point tensor of k's shape without head_dim, and that the call is
    causal."""
    if log_input_gate is None:
        return
    check_number_per_key("log_input_gate", log_input_gate, q, k)
    if not causal:
        raise ValueError("log_input_gate needs causal=True, got causal = False")


def check_number_per_key(name: str, x: Any, q: Tensor, k: Tensor) -> None:
    """Checks that x is a floating-point tensor of k's shape without head_dim, on q's device."""
    accepted = tuple(k.shape[:-1])
    _check_tensor(name, x, f"a tensor of shape {accepted} or None")
    if tuple(x.shape) != accepted:
        raise ValueError(f"{name} must have shape {accepted}, k's without the head_dim, got {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be float64, float32, float16 or bfloat16, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def check_exact_window(window: object) -> None:
    """Checks that an exact window is a number of tokens, 0 or more."""
    check_count("exact_window", window, least=0)


def check_exact_window_of(window: int, q: Tensor, k: Tensor, rpe_matrix: Any) -> None:
    """Checks that nothing in a call excludes an exact window."""
    if window == 0:
        return
    if isinstance(rpe_matrix, Tensor):
        raise ValueError(
            'exact_window takes no rpe_matrix tensor, which softmax attention has no place for: use rpe_matrix="sinusoidal"'
        )
    if q.shape[-2] > k.shape[-2]:
        raise ValueError(f"exact_window takes at most as many queries as keys, got n = {q.shape[-2]} and m = {k.shape[-2]}")


def check_window(window: object) -> tuple[int, int]:
    """Checks a window of `flash_attention`; returns its bounds (left, right), -1 for none."""
    accepted = (
        f"an int of at least 1, a tuple (left, right) of ints of at least -1 (no bound), at most {LARGEST_COUNT}, or None"
    )
    if window is None:
        return -1, -1
    sides = (window,) if isinstance(window, int) else window
    if not isinstance(sides, tuple) or any(isinstance(x, bool) or not isinstance(x, int) for x in sides):
        raise TypeError(f"window must be {accepted}, got {describe(window)}")
    if isinstance(window, int):
        if not 1 <= window <= LARGEST_COUNT:
            raise ValueError(f"window must be {accepted}, got {_SHORT.repr(window)}")
        return window - 1, window - 1
    if len(sides) != 2 or min(sides) < -1 or max(sides) > LARGEST_COUNT:
        raise ValueError(f"window must be {accepted}, got {describe(window)}")
    return sides


def check_cu_seqlens(cu_seqlens: Any, q: Tensor, k: Tensor, tokens: int | None = None) -> None:
    """Checks that cu_seqlens is None or an int32 (sequences + 1,) tensor. Its values are checked on a CPU only, where reading
    them needs no synchronisation.

    Args:
        tokens: number of tokens of all sequences, if q holds only a part of them; None: q holds all.
    """
    if cu_seqlens is None:
        return
    _check_tensor("cu_seqlens", cu_seqlens, "an int32 tensor of shape (sequences + 1,) or None")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens must be int32, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < (2 if (q.shape[-2] if tokens is None else tokens) > 0 else 1):
        raise ValueError(f"cu_seqlens must have shape (sequences + 1,), got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on q's device {q.device}, got {cu_seqlens.device}")
    if q.dim() == 4 and q.shape[0] != 1:
        raise ValueError(f"cu_seqlens takes a batch of one, whose tokens are all sequences end to end, got q of {q.shape[0]}")
    n, m = q.shape[-2], k.shape[-2]
    if n != m:
        raise ValueError(f"cu_seqlens takes as many queries as keys, got n = {n} and m = {m}")
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling() or in_functorch():
        return
    if isinstance(cu_seqlens, torch._subclasses.FakeTensor):
        return
    n = n if tokens is None else tokens
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != n or (cu_seqlens[1:] < cu_seqlens[:-1]).any():
        raise ValueError(f"cu_seqlens must go from 0 to n = {n} without falling, got {_SHORT.repr(cu_seqlens.tolist())}")


def check_parts(outputs: Any, lses: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Checks the arguments of `merge_attention`; returns them as tuples."""
    for name, parts in (("outputs", outputs), ("lses", lses)):
        if isinstance(parts, Tensor) or not isinstance(parts, Sequence):
            raise TypeError(f"{name} must be a sequence of tensors, got {describe(parts)}")
        for i, x in enumerate(parts):
            _check_tensor(f"{name}[{i}]", x, "a tensor")
    if len(outputs) == 0 or len(outputs) != len(lses):
        raise ValueError(f"outputs and lses must be as many, at least one, got {len(outputs)} and {len(lses)}")
    first = outputs[0]
    check_dtype("outputs[0]", first.dtype)
    lse_dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    for name, parts, shape, dtype in (
        ("outputs", outputs, first.shape, first.dtype),
        ("lses", lses, first.shape[:-1], lse_dtype),
    ):
        for i, x in enumerate(parts):
            if x.shape != shape:
                raise ValueError(f"{name}[{i}] must have shape {tuple(shape)}, got {tuple(x.shape)}")
            if x.dtype != dtype:
                raise TypeError(f"{name}[{i}] must be {dtype}, got {x.dtype}")
            if x.device != first.device:
                raise ValueError(f"{name}[{i}] must be on the device of outputs[0] {first.device}, got {x.device}")
    return tuple(outputs), tuple(lses)


_warned: set[tuple] = set()


def _warn_once(key: tuple, message: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warn(message)


# The compiler calls it while it traces. `torch.compiler.assume_constant_result` sets this too, but imports the compiler.
_warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined]


def warn_if_leaking(causal: bool, normalize: str | None) -> None:
    """Warns once if outputs of a causal call depend on later tokens."""
    if causal and normalize == "sequence":
        _warn_once(
            ("sequence",),
            'fastmax: with normalize="sequence" (or True) later tokens leak into the earlier outputs of a causal call, because '
            'all rows of a head are scaled by the longest of them; normalize="token" scales each row by itself.',
        )


def warn_if_vanishing(score: Score, normalize: str | None, lim: float, rpe: bool) -> None:
    """Warns once per configuration if f is not positive for every score that the settings allow."""
    radius = float("inf") if normalize is None or rpe else lim * lim * score.scale
    if score.minimum(radius) > 0.0:
        return
    safe = (
        "p = 2 is safe for every input when a2 > 0 and a1^2 < 4 a0 a2 (the default); p = 1 is safe with "
        f"normalize when a0 > |a1| lim^2 / temperature = {abs(score.a1) * lim * lim * score.scale:g}"
    )
    _warn_once(
        (score, normalize, lim, rpe),
        f"fastmax: f(s) = a0 + a1 s{' + a2 s^2' if score.order == 2 else ''} with a0 = {score.a0:g}, a1 = {score.a1:g}"
        f"{f', a2 = {score.a2:g}' if score.order == 2 else ''} is not positive on the range of s that these settings allow, "
        f"so a denominator can vanish. {safe}.",
    )
