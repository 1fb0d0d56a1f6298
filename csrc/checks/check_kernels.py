"""Checks and times the compiled CUDA kernels without the Python package.

    python csrc/checks/check_kernels.py LIBRARY [--check] [--sanitize] [--time bf16,fp16,...] [--crossover bf16,...] [--algorithms quadratic,linear] [--quick]

Every case compares output, z and the three gradients with float64 by relative Frobenius error, against twice the error of plain
PyTorch in the same dtype (plus a floor), on outputs poisoned with NaN, and runs twice for bitwise equality.
"""

import argparse
import itertools
import statistics
import sys
from dataclasses import dataclass

import torch

SCHEMAS = (
    "forward(Tensor q, Tensor k, Tensor v, Tensor? key_padding_mask, Tensor? drop_noise, Tensor? rpe_matrix, float scale, "
    "float a0, float a1, float a2, int p, bool causal, float dropout, str algorithm) -> (Tensor, Tensor)",
    "backward(Tensor grad_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor z, Tensor? key_padding_mask, Tensor? drop_noise, "
    "Tensor? rpe_matrix, float scale, float a0, float a1, float a2, int p, bool causal, float dropout, str algorithm) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
FLOOR = {"bf16": 2e-5, "fp16": 5e-6, "tf32": 5e-6, "fp32": 1e-6}
DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    what: str  # the code path that this size covers
    b: int = 2
    h: int = 2
    hk: int = 2
    n: int = 128
    m: int = 128
    d: int = 64
    dv: int = 64
    causal: bool = True
    p: int = 2
    mask: bool = False
    noise: bool = False
    layout: str = "contiguous"  # token_major: a transposed (b, n, h, d); packed: slices of one (b, n, 3, h, d); odd: unaligned
    magnitude: float = 1.0
    coefficients: tuple = (1.0, 1.0, 0.5)
    scale: float | None = None


def cases(quick):
    dims = [16, 32, 64, 96, 128]
    out = [Case(f"head dim {d}", n=200, m=200, d=d, dv=d, causal=c) for d in dims for c in (True, False)]
    out += [
        Case(f"head dim {d}, all options", n=150, m=333, d=d, dv=d, h=4, mask=True, noise=True, layout="packed_gqa")
        for d in dims
    ]
    lengths = [1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1000]
    out += [Case(f"length {n}", n=n, m=n) for n in lengths]
    out += [
        Case(f"n {n} m {m}", n=n, m=m, causal=c)
        for n, m in [(1, 300), (17, 64), (64, 129), (300, 301), (129, 1000)]
        for c in (True, False)
    ]
    out += [Case(f"n {n} m {m}", n=n, m=m, causal=False) for n, m in [(300, 1), (300, 17), (129, 65), (1000, 130)]]
    out += [
        Case("one head", b=1, h=1, hk=1, n=700, m=700),
        Case("GQA 4:1", h=8, hk=2, n=300, m=300),
        Case("MQA", h=6, hk=1, n=130, m=190, d=32, dv=32),
        Case("padding mask", n=300, m=300, mask=True),
        Case("padding mask, not causal", n=300, m=200, mask=True, causal=False),
        Case("noise", n=300, m=300, noise=True),
        Case("p = 1", n=300, m=300, p=1, scale=0.02),
        Case("p = 1, not causal, all options", n=300, m=400, p=1, causal=False, mask=True, noise=True, scale=0.02),
        Case("other coefficients", n=300, m=300, coefficients=(0.7, -0.3, 1.1)),
        Case("no constant", n=300, m=300, coefficients=(1e-3, 0.0, 1.0)),
        Case("token-major", n=300, m=300, layout="token_major", h=4, hk=4),
        Case("packed qkv", n=300, m=300, layout="packed", h=4, hk=4),
        Case("unaligned view", n=150, m=150, layout="odd"),
        Case("ragged head dim", n=150, m=150, d=40, dv=24),
        Case("odd head dim", n=150, m=150, d=37, dv=51, noise=True),
        Case("dv > d", n=150, m=150, d=16, dv=128),
        Case("large scores", n=300, m=300, magnitude=30.0, scale=1.0),
        Case("long", b=1, h=2, hk=1, n=4096, m=4096),
    ]
    return out[:12] if quick else out


def make_inputs(case, dtype, generator):
    def randn(*shape):
        return (torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32) * case.magnitude).to(dtype)

    b, h, hk, n, m, d, dv = case.b, case.h, case.hk, case.n, case.m, case.d, case.dv
    if case.layout == "token_major":
        q, k, v = (randn(b, x, y, z).transpose(1, 2) for x, y, z in ((n, h, d), (m, hk, d), (m, hk, dv)))
    elif case.layout == "packed":
        q, k, v = randn(b, n, 3, h, d).permute(2, 0, 3, 1, 4)
    elif case.layout == "packed_gqa":
        q = randn(b, n, h, d).transpose(1, 2)
        k, v = randn(b, m, 2, hk, d).permute(2, 0, 3, 1, 4)
    elif case.layout == "odd":
        q, k, v = randn(b, h, n, d + 1)[..., 1:], randn(b, hk, m, d + 3)[..., 2:-1], randn(b, hk, m + 1, dv)[:, :, 1:]
    else:
        q, k, v = randn(b, h, n, d), randn(b, hk, m, d), randn(b, hk, m, dv)
    grad_o = (torch.randn(b, h, n, dv, generator=generator, device="cuda")).to(dtype)
    mask = None
    if case.mask:
        mask = torch.rand(b, m, generator=generator, device="cuda") < 0.7
        mask[0, : m // 3] = False  # the first queries see no key
    noise = torch.randn(b, h, n, dv, generator=generator, device="cuda").to(dtype) if case.noise else None
    return q, k, v, grad_o, mask, noise


def scale_of(case):
    return case.scale if case.scale is not None else case.d**-0.5


def plain(case, q, k, v, grad_o, mask, noise):
    """The definition with PyTorch operators in the dtype of q, and autograd's gradients."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    group = case.h // case.hk
    a0, a1, a2 = case.coefficients
    s = (q @ k.repeat_interleave(group, 1).transpose(-1, -2)) * scale_of(case)
    f = a0 + a1 * s + (a2 * s * s if case.p == 2 else 0)
    visible = torch.ones(case.n, case.m, dtype=torch.bool, device="cuda")
    if case.causal:
        visible = visible.tril(case.m - case.n)
    visible = visible[None, None] if mask is None else visible[None, None] & mask[:, None, None, :]
    w = torch.where(visible, f, 0)
    z = w.sum(-1, keepdim=True)
    o = torch.where(z == 0, 0, (w @ v.repeat_interleave(group, 1)) / torch.where(z == 0, 1, z))
    if noise is not None:
        o = o * (1 + 0.3 * noise)
    o.backward(grad_o)
    return o.detach(), z.detach().squeeze(-1), q.grad, k.grad, v.grad


def poison(shapes_and_dtypes):
    blocks = [torch.full((max(1, s),), float("nan"), device="cuda", dtype=t) for s, t in shapes_and_dtypes for _ in range(2)]
    del blocks


def run_ours(case, q, k, v, grad_o, mask, noise, algorithm):
    a0, a1, a2 = case.coefficients
    args = (mask, noise, None, scale_of(case), a0, a1, a2, case.p, case.causal, 0.3 if noise is not None else 0.0, algorithm)
    rows = case.b * case.h * case.n
    poison([(rows * case.dv, q.dtype), (rows, torch.float32)])
    o, z = torch.ops.fastmax.forward(q, k, v, *args)
    poison([(q.numel(), q.dtype), (k.numel(), q.dtype), (v.numel(), q.dtype), (rows * 4, torch.float32)])
    gq, gk, gv, grpe = torch.ops.fastmax.backward(grad_o, q, k, v, o, z, *args)
    assert grpe.shape == (0,)
    return o, z, gq, gk, gv


def relative(x, reference, floor):
    """Relative Frobenius error. floor: the size of the terms that cancel where the reference itself is zero."""
    norm = max(reference.double().norm().item(), floor)
    return (x.double() - reference.double()).norm().item() / norm


def check(algorithms, quick):
    failures, total, worst = [], 0, {}
    generator = torch.Generator("cuda").manual_seed(1234)
    for mode, case in itertools.product(DTYPE, cases(quick)):
        torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
        dtype = DTYPE[mode]
        inputs = make_inputs(case, dtype, generator)
        double = [x.double() if x is not None and x.is_floating_point() else x for x in inputs]
        reference = plain(case, *double)
        same = plain(case, *inputs)
        for algorithm in algorithms:
            total += 1
            name = algorithm + (":tf32" if mode == "tf32" else "")
            try:
                ours = run_ours(case, *inputs, name)
                again = run_ours(case, *inputs, name)
            except RuntimeError as error:
                failures.append(f"{mode} {algorithm} {case}: {str(error).splitlines()[0]}")
                if "CUDA error" in str(error) or "illegal" in str(error):
                    return failures, total, worst
                continue
            for label, x, y, r, s in zip(("o", "z", "dq", "dk", "dv"), ours, again, reference, same):
                bad = []
                # Inputs and outputs are rounded to the dtype at least once: plain PyTorch may have overflowed or got lucky.
                rounding = {"bf16": 4e-3, "fp16": 5e-4, "tf32": 1.2e-3, "fp32": 1e-6}[mode]
                floor = inputs[3].norm().item() if label in ("dq", "dk") and min(case.n, case.m) == 1 else 1e-30
                plain_error = relative(s, r, floor)
                limit = 2 * (plain_error if plain_error == plain_error else rounding) + FLOOR[mode]
                limit = max(limit, rounding)
                error = relative(x, r, floor)
                if tuple(x.shape) != tuple(r.shape):
                    bad.append(f"shape {tuple(x.shape)}")
                if not error <= limit:
                    bad.append(f"error {error:.2e} > {limit:.2e} (plain {plain_error:.2e})")
                if not torch.equal(x, y):
                    bad.append("not bitwise repeatable")
                key = (mode, algorithm, label)
                if error > worst.get(key, (0.0, ""))[0]:
                    worst[key] = (error, case.what)
                if bad:
                    failures.append(f"{mode} {algorithm} {label} [{case.what}]: " + "; ".join(bad))
            for x, like in ((ours[0], inputs[0]), (ours[2], inputs[0]), (ours[3], inputs[1]), (ours[4], inputs[2])):
                if (x.stride(1) < x.stride(2)) != (like.stride(1) < like.stride(2)) and x.size(1) > 1 and x.size(2) > 1:
                    failures.append(f"{mode} {algorithm} [{case.what}]: layout {x.stride()} for {like.stride()}")
    return failures, total, worst


def check_runtime(algorithms):
    """Streams, CUDA graphs, empty inputs, errors, and lengths that no O(n^2) reference reaches."""
    failures = []
    for algorithm in algorithms:
        generator = torch.Generator("cuda").manual_seed(5)
        case = Case("runtime", n=300, m=300)
        inputs = make_inputs(case, torch.bfloat16, generator)
        expected = run_ours(case, *inputs, algorithm)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            on_side = run_ours(case, *inputs, algorithm)
        torch.cuda.current_stream().wait_stream(side)
        if not all(torch.equal(x, y) for x, y in zip(expected, on_side)):
            failures.append(f"{algorithm}: another result on a side stream")

        q, k, v, grad_o, *_ = inputs
        args = (None, None, None, scale_of(case), *case.coefficients, 2, True, 0.0, algorithm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, z = torch.ops.fastmax.forward(q, k, v, *args)
            captured = (o, z, *torch.ops.fastmax.backward(grad_o, q, k, v, o, z, *args)[:3])
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        if not all(torch.equal(x, y) for x, y in zip(expected, captured)):
            failures.append(f"{algorithm}: another result from a CUDA graph")

        for shape in ((0, 2, 5, 64), (2, 2, 0, 64)):
            empty = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
            o, z = torch.ops.fastmax.forward(empty, empty, empty, *args)
            grads = torch.ops.fastmax.backward(o, empty, empty, empty, o, z, *args)
            if o.shape != empty.shape or any(x.shape != empty.shape for x in grads[:3]):
                failures.append(f"{algorithm}: wrong shape for empty input {shape}")
    for bad, message in (((torch.float64, 64), "float"), ((torch.bfloat16, 300), "head dim")):
        x = torch.randn(1, 1, 4, bad[1], device="cuda", dtype=bad[0])
        try:
            torch.ops.fastmax.forward(x, x, x, None, None, None, 1.0, 1.0, 1.0, 0.5, 2, True, 0.0, "quadratic")
            failures.append(f"no error for {bad}")
        except RuntimeError as error:
            if message not in str(error):
                failures.append(f"unclear error for {bad}: {str(error).splitlines()[0]}")
    if {"quadratic", "linear"} <= set(algorithms):
        for mode, n in (("bf16", 100003), ("fp32", 20011)):
            case = Case("agreement", b=1, h=2, hk=1, n=n, m=n)
            inputs = make_inputs(case, DTYPE[mode], torch.Generator("cuda").manual_seed(6))
            both = [run_ours(case, *inputs, algorithm) for algorithm in ("quadratic", "linear")]
            for label, x, y in zip(("o", "z", "dq", "dk", "dv"), *both):
                error = relative(x, y, 1e-30)
                print(f"quadratic against linear, {mode}, n = {n}, {label}: {error:.2e}")
                if not error < {"bf16": 1.5e-2, "fp32": 5e-5}[mode]:
                    failures.append(f"quadratic and linear differ at n = {n}: {label} {error:.2e}")
    return failures


def sanitize(algorithms):
    """Small launches of every kernel, for compute-sanitizer."""
    generator = torch.Generator("cuda").manual_seed(1)
    lengths = ((1, 1), (17, 17), (150, 150), (129, 200))
    for mode, algorithm, d, (n, m) in itertools.product(DTYPE, algorithms, (16, 32, 64, 96, 128), lengths):
        odd = n == 150
        case = Case("sanitize", b=1, h=2, hk=1, n=n, m=m, d=d - odd, dv=d - odd, mask=odd, noise=odd, causal=n != 129)
        run_ours(case, *make_inputs(case, DTYPE[mode], generator), algorithm + (":tf32" if mode == "tf32" else ""))
    torch.cuda.synchronize()
    print("sanitize: done")


def median_ms(function, repeats=11):
    for _ in range(3):
        function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        start.record()
        function()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


TIMED = [(8, 32, 4096, 64, 2), (8, 16, 4096, 128, 2), (8, 64, 4096, 32, 2)]


def kernel_times(function):
    """Milliseconds per kernel name, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            function()
        torch.cuda.synchronize()
    return {e.key: e.self_device_time_total / 3e3 for e in trace.key_averages() if e.self_device_time_total > 0}


def time_all(algorithms, modes, profile_kernels):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    rows = []
    for mode, (b, h, n, d, p) in itertools.product(modes, TIMED):
        dtype = DTYPE[mode]
        q, k, v, grad_o = (torch.randn(b, h, n, d, device="cuda", dtype=dtype) for _ in range(4))
        flop = 2.0 * b * h * n * n * d  # causal forward
        if mode in ("bf16", "fp16"):
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                x, y, w = (t.clone().requires_grad_() for t in (q, k, v))
                with sdpa_kernel(backend):
                    fwd = median_ms(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))

                    def both():
                        scaled_dot_product_attention(x, y, w, is_causal=True).backward(grad_o)
                        x.grad = y.grad = w.grad = None

                    rows.append((mode, (b, h, n, d, p), backend.name.lower(), fwd, median_ms(both), flop))
        for algorithm in algorithms:
            name = algorithm + (":tf32" if mode == "tf32" else "")
            args = (None, None, None, d**-0.5, 1.0, 1.0, 0.5, p, True, 0.0, name)
            fwd = median_ms(lambda: torch.ops.fastmax.forward(q, k, v, *args))

            def both():
                o, z = torch.ops.fastmax.forward(q, k, v, *args)
                torch.ops.fastmax.backward(grad_o, q, k, v, o, z, *args)

            rows.append((mode, (b, h, n, d, p), algorithm, fwd, median_ms(both), flop))
            if profile_kernels:
                for kernel, ms in kernel_times(both).items():
                    print(f"  {mode} {(b, h, n, d, p)} {kernel[:90]}: {ms:.3f} ms")
    print(f"{'mode':5} {'b, h, n, d, p':24} {'provider':18} {'fwd ms':>8} {'TFLOP/s':>8} {'fwd+bwd':>8} {'TFLOP/s':>8}")
    for mode, shape, provider, fwd, both, flop in rows:
        print(
            f"{mode:5} {str(shape):24} {provider:18} {fwd:8.3f} {flop / fwd / 1e9:8.0f} {both:8.3f} {3.5 * flop / both / 1e9:8.0f}"
        )


