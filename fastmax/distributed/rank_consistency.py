"""Rank consistency check: every call begins with an exchange of arguments, so that a rank that differs is an error on all ranks
and not a wrong result, nor a collective that never ends.

A rank cannot tell from its own arguments whether those of another rank have changed, so nothing is remembered between calls.
Ranks exchange arguments in the key-value store of the group, where no message has a size that two ranks could see differently.
This takes time of the host and none of a GPU. Each rank writes what it asks for, rank 0 compares, and all ranks read its
verdict. Exchanges are numbered. An exchange has one verdict, the first that a rank writes, so all ranks return from it alike.
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

_SHORT = 16  # values of cu_seqlens that a message shows

_time_limit = timedelta(minutes=5)


def set_time_limit(seconds: float) -> None:
    """How long a rank waits for the others (default: 300 s) where they look whether all ask for the same, and on the CPU in
    every exchange. On GPUs NCCL's own limit, the `timeout` of the process group, holds for exchanges."""
    validation.check_positive("seconds", seconds)
    global _time_limit
    _time_limit = timedelta(seconds=seconds)


def time_limit() -> timedelta:
    return _time_limit


def check_consistency(group: dist.ProcessGroup, options: dict[str, str], tokens: int) -> tuple[int, ...]:
    """Returns the tokens of each rank, if all ranks ask for the same options.

    Raises:
        ValueError: they do not, on every rank.
        RuntimeError: a rank did not come within the time limit, on every rank that did, and on that rank if it comes later.
    """
    return _checker_of(group).check({"options": options, "tokens": tokens})


def mark_reported(error: Exception) -> Exception:
    """Returns the error, which every rank raises, with a mark that `report_errors` has no rank to tell."""
    error.fastmax_reported = True
    return error


@contextmanager
def report_errors(group: dist.ProcessGroup) -> Iterator[None]:
    """Tells the other ranks, which wait in `check_consistency`, of an error in what this rank was given. An error that all ranks raise, or
    that they have been told, passes."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if group.size() > 1 and not getattr(error, "fastmax_reported", False):
            mark_reported(error)
            _checker_of(group).refuse(f"{type(error).__name__}: {error}")
        raise


def digest(x: object) -> str:
    return hashlib.sha256(repr(x).encode()).hexdigest()[:16]


def describe_cu_seqlens(cu_seqlens: Tensor) -> str:
    """Values, too, where that does not make a device wait."""
    text = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)} on {cu_seqlens.device.type}"
    if cu_seqlens.device.type != "cpu":
        return text
    values = cu_seqlens.tolist()
    return f"{text} {values if cu_seqlens.numel() <= _SHORT else digest(values)}"


class _Checker:
    """Exchanges of arguments in a group, each with a number that all ranks count alike."""

    def __init__(self, group: dist.ProcessGroup):
        self._rank, self._world = group.rank(), group.size()
        # A connection of its own: a rank that waits does not keep other threads, or groups, from the store.
        store = _store_of(group).clone()
        # A group may be destroyed and made again on a store that holds what the first one left.
        lifetime = store.add(f"fastmax/lifetimes/{self._rank}", 1)
        self._store = dist.PrefixStore(f"fastmax/{lifetime}", store)
        self._held = 0
        self._written: list[str] = []  # keys of this rank that others may still read
        self._lock = Lock()

    def check(self, wanted: dict) -> tuple[int, ...]:
        with self._lock, self._naming_a_lost_store():
            number = self._next()
            verdict = self._collect(number, wanted) if self._rank == 0 else self._ask(number, wanted)
        if "error" in verdict:
            raise mark_reported((RuntimeError if verdict["late"] else ValueError)(f"fastmax.distributed: {verdict['error']}"))
        return tuple(verdict["tokens"])

    def refuse(self, message: str) -> None:
        """Does not wait for the others."""
        with self._lock, self._naming_a_lost_store():
            number = self._next()
            if self._rank == 0:
                self._decide(number, self._refused(0, message))
            else:
                self._write(number, {"error": message})

    def _next(self) -> int:
        self._held += 1
        return self._held

    def _collect(self, number: int, wanted: dict) -> dict:
        keys = [f"{number}/{rank}" for rank in range(1, self._world)]
        if all_came := self._arrive(keys):
            came = [json.loads(x) for x in self._store.multi_get(keys)]
        else:
            came = [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]
        verdict = self._decide(number, self._compare([wanted, *came]))
        if all_came:  # so all ranks have read the verdicts of earlier exchanges
            self._clean(keep=1)
        return verdict

    def _ask(self, number: int, wanted: dict) -> dict:
        self._write(number, wanted)
        key = f"{number}/verdict"
        if self._arrive([key]):
            verdict = json.loads(self._store.get(key))
        else:
            late = (
                f"rank 0 of {self._world} did not come within {_time_limit} to compare arguments with {self._rank}: it has "
                "ended, or calls with other arguments (or set_time_limit is too short)"
            )
            verdict = self._decide(number, {"error": late, "late": True})
        if verdict["by"] == 0:  # which has read what this rank wrote
            self._clean(keep=0)
        return verdict

    def _compare(self, came: list[dict | None]) -> dict:
        """The verdict of rank 0 on what each rank wants, None where it did not come."""
        for rank, wanted in enumerate(came):
            if wanted is not None and "error" in wanted:
                return self._refused(rank, wanted["error"])
        for rank, wanted in enumerate(came):
            if wanted is None:
                error = f"rank {rank} of {self._world} did not come within {_time_limit}: it has ended, or calls with other "
                return {"error": error + "arguments", "late": True}
        first = came[0]["options"]
        for rank, wanted in enumerate(came):
            other = wanted["options"]
            for name in first | other:
                if first.get(name) != other.get(name):
                    values = f"{first.get(name)} on rank 0 and {other.get(name)} on rank {rank}"
                    return {"error": f"{name} must be the same on all ranks, got {values}", "late": False}
        return {"tokens": [wanted["tokens"] for wanted in came]}

    @staticmethod
    def _refused(rank: int, message: str) -> dict:
        return {"error": f"rank {rank} refused its arguments: {message}", "late": False}

    def _write(self, number: int, wanted: dict) -> None:
        key = f"{number}/{self._rank}"
        self._written.append(key)
        self._store.set(key, json.dumps(wanted))

    def _decide(self, number: int, verdict: dict) -> dict:
        """The verdict of the exchange: this one, unless another rank has written one."""
        key = f"{number}/verdict"
        if self._rank == 0:
            self._written.append(key)
        return json.loads(self._store.compare_set(key, "", json.dumps(verdict | {"by": self._rank})))

    def _clean(self, keep: int) -> None:
        """Deletes the keys of this rank, except the last `keep`."""
        while len(self._written) > keep:
            self._store.delete_key(self._written.pop(0))

    def _arrive(self, keys: list[str]) -> bool:
        """Whether all keys are there within the time limit."""
        try:
            self._store.wait(keys, _time_limit)
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # of each kind of store its own
            return False
        return True

    @contextmanager
    def _naming_a_lost_store(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise RuntimeError(
                f"fastmax.distributed: the store of the process group does not answer on rank {self._rank} of {self._world}: "
                f"the process that holds it has ended ({error})"
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
