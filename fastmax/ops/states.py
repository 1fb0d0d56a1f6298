"""`prefill`, its gradient, and both in pieces: `state_of_keys`, `prefill_kept_` and their like."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax import eager
from fastmax.core.call import Call
from fastmax.core.score import Score
from fastmax.ops import checks as operator_checks
from fastmax.ops import extension, registration
from fastmax.ops.autocast import without_autocast
from fastmax.ops.autograd import (
    PREFILL_GRADIENTS,
    Prefill,
    compute,
    refuse_derivative_of_state,
    refuse_second_derivative_of_prefill,
    register_gradient,
)
from fastmax.ops.precision import allow_tf32_of
from fastmax.ops.registration import LIBRARY

_OPERATORS = torch.ops.fastmax

registration.define(
    "prefill(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, Tensor? log_decay, Tensor? first_key, "
    "Tensor values, Tensor weights, float scale, float a0, float a1, float a2, int p, bool allow_tf32) "
    "-> (Tensor o, Tensor z, Tensor new_values, Tensor new_weights)"
)

registration.define(
    f"prefill_backward(Tensor grad_o, Tensor? grad_z, Tensor? grad_new_values, Tensor? grad_new_weights, "
    "Tensor q, Tensor k, Tensor v, Tensor o, Tensor z, Tensor? new_values, Tensor? new_weights, Tensor? attention_mask, "
    "Tensor? log_decay, Tensor? first_key, Tensor values, Tensor weights, float scale, float a0, float a1, float a2, "
    f"int p, bool allow_tf32) -> ({PREFILL_GRADIENTS})"
)

registration.define(
    "state_of_keys(Tensor k, Tensor v, Tensor? attention_mask, Tensor? log_decay, Tensor? first_key, "
    "float scale, float a0, float a1, float a2, int p, bool allow_tf32, bool keep) "
    "-> (Tensor values, Tensor weights, Tensor kept)"
)

registration.define(
    "prefill_kept_(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, Tensor? log_decay, Tensor? first_key, "
    "Tensor? values, Tensor? weights, Tensor(a!) kept, float scale, float a0, float a1, float a2, int p, bool allow_tf32) "
    "-> (Tensor o, Tensor z)"
)

registration.define("gradients_of_sums(Tensor grad_o, Tensor? grad_z, Tensor o, Tensor z) -> (Tensor g, Tensor e)")

registration.define(
    "state_of_queries(Tensor g, Tensor e, Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? first_key, "
    "float scale, float a0, float a1, float a2, int p, bool allow_tf32, bool keep) "
    "-> (Tensor grad_values, Tensor grad_weights, Tensor kept)"
)

registration.define(
    "prefill_backward_of_queries(Tensor g, Tensor e, Tensor q, Tensor k, Tensor v, Tensor? attention_mask, "
    "Tensor? log_decay, Tensor? first_key, Tensor? values, Tensor? weights, float scale, float a0, float a1, float a2, "
    "int p, bool allow_tf32, int event) -> (Tensor grad_q, Tensor pairs)"
)

registration.define(
    "prefill_backward_of_keys_(Tensor g, Tensor e, Tensor? grad_new_values, Tensor? grad_new_weights, Tensor q, "
    "Tensor k, Tensor v, Tensor? attention_mask, Tensor? log_decay, Tensor? first_key, Tensor? pairs, "
    "Tensor? pairs_of_states, Tensor(a!) kept, float scale, float a0, float a1, float a2, int p, bool allow_tf32) "
    "-> (Tensor grad_k, Tensor grad_v, Tensor grad_log_decay)"
)


def prefill(
    q: Tensor, k: Tensor, v: Tensor, call: Call, values: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention of n tokens that continue from a state, on 4-d, checked arguments: output, denominators (b, h, n),
    values and weights; see `fastmax.decoding`. Transforms of torch.func and forward mode see PyTorch operations."""
    if eager.is_transformed():
        return eager.forward_from_state(q, k, v, call, values, weights)
    tensors = (q, k, v, call.attention_mask, call.log_decay, call.first_key, values, weights)
    return compute(_PREFILL, tensors, (*call.score, allow_tf32_of(q)))


