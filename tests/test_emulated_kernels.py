"""The sources of the Hopper kernels and of the layer's kernels run in an emulator on the CPU (tests/emulator) and are compared
with the PyTorch implementation in float64, with several schedules of threads, copies and products. Sizes: a warpgroup of the
quadratic kernels owns 64 rows and walks over tiles of 64 or 128 tokens; chunks of the linear kernels have 256 rows at head dim
64 and 1024 at 128, tiles 64."""

import copy
import fcntl
import math
import re
from dataclasses import dataclass, replace
from functools import partial

import emulator
import invalid_bounds
import pytest
import torch
from common import CSRC, bounded, load_build, make_decay, relative
from test_decode_buffered import buffered_state
from test_gather_kept import (
    PLACES,
    STEPS,
    candidates,
    check_rows,
    check_steps,
    expected_rows,
    largest,
    places,
    rows,
    run_steps,
    steps,
)
from test_heads import join_arguments, join_by_definition, outputs_and_gradients, split_arguments, split_by_definition
from test_merge_in_place import merged as merged_in_place
from test_merge_in_place import operands
from test_merge_parts import LAYOUTS, check_merged, make_parts, merged_by_definition

from fastmax import eager
from fastmax.core import call as core
from fastmax.core.score import Score
from fastmax.ops import exact_window
from fastmax.prepare.bounds import sequence_of_token, with_bounds

MULTIPROCESSORS = 2  # blocks that take the items of a persistent kernel
# In order; two adversaries, of which everything asynchronous is late; at random.
SCHEDULES = (0, 1, 2, 3, 4)
ADVERSARY_AND_RANDOM = ((1, 3), (2, 4))
OBJECTS = CSRC.parent / "build" / "emulator"


@pytest.fixture(scope="session")
def library():
    """Returns the library, compiled by the process that comes first. Later runs compile only what has changed."""
    build = load_build()
    try:
        build.cuda_home()
    except build.BuildError as error:
        pytest.skip(str(error))
    folder = OBJECTS
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return emulator.build(folder)


@dataclass(frozen=True)
class Case:
    algorithm: str
    kernels: str  # that cover it: the row of csrc's table
    n: int
    m: int
    d: int
    dv: int = 0  # more than d: values in blocks of d columns; 0: as many as d
    b: int = 1
    h: int = 2
    hk: int = 2
    causal: bool = True
    padding: bool = False
    dropout: float = 0.0
    decay: str | float | None = None  # a number: of every token
    decay_gradient: bool = True
    gate: str | None = None
    packed: tuple[int, ...] = ()  # where sequences begin and end
    left: int = -1
    right: int = -1
    exact_window: int = 0
    lag: int = 0  # tokens by which the decays of a query reach beyond its position
    lim: float = 0.0  # to which rows of q and k are shortened
    order: int = 2
    dtype: torch.dtype = torch.bfloat16
    backward: bool = True
    multiprocessors: int = MULTIPROCESSORS
    resident: int = 2  # blocks that run side by side
    fused: bool = False  # the backward is one kernel
    schedules: int = 2  # 1: of a larger call whose kernels smaller ones run by two

    def __str__(self):
        options = [name for name in ("causal", "padding", "decay", "packed") if getattr(self, name)]
        options += ["without its gradient"] * (not self.decay_gradient) + [f"gate {self.gate}"] * (self.gate is not None)
        options += ["dropout"] * (self.dropout > 0) + ["window"] * (self.left >= 0) + ["fused"] * self.fused
        options += (
            [f"lim {self.lim}"] * (self.lim > 0)
            + [f"lag {self.lag}"] * (self.lag > 0)
            + [f"exact_window {self.exact_window}"] * (self.exact_window > 0)
        )
        width = f"{self.d}/{self.dv}" if self.dv > 0 else f"{self.d}"
        return f"{self.kernels} {self.n}x{self.m} d{width} h{self.h}/{self.hk} {' '.join(options)}"

    @property
    def table(self):
        """The table that has the kernels."""
        return self.algorithm if self.lim == 0 else "linear of shortened rows"

    @property
    def value_dim(self):
        return self.dv or self.d

    @property
    def kernels_head_dim(self):
        return {} if self.dv == 0 else {"kernels_head_dim": self.d}

    @property
    def backward_kernels(self):
        return self.kernels.replace("_sm90", "_fused_sm90") if self.fused else self.kernels

    @property
    def is_softmax(self):
        """Whether the second result is the logarithm of the sums of weights."""
        return self.algorithm in ("flash", "exact_window", "linear exact window")


def window_in_linear(*args, **options):
    return Case("linear exact window", "linear2_window_sm90", *args, **options)


def quadratic(*args, **options):
    return [Case(algorithm, f"{algorithm}_sm90", *args, **options) for algorithm in ("quadratic", "flash")]


