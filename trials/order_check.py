"""Are quadratic Fastmax and flash_attention on Hopper right, with and without decays, at odd sizes?

    python trials/order_check.py        # on an H200; prints the largest errors by kind, exits with 1 where one is over its limit

Outputs and all gradients against float64, twice for the same bits: for the order of work (quadratic/work_order.h), the forward whose
first block is the incomplete one, decays by factors that come with their tile (quadratic/fading_sm90.h; strengths 0.05: factored
everywhere; 1 with a burst and 30: partly visible tiles take pairs), and results stored from registers (core/sm90/store.h).
`python -m pytest tests/test_sm90.py tests/test_decay_kernels.py tests/test_packed_kernels.py` and `python -m fastmax.verify --hopper
--random 2000 --processes 8` have more; FASTMAX_DEBUG=1 shows the kernels, of which none may be sm80. A hang: build with
`csrc/build.py --trap-deadlocks`.
"""

import itertools
import math
import sys

import torch

import fastmax

torch.manual_seed(0)


def reference(q, k, v, decay, causal, softmax):
    q, k, v = (x.double() for x in (q, k, v))
    group, n, m = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT / (math.sqrt(q.shape[3]) if softmax else 1)
    i, j = torch.arange(n, device=q.device)[:, None] + m - n, torch.arange(m, device=q.device)
    sees = (j <= i) if causal else torch.ones_like(i >= j)
    fade = 0
    if decay is not None:
        sums = decay.double().cumsum(-1).repeat_interleave(group, 1)
        fade = sums[..., -n:, None] - sums[..., None, :]
        fade = fade.masked_fill(~sees, 0)
    if softmax:
        w = (s + fade).masked_fill(~sees, -math.inf).softmax(-1)
    else:
        w = ((1 + s + s * s / 2) * (fade.exp() if decay is not None else 1)).masked_fill(~sees, 0)
        w = w / w.sum(-1, keepdim=True)
    return w @ v


worst, bad, count = {}, 0, 0
sizes = [
    (1, 16, 16, 1, 1),
    (1, 2, 2, 17, 17),
    (2, 3, 3, 127, 127),
    (1, 2, 1, 129, 129),
    (1, 4, 2, 193, 193),
    (1, 2, 2, 500, 500),
    (1, 2, 2, 1024, 1024),
    (1, 4, 2, 1100, 1100),
    (2, 8, 8, 640, 640),
    (1, 2, 2, 300, 700),
    (12, 16, 16, 1024, 1024),
    (1, 2, 2, 2100, 2100),
]
for (b, h, hk, n, m), d, softmax, strength in itertools.product(
    sizes, (32, 64, 96, 128), (False, True), (None, 0.05, 1.0, 30.0)
):
    if (b * h * n > 1 << 16 and (strength or softmax)) or (strength in (1.0, 30.0) and n in (1024, 640, 127)):
        continue
    q, k, v, g = (torch.randn(b, x, t, d, device="cuda").bfloat16() for x, t in ((h, n), (hk, m), (hk, m), (h, n)))
    if not softmax:
        q = q * d**-0.5
    decay = None if strength is None else -strength * torch.nn.functional.softplus(torch.randn(b, hk, m, device="cuda"))
    if strength == 1.0 and n > 100:
        decay[..., m // 2 : m // 2 + 40] *= 60
    x = [t.requires_grad_() for t in (q, k, v)] + ([] if decay is None else [decay.requires_grad_()])
    call = fastmax.flash_attention if softmax else fastmax.fastmax_attention
    options = (
        {"causal": True} | ({} if softmax else {"algorithm": "quadratic"}) | ({} if decay is None else {"log_decay": decay})
    )
    results = []
    for _ in range(2):
        o = call(q, k, v, **options)
        results.append((o.detach(), *torch.autograd.grad(o, x, g)))
    expected = reference(q, k, v, decay, True, softmax)
    expected = (expected.detach(), *torch.autograd.grad(expected, x, g.double()))
    same = all(torch.equal(a, c) for a, c in zip(*results, strict=True))
    errors = []
    for name, a, e in zip(("o", "dq", "dk", "dv", "ddecay"), results[0], expected, strict=False):
        # Where nothing but a row itself is left, gradients are sums of what rounding leaves.
        error = ((a.double() - e).norm() / max(e.norm(), 0.05 * expected[0].norm())).item()
        errors.append(error)
        key = (softmax, d, strength, name)
        worst[key] = max(worst.get(key, 0), error) if error == error else float("nan")
    count += 1
    limit = [5e-3, 1e-2, 1e-2, 1e-2, 2e-2]
    if not same or any(not e <= l for e, l in zip(errors, limit, strict=False)):
        bad += 1
        print(
            "BAD",
            (b, h, hk, n, m, d),
            "softmax" if softmax else "fastmax",
            strength,
            "same" if same else "DIFFERS",
            [f"{e:.1e}" for e in errors],
            flush=True,
        )
for key, error in sorted(worst.items(), key=str):
    print(key, f"{error:.1e}")
print(count, "calls,", bad, "bad")
sys.exit(bad != 0)
