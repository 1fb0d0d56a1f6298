"""Reports rows as text, as CSV, as figures, and as crossings of two algorithms. Describes the environment."""

from __future__ import annotations

import csv
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from benchmarks.registry import DTYPES
from fastmax import fastmax_attention
from fastmax.eager import planner
from fastmax.ops import extension

Row = dict[str, object]  # a row of a table: column -> cell

COLUMNS = (
    *("suite", "case", "batch", "heads", "tokens", "head_dim", "p", "algorithm", "dtype", "causal"),
    *("mode", "provider", "median", "p20", "p80", "unit", "samples", "peer", "of_peer", "target", "target_of", "met"),
    *("floor_ms", "of_floor", "gb_per_s", "published", "error", "grad_error", "sm_mhz", "note"),
    *("protocol", "device", "driver", "kernels", "torch", "cuda", "cudnn", "python", "commit"),
)


def environment(device: torch.device, commit: str) -> dict[str, str]:
    """Returns the columns that describe the machine and the software."""
    described = {"torch": torch.__version__, "python": platform.python_version(), "commit": commit or _commit()}
    if device.type != "cuda":
        return {"device": f"{_processor()}, {torch.get_num_threads()} threads"} | described
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        "driver": _nvidia_smi("driver_version,clocks.max.sm,clocks.max.mem,power.limit"),
        "kernels": extension.problem(device) or extension.build_info(),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
    } | described


