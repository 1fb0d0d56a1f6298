"""Attention with an exact window: local keys, `|pos(i) - j| < window`, have weight `exp(s)`, global keys have weight f(s).

The call is cut into parts, and the outputs of the parts are merged:

- local keys: softmax attention with a window;
- global keys before the queries: causal fastmax attention of the last queries to the keys without the last ones, which shifts
  the causal mask by `window` tokens. With `log_decay`, a `lag` gives the queries the decays of the window (`Call.lag`);
- global keys behind the queries, without `causal`: the same with both sequences reversed.

The backward needs no merge. The gradient of a part depends on the output and the denominator only through
`g_i = grad_o_i / z_i` and `e_i = -(grad_o_i . o_i) / z_i`. Given o and z of all keys, an operator returns the gradients of its
part of the whole. z follows from the log-sum-exp of all keys, so the backward needs o and lse alone.

For the quadratic algorithm in PyTorch operations, `fastmax.eager.exact` computes all parts in one pass over tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastmax import eager
from fastmax.core.call import ACCOMPANYING, Call
from fastmax.core.score import Softmax
from fastmax.ops.merge import merge_attention

# (q, k, v, call) -> output, and denominators or, for softmax, the log of the sums of weights
Attend = Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]
# (grad_o, grad_z or None, q, k, v, o, z, call) -> gradients by name; no elements for tensors that the call does not have
Differentiate = Callable[..., dict[str, Tensor]]

_OF_GLOBAL_KEYS = tuple(name for name, x in ACCOMPANYING.items() if x.of_global_keys)
_DIFFERENTIABLE = tuple(name for name in _OF_GLOBAL_KEYS if ACCOMPANYING[name].differentiable)


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
        if name == "log_decay":
            return x  # the keys of the part and `lag` tokens, which are all
        axes = ACCOMPANYING[name].axes.split()
        dim = next(i for i, axis in enumerate(axes) if axis in ("n", "m"))
        count, from_end = (self.queries, not self.reversed) if axes[dim] == "n" else (self.keys, self.reversed)
        tokens = slice(x.shape[dim] - count, None) if from_end else slice(None, count)
        index = (*[slice(None)] * dim, tokens)
        part = x[index]
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
    not_of_local_keys: dict[str, Any] = {name: None for name, x in ACCOMPANYING.items() if not x.of_local_keys}
    return call._replace(score=Softmax(call.score.scale), exact_window=0, left=window - 1, right=right, **not_of_local_keys)


def global_keys(q: Tensor, k: Tensor, call: Call) -> Iterator[GlobalKeys]:
    """Yields the parts of the global keys: first the keys before the queries, then those behind them. Parts without queries are
    left out."""
    tensors: dict[str, Any]
    n, m, window = q.shape[2], k.shape[2], call.exact_window
    before, behind = max(0, min(n, m - window)), 0 if call.causal else max(0, n - window)
    whole = {name: getattr(call, name) for name in _OF_GLOBAL_KEYS}
    lag = 0 if call.log_decay is None else window
    part_call = call._replace(causal=True, exact_window=0, lag=lag, k_end=None)
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
    o, lse = attend(q, k, v, local_call(call))
    for name in _DIFFERENTIABLE:
        if (x := getattr(call, name)) is not None and not ACCOMPANYING[name].of_local_keys:
            zero = x.flatten()[:0].sum()  # connects the results to the autograd graph even if there are no global keys
            o, lse = o + zero, lse + zero
    outputs = [(o, lse)]
    for part in global_keys(q, k, call):
        o, lse = (part.turned(x) for x in attend(*part.operands(q, k, v), part.call))
        ahead, behind = (0, n - part.queries) if part.reversed else (n - part.queries, 0)
        outputs.append((F.pad(o, (0, 0, ahead, behind)), F.pad(lse, (ahead, behind), value=-torch.inf)))
    return merge_attention(*zip(*outputs, strict=True))


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, attend: Attend, merge: Callable[..., object]) -> tuple[Tensor, Tensor]:
    """Computes `attention_with_exact_window` without autograd. `merge` is `fastmax.eager.merge_` or a kernel for it."""
    o, lse = attend(q, k, v, local_call(call))
    for part in global_keys(q, k, call):
        o_global, z_global = (part.turned(x) for x in attend(*part.operands(q, k, v), part.call))
        merge(part.queries_of(o), part.queries_of(lse), o_global, z_global)
    return o, lse


def backward(
    grad_o: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    call: Call,
    differentiate: Differentiate,
) -> dict[str, Tensor]:
    """Returns the gradients by name. Those of tensors that the call does not have have no elements."""
    grads = differentiate(grad_o, grad_lse, q, k, v, o, lse, local_call(call))
    given = [name for name in _DIFFERENTIABLE if getattr(call, name) is not None]
    for name in _DIFFERENTIABLE:
        if name not in grads or not ACCOMPANYING[name].of_local_keys:
            whole = getattr(call, name)
            grads[name] = q.new_empty(0) if whole is None else torch.zeros_like(whole, memory_format=torch.contiguous_format)
    for part in global_keys(q, k, call):

        def of_queries(x: Tensor, part: GlobalKeys = part) -> Tensor:
            return part.turned(part.queries_of(x))

        z = denominators(of_queries(lse), part)
        # If z is 0, the quotient is not used. If z is infinite, the part has no weight.
        grad_z = None if grad_lse is None else of_queries(grad_lse) / z
        of_part = differentiate(of_queries(grad_o), grad_z, *part.operands(q, k, v), of_queries(o), z, part.call)
        for name, cut in (("q", part.queries_of), ("k", part.keys_of), ("v", part.keys_of)):
            cut(grads[name]).add_(part.turned(of_part[name]))
        for name in given:
            part.part_of(name, grads[name]).add_(of_part[name])  # a view: these calls are causal, so no part is reversed
    return grads


def denominators(lse: Tensor, part: GlobalKeys) -> Tensor:
    """Returns the sums of weights over all keys for the queries of a part, in the order of its call; `lse` are their logs.

    The result is 0 where `k_start` hides all keys of the part from a query, so that a NaN of the query does not reach these
    keys, and where all global keys count as fully decayed (`fastmax.eager.least_sum`).
    """
    z = lse.exp()
    if part.call.log_decay is not None:
        z = torch.where(z < eager.least_sum(z.dtype), 0.0, z)
    if part.call.k_start is not None:
        position = torch.arange(part.keys - part.queries, part.keys, device=z.device)
        hidden = part.call.k_start > position
        z = torch.where(hidden.repeat_interleave(z.shape[1] // max(1, hidden.shape[1]), dim=1), 0.0, z)
    return z
