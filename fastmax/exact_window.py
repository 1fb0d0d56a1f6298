"""Fastmax whose near keys are weighed exactly: `exp(s)` for `|pos(i) - j| < window`, f(s) for the keys beyond.

The near part is softmax with a window. The far part is Fastmax over keys `window` tokens earlier: those of the last queries
without the last keys, which is causal attention again, and without `causal` the same of both sequences reversed. Each part has
its own denominator; `fastmax.merge_attention` makes them one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fastmax.call import Call
from fastmax.merge import merge_attention
from fastmax.score import Softmax

Attend = Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]  # q, k, v, call -> output, log of the sums of weights


def attention_with_exact_window(
    q: Tensor, k: Tensor, v: Tensor, call: Call, window: int, attend: Attend
) -> tuple[Tensor, Tensor]:
    """Output and log of the sums of weights of 4-d tensors, n <= m, window >= 1; `call` has neither noise nor an rpe matrix."""
    n, m = q.shape[2], k.shape[2]
    near = call._replace(score=Softmax(call.score.scale), left=window - 1, right=-1 if call.causal else window - 1)
    parts = [attend(q, k, v, near)]
    if window < m:
        parts.append(_before(q, k, v, call, window, attend))
    if window < n and not call.causal:
        parts.append(_behind(q, k, v, call, window, attend))
    return merge_attention(*zip(*parts, strict=True))


def _before(q: Tensor, k: Tensor, v: Tensor, call: Call, window: int, attend: Attend) -> tuple[Tensor, Tensor]:
    """Over keys `j <= pos(i) - window`."""
    n, m = q.shape[2], k.shape[2] - window
    rows = min(n, m)  # the others see none of them
    mask, decay, first = call.key_padding_mask, call.log_decay, call.first_key
    far = call._replace(
        causal=True,
        key_padding_mask=None if mask is None else mask[:, :m],
        log_decay=None if decay is None else decay[..., :m],
        first_key=None if first is None else first[..., n - rows :],
        end_key=None,
    )
    o, lse = attend(q[:, :, n - rows :], k[:, :, :m], v[:, :, :m], far)
    if decay is not None:  # of the tokens between a query and its last key here, `window` of them
        sums = decay.double().cumsum(-1)
        between = (sums[..., window:] - sums[..., :m])[..., m - rows :].to(lse.dtype)
        lse = lse + between.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return F.pad(o, (0, 0, n - rows, 0)), F.pad(lse, (n - rows, 0), value=-torch.inf)


def _behind(q: Tensor, k: Tensor, v: Tensor, call: Call, window: int, attend: Attend) -> tuple[Tensor, Tensor]:
    """Over keys `j >= pos(i) + window`."""
    n, m = q.shape[2], k.shape[2]
    rows = n - window  # the others see none of them
    mask, end = call.key_padding_mask, call.end_key
    far = call._replace(
        causal=True,
        key_padding_mask=None if mask is None else mask[:, m - rows :].flip(1),
        first_key=None if end is None else m - end[..., :rows].flip(2),
        end_key=None,
    )
    o, lse = attend(q[:, :, :rows].flip(2), k[:, :, m - rows :].flip(2), v[:, :, m - rows :].flip(2), far)
    return F.pad(o.flip(2), (0, 0, 0, window)), F.pad(lse.flip(2), (0, window), value=-torch.inf)
