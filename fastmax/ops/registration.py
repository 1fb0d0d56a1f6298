"""Registers the operators `torch.ops.fastmax`: schema, implementation, kernel, fake implementation and flop formula together.

A CUDA kernel of an operator is itself an operator, `torch.ops.fastmax_cuda.<name>`, which the compiled library implements. It
has the same schema without the tensors that kernels do not read (`Accompanying.has_kernels`), and no gradient and no other
device. `Operator` decides, before a call is dispatched, whether the kernel or the PyTorch implementation computes it.

A graph that `torch.compile` makes calls the operators of kernels themselves, so that no Python runs when the graph does: see
`Operator.trace`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils.flop_counter import register_flop_formula

from fastmax import eager
from fastmax.core.call import ACCOMPANYING
from fastmax.ops import extension

LIBRARY = torch.library.Library("fastmax", "DEF")
_KERNELS = torch.library.Library("fastmax_cuda", "DEF")
OPERATORS: dict[str, Operator] = {}  # name -> registered operator
FLOP_FORMULAS: dict[str, Callable[..., int]] = {}  # name of an operator -> its formula

_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_tracing = torch._C._is_tracing  # torch.jit.trace
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_NOT_IN_KERNELS = frozenset(name for name, x in ACCOMPANYING.items() if not x.has_kernels)
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), bool, int, float, str})


class Kernel:
    """The CUDA kernel of an operator, and the calls that it computes.

    Args:
        schema: of the operator.
        fake, kernel_of, covers: as for `register`.
    """

    def __init__(self, schema: str, fake: Callable, kernel_of: str | None, covers: Callable[..., bool] | None):
        name = schema[: schema.index("(")]
        declared = getattr(torch.ops.fastmax, name).default._schema
        arguments, results = ([x.name for x in given] for given in (declared.arguments, declared.returns))
        self._heads = [arguments.index(tensor) for tensor in (kernel_of or "").split()]
        self._fake = fake
        self._covers = covers
        self._unread = [i for i, tensor in enumerate(arguments) if tensor in _NOT_IN_KERNELS]
        self._read = itemgetter(*[i for i in range(len(arguments)) if i not in self._unread])
        self._missing = [i for i, result in enumerate(results) if result.removeprefix("grad_") in _NOT_IN_KERNELS]
        for tensor in _NOT_IN_KERNELS:
            schema = schema.replace(f"Tensor? {tensor}, ", "").replace(f", Tensor grad_{tensor}", "")
        _KERNELS.define(schema)
        _KERNELS.impl(name, torch.library.fallthrough_kernel, "Autograd")  # the operator has the gradient
        torch.library.register_fake(f"fastmax_cuda::{name}", self._fake_results, lib=_KERNELS)
        self._kernel = getattr(torch.ops.fastmax_cuda, name).default

    def covers(self, arguments: tuple) -> bool:
        """Returns whether the kernel computes a call."""
        if self._heads:
            if not extension.kernels_run_on(arguments[self._heads[0]]):
                return False
            for i in self._heads:
                x = arguments[i]
                if x.dim() != 4 or x.size(3) > extension.MAX_HEAD_DIM:
                    return False
        for i in self._unread:
            if arguments[i] is not None:
                return False
        return self._covers is None or self._covers(*arguments)

    def __call__(self, arguments: tuple) -> Any:
        """Returns the results of a call that the kernel covers. Gradients of tensors that it does not read are None.

        Raises:
            torch.OutOfMemoryError: the library ran out of memory. The library itself can only raise a RuntimeError.
        """
        try:
            results = self._kernel(*(self._read(arguments) if self._unread else arguments))
        except RuntimeError as error:
            if type(error) is RuntimeError and "out of memory" in str(error):
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        if not self._missing:
            return results
        results = list(results) if isinstance(results, tuple) else [results]
        for i in self._missing:
            results.insert(i, None)
        return tuple(results)

    def _fake_results(self, *read: Any) -> Any:
        """Returns results without values of the kernel, given the tensors that it reads and the options."""
        arguments = list(read)
        for i in self._unread:
            arguments.insert(i, None)
        results = self._fake(*arguments)
        return tuple([x for i, x in enumerate(results) if i not in self._missing]) if self._missing else results


class Operator:
    """A registered operator with its PyTorch implementation and, for some calls on CUDA, a kernel.

    Args:
        overload: the operator of `torch.ops.fastmax`.
        implementation: PyTorch operations for every device.
        kernel: None if there is none.
        is_backward: whether it computes gradients from gradients.
    """

    def __init__(
        self, overload: torch._ops.OpOverload, implementation: Callable, kernel: Kernel | None, is_backward: bool = False
    ):
        self.overload = overload
        self.implementation = implementation
        self.kernel = kernel
        self._is_backward = is_backward

    def __call__(self, *arguments: Any) -> Any:
        """Computes a call. It is dispatched only if autograd, a compiler or anything else has to see the operator.

        A gradient of a tensor that the call does not have is None or a tensor without elements.
        """
        if torch.compiler.is_compiling() or _is_observed(arguments) or (self._is_backward and _has_batched(arguments)):
            return self.overload(*arguments)
        kernel = self.kernel
        if kernel is not None and kernel.covers(arguments):
            return kernel(arguments)
        return self.implementation(*arguments)

    def run(self, *arguments: Any) -> Any:
        """Computes a dispatched call. It is what the overload does on every device."""
        if self.kernel is None or not self.kernel.covers(arguments):
            return self.implementation(*arguments)
        return _without_none(self.kernel(arguments))

    def trace(
        self, mode: ProxyTorchDispatchMode, overload: torch._ops.OpOverload, types: tuple, arguments: tuple, kwargs: Any
    ) -> Any:
        """Records a call in a graph.

        In a graph of `torch.compile` it is a call of the kernel if that covers the call: devices, dtypes and sizes of fake
        tensors tell. Exported programs, which may run on other devices, keep the operator.
        """
        compiles = TracingContext.try_get() is not None and not mode.pre_dispatch and not torch.compiler.is_exporting()
        kernel: Any = self.kernel  # `register` registers this method for operators with a kernel alone
        if not compiles or not kernel.covers(arguments):
            return mode.__torch_dispatch__(overload, types, arguments, kwargs)
        with mode:
            return _without_none(kernel(arguments))


def _without_none(results: Any) -> Any:
    """Returns the results of a kernel as those of its operator, which have no elements in place of None."""
    if isinstance(results, tuple):
        return tuple([results[0].new_empty(0) if x is None else x for x in results])
    return results


def _has_batched(arguments: tuple) -> bool:
    """Returns whether `torch.autograd.grad(is_grads_batched=True)` makes the call: gradients of several outputs at once."""
    return any([isinstance(x, Tensor) and _is_batched(x) for x in arguments])


def _is_observed(arguments: tuple) -> bool:
    """Returns whether autograd, a mode, a transform, a trace or the type of an argument takes part in a call's dispatch.

    Meta tensors are dispatched too: the registered fake implementation has their results.
    """
    if torch.is_grad_enabled() and any([isinstance(x, Tensor) and x.requires_grad for x in arguments]):
        return True
    if _dispatch_modes() > 0 or eager.is_transformed() or _is_tracing():
        return True
    first = arguments[0]
    if first is None:  # a gradient that is absent
        first = next(x for x in arguments if x is not None)
    return first.is_meta or not _PLAIN.issuperset(map(type, arguments))


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
        kernel_of: names of tensors (b, heads, tokens, d), separated by spaces. A CUDA kernel of this name computes calls where
            the device and dtype of the first and the widths of all allow it. None: there is no kernel, or `covers` decides.
        covers: returns whether the kernel computes a call that `kernel_of` allows, given the arguments; None: it does. A call
            with wrong arguments may count either way, because kernels and implementations check their arguments.
        flops: returns the count for `torch.utils.flop_counter`, given the arguments and `out_val`; None for an operator
            without matrix products.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    packet = getattr(torch.ops.fastmax, name)
    kernel = None if kernel_of is None and covers is None else Kernel(schema, fake, kernel_of, covers)
    operator = OPERATORS[name] = Operator(packet.default, implementation, kernel, "backward" in name)
    LIBRARY.impl(name, operator.run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastmax::{name}", fake, lib=LIBRARY)
    if kernel is not None:
        torch.library.register_torch_dispatch(f"fastmax::{name}", ProxyTorchDispatchMode, operator.trace, lib=LIBRARY)
    if flops is not None:
        FLOP_FORMULAS[name] = flops
        register_flop_formula(packet, get_raw=True)(flops)
    return operator


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
        torch.autograd.graph.increment_version([x for x in args[written] if x is not None])
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
