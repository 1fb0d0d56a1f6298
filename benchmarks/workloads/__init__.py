"""Functions that measure one case: inputs, check, times. `Suite.workload` names the function; it returns rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from benchmarks.registry import Case
from benchmarks.report import Row
from benchmarks.timing import Protocol
from benchmarks.workloads.attention import measure_attention
from benchmarks.workloads.decode import measure_decode
from benchmarks.workloads.generation import measure_generation
from benchmarks.workloads.softmax import measure_softmax
from benchmarks.workloads.train import measure_train

WORKLOADS: dict[str, Callable[[Case, torch.device, Protocol, Mapping[str, str]], list[Row]]] = {
    "attention": measure_attention,
    "decode": measure_decode,
    "generation": measure_generation,
    "softmax": measure_softmax,
    "train": measure_train,
}
