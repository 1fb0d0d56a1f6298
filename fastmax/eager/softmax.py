"""Softmax over the last dimension in array operations, the same text for numpy and torch: naive, safe, online.

Arrays come in the dtype to compute in (`accumulated`) and with at least one column.
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
    """After each block, (..., blocks): the maximum of all columns so far and the sum of `exp(x - max)` over them."""

    max: np.ndarray | Tensor
    sum: np.ndarray | Tensor


def namespace(x: Array) -> ModuleType:
    return torch if isinstance(x, Tensor) else np


def accumulated(x: Array) -> Array:
    """x in the dtype that its sums are formed in: half types in float32, others as they are."""
    if isinstance(x, Tensor):
        return x.to(compute_dtype(x.dtype))
    return x.astype(np.float32) if x.dtype.itemsize < 4 else x


def naive(x: Array) -> Array:
    e = namespace(x).exp(x)
    return e / e.sum(-1)[..., None]


def safe(x: Array) -> Array:
    xp = namespace(x)
    e = xp.exp(x - xp.amax(x, -1)[..., None])
    return e / e.sum(-1)[..., None]


def online(x: Array, block_size: int) -> tuple[Array, RunningStates]:
    """Maximum and sum in one pass: when a block raises the maximum, the sum so far is rescaled to the new one."""
    xp = namespace(x)
    maximum = xp.full_like(x[..., 0], -math.inf)
    total = xp.zeros_like(maximum)
    states = []
    for start in range(0, x.shape[-1], block_size):
        block = x[..., start : start + block_size]
        raised = xp.maximum(maximum, xp.amax(block, -1))
        # While there is nothing but -inf, 0 is subtracted in place of it: e^(-inf) = 0 is what it adds to the sum.
        reference = xp.where(raised == -math.inf, xp.zeros_like(raised), raised)
        total = total * xp.exp(maximum - reference) + xp.exp(block - reference[..., None]).sum(-1)
        maximum = raised
        states.append((maximum, total))
    y = xp.exp(x - maximum[..., None]) / total[..., None]
    return y, RunningStates(*(xp.stack(state, -1) for state in zip(*states, strict=True)))


def forward(x: Tensor, algorithm: str) -> Tensor:
    """The operator `fastmax::softmax`: a contiguous tensor of x's dtype."""
    if algorithm not in ("safe", "online"):
        raise ValueError(f'algorithm must be "safe" or "online", got {algorithm!r}')
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    wide = accumulated(x)
    return y.copy_(safe(wide) if algorithm == "safe" else online(wide, BLOCK_SIZE)[0])


def backward(grad: Tensor, y: Tensor) -> Tensor:
    """y (grad - sum(grad y)), by PyTorch's own fused operator."""
    return torch.ops.aten._softmax_backward_data.default(grad, y, -1, y.dtype)
