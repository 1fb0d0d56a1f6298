"""The exact window of 128 at (1, 32, 65536, 64), p = 2, bf16, causal: where its time goes. Run alone on one H200:

    python trials/window_time.py

Compared in one process: the call without a window; the exact window with operators that join parts in their epilogues
(far_forward_, far_backward_: linear2_sm90 merges where it divides and adds gradients by reducing copies) and with the calls,
the merge and the sums that they replace; the windowed softmax by computed visibility (flash_window_sm90) and, by a bound that
hides nothing, by tables (flash_bounded_sm90). Then every kernel of a call, forward and backward.

Before (commit 1f95f5c): 15.03 ms against 11.31 without, forward + backward, 1.33 times; at most 1.20 is asked. Predicted by
bytes and counts: sums of gradients 1.2 -> 0.1 to 0.2 (reads of what is added to, behind products), merge 0.24 -> 0.05 (reads
of o, likewise), tables 0.04 -> 0, and their loads, which every item waited for; 13.4 to 13.8 in all.

What hangs on it: "joined" slower than "apart" in the forward or the backward: drop that operator (`joins_parts` of the row in
csrc/linear/algorithm.cpp). "by tables" as fast: drop flash_window_*_sm90.cu and WindowVisibility. Still above 1.20: the row
dots of o and grad_o, which row_score and linear_prepare both make (0.13 ms of reads), and buffers of the quadratic kernels
that are released only when an item's results are copied out (of three or four tiles, that wait shows), come next.
"""

import re
import statistics

import torch
from torch.profiler import ProfilerActivity, profile

import fastmax
from fastmax import extension, ops

B, H, N, D, WINDOW = 1, 32, 65536, 64, 128


def timed(*functions, rounds=9):
    """Milliseconds of each, in turns; medians."""
    samples = [[] for _ in functions]
    for i in range(rounds + 3):
        for function, times in zip(functions, samples, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            if i >= 3:
                times.append(start.elapsed_time(end))
    return [statistics.median(times) for times in samples]


def print_kernels(title, function, calls=3):
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    rows = [(x.self_device_time_total / 1e3 / calls, x.count / calls, x.key) for x in profiled.key_averages()]
    rows = sorted((row for row in rows if row[0] > 0), reverse=True)
    print(f"{title}: {sum(ms for ms, *_ in rows):.4f} ms in {sum(count for _, count, _ in rows):.0f} kernels")
    for ms, count, name in rows:
        name = re.sub(r"void |fastmax::|\(anonymous namespace\)::|<unnamed>::", "", name)
        print(
            f"   {ms:8.4f} ms  {count:5.1f} x  {re.split(r'[(](?:CUtensorMap|Quadratic|BwdParams|FwdParams)', name)[0][:110]}",
            flush=True,
        )


class Apart:
    """Far keys as on a device whose kernels do not join: a call, then `merge_` or PyTorch sums."""

    def __init__(self, implementation):
        self.default = implementation


def main():
    print(extension.build_info())
    q, k, v = (torch.randn(B, H, N, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grad_o = torch.randn_like(q)
    bound = torch.zeros(B, H, N, dtype=torch.int32, device="cuda")
    scale = D**-0.5

    def forward(function):
        def run():
            with torch.no_grad():
                function()

        return run

    def both(function):
        return lambda: torch.autograd.grad(function(), (q, k, v), grad_o)

    def attention(**options):
        return lambda: fastmax.fastmax_attention(q, k, v, causal=True, p=2, temperature=D**0.5, algorithm="linear", **options)

    def near(window):
        return lambda: fastmax.flash_attention(q, k, v, causal=True, scale=scale, window=window)

    def near_by_tables(window):
        operator = torch.ops.fastmax.flash_forward
        return lambda: operator(q, k, v, None, None, bound, None, scale, True, window - 1, -1, False)[0]

    functions = {"without": attention(), "exact window": attention(exact_window=WINDOW)}
    for window in (WINDOW, 256, 1024):
        functions |= {f"softmax, {window}": near(window), f"softmax, {window}, by tables": near_by_tables(window)}
    of_forward, of_both = (timed(*map(wrap, functions.values())) for wrap in (forward, both))
    for name, x, y in zip(functions, of_forward, of_both, strict=True):
        print(f"{name:28s} forward {x:8.4f} ms, forward + backward {y:8.4f}")

    joining = torch.ops.fastmax.far_forward_, torch.ops.fastmax.far_backward_
    exact = functions["exact window"]
    joined = timed(forward(exact), both(exact))
    torch.ops.fastmax.far_forward_, torch.ops.fastmax.far_backward_ = Apart(ops._far_forward_), Apart(ops._far_backward_)
    apart = timed(forward(exact), both(exact))
    print_kernels("exact window, apart", both(exact))
    torch.ops.fastmax.far_forward_, torch.ops.fastmax.far_backward_ = joining
    print(f"forward, forward + backward: joined {joined[0]:.4f} {joined[1]:.4f}, apart {apart[0]:.4f} {apart[1]:.4f} ms")
    for name in ("exact window", "without", f"softmax, {WINDOW}", f"softmax, {WINDOW}, by tables"):
        print_kernels(name, both(functions[name]))


if __name__ == "__main__":
    main()
