"""The registered operators of `torch.ops.fastmax`: `forward`, `backward`, `flash_forward`, `flash_backward`, `decode_step` and
`softmax`.

Schemas, fake implementations and gradients are declared here, and the PyTorch implementation is registered for every device.
The compiled library (`fastmax.extension`) adds kernels under the key CUDA, which then take precedence. What they do not cover
(float64, rpe matrices, head dims above 256, old devices) goes to `fastmax::eager_forward` and its like, the PyTorch
implementation under names of its own. Arguments were checked by `fastmax.validation`; `scale` is 1 / temperature; `algorithm`
stays "auto" up to the implementation, so that no choice by size ends up in a compiled graph's guards; `allow_tf32` is read by
kernels only, since PyTorch's own matrix products obey its precision setting by themselves.

Only q, k, v, o, the denominators z (b, h, n) (softmax: the log-sum-exp) and the caller's mask, noise and rpe matrix are saved
for the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from fastmax import eager, extension, operator_checks
from fastmax.eager import softmax as row_softmax
from fastmax.score import Score, Softmax

_OPTIONS = (
    "Tensor? key_padding_mask, Tensor? drop_noise, Tensor? rpe_matrix, float scale, float a0, float a1, float a2, int p, "
    "bool causal, float dropout, str algorithm, bool allow_tf32=False"
)
_NO_SECOND_DERIVATIVE = (
    "fastmax: the custom gradient has no {}; pass use_custom_gradient=False, which differentiates PyTorch operations and "
    "gives the same numbers"
)

library = torch.library.Library("fastmax", "DEF")
for _prefix in ("", "eager_"):
    library.define(f"{_prefix}forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
    library.define(
        f"{_prefix}backward(Tensor grad_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor z, {_OPTIONS}) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    )
    library.define(
        f"{_prefix}flash_forward(Tensor q, Tensor k, Tensor v, Tensor? key_padding_mask, float scale, bool causal, "
        "bool allow_tf32) -> (Tensor o, Tensor lse)"
    )
    library.define(
        f"{_prefix}flash_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
        "Tensor? key_padding_mask, float scale, bool causal, bool allow_tf32) -> (Tensor, Tensor, Tensor)"
    )
    library.define(
        f"{_prefix}decode_step(Tensor q, Tensor k, Tensor v, Tensor values, Tensor weights, Tensor? key_padding_mask, "
        "float scale, float a0, float a1, float a2, int p) -> (Tensor, Tensor, Tensor)"
    )
    library.define(f"{_prefix}softmax(Tensor x, str algorithm) -> Tensor")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    noise: Tensor | None,
    rpe: Tensor | None,
    score: Score,
    causal: bool,
    dropout: float,
    algorithm: str,
) -> Tensor:
    """The fused operator on 4-d, checked arguments."""
    if q.is_cuda and not torch.compiler.is_compiling():
        extension.warn_if_unused(q.device)
    options = (*score, causal, dropout, algorithm, _allow_tf32(q))
    return _call(_ATTENTION, (q, k, v, mask, noise, rpe), options)[0]


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, score: Softmax, causal: bool
) -> tuple[Tensor, Tensor]:
    """Softmax attention's fused operator on 4-d, checked arguments: output and log-sum-exp."""
    if q.is_cuda and not torch.compiler.is_compiling():
        extension.warn_if_unused(q.device)
    return _call(_FLASH, (q, k, v, mask), (*score, causal, _allow_tf32(q)))


def _allow_tf32(q: Tensor) -> bool:
    return q.is_cuda and q.dtype == torch.float32 and _tf32_is_set()


