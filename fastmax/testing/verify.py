"""`python -m fastmax.testing.verify [--device cuda]` compares the custom gradient and autograd with the definition in float64.

It prints a table of the relative errors (Frobenius norm) of the output and of every gradient. The exit status is 1 if an error
is above its limit: twice the error of the definition in plain PyTorch at the same precision, plus a rounding floor.

`--random N` checks N random configurations in place of the table, and prints the worst error of each kind. On a GPU each
configuration runs twice on memory full of NaN and must give the same bits. `--hopper` changes the configurations to ones that
the Hopper kernels cover, fails if other kernels run, and prints the kernels. `--processes P` shares the work among P processes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmax.functional import fastmax_attention, flash_attention
from fastmax.ops import extension
from fastmax.testing.reference import naive_attention, naive_softmax_attention

# Added to twice the error of the plain formula, which may be 0 by chance.
FLOOR = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6}

# Smallest limit for a random configuration. For half types: one rounding of an output to its dtype, which plain PyTorch avoids
# where few numbers are summed. For TF32: one rounding of each operand of two products, because cuBLAS does not use TF32 for the
# smallest sizes. For float64: another order of summation, because the definition is not more exact.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tf32": 2.0**-8, "float32": 1e-6, "float64": 1e-12}
# Relative error of weights per unit of the largest log-sum, by dtype. A float32 log-sum L has an error of up to 2^-24 L, and so
# has every weight exp(s - L) that is computed from it, in the backward of softmax and in the merge of an exact window. Plain
# PyTorch has no such numbers: its sums are relative to the largest score. With TF32 products the scores have larger errors.
ROUNDING_OF_LOG_SUM = {dtype: 2.0**-53 if dtype == torch.float64 else 2.0**-24 for dtype in FLOOR}
# The linear algorithm sums features that cancel (docs/algorithm.md). Terms up to this many times f do not raise the limit.
CANCELLATION = 16.0
_NUMBERS_PER_KEY = ("log_decay", "log_input_gate")
# Matches the calls of attention operators in the output of FASTMAX_DEBUG, and not those that prepare their inputs.
ATTENTION_CALL = re.compile(r"^fastmax::(\w+): [\w ]+, (\w+): b \d.*, head_dim_qk ", re.MULTILINE)
# From this error on, the plain formula gives no limit: sums or weights left the range of float16. The limit is then this number
# of roundings.
PLAIN_FAILED = 0.1
ROUNDINGS_WHERE_PLAIN_FAILED = 8


class Case(NamedTuple):
    """A configuration: sizes and dtype of random q, k and v, and options of `fastmax_attention`.

    Attributes:
        layout: memory layout, one of `LAYOUTS`.
        padding: passes an `attention_mask` that hides some keys of every sequence, and all keys of the first.
        noise: passes a `drop_noise`.
        rpe: passes a random `rpe_matrix`.
        decay: passes a `log_decay`, with fast and slow decays by head, and tokens without decay or with a reset.
        gate: passes a `log_input_gate`, with ordinary, large and very small factors.
        sequences: number of packed sequences, of which some may be empty; 0: no `cu_seqlens`.
        magnitude: factor of q and k. None: their rows are scaled to lengths below 0.9 instead, so that |q.k| < 1.
        precision: argument of `torch.set_float32_matmul_precision`.
        softmax: checks `flash_attention` and its log-sum-exp instead.
        positive: takes the absolute values of q and k, so that scores are positive.
    """

    name: str
    options: dict
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    queries: int = 300
    keys: int = 300
    head_dim: int = 32
    value_dim: int = 32
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    padding: bool = False
    noise: bool = False
    rpe: bool = False
    decay: bool = False
    gate: bool = False
    sequences: int = 0
    magnitude: float | None = 1.0
    precision: str = "highest"
    softmax: bool = False
    positive: bool = False

    @property
    def mode(self) -> str:
        """The arithmetic: the dtype, or "tf32"."""
        if self.dtype == torch.float32 and self.precision != "highest":
            return "tf32"
        return str(self.dtype).removeprefix("torch.")

    @property
    def operator(self) -> tuple[str, str]:
        """The kind of operator, by which the table of random configurations is divided."""
        return ("softmax", "") if self.softmax else (self.options["algorithm"], f"p={self.options['p']}")


class Errors(NamedTuple):
    """Relative errors of one tensor against float64; `tensor` is "o", "lse", or the name of an input for its gradient."""

    tensor: str
    custom: float
    autograd: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether both errors are within the limit; False if one is NaN."""
        return self.custom <= self.allowed and self.autograd <= self.allowed


