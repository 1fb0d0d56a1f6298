"""What is left of the keys of earlier parts: how much they fade over each part, and where they are forgotten."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch import distributed as dist

from fastmax.distributed.communication import gather
from fastmax.distributed.layout import Layout


class Carries:
    """Of every part of the layout, in the order of the sequence, known to all ranks once they are asked for."""

    def __init__(
        self, k: Tensor, log_decay: Tensor | None, first_keys: tuple[Tensor, ...], layout: Layout, group: dist.ProcessGroup
    ):
        """Starts the exchange.

        Args:
            k: (b, hk, n, d), of the tokens of this rank.
            log_decay: (b, hk, n), finite.
            first_keys: int (b, hk, tokens) for each part of this rank: the first key of the part that a query sees, -1 where it
                sees those before the part too.
        """
        self._layout = layout
        own = layout.of(group.rank())
        numbers = k.new_zeros(layout.most_parts, 2, *k.shape[:2], dtype=torch.float64)
        for i, (part, first) in enumerate(zip(own, first_keys, strict=True)):
            if log_decay is not None:
                numbers[i, 0] = log_decay.detach()[..., part.local].sum(-1, dtype=torch.float64)
            last = first[..., -1]
            numbers[i, 1] = torch.where(last >= 0, last + part.start, -1)
        self._pending = gather("decays of parts", numbers, group)
        self._numbers: Tensor | None = None

    def _of_parts(self) -> Tensor:
        """(parts, 2, b, hk)."""
        if self._numbers is None:
            came = self._pending.wait()
            places = [(part.rank, self._layout.of(part.rank).index(part)) for part in self._layout.parts]
            self._numbers = torch.stack([came[place] for place in places]) if places else came[:0].flatten(0, 1)
        return self._numbers

    @cached_property
    def factors(self) -> Tensor:
        """(parts, b * hk, 1), float64: what is left behind a part of a state before it."""
        totals, forgets = self._of_parts().unbind(1)
        return torch.where(forgets >= 0, 0.0, totals.exp()).flatten(1).unsqueeze(-1)

    def between(self, first: int, last: int) -> Tensor:
        """(b, hk), float64: the sum of the decays of the parts from one place to before another, without what forgets."""
        return self._of_parts()[first:last, 0].sum(0)

    def forgotten(self, place: int) -> Tensor:
        """(b, hk), float64: the first token that is seen behind the parts before this one; -1: all are."""
        numbers = self._of_parts()
        return numbers[:place, 1].amax(0) if place > 0 else torch.full_like(numbers[0, 1], -1.0)
