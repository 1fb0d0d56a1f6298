"""Tokens of padded sequences in an order in which padding leaves no gap."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastmax.eager import token_major
from fastmax.prepare.bounds import sequence_of_token


class PackedPlaces(NamedTuple):
    """Places of the tokens of packed sequences."""

    sequence: Tensor  # int64 (n,) of each token
    place: Tensor  # int64 (n,) of each token in its sequence, from 0
    begin: Tensor  # int64 (s,) of each sequence among all tokens
    count: Tensor  # int64 (s,), tokens of each sequence that are there, the first ones

    @classmethod
    def of(cls, cu_seqlens: Tensor, n: int, real: Tensor | None = None) -> PackedPlaces:
        """With `real` (s,) only so many tokens of each sequence are there."""
        sequence, bounds = sequence_of_token(cu_seqlens, n), cu_seqlens.long()
        place = torch.arange(n, device=bounds.device) - bounds[sequence]
        return cls(sequence, place, bounds[:-1], bounds[1:] - bounds[:-1] if real is None else real)


class RealFirst(NamedTuple):
    """The order in which the real tokens of each sequence come first, as they followed each other, and its padding last.

    Causal attention from there is that of the real tokens alone: their places count real tokens, and none sees padding.
    """

    place: Tensor  # int64 (b, n) of each token
    token: Tensor  # int64 (b, n) at each place
    mask: Tensor  # bool (b, n), True = a real token has the place
    count: Tensor  # int64 (sequences,), real tokens

    @classmethod
    def of(cls, mask: Tensor, cu_seqlens: Tensor | None = None) -> RealFirst:
        """For bool (b, n), True = real. Each row is a sequence, or with `cu_seqlens` the one row has several."""
        b, n = mask.shape
        at = torch.arange(n, device=mask.device)
        seen = mask.cumsum(1)  # real tokens up to each one, itself among them
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
        place = place.clamp(0, max(0, n - 1))  # no other memory, whatever cu_seqlens holds
        token = torch.zeros_like(place).scatter(1, place, at.expand(b, n))
        return cls(place, token, (at - first < of_sequence).expand(b, n), count)

    def first(self, x: Tensor, dim: int = 1) -> Tensor:
        """x (b, ..., n, ...) with its tokens in this order."""
        return _taken(x, self.token, dim)

    def back(self, x: Tensor, dim: int = 1) -> Tensor:
        """x with its tokens in the order that they had."""
        return _taken(x, self.place, dim)


def taken(x: Tensor, first: Tensor, count: int, dim: int) -> Tensor:
    """So many tokens of x (b, ..., tokens, ...), from that on which each row has in `first` (b,)."""
    return _taken(x, first.unsqueeze(-1) + torch.arange(count, device=first.device), dim)


def _taken(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """By index (b, count) of each row, in x's layout."""
    if dim == 2 and x.dim() == 4 and token_major(x):
        return _taken(x.transpose(1, 2), index, 1).transpose(1, 2)
    shape = list(x.shape)
    shape[dim] = index.shape[1]
    index = index.view(shape[0], *(1,) * (dim - 1), shape[dim], *(1,) * (x.dim() - dim - 1))
    return x.gather(dim, index.expand(shape))
