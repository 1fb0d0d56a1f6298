"""`merge_attention` merges attention over parts of the keys, given the log of the sums of weights of each part.

The operator `merge_parts` merges two parts. `merge_` merges global keys of an exact window into local ones, in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastmax import eager
from fastmax.core import validation
from fastmax.ops import checks as operator_checks
from fastmax.ops.autocast import without_autocast
from fastmax.ops.autograd import Recomputed, compute, refuse_second_derivative, register_gradient
from fastmax.ops.registration import refuse_gradient, refuse_to_differentiate, register


def merge_attention(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns attention over all keys, given attention over parts of them, each with its own denominator.

        lse = log sum_p exp(lse_p)          o = sum_p exp(lse_p - lse) o_p

    Args:
        outputs: results of `fastmax_attention` or `flash_attention`, (b, h, n, dv) or 3-d (b * h, n, dv), all of the same
            shape and dtype.
        lses: the second results of these calls with `return_lse=True`, (b, h, n) or (b * h, n), float32 (float64 for float64
            outputs); -inf where a query sees no key of the part.

    Returns:
        o and lse, of the shape and dtype of one output and one lse, in new memory. They are 0 and -inf where a query sees no
        key of any part. Differentiable any number of times.

    Raises:
        TypeError, ValueError: naming the argument.

    Compute the parts without `dropout` and apply its noise to the merged output. Method: the online normaliser merges blocks
    in this way (Milakov and Gimelshein, 2018, arXiv:1805.02867).
    """
    outputs, lses = validation.check_parts(outputs, lses)
    if len(outputs) == 1:
        return outputs[0].clone(), lses[0].clone()
    # Subclasses keep what they have in PyTorch operations, as DTensors their shards of any dimension.
    plain = all([type(x) is Tensor for x in (*outputs, *lses)])
    if not plain or len(outputs) > 2 or outputs[0].dim() != 4 or eager.is_transformed():
        return eager.merged(outputs, lses)
    return compute(_MERGE_PARTS, (outputs[0], lses[0], outputs[1], lses[1]), ())


def _merge_parts(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> tuple[Tensor, Tensor]:
    operator_checks.check_parts(first, first_lse, second, second_lse)
    with without_autocast(first):
        o, lse = eager.merged((first, second), (first_lse, second_lse))
        return eager.in_layout_of(first, o), lse.contiguous()


def _fake_merge_parts(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> tuple[Tensor, Tensor]:
    return eager.empty_like_layout(first, first.shape[3]), first_lse.new_empty(first_lse.shape)


def _merge_parts_backward(
    grad_o: Tensor | None, grad_lse: Tensor | None, first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operator_checks.check_parts(first, first_lse, second, second_lse)
    with without_autocast(first):
        outputs, lses = eager.merged_backward(grad_o, grad_lse, (first, second), (first_lse, second_lse))
        of_first, of_second = (eager.in_layout_of(x, grad) for x, grad in zip((first, second), outputs, strict=True))
        return of_first, lses[0].contiguous(), of_second, lses[1].contiguous()


def _fake_merge_parts_backward(
    grad_o: Tensor | None, grad_lse: Tensor | None, *parts: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_first, of_first_lse = _fake_merge_parts(*parts)
    return of_first, of_first_lse, *_fake_merge_parts(*parts[2:], *parts[:2])


class _MergeParts(Recomputed):
    """`merge_parts` and its gradient, which has derivatives of any order."""

    def gradients(self, saved: tuple, options: tuple, needed: tuple, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        is_differentiated = torch.is_grad_enabled() or eager.is_transformed()
        if not is_differentiated or all(grad is None for grad in grads):
            return super().gradients(saved, options, needed, *grads)
        (grad_o, grad_lse), (first, first_lse, second, second_lse) = grads, saved
        outputs, lses = eager.merged_backward(grad_o, grad_lse, (first, second), (first_lse, second_lse))
        return outputs[0], lses[0], outputs[1], lses[1]


_PARTS = "Tensor first, Tensor first_lse, Tensor second, Tensor second_lse"
_MERGE_PARTS = _MergeParts(
    register(f"merge_parts({_PARTS}) -> (Tensor o, Tensor lse)", _merge_parts, _fake_merge_parts, kernel_of="first second"),
    register(
        f"merge_parts_backward(Tensor? grad_o, Tensor? grad_lse, {_PARTS}) "
        "-> (Tensor grad_first, Tensor grad_first_lse, Tensor grad_second, Tensor grad_second_lse)",
        _merge_parts_backward,
        _fake_merge_parts_backward,
        kernel_of="first second",
    ),
    tensors=4,
    differentiable=4,
)
register_gradient(_MERGE_PARTS, refuse_second_derivative)


def _merge_(o: Tensor, lse: Tensor, o_global: Tensor, z_global: Tensor) -> None:
    operator_checks.check_merge(o, lse, o_global, z_global)
    with without_autocast(o):
        eager.merge_(o, lse, o_global, z_global)


def _fake_merge_(o: Tensor, lse: Tensor, o_global: Tensor, z_global: Tensor) -> None:
    pass


def _has_dense_rows(o: Tensor, *arguments: Tensor) -> bool:
    return o.stride(3) == 1 or o.shape[3] == 1


merge_ = register(
    "merge_(Tensor(a!) o, Tensor(b!) lse, Tensor o_global, Tensor z_global) -> ()",
    _merge_,
    _fake_merge_,
    kernel_of="o",
    covers=_has_dense_rows,
)
refuse_gradient(merge_, refuse_to_differentiate("merge_", "fastmax.merge_attention"), written=slice(2))
