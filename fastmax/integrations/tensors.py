"""Helpers for the tensors that both integrations receive."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax import eager
from fastmax.core import validation


def is_same(query: Tensor, key: Tensor) -> bool:
    """Returns whether both are one tensor, or views of the same elements, as hooks and checkpoints make them."""
    if query is key:
        return True
    opaque = torch.compiler.is_compiling() or eager.is_transformed() or query.is_meta or query.dtype != key.dtype
    return not opaque and query.is_set_to(key)


def queries_to_normalize(q: Tensor, takes_part: Tensor | None, normalize: object) -> Tensor:
    """Returns the queries q (b, h, n, d) of self-attention, zeros at padding where it would count for their longest row.

    Attention masks keys alone. With `normalize="sequence"` the longest query scales all others.

    Args:
        takes_part: bool (b, n), True = real; None = all are.
        normalize: the option of `fastmax_attention`.
    """
    if takes_part is None or not validation.is_over_sequence(normalize):
        return q
    return torch.where(takes_part[:, None, :, None], q, 0.0)
