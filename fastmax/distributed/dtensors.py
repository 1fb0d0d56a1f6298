"""Public attention functions on DTensors: checks of the whole call, then the function on the local shards of each rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fastmax import ops
from fastmax.distributed.sharding import on_shards
from fastmax.prepare.sharded_dispatch import Result, is_dtensor


def attend(attention: Callable[..., Result], arguments: dict[str, object]) -> Result:
    """Runs a public attention function whose tensors are all DTensors.

    Raises:
        TypeError: one of the tensors is not a DTensor; dropout has no drop_noise.
    """
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    options = {name: x for name, x in arguments.items() if name not in tensors}
    distributed = next(name for name, x in tensors.items() if is_dtensor(x))
    for name, x in tensors.items():
        if not is_dtensor(x):
            raise TypeError(
                f"{name} must be a DTensor, as {distributed} is, got a torch.Tensor: if all ranks hold the same values, pass "
                f"DTensor.from_local({name}, mesh, [Replicate()] * mesh.ndim)"
            )
    # Checks the global shapes first, so that all ranks raise the same errors before any of them computes.
    attention(**{name: _without_values(x) for name, x in tensors.items()}, **options)
    if options.get("dropout") and "drop_noise" not in tensors:
        raise TypeError("dropout of DTensors needs drop_noise, a DTensor: each rank would draw different noise, got None")
    results = ("o", "lse") if options.get("return_lse") else ("o",)
    out = on_shards(partial(attention, **options), tensors, results)
    return out if options.get("return_lse") else out[0]


def _without_values(x: Tensor) -> Tensor:
    """Returns a meta tensor in the dtype that autocast would cast `x` to; autocast does not know the device "meta"."""
    dtype = torch.get_autocast_dtype(x.device.type) if ops.in_autocast(x) else x.dtype
    return torch.empty(x.shape, dtype=dtype if x.is_floating_point() and x.dtype != torch.float64 else x.dtype, device="meta")
