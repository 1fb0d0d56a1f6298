"""The K largest of all keys up to each block of a sequence.

Candidates are pairs of their rank (-inf: none) and their index among some keys, both (b, hk, blocks, candidates).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def largest(rank: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest candidates of each block, in this order; of equal ones, those that come first."""
    rank, order = rank.sort(dim=-1, descending=True, stable=True)
    more = (0, max(0, count - rank.shape[-1]))
    return F.pad(rank[..., :count], more, value=-torch.inf), F.pad(index.gather(-1, order)[..., :count], more)


def largest_so_far(rank: Tensor, index: Tensor, earlier: Tensor) -> Tensor:
    """Returns the indices of the largest candidates of each block and the blocks before it in its sequence, -1 for none.

    Args:
        rank, index: as `largest` returns them for each block.
        earlier: (blocks,), number of earlier blocks of the same sequence.
    """
    blocks, count = rank.shape[2:]
    block, place = (torch.arange(x, device=rank.device) for x in (blocks, count))
    reach = 1  # each block has the candidates of so many blocks, its own the last
    while reach < blocks:
        before = (block - reach).clamp(min=0)
        rank_before, index_before = (x.index_select(2, before) for x in (rank, index))
        rank_before = torch.where((earlier >= reach).unsqueeze(-1), rank_before, -torch.inf)
        # Both lists are sorted. The K largest are the first m of the later list and the first K - m of the earlier one. m is
        # the number of places p at which later[p] >= earlier[K - 1 - p]; of equal keys the later one is kept.
        later = (rank >= rank_before.flip(-1)).sum(-1, keepdim=True)
        of_both = torch.where(place < later, place, count + place - later)
        rank, index = (torch.cat(x, dim=-1).gather(-1, of_both) for x in ((rank, rank_before), (index, index_before)))
        reach *= 2
        if reach < blocks:
            rank, index = largest(rank, index, count)
    return torch.where(rank == -torch.inf, -1, index)
