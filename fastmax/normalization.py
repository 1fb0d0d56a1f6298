"""Scaling the rows of q and k into a ball, so that scores stay where the polynomial is close to exp."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax import eager
from fastmax.bounds import sequence_of_token
from fastmax.ops import refuse_second_derivative


def normalize_rows(
    x: Tensor,
    kind: str,
    lim: float,
    use_custom_gradient: bool = False,
    takes_part: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Scale the rows of x (b, h, tokens, d), or (b * h, tokens, d), into the ball of radius `lim`.

    `"sequence"`: all rows of a head by the one factor `lim / max_i |x_i|`; it looks at every row, future ones too. Rows that
    `takes_part`, bool (b, tokens), leaves out do not count and come out as zeros, so that none leaves the ball.
    `"token"`: each row longer than `lim` back onto the sphere, shorter rows as they are; causal.
    With `cu_seqlens` the rows are several sequences, each with its own longest row.
    Zero stays zero. Differentiable, the factor included. Computed in fp32 for half precision; squares neither overflow nor
    underflow, because rows are first divided by their largest element (a constant to autograd: it cancels).

    Rows that are longest together share the derivative of "sequence"'s factor. With `use_custom_gradient` only the result is
    kept for the backward, and about half of the passes over memory are saved.
    """
    if x.numel() == 0:
        return x
    if kind == "sequence" and takes_part is not None:
        heads = x.shape[0] // takes_part.shape[0]  # of a 3-d x
        rows = takes_part[:, None] if x.dim() == 4 else takes_part.repeat_interleave(heads, dim=0)
        x = torch.where(rows.unsqueeze(-1), x, 0.0)
    if kind == "sequence" and cu_seqlens is not None:
        return _normalize_sequences(x, lim, cu_seqlens)
    recording = use_custom_gradient and x.requires_grad and torch.is_grad_enabled()
    # Compilers fuse the operations themselves; transforms and forward mode are told by the attention that follows.
    if recording and not torch.compiler.is_compiling() and not eager.is_transformed():
        return _Normalized.apply(x, kind, lim)
    # Widened first, so that autograd adds up the gradient's parts before they are rounded.
    rows, factor, _, _ = _factors(x.to(eager.compute_dtype(x.dtype)), kind, lim)
    return (rows * factor).to(x.dtype)


def _normalize_sequences(x: Tensor, lim: float, cu_seqlens: Tensor) -> Tensor:
    sequence = sequence_of_token(cu_seqlens, x.shape[-2])
    rows = x.to(eager.compute_dtype(x.dtype))
    size = torch.linalg.vector_norm(rows.detach(), float("inf"), -1, keepdim=True)
    unit = rows / torch.where(size == 0, 1.0, size)
    norm = torch.linalg.vector_norm(unit, dim=-1) * size.squeeze(-1)
    longest = norm.new_zeros(*norm.shape[:-1], cu_seqlens.shape[0] - 1)
    longest = longest.scatter_reduce(-1, sequence.expand_as(norm), norm, "amax")[..., sequence]
    return (rows * (lim / torch.where(longest == 0, 1.0, longest)).unsqueeze(-1)).to(x.dtype)


def _factors(x: Tensor, kind: str, lim: float) -> tuple[Tensor, Tensor, Tensor | float, Tensor]:
    """Rows and their factor, whose product is the result; what x was divided by to get these rows; the rows whose norm the
    factor was taken from."""
    axes = (-2, -1) if kind == "sequence" else (-1,)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    largest = torch.linalg.vector_norm(x.detach(), float("inf"), axes, keepdim=True, dtype=wide)
    largest = torch.where(largest == 0, 1.0, largest)
    unit = x / largest
    norm = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    if kind == "sequence":
        longest = norm.amax(-2, keepdim=True)
        return unit, lim / torch.where(longest == 0, 1.0, longest), largest, norm == longest
    too_long = norm > lim / largest
    return x, torch.where(too_long, lim / torch.where(too_long, norm, 1.0) / largest, 1.0), 1.0, too_long


class _Normalized(torch.autograd.Function):
    """With o = F x and N the norm that F = lim / N divides by, the derivative of F is -F / N times that of N, which is a row of
    o / lim; so grad x = F (grad o - o (grad o . o) / lim^2), the last term in rows that are N's alone, its product summed over
    all rows that have this F."""

    @staticmethod
    def forward(ctx, x: Tensor, kind: str, lim: float) -> Tensor:
        rows, factor, divisor, in_norm = _factors(x, kind, lim)
        o = torch.mul(rows, factor, out=torch.empty_like(x))  # rounded as it is written
        ctx.save_for_backward(o, factor / divisor, in_norm)
        ctx.kind, ctx.lim = kind, lim
        return o

    @staticmethod
    def backward(ctx, grad_o: Tensor):
        o, factor, in_norm = ctx.saved_tensors
        with torch.no_grad():
            wide = grad_o.to(factor.dtype)
            product = (wide * o).sum(-1, keepdim=True) / ctx.lim / ctx.lim
            if ctx.kind == "sequence":
                product = product.sum(-2, keepdim=True) / in_norm.sum(-2, keepdim=True)
            along_o = torch.where(in_norm, product, 0.0)
            grad = torch.mul(torch.addcmul(wide, o, along_o, value=-1), factor, out=torch.empty_like(o))
        return _Final.apply(grad, grad_o) if torch.is_grad_enabled() else grad, None, None


class _Final(torch.autograd.Function):
    """A gradient that cannot be differentiated again (create_graph=True records it)."""

    @staticmethod
    def forward(ctx, grad: Tensor, grad_o: Tensor) -> Tensor:
        return grad.view_as(grad)

    backward = staticmethod(refuse_second_derivative)
