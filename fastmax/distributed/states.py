"""The linear algorithm over sharded tokens: ranks exchange states, whose size does not depend on the number of tokens.

Each part computes the state of its own keys. After the exchange it starts from the decayed sum of the states of earlier parts.
The backward reverses the direction: the gradient of the state after a part is a sum over the queries of later parts.
`PartDecays` holds the decay factor of each part.

While kernels compute the state of a part, they save its chunk states, so that keys are accumulated only once. The gradient of
the queries does not depend on later parts, and is computed during the exchange of gradients.

A few ranks all-gather their states. More ranks use two all-to-all collectives (`uses_all_to_all`): each rank receives one slice
of all states, computes the prefix sums of the slice for all parts, and returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from fastmax import eager, ops
from fastmax.core.call import Call
from fastmax.core.score import Score
from fastmax.distributed.communication import Pending, all_gather, all_to_all
from fastmax.distributed.layout import Layout, Part
from fastmax.distributed.once_differentiable import once_differentiable
from fastmax.distributed.part_decays import PartDecays

# Bytes that are sent during the latency of one collective: 20 us at 300 GB/s. The all-to-all exchange has one collective more
# than the all-gather, so it must save at least these bytes.
_BYTES_OF_ONE_LATENCY = 6 << 20


def uses_all_to_all(world: int, state_bytes: int) -> bool:
    """Returns whether all-to-all, not all-gather, exchanges the states. `state_bytes` is the size of the states of one rank."""
    return (world - 1) * (1 - 2 / world) * state_bytes > _BYTES_OF_ONE_LATENCY


class Exchange:
    """Exchange of one state (channels, elements) per part.

    The result holds for each local part the sum of the states of earlier parts, or of later parts in the backward; None if
    there are no such parts.
    """

    def __init__(
        self,
        own: list[Tensor],
        like: Tensor,
        part_decays: PartDecays | None,
        layout: Layout,
        group: dist.ProcessGroup,
        backward: bool,
    ):
        """Starts the exchange.

        Args:
            own: packed state of each local part.
            like: (channels, elements), a placeholder for missing parts; needed on ranks without parts.
            part_decays: decay factors of the parts; None: no decays.
            backward: sums run over later parts.
        """
        self._layout, self._parts, self._own, self._backward = layout, layout.of(group.rank()), own, backward
        self._part_decays = part_decays
        self._elements = like.shape[1]
        missing = [like] * (layout.most_parts - len(own))
        all_own = [*own, *missing]
        states = all_own[0].unsqueeze(0) if len(all_own) == 1 else torch.stack(all_own)
        self._is_all_to_all = uses_all_to_all(layout.world, states.numel() * states.element_size())
        what = "gradients of states" if backward else "states"
        if not self._is_all_to_all:
            self._pending: Pending = all_gather(what, states, group)
            return
        world = layout.world
        states = F.pad(states, (0, -self._elements % world)).unflatten(2, (world, -1)).permute(2, 0, 1, 3)
        slices = all_to_all(f"slices of {what}", states, group).wait()
        sums = torch.zeros_like(slices)
        for part, x in self._prefix_sums(slices, layout.parts):
            if x is not None:
                sums[part.rank, self._slot(part)] = x
        self._pending = all_to_all(f"slices of {what}", sums, group)

    def wait(self) -> list[Tensor | None]:
        """Returns the sum for each local part."""
        received = self._pending.wait()
        if self._is_all_to_all:
            received = received.permute(1, 2, 0, 3).flatten(2)[..., : self._elements]
            first = _first_part(self._layout, self._backward)
            return [None if part in first else received[i] for i, part in enumerate(self._parts)]
        sums = dict(self._prefix_sums(received, self._parts))
        return [sums[part] for part in self._parts]

    def next_sums(self, sums: list[Tensor | None]) -> list[Tensor | None]:
        """Returns the sum for the part that follows each local part: its `sums` plus its own state. None for the last part."""
        last = _first_part(self._layout, not self._backward)
        return [
            None if part in last else self._add(before, own, self._layout.index[part]).to(own.dtype)
            for part, before, own in zip(self._parts, sums, self._own, strict=True)
        ]

    def _slot(self, part: Part) -> int:
        return self._layout.of(part.rank).index(part)

    def _prefix_sums(self, states: Tensor, wanted: tuple[Part, ...]) -> Iterator[tuple[Part, Tensor | None]]:
        """Yields each wanted part with the sum of its predecessors' `states` (ranks, parts of a rank, channels, elements)."""
        total = None
        left = set(wanted)
        parts = list(enumerate(self._layout.parts))
        for i, part in reversed(parts) if self._backward else parts:
            if part in left:
                left.remove(part)
                yield part, None if total is None else total.to(states.dtype)
            if not left:
                return
            total = self._add(total, states[part.rank, self._slot(part)], i)

    def _add(self, before: Tensor | None, own: Tensor, index: int) -> Tensor:
        """Adds the state of part `index` to the decayed sum of its predecessors, in float64. A single state keeps its dtype."""
        if before is None:
            return own
        before = before.double()
        if self._part_decays is None:
            return before + own
        factor = self._part_decays.factors[index]  # NaN if a decay is NaN; zeros stay zeros
        return own + torch.where((factor == 0.0) | (before == 0.0), 0.0, before * factor)


