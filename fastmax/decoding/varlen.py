"""`prefill` of packed sequences, each of which continues from a batch entry of the state.

Sequences are cut into blocks of one length, and the last block of each sequence is padded. The blocks are computed in order:
each continues from the batch entry of its sequence, which is then overwritten by the new state. The number of blocks is an
upper bound that follows from shapes, and the tokens of a block are selected on the device. So no length is copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastmax import eager
from fastmax.decoding.state import DecodeState
from fastmax.decoding.window import Tokens

_SHORTEST = 64  # tokens of a block: shorter blocks would save padding, but their number costs more
# Takes q, tokens, state and the number of real tokens; returns the output, the log of the sums of weights and the new state.
Prefill = Callable[[Tensor, Tokens, DecodeState, Tensor], tuple[Tensor, Tensor | None, DecodeState]]


class Blocks(NamedTuple):
    """The blocks of packed sequences."""

    sequence: Tensor  # (blocks,): index of the block's sequence
    count: Tensor  # (blocks,): number of real tokens, which come first; 0 for blocks that are not needed
    token: Tensor  # (blocks, length): index of the token at each place; any index for padding
    place: Tensor  # (n,): index of each token among the places of all blocks
    begin: Tensor  # (blocks,): position of the block's first token in its sequence


def blocks_of(cu_seqlens: Tensor, n: int, real: Tensor | None = None, length: int | None = None) -> Blocks:
    """Returns blocks of `length` tokens. None: about the mean length of the sequences, at least `_SHORTEST`.

    There are at most twice as many blocks as sequences and, unless sequences are short, twice as many places as tokens. With
    `real` (s,), only the first `real` tokens of each sequence are real.
    """
    sequences = cu_seqlens.shape[0] - 1
    length = max(_SHORTEST, -(-n // sequences)) if length is None else length
    cu_seqlens = cu_seqlens.long()
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    last = ((end - begin + length - 1) // length).cumsum(0)  # number of blocks up to the end of each sequence
    first = last - (end - begin + length - 1) // length
    block = torch.arange(min(n, n // length + sequences), device=cu_seqlens.device)
    sequence = torch.searchsorted(last, block, right=True).clamp(max=sequences - 1)
    before = (block - first[sequence]) * length
    start = begin[sequence] + before
    stop = end if real is None else begin + real
    count = (stop[sequence] - start).clamp(0, length)
    token = (start.unsqueeze(-1) + torch.arange(length, device=cu_seqlens.device)).clamp(0, n - 1)
    at = torch.arange(n, device=cu_seqlens.device)
    of_token = torch.searchsorted(end, at, right=True).clamp(max=sequences - 1)
    place = first[of_token] * length + at - begin[of_token]
    place = place.clamp(0, token.numel() - 1)  # invalid cu_seqlens must not index other memory
    return Blocks(sequence, count, token, place, before)


def prefill_packed(
    q: Tensor, tokens: Tokens, state: DecodeState, cu_seqlens: Tensor, prefill: Prefill, real: Tensor | None = None
) -> tuple[Tensor, Tensor | None, DecodeState]:
    """Returns what `prefill` does, for the packed tokens and with the state after each sequence; `real` as in `blocks_of`."""
    n = q.shape[2]
    blocks, outputs, after = blocks_of(cu_seqlens, n, real), [], state.clone()
    lses: list[Tensor | None] = []
    write = Tensor.index_copy if eager.is_transformed() else Tensor.index_copy_
    for sequence, count, token in zip(*(x.split(1) for x in blocks[:3]), strict=True):
        part = _Part(token.squeeze(0), count)
        o, lse, entry = prefill(part(q, 2), part.of(tokens), after.select(sequence), count)
        outputs.append(o)
        lses.append(lse)
        after = replace(after, **{name: write(x, 0, sequence, getattr(entry, name)) for name, x in after.tensors().items()})

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim=2).index_select(2, blocks.place)

    given = [x for x in lses if x is not None]
    return joined(outputs), joined(given) if given else None, replace(after, tokens=state.tokens + n)


class _Part:
    """Selects the tokens of a block from all tokens, with 0 for padding."""

    def __init__(self, token: Tensor, count: Tensor):
        self._token = token
        self._is_real = torch.arange(token.shape[0], device=token.device) < count

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        is_real = self._is_real.view(-1, *(1,) * (x.dim() - 1 - dim))
        return torch.where(is_real, x.index_select(dim, self._token), 0)

    def of(self, tokens: Tokens) -> Tokens:
        is_real = self._is_real.unsqueeze(0)
        mask = is_real if tokens.mask is None else is_real & tokens.mask.index_select(1, self._token)
        decays, gates = (None if x is None else self(x, 2) for x in (tokens.decays, tokens.gates))
        return Tokens(self(tokens.keys, 2), self(tokens.values, 2), mask, decays, gates)
