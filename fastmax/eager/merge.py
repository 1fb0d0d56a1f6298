"""Merges attention over parts of the keys, and in place the local and the global keys of an exact window."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastmax.core.score import log_of_sums, quotient
from fastmax.eager.blocks import compute_dtype


def merged(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns attention over all keys, given checked outputs and lses of two or more parts, as `fastmax.merge_attention`."""
    shares, lse = _shares(lses)
    # A product has the memory layout of its first factor, so the output comes first.
    o = sum(x.to(compute_dtype(x.dtype)) * share.unsqueeze(-1) for share, x in zip(shares, outputs, strict=True))
    return o.to(outputs[0].dtype), lse


def merged_backward(
    grad_o: Tensor | None, grad_lse: Tensor | None, outputs: Sequence[Tensor], lses: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the gradients of the outputs and of the lses that `merged` takes. Differentiable any number of times."""
    shares, lse = _shares(lses)
    dtype = lses[0].dtype
    # The gradient of an lse of -inf may be NaN.
    of_lses = shares[0].new_zeros(()) if grad_lse is None else torch.where(lse == -torch.inf, 0.0, grad_lse)
    if grad_o is None:
        return [torch.zeros_like(x) for x in outputs], [share * of_lses for share in shares]
    grad = grad_o.to(dtype)
    products = [(grad * x.to(dtype)).sum(-1) for x in outputs]
    of_o = sum(share * x for share, x in zip(shares, products, strict=True))
    of_outputs = [(grad * share.unsqueeze(-1)).to(x.dtype) for share, x in zip(shares, outputs, strict=True)]
    return of_outputs, [share * (x - of_o + of_lses) for share, x in zip(shares, products, strict=True)]


def _shares(lses: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Returns the share of each part in the sum of weights, and the log of the sum."""
    largest = lses[0].detach()
    for x in lses[1:]:
        largest = torch.maximum(largest, x.detach())
    base = torch.where(largest == -torch.inf, 0.0, largest)
    weights = [torch.exp(x - base) for x in lses]
    total = sum(weights)
    return [quotient(w, total) for w in weights], base + log_of_sums(total)


def merge_(o: Tensor, lse: Tensor, o_global: Tensor, z_global: Tensor) -> None:
    """Merges attention to global keys into attention to local keys, in place.

    Args:
        o: (b, h, n, dv), output for the local keys; overwritten by the output for all keys.
        lse: (b, h, n), log of the sum of the local weights, in the compute dtype; overwritten by that of all weights.
        o_global: (b, h, n, dv), output for the global keys.
        z_global: (b, h, n), denominators of the global keys, in the compute dtype; 0: the query sees no global key.
    """
    shares, of_all = _shares((lse, log_of_sums(z_global)))
    lse.copy_(of_all)
    of_local, of_global = (share.unsqueeze(-1) for share in shares)
    if o.dtype == of_local.dtype:
        o.mul_(of_local).addcmul_(o_global, of_global)
    else:  # one rounding
        o.copy_((o * of_local).addcmul_(o_global, of_global))
