"""`largest_so_far`: the keys that `fastmax.nn.kept_keys` keeps for each block. `gather_kept`: their rows, and its gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastmax import eager
from fastmax.ops import extension
from fastmax.ops.autocast import without_autocast
from fastmax.ops.autograd import compute, refuse_second_derivative, register_gradient
from fastmax.ops.registration import Operator, register

_MAX_KEPT, _MAX_CANDIDATES = 1024, 4096  # of the kernels


def largest_so_far(rank: Tensor, index: Tensor, earlier: Tensor, count: int) -> Tensor:
    """Returns the result of `eager.largest_so_far`. It has no gradient."""
    if eager.is_transformed():
        return eager.largest_so_far(rank, index, earlier, count)
    return _LARGEST(rank, index, earlier, count)


def _covers_choice(key_rank, key_index, earlier, count) -> bool:
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


def _gather_kept(k, v, log_factor, kept, recent_keys, block, decays):
    with without_autocast(k):
        return eager.gather_kept(k, v, log_factor, kept, recent_keys, block, decays)


def _fake_gather_kept(k, v, log_factor, kept, recent_keys, block, decays):
    (b, hk, blocks, count), dtype = kept.shape, eager.compute_dtype(k.dtype)
    of_places = b * blocks, hk, count + block
    decay, least = (of_places, (*of_places[:2], block)) if decays else ((0,), (0,))
    return (
        *(x.new_empty((*of_places, x.shape[3])) for x in (k, v)),
        *(log_factor.new_empty(shape, dtype=dtype) for shape in (of_places, decay)),
        log_factor.new_empty(least),
        kept.new_empty((of_places[0], of_places[2]), dtype=torch.bool),
    )


def _gather_kept_backward(kept, recent_keys, grad_keys, grad_values, grad_key_gate, tokens):
    with without_autocast(grad_keys):
        grads = eager.gather_kept_backward(kept, recent_keys, grad_keys, grad_values, grad_key_gate, tokens)
        return tuple([x.contiguous() for x in grads])


def _fake_gather_kept_backward(kept, recent_keys, grad_keys, grad_values, grad_key_gate, tokens):
    shape = *kept.shape[:2], tokens
    of_rows = (x.new_empty((*shape, x.shape[3])) for x in (grad_keys, grad_values))
    return *of_rows, grad_key_gate.new_empty(shape, dtype=torch.float64)


def _covers_gather(k, v, log_factor, kept, recent_keys, block, decays) -> bool:
    return 0 < block <= _MAX_KEPT and 0 < kept.shape[3] <= _MAX_KEPT


def _covers_gather_backward(kept, recent_keys, grad_keys, grad_values, grad_key_gate, tokens) -> bool:
    return 0 < grad_keys.shape[2] - kept.shape[3] <= _MAX_KEPT and 0 < kept.shape[3] <= _MAX_KEPT


class _Gather(NamedTuple):
    """`gather_kept` and its gradient."""

    forward: Operator
    backward: Operator

    def save(self, ctx, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[2:5])
        ctx.options = inputs[5:]
        ctx.mark_non_differentiable(*output[3:])

    def gradients(self, saved: tuple, options: tuple, needed: tuple, *grads) -> tuple[Tensor | None, ...]:
        log_factor, kept, recent_keys = saved
        return *self.backward(kept, recent_keys, *grads[:3], log_factor.shape[2]), None, None


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
        "gather_kept_backward(Tensor kept, Tensor recent_keys, Tensor grad_keys, Tensor grad_values, Tensor grad_key_gate, "
        "int tokens) -> (Tensor grad_k, Tensor grad_v, Tensor grad_log_factor)",
        _gather_kept_backward,
        _fake_gather_kept_backward,
        kernel_of="grad_keys grad_values",
        covers=_covers_gather_backward,
    ),
)
register_gradient(_GATHER, refuse_second_derivative)
