"""Time of one case by kernel: `python -m benchmarks.profile SUITE [--only TEXT] [--provider NAME] [--trace FILE]`.

Runs the first case of the suite whose label contains TEXT under torch.profiler and prints its kernels (on a CPU its operators)
by time. `flop` and `bytes` are predicted by benchmarks/roofline.py, which knows this project's kernels and SDPA's by name. They
are blank for other kernels. Shares of the rates measured on an H200 are shown on an H200. docs/profiling.md says how to read
the table, and how to continue with Nsight.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import report, roofline
from benchmarks.providers import PROVIDERS
from benchmarks.registry import SUITES, Case
from benchmarks.timing import Call
from benchmarks.workloads.attention import attention_calls, inputs
from benchmarks.workloads.common import has_floor, precision
from benchmarks.workloads.train import Step, sizes_of

WARMUP = 3


@dataclass(frozen=True)
class Line:
    """All launches of one kernel, or on a CPU of one operator, in one iteration."""

    name: str
    launches: float
    ms: float
    share: float
    flop: float | None = None
    bytes: float | None = None

    def rates(self) -> tuple[float | None, float | None]:
        """TFLOP/s and TB/s."""
        return tuple(x and x / self.ms / 1e9 for x in (self.flop, self.bytes))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    profiled = [name for name, suite in SUITES.items() if suite.workload in ("attention", "train")]
    parser.add_argument("suite", choices=profiled, metavar="SUITE", help=", ".join(profiled))
    parser.add_argument("--only", default="", help="profile the first case whose label contains this")
    parser.add_argument("--provider", help="provider of the case (default: its first)")
    parser.add_argument("--mode", choices=("fwd", "fwd+bwd"), help="for attention (default: fwd+bwd if the case has it)")
    parser.add_argument("--device", help="default: cuda if there is a GPU and a case for it, else cpu")
    parser.add_argument("--iterations", type=int, default=5, help="profiled iterations, after 3 that are not (default 5)")
    parser.add_argument("--rows", type=int, default=20, help="rows of the table (default 20)")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace here (chrome://tracing, ui.perfetto.dev)")
    parser.add_argument("--bare", action="store_true", help="run without profiler and table, for Nsight and compute-sanitizer")
    options = parser.parse_args(arguments)

    suite = SUITES[options.suite]
    device = torch.device(options.device or ("cuda" if "cuda" in suite.cases and torch.cuda.is_available() else "cpu"))
    case = next((case for case in suite.cases.get(device.type, ()) if options.only in case.label()), None)
    if case is None:
        parser.error(f"{options.suite!r} has no case for {device.type} that contains {options.only!r}")
    name = options.provider or case.providers[0]
    if name not in case.providers:
        parser.error(f"--provider must be one of {', '.join(case.providers)} for this case, got {name!r}")
    if options.mode and suite.workload == "train":
        parser.error(f"--mode is for attention; {options.suite!r} has training steps")
    mode = "train" if suite.workload == "train" else options.mode or ("fwd+bwd" if "fwd+bwd" in case.modes else "fwd")
    if absent := PROVIDERS[name].missing():
        parser.error(f"{name}: {absent}")

    with precision(case.dtype):
        call = prepare(case, name, mode, device)
        with call.context():
            repeat(call, WARMUP, device)
            if options.bare:
                return bare(call, options.iterations, device)
            lines = profiled_lines(call, case, name, mode, device, options.iterations, options.trace)
    for key, value in report.environment(device, "").items():
        print(f"{key}: {value}")
    print(
        f"{name}, {mode}, {case.label()}: {sum(line.ms for line in lines):.4g} ms an iteration, {options.iterations} profiled"
    )
    print("\n".join(table(lines[: options.rows], case, has_floor(device))))
    if len(lines) > options.rows:
        rest = lines[options.rows :]
        print(f"{len(rest)} more: {sum(line.ms for line in rest):.4g} ms")
    if options.trace:
        print(f"wrote {options.trace}")
    return 0


def prepare(case: Case, name: str, mode: str, device: torch.device) -> Call:
    """Returns the call of one iteration."""
    provider = PROVIDERS[name]
    if mode == "train":
        return Call(Step(case, name, device), provider.context)
    q, k, v, grad_o = inputs(case, device)
    forward, forward_backward = attention_calls(case, q, k, v, grad_o)
    return (forward if mode == "fwd" else forward_backward)(provider)


def repeat(call: Call, iterations: int, device: torch.device) -> None:
    """Runs iterations, each in a range "iteration" of the profiler, or of NVTX under Nsight."""
    for _ in range(iterations):
        with record_function("iteration"):
            call.function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bare(call: Call, iterations: int, device: torch.device) -> int:
    """Runs iterations between cudaProfilerStart and cudaProfilerStop, which apply to all threads.

    The backward is launched by autograd's thread.
    """
    if device.type != "cuda":
        repeat(call, iterations, device)
        return 0
    with torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx():
        repeat(call, iterations, device)
    return 0


def profiled_lines(
    call: Call, case: Case, name: str, mode: str, device: torch.device, iterations: int, trace: Path | None
) -> list[Line]:
    """Profiles iterations; returns the kernels or operators, longest first."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda, acc_events=True) as profiler:
        repeat(call, iterations, device)
    if trace:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))

    spent: dict[str, tuple[float, int]] = {}  # name -> microseconds on the device (on a CPU without callees), and launches
    for event in profiler.events():
        if event.is_user_annotation or (event.device_type == torch.autograd.DeviceType.CUDA) != cuda:
            continue  # a named range covers kernels that have events of their own
        us = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        before = spent.get(event.name, (0.0, 0))
        spent[event.name] = before[0] + us, before[1] + 1
    total = sum(us for us, _ in spent.values())
    layers = sizes_of(case)["n_layer"] if mode.endswith("train") else 1
    _, p = PROVIDERS[name].arithmetic(case) or (None, None)
    lines = []
    for kernel, (us, launches) in sorted(spent.items(), key=lambda item: -item[1][0]):
        work = roofline.work(kernel, case, p, mode) if cuda else None
        flop, moved = (None, None) if work is None else (x and x * layers for x in work)
        lines.append(Line(kernel, launches / iterations, us / iterations / 1e3, us / total, flop, moved))
    return lines


def table(lines: list[Line], case: Case, with_shares: bool) -> list[str]:
    widths = {"launches": 9, "ms": 10, "share": 8, "Gflop": 10, "MB": 9, "TFLOP/s": 9, "of peak": 9, "TB/s": 7, "of copy": 9}
    rows = ["".join(f"{name:>{width}}" for name, width in widths.items()) + "  name"]

    def cell(value: float | None, width: int, form: str) -> str:
        return f"{'' if value is None else format(value, form):>{width}}"

    for line in lines:
        teraflops, terabytes = line.rates()
        of_peak = teraflops * 1e12 / roofline.MATMUL[case.dtype] if with_shares and teraflops else None
        of_copy = terabytes * 1e12 / roofline.COPY if with_shares and terabytes else None
        rows.append(
            f"{line.launches:>9.4g}{line.ms:>10.4g}{line.share:>8.1%}"
            + cell(line.flop and line.flop / 1e9, 10, ".4g")
            + cell(line.bytes and line.bytes / 1e6, 9, ".4g")
            + cell(teraflops, 9, ".3g")
            + cell(of_peak, 9, ".0%")
            + cell(terabytes, 7, ".2f")
            + cell(of_copy, 9, ".0%")
            + f"  {line.name[:120]}"
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
