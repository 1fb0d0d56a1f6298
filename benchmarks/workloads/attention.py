"""Measures attention of q, k and v, after a check against the definition in float64.

The memory of the check grows with n, not with n^2, because it compares a random sample of query rows of some heads. The
gradients of k and v are sums over all queries; for them a second backward has an output gradient that is zero outside the
sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks import roofline
from benchmarks.providers import PROVIDERS, Pairs, Provider
from benchmarks.registry import DTYPES, SUSTAINED, Case
from benchmarks.report import Row
from benchmarks.timing import Call, Protocol
from benchmarks.workloads.common import LIMITS, WrongResult, above_floor, make_row, peak_mib, precision, prepare, times

ROWS = 32
MAX_SCORES = 2**26  # float64 numbers in one temporary of the definition
MAX_HEADS = 64


def measure_attention(case: Case, device: torch.device, protocol: Protocol, skip: Mapping[str, str]) -> list[Row]:
    """Returns one row for each provider and mode. `skip`: provider that is left out -> the reason."""
    with precision(case.dtype):
        try:
            q, k, v, grad_o = inputs(case, device)
        except torch.OutOfMemoryError:
            note = "out of memory: its inputs"
            return [make_row(case, mode, name, {}, note, device) for mode in case.modes for name in case.providers]
        given = grad_o if case.modes != ("fwd",) else None
        errors, notes = prepare(case, skip, lambda name: check(PROVIDERS[name], case, q, k, v, given))
        forward, forward_backward = attention_calls(case, q, k, v, grad_o)
        rows = []
        for mode in case.modes:
            calls = [(forward if mode.endswith("fwd") else forward_backward)(PROVIDERS[name]) for name in errors]
            if mode == "memory":
                measured = [peak_mib(call, device, sum(x.nbytes for x in (q, k, v, grad_o))) for call in calls]
            else:
                measured = times(mode, calls, device, protocol)
            results = dict(zip(errors, measured, strict=True))
            for name in case.providers:
                row = make_row(case, mode, name, results, notes[name], device)
                row["error"], row["grad_error"] = errors.get(name, ("", ""))
                if name in results:
                    row |= _extras(case, mode, PROVIDERS[name], results[name].median, device)
                rows.append(row)
        return rows


def inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    """Returns q, k, v and the output's gradient, standard normal."""
    generator = torch.Generator(device).manual_seed(case.tokens)
    inner = (case.tokens, case.heads) if case.token_major else (case.heads, case.tokens)
    shape = (case.batch, *inner, case.head_dim)
    tensors = (torch.randn(shape, generator=generator, dtype=DTYPES[case.dtype], device=device) for _ in range(4))
    return tuple(x.transpose(1, 2) if case.token_major else x for x in tensors)


def attention_calls(case: Case, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor) -> tuple[Callable[[Provider], Call], ...]:
    """Returns two functions from a provider to its call: forward, and forward + backward."""
    no_gradients = torch.no_grad()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward(provider: Provider) -> Call:
        tensors = provider.tensors(case, q.device)
        return Call(lambda: no_gradients(provider.call)(q, k, v, case, **tensors), provider.context)

    def forward_backward(provider: Provider) -> Call:
        tensors = provider.tensors(case, q.device)
        of = leaves + [x.requires_grad_() for x in tensors.values() if x.is_floating_point()]
        return Call(lambda: torch.autograd.grad(provider.call(*leaves, case, **tensors), of, grad_o), provider.context)

    return forward, forward_backward


def _extras(case: Case, mode: str, provider: Provider, median: float, device: torch.device) -> Row:
    if mode == "memory":
        tensor = case.batch * case.heads * case.tokens * case.head_dim * DTYPES[case.dtype].itemsize / 2**20
        notes = (provider.note, f"{median / (8 * tensor):.2f} times q, k, v, o and their gradients")
        return {"note": "; ".join(filter(None, notes))}
    row: Row = {"note": provider.note}
    arithmetic = provider.arithmetic(case)
    timed = mode.removeprefix(SUSTAINED)
    if timed in ("fwd", "fwd+bwd") and arithmetic is not None:
        row |= above_floor(median, partial(roofline.attention_ms, case, *arithmetic, timed), device)
    return row


