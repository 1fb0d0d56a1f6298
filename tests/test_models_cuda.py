"""Layers, DTensors and training over two GPUs with NCCL, against one GPU."""

import copy

import pytest
import torch
from common import relative
from processes import run
from test_context import own_tokens
from test_parallel_styles import LAYERS, make_layer, whole
from test_sharding import HEADS, distributed, mesh_of
from test_train_long import MODEL, TEXT, TRAINING, losses, train
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from fastmax import fastmax_attention
from fastmax.distributed import ContextParallel, TensorParallel

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs"),
]
N, WIDTH = 1000, 256
OPTIONS = {name: options | ({"exact_window": 100} if options.get("exact_window") else {}) for name, options in LAYERS.items()}


def large_layer(options, device):
    return make_layer(options, WIDTH, dtype=torch.float32).to(device)


def check_layer(group, options, style, layout):
    device, dtype = torch.device("cuda", group.rank()), torch.bfloat16
    mesh = mesh_of(group, device="cuda")
    exact, plain = (large_layer(options, device).to(x) for x in (torch.float64, dtype))
    parallel = copy.deepcopy(plain)
    if style == "tokens":
        parallelize_module(parallel, mesh, ContextParallel(layout))
        own = own_tokens(parallel.context, N).to(device)
    else:
        parallelize_module(parallel, mesh, TensorParallel())
        own = torch.arange(N, device=device)
    x = torch.randn(2, N, WIDTH, device=device)
    torch.distributed.broadcast(x, 0, group=group)
    expected, one, y = exact(x.double()), plain(x.to(dtype)), parallel(x[:, own].to(dtype))
    assert relative(y, expected[:, own]) <= 2 * relative(one, expected) + 1e-3
    weight = torch.randn(2, N, WIDTH, device=device, dtype=torch.float64)
    torch.distributed.broadcast(weight, 0, group=group)
    for o, of_o in ((expected, weight), (one, weight), (y, weight[:, own])):
        (o.double() * of_o).sum().backward()
    parameters = zip(exact.named_parameters(), plain.parameters(), parallel.parameters(), strict=True)
    for (name, parameter), of_one, of_ranks in parameters:
        grad = whole(of_ranks.grad).double()
        if style == "tokens":
            torch.distributed.all_reduce(grad, group=group)
        error = relative(of_one.grad, parameter.grad)
        assert relative(grad, parameter.grad) <= 2 * error + 5e-3, name


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_layer_with_sharded_tokens(options, layout):
    run(check_layer, 2, options, "tokens", layout, backend="nccl")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_layer_with_sharded_heads(options):
    run(check_layer, 2, options, "heads", "", backend="nccl")


def check_dtensors(group, options):
    device = torch.device("cuda", group.rank())
    mesh = mesh_of(group, device="cuda")
    q, k, v = (torch.randn(2, heads, N, 64, device=device, dtype=torch.bfloat16) for heads in (8, 4, 4))
    for x in (q, k, v):
        torch.distributed.broadcast(x, 0, group=group)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    parts = [distributed(x, mesh, HEADS).requires_grad_() for x in (q, k, v)]
    expected, o = (fastmax_attention(*x, causal=True, temperature=8.0, **options) for x in (leaves, parts))
    assert o.placements == (Shard(1),)
    assert relative(o.full_tensor(), expected) < 1e-2
    for x in (expected, o):
        x.float().pow(2).sum().backward()
    for x, part in zip(leaves, parts, strict=True):
        assert relative(part.grad.full_tensor(), x.grad) < 1e-2


@pytest.mark.parametrize("options", [{"algorithm": "linear"}, {"algorithm": "quadratic"}, {"exact_window": 100}])
def test_dtensors(options):
    run(check_dtensors, 2, options, backend="nccl")


def test_train_long(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    common = [*MODEL, *TRAINING, "--data", str(tmp_path / "text.txt")]
    histories = [
        run(train, 2, [*common, "--out", str(tmp_path / name), "--layout", name], None, "cuda", backend="nccl")[0][1]
        for name in ("contiguous", "zigzag")
    ]
    (on_cpu,) = run(train, 1, [*common, "--out", str(tmp_path / "cpu")])
    for history in histories:
        assert losses(history) == pytest.approx(losses(on_cpu[1]), rel=1e-3)
