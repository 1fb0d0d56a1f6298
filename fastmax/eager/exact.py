"""One tile of Fastmax with an exact window: the functions of `fastmax.eager.tiles`, with local keys weighed by exp(s).

    w_ij = exp(x_ij) c_ij         local keys: x = s + D, c = 1         global keys: x = D, c = f(s)

D is the sum of log_decay between key and query (0 without decays). As in `fastmax.eager.flash` the sums are relative to the
largest x so far, and the backward takes the weights from the log of the sums. For the fused operator alone: it writes in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax.core.score import Score
from fastmax.eager import flash, tiles
from fastmax.eager.exponential import exp_of_relative
from fastmax.eager.flash import NO_KEYS, finish, row_terms, start
from fastmax.eager.workspace import Workspace

__all__ = ["NO_KEYS", "backward", "finish", "forward", "local_keys", "row_terms", "start"]


def local_keys(offset: int, rows: int, cols: int, window: int, dtype: torch.dtype, device: torch.device) -> tiles.Local | None:
    """Of the tile whose first query is at the place `offset` after its first key; None where no pair is near."""
    if offset - cols >= window - 1 or offset + rows <= 1 - window:
        return None
    ones = torch.ones(rows, cols, dtype=dtype, device=device)
    near = torch.tril(ones, offset + window - 1).triu_(offset - window + 1)
    return tiles.Local(near, ones.sub_(near))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: tuple[Tensor, Tensor, Tensor],
    score: Score,
    place: tiles.Place,
    workspace: Workspace,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `flash.forward`."""
    numerator, z, old = sums
    s, x = _scores(q, k, place, workspace)
    w, rescale, maximum = flash.relative_to_maximum(x, old, in_place=True)
    y = _affine(s, score)
    f = score.weights(y, temporary=workspace.buffer("temporary", *y.shape), out=y)
    w.mul_(f if place.near is None else place.near.choose(f, place.group))
    numerator = torch.baddbmm(torch.mul(numerator, rescale, out=numerator), w, v, out=numerator)
    return numerator, z * rescale + w.sum(-1, keepdim=True), maximum


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    e: Tensor,
    lse: Tensor,
    score: Score,
    place: tiles.Place,
    workspace: Workspace,
) -> tiles.TileGradients:
    """As `flash.backward`: with the normalised weights `p = exp(x - lse) c`, `grad_s = exp(x - lse) c' (g.v + e)`."""
    s, x = _scores(q, k, place, workspace)
    faded = exp_of_relative(x.sub_(flash.finite(lse)), in_place=True)
    y, near = _affine(s, score), place.near
    temporary, out = (workspace.buffer(name, *y.shape) for name in ("temporary", "weights"))
    p = score.weights(y, temporary=temporary, out=out)
    factor, slope = score.slope(y, out=temporary)
    p = (p if near is None else near.choose(p, place.group)).mul_(faded)
    dv = p.mT @ g
    u = torch.baddbmm(e, g, v.mT, out=workspace.buffer("ds", *y.shape))
    pairs = p.mul_(u).unflatten(1, (place.group, -1)).sum(1) if place.returns_pairs else None
    ds = u.mul_(faded)
    if slope is not None:
        ds.mul_(slope.mul_(factor) if near is None else near.choose(slope, place.group, factor))
    elif near is None:
        ds.mul_(factor)
    else:
        ds.unflatten(1, (place.group, -1)).mul_(torch.add(near.near, near.far, alpha=factor))
    return tiles.TileGradients(ds @ k, ds.mT @ q, dv, None, pairs)


def _scores(q: Tensor, k: Tensor, place: tiles.Place, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """q.k, and x, -inf where a key is hidden: (B, group * rows, cols)."""
    s = torch.bmm(q, k.mT, out=workspace.buffer("scores", *q.shape[:2], k.shape[1]))
    x = workspace.buffer("exponent of weights", *s.shape)
    scores, exponents = (both.unflatten(1, (place.group, -1)) for both in (s, x))
    hidden = tiles.hide_beyond(scores, place)
    faded = place.exponent if place.exponent is None else place.exponent.unsqueeze(1)
    first = hidden if faded is None else faded
    first = s.new_zeros(()) if first is None else first
    if place.near is None:
        exponents.copy_(first)
    else:
        torch.addcmul(first, scores, place.near.near, out=exponents)
    if faded is not None and hidden is not None:
        exponents.add_(hidden)
    if place.key_weight is not None:
        x.masked_fill_(place.key_weight.mT == 0, NO_KEYS)
    return s, x


def _affine(s: Tensor, score: Score) -> Tensor:
    """What `Score.weights` takes, in place of s."""
    alpha, beta = score.affine
    s = s if alpha == 1.0 else s.mul_(alpha)
    return s if beta == 0.0 else s.add_(beta)
