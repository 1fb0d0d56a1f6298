"""`forward`, `flash_forward`, `exact_window_forward`, `exact_tiles_forward` and their gradients: attention of sequences."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fastmax import eager
from fastmax.core.call import EXACT_TILES, EXACT_WINDOW, FAR, FASTMAX, FLASH, Call
from fastmax.core.score import Softmax
from fastmax.ops import checks as operator_checks
from fastmax.ops import exact_window, extension, registration
from fastmax.ops.autocast import without_autocast
from fastmax.ops.autograd import (
    Differentiable,
    compute,
    refuse_second_derivative,
    register_gradient,
)
from fastmax.ops.precision import allow_tf32_of
from fastmax.ops.registration import LIBRARY

_OPERATORS = torch.ops.fastmax

registration.define(f"forward(Tensor q, Tensor k, Tensor v, {FASTMAX.schema}) -> (Tensor o, Tensor z)")

registration.define(
    f"backward(Tensor grad_o, Tensor? grad_z, Tensor q, Tensor k, Tensor v, Tensor o, Tensor z, {FASTMAX.schema}) "
    f"-> ({FASTMAX.gradients_schema})"
)

registration.define(f"flash_forward(Tensor q, Tensor k, Tensor v, {FLASH.schema}) -> (Tensor o, Tensor lse)")

registration.define(
    f"flash_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{FLASH.schema}) -> ({FLASH.gradients_schema})"
)

_EXACT_WINDOW_RESULTS = ", ".join(f"Tensor {name}" for name in exact_window.Forward._fields)

registration.define(
    f"exact_window_forward(Tensor q, Tensor k, Tensor v, {EXACT_WINDOW.schema}) -> ({_EXACT_WINDOW_RESULTS})", twin=False
)

registration.define(
    f"exact_window_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, {_EXACT_WINDOW_RESULTS}, "
    f"{EXACT_WINDOW.schema}) -> ({EXACT_WINDOW.gradients_schema})",
    twin=False,
)

registration.define(
    f"exact_tiles_forward(Tensor q, Tensor k, Tensor v, {EXACT_TILES.schema}) -> (Tensor o, Tensor lse)", twin=False
)

registration.define(
    "exact_tiles_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{EXACT_TILES.schema}) -> ({EXACT_TILES.gradients_schema})",
    twin=False,
)


def attention(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The fused operator on 4-d, checked arguments: output, and denominators or, for softmax and with an exact window, the log
    of the sums of weights."""
    operator = _exact(q, k, v, call) if call.exact_window > 0 else _part(call)
    tensors, options = operator.signature.flatten(call, allow_tf32_of(q))
    o, z, *_ = compute(operator, (q, k, v, *tensors), options)
    return o, z


