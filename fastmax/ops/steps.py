"""`decode_step`, `decode_step_` and `buffered_step_`: one token of decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax import eager
from fastmax.core.score import Score
from fastmax.ops import extension, registration
from fastmax.ops.autocast import without_autocast
from fastmax.ops.registration import LIBRARY

registration.define(
    "decode_step(Tensor q, Tensor k, Tensor v, Tensor values, Tensor weights, Tensor? attention_mask, "
    "Tensor? log_decay, float scale, float a0, float a1, float a2, int p) "
    "-> (Tensor o, Tensor new_values, Tensor new_weights)"
)

registration.define(
    "decode_step_(Tensor q, Tensor k, Tensor v, Tensor(a!) values, Tensor(b!) weights, Tensor? attention_mask, "
    "Tensor? log_decay, float scale, float a0, float a1, float a2, int p) -> (Tensor o)"
)

registration.define(
    "buffered_step_(Tensor q, Tensor k, Tensor v, Tensor(a!) values, Tensor(b!) weights, Tensor(c!) near_keys, "
    "Tensor(d!) near_values, Tensor(e!) near_mask, Tensor(f!) near_decays, Tensor(g!) buffered, Tensor? attention_mask, "
    "Tensor? log_decay, int exact_window, float scale, float a0, float a1, float a2, int p) -> (Tensor o)"
)


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


def buffered_step_(
    q: Tensor,
    token: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    sums: tuple[Tensor, Tensor],
    kept: tuple[Tensor, Tensor, Tensor, Tensor],
    buffered: Tensor,
    exact_window: int,
    score: Score,
) -> Tensor:
    """A step that writes over a state that buffers tokens, on 4-d, checked arguments: the output; see `fastmax.decoding`. The
    token and those that are kept: keys, values, mask and decays, in the dtype of the sums.

    Raises:
        RuntimeError: a gradient would have to be recorded.
    """
    k, v, mask, log_decay = token
    written = (*sums, *kept, buffered)
    tensors = (q, k, v, *written, mask, log_decay)
    refuse_to_record(*tensors)
    if torch.compiler.is_compiling():
        return torch.ops.fastmax.buffered_step_.default(*tensors, exact_window, *score)
    if q.is_cuda:
        extension.warn_if_unused(q.device)
    torch.autograd.graph.increment_version(written)
    with torch._C._AutoDispatchBelowADInplaceOrView():  # as decode_step_
        return extension.call(torch.ops.fastmax.buffered_step_.default, *tensors, exact_window, *score)


def refuse_to_record(*tensors: Tensor | None) -> None:
    if eager.differentiating(*tensors):
        raise RuntimeError(
            "fastmax.decoding.step_ writes over the state that a gradient would need: use fastmax.decoding.step, "
            "or call it under torch.no_grad()"
        )


def _decode_step(q, k, v, values, weights, mask, log_decay, scale, a0, a1, a2, p):
    with without_autocast(q):
        return eager.decode_step(q, k, v, values, weights, mask, log_decay, Score(scale, a0, a1, a2, p))


def _decode_step_(q, k, v, values, weights, mask, log_decay, scale, a0, a1, a2, p):
    with without_autocast(q):
        return eager.decode_step_(q, k, v, values, weights, mask, log_decay, Score(scale, a0, a1, a2, p))


def _buffered_step_(
    q, k, v, values, weights, near_keys, near_values, near_mask, near_decays, buffered, mask, log_decay, exact_window, *score
):
    kept = near_keys, near_values, near_mask, near_decays
    with without_autocast(q):
        return eager.buffered_step_(q, k, v, values, weights, *kept, buffered, mask, log_decay, exact_window, Score(*score))


registration.implement("decode_step", _decode_step)

registration.implement("decode_step_", _decode_step_)

registration.implement("buffered_step_", _buffered_step_)


@torch.library.register_fake("fastmax::decode_step", lib=LIBRARY)
def _decode_step_fake(q, k, v, values, weights, mask, log_decay, scale, a0, a1, a2, p):
    state = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (values, weights))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), *state


@torch.library.register_fake("fastmax::decode_step_", lib=LIBRARY)
def _decode_step_fake_(q, k, v, values, weights, mask, log_decay, scale, a0, a1, a2, p):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@torch.library.register_fake("fastmax::buffered_step_", lib=LIBRARY)
def _buffered_step_fake_(q, k, v, *arguments):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _decode_step_autograd(keyset, *args):
    """For callers of the operator itself."""
    refuse_to_record(*args[:7])
    return torch.ops.fastmax.decode_step_.default.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _decode_step_version(keyset, *args):
    """Tells autograd, which may have saved the state for an earlier step, that it changes."""
    torch.autograd.graph.increment_version(args[3:5])
    return torch.ops.fastmax.decode_step_.default.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)


def _buffered_step_autograd(keyset, *args):
    refuse_to_record(*args[:12])
    return torch.ops.fastmax.buffered_step_.default.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _buffered_step_version(keyset, *args):
    torch.autograd.graph.increment_version(args[3:10])
    return torch.ops.fastmax.buffered_step_.default.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)


LIBRARY.impl("decode_step_", _decode_step_autograd, "Autograd", with_keyset=True)

LIBRARY.impl("decode_step_", _decode_step_version, "ADInplaceOrView", with_keyset=True)

LIBRARY.impl("buffered_step_", _buffered_step_autograd, "Autograd", with_keyset=True)

LIBRARY.impl("buffered_step_", _buffered_step_version, "ADInplaceOrView", with_keyset=True)
