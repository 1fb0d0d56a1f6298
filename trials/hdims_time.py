"""Times of the quadratic Hopper kernels at head dims 32 and 96, which have not run on a GPU yet.

    python trials/hdims_variants/build.py            # where nvcc is; needs no GPU
    python trials/hdims_time.py library variants rates

library   forward / forward + backward of the library beside the portable kernels (which take v expanded) and cuDNN. Predicted
          at
          (8, 64, 4096, 32): Fastmax 1.1 / 4.8 ms (portable 1.76 / 7.72, cuDNN 2.41 / 9.00; to reach: 1.3 / 5.2),
          flash_attention
          1.6 / 5.6; at (8, 16, 4096, 96) 0.7 / 3.0. If it is not below the portable kernels, take the head dim out of
          QuadraticSm90HeadDims (csrc/quadratic/quadratic_sm90.h): nothing else says which head dims there are.
variants  other tiles (hdims_variants/build.py says which, and what hangs on each), errors of the first head against float64
          first,
          then the times of each kernel. The winner's constants go into QuadraticFwdSm90Tile and QuadraticBwdSm90Tile.
rates     what `pair` of Rates in csrc/core/cost_model.h is fitted to: quadratic at n = 1024 and 4096 on Hopper's kernels over
          the
          portable ones, by head dim; and the linear algorithm at 32768. One constant serves all head dims now (0.61): if 32
          or 96 is off
          by more than a tenth, it becomes a number per head dim.
"""

import ctypes
import re
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastmax


def median(call, times=7):
    for _ in range(2):
        call()
    taken = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def random(*shape):
    return torch.randn(*shape, device="cuda").mul_(0.3).bfloat16()


def both(attention, variables, grad_o):
    def forward():
        with torch.no_grad():
            attention(*variables)

    return f"{median(forward):.3f} / {median(lambda: torch.autograd.grad(attention(*variables), variables, grad_o)):.3f}"


def of_library(b, h, n, d, softmax, cudnn=True):
    q, k, v, grad_o = (random(b, h, n, d) for _ in range(4))

    def attention(q, k, v):
        if softmax:
            return fastmax.flash_attention(q, k, v, causal=True)
        return fastmax.fastmax_attention(q, k, v, causal=True, algorithm="quadratic")

    leaves = [x.requires_grad_() for x in (q, k, v)]
    expanded = [q, k, v.detach()[:, :1].expand(v.shape).requires_grad_()]  # not for tensor maps
    text = f"{both(attention, leaves, grad_o)}   portable {both(attention, expanded, grad_o)}"
    if cudnn:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            text += f"   cuDNN {both(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), leaves, grad_o)}"
    print(f"{'flash' if softmax else 'quadratic':9} {(b, h, n, d)}: {text}", flush=True)


def exact(q, k, v, grad_o, scale):
    """Of a head, in float64: o and gradients."""
    q, k, v, grad_o = (x.double() for x in (q, k, v, grad_o))
    s = q @ k.T * scale
    f = torch.tril(1 + s + s * s / 2)
    z = f.sum(-1, keepdim=True)
    p = f / z
    o = p @ v
    ds = torch.tril((1 + s) / z * (grad_o @ v.T - (grad_o * o).sum(-1, keepdim=True))) * scale
    return {"o": o, "grad_q": ds @ k, "grad_k": ds.T @ q, "grad_v": p.T @ grad_o}


def kernel_of(name):
    if found := re.search(r"bwd_sm90.*(true|false|1|0)>", name):
        return "grad_k grad_v" if found[1] in ("true", "1") else "grad_q"
    found = re.search(r"quadratic_fwd_sm90|row_score", name)
    return found[0] if found else None


def of_variants(d):
    b, h, n = 8, 2048 // d, 4096
    q, k, v, grad_o = (random(b, h, n, d) for _ in range(4))
    results = {name: torch.empty_like(q) for name in ("o", "grad_q", "grad_k", "grad_v")}
    z = torch.empty(b, h, n, device="cuda")
    scale = d**-0.5
    expected = exact(q[0, 0], k[0, 0], v[0, 0], grad_o[0, 0], scale)
    for path in sorted((Path(__file__).parent / "hdims_variants").glob("*.bin")):
        own = re.fullmatch(r"(?:base|slope|pipe)(\d+)", path.stem)
        if d != int(own[1] if own else 32) and (path.stem, d) != ("base128", 96):
            continue
        library = ctypes.CDLL(str(path))
        library.bwd_bytes.restype = ctypes.c_int64
        workspace = torch.empty(library.bwd_bytes(b, h, n, d), device="cuda", dtype=torch.uint8)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        numbers = [ctypes.c_int(x) for x in (b, h, h, n, n, d)] + [ctypes.c_float(scale), ctypes.c_int(1), stream]

        def forward():
            tensors = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, results["o"], z)]
            assert library.fwd(*tensors, *numbers) == 0  # noqa: B023

        def backward():
            gradients = [results[name] for name in ("grad_q", "grad_k", "grad_v")]
            tensors = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, results["o"], grad_o, z, *gradients, workspace)]  # noqa: B023
            assert library.bwd(*tensors, *numbers) == 0  # noqa: B023

        for x in results.values():
            x.fill_(float("nan"))
        forward()
        backward()
        torch.cuda.synchronize()
        errors = {name: ((results[name][0, 0].double() - x).norm() / x.norm()).item() for name, x in expected.items()}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(3):
                forward()
                backward()
            torch.cuda.synchronize()
        parts = sorted((kernel_of(e.key), e.device_time_total / 3e3) for e in profile.key_averages() if kernel_of(e.key))
        print(
            f"d {d} {path.stem:9} errors {' '.join(f'{x:.1e}' for x in errors.values())}  forward {median(forward):.3f}  "
            f"backward {median(backward):.3f}  {'  '.join(f'{name} {ms:.3f}' for name, ms in parts)}",
            flush=True,
        )


def of_rates():
    for d, h in ((32, 64), (64, 64), (96, 32), (128, 16)):
        for n, b in ((1024, 16), (4096, 4)):
            of_library(b, h, n, d, False, cudnn=False)
    for d, h in ((32, 64), (96, 16)):
        q, k, v, grad_o = (random(1, h, 32768, d) for _ in range(4))

        def attention(q, k, v):
            return fastmax.fastmax_attention(q, k, v, causal=True, algorithm="linear")

        print(f"linear (1, {h}, 32768, {d}): {both(attention, [x.requires_grad_() for x in (q, k, v)], grad_o)}", flush=True)


if __name__ == "__main__":
    if "library" in sys.argv:
        for softmax in (False, True):
            of_library(8, 64, 4096, 32, softmax)
            of_library(8, 16, 4096, 96, softmax)
        of_library(32, 64, 1024, 32, False)
        of_library(8, 16, 4096, 80, False)
    if "variants" in sys.argv:
        for d in (32, 64, 96, 128):
            of_variants(d)
    if "rates" in sys.argv:
        of_rates()
