"""The linear algorithm: a prefix state of key features replaces the keys.

    f(q.k) = a0 + a1 q.k + a2 (q (x) q).(k (x) k)

so `sum_j f(q_i.k_j) [v_j, 1]` needs of the keys only `sum_j [v_j, 1]`, `sum_j k_j [v_j, 1]^T` and
`sum_j (k_j (x) k_j) [v_j, 1]^T`. Causal attention walks the sequence in chunks: earlier chunks through the state, the chunk
itself through a tile of the quadratic algorithm. The backward walks forwards once for dq (the same states, rebuilt) and
backwards once for dk and dv (states of q and [g, e] instead of k and [v, 1]).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastmax.eager import tiles
from fastmax.eager.blocks import Gradients, Operands, Scan, Span, spans
from fastmax.eager.features import (
    diagonal_size,
    feature_count,
    pad_head_dim,
    padded_head_dim,
    pair_features,
    pair_features_vjp,
)
from fastmax.eager.workspace import Workspace
from fastmax.planner import LinearPlan
from fastmax.score import Score


class State(NamedTuple):
    """Sums over tokens, for each block; e = dv + 1 channels, d padded."""

    zeroth: Tensor  # (B, 1, e)
    first: Tensor  # (B, d, e)
    second: Tensor | None  # (B, feature_count(d), e); None for order 1


def empty_state(blocks: int, d: int, e: int, order: int, like: Tensor) -> State:
    """The state before any token, in the dtype and on the device of `like`."""
    d = padded_head_dim(d)
    second = like.new_zeros(blocks, feature_count(d), e) if order == 2 else None
    return State(like.new_zeros(blocks, 1, e), like.new_zeros(blocks, d, e), second)


def _absorb(state: State, x: Tensor, y1: Tensor, workspace: Workspace | None) -> State:
    """Add the tokens of x (B, C, d) with y1 (B, C, e) to the state; in place when nothing is recorded."""
    out = (None, None, None) if workspace is None else state
    second = state.second
    if second is not None:
        second = torch.baddbmm(second, pair_features(x, workspace).mT, y1, out=out[2])
    first = torch.baddbmm(state.first, x.mT, y1, out=out[1])
    zeroth = torch.add(state.zeroth, y1.sum(1, keepdim=True), out=out[0])
    return State(zeroth, first, second)


def _read(state: State, x: Tensor, score: Score, workspace: Workspace | None) -> Tensor:
    """`sum_j f(x_i.k_j) y1_j` over the tokens j in the state: x (B, R, d) -> (B, R, e)."""
    out = torch.baddbmm(score.a0 * state.zeroth, x, state.first, alpha=score.a1)
    if state.second is not None:
        features = pair_features(x, workspace)
        split = diagonal_size(x.shape[-1])
        out = torch.baddbmm(out, features[..., :split], state.second[:, :split], alpha=score.a2)
        if features.shape[-1] > split:
            out = torch.baddbmm(out, features[..., split:], state.second[:, split:], alpha=2.0 * score.a2)
    return out


def _read_gradient(state: State, x: Tensor, y1: Tensor, score: Score, workspace: Workspace) -> Tensor:
    """`sum_j f'(x_i.k_j) (y1_i.y1_j) k_j` over the tokens j in the state: x (B, R, d), y1 (B, R, e) -> (B, R, d)."""
    dx = score.a1 * (y1 @ state.first.mT)
    if state.second is not None:
        out = workspace.buffer("features", *x.shape[:-1], state.second.shape[1])
        grad = torch.bmm(y1, state.second.mT, out=out)
        dx.add_(pair_features_vjp(x, grad, workspace), alpha=2.0 * score.a2)
    return dx


def _exclusive(state: State, sums: State, count: int, reverse: bool) -> tuple[State, State]:
    """States before each of `count` chunks, given their sums side by side, and the state after all of them."""

    def one(carry: Tensor | None, x: Tensor | None):
        if carry is None:
            return None, None
        x = x.unflatten(0, (-1, count))
        x = x.flip(1) if reverse else x
        running = torch.cat([carry.unsqueeze(1), x], dim=1).cumsum(1)
        before, after = running[:, :-1], running[:, -1]
        return (before.flip(1) if reverse else before).flatten(0, 1), after

    before, after = zip(*(one(carry, x) for carry, x in zip(state, sums)))
    return State(*before), State(*after)


class _Walk:
    """What a pass over the sequence needs: the operands, the plan, and buffers (none while autograd records)."""

    def __init__(self, ops: Operands, plan: LinearPlan, workspace: Workspace | None):
        self.ops = ops
        self.workspace = workspace
        chunks = plan.chunk, plan.count
        # Causal: queries and the keys of the same chunk go together, the m - n keys before them go into the state alone.
        self.alone = spans(0, ops.shift if ops.causal else ops.m, plan.chunk * plan.count)
        self.queries = spans(0, ops.n, *(chunks if ops.causal else (plan.chunk * plan.count,)))

    def state(self) -> State:
        blocks = self.ops.k.shape[0] * self.ops.k.shape[1]
        like = self.ops.q.new_empty(0, dtype=self.ops.dtype)
        return empty_state(blocks, self.ops.q.shape[-1], self.ops.v.shape[-1] + 1, self.ops.score.order, like)

    def keys(self, span: Span) -> Span:
        """The keys that belong to a chunk of queries."""
        return Span(span.start + self.ops.shift, span.count, span.length)

    def q(self, span: Span) -> Tensor:
        return pad_head_dim(self.ops.q_block(span))

    def k(self, span: Span) -> Tensor:
        return pad_head_dim(self.ops.k_block(span))

    def advance(self, state: State, x: Tensor, y1: Tensor, span: Span, use: Callable[[State], object], reverse=False):
        """Use the state before each chunk of the span, then add the span to it."""
        if span.count == 1:
            used = use(state)
            return used, _absorb(state, x, y1, self.workspace)
        sums = empty_state(x.shape[0], x.shape[-1], y1.shape[-1], self.ops.score.order, x)
        sums = _absorb(sums, x, y1, self.workspace)
        before, after = _exclusive(state, sums, span.count, reverse)
        return use(before), after


def forward(
    ops: Operands,
    plan: LinearPlan,
    sink: Callable[[Span, Tensor], None],
    workspace: Workspace | None,
    state: State | None = None,
) -> State:
    """Hand `sum_j f(s_ij) [v_j, 1]` of every span of queries to `sink`; return the state after the last key.

    `state` holds keys before the first one here, all of them visible to every query.
    """
    walk = _Walk(ops, plan, workspace)
    scan = Scan(checkpointing=workspace is None)
    score, group = ops.score, ops.group

    def absorb(span: Span, state: State):
        return None, _absorb(state, walk.k(span), ops.v1_block(span), workspace)

    def causal(span: Span, state: State):
        q, k, v1 = walk.q(span), walk.k(walk.keys(span)), ops.v1_block(walk.keys(span))
        o1, state = walk.advance(state, k, v1, span, lambda before: _read(before, q, score, workspace))
        return o1 + tiles.forward(q, k, v1, score, group, 0, None, workspace), state

    def full(span: Span, state: State):
        return _read(state, walk.q(span), score, workspace), state

    state = scan(absorb, walk.state() if state is None else state, walk.alone, lambda span, _: None)
    return scan(causal if ops.causal else full, state, walk.queries, sink)


def backward(
    ops: Operands, plan: LinearPlan, g1: Callable[[Span], Tensor], grads: Gradients, workspace: Workspace
) -> None:
    """Add the gradients of the head group to `grads`; `g1(span)` is [g, e] of a span of queries."""
    walk = _Walk(ops, plan, workspace)
    score, group = ops.score, ops.group

    def dk_dv(state: State, k: Tensor, v1: Tensor, span: Span):
        grads.add_k(span, _read_gradient(state, k, v1, score, workspace))
        grads.add_v(span, _read(state, k, score, workspace)[..., :-1])

    state = walk.state()
    for span in walk.alone:
        state = _absorb(state, walk.k(span), ops.v1_block(span), workspace)
    for span in walk.queries:
        q, g = walk.q(span), g1(span)

        def dq(before: State):
            grads.add_q(span, _read_gradient(before, q, g, score, workspace))

        if ops.causal:
            keys = walk.keys(span)
            _, state = walk.advance(state, walk.k(keys), ops.v1_block(keys), span, dq)
        else:
            dq(state)

    state = walk.state()
    for span in reversed(walk.queries):
        q, g = walk.q(span), g1(span)
        if ops.causal:
            keys = walk.keys(span)
            k, v1 = walk.k(keys), ops.v1_block(keys)
            _, state = walk.advance(state, q, g, span, lambda after: dk_dv(after, k, v1, keys), reverse=True)
            dq_tile, dk_tile, dv_tile, _ = tiles.backward(q, k, v1, g, score, group, 0, None, workspace)
            grads.add_q(span, dq_tile)
            grads.add_k(keys, dk_tile)
            grads.add_v(keys, dv_tile)
        else:
            state = _absorb(state, q, g, workspace)
    for span in walk.alone:
        dk_dv(state, walk.k(span), ops.v1_block(span), span)
