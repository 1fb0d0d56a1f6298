"""Context parallel attention functions: the tokens of a sequence are sharded over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fastmax import eager, ops
from fastmax.core import validation
from fastmax.core.call import Call
from fastmax.core.score import Score, Softmax, log_of_sums
from fastmax.distributed import ring, states
from fastmax.distributed.halo import around, halo
from fastmax.distributed.layout import Layout, Part, contiguous_layout
from fastmax.distributed.part_decays import PartDecays
from fastmax.distributed.rank_consistency import check_consistency, describe_cu_seqlens, digest, report_errors
from fastmax.eager.planner import choose_algorithm
from fastmax.functional import fastmax_attention, flash_attention
from fastmax.ops.merge import merge_attention
from fastmax.prepare.bounds import sequence_at
from fastmax.prepare.positional import token_positions
from fastmax.prepare.sharded_dispatch import outside_of_compiled_code
from fastmax.prepare.tensors import Positions, cast_for_autocast, dropout_noise, prepare_queries_and_keys

Group: TypeAlias = dist.ProcessGroup | DeviceMesh | None


@outside_of_compiled_code
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    layout: Layout | None = None,
    causal: bool = False,
    drop_noise: Tensor | None = None,
    rpe_matrix: str | None = None,
    dropout: float = 0.0,
    normalize: bool | str = False,
    temperature: float = 1.0,
    a0: float = 1.0,
    a1: float = 1.0,
    a2: float = 0.5,
    lim: float = 1.0,
    p: int = 2,
    attention_mask: Tensor | None = None,
    algorithm: str = "auto",
    log_decay: Tensor | None = None,
    exact_window: int = 0,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
    log_input_gate: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes `fastmax_attention` of a sequence whose tokens are sharded over the ranks of a process group.

    Each rank passes its own tokens and gets their outputs, and in the backward their gradients. The linear algorithm exchanges
    states, whose size does not depend on the number of tokens. The quadratic algorithm is ring attention. All ranks must run
    the forward and the backward of the same calls in the same order.

    Args:
        q: (b, h, n, d), the n local tokens; dtypes as in `fastmax_attention`.
        k: (b, hk, n, d), h a multiple of hk.
        v: (b, hk, n, dv).
        group: process group, or a one-dimensional DeviceMesh; None: the default group.
        layout: which tokens each rank holds, the same on all ranks: a `Layout`, or for each rank its ranges (start, stop) of
            global tokens. None: rank r holds the r-th range, of as many tokens as it passes.
        attention_mask: bool (b, n) of the local tokens; given on all ranks or on none.
        drop_noise: noise of the local output. None: drawn from the generator of this rank.
        rpe_matrix: None or "sinusoidal".
        normalize: False or "token".
        log_decay, log_input_gate: (b, hk, n) of the local tokens; each given on all ranks or on none.
        cu_seqlens: int32 (s + 1,) of the whole sequence, the same on all ranks.
        causal, dropout, temperature, a0, a1, a2, lim, p, algorithm, exact_window, return_lse: as in `fastmax_attention`, the
            same on all ranks. "auto" chooses by the length of the whole sequence.

    Returns:
        o (b, h, n, dv) in q's dtype; with `return_lse` also lse (b, h, n).

    Raises:
        TypeError, ValueError: naming the argument, on all ranks that call; also if options differ between ranks.
        RuntimeError: a rank exited or did not call within `set_time_limit`; a second derivative was requested.
    """
    group = _process_group(group)
    with report_errors(group):
        validation.check_flag("causal", causal)
        q, k, v = cast_for_autocast(q, k, v)
        _check_tensors(q, k, v, causal, attention_mask, log_decay, log_input_gate, cu_seqlens)
        score = validation.check_score(temperature, a0, a1, a2, p)
        kind = validation.check_normalize(normalize, lim)
        if kind == "sequence":
            raise ValueError(f'normalize must be False or "token", got {normalize!r}: "sequence" needs the tokens of all ranks')
        dropout = validation.check_not_negative("dropout", dropout)
        validation.check_drop_noise(drop_noise, dropout, q, v.shape[-1])
        validation.check_rpe_name(rpe_matrix, "its rows would be those of the whole sequence")
        validation.check_algorithm(algorithm, rpe_matrix)
        validation.check_exact_window(exact_window)
        validation.check_bool("return_lse", return_lse)
        options = {"function": "context_parallel_attention", "score": score, "normalize": kind, "lim": float(lim)}
        options |= {"dropout": dropout, "rpe_matrix": rpe_matrix, "algorithm": algorithm, "exact_window": exact_window}
        layout = _check_layout(layout, group, q.shape[2])
    if group.size() == 1:
        return fastmax_attention(
            q, k, v, causal=causal, drop_noise=drop_noise, rpe_matrix=rpe_matrix, dropout=dropout, normalize=normalize,
            temperature=temperature, a0=a0, a1=a1, a2=a2, lim=lim, p=p, attention_mask=attention_mask, algorithm=algorithm,
            log_decay=log_decay, exact_window=exact_window, cu_seqlens=cu_seqlens, return_lse=return_lse,
            log_input_gate=log_input_gate,
        )  # fmt: skip
    tensors = q, k, v, attention_mask, log_decay, log_input_gate
    arguments = _check_across_ranks(group, layout, *tensors, causal, cu_seqlens, options)
    validation.warn_if_vanishing(score, kind, lim, rpe_matrix is not None)
    positions = None if rpe_matrix is None else _positions(arguments.parts, q.device)
    q, k = prepare_queries_and_keys(q, k, kind, lim, positions)
    algorithm = _algorithm(algorithm, q, k, v, arguments, exact_window, score)
    with ops.without_autocast(q):
        o, lse = _attend(q, k, v, arguments, score, algorithm, exact_window)
        noise = dropout_noise(drop_noise, dropout, o.shape, o)
        if noise is not None:
            o = torch.addcmul(o, o, noise, value=dropout)
    return (o, lse) if return_lse else o


