"""Ablation: the layer with all its parts, and without each of them in turn."""

from __future__ import annotations

import torch

from benchmarks.learn import equal_steps
from benchmarks.learn.runner import Experiment, Run
from benchmarks.learn.variants import VARIANTS

ABLATED = ("p2_all", "softmax_near", *(name for name in VARIANTS if name.startswith("p2_without_")))


def runs(device: torch.device) -> list[Run]:
    return equal_steps.runs_of(ABLATED, equal_steps.setting_of(device))


EXPERIMENT = Experiment(__doc__, runs, equal_steps.execute)
