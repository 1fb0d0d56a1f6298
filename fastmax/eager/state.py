"""Causal attention between recurrent states by the linear algorithm: the forward, the analytic backward, and their parts.

A state is a pair of tensors as in `fastmax.decoding.DecodeState`: kv_state (b, hk, features, dv) and k_sum (b, hk, features).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmax.core.call import CONTINUED, Call
from fastmax.core.score import Score
from fastmax.core.transforms import recording
from fastmax.eager import linear, tiles
from fastmax.eager.blocks import (
    Gradients,
    Group,
    InputGradients,
    Operands,
    by_kv_head,
    compute_dtype,
    empty_like_layout,
    head_groups,
    to_blocks,
)
from fastmax.eager.decay import QueryPairs, may_hold_nan
from fastmax.eager.dispatch import RecordedOutput, RowTerms, finish_of, linear_plan_of, operands, row_inputs, row_terms_of
from fastmax.eager.features import state_rows
from fastmax.eager.input_gate import nan_rows, with_nan_rows
from fastmax.eager.planner import LinearPlan
from fastmax.eager.recurrent import coefficients
from fastmax.eager.workspace import Workspace


class States(NamedTuple):
    """The states before and after a call, for its backward; each is a pair (kv_state, k_sum)."""

    given: tuple[Tensor, Tensor]  # before the first token
    new: tuple[Tensor | None, Tensor | None]  # after the last token; only the gradient of log_decay needs it
    grads: tuple[Tensor | None, Tensor | None]  # gradients of `new`; None for zeros


class StateGradients(NamedTuple):
    """The gradients of `forward_from_state`."""

    inputs: InputGradients
    tensors: dict[str, Tensor | None]  # of the call's differentiable tensors, by name; None for an absent tensor
    state: tuple[Tensor, Tensor]  # of the given kv_state and k_sum


def zero_state(k: Tensor, v: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Returns kv_state and k_sum before any token."""
    b, hk, _, d = k.shape
    features = state_rows(d, order)
    k_sum = k.new_zeros(b, hk, features, dtype=compute_dtype(k.dtype))
    return k_sum.new_zeros(b, hk, features, v.shape[3]), k_sum


