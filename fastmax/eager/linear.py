"""The linear algorithm: a prefix state of key features replaces the keys.

    f(q.k) = a0 + a1 q.k + a2 (q (x) q).(k (x) k)

so `sum_j f(q_i.k_j) v_j` needs of the keys only `sum_j v_j`, `sum_j k_j v_j^T` and `sum_j (k_j (x) k_j) v_j^T`, and the
denominator the same sums without v. Causal attention walks the sequence in chunks. The inter-chunk part reads the state, the
intra-chunk part is a tile of the quadratic algorithm. Decays and sequence starts are factors of what a chunk reads from the
state, of what it adds to it, and of the state carried past it (`fastmax.eager.decay`). The backward walks forwards once for dq
(the same states, recomputed) and in reverse once for dk and dv, with states of q, g and e in place of k, v and 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastmax.core.score import Score
from fastmax.eager import tiles
from fastmax.eager.blocks import Gradients, KeyFactors, Operands, Scan, Sink, Span, spans
from fastmax.eager.decay import Factor, Factors
from fastmax.eager.features import (
    feature_count,
    fold_pairs,
    pad_head_dim,
    padded_head_dim,
    pair_features,
    symmetric_index,
    symmetrize,
    unfold_pairs,
)
from fastmax.eager.planner import LinearPlan
from fastmax.eager.workspace import Workspace


class State(NamedTuple):
    """Sums over tokens of features of x (B, C, d) times y (B, C, c) and times a weight (B, C, 1), None for 1; d is padded.

    Forward: x = k, y = v, weight 0 where a key is masked. Backward: x = q, y = g, weight e.
    """

    zeroth: Tensor  # (B, 1, c)
    first: Tensor  # (B, d, c)
    second: Tensor | None  # (B, feature_count(d), c); None for order 1, as is moment2
    moment0: Tensor  # (B, 1, 1)
    moment1: Tensor  # (B, 1, d)
    moment2: Tensor | None  # (B, d, d)


def empty_state(blocks: int, d: int, channels: int, order: int, like: Tensor) -> State:
    """The state before any token, in the dtype and on the device of `like`."""
    d = padded_head_dim(d)

    def zeros(*shape: int) -> Tensor:
        return like.new_zeros(blocks, *shape)

    second = zeros(feature_count(d), channels) if order == 2 else None
    moment2 = zeros(d, d) if order == 2 else None
    return State(zeros(1, channels), zeros(d, channels), second, zeros(1, 1), zeros(1, d), moment2)


def unpack_state(kv_state: Tensor, k_sum: Tensor, d: int, order: int) -> State:
    """The state from its rows 1, x_a, x_a x_b (a <= b): kv_state (B, rows, c), k_sum (B, rows). Copies."""
    rows = torch.cat([kv_state, k_sum.unsqueeze(-1)], dim=-1)
    pad = padded_head_dim(d) - d
    zeroth, first, pairs = rows.split([1, d, rows.shape[1] - d - 1], dim=1)
    first = F.pad(first, (0, 0, 0, pad))
    second = moment2 = None
    if order == 2:
        second = unfold_pairs(pairs, d)[..., :-1].contiguous()
        moment2 = F.pad(pairs[:, symmetric_index(d).to(pairs.device), -1], (0, pad, 0, pad))
    moment1 = first[..., -1].unsqueeze(1)
    return State(zeroth[..., :-1].clone(), first[..., :-1].clone(), second, zeroth[..., -1:].clone(), moment1, moment2)


def pack_state(state: State, d: int) -> tuple[Tensor, Tensor]:
    """The inverse of `unpack_state`: kv_state (B, rows, c) and k_sum (B, rows)."""
    kv_state = [state.zeroth, state.first[:, :d]]
    k_sum = [state.moment0.squeeze(1), state.moment1.squeeze(1)[:, :d]]
    if state.second is not None:
        a, b = torch.triu_indices(d, d, device=state.second.device)
        kv_state.append(fold_pairs(state.second, d))
        k_sum.append(state.moment2[:, a, b])
    return torch.cat(kv_state, dim=1), torch.cat(k_sum, dim=1)


def _absorb(state: State, x: Tensor, y: Tensor, weight: Tensor | None, workspace: Workspace | None) -> State:
    """Return the state with tokens added; in place when nothing is recorded."""
    out = State(*(None,) * len(state)) if workspace is None else state
    weighted = x if weight is None else x * weight
    count = x.shape[1] if weight is None else weight.sum(1, keepdim=True)
    second, moment2 = state.second, state.moment2
    if second is not None:
        second = torch.baddbmm(second, pair_features(x, workspace).mT, y, out=out.second)
        moment2 = torch.baddbmm(moment2, weighted.mT, x, out=out.moment2)
    return State(
        torch.add(state.zeroth, y.sum(1, keepdim=True), out=out.zeroth),
        torch.baddbmm(state.first, x.mT, y, out=out.first),
        second,
        torch.add(state.moment0, count, out=out.moment0),
        torch.add(state.moment1, weighted.sum(1, keepdim=True), out=out.moment1),
        moment2,
    )


def _read_values(state: State, x: Tensor, score: Score, workspace: Workspace | None) -> Tensor:
    """`sum_j f(x_i.x_j) y_j` over the tokens j in the state: x (B, R, d) -> (B, R, c)."""
    out = torch.baddbmm(score.a0 * state.zeroth, x, state.first, alpha=score.a1)
    if state.second is not None:
        features = pair_features(x, workspace, doubled=True)
        out = torch.baddbmm(out, features, state.second, alpha=score.a2, out=None if workspace is None else out)
    return out


def _read_weights(state: State, x: Tensor, score: Score) -> Tensor:
    """`sum_j f(x_i.x_j) weight_j` over the tokens j in the state: x (B, R, d) -> (B, R, 1)."""
    out = torch.baddbmm(score.a0 * state.moment0, x, state.moment1.mT, alpha=score.a1)
    if state.moment2 is not None:
        out = out + score.a2 * ((x @ state.moment2) * x).sum(-1, keepdim=True)
    return out


def _read_gradient(
    state: State, x: Tensor, y: Tensor, weight: Tensor | None, score: Score, workspace: Workspace, values: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`sum_j f'(x_i.x_j) (y_i.y_j + weight_i weight_j) x_j` over the tokens j in the state: (B, R, d).

    With `values` also `_read_values(state, x)`. Both contract `t_ca = sum_b x_b second_bca`, so that one product serves
    both; on a CPU that also beats the product rule on the features, whose short sums cost more than the flops they save.
    """
    moment = state.moment1 if weight is None else weight * state.moment1
    dx = torch.baddbmm(moment, y, state.first.mT, beta=score.a1, alpha=score.a1)
    out = torch.baddbmm(score.a0 * state.zeroth, x, state.first, alpha=score.a1) if values else None
    if state.second is not None:
        batch, rows, d = x.shape
        full = symmetrize(state.second, d, workspace).flatten(2)
        t = torch.bmm(x, full, out=workspace.buffer("contracted", batch, rows, full.shape[-1])).view(batch * rows, -1, d)
        dx.add_((y.reshape(batch * rows, 1, -1) @ t).view_as(x), alpha=2.0 * score.a2)
        if weight is None:
            dx.baddbmm_(x, state.moment2, alpha=2.0 * score.a2)
        else:
            dx.addcmul_(weight, x @ state.moment2, value=2.0 * score.a2)
        if values:
            out.add_((t @ x.reshape(batch * rows, d, 1)).view_as(out), alpha=score.a2)
    return dx, out


