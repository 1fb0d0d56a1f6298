"""One tile of Fastmax with an exact window: the functions of `fastmax.eager.tiles`, with local keys weighted by exp(s).

    w_ij = exp(x_ij) c_ij         local keys: x = s + D, c = 1         global keys: x = D + b, c = f(s)

D is the sum of log_decay between key and query, 0 without decays; b is the key's log_input_gate, 0 without gates. As in
`fastmax.eager.flash`, the sums are relative to the largest x so far, and the backward computes the weights from the log of the
sums. The functions write in place, so autograd cannot record them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax.core.score import Score
from fastmax.eager import flash, tiles
from fastmax.eager.exponential import exp_of_relative
from fastmax.eager.flash import NO_KEYS, finish, row_terms, start
from fastmax.eager.workspace import Workspace

__all__ = ["NO_KEYS", "backward", "finish", "forward", "row_terms", "start", "window_mask"]


def window_mask(
    offset: int, rows: int, cols: int, window: int, dtype: torch.dtype, device: torch.device
) -> tiles.WindowMask | None:
    """Returns the mask of the exact window in a tile, or None if no pair of the tile is local.

    `offset` is the position of the first query minus that of the first key.
    """
    if offset - cols >= window - 1 or offset + rows <= 1 - window:
        return None
    ones = torch.ones(rows, cols, dtype=dtype, device=device)
    is_local = torch.tril(ones, offset + window - 1).triu_(offset - window + 1)
    return tiles.WindowMask(is_local, ones.sub_(is_local))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: tuple[Tensor, Tensor, Tensor],
    score: Score,
    info: tiles.TileInfo,
    workspace: Workspace,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sums with those of the tile added, as `flash.forward`."""
    numerator, z, old = sums
    s, x = _scores(q, k, info, workspace)
    w, rescale, maximum = flash.relative_to_maximum(x, old, in_place=True)
    y = _affine(s, score)
    f = score.weights(y, temporary=workspace.buffer("temporary", *y.shape), out=y)
    w.mul_(f if info.window is None else info.window.choose(f, info.group))
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
    info: tiles.TileInfo,
    workspace: Workspace,
) -> tiles.TileGradients:
    """Returns the gradients of the tile, as `flash.backward`.

    With the normalised weights `p = exp(x - lse) c`, the gradient of s is `exp(x - lse) c' (g.v + e)`.
    """
    s, x = _scores(q, k, info, workspace)
    exponential = exp_of_relative(x.sub_(flash.finite(lse)), in_place=True)
    y, window = _affine(s, score), info.window
    temporary, out = (workspace.buffer(name, *y.shape) for name in ("temporary", "weights"))
    p = score.weights(y, temporary=temporary, out=out)
    factor, slope = score.slope(y, out=temporary)
    p = (p if window is None else window.choose(p, info.group)).mul_(exponential)
    dv = p.mT @ g
    u = torch.baddbmm(e, g, v.mT, out=workspace.buffer("ds", *y.shape))
    pairs = p.mul_(u).unflatten(1, (info.group, -1)).sum(1) if info.returns_pairs else None
    ds = u.mul_(exponential)
    if slope is not None:
        ds.mul_(slope.mul_(factor) if window is None else window.choose(slope, info.group, factor))
    elif window is None:
        ds.mul_(factor)
    else:
        ds.unflatten(1, (info.group, -1)).mul_(torch.add(window.is_local, window.is_global, alpha=factor))
    return tiles.TileGradients(ds @ k, ds.mT @ q, dv, None, pairs, None if window is None else window.is_global)


def _scores(q: Tensor, k: Tensor, info: tiles.TileInfo, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Returns s = q.k, and x, which is -inf where a key is hidden, (B, group * rows, cols)."""
    s = torch.bmm(q, k.mT, out=workspace.buffer("scores", *q.shape[:2], k.shape[1]))
    x = workspace.buffer("exponent of weights", *s.shape)
    scores, exponents = (both.unflatten(1, (info.group, -1)) for both in (s, x))
    hidden = tiles.hide_beyond(scores, info)
    decay = info.exponent if info.exponent is None else info.exponent.unsqueeze(1)
    first = hidden if decay is None else decay
    first = s.new_zeros(()) if first is None else first
    if info.window is None:
        exponents.copy_(first)
    else:
        torch.addcmul(first, scores, info.window.is_local, out=exponents)
    if decay is not None and hidden is not None:
        exponents.add_(hidden)
    if info.log_gate is not None:
        gate = info.log_gate.mT.unsqueeze(1)
        exponents.add_(gate if info.window is None else gate * info.window.is_global)
    if info.key_weight is not None:
        x.masked_fill_(info.key_weight.mT == 0, NO_KEYS)
    return s, x


def _affine(s: Tensor, score: Score) -> Tensor:
    """Overwrites s by `alpha s + beta`, the argument of `Score.weights`, and returns it."""
    alpha, beta = score.affine
    s = s if alpha == 1.0 else s.mul_(alpha)
    return s if beta == 0.0 else s.add_(beta)
