"""`step` and `step_`: one token in the recurrent form.

The state is that of the linear algorithm. It has one row for each of the `1 + d + d(d+1)/2` distinct features of a key: sums of
the feature times v (`kv_state`), and sums of the feature (`k_sum`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax import eager, ops
from fastmax.core.score import log_of_sums
from fastmax.decoding.arguments import check_memory, check_token, prepare_after
from fastmax.decoding.buffered import flushed, with_buffer
from fastmax.decoding.state import DecodeState
from fastmax.decoding.window import Tokens, advanced, joined, local_tokens, with_local_keys


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DecodeState,
    *,
    attention_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    log_input_gate: Tensor | None = None,
) -> tuple[Tensor, DecodeState]:
    """Computes attention of one token to itself and all earlier tokens.

    Args:
        q: (b, h, 1, d), in the state's dtype.
        k, v: (b, hk, 1, d) and (b, hk, 1, dv). They are added to the state first, so the token sees itself.
        state: from `init_state`, `step` or `prefill`. It is not modified.
        attention_mask: bool (b, 1), True = the token is added to the state. A masked token does not change its batch entry: the
            sums, the exact window and the position stay. Its log_decay is ignored, and its output is undefined.
        log_decay: (b, hk, 1), as in `fastmax_attention`: the state decays before the token is added. A decay of NaN makes a
            state that holds a key NaN, until a decay of -inf.
        log_input_gate: (b, hk, 1), as in `fastmax_attention`. With an exact window or a buffer the state keeps it until its
            token leaves them. A NaN makes the sums NaN that its token is added to, until a decay of -inf.

    Returns:
        The output (b, h, 1, dv) in q's dtype and layout, and the new state. Differentiable.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.

    Under autocast, q, k and v are cast to the state's dtype unless they are float64, and the output has that dtype. Nothing
    else is rounded: tokens in the state's dtype give the same numbers as without autocast.
    """
    options = {"attention_mask": attention_mask, "log_decay": log_decay, "log_input_gate": log_input_gate}
    o, _, after = step_with_lse(q, k, v, state, **options)
    return o, after


def step_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DecodeState,
    *,
    attention_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    log_input_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, DecodeState]:
    """Computes `step`.

    Returns:
        The output, the log of the sums of weights (b, h, 1), and the new state. The log is None without an exact window.
    """
    q, k, v = check_token(q, k, v, state, attention_mask, log_decay, log_input_gate)
    token = Tokens.of(k, v, attention_mask, log_decay, log_input_gate)
    with ops.without_autocast(q):
        if state.flush_interval == 1 or eager.differentiating(q, *token, *state.tensors().values()):
            o, lse, after = _step(q, token, flushed(state))
            return o, lse, with_buffer(after, state.flush_interval)
        state = state.clone()
        return *_buffered_step_(q, token, state), state


def _step(q: Tensor, tokens: Tokens, state: DecodeState) -> tuple[Tensor, Tensor | None, DecodeState]:
    """Returns the results of `step_with_lse` for a state without a buffer."""
    q, k = _prepare_token(q, tokens.keys, state)
    mask = tokens.mask
    state = state if tokens.gates is None else state.with_gates()
    tokens, token = _tokens_of_step(tokens._replace(keys=k), state)
    o, kv_state, k_sum = ops.decode_step(
        q, token.keys, token.values, state.kv_state, state.k_sum, token.mask, token.decays, token.gates, state.score
    )
    lse = None
    if state.exact_window > 0:
        o, lse = _with_local_keys(q, o, k_sum, tokens, state)
        tokens = tokens.last(1, state.exact_window, _count(mask))
    return o, lse, advanced(state, 1, kv_state, k_sum, tokens, _count(mask))


def step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DecodeState,
    *,
    attention_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    log_input_gate: Tensor | None = None,
) -> Tensor:
    """Computes `step` in place: the token is added to the tensors of the state, and only the output is allocated.

    The numbers are those of `step`. This function is for generation, where earlier states are not needed: it takes half the
    memory of `step`, and the addresses of the state do not change, as CUDA graphs require. A replay of a graph advances the
    tensors, but not `state.tokens`, which counts calls of this function. A state that shares the tensors, from `detach`, `map`
    or `to`, changes too.

    Args:
        q, k, v, attention_mask, log_decay, log_input_gate: as in `step`. The first call with a gate adds `local_gates` to a
            state with an exact window or a buffer; it must not be the one that a CUDA graph captures.
        state: its tensors must be contiguous and must not overlap each other or q, k and v. States from the functions of this
            package satisfy this.

    Returns:
        The output (b, h, 1, dv) in q's dtype and layout.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        RuntimeError: autograd records q, k, v or the state, or a torch.func transform is active: use `step`. Or the state was
            made in inference mode, which has ended, and PyTorch operations would have to write it: use `state.clone()`. Or a
            CUDA graph is captured, and the state has no `local_gates` yet.
    """
    options = {"attention_mask": attention_mask, "log_decay": log_decay, "log_input_gate": log_input_gate}
    return step_with_lse_(q, k, v, state, **options)[0]


def step_with_lse_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DecodeState,
    *,
    attention_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    log_input_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes `step_`. Returns the output, and the log of the sums of weights as `step_with_lse`."""
    q, k, v = check_token(q, k, v, state, attention_mask, log_decay, log_input_gate)
    given = {"q": q, "k": k, "v": v, "log_decay": log_decay, "log_input_gate": log_input_gate}
    check_memory({name: x for name, x in given.items() if x is not None}, state)
    written_here = state.exact_window > 0 if state.flush_interval == 1 else attention_mask is not None
    if state.positions is not None or written_here:
        state.refuse_outside_inference_mode()
    token = Tokens.of(k, v, attention_mask, log_decay, log_input_gate)
    with ops.without_autocast(q):
        if state.flush_interval > 1:
            return _buffered_step_(q, token, state)
        q, k = _prepare_token(q, k, state)
        lse = None
        if state.exact_window > 0:
            ops.refuse_to_record(q, *token, *state.tensors().values())
            _add_gates_(state, q, token)
        tokens, token = _tokens_of_step(token._replace(keys=k), state)
        o = ops.decode_step_(
            q, token.keys, token.values, state.kv_state, state.k_sum, token.mask, token.decays, token.gates, state.score
        )
        if state.exact_window > 0:
            o, lse = _with_local_keys(q, o, state.k_sum, tokens, state)
            last = tokens.last(1, state.exact_window, _count(attention_mask))
            for x, new in zip(local_tokens(state), last, strict=True):
                if x is not None:
                    x.copy_(new)
    _count_token_(state, attention_mask)
    return o, lse


