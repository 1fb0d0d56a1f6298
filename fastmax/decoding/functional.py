"""The recurrent form: one token at a time from a state whose size does not depend on the number of tokens.

The state is the linear algorithm's, with one row for each distinct product: `1 + d + d(d+1)/2` features of a key, summed
against v and against 1. `prefill` takes many tokens at once through the parallel form and continues from the same state.
`fastmax.decoding.window` says how the last tokens are kept beside the sums for an exact window, `fastmax.decoding.buffered` how
new ones are gathered there.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from fastmax import eager, ops
from fastmax.core import validation
from fastmax.core.call import Call
from fastmax.core.score import log_of_sums
from fastmax.decoding.buffered import folded, gathering
from fastmax.decoding.state import DecodeState, width_of_keys
from fastmax.decoding.varlen import prefill_packed
from fastmax.decoding.window import Tokens, joined, kept, with_near_keys
from fastmax.decoding.window import prefill as prefill_window
from fastmax.prepare import sharded_dispatch
from fastmax.prepare.bounds import with_bounds
from fastmax.prepare.padding import RealFirst
from fastmax.prepare.positional import token_positions
from fastmax.prepare.tensors import Positions, cast_for_autocast, prepare_queries_and_keys


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
    fold_every: int = 1,
) -> DecodeState:
    """The state before any token, for `step` and `prefill`.

    Args:
        batch, kv_heads, head_dim: of k, (batch, kv_heads, tokens, head_dim).
        value_dim: of v; head_dim when None.
        dtype, device: of q, k and v.
        normalize: False or "token" ("sequence" looks at future tokens and has no recurrent form).
        temperature, a0, a1, a2, lim, p: as in `fastmax_attention`.
        rpe_matrix: None or "sinusoidal".
        exact_window: as in `fastmax_attention`; so many keys and values are kept, beside the sums.
        fold_every: T; above 1 `step_` gathers up to T new tokens beside the sums, which it then reads at every step and writes
            at every T-th alone. The outputs are the same function; 32 is a good value where `step_` generates on a GPU.

    Raises:
        TypeError, ValueError: naming the argument.

    Method: linear attention as a recurrence (Katharopoulos et al., 2020, arXiv:2006.16236), with the features of f.
    """
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {"batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    for name, size in sizes.items():
        validation.check_count(name, size, least=0 if name == "batch" else 1)
    validation.check_dtype("dtype", dtype)
    score = validation.check_score(temperature, a0, a1, a2, p)
    kind = validation.check_normalize(normalize, lim)
    if kind == "sequence":
        raise ValueError(f'normalize must be False or "token" for a recurrent state, got {normalize!r}: it looks at all tokens')
    if rpe_matrix is not None and not (isinstance(rpe_matrix, str) and rpe_matrix == "sinusoidal"):
        got = validation.describe(rpe_matrix)
        raise ValueError(f'rpe_matrix must be None or "sinusoidal" for a recurrent state, got {got}')
    validation.check_exact_window(exact_window)
    validation.check_count("fold_every", fold_every)
    validation.warn_if_vanishing(score, kind, lim, rpe_matrix is not None)
    width = width_of_keys(head_dim, rpe_matrix is not None)
    rows = eager.state_rows(width, score.order)
    values = torch.zeros(batch, kv_heads, rows, value_dim, dtype=eager.compute_dtype(dtype), device=device)
    positions = None if rpe_matrix is None else torch.zeros(batch, dtype=torch.int64, device=device)
    state = DecodeState(values, values.new_zeros(values.shape[:3]), 0, dtype, head_dim, score, kind, lim, positions)
    if exact_window == 0:
        return gathering(state, fold_every)
    places = (batch, kv_heads, exact_window)
    state = replace(
        state,
        exact_window=exact_window,
        near_keys=values.new_zeros(*places, width, dtype=dtype),
        near_values=values.new_zeros(*places, value_dim, dtype=dtype),
        near_mask=values.new_zeros(batch, exact_window, dtype=torch.bool),
        near_decays=values.new_zeros(places),
    )
    return gathering(state, fold_every)


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
    q, k, v = _check_token(q, k, v, state, attention_mask, log_decay)
    with ops.without_autocast(q):
        if state.fold_every == 1 or eager.differentiating(q, k, v, log_decay, *state.tensors().values()):
            o, after = _step(q, Tokens(k, v, attention_mask, log_decay), folded(state))
            return o, gathering(after, state.fold_every)
        state = state.clone()
        return _gathered_step_(q, Tokens(k, v, attention_mask, log_decay), state), state


def _step(q: Tensor, tokens: Tokens, state: DecodeState) -> tuple[Tensor, DecodeState]:
    q, k = _transform_token(q, tokens.keys, state)
    joins = tokens.mask
    tokens, token = _joining(tokens._replace(keys=k), state)
    o, values, weights = ops.decode_step(
        q, token.keys, token.values, state.values, state.weights, token.mask, token.decays, state.score
    )
    if state.exact_window > 0:
        o = _with_near_keys(q, o, weights, tokens, state)
        tokens = tokens.last(1, state.exact_window, _count(joins))
    return o, _advanced(state, 1, values, weights, tokens, _count(joins))


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
    q, k, v = _check_token(q, k, v, state, attention_mask, log_decay)
    given = {"q": q, "k": k, "v": v, "log_decay": log_decay}
    _check_memory({name: x for name, x in given.items() if x is not None}, state)
    written_here = state.exact_window > 0 if state.fold_every == 1 else attention_mask is not None
    if state.positions is not None or written_here:
        state.refuse_outside_inference_mode()
    with ops.without_autocast(q):
        if state.fold_every > 1:
            return _gathered_step_(q, Tokens(k, v, attention_mask, log_decay), state)
        q, k = _transform_token(q, k, state)
        if state.exact_window > 0:
            ops.refuse_to_record(q, k, v, log_decay, *state.tensors().values())
        tokens, token = _joining(Tokens(k, v, attention_mask, log_decay), state)
        o = ops.decode_step_(q, token.keys, token.values, state.values, state.weights, token.mask, token.decays, state.score)
        if state.exact_window > 0:
            o = _with_near_keys(q, o, state.weights, tokens, state)
            near = tokens.last(1, state.exact_window, _count(attention_mask))
            for x, new in zip(kept(state), near, strict=True):
                x.copy_(new)
    _count_token_(state, attention_mask)
    return o


def _gathered_step_(q: Tensor, token: Tokens, state: DecodeState) -> Tensor:
    q, k = _transform_token(q, token.keys, state)
    decays = token.decays if token.decays is None else token.decays.to(state.weights.dtype)
    token = token._replace(keys=k, decays=decays)
    sums = state.values, state.weights
    o = ops.gathered_step_(q, token, sums, kept(state), state.gathered, state.exact_window, state.score)
    if token.mask is not None:
        state.gathered.sub_((~token.mask).to(state.gathered.dtype))  # the next token takes the place of a masked one
    _count_token_(state, token.mask)
    return o


def _count_token_(state: DecodeState, mask: Tensor | None) -> None:
    if state.positions is not None:
        state.positions.add_(1 if mask is None else _count(mask))
    state.tokens += 1


def _count(mask: Tensor | None) -> Tensor | None:
    """(b,), how many of the one token of each batch entry are there; None: all."""
    return None if mask is None else mask.squeeze(1).long()


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DecodeState,
    *,
    attention_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, DecodeState]:
    """Attend n tokens, causally, to themselves and all before them: n calls of `step` in one.

    Args:
        q: (b, h, n, d), in the state's dtype.
        k, v: (b, hk, n, d) and (b, hk, n, dv).
        state: from `init_state`, `step` or `prefill`. It is not modified.
        attention_mask: bool (b, n), True = the token joins the state. The others, wherever they stand, leave no trace: each
            sequence goes on as it would without them. They count neither in the exact window nor in positions, their
            log_decay makes nothing fade, and their outputs mean nothing. (In `fastmax_attention` they do count, in a window
            and in distances, and fade: there a mask takes keys away, and here tokens.)
        log_decay: (b, hk, n), as in `fastmax_attention`.
        cu_seqlens: int32 (s + 1,), as in `fastmax_attention`: the n tokens of a batch of one are s sequences end to end. The
            state has s batch entries, and sequence i continues from entry i and leaves it for what follows; one of no token
            leaves it as it is.

    Returns:
        The output (b, h, n, dv) in q's dtype and layout, and the state after n tokens. Differentiable.

    Raises:
        TypeError, ValueError: naming the argument.

    Under autocast as `step`. On a GPU the linear algorithm's kernels compute it and its gradient, which has no derivative of
    its own; `step`'s has. Packed sequences are taken in turn, in blocks of their mean length.
    """
    q, k, v = _check(q, k, v, state, attention_mask, log_decay, cu_seqlens)
    n = q.shape[2]
    if k.shape[2] != n:
        raise ValueError(f"k and v must have q's number of tokens {n}, got {k.shape[2]}")
    if n == 0:  # the state that is returned may be changed in place, the given one not with it
        return eager.empty_like_layout(q, v.shape[3]), state.clone()
    tokens = Tokens(k, v, attention_mask, log_decay)
    if attention_mask is None:
        return _continued(q, tokens, state, cu_seqlens)
    if state.exact_window == 0 and state.positions is None:  # sums do not depend on where tokens stand
        return _continued(q, tokens.without_masked_decays(), state, cu_seqlens)
    order = RealFirst.of(attention_mask, cu_seqlens)
    decays = None if log_decay is None else order.first(log_decay, 2)
    tokens = Tokens(order.first(k, 2), order.first(v, 2), order.mask, decays).without_masked_decays()
    o, after = _continued(order.first(q, 2), tokens, state, cu_seqlens, order.count)
    return order.back(o, 2), after


def prefill_real_first(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DecodeState,
    order: RealFirst,
    *,
    log_decay: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, DecodeState]:
    """`prefill` of tokens that are in that order already."""
    q, k, v = _check(q, k, v, state, order.mask, log_decay, cu_seqlens)
    if q.shape[2] == 0:
        return eager.empty_like_layout(q, v.shape[3]), state.clone()
    return _continued(q, Tokens(k, v, order.mask, log_decay).without_masked_decays(), state, cu_seqlens, order.count)


def _continued(
    q: Tensor, tokens: Tokens, state: DecodeState, cu_seqlens: Tensor | None, count: Tensor | None = None
) -> tuple[Tensor, DecodeState]:
    """Masked tokens have no decay. With a `count`, of each sequence, only so many of its tokens are there, the first ones."""
    with ops.without_autocast(q):
        before = folded(state)
        if cu_seqlens is None:
            o, after = _prefill(q, tokens, before, count)
        else:
            o, after = prefill_packed(q, tokens, before, cu_seqlens, _prefill, count)
        return o, gathering(after, state.fold_every)


def _prefill(q: Tensor, tokens: Tokens, state: DecodeState, count: Tensor | None = None) -> tuple[Tensor, DecodeState]:
    """Output of n tokens, and the state after them. With a `count` (b,) only the first `count` tokens of a row exist; the
    others, which are masked and have no decay, leave no trace."""
    n = q.shape[2]
    q, k = _transform(q, tokens.keys, state, use_custom_gradient=True)
    tokens = tokens._replace(keys=k)
    if state.exact_window > 0:
        o, values, weights, tokens = prefill_window(q, joined(state, tokens), state, count)
    else:
        tokens = tokens.without_masked()
        call = Call(state.score, causal=True, attention_mask=tokens.mask)
        call = with_bounds(call, q, tokens.keys, tokens.decays, continues=True)
        o, _, values, weights = ops.prefill(q, tokens.keys, tokens.values, call, state.values, state.weights)
    return o, _advanced(state, n, values, weights, tokens, count)


def _joining(token: Tokens, state: DecodeState) -> tuple[Tokens, Tokens]:
    """Those that the window holds, this one among them, behind the one that leaves it; and which one joins the sums: that, or
    this one, where there is no window."""
    if state.exact_window == 0:
        token = token.without_masked_decays()
        decays = token.decays if token.decays is None else token.decays.to(state.weights.dtype)
        return token, token._replace(decays=decays)
    tokens = joined(state, token)
    leaving = tokens.slice(0, 1)
    if token.mask is not None:  # behind a masked one no token leaves
        leaving = leaving._replace(mask=leaving.mask & token.mask)
        leaving = leaving._replace(decays=torch.where(token.mask.unsqueeze(1), leaving.decays, 0.0))
    return tokens, leaving


def _with_near_keys(q: Tensor, o: Tensor, weights: Tensor, tokens: Tokens, state: DecodeState) -> Tensor:
    """`o` and `weights` are of a step with the token that leaves the window, the first of these."""
    lse = log_of_sums(eager.sums_of_weights(q, weights, state.score))
    between = eager.sum_of_decays(tokens.slice(1, state.exact_window).decays)
    return with_near_keys(q, o, lse, between, tokens, state)


def _advanced(
    state: DecodeState, n: int, values: Tensor, weights: Tensor, tokens: Tokens, count: Tensor | None = None
) -> DecodeState:
    """The state after n tokens, or as many as `count` (b,); `tokens` are the last ones, where it keeps some."""
    changes = {"values": values, "weights": weights, "tokens": state.tokens + n}
    if state.positions is not None:
        changes["positions"] = state.positions + (n if count is None else count)
    if state.exact_window > 0:  # copies, not views of all tokens
        near = tokens._asdict().items()
        changes |= {f"near_{name}": x.clone(memory_format=torch.contiguous_format) for name, x in near}
    return replace(state, **changes)


def _check_token(
    q: Tensor, k: Tensor, v: Tensor, state: DecodeState, mask: Tensor | None, log_decay: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _check(q, k, v, state, mask, log_decay)
    if q.shape[2] != 1 or k.shape[2] != 1:
        raise ValueError(
            f"q, k and v must hold one token, (b, h, 1, d), got {q.shape[2]} in q and {k.shape[2]} in k; "
            "use fastmax.decoding.prefill for more"
        )
    return q, k, v


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DecodeState,
    mask: Tensor | None,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as they are, or in the state's dtype under autocast."""
    if not isinstance(state, DecodeState):
        raise TypeError(f"state must come from fastmax.decoding.init_state, got {type(state).__name__}")
    q, k, v = cast_for_autocast(q, k, v, dtype=state.dtype)
    if sharded_dispatch.current() is not None:
        raise RuntimeError("decoding is of sequences that one rank has as a whole: leave fastmax.distributed.context_parallel")
    sharded_dispatch.refuse("decoding runs on what a rank has, with a state of its heads: pass .to_local()", q=q, k=k, v=v)
    validation.check_tensors(q, k, v, True, mask, log_decay)
    if q.dim() != 4:
        raise ValueError(f"q, k and v must be 4-d (batch, heads, tokens, head_dim), got {q.dim()} dimensions")
    if q.shape[1] == 0:
        raise ValueError(f"q must have at least one head, got shape {tuple(q.shape)}")
    batch, heads, rows, value_dim = state.values.shape
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
    if q.device != state.values.device:
        raise ValueError(f"q, k and v must be on the state's device {state.values.device}, got {q.device}")
    width = width_of_keys(state.head_dim, state.positions is not None)
    expected = (batch, heads, eager.state_rows(width, state.score.order))
    wide = eager.compute_dtype(state.dtype)
    if state.weights.shape != expected or rows != expected[2] or not state.values.dtype == state.weights.dtype == wide:
        raise ValueError(
            f"state must have values {(*expected, value_dim)} and weights {expected} of {wide} for its options, got "
            f"{tuple(state.values.shape)} of {state.values.dtype} and {tuple(state.weights.shape)} of {state.weights.dtype}"
        )
    places = state.exact_window + (state.fold_every if state.fold_every > 1 else 0)
    _check_window(state, (batch, heads, places), width, value_dim)
    return q, k, v


