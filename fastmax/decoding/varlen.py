"""`prefill` of packed sequences, each of which continues from a batch entry of the state.

Sequences are cut into blocks of one length, the last of each filled up with tokens that are not there, and the blocks are
taken in order, each from the entry of its sequence and back into it. How many blocks there may be follows from shapes alone,
and which tokens a block has is known on the device, so that no length is copied to the host.
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

_SHORTEST = 64  # tokens of a block: fewer would be more blocks, which cost more than tokens that are not there
Prefill = Callable[[Tensor, Tokens, DecodeState, Tensor], tuple[Tensor, DecodeState]]  # q, tokens, state, count of tokens


class Blocks(NamedTuple):
    sequence: Tensor  # (blocks,) of a block
    count: Tensor  # (blocks,) of the tokens that are there, the first ones; 0 in blocks that are not needed
    token: Tensor  # (blocks, length) that stands at a place, any where none does
    place: Tensor  # (n,) of a token, among those of all blocks


def blocks_of(cu_seqlens: Tensor, n: int, real: Tensor | None = None) -> Blocks:
    """Of about the mean length of a sequence: at most two for each sequence, and twice as many places as tokens, beyond short
    ones. With `real` (s,) only so many tokens of a sequence are there, the first ones."""
    sequences = cu_seqlens.shape[0] - 1
    length = max(_SHORTEST, -(-n // sequences))
    cu_seqlens = cu_seqlens.long()
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    last = ((end - begin + length - 1) // length).cumsum(0)  # the blocks up to the end of a sequence
    first = last - (end - begin + length - 1) // length
    block = torch.arange(min(n, n // length + sequences), device=cu_seqlens.device)
    sequence = torch.searchsorted(last, block, right=True).clamp(max=sequences - 1)
    start = begin[sequence] + (block - first[sequence]) * length
    stop = end if real is None else begin + real
    count = (stop[sequence] - start).clamp(0, length)
    token = (start.unsqueeze(-1) + torch.arange(length, device=cu_seqlens.device)).clamp(0, n - 1)
    at = torch.arange(n, device=cu_seqlens.device)
    of_token = torch.searchsorted(end, at, right=True).clamp(max=sequences - 1)
    place = first[of_token] * length + at - begin[of_token]
    return Blocks(sequence, count, token, place.clamp(0, token.numel() - 1))  # no other memory, whatever cu_seqlens holds


def prefill_packed(
    q: Tensor, tokens: Tokens, state: DecodeState, cu_seqlens: Tensor, prefill: Prefill, real: Tensor | None = None
) -> tuple[Tensor, DecodeState]:
    """Output (1, h, n, dv), and the state after each sequence; `real` as in `blocks_of`."""
    n = q.shape[2]
    blocks, outputs, after = blocks_of(cu_seqlens, n, real), [], state.clone()
    write = Tensor.index_copy if eager.is_transformed() else Tensor.index_copy_
    for sequence, count, token in zip(*(x.split(1) for x in blocks[:3]), strict=True):
        part = _Part(token.squeeze(0), count)
        o, entry = prefill(part(q, 2), part.of(tokens), after.select(sequence), count)
        outputs.append(o)
        after = replace(after, **{name: write(x, 0, sequence, getattr(entry, name)) for name, x in after.tensors().items()})
    o = torch.cat(outputs, dim=2).index_select(2, blocks.place)
    return o, replace(after, tokens=state.tokens + n)


class _Part:
    """The tokens of a block, taken out of all; 0 where there is none."""

    def __init__(self, token: Tensor, count: Tensor):
        self._token = token
        self._is_there = torch.arange(token.shape[0], device=token.device) < count

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        there = self._is_there.view(-1, *(1,) * (x.dim() - 1 - dim))
        return torch.where(there, x.index_select(dim, self._token), 0)

    def of(self, tokens: Tokens) -> Tokens:
        there = self._is_there.unsqueeze(0)
        mask = there if tokens.mask is None else there & tokens.mask.index_select(1, self._token)
        decays = None if tokens.decays is None else self(tokens.decays, 2)
        return Tokens(self(tokens.keys, 2), self(tokens.values, 2), mask, decays)
