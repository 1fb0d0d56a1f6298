"""The operator in PyTorch operations, on any device: forward, analytic backward, and a forward that autograd can record."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastmax.core.call import PER_HEAD, Call
from fastmax.core.score import Score, Softmax
from fastmax.eager import exact, flash, linear, quadratic, tiles
from fastmax.eager.blocks import (
    Gradients,
    Operands,
    Span,
    compute_dtype,
    differentiating,
    empty_like_layout,
    from_blocks,
    head_groups,
    in_functorch,
    is_transformed,
    recording,
    to_blocks,
    token_major,
)
from fastmax.eager.decay import Decay, QueryPairs, finite_decay, may_hold_nan, not_above_zero, sum_of_decays, sums_in_window
from fastmax.eager.features import state_rows
from fastmax.eager.gathered import gathered_step_
from fastmax.eager.merge import merge_
from fastmax.eager.normalization import (
    empty_factors,
    normalize_tokens,
    normalize_tokens_backward,
    token_factors,
    unit_rows,
)
from fastmax.eager.planner import choose_algorithm, plan_linear, plan_quadratic
from fastmax.eager.recurrent import coefficients, decode_step, decode_step_, softmax_step, sums_of_weights
from fastmax.eager.workspace import Workspace

__all__ = [
    "algorithm_of",
    "backward",
    "backward_from_state",
    "backward_of_keys",
    "backward_of_queries",
    "compute_dtype",
    "decode_step",
    "decode_step_",
    "differentiating",
    "empty_factors",
    "empty_like_layout",
    "finite_decay",
    "forward",
    "forward_from_state",
    "gathered_step_",
    "gradients_of_sums",
    "in_functorch",
    "is_transformed",
    "merge_",
    "normalize_tokens",
    "normalize_tokens_backward",
    "not_above_zero",
    "recording",
    "softmax_step",
    "state_of_keys",
    "state_of_queries",
    "state_rows",
    "sum_of_decays",
    "sums_dtype",
    "sums_in_window",
    "sums_of_weights",
    "token_factors",
    "unit_rows",
    "zero_state",
]


def _tiles(call: Call):
    """What the kinds of weights differ in: sums over a tile and what becomes of them."""
    if isinstance(call.score, Softmax):
        return flash
    return exact if call.exact_window > 0 else tiles


def _finish(call: Call) -> Callable[..., tuple[Tensor, Tensor]]:
    """From the sums to the output, and to what is returned beside it."""
    kind = _tiles(call)
    return tiles.finish_faded if kind is tiles and call.log_decay is not None else kind.finish


def algorithm_of(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str:
    """ "quadratic" or "linear": what is asked for, or chosen, or the one that there is."""
    bounded = not call.causal and (call.first_key is not None or call.end_key is not None)
    if isinstance(call.score, Softmax) or call.exact_window > 0 or call.rpe_matrix is not None or bounded:
        return "quadratic"
    if call.algorithm != "auto":
        return call.algorithm
    (n, d), (m, dv) = q.shape[2:], v.shape[2:]
    return choose_algorithm(n, m, d, dv, call.causal, call.score.order, _group_size(q, k))


def _plan(q: Tensor, k: Tensor, v: Tensor, call: Call, whole: bool):
    """The algorithm's module and its plan; `whole` keeps all heads in one group."""
    (b, _, n, d), (_, hk, m, _), dv = q.shape, k.shape, v.shape[3]
    group = _group_size(q, k)
    if algorithm_of(q, k, v, call) == "quadratic":
        module, plan = quadratic, plan_quadratic(q.device, b * hk, group, n, m)
    else:
        module, plan = linear, plan_linear(q.device, b * hk, group, d, dv, call.score.order)
    return module, plan._replace(heads=b * hk) if whole else plan


