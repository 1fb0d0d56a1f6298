"""Polynomial-kernel (Fastmax) attention for PyTorch.

The modules `convert`, `distributed`, `info` and `testing` are imported on first use.
"""

import importlib
from collections.abc import Callable
from types import ModuleType

from fastmax import decoding, integrations, softmax
from fastmax.functional import fastmax_attention, flash_attention
from fastmax.integrations.mha import swap_attention
from fastmax.nn.multi_head_attention import FASTMultiHeadAttention
from fastmax.nn.self_attention import FastmaxSelfAttention
from fastmax.nn.self_attention_state import SelfAttentionState
from fastmax.ops.merge import merge_attention
from fastmax.prepare import sharded_dispatch
from fastmax.prepare.positional import rpe_matrix_creator
from fastmax.traffic import hbm_traffic

__version__ = "0.2.0"

_WHEN_USED = ("convert", "distributed", "info", "testing")

__all__ = [
    "FASTMultiHeadAttention",
    "FastmaxSelfAttention",
    "SelfAttentionState",
    "decoding",
    "fastmax_attention",
    "flash_attention",
    "hbm_traffic",
    "integrations",
    "merge_attention",
    "rpe_matrix_creator",
    "softmax",
    "swap_attention",
]


def _attend_on_dtensors(attention: Callable, arguments: dict[str, object]) -> sharded_dispatch.Result:
    # Imported here, at the first DTensor, because `fastmax.distributed` loads torch.distributed.tensor, which takes seconds.
    # torch.compile traces an import statement, but not importlib.import_module.
    from fastmax.distributed.dtensors import attend

    return attend(attention, arguments)


sharded_dispatch.register_dtensor_handler(_attend_on_dtensors)


def __getattr__(name: str) -> ModuleType:
    if name in _WHEN_USED:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_USED})
