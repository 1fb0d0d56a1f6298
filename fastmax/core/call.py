"""`Call`: what is asked of an attention operator beside q, k and v, as one value from the public functions to the tiles.

`Signature` is how a call is laid out in a registered schema, and the one place that flattens it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fastmax.core.score import Score, Softmax

ALGORITHMS = ("auto", "quadratic", "linear")


class Call(NamedTuple):
    """Checked by `fastmax.core.validation`; shapes for 4-d q (b, h, n, d), k (b, hk, m, d) and v (b, hk, m, dv).

    pos(i) = i + m - n is the place of query i among the keys.
    """

    score: Score | Softmax
    causal: bool = False
    dropout: float = 0.0
    algorithm: str = "auto"  # up to the implementation, so that no choice by size ends up in a compiled graph's guards
    left: int = -1  # keys with pos(i) - j > left are hidden; -1: none is
    right: int = -1  # keys with j - pos(i) > right, likewise
    exact_window: int = 0  # keys with |pos(i) - j| < exact_window are weighed by exp(s): see `fastmax.ops.exact_window`
    # Tensors that accompany q, k and v.
    attention_mask: Tensor | None = None  # bool (b, m), True = the key is attended
    drop_noise: Tensor | None = None  # (b, h, n, dv), a constant
    rpe_matrix: Tensor | None = None  # (n + m - 1, d)
    log_decay: Tensor | None = None  # (b, hk, m), finite, <= 0, or NaN, in the compute dtype: see `fastmax.prepare.bounds`
    first_key: Tensor | None = None  # int32 (b, hk, n), keys before it are hidden; does not fall from query to query
    end_key: Tensor | None = None  # int32 (b, hk, n), keys from it on are hidden; likewise

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The tensors that get a gradient."""
        return tuple([getattr(self, name) for name in _DIFFERENTIABLE])


_DIFFERENTIABLE = ("rpe_matrix", "log_decay")
_SCORE_SCHEMAS = {Score: "float scale, float a0, float a1, float a2, int p", Softmax: "float scale"}
_OPTION_TYPES = {
    "causal": "bool",
    "dropout": "float",
    "algorithm": "str",
    "left": "int",
    "right": "int",
    "exact_window": "int",
}


class Signature:
    """The part of a schema that stands for a call: its tensors, its score, its options, and `allow_tf32`, which kernels alone
    read, since PyTorch's own matrix products obey its precision setting by themselves."""

    def __init__(self, score: type[Score] | type[Softmax], options: tuple[str, ...], tensors: tuple[str, ...]):
        self.score = score
        self.option_names = options
        self.tensor_names = tensors
        self.differentiable = tuple(name for name in tensors if name in _DIFFERENTIABLE)
        self._options = [Call._fields.index(name) for name in options]
        self._tensors = [Call._fields.index(name) for name in tensors]

    @property
    def schema(self) -> str:
        tensors = (f"Tensor? {name}" for name in self.tensor_names)
        options = (f"{_OPTION_TYPES[name]} {name}" for name in self.option_names)
        return ", ".join((*tensors, _SCORE_SCHEMAS[self.score], *options, "bool allow_tf32"))

    def flatten(self, call: Call, allow_tf32: bool) -> tuple[tuple[Tensor | None, ...], tuple]:
        """Tensors and options, in the order of the schema."""
        return tuple([call[i] for i in self._tensors]), (*call.score, *[call[i] for i in self._options], allow_tf32)

    def call(self, arguments: Sequence) -> Call:
        """The call of `arguments`, all that the schema holds."""
        names = (*self.tensor_names, *self.option_names)
        tensors, options = arguments[: len(self.tensor_names)], arguments[len(self.tensor_names) : -1]
        score, options = self.score(*options[: len(self.score._fields)]), options[len(self.score._fields) :]
        return Call(score, **dict(zip(names, (*tensors, *options), strict=True)))

    def by_tensor(self, gradients: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """A gradient, or None, for each of the schema's tensors, from those of the differentiable ones."""
        given = dict(zip(self.differentiable, gradients, strict=True))
        return tuple([None if x is None else given.get(name) for name, x in zip(self.tensor_names, tensors, strict=True)])


# Tensors with a number for every token of every key/value head.
PER_HEAD = ("log_decay", "first_key", "end_key")
FASTMAX = Signature(Score, ("causal", "dropout", "algorithm"), ("attention_mask", "drop_noise", "rpe_matrix", *PER_HEAD))
# Causal calls whose keys are far ones of an exact window.
FAR = Signature(Score, ("algorithm",), ("attention_mask", "log_decay", "first_key"))
EXACT_WINDOW = Signature(Score, ("causal", "algorithm", "exact_window"), ("attention_mask", *PER_HEAD))
EXACT_TILES = Signature(Score, ("causal", "exact_window"), ("attention_mask", *PER_HEAD))
FLASH = Signature(Softmax, ("causal", "left", "right"), ("attention_mask", *PER_HEAD))
