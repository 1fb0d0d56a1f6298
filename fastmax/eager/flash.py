"""One tile of softmax attention by the online normaliser; the functions of `fastmax.eager.tiles` for `w_ij = exp(s_ij)`.

The sums of a block of queries are relative to the largest score so far. If a tile has a larger score, the sums are multiplied
by `exp(old - new)` (Milakov and Gimelshein, 2018, arXiv:1805.02867). So no score overflows, and no complete row of weights is
stored. The backward computes the weights from the log-sum-exp (Dao, 2023, arXiv:2307.08691): `p_ij = exp(s_ij - lse_i)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax.core.call import Call
from fastmax.core.score import Softmax, reciprocal
from fastmax.core.transforms import in_functorch
from fastmax.eager import tiles
from fastmax.eager.exponential import exp_of_relative
from fastmax.eager.workspace import Workspace, buffer

NO_KEYS = float("-inf")  # the maximum and the log-sum-exp of a query without keys


def finish(numerator: Tensor, z: Tensor, maximum: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the output and the log-sum-exp of rows from their sums; 0 and -inf for queries without keys."""
    lse = maximum + torch.where(z == 0, 1.0, z).log()
    return torch.mul(numerator, reciprocal(z), out=out), lse


def row_terms(call: Call, grad_o: Tensor, o: Tensor, z: Tensor, grad_z: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns g, e and the log-sum-exp z of a block of queries, such that `grad_s_ij = p_ij (g_i . v_j + e_i)`."""
    e = -(grad_o * o).sum(-1, keepdim=True)
    if grad_z is not None:
        e += torch.where(z == NO_KEYS, 0.0, grad_z)
    return grad_o, e, z


def start(q: Tensor, dv: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the numerator, denominator and maximum before the first tile."""
    return *tiles.start(q, dv), q.new_full((*q.shape[:-1], 1), NO_KEYS)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: tuple[Tensor, Tensor, Tensor],
    score: Softmax,
    info: tiles.TileInfo,
    workspace: Workspace | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the sums with those of the tile added: numerator, denominator, and the maximum that both are relative to."""
    numerator, z, old = sums
    w, rescale, maximum = relative_to_maximum(_scores(q, k, info, workspace), old, in_place=workspace is not None)
    out = None if workspace is None else numerator
    numerator = torch.baddbmm(torch.mul(numerator, rescale, out=out), w, v, out=out)
    return numerator, z * rescale + w.sum(-1, keepdim=True), maximum


def relative_to_maximum(x: Tensor, old: Tensor, in_place: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `exp(x - new)`, the factor `exp(old - new)` of sums relative to the old maximum, and the new maximum of the rows.

    x (B, group * rows, cols) is overwritten.
    """
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
    info: tiles.TileInfo,
    workspace: Workspace,
) -> tiles.TileGradients:
    """Returns the gradients of the tile, as `tiles.backward`, from the log-sum-exp lse (B, group * rows, 1)."""
    p = exp_of_relative(_scores(q, k, info, workspace).sub_(finite(lse)), in_place=True)
    ds = torch.baddbmm(e, g, v.mT, out=workspace.buffer("ds", *p.shape)).mul_(p)
    pairs = ds.unflatten(1, (info.group, -1)).sum(1) if info.returns_pairs else None
    return tiles.TileGradients(ds @ k, ds.mT @ q, p.mT @ g, None, pairs)


def _scores(q: Tensor, k: Tensor, info: tiles.TileInfo, workspace: Workspace | None) -> Tensor:
    """Returns the scores q.k plus the exponents of the decays and the logarithms of the gates, (B, group * rows, cols).

    They are -inf where a key is hidden.
    """
    s = torch.bmm(q, k.mT, out=buffer(workspace, "scores", *q.shape[:2], k.shape[1]))
    heads = s.unflatten(1, (info.group, -1))
    hidden = tiles.hide_beyond(heads, info)
    if hidden is not None:
        heads.add_(hidden)
    if in_functorch():  # as in `tiles.multiplied`
        add, fill = Tensor.add, Tensor.masked_fill
    else:
        add, fill = Tensor.add_, Tensor.masked_fill_
    if info.exponent is not None:
        s = add(heads, info.exponent.unsqueeze(1)).flatten(1, 2)
    if info.log_gate is not None:
        s = add(s, info.log_gate.mT)
    return s if info.key_weight is None else fill(s, info.key_weight.mT == 0, NO_KEYS)


def finite(x: Tensor) -> Tensor:
    """Returns x with 0 in place of -inf: `exp(-inf - 0)` is 0, while `exp(-inf + inf)` would be NaN."""
    return torch.where(x == NO_KEYS, 0.0, x)
