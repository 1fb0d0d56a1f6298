"""Equal time: the loss after the same time of training on long contexts, with softmax also by PyTorch's fastest kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.learn import equal_steps, language
from benchmarks.learn.rows import Row
from benchmarks.learn.runner import Experiment, Place, Run
from benchmarks.learn.variants import VARIANTS
from fastmax.ops import extension

SECONDS = 60.0
LONG = replace(
    equal_steps.SETTINGS["25M"],
    context=16384,
    batch=4,  # 65536 tokens per step, here and below
    steps=100_000,  # more than fit into the time
    seconds=SECONDS,
    rows=100_000 // 20,  # one every 20 steps
    warmup_share=0.1,  # a number of steps would be half of the slowest variant's time and a tenth of the fastest's
    validation=16,
    final=64,
)
SETTINGS = {
    "16k": LONG,
    "64k": replace(LONG, context=65536, batch=1, validation=4, final=16),
    "64k, 124M": replace(
        LONG, n_layer=12, n_head=12, n_embd=768, context=65536, batch=1, validation=2, final=8, lr=6e-4, rows=100_000 // 10
    ),
    # For trials without a GPU
    "256": replace(LONG, n_layer=4, n_head=2, n_embd=64, context=256, window=16, bf16=False, final=16),
}
COMPARED = ("softmax_sdpa", "p2_all", "softmax_parts_sdpa", "hybrid", "softmax_parts")
LARGE = COMPARED[:2]


def runs(device: torch.device) -> list[Run]:
    names = {"64k": COMPARED, "16k": COMPARED, "64k, 124M": LARGE} if device.type == "cuda" else {"256": COMPARED}
    return [Run(variant, name, SETTINGS[name].lr, 1, SECONDS + 60) for name, variants in names.items() for variant in variants]


def require_kernels(run: Run, place: Place) -> None:
    """Raises RuntimeError if the variant would run without its kernels on a GPU, since its time would be another one."""
    problem = extension.problem(place.device) if place.device.type == "cuda" else None
    if problem and not VARIANTS[run.variant].sdpa:
        raise RuntimeError(f"the seconds of {run.variant} are those of its kernels: {problem}")


def execute(run: Run, place: Place) -> Iterator[Row]:
    require_kernels(run, place)
    return language.train_run(run.variant, SETTINGS[run.setting], run.seed, run.lr, place)


EXPERIMENT = Experiment(__doc__, runs, execute)
