"""Measures the cases of a suite: `python -m benchmarks.run SUITE [--only TEXT] [--out CSV] [--figure IMAGE]`.

All providers of a case run in one process on the same random inputs. First their outputs and gradients are compared with the
definition in float64. A wrong provider is not timed, and the exit status is 1. Then the providers take turns; the first rounds
are dropped. The table shows the median, the 20th and the 80th percentile. A mode that begins with "sustained" is the time per
call in a loop without pauses, as in training. "of peer" is a provider's number over the peer's: below 1 is faster, or smaller.
"of floor" is the time over the least time on an H200 (benchmarks/roofline.py). SDPA computes softmax attention, another
function: the comparison is of cost. A note says which function another library computes, or that it is not installed, fails or
is too slow.

suites:
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from pathlib import Path

import pandas as pd
import torch

from benchmarks import report
from benchmarks.providers import PROVIDERS
from benchmarks.registry import SUITES, Case, Suite
from benchmarks.report import Row
from benchmarks.timing import Protocol
from benchmarks.workloads import WORKLOADS


def main(arguments: list[str] | None = None) -> int:
    suites = "\n".join(f"  {name:<11}{suite.what} ({' or '.join(suite.cases)})" for name, suite in SUITES.items())
    parser = argparse.ArgumentParser(description=__doc__ + suites, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES, metavar="SUITE")
    parser.add_argument("--only", default="", help="run the cases whose first column contains this")
    parser.add_argument("--without", action="append", default=[], metavar="PROVIDER", help="leave this out; may be repeated")
    parser.add_argument("--out", type=Path, help="write the rows here as CSV")
    parser.add_argument("--figure", type=Path, help="write the suite's figure here, if it has one (needs matplotlib)")
    parser.add_argument("--rows", type=Path, help="draw the figure from this CSV and measure nothing")
    parser.add_argument("--device", help="default: cuda if there is a GPU and a case for it, else cpu")
    parser.add_argument("--rounds", type=int, help="least number of rounds that count (default: the suite's, 5 or 3)")
    parser.add_argument("--dropped", type=int, default=3, help="number of first rounds that do not count (default 3)")
    parser.add_argument("--seconds", type=float, help="time for which short cases are repeated (default: cpu 4, cuda 0.3)")
    parser.add_argument("--sustained", type=float, default=1.0, help="seconds of a loop of calls without pauses (default 1)")
    parser.add_argument("--commit", default="", help="commit to record (default: git's)")
    options = parser.parse_args(arguments)

    suite = SUITES[options.suite]
    if options.figure and not suite.figure:
        parser.error(f"{options.suite!r} has no figure")
    if options.rows:
        if not options.figure:
            parser.error("--rows needs --figure")
        report.FIGURES[suite.figure](report.read_csv(options.rows), options.figure, None)
        return 0
    device = torch.device(options.device or ("cuda" if "cuda" in suite.cases and torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    cases = [case for case in suite.cases.get(device.type, ()) if options.only in case.label()]
    if not cases:
        parser.error(f"{options.suite!r} has no case for {device.type} that contains {options.only!r}")
    if unknown := set(options.without) - {name for case in cases for name in case.providers}:
        parser.error(f"no case here has a provider {', '.join(map(repr, sorted(unknown)))}")
    seconds = options.seconds if options.seconds is not None else 0.3 if device.type == "cuda" else 4.0
    protocol = Protocol(options.dropped, options.rounds or suite.rounds, seconds, sustained=options.sustained)

    # p = 1 is timed on inputs that keep f positive; the checks of the outputs confirm it. The settings alone do not ensure it.
    warnings.filterwarnings("ignore", message="fastmax: f", category=RuntimeWarning)
    constant = {"suite": options.suite, "protocol": protocol.text(device)} | report.environment(device, options.commit)
    for key, value in constant.items():
        print(f"{key}: {value}")
    print(report.HEADER)
    rows: list[Row] = []
    for case in _progress(cases):
        skip = _too_long(rows, case, suite) | dict.fromkeys(set(options.without) & set(case.providers), "left out")
        for row in WORKLOADS[suite.workload](case, device, protocol, skip):
            rows.append(row | constant)
            print(report.line(row), flush=True)
        if options.out:
            report.write_csv(rows, options.out)  # after each case, so that an interruption loses no earlier case
    measured = pd.DataFrame(rows, columns=report.COLUMNS)
    if suite.report:
        print("\n".join(report.REPORTS[suite.report](measured, device)))
    if options.figure:
        report.FIGURES[suite.figure](measured, options.figure, device)
    missed = [row for row in rows if row.get("met") == "no"]
    judged = sum(row.get("met", "") != "" for row in rows)
    if judged:
        print(f"{judged - len(missed)} of {judged} targets met")
    return 1 if any(map(_is_fault, rows)) else 0


def _is_fault(row: Row) -> bool:
    """Returns whether a row shows a wrong result or a failure of fastmax. Another library may fail on a case."""
    foreign = row["provider"] in PROVIDERS and PROVIDERS[row["provider"]].foreign
    return row["note"].startswith("refused") or (row["note"].startswith("failed") and not foreign)


def _too_long(rows: list[Row], case: Case, suite: Suite) -> dict[str, str]:
    """Returns providers to skip, and why: their times at smaller sizes predict a call longer than the suite's limit."""
    skip = {}
    for name in case.providers if math.isfinite(suite.limit_s) else ():
        series = (name, case.heads, case.head_dim, case.dtype)
        same = [
            row
            for row in rows
            if (row["provider"], row["heads"], row["head_dim"], row["dtype"]) == series and row["unit"] == "ms"
        ]
        if any("median" not in row for row in same):
            absent = [row["note"] for row in same if row["note"].startswith("not installed")]
            skip[name] = absent[0] if absent else "not run: it did not run at a smaller n"
            continue
        longest: dict[int, float] = {}  # n -> largest time of all modes
        for row in same:
            longest[row["tokens"]] = max(row["median"], longest.get(row["tokens"], 0.0))
        if len(longest) > 1:
            (n0, ms0), (n1, ms1) = sorted(longest.items())[-2:]
            growth = min(2.0, max(0.0, math.log(ms1 / ms0) / math.log(n1 / n0)))
            expected_s = ms1 * (case.tokens / n1) ** growth / 1e3
            if expected_s > suite.limit_s:
                skip[name] = f"not run: {expected_s:.1f} s a call expected, limit {suite.limit_s} s"
    return skip


def _progress(cases: list[Case]):
    try:
        from tqdm import tqdm
    except ImportError:
        return cases
    return tqdm(cases, file=sys.stderr, disable=None, leave=False)


if __name__ == "__main__":
    sys.exit(main())
