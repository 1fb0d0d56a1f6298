"""`run`: a function in processes that torch.distributed connects, the same ones for all tests of this process."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait

import pytest
import torch
from ranks import RankError, Ranks, load

WORLD = 4
_started: dict[str, Ranks] = {}  # by their backend


def run(function: Callable, world: int, *arguments: object, backend: str = "gloo") -> list:
    """Runs `function(group, *arguments)` on the first `world` ranks. Returns the results or raises the first error. With nccl
    there are two ranks."""
    if not _started:
        atexit.register(stop)
    if backend not in _started:
        _started[backend] = Ranks(WORLD if backend == "gloo" else 2, tempfile.mkdtemp(), backend)
    ranks, results = _started[backend], [None] * world
    ranks.start(_seeded, function, *arguments, world=world)
    waiting = {pipe: rank for rank, pipe in enumerate(ranks.pipes[:world])}
    while waiting:
        for pipe in wait(list(waiting)):
            rank = waiting.pop(pipe)
            results[rank] = load(pipe.recv_bytes())
            if isinstance(results[rank], RankError):
                stop()  # others may wait for it
                raise results[rank]
    return results


def _seeded(group, function: Callable, *arguments: object) -> object:
    torch.manual_seed(0)
    return function(group, *arguments)


def messages(functions: Iterable[Callable]) -> list[str]:
    """Returns the message of the error that each function raises."""
    found = []
    for function in functions:
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            function()
        found.append(str(error.value))
    return found


def check_messages(function: Callable, *expected: str) -> None:
    """Checks that the messages that `function(group)` returns begin with the expected texts, on both of two ranks."""
    for found in run(function, 2):
        for message, start in zip(found, expected, strict=True):
            assert message.startswith(start), message


def stop() -> None:
    while _started:
        _started.popitem()[1].close()
