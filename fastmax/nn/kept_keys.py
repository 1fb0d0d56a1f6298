"""Kept keys: a few keys beyond the exact window that `FastmaxSelfAttention` also weighs by exp of their score.

The positions of a sequence are cut into blocks of B = 256, from its first token on. All queries of a block have the same kept
keys. For the block that begins at position s they are, in each key/value head, the K keys with the largest log_input_gate b_j
among those at positions up to s - W, where W is the exact window. Of equal gates the later key is kept. With the score s_ij
and the decays G of the layer, key j has for query i the weight

    exp(b_j) f(s_ij) exp(G_i - G_j) + [j is kept] exp(b_j + s_ij)          beyond the window
    exp(s_ij) exp(G_i - G_j)                                              in it

and the output is the mean of the values with these weights. The second term does not decay. The choice has no gradient; b_j
has one through the weights.

The K largest of some keys and more are the K largest of the K largest of those and more. So a key that was dropped never comes
back, and K keys and the last W + B - 1 are all that a state holds.

Attention to the kept keys is softmax attention of each block of queries to K keys with the gates b_j. `merge_attention` adds
its sums to those of the layer. Shapes: q (b, h, n, d), k (b, hk, m, d), v (b, hk, m, dv), gates (b, hk, m).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmax import eager
from fastmax.decoding.batch_state import BatchState
from fastmax.decoding.varlen import blocks_of
from fastmax.functional import flash_attention
from fastmax.prepare.padding import taken_at

_BLOCK = 256  # B


class KeptOptions(NamedTuple):
    """Options of attention to kept keys."""

    kept: int  # K
    window: int  # W, at least 1
    scale: float  # of the scores
    use_custom_gradient: bool


@dataclass(eq=False)
class KeptKeys(BatchState):
    """The keys that the next queries of a `FastmaxSelfAttention` may weigh as kept keys, after some tokens.

    There are K + W + B - 1 slots in each key/value head: for the kept keys, and for the later ones, which may become kept keys.
    `keys` (b, hk, slots, d) and `values` (b, hk, slots, dv) have the dtype of q, k and v, and `gates` (b, hk, slots) is their
    log_input_gate. `positions` (b, hk, slots) int64 holds the position of each key in its sequence, -1 where a slot is free.
    The order of the slots has no meaning.
    """

    keys: Tensor
    values: Tensor
    gates: Tensor
    positions: Tensor

    @classmethod
    def empty(
        cls,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
        kept: int,
        window: int,
    ) -> KeptKeys:
        """Returns the state before any token."""
        slots = batch, kv_heads, slots_of(kept, window)
        keys = torch.zeros(*slots, head_dim, dtype=dtype, device=device)
        gates = keys.new_zeros(slots, dtype=eager.compute_dtype(dtype))
        return cls(keys, keys.new_zeros(*slots, value_dim), gates, keys.new_full(slots, -1, dtype=torch.int64))

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Dtype of q, k and v."""
        return self.keys.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of the tensors."""
        return self.keys.device

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name. The first dimension of each is the batch."""
        return {name: getattr(self, name) for name in _FIELDS}

    def map(self, function: Callable[[Tensor], Tensor]) -> KeptKeys:
        """Returns the state with `function` applied to each of its tensors."""
        return KeptKeys(**{name: function(x) for name, x in self.tensors().items()})

    @classmethod
    def _cat(cls, states: Sequence[KeptKeys]) -> KeptKeys:
        return cls(**{name: torch.cat([getattr(state, name) for state in states]) for name in _FIELDS})

    def options(self) -> dict:
        """Returns the options that states of one batch must share."""
        return {f"shape of kept {name}": tuple(x.shape[1:]) for name, x in self.tensors().items()}

    def _moved(self, device: torch.device | str | int | None, dtype: torch.dtype, non_blocking: bool) -> KeptKeys:
        moved: dict[str, Any] = {"device": device, "non_blocking": non_blocking}
        keys, values = (x.to(dtype=dtype, **moved) for x in (self.keys, self.values))
        gates = self.gates.to(dtype=eager.compute_dtype(dtype), **moved)
        return KeptKeys(keys, values, gates, self.positions.to(**moved))


_FIELDS = tuple(field.name for field in fields(KeptKeys))


def slots_of(kept: int, window: int) -> int:
    """Returns the number of slots of a state."""
    return kept + window + _BLOCK - 1


