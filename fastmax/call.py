"""`Call`: what is asked of an attention operator beside q, k and v, as one value from the public functions to the tiles.

`Signature` is how a call is laid out in a registered schema, and the one place that flattens it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fastmax.score import Score, Softmax


class Call(NamedTuple):
    """Checked by `fastmax.validation`; shapes for 4-d q (b, h, n, d), k (b, hk, m, d) and v (b, hk, m, dv).

    A schema takes a run of the options and a run of the tensors: what both operators have stands next to each other.
    """

    score: Score | Softmax
    causal: bool = False
    dropout: float = 0.0
    algorithm: str = "auto"  # up to the implementation, so that no choice by size ends up in a compiled graph's guards
    # Tensors that accompany q, k and v.
    key_padding_mask: Tensor | None = None  # bool (b, m), True = the key takes part
    drop_noise: Tensor | None = None  # (b, h, n, dv), a constant
    rpe_matrix: Tensor | None = None  # (n + m - 1, d)

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The tensors that get a gradient."""
        return (self.rpe_matrix,)


_SCORE_SCHEMAS = {Score: "float scale, float a0, float a1, float a2, int p", Softmax: "float scale"}
_OPTION_TYPES = {"causal": "bool", "dropout": "float", "algorithm": "str"}


class Signature(NamedTuple):
    """The part of a schema that stands for a call: its tensors, its score, its options, and `allow_tf32`, which kernels alone
    read, since PyTorch's own matrix products obey its precision setting by themselves."""

    score: type[Score] | type[Softmax]
    options: slice  # of the fields of Call
    tensors: slice  # likewise

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return Call._fields[self.tensors]

    @property
    def schema(self) -> str:
        tensors = (f"Tensor? {name}" for name in self.tensor_names)
        options = (f"{_OPTION_TYPES[name]} {name}" for name in Call._fields[self.options])
        return ", ".join((*tensors, _SCORE_SCHEMAS[self.score], *options, "bool allow_tf32"))

    def flatten(self, call: Call, allow_tf32: bool) -> tuple[tuple[Tensor | None, ...], tuple]:
        """Tensors and options, in the order of the schema."""
        return call[self.tensors], (*call.score, *call[self.options], allow_tf32)

    def call(self, arguments: Sequence) -> Call:
        """The call of `arguments`, all that the schema holds."""
        names = (*self.tensor_names, *Call._fields[self.options])
        tensors, options = arguments[: len(self.tensor_names)], arguments[len(self.tensor_names) : -1]
        score, options = self.score(*options[: len(self.score._fields)]), options[len(self.score._fields) :]
        return Call(score, **dict(zip(names, (*tensors, *options), strict=True)))


FASTMAX = Signature(Score, options=slice(1, 4), tensors=slice(4, 7))
FLASH = Signature(Softmax, options=slice(1, 2), tensors=slice(4, 5))
