"""`Call`: all arguments of an attention operator except q, k and v, as one value.

The public functions make a `Call`, which is passed down to the code that computes tiles. A registered operator takes flat
arguments instead; `Signature` converts between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, get_type_hints

import torch
from torch import Tensor

from fastmax.core.score import Score, Softmax

ALGORITHMS = ("auto", "quadratic", "linear")


class Accompanying(NamedTuple):
    """Describes a tensor that accompanies q, k and v; annotates its field in `Call`.

    Schemas, checks, gradients, slices for heads and for global keys, and placements of DTensors are derived from it.
    """

    # Names of the dimensions: b batch, h query heads, hk key/value heads, n queries, m keys, d head dim of q and k, dv head dim
    # of v. Any other name is a size of this tensor alone.
    axes: str
    # The dtype that a tensor with the axis hk must have (`core.validation` has rules of its own for the others). None: float32,
    # or float64 for float64 q.
    dtype: torch.dtype | None = None
    # Whether the backward returns a gradient for it.
    differentiable: bool = False
    # Whether it applies to the global keys of an exact window. The tensor is then cut to the part's tokens.
    of_global_keys: bool = False
    # Whether it applies to the local keys of an exact window.
    of_local_keys: bool = True
    # Whether it applies to softmax attention.
    of_softmax: bool = True
    # Whether it applies to calls that continue from a state.
    of_states: bool = False
    # Whether a call that has it must be causal.
    needs_causal: bool = False
    # Whether the CUDA kernels read it. A call that has it runs in PyTorch operations otherwise.
    has_kernels: bool = True

    @property
    def per_head(self) -> bool:
        """Whether it has a dimension for key/value heads."""
        return "hk" in self.axes.split()


class Call(NamedTuple):
    """The arguments of an attention operator besides q, k and v, checked by `fastmax.core.validation`.

    Shapes are for 4-d q (b, h, n, d), k (b, hk, m, d) and v (b, hk, m, dv). Query i has the position pos(i) = i + m - n among
    the keys. A key is visible to a query unless one of the arguments below hides it.
    """

    # The function that turns scores into weights.
    score: Score | Softmax
    # Hides keys j > pos(i) from query i.
    causal: bool = False
    # Strength of `drop_noise`.
    dropout: float = 0.0
    # One of ALGORITHMS. The implementation resolves "auto": a choice by size up here would add guards to compiled graphs.
    algorithm: str = "auto"
    # Hides keys j < pos(i) - left from query i; -1: no bound. Softmax only.
    left: int = -1
    # Hides keys j > pos(i) + right from query i; -1: no bound. Softmax only.
    right: int = -1
    # Keys with |pos(i) - j| < exact_window are local keys, of weight exp(s): see `fastmax.ops.exact_window`. 0: there are none.
    exact_window: int = 0
    # Number of tokens that the decays of a query reach beyond its position: log_decay has m + lag tokens, and key j has for
    # query i the decays of the tokens j + 1 to pos(i) + lag. Visibility does not depend on it. Calls for the global keys of an
    # exact window have one, because their queries are that many tokens later. No operator takes it.
    lag: int = 0

    # Tensors that accompany q, k and v; None if the call has none.

    # Padding: True = the key is attended, False = it is hidden from all queries of its batch entry.
    attention_mask: Annotated[Tensor | None, Accompanying("b m", torch.bool, of_global_keys=True, of_states=True)] = None
    # Standard normal noise. The output is multiplied by 1 + dropout * drop_noise. A constant to autograd.
    drop_noise: Annotated[Tensor | None, Accompanying("b h n dv")] = None
    # Relative positions: for query i, row j - i + n - 1 is added to k_j. There are n + m - 1 rows, one for each distance.
    rpe_matrix: Annotated[Tensor | None, Accompanying("distance d", differentiable=True, has_kernels=False)] = None
    # Log of the decay at each token: the weight of key j for query i is multiplied by exp of the sum over tokens j + 1 to
    # pos(i) (and `lag` more). Finite and <= 0, or NaN: `fastmax.prepare.bounds` turns -inf into a bound in `k_start`.
    log_decay: Annotated[
        Tensor | None, Accompanying("b hk m", differentiable=True, of_global_keys=True, of_states=True, needs_causal=True)
    ] = None
    # First key that each query may see: keys j < k_start[i] are hidden. Must not decrease with i. It encodes where packed
    # sequences begin and where log_decay is -inf. -1: in a call that continues from a state, the state is visible too.
    k_start: Annotated[Tensor | None, Accompanying("b hk n", torch.int32, of_global_keys=True, of_states=True)] = None
    # End of the keys that each query may see: keys j >= k_end[i] are hidden. Must not decrease with i. It encodes where packed
    # sequences end, in calls that are not causal.
    k_end: Annotated[Tensor | None, Accompanying("b hk n", torch.int32)] = None
    # Log of the factor of each key's weight, which the weight of key j is multiplied by, except in an exact window. From -60 to
    # 30, or NaN: `fastmax.prepare.bounds` clamps it.
    log_input_gate: Annotated[
        Tensor | None,
        Accompanying(
            "b hk m",
            differentiable=True,
            of_global_keys=True,
            of_local_keys=False,
            of_states=True,
            needs_causal=True,
        ),
    ] = None

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The tensors that get a gradient; None for those that the call does not have."""
        return tuple([getattr(self, name) for name in _DIFFERENTIABLE])


