"""`finite_decay`: splits decays into finite values and resets. `decay_sums`: the sums of decays up to each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastmax import eager
from fastmax.ops import extension
from fastmax.ops.autograd import Context
from fastmax.ops.registration import LIBRARY, register


def finite_decay(log_decay: Tensor, continues: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Splits checked decays into finite values and resets (-inf).

    Args:
        log_decay: (b, hk, m).
        continues: whether a state holds keys before the first token.
        dtype: of the finite decays, float32 or float64.

    Returns:
        The finite decays (b, hk, m): NaN stays NaN, -inf and values above 0 become 0. And `k_start`, int32 (b, hk, m): the
        first key that a query at each token may see, that is the last token up to it with -inf. If there is none it is 0, or
        -1 with `continues`.
    """
    if not log_decay.is_cuda or eager.is_transformed():
        return eager.finite_decay(log_decay, continues, dtype)
    wide = dtype == torch.float64
    if torch.compiler.is_compiling():
        return _FINITE(log_decay, continues, wide)
    return _FiniteDecay.apply(log_decay, continues, wide)


def _finite_decay(log_decay: Tensor, continues: bool, wide: bool) -> tuple[Tensor, Tensor]:
    if log_decay.dim() != 3:
        raise ValueError(f"log_decay must have shape (b, hk, m), got {tuple(log_decay.shape)}")
    finite, k_start = eager.finite_decay(log_decay, continues, torch.float64 if wide else torch.float32)
    return finite.contiguous(), k_start.contiguous()


def _fake_finite_decay(log_decay: Tensor, continues: bool, wide: bool) -> tuple[Tensor, ...]:
    dtypes = (torch.float64 if wide else torch.float32, torch.int32)
    return tuple([log_decay.new_empty(log_decay.shape, dtype=dtype) for dtype in dtypes])


_FINITE = register(
    "finite_decay(Tensor log_decay, bool continues, bool wide) -> (Tensor finite, Tensor k_start)",
    _finite_decay,
    _fake_finite_decay,
    covers=lambda log_decay, continues, wide: not wide and extension.kernels_run_on(log_decay),
)


def _save_finite_decay(ctx: Context, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.mark_non_differentiable(output[1])


def _differentiate_finite_decay(ctx: Context, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
    (log_decay,) = ctx.saved_tensors
    constant = (log_decay == -torch.inf) | (log_decay > 0.0)
    return grad.masked_fill(constant, 0.0).to(log_decay.dtype), None, None


torch.library.register_autograd(_FINITE.overload, _differentiate_finite_decay, setup_context=_save_finite_decay, lib=LIBRARY)


class _FiniteDecay(torch.autograd.Function):
    """The same as `register_autograd` for `_FINITE`, at a lower cost per call."""

    @staticmethod
    def forward(ctx: Context, *inputs: Tensor | bool) -> tuple[Tensor, Tensor]:
        output = _FINITE(*inputs)
        _save_finite_decay(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiate_finite_decay)


def decay_sums(log_decay: Tensor) -> Tensor:
    """Returns the sums of log decays (..., m) up to each token, its own among them, in float64."""
    if torch.compiler.is_compiling() and log_decay.is_cuda:
        # The compiler of PyTorch 2.11 fails where it fuses a cumulative sum with the linear map that the decays come from.
        return _SUMS(log_decay)
    return log_decay.cumsum(-1, dtype=torch.float64)


_SUMS = register(
    "decay_sums(Tensor log_decay) -> Tensor decay_sums",
    lambda log_decay: log_decay.cumsum(-1, dtype=torch.float64).contiguous(),
    lambda log_decay: log_decay.new_empty(log_decay.shape, dtype=torch.float64),
)


def _differentiate_sums(ctx: Any, grad: Tensor) -> Tensor:
    return _SUMS(grad.flip(-1)).flip(-1).to(ctx.dtype)


def _save_dtype(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype


torch.library.register_autograd(_SUMS.overload, _differentiate_sums, setup_context=_save_dtype, lib=LIBRARY)