def forward_from_state(
    q: Tensor, k: Tensor, v: Tensor, call: Call, kv_state: Tensor, k_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the output and denominators of n tokens that continue from a state, and the new kv_state and k_sum."""
    (b, _, n, d), (_, hk, _, dv) = q.shape, v.shape
    if b == 0 or n == 0:
        return empty_like_layout(q, dv), kv_state.new_empty(q.shape[:3]), kv_state, k_sum
    order = call.score.order
    plan = linear_plan_of(q, k, v, call)._replace(heads=b * hk)
    recorded = recording(q, k, v, kv_state, k_sum, *call.differentiable)
    workspace = None if recorded else Workspace(kv_state.dtype, q.device)
    ops = operands(q, k, v, call, state=k_sum[..., 0])
    if call.log_decay is not None and may_hold_nan(k_sum[..., 0]):  # `ops.decay` makes the queries that read it NaN
        kv_state, k_sum = _filled((kv_state, k_sum), k_sum[..., 0].isnan(), 0.0)
    output = RecordedOutput(ops, finish_of(call))
    state = linear.unpack_state(kv_state.flatten(0, 1), k_sum.flatten(0, 1), d, order)
    state = linear.forward(ops, plan, output, workspace, state)
    sums = _with_nan_of_decays(ops, tuple(x.unflatten(0, (b, hk)) for x in linear.pack_state(state, d)))
    sums = _with_nan_of_gates(call, sums)
    return *with_nan_rows(*output.join(q), call, in_place=not recorded), *sums


def backward_from_state(
    grad_o: Tensor, grad_z: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, z: Tensor, call: Call, states: States
) -> StateGradients:
    """Returns the gradients of `forward_from_state`.

    With phi the features, c their coefficients in f, and `f(q.k) = sum_r c_r phi_r(q) phi_r(k)`:

        kv_state_r = sum_j phi_r(k_j) v_j        gradient of kv_state_r = c_r sum_i phi_r(q_i) g_i
        k_sum_r    = sum_j phi_r(k_j)            gradient of k_sum_r    = c_r sum_i phi_r(q_i) e_i

    The reverse pass holds these sums over queries without c. It starts from the gradient of the new state divided by c, and its
    final state times c is the gradient of the given state.
    """
    grads = InputGradients.zeros(q, k, v)
    tensors = _zero_gradients(call)
    new_grads = (torch.zeros_like(x) if grad is None else grad for x, grad in zip(states.given, states.grads, strict=True))
    state_grads = tuple(x.clone(memory_format=torch.contiguous_format) for x in new_grads)
    if q.numel() > 0:
        pairs_after = None if call.log_decay is None else _pairs_of_state(states.new, states.grads)
        rows, hk = row_inputs(grad_o, grad_z, o, z, call), k.shape[1]
        workspace = Workspace(compute_dtype(q.dtype), q.device)
        for group, plan, ops in _groups(q, k, v, call):
            sums = Gradients(ops, grads.of_group(group, hk))
            given, grads_of_group = (tuple(x[group] for x in pair) for pair in (states.given, state_grads))
            _backward_of_group_(grads_of_group, given, ops, plan, row_terms_of(ops, rows, hk, group), sums, workspace)
            sums.write()
            pairs: tuple = ()
            if sums.decay is not None:
                pairs = _pairs_of_state(given, grads_of_group), 0.0 if pairs_after is None else pairs_after[group]
            _write_per_head(tensors, group, sums.per_head(*pairs))
    return StateGradients(grads, tensors, state_grads)


def _backward_of_group_(
    state_grads: tuple[Tensor, Tensor],
    given: tuple[Tensor, Tensor],
    ops: Operands,
    plan: LinearPlan,
    terms: RowTerms,
    sums: Gradients,
    workspace: Workspace,
) -> None:
    """Runs `linear.backward` for a head group; overwrites the gradients of the new state by those of the given state."""
    d, order = ops.q.shape[-1], ops.score.order
    score = _divisors(ops.call, ops.dtype)
    factors = coefficients(d, score, state_grads[0])
    query_sums = (state_grads[0] / factors.unsqueeze(-1), state_grads[1] / factors)
    before, after = (
        linear.unpack_state(kv_state.flatten(0, 1), k_sum.flatten(0, 1), d, order) for kv_state, k_sum in (given, query_sums)
    )
    after = linear.backward(ops, plan, terms, sums, workspace, before, after, score)
    for x, out in zip(linear.pack_state(after, d), state_grads, strict=True):
        out.copy_(x.view_as(out))
    state_grads[0].mul_(factors.unsqueeze(-1))
    state_grads[1].mul_(factors)


def state_of_keys(k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Returns kv_state and k_sum after a causal call with these keys that starts from zeros."""
    kv_state, k_sum = zero_state(k, v, call.score.order)
    workspace, d = Workspace(kv_state.dtype, k.device), k.shape[3]
    for group, plan, ops in _groups(k, k, v, call):
        state = linear.pack_state(linear.state_of_keys(ops, plan, workspace), d)
        state = _with_nan_of_decays(ops, tuple(x.unflatten(0, ops.k.shape[:2]) for x in state))
        _write_state((kv_state, k_sum), group, state)
    return _with_nan_of_gates(call, (kv_state, k_sum))


def state_of_queries(g: Tensor, e: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the given kv_state and k_sum for a new state whose gradients are zero."""
    kv_state, k_sum = zero_state(k, v, call.score.order)
    workspace, d = Workspace(kv_state.dtype, k.device), k.shape[3]
    factors = coefficients(d, _divisors(call, kv_state.dtype), kv_state)
    for group, plan, ops in _groups(q, k, v, call):
        state = linear.state_of_queries(ops, plan, _given_terms(ops, g, e, k.shape[1], group), workspace)
        _write_state((kv_state, k_sum), group, linear.pack_state(state, d))
    return kv_state.mul_(factors.unsqueeze(-1)), k_sum.mul_(factors)


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of g for tokens of a dtype: float32 for float16, whose range is too small, else the same dtype."""
    return torch.float32 if dtype == torch.float16 else dtype


def gradients_of_sums(grad_o: Tensor, grad_z: Tensor | None, o: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the numerator (g) and of the denominator (e); see `fastmax.ops.gradients_of_sums`.

    e is computed from the rounded g, because the two terms of g.v + e cancel if o is close to v.
    """
    inverse = tiles.reciprocal(z).unsqueeze(-1)
    g = (grad_o * inverse).to(sums_dtype(o.dtype)).contiguous()
    e = -(g.to(z.dtype) * o).sum(-1)
    return g, e if grad_z is None else e + torch.where(z == tiles.NO_KEYS, 0.0, grad_z)


def backward_of_queries(
    g: Tensor, e: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call, state: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradient of q of `backward_from_state`, and for calls with decays the pair sums of the queries, else None.

    The pair sums (b, h, n) of a query run over its pairs with keys of other chunks; see `DecayGradient.add_queries`.
    """
    grads = InputGradients.zeros(q, k[:, :, :0], v[:, :, :0])
    pairs = None if call.log_decay is None else torch.zeros_like(e, memory_format=torch.contiguous_format)
    workspace, hk = Workspace(compute_dtype(q.dtype), q.device), k.shape[1]
    for group, plan, ops in _groups(q, k, v, call):
        sums = Gradients(ops, grads.of_group(group, hk))
        if pairs is not None:
            of_queries: Any = QueryPairs(by_kv_head(pairs, hk)[group])  # this pass calls no other method of the gradient
            sums.decay = of_queries
        kv_state, k_sum = (x[group].flatten(0, 1) for x in state)
        before = linear.unpack_state(kv_state, k_sum, q.shape[3], call.score.order)
        linear.backward_of_queries(ops, plan, _given_terms(ops, g, e, hk, group), sums, workspace, before)
        sums.write()
    return grads.q, pairs


def backward_of_keys(
    g: Tensor,
    e: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    state_grads: tuple[Tensor, Tensor],
    pairs: Tensor | None,
    pairs_of_states: Tensor | None,
) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor | None]]:
    """Returns the gradients (k, v) of `backward_from_state`, and those of the call's differentiable tensors by name.

    Args:
        state_grads: gradients of the new state.
        pairs: the pair sums of `backward_of_queries`.
        pairs_of_states: (b, hk, 2), `_pairs_of_state` of the new state and of the given state.
    """
    grads = InputGradients.zeros(q[:, :, :0], k, v)
    tensors = _zero_gradients(call)
    workspace, hk = Workspace(compute_dtype(q.dtype), q.device), k.shape[1]
    score = _divisors(call, state_grads[0].dtype)
    factors = coefficients(q.shape[3], score, state_grads[0])
    query_sums = state_grads[0] / factors.unsqueeze(-1), state_grads[1] / factors
    for group, plan, ops in _groups(q, k, v, call):
        sums = Gradients(ops, grads.of_group(group, hk))
        if sums.decay is not None:
            of_group = by_kv_head(pairs, hk)[group]
            sums.decay.add_queries(0, of_group.flatten(2).flatten(0, 1).unsqueeze(-1), of_group.shape[2])
        kv_state, k_sum = (x[group].flatten(0, 1) for x in query_sums)
        after = linear.unpack_state(kv_state, k_sum, q.shape[3], call.score.order)
        linear.backward_of_keys(ops, plan, _given_terms(ops, g, e, hk, group), sums, workspace, after, score)
        sums.write()
        pairs_of_group = () if sums.decay is None else reversed(pairs_of_states[group].split(1, dim=-1))
        _write_per_head(tensors, group, sums.per_head(*pairs_of_group))
    return (grads.k, grads.v), tensors


def _zero_gradients(call: Call) -> dict[str, Tensor | None]:
    """Returns zeros for the gradients of the call's differentiable tensors, by name; None for an absent tensor."""
    given = {name: getattr(call, name) for name in CONTINUED.differentiable}
    return {
        name: None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format) for name, x in given.items()
    }


