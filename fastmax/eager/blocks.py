"""Blocks of q, k and v, the operands of a head group, and the sums of their gradients.

A block is a 3-d tensor (B, R, channels) of consecutive tokens in the compute dtype: float64 for float64 inputs, else float32.
B counts pairs of a batch entry and a kv head, and chunks within them. R counts tokens; for queries, those of all query heads of
the kv head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isqrt
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastmax.core.call import Call
from fastmax.core.transforms import is_transformed
from fastmax.eager.decay import Decay, DecayGradient
from fastmax.eager.input_gate import GateGradient
from fastmax.eager.tiles import TileGradients, TileInfo


class Span(NamedTuple):
    """The tokens `start .. start + count * length`: `count` chunks of `length`, which are computed in parallel."""

    start: int
    count: Any  # int. Any, because tuples have a method of this name
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.length


Group = tuple[slice, slice]  # the batch entries and the kv heads of a head group

# Receives a span of queries and the sums of its attention: the numerator (B, R, dv), the denominator (B, R, 1), and for softmax
# the maximum (B, R, 1) that both are relative to.
Sink = Callable[[Span, tuple[Tensor, ...]], None]


def spans(start: int, stop: int, length: int, count: int = 1) -> list[Span]:
    """Returns spans of up to `count` chunks of `length` that cover `start .. stop`; a shorter rest is a chunk of its own."""
    out = []
    while stop - start >= length:
        out.append(Span(start, min(count, (stop - start) // length), length))
        start = out[-1].stop
    if stop > start:
        out.append(Span(start, 1, stop - start))
    return out


def head_groups(batch: int, heads: int, size: int) -> Iterator[Group]:
    """Yields slices over batch and kv heads with at most `size` (batch, head) pairs each."""
    head_step = min(heads, size)
    batch_step = max(1, size // heads)
    for b in range(0, batch, batch_step):
        for h in range(0, heads, head_step):
            yield slice(b, b + batch_step), slice(h, h + head_step)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that inputs of a dtype are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def token_major(x: Tensor) -> bool:
    """Returns whether x (b, h, n, channels) has the memory layout (b, n, h, channels)."""
    return x.stride(1) < x.stride(2)


def empty_like_layout(x: Tensor, channels: int, dtype: torch.dtype | None = None, tokens: int | None = None) -> Tensor:
    """Returns an uninitialised tensor (b, h, tokens, channels) with the sizes of x, token-major if x is, else contiguous.

    `tokens` None: those of x.
    """
    b, h, n, _ = x.shape
    n = n if tokens is None else tokens
    if token_major(x):
        return x.new_empty(b, n, h, channels, dtype=dtype).transpose(1, 2)
    return x.new_empty(b, h, n, channels, dtype=dtype)


def in_layout_of(like: Tensor, x: Tensor) -> Tensor:
    """Returns x (b, h, tokens, channels) in the memory layout of `empty_like_layout(like, channels)`."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if token_major(like) else x.contiguous()


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """Returns x (b, h, tokens, c) as (b, kv_heads, h // kv_heads, tokens, c)."""
    return x.unflatten(1, (kv_heads, -1))


def to_blocks(x: Tensor, span: Span) -> Tensor:
    """Returns a span of x (batch, kv heads, group, tokens, c) as (batch * kv heads * span.count, group * span.length, c)."""
    x = x[:, :, :, span.start : span.stop].to(compute_dtype(x.dtype))
    return rearrange(x, "b h g (count t) c -> (b h count) (g t) c", count=span.count)


def from_blocks(x: Tensor, span: Span, like: Tensor) -> Tensor:
    """Returns the inverse of `to_blocks`, in the compute dtype, with the (batch, kv heads, group) of `like`."""
    b, h, g = like.shape[:3]
    return rearrange(x, "(b h count) (g t) c -> b h g (count t) c", b=b, h=h, g=g, count=span.count)


class KeyFactors(NamedTuple):
    """The factors of a block of keys, each (B, length, 1) or None for 1. They multiply f(s) in the weights of these keys.

    Every pair of a query and a key is computed either in a tile or through the state. In a tile, weights are multiplied by
    `in_tile` and the gates, and the decays are in the tile's exponent. A key that is added to the state is multiplied by
    `in_state`. The gradient of v needs the same factors: in a tile it gets them from the weights, through the state from
    `times_state_factor`.
    """

    mask: Tensor | None  # 0 where a key is masked, else 1
    decay: Tensor | None = None  # from the key to the end of its chunk
    log_gate: Tensor | None = None  # the logarithm of the input gate

    @property
    def in_tile(self) -> Tensor | None:
        """The factor of a key's weights in a tile; 0 only where the key is masked."""
        return self.mask

    @property
    def in_state(self) -> Tensor | None:
        """The factor of a key that is added to the state."""
        factor, others = self.mask, self.without_mask
        if factor is None or others is None:
            return others if factor is None else factor
        return factor * others

    @property
    def without_mask(self) -> Tensor | None:
        """`in_state` without the mask."""
        if self.log_gate is None:
            return self.decay
        gate = self.log_gate.exp()
        return gate if self.decay is None else gate * self.decay

    def times_state_factor(self, x: Tensor) -> Tensor:
        """Returns x (B, length, channels) times `in_state`."""
        factor = self.in_state
        return x if factor is None else x * factor


