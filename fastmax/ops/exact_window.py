"""Attention with an exact window: local keys, `|pos(i) - j| < window`, have weight `exp(s)`, global keys have weight f(s).

The call is cut into parts, and the outputs of the parts are merged:

- local keys: softmax attention with a window;
- global keys before the queries: causal fastmax attention of the last queries to the keys without the last ones, which shifts
  the causal mask by `window` tokens;
- global keys behind the queries, without `causal`: the same with both sequences reversed.

The backward needs no merge. The gradient of a part depends on the output and the denominator only through
`g_i = grad_o_i / z_i` and `e_i = -(grad_o_i . o_i) / z_i`. Given o and z of all keys, an operator returns the gradients of its
part of the whole.

For the quadratic algorithm in PyTorch operations, `fastmax.eager.exact` computes all parts in one pass over tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastmax import eager
from fastmax.core.call import ACCOMPANYING, GLOBAL, Call
from fastmax.core.score import Softmax
from fastmax.ops.merge import merge_attention

# (q, k, v, call) -> output, and denominators or, for softmax, the log of the sums of weights
Attend = Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]
# (o, lse, q, k, v, call) -> denominators; attention to the keys of the call is merged into o and lse of the local keys
AttendGlobal = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Call], Tensor]
# (grad_o, grad_z or None, q, k, v, o, z, call) -> gradients by name; no elements for tensors that the call does not have
Differentiate = Callable[..., dict[str, Tensor]]
# (gradients of q, k and v to add to, then the arguments of Differentiate) -> the other gradients by name
DifferentiateGlobal = Callable[..., dict[str, Tensor]]


class GlobalKeys(NamedTuple):
    """A part of the global keys: those on one side of the queries, with the queries that see them.

    Causal attention of the part's queries to its keys is the attention to these global keys.
    """

    queries: int  # number of queries: the last ones, or if reversed the first ones
    keys: int  # number of keys: the first ones, or if reversed the last ones
    reversed: bool  # whether the keys are behind the queries; the part's call then has both sequences in reverse order
    call: Call  # the call for these queries and keys

    def queries_of(self, x: Tensor) -> Tensor:
        """Returns a view of the part's queries in x (b, heads, n, ...), not reversed."""
        return x[:, :, : self.queries] if self.reversed else x[:, :, x.shape[2] - self.queries :]

    def keys_of(self, x: Tensor) -> Tensor:
        """Returns a view of the part's keys in x (b, heads, m, ...), not reversed."""
        return x[:, :, x.shape[2] - self.keys :] if self.reversed else x[:, :, : self.keys]

    def part_of(self, name: str, x: Tensor) -> Tensor:
        """Returns the part's tokens of a tensor that accompanies q, k and v, in the order of the part's call."""
        axes = ACCOMPANYING[name].axes.split()
        dim = next(i for i, axis in enumerate(axes) if axis in ("n", "m"))
        count, from_end = (self.queries, not self.reversed) if axes[dim] == "n" else (self.keys, self.reversed)
        tokens = slice(x.shape[dim] - count, None) if from_end else slice(None, count)
        part = x[(*[slice(None)] * dim, tokens)]
        return part.flip(dim) if self.reversed else part

    def turned(self, x: Tensor) -> Tensor:
        """Converts x between the order of the sequence and the order of the part's call."""
        return x.flip(2) if self.reversed else x

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v of the part's call."""
        return self.turned(self.queries_of(q)), self.turned(self.keys_of(k)), self.turned(self.keys_of(v))


def local_call(call: Call) -> Call:
    """Returns the call for the local keys: softmax with a window."""
    window = call.exact_window
    right = -1 if call.causal else window - 1
    of_global_keys = {name: None for name, x in ACCOMPANYING.items() if not x.of_local_keys}
    return call._replace(score=Softmax(call.score.scale), exact_window=0, left=window - 1, right=right, **of_global_keys)


def global_queries(n: int, m: int, window: int, causal: bool) -> tuple[int, int]:
    """Returns the number of queries that have global keys before them, and the number that have some behind them.

    Symbolic sizes get no guards.
    """
    if all(isinstance(size, int) for size in (n, m)):
        return max(0, min(n, m - window)), 0 if causal else max(0, n - window)
    before = torch.sym_max(0, torch.sym_min(n, m - window))
    return before, 0 if causal else torch.sym_max(0, n - window)


