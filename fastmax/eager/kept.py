"""Keys that each block of queries weighs by exp of their score (`fastmax.nn.kept_keys`): which ones, their rows, gradients.

`largest_so_far` chooses the kept ones by a prefix scan that merges sorted lists. `gather_kept` gathers rows of k and v.
`kept_step` is a step of a state with slots for keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmax.eager.blocks import compute_dtype
from fastmax.eager.recurrent import softmax_step

LEAST_DECAY = -1000.0  # whose exp is 0, in float64 too. Sums of such decays are finite and keep their digits.


def largest_so_far(rank: Tensor, index: Tensor, earlier: Tensor, count: int) -> Tensor:
    """Returns the indices of the `count` keys of the largest rank among those of a block and the blocks before it.

    There are log2(blocks) rounds. After each, a block has the largest keys of twice as many blocks.

    Args:
        rank: (b, hk, blocks, candidates), of the keys that each block adds. -inf: there is no key. NaN counts as inf.
        index: int64, likewise. Of keys with equal rank, those of later blocks are taken, and within a block the first ones.
        earlier: (blocks,), number of earlier blocks of the same sequence.

    Returns:
        int64 (b, hk, blocks, count), ascending. Where there are fewer keys, the first are -1.
    """
    cost, order = (-rank.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)).sort(dim=-1, stable=True)
    more = (0, max(0, count - cost.shape[-1]))
    cost = F.pad(cost[..., :count], more, value=torch.inf)
    index = F.pad(index.gather(-1, order[..., :count]), more)
    blocks = cost.shape[2]
    block, place = (torch.arange(x, device=rank.device) for x in (blocks, count))
    places = place.expand(cost.shape).contiguous()
    reach = 1  # number of blocks whose largest keys a block has: its own and those before it
    while reach < blocks:
        before = (block - reach).clamp(min=0)
        cost_before, index_before = (x.index_select(2, before) for x in (cost, index))
        cost_before = torch.where((earlier >= reach).unsqueeze(-1), cost_before, torch.inf)
        at = place + torch.searchsorted(cost_before, cost)  # places of the later keys in the merged list
        later = torch.searchsorted(at, places, right=True)  # number of later keys up to a place in it
        is_later = at.gather(-1, (later - 1).clamp(min=0)) == place
        of_both = torch.where(is_later, later - 1, count + place - later)
        cost, index = (torch.cat(x, dim=-1).gather(-1, of_both) for x in ((cost, cost_before), (index, index_before)))
        reach *= 2
    return torch.where(cost == torch.inf, -1, index).sort(dim=-1).values


def gather_kept(
    k: Tensor, v: Tensor, log_factor: Tensor, kept: Tensor, recent_keys: Tensor, block: int, decays: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the keys that each block weighs by exp of their score, with a batch entry for each block.

    A block has K + B places: K kept keys, then B = `block` recent ones, which are consecutive. Where a place has no key, its
    rows and its gate are 0. Differentiable any number of times, with respect to k, v and log_factor.

    Args:
        k, v, log_factor: (b, hk, m, d), (b, hk, m, dv) and float64 (b, hk, m). log_factor is the log of what multiplies exp of
            the score: at most 16 above that of any later key.
        kept: int64 (b, hk, blocks, K): indices of the kept keys among the m keys, ascending, -1 for none. As many in all heads.
        recent_keys: int64 (b, blocks, 3), first, begin and end: place K + i has the key first + i for begin <= i < end.
        decays: whether to split log factors into gates and decays.

    Returns:
        Rows of k and v, (b * blocks, hk, K + B, d) and (..., dv).
        Gates and log decays, float32 or float64 (b * blocks, hk, K + B), which `flash_attention` takes. With `decays`, let
            D_i be the least log factor of place i and all later ones. D never falls, so D_(i-1) - D_i is a log decay. The gate
            is the log factor less D_i. It is from 0 to 16, within the bounds of `log_input_gate`. Weights with these gates and
            decays are those with the log factors, divided by exp(D) of the last key that a query sees. Results do not depend on
            D, so D has no gradient. Else gates are the log factors, and there are no decays (no elements).
        D of the last B places, float64 (b * blocks, hk, B), 0 where no key follows; no elements without `decays`.
        Which places have a key, bool (b * blocks, K + B).
    """
    m, d = k.shape[2:]
    dtype, wide = k.dtype, compute_dtype(k.dtype)
    index = _places(kept, recent_keys, block)
    missing = index < 0
    high = log_factor.to(wide)  # two float32 have the digits of a float64 that the choice needs
    low = (log_factor.detach() - high.detach()).to(wide)
    rows = torch.cat([k.to(wide), v.to(wide), high.unsqueeze(-1), low.unsqueeze(-1)], dim=-1)
    table = rows.transpose(1, 2).flatten(0, 2)
    # A key in several places gets the gradients of all. `embedding` sums them in an order that does not change; `index_add` on
    # a GPU has none. One call takes all rows, since its backward sorts the index.
    taken = F.embedding(_rows_of(index, m), table).flatten(0, 1)  # (b * blocks, hk, places, channels)
    missing = missing.transpose(1, 2).flatten(0, 1)
    taken = taken.masked_fill(missing.unsqueeze(-1), 0)  # a NaN there would reach the output, and the key may be a later one
    keys, values, high, low = taken.split([d, v.shape[3], 1, 1], dim=-1)
    factor = (high.double() + low.double()).squeeze(-1)
    of_rows = keys.to(dtype).contiguous(), values.to(dtype).contiguous()
    has_key = ~missing[:, 0]
    if not decays:
        return *of_rows, factor.to(wide), factor.new_empty(0, dtype=wide), factor.new_empty(0), has_key
    known = factor.detach().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)  # NaN must not reach earlier places
    least = known.masked_fill(missing, torch.inf).flip(-1).cummin(-1).values.flip(-1)
    steps = F.pad((least[..., :-1] - least[..., 1:]).nan_to_num(nan=0.0, neginf=0.0), (1, 0))
    gate = (factor - least).masked_fill(missing, 0)
    least = least[..., least.shape[-1] - block :].nan_to_num(posinf=0.0)
    return *of_rows, gate.to(wide), steps.to(wide), least.contiguous(), has_key


