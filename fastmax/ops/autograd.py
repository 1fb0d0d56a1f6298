"""Operators with a gradient: tensors saved for the backward, gradients by name, recording of calls, refused derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from fastmax import eager
from fastmax.core.call import CONTINUED, Signature
from fastmax.ops.registration import LIBRARY, Operator

_NO_SECOND_DERIVATIVE = (
    "fastmax: the custom gradient has no {}; pass use_custom_gradient=False, which differentiates PyTorch operations and "
    "gives the same numbers"
)


def refuse_second_derivative(ctx: Context, *grads: Tensor | None) -> NoReturn:
    """Raises an error, as the backward of a gradient: there is no second derivative."""
    raise RuntimeError(_NO_SECOND_DERIVATIVE.format("second derivative"))


def refuse_derivative_of_state(ctx: Context, *grads: Tensor | None) -> NoReturn:
    """Raises an error, as the backward of `state_of_keys` and `state_of_queries`."""
    raise RuntimeError("fastmax: state_of_keys and state_of_queries have no gradient; prefill, which ends in a state, has")


def refuse_second_derivative_of_prefill(ctx: Context, *grads: Tensor | None) -> NoReturn:
    """Raises an error, as the backward of `prefill_backward`."""
    raise RuntimeError(
        "fastmax: the gradient of prefill has no second derivative; fastmax.decoding.step, token by token, differentiates "
        "PyTorch operations and gives the same numbers"
    )


def refuse_second_derivative_of_normalization(ctx: Context, *grads: Tensor | None) -> NoReturn:
    """Raises an error, as the backward of `normalize_tokens_backward`."""
    raise RuntimeError(
        'fastmax: the gradient of normalize="token" has no second derivative; use_custom_gradient=False, where it is '
        "taken, differentiates PyTorch operations and gives the same numbers"
    )


class Context(Protocol):
    """The argument `ctx` of an autograd function. The forward saves tensors and options in it, which the backward reads."""

    options: tuple  # set by `WithGradient.save`: the arguments after the tensors
    operator: WithGradient  # set by `_Recorded`

    @property
    def saved_tensors(self) -> tuple: ...

    @property
    def needs_input_grad(self) -> tuple[bool, ...]: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class WithGradient(Protocol):
    """An operator, its backward, and what autograd asks of both."""

    @property
    def forward(self) -> Operator: ...

    @property
    def backward(self) -> Operator: ...

    def save(self, ctx: Context, inputs: tuple, output: Any) -> None:
        """Saves what the backward reads, and the options that follow the tensors."""

    # Each operator has its own number of gradients, which are positional: `**_` only tells type checkers so.
    def gradients(self, saved: tuple, options: tuple, needed: tuple, *grads: Any, **_: Any) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the tensors. needed: whether that of each tensor is."""


