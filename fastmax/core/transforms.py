"""Whether autograd, forward mode, a transform of torch.func or a compiler follows the operations on tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def recording(*tensors: Tensor | None) -> bool:
    """Returns whether autograd or a compiler records operations on these tensors, so that they must not write in place."""
    return torch.compiler.is_compiling() or differentiating(*tensors)


def differentiating(*tensors: Tensor | None) -> bool:
    """Returns whether autograd records operations on these tensors, in reverse or forward mode or in torch.func."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return True
    return is_transformed()


def is_transformed() -> bool:
    """Returns whether forward mode or a torch.func transform is active."""
    return torch.autograd.forward_ad._current_level >= 0 or in_functorch()


def in_functorch() -> bool:
    """Returns whether a torch.func transform (grad, vmap, jvp, ...) is active."""
    return torch._C._are_functorch_transforms_active()  # compilers can trace it, but not a look at the stack
