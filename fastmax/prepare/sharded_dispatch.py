"""Sharded dispatch: public functions called with DTensors, or with the local tokens of a context-parallel call.

This module imports neither implementation. `fastmax/__init__.py` registers the handler of DTensors
(`register_dtensor_handler`). A context that was entered (`entered`) runs the calls of its thread. For plain tensors a call
only checks a flag and the types of its arguments.
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
_entered = 0  # number of active contexts in all threads of this process
_is_any_entered = False  # a bool for the guards of compiled code
_counting = Lock()
_OTHERS = frozenset({Tensor, torch.nn.Parameter, type(None), str, bool, int, float, tuple})

Result: TypeAlias = Tensor | tuple[Tensor, Tensor]


class ParallelContext(Protocol):
    """The interface of a context to the functions and layers called in it. `fastmax.distributed.Context` implements it."""

    @property
    def attentions(self) -> tuple[Callable, Callable]:
        """`fastmax_attention` and `flash_attention` for local tokens."""

    def call(self, attention: Callable[..., Result], arguments: dict[str, object]) -> Result:
        """Runs `attention` on the local tokens of this rank."""

    def telling(self, check: Callable) -> Callable:
        """Returns `check` wrapped so that its errors are raised on all ranks."""

    def of_one_forward(self, options: dict[str, object]) -> ParallelContext:
        """Returns the context for one forward of a layer. `options` must be the same on all ranks."""

    def layout_of(self, tokens: int) -> Any:
        """Returns the layout of a sequence of which this rank has `tokens` tokens. The layout's `tokens` counts all of them."""

    def refuse_local_positions(self, positions: Tensor) -> None:
        """Raises an error if positions (b, n) of the local tokens count from the first local one, and others precede it."""

    def with_tokens_before(self, x: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
        """Returns each local part of x (b, n, channels) behind the `count` tokens before it, and their positions, int64."""

    def attend_to_kept(self, tokens: Any, options: Any) -> tuple[Tensor, Tensor] | None:
        """Attends to the kept keys of local tokens, as `fastmax.nn.kept_keys.attend`."""

    def refuse_gaps(self, mask: Tensor, cu_seqlens: Tensor | None) -> None:
        """Raises an error on all ranks if there is padding between real tokens of a sequence."""


Handler: TypeAlias = Callable[[Callable[..., Result], dict[str, object]], Result]


def _no_handler(attention: Callable[..., Result], arguments: dict[str, object]) -> Result:
    raise RuntimeError("no handler of DTensors is registered: import fastmax")


_dtensor_handler: Handler = _no_handler


def register_dtensor_handler(handler: Handler) -> None:
    """Registers `handler(attention, arguments)`, which runs a public function called with DTensors."""
    global _dtensor_handler
    _dtensor_handler = handler


def is_dtensor(x: object) -> bool:
    """Returns whether `x` is a DTensor. It does not import DTensor, which takes seconds: whoever has one has imported it."""
    if type(x) in _OTHERS or not isinstance(x, Tensor):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def like_sharded(x: Tensor, parameter: Tensor) -> Tensor:
    """Returns x, which is the same on all ranks, with the mesh and placements of a parameter; x itself if it has none."""
    if not is_dtensor(parameter):
        return x
    distribute = sys.modules["torch.distributed.tensor"].distribute_tensor  # as for `is_dtensor`
    return distribute(x.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)


def refuse(instead: str, **tensors: object) -> None:
    """Raises a TypeError that suggests `instead` if one of the tensors is a DTensor."""
    for name, x in tensors.items():
        if is_dtensor(x):
            raise TypeError(f"{name} must be a torch.Tensor here, got a DTensor: {instead}")


def outside_of_compiled_code(function: Callable) -> Callable:
    """Excludes a function from compiled graphs, which cannot contain the collectives of this package.

    `torch.compiler.disable` as a decorator would import the compiler. This wrapper calls it only during compilation.
    """

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*arguments, **options)
        return function(*arguments, **options)

    return call


def current() -> ParallelContext | None:
    """Returns the active `fastmax.distributed.context_parallel` context of this thread, or None.

    A thread in which autograd runs a backward has the context of the thread that called the backward.
    """
    return _of_this_thread() if _is_any_entered else None


@outside_of_compiled_code
def _of_this_thread() -> ParallelContext | None:
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None


@contextmanager
def entered(context: ParallelContext | None) -> Iterator[None]:
    """Makes a context the current one of this thread while the block runs.

    The context is stored with `torch._C._stash_obj_in_tls`, a private API. Autograd copies such objects to the threads that run
    a backward; it does not copy `contextvars`, and there is no public equivalent.
    """
    outer = _of_this_thread()
    _stash(context)
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        if outer is None and hasattr(torch._C, "_remove_obj_from_tls"):  # not in PyTorch 2.11
            torch._C._remove_obj_from_tls(_KEY)  # a thread that ends with an object leaks it
        else:
            _stash(outer)


def _stash(context: ParallelContext | None) -> None:
    if _stash_steals():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(context))
    torch._C._stash_obj_in_tls(_KEY, context)


@lru_cache
def _stash_steals() -> bool:
    """Returns whether `_stash_obj_in_tls` takes over a reference without counting it, as in PyTorch 2.11. Replacing the object
    would then free it while it is in use."""
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
    """Decorates an attention function so that it accepts DTensors, and local tokens inside a context.

    Either all tensors of a call are DTensors or none is. The results for DTensors are DTensors.

    Raises:
        TypeError: only some of the tensors are DTensors, or there is dropout without drop_noise.
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
