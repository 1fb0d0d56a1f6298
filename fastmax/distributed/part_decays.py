"""Decay and resets across parts: how much each part decays the keys before it, and which keys a query can still see."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch import distributed as dist

from fastmax.distributed.communication import all_gather
from fastmax.distributed.layout import Layout


class PartDecays:
    """Total decay and last reset of every part of the layout, in sequence order, all-gathered to all ranks.

    The constructor starts the all-gather; the first access waits for it.
    """

    def __init__(
        self, k: Tensor, log_decay: Tensor | None, k_starts: tuple[Tensor, ...], layout: Layout, group: dist.ProcessGroup
    ):
        """Starts the all-gather.

        Args:
            k: (b, hk, n, d), the local keys.
            log_decay: (b, hk, n), finite.
            k_starts: int (b, hk, tokens) for each local part: the first key of the part that a query sees; -1 if it also sees
                keys before the part.
        """
        self._layout = layout
        own = layout.of(group.rank())
        own_parts = k.new_zeros(layout.most_parts, 2, *k.shape[:2], dtype=torch.float64)
        for i, (part, first) in enumerate(zip(own, k_starts, strict=True)):
            if log_decay is not None:
                own_parts[i, 0] = log_decay.detach()[..., part.local].sum(-1, dtype=torch.float64)
            last = first[..., -1]
            own_parts[i, 1] = torch.where(last >= 0, last + part.start, -1)
        self._pending = all_gather("decays of parts", own_parts, group)

    @cached_property
    def _of_parts(self) -> Tensor:
        """(parts, 2, b, hk): sum of log decays; global index of the first visible key after the last reset, or -1."""
        received = self._pending.wait()  # (ranks, parts of a rank, 2, b, hk)
        slots = [(part.rank, self._layout.of(part.rank).index(part)) for part in self._layout.parts]
        return torch.stack([received[slot] for slot in slots]) if slots else received[:0].flatten(0, 1)

    @cached_property
    def factors(self) -> Tensor:
        """Factor (parts, b * hk, 1), float64, by which each part decays a state before it; 0 if the part resets it."""
        totals, resets = self._of_parts.unbind(1)
        return torch.where(resets >= 0, 0.0, totals.exp()).flatten(1).unsqueeze(-1)

    def log_decay_of(self, first: int, stop: int) -> Tensor:
        """Returns the sum of the log decays of parts `first` to `stop - 1`, (b, hk) in float64. Resets are ignored."""
        return self._of_parts[first:stop, 0].sum(0)

    def first_visible(self, index: int) -> Tensor:
        """Returns the first token before part `index` that is visible to it, (b, hk) in float64; -1 if all are visible."""
        resets = self._of_parts[:, 1]
        return resets[:index].amax(0) if index > 0 else torch.full_like(resets[0], -1.0)
