"""`merge_`, `global_forward_` and `global_backward_` add attention to global keys of an exact window to that of local keys."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastmax import eager
from fastmax.core.call import FASTMAX, GLOBAL
from fastmax.ops import checks as operator_checks
from fastmax.ops.autocast import without_autocast
from fastmax.ops.flops import count_attention
from fastmax.ops.fused import fake_gradients
from fastmax.ops.registration import OPERATORS, refuse_gradient, refuse_to_differentiate, register


def _merge_(o, lse, o_global, z_global, shift):
    operator_checks.check_merge(o, lse, o_global, z_global, shift)
    with without_autocast(o):
        return eager.merge_(o, lse, o_global, z_global, shift)


def _fake_merge_(o, lse, o_global, z_global, shift):
    return z_global.new_empty(z_global.shape)


def _has_dense_rows(o, *arguments) -> bool:
    return o.stride(3) == 1 or o.shape[3] == 1


_MERGE = register(
    "merge_(Tensor(a!) o, Tensor(b!) lse, Tensor o_global, Tensor z_global, Tensor? shift) -> (Tensor z)",
    _merge_,
    _fake_merge_,
    kernel_of="o",
    covers=_has_dense_rows,
)
refuse_gradient(_MERGE, refuse_to_differentiate("merge_", "fastmax.merge_attention"), written=slice(2))


def _global_call(q, k, v, arguments):
    call = GLOBAL.call(arguments)._replace(causal=True)
    operator_checks.check_call(q, k, v, call)
    return call


def _global_forward_(o, lse, q, k, v, *arguments):
    """Merges attention to global keys into o and lse of the local keys. Returns the sums of all weights, as `merge_` does."""
    tensors, options = FASTMAX.flatten(_global_call(q, k, v, arguments), arguments[-1])
    operator_checks.check_joined(q, o=(o, (*q.shape[:3], v.shape[3])))
    operator_checks.check_results(q, v, lse=lse)
    o_global, z_global = OPERATORS["forward"](q, k, v, *tensors, *options)
    return _MERGE(o, lse, o_global, z_global, None)


def _fake_global_forward_(o, lse, *arguments):
    return lse.new_empty(lse.shape)


def _global_forward_flops(o, lse, q, k, v, *arguments, out_val=None) -> int:
    return count_attention(q, k, v, GLOBAL.call(arguments)._replace(causal=True), backward=False)


_GLOBAL_FORWARD = register(
    f"global_forward_(Tensor(a!) o, Tensor(b!) lse, Tensor q, Tensor k, Tensor v, {GLOBAL.schema}) -> (Tensor z)",
    _global_forward_,
    _fake_global_forward_,
    kernel_of="o q",
    covers=_has_dense_rows,
    flops=_global_forward_flops,
)
_INSTEAD = "fastmax.fastmax_attention with exact_window"
refuse_gradient(_GLOBAL_FORWARD, refuse_to_differentiate("global_forward_", _INSTEAD), written=slice(2))


def _global_backward_(grad_q, grad_k, grad_v, grad_o, grad_z, q, k, v, o, z, *arguments):
    """Adds the gradients through global keys to grad_q, grad_k and grad_v. o and z are the results over all keys. Returns the
    gradients of the call's differentiable tensors, which have no elements for tensors that the call does not have."""
    tensors, options = FASTMAX.flatten(_global_call(q, k, v, arguments), arguments[-1])
    operator_checks.check_joined(q, grad_q=(grad_q, q.shape), grad_k=(grad_k, k.shape), grad_v=(grad_v, v.shape))
    operator_checks.check_results(q, v, o=o, grad_o=grad_o, z=z, grad_z=grad_z)
    grads = OPERATORS["backward"](grad_o, grad_z, q, k, v, o, z, *tensors, *options)
    grads = FASTMAX.gradients(grads)
    for name, whole in (("q", grad_q), ("k", grad_k), ("v", grad_v)):
        whole.add_(grads[name])
    return _results([grads[name] for name in GLOBAL.differentiable])


_GRADIENTS = ", ".join(f"Tensor grad_{name}" for name in GLOBAL.differentiable)


def _results(gradients: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """Returns results as an operator with the schema `_GRADIENTS` returns them."""
    return gradients[0] if len(gradients) == 1 else tuple(gradients)


def _fake_global_backward_(grad_q, grad_k, grad_v, grad_o, grad_z, q, k, v, o, z, *arguments):
    return _results(fake_gradients(GLOBAL, grad_o, grad_z, q, k, v, o, z, *arguments)[3:])


def _global_backward_flops(grad_q, grad_k, grad_v, grad_o, grad_z, q, k, v, o, z, *arguments, out_val=None) -> int:
    return count_attention(q, k, v, GLOBAL.call(arguments)._replace(causal=True), backward=True)


_GLOBAL_BACKWARD = register(
    f"global_backward_(Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor(c!) grad_v, Tensor grad_o, Tensor? grad_z, "
    f"Tensor q, Tensor k, Tensor v, Tensor o, Tensor z, {GLOBAL.schema}) -> ({_GRADIENTS})",
    _global_backward_,
    _fake_global_backward_,
    kernel_of="q v",
    flops=_global_backward_flops,
)
refuse_gradient(_GLOBAL_BACKWARD, refuse_to_differentiate("global_backward_", _INSTEAD), written=slice(3))
