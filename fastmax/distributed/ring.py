"""Ring attention: quadratic and softmax attention with keys and values sent around the ring of ranks.

In each step a rank attends its queries to the keys it holds, while it receives the next ones. Partial outputs are merged by
their denominators or log-sum-exp.

The backward is a second ring, of keys, values and their gradients. Given o and its statistic (denominator or log-sum-exp) over
all keys, an operator returns the gradients of one block. Gradients make one more step than the keys, which brings them to their
owner. The gradients of a rank's own keys are not sent.

With decays or gates, attention of a part to an earlier part is one causal call over the keys of both. The keys of the later
part are masked and contribute only their decays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from fastmax import eager, ops
from fastmax.core.call import Call
from fastmax.core.score import Score, Softmax, quotient
from fastmax.distributed.communication import Pending, all_to_all, ring_send_recv
from fastmax.distributed.layout import Layout, Part
from fastmax.distributed.once_differentiable import once_differentiable
from fastmax.distributed.part_decays import PartDecays

_ALIGNED = 16  # bytes: alignment of tensors in a message, for vectorised loads of kernels


class Job(NamedTuple):
    """The arguments of a call beside q, k, v, log_decay and log_input_gate."""

    score: Score | Softmax
    causal: bool
    layout: Layout
    group: dist.ProcessGroup
    mask: Tensor | None  # bool (b, n)
    k_starts: tuple[Tensor, ...] | None  # causal: int32 (b, hk, tokens) of each part; -1: keys before the part are visible
    part_decays: PartDecays | None
    ranges: tuple[Tensor, Tensor] | None  # not causal: start and end of the global keys that each query sees, int64 (n,) each

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of this rank."""
        return self.layout.of(self.group.rank())

    def owner(self, step: int) -> int:
        """Returns the rank that owns the keys which this rank holds in a step."""
        return (self.group.rank() - step) % self.layout.world


def attend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, log_input_gate: Tensor | None, job: Job
) -> tuple[Tensor, Tensor]:
    """Returns o (b, h, n, dv) and the denominators, or log-sum-exp, (b, h, n) of the local tokens."""
    return _Ring.apply(job, q, k, v, log_decay, log_input_gate)


class Keys(NamedTuple):
    """Keys and values of a rank with their decays, gates and mask, as they are sent around the ring."""

    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    log_input_gate: Tensor | None
    mask: Tensor | None

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The tensors that get a gradient."""
        return self[:4]

    def of(self, tokens: slice) -> Keys:
        """Returns a slice of the tokens."""
        k, v, decay, gate = (None if x is None else x[:, :, tokens] for x in self.differentiable)
        return Keys(k, v, decay, gate, None if self.mask is None else self.mask[:, tokens])

    def with_tokens(self, tokens: int) -> Keys:
        """Returns meta tensors with this number of tokens."""

        def shaped(x: Tensor | None, dim: int) -> Tensor | None:
            return None if x is None else x.new_empty((*x.shape[:dim], tokens, *x.shape[dim + 1 :]), device="meta")

        return Keys(*(shaped(x, dim) for x, dim in zip(self, (2, 2, 2, 2, 1), strict=True)))


def _bytes(x: Tensor) -> int:
    return -(-x.numel() * x.element_size() // _ALIGNED) * _ALIGNED


def _pack(tensors: Sequence[Tensor | None], like: Sequence[Tensor | None]) -> Tensor:
    """Packs tensors into one uint8 message with the shapes and dtypes of `like`, aligned so that kernels read them in place."""
    device = next(x.device for x in tensors if x is not None)
    message = torch.empty(message_bytes(like), dtype=torch.uint8, device=device)
    for view, x in zip(_unpack(message, like), tensors, strict=True):
        if view is not None:
            view.copy_(x)
    return message


def _unpack(message: Tensor, like: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns views of a message with the shapes and dtypes of `like`."""
    out: list[Tensor | None] = []
    at = 0
    for x in like:
        if x is None:
            out.append(None)
            continue
        size = prod(x.shape) * x.element_size()
        out.append(message[at : at + size].view(x.dtype).view(x.shape))
        at += _bytes(x)
    return out


def message_bytes(like: Iterable[Tensor | None]) -> int:
    """Returns the size of a message that holds tensors like these."""
    return sum(_bytes(x) for x in like if x is not None)


class Block(NamedTuple):
    """One attention call: queries of consecutive local parts, and keys of consecutive parts of another rank."""

    queries: tuple[Part, ...]
    keys: tuple[Part, ...]
    k: Tensor
    v: Tensor
    call: Call

    @property
    def rows(self) -> slice:
        """Local indices of the queries."""
        return _span(self.queries)

    @property
    def columns(self) -> slice:
        """Indices of the keys on their rank."""
        return _span(self.keys)


