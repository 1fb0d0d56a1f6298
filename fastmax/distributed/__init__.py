"""Attention over sequences whose tokens are sharded over the ranks of a process group, on torch.distributed."""

from torch import distributed as _distributed

if not _distributed.is_available():
    raise ImportError("fastmax.distributed needs torch.distributed, which this build of PyTorch does not have")

from fastmax.distributed import sharding as _sharding  # noqa: F401, registers the DTensor rules of operators
from fastmax.distributed.attention import (
    context_parallel_attention,
    context_parallel_flash_attention,
    tokens_before,
)
from fastmax.distributed.communication_volume import exchanged_bytes
from fastmax.distributed.context import Context, ContextParallel, context_parallel
from fastmax.distributed.layout import Layout, contiguous_layout, zigzag_layout
from fastmax.distributed.rank_consistency import set_time_limit
from fastmax.distributed.tensor_parallel import TensorParallel

__all__ = [
    "Context",
    "ContextParallel",
    "Layout",
    "TensorParallel",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_flash_attention",
    "contiguous_layout",
    "exchanged_bytes",
    "set_time_limit",
    "tokens_before",
    "zigzag_layout",
]
