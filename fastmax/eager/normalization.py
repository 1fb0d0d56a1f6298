"""Normalisation of tokens (`normalize="token"`): rows longer than `lim` are scaled to the length `lim`."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax.eager.blocks import compute_dtype, empty_like_layout


def unit_rows(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns x divided by its largest absolute value over the axes, and the divisor in the compute dtype; zeros stay zeros.

    No square of the result overflows or underflows. Autograd treats the divisor as a constant.
    """
    largest = torch.linalg.vector_norm(x.detach(), float("inf"), axes, keepdim=True, dtype=compute_dtype(x.dtype))
    largest = torch.where(largest == 0, 1.0, largest)
    return x / largest, largest


def token_factors(x: Tensor, lim: float) -> tuple[Tensor, Tensor]:
    """Returns factors (..., tokens, 1) that scale long rows of x to `lim`, 1 for other rows, and a mask of the long rows."""
    unit, largest = unit_rows(x, (-1,))
    norm = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    too_long = norm > lim / largest
    return torch.where(too_long, lim / torch.where(too_long, norm, 1.0) / largest, 1.0), too_long


def normalize_tokens(q: Tensor, k: Tensor, lim: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q and k with rows of length at most `lim`, and the factors of their rows (`fastmax::normalize_tokens`)."""
    (q, q_factor), (k, k_factor) = (_scaled(x, lim) for x in (q, k))
    return q, k, q_factor, k_factor


def _scaled(x: Tensor, lim: float) -> tuple[Tensor, Tensor]:
    """Returns x with rows of length at most `lim`, and the factors of its rows."""
    o = empty_like_layout(x, x.shape[-1])
    if x.numel() == 0:
        return o, empty_factors(x)
    factor, too_long = token_factors(x, lim)
    # The gradient recognises scaled rows by a factor below 1.
    below = 1.0 - torch.finfo(factor.dtype).eps / 2
    factor = torch.where(too_long, factor.clamp(max=below), factor)
    return torch.mul(x, factor, out=o), empty_factors(x).copy_(
        factor.squeeze(-1)
    )  # the product is rounded once, when it is written


def empty_factors(x: Tensor) -> Tensor:
    """Returns an uninitialised tensor (b, h, n) for the factors of x (b, h, n, d), in the layout of `empty_like_layout`."""
    return empty_like_layout(x, 1, compute_dtype(x.dtype)).squeeze(-1)


def normalize_tokens_backward(
    grad_q: Tensor | None, grad_k: Tensor | None, q: Tensor, k: Tensor, q_factor: Tensor, k_factor: Tensor, lim: float
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of q and k from the results of the forward; without elements if the incoming gradient is None."""
    return _gradient(grad_q, q, q_factor, lim), _gradient(grad_k, k, k_factor, lim)


def _gradient(grad: Tensor | None, o: Tensor, factor: Tensor, lim: float) -> Tensor:
    """Returns the gradient of x from that of `o = F x`, where F is `lim / |x|` in scaled rows and 1 in others.

    In scaled rows it is `F (grad - o (grad . o) / lim^2)`, because `dF = -F / |x| d|x|` and `d|x| = o . dx / lim`.
    """
    if grad is None:
        return o.new_empty(0)
    out = empty_like_layout(o, o.shape[-1])
    if o.numel() == 0:
        return out
    factor, wide = factor.unsqueeze(-1), grad.to(factor.dtype)
    along_o = torch.where(factor < 1.0, (wide * o).sum(-1, keepdim=True) / lim / lim, 0.0)
    return torch.mul(torch.addcmul(wide, o, along_o, value=-1), factor, out=out)
