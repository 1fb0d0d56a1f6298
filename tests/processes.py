"""`run`: a function in processes that torch.distributed connects, the same ones for all tests of this process."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable

import torch
from ranks import Ranks

WORLD = 4
_started: list[Ranks] = []


def run(function: Callable, world: int, *arguments: object) -> list:
    """`function(group, *arguments)` on the first `world` ranks; what each returns, or the first error."""
    if not _started:
        _started.append(Ranks(WORLD, tempfile.mkdtemp()))
        atexit.register(stop)
    ranks = _started[0]
    ranks.start(_seeded, function, *arguments, world=world)
    waiting, errors = list(ranks.pipes[:world]), []
    while waiting and (ready := wait(waiting, timeout=GRACE if errors else None)):
        for pipe in ready:
            waiting.remove(pipe)
    if errors:
        stop()  # a rank may still wait for one that raised
    return


def _seeded(group, function: Callable, *arguments: object) -> object:
    torch.manual_seed(0)
    return function(group, *arguments)


def stop() -> None:
    while _started:
        _started.pop().close()
