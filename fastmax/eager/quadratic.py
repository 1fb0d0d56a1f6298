"""The quadratic algorithm: tiles of `f(Q K^T)`, one block of queries against one block of keys at a time.

The walk over tiles is shared with softmax attention (`fastmax.eager.flash`), which has other tiles.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fastmax.eager import tiles
from fastmax.eager.blocks import Gradients, Operands, Scan, Sink, Span, spans
from fastmax.eager.workspace import Workspace
from fastmax.planner import QuadraticPlan


class _Tiling:
    """Which tiles hold visible pairs, and what a tile needs to know of its place."""

    def __init__(self, ops: Operands, plan: QuadraticPlan):
        self.ops = ops
        self.plan = plan
        self.queries = spans(0, ops.n, plan.rows)

    def keys(self, rows: Span) -> list[Span]:
        """Blocks of the keys that some query in `rows` sees; causal: first those that all of them see."""
        if not self.ops.causal:
            return spans(0, self.ops.m, self.plan.cols)
        diagonal = rows.start + self.ops.shift
        return spans(0, diagonal, self.plan.cols) + spans(diagonal, rows.stop + self.ops.shift, self.plan.cols)

    def rpe_rows(self, rows: Span, cols: Span) -> slice:
        """Rows `j - i + n - 1` of the rpe matrix for the queries i and keys j of a tile."""
        return slice(cols.start - rows.stop + self.ops.n, cols.stop - rows.start + self.ops.n - 1)

    def place(self, rows: Span, cols: Span) -> tiles.Place:
        diagonal = rows.start + self.ops.shift - cols.start if self.ops.causal else None
        rpe = None if self.ops.rpe is None else self.ops.rpe[self.rpe_rows(rows, cols)].to(self.ops.dtype)
        return tiles.Place(self.ops.group, diagonal, self.ops.key_weights(cols), rpe)


def forward(ops: Operands, plan: QuadraticPlan, sink: Sink, workspace: Workspace | None) -> None:
    """Hand numerator and denominator of every block of queries to `sink`."""
    walk(ops, plan, sink, workspace, tiles.start, tiles.forward)


def backward(
    ops: Operands,
    plan: QuadraticPlan,
    g_e: Callable[[Span], tuple[Tensor, Tensor]],
    grads: Gradients,
    workspace: Workspace,
) -> None:
    """Add the gradients of the head group to `grads`; `g_e(span)` is g (B, R, dv) and e (B, R, 1) of a span of queries."""
    walk_back(ops, plan, g_e, grads, workspace, tiles.backward)


def walk(
    ops: Operands, plan: QuadraticPlan, sink: Sink, workspace: Workspace | None, start: Callable, add_tile: Callable
) -> None:
    """For every block of queries: the sums that `start` makes, after `add_tile` for each block of keys, handed to `sink`."""
    tiling = _Tiling(ops, plan)
    scan = Scan(checkpointing=workspace is None)

    def block(rows: Span, _):
        q = ops.q_block(rows)

        def tile(cols: Span, sums: tuple[Tensor, ...]):
            k, v = ops.k_block(cols), ops.v_block(cols)
            return None, add_tile(q, k, v, sums, ops.score, tiling.place(rows, cols), workspace)

        return scan(tile, start(q, ops.v.shape[-1]), tiling.keys(rows), lambda cols, _: None), ()

    scan(block, (), tiling.queries, sink)


def walk_back(
    ops: Operands,
    plan: QuadraticPlan,
    row_terms: Callable[[Span], tuple[Tensor, ...]],
    grads: Gradients,
    workspace: Workspace,
    tile_gradients: Callable[..., tiles.TileGradients],
) -> None:
    """Add the gradients of every tile to `grads`; `row_terms(span)` is what `tile_gradients` takes of a span of queries."""
    tiling = _Tiling(ops, plan)
    for rows in tiling.queries:
        q, terms = ops.q_block(rows), row_terms(rows)
        for cols in tiling.keys(rows):
            k, v = ops.k_block(cols), ops.v_block(cols)
            tile = tile_gradients(q, k, v, *terms, ops.score, tiling.place(rows, cols), workspace)
            grads.add_q(rows, tile.q)
            grads.add_k(cols, tile.k)
            grads.add_v(cols, tile.v)
            if tile.rpe is not None:
                grads.add_rpe(tiling.rpe_rows(rows, cols), tile.rpe)
