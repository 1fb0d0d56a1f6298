"""The score function `f(s) = a0 + a1 s + a2 s^2` and its derivative."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Score(NamedTuple):
    """Polynomial that replaces `exp` in the attention weights.

    `order` is the `p` of the public interface; `a2` is ignored when it is 1. `scale` is `1 / temperature`: whoever loads a
    block of q multiplies it by `scale` once, so `value` and `derivative` take `s = scale * q.k` ready made.
    """

    scale: float
    a0: float
    a1: float
    a2: float
    order: int

    def value(self, s: Tensor, slope: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """f(s) in two passes over s (one for order 1); `slope` and `out` (s itself, say) are optional places to write to."""
        a0 = torch.full((), self.a0, dtype=s.dtype, device=s.device)
        if self.order == 1:
            return torch.add(a0, s, alpha=self.a1, out=out)
        a1 = torch.full((), self.a1, dtype=s.dtype, device=s.device)
        return torch.addcmul(a0, s, torch.add(a1, s, alpha=self.a2, out=slope), out=out)

    def derivative(self, s: Tensor, out: Tensor | None = None) -> Tensor | float:
        """f'(s): a tensor for order 2, the constant `a1` for order 1."""
        if self.order == 1:
            return self.a1
        a1 = torch.full((), self.a1, dtype=s.dtype, device=s.device)
        return torch.add(a1, s, alpha=2.0 * self.a2, out=out)

    def minimum(self, radius: float) -> float:
        """Smallest value of f on `[-radius, radius]` (`radius` may be infinite)."""
        a2 = self.a2 if self.order == 2 else 0.0
        if a2 > 0.0 and abs(self.a1) <= 2.0 * a2 * radius:
            return self.a0 - self.a1 * self.a1 / (4.0 * a2)
        if self.a1 == 0.0 and a2 == 0.0:
            return self.a0
        if radius == float("inf"):
            return float("-inf")
        return min(self.a0 + self.a1 * x + a2 * x * x for x in (-radius, radius))
