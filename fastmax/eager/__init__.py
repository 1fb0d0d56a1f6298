"""The operator in PyTorch operations, on any device: forward, analytic backward, and a forward that autograd can record."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax.eager import linear, quadratic
from fastmax.eager.blocks import (
    Gradients,
    Operands,
    Span,
    compute_dtype,
    from_blocks,
    head_groups,
    in_functorch,
    recording,
    to_blocks,
)
from fastmax.eager.recurrent import decode_step
from fastmax.eager.workspace import Workspace
from fastmax.planner import choose_algorithm, plan_linear, plan_quadratic
from fastmax.score import Score, reciprocal

__all__ = [
    "backward",
    "compute_dtype",
    "decode_step",
    "empty_like_layout",
    "forward",
    "forward_from_state",
    "in_functorch",
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
    b, h, n, d = q.shape
    hk, m, dv = k.shape[1], k.shape[2], v.shape[3]
    group = h // hk
    if rpe is not None:
        algorithm = "quadratic"
    elif algorithm == "auto":
        algorithm = choose_algorithm(n, m, d, dv, causal, score.order, group)
    if algorithm == "quadratic":
        plan = plan_quadratic(q.device, b * hk, group, n, m)
    else:
        plan = plan_linear(q.device, b * hk, group, d, dv, score.order)
    module = quadratic if algorithm == "quadratic" else linear
    return module, plan._replace(heads=b * hk) if whole else plan


def _five(x: Tensor, kv_heads: int) -> Tensor:
    """(b, h, tokens, c) -> (b, kv_heads, h // kv_heads, tokens, c)."""
    return x.unflatten(1, (kv_heads, -1))


def _group(q, k, v, mask, rpe, score, causal, batch: slice, heads: slice) -> Operands:
    hk = k.shape[1]
    q, k, v = (_five(x, hk)[batch, heads] for x in (q, k, v))
    return Operands(q, k, v, None if mask is None else mask[batch], rpe, score, causal)


class _Parts:
    """A sink that keeps the outputs and joins them at the end, as autograd wants it."""

    def __init__(self, ops: Operands):
        self._like = ops.q
        self._parts: list[tuple[Tensor, Tensor]] = []

    def __call__(self, span: Span, sums: tuple[Tensor, Tensor]) -> None:
        numerator, z = (from_blocks(x, span, self._like) for x in sums)
        self._parts.append((numerator * reciprocal(z), z))

    def join(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Output in q's dtype and layout, denominators; there is at least one query."""
        o, z = (torch.cat(parts, dim=3).flatten(1, 2) for parts in zip(*self._parts, strict=True))
        o = o.to(q.dtype)
        if _token_major(q):
            o = o.transpose(1, 2).contiguous().transpose(1, 2)
        return o, z.squeeze(-1)


def forward_from_state(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, score: Score, values: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention of n tokens that continue from a state, by the linear algorithm: output, values, weights.

    `values` (b, hk, features, dv) and `weights` (b, hk, features) as in `fastmax.decode.DecodeState`.
    """
    (b, _, n, d), (_, hk, _, dv) = q.shape, v.shape
    if b == 0 or n == 0:
        return empty_like_layout(q, dv), values, weights
    plan = plan_linear(q.device, b * hk, q.shape[1] // hk, d, dv, score.order)._replace(heads=b * hk)
    workspace = None if recording(q, k, v, values, weights) else Workspace(values.dtype, q.device)
    ops = _group(q, k, v, mask, None, score, True, slice(None), slice(None))
    parts = _Parts(ops)
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
    o = empty_like_layout(q, v.shape[-1])
    z = q.new_zeros(q.shape[:3], dtype=compute_dtype(q.dtype))
    if o.numel() == 0 or k.numel() == 0:
        o.zero_()
        nothing = sum(x.flatten()[:0].sum() for x in (q, k, v))  # 0, but part of the graph
        return (o + nothing if differentiable else o), z
    module, plan = _plan(q, k, v, rpe, score, causal, algorithm, whole=differentiable)
    hk = k.shape[1]
    if differentiable:
        ops = _group(q, k, v, mask, rpe, score, causal, slice(None), slice(None))
        parts = _Parts(ops)
        module.forward(ops, plan, parts, None)
        o, z = parts.join(q)
        return o if noise is None else torch.addcmul(o, o, noise, value=dropout), z
    workspace = Workspace(z.dtype, q.device)
    for batch, heads in head_groups(k.shape[0], hk, plan.heads):
        ops = _group(q, k, v, mask, rpe, score, causal, batch, heads)
        o_group, z_group = _five(o, hk)[batch, heads], _five(z.unsqueeze(-1), hk)[batch, heads]

        def write(span: Span, sums: tuple[Tensor, Tensor], like=ops.q, o_group=o_group, z_group=z_group):
            numerator, denominator = (from_blocks(x, span, like) for x in sums)
            torch.mul(numerator, reciprocal(denominator), out=o_group[:, :, :, span.start : span.stop])
            z_group[:, :, :, span.start : span.stop] = denominator

        module.forward(ops, plan, write, workspace)
    return o if noise is None else o.addcmul_(o, noise, value=dropout), z


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
    grads = tuple(empty_like_layout(x, x.shape[-1]).zero_() for x in (q, k, v))
    grad_rpe = q.new_zeros(0) if rpe is None else torch.zeros_like(rpe, dtype=z.dtype)
    if q.numel() == 0 or k.numel() == 0:
        return (*grads, grad_rpe)
    module, plan = _plan(q, k, v, rpe, score, causal, algorithm, whole=False)
    hk = k.shape[1]
    workspace = Workspace(z.dtype, q.device)
    for batch, heads in head_groups(k.shape[0], hk, plan.heads):
        ops = _group(q, k, v, mask, rpe, score, causal, batch, heads)
        do_group, o_group, z_group = (_five(x, hk)[batch, heads] for x in (grad_o, o, z.unsqueeze(-1)))
        noise_group = None if noise is None else _five(noise, hk)[batch, heads]

        def g_e(span: Span, do=do_group, o=o_group, z=z_group, noise=noise_group) -> tuple[Tensor, Tensor]:
            """g and e of a span of queries; zero where a query sees no key."""
            do, inverse = to_blocks(do, span), reciprocal(to_blocks(z, span))
            e = -(do * to_blocks(o, span)).sum(-1, keepdim=True) * inverse
            if noise is not None:
                do = torch.addcmul(do, do, to_blocks(noise, span), value=dropout)
            return do * inverse, e

        sums = Gradients(ops, tuple(_five(x, hk)[batch, heads] for x in grads), grad_rpe)
        module.backward(ops, plan, g_e, sums, workspace)
        sums.write()
    return (*grads, grad_rpe if rpe is None else grad_rpe.to(rpe.dtype))
