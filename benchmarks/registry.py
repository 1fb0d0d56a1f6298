"""What is measured: providers, cases and suites. The only file to edit for a new benchmark.

A provider computes attention of q, k, v; its weight function says which definition its output and gradients are checked against
before it is timed. A case is one size with what is measured there and what the project asks of it. A suite is a list of cases
for each kind of device. How other libraries are called is in benchmarks/peers.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastmax
from benchmarks import peers
from benchmarks.learn.variants import VARIANTS, fastest_softmax

# tf32 is float32 tensors with torch.set_float32_matmul_precision("high"), fp32 the same with "highest".
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Modes and their units.
#   fwd, fwd+bwd   device time of a single call after a pause
#   memory         peak of forward + backward, with q, k, v and the output's gradient; train: with weights and AdamW's moments
#   host           CPU time of one forward + backward (decode: of one step) while the device is busy
#   step           device time of one recurrent step
#   train          device time of one training step
#   sustained ...  time per call of calls back to back, host included: of fwd, fwd+bwd or train
SUSTAINED = "sustained "
UNITS = {"fwd": "ms", "fwd+bwd": "ms", "memory": "MiB", "host": "us", "step": "us", "train": "ms"}
UNITS |= {SUSTAINED + mode: UNITS[mode] for mode in ("fwd", "fwd+bwd", "train")}


@dataclass(frozen=True)
class AtMost:
    """What the project asks: at most `value`, in the mode's unit or as a multiple of the peer's number."""

    value: float
    of_peer: bool = False


@dataclass(frozen=True)
class Case:
    """One size. `p` and `algorithm` are None where each provider has its own; the first provider is ours.

    Rows of a softmax are `batch`, their width is `tokens`. A training step has `batch` sequences and heads * head_dim channels.
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
    peer: str = ""  # the provider by whose numbers "of_peer" divides
    targets: Mapping[str, AtMost] = field(default_factory=dict)  # by mode, of the first providers
    judged: int = 1  # how many those are
    title: str = ""  # first words of the label
    window: int = 0  # of the providers that have one
    sequences: int = 0  # of the providers of packed sequences
    token_major: bool = False  # q, k, v lie in memory as (b, n, h, d), as a model's projections leave them
    published: Mapping[str, str] = field(default_factory=dict)  # by provider: what somebody else measured, as they wrote it

    def label(self) -> str:
        if self.heads == self.head_dim == 1:  # rows
            return f"{self.title} {self.dtype} {self.batch} x {self.tokens}"
        words = [self.title, self.dtype, "" if self.p is None else f"p={self.p}", self.algorithm or ""]
        words += ["" if self.causal else "full", f"({self.batch},{self.heads},{self.tokens},{self.head_dim})"]
        return " ".join(filter(None, words))


@dataclass(frozen=True)
class Pairs:
    """Some queries of some heads with all keys: what a weight depends on beside the product q.k."""

    case: Case
    heads: Tensor  # (heads,), those of the first batch entry first
    distance: Tensor  # (rows, n), i - j
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # of `Provider.tensors`; floating ones in float64, (heads, n)


@dataclass(frozen=True)
class Provider:
    name: str
    call: Callable[..., Tensor]  # of q, k, v, the case, and `tensors` by their names
    weight: Callable[[Tensor, Pairs], Tensor]  # unnormalised attention weight of a product q.k, in float64
    arithmetic: Callable[[Case], tuple[str, int] | None]  # algorithm and p, for the floor; None: no floor is known
    context: Callable[[], AbstractContextManager] = nullcontext  # entered around calls, outside of what is timed
    normalized: bool = True  # the weights of a row are divided by their sum
    rows: Callable[[Tensor, Case], Tensor] = lambda x, case: x  # what becomes of q and of k, in float64, before their product
    # What accompanies q, k and v: (batch, heads, n) with a gradient, or of integers. The same at each call.
    tensors: Callable[[Case, torch.device], dict[str, Tensor]] = lambda case, device: {}
    missing: Callable[[], str] = str  # why it cannot run on this machine, "" if it can
    foreign: bool = False  # written by others: that it does not take a case is no fault of ours
    note: str = ""  # shown beside its numbers: what it computes, where that is another function


