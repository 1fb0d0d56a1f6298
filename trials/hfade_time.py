"""What decays and packed sequences cost in the linear algorithm of order 2 on Hopper: time of calls, and of all their kernels.

Compared: calls without options, with `log_decay` (-0.05 softplus(x)), and with 64 packed sequences of random lengths, forward
and forward + backward, at (1, 32, 65536, 64) and (1, 16, 65536, 128). Before (H200), forward + backward at head dim 64:
10.82 ms without, 14.19 with decays (1.31), 14.22 packed (1.29). Asked: 1.10 and 1.15. Predicted: 1.07 to 1.12 with decays,
1.03 to 1.06 packed.

What hangs on it: whether the state kernel needs more (its 160 sums times a factor at every chunk: compare linear_state_sm90 of
both calls), the gradients (grad_q at head dim 64 takes factors of pairs in every tile on the diagonal, as a branch spills), or
the small kernels (linear_fade_tiles, decay_*).

    PYTHONPATH=. python trials/hfade_time.py
"""

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import fastmax


def median_ms(call, times=9):
    for _ in range(3):
        call()
    found = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return sorted(found)[times // 2]


def print_kernels(what, call):
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    for row in sorted(found.key_averages(), key=lambda row: -row.device_time_total):
        if row.device_time_total / 3 > 2:
            print(f"    {what:8s} {row.device_time_total / 3:9.1f} us  {row.count // 3:3d} x  {row.key[:150]}")


def measure(b, h, n, d):
    q, k, v = ((0.5 * torch.randn(b, h, n, d, device="cuda")).bfloat16().requires_grad_() for _ in range(3))
    grad_o = torch.randn_like(q)
    decay = (-0.05 * F.softplus(torch.randn(b, h, n, device="cuda"))).requires_grad_()
    cuts = torch.randint(n + 1, (63,), generator=torch.Generator().manual_seed(n)).sort().values
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.full((1,), n)]).to("cuda", torch.int32)
    plain = {}
    for name, options in (("plain", {}), ("decay", {"log_decay": decay}), ("packed", {"cu_seqlens": bounds})):
        inputs = (q, k, v, *(x for x in options.values() if x.requires_grad))

        def forward(options=options):
            with torch.no_grad():
                fastmax.fastmax_attention(q, k, v, causal=True, p=2, algorithm="linear", **options)

        def both(options=options, inputs=inputs):
            o = fastmax.fastmax_attention(q, k, v, causal=True, p=2, algorithm="linear", **options)
            torch.autograd.grad(o, inputs, grad_o)

        for what, call in (("fwd", forward), ("fwd+bwd", both)):
            ms = median_ms(call)
            plain.setdefault(what, ms)
            print(f"({b}, {h}, {n}, {d}) {name} {what}: {ms:.3f} ms, {ms / plain[what]:.3f}", flush=True)
            print_kernels(what, call)


torch.manual_seed(0)
measure(1, 32, 65536, 64)
measure(1, 16, 65536, 128)
