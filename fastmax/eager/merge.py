"""Merges softmax attention over local keys with polynomial attention over global keys, for an exact window."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax.core.score import reciprocal


def merge_(o: Tensor, lse: Tensor, o_global: Tensor, z_global: Tensor, shift: Tensor | None) -> Tensor:
    """Merges attention to global keys into attention to local keys, in place.

    The weights of the global keys sum to `z_global * exp(shift)`.

    Args:
        o: (b, h, n, dv), output for the local keys; overwritten by the output for all keys.
        lse: (b, h, n), log of the sum of the local weights, in the compute dtype; overwritten by that of all weights.
        o_global: (b, h, n, dv), output for the global keys.
        z_global: (b, h, n), denominators of the global keys, in the compute dtype; 0: the query sees no global key.
        shift: (b, hk, n), in the compute dtype, or None for 0; -inf: all global keys are fully decayed.

    Returns:
        The sum of all weights, divided by `exp(shift)`; 0 where the query sees no global key.
    """
    blind = z_global == 0
    if shift is None:
        shift = torch.zeros((), dtype=lse.dtype, device=lse.device)
    else:
        shift = shift.repeat_interleave(o.shape[1] // max(1, shift.shape[1]), dim=1)
        blind |= shift == -torch.inf
        shift = torch.where(blind, 0.0, shift)
    # Both logs are relative to the shift: adding a large shift first would round away their difference.
    lse_local, lse_global = lse - shift, torch.where(blind, -torch.inf, z_global.log())
    base = torch.maximum(lse_local, lse_global)
    base = torch.where(base == -torch.inf, 0.0, base)
    of_local, of_global = torch.exp(lse_local - base), torch.exp(lse_global - base)
    total = of_local + of_global
    inverse = reciprocal(total)
    z = torch.where(blind, 0.0, torch.where(total.isnan(), total, z_global + lse_local.exp()))
    larger = torch.where(lse_local >= lse_global, lse, lse_global + shift)
    lse.copy_(larger.add_(total.log_()))
    of_local, of_global = (of_local * inverse).unsqueeze(-1), (of_global * inverse).unsqueeze(-1)
    if o.dtype == of_local.dtype:
        o.mul_(of_local).addcmul_(o_global, of_global)
    else:  # one rounding
        o.copy_((o * of_local).addcmul_(o_global, of_global))
    return z.contiguous()
