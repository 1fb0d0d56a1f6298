"""Conversion: a trained softmax model, its attention exchanged for Fastmax by `fastmax.convert`; the loss after each step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.learn import data, equal_steps, language, rows
from benchmarks.learn.examples import model, training
from benchmarks.learn.rows import Row
from benchmarks.learn.runner import Experiment, Place, Run
from benchmarks.learn.variants import parameters
from fastmax import convert

TEACHER = "softmax"  # of equal_steps
LEARNING_RATE = 3e-4  # of the fine-tuning
TRANSFER_STEPS, FINETUNE_STEPS = 100, 300


@dataclass(frozen=True)
class Conversion:
    title: str
    swap: dict | None = field(default_factory=dict)  # keywords of convert.swap beside the window; None: softmax stays
    transfer: tuple[str, ...] | None = ()  # trained in the transfer: what is new, and what has such a name; None: no transfer


SOFTMAX_IN_EVERY_FOURTH = [0, 1, 2, 4, 5, 6]
VARIANTS = {
    "softmax": Conversion("softmax, trained on", swap=None, transfer=None),
    "window": Conversion("exact window", {}, ("q_norm", "k_norm")),
    "window_decay": Conversion("exact window and decay", {"decay": True}, ("q_norm", "k_norm")),
    "window_decay_only": Conversion("the same, norms of q and k not transferred", {"decay": True}),
    "untransferred": Conversion("the same without transfer", {"decay": True}, None),
    "hybrid": Conversion("in three of four layers", {"decay": True, "layers": SOFTMAX_IN_EVERY_FOURTH}, ("q_norm", "k_norm")),
}


def runs(device: torch.device) -> list[Run]:
    (setting,) = {run.setting for run in equal_steps.runs(device)}
    return [Run(variant, setting, LEARNING_RATE, 1, 45.0) for variant in VARIANTS]


def execute(run: Run, place: Place) -> Iterator[Row]:
    """ "before", "swapped", "transferred" and "finetuned": the loss then, `at` so many steps of the conversion."""
    setting, conversion = equal_steps.SETTINGS[run.setting], VARIANTS[run.variant]
    transfer_steps = place.steps or TRANSFER_STEPS
    finetune_steps = place.steps or FINETUNE_STEPS
    train_data, held_out, described = data.on_device(place.data, place.device)
    validation = data.validation_windows(held_out, setting.context, setting.batch, setting.final)
    gpt = trained_teacher(setting, run.seed, place)
    draw = data.training_windows(train_data, setting.context, setting.batch, 1000 + run.seed)
    constant = {"data": described, "seconds": 0.0, "tokens": 0}

    def row(stage: str, step: int) -> Row:
        loss = training.evaluate(gpt, validation, setting.bf16)
        tokens = step * setting.batch * setting.context
        constant_now = constant | {"step": step, "tokens": tokens, "parameters": parameters(gpt)}
        return {"measure": stage, "at": step, "value": loss} | constant_now

    def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (draw(None)[:2] for _ in range(steps))

    yield row("before", 0)
    done = 0
    with training.autocast(place.device, setting.bf16):
        if conversion.swap is not None:
            teacher = copy.deepcopy(gpt)
            new = convert.swap(gpt, exact_window=setting.window, longest_half_life=setting.context, **conversion.swap)
            yield row("swapped", 0)
            if conversion.transfer is not None:
                exchanged = [name for name, layer in gpt.named_modules() if getattr(layer, "attention", "") == "fastmax"]
                chosen = [
                    name
                    for name, _ in gpt.named_parameters()
                    if name in new
                    or (
                        any(name.startswith(f"{layer}.") for layer in exchanged)
                        and any(part in name for part in conversion.transfer)
                    )
                ]
                convert.transfer(gpt, teacher, batches(transfer_steps), chosen, steps=transfer_steps)
                done = transfer_steps
                yield row("transferred", done)
        if place.compile:
            language.compile_blocks(gpt)
        convert.finetune(gpt, batches(finetune_steps), steps=finetune_steps, learning_rate=run.lr)
        yield row("finetuned", done + finetune_steps)


def trained_teacher(setting: language.Setting, seed: int, place: Place) -> model.GPT:
    """Trained by whoever needs it first, and kept beside the data."""
    path = teacher_path(setting, seed, place)
    gpt = language.make(TEACHER, setting, seed, Place(place.device, place.data, False, False))
    with rows.locked(path, "teacher", wait=True):
        if not path.exists():
            trained = language.make(TEACHER, setting, seed, place)
            for _ in language.train(trained, setting, seed, place):
                pass
            unfinished = path.with_suffix(".part")
            torch.save(trained.state_dict(), unfinished)
            unfinished.replace(path)
    gpt.load_state_dict(torch.load(path, map_location=place.device))
    return gpt


def teacher_path(setting: language.Setting, seed: int, place: Place) -> Path:
    steps = place.steps or setting.steps
    return place.data.with_name(f"{place.data.stem}-{TEACHER}-{setting.n_embd}-{steps}-{seed}.pt")


EXPERIMENT = Experiment(__doc__, runs, execute)
