"""Which algorithm, and in blocks of what size: the cost model of the PyTorch implementation, all of it in this file.

Costs are counted in multiply-adds of a query head. Block sizes come from one budget: the largest temporary should stay in the
processor's cache on a CPU and be large enough to fill a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastmax.eager.features import feature_count, padded_head_dim

MIN_CHUNK = 128  # tokens; shorter products lose more than the smaller causal tile saves


class Budget(NamedTuple):
    """Elements of the largest temporary, the longest chunk of the linear algorithm, the largest tile of the quadratic one."""

    elements: int
    max_rows: int
    tile_rows: int
    tile_cols: int


# CPU: measured best of 2**18 .. 2**23 elements, chunks of 128 .. 1024 and tiles of 128 .. 512 x 256 .. 1024 on two Cascade Lake
# cores (1 MB of L2 each, 36 MB of L3): twice as fast as what fits in L2, since fewer and longer operations outweigh traffic.
# Elsewhere the implementation is launch bound, so blocks are as large as memory use allows.
_BUDGETS = {"cpu": Budget(elements=2**22, max_rows=512, tile_rows=256, tile_cols=256)}
_OTHER_DEVICES = Budget(elements=2**26, max_rows=1024, tile_rows=1024, tile_cols=4096)


class LinearPlan(NamedTuple):
    chunk: int  # tokens between two states
    count: int  # chunks handled side by side
    heads: int  # (batch, kv head) pairs handled together


class QuadraticPlan(NamedTuple):
    rows: int  # queries a tile
    cols: int  # keys a tile
    heads: int  # (batch, kv head) pairs handled together


def _budget(device: torch.device) -> Budget:
    return _BUDGETS.get(device.type, _OTHER_DEVICES)


def visible_pairs(n: int, m: int, causal: bool) -> int:
    """Number of (query, key) pairs of one head."""
    return n * m - (n * (n - 1) // 2 if causal else 0)


def quadratic_cost(n: int, m: int, d: int, dv: int, causal: bool) -> float:
    """Multiply-adds of one query head: scores and weighted values of every visible pair."""
    return visible_pairs(n, m, causal) * (d + dv)


def linear_cost(n: int, m: int, d: int, dv: int, causal: bool, order: int, group: int) -> float:
    """Multiply-adds of one query head: its readout, its share of the state, and the causal tile of its own chunk."""
    features = d + (feature_count(padded_head_dim(d)) if order == 2 else 0)
    tile = 128 * (d + dv) * n if causal else 0
    return features * dv * (n + m / group) + tile


def choose_algorithm(n: int, m: int, d: int, dv: int, causal: bool, order: int, group: int = 1) -> str:
    """The algorithm of fewer multiply-adds.

    Local the crossover both run at one rate (the ratio measured 0.9 to 1.1 at d = 32 and 64 on two CPU cores, forward +
    backward; 0.65 at d = 128, where linear pays from n = 12000 on and is chosen from 19000).
    """
    linear = linear_cost(n, m, d, dv, causal, order, group)
    return "linear" if linear < quadratic_cost(n, m, d, dv, causal) else "quadratic"


def plan_linear(device: torch.device, heads: int, group: int, d: int, dv: int, order: int) -> LinearPlan:
    """`heads` counts the (batch, kv head) pairs of the call."""
    budget = _budget(device)
    features = feature_count(padded_head_dim(d)) if order == 2 else d
    # Order 1 has no single large temporary but several small ones.
    rows = budget.elements // (max(features, d * dv) if order == 2 else 4 * max(d, dv, MIN_CHUNK))
    # The causal tile costs as the chunk is long, the state's traffic as it is short: balanced near a sixth of the features.
    shortest = 2 * MIN_CHUNK if order == 2 else MIN_CHUNK
    chunk = max(64, min(max(shortest, features // 6), budget.max_rows) // group)
    heads = max(1, min(heads, rows // (chunk * group)))
    return LinearPlan(chunk, max(1, rows // (chunk * group * heads)), heads)


def plan_quadratic(device: torch.device, heads: int, group: int, n: int, m: int) -> QuadraticPlan:
    budget = _budget(device)
    rows = max(16, min(n, budget.tile_rows) // group)
    cols = max(1, min(m, budget.tile_cols))
    heads = max(1, min(heads, budget.elements // (4 * rows * group * cols)))
    return QuadraticPlan(rows, cols, heads)
