"""Tokens of a state with an exact window: the last W are kept and weighed by `exp(s)`, those before them are in its sums.

Let n tokens follow the W that are kept. Query i stands at W + i among all of these; it weighs the last W up to there exactly,
and sees those up to i, and the sums, by f. So the first n of them, which leave the window, go through causal attention that
continues from the sums, query i beside token i, and the last W are kept in place of those before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastmax import eager, ops
from fastmax.core.call import Call
from fastmax.core.score import Softmax, log_of_sums
from fastmax.decoding.state import DecodeState
from fastmax.ops.merge import merge_attention
from fastmax.prepare.bounds import with_bounds
from fastmax.prepare.padding import taken


class Tokens(NamedTuple):
    """Keys and what belongs to them, in the order of time."""

    keys: Tensor  # (b, hk, tokens, d)
    values: Tensor  # (b, hk, tokens, dv)
    mask: Tensor | None  # bool (b, tokens), True = the token takes part
    decays: Tensor | None  # (b, hk, tokens), logarithms, -inf too

    def slice(self, first: int, count: int) -> Tokens:
        return self._each(lambda x, dim: x.narrow(dim, first, count))

    def last(self, n: int, window: int, count: Tensor | None) -> Tokens:
        """The window after n tokens more, or as many as `count`, (b,)."""
        return self.slice(n, window) if count is None else self._each(lambda x, dim: taken(x, count, window, dim))

    def without_masked(self) -> Tokens:
        """0 in the place of those that do not take part: whatever they hold, products with it leave no trace."""
        if self.mask is None:
            return self
        there = self.mask[:, None, :, None]
        return self._replace(keys=torch.where(there, self.keys, 0), values=torch.where(there, self.values, 0))

    def without_masked_decays(self) -> Tokens:
        """0 in the place of decays of those that do not take part."""
        if self.mask is None or self.decays is None:
            return self
        return self._replace(decays=torch.where(self.mask.unsqueeze(1), self.decays, 0.0))

    def _each(self, function: Callable[[Tensor, int], Tensor]) -> Tokens:
        return Tokens(*(function(x, dim) for x, dim in zip(self, _TOKEN_DIMENSIONS, strict=True)))


_TOKEN_DIMENSIONS = (2, 2, 1, 2)


def kept(state: DecodeState) -> Tokens:
    return Tokens(state.local_keys, state.local_values, state.local_mask, state.local_decays)


def joined(state: DecodeState, tokens: Tokens) -> Tokens:
    """Those that the state keeps, then these."""
    tokens = tokens.without_masked()
    before, (b, hk, n, _) = kept(state), tokens.keys.shape
    mask = before.mask.new_ones(b, n) if tokens.mask is None else tokens.mask
    if tokens.decays is None:
        decays = before.decays.new_zeros(b, hk, n)
    else:
        decays = eager.not_above_zero(tokens.decays.to(before.decays.dtype))
    tokens = tokens._replace(mask=mask, decays=decays)
    return Tokens(*(torch.cat(x, dim) for *x, dim in zip(before, tokens, _TOKEN_DIMENSIONS, strict=True)))


def prefill(
    q: Tensor, tokens: Tokens, state: DecodeState, count: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tokens]:
    """Output of n queries, the new kv_state and k_sum, and the tokens to keep; `tokens` are `joined`. With a `count`, (b,),
    only so many of the n are there, and outputs of the others mean nothing."""
    n, window = q.shape[2], state.exact_window
    leaving = tokens.slice(0, n)
    far = with_bounds(Call(state.score, causal=True), q, tokens.keys, tokens.decays, continues=True)
    between = eager.sums_in_window(far.log_decay, window)  # from where a query stands among those that leave to where it stands
    far = far._replace(attention_mask=leaving.mask, log_decay=far.log_decay[..., :n])
    if count is not None:
        leaves = torch.arange(n, device=q.device) < count.unsqueeze(-1)
        decays = torch.where(leaves.unsqueeze(1), far.log_decay, 0.0)
        far = far._replace(attention_mask=leaving.mask & leaves, log_decay=decays)
    o, z, kv_state, k_sum = ops.prefill(q, leaving.keys, leaving.values, far, state.kv_state, state.k_sum)
    o = with_local_keys(q, o, log_of_sums(z), between, tokens, state)
    return o, kv_state, k_sum, tokens.last(n, window, count)


def with_local_keys(q: Tensor, o: Tensor, lse: Tensor, between: Tensor, tokens: Tokens, state: DecodeState) -> Tensor:
    """The output over the keys of the window as well. `o` and `lse` (b, h, n) are of the keys before it, which fade by
    `between` (b, hk, n) up to the queries; these stand at the last of the tokens."""
    scale = state.score.scale
    # As of the keys before the window: a step is differentiated any number of times, many tokens once.
    if q.shape[2] == 1 and (q.device.type == "cpu" or eager.differentiating(q, *tokens)):
        near = eager.softmax_step(q, *tokens.slice(1, state.exact_window), scale)
    else:
        call = Call(Softmax(scale), causal=True, left=state.exact_window - 1, attention_mask=tokens.mask)
        call = with_bounds(call, q, tokens.keys, tokens.decays)
        if eager.is_transformed():
            near = eager.forward(q, tokens.keys, tokens.values, call, differentiable=True)
        else:
            near = ops.attention(q, tokens.keys, tokens.values, call)
    between = between.to(lse.dtype).repeat_interleave(q.shape[1] // between.shape[1], dim=1)
    # Neither decays after no keys nor keys that are forgotten count, not even as NaN.
    unseen = (lse == -torch.inf) | (between == -torch.inf)
    o, lse = torch.where(unseen.unsqueeze(-1), 0.0, o), torch.where(unseen, -torch.inf, lse + between)
    return merge_attention(*zip(near, (o, lse), strict=True))[0]


def advanced(
    state: DecodeState, n: int, kv_state: Tensor, k_sum: Tensor, tokens: Tokens, count: Tensor | None = None
) -> DecodeState:
    """The state after n tokens, or as many as `count` (b,); `tokens` are the last ones, where it keeps some."""
    changes = {"kv_state": kv_state, "k_sum": k_sum, "tokens": state.tokens + n}
    if state.positions is not None:
        changes["positions"] = state.positions + (n if count is None else count)
    if state.exact_window > 0:  # copies, not views of all tokens
        near = tokens._asdict().items()
        changes |= {f"local_{name}": x.clone(memory_format=torch.contiguous_format) for name, x in near}
    return replace(state, **changes)
