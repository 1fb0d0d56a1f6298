"""Finds softmax attention among the operators that PyTorch dispatches, by following its scores and weights.

Attention multiplies two activations, takes a softmax of these scores, and multiplies the weights with an activation. A router's
scores are a product with parameters. Not found: a softmax written as `exp` and a sum, scores that a matrix of parameters mixes
before the softmax, and kernels that PyTorch does not dispatch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

# The operators that multiply two matrices, and the positions of these among their arguments.
_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "matmul", "linear", "convolution"), (0, 1)),
    **dict.fromkeys(("_scaled_mm", "_int_mm", "_grouped_mm", "_scaled_grouped_mm"), (0, 1)),
    **dict.fromkeys(("addmm", "addmv", "addbmm", "baddbmm", "_addmm_activation"), (1, 2)),
}
_FUSED = ("attention", "attn", "transformer_encoder_layer", "fastmax.flash")  # in the names of operators that are attention
_UNINITIALISED = "empty"  # in the names of operators whose result is written later


class Label(enum.Enum):
    """The kinds of values that a tensor can hold. A tensor without label is an activation."""

    CONSTANT = "computed from parameters, buffers and constants alone, without a product"
    SCORES = "computed from a product of two activations"
    WEIGHTS = "computed from a softmax of scores"


class Dataflow:
    """Labels of the tensors that the operators so far have read and written.

    A label belongs to a storage: views share it, and a write into a view changes it.

    Args:
        constants: parameters and buffers.
    """

    def __init__(self, constants: Iterable[Tensor]):
        self._labels: dict[int, tuple[StorageWeakRef, Label | None]] = {}
        for tensor in constants:
            self._set(tensor, Label.CONSTANT)

    def follow(self, operator: str, args: tuple, kwargs: dict, result: object) -> bool:
        """Labels the result of an operator.

        Args:
            operator: its name, as in "aten.mm.default".

        Returns:
            Whether it multiplies attention weights and values.
        """
        name = operator.split(".")[1].rstrip("_") if operator.startswith("aten.") else ""
        given = [x for x in _tensors((args, kwargs)) if x.is_floating_point()]
        labels = [self._get(x) for x in given]
        if name in _PRODUCTS:
            label, is_attention = _of_product(*(self._get(args[index]) for index in _PRODUCTS[name]))
        elif name == "mul" and len(given) == 2:
            label, is_attention = self._of_broadcast(given, labels, result)
        elif "softmax" in name and set(labels) & {Label.SCORES, Label.WEIGHTS}:
            label, is_attention = Label.WEIGHTS, False
        else:
            label, is_attention = _of_other(labels), False
            if not given and name.startswith(_UNINITIALISED):
                label = None
        for tensor in _tensors(result):
            self._set(tensor, None if is_attention else label)
        return is_attention

    def _of_broadcast(self, given: list[Tensor], labels: list, result: object) -> tuple[Label | None, bool]:
        """Labels attention that is written as a product of broadcast tensors, before its sum."""
        size = max(x.numel() for x in _tensors(result))
        if Label.CONSTANT not in labels:
            enlarged = [x.numel() < size for x in given]
            if any(larger and label is Label.WEIGHTS for larger, label in zip(enlarged, labels, strict=True)):
                return None, True
            if all(enlarged):
                return Label.SCORES, False
        return _of_other(labels), False

    def _get(self, tensor: Tensor) -> Label | None:
        if isinstance(tensor, nn.Parameter):
            return Label.CONSTANT
        reference = _storage_of(tensor)
        found = None if reference is None else self._labels.get(reference.cdata)
        return None if found is None else found[1]

    def _set(self, tensor: Tensor, label: Label | None) -> None:
        reference = _storage_of(tensor)
        if reference is not None and label is None:
            self._labels.pop(reference.cdata, None)
        elif reference is not None:
            self._labels[reference.cdata] = reference, label  # the reference keeps the address from being used again


def is_fused_attention(operator: str) -> bool:
    """Returns whether an operator of this name computes attention as a whole."""
    return any(part in operator for part in _FUSED)


def _of_product(a: Label | None, b: Label | None) -> tuple[Label | None, bool]:
    if Label.CONSTANT not in (a, b):
        return (None, True) if Label.WEIGHTS in (a, b) else (Label.SCORES, False)
    return (Label.WEIGHTS if Label.WEIGHTS in (a, b) else None), False


def _of_other(labels: list[Label | None]) -> Label | None:
    for label in (Label.WEIGHTS, Label.SCORES):
        if label in labels:
            return label
    return Label.CONSTANT if all(label is Label.CONSTANT for label in labels) else None


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _storage_of(tensor: Tensor) -> StorageWeakRef | None:
    """Returns None for a tensor without a storage of its own, such as a sparse one."""
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None
