"""Draws figures of the results: `python -m benchmarks.learn figures`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from benchmarks.learn.free_windows import SHOWN
from benchmarks.learn.pages import TITLES
from benchmarks.learn.recall import TITLES as RECALL
from benchmarks.learn.results import above, best_rate, curve, in_order
from benchmarks.report import read_csv, where

FIGURES = Path(__file__).parents[2] / "docs/figures"


def draw(results: Path, figures: Path = FIGURES) -> list[Path]:
    """Draws figures of the CSVs in `results`; returns the paths of the images."""
    import matplotlib

    matplotlib.use("Agg")
    figures.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (experiment, function) in DRAWN.items():
        if not (results / f"{experiment}.csv").exists():
            print(f"{name}: no {experiment}.csv in {results}")
            continue
        found = read_csv(results / f"{experiment}.csv")
        figure = function(found)
        if figure is None:
            print(f"{name}: {experiment}.csv in {results} has no rows of the figure")
            continue
        path = figures / f"learn_{name}.png"
        _save(figure, found, path)
        print(f"wrote {path}")
        written.append(path)
    return written


def _save(figure, found: pd.DataFrame, path: Path) -> None:
    """Writes a figure with the commits and the device of its rows."""
    import matplotlib.pyplot as plt

    commits, devices = (found[key].dropna().str.partition(",")[0].unique() for key in ("commit", "device"))
    figure.suptitle(f"{', '.join(devices)}, commits {', '.join(commits)}", fontsize=8, color="gray")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panels(settings: list[str], sharey: bool = False):
    """Returns a figure with axes side by side, one for each setting, and the axes by setting."""
    import matplotlib.pyplot as plt

    size = (5.2 * len(settings), 4.0)
    figure, axes = plt.subplots(1, len(settings), figsize=size, layout="constrained", squeeze=False, sharey=sharey)
    for axis, setting in zip(axes[0], settings, strict=True):
        axis.set_title(setting)
    return figure, dict(zip(settings, axes[0], strict=True))


def _lines(found: pd.DataFrame, measure: str, against: str, x: str, y: str, log: bool = False, columns: int | None = None):
    """Draws a line for each variant. `columns`: of the legend."""
    styles = _styles(in_order(found, TITLES))
    figure, axes = _panels(found["setting"].unique())
    for setting, axis in axes.items():
        own = where(found, setting=setting)
        for name in in_order(own, TITLES):
            axis.plot(*curve(own, against, variant=name, measure=measure), **styles[name])
        axis.set(xlabel=x, ylabel=y)
        if log:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:.0f}")
    return _with_legend(figure, columns)


def _styles(titles: dict[str, str]) -> dict[str, dict]:
    """Returns variant -> style of its line in all panels: a colour, with dashes after ten colours."""
    own = {"marker": ".", "markersize": 4, "linewidth": 1.2}
    return {
        name: own | {"label": title, "color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10]}
        for i, (name, title) in enumerate(titles.items())
    }


def _with_legend(figure, columns: int | None = None):
    """Adds one legend for all panels below them, with two columns for each panel unless given."""
    lines = {line.get_label(): line for axis in figure.axes for line in axis.get_lines()}
    columns = 2 * len(figure.axes) if columns is None else columns
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * -(-len(lines) // columns))
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=columns, fontsize=7)
    return figure


def _zoomed(figure, found: pd.DataFrame, measure: str):
    """Limits the axes of losses. With the first losses, from ln(256) down, differences would be invisible."""
    for axis, setting in zip(figure.axes, found["setting"].unique(), strict=True):
        losses = where(found, setting=setting, measure=measure)["value"]
        lowest, middle = losses.min(), losses.quantile(0.5, "higher")
        if middle > lowest:
            axis.set_ylim(lowest - 0.05 * (middle - lowest), lowest + 3 * (middle - lowest))
    return figure


def equal_steps(found: pd.DataFrame):
    return _zoomed(_lines(found, "val", "step", "step", "validation loss, nats per byte"), found, "val")


def equal_time(found: pd.DataFrame):
    return _zoomed(_lines(found, "val", "seconds", "seconds of training", "validation loss, nats per byte"), found, "val")


def equal_time_position(found: pd.DataFrame):
    return _zoomed(_lines(found, "position", "at", "position in the context", "loss, nats per byte"), found, "position")


def free_windows(found: pd.DataFrame):
    """The loss by position of models that trained on growing windows; None if there are no such models."""
    shown = where(found, **SHOWN)
    if shown.empty:
        return None
    return _lines(shown, "whole position", "at", "position in a window of 64k", "loss, nats per byte", columns=1)


def needle(found: pd.DataFrame):
    return _lines(found, "needle", "at", "tokens of text", "facts found, %", log=True)


def ablation(found: pd.DataFrame):
    figure, axes = _panels(found["setting"].unique())
    for setting, axis in axes.items():
        own = where(found, setting=setting, measure="loss")
        losses = {title: above(own, name, "p2_all") for name, title in in_order(own, TITLES).items() if name != "p2_all"}
        axis.barh(list(losses), list(losses.values()))
        axis.invert_yaxis()
        axis.set(xlabel="loss above all parts, nats per byte")
    figure.set_size_inches(7.5, 4.0)
    return figure


def recall(found: pd.DataFrame):
    styles = _styles(in_order(found, RECALL))
    figure, axes = _panels(found["setting"].unique(), sharey=True)
    for setting, axis in axes.items():
        own = where(found, setting=setting, measure="accuracy")
        for name in in_order(own, RECALL):
            axis.plot(*curve(own, "at", variant=name, lr=best_rate(own, name, setting)), **styles[name])
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set(xlabel="pairs", ylabel="values recalled, %", ylim=(-2, 102))
    return _with_legend(figure)


# Name of an image -> the experiment whose rows it shows, and the function that draws it, or returns None if it has no rows
DRAWN: dict[str, tuple[str, Callable]] = {
    "equal_steps": ("equal-steps", equal_steps),
    "equal_time": ("equal-time", equal_time),
    "equal_time_position": ("equal-time", equal_time_position),
    "free_windows": ("free-windows", free_windows),
    "ablation": ("ablation", ablation),
    "recall": ("recall", recall),
    "needle": ("needle", needle),
}
