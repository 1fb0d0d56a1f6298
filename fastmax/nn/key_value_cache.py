"""The state of softmax attention: the keys and values of all tokens seen, or of the last ones where it has a window."""

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
_taking = Lock()  # threads may continue one cache at the same time


@dataclass(eq=False)
class Memory:
    """Tensors of a cache with places for more tokens, and how many places are taken. Caches that continue each other share
    one."""

    tensors: dict[str, Tensor]
    taken: int

    @classmethod
    def of(cls, cache: KeyValueCache, capacity: int, more: int) -> Memory:
        """With the tokens of the cache first, and so many places taken behind them."""
        tensors, tokens = {}, cache.keys.shape[2]
        for name, x in cache.tensors().items():
            shape = list(x.shape)
            shape[_TOKEN_DIMENSIONS[name]] = capacity
            tensors[name] = x.new_empty(shape)
            tensors[name].narrow(_TOKEN_DIMENSIONS[name], 0, tokens).copy_(x)
        return cls(tensors, tokens + more)

    @property
    def capacity(self) -> int:
        """In tokens."""
        return self.tensors["keys"].shape[2]

    def slice(self, first: int, stop: int, window: int | None) -> KeyValueCache:
        """The cache of these tokens, on this memory."""
        of_tokens = {name: x.narrow(_TOKEN_DIMENSIONS[name], first, stop - first) for name, x in self.tensors.items()}
        return KeyValueCache(**of_tokens, window=window, memory=self, stop=stop)

    def take(self, stop: int, tokens: int) -> bool:
        """Takes the places of so many tokens behind `stop`. Returns False, and takes none, where they may not be written:
        another continuation has taken them, they are not there, or inference mode, which made them, has ended."""
        if not torch.is_inference_mode_enabled() and self.tensors["keys"].is_inference():
            return False
        with _taking:
            is_free = self.taken == stop and stop + tokens <= self.capacity
            if is_free:
                self.taken += tokens
        return is_free


