"""Objects that stand in for tensors and that only fastmax can read: any other use of one raises an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch.utils import _pytree as pytree


class ForeignAttentionError(AttributeError, ValueError):
    """Another attention used an object of fastmax. It is an AttributeError, so that `hasattr` returns False."""


class Unreadable:
    """An object that raises a `ForeignAttentionError` in every use as a tensor, a number or a sequence."""

    def _misuse(self, use: str) -> str:
        """Returns the message of the error; `use` is the name of the attribute, method or function."""
        raise NotImplementedError

    def _foreign(self, use: str) -> ForeignAttentionError:
        return ForeignAttentionError(self._misuse(use))

    def __getattr__(self, name: str) -> Any:
        if not vars(self):  # copy and pickle ask before they set attributes
            raise AttributeError(name)
        raise self._foreign(name)

    @classmethod
    def __torch_function__(cls, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> NoReturn:
        arguments = pytree.tree_leaves((args, kwargs or {}))
        unreadable = next(argument for argument in arguments if isinstance(argument, cls))
        raise unreadable._foreign(getattr(function, "__name__", str(function)))

    __hash__ = object.__hash__


def _raise_foreign(name: str) -> Callable[..., NoReturn]:
    def use(self: Unreadable, *args: object) -> NoReturn:
        raise self._foreign(name)

    use.__name__ = name
    return use


# Python looks these up on the class, without __getattr__.
_BINARY = ("add", "sub", "mul", "truediv", "matmul", "and", "or", "xor")
_OTHER = ("bool", "int", "float", "index", "len", "iter", "contains", "getitem", "setitem", "invert", "neg", "abs", "array")
for _name in (*_BINARY, *(f"r{_binary}" for _binary in _BINARY), *_OTHER, "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Unreadable, f"__{_name}__", _raise_foreign(f"__{_name}__"))
