"""The state of softmax attention: the keys and values of all tokens seen, or of the last ones where it has a window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fastmax import eager
from fastmax.functional import flash_attention


@dataclass(eq=False)
class KeyValueCache:
    """What softmax attention needs of the tokens seen, which grows with them: `keys` and `values` (b, hk, t, d) in the dtype of
    q, k and v, `mask` bool (b, t), True = the token takes part, and its log_decay `decays` (b, hk, t), 0 without decays."""

    keys: Tensor
    values: Tensor
    mask: Tensor
    decays: Tensor

    @classmethod
    def empty(
        cls, batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str | None
    ) -> KeyValueCache:
        keys = torch.empty(batch, kv_heads, 0, head_dim, dtype=dtype, device=device)
        decays = keys.new_empty(batch, kv_heads, 0, dtype=eager.compute_dtype(dtype))
        return cls(keys, torch.empty_like(keys), keys.new_empty(batch, 0, dtype=torch.bool), decays)

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name. The first dimension of each is the batch."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def map(self, function: Callable[[Tensor], Tensor]) -> KeyValueCache:
        """The cache with `function` of each of its tensors."""
        return replace(self, **{name: function(x) for name, x in self.tensors().items()})

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> KeyValueCache:
        """On another device, or for tokens of another dtype, to which keys and values are rounded."""
        dtype = self.dtype if dtype is None else dtype
        return KeyValueCache(
            self.keys.to(device=device, dtype=dtype),
            self.values.to(device=device, dtype=dtype),
            self.mask.to(device=device),
            self.decays.to(device=device, dtype=eager.compute_dtype(dtype)),
        )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KeyValueCache,
    *,
    key_padding_mask: Tensor | None,
    log_decay: Tensor | None,
    window: int | None,
    use_custom_gradient: bool,
) -> tuple[Tensor, KeyValueCache]:
    """Output of n tokens (b, h, n, d), each of which sees those of the cache and those up to itself; the cache with them."""
    (b, hk, n, _), decays = k.shape, log_decay
    if key_padding_mask is None:
        key_padding_mask = cache.mask.new_ones(b, n)
    if decays is None:
        decays = cache.decays.new_zeros(b, hk, n)
    keys, values = torch.cat([cache.keys, k], dim=2), torch.cat([cache.values, v], dim=2)
    mask = torch.cat([cache.mask, key_padding_mask], dim=1)
    decays = torch.cat([cache.decays, decays.to(cache.decays.dtype)], dim=2)
    o = flash_attention(
        q,
        keys,
        values,
        causal=True,
        key_padding_mask=mask,
        log_decay=None if log_decay is None else decays,
        window=window,
        use_custom_gradient=use_custom_gradient,
    )
    first = 0 if window is None else max(0, keys.shape[2] - window + 1)  # the next token is itself one of the window's
    kept = keys[:, :, first:], values[:, :, first:], mask[:, first:], decays[:, :, first:]
    return o, KeyValueCache(*(x.contiguous() for x in kept))
