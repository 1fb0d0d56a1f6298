"""`normalize_tokens` and its gradient: shortens rows of q and k to a given length."""

from __future__ import annotations

from torch import Tensor

from fastmax import eager
from fastmax.ops import checks as operator_checks
from fastmax.ops.autocast import without_autocast
from fastmax.ops.autograd import (
    Normalization,
    compute,
    refuse_second_derivative_of_normalization,
    register_gradient,
)
from fastmax.ops.registration import register


def normalize_tokens(q: Tensor, k: Tensor, lim: float) -> tuple[Tensor, Tensor]:
    """Returns 4-d, checked q and k in which each row longer than `lim` is scaled to length `lim`."""
    q, k, *_ = compute(_NORMALIZATION, (q, k), (lim,))
    return q, k


def _normalize_tokens(q: Tensor, k: Tensor, lim: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operator_checks.check_normalization(q, k, lim)
    with without_autocast(q):
        return eager.normalize_tokens(q, k, lim)


def _normalize_tokens_backward(
    grad_q: Tensor | None, grad_k: Tensor | None, q: Tensor, k: Tensor, q_factor: Tensor, k_factor: Tensor, lim: float
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of q and k, given the results of the forward; no elements where grad_q or grad_k is None."""
    operator_checks.check_normalization(q, k, lim)
    operator_checks.check_normalized("q", q, grad_q, q_factor)
    operator_checks.check_normalized("k", k, grad_k, k_factor)
    with without_autocast(q):
        return eager.normalize_tokens_backward(grad_q, grad_k, q, k, q_factor, k_factor, lim)


def _fake_normalize_tokens(q: Tensor, k: Tensor, lim: float) -> tuple[Tensor, ...]:
    return *(eager.empty_like_layout(x, x.shape[-1]) for x in (q, k)), *map(eager.empty_factors, (q, k))


def _fake_normalize_tokens_backward(
    grad_q: Tensor | None, grad_k: Tensor | None, q: Tensor, k: Tensor, q_factor: Tensor, k_factor: Tensor, lim: float
) -> tuple[Tensor, ...]:
    given = ((grad_q, q), (grad_k, k))
    return tuple([x.new_empty(0) if grad is None else eager.empty_like_layout(x, x.shape[-1]) for grad, x in given])


_MAX_ROWS = 2**30 - 1  # of one tensor
_MAX_LIM = 2.0**60  # its reciprocal is the smallest limit


def covers_normalization(q: Tensor, k: Tensor, lim: float) -> bool:
    """Returns whether kernels scale rows of these sizes."""
    return max(q.numel(), k.numel()) <= _MAX_ROWS * q.shape[3] and 1 / _MAX_LIM <= lim <= _MAX_LIM


def _covers_backward(
    grad_q: Tensor | None, grad_k: Tensor | None, q: Tensor, k: Tensor, q_factor: Tensor, k_factor: Tensor, lim: float
) -> bool:
    return covers_normalization(q, k, lim)


_NORMALIZATION = Normalization(
    register(
        "normalize_tokens(Tensor q, Tensor k, float lim) "
        "-> (Tensor normalized_q, Tensor normalized_k, Tensor q_factor, Tensor k_factor)",
        _normalize_tokens,
        _fake_normalize_tokens,
        kernel_of="q",
        covers=covers_normalization,
    ),
    register(
        "normalize_tokens_backward(Tensor? grad_q, Tensor? grad_k, Tensor q, Tensor k, Tensor q_factor, "
        "Tensor k_factor, float lim) -> (Tensor of_q, Tensor of_k)",
        _normalize_tokens_backward,
        _fake_normalize_tokens_backward,
        kernel_of="q",
        covers=_covers_backward,
    ),
)
register_gradient(_NORMALIZATION, refuse_second_derivative_of_normalization)
