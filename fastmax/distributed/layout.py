"""Layouts: which tokens of the sequence each rank holds.

A rank holds parts, which are ranges (start, stop) of global tokens. Its local tensors concatenate them in sequence order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from fastmax.core import validation


class Part(NamedTuple):
    """A range of consecutive tokens of the sequence, on one rank."""

    start: int  # global tokens
    stop: int
    rank: int
    offset: int  # local index of the first token

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    @property
    def local(self) -> slice:
        """Local indices of the tokens."""
        return slice(self.offset, self.offset + self.tokens)


@dataclass(frozen=True)
class Layout:
    """The ranges (start, stop) of global tokens that each rank holds.

    Args:
        stretches: for each rank its ranges, in ascending order. Together they must hold every token 0 .. n - 1 once. Empty
            ranges are removed.

    Raises:
        TypeError, ValueError: the ranges are not of this form.
    """

    stretches: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        stretches = []
        for rank, parts in enumerate(_sequence("layout", self.stretches)):
            own = [_stretch(f"layout[{rank}][{i}]", x) for i, x in enumerate(_sequence(f"layout[{rank}]", parts))]
            if any(b < a for (_, a), (b, _) in pairwise(own)):
                raise ValueError(f"layout[{rank}] must be in ascending order, got {own}")
            stretches.append(tuple((start, stop) for start, stop in own if start < stop))
        object.__setattr__(self, "stretches", tuple(stretches))
        at = 0
        for part in self.parts:
            if part.start != at:
                what = "misses" if part.start > at else "repeats"
                raise ValueError(f"layout must hold every token once, but it {what} token {min(at, part.start)}")
            at = part.stop

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.stretches)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Parts of all ranks, in sequence order."""
        return tuple(sorted(part for rank in range(self.world) for part in self._of_rank(rank)))

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return self.parts[-1].stop if self.parts else 0

    @cached_property
    def most_parts(self) -> int:
        """Largest number of parts of a rank, at least 1."""
        return max(1, *map(len, self.stretches))

    @cached_property
    def index(self) -> dict[Part, int]:
        """Position of each part in sequence order."""
        return {part: i for i, part in enumerate(self.parts)}

    def of(self, rank: int) -> tuple[Part, ...]:
        """Returns the parts of a rank."""
        return tuple(self._of_rank(rank))

    def count(self, rank: int) -> int:
        """Returns the number of tokens of a rank."""
        return sum(stop - start for start, stop in self.stretches[rank])

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """Yields each part that holds tokens of the range, with the bounds of their intersection."""
        at = max(0, bisect_right(self.parts, start, key=lambda part: part.start) - 1)
        while at < len(self.parts) and self.parts[at].start < stop:
            part = self.parts[at]
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                yield part, first, last
            at += 1

    def mirrored(self) -> Layout:
        """Returns the layout of the reversed sequence, where each rank holds its tokens in reverse order."""
        n = self.tokens
        return Layout(tuple(tuple((n - stop, n - start) for start, stop in reversed(parts)) for parts in self.stretches))

    def without_first(self, count: int) -> Layout:
        """Returns the layout of the sequence without its first `count` tokens."""
        if count == 0:
            return self
        return Layout(tuple(tuple((max(0, a - count), max(0, b - count)) for a, b in parts) for parts in self.stretches))

    def _of_rank(self, rank: int) -> Iterator[Part]:
        offset = 0
        for start, stop in self.stretches[rank]:
            yield Part(start, stop, rank, offset)
            offset += stop - start


def contiguous_layout(counts: Sequence[int]) -> Layout:
    """Returns the layout in which rank r holds the r-th range of the sequence, of `counts[r]` tokens."""
    for i, count in enumerate(counts):
        validation.check_count(f"counts[{i}]", count, least=0)
    return Layout(tuple((pair,) for pair in pairwise(accumulate(counts, initial=0))))


def zigzag_layout(tokens: int, world: int) -> Layout:
    """Returns the layout that balances causal attention of quadratic cost.

    The sequence is split into `2 * world` ranges whose lengths differ by at most one token. Rank r holds the r-th range and the
    r-th from the end.
    """
    validation.check_count("tokens", tokens, least=0)
    validation.check_count("world", world)
    bounds = [i * tokens // (2 * world) for i in range(2 * world + 1)]
    pieces = list(pairwise(bounds))
    return Layout(tuple((pieces[rank], pieces[-1 - rank]) for rank in range(world)))


def _sequence(name: str, value: object) -> Sequence:
    if isinstance(value, str) or not isinstance(value, Sequence):
        accepted = "for every rank a sequence of ranges (start, stop)"
        raise TypeError(f"{name} must be a sequence ({accepted}), got {validation.describe(value)}")
    return value


def _stretch(name: str, value: object) -> tuple[int, int]:
    pair = tuple(_sequence(name, value))
    if len(pair) != 2 or any(isinstance(x, bool) or not isinstance(x, int) for x in pair) or not 0 <= pair[0] <= pair[1]:
        raise ValueError(f"{name} must be a range (start, stop), 0 <= start <= stop, got {validation.describe(value)}")
    return pair
