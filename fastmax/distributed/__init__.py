"""Attention over several devices, on torch.distributed."""

from fastmax.distributed import sharding as sharding  # registers what DTensors do with the operators
from fastmax.distributed.tensor_parallel import TensorParallel

__all__ = ["TensorParallel"]
