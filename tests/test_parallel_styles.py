"""Models that are divided among ranks by heads (`TensorParallel`, `parallelize_module`) or weights (`fully_shard`), against one
process."""

import copy
from unittest.mock import patch

import pytest
import torch
from processes import check_messages, messages, run
from test_sharding import mesh_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import prune
from torch.testing import assert_close

from fastmax import FastmaxSelfAttention, FASTMultiHeadAttention
from fastmax.distributed import ContextParallel, TensorParallel
from fastmax.nn import kept_keys

EXACT = {"rtol": 1e-10, "atol": 1e-10}
LAYERS = {
    "defaults": {"exact_window": 3},
    "grouped": {"num_kv_heads": 4, "exact_window": 0, "bias": True, "head_dim": 6, "p": 1},
    "wide values": {"num_kv_heads": 4, "exact_window": 5, "head_dim": 6, "value_dim": 10},
    "input gate": {"exact_window": 3, "num_kv_heads": 4, "input_gate": True},
    "kept keys": {"exact_window": 2, "num_kv_heads": 4, "input_gate": True, "kept_keys": 2},
    "softmax": {"attention": "softmax", "conv": 0, "output_gate": False},
}


def make_layer(options: dict, width: int = 32, dtype: torch.dtype = torch.float64) -> FastmaxSelfAttention:
    torch.manual_seed(0)
    layer = FastmaxSelfAttention(width, 8, longest_half_life=16.0, dtype=dtype, **options)
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(torch.randn_like(x), alpha=0.2)
    return layer


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def compare(model: nn.Module, parallel: nn.Module, x: Tensor, ranks_x: Tensor | None = None) -> None:
    """Compares outputs, gradients of x and of the weights, and the names and values of weights."""
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [module(leaf) for module, leaf in zip((model, parallel), leaves, strict=True)]
    assert_close(*outputs, **EXACT)
    for y in outputs:
        y.pow(2).sum().backward()
    assert_close(leaves[0].grad, leaves[1].grad, **EXACT)
    expected, got = dict(model.named_parameters()), dict(parallel.named_parameters())
    assert list(expected) == list(got)
    for name, parameter in expected.items():
        assert_close(parameter, whole(got[name]), **EXACT)
        assert_close(parameter.grad, whole(got[name].grad), **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@patch.object(kept_keys, "_BLOCK", 3)
def check_layer(group, options):
    layer = make_layer(options)
    parallel = parallelize_module(copy.deepcopy(layer), mesh_of(group), TensorParallel())
    for parameter in parallel.parameters():
        assert isinstance(parameter, DTensor)
    assert parallel.out_proj.weight.to_local().shape[1] * group.size() == layer.out_proj.in_features
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    compare(layer, parallel, x)
    states = layer.init_state(2), parallel.init_state(2)
    for piece in x.split((5, 1, 3), dim=1):
        expected, got = layer(piece, states[0]), parallel(x=piece, state=states[1])
        assert_close(expected[0], got[0], **EXACT)
        states = expected[1], got[1]
    assert (
        states[1].attention.tensors()[next(iter(states[1].attention.tensors()))].shape[1] * group.size() == layer.num_kv_heads
    )
    with pytest.raises(TypeError, match="x must be a tensor"):
        parallel(None)
    assert all(isinstance(parameter, DTensor) for parameter in parallel.parameters())


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_layer(ranks, options):
    run(check_layer, ranks, options)


def check_initialised_in_shards(group, style):
    with torch.device("meta"):
        layer = make_layer({"num_kv_heads": 4, "kept_keys": 2, "steady_heads": 2, "exact_window": 2})
    expected = make_layer({"num_kv_heads": 4, "kept_keys": 2, "steady_heads": 2, "exact_window": 2})
    expected.reset_parameters()
    if style == "heads":
        parallelize_module(layer, mesh_of(group), TensorParallel())
    else:
        fully_shard(layer, mesh=mesh_of(group))
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    for (name, parameter), other in zip(layer.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(parameter, DTensor) and parameter.shape == other.shape
        if name.endswith("_proj.weight") and other.any():  # random
            assert 0.015 < parameter.full_tensor().std() < 0.025, name
        else:
            assert torch.equal(parameter.full_tensor(), other), name


@pytest.mark.parametrize("style", ["heads", "weights"])
@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_initialised_in_shards(style):
    """Large models are made on the meta device and initialised when their weights are shards."""
    run(check_initialised_in_shards, 2, style)


def check_compiled(group):
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    for style in (TensorParallel(), ContextParallel()):
        layer = parallelize_module(
            make_layer({"exact_window": 0, "decay": False, "conv": 0, "output_gate": False}), mesh_of(group), style
        )
        part = x if isinstance(style, TensorParallel) else layer.context.own(x, 1)
        expected, y = layer(part), torch.compile(layer, backend="aot_eager")(part)
        assert_close(y, expected, **EXACT)
        grads = [torch.autograd.grad(o.pow(2).sum(), layer.out_proj.weight)[0] for o in (expected, y)]
        assert_close(*map(whole, grads), **EXACT)


def test_compiled_layers():
    run(check_compiled, 2)


class Attention(nn.Module):
    """Attention with separate projections for q, k and v, as in Hugging Face's decoders. The number of heads follows from their
    size."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = (nn.Linear(32, 32, dtype=torch.float64) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(32, 16, dtype=torch.float64) for _ in range(2))
        self.attention = FASTMultiHeadAttention(mask=True, exact_window=3)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.attention(q, k, v).transpose(1, 2).flatten(2))


def check_projections(group, local):
    torch.manual_seed(0)
    model = Attention()
    column = ColwiseParallel(use_local_output=local)
    plan = {"q_proj": column, "k_proj": column, "v_proj": column, "o_proj": RowwiseParallel()}
    compare(model, parallelize_module(copy.deepcopy(model), mesh_of(group), plan), torch.randn(2, 9, 32, dtype=torch.float64))


@pytest.mark.parametrize("local", [True, False], ids=["local", "DTensors"])
def test_column_and_row_wise_projections(local):
    run(check_projections, 2, local)


def check_fully_sharded(group, options, heads_too):
    layer = make_layer(options)
    model = nn.Sequential(layer, nn.Linear(32, 32, dtype=torch.float64))
    parallel, x = copy.deepcopy(model), torch.randn(6, 9, 32, dtype=torch.float64)
    mesh = mesh_of(group, (2, 2), ("data", "heads")) if heads_too else mesh_of(group)
    if heads_too:
        parallelize_module(parallel[0], mesh["heads"], TensorParallel())
        mesh = mesh["data"]
    fully_shard(parallel[0], mesh=mesh)
    fully_shard(parallel, mesh=mesh)
    own = x.chunk(mesh.size())[mesh.get_local_rank()]
    assert_close(model(x).chunk(mesh.size())[mesh.get_local_rank()], parallel(own), **EXACT)
    model(x).pow(2).mean().backward()
    parallel(own).pow(2).mean().backward()  # gradients are averaged over ranks
    for (name, parameter), got in zip(model.named_parameters(), parallel.parameters(), strict=True):
        assert_close(parameter.grad, got.grad.full_tensor(), **EXACT, msg=lambda text, name=name: f"{name}: {text}")
    assert list(get_model_state_dict(parallel)) == list(model.state_dict())


@pytest.mark.parametrize("heads_too", [False, True], ids=["weights", "weights and heads"])
def test_fully_sharded(heads_too):
    run(check_fully_sharded, 4 if heads_too else 3, LAYERS["defaults"], heads_too)


def check_fully_sharded_parts(group):
    layer = make_layer({"exact_window": 3, "input_gate": True})
    parallel, x = copy.deepcopy(layer), torch.randn(3, 9, 32, dtype=torch.float64)
    for part in ("decay_proj", "input_gate_proj", "q_norm", "output_norm", "conv"):
        fully_shard(getattr(parallel, part), mesh=mesh_of(group))
    fully_shard(parallel, mesh=mesh_of(group))
    assert_close(layer(x), parallel(x), **EXACT)
    for module in (layer, parallel):
        module(x).pow(2).mean().backward()
    for (name, parameter), got in zip(layer.named_parameters(), parallel.parameters(), strict=True):
        assert_close(parameter.grad, got.grad.full_tensor(), **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def test_fully_sharded_parts():
    """Each part gathers its weights in hooks of its own."""
    run(check_fully_sharded_parts, 2)


def check_refusals(group):
    layer, mesh = make_layer(LAYERS["defaults"]), mesh_of(group)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    column = ColwiseParallel(use_local_output=True)
    cut = parallelize_module(make_layer({"decay": False}), mesh, {"qkv_proj": column})
    parallel = parallelize_module(copy.deepcopy(layer), mesh, TensorParallel())
    whole = parallelize_module(make_layer({}), mesh, {"qkv_proj": ColwiseParallel(use_local_output=False)})
    pruned = make_layer({})
    prune.l1_unstructured(pruned.decay_proj, "weight", 0.5)
    return messages(
        [
            lambda: parallelize_module(nn.Linear(3, 3), mesh, TensorParallel()),
            lambda: parallelize_module(FastmaxSelfAttention(32, 8, num_kv_heads=1), mesh, TensorParallel()),
            lambda: cut(x),
            lambda: whole(x),
            lambda: parallel.step_(x[:, :1], parallel.init_state(2)),
            lambda: parallelize_module(parallel, mesh, TensorParallel()),
            lambda: parallelize_module(pruned, mesh, TensorParallel()),
        ]
    )


def test_refuses_by_name():
    check_messages(
        check_refusals,
        "TensorParallel needs a FastmaxSelfAttention, got Linear",
        "num_kv_heads must be a multiple of the mesh's 2 ranks, got 1",
        "qkv_proj must return 96 channels",
        "qkv_proj must be a torch.Tensor here, got a DTensor: to shard the heads",
        "weight must be a torch.Tensor here, got a DTensor",
        "TensorParallel needs a layer whose weights are plain tensors, got DTensors: qkv_proj.weight, ",
        "TensorParallel needs parts whose parameters are weight and bias, got decay_proj.weight_orig",
    )


def check_without_parts(group):
    layer = make_layer(LAYERS["defaults"])
    parallel = parallelize_module(copy.deepcopy(layer), mesh_of(group), TensorParallel())
    for part in ("output_norm", "q_norm", "gate_proj"):
        for each in (layer, parallel):
            setattr(each, part, None)
        compare(layer, parallel, torch.randn(2, 9, 32, dtype=torch.float64))
        for each in (layer, parallel):
            each.zero_grad()


def test_parts_are_switched_off_after_sharding():
    run(check_without_parts, 2)
