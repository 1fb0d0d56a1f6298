"""Kept keys: keys beyond the exact window that `FastmaxSelfAttention` also weighs by exp of their score.

The positions of a sequence are cut into blocks of B = 256, from its first token on. For the queries of the block that begins at
position s, W being the exact window, these keys are

    all at positions from s - W on, and
    the K kept keys: those before position s - W with the largest log_input_gate b_j - G_j.

G are the sums of the log decays up to a token. So b_j - G_j orders keys by their weight at a score of 0, and the order is the
same for all later queries. Of equal keys the later one is kept. Each key/value head has its own. With the score s_ij, key j has
for query i the weight

    exp(G_i - G_j) exp(b_j) (f(s_ij) + [j is such a key] exp(s_ij))    beyond the window
    exp(G_i - G_j) exp(s_ij)                                           in it

and the output is the mean of the values with these weights. The choice has no gradient; b_j and G have one through the weights.

The K largest of some keys and more are the K largest of the K largest of those and more. So a key that was dropped never comes
back. A state holds at most K keys and the last W + B - 1, and has a slot for the next token.

The second term is softmax attention of each block of B queries to K + B keys in the order of their positions. `merge_attention`
adds its sums to those of the layer. Shapes: q (b, h, n, d), k (b, hk, m, d), v (b, hk, m, dv), gates and decays (b, hk, m).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmax import eager, ops
from fastmax.core import validation
from fastmax.decoding.batch_state import BatchState
from fastmax.decoding.varlen import blocks_of
from fastmax.functional import flash_attention
from fastmax.ops.merge import merge_attention
from fastmax.prepare.padding import PackedPlaces, taken_at
from fastmax.prepare.tensors import cast_for_autocast, prepare_queries_and_keys

_BLOCK = 256  # B


class KeptOptions(NamedTuple):
    """Options of attention to kept keys."""

    kept: int  # K
    window: int  # W, at least 1
    scale: float  # of the scores
    use_custom_gradient: bool
    normalize: str | None = None  # "token" or None, as in `fastmax_attention`; so is `lim`
    lim: float = validation.DEFAULT_LIM


@dataclass(eq=False)
class KeptKeys(BatchState):
    """The keys that the next queries of a `FastmaxSelfAttention` weigh by exp of their score, after some tokens.

    There are K + W + B slots in each key/value head. `keys` (b, hk, slots, d) and `values` (b, hk, slots, dv) have the dtype of
    q, k and v. `log_factors` (b, hk, slots) float64 is the log of what multiplies exp of the score: log_input_gate and the log
    decays since. `positions` (b, hk, slots) int64 holds the position of each key in its sequence, -1 where a slot is free. The
    order of the slots has no meaning.
    """

    keys: Tensor
    values: Tensor
    log_factors: Tensor
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
        log_factors = keys.new_zeros(slots, dtype=torch.float64)
        return cls(keys, keys.new_zeros(*slots, value_dim), log_factors, keys.new_full(slots, -1, dtype=torch.int64))

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
        return KeptKeys(keys, values, *(x.to(**moved) for x in (self.log_factors, self.positions)))


_FIELDS = tuple(field.name for field in fields(KeptKeys))


def slots_of(kept: int, window: int) -> int:
    """Returns the number of slots of a state."""
    return kept + window + _BLOCK


class LayerTokens(NamedTuple):
    """Queries, keys, values, input gates and decays of consecutive tokens."""

    q: Tensor  # (b, h, n, d)
    k: Tensor  # (b, hk, n, d)
    v: Tensor  # (b, hk, n, dv)
    gate: Tensor  # log_input_gate (b, hk, n)
    log_decay: Tensor | None  # (b, hk, n)

    def map(self, function: Callable[[Tensor], Tensor]) -> LayerTokens:
        """Returns the tokens with `function` applied to each tensor."""
        return LayerTokens(*(None if x is None else function(x) for x in self))  # type: ignore[arg-type]

    def cast(self, dtype: torch.dtype | None = None) -> LayerTokens:
        """Returns the tokens with q, k and v as `cast_for_autocast` casts them."""
        q, k, v = cast_for_autocast(self.q, self.k, self.v, dtype=dtype)
        return self._replace(q=q, k=k, v=v)

    def real_only(self, count: Tensor | None) -> LayerTokens:
        """Returns the tokens with zeros after the first `count` (b,) of each row. None: all are real."""
        if count is None:
            return self
        is_real = torch.arange(self.k.shape[2], device=count.device) < count.view(-1, 1, 1)
        return self.map(lambda x: torch.where(is_real if x.dim() == 3 else is_real.unsqueeze(-1), x, 0))


def included(o: Tensor, lse: Tensor, tokens: LayerTokens, options: KeptOptions, attend: Callable) -> Tensor:
    """Returns the output of whole sequences with the second term included.

    Args:
        o, lse: (b, h, n, dv) and (b, h, n), output of `fastmax_attention` without it and the log of the sums of weights.
        tokens: as `fastmax_attention` takes them.
        attend: `attend` of this module, or another function that returns the same of prepared tokens and the options.
    """
    tokens = tokens.cast()
    with ops.without_autocast(tokens.q):
        of_kept = attend(_prepared(tokens, options), options)
        return o if of_kept is None else merge_attention(*zip((o, lse), of_kept, strict=True))[0]


def included_after(
    o: Tensor,
    lse: Tensor,
    tokens: LayerTokens,
    state: KeptKeys,
    positions: Tensor,
    count: Tensor | None,
    options: KeptOptions,
    packed: PackedPlaces | None = None,
    in_place: bool = False,
) -> tuple[Tensor, KeptKeys]:
    """Returns the output of tokens after a state with the second term included, and the state after them.

    Args:
        o, lse, tokens: as for `included`.
        state, positions, count: as for `prefill`.
        packed: places of the tokens, if they are packed sequences. The state has a batch entry for each.
        in_place: whether to overwrite the tensors of the state, for one token.
    """
    if tokens.q.shape[2] == 0:
        return o, state.clone()
    tokens = tokens.cast(state.dtype)
    with ops.without_autocast(tokens.q):
        options = options._replace(use_custom_gradient=options.use_custom_gradient and not eager.is_transformed())
        single = tokens.q.shape[2] == 1 and eager.differentiating(*tokens)  # single tokens have all derivatives
        tokens = _prepared(tokens, options._replace(use_custom_gradient=options.use_custom_gradient and not single))
        if packed is not None:
            tokens, count = LayerTokens(*packed.rows(*tokens)), packed.count
        if tokens.q.shape[2] == 1:
            other = (o, lse) if packed is None else packed.rows(o, lse)
            o, kept = step(tokens, other, state, positions, count, options, in_place)
            return o if packed is None else packed.packed(o), kept
        o_kept, lse_kept, kept = prefill(tokens, state, positions, count, options)
        if packed is not None:
            o_kept, lse_kept = packed.packed(o_kept), packed.packed(lse_kept)
        return merge_attention((o, o_kept), (lse, lse_kept))[0], kept


def _prepared(tokens: LayerTokens, options: KeptOptions) -> LayerTokens:
    """Returns the tokens with q and k as `fastmax_attention` normalizes them."""
    q, k = prepare_queries_and_keys(tokens.q, tokens.k, options.normalize, options.lim, None, options.use_custom_gradient)
    return tokens._replace(q=q, k=k)


def attend(tokens: LayerTokens, options: KeptOptions, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """Computes the second term of attention of whole sequences.

    Args:
        tokens: n tokens.
        cu_seqlens: int32 (s + 1,), of packed sequences in a batch of one; None: each batch entry is a sequence.

    Returns:
        The output (b, h, n, dv) and the log of the sums of weights (b, h, n), 0 and -inf for queries without such keys. None if
        no query has one, since there are too few tokens.
    """
    q, k, v, _, log_decay = tokens
    n, device, window = q.shape[2], q.device, options.window
    if n <= window:
        return None
    log_factor, sums = _log_factors(tokens.gate, log_decay)
    blocks: _Blocks
    if cu_seqlens is None and _is_exporting():  # views of blocks have other strides where B divides n
        earlier = torch.arange((n + _BLOCK - 1) // _BLOCK, device=device)
        begin, none = (earlier * _BLOCK).unsqueeze(0), torch.zeros(1, 1, dtype=torch.int64, device=device)
        blocks = _IndexedBlocks(window, begin, none, none + n, none, torch.arange(n, device=device).unsqueeze(0))
        candidates = _candidates_at(log_factor.detach(), begin, none, window)
    elif cu_seqlens is None:
        blocks = _WholeBlocks(n, window, device)
        earlier, candidates = blocks.earlier, blocks.candidates(log_factor.detach())
    else:
        packed, ends = blocks_of(cu_seqlens, n, length=_BLOCK), cu_seqlens.long()
        begin, earlier = packed.begin.unsqueeze(0), packed.begin // _BLOCK
        origin, length = (x[packed.sequence].unsqueeze(0) for x in (ends[:-1], ends.diff()))
        blocks = _IndexedBlocks(window, begin, origin, length, origin, packed.place.unsqueeze(0))
        candidates = _candidates_at(log_factor.detach(), begin, origin, window)
    index = ops.largest_so_far(*candidates, earlier, min(options.kept, n))
    return _attend_in_blocks(q, k, v, log_factor, sums, index, blocks, options)


def prefill(
    tokens: LayerTokens, state: KeptKeys, positions: Tensor, count: Tensor | None, options: KeptOptions
) -> tuple[Tensor, Tensor, KeptKeys]:
    """Computes the second term of attention of n tokens after a state. The state after them is that of n calls of `step`.

    Args:
        tokens: n tokens.
        state: after the previous tokens. It is not modified.
        positions: int64 (b,), position of the first of the tokens.
        count: (b,), number of real tokens of each row, which come first. None: all.

    Returns:
        The output and log of the sums of weights, as `attend`, and the state after the tokens.
    """
    q, k, v, gate, log_decay = tokens.real_only(count)
    (b, hk, n, _), slots = k.shape, state.keys.shape[2]
    log_factor, sums = _log_factors(gate, log_decay)
    # All known keys in the order of their positions. Those that are not candidates yet have no gaps, so the one at a position
    # has the index `origin` + position. Log factors are those at the end of the state.
    order = state.positions.argsort(dim=-1)
    of_slots = (x.gather(2, eager.slots_like(order, x)) for x in state.tensors().values())
    of_new = positions.unsqueeze(-1) + torch.arange(n, device=q.device)
    of_tokens = k, v, log_factor, of_new.unsqueeze(1).expand(b, hk, n)
    known = KeptKeys(*(torch.cat(x, dim=2) for x in zip(of_slots, of_tokens, strict=True)))
    origin, offset = slots - positions, positions % _BLOCK

    blocks = (n + _BLOCK - 1) // _BLOCK + 1  # as many as n tokens and the one after them can be in
    begin = (positions - offset).unsqueeze(-1) + _BLOCK * torch.arange(blocks, device=q.device)  # (b, blocks)
    candidate = eager.must_be_chosen(known.positions[:, :, :slots], begin[:, 0], options.window, _BLOCK)
    of_known = known.log_factors.detach()
    of_state = torch.where(candidate, of_known[:, :, :slots], -torch.inf).flip(-1).unsqueeze(2)
    at = torch.arange(slots, device=q.device).flip(0).expand_as(of_state)
    rank, new = _candidates_at(of_known, begin[:, 1:], origin.unsqueeze(-1), options.window)
    more = (0, slots - _BLOCK)
    candidates = torch.cat([of_state, F.pad(rank, more, value=-torch.inf)], dim=2), torch.cat([at, F.pad(new, more)], dim=2)
    index = ops.largest_so_far(*candidates, torch.arange(blocks, device=q.device), options.kept)

    with_queries = (n + 2 * _BLOCK - 2) // _BLOCK  # as many blocks as n tokens can be in
    of_queries = _IndexedBlocks(
        options.window,
        begin[:, :with_queries],
        origin=origin.unsqueeze(-1),
        length=(positions + n).unsqueeze(-1),
        first=-positions.unsqueeze(-1),
        places=torch.arange(n, device=q.device) + offset.unsqueeze(-1),
    )
    of_keys = known.keys, known.values, known.log_factors
    o, lse = _attend_in_blocks(q, *of_keys, sums, index[:, :, :with_queries], of_queries, options)

    stop = positions + (n if count is None else count)
    last = stop // _BLOCK - positions // _BLOCK
    kept = index.gather(2, last.view(b, 1, 1, 1).expand(b, hk, 1, options.kept)).squeeze(2)
    recent = stop.unsqueeze(-1) - torch.arange(1, slots - options.kept + 1, device=q.device)
    is_recent = (recent >= 0) & ~eager.must_be_chosen(recent, stop, options.window, _BLOCK)
    recent = torch.where(is_recent, recent + origin.unsqueeze(-1), -1)
    next_state = _slots_at(known, torch.cat([kept, recent.unsqueeze(1).expand(b, hk, -1)], dim=-1))
    if sums is not None:
        log_factors = next_state.log_factors + sums[..., -1:]
        next_state.log_factors = log_factors.masked_fill(next_state.positions < 0, 0)
    return o, lse, next_state


def step(
    token: LayerTokens,
    other: tuple[Tensor, Tensor],
    state: KeptKeys,
    positions: Tensor,
    count: Tensor | None,
    options: KeptOptions,
    in_place: bool = False,
) -> tuple[Tensor, KeptKeys]:
    """Computes attention of one token with the second term included.

    Args:
        token: one token.
        other: o and lse, as for `included`.
        state: after the previous tokens.
        positions: int64 (b,), position of the token.
        count: int (b,), 1 for a real token and 0 for padding. None: all are real.
        in_place: whether to overwrite the tensors of the state. Else it is not modified.

    Returns:
        The output and the state after the token.
    """
    token = token.real_only(count)
    limits = options.kept, options.window, _BLOCK, options.scale
    if not in_place:
        slots = state.keys, state.values, state.log_factors, state.positions
        if eager.is_transformed() or eager.differentiating(*token, *other, *slots):
            o, lse, slots = eager.kept_step(*token, *slots, positions, count, *limits)
            return merge_attention(*zip((o, lse), other, strict=True))[0], KeptKeys(*slots)
        state = state.clone()
    slots = state.keys, state.values, state.log_factors, state.positions
    return ops.kept_step_(token, other, slots, positions, count, *limits), state


class PartState(NamedTuple):
    """The state that the tokens of a part of a sequence make, and their decay. Attention of later parts begins with it."""

    state: KeptKeys  # after the part, if the sequence had no other tokens; its keys are in the order of their positions
    decay: Tensor  # sum of the log decays of the part, float64 (b, hk)


def state_of_part(tokens: LayerTokens, begin: int, options: KeptOptions) -> PartState:
    """Returns what consecutive tokens leave. `begin` is the position of the first of them; there may be none."""
    log_factor, sums = _log_factors(tokens.gate, tokens.log_decay)
    b, hk, n = log_factor.shape
    end, device = begin + n, log_factor.device
    decay = log_factor.new_zeros(b, hk) if sums is None else sums[..., -1:].sum(-1)
    positions = torch.arange(begin, end, device=device).expand(b, hk, n)
    known = KeptKeys(tokens.k, tokens.v, log_factor + decay.unsqueeze(-1), positions)
    kept = torch.full((b, hk, options.kept), -1, device=device)
    if n > 0:  # by blocks, of which the last one has the token after these
        blocks = torch.arange(begin // _BLOCK, end // _BLOCK + 1, device=device)
        starts, origin = (blocks * _BLOCK - begin).unsqueeze(0), torch.zeros(1, 1, dtype=torch.int64, device=device)
        candidates = _candidates_at(log_factor.detach(), starts, origin, options.window)
        kept = ops.largest_so_far(*candidates, blocks - blocks[0], options.kept)[:, :, -1]
    recent = torch.arange(n - options.window - _BLOCK, n, device=device)
    stop = torch.full((1,), end, device=device)
    is_recent = (recent >= 0) & ~eager.must_be_chosen((recent + begin).unsqueeze(0), stop, options.window, _BLOCK)
    recent = torch.where(is_recent, recent, -1).expand(b, hk, -1)
    return PartState(_slots_at(known, torch.cat([kept, recent], dim=-1)), decay)


def state_of_parts(parts: Sequence[PartState], end: int, options: KeptOptions) -> KeptKeys:
    """Returns the state after several parts of a sequence, at least one, in the order of their positions.

    `end` is the position after the last token.
    """
    since: Tensor | float = 0.0  # sum of the log decays after a part
    states = []
    for state, decay in reversed(parts):
        states.append(KeptKeys(state.keys, state.values, state.log_factors + since, state.positions))
        since = decay.unsqueeze(-1) + since
    tensors = zip(*(state.tensors().values() for state in reversed(states)), strict=True)
    known = KeptKeys(*(torch.cat(x, dim=2) for x in tensors))
    (b, hk, m), device = known.positions.shape, known.positions.device
    candidate = eager.must_be_chosen(known.positions, torch.full((b,), end, device=device), options.window, _BLOCK)
    rank = torch.where(candidate, known.log_factors.detach(), -torch.inf)
    latest_first = torch.arange(m, device=device).flip(0).expand(b, hk, 1, m)
    one_block = torch.zeros(1, dtype=torch.int64, device=device)
    kept = ops.largest_so_far(rank.flip(-1).unsqueeze(2), latest_first, one_block, options.kept).squeeze(2)
    position, recent = known.positions.masked_fill(candidate, -1).topk(options.window + _BLOCK, dim=-1)
    return _slots_at(known, torch.cat([kept, torch.where(position < 0, -1, recent)], dim=-1))


def _slots_at(known: KeptKeys, index: Tensor) -> KeptKeys:
    """Returns a state with the known keys at `index` (b, hk, slots), -1 for a free slot."""
    if known.positions.shape[2] == 0:
        known = known.map(lambda x: F.pad(x, (0, 0) * (x.dim() - 3) + (0, 1)))
    free, index = index < 0, index.clamp(min=0)
    state = known.map(lambda x: x.gather(2, eager.slots_like(index, x)).masked_fill(eager.slots_like(free, x), 0))
    state.positions = state.positions.masked_fill(free, -1)
    return state


def _is_exporting() -> bool:
    """Returns whether this is `torch.export`. In code that Dynamo compiles, PyTorch 2.11 says so of `torch.compile` too."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def _log_factors(gate: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns b_j - G_j of tokens and the sums of their log decays, both float64. Without decay: the gates, None."""
    if log_decay is None:
        return gate.double(), None
    sums = ops.decay_sums(log_decay.clamp(min=eager.LEAST_DECAY))
    return gate.double() - sums, sums


