"""The attention function that transformers' interface calls for `attn_implementation="fastmax"`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from fastmax.core import validation
from fastmax.functional import fastmax_attention
from fastmax.integrations.tensors import queries_to_normalize
from fastmax.integrations.transformers import cross_attention
from fastmax.integrations.transformers.cache import FastmaxLayer, NewTokens, kept_options, refuse_sequence
from fastmax.integrations.transformers.cache_argument import CACHE
from fastmax.integrations.transformers.gates import DecayGate, Gate, InputGate, refuse_missing
from fastmax.integrations.transformers.layers import is_causal_self_attention, runs_fastmax
from fastmax.integrations.transformers.masks import GAPS, FastmaxMask, fastmax_mask, refuse_where
from fastmax.integrations.transformers.observation import observer_at_work
from fastmax.integrations.transformers.options import NAME, SOFTMAX, check_kept_keys, options_of
from fastmax.integrations.transformers.packing import ONLY, end_to_end, rows_again
from fastmax.nn import kept_keys
from fastmax.nn.kept_keys import LayerTokens
from fastmax.prepare import sharded_dispatch
from fastmax.prepare.padding import RealFirst, begins_of_runs

# Arguments by which transformers' layers ask for another function than attention over all (earlier) keys.
_OTHER_FUNCTIONS = {
    "sliding_window": "a sliding window; where all layers have one, as in Mistral, sliding_window=None in the configuration "
    "takes it away",
    "softcap": "a cap on the scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias on the scores",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "cache": "a paged cache",
}
_OF_FASTMAX = {"log_decay": "decays", "log_input_gate": "input gates"}  # softmax attention would ignore these
_IN_MASK = {"sliding_window"}  # softmax attention has these in its mask


def register() -> None:
    """Registers the name "fastmax" with transformers' interfaces of attention and masks."""
    AttentionInterface.register(NAME, fastmax_attention_forward)
    AttentionMaskInterface.register(NAME, fastmax_mask)


def fastmax_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes fastmax attention: query (b, h, n, d), key (b, hk, m, d), value (b, hk, m, dv) -> (b, n, h, dv).

    Layers that the option `layers` leaves out run transformers' "sdpa".

    Args:
        module: the attention layer; its `config.fastmax` holds the options and its `is_causal` the default of the argument.
        key, value: those that query sees; with a `FastmaxCache` the new ones, which are to join its state.
        attention_mask: what `fastmax_mask` returns; or bool (batch, 1, 1, keys), True = takes part, of a bidirectional layer or
            a single query.
        dropout: of attention weights; must be 0, unless the option `dropout` takes its place.
        scaling: softmax attention's scale; the temperature is its inverse unless an option says otherwise.
        is_causal: read only where the model makes no mask.

    Raises:
        ValueError: the layer asks for another function than fastmax attention (sliding window, sinks, custom mask, ...).
        TypeError: an unknown option.
    """
    given = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal} | kwargs
    observer = None if torch.compiler.is_compiling() else observer_at_work()
    if observer is None:
        return _attention(module, query, key, value, attention_mask, **given)
    with observer.asked_by(module):
        return _attention(module, query, key, value, attention_mask, **given)


class _Request(NamedTuple):
    """The arguments of one call of attention, made from the options, the mask and the gates of its layer, and checked."""

    mask: FastmaxMask
    padding: Tensor | None  # bool (b, keys), True = takes part
    of_one: bool  # queries and keys are known to be of one sequence
    cu_seqlens: Tensor | None  # bounds of packed documents, of all rows end to end
    log_decay: Tensor | None
    log_input_gate: Tensor | None
    kept: int  # the option `kept_keys`, where it applies
    options: dict[str, Any]  # other keywords of `fastmax_attention`; those of a state have `kept_keys` too
    state: FastmaxLayer | None  # of a `FastmaxCache`


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | NewTokens,
    value: Tensor | NewTokens,
    attention_mask: FastmaxMask | Tensor | None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Computes what `fastmax_attention_forward` returns."""
    of_softmax = not runs_fastmax(module)
    _refuse_other_functions(module, of_softmax, given)
    if of_softmax:
        return _softmax(module, query, key, value, attention_mask, given)
    request = _resolved(module, query, key, value, attention_mask, **given)
    _check_context(module, request, given.get("position_ids"))
    _refuse_gaps(request)
    if request.state is None:
        o = _of_whole_sequences(query, key, value, request)
    else:
        o = request.state.attend(query, request.mask, request.options, request.log_decay, request.log_input_gate)
    return o.transpose(1, 2).contiguous(), None


