"""Cases and suites: the sizes that are measured, the providers, and the project's targets.

A suite is a list of cases for each type of device. A case is one size with its modes, providers and targets. To add a
benchmark, add a case or a suite here. Providers are in benchmarks/providers.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

# tf32: float32 tensors with torch.set_float32_matmul_precision("high"); fp32: with "highest".
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Modes and their units.
#   fwd, fwd+bwd   device time of a single call after a pause
#   memory         peak of forward + backward, with q, k, v and the output's gradient; train: with weights and AdamW's moments
#   host           CPU time of one forward + backward (decode: of one step) while the device is busy
#   step           device time of one recurrent step
#   train          device time of one training step
#   sustained ...  time per call in a loop without pauses, host included; followed by fwd, fwd+bwd, step or train
SUSTAINED = "sustained "
UNITS = {"fwd": "ms", "fwd+bwd": "ms", "memory": "MiB", "host": "us", "step": "us", "train": "ms"}
UNITS |= {SUSTAINED + mode: UNITS[mode] for mode in ("fwd", "fwd+bwd", "step", "train")}


@dataclass(frozen=True)
class AtMost:
    """A target: at most `value`, in the mode's unit, or with `of_peer` as a multiple of the peer's number."""

    value: float
    of_peer: bool = False


@dataclass(frozen=True)
class Case:
    """One size. `p` and `algorithm` are None if each provider has its own. The first provider is fastmax.

    A softmax of rows has `batch` rows of width `tokens`. A training step has `batch` sequences and heads * head_dim channels.
    """

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
    peer: str = ""  # the provider that others are compared with
    targets: Mapping[str, AtMost] = field(default_factory=dict)  # mode -> target of the first `judged` providers
    judged: int = 1
    title: str = ""  # first words of the label
    window: int = 0  # window of the providers that have one
    sequences: int = 0  # number of sequences, for providers of packed sequences
    token_major: bool = False  # memory layout (b, n, h, d) of q, k and v, as a model's projections give
    published: Mapping[str, str] = field(default_factory=dict)  # provider -> a published measurement, verbatim

    def label(self) -> str:
        if self.heads == self.head_dim == 1:  # rows
            return f"{self.title} {self.dtype} {self.batch} x {self.tokens}"
        words = [self.title, self.dtype, "" if self.p is None else f"p={self.p}", self.algorithm or ""]
        words += ["" if self.causal else "full", f"({self.batch},{self.heads},{self.tokens},{self.head_dim})"]
        return " ".join(filter(None, words))


@dataclass(frozen=True)
class Suite:
    what: str
    cases: Mapping[str, tuple[Case, ...]]  # by device type
    workload: str = "attention"  # key of WORKLOADS
    limit_s: float = math.inf  # a provider is skipped if a call is expected to take longer
    rounds: int = 5  # least number of rounds; the command line can change it
    report: str = ""  # key of REPORTS in benchmarks/report.py, printed at the end
    figure: str = ""  # key of FIGURES in benchmarks/report.py


# Layers whose training step is timed; docs/quality.md has their losses.
LAYERS = ("softmax_sdpa", "p2_all", "softmax_parts", "p2", "p1_all", "kept_keys", "hybrid_sdpa")
OVER_CONTEXT = ("softmax_sdpa", "p2_all", "softmax_parts", "p2", "kept_keys", "hybrid_sdpa")  # timed at all lengths


def _times_faster(ratio: float) -> dict[str, AtMost]:
    return {"fwd+bwd": AtMost(1 / ratio, of_peer=True)}


def _milliseconds(forward: float, both: float) -> dict[str, AtMost]:
    return {"fwd": AtMost(forward), "fwd+bwd": AtMost(both)}


def _h200_cases() -> tuple[Case, ...]:
    """Returns the cases with targets on an H200. The TF32 case is causal, as in the first Fastmax implementation, which took
    2000 ms for it on this GPU."""
    times = ("fwd", "fwd+bwd", SUSTAINED + "fwd", SUSTAINED + "fwd+bwd")
    bf16 = {"dtype": "bf16", "providers": ("fastmax", "sdpa_cudnn", "sdpa_flash"), "peer": "sdpa_cudnn", "modes": times}
    long = _milliseconds(5.5, 20) | {"memory": AtMost(1.35, of_peer=True)}
    return (
        Case(8, 32, 4096, 64, 2, "quadratic", targets=_milliseconds(1.9, 7.7), **bf16),
        Case(8, 16, 4096, 128, 2, "quadratic", targets=_milliseconds(1.75, 6.9), **bf16),
        Case(8, 64, 4096, 32, 2, "quadratic", targets=_milliseconds(2.0, 8.5), **bf16),
        Case(1, 32, 65536, 64, 2, "linear", targets=long, **(bf16 | {"modes": (*times, "memory")})),
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
    """Returns cases of both algorithms. `tokens`: (p, head_dim) -> sizes. A batch has up to `budget` tokens, so that short
    sequences occupy the device too."""
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

# Published in the README of github.com/armingerami/fastmax: RTX A6000, forward, fp32. (heads, tokens, head_dim) -> times of its
# custom kernels and of PyTorch operations.
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


def _olmo2_cases(tokens: tuple[int, ...], dtype: str, providers: tuple[str, ...], peer: str) -> tuple[Case, ...]:
    """Returns cases of OLMo 2's attention layers.

    32 heads of 128 stand for the 7B model and 64 for larger ones, with a key/value head for each query head. The published 7B
    has 32 of both, the 32B has 40 query heads and 8 key/value heads, and there is no 70B (Llama 2 70B has 64 and 8). Times are
    linear in the number of query heads. Fewer key/value heads save part of the bytes and, for fastmax, of the states.
    """
    return tuple(
        Case(
            *(1, heads, n, 128, None, None, dtype),
            title=f"OLMo 2 {model}",
            providers=providers,
            peer=peer,
        )
        for model, heads in (("7B", 32), ("32B, 70B", 64))
        for n in tokens
    )


def _peers_cases(head_dim: int, tokens: tuple[int, ...], dtype: str, providers: tuple[str, ...]) -> tuple[Case, ...]:
    ours = ("fastmax_p2", "fastmax_p1")
    return tuple(
        Case(1, 16, n, head_dim, None, None, dtype, providers=ours + providers, peer="fastmax_p2", token_major=True)
        for n in tokens
    )


def _softmax_cases(dtypes: tuple[str, ...], shapes: Mapping[tuple[int, int], bool], providers: tuple[str, ...]):
    """Returns cases of softmax of rows. `shapes`: (rows, width) -> whether the case has a target."""
    within = {"fwd": AtMost(1.2, of_peer=True)}
    return tuple(
        Case(
            *(rows, 1, width, 1, None, None, dtype, False),
            modes=("fwd",),
            title="softmax",
            providers=providers,
            peer="torch_softmax",
            targets=within if judged else {},
            judged=2,
        )
        for dtype in dtypes
        for (rows, width), judged in shapes.items()
    )


def _option_case(
    title: str, size: tuple[int, int, int, int], providers: tuple[str, str], at_most: float, mode: str = "fwd+bwd", **options
) -> Case:
    """Returns a case for the cost of an option of the operator: the first provider has it, the second does not."""
    options = {"p": 2, "algorithm": "linear", "dtype": "bf16"} | options
    modes = (mode, SUSTAINED + mode)
    targets = dict.fromkeys(modes, AtMost(at_most, of_peer=True))
    return Case(*size, title=title, modes=modes, providers=providers, peer=providers[1], targets=targets, **options)


def _option_cases(size: tuple[int, int, int, int]) -> tuple[Case, ...]:
    """Returns the cases of options. The window of 1024 keys has 1/32 of the pairs of 65536 causal tokens."""
    return (
        _option_case("log_decay", size, ("fastmax_decay", "fastmax"), 1.10),
        _option_case("log_decay", (8, 32, 4096, 64), ("fastmax_decay", "fastmax"), 1.15, algorithm="quadratic"),
        _option_case("packed", size, ("fastmax_packed", "fastmax"), 1.15, sequences=64),
        _option_case(
            *("packed alike", size, ("fastmax_packed_alike", "fastmax_batched"), 1.3),
            algorithm="auto",
            sequences=64,
            token_major=True,
        ),
        _option_case("normalize", (2, 32, 16384, 64), ("fastmax", "fastmax_unbounded"), 1.45, p=1),
        _option_case("exact window", size, ("fastmax_exact_window", "fastmax"), 1.20, window=128),
        # The default of the layer
        _option_case("log_decay, exact window", size, ("fastmax_decay_window", "fastmax"), 1.20, window=128),
        _option_case(
            *("log_decay, exact window", (32, 32, 1024, 64), ("fastmax_decay_window", "fastmax"), 1.15),
            algorithm="quadratic",
            window=128,
        ),
        # Gates beside decays
        *(
            _option_case("log_input_gate, " + title, size, (f"fastmax_{of}_gate", f"fastmax_{of}"), 1.03, **options)
            for title, of, size, options in (
                ("log_decay", "decay", size, {}),
                ("log_decay", "decay", (8, 32, 4096, 64), {"algorithm": "quadratic"}),
                ("log_decay, exact window", "decay_window", size, {"window": 128}),
                ("log_decay, exact window", "decay_window", (32, 32, 1024, 64), {"algorithm": "quadratic", "window": 128}),
            )
        ),
        _option_case("log_input_gate", size, ("fastmax_gate", "fastmax"), 1.15),
        _option_case(
            *("window", size, ("fastmax_flash_window", "fastmax_flash"), 1.5 / 32),
            p=None,
            algorithm=None,
            window=1024,
        ),
        _option_case("keys of half the width", (1, 16, 65536, 128), ("fastmax_narrow_keys", "fastmax"), 0.45),
        *(_option_case("prefill", size, ("fastmax_prefill", "fastmax"), 1.10, mode=mode) for mode in ("fwd", "fwd+bwd")),
    )


def _layer_case(
    title: str,
    heads: int,
    tokens: int,
    providers: tuple[str, ...] = ("softmax_sdpa", "p2_all"),
    budget: int = 32768,
    dtype: str = "bf16",
) -> Case:
    """Returns a case of a training step on `budget` tokens, or on one longer sequence."""
    return Case(
        *(max(1, budget // tokens), heads, tokens, 64, None, None, dtype),
        modes=(SUSTAINED + "train",),
        title=title,
        providers=providers,
        peer="softmax_sdpa",
    )


# (rows, width), of 2^24 to 2^26 elements -> whether the case has a target
_SOFTMAX_SHAPES = {(4096, 4096): True, (1024, 65536): True} | {(2 ** (26 - e), 2**e): False for e in (7, 9, 10, 11, 14, 17, 20)}


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
    "cuda": Suite(
        "speed, memory and host overhead of the CUDA kernels, with their targets on an H200", {"cuda": _h200_cases()}
    ),
    "options": Suite(
        "what decays, windows, packed sequences and states cost, against calls without them, with targets on an H200",
        {
            "cuda": _option_cases((1, 32, 65536, 64)),
            "cpu": (
                _option_case("log_decay", (1, 4, 16384, 64), ("fastmax_decay", "fastmax"), 1.15, dtype="fp32"),
                _option_case(
                    *("exact window", (1, 4, 16384, 64), ("fastmax_exact_window", "fastmax"), 1.5),
                    dtype="fp32",
                    window=128,
                ),
            ),
        },
    ),
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
        "one step of generation: from a state that is not in the cache, against a copy of as many bytes, and against softmax "
        "attention with a cache of n keys and values",
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
            )
            + tuple(
                Case(
                    *(batch, heads, n, d, 2, None, "bf16"),
                    modes=("step",),
                    providers=("fastmax_buffered", "fastmax_in_place", "sdpa_flash", "sdpa_cudnn"),
                    peer="sdpa_flash",
                    targets={"step": AtMost(1 / 4, of_peer=True)} if batch == d == 64 and n >= 16384 else {},
                )
                for d in (64, 128)
                for batch, heads in ((1, 1), (1, 8), (8, 8), (64, 8))
                for n in (4096, 16384, 65536, 131072)
            ),
            "cpu": (
                Case(1, 16, 1, 64, 2, None, "fp32", modes=("step",), providers=("fastmax", "copy"), peer="copy"),
                *(
                    Case(
                        *(1, 16, n, 64, 2, None, "fp32"),
                        modes=("step",),
                        providers=("fastmax_in_place", "sdpa_flash"),
                        peer="sdpa_flash",
                    )
                    for n in (4096, 16384)
                ),
            ),
        },
        workload="decode",
    ),
    "generation": Suite(
        "a token of generation with the GPT of docs/quality.md with 25M parameters, after a context of n tokens",
        {
            "cuda": tuple(
                Case(
                    *(batch, 8, n, 64, None, None, "bf16"),
                    modes=(SUSTAINED + "step",),
                    title="GPT 25M",
                    providers=("p2_all", "kept_keys", "softmax_flash", "softmax_cudnn"),
                    peer="softmax_flash",
                )
                for batch in (1, 64)
                for n in (1024, 4096, 16384, 131072)
            ),
            "cpu": (
                Case(
                    *(1, 8, 1024, 64, None, None, "fp32"),
                    modes=(SUSTAINED + "step",),
                    title="GPT 25M",
                    providers=("p2_all", "kept_keys", "softmax_math"),
                    peer="softmax_math",
                ),
            ),
        },
        workload="generation",
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
    # It is not published whether a mask was on; the script in that repository has it off. Both are measured.
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
    "flash": Suite(
        "our softmax attention against PyTorch's flash attention",
        {
            "cuda": tuple(
                Case(
                    *(*size, None, None, "bf16"),
                    providers=("fastmax_flash", "sdpa_flash", "sdpa_cudnn"),
                    peer="sdpa_flash",
                    targets=dict.fromkeys(("fwd", "fwd+bwd"), AtMost(1 / 0.95, of_peer=True)),
                )
                for size in ((8, 32, 4096, 64), (8, 16, 4096, 128))
            ),
            "cpu": (Case(1, 8, 2048, 64, None, None, providers=("fastmax_flash", "sdpa"), peer="sdpa"),),
        },
    ),
    "olmo2": Suite(
        "attention layers of OLMo 2 over n, softmax written out included",
        {
            "cuda": _olmo2_cases(
                (4096, 8192, 16384, 32768, 65536, 131072),
                "bf16",
                ("fastmax_p2", "fastmax_p1", "fastmax_flash", "sdpa_cudnn", "sdpa_flash", "plain", "plain_cupy"),
                peer="sdpa_cudnn",
            ),
            "cpu": _olmo2_cases(
                (1024, 2048, 4096),
                "fp32",
                ("fastmax_p2", "fastmax_p1", "fastmax_flash", "sdpa", "plain", "plain_numpy"),
                peer="sdpa",
            ),
        },
        limit_s=2.0,
        rounds=3,
        figure="times",
    ),
    "peers": Suite(
        "other linear attentions, each checked against its own definition; notes say where that is another function",
        {
            # fla_based is quadratic in n and skipped above the limit; fla_based_chunk takes head dims up to 16.
            "cuda": tuple(
                case
                for d in (64, 128)
                for case in _peers_cases(
                    *(d, (4096, 16384, 65536), "bf16"),
                    ("fla_based", "fla_linear", "fla_retention", "power_retention"),
                )
            )
            + _peers_cases(16, (4096, 16384, 65536), "bf16", ("fla_based", "fla_based_chunk", "fla_linear")),
            "cpu": _peers_cases(32, (1024,), "fp32", ("fla_based", "fla_linear", "fla_retention", "power_retention")),
        },
        limit_s=1.0,
        rounds=3,
        figure="times",
    ),
    "softmax": Suite(
        "softmax of rows, two passes and one, against PyTorch's",
        {
            "cuda": _softmax_cases(("bf16", "fp32"), _SOFTMAX_SHAPES, ("softmax_online", "softmax_safe", "torch_softmax")),
            "cpu": _softmax_cases(
                *(("fp32",), {(512, 512): False, (64, 65536): False}),
                ("softmax_online", "softmax_safe", "torch_softmax"),
            ),
        },
        workload="softmax",
    ),
    # 32768 tokens per step, or one longer sequence. bf16 autocast, weights in fp32; the loss is computed in chunks.
    "train": Suite(
        "one training step (forward, backward, AdamW) of a GPT with 124M parameters over its context",
        {
            "cuda": tuple(
                Case(
                    *(max(1, 32768 // n), 12, n, 64, None, None, "bf16"),
                    modes=("train", "memory"),
                    title="GPT 124M",
                    providers=("fastmax_p2", "fastmax_p1", "sdpa_cudnn", "sdpa_flash"),
                    peer="sdpa_cudnn",
                )
                for n in (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
            ),
            "cpu": (
                Case(
                    *(1, 12, 512, 64, None, None, "fp32"),
                    modes=("train", "memory"),
                    title="GPT 124M",
                    providers=("fastmax_p2", "fastmax_p1", "sdpa"),
                    peer="sdpa",
                ),
            ),
        },
        workload="train",
        limit_s=4.0,
        rounds=3,
        figure="training",
    ),
    # 32768 tokens per step, or one longer sequence. bf16 autocast.
    "layer": Suite(
        "one training step of GPTs with 25M and 124M parameters, by attention layer, over the context",
        {
            "cuda": (
                _layer_case("GPT 25M", 8, 1024, LAYERS),
                *(_layer_case("GPT 25M", 8, n, OVER_CONTEXT) for n in (4096, 16384, 65536)),
                *(_layer_case("GPT 124M", 12, n) for n in (1024, 4096, 16384, 65536)),
                _layer_case("GPT 25M eager", 8, 1024),
            ),
            "cpu": (_layer_case("GPT 25M", 8, 256, budget=256, dtype="fp32"),),
        },
        workload="train",
    ),
}
