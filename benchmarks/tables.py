"""Writes measured numbers into README.md and docs/: `python -m benchmarks.tables`; `--check` reports pages out of date.

A page has pairs of marks, of which the first names a table or a value. The text between them is rewritten from the CSVs in
benchmarks/results/ and docs/figures/:

    <!-- table: train -->
    | context | fastmax, p = 2 | ...
    <!-- end -->

    memory is the same within <!-- value: train-memory -->0.3%<!-- end -->

(The mark of a value must not be at the beginning of a line, where it begins a block in Markdown.) `BLOCKS`, at the end of this
file, maps each name to a function. It raises an error if a CSV does not have the rows that it needs.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

import fastmax
from benchmarks import report
from benchmarks.learn import pages
from benchmarks.learn.results import above, spread
from benchmarks.registry import SUSTAINED
from benchmarks.report import Row
from benchmarks.roofline import COPY, MATMUL
from fastmax.distributed import contiguous_layout, exchanged_bytes

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/*.md", "csrc/*.md", "examples/*.md")
_MARKED = re.compile(r"(<!-- (table|value): ([\w-]+) -->)(.*?)(<!-- end -->)", re.DOTALL)


class Results:
    """The CSVs of a working tree."""

    def __init__(self, root: Path = ROOT):
        self.root = root
        self._rows: dict[str, list[Row]] = {}

    def rows(self, suite: str, **equal: object) -> list[Row]:
        """Returns the measured rows of a suite with these values; at least one."""
        if suite not in self._rows:
            self._rows[suite] = report.read_csv(self.root / f"benchmarks/results/{suite}.csv")
        found = [row for row in self._rows[suite] if "median" in row and all(row.get(k) == x for k, x in equal.items())]
        if not found:
            raise LookupError(f"{suite}.csv has no measured row with {equal}")
        return found

    def row(self, suite: str, **equal: object) -> Row:
        found = self.rows(suite, **equal)
        if len(found) > 1:
            raise LookupError(f"{suite}.csv has {len(found)} rows with {equal}, one is meant")
        return found[0]

    def median(self, suite: str, **equal: object) -> float:
        return self.row(suite, **equal)["median"]

    def pair(self, suite: str, sustained: bool = False, **equal: object) -> tuple[float, float]:
        """Returns the times of forward and of forward + backward, of single calls or sustained."""
        start = SUSTAINED if sustained else ""
        forward, forward_backward = (self.median(suite, mode=start + mode, **equal) for mode in ("fwd", "fwd+bwd"))
        return forward, forward_backward

    def cases(self, suite: str, **equal: object) -> list[str]:
        return list(dict.fromkeys(row["case"] for row in self.rows(suite, **equal)))

    def plain(self, path: str) -> list[dict[str, str]]:
        """Returns the rows of a CSV that was not written by a suite."""
        with (self.root / path).open(newline="") as file:
            found = list(csv.DictReader(file))
        if not found:
            raise LookupError(f"{path} has no row")
        return found


# ---- cells and tables


def number(x: float) -> str:
    """Formats a number with three digits: 0.256, 4.47, 17.1, 141, 1166."""
    return f"{x:.0f}" if abs(x) >= 99.95 else f"{x:#.3g}"


def gain(x: float) -> str:
    """Formats a ratio with two digits: 0.66, 1.7, 24."""
    return f"{x:.0f}" if x >= 9.95 else f"{x:.1f}" if x >= 0.995 else f"{x:.2f}"


def measured_at(rows: Iterable[Row]) -> str:
    """Returns the line below a table: device, PyTorch version and commits of its rows."""
    rows = list(rows)
    facts = {key: list(dict.fromkeys(row[key] for row in rows)) for key in ("device", "torch", "commit")}
    device = " and ".join(dict.fromkeys(name.partition(",")[0] for name in facts["device"]))
    commits = f"commit{'s' if len(facts['commit']) > 1 else ''} {', '.join(facts['commit'])}"
    return f"Measured on {device} with PyTorch {' and '.join(facts['torch'])} at {commits}."


def both(pair: Iterable[float]) -> str:
    return " / ".join(map(number, pair))


def rounded(n: float) -> str:
    """Formats a length between two measured ones with two digits: 2600, 11000."""
    digits = 10 ** (math.floor(math.log10(n)) - 1)
    return str(int(round(n / digits) * digits))


def table(header: Iterable[str], lines: Iterable[Iterable[str]], measured: Iterable[Row] = ()) -> str:
    """Returns a Markdown table. The line below it has device and commits of the rows `measured`."""
    header = list(header)
    lines = [header, ["---"] * len(header), *lines]
    if wrong := [line for line in lines if len(line) != len(header)]:
        raise ValueError(f"{len(header)} columns, but {wrong[0]}")
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\n{measured_at(measured)}" if measured else text


def size(case: str) -> str:
    """Returns the size in a case's label, such as `(8, 32, 4096, 64)`."""
    return re.search(r"\([\d,]+\)", case).group().replace(",", ", ")


