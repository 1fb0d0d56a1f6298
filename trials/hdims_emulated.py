"""The quadratic Hopper kernels at head dims 32 and 96 in the emulator of tests/emulator/, against float64.

Every kind of kernel (dense, bounded, window, fading; Fastmax, softmax; bf16, softmax's forward in fp16), odd sizes, GQA,
masks, noise, under several schedules.

    python trials/hdims_emulated.py FOLDER_FOR_OBJECTS [seed] [seconds]   # prints the largest error of every kind and head dim
"""

import itertools
import math
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import emulator  # noqa: E402

NAN = float("nan")


def exact(leaves, softmax, causal, scale, sees, noise, dropout):
    q, k, v, *decay = leaves
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.mT * scale
    n, m = s.shape[-2:]
    if causal:
        sees = sees & (torch.arange(m) <= torch.arange(n)[:, None] + m - n)
    faded = torch.zeros(())
    if decay:
        sums = decay[0].cumsum(-1).repeat_interleave(group, 1)
        faded = torch.where(sees, sums[..., m - n :, None] - sums[..., None, :], 0.0)
    if softmax:
        s = (s + faded).masked_fill(~sees, -math.inf)
        z = s.logsumexp(-1)
        w = torch.where(sees, (s - z.nan_to_num(neginf=0.0)[..., None]).exp(), 0.0)
        o = w @ v
    else:
        w = torch.where(sees, (1 + s + 0.5 * s * s) * faded.exp(), 0.0)
        z = w.sum(-1)
        o = w @ v / z.where(z != 0, torch.ones(()))[..., None]
    return o if noise is None else o * (1 + dropout * noise.double()), z


def check(library, softmax, n, m, d, dv, h, hk, b, causal, kind, mask, noise, dtype, schedule, sm_count, strided):
    def tensor(heads, tokens, columns):
        if strided:  # heads beside each other
            return torch.randn(b, tokens, heads, columns).transpose(1, 2)
        return torch.randn(b, heads, tokens, columns)

    q, k = ((tensor(*x) / d**0.25).to(dtype) for x in ((h, n, d), (hk, m, d)))
    v, grad_o = tensor(hk, m, dv).to(dtype), tensor(h, n, dv).to(dtype)
    numbers = dict(causal=int(causal), scale=0.5, schedule=schedule, sm_count=sm_count, resident=sm_count)
    tensors = dict(q=q, k=k, v=v)
    sees = torch.ones(b, h, n, m, dtype=torch.bool)
    if mask:
        keeps = torch.rand(b, m) < 0.7
        tensors["key_padding_mask"] = keeps.to(torch.uint8)
        sees = sees & keeps[:, None, None]
    position = torch.arange(n) + m - n
    if kind == "window":
        left, right = (
            random.choice(((63, 0), (64, 0), (5, 0), (127, 0), (200, 0)))
            if causal
            else random.choice(((64, 64), (100, 0), (3, 130)))
        )
        numbers |= dict(left=left, right=right)
        sees = sees & (torch.arange(m) >= position[:, None] - left) & (torch.arange(m) <= position[:, None] + right)
    if kind == "bounded":  # packed: sequences of n = m
        cuts = sorted({0, m, *(random.randrange(m + 1) for _ in range(3))})
        begin = torch.zeros(m, dtype=torch.int32)
        end = torch.full((m,), m, dtype=torch.int32)
        for first, last in itertools.pairwise(cuts):
            begin[first:last], end[first:last] = first, last
        first, last = (x[position.clamp(0, m - 1)].expand(b, hk, n).contiguous() for x in (begin, end))
        tensors |= dict(first_key=first, end_key=last)
        key = torch.arange(m)
        group = h // hk
        sees = (
            sees & (key >= first.repeat_interleave(group, 1)[..., None]) & (key < last.repeat_interleave(group, 1)[..., None])
        )
    if kind == "fading":
        tensors["log_decay"] = -(torch.rand(b, hk, m) ** 3) * random.choice((0.01, 0.3, 3.0))
    if noise:
        tensors["noise"] = torch.randn(b, h, n, dv).to(dtype)
        numbers["dropout"] = 0.3
    empty = dict(o=torch.full((b, h, n, dv), NAN).to(dtype), z=torch.full((b, h, n), NAN))
    algorithm = "flash" if softmax else "quadratic"
    kernels = [library.run(algorithm, "forward", tensors | empty, **numbers)]

    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    if kind == "fading":
        leaves.append(tensors["log_decay"].double().requires_grad_())
    o, z = exact(leaves, softmax, causal, 0.5, sees, tensors.get("noise"), 0.3)
    got, expected = dict(o=empty["o"]), dict(o=o)
    finite = z.isfinite()
    assert torch.equal(finite, empty["z"].isfinite()), "rows that see no key"
    got["z"], expected["z"] = empty["z"].where(finite, torch.zeros(())), z.where(finite, torch.zeros(()))
    if dtype == torch.bfloat16:
        names = ["grad_q", "grad_k", "grad_v"] + ["grad_log_decay"] * (kind == "fading")
        results = {
            name: torch.full_like(x.float() if name == "grad_log_decay" else x, NAN)
            for name, x in zip(names, (q, k, v, tensors.get("log_decay")), strict=False)
        }
        kernels.append(library.run(algorithm, "backward", tensors | empty | results | dict(grad_o=grad_o), **numbers))
        got |= results
        expected |= dict(zip(names, torch.autograd.grad(o, leaves, grad_o.double()), strict=True))
    errors = {
        name: ((got[name].double() - x).norm() / x.norm().clamp_min(0.02 * x.numel() ** 0.5)).item()
        for name, x in expected.items()
    }
    row = f"{algorithm}{'' if kind == 'dense' else '_' + kind}_sm90"
    if kind in ("window", "bounded") and kernels[0] in (
        f"{algorithm}_window_sm90",
        f"{algorithm}_bounded_sm90",
        f"{algorithm}_sm90",
    ):
        row = kernels[0]  # a window that hides nothing is none
    assert set(kernels) == {row}, (kernels, row)
    return row, errors


