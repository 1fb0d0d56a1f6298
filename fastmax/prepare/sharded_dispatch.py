"""Dispatch of public functions whose tensors are sharded over ranks: DTensors, and the local tokens of a context parallel call.

This module knows neither. `fastmax`, above it, registers the function that runs a call on DTensors
(`register_dtensor_handler`); a context is entered by `entered` and runs the calls of its thread. A call on plain tensors only
checks a flag and the types of its arguments.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from threading import Lock
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from fastmax.core import other_arguments

_KEY = "fastmax.context"
_entered = 0  # contexts that are active in any thread of this process
_is_any_entered = False  # a bool, which compiled code can guard on
_counting = Lock()
_OTHERS = frozenset({Tensor, torch.nn.Parameter, type(None), str, bool, int, float, tuple})

Result: TypeAlias = Tensor | tuple[Tensor, Tensor]


class ParallelContext(Protocol):
    """What a context offers to the functions and layers called in it; `fastmax.distributed.Context` is one."""

    @property
    def attentions(self) -> tuple[Callable, Callable]:
        """`fastmax_attention` and `flash_attention` of the local tokens."""

    def call(self, attention: Callable[..., Result], arguments: dict[str, object]) -> Result:
        """Runs `attention` on the local tokens of this rank."""

    def telling(self, check: Callable) -> Callable:
        """Returns `check`, with its errors raised on all ranks."""

    def of_one_forward(self, options: dict[str, object]) -> ParallelContext:
        """Returns the context of a forward of a layer, whose options must be the same on all ranks."""

    def layout_of(self, tokens: int) -> Any:
        """Returns the layout of the sequence, of which this rank has so many tokens; its `tokens` counts all of them."""

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Returns the positions of the local tokens in the sequence, int64 (n,)."""

    def convolve(self, convolution: Any, x: Tensor, places: Tensor | None) -> Tensor:
        """Applies a causal convolution to the local tokens."""

    def refuse_gaps(self, mask: Tensor, cu_seqlens: Tensor | None) -> None:
        """Raises an error on all ranks if there is padding between real tokens of a sequence."""


Handler: TypeAlias = Callable[[Callable[..., Result], dict[str, object]], Result]


def _no_handler(attention: Callable[..., Result], arguments: dict[str, object]) -> Result:
    raise RuntimeError("no handler of DTensors is registered: import fastmax")


_dtensor_handler: Handler = _no_handler


def register_dtensor_handler(handler: Handler) -> None:
    """Registers `handler(attention, arguments)`, which runs a public function some of whose tensors are DTensors."""
    global _dtensor_handler
    _dtensor_handler = handler


def is_dtensor(x: object) -> bool:
    """Returns whether `x` is a DTensor. Does not import its module, which takes seconds: the owner of a DTensor has done so."""
    if type(x) in _OTHERS or not isinstance(x, Tensor):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def refuse(instead: str, **tensors: object) -> None:
    """Raises a TypeError that suggests `instead` if one of the tensors is a DTensor."""
    for name, x in tensors.items():
        if is_dtensor(x):
            raise TypeError(f"{name} must be a torch.Tensor here, got a DTensor: {instead}")


def outside_of_compiled_code(function: Callable) -> Callable:
    """Excludes a function from graphs, which cannot hold collectives of this package.

    `torch.compiler.disable` as a decorator would import the compiler; this calls it only while code is being compiled.
    """

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*arguments, **options)
        return function(*arguments, **options)

    return call


def current() -> ParallelContext | None:
    """Returns the active `fastmax.distributed.context_parallel` context of this thread.

    A thread in which autograd runs a backward pass has the context of the thread that called it.
    """
    return _of_this_thread() if _is_any_entered else None


@outside_of_compiled_code
def _of_this_thread() -> ParallelContext | None:
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None


@contextmanager
def entered(context: ParallelContext | None) -> Iterator[None]:
    """Runs the calls of this thread inside the block in the given context.

    The context is one of PyTorch's thread-local objects, a private API (`torch._C._stash_obj_in_tls`): autograd copies those to
    the threads that run a backward pass. It does not copy `contextvars`, and there is no public equivalent.
    """
    outer = _of_this_thread()
    _stash(context)
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        if outer is None and hasattr(torch._C, "_remove_obj_from_tls"):  # not in PyTorch 2.11
            torch._C._remove_obj_from_tls(_KEY)  # a thread that ends while it holds an object leaks it
        else:
            _stash(outer)


def _stash(context: ParallelContext | None) -> None:
    if _stash_steals():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(context))
    torch._C._stash_obj_in_tls(_KEY, context)


@lru_cache
def _stash_steals() -> bool:
    """Returns whether a thread-local object takes a reference that it does not own, as in PyTorch 2.11: when it is replaced,
    the object would be freed while it is in use."""
    probe = object()
    count = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(_KEY, probe)
    steals = sys.getrefcount(probe) == count
    if steals:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return steals


def _count(change: int) -> None:
    global _entered, _is_any_entered
    with _counting:
        _entered += change
        _is_any_entered = _entered > 0


def dispatches_shards(attention: Callable[..., Result]) -> Callable[..., Result]:
    """Makes an attention function of q, k, v and options accept DTensors, and local tokens in a context.

    Either all tensors of a call are DTensors or none; results of DTensors are DTensors.

    Raises:
        TypeError: some of the tensors are DTensors, others are not; dropout has no drop_noise.
    """

    @wraps(attention)
    def attend(*args: Any, **kwargs: Any) -> Result:
        context = current()
        if context is not None:
            return context.call(attention, context.telling(_arguments)(attention, args, kwargs))
        for x in (*args, *kwargs.values()):
            if type(x) not in _OTHERS and is_dtensor(x):
                return _dtensor_handler(attention, _arguments(attention, args, kwargs))
        return attention(*args, **kwargs)

    return attend


def _arguments(attention: Callable, args: tuple, kwargs: dict) -> dict[str, object]:
    given = inspect.signature(attention).bind(*args, **kwargs).arguments
    if "others" in given:
        other_arguments.refuse(attention.__name__, given["others"])
    return given
