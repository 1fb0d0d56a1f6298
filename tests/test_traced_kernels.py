"""Graphs of `torch.compile` call the kernels that cover their calls; exported programs and other traces call the operators.

The kernels of these tests are the PyTorch implementations, on the CPU.
"""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import fastmax
from fastmax import fastmax_attention
from fastmax.ops import extension
from fastmax.ops.registration import OPERATORS

B, H, N, D = 2, 2, 9, 8


@pytest.fixture(autouse=True)
def kernels(monkeypatch, fresh_dynamo):
    """Kernels on the CPU. Returns the list of those that ran."""
    ran = []

    def kernel_of(operator):
        kernel = operator.kernel

        def run(*arguments):
            ran.append(operator.overload._opname)
            arguments = list(arguments)
            for i in kernel._unread:
                arguments.insert(i, None)
            results = operator.implementation(*arguments)
            return tuple([x for i, x in enumerate(results) if i not in kernel._missing]) if kernel._missing else results

        return run

    monkeypatch.setattr(extension, "kernels_run_on", lambda x: x.dtype == torch.float32)
    monkeypatch.setattr(extension, "expects_kernels", lambda x: x.dtype == torch.float32)
    monkeypatch.setattr(extension, "device_has_kernels", lambda x: True)
    with torch.library._scoped_library("fastmax_cuda", "IMPL") as library:
        for name, operator in OPERATORS.items():
            if operator.kernel is not None:
                library.impl(name, kernel_of(operator), "CPU")
        yield ran


@pytest.fixture
def graphs():
    """A backend and the names of the operators of fastmax in each of its graphs, forward and backward."""
    found = []

    def keep(graph, inputs):
        found.append(called(graph))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=keep, bw_compiler=keep), found


def called(graph):
    return [name for name in (str(node.target) for node in graph.graph.nodes) if name.startswith("fastmax")]


def tensors(n=N, dtype=torch.float32):
    torch.manual_seed(n)
    return [torch.randn(B, H, n, D, dtype=dtype, requires_grad=True) for _ in range(3)]


def compare(compiled, inputs, **options):
    results = []
    for attention in (compiled, fastmax_attention):
        o = attention(*inputs, **options)
        results.append([o, *torch.autograd.grad(o.square().sum(), inputs)])
    assert_close(*results)


def test_a_compiled_graph_calls_the_kernels(graphs, kernels):
    backend, found = graphs
    compare(torch.compile(fastmax_attention, fullgraph=True, backend=backend), tensors(), causal=True)
    assert found == [["fastmax_cuda.forward.default"], ["fastmax_cuda.backward.default"]]
    assert kernels[:2] == ["forward", "backward"]


def test_calls_without_kernels_stay(graphs, kernels):
    backend, found = graphs
    attend = torch.compile(fastmax_attention, fullgraph=True, backend=backend)
    compare(attend, tensors(dtype=torch.float64))
    compare(attend, tensors(), rpe_matrix=torch.randn(2 * N - 1, D))
    forward, backward, backward_qkv = (f"fastmax.{name}.default" for name in ("forward", "backward", "backward_qkv"))
    assert found == [[forward], [backward], [forward], [backward_qkv]] and kernels == []


def test_a_graph_for_all_lengths(graphs):
    backend, found = graphs
    attend = torch.compile(fastmax_attention, fullgraph=True, dynamic=True, backend=backend)
    for n in (9, 20, 33):
        compare(attend, tensors(n), causal=True)
    assert found == [["fastmax_cuda.forward.default"], ["fastmax_cuda.backward.default"]]


def test_inductor(kernels):
    layer = fastmax.FastmaxSelfAttention(2 * D, 2)
    compiled, x = torch.compile(layer, fullgraph=True), torch.randn(B, N, 2 * D)
    results = []
    for module in (layer, compiled):
        y = module(x)
        kernels.clear()
        results.append([y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))])
    assert_close(*results)
    assert {"split_heads_backward", "join_heads_backward"} <= set(kernels)


def test_a_layer_calls_the_kernels(graphs):
    backend, found = graphs
    layer, x = fastmax.FastmaxSelfAttention(2 * D, 2), torch.randn(B, N, 2 * D)
    assert_close(torch.compile(layer, fullgraph=True, backend=backend)(x), layer(x))
    names = ("rotary_factors", "split_heads", "exact_window_forward", "join_heads")
    assert found[0] == [f"fastmax_cuda.{name}.default" for name in names]


class Attention(nn.Module):
    def forward(self, q, k, v):
        return fastmax_attention(q, k, v, causal=True)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # in run_decompositions
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_keeps_the_operators(strict):
    inputs = tuple(x.detach() for x in tensors())
    program = torch.export.export(Attention(), inputs, strict=strict)
    for exported in (program, program.run_decompositions()):
        assert called(exported.graph_module) == ["fastmax.forward.default"]
        assert_close(exported.module()(*inputs), fastmax_attention(*inputs, causal=True))


def test_other_traces_keep_the_operators():
    inputs = tuple(x.detach() for x in tensors())
    for mode in ("real", "fake", "symbolic"):
        assert called(make_fx(Attention(), tracing_mode=mode)(*inputs)) == ["fastmax.forward.default"]
