"""Outputs and gradients against the definition in float64, before anything is timed.

Memory grows with n, not n^2: only a random sample of query rows of some heads is looked at. The gradients of k and v sum over
all queries; to compare them whole, a second backward gets an output gradient that is zero except in those rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.registry import Case, Pairs, Provider

ROWS = 32
MAX_SCORES = 2**26  # float64 numbers in one temporary of the definition
MAX_HEADS = 64

# Relative Frobenius error of the output; gradients may have twice that, and that of log_decay four times: what two sums over
# all tokens leave of each other. About three times what the kernels and PyTorch's own operators show (bf16: 2.6e-3 and 4e-3).
LIMITS = {"fp32": 2e-5, "tf32": 3e-3, "fp16": 3e-3, "bf16": 1e-2}


class WrongResult(RuntimeError):
    pass


def check(provider: Provider, case: Case, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor | None) -> tuple[float, float | None]:
    """Error of the output and the largest of the gradients (None without grad_o).

    Raises:
        WrongResult: one is above its limit, or something is not finite.
    """
    generator = torch.Generator().manual_seed(case.tokens)
    at_once = min(MAX_SCORES // (ROWS * case.tokens), 2 * MAX_SCORES // (case.tokens * case.head_dim))
    count = max(1, min(case.batch * case.heads, MAX_HEADS, at_once))
    heads = torch.randperm(case.batch * case.heads, generator=generator)[:count].to(q.device)
    # The last row, but not the first one on purpose: its output is a hundred times as long as a late one's and would hide
    # theirs, and its gradient is exactly zero.
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
        return _compare(provider, case, {"o": (o.flatten(0, 1)[picked], expected)}, {"o": o}), None

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
    batch, head = heads[:, None] // case.heads, heads[:, None] % case.heads  # flatten would copy what is not head-major
    sparse[batch, head, rows] = grad_o[batch, head, rows]
    grads = torch.autograd.grad(_call(provider, case, leaves, tensors), list(leaves.values()), sparse)
    pairs = {
        f"grad_{name}": (x.flatten(0, 1)[picked if name == "q" else heads], wanted[name])
        for name, x in zip(leaves, grads, strict=True)
    }
    return error, max(grad_error, _compare(provider, case, pairs, {}))


def _call(provider: Provider, case: Case, given: dict[str, Tensor], tensors: dict[str, Tensor]) -> Tensor:
    """`given`: what has a gradient, in place of what `tensors` has under its name."""
    q, k, v, *_ = given.values()
    if q.is_cuda:  # an element that nobody writes is NaN: the allocator hands out what was just freed
        poison = [torch.full_like(q, float("nan")) for _ in range(4)]
        del poison
    with provider.context():
        return provider.call(q, k, v, case, **{name: given.get(name, x) for name, x in tensors.items()})


def _definition(
    provider: Provider, case: Case, given: dict[str, Tensor], tensors: dict[str, Tensor], heads: Tensor, rows: Tensor
) -> Tensor:
    """`given`: q (heads, rows, d), k and v (heads, n, d), and what else has a gradient; (heads, rows, d)."""
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
    """The largest error of `pairs`; the sums of `finite` must be numbers."""
    for name, x in finite.items():
        if not x.sum(dtype=torch.float32).isfinite():
            raise WrongResult(f"{provider.name} is wrong on {case.label()}: {name} has elements that are not finite")
    worst = 0.0
    for name, (got, expected) in pairs.items():
        norm = expected.norm().item()
        difference = (got.double() - expected).norm().item()
        limit = LIMITS[case.dtype] * {"o": 1, "grad_log_decay": 4}.get(name, 2)
        # Half a unit of the last place of numbers too small for the dtype's full precision (fp16 gradients at long n).
        tiny = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps / 2 * expected.numel() ** 0.5
        if not difference <= limit * norm + tiny:
            error = difference / norm if norm else difference
            raise WrongResult(
                f"{provider.name} is wrong on {case.label()}: relative error of {name} {error:.1e}, limit {limit:.0e}"
            )
        worst = max(worst, difference / norm if norm else 0.0)
    return worst
