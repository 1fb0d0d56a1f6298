"""Decays and packed sequences in the Hopper kernels of the linear algorithm, against float64, on the CPU by tests/emulator.

What is compared: o, z and all gradients with the whole matrix of weights in float64; allowed is twice the error of that formula
in bf16 (four times for log_decay), as in tests/test_decay_kernels.py. Sizes about tiles and chunks, n != m, GQA, masks, narrow
heads, sequences that begin at chunks and tiles, decays about the range of factors of rows and columns (2^-64 a tile), segments
of a walk; with a decay, with bounds alone (instances of their own) and with both; several schedules of warps and copies. All
agreed when this was written; what a GPU says decides whether the branch stays. About five minutes.

    PYTHONPATH=tests python trials/hfade_check.py FOLDER   # objects and the library of the emulator go there
"""

import math
import sys
import time
from pathlib import Path

import emulator
import torch

BF16 = torch.bfloat16
FAILED = []


def definition(x, dtype):
    q, k, v = (x[name].to(dtype).requires_grad_() for name in "qkv")
    log_decay = x["log_decay"].double().requires_grad_()
    n, m, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    positions, keys = torch.arange(n) + m - n, torch.arange(m)
    sees = (keys <= positions[:, None]).expand(q.shape[0], q.shape[1], n, m)
    if x["key_padding_mask"] is not None:
        sees = sees & x["key_padding_mask"][:, None, None, :].bool()
    if x["first_key"] is not None:
        sees = sees & (keys >= x["first_key"].repeat_interleave(group, 1)[..., None])
    sums = log_decay.cumsum(-1).repeat_interleave(group, 1)
    exponent = torch.where(sees, sums[..., positions, None] - sums[..., None, :], 0.0)
    s = q.shape[-1] ** -0.5 * (q @ k.repeat_interleave(group, 1).mT)
    w = torch.where(sees, (1 + s * (1 + 0.5 * s)) * exponent.exp().to(dtype), 0.0)
    z = w.sum(-1, keepdim=True)
    o = (w / torch.where(z == 0, 1.0, z)).to(dtype) @ v.repeat_interleave(group, 1)
    loss = (o * x["grad_o"].to(dtype)).sum() + (z * x["grad_z"][..., None].to(dtype)).sum()
    grads = torch.autograd.grad(loss, (q, k, v, log_decay))
    return dict(zip(("o", "z", "grad_q", "grad_k", "grad_v", "grad_log_decay"), (o, z[..., 0], *grads), strict=True))


def run(library, x, alone, schedule, sm_count):
    (b, h, n, d), (_, hk, m, dv) = x["q"].shape, x["v"].shape
    tensors = {name: x[name] for name in ("q", "k", "v", "key_padding_mask", "first_key")}
    if not alone:
        tensors["log_decay"] = x["log_decay"]

    def unwritten(*shape, dtype=BF16):
        return torch.full(shape, math.nan, dtype=dtype)

    numbers = dict(causal=1, scale=d**-0.5, schedule=schedule, sm_count=sm_count, resident=sm_count)
    tensors |= {"o": unwritten(b, h, n, dv), "z": unwritten(b, h, n, dtype=torch.float32)}
    assert library.run("linear", "forward", tensors, **numbers) == "linear2_sm90"
    grads = {"grad_q": unwritten(b, h, n, d), "grad_k": unwritten(b, hk, m, d), "grad_v": unwritten(b, hk, m, dv)}
    if not alone:
        grads["grad_log_decay"] = unwritten(b, hk, m, dtype=torch.float32)
    tensors |= grads | {"grad_o": x["grad_o"], "grad_z": x["grad_z"]}
    assert library.run("linear", "backward", tensors, **numbers) == "linear2_sm90"
    return {"o": tensors["o"], "z": tensors["z"], **grads}


def inputs(n, m=None, d=64, dv=None, b=1, h=1, hk=1, rate=0.01, first=None, mask=False):
    torch.manual_seed(0)
    m, dv = m or n, dv or d
    shapes = {"q": (b, h, n, d), "k": (b, hk, m, d), "v": (b, hk, m, dv), "grad_o": (b, h, n, dv)}
    x = {name: torch.randn(shape).to(BF16) for name, shape in shapes.items()}
    x["grad_z"] = torch.randn(b, h, n) / 30
    x["log_decay"] = -2 * rate * torch.rand(b, hk, m)
    x["first_key"] = first if first is None else first.to(torch.int32).expand(b, hk, n).contiguous()
    x["key_padding_mask"] = (torch.rand(b, m) < 0.7).to(torch.uint8) if mask else None
    return x


def starts(lengths):
    sizes = torch.tensor(lengths)
    return (sizes.cumsum(0) - sizes).repeat_interleave(sizes)


def check(library, label, x, alone=False, schedule=0, sm_count=2):
    begin = time.time()
    found = run(library, x, alone, schedule, sm_count)
    exact, plain = definition(x, torch.float64), definition(x, BF16)
    texts = []
    for name, result in found.items():
        y = exact[name].double()
        terms = {"grad_q": 0.1, "grad_k": 0.1, "grad_log_decay": 1e-3}.get(name, 0.0) * exact["grad_v"].norm()
        size, times = max(y.norm(), terms), 4 if name == "grad_log_decay" else 2
        allowed = times * max(((plain[name].double() - y).norm() / size).item(), 2**-8)
        error = ((result.double() - y).norm() / size).item()
        if not error <= allowed:
            FAILED.append((label, name))
        texts.append(f"{name} {error:.1e} of {allowed:.1e}")
    print(f"{time.time() - begin:5.1f} s  {label}, schedule {schedule}: " + ", ".join(texts), flush=True)


def check_all(library):
    def of_all_kinds(label, n, m=None, first=None, schedule=0, sm_count=2, **options):
        positions = torch.arange(n) + (m or n) - n
        if first is None:
            first = torch.where(torch.rand(n) < 0.02, positions, 0).cummax(0)[0]
        for rate, bounds, alone in ((0.01, None, False), (0.0, first, True), (0.01, first, False)):
            kind = "bounds alone" if alone else "decays" if bounds is None else "both"
            x = inputs(n, m, rate=rate, first=bounds, **options)
            check(library, f"{label} {n} {m or n}, {kind}", x, alone, schedule, sm_count)

    for n, m in ((1, 1), (17, 17), (64, 64), (65, 65), (257, 257), (300, 300), (1, 300), (63, 127), (100, 333)):
        of_all_kinds("sizes", n, m, h=2, hk=1, schedule=n % 5)
    of_all_kinds("mask", 300, b=2, h=4, hk=2, mask=True, schedule=3)
    of_all_kinds("narrow", 300, d=40, dv=24, schedule=1)
    of_all_kinds("segments", 1500, sm_count=16, schedule=3)
    for lengths in ([256, 256, 17], [17, 256, 256], [255, 2, 255, 1], [64, 64, 63, 1, 65, 255], [1] * 70 + [2] * 100):
        of_all_kinds("sequences", sum(lengths), first=starts(lengths), schedule=2)
    for bits in (60, 63, 65, 140):
        x = inputs(300, h=2, hk=1)
        x["log_decay"] = -bits / 63 * math.log(2) * (0.95 + 0.1 * torch.rand_like(x["log_decay"]))
        check(library, f"{bits} bits a tile", x, schedule=bits % 5)
    of_all_kinds("head dim 128", 65, d=128, h=2, schedule=1)
    of_all_kinds("head dim 128", 1025, d=128, schedule=0)


if __name__ == "__main__":
    check_all(emulator.build(Path(sys.argv[1]), "linear/order2"))
    print("failed:", FAILED)