def _check_window(state: DecodeState, places: tuple[int, int, int], width: int, value_dim: int) -> None:
    """The tokens that the state keeps."""
    if places[2] == 0:
        return
    wide, gathers = eager.compute_dtype(state.dtype), state.fold_every > 1
    if gathers and (state.gathered is None or state.gathered.shape != places[:2] or state.gathered.dtype != torch.int32):
        got = "None" if state.gathered is None else f"{tuple(state.gathered.shape)} of {state.gathered.dtype}"
        raise ValueError(f"state must have gathered {places[:2]} of torch.int32 for its fold_every, got {got}")
    for (name, x), shape, dtype in zip(
        kept(state)._asdict().items(),
        ((*places, width), (*places, value_dim), places if gathers else (places[0], places[2]), places),
        (state.dtype, state.dtype, torch.bool, wide),
        strict=True,
    ):
        if x is None or x.shape != shape or x.dtype != dtype:
            got = "None" if x is None else f"{tuple(x.shape)} of {x.dtype}"
            raise ValueError(f"state must have near_{name} {shape} of {dtype} for its exact_window and fold_every, got {got}")


def _check_memory(tokens: dict[str, Tensor], state: DecodeState) -> None:
    """That every element of the state has memory of its own, so that writing it changes nothing else."""
    written = {f"state.{name}": x for name, x in state.tensors().items()}
    for name, x in written.items():
        if not x.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous to be written in place, got strides {x.stride()} for shape {tuple(x.shape)}; "
                "state.clone() is"
            )
    if torch.compiler.is_compiling():  # where there is no memory yet; the compiler keeps track of what is the same
        return
    if not eager.is_transformed():  # a look at each storage costs less than one at each pair
        of_state, of_tokens = ([x.untyped_storage().data_ptr() for x in tensors.values()] for tensors in (written, tokens))
        if len(set(of_state) - {0, *of_tokens}) == len(of_state):
            return
    for (name, x), (other, y) in combinations((written | tokens).items(), 2):
        if name in written and torch._C._overlaps(x, y) and not _is_apart(x, y):
            raise ValueError(f"{name} must not overlap {other} to be written in place; the memory of state.clone() does not")


