"""Packed batches: rows of several documents end to end, by positions that start again or by FlashAttention's `cu_seq_lens_q`.

transformers finds the first kind itself, where there is neither an attention_mask nor a cache, and changes the pattern of the
mask. It is recognised here, and where documents begin is asked of the pattern: their first token does not see the one before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Cache, masking_utils
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function
from transformers.utils.import_utils import is_tracing

from fastmax.integrations.transformers.options import NAME

_AND = and_masks(causal_mask_function).__code__
_PACKED = packed_sequence_mask_function(None).__code__
_REMAP = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # not in transformers 5.4
_REMAPPED = None if _REMAP is None else _REMAP(causal_mask_function, None).__code__

ONLY = (
    f'attn_implementation="{NAME}" takes packed sequences (position_ids that start again, cu_seq_lens_q) in causal layers, '
    "without an attention_mask and without a cache (use_cache=False)"
)


def refuse_caches_of_documents(layer: nn.Module) -> None:
    """Let an attention layer refuse `cu_seq_lens_q` beside a cache, empty or not: later tokens would see all documents in it.

    Only the layer sees the cache: to the attention function keys that come from an empty one look as if there were none.
    """
    if _refuse_cache not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(_refuse_cache, with_kwargs=True)


def _refuse_cache(layer: nn.Module, args: tuple, kwargs: dict) -> None:
    """The hook: a function of the module, so that models are copied and pickled with it."""
    if kwargs.get("cu_seq_lens_q") is None or layer.config._attn_implementation != NAME:
        return
    for given in (*args, *kwargs.values()):
        if isinstance(given, Cache):
            raise ValueError(f"{ONLY}; got cu_seq_lens_q and a {type(given).__name__} in {type(layer).__name__}")


def is_packed(mask_function: Callable, arguments: dict) -> bool:
    """Whether a pattern of transformers' mask functions is the causal one within each document of a row.

    Under `torch.compile` every call with position_ids and neither mask nor cache has that pattern.

    Args:
        arguments: the others of the mask function.
    """
    if getattr(mask_function, "__code__", None) is not _AND:
        return False
    if torch.compiler.is_compiling():  # what closures hold is hidden; other patterns come with these arguments
        others = arguments.get("local_size") is not None or arguments.get("use_vmap", False)
        return not others and arguments.get("allow_is_causal_skip") is False
    parts = _closure(mask_function)["mask_functions"]
    codes = [getattr(part, "__code__", None) for part in parts]
    causal = [part is causal_mask_function or _is_remapped_causal(part) for part in parts]
    return len(parts) == 2 and codes.count(_PACKED) == 1 and any(causal)


def _is_remapped_causal(part: Callable) -> bool:
    return getattr(part, "__code__", None) is _REMAPPED and _closure(part)["mask_function"] is causal_mask_function


def _closure(function: Callable) -> dict:
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)}


def first_tokens(mask_function: Callable, batch: int, n: int, device: torch.device) -> Tensor:
    """bool (batch, n), True = begins a document, by the pattern of a mask."""
    rows = torch.arange(batch, device=device)[:, None]
    later = torch.arange(1, n, device=device)[None, :]
    sees_the_last = mask_function(rows, torch.zeros_like(rows), later, later - 1).expand(batch, n - 1)
    return torch.cat((torch.ones_like(rows, dtype=torch.bool), ~sees_the_last), dim=1)


def bounds(first: Tensor) -> Tensor:
    """`cu_seqlens` of the rows end to end, int32, from where documents begin (batch, n). In a compiled graph, where their
    number is not known, as long as if each token were one: the others are empty, at the end."""
    first = first.flatten()
    total = first.shape[0]
    if is_tracing(first):
        begins = torch.where(first, torch.arange(total, device=first.device), total).sort().values
    else:
        begins = first.nonzero().squeeze(1)
    return torch.nn.functional.pad(begins, (0, 1), value=total).to(torch.int32)


def end_to_end(x: Tensor) -> Tensor:
    """Rows of a batch one after the other: (b, h, n, ...) -> (1, h, b * n, ...), without a copy as transformers' layers lay out
    their heads."""
    return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def rows_again(x: Tensor, batch: int) -> Tensor:
    """What `end_to_end` took."""
    return x.squeeze(0).unflatten(1, (batch, -1)).transpose(0, 1)
