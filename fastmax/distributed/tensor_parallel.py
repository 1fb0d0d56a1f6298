"""Tensor parallel `FastmaxSelfAttention`: a style for `parallelize_module` that shards the heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from fastmax.nn.self_attention import FastmaxSelfAttention
from fastmax.nn.self_attention_options import PARTS


class TensorParallel(ParallelStyle):
    """Shards the heads of a `FastmaxSelfAttention` over the ranks of a mesh. Its input and output are replicated.

        parallelize_module(model, mesh, {"blocks.*.attn": TensorParallel()})

    Weights become DTensors of unchanged shape, so checkpoints stay compatible. The weights of the gates and the output are
    sharded by head. Those of q, k and v, which are one matrix, and of the convolution are sharded evenly and
    all-gathered in each forward; a rank then uses the rows of its heads. Each forward has one all-reduce, of the output, and
    each backward one, of the gradient of x. `init_state` returns the state of the local heads.

    Raises:
        TypeError: the module is not a FastmaxSelfAttention.
        ValueError: the mesh has more than one dimension, or its size does not divide `num_kv_heads`; the weights are DTensors;
            a part has parameters other than a weight and a bias (LoRA, pruning), whose placement is unknown.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, FastmaxSelfAttention):
            raise TypeError(f"TensorParallel needs a FastmaxSelfAttention, got {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise ValueError(f"TensorParallel needs a one-dimensional mesh, got {device_mesh}")
        ranks = device_mesh.size()
        if module.num_kv_heads % ranks != 0:
            raise ValueError(f"num_kv_heads must be a multiple of the mesh's {ranks} ranks, got {module.num_kv_heads}")
        if sharded := [name for name, x in module.named_parameters() if isinstance(x, DTensor)]:
            raise ValueError(
                f"TensorParallel needs a layer whose weights are plain tensors, got DTensors: {', '.join(sharded)}"
            )
        known = {f"{part}.{leaf}" for part in PARTS for leaf in ("weight", "bias")}
        if others := [name for name, _ in module.named_parameters() if name not in known]:
            raise ValueError(f"TensorParallel needs parts whose parameters are weight and bias, got {', '.join(others)}")
        heads = _Heads(module, device_mesh)
        own = {"num_heads": module.num_heads // ranks, "num_kv_heads": module.num_kv_heads // ranks}
        vars(module).update(own)  # type: ignore[attr-defined]  # the layer refuses to set them, since its weights have sizes
        module.register_forward_pre_hook(heads.enter, with_kwargs=True)
        module.register_forward_hook(heads.leave, always_call=True)
        return module


class _Heads:
    """Hooks of a forward: replace the DTensor weights of the layer by local tensors of the local heads, and restore them."""

    def __init__(self, module: FastmaxSelfAttention, mesh: DeviceMesh):
        self.mesh = mesh
        counts = module.widths
        own = [count // mesh.size() for count in counts]
        starts = [sum(counts[:i]) + mesh.get_local_rank() * own[i] for i in range(len(counts))]
        self.rows = [slice(start, start + count) for start, count in zip(starts, own, strict=True)]  # of q, k and v
        for name, parameter in list(module.named_parameters()):
            owner, leaf = _find(module, name)
            whole = distribute_tensor(parameter, mesh, [_placement(name)])
            owner.register_parameter(leaf, nn.Parameter(whole, parameter.requires_grad))
        self.whole: dict[str, Tensor] = {}  # during a forward

    def enter(self, module: FastmaxSelfAttention, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        for name, whole in list(module.named_parameters()):  # a part may have been switched off since
            owner, leaf = _find(module, name)
            self.whole[name] = whole
            owner._parameters[leaf] = self._own(name, whole)
        if args:
            return (self._shared(args[0]), *args[1:]), kwargs
        return args, {name: self._shared(x) if name == "x" else x for name, x in kwargs.items()}

    def leave(self, module: FastmaxSelfAttention, args: tuple, output: object) -> object:
        for name, whole in self.whole.items():
            owner, leaf = _find(module, name)
            owner._parameters[leaf] = whole
        self.whole = {}
        if output is None:  # the forward raised an error
            return None
        y, *state = output if isinstance(output, tuple) else (output,)
        y = DTensor.from_local(y, self.mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
        return (y, *state) if state else y

    def _shared(self, x: object) -> object:
        """Returns x, with its gradient summed over ranks."""
        if not isinstance(x, Tensor):
            return x
        return DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])

    def _own(self, name: str, whole: DTensor) -> Tensor:
        if name.startswith(("qkv_proj", "conv")):
            x = whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            return torch.cat([x[rows] for rows in self.rows])
        if isinstance(_placement(name), Shard):
            return whole.to_local()
        x = whole.to_local(grad_placements=[Partial()])
        return x * 0 if name == "out_proj.bias" and self.mesh.get_local_rank() > 0 else x  # added by rank 0 only


def _placement(name: str) -> Placement:
    """Returns the placement of a parameter of the layer."""
    if name == "out_proj.weight":
        return Shard(1)
    return Replicate() if "norm" in name or name == "out_proj.bias" else Shard(0)


def _find(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the submodule that owns a parameter, and the name of the parameter there."""
    owner, _, leaf = name.rpartition(".")
    return module.get_submodule(owner), leaf