def _buffered_step_(q: Tensor, token: Tokens, state: DecodeState) -> tuple[Tensor, Tensor | None]:
    """Returns the first two results of `step_with_lse`, and overwrites a state with a buffer."""
    q, k = _prepare_token(q, token.keys, state)
    decays = token.decays if token.decays is None else token.decays.to(state.k_sum.dtype)
    token = token._replace(keys=k, decays=decays)
    _add_gates_(state, q, token)
    sums = state.kv_state, state.k_sum
    o, lse = ops.buffered_step_(q, token, sums, local_tokens(state), state.buffered, state.exact_window, state.score)
    if token.mask is not None:
        assert state.buffered is not None  # checked by `check_token`
        state.buffered.sub_((~token.mask).to(state.buffered.dtype))  # the next token overwrites a masked one
    _count_token_(state, token.mask)
    return o, lse if state.exact_window > 0 else None


def _add_gates_(state: DecodeState, q: Tensor, token: Tokens) -> None:
    """Gives a state with local tokens `local_gates` before its first token with a gate."""
    if token.gates is None or state.local_gates is not None:
        return
    ops.refuse_to_record(q, *token, *state.tensors().values())
    if not torch.compiler.is_compiling() and state.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "state must have local_gates before a CUDA graph of step_ with log_input_gate is captured, got None: each replay "
            "would reset them; make a step before"
        )
    state.local_gates = state.with_gates().local_gates


def _count_token_(state: DecodeState, mask: Tensor | None) -> None:
    """Adds one token to the positions and the number of tokens of a state."""
    if state.positions is not None:
        state.positions.add_(1 if mask is None else _count(mask))
    state.tokens += 1


def _count(mask: Tensor | None) -> Tensor | None:
    """Returns the number of real tokens of each batch entry, 0 or 1, (b,); None without a mask."""
    return None if mask is None else mask.squeeze(1).long()


def _tokens_of_step(token: Tokens, state: DecodeState) -> tuple[Tokens, Tokens]:
    """Returns the W + 1 last tokens, the new one included, and the token to add to the sums.

    That is the first of the W + 1 tokens, which leaves the exact window. Without a window both results are the new token.
    """
    if state.exact_window == 0:
        token = token.without_masked_decays()
        decays = token.decays if token.decays is None else token.decays.to(state.k_sum.dtype)
        return token, token._replace(decays=decays)
    tokens = joined(state, token)
    leaving = tokens.slice(0, 1)
    if token.mask is not None:  # no token leaves the window for a masked one
        leaving = leaving._replace(mask=leaving.mask & token.mask)
        leaving = leaving._replace(decays=torch.where(token.mask.unsqueeze(1), leaving.decays, 0.0))
    return tokens, leaving


def _with_local_keys(q: Tensor, o: Tensor, k_sum: Tensor, tokens: Tokens, state: DecodeState) -> tuple[Tensor, Tensor]:
    """Returns the output and the log of the sums of weights, with the keys of the window included.

    `o` and `k_sum` are results of the step that added the first of the tokens to the sums.
    """
    lse = log_of_sums(eager.sums_of_weights(q, k_sum, state.score))
    between = eager.sum_of_decays(tokens.slice(1, state.exact_window).decays)
    return with_local_keys(q, o, lse, between, tokens, state)


def _prepare_token(q: Tensor, k: Tensor, state: DecodeState) -> tuple[Tensor, Tensor]:
    """Returns `prepare_after` of one token, with derivatives of all orders if autograd records.

    The custom gradient of the normalisation has only first derivatives.
    """
    use_custom_gradient = state.normalize is not None and not eager.differentiating(q, k)
    return prepare_after(q, k, state, use_custom_gradient)