@dataclass(frozen=True)
class Operands:
    """The inputs of one head group. q, k and v are (batch, kv heads, group, tokens, channels), with group = 1 for k and v."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: Call  # with the tensors of this head group
    tiles: ModuleType  # `fastmax.eager.tiles` or, for softmax, `fastmax.eager.flash`
    decay: Decay | None = None  # of the call's log_decay, k_start and k_end

    @property
    def score(self) -> Any:
        """A `Score`, or for `tiles` of softmax a `Softmax`. The functions that take operands know which."""
        return self.call.score

    @property
    def causal(self) -> bool:
        return self.call.causal

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the blocks."""
        return compute_dtype(self.q.dtype)

    @property
    def n(self) -> int:
        return self.q.shape[3]

    @property
    def m(self) -> int:
        return self.k.shape[3]

    @property
    def group(self) -> int:
        return self.q.shape[2]

    @property
    def shift(self) -> int:
        """m - n: key `i + shift` is at the position of query i, and the last one that it sees in a causal call."""
        return self.m - self.n

    def q_block(self, span: Span) -> Tensor:
        """Returns a block of q times the scale of the score."""
        return to_blocks(self.q, span) * self.score.scale

    def k_block(self, span: Span) -> Tensor:
        return to_blocks(self.k, span)

    def v_block(self, span: Span) -> Tensor:
        return to_blocks(self.v, span)

    @property
    def right(self) -> int | None:
        """Key `i + shift + right` is the last one that query i sees; None: it sees all."""
        return 0 if self.causal else None if self.call.right < 0 else self.call.right

    @property
    def left(self) -> int | None:
        """Key `i + shift - left` is the first one that query i sees; None: it sees all."""
        return None if self.call.left < 0 else self.call.left

    def tile_info(self, factors: KeyFactors, **fields: Any) -> TileInfo:
        """Returns the `TileInfo` of a tile whose keys have these factors; `fields` are those that depend on the queries too."""
        return TileInfo(
            self.group, key_weight=factors.in_tile, log_gate=factors.log_gate, returns_pairs=self.returns_pairs, **fields
        )

    @property
    def returns_pairs(self) -> bool:
        """Whether the gradient of a tensor of the call is a sum over pairs: of `TileGradients.pairs` in the tiles."""
        return self.call.log_decay is not None or self.call.log_input_gate is not None

    def key_factors(self, span: Span) -> KeyFactors:
        """Returns the factors of a block of keys, without decays."""
        mask, gate = self.call.attention_mask, self.call.log_input_gate
        if mask is not None:
            mask = mask[:, None, None, :, None].expand(-1, self.k.shape[1], 1, -1, 1)
            mask = to_blocks(mask.to(compute_dtype(self.k.dtype)), span)
        return KeyFactors(mask, log_gate=None if gate is None else to_blocks(gate[:, :, None, :, None], span))


