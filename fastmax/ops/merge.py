"""`merge_attention`: attention over parts of the keys, put together by the logarithms of their sums of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastmax import eager
from fastmax.core import validation


def merge_attention(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over parts of them, each with its own denominator.

        lse = log sum_p exp(lse_p)          o = sum_p exp(lse_p - lse) o_p

    Args:
        outputs: (b, h, n, dv), or 3-d (b * h, n, dv), of `fastmax_attention` or `flash_attention`; alike in shape and dtype.
        lses: their `return_lse`, (b, h, n) or (b * h, n), float32 (float64 for float64 outputs); -inf where a query sees no
            key of the part.

    Returns:
        o and lse, like one of each, in memory of their own; 0 and -inf where no part has a key. Differentiable, any number of
        times.

    Raises:
        TypeError, ValueError: naming the argument.

    Noise on the outputs (`dropout`) does not go through: add it to what comes out. Method: as the online normaliser merges
    blocks (Milakov and Gimelshein, 2018, arXiv:1805.02867).
    """
    outputs, lses = validation.check_parts(outputs, lses)
    if len(outputs) == 1:
        return outputs[0].clone(), lses[0].clone()
    largest = lses[0].detach()
    for x in lses[1:]:
        largest = torch.maximum(largest, x.detach())
    base = torch.where(largest == -torch.inf, 0.0, largest)
    weights = [torch.exp(x - base) for x in lses]
    total = sum(weights)
    seen = total != 0
    total = torch.where(seen, total, 1.0)
    # The output first: a product lies in memory as its first factor.
    o = sum(x.to(eager.compute_dtype(x.dtype)) * (w / total).unsqueeze(-1) for w, x in zip(weights, outputs, strict=True))
    return o.to(outputs[0].dtype), torch.where(seen, base + total.log(), -torch.inf)