def write_csv(rows: list[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> pd.DataFrame:
    """Reads a CSV with at least one row. An empty cell is NaN."""
    text = dict.fromkeys(("p", "torch", "commit"), str)  # also where it looks like a number
    with path.open(newline="") as file:
        rows = pd.read_csv(file, dtype=text)
    if rows.empty:
        raise LookupError(f"{path} has no row")
    return rows


def where(rows: pd.DataFrame, **equal: object) -> pd.DataFrame:
    """Returns the rows with these values; for a tuple, with one of its values."""
    wanted = [rows[key].isin(x if isinstance(x, tuple) else (x,)) for key, x in equal.items()]
    return rows[np.logical_and.reduce(wanted)] if wanted else rows


HEADER = (
    f"{'case':<44}{'mode':<18}{'provider':<21}{'median':>11}{'p20':>11}{'p80':>11} {'unit':<5}{'of peer':>8}"
    f"{'target':>12}{'met':>5}{'of floor':>9}{'error':>9}{'grad':>9}"
)


def line(row: Row) -> str:
    """Returns a row as a line of text below HEADER."""
    start = f"{row['case']:<44}{row['mode']:<18}{row['provider']:<21}"
    if "median" not in row:
        return start + f" {row['note']}"

    def shown(key: str, form: str) -> str:
        value = row.get(key, "")
        return "" if value in ("", None) else form.format(value)

    target = shown("target", "{:.3g}") and f"{row['target']:.3g} {'x' if row['target_of'] == 'peer' else row['target_of']}"
    extras = [shown("gb_per_s", "{:.0f} GB/s"), shown("published", "published {}"), shown("note", "{}")]
    return (
        f"{start}{row['median']:>11.4g}{row['p20']:>11.4g}{row['p80']:>11.4g} {row['unit']:<5}{shown('of_peer', '{:.3f}'):>8}"
        f"{target:>12}{row.get('met', ''):>5}{shown('of_floor', '{:.2f}'):>9}{shown('error', '{:.0e}'):>9}"
        f"{shown('grad_error', '{:.0e}'):>9} " + ", ".join(filter(None, extras))
    ).rstrip()


def crossing(slow: Mapping[int, float], fast: Mapping[int, float]) -> float | None:
    """Returns the n from which on `fast`, whose time grows more slowly, takes less time than `slow`.

    Between two sizes log(time ratio) is interpolated linearly over log n. The result is the first n if `fast` takes less time
    there already, and None if it never does.
    """
    times = pd.DataFrame({"slow": slow, "fast": fast}, dtype=float).dropna().sort_index()
    sizes, ahead = np.log(times.index.to_numpy(float)), np.log(times["fast"] / times["slow"]).to_numpy()
    if times.empty or ahead[-1] >= 0:
        return None
    if (ahead < 0).all():
        return float(times.index[0])
    last = np.flatnonzero(ahead >= 0)[-1]
    return float(np.exp(np.interp(0, ahead[[last + 1, last]], sizes[[last + 1, last]])))


def chosen_crossing(device: torch.device, dtype: str, p: int, heads: int, d: int, longest: int) -> int | None:
    """Returns the first n for which algorithm="auto" chooses the linear algorithm; None if it is above `longest`.

    On CUDA outputs are compared: both algorithms are bitwise reproducible, so the output of "auto" equals that of one of them.
    """

    def is_linear(n: int) -> bool:
        if device.type != "cuda":
            return planner.choose_algorithm(n, n, d, d, True, p) == "linear"
        q, k, v = (torch.randn(1, heads, n, d, dtype=DTYPES[dtype], device=device) for _ in range(3))
        attend = partial(fastmax_attention, q, k, v, causal=True, p=p, a0=8.0 if p == 1 else 1.0, temperature=d**0.5)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        try:
            with torch.no_grad():
                auto, linear, quadratic = (attend(algorithm=x) for x in ("auto", "linear", "quadratic"))
        finally:
            torch.set_float32_matmul_precision(before)
        return torch.equal(auto, linear) and not torch.equal(auto, quadratic)

    low, high = 1, longest
    if not is_linear(high):
        return None
    while high - low > max(1, low // 200):
        middle = (low + high) // 2
        low, high = (low, middle) if is_linear(middle) else (middle, high)
    return high


def crossings(rows: pd.DataFrame, device: torch.device) -> list[str]:
    """Returns lines with the n from which linear is faster than quadratic, as measured and as "auto" chooses."""
    lines = ["", "linear is faster from n = (forward + backward)", f"{'':<16}{'measured':>12}{'auto chooses':>14}"]
    for (dtype, p, d, heads), own in rows.groupby(["dtype", "p", "head_dim", "heads"]):
        times = curves(own, ["quadratic", "linear"], "fwd+bwd").dropna()
        if times.empty:
            continue
        measured, first, last = crossing(times["quadratic"], times["linear"]), *times.index[[0, -1]]
        text = f"> {last}" if measured is None else f"<= {first}" if measured == first else f"{measured:.0f}"
        chosen = chosen_crossing(device, dtype, p, heads, d, 2 * last)
        lines.append(f"{f'{dtype} p={p} d={d}':<16}{text:>12}{f'> {2 * last}' if chosen is None else chosen:>14}")
    return lines


def scaling(rows: pd.DataFrame, path: Path, device: torch.device | None) -> None:
    """Draws time and memory over n, with a column for each head dim.

    A ring marks where fastmax becomes faster than the fastest softmax. The dotted line marks where algorithm="auto" changes
    from quadratic to linear (p = 2).
    """
    by_size, names = rows.groupby("head_dim"), rows["provider"].unique()
    with _figure(2, len(by_size), path) as (figure, axes):
        for (d, own), (top, bottom) in zip(by_size, axes.T, strict=True):
            first, times = own.iloc[0], curves(own, names, "fwd+bwd")
            _draw(top, times, f"{TITLES['fwd+bwd']}, ms")
            _draw(bottom, curves(own, names, "memory"), "memory, MiB")
            softmax = times.filter(regex="^sdpa").min(axis=1).dropna()
            for i, name in enumerate(names):
                ours = times[name].dropna()
                n = crossing(softmax, ours) if name.startswith("fastmax") else None
                if n is not None and n > softmax.index[0]:
                    ms = np.exp(np.interp(np.log(n), np.log(ours.index), np.log(ours)))
                    top.plot(n, ms, "o", markersize=11, markerfacecolor="none", color=f"C{i}")
                    place = (6, -14 - 11 * i)  # numbers of curves that meet at one point stand one below the other
                    top.annotate(f"{n:.0f}", (n, ms), xytext=place, textcoords="offset points", color=f"C{i}")
            switch = chosen_crossing(device, first["dtype"], 2, first["heads"], d, longest=65536) if device else None
            if switch is not None:
                top.axvline(switch, color="gray", linestyle=":")
            top.set_title(f"{first['dtype']}, ({first['batch']}, {first['heads']}, n, {d})")
        marks = "ring: fastmax overtakes the fastest softmax"
        if device:
            marks += "; dotted: p = 2 turns from quadratic to linear"
        figure.suptitle(f"causal attention, forward + backward\n{_source(rows)}\n{marks}", fontsize=9)


def times(rows: pd.DataFrame, path: Path, device: torch.device | None) -> None:
    """Draws time over n by provider, with a row for each mode and a column for each (heads, head_dim)."""
    by_size, names = rows.groupby(["heads", "head_dim"]), rows["provider"].unique()
    modes = where(rows, unit="ms")["mode"].unique()
    with _figure(len(modes), len(by_size), path) as (figure, axes):
        for ((heads, d), own), column in zip(by_size, axes.T, strict=True):
            for axis, mode in zip(column, modes, strict=True):
                _draw(axis, curves(own, names, mode), f"{TITLES.get(mode, mode)}, ms")
            first = own.iloc[0]
            title = f"{first['case'].rpartition(' (')[0]} ({first['batch']}, {heads}, n, {d})"
            column[0].set_title(title, fontsize=9)
        figure.suptitle(f"causal attention\n{_source(rows)}", fontsize=10)


def training(rows: pd.DataFrame, path: Path, device: torch.device | None) -> None:
    """Draws the tokens per second of a training step over the context. Memory is text, because its lines would coincide."""
    rates = rows.assign(median=1e3 * rows["batch"] * rows["tokens"] / rows["median"])
    with _figure(1, 1, path, width=6.5) as (figure, axes):
        _draw(axes[0, 0], curves(rates, rows["provider"].unique(), "train"), "tokens per second")
        axes[0, 0].set_xlabel("context, tokens")
        title = rows.iloc[0]["case"].rpartition(" (")[0]
        memory = f"peak memory: within {memory_spread(rows):.1%} of each other at every context"
        figure.suptitle(f"a training step, {title}\n{_source(rows)}\n{memory}", fontsize=9)


def _source(rows: pd.DataFrame) -> str:
    """Returns the device and the commits of the rows."""
    return f"{rows['device'].iloc[0]}, measured at {', '.join(rows['commit'].dropna().unique())}"


def memory_spread(rows: pd.DataFrame) -> float:
    """Returns the largest relative difference in memory between two providers at the same context, as a fraction."""
    peaks = curves(rows, rows["provider"].unique(), "memory")
    return (peaks.max(axis=1) / peaks.min(axis=1)).max() - 1


def curves(rows: pd.DataFrame, names: Sequence[str], mode: str) -> pd.DataFrame:
    """Returns the medians of a mode, with a row for each number of tokens and a column for each of the providers `names`."""
    return where(rows, mode=mode).pivot(index="tokens", columns="provider", values="median").reindex(columns=names)


# Provider and mode -> how figures call them
TITLES = {
    "fastmax_p1": "fastmax, p = 1",
    "fastmax_p2": "fastmax, p = 2",
    "fastmax_flash": "softmax, fastmax.flash_attention",
    "sdpa_cudnn": "softmax, PyTorch (cuDNN)",
    "sdpa_flash": "softmax, PyTorch (FlashAttention)",
    "plain": "softmax, PyTorch operations",
    "plain_cupy": "softmax, CuPy",
    "fla_based": "FLA parallel_based",
    "fla_based_chunk": "FLA fused_chunk_based",
    "fla_linear": "FLA linear attention",
    "fla_retention": "FLA retention",
    "fwd": "forward",
    "fwd+bwd": "forward and backward",
}


def _draw(axis, curves: pd.DataFrame, label: str) -> None:
    """Draws curves on log-log axes. A provider has the same colour everywhere, also if it or another has no points."""
    from matplotlib.ticker import LogLocator

    for i, name in enumerate(curves):
        points = curves[name].dropna()
        if len(points):
            axis.plot(points.index, points, "o-", markersize=3, color=f"C{i}", label=TITLES.get(name, name))
    axis.set(xscale="log", yscale="log", ylabel=label)
    sizes = curves.dropna(how="all").index
    shown = sizes[:: max(1, -(-len(sizes) // 6))]
    axis.set_xticks(shown, [_short(n) for n in shown])
    low, high = axis.get_ylim()
    if high < 100 * low:  # with powers of ten alone the axis could have no label
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}" if y < 1e4 else f"{y / 1e3:g} k")
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def _short(n: int) -> str:
    """Returns a short form of a number of tokens, such as 512, 16k or 1M."""
    for unit, name in ((2**20, "M"), (2**10, "k")):
        if n >= unit and n % unit == 0:
            return f"{n // unit}{name}"
    return str(n)


@contextmanager
def _figure(rows: int, columns: int, path: Path, width: float = 4.2):
    """Yields a figure and its axes, and writes the figure to `path` at the end of the block."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, 3.5 * rows), sharex="col", squeeze=False, layout="constrained"
    )
    yield figure, axes
    for axis in axes[-1]:
        axis.set_xlabel(axis.get_xlabel() or "tokens")
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_legend_handles_labels()[0]}
    per_row = max(1, round(width * columns / 2.4))
    figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=per_row, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


REPORTS = {"crossings": crossings}
FIGURES = {"scaling": scaling, "times": times, "training": training}


def _commit() -> str:
    return _output("git", "describe", "--always", "--dirty") or "unknown"


def _nvidia_smi(query: str) -> str:
    return _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout.strip()
    except OSError:
        return ""


def _processor() -> str:
    if Path("/proc/cpuinfo").exists():
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return text.split(":")[1].strip()
    return platform.processor()
