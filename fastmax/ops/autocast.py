"""Autocast and the registered operators."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def in_autocast(x: Tensor) -> bool:
    """Returns whether autocast is on for the tensor's device. Autocast does not know the device "meta"."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():  # x.device.type takes 1 us
        return False
    device = x.device.type
    return device != "meta" and torch.is_autocast_enabled(device)


def autocast_to(x: object, dtype: torch.dtype) -> object:
    """Returns an argument as autocast casts it: floating-point tensors in its dtype, except float64. Others are unchanged."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x


_NOTHING = nullcontext()


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Returns a context without autocast, which must not change the dtype of accumulations."""
    # Entering the context of autocast costs more than the check.
    return torch.autocast(x.device.type, enabled=False) if in_autocast(x) else _NOTHING