def _span(parts: tuple[Part, ...]) -> slice:
    """Returns the local indices of consecutive parts of a rank."""
    return slice(parts[0].local.start, parts[-1].local.stop)


def _blocks(job: Job, own: Keys, held: Keys, owner: int) -> Iterator[Block]:
    """Yields the calls for the local queries and the keys of rank `owner`.

    Without decays, resets and ranges, consecutive parts share one call. A rank holds its parts in sequence order. Hence its own
    keys are one causal call, and each part sees a prefix of the keys of another rank.
    """
    if own.log_decay is not None or job.k_starts is not None or job.ranges is not None:
        yield from _blocks_by_part(job, own, held, owner)
        return
    layout, of_rank = job.layout, job.parts
    all_keys = layout.of(owner)
    if not all_keys:
        return
    if not job.causal or owner == job.group.rank():
        if of_rank:
            yield _block(job, of_rank, all_keys, held, causal=job.causal)
        return
    seen = {part: tuple(keys for keys in all_keys if keys.start < part.start) for part in of_rank}
    for keys, queries in groupby(of_rank, seen.get):
        if keys:
            block = _block(job, tuple(queries), keys, held, causal=False)
            yield block if held.log_input_gate is None else _as_causal(block, None)


def _block(job: Job, queries: tuple[Part, ...], keys: tuple[Part, ...], held: Keys, causal: bool) -> Block:
    x = held.of(_span(keys))
    call = Call(job.score, causal, algorithm="quadratic", attention_mask=x.mask, log_input_gate=x.log_input_gate)
    return Block(queries, keys, x.k, x.v, call)


def _blocks_by_part(job: Job, own: Keys, held: Keys, owner: int) -> Iterator[Block]:
    """Yields one call for each pair of a local part and a visible part of rank `owner`."""
    for i, queries in enumerate(job.parts):
        for keys in job.layout.of(owner):
            if job.causal and keys.start > queries.start:
                continue
            block = _block(job, (queries,), (keys,), held, causal=job.causal and keys == queries)
            x, call = held.of(keys.local), block.call
            if keys == queries:
                first = None if not job.causal or job.k_starts is None else job.k_starts[i].clamp(min=0)
                call = call._replace(log_decay=x.log_decay, k_start=first)
            elif job.k_starts is not None:
                call = call._replace(k_start=_k_start(job, i, keys))
            if job.ranges is not None:
                first, end = ((x[queries.local] - keys.start).clamp(0, keys.tokens).to(torch.int32) for x in job.ranges)
                shape = (*block.k.shape[:2], queries.tokens)
                call = call._replace(k_start=first.expand(shape), k_end=end.expand(shape))
            block = block._replace(call=call)
            if keys == queries or (x.log_decay is None and x.log_input_gate is None):
                yield block
            else:
                yield _as_causal(block, _decays_of_both(job, block, own.of(queries.local), x))


def _k_start(job: Job, i: int, keys: Part) -> Tensor:
    """Returns the first key of an earlier part that the queries of the i-th local part see, int32 (b, hk, tokens)."""
    assert job.part_decays is not None and job.k_starts is not None
    first_visible = job.part_decays.first_visible(job.layout.index[job.parts[i]]).unsqueeze(-1)
    first = (first_visible - keys.start).clamp(0, keys.tokens).to(torch.int32)
    return torch.where(job.k_starts[i] >= 0, keys.tokens, first)


def _decays_of_both(job: Job, block: Block, own: Keys, held: Keys) -> Tensor | None:
    """Returns the decays of the key part and the query part of a block, (b, hk, tokens of both).

    The first decay of the query part includes those of the parts between.
    """
    if own.log_decay is None or held.log_decay is None:
        return None
    assert job.part_decays is not None
    (queries,), (keys,) = block.queries, block.keys
    between = job.part_decays.log_decay_of(job.layout.index[keys] + 1, job.layout.index[queries])
    decay = own.log_decay.clone()
    decay[..., 0] += between.to(decay.dtype)
    return torch.cat([held.log_decay, decay], dim=2)


