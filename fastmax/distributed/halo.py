"""Halo exchange: the tokens next to each local part that other ranks hold, some before the part and some after it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from fastmax.distributed.communication import all_to_all
from fastmax.distributed.layout import Layout, Part
from fastmax.distributed.once_differentiable import once_differentiable


class Move(NamedTuple):
    """Tokens to copy from a rank to the halo of another."""

    source: slice  # local tokens of the sender
    target: slice  # positions in the receiver's halo, which concatenates the halos of its parts


class Plan(NamedTuple):
    """The halo exchange of a rank."""

    sent: tuple[tuple[Move, ...], ...]  # to each rank
    received: tuple[tuple[Move, ...], ...]  # from each rank; moves within the rank are in both
    size: int  # tokens in the halo


@lru_cache(maxsize=256)
def plan(layout: Layout, rank: int, before: int, after: int) -> Plan:
    """Returns the exchange of `before` tokens before and `after` tokens after each part."""
    sent = tuple(tuple(_moves(layout, rank, other, before, after)) for other in range(layout.world))
    received = tuple(tuple(_moves(layout, other, rank, before, after)) for other in range(layout.world))
    return Plan(sent, received, len(layout.of(rank)) * (before + after))


def _moves(layout: Layout, source: int, target: int, before: int, after: int) -> Sequence[Move]:
    return _moves_to(layout, target, before, after).get(source, ())


@lru_cache(maxsize=256)
def _moves_to(layout: Layout, target: int, before: int, after: int) -> dict[int, list[Move]]:
    moves: dict[int, list[Move]] = {}
    for i, part in enumerate(layout.of(target)):
        for start, stop, at in (
            (part.start - before, part.start, i * (before + after)),
            (part.stop, part.stop + after, i * (before + after) + before),
        ):
            for held, first, last in layout.overlapping(max(0, start), stop):
                source = held.offset + first - held.start
                move = Move(slice(source, source + last - first), slice(at + first - start, at + last - start))
                moves.setdefault(held.rank, []).append(move)
    return moves


def halo(tensors: tuple[Tensor, ...], before: int, after: int, layout: Layout, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Returns the halo (b, heads, parts * (before + after), ...) of each tensor (b, heads, n, ...).

    The halo holds, for each local part, the `before` tokens before it and the `after` tokens after it. Positions outside the
    sequence are zeros. Differentiable.

    Args:
        tensors: of one dtype; the same ones must have `requires_grad` on all ranks.
    """
    return _Halo.apply(plan(layout, group.rank(), before, after), group, *tensors)


def around(x: Tensor, halo: Tensor, i: int, part: Part, before: int, after: int, tokens: int) -> Tensor:
    """Returns the i-th local part of x together with its halo, as far as the sequence of `tokens` tokens reaches.

    It is (b, heads, n + up to `before` + up to `after`, ...), and connected to the halo in the autograd graph in any case.
    """
    middle = i * (before + after) + before  # the position in the halo that is between the two sides
    real_before, real_after = min(before, part.start), min(after, tokens - part.stop)
    pieces = halo[:, :, middle - real_before : middle], x[:, :, part.local], halo[:, :, middle : middle + real_after]
    return torch.cat(pieces, dim=2)


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.group, ctx.shapes = plan, group, [x.shape for x in tensors]
        ctx.set_materialize_grads(False)
        out = tuple(x.new_zeros(*x.shape[:2], plan.size, *x.shape[3:]) for x in tensors)
        _move(plan, group, tensors, out, backward=False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        like, wanted = next(x for x in grads if x is not None), ctx.needs_input_grad[2:]
        out = [like.new_zeros(shape) if wants else None for shape, wants in zip(ctx.shapes, wanted, strict=True)]
        given = []
        for x, shape, wants in zip(grads, ctx.shapes, wanted, strict=True):
            if wants:
                given.append(like.new_zeros(*shape[:2], ctx.plan.size, *shape[3:]) if x is None else x)
        _move(ctx.plan, ctx.group, given, [x for x in out if x is not None], backward=True)
        return None, None, *out


def _move(plan: Plan, group: dist.ProcessGroup, tensors: Sequence[Tensor], out: Sequence[Tensor], backward: bool) -> None:
    """Exchanges slices of `tensors` and adds them to `out`. In the backward, slices travel from targets to sources."""
    (sent, source), (received, target) = (plan.sent, 0), (plan.received, 1)  # moves, and the field of Move that indexes them
    if backward:
        (sent, source), (received, target) = (received, target), (sent, source)

    def pieces(tensors: Sequence[Tensor], all_moves: Sequence[Sequence[Move]], at: int) -> list[list[Tensor]]:
        return [[x[:, :, move[at]] for move in moves for x in tensors] for moves in all_moves]

    sources, targets = pieces(tensors, sent, source), pieces(out, received, target)
    for x, y in zip(sources[group.rank()], targets[group.rank()], strict=True):
        y.add_(x)
    sources[group.rank()] = targets[group.rank()] = []
    counts_sent, counts_received = ([sum(x.numel() for x in of_rank) for of_rank in x] for x in (sources, targets))
    flat = [x.reshape(-1) for of_rank in sources for x in of_rank]
    message = torch.cat(flat) if flat else tensors[0].new_empty(0)
    received = all_to_all("tokens around parts", message, group, counts_sent, counts_received).wait()
    flat_targets = [x for of_rank in targets for x in of_rank]
    for x, y in zip(received.split([x.numel() for x in flat_targets]), flat_targets, strict=True):
        y.add_(x.view(y.shape))