@dataclass(eq=False)
class KeyValueCache:
    """What softmax attention needs of the tokens seen, which grows with them: `keys` and `values` (b, hk, t, d) in the dtype of
    q, k and v, `mask` bool (b, t), True = the token takes part, and its log_decay `decays` (b, hk, t), 0 without decays.

    The tensors may be views of a `memory` with places for more, where the next tokens are written behind `stop`. A cache is not
    modified by it, since they lie behind its own. With a `window` the tokens of each row that take part are its last
    `window - 1`; it is fixed for the cache, which does not have the tokens of a wider one.
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
        dtype: torch.dtype,
        device: torch.device | str | None,
        window: int | None = None,
    ) -> KeyValueCache:
        keys = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        decays = keys.new_empty(batch, kv_heads, 0, dtype=eager.compute_dtype(dtype))
        return cls(keys, torch.empty_like(keys), keys.new_empty(batch, 0, dtype=torch.bool), decays, window)

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name. The first dimension of each is the batch."""
        return {name: getattr(self, name) for name in _TOKEN_DIMENSIONS}

    def map(self, function: Callable[[Tensor], Tensor]) -> KeyValueCache:
        """The cache with `function` of each of its tensors."""
        return KeyValueCache(**{name: function(x) for name, x in self.tensors().items()}, window=self.window)

    def to(self, device: torch.device | str | int | None, dtype: torch.dtype, non_blocking: bool) -> KeyValueCache:
        """Returns the cache on a device, None being its own, for tokens of a dtype, to which keys and values are rounded."""
        moved = {"device": device, "non_blocking": non_blocking}
        return KeyValueCache(
            self.keys.to(dtype=dtype, **moved),
            self.values.to(dtype=dtype, **moved),
            self.mask.to(**moved),
            self.decays.to(dtype=eager.compute_dtype(dtype), **moved),
            self.window,
        )

    def options(self) -> dict:
        """The options that caches of one batch share."""
        return {"key/value heads": self.keys.shape[1], "head_dim": self.keys.shape[3], "window": self.window}

    @classmethod
    def cat(cls, caches: list[KeyValueCache]) -> KeyValueCache:
        """Along the batch; shorter ones have masked tokens on the left."""
        longest = max(cache.keys.shape[2] for cache in caches)
        caches = [cache.with_padding(longest - cache.keys.shape[2]) for cache in caches]
        tensors = (torch.cat(x) for x in zip(*(cache.tensors().values() for cache in caches), strict=True))
        return cls(*tensors, window=caches[0].window)  # type: ignore[misc]

    def with_padding(self, tokens: int) -> KeyValueCache:
        """With so many masked tokens on the left."""
        return self.map(lambda x: F.pad(x, (0, 0, tokens, 0) if x.dim() == 4 else (tokens, 0)))

    def and_then(self, new: KeyValueCache) -> KeyValueCache:
        """Returns the cache of these tokens and then those. They share memory where it has room; else it is made anew, of twice
        the size, and where autograd or a compiler records, of their size."""
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
        """The cache whose next tokens are written elsewhere."""
        return self.map(lambda x: x)

    def last(self, tokens: int) -> KeyValueCache:
        """The last ones, at most so many."""
        first = max(0, self.keys.shape[2] - tokens)
        if self.memory is not None and self.memory.capacity <= max(2 * tokens, _LEAST_CAPACITY):
            return self.memory.slice(self.stop - self.keys.shape[2] + first, self.stop, self.window)
        tensors = {
            name: x.narrow(_TOKEN_DIMENSIONS[name], first, self.keys.shape[2] - first).contiguous()
            for name, x in self.tensors().items()
        }
        return KeyValueCache(**tensors, window=self.window)

    def last_before(self, stop: Tensor, tokens: int) -> KeyValueCache:
        """The last ones before `stop` (b,) of each row, at most so many; masked where a row has fewer."""
        tokens = min(tokens, self.keys.shape[2])
        padded = self.with_padding(tokens)  # `stop` counts without it: the last are from there on
        tensors = {name: taken(x, stop, tokens, _TOKEN_DIMENSIONS[name]) for name, x in padded.tensors().items()}
        return KeyValueCache(**tensors, window=self.window)

    def __getstate__(self) -> dict:
        """Returns copies of these tokens alone, since `torch.save` would write all of their memory."""
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
    """Output of n tokens (b, h, n, d), each of which sees those of the cache and those up to itself; the cache with them.
    With a `count`, (b,), only so many tokens of a row are there, the first ones."""
    b, hk, n, _ = k.shape
    mask = cache.mask.new_ones(b, n) if count is None else torch.arange(n, device=k.device) < count.unsqueeze(-1)
    decays = cache.decays.new_zeros(b, hk, n) if log_decay is None else log_decay.to(cache.decays.dtype)
    before, recorded = cache.keys.shape[2], eager.differentiating(q)
    cache = cache.without_memory() if recorded else cache  # nothing writes to what a backward needs
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
    kept = cache.window - 1  # the next token is itself one of the window's
    return o, cache.last(kept) if count is None else cache.last_before(before + count, kept)


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache, packed: PackedPlaces, *, log_decay: Tensor | None, **options: Any
) -> tuple[Tensor, KeyValueCache]:
    """`attend` of packed sequences, each of which continues from a batch entry of the cache: as rows, padded to the longest."""
    n = q.shape[2]
    if n == 0:
        return q, cache.map(torch.clone)
    longest = max(1, int(packed.count.max()))
    token = (packed.begin.unsqueeze(-1) + torch.arange(longest, device=q.device)).clamp(0, n - 1)  # (s, longest)
    q, k, v, log_decay = (None if x is None else x[0][:, token].transpose(0, 1) for x in (q, k, v, log_decay))
    if log_decay is not None:  # what fills the rows up makes nothing fade
        there = torch.arange(longest, device=q.device) < packed.count.unsqueeze(-1)
        log_decay = torch.where(there.unsqueeze(1), log_decay, 0.0)
    o, cache = attend(q, k, v, cache, count=packed.count, log_decay=log_decay, **options)
    o = o[packed.sequence, :, packed.place.clamp(0, longest - 1)]  # (n, h, d)
    return o.transpose(0, 1).unsqueeze(0), cache