def _group_size(q: Tensor, k: Tensor) -> int:
    """Query heads a kv head; 1 where there are none."""
    return max(1, q.shape[1] // max(1, k.shape[1]))


def _five(x: Tensor, kv_heads: int) -> Tensor:
    """(b, h, tokens, c) -> (b, kv_heads, h // kv_heads, tokens, c)."""
    return x.unflatten(1, (kv_heads, -1))


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    batch: slice = slice(None),
    heads: slice = slice(None),
    state: Tensor | None = None,
) -> Operands:
    """Those of a group of heads; `state` (b, hk) as `Decay` takes it."""
    mask = call.attention_mask
    per_head = {name: getattr(call, name) for name in PER_HEAD}
    per_head = {name: None if x is None else x[batch, heads] for name, x in per_head.items()}
    call = call._replace(attention_mask=None if mask is None else mask[batch], **per_head)
    decay = None
    if any(x is not None for x in per_head.values()):
        dtype, left = compute_dtype(q.dtype), None if call.left < 0 else call.left
        accompanying = {"mask": call.attention_mask, "left": left, "state": state}
        decay = Decay(**per_head, shift=k.shape[2] - q.shape[2], dtype=dtype, **accompanying)
    return Operands(*(_five(x, k.shape[1])[batch, heads] for x in (q, k, v)), call, _tiles(call), decay)


def _widened(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Call]:
    """Tensors in the dtype of their blocks, so that autograd adds up the blocks' gradients in it, and rounds them once."""
    dtype, rpe = compute_dtype(q.dtype), call.rpe_matrix
    call = call._replace(rpe_matrix=None if rpe is None else rpe.to(dtype))
    return q.to(dtype), k.to(dtype), v.to(dtype), call


