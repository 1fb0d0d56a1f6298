"""Prepares q, k and v for attention: autocast, normalisation, channels for sinusoidal positions, and dropout noise."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastmax import ops
from fastmax.prepare.normalization import normalize_queries_and_keys
from fastmax.prepare.positional import append_sinusoidal_key, append_sinusoidal_query


class Positions(NamedTuple):
    """Positions of queries and of keys, float64: (tokens,), or (b, 1, tokens) where each batch entry has its own."""

    queries: Tensor
    keys: Tensor


def cast_for_autocast(*tensors: object, dtype: torch.dtype | None = None) -> tuple:
    """Returns the arguments. Under autocast floating-point tensors are cast to `dtype`; None: autocast's dtype."""
    first = tensors[0]
    if not isinstance(first, Tensor) or dtype == torch.float64 or not ops.in_autocast(first):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type) if dtype is None else dtype
    return tuple(ops.autocast_to(x, dtype) for x in tensors)


def prepare_queries_and_keys(
    q: Tensor,
    k: Tensor,
    normalize: str | None,
    lim: float,
    positions: Positions | None,
    use_custom_gradient: bool = True,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns q and k, normalised unless `normalize` is None, with channels for sinusoidal positions unless `positions` is
    None."""
    if normalize is not None:
        q, k = normalize_queries_and_keys(q, k, normalize, lim, use_custom_gradient, attention_mask, cu_seqlens)
    if positions is not None:
        q, k = append_sinusoidal_query(q, positions.queries), append_sinusoidal_key(k, positions.keys)
    return q, k


def dropout_noise(drop_noise: Tensor | None, dropout: float, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """Returns noise for an output of this shape, in the dtype of `like`; None without dropout.

    It is `drop_noise`, or drawn if that is None. It gets no gradient.
    """
    if dropout == 0.0:
        return None
    if drop_noise is None:
        return torch.randn(shape, dtype=like.dtype, device=like.device)
    return drop_noise.to(like.dtype).detach()
