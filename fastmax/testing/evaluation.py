"""Runs of attention or of its definition on given tensors: outputs and gradients, and the settings around a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastmax.functional import fastmax_attention, flash_attention
from fastmax.testing.poison import poison_free_memory

NUMBERS_PER_KEY = ("log_decay", "log_input_gate")


def run(
    function: Callable[..., Tensor | tuple[Tensor, Tensor]],
    tensors: dict[str, Tensor],
    options: dict,
    dtype: torch.dtype | None = None,
    poison: bool = False,
) -> dict[str, Tensor]:
    """Returns the outputs and gradients of `function` for the tensors cast to `dtype`, by name.

    The loss is a fixed random projection of the outputs. `poison` fills free device memory with NaN before the forward and
    before the backward.
    """
    q, v = tensors["q"], tensors["v"]
    dtype = dtype or q.dtype
    generator = torch.Generator(q.device).manual_seed(0)
    grad_o = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator, dtype=torch.float64, device=q.device).to(q.dtype)
    variables = [name for name in ("q", "k", "v", "rpe_matrix", *NUMBERS_PER_KEY) if name in tensors]
    inputs = {name: x.to(dtype) if x.dtype == q.dtype else x for name, x in tensors.items()}
    for name in NUMBERS_PER_KEY:  # never narrower than float32
        if name in tensors:
            inputs[name] = tensors[name].to(torch.promote_types(dtype, torch.float32))
    inputs |= {name: inputs[name].detach().requires_grad_() for name in variables}
    grad_o = grad_o.to(dtype)
    if poison:
        poison_free_memory(q.device)
    outputs = function(**inputs, **options)
    outputs = dict(zip(("o", "lse"), outputs if isinstance(outputs, tuple) else (outputs,), strict=False))
    projection = [grad_o] + [grad_o[..., 0].to(lse.dtype) for name, lse in outputs.items() if name == "lse"]
    if poison:
        poison_free_memory(q.device)
    grads = torch.autograd.grad(list(outputs.values()), [inputs[name] for name in variables], projection)
    return {name: x.detach() for name, x in outputs.items()} | dict(zip(variables, grads, strict=True))


def _softmax(**arguments: Any) -> tuple[Tensor, Tensor]:
    return flash_attention(**arguments, return_lse=True)


def implementation(softmax: bool) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """Returns the function to check: `fastmax_attention`, or `flash_attention` with its log-sum-exp."""
    return _softmax if softmax else fastmax_attention


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Sets `torch.set_float32_matmul_precision` for the block, and what it was at the end."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


@contextmanager
def advice_ignored() -> Iterator[None]:
    """Suppresses the warnings about options. The configurations and their tensors are such that f is positive."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fastmax: ", RuntimeWarning)
        yield
