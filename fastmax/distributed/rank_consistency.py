"""Rank consistency check: compares the arguments of a call across ranks before the first collective.

Ranks with different arguments would compute wrong results or wait forever in a collective. The check raises an error on all
ranks instead. It runs in every call, because a rank cannot see that the arguments of another rank have changed.

Each rank writes its arguments to the key-value store of the process group. Rank 0 compares them and writes a verdict, which all
ranks read. The check uses the host only. A store, unlike a collective, does not need messages of the same size on all ranks.

Checks are numbered. Each has exactly one verdict, the first that any rank writes, so all ranks see the same outcome.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock
from weakref import WeakKeyDictionary

from torch import Tensor
from torch import distributed as dist

from fastmax.core import validation

_SHORT = 16  # up to this length, a message shows the values of cu_seqlens

_time_limit = timedelta(minutes=5)


def set_time_limit(seconds: float) -> None:
    """Sets how long a rank waits for the other ranks (default: 300 s).

    The limit applies to rank consistency checks and, on CPUs, to every collective. On GPUs, collectives have the `timeout` of
    the process group.

    Args:
        seconds: > 0.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    validation.check_positive("seconds", seconds)
    global _time_limit
    _time_limit = timedelta(seconds=seconds)


def time_limit() -> timedelta:
    """Returns the limit that `set_time_limit` has set."""
    return _time_limit


def check_consistency(group: dist.ProcessGroup, options: dict[str, str], tokens: int) -> tuple[int, ...]:
    """Checks that all ranks pass the same options. Returns the number of tokens of each rank.

    Raises:
        ValueError: options differ, or a rank reported invalid arguments. Raised on all ranks.
        RuntimeError: a rank did not call within the time limit. Raised on all ranks, on the late one when it calls.
    """
    return _checker_of(group).check({"options": options, "tokens": tokens})


def mark_reported(error: Exception) -> Exception:
    """Marks an error that all ranks raise, so that `report_errors` does not report it. Returns the error."""
    error.fastmax_reported = True  # type: ignore[attr-defined]
    return error


