"""The registered operators of `torch.ops.fastmax`: `forward`, `backward`, `flash_forward`, `flash_backward`,
`exact_window_forward`, `exact_window_backward`, `exact_tiles_forward`, `exact_tiles_backward`, `merge_`, `far_forward_`,
`far_backward_`, `decode_step`, `decode_step_`, `gathered_step_`, `prefill`, `prefill_backward`, `state_of_keys`,
`prefill_kept_`, `gradients_of_sums`, `state_of_queries`, `prefill_backward_of_queries`, `prefill_backward_of_keys_`,
`finite_decay`, `normalize_tokens`, `normalize_tokens_backward` and `softmax`.

Schemas, fake implementations and gradients are declared here, and the PyTorch implementation is registered for every device.
The compiled library (`fastmax.ops.extension`) adds kernels under the key CUDA, which then take precedence. What they do not
cover (float64, rpe matrices, head dims above 256, old devices) goes to `fastmax::eager_forward` and its like, the PyTorch
implementation under names of its own. Arguments were checked by `fastmax.core.validation`;
`fastmax.core.call` lays them out in a schema;
`fastmax.ops.flops` says what PyTorch's counter counts for them. On every device `exact_window_*` are made of others
(`fastmax.ops.exact_window`); `exact_tiles_*` are the quadratic algorithm in PyTorch operations (`fastmax.eager.exact`).

Only q, k, v, o, the denominators z (b, h, n) (softmax: the log-sum-exp; with an exact window both, and what
`fastmax.ops.exact_window.Forward` names) and what accompanies the call (`fastmax.core.call.Call`) are saved for the backward.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fastmax import eager
from fastmax.core.call import EXACT_TILES, EXACT_WINDOW, FAR, FASTMAX, FLASH, Call, Signature
from fastmax.core.score import Score, Softmax
from fastmax.eager import softmax as row_softmax
from fastmax.ops import checks as operator_checks
from fastmax.ops import exact_window, extension, flops, registration

_NO_SECOND_DERIVATIVE = (
    "fastmax: the custom gradient has no {}; pass use_custom_gradient=False, which differentiates PyTorch operations and "
    "gives the same numbers"
)

_OF_PREFILL = ("q", "k", "v", "log_decay", "values", "weights")
_PREFILL_GRADIENTS = ", ".join(f"Tensor grad_{name}" for name in _OF_PREFILL)

library = registration.LIBRARY
for _prefix in ("", "eager_"):
    registration.define(f"{_prefix}forward(Tensor q, Tensor k, Tensor v, {FASTMAX.schema}) -> (Tensor o, Tensor z)")
    registration.define(
        f"{_prefix}backward(Tensor grad_o, Tensor? grad_z, Tensor q, Tensor k, Tensor v, Tensor o, Tensor z, {FASTMAX.schema}) "
        f"-> ({FASTMAX.gradients_schema})"
    )
    registration.define(f"{_prefix}flash_forward(Tensor q, Tensor k, Tensor v, {FLASH.schema}) -> (Tensor o, Tensor lse)")
    registration.define(
        f"{_prefix}flash_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
        f"{FLASH.schema}) -> ({FLASH.gradients_schema})"
    )
    registration.define(
        f"{_prefix}decode_step(Tensor q, Tensor k, Tensor v, Tensor values, Tensor weights, Tensor? attention_mask, "
        "Tensor? log_decay, float scale, float a0, float a1, float a2, int p) "
        "-> (Tensor o, Tensor new_values, Tensor new_weights)"
    )
    registration.define(
        f"{_prefix}decode_step_(Tensor q, Tensor k, Tensor v, Tensor(a!) values, Tensor(b!) weights, Tensor? attention_mask, "
        "Tensor? log_decay, float scale, float a0, float a1, float a2, int p) -> (Tensor o)"
    )
    registration.define(
        f"{_prefix}gathered_step_(Tensor q, Tensor k, Tensor v, Tensor(a!) values, Tensor(b!) weights, Tensor(c!) near_keys, "
        "Tensor(d!) near_values, Tensor(e!) near_mask, Tensor(f!) near_decays, Tensor(g!) gathered, Tensor? attention_mask, "
        "Tensor? log_decay, int exact_window, float scale, float a0, float a1, float a2, int p) -> (Tensor o)"
    )
    registration.define(
        f"{_prefix}prefill(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, Tensor? log_decay, Tensor? first_key, "
        "Tensor values, Tensor weights, float scale, float a0, float a1, float a2, int p, bool allow_tf32) "
        "-> (Tensor o, Tensor z, Tensor new_values, Tensor new_weights)"
    )
    registration.define(
        f"{_prefix}prefill_backward(Tensor grad_o, Tensor? grad_z, Tensor? grad_new_values, Tensor? grad_new_weights, "
        "Tensor q, Tensor k, Tensor v, Tensor o, Tensor z, Tensor? new_values, Tensor? new_weights, Tensor? attention_mask, "
        "Tensor? log_decay, Tensor? first_key, Tensor values, Tensor weights, float scale, float a0, float a1, float a2, "
        f"int p, bool allow_tf32) -> ({_PREFILL_GRADIENTS})"
    )
    registration.define(
        f"{_prefix}state_of_keys(Tensor k, Tensor v, Tensor? attention_mask, Tensor? log_decay, Tensor? first_key, "
        "float scale, float a0, float a1, float a2, int p, bool allow_tf32, bool keep) "
        "-> (Tensor values, Tensor weights, Tensor kept)"
    )
    registration.define(
        f"{_prefix}prefill_kept_(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, Tensor? log_decay, Tensor? first_key, "
        "Tensor? values, Tensor? weights, Tensor(a!) kept, float scale, float a0, float a1, float a2, int p, bool allow_tf32) "
        "-> (Tensor o, Tensor z)"
    )
    registration.define(
        f"{_prefix}gradients_of_sums(Tensor grad_o, Tensor? grad_z, Tensor o, Tensor z) -> (Tensor g, Tensor e)"
    )
    registration.define(
        f"{_prefix}state_of_queries(Tensor g, Tensor e, Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? first_key, "
        "float scale, float a0, float a1, float a2, int p, bool allow_tf32, bool keep) "
        "-> (Tensor grad_values, Tensor grad_weights, Tensor kept)"
    )
    registration.define(
        f"{_prefix}prefill_backward_of_queries(Tensor g, Tensor e, Tensor q, Tensor k, Tensor v, Tensor? attention_mask, "
        "Tensor? log_decay, Tensor? first_key, Tensor? values, Tensor? weights, float scale, float a0, float a1, float a2, "
        "int p, bool allow_tf32, int event) -> (Tensor grad_q, Tensor pairs)"
    )
    registration.define(
        f"{_prefix}prefill_backward_of_keys_(Tensor g, Tensor e, Tensor? grad_new_values, Tensor? grad_new_weights, Tensor q, "
        "Tensor k, Tensor v, Tensor? attention_mask, Tensor? log_decay, Tensor? first_key, Tensor? pairs, "
        "Tensor? pairs_of_states, Tensor(a!) kept, float scale, float a0, float a1, float a2, int p, bool allow_tf32) "
        "-> (Tensor grad_k, Tensor grad_v, Tensor grad_log_decay)"
    )
    registration.define(
        f"{_prefix}finite_decay(Tensor log_decay, bool continues, bool wide) -> (Tensor finite, Tensor first_key)"
    )
    registration.define(
        f"{_prefix}merge_(Tensor(a!) o, Tensor(b!) lse, Tensor o_far, Tensor z_far, Tensor? shift) -> (Tensor z)"
    )
    registration.define(
        f"{_prefix}far_forward_(Tensor(a!) o, Tensor(b!) lse, Tensor q, Tensor k, Tensor v, {FAR.schema}) -> (Tensor z)"
    )
    registration.define(
        f"{_prefix}far_backward_(Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor(c!) grad_v, Tensor grad_o, Tensor? grad_z, "
        f"Tensor q, Tensor k, Tensor v, Tensor o, Tensor z, {FAR.schema}) -> (Tensor grad_log_decay)"
    )
    registration.define(
        f"{_prefix}normalize_tokens(Tensor q, Tensor k, float lim) "
        "-> (Tensor normalized_q, Tensor normalized_k, Tensor q_factor, Tensor k_factor)"
    )
    registration.define(
        f"{_prefix}normalize_tokens_backward(Tensor? grad_q, Tensor? grad_k, Tensor q, Tensor k, Tensor q_factor, "
        "Tensor k_factor, float lim) -> (Tensor of_q, Tensor of_k)"
    )
    registration.define(f"{_prefix}softmax(Tensor x, str algorithm) -> Tensor")
_EXACT_WINDOW_RESULTS = ", ".join(f"Tensor {name}" for name in exact_window.Forward._fields)
registration.define(f"exact_window_forward(Tensor q, Tensor k, Tensor v, {EXACT_WINDOW.schema}) -> ({_EXACT_WINDOW_RESULTS})")
registration.define(
    f"exact_window_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, {_EXACT_WINDOW_RESULTS}, "
    f"{EXACT_WINDOW.schema}) -> ({EXACT_WINDOW.gradients_schema})"
)
registration.define(f"exact_tiles_forward(Tensor q, Tensor k, Tensor v, {EXACT_TILES.schema}) -> (Tensor o, Tensor lse)")
registration.define(
    "exact_tiles_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{EXACT_TILES.schema}) -> ({EXACT_TILES.gradients_schema})"
)


def attention(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The fused operator on 4-d, checked arguments: output, and denominators or, for softmax and with an exact window, the log
    of the sums of weights."""
    operator = _exact(q, k, v, call) if call.exact_window > 0 else _part(call)
    tensors, options = operator.signature.flatten(call, _allow_tf32(q))
    o, z, *_ = _call(operator, (q, k, v, *tensors), options)
    return o, z


