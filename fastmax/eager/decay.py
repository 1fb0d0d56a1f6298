"""Decays and sequence bounds as factors of the weights: one number per token in place of one per pair.

    G_j = sum_{t <= j} log_decay_t
    weight of the pair (i, j) = exp(G_pos(i) - G_j) w_ij    if k_start[i] <= j < k_end[i], else 0

where pos(i) = i + m - n is the position of query i among the keys. With a `lag` (`Call.lag`), the exponent is
G_(pos(i) + lag) - G_j: the query has the decays of later tokens too, and G has m + lag tokens. G is summed in float64 and
differences are taken before rounding, so precision does not depend on the length. All exponents are <= 0.

A decay of NaN counts as 0 in G. The exponents of a query are set to NaN if it sees a key before such a decay (`_nan_rows`).
With a NaN in G, all later queries would become NaN, including those that see no such key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F

from fastmax.core.transforms import in_functorch
from fastmax.eager.exponential import exp_of_decayed
from fastmax.eager.workspace import Workspace, buffer


def is_at_hand(x: Tensor) -> bool:
    """Returns whether the elements of x can be read without synchronisation: x is on a CPU and not a fake tensor."""
    return x.device.type == "cpu" and not is_fake(x)


def finite_decay(log_decay: Tensor, continues: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Implements `fastmax.ops.finite_decay`."""
    resets = log_decay == -torch.inf
    tokens = torch.arange(log_decay.shape[-1], device=log_decay.device)
    first = torch.where(resets, tokens, -1 if continues else 0).cummax(-1).values
    return torch.where(resets, 0.0, not_above_zero(log_decay.to(dtype))), first.to(torch.int32)


def not_above_zero(log_decay: Tensor) -> Tensor:
    """Returns the decays clamped to at most 0; clamped decays get gradient 0."""
    return log_decay.clamp(max=0.0)


def may_hold_nan(x: Tensor) -> bool:
    """Returns whether x holds a NaN; True also if the elements of x cannot be read without synchronisation."""
    if torch.compiler.is_compiling() or in_functorch():
        return True
    return not is_at_hand(x) or bool(x.isnan().any())


def sum_of_decays(log_decay: Tensor) -> Tensor:
    """Returns the sum over the tokens, (..., 1) in float64: -inf if any decay is -inf, else NaN if any is NaN."""
    total = log_decay.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).double().sum(-1, keepdim=True)
    return torch.where((total > -torch.inf) & log_decay.isnan().any(-1, keepdim=True), torch.nan, total)


def sums_in_window(log_decay: Tensor, window: int) -> Tensor:
    """Returns for each token the sum of the decays of the `window` tokens after it, (b, hk, m - window) in float64.

    log_decay (b, hk, m) is finite or NaN.
    """

    def sums(x: Tensor) -> Tensor:
        x = x.cumsum(-1)
        return x[..., window:] - x[..., : x.shape[-1] - window]

    if not may_hold_nan(log_decay):
        return sums(log_decay.double())
    is_nan = log_decay.isnan()
    return sums(torch.where(is_nan, 0.0, log_decay.double())).masked_fill(sums(is_nan) > 0, torch.nan)


def _last_key_before_nan(log_decay: Tensor, mask: Tensor | None) -> Tensor:
    """Returns for each token the last key before the latest decay of NaN up to that token, (b, hk, m) int64.

    -1: a decay is NaN, and only the keys of a given state precede it. -2: no decay up to the token is NaN.
    """
    tokens = torch.arange(log_decay.shape[-1], device=log_decay.device)
    if mask is None:
        before = tokens - 1
    else:
        last = torch.where(mask, tokens, -1).cummax(-1).values
        before = F.pad(last[..., :-1], (1, 0), value=-1).unsqueeze(1)
    return torch.where(log_decay.isnan(), before, -2).cummax(-1).values


def _last_seen_before_nan(log_decay: Tensor, mask: Tensor | None, lag: int) -> Tensor:
    """Returns `_last_key_before_nan` for queries whose decays reach `lag` tokens beyond their position, (b, hk, m).

    log_decay is (b, hk, m + lag). The query at token j sees keys up to j alone.
    """
    m = log_decay.shape[-1] - lag
    keys = log_decay.new_ones(log_decay.shape[0], m, dtype=torch.bool) if mask is None else mask
    last_key = torch.where(keys, torch.arange(m, device=keys.device), -1).cummax(-1).values
    before_nan = _last_key_before_nan(log_decay, F.pad(keys, (0, lag)))
    return torch.minimum(before_nan[..., lag:], last_key.unsqueeze(1))