@outside_of_compiled_code
def context_parallel_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    attention_mask: Tensor | None = None,
    return_lse: bool = False,
    log_decay: Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    cu_seqlens: Tensor | None = None,
    log_input_gate: Tensor | None = None,
    group: Group = None,
    layout: Layout | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes `flash_attention` (softmax) of a sequence whose tokens are sharded over the ranks of a process group.

    Uses ring attention: keys and values are sent from rank to rank while each rank attends to those it has received. With a
    window, ranks exchange only the tokens next to each part. For causal attention, `layout=zigzag_layout(tokens, world)` gives
    all ranks the same work; with contiguous parts the last rank has the most.

    Args:
        q, k, v: (b, h, n, d), (b, hk, n, d), (b, hk, n, dv), the n local tokens.
        window: None, or bounded on both sides, or on the left if causal.
        attention_mask, log_decay, log_input_gate, cu_seqlens, group, layout: as in `context_parallel_attention`.
        causal, scale, return_lse: as in `flash_attention`.

    Returns:
        o (b, h, n, dv) in q's dtype; with `return_lse` also lse (b, h, n).

    Raises:
        TypeError, ValueError, RuntimeError: as in `context_parallel_attention`.

    Method: Liu et al., "Ring Attention with Blockwise Transformers", 2023 (arXiv:2310.01889). The zigzag layout balances work
    like Brandon et al., "Striped Attention", 2023 (arXiv:2311.09431), but with contiguous ranges.
    """
    group = _process_group(group)
    with report_errors(group):
        validation.check_flag("causal", causal)
        validation.check_bool("return_lse", return_lse)
        q, k, v = cast_for_autocast(q, k, v)
        _check_tensors(q, k, v, causal, attention_mask, log_decay, log_input_gate, cu_seqlens)
        score = Softmax(validation.check_scale(scale, q.shape[-1]))
        left, right = validation.check_window(window)
        right = 0 if causal else right
        if (left < 0) != (right < 0) and not (causal and left < 0):
            raise ValueError(f"window must be bounded on both sides or on none, got {window!r}")
        layout = _check_layout(layout, group, q.shape[2])
    if group.size() == 1:
        return flash_attention(
            q,
            k,
            v,
            causal=causal,
            scale=scale,
            attention_mask=attention_mask,
            return_lse=return_lse,
            log_decay=log_decay,
            window=window,
            cu_seqlens=cu_seqlens,
            log_input_gate=log_input_gate,
        )
    options = {"function": "context_parallel_flash_attention", "score": score, "window": (left, right)}
    tensors = q, k, v, attention_mask, log_decay, log_input_gate
    arguments = _check_across_ranks(group, layout, *tensors, causal, cu_seqlens, options)
    left, right = (min(side, arguments.layout.tokens) for side in (left, right))  # memory is allocated for the whole halo
    with ops.without_autocast(q):
        if left >= 0:
            o, lse = _in_window(q, _with_halo(k, v, arguments, left, right), arguments, score, left, right)
        elif causal:
            o, lse = _start_causal(q, _with_halo(k, v, arguments, 0, 0), arguments, score)()
        else:
            o, lse = _non_causal_ring(q, k, v, arguments, score)
    return (o, lse) if return_lse else o


@outside_of_compiled_code
def tokens_before(x: Tensor, count: int, *, group: Group = None, layout: Layout | None = None) -> tuple[Tensor, ...]:
    """Returns the `count` tokens before each local part, which other ranks hold. A causal convolution needs them.

    Differentiable. All ranks must call it and run its backward.

    Args:
        x: (b, n, c), the n local tokens; any floating dtype.
        count: number of tokens, >= 1.
        group, layout: as in `context_parallel_attention`.

    Returns:
        (b, count, c) for each part, zeros before the start of the sequence. On a rank without parts, one tensor (b, 0, c),
        which keeps the rank in the backward.

    Raises:
        TypeError, ValueError, RuntimeError: as in `context_parallel_attention`.
    """
    group = _process_group(group)
    with report_errors(group):
        if not isinstance(x, Tensor) or x.dim() != 3 or not x.is_floating_point():
            raise TypeError(f"x must be a floating-point tensor (batch, tokens, channels), got {validation.describe(x)}")
        validation.check_count("count", count)
        layout = _check_layout(layout, group, x.shape[1], "x")
    options = {"function": "tokens_before", "count": count, "dtype of x": x.dtype, "device of x": x.device.type}
    options |= {"batch of x": x.shape[0], "channels of x": x.shape[2]}
    options |= {"gradient of x": x.requires_grad and torch.is_grad_enabled()}
    layout = _check_layout_across_ranks(group, layout, x.shape[1], options)
    (before,) = halo((x.unsqueeze(1),), count, 0, layout, group)
    return before.squeeze(1).split(count, dim=1)


class _Arguments(NamedTuple):
    """The arguments of a call beside q, k and v. `cu_seqlens` is global, the other tensors are local."""

    causal: bool
    mask: Tensor | None
    log_decay: Tensor | None
    log_input_gate: Tensor | None  # in the compute dtype and its range
    cu_seqlens: Tensor | None
    layout: Layout
    group: dist.ProcessGroup

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of this rank."""
        return self.layout.of(self.group.rank())


