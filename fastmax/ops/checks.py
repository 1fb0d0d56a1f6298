"""Checks of the arguments of the operators `torch.ops.fastmax` in the PyTorch implementation.

They are for direct calls of the operators, because the public functions check their own arguments. `csrc/bindings/checks.h` has
the same rules for CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastmax.core import validation
from fastmax.core.call import ACCOMPANYING, PER_HEAD, Call
from fastmax.core.score import Softmax
from fastmax.eager import States, compute_dtype, state_rows, sums_dtype
from fastmax.eager.heads import value_dim_of


def check_call(q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
    """Checks the inputs of a forward or a backward."""
    if q.dim() != 4:
        raise ValueError(f"q must be 4-dimensional, got {q.dim()} dimensions")
    validation.check_qkv(q, k, v, call.causal)
    validation.check_attention_mask(call.attention_mask, q, k)
    if not 0.0 < call.score.scale < math.inf:
        raise ValueError(f"scale must be finite and > 0, got {call.score.scale}")
    sizes = {"b": k.shape[0], "hk": k.shape[1], "m": k.shape[2], "n": q.shape[2]}
    for name in PER_HEAD:
        tensor = ACCOMPANYING[name]
        shape = [sizes[axis] for axis in tensor.axes.split()]
        _check_tensor(name, getattr(call, name), shape, tensor.dtype or compute_dtype(q.dtype), q)
    for name, tensor in ACCOMPANYING.items():
        if tensor.needs_causal and not call.causal and getattr(call, name) is not None:
            raise ValueError(f"{name} needs causal=True, got causal={call.causal}")
    for name in ("left", "right"):
        if getattr(call, name) < -1:
            raise ValueError(f"{name} must be at least -1 (no bound), got {getattr(call, name)}")
    if isinstance(call.score, Softmax):
        return
    if call.score.order not in (1, 2):
        raise ValueError(f"p must be 1 or 2, got {call.score.order}")
    validation.check_drop_noise(call.drop_noise, call.dropout, q, v.shape[-1])
    validation.check_rpe(call.rpe_matrix, q, k)
    validation.check_algorithm(call.algorithm, None)  # a call with an rpe matrix is quadratic whatever `algorithm` is


def _check_tensor(name: str, x: Tensor | None, shape: Sequence[int], dtype: torch.dtype, q: Tensor, like: str = "q") -> None:
    """Checks shape, dtype and device of a tensor, if it is not None; `like` is the name of q in messages."""
    if x is None:
        return
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on {like}'s device {q.device}, got {x.device}")


def check_exact_window(q: Tensor, k: Tensor, call: Call) -> None:
    """Checks the exact window of a call."""
    if call.exact_window < 1:
        raise ValueError(f"exact_window must be at least 1, got {call.exact_window}")
    validation.check_exact_window_of(call.exact_window, q, k, None)


def check_merge(o: Tensor, lse: Tensor, o_global: Tensor, z_global: Tensor) -> None:
    """Checks the arguments of `merge_`."""
    if o.dim() != 4:
        raise ValueError(f"o must be 4-dimensional, got {o.dim()} dimensions")
    dtype = compute_dtype(o.dtype)
    _check_tensor("lse", lse, o.shape[:3], dtype, o, "o")
    _check_tensor("o_global", o_global, o.shape, o.dtype, o, "o")
    _check_tensor("z_global", z_global, o.shape[:3], dtype, o, "o")
    for name, x, written, read in (("o_global", "o", o, o_global), ("z_global", "lse", lse, z_global)):
        if written.untyped_storage().data_ptr() == read.untyped_storage().data_ptr() and read.numel() > 0:
            raise ValueError(f"{name} must not share memory with {x}, which is written over")


def check_parts(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> None:
    """Checks the parts that `merge_parts` takes."""
    if first.dim() != 4:
        raise ValueError(f"first must be 4-dimensional, got {first.dim()} dimensions")
    _check_tensor("second", second, first.shape, first.dtype, first, "first")
    for name, lse in (("first_lse", first_lse), ("second_lse", second_lse)):
        _check_tensor(name, lse, first.shape[:3], compute_dtype(first.dtype), first, "first")


def check_normalization(q: Tensor, k: Tensor, lim: float) -> None:
    """Checks the arguments of `normalize_tokens`."""
    if q.dim() != 4:
        raise ValueError(f"q must be 4-dimensional, got {q.dim()} dimensions")
    _check_floating("q", q)
    shape = (q.shape[0], *k.shape[1:3], q.shape[3]) if k.dim() == 4 else q.shape
    _check_tensor("k", k, shape, q.dtype, q)
    if not 0.0 < lim < math.inf:
        raise ValueError(f"lim must be finite and > 0, got {lim}")


def check_normalized(name: str, x: Tensor, grad: Tensor | None, factor: Tensor) -> None:
    """Checks the gradient and the factors of a normalised tensor x, which is already checked."""
    _check_tensor(f"grad_{name}", grad, x.shape, x.dtype, x, name)
    _check_tensor(f"{name}_factor", factor, x.shape[:3], compute_dtype(x.dtype), x, name)


def check_split_heads(
    qkv: Tensor,
    recent: Tensor | None,
    conv_weight: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    places: Tensor | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_eps: float,
    k_eps: float,
) -> None:
    """Checks the arguments of `split_heads`."""
    if qkv.dim() != 3:
        raise ValueError(f"qkv must be 3-dimensional, got {qkv.dim()} dimensions")
    _check_floating("qkv", qkv)
    b, n, channels = qkv.shape
    for name, size in (("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    values = channels - (heads + kv_heads) * head_dim
    if values <= 0 or values % kv_heads != 0:
        raise ValueError(
            "qkv must have (heads + kv_heads) * head_dim channels and a positive multiple of kv_heads more, got "
            f"{channels} for {heads}, {kv_heads} and {head_dim}"
        )
    width = 1
    if conv_weight is not None:
        if conv_weight.dim() != 3:
            raise ValueError(f"conv_weight must be 3-dimensional, got {conv_weight.dim()} dimensions")
        width = conv_weight.shape[2]
        if width < 1:
            raise ValueError(f"conv_weight must have a width of at least 1, got {width}")
    else:
        for name, x in (("recent", recent), ("places", places)):
            if x is not None:
                raise ValueError(f"{name} needs conv_weight, got None with {name} of shape {tuple(x.shape)}")
    _check_weight("conv_weight", conv_weight, (channels, 1, width), qkv, "qkv")
    _check_weight("q_weight", q_weight, (head_dim,), qkv, "qkv")
    _check_weight("k_weight", k_weight, (head_dim,), qkv, "qkv")
    _check_tensor("recent", recent, (b, width - 1, channels), qkv.dtype, qkv, "qkv")
    if places is not None:
        _check_index("places", places)
        _check_tensor("places", places, (n,), places.dtype, qkv, "qkv")
    check_together("cos", "sin", cos, sin)
    if cos is not None:
        if cos.dim() not in (3, 4):
            raise ValueError(f"cos must be 3- or 4-dimensional, got {cos.dim()} dimensions")
        rotated = cos.shape[-1]
        for name, x in (("cos", cos), ("sin", sin)):
            shape = (n, 1, rotated) if cos.dim() == 3 else (b, n, 1, rotated)
            _check_tensor(name, x, shape, compute_dtype(qkv.dtype), qkv, "qkv")
        if rotated % 2 != 0 or rotated > head_dim:
            raise ValueError(f"cos must have an even number of channels up to head_dim {head_dim}, got {rotated}")
    for name, eps in (("q_eps", q_eps), ("k_eps", k_eps)):
        _check_eps(name, eps)


def check_rotary_factors(positions: Tensor, half: int, base: float) -> None:
    """Checks the arguments of `rotary_factors`."""
    if positions.dim() not in (1, 2):
        raise ValueError(f"positions must be 1- or 2-dimensional, got {positions.dim()} dimensions")
    _check_index("positions", positions)
    if half < 1:
        raise ValueError(f"half must be at least 1, got {half}")
    if not 0.0 < base < math.inf:
        raise ValueError(f"base must be finite and > 0, got {base}")


def check_gradients_of_heads(grads: tuple[Tensor | None, ...], qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> None:
    """Checks the gradients of q, k and v of a call of `split_heads` whose arguments are already checked."""
    b, n, channels = qkv.shape
    value_dim = value_dim_of(channels, heads, kv_heads, head_dim)
    sizes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)
    for name, grad, size in zip(("grad_q_rows", "grad_k_rows", "grad_v_rows"), grads, sizes, strict=True):
        _check_tensor(name, grad, (b, n, *size), qkv.dtype, qkv, "qkv")


def check_join_heads(o: Tensor, norm_weight: Tensor | None, gate: Tensor | None, eps: float) -> None:
    """Checks the arguments of `join_heads`."""
    check_output(o)
    b, h, n, dv = o.shape
    _check_weight("norm_weight", norm_weight, (dv,), o, "o")
    _check_tensor("gate", gate, (b, n, h * dv), o.dtype, o, "o")
    _check_eps("eps", eps)


def check_gradient_of_joined(grad_y: Tensor, o: Tensor) -> None:
    """Checks the gradient of a result of `join_heads` whose arguments are already checked."""
    _check_tensor("grad_y", grad_y, (o.shape[0], o.shape[2], o.shape[1] * o.shape[3]), o.dtype, o, "o")


def _check_weight(name: str, x: Tensor | None, shape: Sequence[int], like: Tensor, like_name: str) -> None:
    """Checks a learned weight, which may have float32 beside tokens of another dtype."""
    if x is None:
        return
    _check_tensor(name, x, shape, x.dtype, like, like_name)
    if x.dtype not in (like.dtype, torch.float32):
        raise TypeError(f"{name} must be float32 or have {like_name}'s dtype {like.dtype}, got {x.dtype}")


def _check_floating(name: str, x: Tensor) -> None:
    if x.dtype not in validation.DTYPES:
        raise TypeError(f"{name} must be float64, float32, float16 or bfloat16, got {x.dtype}")


def _check_index(name: str, x: Tensor) -> None:
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {x.dtype}")


def _check_eps(name: str, eps: float) -> None:
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"{name} must be finite and >= 0, got {eps}")


def check_tokens_of_state(q: Tensor, k: Tensor) -> None:
    """Checks the number of tokens of a call with a state; q, k and v are already checked."""
    if q.shape[1] == 0:
        raise ValueError("q must have at least one head")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"k and v must have q's number of tokens {q.shape[2]}, got {k.shape[2]}")


def check_state(q: Tensor, k: Tensor, v: Tensor, order: int, **state: Tensor) -> None:
    """Checks kv_state and k_sum, given as keywords, of a prefill whose q, k and v are already checked."""
    check_tokens_of_state(q, k)
    b, hk, _, d = k.shape
    rows = state_rows(d, order)
    for (name, x), shape in zip(state.items(), ((b, hk, rows, v.shape[3]), (b, hk, rows)), strict=True):
        _check_tensor(name, x, shape, compute_dtype(q.dtype), q)


def check_together(first_name: str, second_name: str, first: Tensor | None, second: Tensor | None) -> None:
    """Checks that both or none of two tensors are given."""
    if (first is None) != (second is None):
        raise ValueError(f"{first_name} and {second_name} must be given together")


def check_output(o: Tensor) -> None:
    """Checks the output of a call without q."""
    if o.dim() != 4:
        raise ValueError(f"o must be 4-dimensional, got {o.dim()} dimensions")
    _check_floating("o", o)


def check_gradients_of_sums(q: Tensor, v: Tensor, g: Tensor, e: Tensor) -> None:
    """Checks g and e of a call whose q and v are already checked."""
    _check_tensor("g", g, (*q.shape[:3], v.shape[3]), sums_dtype(q.dtype), q)
    _check_tensor("e", e, q.shape[:3], compute_dtype(q.dtype), q)


def check_pairs(q: Tensor, k: Tensor, log_decay: Tensor | None, pairs: Tensor | None, pairs_of_states: Tensor | None) -> None:
    """Checks the pair sums of the queries and of the states, which the gradient of log_decay needs."""
    if log_decay is None:
        return
    if pairs is None or pairs_of_states is None:
        raise ValueError("the gradient of log_decay needs pairs and pairs_of_states")
    _check_tensor("pairs", pairs, q.shape[:3], compute_dtype(q.dtype), q)
    _check_tensor("pairs_of_states", pairs_of_states, (*k.shape[:2], 2), torch.float64, q)


def check_saved(k: Tensor, saved: Tensor) -> None:
    """Checks that there are no saved intermediate states, which PyTorch operations cannot continue from."""
    if saved.device != k.device:
        raise ValueError(f"saved must be on k's device {k.device}, got {saved.device}")
    if saved.dtype != torch.uint8 or saved.dim() != 3 or saved.shape[:2] != k.shape[:2]:
        raise ValueError(f"saved must be contiguous uint8 (b, hk, bytes), got {saved.dtype} {tuple(saved.shape)}")
    if saved.numel() > 0:
        raise ValueError(
            f"saved must be what state_of_keys or state_of_queries saved of the same tokens, 0 bytes, got {saved.numel()}"
        )


def check_states(q: Tensor, states: States, log_decay: Tensor | None) -> None:
    """Checks the new state and its gradients of a prefill's backward; the given state is already checked."""
    for prefix, tensors in (("new_", states.new), ("grad_new_", states.grads)):
        for name, x, given in zip(("kv_state", "k_sum"), tensors, states.given, strict=True):
            _check_tensor(prefix + name, x, given.shape, given.dtype, q)
    if log_decay is not None and any(x is not None for x in states.grads) and any(x is None for x in states.new):
        raise ValueError("the gradient of log_decay needs new_kv_state and new_k_sum beside their gradients")


def check_results(q: Tensor, v: Tensor, **tensors: Tensor | None) -> None:
    """Checks results of the forward and their gradients: o and grad_o have the shape of the output, others (b, h, n)."""
    for name, x in tensors.items():
        if x is None:
            continue
        is_output = name in ("o", "grad_o")
        shape = (*q.shape[:3], v.shape[3]) if is_output else q.shape[:3]
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
        if is_output and x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
