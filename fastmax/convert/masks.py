"""The mask of a Hugging Face teacher's layers (padding, documents of packed rows) as a mask for the converted model's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask

from fastmax.core import validation
from fastmax.integrations.transformers import FastmaxMask
from fastmax.integrations.transformers.layers import implementation


class MaskOfTeacher:
    """The mask of one batch. The first layer called makes it; layers with the same teacher's mask share it.

    Models differ in whether packed rows are packed to them (OPT's are not), so the teacher's own mask is asked.
    """

    def __init__(self, padding: Tensor | None):
        self._padding = padding
        self._made: tuple[object, FastmaxMask] | None = None

    def of(self, layer: nn.Module, own: nn.Module, args: tuple, keywords: dict) -> FastmaxMask:
        """
        Args:
            layer, own: the model's and the teacher's.
            args, keywords: what the teacher's was called with.

        Raises:
            ValueError: the teacher sees later tokens or those of other documents, or has other documents than `cu_seq_lens_q`.
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
        is_flash = "flash" in implementation(own)  # goes by the positions, or by cu_seq_lens_q
        if isinstance(given, Tensor) and given.dim() == 4:
            sees = (given if given.dtype == torch.bool else given == 0)[:, 0]
            positions = _positions_in_documents(sees, self._padding)
        elif is_flash and self._padding is None:
            positions = keywords.get("position_ids")
        mask = create_causal_mask(
            config=layer.config,
            inputs_embeds=hidden_states,
            attention_mask=self._padding,
            past_key_values=None,
            position_ids=positions,
        )
        documents = keywords.get("cu_seq_lens_q")
        if isinstance(documents, Tensor) and not is_flash:
            mask.refuse_other_documents(documents)
        return mask


def _positions_in_documents(sees: Tensor, padding: Tensor | None) -> Tensor | None:
    """(b, n), from 0 in each document, by a softmax mask (b, n, n), True = visible; None with padding, where there is one. A
    teacher with a window sees less than the model will."""
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
        sees, expected = sees[padding], expected[padding]  # rows of padding mean nothing
    if (sees & ~expected).any():
        raise ValueError("teacher must be causal, and within documents of packed rows, got a mask that shows it other tokens")
    return positions
