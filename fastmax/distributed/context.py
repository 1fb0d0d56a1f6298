"""Context parallel modules: `ContextParallel`, a style for `parallelize_module`, and `context_parallel`, a context manager.

Both create a `Context`. It replaces the attention functions, and the operations of `FastmaxSelfAttention` that involve several
tokens: positions, convolution and attention.

`context_parallel` has the interface of `torch.distributed.tensor.experimental.context_parallel`. That function cannot be
extended: it replaces `torch.nn.functional.scaled_dot_product_attention` by name, and dispatches its ring by a private table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from fastmax.core import validation
from fastmax.distributed import kept_keys as kept_keys_over_ranks
from fastmax.distributed.attention import (
    context_parallel_attention,
    context_parallel_flash_attention,
    tokens_before,
)
from fastmax.distributed.communication import all_gather
from fastmax.distributed.layout import Layout, Part, contiguous_layout, zigzag_layout
from fastmax.distributed.rank_consistency import check_consistency, describe_cu_seqlens, digest, mark_reported, report_errors
from fastmax.nn import kept_keys
from fastmax.nn.kept_keys import KeptOptions, LayerTokens
from fastmax.nn.multi_head_attention import FASTMultiHeadAttention
from fastmax.nn.self_attention import FastmaxSelfAttention
from fastmax.prepare import sharded_dispatch
from fastmax.prepare.bounds import sequence_at
from fastmax.prepare.padding import begins_of_runs
from fastmax.prepare.sharded_dispatch import outside_of_compiled_code

_KINDS = ("contiguous", "zigzag")
_CONTEXT_PARALLEL = {"fastmax_attention": context_parallel_attention, "flash_attention": context_parallel_flash_attention}


class Context:
    """A mesh and the layout of a sequence over its ranks.

    Args:
        mesh: a one-dimensional mesh.
        layout: "contiguous": rank r holds the r-th range of the sequence, of any length; "zigzag": the ranges of
            `zigzag_layout`; or a `Layout`.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    def __init__(self, mesh: DeviceMesh, layout: str | Layout = "contiguous"):
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a DeviceMesh, got {validation.describe(mesh)}")
        if mesh.ndim != 1:
            raise ValueError(f"mesh must have one dimension, got {mesh.ndim}: pick one, mesh['cp']")
        if not (isinstance(layout, Layout) or (isinstance(layout, str) and layout in _KINDS)):
            raise ValueError(f'layout must be "contiguous", "zigzag" or a Layout, got {validation.describe(layout)}')
        if isinstance(layout, Layout) and layout.world != mesh.size():
            raise ValueError(f"layout must be for the {mesh.size()} ranks of the mesh, got one for {layout.world}")
        self.mesh, self.layout = mesh, layout

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @outside_of_compiled_code
    def layout_of(self, tokens: int, name: str = "x") -> Layout:
        """Returns the layout, given the number of local tokens, those of the argument `name`.

        Without a fixed `Layout`, this is a rank consistency check.
        """
        if isinstance(self.layout, Layout):
            self._check_tokens(self.layout, tokens, name)
            return self.layout
        return self._consistent_layout(tokens, {})

    def _check_tokens(self, layout: Layout, tokens: int, name: str) -> None:
        held = layout.count(self.group.rank())
        with report_errors(self.group):
            if held != tokens:
                raise ValueError(f"{name} must have the {held} tokens of rank {self.group.rank()} in the layout, got {tokens}")

    def _consistent_layout(self, tokens: int, options: dict[str, str]) -> Layout:
        """Checks that all ranks have the same kind of layout and options. Returns the layout for their numbers of tokens."""
        kind = digest(self.layout.stretches) if isinstance(self.layout, Layout) else self.layout
        options = {"function": "a layer", "layout": kind} | options
        counts = (tokens,) if self.mesh.size() == 1 else check_consistency(self.group, options, tokens)
        return self.layout if isinstance(self.layout, Layout) else _layout_of_counts(self.layout, counts)

    @outside_of_compiled_code
    def of_one_forward(self, options: dict[str, object]) -> Context:
        """Returns a context for one forward of a layer, which checks the layout and the layer's options across ranks once."""
        return _ForwardContext(self.mesh, self.layout, options)

    def telling(self, check: Callable) -> Callable:
        """Wraps a check so that the other ranks raise its errors too."""

        @outside_of_compiled_code
        def tell(*arguments: object) -> object:
            with report_errors(self.group):
                return check(*arguments)

        return tell

    @outside_of_compiled_code
    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Returns the global positions of the local tokens, int64 (n,)."""
        parts = self.layout_of(tokens).of(self.group.rank())
        pieces = [torch.arange(part.start, part.stop, device=device) for part in parts]
        return torch.cat(pieces) if pieces else torch.arange(0, device=device)

    @outside_of_compiled_code
    def refuse_local_positions(self, positions: Tensor) -> None:
        """Raises an error on all ranks if positions (b, n) of the local tokens count from the first local one.

        A model that is not given the positions of its tokens counts so, also on ranks that hold later tokens.

        Raises:
            ValueError: they do. On a GPU, a device-side assertion fails instead.
        """
        n = positions.shape[-1]
        own, local = self.positions(n, positions.device), torch.arange(n, device=positions.device)
        wrong = (positions == local).all() & (own != local).any()
        message = (
            "position_ids must be the positions of this rank's tokens in the whole sequence, got 0, 1, 2, ...: pass them to "
            "the model, and to context_parallel as one of its buffers"
        )
        with report_errors(self.group):
            if wrong.is_cuda:
                torch._assert_async(~wrong, message)
            elif wrong:
                raise ValueError(message)

    @outside_of_compiled_code
    def with_tokens_before(self, x: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
        """Returns each local part of x behind the tokens before it, which other ranks send, and the positions of all of them.

        Args:
            x: (b, n, channels), the local tokens.
            count: number of tokens before each part. Before the sequence they are zeros, at position 0.

        Returns:
            (b, count + tokens of the part, channels) and int64 (count + tokens of the part,), global. A rank without parts gets
            one pair without tokens.
        """
        layout = self.layout_of(x.shape[1])
        parts = layout.of(self.group.rank()) or (Part(0, 0, 0, 0),)
        pieces = [x[:, part.local] for part in parts]
        if count > 0:
            # A rank without parts gets a tensor without tokens, so that it takes part in the backward's collective.
            before = tokens_before(x, count, group=self.group, layout=layout)
            pieces = [torch.cat(both, dim=1) for both in zip(before, pieces, strict=True)]
        starts = [part.stop - piece.shape[1] for part, piece in zip(parts, pieces, strict=True)]
        return [
            (piece, torch.arange(start, part.stop, device=x.device).clamp(min=0))
            for part, piece, start in zip(parts, pieces, starts, strict=True)
        ]

    @outside_of_compiled_code
    def attend_to_kept(self, tokens: LayerTokens, options: KeptOptions) -> tuple[Tensor, Tensor] | None:
        """Computes for local tokens what `fastmax.nn.kept_keys.attend` computes for whole sequences."""
        layout = self.layout_of(tokens.q.shape[2])
        with sharded_dispatch.entered(None):  # attention to kept keys is local
            if layout.world == 1:
                return kept_keys.attend(tokens, options)
            return kept_keys_over_ranks.attend(tokens, options, layout, self.group)

    @outside_of_compiled_code
    def refuse_gaps(self, mask: Tensor, cu_seqlens: Tensor | None) -> None:
        """Raises an error on all ranks if a sequence has padding between real tokens, which would shift later positions.

        All ranks must call it. `mask` is bool (b, n) of the local tokens, True = real token.

        Raises:
            ValueError: there is such padding. On a GPU, a device-side assertion fails instead.
        """
        layout = self.layout_of(mask.shape[1])
        if layout.world > 1:
            # These options determine the message sizes and the result.
            options = {"function": "a layer with attention_mask", "layout": digest(layout.stretches)}
            options |= {"batch of x": str(mask.shape[0]), "device of x": mask.device.type}
            options |= {"cu_seqlens": "None" if cu_seqlens is None else describe_cu_seqlens(cu_seqlens)}
            check_consistency(self.group, options, mask.shape[1])
        longest = max(layout.count(rank) for rank in range(layout.world))
        own = F.pad(mask.to(torch.uint8), (0, longest - mask.shape[1]))
        of_ranks = all_gather("padding of a layer", own, self.group).wait() if layout.world > 1 else own.unsqueeze(0)
        real = mask.new_zeros(mask.shape[0], layout.tokens)
        for rank in range(layout.world):
            for part in layout.of(rank):
                real[:, part.start : part.stop] = of_ranks[rank][:, part.local].bool()
        begins = begins_of_runs(real)
        if cu_seqlens is None:
            runs = begins.sum(1)
        else:
            at = torch.arange(layout.tokens, device=mask.device)
            sequence = sequence_at(cu_seqlens, at)
            begins |= real & (at == cu_seqlens[sequence])
            runs = torch.zeros(cu_seqlens.shape[0], dtype=torch.int64, device=mask.device)
            runs = runs.scatter_add(0, sequence, begins[0].long())
        message = (
            "attention_mask of a context parallel layer must have padding only on the left or on the right of the real tokens "
            "of a sequence, got padding between them"
        )
        if mask.is_cuda:
            torch._assert_async((runs <= 1).all(), message)
        elif (runs > 1).any():
            raise ValueError(message)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Returns a copy of the local tokens of x, which holds the whole sequence in dimension `dim`.

        Raises:
            TypeError, ValueError: x is no tensor, or has no such dimension, or not the layout's number of tokens there.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a torch.Tensor, got {validation.describe(x)}")
        _check_dim("dim", dim, x)
        tokens, group = x.shape[dim], self.group
        if isinstance(self.layout, Layout):
            layout = self.layout
        elif self.layout == "zigzag":
            layout = zigzag_layout(tokens, group.size())
        else:
            ends = [rank * tokens // group.size() for rank in range(group.size() + 1)]
            layout = contiguous_layout([stop - start for start, stop in pairwise(ends)])
        if layout.tokens != tokens:
            raise ValueError(f"dimension {dim} must have the layout's {layout.tokens} tokens, got {tokens}")
        parts = [x.narrow(dim, part.start, part.tokens) for part in layout.of(group.rank())]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()

    @property
    def attentions(self) -> tuple[Callable, Callable]:
        """The context parallel forms of `fastmax_attention` and `flash_attention`."""
        fastmax, flash = _CONTEXT_PARALLEL.values()
        return partial(self._attend, fastmax), partial(self._attend, flash)

    def call(self, attention: Callable, arguments: dict) -> Tensor | tuple[Tensor, Tensor]:
        """Runs `fastmax_attention` or `flash_attention` on the local tokens."""
        return self._attend(_CONTEXT_PARALLEL[attention.__name__], **arguments)

    @outside_of_compiled_code
    def _attend(
        self, attention: Callable, q: Tensor, k: Tensor, v: Tensor, use_custom_gradient: bool = True, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        with report_errors(self.group):
            if not use_custom_gradient:
                raise ValueError(
                    "use_custom_gradient=False is not supported with context parallelism: autograd cannot record collectives"
                )
            sharded_dispatch.refuse("context parallelism takes the local tokens as plain tensors", q=q, k=k, v=v)
            if not isinstance(q, Tensor):
                raise TypeError(f"q must be a torch.Tensor, got {validation.describe(q)}")
            validation.check_dense("q", q)
            if q.dim() != 4:
                raise ValueError(f"q must be 4-d (batch, heads, tokens, head_dim) with context parallelism, got {q.dim()}-d")
        # With contiguous ranges the attention function itself exchanges the numbers of tokens.
        layout = None if self.layout == "contiguous" else self.layout_of(q.shape[2], "q")
        with sharded_dispatch.entered(None):
            return attention(q, k, v, group=self.group, layout=layout, **options)


class _ForwardContext(Context):
    """The context of one forward of a layer. It checks the layout and the layer's options across ranks on first use."""

    def __init__(self, mesh: DeviceMesh, layout: str | Layout, options: dict[str, object]):
        super().__init__(mesh, layout)
        self._options = {name: str(x) for name, x in options.items()}
        self._checked_layout: Layout | None = None

    @outside_of_compiled_code
    def layout_of(self, tokens: int, name: str = "x") -> Layout:
        if self._checked_layout is None or self._checked_layout.count(self.group.rank()) != tokens:
            if isinstance(self.layout, Layout):
                self._check_tokens(self.layout, tokens, name)
            self._checked_layout = self._consistent_layout(tokens, self._options)
        return self._checked_layout


