"""Writes what was measured into README.md and docs/: `python -m benchmarks.tables`; `--check` says what is out of date.

A page holds the name of a table or of a value, and what stands between the marks is rewritten from the CSVs of
benchmarks/results/ and docs/figures/:

    <!-- table: train -->
    | context | fastmax, p = 2 | ...
    <!-- end -->

    memory is the same within <!-- value: train-memory -->0.3%<!-- end -->

(A value's mark must not begin a line: in Markdown it would begin a block.) Each block is a function here. It fails, rather than
leaves a blank, where a CSV no longer has the rows that it names.
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
        """Rows of a suite with a number, that have these values; at least one."""
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
        """Forward, forward + backward, of single calls or of calls back to back."""
        start = SUSTAINED if sustained else ""
        forward, forward_backward = (self.median(suite, mode=start + mode, **equal) for mode in ("fwd", "fwd+bwd"))
        return forward, forward_backward

    def cases(self, suite: str, **equal: object) -> list[str]:
        return list(dict.fromkeys(row["case"] for row in self.rows(suite, **equal)))

    def plain(self, path: str) -> list[dict[str, str]]:
        """Rows of a CSV that no suite wrote."""
        with (self.root / path).open(newline="") as file:
            found = list(csv.DictReader(file))
        if not found:
            raise LookupError(f"{path} has no row")
        return found


RUNS = ("fastmax", "softmax")  # of examples/train_char_lm.py, with the layer's parts

Block = Callable[[Results], str]
BLOCKS: dict[str, Block] = {}


def block(function: Block) -> Block:
    """Under its name with hyphens."""
    BLOCKS[function.__name__.strip("_").replace("_", "-")] = function
    return function


def number(x: float) -> str:
    """Three digits: 0.256, 4.47, 17.1, 141, 1166."""
    return f"{x:.0f}" if abs(x) >= 99.95 else f"{x:#.3g}"


def gain(x: float) -> str:
    """Two digits: 0.66, 1.7, 24."""
    return f"{x:.0f}" if x >= 9.95 else f"{x:.1f}" if x >= 0.995 else f"{x:.2f}"


def measured_at(rows: Iterable[Row]) -> str:
    """A line below a table: where and when its rows were measured."""
    rows = list(rows)
    facts = {key: list(dict.fromkeys(row[key] for row in rows)) for key in ("device", "torch", "commit")}
    device = " and ".join(dict.fromkeys(name.partition(",")[0] for name in facts["device"]))
    commits = f"commit{'s' if len(facts['commit']) > 1 else ''} {', '.join(facts['commit'])}"
    return f"Measured on {device} with PyTorch {' and '.join(facts['torch'])} at {commits}."


def both(pair: Iterable[float]) -> str:
    return " / ".join(map(number, pair))


def rounded(n: float) -> str:
    """Two digits, of what lies between two sizes that were measured: 2600, 11000."""
    digits = 10 ** (math.floor(math.log10(n)) - 1)
    return str(int(round(n / digits) * digits))


def table(header: Iterable[str], lines: Iterable[Iterable[str]], measured: Iterable[Row] = ()) -> str:
    """Markdown; below it where and when the rows `measured` were measured."""
    header = list(header)
    lines = [header, ["---"] * len(header), *lines]
    if wrong := [line for line in lines if len(line) != len(header)]:
        raise ValueError(f"{len(header)} columns, but {wrong[0]}")
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\n{measured_at(measured)}" if measured else text


def size(case: str) -> str:
    """`(8, 32, 4096, 64)` of a case's label."""
    return re.search(r"\([\d,]+\)", case).group().replace(",", ", ")


# ---- where linear attention pays


def _fastest_softmax(results: Results, suite: str, **equal: object) -> dict[int, float]:
    """n -> time of the fastest of PyTorch's backends."""
    times: dict[int, float] = {}
    for row in results.rows(suite, **equal):
        if row["provider"].startswith("sdpa"):
            times[row["tokens"]] = min(row["median"], times.get(row["tokens"], math.inf))
    return times


