"""The texts of the language-model experiments. Batches are drawn on the device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy
import torch
from torch import Tensor

from benchmarks.learn import rows, trees
from benchmarks.learn.examples import text

VALIDATION_SEED = 0


# How the Python sources of this interpreter become one text: in random order, or as trees.
FILES, TREES = "files", "trees"
MAKE = {FILES: text.load_bytes, TREES: trees.load_bytes}


def load(path: Path, kind: str = FILES) -> Tensor:
    """Returns the bytes of the file, uint8 (N,); of TREES, of another file beside it. A missing file is written."""
    path = path if kind == FILES else path.with_suffix(f".{kind}{path.suffix}")
    with rows.locked(path, "data", wait=True):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".part")
            MAKE[kind](None).numpy().tofile(unfinished)
            unfinished.replace(path)
    return torch.from_numpy(numpy.fromfile(path, dtype=numpy.uint8))


@lru_cache(maxsize=1)
def on_device(path: Path, device: torch.device, kind: str = FILES) -> tuple[Tensor, Tensor, str]:
    """Returns training and validation bytes on the device, and their description for the rows."""
    data = load(path, kind)
    described = f"{len(data) / 1e6:.1f} MB, {hashlib.sha256(data.numpy()).hexdigest()[:8]}"
    return *(part.to(device) for part in text.split(data)), described


Edit = Callable[[Tensor, torch.Generator], Tensor]  # changes windows (B, T + 1)


def unchanged(window: Tensor, drawn: torch.Generator) -> Tensor:
    return window


def windows(data: Tensor, context: int, batch: int, drawn: torch.Generator, edit: Edit = unchanged) -> text.Batch:
    """Returns windows from random positions. The generator is on the device of the data; nothing is copied from the host."""
    if len(data) <= context:
        raise SystemExit(f"{len(data)} bytes of text are too few for a context of {context}")
    start = torch.randint(len(data) - context, (batch, 1), generator=drawn, device=data.device)
    window = edit(data[start + torch.arange(context + 1, device=data.device)].long(), drawn)
    return text.Batch(window[:, :-1], window[:, 1:])


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def validation_windows(data: Tensor, context: int, batch: int, count: int, edit: Edit = unchanged) -> list[text.Batch]:
    """Returns `count` windows, the same in every run, in batches of at most `batch`."""
    tokens, targets, _ = windows(data, context, count, generator(data.device, VALIDATION_SEED), edit)
    return [text.Batch(*parts) for parts in zip(tokens.split(batch), targets.split(batch), strict=True)]


def training_windows(
    data: Tensor, context: int, batch: int, seed: int, edit: Edit = unchanged
) -> Callable[[torch.Generator], text.Batch]:
    """Returns a function that draws batches, for `training.Trainer`. Variants with the same seed see the same windows.

    The function ignores the generator of the `Trainer`, which is on the host.
    """
    drawn = generator(data.device, seed)
    return lambda _: windows(data, context, batch, drawn, edit)
