"""One tile of scores, forward and backward: what both algorithms do with a block of queries and a block of keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastmax.eager.workspace import Workspace, buffer
from fastmax.score import Score


def _scores(q: Tensor, k: Tensor, group: int, rpe: Tensor | None, workspace: Workspace | None) -> Tensor:
    """`q.(k + r)`: (B, group * rows, d), (B, cols, d) -> (B, group * rows, cols); rpe is (rows + cols - 1, d)."""
    s = torch.bmm(q, k.mT, out=buffer(workspace, "scores", *q.shape[:2], k.shape[1]))
    if rpe is not None:
        s = s + _skew((q @ rpe.mT).unflatten(1, (group, -1))).flatten(1, 2)
    return s


def _skew(x: Tensor) -> Tensor:
    """(..., rows, rows + cols - 1) -> (..., rows, cols), out[i, j] = x[i, j - i + rows - 1], by slicing the flat tensor."""
    rows, width = x.shape[-2:]
    if rows == 1:
        return x
    flat = x.flatten(-2)[..., rows - 1 : rows - 1 + rows * (width - 1)]
    return flat.unflatten(-1, (rows, width - 1))[..., : width - rows + 1]


def _unskew(x: Tensor) -> Tensor:
    """The transpose of `_skew`: (..., rows, cols) -> (..., rows, rows + cols - 1)."""
    rows, cols = x.shape[-2:]
    if rows == 1:
        return x
    flat = F.pad(F.pad(x, (0, rows - 2)).flatten(-2), (rows - 1, 1))
    return flat.unflatten(-1, (rows, rows + cols - 1))


def _weights(s: Tensor, score: Score, workspace: Workspace | None) -> Tensor:
    """f(s), in place of s where nothing is recorded."""
    if workspace is None:
        return score.value(s)
    return score.value(s, slope=workspace.buffer("slope", *s.shape), out=s)


def _hide(x: Tensor, group: int, diagonal: int | None, visible: Tensor | None) -> Tensor:
    """Zero, in place, what is masked or above the diagonal: column j is visible to row i when `j <= i + diagonal`."""
    if diagonal is not None and diagonal < x.shape[-1] - 1:
        x.unflatten(1, (group, -1)).tril_(diagonal)
    return x if visible is None else x.mul_(visible.mT)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    score: Score,
    group: int,
    diagonal: int | None,
    rpe: Tensor | None,
    workspace: Workspace | None,
) -> tuple[Tensor, Tensor]:
    """`sum_j f(q_i.k_j) v_j` (B, group * rows, dv) and `sum_j f(q_i.k_j)` (B, group * rows, 1) over the visible keys.

    q (B, group * rows, d) is scaled, k (B, cols, d), v (B, cols, dv); `visible` (B, cols, 1) is the key padding mask.
    """
    s = _scores(q, k, group, rpe, workspace)
    w = _hide(_weights(s, score, workspace), group, diagonal, visible)
    return w @ v, w.sum(-1, keepdim=True)


class TileGradients(NamedTuple):
    q: Tensor  # of the scaled q
    k: Tensor
    v: Tensor
    rpe: Tensor | None


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    g: Tensor,
    e: Tensor,
    score: Score,
    group: int,
    diagonal: int | None,
    rpe: Tensor | None,
    workspace: Workspace,
) -> TileGradients:
    """Contributions of the tile to the gradients; g (B, group * rows, dv), e (B, group * rows, 1)."""
    s = _scores(q, k, group, rpe, workspace)
    # u = g.v + e in one product of [g, e] and [v, 1]; a pass over the tile costs more.
    u = torch.bmm(torch.cat([g, e], dim=-1), F.pad(v, (0, 1), value=1.0).mT, out=workspace.buffer("u", *s.shape))
    ds = u.mul_(score.derivative(s, out=workspace.buffer("slope", *s.shape)))
    ds = _hide(ds, group, diagonal, visible)
    w = _hide(_weights(s, score, workspace), group, diagonal, visible)
    dq, drpe = ds @ k, None
    if rpe is not None:
        skewed = _unskew(ds.unflatten(1, (group, -1))).flatten(1, 2)
        dq = dq + skewed @ rpe
        drpe = torch.einsum("brl,brd->ld", skewed, q)
    return TileGradients(dq, ds.mT @ q, w.mT @ g, drpe)
