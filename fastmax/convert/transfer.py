"""`transfer`: trains some parameters so that each attention layer matches the teacher's on the same input."""

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
    """Attention transfer: trains some parameters so that each attention layer matches the teacher's on the same input.

    Only the teacher runs as a whole. After each of its attention layers, the model's layer of the same name runs on the same
    input, and the error `|y' - y|^2 / |y|^2` of its output y' is differentiated. Thus only one layer's activations are held at
    a time. The optimizer is Adam, with a warm-up of a twentieth of the steps and a cosine schedule down to 0.

    Args:
        model: the model after `swap`. Only the named parameters change.
        teacher: a copy of the model from before the swap. It runs in eval mode and does not change.
        batches: iterable of at least `steps` batches. Padding according to the `attention_mask` (b, n) of the batch or of a
            layer does not count. Packed documents may be given by `cu_seqlens`, or for Hugging Face models by `position_ids`
            that restart at 0, with or without `cu_seq_lens_q`.
        parameters: names of the parameters to train, in swapped layers: those that `swap` returned, or for example
            `[name for name, _ in model.named_parameters() if "q_norm" in name]`.
        steps: number of optimizer steps, with one batch each.
        learning_rate: peak learning rate.

    Returns:
        A row {"step", "error"} for each step, with the error before the step, averaged over the layers that have such
        parameters.

    Raises:
        TypeError, ValueError: an argument is invalid. The message names it, its value and the accepted values.
        FloatingPointError: an error is not finite.
    """
    validation.check_count("steps", steps)
    validation.check_positive("learning_rate", learning_rate)
    pairs = pairs_of(model, teacher)
    trained = named(model, parameters)
    for name in trained:
        if not any(name.startswith(f"{layer}." if layer else "") for layer in pairs):
            raise ValueError(f"parameters must belong to swapped attention layers, {', '.join(pairs)}; got {name!r}")
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
    """Returns the error that `transfer` minimises, `|y' - y|^2 / |y|^2`, by layer name, averaged over the batches.

    Args:
        model, teacher, batches: as in `transfer`.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    check_batches(batches)
    pairs = pairs_of(model, teacher)
    of_batches = [_errors(pairs, teacher, batch, backward=False) for batch in batches]
    if not of_batches:
        raise ValueError("batches must hold at least one, got none")
    return {name: torch.stack([errors[name] for errors in of_batches]).mean().item() for name in pairs}


def _errors(pairs: Pairs, teacher: nn.Module, batch: Batch, backward: bool) -> dict[str, Tensor]:
    """Returns the error of each layer. With `backward`, also accumulates its gradients."""
    errors = {}

    def compare(name: str, attend: Callable[[], Tensor], expected: Tensor) -> None:
        with torch.set_grad_enabled(backward):
            error = (attend() - expected).square().sum() / expected.square().sum()
            if backward:
                error.backward()
        errors[name] = error.detach()

    visit(pairs, teacher, batch, compare)
    return errors
