"""Input gates: each key's weight is multiplied by exp(log_input_gate), where the polynomial or softmax attention weighs it.

A gate of NaN counts as 0 in the sums (`without_nan`), and the rows that weigh its key are set to NaN afterwards
(`with_nan_rows`). With a NaN in a sum, all later queries would become NaN, including those that do not see the key.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastmax.core.call import Call
from fastmax.eager.decay import add_tokens, may_hold_nan

LEAST, GREATEST = -60.0, 30.0  # sums of weights, and their inverses times gradients, stay in the range of float32


def clamped(log_input_gate: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns gates in a dtype, clamped to the accepted range; clamped gates get gradient 0."""
    return log_input_gate.to(dtype).clamp(LEAST, GREATEST)


def without_nan(log_input_gate: Tensor) -> Tensor:
    """Returns gates with 0 in place of NaN."""
    if not may_hold_nan(log_input_gate):
        return log_input_gate
    return torch.where(log_input_gate.isnan(), 0.0, log_input_gate)


def nan_rows(call: Call, n: int) -> Tensor | None:
    """Returns which of the last n queries weigh a key by a gate of NaN, bool (b, hk, n); None if no gate is NaN."""
    gate = call.log_input_gate
    if gate is None or not may_hold_nan(gate):
        return None
    m = gate.shape[-1]
    tokens = torch.arange(m, device=gate.device)
    is_nan = gate.isnan()
    if call.attention_mask is not None:
        is_nan = is_nan & call.attention_mask.unsqueeze(1)
    last = torch.where(is_nan, tokens, -1).cummax(-1).values
    if call.exact_window > 0:  # keys in the window have no gate
        last = F.pad(last, (min(call.exact_window, m), 0), value=-1)
    last = last[..., m - n : m]
    weighed = last >= (0 if call.k_start is None else call.k_start[..., call.k_start.shape[-1] - n :].clamp(min=0))
    return weighed if call.left < 0 else weighed & (last >= tokens[m - n :] - call.left)


def with_nan_rows(o: Tensor, z: Tensor, call: Call, in_place: bool) -> tuple[Tensor, Tensor]:
    """Returns the output (b, h, n, dv) and the sums (b, h, n) of a call, with NaN in its `nan_rows`."""
    is_nan = nan_rows(call, z.shape[2])
    if is_nan is None:
        return o, z
    factor = torch.where(is_nan, torch.nan, torch.ones((), dtype=z.dtype, device=z.device))
    factor = factor.repeat_interleave(z.shape[1] // max(1, is_nan.shape[1]), dim=1)
    if in_place:
        return o.mul_(factor.unsqueeze(-1)), z.mul_(factor)
    return (o * factor.unsqueeze(-1)).to(o.dtype), z * factor


class GateGradient:
    """Accumulates the gradient of log_input_gate over a head group: the sums over each key's pairs of `p_ij = w_ij u_ij`, the
    gradient with respect to the logarithm of the weight of a pair."""

    def __init__(self, log_input_gate: Tensor):
        self._sum = torch.zeros_like(log_input_gate, dtype=torch.float64, memory_format=torch.contiguous_format)

    def add_keys(self, start: int, x: Tensor) -> None:
        """Adds sums over queries, x (b * hk * count, length), of the keys from `start` on."""
        add_tokens(self._sum, start, x)

    def result(self) -> Tensor:
        """Returns the gradient, (b, hk, m) in float64."""
        return self._sum
