"""The linear kernels of order 2 for Hopper on the emulator (tests/emulator), against float64. No GPU:

    python trials/hlin_emulated.py FOLDER_FOR_OBJECTS SCHEDULE [SCHEDULE ...]      # FASTMAX_TRIAL_LAG=3000 for lags too

Numbers of multiprocessors are chosen so that a state has eight blocks (`fine`: 8 for one state in one walk, 16 for one in
segments), or four (2, 12: segments). Run so far, all right: schedules 0 to 5 at head dims 64 and 128, 0 to 9 at 32, some with
a lag of 3000.
"""

import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import emulator  # noqa: E402

torch.set_num_threads(1)
LIMIT = {"log_decay": 0.03}


def relative(actual, exact):
    return ((actual.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def report(errors, what):
    wrong = {name: error for name, error in errors.items() if not error < LIMIT.get(name.removeprefix("grad_"), 0.012)}
    print("WRONG" if wrong else "right", what, {name: f"{error:.1e}" for name, error in errors.items()}, flush=True)
    return not wrong


def nothing(like, dtype=None):
    return torch.full_like(like, torch.nan, dtype=dtype)


class Given:
    def __init__(
        self, n, m=None, d=64, dv=None, h=1, hk=None, b=1, mask=False, noise=False, decay=0.0, first=False, causal=True
    ):
        self.n, self.m, self.d, self.h, self.hk, self.b, self.causal = n, m or n, d, h, hk or h, b, causal
        generator = torch.Generator().manual_seed(7 * n + self.m + d)

        def normal(*sizes):
            return torch.randn(*sizes, generator=generator)

        dv = dv or d
        self.q, self.k = normal(b, h, n, d).bfloat16(), normal(b, self.hk, self.m, d).bfloat16()
        self.v, self.grad_o = normal(b, self.hk, self.m, dv).bfloat16(), normal(b, h, n, dv).bfloat16()
        self.scale, self.more, self.numbers = d**-0.5, {}, {}
        if mask:
            kept = torch.rand(b, self.m, generator=generator) > 0.3
            kept[:, : self.m - n + 8] = True  # what sees one key alone has gradients that are roundings
            self.more["key_padding_mask"] = kept.to(torch.uint8)
        if noise:
            self.more["noise"], self.numbers["dropout"] = normal(b, h, n, dv).bfloat16(), 0.3
        if decay:
            self.more["log_decay"] = -(torch.rand(b, self.hk, self.m, generator=generator) ** 3) * decay
        if first:
            begins = torch.where(torch.rand(b, self.hk, self.m, generator=generator) < 0.01, torch.arange(self.m), 0)
            self.more["first_key"] = begins.cummax(-1)[0][..., self.m - n :].int().contiguous()

    def of_queries(self, x):
        return x.repeat_interleave(self.h // self.hk, 1)

    def weights(self, q, k, log_decay):
        """f(s), faded and where it is seen; and the sums of decays."""
        s = q @ self.of_queries(k).mT * self.scale
        i, j = torch.arange(self.n)[:, None] + self.m - self.n, torch.arange(self.m)
        seen = (j <= i if self.causal else torch.ones(self.n, self.m, dtype=torch.bool)).expand(s.shape)
        if "key_padding_mask" in self.more:
            seen = seen & self.more["key_padding_mask"].bool()[:, None, None]
        if "first_key" in self.more:
            seen = seen & (j >= self.of_queries(self.more["first_key"])[..., None])
        weights = torch.where(seen, 1 + s + 0.5 * s * s, 0.0)
        if log_decay is None:
            return weights, torch.zeros(self.b, self.hk, self.m, dtype=torch.double)
        sums = log_decay.cumsum(-1)
        of_keys = self.of_queries(sums)
        left = torch.where(seen, of_keys[..., self.m - self.n :, None] - of_keys[..., None, :], 0.0).exp()
        return weights * left, sums


def call(lib, schedule, sm, **case):
    x = Given(**case)
    numbers = dict(causal=int(x.causal), scale=x.scale, schedule=schedule, sm_count=sm) | x.numbers
    tensors = dict(q=x.q, k=x.k, v=x.v, o=nothing(x.grad_o), z=torch.full((x.b, x.h, x.n), torch.nan)) | x.more
    begin = time.time()
    kernels = {lib.run("linear", "forward", tensors, **numbers)}
    leaves = {name: tensors[name].double().requires_grad_() for name in ("q", "k", "v", "log_decay") if name in tensors}
    weights, _ = x.weights(leaves["q"], leaves["k"], leaves.get("log_decay"))
    z = weights.sum(-1)
    o = weights @ x.of_queries(leaves["v"]) / torch.where(z == 0, 1.0, z)[..., None]
    if "noise" in x.more:
        o = o * (1 + 0.3 * x.more["noise"].double())
    grads = {f"grad_{name}": nothing(tensors[name]) for name in leaves}
    kernels.add(lib.run("linear", "backward", tensors | grads | {"grad_o": x.grad_o}, **numbers))
    exact = dict(zip(grads, torch.autograd.grad(o, list(leaves.values()), x.grad_o.double()), strict=True))
    errors = {"o": relative(tensors["o"], o), "z": relative(tensors["z"], z)}
    errors |= {name: relative(grads[name], exact[name]) for name in grads}
    return report(errors, f"{kernels} schedule {schedule}, sm {sm}, {case}, {time.time() - begin:.0f} s")


def carried(lib, schedule, sm, **case):
    """From a state of 40 tokens, with its gradient and that of the state after."""
    x = Given(**case)
    row, column = torch.triu_indices(x.d, x.d)

    def features(k):
        return torch.cat([k.new_ones(*k.shape[:3], 1), k, k[..., row] * k[..., column]], -1)

    before = features(torch.randn(x.b, x.hk, 40, x.d))
    values, weights = (before.mT @ torch.randn(x.b, x.hk, 40, x.d)).contiguous(), before.sum(2)
    numbers = dict(causal=1, scale=x.scale, schedule=schedule, sm_count=sm)
    tensors = dict(q=x.q, k=x.k, v=x.v, values=values, weights=weights) | x.more
    after = dict(new_values=nothing(values), new_weights=nothing(weights))
    results = dict(o=nothing(x.grad_o), z=torch.full((x.b, x.h, x.n), torch.nan))
    begin = time.time()
    kernels = {lib.run("linear from a state", "forward", tensors | results | after, **numbers)}

    names = [name for name in ("q", "k", "v", "values", "weights", "log_decay") if name in tensors]
    leaves = {name: tensors[name].double().requires_grad_() for name in names}
    q = leaves["q"]
    own, sums = x.weights(q, leaves["k"], leaves.get("log_decay"))
    pairs = torch.where(row == column, 0.5, 1.0) * x.scale**2 * q[..., row] * q[..., column]
    reading = torch.cat([q.new_ones(x.b, x.h, x.n, 1), x.scale * q, pairs], -1) * x.of_queries(sums).exp()[..., None]
    z = own.sum(-1) + (reading @ x.of_queries(leaves["weights"])[..., None])[..., 0]
    o = (own @ x.of_queries(leaves["v"]) + reading @ x.of_queries(leaves["values"])) / z[..., None]
    joining = features(leaves["k"]) * (sums[..., -1:] - sums).exp()[..., None]
    if "key_padding_mask" in x.more:
        joining = joining * x.more["key_padding_mask"][:, None, :, None]
    left = sums[..., -1].exp()[..., None]
    new_values = leaves["values"] * left[..., None] + joining.mT @ leaves["v"]
    new_weights = leaves["weights"] * left + joining.sum(2)
    exact = {"o": o, "z": z, "new_values": new_values, "new_weights": new_weights}
    errors = {name: relative((results | after)[name], exact[name]) for name in exact}

    grads = {f"grad_{name}": nothing(tensors[name]) for name in names}
    of_after = dict(grad_new_values=0.01 * torch.randn(values.shape), grad_new_weights=0.01 * torch.randn(weights.shape))
    given = tensors | results | after | grads | of_after | {"grad_o": x.grad_o}
    kernels.add(lib.run("linear from a state", "backward", given, **numbers))
    outputs = (o, new_values, new_weights)
    of_outputs = [y.double() for y in (x.grad_o, *of_after.values())]
    found = torch.autograd.grad(outputs, list(leaves.values()), of_outputs)
    errors |= {name: relative(grads[name], y) for name, y in zip(grads, found, strict=True)}
    return report(errors, f"{kernels} schedule {schedule}, sm {sm}, {case}, {time.time() - begin:.0f} s")


CALLS = [
    *((3, dict(n=n, h=2)) for n in (17, 65, 257)),
    *((8, dict(n=n)) for n in (257, 300, 513, 700)),  # fine
    *((16, dict(n=n)) for n in (513, 700, 1030)),  # fine, segments
    *((12, dict(n=n)) for n in (513, 900)),  # segments
    (8, dict(n=300, m=700, h=2, hk=1, mask=True)),
    (8, dict(n=300, m=200, causal=False)),
    (16, dict(n=100, m=700, causal=False, mask=True)),
    (16, dict(n=600, m=700, h=4, hk=2, mask=True, noise=True)),
    (8, dict(n=300, m=333, d=40, dv=24)),
    (8, dict(n=1, m=600)),
    (5, dict(n=520, b=2, h=2)),
    (8, dict(n=700, h=4, hk=1)),
    (16, dict(n=700, h=4, hk=1)),
    (8, dict(n=300, decay=0.2)),
    (16, dict(n=600, h=2, hk=1, decay=0.1)),
    (8, dict(n=600, first=True)),
    (16, dict(n=600, first=True, decay=0.05)),
]
CARRIED = [
    (8, dict(n=1)),
    (8, dict(n=257)),
    (8, dict(n=300, mask=True)),
    (16, dict(n=600)),
    (4, dict(n=300, h=2, hk=1)),
    (8, dict(n=300, decay=0.2)),
]
WIDE = [
    (2, dict(n=65, d=128)),
    (2, dict(n=200, d=128, h=2, hk=1)),
    (3, dict(n=1100, d=128)),
    (6, dict(n=100, m=300, d=128, causal=False)),
    (2, dict(n=1100, d=72, dv=104)),
    (4, dict(n=300, m=1100, d=128, h=2, hk=1, decay=0.02)),
]
NARROW = [  # a state in two blocks
    *((3, dict(n=n, d=32, h=2)) for n in (2, 17, 63, 64, 65, 128, 255, 256, 257, 513)),
    *((sm, dict(n=n, d=32)) for sm in (1, 8) for n in (513, 700, 1030)),  # without and with segments
    (3, dict(n=300, m=700, d=32, h=4, hk=2, mask=True)),
    (3, dict(n=300, m=200, d=32, causal=False)),
    (8, dict(n=100, m=700, d=32, causal=False, mask=True)),
    (2, dict(n=1, m=600, d=32)),
    (8, dict(n=600, m=700, d=32, h=4, hk=1, b=2, mask=True, noise=True)),
    (2, dict(n=300, m=333, d=24, dv=8)),
    (2, dict(n=300, d=8, dv=32)),
    (3, dict(n=300, d=32, decay=0.2)),
    (8, dict(n=600, d=32, h=2, hk=1, decay=0.1)),
    (3, dict(n=600, d=32, first=True)),
    (8, dict(n=600, d=32, first=True, decay=0.05)),
]
NARROW_CARRIED = [
    *((sm, dict(n=n, d=32)) for sm, n in ((2, 1), (3, 257), (8, 600))),
    (2, dict(n=300, d=32, mask=True)),
    (4, dict(n=300, d=32, h=2, hk=1)),
    (3, dict(n=300, d=32, decay=0.2)),
]

if __name__ == "__main__":
    library = emulator.build(Path(sys.argv[1]), pattern="linear/order2")
    right = True
    checks = ((call, CALLS), (carried, CARRIED), (call, WIDE), (call, NARROW), (carried, NARROW_CARRIED))
    for number in map(int, sys.argv[2:]):
        for check, cases in checks:
            for sm_count, options in cases:
                right &= check(library, number, sm_count, **options)
    sys.exit(0 if right else 1)
