"""Decays and sequence bounds as factors of the weights: one number per token in place of one per pair.

Query i gives key j the weight `exp(G_pos(i) - G_j) w_ij`, where G is the running sum of `log_decay` over the keys and pos(i)
the place of query i among them, and sees no key before `k_start[i]` and none from `k_end[i]` on. G is summed in float64,
and differences are taken before rounding, so that precision does not depend on the length. All exponents here are <= 0.

A decay of NaN counts as 0 in these sums, and makes the exponents of a query NaN that sees a key before it (`_nan_rows`). A sum
with NaN would pass it on to all later queries, also where they see no such key.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F

from fastmax.eager.exponential import exp_of_decayed
from fastmax.eager.workspace import Workspace, buffer


def is_at_hand(x: Tensor) -> bool:
    """Return whether values can be read without synchronisation: on a CPU, not a fake tensor."""
    return x.device.type == "cpu" and not is_fake(x)


def finite_decay(log_decay: Tensor, continues: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `fastmax.ops.finite_decay`."""
    resets = log_decay == -torch.inf
    tokens = torch.arange(log_decay.shape[-1], device=log_decay.device)
    first = torch.where(resets, tokens, -1 if continues else 0).cummax(-1).values
    return torch.where(resets, 0.0, not_above_zero(log_decay.to(dtype))), first.to(torch.int32)


def not_above_zero(log_decay: Tensor) -> Tensor:
    """Return the decays clamped to at most 0; clamped decays get gradient 0."""
    return log_decay.clamp(max=0.0)


def may_hold_nan(x: Tensor) -> bool:
    """Return whether x holds a NaN, or whether reading it would need synchronisation."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return not is_at_hand(x) or bool(x.isnan().any())


def sum_of_decays(log_decay: Tensor) -> Tensor:
    """Sum over the tokens, float64: (..., 1). -inf if any is -inf, else NaN if any is NaN."""
    total = log_decay.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).double().sum(-1, keepdim=True)
    return torch.where((total > -torch.inf) & log_decay.isnan().any(-1, keepdim=True), torch.nan, total)


def sums_in_window(log_decay: Tensor, window: int) -> Tensor:
    """(b, hk, m) -> (b, hk, m - window), float64: sums over the `window` tokens behind each one; finite decays or NaN."""

    def sums(x: Tensor) -> Tensor:
        x = x.cumsum(-1)
        return x[..., window:] - x[..., : x.shape[-1] - window]

    if not may_hold_nan(log_decay):
        return sums(log_decay.double())
    is_nan = log_decay.isnan()
    return sums(torch.where(is_nan, 0.0, log_decay.double())).masked_fill(sums(is_nan) > 0, torch.nan)


def _last_key_behind_nan(log_decay: Tensor, mask: Tensor | None) -> Tensor:
    """(b, hk, m), int64: the last key that a NaN separates from each token; -1: what is before all keys; -2: none."""
    tokens = torch.arange(log_decay.shape[-1], device=log_decay.device)
    if mask is None:
        before = tokens - 1
    else:
        last = torch.where(mask, tokens, -1).cummax(-1).values
        before = F.pad(last[..., :-1], (1, 0), value=-1).unsqueeze(1)
    return torch.where(log_decay.isnan(), before, -2).cummax(-1).values


class Factor(NamedTuple):
    """`whole + part`, exact where it is near 1: thousands of products with it leave what one rounding of each leaves."""

    whole: Tensor  # 0 or 1
    part: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product; 0 where the factor is 0, even if x is not finite."""
        return torch.where(self._is_zero, 0.0, torch.addcmul(x * self.whole, x, self.part))

    def fade(self, *tensors: Tensor) -> None:
        """Multiply the tensors in place."""
        # One pass in place of three, where looking at the factor is free.
        looks, is_zero = is_at_hand(self.whole), self._is_zero
        is_local, is_global = looks and bool(self.whole.all()), looks and not self.whole.any()
        vanishes = not looks or bool(is_zero.any())
        for x in tensors:
            if is_local:
                x.addcmul_(x, self.part)
            elif is_global:
                x.mul_(self.part)
            else:
                torch.addcmul(x * self.whole, x, self.part, out=x)
            if vanishes:
                x.masked_fill_(is_zero, 0.0)

    def times_plus(self, x: Tensor, y: Tensor) -> Tensor:
        """The product and y, which is added to the small part of it first: where y is the same in every chunk, so would be the
        rounding of its sum with a large one."""
        x = torch.where(self._is_zero, 0.0, x)
        return x * self.whole + torch.addcmul(y, x, self.part)

    @property
    def _is_zero(self) -> Tensor:
        return (self.whole == 0) & (self.part == 0)

    def chunks(self, count: int) -> list[Factor]:
        return [Factor(*x) for x in zip(*(x.unflatten(0, (-1, count)).unbind(1) for x in self), strict=True)]


