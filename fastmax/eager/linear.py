"""The linear algorithm: a state of sums over keys replaces the keys.

    f(q.k) = a0 + a1 q.k + a2 (q (x) q).(k (x) k)

so the numerator of a query needs three sums over the keys, and the denominator needs the same sums without v:

    sum_j v_j      sum_j k_j v_j^T      sum_j (k_j (x) k_j) v_j^T

Causal attention passes over the sequence in chunks. The inter-chunk part is computed from the state before the chunk. The
intra-chunk part is a tile of the quadratic algorithm. Decays and sequence bounds become factors per chunk: of the sums read
from the state, of the keys that are added to the state, and of the state itself (`fastmax.eager.decay.Factors`). Input gates
are factors of the keys that are added.

The backward makes two passes. A forward pass over the chunks recomputes the states of the keys and adds dq. A reverse pass adds
dk and dv from states of the queries, which are sums of the same kind with q, g and e in place of k, v and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

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
    """Sums over tokens j with vectors x (B, C, d) and y (B, C, c) and a weight (B, C, 1), None for 1; d is padded.

    State of keys: x = k, y = v, weight 0 where a key is masked. State of queries: x = q, y = g, weight e.
    """

    zeroth: Tensor  # (B, 1, c): sum of y
    first: Tensor  # (B, d, c): sum of x y^T
    second: Tensor | None  # (B, feature_count(d), c): sum of pair_features(x) y^T; None for order 1
    moment0: Tensor  # (B, 1, 1): sum of weight
    moment1: Tensor  # (B, 1, d): sum of weight x
    moment2: Tensor | None  # (B, d, d): sum of weight x x^T; None for order 1


Tokens: TypeAlias = tuple[Tensor, Tensor, Tensor | None]  # x, y and weight
TermsOfSums: TypeAlias = Callable[[Span], tuple[Tensor, Tensor]]  # from a span of queries to its g and e
Used = TypeVar("Used")


def empty_state(blocks: int, d: int, channels: int, order: int, like: Tensor) -> State:
    """Returns the state before any token, in the dtype and on the device of `like`."""
    d = padded_head_dim(d)

    def zeros(*shape: int) -> Tensor:
        return like.new_zeros(blocks, *shape)

    second = zeros(feature_count(d), channels) if order == 2 else None
    moment2 = zeros(d, d) if order == 2 else None
    return State(zeros(1, channels), zeros(d, channels), second, zeros(1, 1), zeros(1, d), moment2)


def unpack_state(kv_state: Tensor, k_sum: Tensor, d: int, order: int) -> State:
    """Returns a new `State` from kv_state (B, rows, c) and k_sum (B, rows), whose rows are 1, x_a and x_a x_b with a <= b."""
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
    """Returns the inverse of `unpack_state`: kv_state (B, rows, c) and k_sum (B, rows)."""
    kv_state = [state.zeroth, state.first[:, :d]]
    k_sum = [state.moment0.squeeze(1), state.moment1.squeeze(1)[:, :d]]
    if state.second is not None:
        a, b = torch.triu_indices(d, d, device=state.second.device)
        kv_state.append(fold_pairs(state.second, d))
        moment2: Any = state.moment2  # not None with `second`
        k_sum.append(moment2[:, a, b])
    return torch.cat(kv_state, dim=1), torch.cat(k_sum, dim=1)


def _add_tokens(state: State, x: Tensor, y: Tensor, weight: Tensor | None, workspace: Workspace | None) -> State:
    """Returns the state with tokens added, computed in place if there is a workspace."""
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


def _read_y(state: State, x: Tensor, score: Score, workspace: Workspace | None) -> Tensor:
    """Returns `sum_j f(x_i.x_j) y_j` over the tokens j in the state, (B, R, c), for x (B, R, d)."""
    out = torch.baddbmm(score.a0 * state.zeroth, x, state.first, alpha=score.a1)
    if state.second is not None:
        features = pair_features(x, workspace, doubled=True)
        out = torch.baddbmm(out, features, state.second, alpha=score.a2, out=None if workspace is None else out)
    return out


def _read_weight(state: State, x: Tensor, score: Score) -> Tensor:
    """Returns `sum_j f(x_i.x_j) weight_j` over the tokens j in the state, (B, R, 1), for x (B, R, d)."""
    out = torch.baddbmm(score.a0 * state.moment0, x, state.moment1.mT, alpha=score.a1)
    if state.moment2 is not None:
        out = out + score.a2 * ((x @ state.moment2) * x).sum(-1, keepdim=True)
    return out


def _read_gradient(
    state: State, x: Tensor, y: Tensor, weight: Tensor | None, score: Score, workspace: Workspace, returns_y: bool = False
) -> tuple[Tensor, Any]:
    """Returns `sum_j f'(x_i.x_j) (y_i.y_j + weight_i weight_j) x_j` over the tokens j in the state, (B, R, d).

    The second result is `_read_y(state, x)` if `returns_y`, else None. Both results contract `t_ca = sum_b x_b second_bca`,
    which is computed once. The product rule on the features needs fewer flops, but is slower on a CPU because its sums are
    short.
    """
    moment = state.moment1 if weight is None else weight * state.moment1
    dx = torch.baddbmm(moment, y, state.first.mT, beta=score.a1, alpha=score.a1)
    out: Any = torch.baddbmm(score.a0 * state.zeroth, x, state.first, alpha=score.a1) if returns_y else None
    if state.second is not None:
        batch, rows, d = x.shape
        full = symmetrize(state.second, d, workspace).flatten(2)
        t = torch.bmm(x, full, out=workspace.buffer("contracted", batch, rows, full.shape[-1])).view(batch * rows, -1, d)
        dx.add_((y.reshape(batch * rows, 1, -1) @ t).view_as(x), alpha=2.0 * score.a2)
        if weight is None:
            dx.baddbmm_(x, state.moment2, alpha=2.0 * score.a2)
        else:
            dx.addcmul_(weight, x @ state.moment2, value=2.0 * score.a2)
        if returns_y:
            out.add_((t @ x.reshape(batch * rows, d, 1)).view_as(out), alpha=score.a2)
    return dx, out


def _read_pairs(state: State, x: Tensor, y: Tensor, weight: Tensor, dx: Tensor, score: Score) -> Tensor:
    """Returns `sum_j f(s_j) u_j` over the tokens j in the state, (B, R, 1).

    Here `s_j = x_i.x_j` and `u_j = y_i.y_j + weight_i weight_j`, and dx is the result of `_read_gradient`:

                             x.dx = sum_j (a1 s_j + 2 a2 s_j^2) u_j
        order 1: sum_j f(s_j) u_j = x.dx     + sum_j a0 u_j
        order 2: sum_j f(s_j) u_j = x.dx / 2 + sum_j (a0 + a1 s_j / 2) u_j
    """
    share = 0.5 if state.second is not None else 1.0
    of_y, of_weight = score.a0 * state.zeroth, score.a0 * state.moment0  # factors of y and weight in the second sum
    if state.second is not None:
        of_y = torch.baddbmm(of_y, x, state.first, alpha=0.5 * score.a1)
        of_weight = torch.baddbmm(of_weight, x, state.moment1.mT, alpha=0.5 * score.a1)
    return share * (x * dx).sum(-1, keepdim=True) + (y * of_y).sum(-1, keepdim=True) + weight * of_weight


def _decayed(state: State, factor: Factor, workspace: Workspace | None) -> State:
    """Returns the state times a factor (B, 1, 1), computed in place if there is a workspace."""
    if workspace is None:
        return State(*(None if x is None else factor(x) for x in state))
    factor.multiply_(*(x for x in state if x is not None))
    return state


def _exclusive(state: State, sums: State, count: int, reverse: bool, factor: Factor | None) -> tuple[State, State]:
    """Returns the states before each of `count` chunks and the state after all of them, from the sums of each chunk.

    This is an exclusive scan; with `reverse` it runs from the last chunk to the first. `factor` (B * count, 1, 1) multiplies
    the state carried past each chunk.
    """
    factors: Sequence[Factor | None] = (None,) * count if factor is None else factor.chunks(count)

    def scan(carry: Tensor | None, x: Any) -> tuple[Tensor | None, Tensor | None]:  # x is None where carry is
        if carry is None:
            return None, None
        chunks = list(zip(x.unflatten(0, (-1, count)).unbind(1), factors, strict=True))
        before = []
        for chunk, decay in reversed(chunks) if reverse else chunks:
            before.append(carry)
            carry = carry + chunk if decay is None else decay.times_plus(carry, chunk)
        return torch.stack(before[::-1] if reverse else before, dim=1).flatten(0, 1), carry

    before, after = zip(*(scan(carry, x) for carry, x in zip(state, sums, strict=True)), strict=True)
    return State(*before), State(*after)


class _Chunks:
    """The chunks of a call: spans, blocks and factors for the passes over them; `workspace` is None while autograd records."""

    def __init__(self, ops: Operands, plan: LinearPlan, workspace: Workspace | None):
        self.ops = ops
        self.workspace = workspace
        # Causal: a chunk holds queries and the keys at their positions. The m - n keys before them are only added to the state.
        self.before_queries = spans(0, ops.shift if ops.causal else ops.m, plan.chunk * plan.count)
        length, count = (plan.chunk, plan.count) if ops.causal else (plan.chunk * plan.count, 1)
        self.queries = spans(0, ops.n, length, count)

    def empty_state(self) -> State:
        """Returns the state before any token, for all heads of the group."""
        blocks = self.ops.k.shape[0] * self.ops.k.shape[1]
        like = self.ops.q.new_empty(0, dtype=self.ops.dtype)
        return empty_state(blocks, self.ops.q.shape[-1], self.ops.v.shape[-1], self.ops.score.order, like)

    def keys(self, span: Span) -> Span:
        """Returns the keys at the positions of these queries."""
        return Span(span.start + self.ops.shift, span.count, span.length)

    def q(self, span: Span) -> Tensor:
        """Returns the scaled and padded q of a span."""
        return pad_head_dim(self.ops.q_block(span))

    def k_v(self, span: Span, decay: Tensor | None) -> tuple[Tensor, Tensor, KeyFactors]:
        """Returns k, v and the factors of a span of keys, with the given decay factors.

        v is 0 where a key is masked: a product with a large v could overflow before it is multiplied by the factor 0.
        """
        factors = self.ops.key_factors(span)._replace(decay=decay)
        v = self.ops.v_block(span)
        return pad_head_dim(self.ops.k_block(span)), v if factors.mask is None else v * factors.mask, factors

    def k_v_before_queries(self, span: Span) -> tuple[Tensor, Tensor, KeyFactors]:
        """Returns k, v and the factors of a span of the keys before all queries."""
        decay = None if self.ops.decay is None else self.ops.decay.factors_before_queries(span.start, span.stop)
        return self.k_v(span, decay)

    def factors(self, span: Span) -> Factors:
        """Returns the factors of decays and bounds for each chunk of the span; None for 1."""
        if self.ops.decay is None:
            return Factors(None, None, None)
        reads_values = self.workspace is not None
        return self.ops.decay.factors(span.start, span.length, span.count, self.ops.group, reads_values)

    def info(self, span: Span, factors: KeyFactors) -> tiles.TileInfo:
        """Returns the information about the intra-chunk tile, whose keys have these factors."""
        exponent = None
        if self.ops.decay is not None:
            keys = self.keys(span)
            tiles_of = (span.length, span.length, span.count)
            exponent = self.ops.decay.exponent(span.start, keys.start, *tiles_of, workspace=self.workspace)
        return self.ops.tile_info(factors, diagonal=0, exponent=exponent)

    def advance(
        self,
        state: State,
        tokens: Tokens,
        span: Span,
        use: Callable[[State], Used],
        carry: Factor | None,
        reverse: bool = False,
    ) -> tuple[Used, State]:
        """Calls `use` with the states before the chunks of a span; returns its result, and the state after the span.

        The state after a chunk is the state before it times `carry`, plus the tokens (x, y, weight) of the chunk.
        """
        if span.count == 1:
            used = use(state)
            state = state if carry is None else _decayed(state, carry, self.workspace)
            return used, _add_tokens(state, *tokens, self.workspace)
        x, y, _ = tokens
        sums = empty_state(x.shape[0], x.shape[-1], y.shape[-1], self.ops.score.order, x)
        before, after = _exclusive(state, _add_tokens(sums, *tokens, self.workspace), span.count, reverse, carry)
        return use(before), after


def _scaled(tokens: Tokens, factor: Tensor | None) -> Tokens:
    """Returns tokens (x, y, weight) with y and weight multiplied by a factor."""
    if factor is None:
        return tokens
    x, y, weight = tokens
    return x, y * factor, factor if weight is None else weight * factor


def _state_tokens(k: Tensor, v: Tensor, factors: KeyFactors) -> Tokens:
    """Returns keys as tokens (x, y, weight) of a state, with their factors; k, v and factors are those of `_Chunks.k_v`."""
    factor = factors.without_mask
    return k, v if factor is None else v * factor, factors.in_state


def forward(ops: Operands, plan: LinearPlan, sink: Sink, workspace: Workspace | None, state: State | None = None) -> State:
    """Passes the numerator and denominator of every span of queries to `sink`; returns the state after the last key.

    `state` is the given state, whose keys precede those of the call and are visible to every query. It may be overwritten.
    """
    chunks = _Chunks(ops, plan, workspace)
    scan = Scan(checkpointing=workspace is None)
    score: Score = ops.score

    def read(state: State, q: Tensor) -> tuple[Tensor, Tensor]:
        return _read_y(state, q, score, workspace), _read_weight(state, q, score)

    def add_keys(span: Span, state: State) -> tuple[None, State]:
        return None, _add_tokens(state, *_state_tokens(*chunks.k_v_before_queries(span)), workspace)

    def causal(span: Span, state: State) -> tuple[tuple[Tensor, Tensor], State]:
        rows, decay, carry = chunks.factors(span)
        q, (k, v, factors) = chunks.q(span), chunks.k_v(chunks.keys(span), decay)

        def use(before: State) -> tuple[Tensor, ...]:
            return read(before, q) if rows is None else tuple(x * rows for x in read(before, q))

        sums, state = chunks.advance(state, _state_tokens(k, v, factors), span, use, carry)
        return tiles.forward(q, k, v, sums, score, chunks.info(span, factors), workspace), state

    def full(span: Span, state: State) -> tuple[tuple[Tensor, Tensor], State]:
        return read(state, chunks.q(span)), state

    state = scan(add_keys, chunks.empty_state() if state is None else state, chunks.before_queries, lambda span, _: None)
    return scan(causal if ops.causal else full, state, chunks.queries, sink)


def backward(
    ops: Operands,
    plan: LinearPlan,
    g_e: TermsOfSums,
    grads: Gradients,
    workspace: Workspace,
    before: State | None = None,
    after: State | None = None,
    score_after: Score | None = None,
) -> State:
    """Adds the gradients of the head group to `grads`; returns the state `after` with all queries of the call added.

    Args:
        g_e: returns g (B, R, dv) and e (B, R, 1) of a span of queries.
        before: the given state of the forward; it may be overwritten.
        after: a state of queries after the call, which see all keys of the call; it may be overwritten.
        score_after: the score of these queries; no coefficient is 0.
    """
    _add_inter_chunk_q(ops, plan, g_e, grads, workspace, before)
    return _add_k_v(ops, plan, g_e, grads, workspace, after, score_after, adds_intra_chunk_q=True)


def backward_of_queries(
    ops: Operands, plan: LinearPlan, g_e: TermsOfSums, grads: Gradients, workspace: Workspace, before: State
) -> None:
    """Adds the gradient of q to `grads`, and the sums over each query's pairs with keys of other chunks."""
    _add_inter_chunk_q(ops, plan, g_e, grads, workspace, before, adds_intra_chunk_q=True)