def attention_backward(
    grad_o: Tensor, grad_z: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, z: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and log_decay of `attention`, from what it returns, without an exact window. Where o and z are of
    more keys than these, the gradients are this part of the whole. Not recorded."""
    operator = _part(call)
    tensors, options = operator.signature.flatten(call, allow_tf32_of(q))
    saved = (q, k, v, o, z, *tensors)
    grads = extension.call(operator.by_name, saved, options, grad_o, grad_z)
    return grads["q"], grads["k"], grads["v"], None if call.log_decay is None else grads["log_decay"]


def _forward(q, k, v, *arguments, signature=FASTMAX):
    call = signature.call(arguments)
    operator_checks.check_call(q, k, v, call)
    with without_autocast(q):
        return eager.forward(q, k, v, call, differentiable=False)


def _backward(grad_o, grad_z, q, k, v, o, z, *arguments, signature=FASTMAX, statistic="z"):
    """Gradients of q, k, v and of the call's differentiable tensors, of no elements for those that it has not."""
    call = signature.call(arguments)
    operator_checks.check_call(q, k, v, call)
    operator_checks.check_results(q, v, o=o, grad_o=grad_o, **{statistic: z, f"grad_{statistic}": grad_z})
    with without_autocast(q):
        grads, of_tensors = eager.backward(grad_o, grad_z, q, k, v, o, z, call)
    return *grads, *(q.new_empty(0) if x is None else x for x in (of_tensors[name] for name in signature.differentiable))


def _flash_forward(q, k, v, *arguments):
    return _forward(q, k, v, *arguments, signature=FLASH)


def _flash_backward(grad_o, grad_lse, q, k, v, o, lse, *arguments):
    return _backward(grad_o, grad_lse, q, k, v, o, lse, *arguments, signature=FLASH, statistic="lse")


def _check_exact_window(q, k, v, call):
    operator_checks.check_call(q, k, v, call)
    operator_checks.check_exact_window(q, k, call)


def _exact_tiles_forward(q, k, v, *arguments):
    _check_exact_window(q, k, v, EXACT_TILES.call(arguments))
    return _forward(q, k, v, *arguments, signature=EXACT_TILES)


def _exact_tiles_backward(grad_o, grad_lse, q, k, v, o, lse, *arguments):
    _check_exact_window(q, k, v, EXACT_TILES.call(arguments))
    return _backward(grad_o, grad_lse, q, k, v, o, lse, *arguments, signature=EXACT_TILES, statistic="lse")


def _exact_window_forward(q, k, v, *arguments):
    call = EXACT_WINDOW.call(arguments)
    _check_exact_window(q, k, v, call)

    def attend(q, k, v, call):
        operator = _part(call)
        tensors, options = operator.signature.flatten(call, arguments[-1])
        return extension.call(operator.forward, q, k, v, *tensors, *options)

    def attend_far_(o, lse, q, k, v, call):
        tensors, options = FAR.flatten(call, arguments[-1])
        return extension.call(torch.ops.fastmax.far_forward_.default, o, lse, q, k, v, *tensors, *options)

    merge = partial(extension.call, torch.ops.fastmax.merge_.default)
    with without_autocast(q):
        return exact_window.forward(q, k, v, call, attend, attend_far_, merge)


def _exact_window_backward(grad_o, grad_lse, q, k, v, *arguments):
    outputs = len(exact_window.Forward._fields)
    results, call = exact_window.Forward(*arguments[:outputs]), EXACT_WINDOW.call(arguments[outputs:])
    _check_exact_window(q, k, v, call)
    operator_checks.check_results(q, v, o=results.o, grad_o=grad_o, lse=results.lse, grad_lse=grad_lse)
    operator_checks.check_parts(q, k, v, results, call)

    def differentiate(grad_o, grad_z, q, k, v, o, z, call):
        operator = _part(call)
        tensors, options = operator.signature.flatten(call, arguments[-1])
        grads = extension.call(operator.backward, grad_o, grad_z, q, k, v, o, z, *tensors, *options)
        return operator.signature.gradients(grads)

    def differentiate_far_(into, grad_o, grad_z, q, k, v, o, z, call):
        tensors, options = FAR.flatten(call, arguments[-1])
        operator = torch.ops.fastmax.far_backward_.default
        return extension.call(operator, *into, grad_o, grad_z, q, k, v, o, z, *tensors, *options)

    with without_autocast(q):
        grads = exact_window.backward(grad_o, grad_lse, q, k, v, results, call, differentiate, differentiate_far_)
    return tuple(grads[name] for name in EXACT_WINDOW.gradient_names)


registration.implement("forward", _forward)

registration.implement("backward", _backward)

registration.implement("flash_forward", _flash_forward)

registration.implement("flash_backward", _flash_backward)

registration.implement("exact_window_forward", _exact_window_forward)

registration.implement("exact_window_backward", _exact_window_backward)

registration.implement("exact_tiles_forward", _exact_tiles_forward)

registration.implement("exact_tiles_backward", _exact_tiles_backward)


@torch.library.register_fake("fastmax::forward", lib=LIBRARY)
@torch.library.register_fake("fastmax::flash_forward", lib=LIBRARY)
@torch.library.register_fake("fastmax::exact_tiles_forward", lib=LIBRARY)
def _forward_fake(q, k, v, *arguments):
    return eager.empty_like_layout(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=eager.compute_dtype(q.dtype))


@torch.library.register_fake("fastmax::backward", lib=LIBRARY)
def fake_gradients(grad_o, grad_z, q, k, v, o, z, *arguments, signature=FASTMAX):
    call = signature.call(arguments)
    of_tensors = (getattr(call, name) for name in signature.differentiable)
    return (
        *(eager.empty_like_layout(x, x.shape[-1]) for x in (q, k, v)),
        *(q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in of_tensors),
    )


@torch.library.register_fake("fastmax::flash_backward", lib=LIBRARY)
def _flash_backward_fake(grad_o, grad_lse, q, k, v, o, lse, *arguments):
    return fake_gradients(grad_o, grad_lse, q, k, v, o, lse, *arguments, signature=FLASH)


@torch.library.register_fake("fastmax::exact_tiles_backward", lib=LIBRARY)
def _exact_tiles_backward_fake(grad_o, grad_lse, q, k, v, o, lse, *arguments):
    return fake_gradients(grad_o, grad_lse, q, k, v, o, lse, *arguments, signature=EXACT_TILES)


@torch.library.register_fake("fastmax::exact_window_forward", lib=LIBRARY)
def _exact_window_forward_fake(q, k, v, *arguments):
    return tuple(exact_window.empty_results(q, k, v, EXACT_WINDOW.call(arguments)))


@torch.library.register_fake("fastmax::exact_window_backward", lib=LIBRARY)
def _exact_window_backward_fake(grad_o, grad_lse, q, k, v, *arguments):
    o, lse, *rest = arguments
    rest = rest[len(exact_window.Forward._fields) - 2 :]
    return fake_gradients(grad_o, grad_lse, q, k, v, o, lse, *rest, signature=EXACT_WINDOW)


_FASTMAX = Differentiable(FASTMAX, _OPERATORS.forward.default, _OPERATORS.backward.default)

register_gradient(_FASTMAX, refuse_second_derivative)

_FLASH = Differentiable(FLASH, _OPERATORS.flash_forward.default, _OPERATORS.flash_backward.default)

register_gradient(_FLASH, refuse_second_derivative)

_EXACT_WINDOW = Differentiable(EXACT_WINDOW, _OPERATORS.exact_window_forward.default, _OPERATORS.exact_window_backward.default)

register_gradient(_EXACT_WINDOW, refuse_second_derivative)

_EXACT_TILES = Differentiable(EXACT_TILES, _OPERATORS.exact_tiles_forward.default, _OPERATORS.exact_tiles_backward.default)

register_gradient(_EXACT_TILES, refuse_second_derivative)


def _part(call: Call) -> Differentiable:
    """What computes a call without an exact window."""
    return _FLASH if isinstance(call.score, Softmax) else _FASTMAX


def _exact(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Differentiable:
    """What computes a call with an exact window: where PyTorch operations walk over all tiles anyway, one walk does both kinds
    of weights. Compiled code is to hold for other sizes too."""
    if q.is_cuda or torch.compiler.is_compiling():
        return _EXACT_WINDOW
    algorithm = eager.algorithm_of(q, k, v, call._replace(exact_window=0))
    return _EXACT_TILES if algorithm == "quadratic" else _EXACT_WINDOW
