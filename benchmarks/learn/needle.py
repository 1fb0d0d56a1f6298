"""Needle: one fact, a key and its value, in 4k to 128k tokens of text, for a model trained on 8k.

A fact is the line `@key=value`, six letters each. It stands twice in a text, and nothing but the first tells what the value in
the second is. In training there are many facts in a window, at random distances; in a test there is one, whose second line ends
the text. What counts is that all letters of its value are the likeliest ones: what generating greedily would give.

A model learns to copy on short windows, then to do so across long ones: on these alone it does not in as many steps.
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
VALUE = slice(-1 - LETTERS, -1)  # of a line, and of a text that ends with one
TEST_SEED = 1


@dataclass(frozen=True)
class Setting:
    short: language.Setting  # of the windows that are trained on first
    model: language.Setting
    facts: int  # in a window of the model's context; in a short one as many for its length
    lengths: tuple[int, ...]
    texts: int  # of a length; fewer where they are longer than `test_tokens` together
    test_tokens: int


# Where there is no GPU
TRIED = language.Setting(
    n_layer=4, n_head=2, n_embd=64, context=128, batch=8, steps=200, lr=3e-3, window=16, validation=16, final=16
)
SETTINGS = {
    "25M": Setting(
        replace(equal_steps.SETTINGS["25M"], rows=1, validation=32, final=32),  # of which only the counts are read
        replace(
            equal_steps.SETTINGS["25M"], context=8192, batch=8, steps=300, lr=1e-3, warmup=30, rows=10, validation=32, final=64
        ),
        facts=64,
        lengths=tuple(2**k for k in range(12, 18)),
        texts=256,
        test_tokens=2**22,
    ),
    "0.2M": Setting(
        replace(TRIED, context=64),
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
    """(count, facts, LINE) bytes."""
    sentence = torch.tensor(list(b"\n@" + b"?" * LETTERS + b"=" + b"?" * LETTERS + b"\n"), device=drawn.device)
    letters = torch.randint(ord("a"), ord("z") + 1, (count, facts, LINE), generator=drawn, device=drawn.device)
    return torch.where(sentence == ord("?"), letters, sentence)


def with_facts(window: Tensor, drawn: torch.Generator, facts: int) -> Tensor:
    """Windows (B, T + 1) with so many facts written over them, each at two of the places that multiples of LINE are."""
    count, places = len(window), (window.shape[1] - 1) // LINE
    order = torch.rand(count, places, generator=drawn, device=window.device).argsort(1)[:, : 2 * facts]
    where = (order * LINE).unsqueeze(-1) + torch.arange(LINE, device=window.device)
    written = lines(count, facts, drawn).repeat(1, 2, 1)
    return window.scatter(1, where.flatten(1), written.flatten(1))


def with_question(window: Tensor, drawn: torch.Generator) -> Tensor:
    """Texts (B, T + 1) with one fact, whose second line is the last there is; the first anywhere before."""
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
    """(B, LETTERS) bool: whether the letters of the values at the end of texts (B, T) are what the model expects there."""
    eager = torch.compiler.set_stance("force_eager")  # every length would be compiled anew
    with training.autocast(texts.device, bf16), fastest_softmax(), eager:
        logits = gpt(texts)
    expected = logits[:, VALUE.start - 1 : VALUE.stop - 1].argmax(-1)
    return expected == texts[:, VALUE]


def train(gpt: nn.Module, setting: Setting, seed: int, place: Place) -> list[Row]:
    """Rows of the training on the model's context, which count what came before."""
    few = setting.facts * setting.short.context // setting.model.context
    before = language.train(gpt, setting.short, seed, place, partial(with_facts, facts=few))[-1]
    torch.compiler.reset()  # windows of another length are another program, not one for all lengths
    trained = language.train(gpt, setting.model, seed, place, partial(with_facts, facts=setting.facts))
    counted = [row | {name: row[name] + before[name] for name in COUNTS} for row in trained]
    return [row | {"at": row["step"]} if row["measure"] in ("train", "val") else row for row in counted]


def runs(device: torch.device) -> list[Run]:
    name = "25M" if device.type == "cuda" else "0.2M"
    return [Run(variant, name, SETTINGS[name].model.lr, 1, 110.0) for variant in COMPARED]


def execute(run: Run, place: Place) -> Iterator[Row]:
    """Rows of `language.train`, and for each length percent of facts ("needle") and of their letters ("letters") found."""
    setting = SETTINGS[run.setting]
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