def backward_of_keys(
    ops: Operands,
    plan: LinearPlan,
    g_e: TermsOfSums,
    grads: Gradients,
    workspace: Workspace,
    after: State,
    score_after: Score,
) -> None:
    """Adds the gradients of k and v to `grads`, and the sums over pairs that `backward_of_queries` does not add."""
    _add_k_v(ops, plan, g_e, grads, workspace, after, score_after, adds_intra_chunk_q=False)


def _add_inter_chunk_q(
    ops: Operands,
    plan: LinearPlan,
    g_e: TermsOfSums,
    grads: Gradients,
    workspace: Workspace,
    before: State | None,
    adds_intra_chunk_q: bool = False,
) -> None:
    """Adds the inter-chunk part of the gradient of q in a forward pass, and the intra-chunk part if `adds_intra_chunk_q`."""
    chunks, score = _Chunks(ops, plan, workspace), ops.score
    state = chunks.empty_state() if before is None else before
    for span in chunks.before_queries:
        state = _add_tokens(state, *_state_tokens(*chunks.k_v_before_queries(span)), workspace)
    for span in chunks.queries:
        q, terms = chunks.q(span), g_e(span)
        rows, decay, carry = chunks.factors(span)

        def dq(
            before: State, span: Span = span, q: Tensor = q, terms: tuple[Tensor, Tensor] = terms, rows: Tensor | None = rows
        ) -> None:
            q, g, e = _scaled((q, *terms), rows)
            dq, _ = _read_gradient(before, q, g, e, score, workspace)
            grads.add_q(span, dq)
            if ops.call.log_decay is not None:
                grads.add_pairs_of_queries(span, _read_pairs(before, q, g, e, dq, score))

        if ops.causal:
            k, v, factors = chunks.k_v(chunks.keys(span), decay)
            _, state = chunks.advance(state, _state_tokens(k, v, factors), span, dq, carry)
            if adds_intra_chunk_q:
                grads.add_q(span, tiles.backward(q, k, v, *terms, score, chunks.info(span, factors), workspace).q)
        else:
            dq(state)


