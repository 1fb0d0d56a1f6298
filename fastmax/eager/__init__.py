"""The operator in PyTorch operations, on any device: forward, analytic backward, and a forward that autograd can record."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastmax.eager import flash, linear, quadratic
from fastmax.eager.blocks import (
    Gradients,
    Operands,
    Span,
    compute_dtype,
    differentiating,
    from_blocks,
    head_groups,
    in_functorch,
    is_transformed,
    recording,
    to_blocks,
)
from fastmax.eager.recurrent import decode_step, decode_step_
from fastmax.eager.workspace import Workspace
from fastmax.planner import LinearPlan, QuadraticPlan, choose_algorithm, plan_linear, plan_quadratic
from fastmax.score import Score, Softmax, reciprocal

__all__ = [
    "backward",
    "compute_dtype",
    "decode_step",
    "decode_step_",
    "differentiating",
    "empty_like_layout",
    "flash_backward",
    "flash_forward",
    "forward",
    "forward_from_state",
    "in_functorch",
    "is_transformed",
    "recording",
]


def _token_major(x: Tensor) -> bool:
    return x.stride(1) < x.stride(2)


def empty_like_layout(x: Tensor, channels: int, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised (b, h, n, channels), token-major in memory, as (b, n, h, channels), where x is, else contiguous."""
    b, h, n, _ = x.shape
    if _token_major(x):
        return x.new_empty(b, n, h, channels, dtype=dtype).transpose(1, 2)
    return x.new_empty(b, h, n, channels, dtype=dtype)


def _plan(q: Tensor, k: Tensor, v: Tensor, rpe: Tensor | None, score: Score, causal: bool, algorithm: str, whole: bool):
    """The algorithm's module and its plan; `whole` keeps all heads in one group."""
    (b, _, n, d), (_, hk, m, _), dv = q.shape, k.shape, v.shape[3]
    group = _group_size(q, k)
    if rpe is not None:
        algorithm = "quadratic"
    elif algorithm == "auto":
        algorithm = choose_algorithm(n, m, d, dv, causal, score.order, group)
    if algorithm == "quadratic":
        return quadratic, _plan_quadratic(q, k, whole)
    plan = plan_linear(q.device, b * hk, group, d, dv, score.order)
    return linear, plan._replace(heads=b * hk) if whole else plan


def _plan_quadratic(q: Tensor, k: Tensor, whole: bool) -> QuadraticPlan:
    (b, _, n, _), (_, hk, m, _) = q.shape, k.shape
    plan = plan_quadratic(q.device, b * hk, _group_size(q, k), n, m)
    return plan._replace(heads=b * hk) if whole else plan


