"""Registers the operators `torch.ops.fastmax`: schema, implementation, kernel, fake implementation and flop formula together.

A CUDA kernel of an operator is itself an operator, `torch.ops.fastmax_cuda.<name>`, which the compiled library implements. It
has the same schema without the tensors that kernels do not read (`Accompanying.has_kernels`), and nothing else: no gradient, no
fake implementation, no other device. `Operator` decides, before a call is dispatched, whether the kernel or the PyTorch
implementation runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fastmax import eager
from fastmax.core.call import ACCOMPANYING
from fastmax.ops import extension

LIBRARY = torch.library.Library("fastmax", "DEF")
_KERNELS = torch.library.Library("fastmax_cuda", "DEF")
OPERATORS: dict[str, Operator] = {}  # name -> registered operator
FLOP_FORMULAS: dict[str, Callable[..., int]] = {}  # name of an operator -> its formula

_UNREAD = frozenset(name for name, x in ACCOMPANYING.items() if not x.has_kernels)
_UNOBSERVED = frozenset({Tensor, torch.nn.Parameter, type(None), bool, int, float, str})


class Operator:
    """A registered operator with its PyTorch implementation and, for some calls on CUDA, a kernel.

    Args:
        overload: the operator of `torch.ops.fastmax`.
        implementation: PyTorch operations for every device.
        kernel: takes the same arguments and returns the same results; None: there is no kernel.
        covers: returns whether the kernel computes a call, given the arguments.
    """

    def __init__(
        self,
        overload: torch._ops.OpOverload,
        implementation: Callable,
        kernel: Callable | None = None,
        covers: Callable[..., bool] | None = None,
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
            return self.kernel(*arguments)
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
    if kernel_of is not None or covers is not None:
        kernel, covers = _define_kernel(schema, packet.default, (kernel_of or "").split(), covers)
    operator = OPERATORS[name] = Operator(packet.default, implementation, kernel, covers)
    LIBRARY.impl(name, operator.run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastmax::{name}", fake, lib=LIBRARY)
    if flops is not None:
        FLOP_FORMULAS[name] = flops
        register_flop_formula(packet, get_raw=True)(flops)
    return operator


def _define_kernel(
    schema: str, overload: torch._ops.OpOverload, kernel_of: list[str], covers: Callable[..., bool] | None
) -> tuple[Callable, Callable[..., bool]]:
    """Defines the operator of `torch.ops.fastmax_cuda`; returns `kernel` and `covers` for `Operator`."""
    name = schema[: schema.index("(")]
    declared = overload._schema
    arguments, results = ([x.name for x in given] for given in (declared.arguments, declared.returns))
    heads = [arguments.index(tensor) for tensor in kernel_of]
    unread = [i for i, tensor in enumerate(arguments) if tensor in _UNREAD]
    missing = [i for i, result in enumerate(results) if result.removeprefix("grad_") in _UNREAD]

    for tensor in _UNREAD:
        schema = schema.replace(f"Tensor? {tensor}, ", "").replace(f", Tensor grad_{tensor}", "")
    _KERNELS.define(schema)
    _KERNELS.impl(name, torch.library.fallthrough_kernel, "Autograd")  # the overload has the gradient
    kernel = getattr(torch.ops.fastmax_cuda, name).default
    read = itemgetter(*[i for i in range(len(arguments)) if i not in unread])

    def run_kernel(*arguments):
        results = extension.call(kernel, *read(arguments))
        if not missing:
            return results
        results = list(results)
        for i in missing:
            results.insert(i, results[0].new_empty(0))
        return tuple(results)

    def covers_call(*arguments) -> bool:
        if heads and not extension.has_kernels(*[arguments[i] for i in heads]):
            return False
        return all([arguments[i] is None for i in unread]) and (covers is None or covers(*arguments))

    return run_kernel if unread else partial(extension.call, kernel), covers_call


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
