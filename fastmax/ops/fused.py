"""`forward`, `flash_forward`, `exact_tiles_forward`, `exact_window_forward` and their gradients: attention of sequences."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fastmax import eager
from fastmax.core.call import EXACT_TILES, EXACT_WINDOW, FASTMAX, FLASH, GLOBAL, Call, Signature
from fastmax.core.score import Softmax
from fastmax.ops import checks as operator_checks
from fastmax.ops import exact_window
from fastmax.ops.autocast import without_autocast
from fastmax.ops.autograd import Differentiable, compute, refuse_second_derivative, register_gradient
from fastmax.ops.flops import count_attention
from fastmax.ops.precision import allow_tf32_of
from fastmax.ops.registration import OPERATORS, register


def attention(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Computes attention of 4-d, checked arguments by a registered operator.

    Returns:
        The output, and the denominators; for softmax and with an exact window the log of the sums of weights.
    """
    operator = _exact(q, k, v, call) if call.exact_window > 0 else _part(call)
    tensors, options = operator.signature.flatten(call, allow_tf32_of(q))
    o, z, *_ = compute(operator, (q, k, v, *tensors), options)
    return o, z


def attention_backward(
    grad_o: Tensor, grad_z: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, z: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the gradients of q, k, v and log_decay of `attention` without an exact window, given its results.

    If o and z are of more keys than these, the gradients are this part of the whole. Autograd does not record them.
    """
    operator = _part(call)
    tensors, options = operator.signature.flatten(call, allow_tf32_of(q))
    grads = operator.signature.gradients(operator.backward(grad_o, grad_z, q, k, v, o, z, *tensors, *options))
    return grads["q"], grads["k"], grads["v"], None if call.log_decay is None else grads["log_decay"]


def _part(call: Call) -> Differentiable:
    """Returns the operator of a call without an exact window."""
    return _FLASH if isinstance(call.score, Softmax) else _FASTMAX


def _exact(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Differentiable:
    """Returns the operator that computes a call with an exact window.

    The quadratic algorithm in PyTorch operations visits all tiles, so one pass can compute both kinds of weights. The other
    operator makes a call for the local keys and others for the global keys. Measured on one CPU core, forward and backward,
    4 heads of 64, one pass is 1.75 times as fast at 64 tokens, 1.1 to 1.2 times at 256 to 1024, and equally fast at 2048;
    without `causal` 2.7, 1.4 to 1.8 and 1.02 times. Compiled code always uses the other operator, because a choice by size
    would not hold for other sizes.
    """
    if q.is_cuda or torch.compiler.is_compiling():
        return _EXACT_WINDOW
    algorithm = eager.algorithm_of(q, k, v, call._replace(exact_window=0))
    return _EXACT_TILES if algorithm == "quadratic" else _EXACT_WINDOW


# ---- operators that compute all keys of a call in one pass


def _check(q: Tensor, k: Tensor, v: Tensor, call: Call, signature: Signature) -> None:
    operator_checks.check_call(q, k, v, call)
    if "exact_window" in signature.option_names:
        operator_checks.check_exact_window(q, k, call)


def _forward(signature, q, k, v, *arguments):
    call = signature.call(arguments)
    _check(q, k, v, call, signature)
    with without_autocast(q):
        return eager.forward(q, k, v, call, differentiable=False)


def _backward(signature, statistic, grad_o, grad_z, q, k, v, o, z, *arguments):
    """Returns the gradients of q, k, v and of the call's differentiable tensors; no elements for absent tensors."""
    call = signature.call(arguments)
    _check(q, k, v, call, signature)
    operator_checks.check_results(q, v, o=o, grad_o=grad_o, **{statistic: z, f"grad_{statistic}": grad_z})
    with without_autocast(q):
        grads, of_tensors = eager.backward(grad_o, grad_z, q, k, v, o, z, call)
    return *grads, *(q.new_empty(0) if x is None else x for x in (of_tensors[name] for name in signature.differentiable))


def _fake_forward(q, k, v, *arguments):
    return eager.empty_like_layout(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=eager.compute_dtype(q.dtype))


def fake_gradients(signature, grad_o, grad_z, q, k, v, o, z, *arguments):
    """Returns uninitialised gradients, as `_backward` returns them."""
    call = signature.call(arguments)
    of_tensors = (getattr(call, name) for name in signature.differentiable)
    return (
        *(eager.empty_like_layout(x, x.shape[-1]) for x in (q, k, v)),
        *(q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in of_tensors),
    )


def _forward_flops(signature, q, k, v, *arguments, out_val=None) -> int:
    return count_attention(q, k, v, signature.call(arguments), backward=False)


def _backward_flops(signature, grad_o, grad_z, q, k, v, o, z, *arguments, out_val=None) -> int:
    return count_attention(q, k, v, signature.call(arguments), backward=True)


def _register(prefix: str, signature: Signature, statistic: str, kernel_of: str | None = "q v") -> Differentiable:
    """Registers a forward and its backward.

    Args:
        statistic: the name of the second result, the denominators `z` or their logarithms `lse`.
        kernel_of: as for `register`.
    """
    forward = register(
        f"{prefix}forward(Tensor q, Tensor k, Tensor v, {signature.schema}) -> (Tensor o, Tensor {statistic})",
        partial(_forward, signature),
        _fake_forward,
        kernel_of=kernel_of,
        flops=partial(_forward_flops, signature),
    )
    backward = register(
        f"{prefix}backward(Tensor grad_o, Tensor? grad_{statistic}, Tensor q, Tensor k, Tensor v, Tensor o, "
        f"Tensor {statistic}, {signature.schema}) -> ({signature.gradients_schema})",
        partial(_backward, signature, statistic),
        partial(fake_gradients, signature),
        kernel_of=kernel_of,
        flops=partial(_backward_flops, signature),
    )
    operator = Differentiable(signature, forward, backward)
    register_gradient(operator, refuse_second_derivative)
    return operator


_FASTMAX = _register("", FASTMAX, "z")
_FLASH = _register("flash_", FLASH, "lse")
_EXACT_TILES = _register("exact_tiles_", EXACT_TILES, "lse")


# ---- the operator of an exact window, which calls others for the local and the global keys


def _exact_window_forward(q, k, v, *arguments):
    call = EXACT_WINDOW.call(arguments)
    _check(q, k, v, call, EXACT_WINDOW)

    def attend(q, k, v, call):
        operator = _part(call)
        tensors, options = operator.signature.flatten(call, arguments[-1])
        return operator.forward(q, k, v, *tensors, *options)

    def attend_global_(o, lse, q, k, v, call):
        tensors, options = GLOBAL.flatten(call, arguments[-1])
        return OPERATORS["global_forward_"](o, lse, q, k, v, *tensors, *options)

    with without_autocast(q):
        return exact_window.forward(q, k, v, call, attend, attend_global_, OPERATORS["merge_"])


def _split_results(arguments: tuple) -> tuple[exact_window.Forward, tuple]:
    """Splits the arguments of the backward into the results of the forward and the rest."""
    count = len(exact_window.Forward._fields)
    return exact_window.Forward(*arguments[:count]), arguments[count:]


def _exact_window_backward(grad_o, grad_lse, q, k, v, *arguments):
    results, arguments = _split_results(arguments)
    call = EXACT_WINDOW.call(arguments)
    _check(q, k, v, call, EXACT_WINDOW)
    operator_checks.check_results(q, v, o=results.o, grad_o=grad_o, lse=results.lse, grad_lse=grad_lse)
    operator_checks.check_parts(q, k, v, results, call)

    def differentiate(grad_o, grad_z, q, k, v, o, z, call):
        operator = _part(call)
        tensors, options = operator.signature.flatten(call, arguments[-1])
        grads = operator.backward(grad_o, grad_z, q, k, v, o, z, *tensors, *options)
        return operator.signature.gradients(grads)

    def differentiate_global_(into, grad_o, grad_z, q, k, v, o, z, call):
        tensors, options = GLOBAL.flatten(call, arguments[-1])
        grads = OPERATORS["global_backward_"](*into, grad_o, grad_z, q, k, v, o, z, *tensors, *options)
        grads = grads if isinstance(grads, tuple) else (grads,)
        return dict(zip(GLOBAL.differentiable, grads, strict=True))

    with without_autocast(q):
        grads = exact_window.backward(grad_o, grad_lse, q, k, v, results, call, differentiate, differentiate_global_)
    return tuple(grads[name] for name in EXACT_WINDOW.gradient_names)


def _fake_exact_window_forward(q, k, v, *arguments):
    return tuple(exact_window.empty_results(q, k, v, EXACT_WINDOW.call(arguments)))


def _fake_exact_window_backward(grad_o, grad_lse, q, k, v, *arguments):
    results, arguments = _split_results(arguments)
    return fake_gradients(EXACT_WINDOW, grad_o, grad_lse, q, k, v, results.o, results.lse, *arguments)


def _exact_window_flops(q: Tensor, k: Tensor, v: Tensor, call: Call, backward: bool) -> int:
    """Counts attention to the local keys and to the parts of global keys."""
    total = count_attention(q, k, v, exact_window.local_call(call), backward)
    for part in exact_window.global_keys(q, k, call):
        total += count_attention(part.queries_of(q), part.keys_of(k), part.keys_of(v), part.call, backward)
    return total


def _exact_window_forward_flops(q, k, v, *arguments, out_val=None) -> int:
    return _exact_window_flops(q, k, v, EXACT_WINDOW.call(arguments), backward=False)


def _exact_window_backward_flops(grad_o, grad_lse, q, k, v, *arguments, out_val=None) -> int:
    return _exact_window_flops(q, k, v, EXACT_WINDOW.call(_split_results(arguments)[1]), backward=True)


_RESULTS = ", ".join(f"Tensor {name}" for name in exact_window.Forward._fields)
_EXACT_WINDOW = Differentiable(
    EXACT_WINDOW,
    register(
        f"exact_window_forward(Tensor q, Tensor k, Tensor v, {EXACT_WINDOW.schema}) -> ({_RESULTS})",
        _exact_window_forward,
        _fake_exact_window_forward,
        flops=_exact_window_forward_flops,
    ),
    register(
        f"exact_window_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, {_RESULTS}, "
        f"{EXACT_WINDOW.schema}) -> ({EXACT_WINDOW.gradients_schema})",
        _exact_window_backward,
        _fake_exact_window_backward,
        flops=_exact_window_backward_flops,
    ),
)
register_gradient(_EXACT_WINDOW, refuse_second_derivative)
