"""`split_heads` and `join_heads`: the parts of a self-attention layer before and after attention, and their gradients.
`rotary_factors`: what the first rotates q and k by.

`fastmax.eager.heads` has the definitions. The backward computes the convolution and the statistics of the norms again, so that
only arguments are saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fastmax import eager
from fastmax.eager import heads as rows
from fastmax.ops import checks as operator_checks
from fastmax.ops import extension
from fastmax.ops.autocast import without_autocast
from fastmax.ops.autograd import Recomputed, compute, refuse_second_derivative, register_gradient
from fastmax.ops.registration import register

MAX_CONVOLUTION = 8  # tokens
_MULTIPLE = 8  # of head dims
_MAX_CHANNELS = (2**31 - 1) // MAX_CONVOLUTION


def split_heads(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v of the tokens of a projection; see `fastmax.eager.heads.split_heads`."""
    tensors = qkv, recent, conv_weight, q_weight, k_weight, cos, sin, places
    return compute(_SPLIT, tensors, (heads, kv_heads, head_dim, q_eps, k_eps))


def join_heads(o: Tensor, norm_weight: Tensor | None, gate: Tensor | None, eps: float) -> Tensor:
    """Returns the heads of the output side by side; see `fastmax.eager.heads.join_heads`."""
    return compute(_JOIN, (o, norm_weight, gate), (eps,))