class Factors(NamedTuple):
    """The factors of a chunk of the linear algorithm; B counts blocks as in `fastmax.eager.blocks.to_blocks`."""

    # (B, group * length, 1), of what a query reads from the state before the chunk; 0: it sees nothing of it
    rows: Tensor | None
    keys: Tensor | None  # (B, length, 1), of what a key adds to the state after the chunk
    carry: Factor | None  # (B, 1, 1), of the state before the chunk in the one after it


class Decay:
    """The decays and bounds of a head group: log_decay (b, hk, m), k_start and k_end (b, hk, n), each may be None."""

    def __init__(
        self,
        log_decay: Tensor | None,
        k_start: Tensor | None,
        k_end: Tensor | None,
        shift: int,
        dtype: torch.dtype,
        mask: Tensor | None = None,
        left: int | None = None,
        state: Tensor | None = None,
    ):
        """`shift` = m - n; `dtype`, of the factors; `mask` (b, m) and `left` of the call.

        state: (b, hk), of a call that continues from one: the sum of the weights of its keys, 0 for none.
        """
        self._nan_rows = None  # (b, hk, n), NaN where the exponents of a query are, else 0
        self.nan_state = None  # (b, hk), whether the state behind the last key is NaN
        if log_decay is not None and (may_hold_nan(log_decay) or (state is not None and may_hold_nan(state))):
            last = _last_key_behind_nan(log_decay, mask)
            is_key = last >= 0
            if state is not None:
                last = torch.where(state.isnan().unsqueeze(-1), last.clamp(min=-1), last)  # behind a NaN of an earlier call
                is_key = is_key | ((last == -1) & (state != 0).unsqueeze(-1))
            last, is_nan = last[..., shift:], is_key[..., shift:]
            if k_start is not None:
                is_nan = is_nan & (last >= k_start)
            if left is not None:
                is_nan = is_nan & (last >= torch.arange(-left, last.shape[-1] - left, device=last.device) + shift)
            self._nan_rows = torch.where(is_nan, torch.nan, torch.zeros((), dtype=dtype, device=is_nan.device))
            self.nan_state = is_nan[..., -1]
            log_decay = torch.where(log_decay.isnan(), 0.0, log_decay)
        # With a 0 in front: sums[j + 1] is G_j.
        self._sums = None if log_decay is None else F.pad(log_decay.double().cumsum(-1), (1, 0))
        self._first, self._end = k_start, k_end
        self._shift = shift
        self._dtype = dtype

    def key_range(self, start: int, stop: int, m: int) -> tuple[int, int]:
        """Keys that some query in `start .. stop` may see. Reads values, for which a GPU would have to be waited for."""
        first = 0 if self._first is None else int(self._first[..., start].min())
        return first, m if self._end is None else int(self._end[..., stop - 1].max())

    def exponent(
        self, query: int, key: int, rows: int, cols: int, count: int = 1, workspace: Workspace | None = None
    ) -> Tensor | None:
        """Of the weights of a tile, -inf where a key is hidden: (b * hk * count, rows, cols), or with 1 for b * hk; or None,
        where nothing is.

        The tile begins with the query and the key of these numbers; `count` tiles follow each other along the diagonal. Above
        the diagonal of a causal call it is 0.
        """
        first_row = self._shift + query
        x = None
        if self._sums is not None:
            at_rows = self._blocks(self._sums[..., 1:], first_row, rows, count).unsqueeze(-1)
            at_cols = self._blocks(self._sums[..., 1:], key, cols, count).unsqueeze(-2)
            if key + cols <= first_row and count == 1:  # both parts are <= 0: no difference of large numbers
                last = at_cols[..., -1:]
                out = buffer(workspace, "exponent", at_rows.shape[0], rows, cols)
                x = torch.add((at_rows - last).to(self._dtype), (last - at_cols).to(self._dtype), out=out)
            elif workspace is None:
                x = (at_rows - at_cols).to(self._dtype).tril(first_row - key)
            else:
                x = self._difference(at_rows, at_cols, workspace).tril_(first_row - key)
            if self._nan_rows is not None:
                nan_rows = self._blocks(self._nan_rows, query, rows, count).unsqueeze(-1)
                x = x + nan_rows if workspace is None else x.add_(nan_rows)
        return self._hide(x, query, key, rows, cols, count, reads_values=workspace is not None)

    def _difference(self, at_rows: Tensor, at_cols: Tensor, workspace: Workspace) -> Tensor:
        """at_rows - at_cols, of which only the vectors are float64: each is a number of the dtype and a rest."""
        out = workspace.buffer("exponent", at_rows.shape[0], at_rows.shape[1], at_cols.shape[2])
        base = at_rows[:, :1]
        at_rows, at_cols = at_rows - base, at_cols - base
        rows, cols = at_rows.to(self._dtype), at_cols.to(self._dtype)
        return torch.sub(rows, cols, out=out).add_((at_rows - rows).to(self._dtype)).sub_((at_cols - cols).to(self._dtype))

    def _hide(
        self, x: Tensor | None, query: int, key: int, rows: int, cols: int, count: int, reads_values: bool
    ) -> Tensor | None:
        """`x` (0 for None) with -inf where a key is before the first or behind the last one that a query sees."""
        like = self._sums if self._first is None and self._end is None else self._end if self._first is None else self._first
        first, end = self._first, self._end
        if reads_values and is_at_hand(like):
            first = None if first is None or first[..., query + rows * count - 1].max() <= key else first
            end = None if end is None or end[..., query].min() >= key + cols * count else end
        for bound, hides in ((first, torch.lt), (end, torch.ge)):
            if bound is None:
                continue
            keys = torch.arange(key, key + cols * count, device=like.device).view(count, 1, cols)
            bounds = self._blocks(bound, query, rows, count).unflatten(0, (-1, count)).unsqueeze(-1)
            hidden = hides(keys, bounds).flatten(0, 1)
            x = torch.where(hidden, -torch.inf, torch.zeros((), dtype=self._dtype, device=like.device) if x is None else x)
        return x

    def factors(self, query: int, length: int, count: int, group: int, reads_values: bool = False) -> Factors:
        """Return the factors of `count` causal chunks of `length` tokens that start at this query."""
        key = query + self._shift
        first = self._first
        if self._sums is not None and first is not None and reads_values and is_at_hand(first):
            last = min(query + length * count, first.shape[-1] - 1)  # the query behind the chunks
            first = None if first[..., last].max() < key else first  # no sequence begins here
        if self._sums is None:
            rows = keys = whole = self._first.new_ones((), dtype=self._dtype)
            part = torch.zeros_like(whole)
        else:
            at = self._blocks(self._sums[..., 1:], key, length, count)
            base = self._blocks(self._sums, key, length, count)[:, :1]
            rows, keys = (exp_of_decayed(x.to(self._dtype), in_place=False) for x in (at - base, at[:, -1:] - at))
            through = at[:, -1:] - base
            near = through > -0.5
            whole = near.to(self._dtype)
            part = torch.where(near, through.expm1(), through.exp()).to(self._dtype)
            if self._nan_rows is not None:
                rows = rows + self._blocks(self._nan_rows, query, length, count)
        if first is not None:
            # A state holds keys of the sequence that the query behind it belongs to.
            first = self._blocks(self._first, query, length, count)
            following = self._following(query, length, count)
            begin = torch.arange(key, key + length * count, device=first.device).view(count, length)
            begin, first, following = (x.unflatten(0, (-1, count)) for x in (begin, first, following))
            begin_of_chunk = begin[..., :1]
            rows = self._keep(first < begin_of_chunk, rows)
            keys = self._keep(begin >= following, keys)
            whole, part = (self._keep(following < begin_of_chunk, x) for x in (whole, part))
        carry = Factor(whole.unsqueeze(-1), part.unsqueeze(-1))
        return Factors(rows.repeat(1, group).unsqueeze(-1), keys.unsqueeze(-1), carry)

    @staticmethod
    def _keep(visible: Tensor, x: Tensor) -> Tensor:
        visible = visible.flatten(0, 1)
        return torch.where(visible, x, 0.0)

    def factors_before_queries(self, start: int, stop: int) -> Tensor:
        """Return the factors (b * hk, stop - start, 1) of keys before all queries, relative to the last of these keys."""
        last = self._shift
        x = None
        if self._sums is not None:
            x = (self._sums[..., last : last + 1] - self._sums[..., start + 1 : stop + 1]).to(self._dtype).exp()
        if self._first is not None:
            keys = torch.arange(start, stop, device=self._first.device)
            ones = torch.ones((), dtype=self._dtype, device=self._first.device)
            x = torch.where(keys >= self._first[..., :1], ones if x is None else x, 0.0)
        return x.flatten(0, 1).unsqueeze(-1)

    def _following(self, query: int, length: int, count: int) -> Tensor:
        """(b * hk * count, 1): the first key of the query behind each chunk; of the last one, behind the last chunk."""
        behind = self._first[..., query + length :: length][..., :count]
        following = torch.cat((behind, self._first[..., -1:]), dim=-1)[..., :count]
        return following.flatten().unsqueeze(-1)

    @staticmethod
    def _blocks(x: Tensor, start: int, length: int, count: int) -> Tensor:
        """(b, hk, tokens) -> (b * hk * count, length)."""
        return rearrange(x[..., start : start + count * length], "b h (count t) -> (b h count) t", count=count)


