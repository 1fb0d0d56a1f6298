"""Second-order features: the products `x_a x_b` as block-symmetric tiles.

The columns of x are cut into blocks of `tile`. All products inside a block come first ("diagonal", both orders of a pair
present), then for each block the products with every later column ("off-diagonal", each pair once, so whoever contracts them
with a state counts them twice). At d = 64 that is 2560 features instead of 4096.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from fastmax.eager.workspace import Workspace

TILE = 16  # columns a block; 8 saves another 10% of the flops and loses them to twice the number of broadcast calls


def padded_head_dim(d: int) -> int:
    """The width that features are built for: `d`, or the next multiple of the tile beyond one tile."""
    return d if d <= TILE else -(-d // TILE) * TILE


def pad_head_dim(x: Tensor) -> Tensor:
    """Zero columns up to the padded head dim; they change no score."""
    width = padded_head_dim(x.shape[-1])
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def diagonal_size(d: int) -> int:
    """Number of diagonal features of a padded head dim."""
    return d * min(d, TILE)


def feature_count(d: int) -> int:
    """Number of second-order features kept for a padded head dim."""
    return d * (d + min(d, TILE)) // 2


def pair_features(x: Tensor, workspace: Workspace | None) -> Tensor:
    """(B, R, d) -> (B, R, feature_count(d)); d is padded already."""
    d = x.shape[-1]
    tile = min(d, TILE)
    blocks = x.unflatten(-1, (d // tile, tile))
    pairs = [(blocks.unsqueeze(-1), blocks.unsqueeze(-2))]
    for stop in range(tile, d, tile):
        pairs.append((x[..., stop - tile : stop, None], x[..., None, stop:]))
    if workspace is None:
        return torch.cat([(a * b).flatten(2) for a, b in pairs], dim=-1)
    out = workspace.buffer("features", *x.shape[:-1], feature_count(d))
    offset = 0
    for a, b in pairs:
        shape = torch.broadcast_shapes(a.shape, b.shape)[2:]
        size = shape.numel()
        torch.mul(a, b, out=out[..., offset : offset + size].unflatten(-1, shape))
        offset += size
    return out


def pair_features_vjp(x: Tensor, grad: Tensor, workspace: Workspace) -> Tensor:
    """Half the gradient of x, given that of `pair_features(x)` with each off-diagonal pair counted twice.

    By the product rule on `sum_ab x_a x_b grad_ab`; `grad` is symmetric inside the diagonal tiles, as sums of products
    are, so they need no special case. x is (B, R, d), grad (B, R, feature_count(d)).
    """
    d = x.shape[-1]
    tile = min(d, TILE)
    split = diagonal_size(d)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.mul(a, b, out=workspace.buffer("products", *a.shape))

    diagonal = grad[..., :split].unflatten(-1, (d // tile, tile, tile))
    dx = product(diagonal, x.unflatten(-1, (d // tile, tile, 1))).sum(-2).flatten(-2)
    for stop in range(tile, d, tile):
        block = slice(stop - tile, stop)
        pairs = grad[..., split : split + tile * (d - stop)].unflatten(-1, (tile, d - stop))
        split += tile * (d - stop)
        dx[..., block] += product(pairs, x[..., None, stop:]).sum(-1)
        dx[..., stop:] += product(pairs, x[..., block, None]).sum(-2)
    return dx


def symmetric_index(d: int) -> Tensor:
    """(d, d): the row of each pair among the d(d+1)/2 pairs a <= b, in the order of `torch.triu_indices`; on the CPU."""
    a = torch.arange(d)
    low, high = torch.minimum(a[:, None], a), torch.maximum(a[:, None], a)
    return low * d - low * (low - 1) // 2 + high - low


@lru_cache(maxsize=64)
def triangle_index(d: int) -> Tensor:
    """For each feature of the padded head dim its row in `symmetric_index`, and d(d+1)/2 for padding; on the CPU."""
    width = padded_head_dim(d)
    tile = min(width, TILE)
    columns = torch.arange(width).view(-1, tile)
    a = [columns.unsqueeze(-1).expand(-1, -1, tile).flatten()]
    b = [columns.unsqueeze(-2).expand(-1, tile, -1).flatten()]
    for stop in range(tile, width, tile):
        pairs = torch.cartesian_prod(torch.arange(stop - tile, stop), torch.arange(stop, width))
        a.append(pairs[:, 0])
        b.append(pairs[:, 1])
    index = torch.full((width, width), d * (d + 1) // 2)
    index[:d, :d] = symmetric_index(d)
    return index[torch.cat(a), torch.cat(b)]


def fold_pairs(state: Tensor, d: int) -> Tensor:
    """Sums over features (B, feature_count, c) -> one row for each distinct pair (B, d(d+1)/2, c)."""
    index = triangle_index(d)
    first = torch.empty(d * (d + 1) // 2 + 1, dtype=torch.long)
    first[index] = torch.arange(index.numel())
    return state[:, first[:-1].to(state.device)]


def unfold_pairs(rows: Tensor, d: int) -> Tensor:
    """The inverse of `fold_pairs`."""
    return F.pad(rows, (0, 0, 0, 1))[:, triangle_index(d).to(rows.device)]