def prefill_backward(
    grads: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    call: Call,
    values: Tensor,
    weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_decay (of no elements where there is none), values and weights of `prefill`, from its results
    and their gradients, for callers that take the gradient of the new state from elsewhere. Not recorded."""
    tensors = (call.attention_mask, call.log_decay, call.first_key, values, weights)
    return extension.call(_PREFILL.backward, *grads, q, k, v, *results, *tensors, *call.score, allow_tf32_of(q))


def state_of_keys(k: Tensor, v: Tensor, call: Call, keep: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Values and weights in which `prefill` ends that begins with a state of zeros; with `keep` also, for `prefill_kept_`, what
    was computed on the way, uint8 (b, hk, bytes), where there are kernels that keep it: else of no bytes. Not recorded."""
    tensors = (k, v, call.attention_mask, call.log_decay, call.first_key)
    return extension.call(_OPERATORS.state_of_keys.default, *tensors, *call.score, allow_tf32_of(k), keep)


def prefill_kept_(
    q: Tensor, k: Tensor, v: Tensor, call: Call, values: Tensor | None, weights: Tensor | None, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and denominators of `prefill`, by what `state_of_keys` kept of the same keys and call, which is used up; without a
    state, of a call that begins with one of zeros. Not recorded."""
    tensors = (q, k, v, call.attention_mask, call.log_decay, call.first_key, values, weights, kept)
    return extension.call(_OPERATORS.prefill_kept_.default, *tensors, *call.score, allow_tf32_of(q))


def gradients_of_sums(grad_o: Tensor, grad_z: Tensor | None, o: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Of o = sum_j w_j v_j / z, z = sum_j w_j the gradients g of the first sum, grad_o / z (b, h, n, dv), and e of the second,
    grad_z - grad_o . o / z (b, h, n): what the gradient of `prefill` takes in pieces. Both are 0 where z is. g is of o's dtype,
    or float32 for float16. Not recorded."""
    return extension.call(_OPERATORS.gradients_of_sums.default, grad_o, grad_z, o, z)


def state_of_queries(
    g: Tensor, e: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of values and weights by `prefill_backward` where the new state has none; with `keep` also what
    `prefill_backward_of_keys_` takes, as `state_of_keys`. Not recorded."""
    tensors = (g, e, q, k, v, call.log_decay, call.first_key)
    return extension.call(_OPERATORS.state_of_queries.default, *tensors, *call.score, allow_tf32_of(q), keep)


def prefill_backward_of_queries(
    g: Tensor,
    e: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    values: Tensor | None,
    weights: Tensor | None,
    event: torch.cuda.Event | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of q by `prefill_backward`, without a state of a call that began with one of zeros; with a decay also what
    `prefill_backward_of_keys_` takes as `pairs`. Nothing of it depends on what is behind the tokens. Not recorded.

    Args:
        event: which was recorded before, and is again where kernels have done about a third of a call that they cut in pieces.
    """
    tensors = (g, e, q, k, v, call.attention_mask, call.log_decay, call.first_key, values, weights)
    handle = 0 if event is None else event.cuda_event
    return extension.call(_OPERATORS.prefill_backward_of_queries.default, *tensors, *call.score, allow_tf32_of(q), handle)


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
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of k, v and log_decay (of no elements where there is none) by `prefill_backward`, by what
    `state_of_queries` kept of the same queries and call, which is used up. Not recorded.

    Args:
        of_state: gradients of the state that the call ended in, None for zeros.
        pairs: of `prefill_backward_of_queries`.
        pairs_of_states: with a decay, float64 (b, hk, 2): the sum of the products of the state that the call ended in and its
            gradient, and of the one that it began with.
    """
    tensors = (call.attention_mask, call.log_decay, call.first_key, pairs, pairs_of_states, kept)
    operator = _OPERATORS.prefill_backward_of_keys_.default
    return extension.call(operator, g, e, *of_state, q, k, v, *tensors, *call.score, allow_tf32_of(q))


def _prefill_call(q, k, v, mask, log_decay, first_key, values, weights, scale, a0, a1, a2, p, allow_tf32):
    """The call, checked."""
    score = Score(scale, a0, a1, a2, p)
    call = Call(score, causal=True, attention_mask=mask, log_decay=log_decay, first_key=first_key)
    operator_checks.check_call(q, k, v, call)
    operator_checks.check_state(q, k, v, p, values=values, weights=weights)
    return call


def _nothing_kept(k):
    """PyTorch operations keep nothing."""
    return k.new_empty(*k.shape[:2], 0, dtype=torch.uint8)


def _state_of_keys(k, v, mask, log_decay, first_key, scale, a0, a1, a2, p, allow_tf32, keep):
    call = Call(Score(scale, a0, a1, a2, p), True, attention_mask=mask, log_decay=log_decay, first_key=first_key)
    operator_checks.check_call(k, k, v, call)
    with without_autocast(k):
        return *eager.state_of_keys(k, v, call), _nothing_kept(k)


def _prefill_kept_(q, k, v, mask, log_decay, first_key, values, weights, kept, *options):
    operator_checks.check_kept(k, kept)
    values, weights = _given_state("values", "weights", values, weights, k, v, options[4])
    return _prefill(q, k, v, mask, log_decay, first_key, values, weights, *options)[:2]


def _given_state(values_name, weights_name, values, weights, k, v, p):
    """Zeros where there is none."""
    operator_checks.check_together(values_name, weights_name, values, weights)
    return eager.zero_state(k, v, p) if values is None else (values, weights)


def _gradients_of_sums(grad_o, grad_z, o, z):
    operator_checks.check_output(o)
    operator_checks.check_results(o, o, grad_o=grad_o, z=z, grad_z=grad_z)
    with without_autocast(o):
        return eager.gradients_of_sums(grad_o, grad_z, o, z)


def _call_in_pieces(g, e, q, k, v, mask, log_decay, first_key, score):
    """The call, checked."""
    call = Call(Score(*score), True, attention_mask=mask, log_decay=log_decay, first_key=first_key)
    operator_checks.check_call(q, k, v, call)
    operator_checks.check_tokens_of_state(q, k)
    operator_checks.check_gradients_of_sums(q, v, g, e)
    return call


def _state_of_queries(g, e, q, k, v, log_decay, first_key, *options):
    call = _call_in_pieces(g, e, q, k, v, None, log_decay, first_key, options[:5])
    with without_autocast(q):
        return *eager.state_of_queries(g, e, q, k, v, call), _nothing_kept(k)


def _prefill_backward_of_queries(g, e, q, k, v, mask, log_decay, first_key, values, weights, *options):
    call = _call_in_pieces(g, e, q, k, v, mask, log_decay, first_key, options[:5])
    values, weights = _given_state("values", "weights", values, weights, k, v, call.score.order)
    operator_checks.check_state(q, k, v, call.score.order, values=values, weights=weights)
    with without_autocast(q):
        grad_q, pairs = eager.backward_of_queries(g, e, q, k, v, call, (values, weights))
    return grad_q, e.new_empty(0) if pairs is None else pairs


def _prefill_backward_of_keys_(
    g, e, grad_values, grad_weights, q, k, v, mask, log_decay, first_key, pairs, pairs_of_states, kept, *options
):
    call = _call_in_pieces(g, e, q, k, v, mask, log_decay, first_key, options[:5])
    names = ("grad_new_values", "grad_new_weights")
    state_grads = _given_state(*names, grad_values, grad_weights, k, v, call.score.order)
    operator_checks.check_state(q, k, v, call.score.order, **dict(zip(names, state_grads, strict=True)))
    operator_checks.check_kept(k, kept)
    operator_checks.check_pairs(q, k, call.log_decay, pairs, pairs_of_states)
    with without_autocast(q):
        grads, grad_decay = eager.backward_of_keys(g, e, q, k, v, call, state_grads, pairs, pairs_of_states)
    return *grads, q.new_empty(0) if grad_decay is None else grad_decay


def _prefill(q, k, v, *arguments):
    call, (values, weights) = _prefill_call(q, k, v, *arguments), arguments[3:5]
    with without_autocast(q):
        o, z, *state = eager.forward_from_state(q, k, v, call, values, weights)
    if q.numel() == 0:  # operators return no tensor that they were given
        state = (x.clone(memory_format=torch.contiguous_format) for x in state)
    return o, z, *state


def _prefill_backward(grad_o, grad_z, grad_new_values, grad_new_weights, q, k, v, o, z, new_values, new_weights, *arguments):
    """Gradients of q, k, v, log_decay (of no elements where there is none), values and weights."""
    call = _prefill_call(q, k, v, *arguments)
    operator_checks.check_results(q, v, o=o, grad_o=grad_o, z=z, grad_z=grad_z)
    states = eager.States(arguments[3:5], (new_values, new_weights), (grad_new_values, grad_new_weights))
    operator_checks.check_states(q, states, call.log_decay)
    with without_autocast(q):
        grads, grad_decay, of_state = eager.backward_from_state(grad_o, grad_z, q, k, v, o, z, call, states)
    return *grads, q.new_empty(0) if grad_decay is None else grad_decay, *of_state


registration.implement("prefill", _prefill)

registration.implement("prefill_backward", _prefill_backward)

registration.implement("state_of_keys", _state_of_keys)

registration.implement("prefill_kept_", _prefill_kept_)

registration.implement("gradients_of_sums", _gradients_of_sums)

registration.implement("state_of_queries", _state_of_queries)

registration.implement("prefill_backward_of_queries", _prefill_backward_of_queries)

registration.implement("prefill_backward_of_keys_", _prefill_backward_of_keys_)


@torch.library.register_fake("fastmax::prefill", lib=LIBRARY)
def _prefill_fake(q, k, v, mask, log_decay, first_key, values, weights, scale, a0, a1, a2, p, allow_tf32):
    state = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (values, weights))
    return eager.empty_like_layout(q, v.shape[-1]), values.new_empty(q.shape[:3]), *state


@torch.library.register_fake("fastmax::prefill_backward", lib=LIBRARY)
def _prefill_backward_fake(
    grad_o, grad_z, grad_new_values, grad_new_weights, q, k, v, o, z, new_values, new_weights,
    mask, log_decay, first_key, values, weights, *options,
):  # fmt: skip
    of_decay, *state = (
        q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (log_decay, values, weights)
    )
    return *(eager.empty_like_layout(x, x.shape[-1]) for x in (q, k, v)), of_decay, *state


@torch.library.register_fake("fastmax::state_of_keys", lib=LIBRARY)
def _state_of_keys_fake(k, v, mask, log_decay, first_key, scale, a0, a1, a2, p, allow_tf32, keep):
    values = k.new_empty(*k.shape[:2], eager.state_rows(k.shape[3], p), v.shape[3], dtype=eager.compute_dtype(k.dtype))
    kept = torch.library.get_ctx().new_dynamic_size() if keep and k.is_cuda else 0  # the library knows
    return values, values.new_empty(values.shape[:3]), k.new_empty(*k.shape[:2], kept, dtype=torch.uint8)


@torch.library.register_fake("fastmax::prefill_kept_", lib=LIBRARY)
def _prefill_kept_fake_(q, k, v, *arguments):
    return eager.empty_like_layout(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=eager.compute_dtype(q.dtype))


@torch.library.register_fake("fastmax::gradients_of_sums", lib=LIBRARY)
def _gradients_of_sums_fake(grad_o, grad_z, o, z):
    return o.new_empty(o.shape, dtype=eager.sums_dtype(o.dtype)), z.new_empty(z.shape)


@torch.library.register_fake("fastmax::state_of_queries", lib=LIBRARY)
def _state_of_queries_fake(g, e, q, k, v, log_decay, first_key, scale, a0, a1, a2, p, allow_tf32, keep):
    return _state_of_keys_fake(k, v, None, log_decay, first_key, scale, a0, a1, a2, p, allow_tf32, keep)


@torch.library.register_fake("fastmax::prefill_backward_of_queries", lib=LIBRARY)
def _prefill_backward_of_queries_fake(g, e, q, k, v, mask, log_decay, *arguments):
    return eager.empty_like_layout(q, q.shape[-1]), e.new_empty(0 if log_decay is None else e.shape)


@torch.library.register_fake("fastmax::prefill_backward_of_keys_", lib=LIBRARY)
def _prefill_backward_of_keys_fake_(g, e, grad_new_values, grad_new_weights, q, k, v, mask, log_decay, *arguments):
    of_decay = q.new_empty(0) if log_decay is None else torch.empty_like(log_decay, memory_format=torch.contiguous_format)
    return *(eager.empty_like_layout(x, x.shape[-1]) for x in (k, v)), of_decay


_PREFILL = Prefill(_OPERATORS.prefill.default, _OPERATORS.prefill_backward.default)

register_gradient(_PREFILL, refuse_second_derivative_of_prefill)

for _state_operator in (_OPERATORS.state_of_keys, _OPERATORS.state_of_queries):
    torch.library.register_autograd(_state_operator.default, refuse_derivative_of_state, lib=LIBRARY)
