"""The state of recurrent attention: sums over the tokens seen so far, and the options that they were made with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fastmax import eager, validation
from fastmax.score import Score


@dataclass(eq=False, repr=False)
class DecodeState:
    """Sums over the tokens seen so far, and the options they were made with; from `fastmax.init_state`.

    `values` (b, hk, features, dv) and `weights` (b, hk, features) are float32, or float64 for float64 tokens; the features are
    `1`, `k_a` and `k_a k_b` for `a <= b`, in that order (`1 + d` of them for p = 1). With a sinusoidal rpe_matrix d counts the
    appended channels, and `positions` (b,) int64 is where the next token stands. `tokens` counts what was seen, in packed
    sequences of all of them together.

    With an exact window of W tokens the sums hold the tokens before the last W, and `near_keys` (b, hk, W, d), `near_values`
    (b, hk, W, dv), `near_mask` (b, W) and `near_decays` (b, hk, W) are those W, oldest first: keys and values in the dtype of
    q, k and v, whether each takes part (False in places that no token has yet), and its log_decay, in the dtype of the sums.

    `torch.save`, `torch.load` (with its default `weights_only=True`), `copy.deepcopy` and `torch.utils._pytree` know it; two
    states are equal only where they are the same object.
    """

    values: Tensor
    weights: Tensor
    tokens: int
    dtype: torch.dtype  # of q, k and v
    head_dim: int  # of q and k as the caller passes them
    score: Score
    normalize: str | None
    lim: float
    positions: Tensor | None = None  # None without a sinusoidal rpe_matrix
    exact_window: int = 0
    near_keys: Tensor | None = None  # None without an exact window, as are the following
    near_values: Tensor | None = None
    near_mask: Tensor | None = None
    near_decays: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name. The first dimension of each is the batch."""
        return {name: x for name in _TENSORS if (x := getattr(self, name)) is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> DecodeState:
        """The state with `function` of each of its tensors."""
        return replace(self, **{name: function(x) for name, x in self.tensors().items()})

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(x.nbytes for x in self.tensors().values())

    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> DecodeState:
        """The state on another device, or for tokens of another dtype; what is there already is shared, not copied.

        Args:
            device: where to; as `Tensor.to`, it may be the dtype.
            dtype: of the q, k and v to come. The sums are float32 for float32, float16 and bfloat16, so between these none of
                them is rounded; they become float64 for float64 and are rounded on the way back. The keys and values of an
                exact window are rounded to the dtype.
            non_blocking: as in `Tensor.to`.
        """
        if isinstance(device, torch.dtype):
            if dtype is not None:
                raise TypeError(f"to takes one device and one dtype, got {device} and {dtype}")
            device, dtype = None, device
        dtype = self.dtype if dtype is None else dtype
        validation.check_dtype("dtype", dtype)
        wide = eager.compute_dtype(dtype)

        def move(name: str, x: Tensor) -> Tensor:
            floating = dtype if name in _TOKENS else wide
            return x.to(device=device, dtype=floating if x.is_floating_point() else x.dtype, non_blocking=non_blocking)

        return replace(self, dtype=dtype, **{name: move(name, x) for name, x in self.tensors().items()})

    def clone(self) -> DecodeState:
        """A state with memory of its own, contiguous. Differentiable."""
        return self.map(lambda x: x.clone(memory_format=torch.contiguous_format))

    def detach(self) -> DecodeState:
        """The state without the graph that made it, on the same memory: where truncated backpropagation through time cuts."""
        return self.map(Tensor.detach)

    def select(self, indices: Tensor | Sequence[int]) -> DecodeState:
        """The state of these batch entries in this order: beams that go on, requests that are left. Differentiable.

        Args:
            indices: (entries,) integers from 0 to b - 1, each as often as wanted; a tensor on any device, or a sequence. Those
                on a CUDA device are not copied to the host to be checked: PyTorch's kernel asserts them.
        """
        indices = batch_entries(indices, self.values.shape[0], self.device)
        return self.map(lambda x: x.index_select(0, indices))

    def repeat_interleave(self, repeats: int) -> DecodeState:
        """The state with each batch entry `repeats` times in a row: one prompt, several continuations. Differentiable."""
        validation.check_count("repeats", repeats)
        return self.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def __repr__(self) -> str:
        options = {name: f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else x for name, x in self.tensors().items()}
        if isinstance(self.values, Tensor):
            options["device"] = self.device
        options |= {"tokens": self.tokens, "dtype": self.dtype, "head_dim": self.head_dim, "p": self.score.order}
        options |= {"temperature": f"{1.0 / self.score.scale:g}"}
        if self.exact_window > 0:
            options |= {"exact_window": self.exact_window}
        options |= {name: f"{getattr(self.score, name):g}" for name in ("a0", "a1", "a2")}
        if self.normalize is not None:
            options |= {"normalize": repr(self.normalize), "lim": f"{self.lim:g}"}
        return f"DecodeState({', '.join(f'{name}={value}' for name, value in options.items())})"

    def __getstate__(self) -> dict:
        """Values of plain types alone, so that a file does not depend on the package's inner classes."""
        return vars(self) | {"score": tuple(self.score)}

    def __setstate__(self, saved: dict) -> None:
        # Through __init__: a name that this version does not know, of a later version's file, is an error.
        self.__init__(**(saved | {"score": Score(*saved["score"])}))


def batch_entries(indices: Tensor | Sequence[int], batch: int, device: torch.device) -> Tensor:
    """Checked, (entries,), on the device of the state whose batch they index."""
    indices = torch.as_tensor(indices)
    if indices.numel() == 0:
        indices = indices.long()  # of an empty list
    if indices.dim() != 1 or indices.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            "indices must be a tensor or sequence of integers of shape (entries,), "
            f"got shape {tuple(indices.shape)} of {indices.dtype}"
        )
    on_host = indices.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and not ((indices >= 0) & (indices < batch)).all():
        raise IndexError(f"indices must be from 0 to {batch - 1}, the last batch entry, got {indices.tolist()}")
    return indices.to(device)


_TOKENS = ("near_keys", "near_values")  # in the dtype of q, k and v
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
