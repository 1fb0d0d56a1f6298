"""`Call`: what is asked of an attention operator beside q, k and v, as one value from the public functions to the tiles.

`Signature` is how a call is laid out in a registered schema, and the one place that flattens it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, get_type_hints

import torch
from torch import Tensor

from fastmax.core.score import Score, Softmax

ALGORITHMS = ("auto", "quadratic", "linear")


class Accompanying(NamedTuple):
    """A tensor that accompanies q, k and v, as its field of `Call` declares it.

    Schemas, checks, gradients, the parts of an exact window and the placements of DTensors follow from this.
    """

    axes: str  # of b, h, hk, n, m, d, dv; others are sizes of its own
    dtype: torch.dtype | None = None  # None: the compute dtype
    differentiable: bool = False
    of_global_keys: bool = (
        False  # whether a call for the far keys of an exact window, and one that continues from a state, has it
    )

    @property
    def per_head(self) -> bool:
        """Whether it has numbers for every key/value head."""
        return "hk" in self.axes.split()


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
    # True = the key is attended
    attention_mask: Annotated[Tensor | None, Accompanying("b m", torch.bool, of_global_keys=True)] = None
    # A constant
    drop_noise: Annotated[Tensor | None, Accompanying("b h n dv")] = None
    # n + m - 1 rows
    rpe_matrix: Annotated[Tensor | None, Accompanying("distance d", differentiable=True)] = None
    # Finite, <= 0, or NaN: see `fastmax.prepare.bounds`
    log_decay: Annotated[Tensor | None, Accompanying("b hk m", differentiable=True, of_global_keys=True)] = None
    # Keys before it are hidden; does not fall from query to query
    k_start: Annotated[Tensor | None, Accompanying("b hk n", torch.int32, of_global_keys=True)] = None
    # Keys from it on are hidden; likewise
    k_end: Annotated[Tensor | None, Accompanying("b hk n", torch.int32)] = None

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The tensors that get a gradient."""
        return tuple([getattr(self, name) for name in _DIFFERENTIABLE])


_HINTS = get_type_hints(Call, include_extras=True)
ACCOMPANYING = {name: hint.__metadata__[0] for name, hint in _HINTS.items() if hasattr(hint, "__metadata__")}
# Tensors with a number for every token of every key/value head.
PER_HEAD = tuple(name for name, x in ACCOMPANYING.items() if x.per_head)
_DIFFERENTIABLE = tuple(name for name, x in ACCOMPANYING.items() if x.differentiable)
SCORE = "float scale, float a0, float a1, float a2, int p"  # in a schema
_SCORE_SCHEMAS = {Score: SCORE, Softmax: "float scale"}
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
        self.gradient_names = ("q", "k", "v", *self.differentiable)
        self._options = [Call._fields.index(name) for name in options]
        self._tensors = [Call._fields.index(name) for name in tensors]

    @property
    def schema(self) -> str:
        return f"{self.tensors_schema}, {self.options_schema}"

    @property
    def tensors_schema(self) -> str:
        return ", ".join(f"Tensor? {name}" for name in self.tensor_names)

    @property
    def options_schema(self) -> str:
        options = (f"{_OPTION_TYPES[name]} {name}" for name in self.option_names)
        return ", ".join((_SCORE_SCHEMAS[self.score], *options, "bool allow_tf32"))

    @property
    def gradients_schema(self) -> str:
        """The results of a backward: gradients of q, k, v and of the call's differentiable tensors."""
        return ", ".join(f"Tensor grad_{name}" for name in self.gradient_names)

    def flatten(self, call: Call, allow_tf32: bool) -> tuple[tuple[Tensor | None, ...], tuple]:
        """Tensors and options, in the order of the schema."""
        return tuple([call[i] for i in self._tensors]), (*call.score, *[call[i] for i in self._options], allow_tf32)

    def call(self, arguments: Sequence) -> Call:
        """The call of `arguments`, all that the schema holds."""
        names = (*self.tensor_names, *self.option_names)
        tensors, options = arguments[: len(self.tensor_names)], arguments[len(self.tensor_names) : -1]
        score, options = self.score(*options[: len(self.score._fields)]), options[len(self.score._fields) :]
        return Call(score, **dict(zip(names, (*tensors, *options), strict=True)))

    def gradients(self, results: Sequence[Tensor]) -> dict[str, Tensor]:
        """The results of a backward by what they are gradients of."""
        return dict(zip(self.gradient_names, results, strict=True))

    def of_inputs(self, gradients: dict[str, Tensor], tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """A gradient, or None, for q, k, v and each of the schema's tensors, those of the call."""
        of_tensors = [None if x is None else gradients.get(name) for name, x in zip(self.tensor_names, tensors, strict=True)]
        return gradients["q"], gradients["k"], gradients["v"], *of_tensors


FASTMAX = Signature(Score, ("causal", "dropout", "algorithm"), ("attention_mask", "drop_noise", "rpe_matrix", *PER_HEAD))
# Causal calls whose keys are far ones of an exact window.
GLOBAL = Signature(Score, ("algorithm",), tuple(name for name, x in ACCOMPANYING.items() if x.of_global_keys))
# Calls that continue from a state, which are causal and run on the linear algorithm.
CONTINUED = Signature(Score, (), GLOBAL.tensor_names)
EXACT_WINDOW = Signature(Score, ("causal", "algorithm", "exact_window"), ("attention_mask", *PER_HEAD))
EXACT_TILES = Signature(Score, ("causal", "exact_window"), ("attention_mask", *PER_HEAD))
FLASH = Signature(Softmax, ("causal", "left", "right"), ("attention_mask", *PER_HEAD))
