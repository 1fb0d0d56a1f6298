"""Attention layers that differ from FastmaxSelfAttention in what they keep of far keys, as prototypes for training.

Each is a subclass with the weights and parts of FastmaxSelfAttention, and one idea. A query's output is a weighted mean of
values, as there. Its weights are computed in parts, of which each has its own keys (those within the exact window, those beyond
it) and its own function of the score. Shapes: q and k (b, h, n, d), v (b, h, n, dv), decays and gates (b, h, n).

The library computes the parts of its own functions: softmax within the window and over kept keys, and the polynomial beyond the
window. The others are computed by FlexAttention for long sequences on a GPU, else by the full matrix of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

import fastmax
from fastmax import eager
from fastmax.nn.gates import biases_of_half_lives, zero_gate
from fastmax.nn.rotary import Rotation

DENSE = 2**27  # at most so many weights are computed as a full matrix on a GPU
CHANNELS = 128  # of the values in one call of FlexAttention
# FlexAttention chooses its tiles by the width of q and k; with those for 64, 128 channels of values do not fit in registers
WIDE_VALUES = {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 8, "fwd_num_stages": 3}
BLOCK = 64  # keys of a block, and queries that share kept keys in KeptKeys by default
TILE = 128  # queries and keys of a tile of FlexAttention
CHUNK = 128  # tokens of a step of the delta rule
DIAGONAL = 16  # rows of a triangle that are inverted one after the other
RECOMPILES = 64  # shapes and kinds of weights in a run


class Part(NamedTuple):
    """Sums over some keys of weights w: sum w v and sum w, both divided by exp(log_scale)."""

    sums: Tensor  # (b, h, n, dv)
    mass: Tensor  # (b, h, n, 1)
    log_scale: Tensor  # (b, h, n), float32; -inf where there are no keys


def f(s: Tensor) -> Tensor:
    """Returns the weights 1 + s + s^2 / 2 of the polynomial."""
    return 1 + s + 0.5 * s * s


# ---- logs of weights: functions of the score, of the indices of batch, head, query and key, and of tensors


def exact(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s


def polynomial(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.log(f(s))


def constant(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s * 0.0


def square(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.log(0.5 * (1 + s) * (1 + s) + 1e-6)


def chosen_exact(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, chosen: Tensor) -> Tensor:
    """chosen (b, h, n, n / BLOCK), 1 for the blocks of keys that a query sees."""
    return torch.where(chosen[b, h, i, j // BLOCK] > 0, s, float("-inf"))


def chosen_or_polynomial(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen[b, h, i, j // BLOCK] > 0, s, polynomial(s, b, h, i, j))


# ---- keys of a part, for exact windows of w keys


def causal(w: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


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
        return _dense(q, k, v, bias, scale, log_weight, keys, w, *tensors)
    return _compiled(_flex)(q, k, v, bias, scale, log_weight, _mask(keys, w, q.shape[2], q.device), *tensors)


def softmax_part(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, w: int) -> Part:
    """Returns the keys within a window of w with weights exp(s - G_j)."""
    o, lse = fastmax.flash_attention(q, k, v, causal=True, scale=scale, window=w, log_decay=log_decay, return_lse=True)
    return Part(o, torch.ones_like(o[..., :1]), lse - log_decay.cumsum(-1))


def polynomial_part(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, gate: Tensor | None, scale: float, w: int) -> Part:
    """Returns the keys beyond a window of w with weights exp(gate_j - G_j) f(s)."""
    keys = max(q.shape[2] - w, 0)
    k, v, log_decay, gate = (None if rows is None else rows[:, :, :keys] for rows in (k, v, log_decay, gate))
    options = {"causal": True, "temperature": 1 / scale, "log_decay": log_decay, "log_input_gate": gate, "return_lse": True}
    o, lse = fastmax.fastmax_attention(q[:, :, w:], k, v, **options)
    before = (0, 0, q.shape[2] - keys, 0)  # the first queries have no such key
    log_scale = F.pad(lse - log_decay.cumsum(-1), before[2:], value=float("-inf"))
    return Part(F.pad(o, before), F.pad(torch.ones_like(o[..., :1]), before), log_scale)


def kept_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    gate: Tensor,
    scale: float,
    places: Tensor,
    block: int,
    fades: bool = True,
) -> Part:
    """Returns the keys at `places` with weights exp(gate_j - G_j + s), by softmax attention of each block of queries.

    The log of a key's factor is in two more channels of the keys, as a number of their dtype and its rounding error.

    Args:
        places: (b, h, blocks, kept), as `kept_places` returns them.
        block: number of queries of a block.
        fades: whether the keys decay. If not, their weights are exp(gate_j - G_i + s): the factor exp(G_i) of a row cancels.
    """
    b, h, n, _ = q.shape
    blocks, kept = places.shape[2:]
    padding, index = blocks * block - n, places.clamp(min=0).flatten(2)
    sums = log_decay.cumsum(-1)
    of_row = sums
    log_factor = (gate - sums if fades else gate).gather(2, index).unflatten(2, (blocks, kept))
    if fades:
        of_block = sums[..., ::block].unsqueeze(-1)  # at its first query
        log_factor = log_factor + of_block
        of_row = of_block.expand(-1, -1, -1, block).flatten(2)[..., :n]
    rounded = log_factor.to(k.dtype)
    more = torch.stack([rounded, (log_factor - rounded).to(k.dtype)], dim=-1)
    keys, values = (x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])) for x in (k, v))
    keys, values = (x.unflatten(2, (blocks, kept)) for x in (keys, values))
    queries = F.pad(q, (0, 0, 0, padding)).unflatten(2, (blocks, block))
    queries, keys = torch.cat([queries, torch.full_like(queries[..., :2], 1 / scale)], -1), torch.cat([keys, more], -1)
    each = (x.flatten(0, 2).unsqueeze(1) for x in (queries, keys, values))
    is_key = (places >= 0).flatten(0, 2)
    o, lse = fastmax.flash_attention(*each, scale=scale, causal=False, attention_mask=is_key, return_lse=True)
    o, lse = (x.view(b, h, blocks * block, *x.shape[3:])[:, :, :n] for x in (o, lse))
    return Part(o, torch.ones_like(o[..., :1]), lse - of_row)


def merged(*parts: Part) -> Tensor:
    """Returns the weighted mean of the values (b, h, n, dv) over the keys of all parts, in float32 or float64."""
    return (_compiled(_merged) if parts[0].sums.is_cuda else _merged)(*parts)


def _merged(*parts: Part) -> Tensor:
    top = torch.stack([own.log_scale.detach() for own in parts]).amax(0)
    factors = [(own.log_scale - top).exp().unsqueeze(-1) for own in parts]
    sums = sum(factor * own.sums for factor, own in zip(factors, parts, strict=True))
    return sums / sum(factor * own.mass for factor, own in zip(factors, parts, strict=True))


def _dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, log_weight: Callable, keys: Callable, w: int, *tensors: Tensor
) -> Part:
    dtype = eager.compute_dtype(q.dtype)
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
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, log_weight: Callable, mask: BlockMask, *tensors: Tensor
) -> Part:
    """As `_dense`, by FlexAttention, whose kernels want powers of two as widths and have no room for more than CHANNELS."""
    constant_bias = bias.detach()

    def log_of(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return log_weight(s, b, h, i, j, *tensors) + constant_bias[b, h, j]

    pieces = []
    for piece in _with_ones(v, bias).split(CHANNELS, dim=-1):
        channels = piece.shape[-1]
        width = max(16, 2 ** (channels - 1).bit_length())
        options: dict = {"FORCE_USE_FLEX_ATTENTION": True}
        if width == CHANNELS and v.dtype != torch.float32:
            options |= WIDE_VALUES
        piece = F.pad(piece, (0, width - channels))
        aux = AuxRequest(lse=True)
        o, of_rows = flex_attention(
            q.contiguous(), k.contiguous(), piece, log_of, mask, scale, kernel_options=options, return_aux=aux
        )
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
    """Compiles a function for each shape, also in a model that runs uncompiled: FlexAttention would compute the full matrix."""
    torch._dynamo.config.recompile_limit = max(RECOMPILES, torch._dynamo.config.recompile_limit)
    compiled = torch.compile(function, dynamic=False, fullgraph=True)

    def run(*arguments: object) -> object:
        with torch.compiler.set_stance("default"):
            return compiled(*arguments)

    return run


# ---- layers


class SlowDecays(fastmax.FastmaxSelfAttention):
    """FastmaxSelfAttention whose initial half-lives begin at the length of the exact window, which has all nearer keys."""

    def __init__(self, *sizes: int, **options):
        super().__init__(*sizes, **options)
        set_half_lives(self, biases_of_half_lives(self.num_kv_heads, self.longest_half_life, shortest=self.exact_window))


def set_half_lives(layer: fastmax.FastmaxSelfAttention, biases: Tensor) -> None:
    with torch.no_grad():
        layer.decay_proj.bias.copy_(biases)


class Memory(fastmax.FastmaxSelfAttention):
    """FastmaxSelfAttention in parts: exp(s) for keys within the exact window, f(s) = 1 + s + s^2 / 2 for those beyond it.

    The weight of key j for query i is also multiplied by exp(G_i - G_j), with G the sums of the log decays up to a token; the
    factor exp(G_i) of a row cancels.
    """

    def forward(self, x: Tensor, state: None = None, *, cu_seqlens: None = None, attention_mask: None = None) -> Tensor:
        if any(given is not None for given in (state, cu_seqlens, attention_mask)):
            raise ValueError("this layer takes whole sequences alone")
        q, k, v, _ = self._heads(x, None, None, None)
        log_decay, _ = self._log_gates(x, None)
        return self._output(self._outside_graphs(x, q, k, v, log_decay), x)

    @torch.compiler.disable  # FlexAttention is compiled on its own, for each length
    def _outside_graphs(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            if log_decay is None:
                log_decay = torch.zeros(q.shape[:3], dtype=eager.compute_dtype(q.dtype), device=q.device)
            return self._attention(x, q, k, v, log_decay).to(q.dtype)

    @property
    def scale(self) -> float:
        return 1 / self.options["temperature"] if self.options else 1 / math.sqrt(self.head_dim)

    def _attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        """Returns o (b, h, n, dv) for log_decay (b, h, n)."""
        return merged(self._near(q, k, v, log_decay), self._far(q, k, v, log_decay))

    def _near(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Part:
        return softmax_part(q, k, v, log_decay, self.scale, self.exact_window)

    def _far(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, gate: Tensor | None = None) -> Part:
        return polynomial_part(q, k, v, log_decay, gate, self.scale, self.exact_window)

    def _weighed(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, log_weight: Callable, *tensors: Tensor) -> Part:
        """Returns the keys beyond the window with weights of another function."""
        return part(q, k, v, bias, self.scale, log_weight, far, self.exact_window, *tensors)

    def _projected(self, proj: nn.Linear, x: Tensor) -> Tensor:
        """Returns x W + b (b, h, n) of a projection to one channel per head, in float32."""
        return proj(x.to(eager.compute_dtype(x.dtype))).transpose(1, 2)


def to_heads(layer: fastmax.FastmaxSelfAttention, bias: float = 0.0) -> nn.Linear:
    """Returns a projection of x to one channel per head that is `bias` at first."""
    proj = zero_gate(layer.embed_dim, layer.num_kv_heads, layer.qkv_proj.weight)
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

    def _bias(self, x: Tensor, log_decay: Tensor) -> Tensor:
        """Returns b_j - G_j, for `part`."""
        return self._gate(x) - log_decay.cumsum(-1)

    def _attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return merged(self._near(q, k, v, log_decay), self._far(q, k, v, log_decay, self._gate(x)))


class GatedSoftmax(InputGate):
    """Softmax over all keys with weights exp(b_j + s)."""

    def _attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return merged(part(q, k, v, self._bias(x, log_decay), self.scale, exact, causal, 0))


class LearnedPolynomial(InputGate):
    """An input gate, and f(s) = c0 + c1 (1 + t s)^2 / 2 with c0, c1 and t > 0 learned for each head.

    These are the quadratic polynomials that are nowhere negative, with a1 > 0: a0 = c0 + c1 / 2, a1 = c1 t, a2 = c1 t^2 / 2. At
    first a0 = a1 = 1 and a2 = 1/2.
    """

    def __init__(self, *sizes: int, **options):
        super().__init__(*sizes, **options)
        self.log_polynomial = nn.Parameter(torch.tensor([[math.log(0.5)], [0.0], [0.0]]).repeat(1, self.num_heads))  # c0, c1, t

    def _attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        c0, c1, t = self.log_polynomial.to(log_decay.dtype).unsqueeze(-1)
        bias = self._bias(x, log_decay)
        low = self._weighed(q, k, v, bias, constant)
        high = self._weighed((q * t.exp().unsqueeze(-1)).to(q.dtype), k, v, bias, square)
        low, high = (own._replace(log_scale=own.log_scale + c) for own, c in ((low, c0), (high, c1)))
        return merged(self._near(q, k, v, log_decay), low, high)


class UnrotatedFarKeys(InputGate):
    """An input gate, and scores of keys beyond the window without rotary positions."""

    def __init__(self, *sizes: int, **options):
        super().__init__(*sizes, **options)
        self.near_rope_dim = self.rope_dim
        self.rope_dim = 0

    def _attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        positions = torch.arange(q.shape[2], device=q.device)
        rotation = Rotation.at(positions, self.near_rope_dim, self.rope_base, q.dtype)
        rotated = (eager.heads.rotate(rows.transpose(1, 2), *rotation).transpose(1, 2) for rows in (q, k))
        return merged(self._near(*rotated, v, log_decay), self._far(q, k, v, log_decay, self._gate(x)))


# ---- delta rule


def second_order(x: Tensor, temperature: float) -> Tensor:
    """Returns features of length 1, whose products are f(s) / sqrt(f(s_qq) f(s_kk)).

    They are (b, h, n, F), where F is 1 + d + d (d + 1) / 2 and zeros up to a multiple of 8, which tensor cores need.
    """
    x = x / math.sqrt(temperature)
    features = F.normalize(torch.cat([torch.ones_like(x[..., :1]), x, _Squares.apply(x)], dim=-1), dim=-1)
    return F.pad(features, (0, -features.shape[-1] % 8))


class _Squares(torch.autograd.Function):
    """x_i x_j for all i < j, and x_i^2 / sqrt(2). In the gradient each element of x takes its d pairs; PyTorch's would add one
    pair after the other."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        i, j = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
        return x[..., i] * x[..., j] * torch.where(i == j, math.sqrt(0.5), 1.0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        d = x.shape[-1]
        i = torch.arange(d, device=x.device)
        low, high = torch.minimum(i, i.unsqueeze(1)), torch.maximum(i, i.unsqueeze(1))
        pairs = grad[..., low * d - low * (low - 1) // 2 + high - low]  # (..., d, d)
        factor = torch.where(low == high, math.sqrt(2.0), 1.0)
        return (pairs * factor * x.unsqueeze(-2)).sum(-1)


def first_order(x: Tensor, temperature: float) -> Tensor:
    return F.normalize(x, dim=-1)


def second_order_products(q: Tensor, k: Tensor, temperature: float) -> Tensor:
    """Returns the products (b, h, n, m) of the features of q and k, from their scores alone."""
    own = (f(x.square().sum(-1) / temperature).rsqrt() for x in (q, k))
    return f(q @ k.mT / temperature) * next(own).unsqueeze(-1) * next(own).unsqueeze(-2)


def first_order_products(q: Tensor, k: Tensor, temperature: float) -> Tensor:
    return first_order(q, temperature) @ first_order(k, temperature).mT


PRODUCTS = {second_order: second_order_products, first_order: first_order_products}


def delta_rule(
    q: Tensor | None, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, features: Callable, temperature: float
) -> tuple[Tensor, Tensor | None]:
    """Writes each value into a state S (b, h, F, dv): with S' = decay S, S <- S' + phi(k) u, u = beta (v - S'^T phi(k)).

    A chunk of CHUNK tokens reads the state once. Within it, only products of features are needed: u is the solution of a
    triangular system.

    Returns:
        u (b, h, n, dv), and S^T phi(q) after the write of each token, None without q.
    """
    state = v.new_zeros(*v.shape[:2], features(k[:, :, :1], temperature).shape[-1], v.shape[-1])
    step = _compiled(_delta_step) if k.is_cuda else _delta_step
    written, reads = [], []
    for begin in range(0, k.shape[2], CHUNK):
        own = (None if x is None else x[:, :, begin : begin + CHUNK].contiguous() for x in (q, k, v, beta, log_decay))
        state, u, read = step(state, *own, features, temperature)
        written.append(u)
        reads.append(read)
    return torch.cat(written, 2), None if q is None else torch.cat(reads, 2)


def _delta_step(
    state: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    features: Callable,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    since = log_decay.cumsum(-1)
    of_keys, before, between = features(k, temperature), since.exp().unsqueeze(-1), _decays_between(since)
    u = _values_of_chunk(k, v - before * (of_keys @ state), beta, between, features, temperature)
    read = None
    if q is not None:
        read = before * (features(q, temperature) @ state) + (between * PRODUCTS[features](q, k, temperature)) @ u
    after = (since[..., -1:] - since).exp().unsqueeze(-1)
    return before[..., -1:, :] * state + (of_keys * after).mT @ u, u, read


def delta_rule_in_chunks(
    k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, features: Callable, temperature: float
) -> Tensor:
    """Returns u of `delta_rule` with a state of 0 before each chunk of CHUNK tokens. So there is no state to carry."""
    n, padding = k.shape[2], -k.shape[2] % CHUNK
    k, v = (F.pad(rows, (0, 0, 0, padding)).unflatten(2, (-1, CHUNK)) for rows in (k, v))
    beta, log_decay = (F.pad(x, (0, padding)).unflatten(2, (-1, CHUNK)) for x in (beta, log_decay))
    own = _compiled(_values_of_chunk) if k.is_cuda else _values_of_chunk
    return own(k, v, beta, _decays_between(log_decay.cumsum(-1)), features, temperature).flatten(2, 3)[:, :, :n]


def _decays_between(since: Tensor) -> Tensor:
    """Returns the decays from each earlier token of a chunk, given the sums of its log decays up to each token."""
    return (since.unsqueeze(-1) - since.unsqueeze(-2)).tril().exp().tril()


def _values_of_chunk(k: Tensor, v: Tensor, beta: Tensor, between: Tensor, features: Callable, temperature: float) -> Tensor:
    """Returns u for values v that what is before the chunk predicts none of."""
    within = (beta.unsqueeze(-1) * between * PRODUCTS[features](k, k, temperature)).tril(-1)
    return inverse_of_unit_triangle(within) @ (beta.unsqueeze(-1) * v)


def inverse_of_unit_triangle(lower: Tensor) -> Tensor:
    """Returns (I + L)^-1 for L (..., n, n), which is zero on and above the diagonal.

    Blocks on the diagonal are inverted row by row, and pairs of them are combined, so most of it is products of matrices. The
    gradient is that of a Newton step from the inverse.
    """
    n, size = lower.shape[-1], DIAGONAL
    while size < n:
        size *= 2
    with torch.no_grad():
        padded = F.pad(lower, (0, size - n, 0, size - n))
        blocks, unit = _diagonal_blocks(padded, DIAGONAL), torch.eye(DIAGONAL, dtype=lower.dtype, device=lower.device)
        rows = [unit[0].expand_as(blocks[..., 0, :])]
        for i in range(1, DIAGONAL):
            rows.append(unit[i] - sum(blocks[..., i, j, None] * rows[j] for j in range(i)))
        inverse, length = torch.stack(rows, dim=-2), DIAGONAL
        while length < size:
            first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
            below = -second @ _diagonal_blocks(padded, 2 * length)[..., length:, :length] @ first
            inverse = torch.cat([F.pad(first, (0, length)), torch.cat([below, second], dim=-1)], dim=-2)
            length *= 2
        inverse = inverse[..., 0, :n, :n]
    return inverse + inverse @ (torch.eye(n, dtype=lower.dtype, device=lower.device) - inverse - lower @ inverse)


def _diagonal_blocks(x: Tensor, length: int) -> Tensor:
    """Returns the blocks on the diagonal of x (..., n, n), (..., n / length, length, length)."""
    blocks = x.unflatten(-1, (-1, length)).unflatten(-3, (-1, length))  # (..., row of blocks, row, column of blocks, column)
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


class DeltaValues(InputGate):
    """An input gate, and values u of the delta rule beyond the window: the mean of u_j with weights exp(b_j) f(s_ij).

    Args:
        carries: whether a chunk of tokens begins with the state of those before it. Else its state is 0.
    """

    def __init__(self, *sizes: int, carries: bool = True, **options):
        super().__init__(*sizes, **options)
        self.carries = carries
        self.beta_proj = to_heads(self)

    def _values(self, x: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return self._delta(x, None, k, v, log_decay, second_order)[0].to(v.dtype)

    def _delta(self, x: Tensor, q: Tensor | None, k: Tensor, v: Tensor, log_decay: Tensor, features: Callable) -> tuple:
        """Returns u and the reads of `delta_rule`; without a state that is carried, u and None.

        With one, the backward computes them again, since it needs all states.
        """
        beta = self._projected(self.beta_proj, x).sigmoid()
        q, k, v = (None if rows is None else rows.to(log_decay.dtype) for rows in (q, k, v))
        given = (k, v, beta, log_decay, features, 1 / self.scale)
        if not self.carries:
            return delta_rule_in_chunks(*given), None
        return checkpoint(delta_rule, q, *given, use_reentrant=False, preserve_rng_state=False)

    def _attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        u = self._values(x, k, v, log_decay)
        return merged(self._near(q, k, v, log_decay), self._far(q, k, u, log_decay, self._gate(x)))


class SoftmaxOfDeltaValues(DeltaValues):
    """Softmax over all keys with the values u of the delta rule."""

    def __init__(self, *sizes: int, **options):
        super().__init__(*sizes, **options)
        del self.write_proj

    def _attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return merged(softmax_part(q, k, self._values(x, k, v, log_decay), log_decay, self.scale, q.shape[2]))


class DeltaMemory(DeltaValues):
    """Softmax within the window, plus what the delta rule's state has for q, each with its norm.

    Args:
        features: `second_order` or `first_order`.
    """

    def __init__(self, *sizes: int, features: Callable = second_order, **options):
        super().__init__(*sizes, **options)
        del self.write_proj
        self.features = features
        self.near_norm, self.memory_norm = (nn.RMSNorm(self.value_dim, 1e-6) for _ in range(2))

    def _attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        _, read = self._delta(x, q, k, v, log_decay, self.features)
        return self.near_norm(merged(self._near(q, k, v, log_decay))) + self.memory_norm(read)


# ---- keys and blocks that are chosen


class KeptKeys(InputGate):
    """An input gate, and weights exp(b_j) (exp(s) + f(s)) for the `kept` keys beyond the window with the largest gates so far.

    Queries of a block share the keys: those beyond the window of its first query.

    Args:
        kept: number of keys.
        polynomial: whether the layer has the polynomial; without it, other keys weigh 0.
        block: number of queries of a block.
        fades: whether the kept keys decay.
    """

    def __init__(
        self, *sizes: int, kept: int = 256, polynomial: bool = True, block: int = BLOCK, fades: bool = True, **options
    ):
        super().__init__(*sizes, **options)
        self.kept, self.polynomial, self.block, self.fades = kept, polynomial, block, fades

    def _rank(self, gate: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gate

    def _attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        gate = self._gate(x)
        with torch.no_grad():
            places = kept_places(self._rank(gate, k, v), self.kept, self.exact_window, self.block)
        of_kept = kept_part(q, k, v, log_decay, gate, self.scale, places, self.block, self.fades)
        parts = [self._near(q, k, v, log_decay), of_kept]
        if self.polynomial:
            parts.append(self._far(q, k, v, log_decay, gate))
        return merged(*parts)


class KeptByResidual(KeptKeys):
    """KeptKeys whose rank is the length of v - S^T phi(k): what the delta rule on second-order features did not predict."""

    def _rank(self, gate: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.to(gate.dtype), v.to(gate.dtype)
        never, always = torch.zeros_like(gate), torch.ones_like(gate)  # decays, beta
        return delta_rule(None, k, v, always, never, second_order, 1 / self.scale)[0].norm(dim=-1)


def kept_places(rank: Tensor, kept: int, w: int, block: int) -> Tensor:
    """Returns for each block of queries the `kept` keys of the largest rank beyond the window w of its first query.

    Args:
        rank: (b, h, n).

    Returns:
        int64 (b, h, blocks, kept), -1 where there are fewer keys.
    """
    top = rank.new_full((*rank.shape[:2], kept), float("-inf"))
    places = torch.full_like(top, -1, dtype=torch.int64)
    of_blocks, seen = [], 0
    for first in range(0, rank.shape[2], block):
        beyond = max(0, first - w + 1)
        if beyond > seen:
            new = torch.arange(seen, beyond, device=rank.device).expand(*rank.shape[:2], -1)
            top, order = torch.cat([top, rank[:, :, seen:beyond]], dim=-1).topk(kept, dim=-1)
            places = torch.cat([places, new], dim=-1).gather(2, order)
            seen = beyond
        of_blocks.append(places)
    return torch.stack(of_blocks, dim=2)


class ChosenBlocks(Memory):
    """Softmax over the keys near a query and the `count` blocks of earlier keys that it gives the largest polynomial mass.

    The near keys are those of the exact window, and the keys before it up to the end of a block.

    Args:
        count: number of blocks for each query and head.
        near_keys: keys of the window. None: `exact_window`, which softmax layers do not have.
        by: `mass_of_blocks`, or another measure of blocks with its arguments.
    """

    LOG_WEIGHT = staticmethod(chosen_exact)  # of keys beyond the near ones

    def __init__(self, *sizes: int, count: int = 8, near_keys: int | None = None, by: Callable | None = None, **options):
        super().__init__(*sizes, **options)
        self.near_keys = self.exact_window if near_keys is None else near_keys
        self.count, self.by = count, mass_of_blocks if by is None else by

    def _attention(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        w, decays = self.near_keys, -log_decay.cumsum(-1)
        with torch.no_grad():
            chosen = chosen_blocks(q, k, decays, self.scale, w, self.count, self.by)
        beyond = part(q, k, v, decays, self.scale, self.LOG_WEIGHT, far_blocks, w, chosen)
        return merged(part(q, k, v, decays, self.scale, exact, near_blocks, w), beyond)


class ExactBlocks(ChosenBlocks):
    """As ChosenBlocks, and the keys of other blocks weigh f(s)."""

    LOG_WEIGHT = staticmethod(chosen_or_polynomial)


def mass_of_blocks(q: Tensor, k: Tensor, log_weight: Tensor, scale: float, weight: Callable = f) -> Tensor:
    """Returns the sums of exp(log_weight) weight(s) over blocks of keys, for some queries.

    Args:
        q: (b, h, m, d).
        k: (b, h, n, d), n a multiple of BLOCK.
        log_weight: (b, h, m, n).

    Returns:
        (b, h, m, n / BLOCK).
    """
    s = (q @ k.mT).to(log_weight.dtype) * scale
    return (weight(s) * log_weight.exp()).unflatten(-1, (-1, BLOCK)).sum(-1)


def softmax_weight_of_blocks(q: Tensor, k: Tensor, log_weight: Tensor, scale: float) -> Tensor:
    """As `mass_of_blocks`, with exp of the scores in place of f: the blocks that softmax weighs most."""
    return mass_of_blocks(q, k, log_weight, scale, torch.exp)


def score_of_mean_key(q: Tensor, k: Tensor, log_weight: Tensor, scale: float) -> Tensor:
    """As `mass_of_blocks`: exp of the scores of the blocks' mean keys, without decays."""
    return (scale * (q @ k.unflatten(2, (-1, BLOCK)).mean(3).mT)).to(log_weight.dtype).exp()


def chosen_blocks(q: Tensor, k: Tensor, decays: Tensor, scale: float, w: int, count: int, by: Callable) -> Tensor:
    """Returns which blocks of keys before the window and the rest of its block each query sees: int8 (b, h, n, blocks)."""
    n, pieces = q.shape[2], []
    padding = -n % BLOCK
    k, keys = F.pad(k, (0, 0, 0, padding)), F.pad(decays, (0, padding))
    blocks = torch.arange(keys.shape[-1] // BLOCK, device=q.device)
    measure = _compiled(by) if q.is_cuda else by
    for i in torch.arange(n, device=q.device).split(4 * CHUNK):
        begin, end = int(i[0]), int(i[-1]) + 1
        log_weight = (keys.unsqueeze(-2) - decays[:, :, begin:end].unsqueeze(-1)).clamp(max=0.0)
        measured = measure(q[:, :, begin:end].contiguous(), k, log_weight, scale)
        measured = measured.masked_fill(blocks >= ((i + 1 - w) // BLOCK).unsqueeze(-1), 0.0)
        top = measured.topk(min(count, len(blocks)), dim=-1)
        pieces.append(torch.zeros_like(measured, dtype=torch.int8).scatter_(-1, top.indices, (top.values > 0).to(torch.int8)))
    return torch.cat(pieces, dim=2)
