"""Masks that only fastmax's attention can read.

transformers asks `fastmax_mask` for a mask of each pattern and passes the result to the layers. To a layer with attention of
its own, any tensor or None would be a valid mask. So the result is an object that raises an error in every other use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from fastmax.core import validation
from fastmax.integrations.transformers.options import GLOBAL, NAME
from fastmax.integrations.transformers.packing import ONLY, bounds, differs_from_packing, first_tokens, may_be_packed
from fastmax.integrations.transformers.unreadable import Unreadable


class FastmaxMask(Unreadable):
    """The keys that the queries of a layer may see.

    Attributes:
        causal: each query sees the keys up to its own position, aligned at the end; else all keys.
        padding: bool (batch, keys), True = takes part; None = all do.
        refusal: the error of a layer that uses this mask; None = fastmax can run it.
        keys: the number of keys, those in a cache included; None = not known.
        packed: each query sees its own document only, as far as the arguments say; `cu_seqlens` checks it.
        model: the kind of model, for messages.
        positions_are_checked, places_are_checked, history_is_checked, documents_are_checked, gaps_are_checked: whether a layer
            has done it. A mask serves all layers.

    Args:
        arguments: of transformers' mask function, from which `dense` makes the mask for softmax attention.
    """

    def __init__(
        self,
        causal: bool,
        padding: Tensor | None,
        refusal: str | None = None,
        model: str = "this model",
        keys: int | None = None,
        arguments: dict[str, Any] | None = None,
        packed: bool = False,
    ):
        self.causal = causal
        self.padding = padding
        self.refusal = refusal
        self.model = model
        self.keys = keys
        self.packed = packed
        self.positions_are_checked = False
        self.places_are_checked = False  # of the tokens of a rank
        self.history_is_checked = False
        self._hidden: tuple[Tensor, Tensor] | None = None
        self._arguments = arguments
        self._dense: tuple[Tensor | None] | None = None
        self._cu_seqlens: Tensor | None = None
        self.documents_are_checked = False
        self.gaps_are_checked = False

    def dense(self) -> Tensor | None:
        """Returns transformers' mask for "sdpa" of the same pattern, for layers that run softmax attention."""
        if self._dense is None:
            self._dense = (sdpa_mask(**self._of_transformers()),)
        return self._dense[0]

    def _of_transformers(self) -> dict[str, Any]:
        if self._arguments is None:
            raise ValueError(
                "arguments of a FastmaxMask for packed documents or layers of softmax attention must be given, got None"
            )
        return self._arguments

    def first_tokens(self, device: torch.device) -> Tensor:
        """Returns which tokens begin a document: bool (batch, queries)."""
        given = self._of_transformers()
        return first_tokens(given["mask_function"], given["batch_size"], given["q_length"], device)

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """Returns the bounds of the documents of all rows end to end, of a packed mask.

        Raises:
            ValueError: the pattern is not the causal one within these documents.
        """
        if self._cu_seqlens is None:
            first = self.first_tokens(device)
            differs = differs_from_packing(self._of_transformers()["mask_function"], first)
            refuse_where(differs, _PATTERN.format(model=self.model))
            self._cu_seqlens = bounds(first)
        return self._cu_seqlens

    def refuse_other_documents(self, cu_seqlens: Tensor) -> None:
        """Refuses documents that differ from those of the pattern, once for all layers that share the mask."""
        if not self.documents_are_checked:
            self.documents_are_checked = True
            first = self.first_tokens(cu_seqlens.device).flatten()
            named = first.new_zeros(first.shape[0] + 1).index_fill(0, cu_seqlens.long().clamp(0, first.shape[0]), True)[:-1]
            refuse_where(
                named != first,
                "cu_seq_lens_q must name the documents that position_ids do, where they start again: layers of softmax "
                "attention go by position_ids",
            )

    def refuse_packing(self, position_ids: Tensor) -> None:
        """Refuses positions that start again among tokens that take part, once for all layers that share the mask.

        transformers itself reads the positions only without a cache and without a mask.

        Args:
            position_ids: (batch or 1, queries), or (axes, batch or 1, queries) of a model whose tokens have several positions.
                Those of an image do not only grow, so there only a token at 0 on all axes begins a document.
        """
        if self.positions_are_checked or position_ids.dim() not in (2, 3) or position_ids.shape[-1] < 2:
            return
        self.positions_are_checked = True
        of_axes = position_ids.dim() == 3
        again = (position_ids[..., 1:] == 0).all(0) if of_axes else position_ids[:, 1:] <= position_ids[:, :-1]
        if self.padding is not None:
            real = self.padding[:, -position_ids.shape[-1] :].to(again.device)
            again = again & real[:, 1:] & real[:, :-1]
        refuse_where(again, PACKED)

    def hidden(self, new: int) -> tuple[Tensor, Tensor]:
        """Returns a hash of the padding of each row: of the tokens before the last `new`, and of these.

        It is a sum over the tokens that are padding, of splitmix64 of the position modulo 2**64; 0 = no padding. Hashes of two
        parts add up, so that a mask can be compared with earlier ones that are not kept.

        Returns:
            Two int64 tensors (batch,).
        """
        if self._hidden is None:
            padding: Any = self.padding  # not None, as the caller knows
            x = torch.arange(1, padding.shape[1] + 1, device=padding.device) * -0x61C8864680B583EB
            x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
            x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
            numbers = torch.where(padding, 0, x)
            before = numbers.shape[1] - new
            self._hidden = numbers[:, :before].sum(-1), numbers[:, before:].sum(-1)
        return self._hidden

    def _misuse(self, use: str) -> str:
        if self.refusal is not None:
            return self.refusal
        return (
            f'{self.model} cannot run attn_implementation="{NAME}": a part of it computes attention of its own, and used '
            f"fastmax's mask ({use}), which only fastmax can read"
        )


