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
from fastmax.nn.kept_keys import KeptKeys, KeptOptions, LayerTokens, PartState


def attend(tokens: LayerTokens, options: KeptOptions, layout: Layout, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Computes for local tokens what `fastmax.nn.kept_keys.attend` computes for whole sequences.

    Every rank receives K + W + B keys of each part, however long the parts are.

    Args:
        tokens: the local tokens, (b, heads, n, ...). The sequences of all batch entries are divided in the same way.
    """
    parts, nothing = layout.of(group.rank()), Part(0, 0, 0, 0)
    own = [*parts, *[nothing] * (layout.most_parts - len(parts))]  # as many on all ranks
    left = [kept_keys.state_of_part(_part(tokens, part), part.start, options) for part in own]
    rows = torch.stack([torch.cat([state.keys, state.values], dim=-1) for state, _ in left])
    rows, numbers = _Gathered.apply(group, rows, torch.stack([_numbers(*x) for x in left]))

    (b, h), dv = tokens.q.shape[:2], tokens.v.shape[3]
    received = list(zip(rows.flatten(0, 1).unbind(), numbers.flatten(0, 1).unbind(), strict=True))
    places = (part.rank * layout.most_parts + layout.of(part.rank).index(part) for part in layout.parts)
    of_parts = [_part_state(*received[place], dv) for place in places]
    # No tokens, connected to what was received: all ranks take part in the collective of the backward.
    outputs = [(rows.flatten()[:0].view(b, h, 0, dv), tokens.q.new_zeros(b, h, 0, dtype=eager.compute_dtype(tokens.q.dtype)))]
    for part in parts:
        earlier = of_parts[: layout.index[part]] or [kept_keys.state_of_part(_part(tokens, nothing), 0, options)]
        state = kept_keys.state_of_parts(earlier, part.start, options)
        begin = torch.full((b,), part.start, device=rows.device)
        outputs.append(kept_keys.prefill(_part(tokens, part), state, begin, None, options)[:2])
    o, lse = zip(*outputs, strict=True)
    return torch.cat(o, dim=2), torch.cat(lse, dim=2)


def _part(tokens: LayerTokens, part: Part) -> LayerTokens:
    return tokens.map(lambda x: x[:, :, part.local])


def _numbers(state: KeptKeys, decay: Tensor) -> Tensor:
    """Returns what a part leaves besides rows of keys and values, float64 (b, hk, slots, 3)."""
    numbers = state.log_factors, state.positions.double(), decay.unsqueeze(-1).expand_as(state.log_factors)
    return torch.stack(numbers, dim=-1)


def _part_state(rows: Tensor, numbers: Tensor, value_dim: int) -> PartState:
    """Returns what a part leaves, given its rows and numbers."""
    keys, values = rows.split([rows.shape[-1] - value_dim, value_dim], dim=-1)
    log_factors, positions, decay = numbers.unbind(-1)
    return PartState(KeptKeys(keys, values, log_factors, positions.long()), decay[..., 0])


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
