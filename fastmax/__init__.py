"""Polynomial-kernel (Fastmax) attention for PyTorch.

The modules `convert`, `distributed`, `info`, `integrations`, `reference` and `verify` are imported when they are first used.
"""

import importlib
from types import ModuleType

from fastmax import softmax
from fastmax.decode import init_state, prefill, step, step_
from fastmax.decode_state import DecodeState
from fastmax.functional import fastmax_attention, flash_attention
from fastmax.merge import merge_attention
from fastmax.module import FASTMultiHeadAttention
from fastmax.positional import rpe_matrix_creator
from fastmax.self_attention import FastmaxSelfAttention
from fastmax.self_attention_state import SelfAttentionState
from fastmax.swap import swap_attention
from fastmax.traffic import hbm_traffic

__version__ = "0.1.0"

_WHEN_USED = ("convert", "distributed", "info", "integrations", "reference", "verify")

__all__ = [
    "DecodeState",
    "FASTMultiHeadAttention",
    "FastmaxSelfAttention",
    "SelfAttentionState",
    "fastmax_attention",
    "flash_attention",
    "hbm_traffic",
    "init_state",
    "merge_attention",
    "prefill",
    "rpe_matrix_creator",
    "softmax",
    "step",
    "step_",
    "swap_attention",
]


def __getattr__(name: str) -> ModuleType:
    if name in _WHEN_USED:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_USED})
