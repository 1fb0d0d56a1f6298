"""Memory: what a layer should keep of keys beyond its window: needle, equal steps and recall of prototypes.

"needle" is the test of that name with a longer training on long windows; in "needle, longer" the training on short windows is
longer too and has more facts. In "needle, near first" the first windows are so short that the exact window has most facts;
"needle, near first, longer" has more steps on long windows. "steps" is equal-steps, also at a learning rate of 3e-3, and
"recall" asks for 256 pairs within 4096 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

import fastmax
from benchmarks.learn import equal_steps, language, needle, recall
from benchmarks.learn.rows import Row
from benchmarks.learn.runner import Experiment, Place, Run
from benchmarks.learn.variants import VARIANTS

BASE = needle.SETTINGS["25M"]
NEEDLE = replace(
    BASE, model=replace(BASE.model, steps=600), lengths=tuple(2**k for k in range(12, 17)), texts=64, test_tokens=2**20
)
(FEW_STEPS,) = (stage.model for stage in BASE.short)
NEAR = needle.Stage(replace(FEW_STEPS, steps=1500, context=256, batch=64, rows=10, validation=128, final=128), facts=4)
Setting = needle.Setting | language.Setting | recall.Setting
SETTINGS: dict[str, Setting] = {
    "needle, near first": replace(NEEDLE, short=(NEAR, needle.Stage(replace(FEW_STEPS, steps=1500, batch=16, rows=10), 16))),
    "needle, near first, longer": replace(
        NEEDLE,
        short=(NEAR, needle.Stage(replace(FEW_STEPS, steps=500, batch=16, rows=5), 16)),
        model=replace(NEEDLE.model, steps=1500),
    ),
    "needle, longer": replace(NEEDLE, short=(needle.Stage(replace(FEW_STEPS, steps=4000, batch=16, rows=20), facts=16),)),
    "needle": NEEDLE,
    "steps": equal_steps.SETTINGS["25M"],
    "steps, 3e-3": replace(equal_steps.SETTINGS["25M"], lr=3e-3),
    "recall": recall.Setting(
        64,
        train=((64, 4), (256, 32), (1024, 128), (4096, 256)),
        test=((256, 32), (1024, 128), (4096, 256)),
        test_sequences=256,
    ),
}
TRIALS: dict[str, Setting] = {  # without a GPU
    "needle, 0.2M": needle.SETTINGS["0.2M"],
    "steps, 0.8M": equal_steps.SETTINGS["0.8M"],
    "recall, width 32": recall.SETTINGS["width 32"],
}
RECALL_WINDOW = 32

# The most important first
FIRST = ("p2_all", "softmax_parts", "hybrid", "gate", "hybrid_gate", "gate_without_decay")
SLOWER = ("p2_slow", "p2_slower", "p2_steady", "p2_wide", "p2_wide_slower", "p2_wide_steady")
DECAYS = (*SLOWER, "softmax_steady", "softmax_wide", "gate_slow", "softmax_slow", "p2_without_decay", "softmax_without_decay")
NEAR_KEYS = ("p2_near_256", "p2_near_384")
HYBRIDS = (
    *("hybrid_early", "hybrid_middle", "hybrid_one", "hybrid_sdpa", "hybrid_kept_keys_sdpa", "hybrid_kept_keys_256"),
    *("hybrid_steady", "hybrid_kept_keys_steady_softmax", "hybrid_sdpa_256", "hybrid_sdpa_384"),
    *("hybrid_sdpa_early", "hybrid_sdpa_gate", "hybrid_sdpa_wide", "hybrid_sdpa_gate_wide"),
    *("hybrid_steady_gate_wide", "hybrid_early_gate_wide"),
    *("hybrid_nope", "hybrid_kept_keys_nope", "hybrid_kept_keys_nope_256", "hybrid_kept_keys_nope_steady"),
)
SHAPES = ("gate_bound_4", "gate_unbounded", "gate_sigmoid", "gate_low", "gate_high", "gate_bound_16")
PARTS = ("gate_unrotated", "gate_polynomial", "gate_wide", "gate_values", "softmax_gate")
CHOSEN = (
    *("kept_keys", "kept_keys_wide", "kept_keys_wide_steady", "hybrid_kept_keys", "kept_keys_steady"),
    *("hybrid_kept_keys_steady", "kept_keys_wide_steady_1024", "kept_keys_wide_steady_2048"),
    *("kept_keys_wide_128", "kept_keys_512", "kept_keys_wide_1024"),
    *("kept", "kept_256", "kept_wide", "kept_alone", "kept_residual"),
    *("kept_steady", "kept_steady_512", "kept_steady_wide", "hybrid_kept_steady"),
    *("hybrid_blocks", "hybrid_blocks_exp", "hybrid_blocks_mean", "blocks"),
)
DELTA = ("delta_values", "delta", "delta_keys")
DELTA_IN_CHUNKS = ("delta_values_in_chunks", "softmax_delta_in_chunks")
VARIANTS_OF = {
    "needle": (*FIRST, *DECAYS, *NEAR_KEYS, *HYBRIDS, *PARTS, *CHOSEN, *SHAPES, *DELTA_IN_CHUNKS, *DELTA),
    "steps": (*FIRST, *DECAYS, *NEAR_KEYS, *HYBRIDS, *PARTS, *CHOSEN, *SHAPES, *DELTA_IN_CHUNKS, *DELTA),
    "recall": (
        *("p2_all", "softmax_parts", "gate", "gate_without_decay", "gate_polynomial", "softmax_gate"),
        *("kept_keys", "kept", "kept_alone", "kept_residual"),
        *DELTA,
    ),
}
SECONDS = {"needle": 400.0, "steps": 90.0, "recall": 60.0}
FACTOR = 2.0  # factor of the time of the slowest variants


def runs(device: torch.device) -> list[Run]:
    settings = SETTINGS if device.type == "cuda" else TRIALS
    return [run for name, setting in settings.items() for run in _runs_of(name, setting)]


def _runs_of(name: str, setting: Setting) -> Iterator[Run]:
    kind = name.partition(",")[0]
    rates: tuple[float, ...] = recall.LEARNING_RATES
    if isinstance(setting, needle.Setting):
        rates = (setting.model.lr,)
    elif isinstance(setting, language.Setting):
        rates = (setting.lr,)
    for variant in VARIANTS_OF[kind]:
        for lr in rates:
            slower = FACTOR if variant in (*DELTA, "kept_residual", "blocks") else 1.0
            yield Run(variant, name, lr, 1, SECONDS[kind] * slower)


def execute(run: Run, place: Place) -> Iterator[Row]:
    """Yields the rows of the experiment that the setting belongs to."""
    setting, variant = (SETTINGS | TRIALS)[run.setting], VARIANTS[run.variant]
    if isinstance(setting, needle.Setting):
        return needle.train_and_test(run, setting, place)
    if isinstance(setting, language.Setting):
        return language.train_run(run.variant, setting, run.seed, run.lr, place)
    options = {"attention": variant.attention} | variant.parts
    if variant.attention == "fastmax":
        options["exact_window"] = RECALL_WINDOW
    layer = variant.layers.get(variant.attention, fastmax.FastmaxSelfAttention)
    return recall.train_and_test(run, setting, place, options, layer)


EXPERIMENT = Experiment(__doc__.partition("\n")[0], runs, execute)