class Factor(NamedTuple):
    """A decay factor, stored as `whole + part`.

    A factor near 1 is 1 + part, so that it is not rounded. The state is multiplied by thousands of such factors.
    """

    whole: Tensor  # 0 or 1
    part: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Returns x times the factor; 0 where the factor is 0, even if x is not finite."""
        return torch.where(self._is_zero, 0.0, torch.addcmul(x * self.whole, x, self.part))

    def multiply_(self, *tensors: Tensor) -> None:
        """Multiplies the tensors by the factor in place."""
        # If the factor can be read without synchronisation, one pass over the tensors replaces up to three.
        reads_factor, is_zero = is_at_hand(self.whole), self._is_zero
        all_near_one, none_near_one = reads_factor and bool(self.whole.all()), reads_factor and not self.whole.any()
        may_be_zero = not reads_factor or bool(is_zero.any())
        for x in tensors:
            if all_near_one:
                x.addcmul_(x, self.part)
            elif none_near_one:
                x.mul_(self.part)
            else:
                torch.addcmul(x * self.whole, x, self.part, out=x)
            if may_be_zero:
                x.masked_fill_(is_zero, 0.0)

    def times_plus(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns x times the factor plus y, with y added to the small part of the product first.

        If y is the same in every chunk, adding it to the large product would round in the same direction every time.
        """
        x = torch.where(self._is_zero, 0.0, x)
        return x * self.whole + torch.addcmul(y, x, self.part)

    @property
    def _is_zero(self) -> Tensor:
        return (self.whole == 0) & (self.part == 0)

    def chunks(self, count: int) -> list[Factor]:
        """Returns the factors of each of `count` chunks."""
        return [Factor(*x) for x in zip(*(x.unflatten(0, (-1, count)).unbind(1) for x in self), strict=True)]


class Factors(NamedTuple):
    """The decay factors of a chunk of the linear algorithm, each 0 where the bounds hide the keys in question.

    For a chunk of the tokens a .. b:

        rows_i = exp(G_i - G_(a-1))    keys_j = exp(G_b - G_j)    carry = exp(G_b - G_(a-1))

    B counts blocks as in `fastmax.eager.blocks.to_blocks`.
    """

    rows: Tensor | None  # (B, group * length, 1): the output from the state before the chunk is multiplied by it
    keys: Tensor | None  # (B, length, 1): multiplies the key's contribution to the state after the chunk
    carry: Factor | None  # (B, 1, 1): multiplies the state before the chunk where it is carried past the chunk


