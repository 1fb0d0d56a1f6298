"""A recurrent step that buffers tokens and adds them to the state in blocks of `flush_interval`.

The `local_` tensors hold the tokens that are not in the sums: the last W = exact_window tokens, and up to T = flush_interval
buffered ones before them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastmax.core.score import Score, log_of_sums, reciprocal
from fastmax.eager.decay import is_at_hand, not_above_zero, sum_of_decays
from fastmax.eager.merge import merge_
from fastmax.eager.recurrent import decay_to_last, distinct_features, query_features, softmax_of


def buffered_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_state: Tensor,
    k_sum: Tensor,
    local_keys: Tensor,
    local_values: Tensor,
    local_mask: Tensor,
    local_decays: Tensor,
    buffered: Tensor,
    local_gates: Tensor | None,
    mask: Tensor | None,
    log_decay: Tensor | None,
    log_input_gate: Tensor | None,
    exact_window: int,
    score: Score,
) -> tuple[Tensor, Tensor]:
    """Returns the output of a step, (b, h, 1, dv) in q's dtype, and overwrites the tensors of the state.

    The second result is the log of the sum of weights, (b, h, 1) in the dtype of the sums, and -inf for a sum of 0.
    q, k, v, mask, log_decay and log_input_gate are those of `decode_step`; the tensors of the state are those of `DecodeState`.
    If T tokens are buffered already, the oldest T tokens are added to the sums first.
    """
    b, heads = k.shape[:2]
    local = _Local(local_keys, local_values, local_mask, local_decays, local_gates)
    full = buffered >= local_keys.shape[2] - exact_window
    if not is_at_hand(full) or bool(full.any()):
        _flush_(full, kv_state, k_sum, local, exact_window, score)
        buffered.masked_fill_(full, 0)
    at = buffered.long() + exact_window  # index of the token among the local ones, (b, hk)
    decay = local_decays.new_zeros(b, heads, 1) if log_decay is None else not_above_zero(log_decay)
    is_visible = local_mask.new_ones(b, 1) if mask is None else mask
    gate = torch.zeros_like(decay) if log_input_gate is None else log_input_gate
    for x, new in zip(local, (k, v, is_visible.unsqueeze(1).expand(-1, heads, -1), decay, gate), strict=True):
        if x is None:
            continue
        place = at.view(b, heads, *(1,) * (x.dim() - 2)).expand_as(new)
        x.scatter_(2, place, new)
    buffered.add_(1)
    return _read(q, kv_state, k_sum, local, at, exact_window, score)


class _Local(NamedTuple):
    """The `local_` tensors of a state."""

    keys: Tensor
    values: Tensor
    mask: Tensor
    decays: Tensor
    gates: Tensor | None

    def with_gates(self, factors: Tensor) -> Tensor:
        """Returns factors (b, hk, places) of the tokens, or of the first ones, times exp of their gates; 0 stays 0."""
        if self.gates is None:
            return factors
        return torch.where(factors == 0, 0.0, factors * self.gates[:, :, : factors.shape[2]].exp())


def _flush_(full: Tensor, kv_state: Tensor, k_sum: Tensor, local: _Local, exact_window: int, score: Score) -> None:
    """Adds the oldest T tokens to the sums and moves the last W tokens to the front, in the heads with `full` (b, hk)."""
    count = local.keys.shape[2] - exact_window
    keys, tokens, mask, decays = (x[:, :, :count] for x in local[:4])
    factors = torch.where(mask, local.with_gates(decay_to_last(decays).exp()), 0.0)
    is_visible = (factors != 0).unsqueeze(-1)
    features = distinct_features(torch.where(is_visible, keys, 0).to(kv_state.dtype), score.order) * factors.unsqueeze(-1)
    tokens = torch.where(is_visible, tokens, 0).to(kv_state.dtype)
    factor = _factor_of_sums(decays, k_sum)
    new_k_sum = _decayed(k_sum, factor) + features.sum(2)
    new_kv_state = _decayed(kv_state, factor.unsqueeze(-1))
    for t in range(count):  # a matrix product might round to TF32
        new_kv_state.addcmul_(features[:, :, t].unsqueeze(-1), tokens[:, :, t].unsqueeze(-2))
    moved = ((x[:, :, :exact_window], x[:, :, count:]) for x in local if x is not None)
    for x, new in ((kv_state, new_kv_state), (k_sum, new_k_sum), *moved):
        x.copy_(torch.where(full.view(*full.shape, *(1,) * (x.dim() - 2)), new, x))


def _read(
    q: Tensor, kv_state: Tensor, k_sum: Tensor, local: _Local, at: Tensor, exact_window: int, score: Score
) -> tuple[Tensor, Tensor]:
    """Returns the output of the token at index `at` (b, hk) of the local tokens, and the log of its sum of weights."""
    keys, tokens, mask, decays, _ = local
    place, at = torch.arange(keys.shape[2], device=q.device), at.unsqueeze(-1)
    decays = torch.where(place <= at, decays, 0.0)
    log_factors, sums_factor = decay_to_last(decays), _factor_of_sums(decays, k_sum)
    is_visible = mask & (place <= at)
    keys, tokens = (torch.where(is_visible.unsqueeze(-1), x, 0).to(kv_state.dtype) for x in (keys, tokens))
    s = (score.scale * q.squeeze(2).to(kv_state.dtype)).unflatten(1, (keys.shape[1], -1)) @ keys.mT  # (b, hk, group, places)

    is_global = is_visible & (place <= at - exact_window)
    polynomial = score.a0 + s * (score.a1 + (score.a2 if score.order == 2 else 0.0) * s)
    factors = local.with_gates(log_factors.exp())
    weights = torch.where(is_global.unsqueeze(2), polynomial * factors.unsqueeze(2), 0.0)
    query, sums_factor = query_features(q, k_sum, score), sums_factor.unsqueeze(-1)
    z = weights.sum(-1, keepdim=True) + _decayed(query @ k_sum.unsqueeze(-1), sums_factor)
    o = (weights @ tokens + _decayed(query @ kv_state, sums_factor)) * reciprocal(z)
    o, z = o.flatten(1, 2).unsqueeze(2), z.flatten(1, 2)
    if exact_window == 0:
        lse = log_of_sums(z)
    else:
        is_local = is_visible & (place > at - exact_window)
        o_local, lse = softmax_of(torch.where(is_local.unsqueeze(2), s + log_factors.unsqueeze(2), -torch.inf), tokens)
        o_global, o, lse = o, o_local.flatten(1, 2).unsqueeze(2), lse.flatten(1, 2).unsqueeze(2)
        merge_(o, lse, o_global, z)
    return o.to(q.dtype), lse


def _factor_of_sums(decays: Tensor, k_sum: Tensor) -> Tensor:
    """Returns the decay factor of the sums at the last of the tokens, (b, hk, 1).

    It is NaN if a decay is NaN and the sums hold a key. Sums of NaN stay NaN until a decay of -inf.
    """
    total, keys = sum_of_decays(decays), k_sum[..., :1]
    total = torch.where(keys.isnan() & (total > -torch.inf), torch.nan, total)
    return torch.where(total.isnan() & (keys == 0), 0.0, total).exp().to(k_sum.dtype)


def _decayed(x: Tensor, factor: Tensor) -> Tensor:
    """Returns x times the factor; 0 where the factor is 0, even if x is not finite."""
    return torch.where(factor == 0, 0.0, x * factor)