class QueryPairs:
    """Collects the per-query part of the gradient of log_decay; another call adds the rest (`DecayGradient.add_queries`)."""

    def __init__(self, out: Tensor):
        """`out` (b, hk, group, n), zeros."""
        self._out = out

    def add_queries(self, start: int, x: Tensor, group: int) -> None:
        b, hk = self._out.shape[:2]
        x = rearrange(x, "(b h count) (g t) 1 -> b h g (count t)", b=b, h=hk, g=group)
        self._out[..., start : start + x.shape[-1]] += x


class DecayGradient:
    """Accumulates the gradient of log_decay over a head group.

    With `p_ij = w_ij u_ij`, the gradient by the logarithm of a weight, that of the decay of token t is the sum of p_ij over
    `j < t <= pos(i)`. Pairs of different chunks or tiles are summed by query and by key, and the difference of these sums flows
    from token to token; pairs of one tile on the diagonal are summed as they are. The flow alone would do (that of all pairs),
    but a pair of a token with itself, which is the largest where decays are strong, would leave its rounding in it.
    """

    def __init__(self, log_decay: Tensor, shift: int):
        self._flow = torch.zeros_like(log_decay, dtype=torch.float64, memory_format=torch.contiguous_format)
        self._size = torch.zeros_like(self._flow)  # of the sums that the flow comes from
        self._diagonal = torch.zeros_like(self._flow)
        self._shift = shift

    def add_queries(self, start: int, x: Tensor, group: int) -> None:
        """Sums over the keys of other chunks: x (b * hk * count, group * length, 1), of the queries from `start` on."""
        x = rearrange(x, "b (g t) 1 -> b g t", g=group).sum(1, dtype=torch.float64)
        self._add_flow(start + self._shift, x)

    def add_keys(self, start: int, x: Tensor) -> None:
        """Sums over the queries of other chunks: x (b * hk * count, length, 1), of the keys from `start` on."""
        self._add_flow(start, -x.squeeze(-1))

    def add_tile(self, query: int, key: int, pairs: Tensor) -> None:
        """p (b * hk * count, rows, cols) of tiles that begin with the query and the key of these numbers, and follow each other
        along the diagonal; those of queries before their keys are 0. It is written over."""
        cols = pairs.shape[-1]
        before = key - query - self._shift  # so many rows of the tile see none of its keys
        square = pairs[:, before : before + cols] if before >= 0 else pairs[:, :0]
        if square.shape[1] > 0:
            below = square.cumsum_(-1).tril_(-1)[..., : square.shape[1] - 1].sum(1)
            self._add(self._diagonal, key, F.pad(below, (1, 0)))
            pairs, query = pairs[:, before + cols :], query + before + cols
        if pairs.shape[1] > 0:
            self._add_flow(query + self._shift, pairs.sum(2))
            self._add_flow(key, -pairs.sum(1))

    def result(self, before: Tensor | float = 0.0, behind: Tensor | float = 0.0) -> Tensor:
        """(b, hk, m), float64. Of a call between states, the sums (b, hk, 1) of the pairs of the one before all tokens, which
        are those of a key, and of the one behind them, of a query."""
        flow, size = (x.flip(-1).cumsum(-1).flip(-1) for x in (self._flow, self._size))
        flow += behind
        # By query and by key all pairs have the same sum; what rounding leaves of the difference goes back where it came from.
        left, size_of_all = flow[..., :1] - before, size[..., :1]
        rounding = torch.where(left.isfinite() & (size_of_all > 0), left * (size / size_of_all), 0.0)
        return self._diagonal + flow - rounding

    def _add_flow(self, start: int, x: Tensor) -> None:
        self._add(self._flow, start, x)
        self._add(self._size, start, x.abs())

    @staticmethod
    def _add(total: Tensor, start: int, x: Tensor) -> None:
        b, hk = total.shape[:2]
        x = rearrange(x, "(b h count) t -> b h (count t)", b=b, h=hk)
        total[..., start : start + x.shape[-1]] += x
