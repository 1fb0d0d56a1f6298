"""Relative positions: the rpe matrix, and its sinusoidal form as additional channels of q and k."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmax.core import validation


def _frequencies(d: int, device: torch.device | str | None) -> Tensor:
    """Returns `w_f = 10000^(-2f/d)` for each pair of columns, float64."""
    return 10000.0 ** (-2.0 * torch.arange((d + 1) // 2, dtype=torch.float64, device=device) / d)


def rpe_matrix_creator(
    n: int,
    d: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    structured: bool = False,
    is_zero: bool = True,
) -> Tensor:
    """Returns a relative-position matrix for n queries and n keys.

    Args:
        n: sequence length, >= 1.
        d: head dim, >= 1 (odd too).
        device, dtype: of the result; any float dtype.
        structured: True: sinusoids, `sin(t w_f)` and `cos(t w_f)` interleaved, with `w_f = 10000^(-2f/d)` (Vaswani et al.
            2017, with the distance t in place of the position). False: zeros or noise.
        is_zero: without `structured`, zeros (True) or standard normal noise (False).

    Returns:
        (2n - 1, d). Row r is for the distance `t = n - 1 - r`; row 0 is for the key that lies farthest before the query.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    for name, value in (("n", n), ("d", d)):
        validation.check_count(name, value)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        got = dtype if isinstance(dtype, torch.dtype) else validation.describe(dtype)
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {got}")
    validation.check_bool("structured", structured)
    validation.check_bool("is_zero", is_zero)
    if not structured:
        make = torch.zeros if is_zero else torch.randn
        return make(2 * n - 1, d, device=device, dtype=dtype)
    t = torch.arange(n - 1, -n, -1, dtype=torch.float64, device=device)
    angles = t[:, None] * _frequencies(d, device)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[:, :d].to(dtype)


def token_positions(first: int | Tensor, count: int, device: torch.device) -> Tensor:
    """Returns positions `first, first + 1, ...`, float64 (count,), or (b, 1, count) for `first` (b, 1, 1)."""
    return torch.arange(count, dtype=torch.float64, device=device) + first


def append_sinusoidal_query(q: Tensor, positions: Tensor) -> Tensor:
    """Returns [q, q~] for queries at these positions: (..., n, d) -> (..., n, d + 2 ceil(d / 2)).

    `positions` is float64 (n,), or (b, 1, n) for q (b, h, n, d).

    By the angle-addition formula `q_i . r_(i-j) = q~_i . u_j` with `u_j = [cos(j w), sin(j w)]`. Sinusoidal relative positions
    therefore need twice the head dim, but no matrix.
    """
    d = q.shape[-1]
    cos, sin = _angles(positions, d, q.dtype)
    even, odd = q[..., 0::2], q[..., 1::2]
    if d % 2:
        odd = torch.nn.functional.pad(odd, (0, 1))
    rotated = even * sin + odd * cos, odd * sin - even * cos
    return torch.cat([q, *(x.to(q.dtype) for x in rotated)], dim=-1)


def append_sinusoidal_key(k: Tensor, positions: Tensor) -> Tensor:
    """Returns [k, u] for keys at these positions; see `append_sinusoidal_query`."""
    cos, sin = _angles(positions, k.shape[-1], k.dtype)
    u = torch.cat([cos, sin], dim=-1).to(k.dtype)
    return torch.cat([k, u.expand(*k.shape[:-1], u.shape[-1])], dim=-1)


def _angles(positions: Tensor, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of position times frequency, (..., tokens, ceil(d / 2)), float64 for float64 and float32 for other
    dtypes. The product is float64, because positions can be in the millions."""
    angles = positions.unsqueeze(-1) * _frequencies(d, positions.device)
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return angles.cos().to(dtype), angles.sin().to(dtype)