def _is_apart(x: Tensor, y: Tensor) -> bool:
    """Whether one of two tensors in the same storage lies behind the other."""

    def extent(x: Tensor) -> tuple[int, int]:
        first = x.storage_offset() * x.element_size()
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        return first, first + (last + 1) * x.element_size()

    (x_first, x_stop), (y_first, y_stop) = extent(x), extent(y)
    return x_stop <= y_first or y_stop <= x_first or 0 in (x.numel(), y.numel())


def _transform(q: Tensor, k: Tensor, state: DecodeState, use_custom_gradient: bool) -> tuple[Tensor, Tensor]:
    """q and k as the operators take them, at positions that continue from the state."""
    positions = None
    if state.positions is not None:
        positions = token_positions(state.positions[:, None, None], q.shape[2], q.device)
        positions = Positions(positions, positions)
    return prepare_queries_and_keys(q, k, state.normalize, state.lim, positions, use_custom_gradient)


def _transform_token(q: Tensor, k: Tensor, state: DecodeState) -> tuple[Tensor, Tensor]:
    """`_transform` of one token: a step has derivatives of all orders, which the custom gradient of a normalisation has not."""
    use_custom_gradient = state.normalize is not None and not eager.differentiating(q, k)
    return _transform(q, k, state, use_custom_gradient)
