"""`largest_so_far`: the keys that `fastmax.nn.kept_keys` keeps for each block."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax import eager
from fastmax.ops.registration import register


def largest_so_far(rank: Tensor, index: Tensor, earlier: Tensor) -> Tensor:
    """Returns the result of `eager.choice.largest_so_far`. It has no gradient."""
    if torch.compiler.is_compiling() and rank.is_cuda:
        # The compiler of PyTorch 2.11 fails on some orders in which it may fuse these operations.
        return _LARGEST(rank, index, earlier)
    return eager.choice.largest_so_far(rank, index, earlier)


_LARGEST = register(
    "largest_so_far(Tensor key_rank, Tensor key_index, Tensor earlier) -> Tensor kept",
    lambda key_rank, key_index, earlier: eager.choice.largest_so_far(key_rank, key_index, earlier).contiguous(),
    lambda key_rank, key_index, earlier: key_index.new_empty(key_index.shape),
)
