"""Order 1 on Hopper: variants of its kernels (p1_variants/build.py) by groups, checked against the portable kernels and timed.

    python trials/p1_variants.py FOLDER [names]      # FOLDER with NAME.bin; 30 s on a GPU, alone; the library built for sm_90

Times: of a forward and of a forward + backward, 20 of each queued behind each other; and of each kernel, by the profiler,
likewise.
group: blocks that share a segment; 1 makes twice the segments, and sums over them, in place of reading y and w twice.
ERROR behind a line: results differ from the portable kernels' (the last three variants leave parts out, and are not checked).
"""

import ctypes
import re
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import fastmax  # noqa: F401 (registers the operators)

FOLDER = Path(sys.argv[1])
CHECKED = ["base", "columns", "scores_first", "x_thread", "sums2"]
NAMES = sys.argv[2:] or [*CHECKED, "no_columns", "no_state", "loads"]
SHAPES = [(1, 16, 65536, 128), (2, 32, 16384, 64), (1, 12, 131072, 64), (4, 32, 4096, 128)]
QUEUED = 20


class Variant:
    def __init__(self, name):
        self.name = name
        self.library = ctypes.CDLL(str(FOLDER / f"{name}.bin"))
        self.library.workspace_bytes.restype = ctypes.c_int64
        self.group = ctypes.c_int.in_dll(self.library, "trial_group")

    def call(self, function, tensors, shape):
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if getattr(self.library, function)(*pointers, *shape, stream):
            raise RuntimeError(f"{self.name}: {function} failed")


def queued(f):
    f()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(2_000_000)  # until the calls are queued
    begin.record()
    for _ in range(QUEUED):
        f()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / QUEUED


def kernels(f):
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(QUEUED // 2):
            f()
        torch.cuda.synchronize()
    times = {}
    for event in p.key_averages():
        found = re.search(r"linear1_(walk|sums|scan)(?:_sm90)?_kernel(?:<\d+, .*?\)(\d))?", event.key)
        if found:
            name = found[1] if found[1] != "walk" else ("forward", "grad_q", "pair")[int(found[2])]
            times[name] = times.get(name, 0) + event.self_device_time_total / 1e3 / (QUEUED // 2)
    return "  ".join(f"{name} {times[name]:.4f}" for name in ("forward", "grad_q", "pair", "sums", "scan") if name in times)


def rel(x, y):
    return ((x.float() - y.float()).norm() / y.float().norm()).item()


def measure(variants, shape):
    b, h, n, _ = shape
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    o, grads = torch.empty_like(q), [torch.empty_like(q) for _ in range(3)]
    z = torch.empty(b, h, n, device="cuda")
    numbers = (0.02, 1.0, 1.0, 0.5, 1, True, 0.0, "linear", False)
    ones = torch.ones(b, n, device="cuda", dtype=torch.bool)
    expected_o, expected_z = torch.ops.fastmax.forward(q, k, v, ones, *(None,) * 5, *numbers)
    expected = torch.ops.fastmax.backward(g, None, q, k, v, expected_o, expected_z, ones, *(None,) * 5, *numbers)[:3]
    print(shape, "ms", flush=True)
    for group in (2, 1) if 2 * b * h <= 132 else (1,):
        for variant in variants:
            variant.group.value = group
            workspace = torch.empty(variant.library.workspace_bytes(*shape), device="cuda", dtype=torch.uint8)

            def forward(variant=variant, workspace=workspace):
                variant.call("fwd", (q, k, v, o, z, workspace), shape)

            def backward(variant=variant, workspace=workspace):
                variant.call("bwd", (q, k, v, o, g, z, *grads, workspace), shape)

            def both(forward=forward, backward=backward):
                forward()
                backward()

            verdict = ""
            if variant.name in CHECKED:
                for x in (o, z, *grads):
                    x.fill_(float("nan"))
                both()
                # The portable kernels and these each round their results, their states and their weights.
                results, wanted = (o, *grads, z), (expected_o, *expected, expected_z)
                errors = [rel(x, y) for x, y in zip(results, wanted, strict=True)]
                limits = (0.01, 0.02, 0.02, 0.02, 0.002)
                if not all(error <= limit for error, limit in zip(errors, limits, strict=True)):
                    verdict = "  ERROR " + " ".join(f"{error:.1e}" for error in errors)
            print(
                f"  group {group} {variant.name:13}{queued(forward):8.4f} {queued(both):8.4f}   {kernels(both)}{verdict}",
                flush=True,
            )


if __name__ == "__main__":
    loaded = [Variant(name) for name in NAMES]
    for shape in SHAPES:
        measure(loaded, shape)
