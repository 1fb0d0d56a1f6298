"""`python -m fastmax.testing.verify [--device cuda]`: the custom gradient against autograd against the definition in float64.

Prints a table of relative errors (Frobenius norm) of the output and of every gradient; the exit status is 1 when one of them
is larger than allowed. Allowed is twice the error that the definition itself makes in plain PyTorch at the same precision,
plus a rounding floor.

`--random N` checks N configurations drawn at random in place of the table and prints the worst error of each kind. On a GPU
each of them must also give the same bits when it runs twice on memory full of NaN. `--hopper` brings them to what the Hopper
kernels cover, fails where other kernels run, and says which ones did; `--processes P` shares them among P processes.
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

# Added to twice the plain error, so that a case which the plain formula happens to get exactly right is not held to zero.
FLOOR = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6}

# No random configuration is held to less than this: one rounding of an output to its dtype, which plain PyTorch escapes where
# few numbers are summed; for TF32 one of each operand of two products, since cuBLAS takes no TF32 for the smallest; for float64
# another order of summation, since nothing more exact is there to compare with.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tf32": 2.0**-8, "float32": 1e-6, "float64": 1e-12}
# A float32 log-sum of size L is off by up to 2^-24 L, and so is every weight exp(s - L) made of it, in the backward of softmax
# and in the merge of an exact window; plain PyTorch, whose sums are relative to the largest score, has no such numbers. What
# weights lose for each unit of the largest log-sum, by dtype; where products are TF32, scores themselves lose more.
ROUNDING_OF_LOG_SUM = {dtype: 2.0**-53 if dtype == torch.float64 else 2.0**-24 for dtype in FLOOR}
# The linear algorithm adds up features that cancel (docs/algorithm.md): roundings of terms this much larger than f are nothing.
CANCELLATION = 16.0
# Of what FASTMAX_DEBUG prints, the operators of attention, and not what prepares their inputs.
ATTENTION_CALL = re.compile(r"^fastmax::(\w+): [\w ]+, (\w+): b \d.*, head_dim ", re.MULTILINE)
# From this error on the plain formula is no standard: sums or weights left the range of float16. Then so many roundings are.
PLAIN_FAILED = 0.1
ROUNDINGS_WHERE_PLAIN_FAILED = 8


class Case(NamedTuple):
    """One configuration: sizes and dtype of random q, k, v, and options of `fastmax_attention`.

    `softmax=True` checks `flash_attention` and its log-sum-exp in its place.

    `padding=True` hides some keys of every sequence, and all keys of the first; `noise=True` passes a `drop_noise`;
    `rpe=True` passes a random `rpe_matrix`; `decay=True` a `log_decay` with heads that forget fast and slowly and tokens that
    forget nothing or everything; `sequences` is the number of packed sequences (0: no `cu_seqlens`), some without a token.
    `layout` is a key of `LAYOUTS`. `magnitude` multiplies q and k; None scales their rows to lengths below 0.9 instead, so
    that |q.k| < 1. `positive=True` takes the absolute values of q and k, so that scores are positive. `precision` is what
    `torch.set_float32_matmul_precision` takes.
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
        """What the table of random configurations tells apart."""
        return ("softmax", "") if self.softmax else (self.options["algorithm"], f"p={self.options['p']}")


class Errors(NamedTuple):
    """Relative errors against float64 of one tensor (`"o"`, `"lse"`, or the name of an input for its gradient)."""

    tensor: str
    custom: float
    autograd: float
    allowed: float

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return self.custom <= self.allowed and self.autograd <= self.allowed


def cases() -> list[Case]:
    """The table: each row is there for the code path in its name. 300 tokens are more than one chunk and not a multiple."""
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
    """Outputs and gradients of `function` on the tensors cast to dtype; the loss is a fixed random projection of the outputs.

    `poison` fills free device memory with NaN before the forward and before the backward.
    """
    q, v = tensors["q"], tensors["v"]
    dtype = dtype or q.dtype
    generator = torch.Generator(q.device).manual_seed(0)
    grad_o = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator, dtype=torch.float64, device=q.device).to(q.dtype)
    variables = [name for name in ("q", "k", "v", "rpe_matrix", "log_decay") if name in tensors]
    inputs = {name: x.to(dtype) if x.dtype == q.dtype else x for name, x in tensors.items()}
    if "log_decay" in tensors:  # never narrower than float32
        inputs["log_decay"] = tensors["log_decay"].to(torch.promote_types(dtype, torch.float32))
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
    """What is checked: `fastmax_attention`, or `flash_attention` with its log-sum-exp."""
    return _softmax if softmax else fastmax_attention