class Decay:
    """The decays and bounds of a head group: log_decay (b, hk, m + lag), k_start and k_end (b, hk, n). Each may be None."""

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
        lag: int = 0,
    ):
        """Initialises the running sums of the decays.

        Args:
            shift: m - n.
            dtype: of the factors and exponents.
            mask, left: attention_mask (b, m) and `left` of the call.
            state: (b, hk), for a call that continues from a state: the first element of k_sum, 0 if the state holds no key.
            lag: of the call. A call with a lag continues from no state.
        """
        self._nan_rows = None  # (b, hk, n): NaN for queries whose exponents are NaN, else 0
        self.nan_state = None  # (b, hk): whether the state after the last key is NaN
        if log_decay is not None and (may_hold_nan(log_decay) or (state is not None and may_hold_nan(state))):
            last = _last_key_before_nan(log_decay, mask) if lag == 0 else _last_seen_before_nan(log_decay, mask, lag)
            is_key = last >= 0
            if state is not None:
                last = torch.where(state.isnan().unsqueeze(-1), last.clamp(min=-1), last)  # a NaN of an earlier call
                is_key = is_key | ((last == -1) & (state != 0).unsqueeze(-1))
            last, is_nan = last[..., shift:], is_key[..., shift:]
            if k_start is not None:
                is_nan = is_nan & (last >= k_start)
            if left is not None:
                is_nan = is_nan & (last >= torch.arange(-left, last.shape[-1] - left, device=last.device) + shift)
            self._nan_rows = torch.where(is_nan, torch.nan, torch.zeros((), dtype=dtype, device=is_nan.device))
            self.nan_state = is_nan[..., -1]
            log_decay = torch.where(log_decay.isnan(), 0.0, log_decay)
        # Starts with a 0: sums[j + 1] is G_j.
        self._sums = None if log_decay is None else F.pad(log_decay.double().cumsum(-1), (1, 0))
        self._first, self._end = k_start, k_end
        self._shift = shift
        self._lag = lag
        self._dtype = dtype

    def key_range(self, start: int, stop: int, m: int) -> tuple[int, int]:
        """Returns the range of keys that the queries `start .. stop` may see. Reading the bounds synchronises on a GPU."""
        first = 0 if self._first is None else int(self._first[..., start].min())
        return first, m if self._end is None else int(self._end[..., stop - 1].max())

    def exponent(
        self, query: int, key: int, rows: int, cols: int, count: int = 1, workspace: Workspace | None = None
    ) -> Tensor | None:
        """Returns the exponents `G_(pos(i) + lag) - G_j` of the weights of a tile, (b * hk * count, rows, cols).

        They are -inf where the bounds hide a key, and 0 above the diagonal of a causal call. The result is None if there are
        neither decays nor hidden keys.

        Args:
            query, key: indices of the first query and the first key of the tile.
            count: number of tiles of this size that follow each other along the diagonal.
        """
        first_row = self._shift + query
        x = None
        if self._sums is not None:
            at_rows = self._blocks(self._sums[..., 1:], first_row + self._lag, rows, count).unsqueeze(-1)
            at_cols = self._blocks(self._sums[..., 1:], key, cols, count).unsqueeze(-2)
            if key + cols <= first_row and count == 1:  # a sum of two terms <= 0 has no cancellation
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
        """Returns at_rows - at_cols without a float64 matrix.

        Each float64 vector is split into its rounding to the dtype and the remainder.
        """
        out = workspace.buffer("exponent", at_rows.shape[0], at_rows.shape[1], at_cols.shape[2])
        base = at_rows[:, :1]
        at_rows, at_cols = at_rows - base, at_cols - base
        rows, cols = at_rows.to(self._dtype), at_cols.to(self._dtype)
        return torch.sub(rows, cols, out=out).add_((at_rows - rows).to(self._dtype)).sub_((at_cols - cols).to(self._dtype))

    def _hide(
        self, x: Tensor | None, query: int, key: int, rows: int, cols: int, count: int, reads_values: bool
    ) -> Tensor | None:
        """Returns x (None: zeros) with -inf where the bounds hide a key; None if x is None and no key is hidden."""
        like: Any = (
            self._sums if self._first is None and self._end is None else self._end if self._first is None else self._first
        )
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
        """Returns the factors of `count` causal chunks of `length` tokens, the first of which starts at this query."""
        key = query + self._shift
        first: Any = self._first  # not None without sums
        if self._sums is not None and first is not None and reads_values and is_at_hand(first):
            last = min(query + length * count, first.shape[-1] - 1)  # the query after the chunks
            first = None if first[..., last].max() < key else first  # no sequence starts in these chunks
        if self._sums is None:
            rows = keys = whole = first.new_ones((), dtype=self._dtype)
            part = torch.zeros_like(whole)
        else:
            at = self._blocks(self._sums[..., 1:], key, length, count)
            at_rows = at if self._lag == 0 else self._blocks(self._sums[..., 1:], key + self._lag, length, count)
            base = self._blocks(self._sums, key, length, count)[:, :1]
            rows, keys = (exp_of_decayed(x.to(self._dtype), in_place=False) for x in (at_rows - base, at[:, -1:] - at))
            through = at[:, -1:] - base
            near_one = through > -0.5
            whole = near_one.to(self._dtype)
            part = torch.where(near_one, through.expm1(), through.exp()).to(self._dtype)
            if self._nan_rows is not None:
                rows = rows + self._blocks(self._nan_rows, query, length, count)
        if first is not None:
            # A state holds only keys of the sequence of the next query.
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
        """Returns x, and 0 where `visible` is False."""
        visible = visible.flatten(0, 1)
        return torch.where(visible, x, 0.0)

    def factors_before_queries(self, start: int, stop: int) -> Tensor:
        """Returns the factors of the keys `start .. stop`, which come before all queries, (b * hk, stop - start, 1).

        They are the decays from each key to the last key before all queries.
        """
        last = self._shift
        x: Any = None  # but one of the two is there
        if self._sums is not None:
            x = (self._sums[..., last : last + 1] - self._sums[..., start + 1 : stop + 1]).to(self._dtype).exp()
        if self._first is not None:
            keys = torch.arange(start, stop, device=self._first.device)
            ones = torch.ones((), dtype=self._dtype, device=self._first.device)
            x = torch.where(keys >= self._first[..., :1], ones if x is None else x, 0.0)
        return x.flatten(0, 1).unsqueeze(-1)

    def _following(self, query: int, length: int, count: int) -> Tensor:
        """Returns k_start of the first query after each chunk, (b * hk * count, 1); after the last chunk of the call, that of
        the last query."""
        first: Any = self._first  # not None, since only bounds ask
        after = first[..., query + length :: length][..., :count]
        following = torch.cat((after, first[..., -1:]), dim=-1)[..., :count]
        return following.flatten().unsqueeze(-1)

    @staticmethod
    def _blocks(x: Tensor, start: int, length: int, count: int) -> Tensor:
        """Returns `count` blocks of `length` tokens of x (b, hk, tokens), as (b * hk * count, length)."""
        return rearrange(x[..., start : start + count * length], "b h (count t) -> (b h count) t", count=count)


