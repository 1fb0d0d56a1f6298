"""What a direct call of an operator of `torch.ops.fastmax` must hold to, for the PyTorch implementation.

`csrc/bindings/checks.h` holds CUDA calls to the same. Calls through `fastmax.functional` were checked before.
"""

from __future__ import annotations

import math

from torch import Tensor

from fastmax import validation
from fastmax.score import Score


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    noise: Tensor | None,
    rpe: Tensor | None,
    score: Score,
    causal: bool,
    algorithm: str,
) -> None:
    """Of `forward` and `backward`."""
    check_flash_call(q, k, v, mask, score.scale, causal)
    if score.order not in (1, 2):
        raise ValueError(f"p must be 1 or 2, got {score.order}")
    validation.check_drop_noise(noise, q, v.shape[-1])
    validation.check_rpe(rpe, q, k)
    validation.check_algorithm(algorithm, None)  # an rpe matrix always runs on the quadratic one


def check_flash_call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool) -> None:
    """Of `flash_forward` and `flash_backward`."""
    if q.dim() != 4:
        raise ValueError(f"q must be 4-dimensional, got {q.dim()} dimensions")
    validation.check_qkv(q, k, v, causal)
    validation.check_key_padding_mask(mask, q, k)
    if not 0.0 < scale < math.inf:
        raise ValueError(f"scale must be finite and > 0, got {scale}")


def check_results(q: Tensor, v: Tensor, **tensors: Tensor | None) -> None:
    """The forward's results and gradients of them: o and grad_o like the output, the others with a number per query."""
    for name, x in tensors.items():
        if x is None:
            continue
        is_output = name in ("o", "grad_o")
        shape = (*q.shape[:3], v.shape[3]) if is_output else q.shape[:3]
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
        if is_output and x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
