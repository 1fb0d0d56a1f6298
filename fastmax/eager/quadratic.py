"""The quadratic algorithm: tiles of `f(Q K^T)`, one block of queries against one block of keys at a time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fastmax.eager import tiles
from fastmax.eager.blocks import Gradients, Operands, Scan, Span, spans
from fastmax.eager.workspace import Workspace
from fastmax.planner import QuadraticPlan


class _Tiling:
    """Which tiles hold visible pairs, and what a tile needs to know of its place."""

    def __init__(self, ops: Operands, plan: QuadraticPlan):
        self.ops = ops
        self.plan = plan
        self.queries = spans(0, ops.n, plan.rows)

    def keys(self, rows: Span) -> list[Span]:
        """Blocks of the keys that some query in `rows` sees."""
        stop = min(self.ops.m, rows.stop + self.ops.shift) if self.ops.causal else self.ops.m
        return spans(0, stop, self.plan.cols)

    def diagonal(self, rows: Span, cols: Span) -> int | None:
        return rows.start + self.ops.shift - cols.start if self.ops.causal else None

    def rpe_rows(self, rows: Span, cols: Span) -> slice:
        """Rows `j - i + n - 1` of the rpe matrix for the queries i and keys j of a tile."""
        return slice(cols.start - rows.stop + self.ops.n, cols.stop - rows.start + self.ops.n - 1)

    def rpe(self, rows: Span, cols: Span) -> Tensor | None:
        return None if self.ops.rpe is None else self.ops.rpe[self.rpe_rows(rows, cols)].to(self.ops.dtype)


def forward(
    ops: Operands, plan: QuadraticPlan, sink: Callable[[Span, Tensor], None], workspace: Workspace | None
) -> None:
    """Hand `sum_j f(s_ij) [v_j, 1]` of every block of queries to `sink`."""
    tiling = _Tiling(ops, plan)
    scan = Scan(checkpointing=workspace is None)

    def block(rows: Span, _):
        q = ops.q_block(rows)

        def tile(cols: Span, state: tuple[Tensor]):
            diagonal, rpe = tiling.diagonal(rows, cols), tiling.rpe(rows, cols)
            k, v1 = ops.k_block(cols), ops.v1_block(cols)
            out = tiles.forward(q, k, v1, ops.score, ops.group, diagonal, rpe, workspace)
            return None, (state[0] + out,)

        start = (q.new_zeros(*q.shape[:-1], ops.v.shape[-1] + 1),)
        return scan(tile, start, tiling.keys(rows), lambda cols, _: None)[0], ()

    scan(block, (), tiling.queries, sink)


def backward(
    ops: Operands, plan: QuadraticPlan, g1: Callable[[Span], Tensor], grads: Gradients, workspace: Workspace
) -> None:
    """Add the gradients of the head group to `grads`; `g1(span)` is [g, e] of a span of queries."""
    tiling = _Tiling(ops, plan)
    for rows in tiling.queries:
        q, g = ops.q_block(rows), g1(rows)
        for cols in tiling.keys(rows):
            k, v1 = ops.k_block(cols), ops.v1_block(cols)
            diagonal, rpe = tiling.diagonal(rows, cols), tiling.rpe(rows, cols)
            dq, dk, dv, drpe = tiles.backward(q, k, v1, g, ops.score, ops.group, diagonal, rpe, workspace)
            grads.add_q(rows, dq)
            grads.add_k(cols, dk)
            grads.add_v(cols, dv)
            if drpe is not None:
                grads.add_rpe(tiling.rpe_rows(rows, cols), drpe)
