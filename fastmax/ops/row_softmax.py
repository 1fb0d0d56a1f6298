"""`softmax` of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax.eager import softmax as rows
from fastmax.ops import extension, registration
from fastmax.ops.autocast import without_autocast
from fastmax.ops.registration import LIBRARY

registration.define("softmax(Tensor x, str algorithm) -> Tensor")


def softmax(x: Tensor, algorithm: str) -> Tensor:
    """Softmax over the last dimension of a checked tensor; algorithm is "safe" or "online". There are no rules for what
    `eager.is_transformed` tells of."""
    if torch.compiler.is_compiling():
        return torch.ops.fastmax.softmax.default(x, algorithm)
    if x.is_cuda:
        extension.warn_if_unused(x.device)
    if torch.is_grad_enabled() and x.requires_grad:
        return extension.call(torch.ops.fastmax.softmax.default, x, algorithm)
    with torch._C._AutoDispatchBelowAutograd():  # saves 15 us of Python on the way through `register_autograd`
        return extension.call(torch.ops.fastmax.softmax.default, x, algorithm)


def _softmax(x, algorithm):
    with without_autocast(x):
        return rows.forward(x, algorithm)


registration.implement("softmax", _softmax)


@torch.library.register_fake("fastmax::softmax", lib=LIBRARY)
def _softmax_fake(x, algorithm):
    return x.new_empty(x.shape)


def _save_softmax(ctx, inputs, output):
    ctx.save_for_backward(output)


def _differentiate_softmax(ctx, grad_y):
    (y,) = ctx.saved_tensors
    return rows.backward(grad_y, y), None


torch.library.register_autograd("fastmax::softmax", _differentiate_softmax, setup_context=_save_softmax, lib=LIBRARY)
