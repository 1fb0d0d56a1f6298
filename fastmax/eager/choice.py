"""The K keys of the largest rank up to each block of a sequence: a prefix scan that merges sorted lists."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def largest_so_far(rank: Tensor, index: Tensor, earlier: Tensor, count: int) -> Tensor:
    """Returns the indices of the `count` keys of the largest rank among those of a block and the blocks before it.

    There are log2(blocks) rounds. After each, a block has the largest keys of twice as many blocks.

    Args:
        rank: (b, hk, blocks, candidates), of the keys that each block adds. -inf: there is no key. NaN counts as inf.
        index: int64, likewise. Of keys with equal rank, those of later blocks are taken, and within a block the first ones.
        earlier: (blocks,), number of earlier blocks of the same sequence.

    Returns:
        int64 (b, hk, blocks, count), ascending. Where there are fewer keys, the first are -1.
    """
    cost, order = (-rank.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)).sort(dim=-1, stable=True)
    more = (0, max(0, count - cost.shape[-1]))
    cost = F.pad(cost[..., :count], more, value=torch.inf)
    index = F.pad(index.gather(-1, order[..., :count]), more)
    blocks = cost.shape[2]
    block, place = (torch.arange(x, device=rank.device) for x in (blocks, count))
    places = place.expand(cost.shape).contiguous()
    reach = 1  # number of blocks whose largest keys a block has: its own and those before it
    while reach < blocks:
        before = (block - reach).clamp(min=0)
        cost_before, index_before = (x.index_select(2, before) for x in (cost, index))
        cost_before = torch.where((earlier >= reach).unsqueeze(-1), cost_before, torch.inf)
        at = place + torch.searchsorted(cost_before, cost)  # places of the later keys in the merged list
        later = torch.searchsorted(at, places, right=True)  # number of later keys up to a place in it
        is_later = at.gather(-1, (later - 1).clamp(min=0)) == place
        of_both = torch.where(is_later, later - 1, count + place - later)
        cost, index = (torch.cat(x, dim=-1).gather(-1, of_both) for x in ((cost, cost_before), (index, index_before)))
        reach *= 2
    return torch.where(cost == torch.inf, -1, index).sort(dim=-1).values