def global_keys(q: Tensor, k: Tensor, call: Call) -> Iterator[GlobalKeys]:
    """Yields the parts of the global keys: first the keys before the queries, then those behind them. Parts without queries are
    left out."""
    n, m, window = q.shape[2], k.shape[2], call.exact_window
    before, behind = global_queries(n, m, window, call.causal)
    whole = {name: getattr(call, name) for name in GLOBAL.tensor_names}
    part_call = call._replace(causal=True, exact_window=0, k_end=None)
    if before > 0:
        part = GlobalKeys(before, m - window, False, part_call)
        tensors = {name: None if x is None else part.part_of(name, x) for name, x in whole.items()}
        yield part._replace(call=part_call._replace(**tensors))
    if behind > 0:
        part = GlobalKeys(behind, behind, True, part_call)
        tensors = {name: None if x is None else part.part_of(name, x) for name, x in whole.items() if name != "k_start"}
        first = None if call.k_end is None else m - part.part_of("k_end", call.k_end)
        yield part._replace(call=part_call._replace(**tensors, k_start=first))


def attention_with_exact_window(q: Tensor, k: Tensor, v: Tensor, call: Call, attend: Attend) -> tuple[Tensor, Tensor]:
    """Computes the output and the log of the sums of weights in operations that autograd can record.

    q, k and v are 4-d, n <= m, `call.exact_window` >= 1, and the call has neither noise nor an rpe matrix. `attend` returns the
    log of the sums for both scores.
    """
    n = q.shape[2]
    outputs = [attend(q, k, v, local_call(call))]
    for part in global_keys(q, k, call):
        o, lse = (part.turned(x) for x in attend(*part.operands(q, k, v), part.call))
        if call.log_decay is not None:
            between = _between(call, part).to(lse.dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            lse = torch.where(lse == -torch.inf, lse, lse + between)  # -inf: no global key is visible
        ahead, behind = (0, n - part.queries) if part.reversed else (n - part.queries, 0)
        outputs.append((F.pad(o, (0, 0, ahead, behind)), F.pad(lse, (ahead, behind), value=-torch.inf)))
    return merge_attention(*zip(*outputs, strict=True))


class Forward(NamedTuple):
    """The results of `forward`. Results for a part that does not exist have no elements."""

    o: Tensor  # (b, h, n, dv)
    lse: Tensor  # (b, h, n)
    # (b, h, queries of the part): the sums of weights over all keys, on the scale of the part's weights. 0: the query sees no
    # key of the part.
    z_before: Tensor
    z_behind: Tensor
    # (b, h, queries, dv) and (b, h, queries), only with log_decay: output and denominators of the first part alone
    o_global: Tensor
    z_global: Tensor


def empty_results(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Forward:
    """Returns uninitialised results."""
    (b, h, n, _), dv = q.shape, v.shape[3]
    dtype = eager.compute_dtype(q.dtype)
    before, behind = global_queries(n, k.shape[2], call.exact_window, call.causal)

    def per_query(queries: int) -> Tensor:
        return q.new_empty(b, h, queries, dtype=dtype)

    if call.log_decay is None:
        o_global, z_global = q.new_empty(0), q.new_empty(0, dtype=dtype)
    else:
        o_global, z_global = eager.empty_like_layout(q, dv, tokens=before), per_query(before)
    return Forward(eager.empty_like_layout(q, dv), per_query(n), per_query(before), per_query(behind), o_global, z_global)


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, attend: Attend, attend_global_: AttendGlobal, merge: Callable[..., Tensor]
) -> Forward:
    """Computes `attention_with_exact_window` without autograd, and what the backward needs.

    `merge` is `fastmax.eager.merge_` or a kernel for it.
    """
    o, lse = attend(q, k, v, local_call(call))
    results = empty_results(q[:, :, :0], k, v, call)._replace(o=o, lse=lse)
    for part in global_keys(q, k, call):
        if call.log_decay is None and not part.reversed:
            z = attend_global_(part.queries_of(o), part.queries_of(lse), *part.operands(q, k, v), part.call)
            results = results._replace(z_before=z)
            continue
        o_global, z_global = attend(*part.operands(q, k, v), part.call)
        shift = None if call.log_decay is None else _between(call, part).to(lse.dtype)
        o_global, z_global = part.turned(o_global), part.turned(z_global)
        z = merge(part.queries_of(o), part.queries_of(lse), o_global, z_global, shift)
        if part.reversed:
            _add_to_denominators(results.z_before, z_global, q.shape[2])
            results = results._replace(z_behind=z)
        else:
            results = results._replace(z_before=z, o_global=o_global, z_global=z_global)
    return results


def _add_to_denominators(z: Tensor, z_global: Tensor, n: int) -> None:
    """Adds the sums over the keys behind the queries to z, for queries that both parts have, except where z is 0."""
    both = max(0, z.shape[2] + z_global.shape[2] - n)
    of_both = z[..., :both]
    of_both.add_(torch.where(of_both == 0, 0.0, z_global[..., z_global.shape[2] - both :]))


def backward(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: Forward,
    call: Call,
    differentiate: Differentiate,
    differentiate_global_: DifferentiateGlobal,
) -> dict[str, Tensor]:
    """Returns the gradients by name. Those of tensors that the call does not have have no elements."""
    grads = differentiate(grad_o, grad_lse, q, k, v, results.o, results.lse, local_call(call))
    given = [name for name in GLOBAL.differentiable if getattr(call, name) is not None]
    for name in GLOBAL.differentiable:
        if name not in grads:  # not of local keys
            grads[name] = torch.zeros_like(getattr(call, name)) if name in given else q.new_empty(0)
    for part in global_keys(q, k, call):
        z = part.turned(results.z_behind if part.reversed else results.z_before)

        def of_queries(x: Tensor, part=part) -> Tensor:
            return part.turned(part.queries_of(x))

        # If z is 0, the quotient is not used. If z is infinite, the part has no weight.
        grad_z = None if grad_lse is None else of_queries(grad_lse) / z
        arguments = (of_queries(grad_o), grad_z, *part.operands(q, k, v), of_queries(results.o), z, part.call)
        into = {"q": part.queries_of(grads["q"]), "k": part.keys_of(grads["k"]), "v": part.keys_of(grads["v"])}
        if part.reversed:
            of_part = differentiate(*arguments)
            for name, whole in into.items():
                whole.add_(part.turned(of_part[name]))
        else:
            of_part = differentiate_global_(tuple(into.values()), *arguments)
        for name in given:
            part.keys_of(grads[name]).add_(part.turned(of_part[name]))
        if call.log_decay is not None:
            grads["log_decay"].add_(_gradient_of_between(grad_o, grad_lse, results, part, call))
    return grads


def _between(call: Call, part: GlobalKeys) -> Tensor:
    """Returns, float64 (b, hk, queries), the sum of the `window` log decays between a query and its last global key."""
    return eager.sums_in_window(call.log_decay, call.exact_window)[..., part.keys - part.queries :]


def _gradient_of_between(grad_o: Tensor, grad_lse: Tensor | None, results: Forward, part: GlobalKeys, call: Call) -> Tensor:
    """Returns the gradient of log_decay (b, hk, m) through `_between`: for each token the sum, over the `window` queries from
    it on, of the gradient of the log of their global weights."""
    (b, hk, m), window = call.log_decay.shape, call.exact_window
    z, z_global = results.z_before, results.z_global
    change = (results.o_global.to(z.dtype) - part.queries_of(results.o)).mul_(part.queries_of(grad_o)).sum(-1)
    if grad_lse is not None:
        change += part.queries_of(grad_lse)
    flow = torch.where(z == 0, 0.0, change * (z_global / z))
    flow = flow.double().unflatten(1, (hk, -1)).sum(2)
    sums = F.pad(flow.cumsum(-1), (m - part.queries + 1, 0))  # over earlier tokens, m + 1 of them
    until = torch.cat((sums[..., window:], sums[..., -1:].expand(b, hk, window - 1)), dim=-1)
    return (until - sums[..., :m]).to(call.log_decay.dtype)
