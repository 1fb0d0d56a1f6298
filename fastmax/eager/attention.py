"""Attention in PyTorch operations, on any device: forward (fused, or recorded by autograd) and analytic backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmax.core.call import ACCOMPANYING, PER_HEAD, Call
from fastmax.eager.blocks import (
    Gradients,
    InputGradients,
    Span,
    by_kv_head,
    compute_dtype,
    empty_like_layout,
    from_blocks,
    head_groups,
)
from fastmax.eager.dispatch import RecordedOutput, finish_of, operands, plan_of, row_inputs, row_terms_of, tiles_of
from fastmax.eager.input_gate import with_nan_rows
from fastmax.eager.workspace import Workspace


class AttentionGradients(NamedTuple):
    """The gradients of `forward`."""

    inputs: InputGradients
    tensors: dict[str, Tensor | None]  # of the call's differentiable tensors, by name; None for an absent tensor


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, differentiable: bool) -> tuple[Tensor, Tensor]:
    """Returns the output (b, h, n, dv) in q's dtype and layout, and the denominators (b, h, n) in the compute dtype.

    Softmax attention and exact windows return the log-sum-exp in place of the denominators. With `differentiable`, autograd can
    record all operations; otherwise large temporaries are written in place.
    """
    o, z = with_nan_rows(*_without_noise(q, k, v, call, differentiable), call, in_place=not differentiable)
    if call.drop_noise is None:
        return o, z
    add = torch.addcmul if differentiable else Tensor.addcmul_
    return add(o, o, call.drop_noise, value=call.dropout), z


def _without_noise(q: Tensor, k: Tensor, v: Tensor, call: Call, differentiable: bool) -> tuple[Tensor, Tensor]:
    """Returns the result of `forward` without dropout noise."""
    finish = finish_of(call)
    o = empty_like_layout(q, v.shape[-1])
    z = q.new_full(q.shape[:3], tiles_of(call).NO_KEYS, dtype=compute_dtype(q.dtype))
    if o.numel() == 0 or k.numel() == 0:
        o.zero_()
        given = (x for x in (q, k, v, *call.differentiable) if x is not None)
        zero = sum(x.flatten()[:0].sum() for x in given)  # connects the result to the autograd graph
        return (o + zero, z + zero) if differentiable else (o, z)
    module, plan = plan_of(q, k, v, call)
    (b, hk), workspace = k.shape[:2], Workspace(z.dtype, q.device)
    if differentiable:  # all heads in one group
        ops = operands(*_widened(q, k, v, call))
        output = RecordedOutput(ops, finish)
        module.forward(ops, plan._replace(heads=b * hk), output, None)
        return output.join(q)
    for group in head_groups(b, hk, plan.heads):
        ops = operands(q, k, v, call, group)
        o_group, z_group = by_kv_head(o, hk)[group], by_kv_head(z.unsqueeze(-1), hk)[group]

        def write(
            span: Span, sums: tuple[Tensor, ...], like: Tensor = ops.q, o_group: Tensor = o_group, z_group: Tensor = z_group
        ) -> None:
            rows = slice(span.start, span.stop)
            of_heads = (from_blocks(x, span, like) for x in sums)
            z_group[:, :, :, rows] = finish(*of_heads, out=o_group[:, :, :, rows])[1]

        module.forward(ops, plan, write, workspace)
    return o, z


def _widened(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Call]:
    """Returns the inputs in the compute dtype, so that autograd sums the gradients of the blocks in it and rounds them once."""
    dtype, rpe = compute_dtype(q.dtype), call.rpe_matrix
    call = call._replace(rpe_matrix=None if rpe is None else rpe.to(dtype))
    return q.to(dtype), k.to(dtype), v.to(dtype), call


def backward(
    grad_o: Tensor, grad_z: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, z: Tensor, call: Call
) -> AttentionGradients:
    """Returns the gradients of q, k and v in their dtypes and layouts, and of the call's differentiable tensors.

    With g_i and e_i of `row_terms`, the derivative of the loss with respect to the weight w_ij is `u_ij = g_i . v_j + e_i`; for
    softmax, with respect to the normalised weight. The tiles derive the other gradients from it (`fastmax.eager.tiles`).

    `grad_z` is the gradient of the denominators or of the log-sum-exp. It is ignored for queries that see no key.
    """
    rpe = call.rpe_matrix
    grads = InputGradients.zeros(q, k, v)
    grad_rpe: Any = None if rpe is None else torch.zeros_like(rpe, dtype=compute_dtype(rpe.dtype))
    tensors = {name: getattr(call, name) for name in PER_HEAD if ACCOMPANYING[name].differentiable}
    tensors = {
        name: None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format) for name, x in tensors.items()
    }
    if q.numel() > 0 and k.numel() > 0:
        b, hk = k.shape[:2]
        rows = row_inputs(grad_o, grad_z, o, z, call)
        module, plan = plan_of(q, k, v, call)
        workspace = Workspace(compute_dtype(q.dtype), q.device)
        for group in head_groups(b, hk, plan.heads):
            ops = operands(q, k, v, call, group)
            sums = Gradients(ops, grads.of_group(group, hk), grad_rpe)
            module.backward(ops, plan, row_terms_of(ops, rows, hk, group), sums, workspace)
            sums.write()
            for name, x in sums.per_head().items():
                tensors[name][group] = x.to(tensors[name].dtype)
    return AttentionGradients(grads, {"rpe_matrix": None if rpe is None else grad_rpe.to(rpe.dtype), **tensors})
