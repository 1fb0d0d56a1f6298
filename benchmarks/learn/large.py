"""Large models: the loss after equal time on windows that grow to 32k, trained by `examples/train_lm.py` on its default text.

A training writes its checkpoints into a folder beside the text of the other experiments, which is removed at its end. The same
command resumes a training that was stopped.
"""

from __future__ import annotations

import csv
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.learn.examples import model, train_lm
from benchmarks.learn.rows import Row
from benchmarks.learn.runner import Experiment, Place, Run
from benchmarks.learn.variants import parameters

SECONDS = 280.0
LEARNING_RATE = 6e-4
# Arguments of train_lm.py. A step has 65536 bytes.
SETTINGS = {
    "350M": (
        *("--size", "350m", "--block-size", "32768", "--batch-size", "1", "--accumulate", "2"),
        *("--grow", "1024:0.4", "4096:0.7", "16384:0.85"),
        *("--steps", "100000", "--rows", "1000", "--warmup", "50", "--val-batches", "4"),
    )
}
TRIALS = {  # without a GPU
    "trial": (
        *("--n-layer", "3", "--n-embd", "32", "--block-size", "64", "--batch-size", "1", "--grow", "32:0.5"),
        *("--steps", "1000", "--rows", "100", "--warmup", "2", "--val-batches", "1"),
    )
}
OF_VARIANT = {
    "kept_keys_wide_steady": ("--n-head", "8", "--parts", "kept_keys=256", "steady_heads=4", "longest_half_life=1024"),
    "softmax_parts": ("--n-head", "16", "--attention", "softmax"),
    "hybrid_third": ("--n-head", "16", "--every", "3"),
    "softmax_without_decay": ("--n-head", "16", "--attention", "softmax", "--parts", "decay=false"),
}


def runs(device: torch.device) -> list[Run]:
    settings = SETTINGS if device.type == "cuda" else TRIALS
    return [Run(variant, name, LEARNING_RATE, 1, SECONDS + 150.0) for name in settings for variant in OF_VARIANT]


def execute(run: Run, place: Place) -> Iterator[Row]:
    """Yields rows of the "train" and "val" losses by step, of the "position" losses, whose `at` is the end of a range of
    positions, and of the trained model's "loss"."""
    arguments = [*(SETTINGS | TRIALS)[run.setting], *OF_VARIANT[run.variant], "--lr", str(run.lr), "--seed", str(run.seed)]
    arguments += ["--device", str(place.device), "--compile" if place.compile else "--no-compile"]
    if run.setting in TRIALS:
        arguments += ["--data", str(place.data)]
    if place.steps is None:
        arguments += ["--seconds", str(SECONDS if place.time is None else place.time)]
    else:
        arguments += ["--steps", str(place.steps)]
    digest = hashlib.sha256(" ".join(arguments).encode()).hexdigest()[:12]
    out = place.data.with_name(f"{place.data.stem}-large-{digest}")
    if status := train_lm.main([*arguments, "--out", str(out)]):
        raise SystemExit(status)  # it was stopped
    yield from _rows_of(out)
    shutil.rmtree(out)


def _rows_of(out: Path) -> Iterator[Row]:
    checkpoint = torch.load(out / "checkpoint.pt", map_location="cpu", weights_only=True, mmap=True)
    with torch.device("meta"):
        gpt = model.GPT(model.GPTConfig(**checkpoint["config"]))
    constant: Row = {"parameters": parameters(gpt), "data": checkpoint["settings"]["data"]}
    for row in _read(out / "losses.csv"):
        constant |= {"step": int(row["step"]), "tokens": int(row["tokens"]), "seconds": float(row["seconds"])}
        for measure in ("train", "val"):
            yield {"measure": measure, "at": constant["step"], "value": float(row[measure])} | constant
    positions = [(int(row["last"]), float(row["loss"]), int(row["tokens"])) for row in _read(out / "positions.csv")]
    for last, loss, _ in positions:
        yield {"measure": "position", "at": last, "value": loss} | constant
    mean = sum(loss * count for _, loss, count in positions) / sum(count for _, _, count in positions)
    yield {"measure": "loss", "at": positions[-1][0], "value": mean} | constant


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


EXPERIMENT = Experiment(__doc__.partition("\n")[0], runs, execute)