CASES = [
    *quadratic(130, 257, 64, causal=False),
    *quadratic(257, 300, 64, h=4, hk=2),
    *quadratic(200, 257, 128, h=4, hk=2, padding=True),
    *quadratic(130, 70, 128, causal=False),
    Case("quadratic", "quadratic_sm90", 200, 257, 64, dropout=0.3),
    Case("flash", "flash_sm90", 200, 257, 64, dtype=torch.float16, backward=False),
    Case("flash", "flash_sm90", 130, 257, 128, dtype=torch.float16, backward=False),
    *(
        Case(algorithm, f"{algorithm}_bounded_sm90", 257, 257, d, b=1, h=4, hk=2, packed=(0, 70, 71, 200, 257), causal=causal)
        for algorithm, d, causal in (("quadratic", 64, True), ("quadratic", 128, False), ("flash", 64, False))
    ),
    *quadratic(200, 257, 32, h=4, hk=2),
    *quadratic(130, 257, 96, causal=False),
    # The fused backward needs at least this many keys (fused_bwd_plan.h). Its blocks wait for each other, side by side and one
    # after the other.
    Case("quadratic", "quadratic_sm90", 130, 1100, 128, hk=1, padding=True, fused=True),
    Case("flash", "flash_sm90", 130, 1100, 128, h=1, hk=1, causal=False, fused=True, multiprocessors=4, resident=4),
    Case("flash", "flash_sm90", 70, 1100, 128, fused=True, multiprocessors=4, resident=1),
    Case("quadratic", "quadratic_sm90", 70, 1100, 128, dropout=0.3, fused=True, multiprocessors=3),
    # At narrow heads of 256 queries and more, for several counters and both writers; weights are not divided by their sums.
    Case("quadratic", "quadratic_sm90", 130, 1100, 32, hk=1, padding=True, fused=True),
    Case("flash", "flash_sm90", 300, 1100, 32, h=1, hk=1, causal=False, fused=True, multiprocessors=4, resident=4),
    Case("flash", "flash_sm90", 700, 1400, 32, fused=True, multiprocessors=4, resident=1, schedules=1),
    Case("quadratic", "quadratic_sm90", 70, 1100, 32, dropout=0.3, fused=True, multiprocessors=3),
    Case("quadratic", "quadratic_sm90", 600, 1450, 32, h=4, hk=2, fused=True, multiprocessors=3, resident=3, schedules=1),
    Case(
        "quadratic",
        "quadratic_sm90",
        400,
        1300,
        64,
        h=4,
        hk=2,
        padding=True,
        fused=True,
        multiprocessors=3,
        resident=3,
        schedules=1,
    ),
    Case("flash", "flash_sm90", 300, 1100, 64, h=1, hk=1, causal=False, fused=True, multiprocessors=4, resident=4),
    Case("quadratic", "quadratic_sm90", 130, 1100, 64, dropout=0.3, fused=True, multiprocessors=4, resident=1),
    Case("flash", "flash_window_sm90", 257, 257, 128, left=50),
    Case("flash", "flash_window_sm90", 200, 300, 64, left=40, right=90, causal=False),
    Case("quadratic", "quadratic_decay_sm90", 257, 300, 64, h=4, hk=2, decay="ordinary"),
    Case("flash", "flash_decay_sm90", 257, 300, 64, decay="ordinary"),
    Case("quadratic", "quadratic_decay_sm90", 200, 257, 128, decay="weak", backward=False),
    Case("flash", "flash_decay_sm90", 200, 257, 128, decay="weak"),
    Case("quadratic", "quadratic_decay_sm90", 257, 300, 64, h=4, hk=2, decay="ordinary", lag=37),
    Case("quadratic", "quadratic_decay_sm90", 200, 257, 128, decay="none, ordinary or strong", lag=3),
    Case("quadratic", "quadratic_decay_sm90", 130, 130, 64, hk=1, decay="weak", lag=200),
    # Local tiles, whole tiles of global keys, and partly visible ones of both kinds.
    Case("exact_window", "exact_window_decay_sm90", 600, 700, 64, h=4, hk=2, decay="ordinary", exact_window=100),
    Case("exact_window", "exact_window_decay_sm90", 300, 300, 128, decay="weak", exact_window=1, padding=True),
    Case(
        "exact_window", "exact_window_decay_sm90", 420, 420, 32, decay="strong", exact_window=128, packed=(0, 70, 71, 200, 420)
    ),
    Case("exact_window", "exact_window_decay_sm90", 450, 450, 64, decay="none, ordinary or strong", exact_window=128),
    Case("exact_window", "exact_window_decay_sm90", 330, 400, 64, decay="strong", exact_window=70, padding=True),
    Case("exact_window", "exact_window_decay_sm90", 420, 450, 128, decay="none, ordinary or strong", exact_window=33),
    Case(
        "exact_window", "exact_window_decay_sm90", 300, 345, 64, hk=1, decay="ordinary", exact_window=40, decay_gradient=False
    ),
    Case("flash", "flash_decay_sm90", 200, 257, 128, decay="weak", decay_gradient=False),
    Case("exact_window", "exact_window_sm90", 600, 650, 64, h=4, hk=2, exact_window=17),
    Case("exact_window", "exact_window_sm90", 500, 560, 64, exact_window=70, causal=False, padding=True),
    Case("exact_window", "exact_window_sm90", 300, 300, 96, exact_window=130, packed=(0, 100, 300), order=1),
    Case("exact_window", "exact_window_sm90", 130, 400, 128, exact_window=1000),
    Case("linear", "linear2_sm90", 257, 300, 32, h=4, hk=2, padding=True),
    Case("linear", "linear2_sm90", 300, 300, 32, h=1, hk=1, decay="ordinary"),
    Case("linear", "linear2_sm90", 300, 345, 32, h=2, hk=1, decay="ordinary", lag=50, padding=True),
    Case("linear", "linear2_sm90", 300, 300, 64, h=2, hk=1, decay="none, ordinary or strong", lag=2),
    Case("linear", "linear2_sm90", 520, 540, 64, h=1, hk=1, decay="weak", lag=128, schedules=1),
    Case("linear", "linear2_sm90", 560, 560, 128, h=1, hk=1, decay="weak", lag=70, schedules=1),
    Case("linear", "linear2_sm90", 520, 520, 32, h=1, hk=1, multiprocessors=8),  # in segments
    Case("linear", "linear2_sm90", 130, 257, 64, h=1, hk=1, causal=False),
    Case("linear", "linear2_sm90", 257, 300, 64, hk=1, padding=True),
    Case("linear", "linear2_sm90", 300, 300, 64, h=1, hk=1, decay="ordinary"),
    Case("linear", "linear2_sm90", 300, 300, 64, h=1, hk=1, packed=(0, 100, 257, 300)),
    # Short sequences: intra-chunk tiles that no row sees are passed over.
    Case("linear", "linear2_sm90", 900, 900, 64, h=4, hk=2, packed=(*range(0, 900, 37), 900), schedules=1),
    # A walk of more stages than the ring of the state kernel has, with several snapshots.
    Case("linear", "linear2_sm90", 900, 900, 64, h=1, hk=1, decay="ordinary", schedules=1),
    Case("linear", "linear2_sm90", 290, 290, 64, h=1, hk=1, multiprocessors=8),  # a state in eight blocks, not four
    Case("linear", "linear2_sm90", 520, 520, 64, h=1, hk=1, multiprocessors=16, schedules=1),  # and in segments
    # Rows are scaled for such blocks too, and in segments.
    Case("linear", "linear2_sm90", 290, 290, 64, h=1, hk=1, decay="ordinary", multiprocessors=8),
    Case("linear", "linear2_sm90", 520, 520, 64, h=1, hk=1, decay="none, ordinary or strong", multiprocessors=16, schedules=1),
    # Other gradient kernels, without sums of pairs.
    Case("linear", "linear2_sm90", 300, 300, 32, h=1, hk=1, decay="ordinary", decay_gradient=False),
    Case("linear", "linear2_sm90", 300, 345, 64, h=2, hk=1, decay="ordinary", padding=True, decay_gradient=False),
    Case("linear", "linear2_sm90", 560, 560, 128, h=1, hk=1, decay="weak", decay_gradient=False, schedules=1),
    Case("linear", "linear2_sm90", 130, 200, 128, h=1, hk=1),
    Case("linear", "linear2_sm90", 560, 560, 128, h=1, hk=1, decay="weak"),
    # Keys that read a state too.
    Case("linear", "linear2_sm90", 130, 200, 128, h=2, hk=1, causal=False, padding=True, schedules=1),
    Case("linear", "linear2_sm90", 1090, 1160, 128, h=1, hk=1, decay="weak", padding=True, schedules=1),
    # States that lag: rows before the first key, tiles of local, of global and of both keys, chunks that end within the rows.
    window_in_linear(600, 600, 64, h=4, hk=2, exact_window=128),
    window_in_linear(330, 330, 64, exact_window=1, padding=True),
    window_in_linear(300, 345, 64, hk=1, exact_window=17),
    window_in_linear(257, 400, 64, exact_window=64, padding=True, h=1, hk=1),
    window_in_linear(70, 700, 64, exact_window=130, h=1, hk=1),
    window_in_linear(520, 520, 32, h=1, hk=1, exact_window=250, multiprocessors=8),
    window_in_linear(600, 650, 64, h=4, hk=2, decay="ordinary", exact_window=128),
    window_in_linear(300, 300, 64, h=1, hk=1, decay="none, ordinary or strong", exact_window=40, padding=True),
    window_in_linear(520, 540, 32, hk=1, decay="weak", exact_window=100, padding=True),
    window_in_linear(300, 300, 32, h=1, hk=1, decay="strong", exact_window=3),
    window_in_linear(300, 345, 64, h=2, hk=1, decay="ordinary", exact_window=256, decay_gradient=False),
    window_in_linear(130, 800, 32, h=1, hk=1, decay="weak", exact_window=256),  # keys that no query reads in its chunk
    window_in_linear(420, 420, 64, h=2, hk=1, exact_window=70, packed=(0, 70, 71, 200, 420)),
    window_in_linear(420, 420, 32, h=1, hk=1, exact_window=128, packed=(0, 70, 71, 200, 420)),
    window_in_linear(420, 420, 64, h=1, hk=1, exact_window=30, packed=(0, 170, 420), decay="ordinary"),
    window_in_linear(900, 900, 32, h=1, hk=1, exact_window=63, packed=(*range(0, 900, 37), 900), schedules=1),
    window_in_linear(200, 257, 128, h=2, hk=1, exact_window=100, padding=True),
    window_in_linear(300, 345, 128, h=2, hk=1, exact_window=200, decay="ordinary", padding=True, schedules=1),
    window_in_linear(1100, 1100, 128, h=1, hk=1, exact_window=65, decay="weak", schedules=1),
    window_in_linear(400, 400, 128, h=1, hk=1, exact_window=128, packed=(0, 100, 400)),
    # Order 1: walks of more tiles than the rings of a block have stages, by one block and by two; and from sums over parts.
    Case("linear", "linear1_sm90", 600, 600, 64, h=1, hk=1, order=1, multiprocessors=1),
    Case("linear", "linear1_sm90", 700, 777, 64, hk=1, order=1, dropout=0.3, schedules=1),
    Case("linear", "linear1_sm90", 1000, 1000, 64, h=1, hk=1, order=1, multiprocessors=8, schedules=1),
    Case("linear", "linear1_sm90", 330, 400, 128, hk=1, order=1),
    Case("linear", "linear1_sm90", 600, 600, 128, h=1, hk=1, order=1, multiprocessors=8),
    # And of shortened rows, with keys that end with a tile and such that do not.
    Case("linear", "linear1_sm90", 640, 640, 64, h=1, hk=1, order=1, lim=0.8, multiprocessors=1),
    Case("linear", "linear1_sm90", 700, 777, 64, hk=1, order=1, lim=0.7, schedules=1),
    Case("linear", "linear1_sm90", 1000, 1000, 64, h=1, hk=1, order=1, lim=0.8, multiprocessors=8, schedules=1),
    Case("linear", "linear1_sm90", 330, 400, 128, hk=1, order=1, lim=0.8),
    Case("linear", "linear1_sm90", 600, 600, 128, h=1, hk=1, order=1, lim=0.8, multiprocessors=8),
    # Values in blocks, of which the last has fewer columns.
    Case("linear", "linear2_sm90", 300, 345, 64, 136, hk=1, padding=True),
    Case("linear", "linear2_sm90", 300, 300, 64, 128, h=2, hk=1, dropout=0.3, decay="ordinary", packed=(0, 100, 257, 300)),
    Case("linear", "linear2_sm90", 130, 257, 32, 64, h=1, hk=1, causal=False),
    Case("linear", "linear2_sm90", 300, 345, 32, 72, h=2, hk=1, decay="ordinary", lag=50),
    Case("linear", "linear1_sm90", 600, 600, 64, 128, h=1, hk=1, order=1, multiprocessors=1, schedules=1),
    Case("linear", "linear1_sm90", 640, 640, 64, 88, h=1, hk=1, order=1, lim=0.8, schedules=1),
    Case("linear exact window", "linear2_window_sm90", 300, 345, 64, 128, hk=1, exact_window=17, padding=True),
    Case("linear exact window", "linear2_window_sm90", 300, 300, 32, 40, h=1, hk=1, decay="ordinary", exact_window=30),
    Case("quadratic", "quadratic_sm90", 200, 257, 64, 128, padding=True, dropout=0.3),
    Case("quadratic", "quadratic_sm90", 130, 1100, 32, 64, hk=1, fused=True),
    Case("flash", "flash_decay_sm90", 257, 300, 64, 136, decay="ordinary"),
    Case("exact_window", "exact_window_sm90", 300, 350, 64, 128, exact_window=17, schedules=1),
]


