"""Attention layers that differ from FastmaxSelfAttention in what they keep of far keys, as prototypes for training.

Each is a subclass with the weights and parts of FastmaxSelfAttention, and one idea. A query's output is a weighted mean of values,
as there. Its weights are computed in parts, of which each has its own keys (those within the exact window, those beyond it) and
its own function of the score. Shapes: q and k (b, h, n, d), v (b, h, n, dv), decays and gates (b, h, n).

Long sequences on a GPU are computed by FlexAttention, all others by the full matrix of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

import fastmax
from fastmax import eager
from fastmax.nn.rotary import Rotation

DENSE = 2**27  # at most so many weights are computed as a full matrix on a GPU
CHANNELS = 128  # of the values in one call of FlexAttention
BLOCK = 64  # keys of a block, and queries that share a threshold of kept keys
TILE = 128  # queries and keys of a tile of FlexAttention
CHUNK = 128  # tokens of a step of the delta rule
RECOMPILES = 64  # shapes and kinds of weights in a run


class Part(NamedTuple):
    """Sums over some keys of weights w: sum w v and sum w, both divided by exp(log_scale)."""

    sums: Tensor  # (b, h, n, dv)
    mass: Tensor  # (b, h, n, 1)
    log_scale: Tensor  # (b, h, n), float32; -inf where there are no keys


# ---- logs of weights: functions of the score, of the indices of batch, head, query and key, and of tensors


def exact(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s


def polynomial(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.log(1 + s + 0.5 * s * s)


def constant(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s * 0.0


def square(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.log(0.5 * (1 + s) * (1 + s) + 1e-6)


def kept_or_polynomial(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, rank: Tensor, least: Tensor) -> Tensor:
    """rank (b, h, n) of keys, least (b, h, n / BLOCK): the least rank that queries of a block keep."""
    return torch.where(rank[b, h, j] >= least[b, h, i // BLOCK], s, polynomial(s, b, h, i, j))


def chosen_exact(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, chosen: Tensor) -> Tensor:
    """chosen (b, h, n, n / BLOCK), 1 for the blocks of keys that a query sees."""
    return torch.where(chosen[b, h, i, j // BLOCK] > 0, s, float("-inf"))


# ---- keys of a part, for exact windows of w keys


def causal(w: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def near(w: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < w)


def far(w: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i - j >= w


def near_blocks(w: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The window, and the keys before it up to the end of a block."""
    return (i >= j) & (j >= (i + 1 - w) // BLOCK * BLOCK)


def far_blocks(w: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j < (i + 1 - w) // BLOCK * BLOCK


def part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, log_weight: Callable, keys: Callable, w: int, *tensors: Tensor
) -> Part:
    """Returns the sums over some keys with weights exp(log_weight(scale q_i . k_j) + bias_j).

    The gradient of the bias passes through the values and a channel of ones: both are multiplied by exp(bias - bias'), with
    bias' a constant. FlexAttention would add it up with an atomic addition for each weight.

    Args:
        bias: (b, h, n), float32.
        scale: multiplies the scores.
        log_weight, tensors: a function from above and its tensors, which have no gradient.
        keys, w: a function from above and its window.
    """
    count = q.shape[0] * q.shape[1] * q.shape[2] ** 2
    if not q.is_cuda or count <= DENSE:
        return _dense(q, k, v, bias, scale, log_weight, keys, w, tensors)
    return _compiled(_flex)(q, k, v, bias, scale, log_weight, _mask(keys, w, q.shape[2], q.device), tensors)


def merged(*parts: Part) -> Tensor:
    """Returns the weighted mean of the values (b, h, n, dv) over the keys of all parts, in float32 or float64."""
    return (_compiled(_merged) if parts[0].sums.is_cuda else _merged)(*parts)


def _merged(*parts: Part) -> Tensor:
    top = torch.stack([own.log_scale.detach() for own in parts]).amax(0)
    factors = [(own.log_scale - top).exp().unsqueeze(-1) for own in parts]
    sums = sum(factor * own.sums for factor, own in zip(factors, parts, strict=True))
    return sums / sum(factor * own.mass for factor, own in zip(factors, parts, strict=True))


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    scale: float,
    log_weight: Callable,
    keys: Callable,
    w: int,
    tensors: tuple[Tensor, ...],
) -> Part:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    sizes = (*q.shape[:3], q.shape[2])
    place = [
        torch.arange(size, device=q.device).view([-1 if at == axis else 1 for at in range(4)])
        for axis, size in enumerate(sizes)
    ]
    logs = log_weight((q @ k.mT).to(dtype) * scale, *place, *tensors) + bias.detach().unsqueeze(-2)
    logs = logs.masked_fill(~keys(w, *place), float("-inf"))
    top = logs.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min)
    weights = (logs - top).exp()
    mass = weights.sum(-1, keepdim=True)
    weights = weights / mass.clamp(min=torch.finfo(dtype).tiny)
    return _split(weights.to(v.dtype) @ _with_ones(v, bias), (top + mass.log()).squeeze(-1))


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    scale: float,
    log_weight: Callable,
    mask: BlockMask,
    tensors: tuple[Tensor, ...],
) -> Part:
    """As `_dense`, by FlexAttention. Its kernels want powers of two as widths and have no room for more than CHANNELS values."""
    constant_bias = bias.detach()

    def log_of(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return log_weight(s, b, h, i, j, *tensors) + constant_bias[b, h, j]

    options = {"kernel_options": {"FORCE_USE_FLEX_ATTENTION": True}, "return_aux": AuxRequest(lse=True)}
    pieces = []
    for piece in _with_ones(v, bias).split(CHANNELS, dim=-1):
        channels = piece.shape[-1]
        padded = F.pad(piece, (0, max(16, 2 ** (channels - 1).bit_length()) - channels))
        o, of_rows = flex_attention(q.contiguous(), k.contiguous(), padded, log_of, mask, scale, **options)
        pieces.append(o[..., :channels])
    return _split(torch.cat(pieces, dim=-1), of_rows.lse)


def _with_ones(v: Tensor, bias: Tensor) -> Tensor:
    """Returns the values and a channel of ones (b, h, n, dv + 1), with the gradient of the bias."""
    ones = (bias - bias.detach()).exp().unsqueeze(-1)
    return torch.cat([(v * ones).to(v.dtype), ones.to(v.dtype)], dim=-1)


def _split(means: Tensor, log_scale: Tensor) -> Part:
    return Part(means[..., :-1], means[..., -1:], log_scale)


@lru_cache(maxsize=32)
def _mask(keys: Callable, w: int, n: int, device: torch.device) -> BlockMask:
    """Returns the mask of n queries and keys. It is made of one block of queries at a time: all would be n^2 indices."""
    if n % TILE != 0:
        raise ValueError(f"FlexAttention needs a multiple of {TILE} tokens here, got {n}")
    first = torch.zeros((), dtype=torch.int64, device=device)

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return keys(w, b, h, i, j)

    j = torch.arange(n, device=device)
    tiles = (mask(first, first, i.unsqueeze(-1), j).unflatten(-1, (-1, TILE)) for i in j.split(TILE))
    some, whole = map(torch.stack, zip(*((tile.any(-1).any(0), tile.all(-1).all(0)) for tile in tiles), strict=True))
    blocks: list[Tensor] = []
    for those in (some & ~whole, whole):
        order = those.int().sort(dim=-1, descending=True, stable=True).indices
        blocks += [those.sum(-1), order]
    return BlockMask.from_kv_blocks(*(x[None, None].int() for x in blocks), BLOCK_SIZE=TILE, mask_mod=mask)


@cache
def _compiled(function: Callable) -> Callable:
    """Compiles a function for each shape. As a full graph: without a compiler, FlexAttention would compute the full matrix."""
    torch._dynamo.config.recompile_limit = max(RECOMPILES, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=False, fullgraph=True)


# ---- layers


class Memory(fastmax.FastmaxSelfAttention):
    """FastmaxSelfAttention in parts: exp(s) for keys within the exact window, f(s) = 1 + s + s^2 / 2 for those beyond it.

    The weight of key j for query i is also multiplied by exp(G_i - G_j), with G the sums of the log decays up to a token; the
    factor exp(G_i) of a row cancels.
    """

    def forward(self, x: Tensor, state: None = None, *, cu_seqlens: None = None, attention_mask: None = None) -> Tensor:
        if any(given is not None for given in (state, cu_seqlens, attention_mask)):
            raise ValueError("this layer takes whole sequences alone")
        q, k, v, log_decay, _ = self._heads(x, None, None, None)
        return self._output(self._outside_graphs(x, q, k, v, log_decay), x)

    @torch.compiler.disable  # FlexAttention is compiled on its own, for each length
    def _outside_graphs(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            zeros = torch.zeros(q.shape[:3], dtype=self._exact_dtype(q), device=q.device)
            decays = zeros if log_decay is None else -log_decay.cumsum(-1)
            return self._attention(x, q, k, v, decays).to(q.dtype)

    @property
    def scale(self) -> float:
        return 1 / self.options["temperature"] if self.options else 1 / math.sqrt(self.head_dim)

    def _attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, decays: Tensor) -> Tensor:
        """Returns o (b, h, n, dv) for decays -G (b, h, n)."""
        return merged(self._near(q, k, v, decays), self._far(q, k, v, decays))

    def _near(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Part:
        return part(q, k, v, bias, self.scale, exact, near, self.exact_window)

    def _far(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, log_weight: Callable = polynomial, *tensors: Tensor) -> Part:
        return part(q, k, v, bias, self.scale, log_weight, far, self.exact_window, *tensors)

    def _projected(self, proj: nn.Linear, x: Tensor) -> Tensor:
        """Returns x W + b (b, h, n) of a projection to one channel per head, in float32."""
        return proj(x.to(self._exact_dtype(x))).transpose(1, 2)

    @staticmethod
    def _exact_dtype(x: Tensor) -> torch.dtype:
        return torch.float64 if x.dtype == torch.float64 else torch.float32


def to_heads(layer: fastmax.FastmaxSelfAttention, bias: float = 0.0) -> nn.Linear:
    """Returns a projection of x to one channel per head that is `bias` at first."""
    proj = nn.Linear(layer.embed_dim, layer.num_kv_heads)
    nn.init.zeros_(proj.weight)
    nn.init.constant_(proj.bias, bias)
    return proj


def tanh_bound(z: Tensor, bound: float) -> Tensor:
    return bound * torch.tanh(z / bound)


def no_bound(z: Tensor, bound: float) -> Tensor:
    return z


def sigmoid_bound(z: Tensor, bound: float) -> Tensor:
    """exp of it is a sigmoid: a gate that only takes away."""
    return F.logsigmoid(z)


class InputGate(Memory):
    """Keys beyond the window weigh exp(b_j) f(s), with b = bound tanh((x W + c) / bound).

    Args:
        bound: of b.
        initial: c at first; W is 0 at first.
        shape: a function (z, bound) -> b in place of bound tanh(z / bound).
    """

    def __init__(self, *sizes: int, bound: float = 8.0, initial: float = 0.0, shape: Callable = tanh_bound, **options):
        super().__init__(*sizes, **options)
        self.bound, self.shape = bound, shape
        self.write_proj = to_heads(self, initial)

    def _gate(self, x: Tensor) -> Tensor:
        return self.shape(self._projected(self.write_proj, x), self.bound)

    def _attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, decays: Tensor) -> Tensor:
        return merged(self._near(q, k, v, decays), self._far(q, k, v, decays + self._gate(x)))


class GatedSoftmax(InputGate):
    """Softmax over all keys with weights exp(b_j + s)."""

    def _attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, decays: Tensor) -> Tensor:
        return merged(part(q, k, v, decays + self._gate(x), self.scale, exact, causal, 0))


