"""The definition of attention, as simple as possible: the whole (n, m) matrix, in any dtype. For tests and for readers."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    drop_noise: Tensor | None = None,
    rpe_matrix: Tensor | str | None = None,
    dropout: float = 0.0,
    normalize: bool | str = False,
    temperature: float = 1.0,
    a0: float = 1.0,
    a1: float = 1.0,
    a2: float = 0.5,
    lim: float = 1.0,
    p: int = 2,
    attention_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    exact_window: int = 0,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
    log_input_gate: Tensor | None = None,
    hold_denominator: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes Fastmax attention by its definition, in O(n m) time and memory.

    Args:
        q: (b, h, n, d), or 3-d (b * h, n, d).
        k: (b, hk, m, d).
        v: (b, hk, m, dv).
        hold_denominator: whether the sums of weights are constants to autograd. This changes the gradients only.

    The other arguments are those of `fastmax.fastmax_attention`.

    Returns:
        o (b, h, n, dv), or 3-d like q; with `return_lse` also the log of the sums of weights (b, h, n), or (b * h, n).
    """
    if q.dim() == 3:
        batch = 1 if attention_mask is None else attention_mask.shape[0]
        q, k, v, drop_noise, log_decay, log_input_gate = (
            None if x is None else x.unflatten(0, (batch, -1)) for x in (q, k, v, drop_noise, log_decay, log_input_gate)
        )
        out = naive_attention(
            q, k, v, causal=causal, drop_noise=drop_noise, rpe_matrix=rpe_matrix, dropout=dropout, normalize=normalize,
            temperature=temperature, a0=a0, a1=a1, a2=a2, lim=lim, p=p, attention_mask=attention_mask,
            log_decay=log_decay, exact_window=exact_window, cu_seqlens=cu_seqlens, return_lse=return_lse,
            log_input_gate=log_input_gate, hold_denominator=hold_denominator,
        )  # fmt: skip
        return (out[0].flatten(0, 1), out[1].flatten(0, 1)) if isinstance(out, tuple) else out.flatten(0, 1)
    if q.shape[2] == 0 or k.shape[2] == 0:
        o = q.new_zeros(*q.shape[:3], v.shape[3])
        return (o, log_of_sums(o[..., :1], o[..., :1])) if return_lse else o
    q = normalized(q, normalize, lim, cu_seqlens=cu_seqlens)
    k = normalized(k, normalize, lim, attention_mask, cu_seqlens)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q @ k.mT
    if rpe_matrix is not None:
        (n, m), d = s.shape[2:], q.shape[3]
        rows = sinusoidal_rows(n, m, d).to(q) if isinstance(rpe_matrix, str) else rpe_matrix
        i, j = _positions(q, k)
        s = s + torch.einsum("bhid,ijd->bhij", q, rows[j - i + n - 1])
    s = s / temperature
    f = a0 + a1 * s + (a2 * s * s if p == 2 else 0.0)
    visible = visible_pairs(q, k, causal=causal, attention_mask=attention_mask, log_decay=log_decay, cu_seqlens=cu_seqlens)
    local = in_window(q, k, exact_window) if exact_window else None
    w, shift = weights(s, f, visible, local=local, factor=log_factor(q, log_decay, log_input_gate, local))
    z = w.sum(-1, keepdim=True)
    o = torch.where(z == 0, 0.0, (w @ v) / torch.where(z == 0, 1.0, z.detach() if hold_denominator else z))
    o = o if drop_noise is None else (1.0 + dropout * drop_noise) * o
    return (o, log_of_sums(z, shift)) if return_lse else o


