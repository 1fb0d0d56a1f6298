"""Causal and full Fastmax by the linear algorithm over parts of a sequence: parts exchange states, not keys.

A part makes the state of its own keys, all states are exchanged once, and the part runs from the state that it starts with,
the sum over the parts before it. The gradient goes the other way: the gradient of the state that a part ends in is a sum over
the queries of the parts behind it. What fades, fades by a factor a part (`Carries`).

Kernels keep what they compute on the way to a part's own state, so that it is added up once. The first part has no state to add
to that, and in the backward the last. The gradient of the queries takes nothing that is behind, and is computed while the
gradients of states are exchanged.

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
from fastmax.core.call import Call
from fastmax.core.score import Score
from fastmax.distributed.carries import Carries
from fastmax.distributed.communication import Earlier, Pending, all_to_all, gather, room
from fastmax.distributed.final import without_second_derivative
from fastmax.distributed.layout import Layout, Part, Spread

# Rows of k, of head dims above 32, from which on kernels cut a call in several pieces (csrc/linear/order2/plan.h: 832 MiB of
# states at a time).
_ROWS_IN_PIECES = 1 << 20

# Bytes in the time that one more message takes: 20 us at 300 GB/s. Gathering receives the states of all other ranks, shares
# about those of two; the difference has to be worth a message.
_BYTES_OF_A_MESSAGE = 6 << 20


def by_shares(world: int, state_bytes: int) -> bool:
    """Whether ranks scan shares of states; `state_bytes` of a rank's."""
    return (world - 1) * (1 - 2 / world) * state_bytes > _BYTES_OF_A_MESSAGE


class Exchange:
    """Of one state for each part (channels, elements): for each part of this rank the sum of those before it, or behind it,
    None where there are none."""

    def __init__(
        self,
        own: list[Tensor],
        like: Tensor,
        carries: Carries | None,
        spread: Spread,
        backward: bool,
        earlier: Earlier | None = None,
    ):
        """Starts it; `like` (channels, elements), of a rank without parts too. `earlier`: of `gather`."""
        self._layout, self._parts, self._own, self._backward = spread.layout, spread.parts, own, backward
        layout, group = spread
        self._carries = carries
        self._elements = like.shape[1]
        missing = [like] * (layout.most_parts - len(own))
        all_own = [*own, *missing]
        states = all_own[0].unsqueeze(0) if len(all_own) == 1 else torch.stack(all_own)
        self._shares = by_shares(layout.world, states.numel() * states.element_size())
        what = "gradients of states" if backward else "states"
        if not self._shares:
            self._pending: Pending = gather(what, states, group, earlier)
            return
        world = layout.world
        states = F.pad(states, (0, -self._elements % world)).unflatten(2, (world, -1)).permute(2, 0, 1, 3)
        came = all_to_all(f"shares of {what}", states, group).wait()
        scanned = torch.zeros_like(came)
        for part, x in self._scan(came, layout.parts):
            if x is not None:
                scanned[part.rank, self._slot(part)] = x
        self._pending = all_to_all(f"shares of {what}", scanned, group)

    def wait(self) -> list[Tensor | None]:
        came = self._pending.wait()
        if self._shares:
            came = came.permute(1, 2, 0, 3).flatten(2)[..., : self._elements]
            return [None if part in _ends(self._layout, self._backward) else came[i] for i, part in enumerate(self._parts)]
        found = dict(self._scan(came, self._parts))
        return [found[part] for part in self._parts]

    def passed_on(self, came: list[Tensor | None]) -> list[Tensor | None]:
        """Of each part of this rank what came and its own state; None where nobody reads it."""
        unread = _ends(self._layout, not self._backward)
        return [
            None if part in unread else self._joined(before, own, self._layout.index[part]).to(own.dtype)
            for part, before, own in zip(self._parts, came, self._own, strict=True)
        ]

    def _slot(self, part: Part) -> int:
        return self._layout.of(part.rank).index(part)

    def _scan(self, states: Tensor, wanted: tuple[Part, ...]):
        """states (ranks, parts of a rank, channels, elements): each wanted part with its sum."""
        total = None
        left = set(wanted)
        parts = list(enumerate(self._layout.parts))
        for i, part in reversed(parts) if self._backward else parts:
            if part in left:
                left.remove(part)
                yield part, None if total is None else total.to(states.dtype)
            if not left:
                return
            total = self._joined(total, states[part.rank, self._slot(part)], i)

    def _joined(self, before: Tensor | None, own: Tensor, place: int) -> Tensor:
        """In float64, but a single state, which is as it is."""
        if before is None:
            return own
        before = before.double()
        if self._carries is None:
            return before + own
        factor = self._carries.factors[place]  # NaN where a decay is; what is 0 stays 0
        return own + torch.where((factor == 0.0) | (before == 0.0), 0.0, before * factor)


