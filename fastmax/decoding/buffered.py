"""States with a buffer of new tokens beside their sums: flushing the buffer, and adding an empty one.

Only `ops.buffered_step_` leaves tokens in the buffer. Everything else that continues from such a state flushes it first, and
returns a state with an empty buffer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fastmax import ops
from fastmax.core.call import Call
from fastmax.decoding.state import DecodeState, width_of_keys
from fastmax.prepare.bounds import with_bounds


def flushed(state: DecodeState) -> DecodeState:
    """Returns the state without a buffer: buffered tokens are added to the sums, and the last W remain. Differentiable."""
    if state.flush_interval == 1:
        return state
    count, window = state.flush_interval, state.exact_window
    keys, tokens, mask, decays, gates = _local_tensors(state)
    is_real = mask.unsqueeze(-1)  # masked tokens may hold inf or NaN
    local = torch.where(is_real, keys, 0), torch.where(is_real, tokens, 0), mask, decays, gates
    place = torch.arange(count, device=state.device)
    is_buffered = place < state.buffered.unsqueeze(-1)  # (b, hk, T)
    keys, tokens, mask, decays, gates = (None if x is None else x[:, :, :count] for x in local)
    mask, decays = mask & is_buffered, torch.where(is_buffered, decays, 0.0)
    # Heads become batch entries, because each has its own mask. The keys serve as queries, whose outputs are not used.
    keys, tokens, decays, gates, kv_state, k_sum = (
        None if x is None else x.flatten(0, 1).unsqueeze(1) for x in (keys, tokens, decays, gates, state.kv_state, state.k_sum)
    )
    call = Call(state.score, causal=True, attention_mask=mask.flatten(0, 1))
    call = with_bounds(call, keys, keys, decays, continues=True, log_input_gate=gates)
    _, _, kv_state, k_sum = ops.prefill(keys, keys, tokens, call, kv_state, k_sum)
    changes = {
        "kv_state": kv_state.view_as(state.kv_state),
        "k_sum": k_sum.view_as(state.k_sum),
        "flush_interval": 1,
        "buffered": None,
    }
    if window == 0:
        return replace(state, **changes, **dict.fromkeys(_LOCAL))
    place = state.buffered.unsqueeze(-1) + torch.arange(window, device=state.device)  # (b, hk, W)

    def last(x: Tensor) -> Tensor:
        return x.gather(2, place.view(*place.shape, *(1,) * (x.dim() - 3)).expand(-1, -1, -1, *x.shape[3:]))

    local = [None if x is None else last(x) for x in local]
    local[_LOCAL.index("local_mask")] = local[_LOCAL.index("local_mask")][:, 0]  # the same for all heads
    return replace(state, **changes, **dict(zip(_LOCAL, local, strict=True)))


def with_buffer(state: DecodeState, flush_interval: int) -> DecodeState:
    """Returns a `flushed` state with an empty buffer of `flush_interval` tokens; without a buffer if that is 1."""
    if flush_interval == 1:
        return state
    b, heads, window = *state.k_sum.shape[:2], state.exact_window
    local = _local_tensors(state)
    if window == 0:
        like, width = state.kv_state, width_of_keys(state.head_dim, state.positions is not None)
        local = (
            like.new_zeros(b, heads, 0, width, dtype=state.dtype),
            like.new_zeros(b, heads, 0, like.shape[3], dtype=state.dtype),
            like.new_zeros(b, 0, dtype=torch.bool),
            like.new_zeros(b, heads, 0),
            None,
        )
    keys, values, mask, decays, gates = local
    local = keys, values, mask.unsqueeze(1).expand(-1, heads, -1), decays, gates
    local = (None if x is None else F.pad(x, (*(0, 0) * (x.dim() - 3), 0, flush_interval)) for x in local)
    buffered = torch.zeros(b, heads, dtype=torch.int32, device=state.device)
    return replace(state, flush_interval=flush_interval, buffered=buffered, **dict(zip(_LOCAL, local, strict=True)))


_LOCAL = ("local_keys", "local_values", "local_mask", "local_decays", "local_gates")


def _local_tensors(state: DecodeState) -> tuple[Tensor | None, ...]:
    return tuple(getattr(state, name) for name in _LOCAL)
