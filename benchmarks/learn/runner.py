"""Runs what an experiment consists of: each run once, whoever asks for it and however often."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.learn import rows
from benchmarks.learn.rows import Row


@dataclass(frozen=True)
class Run:
    """One training, independent of all others. Its `seconds` are what it took on an H200, until a run has told better."""

    variant: str
    setting: str
    lr: float
    seed: int
    seconds: float = 60.0

    @property
    def key(self) -> tuple:
        return tuple(getattr(self, name) for name in rows.KEY)

    def __str__(self) -> str:
        return f"{self.variant}, {self.setting}, learning rate {self.lr:g}, seed {self.seed}"


@dataclass(frozen=True)
class Place:
    """Device, text and options of a run."""

    device: torch.device
    data: Path  # one file of bytes, made where it is not there
    compile: bool  # blocks of language models through torch.compile
    graphs: bool  # small models through CUDA graphs
    steps: int | None = None  # in place of the setting's; for trying things out
    time: float | None = None  # seconds of training in place of the setting's, where these are equal


@dataclass(frozen=True)
class Experiment:
    what: str
    runs: Callable[[torch.device], list[Run]]  # of one seed, numbered 1; the most important first
    execute: Callable[[Run, Place], Iterable[Row]]  # rows without what `perform` adds
    missing: Callable[[Run], str] = lambda run: ""  # why a run cannot be done here, "" if it can


def perform(
    experiment: Experiment, runs: list[Run], place: Place, path: Path, *, budget: float = float("inf"), commit: str = ""
) -> int:
    """Does the runs whose rows are not in the CSV yet, and are not being done by another process; returns how many failed.

    A run that would not end within `budget` seconds from now is not begun. How long one takes is known from those that ended,
    of the same variant and setting; else it is what the run says, and no less than the longest of the same setting.
    """
    began, failed, left = time.monotonic(), 0, 0
    environment = {key: x for key, x in report.environment(place.device, commit).items() if key in rows.COLUMNS}
    for run in runs:
        if why := experiment.missing(run):
            print(f"{run}: left out: {why}", flush=True)
            continue
        with rows.locked(path, str(run.key), wait=False) as mine:
            known = rows.read(path)
            if not mine or any(rows.key(row) == run.key for row in known):
                continue
            expected = expected_seconds(run, known)
            if time.monotonic() - began + expected > budget:
                print(f"{run}: not begun: about {expected:.0f} s would not fit into the {budget:.0f} s", flush=True)
                left += 1
                continue
            print(f"{run}: begun, about {expected:.0f} s", flush=True)
            start = time.monotonic()
            try:
                found = list(experiment.execute(run, place))
            except Exception:
                print(f"{run}: failed\n{traceback.format_exc()}", flush=True)
                failed += 1
                continue
            finally:
                torch.compiler.reset()  # the next model is another
                if place.device.type == "cuda":
                    torch.cuda.empty_cache()
            constant = dict(zip(rows.KEY, run.key, strict=True)) | {"wall": round(time.monotonic() - start, 1)} | environment
            rows.append(path, [row | constant for row in found])
            print(f"{run}: {summary(found)}, {constant['wall']:.0f} s", flush=True)
    print(f"{path}: {left} not begun, {failed} failed", flush=True)
    return failed


def expected_seconds(run: Run, known: list[Row]) -> float:
    walls = [(row["variant"], row["wall"]) for row in known if row["setting"] == run.setting]
    own = [wall for variant, wall in walls if variant == run.variant]
    return max(own or [run.seconds, *(wall for _, wall in walls)])


def summary(found: list[Row]) -> str:
    """The last row of each measure."""
    last = {row["measure"]: row for row in found}
    return ", ".join(f"{name} at {row['at']} {row['value']:.4g}" for name, row in last.items())