class LearnedPolynomial(InputGate):
    """An input gate, and f(s) = c0 + c1 (1 + t s)^2 / 2 with c0, c1 and t > 0 learned for each head.

    These are the quadratic polynomials that are nowhere negative, with a1 > 0: a0 = c0 + c1 / 2, a1 = c1 t, a2 = c1 t^2 / 2. At
    first a0 = a1 = 1 and a2 = 1/2.
    """

    def __init__(self, *sizes: int, **options):
        super().__init__(*sizes, **options)
        self.log_polynomial = nn.Parameter(torch.tensor([[math.log(0.5)], [0.0], [0.0]]).repeat(1, self.num_heads))  # c0, c1, t

    def _attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, decays: Tensor) -> Tensor:
        c0, c1, t = self.log_polynomial.to(decays.dtype).unsqueeze(-1)
        bias = decays + self._gate(x)
        low = self._far(q, k, v, bias, constant)
        high = self._far((q * t.exp().unsqueeze(-1)).to(q.dtype), k, v, bias, square)
        low, high = (own._replace(log_scale=own.log_scale + c) for own, c in ((low, c0), (high, c1)))
        return merged(self._near(q, k, v, decays), low, high)


class UnrotatedFarKeys(InputGate):
    """An input gate, and scores of keys beyond the window without rotary positions."""

    def __init__(self, *sizes: int, **options):
        super().__init__(*sizes, **options)
        self.near_rope_dim = self.rope_dim
        self.rope_dim = 0

    def _attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, decays: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2], device=q.device)
        rotation = Rotation.at(positions, self.near_rope_dim, self.rope_base, q.dtype)
        rotated = (eager.heads.rotate(rows.transpose(1, 2), *rotation).transpose(1, 2) for rows in (q, k))
        return merged(self._near(*rotated, v, decays), self._far(q, k, v, decays + self._gate(x)))
