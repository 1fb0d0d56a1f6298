"""`as_rank`: one rank of several without the others, which computes what it would beside them; messages take no time.

In place of what another rank would send there is what this one sends, or zeros where it sends none, copied on its device:
numbers of the right size, which kernels take as long with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from unittest import mock

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.carrier import carried_by
from fastmax.distributed import attention, states


@contextmanager
def as_rank(rank: int, world: int):
    """This process is one of so many, which all have as many tokens and ask for the same."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401, registers "fake", the backend of groups without messages

    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)
    agreed = mock.patch.object(attention, "agree", lambda group, options, tokens: (tokens,) * world)
    # What nobody would read comes back to this rank, which does.
    like = states._like
    unread = mock.patch.object(states, "_like", lambda *of_call: _numbers(like(*of_call)))
    try:
        with agreed, unread, carried_by(sys.modules[__name__]):
            yield
    finally:
        dist.destroy_process_group()


def _numbers(like: Tensor) -> Tensor:
    return _drawn(like.shape, like.dtype, like.device)


@lru_cache
def _drawn(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


class Copied:
    """A message that has come, with the `wait` of a `dist.Work`: of the stream that it was started from."""

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


def all_gather(out: Tensor, x: Tensor, group: dist.ProcessGroup, async_op: bool) -> Copied:
    return Copied((rows, x) for rows in out.chunk(group.size()))


def all_to_all_single(out: Tensor, x: Tensor, *splits: list[int], group: dist.ProcessGroup, async_op: bool) -> Copied:
    return Copied([(out, x)])


def batch_isend_irecv(ops: list[dist.P2POp]) -> list[Copied]:
    """Of one tensor that is sent, or none."""
    sent = [op.tensor for op in ops if op.op is dist.isend]
    into = [op.tensor for op in ops if op.op is dist.irecv]
    return [Copied((out, sent[0] if sent else out[:0]) for out in into)]