class _PartKeys(NamedTuple):
    """Keys, values, mask, decays and gates of a part and its halo, m tokens. The halo ends where the sequence does."""

    k: Tensor  # (b, hk, m, d)
    v: Tensor
    mask: Tensor | None  # bool (b, m)
    log_decay: Tensor | None  # (b, hk, m)
    log_input_gate: Tensor | None  # (b, hk, m)

    def narrow(self, first: int, count: int) -> _PartKeys:
        if count == self.k.shape[2]:  # a view would cost a copy into zeros in the backward
            return self
        return self._each(lambda x, dim: x.narrow(dim, first, count))

    def flipped(self) -> _PartKeys:
        return self._each(lambda x, dim: x.flip(dim))

    def _each(self, function: Callable[[Tensor, int], Tensor]) -> _PartKeys:
        return _PartKeys(*(None if x is None else function(x, dim) for x, dim in zip(self, _TOKEN_DIMENSIONS, strict=True)))


_TOKEN_DIMENSIONS = (2, 2, 1, 2, 2)


class _Keys(NamedTuple):
    """Keys of this rank, part by part."""

    parts: list[_PartKeys]
    none: _PartKeys  # zero tokens: keeps a rank without parts in the autograd graph, because others wait for it in the backward
    own: _PartKeys | None = None  # all local tokens, if there is no halo

    def each(self, function: Callable[[_PartKeys], _PartKeys]) -> _Keys:
        return self._replace(parts=[function(x) for x in self.parts])

    def side_by_side(self) -> _PartKeys:
        if len(self.parts) == 1:
            return self.parts[0]
        of_parts = _PartKeys(*zip(self.none, *self.parts, strict=True))
        if self.own is not None:
            return self.own._replace(log_decay=None if self.own.log_decay is None else torch.cat(of_parts.log_decay, dim=2))
        return of_parts._each(lambda x, dim: None if x[0] is None else torch.cat(x, dim=dim))


