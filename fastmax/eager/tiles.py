"""One tile of weights, a block of queries against a block of keys: forward, backward, and the final step of a row.

    w_ij = f(q_i . (k_j + r_ij)) d_ij m_j      r = rpe matrix, d = decay factor, m = 0 where key j is masked, else its gate
    o_i = sum_j w_ij v_j / z_i                 z_i = sum_j w_ij

The forward adds the sums over the keys j of one tile. The backward takes g_i and e_i of `row_terms`, and computes

    u_ij = g_i . v_j + e_i               ds_ij = f'(s_ij) d_ij m_j u_ij
    dq_i = sum_j ds_ij (k_j + r_ij)      dk_j = sum_i ds_ij q_i      dv_j = sum_i w_ij g_i
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastmax.core.call import Call
from fastmax.core.score import Score, quotient, reciprocal
from fastmax.core.transforms import in_functorch
from fastmax.eager.exponential import exp_of_decayed
from fastmax.eager.workspace import Workspace, buffer

NO_KEYS = 0.0  # the denominator of a query without keys


class WindowMask(NamedTuple):
    """The pairs of a tile inside the exact window and outside: two matrices (rows, cols) of 0 and 1 that sum to 1."""

    is_local: Tensor
    is_global: Tensor

    def choose(self, x: Tensor, group: int, factor: float = 1.0) -> Tensor:
        """Overwrites x (B, group * rows, cols) by 1 for local pairs and `factor * x` for global ones; returns x."""
        heads = x.unflatten(1, (group, -1))
        torch.addcmul(self.is_local, heads, self.is_global, value=factor, out=heads)
        return x


class TileInfo(NamedTuple):
    """The position of a tile, and the masks and factors of its weights."""

    group: int  # query heads per kv head; their rows lie one after the other
    diagonal: int | None = None  # column j is visible to row i if `j <= i + diagonal`
    lower: int | None = None  # and if `j >= i + lower`
    key_weight: Tensor | None = None  # (B, cols, 1), `KeyFactors.in_tile`: 0 where a key is masked
    log_gate: Tensor | None = None  # (B, cols, 1), the logarithms of the keys' gates
    rpe: Tensor | None = None  # (rows + cols - 1, d), the tile's part of the rpe matrix
    exponent: Tensor | None = None  # (B, rows, cols) from `Decay.exponent`; -inf where a key is hidden
    returns_pairs: bool = False  # whether `backward` returns `TileGradients.pairs`
    window: WindowMask | None = None  # of the exact window; None for tiles without local pairs


class TileGradients(NamedTuple):
    """The gradients of a tile's inputs."""

    q: Tensor  # of the scaled q
    k: Tensor
    v: Tensor
    rpe: Tensor | None
    pairs: Tensor | None  # (B, rows, cols), of the exponent, summed over the group: see `DecayGradient`
    is_global: Tensor | None = None  # (rows, cols), 1 for pairs outside an exact window, else 0; None: all pairs are