def main():
    library = emulator.build(Path(sys.argv[1]), pattern="quadratic")
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    until = time.time() + (float(sys.argv[3]) if len(sys.argv) > 3 else 300.0)
    random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    largest, count = defaultdict(float), defaultdict(int)
    kinds = [(False, kind) for kind in ("dense", "bounded", "fading")] + [
        (True, kind) for kind in ("dense", "bounded", "window", "fading")
    ]
    for number, (softmax, kind) in enumerate(itertools.cycle(kinds)):
        if time.time() > until:
            break
        d, dv = random.choice(((32, 32), (32, 32), (24, 24), (8, 32), (32, 16), (96, 96), (80, 80), (96, 72), (24, 96)))
        n = random.choice((1, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 200, 257, 385))
        m = (
            n
            if kind in ("bounded", "fading") or random.random() < 0.6
            else random.choice((1, 64, 65, 127, 129, 255, 256, 257, 300))
        )
        h, hk = random.choice(((1, 1), (2, 2), (4, 2), (3, 1)))
        causal = kind == "fading" or random.random() < 0.6
        dtype = torch.float16 if softmax and random.random() < 0.2 else torch.bfloat16
        case = dict(
            softmax=softmax, n=n, m=m, d=d, dv=dv, h=h, hk=hk, b=random.choice((1, 2)), causal=causal, kind=kind,
            mask=random.random() < 0.3, noise=not softmax and random.random() < 0.3, dtype=dtype,
            schedule=random.choice((0, 1, 2, 3 + number)), sm_count=random.choice((1, 2, 3, 5)), strided=random.random() < 0.4,
        )  # fmt: skip
        try:
            row, errors = check(library, **case)
        except (emulator.EmulatorError, AssertionError) as error:
            print("FAILED", case, error, flush=True)
            continue
        native = 32 if max(d, dv) <= 32 else 96
        limit = {"grad_log_decay": 0.1}
        for name, x in errors.items():
            key = row, native, name
            largest[key], count[key] = max(largest[key], x), count[key] + 1
            if m > 1 and not x < limit.get(name, 0.02):  # of one key the gradients of scores are 0
                print("LARGE", name, x, row, case, flush=True)
    for key in sorted(largest):
        print(*key, f"{largest[key]:.2g} of {count[key]}")


if __name__ == "__main__":
    main()
