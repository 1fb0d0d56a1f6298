"""`normalized_forward` and its gradient: causal attention of order 1 whose kernels shorten rows of q and k themselves, as
`normalize_tokens` does before attention.

The kernels read q and k as they are. They neither write nor read shortened copies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmax import eager
from fastmax.core.call import Call
from fastmax.core.score import Score
from fastmax.ops import checks as operator_checks
from fastmax.ops import extension
from fastmax.ops.autocast import without_autocast
from fastmax.ops.autograd import Context, compute, refuse_second_derivative, register_gradient
from fastmax.ops.flops import count_attention
from fastmax.ops.normalization import covers_normalization
from fastmax.ops.registration import Operator, register


def normalized_attention(q: Tensor, k: Tensor, v: Tensor, call: Call, lim: float) -> tuple[Tensor, Tensor]:
    """Returns the output and the denominators of a call for which `normalizes_during_attention` is true."""
    o, z, _ = compute(_NORMALIZED, (q, k, v), (lim, call.score.scale, call.score.a0, call.score.a1))
    return o, z


def normalizes_during_attention(q: Tensor, k: Tensor, v: Tensor, call: Call, lim: float) -> bool:
    """Returns whether `normalized_attention` computes a call on kernels, by the algorithm that the call asks for."""
    if torch.compiler.is_compiling() or not q.is_cuda or call.score.order != 1 or call.algorithm == "quadratic":
        return False
    if call != Call(call.score, causal=True, algorithm=call.algorithm):  # other options
        return False
    if torch.jit.is_tracing() or eager.is_transformed() or not extension.kernels_run_on(q):
        return False
    if any(type(x) not in (Tensor, torch.nn.Parameter) or x.dim() != 4 for x in (q, k, v)):
        return False
    return covers_normalization(q, k, lim) and extension.shortens_rows(q, k, v) >= (2 if call.algorithm == "auto" else 1)


def _call(scale: float, a0: float, a1: float) -> Call:
    return Call(Score(scale, a0, a1, 0.0, 1), causal=True, algorithm="linear")


def _check(q: Tensor, k: Tensor, v: Tensor, lim: float, *score: float) -> None:
    operator_checks.check_call(q, k, v, _call(*score))
    operator_checks.check_normalization(q, k, lim)


def _normalized_forward(q: Tensor, k: Tensor, v: Tensor, lim: float, *score: float) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, lim, *score)
    with without_autocast(q):
        q, k, _, k_factor = eager.normalize_tokens(q, k, lim)
        return *eager.forward(q, k, v, _call(*score), differentiable=False), k_factor.contiguous()


def _normalized_backward(
    grad_o: Tensor,
    grad_z: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    z: Tensor,
    k_factor: Tensor,
    lim: float,
    *score: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, lim, *score)
    operator_checks.check_results(q, v, o=o, grad_o=grad_o, z=z, grad_z=grad_z)
    operator_checks.check_normalized("k", k, None, k_factor)
    with without_autocast(q):
        q, k, q_factor, _ = eager.normalize_tokens(q, k, lim)
        grads, _ = eager.backward(grad_o, grad_z, q, k, v, o, z, _call(*score))
        return *eager.normalize_tokens_backward(grads.q, grads.k, q, k, q_factor, k_factor, lim), grads.v


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *options: float) -> tuple[Tensor, ...]:
    numbers = (x.new_empty(x.shape[:3], dtype=eager.compute_dtype(x.dtype)) for x in (q, k))
    return eager.empty_like_layout(q, v.shape[-1]), *numbers


def _fake_backward(grad_o: Tensor, grad_z: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple([eager.empty_like_layout(x, x.shape[-1]) for x in (q, k, v)])


def _forward_flops(q: Tensor, k: Tensor, v: Tensor, lim: float, *score: float, out_val: object = None) -> int:
    return count_attention(q, k, v, _call(*score), backward=False)


def _backward_flops(
    grad_o: Tensor,
    grad_z: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    z: Tensor,
    k_factor: Tensor,
    lim: float,
    *score: float,
    out_val: object = None,
) -> int:
    return count_attention(q, k, v, _call(*score), backward=True)


def _covers(q: Tensor, k: Tensor, v: Tensor, lim: float, *score: float) -> bool:
    return covers_normalization(q, k, lim) and extension.shortens_rows(q, k, v) > 0


def _covers_backward(
    grad_o: Tensor,
    grad_z: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    z: Tensor,
    k_factor: Tensor,
    lim: float,
    *score: float,
) -> bool:
    return _covers(q, k, v, lim)


class NormalizedAttention(NamedTuple):
    """`normalized_forward` and its gradient."""

    forward: Operator
    backward: Operator

    def save(self, ctx: Context, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:3], *output)
        ctx.options = inputs[3:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])

    def gradients(
        self, saved: tuple, options: tuple, needed: tuple, grad_o: Tensor | None, grad_z: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_o is None and grad_z is None:
            return None, None, None
        grad_o = saved[3].new_zeros(saved[3].shape) if grad_o is None else grad_o
        return self.backward(grad_o, grad_z, *saved, *options)


_NORMALIZED = NormalizedAttention(
    register(
        "normalized_forward(Tensor q, Tensor k, Tensor v, float lim, float scale, float a0, float a1) "
        "-> (Tensor o, Tensor z, Tensor k_factor)",
        _normalized_forward,
        _fake_forward,
        kernel_of="q v",
        covers=_covers,
        flops=_forward_flops,
    ),
    register(
        "normalized_backward(Tensor grad_o, Tensor? grad_z, Tensor q, Tensor k, Tensor v, Tensor o, Tensor z, Tensor k_factor, "
        "float lim, float scale, float a0, float a1) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
        _normalized_backward,
        _fake_backward,
        kernel_of="q v",
        covers=_covers_backward,
        flops=_backward_flops,
    ),
)
register_gradient(_NORMALIZED, refuse_second_derivative)
