"""A pool of processes that torch.distributed connects by gloo: `run(function, ranks, *arguments)`.

The processes start once for all tests of a worker of pytest, from a server that has imported torch already.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait

RANKS = 4
TIMEOUT = 60  # seconds that a rank waits for others
GRACE = 2  # seconds, for those that are to fail after one has
_pool: list[tuple] = []  # connection and process of each rank


def run(function: Callable, ranks: int, *arguments: object) -> list:
    """`function(group, *arguments)` in the first so many processes; what each returns. A function of a module's own.

    Raises:
        AssertionError: with the tracebacks of ranks that raised.
    """
    if not _pool:
        _start()
    for connection, _ in _pool[:ranks]:
        connection.send((function, ranks, arguments))
    waiting, results, failures = {connection: rank for rank, (connection, _) in enumerate(_pool[:ranks])}, [None] * ranks, []
    while waiting and (ready := wait(list(waiting), timeout=GRACE if failures else None)):
        for connection in ready:
            rank = waiting.pop(connection)
            text, results[rank] = connection.recv()
            failures += [f"rank {rank}: {text}"] if text is not None else []
    if failures:
        stop()  # ranks that wait for others would answer the next call
        raise AssertionError("\n".join(failures))
    return results


def _start() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "fastmax"])
    path = os.path.join(tempfile.mkdtemp(), "store")
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(rank, path, theirs), daemon=True)
        process.start()
        theirs.close()
        _pool.append((ours, process))
    atexit.register(stop)


def stop() -> None:
    for connection, process in _pool:
        connection.close()
        process.terminate()
        process.join()
    _pool.clear()


def _serve(rank: int, path: str, connection) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT)
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS, timeout=timeout)
    groups = [distributed.new_group(range(size), timeout=timeout) for size in range(1, RANKS + 1)]
    while True:
        try:
            function, ranks, arguments = connection.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            answer = None, function(groups[ranks - 1], *arguments)
        except Exception:
            answer = traceback.format_exc(), None
        connection.send(answer)
