"""`BatchState`: what every state of generation can do with the entries of its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fastmax.core import validation

if TYPE_CHECKING:
    from typing_extensions import Self


class BatchState:
    """A state made of tensors, the first dimension of each of which is the batch."""

    device: torch.device
    dtype: torch.dtype  # of q, k and v

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name. The first dimension of each is the batch."""
        raise NotImplementedError

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The state with `function` of each of its tensors."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(x.nbytes for x in self.tensors().values())

    def clone(self) -> Self:
        """A state with memory of its own, contiguous. Differentiable."""
        return self.map(lambda x: x.clone(memory_format=torch.contiguous_format))

    def detach(self) -> Self:
        """The state without the graph that made it, on the same memory: where truncated backpropagation through time cuts."""
        return self.map(Tensor.detach)

    def select(self, indices: Tensor | Sequence[int]) -> Self:
        """The state of these batch entries in this order: beams that go on, requests that are left. Differentiable.

        Args:
            indices: (entries,) integers from 0 to b - 1, each as often as wanted; a tensor on any device, or a sequence. Those
                on a CUDA device are not copied to the host to be checked: PyTorch's kernel asserts them.
        """
        batch = next(iter(self.tensors().values())).shape[0]
        indices = _batch_entries(indices, batch, self.device)
        return self.map(lambda x: x.index_select(0, indices))

    @classmethod
    def cat(cls, states: Sequence[Self]) -> Self:
        """One state of the batch entries of these, in this order: prompts that were read apart go on together. Differentiable.

        Args:
            states: at least one, of the same sizes, options, dtype and device; the numbers of tokens that they have seen may
                differ.

        Raises:
            TypeError, ValueError: naming the state that differs from the first, and in what.
        """
        if isinstance(states, BatchState) or not isinstance(states, Iterable):
            raise TypeError(f"states must be a sequence of {cls.__name__}, got {validation.describe(states)}")
        states = list(states)
        if not states:
            raise ValueError(f"states must hold at least one {cls.__name__}, got none")
        for i, state in enumerate(states):
            if not isinstance(state, cls):
                raise TypeError(f"states[{i}] must be a {cls.__name__}, got {validation.describe(state)}")
            given, expected = ({"dtype": x.dtype, "device": x.device} | x.options() for x in (state, states[0]))
            for name in expected:
                if name not in given or given[name] != expected[name]:
                    raise ValueError(
                        f"states[{i}] must have the {name} of states[0], {expected[name]!r}, got {given.get(name)!r}"
                    )
        return cls._cat(states)

    @classmethod
    def _cat(cls, states: Sequence[Self]) -> Self:
        """`cat` of checked states."""
        raise NotImplementedError

    def options(self) -> dict:
        """The options that states of one batch share."""
        raise NotImplementedError

    def repeat(self, repeats: int) -> Self:
        """Returns the state with each batch entry `repeats` times in a row, as `torch.repeat_interleave`: one prompt, several
        continuations. Differentiable."""
        validation.check_count("repeats", repeats)
        return self.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def refuse_outside_inference_mode(self) -> None:
        """Raise where PyTorch would not let a step write the state, before a part of it is written."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():  # the compiler cannot ask
            return
        if any(x.is_inference() for x in self.tensors().values()):
            raise RuntimeError("state was made in inference mode, where alone PyTorch lets it be written: use state.clone()")

    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> Self:
        """Returns the state on another device, or for tokens of another dtype; what is there already is shared, not copied.

        Args:
            device: the new device; as in `Tensor.to`, it may be the dtype.
            dtype: of the q, k and v to come. The sums are float32 for float32, float16 and bfloat16, so between these none of
                them is rounded; they become float64 for float64 and are rounded on the way back. Keys, values and inputs of
                the convolution that the state keeps are rounded to the dtype.
            non_blocking: as in `Tensor.to`.
        """
        if isinstance(device, torch.dtype):
            if dtype is not None:
                raise TypeError(f"to takes one device and one dtype, got {device} and {dtype}")
            device, dtype = None, device
        dtype = self.dtype if dtype is None else dtype
        validation.check_dtype("dtype", dtype)
        return self._moved(device, dtype, non_blocking)

    def _moved(self, device: torch.device | str | int | None, dtype: torch.dtype, non_blocking: bool) -> Self:
        """Returns the state on a device, None being its own, for tokens of a dtype."""
        raise NotImplementedError


def _batch_entries(indices: Tensor | Sequence[int], batch: int, device: torch.device) -> Tensor:
    """Checked, (entries,), on the device of the state whose batch they index."""
    if not isinstance(indices, (Tensor, Sequence, np.ndarray, Real)) or isinstance(indices, (str, bytes)):
        raise TypeError(f"indices must be a tensor or sequence of integers, got {validation.describe(indices)}")
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
