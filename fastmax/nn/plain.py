"""Tells whether a kernel may use the weights of a layer's part without calling the part, and calls parts otherwise."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fastmax.core import validation


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Returns whether a call of the module is `kind.forward` and nothing else, so that its weights may be used without a call.

    A subclass, a wrapper, a hook (pruning, observers, sharding) or a forward set on the instance does something else.
    Parametrizations are plain: reading a weight computes it.
    """
    own = type(module)
    if own is not kind and not (own.__bases__ == (kind,) and is_parametrized(module)):
        return False
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return "forward" not in vars(module) and not any(map(len, hooks))


def call_part(name: str, module: nn.Module, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Calls the part `name` of a layer with x, and checks the shape of its result."""
    y = module(x)
    if not isinstance(y, Tensor) or y.shape != shape:
        got = validation.describe(y)
        raise ValueError(f"{name} ({type(module).__name__}) must return a tensor of shape {tuple(shape)}, got {got}")
    return y
