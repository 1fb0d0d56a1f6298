"""The quadratic algorithm: tiles of weights, one block of queries against one block of keys at a time.

Fastmax attention, softmax attention and exact windows visit the same tiles. The functions of one tile are in
`fastmax.eager.tiles`, `.flash` and `.exact`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastmax.eager import exact, tiles
from fastmax.eager.blocks import Gradients, Operands, Scan, Sink, Span, spans
from fastmax.eager.decay import is_at_hand
from fastmax.eager.planner import QuadraticPlan
from fastmax.eager.workspace import Workspace


class _Tiling:
    """The tiles of a call that hold visible pairs, and the `TileInfo` of each."""

    def __init__(self, ops: Operands, plan: QuadraticPlan, workspace: Workspace | None):
        self.ops = ops
        self.plan = plan
        self.workspace = workspace
        # Tiles of other sequences are skipped if the bounds can be read without synchronisation.
        self.reads_values = ops.decay is not None and workspace is not None and is_at_hand(ops.q)
        self.queries = spans(0, ops.n, plan.rows)

    def keys(self, rows: Span) -> list[Span]:
        """Returns blocks of the keys that some query in `rows` sees.

        In a causal call, the keys that all of the queries see come first, in blocks of their own.
        """
        ops = self.ops
        first, last = rows.start + ops.shift, rows.stop - 1 + ops.shift  # positions of the queries among the keys
        begin = 0 if ops.left is None else max(0, first - ops.left)
        end = ops.m if ops.right is None else min(ops.m, last + ops.right + 1)
        if self.reads_values:
            decay: Any = ops.decay  # not None, as `reads_values` says
            k_start, k_end = decay.key_range(rows.start, rows.stop, ops.m)
            cols = self.plan.cols  # bounds are rounded to whole tiles: the other tiles, and all sums, stay the same bit for bit
            begin, end = max(begin, k_start // cols * cols), min(end, -(-k_end // cols) * cols)
        if not ops.causal:
            return spans(begin, end, self.plan.cols)
        return spans(begin, first, self.plan.cols) + spans(max(begin, first), end, self.plan.cols)

    def rpe_rows(self, rows: Span, cols: Span) -> slice:
        """Returns the rows `j - i + n - 1` of the rpe matrix for the queries i and keys j of a tile."""
        return slice(cols.start - rows.stop + self.ops.n, cols.stop - rows.start + self.ops.n - 1)

    def info(self, rows: Span, cols: Span) -> tiles.TileInfo:
        """Returns the information about the tile of these queries and keys."""
        ops = self.ops
        offset = rows.start + ops.shift - cols.start
        rpe = ops.call.rpe_matrix
        exponent = None
        if ops.decay is not None:
            exponent = ops.decay.exponent(rows.start, cols.start, rows.length, cols.length, workspace=self.workspace)
        return ops.tile_info(
            ops.key_factors(cols),
            diagonal=None if ops.right is None else offset + ops.right,
            lower=None if ops.left is None else offset - ops.left,
            rpe=None if rpe is None else rpe[self.rpe_rows(rows, cols)].to(ops.dtype),
            exponent=exponent,
            window=self._window(offset, rows, cols),
        )

    def _window(self, offset: int, rows: Span, cols: Span) -> tiles.WindowMask | None:
        """Returns the mask of the exact window in a tile, if there are local pairs."""
        ops, window = self.ops, self.ops.call.exact_window
        return exact.window_mask(offset, rows.length, cols.length, window, ops.dtype, ops.q.device) if window > 0 else None


def forward(ops: Operands, plan: QuadraticPlan, sink: Sink, workspace: Workspace | None) -> None:
    """Passes the sums of every block of queries to `sink`."""
    tiling = _Tiling(ops, plan, workspace)
    scan = Scan(checkpointing=workspace is None)

    def block(rows: Span, _: tuple[()]) -> tuple[tuple[Tensor, ...], tuple[()]]:
        q = ops.q_block(rows)

        def tile(cols: Span, sums: tuple[Tensor, ...]) -> tuple[None, tuple[Tensor, ...]]:
            k, v = ops.k_block(cols), ops.v_block(cols)
            return None, ops.tiles.forward(q, k, v, sums, ops.score, tiling.info(rows, cols), workspace)

        return scan(tile, ops.tiles.start(q, ops.v.shape[-1]), tiling.keys(rows), lambda cols, _: None), ()

    scan(block, (), tiling.queries, sink)


def backward(
    ops: Operands,
    plan: QuadraticPlan,
    row_terms: Callable[[Span], tuple[Tensor, ...]],
    grads: Gradients,
    workspace: Workspace,
) -> None:
    """Adds the gradients of the head group to `grads`; `row_terms(span)` returns the row terms of a span of queries."""
    tiling = _Tiling(ops, plan, workspace)
    for rows in tiling.queries:
        q, terms = ops.q_block(rows), row_terms(rows)
        for cols in tiling.keys(rows):
            k, v = ops.k_block(cols), ops.v_block(cols)
            tile = ops.tiles.backward(q, k, v, *terms, ops.score, tiling.info(rows, cols), workspace)
            grads.add_tile(rows, cols, tile, tiling.rpe_rows(rows, cols))