def _first_part(layout: Layout, backward: bool) -> tuple[Part, ...]:
    """Returns the part that has no predecessor in this direction, or () if there are no parts."""
    return layout.parts[-1:] if backward else layout.parts[:1]


class Job(NamedTuple):
    """The arguments of a call beside q, k, v, log_decay and log_input_gate."""

    score: Score
    layout: Layout
    group: dist.ProcessGroup
    mask: Tensor | None  # bool (b, n)
    k_starts: tuple[Tensor, ...] | None  # int32 (b, hk, tokens) of each part; -1: the state before the part is visible
    part_decays: PartDecays | None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of this rank."""
        return self.layout.of(self.group.rank())

    def call(self, i: int, log_decay: Tensor | None, log_input_gate: Tensor | None) -> Call:
        """Returns the `Call` of the i-th local part."""
        local = self.parts[i].local
        mask = None if self.mask is None else self.mask[:, local]
        decay, gate = (None if x is None else x[..., local] for x in (log_decay, log_input_gate))
        first = None if self.k_starts is None else self.k_starts[i]
        return Call(self.score, causal=True, attention_mask=mask, log_decay=decay, k_start=first, log_input_gate=gate)


def begin(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, log_input_gate: Tensor | None, job: Job
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Starts causal attention and the exchange of states.

    Operations between this call and that of the returned function overlap with the exchange, in the backward too.

    Returns:
        A function that waits for the exchange and returns o (b, h, n, dv) and the denominators (b, h, n) of the local tokens.
    """
    call = _Call(job)
    inputs = q, k, v, log_decay, log_input_gate
    token = _Begin.apply(call, *inputs)
    return lambda: _Finish.apply(call, token, *(None if x is None else x.detach() for x in inputs))