def _overtakes(results: Results, suite: str, provider: str, **equal: object) -> str:
    ours = {row["tokens"]: row["median"] for row in results.rows(suite, provider=provider, **equal)}
    softmax = _fastest_softmax(results, suite, **equal)
    n = report.crossing(softmax, ours)
    if n is None:
        return f"above {max(softmax)}"
    return f"below {min(softmax)}" if n == min(softmax) else rounded(n)


def _state_bytes(d: int, p: int) -> int:
    """Of one key/value head."""
    state = fastmax.decoding.init_state(1, 1, d, p=p, a0=2.0, normalize="token")  # settings with which p = 1 is positive
    return sum(x.numel() * x.element_size() for x in (state.values, state.weights))


@block
def break_even(results: Results) -> str:
    """The n from which attention's forward + backward is faster than softmax's; how many tokens of a cache a state weighs."""

    def line(d: int) -> list[str]:
        measured = [_overtakes(results, "scaling", f"fastmax_p{p}", head_dim=d, mode="fwd+bwd") for p in (2, 1)]
        states = [_state_bytes(d, p) for p in (2, 1)]
        cached = 2 * d * torch.bfloat16.itemsize  # a key and a value
        decoding = [f"{state / 1e3:.0f} kB = {math.ceil(state / cached)} tokens" for state in states]
        return [str(d), *measured, *decoding]

    header = ["head_dim", "training, p = 2", "p = 1", "generating, p = 2", "p = 1"]
    return table(header, (line(d) for d in (32, 64, 128)), results.rows("scaling"))


@block
def state_at_64(results: Results) -> str:
    return f"{_state_bytes(64, 2) / 1e3:.0f} kB"


@block
def train_break_even(results: Results) -> str:
    two, one = (_overtakes(results, "train", f"fastmax_p{p}", mode="train") for p in (2, 1))
    return f"{two} tokens for p = 2 and {one} for p = 1"


# ---- attention on a GPU


def _attention_cases(results: Results) -> list[str]:
    return results.cases("cuda", dtype="bf16", provider="fastmax", mode="fwd+bwd")


@block
def attention(results: Results) -> str:
    """Ours beside the fastest softmax, the largest gain first: calls back to back, and single calls after a pause."""
    lines = []
    for case in _attention_cases(results):
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


@block
def cuda(results: Results) -> str:
    """Every case with its aim and its floor; bold where the aim is missed."""

    def judged(row: Row) -> str:
        text = number(row["median"])
        return f"**{text}**" if row["met"] == "no" else text

    lines = []
    for case in results.cases("cuda", provider="fastmax", mode="fwd"):
        rows = [
            row
            for mode in ("fwd", "fwd+bwd")
            for row in results.rows("cuda", case=case, provider="fastmax")
            if row["mode"] == mode
        ]
        peer = rows[0]["peer"]
        lines.append(
            [
                f"{rows[0]['algorithm']} {size(case)}, {rows[0]['p']}"
                + (", TF32, forward" if rows[0]["dtype"] == "tf32" else ""),
                " / ".join(map(judged, rows)),
                " / ".join(f"{row['target']:g}" for row in rows),
                both(results.median("cuda", case=case, provider=peer, mode=row["mode"]) for row in rows)
                + ("" if peer == "sdpa_cudnn" else f" ({peer.removeprefix('sdpa_')})"),
                " / ".join(f"{row['of_floor']:.1f}" for row in rows),
            ]
        )
    header = ["algorithm, (b, h, n, d), p", "fastmax", "aim", "SDPA cuDNN", "times the floor"]
    return table(header, lines, results.rows("cuda"))


@block
def matmul_rate(results: Results) -> str:
    return f"{MATMUL['bf16'] / 1e12:.0f}"


@block
def copy_rate(results: Results) -> str:
    return f"{COPY / 1e12:.2f}"


@block
def cuda_memory(results: Results) -> str:
    row = results.row("cuda", provider="fastmax", mode="memory")
    return f"{size(row['case'])}: {row['median']:.0f} MiB, {row['of_peer']:.2f} times cuDNN's"


