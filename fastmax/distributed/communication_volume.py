"""`exchanged_bytes`: the number of bytes that a rank receives in a call, calculated without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastmax import eager
from fastmax.core import validation
from fastmax.distributed import halo, ring
from fastmax.distributed.layout import Layout
from fastmax.distributed.states import uses_all_to_all

_BYTES_OF_PART_DECAYS = 16  # two float64 numbers per part and key/value head


class Bytes(NamedTuple):
    """Bytes that a rank receives."""

    forward: int
    backward: int  # if q, k, v, log_decay and log_input_gate all require gradients

    def __add__(self, other: Bytes) -> Bytes:  # type: ignore[override]
        return Bytes(self.forward + other.forward, self.backward + other.backward)


def exchanged_bytes(
    layout: Layout,
    rank: int = 0,
    *,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    algorithm: str = "linear",
    causal: bool = True,
    p: int = 2,
    exact_window: int = 0,
    log_decay: bool = False,
    attention_mask: bool = False,
    cu_seqlens: bool = False,
    log_input_gate: bool = False,
) -> Bytes:
    """Returns the bytes that a rank receives from other ranks in one call, forward and backward.

    The call is one of `context_parallel_attention`, or of `context_parallel_flash_attention` without a window
    (`algorithm="softmax"`).

        states      b hk F (dv + 1) numbers per part, F = 1 + d (p = 1) or 1 + d + d(d + 1)/2: the states of the other ranks,
                    or about two states where that is less, in each direction; independent of the number of tokens
        ring        k and v of the other ranks, in each direction; in the backward as many messages of gradients, the first
                    in the dtype of k and v, the others in fp32
        window      forward: k and v of `exact_window` tokens around each part; backward: their gradients

    `log_decay` and `cu_seqlens` add two numbers per part and head. Decays, gates and masks add their own size where k and v are
    sent. Overhead of the collective library is not counted, nor are bytes that a rank only forwards.

    Args:
        layout: layout of the call.
        rank: the receiving rank.
        kv_heads, head_dim, value_dim, batch, dtype: sizes of k and v. With a sinusoidal `rpe_matrix` and an even head dim,
            pass twice the head dim.
        algorithm: "linear", "quadratic" or "softmax".
        causal, p, exact_window: as in the call.
        log_decay, attention_mask, cu_seqlens, log_input_gate: whether the call has them.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a Layout, got {validation.describe(layout)}")
    validation.check_count("rank", rank, least=0)
    if rank >= layout.world:
        raise ValueError(f"rank must be below the layout's {layout.world} ranks, got {rank}")
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim, "batch": batch}
    for name, size in sizes.items():
        if size is not None or name != "value_dim":
            validation.check_count(name, size)
    validation.check_dtype("dtype", dtype)
    if algorithm not in ("linear", "quadratic", "softmax"):
        raise ValueError(f'algorithm must be "linear", "quadratic" or "softmax", got {validation.describe(algorithm)}')
    validation.check_degree(p)
    validation.check_exact_window(exact_window)
    if exact_window > 0 and algorithm == "softmax":
        raise ValueError(f'exact_window must be 0 with algorithm="softmax", got {exact_window}')
    if layout.world == 1:
        return Bytes(0, 0)
    like = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device="meta")
    wide = eager.compute_dtype(dtype)
    value_dim = head_dim if value_dim is None else value_dim
    v, of_head = like.new_empty(batch, kv_heads, 0, value_dim), like.new_empty(batch, kv_heads, 0, dtype=wide)
    decay, gate = (of_head if given else None for given in (log_decay, log_input_gate))
    mask = like.new_empty(batch, 0, dtype=torch.bool) if attention_mask else None
    keys = ring.Keys(like, v, decay, gate, mask)
    if exact_window == 0:
        return _global(layout, rank, keys, algorithm, causal, p, log_decay or cu_seqlens)
    total = _halo(layout, rank, keys, exact_window, 0 if causal else exact_window, attention_mask)
    total += _global(layout.without_first(exact_window), rank, keys, algorithm, True, p, log_decay or cu_seqlens)
    if causal:
        return total
    return total + _global(layout.mirrored().without_first(exact_window), rank, keys, algorithm, True, p, cu_seqlens)


def _global(layout: Layout, rank: int, keys: ring.Keys, algorithm: str, causal: bool, p: int, bounded: bool) -> Bytes:
    total = _states(layout, keys, causal, p) if algorithm == "linear" else _ring(layout, rank, keys)
    if bounded and causal:
        b, hk = keys.k.shape[:2]
        total += Bytes((layout.world - 1) * layout.most_parts * b * hk * _BYTES_OF_PART_DECAYS, 0)
    return total


def _states(layout: Layout, keys: ring.Keys, causal: bool, p: int) -> Bytes:
    (b, hk, _, d), dv, world = keys.k.shape, keys.v.shape[3], layout.world
    elements = eager.state_rows(d, p) * (dv + 1)
    parts = layout.most_parts if causal else 1
    size = torch.finfo(eager.compute_dtype(keys.k.dtype)).bits // 8
    own = parts * b * hk * elements * size
    if causal and uses_all_to_all(world, own):
        share = -(-elements // world)
        received = 2 * (world - 1) * parts * b * hk * share * size
    else:
        received = (world - 1) * own
    return Bytes(received, received)


def _ring(layout: Layout, rank: int, keys: ring.Keys) -> Bytes:
    of_ranks = [keys.with_tokens(layout.count(other)) for other in range(layout.world)]
    forward = sum(ring.message_bytes(x) for other, x in enumerate(of_ranks) if other != rank)
    # In each step after the first, a rank receives the gradients of the keys it holds next; in the last, of its own keys.
    of_steps = ((step, of_ranks[(rank - step - 1) % layout.world]) for step in range(1, layout.world))
    gradients = sum(ring.message_bytes(ring.gradients_of(keys, step)) for step, keys in of_steps)
    if keys.log_decay is not None:
        b, hk = keys.k.shape[:2]
        gradients += (layout.world - 1) * layout.most_parts * b * hk * 8
    return Bytes(forward, forward + gradients)


def _halo(layout: Layout, rank: int, keys: ring.Keys, before: int, after: int, padded: bool) -> Bytes:
    plan = halo.plan(layout, rank, before, after)

    def tokens(moves: Sequence[Sequence[halo.Move]]) -> int:
        return sum(move.source.stop - move.source.start for other, x in enumerate(moves) if other != rank for move in x)

    (b, hk, _, d), dv, wide = keys.k.shape, keys.v.shape[3], torch.finfo(eager.compute_dtype(keys.k.dtype)).bits // 8
    of_heads = sum(b * hk * wide for x in (keys.log_decay, keys.log_input_gate) if x is not None)
    of_token = b * hk * (d + dv) * keys.k.element_size() + of_heads
    return Bytes(tokens(plan.received) * (of_token + (b * wide if padded else 0)), tokens(plan.sent) * of_token)
