"""Objects in the place of tensors that fastmax alone can read: whatever else uses one raises an error."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils import _pytree as pytree


class ForeignAttentionError(AttributeError, ValueError):
    """An attention that is not fastmax used an object of fastmax's. An AttributeError, so that `hasattr` says False."""


class Unreadable:
    """Raises a `ForeignAttentionError` in every use as a tensor, a number or a sequence."""

    def _misuse(self, use: str) -> str:
        """What the error says; `use` is the name of the attribute, method or function."""
        raise NotImplementedError

    def _foreign(self, use: str) -> ForeignAttentionError:
        return ForeignAttentionError(self._misuse(use))

    def __getattr__(self, name: str):
        if not vars(self):  # not made yet: copy and pickle ask before they fill it
            raise AttributeError(name)
        raise self._foreign(name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        arguments = pytree.tree_leaves((args, kwargs or {}))
        unreadable = next(argument for argument in arguments if isinstance(argument, cls))
        raise unreadable._foreign(getattr(function, "__name__", str(function)))

    __hash__ = object.__hash__


def _raise_foreign(name: str) -> Callable:
    def use(self, *args):
        raise self._foreign(name)

    use.__name__ = name
    return use


# What Python looks up on the class, and so passes __getattr__ by.
_BINARY = ("add", "sub", "mul", "truediv", "matmul", "and", "or", "xor")
_OTHER = ("bool", "int", "float", "index", "len", "iter", "contains", "getitem", "setitem", "invert", "neg", "abs", "array")
for _name in (*_BINARY, *(f"r{_binary}" for _binary in _BINARY), *_OTHER, "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Unreadable, f"__{_name}__", _raise_foreign(f"__{_name}__"))
