"""DTensors in attention: over the batch, over the heads, else replicated; for the functions and for all registered operators.

Attention of one batch entry and key/value head knows nothing of another, so that a rank that holds some of them computes with
the operator as it is. What a rank sums over its own part alone comes out as `Partial`: the gradient of an rpe matrix, which all
heads share, and those of a single key/value head, whose query heads are on several ranks. A placement that is neither of the
two (tokens, channels, partial sums) is replicated first, and so is what cannot be divided evenly.

Operators are registered by `torch.library.register_torch_dispatch`, not by `register_sharding`: DTensor's own dispatcher
returns the first argument of any operator whose name ends in an underscore, divides heads unevenly (which would give queries
other keys), and remembers results by arguments without those of type bool (`finite_decay` has a dtype by one).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard

from fastmax.ops.exact_window import Forward


class Axes(NamedTuple):
    """The dimensions of batch and heads, None where a tensor has none; `of_keys`: the heads are those of keys and values."""

    batch: int | None
    heads: int | None
    of_keys: bool = False


_QUERIES, _KEYS, _MASK, _SHARED = Axes(0, 1), Axes(0, 1, of_keys=True), Axes(0, None), Axes(None, None)
_AXES = {
    **dict.fromkeys(("q", "q_factor", "o", "z", "lse", "drop_noise", "z_before", "z_behind", "o_far", "z_far"), _QUERIES),
    **dict.fromkeys(("g", "e", "pairs"), _QUERIES),
    **dict.fromkeys(
        ("k", "k_factor", "v", "values", "weights", "new_values", "new_weights", "near_keys", "near_values"), _KEYS
    ),
    **dict.fromkeys(("near_mask", "near_decays", "gathered", "kept", "log_decay", "finite", "shift"), _KEYS),
    **dict.fromkeys(("first_key", "end_key", "pairs_of_states"), _KEYS),
    "attention_mask": _MASK,
    **dict.fromkeys(("rpe_matrix", "cu_seqlens", "positions", "cos", "sin"), _SHARED),
}
_OF_TOKENS = ("grad_q", "grad_k", "grad_v")
_RESULTS = {
    "forward": ("o", "z"),
    "backward": (*_OF_TOKENS, "grad_rpe_matrix", "grad_log_decay"),
    "flash_forward": ("o", "lse"),
    "flash_backward": (*_OF_TOKENS, "grad_log_decay"),
    "exact_window_forward": Forward._fields,
    "exact_window_backward": (*_OF_TOKENS, "grad_log_decay"),
    "exact_tiles_forward": ("o", "lse"),
    "exact_tiles_backward": (*_OF_TOKENS, "grad_log_decay"),
    "merge_": ("z_far",),
    "far_forward_": ("z",),
    "far_backward_": ("grad_log_decay",),
    "decode_step": ("o", "new_values", "new_weights"),
    "decode_step_": ("o",),
    "gathered_step_": ("o",),
    "prefill": ("o", "z", "new_values", "new_weights"),
    "prefill_backward": (*_OF_TOKENS, "grad_log_decay", "grad_values", "grad_weights"),
    "state_of_keys": ("values", "weights", "kept"),
    "prefill_kept_": ("o", "z"),
    "gradients_of_sums": ("g", "e"),
    "state_of_queries": ("grad_values", "grad_weights", "kept"),
    "prefill_backward_of_queries": ("grad_q", "pairs"),
    "prefill_backward_of_keys_": ("grad_k", "grad_v", "grad_log_decay"),
    "finite_decay": ("finite", "first_key"),
    "normalize_tokens": ("q", "k", "q_factor", "k_factor"),
    "normalize_tokens_backward": ("q", "k"),  # where these lie: rows of their own, and no sums over ranks
    "rotary_factors": ("cos", "sin"),
}


class Division(NamedTuple):
    """What each dimension of a mesh divides: "batch", "heads", or None where its ranks compute the same."""

    mesh: DeviceMesh
    axes: tuple[str | None, ...]
    shared_keys: bool  # one key/value head, which the query heads of all ranks use

    def placements(self, name: str, is_gradient: bool = False) -> tuple[Placement, ...]:
        """Of a tensor, or of the gradient that a rank computes of it."""
        return tuple(self._placement(_AXES[name.removeprefix("grad_")], axis, is_gradient) for axis in self.axes)

    def _placement(self, axes: Axes, axis: str | None, is_gradient: bool) -> Placement:
        if axis is None:
            return Replicate()
        dim = axes.batch if axis == "batch" else None if axes.of_keys and self.shared_keys else axes.heads
        return Shard(dim) if dim is not None else Partial() if is_gradient else Replicate()

    def parts(self, axis: str) -> int:
        return math.prod([self.mesh.size(i) for i, divided in enumerate(self.axes) if divided == axis])


def _given_axis(name: str, x: DTensor, mesh_dim: int) -> str | None:
    """What a mesh dimension divides of a tensor as it comes."""
    placement, axes = x.placements[mesh_dim], _AXES[name.removeprefix("grad_")]
    if type(placement) is not Shard:  # a strided one lies in another order
        return None
    return {axes.heads: "heads", axes.batch: "batch"}.get(placement.dim)


def divide(tensors: Mapping[str, DTensor], written: tuple[str, ...] = (), keys_summed: bool = True) -> Division:
    """By the placements of those that come first, where the sizes allow it.

    Args:
        tensors: by their names in a schema, 4-d q, k and v or (b * heads, n, d).
        written: the names of those that an operator writes over, which stay where they are and go before the others.
        keys_summed: whether gradients of a key/value head may be summed over ranks: not where one is of a state, too, or is
            added to what is there.

    Raises:
        ValueError: naming a tensor on another mesh, or a written one that lies otherwise.
    """
    names = (*written, *(name for name in tensors if name not in written))
    first = tensors[names[0]]
    for name in names:
        if tensors[name].device_mesh != first.device_mesh:
            raise ValueError(f"{name} must be on the mesh of {names[0]} {first.device_mesh}, got {tensors[name].device_mesh}")
    mesh = first.device_mesh
    queries = next((tensors[name] for name in ("q", "o", "log_decay", "positions") if name in tensors), first)
    keys = next((tensors[name] for name in ("k", "shift") if name in tensors), queries)
    if "q" in tensors and queries.dim() == 3:  # batch and heads are one dimension
        batch, heads, kv_heads = tensors.get("attention_mask", keys).shape[0], 0, 0
    elif queries.dim() >= 3:
        batch, heads, kv_heads = queries.shape[0], queries.shape[1], keys.shape[1]
    else:
        batch = heads = kv_heads = 0
    shared = kv_heads == 1 and heads > 1
    division = Division(mesh, (None,) * mesh.ndim, shared)
    for i in range(mesh.ndim):
        given = (_given_axis(name, tensors[name], i) for name in names)
        for axis in dict.fromkeys(axis for axis in given if axis is not None):
            further = division._replace(axes=(*division.axes[:i], axis, *division.axes[i + 1 :]))
            size = batch if axis == "batch" else heads if shared and keys_summed else kv_heads
            stays = all(tensors[name].placements[i] == further.placements(name)[i] for name in written)
            if stays and size > 0 and size % further.parts(axis) == 0:
                division = further
                break
    for name in written:
        if tensors[name].placements != division.placements(name):
            raise ValueError(
                f"{name}, which is written over, must lie as {division.placements(name)} (batch or heads in even parts, as all "
                f"that is written), got {tensors[name].placements}: redistribute it"
            )
    return division


def on_shards(function: Callable, tensors: Mapping[str, DTensor | None], results: tuple[str, ...]) -> tuple[DTensor, ...]:
    """`function(**tensors)`, which returns one or several `results`, of what each rank has; differentiable.

    Raises:
        ValueError: the tensors are on several meshes.
    """
    given = {name: x for name, x in tensors.items() if x is not None}
    division = divide(given)
    local = dict(tensors)
    for name, x in given.items():
        lies, of_gradient = (division.placements(name, is_gradient) for is_gradient in (False, True))
        local[name] = x.redistribute(placements=lies).to_local(grad_placements=of_gradient)
    out = function(**local)
    out = out if isinstance(out, tuple) else (out,)
    return tuple([
        DTensor.from_local(x, division.mesh, division.placements(name), run_check=False)
        for name, x in zip(results, out, strict=True)
    ])  # fmt: skip


def _run(cls: type, operator: torch._ops.OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None, *, results):
    """An operator whose tensors are DTensors."""
    schema = operator._schema
    names = [argument.name for argument in schema.arguments]
    args = (*args, *((kwargs or {})[name] for name in names[len(args) :]))
    tensors = {name: x for name, x in zip(names, args, strict=True) if isinstance(x, Tensor)}
    for name, x in tensors.items():
        if not isinstance(x, DTensor):
            raise TypeError(f"{name} must be a DTensor, as others of {schema.name} are, got a torch.Tensor")
    written = tuple(x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write)
    # What has no elements stands for a tensor that the call does not have, and has neither batch nor heads.
    with_axes = {name: x for name, x in tensors.items() if tuple(x.shape) != (0,)}
    with torch.no_grad():  # autograd has recorded the operator itself
        keys_summed = "grad_new_values" not in names and "grad_k" not in written
        division = divide(with_axes, written, keys_summed)
        everywhere = (Replicate(),) * division.mesh.ndim
        local = []
        for name, x in zip(names, args, strict=True):
            if name in tensors:
                x = x.redistribute(placements=division.placements(name) if name in with_axes else everywhere).to_local()
            local.append(x)
        out = operator(*local)
        out = out if isinstance(out, tuple) else (out,)
        wrapped = []
        for name, x in zip(results, out, strict=True):
            is_gradient = name.startswith("grad_")
            lies = everywhere if tuple(x.shape) == (0,) else division.placements(name, is_gradient)
            wrapped.append(DTensor.from_local(x, division.mesh, lies, run_check=False))
    return tuple(wrapped) if len(wrapped) > 1 else wrapped[0]


def _softmax(cls: type, operator: torch._ops.OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None):
    """Any division of the rows."""
    x, algorithm = args
    with torch.no_grad():
        of_rows = (type(p) is Shard and p.dim < x.dim() - 1 for p in x.placements)
        lies = [p if kept else Replicate() for p, kept in zip(x.placements, of_rows, strict=True)]
        y = operator(x.redistribute(placements=lies).to_local(), algorithm)
        stride = torch.empty(x.shape, device="meta").stride()
        return DTensor.from_local(y, x.device_mesh, lies, run_check=False, shape=x.shape, stride=stride)


for _name, _results in _RESULTS.items():
    for _prefix in ("", "eager_"):
        if hasattr(torch.ops.fastmax, _prefix + _name):
            torch.library.register_torch_dispatch(f"fastmax::{_prefix}{_name}", DTensor, partial(_run, results=_results))
for _prefix in ("", "eager_"):
    torch.library.register_torch_dispatch(f"fastmax::{_prefix}softmax", DTensor, _softmax)
