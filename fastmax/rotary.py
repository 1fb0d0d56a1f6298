"""Rotary positions: q and k turned by angles that grow with the position, so that their scores depend on distances alone."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax import eager


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rows x (b, n, h, d), d even, at positions (n,) or (b, n): channels f and f + d / 2 turned by `position * base^(-2f/d)`.

    Angles are float64, since a float32 position of 10^6 has no digits left for a fraction of a turn; x comes in its dtype.
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (arXiv:2104.09864).
    """
    half = x.shape[-1] // 2
    frequencies = base ** (torch.arange(half, dtype=torch.float64, device=x.device) / -half)
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(-2)  # (n, 1, d / 2) or (b, n, 1, d / 2)
    wide = eager.compute_dtype(x.dtype)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    left, right = x.to(wide).chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)
