"""Providers: the functions of q, k and v that are measured, each with the definition that it is checked against.

The weight function of a provider defines its result. Output and gradients are compared with the definition before anything is
timed. Calls into other libraries are in benchmarks/peers.py.
"""

from __future__ import annotations

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
from benchmarks.registry import LAYERS, Case


@dataclass(frozen=True)
class Pairs:
    """The arguments of a weight function besides the product q.k, for some queries of some heads with all keys."""

    case: Case
    heads: Tensor  # (heads,), indices; those of the first batch entry come first
    distance: Tensor  # (rows, n), i - j
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # from `Provider.tensors`; floating ones float64 (heads, n)


@dataclass(frozen=True)
class Provider:
    name: str
    call: Callable[..., Tensor]  # arguments: q, k, v, the case, and `tensors` by name
    weight: Callable[[Tensor, Pairs], Tensor]  # unnormalised attention weight for a product q.k, in float64
    arithmetic: Callable[[Case], tuple[str, int] | None]  # algorithm and p, for the floor; None: no floor is known
    context: Callable[[], AbstractContextManager] = nullcontext  # entered around calls, before timing starts
    normalized: bool = True  # whether the weights of a row are divided by their sum
    rows: Callable[[Tensor, Case], Tensor] = lambda x, case: x  # applied to q and to k, in float64, before their product
    # Further arguments, (batch, heads, n) with a gradient, or integers. They are the same in each call.
    tensors: Callable[[Case, torch.device], dict[str, Tensor]] = lambda case, device: {}
    missing: Callable[[], str] = str  # the reason why it cannot run on this machine, "" if it can
    foreign: bool = False  # whether it is of another library: then an unsupported case does not fail the run
    note: str = ""  # shown with its numbers; says which function it computes if that is another one


def score_options(case: Case, p: int | None) -> dict[str, object]:
    """Returns options of `fastmax_attention`. For p = 1 they are those of `FastmaxSelfAttention`: rows in the unit ball keep
    1 + s positive."""
    if p == 1:
        return {"normalize": "token", "lim": 1.0, "temperature": 1.1}
    return {"temperature": case.head_dim**0.5}


