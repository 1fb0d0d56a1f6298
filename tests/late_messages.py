"""Messages by way of the host, between ranks that share a GPU, which NCCL refuses; and as late as they may be.

A message takes what is sent as it is where the current stream is when it starts, and does not wait for what the stream is given
later. What comes is NaN from there on until it is waited for. What is sent has to stay as it is until then.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache

import torch
from torch import Tensor
from torch import distributed as dist

from fastmax.distributed.communication import _all_gather  # by its name, which those who patch do not change

# A single thread: messages have to start in the same order on all ranks.
_messenger = ThreadPoolExecutor(max_workers=1)


def all_gather(out: Tensor, x: Tensor, group: dist.ProcessGroup, async_op: bool) -> Late:
    return _started([x], [out], async_op, lambda sent, into: [_all_gather(*into, *sent, group=group, async_op=True)])


def all_to_all_single(
    out: Tensor,
    x: Tensor,
    received: list[int] | None = None,
    sent: list[int] | None = None,
    *,
    group: dist.ProcessGroup,
    async_op: bool,
) -> Late:
    def begin(own: list[Tensor], into: list[Tensor]) -> list[dist.Work]:
        return [dist.all_to_all_single(*into, *own, received, sent, group=group, async_op=True)]

    return _started([x], [out], async_op, begin)


def batch_isend_irecv(ops: list[dist.P2POp]) -> list[Late]:
    sends, receives = ([op for op in ops if op.op is kind] for kind in (dist.isend, dist.irecv))

    def begin(sent: list[Tensor], into: list[Tensor]) -> list[dist.Work]:
        pairs = zip([*sends, *receives], [*sent, *into], strict=True)
        return dist.batch_isend_irecv(
            [dist.P2POp(op.op, x, group=op.group, group_peer=op.group_peer, tag=op.tag) for op, x in pairs]
        )

    return [_started([op.tensor for op in sends], [op.tensor for op in receives], True, begin)]


def _started(sent: list[Tensor], into: list[Tensor], async_op: bool, begin: Callable) -> Late:
    if not async_op:
        raise NotImplementedError("a message that is waited for where it starts")
    return Late(sent, into, begin)


class Late:
    """A message in transit, with the `wait` of a `dist.Work`. `begin(sent, into)` starts it between host tensors."""

    def __init__(self, sent: list[Tensor], into: list[Tensor], begin: Callable[[list[Tensor], list[Tensor]], list[dist.Work]]):
        self._sent, self._into, self._begin = sent, into, begin
        self._device = [*sent, *into][0].device
        for x in into:
            _bytes(x).fill_(255)  # NaN in every floating dtype
        self._start = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
        self._travel = _messenger.submit(self._go)

    def _go(self) -> tuple[list[Tensor], list[Tensor], list[dist.Work]]:
        """Runs in the messenger thread: sends and receives on the host."""
        if self._start is None:
            sent = [x.detach().clone() for x in self._sent]
        else:
            self._start.synchronize()
            with torch.cuda.stream(_stream(self._device)):  # of the messenger alone, so that only it is waited for
                sent = [x.detach().cpu() for x in self._sent]
        into = [torch.empty(x.shape, dtype=x.dtype) for x in self._into]
        return sent, into, self._begin(sent, into)

    def started(self) -> None:
        """Returns when the sent tensor has been read."""
        self._travel.result()

    def wait(self, timeout: timedelta | None = None) -> bool:
        sent, came, works = self._travel.result()
        for work in works:
            work.wait(*(() if timeout is None else (timeout,)))
        for x, at_start in zip(self._sent, sent, strict=True):
            if not torch.equal(_bytes(x).cpu(), _bytes(at_start)):
                raise RuntimeError("what is sent was written to before its message was waited for")
        if self._start is not None:
            torch.cuda.current_stream(self._device).wait_event(self._start)  # by which NaN are written
        for x, y in zip(self._into, came, strict=True):
            x.detach().copy_(y)
        return True


def _bytes(x: Tensor) -> Tensor:
    return x.detach().view(-1).view(torch.uint8)


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
