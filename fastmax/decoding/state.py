"""`DecodeState`: the state of recurrent attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fastmax import eager
from fastmax.core.score import Score
from fastmax.decoding.batch_state import BatchState


def width_of_keys(head_dim: int, sinusoidal: bool) -> int:
    """Returns the number of channels of q and k, including those that a sinusoidal rpe_matrix appends."""
    return head_dim + 2 * ((head_dim + 1) // 2) if sinusoidal else head_dim


@dataclass(eq=False, repr=False)
class DecodeState(BatchState):
    """The state of recurrent attention: sums over the tokens seen so far, and options. `init_state` makes the first one.

    `kv_state` (b, hk, features, dv) holds sums of the features of k times v, and `k_sum` (b, hk, features) holds sums of the
    features. Both are float64 for float64 tokens, else float32. The features are `1`, `k_a` and, for p = 2, `k_a k_b` with
    `a <= b`, in this order. With a sinusoidal rpe_matrix, k includes the appended channels, and `positions` (b,) int64 is the
    position of the next token. `tokens` is the number of tokens passed so far, including padding and, for packed sequences, the
    tokens of all sequences. `cat` takes the largest number.

    With an exact window of W tokens, the sums hold the tokens before the last W. `local_keys` (b, hk, W, d), `local_values`
    (b, hk, W, dv), `local_mask` (b, W) and `local_decays` (b, hk, W) hold the last W tokens, oldest first. Keys and values are
    in the dtype of q, k and v; log_decay is in the dtype of the sums. The mask is False for masked tokens and for unused
    places. `local_gates` (b, hk, W), also in the dtype of the sums, holds their log_input_gate. It is None until the first call
    with gates or `with_gates`; earlier tokens then have gates of 0.

    With `flush_interval` = T above 1, a buffer of up to T tokens precedes the last W. `step_` appends each new token. Once T
    tokens are buffered, it adds the oldest T to the sums together. The `local_` tensors have W + T places, and `local_mask` is
    (b, hk, W + T). `buffered` (b, hk) int32 is the number of buffered tokens, 0 to T. They have the same weights as tokens in
    the sums. The places after the last token are unused.

    `torch.save`, `torch.load` (with the default `weights_only=True`), `copy.deepcopy` and `torch.utils._pytree` support states.
    Two states are equal only if they are the same object.
    """

    kv_state: Tensor
    k_sum: Tensor
    tokens: int
    dtype: torch.dtype  # of q, k and v
    head_dim: int  # of q and k as the caller passes them
    score: Score
    normalize: str | None
    lim: float
    positions: Tensor | None = None  # None without a sinusoidal rpe_matrix
    exact_window: int = 0
    local_keys: Tensor | None = None  # None without an exact window, as are the following
    local_values: Tensor | None = None
    local_mask: Tensor | None = None
    local_decays: Tensor | None = None
    flush_interval: int = 1
    buffered: Tensor | None = None  # None where flush_interval is 1
    local_gates: Tensor | None = None  # None before the first log_input_gate, and without local tokens

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name. The first dimension of each is the batch."""
        return {name: x for name in _TENSORS if (x := getattr(self, name)) is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> DecodeState:
        """Returns the state with `function` applied to each of its tensors."""
        return replace(self, **{name: function(x) for name, x in self.tensors().items()})

    def with_gates(self) -> DecodeState:
        """Returns the state with `local_gates`, 0 if there are none yet; without local tokens the same state."""
        if self.local_decays is None or self.local_gates is not None:
            return self
        return replace(self, local_gates=torch.zeros_like(self.local_decays, memory_format=torch.contiguous_format))

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.kv_state.device

    @classmethod
    def _cat(cls, states: Sequence[DecodeState]) -> DecodeState:
        if any(state.local_gates is not None for state in states):
            states = [state.with_gates() for state in states]
        tensors = {name: torch.cat([getattr(state, name) for state in states]) for name in states[0].tensors()}
        return replace(states[0], tokens=max(state.tokens for state in states), **tensors)

    def options(self) -> dict:
        """Returns the options that states must share for `cat`, with the shapes of the tensors."""
        tensors = self.tensors()
        tensors.pop("local_gates", None)  # `cat` adds those that a state lacks
        options = {name: x for name, x in vars(self).items() if name not in tensors and name not in ("tokens", "local_gates")}
        return options | {f"shape of {name}": tuple(x.shape[1:]) for name, x in tensors.items()}

    def _moved(self, device: torch.device | str | int | None, dtype: torch.dtype, non_blocking: bool) -> DecodeState:
        wide = eager.compute_dtype(dtype)

        def move(name: str, x: Tensor) -> Tensor:
            floating = dtype if name in _TOKENS else wide
            return x.to(device=device, dtype=floating if x.is_floating_point() else x.dtype, non_blocking=non_blocking)

        return replace(self, dtype=dtype, **{name: move(name, x) for name, x in self.tensors().items()})

    def __repr__(self) -> str:
        options = {name: f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else x for name, x in self.tensors().items()}
        if isinstance(self.kv_state, Tensor):
            options["device"] = self.device
        options |= {"tokens": self.tokens, "dtype": self.dtype, "head_dim": self.head_dim, "p": self.score.order}
        options |= {"temperature": f"{1.0 / self.score.scale:g}"}
        if self.exact_window > 0:
            options |= {"exact_window": self.exact_window}
        if self.flush_interval > 1:
            options |= {"flush_interval": self.flush_interval}
        options |= {name: f"{getattr(self.score, name):g}" for name in ("a0", "a1", "a2")}
        if self.normalize is not None:
            options |= {"normalize": repr(self.normalize), "lim": f"{self.lim:g}"}
        return f"DecodeState({', '.join(f'{name}={value}' for name, value in options.items())})"

    def __getstate__(self) -> dict:
        """Returns the fields as plain types, so that files do not depend on internal classes of the package."""
        return vars(self) | {"score": tuple(self.score)}

    def __setstate__(self, saved: dict) -> None:
        # __init__ raises an error for unknown fields, for example from a file of a later version.
        self.__init__(**(saved | {"score": Score(*saved["score"])}))  # type: ignore[misc]


_TOKENS = ("local_keys", "local_values")  # in the dtype of q, k and v
_TENSORS = tuple(field.name for field in fields(DecodeState) if field.type.startswith("Tensor"))

torch.serialization.add_safe_globals([DecodeState])


def _flatten(state: DecodeState) -> tuple[list[Tensor], tuple]:
    tensors = state.tensors()
    options = tuple((name, value) for name, value in vars(state).items() if name not in tensors)
    return list(tensors.values()), (tuple(tensors), options)


def _flatten_with_keys(state: DecodeState) -> tuple[list[tuple], tuple]:
    tensors, context = _flatten(state)
    return [(pytree.GetAttrKey(name), x) for name, x in zip(context[0], tensors, strict=True)], context


def _unflatten(tensors: Sequence, context: tuple) -> DecodeState:
    names, options = context
    return DecodeState(**dict(zip(names, tensors, strict=True)), **dict(options))


pytree.register_pytree_node(DecodeState, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)