def by_columns(rows: Iterable, columns: dict[str, Callable[..., str]], measured: Iterable[Row] = ()) -> str:
    """Returns a Markdown table with a line for each row. `columns` maps a header to a function from a row to a cell."""
    return table(columns, ([cell(row) for cell in columns.values()] for row in rows), measured)


def missed(row: Row) -> str:
    return "" if row["met"] == "yes" else ", missed"


# ---- helpers


def _fastest(rows: Iterable[Row]) -> dict[int, float]:
    """Returns n -> the smallest time."""
    times: dict[int, float] = {}
    for row in rows:
        times[row["tokens"]] = min(row["median"], times.get(row["tokens"], math.inf))
    return times


def _fastest_softmax(results: Results, suite: str, **equal: object) -> dict[int, float]:
    """Returns n -> the time of PyTorch's fastest backend."""
    return _fastest(row for row in results.rows(suite, **equal) if row["provider"].startswith("sdpa"))


def _overtakes(results: Results, suite: str, provider: str, **equal: object) -> str:
    """Returns the n from which a provider is faster than softmax."""
    softmax = _fastest_softmax(results, suite, **equal)
    n = report.crossing(softmax, _fastest(results.rows(suite, provider=provider, **equal)))
    if n is None:
        return f"above {max(softmax)}"
    return f"below {min(softmax)}" if n == min(softmax) else rounded(n)


def _state_bytes(d: int, p: int) -> int:
    """Returns the size of the state of one key/value head."""
    state = fastmax.decoding.init_state(1, 1, d, p=p, a0=2.0, normalize="token")  # with these settings p = 1 is positive
    return sum(x.numel() * x.element_size() for x in (state.kv_state, state.k_sum))


def _steps(results: Results, *providers: str, **same) -> dict[int, float]:
    """Returns tokens of context -> microseconds of a step, for the fastest of the providers."""
    return _fastest(row for name in providers for row in results.rows("decode", provider=name, mode="step", **same))


def _work_of_rank(row: Row) -> int:
    """Returns the work of one of two ranks over that of its tokens alone. All but the linear algorithm see all tokens."""
    return 1 if row["algorithm"] == "linear" else 2


# ---- docs/results.md and docs/cuda.md: attention on a GPU


def break_even(results: Results) -> str:
    """The n from which forward + backward is faster than softmax, and the size of a state in tokens of a key/value cache."""

    def line(d: int) -> list[str]:
        measured = [_overtakes(results, "scaling", f"fastmax_p{p}", head_dim=d, mode="fwd+bwd") for p in (2, 1)]
        states = [_state_bytes(d, p) for p in (2, 1)]
        cached = 2 * d * torch.bfloat16.itemsize  # a key and a value
        decoding = [f"{state / 1e3:.0f} kB = {math.ceil(state / cached)} tokens" for state in states]
        return [str(d), *measured, *decoding]

    header = ["head_dim", "training, p = 2", "p = 1", "generating, p = 2", "p = 1"]
    return table(header, (line(d) for d in (32, 64, 128)), results.rows("scaling"))


def train_break_even(results: Results) -> str:
    two, one = (_overtakes(results, "train", f"fastmax_p{p}", mode="train") for p in (2, 1))
    return f"{two} tokens for p = 2 and {one} for p = 1"


def attention(results: Results) -> str:
    """Fastmax and the fastest softmax, largest gain first: sustained, and single calls after a pause."""
    lines = []
    for case in results.cases("cuda", dtype="bf16", provider="fastmax", mode="fwd+bwd"):
        row = results.row("cuda", case=case, provider="fastmax", mode="fwd+bwd")
        cells, gains = [f"p = {row['p']}, {row['algorithm']}", size(case)], []
        for start in (SUSTAINED, ""):
            ours = results.pair("cuda", sustained=bool(start), case=case, provider="fastmax")
            modes = (start + "fwd", start + "fwd+bwd")
            softmax = [min(_fastest_softmax(results, "cuda", case=case, mode=mode).values()) for mode in modes]
            gains.append([theirs / mine for theirs, mine in zip(softmax, ours, strict=True)])
            cells += [both(ours), both(softmax)] if start else []
        lines.append((gains[0][1], [*cells, *(" / ".join(map(gain, pair)) for pair in gains)]))
    lines.sort(key=lambda line: -line[0])
    header = ["fastmax", "(batch, heads, tokens, head_dim)", "fastmax, ms", "softmax (SDPA), ms", "times faster"]
    return table([*header, "single calls"], (line for _, line in lines), results.rows("cuda"))


def attention_of_65536(results: Results) -> str:
    equal = {"head_dim": 64, "heads": 32, "mode": SUSTAINED + "fwd+bwd"}
    ours = results.median("cuda", provider="fastmax", tokens=65536, **equal)
    softmax = _fastest_softmax(results, "cuda", **equal)[65536]
    return f"{number(ours)} ms against {number(softmax)} ms, {gain(softmax / ours)} times less"