def _refuse_other_functions(module: nn.Module, of_softmax: bool, given: dict[str, Any]) -> None:
    """Raises an error if the arguments ask for another function than attention over all (earlier) keys, or for weights."""
    for name, meaning in (_OTHER_FUNCTIONS | (_OF_FASTMAX if of_softmax else {})).items():
        if given.get(name) is not None and not (of_softmax and name in _IN_MASK):
            layer = f" in {type(module).__name__}, a layer of softmax attention" if of_softmax else ""
            raise ValueError(f'attn_implementation="{NAME}" does not support {name} ({meaning}){layer}')
    if given.get("output_attentions"):
        raise ValueError(f'attn_implementation="{NAME}" has no attention weights to return: output_attentions must be False')


def _resolved(
    module: nn.Module,
    query: Tensor,
    key: Tensor | NewTokens,
    value: Tensor | NewTokens,
    attention_mask: FastmaxMask | Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    **given: Any,
) -> _Request:
    """Reads the options, the mask and the gates of a layer of fastmax, and takes the new tokens of its cache."""
    options = options_of(module.config)
    check_kept_keys(**options)
    if dropout and "dropout" not in options:
        raise ValueError(_no_dropout(module, dropout))
    state = key.take(value) if isinstance(key, NewTokens) else None
    keys = key.shape[2] if state is None else state.number_of_keys()
    if isinstance(attention_mask, FastmaxMask):
        mask = attention_mask
    else:
        across = given.get(cross_attention.ARGUMENT) or cross_attention.says_cross_attention(module)
        mask = _mask_of_layer(module, attention_mask, is_causal, query.shape[2], keys, across)
    if mask.refusal is not None:
        raise ValueError(f"{type(module).__name__}: {mask.refusal}")
    cu_seqlens = _documents(query, keys, mask, state is not None, given)
    if cu_seqlens is None and given.get("position_ids") is not None:
        mask.refuse_packing(given["position_ids"])
    of_one = _of_one_sequence(module, options, mask, query.shape[2], keys, given.get(cross_attention.ARGUMENT))
    if of_one is False:
        for name in validation.OF_POSITIONS:
            options.pop(name, None)
    options.setdefault("temperature", math.sqrt(query.shape[-1]) if scaling is None else 1.0 / scaling)
    if not module.training:
        options["dropout"] = 0.0
    if of_one and (state is not None or query.shape[2] < keys):
        refuse_sequence(options)
    padding = None if mask.padding is None else mask.padding.to(query.device)
    log_decay = _log_decay(module, query, key, mask.causal, padding, options.get("log_decay"), given.get("log_decay"))
    gate = given.get("log_input_gate")
    _check_gate(module, InputGate, key, mask.causal, gate)
    kept = _kept_keys(module, options, mask.causal)
    if kept > 0 and gate is None:
        raise ValueError(
            f"{type(module).__name__} has no input gate, by which the {kept} kept_keys are chosen: "
            f"fastmax.integrations.transformers.{InputGate.ADDED_BY}(model)"
        )
    if state is None:
        options.pop("kept_keys", None)
    return _Request(mask, padding, of_one is True, cu_seqlens, log_decay, gate, kept, options, state)