@block
def cuda_host(results: Results) -> str:
    row = results.row("cuda", provider="fastmax", mode="host")
    return f"{row['median']:.0f} us, {row['of_peer']:.2f} times SDPA's"


@block
def cold_forwards(results: Results) -> str:
    """The two forwards at d = 128, measured with no softmax beside them."""
    long = {"tokens": 65536, "head_dim": 128, "mode": "fwd"}
    two, one = (number(results.median("peers", provider=f"fastmax_p{p}", **long)) for p in (2, 1))
    return f"{two} and {one} ms"


@block
def short_forwards(results: Results) -> str:
    short = {"tokens": 4096, "head_dim": 128, "mode": "fwd"}
    ours, theirs = (results.median("peers", provider=name, **short) for name in ("fastmax_p1", "fla_linear"))
    return f"{number(ours)} and {number(theirs)} ms"


@block
def crossover(results: Results) -> str:
    """Where linear overtakes quadratic in bf16."""
    lines = []
    bf16 = {"dtype": "bf16", "mode": "fwd+bwd"}
    for p, d in dict.fromkeys((row["p"], row["head_dim"]) for row in results.rows("crossover", **bf16)):
        slow, fast = (
            {row["tokens"]: row["median"] for row in results.rows("crossover", p=p, head_dim=d, provider=name, **bf16)}
            for name in ("quadratic", "linear")
        )
        n = report.crossing(slow, fast)
        lines.append(
            [
                f"p = {p}",
                str(d),
                f"above {max(slow)}" if n is None else f"{min(slow)} or less" if n == min(slow) else rounded(n),
            ]
        )
    return table(["", "head_dim", "linear is faster from n ="], lines, results.rows("crossover"))


@block
def decode(results: Results) -> str:
    lines = []
    for case in results.cases("decode", provider="fastmax", tokens=1, mode="step"):
        row = results.row("decode", case=case, provider="fastmax", mode="step")
        host = results.median("decode", case=case, provider="fastmax", mode="host")
        rate = row["gb_per_s"]
        lines.append(
            [
                str(row["batch"] * row["heads"]),
                number(row["median"]),
                f"{rate / 1e3:.2f}",
                f"{1e9 * rate / COPY:.0%}",
                f"{host:.0f}",
            ]
        )
    header = ["batch x heads", "us a step", "TB/s", "of the copy rate", "us of the host"]
    return table(header, lines, results.rows("decode"))


@block
def decode_rate(results: Results) -> str:
    """Where there are enough heads to fill the device."""
    rates = [
        1e9 * row["gb_per_s"] / COPY
        for row in results.rows("decode", provider="fastmax", tokens=1, mode="step")
        if row["batch"] * row["heads"] >= 64
    ]
    return f"{min(rates):.0%} to {max(rates):.0%}"


def _steps(results: Results, *providers: str, **same) -> dict[int, float]:
    """Microseconds of a step by the tokens of context, of the fastest of the providers."""
    times = {}
    for provider in providers:
        for row in results.rows("decode", provider=provider, mode="step", **same):
            times[row["tokens"]] = min(row["median"], times.get(row["tokens"], row["median"]))
    return times


@block
def decode_gain(results: Results) -> str:
    same = {"head_dim": 64, "batch": 64, "heads": 8}
    ours, softmax = _steps(results, "fastmax_gathered", **same), _steps(results, "sdpa_flash", "sdpa_cudnn", **same)
    times = {tokens: softmax[tokens] / ours[tokens] for tokens in (16384, 131072)}
    return f"{times[16384]:.1f} times faster at 16k tokens of context and {times[131072]:.0f} times at 128k"


@block
def decode_context(results: Results) -> str:
    """Steps beside softmax's with a cache, of which the faster one counts."""
    lines, gathered = [], results.rows("decode", provider="fastmax_gathered", mode="step")
    for d, batch, heads in dict.fromkeys((row["head_dim"], row["batch"], row["heads"]) for row in gathered):
        same = {"head_dim": d, "batch": batch, "heads": heads}
        ours, softmax = _steps(results, "fastmax_gathered", **same), _steps(results, "sdpa_flash", "sdpa_cudnn", **same)
        in_place = min(_steps(results, "fastmax_in_place", **same).values())
        cells = (f"{number(softmax[n])} ({gain(softmax[n] / ours[n])})" for n in ours)
        lines.append([str(d), f"{batch} x {heads}", number(min(ours.values())), number(in_place), *cells])
    contexts = (f"SDPA, {n // 1024}k" for n in dict.fromkeys(row["tokens"] for row in gathered))
    header = ["head_dim", "batch x heads", "gathered, us", "in place, us", *contexts]
    return table(header, lines, results.rows("decode"))