def cuda(results: Results) -> str:
    """Every case with its aim and its floor. Times that miss the aim are bold."""

    def rows(case: str) -> list[Row]:
        found = results.rows("cuda", case=case, provider="fastmax")
        return [row for mode in ("fwd", "fwd+bwd") for row in found if row["mode"] == mode]

    def name(rows: list[Row]) -> str:
        row = rows[0]
        return f"{row['algorithm']} {size(row['case'])}, {row['p']}" + (", TF32, forward" if row["dtype"] == "tf32" else "")

    def judged(row: Row) -> str:
        return f"**{number(row['median'])}**" if row["met"] == "no" else number(row["median"])

    columns = {
        "algorithm, (b, h, n, d), p": name,
        "fastmax": lambda rows: " / ".join(map(judged, rows)),
        "aim": lambda rows: " / ".join(f"{row['target']:g}" for row in rows),
        "times the floor": lambda rows: " / ".join(f"{row['of_floor']:.1f}" for row in rows),
    }
    return by_columns(map(rows, results.cases("cuda", provider="fastmax", mode="fwd")), columns, results.rows("cuda"))


def cuda_memory(results: Results) -> str:
    row = results.row("cuda", provider="fastmax", mode="memory")
    return f"{size(row['case'])}: {row['median']:.0f} MiB, {row['of_peer']:.2f} times cuDNN's"


def cuda_host(results: Results) -> str:
    row = results.row("cuda", provider="fastmax", mode="host")
    return f"{row['median']:.0f} us, {row['of_peer']:.2f} times SDPA's"


def crossover(results: Results) -> str:
    """The n from which linear is faster than quadratic in bf16, by p and head_dim."""
    bf16 = {"dtype": "bf16", "mode": "fwd+bwd"}

    def cell(d: int, p: str) -> str:
        slow, fast = (
            _fastest(results.rows("crossover", p=p, head_dim=d, provider=name, **bf16)) for name in ("quadratic", "linear")
        )
        n = report.crossing(slow, fast)
        return f"above {max(slow)}" if n is None else f"{min(slow)} or less" if n == min(slow) else rounded(n)

    orders, head_dims = (dict.fromkeys(row[key] for row in results.rows("crossover", **bf16)) for key in ("p", "head_dim"))
    columns = {"linear is faster from n =": lambda p: f"p = {p}"} | {f"head_dim {d}": partial(cell, d) for d in head_dims}
    return by_columns(orders, columns, results.rows("crossover"))


def decode_rate(results: Results) -> str:
    """The rate of a step over that of a copy, with enough heads to fill the device."""
    rates = [
        1e9 * row["gb_per_s"] / COPY
        for row in results.rows("decode", provider="fastmax", tokens=1, mode="step")
        if row["batch"] * row["heads"] >= 64
    ]
    return f"{min(rates):.0%} to {max(rates):.0%}"


def decode_gain(results: Results) -> str:
    same = {"head_dim": 64, "batch": 64, "heads": 8}
    ours, softmax = _steps(results, "fastmax_buffered", **same), _steps(results, "sdpa_flash", "sdpa_cudnn", **same)
    times = {tokens: softmax[tokens] / ours[tokens] for tokens in (16384, 131072)}
    return f"{times[16384]:.1f} times faster at 16k tokens of context and {times[131072]:.0f} times at 128k"


def decode_context(results: Results) -> str:
    """Steps of Fastmax, and of the faster softmax with a cache of at least 16k tokens."""
    lines, buffered = [], results.rows("decode", provider="fastmax_buffered", mode="step")
    shown = [n for n in dict.fromkeys(row["tokens"] for row in buffered) if n >= 16384]
    for d, batch, heads in dict.fromkeys((row["head_dim"], row["batch"], row["heads"]) for row in buffered):
        same = {"head_dim": d, "batch": batch, "heads": heads}
        ours, softmax = _steps(results, "fastmax_buffered", **same), _steps(results, "sdpa_flash", "sdpa_cudnn", **same)
        in_place = min(_steps(results, "fastmax_in_place", **same).values())
        cells = (f"{number(softmax[n])} ({gain(softmax[n] / ours[n])})" for n in shown)
        lines.append([str(d), f"{batch} x {heads}", number(min(ours.values())), number(in_place), *cells])
    header = ["head_dim", "batch x heads", "buffered, us", "in place, us", *(f"SDPA, {n // 1024}k" for n in shown)]
    return table(header, lines, results.rows("decode"))


