"""Times of the backward in one kernel of five products against the two kernels of seven, and cuDNN, in one run.

    SWEEP=1 KINDS=fastmax timeout 60 python trials/five_time.py
    SHAPES=8.16.16.4096.128,8.32.32.4096.64 KINDS=flash timeout 60 python trials/five_time.py

SHAPES: batch.heads.key/value heads.tokens.head dim. A column is backward / forward + backward in ms, medians; the first
shape also not causal, and by kernel. SWEEP=1: backward by heads that are worked on together (FASTMAX_FIVE=4, 8 ...; 1
takes 16): few heads keep more in L2, many let blocks of keys wait less for each other.

Predicted (docs/cuda.md): (8,16,4096,128) 2.3 to 2.6 ms backward where the two kernels take 2.99; (8,32,4096,64) 2.5 to
2.8, not 3.4. Decision: where five products gain 5% of forward + backward at 4096 tokens, and lose nothing at 1024 and
16384, they become the way for that head dim and score (no environment variable; workspace by the table row; not below
some hundred queries, where whole tiles of fp32 are more memory than the tensors); else they go, and docs/cuda.md keeps
what was predicted, measured and why.
"""

import os
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastmax

SHAPES = (
    "8.16.16.4096.128,32.16.16.1024.128,2.16.16.16384.128,8.16.4.4096.128,8.32.32.4096.64,32.32.32.1024.64,2.32.32.16384.64"
)


def median(call, times=9):
    for _ in range(3):
        call()
    out = []
    for _ in range(times):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        call()
        b.record()
        torch.cuda.synchronize()
        out.append(a.elapsed_time(b))
    return statistics.median(out)


def run(b, h, hk, n, d, causal, softmax):
    q, k, v, g = (torch.randn(b, hh, n, d, device="cuda").mul_(0.3).bfloat16() for hh in (h, hk, hk, h))
    x = [t.requires_grad_() for t in (q, k, v)]
    attention = (
        (lambda: fastmax.flash_attention(*x, causal=causal))
        if softmax
        else (lambda: fastmax.fastmax_attention(*x, causal=causal, algorithm="quadratic"))
    )
    row = []
    for way in ("0", "1", "0", "1"):
        os.environ["FASTMAX_FIVE"] = way
        both = median(lambda: torch.autograd.grad(attention(), x, g))
        o = attention()
        back = median(lambda: torch.autograd.grad(o, x, g, retain_graph=True))
        row.append(f"{back:.3f}/{both:.3f}")
    if SWEEP:
        for way in ("4", "8", "12", "32", "64"):
            os.environ["FASTMAX_FIVE"] = way
            o = attention()
            row.append(f"{way}h {median(lambda: torch.autograd.grad(o, x, g, retain_graph=True)):.3f}")
    cudnn = ""
    if h == hk:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            sd = lambda: F.scaled_dot_product_attention(*x, is_causal=causal)
            both = median(lambda: torch.autograd.grad(sd(), x, g))
            o = sd()
            back = median(lambda: torch.autograd.grad(o, x, g, retain_graph=True))
            cudnn = f"{back:.3f}/{both:.3f}"
    what = f"{'flash' if softmax else 'fastmax':8} {(b, h, hk, n, d)} {'causal' if causal else 'full':6}"
    print(what, "seven, five, seven, five:", "  ".join(row), " cuDNN", cudnn, flush=True)


def kernels(b, h, n, d, softmax):
    q, k, v, g = (torch.randn(b, h, n, d, device="cuda").mul_(0.3).bfloat16() for _ in range(4))
    x = [t.requires_grad_() for t in (q, k, v)]
    for way in ("0", "1"):
        os.environ["FASTMAX_FIVE"] = way
        o = (
            fastmax.flash_attention(*x, causal=True)
            if softmax
            else fastmax.fastmax_attention(*x, causal=True, algorithm="quadratic")
        )
        for _ in range(3):
            torch.autograd.grad(o, x, g, retain_graph=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            for _ in range(5):
                torch.autograd.grad(o, x, g, retain_graph=True)
            torch.cuda.synchronize()
        for e in sorted(prof.key_averages(), key=lambda e: -e.device_time_total):
            print(f"   way {way} {e.device_time_total / 5 / 1e3:8.4f} ms  {e.key[:110]}", flush=True)


SWEEP = os.environ.get("SWEEP", "0") == "1"
softmaxes = [x == "flash" for x in os.environ.get("KINDS", "fastmax").split(",")]
for softmax in softmaxes:
    for shape in os.environ.get("SHAPES", SHAPES).split(","):
        run(*map(int, shape.split(".")), True, softmax)
    b, h, hk, n, d = map(int, os.environ.get("SHAPES", SHAPES).split(",")[0].split("."))
    run(b, h, hk, n, d, False, softmax)
    kernels(b, h, n, d, softmax)
