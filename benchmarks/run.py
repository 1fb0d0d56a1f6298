"""Times the providers of a suite against each other: `python -m benchmarks.run SUITE`.

Protocol: all providers of a case on the same random inputs in one process; each output checked against float64 first; the
providers take turns, so that a change in the machine's speed meets both; the first rounds are dropped; median with 20th and
80th percentile of wall-clock seconds. "ratio" is the peer's median over ours, above 1 where fastmax is faster.
"""

from __future__ import annotations

import argparse
import csv
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.registry import PROVIDERS, SUITES, Case, Provider

CHECKED_ROWS = 16
MIN_SECONDS = 4.0  # short cases are repeated this long


def make_inputs(case: Case) -> tuple[Tensor, ...]:
    """q, k, v and the output's gradient, standard normal."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, case.heads, case.tokens, case.head_dim)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype) for _ in range(4))


def check(provider: Provider, case: Case, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Relative error of some rows of the provider's output against its definition in float64."""
    rows = torch.linspace(0, case.tokens - 1, CHECKED_ROWS).long()
    with torch.no_grad():
        got = provider.call(q, k, v, case)[:, :, rows].double()
    weight = provider.weight(q[:, :, rows].double() @ k.double().mT, case)
    weight = torch.where(torch.arange(case.tokens) <= rows[:, None], weight, 0.0)
    expected = (weight @ v.double()) / weight.sum(-1, keepdim=True)
    error = ((got - expected).norm() / expected.norm()).item()
    if not error < (1e-5 if case.dtype == torch.float32 else 1e-2):
        raise RuntimeError(f"{provider.name} is wrong on {case.label()}: relative error {error:.1e}")
    return error


def take_turns(calls: list[Callable[[], object]], rounds: int, dropped: int) -> list[Tensor]:
    """Seconds of every kept round, one tensor a call: at least `rounds` of them, and as many as fit in MIN_SECONDS."""
    times: list[list[float]] = [[] for _ in calls]
    while len(times[0]) < dropped + rounds or sum(map(sum, times)) < MIN_SECONDS:
        for call, seconds in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return [torch.tensor(seconds[dropped:]) for seconds in times]


def measure(case: Case, rounds: int, dropped: int) -> list[dict[str, object]]:
    """One row a provider and direction."""
    q, k, v, grad = make_inputs(case)
    errors = [check(provider, case, q, k, v) for provider in PROVIDERS]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def forward(provider: Provider) -> Callable[[], object]:
        def call():
            with torch.no_grad():
                provider.call(q, k, v, case)

        return call

    def forward_backward(provider: Provider) -> Callable[[], object]:
        return lambda: torch.autograd.grad(provider.call(*leaves, case), leaves, grad)

    out = []
    for mode, make in (("fwd", forward), ("fwd+bwd", forward_backward)):
        samples = take_turns([make(provider) for provider in PROVIDERS], rounds, dropped)
        peer = samples[-1].median().item()
        for provider, seconds, error in zip(PROVIDERS, samples, errors, strict=True):
            low, median, high = (seconds.quantile(x).item() for x in (0.2, 0.5, 0.8))
            row = {"case": case.label(), "mode": mode, "provider": provider.name, "median_s": median, "p20_s": low}
            row |= {"p80_s": high, "ratio": peer / median, "goal": case.goal if mode == "fwd+bwd" else "", "error": error}
            out.append(row)
    return out


def environment() -> dict[str, str]:
    """What the numbers depend on."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    processor = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), processor)
    return {
        "device": f"{processor}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dropped", type=int, default=1, help="first rounds left out")
    parser.add_argument("--csv", type=Path, help="also write the rows here")
    options = parser.parse_args()
    # p = 1 is timed on inputs that keep f positive, which the checks of the outputs confirm; the settings alone do not.
    warnings.filterwarnings("ignore", message="fastmax: f", category=RuntimeWarning)
    where = environment()
    print(", ".join(f"{key}: {value}" for key, value in where.items()))
    print(f"{'case':<36}{'mode':<9}{'provider':<9}{'median ms':>11}{'p20':>10}{'p80':>10}{'ratio':>8}{'goal':>7}{'error':>9}")
    rows = []
    for case in SUITES[options.suite]:
        for row in measure(case, options.rounds, options.dropped):
            goal = f"{row['goal']:.2f}" if row["goal"] else ""
            print(
                f"{row['case']:<36}{row['mode']:<9}{row['provider']:<9}{row['median_s'] * 1e3:>11.2f}"
                f"{row['p20_s'] * 1e3:>10.2f}{row['p80_s'] * 1e3:>10.2f}{row['ratio']:>8.2f}{goal:>7}{row['error']:>9.1e}",
                flush=True,
            )
            rows.append(row | where)
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
        print(f"wrote {options.csv}", file=sys.stderr)


if __name__ == "__main__":
    main()