# Gates of keys, from numbers between 0 and 1. "far apart": the ends of the range, and beyond them.
GATES = {
    "ordinary": lambda x: 8 * x - 4,
    "small": lambda x: 3 * x - 12,
    "far apart": lambda x: torch.tensor([-70.0, -60.0, -5.0, 0.0, 3.0, 29.0, 31.0])[(7 * x).long()],
    "smallest": lambda x: torch.full_like(x, -60.0),
    "largest": lambda x: torch.full_like(x, 30.0),
    "few large": lambda x: torch.where(torch.arange(x.shape[-1]) // 16 == 7, 30.0, -60.0).expand(x.shape),
}


def gated_window(*args, **options):
    return Case("exact_window", "exact_window_decay_sm90", *args, **options)


GATED = [
    Case("quadratic", "quadratic_decay_sm90", 257, 300, 64, h=4, hk=2, gate="ordinary"),
    Case("quadratic", "quadratic_decay_sm90", 257, 300, 64, h=4, hk=2, decay="ordinary", gate="far apart", padding=True),
    Case("quadratic", "quadratic_decay_sm90", 200, 257, 128, decay="none, ordinary or strong", gate="ordinary", lag=3),
    Case("quadratic", "quadratic_decay_sm90", 300, 300, 64, hk=1, decay="weak", gate="small", packed=(0, 100, 257, 300)),
    Case(
        "quadratic",
        "quadratic_decay_sm90",
        300,
        300,
        64,
        hk=1,
        decay="none, ordinary or strong",
        gate="far apart",
        decay_gradient=False,
    ),
    # Products of the smallest gate, or of the reciprocal of a sum of such weights, with what a tile of 64 or 128 tokens
    # decays by.
    Case("quadratic", "quadratic_decay_sm90", 300, 300, 64, h=2, hk=1, decay=-0.25, gate="smallest", schedules=1),
    Case("quadratic", "quadratic_decay_sm90", 300, 300, 64, h=2, hk=1, decay=-0.5, gate="smallest", schedules=1),
    Case("quadratic", "quadratic_decay_sm90", 300, 300, 64, h=1, hk=1, decay=-0.25, gate="largest", schedules=1),
    # Blocks of keys that are fully decayed with their gates; and, for the last queries, one that would be without its gates.
    Case("quadratic", "quadratic_decay_sm90", 700, 760, 64, hk=1, decay=-0.25, gate="ordinary", schedules=1),
    Case(
        "quadratic",
        "quadratic_decay_sm90",
        720,
        720,
        64,
        h=1,
        hk=1,
        decay=-0.1359,
        gate="few large",
        decay_gradient=False,
        schedules=1,
    ),
    Case("flash", "flash_decay_sm90", 257, 300, 64, decay="ordinary", gate="ordinary"),
    Case("flash", "flash_decay_sm90", 257, 300, 64, h=4, hk=2, decay=-0.5, gate="smallest", schedules=1),
    Case(
        "flash", "flash_decay_sm90", 257, 300, 64, hk=1, decay="ordinary", gate="far apart", dtype=torch.float16, backward=False
    ),
    Case("flash", "flash_decay_sm90", 257, 300, 64, gate="far apart", padding=True),
    Case("flash", "flash_decay_sm90", 257, 300, 128, h=2, hk=1, decay="none, ordinary or strong", gate="ordinary", left=70),
    gated_window(300, 345, 64, h=4, hk=2, decay="ordinary", gate="ordinary", exact_window=40),
    gated_window(300, 345, 64, gate="far apart", exact_window=100, padding=True),
    gated_window(300, 300, 128, decay="none, ordinary or strong", gate="ordinary", exact_window=1),
    gated_window(420, 420, 32, decay="weak", gate="small", exact_window=128, packed=(0, 70, 71, 420)),
    # Whole tiles of global keys, with powers of keys from shared memory (96) or not (128).
    gated_window(520, 520, 96, h=2, hk=1, decay="ordinary", gate="ordinary", exact_window=65, schedules=1),
    gated_window(520, 540, 128, h=4, hk=2, decay="weak", gate="far apart", exact_window=129, schedules=1),
    gated_window(300, 300, 128, h=2, hk=1, gate="ordinary", exact_window=64, padding=True, schedules=1),
    gated_window(300, 300, 64, h=2, hk=1, decay=-0.25, gate="smallest", exact_window=2, schedules=1),
    gated_window(300, 300, 128, h=1, hk=1, decay=-0.5, gate="largest", exact_window=40, schedules=1),
    gated_window(300, 300, 64, hk=1, decay="ordinary", gate="ordinary", exact_window=40, decay_gradient=False),
    Case("linear", "linear2_sm90", 300, 300, 64, h=1, hk=1, gate="ordinary"),
    Case("linear", "linear2_sm90", 300, 345, 64, h=2, hk=1, decay="ordinary", gate="far apart", padding=True),
    Case("linear", "linear2_sm90", 300, 345, 32, h=2, hk=1, decay="ordinary", gate="ordinary", lag=50, padding=True),
    Case("linear", "linear2_sm90", 520, 540, 64, h=1, hk=1, decay="weak", gate="small", lag=128, schedules=1),
    Case("linear", "linear2_sm90", 560, 560, 128, h=1, hk=1, decay="none, ordinary or strong", gate="ordinary"),
    Case(
        "linear",
        "linear2_sm90",
        300,
        300,
        64,
        hk=1,
        decay="none, ordinary or strong",
        gate="far apart",
        packed=(0, 100, 257, 300),
    ),
    Case("linear", "linear2_sm90", 300, 300, 64, hk=1, gate="ordinary", packed=(0, 100, 257, 300)),
    Case("linear", "linear2_sm90", 300, 300, 64, 128, h=2, hk=1, dropout=0.3, decay="ordinary", gate="ordinary"),
    window_in_linear(300, 345, 64, h=2, hk=1, decay="ordinary", gate="ordinary", exact_window=40),
    window_in_linear(300, 345, 64, h=2, hk=1, gate="far apart", exact_window=128, padding=True),
    window_in_linear(300, 300, 32, h=1, hk=1, decay="ordinary", gate="small", exact_window=3, packed=(0, 170, 300)),
    window_in_linear(560, 560, 128, h=1, hk=1, decay="weak", gate="ordinary", exact_window=200, schedules=1),
    # Without the sums of pairs of queries, in segments, tiles that decay too much for factors of rows, states behind a pad.
    Case("linear", "linear2_sm90", 300, 300, 32, h=1, hk=1, decay="ordinary", gate="ordinary", decay_gradient=False),
    Case(
        "linear",
        "linear2_sm90",
        520,
        520,
        64,
        h=1,
        hk=1,
        decay="none, ordinary or strong",
        gate="far apart",
        multiprocessors=16,
        schedules=1,
    ),
    Case("linear", "linear2_sm90", 300, 345, 64, h=2, hk=1, decay="none, ordinary or strong", gate="far apart", lag=2),
    Case("linear", "linear2_sm90", 1090, 1160, 128, h=1, hk=1, decay="weak", gate="ordinary", padding=True, schedules=1),
    window_in_linear(520, 520, 32, h=1, hk=1, gate="far apart", exact_window=250, schedules=1),
    window_in_linear(300, 345, 32, h=4, hk=2, decay="ordinary", gate="ordinary", exact_window=64, padding=True),
    window_in_linear(420, 420, 64, h=2, hk=1, decay="ordinary", gate="ordinary", exact_window=70, packed=(0, 70, 71, 200, 420)),
    window_in_linear(300, 345, 64, h=1, hk=1, decay="ordinary", gate="far apart", exact_window=30, decay_gradient=False),
    window_in_linear(300, 345, 128, h=2, hk=1, decay="ordinary", gate="ordinary", exact_window=100, padding=True, schedules=1),
    window_in_linear(300, 300, 32, 40, h=1, hk=1, decay="ordinary", gate="ordinary", exact_window=30),
]


class Call:
    """The tensors of a case and its result in float64."""

    def __init__(self, case: Case):
        self.case = case
        rows = (case.b, case.hk, case.m)
        options = {}
        if case.padding:
            options["attention_mask"] = torch.rand(case.b, case.m) > 0.3
        if case.dropout > 0:
            options["noise"] = torch.randn(case.b, case.h, case.n, case.value_dim).to(case.dtype)
        if case.decay is not None:
            options["log_decay"] = self._decay()
        if case.gate is not None:
            options["log_input_gate"] = GATES[case.gate](torch.rand(case.b, case.hk, case.m))
        if case.packed:
            bounds = torch.tensor(case.packed, dtype=torch.int32)
            sequence = sequence_of_token(bounds, case.n)
            options["k_start"] = bounds[sequence].expand(rows)
            if not case.causal:
                options["k_end"] = bounds[sequence + 1].expand(rows)
        self.options = options
        self.q, self.k = (bounded(case.b, *x, case.d, dtype=case.dtype) for x in ((case.h, case.n), (case.hk, case.m)))
        sizes = (case.hk, case.m), (case.h, case.n)
        self.v, self.grad_o = (torch.randn(case.b, *x, case.value_dim).to(case.dtype) for x in sizes)
        self.grad_z = torch.randn(case.b, case.h, case.n) if case.is_softmax or (case.dv > 0 and case.lag == 0) else None
        if case.lim > 0:
            self.q, self.k = (self._of_some_lengths(x) for x in (self.q, self.k))
            options["k_factor"] = eager.normalize_tokens(self.q, self.k, case.lim)[3]
        self.exact = self._in_float64() if case.gate is None else self._by_definition()

    def _decay(self):
        case = self.case
        rows = case.b, case.hk, case.m + case.lag
        return torch.full(rows, case.decay) if isinstance(case.decay, float) else make_decay(case.decay, *rows)

    def _of_some_lengths(self, x):
        """Returns random rows, most of which are between 0 and twice as long as lim; one is longer and one has zeros."""
        x = torch.randn(x.shape) * torch.rand(*x.shape[:3], 1) * (2 * self.case.lim / x.shape[3] ** 0.5)
        x[..., 7, :] *= 1e4
        x[..., 70, :] = 0.0
        return x.to(self.case.dtype)

    def _in_float64(self):
        case, operators = self.case, torch.ops.fastmax
        given = {name: x.double() if x.is_floating_point() else x for name, x in self.options.items()}
        mask, noise, *per_head = map(given.get, ("attention_mask", "noise", "log_decay", "k_start", "k_end", "log_input_gate"))
        if case.exact_window > 0:
            forward, backward = operators.exact_window_forward, operators.exact_window_backward
            options = (mask, *per_head, SCALE, *POLYNOMIAL, case.order, case.causal, "quadratic", case.exact_window, False)
        elif case.is_softmax:
            forward, backward = operators.flash_forward, operators.flash_backward
            options = (mask, *per_head, SCALE, case.causal, case.left, case.right, False)
        else:
            forward, backward = operators.forward, operators.backward
            how = (case.order, case.causal, case.dropout, case.algorithm, False)
            options = (mask, noise, None, *per_head, SCALE, *POLYNOMIAL, *how)
        q, k, v, grad_o = (x.double() for x in (self.q, self.k, self.v, self.grad_o))
        if case.lim > 0:
            q, k, *factors = eager.normalize_tokens(q, k, case.lim)
        if case.lag > 0:  # no operator has it
            o, z = eager.forward(q, k, v, self._with_lag(given), differentiable=False)
            decayed = z < 2.0**-100  # these count as 0
            o, z = o.masked_fill(decayed.unsqueeze(-1), 0.0), z.masked_fill(decayed, 0.0)
            return {"o": o, "z": z, **self.gradients(o, z)}
        o, z = forward(q, k, v, *options)
        grad_z = None if self.grad_z is None else self.grad_z.double()
        gradients = backward(grad_o, grad_z, q, k, v, o, z, *options)
        names = ("o", "z", "grad_q", "grad_k", "grad_v")
        exact = dict(zip(names, (o, z, *gradients), strict=False))
        if case.lim > 0:
            of_q, of_k = eager.normalize_tokens_backward(exact["grad_q"], exact["grad_k"], q, k, *factors, case.lim)
            exact |= {"grad_q": of_q, "grad_k": of_k}
        return exact if case.decay is None or not case.decay_gradient else exact | {"grad_log_decay": gradients[-2]}

    def _by_definition(self):
        """Returns the results and gradients in float64 by the matrix of all weights."""
        case, options = self.case, self.options
        leaves = {"q": self.q, "k": self.k, "v": self.v} | {
            name: options[name] for name in ("log_decay", "log_input_gate") if name in options
        }
        leaves = {name: x.double().requires_grad_() for name, x in leaves.items()}
        group = case.h // case.hk
        k, v = (leaves[name].repeat_interleave(group, 1) for name in "kv")
        s = SCALE * leaves["q"] @ k.mT
        i, j = torch.arange(case.n).unsqueeze(-1) + case.m - case.n, torch.arange(case.m)
        seen = (j <= i) & (i - j <= (case.left if case.left >= 0 else case.m))
        if case.padding:
            seen = seen & options["attention_mask"][:, None, None]
        if case.packed:
            seen = seen & (j >= options["k_start"].repeat_interleave(group, 1).unsqueeze(-1))
        a0, a1, a2 = POLYNOMIAL
        polynomial = a0 + a1 * s + (a2 * s * s if case.order == 2 else 0.0)
        log_weight = s if case.algorithm == "flash" else polynomial.log()
        gate = leaves["log_input_gate"].clamp(-60, 30).repeat_interleave(group, 1).unsqueeze(-2)
        log_weight = torch.where(i - j < case.exact_window, s, log_weight + gate)
        if case.decay is not None:
            total = leaves["log_decay"].cumsum(-1).repeat_interleave(group, 1)
            of_queries = total[..., case.lag + case.m - case.n :].unsqueeze(-1)
            log_weight = log_weight + (of_queries - total[..., : case.m].unsqueeze(-2))
        log_weight = log_weight.masked_fill(~seen, -torch.inf)
        top = log_weight.detach().amax(-1, keepdim=True).clamp(min=-1e3)
        weights = (log_weight - top).exp()
        total = weights.sum(-1, keepdim=True)
        counts = (total != 0) & ((case.lag == 0) | ~(top + total.log() <= -100 * math.log(2)))  # NaN counts
        o = torch.where(counts, weights / torch.where(counts, total, 1.0), 0.0) @ v
        if "noise" in options:
            o = o * (1 + case.dropout * options["noise"].double())
        lse = torch.where(counts, top + torch.where(counts, total, 1.0).log(), -torch.inf).squeeze(-1)
        z = lse if case.is_softmax or case.exact_window > 0 else lse.exp()
        loss = (o * self.grad_o.double()).sum()
        if self.grad_z is not None:
            loss = loss + (z * self.grad_z.double()).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        found = {f"grad_{name}": x for name, x in zip(leaves, gradients, strict=True)}
        return {"o": o.detach(), "z": z.detach(), **found}

    def _with_lag(self, given):
        case, tensors = self.case, ("attention_mask", "log_decay", "k_start")
        score = Score(SCALE, *POLYNOMIAL, case.order)
        tensors = {name: given.get(name) for name in tensors}
        return core.Call(score, case.causal, algorithm=case.algorithm, lag=case.lag, **tensors)

    def gradients(self, o, z):
        """Returns the gradients in float64 of a call with a polynomial score, given its results or those over more keys."""
        given = {name: x.double() if x.is_floating_point() else x for name, x in self.options.items()}
        q, k, v, grad_o = (x.double() for x in (self.q, self.k, self.v, self.grad_o))
        grads, of_tensors = eager.backward(grad_o, None, q, k, v, o.double(), z.double(), self._with_lag(given))
        named = grads._asdict() | of_tensors
        return {f"grad_{name}": x for name, x in named.items() if x is not None}

    def run(self, library, schedule: int) -> dict[str, torch.Tensor]:
        """Returns the results of the kernels, in memory full of NaN."""
        case = self.case
        given = {"q": self.q, "k": self.k, "v": self.v} | self.options
        numbers = dict(
            scale=SCALE, **dict(zip(("a0", "a1", "a2"), POLYNOMIAL, strict=True)), order=case.order, causal=case.causal,
            dropout=case.dropout, left=case.left, right=case.right, lag=case.lag, exact_window=case.exact_window,
            lim=case.lim, sm_count=case.multiprocessors, resident=case.resident, schedule=schedule,
            **case.kernels_head_dim,
        )  # fmt: skip
        results = {"o": nan_like(self.grad_o), "z": torch.full(self.q.shape[:3], torch.nan)}
        assert library.run(case.table, "forward", given | results, **numbers) == case.kernels
        if case.backward:
            gradients = {f"grad_{name}": nan_like(x) for name, x in (("q", self.q), ("k", self.k), ("v", self.v))}
            if case.decay is not None and case.decay_gradient:
                gradients["grad_log_decay"] = nan_like(given["log_decay"])
            if case.gate is not None:
                gradients["grad_log_input_gate"] = nan_like(given["log_input_gate"])
            given |= results | {"grad_o": self.grad_o, "grad_z": self.grad_z}
            assert library.run(case.table, "backward", given | gradients, **numbers) == case.backward_kernels
            results |= gradients
        return results


SCALE = 1.3
POLYNOMIAL = (1.0, 0.9, 0.6)


def nan_like(x):
    return torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)


