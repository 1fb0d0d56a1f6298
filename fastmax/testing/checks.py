"""Checks of one configuration: its errors, on a GPU its bits on poisoned memory, and the kernels that it must run on."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastmax.testing.configurations import Case
from fastmax.testing.debug_log import kernels_taken
from fastmax.testing.errors import CANCELLATION, ROUNDING, cancellation, measure
from fastmax.testing.evaluation import advice_ignored, implementation, matmul_precision, run
from fastmax.testing.random_configurations import for_hopper, random_case
from fastmax.testing.tensors import random_tensors


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
    """Checks configuration number `index`; returns it, the result, and with `hopper` the kernels that ran.

    Raises ValueError with `hopper` if `for_hopper` does not accept the configuration.
    """
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


def difference(x: Tensor, other: Tensor) -> str:
    """Describes the difference of two tensors: first and last index of each dimension, and the largest difference."""
    differs = x != other
    at, change = differs.nonzero(), (x.double() - other.double())[differs].abs().max().item()
    first, last = at.amin(0).tolist(), at.amax(0).tolist()
    return f"in {len(at)} numbers from {first} to {last}, by at most {change:.1e}"
