"""`log_decay` and `cu_seqlens` as the operators take them: finite decays, and the range of keys that each query may see.

Both are of the same kind. A sequence that begins is a token that resets all before it, which is a decay of -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax import eager, ops
from fastmax.core.call import Call


def with_bounds(
    call: Call, q: Tensor, k: Tensor, log_decay: Tensor | None, cu_seqlens: Tensor | None = None, continues: bool = False
) -> Call:
    """The call with checked arguments for 4-d q (b, h, n, d) and k (b, hk, m, d); log_decay (b, hk, m), or as of 3-d k. No
    value is copied to the host.

    `continues`: there are keys in a state before the first one here, which is why queries that saw no token forget have -1.
    """
    if log_decay is None and cu_seqlens is None:
        return call
    (b, hk, m), n = k.shape[:3], q.shape[2]
    first = end = None
    if log_decay is not None:
        log_decay, first = ops.finite_decay(log_decay.view(b, hk, m), continues, eager.compute_dtype(q.dtype))
        first = first[..., m - n :]
    if cu_seqlens is not None:
        sequence = sequence_of_token(cu_seqlens, n)
        begin = cu_seqlens[sequence].expand(b, hk, n)
        first = begin if first is None else torch.maximum(first, begin)
        end = None if call.causal else cu_seqlens[sequence + 1].expand(b, hk, n)
    return call._replace(log_decay=log_decay, k_start=first, k_end=end)


def sequence_of_token(cu_seqlens: Tensor, n: int) -> Tensor:
    """(n,) int64."""
    return sequence_at(cu_seqlens, torch.arange(n, dtype=cu_seqlens.dtype, device=cu_seqlens.device))


def sequence_at(cu_seqlens: Tensor, positions: Tensor) -> Tensor:
    """Of tokens at positions of the whole row: int64, in their shape."""
    sequence = torch.searchsorted(cu_seqlens, positions.to(cu_seqlens.dtype), right=True) - 1
    return sequence.clamp(0, cu_seqlens.shape[0] - 2)  # whatever the values are, they index no other memory
