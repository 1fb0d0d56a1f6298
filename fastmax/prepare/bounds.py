"""Converts `log_decay`, `cu_seqlens` and `log_input_gate` to the operators' form: finite decays, the range of keys each query
may see, and clamped gates.

The beginning of a sequence and a decay of -inf have the same effect: no query from there on sees an earlier key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax import eager, ops
from fastmax.core.call import Call


def with_bounds(
    call: Call,
    q: Tensor,
    k: Tensor,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None = None,
    continues: bool = False,
    log_input_gate: Tensor | None = None,
) -> Call:
    """Returns the call with its fields `log_decay`, `k_start`, `k_end` and `log_input_gate` set. No value is copied to the
    host.

    Args:
        call: a call without these fields.
        q: (b, h, n, d).
        k: (b, hk, m, d).
        log_decay: (b, hk, m), or (b * hk, m) as for 3-d k; checked.
        cu_seqlens: int32 (s + 1,); checked.
        continues: whether a state holds keys before the first one here. A query with no reset at or before it then has
            `k_start` -1, so that it sees the state.
        log_input_gate: in the shape of log_decay; checked.
    """
    if log_input_gate is not None:
        gate = log_input_gate.view(k.shape[:3])
        call = call._replace(log_input_gate=eager.clamped_gate(gate, eager.compute_dtype(q.dtype)))
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
    """Returns the index of each token's sequence, int64 (n,)."""
    return sequence_at(cu_seqlens, torch.arange(n, dtype=cu_seqlens.dtype, device=cu_seqlens.device))


def sequence_at(cu_seqlens: Tensor, positions: Tensor) -> Tensor:
    """Returns the index of the sequence at each position of the packed row, int64, in the shape of `positions`."""
    sequence = torch.searchsorted(cu_seqlens, positions.to(cu_seqlens.dtype), right=True) - 1
    return sequence.clamp(0, cu_seqlens.shape[0] - 2)  # invalid values must not index out of bounds