def _of_one_sequence(
    module: nn.Module, options: dict, mask: FastmaxMask, queries: int, keys: int, told: bool | None
) -> bool | None:
    """Returns whether queries and keys are of one sequence; None: unknown, and no option of the call depends on it."""
    across = cross_attention.is_cross_attention(module, told, mask.causal, queries, keys)
    if across is not None:
        return not across
    found = cross_attention.options_of_one_sequence(options)
    if queries != keys or mask.padding is None:
        found.pop("normalize", None)  # then queries have no padding that could count
    if found:
        name, value = next(iter(found.items()))
        raise ValueError(
            f"{name} = {value!r} needs to know whether {queries} queries and {keys} keys are of one sequence, and "
            f"{type(module).__name__} does not tell: leave the option out, or, if the layer was added to a finished model, "
            "call fastmax.integrations.transformers.check(model)"
        )
    return None


def _check_context(module: nn.Module, request: _Request, position_ids: Tensor | None) -> None:
    """Raises an error if `context_parallel` is at work and a rank's tokens alone do not give what the layer asks for."""
    context = sharded_dispatch.current()
    if context is None:
        return
    if request.kept > 0:
        raise ValueError(f"kept_keys of a Hugging Face model has no form in context_parallel, got {request.kept}")
    context.telling(_refuse_documents)(module, request.cu_seqlens)
    if position_ids is not None and not request.mask.places_are_checked:
        context.refuse_local_positions(position_ids)
        request.mask.places_are_checked = True


def _refuse_gaps(request: _Request) -> None:
    """Raises an error if padding between real tokens would count as positions. A state and kept keys count real tokens only."""
    if request.state is not None or request.kept > 0 or not validation.options_of_positions(request.options):
        return
    if request.padding is None or request.mask.gaps_are_checked:
        return
    request.mask.gaps_are_checked = True
    context = sharded_dispatch.current()
    if context is None:
        refuse_where(begins_of_runs(request.padding).sum(1) > 1, GAPS)
    else:
        context.refuse_gaps(request.padding, None)


def _of_whole_sequences(query: Tensor, key: Tensor, value: Tensor, request: _Request) -> Tensor:
    """Computes attention without a state: (b, h, n, dv)."""
    tensors: tuple[Any, ...] = (query, key, value, request.log_decay, request.log_input_gate)
    causal, padding = request.mask.causal, request.padding
    packed = request.cu_seqlens is not None
    if packed:
        tensors = tuple(None if x is None else end_to_end(x) for x in tensors)
        causal, padding = True, None
    q, k, v, log_decay, gate = tensors
    if request.of_one:
        q = queries_to_normalize(q, padding, request.options.get("normalize"))
    if request.kept > 0:
        o = _with_kept_keys(LayerTokens(q, k, v, gate, log_decay), padding, request.cu_seqlens, request.kept, request.options)
    else:
        of_keys = {"attention_mask": padding, "log_decay": log_decay, "log_input_gate": gate, "cu_seqlens": request.cu_seqlens}
        o = fastmax_attention(q, k, v, causal=causal, **(request.options | of_keys))
    return rows_again(o, query.shape[0]) if packed else o


def _kept_keys(module: nn.Module, options: dict, causal: bool) -> int:
    """Returns the option `kept_keys`, 0 for the encoder and the cross-attention of encoder-decoder models, which share the
    decoder's configuration."""
    kept = options.get("kept_keys", 0)
    if kept == 0 or (not causal and module.config.is_encoder_decoder and not is_causal_self_attention(module)):
        return 0
    _refuse_unless_causal(module, "kept_keys", causal)
    return kept


def _with_kept_keys(tokens: LayerTokens, padding: Tensor | None, cu_seqlens: Tensor | None, kept: int, options: dict) -> Tensor:
    """Computes causal attention with kept keys of whole sequences.

    Args:
        padding: bool (b, n), True = real. Positions count real tokens, so these come first during the computation.
        cu_seqlens: bounds of packed sequences, without padding.
    """
    order = None if padding is None else RealFirst.of(padding)
    if order is not None:
        tokens = tokens.map(lambda x: order.first(x, 2)).real_only(order.count)
    q, k, v, gate, log_decay = tokens
    options = options | {"log_decay": log_decay, "log_input_gate": gate, "cu_seqlens": cu_seqlens, "return_lse": True}
    o, lse = fastmax_attention(q, k, v, causal=True, attention_mask=None if order is None else order.mask, **options)
    attend = partial(kept_keys.attend, cu_seqlens=cu_seqlens)
    o = kept_keys.included(o, lse, tokens, kept_options(kept, options), attend)
    return o if order is None else order.back(o, 2)


