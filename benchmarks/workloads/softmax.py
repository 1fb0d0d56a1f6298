"""Measures softmax of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.registry import DTYPES, Case
from benchmarks.report import Row
from benchmarks.timing import Call, Protocol
from benchmarks.workloads.common import LIMITS, WrongResult, bandwidth, make_row, prepare

# Name of a provider -> a function that computes `torch.softmax(x, -1)`.
ROW_SOFTMAX: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax_online": lambda x: torch.ops.fastmax.softmax(x, "online"),
    "softmax_safe": lambda x: torch.ops.fastmax.softmax(x, "safe"),
    "torch_softmax": lambda x: x.softmax(-1),
}


@torch.no_grad()
def measure_softmax(case: Case, device: torch.device, protocol: Protocol, skip: Mapping[str, str]) -> list[Row]:
    """Measures softmax of `case.batch` rows of width `case.tokens`."""
    generator = torch.Generator(device).manual_seed(case.tokens)
    # Values around 100 overflow unless the maximum of the row is subtracted.
    x = 3 * torch.randn((case.batch, case.tokens), generator=generator, device=device) + 100
    x = x.to(DTYPES[case.dtype])
    errors, notes = checked(case, x, skip)
    calls = [Call(partial(ROW_SOFTMAX[name], x)) for name in errors]
    results = dict(zip(errors, timing.device_ms(calls, device, protocol) if calls else [], strict=True))
    rows = []
    for name in case.providers:
        row = make_row(case, "fwd", name, results, notes[name], device) | {"error": errors.get(name, "")}
        rows.append(row | (bandwidth(2 * x.nbytes, results[name].median, device) if name in results else {}))
    return rows


def checked(case: Case, x: Tensor, skip: Mapping[str, str]) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the errors and the notes, by provider."""
    expected = x.double().softmax(-1)
    return prepare(case, skip, lambda name: check_rows(name, case, ROW_SOFTMAX[name](x), expected))


def check_rows(name: str, case: Case, got: Tensor, expected: Tensor) -> float:
    """Returns the largest relative error of a row.

    Raises:
        WrongResult: the error is above the limit.
    """
    error = ((got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
    if not error <= LIMITS[case.dtype]:
        raise WrongResult(
            f"{name} is wrong on {case.label()}: relative error of a row {error:.1e}, limit {LIMITS[case.dtype]:.0e}"
        )
    return error