@contextmanager
def report_errors(group: dist.ProcessGroup) -> Iterator[None]:
    """Reports a TypeError or ValueError in the block to the other ranks, whose `check_consistency` raises it.

    Errors marked by `mark_reported` are not reported again.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if group.size() > 1 and not getattr(error, "fastmax_reported", False):
            mark_reported(error)
            _checker_of(group).refuse(f"{type(error).__name__}: {error}")
        raise


def digest(x: object) -> str:
    """Returns a short hash of `repr(x)`."""
    return hashlib.sha256(repr(x).encode()).hexdigest()[:16]


def describe_cu_seqlens(cu_seqlens: Tensor) -> str:
    """Returns dtype, shape and device, and on the CPU the values: reading them from a GPU would synchronise."""
    text = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)} on {cu_seqlens.device.type}"
    if cu_seqlens.device.type != "cpu":
        return text
    values = cu_seqlens.tolist()
    return f"{text} {values if cu_seqlens.numel() <= _SHORT else digest(values)}"


class _Checker:
    """Runs the checks of one process group. Every rank counts them, so a check has the same number on all ranks.

    An entry holds the options and the number of tokens of a rank, or the error that it raised.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._rank, self._world = group.rank(), group.size()
        # A separate connection: a waiting rank must not block the store for other threads or groups.
        store = _store_of(group).clone()
        # A group that is destroyed and recreated on the same store must not read the keys of the first one.
        lifetime = store.add(f"fastmax/lifetimes/{self._rank}", 1)
        self._store = dist.PrefixStore(f"fastmax/{lifetime}", store)
        self._checks = 0
        self._written: list[str] = []  # keys of this rank that other ranks may still read
        self._lock = Lock()

    def check(self, entry: dict) -> tuple[int, ...]:
        """Compares `entry` with those of the other ranks. Returns the number of tokens of each rank."""
        with self._lock, self._explaining_a_lost_store():
            number = self._next()
            verdict = self._compare_all(number, entry) if self._rank == 0 else self._submit(number, entry)
        if "error" in verdict:
            raise mark_reported((RuntimeError if verdict["late"] else ValueError)(f"fastmax.distributed: {verdict['error']}"))
        return tuple(verdict["tokens"])

    def refuse(self, message: str) -> None:
        """Reports an error as the outcome of the next check. Does not wait for the other ranks."""
        with self._lock, self._explaining_a_lost_store():
            number = self._next()
            if self._rank == 0:
                self._decide(number, self._refused(0, message))
            else:
                self._write(number, {"error": message})

    def _next(self) -> int:
        self._checks += 1
        return self._checks

    def _compare_all(self, number: int, entry: dict) -> dict:
        """Rank 0: waits for the entries of the other ranks and writes the verdict. Returns it."""
        keys = [f"{number}/{rank}" for rank in range(1, self._world)]
        if is_complete := self._wait(keys):
            entries = [json.loads(x) for x in self._store.multi_get(keys)]
        else:
            entries = [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]
        verdict = self._decide(number, self._compare([entry, *entries]))
        if is_complete:  # then all ranks have read the verdicts of earlier checks
            self._clean(keep=1)
        return verdict

    def _submit(self, number: int, entry: dict) -> dict:
        """Other ranks: writes the entry and waits for the verdict. Returns it."""
        self._write(number, entry)
        key = f"{number}/verdict"
        if self._wait([key]):
            verdict = json.loads(self._store.get(key))
        else:
            late = (
                f"rank 0 of {self._world} did not call within {_time_limit} to compare arguments with {self._rank}: it has "
                "exited, or calls with other arguments (or set_time_limit is too short)"
            )
            verdict = self._decide(number, {"error": late, "late": True})
        if verdict["by"] == 0:  # then rank 0 has read the keys of this rank
            self._clean(keep=0)
        return verdict

    def _compare(self, entries: list[dict | None]) -> dict:
        """Returns the verdict on the entries of all ranks. None stands for a rank that did not call in time."""
        for rank, entry in enumerate(entries):
            if entry is not None and "error" in entry:
                return self._refused(rank, entry["error"])
        for rank, entry in enumerate(entries):
            if entry is None:
                error = f"rank {rank} of {self._world} did not call within {_time_limit}: it has exited, or calls with other "
                return {"error": error + "arguments", "late": True}
        complete = [entry for entry in entries if entry is not None]  # all of them
        first = complete[0]["options"]
        for rank, entry in enumerate(complete):
            other = entry["options"]
            for name in first | other:
                if first.get(name) != other.get(name):
                    values = f"{first.get(name)} on rank 0 and {other.get(name)} on rank {rank}"
                    return {"error": f"{name} must be the same on all ranks, got {values}", "late": False}
        return {"tokens": [entry["tokens"] for entry in complete]}

    @staticmethod
    def _refused(rank: int, message: str) -> dict:
        return {"error": f"rank {rank} refused its arguments: {message}", "late": False}

    def _write(self, number: int, entry: dict) -> None:
        key = f"{number}/{self._rank}"
        self._written.append(key)
        self._store.set(key, json.dumps(entry))

    def _decide(self, number: int, verdict: dict) -> dict:
        """Writes a verdict unless another rank has written one. Returns the verdict of the check."""
        key = f"{number}/verdict"
        if self._rank == 0:
            self._written.append(key)
        return json.loads(self._store.compare_set(key, "", json.dumps(verdict | {"by": self._rank})))

    def _clean(self, keep: int) -> None:
        """Deletes the keys of this rank except the last `keep`."""
        while len(self._written) > keep:
            self._store.delete_key(self._written.pop(0))

    def _wait(self, keys: list[str]) -> bool:
        """Waits for the keys. Returns whether all were written within the time limit."""
        try:
            self._store.wait(keys, _time_limit)
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # a timeout; each kind of store raises its own subclass
            return False
        return True

    @contextmanager
    def _explaining_a_lost_store(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise RuntimeError(
                f"fastmax.distributed: the store of the process group does not answer on rank {self._rank} of {self._world}: "
                f"the process that holds it has exited ({error})"
            ) from error


_of_group: WeakKeyDictionary[dist.ProcessGroup, _Checker] = WeakKeyDictionary()
_making = Lock()


def _checker_of(group: dist.ProcessGroup) -> _Checker:
    with _making:
        if group not in _of_group:
            _of_group[group] = _Checker(group)
        return _of_group[group]


def _store_of(group: dist.ProcessGroup) -> dist.Store:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)  # older PyTorch
