"""`prefill`, its gradient, and both in pieces for callers that exchange states between the pieces.

prefill           state_of_keys, prefill_saved_
prefill_backward  gradients_of_sums, state_of_queries, prefill_backward_of_queries, prefill_backward_of_keys_
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastmax import eager
from fastmax.core.call import CONTINUED, PER_HEAD, Call, Signature
from fastmax.core.score import Score
from fastmax.ops import checks as operator_checks
from fastmax.ops.autocast import without_autocast
from fastmax.ops.autograd import (
    Prefill,
    compute,
    refuse_derivative_of_state,
    refuse_derivatives,
    refuse_second_derivative_of_prefill,
    register_gradient,
)
from fastmax.ops.flops import count_states, pairs_within_chunks
from fastmax.ops.precision import allow_tf32_of
from fastmax.ops.registration import register

# Queries are not masked.
_UNMASKED = Signature(Score, (), tuple(name for name in CONTINUED.tensor_names if name in PER_HEAD))


def prefill(
    q: Tensor, k: Tensor, v: Tensor, call: Call, kv_state: Tensor, k_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes causal attention of n tokens that continue from a state; see `fastmax.decoding`. Arguments are 4-d and checked.

    In transforms of torch.func and in forward mode it consists of PyTorch operations.

    Returns:
        The output, the denominators (b, h, n), and kv_state and k_sum after the tokens.
    """
    if eager.is_transformed():
        return eager.forward_from_state(q, k, v, call, kv_state, k_sum)
    tensors, options = CONTINUED.flatten(call, allow_tf32_of(q))
    return compute(_PREFILL, (q, k, v, *tensors, kv_state, k_sum), options)


