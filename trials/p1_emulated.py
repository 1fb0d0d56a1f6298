"""Linear attention of order 1 on Hopper's kernels in the emulator (tests/emulator), against float64: `python
trials/p1_emulated.py 0 1 2` runs the schedules 0, 1 and 2. One tile to several segments, one and two blocks a segment (sm),
shared heads, narrow heads, noise, a grad_o that is prepared, a gradient of the denominators. All agreed in schedules 0 to
6. An emulator of these kernels alone found, before, that at head dim 128 two warpgroups that take turns at one copy of the
state took the parity of the phase before last for their own.
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import emulator
import torch

torch.set_num_threads(1)
if not any("order1" in x for x in emulator.PORTABLE):
    emulator.PORTABLE = (*emulator.PORTABLE, "linear/order1/sums_sm80.cu")
t = time.time()
lib = emulator.build(Path(tempfile.gettempdir()) / "p1_emulated", pattern="linear/order1")
print("built", time.time() - t)


def case(b, h, hk, n, m, d, dv=None, noise=False, expanded=False, gz=False, sm=2, schedule=0, resident=2, seed=0):
    dv = dv or d
    torch.manual_seed(seed)
    B = torch.bfloat16
    q, k, v, go = (torch.randn(b, x, r, c).to(B) for x, r, c in ((h, n, d), (hk, m, d), (hk, m, dv), (h, n, dv)))
    nz = torch.randn(b, h, n, dv).to(B)
    if expanded:
        go = go[:, :, :1].expand(go.shape)
    o = torch.full((b, h, n, dv), float("nan")).to(B)
    z = torch.full((b, h, n), float("nan"))
    num = dict(
        causal=1,
        scale=0.02,
        a0=1.25,
        a1=0.75,
        order=1,
        schedule=schedule,
        sm_count=sm,
        resident=resident,
        dropout=0.3 if noise else 0,
    )
    T = dict(q=q, k=k, v=v, o=o, z=z)
    if noise:
        T["noise"] = nz
    name = lib.run("linear", "forward", T, **num)
    ql, kl, vl = (x.double().requires_grad_() for x in (q, k, v))
    r = h // hk
    s = ql @ kl.repeat_interleave(r, 1).mT * 0.02
    f = (1.25 + 0.75 * s).tril(m - n)
    ez = f.sum(-1)
    eo = f @ vl.repeat_interleave(r, 1) / ez[..., None]
    if noise:
        eo = eo * (1 + 0.3 * nz.double())
    G = dict(
        grad_q=torch.full_like(q, float("nan")),
        grad_k=torch.full_like(k, float("nan")),
        grad_v=torch.full_like(v, float("nan")),
        grad_o=go,
    )
    gzt = torch.randn(b, h, n) / 100
    if gz:
        G["grad_z"] = gzt
    nb = lib.run("linear", "backward", T | G, **num)
    ex = torch.autograd.grad((eo * go.double()).sum() + ((ez * gzt).sum() if gz else 0), (ql, kl, vl))
    rel = lambda a, e: ((a.double() - e).norm() / e.norm()).item()
    errs = [rel(x, y) for x, y in zip((o, z, G["grad_q"], G["grad_k"], G["grad_v"]), (eo.detach(), ez.detach(), *ex))]
    ok = all(e < t for e, t in zip(errs, (4e-3, 1e-3, 8e-3, 8e-3, 8e-3))) and name == nb == "linear1_sm90"
    print(
        "ok" if ok else "WRONG",
        name,
        nb,
        (b, h, hk, n, m, d, dv),
        dict(noise=noise, expanded=expanded, gz=gz, sm=sm, s=schedule),
        ["%.1e" % e for e in errs],
        flush=True,
    )


if __name__ == "__main__":
    for s in map(int, sys.argv[1:] or ["0", "1", "2", "3", "4"]):
        for args in [
            dict(n=64, m=64, d=64),
            dict(n=65, m=65, d=64),
            dict(n=300, m=333, d=64, noise=True),
            dict(n=513, m=513, d=64, sm=132, resident=8),
            dict(n=129, m=700, d=64, h=4, hk=2, sm=132),
            dict(n=300, m=300, d=40, dv=24, expanded=True),
            dict(n=300, m=300, d=64, sm=1, h=2, hk=2, gz=True),
            dict(n=64, m=64, d=128),
            dict(n=300, m=333, d=128, noise=True),
            dict(n=513, m=513, d=128, sm=132),
            dict(n=257, m=400, d=128, h=4, hk=2, gz=True),
            dict(n=200, m=200, d=72, dv=104, expanded=True),
            dict(n=400, m=400, d=128, sm=1, h=2, hk=2),
        ]:
            a = dict(b=1, h=1, hk=1, schedule=s, gz=True) | args
            try:
                case(**a)
            except Exception as e:
                print("ERROR", a, str(e)[:800], flush=True)