def measure(tensors: dict[str, Tensor], options: dict, rounding: float | None = None, softmax: bool = False) -> list[Errors]:
    """Errors of the outputs and of the gradient of each floating-point input.

    `tensors` holds q, k, v (4-d) and, when wanted, `rpe_matrix`, `drop_noise`, `attention_mask`, `log_decay`, `cu_seqlens`;
    `options` the other arguments of `fastmax_attention` (or `flash_attention`), `use_custom_gradient` excepted. `rounding` is
    the least that is allowed, and what replaces a plain error that is no standard (see ROUNDING).
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
        """What errors are relative to: the norm, or where little or nothing is left of the terms grad_o . v that cancel (few
        keys, or a value that is zero but for rounding), those terms."""
        norm = exact[name][exact[name].isfinite()].norm().item()
        if norm <= 1e-10 * natural:
            return max(natural * longest, 1.0)
        return max(norm, 0.1 * natural * longest) if name in "qk" and tensors["k"].shape[2] <= 2 else norm

    def error(result: dict[str, Tensor], name: str) -> float:
        x, y = result[name].double(), exact[name]
        return torch.where(x == y, 0.0, x - y).norm().item() / size(name)  # a log-sum-exp of no keys is -inf in both

    def allowed(name: str) -> float:
        plain_error = error(plain, name)
        dtype = torch.finfo(q.dtype)  # numbers below its normal range are rounded to multiples of the least of them
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
    """By how much gradients of a half dtype are off, in the Frobenius norm, since o is saved in it.

    What a rounding of a row of o changes grad_o . o by enters the gradients as a gradient of the row's log of the sum of
    weights does; where one key has nearly all of the weight it is what is left of them.
    """
    dtype = tensors["q"].dtype
    if dtype not in (torch.float16, torch.bfloat16) or not o.numel():
        return {}
    wide = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    leaves = {name: wide[name].requires_grad_() for name in ("q", "k", "rpe_matrix", "log_decay") if name in wide}
    by_definition = naive_softmax_attention if softmax else naive_attention
    lse = by_definition(**wide, **(options if softmax else {**options, "return_lse": True}))[1]
    signs = torch.randint(2, lse.shape, generator=torch.Generator().manual_seed(0)).to(lse) * 2 - 1
    changes = 0.25 * torch.finfo(dtype).eps * o.norm(dim=-1) * signs  # half of the largest rounding of each element
    seen = lse.isfinite()
    grads = torch.autograd.grad((lse[seen] * changes[seen]).sum(), list(leaves.values()), materialize_grads=True)
    return {name: x.norm().item() for name, x in zip(leaves, grads, strict=True)}


def rounding_of_scores(q: Tensor) -> float:
    """By how much of itself a score that is exponentiated, or the log of a sum, is off."""
    if q.is_cuda and q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 2.0**-11
    return ROUNDING_OF_LOG_SUM[q.dtype]


def largest_log_sum(tensors: dict[str, Tensor], options: dict, softmax: bool) -> float:
    """The largest magnitude of a row's log of the sum of exp(s) and f(s), by definition; 0 where nothing is exponentiated."""
    if not softmax and not options.get("exact_window"):
        return 0.0
    wide = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    by_definition = naive_softmax_attention if softmax else naive_attention
    lse = by_definition(**wide, **(options if softmax else {**options, "return_lse": True}))[1]
    lse = lse[lse.isfinite()]
    return lse.abs().max().item() if lse.numel() else 0.0


def token_major(x: Tensor) -> Tensor:
    """(b, h, n, d) as a view of (b, n, h, d)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def unaligned(x: Tensor) -> Tensor:
    """Columns cut out of a wider tensor: rows that start at no multiple of 16 bytes."""
    return torch.nn.functional.pad(x, (1, 2))[..., 1:-2]


def packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Slices of one (b, n, h + 2 hk, d), or of two where n != m, as projections of a model leave them; needs d == dv."""
    together = [(q, k, v)] if q.shape[2] == k.shape[2] else [(q,), (k, v)]
    slices = []
    for part in together:
        joint = torch.cat([x.transpose(1, 2) for x in part], dim=2)
        slices += [x.transpose(1, 2) for x in joint.split([x.shape[1] for x in part], dim=2)]
    return tuple(slices)


LAYOUTS = ("contiguous", "token-major", "packed", "unaligned")


