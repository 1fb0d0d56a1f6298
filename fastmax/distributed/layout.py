"""Which tokens each rank of a group holds: parts of the sequence, as stretches (start, stop) of global tokens.

A rank holds the tokens of its parts one after the other, in the order of the sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import distributed as dist

from fastmax.core import validation


class Part(NamedTuple):
    start: int  # global tokens
    stop: int
    rank: int
    offset: int  # of its first token among those of its rank

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def local(self) -> slice:
        """Its tokens among those of its rank."""
        return slice(self.offset, self.offset + self.tokens)


@dataclass(frozen=True)
class Layout:
    """Stretches (start, stop) of each rank, rising; all of them together are 0 .. n, each token once. Empty ones are left out.

    Raises:
        TypeError, ValueError: it is something else.
    """

    stretches: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        stretches = []
        for rank, parts in enumerate(_sequence("layout", self.stretches)):
            own = [_stretch(f"layout[{rank}][{i}]", x) for i, x in enumerate(_sequence(f"layout[{rank}]", parts))]
            if any(b < a for (_, a), (b, _) in pairwise(own)):
                raise ValueError(f"layout[{rank}] must rise, a rank holds its parts in the order of the sequence, got {own}")
            stretches.append(tuple((start, stop) for start, stop in own if start < stop))
        object.__setattr__(self, "stretches", tuple(stretches))
        at = 0
        for part in self.parts:
            if part.start != at:
                what = "has no" if part.start > at else "has more than one"
                raise ValueError(f"layout must hold every token once, but {what} place for token {min(at, part.start)}")
            at = part.stop

    @property
    def world(self) -> int:
        return len(self.stretches)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Of all ranks, in the order of the sequence."""
        return tuple(sorted(part for rank in range(self.world) for part in self._of_rank(rank)))

    @property
    def tokens(self) -> int:
        return self.parts[-1].stop if self.parts else 0

    @cached_property
    def most_parts(self) -> int:
        """Of a rank, at least 1."""
        return max(1, *map(len, self.stretches))

    @cached_property
    def index(self) -> dict[Part, int]:
        """The place of each part in the order of the sequence."""
        return {part: i for i, part in enumerate(self.parts)}

    def of(self, rank: int) -> tuple[Part, ...]:
        return tuple(self._of_rank(rank))

    def count(self, rank: int) -> int:
        """Tokens of a rank."""
        return sum(stop - start for start, stop in self.stretches[rank])

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """The parts that hold tokens of a stretch, and which of its global tokens."""
        at = max(0, bisect_right(self.parts, start, key=lambda part: part.start) - 1)
        while at < len(self.parts) and self.parts[at].start < stop:
            part = self.parts[at]
            first, last = max(start, part.start), min(stop, part.stop)
            if first < last:
                yield part, first, last
            at += 1

    def mirrored(self) -> Layout:
        """Of the reversed sequence, where each rank holds its tokens reversed."""
        n = self.tokens
        return Layout(tuple(tuple((n - stop, n - start) for start, stop in reversed(parts)) for parts in self.stretches))

    def _of_rank(self, rank: int) -> Iterator[Part]:
        offset = 0
        for start, stop in self.stretches[rank]:
            yield Part(start, stop, rank, offset)
            offset += stop - start


class Spread(NamedTuple):
    """Where tokens are, for a rank of the group."""

    layout: Layout
    group: dist.ProcessGroup

    @property
    def parts(self) -> tuple[Part, ...]:
        """Of this rank."""
        return self.layout.of(self.group.rank())


def contiguous_layout(counts: Sequence[int]) -> Layout:
    """Rank r holds the r-th stretch, of `counts[r]` tokens."""
    for i, count in enumerate(counts):
        validation.check_count(f"counts[{i}]", count, least=0)
    return Layout(tuple((pair,) for pair in pairwise(accumulate(counts, initial=0))))


def zigzag_layout(tokens: int, world: int) -> Layout:
    """The layout that gives every rank the same work in causal attention of n^2: of 2 `world` stretches rank r holds the r-th
    and the r-th from the end. Where they cannot be of one length, they differ by a token."""
    validation.check_count("tokens", tokens, least=0)
    validation.check_count("world", world)
    bounds = [i * tokens // (2 * world) for i in range(2 * world + 1)]
    pieces = list(pairwise(bounds))
    return Layout(tuple((pieces[rank], pieces[-1 - rank]) for rank in range(world)))


def _sequence(name: str, value: object) -> Sequence:
    if isinstance(value, str) or not isinstance(value, Sequence):
        accepted = "for every rank a sequence of stretches (start, stop)"
        raise TypeError(f"{name} must be a sequence ({accepted}), got {validation.describe(value)}")
    return value


def _stretch(name: str, value: object) -> tuple[int, int]:
    pair = tuple(_sequence(name, value))
    if len(pair) != 2 or any(isinstance(x, bool) or not isinstance(x, int) for x in pair) or not 0 <= pair[0] <= pair[1]:
        raise ValueError(f"{name} must be a stretch (start, stop), 0 <= start <= stop, got {validation.describe(value)}")
    return pair