def ancestor(results: Results) -> str:
    """Forward at the largest sizes of the first Fastmax implementation, in fp32 and TF32."""
    columns = (("tf32", "fastmax"), ("fp32", "fastmax"), ("fp32", "fastmax_autograd"))
    lines = []
    for first in results.rows("ancestor", dtype="tf32", provider="fastmax", causal="True", heads=16, tokens=10000):
        same = {key: first[key] for key in ("heads", "tokens", "head_dim")}
        times = [
            both(results.median("ancestor", dtype=dtype, provider=name, causal=causal, **same) for causal in ("True", "False"))
            for dtype, name in columns
        ]
        lines.append([f"({', '.join(str(x) for x in same.values())})", *times, first["published"].partition(" (")[0]])
    header = ["(heads, tokens, head_dim)", "TF32, causal / full", "fp32", "PyTorch operations, fp32", "published"]
    return table(header, lines, results.rows("ancestor"))


def peers(results: Results) -> str:
    titles = {
        "fastmax_p2": "Fastmax p = 2",
        "fla_based": "`parallel_based`",
        "fastmax_p1": "Fastmax p = 1",
        "fla_linear": "`chunk_linear_attn`",
        "fla_retention": "`chunk_retention`",
    }

    def cell(name: str, d: int) -> str:
        rows = (row for row in results.rows("peers", tokens=65536, head_dim=d) if row["provider"] == name)
        times = {row["mode"]: row["median"] for row in rows}
        return both((times["fwd"], times["fwd+bwd"])) if times else ""

    columns = {"head_dim": str} | {title: partial(cell, name) for name, title in titles.items()}
    return by_columns((64, 128), columns, results.rows("peers"))


# ---- training, the CPU, options


def train(results: Results) -> str:
    titles = {"fastmax_p2": "fastmax, p = 2", "fastmax_p1": "fastmax, p = 1"}
    titles |= {"sdpa_cudnn": "softmax (cuDNN)", "sdpa_flash": "softmax (flash)"}
    speeds: dict[int, dict[str, str]] = {}
    for row in results.rows("train", mode="train"):
        speeds.setdefault(row["tokens"], {})[row["provider"]] = f"{row['batch'] * row['tokens'] / row['median']:.0f} k"
    lines = ([str(n), *(speeds[n].get(name, "") for name in titles)] for n in sorted(speeds))
    return table(["context", *titles.values()], lines, results.rows("train"))


def cpu(results: Results) -> str:
    def pair(row: Row, name: str) -> tuple[float, float]:
        return results.pair("cpu", case=row["case"], provider=name)

    columns = {
        "p, algorithm, (batch, heads, tokens, head_dim)": lambda row: (
            f"p = {row['p']}, {row['algorithm']}, {size(row['case'])}"
        ),
        "fastmax, ms": lambda row: both(pair(row, "fastmax")),
        "softmax (SDPA), ms": lambda row: both(pair(row, "sdpa")),
        "times faster": lambda row: " / ".join(
            gain(b / a) for a, b in zip(pair(row, "fastmax"), pair(row, "sdpa"), strict=True)
        ),
        "aim": lambda row: f"{1 / row['target']:.2g}{missed(row)}",
    }
    return by_columns(results.rows("cpu", provider="fastmax", mode="fwd+bwd"), columns, results.rows("cpu"))


def options(results: Results) -> str:
    """The sustained cost of each option: rows with a target, compared with their peer."""

    def mode(row: Row) -> str:
        return row["mode"].removeprefix(SUSTAINED)

    def without(row: Row) -> float:
        return results.median("options", case=row["case"], mode=row["mode"], provider=row["peer"])

    columns = {
        "option": lambda row: row["case"],
        "": mode,
        "with, ms": lambda row: number(row["median"]),
        "without, ms": lambda row: number(without(row)),
        "ratio": lambda row: f"{row['of_peer']:.3g}",
        "at most": lambda row: f"{row['target']:.3g}{missed(row)}",
    }
    rows = (row for row in results.rows("options") if "target" in row and row["mode"].startswith(SUSTAINED))
    return by_columns(rows, columns, results.rows("options"))


def layer_options_cost(results: Results) -> str:
    """The time of a call with decay and an exact window, forward + backward, and its ratio to a call with neither."""
    same = {"case": "log_decay, exact window bf16 p=2 linear (1,32,65536,64)", "mode": SUSTAINED + "fwd+bwd"}
    with_both, without = (results.median("options", provider=name, **same) for name in ("fastmax_decay_window", "fastmax"))
    return f"{number(with_both)} ms, {with_both / without:.2f} times as long"


def layer_cost(results: Results) -> str:
    """The loss and the time of a training step of the same model, by attention layer."""
    # The loss of softmax is that of `flash_attention`: the same function as SDPA's.
    loss_of = {"softmax_sdpa": "softmax", **{name: name for name in ("softmax_parts", "p2_all", "hybrid", "p2", "p1_all")}}
    titles = {
        "softmax_sdpa": "softmax (SDPA)",
        "softmax_parts": "softmax (`flash_attention`) with decay, convolution, norms, gate",
        "p2_all": "**`FastmaxSelfAttention`**",
        "hybrid": "hybrid: softmax in every fourth layer",
        "p2": "the polynomial alone, p = 2",
        "p1_all": "`FastmaxSelfAttention(p=1)`",
    }
    losses = pages.losses("equal-steps", "25M", results.root)
    contexts = sorted({row["tokens"] for row in results.rows("layer")})
    times = {n: {row["provider"]: row["median"] for row in results.rows("layer", tokens=n)} for n in contexts}
    lines = []
    for name, loss in loss_of.items():
        cells = []
        for n in contexts:
            softmax = times[n]["softmax_sdpa"]
            cells.append(f"{number(times[n][name])} ({gain(softmax / times[n][name])})" if name in times[n] else "")
        lines.append([titles[name], f"{losses[loss]:.3f}", *cells])
    header = ["attention", "loss, nats per byte", *(f"step at {n // 1024}k, ms" for n in contexts)]
    losses_at = pages.commits("equal-steps", "25M", results.root)
    return f"{table(header, lines, results.rows('layer'))} Losses: commits {losses_at}."


