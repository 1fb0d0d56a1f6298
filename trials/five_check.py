"""Correctness of the backward in one kernel of five products (csrc/quadratic/bwd_five_sm90.h), which FASTMAX_FIVE=1 takes
in place of the two kernels of seven.

    timeout 100 python trials/five_check.py        # on a Hopper GPU; DIMS=128 or DIMS=64 for one head dim
    FASTMAX_FIVE=1 timeout 100 python -m pytest -q tests/test_sm90.py

Blocks wait for each other, so a mistake may hang: keep the time limits, or build with --trap-deadlocks (which covers
barriers in shared memory, not the counters of grad_q). The first line that fails says most: one tile, several, tails,
GQA, n != m, masks. A line has the relative errors of grad_q, grad_k, grad_v, five/seven products, against float64: five
may be 1.3 times seven. Then larger sizes, eleven runs each: the same bits, and within 5e-3 of the two kernels.
"""

import itertools
import os
import sys

import torch

import fastmax

torch.manual_seed(0)


def grads(q, k, v, g, causal, mask, softmax, five):
    os.environ["FASTMAX_FIVE"] = "1" if five else "0"
    x = [t.detach().requires_grad_() for t in (q, k, v)]
    if softmax:
        o = fastmax.flash_attention(*x, causal=causal, **({} if mask is None else {"key_padding_mask": mask}))
    else:
        o = fastmax.fastmax_attention(
            *x, causal=causal, algorithm="quadratic", **({} if mask is None else {"key_padding_mask": mask})
        )
    return torch.autograd.grad(o, x, g)


def exact(q, k, v, g, causal, mask, softmax):
    x = [t.detach().double().requires_grad_() for t in (q, k, v)]
    h, n, d = q.shape[1:]
    m, group = k.shape[2], h // k.shape[1]
    kk, vv = (t.repeat_interleave(group, 1) for t in x[1:])
    s = x[0] @ kk.transpose(-1, -2)
    w = (s * d**-0.5).exp() if softmax else 1 + s + s * s / 2
    if causal:
        w = w * torch.ones(n, m, device=q.device).tril(m - n)
    if mask is not None:
        w = w * mask[:, None, None]
    o = (w @ vv) / w.sum(-1, keepdim=True).clamp_min(1e-300)
    return torch.autograd.grad(o, x, g.double())


bad = 0
dims = [int(x) for x in os.environ.get("DIMS", "128,64").split(",")]
for softmax, d in itertools.product((False, True), dims):
    for b, h, hk, n, m, causal, masked in (
        (1, 1, 1, 64, 128, False, False),
        (1, 1, 1, 64, 64, True, False),
        (1, 1, 1, 128, 128, True, False),
        (1, 1, 1, 256, 256, True, False),
        (1, 2, 1, 1, 1, True, False),
        (2, 2, 2, 17, 17, True, False),
        (1, 2, 2, 63, 63, True, False),
        (1, 2, 2, 65, 65, False, False),
        (1, 2, 2, 127, 127, True, False),
        (1, 2, 2, 129, 129, True, False),
        (2, 4, 2, 300, 333, True, False),
        (2, 4, 1, 300, 333, False, False),
        (1, 8, 2, 1000, 1000, True, False),
        (2, 4, 2, 300, 400, True, True),
        (2, 4, 4, 300, 200, False, True),
        (1, 4, 4, 1025, 2048, True, False),
        (2, 40, 40, 700, 700, True, False),
        (1, 2, 1, 4096, 4096, True, False),
    ):
        q, k, v, g = (
            torch.randn(b, hh, t, d, device="cuda").mul_(0.5).bfloat16() for hh, t in ((h, n), (hk, m), (hk, m), (h, n))
        )
        mask = torch.rand(b, m, device="cuda") < 0.7 if masked else None
        if mask is not None:
            mask[:, : m // 4] = False
            mask[0] = True if b > 1 else mask[0]
        ref = exact(q, k, v, g, causal, mask, softmax)
        rel = lambda xs: [((a.double() - e).norm() / e.norm().clamp_min(1e-30)).item() for a, e in zip(xs, ref)]
        five = grads(q, k, v, g, causal, mask, softmax, True)
        again = grads(q, k, v, g, causal, mask, softmax, True)
        seven = grads(q, k, v, g, causal, mask, softmax, False)
        same = all(torch.equal(a, c) for a, c in zip(five, again))
        e5, e7 = rel(five), rel(seven)
        ok = same and all(x <= 1.3 * y + 1e-6 for x, y in zip(e5, e7))
        bad += not ok
        print(
            "ok " if ok else "BAD",
            "flash" if softmax else "fastmax",
            d,
            (b, h, hk, n, m),
            "causal" if causal else "full",
            "mask" if masked else "",
            "same" if same else "BITS DIFFER",
            " ".join(f"{x:.1e}/{y:.1e}" for x, y in zip(e5, e7)),
            flush=True,
        )

for softmax, d in itertools.product((False, True), dims):
    for causal in (True, False):
        q, k, v, g = (torch.randn(4, 16, 4096, d, device="cuda").mul_(0.5).bfloat16() for _ in range(4))
        first = grads(q, k, v, g, causal, None, softmax, True)
        for _ in range(10):
            for a, c in zip(first, grads(q, k, v, g, causal, None, softmax, True)):
                if not torch.equal(a, c):
                    bad += 1
                    print("BITS DIFFER", softmax, d, causal)
        diff = [
            ((a.double() - c.double()).norm() / c.double().norm()).item()
            for a, c in zip(first, grads(q, k, v, g, causal, None, softmax, False))
        ]
        print("repeat", softmax, d, causal, diff, flush=True)
        bad += any(x > 5e-3 for x in diff)
print("bad:", bad)
sys.exit(bad != 0)
