"""Messages between the ranks of a group, by torch.distributed: started here, waited for where they are needed.

Whoever starts one may compute until it waits: on GPUs messages have a stream of their own, on the CPU a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from fastmax.distributed.rank_consistency import time_limit

# PyTorch 2.13 renames it; 2.11 has the old name alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """What comes, once `wait` returns it; keeps what is sent alive until then."""

    def __init__(self, what: str, group: dist.ProcessGroup, works: Sequence[dist.Work], sent: Tensor, result: Tensor):
        self._what, self._group, self._works, self._sent, self._result = what, group, works, sent, result

    def wait(self) -> Tensor:
        with _named(self._what, self._group):
            for work in self._works:
                if self._result.is_cuda:
                    work.wait()  # of the current stream, not of this thread
                else:
                    work.wait(time_limit())
        self._works, self._sent = (), None
        return self._result


class Earlier(NamedTuple):
    """A place in the current stream from which on a message may travel that is started later. What it fills was made before:
    memory that is free by then may be in use from there on."""

    event: torch.cuda.Event | None  # None on CPUs, which start at once
    into: Tensor


def room(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What `gather` fills."""
    return x.new_empty(group.size() * x.shape[0], *x.shape[1:]) if x.dim() else x.new_empty(group.size())


def gather(what: str, x: Tensor, group: dist.ProcessGroup, earlier: Earlier | None = None) -> Pending:
    """x of every rank, (ranks, ...); of one shape."""
    x = x.contiguous()
    out = room(x, group) if earlier is None else earlier.into
    result = out.view(group.size(), *x.shape)

    def start() -> list[dist.Work]:
        if earlier is None or earlier.event is None:
            return [_all_gather(out, x, group=group, async_op=True)]
        stream = _side_stream(x.device)
        stream.wait_event(earlier.event)
        with torch.cuda.stream(stream):
            return [_all_gather(out, x, group=group, async_op=True)]

    return _started(what, group, x, result, start)


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where nothing runs: it waits for what messages of another stream wait for."""
    return torch.cuda.Stream(device)


def all_to_all(what: str, x: Tensor, group: dist.ProcessGroup) -> Pending:
    """x (ranks, ...), a row for each rank -> a row of each rank."""
    x = x.contiguous()
    out = torch.empty_like(x)
    return _started(what, group, x, out, lambda: [dist.all_to_all_single(out, x, group=group, async_op=True)])


def scatter_rows(what: str, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Pending:
    """x (rows, ...): the first `sent[0]` rows to rank 0 and so on -> `received[0]` rows of rank 0, and so on."""
    x = x.contiguous()
    out = x.new_empty(sum(received), *x.shape[1:])
    return _started(what, group, x, out, lambda: [dist.all_to_all_single(out, x, received, sent, group=group, async_op=True)])


def pass_on(what: str, x: Tensor, expected: int, group: dist.ProcessGroup, tag: int) -> Pending:
    """x (elements,) to the next rank -> that of the one before, of `expected` elements. What has none is not sent. Messages
    with other tags may be under way."""
    rank, world = group.rank(), group.size()
    x, out = x.contiguous(), x.new_empty(expected)
    todo = []
    if x.numel() > 0:
        todo.append(dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % world, tag=tag))
    if expected > 0:
        todo.append(dist.P2POp(dist.irecv, out, group=group, group_peer=(rank - 1) % world, tag=tag))
    return _started(what, group, x, out, lambda: dist.batch_isend_irecv(todo) if todo else [])


def _started(what: str, group: dist.ProcessGroup, x: Tensor, out: Tensor, start: Callable[[], list[dist.Work]]) -> Pending:
    with _named(what, group):
        return Pending(what, group, start(), x, out)


@contextmanager
def _named(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed's own are of this kind
        raise RuntimeError(
            f"fastmax.distributed: the exchange of {what} failed on rank {group.rank()} of {group.size()}: a rank has ended or "
            f"raised an error, or did not come within the time limit ({error})"
        ) from error