def check(provider: Provider, case: Case, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor | None) -> tuple[float, object]:
    """Returns the error of the output, and the largest error of a gradient ("" without grad_o).

    Raises:
        WrongResult: an error is above its limit, or a result is not finite.
    """
    generator = torch.Generator().manual_seed(case.tokens)
    at_once = min(MAX_SCORES // (ROWS * case.tokens), 2 * MAX_SCORES // (case.tokens * case.head_dim))
    count = max(1, min(case.batch * case.heads, MAX_HEADS, at_once))
    heads = torch.randperm(case.batch * case.heads, generator=generator)[:count].to(q.device)
    # The last row is always in the sample, the first one is not: its output is a hundred times larger than that of late rows
    # and would hide their errors, and its gradient is exactly zero.
    rows = torch.randint(case.tokens, (ROWS - 1,), generator=generator)
    rows = torch.cat([rows, torch.tensor([case.tokens - 1])]).unique().to(q.device)
    picked = heads[:, None], rows

    tensors = provider.tensors(case, q.device)
    given = {"q": q, "k": k, "v": v} | {name: x for name, x in tensors.items() if x.is_floating_point()}
    given64 = {name: x.flatten(0, 1)[picked if name == "q" else heads].double() for name, x in given.items()}
    if grad_o is None:
        with torch.no_grad():
            o = _call(provider, case, given, tensors)
            expected = _definition(provider, case, given64, tensors, heads, rows)
        return _compare(provider, case, {"o": (o.flatten(0, 1)[picked], expected)}, {"o": o}), ""

    for x in given64.values():
        x.requires_grad_()
    expected = _definition(provider, case, given64, tensors, heads, rows)
    wanted = torch.autograd.grad(expected, list(given64.values()), grad_o.flatten(0, 1)[picked].double())
    wanted = dict(zip(given64, wanted, strict=True))

    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    o = _call(provider, case, leaves, tensors)
    grads = torch.autograd.grad(o, list(leaves.values()), grad_o)
    whole = {"o": o.detach()} | {f"grad_{name}": x for name, x in zip(leaves, grads, strict=True)}
    error = _compare(provider, case, {"o": (whole["o"].flatten(0, 1)[picked], expected.detach())}, whole)
    grad_error = _compare(provider, case, {"grad_q": (whole["grad_q"].flatten(0, 1)[picked], wanted["q"])}, {})
    del o, grads, whole

    sparse = torch.zeros_like(grad_o)
    batch, head = heads[:, None] // case.heads, heads[:, None] % case.heads  # flatten would copy other layouts
    sparse[batch, head, rows] = grad_o[batch, head, rows]
    grads = torch.autograd.grad(_call(provider, case, leaves, tensors), list(leaves.values()), sparse)
    pairs = {
        f"grad_{name}": (x.flatten(0, 1)[picked if name == "q" else heads], wanted[name])
        for name, x in zip(leaves, grads, strict=True)
    }
    return error, max(grad_error, _compare(provider, case, pairs, {}))


def _call(provider: Provider, case: Case, given: dict[str, Tensor], tensors: dict[str, Tensor]) -> Tensor:
    """Calls the provider. Entries of `given`, which have gradients, replace those of `tensors`."""
    q, k, v, *_ = given.values()
    if q.is_cuda:  # makes unwritten elements NaN, because the allocator reuses freed memory
        poison = [torch.full_like(q, float("nan")) for _ in range(4)]
        del poison
    with provider.context():
        return provider.call(q, k, v, case, **{name: given.get(name, x) for name, x in tensors.items()})


def _definition(
    provider: Provider, case: Case, given: dict[str, Tensor], tensors: dict[str, Tensor], heads: Tensor, rows: Tensor
) -> Tensor:
    """Returns the output (heads, rows, d) by the definition. `given`: q (heads, rows, d), k, v (heads, n, d), other leaves."""
    q, k, v, *_ = given.values()
    distance = rows[:, None] - torch.arange(case.tokens, device=q.device)
    weight = provider.weight(
        provider.rows(q, case) @ provider.rows(k, case).mT,
        Pairs(case, heads, distance, {name: given.get(name, x) for name, x in tensors.items()}),
    )
    if case.causal:
        weight = torch.where(distance >= 0, weight, 0.0)
    o = weight @ v
    return o / weight.sum(-1, keepdim=True) if provider.normalized else o


def _compare(provider: Provider, case: Case, pairs: dict[str, tuple[Tensor, Tensor]], finite: dict[str, Tensor]) -> float:
    """Returns the largest error of `pairs`; raises if a sum of `finite` is not finite."""
    for name, x in finite.items():
        if not x.sum(dtype=torch.float32).isfinite():
            raise WrongResult(f"{provider.name} is wrong on {case.label()}: {name} has elements that are not finite")
    worst = 0.0
    for name, (got, expected) in pairs.items():
        norm = expected.norm().item()
        difference = (got.double() - expected).norm().item()
        limit = LIMITS[case.dtype] * {"o": 1, "grad_log_decay": 4, "grad_log_input_gate": 4}.get(name, 2)
        # Half a unit in the last place of subnormal numbers (fp16 gradients at large n).
        tiny = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps / 2 * expected.numel() ** 0.5
        if not difference <= limit * norm + tiny:
            error = difference / norm if norm else difference
            raise WrongResult(
                f"{provider.name} is wrong on {case.label()}: relative error of {name} {error:.1e}, limit {limit:.0e}"
            )
        worst = max(worst, difference / norm if norm else 0.0)
    return worst