def _read_pairs(state: State, x: Tensor, y: Tensor, weight: Tensor, dx: Tensor, score: Score) -> Tensor:
    """`sum_j f(s_j) u_j` over the tokens j in the state, s_j = x_i.x_j and u_j = y_i.y_j + weight_i weight_j: (B, R, 1).

    Nearly all of it is in `dx`, the sum of `f'(s_j) u_j x_j`: `x.dx` is that of `(a1 s_j + 2 a2 s_j^2) u_j`.
    """
    share = 0.5 if state.second is not None else 1.0
    # sums of u_j and, where they are not in x.dx, of s_j u_j
    of_values, of_weights = score.a0 * state.zeroth, score.a0 * state.moment0
    if state.second is not None:
        of_values = torch.baddbmm(of_values, x, state.first, alpha=0.5 * score.a1)
        of_weights = torch.baddbmm(of_weights, x, state.moment1.mT, alpha=0.5 * score.a1)
    return share * (x * dx).sum(-1, keepdim=True) + (y * of_values).sum(-1, keepdim=True) + weight * of_weights


def _decayed(state: State, factor: Factor, workspace: Workspace | None) -> State:
    """Return the state times a factor (B, 1, 1); in place when nothing is recorded."""
    if workspace is None:
        return State(*(None if x is None else factor(x) for x in state))
    factor.fade(*(x for x in state if x is not None))
    return state


