"""Causal and full Fastmax by the linear algorithm over parts of a sequence: parts exchange states, not keys.

A part makes the state of its own keys, all states are exchanged once, and the part runs from the state that it starts with,
the sum over the parts before it. The gradient goes the other way: the gradient of the state that a part ends in is a sum over
the queries of the parts behind it. What fades, fades by a factor a part (`Carries`).

Kernels keep what they compute on the way to a part's own state, so that it is added up once. With decays, whose gradient takes
the state that a part ends in, each part adds it up twice.

From a handful of ranks on no rank receives all states. Each scans its share of them for all ranks, in two messages all to all.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastmax import eager, ops
from fastmax.call import Call
from fastmax.distributed.carries import Carries
from fastmax.distributed.communication import Pending, all_to_all, gather
from fastmax.distributed.final import without_second_derivative
from fastmax.distributed.layout import Part, Spread
from fastmax.score import Score

# Bytes in the time that one more message takes: 20 us at 300 GB/s. Gathering receives the states of all other ranks, shares
# about those of two; the difference has to be worth a message.
_BYTES_OF_A_MESSAGE = 6 << 20


def by_shares(world: int, state_bytes: int) -> bool:
    """Whether ranks scan shares of states; `state_bytes` of a rank's."""
    return (world - 1) * (1 - 2 / world) * state_bytes > _BYTES_OF_A_MESSAGE


class Exchange:
    """Of one state for each part (channels, elements): for each part of this rank the sum of those before it, or behind it."""

    def __init__(self, own: list[Tensor], like: Tensor, carries: Carries | None, spread: Spread, backward: bool):
        """Starts it; `like` (channels, elements), of a rank without parts too."""
        self._layout, self._own, self._backward = spread.layout, spread.parts, backward
        layout, group = spread
        self._carries = carries
        self._elements = like.shape[1]
        missing = [torch.zeros_like(like)] * (layout.most_parts - len(own))
        all_own = [*own, *missing]
        states = all_own[0].unsqueeze(0) if len(all_own) == 1 else torch.stack(all_own)
        self._shares = by_shares(layout.world, states.numel() * states.element_size())
        what = "gradients of states" if backward else "states"
        if not self._shares:
            self._pending: Pending = gather(what, states, group)
            return
        world = layout.world
        states = F.pad(states, (0, -self._elements % world)).unflatten(2, (world, -1)).permute(2, 0, 1, 3)
        came = all_to_all(f"shares of {what}", states, group).wait()
        scanned = torch.zeros_like(came)
        for part, x in self._scan(came, layout.parts):
            scanned[part.rank, self._slot(part)] = x
        self._pending = all_to_all(f"shares of {what}", scanned, group)

    def wait(self) -> list[Tensor]:
        came = self._pending.wait()
        own = self._own
        if self._shares:
            came = came.permute(1, 2, 0, 3).flatten(2)[..., : self._elements]
            return [came[i] for i in range(len(own))]
        found = dict(self._scan(came, own))
        return [found[part] for part in own]

    def _slot(self, part: Part) -> int:
        return self._layout.of(part.rank).index(part)

    def _scan(self, states: Tensor, wanted: tuple[Part, ...]):
        """states (ranks, parts of a rank, channels, elements): each wanted part with its sum, made in float64."""
        log_factors = None if self._carries is None else self._carries.log_factors()
        total = None
        left = set(wanted)
        parts = list(enumerate(self._layout.parts))
        for i, part in reversed(parts) if self._backward else parts:
            if part in left:
                left.remove(part)
                yield part, torch.zeros_like(states[0, 0]) if total is None else total.to(states.dtype)
            if not left:
                return
            state = states[part.rank, self._slot(part)]
            if total is None:
                total = state  # a single one is as it is
            elif log_factors is None:
                total = total.double() + state
            else:
                factor = log_factors[i].exp().unsqueeze(-1)
                total = state + torch.where(factor == 0.0, 0.0, total.double() * factor)


class Job(NamedTuple):
    """What is asked for beside q, k, v and log_decay."""

    score: Score
    spread: Spread
    mask: Tensor | None  # bool (b, n)
    first_keys: tuple[Tensor, ...] | None  # int32 (b, hk, n of the part), of each part; -1: the state is seen
    carries: Carries | None
    keeps: bool  # what is computed on the way to the state of a part: there are others, and no decays

    def call(self, i: int, log_decay: Tensor | None) -> Call:
        local = self.spread.parts[i].local
        mask = None if self.mask is None else self.mask[:, local]
        decay = None if log_decay is None else log_decay[..., local]
        first = None if self.first_keys is None else self.first_keys[i]
        return Call(self.score, causal=True, key_padding_mask=mask, log_decay=decay, first_key=first)