def random_tensors(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a case, for `measure`; the same on one kind of device."""
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
    return tensors


def _random_decay(case: Case, generator: torch.Generator) -> Tensor:
    """(batch, kv heads, keys) of half-lives from one token to 10,000, among them tokens that forget nothing or everything.

    Beside a padding mask none resets more than exp(-5), so that no query is left with keys whose weights are all 0 in float32.
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
    """Of a random configuration: (query, key) pairs of all heads, elements of a tensor, head dims, tokens."""

    pairs: int
    elements: int
    head_dim: int
    tokens: int


# The definition holds every weight in float64 several times over: 2**22 of them are 32 MB.
_LIMITS = {"cpu": Limits(2**16, 2**16, 40, 1100)}
_OTHER_DEVICES = Limits(2**22, 2**22, 256, 4200)
_MIN_ROWS = 128  # fewer queries or keys in all would make the plain error a matter of luck


def random_case(index: int, seed: int, device: torch.device | str) -> Case:
    """Configuration number `index`, drawn from `seed + index`."""
    device = torch.device(device)
    draw = random.Random(seed + index)
    limits = _LIMITS.get(device.type, _OTHER_DEVICES)

    def chance(probability: float) -> bool:
        return draw.random() < probability

    def between(low: float, high: float) -> float:
        """Log-distributed."""
        return math.exp(draw.uniform(math.log(low), math.log(high)))

    def tokens() -> int:
        if chance(0.4):  # around the kernels' tiles and chunks
            return min(
                limits.tokens,
                draw.choice((16, 32, 64, 128, 256, 512, 1024, 2048)) * draw.choice((1, 1, 3)) + draw.choice((-1, 0, 1)),
            )
        return round(between(1, limits.tokens))

    def head_dim() -> int:
        native = [d for d in (16, 32, 64, 96, 128, 256) if d <= limits.head_dim]
        if chance(0.6):
            return draw.choice(native)
        return round(between(1, limits.head_dim)) | chance(0.5)  # an odd one in half of the cases at least

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
    if sinusoidal:  # the definition writes out a row of the rpe matrix for every pair
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
    # d * d: autograd's side keeps a chunk's features, d (d + 1) / 2 a row.
    most = max(1, min(pairs // (n * m), limits.elements // (h * max(n, m) * max(d, dv, d * d // 64))))
    b = max(min(most, draw.choice((1, 1, 2, 3, 8))), math.ceil(_MIN_ROWS / (h * n)), math.ceil(_MIN_ROWS / (hk * m)))

    options: dict = {"causal": causal, "p": p, "algorithm": algorithm}
    magnitude: float | None = None if p == 1 else 1.0
    normalize = draw.choice((False, False, False, False, True, "sequence", "token"))
    reach = 0.81  # of q.k where magnitude is None
    if normalize:
        options |= {"normalize": normalize, "lim": round(draw.uniform(0.3, 0.9) if p == 1 else draw.uniform(0.3, 3.0), 3)}
    if sinusoidal:
        options["rpe_matrix"] = "sinusoidal"
        reach += 0.9 * math.sqrt(d / 2 + 1)
    if p == 1:  # |s| < 1, so that f stays positive
        options["temperature"] = reach * between(1.0, 4.0)
    else:
        options["temperature"] = between(0.5, 2.0) * (1.0 if normalize else math.sqrt(d))
        # Scores of 25: f of hundreds. Not for the linear algorithm, whose features cancel where |q||k| is large and f is not.
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
    if positive:  # f may have real roots, or no square: it is positive where scores are
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
            # Two keys at least: the gradient of one key's score is 0, and what is measured would be its rounding.
            size = max(2, window())
            options["window"] = draw.choice((size, (-1, 0), (size, 0), (size, window()), (size, -1)))
    else:
        if n <= m and chance(0.35):
            options["exact_window"] = window()
        if chance(0.3):
            options["return_lse"] = True
    return Case(
        f"random {index}", options, batch=b, heads=h, kv_heads=hk, queries=n, keys=m, head_dim=d, value_dim=dv, dtype=dtype,
        layout=layout, padding=padding, noise=noise, decay=decay, sequences=sequences, magnitude=magnitude, precision=precision,
        softmax=softmax, positive=positive,
    )  # fmt: skip


def for_hopper(case: Case) -> Case | None:
    """A random configuration brought to what the Hopper kernels cover (docs/cuda.md); None where it is too far from that.

    It keeps the algorithm that its scores were drawn for: of large ones the linear algorithm's features cancel.
    """
    options, width = case.options, max(case.head_dim, case.value_dim)
    if case.rpe or options.get("rpe_matrix") or options.get("exact_window") or width > 128:
        return None
    if not case.softmax:
        of_order1 = options["causal"] and not (case.padding or case.decay or case.sequences)
        is_linear = options["algorithm"] == "linear" and (options["p"] == 2 or of_order1)
        if is_linear and (64 < width <= 96 or (options["p"] == 1 and width <= 32)):  # not those of the linear kernels
            wider = case.head_dim + 32
            if not options.get("normalize"):
                temperature = options["temperature"] * math.sqrt(wider / case.head_dim)  # so that scores stay as large
                options = options | {"temperature": round(temperature, 3)}
            case = case._replace(head_dim=wider, value_dim=case.value_dim + 32)
        options = options | {"algorithm": "linear" if is_linear else "quadratic"}
    return case._replace(options=options, dtype=torch.bfloat16, precision="highest")


def hopper_indices(count: int, seed: int, device: torch.device | str) -> list[int]:
    """The first `count` configurations of a seed that can be brought to Hopper."""
    brought = (index for index in itertools.count() if for_hopper(random_case(index, seed, device)) is not None)
    return list(itertools.islice(brought, count))


@contextmanager
def kernels_taken() -> Iterator[set[str]]:
    """Gathers the kernels of the calls inside, like "backward: quadratic_sm90", from what the library prints.

    stderr is a file meanwhile; what others wrote to it follows at the end.
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
    """Without the warnings about options: configurations are chosen, and their tensors drawn, for f to be positive."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fastmax: ", RuntimeWarning)
        yield


def poison_free_memory(device: torch.device) -> None:
    """Fills every block that torch's CUDA allocator has free for the current stream with bytes that are NaN in any float dtype.

    torch's own `fill_uninitialized_memory` acts where a tensor is made; this acts on the memory itself, whoever allocates it.
    Each block is asked for by its exact size, which makes the allocator hand out that block.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch.cuda.current_stream(index).cuda_stream
    small = 2**20  # larger requests are served from segments of their own
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
    # The largest first: a smaller request could otherwise be cut from a larger block.
    held = [torch.empty(size, dtype=torch.uint8, device=device).fill_(255) for size in sorted(blocks, reverse=True) if size > 0]
    del held


def cancellation(tensors: dict[str, Tensor], options: dict) -> float:
    """How much larger than f(q.k), for typical rows, the terms are that the linear algorithm adds up to it; 1 for quadratic."""
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
    """Where two tensors of a shape differ, by the first and last index of every dimension, and how much."""
    differs = x != other
    at, change = differs.nonzero(), (x.double() - other.double())[differs].abs().max().item()
    first, last = at.amin(0).tolist(), at.amax(0).tolist()
    return f"in {len(at)} numbers from {first} to {last}, by at most {change:.1e}"


class Outcome(NamedTuple):
    """Of a random configuration: the largest error of the custom gradient as a share of what is allowed, and what is wrong."""

    share: float
    wrong: list[str]


def check(case: Case, device: torch.device | str, seed: int) -> Outcome:
    """One configuration against float64 and, on a GPU, against itself on poisoned memory. `seed` draws the tensors."""
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
    """Configuration number `index`, and with `hopper` the kernels that it took."""
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
    """`check_index` of each, in order."""
    if processes == 1:
        yield from map(check_index, indices)
        return
    threads = max(1, torch.get_num_threads() // processes)
    context = multiprocessing.get_context("spawn")  # CUDA does not live through a fork
    with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        yield from pool.map(check_index, indices)


def run_random(indices: Sequence[int], seed: int, device: str, hopper: bool = False, processes: int = 1) -> int:
    """Checks configurations, prints failures as they come and a table at the end; the number of failures."""
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
    parser.add_argument("--only", default="", help="run the configurations of the table whose name contains this")
    parser.add_argument("--random", type=int, metavar="N", help="check N random configurations in place of the table")
    parser.add_argument("--only-index", type=int, metavar="I", help="check the random configuration number I alone")
    parser.add_argument(
        "--hopper", action="store_true", help="random configurations for the Hopper kernels, which must take them"
    )
    parser.add_argument(
        "--processes", type=int, default=1, metavar="P", help="that share the random configurations (default 1)"
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
        shown = [row for row in rows if row.tensor not in ("lse", "rpe_matrix", "log_decay")]
        numbers = " ".join("".join(f"{getattr(row, which):>9.1e}" for row in shown) for which in ("custom", "autograd"))
        share = max(max(row.custom, row.autograd) / row.allowed for row in rows)
        print(f"{case.name:<38}{numbers} {share:>11.0%}{'' if passed else '  FAILED'}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} configurations within the limit")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
