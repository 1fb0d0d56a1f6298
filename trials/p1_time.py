"""Linear attention of order 1 (p = 1) on Hopper: times of a call and of its kernels, not measured so far.

Run on one GPU of the machine, alone: `python trials/p1_time.py`, with a library built for sm_90 (linear1_sm90 in its
info). For each
shape: forward and forward + backward on the Hopper kernels and, with a mask of ones, which they do not cover, on the
portable ones,
in turn; then every kernel's time by the profiler.

What is expected, ms (T: the bytes of one tensor at 4.25 TB/s; portable, measured earlier: 0.255 / 0.993 and 0.831 / 2.76):

    (2, 32, 16384, 64)     T 0.0316   forward 4 T = 0.126; grad_q 5 T = 0.158; grad_k and grad_v 6 T = 0.190; no sums
                                      so 0.14 / 0.53 with launches and starts; the aim was 0.19 / 0.72
    (1, 16, 65536, 128)    T 0.0632   4 segments: sums 1.5 T = 0.095 before each of the walks of 4, 5 and 6 T
                                      so 0.37 / 1.33; the aim was 0.45 / 1.7

What hangs on it:
  - group (csrc/linear/order1/launch_sm90.cpp): blocks that share a segment. 2 where walks fill half the device at
    most. A kernel that is
    above 1.3 times its bytes at group 2 waits for the L2 cache (blocks of a group read y and w twice) or for latency:
    compare 1 (more
    segments, more sums) and 4.
  - kStages and kXStages (walk_sm90.cu): if a kernel is slow with more blocks than multiprocessors too, latency of its
    roles is the
    limit, not memory: the state's (products, then rounding into shared memory) or the results' (two tiles at a time).
  - Rates in csrc/core/cost_model.h: for order 1 now those of order 2 on Hopper, from which algorithm="auto" takes
    crossings of 251
    and 390 tokens at head dims 64 and 128.
"""

import re
import statistics

import torch
from torch.profiler import ProfilerActivity, profile

import fastmax
from fastmax import extension

print(extension.build_info())
SHAPES = [(2, 32, 16384, 64), (1, 16, 65536, 128), (1, 12, 131072, 64), (1, 16, 4096, 64), (4, 32, 4096, 128)]


def timed(f, n=9):
    for _ in range(3):
        f()
    out = []
    for _ in range(n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        f()
        b.record()
        torch.cuda.synchronize()
        out.append(a.elapsed_time(b))
    return statistics.median(out)


def name_of(s):
    s = re.sub(r"void |fastmax::|\(anonymous namespace\)::|<unnamed>::", "", s)
    return s.split("(CUtensorMap")[0].split("(fastmax")[0][:90]


def measure(b, h, n, d):
    q, k, v = (torch.randn(b, h, n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    g = torch.randn_like(q)
    ones = torch.ones(b, n, device="cuda", dtype=torch.bool)

    def fwd(**x):
        with torch.no_grad():
            return fastmax.fastmax_attention(q, k, v, causal=True, p=1, temperature=50.0, algorithm="linear", **x)

    def both(**x):
        o = fastmax.fastmax_attention(q, k, v, causal=True, p=1, temperature=50.0, algorithm="linear", **x)
        return torch.autograd.grad(o, (q, k, v), g)

    print(
        f"{(b, h, n, d)}: forward {timed(fwd):.4f} ms (portable {timed(lambda: fwd(key_padding_mask=ones)):.4f}), "
        "forward + backward "
        f"{timed(both):.4f} (portable {timed(lambda: both(key_padding_mask=ones)):.4f})",
        flush=True,
    )
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(3):
            both()
        torch.cuda.synchronize()
    rows = [
        (e.self_device_time_total / 3e3, e.count / 3, name_of(e.key)) for e in p.key_averages() if e.self_device_time_total > 0
    ]
    for ms, count, name in sorted(rows, reverse=True):
        print(f"   {ms:8.4f} ms  {count:5.1f} x  {name}")


for shape in SHAPES:
    measure(*shape)