def _allow_tf32(q: Tensor) -> bool:
    return q.is_cuda and q.dtype == torch.float32 and _tf32_is_set()


def _tf32_is_set() -> bool:
    """What `torch.set_float32_matmul_precision` and its newer forms come to for CUDA."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# What `torch.compiler.assume_constant_result` does, without importing the compiler, which takes seconds. Compiled code is
# guarded by the setting all the same.
_tf32_is_set._dynamo_marked_constant = True


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: Tensor,
    weights: Tensor,
    mask: Tensor | None,
    log_decay: Tensor | None,
    score: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    """One recurrent step on 4-d, checked arguments: output, values and weights; see `fastmax.decoding`. log_decay
    (b, hk, 1), in the dtype of the state; above 0 counts as 0."""
    tensors = (q, k, v, values, weights, mask, log_decay)
    if eager.differentiating(*tensors):
        return eager.decode_step(*tensors, score)
    if q.is_cuda and not torch.compiler.is_compiling():
        extension.warn_if_unused(q.device)
    if torch.compiler.is_compiling():
        return torch.ops.fastmax.decode_step.default(*tensors, *score)
    return extension.call(torch.ops.fastmax.decode_step.default, *tensors, *score)


def decode_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: Tensor,
    weights: Tensor,
    mask: Tensor | None,
    log_decay: Tensor | None,
    score: Score,
) -> Tensor:
    """`decode_step` that writes over `values` and `weights`, which are contiguous and overlap nothing else: the output.

    Raises:
        RuntimeError: a gradient would have to be recorded.
    """
    tensors = (q, k, v, values, weights, mask, log_decay)
    refuse_to_record(*tensors)
    if torch.compiler.is_compiling():
        return torch.ops.fastmax.decode_step_.default(*tensors, *score)
    if q.is_cuda:
        extension.warn_if_unused(q.device)
    torch.autograd.graph.increment_version((values, weights))
    with torch._C._AutoDispatchBelowADInplaceOrView():  # past what is registered there and for autograd, done here for less
        return extension.call(torch.ops.fastmax.decode_step_.default, *tensors, *score)


def gathered_step_(
    q: Tensor,
    token: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    sums: tuple[Tensor, Tensor],
    kept: tuple[Tensor, Tensor, Tensor, Tensor],
    gathered: Tensor,
    exact_window: int,
    score: Score,
) -> Tensor:
    """A step that writes over a state that gathers tokens, on 4-d, checked arguments: the output; see `fastmax.decoding`. The
    token and those that are kept: keys, values, mask and decays, in the dtype of the sums.

    Raises:
        RuntimeError: a gradient would have to be recorded.
    """
    k, v, mask, log_decay = token
    written = (*sums, *kept, gathered)
    tensors = (q, k, v, *written, mask, log_decay)
    refuse_to_record(*tensors)
    if torch.compiler.is_compiling():
        return torch.ops.fastmax.gathered_step_.default(*tensors, exact_window, *score)
    if q.is_cuda:
        extension.warn_if_unused(q.device)
    torch.autograd.graph.increment_version(written)
    with torch._C._AutoDispatchBelowADInplaceOrView():  # as decode_step_
        return extension.call(torch.ops.fastmax.gathered_step_.default, *tensors, exact_window, *score)


def refuse_to_record(*tensors: Tensor | None) -> None:
    if eager.differentiating(*tensors):
        raise RuntimeError(
            "fastmax.decoding.step_ writes over the state that a gradient would need: use fastmax.decoding.step, "
            "or call it under torch.no_grad()"
        )


def prefill(
    q: Tensor, k: Tensor, v: Tensor, call: Call, values: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention of n tokens that continue from a state, on 4-d, checked arguments: output, denominators (b, h, n),
    values and weights; see `fastmax.decoding.functional`. Transforms of torch.func and forward mode see PyTorch operations."""
    if eager.is_transformed():
        return eager.forward_from_state(q, k, v, call, values, weights)
    tensors = (q, k, v, call.attention_mask, call.log_decay, call.first_key, values, weights)
    return _call(_PREFILL, tensors, (*call.score, _allow_tf32(q)))


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
    return extension.call(_PREFILL.backward, *grads, q, k, v, *results, *tensors, *call.score, _allow_tf32(q))


