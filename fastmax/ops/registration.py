"""The library of operators `torch.ops.fastmax`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastmax import eager
from fastmax.ops import extension

LIBRARY = torch.library.Library("fastmax", "DEF")
NAMES: list[str] = []  # of the operators that are declared


def define(schema: str, twin: bool = True) -> None:
    """Declares an operator, and with `twin` the name `eager_*` by which kernels hand calls on to PyTorch operations."""
    for whole in (schema, f"eager_{schema}") if twin else (schema,):
        LIBRARY.define(whole)
        NAMES.append(whole[: whole.index("(")])


def implement(name: str, implementation: Callable) -> None:
    """In PyTorch operations, for every device; where kernels hand calls on, also by the name `eager_*` that they call."""
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    if f"eager_{name}" in NAMES:
        LIBRARY.impl(f"eager_{name}", extension.remembering(implementation), "CompositeExplicitAutograd")


def writes_over(name: str, written: int, instead: str) -> None:
    """An operator that writes over its first arguments, so many, and has no gradient."""
    operator = getattr(torch.ops.fastmax, name).default

    def refuse(keyset, *args):
        if eager.differentiating(*[x for x in args if x is None or isinstance(x, Tensor)]):
            raise RuntimeError(f"torch.ops.fastmax.{name} has no gradient: use {instead}")
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def count_versions(keyset, *args):
        torch.autograd.graph.increment_version(args[:written])
        return operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    LIBRARY.impl(name, refuse, "Autograd", with_keyset=True)
    LIBRARY.impl(name, count_versions, "ADInplaceOrView", with_keyset=True)
