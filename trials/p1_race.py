"""Where gradients of order 1 on Hopper differ between repeats: `python trials/p1_race.py [seconds]`, on a GPU, with
a library whose linear1_sm90_covers says yes to gradients. One call of a suite on an H200 (1025 tokens, 12 heads on 3
of keys, batch 3) had other bits of grad_k, at head dims 64 and 128, in one of 23 processes that shared the device;
never grad_q or grad_v, nor another shape. p1_where.py imitates that suite, and looks into the workspace.

Each shape is repeated on poisoned memory, alone and beside processes that keep the device busy. What differs is
printed by batch entry, head, rows and columns, with its size: a row's scores (e in shared memory), a tile, everything
behind a segment (sums of columns, prefixes) or everything before a row (e in memory) look different there.
"""

import subprocess
import sys
import time
from collections import Counter

import torch
import torch.multiprocessing as mp

import fastmax
from fastmax import verify

# b, h, hk, n, d, prepared (grad_o that the copy engine cannot read: no `divides`)
SHAPES = [
    (3, 12, 3, 1025, 64, False), (3, 12, 3, 1025, 128, False), (3, 12, 3, 1025, 64, True), (3, 12, 3, 1025, 128, True),
    (1, 12, 3, 1025, 64, False), (3, 4, 1, 1025, 64, False), (3, 3, 3, 1025, 64, False), (3, 12, 3, 1024, 64, False),
    (3, 12, 3, 256, 64, False), (3, 12, 3, 512, 64, False), (3, 12, 3, 4097, 64, False), (2, 8, 2, 2048, 128, False),
]  # fmt: skip


def backward(q, k, v, g, poison=True):
    s = (0.02, 1.0, 1.0, 0.5, 1, True, 0.0, "linear", False)
    if poison:
        verify.poison_free_memory(q.device)
    o, z = torch.ops.fastmax.forward(q, k, v, None, *(None,) * 5, *s)
    if poison:
        verify.poison_free_memory(q.device)
    grads = torch.ops.fastmax.backward(g, None, q, k, v, o, z, None, *(None,) * 5, *s)[:3]
    return dict(zip(("o", "z", "grad_q", "grad_k", "grad_v"), (o, z, *grads), strict=True))


def spans(values):
    values = sorted(set(values))
    return f"{len(values)} in [{values[0]}, {values[-1]}]"


def repeat(shape, seconds, label):
    b, h, hk, n, d, prepared = shape
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v, g = (torch.randn(b, x, n, d, device="cuda", generator=generator).bfloat16() for x in (h, hk, hk, h))
    q, k = (torch.nn.functional.normalize(x, dim=-1) * 0.5 for x in (q, k))
    if prepared:
        g = g[:, :, :1].expand(g.shape)
    first, differ, count, shown, end = backward(q, k, v, g), Counter(), 0, 0, time.time() + seconds
    while time.time() < end:
        count += 1
        for name, x in backward(q, k, v, g, poison=count % 2 == 0).items():
            if torch.equal(x, first[name]):
                continue
            differ[name] += 1
            if shown < 4:
                shown += 1
                at = (x != first[name]).nonzero().tolist()
                change = (x.double() - first[name].double()).abs()
                columns = list(zip(*at, strict=True))
                print(
                    f"    {name}: {len(at)} numbers; "
                    + ", ".join(
                        f"{what} {spans(c)}" for what, c in zip(("batch", "head", "row", "column"), columns, strict=False)
                    )
                    + f"; largest change {change.max().item():.2e} of {first[name].double().abs().max().item():.2e}",
                    flush=True,
                )
    print(f"  {shape} {label}: {dict(differ) or 'the same'} of {count}", flush=True)


def load(stop):
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    while not stop.is_set():
        for _ in range(20):
            x @ x
        torch.cuda.synchronize()


if __name__ == "__main__":
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    print(fastmax.__file__, subprocess.getoutput("nvidia-smi --query-gpu=name --format=csv,noheader"))
    for shape in SHAPES:
        repeat(shape, seconds, "alone")
    context = mp.get_context("spawn")
    stop = context.Event()
    others = [context.Process(target=load, args=(stop,)) for _ in range(4)]
    for other in others:
        other.start()
    time.sleep(6)
    for shape in SHAPES:
        repeat(shape, 2 * seconds, "beside four others")
    stop.set()
    for other in others:
        other.join()