def _group_size(q: Tensor, k: Tensor) -> int:
    """Query heads a kv head; 1 where there are none."""
    return max(1, q.shape[1] // max(1, k.shape[1]))


def _five(x: Tensor, kv_heads: int) -> Tensor:
    """(b, h, tokens, c) -> (b, kv_heads, h // kv_heads, tokens, c)."""
    return x.unflatten(1, (kv_heads, -1))


def _group(q, k, v, mask, rpe, score, causal, batch: slice, heads: slice) -> Operands:
    hk = k.shape[1]
    q, k, v = (_five(x, hk)[batch, heads] for x in (q, k, v))
    return Operands(q, k, v, None if mask is None else mask[batch], rpe, score, causal)


class _Parts:
    """A sink that keeps the outputs and joins them at the end, as autograd wants it."""

    def __init__(self, ops: Operands, finish: Callable):
        self._like = ops.q
        self._finish = finish
        self._parts: list[tuple[Tensor, Tensor]] = []

    def __call__(self, span: Span, sums: tuple[Tensor, ...]) -> None:
        self._parts.append(self._finish(*(from_blocks(x, span, self._like) for x in sums)))

    def join(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Output in q's dtype and layout, denominators or what `finish` gives for them; there is at least one query."""
        o, z = (torch.cat(parts, dim=3).flatten(1, 2) for parts in zip(*self._parts, strict=True))
        o = o.to(q.dtype)
        if _token_major(q):
            o = o.transpose(1, 2).contiguous().transpose(1, 2)
        return o, z.squeeze(-1)


def forward_from_state(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, score: Score, values: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention of n tokens that continue from a state, by the linear algorithm: output, values, weights.

    `values` (b, hk, features, dv) and `weights` (b, hk, features) as in `fastmax.DecodeState`.
    """
    (b, _, n, d), (_, hk, _, dv) = q.shape, v.shape
    if b == 0 or n == 0:
        return empty_like_layout(q, dv), values, weights
    plan = plan_linear(q.device, b * hk, q.shape[1] // hk, d, dv, score.order)._replace(heads=b * hk)
    workspace = None if recording(q, k, v, values, weights) else Workspace(values.dtype, q.device)
    ops = _group(q, k, v, mask, None, score, True, slice(None), slice(None))
    parts = _Parts(ops, _divide)
    state = linear.unpack_state(values.flatten(0, 1), weights.flatten(0, 1), d, score.order)
    state = linear.forward(ops, plan, parts, workspace, state)
    values, weights = linear.pack_state(state, d)
    return parts.join(q)[0], values.unflatten(0, (b, hk)), weights.unflatten(0, (b, hk))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    noise: Tensor | None,
    rpe: Tensor | None,
    score: Score,
    causal: bool,
    dropout: float,
    algorithm: str,
    differentiable: bool,
) -> tuple[Tensor, Tensor]:
    """Output (b, h, n, dv) in q's dtype and layout, denominators (b, h, n) in the compute dtype.

    `differentiable` keeps to operations that autograd can record; otherwise large temporaries are written in place.
    """
    module, plan = _plan(q, k, v, rpe, score, causal, algorithm, whole=differentiable)
    o, z = _attend(module, plan, _divide, 0.0, q, k, v, mask, rpe, score, causal, differentiable)
    if noise is None:
        return o, z
    return (torch.addcmul(o, o, noise, value=dropout) if differentiable else o.addcmul_(o, noise, value=dropout)), z


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, score: Softmax, causal: bool, differentiable: bool
) -> tuple[Tensor, Tensor]:
    """Softmax attention: output (b, h, n, dv) in q's dtype and layout, log-sum-exp (b, h, n) in the compute dtype."""
    plan = _plan_quadratic(q, k, whole=differentiable)
    return _attend(flash, plan, flash.finish, float("-inf"), q, k, v, mask, None, score, causal, differentiable)


def _divide(numerator: Tensor, z: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output and what is kept beside it."""
    return torch.mul(numerator, reciprocal(z), out=out), z


def _attend(
    module,
    plan: QuadraticPlan | LinearPlan,
    finish: Callable[..., tuple[Tensor, Tensor]],
    nothing: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rpe: Tensor | None,
    score: Score | Softmax,
    causal: bool,
    differentiable: bool,
) -> tuple[Tensor, Tensor]:
    """`module.forward` on one head group after the other; `finish` makes the two outputs of its sums, `nothing` is the second
    of a query without keys."""
    o = empty_like_layout(q, v.shape[-1])
    z = q.new_full(q.shape[:3], nothing, dtype=compute_dtype(q.dtype))
    if o.numel() == 0 or k.numel() == 0:
        o.zero_()
        zero = sum(x.flatten()[:0].sum() for x in (q, k, v))  # part of the graph
        return (o + zero, z + zero) if differentiable else (o, z)
    hk = k.shape[1]
    if differentiable:
        ops = _group(q, k, v, mask, rpe, score, causal, slice(None), slice(None))
        parts = _Parts(ops, finish)
        module.forward(ops, plan, parts, None)
        return parts.join(q)
    workspace = Workspace(z.dtype, q.device)
    for batch, heads in head_groups(k.shape[0], hk, plan.heads):
        ops = _group(q, k, v, mask, rpe, score, causal, batch, heads)
        o_group, z_group = _five(o, hk)[batch, heads], _five(z.unsqueeze(-1), hk)[batch, heads]

        def write(span: Span, sums: tuple[Tensor, ...], like=ops.q, o_group=o_group, z_group=z_group):
            rows = slice(span.start, span.stop)
            sums = (from_blocks(x, span, like) for x in sums)
            z_group[:, :, :, rows] = finish(*sums, out=o_group[:, :, :, rows])[1]

        module.forward(ops, plan, write, workspace)
    return o, z


def backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    z: Tensor,
    mask: Tensor | None,
    noise: Tensor | None,
    rpe: Tensor | None,
    score: Score,
    causal: bool,
    dropout: float,
    algorithm: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in their dtypes and layouts, and of rpe (empty when there is none).

    With g_i = grad_i / z_i and e_i = -(grad_o_i . o_i) / z_i the derivative of the loss by the weight w_ij is
    `u_ij = g_i . v_j + e_i`; everything else follows from `w_ij = f(s_ij)`.
    """
    module, plan = _plan(q, k, v, rpe, score, causal, algorithm, whole=False)
    grad_rpe = q.new_zeros(0) if rpe is None else torch.zeros_like(rpe, dtype=z.dtype)
    rows = {"grad_o": grad_o, "o": o, "z": z.unsqueeze(-1)}
    if noise is not None:
        rows["noise"] = noise

    def g_e(grad_o: Tensor, o: Tensor, z: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """g and e of a block of queries; zero where a query sees no key."""
        inverse = reciprocal(z)
        e = -(grad_o * o).sum(-1, keepdim=True) * inverse
        if noise is not None:
            grad_o = torch.addcmul(grad_o, grad_o, noise, value=dropout)
        return grad_o * inverse, e

    grads = _gradients(module, plan, rows, g_e, q, k, v, mask, rpe, grad_rpe, score, causal)
    return (*grads, grad_rpe if rpe is None else grad_rpe.to(rpe.dtype))


def flash_backward(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    score: Softmax,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in their dtypes and layouts; `grad_lse` of a query that sees no key is not read."""
    rows = {"grad_o": grad_o, "o": o, "lse": lse.unsqueeze(-1)}
    if grad_lse is not None:
        rows["grad_lse"] = grad_lse.unsqueeze(-1)
    return _gradients(
        flash, _plan_quadratic(q, k, whole=False), rows, flash.row_terms, q, k, v, mask, None, None, score, causal
    )


def _gradients(
    module,
    plan: QuadraticPlan | LinearPlan,
    rows: dict[str, Tensor],
    row_terms: Callable[..., tuple[Tensor, ...]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rpe: Tensor | None,
    grad_rpe: Tensor | None,
    score: Score | Softmax,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`module.backward` on one head group after the other; `row_terms` makes what it needs of a span of queries out of the
    blocks of `rows`, each (b, h, n, c). Adds to `grad_rpe`."""
    grads = tuple(empty_like_layout(x, x.shape[-1]).zero_() for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return grads
    hk = k.shape[1]
    workspace = Workspace(compute_dtype(q.dtype), q.device)
    for batch, heads in head_groups(k.shape[0], hk, plan.heads):
        ops = _group(q, k, v, mask, rpe, score, causal, batch, heads)
        group = {name: _five(x, hk)[batch, heads] for name, x in rows.items()}

        def terms(span: Span, group=group) -> tuple[Tensor, ...]:
            return row_terms(**{name: to_blocks(x, span) for name, x in group.items()})

        sums = Gradients(ops, tuple(_five(x, hk)[batch, heads] for x in grads), grad_rpe)
        module.backward(ops, plan, terms, sums, workspace)
        sums.write()
    return grads
