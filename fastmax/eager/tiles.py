"""One tile of scores, forward and backward: what both algorithms do with a block of queries and a block of keys; and what
becomes of the sums of a row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastmax.core.call import Call
from fastmax.core.score import Score, quotient, reciprocal
from fastmax.eager.exponential import exp_of_decayed
from fastmax.eager.workspace import Workspace, buffer

NO_KEYS = 0.0  # the denominator of a query without keys


class Local(NamedTuple):
    """Which pairs of a tile are in the exact window, (rows, cols): 1 and 0, and the reverse."""

    near: Tensor
    far: Tensor

    def choose(self, x: Tensor, group: int, factor: float = 1.0) -> Tensor:
        """1 where near, `factor * x` where far, in place of x (B, group * rows, cols)."""
        heads = x.unflatten(1, (group, -1))
        torch.addcmul(self.near, heads, self.far, value=factor, out=heads)
        return x


class Place(NamedTuple):
    """The position of a tile, and the masks and factors of its weights."""

    group: int  # query heads a kv head; their rows lie one after the other
    diagonal: int | None = None  # column j is visible to row i when `j <= i + diagonal`
    lower: int | None = None  # and when `j >= i + lower`
    key_weight: Tensor | None = None  # (B, cols, 1), `KeyFactors.weight`: 0 where a key is masked
    rpe: Tensor | None = None  # (rows + cols - 1, d), the tile's part of the rpe matrix
    exponent: Tensor | None = None  # (B, rows, cols) of the weights, -inf where a key is hidden: `fastmax.eager.decay`
    returns_pairs: bool = False  # whether `backward` returns `TileGradients.pairs`, the gradient of the exponent
    near: Local | None = None  # of an exact window, in the tiles that hold some of it


class TileGradients(NamedTuple):
    q: Tensor  # of the scaled q
    k: Tensor
    v: Tensor
    rpe: Tensor | None
    pairs: Tensor | None  # (B, rows, cols), of the logarithm of the weights, summed over the group; where they decay


def finish(numerator: Tensor, z: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and denominator of the sums."""
    return quotient(numerator, z, out), z


def finish_decayed(numerator: Tensor, z: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the result of `finish` for weights with decays.

    A sum below 2^-100 (float64: 2^-996) counts as 0, as in the CUDA kernels: gradients are divided by it and must stay finite.
    """
    return finish(numerator, torch.where(z.abs() < 2.0**26 * torch.finfo(z.dtype).tiny, 0.0, z), out)


def row_terms(
    call: Call, grad_o: Tensor, o: Tensor, z: Tensor, noise: Tensor | None = None, grad_z: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`g_i = grad_i / z_i` and `e_i = -(grad_o_i . o_i) / z_i + grad_z_i` of a block of queries; zero where one sees no key."""
    inverse = reciprocal(z)
    e = -(grad_o * o).sum(-1, keepdim=True) * inverse
    if grad_z is not None:
        e += torch.where(z == NO_KEYS, 0.0, grad_z)
    if noise is not None:
        grad_o = torch.addcmul(grad_o, grad_o, noise, value=call.dropout)
    return grad_o * inverse, e


def start(q: Tensor, dv: int) -> tuple[Tensor, Tensor]:
    """The sums that `forward` adds to, before the first tile."""
    return q.new_zeros(*q.shape[:-1], dv), q.new_zeros(*q.shape[:-1], 1)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: tuple[Tensor, Tensor],
    score: Score,
    place: Place,
    workspace: Workspace | None,
) -> tuple[Tensor, Tensor]:
    """Add `sum_j f(q_i.k_j) v_j` (B, group * rows, dv) and `sum_j f(q_i.k_j)` (B, group * rows, 1) over the visible keys.

    q (B, group * rows, d) is scaled, k (B, cols, d), v (B, cols, dv). `sums` is overwritten where nothing is recorded.
    """
    w = _weights(_affine_scores(q, k, score, place, workspace), score, place, _decay(place, workspace), workspace)
    numerator, z = sums
    return torch.baddbmm(numerator, w, v, out=None if workspace is None else numerator), z + w.sum(-1, keepdim=True)


def backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, e: Tensor, score: Score, place: Place, workspace: Workspace
) -> TileGradients:
    """Contributions of the tile to the gradients; g (B, group * rows, dv), e (B, group * rows, 1)."""
    y = _affine_scores(q, k, score, place, workspace)
    factor, slope = score.slope(y, out=workspace.buffer("temporary", *y.shape))
    fading = _decay(place, workspace)
    ds, u = workspace.buffer("ds", *y.shape), None
    if place.returns_pairs:
        u = torch.baddbmm(e, g, v.mT, out=workspace.buffer("u", *y.shape))
        torch.mul(u, factor if slope is None else slope, out=ds)
        ds = ds if slope is None or factor == 1.0 else ds.mul_(factor)
    else:
        torch.baddbmm(e, g, v.mT, beta=factor, alpha=factor, out=ds)
        ds = ds if slope is None else ds.mul_(slope)
    ds = _hide(ds, place, fading)
    w = _weights(y, score, place, fading, workspace)
    dq, drpe = ds @ k, None
    if place.rpe is not None:
        skewed = _unskew(ds.unflatten(1, (place.group, -1))).flatten(1, 2)
        dq = dq + skewed @ place.rpe
        drpe = torch.einsum("brl,brd->ld", skewed, q)
    pairs = None
    if u is not None:
        pairs = u.mul_(w).unflatten(1, (place.group, -1))
        pairs = pairs.squeeze(1) if place.group == 1 else pairs.sum(1)
    return TileGradients(dq, ds.mT @ q, w.mT @ g, drpe, pairs)


def _affine_scores(q: Tensor, k: Tensor, score: Score, place: Place, workspace: Workspace | None) -> Tensor:
    """`alpha q.(k + r) + beta`: (B, group * rows, d), (B, cols, d) -> (B, group * rows, cols)."""
    alpha, beta = score.affine
    out = buffer(workspace, "scores", *q.shape[:2], k.shape[1])
    y = torch.baddbmm(q.new_full((1, 1, 1), beta), q, k.mT, alpha=alpha, out=out)
    if place.rpe is not None:
        y = y + alpha * _skew((q @ place.rpe.mT).unflatten(1, (place.group, -1))).flatten(1, 2)
    return y


def _weights(y: Tensor, score: Score, place: Place, fading: Tensor | None, workspace: Workspace | None) -> Tensor:
    """f(s) where visible, else 0; in place of y where nothing is recorded."""
    if workspace is None:
        return _hide(score.weights(y), place, fading)
    return _hide(score.weights(y, temporary=workspace.buffer("temporary", *y.shape), out=y), place, fading)


def _decay(place: Place, workspace: Workspace | None) -> Tensor | None:
    """Return the decay factors exp(exponent), (B, 1, rows, cols); in place when nothing is recorded."""
    if place.exponent is None:
        return None
    return exp_of_decayed(place.exponent, in_place=workspace is not None).unsqueeze(1)


def _hide(x: Tensor, place: Place, fading: Tensor | None) -> Tensor:
    """Multiply weights or gradients of the scores in place by the masks, decays and key weights of the place."""
    rows = x.unflatten(1, (place.group, -1))
    if place.diagonal is not None and place.diagonal < x.shape[-1] - 1:
        rows.tril_(place.diagonal)
    if fading is not None:
        rows.mul_(fading)
    return x if place.key_weight is None else x.mul_(place.key_weight.mT)


def hide_beyond(heads: Tensor, place: Place) -> Tensor | None:
    """What is to be added to logarithms of weights, (rows, cols): -inf where a key is beyond the diagonal or the lower one;
    None for nothing. Scores (B, group, rows, cols) are made 0 there: both together are faster than to fill them with -inf."""
    rows, cols = heads.shape[2:]
    above = place.diagonal is not None and place.diagonal < cols - 1
    below = place.lower is not None and place.lower > 1 - rows
    if not above and not below:
        return None
    hidden = heads.new_zeros(rows, cols)
    everywhere = hidden.new_full(hidden.shape, float("-inf"))
    if above:
        heads.tril_(place.diagonal)
        hidden += everywhere.triu(place.diagonal + 1)
    if below:
        heads.triu_(place.lower)
        hidden += everywhere.tril(place.lower - 1)
    return hidden


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
