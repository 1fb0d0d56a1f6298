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
    `fastmax.fastmax_attention`; normalisation is left to the caller (`fastmax.normalization.normalize_rows`).
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q @ k.mT
    if rpe_matrix is not None:
        n = q.shape[2]
        i, j = _positions(q, k)
        s = s + torch.einsum("bhid,ijd->bhij", q, rpe_matrix[j - i + n - 1])
    s = s / temperature
    w = a0 + a1 * s + (a2 * s * s if p == 2 else 0.0)
    w = torch.where(_visible(q, k, causal, key_padding_mask), w, 0.0)
    z = w.sum(-1, keepdim=True)
    o = torch.where(z == 0, 0.0, (w @ v) / torch.where(z == 0, 1.0, z))
    return o if drop_noise is None else (1.0 + dropout * drop_noise) * o


def naive_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention by its definition: output and log-sum-exp as `fastmax.flash_attention` returns them, 4-d."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.mT)
    visible = _visible(q, k, causal, key_padding_mask)
    seen = visible.any(-1, keepdim=True)
    s = torch.where(visible, s, float("-inf"))
    w = torch.where(visible, torch.softmax(torch.where(seen, s, 0.0), dim=-1), 0.0)
    lse = torch.where(seen, torch.where(seen, s, 0.0).logsumexp(-1, keepdim=True), float("-inf"))
    return w @ v, lse.squeeze(-1).to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """i (n, 1) and j (1, m)."""
    return torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)[None, :]


def _visible(q: Tensor, k: Tensor, causal: bool, key_padding_mask: Tensor | None) -> Tensor:
    """True where query i sees key j, to be broadcast to (b, h, n, m)."""
    i, j = _positions(q, k)
    visible = (j <= i + k.shape[2] - q.shape[2]) if causal else torch.ones_like(j <= i)
    return visible if key_padding_mask is None else visible & key_padding_mask[:, None, None, :]
