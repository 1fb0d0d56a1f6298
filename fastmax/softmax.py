"""Softmax of rows in three ways, for numpy arrays and torch tensors: naive, safe, and online over blocks of the row.

`online_softmax` is the method that attention with an online normaliser applies to its scores. On CUDA tensors it and
`safe_softmax` run kernels (docs/softmax.md).

Source: M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax*, arXiv:1805.02867.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fastmax import ops
from fastmax.core import validation
from fastmax.eager import is_transformed
from fastmax.eager import row_softmax as eager
from fastmax.eager.row_softmax import RunningStates

Array = TypeVar("Array", np.ndarray, Tensor)

__all__ = ["RunningStates", "naive_softmax", "online_softmax", "safe_softmax"]


def naive_softmax(x: Array) -> Array:
    """Computes `exp(x) / sum(exp(x))` over the last dimension, exactly as written.

    The exponential overflows from x = 89 on in float32 (710 in float64), and infinity / infinity is NaN. A row whose elements
    are all below -104 (-746) is 0 / 0, which is NaN too. numpy then issues a RuntimeWarning, torch does not.

    Args:
        x: (..., width), numpy array (float16, float32, float64, longdouble) or torch tensor (float16, bfloat16, float32,
            float64). Half types are computed in float32.

    Returns:
        An array or tensor of x's shape and dtype. Differentiable for tensors, through autograd.

    Raises:
        TypeError, ValueError: naming x.
    """
    _check(x)
    return _like(eager.naive(eager.accumulated(x)), x) if x.shape[-1] > 0 else _empty(x)


def safe_softmax(x: Array) -> Array:
    """Computes softmax over the last dimension after subtracting the maximum of the row: three passes, no overflow.

    A row that is all -inf, or contains +inf or NaN, becomes all NaN, as in `torch.softmax`.

    Args:
        x: as for `naive_softmax`. Floating-point CUDA tensors of up to 32 bits run a kernel.

    Returns:
        An array or tensor of x's shape and dtype. For tensors, differentiable twice.

    Raises:
        TypeError, ValueError: naming x.
    """
    _check(x)
    if _runs_kernel(x):
        return ops.softmax(x, "safe")
    if x.shape[-1] == 0:
        return _empty(x)
    with _quiet(x):
        return _like(eager.safe(eager.accumulated(x)), x)


def online_softmax(x: Array, block_size: int | None = None, return_states: bool = False) -> Array | tuple[Array, RunningStates]:
    """Computes softmax over the last dimension in two passes; the first finds maximum and sum, block of columns by block.

    After a block with maximum b, the running maximum m becomes `m' = max(m, b)`, and the running sum s becomes
    `s exp(m - m') + sum(exp(x - m'))`, summed over the block. In exact arithmetic the result does not depend on the blocks.

    Args:
        x: as for `safe_softmax`, with the same results for infinite elements and NaN.
        block_size: columns per block, at least 1; the last block may be shorter. None: 1024; on CUDA the kernel chooses.
        return_states: whether to return also the running maximum and sum after each block.

    Returns:
        An array or tensor of x's shape and dtype. With `return_states` also `RunningStates(max, sum)`, each
        (..., ceil(width / block_size)), float32 for half types and x's dtype otherwise. As long as all elements were -inf, the
        state is (-inf, 0). For tensors, result and states are differentiable. With block_size or return_states, PyTorch
        operations run on every device.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _check(x)
    if block_size is not None:
        validation.check_count("block_size", block_size)
    validation.check_bool("return_states", return_states)
    if block_size is None and not return_states and _runs_kernel(x):
        return ops.softmax(x, "online")
    if x.shape[-1] == 0:
        nothing = _empty(eager.accumulated(x))
        return (_empty(x), RunningStates(nothing, _empty(nothing))) if return_states else _empty(x)
    with _quiet(x):
        y, states = eager.online(eager.accumulated(x), block_size or eager.BLOCK_SIZE)
    return (_like(y, x), states) if return_states else _like(y, x)


def _check(x: object) -> None:
    if isinstance(x, Tensor):
        validation.check_dense("x", x)
        if x.dtype not in validation.DTYPES:
            raise TypeError(f"x must be float64, float32, float16 or bfloat16, got {x.dtype}")
    elif isinstance(x, np.ndarray):
        if not np.issubdtype(x.dtype, np.floating):
            raise TypeError(f"x must be a floating-point array, got dtype {x.dtype}")
    else:
        raise TypeError(f"x must be a numpy array or a torch.Tensor, got {type(x).__name__}")
    if x.ndim == 0:
        raise ValueError("x must have at least one dimension, (..., width), got none")


def _runs_kernel(x: Array) -> bool:
    """Returns whether the registered operator takes x."""
    return isinstance(x, Tensor) and x.is_cuda and (torch.compiler.is_compiling() or not is_transformed())


def _quiet(x: Array) -> AbstractContextManager:
    """Suppresses numpy's warning for -inf - -inf, which gives the documented NaN."""
    return nullcontext() if isinstance(x, Tensor) else np.errstate(invalid="ignore")


def _like(y: Array, x: Array) -> Array:
    return y.to(x.dtype) if isinstance(y, Tensor) else y.astype(x.dtype, copy=False)


def _empty(x: Array) -> Array:
    """Returns the result for x without columns: a copy, which autograd records."""
    return x.clone() if isinstance(x, Tensor) else x.copy()
