"""PyTorch's setting for the precision of float32 matrix products."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def allow_tf32_of(q: Tensor) -> bool:
    """Returns whether kernels may use TF32 for this q."""
    return q.is_cuda and q.dtype == torch.float32 and _tf32_is_set()


def _tf32_is_set() -> bool:
    """Returns what `torch.set_float32_matmul_precision` and its newer forms set for CUDA."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# The effect of `torch.compiler.assume_constant_result` without importing the compiler, which takes seconds. Compiled code has a
# guard on the setting anyway.
cast(Any, _tf32_is_set)._dynamo_marked_constant = True
