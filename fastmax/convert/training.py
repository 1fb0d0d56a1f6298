"""Helpers of `transfer` and `finetune`: trained parameters, learning rate schedule, check of losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fastmax.core import validation


def named(model: nn.Module, parameters: Iterable[str]) -> dict[str, nn.Parameter]:
    """Returns the parameters with these names.

    Raises:
        TypeError, ValueError: there are no names, or one is not that of a parameter.
    """
    parameters = validation.entries_of(parameters, "parameters must be names of parameters")
    known = dict(model.named_parameters())
    for name in parameters:
        if name not in known:
            raise ValueError(f"parameters must be names of the model's parameters, got {validation.describe(name)}")
    if not parameters:
        raise ValueError("parameters must hold at least one name, got none: swap(..., decay=True) adds parameters")
    return {name: known[name] for name in parameters}


@contextmanager
def requiring_grad(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Sets `requires_grad` on the trained parameters only, and restores it for all after the block."""
    before = [(x, x.requires_grad) for x in model.parameters()]
    chosen = {id(x) for x in trained.values()}
    try:
        for x, _ in before:
            x.requires_grad_(id(x) in chosen)
        yield
    finally:
        for x, required in before:
            x.requires_grad_(required)


def warmup_and_cosine(
    optimizer: torch.optim.Optimizer, steps: int, warmup: int, final: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """Returns a schedule: a linear warm-up to the learning rate in `warmup` steps, then a cosine down to `final` times it."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def finite(what: str, value: Tensor, step: int) -> float:
    """Returns the value as a float. Raises FloatingPointError if it is not finite."""
    value = value.item()
    if not math.isfinite(value):
        raise FloatingPointError(f"the {what} is {value} at step {step}: a smaller learning_rate may help")
    return value
