"""The recurrent form: one token at a time from a state whose size does not depend on the number of tokens.

The state is the linear algorithm's, with one row for each distinct product: `1 + d + d(d+1)/2` features of a key, summed
against v and against 1. `prefill` takes many tokens at once through the parallel form and continues from the same state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastmax import eager, ops, validation
from fastmax.call import Call
from fastmax.normalization import normalize_rows
from fastmax.positional import append_sinusoidal_key, append_sinusoidal_query
from fastmax.score import Score


@dataclass(frozen=True)
class DecodeState:
    """Sums over the tokens seen so far, and the options they were made with.

    `values` (b, hk, features, dv) and `weights` (b, hk, features) are float32, or float64 for float64 tokens; the features are
    `1`, `k_a` and `k_a k_b` for `a <= b`, in that order (`1 + d` of them for p = 1). With a sinusoidal rpe_matrix d counts the
    appended channels. `tokens` counts what was seen.
    """

    values: Tensor
    weights: Tensor
    tokens: int
    dtype: torch.dtype  # of q, k and v
    head_dim: int  # of q and k as the caller passes them
    score: Score
    normalize: str | None
    lim: float
    sinusoidal: bool


def init_state(
    batch: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    normalize: bool | str = False,
    temperature: float = 1.0,
    a0: float = 1.0,
    a1: float = 1.0,
    a2: float = 0.5,
    lim: float = 1.0,
    p: int = 2,
    rpe_matrix: str | None = None,
) -> DecodeState:
    """The state before any token, for `step` and `prefill`.

    Args:
        batch, kv_heads, head_dim: of k, (batch, kv_heads, tokens, head_dim).
        value_dim: of v; head_dim when None.
        dtype, device: of q, k and v.
        normalize: False or "token" ("sequence" looks at future tokens and has no recurrent form).
        temperature, a0, a1, a2, lim, p: as in `fastmax_attention`.
        rpe_matrix: None or "sinusoidal".

    Raises:
        TypeError, ValueError: naming the argument.
    """
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {"batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an int, got {size!r} ({type(size).__name__})")
        if size < (0 if name == "batch" else 1):
            raise ValueError(f"{name} must be at least {0 if name == 'batch' else 1}, got {size}")
    if dtype not in validation.DTYPES:
        raise TypeError(f"dtype must be float64, float32, float16 or bfloat16, got {dtype}")
    score = validation.check_score(temperature, a0, a1, a2, p)
    kind = validation.check_normalize(normalize, lim)
    if kind == "sequence":
        raise ValueError(f'normalize must be False or "token" for a recurrent state, got {normalize!r}: it looks at all tokens')
    if rpe_matrix not in (None, "sinusoidal"):
        raise ValueError(f'rpe_matrix must be None or "sinusoidal" for a recurrent state, got {type(rpe_matrix).__name__}')
    validation.warn_if_vanishing(score, kind, lim, rpe_matrix is not None)
    sinusoidal = rpe_matrix is not None
    width = head_dim + 2 * ((head_dim + 1) // 2) if sinusoidal else head_dim
    features = 1 + width + (width * (width + 1) // 2 if p == 2 else 0)
    values = torch.zeros(batch, kv_heads, features, value_dim, dtype=eager.compute_dtype(dtype), device=device)
    return DecodeState(values, values.new_zeros(values.shape[:3]), 0, dtype, head_dim, score, kind, lim, sinusoidal)


def step(
    q: Tensor, k: Tensor, v: Tensor, state: DecodeState, *, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, DecodeState]:
    """Attend one token to itself and all before it.

    Args:
        q: (b, h, 1, d).
        k, v: (b, hk, 1, d) and (b, hk, 1, dv); k and v join the state first, so the token sees itself.
        state: from `init_state`, `step` or `prefill`. It is not modified.
        key_padding_mask: bool (b, 1), True = the token joins the state.

    Returns:
        The output (b, h, 1, dv) in q's dtype and layout, and the new state. Differentiable.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _check(q, k, v, state, key_padding_mask)
    if q.shape[2] != 1 or k.shape[2] != 1:
        raise ValueError(
            f"q, k and v must hold one token, (b, h, 1, d), got {q.shape[2]} in q and {k.shape[2]} in k; "
            "use fastmax.prefill for more"
        )
    q, k = _transform(q, k, state)
    o, values, weights = ops.decode_step(q, k, v, state.values, state.weights, key_padding_mask, state.score)
    return o, replace(state, values=values, weights=weights, tokens=state.tokens + 1)


def prefill(
    q: Tensor, k: Tensor, v: Tensor, state: DecodeState, *, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, DecodeState]:
    """Attend n tokens, causally, to themselves and all before them: n calls of `step` in one.

    Args:
        q: (b, h, n, d).
        k, v: (b, hk, n, d) and (b, hk, n, dv).
        state: from `init_state`, `step` or `prefill`. It is not modified.
        key_padding_mask: bool (b, n), True = the token joins the state.

    Returns:
        The output (b, h, n, dv) in q's dtype and layout, and the state after n tokens. Differentiable.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _check(q, k, v, state, key_padding_mask)
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k and v must have q's number of tokens {q.shape[2]}, got {k.shape[2]}")
    tokens = state.tokens + q.shape[2]
    q, k = _transform(q, k, state)
    call = Call(state.score, causal=True, key_padding_mask=key_padding_mask)
    o, values, weights = eager.forward_from_state(q, k, v, call, state.values, state.weights)
    return o, replace(state, values=values, weights=weights, tokens=tokens)


def _check(q: Tensor, k: Tensor, v: Tensor, state: DecodeState, mask: Tensor | None) -> None:
    if not isinstance(state, DecodeState):
        raise TypeError(f"state must come from fastmax.init_state, got {type(state).__name__}")
    validation.check_qkv(q, k, v, causal=True)
    validation.check_key_padding_mask(mask, q, k)
    if q.dim() != 4:
        raise ValueError(f"q, k and v must be 4-d (batch, heads, tokens, head_dim), got {q.dim()} dimensions")
    batch, heads = state.values.shape[:2]
    if k.shape[0] != batch or k.shape[1] != heads or k.shape[3] != state.head_dim:
        expected = (batch, heads, "tokens", state.head_dim)
        raise ValueError(f"k must have the state's shape {expected}, got {tuple(k.shape)}")
    if v.shape[3] != state.values.shape[3]:
        raise ValueError(f"v must have the state's value_dim {state.values.shape[3]}, got {v.shape[3]}")
    if q.dtype != state.dtype:
        raise TypeError(f"q, k and v must have the state's dtype {state.dtype}, got {q.dtype}")
    if q.device != state.values.device:
        raise ValueError(f"q, k and v must be on the state's device {state.values.device}, got {q.device}")


def _transform(q: Tensor, k: Tensor, state: DecodeState) -> tuple[Tensor, Tensor]:
    """What `fastmax_attention` does to q and k before the operator, at positions that continue from the state."""
    if state.normalize is not None:
        q, k = (normalize_rows(x, state.normalize, state.lim) for x in (q, k))
    if state.sinusoidal:
        q, k = append_sinusoidal_query(q, state.tokens), append_sinusoidal_key(k, state.tokens)
    return q, k
