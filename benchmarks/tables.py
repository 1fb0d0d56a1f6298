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
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial, wraps
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import fastmax
from benchmarks import report
from benchmarks.learn import pages
from benchmarks.learn.free_windows import SHOWN
from benchmarks.learn.results import above, in_order, seed_values
from benchmarks.registry import SUSTAINED
from benchmarks.report import where
from benchmarks.roofline import COPY, MATMUL
from fastmax.distributed import contiguous_layout, exchanged_bytes

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/*.md", "csrc/*.md", "examples/*.md")
SDPA = ("sdpa", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient")  # PyTorch's backends
_MARKED = re.compile(r"(<!-- (table|value): ([\w-]+) -->)(.*?)(<!-- end -->)", re.DOTALL)

Lines = Iterator[Sequence]  # lines of a table; the first is the header


class Results:
    """The CSVs of a working tree."""

    def __init__(self, root: Path = ROOT):
        self.root = root
        self.read = cache(lambda path: report.read_csv(root / path))

    def rows(self, suite: str, **equal: object) -> pd.DataFrame:
        """Returns the measured rows of a suite with these values; at least one."""
        found = where(self.read(f"benchmarks/results/{suite}.csv").dropna(subset="median"), **equal)
        if found.empty:
            raise LookupError(f"{suite}.csv has no measured row with {equal}")
        return found

    def row(self, suite: str, **equal: object) -> tuple:
        """Returns the only row with these values, as a named tuple."""
        found = self.rows(suite, **equal)
        if len(found) > 1:
            raise LookupError(f"{suite}.csv has {len(found)} rows with {equal}, one is meant")
        return next(found.itertuples())

    def median(self, suite: str, **equal: object) -> float:
        return self.row(suite, **equal).median

    def medians(self, suite: str, key: str, **equal: object) -> pd.Series:
        """Returns value of column `key` -> smallest median of the providers."""
        found = self.rows(suite, **equal)
        if found.duplicated(list({key, "provider"})).any():
            raise LookupError(f"{suite}.csv has several rows with {equal} of one {key} and provider, one is meant")
        return found.groupby(key)["median"].min()

    def pair(self, suite: str, sustained: bool = False, **equal: object) -> np.ndarray:
        """Returns the times of forward and of forward + backward, of single calls or sustained."""
        start = SUSTAINED if sustained else ""
        return self.medians(suite, "mode", **equal)[[start + "fwd", start + "fwd+bwd"]].to_numpy()


# ---- cells and tables


def number(x: float) -> str:
    """Formats a number with three digits: 0.256, 4.47, 17.1, 141, 1166."""
    return f"{x:.0f}" if abs(x) >= 99.95 else f"{x:#.3g}"


def gain(x: float) -> str:
    """Formats a ratio with two digits: 0.66, 1.7, 24."""
    return f"{x:.0f}" if x >= 9.95 else f"{x:.1f}" if x >= 0.995 else f"{x:.2f}"


def rounded(n: float) -> str:
    """Formats a length between two measured ones with two digits: 2600, 11000."""
    digits = 10 ** (math.floor(math.log10(n)) - 1)
    return str(int(round(n / digits) * digits))


def both(cells: Iterable, form: Callable[..., str] = number) -> str:
    return " / ".join(map(form, cells))


def size(case: str) -> str:
    """Returns the size in a case's label, such as `(8, 32, 4096, 64)`."""
    return re.search(r"\([\d,]+\)", case).group().replace(",", ", ")


def missed(row: tuple) -> str:
    return {"yes": "", "no": ", missed"}[row.met]


def table(header: Sequence, lines: Iterable[Sequence], measured: pd.DataFrame | None = None) -> str:
    """Returns a Markdown table. The line below it has device, PyTorch version and commits of the rows `measured`."""
    lines = [header, ["---"] * len(header), *lines]
    if wrong := [line for line in lines if len(line) != len(header)]:
        raise ValueError(f"{len(header)} columns, but {wrong[0]}")
    text = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    if measured is None:
        return text
    devices, versions, commits = measured["device"].str.partition(",")[0], measured["torch"], measured["commit"].unique()
    source = f"{' and '.join(devices.unique())} with PyTorch {' and '.join(versions.unique())}"
    return f"{text}\n\nMeasured on {source} at commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}."


def as_table(suite: str = "") -> Callable[[Callable[..., Lines]], Callable[..., str]]:
    """Makes a function that yields the header and the lines of a table one that returns the table, measured by a suite."""

    def decorated(lines: Callable[..., Lines]) -> Callable[..., str]:
        @wraps(lines)
        def text(*arguments) -> str:
            header, *rest = lines(*arguments)
            return table(header, rest, arguments[-1].rows(suite) if suite else None)

        return text

    return decorated


# ---- helpers


def _faster_from(slow: pd.Series, fast: pd.Series, first: str) -> str:
    """Returns the n from which `fast` takes less time, by n. `first` is the text where it does so at the first n."""
    n = report.crossing(slow, fast)
    if n is None:
        return f"above {slow.index.max()}"
    return first.format(slow.index.min()) if n == slow.index.min() else rounded(n)


def _overtakes(results: Results, suite: str, provider: str, **equal: object) -> str:
    """Returns the n from which a provider is faster than softmax."""
    softmax, ours = (results.medians(suite, "tokens", provider=name, **equal) for name in (SDPA, provider))
    return _faster_from(softmax, ours, "below {}")


def _state_bytes(d: int, p: int) -> int:
    """Returns the size of the state of one key/value head."""
    state = fastmax.decoding.init_state(1, 1, d, p=p, a0=2.0, normalize="token")  # with these settings p = 1 is positive
    return sum(x.numel() * x.element_size() for x in (state.kv_state, state.k_sum))


def _steps(results: Results, **equal: object) -> list[pd.Series]:
    """Returns tokens of context -> microseconds of a step: of Fastmax, buffered, and of the faster softmax."""
    providers = ("fastmax_buffered", ("sdpa_flash", "sdpa_cudnn"))
    return [results.medians("decode", "tokens", provider=name, mode="step", **equal) for name in providers]


def _work_of_rank(row: tuple) -> int:
    """Returns the work of one of two ranks over that of its tokens alone. All but the linear algorithm see all tokens."""
    return 1 if row.algorithm == "linear" else 2


# ---- docs/results.md and docs/cuda.md: attention on a GPU


@as_table("scaling")
def break_even(results: Results) -> Lines:
    """The n from which forward + backward is faster than softmax, and the size of a state in tokens of a key/value cache."""
    yield ["head_dim", "training, p = 2", "p = 1", "generating, p = 2", "p = 1"]
    for d in (32, 64, 128):
        measured = [_overtakes(results, "scaling", f"fastmax_p{p}", head_dim=d, mode="fwd+bwd") for p in (2, 1)]
        cached = 2 * d * torch.bfloat16.itemsize  # a key and a value
        states = [_state_bytes(d, p) for p in (2, 1)]
        yield [d, *measured, *(f"{state / 1e3:.0f} kB = {math.ceil(state / cached)} tokens" for state in states)]


def train_break_even(results: Results) -> str:
    two, one = (_overtakes(results, "train", f"fastmax_p{p}", mode="train") for p in (2, 1))
    return f"{two} tokens for p = 2 and {one} for p = 1"


@as_table("cuda")
def attention(results: Results) -> Lines:
    """Fastmax and the fastest softmax, largest gain first: sustained, and single calls after a pause."""
    header = ["fastmax", "(batch, heads, tokens, head_dim)", "fastmax, ms", "softmax (SDPA), ms", "times faster"]
    yield [*header, "single calls"]
    lines = []
    for row in results.rows("cuda", dtype="bf16", provider="fastmax", mode="fwd+bwd").itertuples():
        (ours, softmax), (single, softmax_single) = (
            [results.pair("cuda", sustained, case=row.case, provider=name) for name in ("fastmax", SDPA)]
            for sustained in (True, False)
        )
        gains, cells = softmax / ours, [f"p = {row.p}, {row.algorithm}", size(row.case), both(ours), both(softmax)]
        lines.append((gains[1], [*cells, both(gains, gain), both(softmax_single / single, gain)]))
    yield from (line for _, line in sorted(lines, reverse=True))


def attention_of_65536(results: Results) -> str:
    same = {"head_dim": 64, "heads": 32, "tokens": 65536}
    (_, ours), (_, softmax) = (results.pair("cuda", sustained=True, provider=name, **same) for name in ("fastmax", SDPA))
    return f"{number(ours)} ms against {number(softmax)} ms, {gain(softmax / ours)} times less"


@as_table("cuda")
def cuda(results: Results) -> Lines:
    """Every case with its aim and its floor. Times that miss the aim are bold."""

    def judged(row: tuple) -> str:
        return f"**{number(row.median)}**" if row.met == "no" else number(row.median)

    yield ["algorithm, (b, h, n, d), p", "fastmax", "aim", "times the floor"]
    rows = results.rows("cuda", provider="fastmax", mode=("fwd", "fwd+bwd")).sort_values("mode", kind="stable")
    for case, own in rows.groupby("case", sort=False):
        algorithm, p, dtype = own.iloc[0][["algorithm", "p", "dtype"]]
        name = f"{algorithm} {size(case)}, {p}" + (", TF32, forward" if dtype == "tf32" else "")
        numbers = both(own["target"], "{:g}".format), both(own["of_floor"], "{:.1f}".format)
        yield [name, both(own.itertuples(), judged), *numbers]


def cuda_memory(results: Results) -> str:
    row = results.row("cuda", provider="fastmax", mode="memory")
    return f"{row.median:.0f} MiB, {row.of_peer:.2f} times cuDNN's, at commit {row.commit}"


def cuda_host(results: Results) -> str:
    row = results.row("cuda", provider="fastmax", mode="host")
    return f"{row.median:.0f} us, {row.of_peer:.2f} times SDPA's"


def eager_break_even(results: Results) -> str:
    """The n from which softmax takes longer on the device than an eager call of fastmax takes on the host, 16 heads of 64."""
    softmax = results.medians("scaling", "tokens", provider=SDPA, head_dim=64, mode="fwd+bwd")
    host = results.median("cuda", provider="fastmax", mode="host") / 1e3
    return _faster_from(softmax, pd.Series(host, index=softmax.index), "below {}")


def lead_at_128(results: Results) -> str:
    """By how much p = 2 is faster than softmax at head_dim 128: up to 16k tokens, at 16k and at 32k."""
    same = {"head_dim": 128, "mode": "fwd+bwd"}
    ours, softmax = (results.medians("scaling", "tokens", provider=name, **same) for name in ("fastmax_p2", SDPA))
    leads = (softmax / ours - 1).loc[:32768]
    least, most = (round(100 * x) for x in (leads.loc[:16384].min(), leads.loc[:16384].max()))
    level = f"{number(ours[16384])} against {number(softmax[16384])} ms at 16k"
    return f"{least} to {most}% up to 16k tokens ({level}) and {leads[32768]:.0%} at 32k"


def scaling_memory(d: int, results: Results) -> str:
    """Peak memory of p = 2 over that of cuDNN: the range over the lengths, and at 64k."""
    same = {"head_dim": d, "mode": "memory"}
    ours, cudnn = (results.medians("scaling", "tokens", provider=name, **same) for name in ("fastmax_p2", "sdpa_cudnn"))
    times = ours / cudnn
    return f"{times.min():.2f} to {times.max():.2f} ({times[65536]:.2f} at 64k)"


@as_table("crossover")
def crossover(results: Results) -> Lines:
    """The n from which linear is faster than quadratic in bf16, by p and head_dim."""
    bf16 = {"dtype": "bf16", "mode": "fwd+bwd"}
    orders, head_dims = (results.rows("crossover", **bf16)[key].unique() for key in ("p", "head_dim"))

    def cell(p: str, d: int) -> str:
        same = {"p": p, "head_dim": d} | bf16
        times = [results.medians("crossover", "tokens", provider=name, **same) for name in ("quadratic", "linear")]
        return _faster_from(*times, "{} or less")

    yield ["linear is faster from n =", *(f"head_dim {d}" for d in head_dims)]
    yield from ([f"p = {p}", *(cell(p, d) for d in head_dims)] for p in orders)


def decode_rate(results: Results) -> str:
    """The rate of a step over that of a copy, with enough heads to fill the device."""
    rows = results.rows("decode", provider="fastmax", tokens=1, mode="step")
    rates = 1e9 * rows[rows["batch"] * rows["heads"] >= 64]["gb_per_s"] / COPY
    return f"{rates.min():.0%} to {rates.max():.0%}"


def decode_gain(results: Results) -> str:
    ours, softmax = _steps(results, head_dim=64, batch=64, heads=8)
    times = softmax / ours
    return f"{times[16384]:.1f} times faster at 16k tokens of context and {times[131072]:.0f} times at 128k"


@as_table("decode")
def decode_context(results: Results) -> Lines:
    """Steps of Fastmax, and of the faster softmax with a cache of at least 16k tokens."""
    buffered = results.rows("decode", provider="fastmax_buffered", mode="step")
    shown = [n for n in buffered["tokens"].unique() if n >= 16384]
    yield ["head_dim", "batch x heads", "buffered, us", "in place, us", *(f"SDPA, {n // 1024}k" for n in shown)]
    for d, batch, heads in buffered[["head_dim", "batch", "heads"]].drop_duplicates().itertuples(index=False):
        same = {"head_dim": d, "batch": batch, "heads": heads}
        ours, softmax = _steps(results, **same)
        in_place = results.rows("decode", provider="fastmax_in_place", mode="step", **same)["median"]
        cells = (f"{number(softmax[n])} ({gain(softmax[n] / ours[n])})" for n in shown)
        yield [d, f"{batch} x {heads}", number(ours.min()), number(in_place.min()), *cells]


@as_table("ancestor")
def ancestor(results: Results) -> Lines:
    """Forward at the largest sizes of the first Fastmax implementation, in fp32 and TF32."""
    columns = (("tf32", "fastmax"), ("fp32", "fastmax"), ("fp32", "fastmax_autograd"))
    yield ["(heads, tokens, head_dim)", "TF32, causal / full", "fp32", "PyTorch operations, fp32", "published"]
    for row in results.rows("ancestor", dtype="tf32", provider="fastmax", causal=True, heads=16, tokens=10000).itertuples():
        same = {"heads": row.heads, "tokens": row.tokens, "head_dim": row.head_dim}
        times = [
            both(results.median("ancestor", dtype=dtype, provider=name, causal=causal, **same) for causal in (True, False))
            for dtype, name in columns
        ]
        yield [f"({row.heads}, {row.tokens}, {row.head_dim})", *times, row.published.partition(" (")[0]]


@as_table("peers")
def peers(results: Results) -> Lines:
    titles = {
        "fastmax_p2": "Fastmax p = 2",
        "fla_based": "`parallel_based`",
        "fastmax_p1": "Fastmax p = 1",
        "fla_linear": "`chunk_linear_attn`",
        "fla_retention": "`chunk_retention`",
    }
    yield ["head_dim", *titles.values()]
    for d in (64, 128):
        times = results.rows("peers", tokens=65536, head_dim=d).pivot(index="provider", columns="mode", values="median")
        pairs = times[["fwd", "fwd+bwd"]].reindex(titles)
        yield [d, *("" if pair.isna().all() else both(pair) for _, pair in pairs.iterrows())]


# ---- training, the CPU, options


@as_table("train")
def train(results: Results) -> Lines:
    titles = {"fastmax_p2": "fastmax, p = 2", "fastmax_p1": "fastmax, p = 1"}
    titles |= {"sdpa_cudnn": "softmax (cuDNN)", "sdpa_flash": "softmax (flash)"}
    yield ["context", *titles.values()]
    rows = results.rows("train")
    rates = report.curves(rows.assign(median=rows["batch"] * rows["tokens"] / rows["median"]), list(titles), "train")
    yield from rates.map("{:.0f} k".format, na_action="ignore").fillna("").itertuples()


@as_table("cpu")
def cpu(results: Results) -> Lines:
    first = "p, algorithm, (batch, heads, tokens, head_dim)"
    yield [first, "fastmax, ms", "softmax (SDPA), ms", "times faster", "aim"]
    for row in results.rows("cpu", provider="fastmax", mode="fwd+bwd").itertuples():
        ours, softmax = (results.pair("cpu", case=row.case, provider=name) for name in ("fastmax", "sdpa"))
        times = [both(ours), both(softmax), both(softmax / ours, gain)]
        yield [f"p = {row.p}, {row.algorithm}, {size(row.case)}", *times, f"{1 / row.target:.2g}{missed(row)}"]


@as_table("options")
def options(results: Results) -> Lines:
    """The sustained cost of each option: rows with a target, compared with their peer."""
    yield ["option", "", "with, ms", "without, ms", "ratio", "at most"]
    rows = results.rows("options").dropna(subset="target")
    for row in rows[rows["mode"].str.startswith(SUSTAINED)].itertuples():
        times = row.median, results.median("options", case=row.case, mode=row.mode, provider=row.peer)
        ratios = f"{row.of_peer:.3g}", f"{row.target:.3g}{missed(row)}"
        yield [row.case, row.mode.removeprefix(SUSTAINED), *map(number, times), *ratios]


def layer_options_cost(size: str, results: Results) -> str:
    """The time of forward and backward with decay and an exact window, and that of a call with neither."""
    same = {"case": f"log_decay, exact window bf16 p=2 {size}", "mode": SUSTAINED + "fwd+bwd"}
    with_both, without = (results.median("options", provider=name, **same) for name in ("fastmax_decay_window", "fastmax"))
    return f"{number(with_both)} ms with both, {number(without)} ms without"


def layer_cost(results: Results) -> str:
    """The loss and the time of a training step of the same model, by attention layer."""
    titles = {
        "softmax_sdpa": "softmax (SDPA)",
        "softmax_parts": "softmax in the same layer (`flash_attention`)",
        "p2_all": "**`FastmaxSelfAttention`**",
        "kept_keys": "the same with `kept_keys=256`",
        "hybrid_sdpa": "hybrid: every third layer softmax (SDPA), no decay",
        "p2": "the polynomial alone, p = 2",
        "p1_all": "`FastmaxSelfAttention(p=1)`",
    }
    losses = pages.losses("equal-steps", "25M", results.root)
    losses["softmax_sdpa"] = losses["softmax"]  # of `flash_attention`: the same function as SDPA's
    also = pages.losses("memory", "steps", results.root)  # trained and tested as in equal steps
    losses |= {name: also[name] for name in ("kept_keys", "hybrid_sdpa") if name in also}
    steps = results.rows("layer")
    steps = steps[steps["case"].str.startswith("GPT 25M bf16")]
    times = steps.pivot(index="provider", columns="tokens", values="median")
    lines = []
    for name, title in in_order(steps, titles, "provider").items():
        own = zip(times.loc[name], times.loc["softmax_sdpa"], strict=True)
        cells = ("" if math.isnan(ms) else f"{number(ms)} ({gain(softmax / ms)})" for ms, softmax in own)
        lines.append([title, f"{losses[name]:.3f}" if name in losses else "", *cells])
    header = ["attention", "loss, nats per byte", *(f"step at {n // 1024}k, ms" for n in times)]
    losses_at = pages.commits("equal-steps", "25M", results.root)
    kept_at, hybrid_at = (pages.commits("memory", "steps", results.root, name) for name in ("kept_keys", "hybrid_sdpa"))
    later = f"with kept keys {kept_at}; of the hybrid {hybrid_at}"
    return f"{table(header, lines, steps)} Losses: commits {losses_at}; {later}."


@as_table("layer")
def layer_steps(results: Results) -> Lines:
    """A training step with the layer and with plain softmax, by model and context."""
    yield ["model", "context", "`FastmaxSelfAttention`, ms", "softmax (SDPA), ms", "times faster"]
    for row in results.rows("layer", provider="p2_all").itertuples():
        softmax = results.median("layer", case=row.case, provider="softmax_sdpa")
        model = re.sub(r"(\d+)M( eager)? bf16.*", r"\1 M\2", row.case).replace("eager", "not compiled")
        yield [model, f"{row.tokens // 1024}k", number(row.median), number(softmax), gain(softmax / row.median)]


@as_table("generation")
def generation(results: Results) -> Lines:
    """A token of a whole model after a context, with a state and with a cache, by the faster of PyTorch's backends."""
    yield ["sequences", "context", "`FastmaxSelfAttention`, us", "softmax (SDPA), us", "times faster", "state / cache, MiB"]
    for row in results.rows("generation", provider="p2_all").itertuples():
        same = {"case": row.case, "provider": ("softmax_flash", "softmax_cudnn")}
        cell = [row.batch, f"{row.tokens // 1024}k", number(row.median)]
        try:
            softmax = results.rows("generation", **same).sort_values("median").iloc[0]
        except LookupError:
            yield [*cell, "out of memory", "", row.note.split()[-2]]
            continue
        mib = (note.split()[-2] for note in (row.note, softmax["note"]))
        yield [*cell, number(softmax["median"]), gain(softmax["median"] / row.median), " / ".join(mib)]


def generation_at(tokens: int, results: Results) -> str:
    """The time of a token after a context of this many tokens, with a state and with a cache, for 1 and for 64 sequences."""
    same = {"tokens": tokens, "provider": ("softmax_flash", "softmax_cudnn")}
    ours = results.medians("generation", "batch", tokens=tokens, provider="p2_all")
    softmax = results.medians("generation", "batch", **same)
    return " and ".join(f"{number(ours[batch])} against {number(softmax[batch])} us" for batch in (1, 64))


def auto_on_the_cpu(results: Results) -> str:
    """The n from which on the planner chooses the linear algorithm."""
    sizes = ((2, 32), (2, 64), (2, 128), (1, 64))
    found = (report.chosen_crossing(torch.device("cpu"), "fp32", p, 1, d, longest=2**17) for p, d in sizes)
    *first, last = (f"above {2**17}" if n is None else rounded(n) for n in found)
    return f"{', '.join(first)} and {last}"


# ---- docs/distributed.md


@as_table("distributed")
def distributed(results: Results) -> Lines:
    """One GPU and two GPUs, with the same number of tokens on each."""
    yield ["(b, h, n, d)", "one GPU, ms", "two GPUs, ms", "rate per GPU", "target", "MB received"]
    for row in results.rows("distributed", provider="2 GPUs", mode="fwd+bwd").itertuples():
        times = results.median("distributed", case=row.case, provider="one GPU"), row.median
        rate, target = (_work_of_rank(row) / x for x in (row.of_peer, row.target))
        received = int(row.note.split(" bytes received")[0])
        target = "" if math.isnan(target) else f"{target:.0%}{missed(row)}"
        yield [row.case, *map("{:.3g}".format, times), f"{rate:.1%}", target, f"{received / 1e6:.1f}"]


@as_table("distributed_layers")
def distributed_layers(results: Results) -> Lines:
    """Layers and DTensors on one GPU and on two."""
    yield ["(b, h, n, d)", "one GPU, ms", "two GPUs, ms", "rate per GPU"]
    for row in results.rows("distributed_layers", provider="2 GPUs").itertuples():
        one = results.median("distributed_layers", case=row.case, provider="one GPU")
        yield [row.case, f"{one:.3g}", f"{row.median:.3g}", row.note.split(" of ")[0]]


@as_table("ranks_alone")
def ranks_alone(results: Results) -> Lines:
    """Each of two ranks without messages, and one GPU with a rank's tokens."""
    yield ["(b, h, n, d)", "one GPU", "rank 0", "rank 1", "", "rate per GPU"]
    for row in results.rows("ranks_alone", provider="one GPU").itertuples():
        timed = row.mode == "fwd+bwd"
        numbers = results.medians("ranks_alone", "provider", case=row.case)[["one GPU", "rank 0 of 2", "rank 1 of 2"]]
        rate = f"{_work_of_rank(row) * row.median / numbers.max():.1%}" if timed else ""
        cells = map("{:.3g}".format, numbers if timed else numbers / 1024)
        yield [row.case, *cells, "ms" if timed else "GiB", rate]


def distributed_memory(results: Results) -> str:
    """Peak memory of forward + backward."""
    one = results.median("ranks_alone", provider="one GPU", mode="memory") / 1024
    two = results.median("distributed", provider="2 GPUs", mode="memory") / 1024
    return f"{one:.1f} GiB on one, {two:.1f} GiB a GPU on two"


# Bytes per second that a GPU receives: one 400 Gb/s link; NVLink within a machine, as far as messages reach its 450 GB/s.
_LINKS = {"50 GB/s": 50e9, "300 GB/s": 300e9}


@as_table()
def exchange(results: Results) -> Lines:
    """The time of exchanging a layer's states between GPUs, and its ratio to the time of attention."""
    case = "log_decay bf16 p=2 linear (1,32,65536,64)"
    row = results.row("options", case=case, provider="fastmax", mode=SUSTAINED + "fwd+bwd")
    links = (f"at {name}, of {row.median:.1f} ms" for name in _LINKS)
    yield ["GPUs", "collective", "MB received", *links, "tokens per GPU for 5%"]
    for world in (2, 8, 64, 1024):
        layout = contiguous_layout([row.tokens] * world)
        received = sum(exchanged_bytes(layout, kv_heads=row.heads, head_dim=row.head_dim))
        gathered = 2 * (world - 1) * row.heads * _state_bytes(row.head_dim, 2)
        collective = "all-gather" if received == gathered else "all-to-all"
        times = [received / rate * 1e3 for rate in _LINKS.values()]
        shares = [f"{x:.2f} ms, {x / row.median:.1%}" for x in times]
        least = both((20 * x / row.median * row.tokens for x in times), rounded)
        yield [world, collective, f"{received / 1e6:.1f}", *shares, least]


def ring_hides(results: Results) -> str:
    """Tokens per GPU from which a step of the ring takes longer than its message."""
    case = "bf16 (8,32,4096,64)"
    forward, forward_backward = results.pair("flash", case=case, provider="fastmax_flash")
    row = results.row("flash", case=case, provider="fastmax_flash", mode="fwd")
    pairs = row.batch * row.heads * row.tokens**2 / 2
    least = []
    for rate in _LINKS.values():
        # A step has n^2 / 2 pairs per head. It sends k and v in bf16, in the backward also their gradients in fp32.
        sides = ((forward, 2 * 2), (forward_backward - forward, 2 * (2 + 4)))
        n = max(size * row.head_dim / rate / (ms * 1e-3 / pairs / 2) for ms, size in sides)
        least.append(f"{rounded(n)} at {rate / 1e9:.0f} GB/s")
    return ", ".join(least)


# ---- docs/quality.md, docs/far_keys.md: what is learned


@as_table()
def char_lm(results: Results) -> Lines:
    names = {
        "softmax": "softmax with the same parts",
        "fastmax": "fastmax, the layer's parts",
        "softmax_plain": "softmax alone",
        "fastmax_plain": "fastmax alone",
    }
    yield ["attention", "train loss", "validation loss (nats per byte)"]
    losses = _char_lm_ends(results)[["train", "val"]].mean()
    yield from ([title, *map("{:.3f}".format, losses.loc[name])] for name, title in names.items())


@as_table()
def char_lm_texts(results: Results) -> Lines:
    """Fastmax and softmax with the same parts on several texts. Differences are between runs with the same seed."""
    yield ["text", "seeds", "fastmax", "softmax, same parts", "difference", "lowest to highest"]
    for text, rows in results.read("docs/figures/char_lm_texts.csv").groupby("text", sort=False):
        losses = rows.pivot(index="seed", columns="run", values="val")[["fastmax", "softmax"]]
        gaps = losses["fastmax"] - losses["softmax"]
        means = [*map("{:.3f}".format, losses.mean()), f"{gaps.mean():+.3f}"]
        yield [text, ", ".join(map(str, losses.index)), *means, f"{gaps.min():+.3f} to {gaps.max():+.3f}"]


def char_lm_seeds(results: Results) -> str:
    count = _char_lm_ends(results).size()["fastmax"]
    return "one seed" if count == 1 else f"means of {count} seeds"


def _char_lm_ends(results: Results):
    """Returns the last row of every seed, grouped by run."""
    rows = results.read("docs/figures/char_lm.csv")
    return where(rows, step=rows["step"].max()).groupby("run")


def char_lm_difference(first: str, second: str, results: Results) -> str:
    """The difference of the final validation losses."""
    losses = _char_lm_ends(results)["val"].mean()
    return _in_words(losses[first] - losses[second])


def _in_words(difference: float) -> str:
    return f"{abs(difference):.3f} nats per byte {'above' if difference > 0 else 'below'}"


def learned_gap(variant: str, other: str, setting: str, results: Results) -> str:
    """The difference of the losses after equal steps, averaged over the seeds that both have."""
    return _in_words(above(pages.rows_of("equal-steps", setting, results.root), variant, other, measure="loss"))


def hybrid_gap(results: Results) -> str:
    """The difference of the hybrid without decay and softmax with the same parts after equal steps."""
    return _in_words(above(pages.rows_of("memory", "steps", results.root), "hybrid_sdpa", "softmax_parts", measure="loss"))


def growing_gap(variant: str, other: str, results: Results, setting: str = SHOWN["setting"]) -> str:
    """The difference of the losses on windows of 64k after training on growing ones, averaged over the seeds that both have."""
    found = where(pages.rows_of("free-windows", setting, results.root), lr=SHOWN["lr"])
    return _in_words(above(found, variant, other, measure="whole"))


def far_keys_gain(results: Results) -> str:
    """The difference between the loss of softmax within the window and that of p = 2 with all parts."""
    found = pages.rows_of("ablation", "25M", results.root)
    whole, last = (above(found, "softmax_near", "p2_all", measure=measure) for measure in ("loss", "last_quarter"))
    return f"{whole:.3f} nats per byte, and {last:.3f} in the last quarter of a window"


def conversion_swapped(results: Results) -> str:
    found = where(pages.rows_of("conversion", "25M", results.root), variant="window_decay")
    before, swapped, transferred = (seed_values(found, measure=x).mean() for x in ("before", "swapped", "transferred"))
    return f"{swapped - before:.2f} nats per byte, of which fit and transfer take back {swapped - transferred:.2f}"


def conversion_ends(results: Results) -> str:
    """The losses with all layers swapped and with three of four, minus that of the softmax model after the same fine-tuning."""
    found = where(pages.rows_of("conversion", "25M", results.root), measure="finetuned")
    softmax, every, hybrid = (seed_values(found, variant=name).mean() for name in ("softmax", "window_decay", "hybrid"))
    return f"{every - softmax:.2f}, and where one layer in four stays softmax {hybrid - softmax:.2f}"


@as_table()
def whole(path: str, header: Sequence[str], form: str, results: Results) -> Lines:
    """A CSV with its numbers in this form."""
    yield header
    yield from results.read(path).map(lambda x: x if isinstance(x, str) else form.format(x)).itertuples(index=False)


def recall_of(name: str, results: Results) -> str:
    (share,) = where(results.read("docs/figures/recall_scales.csv"), attention=name)["pairs_64"]
    return f"{share:.0%}"


# ---- docs/softmax.md


@as_table("flash")
def flash(results: Results) -> Lines:
    columns = ["flash_attention", "Fastmax p = 2, quadratic", "SDPA flash", "SDPA cuDNN", "of SDPA cuDNN"]
    yield ["(b, h, n, d)", *columns]
    for row in results.rows("flash", provider="fastmax_flash", mode="fwd").itertuples():
        ours, sdpa, cudnn = (
            results.pair("flash", case=row.case, provider=name) for name in ("fastmax_flash", "sdpa_flash", "sdpa_cudnn")
        )
        same = {key: getattr(row, key) for key in ("batch", "heads", "tokens", "head_dim")}
        polynomial = results.pair("cuda", provider="fastmax", algorithm="quadratic", **same)
        yield [size(row.case), *map(both, (ours, polynomial, sdpa, cudnn)), both(ours / cudnn, "{:.2f}".format)]


def flash_polynomial_commit(results: Results) -> str:
    """The commit of the column of the polynomial in the table `flash`."""
    same = {"algorithm": "quadratic", "tokens": 4096, "head_dim": (64, 128), "mode": ("fwd", "fwd+bwd")}
    rows = results.rows("cuda", provider="fastmax", **same)
    return " and ".join(rows["commit"].unique())


def flash_range(results: Results) -> str:
    """The time of `flash_attention` over that of PyTorch's fastest backend."""
    times = results.rows("flash").pivot(index=["case", "mode"], columns="provider", values="median")
    ratios = times["fastmax_flash"] / times.filter(SDPA).min(axis=1)
    return f"{ratios.min():.2f} to {ratios.max():.2f}"


@as_table("softmax")
def row_softmax(results: Results) -> Lines:
    yield ["rows x width", "bf16, of torch.softmax", "TB/s", "fp32, of torch.softmax", "TB/s"]
    for row in results.rows("softmax", dtype="bf16", provider="softmax_online").itertuples():
        single = results.row("softmax", case=row.case.replace("bf16", "fp32"), provider="softmax_online")
        cells = [[f"{x.of_peer:.2f}", f"{x.gb_per_s / 1e3:.1f}"] for x in (row, single)]
        yield [row.case.removeprefix("softmax bf16 "), *cells[0], *cells[1]]


def traffic(results: Results) -> str:
    owners = {"fastmax": "", "fastmax_flash": "ours", "sdpa_flash": "PyTorch's"}
    owners |= {"plain": "three of the kernels of plain PyTorch"}
    rows, lines = where(results.read("benchmarks/results/traffic.csv"), kernel="sum"), []
    for row in rows.itertuples():
        name = ", ".join(filter(None, (row.algorithm, owners[row.provider], size(row.case))))
        bytes_moved = (row.expected_read, row.expected_written), (row.read, row.written)
        lines.append([name, *(both(pair, lambda x: f"{x / 1e6:.0f}") for pair in bytes_moved)])
    return table(["", "formula", "measured"], lines, rows)


@as_table()
def traffic_formula(results: Results) -> Lines:
    """MiB that the forward of one head moves at d = 128 in bf16."""
    options: dict[str, dict] = {
        "standard": {"algorithm": "standard"},
        "flash, 128 queries a block, no cache": {"block_size": 128},
        "flash or quadratic": {},
        "linear, p = 2": {"algorithm": "linear"},
        "the same, causal": {"algorithm": "linear", "causal": True},
        "linear, p = 1": {"algorithm": "linear", "p": 1},
    }
    yield ["tokens", *options]
    for n in (512, 1024, 2048, 4096, 16384, 65536):
        moved = (fastmax.hbm_traffic(n, 128, torch.bfloat16, **given).total for given in options.values())
        yield [n, *(f"{x / 2**20:.2f}" for x in moved)]


def cpu_device(results: Results) -> str:
    row = results.rows("cpu").iloc[0]
    return f"{row['device']}, PyTorch {row['torch']}"


# ---- pages

_PAIRS = ["", *(f"{n} pairs" for n in (8, 16, 32, 64))]
_LOSSES = ["loss (nats per byte)", "of the last quarter of positions"]

# Name in a mark of a page: "-" for "_" in the name of a function
_NAMED = (
    *(break_even, train_break_even, attention, attention_of_65536, cuda, cuda_memory, cuda_host, crossover, decode_rate),
    *(eager_break_even, lead_at_128),
    *(decode_gain, decode_context, ancestor, peers, train, cpu, options, layer_cost, layer_steps),
    *(generation, auto_on_the_cpu),
    *(
        distributed,
        distributed_layers,
        ranks_alone,
        distributed_memory,
        exchange,
        ring_hides,
        char_lm,
        char_lm_texts,
        char_lm_seeds,
    ),
    *(far_keys_gain, conversion_swapped, conversion_ends, flash, flash_polynomial_commit, flash_range, row_softmax),
    *(traffic, traffic_formula, cpu_device),
)

# Name in a mark of a page -> function that returns its text
BLOCKS: dict[str, Callable[[Results], str]] = {
    **{function.__name__.replace("_", "-"): function for function in _NAMED},
    "convert": partial(whole, "docs/figures/convert_char_lm.csv", ["", *_LOSSES], "{:.4f}"),
    "layer-parts": partial(whole, "docs/figures/layer_parts.csv", ["attention", *_LOSSES], "{:.4f}"),
    "convert-starts": partial(whole, "docs/figures/convert_starts.csv", ["fitted", "before", "after"], "{:.4f}"),
    "recall": partial(whole, "docs/figures/associative_recall.csv", _PAIRS, "{:.0%}"),
    "recall-scales": partial(whole, "docs/figures/recall_scales.csv", _PAIRS, "{:.0%}"),
    "recall-rms": partial(recall_of, "RMS-normalised, temperature 1"),
    "recall-token": partial(recall_of, 'as projected, normalize="token", temperature 1'),
    "layer-options-cost": partial(layer_options_cost, "linear (1,32,65536,64)"),
    "layer-options-cost-1k": partial(layer_options_cost, "quadratic (32,32,1024,64)"),
    **{f"scaling-memory-{d}": partial(scaling_memory, d) for d in (32, 64, 128)},
    "generation-at-1k": partial(generation_at, 1024),
    "generation-at-4k": partial(generation_at, 4096),
    "state-at-64": lambda results: f"{_state_bytes(64, 2) / 1e3:.0f} kB",
    "matmul-rate": lambda results: f"{MATMUL['bf16'] / 1e12:.0f}",
    "copy-rate": lambda results: f"{COPY / 1e12:.2f}",
    "train-memory": lambda results: f"{report.memory_spread(results.rows('train')):.1%}",
    "char-lm-gap": partial(char_lm_difference, "fastmax", "softmax"),
    "char-lm-alone": partial(char_lm_difference, "fastmax", "softmax_plain"),
    "char-lm-gap-alone": partial(char_lm_difference, "fastmax_plain", "softmax_plain"),
    "learned-gap": partial(learned_gap, "p2_all", "softmax_parts", "25M"),
    "learned-gap-softmax": partial(learned_gap, "softmax_parts", "p2_all", "25M"),
    "learned-gap-124m": partial(learned_gap, "kept_keys", "softmax_parts", "124M"),
    "growing-gap": partial(growing_gap, "hybrid_sdpa", "softmax_parts"),
    "growing-gap-facts": partial(growing_gap, "hybrid_sdpa", "softmax_parts", setting="growing, facts"),
    "growing-gap-steady": partial(growing_gap, "hybrid_steady", "softmax_parts"),
    "growing-gap-decay": partial(growing_gap, "softmax_parts_sdpa", "softmax_parts"),
    "growing-gap-linear": partial(growing_gap, "p2_all", "softmax_parts"),
    "learned-gap-hybrid": hybrid_gap,
    "learned-gap-plain": partial(learned_gap, "p2_all", "softmax", "25M"),
    "learned-gap-wide": partial(learned_gap, "p2_wide", "softmax_wide", "25M"),
    "learned-gap-small": partial(learned_gap, "p2_all", "softmax_parts", "0.8M"),
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
        made = BLOCKS[name](results)
        if re.search(r"\bnan\b", made):
            raise LookupError(f"the CSVs lack a number of {name!r}: {made}")
        if kind == "table":
            return f"{start}\n\n{made}\n\n{end}"
        if match.start() == 0 or text[match.start() - 1] == "\n":
            raise ValueError(f"the mark of {name!r} begins a line, which in Markdown begins a block")
        return f"{start}{made}{end}"

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