class Differentiable(NamedTuple):
    """An attention operator and its gradient.

    Args:
        backward_qkv: computes the gradients of q, k and v alone, of calls whose tensors need none.
    """

    signature: Signature
    forward: Operator
    backward: Operator
    backward_qkv: Operator

    def save(self, ctx: Context, inputs: tuple, output: tuple) -> None:
        last = 3 + len(self.signature.tensor_names)
        ctx.save_for_backward(*inputs[:3], *output, *inputs[3:last])
        ctx.options = inputs[last:]
        ctx.set_materialize_grads(False)

    def gradients(
        self, saved: tuple, options: tuple, needed: tuple, grad_o: Tensor | None, grad_z: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of q, k, v and the call's tensors from the saved tensors; z is the second output."""
        names = self.signature.tensor_names
        if grad_o is None and grad_z is None:
            return (None,) * (3 + len(names))
        if grad_o is None:
            grad_o = torch.zeros_like(saved[3])
        tensors = saved[len(saved) - len(names) :]
        if self._spares_gradients(tensors, needed[3:]):
            return *self.backward_qkv(grad_o, grad_z, *saved, *options), *(None,) * len(names)
        results = self.backward(grad_o, grad_z, *saved, *options)
        return self.signature.of_inputs(results, tensors)

    def _spares_gradients(self, tensors: tuple, needed: tuple) -> bool:
        """Returns whether the call has tensors with a gradient, and none is needed."""
        given = [needed[i] for i in self.signature.differentiable_places if tensors[i] is not None]
        return len(given) > 0 and not any(given)


class Prefill(NamedTuple):
    """`prefill` and its gradient."""

    forward: Operator
    backward: Operator

    def save(self, ctx: Context, inputs: tuple, output: tuple) -> None:
        state: Sequence[Tensor | None]
        last = 5 + len(CONTINUED.tensor_names)  # q, k, v, the call's tensors, kv_state and k_sum
        (o, z, *state), ctx.options = output, inputs[last:]
        # Only the gradient of log_decay needs the new state.
        state = (None, None) if self._tensors(inputs[3:])["log_decay"] is None else state
        ctx.save_for_backward(*inputs[:3], o, z, *state, *inputs[3:last])
        ctx.set_materialize_grads(False)

    def gradients(
        self,
        saved: tuple,
        options: tuple,
        needed: tuple,
        grad_o: Tensor | None,
        grad_z: Tensor | None,
        grad_kv_state: Tensor | None,
        grad_k_sum: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of q, k, v, the call's tensors, and the state."""
        if grad_o is None and grad_z is None and grad_kv_state is None and grad_k_sum is None:
            return (None,) * (5 + len(CONTINUED.tensor_names))
        if grad_o is None:
            grad_o = torch.zeros_like(saved[3])
        *results, of_kv_state, of_k_sum = self.backward(grad_o, grad_z, grad_kv_state, grad_k_sum, *saved, *options)
        tensors = tuple(self._tensors(saved[7:]).values())
        return *CONTINUED.of_inputs(results, tensors), of_kv_state, of_k_sum

    @staticmethod
    def _tensors(arguments: tuple) -> dict[str, Tensor | None]:
        return dict(zip(CONTINUED.tensor_names, arguments, strict=False))


class Normalization(NamedTuple):
    """`normalize_tokens` and its gradient."""

    forward: Operator
    backward: Operator

    def save(self, ctx: Context, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*output)  # the results, which attention saves too, and the factors
        ctx.options = inputs[2:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])

    def gradients(
        self, saved: tuple, options: tuple, needed: tuple, grad_q: Tensor | None, grad_k: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        given = (grad_q, grad_k)
        if grad_q is None and grad_k is None:
            return given
        grads = self.backward(*given, *saved, *options)
        return tuple(None if grad is None else x for grad, x in zip(given, grads, strict=True))


class Recomputed(NamedTuple):
    """An operator whose gradient needs its arguments alone.

    Args:
        tensors: number of its tensors, which come first.
        differentiable: number of tensors with a gradient, which come first among them.
    """

    forward: Operator
    backward: Operator
    tensors: int
    differentiable: int

    def save(self, ctx: Context, inputs: tuple, output: Tensor | tuple) -> None:
        ctx.save_for_backward(*inputs[: self.tensors])
        ctx.options = inputs[self.tensors :]
        ctx.set_materialize_grads(False)

    def gradients(self, saved: tuple, options: tuple, needed: tuple, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * self.tensors
        results = self.backward(*grads, *saved, *options)
        given = zip(saved, results, strict=False)  # without tensors that have no gradient
        return *(None if x is None else grad for x, grad in given), *(None,) * (self.tensors - self.differentiable)


def register_gradient(operator: WithGradient, refuse_second: Callable[..., NoReturn]) -> None:
    """Registers the gradient of an operator, and `refuse_second` as the backward of the gradient."""

    def differentiate(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = operator.gradients(ctx.saved_tensors, ctx.options, ctx.needs_input_grad, *grads)
        return *gradients, *(None,) * len(ctx.options)

    torch.library.register_autograd(operator.forward.overload, differentiate, setup_context=operator.save, lib=LIBRARY)
    refuse_derivatives(operator.backward, refuse_second)


def refuse_derivatives(operator: Operator, refuse: Callable[..., NoReturn]) -> None:
    """Registers `refuse`, which raises an error, as the gradient of an operator."""
    torch.library.register_autograd(operator.overload, refuse, lib=LIBRARY)


def compute(operator: WithGradient, tensors: tuple, options: tuple) -> Any:
    """Calls an operator and records its gradient. Raises an error for derivatives that it does not have."""
    if torch.compiler.is_compiling():
        return operator.forward(*tensors, *options)
    if eager.is_transformed():
        given = [x for x in tensors if x is not None]
        if torch.autograd.forward_ad._current_level >= 0 and any(map(_has_tangent, given)):
            raise RuntimeError(_NO_SECOND_DERIVATIVE.format("forward-mode derivative"))
        if torch.is_grad_enabled() and any(map(_is_differentiated_by_functorch, given)):
            raise RuntimeError(_NO_SECOND_DERIVATIVE.format("rule for torch.func's gradients (grad, vjp, jacrev, hessian)"))
        if eager.in_functorch():
            return operator.forward(*tensors, *options)
    if not torch.is_grad_enabled():
        return operator.forward(*tensors, *options)
    return _apply_recorded(operator, options, *tensors)


def _has_tangent(x: Tensor) -> bool:
    """Returns whether x has a tangent in forward mode, possibly inside vmap."""
    while torch._C._functorch.is_batchedtensor(x):  # vmap has no rule for `unpack_dual`
        x = torch._C._functorch.get_unwrapped(x)
    return torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def _is_differentiated_by_functorch(x: Tensor) -> bool:
    """Returns whether a reverse-mode transform of torch.func differentiates with respect to x, also inside or around vmap."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x) and x.requires_grad:
            return True
        x = functorch.get_unwrapped(x)
    return False


class _Recorded(torch.autograd.Function):
    """Records an operator as `register_autograd` does, at a third of the cost per call.

    Compilers and torch.func use the registered gradient.
    """

    @staticmethod
    def forward(ctx: Context, operator: WithGradient, options: tuple, *tensors: Tensor | None) -> Any:
        inputs = (*tensors, *options)
        output = operator.forward(*inputs)
        operator.save(ctx, inputs, output)
        ctx.operator = operator
        return output

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read only once: each access makes a checkpoint recompute
        # With create_graph=True autograd records this, so that derivatives of these gradients raise an error.
        return None, None, *ctx.operator.gradients(saved, ctx.options, ctx.needs_input_grad[2:], *grads)


# `Function.apply` looks at every argument for tensors of a torch.func transform that has ended. The dispatcher does too.
_apply_recorded = super(torch.autograd.Function, _Recorded).apply
