"""What is measured: providers, cases and suites. The only file to edit for a new benchmark.

A provider takes q, k, v and a case and returns the attention output; `exact` says which definition its output is checked
against before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fastmax import fastmax_attention


@dataclass(frozen=True)
class Case:
    """One row: causal attention of (batch, heads, tokens, head_dim), and the ratio the project asks of it."""

    batch: int
    heads: int
    tokens: int
    head_dim: int
    p: int
    algorithm: str
    goal: float  # time of the peer over ours, forward + backward, at least
    dtype: torch.dtype = torch.float32

    def label(self) -> str:
        return f"p={self.p} {self.algorithm} ({self.batch},{self.heads},{self.tokens},{self.head_dim})"


@dataclass(frozen=True)
class Provider:
    name: str
    call: Callable[[Tensor, Tensor, Tensor, Case], Tensor]
    weight: Callable[[Tensor, Case], Tensor]  # unnormalised attention weight of a score q.k, in float64


def _fastmax(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    return fastmax_attention(q, k, v, causal=True, p=case.p, algorithm=case.algorithm, **_options(case))


def _options(case: Case) -> dict[str, float]:
    # p = 1 on unbounded scores can divide by zero; a0 = 8 at this temperature keeps 1 + s positive on the inputs used.
    return {"temperature": case.head_dim**0.5, "a0": 8.0} if case.p == 1 else {"temperature": case.head_dim**0.5}


def _fastmax_weight(score: Tensor, case: Case) -> Tensor:
    s = score / case.head_dim**0.5
    return 8.0 + s if case.p == 1 else 1.0 + s + 0.5 * s * s


def _sdpa(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _sdpa_weight(score: Tensor, case: Case) -> Tensor:
    return (score / case.head_dim**0.5).exp()


# The first provider is ours, the second the peer of the ratio. The peer computes softmax attention: another function.
PROVIDERS = (Provider("fastmax", _fastmax, _fastmax_weight), Provider("sdpa", _sdpa, _sdpa_weight))

SUITES: dict[str, tuple[Case, ...]] = {
    "cpu": (
        Case(1, 4, 16384, 32, p=2, algorithm="linear", goal=3.5),
        Case(1, 1, 32768, 64, p=2, algorithm="linear", goal=2.5),
        Case(1, 4, 16384, 64, p=1, algorithm="linear", goal=15.0),
        Case(1, 8, 1024, 64, p=2, algorithm="quadratic", goal=1 / 1.5),
    ),
    "crossover": tuple(
        Case(1, 4, tokens, d, p=p, algorithm=algorithm, goal=0.0)
        for p, d, sizes in (
            (2, 32, (256, 512, 1024, 2048)),
            (2, 64, (1024, 2048, 4096, 8192)),
            (1, 64, (64, 128, 256, 512)),
        )
        for tokens in sizes
        for algorithm in ("quadratic", "linear")
    ),
}