def _ends(layout: Layout, backward: bool) -> tuple[Part, ...]:
    """The part, if there is one, before which nothing comes."""
    return layout.parts[-1:] if backward else layout.parts[:1]


class Job(NamedTuple):
    """What is asked for beside q, k, v and log_decay."""

    score: Score
    spread: Spread
    mask: Tensor | None  # bool (b, n)
    first_keys: tuple[Tensor, ...] | None  # int32 (b, hk, n of the part), of each part; -1: the state is seen
    carries: Carries | None

    def call(self, i: int, log_decay: Tensor | None) -> Call:
        local = self.spread.parts[i].local
        mask = None if self.mask is None else self.mask[:, local]
        decay = None if log_decay is None else log_decay[..., local]
        first = None if self.first_keys is None else self.first_keys[i]
        return Call(self.score, causal=True, attention_mask=mask, log_decay=decay, first_key=first)


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
    """A packed state whose numbers nobody reads."""
    (b, hk, _, d), dv = k.shape, v.shape[3]
    rows = eager.state_rows(d, score.order)
    return k.new_empty(b * hk, rows * (dv + 1), dtype=eager.compute_dtype(k.dtype))


def _joined(pieces: list[tuple[Tensor, ...]], empty: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Tensors (b, heads, n, ...) of all parts from those of each; of a single part the same. `empty` makes those of no parts:
    beside others they would be as large as a rank's."""
    if len(pieces) == 1:
        return tuple(pieces[0])
    return tuple(torch.cat(x, dim=2) for x in zip(*pieces, strict=True)) if pieces else empty()


def _of(part: Part, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else x[:, :, part.local] for x in tensors)


_State = tuple[Tensor | None, Tensor | None]  # values and weights, None for zeros


def _states(packed: list[Tensor | None], v: Tensor) -> list[_State]:
    return [(None, None) if x is None else _unpack(x, v) for x in packed]


def _pairs(state: _State, grads: _State, k: Tensor) -> Tensor:
    """(b, hk), float64: the sum of the products of a state's numbers and their gradients."""
    # What has no gradient has no part in it, even if it is not finite.
    given = [(x, grad) for x, grad in zip(state, grads, strict=True) if x is not None and grad is not None]
    products = ((x * grad).masked_fill_(grad == 0.0, 0.0) for x, grad in given)
    return sum((x.flatten(2).sum(-1, dtype=torch.float64) for x in products), k.new_zeros(k.shape[:2], dtype=torch.float64))


def _without_nan(call: Call, state: _State) -> tuple[Call, _State]:
    """The call and the state before it, with NaN as the first decay in place of a state of NaN: queries that do not see the
    state have factors of 0 for it, which leave NaN as it is."""
    values, weights = state
    if call.log_decay is None or values is None:
        return call, state
    is_nan = weights[..., 0].isnan()
    decay = call.log_decay.clone()
    decay[..., 0].masked_fill_(is_nan, torch.nan)
    # Weights of 1: there are keys in the state.
    state = values.masked_fill(is_nan[..., None, None], 0.0), weights.masked_fill(is_nan[..., None], 1.0)
    return call._replace(log_decay=decay), state


class _Call:
    """What the two functions of a causal call, between which it waits, hand each other."""

    def __init__(self, job: Job):
        self.job = job
        self.states: Exchange | None = None
        self.kept: list[Tensor] = []  # of each part, on the way to its own state
        self.gradients: Callable[[], tuple[Tensor, ...]] | None = None  # of q, k, v and log_decay, once theirs are exchanged


def _nothing_kept(k: Tensor) -> Tensor:
    return k.new_empty(*k.shape[:2], 0, dtype=torch.uint8)


def _own_states(
    state_of: Callable[[int, Part], tuple[Tensor, ...]], job: Job, like: Tensor, k: Tensor, backward: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The packed state of each part of this rank, and what was kept of it.

    Nobody reads the state of the last part, or in the backward of the first. Where kernels keep something of it, it is made all
    the same, while the others make theirs: a rank that came to the exchange early would wait on multiprocessors.
    """
    own, kept = [], []
    unread = () if k.is_cuda and job.score.order == 2 else _ends(job.spread.layout, not backward)
    for i, part in enumerate(job.spread.parts):
        if part in unread:
            own.append(like), kept.append(_nothing_kept(k))
        else:
            *state, of_part = state_of(i, part)
            own.append(_pack(state)), kept.append(of_part)
    return own, kept


def _computes_first(k: Tensor, job: Job, like: Tensor) -> bool:
    """Whether a rank has more to do, in the backward, than it needs for the exchange: the one with the first part alone, where
    states are gathered.

    Nobody reads the gradient of the state that this part begins with. What comes for it could be added to states that it kept
    in place of that; but it has the gradient of its queries to compute all the same, and then goes on from what has come, as in
    one process. The others come to the exchange when they have walked over their tokens once; this rank does where it is about
    as far, in the midst of its queries, as who comes early waits on multiprocessors.
    """
    layout = job.spread.layout
    rows = k.shape[0] * k.shape[1] * k.shape[2]
    in_pieces = k.is_cuda and job.score.order == 2 and k.shape[3] > 32 and rows >= _ROWS_IN_PIECES
    return in_pieces and _has_first_part_alone(job) and not by_shares(layout.world, like.nbytes)


def _has_first_part_alone(job: Job) -> bool:
    """And no rank has several."""
    layout = job.spread.layout
    return layout.most_parts == 1 and job.spread.parts == layout.parts[:1]


class _Begin(torch.autograd.Function):
    """Of q, k, v and log_decay a ticket, an empty tensor; the gradient of the whole call."""

    @staticmethod
    def forward(ctx, call: _Call, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None):
        ctx.call, job = call, call.job
        like = _like(k, v, job.score)

        def state_of(i: int, part: Part) -> tuple[Tensor, ...]:
            return ops.state_of_keys(*_of(part, k, v), job.call(i, log_decay), keep=True)

        own, call.kept = _own_states(state_of, job, like, k, backward=False)
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
        came = call.states.wait()
        before = _states(came, v)
        after = [] if log_decay is None else _states(call.states.passed_on(came), v)  # for its gradient
        call.states = came = None
        pieces = []
        for i, part in enumerate(job.spread.parts):
            of_part, state = _without_nan(job.call(i, log_decay), before[i])
            pieces.append(ops.prefill_kept_(*_of(part, q, k, v), of_part, *state, call.kept[i]))
            call.kept[i] = None

        def empty() -> tuple[Tensor, Tensor]:
            return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=eager.compute_dtype(q.dtype))

        o, z = _joined(pieces, empty)
        ctx.save_for_backward(q, k, v, log_decay, o, z, *chain(*before, *after))
        ctx.set_materialize_grads(False)
        return o, z

    @staticmethod
    @without_second_derivative
    def backward(ctx, grad_o: Tensor | None, grad_z: Tensor | None):
        q, k, v, log_decay, o, z, *states = ctx.saved_tensors
        job, like = ctx.call.job, _like(k, v, ctx.call.job.score)
        parts = job.spread.parts
        states = list(zip(states[::2], states[1::2], strict=True))
        before, after = states[: len(parts)], states[len(parts) :]
        calls = [job.call(i, log_decay) for i in range(len(parts))]
        g, e = ops.gradients_of_sums(torch.zeros_like(o) if grad_o is None else grad_o, grad_z, o, z)

        def state_of(i: int, part: Part) -> tuple[Tensor, ...]:
            return ops.state_of_queries(*_of(part, g, e, q, k, v), calls[i], keep=True)

        def of_queries_of(i: int, part: Part, event: torch.cuda.Event | None = None) -> tuple[Tensor, Tensor]:
            return ops.prefill_backward_of_queries(*_of(part, g, e, q, k, v), calls[i], *before[i], event)

        if _computes_first(k, job, like):
            into = room(like.unsqueeze(0), job.spread.group)
            event = torch.cuda.current_stream(k.device).record_event() if k.is_cuda else None
            of_queries, kept = [of_queries_of(0, parts[0], event)], [_nothing_kept(k)]
            exchange = Exchange([like], like, job.carries, job.spread, backward=True, earlier=Earlier(event, into))
        else:
            own, kept = _own_states(state_of, job, like, k, backward=True)
            exchange = Exchange(own, like, job.carries, job.spread, backward=True)
            # While gradients of states are on their way:
            of_queries = [of_queries_of(i, part) for i, part in enumerate(parts)]

        def gradients() -> tuple[Tensor, ...]:
            nonlocal exchange
            came = exchange.wait()
            behind = _states(came, v)
            passed_on = [] if log_decay is None else _states(exchange.passed_on(came), v)
            exchange = came = None
            pieces = []
            for i, part in enumerate(parts):
                (grad_q, pairs), of_states = of_queries[i], None
                if log_decay is not None:
                    of_states = torch.stack([_pairs(after[i], behind[i], k), _pairs(before[i], passed_on[i], k)], dim=-1)
                given = *_of(part, g, e), behind[i], *_of(part, q, k, v), calls[i], pairs, of_states, kept[i]
                grad_k, grad_v, of_decay = ops.prefill_backward_of_keys_(*given)
                pieces.append((grad_q, grad_k, grad_v, of_decay)[: 3 if log_decay is None else 4])
                of_queries[i] = kept[i] = None
            return _joined(pieces, lambda: tuple(torch.zeros_like(x) for x in (q, k, v, log_decay) if x is not None))

        ctx.call.gradients = gradients
        return None, q.new_empty(0), None, None, None, None


class _FromTotal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, job: Job, q: Tensor, k: Tensor, v: Tensor):
        call = Call(job.score, causal=True, attention_mask=job.mask)
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
        call = Call(ctx.job.score, causal=True, attention_mask=ctx.job.mask)
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
    return call._replace(attention_mask=torch.zeros(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device))
