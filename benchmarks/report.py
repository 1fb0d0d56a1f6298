"""Reports rows as text, as CSV, as figures, and as crossings of two algorithms. Describes the environment."""

from __future__ import annotations

import csv
import math
import platform
import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

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


def read_csv(path: Path) -> list[Row]:
    """Reads a CSV of `write_csv`. Numbers are converted, empty cells are left out."""
    numbers = dict.fromkeys(("batch", "heads", "tokens", "head_dim"), int)
    numbers |= dict.fromkeys(("median", "of_peer", "target", "of_floor", "gb_per_s"), float)
    with path.open(newline="") as file:
        return [{key: numbers.get(key, str)(cell) for key, cell in row.items() if cell != ""} for row in csv.DictReader(file)]


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


def crossing(slow: dict[int, float], fast: dict[int, float]) -> float | None:
    """Returns the n from which on `fast`, whose time grows more slowly, takes less time than `slow`.

    Between two sizes log(time ratio) is interpolated linearly over log n. The result is the first n if `fast` takes less time
    there already, and None if it never does.
    """
    sizes = sorted(slow.keys() & fast.keys())
    ahead = [math.log(fast[n] / slow[n]) for n in sizes]
    if not sizes or ahead[-1] >= 0:
        return None
    last = max((i for i, x in enumerate(ahead) if x >= 0), default=None)
    if last is None:
        return float(sizes[0])
    share = ahead[last] / (ahead[last] - ahead[last + 1])
    return math.exp(math.log(sizes[last]) + share * math.log(sizes[last + 1] / sizes[last]))


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


