"""Tells cross-attention from self-attention, where an option depends on it.

Some layers have an attribute or a name that says which they are. Others are cross-attention in calls that pass the keys of
another sequence, and self-attention in other calls. The attention function does not receive the arguments of its layer, so a
forward pre-hook of the layer reads them and passes the answer on as one more argument.
"""

from __future__ import annotations

import inspect
import re
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastmax.core import validation
from fastmax.integrations.tensors import is_same
from fastmax.integrations.transformers import hooks
from fastmax.integrations.transformers.layers import is_causal_self_attention
from fastmax.integrations.transformers.options import NAME

ARGUMENT = "fastmax_cross_attention"  # of the attention function: bool; not passed where no option depends on it
_OF_KEYS = re.compile(  # names by which forwards of transformers' layers take what keys are computed from
    "k|keys?|key_tensor|key_states|key_value_states|encoder_states|encoder_hidden_states|cross_attention_states|"
    "context|context_hidden_states|memory"
)


def options_of_one_sequence(options: dict) -> dict:
    """Returns the options that mean another function in cross-attention: of positions, and normalisation over a sequence."""
    normalize = {"normalize": options["normalize"]} if validation.is_over_sequence(options.get("normalize")) else {}
    return validation.options_of_positions(options) | normalize


def tell_cross_attention(layer: nn.Module) -> None:
    """Registers a hook that tells the attention function whether its layer was called with keys of another sequence."""
    forward = _forward(type(layer))
    if forward.of_keys and forward.takes_more:
        hooks.add_once(layer, _tell)


def _tell(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Forward pre-hook of the layer. A function of this module, it is copied and pickled with the model."""
    options = getattr(layer.config, "fastmax", None)
    if layer.config._attn_implementation != NAME or not options or not options_of_one_sequence(options):
        return None
    forward = _forward(type(layer))
    given = dict(zip(forward.names, args, strict=False)) | kwargs
    query, others = given.get(forward.names[0]), [given.get(name) for name in forward.of_keys]
    found = any(isinstance(x, Tensor) and not (isinstance(query, Tensor) and is_same(query, x)) for x in others)
    return args, kwargs | {ARGUMENT: found}


class _Forward(NamedTuple):
    """The parameters of the `forward` of a class of layers, read from its signature."""

    names: tuple[str, ...]  # all parameters, without self
    of_keys: tuple[str, ...]  # the parameters that can take keys of another sequence
    takes_more: bool  # whether there is **kwargs, which transformers' layers pass on to the attention function
    is_known: bool  # whether all parameters have names: there is no *args


@torch.compiler.assume_constant_result  # compilers cannot trace `inspect`
def _forward(kind: type) -> _Forward:
    return _read(kind)


@lru_cache
def _read(kind: Any) -> _Forward:
    _, *parameters = inspect.signature(kind.forward).parameters.values()
    kinds, names = {x.kind for x in parameters}, tuple(x.name for x in parameters)
    of_keys = tuple(name for name in names[1:] if _OF_KEYS.fullmatch(name))
    return _Forward(names, of_keys, inspect.Parameter.VAR_KEYWORD in kinds, inspect.Parameter.VAR_POSITIONAL not in kinds)


def is_cross_attention(layer: nn.Module, told: bool | None, causal: bool, queries: int, keys: int) -> bool | None:
    """Returns whether queries and keys are of different sequences, so that their positions cannot be compared; None: unknown.

    Args:
        told: what the layer's hook has found; None = it has none.
    """
    if causal:
        return False
    of_decoder = getattr(layer, "is_decoder", False) and not getattr(layer, "is_causal", False)
    if told or of_decoder or says_cross_attention(layer):
        return True
    forward = _forward(type(layer))
    if told is None and (forward.of_keys or not forward.is_known):
        return None
    return False if queries == keys or is_causal_self_attention(layer) else None


def says_cross_attention(layer: nn.Module) -> bool:
    """Returns whether a layer says by an attribute or by its name that it is cross-attention."""
    return bool(getattr(layer, "is_cross_attention", False)) or "Cross" in type(layer).__name__
