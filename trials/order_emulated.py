"""Quadratic Fastmax and flash_attention on Hopper's kernels, run on the CPU by tests/emulator, against float64.

    python trials/order_emulated.py FOLDER fixed           # FOLDER for objects; from the root of the tree
    python trials/order_emulated.py FOLDER SEED SECONDS    # random configurations

Forward and all gradients at odd sizes, GQA, d != dv, masks, packed sequences, windows, decays from weak to strong (tiles that take factors
of rows and columns, and tiles that take pairs), one to five multiprocessors (so that few heads have pairs of items and rounds at the end),
schedules in order, adversarial and random; every schedule must give the same bits. Run at 411d579: 602 random configurations and the fixed
ones, no deadlock; what is over a limit is named in the comments.
"""

import itertools
import random
import sys
import time

sys.path.insert(0, "tests")
from pathlib import Path

import emulator
import torch

torch.set_num_threads(1)
lib = emulator.build(Path(sys.argv[1]), pattern="quadratic")


def ref(q, k, v, causal, softmax, scale, a, log_decay, left, mask, first):
    g = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(g, 1)
    v = v.repeat_interleave(g, 1)
    s = q @ k.mT * scale
    n, m = s.shape[-2:]
    i = torch.arange(n)[:, None] + m - n
    j = torch.arange(m)[None]
    vis = torch.ones(n, m, dtype=bool) if not causal else j <= i
    vis = vis.expand(s.shape).clone()
    if left >= 0:
        vis &= j >= i - left
    if mask is not None:
        vis &= mask[:, None, None, :].bool()
    if first is not None:
        vis &= j[None, None] >= first.repeat_interleave(g, 1)[..., None]
    w = s if softmax else a[0] + a[1] * s + a[2] * s * s
    if log_decay is not None:
        G = log_decay.cumsum(-1).repeat_interleave(g, 1)
        D = G[..., m - n :, None] - G[..., None, :] if m >= n else None
        D = torch.where(vis, D, 0.0)
        w = w + D if softmax else w * torch.exp(D)
    if softmax:
        w = w.masked_fill(~vis, -1e30)
        z = w.logsumexp(-1)
        return (w.softmax(-1) * vis) @ v, z
    w = w * vis
    z = w.sum(-1)
    # A row of which less is left sees nothing: kGone in csrc/core/score.h.
    gone = (z.abs() < 2.0**-100) if log_decay is not None else z == 0
    w = torch.where(gone[..., None], 0.0, w)
    z = torch.where(gone, 0.0, z)
    zz = torch.where(gone, 1.0, z)
    return (w @ v) / zz[..., None], z


bad = 0