def _as_causal(block: Block, log_decay: Tensor | None) -> Block:
    """Returns a block of earlier keys as a causal call, as decays and gates need. A masked key for each query follows its keys.

    `log_decay` has the tokens of the keys and of the queries.
    """
    (b, _, tokens, _), queries = block.k.shape, block.rows.stop - block.rows.start
    mask, gate = block.call.attention_mask, block.call.log_input_gate
    mask = block.k.new_ones(b, tokens, dtype=torch.bool) if mask is None else mask
    call = block.call._replace(
        causal=True,
        log_decay=log_decay,
        attention_mask=F.pad(mask, (0, queries)),
        log_input_gate=None if gate is None else F.pad(gate, (0, queries)),
    )
    k, v = (F.pad(x, (0, 0, 0, queries)) for x in (block.k, block.v))
    return block._replace(k=k, v=v, call=call)


class _PartialOutputs:
    """Merges the partial outputs of a part over blocks of keys."""

    def __init__(self, score: Score | Softmax):
        self._softmax = isinstance(score, Softmax)
        # After one block: its o. After several, in the compute dtype: the numerator, or for softmax the normalised output.
        self._o: Tensor
        self._statistic: Tensor
        self._blocks = 0

    def add(self, o: Tensor, statistic: Tensor) -> None:
        self._blocks += 1
        if self._blocks == 1:
            self._o, self._statistic = o, statistic
            return
        add = self._add_softmax if self._softmax else self._add
        if self._blocks == 2:
            self._o = self._o.to(statistic.dtype)
            if not self._softmax:
                self._o = self._o * self._statistic.unsqueeze(-1)
        add(o, statistic)

    def _add(self, o: Tensor, z: Tensor) -> None:
        self._o.addcmul_(o, z.unsqueeze(-1))
        self._statistic = self._statistic + z

    def _add_softmax(self, o: Tensor, lse: Tensor) -> None:
        both = torch.logaddexp(self._statistic, lse)
        base = torch.where(both == -torch.inf, 0.0, both)
        before, new = (torch.exp(x - base).unsqueeze(-1) for x in (self._statistic, lse))
        self._o.mul_(before).addcmul_(o, new)
        self._statistic = both

    def result(self) -> tuple[Tensor, Tensor]:
        """Returns the output and its statistic."""
        o = quotient(self._o, self._statistic.unsqueeze(-1)) if self._blocks > 1 and not self._softmax else self._o
        return o, self._statistic