def crossover(modes):
    """Both algorithms side by side, for the cost model: forward and forward + backward in ms."""
    print(
        f"{'mode':5} {'p':>2} {'d':>4} {'n':>6} {'quadratic fwd':>14} {'linear fwd':>11} {'quadratic both':>15} {'linear both':>12}"
    )
    for mode, p, d, n in itertools.product(modes, (2, 1), (32, 64, 128), (512, 1024, 2048, 4096, 8192, 16384)):
        b, h = max(1, 65536 // n), 8
        q, k, v, grad_o = (torch.randn(b, h, n, d, device="cuda", dtype=DTYPE[mode]) for _ in range(4))
        row = []
        for algorithm in ("quadratic", "linear"):
            args = (None, None, None, d**-0.5, 1.0, 1.0, 0.5, p, True, 0.0, algorithm + (":tf32" if mode == "tf32" else ""))

            def both():
                o, z = torch.ops.fastmax.forward(q, k, v, *args)
                torch.ops.fastmax.backward(grad_o, q, k, v, o, z, *args)

            row.append((median_ms(lambda: torch.ops.fastmax.forward(q, k, v, *args), 5), median_ms(both, 5)))
        print(f"{mode:5} {p:2} {d:4} {n:6} {row[0][0]:14.3f} {row[1][0]:11.3f} {row[0][1]:15.3f} {row[1][1]:12.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--time", default="")
    parser.add_argument("--crossover", default="")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--algorithms", default="quadratic")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    library = torch.library.Library("fastmax", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    torch.ops.load_library(args.library)
    algorithms = args.algorithms.split(",")
    failed = False
    if args.check:
        failures, total, worst = check(algorithms, args.quick)
        failed = bool(failures)
        for (mode, algorithm, label), (error, what) in worst.items():
            print(f"worst {mode} {algorithm} {label}: {error:.2e} [{what}]")
        for line in failures[:60]:
            print("FAIL", line)
        print(f"{total} configurations, {len(failures)} failures")
        runtime_failures = check_runtime(algorithms)
        failed = failed or bool(runtime_failures)
        for line in runtime_failures:
            print("FAIL", line)
        print(f"runtime checks: {len(runtime_failures)} failures")
    if args.sanitize:
        sanitize(algorithms)
    if args.time:
        time_all(algorithms, args.time.split(","), args.profile)
    if args.crossover:
        crossover(args.crossover.split(","))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
