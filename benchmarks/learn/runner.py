"""Performs the runs of an experiment, each only once, even if several processes perform them."""

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
    """One training, independent of all others. `seconds` is its time on an H200, used until a run of it was measured."""

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
    data: Path  # one file of bytes; written if it does not exist
    compile: bool  # whether blocks of language models are compiled
    graphs: bool  # whether small models are trained with CUDA graphs
    steps: int | None = None  # replaces the setting's steps, for trials
    time: float | None = None  # replaces the setting's seconds of training, in experiments with equal time


@dataclass(frozen=True)
class Experiment:
    what: str
    runs: Callable[[torch.device], list[Run]]  # returns the runs with seed 1, the most important first
    execute: Callable[[Run, Place], Iterable[Row]]  # performs a run; its rows lack the columns that `perform` adds
    missing: Callable[[Run], str] = lambda run: ""  # returns why a run is impossible here, "" if it is possible


def perform(
    experiment: Experiment, runs: list[Run], place: Place, path: Path, *, budget: float = float("inf"), commit: str = ""
) -> int:
    """Performs the runs that are neither in the CSV nor performed by another process; returns how many failed.

    A run that is not expected to end within `budget` seconds from now is skipped. The expected time is the longest of earlier
    runs of the same variant and setting; if there are none, the larger of `run.seconds` and the longest time in the setting.
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
                torch.compiler.reset()  # the next run has another model
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
    """Returns a text with the last row of each measure."""
    last = {row["measure"]: row for row in found}
    return ", ".join(f"{name} at {row['at']} {row['value']:.4g}" for name, row in last.items())
