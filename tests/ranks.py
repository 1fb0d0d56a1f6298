"""Processes that are the ranks of groups. They are started once per test file and then run one function after the other."""

from __future__ import annotations

import io
import os
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
from torch import distributed as dist
from torch import multiprocessing as mp

LATE = "late"  # a backend: messages of fastmax.distributed as `late_messages` brings them, on any device
PRELOADED = ["fastmax.distributed", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "pytest"]


class RankError(Exception):
    """The error that a rank raised."""

    def __init__(self, kind: str, message: str, where: str):
        super().__init__(message)
        self.kind, self.where = kind, where

    def __reduce__(self):
        return RankError, (self.kind, self.args[0], self.where)

    def __str__(self) -> str:
        return f"{self.kind}: {self.args[0]}\n{self.where}"


class Ranks:
    """`world` processes with a group of the first 1, 2, ... of them each. With GPUs, each process has one or shares it."""

    def __init__(self, world: int, folder, backend: str = "gloo"):
        self.world = world
        # Forked from a server that has imported what takes long; with GPUs, which a fork cannot use again, each imports it.
        context = mp.get_context("spawn" if torch.cuda.is_available() else "forkserver")
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, backend, f"file://{folder}/store", theirs)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.pipes.append(ours)
        for process in self.processes:
            process.start()

    def start(self, function: Callable, *arguments, world: int | None = None, ranks=None) -> None:
        """Starts `function(group, *arguments)` on the first `world` ranks, or on some of them."""
        world = self.world if world is None else world
        self._asked = range(world) if ranks is None else ranks
        for rank in self._asked:
            self.pipes[rank].send_bytes(_dump((function, world, arguments)))

    def results(self, ranks=None) -> list:
        """Returns the results of the ranks that were started; a RankError takes the place of the result of a rank that
        raised."""
        return [load(self.pipes[rank].recv_bytes()) for rank in (self._asked if ranks is None else ranks)]

    def run(self, function: Callable, *arguments, world: int | None = None) -> list:
        """Returns the results or raises the first error."""
        self.start(function, *arguments, world=world)
        results = self.results()
        for result in results:
            if isinstance(result, RankError):
                raise result
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _dump(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def load(data: bytes):
    return torch.load(io.BytesIO(data), weights_only=False)


def _serve(rank: int, world: int, backend: str, address: str, pipe) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    if backend != "gloo" and torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    transport = "gloo" if backend == LATE else backend
    dist.init_process_group(transport, init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    groups = [dist.new_group(list(range(size))) for size in range(1, world)] + [dist.group.WORLD]
    with _messages(backend):
        _answer(pipe, groups)


def _messages(backend: str) -> AbstractContextManager:
    if backend != LATE:
        return nullcontext()
    import late_messages

    from benchmarks.messages import carried_by

    return carried_by(late_messages)


def _answer(pipe, groups: list[dist.ProcessGroup]) -> None:
    while True:
        function, size, arguments = load(pipe.recv_bytes())
        try:
            result = function(groups[size - 1], *arguments)
        except Exception as error:
            result = RankError(type(error).__name__, str(error), traceback.format_exc())
        pipe.send_bytes(_dump(result))
