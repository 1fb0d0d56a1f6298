"""`finetune`: next-token training."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmax.convert.batches import Batch, call, first, fresh_casts
from fastmax.convert.layers import check_module
from fastmax.convert.training import finite, named, requiring_grad, warmup_and_cosine
from fastmax.core import validation
from fastmax.nn.short_convolution import ShortConvolution

# Modules whose parameters have no weight decay: gates, of FastmaxSelfAttention and of Hugging Face models, are 0 at first.
_GATES = frozenset({"decay_proj", "input_gate_proj", "fastmax_decay", "fastmax_input_gate"})


@fresh_casts()
def finetune(
    model: nn.Module,
    batches: Iterable[Batch],
    parameters: Iterable[str] | None = None,
    *,
    steps: int,
    learning_rate: float = 3e-4,
    warmup: int | None = None,
    weight_decay: float = 0.1,
    max_norm: float = 1.0,
) -> list[dict[str, float]]:
    """Trains the model on next-token prediction, with AdamW, warm-up and a cosine schedule down to a tenth of the rate.

    Weight decay applies to matrices, and stacks of matrices, except those of decay gates, input gates and the convolutions of
    `FastmaxSelfAttention`. The training mode of the model is not changed: call
    `model.train()` first if it has dropout.

    Args:
        model: returns the scalar loss of a batch, or an object with the attribute `loss`. For batches that are tensors of
            tokens it returns the logits (b, n, vocabulary) of the next tokens, or an object with the attribute `logits`.
        batches: iterable of at least `steps` batches.
        parameters: names of the parameters to train. None: all that require a gradient.
        steps: number of optimizer steps, with one batch each.
        learning_rate: peak learning rate.
        warmup: number of warm-up steps. None: a twentieth of `steps`.
        weight_decay: as in `torch.optim.AdamW`.
        max_norm: gradients are clipped to this norm.

    Returns:
        A row {"step", "loss"} for each step, with the loss before the step.

    Raises:
        TypeError, ValueError: an argument is invalid. The message names it, its value and the accepted values.
        FloatingPointError: a loss is not finite.
    """
    check_module("model", model)
    validation.check_count("steps", steps)
    validation.check_positive("learning_rate", learning_rate)
    validation.check_positive("max_norm", max_norm)
    validation.check_not_negative("weight_decay", weight_decay)
    warmup = math.ceil(steps / 20) if warmup is None else warmup
    validation.check_count("warmup", warmup, least=0)
    if parameters is None:
        trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
        if not trained:
            raise ValueError(f"model ({type(model).__name__}) must have parameters that require a gradient, got none")
    else:
        trained = named(model, parameters)
    convolutions = {id(x) for module in model.modules() if isinstance(module, ShortConvolution) for x in module.parameters()}
    decayed: list[Tensor] = []
    rest: list[Tensor] = []
    for name, x in trained.items():
        is_matrix = x.dim() >= 2 and id(x) not in convolutions and _GATES.isdisjoint(name.split("."))
        (decayed if is_matrix else rest).append(x)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
    schedule = warmup_and_cosine(optimizer, steps, warmup, final=0.1)
    rows = []
    with requiring_grad(model, trained):
        for step, batch in first(batches, steps):
            loss = _loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained.values(), max_norm)
            rows.append({"step": step, "loss": finite("loss", loss.detach(), step)})
            optimizer.step()
            schedule.step()
        optimizer.zero_grad()
    return rows


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    if isinstance(batch, Tensor) and (batch.dim() != 2 or batch.shape[0] == 0 or batch.shape[1] < 2):
        raise ValueError(f"a batch that is a tensor must be tokens (b, n), n at least 2, got {validation.describe(batch)}")
    output = call(model, batch)
    if isinstance(batch, Tensor):
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.shape[:2] != batch.shape:
            raise TypeError(f"model must return logits (b, n, vocabulary) of tokens (b, n), got {validation.describe(output)}")
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        raise TypeError(f"model must return the scalar loss of a batch that is no tensor, got {validation.describe(output)}")
    return loss