def rotary_factors(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cosines and signed sines of rotary angles, float32 or float64; see `fastmax.eager.heads.rotary_factors`."""
    if eager.is_transformed():
        return rows.rotary_factors(positions, half, base, dtype)
    return _ROTARY(positions, half, base, dtype == torch.float64)


def fuses_split_heads(qkv: Tensor, head_dim: int, value_dim: int, *weights: Tensor | None) -> bool:
    """Returns whether a kernel computes `split_heads` with a convolution of at most `MAX_CONVOLUTION` tokens."""
    return (
        extension.expects_kernels(qkv)
        and _are_plain(qkv, *weights)
        and all([x is None or x.dtype in (qkv.dtype, torch.float32) for x in weights])
        and _split_fits(qkv, head_dim, value_dim)
    )


def fuses_join_heads(o: Tensor, norm_weight: Tensor | None, gate: Tensor | None) -> bool:
    """Returns whether a kernel computes `join_heads`."""
    return (
        extension.expects_kernels(o)
        and _are_plain(o, norm_weight, gate)
        and (norm_weight is None or norm_weight.dtype in (o.dtype, torch.float32))
        and (gate is None or gate.dtype == o.dtype)
        and _join_fits(o)
    )


def _are_plain(*tensors: Tensor | None) -> bool:
    """Returns whether no tensor is of a subclass, which may give operations another meaning."""
    return all([x is None or type(x) in (Tensor, torch.nn.Parameter) for x in tensors])


def _split_fits(qkv: Tensor, head_dim: int, value_dim: int) -> bool:
    is_small = qkv.shape[1] <= extension.MAX_TOKENS and qkv.shape[2] <= _MAX_CHANNELS
    return is_small and _fits(head_dim) and _fits(value_dim)


def _join_fits(o: Tensor) -> bool:
    return o.shape[2] <= extension.MAX_TOKENS and o.shape[1] * o.shape[3] <= _MAX_CHANNELS and _fits(o.shape[3])


def _fits(head_dim: int) -> bool:
    return head_dim % _MULTIPLE == 0 and head_dim <= extension.MAX_HEAD_DIM


# ---- split_heads

_SPLIT_ARGUMENTS = (
    "Tensor qkv, Tensor? recent, Tensor? conv_weight, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin, "
    "Tensor? places, int heads, int kv_heads, int head_dim, float q_eps, float k_eps"
)


def _split_heads(
    qkv: Tensor,
    recent: Tensor | None,
    conv_weight: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    operator_checks.check_split_heads(qkv, recent, conv_weight, q_weight, k_weight, *rest)
    with without_autocast(qkv):
        results = rows.split_heads(qkv, recent, conv_weight, q_weight, k_weight, *rest)
        # Results of an operator are contiguous, and share no memory with each other or with its arguments.
        views = [weight is None and rest[0] is None for weight in (q_weight, k_weight)] + [True]
        return tuple([
            x.clone(memory_format=torch.contiguous_format) if view else x.contiguous()
            for x, view in zip(results, views, strict=True)
        ])  # fmt: skip


def _fake_split_heads(
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
    *eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    b, n, channels = qkv.shape
    value_dim = rows.value_dim_of(channels, heads, kv_heads, head_dim)
    return (
        qkv.new_empty(b, n, heads, head_dim),
        qkv.new_empty(b, n, kv_heads, head_dim),
        qkv.new_empty(b, n, kv_heads, value_dim),
    )


def _split_heads_backward(
    grad_q_rows: Tensor | None, grad_k_rows: Tensor | None, grad_v_rows: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    """Returns the gradients of the first five arguments; no elements for those that are None."""
    grads, qkv = (grad_q_rows, grad_k_rows, grad_v_rows), arguments[0]
    operator_checks.check_split_heads(*arguments)
    operator_checks.check_gradients_of_heads(grads, qkv, *arguments[8:11])
    with without_autocast(qkv):
        return _without_none(rows.split_heads_backward(grads, *arguments), qkv)


def _without_none(gradients: Iterable[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    return tuple([like.new_empty(0) if x is None else x for x in gradients])


def _fake_split_heads_backward(
    grad_q_rows: Tensor | None, grad_k_rows: Tensor | None, grad_v_rows: Tensor | None, qkv: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    return _without_none([None if x is None else x.new_empty(x.shape) for x in (qkv, *arguments[:4])], qkv)


def _covers_split_heads(
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
    *eps: float,
) -> bool:
    if qkv.dim() != 3 or not extension.kernels_run_on(qkv) or kv_heads < 1:
        return False
    if conv_weight is not None and (conv_weight.dim() != 3 or conv_weight.shape[2] > MAX_CONVOLUTION):
        return False
    return _split_fits(qkv, head_dim, rows.value_dim_of(qkv.shape[2], heads, kv_heads, head_dim))


def _covers_split_heads_backward(
    grad_q_rows: Tensor | None, grad_k_rows: Tensor | None, grad_v_rows: Tensor | None, *arguments: Any
) -> bool:
    return _covers_split_heads(*arguments)


_SPLIT = Recomputed(
    register(
        f"split_heads({_SPLIT_ARGUMENTS}) -> (Tensor q_rows, Tensor k_rows, Tensor v_rows)",
        _split_heads,
        _fake_split_heads,
        covers=_covers_split_heads,
    ),
    register(
        f"split_heads_backward(Tensor? grad_q_rows, Tensor? grad_k_rows, Tensor? grad_v_rows, {_SPLIT_ARGUMENTS}) "
        "-> (Tensor grad_qkv, Tensor grad_recent, Tensor grad_conv_weight, Tensor grad_q_weight, Tensor grad_k_weight)",
        _split_heads_backward,
        _fake_split_heads_backward,
        covers=_covers_split_heads_backward,
    ),
    tensors=8,
    differentiable=5,
)
register_gradient(_SPLIT, refuse_second_derivative)


# ---- join_heads


def _join_heads(o: Tensor, norm_weight: Tensor | None, gate: Tensor | None, eps: float) -> Tensor:
    operator_checks.check_join_heads(o, norm_weight, gate, eps)
    with without_autocast(o):
        y = rows.join_heads(o, norm_weight, gate, eps)
        is_view = norm_weight is None and gate is None
        return y.clone(memory_format=torch.contiguous_format) if is_view else y.contiguous()


def _fake_join_heads(o: Tensor, norm_weight: Tensor | None, gate: Tensor | None, eps: float) -> Tensor:
    return o.new_empty(o.shape[0], o.shape[2], o.shape[1] * o.shape[3])


def _join_heads_backward(
    grad_y: Tensor, o: Tensor, norm_weight: Tensor | None, gate: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    """Returns the gradients of o, norm_weight and gate; no elements for those that are None."""
    operator_checks.check_join_heads(o, norm_weight, gate, eps)
    operator_checks.check_gradient_of_joined(grad_y, o)
    with without_autocast(o):
        return _without_none(rows.join_heads_backward(grad_y, o, norm_weight, gate, eps), o)


def _fake_join_heads_backward(
    grad_y: Tensor, o: Tensor, norm_weight: Tensor | None, gate: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    of_others = [None if x is None else x.new_empty(x.shape) for x in (norm_weight, gate)]
    return eager.empty_like_layout(o, o.shape[-1]), *_without_none(of_others, o)


def _covers_join_heads(o: Tensor, norm_weight: Tensor | None, gate: Tensor | None, eps: float) -> bool:
    return o.dim() == 4 and extension.kernels_run_on(o) and _join_fits(o)


_JOIN = Recomputed(
    register(
        "join_heads(Tensor o, Tensor? norm_weight, Tensor? gate, float eps) -> (Tensor y)",
        _join_heads,
        _fake_join_heads,
        covers=_covers_join_heads,
    ),
    register(
        "join_heads_backward(Tensor grad_y, Tensor o, Tensor? norm_weight, Tensor? gate, float eps) "
        "-> (Tensor grad_o, Tensor grad_norm_weight, Tensor grad_gate)",
        _join_heads_backward,
        _fake_join_heads_backward,
        covers=lambda grad_y, *arguments: _covers_join_heads(*arguments),
    ),
    tensors=3,
    differentiable=3,
)
register_gradient(_JOIN, refuse_second_derivative)


# ---- rotary_factors

_MAX_ANGLES = extension.MAX_HEAD_DIM // 2


def _rotary_factors(positions: Tensor, half: int, base: float, wide: bool) -> tuple[Tensor, Tensor]:
    operator_checks.check_rotary_factors(positions, half, base)
    return rows.rotary_factors(positions, half, base, torch.float64 if wide else torch.float32)


def _fake_rotary_factors(positions: Tensor, half: int, base: float, wide: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if wide else torch.float32
    cos, sin = (positions.new_empty((*positions.shape, 1, 2 * half), dtype=dtype) for _ in range(2))
    return cos, sin


def _covers_rotary_factors(positions: Tensor, half: int, base: float, wide: bool) -> bool:
    is_index = positions.dim() in (1, 2) and positions.dtype in (torch.int32, torch.int64)
    return is_index and not wide and half <= _MAX_ANGLES and extension.device_has_kernels(positions)


_ROTARY = register(
    "rotary_factors(Tensor positions, int half, float base, bool wide) -> (Tensor cos, Tensor sin)",
    _rotary_factors,
    _fake_rotary_factors,
    covers=_covers_rotary_factors,
)