def cases() -> list[Case]:
    """Returns the configurations of the table, each for the code path in its name. 300 tokens are more than a chunk, and no
    multiple of it."""
    options = {"causal": True, "temperature": 32**0.5}
    ball = {"normalize": "token", "temperature": 2.0}  # keeps 1 + s positive, which p = 1 needs
    table = [
        Case(
            f"p={p} {algorithm} {'causal' if causal else 'full'}",
            {**(options if p == 2 else ball), "p": p, "algorithm": algorithm, "causal": causal},
        )
        for p, algorithm, causal in itertools.product((2, 1), ("quadratic", "linear"), (True, False))
    ]
    table += [
        Case(f"{str(dtype).removeprefix('torch.')} {algorithm}", {**options, "algorithm": algorithm}, dtype=dtype)
        for dtype in (torch.float64, torch.float16, torch.bfloat16)
        for algorithm in ("quadratic", "linear")
    ]
    for algorithm in ("quadratic", "linear"):
        here = {**options, "algorithm": algorithm}
        table += [
            Case(f"fewer queries than keys, {algorithm}", here, queries=70),
            Case(f"more queries than keys, {algorithm}", {**here, "causal": False}, keys=70),
            Case(f"grouped queries, {algorithm}", here, heads=6),
            Case(f"one kv head, value_dim 48, {algorithm}", here, heads=4, kv_heads=1, value_dim=48),
            Case(f"odd head_dim 19, {algorithm}", here, head_dim=19),
            Case(f"token-major (b, n, h, d), {algorithm}", here, layout="token-major"),
            Case(f"padding, {algorithm}", {**here, "causal": False}, padding=True),
            Case(f"padding, causal, {algorithm}", here, padding=True),
            Case(f"dropout noise, {algorithm}", {**here, "dropout": 0.3}, noise=True),
            Case(f'normalize="sequence", {algorithm}', {**here, "normalize": "sequence", "lim": 2.0, "temperature": 1.0}),
            Case(f'normalize="token", {algorithm}', {**here, "normalize": "token", "lim": 3.0, "temperature": 2.0}),
            Case(f"a0, a1, a2 = 2, 0.5, 0.3, {algorithm}", {**here, "a0": 2.0, "a1": 0.5, "a2": 0.3}),
            Case(f"sinusoidal rpe, {algorithm}", {**here, "rpe_matrix": "sinusoidal"}),
            Case(f"one query, {algorithm}", here, queries=1),
            Case(f"decay, {algorithm}", {**here, "return_lse": True}, decay=True),
            Case(f"decay, grouped, fewer queries, {algorithm}", here, queries=70, heads=6, decay=True),
            Case(f"gates, {algorithm}", {**here, "return_lse": True}, gate=True),
            Case(
                f"gates, decay, exact window, {algorithm}",
                {**here, "exact_window": 50},
                heads=6,
                decay=True,
                gate=True,
            ),
            Case(f"exact window, {algorithm}", {**here, "exact_window": 50, "return_lse": True}),
            Case(f"exact window, full, {algorithm}", {**here, "exact_window": 50, "causal": False}),
            Case(f"packed sequences, {algorithm}", here, batch=1, sequences=7),
            Case(f"packed, decay, exact window, {algorithm}", {**here, "exact_window": 9}, batch=1, decay=True, sequences=7),
        ]
    table.append(Case("packed sequences, full", {**options, "causal": False}, batch=1, sequences=7))
    table += [Case("rpe matrix", options, rpe=True), Case("rpe matrix, fewer queries", options, queries=70, rpe=True)]
    softmax = {"causal": True, "scale": 0.2}
    table += [
        Case(f"softmax, {str(dtype).removeprefix('torch.')}", softmax, dtype=dtype, softmax=True)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    ]
    table += [
        Case("softmax, full, more queries than keys", {}, keys=70, softmax=True),
        Case("softmax, grouped, fewer queries", softmax, queries=70, heads=6, value_dim=48, softmax=True),
        Case("softmax, padding, causal", softmax, padding=True, softmax=True),
        Case("softmax, window", {**softmax, "window": 50}, softmax=True),
        Case("softmax, window of two bounds, full", {"window": (20, 5)}, softmax=True),
        Case("softmax, decay", softmax, decay=True, softmax=True),
        Case("softmax, gates, window", {**softmax, "window": 50}, gate=True, softmax=True),
        Case("softmax, packed sequences", softmax, batch=1, sequences=7, softmax=True),
    ]
    return table


def run(
    function: Callable[..., Tensor | tuple[Tensor, Tensor]],
    tensors: dict[str, Tensor],
    options: dict,
    dtype: torch.dtype | None = None,
    poison: bool = False,
) -> dict[str, Tensor]:
    """Returns the outputs and gradients of `function` for the tensors cast to `dtype`, by name.

    The loss is a fixed random projection of the outputs. `poison` fills free device memory with NaN before the forward and
    before the backward.
    """
    q, v = tensors["q"], tensors["v"]
    dtype = dtype or q.dtype
    generator = torch.Generator(q.device).manual_seed(0)
    grad_o = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator, dtype=torch.float64, device=q.device).to(q.dtype)
    variables = [name for name in ("q", "k", "v", "rpe_matrix", *_NUMBERS_PER_KEY) if name in tensors]
    inputs = {name: x.to(dtype) if x.dtype == q.dtype else x for name, x in tensors.items()}
    for name in _NUMBERS_PER_KEY:  # never narrower than float32
        if name in tensors:
            inputs[name] = tensors[name].to(torch.promote_types(dtype, torch.float32))
    inputs |= {name: inputs[name].detach().requires_grad_() for name in variables}
    grad_o = grad_o.to(dtype)
    if poison:
        poison_free_memory(q.device)
    outputs = function(**inputs, **options)
    outputs = dict(zip(("o", "lse"), outputs if isinstance(outputs, tuple) else (outputs,), strict=False))
    projection = [grad_o] + [grad_o[..., 0].to(lse.dtype) for name, lse in outputs.items() if name == "lse"]
    if poison:
        poison_free_memory(q.device)
    grads = torch.autograd.grad(list(outputs.values()), [inputs[name] for name in variables], projection)
    return {name: x.detach() for name, x in outputs.items()} | dict(zip(variables, grads, strict=True))