def refuse_where(wrong: Tensor, message: str) -> None:
    """Raises a ValueError where any element is True. A graph gets an assertion with the same message, a RuntimeError."""
    if is_tracing(wrong):
        validation.check_in_graph(~wrong.any(), message)
    elif wrong.any():
        raise ValueError(message)


GAPS = (
    "attention_mask must have padding at the ends of a sequence only, got padding between real tokens: exact_window and "
    "rpe_matrix would count it as positions. In causal layers a FastmaxCache, or kept_keys, counts real tokens only"
)
PACKED = f"{ONLY}; here position_ids start again within a row, and there is one of the two"
_PATTERN = (
    f'attn_implementation="{NAME}" takes the causal and the bidirectional mask, not that of this layer in {{model}}: sliding '
    f'windows, chunks and mask functions of the model\'s own are other functions. The option layers="{GLOBAL}" leaves such '
    "layers as they are; where all have one window, as in Mistral, sliding_window=None in the configuration takes it away"
)
_STATIC = (
    f'attn_implementation="{NAME}" needs keys that end with the last query; a static cache holds more. '
    "Use the default dynamic cache"
)


def fastmax_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    config: PreTrainedConfig | None = None,
    **kwargs: Any,
) -> FastmaxMask:
    """Makes the mask that transformers' mask interface asks for. It raises nothing: a model may make masks that no layer uses.

    Args:
        batch_size, q_length, kv_length, q_offset, kv_offset: sizes, and positions of the first query and key.
        mask_function: the pattern; fastmax runs the causal one, of packed sequences too, and the bidirectional one.
        attention_mask: bool (batch, keys), True = takes part.
        config: the model's, for messages.

    Returns:
        The mask. Its `refusal` is the error of a layer that uses it: for another pattern, keys past the last query (a static
        cache), an attention_mask of another length.
    """
    model = getattr(config, "model_type", None) or "this model"
    sizes = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
    }
    arguments = kwargs | sizes | {"mask_function": mask_function, "attention_mask": attention_mask, "config": config}
    is_known = mask_function is causal_mask_function or mask_function is bidirectional_mask_function
    packed = not is_known and may_be_packed(arguments)
    causal = packed or mask_function is causal_mask_function
    refusal = None
    if not causal and mask_function is not bidirectional_mask_function:
        refusal = _PATTERN.format(model=model)
    elif isinstance(q_offset, Tensor) or (causal and kv_offset + kv_length != q_offset + q_length):
        refusal = _STATIC
    elif attention_mask is not None and attention_mask.shape[-1] != kv_offset + kv_length:
        refusal = (
            f'attention_mask must cover all {kv_offset + kv_length} keys with attn_implementation="{NAME}", those in the cache '
            f"included, got shape {tuple(attention_mask.shape)}"
        )
    return FastmaxMask(causal, attention_mask, refusal, model, kv_offset + kv_length, arguments, packed)
