"""States with an exact window: the last W tokens are local and weighted by `exp(s)`, earlier tokens are in the sums.

Let n new tokens follow the W local tokens of a state. Among these W + n tokens, query i is at position W + i. It weights the
last W tokens up to its position by `exp(s)`, and the tokens 0 .. i and the sums by f. So the first n tokens leave the window:
they are the keys of causal attention that continues from the sums, with query i at the position of token i. The last W tokens
are the local tokens of the new state.
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
    """Keys, values, masks, decays and gates of consecutive tokens."""

    keys: Tensor  # (b, hk, tokens, d)
    values: Tensor  # (b, hk, tokens, dv)
    mask: Tensor | None  # bool (b, tokens), True = the token is real
    decays: Tensor | None  # (b, hk, tokens), log_decay, which may be -inf
    gates: Tensor | None  # (b, hk, tokens), log_input_gate in its range and in the dtype of the sums, or NaN

    @classmethod
    def of(cls, k: Tensor, v: Tensor, mask: Tensor | None, log_decay: Tensor | None, log_input_gate: Tensor | None) -> Tokens:
        """Returns checked arguments of a step or a prefill as tokens."""
        if log_input_gate is not None:
            log_input_gate = eager.clamped_gate(log_input_gate, eager.compute_dtype(k.dtype))
        return cls(k, v, mask, log_decay, log_input_gate)

    def slice(self, first: int, count: int) -> Tokens:
        return self._each(lambda x, dim: x.narrow(dim, first, count))

    def last(self, n: int, window: int, count: Tensor | None) -> Tokens:
        """Returns the window after n more tokens, or after `count` (b,) more tokens."""
        return self.slice(n, window) if count is None else self._each(lambda x, dim: taken(x, count, window, dim))

    def without_masked(self) -> Tokens:
        """Returns the tokens with keys and values of 0 for masked ones, which may hold inf or NaN."""
        if self.mask is None:
            return self
        is_real = self.mask[:, None, :, None]
        return self._replace(keys=torch.where(is_real, self.keys, 0), values=torch.where(is_real, self.values, 0))

    def without_masked_decays(self) -> Tokens:
        """Returns the tokens with decays of 0 for masked ones."""
        if self.mask is None or self.decays is None:
            return self
        return self._replace(decays=torch.where(self.mask.unsqueeze(1), self.decays, 0.0))

    def _each(self, function: Callable[[Tensor, int], Tensor]) -> Tokens:
        tokens = zip(self, _TOKEN_DIMENSIONS, strict=True)
        return Tokens(*(None if x is None else function(x, dim) for x, dim in tokens))


_TOKEN_DIMENSIONS = (2, 2, 1, 2, 2)


def local_tokens(state: DecodeState) -> Tokens:
    """Returns the `local_` tensors of a state."""
    return Tokens(state.local_keys, state.local_values, state.local_mask, state.local_decays, state.local_gates)


def joined(state: DecodeState, tokens: Tokens) -> Tokens:
    """Returns the local tokens of a state followed by new tokens."""
    tokens = tokens.without_masked()
    before, (b, hk, n, _) = local_tokens(state), tokens.keys.shape
    mask = before.mask.new_ones(b, n) if tokens.mask is None else tokens.mask
    if tokens.decays is None:
        decays = before.decays.new_zeros(b, hk, n)
    else:
        decays = eager.not_above_zero(tokens.decays.to(before.decays.dtype))
    gates = tokens.gates
    if before.gates is not None and gates is None:
        gates = before.gates.new_zeros(b, hk, n)
    pairs = zip(before, tokens._replace(mask=mask, decays=decays, gates=gates), _TOKEN_DIMENSIONS, strict=True)
    return Tokens(*(None if new is None else torch.cat((x, new), dim) for x, new, dim in pairs))


def prefill(
    q: Tensor, tokens: Tokens, state: DecodeState, count: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tokens]:
    """Returns the output of n queries, the log of their sums of weights, the new kv_state and k_sum, and the new local tokens.

    `tokens` are those of `joined`. With `count` (b,), only the first `count` of the n tokens are real, and the outputs of the
    others are undefined.
    """
    n, window = q.shape[2], state.exact_window
    leaving = tokens.slice(0, n)
    call = with_bounds(Call(state.score, causal=True), q, tokens.keys, tokens.decays, continues=True)
    between = eager.sums_in_window(call.log_decay, window)  # decay from token i, where query i is computed, to token W + i
    call = call._replace(attention_mask=leaving.mask, log_decay=call.log_decay[..., :n], log_input_gate=leaving.gates)
    if count is not None:
        leaves = torch.arange(n, device=q.device) < count.unsqueeze(-1)
        decays = torch.where(leaves.unsqueeze(1), call.log_decay, 0.0)
        call = call._replace(attention_mask=leaving.mask & leaves, log_decay=decays)
    o, z, kv_state, k_sum = ops.prefill(q, leaving.keys, leaving.values, call, state.kv_state, state.k_sum)
    o, lse = with_local_keys(q, o, log_of_sums(z), between, tokens, state)
    return o, lse, kv_state, k_sum, tokens.last(n, window, count)


def with_local_keys(
    q: Tensor, o: Tensor, lse: Tensor, between: Tensor, tokens: Tokens, state: DecodeState
) -> tuple[Tensor, Tensor]:
    """Returns the output over the keys of the window and all earlier keys, and the log of the sums of their weights.

    Args:
        q: queries at the positions of the last of the tokens.
        o, lse: results for the keys before the window; lse is (b, h, n).
        between: (b, hk, n), sum of the decays between these keys and the queries.
        tokens: the keys of the windows.
    """
    scale = state.score.scale
    # A step has derivatives of all orders, a prefill only first ones.
    if q.shape[2] == 1 and (q.device.type == "cpu" or eager.differentiating(q, *tokens)):
        keys, values, mask, decays, _ = tokens.slice(1, state.exact_window)
        log_factor = torch.where(mask.unsqueeze(1), eager.decay_to_last(decays), -torch.inf)
        local = eager.softmax_step(q, keys, values, log_factor, scale)
    else:
        call = Call(Softmax(scale), causal=True, left=state.exact_window - 1, attention_mask=tokens.mask)
        call = with_bounds(call, q, tokens.keys, tokens.decays)
        if eager.is_transformed():
            local = eager.forward(q, tokens.keys, tokens.values, call, differentiable=True)
        else:
            local = ops.attention(q, tokens.keys, tokens.values, call)
    between = between.to(lse.dtype).repeat_interleave(q.shape[1] // between.shape[1], dim=1)
    # Without earlier keys, or if they are fully decayed, o and the decays may be NaN and must not count.
    unseen = (lse == -torch.inf) | (between == -torch.inf)
    o, lse = torch.where(unseen.unsqueeze(-1), 0.0, o), torch.where(unseen, -torch.inf, lse + between)
    return merge_attention(*zip(local, (o, lse), strict=True))


def advanced(
    state: DecodeState, n: int, kv_state: Tensor, k_sum: Tensor, tokens: Tokens, count: Tensor | None = None
) -> DecodeState:
    """Returns the state after n tokens, or after `count` (b,) tokens; `tokens` are its local tokens with an exact window."""
    changes = {"kv_state": kv_state, "k_sum": k_sum, "tokens": state.tokens + n}
    if state.positions is not None:
        changes["positions"] = state.positions + (n if count is None else count)
    if state.exact_window > 0:  # copies, not views of all tokens
        local = {name: x for name, x in tokens._asdict().items() if x is not None}
        changes |= {f"local_{name}": x.clone(memory_format=torch.contiguous_format) for name, x in local.items()}
    return replace(state, **changes)