def _softmax(**arguments: Any) -> tuple[Tensor, Tensor]:
    return flash_attention(**arguments, return_lse=True)


def implementation(softmax: bool) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """Returns the function to check: `fastmax_attention`, or `flash_attention` with its log-sum-exp."""
    return _softmax if softmax else fastmax_attention


def measure(tensors: dict[str, Tensor], options: dict, rounding: float | None = None, softmax: bool = False) -> list[Errors]:
    """Returns the errors of the outputs and of the gradient of each floating-point input.

    Args:
        tensors: q, k, v (4-d), and optionally `rpe_matrix`, `drop_noise`, `attention_mask`, `log_decay`, `log_input_gate` and
            `cu_seqlens`.
        options: the other arguments of `fastmax_attention` (or `flash_attention`), without `use_custom_gradient`.
        rounding: the smallest limit (see ROUNDING). It also determines the limit where the plain formula failed.
        softmax: whether to check `flash_attention`.
    """
    q = tensors["q"]
    plain_options = {name: value for name, value in options.items() if name != "algorithm"}
    by_definition, checked = naive_softmax_attention if softmax else naive_attention, implementation(softmax)
    exact = run(by_definition, tensors, plain_options, torch.float64)
    plain = run(by_definition, tensors, plain_options)
    custom = run(checked, tensors, {**options, "use_custom_gradient": True})
    autograd = run(checked, tensors, {**options, "use_custom_gradient": False})
    of_log_sums = rounding_of_scores(q) * largest_log_sum(tensors, plain_options, softmax)
    of_outputs = lost_to_rounded_outputs(tensors, plain_options, softmax, exact["o"])
    natural = math.sqrt(exact["o"].numel())  # the expected norm of grad_o
    longest = tensors["v"].double().norm(dim=-1).max().item() if tensors["v"].numel() else 1.0

    def size(name: str) -> float:
        """Returns the size that errors are relative to: the norm of the tensor, or if the terms grad_o . v cancel nearly
        completely (few keys, or an exact value of zero) the size of those terms."""
        norm = exact[name][exact[name].isfinite()].norm().item()
        if norm <= 1e-10 * natural:
            return max(natural * longest, 1.0)
        return max(norm, 0.1 * natural * longest) if name in "qk" and tensors["k"].shape[2] <= 2 else norm

    def error(result: dict[str, Tensor], name: str) -> float:
        x, y = result[name].double(), exact[name]
        return torch.where(x == y, 0.0, x - y).norm().item() / size(name)  # both are -inf if there is no key

    def allowed(name: str) -> float:
        plain_error = error(plain, name)
        dtype = torch.finfo(q.dtype)  # subnormal numbers are rounded to multiples of the smallest one
        more = 0.5 * dtype.smallest_normal * dtype.eps * math.sqrt(exact[name].numel()) / size(name)
        if name != "lse":
            more += of_log_sums
        more += 2.0 * of_outputs.get(name, 0.0) / size(name)
        if rounding is None:
            return 2.0 * plain_error + FLOOR[q.dtype] + more
        if not plain_error < PLAIN_FAILED:
            return ROUNDINGS_WHERE_PLAIN_FAILED * rounding + more
        return max(2.0 * plain_error + FLOOR[q.dtype], rounding) + more

    return [Errors(name, error(custom, name), error(autograd, name), allowed(name)) for name in exact]


def lost_to_rounded_outputs(tensors: dict[str, Tensor], options: dict, softmax: bool, o: Tensor) -> dict[str, float]:
    """Returns the error of the gradients, by name, that results from saving o in a half dtype; Frobenius norm.

    A rounding error of a row of o changes grad_o . o. This change acts on the gradients like a gradient of the row's log-sum of
    weights. If one key has nearly all of the weight, the true gradient is nearly zero and the error dominates.
    """
    dtype = tensors["q"].dtype
    if dtype not in (torch.float16, torch.bfloat16) or not o.numel():
        return {}
    wide = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    leaves = {name: wide[name].requires_grad_() for name in ("q", "k", "rpe_matrix", *_NUMBERS_PER_KEY) if name in wide}
    by_definition = naive_softmax_attention if softmax else naive_attention
    lse = by_definition(**wide, **(options if softmax else {**options, "return_lse": True}))[1]
    signs = torch.randint(2, lse.shape, generator=torch.Generator().manual_seed(0)).to(lse) * 2 - 1
    changes = 0.25 * torch.finfo(dtype).eps * o.norm(dim=-1) * signs  # half of the largest rounding of each element
    seen = lse.isfinite()
    grads = torch.autograd.grad((lse[seen] * changes[seen]).sum(), list(leaves.values()), materialize_grads=True)
    return {name: x.norm().item() for name, x in zip(leaves, grads, strict=True)}


