"""What the order of work, results stored from registers and cheaper decays came to on Hopper; medians in ms, calls by turns.

    python trials/order_time.py    # of this commit, cuDNN beside it

Forward / forward + backward of fastmax_attention(algorithm="quadratic"), flash_attention and cuDNN SDPA, causal, bf16, L2 flushed.
Compare commits by running it in each tree in one session: 0fc7420 (before), a81bc59 (order), ba18095 (first block), 8242cfb (decays),
and the one that added core/sm90/store.h. Predicted, from a count of tiles and instructions:

    shape               before          predicted       hangs on it
    (1,16,4096,128)     - / 0.745       - / 0.5         the order stays if no row is slower than before by more than 1%
    (1,16,8192,128)     1.15 to 1.3 of cuDNN -> 1.0      likewise; `auto` is then not slower than cuDNN at 4096 to 16384
    (32,32,1024,64)     0.385 / 1.59    0.34 / 1.54     the first block that is incomplete
    (8,32,4096,64)      0.967 / 4.38    0.92 / 4.3      likewise
    (8,16,4096,128)     0.850 / 3.84    0.80 / 3.7      results from registers: keep if not slower anywhere
    decay (8,32,4096,64)  ratio 1.39    0.95 to 1.15    the goal is 1.15; of 4096 keys 1700 are left at this decay
    decay at d = 128      portable      1.2 to 1.4      the backward on Hopper's kernels: keep if faster than the portable ones

Where the order is slower although more multiprocessors are busy, L2 is the suspect: kRoundsAtEnd of work_order.h lower (3), or pairs of
heads everywhere.
"""

import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastmax

start = time.time()


def turns(calls, seconds):
    out = [[] for _ in calls]
    for _ in range(3):
        for call in calls:
            call()
    torch.cuda.synchronize()
    end = time.time() + seconds
    while time.time() < end or len(out[0]) < 5:
        marks = []
        for call in calls:
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            a.record()
            call()
            b.record()
            marks.append((a, b))
        torch.cuda.synchronize()
        for x, (a, b) in zip(out, marks, strict=False):
            x.append(a.elapsed_time(b))
    return [statistics.median(x) for x in out]


flush = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
for b, h, n, d in [
    (1, 16, 4096, 128),
    (1, 16, 8192, 128),
    (1, 16, 16384, 128),
    (32, 32, 1024, 64),
    (8, 32, 4096, 64),
    (8, 16, 4096, 128),
    (1, 16, 4096, 64),
]:
    x = [torch.randn(b, h, n, d, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    g = torch.randn(b, h, n, d, device="cuda").bfloat16()
    decay = (-0.05 * F.softplus(torch.randn(b, h, n, device="cuda"))).requires_grad_()

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*x, is_causal=True)

    def quadratic():
        return fastmax.fastmax_attention(*x, causal=True, algorithm="quadratic")

    def flash():
        return fastmax.flash_attention(*x, causal=True)

    def faded():
        return fastmax.fastmax_attention(*x, causal=True, algorithm="quadratic", log_decay=decay)

    def flash_faded():
        return fastmax.flash_attention(*x, causal=True, log_decay=decay)

    calls, names = [quadratic, flash, cudnn], ["fastmax", "flash", "cudnn"]
    if b * h * n * d == 8 * 32 * 4096 * 64 and n == 4096:
        calls += [faded, flash_faded]
        names += ["faded", "flash faded"]

    def forward(call):
        def run():
            with torch.no_grad():
                call()

        return run

    def both(call, more):
        return lambda: torch.autograd.grad(call(), x + more, g)

    fwd = turns([forward(c) for c in calls], 1.2)
    all_ = turns([both(c, [decay] if "faded" in name else []) for c, name in zip(calls, names, strict=False)], 2.0)
    print(
        (b, h, n, d),
        "  ".join(f"{name} {f:.3f}/{t:.3f}" for name, f, t in zip(names, fwd, all_, strict=False)),
        f" of cudnn: fastmax {fwd[0] / fwd[2]:.2f}/{all_[0] / all_[2]:.2f} flash {fwd[1] / fwd[2]:.2f}/{all_[1] / all_[2]:.2f}",
        flush=True,
    )
    if len(calls) > 3:
        print(
            f"   decay: fastmax {fwd[3] / fwd[0]:.2f}/{all_[3] / all_[0]:.2f}  flash {fwd[4] / fwd[1]:.2f}/{all_[4] / all_[1]:.2f}",
            flush=True,
        )
        for call in (quadratic, faded):
            more = [decay] if call is faded else []
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
                for _ in range(3):
                    torch.autograd.grad(call(), x + more, g)
                torch.cuda.synchronize()
            for e in sorted(prof.key_averages(), key=lambda e: -e.device_time_total)[:10]:
                print(f"      {e.device_time_total / 3 / 1e3:8.4f} ms  {e.key[:120]}", flush=True)
    if time.time() - start > 33:
        break
