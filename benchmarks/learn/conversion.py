"""Conversion: `fastmax.convert` swaps the attention of a trained softmax model; the loss after each stage.

The variants of a setting are compared with each other, so all of a seed need the same softmax model. It is saved beside the
text, and training it again on another machine gives another one.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.learn import data, equal_steps, language, rows
from benchmarks.learn.examples import model, training
from benchmarks.learn.rows import Row
from benchmarks.learn.runner import Experiment, Place, Run
from benchmarks.learn.variants import parameters
from fastmax import convert

TEACHER = "softmax"  # variant of the softmax model, which is trained as in equal_steps
LEARNING_RATE = 3e-4  # of fine-tuning
FIT_BATCHES, TRANSFER_STEPS, FINETUNE_STEPS = 4, 100, 300
HALF_LIVES = 8.0  # longest half-life of new decay gates, in contexts


@dataclass(frozen=True)
class Conversion:
    title: str
    swap: dict | None = field(default_factory=dict)  # keywords of convert.swap besides the window; None: no swap
    fit: bool = True  # whether the polynomial is fitted
    # Attention transfer trains new parameters, and those whose names end like this; None: no transfer.
    transfer: tuple[str, ...] | None = ()
    rate: float = 1e-2  # learning rate of the transfer


NORMS = ("q_norm.weight", "k_norm.weight")
PROJECTIONS = ("qkv_proj.weight", "out_proj.weight")
VARIANTS = {
    "softmax": Conversion("nothing, softmax is trained on", None, False, None),
    "window_decay": Conversion("all layers, with decay", {"decay": True}, transfer=NORMS),
    "window": Conversion("all layers, without decay", transfer=NORMS),
    "projections": Conversion(
        "all layers, with decay; projections transferred too", {"decay": True}, transfer=(*NORMS, *PROJECTIONS), rate=1e-3
    ),
    "gates_alone": Conversion("all layers, with decay; gates alone transferred", {"decay": True}),
    "unprepared": Conversion("all layers, with decay; neither fit nor transfer", {"decay": True}, False, None),
    "kept_keys": Conversion("all layers, with decay, 256 kept keys", {"decay": True, "kept_keys": 256}, transfer=NORMS),
    "hybrid": Conversion("three layers of four, with decay", {"decay": True, "layers": [0, 1, 2, 4, 5, 6]}, transfer=NORMS),
}
KEPT_KEYS = ", kept keys"  # ends the names of settings that compare kept keys with softmax
SETTINGS = equal_steps.SETTINGS | {name + KEPT_KEYS: setting for name, setting in equal_steps.SETTINGS.items()}


def runs(device: torch.device) -> list[Run]:
    size = equal_steps.setting_of(device)
    compared = {size: [name for name in VARIANTS if name != "kept_keys"], size + KEPT_KEYS: ["softmax", "kept_keys"]}
    return [Run(variant, name, LEARNING_RATE, 1, 45.0) for name, variants in compared.items() for variant in variants]


def execute(run: Run, place: Place) -> Iterator[Row]:
    """Yields rows of the loss after each stage, "before", "swapped", "fitted", "transferred" and "finetuned".

    `at` is the number of steps since the swap.
    """
    setting, conversion = SETTINGS[run.setting], VARIANTS[run.variant]
    train_data, held_out, described = data.on_device(place.data, place.device)
    validation = data.validation_windows(held_out, setting.context, setting.batch, setting.final)
    gpt = trained_teacher(setting, run.seed, place)
    to_prepare, to_finetune = (
        data.training_windows(train_data, setting.context, setting.batch, seed + run.seed) for seed in (1000, 2000)
    )
    began = time.perf_counter()

    def row(stage: str, step: int) -> Row:
        counts = {"at": step, "step": step, "tokens": step * setting.batch * setting.context, "parameters": parameters(gpt)}
        seconds = time.perf_counter() - began
        loss = training.evaluate(gpt, validation, setting.bf16)
        return {"measure": stage, "value": loss, "data": described, "seconds": seconds} | counts

    def batches(draw: Callable, count: int) -> Iterator[dict]:
        return (draw(None)._asdict() for _ in range(count))

    def train(function: Callable, *args, **options) -> None:
        with training.autocast(place.device, setting.bf16):  # rows are yielded outside of autocast
            function(gpt, *args, **options)

    yield row("before", 0)
    step = 0
    if conversion.swap is not None:
        teacher = copy.deepcopy(gpt)
        options = {"exact_window": setting.window, "longest_half_life": HALF_LIVES * setting.context}
        new = convert.swap(gpt, **options, **conversion.swap)
        yield row("swapped", 0)
        if conversion.fit:
            train(convert.fit_polynomial, teacher, batches(to_prepare, FIT_BATCHES))
            yield row("fitted", 0)
        if conversion.transfer is not None:
            step = place.steps or TRANSFER_STEPS
            names = new + named(gpt, conversion.transfer)
            train(convert.transfer, teacher, batches(to_prepare, step), names, steps=step, learning_rate=conversion.rate)
            yield row("transferred", step)
    if place.compile:
        training.compile_blocks(gpt)
    steps = place.steps or FINETUNE_STEPS
    train(convert.finetune, batches(to_finetune, steps), steps=steps, learning_rate=run.lr)
    yield row("finetuned", step + steps)


def named(gpt: model.GPT, endings: tuple[str, ...]) -> list[str]:
    """Returns the parameters of swapped layers whose names have one of these endings."""
    exchanged = [name for name, layer in gpt.named_modules() if getattr(layer, "attention", "") == "fastmax"]
    parameters_of = {f"{name}.{own}" for name in exchanged for own, _ in gpt.get_submodule(name).named_parameters()}
    return sorted(name for name in parameters_of if name.endswith(endings))


def trained_teacher(setting: language.Setting, seed: int, place: Place) -> model.GPT:
    """Returns the trained softmax model. The first process that needs it trains it and saves it beside the data."""
    *_, described = data.on_device(place.data, place.device)
    path = teacher_path(setting, seed, place, described)
    gpt = language.make(TEACHER, setting, seed, Place(place.device, place.data, False, False))
    with rows.locked(path, "teacher", wait=True):
        if not path.exists():
            trained = language.make(TEACHER, setting, seed, place)
            language.train(trained, setting, seed, place)
            unfinished = path.with_suffix(".part")
            torch.save(trained.state_dict(), unfinished)
            unfinished.replace(path)
    gpt.load_state_dict(torch.load(path, map_location=place.device))
    return gpt


def teacher_path(setting: language.Setting, seed: int, place: Place, described: str) -> Path:
    steps, digest = place.steps or setting.steps, described.split()[-1]  # another text gives another teacher
    return place.data.with_name(f"{place.data.stem}-{digest}-{TEACHER}-{setting.n_embd}-{steps}-{seed}.pt")


EXPERIMENT = Experiment(__doc__.partition("\n")[0], runs, execute)