def wrong(actual, exact, of_decay=5e-3, of_others=5e-3, of_sums=1e-5):
    """Returns the results that differ, with their errors. Rounding to 16 bits costs 0.2%, products of rounded weights a little
    more. `of_decay` is the limit for the gradients of log_decay and of gates, `of_sums` for z."""
    limits = {"z": of_sums, "grad_log_decay": of_decay, "grad_log_input_gate": of_decay}
    errors = {name: relative(x, exact[name]) for name, x in actual.items()}
    # Written so that a NaN is wrong.
    return {name: error for name, error in errors.items() if not error < limits.get(name, of_others)}


# ---- against float64


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(library, case):
    """Runs one of the two adversaries in turn and a random schedule, or the random one alone."""
    call = Call(case)
    first = None
    for schedule in ADVERSARY_AND_RANDOM[CASES.index(case) % 2][-case.schedules :]:
        results = call.run(library, schedule)
        # With a lag, the sum over all keys of a query, which is 0, is in the gradient with the rounding error of o. Where
        # decays are weak in the linear kernels, the gradient is a small difference of sums of rounded products.
        small = case.decay == "weak" and case.kernels == "linear2_sm90"
        assert wrong(results, call.exact, 1.5e-2 if case.lag > 0 else 1e-2 if small else 5e-3) == {}, f"schedule {schedule}"
        if first is None:
            first = results
        assert all(torch.equal(x, first[name]) for name, x in results.items()), f"schedule {schedule} has other bits"


@pytest.mark.parametrize("case", GATED, ids=str)
def test_input_gates_against_the_definition(library, case):
    call = Call(case)
    first = None
    for schedule in ADVERSARY_AND_RANDOM[GATED.index(case) % 2][-case.schedules :]:
        results = call.run(library, schedule)
        # If a few keys have nearly all of a query's weight, the gradients of q and k are small differences of large terms.
        # With a lag, that of log_decay has the rounding error of o. Linear states round factors of keys to 16 bits: where
        # many keys have the same gate, they are rounded alike.
        limits = (3e-2 if case.lag > 0 else 1.5e-2, 8e-3, 2e-4 if case.kernels == "linear2_sm90" else 1e-5)
        assert wrong(results, call.exact, *limits) == {}, f"schedule {schedule}"
        first = results if first is None else first
        assert all(torch.equal(x, first[name]) for name, x in results.items()), f"schedule {schedule} has other bits"


