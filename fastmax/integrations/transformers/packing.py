"""Packed batches: rows of several documents end to end, by positions that start again or by FlashAttention's `cu_seq_lens_q`.

transformers finds the first kind itself, where there is neither an attention_mask nor a cache, and changes the mask function. A
mask function is a function of indices. Calls of it say where documents begin: their first token does not see the one before.
Then it is compared with the pattern of these documents: for every query and key of short rows, in O(n) for long ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.utils.import_utils import is_tracing

from fastmax.integrations.transformers import hooks
from fastmax.integrations.transformers.options import NAME

_ALL_PAIRS = 1 << 24  # of a query and a key, for all rows: up to here every pair is compared (a row of 4096 tokens)
_KEYS = 256  # per query that are compared in longer rows

ONLY = (
    f'attn_implementation="{NAME}" takes packed sequences (position_ids that start again, cu_seq_lens_q) in causal layers, '
    "without an attention_mask and without a cache (use_cache=False)"
)


def refuse_caches_of_documents(layer: nn.Module) -> None:
    """Lets an attention layer refuse `cu_seq_lens_q` beside a cache, in which later tokens would see all documents.

    The attention function cannot tell an empty cache from none; the layer receives the cache itself.
    """
    hooks.add_once(layer, _refuse_cache)


def _refuse_cache(layer: nn.Module, args: tuple, kwargs: dict) -> None:
    """Forward pre-hook of the layer. A function of this module, it is copied and pickled with the model."""
    if kwargs.get("cu_seq_lens_q") is None or layer.config._attn_implementation != NAME:
        return
    for given in (*args, *kwargs.values()):
        if isinstance(given, Cache):
            raise ValueError(f"{ONLY}; got cu_seq_lens_q and a {type(given).__name__} in {type(layer).__name__}")


def may_be_packed(arguments: dict) -> bool:
    """Returns whether the arguments of a mask function can be those of a packed batch.

    Args:
        arguments: of transformers' mask interface. A packed batch has as many queries as keys and no padding. `local_size`
            is given with windows and chunks, `use_vmap` with functions that take single numbers.
    """
    if isinstance(arguments["q_offset"], Tensor) or arguments["q_offset"] != 0 or arguments["kv_offset"] != 0:
        return False
    if arguments["q_length"] != arguments["kv_length"] or arguments["attention_mask"] is not None:
        return False
    plain = arguments.get("local_size") is None and not arguments.get("use_vmap", False)
    return plain and arguments.get("allow_is_causal_skip") is False


def differs_from_packing(mask_function: Callable, first: Tensor) -> Tensor:
    """Returns whether a mask function is not causal within documents: bool, one element.

    In short rows every query is compared with every key. In long rows, and in a graph, whose sizes may be symbolic, the keys of
    a query are the ends of its document, their neighbours, and `_KEYS` others spread over the row. The ends find every pattern
    in which a query sees an interval of keys (windows, chunks, prefixes), so only patterns with holes depend on the others.

    Args:
        mask_function: takes indices of a row, a head, a query and a key, tensors that broadcast.
        first: bool (batch, n), True = begins a document.
    """
    batch, n = first.shape
    query = torch.arange(n, device=first.device)[:, None]
    rows = torch.arange(batch, device=first.device)[:, None, None]
    document = first.cumsum(1)
    if not is_tracing(first) and batch * n * n <= _ALL_PAIRS:
        key = query.T[None]
    else:
        begin = torch.where(first, query.T, 0).cummax(1).values[..., None]
        step = 1 + (n - 1) // _KEYS
        # Neighbouring queries get other keys: all residues modulo `step` occur.
        spread = torch.arange(_KEYS, device=first.device) * step + query % step
        key = torch.cat(
            (begin, begin - 1, query.expand_as(begin), query.expand_as(begin) + 1, spread.expand(batch, n, _KEYS)), 2
        )
        key = key.clamp(0, n - 1)
    row_of_key = document.gather(1, key.expand(batch, -1, -1).flatten(1)).unflatten(1, key.shape[1:])
    expected = (key <= query) & (document[..., None] == row_of_key)
    return (mask_function(rows, torch.zeros_like(rows), query, key) != expected).any()


def first_tokens(mask_function: Callable, batch: int, n: int, device: torch.device) -> Tensor:
    """Returns which tokens begin a document by a mask function: bool (batch, n)."""
    rows = torch.arange(batch, device=device)[:, None]
    later = torch.arange(1, n, device=device)[None, :]
    sees_the_last = mask_function(rows, torch.zeros_like(rows), later, later - 1).expand(batch, n - 1)
    return torch.cat((torch.ones_like(rows, dtype=torch.bool), ~sees_the_last), dim=1)


def bounds(first: Tensor) -> Tensor:
    """Returns `cu_seqlens` of the rows end to end, int32, from the tokens that begin a document (batch, n).

    A compiled graph does not know their number: there it has an entry for every token, and the last documents are empty.
    """
    first = first.flatten()
    total = first.shape[0]
    if is_tracing(first):
        begins = torch.where(first, torch.arange(total, device=first.device), total).sort().values
    else:
        begins = first.nonzero().squeeze(1)
    return torch.nn.functional.pad(begins, (0, 1), value=total).to(torch.int32)


def end_to_end(x: Tensor) -> Tensor:
    """Returns the rows of a batch one after the other: (b, h, n, ...) -> (1, h, b * n, ...).

    No copy is made of heads as transformers' layers lay them out.
    """
    return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def rows_again(x: Tensor, batch: int) -> Tensor:
    """Inverts `end_to_end`."""
    return x.squeeze(0).unflatten(1, (batch, -1)).transpose(0, 1)
