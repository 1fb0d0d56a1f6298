"""What the rows of an experiment say: numbers of variants over seeds, learning rates and steps."""

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
    """Those there are, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def in_order(rows: list[Row], titles: dict[str, str]) -> dict[str, str]:
    """Titles of the variants that have rows, in the order of the titles."""
    measured = set(values(rows, "variant"))
    if unknown := measured - set(titles):
        raise LookupError(f"rows of variants that are not known: {', '.join(sorted(unknown))}")
    return {name: title for name, title in titles.items() if name in measured}


def spread(rows: list[Row], **equal: object) -> Spread:
    """Of the values of these rows, one of each seed."""
    found = where(rows, **equal)
    numbers = [row["value"] for row in found]
    if not found or len(set(values(found, "seed"))) != len(found):
        raise LookupError(f"one row of each seed is meant by {equal}, got {len(found)} rows")
    return Spread(fmean(numbers), min(numbers), max(numbers), len(numbers))


def curve(rows: list[Row], against: str, **equal: object) -> tuple[list[float], list[float]]:
    """Means over the seeds of `against` and of the value, at each `at`."""
    found = where(rows, **equal)
    points = []
    for at in sorted(values(found, "at")):
        here = where(found, at=at)
        points.append((fmean(row[against] for row in here), fmean(row["value"] for row in here)))
    return [x for x, _ in points], [y for _, y in points]


def best_rate(rows: list[Row], variant: str, setting: str) -> float:
    """The learning rate with the highest mean accuracy over the tests and the seeds."""
    found = where(rows, variant=variant, setting=setting, measure="accuracy")
    return max(values(found, "lr"), key=lambda lr: fmean(row["value"] for row in where(found, lr=lr)))


def seconds_to_reach(rows: list[Row], loss: float, **equal: object) -> float | None:
    """Of training, until the validation loss is no more than that."""
    seconds, losses = curve(rows, "seconds", measure="val", **equal)
    return next((x for x, y in zip(seconds, losses, strict=True) if y <= loss), None)