@block
def ancestor(results: Results) -> str:
    columns = (("bf16", "fastmax"), ("tf32", "fastmax"), ("fp32", "fastmax"), ("fp32", "fastmax_autograd"))
    lines = []
    for first in results.rows("ancestor", dtype="bf16", provider="fastmax", causal="True"):
        same = {key: first[key] for key in ("heads", "tokens", "head_dim")}
        times = [
            both(results.median("ancestor", dtype=dtype, provider=name, causal=causal, **same) for causal in ("True", "False"))
            for dtype, name in columns
        ]
        lines.append([f"({', '.join(str(x) for x in same.values())})", *times, first["published"].partition(" (")[0]])
    names = ("bf16", "TF32", "fp32", "PyTorch operations, fp32")
    header = ["(heads, tokens, head_dim)", *(f"{name}, causal / full" for name in names), "published"]
    return table(header, lines, results.rows("ancestor"))


@block
def peers(results: Results) -> str:
    names = ("fastmax_p2", "fla_based", "fla_based_chunk", "fastmax_p1", "fla_linear", "fla_retention")
    titles = (
        "Fastmax p = 2",
        "`parallel_based`",
        "`fused_chunk_based`",
        "Fastmax p = 1",
        "`chunk_linear_attn`",
        "`chunk_retention`",
    )
    lines = []
    for d in (16, 64, 128):
        here = results.rows("peers", tokens=65536, head_dim=d)
        cells = []
        for name in names:
            times = {row["mode"]: row["median"] for row in here if row["provider"] == name}
            cells.append(both((times["fwd"], times["fwd+bwd"])) if times else "")
        lines.append([str(d), *cells])
    return table(["head_dim", *titles], lines, results.rows("peers"))


@block
def few_heads(results: Results) -> str:
    """What 16 heads take and half of what 32 take."""
    long = {"tokens": 65536, "head_dim": 64, "mode": "fwd+bwd"}
    some = results.median("scaling", provider="fastmax_p2", **long)
    many = results.median("cuda", provider="fastmax", heads=32, **long)
    return f"{number(some)}, where half of what 32 heads take would be {number(many / 2)}"


@block
def memory_of_bytes(results: Results) -> str:
    """Peak memory over the bytes of q, k, v, o and their gradients."""
    shown = (8192, 16384, 32768, 65536, 262144, 1048576)

    def ratio(d: int, n: int, name: str) -> str:
        rows = [row for row in results.rows("scaling", head_dim=d, tokens=n, mode="memory") if row["provider"] == name]
        return f"{rows[0]['median'] * 2**20 / (8 * 16 * n * d * torch.bfloat16.itemsize):.2f}" if rows else ""

    names = {"fastmax_p2": "p = 2", "fastmax_p1": "p = 1", "sdpa_cudnn": "softmax (cuDNN)", "sdpa_flash": "softmax (flash)"}
    lines = ([title, *(ratio(64, n, name) for n in shown)] for name, title in names.items())
    return table(["(1, 16, n, 64), n =", *map(str, shown)], lines, results.rows("scaling"))


# ---- training, the CPU, learning


@block
def train(results: Results) -> str:
    names = ("fastmax_p2", "fastmax_p1", "sdpa_cudnn", "sdpa_flash")
    lines = []
    for n in sorted({row["tokens"] for row in results.rows("train", mode="train")}):
        by = {row["provider"]: row for row in results.rows("train", mode="train", tokens=n)}
        speeds = [f"{by[name]['batch'] * n / by[name]['median']:.0f} k" if name in by else "" for name in names]
        lines.append([str(n), *speeds])
    header = ["context", "fastmax, p = 2", "fastmax, p = 1", "softmax (cuDNN)", "softmax (flash)"]
    return table(header, lines, results.rows("train"))


