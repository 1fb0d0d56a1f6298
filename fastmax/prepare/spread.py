"""Calls of the public functions whose tensors are spread over ranks: DTensors (`fastmax.distributed.sharding`), and tokens in a
context (`fastmax.distributed.context`). Told from others at next to no cost."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial, wraps
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastmax import ops
from fastmax.core import other_arguments

if TYPE_CHECKING:
    from fastmax.distributed.context import Context

_KEY = "fastmax.context"
_entered = 0  # contexts that threads of this process are in
_is_any_entered = False  # a bool, which compiled code may have a guard on
_counting = Lock()
_OTHERS = frozenset({Tensor, torch.nn.Parameter, type(None), str, bool, int, float, tuple})


def is_dtensor(x: object) -> bool:
    """Without importing what defines DTensor, which takes seconds: whoever has one has imported it."""
    if type(x) in _OTHERS or not isinstance(x, Tensor):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def refuse(instead: str, **tensors: object) -> None:
    """Where no part of a tensor can stand for the whole."""
    for name, x in tensors.items():
        if is_dtensor(x):
            raise TypeError(f"{name} must be a torch.Tensor here, got a DTensor: {instead}")


def outside_of_compiled_code(function: Callable) -> Callable:
    """`torch.compiler.disable`, which imports the compiler, where there is one already: ranks do not meet in a graph."""

    @wraps(function)
    def call(*arguments, **options):
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*arguments, **options)
        return function(*arguments, **options)

    return call


def current() -> Context | None:
    """Returns the context of `fastmax.distributed.context_parallel` that this thread is in. A thread in which autograd runs a
    backward is in the context of the thread that called it."""
    return _of_this_thread() if _is_any_entered else None


@outside_of_compiled_code
def _of_this_thread() -> Context | None:
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None


@contextmanager
def entered(context: Context | None):
    """Calls of this thread inside are those of the context."""
    # Autograd hands PyTorch's thread-local objects to its threads; contextvars do not reach them.
    outer = _of_this_thread()
    torch._C._stash_obj_in_tls(_KEY, context)
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        if outer is None and hasattr(torch._C, "_remove_obj_from_tls"):  # not in PyTorch 2.11
            torch._C._remove_obj_from_tls(_KEY)  # a thread that ends with an object cannot free it
        else:
            torch._C._stash_obj_in_tls(_KEY, outer)


def _count(change: int) -> None:
    global _entered, _is_any_entered
    with _counting:
        _entered += change
        _is_any_entered = _entered > 0


def accepted(attention: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> Callable:
    """An attention function of q, k, v and options that takes DTensors too, all of its tensors or none, and returns them; in a
    context the tokens of a rank.

    Raises:
        TypeError: some of the tensors are DTensors, others are not; dropout has no drop_noise.
    """

    @wraps(attention)
    def attend(*args, **kwargs):
        context = current()
        if context is not None:
            return context.call(attention, context.telling(_arguments)(attention, args, kwargs))
        for x in (*args, *kwargs.values()):
            if type(x) not in _OTHERS and is_dtensor(x):
                return _attend_on_shards(attention, args, kwargs)
        return attention(*args, **kwargs)

    return attend


def _arguments(attention: Callable, args: tuple, kwargs: dict) -> dict:
    given = inspect.signature(attention).bind(*args, **kwargs).arguments
    if "others" in given:
        other_arguments.refuse(attention.__name__, given["others"])
    return given


def _attend_on_shards(attention: Callable, args: tuple, kwargs: dict) -> Tensor | tuple[Tensor, Tensor]:
    from fastmax.distributed import sharding

    given = _arguments(attention, args, kwargs)
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    options = {name: x for name, x in given.items() if name not in tensors}
    distributed = next(name for name, x in tensors.items() if is_dtensor(x))
    for name, x in tensors.items():
        if not is_dtensor(x):
            raise TypeError(
                f"{name} must be a DTensor, as {distributed} is, got a torch.Tensor: of the same values on every rank it is "
                f"DTensor.from_local({name}, mesh, [Replicate()] * mesh.ndim)"
            )
    # On all ranks alike, before one of them computes: shapes of the whole, no values.
    attention(**{name: _without_values(x) for name, x in tensors.items()}, **options)
    if options.get("dropout") and "drop_noise" not in tensors:
        raise TypeError("dropout of DTensors needs drop_noise, a DTensor: ranks would draw numbers of their own, got None")
    results = ("o", "lse") if options.get("return_lse") else ("o",)
    out = sharding.on_shards(partial(attention, **options), tensors, results)
    return out if options.get("return_lse") else out[0]


def _without_values(x: Tensor) -> Tensor:
    """In the dtype that autocast, which does not know the device "meta", would give it."""
    dtype = torch.get_autocast_dtype(x.device.type) if ops.in_autocast(x) else x.dtype
    return torch.empty(x.shape, dtype=dtype if x.is_floating_point() and x.dtype != torch.float64 else x.dtype, device="meta")