def prefill_backward(
    grads: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    call: Call,
    kv_state: Tensor,
    k_sum: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Computes the gradients of `prefill`, for callers that receive the gradient of the new state themselves. Not recorded.

    Args:
        grads: gradients of the results of `prefill`.
        results: the results of `prefill`.

    Returns:
        Gradients of q, k, v, log_decay and log_input_gate (None or no elements if the call has none), kv_state and k_sum.
    """
    tensors, options = CONTINUED.flatten(call, allow_tf32_of(q))
    return _PREFILL.backward(*grads, q, k, v, *results, *tensors, kv_state, k_sum, *options)


def state_of_keys(k: Tensor, v: Tensor, call: Call, keep: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the state after `prefill` of these keys from a state of zeros. Not recorded.

    Returns:
        kv_state, k_sum, and saved intermediate states for `prefill_saved_`, uint8 (b, hk, bytes). These are 0 bytes without
        `keep`, or if no kernel saves them.
    """
    tensors, options = CONTINUED.flatten(call, allow_tf32_of(k))
    return _STATE_OF_KEYS(k, v, *tensors, *options, keep)


def prefill_saved_(
    q: Tensor, k: Tensor, v: Tensor, call: Call, kv_state: Tensor | None, k_sum: Tensor | None, saved: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the output and denominators of `prefill` from the intermediate states that `state_of_keys` saved. Not recorded.

    Args:
        kv_state, k_sum: the given state; None: zeros.
        saved: saved by `state_of_keys` of the same keys and call; it is overwritten.
    """
    tensors, options = CONTINUED.flatten(call, allow_tf32_of(q))
    return _PREFILL_SAVED_(q, k, v, *tensors, kv_state, k_sum, saved, *options)


def gradients_of_sums(grad_o: Tensor, grad_z: Tensor | None, o: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the gradients of the numerator and the denominator of o = sum_j w_j v_j / z, z = sum_j w_j. Not recorded.

    Returns:
        g = grad_o / z (b, h, n, dv), in o's dtype or float32 for float16, and e = grad_z - grad_o . o / z (b, h, n); both are 0
        where z is 0.
    """
    return _GRADIENTS_OF_SUMS(grad_o, grad_z, o, z)


def state_of_queries(
    g: Tensor, e: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of kv_state and k_sum of `prefill` for a new state whose gradients are zero. Not recorded.

    Returns:
        Gradients of kv_state and k_sum, and intermediate states for `prefill_backward_of_keys_`, saved as by `state_of_keys`.
    """
    tensors, options = _UNMASKED.flatten(call._replace(attention_mask=None), allow_tf32_of(q))
    return _STATE_OF_QUERIES(g, e, q, k, v, *tensors, *options, keep)


def prefill_backward_of_queries(
    g: Tensor,
    e: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    kv_state: Tensor | None,
    k_sum: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Computes the gradient of q of `prefill`, which does not depend on the gradient of the new state. Not recorded.

    Args:
        kv_state, k_sum: the given state; None: zeros.

    Returns:
        The gradient of q, and with log_decay the argument `pairs` of `prefill_backward_of_keys_`.
    """
    tensors, options = CONTINUED.flatten(call, allow_tf32_of(q))
    return _PREFILL_BACKWARD_OF_QUERIES(g, e, q, k, v, *tensors, kv_state, k_sum, *options)


def prefill_backward_of_keys_(
    g: Tensor,
    e: Tensor,
    of_state: tuple[Tensor | None, Tensor | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    pairs: Tensor | None,
    pairs_of_states: Tensor | None,
    saved: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Computes the gradients of k, v, log_decay and log_input_gate (None or no elements if the call has none) of `prefill`.
    Not recorded.

    Args:
        of_state: gradients of the new state; None: zeros.
        pairs: from `prefill_backward_of_queries`.
        pairs_of_states: with log_decay, float64 (b, hk, 2): the inner products of the new state and its gradient, and of the
            given state and its gradient.
        saved: saved by `state_of_queries` of the same queries and call; it is overwritten.
    """
    tensors, options = CONTINUED.flatten(call, allow_tf32_of(q))
    tensors = (*tensors, pairs, pairs_of_states, saved)
    return _PREFILL_BACKWARD_OF_KEYS_(g, e, *of_state, q, k, v, *tensors, *options)


def _parse(arguments: Sequence, count: int, signature: Signature = CONTINUED) -> tuple[Call, tuple, tuple]:
    """Returns the call, the `count` arguments between its tensors and its options, and the arguments after its options."""
    tensors = len(signature.tensor_names)
    end = tensors + count + len(Score._fields) + 1
    between, options = arguments[tensors : tensors + count], arguments[tensors + count : end]
    call = signature.call((*arguments[:tensors], *options))._replace(causal=True)
    return call, tuple(between), tuple(arguments[end:])


# ---- prefill


def _check_prefill(q: Tensor, k: Tensor, v: Tensor, call: Call, kv_state: Tensor, k_sum: Tensor) -> None:
    operator_checks.check_call(q, k, v, call)
    operator_checks.check_state(q, k, v, call.score.order, kv_state=kv_state, k_sum=k_sum)


def _prefill_from(q: Tensor, k: Tensor, v: Tensor, call: Call, kv_state: Tensor, k_sum: Tensor) -> tuple[Tensor, ...]:
    _check_prefill(q, k, v, call, kv_state, k_sum)
    state: Iterable[Tensor]
    with without_autocast(q):
        o, z, *state = eager.forward_from_state(q, k, v, call, kv_state, k_sum)
    if q.numel() == 0:  # operators must not return their arguments
        state = (x.clone(memory_format=torch.contiguous_format) for x in state)
    return o, z, *state


def _prefill(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    call, (kv_state, k_sum), _ = _parse(arguments, 2)
    return _prefill_from(q, k, v, call, kv_state, k_sum)


def _fake_prefill(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    _, (kv_state, k_sum), _ = _parse(arguments, 2)
    state = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (kv_state, k_sum))
    return eager.empty_like_layout(q, v.shape[-1]), kv_state.new_empty(q.shape[:3]), *state


def _products(q: Tensor, v: Tensor, call: Call, passes: int, of_pair: int) -> int:
    """Counts the products of `passes` heads of tokens with states, and `of_pair` products for each intra-chunk pair."""
    (b, h, n, d), dv = q.shape, v.shape[3]
    states = count_states(b, passes * n, eager.state_rows(d, call.score.order), dv)
    return states + 2 * b * h * of_pair * pairs_within_chunks(n)


def _prefill_flops(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, out_val: object = None) -> int:
    """Counts a product with a state for every key, which is added to it, and for every query, which reads it."""
    return _products(q, v, _parse(arguments, 2)[0], k.shape[1] + q.shape[1], q.shape[3] + v.shape[3])


def _prefill_backward(
    grad_o: Tensor,
    grad_z: Tensor | None,
    grad_new_kv_state: Tensor | None,
    grad_new_k_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    z: Tensor,
    new_kv_state: Tensor | None,
    new_k_sum: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    """Returns gradients of q, k, v, of the call's differentiable tensors (no elements for absent ones), kv_state and k_sum."""
    call, (kv_state, k_sum), _ = _parse(arguments, 2)
    _check_prefill(q, k, v, call, kv_state, k_sum)
    operator_checks.check_results(q, v, o=o, grad_o=grad_o, z=z, grad_z=grad_z)
    states = eager.States((kv_state, k_sum), (new_kv_state, new_k_sum), (grad_new_kv_state, grad_new_k_sum))
    operator_checks.check_states(q, states, call.log_decay)
    with without_autocast(q):
        grads, of_tensors, of_state = eager.backward_from_state(grad_o, grad_z, q, k, v, o, z, call, states)
    return *grads, *_with_empty(of_tensors, q), *of_state


def _with_empty(of_tensors: dict[str, Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradients of differentiable tensors in the order of the schema, without elements in place of None."""
    grads = (of_tensors[name] for name in CONTINUED.differentiable)
    return tuple([like.new_empty(0) if x is None else x for x in grads])


def _fake_gradients(call: Call, like: Tensor) -> tuple[Tensor, ...]:
    """Returns uninitialised gradients, as `_with_empty` returns them."""
    given = {name: getattr(call, name) for name in CONTINUED.differentiable}
    contiguous = {"memory_format": torch.contiguous_format}
    return _with_empty({name: None if x is None else torch.empty_like(x, **contiguous) for name, x in given.items()}, like)


def _fake_prefill_backward(
    grad_o: Tensor,
    grad_z: Tensor | None,
    grad_new_kv_state: Tensor | None,
    grad_new_k_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    z: Tensor,
    new_kv_state: Tensor | None,
    new_k_sum: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    call, (kv_state, k_sum), _ = _parse(arguments, 2)
    state = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (kv_state, k_sum))
    return *(eager.empty_like_layout(x, x.shape[-1]) for x in (q, k, v)), *_fake_gradients(call, q), *state


def _prefill_backward_flops(
    grad_o: Tensor,
    grad_z: Tensor | None,
    grad_kv_state: Tensor | None,
    grad_k_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    z: Tensor,
    new_kv_state: Tensor | None,
    new_k_sum: Tensor | None,
    *arguments: Any,
    out_val: object = None,
) -> int:
    """Counts two products with states for every query and three for every key."""
    passes = 2 * q.shape[1] + 3 * k.shape[1]
    return _products(q, v, _parse(arguments, 2)[0], passes, 3 * q.shape[3] + 2 * v.shape[3])


_PREFILL = Prefill(
    register(
        f"prefill(Tensor q, Tensor k, Tensor v, {CONTINUED.tensors_schema}, Tensor kv_state, Tensor k_sum, "
        f"{CONTINUED.options_schema}) -> (Tensor o, Tensor z, Tensor new_kv_state, Tensor new_k_sum)",
        _prefill,
        _fake_prefill,
        kernel_of="q v",
        flops=_prefill_flops,
    ),
    register(
        "prefill_backward(Tensor grad_o, Tensor? grad_z, Tensor? grad_new_kv_state, Tensor? grad_new_k_sum, "
        "Tensor q, Tensor k, Tensor v, Tensor o, Tensor z, Tensor? new_kv_state, Tensor? new_k_sum, "
        f"{CONTINUED.tensors_schema}, Tensor kv_state, Tensor k_sum, {CONTINUED.options_schema}) "
        f"-> ({CONTINUED.gradients_schema}, Tensor grad_kv_state, Tensor grad_k_sum)",
        _prefill_backward,
        _fake_prefill_backward,
        kernel_of="q v",
        flops=_prefill_backward_flops,
    ),
)
register_gradient(_PREFILL, refuse_second_derivative_of_prefill)


# ---- prefill in pieces


def _nothing_saved(k: Tensor) -> Tensor:
    """Returns 0 bytes: PyTorch operations save no intermediate states."""
    return k.new_empty(*k.shape[:2], 0, dtype=torch.uint8)


def _given_state(
    kv_state_name: str,
    k_sum_name: str,
    kv_state: Tensor | None,
    k_sum: Tensor | None,
    k: Tensor,
    v: Tensor,
    p: int,
) -> tuple[Tensor, Tensor]:
    """Returns the given state, or zeros."""
    operator_checks.check_together(kv_state_name, k_sum_name, kv_state, k_sum)
    return eager.zero_state(k, v, p) if kv_state is None else (kv_state, k_sum)


def _fake_state_of_tokens(k: Tensor, v: Tensor, call: Call, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = eager.state_rows(k.shape[3], call.score.order)
    kv_state = k.new_empty(*k.shape[:2], rows, v.shape[3], dtype=eager.compute_dtype(k.dtype))
    saved = torch.library.get_ctx().new_dynamic_size() if keep and k.is_cuda else 0  # only the library knows the size
    return kv_state, kv_state.new_empty(kv_state.shape[:3]), k.new_empty(*k.shape[:2], saved, dtype=torch.uint8)


def _state_of_keys(k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, _, _ = _parse(arguments, 0)
    operator_checks.check_call(k, k, v, call)
    with without_autocast(k):
        return *eager.state_of_keys(k, v, call), _nothing_saved(k)


def _fake_state_of_keys(k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, _, (keep,) = _parse(arguments, 0)
    return _fake_state_of_tokens(k, v, call, keep)


def _state_of_keys_flops(k: Tensor, v: Tensor, *arguments: Any, out_val: object = None) -> int:
    """Counts a product with a state for every key."""
    return _products(k, v, _parse(arguments, 0)[0], k.shape[1], 0)


_STATE_OF_KEYS = register(
    f"state_of_keys(Tensor k, Tensor v, {CONTINUED.tensors_schema}, {CONTINUED.options_schema}, bool keep) "
    "-> (Tensor kv_state, Tensor k_sum, Tensor saved)",
    _state_of_keys,
    _fake_state_of_keys,
    kernel_of="k v",
    flops=_state_of_keys_flops,
)


def _prefill_saved_(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    call, (kv_state, k_sum, saved), _ = _parse(arguments, 3)
    operator_checks.check_saved(k, saved)
    kv_state, k_sum = _given_state("kv_state", "k_sum", kv_state, k_sum, k, v, call.score.order)
    return _prefill_from(q, k, v, call, kv_state, k_sum)[:2]


def _fake_prefill_saved_(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return eager.empty_like_layout(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=eager.compute_dtype(q.dtype))


def _prefill_saved_flops(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, out_val: object = None) -> int:
    """Counts as for `prefill`, without the products of the keys if their states were saved."""
    call, (_, _, saved), _ = _parse(arguments, 3)
    passes = q.shape[1] if saved.numel() > 0 else k.shape[1] + q.shape[1]
    return _products(q, v, call, passes, q.shape[3] + v.shape[3])


_PREFILL_SAVED_ = register(
    f"prefill_saved_(Tensor q, Tensor k, Tensor v, {CONTINUED.tensors_schema}, Tensor? kv_state, Tensor? k_sum, "
    f"Tensor(a!) saved, {CONTINUED.options_schema}) -> (Tensor o, Tensor z)",
    _prefill_saved_,
    _fake_prefill_saved_,
    kernel_of="q v",
    flops=_prefill_saved_flops,
)


def _gradients_of_sums(grad_o: Tensor, grad_z: Tensor | None, o: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    operator_checks.check_output(o)
    operator_checks.check_results(o, o, grad_o=grad_o, z=z, grad_z=grad_z)
    with without_autocast(o):
        return eager.gradients_of_sums(grad_o, grad_z, o, z)


def _fake_gradients_of_sums(grad_o: Tensor, grad_z: Tensor | None, o: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return o.new_empty(o.shape, dtype=eager.sums_dtype(o.dtype)), z.new_empty(z.shape)


_GRADIENTS_OF_SUMS = register(
    "gradients_of_sums(Tensor grad_o, Tensor? grad_z, Tensor o, Tensor z) -> (Tensor g, Tensor e)",
    _gradients_of_sums,
    _fake_gradients_of_sums,
    kernel_of="o",
)


def _check_piece(g: Tensor, e: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
    operator_checks.check_call(q, k, v, call)
    operator_checks.check_tokens_of_state(q, k)
    operator_checks.check_gradients_of_sums(q, v, g, e)


def _state_of_queries(g: Tensor, e: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, _, _ = _parse(arguments, 0, _UNMASKED)
    _check_piece(g, e, q, k, v, call)
    with without_autocast(q):
        return *eager.state_of_queries(g, e, q, k, v, call), _nothing_saved(k)


def _fake_state_of_queries(
    g: Tensor, e: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    call, _, (keep,) = _parse(arguments, 0, _UNMASKED)
    return _fake_state_of_tokens(k, v, call, keep)


def _state_of_queries_flops(
    g: Tensor, e: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any, out_val: object = None
) -> int:
    """Counts a product with a state for every query."""
    return _products(q, v, _parse(arguments, 0, _UNMASKED)[0], q.shape[1], 0)


_STATE_OF_QUERIES = register(
    f"state_of_queries(Tensor g, Tensor e, Tensor q, Tensor k, Tensor v, {_UNMASKED.schema}, bool keep) "
    "-> (Tensor grad_kv_state, Tensor grad_k_sum, Tensor saved)",
    _state_of_queries,
    _fake_state_of_queries,
    kernel_of="q v",
    flops=_state_of_queries_flops,
)


def _prefill_backward_of_queries(
    g: Tensor, e: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    call, (kv_state, k_sum), _ = _parse(arguments, 2)
    _check_piece(g, e, q, k, v, call)
    kv_state, k_sum = _given_state("kv_state", "k_sum", kv_state, k_sum, k, v, call.score.order)
    operator_checks.check_state(q, k, v, call.score.order, kv_state=kv_state, k_sum=k_sum)
    with without_autocast(q):
        grad_q, pairs = eager.backward_of_queries(g, e, q, k, v, call, (kv_state, k_sum))
    return grad_q, e.new_empty(0) if pairs is None else pairs


def _fake_prefill_backward_of_queries(
    g: Tensor, e: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    call, _, _ = _parse(arguments, 2)
    return eager.empty_like_layout(q, q.shape[-1]), e.new_empty(0 if call.log_decay is None else e.shape)


def _prefill_backward_of_queries_flops(
    g: Tensor, e: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any, out_val: object = None
) -> int:
    """Counts a product with a state for every key and query, and three of the five products of an intra-chunk pair."""
    return _products(q, v, _parse(arguments, 2)[0], k.shape[1] + q.shape[1], 2 * q.shape[3] + v.shape[3])


_PREFILL_BACKWARD_OF_QUERIES = register(
    f"prefill_backward_of_queries(Tensor g, Tensor e, Tensor q, Tensor k, Tensor v, {CONTINUED.tensors_schema}, "
    f"Tensor? kv_state, Tensor? k_sum, {CONTINUED.options_schema}) -> (Tensor grad_q, Tensor pairs)",
    _prefill_backward_of_queries,
    _fake_prefill_backward_of_queries,
    kernel_of="q v",
    flops=_prefill_backward_of_queries_flops,
)


def _prefill_backward_of_keys_(
    g: Tensor,
    e: Tensor,
    grad_kv_state: Tensor | None,
    grad_k_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    call, (pairs, pairs_of_states, saved), _ = _parse(arguments, 3)
    _check_piece(g, e, q, k, v, call)
    names = ("grad_new_kv_state", "grad_new_k_sum")
    state_grads = _given_state(*names, grad_kv_state, grad_k_sum, k, v, call.score.order)
    operator_checks.check_state(q, k, v, call.score.order, **dict(zip(names, state_grads, strict=True)))
    operator_checks.check_saved(k, saved)
    operator_checks.check_pairs(q, k, call.log_decay, pairs, pairs_of_states)
    with without_autocast(q):
        grads, of_tensors = eager.backward_of_keys(g, e, q, k, v, call, state_grads, pairs, pairs_of_states)
    return *grads, *_with_empty(of_tensors, q)


def _fake_prefill_backward_of_keys_(
    g: Tensor,
    e: Tensor,
    grad_kv_state: Tensor | None,
    grad_k_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    call, _, _ = _parse(arguments, 3)
    return *(eager.empty_like_layout(x, x.shape[-1]) for x in (k, v)), *_fake_gradients(call, q)


def _prefill_backward_of_keys_flops(
    g: Tensor,
    e: Tensor,
    grad_kv_state: Tensor | None,
    grad_k_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *arguments: Any,
    out_val: object = None,
) -> int:
    """Counts the rest of `prefill_backward`, without the products of the queries if their states were saved."""
    call, (_, _, saved), _ = _parse(arguments, 3)
    passes = 2 * k.shape[1] if saved.numel() > 0 else 2 * k.shape[1] + q.shape[1]
    return _products(q, v, call, passes, q.shape[3] + v.shape[3])


_PREFILL_BACKWARD_OF_KEYS_ = register(
    "prefill_backward_of_keys_(Tensor g, Tensor e, Tensor? grad_new_kv_state, Tensor? grad_new_k_sum, Tensor q, Tensor k, "
    f"Tensor v, {CONTINUED.tensors_schema}, Tensor? pairs, Tensor? pairs_of_states, Tensor(a!) saved, "
    f"{CONTINUED.options_schema}) -> ({CONTINUED.gradients_schema.removeprefix('Tensor grad_q, ')})",
    _prefill_backward_of_keys_,
    _fake_prefill_backward_of_keys_,
    kernel_of="q v",
    flops=_prefill_backward_of_keys_flops,
)

for _state_operator in (_STATE_OF_KEYS, _STATE_OF_QUERIES):
    refuse_derivatives(_state_operator, refuse_derivative_of_state)