@lru_cache(maxsize=64)
def _layout_of_counts(kind: str, counts: tuple[int, ...]) -> Layout:
    """Returns the layout of a kind for the number of tokens of each rank."""
    if kind == "contiguous":
        return contiguous_layout(counts)
    layout = zigzag_layout(sum(counts), len(counts))
    expected = tuple(layout.count(rank) for rank in range(layout.world))
    if counts != expected:
        error = ValueError(f"ranks must hold {expected} tokens in a zigzag layout of {sum(counts)}, got {counts}")
        raise mark_reported(error)
    return layout


class ContextParallel(ParallelStyle):
    """Shards the tokens of every `FastmaxSelfAttention` and `FASTMultiHeadAttention` in a module over a mesh.

        parallelize_module(model, mesh, {"blocks.*.attn": ContextParallel()})

    Each rank passes its local tokens x (b, n, embed_dim) and gets their outputs. Positions, convolutions, decays and windows
    extend across ranks. `cu_seqlens` covers the whole sequence and is the same on all ranks. `attention_mask` covers the local
    tokens; padding must be on the left or right of a sequence. All ranks must run the forwards and backwards in the same
    order. Decoding states are not supported. Layers with `kept_keys` take neither `cu_seqlens` nor `attention_mask`.

    The weight gradients of a rank are those of its local tokens. Sum them over ranks if the loss is a sum over tokens, or is
    divided by the number of tokens of all ranks.

    Args:
        layout: "contiguous", "zigzag" (balances softmax layers), or a `Layout`.

    Raises:
        TypeError: the module contains no such layer.
        ValueError: the mesh has more than one dimension.
    """

    def __init__(self, layout: str | Layout = "contiguous"):
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        context = Context(device_mesh, self.layout)
        layers = [layer for layer in module.modules() if isinstance(layer, (FastmaxSelfAttention, FASTMultiHeadAttention))]
        if not layers:
            raise TypeError(
                "ContextParallel needs a FastmaxSelfAttention or FASTMultiHeadAttention, got "
                f"{type(module).__name__} without one"
            )
        for layer in layers:
            layer.context = context
        return module


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: Collection[Tensor] = (),
    layout: str | Layout = "contiguous",
) -> Iterator[None]:
    """Context manager that shards the tokens of attention functions and layers over a mesh.

    It applies to `fastmax_attention`, `flash_attention` and the layers built on them. The interface follows
    `torch.distributed.tensor.experimental.context_parallel`.

    Args:
        mesh: a one-dimensional mesh.
        buffers: tensors that hold whole sequences, such as inputs and targets, the same on all ranks. Inside the block they
            hold the local tokens, in place.
        buffer_seq_dims: the token dimension of each buffer.
        no_restore_buffers: those of `buffers` that are not restored at the end of the block.
        layout: as in `ContextParallel`.

    Raises:
        TypeError, ValueError: naming the argument.

    The context applies to the current thread and to the backward that this thread calls. Run the backward inside the block if
    it needs a restored buffer or recomputes activations (`torch.utils.checkpoint`), since a recomputed forward uses the context
    that is active at that time.
    """
    context = Context(mesh, layout)
    for name, given in (("buffers", buffers), ("buffer_seq_dims", buffer_seq_dims)):
        if isinstance(given, Tensor) or not isinstance(given, Sequence):
            raise TypeError(f"{name} must be a sequence, got {validation.describe(given)}")
    if len(buffers) != len(buffer_seq_dims):
        raise ValueError(f"buffer_seq_dims must have one dimension per buffer, got {len(buffer_seq_dims)} for {len(buffers)}")
    for i, x in enumerate(buffers):
        if not isinstance(x, Tensor) or x.requires_grad:
            raise TypeError(f"buffers[{i}] must be a tensor without gradient, got {validation.describe(x)}")
        if not x.is_contiguous():
            raise ValueError(f"buffers[{i}] must be contiguous to be resized in place: pass a copy, got strides {x.stride()}")
        _check_dim(f"buffer_seq_dims[{i}]", buffer_seq_dims[i], x)
        for j in range(i):
            if _overlap(x, buffers[j]):
                raise ValueError(f"buffers[{i}] shares memory with buffers[{j}], and each is written in place: pass a copy")
    for x in no_restore_buffers:
        if not any(x is buffer for buffer in buffers):
            raise ValueError("no_restore_buffers must be a subset of buffers")
    parts = [context.own(x, dim) for x, dim in zip(buffers, buffer_seq_dims, strict=True)]
    whole = [None if any(x is y for y in no_restore_buffers) else x.clone() for x in buffers]
    _write(buffers, parts)
    try:
        with sharded_dispatch.entered(context):
            yield
    finally:
        _write(buffers, whole)


def _check_dim(name: str, dim: object, x: Tensor) -> None:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{name} must be an int, got {validation.describe(dim)}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{name} must be a dimension of a tensor with {x.ndim}, got {dim}")


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Returns whether two contiguous tensors share memory."""
    if x.device != y.device or min(x.numel(), y.numel()) == 0:
        return False
    return x.data_ptr() < y.data_ptr() + y.nbytes and y.data_ptr() < x.data_ptr() + x.nbytes


@torch.no_grad()
def _write(buffers: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    for x, value in zip(buffers, values, strict=True):
        if value is not None:
            x.resize_(value.shape).copy_(value)
