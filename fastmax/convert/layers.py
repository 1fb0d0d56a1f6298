"""Pairs of a model's fastmax layers and its teacher's softmax layers, and their outputs for the same inputs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fastmax.convert.batches import Batch, arguments_of, call, padding_of
from fastmax.core import validation
from fastmax.nn.self_attention import FastmaxSelfAttention

Pairs = dict[str, tuple[nn.Module, nn.Module]]  # layer name -> (layer of the model, layer of the teacher)


def is_of_transformers(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")  # the owner of such a model has imported it
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def hugging_face() -> ModuleType:
    """Returns the module `fastmax.convert.hugging_face`, imported on first use because transformers is optional."""
    return importlib.import_module("fastmax.convert.hugging_face")


def check_module(name: str, module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, got {validation.describe(module)}")


def pairs_of(model: nn.Module, teacher: nn.Module) -> Pairs:
    """Returns the fastmax layers of the model with the softmax layers of the same names in the teacher.

    Raises:
        TypeError, ValueError: the models do not match; the message names the layer.
    """
    for name, module in (("model", model), ("teacher", teacher)):
        check_module(name, module)
    if model is teacher:
        raise ValueError("teacher must be a copy of the model from before the swap, got the model itself")
    exchanged, of_teacher, not_softmax = _fastmax_layers(model), dict(teacher.named_modules()), _fastmax_layers(teacher)
    if not exchanged:
        got = type(model).__name__
        raise ValueError(f"model ({got}) must have layers with fastmax attention, got none: call convert.swap(model) first")
    for name, layer in exchanged.items():
        own, kind = of_teacher.get(name), type(layer).__name__
        if type(own) is not type(layer) or name in not_softmax:
            got = "none of that name" if own is None else f"a {type(own).__name__}" + " with fastmax" * (name in not_softmax)
            raise ValueError(f"teacher must have softmax attention in a {kind} {name!r}, got {got}")
        if not _is_causal_self_attention(layer):
            raise ValueError(f"model must have causal self-attention only, but {name!r} ({kind}) is not")
    return {name: (layer, of_teacher[name]) for name, layer in exchanged.items()}


def _fastmax_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers with fastmax attention, by name."""
    if not is_of_transformers(model):
        modules = model.named_modules()
        return {name: x for name, x in modules if isinstance(x, FastmaxSelfAttention) and x.attention == "fastmax"}
    return hugging_face().fastmax_layers(model)


def _is_causal_self_attention(layer: nn.Module) -> bool:
    return isinstance(layer, FastmaxSelfAttention) or hugging_face().is_causal_self_attention(layer)


def visit(pairs: Pairs, teacher: nn.Module, batch: Batch, compare: Callable[[str, Callable[[], Tensor], Tensor], None]) -> None:
    """Runs the teacher on a batch, and calls `compare(name, attend, expected)` after each of its attention layers.

    Args:
        compare: receives the name of the layer, the function `attend`, which runs the model's layer on the same input and
            returns its output, and the teacher's output `expected`. Outputs are (tokens, embed_dim) in float32 or float64,
            without padding according to the `attention_mask` of the batch or the layer.
    """
    real = padding_of(arguments_of(teacher, batch))
    is_ours = all(isinstance(layer, FastmaxSelfAttention) for layer, _ in pairs.values())
    masks: Any = None if is_ours else hugging_face().MaskOfTeacher(real)
    called: set[str] = set()

    def hook_of(name: str, layer: nn.Module) -> Callable:
        def hook(own: nn.Module, args: tuple, keywords: dict, output: Tensor | tuple) -> None:
            called.add(name)
            takes_part = real
            if isinstance(layer, FastmaxSelfAttention):
                takes_part = keywords.get("attention_mask", real)
            else:
                keywords = keywords | {"attention_mask": masks.of(layer, own, args, keywords)}
            compare(name, lambda: _rows(layer(*args, **keywords), takes_part), _rows(output, takes_part))

        return hook

    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(_in_eval_mode(teacher))
        for name, (layer, own) in pairs.items():
            stack.callback(own.register_forward_hook(hook_of(name, layer), with_kwargs=True).remove)
        call(teacher, batch)
    if len(called) < len(pairs):
        raise ValueError(f"teacher must call its layers {', '.join(pairs)}, but did not call {', '.join(set(pairs) - called)}")


def _rows(output: Tensor | tuple, real: Tensor | None) -> Tensor:
    rows = output if isinstance(output, Tensor) else output[0]
    rows = rows.flatten(0, -2) if real is None else rows[real]
    if rows.shape[0] == 0:
        raise ValueError("batches must hold real tokens, got a batch with padding only")
    return rows if rows.dtype == torch.float64 else rows.float()


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training