def _add_k_v(
    ops: Operands,
    plan: LinearPlan,
    g_e: TermsOfSums,
    grads: Gradients,
    workspace: Workspace,
    after: State | None,
    score_after: Score | None,
    adds_intra_chunk_q: bool,
) -> State:
    """Adds the gradients of k and v in a reverse pass, and the intra-chunk part of the gradient of q if `adds_intra_chunk_q`.

    Returns the state `after` with all queries of the call added.
    """
    chunks, score = _Chunks(ops, plan, workspace), ops.score
    score_after = score if score_after is None else score_after

    def dk_dv(state: State, k: Tensor, v: Tensor, factors: KeyFactors, span: Span) -> None:
        _, v, weight = _state_tokens(k, v, factors)
        dk, dv = _read_gradient(state, k, v, weight, score_after, workspace, returns_y=True)
        grads.add_k(span, dk)
        if ops.returns_pairs:
            grads.add_pairs_of_keys(span, (dv * v).sum(-1, keepdim=True) + _read_weight(state, k, score_after) * weight)
        grads.add_v(span, factors.times_state_factor(dv))

    state = chunks.empty_state() if after is None else after
    for span in reversed(chunks.queries):
        q, (g, e) = chunks.q(span), g_e(span)
        if ops.causal:
            keys = chunks.keys(span)
            rows, decay, carry = chunks.factors(span)
            k, v, factors = chunks.k_v(keys, decay)

            def use(after: State, tokens: tuple[Tensor, Tensor, KeyFactors] = (k, v, factors), keys: Span = keys) -> None:
                dk_dv(after, *tokens, keys)

            _, state = chunks.advance(state, _scaled((q, g, e), rows), span, use, carry, reverse=True)
            tile = tiles.backward(q, k, v, g, e, score, chunks.info(span, factors), workspace)
            grads.add_tile(span, keys, tile, adds_q=adds_intra_chunk_q)
        else:
            state = _add_tokens(state, q, g, e, workspace)
    for span in chunks.before_queries:
        dk_dv(state, *chunks.k_v_before_queries(span), span)
    return state


def state_of_keys(ops: Operands, plan: LinearPlan, workspace: Workspace) -> State:
    """Returns the final state of `forward` of a causal call, without computing outputs."""
    chunks = _Chunks(ops, plan, workspace)
    state = chunks.empty_state()
    for span in chunks.queries:
        _, decay, carry = chunks.factors(span)
        tokens = _state_tokens(*chunks.k_v(chunks.keys(span), decay))
        _, state = chunks.advance(state, tokens, span, lambda before: None, carry)
    return state


def state_of_queries(ops: Operands, plan: LinearPlan, g_e: TermsOfSums, workspace: Workspace) -> State:
    """Returns the final state of `backward` of a causal call without `after`, without computing gradients."""
    chunks = _Chunks(ops, plan, workspace)
    state = chunks.empty_state()
    for span in reversed(chunks.queries):
        factor, _, carry = chunks.factors(span)
        tokens = _scaled((chunks.q(span), *g_e(span)), factor)
        _, state = chunks.advance(state, tokens, span, lambda after: None, carry, reverse=True)
    return state
