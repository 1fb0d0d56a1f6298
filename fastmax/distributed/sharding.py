"""DTensor sharding rules of the public functions and all registered operators: batch and heads may be sharded.

Batch entries and key/value heads are independent, so each rank runs the operator on its local shards. Gradients of tensors that
several ranks share have placement `Partial`: that of an rpe matrix, and those of a single key/value head whose query heads are
on several ranks. Inputs with other placements (tokens, channels, partial sums) or uneven shards are replicated first.

Operators are registered by `torch.library.register_torch_dispatch`, because `register_sharding` does not fit. DTensor's
dispatcher returns the first argument of operators whose name ends in an underscore. It shards heads unevenly, which would pair
queries with wrong keys. It caches output metadata without bool arguments, which set the dtypes of
`finite_decay` and `rotary_factors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard

from fastmax.core.call import ACCOMPANYING
from fastmax.ops.registration import OPERATORS


class Axes(NamedTuple):
    """The batch and head dimensions of a tensor; None if it has none."""

    batch: int | None
    heads: int | None
    of_keys: bool = False  # the heads are key/value heads


def _axes(names: str) -> Axes:
    """Returns the axes of a tensor whose dimensions have these names, separated by spaces."""
    dims = names.split()
    heads = next((i for i, name in enumerate(dims) if name in ("h", "hk")), None)
    return Axes(dims.index("b") if "b" in dims else None, heads, of_keys="hk" in dims)


_QUERIES, _KEYS, _SHARED = _axes("b h"), _axes("b hk"), _axes("")
_AXES = {
    **{name: _axes(x.axes) for name, x in ACCOMPANYING.items()},
    **dict.fromkeys(("q", "normalized_q", "of_q", "q_factor", "o", "z", "lse"), _QUERIES),
    **dict.fromkeys(("o_global", "z_global", "other", "other_lse", "g", "e", "pairs"), _QUERIES),
    **dict.fromkeys(("first", "first_lse", "second", "second_lse"), _QUERIES),
    **dict.fromkeys(("k", "normalized_k", "of_k", "k_factor", "v", "kv_state", "k_sum", "new_kv_state", "new_k_sum"), _KEYS),
    **dict.fromkeys(("local_keys", "local_values", "local_mask", "local_decays", "local_gates"), _KEYS),
    **dict.fromkeys(("buffered", "saved"), _KEYS),
    **dict.fromkeys(("finite", "decay_sums", "pairs_of_states", "key_rank", "key_index", "kept"), _KEYS),
    # A batch entry for each block of queries. Those of one entry of the batch are consecutive.
    **dict.fromkeys(("log_factor", "keys", "values", "key_gate", "key_decay", "least"), _KEYS),
    **dict.fromkeys(("recent_keys", "has_key", "token_positions", "token_count"), _axes("b")),
    **dict.fromkeys(("slot_keys", "slot_values", "slot_factors", "slot_positions"), _KEYS),
    **dict.fromkeys(("cu_seqlens", "positions", "cos", "sin", "places", "earlier"), _SHARED),
    **dict.fromkeys(("conv_weight", "q_weight", "k_weight", "norm_weight"), _SHARED),
    **dict.fromkeys(("qkv", "recent", "q_rows", "k_rows", "v_rows"), _axes("b")),  # the heads of all three are in one dimension
    **dict.fromkeys(("gate", "y"), _axes("b n h")),
}


class Division(NamedTuple):
    """How a mesh shards the tensors of a call."""

    mesh: DeviceMesh
    axes: tuple[str | None, ...]  # per mesh dimension: "batch", "heads", or None (replicated)
    shared_keys: bool  # there is one key/value head, replicated for the query heads of all ranks

    def placements(self, name: str, is_gradient: bool = False) -> tuple[Placement, ...]:
        """Returns the placements of a tensor, or of its gradient as each rank computes it."""
        return tuple(self._placement(_AXES[name.removeprefix("grad_")], axis, is_gradient) for axis in self.axes)

    def _placement(self, axes: Axes, axis: str | None, is_gradient: bool) -> Placement:
        if axis is None:
            return Replicate()
        dim = axes.batch if axis == "batch" else None if axes.of_keys and self.shared_keys else axes.heads
        return Shard(dim) if dim is not None else Partial() if is_gradient else Replicate()

    def parts(self, axis: str) -> int:
        """Returns the number of shards of an axis."""
        return math.prod([self.mesh.size(i) for i, divided in enumerate(self.axes) if divided == axis])


def _given_axis(name: str, x: DTensor, mesh_dim: int) -> str | None:
    """Returns the axis of a tensor that a mesh dimension shards, or None."""
    placement, axes = x.placements[mesh_dim], _AXES[name.removeprefix("grad_")]
    if type(placement) is not Shard:  # _StridedShard has another order
        return None
    return {axes.heads: "heads", axes.batch: "batch"}.get(placement.dim)


def divide(tensors: Mapping[str, DTensor], written: tuple[str, ...] = (), keys_summed: bool = True) -> Division:
    """Chooses the sharding of a call: for each mesh dimension, that of the first tensor whose sharding is supported.

    Args:
        tensors: tensors by their names in the schema; q, k and v are 4-d or (b * heads, n, d).
        written: names of the tensors that the operator writes to. They are not redistributed and take precedence.
        keys_summed: whether gradients of a key/value head may be summed over ranks. Not if the head also has a state, or if
            the operator accumulates into the gradient.

    Raises:
        ValueError: naming a tensor on another mesh, or a written tensor whose placement is not supported.
    """
    names = (*written, *(name for name in tensors if name not in written))
    first = tensors[names[0]]
    for name in names:
        if tensors[name].device_mesh != first.device_mesh:
            raise ValueError(f"{name} must be on the mesh of {names[0]} {first.device_mesh}, got {tensors[name].device_mesh}")
    mesh = first.device_mesh
    queries = next((tensors[name] for name in ("q", "o", "log_decay", "positions") if name in tensors), first)
    keys = tensors.get("k", queries)
    if "q" in tensors and queries.dim() == 3:  # batch and heads are flattened
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
                f"{name}, which is modified in place, must have placements {division.placements(name)} (batch or heads in even "
                f"shards), got {tensors[name].placements}: redistribute it"
            )
    return division


def on_shards(function: Callable, tensors: Mapping[str, DTensor | None], results: tuple[str, ...]) -> tuple[DTensor, ...]:
    """Calls `function(**tensors)` on the local shards and returns its results, named `results`, as DTensors. Differentiable.

    Raises:
        ValueError: the tensors are on different meshes.
    """
    given = {name: x for name, x in tensors.items() if x is not None}
    division = divide(given)
    local = dict(tensors)
    for name, x in given.items():
        placements, of_gradient = (division.placements(name, is_gradient) for is_gradient in (False, True))
        local[name] = x.redistribute(placements=placements).to_local(grad_placements=of_gradient)
    out = function(**local)
    out = out if isinstance(out, tuple) else (out,)
    return tuple([
        DTensor.from_local(x, division.mesh, division.placements(name), run_check=False)
        for name, x in zip(results, out, strict=True)
    ])  # fmt: skip


def _run(
    cls: type,
    operator: torch._ops.OpOverload,
    types: tuple,
    args: tuple = (),
    kwargs: dict | None = None,
    *,
    results: tuple[str, ...],
) -> DTensor | tuple[DTensor, ...] | None:
    """Runs an operator on the local shards of its DTensors. `results` names its results."""
    schema = operator._schema
    names = [argument.name for argument in schema.arguments]
    args = (*args, *((kwargs or {})[name] for name in names[len(args) :]))
    tensors = {name: x for name, x in zip(names, args, strict=True) if isinstance(x, Tensor)}
    for name, x in tensors.items():
        if not isinstance(x, DTensor):
            raise TypeError(f"{name} must be a DTensor, as others of {schema.name} are, got a torch.Tensor")
    written = tuple(x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write)
    # A tensor of shape (0,) stands for an absent one and has no axes.
    with_axes = {name: x for name, x in tensors.items() if tuple(x.shape) != (0,)}
    with torch.no_grad():  # autograd has already recorded the operator
        keys_summed = "grad_new_kv_state" not in names and "grad_k" not in written
        division = divide(with_axes, tuple(name for name in written if name in tensors), keys_summed)
        replicated = (Replicate(),) * division.mesh.ndim
        local = []
        for name, x in zip(names, args, strict=True):
            if name in tensors:
                x = x.redistribute(placements=division.placements(name) if name in with_axes else replicated).to_local()
            local.append(x)
        out = operator(*local)
        if out is None:
            return None
        out = out if isinstance(out, tuple) else (out,)
        wrapped = []
        for name, x in zip(results, out, strict=True):
            is_gradient = name.startswith("grad_")
            placements = replicated if tuple(x.shape) == (0,) else division.placements(name, is_gradient)
            wrapped.append(DTensor.from_local(x, division.mesh, placements, run_check=False))
    return tuple(wrapped) if len(wrapped) > 1 else wrapped[0]


def _softmax(cls: type, operator: torch._ops.OpOverload, types: tuple, args: tuple = (), kwargs: dict | None = None) -> DTensor:
    """Runs `fastmax::softmax` on local shards. Every dimension but the last may be sharded."""
    x, algorithm = args
    with torch.no_grad():
        of_rows = (type(p) is Shard and p.dim < x.dim() - 1 for p in x.placements)
        placements = [p if kept else Replicate() for p, kept in zip(x.placements, of_rows, strict=True)]
        y = operator(x.redistribute(placements=placements).to_local(), algorithm)
        stride = torch.empty(x.shape, device="meta").stride()
        return DTensor.from_local(y, x.device_mesh, placements, run_check=False, shape=x.shape, stride=stride)


for _name, _operator in OPERATORS.items():
    _results = tuple(x.name for x in _operator.overload._schema.returns)
    _rule = _softmax if _name == "softmax" else partial(_run, results=_results)
    torch.library.register_torch_dispatch(f"fastmax::{_name}", DTensor, _rule)
