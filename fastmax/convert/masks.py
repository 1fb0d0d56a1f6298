"""Attention masks of a Hugging Face teacher (padding, packed documents), converted to masks for the model's layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask

from fastmax.core import validation
from fastmax.integrations.transformers import FastmaxMask
from fastmax.integrations.transformers.cache_argument import CACHE
from fastmax.integrations.transformers.layers import implementation


class MaskOfTeacher:
    """Mask of one batch for the model's layers. Layers whose teachers got the same mask share it.

    It follows the teacher's mask, because models differ in whether they separate packed documents (OPT does not).
    """

    def __init__(self, padding: Tensor | None):
        self._padding = padding
        self._made: tuple[object, FastmaxMask] | None = None

    def of(self, layer: nn.Module, own: nn.Module, args: tuple, keywords: dict) -> FastmaxMask:
        """Returns the mask for a layer.

        Args:
            layer, own: layers of the model and of the teacher.
            args, keywords: arguments of the teacher's layer.

        Raises:
            ValueError: the teacher sees later tokens or other documents, or separates other documents than `cu_seq_lens_q`.
        """
        given = keywords.get("attention_mask")
        if self._made is None or self._made[0] is not given:
            self._made = given, self._make(layer, own, args, keywords)
        return self._made[1]

    def _make(self, layer: nn.Module, own: nn.Module, args: tuple, keywords: dict) -> FastmaxMask:
        hidden_states = args[0] if args else keywords["hidden_states"]
        b, n = hidden_states.shape[:2]
        if self._padding is not None and self._padding.shape != (b, n):
            got = validation.describe(self._padding)
            raise ValueError(f"attention_mask of a batch must have the shape of its tokens {(b, n)}, got {got}")
        given, positions = keywords.get("attention_mask"), None
        is_flash = "flash" in implementation(own)  # separates documents by position_ids or cu_seq_lens_q, not by the mask
        if isinstance(given, Tensor) and given.dim() == 4:
            sees = (given if given.dtype == torch.bool else given == 0)[:, 0]
            positions = _positions_in_documents(sees, self._padding)
        elif is_flash and self._padding is None:
            positions = keywords.get("position_ids")
        mask = create_causal_mask(
            config=layer.config,
            inputs_embeds=hidden_states,
            attention_mask=self._padding,
            position_ids=positions,
            **{CACHE: None},
        )
        documents = keywords.get("cu_seq_lens_q")
        if isinstance(documents, Tensor) and not is_flash:
            mask.refuse_other_documents(documents)
        return mask


def _positions_in_documents(sees: Tensor, padding: Tensor | None) -> Tensor | None:
    """Returns the position of each token in its document, (b, n), or None if there is padding.

    Args:
        sees: softmax mask of the teacher, bool (b, n, n), True = visible. With a window it may hide more than the model will.
        padding: bool (b, n), True = real token, or None.

    Raises:
        ValueError: a token sees later tokens or other documents.
    """
    n = sees.shape[1]
    place = torch.arange(n, device=sees.device)
    causal = place[:, None] >= place
    if padding is None:
        begins = ~sees.diagonal(-1, 1, 2)
        starts = torch.nn.functional.pad(torch.where(begins, place[1:], 0), (1, 0)).cummax(1).values
        positions, expected = place - starts, causal & (place >= starts.unsqueeze(-1))
    else:
        padding = padding.to(sees.device)
        positions, expected = None, causal & padding[:, None]
        sees, expected = sees[padding], expected[padding]  # rows of padding are meaningless
    if (sees & ~expected).any():
        raise ValueError("teacher must be causal and must not see other documents, got a mask that shows it such tokens")
    return positions
