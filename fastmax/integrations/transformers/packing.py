"""Packed batches: rows of several documents end to end, by positions that start again or by FlashAttention's `cu_seq_lens_q`.

transformers finds the first kind itself, where there is neither an attention_mask nor a cache, and changes the mask function. A
mask function is a function of indices. Calls of it say where documents begin: their first token does not see the one before.
Then it is compared with the pattern of these documents for every query and key, in blocks: O(n^2) comparisons in each forward,
which take far less time than the layers of a model do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.utils.import_utils import is_tracing

from fastmax.integrations.transformers.options import NAME

_BLOCK = 1 << 24  # pairs of a query and a key that are compared at a time: a bool tensor of 16 MiB

ONLY = (
    f'attn_implementation="{NAME}" takes packed sequences (position_ids that start again, cu_seq_lens_q) in causal layers, '
    "without an attention_mask and without a cache (use_cache=False)"
)


def refuse_caches_of_documents(layer: nn.Module) -> None:
    """Lets an attention layer refuse `cu_seq_lens_q` beside a cache, in which later tokens would see all documents.

    The attention function cannot tell an empty cache from none; the layer receives the cache itself.
    """
    if _refuse_cache not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(_refuse_cache, with_kwargs=True)


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
    """Returns whether a mask function is not causal within documents, for any query and key: bool, one element.

    Args:
        mask_function: takes indices of a row, a head, a query and a key, tensors that broadcast.
        first: bool (batch, n), True = begins a document.
    """
    batch, n = first.shape
    rows = torch.arange(batch, device=first.device)[:, None, None]
    index = torch.arange(n, device=first.device)
    document = first.cumsum(1)
    differs = first.new_zeros(())
    step = n if is_tracing(first) else max(1, _BLOCK // (batch * n))
    for start in range(0, n, step):
        query, key = index[start : start + step, None], index[None, :]
        expected = (key <= query) & (document[:, start : start + step, None] == document[:, None, :])
        differs = differs | (mask_function(rows, torch.zeros_like(rows), query, key) != expected).any()
    return differs


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
