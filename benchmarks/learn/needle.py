"""Needle: one fact, a key and its value, in 4k to 128k tokens of text, for a model trained on 8k.

A fact is the line `@key=value`, of six letters each. It occurs twice in a text; the value in the second line can only be known
from the first. A training window has many facts, at random distances. A test text has one, whose second line ends the text. A
fact is found if every letter of its value is the model's most likely one, as in greedy generation.

A model first learns to copy on short windows, then across long ones. With long windows alone it does not learn it in as many
steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.learn import data, equal_steps, language
from benchmarks.learn.examples import training
from benchmarks.learn.rows import Row
from benchmarks.learn.runner import Experiment, Place, Run
from benchmarks.learn.variants import fastest_softmax

LETTERS = 6
LINE = len("\n@") + LETTERS + len("=") + LETTERS + len("\n")
VALUE = slice(-1 - LETTERS, -1)  # the value in a line, or in a text that ends with a line
TEST_SEED = 1


@dataclass(frozen=True)
class Stage:
    """A training on windows of one length."""

    model: language.Setting
    facts: int  # facts in a window


@dataclass(frozen=True)
class Setting:
    short: tuple[Stage, ...]  # on short windows, one after the other; only counts of their models are used
    model: language.Setting
    facts: int  # facts in a window of the model's context
    lengths: tuple[int, ...]  # of test texts
    texts: int  # test texts per length; fewer if together they are longer than `test_tokens`
    test_tokens: int


# For trials without a GPU
TRIED = language.Setting(
    n_layer=4, n_head=2, n_embd=64, context=128, batch=8, steps=200, lr=3e-3, window=16, validation=16, final=16
)
SETTINGS = {
    "25M": Setting(
        (Stage(replace(equal_steps.SETTINGS["25M"], rows=1, validation=32, final=32), facts=8),),
        replace(
            equal_steps.SETTINGS["25M"], context=8192, batch=8, steps=300, lr=1e-3, warmup=30, rows=10, validation=32, final=64
        ),
        facts=64,
        lengths=tuple(2**k for k in range(12, 18)),
        texts=256,
        test_tokens=2**22,
    ),
    "0.2M": Setting(
        (Stage(replace(TRIED, context=64), facts=2),),
        TRIED,
        facts=4,
        lengths=(64, 128, 256),
        texts=32,
        test_tokens=2**12,
    ),
}
COUNTS = ("step", "tokens", "seconds")
COMPARED = ("p2_all", "softmax_sdpa", "hybrid", "softmax_parts", "p2_window")


def lines(count: int, facts: int, drawn: torch.Generator) -> Tensor:
    """Returns random lines of facts, bytes (count, facts, LINE)."""
    sentence = torch.tensor(list(b"\n@" + b"?" * LETTERS + b"=" + b"?" * LETTERS + b"\n"), device=drawn.device)
    letters = torch.randint(ord("a"), ord("z") + 1, (count, facts, LINE), generator=drawn, device=drawn.device)
    return torch.where(sentence == ord("?"), letters, sentence)


def with_facts(window: Tensor, drawn: torch.Generator, facts: int) -> Tensor:
    """Writes facts into windows (B, T + 1), each at two random multiples of LINE; returns the windows."""
    count, places = len(window), (window.shape[1] - 1) // LINE
    order = torch.rand(count, places, generator=drawn, device=window.device).argsort(1)[:, : 2 * facts]
    where = (order * LINE).unsqueeze(-1) + torch.arange(LINE, device=window.device)
    written = lines(count, facts, drawn).repeat(1, 2, 1)
    return window.scatter(1, where.flatten(1), written.flatten(1))


def with_question(window: Tensor, drawn: torch.Generator) -> Tensor:
    """Writes a fact into texts (B, T + 1): once at a random position, and once at the end; returns the texts."""
    count, length = window.shape[0], window.shape[1] - 1
    (fact,) = lines(count, 1, drawn).unbind(1)
    last = length - LINE
    begin = torch.randint(last - LINE + 1, (count, 1), generator=drawn, device=window.device)
    where = begin + torch.arange(LINE, device=window.device)
    window = window.scatter(1, where, fact)
    window[:, last:length] = fact
    return window


@torch.no_grad()
def found(gpt: nn.Module, texts: Tensor, bf16: bool) -> Tensor:
    """Returns whether the model predicts the letters of the value at the end of each text (B, T): bool (B, LETTERS)."""
    eager = torch.compiler.set_stance("force_eager")  # each length would be compiled separately
    with training.autocast(texts.device, bf16), fastest_softmax(), eager:
        logits = gpt(texts)
    expected = logits[:, VALUE.start - 1 : VALUE.stop - 1].argmax(-1)
    return expected == texts[:, VALUE]


def train(gpt: nn.Module, setting: Setting, seed: int, place: Place) -> list[Row]:
    """Trains on short windows, then on the model's context.

    Returns:
        The rows of the latter, with counts of all; and the validation losses of the former ("short").
    """
    rows: list[Row] = []
    before = dict.fromkeys(COUNTS, 0)
    for stage in (*setting.short, Stage(setting.model, setting.facts)):
        torch.compiler.reset()  # compiles windows of another length separately, without dynamic shapes
        trained = language.train(gpt, stage.model, seed, place, partial(with_facts, facts=stage.facts))
        counted = [row | {name: row[name] + before[name] for name in COUNTS} for row in trained]
        counted = [row | {"at": row["step"]} if row["measure"] in ("train", "val") else row for row in counted]
        if stage in setting.short:
            counted = [row | {"measure": "short"} for row in counted if row["measure"] == "val"]
        rows += counted
        before = counted[-1]
    return rows


def runs(device: torch.device) -> list[Run]:
    name = "25M" if device.type == "cuda" else "0.2M"
    return [Run(variant, name, SETTINGS[name].model.lr, 1, 110.0) for variant in COMPARED]


def execute(run: Run, place: Place) -> Iterator[Row]:
    return train_and_test(run, SETTINGS[run.setting], place)


def train_and_test(run: Run, setting: Setting, place: Place) -> Iterator[Row]:
    """Yields the rows of `train`, and for each length the percentages of facts ("needle") and letters ("letters") found."""
    gpt = language.make(run.variant, setting.model, run.seed, place)
    trained = train(gpt, setting, run.seed, place)
    yield from trained
    constant = {name: trained[-1][name] for name in (*COUNTS, "parameters", "data")}
    _, held_out, _ = data.on_device(place.data, place.device)
    gpt.eval()
    for length in setting.lengths:
        count = min(setting.texts, setting.test_tokens // length)
        batch = max(1, setting.model.batch * setting.model.context // length)
        drawn = data.generator(place.device, TEST_SEED)
        right = []
        for begin in range(0, count, batch):
            texts = data.windows(held_out, length, min(batch, count - begin), drawn, with_question)
            right.append(found(gpt, texts.tokens, setting.model.bf16))
        letters = torch.cat(right)
        for measure, share in (("needle", letters.all(-1)), ("letters", letters)):
            yield {"measure": measure, "at": length, "value": 100 * share.double().mean().item()} | constant


EXPERIMENT = Experiment(__doc__.partition("\n")[0], runs, execute)
