"""Blocks of q, k and v, the operands of a head group, and the sums of their gradients.

A block is a contiguous run of tokens of a group of heads, as a 3-d tensor of the compute dtype: fp32 for fp32, fp16 and
bfloat16 input, fp64 for fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isqrt
from types import ModuleType
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastmax.core.call import Call
from fastmax.core.score import Score, Softmax
from fastmax.eager.decay import Decay, DecayGradient


class Span(NamedTuple):
    """Tokens `start .. start + count * length`: `count` chunks of `length`, handled side by side."""

    start: int
    count: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.length


Group = tuple[slice, slice]  # the batch entries and the kv heads of a head group

# Takes a span of queries with the sums of its attention: the numerator (B, R, dv), the denominator (B, R, 1), and for softmax
# the maximum (B, R, 1) that both are relative to.
Sink = Callable[[Span, tuple[Tensor, ...]], None]


def spans(start: int, stop: int, length: int, count: int = 1) -> list[Span]:
    """Cover `start .. stop` by chunks of `length`, `count` at a time; the ragged rest is a chunk of its own."""
    out = []
    while stop - start >= length:
        out.append(Span(start, min(count, (stop - start) // length), length))
        start = out[-1].stop
    if stop > start:
        out.append(Span(start, 1, stop - start))
    return out


def head_groups(batch: int, heads: int, size: int) -> Iterator[Group]:
    """Slices over batch and kv heads with at most `size` (batch, head) pairs each."""
    head_step = min(heads, size)
    batch_step = max(1, size // heads)
    for b in range(0, batch, batch_step):
        for h in range(0, heads, head_step):
            yield slice(b, b + batch_step), slice(h, h + head_step)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def token_major(x: Tensor) -> bool:
    """Whether (b, h, n, channels) lies as (b, n, h, channels)."""
    return x.stride(1) < x.stride(2)


def empty_like_layout(x: Tensor, channels: int, dtype: torch.dtype | None = None, tokens: int | None = None) -> Tensor:
    """Uninitialised (b, h, n, channels), token-major in memory, as (b, n, h, channels), where x is, else contiguous; n is that
    of x where `tokens` is None."""
    b, h, n, _ = x.shape
    n = n if tokens is None else tokens
    if token_major(x):
        return x.new_empty(b, n, h, channels, dtype=dtype).transpose(1, 2)
    return x.new_empty(b, h, n, channels, dtype=dtype)


def split_heads(x: Tensor, kv_heads: int) -> Tensor:
    """Reshape (b, h, tokens, c) to (b, kv_heads, h // kv_heads, tokens, c)."""
    return x.unflatten(1, (kv_heads, -1))


def to_blocks(x: Tensor, span: Span) -> Tensor:
    """(batch, kv heads, group, tokens, c) -> (batch * kv heads * span.count, group * span.length, c), compute dtype."""
    x = x[:, :, :, span.start : span.stop].to(compute_dtype(x.dtype))
    return rearrange(x, "b h g (count t) c -> (b h count) (g t) c", count=span.count)


def from_blocks(x: Tensor, span: Span, like: Tensor) -> Tensor:
    """Inverse of `to_blocks` for the (batch, kv heads, group) of `like`, in the compute dtype."""
    b, h, g = like.shape[:3]
    return rearrange(x, "(b h count) (g t) c -> b h g (count t) c", b=b, h=h, g=g, count=span.count)


class KeyFactors(NamedTuple):
    """The factors of a block of keys, each (B, length, 1) or None for 1, that multiply f(s) in the weights of these keys.

    Every pair of a query and a key is computed either in a tile or through the state. In a tile its weight is multiplied by
    `weight`; the tile's exponent holds the decays. Where the key enters the state, its weight is multiplied by both. The
    gradient of v gets the same factor: a tile's from the weights, the state's from `times_state_factor`.
    """

    weight: Tensor | None  # of the attention mask: 0 where a key is masked, else 1
    decay: Tensor | None = None  # from the key to the end of its chunk

    @property
    def in_state(self) -> Tensor | None:
        """The product of all factors, with which the key enters the state."""
        if self.weight is None or self.decay is None:
            return self.decay if self.weight is None else self.weight
        return self.weight * self.decay

    def times_state_factor(self, x: Tensor) -> Tensor:
        """Return x (B, length, channels) times `in_state`."""
        factor = self.in_state
        return x if factor is None else x * factor


@dataclass(frozen=True)
class Operands:
    """One head group of the operator's inputs. 5-d: (batch, kv heads, group, tokens, channels), group = 1 for k and v."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: Call  # its tensors are the group's
    tiles: ModuleType  # `fastmax.eager.tiles` or, for softmax, `fastmax.eager.flash`
    decay: Decay | None = None  # of the call's log_decay, k_start and k_end

    @property
    def score(self) -> Score | Softmax:
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
        """Key `i + shift` is the last one that query i sees when causal."""
        return self.m - self.n

    def q_block(self, span: Span) -> Tensor:
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

    def key_factors(self, span: Span) -> KeyFactors:
        """Return the factors of a block of keys, without decays."""
        mask = self.call.attention_mask
        if mask is None:
            return KeyFactors(None)
        mask = mask[:, None, None, :, None].expand(-1, self.k.shape[1], 1, -1, 1)
        return KeyFactors(to_blocks(mask.to(compute_dtype(self.k.dtype)), span))


class InputGradients(NamedTuple):
    """The gradients of q, k and v, in their dtypes and layouts."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def zeros(cls, q: Tensor, k: Tensor, v: Tensor) -> InputGradients:
        """Return zeros for these inputs."""
        return cls(*(empty_like_layout(x, x.shape[-1]).zero_() for x in (q, k, v)))

    def of_group(self, group: Group, kv_heads: int) -> InputGradients:
        """Return the 5-d views of a head group, as `Operands` holds q, k and v."""
        return InputGradients(*(split_heads(x, kv_heads)[group] for x in self))


class Gradients:
    """Sums the blocks' gradients of one head group in the compute dtype, then writes them out."""

    def __init__(self, ops: Operands, out: InputGradients, rpe: Tensor | None = None):
        """`out`: zeroed views of the head group; `rpe`: the sum of grad_rpe over all groups."""
        self._ops = ops
        self._out = out
        self._sums = InputGradients(*(x if x.dtype == ops.dtype else torch.zeros_like(x, dtype=ops.dtype) for x in out))
        self._rpe = rpe
        self.decay = None if ops.call.log_decay is None else DecayGradient(ops.call.log_decay, ops.shift)

    @staticmethod
    def _add(total: Tensor, span: Span, x: Tensor, scale: float = 1.0) -> None:
        total = total[:, :, :, span.start : span.stop]
        total.add_(from_blocks(x, span, total)[..., : total.shape[-1]], alpha=scale)

    def add_q(self, span: Span, x: Tensor) -> None:
        """x is the gradient of the scaled q."""
        self._add(self._sums.q, span, x, self._ops.score.scale)

    def add_k(self, span: Span, x: Tensor) -> None:
        self._add(self._sums.k, span, x)

    def add_v(self, span: Span, x: Tensor) -> None:
        self._add(self._sums.v, span, x)

    def add_rpe(self, rows: slice, x: Tensor) -> None:
        self._rpe[rows] += x

    def write(self) -> None:
        for total, out in zip(self._sums, self._out, strict=True):
            if total is not out:
                out.copy_(total)


def recording(*tensors: Tensor | None) -> bool:
    """Whether operations on these tensors are recorded, by autograd or by a compiler: then none writes in place."""
    return torch.compiler.is_compiling() or differentiating(*tensors)


def differentiating(*tensors: Tensor | None) -> bool:
    """Whether autograd (reverse or forward mode, torch.func too) watches an operation on these tensors."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return True
    return is_transformed()


def is_transformed() -> bool:
    """Whether forward mode or a torch.func transform is active."""
    return torch.autograd.forward_ad._current_level >= 0 or in_functorch()


def in_functorch() -> bool:
    """Whether a torch.func transform (grad, vmap, jvp, ...) is active."""
    return torch._C._are_functorch_transforms_active()  # which, unlike the stack of transforms itself, compilers see through


class Scan:
    """Runs a step over spans in order, carrying a state, and hands each output to `sink`.

    Two levels of checkpointing, for when autograd records, keep the number of live states at the square root of the number
    of spans, so that `use_custom_gradient=False` is linear in memory too.
    """

    def __init__(self, checkpointing: bool):
        # Checkpointing is made of saved-tensor hooks, which torch.func transforms refuse, and of a function that has no
        # forward-mode derivative in PyTorch 2.11.
        self.checkpointing = checkpointing and not is_transformed()

    def call(self, function: Callable, todo: Span | list[Span], state: tuple):
        if not self.checkpointing:
            return function(todo, state)
        # Tensor by tensor: what hides in a tuple would outlive the checkpoint around this one.
        make = getattr(state, "_make", tuple)
        return checkpoint(lambda *state: function(todo, make(state)), *state, use_reentrant=False, preserve_rng_state=False)

    def __call__(self, step: Callable, state: tuple, todo: list[Span], sink: Callable[[Span, object], None]) -> tuple:
        block = isqrt(len(todo)) + 1 if self.checkpointing else 1

        def run(part: list[Span], state: tuple):
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