def rounding_of_scores(q: Tensor) -> float:
    """Returns the relative error of a score in an exponential, or of the log of a sum."""
    if q.is_cuda and q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 2.0**-11
    return ROUNDING_OF_LOG_SUM[q.dtype]


def largest_log_sum(tensors: dict[str, Tensor], options: dict, softmax: bool) -> float:
    """Returns the largest magnitude of a row's log-sum of weights, by definition; 0 if no weight is an exponential."""
    if not softmax and not options.get("exact_window"):
        return 0.0
    wide = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    by_definition = naive_softmax_attention if softmax else naive_attention
    lse = by_definition(**wide, **(options if softmax else {**options, "return_lse": True}))[1]
    lse = lse[lse.isfinite()]
    return lse.abs().max().item() if lse.numel() else 0.0


def token_major(x: Tensor) -> Tensor:
    """Returns x (b, h, n, d) in the memory layout (b, n, h, d)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def unaligned(x: Tensor) -> Tensor:
    """Returns x as columns of a wider tensor, whose rows do not start at multiples of 16 bytes."""
    return torch.nn.functional.pad(x, (1, 2))[..., 1:-2]


def packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Returns q, k and v as slices of one tensor (b, n, h + 2 hk, d), or of two if n != m, as in a model's projections.

    Needs d == dv.
    """
    together = [(q, k, v)] if q.shape[2] == k.shape[2] else [(q,), (k, v)]
    slices = []
    for part in together:
        joint = torch.cat([x.transpose(1, 2) for x in part], dim=2)
        slices += [x.transpose(1, 2) for x in joint.split([x.shape[1] for x in part], dim=2)]
    return tuple(slices)


LAYOUTS = ("contiguous", "token-major", "packed", "unaligned")