def _write_per_head(tensors: dict[str, Tensor | None], group: Group, of_group: dict[str, Tensor]) -> None:
    """Writes the gradients of a head group, `Gradients.per_head`, into those of all heads."""
    for name, x in of_group.items():
        tensors[name][group] = x.to(tensors[name].dtype)


def _groups(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Iterator[tuple[Group, LinearPlan, Operands]]:
    """Yields each head group with the plan and its operands; nothing if q is empty."""
    plan, (b, hk) = linear_plan_of(q, k, v, call), k.shape[:2]
    for group in head_groups(b, hk, plan.heads) if q.numel() > 0 else ():
        yield group, plan, operands(q, k, v, call, group)


def _given_terms(ops: Operands, g: Tensor, e: Tensor, kv_heads: int, group: Group) -> RowTerms:
    """Returns the function from a span of a head group's queries to its g and e."""
    of_group = [by_kv_head(x, kv_heads)[group] for x in (g, e.unsqueeze(-1))]
    return lambda span: tuple(to_blocks(x, span).to(ops.dtype) for x in of_group)


def _filled(state: tuple[Tensor, Tensor], where: Tensor, x: float) -> tuple[Tensor, Tensor]:
    """Returns a state filled with x in the heads that `where` (b, hk) selects."""
    kv_state, k_sum = state
    return torch.where(where[..., None, None], x, kv_state), torch.where(where[..., None], x, k_sum)


def _with_nan_of_decays(ops: Operands, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the new state of a call, filled with NaN in the heads where a decay of NaN follows a key."""
    if ops.decay is None or ops.decay.nan_state is None:
        return state
    return _filled(state, ops.decay.nan_state, torch.nan)


def _with_nan_of_gates(call: Call, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the new state of a call, filled with NaN in the heads where it holds a key with a gate of NaN."""
    is_nan = nan_rows(call, 1)
    return state if is_nan is None else _filled(state, is_nan[..., -1], torch.nan)


def _pairs_of_state(state: tuple[Tensor | None, Tensor | None], grads: tuple[Tensor | None, Tensor | None]) -> Tensor | None:
    """Returns the inner product of a state and its gradients, (b, hk, 1) in float64; None without gradients.

    It is the derivative with respect to the logarithm of a common factor of the state.
    """
    # An element with gradient 0 contributes nothing, even if it is not finite.
    given = [(x, grad) for x, grad in zip(state, grads, strict=True) if grad is not None]
    products = [torch.where(grad == 0.0, 0.0, x.double() * grad) for x, grad in given]
    return sum(x.flatten(2).sum(-1, keepdim=True) for x in products) if products else None


def _write_state(out: tuple[Tensor, Tensor], group: Group, state: tuple[Tensor, Tensor]) -> None:
    """Copies kv_state and k_sum of a head group into those of all heads."""
    for whole, x in zip(out, state, strict=True):
        of_group = whole[group]
        of_group.copy_(x.view_as(of_group))


def _divisors(call: Call, dtype: torch.dtype) -> Score:
    """Returns the score of a call with nonzero coefficients, by which gradients of states can be divided."""
    return call.score.without_zeros(torch.finfo(dtype).eps ** 2)
