"""Second-order features: the products `x_a x_b` as block-symmetric tiles.

The columns of x are cut into blocks of `TILE`. Each block is multiplied by itself and by every later column. At d = 64 there
are 2560 features instead of 4096. Only 2080 pairs are distinct, but gathering them takes ten times as long as multiplying.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastmax.eager.workspace import Workspace

TILE = 16  # columns per block; 8 would save another 10% of the flops, but needs twice as many calls


def padded_head_dim(d: int) -> int:
    """Returns the padded head dim: d if it is at most one tile, else the next multiple of the tile."""
    return d if d <= TILE else -(-d // TILE) * TILE


def pad_head_dim(x: Tensor) -> Tensor:
    """Returns x padded with zero columns to the padded head dim; they change no score."""
    width = padded_head_dim(x.shape[-1])
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def feature_count(d: int) -> int:
    """Returns the number of second-order features of a padded head dim."""
    return d * (d + min(d, TILE)) // 2


def _blocks(d: int) -> list[tuple[slice, slice, slice]]:
    """Returns for each block of columns of a padded head dim: its columns, its and all later columns, and its features."""
    tile = min(d, TILE)
    out, first = [], 0
    for start in range(0, d, tile):
        size = tile * (d - start)
        out.append((slice(start, start + tile), slice(start, d), slice(first, first + size)))
        first += size
    return out


def pair_features(x: Tensor, workspace: Workspace | None, doubled: bool = False) -> Tensor:
    """Returns the second-order features of x (B, R, d), (B, R, feature_count(d)); d is padded already.

    With `doubled`, products of different blocks count twice. `phi(x).phi(y)` equals `(x.y)^2` if one side is doubled.
    """
    d = x.shape[-1]
    twice = 2.0 * x if doubled and d > TILE else x
    out = None if workspace is None else workspace.buffer("features", *x.shape[:-1], feature_count(d))
    parts = []
    for columns, later, features in _blocks(d):
        left = x[..., columns].unsqueeze(-1)
        right = x[..., later]
        if twice is not x:
            right = torch.cat([x[..., columns], twice[..., columns.stop :]], dim=-1)
        right = right.unsqueeze(-2)
        if out is None:
            parts.append((left * right).flatten(-2))
        else:
            torch.mul(left, right, out=out[..., features].unflatten(-1, (left.shape[-2], right.shape[-1])))
    return torch.cat(parts, dim=-1) if out is None else out


def symmetrize(state: Tensor, d: int, workspace: Workspace) -> Tensor:
    """Returns a state over features (B, feature_count(d), c) as the full symmetric tensor (B, d, c, d); d is padded already."""
    out = workspace.buffer("symmetric", state.shape[0], d, state.shape[-1], d)
    full = out.transpose(2, 3)
    for columns, later, features in _blocks(d):
        pairs = state[:, features].unflatten(1, (columns.stop - columns.start, d - columns.start))
        full[:, columns, later] = pairs
        full[:, columns.stop :, columns] = pairs[:, :, columns.stop - columns.start :].transpose(1, 2)
    return out


def state_rows(d: int, order: int) -> int:
    """Returns the number of distinct features: 1, x_a and, for order 2, x_a x_b with a <= b."""
    return 1 + d + (d * (d + 1) // 2 if order == 2 else 0)


def symmetric_index(d: int) -> Tensor:
    """Returns the index of each pair among the d(d+1)/2 pairs a <= b of `torch.triu_indices`, (d, d) on the CPU."""
    a = torch.arange(d, device="cpu")
    low, high = torch.minimum(a[:, None], a), torch.maximum(a[:, None], a)
    return low * d - low * (low - 1) // 2 + high - low


def triangle_index(d: int) -> Tensor:
    """Returns for each feature of the padded head dim its `symmetric_index`, or d(d+1)/2 for padding, on the CPU."""
    # Not cached: a tensor made in inference mode or in fake mode would fail outside that mode.
    width = padded_head_dim(d)
    index = torch.full((width, width), d * (d + 1) // 2, device="cpu")
    index[:d, :d] = symmetric_index(d)
    return torch.cat([index[columns, later].flatten() for columns, later, _ in _blocks(width)])


def fold_pairs(state: Tensor, d: int) -> Tensor:
    """Returns a state over features (B, feature_count, c) with one row for each distinct pair, (B, d(d+1)/2, c)."""
    index = triangle_index(d)
    first = torch.empty(d * (d + 1) // 2 + 1, dtype=torch.long, device="cpu")
    first[index] = torch.arange(index.numel(), device="cpu")
    return state[:, first[:-1].to(state.device)]


def unfold_pairs(rows: Tensor, d: int) -> Tensor:
    """Returns the inverse of `fold_pairs`."""
    return F.pad(rows, (0, 0, 0, 1))[:, triangle_index(d).to(rows.device)]