@block
def train_memory(results: Results) -> str:
    return f"{report.memory_spread(results.rows('train')):.1%}"


@block
def cpu(results: Results) -> str:
    lines = []
    for case in results.cases("cpu", provider="fastmax"):
        row = results.row("cpu", case=case, provider="fastmax", mode="fwd+bwd")
        ours, theirs = (results.pair("cpu", case=case, provider=name) for name in ("fastmax", "sdpa"))
        gains = " / ".join(gain(b / a) for a, b in zip(ours, theirs, strict=True))
        aim = f"{1 / row['target']:.2g}" + ("" if row["met"] == "yes" else ", missed")
        lines.append([f"p = {row['p']}, {row['algorithm']}, {size(case)}", both(ours), both(theirs), gains, aim])
    header = ["p, algorithm, (batch, heads, tokens, head_dim)", "fastmax, ms", "softmax (SDPA), ms", "times faster", "aim"]
    return table(header, lines, results.rows("cpu"))


@block
def options(results: Results) -> str:
    """The cost of each option: rows with a target against their peer, calls back to back first."""
    lines = []
    for row in results.rows("options"):
        if "target" not in row or not row["mode"].startswith(SUSTAINED):
            continue
        mode = row["mode"].removeprefix(SUSTAINED)
        peer = results.row("options", case=row["case"], mode=row["mode"], provider=row["peer"])
        single = results.row("options", case=row["case"], mode=mode, provider=row["provider"])
        aim = f"{row['target']:.3g}" + ("" if row["met"] == "yes" else ", missed")
        numbers = [number(x["median"]) for x in (row, peer)] + [f"{x['of_peer']:.3g}" for x in (row, single)]
        lines.append([row["case"], mode, *numbers, aim])
    header = ["option", "", "with, ms", "without, ms", "ratio", "ratio of single calls", "at most"]
    return table(header, lines, results.rows("options"))


@block
def layer_options_cost(results: Results) -> str:
    """The time of a call with decay and an exact window, forward + backward, and its ratio to a call with neither."""
    with_both, without = (
        results.median(
            "options",
            case="log_decay, exact window bf16 p=2 linear (1,32,65536,64)",
            mode=SUSTAINED + "fwd+bwd",
            provider=name,
        )
        for name in ("fastmax_decay_window", "fastmax")
    )
    return f"{number(with_both)} ms, {with_both / without:.2f} times as long"


@block
def distributed(results: Results) -> str:
    """One GPU's tokens on it alone, and as many on each of two."""
    lines = []
    for row in results.rows("distributed", provider="2 GPUs", mode="fwd+bwd"):
        one = results.row("distributed", case=row["case"], provider="one GPU")
        work = 1 if row["algorithm"] == "linear" else 2  # of a rank, in that of one GPU's tokens
        received = int(row["note"].split(" bytes received")[0])
        asked = f"{work / row['target']:.0%}" + ("" if row["met"] == "yes" else ", missed") if "target" in row else ""
        times = (f"{x['median']:.3g}" for x in (one, row))
        lines.append([row["case"], *times, f"{work / row['of_peer']:.1%}", asked, f"{received / 1e6:.1f}"])
    header = ["(b, h, n, d)", "one GPU, ms", "two GPUs, ms", "of one GPU's rate", "at least", "MB received by a GPU"]
    return table(header, lines, results.rows("distributed"))


@block
def ranks_alone(results: Results) -> str:
    """What each of two ranks computes, beside one GPU's tokens on it alone."""
    lines = []
    for one in results.rows("ranks_alone", provider="one GPU"):
        ranks = [results.row("ranks_alone", case=one["case"], provider=f"rank {rank} of 2") for rank in (0, 1)]
        numbers = [row["median"] / (1 if one["mode"] == "fwd+bwd" else 1024) for row in (one, *ranks)]
        work = 1 if one["algorithm"] == "linear" else 2  # of a rank, in that of one GPU's tokens
        rate = f"{work * numbers[0] / max(numbers):.1%}" if one["mode"] == "fwd+bwd" else ""
        lines.append([one["case"], *(f"{x:.3g}" for x in numbers), "ms" if one["mode"] == "fwd+bwd" else "GiB", rate])
    header = ["(b, h, n, d)", "one GPU", "first of two ranks", "last", "", "of one GPU's rate"]
    return table(header, lines, results.rows("ranks_alone"))


