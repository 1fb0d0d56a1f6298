"""Autograd functions without second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor


def without_second_derivative(backward: Callable) -> Callable:
    """Wraps the backward of an autograd function so that differentiating its results raises a RuntimeError."""

    @wraps(backward)
    def first(ctx: Any, *grads: Tensor | None) -> tuple:
        with torch.no_grad():
            out = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return out
        given = [x for x in (*ctx.saved_tensors, *grads) if x is not None]
        made = iter(_Final.apply(len(given), *given, *(x for x in out if x is not None)))
        return tuple(None if x is None else next(made) for x in out)

    return first


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns views of `tensors[given:]`. The first `given` tensors are inputs only to connect the graph."""
        return tuple(x.view_as(x) for x in tensors[given:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise RuntimeError("fastmax.distributed: attention over more than one rank has no second derivative")