def case(
    alg,
    n,
    m,
    d,
    dv=None,
    h=2,
    hk=2,
    b=1,
    causal=True,
    schedules=(0, 1, 2, 5),
    sms=(2,),
    decay=None,
    left=-1,
    mask=False,
    packed=False,
    fp16=False,
):
    global bad
    dv = dv or d
    dtype = torch.float16 if fp16 else torch.bfloat16
    q = (torch.randn(b, h, n, d) / d**0.25).to(dtype)
    k = (torch.randn(b, hk, m, d) / d**0.25).to(dtype)
    v = torch.randn(b, hk, m, dv).to(dtype)
    scale = 0.5
    T = dict(q=q, k=k, v=v)
    mk = first = None
    if decay is not None:
        ld = -decay * torch.nn.functional.softplus(torch.randn(b, hk, m))
        if decay == 1.0:
            ld[..., m // 3 : m // 3 + 20] *= 60
        if decay == 0.05:
            ld[:, hk // 2 :] *= 0.01
        T["log_decay"] = ld
    if mask:
        mk = torch.rand(b, m) < 0.7
        T["key_padding_mask"] = mk.to(torch.uint8)
    if packed:
        cuts = sorted(random.sample(range(1, m), min(4, m - 1)))
        starts = torch.tensor([max([0] + [c for c in cuts if c <= t]) for t in range(m)])
        first = starts[m - n :].to(torch.int32).expand(b, hk, n).contiguous()
        T["first_key"] = first
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    if decay is not None:
        leaves.append(T["log_decay"].double().requires_grad_())
    eo, ez = ref(
        *leaves[:3], causal, alg == "flash", scale, (1, 1, 0.5), leaves[3] if decay is not None else None, left, mk, first
    )
    go = torch.randn(b, h, n, dv).to(dtype)
    exact = torch.autograd.grad(eo, leaves, go.double())
    base = None
    t0 = time.time()
    for sm, s in itertools.product(sms, schedules):
        num = dict(causal=int(causal), scale=scale, schedule=s, sm_count=sm, left=left, resident=max(2, sm))
        o = torch.full((b, h, n, dv), float("nan")).to(dtype)
        z = torch.full((b, h, n), float("nan"))
        F = T | dict(o=o, z=z)
        what = f"{alg} {dict(n=n, m=m, d=d, dv=dv, h=h, hk=hk, b=b, causal=causal, s=s, sm=sm, decay=decay, left=left, mask=mask, packed=packed)}"
        try:
            nf = lib.run(alg, "forward", F, **num)
            nb = ""
            out = [o, z]
            want = [eo, ez]
            if not fp16:
                G = dict(
                    grad_q=torch.full_like(q, float("nan")),
                    grad_k=torch.full_like(k, float("nan")),
                    grad_v=torch.full_like(v, float("nan")),
                    grad_o=go,
                )
                if decay is not None:
                    G["grad_log_decay"] = torch.full((b, hk, m), float("nan"))
                nb = lib.run(alg, "backward", F | G, **num)
                out += [G["grad_q"], G["grad_k"], G["grad_v"]] + ([G["grad_log_decay"]] if decay is not None else [])
                want += list(exact)
        except emulator.EmulatorError as e:
            bad += 1
            print("ERROR", what, str(e)[:500], flush=True)
            return
        # Where nothing but a token itself is left (strong decays, one token) gradients are what rounding o leaves of a difference.
        err = [
            ((x.double() - e).norm() / max(e.norm().item(), 0.4 * go.double().norm().item(), 1e-9)).item()
            for x, e in zip(out, want, strict=False)
        ]
        if alg == "flash":
            fin = torch.isfinite(z) & (ez > -1e29)
            err[1] = (z.double() - ez)[fin].abs().max().item() if fin.any() else 0.0
        lim = [6e-3, 1e-4, 1.2e-2, 1.2e-2, 8e-3, 2e-2]
        same = base is None or all(torch.equal(x, y) for x, y in zip(base, out, strict=False))
        base = base or [x.clone() for x in out]
        if not same or not all(e <= l for e, l in zip(err, lim, strict=False)) or "sm90" not in nf or (nb and "sm90" not in nb):
            bad += 1
            print("BAD", what, nf, nb, "same" if same else "DIFFERS", [f"{e:.1e}" for e in err], flush=True)
            return
    print(
        "ok",
        alg,
        nf,
        nb,
        (n, m, d, dv, h, hk, b),
        causal,
        decay,
        left,
        mask,
        packed,
        [f"{e:.1e}" for e in err],
        "%.1fs" % (time.time() - t0),
        flush=True,
    )


if __name__ == "__main__":
    seed = 0 if sys.argv[2] == "fixed" else int(sys.argv[2])
    torch.manual_seed(seed)
    random.seed(seed)
    if sys.argv[2] == "fixed":
        for d in (64, 128, 32, 96):
            for alg in ("quadratic", "flash"):
                case(alg, 1, 1, d)
                case(alg, 17, 17, d, h=4, hk=2)
                case(alg, 129, 129, d)
                case(alg, 193, 193, d, h=4, hk=1)
                case(alg, 300, 333, d, h=8, hk=4, sms=(1, 3))
                case(alg, 513, 513, d, h=2, hk=1, b=2, sms=(2, 5))
                case(alg, 200, 130, d, causal=False, mask=True)
                case(alg, 300, 100, d)
                for dec in (0.05, 1.0, 30.0):
                    case(alg, 130, 130, d, decay=dec, h=4, hk=2)
                    case(alg, 300, 433, d, decay=dec, h=2, hk=1, sms=(1, 3))
                case(alg, 260, 260, d, decay=0.05, mask=True, packed=True)
                case(alg, 260, 300, d, packed=True, mask=True, h=4, hk=2)
                if alg == "flash":
                    case(alg, 260, 300, d, left=70)
    else:
        end = time.time() + float(sys.argv[3])
        while time.time() < end:
            alg = random.choice(["quadratic", "flash"])
            d = random.choice([64, 64, 128, 128, 32, 96])
            hk = random.choice([1, 2, 3])
            h = hk * random.choice([1, 1, 2, 3])
            n = random.choice([1, 5, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257, 385, random.randint(1, 500)])
            m = n if random.random() < 0.5 else n + random.randint(0, 200)
            dec = random.choice([None, 0.05, 0.3, 1.0, 5.0, 30.0])
            causal = dec is not None or random.random() < 0.7
            if not causal and random.random() < 0.5:
                m = max(1, n - random.randint(0, 100))
            case(
                alg,
                n,
                m,
                d,
                random.choice([None, None, 32, 64]),
                h,
                hk,
                random.choice([1, 1, 2]),
                causal,
                schedules=(0, random.randint(1, 2), random.randint(3, 99)),
                sms=(random.choice([1, 2, 3, 5]),),
                decay=dec,
                left=random.randint(1, 150) if alg == "flash" and causal and dec is None and random.random() < 0.3 else -1,
                mask=random.random() < 0.25,
                packed=causal and m > 1 and random.random() < 0.25,
            )
    print("bad", bad)
