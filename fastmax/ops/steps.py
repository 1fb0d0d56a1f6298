"""`decode_step`, `decode_step_` and `buffered_step_`: one token of decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastmax import eager
from fastmax.core.call import SCORE
from fastmax.core.score import Score
from fastmax.ops.autocast import without_autocast
from fastmax.ops.flops import count_step
from fastmax.ops.registration import Operator, refuse_gradient, register


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_state: Tensor,
    k_sum: Tensor,
    mask: Tensor | None,
    log_decay: Tensor | None,
    log_input_gate: Tensor | None,
    score: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes one recurrent step of 4-d, checked arguments; see `fastmax.decoding`.

    Args:
        log_decay: (b, hk, 1), in the dtype of the state; decays above 0 count as 0.
        log_input_gate: (b, hk, 1), in the dtype of the state and in its range, or NaN.

    Returns:
        The output, and the new kv_state and k_sum.
    """
    tensors = (q, k, v, kv_state, k_sum, mask, log_decay, log_input_gate)
    if eager.differentiating(*tensors):
        return eager.decode_step(*tensors, score)
    return _DECODE_STEP(*tensors, *score)


def decode_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_state: Tensor,
    k_sum: Tensor,
    mask: Tensor | None,
    log_decay: Tensor | None,
    log_input_gate: Tensor | None,
    score: Score,
) -> Tensor:
    """Computes `decode_step` in place: overwrites kv_state and k_sum, and returns the output.

    kv_state and k_sum are contiguous and overlap no other argument.

    Raises:
        RuntimeError: a gradient would have to be recorded.
    """
    tensors = (q, k, v, kv_state, k_sum, mask, log_decay, log_input_gate)
    return in_place(_DECODE_STEP_, tensors, (kv_state, k_sum), score)


def buffered_step_(
    q: Tensor,
    token: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    sums: tuple[Tensor, Tensor],
    local: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    buffered: Tensor,
    exact_window: int,
    score: Score,
) -> tuple[Tensor, Tensor]:
    """Computes a step in place, on a state with a buffer of tokens; see `fastmax.decoding`.

    Args:
        token: k, v, attention_mask, log_decay and log_input_gate of the new token.
        sums: kv_state and k_sum.
        local: the `local_` tensors of the state; with a gate there are local gates. Arguments are 4-d and checked; decays and
            gates are in the dtype of the sums.

    Returns:
        The output, and the log of the sums of weights (b, h, 1) in the dtype of the sums, -inf where the sum is 0.

    Raises:
        RuntimeError: a gradient would have to be recorded.
    """
    k, v, *accompanying = token
    *others, gates = local
    written = (*sums, *others, buffered, gates)
    return in_place(_BUFFERED_STEP_, (q, k, v, *written, *accompanying), written, (exact_window, *score))


def in_place(operator: Operator, tensors: tuple[Tensor | None, ...], written: tuple[Tensor | None, ...], options: tuple) -> Any:
    """Calls an operator that overwrites the tensors `written`; returns its results."""
    refuse_to_record(*tensors)
    if torch.compiler.is_compiling():
        return operator(*tensors, *options)
    torch.autograd.graph.increment_version([x for x in written if x is not None])
    with torch._C._AutoDispatchBelowADInplaceOrView():  # skips the registered wrappers; the lines above do their work
        return operator(*tensors, *options)


def refuse_to_record(*tensors: Tensor | None) -> None:
    """Raises an error if autograd records operations on these tensors."""
    if eager.differentiating(*tensors):
        raise RuntimeError(
            "step_ writes over the state that a gradient would need: use fastmax.decoding.step or the layer's forward, "
            "or call it under torch.no_grad()"
        )


_TOKEN = "Tensor? attention_mask, Tensor? log_decay, Tensor? log_input_gate"
_MAX_PLACES = 16384  # for tokens in a buffer


def _decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_state: Tensor,
    k_sum: Tensor,
    mask: Tensor | None,
    log_decay: Tensor | None,
    gate: Tensor | None,
    *score: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    with without_autocast(q):
        return eager.decode_step(q, k, v, kv_state, k_sum, mask, log_decay, gate, Score(*score))


