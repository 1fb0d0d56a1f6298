"""Registers forward hooks of layers once, and removes them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def add_once(layer: nn.Module, hook: Callable) -> None:
    """Registers a forward pre-hook (layer, args, kwargs), unless the layer has it."""
    if hook not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(hook, with_kwargs=True)


def remove(layer: nn.Module, matches: Callable[[Callable], bool]) -> None:
    """Removes the forward hooks and pre-hooks for which `matches` returns True."""
    for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
        for key in [key for key, hook in hooks.items() if matches(hook)]:
            hooks.pop(key, None)
            for of_key in (
                layer._forward_pre_hooks_with_kwargs,
                layer._forward_hooks_with_kwargs,
                layer._forward_hooks_always_called,
            ):
                of_key.pop(key, None)
