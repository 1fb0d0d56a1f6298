"""One recurrent step: a token joins the state of sums over distinct features, and its queries read it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastmax.core.score import Score, log_of_sums, quotient, reciprocal
from fastmax.eager.decay import is_at_hand, may_hold_nan, not_above_zero


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_state: Tensor,
    k_sum: Tensor,
    mask: Tensor | None,
    log_decay: Tensor | None,
    score: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (b, h, 1, dv) in q's dtype, and the new kv_state (b, hk, features, dv) and k_sum (b, hk, features), contiguous.

    q (b, h, 1, d), k (b, hk, 1, d), v (b, hk, 1, dv); features as in `DecodeState`; mask bool (b, 1); log_decay
    (b, hk, 1), by which the state fades before the token joins, whether or not it does.
    """
    key, v = _joining(k, v, mask, kv_state.dtype, score)
    if log_decay is not None:
        factor = _factor_of_state(log_decay, k_sum)
        k_sum, kv_state = (torch.where(x == 0, 0.0, x * y) for x, y in ((factor, k_sum), (factor.unsqueeze(-1), kv_state)))
    kv_state = torch.addcmul(kv_state.contiguous(), key.unsqueeze(-1), v)
    k_sum = k_sum.contiguous() + key
    return _read(q, kv_state, k_sum, score), kv_state, k_sum


def decode_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_state: Tensor,
    k_sum: Tensor,
    mask: Tensor | None,
    log_decay: Tensor | None,
    score: Score,
) -> Tensor:
    """The output of `decode_step`; the new kv_state and k_sum take the place of the old ones."""
    key, v = _joining(k, v, mask, kv_state.dtype, score)
    if log_decay is not None:
        factor = _factor_of_state(log_decay, k_sum)
        vanishes = not is_at_hand(factor) or bool((factor == 0).any())
        for x, y in ((factor, k_sum), (factor.unsqueeze(-1), kv_state)):
            y.mul_(x)
            if vanishes:  # a pass over the state, for what is not finite in it
                y.masked_fill_(x == 0, 0.0)
    kv_state.addcmul_(key.unsqueeze(-1), v)
    k_sum.add_(key)
    return _read(q, kv_state, k_sum, score)


def _factor_of_state(log_decay: Tensor, k_sum: Tensor) -> Tensor:
    """(b, hk, 1), of the state before the token: NaN for a decay of NaN, unless there is no key in the state. A state of NaN
    stays NaN until a decay of -inf."""
    keys = k_sum[..., :1]  # a count of them, which decays
    factor = not_above_zero(log_decay).exp()
    factor = torch.where(keys.isnan() & (log_decay > -torch.inf), torch.nan, factor)
    return torch.where(log_decay.isnan() & (keys == 0), 1.0, factor)


def _joining(k: Tensor, v: Tensor, mask: Tensor | None, dtype: torch.dtype, score: Score) -> tuple[Tensor, Tensor]:
    """Features (b, hk, features) of k (b, hk, 1, d), and v, in a dtype; 0 where the token does not join, whatever it holds."""
    if mask is not None:
        k, v = (torch.where(mask[:, None, :, None], x, 0) for x in (k, v))
    key = distinct_features(k.squeeze(2).to(dtype), score.order)
    return key if mask is None else key * mask.unsqueeze(-1), v.to(dtype)


def sums_of_weights(q: Tensor, k_sum: Tensor, score: Score) -> Tensor:
    """(b, h, 1): what the output of a token's queries was divided by; `k_sum` of the state after it."""
    return (query_features(q, k_sum, score) @ k_sum.unsqueeze(-1)).flatten(1, 2)


def softmax_step(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, decays: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output (b, h, 1, dv) and log of the sums of weights (b, h, 1) of queries (b, h, 1, d) that stand at the last of a few
    keys (b, hk, m, d); mask bool (b, m), decays (b, hk, m), logarithms, -inf too. For few keys that costs less than tiles."""
    wide = decays.dtype
    fading = torch.where(mask.unsqueeze(1), decay_to_last(decays), -torch.inf)
    query = (scale * q.squeeze(2).to(wide)).unflatten(1, (keys.shape[1], -1))  # (b, hk, group, d)
    o, lse = softmax_of(query @ keys.to(wide).mT + fading.unsqueeze(2), values.to(wide))
    return o.flatten(1, 2).unsqueeze(2).to(q.dtype), lse.flatten(1, 2).unsqueeze(2)


def decay_to_last(decays: Tensor) -> Tensor:
    """The logarithm of what is left of each token (b, hk, m) at the last one, of the decays that each of them brings; -inf of
    one that is forgotten, even behind a NaN."""

    def sums(x: Tensor) -> Tensor:
        return F.pad(x[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)

    if not may_hold_nan(decays):
        return sums(decays.double()).to(decays.dtype)
    is_nan = decays.isnan()
    left = sums(torch.where(is_nan, 0.0, decays.double()))
    return torch.where((sums(is_nan.long()) > 0) & (left > -torch.inf), torch.nan, left).to(decays.dtype)


def softmax_of(s: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Output (..., rows, dv) and log of the sums of weights (..., rows) of scores (..., rows, m), -inf for unseen keys."""
    largest = s.detach().amax(-1, keepdim=True)
    base = torch.where(largest == -torch.inf, 0.0, largest)
    w = (s - base).exp()
    z = w.sum(-1, keepdim=True)
    return (w @ values) * reciprocal(z), (base + log_of_sums(z)).squeeze(-1)


def _read(q: Tensor, kv_state: Tensor, k_sum: Tensor, score: Score) -> Tensor:
    query = query_features(q, k_sum, score)
    o = quotient(query @ kv_state, query @ k_sum.unsqueeze(-1))
    return o.flatten(1, 2).unsqueeze(2).to(q.dtype)


def query_features(q: Tensor, k_sum: Tensor, score: Score) -> Tensor:
    """(b, h, 1, d) -> (b, hk, group, features), with what f makes of each."""
    query = distinct_features(score.scale * q.squeeze(2).to(k_sum.dtype), score.order)
    query = query * coefficients(q.shape[-1], score, query)
    return query.unflatten(1, (k_sum.shape[1], -1))


def distinct_features(x: Tensor, order: int) -> Tensor:
    """(..., d) -> (..., features): 1, x_a and, for order 2, x_a x_b for a <= b."""
    parts = [torch.ones_like(x[..., :1]), x]
    if order == 2:
        a, b = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
        parts.append(x[..., a] * x[..., b])
    return torch.cat(parts, dim=-1)


def coefficients(d: int, score: Score, like: Tensor) -> Tensor:
    """(features,): what f makes of each feature of a query; the product of two different columns stands for two equal terms."""
    parts = [like.new_full((1,), score.a0), like.new_full((d,), score.a1)]
    if score.order == 2:
        a, b = torch.triu_indices(d, d, device=like.device)
        square = like.new_full((), score.a2)  # filled on the device: a copy to it would not do in a CUDA graph
        parts.append(torch.where(a == b, square, 2.0 * score.a2))
    return torch.cat(parts)
