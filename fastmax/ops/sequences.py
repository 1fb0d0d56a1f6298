"""`forward`, `flash_forward`, `exact_window_forward` and their gradients: attention of sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastmax import eager
from fastmax.core.call import EXACT_WINDOW, FASTMAX, FLASH, Call, Signature
from fastmax.core.score import Softmax
from fastmax.ops import checks as operator_checks
from fastmax.ops import exact_window
from fastmax.ops.autocast import without_autocast
from fastmax.ops.autograd import Differentiable, compute, refuse_derivatives, refuse_second_derivative, register_gradient
from fastmax.ops.flops import count_attention
from fastmax.ops.merge import merge_
from fastmax.ops.precision import allow_tf32_of
from fastmax.ops.registration import Operator, register


def attention(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Computes attention of 4-d, checked arguments by a registered operator.

    Returns:
        The output, and the denominators; for softmax and with an exact window the log of the sums of weights.
    """
    operator = _EXACT_WINDOW if call.exact_window > 0 else _part(call)
    tensors, options = operator.signature.flatten(call, allow_tf32_of(q))
    return compute(operator, (q, k, v, *tensors), options)


def attention_backward(
    grad_o: Tensor, grad_z: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, z: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of q, k, v, log_decay and log_input_gate of `attention` without an exact window, given its results.

    The last two are None if the call has none. If o and z are of more keys than these, the gradients are this part of the
    whole. Autograd does not record them.
    """
    operator = _part(call)
    tensors, options = operator.signature.flatten(call, allow_tf32_of(q))
    grads = operator.signature.gradients(operator.backward(grad_o, grad_z, q, k, v, o, z, *tensors, *options))
    of_keys = (None if getattr(call, name) is None else grads[name] for name in ("log_decay", "log_input_gate"))
    return grads["q"], grads["k"], grads["v"], *of_keys


def _part(call: Call) -> Differentiable:
    """Returns the operator of a call without an exact window."""
    return _FLASH if isinstance(call.score, Softmax) else _FASTMAX


def _check(q: Tensor, k: Tensor, v: Tensor, call: Call, signature: Signature) -> None:
    operator_checks.check_call(q, k, v, call)
    if "exact_window" in signature.option_names:
        operator_checks.check_exact_window(q, k, call)


def _forward(signature: Signature, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    call = signature.call(arguments)
    _check(q, k, v, call, signature)
    with without_autocast(q):
        return eager.forward(q, k, v, call, differentiable=False)


def _backward(
    signature: Signature,
    statistic: str,
    grad_o: Tensor,
    grad_z: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    z: Tensor,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k, v and of the call's differentiable tensors; no elements for absent tensors."""
    call = signature.call(arguments)
    _check(q, k, v, call, signature)
    operator_checks.check_results(q, v, o=o, grad_o=grad_o, **{statistic: z, f"grad_{statistic}": grad_z})
    with without_autocast(q):
        grads, of_tensors = eager.backward(grad_o, grad_z, q, k, v, o, z, call)
    return *grads, *(q.new_empty(0) if x is None else x for x in (of_tensors[name] for name in signature.differentiable))


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return eager.empty_like_layout(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=eager.compute_dtype(q.dtype))


def _fake_gradients(
    signature: Signature,
    grad_o: Tensor,
    grad_z: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    z: Tensor,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    """Returns uninitialised gradients, as `_backward` returns them."""
    call = signature.call(arguments)
    of_tensors = (getattr(call, name) for name in signature.differentiable)
    return (
        *(eager.empty_like_layout(x, x.shape[-1]) for x in (q, k, v)),
        *(q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in of_tensors),
    )


def _register(
    prefix: str,
    signature: Signature,
    statistic: str,
    forward: Callable[..., tuple[Tensor, Tensor]] = _forward,
    backward: Callable[..., tuple[Tensor, ...]] = _backward,
    flops: Callable[..., int] = count_attention,
    **kernel: Any,
) -> Differentiable:
    """Registers a forward, its backward, and a backward of q, k and v alone.

    Args:
        statistic: the name of the second result, the denominators `z` or their logarithms `lse`.
        forward, backward: implementations, called with `signature`, and `statistic`, before the arguments of the operator.
        flops: counts the operations of q, k, v, a call, and whether it is the backward.
        kernel: `kernel_of` and `covers` of `register`.
    """

    def forward_flops(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, out_val: object = None) -> int:
        return flops(q, k, v, signature.call(arguments), backward=False)

    def backward_flops(
        grad_o: Tensor,
        grad_z: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        z: Tensor,
        *arguments: Any,
        out_val: object = None,
    ) -> int:
        return flops(q, k, v, signature.call(arguments), backward=True)

    def register_backward(name: str, results: str, count: int) -> Operator:
        return register(
            f"{prefix}{name}(Tensor grad_o, Tensor? grad_{statistic}, Tensor q, Tensor k, Tensor v, Tensor o, "
            f"Tensor {statistic}, {signature.schema}) -> ({results})",
            lambda *arguments: backward(signature, statistic, *arguments)[:count],
            lambda *arguments: _fake_gradients(signature, *arguments)[:count],
            flops=backward_flops,
            **kernel,
        )

    operator = Differentiable(
        signature,
        register(
            f"{prefix}forward(Tensor q, Tensor k, Tensor v, {signature.schema}) -> (Tensor o, Tensor {statistic})",
            partial(forward, signature),
            _fake_forward,
            flops=forward_flops,
            **kernel,
        ),
        register_backward("backward", signature.gradients_schema, len(signature.gradient_names)),
        register_backward("backward_qkv", "Tensor grad_q, Tensor grad_k, Tensor grad_v", 3),
    )
    register_gradient(operator, refuse_second_derivative)
    refuse_derivatives(operator.backward_qkv, refuse_second_derivative)
    return operator


_FASTMAX = _register("", FASTMAX, "z", kernel_of="q v")
_FLASH = _register("flash_", FLASH, "lse", kernel_of="q v")


# ---- the exact window


def _takes_one_pass(q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
    """Returns whether one pass over tiles computes local and global keys (`fastmax.eager.exact`), in place of a call for each.

    The quadratic algorithm visits all tiles, so one pass can compute both kinds of weights. Measured on one CPU core, forward
    and backward, 4 heads of 64, one pass is 1.75 times as fast at 64 tokens, 1.1 to 1.2 times at 256 to 1024, and equally fast
    at 2048; without `causal` 2.7, 1.4 to 1.8 and 1.02 times.
    """
    return not q.is_cuda and eager.algorithm_of(q, k, v, call._replace(exact_window=0)) == "quadratic"


def _exact_window_forward(signature: Signature, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    call = signature.call(arguments)
    _check(q, k, v, call, signature)

    def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        if call.lag > 0:  # no kernel computes such a part alone
            return eager.forward(q, k, v, call, differentiable=False)
        operator = _part(call)
        tensors, options = operator.signature.flatten(call, arguments[-1])
        return operator.forward(q, k, v, *tensors, *options)

    with without_autocast(q):
        if _takes_one_pass(q, k, v, call):
            return eager.forward(q, k, v, call, differentiable=False)
        return exact_window.forward(q, k, v, call, attend, merge_)


def _exact_window_backward(
    signature: Signature,
    statistic: str,
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    call = signature.call(arguments)
    _check(q, k, v, call, signature)
    if _takes_one_pass(q, k, v, call):
        return _backward(signature, statistic, grad_o, grad_lse, q, k, v, o, lse, *arguments)
    operator_checks.check_results(q, v, o=o, grad_o=grad_o, lse=lse, grad_lse=grad_lse)

    def differentiate(
        grad_o: Tensor, grad_z: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, z: Tensor, call: Call
    ) -> dict[str, Tensor]:
        if call.lag > 0:
            grads, of_tensors = eager.backward(grad_o, grad_z, q, k, v, o, z, call)
            return grads._asdict() | of_tensors
        operator = _part(call)
        tensors, options = operator.signature.flatten(call, arguments[-1])
        grads = operator.backward(grad_o, grad_z, q, k, v, o, z, *tensors, *options)
        return operator.signature.gradients(grads)

    with without_autocast(q):
        grads = exact_window.backward(grad_o, grad_lse, q, k, v, o, lse, call, differentiate)
    return tuple(grads[name] for name in signature.gradient_names)


def _exact_window_flops(q: Tensor, k: Tensor, v: Tensor, call: Call, backward: bool) -> int:
    """Counts attention to the local keys and to the parts of global keys."""
    total = count_attention(q, k, v, exact_window.local_call(call), backward)
    for part in exact_window.global_keys(q, k, call):
        total += count_attention(part.queries_of(q), part.keys_of(k), part.keys_of(v), part.call, backward)
    return total


def _is_causal(*arguments: Any) -> bool:
    *_, causal, _algorithm, _window, _allow_tf32 = arguments
    return causal


# Without `causal`, the parts are calls of their own, which have kernels.
_EXACT_WINDOW = _register(
    "exact_window_",
    EXACT_WINDOW,
    "lse",
    _exact_window_forward,
    _exact_window_backward,
    _exact_window_flops,
    kernel_of="q v",
    covers=_is_causal,
)
