"""`merge_`, `far_forward_` and `far_backward_`: what joins the far keys of an exact window to the near ones."""

from __future__ import annotations

import torch

from fastmax import eager
from fastmax.core.call import FAR, FASTMAX
from fastmax.ops import checks as operator_checks
from fastmax.ops import extension, registration
from fastmax.ops.autocast import without_autocast
from fastmax.ops.fused import fake_gradients
from fastmax.ops.registration import LIBRARY

registration.define("merge_(Tensor(a!) o, Tensor(b!) lse, Tensor o_far, Tensor z_far, Tensor? shift) -> (Tensor z)")

registration.define(f"far_forward_(Tensor(a!) o, Tensor(b!) lse, Tensor q, Tensor k, Tensor v, {FAR.schema}) -> (Tensor z)")

registration.define(
    f"far_backward_(Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor(c!) grad_v, Tensor grad_o, Tensor? grad_z, "
    f"Tensor q, Tensor k, Tensor v, Tensor o, Tensor z, {FAR.schema}) -> (Tensor grad_log_decay)"
)


def _merge_(o, lse, o_far, z_far, shift):
    operator_checks.check_merge(o, lse, o_far, z_far, shift)
    with without_autocast(o):
        return eager.merge_(o, lse, o_far, z_far, shift)


def _far_call(q, k, v, arguments):
    call = FAR.call(arguments)._replace(causal=True)
    operator_checks.check_call(q, k, v, call)
    return call


def _far_forward_(o, lse, q, k, v, *arguments):
    """Joins attention over far keys to o and lse of near ones: the sums of weights of both, as `merge_` returns them."""
    tensors, options = FASTMAX.flatten(_far_call(q, k, v, arguments), arguments[-1])
    operator_checks.check_joined(q, o=(o, (*q.shape[:3], v.shape[3])))
    operator_checks.check_results(q, v, lse=lse)
    o_far, z_far = extension.call(torch.ops.fastmax.forward.default, q, k, v, *tensors, *options)
    return extension.call(torch.ops.fastmax.merge_.default, o, lse, o_far, z_far, None)


def _far_backward_(grad_q, grad_k, grad_v, grad_o, grad_z, q, k, v, o, z, *arguments):
    """Adds to gradients of q, k and v those by far keys, o and z being of all keys; that of log_decay, or no elements."""
    tensors, options = FASTMAX.flatten(_far_call(q, k, v, arguments), arguments[-1])
    operator_checks.check_joined(q, grad_q=(grad_q, q.shape), grad_k=(grad_k, k.shape), grad_v=(grad_v, v.shape))
    operator_checks.check_results(q, v, o=o, grad_o=grad_o, z=z, grad_z=grad_z)
    grads = extension.call(torch.ops.fastmax.backward.default, grad_o, grad_z, q, k, v, o, z, *tensors, *options)
    grads = FASTMAX.gradients(grads)
    for name, whole in (("q", grad_q), ("k", grad_k), ("v", grad_v)):
        whole.add_(grads[name])
    return grads["log_decay"]


registration.implement("merge_", _merge_)

registration.implement("far_forward_", _far_forward_)

registration.implement("far_backward_", _far_backward_)


@torch.library.register_fake("fastmax::merge_", lib=LIBRARY)
def _merge_fake_(o, lse, o_far, z_far, shift):
    return z_far.new_empty(z_far.shape)


@torch.library.register_fake("fastmax::far_forward_", lib=LIBRARY)
def _far_forward_fake_(o, lse, *arguments):
    return lse.new_empty(lse.shape)


@torch.library.register_fake("fastmax::far_backward_", lib=LIBRARY)
def _far_backward_fake_(grad_q, grad_k, grad_v, grad_o, grad_z, q, k, v, o, z, *arguments):
    return fake_gradients(grad_o, grad_z, q, k, v, o, z, *arguments, signature=FAR)[FAR.gradient_names.index("log_decay")]


registration.writes_over("merge_", 2, "fastmax.merge_attention")

registration.writes_over("far_forward_", 2, "fastmax.fastmax_attention with exact_window")

registration.writes_over("far_backward_", 3, "fastmax.fastmax_attention with exact_window")
