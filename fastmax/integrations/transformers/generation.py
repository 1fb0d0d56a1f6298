"""Lets `generate` make a `FastmaxCache` for models whose configuration asks for it, and refuses continuous batching.

`generate` has a fixed list of caches, and an attention implementation cannot add to it. So the method that makes the cache is
wrapped, and a DynamicCache that it has just made is replaced. `generate_batch` sets a model to FlashAttention where that is
installed. So the method that starts it is wrapped too.
"""

from __future__ import annotations

import functools
from typing import Any, cast

from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedConfig

from fastmax.integrations.transformers.cache import FastmaxCache
from fastmax.integrations.transformers.cache_argument import CACHE
from fastmax.integrations.transformers.gates import has_gates
from fastmax.integrations.transformers.options import NAME, configurations, wants_constant_memory


def watch_generation() -> None:
    """Wraps the methods that make a cache and start continuous batching. Called on import; a second call changes nothing."""
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
            if getattr(generation_config, "is_assistant", False):
                raise ValueError(_assistant(self))
            cache = FastmaxCache(self.config)
            model_kwargs[CACHE] = EncoderDecoderCache(cache, made.cross_attention_cache) if of_two else cache

    cast(Any, prepare_fastmax_too).watched_by_fastmax = True
    GenerationMixin._prepare_cache_for_generation = prepare_fastmax_too
    start: Any = getattr(GenerationMixin, "init_continuous_batching", None)
    if start is not None:

        @functools.wraps(start)
        def refuse_fastmax(self: GenerationMixin, *args: Any, **kwargs: Any) -> Any:
            if any(config._attn_implementation == NAME for config in configurations(cast(Any, self))):
                raise ValueError(
                    f'attn_implementation="{NAME}" of {type(self).__name__} has no form in continuous batching '
                    "(generate_batch), whose paged cache is for softmax attention: use generate, or set another attention"
                )
            return start(self, *args, **kwargs)

        cast(Any, GenerationMixin).init_continuous_batching = refuse_fastmax


def _is_default(config: PreTrainedConfig) -> bool:
    """Returns whether a model uses `FastmaxCache` by default: by its option, or with gates, which need it."""
    return config._attn_implementation == NAME and (wants_constant_memory(config) or has_gates(config))


def _assistant(model: GenerationMixin) -> str:
    """Returns the message that refuses a model as an assistant, whose tokens are taken back."""
    config = model.config.get_text_config(decoder=True)
    what = "learned gates" if has_gates(config) else "the option constant_memory=True"
    instead = "a model without gates" if has_gates(config) else "configure it without constant_memory"
    return (
        "assistant_model must have a cache that can forget tokens, whatever cache the main model has, got a "
        f"{type(model).__name__} whose own configuration asks for a FastmaxCache by {what}: {instead}"
    )
