"""Registers the operators `torch.ops.fastmax`: schema, implementation, kernel, fake implementation and flop formula together.

A CUDA kernel of an operator is itself an operator, `torch.ops.fastmax_cuda.<name>` with the same schema, which the compiled
library implements. It has nothing else: no gradient, no fake implementation, no other device. `Operator` decides, before a call
is dispatched, whether the kernel or the PyTorch implementation runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fastmax import eager
from fastmax.ops import extension

LIBRARY = torch.library.Library("fastmax", "DEF")
_KERNELS = torch.library.Library("fastmax_cuda", "DEF")
OPERATORS: dict[str, Operator] = {}  # name -> registered operator
FLOP_FORMULAS: dict[str, Callable[..., int]] = {}  # name of an operator -> its formula

_UNOBSERVED = frozenset({Tensor, torch.nn.Parameter, type(None), bool, int, float, str})


class Operator:
    """A registered operator with its PyTorch implementation and, for some calls on CUDA, a kernel.

    Args:
        overload: the operator of `torch.ops.fastmax`.
        implementation: PyTorch operations for every device.
        kernel: the operator of `torch.ops.fastmax_cuda`, or None.
        covers: returns whether the kernel computes a call, given the arguments of the schema.
    """

    def __init__(
        self,
        overload: torch._ops.OpOverload,
        implementation: Callable,
        kernel: torch._ops.OpOverload | None,
        covers: Callable[..., bool] | None,
    ):
        self.overload = overload
        self.implementation = implementation
        self.kernel = kernel
        self.covers = covers

    def __call__(self, *arguments):
        """Computes a call. It is dispatched only if autograd, a compiler or anything else has to see the operator."""
        if torch.compiler.is_compiling() or _is_observed(arguments):
            return self.overload(*arguments)
        return self.run(*arguments)

    def run(self, *arguments):
        """Computes a call by the kernel or the implementation. Dispatched calls arrive here, too."""
        if self.covers is not None and self.covers(*arguments):
            return extension.call(self.kernel, *arguments)
        return self.implementation(*arguments)


def _is_observed(arguments: tuple) -> bool:
    """Returns whether autograd, a mode, a transform, a trace or the type of an argument takes part in a call's dispatch."""
    return (
        (torch.is_grad_enabled() and any([isinstance(x, Tensor) and x.requires_grad for x in arguments]))
        or torch._C._len_torch_dispatch_stack() > 0
        or eager.is_transformed()
        or torch.jit.is_tracing()
        or not _UNOBSERVED.issuperset(map(type, arguments))
    )


def register(
    schema: str,
    implementation: Callable,
    fake: Callable,
    *,
    kernel_of: str | None = None,
    covers: Callable[..., bool] | None = None,
    flops: Callable[..., int] | None = None,
) -> Operator:
    """Registers an operator of `torch.ops.fastmax` and returns it.

    Args:
        schema: name, arguments and results, as `torch.library.Library.define` takes them.
        implementation: PyTorch operations for every device.
        fake: returns results without values, for compilers and fake tensors.
        kernel_of: names of the tensors (b, heads, tokens, d) that a CUDA kernel of this name computes, separated by spaces,
            if their device, dtype and width allow it. None: there is no kernel, or `covers` decides alone.
        covers: returns whether the kernel computes a call that `kernel_of` allows, given the arguments; None: it does. A call
            with wrong arguments may count either way, because kernels and implementations check their arguments.
        flops: returns the count for `torch.utils.flop_counter`, given the arguments and `out_val`; None for an operator
            without matrix products.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    packet, kernel = getattr(torch.ops.fastmax, name), None
    if kernel_of is not None:
        covers = _covers_heads(packet.default, kernel_of.split(), covers)
    if covers is not None:
        _KERNELS.define(schema)
        _KERNELS.impl(name, torch.library.fallthrough_kernel, "Autograd")  # the overload has the gradient
        kernel = getattr(torch.ops.fastmax_cuda, name).default
    operator = OPERATORS[name] = Operator(packet.default, implementation, kernel, covers)
    LIBRARY.impl(name, operator.run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastmax::{name}", fake, lib=LIBRARY)
    if flops is not None:
        FLOP_FORMULAS[name] = flops
        register_flop_formula(packet, get_raw=True)(flops)
    return operator


def _covers_heads(overload: torch._ops.OpOverload, names: list[str], covers: Callable[..., bool] | None) -> Callable[..., bool]:
    """Returns `Operator.covers` for `kernel_of` and `covers` of `register`."""
    arguments = [argument.name for argument in overload._schema.arguments]
    indices = [arguments.index(name) for name in names]

    def covers_call(*arguments) -> bool:
        return extension.has_kernels(*[arguments[i] for i in indices]) and (covers is None or covers(*arguments))

    return covers_call


def refuse_gradient(operator: Operator, refuse: Callable[..., None], written: slice) -> None:
    """Registers that an operator writes to some of its arguments and has no gradient.

    Args:
        refuse: called with the tensors (or None) among the arguments; raises an error if a gradient would be recorded.
        written: the arguments that the operator writes to.
    """
    overload = operator.overload
    name = overload._schema.name.removeprefix("fastmax::")

    def autograd(keyset: Any, *args: object) -> object:
        refuse(*[x for x in args if x is None or isinstance(x, Tensor)])
        return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def count_versions(keyset: Any, *args: object) -> object:
        # Autograd may have saved these tensors for an earlier call. The version lets its backward notice the change.
        torch.autograd.graph.increment_version(args[written])
        return overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    LIBRARY.impl(name, count_versions, "ADInplaceOrView", with_keyset=True)


def refuse_to_differentiate(name: str, instead: str) -> Callable[..., None]:
    """Returns a function that raises an error if one of its tensors is differentiated. The error names the operator and what
    to use instead."""

    def refuse(*tensors: Tensor | None) -> None:
        if eager.differentiating(*tensors):
            raise RuntimeError(f"torch.ops.fastmax.{name} has no gradient: use {instead}")

    return refuse
