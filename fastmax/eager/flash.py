"""One tile of softmax attention by the online normaliser, `exp(Q K^T - maximum)`: as `fastmax.eager.tiles` for Fastmax.

The sums of a block of queries are relative to the largest score so far. When a tile has a larger one, what was summed before is
multiplied by `exp(old - new)` (Milakov and Gimelshein, 2018, arXiv:1805.02867), so no score overflows and no row of weights is
ever whole. The backward takes the weights from the log-sum-exp (Dao, 2023, arXiv:2307.08691): `p_ij = exp(s_ij - lse_i)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax.core.call import Call
from fastmax.core.score import Softmax, reciprocal
from fastmax.eager import tiles
from fastmax.eager.exponential import exp_of_relative
from fastmax.eager.workspace import Workspace, buffer

NO_KEYS = float("-inf")  # the maximum and the log-sum-exp of no scores


def finish(numerator: Tensor, z: Tensor, maximum: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the sums; 0 and -inf where there was no key."""
    lse = maximum + torch.where(z == 0, 1.0, z).log()
    return torch.mul(numerator, reciprocal(z), out=out), lse


def row_terms(call: Call, grad_o: Tensor, o: Tensor, z: Tensor, grad_z: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """g, e and the log-sum-exp z such that `grad_s_ij = p_ij (g_i . v_j + e_i)`."""
    e = -(grad_o * o).sum(-1, keepdim=True)
    if grad_z is not None:
        e += torch.where(z == NO_KEYS, 0.0, grad_z)
    return grad_o, e, z


def start(q: Tensor, dv: int) -> tuple[Tensor, Tensor, Tensor]:
    return *tiles.start(q, dv), q.new_full((*q.shape[:-1], 1), NO_KEYS)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: tuple[Tensor, Tensor, Tensor],
    score: Softmax,
    place: tiles.Place,
    workspace: Workspace | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `tiles.forward`; the sums are a numerator, a denominator and the maximum that both are relative to."""
    numerator, z, old = sums
    w, rescale, maximum = relative_to_maximum(_scores(q, k, place, workspace), old, in_place=workspace is not None)
    out = None if workspace is None else numerator
    numerator = torch.baddbmm(torch.mul(numerator, rescale, out=out), w, v, out=out)
    return numerator, z * rescale + w.sum(-1, keepdim=True), maximum


def relative_to_maximum(x: Tensor, old: Tensor, in_place: bool) -> tuple[Tensor, Tensor, Tensor]:
    """exp(x) relative to the new maximum of the rows, what sums relative to the old one are multiplied by, and the new one.
    x (B, group * rows, cols) is written over."""
    maximum = torch.maximum(old, x.detach().amax(-1, keepdim=True))
    base = finite(maximum)
    return exp_of_relative(x.sub_(base), in_place), torch.exp(old - base), maximum


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    e: Tensor,
    lse: Tensor,
    score: Softmax,
    place: tiles.Place,
    workspace: Workspace,
) -> tiles.TileGradients:
    """As `tiles.backward`, with lse (B, group * rows, 1)."""
    p = exp_of_relative(_scores(q, k, place, workspace).sub_(finite(lse)), in_place=True)
    ds = torch.baddbmm(e, g, v.mT, out=workspace.buffer("ds", *p.shape)).mul_(p)
    pairs = ds.unflatten(1, (place.group, -1)).sum(1) if place.returns_pairs else None
    return tiles.TileGradients(ds @ k, ds.mT @ q, p.mT @ g, None, pairs)


def _scores(q: Tensor, k: Tensor, place: tiles.Place, workspace: Workspace | None) -> Tensor:
    """q.k where visible, else -inf: (B, group * rows, d), (B, cols, d) -> (B, group * rows, cols)."""
    s = torch.bmm(q, k.mT, out=buffer(workspace, "scores", *q.shape[:2], k.shape[1]))
    heads = s.unflatten(1, (place.group, -1))
    hidden = tiles.hide_beyond(heads, place)
    if hidden is not None:
        heads.add_(hidden)
    if place.exponent is not None:
        heads.add_(place.exponent.unsqueeze(1))
    return s if place.key_weight is None else s.masked_fill_(place.key_weight.mT == 0, NO_KEYS)


def finite(x: Tensor) -> Tensor:
    """x with 0 for -inf: `exp(-inf - 0)` is 0 where `exp(-inf + inf)` would be NaN."""
    return torch.where(x == NO_KEYS, 0.0, x)
