"""Rotary positions: q and k turned by angles that grow with the position, so that their scores depend on distances alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastmax import eager


class Rotation(NamedTuple):
    """Factors of the r channels that turn, and of those whose halves have changed places: cosines and sines of the angles,
    (n, 1, r) or (b, n, 1, r), in the compute dtype of the rows to come."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, rope_dim: int, base: float, dtype: torch.dtype) -> Rotation:
        """For r = rope_dim channels, even, of rows of a dtype at positions (n,) or (b, n): angles `position * base^(-2f/r)` for
        f < r / 2.

        Angles are float64, since a float32 position of 10^6 has no digits left for a fraction of a turn.
        """
        # Inductor would put the float64 sines into the loop over batch, heads and channels, of q, of k and of the backward.
        factors = _compiled_factors if torch.compiler.is_compiling() else _factors
        return cls(*factors(positions, rope_dim // 2, base, eager.compute_dtype(dtype)))


def _factors(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies = base ** (torch.arange(half, dtype=torch.float64, device=positions.device) / -half)
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(-2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


_compiled_factors = torch.library.custom_op("fastmax::rotary_factors", _factors, mutates_args=())
_compiled_factors.register_fake(_factors)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rows x (b, n, h, d) with channels f and f + r / 2 of the first r turned by the angle of f, in their dtype.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (arXiv:2104.09864); of a part of the
    channels, as GPT-J and GPT-NeoX have it: Black et al., 2022 (arXiv:2204.06745).
    """
    turning = rotation.cos.shape[-1]
    rows, still = x.to(rotation.cos.dtype).split((turning, x.shape[-1] - turning), dim=-1)
    turned = torch.addcmul(rows * rotation.cos, rows.roll(turning // 2, dims=-1), rotation.sin)
    return torch.cat([turned, still], dim=-1).to(x.dtype)
