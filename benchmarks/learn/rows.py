"""The rows of an experiment: a CSV in which every number has a row, written a whole run at a time.

A run is known by `variant`, `setting`, `lr` and `seed`. Each of its rows is a `value` of a `measure` (a loss, a percentage)
`at` something (a step, a position, a number of tokens), after so many steps, tokens and seconds of training; `wall` is what the
run took with all else.
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
    """Numbers as numbers; a cell that was left out stays out. [] where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{key: _TYPES.get(key, str)(cell) for key, cell in row.items() if cell != ""} for row in csv.DictReader(file)]


def key(row: Row) -> tuple:
    """Key of the run that a row belongs to."""
    return tuple(row[name] for name in KEY)


def append(path: Path, new: list[Row]) -> None:
    """All of them or, where the process dies, none; other processes may do the same."""
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
    """Adds to the CSVs of `target` the runs that those of the same name in `source` have besides; how many runs that were."""
    added = 0
    for path in sorted(source.glob("*.csv")):
        known = {key(row) for row in read(target / path.name)}
        new = [row for row in read(path) if key(row) not in known]
        append(target / path.name, new)
        added += len({key(row) for row in new})
    return added


@contextmanager
def locked(path: Path, name: str, wait: bool) -> Iterator[bool]:
    """Whether this process holds the lock `name` of a path. It ends with the process, however that ends."""
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