def add_tokens(total: Tensor, start: int, x: Tensor) -> None:
    """Adds x (b * hk * count, length) to the tokens from `start` on of total (b, hk, tokens)."""
    b, hk = total.shape[:2]
    x = rearrange(x, "(b h count) t -> b h (count t)", b=b, h=hk)
    total[..., start : start + x.shape[-1]] += x


class QueryPairs:
    """Collects the per-query sums of the gradient of log_decay, which a later call passes to `DecayGradient.add_queries`."""

    def __init__(self, out: Tensor):
        """`out` (b, hk, group, n) is zero; the sums are added to it."""
        self._out = out

    def add_queries(self, start: int, x: Tensor, group: int) -> None:
        """Adds the sums of the queries from `start` on; see `DecayGradient.add_queries`."""
        b, hk = self._out.shape[:2]
        x = rearrange(x, "(b h count) (g t) 1 -> b h g (count t)", b=b, h=hk, g=group)
        self._out[..., start : start + x.shape[-1]] += x


class DecayGradient:
    """Accumulates the gradient of log_decay over a head group.

    With `p_ij = w_ij u_ij`, the gradient with respect to the logarithm of the weight of a pair:

        grad_t = sum of p_ij over j < t <= pos(i)
               = sum_{s >= t} (sum of p_ij over pos(i) = s - sum of p_ij over j = s)

    With a lag, pos(i) + lag takes the place of pos(i).

    Pairs in different chunks or tiles are summed by the second line: by query and by key, as differences per token. Pairs in a
    tile on the diagonal are summed by the first line. The second line holds for them too, but there the pair of a token with
    itself cancels. With strong decays it is the largest pair, and its rounding error would remain. With a lag that pair does
    not cancel, and the second line serves for all pairs.
    """

    def __init__(self, log_decay: Tensor, shift: int, lag: int = 0):
        self._difference = torch.zeros_like(log_decay, dtype=torch.float64, memory_format=torch.contiguous_format)
        self._size = torch.zeros_like(self._difference)  # sum of the absolute values of the terms of each difference
        self._diagonal = torch.zeros_like(self._difference)
        self._shift = shift
        self._lag = lag

    def add_queries(self, start: int, x: Tensor, group: int) -> None:
        """Adds the sums over keys of other chunks, x (b * hk * count, group * length, 1), of the queries from `start` on."""
        x = rearrange(x, "b (g t) 1 -> b g t", g=group).sum(1, dtype=torch.float64)
        self._add_difference(start + self._shift + self._lag, x)

    def add_keys(self, start: int, x: Tensor) -> None:
        """Adds the sums over queries of other chunks, x (b * hk * count, length, 1), of the keys from `start` on."""
        self._add_difference(start, -x.squeeze(-1))

    def add_tile(self, query: int, key: int, pairs: Tensor) -> None:
        """Adds p (b * hk * count, rows, cols) of `count` tiles along the diagonal.

        `query` and `key` are the indices of the first query and the first key. p is 0 above the diagonal; it is overwritten.
        """
        if self._lag > 0:
            self._add_difference(query + self._shift + self._lag, pairs.sum(2))
            self._add_difference(key, -pairs.sum(1))
            return
        cols = pairs.shape[-1]
        before = key - query - self._shift  # rows of the tile that see none of its keys
        square = pairs[:, before : before + cols] if before >= 0 else pairs[:, :0]
        if square.shape[1] > 0:
            below = square.cumsum_(-1).tril_(-1)[..., : square.shape[1] - 1].sum(1)
            add_tokens(self._diagonal, key, F.pad(below, (1, 0)))
            pairs, query = pairs[:, before + cols :], query + before + cols
        if pairs.shape[1] > 0:
            self._add_difference(query + self._shift, pairs.sum(2))
            self._add_difference(key, -pairs.sum(1))

    def result(self, before: Tensor | float = 0.0, after: Tensor | float = 0.0) -> Tensor:
        """Returns the gradient, (b, hk, m + lag) in float64.

        Args:
            before: sum of p over the pairs of the given state, which acts as a key before all tokens, (b, hk, 1).
            after: sum of p over the pairs of the new state, which acts as a query after all tokens, (b, hk, 1).
        """
        total, size = (x.flip(-1).cumsum(-1).flip(-1) for x in (self._difference, self._size))
        total += after
        # Without rounding, the total at the first token equals `before`. The error is taken off in proportion to the terms.
        error, size_of_all = total[..., :1] - before, size[..., :1]
        rounding = torch.where(error.isfinite() & (size_of_all > 0), error * (size / size_of_all), 0.0)
        return self._diagonal + total - rounding

    def _add_difference(self, start: int, x: Tensor) -> None:
        add_tokens(self._difference, start, x)
        add_tokens(self._size, start, x.abs())
