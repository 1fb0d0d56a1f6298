"""`fastmax_attention` and `flash_attention`: check the arguments, make a `Call`, and run its operator."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fastmax import eager, ops
from fastmax.core import other_arguments, validation
from fastmax.core.call import Call
from fastmax.core.score import Score, Softmax, log_of_sums
from fastmax.eager.planner import choose_algorithm
from fastmax.ops.exact_window import attention_with_exact_window
from fastmax.prepare import sharded_dispatch
from fastmax.prepare.bounds import with_bounds
from fastmax.prepare.positional import token_positions
from fastmax.prepare.tensors import Positions, cast_for_autocast, dropout_noise, prepare_queries_and_keys


@sharded_dispatch.dispatches_shards
def fastmax_attention(
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
    use_custom_gradient: bool = True,
    algorithm: str = "auto",
    log_decay: Tensor | None = None,
    exact_window: int = 0,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
    log_input_gate: Tensor | None = None,
    **others: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes polynomial-kernel attention: softmax attention with `f(s) = a0 + a1 s + a2 s^2` in place of `exp(s)`.

        s_ij = q_i . k_j / temperature
        o_i  = sum_j f(s_ij) v_j / sum_j f(s_ij)         over the keys j that query i sees

    `log_decay` multiplies every weight by a decay, `log_input_gate` by a factor of the key. `exact_window` gives local keys the
    weight exp(s_ij) in place of f(s_ij).
    Query i has the position pos(i) = i + m - n among the keys.

    There is no hidden `1 / sqrt(head_dim)`: pass `temperature=math.sqrt(head_dim)` for the usual scale.

    Args:
        q: (b, h, n, d), or 3-d (b * h, n, d); float64, float32, float16 or bfloat16, any strides.
        k: (b, hk, m, d), h a multiple of hk: query head i uses key/value head i // (h // hk). q's dtype and device.
        v: (b, hk, m, dv). q's dtype and device.
        causal: key j is visible to query i if `j <= i + (m - n)` (aligned at the end); n <= m.
        drop_noise: standard normal tensor of the output's shape, for `o * (1 + dropout * drop_noise)`. Drawn if None and
            dropout > 0; refused if dropout is 0. It gets no gradient.
        rpe_matrix: relative positions. A tensor (n + m - 1, d) whose row `j - i + n - 1` is added to k_j for query i; it needs
            the quadratic algorithm and gets a gradient. Or "sinusoidal": the rows of `rpe_matrix_creator(structured=True)` in
            factorised form, without a matrix, with any algorithm.
        dropout: strength of the noise, >= 0.
        normalize: False: q and k are used as they are. True or "sequence": each head's q is scaled so that its longest row has
            length `lim`, and each head's k likewise. All rows count except masked keys, later ones too, so a causal call
            warns. "token": each row longer than `lim` is scaled to length `lim`; causal.
        temperature: divides the scores; > 0.
        a0, a1, a2: coefficients of f. The defaults are the Taylor polynomial of exp.
        lim: radius for `normalize`, > 0; refused without `normalize`.
        p: degree of f, 1 or 2. With 1, a2 is ignored.
        attention_mask: bool (b, m), True = the key is attended. A query that sees no key gets output and gradient 0. Hidden
            tokens still count in windows, relative positions and decays; padded sequences can be packed with `cu_seqlens`.
        use_custom_gradient: True: one fused operator with an analytic backward. False: the same forward in PyTorch
            operations that autograd records, for higher derivatives, forward mode and torch.func.
        algorithm: "quadratic", "linear" or "auto", which chooses by a cost model (`fastmax.eager.planner`, or
            csrc/core/cost_model.h where the CUDA kernels run).
        log_decay: (b, hk, m), or (b * hk, m) for 3-d k: floating point, <= 0, any strides; needs `causal`. Key j's weight is
            multiplied by exp of the sum of log_decay over tokens `j + 1 .. pos(i)`, so it decays with the tokens after it.
            -inf resets: keys before the token are hidden from it and from later queries. Values above 0 count as 0, with
            gradient 0. A NaN makes the queries NaN that see a key before its token, and no others. Summed in float64; gets
            a gradient.
        exact_window: local keys, `|pos(i) - j| < exact_window`, have the weight `exp(s_ij)`. This costs O(n * exact_window)
            in addition; n <= m. A window of m or more is softmax attention.
        cu_seqlens: int32 (s + 1,), from 0 to n, not decreasing. The n tokens of a batch of one are s sequences end to end, and
            tokens of different sequences do not see each other (`normalize="sequence"` is per sequence too); n = m. Without
            `causal` the algorithm is the quadratic one, except for the global keys of an exact window. The values are
            checked on a CPU. On a GPU they are not read back, and results for invalid values are unspecified.
        return_lse: whether to return also the log of the sum of weights of each query, for `fastmax.merge_attention`.
        log_input_gate: (b, hk, m), or (b * hk, m) for 3-d k: floating point, any strides; needs `causal`. Key j's weight is
            multiplied by exp(log_input_gate_j), except in an exact window: what is worth remembering is written with a large
            weight, the rest hardly. Values outside [-60, 30] count as the nearest end, with gradient 0; so -inf does not hide
            a key. A NaN makes the queries NaN that weigh its key by it, and no others. float32 inside (float64 for float64 q);
            gets a gradient.
        others: must be empty. An argument name of another library raises an error that says what to pass instead.

    Returns:
        o (b, h, n, dv), or 3-d like q, in q's dtype and memory layout. With `return_lse` also lse (b, h, n), or (b * h, n), in
        float32 (float64 for float64 q), differentiable: -inf where a query sees no key, NaN where the sum is negative.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
        RuntimeError: on a second, forward-mode or torch.func derivative through `use_custom_gradient=True`.

    Under autocast q, k and v are cast to autocast's dtype, as in `scaled_dot_product_attention`; decays and gates are not.
    Method: Gerami et al., "FAST: Factorizable Attention for Speeding up Transformers", 2024 (arXiv:2402.07901). Decays: Lin et
    al., "Forgetting Transformer", 2025 (arXiv:2503.02130).
    """
    if others:
        other_arguments.refuse("fastmax_attention", others)
    validation.check_flag("causal", causal)
    validation.check_bool("use_custom_gradient", use_custom_gradient)
    q, k, v, rpe_matrix = cast_for_autocast(q, k, v, rpe_matrix)
    validation.check_tensors(q, k, v, causal, attention_mask, log_decay, log_input_gate)
    score, kind, dropout = _options((temperature, a0, a1, a2, p), (normalize, lim), dropout)
    validation.check_drop_noise(drop_noise, dropout, q, v.shape[-1])
    validation.check_rpe(rpe_matrix, q, k)
    validation.check_algorithm(algorithm, rpe_matrix)
    validation.check_bool("return_lse", return_lse)
    validation.check_exact_window(exact_window)
    validation.check_exact_window_of(exact_window, q, k, rpe_matrix)
    validation.check_cu_seqlens(cu_seqlens, q, k)
    if cu_seqlens is not None:
        algorithm = _algorithm_of_packed(algorithm, causal or exact_window > 0, q, k, v, cu_seqlens, score)
    validation.warn_if_leaking(causal, kind)
    if not torch.compiler.is_compiling():  # where coefficients may be symbols
        validation.warn_if_vanishing(score, kind, lim, rpe_matrix is not None)

    positions = None
    if isinstance(rpe_matrix, str):
        (n, m), rpe_matrix = (q.shape[-2], k.shape[-2]), None
        positions = Positions(token_positions(m - n, n, q.device), token_positions(0, m, q.device))
    call = Call(score, causal, dropout, algorithm, attention_mask=attention_mask, rpe_matrix=rpe_matrix)
    if kind == "token" and use_custom_gradient and positions is None and cu_seqlens is None:
        asked = call._replace(log_decay=log_decay, log_input_gate=log_input_gate, exact_window=exact_window)
        if ops.normalizes_during_attention(q, k, v, asked, lim):
            o, z = ops.normalized_attention(q, k, v, call, lim)
            return (o, log_of_sums(z)) if return_lse else o
    q, k = prepare_queries_and_keys(q, k, kind, lim, positions, use_custom_gradient, attention_mask, cu_seqlens)
    noise = dropout_noise(drop_noise, dropout, (*q.shape[:-1], v.shape[-1]), q)

    three_d = q.dim() == 3
    if three_d:
        q, k, v = _four_d(q, k, v, attention_mask)
        noise = noise if noise is None else noise.view(*q.shape[:-1], v.shape[-1])
    if noise is not None:
        call = call._replace(drop_noise=noise)
    call = with_bounds(call, q, k, log_decay, cu_seqlens, log_input_gate=log_input_gate)
    if exact_window == 0:
        o, z = _attend(q, k, v, call, use_custom_gradient)
        lse = log_of_sums(z) if return_lse else None
    else:
        o, lse = _attend_exactly(q, k, v, call._replace(exact_window=exact_window), use_custom_gradient)
    if three_d:
        o, lse = o.flatten(0, 1), lse if lse is None else lse.flatten(0, 1)
    return (o, lse) if return_lse else o


