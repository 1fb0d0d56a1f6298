"""Free windows: the loss at positions up to 64k after equal time, each attention at the windows and rate that suit it.

The models train on source trees (`trees`), on windows of one length or of growing ones. Every step has the same number of
bytes. A trained model is tested on windows of 64k in two ways: each byte from all bytes of the window before it ("whole"), and
from at most as many as the longest training window has ("near"). The losses with shorter contexts ("within") tell how much far
context lowers them. In settings with facts a quarter of the bytes are facts as in `needle`, and facts are searched in texts of
several lengths, in the same two ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.learn import data, equal_time, language, needle
from benchmarks.learn.examples import text, training
from benchmarks.learn.rows import Row
from benchmarks.learn.runner import Experiment, Place, Run
from benchmarks.learn.variants import fastest_softmax, parameters

FACT_PLACES = 2 * needle.LINE  # bytes of a fact in a training window, which has each twice


@dataclass(frozen=True)
class Setting:
    model: language.Setting  # its seconds, batch and context: batch * context bytes in a step, and the length of test windows
    windows: tuple[tuple[float, int], ...]  # from which part of the time on, how long windows are
    facts: float = 0.0  # share of bytes that are facts
    lengths: tuple[int, ...] = ()  # of texts in which facts are searched
    texts: int = 64  # per length
    limits: tuple[int, ...] = (1024, 4096, 16384)  # contexts of the losses "within"

    @property
    def longest(self) -> int:
        return max(length for _, length in self.windows)

    @property
    def bytes_of_step(self) -> int:
        return self.model.batch * self.model.context


MODEL = replace(
    equal_time.SETTINGS["64k"],
    rows=100_000 // 50,  # one every 50 steps
    validation=4,
    final=16,
)
GROWING = ((0.0, 1024), (0.5, 4096), (0.75, 16384), (0.9, 65536))
SOONER = ((0.0, 1024), (0.4, 4096), (0.6, 16384), (0.7, 65536))  # three times as long on the longest windows
SCHEDULES = {f"{length // 1024}k": ((0.0, length),) for length in (1024, 4096, 16384, 65536)}
SCHEDULES |= {"growing": GROWING, "growing sooner": SOONER}
LENGTHS = (4096, 8192, 16384, 32768, 65536)
FACTS = ", facts"  # ends the names of settings with facts
SETTINGS = {name: Setting(MODEL, windows) for name, windows in SCHEDULES.items()} | {
    name + FACTS: Setting(MODEL, windows, facts=0.25, lengths=LENGTHS) for name, windows in SCHEDULES.items()
}
TRIED = replace(
    MODEL, n_layer=4, n_head=2, n_embd=64, context=256, batch=4, window=16, rows=1000, validation=4, final=4, bf16=False
)
TRIALS = {  # without a GPU
    "trial": Setting(TRIED, ((0.0, 64), (0.5, 256)), limits=(64,)),
    "trial, facts": Setting(TRIED, ((0.0, 64), (0.5, 256)), facts=0.25, lengths=(64, 256), texts=4, limits=(64,)),
}
COMPARED = (
    *("p2_all", "kept_keys", "hybrid", "softmax_sdpa", "softmax_parts", "softmax_parts_sdpa"),
    *("hybrid_sdpa", "hybrid_kept_keys_sdpa", "hybrid_steady", "hybrid_middle", "kept_keys_wide_steady"),
    "hybrid_steady_gate_wide",
)
RATES = (1e-3, 2e-3)
SHOWN = {"setting": "growing", "lr": 2e-3}  # the runs of the figure


def runs(device: torch.device) -> list[Run]:
    settings = SETTINGS if device.type == "cuda" else TRIALS
    return [Run(variant, name, lr, 1, 110.0) for name in settings for lr in RATES for variant in COMPARED]


def execute(run: Run, place: Place) -> Iterator[Row]:
    equal_time.require_kernels(run, place)
    setting = (SETTINGS | TRIALS)[run.setting]
    setting = replace(setting, model=replace(setting.model, lr=run.lr))
    train_data, held_out, described = data.on_device(place.data, place.device, data.TREES)
    gpt = language.make(run.variant, setting.model, run.seed, place, shapes=len(setting.windows))
    rows, constant = [], {"parameters": parameters(gpt), "data": described}
    with fastest_softmax():
        for row in _trainer(gpt, setting, run.seed, place, train_data, held_out).run():
            constant |= {name: row[name] for name in ("step", "tokens", "seconds")}
            rows += [{"measure": measure, "at": row["step"], "value": row[measure]} | constant for measure in ("train", "val")]
        tested = _test(gpt.eval(), setting, held_out)
        return iter([*rows, *(row | constant for row in tested)])


def _edit(setting: Setting, length: int) -> data.Edit:
    if setting.facts == 0:
        return data.unchanged
    return partial(needle.with_facts, facts=max(1, int(setting.facts * length / FACT_PLACES)))


def _trainer(
    gpt: nn.Module, setting: Setting, seed: int, place: Place, train_data: Tensor, held_out: Tensor
) -> training.Trainer:
    """Returns a trainer that draws windows by the time that has passed."""
    lengths = {length for _, length in setting.windows}
    draws = {
        length: data.training_windows(
            train_data, length, setting.bytes_of_step // length, seed + 1000 * length, _edit(setting, length)
        )
        for length in lengths
    }
    recipe = setting.model.recipe(place)
    validation = _windows(held_out, setting, setting.model.validation)

    def draw(generator: torch.Generator) -> text.Batch:
        return draws[training.length_at(setting.windows, trainer.progress())](generator)

    drawn = data.generator(train_data.device, 0)
    later = [data.windows(train_data, length, setting.bytes_of_step // length, drawn) for _, length in setting.windows[1:]]
    trainer = training.Trainer(gpt, recipe, draw, validation, seed, later)  # which `draw` asks how far it is
    return trainer


def _windows(held_out: Tensor, setting: Setting, count: int) -> list[text.Batch]:
    """Returns test windows in batches of one."""
    return data.validation_windows(held_out, setting.model.context, 1, count, _edit(setting, setting.model.context))


@torch.no_grad()
def _test(gpt: nn.Module, setting: Setting, held_out: Tensor) -> Iterator[Row]:
    """Yields rows of "whole" and "near" losses, whose `at` is the length of the window, and by position "whole position" and
    "near position"; of the losses "within", whose `at` is the largest context; and of facts found, "whole needle" and "near
    needle", whose `at` is the length of the text."""
    batches = _windows(held_out, setting, setting.model.final)
    for name, context in (("whole", setting.model.context), ("near", setting.longest)):
        losses = _within(gpt, setting, batches, context)
        yield from language.position_rows(losses, f"{name} position")
        yield {"measure": name, "at": len(losses), "value": losses.mean().item()}
    for context in setting.limits:
        yield {"measure": "within", "at": context, "value": _within(gpt, setting, batches, context).mean().item()}
    for length in setting.lengths:
        drawn = data.generator(held_out.device, needle.TEST_SEED)
        texts = data.windows(held_out, length, setting.texts, drawn, needle.with_question).tokens
        # The question ends a text, so of the bytes near it those at the end are left.
        for name, cut in (("whole", length), ("near", min(length, setting.longest))):
            right = [needle.found(gpt, part[:, length - cut :], setting.model.bf16).all(-1) for part in texts.split(4)]
            yield {"measure": f"{name} needle", "at": length, "value": 100 * torch.cat(right).double().mean().item()}


def _within(gpt: nn.Module, setting: Setting, batches: list[text.Batch], length: int) -> Tensor:
    """Returns losses with at most `length` bytes of context: windows overlap by half, and the second half counts."""
    whole = setting.model.context
    if length == whole:
        return _by_position(gpt, setting, batches)
    half = length // 2
    pieces: list[Tensor] = []
    for begin in range(0, whole - half, half):
        tokens, targets = (
            torch.cat([getattr(batch, name)[:, begin : begin + length] for batch in batches]) for name in ("tokens", "targets")
        )
        losses = _by_position(gpt, setting, [text.Batch(tokens, targets)])
        pieces.append(losses if begin == 0 else losses[half:])
    return torch.cat(pieces)


def _by_position(gpt: nn.Module, setting: Setting, batches: list[text.Batch]) -> Tensor:
    """Returns the mean loss at each position of the windows."""
    with torch.compiler.set_stance("force_eager"):  # each length would be compiled separately
        return training.evaluate_by_position(gpt, batches, setting.model.bf16)[0]


EXPERIMENT = Experiment(__doc__.partition("\n")[0], runs, execute)