def auto_on_the_cpu(results: Results) -> str:
    """The n from which on the planner chooses the linear algorithm."""
    sizes = ((2, 32), (2, 64), (2, 128), (1, 64))
    found = (report.chosen_crossing(torch.device("cpu"), "fp32", p, 1, d, longest=2**17) for p, d in sizes)
    *first, last = (f"above {2**17}" if n is None else rounded(n) for n in found)
    return f"{', '.join(first)} and {last}"


# ---- docs/distributed.md


def distributed(results: Results) -> str:
    """One GPU and two GPUs, with the same number of tokens on each."""

    def at_least(row: Row) -> str:
        return f"{_work_of_rank(row) / row['target']:.0%}{missed(row)}" if "target" in row else ""

    columns = {
        "(b, h, n, d)": lambda row: row["case"],
        "one GPU, ms": lambda row: f"{results.median('distributed', case=row['case'], provider='one GPU'):.3g}",
        "two GPUs, ms": lambda row: f"{row['median']:.3g}",
        "rate per GPU": lambda row: f"{_work_of_rank(row) / row['of_peer']:.1%}",
        "target": at_least,
        "MB received": lambda row: f"{int(row['note'].split(' bytes received')[0]) / 1e6:.1f}",
    }
    return by_columns(results.rows("distributed", provider="2 GPUs", mode="fwd+bwd"), columns, results.rows("distributed"))


def ranks_alone(results: Results) -> str:
    """Each of two ranks without messages, and one GPU with a rank's tokens."""
    lines = []
    for one in results.rows("ranks_alone", provider="one GPU"):
        ranks = [results.row("ranks_alone", case=one["case"], provider=f"rank {rank} of 2") for rank in (0, 1)]
        numbers = [row["median"] / (1 if one["mode"] == "fwd+bwd" else 1024) for row in (one, *ranks)]
        rate = f"{_work_of_rank(one) * numbers[0] / max(numbers):.1%}" if one["mode"] == "fwd+bwd" else ""
        lines.append([one["case"], *(f"{x:.3g}" for x in numbers), "ms" if one["mode"] == "fwd+bwd" else "GiB", rate])
    header = ["(b, h, n, d)", "one GPU", "rank 0", "rank 1", "", "rate per GPU"]
    return table(header, lines, results.rows("ranks_alone"))


def distributed_memory(results: Results) -> str:
    """Peak memory of forward + backward."""
    rows = sorted(results.rows("distributed", mode="memory"), key=lambda row: row["provider"])
    named = {"1 GPUs": "on one", "2 GPUs": "a GPU on two"}
    return ", ".join(f"{row['median'] / 1024:.1f} GiB {named[row['provider']]}" for row in rows)


# Bytes per second that a GPU receives: one 400 Gb/s link; NVLink within a machine, as far as messages reach its 450 GB/s.
_LINKS = {"50 GB/s": 50e9, "300 GB/s": 300e9}


def exchange(results: Results) -> str:
    """The time of exchanging a layer's states between GPUs, and its ratio to the time of attention."""
    case = "log_decay bf16 p=2 linear (1,32,65536,64)"
    row = results.row("options", case=case, provider="fastmax", mode=SUSTAINED + "fwd+bwd")
    heads, tokens, d, ms = row["heads"], row["tokens"], row["head_dim"], row["median"]
    lines = []
    for world in (2, 8, 64, 1024):
        layout = contiguous_layout([tokens] * world)
        received = sum(exchanged_bytes(layout, kv_heads=heads, head_dim=d))
        gathered = 2 * (world - 1) * heads * _state_bytes(d, 2)
        collective = "all-gather" if received == gathered else "all-to-all"
        times = [received / rate * 1e3 for rate in _LINKS.values()]
        shares = [f"{x:.2f} ms, {x / ms:.1%}" for x in times]
        least = " / ".join(rounded(20 * x / ms * tokens) for x in times)
        lines.append([str(world), collective, f"{received / 1e6:.1f}", *shares, least])
    header = ["GPUs", "collective", "MB received", *(f"at {name}, of {ms:.1f} ms" for name in _LINKS)]
    return table([*header, "tokens per GPU for 5%"], lines)


