"""Rows scaled back onto a sphere (`normalize="token"`) in PyTorch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax.eager.blocks import compute_dtype, empty_like_layout


def unit_rows(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """x divided by its largest element over the axes, so that no square overflows or underflows; and what it was divided by, in
    the compute dtype, which autograd takes for a constant. Zeros stay zeros."""
    largest = torch.linalg.vector_norm(x.detach(), float("inf"), axes, keepdim=True, dtype=compute_dtype(x.dtype))
    largest = torch.where(largest == 0, 1.0, largest)
    return x / largest, largest


def token_factors(x: Tensor, lim: float) -> tuple[Tensor, Tensor]:
    """What scales rows of x back to `lim`, 1 where they are not longer, (..., tokens, 1); and which are longer."""
    unit, largest = unit_rows(x, (-1,))
    norm = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    too_long = norm > lim / largest
    return torch.where(too_long, lim / torch.where(too_long, norm, 1.0) / largest, 1.0), too_long


def normalize_tokens(q: Tensor, k: Tensor, lim: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator `fastmax::normalize_tokens`: q and k with rows of at most `lim`, and the factors of their rows."""
    (q, q_factor), (k, k_factor) = (_scaled(x, lim) for x in (q, k))
    return q, k, q_factor, k_factor


def _scaled(x: Tensor, lim: float) -> tuple[Tensor, Tensor]:
    o = empty_like_layout(x, x.shape[-1])
    if x.numel() == 0:
        return o, empty_factors(x)
    factor, too_long = token_factors(x, lim)
    # Less than 1 where a row was scaled, and there alone: how the gradient tells these rows.
    below = 1.0 - torch.finfo(factor.dtype).eps / 2
    factor = torch.where(too_long, factor.clamp(max=below), factor)
    return torch.mul(x, factor, out=o), empty_factors(x).copy_(factor.squeeze(-1))  # rounded as it is written


def empty_factors(x: Tensor) -> Tensor:
    """A number for each row of x (b, h, n, d), (b, h, n), that lie as rows of `empty_like_layout` do."""
    return empty_like_layout(x, 1, compute_dtype(x.dtype)).squeeze(-1)


def normalize_tokens_backward(
    grad_q: Tensor | None, grad_k: Tensor | None, q: Tensor, k: Tensor, q_factor: Tensor, k_factor: Tensor, lim: float
) -> tuple[Tensor, Tensor]:
    """The operator `fastmax::normalize_tokens_backward`, from the results of the forward: no elements for what is not given."""
    return _gradient(grad_q, q, q_factor, lim), _gradient(grad_k, k, k_factor, lim)


def _gradient(grad: Tensor | None, o: Tensor, factor: Tensor, lim: float) -> Tensor:
    """With o = F x the derivative of F = lim / |x| is -F / |x| times that of |x|, which is o / lim; so in rows that were scaled
    it is F (grad - o (grad . o) / lim^2)."""
    if grad is None:
        return o.new_empty(0)
    out = empty_like_layout(o, o.shape[-1])
    if o.numel() == 0:
        return out
    factor, wide = factor.unsqueeze(-1), grad.to(factor.dtype)
    along_o = torch.where(factor < 1.0, (wide * o).sum(-1, keepdim=True) / lim / lim, 0.0)
    return torch.mul(torch.addcmul(wide, o, along_o, value=-1), factor, out=out)
