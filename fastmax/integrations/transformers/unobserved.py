"""Tells from the bytecode of a module's class whether it computes softmax attention without transformers' interface.

Only a model that is compiled before its first eager forward asks. While `torch.compile` traces, operations are not dispatched,
and a graph without breaks leaves no place for an eager forward, so that nothing can be observed. What looks like attention here
is refused with `fullgraph=True`. Otherwise the error ends the tracing, and the forward runs eagerly and is observed.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

_ATTENTION = {  # functions that compute attention
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "flex_attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "memory_efficient_attention",
    "_flash_attention_forward",
    "flash_attention_forward",
    "flex_attention_forward",
    "sdpa_attention_forward",
}
_SOFTMAX = {"softmax", "Softmax"}
_PRODUCTS = {"matmul", "bmm", "baddbmm", "mm", "einsum", "tensordot"}
_INTERFACE = {"get_interface", "ALL_ATTENTION_FUNCTIONS"}
_ROUTER = re.compile(r"(Router|Gate|Gating|MoE)$")
_BASES = {*nn.Module.__mro__, *PreTrainedModel.__mro__, *GenerationMixin.__mro__}  # their methods compute no attention


@functools.cache
def reads_like_attention(kind: type) -> bool:
    """Returns whether a class of modules looks like attention that does not ask transformers' interface for its function.

    A class that refers to a function of attention does, whatever its name. A softmax that `forward` or the constructor reaches
    counts in a class that is called attention. In classes from outside transformers it also counts beside two matrix products.
    Deformable attention has no scores of queries and keys, and does not count.
    """
    if issubclass(kind, nn.MultiheadAttention):
        return True
    if _asks_interface(kind):
        return False
    if _names_of(kind, _methods(kind)).keys() & _ATTENTION:
        return True
    # The constructor may make an nn.Softmax. A language model's `sample` is not part of its layers.
    names = _names_of(kind, _reached(kind, "forward", "__init__"))
    if not names.keys() & _SOFTMAX:
        return False
    called_so = "Att" in kind.__name__ and "Deformable" not in kind.__name__ and not _ROUTER.search(kind.__name__)
    return called_so or (_package(kind) != "transformers" and sum(names[name] for name in _PRODUCTS) >= 2)


@functools.cache
def _asks_interface(kind: type) -> bool:
    """Returns whether `forward`, or a method that it calls, asks transformers' interface."""
    return bool(_reached(kind, "forward") & _INTERFACE)


def _reached(kind: type, *first: str) -> set[str]:
    """Returns these names and all names that the methods of these names refer to, directly or through other methods."""
    names: set[str]
    methods, names, waiting = _methods(kind), set(), set(first)
    while waiting:
        names |= waiting
        called = {name for method in waiting for function in methods.get(method, ()) for name in _names(function)}
        waiting = called - names
    return names


def _names_of(kind: type, names: Iterable[str]) -> Counter[str]:
    """Counts the names that these methods refer to."""
    methods = _methods(kind)
    return sum((_names(function) for name in names for function in methods.get(name, ())), Counter())


@functools.cache
def _methods(kind: type) -> dict[str, list[FunctionType]]:
    """Returns the functions of a class by name: first the one that Python finds, then those that it may reach by `super`."""
    value: Any
    methods: dict[str, list[FunctionType]] = {}
    for base in inspect.getmro(kind):
        if base in _BASES or _package(base) == "torch":
            continue
        for name, value in vars(base).items():
            value = value.fget if isinstance(value, property) else value
            function = inspect.unwrap(getattr(value, "__func__", value))
            found = methods.get(name, [])
            if isinstance(function, FunctionType) and (not found or "super" in found[-1].__code__.co_names):
                methods[name] = [*found, function]
    return methods


def _names(function: FunctionType) -> Counter[str]:
    """Counts the globals and attributes that a function refers to, and those of the functions that it calls.

    Functions of its own file are followed, and those of packages other than PyTorch, transformers and fastmax.
    """
    names: Counter[str]
    seen: set[FunctionType]
    names, seen, waiting = Counter(), set(), [function]
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        here = _names_in(function.__code__)
        names += here
        for name, value in _callables(function, here):
            if getattr(value, "__name__", name) != name:  # imported under another name
                names[value.__name__] += here[name]
            value = inspect.unwrap(value)
            if isinstance(value, FunctionType) and (value.__module__ == function.__module__ or not _is_of_a_library(value)):
                waiting.append(value)
    return names


def _callables(function: FunctionType, names: Counter[str]) -> Iterator[tuple[str, Callable]]:
    """Returns the objects that a function refers to by a global name, or as an attribute of a module that has one."""
    found: Iterable[tuple[str, Any]]
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and not _is_of_a_library(value):
            found = ((attribute, vars(value).get(attribute)) for attribute in names)
        else:
            found = ((name, value),)
        yield from ((name, value) for name, value in found if callable(value))


def _is_of_a_library(value: FunctionType | ModuleType) -> bool:
    return _package(value) in ("torch", "transformers", "fastmax")


def _names_in(code: CodeType) -> Counter[str]:
    """Counts the names in the bytecode of a function and of the functions inside it; `@` counts as matmul."""
    names: Counter[str] = Counter()
    for instruction in dis.get_instructions(code):
        if instruction.opcode in dis.hasname:
            names[instruction.argval] += 1
        elif "MATRIX_MULTIPLY" in instruction.opname or instruction.argrepr in ("@", "@="):
            names["matmul"] += 1
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _names_in(constant)
    return names


def _package(value: type | FunctionType | ModuleType) -> str:
    return (value.__name__ if isinstance(value, ModuleType) else value.__module__ or "").partition(".")[0]
