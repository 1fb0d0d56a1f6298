"""What decays and packed sequences cost in the linear algorithm of order 2 on Hopper: time of calls, and of every kernel of them.

Compared: calls without options, with `log_decay` (-0.05 softplus(x)), and with 64 packed sequences of random lengths, forward and
forward + backward, at (1, 32, 65536, 64) and (1, 16, 65536, 128). Before (H200): 10.82 ms forward + backward without, 14.19 with
decays (1.31), 14.22 packed (1.29), at head dim 64. Asked: 1.10 and 1.15. Predicted: 1.07 to 1.12 with decays, 1.03 to 1.06 packed.

What hangs on it: whether the state kernel needs more (its 160 sums times a factor at every chunk: `linear_state_sm90` of decays against
that of the plain call), the gradients (factors of pairs in tiles on the diagonal of grad_q, always of pairs at head dim 64 because a
branch spills: `linear_grad_sm90_kernel<64, Grads 0, Fade 2>`), or the small kernels (`linear_fade_tiles`, `decay_*`).

    PYTHONPATH=. python trials/hfade_time.py
"""

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import fastmax

torch.manual_seed(0)
dev = "cuda"
for b, h, n, d in ((1, 32, 65536, 64), (1, 16, 65536, 128)):
    q, k, v, g = (torch.randn(b, h, n, d, device=dev).mul_(0.5).bfloat16() for _ in range(4))
    for t in (q, k, v):
        t.requires_grad_()
    decay = (-0.05 * F.softplus(torch.randn(b, h, n, device=dev))).requires_grad_()
    gen = torch.Generator().manual_seed(n)
    cuts = torch.randint(n + 1, (63,), generator=gen).sort().values
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.full((1,), n)]).to(dev, torch.int32)
    options = {"plain": {}, "decay": {"log_decay": decay}, "packed": {"cu_seqlens": cu}}
    base, found = {}, {}
    for name, o in options.items():
        inputs = [q, k, v] + ([decay] if name == "decay" else [])

        def fwd():
            return fastmax.fastmax_attention(q, k, v, causal=True, p=2, algorithm="linear", **o)

        def both():
            torch.autograd.grad(fwd(), inputs, g)

        def fwd_alone():
            with torch.no_grad():
                fwd()

        times = {}
        for what, call in (("fwd", fwd_alone), ("fwd+bwd", both)):
            for _ in range(3):
                call()
            ms = []
            for _ in range(9):
                a, e = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                a.record(), call(), e.record()
                torch.cuda.synchronize()
                ms.append(a.elapsed_time(e))
            times[what] = sorted(ms)[4]
        base.setdefault("fwd", times["fwd"]), base.setdefault("fwd+bwd", times["fwd+bwd"])
        print(
            f"({b},{h},{n},{d}) {name}: " + ", ".join(f"{w} {t:.3f} ms ({t / base[w]:.3f})" for w, t in times.items()),
            flush=True,
        )
        for what, call in (("fwd", fwd_alone), ("fwd+bwd", both)):
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                for _ in range(3):
                    call()
                torch.cuda.synchronize()
            for row in sorted(prof.key_averages(), key=lambda r: -r.device_time_total):
                if row.device_time_total / 3 > 2:
                    print(f"    {what:8s} {row.device_time_total / 3:9.1f} us  {row.count // 3:3d} x  {row.key[:150]}")
            print(flush=True)
    del q, k, v, g, decay