@sharded_dispatch.dispatches_shards
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    attention_mask: Tensor | None = None,
    return_lse: bool = False,
    use_custom_gradient: bool = True,
    log_decay: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    cu_seqlens: Tensor | None = None,
    log_input_gate: Tensor | None = None,
    **others: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes exact softmax attention in O(n) memory, the baseline for `fastmax_attention`.

        s_ij = scale * q_i . k_j
        o_i  = sum_j exp(s_ij) v_j / sum_j exp(s_ij)     over the keys j that query i sees

    Args:
        q: (b, h, n, d), or 3-d (b * h, n, d); float64, float32, float16 or bfloat16, any strides.
        k: (b, hk, m, d), h a multiple of hk: query head i uses key/value head i // (h // hk). q's dtype and device.
        v: (b, hk, m, dv). q's dtype and device.
        causal: key j is visible to query i if `j <= i + (m - n)` (aligned at the end, while PyTorch's `is_causal` aligns at
            the start); n <= m.
        scale: finite and > 0; None: `1 / sqrt(d)`.
        attention_mask: as in `fastmax_attention`.
        return_lse: whether to return also `log sum_j exp(s_ij)`.
        use_custom_gradient: as in `fastmax_attention`.
        log_decay: as in `fastmax_attention`. Its sum over tokens `j + 1 .. pos(i)` is added to s_ij.
        log_input_gate: as in `fastmax_attention`. It is added to s_ij, for all keys.
        window: an int hides keys with `|pos(i) - j| >= window`, where pos(i) = i + m - n. A tuple (left, right) leaves keys
            from `pos(i) - left` to `pos(i) + right` visible, as in FlashAttention; -1: no bound. Tiles outside are skipped.
        cu_seqlens, others: as in `fastmax_attention`.

    Returns:
        o (b, h, n, dv), or 3-d like q, in q's dtype and memory layout. With `return_lse` also lse (b, h, n), or (b * h, n), in
        float32 (float64 for float64 q), differentiable. A query that sees no key gets o = 0, lse = -inf and gradient 0.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
        RuntimeError: on a second, forward-mode or torch.func derivative through `use_custom_gradient=True`.

    Under autocast q, k and v are cast to autocast's dtype. Method: online normaliser (Milakov and Gimelshein, 2018,
    arXiv:1805.02867) over tiles (Dao, "FlashAttention-2", 2023, arXiv:2307.08691). Decays: Lin et al., "Forgetting
    Transformer", 2025 (arXiv:2503.02130).
    """
    if others:
        other_arguments.refuse("flash_attention", others)
    validation.check_flag("causal", causal)
    validation.check_bool("use_custom_gradient", use_custom_gradient)
    validation.check_bool("return_lse", return_lse)
    q, k, v = cast_for_autocast(q, k, v)
    validation.check_tensors(q, k, v, causal, attention_mask, log_decay, log_input_gate)
    score = Softmax(validation.check_scale(scale, q.shape[-1]))
    left, right = validation.check_window(window)
    validation.check_cu_seqlens(cu_seqlens, q, k)

    three_d = q.dim() == 3
    if three_d:
        q, k, v = _four_d(q, k, v, attention_mask)
    call = Call(score, causal, left=left, right=right, attention_mask=attention_mask)
    call = with_bounds(call, q, k, log_decay, cu_seqlens, log_input_gate=log_input_gate)
    o, lse = _attend(q, k, v, call, use_custom_gradient)
    if three_d:
        o, lse = o.flatten(0, 1), lse.flatten(0, 1)
    return (o, lse) if return_lse else o


def _options(score: tuple, normalize: tuple, dropout: float) -> tuple[Score, str | None, float]:
    """Checks the arguments of `check_score` and `check_normalize`, and `dropout`. Returns the score, "sequence", "token" or
    None, and the strength as a float."""
    options = (*score, *normalize, dropout)
    if torch.compiler.is_compiling() or not all([type(x) in _REMEMBERED for x in options]):
        return _check_options(*options)
    return _remembered_options(*options)


def _check_options(
    temperature: object, a0: object, a1: object, a2: object, p: object, normalize: object, lim: object, dropout: object
) -> tuple[Score, str | None, float]:
    score = validation.check_score(temperature, a0, a1, a2, p)
    return score, validation.check_normalize(normalize, lim), validation.check_not_negative("dropout", dropout)


# A model calls with the same options again and again. The cache tells True, 1 and 1.0 apart.
_REMEMBERED = frozenset({bool, int, float, str})
_remembered_options = lru_cache(maxsize=64, typed=True)(_check_options)


def _attend(q: Tensor, k: Tensor, v: Tensor, call: Call, use_custom_gradient: bool) -> tuple[Tensor, Tensor]:
    """Returns the output of 4-d tensors, and the denominators or, for softmax, the log-sum-exp."""
    if use_custom_gradient:
        return ops.attention(q, k, v, call)
    with ops.without_autocast(q):
        return eager.forward(q, k, v, call, differentiable=eager.recording(q, k, v, *call.differentiable))


def _attend_exactly(q: Tensor, k: Tensor, v: Tensor, call: Call, use_custom_gradient: bool) -> tuple[Tensor, Tensor]:
    """Returns the output and the log of the sums of weights of a call with an exact window."""

    def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        o, z = _attend(q, k, v, call, use_custom_gradient=False)
        return o, z if isinstance(call.score, Softmax) else log_of_sums(z)

    noise, of_noise = call.drop_noise, call.dropout
    call = call._replace(dropout=0.0, drop_noise=None)
    with ops.without_autocast(q):
        o, lse = ops.attention(q, k, v, call) if use_custom_gradient else attention_with_exact_window(q, k, v, call, attend)
        return o if noise is None else torch.addcmul(o, o, noise, value=of_noise), lse


def _algorithm_of_packed(
    algorithm: str, has_linear: bool, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, score: Score
) -> str:
    """Returns the algorithm for packed sequences. "auto" goes by their mean length, which the shapes give."""
    if not has_linear:
        return validation.algorithm_without_state(algorithm)
    if algorithm != "auto" or torch.compiler.is_compiling() or q.numel() == 0:  # a choice by size would add a guard
        return algorithm
    length = max(1, q.shape[-2] // (cu_seqlens.shape[0] - 1))
    return choose_algorithm(length, length, q.shape[-1], v.shape[-1], True, score.order, q.shape[-3] // k.shape[-3])


def _four_d(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """Converts 3-d q, k and v (b * h, tokens, d) to 4-d (b, h, tokens, d); the mask gives b, else it is 1."""
    batch = 1 if mask is None else mask.shape[0]
    return tuple(x.unflatten(0, (batch, x.shape[0] // max(batch, 1))) for x in (q, k, v))
