"""Lets `generate` make a `FastmaxCache` for models whose configuration asks for it.

`generate` has a fixed list of caches, and an attention implementation cannot add to it. So the method that makes the cache is
wrapped, and a DynamicCache that it has just made is replaced.
"""

from __future__ import annotations

import functools
from typing import Any, cast

from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedConfig

from fastmax.integrations.transformers.cache import FastmaxCache
from fastmax.integrations.transformers.cache_argument import CACHE
from fastmax.integrations.transformers.gates import has_gates
from fastmax.integrations.transformers.options import NAME, wants_constant_memory


def watch_generation() -> None:
    """Wraps the method of `generate` that makes a cache. Called on import; a second call changes nothing."""
    if hasattr(GenerationMixin._prepare_cache_for_generation, "watched_by_fastmax"):
        return
    prepare = GenerationMixin._prepare_cache_for_generation

    @functools.wraps(prepare)
    def prepare_fastmax_too(
        self: GenerationMixin, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        given = model_kwargs.get(CACHE)
        prepare(self, generation_config, model_kwargs, *args, **kwargs)
        if given is not None or generation_config.cache_implementation is not None:
            return
        made: Any = model_kwargs.get(CACHE)
        of_two = isinstance(made, EncoderDecoderCache)
        own = made.self_attention_cache if of_two else made
        if type(own) is DynamicCache and _is_default(self.config.get_text_config(decoder=True)):
            cache = FastmaxCache(self.config)
            model_kwargs[CACHE] = EncoderDecoderCache(cache, made.cross_attention_cache) if of_two else cache

    cast(Any, prepare_fastmax_too).watched_by_fastmax = True
    GenerationMixin._prepare_cache_for_generation = prepare_fastmax_too


def _is_default(config: PreTrainedConfig) -> bool:
    """Returns whether a model uses `FastmaxCache` by default: by its option, or with gates, which need it."""
    return config._attn_implementation == NAME and (wants_constant_memory(config) or has_gates(config))
