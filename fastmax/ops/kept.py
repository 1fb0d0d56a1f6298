"""Operators of `fastmax.nn.kept_keys`.

`largest_so_far` chooses the keys that each block keeps. `gather_kept` gathers their rows and has a gradient. `kept_step_` is a
step of a state, in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmax import eager
from fastmax.ops import extension
from fastmax.ops.autocast import without_autocast
from fastmax.ops.autograd import Context, compute, refuse_second_derivative, register_gradient
from fastmax.ops.registration import Operator, refuse_gradient, register
from fastmax.ops.steps import in_place, refuse_to_record

_MAX_KEPT, _MAX_CANDIDATES, _MAX_SLOTS = 2048, 4096, 4096  # of the kernels


def largest_so_far(rank: Tensor, index: Tensor, earlier: Tensor, count: int) -> Tensor:
    """Returns the result of `eager.largest_so_far`. It has no gradient."""
    if eager.is_transformed():
        return eager.largest_so_far(rank, index, earlier, count)
    return _LARGEST(rank, index, earlier, count)


def _covers_choice(key_rank: Tensor, key_index: Tensor, earlier: Tensor, count: int) -> bool:
    if not extension.device_has_kernels(key_rank) or key_rank.dtype != torch.float64:
        return False
    return 0 < count <= _MAX_KEPT and 0 < key_rank.shape[3] <= _MAX_CANDIDATES


_LARGEST = register(
    "largest_so_far(Tensor key_rank, Tensor key_index, Tensor earlier, int count) -> Tensor kept",
    lambda *given: eager.largest_so_far(*given).contiguous(),
    lambda key_rank, key_index, earlier, count: key_index.new_empty((*key_index.shape[:3], count)),
    covers=_covers_choice,
)


def gather_kept(
    k: Tensor,
    v: Tensor,
    log_factor: Tensor,
    kept: Tensor,
    recent_keys: Tensor,
    block: int,
    decays: bool,
    use_custom_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Returns the results of `eager.gather_kept`, None for those without elements.

    Args:
        use_custom_gradient: True: one gradient of all rows, without a second derivative. False: PyTorch's.
    """
    if use_custom_gradient:
        *rows, gate, log_decay, least, has_key = compute(_GATHER, (k, v, log_factor, kept, recent_keys), (block, decays))
    else:
        *rows, gate, log_decay, least, has_key = eager.gather_kept(k, v, log_factor, kept, recent_keys, block, decays)
    return *rows, gate, *((log_decay, least) if decays else (None, None)), has_key