def _exclusive(state: State, sums: State, count: int, reverse: bool, factor: Factor | None) -> tuple[State, State]:
    """Return the states before each of `count` chunks and the state after all of them, from the chunks' sums.

    `factor` (B * count, 1, 1) multiplies the state carried past each chunk.
    """
    factors = (None,) * count if factor is None else factor.chunks(count)

    def scan(carry: Tensor | None, x: Tensor | None):
        if carry is None:
            return None, None
        chunks = list(zip(x.unflatten(0, (-1, count)).unbind(1), factors, strict=True))
        before = []
        for chunk, fade in reversed(chunks) if reverse else chunks:
            before.append(carry)
            carry = carry + chunk if fade is None else fade.times_plus(carry, chunk)
        return torch.stack(before[::-1] if reverse else before, dim=1).flatten(0, 1), carry

    before, after = zip(*(scan(carry, x) for carry, x in zip(state, sums, strict=True)), strict=True)
    return State(*before), State(*after)


class _Walk:
    """A pass over the sequence: its spans, blocks and factors; `workspace` is None while autograd records."""

    def __init__(self, ops: Operands, plan: LinearPlan, workspace: Workspace | None):
        self.ops = ops
        self.workspace = workspace
        # Causal: a chunk holds queries and their keys. The m - n keys before all queries are only added to the state.
        self.before_queries = spans(0, ops.shift if ops.causal else ops.m, plan.chunk * plan.count)
        length, count = (plan.chunk, plan.count) if ops.causal else (plan.chunk * plan.count, 1)
        self.queries = spans(0, ops.n, length, count)

    def state(self) -> State:
        blocks = self.ops.k.shape[0] * self.ops.k.shape[1]
        like = self.ops.q.new_empty(0, dtype=self.ops.dtype)
        return empty_state(blocks, self.ops.q.shape[-1], self.ops.v.shape[-1], self.ops.score.order, like)

    def keys(self, span: Span) -> Span:
        """Return the keys of the same chunks as these queries."""
        return Span(span.start + self.ops.shift, span.count, span.length)

    def q(self, span: Span) -> Tensor:
        return pad_head_dim(self.ops.q_block(span))

    def k_v(self, span: Span, decay: Tensor | None) -> tuple[Tensor, Tensor, KeyFactors]:
        """Return k, v and the factors of a chunk of keys, whose decays are given. v is 0 where a key is masked, since products
        with a large v would overflow before the factor of 0 reaches them."""
        factors = self.ops.key_factors(span)._replace(decay=decay)
        v = self.ops.v_block(span)
        return pad_head_dim(self.ops.k_block(span)), v if factors.weight is None else v * factors.weight, factors

    def k_v_before_queries(self, span: Span) -> tuple[Tensor, Tensor, KeyFactors]:
        """Return k, v and the factors of keys before all queries."""
        decay = None if self.ops.decay is None else self.ops.decay.factors_before_queries(span.start, span.stop)
        return self.k_v(span, decay)

    def factors(self, span: Span) -> Factors:
        """Return the factors of decays and bounds for each chunk of the span; None for 1."""
        if self.ops.decay is None:
            return Factors(None, None, None)
        reads_values = self.workspace is not None
        return self.ops.decay.factors(span.start, span.length, span.count, self.ops.group, reads_values)

    def place(self, span: Span, factors: KeyFactors) -> tiles.Place:
        """Return the place of the intra-chunk tile; `factors` are those of its keys."""
        exponent = None
        if self.ops.decay is not None:
            keys = self.keys(span)
            tiles_of = (span.length, span.length, span.count)
            exponent = self.ops.decay.exponent(span.start, keys.start, *tiles_of, workspace=self.workspace)
        return tiles.Place(
            self.ops.group,
            diagonal=0,
            key_weight=factors.weight,
            exponent=exponent,
            returns_pairs=self.ops.call.log_decay is not None,
        )

    def advance(
        self,
        state: State,
        tokens: tuple,
        span: Span,
        use: Callable[[State], object],
        carry: Factor | None,
        reverse: bool = False,
    ):
        """Call `use` on the state before each chunk; return its result and the state times `carry` plus the tokens."""
        if span.count == 1:
            used = use(state)
            state = state if carry is None else _decayed(state, carry, self.workspace)
            return used, _absorb(state, *tokens, self.workspace)
        x, y, _ = tokens
        sums = empty_state(x.shape[0], x.shape[-1], y.shape[-1], self.ops.score.order, x)
        before, after = _exclusive(state, _absorb(sums, *tokens, self.workspace), span.count, reverse, carry)
        return use(before), after


