"""`transfer`: train a few parameters so that each attention layer gives what the teacher's gives for the same input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fastmax.convert.batches import Batch, check_batches, first, fresh_casts
from fastmax.convert.layers import Pairs, pairs_of, visit
from fastmax.convert.training import finite, named, requiring_grad, warmup_and_cosine
from fastmax.core import validation


@fresh_casts()
def transfer(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Batch],
    parameters: Iterable[str],
    *,
    steps: int,
    learning_rate: float = 0.01,
) -> list[dict[str, float]]:
    """Attention transfer: train a few parameters until each attention layer gives what the teacher's gives for the same input.

    Only the teacher runs as a whole. As soon as one of its layers has its output y, the model's layer of that name gets the
    same input, and the error `|y' - y|^2 / |y|^2` of its output y' goes backward: one layer's activations at a time are kept.
    Adam, with a warm-up of a twentieth of the steps and a cosine down to nothing.

    Args:
        model: after `swap`. Of its parameters only those named change.
        teacher: the model before the swap, a copy of it. Runs in eval mode; is not changed.
        batches: `steps` of them or more. Tokens that the model's argument `attention_mask` (b, n), or the `attention_mask` of
            its layers, leaves out do not count. Packed documents are taken as both models take them (`cu_seqlens`;
            `position_ids` that start again, and `cu_seq_lens_q` beside them).
        parameters: names of the parameters to train, in layers that were exchanged: what `swap` returned, or for instance
            `[name for name, _ in model.named_parameters() if "q_norm" in name]`.
        steps: batches taken from `batches`.
        learning_rate: the largest.

    Returns:
        A row {"step", "error"} for each step: the error before it, mean over the layers with such parameters.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what is accepted.
        FloatingPointError: an error is not finite.
    """
    validation.check_count("steps", steps)
    validation.check_positive("learning_rate", learning_rate)
    pairs = pairs_of(model, teacher)
    trained = named(model, parameters)
    for name in trained:
        if not any(name.startswith(f"{layer}." if layer else "") for layer in pairs):
            raise ValueError(f"parameters must be of attention layers that were exchanged, {', '.join(pairs)}; got {name!r}")
    pairs = {
        layer: pair for layer, pair in pairs.items() if any(name.startswith(f"{layer}." if layer else "") for name in trained)
    }

    optimizer = torch.optim.Adam(trained.values(), lr=learning_rate)
    schedule = warmup_and_cosine(optimizer, steps, math.ceil(steps / 20), final=0.0)
    rows = []
    with requiring_grad(model, trained):
        for step, batch in first(batches, steps):
            optimizer.zero_grad()
            errors = _errors(pairs, teacher, batch, backward=True)
            rows.append({"step": step, "error": finite("error", torch.stack(list(errors.values())).mean(), step)})
            optimizer.step()
            schedule.step()
        optimizer.zero_grad()
    return rows


@torch.no_grad()
@fresh_casts()
def attention_errors(model: nn.Module, teacher: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    """The error that `transfer` makes smaller, `|y' - y|^2 / |y|^2` by the name of the layer: mean over the batches.

    Args:
        model, teacher, batches: as of `transfer`.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    check_batches(batches)
    pairs = pairs_of(model, teacher)
    of_batches = [_errors(pairs, teacher, batch, backward=False) for batch in batches]
    if not of_batches:
        raise ValueError("batches must hold one or more, got none")
    return {name: torch.stack([errors[name] for errors in of_batches]).mean().item() for name in pairs}


def _errors(pairs: Pairs, teacher: nn.Module, batch: Batch, backward: bool) -> dict[str, Tensor]:
    """Of each layer; with their gradients, if asked for."""
    errors = {}

    def compare(name: str, attend: Callable[[], Tensor], expected: Tensor) -> None:
        with torch.set_grad_enabled(backward):
            error = (attend() - expected).square().sum() / expected.square().sum()
            if backward:
                error.backward()
        errors[name] = error.detach()

    visit(pairs, teacher, batch, compare)
    return errors
