"""Trains a GPT on bytes of Python sources: code that the experiments on language models share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.learn import data
from benchmarks.learn.examples import model, text, training
from benchmarks.learn.rows import Row
from benchmarks.learn.runner import Place
from benchmarks.learn.variants import VARIANTS, fastest_softmax, make_gpt, parameters

BUCKETS = 32  # ranges of positions whose losses are averaged


@dataclass(frozen=True)
class Setting:
    n_layer: int
    n_head: int
    n_embd: int
    context: int
    batch: int
    steps: int
    lr: float
    window: int
    seconds: float | None = None  # time of training, in experiments with equal time instead of equal steps
    warmup: int = 100  # steps
    warmup_share: float | None = None  # fraction of the training, replaces `warmup`
    rows: int = 20
    validation: int = 256  # windows for the validation loss during training
    final: int = 1024  # windows for the loss of the trained model
    bf16: bool = False

    def recipe(self, place: Place) -> training.Recipe:
        steps, seconds = self.steps, self.seconds
        if seconds is not None and place.time is not None:
            seconds = place.time
        if place.steps is not None:
            steps, seconds = place.steps, None
        return training.Recipe(
            steps=steps,
            rows=self.rows,
            lr=self.lr,
            warmup=min(self.warmup, steps // 10),
            warmup_share=self.warmup_share,
            bf16=self.bf16,
            seconds=seconds,
        )


def make(variant: str, setting: Setting, seed: int, place: Place, shapes: int = 1) -> model.GPT:
    """Returns the model of a variant. It is compiled for each of `shapes` shapes of windows."""
    torch.manual_seed(seed)
    sizes = {"n_layer": setting.n_layer, "n_head": setting.n_head, "n_embd": setting.n_embd, "block_size": setting.context}
    gpt = make_gpt(VARIANTS[variant], setting.window, **sizes).to(place.device)
    if place.compile and VARIANTS[variant].compiles:
        training.compile_blocks(gpt, dynamic=False if shapes > 1 else None)
    return gpt


def train(gpt: nn.Module, setting: Setting, seed: int, place: Place, edit: data.Edit = data.unchanged) -> list[Row]:
    """Trains the model; returns rows of "train" and "val" losses by step, and the rows of `trained_losses`."""
    train_data, held_out, described = data.on_device(place.data, place.device)
    validation = data.validation_windows(held_out, setting.context, setting.batch, setting.validation, edit)
    batches = data.training_windows(train_data, setting.context, setting.batch, seed, edit)
    recipe = setting.recipe(place)
    trainer = training.Trainer(gpt, recipe, batches, validation, seed)
    constant, rows = {"parameters": parameters(gpt), "data": described}, []
    with fastest_softmax():
        for row in trainer.run():
            constant |= {name: row[name] for name in ("step", "tokens", "seconds")}
            rows += [{"measure": measure, "at": row["step"], "value": row[measure]} | constant for measure in ("train", "val")]
        final = data.validation_windows(held_out, setting.context, setting.batch, setting.final, edit)
        rows += [row | constant for row in trained_losses(gpt, final, recipe.bf16)]
    return rows


def trained_losses(gpt: nn.Module, batches: list[text.Batch], bf16: bool) -> Iterator[Row]:
    """Yields rows of the losses of a trained model.

    "position" is the loss in each of BUCKETS ranges of positions, `at` the end of the range. "loss" and "last_quarter" are the
    losses of the whole window and of its last quarter, `at` the length of the window.
    """
    losses, _ = training.evaluate_by_position(gpt, batches, bf16)  # every position has the same number of tokens
    yield from position_rows(losses, "position")
    yield {"measure": "last_quarter", "at": len(losses), "value": losses[-len(losses) // 4 :].mean().item()}
    yield {"measure": "loss", "at": len(losses), "value": losses.mean().item()}


def position_rows(losses: Tensor, measure: str) -> Iterator[Row]:
    """Yields rows of the mean losses in BUCKETS ranges of positions, given the loss at each position."""
    for part in losses.tensor_split(min(BUCKETS, len(losses))):
        yield {"measure": measure, "at": part.storage_offset() + len(part), "value": part.mean().item()}


def train_run(variant: str, setting: Setting, seed: int, lr: float, place: Place) -> Iterator[Row]:
    gpt = make(variant, setting, seed, place)
    yield from train(gpt, replace(setting, lr=lr), seed, place)
