"""Reorders the tokens of padded sequences so that padding leaves no gaps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmax.eager import token_major
from fastmax.prepare.bounds import sequence_of_token


def begins_of_runs(real: Tensor) -> Tensor:
    """Returns the first tokens of runs of real tokens: bool (b, n), as `real`. Padding between real tokens makes two."""
    begins = real.clone()
    begins[:, 1:] &= ~real[:, :-1]
    return begins


class PackedPlaces(NamedTuple):
    """Positions of the tokens of packed sequences."""

    sequence: Tensor  # int64 (n,), index of each token's sequence
    place: Tensor  # int64 (n,), position of each token in its sequence, from 0
    begin: Tensor  # int64 (s,), position of each sequence's first token in the packed row
    count: Tensor  # int64 (s,), number of real tokens of each sequence; they are its first ones

    @classmethod
    def of(cls, cu_seqlens: Tensor, n: int, real: Tensor | None = None) -> PackedPlaces:
        """Returns the positions of n tokens. `real` (s,) counts the real tokens of each sequence; None: all are real."""
        sequence, bounds = sequence_of_token(cu_seqlens, n), cu_seqlens.long()
        place = torch.arange(n, device=bounds.device) - bounds[sequence]
        return cls(sequence, place, bounds[:-1], bounds[1:] - bounds[:-1] if real is None else real)

    def rows(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        """Returns tensors (1, heads, n, ...), n > 0, with a row for each sequence, (s, heads, longest, ...).

        Rows end with any tokens as padding. The length of the longest sequence, at least 1, is copied to the host.
        """
        n, longest = self.sequence.shape[0], max(1, int(self.count.max()))
        token = (self.begin.unsqueeze(-1) + torch.arange(longest, device=self.begin.device)).clamp(0, n - 1)  # (s, longest)
        return tuple(None if x is None else x[0][:, token].transpose(0, 1) for x in tensors)

    def packed(self, x: Tensor) -> Tensor:
        """Returns x (s, heads, longest, ...) as packed sequences, (1, heads, n, ...)."""
        return x[self.sequence, :, self.place.clamp(0, x.shape[2] - 1)].transpose(0, 1).unsqueeze(0)


class RealFirst(NamedTuple):
    """The order of tokens in which each sequence has its real tokens first, in their order, and its padding last.

    In this order causal attention equals that of the real tokens alone: positions count real tokens, and no real token sees
    padding.
    """

    place: Tensor  # int64 (b, n), new position of each token
    token: Tensor  # int64 (b, n), index of the token at each new position
    mask: Tensor  # bool (b, n), True = the token at the new position is real
    count: Tensor  # int64 (sequences,), number of real tokens

    @classmethod
    def of(cls, mask: Tensor, cu_seqlens: Tensor | None = None) -> RealFirst:
        """Returns the order for a mask, bool (b, n), True = real. Each row is a sequence; with `cu_seqlens` the only row packs
        several."""
        b, n = mask.shape
        at = torch.arange(n, device=mask.device)
        seen = mask.cumsum(1)  # number of real tokens up to and including each token
        if cu_seqlens is None:
            count = mask.sum(1)
            of_sequence, first = count.unsqueeze(-1), 0
        else:
            cu_seqlens, sequence = cu_seqlens.long().clamp(0, n), sequence_of_token(cu_seqlens, n)
            before = torch.nn.functional.pad(seen[0], (1, 0))[cu_seqlens]
            count = (before[1:] - before[:-1]).clamp(min=0)
            of_sequence, first = count[sequence], cu_seqlens[sequence]
            seen = seen - before[sequence]
        place = first + torch.where(mask, seen - 1, of_sequence + at - first - seen)
        place = place.clamp(0, max(0, n - 1))  # invalid cu_seqlens must not index out of bounds
        token = torch.zeros_like(place).scatter(1, place, at.expand(b, n))
        return cls(place, token, (at - first < of_sequence).expand(b, n), count)

    def first(self, x: Tensor, dim: int = 1) -> Tensor:
        """Returns x (b, ..., n, ...) with its tokens in this order."""
        return taken_at(x, self.token, dim)

    def back(self, x: Tensor, dim: int = 1) -> Tensor:
        """Returns x with its tokens back in their original order."""
        return taken_at(x, self.place, dim)


def taken(x: Tensor, first: Tensor, count: int, dim: int) -> Tensor:
    """Returns `count` tokens of x (b, ..., tokens, ...), in each row from the index in `first` (b,) on."""
    return taken_at(x, first.unsqueeze(-1) + torch.arange(count, device=first.device), dim)


def taken_at(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Returns the tokens of x at `index` (b, count) of each row, in x's memory layout."""
    if dim == 2 and x.dim() == 4 and token_major(x):
        return taken_at(x.transpose(1, 2), index, 1).transpose(1, 2)
    shape = list(x.shape)
    shape[dim] = index.shape[1]
    index = index.view(shape[0], *(1,) * (dim - 1), shape[dim], *(1,) * (x.dim() - dim - 1))
    return x.gather(dim, index.expand(shape))
