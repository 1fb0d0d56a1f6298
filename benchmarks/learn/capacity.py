"""Capacity: single facts that a memory finds among n keys without training, if keys are as different as random ones.

In each head, a query has the score SPREAD sqrt(d) with the key of one fact, at a random distance beyond the window. Its
scores with all other keys, which are text, are SPREAD N(0, 1): rows of q and k have the norm of RMS normalisation, and SPREAD
is the product of their gains. A key weighs f(s) = 1 + s + s^2 / 2 times 2^(-distance / half-life of the head). The value of
the fact is the code of one of 26 letters; the values of text are random. The fact is found if its letter's codes have the
largest product with the heads' outputs, each of norm 1. A trained model can be better, with keys that text does not have, or
worse.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.learn import memories
from benchmarks.learn.rows import Row
from benchmarks.learn.runner import Experiment, Place, Run
from fastmax import eager
from fastmax.nn.gates import biases_of_half_lives

SPREAD = 2.0
WINDOW = 128
LETTERS = 26
BATCH = 8  # trials at a time


@dataclass(frozen=True)
class Setting:
    lengths: tuple[int, ...]
    trials: int  # a multiple of BATCH


SETTINGS = {"random keys": Setting(tuple(2**k for k in range(12, 17)), trials=512)}


@dataclass(frozen=True)
class Variant:
    title: str
    half_lives: tuple[float, float] = (4.0, 8192.0)  # of the first and the last head, spaced geometrically
    steady: int = 0  # the last heads have no decay, and the half-lives are of the others
    heads: int = 8
    head_dim: int = 64
    text: float = 1.0  # factor of the weights of text, as of a gate
    weight: Callable[[Tensor], Tensor] = memories.f

    def decays(self) -> Tensor:
        """Returns the logarithms to base 2 of the decay per token, (heads,)."""
        first, last = self.half_lives
        log_decays = F.logsigmoid(biases_of_half_lives(self.heads - self.steady, last, shortest=first)) / math.log(2.0)
        return torch.cat([log_decays, torch.zeros(self.steady, dtype=torch.float64)]).float()

    @property
    def state_size(self) -> int:
        """Number of elements of the states of a layer."""
        return self.heads * eager.state_rows(self.head_dim, 2) * (self.head_dim + 1)


SLOW = (128.0, 65536.0)
WIDE = {"heads": 4, "head_dim": 128}
VARIANTS = {
    "softmax": Variant("softmax, 8 heads of 64, half-lives 4 to 8k", weight=torch.exp),
    "recent": Variant("p = 2, 8 heads of 64, half-lives 4 to 8k (the layer)"),
    "recent_gate": Variant("the same, and a gate of 0.3 on text", text=0.3),
    "slow": Variant("p = 2, 8 heads of 64, half-lives 128 to 64k", SLOW),
    "steady": Variant("p = 2, 8 heads of 64, half-lives 4 to 1k, half of the heads without decay", (4.0, 1024.0), 4),
    "wide_recent": Variant("p = 2, 4 heads of 128, half-lives 4 to 8k", **WIDE),
    "wide_slow": Variant("p = 2, 4 heads of 128, half-lives 128 to 64k", SLOW, **WIDE),
    "wide_steady": Variant(
        "p = 2, 4 heads of 128, half-lives 4 to 1k, half of the heads without decay", (4.0, 1024.0), 2, **WIDE
    ),
}


def found(variant: Variant, n: int, drawn: torch.Generator) -> Tensor:
    """Returns whether the fact is found among n keys: bool (BATCH,)."""
    distance = torch.arange(WINDOW, n)
    heads, d = variant.heads, variant.head_dim
    at = torch.randint(len(distance), (BATCH,), generator=drawn)
    of_fact = at.view(-1, 1, 1).expand(-1, heads, 1)
    s = SPREAD * torch.randn(BATCH, heads, len(distance), generator=drawn)
    s.scatter_(2, of_fact, SPREAD * math.sqrt(d))
    weights = variant.weight(s) * torch.exp2(variant.decays().unsqueeze(-1) * distance)
    own = weights.gather(2, of_fact)
    text = (variant.text * weights).scatter(2, of_fact, 0.0)
    codes = torch.randn(BATCH, heads, LETTERS, d, generator=drawn)
    answer = torch.randint(LETTERS, (BATCH,), generator=drawn)
    value = codes[torch.arange(BATCH), :, answer]
    # A sum of random values is random, with the sum of the squared weights as its variance.
    o = own * value + text.square().sum(-1, keepdim=True).sqrt() * torch.randn(BATCH, heads, d, generator=drawn)
    products = torch.einsum("bhld,bhd->bl", codes, F.normalize(o, dim=-1))
    return products.argmax(-1) == answer


def runs(device: torch.device) -> list[Run]:
    return [Run(variant, setting, 0.0, 1, 30.0) for setting in SETTINGS for variant in VARIANTS]


def execute(run: Run, place: Place) -> Iterator[Row]:
    """Yields the percentage of facts found for each length. It runs on the CPU."""
    variant, setting = VARIANTS[run.variant], SETTINGS[run.setting]
    drawn = torch.Generator().manual_seed(run.seed)
    begin = time.perf_counter()
    for n in setting.lengths:
        right = torch.cat([found(variant, n, drawn) for _ in range(setting.trials // BATCH)])
        constant = {"step": 0, "tokens": 0, "seconds": time.perf_counter() - begin, "parameters": variant.state_size}
        yield {"measure": "found", "at": n, "value": 100 * right.double().mean().item()} | constant


EXPERIMENT = Experiment(__doc__.partition("\n")[0], runs, execute)
