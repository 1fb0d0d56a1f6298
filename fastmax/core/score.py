"""The score function `f(s) = a0 + a1 s + a2 s^2`, its derivative, and division by sums of weights."""

from __future__ import annotations

from math import copysign
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Score(NamedTuple):
    """The polynomial that replaces `exp` in the attention weights.

    `order` is the `p` of the public functions; with 1, `a2` is ignored. `scale` is `1 / temperature`. The code that loads a
    block of q multiplies it by `scale` once, so s is a plain product of q and k.

    An elementwise pass over a tile of scores costs as much as the matrix product. `weights` and `slope` therefore take
    `y = alpha s + beta`, which the product can return directly. `affine` chooses alpha and beta so that little work remains.
    """

    scale: float
    a0: float
    a1: float
    a2: float
    order: int

    @property
    def _is_square(self) -> bool:
        """Whether f is a2 (s + a1 / 2 a2)^2 plus a positive constant, a form that loses no digits. True for the defaults."""
        return self.order == 2 and self.a2 > 0.0 and self.a1 * self.a1 < 4.0 * self.a0 * self.a2

    def without_zeros(self, smallest: float) -> Score:
        """Returns coefficients that can be divisors: each is at least `smallest` times the largest in magnitude, and keeps its
        sign. If all are 0, they become 1. With the square of a rounding error as `smallest`, f is the same within rounding."""
        used = (self.a0, self.a1, self.a2)[: 1 + self.order]
        limit = smallest * max(map(abs, used)) or 1.0
        kept: dict[str, Any] = dict(zip(("a0", "a1", "a2"), (copysign(max(abs(a), limit), a) for a in used), strict=False))
        return self._replace(**kept)

    @property
    def affine(self) -> tuple[float, float]:
        """alpha and beta of `y = alpha s + beta`."""
        if self.order == 1:
            return self.a1, self.a0
        return 1.0, self.a1 / (2.0 * self.a2) if self._is_square else 0.0

    def weights(self, y: Tensor, temporary: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Returns f(s), given y. `temporary` and `out` are optional buffers; `out` may be y."""
        if self.order == 1:
            return y

        def constant(x: float) -> Tensor:
            return torch.full((), x, dtype=y.dtype, device=y.device)

        if self._is_square:
            return torch.addcmul(constant(self.a0 - self.a1 * self.a1 / (4.0 * self.a2)), y, y, value=self.a2, out=out)
        return torch.addcmul(constant(self.a0), y, torch.add(constant(self.a1), y, alpha=self.a2, out=temporary), out=out)

    def slope(self, y: Tensor, out: Tensor | None = None) -> tuple[float, Tensor | None]:
        """Returns f'(s) as a factor and a tensor; None stands for a tensor of ones."""
        if self.order == 1:
            return self.a1, None
        if self._is_square:
            return 2.0 * self.a2, y
        return 1.0, torch.add(torch.full((), self.a1, dtype=y.dtype, device=y.device), y, alpha=2.0 * self.a2, out=out)

    def minimum(self, radius: float) -> float:
        """Returns the smallest value of f on `[-radius, radius]`; `radius` may be infinite."""
        a2 = self.a2 if self.order == 2 else 0.0
        if a2 > 0.0 and abs(self.a1) <= 2.0 * a2 * radius:
            return self.a0 - self.a1 * self.a1 / (4.0 * a2)
        if self.a1 == 0.0 and a2 == 0.0:
            return self.a0
        if radius == float("inf"):
            return float("-inf")
        return min(self.a0 + self.a1 * x + a2 * x * x for x in (-radius, radius))


class Softmax(NamedTuple):
    """`exp(s)`, the score function of `fastmax.flash_attention`; `scale` is as in `Score`.

    Its weights need the maximum of their row first, so `fastmax.eager.flash` computes its tiles.
    """

    scale: float


def reciprocal(z: Tensor) -> Tensor:
    """Returns 1 / z, and 0 for z = 0: a query without keys gets output 0 and, by the inner `where`, gradient 0, not NaN."""
    empty = z == 0
    return torch.where(empty, 0.0, 1.0 / torch.where(empty, 1.0, z))


def quotient(x: Tensor, z: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns x / z, and 0 with gradient 0 for z = 0. The gradient of `x * reciprocal(z)` would contain 1 / z^2, which
    overflows."""
    return torch.div(x, torch.where(z == 0, torch.inf, z), out=out)


def log_of_sums(z: Tensor) -> Tensor:
    """Returns log z, and -inf with gradient 0 for z = 0."""
    seen = z != 0
    return torch.where(seen, torch.where(seen, z, 1.0).log(), -torch.inf)
