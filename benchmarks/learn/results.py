"""Statistics over the rows of an experiment: by variant, seed, learning rate and step."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

from benchmarks.learn.rows import Row


class Spread(NamedTuple):
    mean: float
    lowest: float
    highest: float
    count: int


def where(rows: Iterable[Row], **equal: object) -> list[Row]:
    return [row for row in rows if all(row.get(key) == x for key, x in equal.items())]


def values(rows: Iterable[Row], key: str) -> list:
    """Returns the distinct values of a column, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def in_order(rows: list[Row], titles: dict[str, str]) -> dict[str, str]:
    """Returns variant -> title for the variants that have rows, in the order of the titles."""
    measured = set(values(rows, "variant"))
    if unknown := measured - set(titles):
        raise LookupError(f"rows of variants that are not known: {', '.join(sorted(unknown))}")
    return {name: title for name, title in titles.items() if name in measured}


def spread(rows: list[Row], **equal: object) -> Spread:
    """Returns mean and range of the values of these rows, one per seed."""
    numbers = list(seed_values(rows, **equal).values())
    return Spread(fmean(numbers), min(numbers), max(numbers), len(numbers))


def above(rows: list[Row], variant: str, other: str, **equal: object) -> float:
    """Returns the difference of two variants, averaged over the seeds that both have."""
    own, others = (seed_values(rows, variant=name, **equal) for name in (variant, other))
    if not (seeds := own.keys() & others.keys()):
        raise LookupError(f"{variant} and {other} have no seed in common")
    return fmean(own[seed] - others[seed] for seed in seeds)


def seed_values(rows: list[Row], **equal: object) -> dict[int, float]:
    """Returns seed -> value. There must be one row for each seed."""
    found = where(rows, **equal)
    if not found or len(set(values(found, "seed"))) != len(found):
        raise LookupError(f"one row of each seed is meant by {equal}, got {len(found)} rows")
    return {row["seed"]: row["value"] for row in found}


def curve(rows: list[Row], against: str, **equal: object) -> tuple[list[float], list[float]]:
    """Returns means over the seeds of column `against` and of the value, for each `at` that all seeds have."""
    found = where(rows, **equal)
    seeds, points = len(values(found, "seed")), []
    for at in sorted(values(found, "at")):
        here = where(found, at=at)
        if len(here) == seeds:
            points.append((fmean(row[against] for row in here), fmean(row["value"] for row in here)))
    return [x for x, _ in points], [y for _, y in points]


def best_rate(rows: list[Row], variant: str, setting: str) -> float:
    """Returns the learning rate with the highest mean accuracy over tests and seeds."""
    found = where(rows, variant=variant, setting=setting, measure="accuracy")
    return max(values(found, "lr"), key=lambda lr: fmean(row["value"] for row in where(found, lr=lr)))


def seconds_to_reach(rows: list[Row], variant: str, other: str) -> float | None:
    """Returns the seconds of training until a variant reaches the other's last validation loss.

    It is the mean over the seeds that both have; None if a seed does not reach the loss.
    """
    reached = []
    for seed in sorted(set(values(where(rows, variant=variant), "seed")) & set(values(where(rows, variant=other), "seed"))):
        own, others = (where(rows, variant=name, seed=seed, measure="val") for name in (variant, other))
        reached.append(next((row["seconds"] for row in own if row["value"] <= others[-1]["value"]), None))
    return fmean(reached) if reached and None not in reached else None
