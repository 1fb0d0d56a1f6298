"""Utilization of each kernel, by hardware counters: `python -m benchmarks.counters [--only TEXT] [--out CSV]`.

Runs cases of `benchmarks.profile --bare` under Nsight Compute (`ncu` on the PATH, with permission to read counters). For each
kernel it prints the time, and the shares of the time in which tensor cores, DRAM, the L2 cache and issue slots are busy. It
also prints the floor of the time: the work that benchmarks/roofline.py predicts, at the rate of a large matrix product or of a
copy, whichever takes longer. ncu runs each kernel several times, alone, with empty caches, at the current clocks.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import report, roofline
from benchmarks.providers import PROVIDERS
from benchmarks.registry import SUITES, Case

SECONDS = "gpu__time_duration.sum"
SHARES = {
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
}
CASES = (  # suite, what the label contains, provider
    ("cuda", "quadratic (8,32,4096,64)", "fastmax"),
    ("cuda", "quadratic (8,16,4096,128)", "fastmax"),
    ("cuda", "quadratic (8,64,4096,32)", "fastmax"),
    ("flash", "(8,32,4096,64)", "fastmax_flash"),
    ("flash", "(8,16,4096,128)", "fastmax_flash"),
    ("cuda", "p=2 linear (1,32,65536,64)", "fastmax"),
    ("cuda", "p=2 linear (1,16,65536,128)", "fastmax"),
    ("cuda", "p=1 linear (2,32,16384,64)", "fastmax"),
    ("cuda", "p=1 linear (1,16,65536,128)", "fastmax"),
)
COLUMNS = ("case", "provider", "kernel", "launches", "ms", "floor_ms", *SHARES, "device", "driver", "torch", "commit")
LEAST = 0.01  # share of a case's time below which a kernel is left out


@dataclass
class Kernel:
    """All launches of one kernel in one call."""

    name: str
    launches: int
    ms: float
    shares: dict[str, float]  # fractions, averaged over the launches by time


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cases whose suite and label contain this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    options = parser.parse_args(arguments)
    environment = report.environment(torch.device("cuda"), options.commit)
    constant = {key: environment[key] for key in ("device", "driver", "torch", "commit")}
    rows = []
    for suite, only, provider in CASES:
        case = next(case for case in SUITES[suite].cases["cuda"] if only in case.label())
        if options.only not in f"{suite} {case.label()}":
            continue
        for row in measured(suite, case, provider):
            print(line(row), flush=True)
            rows.append(row | constant)
        if options.out:
            write(rows, options.out)
    return 0


def measured(suite: str, case: Case, provider: str) -> list[dict]:
    command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw"]
    command += ["--print-units", "base"]
    command += ["--metrics", ",".join([SECONDS, *SHARES.values()])]
    command += [sys.executable, "-m", "benchmarks.profile", suite, "--only", case.label(), "--provider", provider]
    command += ["--iterations", "1", "--bare"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    _, p = PROVIDERS[provider].arithmetic(case) or (None, None)
    found = by_kernel(done.stdout)
    total = sum(kernel.ms for kernel in found)
    constant = {"case": f"{suite} {case.label()}", "provider": provider}
    return [
        constant
        | {
            "kernel": short(kernel.name),
            "launches": kernel.launches,
            "ms": kernel.ms,
            "floor_ms": floor_ms(kernel.name, case, p),
        }
        | kernel.shares
        for kernel in found
        if kernel.ms >= LEAST * total
    ]


def by_kernel(text: str) -> list[Kernel]:
    """Returns the kernels in the CSV that ncu prints after other output, longest first."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        raise RuntimeError(f"ncu counted nothing:\n{text[-2000:]}")
    launches: dict[str, list[tuple[float, dict[str, float]]]] = {}
    for row in list(csv.DictReader(lines[begin:]))[1:]:  # the first row holds the units
        ms = number(row[SECONDS]) / 1e6  # from nanoseconds
        shares = {name: number(row[metric]) / 100 for name, metric in SHARES.items()}
        launches.setdefault(row["Kernel Name"], []).append((ms, shares))
    found = []
    for name, all_launches in launches.items():
        ms = sum(ms for ms, _ in all_launches)
        shares = {key: sum(ms * shares[key] for ms, shares in all_launches) / ms for key in SHARES}
        found.append(Kernel(name, len(all_launches), ms, shares))
    return sorted(found, key=lambda kernel: -kernel.ms)


def number(text: str) -> float:
    return float(text.replace(",", ""))  # for example 188,448


def floor_ms(name: str, case: Case, p: int | None) -> float | None:
    """Returns the least time of a kernel's launches in one forward and backward; None if its work is unknown."""
    work = roofline.work(name, case, p, "fwd+bwd")
    if work is None:
        return None
    return 1e3 * max((work.flop or 0) / roofline.MATMUL[case.dtype], (work.bytes or 0) / roofline.COPY)


def short(name: str) -> str:
    """Returns a kernel's name without namespaces, arguments, and casts of template arguments."""
    without_arguments = re.sub(r"\([^()]*\)$", "", name)
    return re.sub(r"^void |fastmax::|<unnamed>::|\([\w: ]+\)(?=\w)", "", without_arguments)


def line(row: dict) -> str:
    floor = "" if row["floor_ms"] is None else f"{row['floor_ms']:.3f}"
    shares = " ".join(f"{key} {row[key]:4.0%}" for key in SHARES)
    return f"{row['case']:<44} {row['ms']:>8.3f} ms, floor {floor:>6} {shares}  {row['launches']} x {row['kernel']}"


def write(rows: list[dict], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
