"""Batches (tokens (b, n), keyword arguments or positional arguments of a model), and calls of a model with a batch."""

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
    """Calls the model with a batch. Hugging Face models get `use_cache=False`, whatever the batch says."""
    args, keywords = _split(batch)
    no_cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model(*args, **{**keywords, **no_cache})


def arguments_of(model: nn.Module, batch: Batch) -> Mapping[str, object]:
    """Returns the arguments of a batch by name.

    Raises:
        ValueError: the batch has a key/value cache, to which both teacher and model would add tokens.
    """
    args, keywords = _split(batch)
    arguments = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **keywords}
    for name in ("past_key_values", "cache"):  # the older name and the newer one in transformers
        if arguments.get(name) is not None:
            got = type(arguments[name]).__name__
            raise ValueError(f"{name} of a batch must be None, because batches hold whole sequences, got a {got}")
    return arguments


def _split(batch: Batch) -> tuple[Sequence[object], Mapping[str, object]]:
    """Returns the positional and the keyword arguments of a batch."""
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
    """Returns the argument `attention_mask` as bool (b, n), True = real token; None without one."""
    mask = arguments.get("attention_mask")
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise ValueError(f"attention_mask of a batch must be a tensor (b, n), got {validation.describe(mask)}")
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"attention_mask of a batch must be bool or integer, 0 = padding, got {mask.dtype}")
    return mask.bool()


def check_batches(batches: object) -> None:
    if isinstance(batches, (str, Mapping)) or not isinstance(batches, Iterable):
        raise TypeError(f"batches must be an iterable of batches, got {validation.describe(batches)}")
    if isinstance(batches, Tensor) and batches.dim() < 3:
        raise ValueError(f"batches must hold tensors (b, n), got {validation.describe(batches)}: pass one batch as [batch]")


def first(batches: Iterable[Batch], steps: int) -> Iterator[tuple[int, Batch]]:
    """Yields the first `steps` batches with their numbers, which start at 1.

    Raises:
        ValueError: there are fewer.
    """
    check_batches(batches)
    step = 0
    for step, batch in enumerate(itertools.islice(batches, steps), start=1):
        yield step, batch
    if step < steps:
        raise ValueError(f"batches must hold one batch for each of {steps} steps, but ended after {step}")


@contextmanager
def fresh_casts() -> Iterator[None]:
    """Disables the weight cache of `torch.autocast` in the block, and clears it afterwards.

    The cache lives as long as the caller's autocast block. After an optimizer step it would hold old weights, and casts made
    without gradients would give none.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        torch.clear_autocast_cache()
