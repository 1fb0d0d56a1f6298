"""Scales the rows of q and k into a ball, so that scores stay where the polynomial is close to exp."""

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
    """Returns `normalize_rows` of q and of k, without masked keys.

    `"token"` with `use_custom_gradient` is one operator for both, `fastmax::normalize_tokens`. Compiled code uses PyTorch
    operations, which the compiler fuses with those before them.
    """
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
    """Scales the rows of x (b, h, tokens, d), or (b * h, tokens, d), into the ball of radius `lim`, in PyTorch operations.

    `"sequence"` multiplies all rows of a head by the same factor `lim / max_i |x_i|`, over all rows, future ones too.
    `"token"` scales each row longer than `lim` to length `lim` and leaves shorter rows unchanged; it is causal.

    Args:
        takes_part: bool (b, tokens). Rows where it is False do not count for the maximum of "sequence", and become zeros, so
            that no row lies outside the ball.
        cu_seqlens: bounds of packed sequences, each of which has its own maximum.
        use_custom_gradient: for "sequence", a gradient that saves only the result and needs about half as many passes over
            memory.

    Rows of zeros stay zeros. The gradient includes the derivative of the factor; rows that share the maximum share it. Half
    precision is computed in fp32. Squares neither overflow nor underflow: rows are first divided by their largest element,
    which is a constant to autograd, because it cancels.
    """
    if x.numel() == 0:
        return x
    if kind == "token":
        # Converted before the factors use it, so that autograd adds the parts of the gradient before rounding.
        rows = x.to(eager.compute_dtype(x.dtype))
        return (rows * eager.token_factors(rows, lim)[0]).to(x.dtype)
    if takes_part is not None:
        heads = x.shape[0] // takes_part.shape[0]  # of a 3-d x
        rows = takes_part[:, None] if x.dim() == 4 else takes_part.repeat_interleave(heads, dim=0)
        x = torch.where(rows.unsqueeze(-1), x, 0.0)
    if cu_seqlens is not None:
        return _normalize_sequences(x, lim, cu_seqlens)
    recording = use_custom_gradient and x.requires_grad and torch.is_grad_enabled()
    # Compilers fuse the operations. Under transforms and forward mode the attention that follows raises the error.
    if recording and not torch.compiler.is_compiling() and not eager.is_transformed():
        return _NormalizedSequence.apply(x, lim)
    unit, factor, _, _ = _sequence_factor(x.to(eager.compute_dtype(x.dtype)), lim)
    return (unit * factor).to(x.dtype)


def _normalize_sequences(x: Tensor, lim: float, cu_seqlens: Tensor) -> Tensor:
    sequence = sequence_of_token(cu_seqlens, x.shape[-2])

    def largest_of_sequence(of_rows: Tensor) -> Tensor:
        zeros = of_rows.new_zeros(*of_rows.shape[:-1], cu_seqlens.shape[0] - 1)
        largest = zeros.scatter_reduce(-1, sequence.expand_as(of_rows), of_rows, "amax")[..., sequence]
        return torch.where(largest == 0, 1.0, largest).unsqueeze(-1)

    rows = x.to(eager.compute_dtype(x.dtype))
    unit = rows / largest_of_sequence(torch.linalg.vector_norm(rows.detach(), float("inf"), -1))
    return (unit * (lim / largest_of_sequence(torch.linalg.vector_norm(unit, dim=-1)))).to(x.dtype)


def _sequence_factor(x: Tensor, lim: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns rows and their factor, whose product is the result; the divisor of x that gave these rows; and a mask of the
    longest rows, whose norm determines the factor."""
    unit, largest = eager.unit_rows(x, (-2, -1))
    norm = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    longest = norm.amax(-2, keepdim=True)
    return unit, lim / torch.where(longest == 0, 1.0, longest), largest, norm == longest


class _NormalizedSequence(torch.autograd.Function):
    """`"sequence"` with an analytic gradient.

    The result is o = F x with F = lim / N, where N is the norm of the longest row. The derivative of F is -F / N times that of
    N, and the derivative of N by its row is o / lim. Hence grad x = F (grad o - o (grad o . o) / lim^2). The second term is
    only in the longest row; its product grad o . o is summed over all rows with this F.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, lim: float) -> Tensor:
        rows, factor, divisor, is_longest = _sequence_factor(x, lim)
        o = torch.mul(rows, factor, out=torch.empty_like(x))  # rounds while writing
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
            grad = (torch.addcmul(wide, o, along_o, value=-1) * factor).to(o.dtype)  # `out` has no batching rule
        return _Final.apply(grad, grad_o) if torch.is_grad_enabled() else grad, None


class _Final(torch.autograd.Function):
    """Marks a gradient that cannot be differentiated again; `create_graph=True` records it."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, grad_o: Tensor) -> Tensor:
        return grad.view_as(grad)

    backward = staticmethod(ops.refuse_second_derivative)
