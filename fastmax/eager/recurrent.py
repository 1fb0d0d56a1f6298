"""One recurrent step: a token is added to the state, and its queries are computed from the state.

    kv_state <- decay kv_state + phi(k) v^T      o = phi(q)^T C kv_state / z
    k_sum    <- decay k_sum    + phi(k)          z = phi(q)^T C k_sum

phi(x) are the distinct features 1, x_a and x_a x_b (a <= b), and the diagonal matrix C holds their coefficients in f.
"""

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
    log_input_gate: Tensor | None,
    score: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output (b, h, 1, dv) in q's dtype, and the new kv_state and k_sum, contiguous.

    Args:
        q, k, v: (b, h, 1, d), (b, hk, 1, d) and (b, hk, 1, dv).
        kv_state, k_sum: (b, hk, features, dv) and (b, hk, features), as in `DecodeState`.
        mask: bool (b, 1), True = the token is added to the state.
        log_decay: (b, hk, 1); the state decays before the token is added, for masked tokens too.
        log_input_gate: (b, hk, 1), in its range; the token is added times exp of it.
    """
    key, v = _features(k, v, mask, log_input_gate, kv_state.dtype, score)
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
    log_input_gate: Tensor | None,
    score: Score,
) -> Tensor:
    """Returns the output of `decode_step`, and overwrites kv_state and k_sum by the new ones."""
    key, v = _features(k, v, mask, log_input_gate, kv_state.dtype, score)
    if log_decay is not None:
        factor = _factor_of_state(log_decay, k_sum)
        may_be_zero = not is_at_hand(factor) or bool((factor == 0).any())
        for x, y in ((factor, k_sum), (factor.unsqueeze(-1), kv_state)):
            y.mul_(x)
            if may_be_zero:  # elements that are not finite become 0 too
                y.masked_fill_(x == 0, 0.0)
    kv_state.addcmul_(key.unsqueeze(-1), v)
    k_sum.add_(key)
    return _read(q, kv_state, k_sum, score)


def _factor_of_state(log_decay: Tensor, k_sum: Tensor) -> Tensor:
    """Returns the decay factor of the state, (b, hk, 1).

    It is NaN for a decay of NaN if the state holds a key. A state of NaN stays NaN until a decay of -inf.
    """
    keys = k_sum[..., :1]  # the decayed count of the keys: the feature 1
    factor = not_above_zero(log_decay).exp()
    factor = torch.where(keys.isnan() & (log_decay > -torch.inf), torch.nan, factor)
    return torch.where(log_decay.isnan() & (keys == 0), 1.0, factor)


def _features(
    k: Tensor, v: Tensor, mask: Tensor | None, log_input_gate: Tensor | None, dtype: torch.dtype, score: Score
) -> tuple[Tensor, Tensor]:
    """Returns the features of k times the gate (b, hk, features), and v, in a dtype. Both are 0 for masked tokens, even if not
    finite."""
    if mask is not None:
        k, v = (torch.where(mask[:, None, :, None], x, 0) for x in (k, v))
    key = distinct_features(k.squeeze(2).to(dtype), score.order)
    factor = None if log_input_gate is None else log_input_gate.exp()
    if mask is not None:
        factor = mask.unsqueeze(-1) if factor is None else torch.where(mask.unsqueeze(-1), factor, 0.0)
    return key if factor is None else key * factor, v.to(dtype)


def sums_of_weights(q: Tensor, k_sum: Tensor, score: Score) -> Tensor:
    """Returns the denominators (b, h, 1) of a token's queries; k_sum is that of the state after the token."""
    return (query_features(q, k_sum, score) @ k_sum.unsqueeze(-1)).flatten(1, 2)


def softmax_step(q: Tensor, keys: Tensor, values: Tensor, log_factor: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns softmax attention of one token to a few keys: the output (b, h, 1, dv) and the log-sum-exp (b, h, 1).

    For few keys this is faster than tiles.

    Args:
        q: (b, h, 1, d).
        keys, values: (b, hk, m, d) and (b, hk, m, dv).
        log_factor: (b, hk, m), in the dtype to compute in. exp of it multiplies the weight of a key; -inf: it is hidden.
    """
    wide = log_factor.dtype
    query = (scale * q.squeeze(2).to(wide)).unflatten(1, (keys.shape[1], -1))  # (b, hk, group, d)
    o, lse = softmax_of(query @ keys.to(wide).mT + log_factor.unsqueeze(2), values.to(wide))
    return o.flatten(1, 2).unsqueeze(2).to(q.dtype), lse.flatten(1, 2).unsqueeze(2)


def decay_to_last(decays: Tensor) -> Tensor:
    """Returns the logarithm of each token's decay factor at the last token: the sum of the decays of all later tokens.

    It is -inf if one of these decays is -inf, else NaN if one of them is NaN. `decays` is log_decay (b, hk, m).
    """

    def sums(x: Tensor) -> Tensor:
        return F.pad(x[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)

    if not may_hold_nan(decays):
        return sums(decays.double()).to(decays.dtype)
    is_nan = decays.isnan()
    left = sums(torch.where(is_nan, 0.0, decays.double()))
    return torch.where((sums(is_nan.long()) > 0) & (left > -torch.inf), torch.nan, left).to(decays.dtype)


def softmax_of(s: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output (..., rows, dv) and log-sum-exp (..., rows) of scores s (..., rows, m), -inf for hidden keys."""
    largest = s.detach().amax(-1, keepdim=True)
    base = torch.where(largest == -torch.inf, 0.0, largest)
    w = (s - base).exp()
    z = w.sum(-1, keepdim=True)
    return (w @ values) * reciprocal(z), (base + log_of_sums(z)).squeeze(-1)


def _read(q: Tensor, kv_state: Tensor, k_sum: Tensor, score: Score) -> Tensor:
    """Returns the output of the queries from the state."""
    query = query_features(q, k_sum, score)
    o = quotient(query @ kv_state, query @ k_sum.unsqueeze(-1))
    return o.flatten(1, 2).unsqueeze(2).to(q.dtype)


def query_features(q: Tensor, k_sum: Tensor, score: Score) -> Tensor:
    """Returns the features of q (b, h, 1, d) times their coefficients in f, (b, hk, group, features)."""
    query = distinct_features(score.scale * q.squeeze(2).to(k_sum.dtype), score.order)
    query = query * coefficients(q.shape[-1], score, query)
    return query.unflatten(1, (k_sum.shape[1], -1))


def distinct_features(x: Tensor, order: int) -> Tensor:
    """Returns the distinct features of x (..., d): 1, x_a and, for order 2, x_a x_b with a <= b, (..., features)."""
    parts = [torch.ones_like(x[..., :1]), x]
    if order == 2:
        a, b = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
        parts.append(x[..., a] * x[..., b])
    return torch.cat(parts, dim=-1)


def coefficients(d: int, score: Score, like: Tensor) -> Tensor:
    """Returns the coefficients in f of the distinct features, (features,).

    A product of two different columns stands for two equal terms, so its coefficient is 2 a2.
    """
    parts = [like.new_full((1,), score.a0), like.new_full((d,), score.a1)]
    if score.order == 2:
        a, b = torch.triu_indices(d, d, device=like.device)
        square = like.new_full((), score.a2)  # filled on the device: CUDA graphs cannot capture a copy from the host
        parts.append(torch.where(a == b, square, 2.0 * score.a2))
    return torch.cat(parts)
