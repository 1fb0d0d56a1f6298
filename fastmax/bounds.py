"""`log_decay` and `cu_seqlens` as the operators take them: finite decays, and the range of keys that each query may see.

Both are of the same kind. A sequence that begins is a token that forgets all before it, which is a decay of -inf.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastmax import eager


class Bounds(NamedTuple):
    """Fields of `fastmax.call.Call`."""

    log_decay: Tensor | None = None
    first_key: Tensor | None = None
    end_key: Tensor | None = None


def bounds(
    q: Tensor, k: Tensor, log_decay: Tensor | None, cu_seqlens: Tensor | None, causal: bool, continues: bool = False
) -> Bounds:
    """Of checked arguments for 4-d q (b, h, n, d) and k (b, hk, m, d). No value is copied to the host.

    `continues`: there are keys in a state before the first one here, which is why queries that saw no token forget have -1.
    """
    (b, hk, m), n = k.shape[:3], q.shape[2]
    first = end = None
    if log_decay is not None:
        dtype = eager.compute_dtype(q.dtype)
        forgets = log_decay == -torch.inf
        first = torch.where(forgets, torch.arange(m, device=q.device), -1 if continues else 0).cummax(-1).values
        log_decay = torch.where(forgets, 0.0, log_decay.to(dtype))
    if cu_seqlens is not None:
        sequence = sequence_of_token(cu_seqlens, n)
        begin = cu_seqlens[sequence].expand(b, hk, n)
        first = begin if first is None else torch.maximum(first, begin)
        end = None if causal else cu_seqlens[sequence + 1].expand(b, hk, n)
    return Bounds(log_decay, None if first is None else first[..., m - n :].to(torch.int32), end)


def sequence_of_token(cu_seqlens: Tensor, n: int) -> Tensor:
    """(n,) int64."""
    sequence = torch.searchsorted(cu_seqlens, torch.arange(n, dtype=cu_seqlens.dtype, device=cu_seqlens.device), right=True) - 1
    return sequence.clamp(0, cu_seqlens.shape[0] - 2)  # whatever the values are, they index no other memory