def finish(numerator: Tensor, z: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the output and the denominator of rows from their sums."""
    return quotient(numerator, z, out), z


def finish_decayed(numerator: Tensor, z: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the result of `finish` for weights with decays.

    A denominator below 2^-100 (float64: 2^-996) counts as 0, as in the CUDA kernels. Gradients are divided by it and must stay
    finite.
    """
    return finish(numerator, torch.where(z.abs() < least_sum(z.dtype), 0.0, z), out)


def least_sum(dtype: torch.dtype) -> float:
    """Returns the size of a denominator with decays below which it counts as 0."""
    return 2.0**26 * torch.finfo(dtype).tiny


def row_terms(
    call: Call, grad_o: Tensor, o: Tensor, z: Tensor, noise: Tensor | None = None, grad_z: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns `g_i = grad_o_i / z_i` and `e_i = -(grad_o_i . o_i) / z_i + grad_z_i` of a block of queries.

    With dropout noise, grad_o in g is multiplied by `1 + dropout * noise`. Both are 0 for queries that see no key.
    """
    inverse = reciprocal(z)
    e = -(grad_o * o).sum(-1, keepdim=True) * inverse
    if grad_z is not None:
        e += torch.where(z == NO_KEYS, 0.0, grad_z)
    if noise is not None:
        grad_o = torch.addcmul(grad_o, grad_o, noise, value=call.dropout)
    return grad_o * inverse, e


def start(q: Tensor, dv: int) -> tuple[Tensor, Tensor]:
    """Returns zeros for the numerator and the denominator that `forward` adds to."""
    return q.new_zeros(*q.shape[:-1], dv), q.new_zeros(*q.shape[:-1], 1)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: tuple[Tensor, Tensor],
    score: Score,
    info: TileInfo,
    workspace: Workspace | None,
) -> tuple[Tensor, Tensor]:
    """Returns the sums with those of the tile added: numerators (B, group * rows, dv) and denominators (B, group * rows, 1).

    q (B, group * rows, d) is scaled; k is (B, cols, d), v (B, cols, dv). The numerator is overwritten if there is a workspace.
    """
    w = _weights(_affine_scores(q, k, score, info, workspace), score, info, _decay_factors(info, workspace), workspace)
    numerator, z = sums
    return torch.baddbmm(numerator, w, v, out=None if workspace is None else numerator), z + w.sum(-1, keepdim=True)


def backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, e: Tensor, score: Score, info: TileInfo, workspace: Workspace
) -> TileGradients:
    """Returns the contributions of the tile to the gradients, from g (B, group * rows, dv) and e (B, group * rows, 1)."""
    y = _affine_scores(q, k, score, info, workspace)
    factor, slope = score.slope(y, out=workspace.buffer("temporary", *y.shape))
    decay = _decay_factors(info, workspace)
    ds, u = workspace.buffer("ds", *y.shape), None
    if info.returns_pairs:
        u = torch.baddbmm(e, g, v.mT, out=workspace.buffer("u", *y.shape))
        torch.mul(u, factor if slope is None else slope, out=ds)
        ds = ds if slope is None or factor == 1.0 else ds.mul_(factor)
    else:
        torch.baddbmm(e, g, v.mT, beta=factor, alpha=factor, out=ds)
        ds = ds if slope is None else ds.mul_(slope)
    ds = _hide(ds, info, decay)
    w = _weights(y, score, info, decay, workspace)
    dq, drpe = ds @ k, None
    if info.rpe is not None:
        skewed = _unskew(ds.unflatten(1, (info.group, -1))).flatten(1, 2)
        dq = dq + skewed @ info.rpe
        drpe = torch.einsum("brl,brd->ld", skewed, q)
    pairs = None
    if u is not None:
        pairs = u.mul_(w).unflatten(1, (info.group, -1))
        pairs = pairs.squeeze(1) if info.group == 1 else pairs.sum(1)
    return TileGradients(dq, ds.mT @ q, w.mT @ g, drpe, pairs)


def _affine_scores(q: Tensor, k: Tensor, score: Score, info: TileInfo, workspace: Workspace | None) -> Tensor:
    """Returns `alpha q_i . (k_j + r_ij) + beta`, (B, group * rows, cols), with the coefficients of `Score.affine`."""
    alpha, beta = score.affine
    out = buffer(workspace, "scores", *q.shape[:2], k.shape[1])
    y = torch.baddbmm(q.new_full((1, 1, 1), beta), q, k.mT, alpha=alpha, out=out)
    if info.rpe is not None:
        y = y + alpha * _skew((q @ info.rpe.mT).unflatten(1, (info.group, -1))).flatten(1, 2)
    return y


def _weights(y: Tensor, score: Score, info: TileInfo, decay: Tensor | None, workspace: Workspace | None) -> Tensor:
    """Returns the weights from the result of `_affine_scores`, which is overwritten if there is a workspace."""
    if workspace is None:
        return _hide(score.weights(y), info, decay)
    return _hide(score.weights(y, temporary=workspace.buffer("temporary", *y.shape), out=y), info, decay)


def _decay_factors(info: TileInfo, workspace: Workspace | None) -> Tensor | None:
    """Returns the decay factors exp(exponent), (B, 1, rows, cols), computed in place if there is a workspace."""
    if info.exponent is None:
        return None
    return exp_of_decayed(info.exponent, in_place=workspace is not None).unsqueeze(1)


def _hide(x: Tensor, info: TileInfo, decay: Tensor | None) -> Tensor:
    """Multiplies weights, or gradients of scores, by the masks, decay factors, key weights and gates, in place if possible."""
    rows = x.unflatten(1, (info.group, -1))
    if info.diagonal is not None and info.diagonal < x.shape[-1] - 1:
        rows.tril_(info.diagonal)
    if decay is not None:
        x = multiplied(rows, decay).flatten(1, 2)
    factor = info.key_weight
    if info.log_gate is not None:
        gate = info.log_gate.exp()
        factor = gate if factor is None else factor * gate
    return x if factor is None else multiplied(x, factor.mT)


def multiplied(x: Tensor, factor: Tensor) -> Tensor:
    """Returns x * factor, in place except in torch.func: if vmap batches the factor alone, the product is larger than x."""
    return x * factor if in_functorch() else x.mul_(factor)


def hide_beyond(heads: Tensor, info: TileInfo) -> Tensor | None:
    """Returns a mask to add to logarithms of weights: 0, and -inf above `diagonal` and below `lower`, (rows, cols); or None.

    It also sets the scores (B, group, rows, cols) to 0 in these places. Both steps together are faster than filling the scores
    with -inf.
    """
    rows, cols = heads.shape[2:]
    above = info.diagonal is not None and info.diagonal < cols - 1
    below = info.lower is not None and info.lower > 1 - rows
    if not above and not below:
        return None
    hidden = heads.new_zeros(rows, cols)
    everywhere = hidden.new_full(hidden.shape, float("-inf"))
    if above:
        heads.tril_(info.diagonal)
        hidden += everywhere.triu(info.diagonal + 1)
    if below:
        heads.triu_(info.lower)
        hidden += everywhere.tril(info.lower - 1)
    return hidden


def _skew(x: Tensor) -> Tensor:
    """Returns `out[i, j] = x[i, j - i + rows - 1]`, (..., rows, cols), from x (..., rows, rows + cols - 1)."""
    rows, width = x.shape[-2:]
    if rows == 1:
        return x
    flat = x.flatten(-2)[..., rows - 1 : rows - 1 + rows * (width - 1)]
    return flat.unflatten(-1, (rows, width - 1))[..., : width - rows + 1]


def _unskew(x: Tensor) -> Tensor:
    """Returns the transpose of `_skew`: x (..., rows, cols) in the shape (..., rows, rows + cols - 1)."""
    rows, cols = x.shape[-2:]
    if rows == 1:
        return x
    flat = F.pad(F.pad(x, (0, rows - 2)).flatten(-2), (rows - 1, 1))
    return flat.unflatten(-1, (rows, rows + cols - 1))
