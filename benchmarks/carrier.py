"""`carried_by`: messages of `fastmax.distributed` by something else than torch.distributed."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from torch import distributed as dist

from fastmax.distributed import communication


@contextmanager
def carried_by(carrier):
    """`carrier` has `all_gather`, `all_to_all_single` and `batch_isend_irecv`, called as those of torch.distributed. Anything
    else that would be sent is an AttributeError."""
    calls = SimpleNamespace(
        P2POp=dist.P2POp,
        isend=dist.isend,
        irecv=dist.irecv,
        all_to_all_single=carrier.all_to_all_single,
        batch_isend_irecv=carrier.batch_isend_irecv,
    )
    with mock.patch.multiple(communication, dist=calls, _all_gather=carrier.all_gather):
        yield
