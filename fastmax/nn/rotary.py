"""Rotary position embedding: q and k are rotated by angles proportional to the position."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastmax import eager


class Rotation(NamedTuple):
    """Cosines and signed sines of the rotation angles, (n, 1, r) or (b, n, 1, r), in the compute dtype of q and k.

    `cos` multiplies the r rotated channels, and `sin` the same channels with their halves exchanged.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, rope_dim: int, base: float, dtype: torch.dtype, for_kernel: bool = False) -> Rotation:
        """Returns the rotation for positions (n,) or (b, n), with angles `position * base^(-2f/r)` for f < r / 2.

        Angles are float64, because float32 has too few digits for the angle of position 10^6.

        Args:
            rope_dim: r, even.
            dtype: of q and k.
            for_kernel: whether a kernel reads the rotation, and not PyTorch operations.
        """
        # Inductor would fuse the float64 sines into the loops over all elements of q, of k and of the backward. Operands of a
        # kernel it computes once, in a loop of their own.
        factors = _compiled_factors if torch.compiler.is_compiling() and not for_kernel else _factors
        return cls(*factors(positions, rope_dim // 2, base, eager.compute_dtype(dtype)))


def _factors(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies = base ** (torch.arange(half, dtype=torch.float64, device=positions.device) / -half)
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(-2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


_compiled_factors = torch.library.custom_op("fastmax::rotary_factors", _factors, mutates_args=())
_compiled_factors.register_fake(_factors)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Returns x (b, n, h, d) with the first r channels of each head rotated; see `fastmax.eager.heads.rotate`.

    Method: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (arXiv:2104.09864). Rotating only
    some channels follows GPT-NeoX: Black et al., 2022 (arXiv:2204.06745).
    """
    return eager.heads.rotate(x, *rotation)