def attend(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, cu_seqlens: Tensor | None, options: KeptOptions
) -> tuple[Tensor, Tensor] | None:
    """Computes attention of whole sequences to their kept keys.

    Args:
        q, k, v, gate: of n tokens.
        cu_seqlens: int32 (s + 1,), of packed sequences in a batch of one; None: each batch entry is a sequence.

    Returns:
        The output (b, h, n, dv) and the log of the sums of weights (b, h, n), 0 and -inf for queries without kept keys. None if
        no query has one, since there are too few tokens.
    """
    n = q.shape[2]
    if n <= -(-options.window // _BLOCK) * _BLOCK:  # the first block with a candidate begins there
        return None
    if cu_seqlens is None:
        blocks = torch.arange(-(-n // _BLOCK), device=q.device)
        begin, origin, token, place = blocks * _BLOCK, torch.zeros_like(blocks), None, None
    else:
        packed = blocks_of(cu_seqlens, n, length=_BLOCK)
        begin, origin = packed.begin, cu_seqlens.long()[packed.sequence]
        token, place = packed.token.flatten().unsqueeze(0), packed.place.unsqueeze(0)
    own = _largest(*_new_candidates(gate, begin.unsqueeze(0), origin.unsqueeze(0), options.window), options.kept)
    index = _largest_so_far(*own, begin // _BLOCK)
    return _attend_in_blocks(q, k, v, gate, index, token, place, options)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    state: KeptKeys,
    positions: Tensor,
    count: Tensor | None,
    options: KeptOptions,
) -> tuple[Tensor, Tensor, KeptKeys]:
    """Computes attention of n tokens to the kept keys of their sequences, as n calls of `step`.

    Args:
        q, k, v, gate: of the tokens.
        state: after the previous tokens. It is not modified.
        positions: int64 (b,), position of the first of the tokens.
        count: (b,), number of real tokens of each row, which come first. None: all.

    Returns:
        The results of `attend`, and the state after the tokens.
    """
    (b, hk, n, _), slots = k.shape, state.keys.shape[2]
    # All known keys in the order of their positions. From the first key on that is not a candidate yet, none is missing: the
    # key at a position has the index `origin` + position.
    order = state.positions.argsort(dim=-1, stable=True)
    of_slots = (x.gather(2, _like(order, x)) for x in state.tensors().values())
    new = positions.unsqueeze(-1) + torch.arange(n, device=q.device)
    of_tokens = k, v, gate, new.unsqueeze(1).expand(b, hk, n)
    known = KeptKeys(*(torch.cat(x, dim=2) for x in zip(of_slots, of_tokens, strict=True)))
    origin, offset = slots - positions, positions % _BLOCK

    blocks = (n + _BLOCK - 1) // _BLOCK + 1  # as many as n tokens and the one after them can be in
    begin = (positions - offset).unsqueeze(-1) + _BLOCK * torch.arange(blocks, device=q.device)  # (b, blocks)
    candidate = _is_candidate(known.positions[:, :, :slots], begin[:, 0], options.window)
    before = torch.where(candidate, known.gates.detach()[:, :, :slots], -torch.inf).flip(-1).unsqueeze(2)
    at = torch.arange(slots, device=q.device).flip(0).expand_as(before)
    after = _new_candidates(known.gates, begin[:, 1:], origin.unsqueeze(-1), options.window)
    own = zip(_largest(before, at, options.kept), _largest(*after, options.kept), strict=True)
    rank, candidates = (torch.cat(x, dim=2) for x in own)
    index = _largest_so_far(rank, candidates, torch.arange(blocks, device=q.device))

    with_queries = (n + 2 * _BLOCK - 2) // _BLOCK
    token = torch.arange(with_queries * _BLOCK, device=q.device) - offset.unsqueeze(-1)
    place = torch.arange(n, device=q.device) + offset.unsqueeze(-1)
    rows = known.keys, known.values, known.gates, index[:, :, :with_queries]
    o, lse = _attend_in_blocks(q, *rows, token.clamp(0, n - 1), place, options)

    stop = positions + (n if count is None else count)
    last = stop // _BLOCK - positions // _BLOCK
    kept = index.gather(2, last.view(b, 1, 1, 1).expand(b, hk, 1, options.kept)).squeeze(2)
    recent = stop.unsqueeze(-1) - torch.arange(1, slots - options.kept + 1, device=q.device)
    is_recent = (recent >= 0) & ~_is_candidate(recent, stop, options.window)
    recent = torch.where(is_recent, recent + origin.unsqueeze(-1), -1)
    index = torch.cat([kept, recent.unsqueeze(1).expand(b, hk, -1)], dim=-1)
    free, index = index < 0, index.clamp(min=0)
    filled = (x.gather(2, _like(index, x)).masked_fill(_like(free, x), 0) for x in known.tensors().values())
    after_tokens = KeptKeys(*filled)
    after_tokens.positions = after_tokens.positions.masked_fill(free, -1)
    return o, lse, after_tokens


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    state: KeptKeys,
    positions: Tensor,
    count: Tensor | None,
    options: KeptOptions,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, KeptKeys]:
    """Computes attention of one token to the kept keys of its sequence.

    Args:
        q, k, v, gate: of the token.
        state: after the previous tokens.
        positions: int64 (b,), position of the token.
        count: int (b,), 1 for a real token and 0 for padding. None: all are real.
        in_place: whether to overwrite the tensors of the state. Else it is not modified.

    Returns:
        The results of `attend`, and the state after the token.
    """
    (b, hk), h = k.shape[:2], q.shape[1]
    position = positions.view(b, 1, 1).expand(b, hk, 1)
    slot = state.positions.argmin(dim=-1, keepdim=True)  # one that is free
    tensors = zip(state.tensors().values(), (k, v, gate, position), strict=True)
    state = KeptKeys(*(_written(x, _like(slot, x), y, count, in_place) for x, y in tensors))

    # Each head has its own slots, so heads become batch entries.
    keys, values, gates = (x.flatten(0, 1).unsqueeze(1) for x in (state.keys, state.values, state.gates))
    candidate = _is_candidate(state.positions, positions, options.window)
    own = options._replace(use_custom_gradient=options.use_custom_gradient and not eager.differentiating(q, k, v, gate))
    o, lse = _softmax(q.reshape(b * hk, h // hk, 1, -1), keys, values, gates, candidate.flatten(0, 1), own)

    # In most blocks this token is not the last one, and there are at most K candidates.
    stop = positions + (1 if count is None else count)
    candidate = _is_candidate(state.positions, stop, options.window)
    order = state.positions.argsort(dim=-1, descending=True, stable=True)
    rank = torch.where(candidate, state.gates.detach(), -torch.inf).gather(2, order)
    order = order.gather(2, rank.argsort(dim=-1, descending=True, stable=True))
    beyond = torch.arange(order.shape[2], device=q.device) >= options.kept
    dropped = candidate & torch.zeros_like(candidate).scatter(2, order, beyond.expand_as(order))
    left = state.positions.masked_fill(dropped, -1)
    state.positions = state.positions.copy_(left) if in_place else left
    return o.reshape(b, h, 1, -1), lse.reshape(b, h, 1), state


def _written(x: Tensor, slot: Tensor, new: Tensor, count: Tensor | None, in_place: bool) -> Tensor:
    """Returns a tensor of a state with a new row in a slot; a batch entry with `count` 0 keeps its row."""
    new = new.to(x.dtype)
    if count is not None:
        new = torch.where(count.view(-1, *(1,) * (x.dim() - 1)) > 0, new, x.gather(2, slot))
    return x.scatter_(2, slot, new) if in_place else x.scatter(2, slot, new)


def _is_candidate(places: Tensor, positions: Tensor, window: int) -> Tensor:
    """Returns which keys may be kept for the queries at `positions` (b,), by their own positions (b, ..., keys); -1: no key."""
    last = positions - positions % _BLOCK - window
    return (places >= 0) & (places <= last.view(-1, *(1,) * (places.dim() - 1)))


def _like(index: Tensor, x: Tensor) -> Tensor:
    """Returns an index (b, hk, slots) as one of x (b, hk, ..., channels) or (b, hk, ...)."""
    return index if x.dim() == 3 else index.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])


# ---- the choice. Candidates are pairs of their gate (-inf: none) and their index among some keys, (b, hk, blocks, candidates)


def _new_candidates(gate: Tensor, begin: Tensor, origin: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Returns the keys that are candidates for a block but not for the one before it, the latest first.

    Args:
        gate: (b, hk, m).
        begin: position of the first token of each block in its sequence, (b or 1, blocks).
        origin: index among the m keys of the key at position 0 of the block's sequence, (b or 1, blocks or 1).
    """
    (b, hk, m), blocks = gate.shape, begin.shape[1]
    place = begin.unsqueeze(-1) - window - torch.arange(_BLOCK, device=gate.device)
    index = (origin.unsqueeze(-1) + place).clamp(0, m - 1)  # blocks after the last token have no queries
    index = index.unsqueeze(1).expand(b, hk, blocks, _BLOCK)
    rank = gate.detach().gather(2, index.flatten(2)).view_as(index)
    return torch.where((place >= 0).unsqueeze(1), rank, -torch.inf), index


def _largest(rank: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest candidates, in this order; of equal ones, those that come first."""
    rank, order = rank.sort(dim=-1, descending=True, stable=True)
    more = (0, max(0, count - rank.shape[-1]))
    return F.pad(rank[..., :count], more, value=-torch.inf), F.pad(index.gather(-1, order)[..., :count], more)


def _largest_so_far(rank: Tensor, index: Tensor, earlier: Tensor) -> Tensor:
    """Returns the indices of the largest candidates of each block and the blocks before it in its sequence, -1 for none.

    Args:
        rank, index: as `_largest` returns them for each block.
        earlier: (blocks,), number of earlier blocks of the same sequence.
    """
    blocks, count = rank.shape[2:]
    reach = 1  # each block has the candidates of so many blocks, its own the last
    while reach < blocks:
        rank_before, index_before = (F.pad(x[:, :, :-reach], (0, 0, reach, 0)) for x in (rank, index))
        rank_before = torch.where((earlier >= reach).unsqueeze(-1), rank_before, -torch.inf)
        rank, index = _largest(torch.cat([rank, rank_before], dim=-1), torch.cat([index, index_before], dim=-1), count)
        reach *= 2
    return torch.where(rank == -torch.inf, -1, index)


# ---- attention


def _attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    index: Tensor,
    token: Tensor | None,
    place: Tensor | None,
    options: KeptOptions,
) -> tuple[Tensor, Tensor]:
    """Returns the results of `attend` for queries in blocks.

    Args:
        index: indices of the kept keys among the m keys, (b, hk, blocks, kept), -1 for none. All heads have as many.
        token: (b, blocks * B), index of the query at each place of the blocks. None: the queries in order, and padding.
        place: (b, n), place of each query.
    """
    (b, h, n, _), (blocks, kept) = q.shape, index.shape[2:]
    if token is None:
        q = F.pad(q.transpose(1, 2), (0, 0, 0, 0, 0, blocks * _BLOCK - n))
    else:
        q = taken_at(q.transpose(1, 2), token, 1)
    q = q.reshape(b * blocks, _BLOCK, h, -1).transpose(1, 2)
    # Gates need causal attention, which lets the first of B queries see K of K + B keys. The other B are masked.
    index = F.pad(index, (0, _BLOCK), value=-1)
    filler = torch.arange(kept + _BLOCK, device=q.device) % k.shape[2]  # one key for all would get all their gradients of 0
    is_key, index = (index[:, 0] >= 0).flatten(0, 1), torch.where(index >= 0, index, filler)
    # A NaN in a masked place would reach the output: the place may hold a later key.
    masked = ~is_key.view(-1, 1, kept + _BLOCK, 1)
    keys, values, gates = (_rows(x, index).masked_fill(masked, 0) for x in (k, v, gate.unsqueeze(-1)))
    o, lse = _softmax(q, keys, values, gates.squeeze(-1), is_key, options)
    o = o.transpose(1, 2).reshape(b, blocks * _BLOCK, h, -1)
    lse = lse.unflatten(0, (b, blocks)).permute(0, 1, 3, 2).reshape(b, blocks * _BLOCK, h)
    if place is None:
        o, lse = o[:, :n], lse[:, :n]
    else:
        o, lse = taken_at(o, place, 1), taken_at(lse, place, 1)
    return o.transpose(1, 2), lse.transpose(1, 2)


def _softmax(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, is_key: Tensor, options: KeptOptions) -> tuple[Tensor, Tensor]:
    """Returns softmax attention to the keys (b, m) that are there, and the log of the sums of weights."""
    return flash_attention(
        q,
        k,
        v,
        causal=True,
        scale=options.scale,
        attention_mask=is_key,
        log_input_gate=gate,
        use_custom_gradient=options.use_custom_gradient,
        return_lse=True,
    )


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Returns the rows of x (b, hk, m, channels) at an index (b, hk, blocks, rows), (b * blocks, hk, rows, channels).

    A key that is kept for many blocks gets the gradients of all. They are summed in float32 or float64, and by `embedding` in
    an order that does not change.
    """
    b, hk, m, channels = x.shape
    wide = eager.compute_dtype(x.dtype) if eager.recording(x) else x.dtype
    heads = torch.arange(b, device=x.device).view(b, 1, 1, 1) * (m * hk) + torch.arange(hk, device=x.device)
    index = index.permute(0, 2, 3, 1) * hk + heads  # of the tensor (b * m * hk, channels)
    rows = F.embedding(index, x.to(wide).transpose(1, 2).reshape(-1, channels)).to(x.dtype)
    return rows.flatten(0, 1).transpose(1, 2)