def _tf32_is_set() -> bool:
    """What `torch.set_float32_matmul_precision` and its newer forms come to for CUDA."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# What `torch.compiler.assume_constant_result` does, without importing the compiler, which takes seconds. Compiled code is
# guarded by the setting all the same.
_tf32_is_set._dynamo_marked_constant = True


def decode_step(
    q: Tensor, k: Tensor, v: Tensor, values: Tensor, weights: Tensor, mask: Tensor | None, score: Score
) -> tuple[Tensor, Tensor, Tensor]:
    """One recurrent step on 4-d, checked arguments: output, values and weights; see `fastmax.decode`."""
    tensors = (q, k, v, values, weights)
    if eager.recording(*tensors):
        return eager.decode_step(*tensors, mask, score)
    if q.is_cuda and not torch.compiler.is_compiling():
        extension.warn_if_unused(q.device)
    if torch.compiler.is_compiling():
        return torch.ops.fastmax.decode_step.default(*tensors, mask, *score)
    return extension.call(torch.ops.fastmax.decode_step.default, *tensors, mask, *score)


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


def _forward(q, k, v, mask, noise, rpe, scale, a0, a1, a2, p, causal, dropout, algorithm, allow_tf32=False):
    score = Score(scale, a0, a1, a2, p)
    operator_checks.check_call(q, k, v, mask, noise, rpe, score, causal, algorithm)
    with _without_autocast(q):
        return eager.forward(q, k, v, mask, noise, rpe, score, causal, dropout, algorithm, differentiable=False)


def _backward(grad_o, q, k, v, o, z, mask, noise, rpe, scale, a0, a1, a2, p, causal, dropout, algorithm, allow_tf32=False):
    score = Score(scale, a0, a1, a2, p)
    operator_checks.check_call(q, k, v, mask, noise, rpe, score, causal, algorithm)
    operator_checks.check_results(q, v, o=o, grad_o=grad_o, z=z)
    with _without_autocast(q):
        return eager.backward(grad_o, q, k, v, o, z, mask, noise, rpe, score, causal, dropout, algorithm)


def _flash_forward(q, k, v, mask, scale, causal, allow_tf32):
    operator_checks.check_flash_call(q, k, v, mask, scale, causal)
    with _without_autocast(q):
        return eager.flash_forward(q, k, v, mask, Softmax(scale), causal, differentiable=False)


def _flash_backward(grad_o, grad_lse, q, k, v, o, lse, mask, scale, causal, allow_tf32):
    operator_checks.check_flash_call(q, k, v, mask, scale, causal)
    operator_checks.check_results(q, v, o=o, grad_o=grad_o, lse=lse, grad_lse=grad_lse)
    with _without_autocast(q):
        return eager.flash_backward(grad_o, grad_lse, q, k, v, o, lse, mask, Softmax(scale), causal)


def _decode_step(q, k, v, values, weights, mask, scale, a0, a1, a2, p):
    with _without_autocast(q):
        return eager.decode_step(q, k, v, values, weights, mask, Score(scale, a0, a1, a2, p))


def _softmax(x, algorithm):
    with _without_autocast(x):
        return row_softmax.forward(x, algorithm)


def _without_autocast(x: Tensor):
    """Autocast must not reach the accumulations; entering its context costs more than asking."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


for _name, _implementation in {
    "forward": _forward,
    "eager_forward": _forward,
    "backward": _backward,
    "eager_backward": _backward,
    "flash_forward": _flash_forward,
    "eager_flash_forward": _flash_forward,
    "flash_backward": _flash_backward,
    "eager_flash_backward": _flash_backward,
    "decode_step": _decode_step,
    "eager_decode_step": _decode_step,
    "softmax": _softmax,
    "eager_softmax": _softmax,
}.items():
    if _name.startswith("eager_"):
        _implementation = extension.remembering(_implementation)
    library.impl(_name, _implementation, "CompositeExplicitAutograd")
extension.load()


@torch.library.register_fake("fastmax::forward", lib=library)
def _forward_fake(q, k, v, mask, noise, rpe, scale, a0, a1, a2, p, causal, dropout, algorithm, allow_tf32=False):
    return _fake_outputs(q, v)


@torch.library.register_fake("fastmax::flash_forward", lib=library)
def _flash_forward_fake(q, k, v, mask, scale, causal, allow_tf32):
    return _fake_outputs(q, v)


def _fake_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return eager.empty_like_layout(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=eager.compute_dtype(q.dtype))


@torch.library.register_fake("fastmax::backward", lib=library)
def _backward_fake(grad_o, q, k, v, o, z, mask, noise, rpe, scale, a0, a1, a2, p, causal, dropout, algorithm, allow_tf32=False):
    return (*_fake_gradients(q, k, v), q.new_empty(0) if rpe is None else torch.empty_like(rpe))


@torch.library.register_fake("fastmax::flash_backward", lib=library)
def _flash_backward_fake(grad_o, grad_lse, q, k, v, o, lse, mask, scale, causal, allow_tf32):
    return _fake_gradients(q, k, v)


def _fake_gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(eager.empty_like_layout(x, x.shape[-1]) for x in tensors)


