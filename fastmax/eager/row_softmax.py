"""Softmax over the last dimension, for numpy arrays and tensors: naive, safe, online.

Arrays have at least one column, and are in the dtype to compute in (`accumulated`).
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fastmax.eager.blocks import compute_dtype

Array = TypeVar("Array", np.ndarray, Tensor)

BLOCK_SIZE = 1024  # columns; 4 to 8 KB of a row


class RunningStates(NamedTuple):
    """The maximum of all columns up to each block, and the sum of `exp(x - max)` over them, (..., blocks)."""

    max: np.ndarray | Tensor
    sum: np.ndarray | Tensor


def namespace(x: Array) -> ModuleType:
    """Returns the module with the functions for x: torch or numpy."""
    return torch if isinstance(x, Tensor) else np


def accumulated(x: Array) -> Array:
    """Returns x in the dtype that its sums are computed in: float32 for half types, else its own."""
    if isinstance(x, Tensor):
        return x.to(compute_dtype(x.dtype))
    return x.astype(np.float32) if x.dtype.itemsize < 4 else x


def naive(x: Array) -> Array:
    """Returns `exp(x) / sum(exp(x))`."""
    e = namespace(x).exp(x)
    return e / e.sum(-1)[..., None]


def safe(x: Array) -> Array:
    """Returns the softmax computed from x minus its maximum, in three passes."""
    xp = namespace(x)
    e = xp.exp(x - xp.amax(x, -1)[..., None])
    return e / e.sum(-1)[..., None]


def online(x: Array, block_size: int) -> tuple[Array, RunningStates]:
    """Returns the softmax, and the running states of the pass that computes maximum and sum together.

    If a block has a larger maximum, the sum so far is rescaled to it.
    """
    xp = namespace(x)
    maximum = xp.full_like(x[..., 0], -math.inf)
    total = xp.zeros_like(maximum)
    states = []
    for start in range(0, x.shape[-1], block_size):
        block = x[..., start : start + block_size]
        raised = xp.maximum(maximum, xp.amax(block, -1))
        # While all columns are -inf, 0 is subtracted instead, so that they add exp(-inf) = 0 to the sum.
        reference = xp.where(raised == -math.inf, xp.zeros_like(raised), raised)
        total = total * xp.exp(maximum - reference) + xp.exp(block - reference[..., None]).sum(-1)
        maximum = raised
        states.append((maximum, total))
    y = xp.exp(x - maximum[..., None]) / total[..., None]
    return y, RunningStates(*(xp.stack(state, -1) for state in zip(*states, strict=True)))


def forward(x: Tensor, algorithm: str) -> Tensor:
    """Returns the softmax of x as a contiguous tensor of its dtype (the operator `fastmax::softmax`)."""
    if algorithm not in ("safe", "online"):
        raise ValueError(f'algorithm must be "safe" or "online", got {algorithm!r}')
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    wide = accumulated(x)
    return y.copy_(safe(wide) if algorithm == "safe" else online(wide, BLOCK_SIZE)[0])


def backward(grad: Tensor, y: Tensor) -> Tensor:
    """Returns the gradient of x, `y (grad - sum(grad y))`, from PyTorch's fused operator."""
    return torch.ops.aten._softmax_backward_data.default(grad, y, -1, y.dtype)