class _Ring(torch.autograd.Function):
    """Ring attention; the backward is a second ring."""

    @staticmethod
    def forward(
        ctx: Any, job: Job, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, log_input_gate: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        own = Keys(k, v, log_decay, log_input_gate, job.mask)
        sums = {part: _PartialOutputs(job.score) for part in job.parts}
        for held, owner in _ring_steps(job, own):
            for block in _blocks(job, own, held, owner):
                results = ops.attention(q[:, :, block.rows], block.k, block.v, block.call)
                for part in block.queries:
                    at = slice(part.local.start - block.rows.start, part.local.stop - block.rows.start)
                    sums[part].add(*(x[:, :, at] for x in results))
        o, statistic = eager.empty_like_layout(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=eager.compute_dtype(q.dtype))
        for part, x in sums.items():
            o[:, :, part.local], statistic[:, :, part.local] = x.result()
        ctx.save_for_backward(q, k, v, log_decay, log_input_gate, o, statistic)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return o, statistic

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor | None, grad_statistic: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, log_input_gate, o, statistic = ctx.saved_tensors
        job, own = ctx.job, Keys(k, v, log_decay, log_input_gate, ctx.job.mask)
        grad_o = torch.zeros_like(o) if grad_o is None else grad_o
        of_own_queries = _GradientSums((q,))
        of_own_keys: _GradientSums
        of_decays = None if log_decay is None else _DecayGradients(job, log_decay)
        pending: Pending | None = None
        for step, (held, owner) in enumerate(_ring_steps(job, own)):
            of_keys = _GradientSums(held.differentiable)
            for block in _blocks(job, own, held, owner):
                rows, columns = block.rows, block.columns
                tokens = columns.stop - columns.start
                given = (grad_o, grad_statistic, q, o, statistic)
                g, grad_z, q_rows, o_rows, z = (None if x is None else x[:, :, rows] for x in given)
                part = ops.attention_backward(g, grad_z, q_rows, block.k, block.v, o_rows, z, block.call)
                of_own_queries.add(rows, part[:1])
                of_keys.add(columns, [x[:, :, :tokens] for x in part[1:] if x is not None])
                if of_decays is not None and part[3] is not None and block.keys != block.queries:
                    of_decays.add(block, part[3][..., tokens:])
            if step == 0:  # gradients of a rank's own keys are not sent
                of_own_keys = of_keys
                continue
            if pending is not None:
                of_keys.add_all(_unpack(pending.wait(), gradients_of(held, step - 1)))
            next_keys = own.with_tokens(job.layout.count(job.owner(step + 1)))
            message = _pack(of_keys.result(), gradients_of(held, step))
            expected = message_bytes(gradients_of(next_keys, step))
            pending = ring_send_recv("gradients of keys and values", message, expected, job.group, tag=1)
        if pending is not None:
            of_own_keys.add_all(_unpack(pending.wait(), gradients_of(own, step)))
        (grad_q,), (grad_k, grad_v, *grads) = of_own_queries.result(), of_own_keys.result()
        grad_decay = None if of_decays is None else of_decays.result(grads.pop(0)).to(log_decay.dtype)
        grad_gate = None if log_input_gate is None else grads[0]
        return None, grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_decay, grad_gate


def gradients_of(keys: Keys, step: int) -> list[Tensor]:
    """Returns tensors with the shapes and dtypes of the gradients that are sent after a step.

    After step 1 they come from one rank and have the dtype of the keys. After later steps they are sums over ranks, in the
    compute dtype.
    """
    given = (x for x in keys.with_tokens(keys.k.shape[2]).differentiable if x is not None)
    return [x if step == 1 else x.to(eager.compute_dtype(x.dtype)) for x in given]


class _GradientSums:
    """Accumulates tensors (b, heads, tokens, ...) over blocks, in the compute dtype.

    A single block that covers all tokens keeps its dtype.
    """

    def __init__(self, like: tuple[Tensor | None, ...]):
        self._like = [x for x in like if x is not None]
        self._sums: list[Tensor] | None = None

    def add(self, tokens: slice, tensors: Sequence[Tensor]) -> None:
        if self._sums is None and tokens == slice(0, self._like[0].shape[2]):
            self._sums = list(tensors)
            return
        self._sums = [x.to(eager.compute_dtype(x.dtype)) for x in self.result()]
        for total, x in zip(self._sums, tensors, strict=True):
            total[:, :, tokens] += x

    def add_all(self, tensors: Sequence[Tensor]) -> None:
        self.add(slice(0, self._like[0].shape[2]), tensors)

    def result(self) -> list[Tensor]:
        return self._zeros() if self._sums is None else self._sums

    def _zeros(self) -> list[Tensor]:
        contiguous = torch.contiguous_format
        return [torch.zeros_like(x, dtype=eager.compute_dtype(x.dtype), memory_format=contiguous) for x in self._like]


def _ring_steps(job: Job, own: Keys) -> Iterator[tuple[Keys, int]]:
    """Yields the keys held in each step and their owner. The next keys are received while the caller uses them."""
    held, message = own, None
    for step in range(job.layout.world):
        pending = None
        if step + 1 < job.layout.world:
            message = _pack(own, own) if step == 0 else message
            next_keys = own.with_tokens(job.layout.count(job.owner(step + 1)))
            pending = ring_send_recv("keys and values", message, message_bytes(next_keys), job.group, tag=0)
        yield held, job.owner(step)
        if pending is not None:
            message = pending.wait()
            held = Keys(*_unpack(message, next_keys))


class _DecayGradients:
    """Accumulates the gradients of decays between queries and the keys of earlier parts.

    These are the decays of the queries' own part, and those of parts between keys and queries, whose ranks get the gradients.
    """

    def __init__(self, job: Job, like: Tensor):
        self._job = job
        layout = job.layout
        b, hk, self._tokens = like.shape
        self._own = torch.zeros_like(like, memory_format=torch.contiguous_format)
        self._between = like.new_zeros(layout.world, layout.most_parts, b, hk, dtype=torch.float64)

    def add(self, block: Block, grad: Tensor) -> None:
        """Adds `grad` (b, hk, tokens), the gradient of the decays of the query part of a block.

        The gradient of its first decay is that of any decay between keys and queries.
        """
        self._own[..., block.rows] += grad
        layout = self._job.layout
        (queries,), (keys,) = block.queries, block.keys
        for part in layout.parts[layout.index[keys] + 1 : layout.index[queries]]:
            self._between[part.rank, layout.of(part.rank).index(part)] += grad[..., 0]

    def result(self, of_keys: Tensor) -> Tensor:
        """Exchanges the gradients of parts. Returns the gradient of the local decays, `of_keys` included, (b, hk, n)."""
        received = all_to_all("gradients of decays", self._between, self._job.group).wait().sum(0)
        out = received.new_zeros(*received.shape[1:], self._tokens)
        for x, part in zip(received, self._job.parts, strict=False):
            out[..., part.local] = x.unsqueeze(-1)
        return of_keys + self._own + out
