"""Linear attention of order 1 (p = 1) on Hopper: errors of its kernels beside those of the portable ones.

Run on a GPU: `python trials/p1_check.py`, with a library built for sm_90. o, z and the gradients in bf16 against the
same call in fp32,
on the Hopper kernels (sm90) and, with a mask of ones, which they do not cover, on the portable ones (sm80).
"prepared": with a grad_o
that the copy engine cannot read, so that g and e are made first. A line that ends in WRONG says where. From the
smallest shapes up,
so that the first one that fails says which part: one tile; two blocks; two segments; several heads. Both must be
about equal; the
tests proper are tests/test_sm90_linear1.py.
"""

import torch

import fastmax  # noqa: F401 (registers the operators)

torch.manual_seed(0)


def rel(x, y):
    return ((x.float() - y.float()).norm() / y.float().norm()).item()


def both(q, k, v, g, mask=None):
    s = (0.02, 1.0, 1.0, 0.5, 1, True, 0.0, "linear", False)
    o, z = torch.ops.fastmax.forward(q, k, v, mask, *(None,) * 5, *s)
    return (o, z, *torch.ops.fastmax.backward(g, None, q, k, v, o, z, mask, *(None,) * 5, *s)[:3])


SHAPES = [
    (1, 1, 64, 64, 64),
    (1, 1, 128, 128, 64),
    (1, 1, 256, 256, 64),
    (1, 1, 700, 700, 64),
    (1, 1, 64, 64, 128),
    (1, 1, 128, 128, 128),
    (1, 1, 700, 700, 128),
    (2, 32, 4096, 4096, 64),
    (1, 16, 8192, 8192, 128),
    (1, 3, 300, 500, 64),
    (1, 3, 300, 500, 128),
]


def check(b, h, n, m, d):
    q, k, v, g = (torch.randn(b, h, r, d, device="cuda", dtype=torch.bfloat16) for r in (n, m, m, n))
    torch.cuda.synchronize()
    print((b, h, n, m, d), flush=True)
    here = both(q, k, v, g)
    torch.cuda.synchronize()
    old = both(q, k, v, g, torch.ones(b, m, device="cuda", dtype=torch.bool))
    torch.cuda.synchronize()
    exact = both(q.float(), k.float(), v.float(), g.float())
    g1 = g[:, :, :1].expand(g.shape)
    prepared = both(q, k, v, g1)
    torch.cuda.synchronize()
    old1 = both(q, k, v, g1, torch.ones(b, m, device="cuda", dtype=torch.bool))
    exact1 = both(q.float(), k.float(), v.float(), g1.float())
    again = both(q, k, v, g)
    assert all(torch.equal(x, y) for x, y in zip(here, again, strict=True)), "other bits"
    for name, x, y, e in zip(
        ("o", "z", "grad_q", "grad_k", "grad_v", *["prepared " + s for s in ("grad_q", "grad_k", "grad_v")]),
        here + prepared[2:],
        old + old1[2:],
        exact + exact1[2:],
        strict=True,
    ):
        line = f"  {name:15s} sm90 {rel(x, e):.2e}  sm80 {rel(y, e):.2e}"
        if rel(x, e) > 2 * rel(y, e) + 1e-3:
            bad = ((x.float() - e).abs() > 0.05 * e.abs().max()).nonzero()
            line += f"  WRONG at {bad.shape[0]} of {x.numel()}: {bad[:4].tolist()} .. {bad[-2:].tolist()}"
        print(line, flush=True)


for shape in SHAPES:
    check(*shape)
