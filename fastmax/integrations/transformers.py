"""`import fastmax.integrations.transformers` gives Hugging Face models `attn_implementation="fastmax"`.

    import fastmax.integrations.transformers
    model = AutoModelForCausalLM.from_config(config, attn_implementation="fastmax")

Options of `fastmax_attention` come from the model's configuration: `config.fastmax = {"p": 1}`, or `configure(model, p=1)`,
and are saved with it. `temperature` defaults to the scale of the softmax attention that is replaced.

Masks. A causal model with padding hands each layer the padding alone, (batch, keys), True = takes part; a bidirectional one
hands it (batch, 1, 1, keys), so that a layer can tell them apart. What is not fastmax over all (earlier) keys raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastmax.functional import fastmax_attention

MINIMUM_VERSION = "5.4"  # the first whose mask functions receive q_length and q_offset

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
except ImportError as error:
    raise ImportError(
        f"fastmax.integrations.transformers needs transformers >= {MINIMUM_VERSION}: pip install 'fastmax[transformers]'"
    ) from error

if tuple(map(int, transformers.__version__.split(".")[:2])) < tuple(map(int, MINIMUM_VERSION.split("."))):
    raise ImportError(
        f"fastmax.integrations.transformers needs transformers >= {MINIMUM_VERSION}, found {transformers.__version__}"
    )

NAME = "fastmax"
OPTIONS = frozenset(
    {"normalize", "temperature", "a0", "a1", "a2", "lim", "p", "dropout", "rpe_matrix", "algorithm", "use_custom_gradient"}
)
# Arguments by which transformers' layers ask for another function than attention over all (earlier) keys.
_OTHER_FUNCTIONS = {
    "sliding_window": "a sliding window",
    "softcap": "a cap on the scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias on the scores",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
    "cache": "a paged cache",
}


def configure(model: PreTrainedModel | PreTrainedConfig, **options) -> None:
    """Set the options of fastmax attention in a model's configuration, and in its sub-configurations.

    Replaces what was set before. Equal to `config.fastmax = options` on each, with the names checked now.

    Args:
        model: the model, or its configuration.
        options: `normalize`, `temperature`, `a0`, `a1`, `a2`, `lim`, `p`, `dropout` (noise, in training mode),
            `rpe_matrix` ("sinusoidal"), `algorithm`, `use_custom_gradient`, as in `fastmax_attention`.

    Raises:
        TypeError: an unknown option.
    """
    _check_options(options)
    config = model.config if isinstance(model, PreTrainedModel) else model
    config.fastmax = dict(options)
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            configure(getattr(config, name), **options)


def fastmax_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (b, h, n, d), key (b, hk, m, d), value (b, hk, m, dv) -> (b, n, h, dv).

    Args:
        module: the attention layer; its `config.fastmax` holds the options and its `is_causal` the default of the argument.
        attention_mask: what `fastmax_mask` returns.
        dropout: of attention weights; must be 0.
        scaling: softmax attention's scale; the temperature is its inverse unless an option says otherwise.
        is_causal: only asked when the model makes no mask.

    Raises:
        ValueError: the layer asks for another function than fastmax attention (sliding window, sinks, custom mask, ...).
        TypeError: an unknown option.
    """
    for name, meaning in _OTHER_FUNCTIONS.items():
        if kwargs.get(name) is not None:
            raise ValueError(f'attn_implementation="fastmax" does not support {name} ({meaning})')
    if kwargs.get("output_attentions"):
        raise ValueError('attn_implementation="fastmax" has no attention weights to return: output_attentions must be False')
    if dropout:
        raise ValueError(
            f'attn_implementation="fastmax" has no attention weights to drop, got dropout = {dropout}: set the model\'s '
            "attention dropout to 0 (attention_dropout, attn_pdrop); fastmax's own noise is the option dropout"
        )
    options = dict(getattr(module.config, "fastmax", None) or {})
    _check_options(options)
    options.setdefault("temperature", math.sqrt(query.shape[-1]) if scaling is None else 1.0 / scaling)
    if not module.training:
        options["dropout"] = 0.0
    causal, key_padding_mask = _read_mask(module, attention_mask, is_causal, key.shape[2])
    if causal and query.shape[2] < key.shape[2] and options.get("normalize") in (True, "sequence"):
        raise ValueError(
            'normalize="sequence" looks at all rows at once and so has no form with a cache: use_cache=False, '
            'or normalize="token"'
        )
    o = fastmax_attention(query, key, value, causal=causal, key_padding_mask=key_padding_mask, **options)
    return o.transpose(1, 2).contiguous(), None