PHASES = [
    Case("linear", "linear2_sm90", 600, 600, 64, hk=1),
    Case("linear", "linear2_sm90", 560, 600, 64, h=2, hk=1, decay="none, ordinary or strong", padding=True),
    Case("linear", "linear2_sm90", 560, 560, 64, h=1, hk=1, decay="ordinary", packed=(0, 500, 560)),
    Case("linear", "linear2_sm90", 700, 700, 32, h=1, hk=1, packed=(*range(0, 700, 90), 700)),
    Case(
        "linear exact window", "linear2_window_sm90", 560, 600, 32, h=2, hk=1, decay="ordinary", exact_window=70, padding=True
    ),
]


@pytest.mark.parametrize("case", PHASES, ids=str)
def test_phases_have_the_bits_of_one(library, tmp_path, case):
    """With less memory there is a phase for each chunk. The backward's g and grad_q share memory, and dropped rows are copied
    for a phase at a time."""
    other = {"int64_t{832} << 20": "int64_t{1} << 17", "int64_t{420} << 20": "int64_t{1} << 16"}
    in_phases = emulator.edited(library, tmp_path, r"^linear/order2/launch\.", "linear/order2/plan.h", other)
    call = Call(case)
    results, expected = call.run(in_phases, 3), call.run(library, 3)
    assert all(torch.equal(x, expected[name]) for name, x in results.items())


NAN_CASES = [
    Case("quadratic", "quadratic_decay_sm90", 257, 300, 64, h=4, hk=2, decay="ordinary"),
    Case("flash", "flash_decay_sm90", 257, 300, 64, decay="ordinary"),
    Case("linear", "linear2_sm90", 300, 300, 64, hk=1, decay="ordinary", packed=(0, 100, 257, 300)),
    Case("linear", "linear2_sm90", 300, 2400, 32, h=1, hk=1, decay="ordinary", padding=True),
    Case("quadratic", "quadratic_decay_sm90", 257, 300, 64, h=4, hk=2, decay="ordinary", lag=40),
    Case("linear", "linear2_sm90", 300, 2400, 32, h=1, hk=1, decay="ordinary", padding=True, lag=20),
    window_in_linear(300, 300, 64, hk=1, decay="ordinary", exact_window=40),
    Case("linear", "linear2_sm90", 300, 300, 32, 40, hk=1, decay="ordinary"),
]


def check_rows_of_nan(library, call):
    """Checks that some results are NaN, as in the exact ones, and that the others are right."""
    results = call.run(library, 1)
    for name, x in results.items():
        is_nan = call.exact[name].isnan()
        assert 0 < is_nan.sum() < is_nan.numel() and torch.equal(x.isnan(), is_nan), name
        results[name], call.exact[name] = x.nan_to_num(nan=0.0), call.exact[name].nan_to_num(nan=0.0)
    assert wrong(results, call.exact) == {}


@pytest.mark.parametrize("case", NAN_CASES, ids=str)
def test_decays_of_nan(library, case):
    """Rows that see a key before a NaN decay are NaN, and no others."""
    call = Call(replace(case, backward=False))
    log_decay = call.options["log_decay"]
    log_decay[..., [0, 100, 120]] = torch.nan
    log_decay[:, 0, [case.m - 60, case.m - 30]] = torch.nan
    if case.padding:  # the last two NaN alone are behind a key
        call.options["attention_mask"][:, : case.m - 200] = False
    call.exact = call._in_float64()
    check_rows_of_nan(library, call)


NAN_GATE_CASES = [
    Case("quadratic", "quadratic_decay_sm90", 257, 300, 64, h=4, hk=2, decay="ordinary", gate="ordinary", padding=True),
    Case("flash", "flash_decay_sm90", 257, 300, 64, gate="ordinary", left=70),
    Case("exact_window", "exact_window_decay_sm90", 300, 345, 64, decay="ordinary", gate="ordinary", exact_window=40),
    Case("linear", "linear2_sm90", 300, 300, 64, hk=1, gate="ordinary", packed=(0, 90, 130, 300)),
    Case("linear", "linear2_sm90", 300, 345, 32, h=1, hk=1, decay="ordinary", gate="ordinary", lag=20),
]


@pytest.mark.parametrize("case", NAN_GATE_CASES, ids=str)
def test_gates_of_nan(library, case):
    """Rows that see a key with a NaN gate are NaN where the gate applies, and no others."""
    call = Call(replace(case, backward=False))
    call.options["log_input_gate"][..., [100, 120]] = torch.nan
    call.options["log_input_gate"][:, -1, case.m - 1] = torch.nan
    if case.padding:
        call.options["attention_mask"][:, 120] = False
    call.exact = call._by_definition()
    check_rows_of_nan(library, call)


@pytest.mark.parametrize("case", [
    Case("linear", "linear2_sm90", 300, 345, 64, hk=1),
    Case("linear", "linear2_sm90", 300, 345, 64, hk=1, decay="ordinary", lag=50, padding=True),
    Case("linear", "linear2_sm90", 300, 300, 32, packed=(0, 100, 257, 300)),
    Case("linear", "linear2_sm90", 300, 345, 32, 80, hk=1, decay="ordinary", lag=50),
], ids=str)  # fmt: skip
def test_global_keys_join_local_ones(library, case):
    """The forward merges into o and lse of local keys, also of queries that see no global key. The backward adds."""
    call = Call(case)
    if case.padding:
        call.options["attention_mask"][:, : case.m - case.n + 40] = False
        call.exact = call._in_float64()
    o, lse = torch.randn_like(call.grad_o), torch.randn(case.b, case.h, case.n)
    weights = torch.stack((lse.double().exp(), call.exact["z"]))
    shares = (weights / weights.sum(0)).unsqueeze(-1)
    exact = {"o": shares[0] * o.double() + shares[1] * call.exact["o"], "local_lse": weights.sum(0).log()}
    given = {"q": call.q, "k": call.k, "v": call.v} | call.options
    numbers = dict(
        scale=SCALE, **dict(zip(("a0", "a1", "a2"), POLYNOMIAL, strict=True)), causal=True, lag=case.lag,
        sm_count=MULTIPROCESSORS, schedule=3, **case.kernels_head_dim,
    )  # fmt: skip
    z = torch.full_like(lse, torch.nan)
    results = {"o": o, "local_lse": lse}
    assert library.run(case.algorithm, "forward", given | results | {"z": z}, **numbers) == case.kernels
    assert wrong(results, exact) == {}
    assert not case.padding or (call.exact["z"] == 0).any()

    z = weights.sum(0).float()
    given |= {"o": o, "z": z, "grad_o": call.grad_o}
    gradients = {f"grad_{name}": torch.randn_like(x) for name, x in (("q", call.q), ("k", call.k), ("v", call.v))}
    if case.decay is not None:
        gradients["grad_log_decay"] = torch.randn_like(call.options["log_decay"])
    of_global = call.gradients(o, z)
    exact = {name: x.double() + of_global[name] for name, x in gradients.items()}
    assert library.run(case.algorithm, "backward", given | gradients, adds=1, **numbers) == case.kernels
    assert wrong(gradients, exact) == {}


@pytest.mark.parametrize("decay", ["ordinary", "-inf at places"])
@pytest.mark.parametrize("algorithm, d", [("linear", 64), ("linear", 32), ("quadratic", 64)])
def test_global_keys_of_packed_sequences(library, algorithm, d, decay):
    """Queries whose sequence begins, or whose last reset is, within their exact window see no global key."""
    n, window, bounds = 324, 24, torch.tensor((0, 3, 40, 41, 200, 230, 324), dtype=torch.int32)
    q, k = (bounded(1, 1, n, d, dtype=torch.bfloat16) for _ in range(2))
    v, grad_o = (torch.randn(1, 1, n, d).bfloat16() for _ in range(2))
    whole = core.Call(Score(SCALE, *POLYNOMIAL, 2), causal=True, algorithm=algorithm, exact_window=window)
    whole = with_bounds(whole, q, k, make_decay(decay, 1, 1, n))
    whole = whole._replace(k_start=torch.maximum(bounds[sequence_of_token(bounds, n)], whole.k_start))
    (part,) = exact_window.global_keys(q, k, whole)
    q, k, v = part.operands(q, k, v)
    call, grad_o = part.call._replace(log_decay=part.call.log_decay.double()), part.queries_of(grad_o)
    given = {"q": q, "k": k, "v": v, "log_decay": part.call.log_decay, "k_start": part.call.k_start}
    numbers = dict(
        scale=SCALE, **dict(zip(("a0", "a1", "a2"), POLYNOMIAL, strict=True)), causal=True, lag=window,
        sm_count=MULTIPROCESSORS, schedule=3,
    )  # fmt: skip
    o, z = eager.forward(q.double(), k.double(), v.double(), call, differentiable=False)
    o, z = o.masked_fill((z < 2.0**-100).unsqueeze(-1), 0.0), z.masked_fill(z < 2.0**-100, 0.0)
    assert 0.2 < (z == 0).double().mean() < 0.9
    results = {"o": nan_like(grad_o), "z": torch.full(q.shape[:3], torch.nan)}
    library.run(algorithm, "forward", given | results, **numbers)
    assert wrong(results, {"o": o, "z": z}) == {}

    o, lse = torch.randn_like(grad_o), (z + torch.rand_like(z)).log().float()  # of all keys
    z = exact_window.denominators(lse, part)
    grads, of_tensors = eager.backward(grad_o.double(), None, *(x.double() for x in (q, k, v, o, z)), call)
    gradients = {f"grad_{name}": nan_like(x) for name, x in given.items() if name != "k_start"}
    library.run(algorithm, "backward", given | {"o": o, "z": z, "grad_o": grad_o} | gradients, **numbers)
    assert wrong(gradients, {f"grad_{name}": x for name, x in (grads._asdict() | of_tensors).items()}) == {}


