"""A cache of constant size for `generate`: the states of recurrent fastmax attention in place of keys and values.

transformers' layers pass new keys and values to the cache, and pass what it returns to the attention function. A state holds no
keys and values to return. So `update` returns objects that only `fastmax_attention_forward` can read. That function has the
queries, the mask and the options too, and adds the tokens to the state. Any other use of the objects raises an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from fastmax import ops
from fastmax.core import validation
from fastmax.decoding import DecodeState, init_state, prefill, step, step_
from fastmax.decoding.parallel_prefill import prefill_with_lse
from fastmax.decoding.recurrent_step import step_with_lse, step_with_lse_
from fastmax.integrations.transformers.masks import FastmaxMask, refuse_where
from fastmax.integrations.transformers.options import GLOBAL, NAME, all_options, check_values, fastmax_layers
from fastmax.integrations.transformers.unreadable import Unreadable
from fastmax.nn.kept_keys import KeptKeys, KeptOptions, LayerTokens, included_after
from fastmax.prepare.padding import RealFirst

FLUSH_INTERVAL = 32  # tokens that a state of CUDA kernels buffers: most steps then only read it (docs/cuda.md)
_NOT_OF_A_STATE = {"dropout", "algorithm", "use_custom_gradient"}  # they do not change what a state holds
_KEPT = ("keys", "values", "conv_states", "recurrent_states")  # attributes of transformers' layers: tensors, or dicts of them
_GOES_FORWARD = (
    "FastmaxCache cannot forget tokens: its sums hold no single one. Decoding that takes tokens back (assisted, prompt lookup, "
    'contrastive search) needs transformers\' DynamicCache (cache_implementation="dynamic")'
)


class NewTokens(Unreadable):
    """Keys or values that are to join the state of a layer. `FastmaxLayer.update` returns them, and only fastmax reads them."""

    def __init__(self, layer: FastmaxLayer | None, tensor: Tensor | None):
        self.layer = layer
        self.tensor = tensor

    def take(self, values: NewTokens) -> FastmaxLayer:
        """Returns the layer whose state these keys and values are to join.

        Raises:
            ValueError: no layer expects these keys with these values.
        """
        waiting = None if self.layer is None else self.layer.pending
        if waiting is None or waiting[0] is not self or waiting[1] is not values:
            raise ValueError(
                "FastmaxCache takes the keys and values of each call once, into the state of one layer, in the order of the "
                "calls: layers that share keys and values, or read those of the cache, and recomputation (gradient "
                "checkpointing) need transformers' DynamicCache"
            )
        return self.layer

    def _misuse(self, use: str) -> str:
        return (
            f"FastmaxCache holds no keys and values, and they were used ({use}) by what is not "
            f'attn_implementation="{NAME}": a model whose layers compute on cached keys, or run another attention, needs '
            "transformers' DynamicCache"
        )


class FastmaxLayer(CacheLayerMixin):
    """A layer of the cache with a `DecodeState`, which the first call makes from its options."""

    is_compileable = False  # the state advances in Python
    is_croppable = False
    is_sliding = False
    supports_early_init = False  # only the attention function knows the options

    def __init__(self, **kwargs: Any):
        super().__init__()
        self.keys = self.values = NewTokens(None, None)
        self._clear()

    def _clear(self) -> None:
        self.state: DecodeState | None = None
        self.kept: tuple[KeptKeys, Tensor] | None = None  # kept keys and the number of real tokens (b,); None: not an option
        self.hidden: Tensor | None = None  # FastmaxMask.hidden of the tokens seen, on the state's device; None = no padding
        self.options: dict = {}
        self.pending: tuple[NewTokens, NewTokens] | None = None
        self.offloads = False
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("a layer of FastmaxCache is initialised by the first call of its attention")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[NewTokens, NewTokens]:
        """Takes new tokens, which join the state in `attend`.

        Raises:
            ValueError: tokens of an earlier call have not joined.
        """
        if self.pending is not None:
            raise ValueError(
                "FastmaxCache was given new keys and values before those of an earlier call came to fastmax's attention, "
                "which may have failed: make a new cache, or reset() this one"
            )
        self.pending = NewTokens(self, key_states), NewTokens(self, value_states)
        return self.pending

    def attend(
        self,
        query: Tensor,
        mask: FastmaxMask,
        options: dict,
        log_decay: Tensor | None = None,
        log_input_gate: Tensor | None = None,
    ) -> Tensor:
        """Computes attention of the tokens of the last `update` to themselves and all earlier ones; they join the state.

        Args:
            query: (b, h, n, d).
            mask: its last n keys are the new tokens.
            options: of `fastmax_attention`, with `temperature`.
            log_decay, log_input_gate: (b, hk, n), of the new tokens.

        Returns:
            (b, h, n, dv).

        Raises:
            ValueError: a call that is not causal self-attention of these tokens, or other options or padding than in earlier
                calls.
        """
        key, value = (tokens.tensor for tokens in self.pending)
        n = query.shape[2]
        self._check(query.shape[0], n, mask, options)
        self.prefetch()
        padding = self._padding_of_new(n, mask, query.device)
        if self.state is None:
            self._start(query, key, value, options)
        given = {"attention_mask": padding, "log_decay": log_decay, "log_input_gate": log_input_gate}
        if self.kept is not None:
            o = self._attend_with_kept_keys(LayerTokens(query, key, value, log_input_gate, log_decay), padding, options)
        elif n == 1 and _can_overwrite(self.state):
            o = step_(query, key, value, self.state, **given)
        else:
            attend = step if n == 1 else prefill
            o, self.state = attend(query, key, value, self.state, **given)
        self.pending = None
        if self.offloads:
            self._move(torch.device("cpu"))
        return o

    def _attend_with_kept_keys(self, tokens: LayerTokens, padding: Tensor | None, options: dict) -> Tensor:
        """Computes attention of new tokens, kept keys included; the tokens join the states."""
        kept, positions = self.kept
        n, count = tokens.q.shape[2], None
        in_place = n == 1 and _can_overwrite(self.state)
        order = None if padding is None or n == 1 else RealFirst.of(padding)
        if order is not None:
            tokens, count = tokens.map(lambda x: order.first(x, 2)), order.count
        elif padding is not None:
            count = padding.sum(1)
        q, k, v, gate, log_decay = tokens
        of_keys = {"log_decay": log_decay, "log_input_gate": gate}
        if in_place:
            o, lse = step_with_lse_(q, k, v, self.state, attention_mask=padding, **of_keys)
        elif n == 1:
            o, lse, self.state = step_with_lse(q, k, v, self.state, attention_mask=padding, **of_keys)
        else:
            o, lse, self.state = prefill_with_lse(q, k, v, self.state, order, **of_keys)
        given = kept, positions, count, kept_options(options["kept_keys"], options)
        o, kept = included_after(o, lse, tokens, *given, in_place=in_place)
        self.kept = kept, positions + (n if count is None else count)
        return o if order is None else order.back(o, 2)

    def number_of_keys(self) -> int:
        """Returns the number of keys that the last new token sees, itself included."""
        return self.get_seq_length() + self.pending[0].tensor.shape[2]

    def _check(self, batch: int, n: int, mask: FastmaxMask, options: dict) -> None:
        if not mask.causal:
            raise ValueError(
                "FastmaxCache is for causal self-attention, and this layer sees all keys. In an encoder-decoder model pass "
                "EncoderDecoderCache(FastmaxCache(config), DynamicCache())"
            )
        keys = self.number_of_keys()
        seen = self.get_seq_length()
        if keys != seen + n:
            raise ValueError(f"FastmaxCache takes as many new keys as queries, got {keys - seen} and {n}")
        if mask.keys is not None and mask.keys != keys:
            raise ValueError(
                f"layers of this FastmaxCache have seen different numbers of tokens ({seen}, where the first has seen "
                f"{mask.keys - n}), since an earlier call failed: make a new cache, or reset() this one"
            )
        if self.state is not None and self.state.kv_state.shape[0] != batch:
            raise ValueError(
                f"FastmaxCache holds states for a batch of {self.state.kv_state.shape[0]}, got one of {batch}; "
                "cache.batch_repeat_interleave(repeats) makes several of each"
            )
        validation.check_algorithm(options.get("algorithm", "auto"), None)
        validation.check_bool("use_custom_gradient", options.get("use_custom_gradient", True))
        if dropout := validation.check_not_negative("dropout", options.get("dropout", 0.0)):
            raise ValueError(f"dropout must be 0 with a FastmaxCache, got {dropout}: model.eval(), or use_cache=False")
        _refuse_quadratic(options)
        if options.get("use_custom_gradient") is False and torch.is_grad_enabled():
            raise ValueError("FastmaxCache has no form with use_custom_gradient=False: torch.no_grad(), or use_cache=False")
        options = _of_state(options)
        if self.state is not None and options != self.options:
            raise ValueError(f"the state in FastmaxCache was made with the options {self.options}, got {options}")

    def _padding_of_new(self, n: int, mask: FastmaxMask, device: torch.device) -> Tensor | None:
        """Returns which new tokens join the state, (b, n); None = all. Refuses another padding of earlier tokens."""
        if mask.padding is None and self.hidden is None:
            return None
        if mask.padding is None:
            before, new = torch.zeros_like(self.hidden), 0
        else:
            before, new = (x.to(device) for x in mask.hidden(n))
        hidden = torch.zeros_like(before) if self.hidden is None else self.hidden
        if not mask.history_is_checked:  # once for all layers that share the mask
            refuse_where(
                before != hidden,
                "attention_mask differs from that of earlier calls in tokens that the FastmaxCache has seen: those that were "
                "padding then are not in its state, and the others cannot leave it. Pass the mask of all tokens from the first "
                "call on",
            )
            mask.history_is_checked = True
        self.hidden = hidden + new
        return None if mask.padding is None else mask.padding[:, mask.padding.shape[1] - n :].to(device)

    def _start(self, query: Tensor, key: Tensor, value: Tensor, options: dict) -> None:
        dtype = query.dtype
        if dtype != torch.float64 and ops.in_autocast(query):
            dtype = torch.get_autocast_dtype(query.device.type)
        self.options = _of_state(options)
        batch, kv_heads, _, head_dim = key.shape
        sizes = batch, kv_heads, head_dim, value.shape[3]
        options = {name: value for name, value in self.options.items() if name != "log_decay"}  # each call brings its own
        kept = options.pop("kept_keys", 0)
        flush_interval = flush_interval_of(query, options.get("p", 2))
        self.state = init_state(*sizes, dtype=dtype, device=query.device, flush_interval=flush_interval, **options)
        if kept > 0:
            keys = KeptKeys.empty(*sizes, dtype, query.device, kept, options["exact_window"])
            self.kept = keys, torch.zeros(batch, dtype=torch.int64, device=query.device)
        self.device = query.device
        self.is_initialized = True

    @property
    def nbytes(self) -> int:
        """Bytes of the state, kept keys included."""
        kept = 0 if self.kept is None else sum(x.nbytes for x in self.kept)
        return kept if self.state is None else kept + self.state.nbytes

    def get_seq_length(self) -> int:
        """Returns the number of tokens seen, padding included."""
        return 0 if self.state is None else self.state.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of keys that the mask covers, and the index of the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.4

    def reset(self) -> None:
        self._clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(indices)
            if self.kept is not None:
                self.kept = self.kept[0].select(indices), self.kept[1][indices.to(self.kept[1].device)]
            self.hidden = None if self.hidden is None else self.hidden[indices.to(self.hidden.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.repeat(repeats)
            if self.kept is not None:
                self.kept = self.kept[0].repeat(repeats), self.kept[1].repeat_interleave(repeats)
            self.hidden = None if self.hidden is None else self.hidden.repeat_interleave(repeats)

    def offload(self) -> None:
        """Moves the state to the CPU; where new tokens are to join it, after they have joined."""
        self.offloads = True
        if self.pending is None:
            self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        if self.state is not None:
            self._move(self.device)

    def _move(self, device: torch.device) -> None:
        # Not non_blocking: the cache prefetches on a stream of its own, for which selecting from the batch does not wait.
        if self.state is not None and self.state.device != device:
            self.state = self.state.to(device)
            self.kept = None if self.kept is None else tuple(x.to(device) for x in self.kept)
            self.hidden = None if self.hidden is None else self.hidden.to(device)


class FastmaxCache(Cache):
    """The cache of a causal model that runs fastmax. Its size does not depend on the number of tokens.

    Layers that do not run fastmax keep keys and values as in transformers' DynamicCache, sliding ones those of their window.

        model.generate(**inputs, past_key_values=FastmaxCache(model.config))  # transformers 5.24 and newer: cache=...

    Padding is read from the `attention_mask` of all tokens, from the first call on; padding never joins a state. `crop` is
    refused, and with it assisted decoding. `copy.deepcopy` makes an independent cache.

    Args:
        config: the model's; of a composite model that of its text part is used.
        offloading: keep states on the CPU, except those of the layer that runs and the next, as transformers' caches do.

    Raises:
        TypeError: `config` is not a configuration, or `offloading` not a bool.
        ValueError: a configuration of another attention, options that a state does not support, or fastmax in layers that are
            not full attention.
    """

    def __init__(self, config: PreTrainedConfig, offloading: bool = False):
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be a model's configuration (model.config), got {type(config).__name__}")
        validation.check_bool("offloading", offloading)
        config = config.get_text_config(decoder=True)
        if config._attn_implementation != NAME:
            raise ValueError(
                f'config must be of a model with attn_implementation="{NAME}", got {config._attn_implementation!r} in '
                f"{config.model_type}: set it first"
            )
        options = all_options(config)
        check_values(**options)
        _refuse_quadratic(options)
        refuse_sequence(options)
        indices = range(config.num_hidden_layers)
        ours = fastmax_layers(config)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(indices)
        other = sorted({kinds[index] for index in (indices if ours is None else ours)} - {"full_attention"})
        if other:
            raise ValueError(
                f"config.layer_types must be full_attention in all layers that run {NAME}, got {', '.join(other)} too in "
                f'{config.model_type}: the option layers="{GLOBAL}" leaves them as they are'
            )
        others = [] if ours is None else DynamicCache(config=config).layers
        if others and len(others) != len(indices):
            raise ValueError(f"{config.model_type} shares keys and values between layers, for which there is no FastmaxCache")
        layers = [FastmaxLayer() if ours is None or index in ours else others[index] for index in indices]
        super().__init__(layers=layers, offloading=offloading)

    @property
    def nbytes(self) -> int:
        """Bytes of the states, and of the tensors that other layers keep."""
        states = sum(layer.nbytes for layer in self.layers if isinstance(layer, FastmaxLayer))
        others = [layer for layer in self.layers if not isinstance(layer, FastmaxLayer)]
        kept = pytree.tree_leaves([getattr(layer, name, None) for layer in others for name in _KEPT])
        return states + sum(x.nbytes for x in kept if isinstance(x, Tensor))

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(_GOES_FORWARD)  # before any other layer is cropped

    def activate_past_recording(self) -> None:
        """Refuses assisted decoding, which calls this first."""
        raise ValueError(_GOES_FORWARD)


def _refuse_quadratic(options: dict) -> None:
    if options.get("algorithm") == "quadratic":
        raise ValueError('FastmaxCache has no form with algorithm="quadratic": "auto" or "linear", or use_cache=False')


def refuse_sequence(options: dict) -> None:
    """Refuses normalisation over a sequence that is not complete."""
    if validation.is_over_sequence(options.get("normalize")):
        raise ValueError(
            'normalize="sequence" looks at all rows at once and so has no form with a cache: use_cache=False, '
            'or normalize="token"'
        )


def _of_state(options: dict) -> dict:
    """Returns the options that a state depends on."""
    return {name: value for name, value in options.items() if name not in _NOT_OF_A_STATE}


def kept_options(kept: int, options: dict) -> KeptOptions:
    """Returns the options of attention to kept keys, given those of `fastmax_attention` in a call."""
    given = {"normalize": options.get("normalize") or None, "lim": options.get("lim", validation.DEFAULT_LIM)}
    scale, custom = 1.0 / options["temperature"], options.get("use_custom_gradient", True)
    return KeptOptions(kept, options["exact_window"], scale, custom, **given)


def flush_interval_of(query: Tensor, p: int) -> int:
    """Returns the flush interval of a state.

    A buffer saves memory traffic of CUDA kernels. PyTorch operations on a GPU would flush it in every step. A state of p = 1 is
    as small as a buffer.
    """
    return FLUSH_INTERVAL if p == 2 and ops.extension.expects_kernels(query) else 1


def _can_overwrite(state: DecodeState) -> bool:
    """Returns whether a state can be written in place: autograd does not need it, and inference mode permits it."""
    recorded = torch.is_grad_enabled() or state.kv_state.requires_grad
    return not recorded and (torch.is_inference_mode_enabled() or not state.kv_state.is_inference())
