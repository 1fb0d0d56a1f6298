"""`Received`: how many bytes really come from other ranks."""

from __future__ import annotations

from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Received(TorchDispatchMode):
    """Counts the bytes that collectives bring from other ranks, at PyTorch's dispatcher."""

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
