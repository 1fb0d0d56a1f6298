"""Checks and times the linear algorithm's CUDA kernels: check_kernels.py's method on sizes that span several chunks.

python csrc/checks/check_linear.py LIBRARY [--check] [--time MODES] [--profile]
"""

import argparse
import itertools
import sys

import check_kernels as common
import torch
from check_kernels import Case

# Chunk lengths for order 2: 256, 512, 1024, 2048 at head dims 32, 64, 96, 128; 256 for order 1. Few heads sum parts and
# scan them, many walk once.
MANY = {32: 50, 64: 26, 96: 5, 128: 3}
SEVERAL = {16: 700, 32: 700, 64: 1300, 96: 2500, 128: 4500}


def cases(quick):
    out = []
    for d, n in SEVERAL.items():
        out.append(Case(f"parts, head dim {d}", b=1, n=n, m=n, d=d, dv=d))
        out.append(Case(f"parts, head dim {d}, not causal", b=1, n=300, m=n, d=d, dv=d, causal=False))
        if d in MANY:
            out.append(Case(f"one walk, head dim {d}", b=1, h=MANY[d], hk=MANY[d], n=n, m=n, d=d, dv=d))
    if quick:
        return out
    for d, n in SEVERAL.items():
        out.append(
            Case(
                f"all options, head dim {d}",
                b=2,
                h=4,
                hk=2,
                n=n - 77,
                m=n,
                d=d,
                dv=d,
                mask=True,
                noise=True,
                layout="packed_gqa",
            )
        )
        out.append(
            Case(f"order 1, head dim {d}", b=2, h=4, hk=2, n=900, m=937, d=d, dv=d, p=1, mask=True, noise=True, scale=0.02)
        )
        out.append(Case(f"order 1, head dim {d}, not causal", b=1, n=900, m=637, d=d, dv=d, p=1, causal=False, scale=0.02))
    for n in (255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 1537):
        out.append(Case(f"length {n}", b=1, n=n, m=n, hk=1))
    out += [
        Case("one walk, GQA, offset", b=2, h=28, hk=14, n=1100, m=1201, mask=True, noise=True),
        Case("one walk, not causal", b=1, h=26, hk=26, n=200, m=1201, causal=False),
        Case("one query, many keys", b=1, n=1, m=3000),
        Case("far offset", b=1, n=70, m=3000),
        Case("many heads, one query", b=2, h=32, hk=16, n=1, m=1500),
        Case("other coefficients", b=1, n=1300, m=1300, coefficients=(0.7, -0.3, 1.1)),
        Case("token-major", n=1200, m=1200, layout="token_major", h=4, hk=4),
        Case("ragged head dim", b=1, n=1200, m=1200, d=40, dv=24),
        Case("odd head dim", b=1, n=1200, m=1200, d=37, dv=51, noise=True),
        Case("dv > d", b=1, n=2200, m=2200, d=16, dv=96),
        Case("large scores", b=1, n=1300, m=1300, magnitude=30.0, scale=1.0),
        Case("long", b=1, h=1, hk=1, n=9000, m=9000, d=32, dv=32),
    ]
    return out


TIMED = [
    (1, 32, 65536, 64, 2),
    (2, 32, 16384, 64, 2),
    (1, 16, 65536, 128, 2),
    (1, 64, 65536, 32, 2),
    (2, 32, 16384, 64, 1),
    (1, 16, 65536, 128, 1),
    (8, 32, 4096, 64, 2),
]


def time_linear(modes, profile):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    lines = []
    for mode, (b, h, n, d, p) in itertools.product(modes, TIMED):
        q, k, v, grad_o = (torch.randn(b, h, n, d, device="cuda", dtype=common.DTYPE[mode]) for _ in range(4))
        args = (None, None, None, d**-0.5, 1.0, 1.0, 0.5, p, True, 0.0, "linear" + (":tf32" if mode == "tf32" else ""))
        fwd = common.median_ms(lambda: torch.ops.fastmax.forward(q, k, v, *args), 7)

        def both():
            o, z = torch.ops.fastmax.forward(q, k, v, *args)
            torch.ops.fastmax.backward(grad_o, q, k, v, o, z, *args)

        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        total = common.median_ms(both, 7)
        memory = (torch.cuda.max_memory_allocated() - base + 4 * q.nbytes) / 2**20
        peer = [float("nan")] * 3
        if mode == "bf16":
            x, y, w = (t.clone().requires_grad_() for t in (q, k, v))

            def peer_both():
                scaled_dot_product_attention(x, y, w, is_causal=True).backward(grad_o)
                x.grad = y.grad = w.grad = None

            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                peer[0] = common.median_ms(lambda: scaled_dot_product_attention(q, k, v, is_causal=True), 3)
                torch.cuda.reset_peak_memory_stats()
                base = torch.cuda.memory_allocated() - 3 * q.nbytes
                peer[1] = common.median_ms(peer_both, 3)
                peer[2] = (torch.cuda.max_memory_allocated() - base + q.nbytes) / 2**20
            del x, y, w
        lines.append(
            f"{mode:5} {str((b, h, n, d, p)):24} {fwd:8.3f} {total:8.3f} {memory:8.0f} MB | cudnn {peer[0]:8.3f} {peer[1]:8.3f} {peer[2]:8.0f} MB"
        )
        if profile:
            for kernel, ms in common.kernel_times(both).items():
                name = kernel.split("::")[-1] if "fastmax" in kernel else kernel
                lines.append(f"      {name[:70]}: {ms:.3f}")
        del q, k, v, grad_o
        torch.cuda.empty_cache()
    print("mode  b, h, n, d, p             fwd ms  fwd+bwd  peak")
    print("\n".join(lines))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--modes", default="bf16,fp16,tf32,fp32")
    parser.add_argument("--time", default="")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--large", action="store_true")
    args = parser.parse_args()
    library = torch.library.Library("fastmax", "DEF")
    for schema in common.SCHEMAS:
        library.define(schema)
    torch.ops.load_library(args.library)
    failed = False
    if args.check:
        common.cases = cases
        common.DTYPE = {mode: common.DTYPE[mode] for mode in args.modes.split(",")}
        failures, total, worst = common.check(["linear"], args.quick)
        failed = bool(failures)
        for (mode, _, label), (error, what) in worst.items():
            print(f"worst {mode} {label}: {error:.2e} [{what}]")
        for line in failures[:80]:
            print("FAIL", line[:260])
        print(f"{total} configurations, {len(failures)} failures")
    if args.time:
        time_linear(args.time.split(","), args.profile)
    if args.large:
        q, k, v = (torch.randn(64, 16, 10000, 64, device="cuda") for _ in range(3))
        forward = (None, None, None, 0.125, 1.0, 1.0, 0.5, 2, True, 0.0, "linear:tf32")
        print(
            f"tf32 forward (64, 16, 10000, 64): {common.median_ms(lambda: torch.ops.fastmax.forward(q, k, v, *forward), 3):.1f} ms"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