def ring_hides(results: Results) -> str:
    """Tokens per GPU from which a step of the ring takes longer than its message."""
    case = "bf16 (8,32,4096,64)"
    forward, both = results.pair("flash", case=case, provider="fastmax_flash")
    row = results.row("flash", case=case, provider="fastmax_flash", mode="fwd")
    pairs = row["batch"] * row["heads"] * row["tokens"] ** 2 / 2
    least = []
    for rate in _LINKS.values():
        # A step has n^2 / 2 pairs per head. It sends k and v in bf16, in the backward also their gradients in fp32.
        sides = ((forward, 2 * 2), (both - forward, 2 * (2 + 4)))
        n = max(size * row["head_dim"] / rate / (ms * 1e-3 / pairs / 2) for ms, size in sides)
        least.append(f"{rounded(n)} at {rate / 1e9:.0f} GB/s")
    return ", ".join(least)


# ---- docs/quality.md: what is learned

RUNS = ("fastmax", "softmax")  # of examples/train_char_lm.py, with the layer's parts


def char_lm(results: Results) -> str:
    ends = _char_lm_ends(results)
    names = {
        "softmax": "softmax with the same parts",
        "fastmax": "fastmax, the layer's parts",
        "softmax_plain": "softmax alone",
        "fastmax_plain": "fastmax alone",
    }
    lines = ([title, *(f"{_mean(ends[name], key):.3f}" for key in ("train", "val"))] for name, title in names.items())
    return table(["attention", "train loss", "validation loss (nats per byte)"], lines)


def char_lm_texts(results: Results) -> str:
    """Fastmax and softmax with the same parts on several texts. Differences are between runs with the same seed."""
    rows = results.plain("docs/figures/char_lm_texts.csv")
    lines = []
    for name in dict.fromkeys(row["text"] for row in rows):
        losses = {
            run: {row["seed"]: float(row["val"]) for row in rows if (row["text"], row["run"]) == (name, run)} for run in RUNS
        }
        gaps = [loss - losses["softmax"][seed] for seed, loss in losses["fastmax"].items()]
        means = [f"{sum(found.values()) / len(found):.3f}" for found in losses.values()]
        spread_of_gaps = f"{min(gaps):+.3f} to {max(gaps):+.3f}"
        lines.append([name, ", ".join(losses["fastmax"]), *means, f"{sum(gaps) / len(gaps):+.3f}", spread_of_gaps])
    header = ["text", "seeds", "fastmax", "softmax, same parts", "difference", "lowest to highest"]
    return table(header, lines)


def char_lm_seeds(results: Results) -> str:
    count = len(_char_lm_ends(results)["fastmax"])
    return "one seed" if count == 1 else f"means of {count} seeds"


def _char_lm_ends(results: Results) -> dict[str, list[dict[str, str]]]:
    """Returns run -> the last row of every seed."""
    rows = results.plain("docs/figures/char_lm.csv")
    steps = max(int(row["step"]) for row in rows)
    ends = {}
    for row in rows:
        if int(row["step"]) == steps:
            ends.setdefault(row["run"], []).append(row)
    return ends


def _mean(rows: list[dict[str, str]], key: str) -> float:
    return sum(float(row[key]) for row in rows) / len(rows)


def char_lm_difference(first: str, second: str, results: Results) -> str:
    """The difference of the final validation losses."""
    ends = _char_lm_ends(results)
    return _in_words(_mean(ends[first], "val") - _mean(ends[second], "val"))


def _in_words(difference: float) -> str:
    return f"{abs(difference):.3f} nats per byte {'above' if difference > 0 else 'below'}"


def learned_gap(variant: str, other: str, setting: str, results: Results) -> str:
    """The difference of the losses after equal steps, averaged over the seeds that both have."""
    return _in_words(above(pages.rows_of("equal-steps", setting, results.root), variant, other, measure="loss"))


def global_keys_gain(results: Results) -> str:
    """The difference between the loss of softmax within the window and that of p = 2 with all parts."""
    found = pages.rows_of("ablation", "25M", results.root)
    whole, last = (above(found, "softmax_near", "p2_all", measure=measure) for measure in ("loss", "last_quarter"))
    return f"{whole:.3f} nats per byte, and {last:.3f} in the last quarter of a window"


def conversion_swapped(results: Results) -> str:
    found = pages.rows_of("conversion", "25M", results.root)
    before, swapped, transferred = (
        spread(found, variant="window_decay", measure=stage).mean for stage in ("before", "swapped", "transferred")
    )
    return f"{swapped - before:.2f} nats per byte, of which fit and transfer take back {swapped - transferred:.2f}"


def conversion_ends(results: Results) -> str:
    """The losses with all layers swapped and with three of four, minus that of the softmax model after the same fine-tuning."""
    found = pages.rows_of("conversion", "25M", results.root)
    softmax, every, hybrid = (
        spread(found, variant=name, measure="finetuned").mean for name in ("softmax", "window_decay", "hybrid")
    )
    return f"{every - softmax:.2f}, and where one layer in four stays softmax {hybrid - softmax:.2f}"