def state_of_keys(k: Tensor, v: Tensor, call: Call, keep: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Values and weights in which `prefill` ends that begins with a state of zeros; with `keep` also, for `prefill_kept_`, what
    was computed on the way, uint8 (b, hk, bytes), where there are kernels that keep it: else of no bytes. Not recorded."""
    tensors = (k, v, call.attention_mask, call.log_decay, call.first_key)
    return extension.call(_OPERATORS.state_of_keys.default, *tensors, *call.score, _allow_tf32(k), keep)


def prefill_kept_(
    q: Tensor, k: Tensor, v: Tensor, call: Call, values: Tensor | None, weights: Tensor | None, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and denominators of `prefill`, by what `state_of_keys` kept of the same keys and call, which is used up; without a
    state, of a call that begins with one of zeros. Not recorded."""
    tensors = (q, k, v, call.attention_mask, call.log_decay, call.first_key, values, weights, kept)
    return extension.call(_OPERATORS.prefill_kept_.default, *tensors, *call.score, _allow_tf32(q))


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
    return extension.call(_OPERATORS.state_of_queries.default, *tensors, *call.score, _allow_tf32(q), keep)


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
    return extension.call(_OPERATORS.prefill_backward_of_queries.default, *tensors, *call.score, _allow_tf32(q), handle)


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
    return extension.call(operator, g, e, *of_state, q, k, v, *tensors, *call.score, _allow_tf32(q))


def attention_backward(
    grad_o: Tensor, grad_z: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, z: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and log_decay of `attention`, from what it returns, without an exact window. Where o and z are of
    more keys than these, the gradients are this part of the whole. Not recorded."""
    operator = _part(call)
    tensors, options = operator.signature.flatten(call, _allow_tf32(q))
    saved = (q, k, v, o, z, *tensors)
    grads = extension.call(operator.by_name, saved, options, grad_o, grad_z)
    return grads["q"], grads["k"], grads["v"], None if call.log_decay is None else grads["log_decay"]


def finite_decay(log_decay: Tensor, continues: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Checked decays (b, hk, m) taken apart: finite ones or NaN in a dtype, 0 where -inf or more than 0 was, and the first key
    that a query at the place of a token may see, int32 (b, hk, m): the last token up to that which forgets, else 0, or -1 with
    `continues`."""
    if not log_decay.is_cuda or eager.is_transformed():
        return eager.finite_decay(log_decay, continues, dtype)
    wide = dtype == torch.float64
    if torch.compiler.is_compiling():
        return torch.ops.fastmax.finite_decay.default(log_decay, continues, wide)
    return _FiniteDecay.apply(log_decay, continues, wide)


def normalize_tokens(q: Tensor, k: Tensor, lim: float) -> tuple[Tensor, Tensor]:
    """4-d, checked q and k with their rows that are longer than `lim` scaled back to it."""
    q, k, *_ = _call(_NORMALIZATION, (q, k), (lim,))
    return q, k


def softmax(x: Tensor, algorithm: str) -> Tensor:
    """Softmax over the last dimension of a checked tensor; algorithm is "safe" or "online". There are no rules for what
    `eager.is_transformed` tells of."""
    if torch.compiler.is_compiling():
        return torch.ops.fastmax.softmax.default(x, algorithm)
    if x.is_cuda:
        extension.warn_if_unused(x.device)
    if torch.is_grad_enabled() and x.requires_grad:
        return extension.call(torch.ops.fastmax.softmax.default, x, algorithm)
    with torch._C._AutoDispatchBelowAutograd():  # saves 15 us of Python on the way through `register_autograd`
        return extension.call(torch.ops.fastmax.softmax.default, x, algorithm)


def _forward(q, k, v, *arguments, signature=FASTMAX):
    call = signature.call(arguments)
    operator_checks.check_call(q, k, v, call)
    with without_autocast(q):
        return eager.forward(q, k, v, call, differentiable=False)


def _backward(grad_o, grad_z, q, k, v, o, z, *arguments, signature=FASTMAX, statistic="z"):
    """Gradients of q, k, v and of the call's differentiable tensors, of no elements for those that it has not."""
    call = signature.call(arguments)
    operator_checks.check_call(q, k, v, call)
    operator_checks.check_results(q, v, o=o, grad_o=grad_o, **{statistic: z, f"grad_{statistic}": grad_z})
    with without_autocast(q):
        grads, of_tensors = eager.backward(grad_o, grad_z, q, k, v, o, z, call)
    return *grads, *(q.new_empty(0) if x is None else x for x in (of_tensors[name] for name in signature.differentiable))


def _flash_forward(q, k, v, *arguments):
    return _forward(q, k, v, *arguments, signature=FLASH)


def _flash_backward(grad_o, grad_lse, q, k, v, o, lse, *arguments):
    return _backward(grad_o, grad_lse, q, k, v, o, lse, *arguments, signature=FLASH, statistic="lse")


def _check_exact_window(q, k, v, call):
    operator_checks.check_call(q, k, v, call)
    operator_checks.check_exact_window(q, k, call)


def _exact_tiles_forward(q, k, v, *arguments):
    _check_exact_window(q, k, v, EXACT_TILES.call(arguments))
    return _forward(q, k, v, *arguments, signature=EXACT_TILES)


def _exact_tiles_backward(grad_o, grad_lse, q, k, v, o, lse, *arguments):
    _check_exact_window(q, k, v, EXACT_TILES.call(arguments))
    return _backward(grad_o, grad_lse, q, k, v, o, lse, *arguments, signature=EXACT_TILES, statistic="lse")


def _exact_window_forward(q, k, v, *arguments):
    call = EXACT_WINDOW.call(arguments)
    _check_exact_window(q, k, v, call)

    def attend(q, k, v, call):
        operator = _part(call)
        tensors, options = operator.signature.flatten(call, arguments[-1])
        return extension.call(operator.forward, q, k, v, *tensors, *options)

    def attend_far_(o, lse, q, k, v, call):
        tensors, options = FAR.flatten(call, arguments[-1])
        return extension.call(torch.ops.fastmax.far_forward_.default, o, lse, q, k, v, *tensors, *options)

    merge = partial(extension.call, torch.ops.fastmax.merge_.default)
    with without_autocast(q):
        return exact_window.forward(q, k, v, call, attend, attend_far_, merge)


def _exact_window_backward(grad_o, grad_lse, q, k, v, *arguments):
    outputs = len(exact_window.Forward._fields)
    results, call = exact_window.Forward(*arguments[:outputs]), EXACT_WINDOW.call(arguments[outputs:])
    _check_exact_window(q, k, v, call)
    operator_checks.check_results(q, v, o=results.o, grad_o=grad_o, lse=results.lse, grad_lse=grad_lse)
    operator_checks.check_parts(q, k, v, results, call)

    def differentiate(grad_o, grad_z, q, k, v, o, z, call):
        operator = _part(call)
        tensors, options = operator.signature.flatten(call, arguments[-1])
        grads = extension.call(operator.backward, grad_o, grad_z, q, k, v, o, z, *tensors, *options)
        return operator.signature.gradients(grads)

    def differentiate_far_(into, grad_o, grad_z, q, k, v, o, z, call):
        tensors, options = FAR.flatten(call, arguments[-1])
        operator = torch.ops.fastmax.far_backward_.default
        return extension.call(operator, *into, grad_o, grad_z, q, k, v, o, z, *tensors, *options)

    with without_autocast(q):
        grads = exact_window.backward(grad_o, grad_lse, q, k, v, results, call, differentiate, differentiate_far_)
    return tuple(grads[name] for name in EXACT_WINDOW.gradient_names)


def _merge_(o, lse, o_far, z_far, shift):
    operator_checks.check_merge(o, lse, o_far, z_far, shift)
    with without_autocast(o):
        return eager.merge_(o, lse, o_far, z_far, shift)


def _far_call(q, k, v, arguments):
    call = FAR.call(arguments)._replace(causal=True)
    operator_checks.check_call(q, k, v, call)
    return call


def _far_forward_(o, lse, q, k, v, *arguments):
    """Joins attention over far keys to o and lse of near ones: the sums of weights of both, as `merge_` returns them."""
    tensors, options = FASTMAX.flatten(_far_call(q, k, v, arguments), arguments[-1])
    operator_checks.check_joined(q, o=(o, (*q.shape[:3], v.shape[3])))
    operator_checks.check_results(q, v, lse=lse)
    o_far, z_far = extension.call(torch.ops.fastmax.forward.default, q, k, v, *tensors, *options)
    return extension.call(torch.ops.fastmax.merge_.default, o, lse, o_far, z_far, None)


def _far_backward_(grad_q, grad_k, grad_v, grad_o, grad_z, q, k, v, o, z, *arguments):
    """Adds to gradients of q, k and v those by far keys, o and z being of all keys; that of log_decay, or no elements."""
    tensors, options = FASTMAX.flatten(_far_call(q, k, v, arguments), arguments[-1])
    operator_checks.check_joined(q, grad_q=(grad_q, q.shape), grad_k=(grad_k, k.shape), grad_v=(grad_v, v.shape))
    operator_checks.check_results(q, v, o=o, grad_o=grad_o, z=z, grad_z=grad_z)
    grads = extension.call(torch.ops.fastmax.backward.default, grad_o, grad_z, q, k, v, o, z, *tensors, *options)
    grads = FASTMAX.gradients(grads)
    for name, whole in (("q", grad_q), ("k", grad_k), ("v", grad_v)):
        whole.add_(grads[name])
    return grads["log_decay"]


def _decode_step(q, k, v, values, weights, mask, log_decay, scale, a0, a1, a2, p):
    with without_autocast(q):
        return eager.decode_step(q, k, v, values, weights, mask, log_decay, Score(scale, a0, a1, a2, p))


def _decode_step_(q, k, v, values, weights, mask, log_decay, scale, a0, a1, a2, p):
    with without_autocast(q):
        return eager.decode_step_(q, k, v, values, weights, mask, log_decay, Score(scale, a0, a1, a2, p))


def _gathered_step_(
    q, k, v, values, weights, near_keys, near_values, near_mask, near_decays, gathered, mask, log_decay, exact_window, *score
):
    kept = near_keys, near_values, near_mask, near_decays
    with without_autocast(q):
        return eager.gathered_step_(q, k, v, values, weights, *kept, gathered, mask, log_decay, exact_window, Score(*score))


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


def _finite_decay(log_decay, continues, wide):
    if log_decay.dim() != 3:
        raise ValueError(f"log_decay must have shape (b, hk, m), got {tuple(log_decay.shape)}")
    finite, first_key = eager.finite_decay(log_decay, continues, torch.float64 if wide else torch.float32)
    return finite.contiguous(), first_key.contiguous()


def _normalize_tokens(q, k, lim):
    operator_checks.check_normalization(q, k, lim)
    with without_autocast(q):
        return eager.normalize_tokens(q, k, lim)


def _normalize_tokens_backward(grad_q, grad_k, q, k, q_factor, k_factor, lim):
    """Gradients of q and k, from the results of the forward."""
    operator_checks.check_normalization(q, k, lim)
    operator_checks.check_normalized("q", q, grad_q, q_factor)
    operator_checks.check_normalized("k", k, grad_k, k_factor)
    with without_autocast(q):
        return eager.normalize_tokens_backward(grad_q, grad_k, q, k, q_factor, k_factor, lim)


def _softmax(x, algorithm):
    with without_autocast(x):
        return row_softmax.forward(x, algorithm)


def in_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the tensor's device; "meta" is one that it does not know."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():  # a device's name costs a microsecond
        return False
    device = x.device.type
    return device != "meta" and torch.is_autocast_enabled(device)


def autocast_to(x: object, dtype: torch.dtype) -> object:
    """What autocast makes of an argument: floating-point tensors in its dtype, but float64, as PyTorch's own operators do."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x


_NOTHING = nullcontext()


def without_autocast(x: Tensor):
    """Autocast must not reach the accumulations; entering its context costs more than asking."""
    return torch.autocast(x.device.type, enabled=False) if in_autocast(x) else _NOTHING


for _name, _implementation in {
    "forward": _forward,
    "eager_forward": _forward,
    "backward": _backward,
    "eager_backward": _backward,
    "flash_forward": _flash_forward,
    "eager_flash_forward": _flash_forward,
    "flash_backward": _flash_backward,
    "eager_flash_backward": _flash_backward,
    "exact_window_forward": _exact_window_forward,
    "exact_window_backward": _exact_window_backward,
    "exact_tiles_forward": _exact_tiles_forward,
    "exact_tiles_backward": _exact_tiles_backward,
    "merge_": _merge_,
    "eager_merge_": _merge_,
    "far_forward_": _far_forward_,
    "eager_far_forward_": _far_forward_,
    "far_backward_": _far_backward_,
    "eager_far_backward_": _far_backward_,
    "decode_step": _decode_step,
    "eager_decode_step": _decode_step,
    "decode_step_": _decode_step_,
    "eager_decode_step_": _decode_step_,
    "gathered_step_": _gathered_step_,
    "eager_gathered_step_": _gathered_step_,
    "prefill": _prefill,
    "eager_prefill": _prefill,
    "prefill_backward": _prefill_backward,
    "eager_prefill_backward": _prefill_backward,
    "state_of_keys": _state_of_keys,
    "eager_state_of_keys": _state_of_keys,
    "prefill_kept_": _prefill_kept_,
    "eager_prefill_kept_": _prefill_kept_,
    "gradients_of_sums": _gradients_of_sums,
    "eager_gradients_of_sums": _gradients_of_sums,
    "state_of_queries": _state_of_queries,
    "eager_state_of_queries": _state_of_queries,
    "prefill_backward_of_queries": _prefill_backward_of_queries,
    "eager_prefill_backward_of_queries": _prefill_backward_of_queries,
    "prefill_backward_of_keys_": _prefill_backward_of_keys_,
    "eager_prefill_backward_of_keys_": _prefill_backward_of_keys_,
    "finite_decay": _finite_decay,
    "eager_finite_decay": _finite_decay,
    "normalize_tokens": _normalize_tokens,
    "eager_normalize_tokens": _normalize_tokens,
    "normalize_tokens_backward": _normalize_tokens_backward,
    "eager_normalize_tokens_backward": _normalize_tokens_backward,
    "softmax": _softmax,
    "eager_softmax": _softmax,
}.items():
    if _name.startswith("eager_"):
        _implementation = extension.remembering(_implementation)
    library.impl(_name, _implementation, "CompositeExplicitAutograd")
extension.load()


@torch.library.register_fake("fastmax::forward", lib=library)
@torch.library.register_fake("fastmax::flash_forward", lib=library)
@torch.library.register_fake("fastmax::exact_tiles_forward", lib=library)
def _forward_fake(q, k, v, *arguments):
    return eager.empty_like_layout(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=eager.compute_dtype(q.dtype))


@torch.library.register_fake("fastmax::backward", lib=library)
def _backward_fake(grad_o, grad_z, q, k, v, o, z, *arguments, signature=FASTMAX):
    call = signature.call(arguments)
    of_tensors = (getattr(call, name) for name in signature.differentiable)
    return (
        *(eager.empty_like_layout(x, x.shape[-1]) for x in (q, k, v)),
        *(q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in of_tensors),
    )


@torch.library.register_fake("fastmax::flash_backward", lib=library)
def _flash_backward_fake(grad_o, grad_lse, q, k, v, o, lse, *arguments):
    return _backward_fake(grad_o, grad_lse, q, k, v, o, lse, *arguments, signature=FLASH)


@torch.library.register_fake("fastmax::exact_tiles_backward", lib=library)
def _exact_tiles_backward_fake(grad_o, grad_lse, q, k, v, o, lse, *arguments):
    return _backward_fake(grad_o, grad_lse, q, k, v, o, lse, *arguments, signature=EXACT_TILES)


@torch.library.register_fake("fastmax::exact_window_forward", lib=library)
def _exact_window_forward_fake(q, k, v, *arguments):
    return tuple(exact_window.empty_results(q, k, v, EXACT_WINDOW.call(arguments)))


@torch.library.register_fake("fastmax::exact_window_backward", lib=library)
def _exact_window_backward_fake(grad_o, grad_lse, q, k, v, *arguments):
    o, lse, *rest = arguments
    rest = rest[len(exact_window.Forward._fields) - 2 :]
    return _backward_fake(grad_o, grad_lse, q, k, v, o, lse, *rest, signature=EXACT_WINDOW)


@torch.library.register_fake("fastmax::merge_", lib=library)
def _merge_fake_(o, lse, o_far, z_far, shift):
    return z_far.new_empty(z_far.shape)


@torch.library.register_fake("fastmax::far_forward_", lib=library)
def _far_forward_fake_(o, lse, *arguments):
    return lse.new_empty(lse.shape)


@torch.library.register_fake("fastmax::far_backward_", lib=library)
def _far_backward_fake_(grad_q, grad_k, grad_v, grad_o, grad_z, q, k, v, o, z, *arguments):
    return _backward_fake(grad_o, grad_z, q, k, v, o, z, *arguments, signature=FAR)[FAR.gradient_names.index("log_decay")]


@torch.library.register_fake("fastmax::decode_step", lib=library)
def _decode_step_fake(q, k, v, values, weights, mask, log_decay, scale, a0, a1, a2, p):
    state = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (values, weights))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), *state


@torch.library.register_fake("fastmax::decode_step_", lib=library)
def _decode_step_fake_(q, k, v, values, weights, mask, log_decay, scale, a0, a1, a2, p):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@torch.library.register_fake("fastmax::gathered_step_", lib=library)
def _gathered_step_fake_(q, k, v, *arguments):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@torch.library.register_fake("fastmax::prefill", lib=library)
def _prefill_fake(q, k, v, mask, log_decay, first_key, values, weights, scale, a0, a1, a2, p, allow_tf32):
    state = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (values, weights))
    return eager.empty_like_layout(q, v.shape[-1]), values.new_empty(q.shape[:3]), *state


@torch.library.register_fake("fastmax::prefill_backward", lib=library)
def _prefill_backward_fake(
    grad_o, grad_z, grad_new_values, grad_new_weights, q, k, v, o, z, new_values, new_weights,
    mask, log_decay, first_key, values, weights, *options,
):  # fmt: skip
    of_decay, *state = (
        q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (log_decay, values, weights)
    )
    return *(eager.empty_like_layout(x, x.shape[-1]) for x in (q, k, v)), of_decay, *state


@torch.library.register_fake("fastmax::state_of_keys", lib=library)
def _state_of_keys_fake(k, v, mask, log_decay, first_key, scale, a0, a1, a2, p, allow_tf32, keep):
    values = k.new_empty(*k.shape[:2], eager.state_rows(k.shape[3], p), v.shape[3], dtype=eager.compute_dtype(k.dtype))
    kept = torch.library.get_ctx().new_dynamic_size() if keep and k.is_cuda else 0  # the library knows
    return values, values.new_empty(values.shape[:3]), k.new_empty(*k.shape[:2], kept, dtype=torch.uint8)


@torch.library.register_fake("fastmax::prefill_kept_", lib=library)
def _prefill_kept_fake_(q, k, v, *arguments):
    return eager.empty_like_layout(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=eager.compute_dtype(q.dtype))


@torch.library.register_fake("fastmax::gradients_of_sums", lib=library)
def _gradients_of_sums_fake(grad_o, grad_z, o, z):
    return o.new_empty(o.shape, dtype=eager.sums_dtype(o.dtype)), z.new_empty(z.shape)


@torch.library.register_fake("fastmax::state_of_queries", lib=library)
def _state_of_queries_fake(g, e, q, k, v, log_decay, first_key, scale, a0, a1, a2, p, allow_tf32, keep):
    return _state_of_keys_fake(k, v, None, log_decay, first_key, scale, a0, a1, a2, p, allow_tf32, keep)


@torch.library.register_fake("fastmax::prefill_backward_of_queries", lib=library)
def _prefill_backward_of_queries_fake(g, e, q, k, v, mask, log_decay, *arguments):
    return eager.empty_like_layout(q, q.shape[-1]), e.new_empty(0 if log_decay is None else e.shape)


@torch.library.register_fake("fastmax::prefill_backward_of_keys_", lib=library)
def _prefill_backward_of_keys_fake_(g, e, grad_new_values, grad_new_weights, q, k, v, mask, log_decay, *arguments):
    of_decay = q.new_empty(0) if log_decay is None else torch.empty_like(log_decay, memory_format=torch.contiguous_format)
    return *(eager.empty_like_layout(x, x.shape[-1]) for x in (k, v)), of_decay


@torch.library.register_fake("fastmax::finite_decay", lib=library)
def _finite_decay_fake(log_decay, continues, wide):
    dtypes = (torch.float64 if wide else torch.float32, torch.int32)
    return tuple([log_decay.new_empty(log_decay.shape, dtype=dtype) for dtype in dtypes])


@torch.library.register_fake("fastmax::normalize_tokens", lib=library)
def _normalize_tokens_fake(q, k, lim):
    return *(eager.empty_like_layout(x, x.shape[-1]) for x in (q, k)), *map(eager.empty_factors, (q, k))


@torch.library.register_fake("fastmax::normalize_tokens_backward", lib=library)
def _normalize_tokens_backward_fake(grad_q, grad_k, q, k, q_factor, k_factor, lim):
    given = ((grad_q, q), (grad_k, k))
    return tuple([x.new_empty(0) if grad is None else eager.empty_like_layout(x, x.shape[-1]) for grad, x in given])


@torch.library.register_fake("fastmax::softmax", lib=library)
def _softmax_fake(x, algorithm):
    return x.new_empty(x.shape)


for _name, _formula in flops.FORMULAS.items():
    register_flop_formula(getattr(torch.ops.fastmax, _name), get_raw=True)(_formula)


def refuse_second_derivative(ctx, *grads):
    """The backward of a gradient that is not to be differentiated."""
    raise RuntimeError(_NO_SECOND_DERIVATIVE.format("second derivative"))


def _refuse_derivative_of_state(ctx, *grads):
    raise RuntimeError("fastmax: state_of_keys and state_of_queries have no gradient; prefill, which ends in a state, has")


def _refuse_second_derivative_of_prefill(ctx, *grads):
    raise RuntimeError(
        "fastmax: the gradient of prefill has no second derivative; fastmax.decoding.step, token by token, differentiates "
        "PyTorch operations and gives the same numbers"
    )


def _refuse_second_derivative_of_normalization(ctx, *grads):
    raise RuntimeError(
        'fastmax: the gradient of normalize="token" has no second derivative; use_custom_gradient=False, where it is '
        "taken, differentiates PyTorch operations and gives the same numbers"
    )


class _Differentiable(NamedTuple):
    """An operator and its gradient; its outputs from the third on are for the backward alone."""

    signature: Signature
    forward: torch._ops.OpOverload
    backward: torch._ops.OpOverload

    def save(self, ctx, inputs: tuple, output: tuple) -> None:
        last = 3 + len(self.signature.tensor_names)
        ctx.save_for_backward(*inputs[:3], *output, *inputs[3:last])
        ctx.options = inputs[last:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])

    def gradients(self, saved: tuple, options: tuple, grad_o, grad_z, *_) -> tuple[Tensor | None, ...]:
        """Of q, k, v and the call's tensors, given what `save` saved; z is the second output."""
        names = self.signature.tensor_names
        if grad_o is None and grad_z is None:
            return (None,) * (3 + len(names))
        return self.signature.of_inputs(self.by_name(saved, options, grad_o, grad_z), saved[len(saved) - len(names) :])

    def by_name(self, saved: tuple, options: tuple, grad_o: Tensor | None, grad_z: Tensor | None) -> dict[str, Tensor]:
        if grad_o is None:
            grad_o = torch.zeros_like(saved[3])
        return self.signature.gradients(self.backward(grad_o, grad_z, *saved, *options))


class _Prefill(NamedTuple):
    """`prefill` and its gradient."""

    forward: torch._ops.OpOverload
    backward: torch._ops.OpOverload

    def save(self, ctx, inputs: tuple, output: tuple) -> None:
        (q, k, v, mask, log_decay, *tokens_and_state), ctx.options = inputs[:8], inputs[8:]
        o, z, *state = output
        # What the gradient of log_decay alone takes is not kept alive for others.
        state = (None, None) if log_decay is None else state
        ctx.save_for_backward(q, k, v, o, z, *state, mask, log_decay, *tokens_and_state)
        ctx.set_materialize_grads(False)

    def gradients(self, saved: tuple, options: tuple, grad_o, grad_z, grad_values, grad_weights) -> tuple[Tensor | None, ...]:
        """Of q, k, v, what accompanies them, and the state."""
        if grad_o is None and grad_z is None and grad_values is None and grad_weights is None:
            return (None,) * 8
        _, _, _, o, _, _, _, _, log_decay, *_ = saved
        if grad_o is None:
            grad_o = torch.zeros_like(o)
        results = self.backward(grad_o, grad_z, grad_values, grad_weights, *saved, *options)
        grads = dict(zip(_OF_PREFILL, results, strict=True))
        of_decay = None if log_decay is None else grads["log_decay"]
        return grads["q"], grads["k"], grads["v"], None, of_decay, None, grads["values"], grads["weights"]


class _Normalization(NamedTuple):
    """`normalize_tokens` and its gradient."""

    forward: torch._ops.OpOverload
    backward: torch._ops.OpOverload

    def save(self, ctx, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*output)  # results, which attention keeps too, and factors
        ctx.options = inputs[2:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])

    def gradients(self, saved: tuple, options: tuple, grad_q, grad_k, *_) -> tuple[Tensor | None, ...]:
        given = (grad_q, grad_k)
        if grad_q is None and grad_k is None:
            return given
        grads = self.backward(*given, *saved, *options)
        return tuple(None if grad is None else x for grad, x in zip(given, grads, strict=True))


_OPERATORS = torch.ops.fastmax
_FASTMAX = _Differentiable(FASTMAX, _OPERATORS.forward.default, _OPERATORS.backward.default)
_FLASH = _Differentiable(FLASH, _OPERATORS.flash_forward.default, _OPERATORS.flash_backward.default)
_EXACT_WINDOW = _Differentiable(EXACT_WINDOW, _OPERATORS.exact_window_forward.default, _OPERATORS.exact_window_backward.default)
_EXACT_TILES = _Differentiable(EXACT_TILES, _OPERATORS.exact_tiles_forward.default, _OPERATORS.exact_tiles_backward.default)
_PREFILL = _Prefill(_OPERATORS.prefill.default, _OPERATORS.prefill_backward.default)
_NORMALIZATION = _Normalization(_OPERATORS.normalize_tokens.default, _OPERATORS.normalize_tokens_backward.default)

for _operator in (_FASTMAX, _FLASH, _EXACT_WINDOW, _EXACT_TILES, _PREFILL, _NORMALIZATION):

    def _differentiate(ctx, *grads, operator=_operator):
        return *operator.gradients(ctx.saved_tensors, ctx.options, *grads), *(None,) * len(ctx.options)

    torch.library.register_autograd(_operator.forward, _differentiate, setup_context=_operator.save, lib=library)
for _operator in (_FASTMAX, _FLASH, _EXACT_WINDOW, _EXACT_TILES):
    torch.library.register_autograd(_operator.backward, refuse_second_derivative, lib=library)
torch.library.register_autograd(_PREFILL.backward, _refuse_second_derivative_of_prefill, lib=library)
torch.library.register_autograd(_NORMALIZATION.backward, _refuse_second_derivative_of_normalization, lib=library)
for _operator in (_OPERATORS.state_of_keys, _OPERATORS.state_of_queries):
    torch.library.register_autograd(_operator.default, _refuse_derivative_of_state, lib=library)


def _part(call: Call) -> _Differentiable:
    """What computes a call without an exact window."""
    return _FLASH if isinstance(call.score, Softmax) else _FASTMAX


def _exact(q: Tensor, k: Tensor, v: Tensor, call: Call) -> _Differentiable:
    """What computes a call with an exact window: where PyTorch operations walk over all tiles anyway, one walk does both kinds
    of weights. Compiled code is to hold for other sizes too."""
    if q.is_cuda or torch.compiler.is_compiling():
        return _EXACT_WINDOW
    algorithm = eager.algorithm_of(q, k, v, call._replace(exact_window=0))
    return _EXACT_TILES if algorithm == "quadratic" else _EXACT_WINDOW


def _call(operator: _Differentiable | _Prefill | _Normalization, tensors: tuple, options: tuple) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling():
        return operator.forward(*tensors, *options)
    if tensors[0].is_cuda:
        extension.warn_if_unused(tensors[0].device)
    if eager.is_transformed():
        given = [x for x in tensors if x is not None]
        if torch.autograd.forward_ad._current_level >= 0 and any(map(_has_tangent, given)):
            raise RuntimeError(_NO_SECOND_DERIVATIVE.format("forward-mode derivative"))
        if torch.is_grad_enabled() and any(map(_is_differentiated_by_functorch, given)):
            raise RuntimeError(_NO_SECOND_DERIVATIVE.format("rule for torch.func's gradients (grad, vjp, jacrev, hessian)"))
        if eager.in_functorch():
            return operator.forward(*tensors, *options)
    if not torch.is_grad_enabled():
        return extension.call(operator.forward, *tensors, *options)
    return _Fused.apply(operator, options, *tensors)


def _has_tangent(x: Tensor) -> bool:
    while torch._C._functorch.is_batchedtensor(x):  # vmap has no rule for looking at tangents
        x = torch._C._functorch.get_unwrapped(x)
    return torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def _is_differentiated_by_functorch(x: Tensor) -> bool:
    """Whether a reverse-mode transform of torch.func records what becomes of x, in whatever order with vmaps."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x) and x.requires_grad:
            return True
        x = functorch.get_unwrapped(x)
    return False


def _decode_step_autograd(keyset, *args):
    """For callers of the operator itself."""
    refuse_to_record(*args[:7])
    return torch.ops.fastmax.decode_step_.default.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _decode_step_version(keyset, *args):
    """Tells autograd, which may have saved the state for an earlier step, that it changes."""
    torch.autograd.graph.increment_version(args[3:5])
    return torch.ops.fastmax.decode_step_.default.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)


def _gathered_step_autograd(keyset, *args):
    refuse_to_record(*args[:12])
    return torch.ops.fastmax.gathered_step_.default.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _gathered_step_version(keyset, *args):
    torch.autograd.graph.increment_version(args[3:10])
    return torch.ops.fastmax.gathered_step_.default.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)


library.impl("decode_step_", _decode_step_autograd, "Autograd", with_keyset=True)
library.impl("decode_step_", _decode_step_version, "ADInplaceOrView", with_keyset=True)
library.impl("gathered_step_", _gathered_step_autograd, "Autograd", with_keyset=True)
library.impl("gathered_step_", _gathered_step_version, "ADInplaceOrView", with_keyset=True)


def _joins_in_place(name: str, written: int, instead: str) -> None:
    """An operator that writes over its first arguments, so many, and has no gradient."""
    operator = getattr(_OPERATORS, name).default

    def refuse(keyset, *args):
        if eager.differentiating(*[x for x in args if x is None or isinstance(x, Tensor)]):
            raise RuntimeError(f"torch.ops.fastmax.{name} has no gradient: use {instead}")
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def count_versions(keyset, *args):
        torch.autograd.graph.increment_version(args[:written])
        return operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    library.impl(name, refuse, "Autograd", with_keyset=True)
    library.impl(name, count_versions, "ADInplaceOrView", with_keyset=True)


_joins_in_place("merge_", 2, "fastmax.merge_attention")
_joins_in_place("far_forward_", 2, "fastmax.fastmax_attention with exact_window")
_joins_in_place("far_backward_", 3, "fastmax.fastmax_attention with exact_window")


def _save_finite_decay(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.mark_non_differentiable(output[1])


def _differentiate_finite_decay(ctx, grad, _):
    (log_decay,) = ctx.saved_tensors
    constant = (log_decay == -torch.inf) | (log_decay > 0.0)
    return grad.masked_fill(constant, 0.0).to(log_decay.dtype), None, None


torch.library.register_autograd(
    "fastmax::finite_decay", _differentiate_finite_decay, setup_context=_save_finite_decay, lib=library
)


class _FiniteDecay(torch.autograd.Function):
    """What `register_autograd` does, at less cost a call."""

    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            output = extension.call(torch.ops.fastmax.finite_decay.default, *inputs)
        _save_finite_decay(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiate_finite_decay)


def _save_softmax(ctx, inputs, output):
    ctx.save_for_backward(output)


def _differentiate_softmax(ctx, grad_y):
    (y,) = ctx.saved_tensors
    return row_softmax.backward(grad_y, y), None


torch.library.register_autograd("fastmax::softmax", _differentiate_softmax, setup_context=_save_softmax, lib=library)


class _Fused(torch.autograd.Function):
    """What `register_autograd` does, at a third of its cost a call; compilers and torch.func see the registered operator."""

    @staticmethod
    def forward(ctx, operator, options, *tensors):
        inputs = (*tensors, *options)
        with torch._C._AutoDispatchBelowAutograd():  # past what is registered there, which this class replaces
            output = extension.call(operator.forward, *inputs)
        operator.save(ctx, inputs, output)
        ctx.operator = operator
        return output

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors  # unpacked once, and where a checkpoint that runs its function again records it
        if torch.is_grad_enabled():  # create_graph=True: a later derivative of these must raise an error
            return None, None, *extension.call(ctx.operator.gradients, saved, ctx.options, *grads)
        with torch._C._AutoDispatchBelowAutograd():
            return None, None, *extension.call(ctx.operator.gradients, saved, ctx.options, *grads)
