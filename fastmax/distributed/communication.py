"""Asynchronous collectives on torch.distributed.

Each function starts a collective and returns a `Pending`, whose `wait` returns the result. The caller can compute between the
two: collectives run on a separate stream on GPUs, and on a separate thread on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch import distributed as dist

from fastmax.distributed.rank_consistency import time_limit

# Renamed in PyTorch 2.13; 2.11 has only the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """A collective in progress. Holds a reference to the sent tensor until `wait`."""

    def __init__(self, what: str, group: dist.ProcessGroup, works: Sequence[dist.Work], sent: Tensor, result: Tensor):
        self._what, self._group, self._works, self._sent, self._result = what, group, works, sent, result

    def wait(self) -> Tensor:
        """Returns the received tensor."""
        with _named(self._what, self._group):
            for work in self._works:
                if self._result.is_cuda:
                    work.wait()  # blocks the current stream, not this thread
                else:
                    work.wait(time_limit())
        self._works, self._sent = (), None
        return self._result


def all_gather(what: str, x: Tensor, group: dist.ProcessGroup) -> Pending:
    """All-gathers x, which has the same shape on all ranks. The result is (ranks, ...)."""
    x = x.contiguous()
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:]) if x.dim() else x.new_empty(group.size())
    return _started(what, group, x, out.view(group.size(), *x.shape), lambda: [_all_gather(out, x, group=group, async_op=True)])


def all_to_all(
    what: str, x: Tensor, group: dist.ProcessGroup, sent: list[int] | None = None, received: list[int] | None = None
) -> Pending:
    """Sends `sent[r]` consecutive rows of x (rows, ...) to rank r, and receives `received[r]` rows from rank r.

    By default the rows are divided evenly. The result holds the received rows, in the order of ranks.
    """
    x = x.contiguous()
    out = torch.empty_like(x) if received is None else x.new_empty(sum(received), *x.shape[1:])
    return _started(what, group, x, out, lambda: [dist.all_to_all_single(out, x, received, sent, group=group, async_op=True)])


def ring_send_recv(what: str, x: Tensor, expected: int, group: dist.ProcessGroup, tag: int) -> Pending:
    """Ring send and receive: sends x (elements,) to the next rank and receives `expected` elements from the previous one.

    Empty messages are not sent. Messages with different tags can be in progress at the same time.
    """
    rank, world = group.rank(), group.size()
    x, out = x.contiguous(), x.new_empty(expected)
    operations = []
    if x.numel() > 0:
        operations.append(dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % world, tag=tag))
    if expected > 0:
        operations.append(dist.P2POp(dist.irecv, out, group=group, group_peer=(rank - 1) % world, tag=tag))
    return _started(what, group, x, out, lambda: dist.batch_isend_irecv(operations) if operations else [])


def _started(what: str, group: dist.ProcessGroup, x: Tensor, out: Tensor, start: Callable[[], list[dist.Work]]) -> Pending:
    with _named(what, group):
        return Pending(what, group, start(), x, out)


@contextmanager
def _named(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # errors of torch.distributed are RuntimeErrors
        raise RuntimeError(
            f"fastmax.distributed: the exchange of {what} failed on rank {group.rank()} of {group.size()}: a rank has exited "
            f"or raised an error, or did not join within the time limit ({error})"
        ) from error
