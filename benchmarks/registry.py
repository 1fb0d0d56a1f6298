"""What is measured: providers, cases and suites. The only file to edit for a new benchmark.

A provider computes attention of q, k, v; its weight function says which definition its output and gradients are checked against
before it is timed. A case is one size with what is measured there and what the project asks of it. A suite is a list of cases
for each kind of device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastmax import fastmax_attention

# tf32 is float32 tensors with torch.set_float32_matmul_precision("high"), fp32 the same with "highest".
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# What is measured, and its unit. fwd, fwd+bwd: time on the device. memory: peak of forward + backward, with q, k, v and the
# output's gradient. host: CPU time of one forward + backward (decode: of one step) while the device works behind.
# step: device time of one recurrent step.
UNITS = {"fwd": "ms", "fwd+bwd": "ms", "memory": "MiB", "host": "us", "step": "us"}


@dataclass(frozen=True)
class AtMost:
    """What the project asks: at most `value`, in the mode's unit or as a multiple of the peer's number."""

    value: float
    of_peer: bool = False


@dataclass(frozen=True)
class Case:
    """One size. `p` and `algorithm` are None where each provider has its own; the first provider is ours."""

    batch: int
    heads: int
    tokens: int
    head_dim: int
    p: int | None = 2
    algorithm: str | None = "auto"
    dtype: str = "fp32"
    causal: bool = True
    modes: tuple[str, ...] = ("fwd", "fwd+bwd")
    providers: tuple[str, ...] = ("fastmax", "sdpa")
    peer: str = ""  # the provider by whose numbers "of_peer" divides
    targets: Mapping[str, AtMost] = field(default_factory=dict)  # by mode, of the first provider
    published: Mapping[str, str] = field(default_factory=dict)  # by provider: what somebody else measured, as they wrote it

    def label(self) -> str:
        words = [self.dtype, "" if self.p is None else f"p={self.p}", self.algorithm or "", "" if self.causal else "full"]
        return " ".join([*filter(None, words), f"({self.batch},{self.heads},{self.tokens},{self.head_dim})"])


@dataclass(frozen=True)
class Provider:
    name: str
    call: Callable[[Tensor, Tensor, Tensor, Case], Tensor]
    weight: Callable[[Tensor, Case], Tensor]  # unnormalised attention weight of a product q.k, in float64
    arithmetic: Callable[[Case], tuple[str, int]]  # algorithm and p, for the floor
    context: Callable[[], AbstractContextManager] = nullcontext  # entered around calls, outside of what is timed


@dataclass(frozen=True)
class Suite:
    what: str
    cases: Mapping[str, tuple[Case, ...]]  # by device type
    workload: str = "attention"  # or "decode"
    limit_s: float = math.inf  # a provider stops growing in n when a call is expected to take longer
    report: str = ""  # of benchmarks/report.py, printed at the end
    figure: str = ""  # of benchmarks/report.py


def fastmax_provider(name: str, p: int | None = None, algorithm: str | None = None, custom: bool = True) -> Provider:
    """`p` and `algorithm` where they are not the case's."""

    def score(case: Case) -> dict[str, float]:
        # p = 1 on unbounded scores can divide by zero; a0 = 8 at this temperature keeps 8 + s positive on the inputs used.
        return {"temperature": case.head_dim**0.5, "a0": 8.0 if (p or case.p) == 1 else 1.0}

    def call(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        options = {"causal": case.causal, "p": p or case.p, "algorithm": algorithm or case.algorithm or "auto", **score(case)}
        return fastmax_attention(q, k, v, use_custom_gradient=custom, **options)

    def weight(product: Tensor, case: Case) -> Tensor:
        s = product / score(case)["temperature"]
        return score(case)["a0"] + s + (0.0 if (p or case.p) == 1 else 0.5 * s * s)

    return Provider(name, call, weight, lambda case: (algorithm or case.algorithm or "auto", p or case.p))


def sdpa_provider(name: str, backend: SDPBackend | None = None) -> Provider:
    """PyTorch's softmax attention: another function than fastmax; the comparison is of cost."""

    def call(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)

    def weight(product: Tensor, case: Case) -> Tensor:
        return (product / case.head_dim**0.5).exp()

    context = nullcontext if backend is None else partial(sdpa_kernel, backend)
    return Provider(name, call, weight, lambda case: ("quadratic", 2), context)


PROVIDERS = {
    provider.name: provider
    for provider in (
        fastmax_provider("fastmax"),
        fastmax_provider("fastmax_autograd", custom=False),
        fastmax_provider("fastmax_p1", p=1),
        fastmax_provider("fastmax_p2", p=2),
        fastmax_provider("quadratic", algorithm="quadratic"),
        fastmax_provider("linear", algorithm="linear"),
        sdpa_provider("sdpa"),
        sdpa_provider("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION),
        sdpa_provider("sdpa_flash", SDPBackend.FLASH_ATTENTION),
        sdpa_provider("sdpa_efficient", SDPBackend.EFFICIENT_ATTENTION),
    )
}


def _times_faster(ratio: float) -> dict[str, AtMost]:
    return {"fwd+bwd": AtMost(1 / ratio, of_peer=True)}


def _milliseconds(forward: float, both: float) -> dict[str, AtMost]:
    return {"fwd": AtMost(forward), "fwd+bwd": AtMost(both)}


def _h200_cases() -> tuple[Case, ...]:
    """Issue 3's table. The TF32 row is causal, as the row of the ancestor that took 2000 ms on this GPU was."""
    bf16 = {"dtype": "bf16", "providers": ("fastmax", "sdpa_cudnn", "sdpa_flash"), "peer": "sdpa_cudnn"}
    long = _milliseconds(5.5, 20) | {"memory": AtMost(1.35, of_peer=True)}
    return (
        Case(8, 32, 4096, 64, 2, "quadratic", targets=_milliseconds(1.9, 7.7), **bf16),
        Case(8, 16, 4096, 128, 2, "quadratic", targets=_milliseconds(1.75, 6.9), **bf16),
        Case(8, 64, 4096, 32, 2, "quadratic", targets=_milliseconds(2.0, 8.5), **bf16),
        Case(1, 32, 65536, 64, 2, "linear", targets=long, modes=("fwd", "fwd+bwd", "memory"), **bf16),
        Case(2, 32, 16384, 64, 2, "linear", targets=_milliseconds(2.8, 10), **bf16),
        Case(1, 16, 65536, 128, 2, "linear", targets=_milliseconds(14, 52), **bf16),
        Case(1, 64, 65536, 32, 2, "linear", targets=_milliseconds(4.5, 16), **bf16),
        Case(2, 32, 16384, 64, 1, "linear", targets=_milliseconds(0.30, 1.15), **bf16),
        Case(1, 16, 65536, 128, 1, "linear", targets=_milliseconds(0.85, 3.6), **bf16),
        Case(
            *(64, 16, 10000, 64, 2, "linear", "tf32"),
            modes=("fwd",),
            providers=("fastmax", "sdpa_efficient"),
            peer="sdpa_efficient",
            targets={"fwd": AtMost(60)},
        ),
        Case(
            *(1, 8, 128, 64, 2, "auto", "bf16"),
            modes=("host",),
            providers=("fastmax", "sdpa", "sdpa_cudnn", "sdpa_flash"),
            peer="sdpa",
            targets={"host": AtMost(1.5, of_peer=True)},
        ),
    )


def _crossover_cases(dtypes: tuple[str, ...], tokens: Mapping[tuple[int, int], tuple[int, ...]], budget: int, heads: int):
    """`tokens` by (p, head_dim). Batches fill up to `budget` tokens, so that a short sequence occupies the device too."""
    return tuple(
        Case(
            *(max(1, budget // n), heads, n, d, p, None, dtype),
            modes=("fwd+bwd",),
            providers=("quadratic", "linear"),
            peer="quadratic",
        )
        for dtype in dtypes
        for (p, d), sizes in tokens.items()
        for n in sizes
    )


_CUDA_CROSSOVER = {
    (2, 32): (1024, 2048, 4096, 8192),
    (2, 64): (2048, 4096, 8192, 16384),
    (2, 128): (8192, 16384, 32768, 65536),
    **{(1, d): (256, 512, 1024, 2048, 4096) for d in (32, 64, 128)},
}
_CUDA_CROSSOVER_FP32 = {key: sizes[:4] for key, sizes in _CUDA_CROSSOVER.items()} | {(2, 128): (4096, 8192, 16384, 32768)}

# RTX A6000, forward, fp32, from the README of github.com/armingerami/fastmax: (heads, tokens, head_dim): custom, PyTorch.
_PUBLISHED = {
    (8, 1000, 32): ("0.11 s", "0.08 s"),
    (8, 10000, 32): ("1.09 s", "1.26 s"),
    (16, 1000, 32): ("0.13 s", "OOM"),
    (16, 10000, 32): ("1.28 s", "OOM"),
    (8, 1000, 64): ("0.32 s", "OOM"),
    (8, 10000, 64): ("3.24 s", "OOM"),
    (16, 1000, 64): ("0.65 s", "OOM"),
    (16, 10000, 64): ("6.66 s", "OOM"),
}

SUITES = {
    "cpu": Suite(
        "fp32 causal attention on the CPU against PyTorch's softmax attention",
        {
            "cpu": (
                Case(1, 4, 16384, 32, 2, "linear", peer="sdpa", targets=_times_faster(3.5)),
                Case(1, 1, 32768, 64, 2, "linear", peer="sdpa", targets=_times_faster(2.5)),
                Case(1, 4, 16384, 64, 1, "linear", peer="sdpa", targets=_times_faster(15.0)),
                Case(1, 8, 1024, 64, 2, "quadratic", peer="sdpa", targets=_times_faster(1 / 1.5)),
            )
        },
    ),
    "memory": Suite(
        "peak memory of forward + backward on the CPU",
        {
            "cpu": tuple(
                Case(1, 8, 65536, 64, p, "linear", modes=("memory",), providers=("fastmax", "fastmax_autograd")) for p in (2, 1)
            )
        },
    ),
    "cuda": Suite("speed, memory and host overhead of the CUDA kernels, with their targets on an H200", {"cuda": _h200_cases()}),
    "crossover": Suite(
        "the quadratic against the linear algorithm over n, and what algorithm='auto' chooses",
        {
            "cpu": _crossover_cases(
                ("fp32",),
                {(2, 32): (256, 512, 1024, 2048, 4096), (2, 64): (1024, 2048, 4096, 8192), (1, 64): (64, 128, 256, 512, 1024)},
                budget=1,
                heads=4,
            ),
            "cuda": _crossover_cases(("bf16", "fp16"), _CUDA_CROSSOVER, budget=65536, heads=8)
            + _crossover_cases(("tf32", "fp32"), _CUDA_CROSSOVER_FP32, budget=32768, heads=8),
        },
        report="crossings",
    ),
    "decode": Suite(
        "one recurrent step from a state that is not in the cache, against a copy of as many bytes",
        {
            "cuda": tuple(
                Case(
                    *(1, heads, 1, 64, 2, None, "bf16"),
                    modes=("step", "host"),
                    providers=("fastmax", "copy"),
                    peer="copy",
                    targets={"step": AtMost(1 / 0.6, of_peer=True)} if heads >= 64 else {},
                )
                for heads in (16, 64, 128, 512)
            ),
            "cpu": (Case(1, 16, 1, 64, 2, None, "fp32", modes=("step",), providers=("fastmax", "copy"), peer="copy"),),
        },
        workload="decode",
    ),
    "scaling": Suite(
        "time and peak memory of forward + backward against n",
        {
            "cuda": tuple(
                Case(
                    *(1, 16, 2**e, d, None, None, "bf16"),
                    modes=("fwd+bwd", "memory"),
                    providers=("fastmax_p2", "fastmax_p1", "sdpa_cudnn", "sdpa_flash"),
                    peer="sdpa_cudnn",
                )
                for d in (32, 64, 128)
                for e in range(9, 21)
            ),
            "cpu": tuple(
                Case(
                    *(1, 4, 2**e, 64, None, None, "fp32"),
                    modes=("fwd+bwd", "memory"),
                    providers=("fastmax_p2", "fastmax_p1", "sdpa"),
                    peer="sdpa",
                )
                for e in range(9, 18)
            ),
        },
        limit_s=1.5,
        figure="scaling",
    ),
    # The published numbers do not say whether a mask was on; the script in that repository has it off. Both are measured.
    "ancestor": Suite(
        "the sizes of the first Fastmax implementation, forward: kernels and PyTorch operations",
        {
            "cuda": tuple(
                Case(
                    *(64, heads, tokens, d, 2, "auto", dtype, causal),
                    modes=("fwd",),
                    providers=("fastmax", "fastmax_autograd"),
                    peer="fastmax_autograd",
                    published={"fastmax": f"{custom} (RTX A6000)", "fastmax_autograd": f"{plain} (RTX A6000)"},
                )
                for dtype in ("bf16", "tf32", "fp32")
                for causal in (True, False)
                for (heads, tokens, d), (custom, plain) in _PUBLISHED.items()
            )
        },
    ),
}
