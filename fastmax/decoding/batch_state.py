"""`BatchState`: the methods that all states of generation share."""

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
    """A state for generation. It consists of tensors whose first dimension is the batch."""

    device: torch.device
    dtype: torch.dtype  # of q, k and v

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name. The first dimension of each is the batch."""
        raise NotImplementedError

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Returns the state with `function` applied to each of its tensors."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(x.nbytes for x in self.tensors().values())

    def clone(self) -> Self:
        """Returns a copy of the state with contiguous tensors. Differentiable."""
        return self.map(lambda x: x.clone(memory_format=torch.contiguous_format))

    def detach(self) -> Self:
        """Returns the state without its autograd graph, on the same memory: for truncated backpropagation through time."""
        return self.map(Tensor.detach)

    def select(self, indices: Tensor | Sequence[int]) -> Self:
        """Returns the state of these batch entries, in this order, for example of the surviving beams. Differentiable.

        Args:
            indices: (entries,) integers from 0 to b - 1, with or without repetitions; a tensor on any device, or a sequence.
                Indices on a CUDA device are not copied to the host; PyTorch's kernel checks them by an assertion.
        """
        batch = next(iter(self.tensors().values())).shape[0]
        indices = _batch_entries(indices, batch, self.device)
        return self.map(lambda x: x.index_select(0, indices))

    @classmethod
    def cat(cls, states: Sequence[Self]) -> Self:
        """Returns one state with the batch entries of all states, in this order. Differentiable.

        Use it to continue together with prompts that were prefilled separately.

        Args:
            states: at least one state. All have the same sizes, options, dtype and device; the numbers of tokens seen may
                differ.

        Raises:
            TypeError, ValueError: a state differs from the first one; the message names the state and the difference.
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
        """Returns `cat` of checked states."""
        raise NotImplementedError

    def options(self) -> dict:
        """Returns the options that states must share for `cat`."""
        raise NotImplementedError

    def repeat(self, repeats: int) -> Self:
        """Returns the state with each batch entry `repeats` times in a row, as `torch.repeat_interleave`. Differentiable.

        Use it to generate several continuations of one prompt.
        """
        validation.check_count("repeats", repeats)
        return self.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def refuse_outside_inference_mode(self) -> None:
        """Raises an error if PyTorch would not let `step_` write the state, before a part of it is written."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():  # compilers cannot trace `is_inference`
            return
        if any(x.is_inference() for x in self.tensors().values()):
            raise RuntimeError("state was made in inference mode and cannot be written outside it: use state.clone()")

    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> Self:
        """Returns the state on another device or for another dtype. Tensors that do not change are shared, not copied.

        Args:
            device: the new device; as in `Tensor.to`, it may be the dtype.
            dtype: of later q, k and v. The sums are float64 for float64, else float32; only a change from float64 rounds them.
                Stored keys, values and inputs of the convolution are rounded to the dtype.
            non_blocking: as in `Tensor.to`.
        """
        if isinstance(device, torch.dtype):
            if dtype is not None:
                raise TypeError(f"to takes one device and one dtype, got {device} and {dtype}")
            device, dtype = None, device
        dtype = self.dtype if dtype is None else dtype
        validation.check_dtype("dtype", dtype)
        validation.check_device(device)
        return self._moved(device, dtype, non_blocking)

    def _moved(self, device: torch.device | str | int | None, dtype: torch.dtype, non_blocking: bool) -> Self:
        """Returns the state on a device (None: the same device), for tokens of a dtype."""
        raise NotImplementedError


def _batch_entries(indices: Tensor | Sequence[int], batch: int, device: torch.device) -> Tensor:
    """Checks indices of batch entries; returns them as a tensor (entries,) on the device of the state."""
    if not isinstance(indices, (Tensor, Sequence, np.ndarray, Real)) or isinstance(indices, (str, bytes)):
        raise TypeError(f"indices must be a tensor or sequence of integers, got {validation.describe(indices)}")
    indices = torch.as_tensor(indices)
    if indices.numel() == 0:
        indices = indices.long()  # an empty list becomes a float tensor
    if indices.dim() != 1 or indices.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            "indices must be a tensor or sequence of integers of shape (entries,), "
            f"got shape {tuple(indices.shape)} of {indices.dtype}"
        )
    on_host = indices.device.type == "cpu" and not torch.compiler.is_compiling()
    if on_host and not ((indices >= 0) & (indices < batch)).all():
        raise IndexError(f"indices must be from 0 to {batch - 1}, the last batch entry, got {indices.tolist()}")
    return indices.to(device)
