"""`SelfAttentionState`: the state of a `FastmaxSelfAttention` between calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fastmax.decoding.batch_state import BatchState
from fastmax.decoding.state import DecodeState
from fastmax.nn.kept_keys import KeptKeys
from fastmax.nn.key_value_cache import KeyValueCache


@dataclass(eq=False)
class SelfAttentionState(BatchState):
    """The state of a `FastmaxSelfAttention` after some tokens. Made by the layer's `init_state` and `forward`.

    `attention` is the state of the attention: a `DecodeState`, whose size does not depend on the number of tokens, or for
    softmax attention a `KeyValueCache`, which grows with them. `recent` (b, width - 1, channels) holds the last inputs of the
    short convolution, None without one. `positions` (b,) int64 holds the position of the next token. `kept` holds the keys of a
    layer with `kept_keys`, None in others; its size does not depend on the number of tokens either. `rotary` is the `rope_dim`
    and `rope_base` that rotated the keys, None without rotation.
    """

    attention: DecodeState | KeyValueCache
    recent: Tensor | None
    positions: Tensor
    kept: KeptKeys | None = None
    rotary: tuple[int, float] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of q, k and v."""
        return self.attention.dtype

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.positions.device

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name. The first dimension of each is the batch."""
        own = {"recent": self.recent, "positions": self.positions}
        own |= {} if self.kept is None else {f"kept_{name}": x for name, x in self.kept.tensors().items()}
        return self.attention.tensors() | {name: x for name, x in own.items() if x is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> SelfAttentionState:
        """Returns the state with `function` applied to each of its tensors."""
        recent = None if self.recent is None else function(self.recent)
        kept = None if self.kept is None else self.kept.map(function)
        return SelfAttentionState(self.attention.map(function), recent, function(self.positions), kept, self.rotary)

    @classmethod
    def _cat(cls, states: Sequence[SelfAttentionState]) -> SelfAttentionState:
        first = states[0]
        attentions: list[Any] = [state.attention for state in states]
        attention = type(first.attention).cat(attentions)
        recent = None if first.recent is None else torch.cat([state.recent for state in states])
        kept = None if first.kept is None else KeptKeys.cat([state.kept for state in states if state.kept is not None])
        return cls(attention, recent, torch.cat([state.positions for state in states]), kept, first.rotary)

    def options(self) -> dict:
        """Returns the options that states of one batch must share."""
        shape = None if self.recent is None else tuple(self.recent.shape[1:])
        heads_and_slots = None if self.kept is None else tuple(self.kept.positions.shape[1:])
        own = {"kind of attention": type(self.attention).__name__, "shape of recent": shape, "kept keys": heads_and_slots}
        return own | {"rope_dim and rope_base": self.rotary} | self.attention.options()

    def _moved(self, device: torch.device | str | int | None, dtype: torch.dtype, non_blocking: bool) -> SelfAttentionState:
        moved: dict[str, Any] = {"device": device, "non_blocking": non_blocking}
        recent = None if self.recent is None else self.recent.to(dtype=dtype, **moved)
        kept = None if self.kept is None else self.kept.to(dtype=dtype, **moved)
        attention, positions = self.attention.to(dtype=dtype, **moved), self.positions.to(**moved)
        return SelfAttentionState(attention, recent, positions, kept, self.rotary)


torch.serialization.add_safe_globals([KeyValueCache, KeptKeys, SelfAttentionState])


pytree.register_pytree_node(
    KeyValueCache,
    lambda cache: (list(cache.tensors().values()), cache.window),
    lambda tensors, window: KeyValueCache(tensors[0], tensors[1], tensors[2], tensors[3], window),
)
pytree.register_pytree_node(
    KeptKeys, lambda state: (list(state.tensors().values()), None), lambda tensors, _: KeptKeys(*tensors)
)


def _flatten(state: SelfAttentionState) -> tuple[list[Any], tuple[int, float] | None]:
    kept = [] if state.kept is None else [state.kept]
    return [state.attention, state.recent, state.positions, *kept], state.rotary


def _unflatten(children: Sequence[Any], rotary: tuple[int, float] | None) -> SelfAttentionState:
    attention, recent, positions, *kept = children
    return SelfAttentionState(attention, recent, positions, kept[0] if kept else None, rotary)


pytree.register_pytree_node(SelfAttentionState, _flatten, _unflatten)
