"""Rotary position embedding: q and k are rotated by angles proportional to the position."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastmax import eager, ops


class Rotation(NamedTuple):
    """Cosines and signed sines of the rotation angles, (n, 1, r) or (b, n, 1, r), in the compute dtype of q and k.

    `cos` multiplies the r rotated channels, and `sin` the same channels with their halves exchanged.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, rope_dim: int, base: float, dtype: torch.dtype) -> Rotation:
        """Returns the rotation for positions (n,) or (b, n), with angles `position * base^(-2f/r)` for f < r / 2.

        Args:
            rope_dim: r, even.
            dtype: of q and k.
        """
        return cls(*ops.rotary_factors(positions, rope_dim // 2, base, eager.compute_dtype(dtype)))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Returns x (b, n, h, d) with the first r channels of each head rotated; see `fastmax.eager.heads.rotate`.

    Method: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (arXiv:2104.09864). Rotating only
    some channels follows GPT-NeoX: Black et al., 2022 (arXiv:2204.06745).
    """
    return eager.heads.rotate(x, *rotation)
