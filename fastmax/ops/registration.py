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
NAMES: list[str] = []  # of the registered operators
FLOP_FORMULAS: dict[str, Callable[..., int]] = {}  # by the name of the operator


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
        fake: results without values, for compilers and fake tensors.
        flops: what `torch.utils.flop_counter` counts, from the arguments and `out_val`; None for an operator without matrix
            products.
        fallback_of_kernels: also registers the implementation as `eager_<name>`, the name by which a kernel of the library
            passes on calls that it does not cover.
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
    """Registers that an operator writes over its arguments `written` and has no gradient.

    Args:
        refuse: called with the tensors (or None) among the arguments; raises an error where a gradient would be recorded.
    """
    name = operator._schema.name.removeprefix("fastmax::")

    def autograd(keyset: Any, *args: object) -> object:
        refuse(*[x for x in args if x is None or isinstance(x, Tensor)])
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def count_versions(keyset: Any, *args: object) -> object:
        # Autograd may have saved the tensors for an earlier call.
        torch.autograd.graph.increment_version(args[written])
        return operator.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    LIBRARY.impl(name, count_versions, "ADInplaceOrView", with_keyset=True)


def refuse_to_differentiate(name: str, instead: str) -> Callable[..., None]:
    """Returns a function that raises an error, which names the operator and what to use instead, where one of its tensors is
    differentiated."""

    def refuse(*tensors: Tensor | None) -> None:
        if eager.differentiating(*tensors):
            raise RuntimeError(f"torch.ops.fastmax.{name} has no gradient: use {instead}")

    return refuse