_HINTS = get_type_hints(Call, include_extras=True)
ACCOMPANYING = {name: hint.__metadata__[0] for name, hint in _HINTS.items() if hasattr(hint, "__metadata__")}
# Names of the tensors with a number per token and key/value head.
PER_HEAD = tuple(name for name, x in ACCOMPANYING.items() if x.per_head)
_DIFFERENTIABLE = tuple(name for name, x in ACCOMPANYING.items() if x.differentiable)
SCORE = "float scale, float a0, float a1, float a2, int p"  # the fields of Score, as arguments of a schema
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
    """The arguments of a registered operator that make up a `Call`: tensors, score, options, and `allow_tf32`.

    Only kernels read `allow_tf32`. PyTorch's matrix products follow its precision setting by themselves.

    Args:
        score: the type of the score.
        options: names of the options, in the order of the schema.
        tensors: names of the accompanying tensors, in the order of the schema.
    """

    def __init__(self, score: type[Score] | type[Softmax], options: tuple[str, ...], tensors: tuple[str, ...]):
        self.score = score
        self.option_names = options
        self.tensor_names = tensors
        self.differentiable = tuple(name for name in tensors if name in _DIFFERENTIABLE)
        self.differentiable_places = tuple(i for i, name in enumerate(tensors) if name in _DIFFERENTIABLE)
        self.gradient_names = ("q", "k", "v", *self.differentiable)
        # For each tensor, the place of its gradient among the results of the backward.
        self._results = [self.gradient_names.index(name) if name in self.differentiable else None for name in tensors]
        self._options = [Call._fields.index(name) for name in options]
        self._tensors = [Call._fields.index(name) for name in tensors]
        # An operator without `causal` or `algorithm` has one form of it.
        others = [name for name in Call._field_defaults if name not in (*tensors, *options, "causal", "algorithm")]
        self._foreign = [(Call._fields.index(name), Call._field_defaults[name]) for name in others]

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
        """The results of a backward in its schema: gradients of q, k, v and of the differentiable tensors."""
        return ", ".join(f"Tensor grad_{name}" for name in self.gradient_names)

    def flatten(self, call: Call, allow_tf32: bool) -> tuple[tuple[Tensor | None, ...], tuple]:
        """Returns the tensors, and the score and options, in the order of the schema.

        Raises:
            ValueError: the call has a tensor or an option that the schema has not.
        """
        for i, default in self._foreign:
            if call[i] is not default and (default is None or call[i] != default):
                accepted = ", ".join((*self.tensor_names, *self.option_names))
                raise ValueError(f"{Call._fields[i]} is not supported by this operator, which takes {accepted}")
        return tuple([call[i] for i in self._tensors]), (*call.score, *[call[i] for i in self._options], allow_tf32)

    def call(self, arguments: Sequence) -> Call:
        """Returns the call that `arguments`, the values for `schema`, make up."""
        names = (*self.tensor_names, *self.option_names)
        tensors, options = arguments[: len(self.tensor_names)], arguments[len(self.tensor_names) : -1]
        score, options = self.score(*options[: len(self.score._fields)]), options[len(self.score._fields) :]
        return Call(score, **dict(zip(names, (*tensors, *options), strict=True)))

    def gradients(self, results: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns the results of a backward as a dict: name of a tensor -> its gradient."""
        return dict(zip(self.gradient_names, results, strict=True))

    def of_inputs(self, results: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Returns a gradient, or None, for q, k, v and each tensor of the schema; `tensors` are their values in the call."""
        of_tensors = [None if x is None or i is None else results[i] for i, x in zip(self._results, tensors, strict=True)]
        return results[0], results[1], results[2], *of_tensors


FASTMAX = Signature(Score, ("causal", "dropout", "algorithm"), ("attention_mask", "drop_noise", "rpe_matrix", *PER_HEAD))
# Calls that continue from a state. They are causal and use the linear algorithm.
CONTINUED = Signature(Score, (), tuple(name for name, x in ACCOMPANYING.items() if x.of_states))
EXACT_WINDOW = Signature(Score, ("causal", "algorithm", "exact_window"), ("attention_mask", *PER_HEAD))
FLASH = Signature(
    Softmax, ("causal", "left", "right"), ("attention_mask", *[name for name in PER_HEAD if ACCOMPANYING[name].of_softmax])
)