@block
def distributed_memory(results: Results) -> str:
    """Peak bytes of forward + backward."""
    rows = sorted(results.rows("distributed", mode="memory"), key=lambda row: row["provider"])
    named = {"1 GPUs": "on one", "2 GPUs": "a GPU on two"}
    return ", ".join(f"{row['median'] / 1024:.1f} GiB {named[row['provider']]}" for row in rows)


# Bytes a second that a GPU receives: one 400 Gb/s link; NVLink inside a machine, of 450 GB/s each way, as messages reach it.
_LINKS = {"50 GB/s": 50e9, "300 GB/s": 300e9}


@block
def exchange(results: Results) -> str:
    """What a layer's states weigh on many GPUs, against the time that it computes."""
    case = "log_decay bf16 p=2 linear (1,32,65536,64)"
    row = results.row("options", case=case, provider="fastmax", mode=SUSTAINED + "fwd+bwd")
    heads, tokens, d, ms = row["heads"], row["tokens"], row["head_dim"], row["median"]
    lines = []
    for world in (2, 8, 64, 1024):
        layout = contiguous_layout([tokens] * world)
        received = sum(exchanged_bytes(layout, kv_heads=heads, head_dim=d))
        gathered = 2 * (world - 1) * heads * _state_bytes(d, 2)
        way = "all states" if received == gathered else "shares"
        times = [received / rate * 1e3 for rate in _LINKS.values()]
        shares = [f"{x:.2f} ms, {x / ms:.1%}" for x in times]
        least = " / ".join(rounded(20 * x / ms * tokens) for x in times)
        lines.append([str(world), way, f"{received / 1e6:.1f}", *shares, least])
    header = ["GPUs", "exchange", "MB received by a GPU, fwd + bwd", *(f"at {name}, of {ms:.1f} ms" for name in _LINKS)]
    return table([*header, "tokens a GPU at which it is 5%"], lines)


@block
def ring_hides(results: Results) -> str:
    """Tokens a GPU from which on a step of the ring takes longer than its message."""
    case = "bf16 (8,32,4096,64)"
    forward, both = results.pair("flash", case=case, provider="fastmax_flash")
    row = results.row("flash", case=case, provider="fastmax_flash", mode="fwd")
    pairs = row["batch"] * row["heads"] * row["tokens"] ** 2 / 2
    least = []
    for rate in _LINKS.values():
        # A step has n^2 / 2 pairs a head; k and v in bf16, backward also their gradients in fp32.
        sides = ((forward, 2 * 2), (both - forward, 2 * (2 + 4)))
        n = max(size * row["head_dim"] / rate / (ms * 1e-3 / pairs / 2) for ms, size in sides)
        least.append(f"{rounded(n)} at {rate / 1e9:.0f} GB/s")
    return ", ".join(least)


@block
def cpu_device(results: Results) -> str:
    row = results.rows("cpu")[0]
    return f"{row['device']}, PyTorch {row['torch']}"


@block
def cuda_device(results: Results) -> str:
    row = results.rows("cuda")[0]
    return f"{row['device'].partition(',')[0]} (PyTorch {row['torch']})"


@block
def auto_on_the_cpu(results: Results) -> str:
    """The n from which on the planner takes the linear algorithm."""
    sizes = ((2, 32), (2, 64), (2, 128), (1, 64))
    found = (report.chosen_crossing(torch.device("cpu"), "fp32", p, 1, d, longest=2**17) for p, d in sizes)
    *first, last = (f"above {2**17}" if n is None else rounded(n) for n in found)
    return f"{', '.join(first)} and {last}"


@block
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


@block
def char_lm_texts(results: Results) -> str:
    """Fastmax and softmax with the same parts on several texts, each seed paired with itself."""
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


