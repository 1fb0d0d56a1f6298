"""Choice of the algorithm and of block sizes: the cost model of the PyTorch implementation.

Costs are multiply-adds of one query head. Block sizes follow from a budget for the largest temporary, which should stay in the
cache of a CPU, or be large enough to fill a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fastmax.eager.features import feature_count, padded_head_dim

MIN_CHUNK = 128  # tokens; a smaller causal tile saves less than shorter products lose


class Budget(NamedTuple):
    """Limits for the block sizes on a device."""

    elements: int  # of the largest temporary
    max_rows: int  # rows of a chunk of the linear algorithm
    tile_rows: int  # of the quadratic algorithm
    tile_cols: int


# CPU: the fastest of 2**18 .. 2**23 elements, chunks of 128 .. 1024 and tiles of 128 .. 512 x 256 .. 1024 on two Cascade Lake
# cores (1 MB of L2 each, 36 MB of L3). They are twice as fast as blocks that fit in L2, because there are fewer operations.
# On other devices the implementation is launch bound, so blocks are as large as memory use allows.
_BUDGETS = {"cpu": Budget(elements=2**22, max_rows=512, tile_rows=256, tile_cols=256)}
_OTHER_DEVICES = Budget(elements=2**26, max_rows=1024, tile_rows=1024, tile_cols=4096)


class LinearPlan(NamedTuple):
    """Block sizes of the linear algorithm."""

    chunk: int  # tokens between two states
    count: Any  # int: chunks computed in parallel. Any, because tuples have a method of this name
    heads: int  # (batch, kv head) pairs computed together


class QuadraticPlan(NamedTuple):
    """Block sizes of the quadratic algorithm."""

    rows: int  # queries per tile
    cols: int  # keys per tile
    heads: int  # (batch, kv head) pairs computed together


def _budget(device: torch.device) -> Budget:
    return _BUDGETS.get(device.type, _OTHER_DEVICES)


def visible_pairs(n: int, m: int, causal: bool) -> int:
    """Returns the number of visible (query, key) pairs of one head."""
    return n * m - (n * (n - 1) // 2 if causal else 0)


def quadratic_cost(n: int, m: int, d: int, dv: int, causal: bool) -> float:
    """Returns the multiply-adds of one query head: scores and weighted values of every visible pair."""
    return visible_pairs(n, m, causal) * (d + dv)


def linear_cost(n: int, m: int, d: int, dv: int, causal: bool, order: int, group: int) -> float:
    """Returns the multiply-adds of one query head: output from the state, its share of the state, and intra-chunk tiles."""
    features = d + (feature_count(padded_head_dim(d)) if order == 2 else 0)
    tile = 128 * (d + dv) * n if causal else 0
    return features * dv * (n + m / group) + tile


def choose_algorithm(n: int, m: int, d: int, dv: int, causal: bool, order: int, group: int = 1) -> str:
    """Returns the algorithm with fewer multiply-adds, "linear" or "quadratic".

    Near the crossover both have about the same rate. The measured ratio (forward and backward, two CPU cores) is 0.9 to 1.1 at
    d = 32 and 64. It is 0.65 at d = 128, where linear is faster from n = 12000 on, but chosen from 19000 on.
    """
    linear = linear_cost(n, m, d, dv, causal, order, group)
    return "linear" if linear < quadratic_cost(n, m, d, dv, causal) else "quadratic"


def plan_linear(device: torch.device, heads: int, group: int, d: int, dv: int, order: int) -> LinearPlan:
    """Returns the block sizes of the linear algorithm; `heads` counts the (batch, kv head) pairs of the call."""
    budget = _budget(device)
    features = feature_count(padded_head_dim(d)) if order == 2 else d
    # Order 1 has no single large temporary but several small ones.
    rows = budget.elements // (max(features, d * dv) if order == 2 else 4 * max(d, dv, MIN_CHUNK))
    # Long chunks have costly tiles, short chunks much traffic of states. A sixth of the features balances both.
    shortest = 2 * MIN_CHUNK if order == 2 else MIN_CHUNK
    chunk = max(64, min(max(shortest, features // 6), budget.max_rows) // group)
    heads = max(1, min(heads, rows // (chunk * group)))
    return LinearPlan(chunk, max(1, rows // (chunk * group * heads)), heads)


def plan_quadratic(device: torch.device, heads: int, group: int, n: int, m: int) -> QuadraticPlan:
    """Returns the block sizes of the quadratic algorithm; `heads` counts the (batch, kv head) pairs of the call."""
    budget = _budget(device)
    rows = max(16, min(n, budget.tile_rows) // group)
    cols = max(1, min(m, budget.tile_cols))
    heads = max(1, min(heads, budget.elements // (4 * rows * group * cols)))
    return QuadraticPlan(rows, cols, heads)
