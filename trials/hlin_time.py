"""The Hopper kernels of the linear algorithm, p = 2, without options: times of calls and of every kernel of them. On an H200:

    PYTHONPATH=. python trials/hlin_time.py         # six shapes, every kernel
    PYTHONPATH=. python trials/hlin_time.py lags    # three shapes, with FASTMAX_TRIAL_LAG = 0 .. 4000

What is compared, ms forward / forward + backward, with 0fc7420 (build both, run this in both):

    shape               0fc7420        predicted     goal
    (2, 32, 16384, 64)  1.45 / 5.43    1.3 / 4.9     1.38 / 5.4
    (1, 32, 65536, 64)  2.91 / 10.6    2.6 / 9.6     2.65 / 10.5
    (1, 16, 65536, 64)  2.14 / 7.07    1.4 / 5.2     1.5 / 6
    (1, 16, 65536, 128) 8.37 / 32.0    7.7 / 28      8.0 / 29

and which decision hangs on it:

- linear_state_sm90: products of a step in two groups (kFirst in state_sm90.cu). Predicted 0.75 of its time. If it is not
  faster: one group again, with wait<0> before the features.
- linear_state_sm90 at 16 heads of 64 (eight blocks a state, 3 + 2 tiles) over that at 32 (four, 5 + 5), both with 128 blocks
  and 65536 rows: kFineWalk in snapshot_sm90.h, predicted 0.57. Above 0.67 segments are as good, and has_fine_shares should
  go.
- linear_grad_sm90<128: W of a tile beside the products of the one before, star by star, unrolled. Predicted 0.8 of its time
  (which was about 5.5 ms for each of grad_q and grad_k at (1, 16, 65536, 128)).
- lags: FASTMAX_TRIAL_LAG makes the second warpgroup of a block begin so many cycles later, in all three kernels. Both do the
  same, so they are in their snapshots, own chunks and epilogues at the same time, while the tensor cores wait. A lag is kept
  by itself: who is outside its products lets the other have all of the tensor cores. Predicted: up to 8% of the state kernel
  (900 cycles a snapshot of 7500), up to 10% of reads and gradients at 64. If some lag wins, it becomes a constant of each
  kernel; else the spin loops (`lag` in state_sm90.cu, read_sm90.cu, grad_sm90.cu, ItemsOfRows) go. kAhead of state_sm90.cu
  is a stage shorter at 64, so that warpgroups may be two stages apart: back to kStages - 2 if no lag wins.
- The walk over keys in the backward (the second linear_state_sm90<64, 0>) is what snapshots kept from the forward would
  save.

trials/hlin_micro.cu: what the product rule costs on the CUDA cores, by warps of a scheduler, alone and beside wgmma.
"""

import os
import re
import statistics
import sys

import torch
from torch.profiler import ProfilerActivity, profile

import fastmax

SHAPES = [(2, 32, 16384, 64), (1, 32, 65536, 64), (1, 16, 65536, 64), (1, 16, 65536, 128), (1, 8, 65536, 64), (1, 4, 65536, 64)]


def median_ms(call, repeats):
    times = []
    for i in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def name_of(kernel):
    name = re.sub(r"void |fastmax::|\(anonymous namespace\)::|<unnamed>::", "", kernel)
    return name.split("(CUtensorMap")[0].split("(fastmax")[0][:80]


def run(shape, lags=(0,)):
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grad_o = torch.randn_like(q)

    def forward():
        return fastmax.fastmax_attention(q, k, v, causal=True, temperature=shape[-1] ** 0.5, algorithm="linear")

    def both():
        torch.autograd.grad(forward(), (q, k, v), grad_o)

    repeats = 9 if len(lags) == 1 else 5
    for lag in lags:
        os.environ["FASTMAX_TRIAL_LAG"] = str(lag)
        with torch.no_grad():
            alone = median_ms(forward, repeats)
        print(f"{shape}, lag {lag}: forward {alone:.3f} ms, forward + backward {median_ms(both, repeats):.3f}", flush=True)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(3):
                both()
            torch.cuda.synchronize()
        events = [x for x in profiled.key_averages() if x.self_device_time_total > 0]
        rows = sorted(((x.self_device_time_total / 3e3, x.count / 3, name_of(x.key)) for x in events), reverse=True)
        for ms, count, name in rows:
            if len(lags) == 1 or "linear" in name:
                print(f"   {ms:8.3f} ms  {count:5.1f} x  {name}")
        print(f"   {sum(ms for ms, _, _ in rows):8.3f} ms in kernels", flush=True)


if len(sys.argv) == 1:
    for shape in SHAPES:
        run(shape)
else:
    for shape in SHAPES[1:4]:
        run(shape, (0, 400, 1000, 2000, 4000))
