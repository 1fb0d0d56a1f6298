"""Tensor parallel `FastmaxSelfAttention`: each rank has some of the heads, as a style for `parallelize_module`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from fastmax.nn.self_attention import FastmaxSelfAttention


class TensorParallel(ParallelStyle):
    """Divides the heads of a `FastmaxSelfAttention` among the ranks of a mesh; x and y are whole on each.

        parallelize_module(model, mesh, {"blocks.*.attn": TensorParallel()})

    Weights become DTensors in the shapes and the order that they have, so that checkpoints do not change: those of the gate,
    of the decays and of the output lie with their heads (column-wise, row-wise); those of q, k and v, one matrix, and of the
    convolution lie in equal parts and are gathered for each forward, of which a rank uses the rows of its heads. The outputs
    are summed over the ranks, once a layer; the gradient of x, too. States (`init_state`) are those of a rank's heads.

    Raises:
        TypeError: the module is no FastmaxSelfAttention.
        ValueError: the mesh has more than one dimension, or a size that does not divide the key/value heads.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, FastmaxSelfAttention):
            raise TypeError(f"TensorParallel is of a FastmaxSelfAttention, got {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise ValueError(f"TensorParallel takes a mesh of one dimension, got {device_mesh}")
        ranks = device_mesh.size()
        if module.num_kv_heads % ranks != 0:
            raise ValueError(f"num_kv_heads must be a multiple of the mesh's {ranks} ranks, got {module.num_kv_heads}")
        heads = _Heads(module, device_mesh)
        own = {"num_heads": module.num_heads // ranks, "num_kv_heads": module.num_kv_heads // ranks}
        vars(module).update(own)  # type: ignore[attr-defined]  # the layer refuses to set them, since its weights have sizes
        module.register_forward_pre_hook(heads.enter, with_kwargs=True)
        module.register_forward_hook(heads.leave, always_call=True)
        return module


class _Heads:
    """What a rank makes of DTensor weights for a forward, in which the layer sees local tensors of its own heads alone."""

    def __init__(self, module: FastmaxSelfAttention, mesh: DeviceMesh):
        self.mesh = mesh
        counts = [heads * module.head_dim for heads in (module.num_heads, module.num_kv_heads, module.num_kv_heads)]
        own = [count // mesh.size() for count in counts]
        starts = [sum(counts[:i]) + mesh.get_local_rank() * own[i] for i in range(len(counts))]
        self.rows = [slice(start, start + count) for start, count in zip(starts, own, strict=True)]  # of q, k and v
        self.names = [name for name, _ in module.named_parameters()]
        for name in self.names:
            owner, leaf = _find(module, name)
            parameter = owner._parameters[leaf]
            whole = distribute_tensor(parameter, mesh, [_lies(name)])
            owner.register_parameter(leaf, nn.Parameter(whole, parameter.requires_grad))
        self.whole: dict[str, Tensor] = {}  # during a forward

    def enter(self, module: FastmaxSelfAttention, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        for name in self.names:
            owner, leaf = _find(module, name)
            self.whole[name] = owner._parameters[leaf]
            owner._parameters[leaf] = self._own(name, owner._parameters[leaf])
        if args:
            return (self._shared(args[0]), *args[1:]), kwargs
        return args, {name: self._shared(x) if name == "x" else x for name, x in kwargs.items()}

    def leave(self, module: FastmaxSelfAttention, args: tuple, output: object) -> object:
        for name, whole in self.whole.items():
            owner, leaf = _find(module, name)
            owner._parameters[leaf] = whole
        self.whole = {}
        if output is None:  # it raised an error
            return None
        y, *state = output if isinstance(output, tuple) else (output,)
        y = DTensor.from_local(y, self.mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
        return (y, *state) if state else y

    def _shared(self, x: object) -> object:
        """x, whose gradient is the sum of what the heads of all ranks make of it."""
        if not isinstance(x, Tensor):
            return x
        return DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])

    def _own(self, name: str, whole: DTensor) -> Tensor:
        if name.startswith(("qkv_proj", "conv")):
            x = whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            return torch.cat([x[rows] for rows in self.rows])
        if isinstance(_lies(name), Shard):
            return whole.to_local()
        x = whole.to_local(grad_placements=[Partial()])
        return x * 0 if name == "out_proj.bias" and self.mesh.get_local_rank() > 0 else x  # the sum over ranks has it once


def _lies(name: str) -> Placement:
    """Of a parameter of the layer."""
    if name == "out_proj.weight":
        return Shard(1)
    return Replicate() if "norm" in name or name == "out_proj.bias" else Shard(0)


def _find(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return module.get_submodule(owner), leaf
