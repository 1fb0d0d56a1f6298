"""`softmax`: softmax of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax.eager import row_softmax as rows
from fastmax.ops import extension
from fastmax.ops.autocast import without_autocast
from fastmax.ops.autograd import Context
from fastmax.ops.registration import LIBRARY, register


def softmax(x: Tensor, algorithm: str) -> Tensor:
    """Computes softmax over the last dimension of a checked tensor. `algorithm` is "safe" or "online".

    The operator has no rules for torch.func transforms and forward mode: callers check `eager.is_transformed`.
    """
    return _OPERATOR(x, algorithm)


_MAX_WIDTH = 2**30


def _softmax(x: Tensor, algorithm: str) -> Tensor:
    with without_autocast(x):
        return rows.forward(x, algorithm)


def _fake_softmax(x: Tensor, algorithm: str) -> Tensor:
    return x.new_empty(x.shape)


_OPERATOR = register(
    "softmax(Tensor x, str algorithm) -> Tensor",
    _softmax,
    _fake_softmax,
    covers=lambda x, algorithm: extension.kernels_run_on(x) and x.dim() > 0 and x.shape[-1] <= _MAX_WIDTH,
)


def _save_softmax(ctx: Context, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _differentiate_softmax(ctx: Context, grad_y: Tensor) -> tuple[Tensor, None]:
    (y,) = ctx.saved_tensors
    return rows.backward(grad_y, y), None


torch.library.register_autograd(_OPERATOR.overload, _differentiate_softmax, setup_context=_save_softmax, lib=LIBRARY)
