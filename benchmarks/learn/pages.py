"""The tables of docs/quality.md: each experiment's rows as Markdown. A section of which there is no CSV yet says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.learn import conversion, rows
from benchmarks.learn.recall import TITLES as RECALL
from benchmarks.learn.results import best_rate, in_order, seconds_to_reach, spread, values, where
from benchmarks.learn.rows import Row
from benchmarks.learn.variants import VARIANTS

FOLDER = "benchmarks/results/learn"
TITLES = {name: variant.title for name, variant in VARIANTS.items()}
CONVERSIONS = {name: variant.title for name, variant in conversion.VARIANTS.items()}

Lines = Iterator[list[str]]  # the first is the header
Table = Callable[[list[Row]], Lines]  # of the rows of one setting


def million(n: float) -> str:
    return f"{n / 1e6:.1f} M"


def equal_steps(found: list[Row]) -> Lines:
    measured = in_order(found, TITLES)
    baselines = [name for name in ("softmax", "softmax_parts") if name in measured]
    yield [
        "attention",
        "weights",
        "loss",
        "lowest to highest",
        "of the last quarter",
        *(f"above {TITLES[x]}" for x in baselines),
    ]
    for name, title in measured.items():
        own = where(found, variant=name)
        loss, last = (spread(own, measure=measure) for measure in ("loss", "last_quarter"))
        above = [f"{loss.mean - spread(found, variant=x, measure='loss').mean:+.4f}" for x in baselines]
        weights = million(own[0]["parameters"])
        yield [title, weights, f"{loss.mean:.4f}", f"{loss.lowest:.4f} to {loss.highest:.4f}", f"{last.mean:.4f}", *above]


def equal_time(found: list[Row]) -> Lines:
    measured = in_order(found, TITLES)
    softmax = spread(found, variant="softmax_sdpa", measure="loss").mean if "softmax_sdpa" in measured else None
    yield ["attention", "seconds", "tokens", "loss", "of the last quarter", "seconds until softmax (SDPA)'s last loss"]
    for name, title in measured.items():
        own = where(found, variant=name)
        loss, last = (spread(own, measure=measure).mean for measure in ("loss", "last_quarter"))
        end = where(own, measure="loss")[0]
        until = None
        if softmax is not None:
            final = where(found, variant="softmax_sdpa", measure="val")[-1]["value"]
            until = seconds_to_reach(found, final, variant=name)
        cells = [f"{end['seconds']:.0f}", million(end["tokens"]), f"{loss:.4f}", f"{last:.4f}"]
        yield [title, *cells, "" if until is None else f"{until:.0f}"]


def ablation(found: list[Row]) -> Lines:
    yield ["layer", "loss", "of the last quarter", "above all parts"]
    whole = spread(found, variant="p2_all", measure="loss").mean
    for name, title in in_order(found, TITLES).items():
        loss, last = (spread(found, variant=name, measure=measure).mean for measure in ("loss", "last_quarter"))
        yield [title, f"{loss:.4f}", f"{last:.4f}", f"{loss - whole:+.4f}"]


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
        shares = [f"{spread(own, measure='needle', at=n).mean:.0f}%" for n in lengths]
        yield [title, *shares, f"{spread(own, measure='loss').mean:.4f}"]


def conversions(found: list[Row]) -> Lines:
    stages = {"before": "before", "swapped": "at once", "transferred": "after the transfer", "finetuned": "after fine-tuning"}
    yield ["exchanged for fastmax", *stages.values()]
    for name, title in in_order(found, CONVERSIONS).items():
        losses = {row["measure"]: row for row in where(found, variant=name)}
        means = [spread(found, variant=name, measure=stage).mean if stage in losses else None for stage in stages]
        yield [title, *("" if mean is None else f"{mean:.4f}" for mean in means)]


# The name of an experiment, and the figures under its tables with what they show
TABLES: dict[str, tuple[Table, dict[str, str]]] = {
    "equal-steps": (equal_steps, {"equal_steps": "validation loss by step"}),
    "equal-time": (equal_time, {"equal_time": "loss by seconds of training", "equal_time_position": "loss by position"}),
    "ablation": (ablation, {"ablation": "loss without each part"}),
    "recall": (recall, {"recall": "accuracy by pairs"}),
    "needle": (needle, {"needle": "facts found by length of the text"}),
    "conversion": (conversions, {}),
}


def section(name: str, root: Path, as_table: Callable[[list[str], list[list[str]]], str]) -> str:
    """
    Args:
        name: of an experiment.
        root: of the working tree.
        as_table: (header, lines) -> Markdown.

    Raises:
        LookupError: the CSV is there and has not what the table shows.
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


def conditions(found: list[Row]) -> str:
    """Seeds, text, device and PyTorch, as the rows have them."""
    seeds = sorted(values(found, "seed"))
    facts = [f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"]
    text = " and ".join(values([row for row in found if "data" in row], "data"))
    facts += [f"text {text}"] if text else []
    facts += [" and ".join(values(found, "device")), f"PyTorch {' and '.join(values(found, 'torch'))}"]
    return f"{facts[0].capitalize()}; {'; '.join(facts[1:])}."
