"""Merge of softmax attention over local keys with polynomial attention over global keys, for an exact window."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax.core.score import reciprocal


def merge_(o: Tensor, lse: Tensor, o_far: Tensor, z_far: Tensor, shift: Tensor | None) -> Tensor:
    """Write over o (b, h, n, dv) and the log of its sums of weights lse (b, h, n) by those of both sets of keys; return the sum
    of both in the units of `z_far`, 0 where there are no far keys.

    The far weights add up to `z_far exp(shift)`, shift (b, hk, n), and their average of the values is o_far. lse, z_far and
    shift are in the compute dtype. Where the far keys have faded to nothing (shift -inf) there are none.
    """
    blind = z_far == 0
    if shift is None:
        shift = torch.zeros((), dtype=lse.dtype, device=lse.device)
    else:
        shift = shift.repeat_interleave(o.shape[1] // max(1, shift.shape[1]), dim=1)
        blind |= shift == -torch.inf
        shift = torch.where(blind, 0.0, shift)
    # In units of the far weights, where a large shift rounds neither of the two that are compared when they are close.
    near, far = lse - shift, torch.where(blind, -torch.inf, z_far.log())
    base = torch.maximum(near, far)
    base = torch.where(base == -torch.inf, 0.0, base)
    of_near, of_far = torch.exp(near - base), torch.exp(far - base)
    total = of_near + of_far
    inverse = reciprocal(total)
    z = torch.where(blind, 0.0, torch.where(total.isnan(), total, z_far + near.exp()))
    larger = torch.where(near >= far, lse, far + shift)
    lse.copy_(larger.add_(total.log_()))
    of_near, of_far = (of_near * inverse).unsqueeze(-1), (of_far * inverse).unsqueeze(-1)
    if o.dtype == of_near.dtype:
        o.mul_(of_near).addcmul_(o_far, of_far)
    else:  # one rounding
        o.copy_((o * of_near).addcmul_(o_far, of_far))
    return z.contiguous()