def convert(results: Results) -> str:
    columns = {
        "": lambda row: row["stage"],
        "loss (nats per byte)": lambda row: f"{float(row['loss']):.4f}",
        "of the last quarter of positions": lambda row: f"{float(row['last_quarter']):.4f}",
    }
    return by_columns(results.plain("docs/figures/convert_char_lm.csv"), columns)


def layer_parts(results: Results) -> str:
    header = ["attention", "loss (nats per byte)", "of the last quarter of positions"]
    rows = results.plain("docs/figures/layer_parts.csv")
    return table(header, ([row[key] for key in ("variant", "loss", "last_quarter")] for row in rows))


def convert_starts(results: Results) -> str:
    rows = results.plain("docs/figures/convert_starts.csv")
    return table(["fitted", "before", "after"], (row.values() for row in rows))


def accuracies(path: str, results: Results) -> str:
    rows = results.plain(path)
    pairs = [name for name in rows[0] if name.startswith("pairs_")]
    header = ["", *(f"{name.removeprefix('pairs_')} pairs" for name in pairs)]
    return table(header, ([row["attention"], *(f"{float(row[name]):.0%}" for name in pairs)] for row in rows))


def recall_of(name: str, results: Results) -> str:
    (row,) = (row for row in results.plain("docs/figures/recall_scales.csv") if row["attention"] == name)
    return f"{float(row['pairs_64']):.0%}"


# ---- docs/softmax.md


def flash(results: Results) -> str:
    lines = []
    for case in results.cases("flash", provider="fastmax_flash"):
        ours, flash, cudnn = (
            results.pair("flash", case=case, provider=x) for x in ("fastmax_flash", "sdpa_flash", "sdpa_cudnn")
        )
        same = {key: results.rows("flash", case=case)[0][key] for key in ("batch", "heads", "tokens", "head_dim")}
        polynomial = results.pair("cuda", provider="fastmax", algorithm="quadratic", **same)
        ratio = " / ".join(f"{a / b:.2f}" for a, b in zip(ours, flash, strict=True))
        lines.append([size(case), *map(both, (ours, polynomial, flash, cudnn)), ratio])
    header = ["(b, h, n, d)", "flash_attention", "Fastmax p = 2, quadratic", "SDPA flash", "SDPA cuDNN", "of SDPA flash"]
    return table(header, lines, results.rows("flash"))


def flash_range(results: Results) -> str:
    """The time of `flash_attention` over that of PyTorch's fastest backend."""
    ratios = []
    for row in results.rows("flash", provider="fastmax_flash"):
        (softmax,) = _fastest_softmax(results, "flash", case=row["case"], mode=row["mode"]).values()
        ratios.append(row["median"] / softmax)
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def row_softmax(results: Results) -> str:
    lines = []
    for case in results.cases("softmax", dtype="bf16"):
        cells = []
        for dtype in ("bf16", "fp32"):
            row = results.row("softmax", case=case.replace("bf16", dtype), provider="softmax_online")
            cells += [f"{row['of_peer']:.2f}", f"{row['gb_per_s'] / 1e3:.1f}"]
        lines.append([case.removeprefix("softmax bf16 "), *cells])
    header = ["rows x width", "bf16, of torch.softmax", "TB/s", "fp32, of torch.softmax", "TB/s"]
    return table(header, lines, results.rows("softmax"))


def traffic(results: Results) -> str:
    owners = {"fastmax": "", "fastmax_flash": "ours", "sdpa_flash": "PyTorch's"}
    owners |= {"plain": "three of the kernels of plain PyTorch"}

    def megabytes(row: Row, *keys: str) -> str:
        return " / ".join(f"{float(row[key]) / 1e6:.0f}" for key in keys)

    columns = {
        "": lambda row: ", ".join(filter(None, (row["algorithm"], owners[row["provider"]], size(row["case"])))),
        "formula": lambda row: megabytes(row, "expected_read", "expected_written"),
        "measured": lambda row: megabytes(row, "read", "written"),
    }
    rows = [row for row in results.plain("benchmarks/results/traffic.csv") if row["kernel"] == "sum"]
    return by_columns(rows, columns, rows)


def traffic_formula(results: Results) -> str:
    """MiB that the forward of one head moves at d = 128 in bf16."""
    options: dict[str, dict] = {
        "standard": {"algorithm": "standard"},
        "flash, 128 queries a block, no cache": {"block_size": 128},
        "flash or quadratic": {},
        "linear, p = 2": {"algorithm": "linear"},
        "the same, causal": {"algorithm": "linear", "causal": True},
        "linear, p = 1": {"algorithm": "linear", "p": 1},
    }

    def mib(given: dict, n: int) -> str:
        return f"{fastmax.hbm_traffic(n, 128, torch.bfloat16, **given).total / 2**20:.2f}"

    columns = {"tokens": str} | {name: partial(mib, given) for name, given in options.items()}
    return by_columns((512, 1024, 2048, 4096, 16384, 65536), columns)


