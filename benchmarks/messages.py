"""Counts or replaces messages between ranks.

`Received` counts the bytes that collectives receive. `carried_by` replaces the collectives of torch.distributed that
`fastmax.distributed` calls. `as_rank` runs one rank of several without the others, with messages that take no time. The rank
receives a copy of its own message in place of another rank's, or zeros where it sends none. Its tensors have the right sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fastmax.distributed import attention, communication, states


class Received(TorchDispatchMode):
    """Counts the bytes that collectives receive from other ranks, at PyTorch's dispatcher."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__()
        self.bytes, self._world, self._rank = 0, group.size(), group.rank()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if name == "c10d::_allgather_base_":
            self.bytes += args[0].nbytes - args[1].nbytes
        elif name == "c10d::alltoall_base_":
            rows, out = args[3] or [args[0].shape[0] // self._world] * self._world, args[0]
            self.bytes += (sum(rows) - rows[self._rank]) * (out.nbytes // max(1, out.shape[0]))
        elif name == "c10d::recv_":
            self.bytes += sum(x.nbytes for x in args[0])
        elif name.startswith("c10d::") and name != "c10d::send":
            raise NotImplementedError(f"{name} is not counted")
        return function(*args, **(kwargs or {}))


@contextmanager
def carried_by(carrier):
    """Sends messages with `carrier`, which has `all_gather`, `all_to_all_single` and `batch_isend_irecv` of torch.distributed.

    Any other collective raises AttributeError.
    """
    calls = SimpleNamespace(
        P2POp=dist.P2POp,
        isend=dist.isend,
        irecv=dist.irecv,
        all_to_all_single=carrier.all_to_all_single,
        batch_isend_irecv=carrier.batch_isend_irecv,
    )
    with mock.patch.multiple(communication, dist=calls, _all_gather=carrier.all_gather):
        yield


@contextmanager
def as_rank(rank: int, world: int):
    """Makes this process rank `rank` of `world` ranks with equal lengths and equal arguments."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401, registers "fake", the backend of groups without messages

    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)
    agreed = mock.patch.object(attention, "check_consistency", lambda group, options, tokens: (tokens,) * world)
    # This rank reads buffers that are not written when other ranks do not need them. They must hold numbers.
    like = states._like
    unread = mock.patch.object(states, "_like", lambda *of_call: _numbers(like(*of_call)))
    try:
        with agreed, unread, carried_by(_Copies):
            yield
    finally:
        dist.destroy_process_group()


def _numbers(like: Tensor) -> Tensor:
    return _drawn(like.shape, like.dtype, like.device)


@lru_cache
def _drawn(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


class Copied:
    """A received message with the interface of `dist.Work`."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]):
        self._event = None
        for out, x in pairs:
            out, x = out.view(-1), x.view(-1)
            size = min(out.numel(), x.numel())
            out[:size].copy_(x[:size])
            out[size:].zero_()
            if out.is_cuda:
                self._event = torch.cuda.current_stream(out.device).record_event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return True


class _Copies:
    """The carrier for a rank without others."""

    @staticmethod
    def all_gather(out: Tensor, x: Tensor, group: dist.ProcessGroup, async_op: bool) -> Copied:
        return Copied((rows, x) for rows in out.chunk(group.size()))

    @staticmethod
    def all_to_all_single(out: Tensor, x: Tensor, *splits: list[int], group: dist.ProcessGroup, async_op: bool) -> Copied:
        return Copied([(out, x)])

    @staticmethod
    def batch_isend_irecv(ops: list[dist.P2POp]) -> list[Copied]:
        """Copies the tensor that is sent, at most one, to those that are received."""
        sent = [op.tensor for op in ops if op.op is dist.isend]
        into = [op.tensor for op in ops if op.op is dist.irecv]
        return [Copied((out, sent[0] if sent else out[:0]) for out in into)]
