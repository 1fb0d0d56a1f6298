"""Scaling the rows of q and k into a ball, so that scores stay where the polynomial is close to exp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastmax import eager, ops
from fastmax.prepare.bounds import sequence_of_token


def normalize_queries_and_keys(
    q: Tensor,
    k: Tensor,
    kind: str,
    lim: float,
    use_custom_gradient: bool = True,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`normalize_rows` of q and of k, whose masked keys take no part; `"token"` with `use_custom_gradient` in one operator for
    both, `fastmax::normalize_tokens`. Compilers fuse the operations themselves, with what is before them."""
    if kind == "token" and use_custom_gradient and not torch.compiler.is_compiling() and not eager.is_transformed():
        if q.dim() == 4:
            return ops.normalize_tokens(q, k, lim)
        q, k = ops.normalize_tokens(q.unsqueeze(0), k.unsqueeze(0), lim)
        return q.squeeze(0), k.squeeze(0)
    return (
        normalize_rows(q, kind, lim, use_custom_gradient, cu_seqlens=cu_seqlens),
        normalize_rows(k, kind, lim, use_custom_gradient, attention_mask, cu_seqlens),
    )


def normalize_rows(
    x: Tensor,
    kind: str,
    lim: float,
    use_custom_gradient: bool = False,
    takes_part: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Scale the rows of x (b, h, tokens, d), or (b * h, tokens, d), into the ball of radius `lim`, in PyTorch operations.

    `"sequence"`: all rows of a head by the one factor `lim / max_i |x_i|`; it looks at every row, future ones too. Rows that
    `takes_part`, bool (b, tokens), leaves out do not count and come out as zeros, so that none leaves the ball.
    `"token"`: each row longer than `lim` back onto the sphere, shorter rows as they are; causal.
    With `cu_seqlens` the rows are several sequences, each with its own longest row.
    Zero stays zero. Differentiable, the factor included. Computed in fp32 for half precision; squares neither overflow nor
    underflow, because rows are first divided by their largest element (a constant to autograd: it cancels).

    Rows that are longest together share the derivative of "sequence"'s factor, of which with `use_custom_gradient` only the
    result is kept for the backward, and about half of the passes over memory are saved.
    """
    if x.numel() == 0:
        return x
    if kind == "token":
        rows = x.to(
            eager.compute_dtype(x.dtype)
        )  # first, so that autograd adds up the gradient's parts before they are rounded
        return (rows * eager.token_factors(rows, lim)[0]).to(x.dtype)
    if takes_part is not None:
        heads = x.shape[0] // takes_part.shape[0]  # of a 3-d x
        rows = takes_part[:, None] if x.dim() == 4 else takes_part.repeat_interleave(heads, dim=0)
        x = torch.where(rows.unsqueeze(-1), x, 0.0)
    if cu_seqlens is not None:
        return _normalize_sequences(x, lim, cu_seqlens)
    recording = use_custom_gradient and x.requires_grad and torch.is_grad_enabled()
    # Compilers fuse the operations themselves; transforms and forward mode are told by the attention that follows.
    if recording and not torch.compiler.is_compiling() and not eager.is_transformed():
        return _NormalizedSequence.apply(x, lim)
    unit, factor, _, _ = _sequence_factor(x.to(eager.compute_dtype(x.dtype)), lim)
    return (unit * factor).to(x.dtype)


def _normalize_sequences(x: Tensor, lim: float, cu_seqlens: Tensor) -> Tensor:
    sequence = sequence_of_token(cu_seqlens, x.shape[-2])
    rows = x.to(eager.compute_dtype(x.dtype))
    size = torch.linalg.vector_norm(rows.detach(), float("inf"), -1, keepdim=True)
    unit = rows / torch.where(size == 0, 1.0, size)
    norm = torch.linalg.vector_norm(unit, dim=-1) * size.squeeze(-1)
    longest = norm.new_zeros(*norm.shape[:-1], cu_seqlens.shape[0] - 1)
    longest = longest.scatter_reduce(-1, sequence.expand_as(norm), norm, "amax")[..., sequence]
    return (rows * (lim / torch.where(longest == 0, 1.0, longest)).unsqueeze(-1)).to(x.dtype)


def _sequence_factor(x: Tensor, lim: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows and their factor, whose product is the result; what x was divided by to get these rows; the longest rows, whose norm
    the factor was taken from."""
    unit, largest = eager.unit_rows(x, (-2, -1))
    norm = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    longest = norm.amax(-2, keepdim=True)
    return unit, lim / torch.where(longest == 0, 1.0, longest), largest, norm == longest


class _NormalizedSequence(torch.autograd.Function):
    """With o = F x and N the norm that F = lim / N divides by, the derivative of F is -F / N times that of N, which is a row of
    o / lim; so grad x = F (grad o - o (grad o . o) / lim^2), the last term in rows that are N's alone, its product summed over
    all rows that have this F."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lim: float) -> Tensor:
        rows, factor, divisor, is_longest = _sequence_factor(x, lim)
        o = torch.mul(rows, factor, out=torch.empty_like(x))  # rounded as it is written
        ctx.save_for_backward(o, factor / divisor, is_longest)
        ctx.lim = lim
        return o

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor, None]:
        o, factor, is_longest = ctx.saved_tensors
        with torch.no_grad():
            wide = grad_o.to(factor.dtype)
            product = ((wide * o).sum(-1, keepdim=True) / ctx.lim / ctx.lim).sum(-2, keepdim=True)
            along_o = torch.where(is_longest, product / is_longest.sum(-2, keepdim=True), 0.0)
            grad = torch.mul(torch.addcmul(wide, o, along_o, value=-1), factor, out=torch.empty_like(o))
        return _Final.apply(grad, grad_o) if torch.is_grad_enabled() else grad, None


class _Final(torch.autograd.Function):
    """A gradient that cannot be differentiated again (create_graph=True records it)."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, grad_o: Tensor) -> Tensor:
        return grad.view_as(grad)

    backward = staticmethod(ops.refuse_second_derivative)