@pytest.mark.parametrize("decay", [None, "weak"])
@pytest.mark.parametrize("d, scale", [(64, 300.0), (32, -300.0), (64, 40.0), (128, -300.0)])
def test_linear_exact_windows_of_large_scores(library, d, scale, decay):
    """exp(s) overflows, or is 0 for all local keys. The latter are all that a query sees in the first rows."""
    call = Call(window_in_linear(300, 300, d, h=1, hk=1, exact_window=30, decay=decay))
    call.q[..., 1:], call.k[..., 1:] = 0.0, 0.0
    call.q[..., 0], call.k[..., 0] = 1.0, scale / SCALE * (torch.rand(1, 1, 300) if scale == 300.0 else 1.0)
    call.exact = call._in_float64()
    results = call.run(library, 3)
    # The terms of a gradient almost cancel: their sum is a hundredth of them, so its relative error is larger.
    gradients = {name: results.pop(name) for name in list(results) if name.startswith("grad_")}
    assert wrong(results, call.exact) == {}
    assert {name for name, x in gradients.items() if not relative(x, call.exact[name]) < 2e-2} == set()


@pytest.mark.parametrize("packed", [(), (0, 70, 71, 200, 300)])
@pytest.mark.parametrize("d", [64, 128])
def test_linear_exact_windows_of_masked_keys(library, d, packed):
    """Some queries see no key, some local or global keys alone."""
    case = window_in_linear(300, 300, d, h=1, hk=1, exact_window=40, padding=True, packed=packed)
    call = Call(case)
    call.options["attention_mask"][0, [*range(50), *range(60, 130), *range(180, 200)]] = False
    call.exact = call._in_float64()
    results = call.run(library, 3)
    is_empty = call.exact["z"] == -torch.inf
    assert is_empty.any() and torch.equal(results["z"] == -torch.inf, is_empty)
    for x in (results, call.exact):
        assert (x["o"][is_empty] == 0).all()
        x["z"][is_empty] = 0.0
    assert wrong(results, call.exact) == {}


@pytest.mark.parametrize("factor, fused", [(1e-35, False), (1e10, True)])
def test_fused_at_other_sizes_of_weights(library, factor, fused, monkeypatch):
    """A common factor of the coefficients changes no gradient. If it makes grad_o / z too large for floats, two kernels must
    run in place of the fused one."""
    monkeypatch.setitem(globals(), "POLYNOMIAL", tuple(factor * x for x in POLYNOMIAL))
    call = Call(Case("quadratic", "quadratic_sm90", 130, 1100, 32, fused=fused))
    call.grad_o *= 2.0**-30
    call.exact = call._in_float64()
    assert wrong(call.run(library, 0), call.exact) == {}


@pytest.mark.parametrize("d, softmax", [(32, False), (32, True), (64, False), (64, True)])
def test_fused_with_rows_that_see_no_key(library, d, softmax):
    """One batch entry has no keys, and the first queries of the other see none."""
    algorithm = "flash" if softmax else "quadratic"
    call = Call(Case(algorithm, f"{algorithm}_sm90", 130, 1200, d, b=2, hk=1, padding=True, fused=True))
    call.options["attention_mask"][0] = False
    call.options["attention_mask"][1, :1150] = False
    call.exact = call._in_float64()
    assert call.exact["grad_q"][1, :, :80].abs().max() == 0 < call.exact["grad_q"][1, :, 80:].abs().max()
    results = call.run(library, 1)
    z = results.pop("z")
    assert torch.equal(z[0], torch.full_like(z[0], -torch.inf if softmax else 0.0))
    assert wrong(results, call.exact) == {}


@pytest.mark.parametrize("d, dv, decay", [
    (32, 32, None), (64, 64, None), (64, 64, "ordinary"), (32, 72, None), (32, 64, "ordinary"),
])  # fmt: skip
def test_carried_state(library, d, dv, decay):
    """A call starts from a state and returns one. Its gradients include those of both states. Wide values are in blocks."""
    n, before, options = 300, 90, (SCALE, *POLYNOMIAL, 2, False)
    operators = torch.ops.fastmax
    q, k, v = (x.bfloat16() for x in (bounded(1, 1, n, d), bounded(1, 1, n, d), torch.randn(1, 1, n, dv)))
    kv_state, k_sum, _ = operators.state_of_keys(
        bounded(1, 1, before, d).double(), torch.randn(1, 1, before, dv).double(), *[None] * 4, *options, False
    )
    kv_state, k_sum = kv_state.float(), k_sum.float()
    grad_o, grad_z = torch.randn(1, 1, n, dv).bfloat16(), torch.randn(1, 1, n)
    grad_new_kv_state, grad_new_k_sum = torch.randn_like(kv_state) / before, torch.randn_like(k_sum) / before
    log_decay = None if decay is None else make_decay(decay, 1, 1, n)

    wide = [x.double() for x in (q, k, v)]
    accompanying = (None, None if log_decay is None else log_decay.double(), None, None)
    state = (kv_state.double(), k_sum.double())
    o, z, new_kv_state, new_k_sum = operators.prefill(*wide, *accompanying, *state, *options)
    gradients = operators.prefill_backward(
        grad_o.double(), grad_z.double(), grad_new_kv_state.double(), grad_new_k_sum.double(), *wide, o, z,
        new_kv_state, new_k_sum, *accompanying, *state, *options,
    )  # fmt: skip
    names = (
        "o",
        "z",
        "new_kv_state",
        "new_k_sum",
        "grad_q",
        "grad_k",
        "grad_v",
        "grad_log_decay",
        "grad_log_input_gate",
        "grad_kv_state",
        "grad_k_sum",
    )
    exact = dict(zip(names, (o, z, new_kv_state, new_k_sum, *gradients), strict=True))

    given = {"q": q, "k": k, "v": v, "log_decay": log_decay, "kv_state": kv_state, "k_sum": k_sum}
    numbers = dict(
        scale=SCALE, **dict(zip(("a0", "a1", "a2"), POLYNOMIAL, strict=True)), causal=True,
        sm_count=MULTIPROCESSORS, schedule=3, kernels_head_dim=d,
    )  # fmt: skip
    results = {"o": nan_like(grad_o), "z": torch.full((1, 1, n), torch.nan)}
    results |= {"new_kv_state": nan_like(kv_state), "new_k_sum": nan_like(k_sum)}
    assert library.run("linear from a state", "forward", given | results, **numbers) == "linear2_sm90"
    given |= results | {"grad_o": grad_o, "grad_z": grad_z}
    given |= {"grad_new_kv_state": grad_new_kv_state, "grad_new_k_sum": grad_new_k_sum}
    gradients = {
        "grad_q": q,
        "grad_k": k,
        "grad_v": v,
        "grad_kv_state": kv_state,
        "grad_k_sum": k_sum,
        "grad_log_decay": log_decay,
    }
    gradients = {name: nan_like(x) for name, x in gradients.items() if x is not None}
    assert library.run("linear from a state", "backward", given | gradients, **numbers) == "linear2_sm90"
    assert wrong(results | gradients, exact) == {}


# ---- bounds of keys that no valid call has

BOUNDED = {"h": 2, "hk": 1, "packed": (0, 450)}
INVALID_CASES = [
    Case("quadratic", "quadratic_bounded_sm90", 450, 450, 64, causal=False, padding=True, **BOUNDED),
    Case("flash", "flash_bounded_sm90", 450, 450, 64, left=100, **BOUNDED),
    Case("quadratic", "quadratic_decay_sm90", 450, 450, 64, decay="weak", **BOUNDED),
    Case("linear", "linear2_sm90", 300, 300, 64, h=1, hk=1, packed=(0, 300)),
]
INVALID_BOUNDS = ("falling sequences", "least and most sequences", "falling", "steps", "steps of least and most", "near", "any")
# The linear kernels have first keys alone.
INVALID_STARTS = ("falling sequences", "falling", "steps of least and most", "any")


def run_with_bounds(library, call, first, end, schedule):
    """Returns the results with other first and end keys than those of the case."""
    other = copy.copy(call)
    given = {name: x.expand(call.case.b, call.case.hk, -1) for name, x in (("k_start", first), ("k_end", end))}
    other.options = call.options | {name: x for name, x in given.items() if name in call.options}
    return other.run(library, schedule)


@pytest.mark.parametrize("case", INVALID_CASES, ids=str)
def test_invalid_bounds_end(library, case):
    """Kernels with invalid bounds end and write finite outputs. A valid call afterwards has the bits that it had before."""
    call = Call(case)
    before = call.run(library, SCHEDULES[1])
    assert relative(before["o"], call.exact["o"]) < 5e-3
    bounds = invalid_bounds.key_bounds(case.n)
    for name in INVALID_STARTS if case.algorithm == "linear" else INVALID_BOUNDS:
        results = run_with_bounds(library, call, *bounds[name], SCHEDULES[1])
        assert results["o"].isfinite().all(), name
    for name, x in call.run(library, SCHEDULES[1]).items():
        assert torch.equal(x, before[name]), name


@pytest.mark.parametrize("algorithm", ["quadratic", "flash"])
def test_unsorted_sequences_end(library, algorithm):
    """Blocks of 192 queries and of 128 keys contain sequences that begin before those of the rows above."""
    call = Call(Case(algorithm, f"{algorithm}_bounded_sm90", 1024, 1024, 64, h=1, hk=1, packed=(0, 1024)))
    bounds = torch.tensor([0, 400, 500, 100, 1024], dtype=torch.int32)
    sequence = sequence_of_token(bounds, 1024)
    for schedule in SCHEDULES[1:4:2]:
        assert run_with_bounds(library, call, bounds[sequence], bounds[sequence + 1], schedule)["o"].isfinite().all()


# ---- what the emulator is for: kernels that are wrong