def random_tensors(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
    """Returns the tensors of a case, for `measure`. They are the same on all devices of one kind."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device=device)

    def rows(*shape: int) -> Tensor:
        x = normal(*shape).abs() if case.positive else normal(*shape)
        if case.magnitude is not None:
            return case.magnitude * x
        length = 0.9 * torch.rand(*shape[:-1], 1, generator=generator, dtype=torch.float64, device=device)
        return x * length / x.norm(dim=-1, keepdim=True)

    tensors = {
        "q": rows(case.batch, case.heads, case.queries, case.head_dim),
        "k": rows(case.batch, case.kv_heads, case.keys, case.head_dim),
        "v": normal(case.batch, case.kv_heads, case.keys, case.value_dim),
    }
    if case.noise:
        tensors["drop_noise"] = normal(case.batch, case.heads, case.queries, case.value_dim)
    tensors = {name: x.to(case.dtype) for name, x in tensors.items()}
    if case.layout == "packed":
        tensors |= dict(zip("qkv", packed(*(tensors[name] for name in "qkv")), strict=True))
    elif case.layout != "contiguous":
        change = {"token-major": token_major, "unaligned": unaligned}[case.layout]
        tensors = {name: change(x) for name, x in tensors.items()}
    if case.rpe:
        tensors["rpe_matrix"] = normal(case.queries + case.keys - 1, case.head_dim).to(case.dtype)
    if case.padding:
        mask = torch.rand(case.batch, case.keys, generator=generator, device=device) < 0.7
        mask[-1, : case.keys // 3] = False  # causal: the first queries see no key
        if case.batch > 1:
            mask[0] = False
        tensors["attention_mask"] = mask
    if case.decay:
        tensors["log_decay"] = _random_decay(case, generator)
    if case.sequences:
        cuts = torch.randint(0, case.keys + 1, (case.sequences - 1,), generator=generator, device=device).sort().values
        cuts = torch.nn.functional.pad(cuts, (1, 1))
        cuts[-1] = case.keys
        tensors["cu_seqlens"] = cuts.int()
    if case.gate:
        tensors["log_input_gate"] = _random_gate(case, generator)
    return tensors


def _random_gate(case: Case, generator: torch.Generator) -> Tensor:
    """Returns gates (batch, kv heads, keys) of which most are within a factor of a hundred. Some are larger or very small."""
    shape, device = (case.batch, case.kv_heads, case.keys), generator.device
    gate = 2.0 * torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
    kind = torch.rand(shape, generator=generator, dtype=torch.float64, device=device)
    gate = torch.where(kind < 0.05, -20.0, torch.where(kind > 0.98, 6.0, gate))
    return gate.to(torch.promote_types(case.dtype, torch.float32))


def _random_decay(case: Case, generator: torch.Generator) -> Tensor:
    """Returns decays (batch, kv heads, keys) with half-lives from one to 10,000 tokens. Some tokens have no decay or a reset.

    With padding the strongest decay is exp(-5): otherwise the keys that remain visible could all have weight 0 in float32.
    """
    shape, device = (case.batch, case.kv_heads, case.keys), generator.device
    rate = math.log(2.0) * 10.0 ** (-4.0 * torch.rand(*shape[:2], 1, generator=generator, dtype=torch.float64, device=device))
    gate, kind = (torch.rand(shape, generator=generator, dtype=torch.float64, device=device) for _ in range(2))
    log_decay = -rate * 2.0 * gate
    for begin, end, value in ((0.0, 0.1, 0.0), (0.1, 0.11, -5.0 if case.padding else -50.0), (0.11, 0.12, -math.inf)):
        if not (case.padding and value == -math.inf):
            log_decay = torch.where((kind >= begin) & (kind < end), value, log_decay)
    return log_decay.to(torch.promote_types(case.dtype, torch.float32))


# ---- random configurations


class Limits(NamedTuple):
    """Limits of a random configuration: (query, key) pairs of all heads, elements of a tensor, head dim, tokens."""

    pairs: int
    elements: int
    head_dim: int
    tokens: int


# The definition has several float64 tensors with all weights: 2**22 of them are 32 MB.
_LIMITS = {"cpu": Limits(2**16, 2**16, 40, 1100)}
_OTHER_DEVICES = Limits(2**22, 2**22, 256, 4200)
_MIN_ROWS = 128  # with fewer queries or keys in total, the plain error would vary by chance


def random_case(index: int, seed: int, device: torch.device | str) -> Case:
    """Returns configuration number `index`, drawn with the seed `seed + index`."""
    device = torch.device(device)
    draw = random.Random(seed + index)
    limits = _LIMITS.get(device.type, _OTHER_DEVICES)

    def chance(probability: float) -> bool:
        return draw.random() < probability

    def between(low: float, high: float) -> float:
        """Draws from a log-uniform distribution."""
        return math.exp(draw.uniform(math.log(low), math.log(high)))

    def tokens() -> int:
        if chance(0.4):  # near the sizes of the kernels' tiles and chunks
            return min(
                limits.tokens,
                draw.choice((16, 32, 64, 128, 256, 512, 1024, 2048)) * draw.choice((1, 1, 3)) + draw.choice((-1, 0, 1)),
            )
        return round(between(1, limits.tokens))

    def head_dim() -> int:
        native = [d for d in (16, 32, 64, 96, 128, 256) if d <= limits.head_dim]
        if chance(0.6):
            return draw.choice(native)
        return round(between(1, limits.head_dim)) | chance(0.5)  # odd in at least half of the cases

    causal, p = chance(0.6), draw.choice((1, 2))
    algorithm = draw.choice(("quadratic", "linear", "linear", "auto"))
    dtypes = [(torch.float32, "highest"), (torch.float16, "highest"), (torch.bfloat16, "highest")]
    dtypes.append((torch.float64, "highest") if device.type == "cpu" else (torch.float32, "high"))
    dtype, precision = draw.choice(dtypes)

    d = min(limits.head_dim, head_dim())
    dv = d if chance(0.6) else min(limits.head_dim, head_dim())
    sinusoidal = chance(0.1)
    group, hk = (1, 1) if chance(0.3) else (draw.choice((1, 1, 2, 3, 4)), draw.choice((1, 1, 2, 3, 5)))
    h = group * hk
    pairs = limits.pairs // h
    if sinusoidal:  # the definition has a row of the rpe matrix for every pair
        d, pairs = min(d, 64), pairs // 16
    n, m = tokens(), tokens()
    if chance(0.5):
        m = n
    if causal:
        n, m = min(n, m), max(n, m)
    if n * m > pairs:
        longest = math.isqrt(pairs)
        square = draw.randint(longest // 2, longest)
        n, m = (square, square) if n == m else (max(1, min(n, pairs // m)), m)
    # d * d: autograd saves the features of a chunk, d (d + 1) / 2 per row.
    most = max(1, min(pairs // (n * m), limits.elements // (h * max(n, m) * max(d, dv, d * d // 64))))
    b = max(min(most, draw.choice((1, 1, 2, 3, 8))), math.ceil(_MIN_ROWS / (h * n)), math.ceil(_MIN_ROWS / (hk * m)))

    options: dict = {"causal": causal, "p": p, "algorithm": algorithm}
    magnitude: float | None = None if p == 1 else 1.0
    normalize = draw.choice((False, False, False, False, True, "sequence", "token"))
    reach = 0.81  # largest |q.k| if magnitude is None
    if normalize:
        options |= {"normalize": normalize, "lim": round(draw.uniform(0.3, 0.9) if p == 1 else draw.uniform(0.3, 3.0), 3)}
    if sinusoidal:
        options["rpe_matrix"] = "sinusoidal"
        reach += 0.9 * math.sqrt(d / 2 + 1)
    if p == 1:  # |s| < 1, so that f stays positive
        options["temperature"] = reach * between(1.0, 4.0)
    else:
        options["temperature"] = between(0.5, 2.0) * (1.0 if normalize else math.sqrt(d))
        # Scores of 25, so f is in the hundreds. Not for the linear algorithm: its features cancel where |q||k| is large and f
        # is not.
        if algorithm == "quadratic" and not normalize and chance(0.3):
            magnitude = 5.0
    if chance(0.4):
        a0, a2 = draw.uniform(1.0, 2.0), draw.uniform(0.3, 1.0)
        a1 = draw.uniform(-0.8, 0.8) * (1.0 if p == 1 else math.sqrt(4.0 * a0 * a2))
        options |= {"a0": round(a0, 3), "a1": round(a1, 3), "a2": round(a2, 3)}
    options["temperature"] = round(options["temperature"], 3)
    noise = chance(0.25)
    if noise:
        options["dropout"] = round(draw.uniform(0.05, 0.6), 3)
    layout = draw.choice(LAYOUTS if d == dv else [x for x in LAYOUTS if x != "packed"])
    padding = chance(0.25)
    positive = p == 2 and not sinusoidal and chance(0.25)
    if positive:  # f may have real roots, or no quadratic term: it is positive for positive scores
        a0, a2 = draw.uniform(1.0, 2.0), draw.choice((0.0, draw.uniform(0.0, 0.5)))
        options |= {"a0": round(a0, 3), "a1": round(draw.uniform(1.0, 2.0) * math.sqrt(4.0 * a0 * max(a2, 0.25)), 3)}
        options["a2"] = round(a2, 3)

    def window() -> int:
        return draw.choice((1, 2, 63, 64, 65, round(between(1, 2 * m)), round(between(1, 2 * m))))

    softmax = not sinusoidal and chance(0.15)
    decay = causal and chance(0.35)
    sequences = 0
    one_entry = n == m and h * n >= _MIN_ROWS <= hk * m
    if one_entry and (causal or softmax or algorithm != "linear") and chance(0.6):
        b, sequences = 1, draw.choice((1, 2, 3, 8, 30))
    if softmax:
        options = {"causal": causal, "scale": round(1.0 / options["temperature"], 3)}
        noise = positive = False
        if chance(0.6):
            # At least two keys: with one, the gradient of its score is 0, and only rounding would be measured.
            size = max(2, window())
            options["window"] = draw.choice((size, (-1, 0), (size, 0), (size, window()), (size, -1)))
    else:
        if n <= m and chance(0.35):
            options["exact_window"] = window()
        if chance(0.3):
            options["return_lse"] = True
    gate = causal and chance(0.25)
    return Case(
        f"random {index}", options, batch=b, heads=h, kv_heads=hk, queries=n, keys=m, head_dim=d, value_dim=dv, dtype=dtype,
        layout=layout, padding=padding, noise=noise, decay=decay, gate=gate, sequences=sequences, magnitude=magnitude,
        precision=precision, softmax=softmax, positive=positive,
    )  # fmt: skip


def for_hopper(case: Case) -> Case | None:
    """Returns the configuration, changed so that the Hopper kernels cover it (docs/cuda.md); None if it differs too much.

    The algorithm stays the one that the scores were drawn for: with large scores the features of the linear algorithm cancel.
    """
    options, width = case.options, max(case.head_dim, case.value_dim)
    if case.rpe or options.get("rpe_matrix") or options.get("exact_window") or width > 128:
        return None
    if not case.softmax:
        of_order1 = options["causal"] and not (case.padding or case.decay or case.gate or case.sequences)
        is_linear = options["algorithm"] == "linear" and (options["p"] == 2 or of_order1)
        if is_linear and (64 < width <= 96 or (options["p"] == 1 and width <= 32)):  # widths without a linear kernel
            wider = case.head_dim + 32
            if not options.get("normalize"):
                temperature = options["temperature"] * math.sqrt(wider / case.head_dim)  # keeps the size of the scores
                options = options | {"temperature": round(temperature, 3)}
            case = case._replace(head_dim=wider, value_dim=case.value_dim + 32)
        options = options | {"algorithm": "linear" if is_linear else "quadratic"}
    return case._replace(options=options, dtype=torch.bfloat16, precision="highest")


def hopper_indices(count: int, seed: int, device: torch.device | str) -> list[int]:
    """Returns the indices of the first `count` configurations of a seed that `for_hopper` accepts."""
    brought = (index for index in itertools.count() if for_hopper(random_case(index, seed, device)) is not None)
    return list(itertools.islice(brought, count))


@contextmanager
def kernels_taken() -> Iterator[set[str]]:
    """Yields a set that at the end holds the kernels of the calls inside, such as "backward: quadratic_sm90".

    The library prints them to stderr, which is redirected to a file meanwhile. All other output to stderr follows at the end.
    """
    taken: set[str] = set()
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        extension.set_debugging(True)
        try:
            yield taken
        finally:
            extension.set_debugging(False)
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            printed = file.read()
            taken |= {": ".join(call) for call in ATTENTION_CALL.findall(printed)}
            sys.stderr.writelines(line for line in printed.splitlines(keepends=True) if not line.startswith("fastmax:"))


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


@contextmanager
def advice_ignored() -> Iterator[None]:
    """Suppresses the warnings about options. The configurations and their tensors are such that f is positive."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fastmax: ", RuntimeWarning)
        yield