def _softmax(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: FastmaxMask | Tensor | None, given: dict
) -> tuple[Tensor, None]:
    """Computes softmax attention of a layer that the option `layers` leaves out."""
    if sharded_dispatch.current() is not None:
        raise ValueError(
            f"{type(module).__name__}, a layer of softmax attention that the option layers leaves out, sees the tokens of one "
            "rank only in context_parallel: run fastmax in all layers"
        )
    mask = attention_mask if isinstance(attention_mask, FastmaxMask) else None
    cu_seqlens = _named_documents(query, given)
    if cu_seqlens is not None:
        if mask is None or mask.padding is not None or key.shape[2] != query.shape[2]:
            raise ValueError(f"{ONLY}; got cu_seq_lens_q in {type(module).__name__}, a layer of softmax attention")
        mask.refuse_other_documents(cu_seqlens)
    dense = attention_mask if mask is None else mask.dense()
    return AttentionInterface()[SOFTMAX](module, query, key, value, dense, **given)


def _documents(query: Tensor, keys: int, mask: FastmaxMask, has_state: bool, given: dict) -> Tensor | None:
    """Returns the bounds (`cu_seqlens`) of the documents of all rows end to end; None = each row is one document."""
    of_mask = mask.cu_seqlens(query.device) if mask.packed else None
    if mask.packed and has_state:
        raise ValueError(f"{ONLY}; got a FastmaxCache")
    cu_seqlens = _named_documents(query, given)
    if cu_seqlens is None:
        return of_mask
    n = query.shape[2]
    if not mask.causal or mask.padding is not None or has_state or keys != n:
        kind, masked = "causal" if mask.causal else "not causal", "no" if mask.padding is None else "an"
        cached = ", a FastmaxCache" if has_state else ""
        raise ValueError(f"{ONLY}; got cu_seq_lens_q, {kind}, {masked} attention_mask, {n} queries of {keys} keys{cached}")
    return cu_seqlens


def _refuse_documents(module: nn.Module, cu_seqlens: Tensor | None) -> None:
    """Raises an error if a rank of `context_parallel` has packed documents."""
    if cu_seqlens is not None:
        raise ValueError(
            f"{type(module).__name__} got packed documents (position_ids that do not count on, or cu_seq_lens_q), which have "
            'no form in context_parallel; with its layout "contiguous" the positions of a rank count on'
        )


def _named_documents(query: Tensor, given: dict) -> Tensor | None:
    """Returns the bounds among the arguments, checked without the mask."""
    of_queries, of_keys = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    if of_queries is None:
        if of_keys is not None:
            raise ValueError("cu_seq_lens_k needs cu_seq_lens_q, got it alone")
        return None
    for name, x in (("cu_seq_lens_q", of_queries), ("cu_seq_lens_k", of_keys)):
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name} must be an int32 tensor of shape (sequences + 1,), got {validation.describe(x)}")
    if query.shape[0] != 1:
        raise ValueError(
            f"cu_seq_lens_q is for a batch of one, got one of {query.shape[0]}: position_ids that start again are for any"
        )
    if of_keys is not None and of_keys is not of_queries:
        same = "cu_seq_lens_k must be cu_seq_lens_q, since queries and keys are of the same documents"
        if of_keys.shape != of_queries.shape:
            raise ValueError(f"{same}: got shapes {tuple(of_keys.shape)} and {tuple(of_queries.shape)}")
        refuse_where(of_keys != of_queries, same)
    return of_queries.to(torch.int32)


