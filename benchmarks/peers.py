"""Calls attention of other libraries, for their current releases, and softmax attention without fused kernels.

All functions take and return (b, h, n, d). Libraries are imported when they are called. A library that is not installed is a
note in the table (`missing`), not an error. `pip install fla-core retention cupy-cuda13x`, with Triton, installs all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor

POWER_CHUNK = 1024  # tokens between two states of power retention, as in its authors' measurements


def missing(name: str) -> str:
    """Returns "" if the name (module.attribute) can be imported, else the reason."""
    module, _, attribute = name.rpartition(".")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        return f"not installed: {error}"
    return "" if hasattr(found, attribute) else f"not installed: {module} has no {attribute}"


def fla(name: str, **options) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns a function that calls an operator of flash-linear-attention (0.6).

    The operator takes (b, n, h, d) and returns (output, state) or the output.
    """
    module, _, attribute = name.rpartition(".")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        function = getattr(importlib.import_module(module), attribute)
        o = function(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)

    return call


def power_retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes power retention of degree 2 without gates (retention 1.0). It takes (b, n, h, d), scales q.k by 1 / sqrt(d)."""
    function = importlib.import_module("retention").power_retention
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return function(q, k, v, deg=2, chunk_size=POWER_CHUNK).transpose(1, 2)


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Computes softmax attention by its formula: the (n, n) matrix is in memory, and autograd computes the backward."""
    scores = (q * scale) @ k.mT
    if causal:
        scores.masked_fill_(_hidden(torch, scores.shape[-1], device=q.device), float("-inf"))
    return scores.softmax(-1) @ v


def array_attention(library: str) -> Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]:
    """Returns `plain` in the operations of "cupy" or "numpy", with an explicit backward."""
    return lambda *arguments: _ArrayAttention.apply(*arguments, library)


class _ArrayAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, library: str) -> Tensor:
        with _array_library(library) as xp:
            q, k, v = (_array(xp, x) for x in (q, k, v))
            scores = xp.matmul(q, k.swapaxes(-1, -2))
            scores *= scale
            if causal:
                xp.copyto(scores, -xp.inf, where=_hidden(xp, scores.shape[-1]))
            scores -= scores.max(-1, keepdims=True)
            weight = xp.exp(scores)
            weight /= weight.sum(-1, keepdims=True)
            o = xp.matmul(weight, v)
            ctx.arrays, ctx.scale, ctx.library = (q, k, v, weight), scale, library
            return torch.from_dlpack(o)

    @staticmethod
    def backward(ctx, grad_o: Tensor):
        with _array_library(ctx.library) as xp:
            q, k, v, weight = ctx.arrays
            grad_o = _array(xp, grad_o)
            grad_v = xp.matmul(weight.swapaxes(-1, -2), grad_o)
            grad = xp.matmul(grad_o, v.swapaxes(-1, -2))
            grad -= (grad * weight).sum(-1, keepdims=True)
            grad *= weight
            grad *= ctx.scale
            grads = xp.matmul(grad, k), xp.matmul(grad.swapaxes(-1, -2), q), grad_v
            return *(torch.from_dlpack(x) for x in grads), None, None, None


def _hidden(xp, n: int, **options):
    """Returns a mask (n, n), True where the key comes after the query."""
    rows = xp.arange(n, **options)
    return rows > rows[:, None]


def _array(xp, x: Tensor):
    return xp.from_dlpack(x.detach())


@contextmanager
def _array_library(name: str):
    """Yields the module. CuPy then uses PyTorch's current stream and PyTorch's allocator.

    So neither waits for the other, and one peak counts the memory of both. The forward and the backward each enter the context,
    because they run in different threads.
    """
    xp = importlib.import_module(name)
    if name != "cupy":
        yield xp
        return
    stream = torch.cuda.current_stream()
    allocator = xp.cuda.PythonFunctionAllocator(
        lambda size, device: torch.cuda.caching_allocator_alloc(size, device, stream),
        lambda pointer, device: torch.cuda.caching_allocator_delete(pointer),
    )
    with xp.cuda.ExternalStream(stream.cuda_stream), xp.cuda.using_allocator(allocator.malloc):
        yield xp
