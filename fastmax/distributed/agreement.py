"""Whether all ranks of a group ask for the same: one look at first use, so that a rank that differs is an error on all of
them and not a collective that never ends.

Ranks meet in the group's key-value store, where no message has a size that two ranks could see differently: each writes what
it asks for, the first compares, all read what came of it. What was agreed on is remembered by what was asked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta
from weakref import WeakKeyDictionary

from torch import distributed as dist

from fastmax import validation

_time_limit = timedelta(minutes=5)


def set_time_limit(seconds: float) -> None:
    """How long a rank waits for the others (default: 300 s) where they look whether all ask for the same, and on the CPU in
    every exchange. On GPUs NCCL's own limit, the `timeout` of the process group, holds for exchanges."""
    validation.check_positive("seconds", seconds)
    global _time_limit
    _time_limit = timedelta(seconds=seconds)


def time_limit() -> timedelta:
    return _time_limit


@dataclass
class _Meetings:
    """Of a group."""

    held: int = 0
    agreed: dict[tuple, tuple[int, ...]] = field(default_factory=dict)


_of_group: WeakKeyDictionary[dist.ProcessGroup, _Meetings] = WeakKeyDictionary()


def agree(group: dist.ProcessGroup, options: dict[str, str], tokens: int) -> tuple[int, ...]:
    """The tokens of each rank, once all ask for the same options.

    Raises:
        ValueError: they do not, on every rank.
        RuntimeError: a rank did not come within the time limit, on every rank that did.
    """
    meetings = _of_group.setdefault(group, _Meetings())
    key = (tokens, *options.items())
    if key not in meetings.agreed:
        meetings.agreed[key] = _meet(group, {"options": options, "tokens": tokens})
    return meetings.agreed[key]


def refuse(group: dist.ProcessGroup, error: Exception) -> None:
    """Tells the others, if they wait in `agree`, that this rank raises an error of its own."""
    _meet(group, {"error": f"{type(error).__name__}: {error}"}, waits=False)


def _meet(group: dist.ProcessGroup, wanted: dict, waits: bool = True) -> tuple[int, ...]:
    rank, world = group.rank(), group.size()
    meetings = _of_group.setdefault(group, _Meetings())
    store = dist.PrefixStore(f"fastmax/{meetings.held}", _store_of(group))
    meetings.held += 1
    store.set(str(rank), json.dumps(wanted))
    if rank == 0:
        verdict = _compare(store, world, waits)
        store.set("verdict", json.dumps(verdict))
    elif waits:
        if not _arrives(store, "verdict"):
            raise RuntimeError(
                f"fastmax.distributed: rank 0 of {world} did not come within {_time_limit} to compare arguments with {rank}: "
                "it has ended, or calls with other arguments (or set_time_limit is too short)"
            )
        verdict = json.loads(store.get("verdict"))
    if not waits:
        return ()
    if "error" in verdict:
        raise (RuntimeError if verdict["late"] else ValueError)(f"fastmax.distributed: {verdict['error']}")
    return tuple(verdict["tokens"])


def _store_of(group: dist.ProcessGroup) -> dist.Store:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)  # older PyTorch


def _compare(store: dist.Store, world: int, waits: bool) -> dict:
    """What rank 0 makes of what all ranks want; the first that differs decides."""
    tokens, first = [], None
    for rank in range(world if waits else 1):
        if not _arrives(store, str(rank)):
            error = f"rank {rank} of {world} did not come within {_time_limit}: it has ended, or calls with other arguments"
            return {"error": error, "late": True}
        wanted = json.loads(store.get(str(rank)))
        store.delete_key(str(rank))
        if "error" in wanted:
            return {"error": f"rank {rank} refused its arguments: {wanted['error']}", "late": False}
        first = wanted["options"] if first is None else first
        for name, value in first.items():
            other = wanted["options"].get(name)
            if other != value:
                error = f"{name} must be the same on all ranks, got {value} on rank 0 and {other} on rank {rank}"
                return {"error": error, "late": False}
        tokens.append(wanted["tokens"])
    return {"tokens": tokens}


def _arrives(store: dist.Store, key: str) -> bool:
    try:
        store.wait([key], _time_limit)
    except RuntimeError:  # of each kind of store its own
        return False
    return True
