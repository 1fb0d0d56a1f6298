"""Batches: tokens (b, n), keywords of a model, or its positional arguments; and what calls of a model with them need."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fastmax.core import validation

Batch: TypeAlias = Tensor | Mapping[str, object] | Sequence[object]


def call(model: nn.Module, batch: Batch) -> object:
    """Of Hugging Face models without the cache of keys and values that they would make, whatever the batch says."""
    args, keywords = _split(batch)
    no_cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model(*args, **{**keywords, **no_cache})


def arguments_of(model: nn.Module, batch: Batch) -> Mapping[str, object]:
    """By the names of the model's arguments.

    Raises:
        ValueError: a cache of earlier tokens, which teacher and model would both add theirs to.
    """
    args, keywords = _split(batch)
    arguments = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **keywords}
    cache = arguments.get("past_key_values")
    if cache is not None:
        raise ValueError(f"past_key_values of a batch must be None, as it holds whole sequences, got a {type(cache).__name__}")
    return arguments


def _split(batch: Batch) -> tuple[Sequence[object], Mapping[str, object]]:
    """Positional arguments and keywords."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), batch
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return batch, {}
    raise TypeError(
        f"batches must hold tensors of tokens, mappings of keywords or sequences of arguments, got {validation.describe(batch)}"
    )


def padding_of(arguments: Mapping[str, object]) -> Tensor | None:
    """The argument `attention_mask`, as bool (b, n): True = takes part."""
    mask = arguments.get("attention_mask")
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise ValueError(f"attention_mask of a batch must be a tensor (b, n), got {validation.describe(mask)}")
    return mask.bool()


def check_batches(batches: object) -> None:
    if isinstance(batches, (str, Mapping)) or not isinstance(batches, Iterable):
        raise TypeError(f"batches must hold batches, as a list does, got {validation.describe(batches)}")
    if isinstance(batches, Tensor) and batches.dim() < 3:
        raise ValueError(f"batches must hold tensors (b, n), got {validation.describe(batches)}: a batch alone is [batch]")


def first(batches: Iterable[Batch], steps: int) -> Iterator[tuple[int, Batch]]:
    """So many, counted from 1."""
    check_batches(batches)
    step = 0
    for step, batch in enumerate(itertools.islice(batches, steps), start=1):
        yield step, batch
    if step < steps:
        raise ValueError(f"batches must hold one for each of {steps} steps, ended after {step}")


@contextmanager
def fresh_casts() -> Iterator[None]:
    """`torch.autocast` keeps its casts of weights until the caller leaves it: after a step they are of the weights before it,
    and those of a call without gradients give none. So none are used within, nor kept from within."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        torch.clear_autocast_cache()