# ---- arguments


def _process_group(group: Group) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError(
            "fastmax.distributed needs an initialized process group: call torch.distributed.init_process_group first"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be a one-dimensional DeviceMesh, got one of {group.ndim}: pick one, mesh['cp']")
        return group.get_group()
    if group is None:
        return dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group of this rank, a DeviceMesh or None, got {validation.describe(group)}")
    return group


def _check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    mask: Tensor | None,
    log_decay: Tensor | None,
    log_input_gate: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    validation.check_tensors(q, k, v, causal, mask, log_decay, log_input_gate)
    if q.dim() != 4:
        raise ValueError(f"q must be 4-d (batch, heads, tokens, head_dim) with context parallelism, got {q.dim()}-d")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"k and v must have q's number of tokens {q.shape[2]}, got {k.shape[2]}")
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be an int32 tensor or None, got {validation.describe(cu_seqlens)}")


def _check_layout(layout: Any, group: dist.ProcessGroup, n: int, name: str = "q") -> Layout | None:
    """Returns the layout; checks that it has the group's ranks, and for this one the n tokens of the argument `name`."""
    if layout is None:
        return None
    layout = layout if isinstance(layout, Layout) else Layout(layout)
    if layout.world != group.size():
        raise ValueError(f"layout must be for {group.size()} ranks, got one for {layout.world}")
    if layout.count(group.rank()) != n:
        raise ValueError(f"{name} must have the {layout.count(group.rank())} tokens that layout[{group.rank()}] holds, got {n}")
    return layout


def _check_across_ranks(
    group: dist.ProcessGroup,
    layout: Layout | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    log_decay: Tensor | None,
    log_input_gate: Tensor | None,
    causal: bool,
    cu_seqlens: Tensor | None,
    options: dict,
) -> _Arguments:
    """Checks that all ranks pass the same options, tensor shapes and dtypes. Returns the arguments with the layout."""
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "log_input_gate": log_input_gate}
    grads = [name for name, x in tensors.items() if x is not None and x.requires_grad] if torch.is_grad_enabled() else []
    options = options | {
        "causal": bool(causal), "dtype of q": q.dtype, "device of q": q.device.type,
        "batch of q": q.shape[0], "heads of q": q.shape[1], "heads of k": k.shape[1], "head_dim of q": q.shape[3],
        "head_dim of v": v.shape[3], "presence of attention_mask": mask is not None,
        "log_decay": None if log_decay is None else "given",
        "log_input_gate": None if log_input_gate is None else "given",
        "cu_seqlens": None if cu_seqlens is None else describe_cu_seqlens(cu_seqlens),
        "tensors with gradients": grads,
    }  # fmt: skip
    layout = _check_layout_across_ranks(group, layout, q.shape[2], options)
    validation.check_cu_seqlens(cu_seqlens, q, k, layout.tokens)
    gate = None if log_input_gate is None else eager.clamped_gate(log_input_gate, eager.compute_dtype(q.dtype))
    return _Arguments(causal, mask, log_decay, gate, cu_seqlens, layout, group)