def poison_free_memory(device: torch.device) -> None:
    """Fills all free blocks of torch's CUDA allocator for the current stream with bytes that are NaN in every float dtype.

    torch's `fill_uninitialized_memory` fills tensors that PyTorch creates. This function fills the memory itself, whichever
    code allocates it next. A request of exactly the size of a block makes the allocator return that block.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch.cuda.current_stream(index).cuda_stream
    small = 2**20  # larger requests come from segments of their own
    blocks = []
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != index or segment["stream"] != stream or tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            continue
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                continue
            if segment["segment_type"] == "large":
                blocks.append(block["size"])
            else:
                blocks += [small] * (block["size"] // small) + [block["size"] % small]
    # Largest first: otherwise the allocator could split a larger block for a smaller request.
    held = [torch.empty(size, dtype=torch.uint8, device=device).fill_(255) for size in sorted(blocks, reverse=True) if size > 0]
    del held


def cancellation(tensors: dict[str, Tensor], options: dict) -> float:
    """Returns how many times larger the terms that the linear algorithm sums are than f(q.k), for typical rows. 1 for the
    quadratic algorithm."""
    options = {"algorithm": "auto", "p": 2, "temperature": 1.0, "lim": 1.0} | options
    if options["algorithm"] == "quadratic":
        return 1.0
    d = tensors["q"].shape[-1]
    q, k = (tensors[name].double().square().sum(-1).mean().sqrt().item() for name in "qk")
    if options.get("normalize"):
        q, k = min(q, options["lim"]), min(k, options["lim"])
    if "rpe_matrix" in options:  # sinusoidal: q and its rotation, k and d / 2 pairs of cosine and sine
        q, k = q * math.sqrt(2.0), math.hypot(k, math.sqrt(d / 2))
    s = q * k / options["temperature"]
    a0, a1, a2 = options.get("a0", 1.0), options.get("a1", 1.0), options.get("a2", 0.5) if options["p"] == 2 else 0.0
    return (a0 + abs(a1) * s + a2 * s * s) / (a0 + a2 * s * s / d)


def difference(x: Tensor, other: Tensor) -> str:
    """Describes the difference of two tensors: first and last index of each dimension, and the largest difference."""
    differs = x != other
    at, change = differs.nonzero(), (x.double() - other.double())[differs].abs().max().item()
    first, last = at.amin(0).tolist(), at.amax(0).tolist()
    return f"in {len(at)} numbers from {first} to {last}, by at most {change:.1e}"


class Outcome(NamedTuple):
    """The result of a random configuration: the largest error of the custom gradient over its limit, and all faults."""

    share: float
    wrong: list[str]


def check(case: Case, device: torch.device | str, seed: int) -> Outcome:
    """Checks a configuration against float64 and, on a GPU, against a second run on poisoned memory.

    `seed` draws the tensors.
    """
    device = torch.device(device)
    with matmul_precision(case.precision), advice_ignored():
        tensors = random_tensors(case, device, seed)
        cancels = not (case.softmax or case.positive)
        factor = max(1.0, cancellation(tensors, case.options) / CANCELLATION) if cancels else 1.0
        errors = measure(tensors, case.options, ROUNDING[case.mode] * factor, case.softmax)
        wrong = [
            f"{'' if row.tensor in ('o', 'lse') else 'grad of '}{row.tensor}: custom gradient {row.custom:.2e}, "
            f"autograd {row.autograd:.2e}, allowed {row.allowed:.2e}"
            for row in errors
            if not row.passed
        ]
        if device.type == "cuda":
            custom = {**case.options, "use_custom_gradient": True}
            first = run(implementation(case.softmax), tensors, custom, poison=True)
            kept = {name: x.clone() for name, x in first.items()}
            second = run(implementation(case.softmax), tensors, custom, poison=True)
            for name, x in first.items():
                if not torch.equal(x.nan_to_num(), kept[name].nan_to_num()):
                    wrong.append(f"{name}: written to by a later call, {difference(x, kept[name])}")
                elif not (x.isfinite() | ((x == -math.inf) if name == "lse" else False)).all():
                    wrong.append(f"{name}: not finite on poisoned memory")
                elif not torch.equal(x, second[name]):
                    wrong.append(f"{name}: other bits when repeated, {difference(x, second[name])}")
    shares = [row.custom / row.allowed for row in errors]
    return Outcome(math.inf if any(map(math.isnan, shares)) else max(shares), wrong)


def check_random(index: int, seed: int, device: str, hopper: bool) -> tuple[Case, Outcome, set[str]]:
    """Checks configuration number `index`; returns it, the result, and with `hopper` the kernels that ran."""
    case = random_case(index, seed, device)
    if not hopper:
        return case, check(case, device, seed + index), set()
    brought = for_hopper(case)
    if brought is None:
        raise ValueError(f"configuration {index} of seed {seed} is none for the Hopper kernels")
    with kernels_taken() as taken:
        outcome = check(brought, device, seed + index)
    if not taken or any(not name.endswith("_sm90") for name in taken):
        outcome.wrong.append(f"not on the Hopper kernels: {', '.join(sorted(taken)) or 'no kernels at all'}")
    return brought, outcome, taken


def outcomes(check_index: Callable, indices: Sequence[int], processes: int) -> Iterator:
    """Yields `check_index` of each index, in order."""
    if processes == 1:
        yield from map(check_index, indices)
        return
    threads = max(1, torch.get_num_threads() // processes)
    context = multiprocessing.get_context("spawn")  # CUDA does not work after a fork
    with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        yield from pool.map(check_index, indices)


def run_random(indices: Sequence[int], seed: int, device: str, hopper: bool = False, processes: int = 1) -> int:
    """Checks configurations, prints each failure and a table at the end; returns the number of failures."""
    worst: dict[tuple[str, str, str], tuple[float, int]] = {}
    kernels: Counter[str] = Counter()
    failed = 0
    one = partial(check_random, seed=seed, device=device, hopper=hopper)
    for index, (case, outcome, taken) in zip(indices, outcomes(one, indices, processes), strict=True):
        kernels.update(taken)
        if outcome.wrong:
            failed += 1
            print(f"FAILED {case}", *outcome.wrong, sep="\n    ")
            again = f"--device {device} --seed {seed} --only-index {index}{' --hopper' if hopper else ''}"
            print(f"    repeat it: python -m fastmax.testing.verify {again}", flush=True)
        key = (case.mode, *case.operator)
        if key not in worst or outcome.share > worst[key][0]:
            worst[key] = (outcome.share, index)
    print(f"{'':<22}{'worst of allowed':>18}{'index':>8}")
    for (mode, algorithm, p), (share, index) in sorted(worst.items()):
        print(f"{mode:<9}{algorithm:<10}{p:<3}{share:>18.0%}{index:>8}")
    for name, count in sorted(kernels.items()):
        print(f"{name:<40}{count:>8} configurations")
    print(f"{len(indices) - failed} of {len(indices)} random configurations within the limit (seed {seed}, {device})")
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fastmax.testing.verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="run only the configurations of the table whose name contains this")
    parser.add_argument("--random", type=int, metavar="N", help="check N random configurations instead of the table")
    parser.add_argument("--only-index", type=int, metavar="I", help="check only random configuration number I")
    parser.add_argument("--hopper", action="store_true", help="random configurations that the Hopper kernels must run")
    parser.add_argument(
        "--processes", type=int, default=1, metavar="P", help="processes that share the random configurations (default 1)"
    )
    args = parser.parse_args(arguments)
    if args.processes < 1:
        parser.error(f"--processes must be at least 1, got {args.processes}")
    is_random = args.random is not None or args.only_index is not None
    if not is_random and (args.hopper or args.processes > 1):
        parser.error(f"{'--hopper' if args.hopper else '--processes'} is for random configurations: --random or --only-index")
    if args.random is not None and args.random < 1:
        parser.error(f"--random must be at least 1, got {args.random}")
    if is_random:
        device = torch.device(args.device)
        reason = extension.problem(device) if device.type == "cuda" else None
        if args.hopper and (device.type != "cuda" or reason is not None):
            parser.error(f"--hopper must have the CUDA kernels: {reason or f'--device is {args.device}'}")
        if reason is not None:
            print(f"the CUDA kernels do not run, PyTorch operations are checked: {reason}")
        if args.only_index is not None:
            indices: Sequence[int] = [args.only_index]
        else:
            indices = hopper_indices(args.random, args.seed, device) if args.hopper else range(args.random)
        return 1 if run_random(indices, args.seed, args.device, args.hopper, args.processes) else 0
    chosen = [case for case in cases() if args.only in case.name]
    if not chosen:
        parser.error(f"no configuration is called {args.only!r}")

    print(f"relative error against float64 on {args.device}; 'of allowed' is the worst of the row, 100% is the limit")
    print(f"{'':<38}{'custom gradient':^36} {'autograd':^36}")
    columns = "".join(f"{name:>9}" for name in ("o", "grad_q", "grad_k", "grad_v"))
    print(f"{'configuration':<38}{columns} {columns} {'of allowed':>11}")
    failed = 0
    for case in chosen:
        with advice_ignored():
            rows = measure(random_tensors(case, args.device, args.seed), case.options, softmax=case.softmax)
        passed = all(row.passed for row in rows)
        failed += not passed
        shown = [row for row in rows if row.tensor not in ("lse", "rpe_matrix", *_NUMBERS_PER_KEY)]
        numbers = " ".join("".join(f"{getattr(row, which):>9.1e}" for row in shown) for which in ("custom", "autograd"))
        share = max(max(row.custom, row.autograd) / row.allowed for row in rows)
        print(f"{case.name:<38}{numbers} {share:>11.0%}{'' if passed else '  FAILED'}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} configurations within the limit")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
