"""Registers the operators `torch.ops.fastmax`: schema, implementation, fake implementation and flop formula together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fastmax import eager
from fastmax.ops import extension

LIBRARY = torch.library.Library("fastmax", "DEF")
NAMES: list[str] = []  # names of the registered operators
FLOP_FORMULAS: dict[str, Callable[..., int]] = {}  # name of an operator -> its formula


def register(
    schema: str,
    implementation: Callable,
    fake: Callable,
    *,
    flops: Callable[..., int] | None = None,
    fallback_of_kernels: bool = True,
) -> torch._ops.OpOverload:
    """Registers an operator of `torch.ops.fastmax` and returns it.

    Args:
        schema: name, arguments and results, as `torch.library.Library.define` takes them.
        implementation: PyTorch operations for every device. A kernel of the compiled library takes precedence on CUDA.
        fake: returns results without values, for compilers and fake tensors.
        flops: returns the count for `torch.utils.flop_counter`, given the arguments and `out_val`; None for an operator
            without matrix products.
        fallback_of_kernels: whether to register the implementation also as `eager_<name>`. A kernel of the library calls that
            operator where it does not cover a call.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    NAMES.append(name)
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    if fallback_of_kernels:
        LIBRARY.define(f"eager_{schema}")
        NAMES.append(f"eager_{name}")
        LIBRARY.impl(f"eager_{name}", extension.remembering(implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastmax::{name}", fake, lib=LIBRARY)
    packet = getattr(torch.ops.fastmax, name)
    if flops is not None:
        FLOP_FORMULAS[name] = flops
        register_flop_formula(packet, get_raw=True)(flops)
    return packet.default


def refuse_gradient(operator: torch._ops.OpOverload, refuse: Callable[..., None], written: slice) -> None:
    """Registers that an operator writes to some of its arguments and has no gradient.

    Args:
        refuse: called with the tensors (or None) among the arguments; raises an error if a gradient would be recorded.
        written: the arguments that the operator writes to.
    """
    name = operator._schema.name.removeprefix("fastmax::")

    def autograd(keyset: Any, *args: object) -> object:
        refuse(*[x for x in args if x is None or isinstance(x, Tensor)])
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def count_versions(keyset: Any, *args: object) -> object:
        # Autograd may have saved these tensors for an earlier call. The version lets its backward notice the change.
        torch.autograd.graph.increment_version(args[written])
        return operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    LIBRARY.impl(name, count_versions, "ADInplaceOrView", with_keyset=True)


def refuse_to_differentiate(name: str, instead: str) -> Callable[..., None]:
    """Returns a function that raises an error if one of its tensors is differentiated. The error names the operator and what
    to use instead."""

    def refuse(*tensors: Tensor | None) -> None:
        if eager.differentiating(*tensors):
            raise RuntimeError(f"torch.ops.fastmax.{name} has no gradient: use {instead}")

    return refuse