@dataclass(frozen=True)
class Suite:
    what: str
    cases: Mapping[str, tuple[Case, ...]]  # by device type
    workload: str = "attention"  # or "decode"
    limit_s: float = math.inf  # a provider stops growing in n when a call is expected to take longer
    rounds: int = 5  # kept at least, where the command line does not say
    report: str = ""  # of benchmarks/report.py, printed at the end
    figure: str = ""  # of benchmarks/report.py


def score_options(case: Case, p: int | None) -> dict[str, object]:
    """Options of `fastmax_attention`. p = 1 is as `FastmaxSelfAttention` has it: rows in the unit ball keep 1 + s positive."""
    if p == 1:
        return {"normalize": "token", "lim": 1.0, "temperature": 1.1}
    return {"temperature": case.head_dim**0.5}


def unbounded_options(case: Case, p: int | None) -> dict[str, object]:
    """p = 1 without normalisation. a0 = 8 keeps 8 + s positive on the inputs used, on others a denominator can vanish."""
    return {"temperature": case.head_dim**0.5, "a0": 8.0}


def fastmax_provider(
    name: str,
    p: int | None = None,
    algorithm: str | None = None,
    custom: bool = True,
    exact_window: bool = False,
    score: Callable[[Case, int | None], dict[str, object]] = score_options,
    factor: Callable[[Pairs], Tensor | float] = lambda pairs: 1.0,
    **options,
) -> Provider:
    """`p` and `algorithm` replace the case's. `exact_window`: take the case's window. `score`: options of the scores, by case
    and p. `factor`: a factor of the weights."""

    def call(q: Tensor, k: Tensor, v: Tensor, case: Case, **tensors: Tensor) -> Tensor:
        arguments = {"causal": case.causal, "p": p or case.p, "algorithm": algorithm or case.algorithm or "auto", **tensors}
        arguments |= score(case, p or case.p) | ({"exact_window": case.window} if exact_window else {})
        return fastmax.fastmax_attention(q, k, v, use_custom_gradient=custom, **arguments)

    def weight(product: Tensor, pairs: Pairs) -> Tensor:
        given = score(pairs.case, p or pairs.case.p)
        s = product / given["temperature"]
        f = given.get("a0", 1.0) + s + (0.0 if (p or pairs.case.p) == 1 else 0.5 * s * s)
        if exact_window:
            f = torch.where(pairs.distance.abs() < pairs.case.window, s.exp(), f)
        return f * factor(pairs)

    def rows(x: Tensor, case: Case) -> Tensor:
        given = score(case, p or case.p)
        return x * (given["lim"] / x.norm(dim=-1, keepdim=True)).clamp(max=1.0) if "lim" in given else x

    return Provider(name, call, weight, lambda case: (algorithm or case.algorithm or "auto", p or case.p), rows=rows, **options)


