"""`init_state`: the state before any token."""

from __future__ import annotations

from dataclasses import replace

import torch

from fastmax import eager
from fastmax.core import validation
from fastmax.decoding.buffered import with_buffer
from fastmax.decoding.state import DecodeState, width_of_keys


def init_state(
    batch: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    normalize: bool | str = False,
    temperature: float = 1.0,
    a0: float = 1.0,
    a1: float = 1.0,
    a2: float = 0.5,
    lim: float = 1.0,
    p: int = 2,
    rpe_matrix: str | None = None,
    exact_window: int = 0,
    flush_interval: int = 1,
) -> DecodeState:
    """Returns the state before any token, for `step` and `prefill`.

    Args:
        batch, kv_heads, head_dim: of k, (batch, kv_heads, tokens, head_dim).
        value_dim: of v; head_dim when None.
        dtype, device: of q, k and v.
        normalize: False or "token"; "sequence" depends on future tokens and has no recurrent form.
        temperature, a0, a1, a2, lim, p: as in `fastmax_attention`.
        rpe_matrix: None or "sinusoidal".
        exact_window: as in `fastmax_attention`. The state holds the keys and values of so many tokens beside the sums.
        flush_interval: T, >= 1. Above 1, `step_` puts new tokens into a buffer of T tokens beside the sums, and adds them to
            the sums (flushes the buffer) at every T-th step. It reads the sums at every step, but writes them only then. The
            outputs are the same up to rounding. 32 is a good value for `step_` on a GPU.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.

    The method is linear attention as a recurrence (Katharopoulos et al., 2020, arXiv:2006.16236), with the features of f.
    """
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {"batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    for name, size in sizes.items():
        validation.check_count(name, size, least=0 if name == "batch" else 1)
    validation.check_dtype("dtype", dtype)
    validation.check_device(device)
    score = validation.check_score(temperature, a0, a1, a2, p)
    kind = validation.check_normalize(normalize, lim)
    if kind == "sequence":
        raise ValueError(f'normalize must be False or "token" for a recurrent state, got {normalize!r}: it looks at all tokens')
    validation.check_rpe_name(rpe_matrix, "a recurrent state has no fixed number of keys")
    validation.check_exact_window(exact_window)
    validation.check_count("flush_interval", flush_interval)
    validation.warn_if_vanishing(score, kind, lim, rpe_matrix is not None)
    width = width_of_keys(head_dim, rpe_matrix is not None)
    rows = eager.state_rows(width, score.order)
    kv_state = torch.zeros(batch, kv_heads, rows, value_dim, dtype=eager.compute_dtype(dtype), device=device)
    positions = None if rpe_matrix is None else torch.zeros(batch, dtype=torch.int64, device=device)
    state = DecodeState(kv_state, kv_state.new_zeros(kv_state.shape[:3]), 0, dtype, head_dim, score, kind, lim, positions)
    if exact_window == 0:
        return with_buffer(state, flush_interval)
    places = (batch, kv_heads, exact_window)
    state = replace(
        state,
        exact_window=exact_window,
        local_keys=kv_state.new_zeros(*places, width, dtype=dtype),
        local_values=kv_state.new_zeros(*places, value_dim, dtype=dtype),
        local_mask=kv_state.new_zeros(batch, exact_window, dtype=torch.bool),
        local_decays=kv_state.new_zeros(places),
    )
    return with_buffer(state, flush_interval)
