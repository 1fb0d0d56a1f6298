"""Attention to kept keys (`fastmax.nn.kept_keys`) over ranks: each part of a sequence begins with the keys that earlier parts
leave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fastmax import eager
from fastmax.distributed.communication import all_gather, all_to_all
from fastmax.distributed.layout import Layout, Part
from fastmax.distributed.once_differentiable import once_differentiable
from fastmax.nn import kept_keys
from fastmax.nn.kept_keys import KeptKeys, KeptOptions, LayerTokens


def attend(tokens: LayerTokens, options: KeptOptions, layout: Layout, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Computes for local tokens what `fastmax.nn.kept_keys.attend` computes for whole sequences.

    Every rank receives K + W + B keys of each part, however long the parts are.

    Args:
        tokens: the local tokens, (b, heads, n, ...). The sequences of all batch entries are divided in the same way.
    """
    parts = layout.of(group.rank())
    left = [kept_keys.left_by(_part(tokens, part), part.start, options) for part in parts]
    left += [_nothing(tokens, options)] * (layout.most_parts - len(parts))
    rows = torch.stack([torch.cat([state.keys, state.values], dim=-1) for state, _ in left])
    numbers = torch.stack([_numbers(*x) for x in left])
    rows, numbers = _Gathered.apply(group, rows, numbers)

    of_parts = [
        _of_part(rows, numbers, part.rank, layout.of(part.rank).index(part), tokens.k.shape[3]) for part in layout.parts
    ]
    outputs = []
    for part in parts:
        earlier = of_parts[: layout.index[part]]
        # The first part begins without keys, and takes part in the collective of the backward like the others.
        state = kept_keys.joined(earlier or [_freed(of_parts[0])], part.start, options)
        begin = torch.full(rows.shape[2:3], part.start, device=rows.device)
        outputs.append(kept_keys.prefill(_part(tokens, part), state, begin, None, options)[:2])
    if not outputs:
        (b, h), dv = tokens.q.shape[:2], tokens.v.shape[3]
        return rows.flatten()[:0].view(b, h, 0, dv), tokens.q.new_zeros(b, h, 0, dtype=eager.compute_dtype(tokens.q.dtype))
    o, lse = zip(*outputs, strict=True)
    return torch.cat(o, dim=2), torch.cat(lse, dim=2)


def _part(tokens: LayerTokens, part: Part) -> LayerTokens:
    return LayerTokens(*(None if x is None else x[:, :, part.local] for x in tokens))  # type: ignore[arg-type]


def _nothing(tokens: LayerTokens, options: KeptOptions) -> tuple[KeptKeys, Tensor]:
    """Returns what no tokens leave, connected to `tokens` in the autograd graph: all ranks take part in the backward."""
    (b, hk, _, d), dv = tokens.k.shape, tokens.v.shape[3]
    free = KeptKeys.empty(b, hk, d, dv, tokens.k.dtype, tokens.k.device, options.kept, options.window)
    none = _part(tokens, Part(0, 0, 0, 0))
    keys, values = torch.cat([free.keys, none.k], dim=2), torch.cat([free.values, none.v], dim=2)
    decay = none.gate.sum(-1, dtype=torch.float64)
    if none.log_decay is not None:
        decay = decay + none.log_decay.sum(-1)
    return KeptKeys(keys, values, free.log_factors, free.positions), decay


def _freed(of_part: tuple[KeptKeys, Tensor]) -> tuple[KeptKeys, Tensor]:
    """Returns a part without keys, connected in the autograd graph."""
    state, decay = of_part
    return KeptKeys(state.keys, state.values, state.log_factors, torch.full_like(state.positions, -1)), decay


def _numbers(state: KeptKeys, decay: Tensor) -> Tensor:
    """Returns what a part leaves besides rows of keys and values, float64 (b, hk, slots, 3)."""
    numbers = state.log_factors, state.positions.double(), decay.unsqueeze(-1).expand_as(state.log_factors)
    return torch.stack(numbers, dim=-1)


def _of_part(rows: Tensor, numbers: Tensor, rank: int, index: int, d: int) -> tuple[KeptKeys, Tensor]:
    """Returns what a part of a rank leaves, in the form of `kept_keys.left_by`."""
    keys, values = rows[rank, index].split([d, rows.shape[-1] - d], dim=-1)
    log_factors, positions, decay = numbers[rank, index].unbind(-1)
    return KeptKeys(keys, values, log_factors, positions.long()), decay[..., 0]


class _Gathered(torch.autograd.Function):
    """All-gathers tensors: (ranks, ...). The backward sums the gradients of all ranks, in their order."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        started = [all_gather("kept keys", x, group) for x in tensors]
        return tuple(x.wait() for x in started)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(grads, ctx.needs_input_grad[1:], strict=True)
        started = [all_to_all("gradients of kept keys", x, ctx.group) if wants else None for x, wants in wanted]
        return None, *(None if x is None else _summed(x.wait()) for x in started)


def _summed(x: Tensor) -> Tensor:
    return x.sum(0, dtype=eager.compute_dtype(x.dtype)).to(x.dtype)
