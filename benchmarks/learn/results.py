"""Statistics over the rows of an experiment: by variant, seed, learning rate and step."""

from __future__ import annotations

import pandas as pd

from benchmarks.report import where


def in_order(rows: pd.DataFrame, titles: dict[str, str], column: str = "variant") -> dict[str, str]:
    """Returns variant -> title for the variants that have rows, in the order of the titles. `column` has the variants."""
    measured = set(rows[column])
    if unknown := measured - set(titles):
        raise LookupError(f"rows of {column}s that are not known: {', '.join(sorted(unknown))}")
    return {name: title for name, title in titles.items() if name in measured}


def seed_values(rows: pd.DataFrame, **equal: object) -> pd.Series:
    """Returns seed -> value. There must be one row for each seed."""
    found = where(rows, **equal)
    if found.empty or found["seed"].duplicated().any():
        raise LookupError(f"one row of each seed is meant by {equal}, got {len(found)} rows")
    return found.set_index("seed")["value"]


def above(rows: pd.DataFrame, variant: str, other: str, **equal: object) -> float:
    """Returns the difference of two variants, averaged over the seeds that both have."""
    own, others = (seed_values(rows, variant=name, **equal) for name in (variant, other))
    differences = (own - others).dropna()
    if differences.empty:
        raise LookupError(f"{variant} and {other} have no seed in common")
    return differences.mean()


def curve(rows: pd.DataFrame, against: str, **equal: object) -> tuple[list[float], list[float]]:
    """Returns means over the seeds of column `against` and of the value, for each `at` that all seeds have."""
    found = where(rows, **equal)
    if found.duplicated(["at", "seed"]).any():
        raise LookupError(f"several runs of one seed are in a line: {equal}")
    by_at = found.groupby("at")
    means = by_at[[against, "value"]].mean()[by_at.size() == found["seed"].nunique()]
    return means[against].tolist(), means["value"].tolist()


def best_rate(rows: pd.DataFrame, variant: str, setting: str) -> float:
    """Returns the learning rate with the highest mean accuracy over tests and seeds."""
    return where(rows, variant=variant, setting=setting, measure="accuracy").groupby("lr")["value"].mean().idxmax()


def seconds_to_reach(rows: pd.DataFrame, variant: str, other: str) -> float | None:
    """Returns the seconds of training until a variant reaches the other's last validation loss.

    It is the mean over the seeds that both have; None if a seed does not reach the loss.
    """
    own, others = (where(rows, variant=name, measure="val") for name in (variant, other))
    last = others.groupby("seed")["value"].last()
    own = own[own["seed"].isin(last.index)]
    reached = own[own["value"] <= own["seed"].map(last)].groupby("seed")["seconds"].first()
    return reached.mean() if 0 < len(reached) == own["seed"].nunique() else None