def fastmax_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs,
) -> Tensor | None:
    """transformers' mask interface: the padding as bool, (batch, keys) for a causal model, else (batch, 1, 1, keys).

    Args:
        batch_size, q_length, kv_length, q_offset, kv_offset: sizes, and positions of the first query and key.
        mask_function: the pattern; the causal and the bidirectional one are accepted.
        attention_mask: bool (batch, keys), True = takes part.

    Returns:
        None when the model is causal and there is no padding mask.

    Raises:
        ValueError: another pattern; keys past the last query (a static cache); an attention_mask of another length.
    """
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        raise ValueError(
            'attn_implementation="fastmax" takes the causal and the bidirectional mask, not this model\'s: sliding windows, '
            "chunks, packed sequences and mask functions of the model's own are other functions. (Under torch.compile every "
            "call with position_ids and no attention_mask looks like packed sequences: pass attention_mask.)"
        )
    causal = mask_function is causal_mask_function
    if isinstance(q_offset, Tensor) or (causal and kv_offset + kv_length != q_offset + q_length):
        raise ValueError(
            'attn_implementation="fastmax" needs keys that end with the last query; a static cache holds more. '
            "Use the default dynamic cache"
        )
    if attention_mask is not None and attention_mask.shape[-1] != kv_offset + kv_length:
        raise ValueError(
            f"attention_mask must cover all {kv_offset + kv_length} keys, those in the cache included, "
            f"got shape {tuple(attention_mask.shape)}"
        )
    if causal:
        return attention_mask
    if attention_mask is None:
        return torch.ones(batch_size, 1, 1, kv_length, dtype=torch.bool, device=device)
    return attention_mask[:, None, None, :]


def _check_options(options: dict) -> None:
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        raise TypeError(f"unknown fastmax option {', '.join(map(repr, unknown))}; known are {', '.join(sorted(OPTIONS))}")


def _read_mask(module: nn.Module, attention_mask: Tensor | None, is_causal: bool | None, m: int) -> tuple[bool, Tensor | None]:
    """(causal, key_padding_mask) from the mask where there is one, else from the layer."""
    default = getattr(module, "is_causal", None)
    if attention_mask is None:
        causal = default if is_causal is None else is_causal
        if causal is None:
            raise ValueError(f"{type(module).__name__} says neither by a mask nor by is_causal whether it is causal")
        return bool(causal), None
    if attention_mask.dtype == torch.bool and attention_mask.dim() == 2 and (default is not False or is_causal):
        return True, attention_mask
    if attention_mask.dtype == torch.bool and attention_mask.dim() == 4 and attention_mask.shape[1:] == (1, 1, m):
        return False, attention_mask[:, 0, 0]
    raise ValueError(
        'attn_implementation="fastmax" takes padding masks only (bool, (batch, keys), or (batch, 1, 1, keys) for '
        f"bidirectional layers), got attention_mask of shape {tuple(attention_mask.shape)} and {attention_mask.dtype} in "
        f"{type(module).__name__}: a custom 4-d mask is another function"
    )


AttentionInterface.register(NAME, fastmax_attention_forward)
AttentionMaskInterface.register(NAME, fastmax_mask)
