"""The rows of an experiment: a CSV with one row per number, to which a run adds all of its rows at once.

A run is identified by `variant`, `setting`, `lr` and `seed`. Each of its rows has the `value` of a `measure` (a loss, a
percentage) `at` a step, a position or a number of tokens, and the steps, tokens and seconds of training until then. `wall` is
the time of the whole run.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Row = dict[str, object]
KEY = ("variant", "setting", "lr", "seed")
_RESULT = {"at": int, "value": float, "step": int, "tokens": int, "seconds": float, "wall": float, "parameters": int}
_TYPES = {"lr": float, "seed": int} | _RESULT
COLUMNS = (*KEY, "measure", *_RESULT, "data", "device", "kernels", "torch", "commit")


def read(path: Path) -> list[Row]:
    """Reads a CSV; [] if there is no file. Numbers are converted, empty cells are left out."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{key: _TYPES.get(key, str)(cell) for key, cell in row.items() if cell != ""} for row in csv.DictReader(file)]


def key(row: Row) -> tuple:
    """Returns the key of the run that a row belongs to."""
    return tuple(row[name] for name in KEY)


def append(path: Path, new: list[Row]) -> None:
    """Adds rows to a CSV: all, or none if the process dies. Several processes may add rows at a time."""
    if unknown := {key for row in new for key in row} - set(COLUMNS):
        raise ValueError(f"rows have the columns {', '.join(COLUMNS)}, got {', '.join(sorted(unknown))}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path, "rows", wait=True):
        written = path.with_suffix(f".{os.getpid()}.tmp")
        with written.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="")
            writer.writeheader()
            writer.writerows([*read(path), *new])
        written.replace(path)


def collect(source: Path, target: Path) -> int:
    """Adds to the CSVs in `target` the runs that only the CSVs of the same name in `source` have; returns their number."""
    added = 0
    for path in sorted(source.glob("*.csv")):
        known = {key(row) for row in read(target / path.name)}
        new = [row for row in read(path) if key(row) not in known]
        append(target / path.name, new)
        added += len({key(row) for row in new})
    return added


@contextmanager
def locked(path: Path, name: str, wait: bool) -> Iterator[bool]:
    """Locks `name` of a path; yields whether this process got the lock. The lock is released even if the process dies."""
    folder = Path(tempfile.gettempdir()) / f"fastmax-learn-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    digest = hashlib.sha256(f"{path.resolve()} {name}".encode()).hexdigest()[:24]
    with (folder / digest).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
