"""`once_differentiable`, a decorator for the backward of autograd functions without a second derivative."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor


def once_differentiable(backward: Callable) -> Callable:
    """Wraps the backward of an autograd function so that differentiating its results raises a RuntimeError.

    `torch.autograd.function.once_differentiable` raises only if a gradient of the outputs requires a gradient. This one also
    raises if only a saved tensor does.
    """

    @wraps(backward)
    def first(ctx: Any, *grads: Tensor | None) -> tuple:
        with torch.no_grad():
            out = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return out
        given = [x for x in (*ctx.saved_tensors, *grads) if x is not None]
        results = iter(_NotDifferentiable.apply(len(given), *given, *(x for x in out if x is not None)))
        return tuple(None if x is None else next(results) for x in out)

    return first


class _NotDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns views of `tensors[given:]`. The first `given` tensors are inputs only to connect the graph."""
        return tuple(x.view_as(x) for x in tensors[given:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise RuntimeError("fastmax.distributed: attention over more than one rank has no second derivative")
