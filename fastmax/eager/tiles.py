"""One tile of scores, forward and backward: what both algorithms do with a block of queries and a block of keys."""

from __future__ import annotations

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


def _hide(x: Tensor, group: int, diagonal: int | None) -> Tensor:
    """Zero, in place, what lies above the diagonal: key column j is visible to query row i when `j <= i + diagonal`."""
    if diagonal is not None and diagonal < x.shape[-1] - 1:
        x.unflatten(1, (group, -1)).tril_(diagonal)
    return x


def forward(
    q: Tensor,
    k: Tensor,
    v1: Tensor,
    score: Score,
    group: int,
    diagonal: int | None,
    rpe: Tensor | None,
    workspace: Workspace | None,
) -> Tensor:
    """`sum_j f(q_i.k_j) v1_j` over the visible keys of the tile: (B, group * rows, e)."""
    s = _scores(q, k, group, rpe, workspace)
    return _hide(_weights(s, score, workspace), group, diagonal) @ v1


def backward(
    q: Tensor,
    k: Tensor,
    v1: Tensor,
    g1: Tensor,
    score: Score,
    group: int,
    diagonal: int | None,
    rpe: Tensor | None,
    workspace: Workspace,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Contributions of the tile to the gradients of (scaled) q, k, v and the rpe rows."""
    s = _scores(q, k, group, rpe, workspace)
    ds = torch.bmm(g1, v1.mT, out=workspace.buffer("ds", *s.shape))
    ds = _hide(ds.mul_(score.derivative(s, out=workspace.buffer("slope", *s.shape))), group, diagonal)
    w = _hide(_weights(s, score, workspace), group, diagonal)
    dq = ds @ k
    drpe = None
    if rpe is not None:
        skewed = _unskew(ds.unflatten(1, (group, -1))).flatten(1, 2)
        dq = dq + skewed @ rpe
        drpe = torch.einsum("brl,brd->ld", skewed, q)
    return dq, ds.mT @ q, w.mT @ g1[..., :-1], drpe
