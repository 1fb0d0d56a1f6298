"""`largest_so_far`: the keys that `fastmax.nn.kept_keys` keeps for each block."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax import eager
from fastmax.ops.registration import register


def largest_so_far(rank: Tensor, index: Tensor, earlier: Tensor, count: int) -> Tensor:
    """Returns the result of `eager.largest_so_far`. It has no gradient."""
    if torch.compiler.is_compiling() and not eager.is_transformed():
        # Traced, the loop would need a graph for each number of rounds, which depends on the number of blocks.
        return _LARGEST(rank, index, earlier, count)
    return eager.largest_so_far(rank, index, earlier, count)


_LARGEST = register(
    "largest_so_far(Tensor key_rank, Tensor key_index, Tensor earlier, int count) -> Tensor kept",
    lambda *given: eager.largest_so_far(*given).contiguous(),
    lambda key_rank, key_index, earlier, count: key_index.new_empty((*key_index.shape[:3], count)),
)
