"""What the classes of a model's modules do, read from their methods: whether attention asks transformers for its function."""

from __future__ import annotations

import functools
import inspect
from types import CodeType, FunctionType

from torch import nn

from fastmax.integrations.transformers.options import NAME

_SOFTMAX = {"softmax", "Softmax", "scaled_dot_product_attention", "_flash_attention_forward", "flex_attention"}
_INTERFACE = {"get_interface", "ALL_ATTENTION_FUNCTIONS"}


def computes_attention(kind: type[nn.Module]) -> bool:
    """Whether a class of modules is attention that does not ask transformers' interface for its function.

    Deformable attention has no scores of queries and keys, and does not count.
    """
    if issubclass(kind, nn.MultiheadAttention):
        return True
    return "Deformable" not in kind.__name__ and bool(_attention_names(kind) & _SOFTMAX) and not asks_interface(kind)


def asks_interface(kind: type[nn.Module]) -> bool:
    return bool(_attention_names(kind) & _INTERFACE)


@functools.cache
def _attention_names(kind: type[nn.Module]) -> set[str]:
    """What the methods of a class called attention, and the functions of its file that they call, refer to."""
    names = set()
    for base in inspect.getmro(kind) if "Att" in kind.__name__ else ():
        for value in vars(base).values():
            if isinstance(value, FunctionType):
                names |= _names(inspect.unwrap(value), depth=2)
        if "forward" in vars(base):
            break
    return names


@functools.cache
def looks_attention_up(kind: type[nn.Module]) -> bool:
    """Whether a part of a model takes its class from a table of the model's own, by the implementation's name."""
    seen, waiting = {kind}, [kind]
    while waiting:
        make = inspect.unwrap(waiting.pop().__init__)
        for name in _names(make, depth=0):
            value = make.__globals__.get(name)
            if isinstance(value, dict) and "eager" in value and NAME not in value:
                return True
            if inspect.isclass(value) and issubclass(value, nn.Module) and value not in seen:
                seen.add(value)
                waiting.append(value)
    return False


def _names(function: FunctionType, depth: int) -> set[str]:
    """Every global and attribute that a function refers to, and the functions of its own file down to a depth."""
    names, waiting = set(), [function.__code__]
    while waiting:
        code = waiting.pop()
        names.update(code.co_names)
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for name in tuple(names) if depth else ():
        called = function.__globals__.get(name)
        if isinstance(called, FunctionType) and called.__module__ == function.__module__:
            names |= _names(called, depth - 1)
    return names
