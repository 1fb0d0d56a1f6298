"""`step` and `step_`: one token in the recurrent form.

The state is that of the linear algorithm, with one row for each distinct product: `1 + d + d(d+1)/2` features of a key, summed
against v and against 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax import eager, ops
from fastmax.core.score import log_of_sums
from fastmax.decoding.arguments import check_memory, check_token, prepare_after
from fastmax.decoding.buffered import flushed, with_buffer
from fastmax.decoding.state import DecodeState
from fastmax.decoding.window import Tokens, advanced, joined, kept, with_local_keys


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DecodeState,
    *,
    attention_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, DecodeState]:
    """Attend one token to itself and all before it.

    Args:
        q: (b, h, 1, d), in the state's dtype.
        k, v: (b, hk, 1, d) and (b, hk, 1, dv); k and v join the state first, so the token sees itself.
        state: from `init_state`, `step` or `prefill`. It is not modified.
        attention_mask: bool (b, 1), True = the token joins the state. Another leaves its batch entry as it is: the sums, the
            exact window and the position. Its log_decay is ignored, and its output means nothing.
        log_decay: (b, hk, 1), of the token, as in `fastmax_attention`: the state decays before the token joins it. NaN makes a
            state NaN that holds a key, until a decay of -inf.

    Returns:
        The output (b, h, 1, dv) in q's dtype and layout, and the new state. Differentiable.

    Raises:
        TypeError, ValueError: naming the argument.

    Under autocast q, k and v of any dtype but float64 are cast to the state's, in which the output comes; nothing else is
    rounded, so that tokens which have that dtype already give the same numbers as without autocast.
    """
    q, k, v = check_token(q, k, v, state, attention_mask, log_decay)
    with ops.without_autocast(q):
        if state.flush_interval == 1 or eager.differentiating(q, k, v, log_decay, *state.tensors().values()):
            o, after = _step(q, Tokens(k, v, attention_mask, log_decay), flushed(state))
            return o, with_buffer(after, state.flush_interval)
        state = state.clone()
        return _buffered_step_(q, Tokens(k, v, attention_mask, log_decay), state), state


def _step(q: Tensor, tokens: Tokens, state: DecodeState) -> tuple[Tensor, DecodeState]:
    q, k = _prepare_token(q, tokens.keys, state)
    joins = tokens.mask
    tokens, token = _joining(tokens._replace(keys=k), state)
    o, kv_state, k_sum = ops.decode_step(
        q, token.keys, token.values, state.kv_state, state.k_sum, token.mask, token.decays, state.score
    )
    if state.exact_window > 0:
        o = _with_local_keys(q, o, k_sum, tokens, state)
        tokens = tokens.last(1, state.exact_window, _count(joins))
    return o, advanced(state, 1, kv_state, k_sum, tokens, _count(joins))


def step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DecodeState,
    *,
    attention_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Tensor:
    """`step` in place: the state itself takes the token, and only the output is allocated.

    The same numbers as `step`'s. For generation, where the state before the token is not needed again: half the memory of
    `step`, and the addresses of the state stay, as CUDA graphs want it (a replay advances the tensors; `state.tokens` counts
    calls of this function only). A state that shares its tensors, from `detach`, `map` or `to`, sees the change too.

    Args:
        q, k, v, attention_mask, log_decay: as in `step`.
        state: its tensors must be contiguous and overlap neither each other nor q, k and v, as those of the functions here do.

    Returns:
        The output (b, h, 1, dv) in q's dtype and layout.

    Raises:
        TypeError, ValueError: naming the argument.
        RuntimeError: autograd records q, k, v or the state, or a torch.func transform is active: use `step`. The state was
            made in inference mode, which has ended, and has an exact window or positions.
    """
    q, k, v = check_token(q, k, v, state, attention_mask, log_decay)
    given = {"q": q, "k": k, "v": v, "log_decay": log_decay}
    check_memory({name: x for name, x in given.items() if x is not None}, state)
    written_here = state.exact_window > 0 if state.flush_interval == 1 else attention_mask is not None
    if state.positions is not None or written_here:
        state.refuse_outside_inference_mode()
    with ops.without_autocast(q):
        if state.flush_interval > 1:
            return _buffered_step_(q, Tokens(k, v, attention_mask, log_decay), state)
        q, k = _prepare_token(q, k, state)
        if state.exact_window > 0:
            ops.refuse_to_record(q, k, v, log_decay, *state.tensors().values())
        tokens, token = _joining(Tokens(k, v, attention_mask, log_decay), state)
        o = ops.decode_step_(q, token.keys, token.values, state.kv_state, state.k_sum, token.mask, token.decays, state.score)
        if state.exact_window > 0:
            o = _with_local_keys(q, o, state.k_sum, tokens, state)
            near = tokens.last(1, state.exact_window, _count(attention_mask))
            for x, new in zip(kept(state), near, strict=True):
                x.copy_(new)
    _count_token_(state, attention_mask)
    return o


def _buffered_step_(q: Tensor, token: Tokens, state: DecodeState) -> Tensor:
    q, k = _prepare_token(q, token.keys, state)
    decays = token.decays if token.decays is None else token.decays.to(state.k_sum.dtype)
    token = token._replace(keys=k, decays=decays)
    sums = state.kv_state, state.k_sum
    o = ops.buffered_step_(q, token, sums, kept(state), state.buffered, state.exact_window, state.score)
    if token.mask is not None:
        assert state.buffered is not None  # `check_token` saw it
        state.buffered.sub_((~token.mask).to(state.buffered.dtype))  # the next token takes the place of a masked one
    _count_token_(state, token.mask)
    return o


def _count_token_(state: DecodeState, mask: Tensor | None) -> None:
    if state.positions is not None:
        state.positions.add_(1 if mask is None else _count(mask))
    state.tokens += 1


def _count(mask: Tensor | None) -> Tensor | None:
    """(b,), how many of the one token of each batch entry are there; None: all."""
    return None if mask is None else mask.squeeze(1).long()


def _joining(token: Tokens, state: DecodeState) -> tuple[Tokens, Tokens]:
    """Those that the window holds, this one among them, behind the one that leaves it; and which one joins the sums: that, or
    this one, where there is no window."""
    if state.exact_window == 0:
        token = token.without_masked_decays()
        decays = token.decays if token.decays is None else token.decays.to(state.k_sum.dtype)
        return token, token._replace(decays=decays)
    tokens = joined(state, token)
    leaving = tokens.slice(0, 1)
    if token.mask is not None:  # behind a masked one no token leaves
        leaving = leaving._replace(mask=leaving.mask & token.mask)
        leaving = leaving._replace(decays=torch.where(token.mask.unsqueeze(1), leaving.decays, 0.0))
    return tokens, leaving


def _with_local_keys(q: Tensor, o: Tensor, k_sum: Tensor, tokens: Tokens, state: DecodeState) -> Tensor:
    """`o` and `k_sum` are of a step with the token that leaves the window, the first of these."""
    lse = log_of_sums(eager.sums_of_weights(q, k_sum, state.score))
    between = eager.sum_of_decays(tokens.slice(1, state.exact_window).decays)
    return with_local_keys(q, o, lse, between, tokens, state)


def _prepare_token(q: Tensor, k: Tensor, state: DecodeState) -> tuple[Tensor, Tensor]:
    """`prepare_after` of one token. A step has derivatives of all orders, the custom gradient of a normalisation only one."""
    use_custom_gradient = state.normalize is not None and not eager.differentiating(q, k)
    return prepare_after(q, k, state, use_custom_gradient)