def gather_kept_backward(
    kept: Tensor, recent_keys: Tensor, grad_keys: Tensor, grad_values: Tensor, grad_gate: Tensor, m: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of k, v and log_factor, given those of the first three results of `gather_kept`.

    Those of several places are summed in float32 or float64. 0 for keys without a place.
    """
    b, hk, blocks, count = kept.shape
    places, d, dv = grad_keys.shape[2], grad_keys.shape[3], grad_values.shape[3]
    index, dtype, wide = _places(kept, recent_keys, places - count), grad_keys.dtype, compute_dtype(grad_keys.dtype)
    grads = torch.cat([grad_keys.to(wide), grad_values.to(wide), grad_gate.to(wide).unsqueeze(-1)], dim=-1)
    grads = grads.unflatten(0, (b, blocks)).masked_fill((index < 0).transpose(1, 2).unsqueeze(-1), 0)
    summed = torch.ops.aten.embedding_dense_backward(grads, _rows_of(index, m), b * m * hk, -1, False)
    of_k, of_v, of_factor = summed.view(b, m, hk, d + dv + 1).transpose(1, 2).split([d, dv, 1], dim=-1)
    return of_k.to(dtype), of_v.to(dtype), of_factor.squeeze(-1).double()


def _places(kept: Tensor, recent_keys: Tensor, block: int) -> Tensor:
    """Returns the index of the key of each place, -1 for none, (b, hk, blocks, K + block)."""
    first, begin, end = (x.unsqueeze(-1) for x in recent_keys.unbind(-1))
    i = torch.arange(block, device=kept.device)
    recent = torch.where((i >= begin) & (i < end), first + i, -1)
    return torch.cat([kept, recent.unsqueeze(1).expand(-1, kept.shape[1], -1, -1)], dim=-1)


def _rows_of(index: Tensor, m: int) -> Tensor:
    """Returns indices of keys (b, hk, blocks, places) as rows of a table (b * m * hk, ...): (b, blocks, hk, places)."""
    b, hk = index.shape[:2]
    filler = torch.arange(index.shape[-1], device=index.device) % m  # one key for all would get all their gradients of 0
    head, entry = torch.arange(hk, device=index.device).view(-1, 1), torch.arange(b, device=index.device).view(-1, 1, 1, 1)
    return torch.where(index >= 0, index, filler).transpose(1, 2) * hk + head + entry * (m * hk)


Slots = tuple[Tensor, Tensor, Tensor, Tensor]


def kept_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_input_gate: Tensor,
    log_decay: Tensor | None,
    keys: Tensor,
    values: Tensor,
    log_factors: Tensor,
    key_positions: Tensor,
    positions: Tensor,
    count: Tensor | None,
    kept: int,
    window: int,
    block: int,
    scale: float,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Slots]:
    """Computes softmax attention of one token to the keys in slots that are beyond the exact window, and updates the slots.

    The token's decay is added to all log factors. Its key is written to a free slot. After the last token of a block, the slots
    of the keys that the next block does not keep become free.

    Args:
        q, k, v: (b, h, 1, d), (b, hk, 1, d), (b, hk, 1, dv).
        log_input_gate, log_decay: (b, hk, 1); zeros in the rows of padding. None: no decay.
        keys, values, log_factors, key_positions: (b, hk, slots, d), (b, hk, slots, dv), float64 and int64 (b, hk, slots). A
            position of -1: the slot is free.
        positions: int64 (b,), of the token.
        count: int (b,), 1, or 0 for padding, which changes no slot. None: all 1.
        kept, window, block: K, W and B (`fastmax.nn.kept_keys`).
        scale: of the scores.
        in_place: whether to overwrite the slots.

    Returns:
        The output (b, h, 1, dv), the log of the sums of weights (b, h, 1), and the slots.
    """
    b, hk = k.shape[:2]
    if log_decay is not None:
        add = log_factors.add_ if in_place else log_factors.add
        log_factors = add(log_decay.clamp(min=LEAST_DECAY))
    position = positions.view(b, 1, 1).expand(b, hk, 1)
    slot = key_positions.argmin(dim=-1, keepdim=True)  # one that is free

    def written(x: Tensor, new: Tensor) -> Tensor:
        at, new = slots_like(slot, x), new.to(x.dtype)
        if count is not None:
            new = torch.where(count.view(-1, *(1,) * (x.dim() - 1)) > 0, new, x.gather(2, at))
        return x.scatter_(2, at, new) if in_place else x.scatter(2, at, new)

    keys, values = written(keys, k), written(values, v)
    log_factors, key_positions = written(log_factors, log_input_gate), written(key_positions, position)
    beyond = (key_positions >= 0) & (key_positions <= position - window)
    log_factor = torch.where(beyond, log_factors, -torch.inf).to(compute_dtype(q.dtype))
    o, lse = softmax_step(q, keys, values, log_factor, scale)

    # Only the last token of a block drops keys. This is computed at every step, since a CUDA graph has no branch.
    candidate = must_be_chosen(key_positions, positions + (1 if count is None else count), window, block)
    order = key_positions.argsort(dim=-1, descending=True)
    rank = torch.where(candidate, log_factors.detach(), -torch.inf).gather(2, order)
    order = order.gather(2, rank.argsort(dim=-1, descending=True, stable=True))
    more = torch.arange(order.shape[2], device=q.device) >= kept
    dropped = candidate & torch.zeros_like(candidate).scatter(2, order, more.expand_as(order))
    left = key_positions.masked_fill(dropped, -1)
    return o, lse, (keys, values, log_factors, key_positions.copy_(left) if in_place else left)


def slots_like(index: Tensor, x: Tensor) -> Tensor:
    """Returns an index (b, hk, slots) as one of x (b, hk, ..., channels) or (b, hk, ...)."""
    return index if x.dim() == 3 else index.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])


def must_be_chosen(of_keys: Tensor, of_query: Tensor, window: int, block: int) -> Tensor:
    """Returns which keys, at positions (b, ..., keys), must be chosen to be kept for the query at a position (b,).

    -1 is the position of no key.
    """
    first = of_query - of_query % block - window
    return (of_keys >= 0) & (of_keys < first.view(-1, *(1,) * (of_keys.dim() - 1)))
