"""`fit_polynomial`: fits the polynomial of a model's attention to its teacher."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastmax.convert.batches import Batch, check_batches, fresh_casts
from fastmax.convert.layers import Pairs, hugging_face, is_of_transformers, pairs_of, visit
from fastmax.core import validation
from fastmax.nn.self_attention_options import EXPANSION_OF_EXP

DIFFERENCE = 0.05  # step of the finite differences: far above the rounding of bf16, and small enough to be nearly linear
LONGEST_STEP = 1.0  # largest change of a parameter of the polynomial in a round


@torch.no_grad()
@fresh_casts()
def fit_polynomial(
    model: nn.Module, teacher: nn.Module, batches: Iterable[Batch], *, rounds: int = 8
) -> list[dict[str, float]]:
    """Fits the polynomial of `fastmax_attention`, shared by all layers, so that layer outputs match those of the teacher.

    `swap` sets the Taylor polynomial of exp, which is accurate for scores near 0. Scores of trained models spread over several
    units. The fit is damped least squares (Marquardt, 1963) over positive polynomials of degree 2, with derivatives from finite
    differences. A round runs the teacher once on the batches, and each layer of the model four times. The speed of the model
    does not change.

    Args:
        model, teacher: as in `transfer`. The polynomial is written to the options of the layers, or to the configuration of a
            Hugging Face model, which is saved with it. Parameters do not change.
        batches: iterable of batches, which are all held in memory. A few suffice for three coefficients.
        rounds: number of least-squares rounds.

    Returns:
        A row {"round", "error", "a0", "a1", "a2"} for the initial polynomial and for the best one after each round. The last
        row has the polynomial that is set.

    Raises:
        TypeError, ValueError: an argument is invalid, or the layers do not share one positive polynomial of degree 2.
    """
    validation.check_count("rounds", rounds)
    check_batches(batches)
    pairs, batches = pairs_of(model, teacher), list(batches)
    if not batches:
        raise ValueError("batches must hold at least one, got none")
    options = _options(model, pairs)
    before, polynomial = [dict(each) for each in options], _Polynomial.of(options)

    def measure(polynomial: _Polynomial) -> _Fit:
        return _measure(polynomial, options, pairs, teacher, batches)

    damping, rows = 1e-3, []
    try:
        fit = measure(polynomial)
        rows.append({"round": 0, "error": fit.error} | polynomial.coefficients())
        for number in range(1, rounds + 1):
            moved = polynomial.moved(fit.step(damping))
            found = measure(moved)
            if found.error < fit.error:
                polynomial, fit, damping = moved, found, damping / 10
            else:
                damping *= 100
            rows.append({"round": number, "error": fit.error} | polynomial.coefficients())
    except BaseException:
        for each, kept in zip(options, before, strict=True):
            each.clear()
            each.update(kept)
        raise
    _set(options, polynomial)
    return rows


class _Polynomial(NamedTuple):
    """The polynomial `exp(height) (s + centre)^2 + exp(floor)`. Its parameters are free: every choice gives a positive one."""

    height: float
    centre: float
    floor: float

    @classmethod
    def of(cls, options: list[dict]) -> _Polynomial:
        """Returns the polynomial of all layers."""
        found = {
            tuple(each.get(name, a) for name, a in zip(("p", "a0", "a1", "a2"), (2, *EXPANSION_OF_EXP), strict=True))
            for each in options
        }
        p, a0, a1, a2 = next(iter(found))
        if len(found) > 1 or p != 2 or a2 <= 0.0 or a1 * a1 >= 4 * a0 * a2:
            raise ValueError(f"model must have one positive polynomial with p = 2 in its layers, got p, a0, a1, a2 = {found}")
        return cls(math.log(a2), a1 / (2 * a2), math.log(a0 - a1 * a1 / (4 * a2)))

    def coefficients(self) -> dict[str, float]:
        a2 = math.exp(self.height)
        return {"a0": a2 * self.centre**2 + math.exp(self.floor), "a1": 2 * a2 * self.centre, "a2": a2}

    def moved(self, step: Iterable[float]) -> _Polynomial:
        return _Polynomial(*(x + dx for x, dx in zip(self, step, strict=True)))


class _Fit(NamedTuple):
    """Mean error over layers and batches, half its gradient, and the Gauss-Newton matrix J^T J."""

    error: float
    gradient: Tensor  # (3,)
    curvature: Tensor  # (3, 3)

    def step(self, damping: float) -> list[float]:
        scale = self.curvature.diagonal().clamp_min(1e-12)
        step = -torch.linalg.solve(self.curvature + damping * scale.diag(), self.gradient)
        return step.clamp(-LONGEST_STEP, LONGEST_STEP).tolist()


def _measure(polynomial: _Polynomial, options: list[dict], pairs: Pairs, teacher: nn.Module, batches: list[Batch]) -> _Fit:
    sums = torch.zeros(4, 4, dtype=torch.float64)

    def compare(name: str, attend: Callable[[], Tensor], expected: Tensor) -> None:
        _set(options, polynomial)
        y = attend()
        columns = [y - expected]
        for i in range(3):
            _set(options, polynomial.moved([DIFFERENCE * (i == j) for j in range(3)]))
            columns.append((attend() - y) / DIFFERENCE)
        total = expected.square().sum(dtype=torch.float64)
        for i in range(4):  # not a matrix product: autocast or TF32 would round its operands
            for j in range(i + 1):
                sums[i, j] += ((columns[i] * columns[j]).sum(dtype=torch.float64) / total).cpu()

    for batch in batches:
        visit(pairs, teacher, batch, compare)
    sums = (sums + sums.tril(-1).T) / (len(batches) * len(pairs))
    if not sums.isfinite().all():
        raise FloatingPointError("the error of attention, or its derivative, is not finite")
    return _Fit(sums[0, 0].item(), sums[1:, 0], sums[1:, 1:])


def _options(model: nn.Module, pairs: Pairs) -> list[dict]:
    """Returns the option dicts that the layers read. The caller changes them in place."""
    if not is_of_transformers(model):
        return [layer.options for layer, _ in pairs.values()]
    return hugging_face().options_to_change(model)


def _set(options: list[dict], polynomial: _Polynomial) -> None:
    for each in options:
        each.update(polynomial.coefficients())
