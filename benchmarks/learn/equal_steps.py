"""Equal steps: the loss of every variant after training on the same tokens in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from benchmarks.learn import language
from benchmarks.learn.language import Setting
from benchmarks.learn.rows import Row
from benchmarks.learn.runner import Experiment, Place, Run
from benchmarks.learn.variants import VARIANTS

MEDIUM = Setting(n_layer=8, n_head=8, n_embd=512, context=1024, batch=32, steps=1000, lr=2e-3, window=128, bf16=True)
SETTINGS = {
    "25M": MEDIUM,
    "124M": replace(MEDIUM, n_layer=12, n_head=12, n_embd=768, lr=1e-3),
    # The exact window is short like the context: with 128 all keys would be local
    "0.8M": Setting(
        n_layer=4,
        n_head=4,
        n_embd=128,
        context=128,
        batch=8,
        steps=600,
        lr=2e-3,
        window=16,
        warmup=30,
        rows=10,
        validation=64,
        final=512,
    ),
}
OURS = ("softmax", "softmax_parts", "p2_all", "hybrid", "p2_wide", "softmax_wide", "p2", "p2_decay", "p2_window", "p1_all")
OF_124M = ("softmax_parts", "kept_keys", "p2_all", "softmax")
SECONDS = {"25M": 75.0, "124M": 200.0, "0.8M": 150.0}
THEIRS = ("fla_gla", "fla_gdn", "fla_based_window")


def setting_of(device: torch.device) -> str:
    return "25M" if device.type == "cuda" else "0.8M"


def runs(device: torch.device) -> list[Run]:
    if device.type != "cuda":
        return runs_of(OURS, setting_of(device))
    return [*runs_of((*OURS, *THEIRS), setting_of(device)), *runs_of(OF_124M, "124M")]


def runs_of(variants: Iterable[str], name: str) -> list[Run]:
    """Returns runs of variants in the setting of a name."""
    return [Run(variant, name, SETTINGS[name].lr, 1, SECONDS[name] + VARIANTS[variant].tuning) for variant in variants]


def execute(run: Run, place: Place) -> Iterator[Row]:
    return language.train_run(run.variant, SETTINGS[run.setting], run.seed, run.lr, place)


def missing(run: Run) -> str:
    return VARIANTS[run.variant].missing


EXPERIMENT = Experiment(__doc__, runs, execute, missing)