def _log_decay(
    module: nn.Module,
    query: Tensor,
    key: Tensor | NewTokens,
    causal: bool,
    padding: Tensor | None,
    constant: list | None,
    of_gate: Tensor | None,
) -> Tensor | None:
    """Returns the decays (b, hk, keys), with a `FastmaxCache` of the new keys; padding causes no decay."""
    _check_gate(module, DecayGate, key, causal, of_gate)
    batch, heads, m = _tensor(key).shape[:3]
    if of_gate is not None:
        log_decay = of_gate
    elif constant is None:
        return None
    else:
        _refuse_unless_causal(module, "log_decay", causal)
        if len(constant) != heads:
            raise ValueError(
                f"the option log_decay must have a number for each of the {heads} key/value heads of {type(module).__name__}, "
                f"got {len(constant)}"
            )
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        log_decay = torch.tensor(constant, dtype=dtype, device=query.device)[:, None].expand(batch, heads, m)
    return log_decay if padding is None else torch.where(padding[:, None, -m:], log_decay, 0)


def _check_gate(module: nn.Module, kind: type[Gate], key: Tensor | NewTokens, causal: bool, values: Tensor | None) -> None:
    """Checks the values (b, hk, keys) that a gate of the layer, or the caller, passed for the keys of this call."""
    refuse_missing(module, kind, values)
    if values is None:
        return
    _refuse_unless_causal(module, kind.ARGUMENT, causal)
    unknown = _tensor(key).shape[2] - values.shape[2]
    if unknown != 0:
        raise ValueError(
            f"{type(module).__name__} has {kind.TITLE}, and those of {unknown} keys in the cache are not known: "
            f"{CACHE}=FastmaxCache(config), or use_cache=False"
        )


def _refuse_unless_causal(module: nn.Module, name: str, causal: bool) -> None:
    if not causal:
        raise ValueError(f"{name} needs a causal layer, and {type(module).__name__} sees all keys in this call")


def _tensor(key: Tensor | NewTokens) -> Tensor:
    return key.tensor if isinstance(key, NewTokens) else key


def _mask_of_layer(
    module: nn.Module, attention_mask: Tensor | None, is_causal: bool | None, n: int, m: int, across: bool
) -> FastmaxMask:
    """Returns the mask of a layer whose model does not use transformers' mask functions. `across`: it is cross-attention."""
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if n == 1 and causal is not None:  # models also say False where the single query sees all keys
        causal = not across and (causal or getattr(module, "is_causal", False))
    if attention_mask is None:
        if causal is None:
            raise ValueError(
                f'attn_implementation="{NAME}" cannot tell whether {type(module).__name__} is causal: neither a mask nor its '
                "is_causal says so"
            )
        if causal and n > 1 and (n != m or across):
            raise ValueError(
                f'attn_implementation="{NAME}" cannot tell which of {m} keys the {n} queries of {type(module).__name__} see: '
                f"it is causal{' cross-attention' if across else ''} and has no mask"
            )
        return FastmaxMask(bool(causal), None)
    is_padding = attention_mask.dtype == torch.bool and attention_mask.dim() == 4 and attention_mask.shape[1:] == (1, 1, m)
    if is_padding and (n == 1 or not causal):
        return FastmaxMask(bool(causal), attention_mask[:, 0, 0])
    raise ValueError(
        f'attn_implementation="{NAME}" takes padding masks only ((batch, keys) in the call of the model), got attention_mask '
        f"of shape {tuple(attention_mask.shape)} and {attention_mask.dtype} in {type(module).__name__}: a custom 4-d mask is "
        "another function"
    )


def _no_dropout(module: nn.Module, dropout: float) -> str:
    """Returns the message that refuses dropout: what to set to 0 in a live model and in a configuration."""
    layer = type(module).__name__
    found = [f"{layer}.{name}" for name, value in vars(module).items() if "drop" in name and value == dropout]
    found += [f"{layer}.{name}.p" for name, part in module.named_children() if getattr(part, "p", None) == dropout]
    return (
        f'attn_implementation="{NAME}" has no attention weights to drop, got dropout = {dropout}: set '
        f"{' or '.join(found) or 'the attention dropout'} to 0 in every layer of the live model, or in the configuration "
        "before the model is made (attention_dropout, attention_probs_dropout_prob or attn_pdrop, whichever it has); or set "
        "the option dropout, the strength of fastmax's noise on the output (0.0: none)"
    )
