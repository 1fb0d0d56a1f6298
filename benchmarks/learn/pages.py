"""Makes the tables of docs/quality.md from the rows of the experiments. A section without a CSV says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

from benchmarks.learn import conversion, rows
from benchmarks.learn.recall import TITLES as RECALL
from benchmarks.learn.results import above, best_rate, in_order, seconds_to_reach, spread, values, where
from benchmarks.learn.rows import Row
from benchmarks.learn.variants import VARIANTS

FOLDER = "benchmarks/results/learn"
SAME_TIME = 1.1  # largest ratio of the times of two runs: a run ends with the step that is running
TITLES = {name: variant.title for name, variant in VARIANTS.items()}
CONVERSIONS = {name: variant.title for name, variant in conversion.VARIANTS.items()}

Lines = Iterator[list[str]]  # lines of a table; the first is the header
Table = Callable[[list[Row]], Lines]  # makes a table of the rows of one setting


def million(n: float) -> str:
    return f"{n / 1e6:.1f} M"


def equal_steps(found: list[Row]) -> Lines:
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
        loss, last = (spread(own, measure=measure) for measure in ("loss", "last_quarter"))
        differences = [f"{above(found, name, other, measure='loss'):+.4f}" for other in baselines]
        counts = [million(own[0]["parameters"]), str(loss.count)]
        losses = [f"{loss.mean:.4f}", f"{loss.lowest:.4f} to {loss.highest:.4f}", f"{last.mean:.4f}"]
        yield [title, *counts, *losses, *differences]


def equal_time(found: list[Row]) -> Lines:
    measured = in_order(found, TITLES)
    yield ["attention", "seconds", "tokens", "loss", "of the last quarter", "seconds until softmax (SDPA)'s last loss"]
    seconds = [row["seconds"] for row in where(found, measure="loss")]
    if max(seconds) > SAME_TIME * min(seconds):
        raise LookupError(f"runs of {min(seconds):.0f} and of {max(seconds):.0f} s of training are not of equal time")
    for name, title in measured.items():
        own = where(found, variant=name)
        loss, last = (spread(own, measure=measure).mean for measure in ("loss", "last_quarter"))
        ends, until = where(own, measure="loss"), seconds_to_reach(found, name, "softmax_sdpa")
        cells = [f"{fmean(row['seconds'] for row in ends):.0f}", million(fmean(row["tokens"] for row in ends))]
        yield [title, *cells, f"{loss:.4f}", f"{last:.4f}", "" if until is None else f"{until:.0f}"]


def ablation(found: list[Row]) -> Lines:
    yield ["layer", "loss", "of the last quarter", "above all parts"]
    for name, title in in_order(found, TITLES).items():
        loss, last = (spread(found, variant=name, measure=measure).mean for measure in ("loss", "last_quarter"))
        yield [title, f"{loss:.4f}", f"{last:.4f}", f"{above(found, name, 'p2_all', measure='loss'):+.4f}"]


def recall(found: list[Row]) -> Lines:
    pairs = sorted(values(where(found, measure="accuracy"), "at"))
    yield ["attention", "learning rate", *(f"{count} pairs" for count in pairs)]
    for name, title in in_order(found, RECALL).items():
        lr = best_rate(found, name, found[0]["setting"])
        here = where(found, variant=name, lr=lr, measure="accuracy")
        yield [title, f"{lr:.1e}", *(f"{spread(here, at=count).mean:.1f}" for count in pairs)]


def needle(found: list[Row]) -> Lines:
    lengths = sorted(values(where(found, measure="needle"), "at"))
    yield ["attention", *(f"{n // 1024}k tokens" if n >= 1024 else f"{n} tokens" for n in lengths), "validation loss"]
    for name, title in in_order(found, TITLES).items():
        own = where(found, variant=name)
        found_at = [[spread(own, measure=measure, at=n).mean for measure in ("needle", "letters")] for n in lengths]
        shares = [f"{facts:.0f}% ({letters:.0f}%)" for facts, letters in found_at]
        yield [title, *shares, f"{spread(own, measure='loss').mean:.4f}"]


def conversions(found: list[Row]) -> Lines:
    stages = {"before": "before", "swapped": "swapped", "fitted": "polynomial fitted", "transferred": "attention transferred"}
    stages["finetuned"] = "fine-tuned"
    yield ["exchanged for fastmax", *stages.values()]
    for name, title in in_order(found, CONVERSIONS).items():
        losses = {row["measure"]: row for row in where(found, variant=name)}
        means = [spread(found, variant=name, measure=stage).mean if stage in losses else None for stage in stages]
        yield [title, *("" if mean is None else f"{mean:.4f}" for mean in means)]


# Name of an experiment -> its table, and the figures below it: name -> alternative text
TABLES: dict[str, tuple[Table, dict[str, str]]] = {
    "equal-steps": (equal_steps, {"equal_steps": "validation loss by step"}),
    "equal-time": (equal_time, {"equal_time": "loss by seconds of training", "equal_time_position": "loss by position"}),
    "ablation": (ablation, {"ablation": "loss without each part"}),
    "recall": (recall, {"recall": "accuracy by pairs"}),
    "needle": (needle, {"needle": "facts found by length of the text"}),
    "conversion": (conversions, {}),
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
    found = rows.read(path)
    if not found:
        raise LookupError(f"{path} has no row")
    table, figures = TABLES[name]
    parts = []
    for setting in values(found, "setting"):
        own = where(found, setting=setting)
        header, *lines = table(own)
        parts += [f"{setting}. {conditions(own)}", as_table(header, lines)]
    parts += [f"![{shows}](figures/learn_{figure}.png)" for figure, shows in figures.items()]
    return "\n\n".join(parts)


def rows_of(name: str, setting: str, root: Path) -> list[Row]:
    """Returns the rows of an experiment in a setting."""
    return where(rows.read(root / FOLDER / f"{name}.csv"), setting=setting)


def losses(name: str, setting: str, root: Path) -> dict[str, float]:
    """Returns variant -> loss of the trained model, averaged over its seeds."""
    found = where(rows_of(name, setting, root), measure="loss")
    return {variant: spread(found, variant=variant).mean for variant in values(found, "variant")}


def commits(name: str, setting: str, root: Path) -> str:
    """Returns the commits at which the runs of an experiment in a setting were measured."""
    return ", ".join(sorted(values(rows_of(name, setting, root), "commit")))


def conditions(found: list[Row]) -> str:
    """Returns a sentence with the seeds, text, device, PyTorch version and commits of the rows."""
    seeds = sorted(values(found, "seed"))
    facts = [f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"]
    text = values([row for row in found if "data" in row], "data")
    if len(text) > 1:
        raise LookupError(f"runs on different texts cannot be compared: {' and '.join(text)}")
    facts += [f"text {text[0]}"] if text else []
    facts += [" and ".join(values(found, "device")), f"PyTorch {' and '.join(values(found, 'torch'))}"]
    measured_at = sorted(values(found, "commit"))
    facts += [f"measured at {'commit' if len(measured_at) == 1 else 'commits'} {', '.join(measured_at)}"]
    return f"{facts[0].capitalize()}; {'; '.join(facts[1:])}."