def unbounded_options(case: Case, p: int | None) -> dict[str, object]:
    """Returns options for p = 1 without normalisation. a0 = 8 keeps 8 + s positive on these inputs; on others a denominator can
    vanish."""
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
    """Returns a provider that calls `fastmax_attention`.

    Args:
        p, algorithm: replace those of the case.
        exact_window: whether to use the case's window.
        score: function of the case and p that returns options of the scores.
        factor: function that returns a factor of the weights.
        options: further fields of `Provider`.
    """

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
    """Returns a provider of softmax attention, `call(q, k, v, scale, causal)`. This is another function than fastmax: the
    comparison is of cost."""

    def weight(product: Tensor, pairs: Pairs) -> Tensor:
        return (product / pairs.case.head_dim**0.5).exp()

    def scaled(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        return call(q, k, v, case.head_dim**-0.5, case.causal)

    return Provider(name, scaled, weight, lambda case: ("quadratic", 2), **options)


def sdpa_provider(name: str, backend: SDPBackend | None = None) -> Provider:
    """Returns a provider of PyTorch's softmax attention."""

    def call(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    return softmax_provider(name, call, context=nullcontext if backend is None else partial(sdpa_kernel, backend), foreign=True)


def cupy_provider() -> Provider:
    """Returns a provider of softmax attention in CuPy. Its matrix products have no bfloat16: it converts to float16, which has
    the same size and speed."""

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
    """Returns a provider for an operator whose weights are `of_score(q.k / sqrt(d))` times a factor.

    `needs`: the name (module.attribute) that must be importable.
    """

    def weight(product: Tensor, pairs: Pairs) -> Tensor:
        return of_score(product / pairs.case.head_dim**0.5) * factor(pairs)

    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        return call(q, k, v)

    missing = partial(peers.missing, needs)
    return Provider(name, attend, weight, lambda case: None, missing=missing, foreign=True, note=note, **options)


def fla_provider(name: str, operator: str, of_score: Callable[[Tensor], Tensor], note: str, **options) -> Provider:
    return peer_provider(name, peers.fla(operator), of_score, operator, note, **options)


def layer_provider(name: str) -> Provider:
    """Returns a provider for a layer of `benchmarks.learn`, which is measured only as part of a model."""

    def no_operator(*_: object, **__: object) -> Tensor:
        raise RuntimeError(f"{name} is a layer of a model: it has no function of q, k and v")

    return Provider(name, no_operator, no_operator, lambda case: None, context=fastest_softmax, note=VARIANTS[name].title)


def _taylor(s: Tensor) -> Tensor:
    return 1 + s + 0.5 * s * s


def _retention_decay(pairs: Pairs) -> Tensor:
    """Returns the factor (1 - 2^(-5 - head))^distance of the weights."""
    head = (pairs.heads % pairs.case.heads).double()
    return (1 - 2.0 ** (-5.0 - head))[:, None, None] ** pairs.distance.clamp(min=0)


def _log_decay(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Returns decays like those of a gate; the median decay is 3.4% per token."""
    generator = torch.Generator(device).manual_seed(case.tokens)
    x = torch.randn(case.batch, case.heads, case.tokens, generator=generator, device=device)
    return {"log_decay": -0.05 * F.softplus(x)}


def _decayed(pairs: Pairs) -> Tensor:
    """Returns the exponential of the sum of decays over tokens j + 1 to i."""
    sums = pairs.tensors["log_decay"].cumsum(-1)
    rows = pairs.distance[:, 0]  # i - 0
    between = sums[:, rows, None] - sums[:, None, :]
    return torch.where(pairs.distance >= 0, between, 0.0).exp()


def _log_input_gate(case: Case, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(case.tokens + 1)
    return {"log_input_gate": torch.randn(case.batch, case.heads, case.tokens, generator=generator, device=device)}


def _decays_and_gates(case: Case, device: torch.device) -> dict[str, Tensor]:
    return _log_decay(case, device) | _log_input_gate(case, device)


def _gated(pairs: Pairs) -> Tensor:
    """Returns the exponential of the gate of each key; 1 in the case's window, which is exact."""
    return torch.where(pairs.distance.abs() < pairs.case.window, 1.0, pairs.tensors["log_input_gate"].exp()[:, None])


def _decayed_and_gated(pairs: Pairs) -> Tensor:
    return _decayed(pairs) * _gated(pairs)


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
    """Computes attention of packed sequences of equal lengths as a batch; for token-major tensors the batch is a view."""
    shape = (case.sequences, case.tokens // case.sequences, case.heads, case.head_dim)
    o = PROVIDERS["fastmax"].call(*(x.transpose(1, 2).reshape(shape).transpose(1, 2) for x in (q, k, v)), case)
    return o.transpose(1, 2).reshape(1, case.tokens, case.heads, case.head_dim).transpose(1, 2)


def _prefill(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    options = {"dtype": q.dtype, "device": q.device, "p": case.p, **score_options(case, case.p)}
    return fastmax.decoding.prefill(q, k, v, fastmax.decoding.init_state(case.batch, case.heads, case.head_dim, **options))[0]


def _half(x: Tensor, case: Case) -> Tensor:
    return x[..., : case.head_dim // 2]


def _narrow_keys(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    """Takes half of the columns of q and k. The gradients of the others, zeros, are written too."""
    return PROVIDERS["fastmax"].call(_half(q, case), _half(k, case), v, case)


def _flash_window(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    return fastmax.flash_attention(q, k, v, causal=case.causal, scale=case.head_dim**-0.5, window=case.window)


def _windowed_softmax(product: Tensor, pairs: Pairs) -> Tensor:
    return (product / pairs.case.head_dim**0.5).exp() * (pairs.distance.abs() < pairs.case.window)


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
        fastmax_provider("fastmax_decay", factor=_decayed, tensors=_log_decay),
        fastmax_provider("fastmax_exact_window", exact_window=True),
        fastmax_provider("fastmax_decay_window", exact_window=True, factor=_decayed, tensors=_log_decay),
        fastmax_provider("fastmax_gate", factor=_gated, tensors=_log_input_gate),
        fastmax_provider("fastmax_decay_gate", factor=_decayed_and_gated, tensors=_decays_and_gates),
        fastmax_provider("fastmax_decay_window_gate", exact_window=True, factor=_decayed_and_gated, tensors=_decays_and_gates),
        fastmax_provider("fastmax_unbounded", score=unbounded_options),
        fastmax_provider("fastmax_packed", factor=_same_sequence, tensors=_random_lengths),
        fastmax_provider("fastmax_packed_alike", factor=_same_sequence, tensors=_equal_lengths),
        replace(
            fastmax_provider("fastmax_batched", factor=_same_sequence, tensors=_equal_lengths),
            call=_batch_of_sequences,
        ),
        replace(fastmax_provider("fastmax_prefill"), call=_prefill),
        replace(fastmax_provider("fastmax_narrow_keys"), call=_narrow_keys, rows=_half, arithmetic=lambda case: None),
        Provider("fastmax_flash_window", _flash_window, _windowed_softmax, lambda case: None),
        sdpa_provider("sdpa"),
        sdpa_provider("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION),
        sdpa_provider("sdpa_flash", SDPBackend.FLASH_ATTENTION),
        sdpa_provider("sdpa_efficient", SDPBackend.EFFICIENT_ATTENTION),
        softmax_provider("plain", peers.plain, note="the (n, n) matrix is in memory"),
        softmax_provider("plain_numpy", peers.array_attention("numpy")),
        cupy_provider(),
        # The same function as fastmax with p = 2 at temperature sqrt(d), except for 1e-6 in the denominator.
        fla_provider("fla_based", "fla.ops.based.parallel_based", _taylor, "same function as p = 2, quadratic algorithm"),
        fla_provider("fla_based_chunk", "fla.ops.based.fused_chunk_based", _taylor, "same function as p = 2, head_dim to 16"),
        # With `normalize=True` it would divide by sums that vanish on these inputs.
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
