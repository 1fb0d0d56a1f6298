"""Checks of the arguments of `step`, `step_` and `prefill`, and preparation of q and k."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from fastmax import eager
from fastmax.core import validation
from fastmax.decoding.state import DecodeState, width_of_keys
from fastmax.decoding.window import local_tokens
from fastmax.prepare import sharded_dispatch
from fastmax.prepare.positional import token_positions
from fastmax.prepare.tensors import Positions, cast_for_autocast, prepare_queries_and_keys


def check_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DecodeState,
    mask: Tensor | None,
    log_decay: Tensor | None,
    log_input_gate: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Checks the arguments of a step or a prefill; returns q, k and v, cast to the state's dtype under autocast."""
    if not isinstance(state, DecodeState):
        raise TypeError(f"state must come from fastmax.decoding.init_state, got {type(state).__name__}")
    q, k, v = cast_for_autocast(q, k, v, dtype=state.dtype)
    if sharded_dispatch.current() is not None:
        raise RuntimeError("decoding needs whole sequences on one rank: leave fastmax.distributed.context_parallel")
    sharded_dispatch.refuse("decoding runs on the local heads of a rank and their state: pass .to_local()", q=q, k=k, v=v)
    validation.check_tensors(q, k, v, True, mask, log_decay, log_input_gate)
    if q.dim() != 4:
        raise ValueError(f"q, k and v must be 4-d (batch, heads, tokens, head_dim), got {q.dim()} dimensions")
    if q.shape[1] == 0:
        raise ValueError(f"q must have at least one head, got shape {tuple(q.shape)}")
    batch, heads, rows, value_dim = state.kv_state.shape
    validation.check_cu_seqlens(cu_seqlens, q, k)
    if cu_seqlens is not None and cu_seqlens.shape[0] != batch + 1:
        raise ValueError(
            f"cu_seqlens must have shape ({batch + 1},), a sequence for each batch entry of the state, got "
            f"{tuple(cu_seqlens.shape)}"
        )
    batch_of_k = batch if cu_seqlens is None else 1
    if k.shape[0] != batch_of_k or k.shape[1] != heads or k.shape[3] != state.head_dim:
        expected = f"({batch_of_k}, {heads}, tokens, {state.head_dim})"
        raise ValueError(f"k must have the state's shape {expected}, got {tuple(k.shape)}")
    if v.shape[3] != value_dim:
        raise ValueError(f"v must have the state's value_dim {value_dim}, got {v.shape[3]}")
    if q.dtype != state.dtype:
        raise TypeError(f"q, k and v must have the state's dtype {state.dtype}, got {q.dtype}")
    if q.device != state.kv_state.device:
        raise ValueError(f"q, k and v must be on the state's device {state.kv_state.device}, got {q.device}")
    width = width_of_keys(state.head_dim, state.positions is not None)
    shape = (batch, heads, eager.state_rows(width, state.score.order))
    wide = eager.compute_dtype(state.dtype)
    if state.k_sum.shape != shape or rows != shape[2] or not state.kv_state.dtype == state.k_sum.dtype == wide:
        raise ValueError(
            f"state must have kv_state {(*shape, value_dim)} and k_sum {shape} of {wide} for its options, got "
            f"{tuple(state.kv_state.shape)} of {state.kv_state.dtype} and {tuple(state.k_sum.shape)} of {state.k_sum.dtype}"
        )
    places = state.exact_window + (state.flush_interval if state.flush_interval > 1 else 0)
    _check_window(state, (batch, heads, places), width, value_dim)
    return q, k, v


def check_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DecodeState,
    mask: Tensor | None,
    log_decay: Tensor | None,
    log_input_gate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Checks the arguments of a step, as `check_tokens`; q, k and v must hold one token."""
    q, k, v = check_tokens(q, k, v, state, mask, log_decay, log_input_gate)
    if q.shape[2] != 1 or k.shape[2] != 1:
        raise ValueError(
            f"q, k and v must hold one token, (b, h, 1, d), got {q.shape[2]} in q and {k.shape[2]} in k; "
            "use fastmax.decoding.prefill for more"
        )
    return q, k, v


def _check_window(state: DecodeState, places: tuple[int, int, int], width: int, value_dim: int) -> None:
    """Checks the `local_` tensors and `buffered` of a state; `places` are the batch, the heads and the number of tokens."""
    if places[2] == 0:
        return
    wide, buffers = eager.compute_dtype(state.dtype), state.flush_interval > 1
    if buffers and (state.buffered is None or state.buffered.shape != places[:2] or state.buffered.dtype != torch.int32):
        got = "None" if state.buffered is None else f"{tuple(state.buffered.shape)} of {state.buffered.dtype}"
        raise ValueError(f"state must have buffered {places[:2]} of torch.int32 for its flush_interval, got {got}")
    for (name, x), shape, dtype in zip(
        local_tokens(state)._asdict().items(),
        ((*places, width), (*places, value_dim), places if buffers else (places[0], places[2]), places, places),
        (state.dtype, state.dtype, torch.bool, wide, wide),
        strict=True,
    ):
        if name == "gates" and x is None:  # no token had one
            continue
        if x is None or x.shape != shape or x.dtype != dtype:
            got = "None" if x is None else f"{tuple(x.shape)} of {x.dtype}"
            raise ValueError(
                f"state must have local_{name} {shape} of {dtype} for its exact_window and flush_interval, got {got}"
            )


def check_memory(tokens: dict[str, Tensor], state: DecodeState) -> None:
    """Checks that the tensors of a state can be written in place: contiguous, and no overlap with each other or the tokens."""
    written = {f"state.{name}": x for name, x in state.tensors().items()}
    for name, x in written.items():
        if not x.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous to be written in place, got strides {x.stride()} for shape {tuple(x.shape)}; "
                "use state.clone()"
            )
    if torch.compiler.is_compiling():  # tensors have no memory yet; the compiler tracks aliases
        return
    if not eager.is_transformed():  # comparing storages is cheaper than comparing all pairs of tensors
        of_state, of_tokens = ([x.untyped_storage().data_ptr() for x in tensors.values()] for tensors in (written, tokens))
        if len(set(of_state) - {0, *of_tokens}) == len(of_state):
            return
    for (name, x), (other, y) in combinations((written | tokens).items(), 2):
        if name in written and torch._C._overlaps(x, y) and not _is_apart(x, y):
            raise ValueError(f"{name} must not overlap {other} to be written in place; use state.clone()")


def _is_apart(x: Tensor, y: Tensor) -> bool:
    """Returns whether one of two tensors in the same storage ends before the other starts."""

    def extent(x: Tensor) -> tuple[int, int]:
        first = x.storage_offset() * x.element_size()
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        return first, first + (last + 1) * x.element_size()

    (x_first, x_stop), (y_first, y_stop) = extent(x), extent(y)
    return x_stop <= y_first or y_stop <= x_first or 0 in (x.numel(), y.numel())


def prepare_after(q: Tensor, k: Tensor, state: DecodeState, use_custom_gradient: bool) -> tuple[Tensor, Tensor]:
    """Returns q and k normalised and, with a sinusoidal rpe_matrix, with the channels of the positions after the state."""
    positions = None
    if state.positions is not None:
        positions = token_positions(state.positions[:, None, None], q.shape[2], q.device)
        positions = Positions(positions, positions)
    return prepare_queries_and_keys(q, k, state.normalize, state.lim, positions, use_custom_gradient)
