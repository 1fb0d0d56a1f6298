"""`KeyValueCache`: the state of softmax attention, the keys and values of earlier tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmax import eager
from fastmax.functional import flash_attention
from fastmax.prepare.padding import PackedPlaces, taken

_TOKEN_DIMENSIONS = {"keys": 2, "values": 2, "mask": 1, "decays": 2}
_LEAST_CAPACITY = 16
_taking = Lock()  # threads may append to one cache at the same time


@dataclass(eq=False)
class Memory:
    """Preallocated tensors for the tokens of a cache and of caches that extend it, and the number of tokens in use."""

    tensors: dict[str, Tensor]
    taken: int

    @classmethod
    def of(cls, cache: KeyValueCache, capacity: int, more: int) -> Memory:
        """Returns memory for `capacity` tokens that starts with the tokens of the cache; `more` tokens after them are taken."""
        tensors, tokens = {}, cache.keys.shape[2]
        for name, x in cache.tensors().items():
            shape = list(x.shape)
            shape[_TOKEN_DIMENSIONS[name]] = capacity
            tensors[name] = x.new_empty(shape)
            tensors[name].narrow(_TOKEN_DIMENSIONS[name], 0, tokens).copy_(x)
        return cls(tensors, tokens + more)

    @property
    def capacity(self) -> int:
        """Number of tokens that fit."""
        return self.tensors["keys"].shape[2]

    def slice(self, first: int, stop: int, window: int | None) -> KeyValueCache:
        """Returns the cache of tokens `first` to `stop - 1`, as views of this memory."""
        of_tokens = {name: x.narrow(_TOKEN_DIMENSIONS[name], first, stop - first) for name, x in self.tensors.items()}
        return KeyValueCache(**of_tokens, window=window, memory=self, stop=stop)

    def take(self, stop: int, tokens: int) -> bool:
        """Reserves the positions from `stop` on for `tokens` tokens. Returns whether they may be written.

        They may not if another cache has reserved them, if they exceed the capacity, or if the memory was allocated in
        inference mode, which has ended.
        """
        if not torch.is_inference_mode_enabled() and self.tensors["keys"].is_inference():
            return False
        with _taking:
            is_free = self.taken == stop and stop + tokens <= self.capacity
            if is_free:
                self.taken += tokens
        return is_free


@dataclass(eq=False)
class KeyValueCache:
    """Keys and values of t earlier tokens, for softmax attention. It grows with the tokens.

    `keys` (b, hk, t, d) and `values` (b, hk, t, dv) have the dtype of q, k and v. `mask` is bool (b, t), True = real token.
    `decays` (b, hk, t) is log_decay, 0 without decays. With a `window`, the real tokens of each row are its last `window - 1`.

    The tensors may be views of a `memory` with room for more tokens, which are written from position `stop` on. This does not
    modify the cache, whose tokens are those before `stop`.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor
    decays: Tensor
    window: int | None = None
    memory: Memory | None = None
    stop: int = 0

    @classmethod
    def empty(
        cls,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
        window: int | None = None,
    ) -> KeyValueCache:
        keys = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        decays = keys.new_empty(batch, kv_heads, 0, dtype=eager.compute_dtype(dtype))
        values, mask = keys.new_empty(batch, kv_heads, 0, value_dim), keys.new_empty(batch, 0, dtype=torch.bool)
        return cls(keys, values, mask, decays, window)

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name. The first dimension of each is the batch."""
        return {name: getattr(self, name) for name in _TOKEN_DIMENSIONS}

    def map(self, function: Callable[[Tensor], Tensor]) -> KeyValueCache:
        """Returns the cache with `function` applied to each of its tensors. It shares no memory with other caches."""
        return KeyValueCache(**{name: function(x) for name, x in self.tensors().items()}, window=self.window)

    def to(self, device: torch.device | str | int | None, dtype: torch.dtype, non_blocking: bool) -> KeyValueCache:
        """Returns the cache on another device (None: its own), with keys and values converted to `dtype`."""
        moved = {"device": device, "non_blocking": non_blocking}
        return KeyValueCache(
            self.keys.to(dtype=dtype, **moved),
            self.values.to(dtype=dtype, **moved),
            self.mask.to(**moved),
            self.decays.to(dtype=eager.compute_dtype(dtype), **moved),
            self.window,
        )

    def options(self) -> dict:
        """Returns the options that caches of one batch must share."""
        sizes = {"key/value heads": self.keys.shape[1], "head_dim": self.keys.shape[3], "value_dim": self.values.shape[3]}
        return sizes | {"window": self.window}

    @classmethod
    def cat(cls, caches: list[KeyValueCache]) -> KeyValueCache:
        """Concatenates caches along the batch. Shorter ones are padded on the left with masked tokens."""
        longest = max(cache.keys.shape[2] for cache in caches)
        caches = [cache.with_padding(longest - cache.keys.shape[2]) for cache in caches]
        tensors = (torch.cat(x) for x in zip(*(cache.tensors().values() for cache in caches), strict=True))
        return cls(*tensors, window=caches[0].window)  # type: ignore[misc]

    def with_padding(self, tokens: int) -> KeyValueCache:
        """Returns the cache with this number of masked tokens added on the left."""
        return self.map(lambda x: F.pad(x, (0, 0, tokens, 0) if x.dim() == 4 else (tokens, 0)))

    def and_then(self, new: KeyValueCache) -> KeyValueCache:
        """Returns the cache with new tokens appended.

        They are written to the memory of this cache if it has room, else to new memory of twice the size. If autograd or a
        compiler records, tensors are concatenated.
        """
        given = (*self.tensors().values(), *new.tensors().values())
        if torch.compiler.is_compiling() or eager.differentiating(*given):
            of_both = zip(self.tensors().items(), new.tensors().values(), strict=True)
            tensors = {name: torch.cat([x, y], _TOKEN_DIMENSIONS[name]) for (name, x), y in of_both}
            return KeyValueCache(**tensors, window=self.window)
        tokens, more = self.keys.shape[2], new.keys.shape[2]
        memory, stop = self.memory, self.stop
        if memory is None or not memory.take(stop, more):
            memory, stop = Memory.of(self, max(2 * tokens, tokens + more, _LEAST_CAPACITY), more), tokens
        for name, x in new.tensors().items():
            memory.tensors[name].narrow(_TOKEN_DIMENSIONS[name], stop, more).copy_(x)
        return memory.slice(stop - tokens, stop + more, self.window)

    def without_memory(self) -> KeyValueCache:
        """Returns the cache without its memory, so that appended tokens are written elsewhere."""
        return self.map(lambda x: x)

    def last(self, tokens: int) -> KeyValueCache:
        """Returns the cache of the last tokens, at most `tokens`."""
        first = max(0, self.keys.shape[2] - tokens)
        if self.memory is not None and self.memory.capacity <= max(2 * tokens, _LEAST_CAPACITY):
            return self.memory.slice(self.stop - self.keys.shape[2] + first, self.stop, self.window)
        tensors = {
            name: x.narrow(_TOKEN_DIMENSIONS[name], first, self.keys.shape[2] - first).contiguous()
            for name, x in self.tensors().items()
        }
        return KeyValueCache(**tensors, window=self.window)

    def last_before(self, stop: Tensor, tokens: int) -> KeyValueCache:
        """Returns the cache of at most `tokens` tokens before `stop` (b,) of each row. Rows with fewer have masked tokens."""
        tokens = min(tokens, self.keys.shape[2])
        padded = self.with_padding(tokens)  # in it, the last tokens before `stop` begin at index `stop`
        tensors = {name: taken(x, stop, tokens, _TOKEN_DIMENSIONS[name]) for name, x in padded.tensors().items()}
        return KeyValueCache(**tensors, window=self.window)

    def __getstate__(self) -> dict:
        """Returns copies of views, because `torch.save` would write their whole memory."""
        tensors = {name: x if self.memory is None else x.clone() for name, x in self.tensors().items()}
        return tensors | {"window": self.window}

    def __setstate__(self, saved: dict) -> None:
        self.__init__(**saved)  # type: ignore[misc]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KeyValueCache,
    *,
    count: Tensor | None = None,
    log_decay: Tensor | None,
    use_custom_gradient: bool,
) -> tuple[Tensor, KeyValueCache]:
    """Causal softmax attention of n new tokens to the tokens of the cache and themselves.

    Args:
        q, k, v: (b, h, n, d), (b, hk, n, d), (b, hk, n, d).
        count: (b,), number of real tokens of each row, which come first. None: all.
        log_decay: (b, hk, n), or None.

    Returns:
        o (b, h, n, d), and the cache with the new tokens.
    """
    b, hk, n, _ = k.shape
    mask = cache.mask.new_ones(b, n) if count is None else torch.arange(n, device=k.device) < count.unsqueeze(-1)
    decays = cache.decays.new_zeros(b, hk, n) if log_decay is None else log_decay.to(cache.decays.dtype)
    before, recorded = cache.keys.shape[2], eager.differentiating(q)
    cache = cache.without_memory() if recorded else cache  # appended tokens must not change what a backward saved
    cache = cache.and_then(KeyValueCache(k, v, mask, decays))
    o = flash_attention(
        q,
        cache.keys,
        cache.values,
        causal=True,
        attention_mask=cache.mask,
        log_decay=None if log_decay is None else cache.decays,
        window=cache.window,
        use_custom_gradient=use_custom_gradient,
    )
    cache = cache.without_memory() if recorded else cache
    if cache.window is None:
        return o, cache
    kept = cache.window - 1  # the window includes the next token itself
    return o, cache.last(kept) if count is None else cache.last_before(before + count, kept)


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache, packed: PackedPlaces, *, log_decay: Tensor | None, **options: Any
) -> tuple[Tensor, KeyValueCache]:
    """`attend` for packed sequences, with one batch entry of the cache per sequence. Sequences are padded to the longest."""
    n = q.shape[2]
    if n == 0:
        return q, cache.map(torch.clone)
    q, k, v, log_decay = packed.rows(q, k, v, log_decay)
    if log_decay is not None:  # no decay at padding
        there = torch.arange(log_decay.shape[2], device=log_decay.device) < packed.count.unsqueeze(-1)
        log_decay = torch.where(there.unsqueeze(1), log_decay, 0.0)
    o, cache = attend(q, k, v, cache, count=packed.count, log_decay=log_decay, **options)
    return packed.packed(o), cache
