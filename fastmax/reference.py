"""The definition, written as plainly as possible: the whole (n, m) matrix in any dtype. For tests and for readers."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    drop_noise: Tensor | None = None,
    rpe_matrix: Tensor | None = None,
    dropout: float = 0.0,
    temperature: float = 1.0,
    a0: float = 1.0,
    a1: float = 1.0,
    a2: float = 0.5,
    p: int = 2,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Fastmax attention by its definition, O(n m) time and memory.

    q (b, h, n, d), k (b, hk, m, d), v (b, hk, m, dv) -> (b, h, n, dv). The arguments mean what they mean in
    `fastmax.fastmax_attention`; normalisation is left to the caller (`fastmax.normalization.normalize`).
    """
    _b, h, n, _d = q.shape
    m = k.shape[2]
    k, v = (x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
    i = torch.arange(n, device=q.device)[:, None]
    j = torch.arange(m, device=q.device)[None, :]
    s = q @ k.mT
    if rpe_matrix is not None:
        s = s + torch.einsum("bhid,ijd->bhij", q, rpe_matrix[j - i + n - 1])
    s = s / temperature
    w = a0 + a1 * s + (a2 * s * s if p == 2 else 0.0)
    visible = (j <= i + m - n) if causal else torch.ones_like(j <= i)
    if key_padding_mask is not None:
        visible = visible & key_padding_mask[:, None, None, :]
    w = torch.where(visible, w, 0.0)
    z = w.sum(-1, keepdim=True)
    o = torch.where(z == 0, 0.0, (w @ v) / torch.where(z == 0, 1.0, z))
    return o if drop_noise is None else (1.0 + dropout * drop_noise) * o
