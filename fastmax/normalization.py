"""Scaling the rows of q and k into a ball, so that scores stay where the polynomial is close to exp."""

from __future__ import annotations

import torch
from torch import Tensor


def normalize_rows(x: Tensor, kind: str, lim: float) -> Tensor:
    """Scale the rows of x (..., tokens, d) into the ball of radius `lim`.

    `"sequence"`: all rows of a head by the one factor `lim / max_i |x_i|`; it looks at every row, future ones too.
    `"token"`: each row longer than `lim` back onto the sphere, shorter rows as they are; causal.
    Zero stays zero. Differentiable, the factor included. Computed in fp32 for half precision; squares neither overflow nor
    underflow, because rows are first divided by their largest element (a constant to autograd: it cancels).
    """
    if x.numel() == 0:
        return x
    wide = x if x.dtype == torch.float64 else x.float()
    axes = (-2, -1) if kind == "sequence" else (-1,)
    largest = wide.detach().abs().amax(axes, keepdim=True)
    unit = wide / torch.where(largest == 0, 1.0, largest)
    norm = torch.linalg.vector_norm(unit, dim=-1, keepdim=True)
    if kind == "sequence":
        norm = norm.amax(-2, keepdim=True)
        scaled = unit * (lim / torch.where(largest == 0, 1.0, norm))
    else:
        too_long = norm > lim / torch.where(largest == 0, 1.0, largest)
        scaled = torch.where(too_long, unit * (lim / torch.where(too_long, norm, 1.0)), wide)
    return scaled.to(x.dtype)
