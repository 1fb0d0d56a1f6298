"""Far keys joined to what attention over near ones left: the step of an exact window that is no attention."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax.score import reciprocal


def merge_(o: Tensor, lse: Tensor, o_far: Tensor, z_far: Tensor, shift: Tensor | None) -> Tensor:
    """Write over o (b, h, n, dv) and the log of its sums of weights lse (b, h, n) by those of both sets of keys; return the sum
    of both in the units of `z_far`, 0 where there are no far keys.

    The far weights add up to `z_far exp(shift)`, shift (b, hk, n), and their average of the values is o_far. lse, z_far and
    shift are in the compute dtype. Where the far keys have faded to nothing (shift -inf) there are none.
    """
    if shift is not None:
        shift = shift.repeat_interleave(o.shape[1] // max(1, shift.shape[1]), dim=1)
    blind = z_far == 0 if shift is None else (z_far == 0) | (shift == -torch.inf)
    far = z_far.log() if shift is None else z_far.log() + shift
    far = torch.where(blind, -torch.inf, far)
    z = torch.where(blind, 0.0, z_far + torch.exp(lse if shift is None else lse - shift))
    base = torch.maximum(lse, far)
    base = torch.where(base == -torch.inf, 0.0, base)
    of_near, of_far = torch.exp(lse - base), torch.exp(far - base)
    total = of_near + of_far
    inverse = reciprocal(total)
    of_near, of_far = (of_near * inverse).unsqueeze(-1), (of_far * inverse).unsqueeze(-1)
    if o.dtype == of_near.dtype:
        o.mul_(of_near).addcmul_(o_far, of_far)
    else:  # one rounding
        o.copy_((o * of_near).addcmul_(o_far, of_far))
    lse.copy_(base.add_(total.log_()))
    return z.contiguous()