def _scaled(tokens: tuple[Tensor, Tensor, Tensor | None], factor: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return tokens (x, y, weight) with y and weight multiplied by a factor."""
    if factor is None:
        return tokens
    x, y, weight = tokens
    return x, y * factor, factor if weight is None else weight * factor


def _state_tokens(k: Tensor, v: Tensor, factors: KeyFactors) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys as tokens (x, y, weight) of the state, with their factors; v is 0 where a key is masked (`_Walk.k_v`)."""
    return _scaled((k, v, factors.weight), factors.decay)


def forward(ops: Operands, plan: LinearPlan, sink: Sink, workspace: Workspace | None, state: State | None = None) -> State:
    """Hand numerator and denominator of every span of queries to `sink`; return the state after the last key.

    `state` holds keys before the first one here, all of them visible to every query. It may be overwritten.
    """
    walk = _Walk(ops, plan, workspace)
    scan = Scan(checkpointing=workspace is None)
    score = ops.score

    def read(state: State, q: Tensor) -> tuple[Tensor, Tensor]:
        return _read_values(state, q, score, workspace), _read_weights(state, q, score)

    def absorb(span: Span, state: State):
        return None, _absorb(state, *_state_tokens(*walk.k_v_before_queries(span)), workspace)

    def causal(span: Span, state: State):
        rows, decay, carry = walk.factors(span)
        q, (k, v, factors) = walk.q(span), walk.k_v(walk.keys(span), decay)

        def use(before: State) -> tuple[Tensor, Tensor]:
            return read(before, q) if rows is None else tuple(x * rows for x in read(before, q))

        sums, state = walk.advance(state, _state_tokens(k, v, factors), span, use, carry)
        return tiles.forward(q, k, v, sums, score, walk.place(span, factors), workspace), state

    def full(span: Span, state: State):
        return read(state, walk.q(span)), state

    state = scan(absorb, walk.state() if state is None else state, walk.before_queries, lambda span, _: None)
    return scan(causal if ops.causal else full, state, walk.queries, sink)


def backward(
    ops: Operands,
    plan: LinearPlan,
    g_e: Callable[[Span], tuple[Tensor, Tensor]],
    grads: Gradients,
    workspace: Workspace,
    before: State | None = None,
    behind: State | None = None,
    score_behind: Score | None = None,
) -> State:
    """Add the gradients of the head group to `grads`; `g_e(span)` is g (B, R, dv) and e (B, R, 1) of a span of queries.

    `before` is the initial state of the forward. `behind` is a state of later tokens (q, g, e) that see all keys of the call by
    `score_behind`, whose coefficients are not 0. Both states may be overwritten. Returns `behind` with all queries added.
    """
    _add_inter_chunk_q(ops, plan, g_e, grads, workspace, before)
    return _add_k_v(ops, plan, g_e, grads, workspace, behind, score_behind, adds_intra_chunk_q=True)


def backward_of_queries(
    ops: Operands, plan: LinearPlan, g_e: Callable, grads: Gradients, workspace: Workspace, before: State
) -> None:
    """Add the gradient of q to `grads`, and to `grads.decay` the sums over each query's pairs with keys of other chunks."""
    _add_inter_chunk_q(ops, plan, g_e, grads, workspace, before, adds_intra_chunk_q=True)


def backward_of_keys(
    ops: Operands,
    plan: LinearPlan,
    g_e: Callable,
    grads: Gradients,
    workspace: Workspace,
    behind: State,
    score_behind: Score,
) -> None:
    """Add the gradients of k and v to `grads`, and to `grads.decay` all that `backward_of_queries` does not add."""
    _add_k_v(ops, plan, g_e, grads, workspace, behind, score_behind, adds_intra_chunk_q=False)


def _add_inter_chunk_q(
    ops: Operands,
    plan: LinearPlan,
    g_e: Callable,
    grads: Gradients,
    workspace: Workspace,
    before: State | None,
    adds_intra_chunk_q: bool = False,
) -> None:
    """Add the inter-chunk part of the gradient of q by a forward walk, and the intra-chunk part where asked for."""
    walk, score = _Walk(ops, plan, workspace), ops.score
    state = walk.state() if before is None else before
    for span in walk.before_queries:
        state = _absorb(state, *_state_tokens(*walk.k_v_before_queries(span)), workspace)
    for span in walk.queries:
        q, terms = walk.q(span), g_e(span)
        rows, decay, carry = walk.factors(span)

        def dq(before: State, span=span, q=q, terms=terms, rows=rows):
            q, g, e = _scaled((q, *terms), rows)
            dq, _ = _read_gradient(before, q, g, e, score, workspace)
            grads.add_q(span, dq)
            if grads.decay is not None:
                grads.decay.add_queries(span.start, _read_pairs(before, q, g, e, dq, score), ops.group)

        if ops.causal:
            k, v, factors = walk.k_v(walk.keys(span), decay)
            _, state = walk.advance(state, _state_tokens(k, v, factors), span, dq, carry)
            if adds_intra_chunk_q:
                grads.add_q(span, tiles.backward(q, k, v, *terms, score, walk.place(span, factors), workspace).q)
        else:
            dq(state)


def _add_k_v(
    ops: Operands,
    plan: LinearPlan,
    g_e: Callable,
    grads: Gradients,
    workspace: Workspace,
    behind: State | None,
    score_behind: Score | None,
    adds_intra_chunk_q: bool,
) -> State:
    """Add the gradients of k and v by a reverse walk, and the intra-chunk part of the gradient of q where asked for; return the
    state of all queries."""
    walk, score = _Walk(ops, plan, workspace), ops.score
    score_behind = score if score_behind is None else score_behind

    def dk_dv(state: State, k: Tensor, v: Tensor, factors: KeyFactors, span: Span):
        _, v, weight = _state_tokens(k, v, factors)
        dk, dv = _read_gradient(state, k, v, weight, score_behind, workspace, values=True)
        grads.add_k(span, dk)
        if grads.decay is not None:
            grads.decay.add_keys(span.start, (dv * v).sum(-1, keepdim=True) + _read_weights(state, k, score_behind) * weight)
        grads.add_v(span, factors.times_state_factor(dv))

    state = walk.state() if behind is None else behind
    for span in reversed(walk.queries):
        q, (g, e) = walk.q(span), g_e(span)
        if ops.causal:
            keys = walk.keys(span)
            rows, decay, carry = walk.factors(span)
            k, v, factors = walk.k_v(keys, decay)

            def use(after: State, tokens=(k, v, factors), keys=keys):
                dk_dv(after, *tokens, keys)

            _, state = walk.advance(state, _scaled((q, g, e), rows), span, use, carry, reverse=True)
            tile = tiles.backward(q, k, v, g, e, score, walk.place(span, factors), workspace)
            if adds_intra_chunk_q:
                grads.add_q(span, tile.q)
            grads.add_k(keys, tile.k)
            grads.add_v(keys, tile.v)
            if tile.pairs is not None:
                grads.decay.add_tile(span.start, keys.start, tile.pairs)
        else:
            state = _absorb(state, q, g, e, workspace)
    for span in walk.before_queries:
        dk_dv(state, *walk.k_v_before_queries(span), span)
    return state


def state_of_keys(ops: Operands, plan: LinearPlan, workspace: Workspace) -> State:
    """Return the final state of `forward` of a causal call, without computing outputs."""
    walk = _Walk(ops, plan, workspace)
    state = walk.state()
    for span in walk.queries:
        _, decay, carry = walk.factors(span)
        tokens = _state_tokens(*walk.k_v(walk.keys(span), decay))
        _, state = walk.advance(state, tokens, span, lambda before: None, carry)
    return state


def state_of_queries(
    ops: Operands, plan: LinearPlan, g_e: Callable[[Span], tuple[Tensor, Tensor]], workspace: Workspace
) -> State:
    """Return the final state of `backward` of a causal call without `behind`, without computing gradients."""
    walk = _Walk(ops, plan, workspace)
    state = walk.state()
    for span in reversed(walk.queries):
        factor, _, carry = walk.factors(span)
        tokens = _scaled((walk.q(span), *g_e(span)), factor)
        _, state = walk.advance(state, tokens, span, lambda after: None, carry, reverse=True)
    return state