@block
def char_lm_seeds(results: Results) -> str:
    count = len(_char_lm_ends(results)["fastmax"])
    return "one seed" if count == 1 else f"means of {count} seeds"


@block
def char_lm_gap(results: Results) -> str:
    """Of Fastmax from softmax with the same parts."""
    return _char_lm_difference(results, "fastmax", "softmax")


@block
def char_lm_alone(results: Results) -> str:
    """Of Fastmax with parts from softmax alone."""
    return _char_lm_difference(results, "fastmax", "softmax_plain")


@block
def char_lm_gap_alone(results: Results) -> str:
    """Of Fastmax alone from softmax alone."""
    return _char_lm_difference(results, "fastmax_plain", "softmax_plain")


def _char_lm_ends(results: Results) -> dict[str, list[dict[str, str]]]:
    """The last row of every seed, by run."""
    rows = results.plain("docs/figures/char_lm.csv")
    steps = max(int(row["step"]) for row in rows)
    ends = {}
    for row in rows:
        if int(row["step"]) == steps:
            ends.setdefault(row["run"], []).append(row)
    return ends


def _mean(rows: list[dict[str, str]], key: str) -> float:
    return sum(float(row[key]) for row in rows) / len(rows)


def _char_lm_difference(results: Results, first: str, second: str) -> str:
    """Of validation losses at the end, and which way."""
    ends = _char_lm_ends(results)
    return _in_words(_mean(ends[first], "val") - _mean(ends[second], "val"))


def _in_words(difference: float) -> str:
    return f"{abs(difference):.3f} nats per byte {'above' if difference > 0 else 'below'}"


def _learned_gap(variant: str, other: str, setting: str, results: Results) -> str:
    """After equal steps, the mean over the seeds that both have."""
    return _in_words(above(pages.rows_of("equal-steps", setting, results.root), variant, other, measure="loss"))


BLOCKS["learned-gap"] = partial(_learned_gap, "p2_all", "softmax_parts", "25M")
BLOCKS["learned-gap-softmax"] = partial(_learned_gap, "softmax_parts", "p2_all", "25M")
BLOCKS["learned-gap-plain"] = partial(_learned_gap, "p2_all", "softmax", "25M")
BLOCKS["learned-gap-wide"] = partial(_learned_gap, "p2_wide", "softmax_wide", "25M")
BLOCKS["learned-gap-small"] = partial(_learned_gap, "p2_all", "softmax_parts", "0.8M")


@block
def far_keys_gain(results: Results) -> str:
    """Of the polynomial: all parts below softmax within the window."""
    found = pages.rows_of("ablation", "25M", results.root)
    whole, last = (above(found, "softmax_near", "p2_all", measure=measure) for measure in ("loss", "last_quarter"))
    return f"{whole:.3f} nats per byte, and {last:.3f} in the last quarter of a window"


@block
def conversion_swapped(results: Results) -> str:
    found = pages.rows_of("conversion", "25M", results.root)
    before, swapped, transferred = (
        spread(found, variant="window_decay", measure=stage).mean for stage in ("before", "swapped", "transferred")
    )
    return f"{swapped - before:.2f} nats per byte, of which fit and transfer take back {swapped - transferred:.2f}"


@block
def conversion_ends(results: Results) -> str:
    """Above the softmax model with the same fine-tuning: all layers, three of four."""
    found = pages.rows_of("conversion", "25M", results.root)
    softmax, every, hybrid = (
        spread(found, variant=name, measure="finetuned").mean for name in ("softmax", "window_decay", "hybrid")
    )
    return f"{every - softmax:.2f}, and where one layer in four stays softmax {hybrid - softmax:.2f}"


@block
def attention_of_65536(results: Results) -> str:
    equal = {"head_dim": 64, "heads": 32, "mode": SUSTAINED + "fwd+bwd"}
    ours = results.median("cuda", provider="fastmax", tokens=65536, **equal)
    softmax = _fastest_softmax(results, "cuda", **equal)[65536]
    return f"{number(ours)} ms against {number(softmax)} ms, {gain(softmax / ours)} times less"