FORWARD, RING = "quadratic/sm90/fwd.h", "core/sm90/pipeline.h"
# By name: a file, what is written there in place of what, and a part of what the emulator says.
MISTAKES = {
    "no fence before products": (FORWARD, {"          keep(w);\n          wgmma_fence();": ""}, "without wgmma.fence"),
    "a stage read before it is full": (FORWARD, {"          ring.wait_until_full(below);\n": ""}, "a copy is on its way"),
    "fewer bytes expected": (FORWARD, {"expect(at, QueryTile::kBytes)": "expect(at, QueryTile::kBytes / 2)"}, "more bytes"),
    "another parity": (RING, {"mbarrier_wait(empty(at), at.parity ^ 1)": "mbarrier_wait(empty(at), at.parity)"}, "deadlock"),
    "another operand": (
        FORWARD,
        {"queries.k_major(kk), k.k_major(kk))": "queries.k_major(kk), k.k_major(0))"},
        "wrong results {'o'",
    ),
    "too little shared memory": (FORWARD, {"kSwizzledTileAlignment + kEnd": "kEnd - 1024"}, "shared memory: bytes"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(library, tmp_path, mistake):
    path, edits, message = MISTAKES[mistake]
    broken = emulator.edited(library, tmp_path, r"^quadratic/sm90/fwd\.polynomial\.dense\.", path, edits)
    call = Call(Case("quadratic", "quadratic_sm90", 450, 450, 64, h=4, backward=False))  # rings go round
    found = []
    for schedule in SCHEDULES:
        try:
            found.append(f"wrong results {wrong(call.run(broken, schedule), call.exact)}")
        except emulator.EmulatorError as error:
            found.append(str(error))
        if message in found[-1]:
            return
    pytest.fail(f"not found: {found}")


READ, WALK = "linear/order2/sm90/read.cu", "linear/order1/sm90/walk.cu"
ORDER_2 = Case("linear", "linear2_sm90", 300, 300, 64, h=1, hk=1, multiprocessors=1)
ORDER_1 = Case("linear", "linear1_sm90", 600, 600, 64, h=1, hk=1, order=1, multiprocessors=1)
LOOSE_LOAD, LOOSE_PRODUCT, LOOSE_STORE = (
    "neither a fence nor a product waited for it",
    "has in a product; no barrier tells that it waited for it",
    "wrote; no barrier tells so",
)
BARRIER = "ptx::barrier_wait<128>(1 + warpgroup);"
# Orders that only time guarantees: one schedule is enough, since the emulator knows of each warp what others can be sure of.
# By name: a case, a file, what is written there in place of what, and a part of what the emulator says.
UNORDERED = {
    "x released before it is loaded": (
        ORDER_1,
        WALK,
        {"if constexpr (kNormalises || kShortens) ptx::fence_proxy_async();": ""},
        LOOSE_LOAD,
    ),
    "results over x while other warps multiply it": (
        ORDER_2,
        READ,
        {f"if (m == 0) {BARRIER}": ""},
        LOOSE_PRODUCT,
    ),
    "rows released before what is along them is found": (
        replace(ORDER_1, lim=0.8),
        WALK,
        {"  ptx::fence_proxy_async();\n      b.x_ring.release": "b.x_ring.release"},
        LOOSE_LOAD,
    ),
    "sums of rows read without their barrier": (ORDER_1, WALK, {"b.vectors.wait_until_full(vector_at);": ""}, LOOSE_STORE),
}


@pytest.mark.parametrize("mistake", UNORDERED)
def test_orders_that_time_alone_guarantees_are_refused(library, tmp_path, mistake):
    case, path, edits, message = UNORDERED[mistake]
    broken = emulator.edited(library, tmp_path, f"^{re.escape(path.removesuffix('.cu'))}\\.", path, edits)
    with pytest.raises(emulator.EmulatorError, match=message):
        Call(case).run(broken, 0)


# ---- the layer around attention: emulated sources of the kernels of every architecture


def run_layer(library, name, given, numbers, outputs, gradients, grads, schedule):
    """Runs the forward into `outputs` and the backward into `gradients`, dicts of tensors by the names of the params."""
    numbers = {key: float(x) for key, x in numbers.items()} | {"schedule": schedule, "sm_count": MULTIPROCESSORS}
    for results in (outputs, gradients):
        for x in results.values():
            if x is not None:
                x.fill_(torch.nan)
    library.run(name, "forward", given | outputs, **numbers)
    library.run(name, "backward", given | grads | gradients, **numbers)


def assert_near(actual, exact, limit=4e-3):
    for (name, x), y in zip(actual.items(), exact, strict=True):
        assert (x is None) == (y is None), name
        assert x is None or (x.double() - y).norm() <= limit * y.norm(), name  # written so that a NaN fails


SPLITS = {
    "all": {},
    "one strip": {"n": 9, "recent": False},
    "one token": {"n": 1},
    "two tokens": {"n": 2},
    "many tokens": {"n": 300, "b": 1, "h": 2, "hk": 1},
    "packed": {"packed": True, "per_row": True},
    "width 2": {"width": 2},
    "width 3, packed": {"width": 3, "packed": True, "recent": False},
    "width 6": {"width": 6, "packed": True},
    "width 8": {"width": 8, "n": 25},
    "no convolution": {"width": 1},
    "no norm": {"norms": (False, True)},
    "no rotation": {"rotated": 0},
    "nothing": {"width": 1, "norms": (False, False), "rotated": 0},
    "halves in several lanes": {"rotated": 10, "d": 40},
    "no convolution, halves in several lanes": {"rotated": 10, "d": 40, "width": 1},
    "all turns": {"d": 128, "rotated": 128, "dv": 24, "hk": 1},
    "narrow": {"d": 16, "dv": 8, "rotated": 16, "h": 5, "hk": 5},
    "wide heads": {"d": 256, "dv": 72, "rotated": 128, "hk": 1, "h": 2, "b": 1},
    "wide heads, packed": {"d": 136, "rotated": 34, "packed": True, "h": 2, "hk": 1, "b": 1},
    "wide heads, wide convolution": {"d": 160, "dv": 64, "rotated": 80, "width": 5, "h": 2, "hk": 1, "b": 1},
    "wide heads, no convolution": {"d": 192, "dv": 64, "rotated": 96, "width": 1, "h": 2, "hk": 1, "b": 1},
    "float32 weights": {"weight_dtype": torch.float32},
}


@pytest.mark.parametrize("options", SPLITS.values(), ids=SPLITS)
def test_split_heads(options, library):
    """Strips of at least 8 tokens; a warp takes 1, 2 or 4 at once, and stores gradients width - 1 tokens later."""
    made = {"d": 64, "dv": 64, "rotated": 32, "n": 37, "dtype": torch.bfloat16} | options
    given = split_arguments(**made)
    wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in given.items()}
    wide |= {name: given[name].bfloat16().double() for name in given if "weight" in name and given[name] is not None}
    exact = split_by_definition(*wide.values())
    grads = [torch.randn(x.shape).bfloat16() for x in exact]
    _, of_exact = outputs_and_gradients(split_by_definition, wide, [x.double() for x in grads])
    of_names = {"x": "qkv", "recent": "recent", "convolution": "conv_weight", "norm_q": "q_weight", "norm_k": "k_weight"}
    tensors = {name: given[of] for name, of in of_names.items()} | {"places": given["places"]}
    if given["cos"] is not None:
        rows = given["qkv"].shape[:2]
        # (b, n, rotated), of stride 0 where the batch shares them.
        tensors |= {name: given[name].squeeze(-2).expand(*rows, -1) for name in ("cos", "sin")}
    numbers = {name: given[name] for name in ("heads", "kv_heads", "head_dim", "q_eps", "k_eps")}
    if "weight_dtype" in options:
        numbers |= {"float_convolution": 1, "float_norm": 1}
    seen = []
    for schedule in (0, 1, 2, 3):
        outputs = {f"out_{name}": torch.empty(x.shape, dtype=torch.bfloat16) for name, x in zip("qkv", exact, strict=True)}
        gradients = {
            f"grad_{name}": None if given[of] is None else torch.empty_like(given[of]) for name, of in of_names.items()
        }
        of_outputs = dict(zip(("grad_q", "grad_k", "grad_v"), grads, strict=True))
        run_layer(library, "split_heads", tensors, numbers, outputs, gradients, of_outputs, schedule)
        assert_near(outputs | gradients, [*exact, *(of_exact.get(of) for of in of_names.values())])
        seen.append([x for x in (outputs | gradients).values() if x is not None])
    assert all(torch.equal(x, y) for results in seen[1:] for x, y in zip(results, seen[0], strict=True))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("dv", [64, 24, 256])
def test_join_heads(dv, gate, norm, library):
    given = join_arguments(dv=dv, n=37, norm=norm, gate=gate, dtype=torch.bfloat16)
    wide = {name: x.double() if torch.is_tensor(x) else x for name, x in given.items()}
    exact = join_by_definition(*wide.values())
    grad = torch.randn(exact.shape).bfloat16()
    _, of_exact = outputs_and_gradients(join_by_definition, wide, [grad.double()])
    of_names = {"o": "o", "norm": "norm_weight", "gate": "gate"}
    tensors = {name: given[of] for name, of in of_names.items()}
    for schedule in (0, 1, 2, 3):
        outputs = {"y": torch.empty(exact.shape, dtype=torch.bfloat16)}
        gradients = {f"grad_{name}": None if x is None else torch.empty_like(x) for name, x in tensors.items()}
        run_layer(library, "join_heads", tensors, {"eps": given["eps"]}, outputs, gradients, {"grad_y": grad}, schedule)
        assert_near(outputs | gradients, [exact, *(of_exact.get(of) for of in of_names.values())])


STATE = "kv_state", "k_sum", "local_keys", "local_values", "local_mask", "local_decays", "buffered", "local_gates"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d, dv, h, hk", [(16, 16, 4, 2), (5, 3, 3, 3)])
@pytest.mark.parametrize("window, flush_interval, buffered", [(0, 32, 0), (40, 8, 5), (40, 8, 8), (3, 50, 50)])
def test_buffered_step(window, flush_interval, buffered, d, dv, h, hk, dtype, library):
    state = buffered_state(window, flush_interval, buffered, hk, d, dv, dtype, window != 3, "cpu")
    token = {name: torch.randn(3, heads, 1, x).to(dtype) for name, heads, x in (("q", h, d), ("k", hk, d), ("v", hk, dv))}
    token |= {"attention_mask": torch.tensor([[True], [False], [True]]), "log_decay": -torch.rand(3, hk, 1)}
    token["log_input_gate"] = torch.randn(3, hk, 1) if window == 40 else None
    score = Score(d**-0.5, 1.0, 1.0, 0.5, 2)
    exact = [x if x is None else x.to(torch.float64 if x.is_floating_point() else x.dtype, copy=True) for x in state]
    q, k, v, mask, *factors = (x if x is None or x.dtype == torch.bool else x.double() for x in token.values())
    expected = eager.buffered_step_(q, k, v, *exact, mask, *factors, window, score)
    for schedule in (0, 1, 2, 3):
        new = {name: None if x is None else x.clone() for name, x in zip(STATE, state, strict=True)}
        o, lse = torch.full((3, h, 1, dv), torch.nan, dtype=dtype), torch.full((3, h, 1), torch.nan)
        numbers = {"window": window, "scale": score.scale, "schedule": schedule}
        library.run("buffered_step", "forward", token | new | {"o": o, "lse": lse}, **numbers)
        narrow = 1e-5 if dtype == torch.float32 else 0.01
        assert relative(o, expected[0]) < narrow
        torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=narrow)
        for x, y in zip((new["kv_state"], new["k_sum"]), exact[:2], strict=True):
            assert relative(x, y) < 1e-5
        assert torch.equal(new["buffered"], exact[6])