def normalized(
    x: Tensor, normalize: bool | str, lim: float, takes_part: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Returns the rows of x (b, h, tokens, d) scaled into the ball of radius `lim`.

    `"token"` scales each longer row to length `lim`. `"sequence"` or True scales all rows of a sequence by the same factor, so
    that its longest row has length `lim`; rows for which `takes_part`, bool (b, tokens), is False do not count.
    """
    if normalize is False:
        return x
    length = (x * x).sum(-1, keepdim=True).sqrt()
    if normalize == "token":
        return torch.where(length > lim, x * lim / torch.where(length > lim, length, 1.0), x)
    if cu_seqlens is not None:
        parts = []
        for begin, end in pairwise(cu_seqlens.tolist()):
            if begin < end:
                counts = None if takes_part is None else takes_part[:, begin:end]
                parts.append(normalized(x[:, :, begin:end], normalize, lim, counts))
        return torch.cat(parts, dim=2)
    if takes_part is not None:
        length = torch.where(takes_part[:, None, :, None], length, 0.0)
    longest = length.amax(-2, keepdim=True)
    return x * lim / torch.where(longest > 0, longest, 1.0)


def sinusoidal_rows(n: int, m: int, d: int) -> Tensor:
    """Returns the sinusoidal rpe matrix (n + m - 1, d) in float64, computed element by element."""
    rows = []
    for row in range(n + m - 1):
        t = m - 1 - row  # (i + m - n) - j with row = j - i + n - 1
        angles = [t * 10000.0 ** (-2.0 * (column // 2) / d) for column in range(d)]
        rows.append([math.cos(x) if column % 2 else math.sin(x) for column, x in enumerate(angles)])
    return torch.tensor(rows, dtype=torch.float64)


def naive_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    attention_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    cu_seqlens: Tensor | None = None,
    log_input_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes softmax attention by its definition, for 4-d q, k and v.

    Returns output and log-sum-exp, as `fastmax.flash_attention` does.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.mT)
    visible = visible_pairs(
        q, k, causal=causal, attention_mask=attention_mask, log_decay=log_decay, cu_seqlens=cu_seqlens, window=window
    )
    factor = log_factor(q, log_decay, log_input_gate)
    if factor is not None:
        s = s + factor
    seen = visible.any(-1, keepdim=True)
    s = torch.where(visible, s, float("-inf"))
    w = torch.where(visible, torch.softmax(torch.where(seen, s, 0.0), dim=-1), 0.0)
    lse = torch.where(seen, torch.where(seen, s, 0.0).logsumexp(-1, keepdim=True), float("-inf"))
    return w.to(v.dtype) @ v, lse.squeeze(-1).to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def weights(
    s: Tensor, f: Tensor, visible: Tensor, *, local: Tensor | None = None, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the weights divided by exp(shift), and the shift (b, h, n, 1).

    The weight of a visible pair is f, or exp(s) where `local` is True, times exp(factor). With `local` the shift is the largest
    log of a weight in the row, a constant to autograd, so that no exponential overflows. Otherwise it is 0.
    """
    if local is None:
        w = torch.where(visible, f, 0.0)
        return w if factor is None else w * torch.where(visible, factor, 0.0).exp().to(w.dtype), torch.zeros_like(w[..., :1])
    logarithm = torch.where(local, s, f.abs().log()).detach()
    logarithm = logarithm if factor is None else logarithm + factor.detach()
    shift = torch.where(visible, logarithm, float("-inf")).amax(-1, keepdim=True)
    shift = torch.where(shift.isfinite(), shift, 0.0)
    # The exponential of a hidden pair could overflow, and infinity times a gradient of 0 is NaN: mask before the exponential.
    exponent = torch.where(local, s, 0.0) - shift + (0.0 if factor is None else factor)
    exponential = torch.where(visible, exponent, float("-inf")).exp().to(s.dtype)
    return exponential * torch.where(local, 1.0, f), shift


def log_of_sums(z: Tensor, shift: Tensor) -> Tensor:
    """Returns log(z exp(shift)) (b, h, n) for z and shift (b, h, n, 1), and -inf where z is 0. fp32, or fp64 for fp64."""
    z, shift = (x if x.dtype == torch.float64 else x.float() for x in (z, shift))
    return torch.where(z == 0, float("-inf"), shift + torch.where(z == 0, 1.0, z).log()).squeeze(-1)


def log_factor(
    q: Tensor, log_decay: Tensor | None, log_input_gate: Tensor | None, local: Tensor | None = None
) -> Tensor | None:
    """Returns the logarithm of what multiplies the weight of each pair, in a shape that broadcasts to (b, h, n, m); None for 0.

    It is `decay_between`, plus the key's gate where `local` (n, m) is not True. Gates outside [-60, 30] count as the nearest
    end, with gradient 0.
    """
    decay = decay_between(q, log_decay)
    if log_input_gate is None:
        return decay
    gate = log_input_gate if log_input_gate.dtype == torch.float64 else log_input_gate.float()
    gate = gate.clamp(-60.0, 30.0).repeat_interleave(q.shape[1] // gate.shape[1], dim=1).unsqueeze(2)
    gate = gate if local is None else torch.where(local, 0.0, gate)
    return gate if decay is None else decay + gate


def decay_between(q: Tensor, log_decay: Tensor | None) -> Tensor | None:
    """Returns, for each pair (b, h, n, m), the sum of the log decays (b, hk, m) of the tokens after key j up to query i's own.

    -inf counts as 0 here, because `visible_pairs` hides the keys before it. Values above 0 count as 0, with gradient 0. A NaN
    makes the sum NaN. Every sum is computed separately, so none is the difference of two large ones.
    """
    if log_decay is None:
        return None
    (_, h, n, _), (_, hk, m) = q.shape, log_decay.shape
    log_decay = torch.where(log_decay == float("-inf"), 0.0, log_decay.clamp(max=0.0))
    log_decay = log_decay if log_decay.dtype == torch.float64 else log_decay.float()
    token = torch.arange(m, device=q.device)
    later = token[:, None] > token[None, :]
    sums = torch.where(later, log_decay[..., :, None], 0.0).cumsum(-2)
    return sums[:, :, m - n :].repeat_interleave(h // hk, dim=1)


def visible_pairs(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    attention_mask: Tensor | None = None,
    log_decay: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
) -> Tensor:
    """Returns True where query i sees key j, in a shape that broadcasts to (b, h, n, m)."""
    i, j = _positions(q, k)
    at = i + k.shape[2] - q.shape[2]
    visible = (j <= at) if causal else torch.ones_like(j <= i)
    if window is not None:
        visible = visible & in_window(q, k, window)
    if cu_seqlens is not None:
        sequence = sequence_of_token(cu_seqlens, k.shape[2])
        visible = visible & (sequence[:, None] == sequence[None, :])
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None, :]
    if log_decay is not None:  # -inf: this token and later ones do not see earlier ones
        forgotten = (log_decay == float("-inf")).cumsum(-1)
        forgotten = forgotten.repeat_interleave(q.shape[1] // log_decay.shape[1], dim=1)
        visible = visible & (forgotten[:, :, k.shape[2] - q.shape[2] :, None] == forgotten[:, :, None, :])
    return visible


def in_window(q: Tensor, k: Tensor, window: int | tuple[int, int]) -> Tensor:
    """Returns a mask (n, m), True where key j is at most `left` tokens before and at most `right` tokens after query i.

    `window` is (left, right), or an int w for (w - 1, w - 1). -1 is no bound.
    """
    left, right = (window - 1, window - 1) if isinstance(window, int) else window
    i, j = _positions(q, k)
    at = i + k.shape[2] - q.shape[2]
    inside = torch.ones_like(j <= i)
    if left >= 0:
        inside = inside & (at - j <= left)
    if right >= 0:
        inside = inside & (j - at <= right)
    return inside


def sequence_of_token(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Returns the index of each token's packed sequence, (tokens,)."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    return (token[:, None] >= cu_seqlens[None, 1:]).sum(-1)


def _positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the query indices i (n, 1) and the key indices j (1, m)."""
    return torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)[None, :]