@block
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


@block
def layer_parts(results: Results) -> str:
    lines = ([row["variant"], row["loss"], row["last_quarter"]] for row in results.plain("docs/figures/layer_parts.csv"))
    return table(["attention", "loss (nats per byte)", "of the last quarter of positions"], lines)


@block
def convert(results: Results) -> str:
    rows = results.plain("docs/figures/convert_char_lm.csv")
    lines = ([row["stage"], f"{float(row['loss']):.4f}", f"{float(row['last_quarter']):.4f}"] for row in rows)
    return table(["", "loss (nats per byte)", "of the last quarter of positions"], lines)


@block
def convert_starts(results: Results) -> str:
    rows = results.plain("docs/figures/convert_starts.csv")
    return table(["fitted", "before", "after"], (row.values() for row in rows))


def _accuracies(path: str, results: Results) -> str:
    rows = results.plain(path)
    pairs = [name for name in rows[0] if name.startswith("pairs_")]
    header = ["", *(f"{name.removeprefix('pairs_')} pairs" for name in pairs)]
    return table(header, ([row["attention"], *(f"{float(row[name]):.0%}" for name in pairs)] for row in rows))


BLOCKS["recall"] = partial(_accuracies, "docs/figures/associative_recall.csv")
BLOCKS["recall-scales"] = partial(_accuracies, "docs/figures/recall_scales.csv")


def _recall(name: str, results: Results) -> str:
    (row,) = (row for row in results.plain("docs/figures/recall_scales.csv") if row["attention"] == name)
    return f"{float(row['pairs_64']):.0%}"


BLOCKS["recall-rms"] = partial(_recall, "RMS-normalised, temperature 1")
BLOCKS["recall-token"] = partial(_recall, 'as projected, normalize="token", temperature 1')


for _name in pages.TABLES:
    BLOCKS[f"learn-{_name}"] = partial(lambda name, results: pages.section(name, results.root, table), _name)


# ---- softmax


@block
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


@block
def flash_range(results: Results) -> str:
    """Time of `flash_attention` over that of the fastest of PyTorch's backends."""
    ratios = []
    for row in results.rows("flash", provider="fastmax_flash"):
        (softmax,) = _fastest_softmax(results, "flash", case=row["case"], mode=row["mode"]).values()
        ratios.append(row["median"] / softmax)
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


@block
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


@block
def traffic(results: Results) -> str:
    names = {
        "fastmax": "",
        "fastmax_flash": "ours",
        "sdpa_flash": "PyTorch's",
        "plain": "three of the kernels of plain PyTorch",
    }
    lines, rows = [], [row for row in results.plain("benchmarks/results/traffic.csv") if row["kernel"] == "sum"]
    for row in rows:
        name = ", ".join(filter(None, (row["algorithm"], names[row["provider"]], size(row["case"]))))
        cells = (
            f"{float(row[a]) / 1e6:.0f} / {float(row[b]) / 1e6:.0f}"
            for a, b in (("expected_read", "expected_written"), ("read", "written"))
        )
        lines.append([name, *cells])
    return table(["", "formula", "measured"], lines, rows)


@block
def traffic_formula(results: Results) -> str:
    """MiB of one head's forward at d = 128 in bf16."""
    columns: dict[str, dict] = {
        "standard": {"algorithm": "standard"},
        "flash, 128 queries a block, no cache": {"block_size": 128},
        "flash or quadratic": {},
        "linear, p = 2": {"algorithm": "linear"},
        "the same, causal": {"algorithm": "linear", "causal": True},
        "linear, p = 1": {"algorithm": "linear", "p": 1},
    }
    lines = (
        [
            str(n),
            *(f"{fastmax.hbm_traffic(n, 128, torch.bfloat16, **options).total / 2**20:.2f}" for options in columns.values()),
        ]
        for n in (512, 1024, 2048, 4096, 16384, 65536)
    )
    return table(["tokens", *columns], lines)


# ---- pages


def rewritten(text: str, results: Results) -> str:
    """The page with every marked block written anew."""
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
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a page is out of date")
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