class _Parts:
    """A sink that keeps the outputs and joins them at the end, as autograd wants it."""

    def __init__(self, ops: Operands, finish: Callable):
        self._like = ops.q
        self._finish = finish
        self._parts: list[tuple[Tensor, Tensor]] = []

    def __call__(self, span: Span, sums: tuple[Tensor, ...]) -> None:
        self._parts.append(self._finish(*(from_blocks(x, span, self._like) for x in sums)))

    def join(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Output in q's dtype and layout, denominators or what `finish` gives for them; there is at least one query."""
        o, z = (torch.cat(parts, dim=3).flatten(1, 2) for parts in zip(*self._parts, strict=True))
        o = o.to(q.dtype)
        if token_major(q):
            o = o.transpose(1, 2).contiguous().transpose(1, 2)
        return o, z.squeeze(-1)


def forward_from_state(
    q: Tensor, k: Tensor, v: Tensor, call: Call, values: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention of n tokens that continue from a state, by the linear algorithm: output, denominators, values, weights.

    `values` (b, hk, features, dv) and `weights` (b, hk, features) as in `fastmax.decoding.DecodeState`.
    """
    (b, _, n, d), (_, hk, _, dv) = q.shape, v.shape
    if b == 0 or n == 0:
        return empty_like_layout(q, dv), values.new_empty(q.shape[:3]), values, weights
    order = call.score.order
    plan = plan_linear(q.device, b * hk, q.shape[1] // hk, d, dv, order)._replace(heads=b * hk)
    recorded = recording(q, k, v, values, weights, call.log_decay)
    workspace = None if recorded else Workspace(values.dtype, q.device)
    ops = _operands(q, k, v, call, state=weights[..., 0])
    if call.log_decay is not None and may_hold_nan(weights[..., 0]):  # `ops.decay` knows where, and which queries see that
        values, weights = _filled((values, weights), weights[..., 0].isnan(), 0.0)
    parts = _Parts(ops, _finish(call))
    state = linear.unpack_state(values.flatten(0, 1), weights.flatten(0, 1), d, order)
    state = linear.forward(ops, plan, parts, workspace, state)
    state = _behind_nan(ops, tuple(x.unflatten(0, (b, hk)) for x in linear.pack_state(state, d)))
    return *parts.join(q), *state


def _filled(state: tuple[Tensor, Tensor], where: Tensor, x: float) -> tuple[Tensor, Tensor]:
    """Values (b, hk, features, dv) and weights (b, hk, features), with x in all of them where (b, hk)."""
    values, weights = state
    return torch.where(where[..., None, None], x, values), torch.where(where[..., None], x, weights)


def _behind_nan(ops: Operands, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The state in which a call ends: NaN where a decay of NaN is behind one of its keys."""
    if ops.decay is None or ops.decay.nan_state is None:
        return state
    return _filled(state, ops.decay.nan_state, torch.nan)


class States(NamedTuple):
    """What a call continued from and ended in, for its gradient: values (b, hk, features, dv) and weights (b, hk, features)."""

    given: tuple[Tensor, Tensor]
    new: tuple[Tensor | None, Tensor | None]  # for the gradient of log_decay
    grads: tuple[Tensor | None, Tensor | None]  # of the new ones; None for zeros


def _pairs_of_state(state: tuple[Tensor | None, Tensor | None], grads: tuple[Tensor | None, Tensor | None]) -> Tensor | None:
    """(b, hk, 1), float64: the derivative by the logarithm of everything that is in a state; None without any gradient."""
    # What has no gradient has no part in it, even if it is not finite or not there.
    given = [(x, grad) for x, grad in zip(state, grads, strict=True) if grad is not None]
    products = [torch.where(grad == 0.0, 0.0, x.double() * grad) for x, grad in given]
    return sum(x.flatten(2).sum(-1, keepdim=True) for x in products) if products else None


def backward_from_state(
    grad_o: Tensor, grad_z: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, z: Tensor, call: Call, states: States
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, tuple[Tensor, Tensor]]:
    """Gradients of `forward_from_state`: of q, k, v as in `backward`, of log_decay (None without one), of values and weights.

    The gradient of a state is one of sums over queries, as the state is of sums over keys: f's coefficient of each feature
    times the features of q times (g, e). The walk back in time has these sums without the coefficients, so what it begins with
    is divided by them, and what it ends with is multiplied.
    """
    call = call._replace(algorithm="linear")
    grads, grad_decay = _zero_gradients(q, k, v, call.log_decay)
    new_grads = (torch.zeros_like(x) if grad is None else grad for x, grad in zip(states.given, states.grads, strict=True))
    state_grads = tuple(x.clone(memory_format=torch.contiguous_format) for x in new_grads)
    if q.numel() > 0:
        behind = None if grad_decay is None else _pairs_of_state(states.new, states.grads)
        _add_gradients(grads, None, grad_decay, grad_o, grad_z, q, k, v, o, z, call, (states.given, state_grads), behind)
    return grads, grad_decay, state_grads


def state_of_keys(k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Values (b, hk, features, dv) and weights (b, hk, features): the state in which a causal call of these keys ends."""
    (b, hk, _, d), dv, order = k.shape, v.shape[3], call.score.order
    values, weights = zero_state(k, v, order)
    plan, workspace = plan_linear(k.device, b * hk, 1, d, dv, order), Workspace(values.dtype, k.device)
    for batch, heads in head_groups(b, hk, plan.heads) if k.numel() > 0 else ():
        ops = _operands(k, k, v, call, batch, heads)
        state = linear.pack_state(linear.state_of_keys(ops, plan, workspace), d)
        shape = ops.k.shape[:2]
        _write_state(_behind_nan(ops, tuple(x.unflatten(0, shape) for x in state)), (values, weights), batch, heads)
    return values, weights


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of g, the gradient of a sum of values of a dtype: float16, which has no room for it, is widened."""
    return torch.float32 if dtype == torch.float16 else dtype


def gradients_of_sums(grad_o: Tensor, grad_z: Tensor | None, o: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """See `fastmax.ops.gradients_of_sums`. e is made of g as that is rounded: where o is close to v both cancel in g.v + e."""
    inverse = tiles.reciprocal(z).unsqueeze(-1)
    g = (grad_o * inverse).to(sums_dtype(o.dtype)).contiguous()
    e = -(g.to(z.dtype) * o).sum(-1)
    return g, e if grad_z is None else e + torch.where(z == tiles.NO_KEYS, 0.0, grad_z)


def _given_terms(ops: Operands, g: Tensor, e: Tensor, kv_heads: int, batch: slice, heads: slice):
    """g and e of spans of a head group, as `_terms`."""
    group = [_five(x, kv_heads)[batch, heads] for x in (g, e.unsqueeze(-1))]
    return lambda span: tuple(to_blocks(x, span).to(ops.dtype) for x in group)


def _groups(g: Tensor, e: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call):
    """Batch entries and heads of each head group, its operands and terms; and the plan."""
    (b, hk, _, d), dv = k.shape, v.shape[3]
    plan = plan_linear(k.device, b * hk, _group_size(q, k), d, dv, call.score.order)
    for batch, heads in head_groups(b, hk, plan.heads) if q.numel() > 0 else ():
        ops = _operands(q, k, v, call, batch, heads)
        yield (batch, heads), plan, ops, _given_terms(ops, g, e, hk, batch, heads)


def backward_of_queries(
    g: Tensor, e: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call, state: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The gradient of q as `backward_from_state` has it, and with a decay the sums (b, h, n) of pairs of each query with keys
    of other chunks."""
    grads = tuple(empty_like_layout(x, x.shape[-1]).zero_() for x in (q, k[:, :, :0], v[:, :, :0]))
    pairs = None if call.log_decay is None else torch.zeros_like(e, memory_format=torch.contiguous_format)
    workspace, hk = Workspace(compute_dtype(q.dtype), q.device), k.shape[1]
    for group, plan, ops, terms in _groups(g, e, q, k, v, call):
        sums = Gradients(ops, tuple(_five(x, hk)[group] for x in grads), None)
        if pairs is not None:
            sums.decay = QueryPairs(_five(pairs, hk)[group])
        before = linear.unpack_state(*(x[group].flatten(0, 1) for x in state), q.shape[3], call.score.order)
        linear.backward_of_queries(ops, plan, terms, sums, workspace, before)
        sums.write()
    return grads[0], pairs


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
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """The gradients of k and v as `backward_from_state` has them, and of log_decay by the pairs of `backward_of_queries`."""
    grads = tuple(empty_like_layout(x, x.shape[-1]).zero_() for x in (q[:, :, :0], k, v))
    of_decay = None if call.log_decay is None else torch.zeros_like(call.log_decay, memory_format=torch.contiguous_format)
    workspace, hk = Workspace(compute_dtype(q.dtype), q.device), k.shape[1]
    score = _divisors(call.score, state_grads[0].dtype)
    factors = coefficients(q.shape[3], score, state_grads[0])
    behind_all = state_grads[0] / factors.unsqueeze(-1), state_grads[1] / factors
    for group, plan, ops, terms in _groups(g, e, q, k, v, call):
        sums = Gradients(ops, tuple(_five(x, hk)[group] for x in grads), None)
        if of_decay is not None:
            of_group = _five(pairs, hk)[group]
            sums.decay.add_queries(0, of_group.flatten(2).flatten(0, 1).unsqueeze(-1), of_group.shape[2])
        behind = linear.unpack_state(*(x[group].flatten(0, 1) for x in behind_all), q.shape[3], call.score.order)
        linear.backward_of_keys(ops, plan, terms, sums, workspace, behind, score)
        sums.write()
        if of_decay is not None:
            behind_pairs, before_pairs = pairs_of_states[group].split(1, dim=-1)
            of_decay[group] = sums.decay.result(before_pairs, behind_pairs).to(of_decay.dtype)
    return grads[1:], of_decay


def state_of_queries(g: Tensor, e: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """What `backward_from_state` returns as gradients of values and weights, where those of the new state are zeros."""
    values, weights = zero_state(k, v, call.score.order)
    workspace, d = Workspace(values.dtype, k.device), k.shape[3]
    factors = coefficients(d, _divisors(call.score, values.dtype), values)
    for group, plan, ops, terms in _groups(g, e, q, k, v, call):
        state = linear.state_of_queries(ops, plan, terms, workspace)
        _write_state(linear.pack_state(state, d), (values, weights), *group)
    return values.mul_(factors.unsqueeze(-1)), weights.mul_(factors)


def zero_state(k: Tensor, v: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Values (b, hk, features, dv) and weights (b, hk, features) before any token."""
    b, hk, _, d = k.shape
    features = state_rows(d, order)
    weights = k.new_zeros(b, hk, features, dtype=compute_dtype(k.dtype))
    return weights.new_zeros(b, hk, features, v.shape[3]), weights


def _write_state(state: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], batch: slice, heads: slice) -> None:
    for x, whole in zip(state, out, strict=True):
        of_group = whole[batch, heads]
        of_group.copy_(x.view_as(of_group))


def _divisors(score: Score, dtype: torch.dtype) -> Score:
    """The coefficients that gradients of states are divided by."""
    return score.without_zeros(torch.finfo(dtype).eps ** 2)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, differentiable: bool) -> tuple[Tensor, Tensor]:
    """Output (b, h, n, dv) in q's dtype and layout, and (b, h, n) in the compute dtype: denominators, or for softmax the
    log-sum-exp.

    `differentiable` keeps to operations that autograd can record; otherwise large temporaries are written in place.
    """
    o, z = _attend(q, k, v, call, differentiable)
    if call.drop_noise is None:
        return o, z
    add = torch.addcmul if differentiable else Tensor.addcmul_
    return add(o, o, call.drop_noise, value=call.dropout), z


def _attend(q: Tensor, k: Tensor, v: Tensor, call: Call, differentiable: bool) -> tuple[Tensor, Tensor]:
    """`forward` without the noise, on one head group after the other."""
    finish = _finish(call)
    o = empty_like_layout(q, v.shape[-1])
    z = q.new_full(q.shape[:3], _tiles(call).NO_KEYS, dtype=compute_dtype(q.dtype))
    if o.numel() == 0 or k.numel() == 0:
        o.zero_()
        zero = sum(x.flatten()[:0].sum() for x in (q, k, v))  # part of the graph
        return (o + zero, z + zero) if differentiable else (o, z)
    module, plan = _plan(q, k, v, call, whole=differentiable)
    if differentiable:
        ops = _operands(*_widened(q, k, v, call))
        parts = _Parts(ops, finish)
        module.forward(ops, plan, parts, None)
        return parts.join(q)
    hk = k.shape[1]
    workspace = Workspace(z.dtype, q.device)
    for batch, heads in head_groups(k.shape[0], hk, plan.heads):
        ops = _operands(q, k, v, call, batch, heads)
        o_group, z_group = _five(o, hk)[batch, heads], _five(z.unsqueeze(-1), hk)[batch, heads]

        def write(span: Span, sums: tuple[Tensor, ...], like=ops.q, o_group=o_group, z_group=z_group):
            rows = slice(span.start, span.stop)
            sums = (from_blocks(x, span, like) for x in sums)
            z_group[:, :, :, rows] = finish(*sums, out=o_group[:, :, :, rows])[1]

        module.forward(ops, plan, write, workspace)
    return o, z


def backward(
    grad_o: Tensor, grad_z: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, z: Tensor, call: Call
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor | None]]:
    """Gradients of q, k, v in their dtypes and layouts, and of the call's differentiable tensors, None where there is none.

    With g_i and e_i of `tiles.row_terms` the derivative of the loss by the weight w_ij is `u_ij = g_i . v_j + e_i` (for
    softmax: by the normalised weight); everything else follows from `w_ij = f(s_ij)`. `grad_z`, of the denominator or the
    log-sum-exp, is not read where a query sees no key.
    """
    rpe = call.rpe_matrix
    grads, grad_decay = _zero_gradients(q, k, v, call.log_decay)
    grad_rpe = None if rpe is None else torch.zeros_like(rpe, dtype=compute_dtype(rpe.dtype))
    if q.numel() > 0 and k.numel() > 0:
        _add_gradients(grads, grad_rpe, grad_decay, grad_o, grad_z, q, k, v, o, z, call)
    return grads, {"rpe_matrix": None if rpe is None else grad_rpe.to(rpe.dtype), "log_decay": grad_decay}


def _zero_gradients(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
    grads = tuple(empty_like_layout(x, x.shape[-1]).zero_() for x in (q, k, v))
    return grads, None if log_decay is None else torch.zeros_like(log_decay, memory_format=torch.contiguous_format)


def _add_gradients(grads, grad_rpe, grad_decay, grad_o, grad_z, q, k, v, o, z, call: Call, states=None, behind=None) -> None:
    """Writes `grads` and `grad_decay` and adds to `grad_rpe`, on one head group after the other.

    `states`: values and weights that the forward was given, and the gradients of those that it returned, which become those of
    the former. `behind`: what `_pairs_of_state` says of those that it returned.
    """
    hk = k.shape[1]
    rows = _rows(grad_o, grad_z, o, z, call)
    module, plan = _plan(q, k, v, call, whole=False)
    workspace = Workspace(compute_dtype(q.dtype), q.device)
    for batch, heads in head_groups(k.shape[0], hk, plan.heads):
        ops = _operands(q, k, v, call, batch, heads)
        terms = _terms(ops, rows, hk, batch, heads)
        sums = Gradients(ops, tuple(_five(x, hk)[batch, heads] for x in grads), grad_rpe)
        if states is None:
            module.backward(ops, plan, terms, sums, workspace)
        else:
            given, state_grads = (tuple(x[batch, heads] for x in pair) for pair in states)
            _backward_between_states(given, state_grads, ops, plan, terms, sums, workspace)
        sums.write()
        if grad_decay is not None:
            before = 0.0 if states is None else _pairs_of_state(given, state_grads)
            behind_group = 0.0 if behind is None else behind[batch, heads]
            grad_decay[batch, heads] = sums.decay.result(before, behind_group).to(grad_decay.dtype)


def _rows(grad_o: Tensor, grad_z: Tensor | None, o: Tensor, z: Tensor, call: Call) -> dict[str, Tensor]:
    """What `row_terms` takes, (b, h, n, ...)."""
    rows = {"grad_o": grad_o, "o": o, "z": z.unsqueeze(-1)}
    if grad_z is not None:
        rows["grad_z"] = grad_z.unsqueeze(-1)
    if call.drop_noise is not None:
        rows["noise"] = call.drop_noise
    return rows


def _terms(
    ops: Operands, rows: dict[str, Tensor], kv_heads: int, batch: slice, heads: slice
) -> Callable[[Span], tuple[Tensor, ...]]:
    """`row_terms` of spans of a head group."""
    group = {name: _five(x, kv_heads)[batch, heads] for name, x in rows.items()}
    return lambda span: ops.tiles.row_terms(ops.call, **{name: to_blocks(x, span) for name, x in group.items()})


def _backward_between_states(given, grads, ops: Operands, plan, terms, sums: Gradients, workspace: Workspace) -> None:
    """`linear.backward` of a head group, from the gradients of the new state to those of the given one, in their place."""
    d, order = ops.q.shape[-1], ops.score.order
    score = _divisors(ops.score, ops.dtype)
    factors = coefficients(d, score, grads[0])
    sums_behind = (grads[0] / factors.unsqueeze(-1), grads[1] / factors)
    before, behind = (linear.unpack_state(*(x.flatten(0, 1) for x in state), d, order) for state in (given, sums_behind))
    behind = linear.backward(ops, plan, terms, sums, workspace, before, behind, score)
    _write_state(linear.pack_state(behind, d), grads, slice(None), slice(None))
    grads[0].mul_(factors.unsqueeze(-1))
    grads[1].mul_(factors)
