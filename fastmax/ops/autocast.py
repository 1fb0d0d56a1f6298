"""Autocast around the registered operators."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor


def in_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the tensor's device; "meta" is one that it does not know."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():  # a device's name costs a microsecond
        return False
    device = x.device.type
    return device != "meta" and torch.is_autocast_enabled(device)


def autocast_to(x: object, dtype: torch.dtype) -> object:
    """What autocast makes of an argument: floating-point tensors in its dtype, but float64, as PyTorch's own operators do."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x


_NOTHING = nullcontext()


def without_autocast(x: Tensor):
    """Autocast must not reach the accumulations; entering its context costs more than asking."""
    return torch.autocast(x.device.type, enabled=False) if in_autocast(x) else _NOTHING