@pytest.mark.parametrize("dv", [64, 5])
def test_merge_in_place(dv, library):
    given = operands("cpu", dv=dv, dtype=torch.bfloat16)
    given[1][..., ::5] = -torch.inf  # no local keys
    given[3][..., ::7] = 0  # no global ones
    given[3][..., 3] = -1.0  # a negative sum
    o, lse = merged_in_place(*given)
    o[given[3] == 0], lse[given[3] == 0] = given[0][given[3] == 0].double(), given[1][given[3] == 0].double()
    for schedule in (0, 1, 2, 3):
        named = dict(zip(("o", "lse", "o_global", "z_global"), (x.clone() for x in given), strict=True))
        library.run("merge", "forward", named, schedule=schedule, aligned=dv == 64)
        torch.testing.assert_close(named["o"].double(), o, rtol=0, atol=0.03, equal_nan=True)
        torch.testing.assert_close(named["lse"].double(), lse, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dv", [64, 24, 256, 5])
def test_merge_parts(dv, layout, library):
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if layout == "dense" else (torch.bfloat16,):
        check_merge_parts(dv, LAYOUTS[layout], dtype, library)


def check_merge_parts(dv, layout, dtype, library):
    parts = make_parts(dv=dv, dtype=dtype)
    given = dict(zip(parts._fields, map(layout, parts), strict=True))
    if given["first"].stride(3) != 1:  # which the bindings copy
        layout, given = torch.clone, {name: x.contiguous() for name, x in given.items()}
    aligned = dv % 8 == 0 and all(x.data_ptr() % 16 == 0 and x.stride(2) % 8 == 0 for x in given.values() if x.dim() == 4)
    names = "o", "lse", "grad_first", "grad_first_lse", "grad_second", "grad_second_lse"
    for schedule, absent in ((0, None), (1, "grad_o"), (2, "grad_lse"), (3, None)):
        there = {name: x for name, x in given.items() if name != absent}
        results = {name: torch.full_like(parts.first_lse, torch.nan) for name in names}
        results |= {name: layout(torch.full_like(parts.first, torch.nan)) for name in names[::2]}
        library.run("merge_parts", "forward", there | results, schedule=schedule, aligned=aligned)
        library.run("merge_parts", "backward", there | results, schedule=schedule, aligned=aligned)
        zeros = {} if absent is None else {absent: torch.zeros_like(getattr(parts, absent))}
        check_merged(results.values(), merged_by_definition(parts._replace(**zeros)), dtype)


@pytest.mark.parametrize("tokens", [1, 32, 75])
@pytest.mark.parametrize("half", [1, 16, 35, 128])
def test_rotary_factors(half, tokens, library):
    """Blocks own 32 tokens, and all that they need of the frequencies."""
    positions = torch.arange(tokens) * 12345 - 20000
    expected = eager.heads.rotary_factors(positions, half, 1e4, torch.float32)
    for dtype in (torch.int32, torch.int64):
        wide = {"wide_positions": 1.0} if dtype == torch.int64 else {}
        for schedule in (0, 1, 2, 3):
            given = {name: torch.full((tokens, 2 * half), torch.nan) for name in ("cos", "sin")}
            numbers = {"half": half, "base": 1e4, "schedule": schedule} | wide
            library.run("rotary_factors", "forward", {"positions": positions.to(dtype)} | given, **numbers)
            for x, y in zip(given.values(), expected, strict=True):
                torch.testing.assert_close(x, y.squeeze(1), rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("blocks, per_block, count", [(1, 3, 5), (3, 40, 33), (5, 70, 300), (3, 700, 2048)])
def test_largest_so_far(blocks, per_block, count, library):
    """One sort of more keys than threads, and rounds that merge lists of 1, 2 and 4 blocks."""
    rank, index, earlier = candidates(1, 2, (blocks, 2), per_block)
    for schedule in SCHEDULES:
        kept = torch.full((*rank.shape[:3], count), -7)
        given = {"rank": rank, "index": index, "earlier": earlier, "kept": kept}
        library.run("largest_so_far", "forward", given, schedule=schedule)
        assert torch.equal(kept, largest(rank, index, earlier, count))


@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize("d, dv", [(16, 8), (5, 3)])
@pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)
def test_gather_kept(options, d, dv, decays, library):
    """Rows are copied by words of 16 bytes, or else by elements. Gradients of a key in several blocks are summed."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if not options else (torch.bfloat16,):
        check_gather_kept(options, d, dv, decays, dtype, library)


def check_gather_kept(options, d, dv, decays, dtype, library):
    of = places(**options)
    large = of.tokens > 100
    if large and not (d == 16 and decays):
        pytest.skip("the large case by words, with decays")
    given = dict(zip(("k", "v", "log_factor"), rows(of, d, dv, dtype), strict=True))
    expected = expected_rows(*given.values(), of, decays)
    numbers = {"block": of.block, "tokens": of.tokens, "aligned": d == 16}
    where = {"kept": of.kept, "recent_keys": of.recent_keys}
    dtypes = dtype, dtype, torch.float32, torch.float32, torch.float64, torch.bool
    names = "keys", "values", "gate", "log_decay", "least", "has_key"
    grads = [torch.randn(x.shape).to(dtype) for x, dtype in zip(expected[:3], dtypes, strict=False)]
    of_keys = eager.gather_kept_backward(of.kept, of.recent_keys, *(x.double() for x in grads), of.tokens)
    seen = []
    for schedule in (1, 3) if large else SCHEDULES:
        results = {
            name: None if x is None else torch.full(x.shape, True if dtype == torch.bool else torch.nan, dtype=dtype)
            for name, x, dtype in zip(names, expected, dtypes, strict=True)
        }
        library.run("gather_kept", "forward", given | where | results, schedule=schedule, **numbers)
        check_rows(tuple(results.values()), expected, dtype)
        gradients = {f"grad_{name}": torch.zeros_like(x) for name, x in given.items()}
        given_grads = dict(zip(("grad_keys", "grad_values", "grad_gate"), grads, strict=True))
        library.run("gather_kept", "backward", given_grads | where | gradients, schedule=schedule, **numbers)
        for x, y in zip(gradients.values(), of_keys, strict=True):
            limit = 1e-6 if x.dtype == torch.float64 else torch.finfo(dtype).eps
            assert relative(x, y) < limit or not (x.any() or y.any())
        seen.append([*gradients.values()])
    assert all(torch.equal(x, y) for results in seen[1:] for x, y in zip(results, seen[0], strict=True))


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_kept_step(options, library):
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if not options else (torch.bfloat16,):
        check_kept_step(options, dtype, library)


def check_kept_step(options, dtype, library):
    of = steps(**options, dtype=dtype)
    aligned = (of.slots[0].shape[3] | of.slots[1].shape[3]) % 8 == 0
    numbers = dict(zip(("kept", "window", "block"), of.limits, strict=True)) | {"scale": 0.5, "aligned": aligned}

    def step(token, other, slots, positions, count, limits, schedule):
        token = [None if x is None else x.contiguous() for x in token]
        given = dict(zip(("q", "k", "v", "gate", "log_decay"), token, strict=True))
        given |= dict(zip(("keys", "values", "log_factors", "positions"), slots, strict=True))
        given |= {"token_positions": positions, "token_count": count, "other": other[0], "other_lse": other[1]}
        o = torch.full((*token[0].shape[:3], slots[1].shape[3]), torch.nan, dtype=dtype)
        library.run("kept_step", "forward", given | {"o": o}, schedule=schedule, **numbers)
        return o

    for schedule in (0, 1, 2, 3):
        check_steps(run_steps(of, partial(step, schedule=schedule)), of)
