"""Dispatch of a call: its algorithm and block sizes, and the operands of each head group (batch entries and kv heads)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from fastmax.core.call import PER_HEAD, Call
from fastmax.core.score import Softmax
from fastmax.eager import exact, flash, linear, planner, quadratic, tiles
from fastmax.eager.blocks import Group, Operands, Span, by_kv_head, compute_dtype, from_blocks, in_layout_of, to_blocks
from fastmax.eager.decay import Decay
from fastmax.eager.input_gate import without_nan
from fastmax.eager.planner import LinearPlan, QuadraticPlan

RowTerms = Callable[[Span], tuple[Tensor, ...]]  # see `tiles.row_terms`


def tiles_of(call: Call) -> ModuleType:
    """Returns the module that computes one tile of the call's weights."""
    if isinstance(call.score, Softmax):
        return flash
    return exact if call.exact_window > 0 else tiles


def finish_of(call: Call) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the function from the sums of a row to its output and its denominator or log-sum-exp."""
    kind = tiles_of(call)
    return tiles.finish_decayed if kind is tiles and call.log_decay is not None else kind.finish


def group_size(q: Tensor, k: Tensor) -> int:
    """Returns the number of query heads per kv head; 1 for tensors without heads."""
    return max(1, q.shape[1] // max(1, k.shape[1]))


def algorithm_of(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str:
    """Returns "quadratic" or "linear": the only one that supports the call, the requested one, or the cheaper one."""
    bounded = not call.causal and (call.k_start is not None or call.k_end is not None)
    if isinstance(call.score, Softmax) or call.exact_window > 0 or call.rpe_matrix is not None or bounded:
        return "quadratic"
    if call.algorithm != "auto":
        return call.algorithm
    (n, d), (m, dv) = q.shape[2:], v.shape[2:]
    return planner.choose_algorithm(n, m, d, dv, call.causal, call.score.order, group_size(q, k))


def plan_of(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[ModuleType, LinearPlan | QuadraticPlan]:
    """Returns the module of the call's algorithm, and its block sizes."""
    if algorithm_of(q, k, v, call) == "linear":
        return linear, linear_plan_of(q, k, v, call)
    (b, hk, m, _), n = k.shape, q.shape[2]
    return quadratic, planner.plan_quadratic(q.device, b * hk, group_size(q, k), n, m)


def linear_plan_of(q: Tensor, k: Tensor, v: Tensor, call: Call) -> LinearPlan:
    """Returns the block sizes of the linear algorithm."""
    (b, hk, _, d), dv = k.shape, v.shape[3]
    return planner.plan_linear(q.device, b * hk, group_size(q, k), d, dv, call.score.order)


def operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    group: Group = (slice(None), slice(None)),
    state: Tensor | None = None,
) -> Operands:
    """Returns the operands of a head group; `state` (b, hk) is the argument of `Decay`."""
    batch, _ = group
    mask = call.attention_mask
    per_head = {name: getattr(call, name) for name in PER_HEAD}
    per_head = {name: None if x is None else x[group] for name, x in per_head.items()}
    call = call._replace(attention_mask=None if mask is None else mask[batch], **per_head)
    if call.log_input_gate is not None:
        call = call._replace(log_input_gate=without_nan(call.log_input_gate))
    decay = None
    if any(x is not None for x in (call.log_decay, call.k_start, call.k_end)):
        decay = Decay(
            call.log_decay,
            call.k_start,
            call.k_end,
            shift=k.shape[2] - q.shape[2],
            dtype=compute_dtype(q.dtype),
            mask=call.attention_mask,
            left=None if call.left < 0 else call.left,
            state=state,
            lag=call.lag,
        )
    of_q, of_k, of_v = (by_kv_head(x, k.shape[1])[group] for x in (q, k, v))
    return Operands(of_q, of_k, of_v, call, tiles_of(call), decay)


class RecordedOutput:
    """A sink that keeps the output of each span and concatenates them at the end, so that autograd can record it."""

    def __init__(self, ops: Operands, finish: Callable[..., tuple[Tensor, Tensor]]):
        self._like = ops.q
        self._finish = finish
        self._parts: list[tuple[Tensor, Tensor]] = []

    def __call__(self, span: Span, sums: tuple[Tensor, ...]) -> None:
        self._parts.append(self._finish(*(from_blocks(x, span, self._like) for x in sums)))

    def join(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output in q's dtype and layout, and the second result of `finish`; needs at least one query."""
        o, z = (torch.cat(parts, dim=3).flatten(1, 2) for parts in zip(*self._parts, strict=True))
        return in_layout_of(q, o.to(q.dtype)), z.squeeze(-1)


def row_inputs(grad_o: Tensor, grad_z: Tensor | None, o: Tensor, z: Tensor, call: Call) -> dict[str, Tensor]:
    """Returns the arguments of `row_terms` by name, each (b, h, n, channels)."""
    rows = {"grad_o": grad_o, "o": o, "z": z.unsqueeze(-1)}
    if grad_z is not None:
        rows["grad_z"] = grad_z.unsqueeze(-1)
    if call.drop_noise is not None:
        rows["noise"] = call.drop_noise
    return rows


def row_terms_of(ops: Operands, rows: dict[str, Tensor], kv_heads: int, group: Group) -> RowTerms:
    """Returns the function from a span of a head group's queries to its `row_terms`."""
    of_group = {name: by_kv_head(x, kv_heads)[group] for name, x in rows.items()}
    return lambda span: ops.tiles.row_terms(ops.call, **{name: to_blocks(x, span) for name, x in of_group.items()})