def cpu_device(results: Results) -> str:
    row = results.rows("cpu")[0]
    return f"{row['device']}, PyTorch {row['torch']}"


# ---- pages

# Name in a mark of a page -> function that returns its text.
BLOCKS: dict[str, Callable[[Results], str]] = {
    "break-even": break_even,
    "train-break-even": train_break_even,
    "attention": attention,
    "attention-of-65536": attention_of_65536,
    "cuda": cuda,
    "cuda-memory": cuda_memory,
    "cuda-host": cuda_host,
    "crossover": crossover,
    "decode-rate": decode_rate,
    "decode-gain": decode_gain,
    "decode-context": decode_context,
    "ancestor": ancestor,
    "peers": peers,
    "train": train,
    "cpu": cpu,
    "options": options,
    "layer-options-cost": layer_options_cost,
    "layer-cost": layer_cost,
    "auto-on-the-cpu": auto_on_the_cpu,
    "distributed": distributed,
    "ranks-alone": ranks_alone,
    "distributed-memory": distributed_memory,
    "exchange": exchange,
    "ring-hides": ring_hides,
    "char-lm": char_lm,
    "char-lm-texts": char_lm_texts,
    "char-lm-seeds": char_lm_seeds,
    "far-keys-gain": global_keys_gain,
    "conversion-swapped": conversion_swapped,
    "conversion-ends": conversion_ends,
    "convert": convert,
    "layer-parts": layer_parts,
    "convert-starts": convert_starts,
    "flash": flash,
    "flash-range": flash_range,
    "row-softmax": row_softmax,
    "traffic": traffic,
    "traffic-formula": traffic_formula,
    "cpu-device": cpu_device,
    "state-at-64": lambda results: f"{_state_bytes(64, 2) / 1e3:.0f} kB",
    "matmul-rate": lambda results: f"{MATMUL['bf16'] / 1e12:.0f}",
    "copy-rate": lambda results: f"{COPY / 1e12:.2f}",
    "train-memory": lambda results: f"{report.memory_spread(results.rows('train')):.1%}",
    "char-lm-gap": partial(char_lm_difference, "fastmax", "softmax"),
    "char-lm-alone": partial(char_lm_difference, "fastmax", "softmax_plain"),
    "char-lm-gap-alone": partial(char_lm_difference, "fastmax_plain", "softmax_plain"),
    "learned-gap": partial(learned_gap, "p2_all", "softmax_parts", "25M"),
    "learned-gap-softmax": partial(learned_gap, "softmax_parts", "p2_all", "25M"),
    "learned-gap-plain": partial(learned_gap, "p2_all", "softmax", "25M"),
    "learned-gap-wide": partial(learned_gap, "p2_wide", "softmax_wide", "25M"),
    "learned-gap-small": partial(learned_gap, "p2_all", "softmax_parts", "0.8M"),
    "recall": partial(accuracies, "docs/figures/associative_recall.csv"),
    "recall-scales": partial(accuracies, "docs/figures/recall_scales.csv"),
    "recall-rms": partial(recall_of, "RMS-normalised, temperature 1"),
    "recall-token": partial(recall_of, 'as projected, normalize="token", temperature 1'),
    **{f"learn-{name}": partial(lambda name, results: pages.section(name, results.root, table), name) for name in pages.TABLES},
}


def rewritten(text: str, results: Results) -> str:
    """Returns the page with every marked block rewritten."""
    if text.count("<!-- table:") + text.count("<!-- value:") != len(_MARKED.findall(text)):
        raise ValueError("a mark is not of the form <!-- table: NAME -->...<!-- end --> (or value)")

    def replacement(match: re.Match) -> str:
        start, kind, name, _, end = match.groups()
        if name not in BLOCKS:
            raise ValueError(f"no block is named {name!r}; there are {', '.join(sorted(BLOCKS))}")
        if kind == "table":
            return f"{start}\n\n{BLOCKS[name](results)}\n\n{end}"
        if match.start() == 0 or text[match.start() - 1] == "\n":
            raise ValueError(f"the mark of {name!r} begins a line, which in Markdown begins a block")
        return f"{start}{BLOCKS[name](results)}{end}"

    return _MARKED.sub(replacement, text)


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page is out of date")
    options = parser.parse_args(arguments)
    results, stale = Results(root), 0
    for path in (path for pattern in PAGES for path in sorted(root.glob(pattern))):
        text = path.read_text()
        try:
            new = rewritten(text, results)
        except ValueError as error:
            raise ValueError(f"{path.relative_to(root)}: {error}") from error
        if new == text:
            continue
        stale += 1
        if options.check:
            print(f"{path.relative_to(root)} is out of date: python -m benchmarks.tables", file=sys.stderr)
        else:
            path.write_text(new)
            print(f"wrote {path.relative_to(root)}")
    return int(options.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
