"""Draws figures of the results: `python -m benchmarks.learn figures`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.learn import rows
from benchmarks.learn.pages import TITLES
from benchmarks.learn.recall import TITLES as RECALL
from benchmarks.learn.results import above, best_rate, curve, in_order, values, where
from benchmarks.learn.rows import Row

FIGURES = Path(__file__).parents[2] / "docs/figures"


def draw(results: Path, figures: Path = FIGURES) -> list[Path]:
    """Draws figures of the CSVs in `results`; returns the paths of the images."""
    import matplotlib

    matplotlib.use("Agg")
    figures.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (experiment, function) in DRAWN.items():
        found = rows.read(results / f"{experiment}.csv")
        if not found:
            print(f"{name}: no {experiment}.csv in {results}")
            continue
        path = figures / f"learn_{name}.png"
        _save(function(found), found, path)
        print(f"wrote {path}")
        written.append(path)
    return written


def _save(figure, found: list[Row], path: Path) -> None:
    """Writes a figure with the commits and the device of its rows."""
    import matplotlib.pyplot as plt

    commits = dict.fromkeys(row["commit"] for row in found if row.get("commit"))
    devices = dict.fromkeys(row["device"].partition(",")[0] for row in found if row.get("device"))
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


def _lines(found: list[Row], measure: str, against: str, x: str, y: str, log: bool = False):
    """Draws a line for each variant."""
    styles = _styles(in_order(found, TITLES))
    figure, axes = _panels(values(found, "setting"))
    for setting, axis in axes.items():
        own = where(found, setting=setting)
        for name in in_order(own, TITLES):
            axis.plot(*curve(own, against, variant=name, measure=measure), **styles[name])
        axis.set(xlabel=x, ylabel=y)
        if log:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:.0f}")
    return _with_legend(figure)


def _styles(titles: dict[str, str]) -> dict[str, dict]:
    """Returns variant -> style of its line in all panels: a colour, with dashes after ten colours."""
    own = {"marker": ".", "markersize": 4, "linewidth": 1.2}
    return {
        name: own | {"label": title, "color": f"C{i % 10}", "linestyle": ("-", "--", ":")[i // 10]}
        for i, (name, title) in enumerate(titles.items())
    }


def _with_legend(figure):
    """Adds one legend for all panels below them."""
    lines = {line.get_label(): line for axis in figure.axes for line in axis.get_lines()}
    columns = 2 * len(figure.axes)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * -(-len(lines) // columns))
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=columns, fontsize=7)
    return figure


def _zoomed(figure, found: list[Row], measure: str):
    """Limits the axes of losses. With the first losses, from ln(256) down, differences would be invisible."""
    for axis, setting in zip(figure.axes, values(found, "setting"), strict=True):
        losses = sorted(row["value"] for row in where(found, setting=setting, measure=measure))
        lowest, middle = losses[0], losses[len(losses) // 2]
        if middle > lowest:
            axis.set_ylim(lowest - 0.05 * (middle - lowest), lowest + 3 * (middle - lowest))
    return figure


def equal_steps(found: list[Row]):
    return _zoomed(_lines(found, "val", "step", "step", "validation loss, nats per byte"), found, "val")


def equal_time(found: list[Row]):
    return _zoomed(_lines(found, "val", "seconds", "seconds of training", "validation loss, nats per byte"), found, "val")


def equal_time_position(found: list[Row]):
    return _zoomed(_lines(found, "position", "at", "position in the context", "loss, nats per byte"), found, "position")


def needle(found: list[Row]):
    return _lines(found, "needle", "at", "tokens of text", "facts found, %", log=True)


def ablation(found: list[Row]):
    figure, axes = _panels(values(found, "setting"))
    for setting, axis in axes.items():
        own = where(found, setting=setting, measure="loss")
        losses = {title: above(own, name, "p2_all") for name, title in in_order(own, TITLES).items() if name != "p2_all"}
        axis.barh(list(losses), list(losses.values()))
        axis.invert_yaxis()
        axis.set(xlabel="loss above all parts, nats per byte")
    figure.set_size_inches(7.5, 4.0)
    return figure


def recall(found: list[Row]):
    styles = _styles(in_order(found, RECALL))
    figure, axes = _panels(values(found, "setting"), sharey=True)
    for setting, axis in axes.items():
        own = where(found, setting=setting, measure="accuracy")
        for name in in_order(own, RECALL):
            axis.plot(*curve(own, "at", variant=name, lr=best_rate(own, name, setting)), **styles[name])
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set(xlabel="pairs", ylabel="values recalled, %", ylim=(-2, 102))
    return _with_legend(figure)


# Name of an image -> the experiment whose rows it shows, and the function that draws it
DRAWN: dict[str, tuple[str, Callable]] = {
    "equal_steps": ("equal-steps", equal_steps),
    "equal_time": ("equal-time", equal_time),
    "equal_time_position": ("equal-time", equal_time_position),
    "ablation": ("ablation", ablation),
    "recall": ("recall", recall),
    "needle": ("needle", needle),
}