def _check_layout_across_ranks(group: dist.ProcessGroup, layout: Layout | None, n: int, options: dict) -> Layout:
    """Checks that all ranks pass the same layout and options. Returns the layout; for None, that of contiguous ranges."""
    if group.size() == 1:
        return contiguous_layout((n,)) if layout is None else layout
    options = options | {"layout": None if layout is None else digest(layout.stretches)}
    counts = check_consistency(group, {name: str(x) for name, x in options.items()}, n)
    return contiguous_layout(counts) if layout is None else layout


def _algorithm(name: str, q: Tensor, k: Tensor, v: Tensor, arguments: _Arguments, exact_window: int, score: Score) -> str:
    """Returns "linear" or "quadratic", chosen from arguments that are the same on all ranks."""
    tokens = arguments.layout.tokens
    if arguments.cu_seqlens is not None:
        if not arguments.causal and exact_window == 0:
            return validation.algorithm_without_state(name)
        tokens = max(1, tokens // (arguments.cu_seqlens.shape[0] - 1))
    if name != "auto":
        return name
    causal = arguments.causal or exact_window > 0
    return choose_algorithm(tokens, tokens, q.shape[-1], v.shape[-1], causal, score.order, q.shape[1] // max(1, k.shape[1]))


def _positions(parts: tuple[Part, ...], device: torch.device) -> Positions:
    """Returns the global positions of this rank's tokens."""
    own = [token_positions(part.start, part.tokens, device) for part in parts]
    positions = torch.cat(own) if own else token_positions(0, 0, device)
    return Positions(positions, positions)


# ---- attention


def _attend(
    q: Tensor, k: Tensor, v: Tensor, arguments: _Arguments, score: Score, algorithm: str, window: int
) -> tuple[Tensor, Tensor]:
    """Returns the output and the log of the denominators."""
    window = min(window, max(1, arguments.layout.tokens))  # memory is allocated for the whole halo
    if window == 0:
        if arguments.causal:
            return _start_causal(q, _with_halo(k, v, arguments, 0, 0), arguments, score, algorithm)()
        if algorithm == "quadratic":
            return _non_causal_ring(q, k, v, arguments, score)
        o, z = states.attend_to_all(q, k, v, states.Job(score, arguments.layout, arguments.group, arguments.mask, None, None))
        return o, log_of_sums(z)
    after = 0 if arguments.causal else window
    keys = _with_halo(k, v, arguments, window, after)
    finish_global = [_start_causal(q, keys, arguments, score, algorithm, window)]
    if not arguments.causal:  # later keys are earlier keys of the reversed sequence
        n, cu_seqlens = arguments.layout.tokens, arguments.cu_seqlens
        reversed_arguments = arguments._replace(
            cu_seqlens=None if cu_seqlens is None else (n - cu_seqlens).flip(0), layout=arguments.layout.mirrored()
        )
        reversed_keys = keys._replace(parts=[x.flipped() for x in reversed(keys.parts)])
        finish_reversed = _start_causal(q.flip(2), reversed_keys, reversed_arguments, score, algorithm, window)
        finish_global.append(lambda: tuple(x.flip(2) for x in finish_reversed()))
    # Local keys overlap with the exchange of states.
    left, right = window - 1, max(0, after - 1)
    local_keys = []
    for x, part in zip(keys.parts, arguments.parts, strict=True):
        first = max(0, part.start - left)
        last = min(part.stop + right, arguments.layout.tokens)
        local_keys.append(x.narrow(first - max(0, part.start - window), last - first)._replace(log_input_gate=None))
    outputs = [_in_window(q, keys._replace(parts=local_keys), arguments, Softmax(score.scale), left, right)]
    return merge_attention(*zip(*outputs, *(finish() for finish in finish_global), strict=True))


def _start_causal(
    q: Tensor,
    keys: _Keys,
    arguments: _Arguments,
    score: Score | Softmax,
    algorithm: str = "quadratic",
    window: int = 0,
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Starts attention of each query to the keys at least `window` tokens before it.

    This is causal attention of the queries from token `window` on, with keys shifted by `window` tokens: query i is aligned
    with key i - `window`. Earlier queries see no key. `keys` must have a halo of `window` tokens before each part.

    Returns:
        A function that finishes the call and returns the output and the log of the denominators.
    """
    own, starts, between = [], [], []
    layout = arguments.layout.without_first(window)
    for x, part in zip(keys.parts, arguments.parts, strict=True):
        first = decay = None
        part = part._replace(start=max(part.start, window))  # the queries that see keys
        if part.tokens <= 0:
            continue
        if x.log_decay is not None:
            decay, first = ops.finite_decay(x.log_decay[..., : window + part.tokens], True, eager.compute_dtype(q.dtype))
            first = first[..., window:]
            if window > 0:
                between.append(eager.sums_in_window(decay, window))
        if arguments.cu_seqlens is not None:
            begin, _ = _sequences(arguments.cu_seqlens, part)
            begin = (begin - part.start + window).clamp(min=-1).to(torch.int32).expand(*x.k.shape[:2], part.tokens)
            first = begin if first is None else torch.maximum(first, begin)
        starts.append(first)
        own.append(x._replace(log_decay=decay).narrow(0, part.tokens))
    bounded = arguments.log_decay is not None or arguments.cu_seqlens is not None
    k, v, mask, decay, gate = keys._replace(parts=own).side_by_side()
    without_keys = q.shape[2] - k.shape[2]
    q = q if without_keys == 0 else q[:, :, without_keys:]
    k_starts = tuple(x for x in starts if x is not None) if bounded else None  # if bounded, all of them
    part_decays = None if k_starts is None else PartDecays(k, decay, k_starts, layout, arguments.group)
    attend: Callable[[], tuple[Tensor, Tensor]]
    if isinstance(score, Score) and algorithm == "linear":
        attend = states.begin(q, k, v, decay, gate, states.Job(score, layout, arguments.group, mask, k_starts, part_decays))
    else:
        job = ring.Job(score, True, layout, arguments.group, mask, k_starts, part_decays, None)
        attend = partial(ring.attend, q, k, v, decay, gate, job)

    def finish() -> tuple[Tensor, Tensor]:
        o, z = attend()
        lse = z if isinstance(score, Softmax) else log_of_sums(z)
        if between:
            decays = torch.cat(between, dim=2).to(lse.dtype)
            decays = decays.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            lse = torch.where(lse == -torch.inf, lse, lse + decays)  # keeps -inf where no global key is visible
        if without_keys > 0:
            o, lse = F.pad(o, (0, 0, without_keys, 0)), F.pad(lse, (without_keys, 0), value=-torch.inf)
        return o, lse

    return finish


def _non_causal_ring(q: Tensor, k: Tensor, v: Tensor, arguments: _Arguments, score: Score | Softmax) -> tuple[Tensor, Tensor]:
    """Non-causal ring attention. Returns the output and the log of the denominators."""
    ranges = None
    if arguments.cu_seqlens is not None:
        of_parts = [_sequences(arguments.cu_seqlens, part) for part in arguments.parts]
        none = arguments.cu_seqlens.new_empty(0)
        ranges = tuple(torch.cat(x) for x in zip((none, none), *of_parts, strict=True))
    o, z = ring.attend(
        q, k, v, None, None, ring.Job(score, False, arguments.layout, arguments.group, arguments.mask, None, None, ranges)
    )
    return o, z if isinstance(score, Softmax) else log_of_sums(z)


def _in_window(q: Tensor, keys: _Keys, arguments: _Arguments, score: Softmax, left: int, right: int) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query to the `left` tokens before it, its own token, and the `right` tokens after it.

    `keys` must have a halo of these tokens, where they exist. Returns the output and the log-sum-exp.
    """
    pieces = []
    for x, part in zip(keys.parts, arguments.parts, strict=True):
        of_part, m = q[:, :, part.local], x.k.shape[2]
        start = max(0, part.start - left)  # the token of the first key
        # Operators align the last query with the last key, the token that is `ahead` of this query.
        ahead = min(right, arguments.layout.tokens - part.stop)
        after = -1 if right == 0 else right - ahead
        call = Call(score, right == 0, left=left + ahead, right=after, attention_mask=x.mask, log_input_gate=x.log_input_gate)
        first = end = None
        if x.log_decay is not None:
            decay, first = ops.finite_decay(x.log_decay, False, eager.compute_dtype(q.dtype))
            call, first = call._replace(log_decay=decay), first[..., part.start - start :]
        if arguments.cu_seqlens is not None:
            shape = (*x.k.shape[:2], part.tokens)
            begin, end = ((x - start).clamp(0, m).to(torch.int32).expand(shape)
                          for x in _sequences(arguments.cu_seqlens, part))  # fmt: skip
            first = begin if first is None else torch.maximum(first, begin)
        call = call._replace(k_start=first, k_end=None if call.causal else end)
        pieces.append(ops.attention(of_part, x.k, x.v, call))
    if not pieces:  # stays connected to the halo, whose backward is a collective
        o = q[..., :1].expand(*q.shape[:3], keys.none.v.shape[3])
        o = sum((x.sum().to(o.dtype) for x in keys.none if x is not None and x.is_floating_point()), o)
        return o, o[..., 0].to(eager.compute_dtype(q.dtype))
    return tuple(x[0] if len(x) == 1 else torch.cat(x, dim=2) for x in zip(*pieces, strict=True))


def _with_halo(k: Tensor, v: Tensor, arguments: _Arguments, before: int, after: int) -> _Keys:
    """Returns the keys of each local part with a halo of `before` and `after` tokens, or as many as the sequence has there."""
    wide = eager.compute_dtype(k.dtype)
    mask, decay = arguments.mask, None if arguments.log_decay is None else arguments.log_decay.to(wide)
    gate = arguments.log_input_gate
    if before + after == 0:
        own = _PartKeys(k, v, mask, decay, gate)
        return _Keys([own.narrow(part.offset, part.tokens) for part in arguments.parts], own.narrow(0, 0), own)
    layout = arguments.layout
    around_parts = before, after, layout, arguments.group
    numeric_mask = None if mask is None else mask.unsqueeze(1).to(wide)
    k_halo, v_halo = halo((k, v), *around_parts)
    given = tuple(x for x in (numeric_mask, decay, gate) if x is not None)
    of_given = iter(halo(given, *around_parts) if given else ())
    mask_halo, decay_halo, gate_halo = (None if x is None else next(of_given) for x in (numeric_mask, decay, gate))
    of_heads: Sequence[tuple[Any, Any]] = (k, k_halo), (v, v_halo), (decay, decay_halo), (gate, gate_halo)
    parts = []
    for i, part in enumerate(arguments.parts):
        at = (i, part, before, after, layout.tokens)
        x_mask = None if numeric_mask is None else around(numeric_mask, mask_halo, *at).squeeze(1) > 0
        x_k, x_v, x_decay, x_gate = (None if x is None else around(x, x_halo, *at) for x, x_halo in of_heads)
        parts.append(_PartKeys(x_k, x_v, x_mask, x_decay, x_gate))
    # Concatenated with the empty halo, so that its backward runs on this rank too.
    empty = (None if x is None else torch.cat([x[:, :, :0], x_halo[:, :, :0]], dim=2) for x, x_halo in of_heads)
    none_k, none_v, none_decay, none_gate = empty
    none = _PartKeys(none_k, none_v, None if mask is None else mask[:, :0], none_decay, none_gate)
    return _Keys(parts, none)


def _sequences(cu_seqlens: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """Returns the start and the end of the packed sequence of each token of a part, int64 (n,) each."""
    tokens = torch.arange(part.start, part.stop, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = sequence_at(cu_seqlens, tokens)
    return cu_seqlens[sequence].long(), cu_seqlens[sequence + 1].long()