def softmax_provider(name: str, call: Callable[[Tensor, Tensor, Tensor, float, bool], Tensor], **options) -> Provider:
    """Softmax attention, `call(q, k, v, scale, causal)`: another function than fastmax; the comparison is of cost."""

    def weight(product: Tensor, pairs: Pairs) -> Tensor:
        return (product / pairs.case.head_dim**0.5).exp()

    def scaled(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        return call(q, k, v, case.head_dim**-0.5, case.causal)

    return Provider(name, scaled, weight, lambda case: ("quadratic", 2), **options)


def sdpa_provider(name: str, backend: SDPBackend | None = None) -> Provider:
    """PyTorch's."""

    def call(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    return softmax_provider(name, call, context=nullcontext if backend is None else partial(sdpa_kernel, backend), foreign=True)


def cupy_provider() -> Provider:
    """CuPy's matrix products have no bfloat16; float16 has as many bytes and the same speed."""

    def call(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        dtype = torch.float16 if q.dtype == torch.bfloat16 else q.dtype
        return peers.array_attention("cupy")(*(x.to(dtype) for x in (q, k, v)), scale, causal).to(q.dtype)

    needs = partial(peers.missing, "cupy.matmul")
    return softmax_provider("plain_cupy", call, missing=needs, foreign=True, note="bf16 is converted to fp16 and back")


def peer_provider(
    name: str,
    call: Callable[[Tensor, Tensor, Tensor], Tensor],
    of_score: Callable[[Tensor], Tensor],
    needs: str,
    note: str = "",
    factor: Callable[[Pairs], Tensor | float] = lambda pairs: 1.0,
    **options,
) -> Provider:
    """An operator whose weights are `of_score(q.k / sqrt(d))` times a factor."""

    def weight(product: Tensor, pairs: Pairs) -> Tensor:
        return of_score(product / pairs.case.head_dim**0.5) * factor(pairs)

    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        return call(q, k, v)

    missing = partial(peers.missing, needs)
    return Provider(name, attend, weight, lambda case: None, missing=missing, foreign=True, note=note, **options)


def fla_provider(name: str, operator: str, of_score: Callable[[Tensor], Tensor], note: str, **options) -> Provider:
    return peer_provider(name, peers.fla(operator), of_score, operator, note, **options)


def layer_provider(name: str) -> Provider:
    """A layer of `benchmarks.learn`, measured as part of a model alone."""

    def no_operator(*_: object, **__: object) -> Tensor:
        raise RuntimeError(f"{name} is a layer of a model: it has no function of q, k and v")

    return Provider(name, no_operator, no_operator, lambda case: None, context=fastest_softmax, note=VARIANTS[name].title)


def _taylor(s: Tensor) -> Tensor:
    return 1 + s + 0.5 * s * s


def _retention_decay(pairs: Pairs) -> Tensor:
    """(1 - 2^(-5 - head))^distance."""
    head = (pairs.heads % pairs.case.heads).double()
    return (1 - 2.0 ** (-5.0 - head))[:, None, None] ** pairs.distance.clamp(min=0)


def _log_decay(case: Case, device: torch.device) -> dict[str, Tensor]:
    """As a gate makes it: in the median a token takes 3.4% of what was before it."""
    generator = torch.Generator(device).manual_seed(case.tokens)
    x = torch.randn(case.batch, case.heads, case.tokens, generator=generator, device=device)
    return {"log_decay": -0.05 * F.softplus(x)}


def _faded(pairs: Pairs) -> Tensor:
    """exp of the decays of the tokens after key j, up to query i's own."""
    sums = pairs.tensors["log_decay"].cumsum(-1)
    rows = pairs.distance[:, 0]  # i - 0
    between = sums[:, rows, None] - sums[:, None, :]
    return torch.where(pairs.distance >= 0, between, 0.0).exp()


def _random_lengths(case: Case, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(case.tokens)
    cuts = torch.randint(case.tokens + 1, (case.sequences - 1,), generator=generator).sort().values
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.full((1,), case.tokens)])
    return {"cu_seqlens": bounds.to(device, torch.int32)}


def _equal_lengths(case: Case, device: torch.device) -> dict[str, Tensor]:
    step = case.tokens // case.sequences
    return {"cu_seqlens": torch.arange(0, case.tokens + 1, step, dtype=torch.int32, device=device)}


def _same_sequence(pairs: Pairs) -> Tensor:
    rows = pairs.distance[:, 0].contiguous()
    bounds = pairs.tensors["cu_seqlens"]
    begin = bounds[torch.searchsorted(bounds, rows, right=True) - 1]
    return (pairs.distance <= (rows - begin)[:, None]).double()


def _batch_of_sequences(q: Tensor, k: Tensor, v: Tensor, case: Case, **tensors: Tensor) -> Tensor:
    """Sequences of equal lengths as entries of a batch; of token-major tensors that is a view."""
    shape = (case.sequences, case.tokens // case.sequences, case.heads, case.head_dim)
    o = PROVIDERS["fastmax"].call(*(x.transpose(1, 2).reshape(shape).transpose(1, 2) for x in (q, k, v)), case)
    return o.transpose(1, 2).reshape(1, case.tokens, case.heads, case.head_dim).transpose(1, 2)


def _prefill(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    options = {"dtype": q.dtype, "device": q.device, "p": case.p, **score_options(case, case.p)}
    return fastmax.decoding.prefill(q, k, v, fastmax.decoding.init_state(case.batch, case.heads, case.head_dim, **options))[0]


def _flash_window(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    return fastmax.flash_attention(q, k, v, causal=case.causal, scale=case.head_dim**-0.5, window=case.window)


def _windowed_softmax(product: Tensor, pairs: Pairs) -> Tensor:
    return (product / pairs.case.head_dim**0.5).exp() * (pairs.distance.abs() < pairs.case.window)


# Layers whose training step is timed: those whose quality docs/quality.md has beside it.
LAYERS = ("softmax_sdpa", "p2_all", "softmax_parts", "p2", "p1_all", "hybrid")

PROVIDERS = {
    provider.name: provider
    for provider in (
        *map(layer_provider, LAYERS),
        fastmax_provider("fastmax"),
        fastmax_provider("fastmax_autograd", custom=False),
        fastmax_provider("fastmax_p1", p=1),
        fastmax_provider("fastmax_p2", p=2),
        fastmax_provider("quadratic", algorithm="quadratic"),
        fastmax_provider("linear", algorithm="linear"),
        softmax_provider(
            "fastmax_flash",
            lambda q, k, v, scale, causal: fastmax.flash_attention(q, k, v, causal=causal, scale=scale),
        ),
        fastmax_provider("fastmax_decay", factor=_faded, tensors=_log_decay),
        fastmax_provider("fastmax_exact_window", exact_window=True),
        fastmax_provider("fastmax_decay_window", exact_window=True, factor=_faded, tensors=_log_decay),
        fastmax_provider("fastmax_unbounded", score=unbounded_options),
        fastmax_provider("fastmax_packed", factor=_same_sequence, tensors=_random_lengths),
        fastmax_provider("fastmax_packed_alike", factor=_same_sequence, tensors=_equal_lengths),
        replace(
            fastmax_provider("fastmax_batched", factor=_same_sequence, tensors=_equal_lengths),
            call=_batch_of_sequences,
        ),
        replace(fastmax_provider("fastmax_prefill"), call=_prefill),
        Provider("fastmax_flash_window", _flash_window, _windowed_softmax, lambda case: None),
        sdpa_provider("sdpa"),
        sdpa_provider("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION),
        sdpa_provider("sdpa_flash", SDPBackend.FLASH_ATTENTION),
        sdpa_provider("sdpa_efficient", SDPBackend.EFFICIENT_ATTENTION),
        softmax_provider("plain", peers.plain, note="the (n, n) matrix is in memory"),
        softmax_provider("plain_numpy", peers.array_attention("numpy")),
        cupy_provider(),
        # fastmax's p = 2 at temperature sqrt(d): the same function, but for a 1e-6 in the denominator.
        fla_provider("fla_based", "fla.ops.based.parallel_based", _taylor, "same function as p = 2, quadratic algorithm"),
        fla_provider("fla_based_chunk", "fla.ops.based.fused_chunk_based", _taylor, "same function as p = 2, head_dim to 16"),
        # Its `normalize=True` divides by sums that vanish on these inputs.
        peer_provider(
            "fla_linear",
            peers.fla("fla.ops.linear_attn.chunk_linear_attn", normalize=False),
            lambda s: s,
            "fla.ops.linear_attn.chunk_linear_attn",
            "weights q.k / sqrt(d), no a0, not divided by their sum",
            normalized=False,
        ),
        fla_provider(
            *("fla_retention", "fla.ops.retention.chunk_retention", lambda s: s),
            "weights q.k / sqrt(d) that decay with distance, not divided by their sum",
            normalized=False,
            factor=_retention_decay,
        ),
        peer_provider(
            *("power_retention", peers.power_retention, lambda s: s * s, "retention.power_retention"),
            "weights (q.k)^2 / d: no lower orders",
        ),
    )
}


def _times_faster(ratio: float) -> dict[str, AtMost]:
    return {"fwd+bwd": AtMost(1 / ratio, of_peer=True)}


def _milliseconds(forward: float, both: float) -> dict[str, AtMost]:
    return {"fwd": AtMost(forward), "fwd+bwd": AtMost(both)}


def _h200_cases() -> tuple[Case, ...]:
    """The TF32 row is causal, as the row of the ancestor that took 2000 ms on this GPU was."""
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


def _olmo2_cases(tokens: tuple[int, ...], dtype: str, providers: tuple[str, ...], peer: str) -> tuple[Case, ...]:
    """32 heads of 128 stand for the 7B model, 64 for the larger ones, with a key/value head for each query head. As published,
    the 7B has 32 of both, the 32B has 40 query and 8 key/value heads, and there is no 70B (the Llama 2 of that size has 64 and
    8). Times are linear in query heads; fewer key/value heads save part of their bytes and, for fastmax, of the states.
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
    """`shapes`: rows and width -> whether the project asks for a speed there."""
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
    """What an option of the operator costs: the first provider against the second."""
    options = {"p": 2, "algorithm": "linear", "dtype": "bf16"} | options
    modes = (mode, SUSTAINED + mode)
    targets = dict.fromkeys(modes, AtMost(at_most, of_peer=True))
    return Case(*size, title=title, modes=modes, providers=providers, peer=providers[1], targets=targets, **options)


def _option_cases(size: tuple[int, int, int, int]) -> tuple[Case, ...]:
    """The window of 1024 keys has 1/32 of the pairs of 65536 causal tokens."""
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
        _option_case(
            *("window", size, ("fastmax_flash_window", "fastmax_flash"), 1.5 / 32),
            p=None,
            algorithm=None,
            window=1024,
        ),
        *(_option_case("prefill", size, ("fastmax_prefill", "fastmax"), 1.10, mode=mode) for mode in ("fwd", "fwd+bwd")),
    )


# 2^24 to 2^26 numbers.
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
                    providers=("fastmax_gathered", "fastmax_in_place", "sdpa_flash", "sdpa_cudnn"),
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
            # fla_based is quadratic in n and stops at the limit; fla_based_chunk takes head dims up to 16.
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
    # 32768 tokens a step, or one longer sequence. bf16 autocast, weights in fp32; cross entropy by chunks (training.py).
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
    # 32768 bytes a step, or one longer sequence, in bf16 by autocast.
    "layer": Suite(
        "one training step of the GPT of docs/quality.md with 25M parameters, by attention layer, over its context",
        {
            "cuda": tuple(
                Case(
                    *(max(1, 32768 // n), 8, n, 64, None, None, "bf16"),
                    modes=(SUSTAINED + "train",),
                    title="GPT 25M",
                    providers=LAYERS if n == 1024 else ("softmax_sdpa", "p2_all", "p2"),
                    peer="softmax_sdpa",
                )
                for n in (1024, 4096, 16384, 65536)
            ),
            "cpu": (
                Case(
                    *(1, 8, 256, 64, None, None, "fp32"),
                    modes=(SUSTAINED + "train",),
                    title="GPT 25M",
                    providers=("softmax_sdpa", "p2_all"),
                    peer="softmax_sdpa",
                ),
            ),
        },
        workload="train",
    ),
}