def _gather_kept(
    k: Tensor, v: Tensor, log_factor: Tensor, kept: Tensor, recent_keys: Tensor, block: int, decays: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with without_autocast(k):
        return eager.gather_kept(k, v, log_factor, kept, recent_keys, block, decays)


def _fake_gather_kept(
    k: Tensor, v: Tensor, log_factor: Tensor, kept: Tensor, recent_keys: Tensor, block: int, decays: bool
) -> tuple[Tensor, ...]:
    of_places, dtype = _shape_of_places(kept, block), eager.compute_dtype(k.dtype)
    decay, least = (of_places, (*of_places[:2], block)) if decays else ((0,), (0,))
    return (
        *(x.new_empty((*of_places, x.shape[3])) for x in (k, v)),
        *(log_factor.new_empty(shape, dtype=dtype) for shape in (of_places, decay)),
        log_factor.new_empty(least),
        kept.new_empty((of_places[0], of_places[2]), dtype=torch.bool),
    )


def _shape_of_places(kept: Tensor, block: int) -> tuple[int, int, int]:
    b, hk, blocks, count = kept.shape
    return b * blocks, hk, count + block


def _gather_kept_backward(
    kept: Tensor, recent_keys: Tensor, log_factor: Tensor, grad_keys: Tensor, grad_values: Tensor, grad_key_gate: Tensor
) -> tuple[Tensor, ...]:
    with without_autocast(grad_keys):
        grads = eager.gather_kept_backward(kept, recent_keys, grad_keys, grad_values, grad_key_gate, log_factor.shape[2])
        return tuple([x.contiguous() for x in grads])


def _fake_gather_kept_backward(
    kept: Tensor, recent_keys: Tensor, log_factor: Tensor, grad_keys: Tensor, grad_values: Tensor, grad_key_gate: Tensor
) -> tuple[Tensor, ...]:
    of_rows = (x.new_empty((*log_factor.shape, x.shape[3])) for x in (grad_keys, grad_values))
    return *of_rows, log_factor.new_empty(log_factor.shape)


def _covers_gather(
    k: Tensor, v: Tensor, log_factor: Tensor, kept: Tensor, recent_keys: Tensor, block: int, decays: bool
) -> bool:
    return 0 < block <= _MAX_KEPT and 0 < kept.shape[3] <= _MAX_KEPT


def _covers_gather_backward(
    kept: Tensor, recent_keys: Tensor, log_factor: Tensor, grad_keys: Tensor, grad_values: Tensor, grad_key_gate: Tensor
) -> bool:
    return 0 < grad_keys.shape[2] - kept.shape[3] <= _MAX_KEPT and 0 < kept.shape[3] <= _MAX_KEPT


class _Gather(NamedTuple):
    """`gather_kept` and its gradient."""

    forward: Operator
    backward: Operator

    def save(self, ctx: Context, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.options = inputs[5:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[3:])

    def gradients(self, saved: tuple, options: tuple, needed: tuple, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        k, v, log_factor, kept, recent_keys = saved
        if all(grad is None for grad in grads):
            return (None,) * 5
        of_places = _shape_of_places(kept, options[0])
        gate_dtype = eager.compute_dtype(k.dtype)
        shapes = ((*of_places, k.shape[3]), k.dtype), ((*of_places, v.shape[3]), v.dtype), (of_places, gate_dtype)
        given = zip(grads[:3], shapes, strict=True)
        filled = (k.new_zeros(shape, dtype=dtype) if grad is None else grad for grad, (shape, dtype) in given)
        return *self.backward(kept, recent_keys, log_factor, *filled), None, None


_GATHER = _Gather(
    register(
        "gather_kept(Tensor k, Tensor v, Tensor log_factor, Tensor kept, Tensor recent_keys, int block, bool decays) "
        "-> (Tensor keys, Tensor values, Tensor key_gate, Tensor key_decay, Tensor least, Tensor has_key)",
        _gather_kept,
        _fake_gather_kept,
        kernel_of="k v",
        covers=_covers_gather,
    ),
    register(
        "gather_kept_backward(Tensor kept, Tensor recent_keys, Tensor log_factor, Tensor grad_keys, Tensor grad_values, "
        "Tensor grad_key_gate) -> (Tensor grad_k, Tensor grad_v, Tensor grad_log_factor)",
        _gather_kept_backward,
        _fake_gather_kept_backward,
        kernel_of="grad_keys grad_values",
        covers=_covers_gather_backward,
    ),
)
register_gradient(_GATHER, refuse_second_derivative)


def kept_step_(
    token: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    other: tuple[Tensor, Tensor],
    slots: tuple[Tensor, Tensor, Tensor, Tensor],
    positions: Tensor,
    count: Tensor | None,
    kept: int,
    window: int,
    block: int,
    scale: float,
) -> Tensor:
    """Computes `eager.kept_step` in place: overwrites the slots. Returns the output (b, h, 1, dv) for its keys and others.

    Args:
        token: q, k, v, log_input_gate and log_decay.
        other: the output for other keys and the log of the sums of their weights, (b, h, 1, dv) and (b, h, 1).
        slots: keys, values, log_factors and key_positions.

    Raises:
        RuntimeError: a gradient would have to be recorded.
    """
    count = None if count is None else count.long()
    return in_place(_KEPT_STEP_, (*token, *other, *slots, positions, count), slots, (kept, window, block, scale))


def _kept_step_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    log_decay: Tensor | None,
    other: Tensor,
    other_lse: Tensor,
    keys: Tensor,
    values: Tensor,
    log_factors: Tensor,
    key_positions: Tensor,
    positions: Tensor,
    count: Tensor | None,
    kept: int,
    window: int,
    block: int,
    scale: float,
) -> Tensor:
    slots = keys, values, log_factors, key_positions
    with without_autocast(q):
        o, lse, _ = eager.kept_step(
            q, k, v, gate, log_decay, *slots, positions, count, kept, window, block, scale, in_place=True
        )
        return eager.merged((o, other), (lse, other_lse))[0].contiguous()


def _fake_kept_step_(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _covers_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    log_decay: Tensor | None,
    other: Tensor,
    other_lse: Tensor,
    keys: Tensor,
    values: Tensor,
    log_factors: Tensor,
    key_positions: Tensor,
    positions: Tensor,
    count: Tensor | None,
    kept: int,
    *limits: float,
) -> bool:
    slots = keys, values, log_factors, key_positions
    fits = 0 < kept <= _MAX_KEPT and keys.shape[2] <= _MAX_SLOTS and all(x.is_contiguous() for x in slots)
    narrow = all(x is None or x.dtype == torch.float32 for x in (gate, log_decay, other_lse))
    return fits and narrow and other.dtype == q.dtype


def _kept_step_flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    log_decay: Tensor | None,
    other: Tensor,
    other_lse: Tensor,
    keys: Tensor,
    values: Tensor,
    *arguments: Any,
    out_val: object = None,
) -> int:
    return 2 * q.shape[0] * q.shape[1] * keys.shape[2] * (keys.shape[3] + values.shape[3])


_KEPT_STEP_ = register(
    "kept_step_(Tensor q, Tensor k, Tensor v, Tensor log_input_gate, Tensor? log_decay, Tensor other, Tensor other_lse, "
    "Tensor(a!) slot_keys, Tensor(b!) slot_values, Tensor(c!) slot_factors, Tensor(d!) slot_positions, "
    "Tensor token_positions, Tensor? token_count, "
    "int kept, int window, int block, float scale) -> Tensor o",
    _kept_step_,
    _fake_kept_step_,
    kernel_of="q v",
    covers=_covers_step,
    flops=_kept_step_flops,
)
refuse_gradient(_KEPT_STEP_, refuse_to_record, written=slice(7, 11))
