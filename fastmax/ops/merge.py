"""`merge_attention` merges attention over parts of the keys, given the log of the sums of weights of each part.

`merge_` merges global keys of an exact window into local ones, in place.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastmax import eager
from fastmax.core import validation
from fastmax.ops import checks as operator_checks
from fastmax.ops.autocast import without_autocast
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
    return eager.merged(outputs, lses)


def _merge_(o, lse, o_global, z_global):
    operator_checks.check_merge(o, lse, o_global, z_global)
    with without_autocast(o):
        eager.merge_(o, lse, o_global, z_global)


def _fake_merge_(o, lse, o_global, z_global):
    pass


def _has_dense_rows(o, *arguments) -> bool:
    return o.stride(3) == 1 or o.shape[3] == 1


merge_ = register(
    "merge_(Tensor(a!) o, Tensor(b!) lse, Tensor o_global, Tensor z_global) -> ()",
    _merge_,
    _fake_merge_,
    kernel_of="o",
    covers=_has_dense_rows,
)
refuse_gradient(merge_, refuse_to_differentiate("merge_", "fastmax.merge_attention"), written=slice(2))
