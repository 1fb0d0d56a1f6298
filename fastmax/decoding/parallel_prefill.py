"""`prefill`: many tokens at once, by the parallel form of attention from a state."""

from __future__ import annotations

from torch import Tensor

from fastmax import eager, ops
from fastmax.core.call import Call
from fastmax.decoding.arguments import check_tokens, prepare_after
from fastmax.decoding.buffered import flushed, with_buffer
from fastmax.decoding.state import DecodeState
from fastmax.decoding.varlen import prefill_packed
from fastmax.decoding.window import Tokens, advanced, joined
from fastmax.decoding.window import prefill as prefill_window
from fastmax.prepare.bounds import with_bounds
from fastmax.prepare.padding import RealFirst


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DecodeState,
    *,
    attention_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    log_input_gate: Tensor | None = None,
) -> tuple[Tensor, DecodeState]:
    """Computes causal attention of n tokens to themselves and all earlier tokens, as n calls of `step`.

    Args:
        q: (b, h, n, d), in the state's dtype.
        k, v: (b, hk, n, d) and (b, hk, n, dv).
        state: from `init_state`, `step` or `prefill`. It is not modified.
        attention_mask: bool (b, n), True = the token is real. Other tokens are skipped wherever they are: the sequence
            continues as if they did not exist. They count neither in the exact window nor in positions, their log_decay is
            ignored, and their outputs are undefined. In `fastmax_attention` the mask hides keys only: masked tokens count in
            windows and distances, and their log_decay applies.
        log_decay: (b, hk, n), as in `fastmax_attention`.
        cu_seqlens: int32 (s + 1,), as in `fastmax_attention`: the n tokens of a batch of one are s sequences end to end. The
            state has s batch entries. Sequence i continues from entry i, and entry i of the result is the state after it. An
            empty sequence does not change its entry.
        log_input_gate: (b, hk, n), as in `step`.

    Returns:
        The output (b, h, n, dv) in q's dtype and layout, and the state after n tokens. Differentiable.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.

    Autocast works as in `step`. On a GPU the kernels of the linear algorithm compute the result and its gradient. There is no
    second derivative; `step` has derivatives of all orders. Packed sequences are computed in blocks of their mean length, one
    after the other.
    """
    q, k, v = check_tokens(q, k, v, state, attention_mask, log_decay, log_input_gate, cu_seqlens)
    n = q.shape[2]
    if k.shape[2] != n:
        raise ValueError(f"k and v must have q's number of tokens {n}, got {k.shape[2]}")
    if n == 0:  # a later in-place change of the result must not change the given state
        return eager.empty_like_layout(q, v.shape[3]), state.clone()
    tokens = Tokens.of(k, v, attention_mask, log_decay, log_input_gate)
    if attention_mask is None:
        return _without_lse(_continued(q, tokens, state, cu_seqlens))
    if state.exact_window == 0 and state.positions is None:  # sums do not depend on positions
        return _without_lse(_continued(q, tokens.without_masked_decays(), state, cu_seqlens))
    order = RealFirst.of(attention_mask, cu_seqlens)
    decays, gates = (None if x is None else order.first(x, 2) for x in (tokens.decays, tokens.gates))
    tokens = Tokens(order.first(k, 2), order.first(v, 2), order.mask, decays, gates).without_masked_decays()
    o, _, after = _continued(order.first(q, 2), tokens, state, cu_seqlens, order.count)
    return order.back(o, 2), after


def prefill_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DecodeState,
    order: RealFirst | None,
    *,
    log_decay: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    log_input_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, DecodeState]:
    """Computes `prefill`. With an `order`, the tokens are already in it.

    Returns:
        The output, the log of the sums of weights (b, h, n), None without an exact window, and the state after the tokens.
    """
    mask, count = (None, None) if order is None else (order.mask, order.count)
    q, k, v = check_tokens(q, k, v, state, mask, log_decay, log_input_gate, cu_seqlens)
    if q.shape[2] == 0:
        return eager.empty_like_layout(q, v.shape[3]), state.k_sum.new_empty(q.shape[:3]), state.clone()
    tokens = Tokens.of(k, v, mask, log_decay, log_input_gate).without_masked_decays()
    return _continued(q, tokens, state, cu_seqlens, count)


def _continued(
    q: Tensor, tokens: Tokens, state: DecodeState, cu_seqlens: Tensor | None, count: Tensor | None = None
) -> tuple[Tensor, Tensor | None, DecodeState]:
    """Returns the results of `prefill_with_lse`. Masked tokens have no decay.

    With `count`, only the first `count` tokens of each sequence are real.
    """
    with ops.without_autocast(q):
        before = flushed(state if tokens.gates is None else state.with_gates())
        if cu_seqlens is None:
            o, lse, after = _prefill(q, tokens, before, count)
        else:
            o, lse, after = prefill_packed(q, tokens, before, cu_seqlens, _prefill, count)
        return o, lse, with_buffer(after, state.flush_interval)


def _without_lse(results: tuple[Tensor, Tensor | None, DecodeState]) -> tuple[Tensor, DecodeState]:
    o, _, after = results
    return o, after


def _prefill(
    q: Tensor, tokens: Tokens, state: DecodeState, count: Tensor | None = None
) -> tuple[Tensor, Tensor | None, DecodeState]:
    """Returns the results of `prefill_with_lse`, for a state without a buffer.

    With `count` (b,), only the first `count` tokens of a row are real; the others are masked and have no decay.
    """
    n, lse = q.shape[2], None
    q, k = prepare_after(q, tokens.keys, state, use_custom_gradient=True)
    tokens = tokens._replace(keys=k)
    if state.exact_window > 0:
        o, lse, kv_state, k_sum, tokens = prefill_window(q, joined(state, tokens), state, count)
    else:
        tokens = tokens.without_masked()
        call = Call(state.score, causal=True, attention_mask=tokens.mask)
        call = with_bounds(call, q, tokens.keys, tokens.decays, continues=True, log_input_gate=tokens.gates)
        o, _, kv_state, k_sum = ops.prefill(q, tokens.keys, tokens.values, call, state.kv_state, state.k_sum)
    return o, lse, advanced(state, n, kv_state, k_sum, tokens, count)
