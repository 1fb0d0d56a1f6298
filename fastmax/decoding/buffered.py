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
    """Returns the state without a buffer: its tokens are in the sums, and only the last W beside them. Differentiable."""
    if state.flush_interval == 1:
        return state
    count, window = state.flush_interval, state.exact_window
    keys, tokens, mask, decays = _kept(state)
    there = mask.unsqueeze(-1)  # products with what masked tokens hold would leave a trace
    near = torch.where(there, keys, 0), torch.where(there, tokens, 0), mask, decays
    place = torch.arange(count, device=state.device)
    is_buffered = place < state.buffered.unsqueeze(-1)  # (b, hk, T)
    keys, tokens, mask, decays = (x[:, :, :count] for x in near)
    mask, decays = mask & is_buffered, torch.where(is_buffered, decays, 0.0)
    # Each head as a batch entry of its own, as each has a mask of its own; keys in the place of queries.
    keys, tokens, decays, kv_state, k_sum = (
        x.flatten(0, 1).unsqueeze(1) for x in (keys, tokens, decays, state.kv_state, state.k_sum)
    )
    call = with_bounds(Call(state.score, causal=True, attention_mask=mask.flatten(0, 1)), keys, keys, decays, continues=True)
    _, _, kv_state, k_sum = ops.prefill(keys, keys, tokens, call, kv_state, k_sum)
    changes = {
        "kv_state": kv_state.view_as(state.kv_state),
        "k_sum": k_sum.view_as(state.k_sum),
        "flush_interval": 1,
        "buffered": None,
    }
    if window == 0:
        return replace(state, **changes, **dict.fromkeys(_KEPT))
    place = state.buffered.unsqueeze(-1) + torch.arange(window, device=state.device)  # (b, hk, W)
    near = [x.gather(2, place.view(*place.shape, *(1,) * (x.dim() - 3)).expand(-1, -1, -1, *x.shape[3:])) for x in near]
    near[_KEPT.index("local_mask")] = near[_KEPT.index("local_mask")][:, 0]  # of every head the same
    return replace(state, **changes, **dict(zip(_KEPT, near, strict=True)))


def with_buffer(state: DecodeState, flush_interval: int) -> DecodeState:
    """Returns a `flushed` state with an empty buffer of so many tokens."""
    if flush_interval == 1:
        return state
    b, heads, window = *state.k_sum.shape[:2], state.exact_window
    near = _kept(state)
    if window == 0:
        like, width = state.kv_state, width_of_keys(state.head_dim, state.positions is not None)
        near = (
            like.new_zeros(b, heads, 0, width, dtype=state.dtype),
            like.new_zeros(b, heads, 0, like.shape[3], dtype=state.dtype),
            like.new_zeros(b, 0, dtype=torch.bool),
            like.new_zeros(b, heads, 0),
        )
    keys, values, mask, decays = near
    near = keys, values, mask.unsqueeze(1).expand(-1, heads, -1), decays
    near = (F.pad(x, (*(0, 0) * (x.dim() - 3), 0, flush_interval)) for x in near)
    buffered = torch.zeros(b, heads, dtype=torch.int32, device=state.device)
    return replace(state, flush_interval=flush_interval, buffered=buffered, **dict(zip(_KEPT, near, strict=True)))


_KEPT = ("local_keys", "local_values", "local_mask", "local_decays")


def _kept(state: DecodeState) -> tuple[Tensor | None, ...]:
    return tuple(getattr(state, name) for name in _KEPT)
