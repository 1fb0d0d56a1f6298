"""Equal time: what is learned in so many seconds of training on long context, where softmax is as fast as PyTorch has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.learn import language
from benchmarks.learn.language import Setting
from benchmarks.learn.rows import Row
from benchmarks.learn.runner import Experiment, Place, Run

SECONDS = 90.0
LONG = Setting(
    n_layer=8,
    n_head=8,
    n_embd=512,
    context=16384,
    batch=8,
    steps=100_000,  # more than there is time for
    seconds=SECONDS,
    rows=100_000 // 20,  # one every 20 steps
    lr=1e-3,
    window=128,
    warmup=50,
    validation=16,
    final=64,
    bf16=True,
)
# 131072 tokens a step in all of them. The last two are for trying out where there is no GPU.
SETTINGS = {
    "16k": LONG,
    "64k": replace(LONG, context=65536, batch=2, validation=4, final=16),
    "256": replace(LONG, n_layer=2, n_head=2, n_embd=64, context=256, window=16, bf16=False, final=16),
}
COMPARED = ("softmax_sdpa", "p2_all", "softmax_parts_sdpa", "hybrid", "softmax_parts")


def runs(device: torch.device) -> list[Run]:
    names = ("64k", "16k") if device.type == "cuda" else ("256",)
    return [Run(variant, name, SETTINGS[name].lr, 1, SECONDS + 60) for variant in COMPARED for name in names]


def execute(run: Run, place: Place) -> Iterator[Row]:
    return language.train_run(run.variant, SETTINGS[run.setting], run.seed, run.lr, place)


EXPERIMENT = Experiment(__doc__, runs, execute)