def begin(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, job: Job) -> Callable[[], tuple[Tensor, Tensor]]:
    """Causal attention: starts to exchange states. What it returns waits for them, and gives output (b, h, n, dv) and
    denominators (b, h, n) of the tokens of this rank. In the backward, what is computed in between comes in between too."""
    call = _Call(job)
    ticket = _Begin.apply(call, q, k, v, log_decay)
    return lambda: _Finish.apply(call, ticket, *(None if x is None else x.detach() for x in (q, k, v, log_decay)))


def attend_to_all(q: Tensor, k: Tensor, v: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """The same, not causal: every query reads the sum of all states."""
    return _FromTotal.apply(job, q, k, v)


def _pack(state: tuple[Tensor, Tensor]) -> Tensor:
    """Values (b, hk, rows, dv) and weights (b, hk, rows) -> (b * hk, rows * (dv + 1))."""
    values, weights = state
    return torch.cat([values.flatten(2), weights], dim=2).flatten(0, 1)


def _unpack(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    b, hk, _, dv = v.shape
    rows = x.shape[1] // (dv + 1)
    values, weights = x.unflatten(0, (b, hk)).split([rows * dv, rows], dim=2)
    return values.unflatten(2, (rows, dv)).contiguous(), weights.contiguous()


def _like(k: Tensor, v: Tensor, score: Score) -> Tensor:
    """A packed state of zeros."""
    (b, hk, _, d), dv = k.shape, v.shape[3]
    rows = eager.state_rows(d, score.order)
    return k.new_zeros(b * hk, rows * (dv + 1), dtype=eager.compute_dtype(k.dtype))


def _joined(pieces: list[tuple[Tensor, ...]], empty: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tensors (b, heads, n, ...) of all parts from those of each; of a single part the same."""
    if len(pieces) == 1:
        return tuple(pieces[0])
    return tuple(torch.cat(x, dim=2) for x in zip(*pieces, strict=True)) if pieces else empty


def _of(part: Part, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else x[:, :, part.local] for x in tensors)


class _Call:
    """What the two functions of a causal call, between which it waits, hand each other."""

    def __init__(self, job: Job):
        self.job = job
        self.states: Exchange | None = None
        self.kept: list[Tensor] = []  # of each part, on the way to its own state
        self.gradients: Callable[[], tuple[Tensor, ...]] | None = None  # of q, k, v and log_decay, once theirs are exchanged


def _own_states(
    state_of: Callable[[int, Part], tuple[Tensor, ...]], job: Job, unread: tuple[Part, ...], like: Tensor
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The packed state of each part of this rank, and what was kept of it. Those of `unread` parts nobody reads."""
    own, kept = [], []
    for i, part in enumerate(job.spread.parts):
        if part in unread and not job.keeps:
            own.append(like), kept.append(None)
        else:
            *state, of_part = state_of(i, part)
            own.append(_pack(state)), kept.append(of_part)
    return own, kept


class _Begin(torch.autograd.Function):
    """Of q, k, v and log_decay a ticket, an empty tensor; the gradient of the whole call."""

    @staticmethod
    def forward(ctx, call: _Call, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None):
        ctx.call, job = call, call.job
        like = _like(k, v, job.score)

        def state_of(i: int, part: Part) -> tuple[Tensor, ...]:
            return ops.state_of_keys(*_of(part, k, v), job.call(i, log_decay), job.keeps)

        own, call.kept = _own_states(state_of, job, job.spread.layout.parts[-1:], like)
        call.states = Exchange(own, like, job.carries, job.spread, backward=False)
        return q.new_empty(0)

    @staticmethod
    @without_second_derivative
    def backward(ctx, _):
        gradients, ctx.call.gradients = ctx.call.gradients(), None
        return None, *gradients, *(None,) * (4 - len(gradients))


class _Finish(torch.autograd.Function):
    """Of the ticket, and q, k, v and log_decay without gradients, the results."""

    @staticmethod
    def forward(ctx, call: _Call, ticket: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None):
        ctx.call, job = call, call.job
        before, call.states = [_unpack(x, v) for x in call.states.wait()], None
        pieces, after = [], []
        for i, (part, state) in enumerate(zip(job.spread.parts, before, strict=True)):
            given = *_of(part, q, k, v), job.call(i, log_decay), *state
            o, z, *new = ops.prefill_kept_(*given, call.kept[i]) if job.keeps else ops.prefill(*given)
            pieces.append((o, z))
            after.append(new if log_decay is not None else (None, None))  # for its gradient alone
        call.kept = []
        z = q.new_empty(q.shape[:3], dtype=eager.compute_dtype(q.dtype))
        o, z = _joined(pieces, (q.new_empty(*q.shape[:3], v.shape[3]), z))
        ctx.save_for_backward(q, k, v, log_decay, o, z, *chain(*before, *after))
        ctx.set_materialize_grads(False)
        return o, z

    @staticmethod
    @without_second_derivative
    def backward(ctx, grad_o: Tensor | None, grad_z: Tensor | None):
        q, k, v, log_decay, o, z, *states = ctx.saved_tensors
        job, like = ctx.call.job, _like(k, v, ctx.call.job.score)
        grad_o = torch.zeros_like(o) if grad_o is None else grad_o
        parts = job.spread.parts
        calls = [job.call(i, log_decay) for i in range(len(parts))]

        def state_of(i: int, part: Part) -> tuple[Tensor, ...]:
            return ops.state_of_queries(*_of(part, grad_o, grad_z, q, k, v, o, z), calls[i], job.keeps)

        own, kept = _own_states(state_of, job, job.spread.layout.parts[:1], like)
        exchange = Exchange(own, like, job.carries, job.spread, backward=True)

        def gradients() -> tuple[Tensor, ...]:
            pairs = list(zip(states[::2], states[1::2], strict=True))
            before, after = pairs[: len(parts)], pairs[len(parts) :]
            pieces = []
            for i, (part, grad_new) in enumerate(zip(parts, exchange.wait(), strict=True)):
                grads = *_of(part, grad_o, grad_z), *_unpack(grad_new, v)
                tokens, results = _of(part, q, k, v), _of(part, o, z)
                if job.keeps:
                    of_part = ops.prefill_kept_backward_(grads, *tokens, results, calls[i], *before[i], kept[i])
                else:
                    of_part = ops.prefill_backward(grads, *tokens, (*results, *after[i]), calls[i], *before[i])
                pieces.append(of_part[: 3 if log_decay is None else 4])
            kept.clear()
            return _joined(pieces, tuple(torch.zeros_like(x) for x in (q, k, v, log_decay) if x is not None))

        ctx.call.gradients = gradients
        return None, q.new_empty(0), None, None, None, None


class _FromTotal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, job: Job, q: Tensor, k: Tensor, v: Tensor):
        call = Call(job.score, causal=True, key_padding_mask=job.mask)
        values, weights, _ = ops.state_of_keys(k, v, call)
        total = _total(_pack((values, weights)), job, "states")
        o, z, *_ = ops.prefill(q, k, v, _reading(call, k), *_unpack(total, v))
        ctx.save_for_backward(q, k, v, o, z, total)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return o, z

    @staticmethod
    @without_second_derivative
    def backward(ctx, grad_o: Tensor | None, grad_z: Tensor | None):
        q, k, v, o, z, total = ctx.saved_tensors
        call = Call(ctx.job.score, causal=True, key_padding_mask=ctx.job.mask)
        grad_o = torch.zeros_like(o) if grad_o is None else grad_o
        grads, results = (grad_o, grad_z, None, None), (o, z, None, None)
        grad_q, _, _, _, *own = ops.prefill_backward(grads, q, k, v, results, _reading(call, k), *_unpack(total, v))
        grad_total = _total(_pack(own), ctx.job, "gradients of states")
        # Queries that ask for nothing, so that the gradient of the state that the keys end in is all there is.
        nothing = torch.zeros_like(o)
        grads, results = (nothing, None, *_unpack(grad_total, v)), (nothing, torch.ones_like(z), None, None)
        none = torch.zeros_like(total)
        _, grad_k, grad_v, *_ = ops.prefill_backward(grads, q, k, v, results, call, *_unpack(none, v))
        return None, grad_q, grad_k, grad_v


def _total(own: Tensor, job: Job, what: str) -> Tensor:
    return gather(what, own, job.spread.group).wait().sum(0, dtype=torch.float64).to(own.dtype)


def _reading(call: Call, k: Tensor) -> Call:
    """The call in which no key joins the state."""
    return call._replace(key_padding_mask=torch.zeros(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device))