def attend_to_all(q: Tensor, k: Tensor, v: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """Non-causal attention: every query reads the sum of all states. Returns o and the denominators."""
    return _NonCausal.apply(job, q, k, v)


def _pack(state: tuple[Tensor, Tensor]) -> Tensor:
    """Packs a state, kv_state (b, hk, rows, dv) and k_sum (b, hk, rows), into (b * hk, rows * (dv + 1))."""
    kv_state, k_sum = state
    return torch.cat([kv_state.flatten(2), k_sum], dim=2).flatten(0, 1)


def _unpack(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `_pack`; takes the sizes from v."""
    b, hk, _, dv = v.shape
    rows = x.shape[1] // (dv + 1)
    kv_state, k_sum = x.unflatten(0, (b, hk)).split([rows * dv, rows], dim=2)
    return kv_state.unflatten(2, (rows, dv)).contiguous(), k_sum.contiguous()


def _like(k: Tensor, v: Tensor, score: Score) -> Tensor:
    """Returns an uninitialised packed state, whose elements are never read."""
    (b, hk, _, d), dv = k.shape, v.shape[3]
    rows = eager.state_rows(d, score.order)
    return k.new_empty(b * hk, rows * (dv + 1), dtype=eager.compute_dtype(k.dtype))


_Tensors = tuple[Tensor | None, ...]


def _concatenated(pieces: list[_Tensors], empty: Callable[[], _Tensors]) -> _Tensors:
    """Concatenates the tensors (b, heads, tokens, ...) of the local parts. `empty` makes the result of a rank without parts.

    `empty` is a function, so that its tensors, which have the size of the result, are allocated only if needed.
    """
    if len(pieces) == 1:
        return tuple(pieces[0])
    return tuple(None if x[0] is None else torch.cat(x, dim=2) for x in zip(*pieces, strict=True)) if pieces else empty()


def _of(part: Part, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the tokens of a part."""
    return tuple(None if x is None else x[:, :, part.local] for x in tensors)


_State = tuple[Tensor | None, Tensor | None]  # kv_state and k_sum; None means zeros


def _states(packed: list[Tensor | None], v: Tensor) -> list[_State]:
    return [(None, None) if x is None else _unpack(x, v) for x in packed]


def _inner_product(state: _State, grads: _State, k: Tensor) -> Tensor:
    """Returns the inner product of a state and its gradient, (b, hk) in float64."""
    # A gradient of 0 contributes 0, even if the element is not finite.
    given = [(x, grad) for x, grad in zip(state, grads, strict=True) if x is not None and grad is not None]
    products = ((x * grad).masked_fill_(grad == 0.0, 0.0) for x, grad in given)
    return sum((x.flatten(2).sum(-1, dtype=torch.float64) for x in products), k.new_zeros(k.shape[:2], dtype=torch.float64))


def _attend_from(q: Tensor, k: Tensor, v: Tensor, call: Call, state: _State, saved: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output and denominators of a part that continues from a state, which a decay or gate may have made NaN.

    A query after a reset does not see the state. It multiplies the state by 0, and 0 * NaN would be NaN. Hence a NaN state is
    replaced by a NaN first decay, or without decays by NaN in the rows of the queries that see it.
    """
    kv_state, k_sum = state
    if kv_state is None or k_sum is None or (call.log_decay is None and (call.log_input_gate is None or call.k_start is None)):
        return ops.prefill_saved_(q, k, v, call, kv_state, k_sum, saved)
    is_nan = k_sum[..., 0].isnan()
    # Ones mark the state as non-empty.
    kv_state, k_sum = kv_state.masked_fill(is_nan[..., None, None], 0.0), k_sum.masked_fill(is_nan[..., None], 1.0)
    if call.log_decay is not None:
        decay = call.log_decay.clone()
        decay[..., 0].masked_fill_(is_nan, torch.nan)
        return ops.prefill_saved_(q, k, v, call._replace(log_decay=decay), kv_state, k_sum, saved)
    assert call.k_start is not None
    o, z = ops.prefill_saved_(q, k, v, call, kv_state, k_sum, saved)
    rows = (is_nan.unsqueeze(-1) & (call.k_start < 0)).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return o.masked_fill_(rows.unsqueeze(-1), torch.nan), z.masked_fill_(rows, torch.nan)


class _Call:
    """Data that `_Begin` and `_Finish` of one causal call share."""

    def __init__(self, job: Job):
        self.job = job
        self.states: Exchange | None = None
        self.saved: list[Tensor | None] = []  # per part: chunk states that state_of_keys saved
        # Waits for the exchange of the backward and returns the gradients of q, k, v, log_decay and log_input_gate.
        self.gradients: Callable[[], _Tensors] | None = None


def _nothing_saved(k: Tensor) -> Tensor:
    return k.new_empty(*k.shape[:2], 0, dtype=torch.uint8)


def _own_states(
    state_of: Callable[[int, Part], tuple[Tensor, Tensor, Tensor]], job: Job, like: Tensor, k: Tensor, backward: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the packed state of each local part, and the chunk states saved with it.

    No rank reads the state of the last part, or of the first part in the backward. Kernels that save chunk states compute it
    anyway: a rank that started the collective early would occupy multiprocessors while it waits.
    """
    own, saved = [], []
    unread = () if k.is_cuda and job.score.order == 2 else _first_part(job.layout, not backward)
    for i, part in enumerate(job.parts):
        if part in unread:
            own.append(like)
            saved.append(_nothing_saved(k))
        else:
            kv_state, k_sum, chunk_states = state_of(i, part)
            own.append(_pack((kv_state, k_sum)))
            saved.append(chunk_states)
    return own, saved


class _Begin(torch.autograd.Function):
    """First half of a call: starts the exchange and returns an autograd token, an empty tensor that `_Finish` takes.

    The token makes autograd run the backward of `_Finish` first. The backward of `_Begin` returns the gradients of the call.
    """

    @staticmethod
    def forward(
        ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, log_input_gate: Tensor | None
    ) -> Tensor:
        ctx.call, job = call, call.job
        like = _like(k, v, job.score)

        def state_of(i: int, part: Part) -> tuple[Tensor, Tensor, Tensor]:
            own_k, own_v = _of(part, k, v)
            return ops.state_of_keys(own_k, own_v, job.call(i, log_decay, log_input_gate), keep=True)

        own, call.saved = _own_states(state_of, job, like, k, backward=False)
        call.states = Exchange(own, like, job.part_decays, job.layout, job.group, backward=False)
        return q.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients, ctx.call.gradients = ctx.call.gradients(), None
        return None, *gradients


class _Finish(torch.autograd.Function):
    """Second half of a call: waits for the exchange and returns the results. The inputs are those of `_Begin`, detached.

    Its backward starts the exchange of gradients, and computes meanwhile the gradients that do not depend on it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        token: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        log_input_gate: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.call, job = call, call.job
        exchange, call.states = call.states, None
        assert exchange is not None  # started by _Begin
        sums = exchange.wait()
        before = _states(sums, v)
        after = [] if log_decay is None else _states(exchange.next_sums(sums), v)  # for the gradient of log_decay
        del exchange, sums  # frees memory
        pieces: list[_Tensors] = []
        for i, part in enumerate(job.parts):
            own_q, own_k, own_v = _of(part, q, k, v)
            own_call = job.call(i, log_decay, log_input_gate)
            pieces.append(_attend_from(own_q, own_k, own_v, own_call, before[i], call.saved[i]))
            call.saved[i] = None

        def empty() -> tuple[Tensor, Tensor]:
            return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=eager.compute_dtype(q.dtype))

        o, z = _concatenated(pieces, empty)
        ctx.save_for_backward(q, k, v, log_decay, log_input_gate, o, z, *chain(*before, *after))
        ctx.set_materialize_grads(False)
        return o, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor | None, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, log_input_gate, o, z, *states = ctx.saved_tensors
        job, like = ctx.call.job, _like(k, v, ctx.call.job.score)
        parts, inputs = job.parts, (q, k, v, log_decay, log_input_gate)
        states = list(zip(states[::2], states[1::2], strict=True))
        before, after = states[: len(parts)], states[len(parts) :]
        calls = [job.call(i, log_decay, log_input_gate) for i in range(len(parts))]
        g, e = ops.gradients_of_sums(torch.zeros_like(o) if grad_o is None else grad_o, grad_z, o, z)

        def state_of(i: int, part: Part) -> tuple[Tensor, Tensor, Tensor]:
            own_g, own_e, own_q, own_k, own_v = _of(part, g, e, q, k, v)
            return ops.state_of_queries(own_g, own_e, own_q, own_k, own_v, calls[i], keep=True)

        own, saved = _own_states(state_of, job, like, k, backward=True)
        exchange: Exchange | None = Exchange(own, like, job.part_decays, job.layout, job.group, backward=True)

        def gradient_of_queries(i: int, part: Part) -> tuple[Tensor, Tensor]:
            own_g, own_e, own_q, own_k, own_v = _of(part, g, e, q, k, v)
            return ops.prefill_backward_of_queries(own_g, own_e, own_q, own_k, own_v, calls[i], *before[i])

        # Overlaps with the exchange.
        of_queries: list[Any] = [gradient_of_queries(i, part) for i, part in enumerate(parts)]

        def gradients() -> _Tensors:
            nonlocal exchange
            assert exchange is not None
            sums = exchange.wait()
            grad_after = _states(sums, v)
            grad_before = [] if log_decay is None else _states(exchange.next_sums(sums), v)
            exchange = None
            del sums  # frees memory
            pieces = []
            for i, part in enumerate(parts):
                (grad_q, pairs), pairs_of_states = of_queries[i], None
                if log_decay is not None:
                    states_and_grads = (after[i], grad_after[i]), (before[i], grad_before[i])
                    pairs_of_states = torch.stack([_inner_product(*x, k) for x in states_and_grads], dim=-1)
                given = *_of(part, g, e), grad_after[i], *_of(part, q, k, v), calls[i], pairs, pairs_of_states, saved[i]
                grads = grad_q, *ops.prefill_backward_of_keys_(*given)
                pieces.append(tuple(None if x is None else grad for x, grad in zip(inputs, grads, strict=True)))
                of_queries[i] = saved[i] = None
            return _concatenated(pieces, lambda: tuple(None if x is None else torch.zeros_like(x) for x in inputs))

        ctx.call.gradients = gradients
        return None, q.new_empty(0), None, None, None, None, None


class _NonCausal(torch.autograd.Function):
    """Non-causal attention: all queries read the sum of all states."""

    @staticmethod
    def forward(ctx: Any, job: Job, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        call = Call(job.score, causal=True, attention_mask=job.mask)
        kv_state, k_sum, _ = ops.state_of_keys(k, v, call)
        total = _total(_pack((kv_state, k_sum)), job, "states")
        o, z, *_ = ops.prefill(q, k, v, _without_keys(call, k), *_unpack(total, v))
        ctx.save_for_backward(q, k, v, o, z, total)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return o, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor | None, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, o, z, total = ctx.saved_tensors
        call = Call(ctx.job.score, causal=True, attention_mask=ctx.job.mask)
        grad_o = torch.zeros_like(o) if grad_o is None else grad_o
        grads, results = (grad_o, grad_z, None, None), (o, z, None, None)
        without_keys = _without_keys(call, k)
        grad_q, *_, of_kv_state, of_k_sum = ops.prefill_backward(grads, q, k, v, results, without_keys, *_unpack(total, v))
        grad_total = _total(_pack((of_kv_state, of_k_sum)), ctx.job, "gradients of states")
        # With zero gradients of the outputs, only the gradient of the final state contributes.
        nothing = torch.zeros_like(o)
        grads, results = (nothing, None, *_unpack(grad_total, v)), (nothing, torch.ones_like(z), None, None)
        none = torch.zeros_like(total)
        _, grad_k, grad_v, *_ = ops.prefill_backward(grads, q, k, v, results, call, *_unpack(none, v))
        return None, grad_q, grad_k, grad_v


def _total(own: Tensor, job: Job, what: str) -> Tensor:
    """Returns the sum of `own` over ranks, accumulated in float64."""
    return all_gather(what, own, job.group).wait().sum(0, dtype=torch.float64).to(own.dtype)


def _without_keys(call: Call, k: Tensor) -> Call:
    """Returns the call with all keys masked, so that queries read only the state."""
    return call._replace(attention_mask=torch.zeros(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device))