@torch.library.register_fake("fastmax::decode_step", lib=library)
def _decode_step_fake(q, k, v, values, weights, mask, scale, a0, a1, a2, p):
    return q.new_empty(*q.shape[:-1], v.shape[-1]), torch.empty_like(values), torch.empty_like(weights)


@torch.library.register_fake("fastmax::softmax", lib=library)
def _softmax_fake(x, algorithm):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output):
    q, k, v, mask, noise, rpe, *options = inputs
    o, z = output
    ctx.mark_non_differentiable(z)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, o, z, mask, noise, rpe)
    ctx.options = options


def _gradients(ctx, grad_o, _):
    """Of q, k, v, mask, noise and rpe."""
    if grad_o is None:
        return (None,) * 6
    q, k, v, o, z, mask, noise, rpe = ctx.saved_tensors
    dq, dk, dv, drpe = torch.ops.fastmax.backward.default(grad_o, q, k, v, o, z, mask, noise, rpe, *ctx.options)
    return dq, dk, dv, None, None, None if rpe is None else drpe


def _flash_save(ctx, inputs, output):
    q, k, v, mask, *options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, mask)
    ctx.options = options


def _flash_gradients(ctx, grad_o, grad_lse):
    """Of q, k, v and mask."""
    if grad_o is None and grad_lse is None:
        return (None,) * 4
    q, k, v, o, lse, mask = ctx.saved_tensors
    if grad_o is None:
        grad_o = torch.zeros_like(o)
    return *torch.ops.fastmax.flash_backward.default(grad_o, grad_lse, q, k, v, o, lse, mask, *ctx.options), None


def refuse_second_derivative(ctx, *grads):
    """The backward of a gradient that is not to be differentiated."""
    raise RuntimeError(_NO_SECOND_DERIVATIVE.format("second derivative"))


class _Differentiable(NamedTuple):
    """An operator of two outputs and its gradient."""

    forward: torch._ops.OpOverload
    save: Callable  # (ctx, inputs, outputs)
    gradients: Callable  # (ctx, gradients of the outputs) -> gradients of the inputs that are tensors


_ATTENTION = _Differentiable(torch.ops.fastmax.forward.default, _save, _gradients)
_FLASH = _Differentiable(torch.ops.fastmax.flash_forward.default, _flash_save, _flash_gradients)

for _operator in (_ATTENTION, _FLASH):

    def _differentiate(ctx, *grads, gradients=_operator.gradients):
        return *gradients(ctx, *grads), *(None,) * len(ctx.options)

    torch.library.register_autograd(_operator.forward, _differentiate, setup_context=_operator.save, lib=library)
for _name in ("backward", "flash_backward"):
    torch.library.register_autograd(f"fastmax::{_name}", refuse_second_derivative, lib=library)


def _call(operator: _Differentiable, tensors: tuple, options: tuple) -> tuple[Tensor, Tensor]:
    if torch.autograd.forward_ad._current_level >= 0 and any(
        x is not None and torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise RuntimeError(_NO_SECOND_DERIVATIVE.format("forward-mode derivative"))
    if torch.compiler.is_compiling() or eager.in_functorch():
        return operator.forward(*tensors, *options)
    if not torch.is_grad_enabled():
        return extension.call(operator.forward, *tensors, *options)
    return _Fused.apply(operator, options, *tensors)


def _save_softmax(ctx, inputs, output):
    ctx.save_for_backward(output)


def _differentiate_softmax(ctx, grad_y):
    (y,) = ctx.saved_tensors
    return row_softmax.backward(grad_y, y), None


torch.library.register_autograd("fastmax::softmax", _differentiate_softmax, setup_context=_save_softmax, lib=library)


class _Fused(torch.autograd.Function):
    """What `register_autograd` does, at a third of its cost a call; compilers and torch.func see the registered operator."""

    @staticmethod
    def forward(ctx, operator, options, *tensors):
        inputs = (*tensors, *options)
        with torch._C._AutoDispatchBelowAutograd():  # past what is registered there, which this class replaces
            output = extension.call(operator.forward, *inputs)
        operator.save(ctx, inputs, output)
        ctx.gradients = operator.gradients
        return output

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():  # create_graph=True: a later derivative of these must raise an error
            return None, None, *extension.call(ctx.gradients, ctx, *grads)
        with torch._C._AutoDispatchBelowAutograd():
            return None, None, *extension.call(ctx.gradients, ctx, *grads)