def crossings(rows: list[Row], device: torch.device) -> list[str]:
    """Returns lines with the n from which linear is faster than quadratic, as measured and as "auto" chooses."""
    times: dict[tuple, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if "median" in row and row["mode"] == "fwd+bwd":
            key = (row["dtype"], row["p"], row["head_dim"], row["heads"])
            times[key][row["provider"]][row["tokens"]] = row["median"]
    lines = ["", "linear is faster from n = (forward + backward)", f"{'':<16}{'measured':>12}{'auto chooses':>14}"]
    for (dtype, p, d, heads), by in sorted(times.items(), key=str):
        sizes = sorted(by["quadratic"].keys() & by["linear"].keys())
        if not sizes:
            continue
        measured = crossing(by["quadratic"], by["linear"])
        text = f"> {sizes[-1]}"
        if measured is not None:
            text = f"<= {sizes[0]}" if measured == sizes[0] else f"{measured:.0f}"
        longest = 2 * sizes[-1]
        chosen = chosen_crossing(device, dtype, p, heads, d, longest)
        lines.append(f"{f'{dtype} p={p} d={d}':<16}{text:>12}{f'> {longest}' if chosen is None else chosen:>14}")
    return lines


def scaling(rows: list[Row], path: Path, device: torch.device | None) -> None:
    """Draws time and memory over n, with a column for each head dim.

    A ring marks where fastmax becomes faster than the fastest softmax. The dotted line marks where algorithm="auto" changes
    from quadratic to linear (p = 2).
    """
    curves: dict[tuple, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if "median" in row:
            curves[row["head_dim"], row["mode"], row["provider"]][row["tokens"]] = row["median"]
    dims = sorted({key[0] for key in curves})
    names = list(dict.fromkeys(key[2] for key in curves))
    with _figure(2, len(dims), path) as (figure, axes):
        for column, d in enumerate(dims):
            for axis, mode, unit in zip(axes[:, column], ("fwd+bwd", "memory"), ("ms", "MiB"), strict=True):
                _draw(axis, {name: curves[d, mode, name] for name in names}, f"{TITLES.get(mode, mode)}, {unit}")
            top = axes[0, column]
            softmax: dict[int, float] = {}
            for name in (name for name in names if name.startswith("sdpa")):
                for n, ms in curves[d, "fwd+bwd", name].items():
                    softmax[n] = min(ms, softmax.get(n, math.inf))
            for i, name in enumerate(names):
                ours = curves[d, "fwd+bwd", name]
                n = crossing(softmax, ours) if name.startswith("fastmax") else None
                if n is not None and n > min(softmax):
                    below = max(x for x in ours if x <= n)
                    above = min(x for x in ours if x >= n)
                    share = math.log(n / below) / math.log(above / below) if above > below else 0.0
                    ms = ours[below] ** (1 - share) * ours[above] ** share
                    top.plot(n, ms, "o", markersize=11, markerfacecolor="none", color=f"C{i}")
                    place = (6, -14 - 11 * i)  # numbers of curves that meet at one point stand one below the other
                    top.annotate(f"{n:.0f}", (n, ms), xytext=place, textcoords="offset points", color=f"C{i}")
            first = next(row for row in rows if row["head_dim"] == d)
            switch = chosen_crossing(device, first["dtype"], 2, first["heads"], d, longest=65536) if device else None
            if switch is not None:
                top.axvline(switch, color="gray", linestyle=":")
            top.set_title(f"{first['dtype']}, ({first['batch']}, {first['heads']}, n, {d})")
        marks = "ring: fastmax overtakes the fastest softmax"
        if device:
            marks += "; dotted: p = 2 turns from quadratic to linear"
        figure.suptitle(f"causal attention, forward + backward\n{_where(rows)}\n{marks}", fontsize=9)


def times(rows: list[Row], path: Path, device: torch.device | None) -> None:
    """Draws time over n by provider, with a row for each mode and a column for each (heads, head_dim)."""
    sizes = sorted({(row["heads"], row["head_dim"]) for row in rows})
    modes = list(dict.fromkeys(row["mode"] for row in rows if row["unit"] == "ms"))
    names = _providers(rows)
    with _figure(len(modes), len(sizes), path) as (figure, axes):
        for column, (heads, d) in enumerate(sizes):
            here = [row for row in rows if (row["heads"], row["head_dim"]) == (heads, d)]
            for axis, mode in zip(axes[:, column], modes, strict=True):
                _draw(axis, _curves(here, names, mode, lambda row: row["median"]), f"{TITLES.get(mode, mode)}, ms")
            title = here[0]["case"].rpartition(" (")[0]
            axes[0, column].set_title(f"{title} ({here[0]['batch']}, {heads}, n, {d})", fontsize=9)
        figure.suptitle(f"causal attention\n{_where(rows)}", fontsize=10)


def training(rows: list[Row], path: Path, device: torch.device | None) -> None:
    """Draws the tokens per second of a training step over the context. Memory is text, because its lines would coincide."""

    def tokens_per_s(row: Row) -> float:
        return row["batch"] * row["tokens"] / row["median"] * 1e3

    with _figure(1, 1, path, width=6.5) as (figure, axes):
        _draw(axes[0, 0], _curves(rows, _providers(rows), "train", tokens_per_s), "tokens per second")
        axes[0, 0].set_xlabel("context, tokens")
        title = rows[0]["case"].rpartition(" (")[0]
        memory = f"peak memory: within {memory_spread(rows):.1%} of each other at every context"
        figure.suptitle(f"a training step, {title}\n{_where(rows)}\n{memory}", fontsize=9)


def _where(rows: list[Row]) -> str:
    """Returns the device and the commits of the rows."""
    commits = dict.fromkeys(row["commit"] for row in rows if "commit" in row)
    return f"{rows[0].get('device', '')}, measured at {', '.join(commits)}"


def memory_spread(rows: list[Row]) -> float:
    """Returns the largest relative difference in memory between two providers at the same context, as a fraction."""
    peaks = _curves(rows, _providers(rows), "memory", lambda row: row["median"]).values()
    at = [[points[n] for points in peaks if n in points] for n in {n for points in peaks for n in points}]
    return max(max(values) / min(values) for values in at) - 1


def _providers(rows: list[Row]) -> list[str]:
    """Returns the names of the providers, in the order of the rows."""
    return list(dict.fromkeys(row["provider"] for row in rows))


def _curves(rows: list[Row], names: list[str], mode: str, value: Callable[[Row], float]) -> dict[str, dict[int, float]]:
    """Returns curves: provider -> n -> value."""
    curves: dict[str, dict[int, float]] = {name: {} for name in names}
    for row in rows:
        if "median" in row and row["mode"] == mode:
            curves[row["provider"]][row["tokens"]] = value(row)
    return curves


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


def _draw(axis, curves: Mapping[str, Mapping[int, float]], label: str) -> None:
    """Draws curves on log-log axes. A provider has the same colour everywhere, also if it or another has no points."""
    from matplotlib.ticker import LogLocator

    for i, (name, points) in enumerate(curves.items()):
        if points:
            axis.plot(
                *zip(*sorted(points.items()), strict=True), "o-", markersize=3, color=f"C{i}", label=TITLES.get(name, name)
            )
    axis.set(xscale="log", yscale="log", ylabel=label)
    sizes = sorted(set().union(*curves.values()))
    shown = sizes[:: -(-len(sizes) // 6)] if sizes else []
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