class InputGradients(NamedTuple):
    """The gradients of q, k and v, in their dtypes and layouts."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def zeros(cls, q: Tensor, k: Tensor, v: Tensor) -> InputGradients:
        """Returns zeros for these inputs."""
        return cls(*(empty_like_layout(x, x.shape[-1]).zero_() for x in (q, k, v)))

    def of_group(self, group: Group, kv_heads: int) -> InputGradients:
        """Returns the 5-d views of a head group, as `Operands` holds q, k and v."""
        return InputGradients(*(by_kv_head(x, kv_heads)[group] for x in self))


class Gradients:
    """Sums the gradients of the blocks of one head group in the compute dtype."""

    def __init__(self, ops: Operands, out: InputGradients, rpe: Tensor | None = None):
        """`out`: zeroed gradients of the head group; `rpe`: the gradient of the rpe matrix, summed over all groups."""
        self._ops = ops
        self._out = out
        self._sums = InputGradients(*(x if x.dtype == ops.dtype else torch.zeros_like(x, dtype=ops.dtype) for x in out))
        self._rpe: Any = rpe  # None where the tiles have no gradient of it
        self.decay = None if ops.call.log_decay is None else DecayGradient(ops.call.log_decay, ops.shift, ops.call.lag)
        self.gate = None if ops.call.log_input_gate is None else GateGradient(ops.call.log_input_gate)

    @staticmethod
    def _add(total: Tensor, span: Span, x: Tensor, scale: float = 1.0) -> None:
        total = total[:, :, :, span.start : span.stop]
        total.add_(from_blocks(x, span, total)[..., : total.shape[-1]], alpha=scale)

    def add_q(self, span: Span, x: Tensor) -> None:
        """Adds the gradient x of the scaled q."""
        self._add(self._sums.q, span, x, self._ops.score.scale)

    def add_k(self, span: Span, x: Tensor) -> None:
        self._add(self._sums.k, span, x)

    def add_v(self, span: Span, x: Tensor) -> None:
        self._add(self._sums.v, span, x)

    def add_tile(
        self, queries: Span, keys: Span, tile: TileGradients, rpe_rows: slice | None = None, adds_q: bool = True
    ) -> None:
        """Adds the gradients of a tile; without `adds_q` all but that of q."""
        if adds_q:
            self.add_q(queries, tile.q)
        self.add_k(keys, tile.k)
        self.add_v(keys, tile.v)
        if self.gate is not None:
            gated: Any = tile.pairs if tile.is_global is None else tile.pairs * tile.is_global
            self.gate.add_keys(keys.start, gated.sum(1))
        if self.decay is not None:
            self.decay.add_tile(queries.start, keys.start, tile.pairs)  # overwrites the pairs
        if tile.rpe is not None:
            self._rpe[rpe_rows] += tile.rpe

    def add_pairs_of_queries(self, queries: Span, x: Tensor) -> None:
        """Adds the sums over each query's pairs with keys of other chunks, (B, R, 1)."""
        if self.decay is not None:
            self.decay.add_queries(queries.start, x, self._ops.group)

    def add_pairs_of_keys(self, keys: Span, x: Tensor) -> None:
        """Adds the sums over each key's pairs with queries of other chunks, (B, length, 1)."""
        if self.decay is not None:
            self.decay.add_keys(keys.start, x)
        if self.gate is not None:
            self.gate.add_keys(keys.start, x.squeeze(-1))

    def per_head(self, before: Tensor | float = 0.0, after: Tensor | float = 0.0) -> dict[str, Tensor]:
        """Returns the gradients of the differentiable tensors with a dimension for kv heads, by name, after the last block.

        `before` and `after` are the arguments of `DecayGradient.result`.
        """
        grads = {}
        if self.decay is not None:
            grads["log_decay"] = self.decay.result(before, after)
        if self.gate is not None:
            grads["log_input_gate"] = self.gate.result()
        return grads

    def write(self) -> None:
        """Writes the sums to `out`."""
        for total, out in zip(self._sums, self._out, strict=True):
            if total is not out:
                out.copy_(total)


Carry = TypeVar("Carry", bound=tuple)  # what a scan carries from step to step


class Scan:
    """Runs a step over spans in order, carries a state from step to step, and passes each output to `sink`.

    If autograd records, two levels of checkpointing keep the number of live states at the square root of the number of spans.
    So `use_custom_gradient=False` needs linear memory too.
    """

    def __init__(self, checkpointing: bool):
        # Checkpointing uses saved-tensor hooks, which torch.func transforms refuse, and a function without a forward-mode
        # derivative in PyTorch 2.11.
        self.checkpointing = checkpointing and not is_transformed()

    def call(self, function: Callable[[Any, Any], Any], todo: Span | list[Span], state: tuple) -> Any:
        """Returns `function(todo, state)`, as a checkpoint if autograd records."""
        if not self.checkpointing:
            return function(todo, state)
        # Each tensor is an argument of its own: tensors inside a tuple would outlive the enclosing checkpoint.
        make = getattr(state, "_make", tuple)
        return checkpoint(lambda *state: function(todo, make(state)), *state, use_reentrant=False, preserve_rng_state=False)

    def __call__(
        self,
        step: Callable[[Span, Carry], tuple[Any, Carry]],
        state: Carry,
        todo: list[Span],
        sink: Callable[[Span, Any], None],
    ) -> Carry:
        block = isqrt(len(todo)) + 1 if self.checkpointing else 1

        def run(part: list[Span], state: Carry) -> tuple[list, Carry]:
            outputs = []
            for span in part:
                output, state = self.call(step, span, state) if len(part) > 1 else step(span, state)
                outputs.append(output)
            return outputs, state

        for first in range(0, len(todo), block):
            part = todo[first : first + block]
            outputs, state = self.call(run, part, state) if len(todo) > 1 else run(part, state)
            for span, output in zip(part, outputs, strict=True):
                sink(span, output)
        return state