def _fake_decode_step(q: Tensor, k: Tensor, v: Tensor, kv_state: Tensor, k_sum: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    state = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (kv_state, k_sum))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), *state


def _decode_step_flops(q: Tensor, k: Tensor, v: Tensor, kv_state: Tensor, *arguments: Any, out_val: object = None) -> int:
    return count_step(q, kv_state)


_DECODE_STEP = register(
    f"decode_step(Tensor q, Tensor k, Tensor v, Tensor kv_state, Tensor k_sum, {_TOKEN}, {SCORE}) "
    "-> (Tensor o, Tensor new_kv_state, Tensor new_k_sum)",
    _decode_step,
    _fake_decode_step,
    kernel_of="q v",
    flops=_decode_step_flops,
)


def _decode_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_state: Tensor,
    k_sum: Tensor,
    mask: Tensor | None,
    log_decay: Tensor | None,
    gate: Tensor | None,
    *score: Any,
) -> Tensor:
    with without_autocast(q):
        return eager.decode_step_(q, k, v, kv_state, k_sum, mask, log_decay, gate, Score(*score))


def _fake_decode_step_(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


_DECODE_STEP_ = register(
    f"decode_step_(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_state, Tensor(b!) k_sum, {_TOKEN}, {SCORE}) -> (Tensor o)",
    _decode_step_,
    _fake_decode_step_,
    kernel_of="q v",
    flops=_decode_step_flops,
)
refuse_gradient(_DECODE_STEP_, refuse_to_record, written=slice(3, 5))


def _buffered_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_state: Tensor,
    k_sum: Tensor,
    local_keys: Tensor,
    local_values: Tensor,
    local_mask: Tensor,
    local_decays: Tensor,
    buffered: Tensor,
    local_gates: Tensor | None,
    mask: Tensor | None,
    log_decay: Tensor | None,
    log_input_gate: Tensor | None,
    exact_window: int,
    *score: Any,
) -> tuple[Tensor, Tensor]:
    if log_input_gate is not None and local_gates is None:
        raise ValueError("log_input_gate needs local_gates, got None")
    state = kv_state, k_sum, local_keys, local_values, local_mask, local_decays, buffered, local_gates
    token = mask, log_decay, log_input_gate
    with without_autocast(q):
        return eager.buffered_step_(q, k, v, *state, *token, exact_window, Score(*score))


def _fake_buffered_step_(q: Tensor, k: Tensor, v: Tensor, kv_state: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return _fake_decode_step_(q, k, v), kv_state.new_empty(q.shape[:-1])


def _covers_buffered_step_(
    q: Tensor, k: Tensor, v: Tensor, kv_state: Tensor, k_sum: Tensor, local_keys: Tensor, *arguments: Any
) -> bool:
    return local_keys.dim() == 4 and local_keys.shape[2] <= _MAX_PLACES


def _buffered_step_flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_state: Tensor,
    k_sum: Tensor,
    local_keys: Tensor,
    *arguments: Any,
    out_val: object = None,
) -> int:
    """Counts a step of the sums, to which every token is added at some time, and the products with the local tokens."""
    (b, h, _, d), places = q.shape, local_keys.shape[2]
    return count_step(q, kv_state) + 2 * b * h * places * (d + v.shape[3])


_BUFFERED_STEP_ = register(
    "buffered_step_(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_state, Tensor(b!) k_sum, Tensor(c!) local_keys, "
    "Tensor(d!) local_values, Tensor(e!) local_mask, Tensor(f!) local_decays, Tensor(g!) buffered, Tensor(h!)? local_gates, "
    f"{_TOKEN}, int exact_window, {SCORE}) -> (Tensor o, Tensor lse)",
    _buffered_step_,
    _fake_buffered_step_,
    kernel_of="q v",
    covers=_covers_buffered_step_,
    flops=_buffered_step_flops,
)
refuse_gradient(_BUFFERED_STEP_, refuse_to_record, written=slice(3, 11))
