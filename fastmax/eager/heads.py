"""The parts of a self-attention layer around attention: convolution, norms, rotation and gate, and their gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmax.eager.blocks import compute_dtype, empty_like_layout


def convolve(x: Tensor, weight: Tensor, recent: Tensor | None, places: Tensor | None) -> Tensor:
    """Returns the causal depthwise convolution of x.

    Args:
        x: (b, n, channels).
        weight: (channels, 1, width), as `nn.Conv1d` has it. It is cast to the dtype of x.
        recent: (b, width - 1, channels), the tokens before x. None: zeros.
        places: int (n,), index of each token in its packed sequence. None: x is one sequence.
    """
    n, before = x.shape[1], weight.shape[-1] - 1
    tokens, weight = _with_recent(x, recent, before), weight[:, 0].to(x.dtype)
    y = x * weight[:, before]
    for t in range(1, before + 1):  # elementwise, so that a split sequence gives the same bits
        y = torch.addcmul(y, _of_sequence(tokens.narrow(1, before - t, n), places, t), weight[:, before - t])
    return y


def _with_recent(x: Tensor, recent: Tensor | None, before: int) -> Tensor:
    """Returns the tokens of `recent`, or zeros, and those of x."""
    recent = x.new_zeros(x.shape[0], before, x.shape[2]) if recent is None else recent
    return torch.cat([recent, x], dim=1)


def _of_sequence(x: Tensor, places: Tensor | None, t: int) -> Tensor:
    """Returns x with zeros at tokens that have fewer than t tokens before them in their sequence."""
    return x if places is None else torch.where((places >= t).unsqueeze(-1), x, 0)


def rms_norm(rows: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """Applies RMS norm to rows (..., d). `weight` (d,) is cast to the dtype of the rows."""
    return F.rms_norm(rows, weight.shape, weight.to(rows.dtype), eps)


def rotary_factors(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the cosines and signed sines that `rotate` takes, (n, 1, r) or (b, n, 1, r) with r = 2 half.

    The f-th angle of a token is `position * base^(-f / half)`, f < half. Angles are float64, because float32 has too few
    digits for the angle of position 10^6.

    Args:
        positions: int (n,) or (b, n).
        dtype: of the results.
    """
    frequencies = base ** (torch.arange(half, dtype=torch.float64, device=positions.device) / -half)
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(-2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x (b, n, h, d) with the first r channels rotated: pairs of channels f and f + r / 2 by the f-th angle.

    Args:
        cos: (n, 1, r) or (b, n, 1, r), in the compute dtype of x. It multiplies the rotated channels.
        sin: like cos. It multiplies the same channels with their halves exchanged.
    """
    turning = cos.shape[-1]
    rows, still = x.to(cos.dtype).split((turning, x.shape[-1] - turning), dim=-1)
    turned = torch.addcmul(rows * cos, rows.roll(turning // 2, dims=-1), sin)
    return torch.cat([turned, still], dim=-1).to(x.dtype)


def split_heads(
    qkv: Tensor,
    recent: Tensor | None,
    conv_weight: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    places: Tensor | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_eps: float | None,
    k_eps: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q (b, n, heads, head_dim), k and v (b, n, kv_heads, ...) of the tokens of a projection.

    The channels of q, k and v are convolved. The heads of q and k are normalised, then rotated.

    Args:
        qkv: (b, n, channels), the channels of q, k and v, all heads of each together.
        recent, conv_weight, places: of `convolve`. None: no convolution.
        q_weight, k_weight: of `rms_norm`. None: no norm.
        cos, sin: of `rotate`. None: no rotation.
        q_eps, k_eps: of `rms_norm`.
    """
    dtype = qkv.dtype
    if conv_weight is not None:
        qkv = convolve(qkv, conv_weight, recent, places)
    q, k, v = heads_of(qkv, heads, kv_heads, head_dim)
    q = q if q_weight is None else rms_norm(q, q_weight, q_eps)
    k = k if k_weight is None else rms_norm(k, k_weight, k_eps)
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def value_dim_of(channels: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Returns the width of the heads of v in tokens that have the channels of q, k and v."""
    return (channels - (heads + kv_heads) * head_dim) // kv_heads


def heads_of(qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views of the heads of q, k and v."""
    of_q, of_k = heads * head_dim, kv_heads * head_dim
    value_dim = value_dim_of(qkv.shape[-1], heads, kv_heads, head_dim)
    q, k, v = qkv.split((of_q, of_k, kv_heads * value_dim), dim=-1)
    return q.unflatten(-1, (heads, head_dim)), k.unflatten(-1, (kv_heads, head_dim)), v.unflatten(-1, (kv_heads, value_dim))


def split_heads_backward(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    qkv: Tensor,
    recent: Tensor | None,
    conv_weight: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    places: Tensor | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_eps: float,
    k_eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of qkv, recent, conv_weight, q_weight and k_weight; None for those that are None.

    Args:
        grads: gradients of q, k and v. None: zeros.
    """
    wide = compute_dtype(qkv.dtype)
    x, n = qkv.to(wide), qkv.shape[1]
    before = 0 if conv_weight is None else conv_weight.shape[-1] - 1
    tokens = _with_recent(x, None if recent is None else recent.to(wide), before)
    weight, convolved = None, x
    if conv_weight is not None:
        weight = conv_weight[:, 0].to(qkv.dtype).to(wide)
        convolved = convolve(x, weight.unsqueeze(1), None if recent is None else recent.to(wide), places)
    of_heads, of_norms = [], []
    norms = ((q_weight, q_eps), (k_weight, k_eps), (None, 0.0))
    for i, rows in enumerate(heads_of(convolved, heads, kv_heads, head_dim)):
        given = grads[i]
        grad = torch.zeros_like(rows) if given is None else given.to(wide)
        if i < 2 and cos is not None and sin is not None:
            turning = cos.shape[-1]
            turned, still = grad.split((turning, grad.shape[-1] - turning), dim=-1)
            turned = turned * cos + (turned * sin).roll(turning // 2, dims=-1)
            grad = torch.cat([turned, still], dim=-1)
        norm, eps = norms[i]
        if norm is not None:
            grad, of_norm = _rms_norm_backward(grad, rows, norm.to(qkv.dtype).to(wide), eps)
            of_norms.append(of_norm.to(norm.dtype))
        elif i < 2:
            of_norms.append(None)
        of_heads.append(grad.flatten(2))
    grad = torch.cat(of_heads, dim=-1)
    if weight is None or conv_weight is None:
        return grad.to(qkv.dtype), None, None, *of_norms
    of_tokens, of_weight = torch.zeros_like(tokens), torch.empty_like(weight)
    for t in range(before + 1):
        part = grad if t == 0 else _of_sequence(grad, places, t)
        of_weight[:, before - t] = (part * tokens.narrow(1, before - t, n)).sum((0, 1))
        of_tokens.narrow(1, before - t, n).addcmul_(part, weight[:, before - t])
    of_recent = None if recent is None else of_tokens[:, :before].to(recent.dtype, copy=True).contiguous()
    of_qkv = of_tokens[:, before:].to(qkv.dtype, copy=True).contiguous()
    return of_qkv, of_recent, of_weight.unsqueeze(1).to(conv_weight.dtype), *of_norms


def _rms_norm_backward(grad: Tensor, rows: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the gradients of rows (b, n, h, d) and of the weight."""
    scale = (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    normalized, of_normalized = rows * scale, grad * weight
    along = (of_normalized * normalized).mean(-1, keepdim=True)
    return scale * (of_normalized - normalized * along), (grad * normalized).sum((0, 1, 2))


def join_heads(o: Tensor, norm_weight: Tensor | None, gate: Tensor | None, eps: float | None) -> Tensor:
    """Returns the heads of the output side by side, (b, n, h * dv): normalised, and multiplied by silu of a gate.

    Args:
        o: (b, h, n, dv).
        norm_weight: (dv,), of `rms_norm`. None: no norm.
        gate: (b, n, h * dv). None: no gate.
        eps: of `rms_norm`.
    """
    rows = o.transpose(1, 2)
    rows = (rows if norm_weight is None else rms_norm(rows, norm_weight, eps)).flatten(2)
    return rows if gate is None else rows * F.silu(gate)


def join_heads_backward(
    grad_y: Tensor, o: Tensor, norm_weight: Tensor | None, gate: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of o, norm_weight and gate; None for those that are None."""
    wide = compute_dtype(o.dtype)
    rows = o.transpose(1, 2).to(wide)
    grad, of_gate, of_weight = grad_y.to(wide).view(rows.shape), None, None
    weight = None if norm_weight is None else norm_weight.to(o.dtype).to(wide)
    if gate is not None:
        x = gate.to(wide).reshape(rows.shape)
        sigmoid = x.sigmoid()
        slope = sigmoid * (1 + x * (1 - sigmoid))
        normalized = rows if weight is None else rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
        of_gate = (grad * normalized * slope).reshape(gate.shape).to(gate.dtype)
        grad = grad * (x * sigmoid)
    if weight is not None and norm_weight is not None:
        grad, of_weight = _rms_norm_backward(grad, rows, weight, eps)
        of_weight = of_weight.to(norm_weight.dtype)
    return empty_like_layout(o, o.shape[-1]).copy_(grad.transpose(1, 2)), of_weight, of_gate
