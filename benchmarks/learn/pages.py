"""Makes the tables of docs/quality.md and docs/far_keys.md from the rows of experiments. A section without a CSV says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd

from benchmarks.learn import capacity, conversion
from benchmarks.learn.free_windows import FACTS
from benchmarks.learn.recall import TITLES as RECALL
from benchmarks.learn.results import above, best_rate, in_order, seconds_to_reach, seed_values
from benchmarks.learn.variants import VARIANTS
from benchmarks.report import read_csv, where

FOLDER = "benchmarks/results/learn"
SAME_TIME = 1.1  # largest ratio of the times of two runs: a run ends with the step that is running
TITLES = {name: variant.title for name, variant in VARIANTS.items()}
CAPACITIES = {name: variant.title for name, variant in capacity.VARIANTS.items()}
CONVERSIONS = {name: variant.title for name, variant in conversion.VARIANTS.items()}

Lines = Iterator[list[str]]  # lines of a table; the first is the header
Table = Callable[[pd.DataFrame], Lines]  # makes a table of the rows of one setting, or of those that share a table


def million(n: float) -> str:
    return f"{n / 1e6:.1f} M"


def equal_steps(found: pd.DataFrame) -> Lines:
    measured = in_order(found, TITLES)
    baselines = [name for name in ("softmax", "softmax_parts") if name in measured]
    yield [
        "attention",
        "weights",
        "seeds",
        "loss",
        "lowest to highest",
        "of the last quarter",
        *(f"above {TITLES[x]}" for x in baselines),
    ]
    for name, title in measured.items():
        own = where(found, variant=name)
        loss, last = (seed_values(own, measure=measure) for measure in ("loss", "last_quarter"))
        differences = [f"{above(found, name, other, measure='loss'):+.4f}" for other in baselines]
        counts = [million(own["parameters"].iloc[0]), str(len(loss))]
        losses = [f"{loss.mean():.4f}", f"{loss.min():.4f} to {loss.max():.4f}", f"{last.mean():.4f}"]
        yield [title, *counts, *losses, *differences]


def equal_time(found: pd.DataFrame) -> Lines:
    measured = in_order(found, TITLES)
    yield ["attention", "seconds", "tokens", "loss", "of the last quarter", "seconds until softmax (SDPA)'s last loss"]
    _check_time(where(found, measure="loss"))
    for name, title in measured.items():
        own = where(found, variant=name)
        loss, last = (seed_values(own, measure=measure).mean() for measure in ("loss", "last_quarter"))
        seconds, tokens = where(own, measure="loss")[["seconds", "tokens"]].mean()
        until = seconds_to_reach(found, name, "softmax_sdpa")
        yield [title, f"{seconds:.0f}", million(tokens), f"{loss:.4f}", f"{last:.4f}", "" if until is None else f"{until:.0f}"]


def large(found: pd.DataFrame) -> Lines:
    """Losses of the trained models, in windows of their longest training windows and in ranges of positions."""
    measured = in_order(found, TITLES)
    _check_time(where(found, measure="loss"))
    ends = [at for at in sorted(where(found, measure="position")["at"].unique()) if at >= 1024]
    ranges = [f"{at // 2048}k to {at // 1024}k" if at > 1024 else "0.5k to 1k" for at in ends]
    yield ["attention", "weights", "seeds", "steps", "tokens", "loss", *(f"at {x}" for x in ranges)]
    for name, title in measured.items():
        own = where(found, variant=name)
        loss = where(own, measure="loss")
        steps, tokens = loss[["step", "tokens"]].mean()
        counts = [million(own["parameters"].iloc[0]), str(len(loss)), f"{steps:.0f}", million(tokens)]
        positions = (seed_values(own, measure="position", at=at).mean() for at in ends)
        yield [title, *counts, spread(seed_values(loss), "{:.3f}"), *(f"{x:.3f}" for x in positions)]


def _check_time(ends: pd.DataFrame) -> None:
    shortest, longest = ends["seconds"].agg(["min", "max"])
    if longest > SAME_TIME * shortest:
        raise LookupError(f"runs of {shortest:.0f} and of {longest:.0f} s of training are not of equal time")


def free_windows(found: pd.DataFrame) -> Lines:
    """A line for each schedule of windows, attention and learning rate: losses in windows of 64k, and facts found."""
    _check_time(where(found, measure="whole"))
    lengths, limits = (sorted(where(found, measure=measure)["at"].unique()) for measure in ("whole needle", "within"))
    last = where(found, measure="whole position")["at"].max()
    yield [
        *("training windows", "attention", "learning rate", "seeds", "seconds", "tokens", "loss", "of the last 32nd"),
        *("loss within a training window", *(f"loss within {n // 1024}k" for n in limits)),
        *(f"facts, {tokens_of(n)}" for n in lengths),
    ]
    for setting in found["setting"].unique():
        here = where(found, setting=setting)
        for name, title in in_order(here, TITLES).items():
            for lr in sorted(where(here, variant=name)["lr"].unique()):
                own = where(here, variant=name, lr=lr)
                seconds, tokens = where(own, measure="whole")[["seconds", "tokens"]].mean()
                measured = {"whole": {}, "whole position": {"at": last}, "near": {}}
                cells = [spread(seed_values(own, measure=measure, **at), "{:.3f}") for measure, at in measured.items()]
                for n in limits:  # not every run has them
                    within = where(own, measure="within", at=n)
                    cells.append("" if within.empty else spread(seed_values(within), "{:.3f}"))
                facts = [f"{seed_values(own, measure='whole needle', at=n).mean():.0f}%" for n in lengths]
                counts = [f"{lr:.0e}", str(own["seed"].nunique()), f"{seconds:.0f}", million(tokens)]
                yield [setting.removesuffix(FACTS), title, *counts, *cells, *facts]


def ablation(found: pd.DataFrame) -> Lines:
    yield ["layer", "loss", "of the last quarter", "above all parts"]
    for name, title in in_order(found, TITLES).items():
        loss, last = (seed_values(found, variant=name, measure=measure).mean() for measure in ("loss", "last_quarter"))
        yield [title, f"{loss:.4f}", f"{last:.4f}", f"{above(found, name, 'p2_all', measure='loss'):+.4f}"]


def recall(found: pd.DataFrame) -> Lines:
    pairs = sorted(where(found, measure="accuracy")["at"].unique())
    yield ["attention", "learning rate", *(f"{count} pairs" for count in pairs)]
    for name, title in in_order(found, RECALL).items():
        lr = best_rate(found, name, found["setting"].iloc[0])
        here = where(found, variant=name, lr=lr, measure="accuracy")
        yield [title, f"{lr:.1e}", *(f"{seed_values(here, at=count).mean():.1f}" for count in pairs)]


def needle(found: pd.DataFrame) -> Lines:
    lengths = sorted(where(found, measure="needle")["at"].unique())
    yield ["attention", *map(tokens_of, lengths), "validation loss"]
    for name, title in in_order(found, TITLES).items():
        own = where(found, variant=name)
        found_at = [[seed_values(own, measure=measure, at=n).mean() for measure in ("needle", "letters")] for n in lengths]
        shares = [f"{facts:.0f}% ({letters:.0f}%)" for facts, letters in found_at]
        yield [title, *shares, f"{seed_values(own, measure='loss').mean():.4f}"]


def conversions(found: pd.DataFrame) -> Lines:
    stages = {"before": "before", "swapped": "swapped", "fitted": "polynomial fitted", "transferred": "attention transferred"}
    stages["finetuned"] = "fine-tuned"
    yield ["exchanged for fastmax", "seeds", *stages.values()]
    for name, title in in_order(found, CONVERSIONS).items():
        losses = {measure: seed_values(own) for measure, own in where(found, variant=name).groupby("measure")}
        means = (f"{losses[stage].mean():.4f}" if stage in losses else "" for stage in stages)
        yield [title, str(len(losses["before"])), *means]


def memory(found: pd.DataFrame) -> Lines:
    """Facts or values found, and losses: means over the seeds, lowest and highest."""
    shared = [measure for measure in ("needle", "accuracy") if measure in set(found["measure"])]
    columns = [(measure, at) for measure in shared for at in sorted(where(found, measure=measure)["at"].unique())]
    has_loss = "loss" in set(found["measure"])
    yield ["attention", "seeds", *map(_count_of, columns), *(["loss", f"above {TITLES['softmax_parts']}"] if has_loss else [])]
    for name, title in in_order(found, TITLES).items():
        own = where(found, variant=name)
        if "accuracy" in shared:
            own = where(own, lr=best_rate(found, name, own["setting"].iloc[0]))
        values = [spread(seed_values(own, measure=measure, at=at), "{:.0f}") for measure, at in columns]
        if has_loss:
            values += [spread(seed_values(own, measure="loss"), "{:.3f}")]
            values += [f"{above(found, name, 'softmax_parts', measure='loss'):+.3f}"]
        yield [title, str(own["seed"].nunique()), *values]


def capacities(found: pd.DataFrame) -> Lines:
    lengths = sorted(found["at"].unique())
    yield ["memory", "elements of its state", *map(tokens_of, lengths)]
    for name, title in in_order(found, CAPACITIES).items():
        own = where(found, variant=name)
        state = "" if name == "softmax" else million(own["parameters"].iloc[0])
        yield [title, state, *(f"{seed_values(own, at=n).mean():.0f}" for n in lengths)]


def _count_of(column: tuple[str, int]) -> str:
    measure, at = column
    return f"{at} pairs" if measure == "accuracy" else tokens_of(at)


def spread(values: pd.Series, form: str) -> str:
    """Returns the mean, and the lowest and the highest value where there are several."""
    mean, low, high = (form.format(x) for x in (values.mean(), values.min(), values.max()))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def tokens_of(n: int) -> str:
    return f"{n // 1024}k tokens" if n >= 1024 else f"{n} tokens"


# Name of an experiment -> its table, and the figures below it: name -> alternative text
TABLES: dict[str, tuple[Table, dict[str, str]]] = {
    "equal-steps": (equal_steps, {"equal_steps": "validation loss by step"}),
    "equal-time": (equal_time, {"equal_time": "loss by seconds of training", "equal_time_position": "loss by position"}),
    "free-windows": (free_windows, {"free_windows": "loss by position after growing windows"}),
    "large": (large, {}),
    "ablation": (ablation, {"ablation": "loss without each part"}),
    "recall": (recall, {"recall": "accuracy by pairs"}),
    "needle": (needle, {"needle": "facts found by length of the text"}),
    "conversion": (conversions, {}),
    "memory": (memory, {}),
    "capacity": (capacities, {}),
}
# Experiments whose settings share tables: name -> a function from a setting to the title of its table
TITLE_OF_TABLE: dict[str, Callable[[str], str]] = {
    "free-windows": lambda setting: "With facts" if setting.endswith(FACTS) else "Source trees",
}


def section(name: str, root: Path, as_table: Callable[[list[str], list[list[str]]], str]) -> str:
    """Returns the section of an experiment in Markdown.

    Args:
        name: name of the experiment.
        root: root of the working tree.
        as_table: (header, lines) -> Markdown.

    Raises:
        LookupError: the CSV lacks rows that the table needs, or has runs of one setting that cannot be compared.
    """
    path = root / FOLDER / f"{name}.csv"
    if not path.exists():
        return f"Not measured yet: `python -m benchmarks.learn {name}`."
    table, figures = TABLES[name]
    found, parts = read_csv(path), []
    for title, own in found.groupby(found["setting"].map(TITLE_OF_TABLE.get(name, str)), sort=False):
        header, *lines = table(own)
        parts += [f"{title}. {conditions(own)}", as_table(header, lines)]
    parts += [f"![{shows}](figures/learn_{figure}.png)" for figure, shows in figures.items()]
    return "\n\n".join(parts)


def rows_of(name: str, setting: str, root: Path) -> pd.DataFrame:
    """Returns the rows of an experiment in a setting."""
    return where(read_csv(root / FOLDER / f"{name}.csv"), setting=setting)


def losses(name: str, setting: str, root: Path) -> dict[str, float]:
    """Returns variant -> loss of the trained model, averaged over its seeds."""
    found = where(rows_of(name, setting, root), measure="loss")
    return {variant: seed_values(own).mean() for variant, own in found.groupby("variant")}


def commits(name: str, setting: str, root: Path, variant: str | None = None) -> str:
    """Returns the commits at which the runs of an experiment in a setting were measured; of one variant, or of all."""
    found = rows_of(name, setting, root)
    return ", ".join(sorted((found if variant is None else where(found, variant=variant))["commit"].unique()))


def conditions(found: pd.DataFrame) -> str:
    """Returns a sentence with the seeds, text, device, PyTorch version and commits of the rows."""
    seeds, commits = (sorted(found[key].unique()) for key in ("seed", "commit"))
    texts, devices, versions = (found[key].dropna().unique() for key in ("data", "device", "torch"))
    if len(texts) > 1:
        raise LookupError(f"runs on different texts cannot be compared: {' and '.join(texts)}")
    facts = [f"Seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}", *(f"text {text}" for text in texts)]
    facts += [" and ".join(devices), f"PyTorch {' and '.join(versions)}"]
    return f"{'; '.join(facts)}; measured at commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}."
