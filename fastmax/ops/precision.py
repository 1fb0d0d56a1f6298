"""The setting of the precision of float32 matrix products."""

from __future__ import annotations

import torch
from torch import Tensor


def allow_tf32_of(q: Tensor) -> bool:
    return q.is_cuda and q.dtype == torch.float32 and _tf32_is_set()


def _tf32_is_set() -> bool:
    """What `torch.set_float32_matmul_precision` and its newer forms come to for CUDA."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# What `torch.compiler.assume_constant_result` does, without importing the compiler, which takes seconds. Compiled code is
# guarded by the setting all the same.
_tf32_is_set._dynamo_marked_constant = True