def _candidates_at(log_factor: Tensor, begin: Tensor, origin: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Returns the keys that are candidates for a block but not for the one before it: b_j - G_j and indices, the latest first.

    Args:
        log_factor: (b, hk, m), without a gradient.
        begin: position of the first token of each block in its sequence, (b or 1, blocks).
        origin: index among the m keys of the key at position 0 of the block's sequence, (b or 1, blocks or 1).
    """
    (b, hk, m), blocks = log_factor.shape, begin.shape[1]
    position = begin.unsqueeze(-1) - window - 1 - torch.arange(_BLOCK, device=log_factor.device)
    index = (origin.unsqueeze(-1) + position).clamp(0, m - 1)  # blocks after the last token have no queries
    index = index.unsqueeze(1).expand(b, hk, blocks, _BLOCK)
    rank = log_factor.gather(2, index.flatten(2)).view_as(index)
    return torch.where((position >= 0).unsqueeze(1), rank, -torch.inf), index


def _recent_keys(begin: Tensor, index: Tensor, length: Tensor | int, window: int) -> Tensor:
    """Returns which keys are W positions before each query of a block, as `ops.gather_kept` takes them.

    Args:
        begin: position of the first query of each block in its sequence, (b or 1, blocks).
        index: of the key at this position among all keys, likewise.
        length: number of positions of the sequence, (b or 1, blocks or 1), or one for all.
    """
    there_are = ((window - begin).clamp(0, _BLOCK), (length + window - begin).clamp(0, _BLOCK))
    return torch.stack([index - window, *there_are], dim=-1)


class _Blocks(Protocol):
    """Blocks of B queries. Tensors of blocks have a batch entry for each: (b * count, heads, B, ...)."""

    # int64 (b or 1, count, 3), as `ops.gather_kept` takes it. The key of place K + i is W positions before query i.
    recent_keys: Tensor

    def queries(self, x: Tensor) -> Tensor:
        """Returns x (b, heads, n, ...), of the queries, in blocks. Places without a query hold anything."""

    def joined(self, x: Tensor) -> Tensor:
        """Returns x, which is in blocks, as (b, heads, n, ...). It reverses `queries`."""


class _WholeBlocks:
    """The blocks of one sequence in each batch entry, from its first token on.

    They are cut from padded tensors. `_IndexedBlocks` gathers them by index.
    """

    def __init__(self, n: int, window: int, device: torch.device):
        self.n, self.window, self.count = n, window, (n + _BLOCK - 1) // _BLOCK
        self.earlier = torch.arange(self.count, device=device)
        begin = (self.earlier * _BLOCK).unsqueeze(0)
        self.recent_keys = _recent_keys(begin, begin, n, window)

    def _cut(self, x: Tensor, before: int) -> Tensor:
        """Returns x (b, n, ...) behind `before` zeros, as (b, count, B, ...). Zeros fill the last block."""
        places = self.count * _BLOCK
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (before, places - self.n))
        return (padded[:, :places] if before > 0 else padded).unflatten(1, (self.count, _BLOCK))

    def queries(self, x: Tensor) -> Tensor:
        return self._cut(x.transpose(1, 2), 0).flatten(0, 1).transpose(1, 2)

    def joined(self, x: Tensor) -> Tensor:
        return _one_after_another(x, self.count)[:, : self.n].contiguous().transpose(1, 2)

    def candidates(self, log_factor: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what `_candidates_at` does."""
        rank = self._cut(log_factor.flatten(0, 1), self.window + _BLOCK).flip(-1).unflatten(0, log_factor.shape[:2])
        position = torch.arange(self.count * _BLOCK, device=rank.device).view(self.count, _BLOCK)
        index = (position - self.window - _BLOCK).flip(-1).expand_as(rank)
        return torch.where(index >= 0, rank, -torch.inf), index.clamp(min=0)


@dataclass(eq=False)
class _IndexedBlocks:
    """Blocks of several sequences in a batch entry, or of one that began earlier.

    Query i of a block is at the position `begin` + i of its sequence.
    """

    window: int
    begin: Tensor  # (b or 1, count)
    origin: Tensor  # (b or 1, count or 1): index among the keys of the key at position 0
    length: Tensor  # (b or 1, count or 1): number of positions of the sequence
    first: Tensor  # (b or 1, count or 1): index among the queries of the query at position 0; below 0: there is none
    places: Tensor  # (b or 1, n): place of each query in all blocks

    def __post_init__(self) -> None:
        self.count = self.begin.shape[1]
        self.recent_keys = _recent_keys(self.begin, self.origin + self.begin, self.length, self.window)
        position = self.begin.unsqueeze(-1) + torch.arange(_BLOCK, device=self.begin.device)
        self._query = self.first.unsqueeze(-1) + position  # (b or 1, count, B); there is none below 0 and from n on

    def queries(self, x: Tensor) -> Tensor:
        index = self._query.clamp(0, x.shape[2] - 1).flatten(1).expand(x.shape[0], -1)
        rows = taken_at(x.transpose(1, 2), index, 1)
        return rows.unflatten(1, (self.count, _BLOCK)).flatten(0, 1).transpose(1, 2)

    def joined(self, x: Tensor) -> Tensor:
        rows = _one_after_another(x, self.count)
        return taken_at(rows, self.places.expand(rows.shape[0], -1), 1).transpose(1, 2)


def _one_after_another(x: Tensor, count: int) -> Tensor:
    """Returns blocks x (b * count, heads, B, ...) as (b, count * B, heads, ...)."""
    return x.transpose(1, 2).unflatten(0, (x.shape[0] // count, count)).flatten(1, 2)


# ---- attention


def _attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_factor: Tensor,
    sums: Tensor | None,
    kept: Tensor,
    blocks: _Blocks,
    options: KeptOptions,
) -> tuple[Tensor, Tensor]:
    """Returns the results of `attend` for queries in blocks.

    Causal attention lets query i of B queries see the first K + 1 + i of K + B keys: the kept keys, and those from W positions
    before the block on.

    Args:
        log_factor: b_j - G_j of the m keys.
        sums: G_i of the n queries, (b, hk, n). None: no decay.
        kept: indices of the kept keys among the m keys, (b, hk, blocks, K), ascending, -1 for none.
    """
    recent_keys = blocks.recent_keys.expand(k.shape[0], -1, -1)
    custom = options.use_custom_gradient
    gathered = ops.gather_kept(k, v, log_factor, kept, recent_keys, _BLOCK, sums is not None, custom)
    keys, values, gate, log_decay, least, has_key = gathered
    o, lse = flash_attention(
        blocks.queries(q),
        keys,
        values,
        causal=True,
        scale=options.scale,
        attention_mask=has_key,
        log_decay=log_decay,
        log_input_gate=gate,
        use_custom_gradient=custom,
        return_lse=True,
    )
    if sums is not None and least is not None:
        of_queries = blocks.queries(sums) + least
        lse = lse + of_queries.to(lse.dtype).repeat_interleave(lse.shape[1] // of_queries.shape[1], dim=1)
    return blocks.joined(o), blocks.joined(lse)
