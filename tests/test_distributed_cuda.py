"""Attention over the parts of a sequence on GPUs has the results of one process, and the same bits every time. Two GPUs use
NCCL. Two ranks that share one GPU exchange messages through the host, which arrive as late as they may."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from common import relative
from distributed_cases import differentiated, inputs, tokens_of
from ranks import LATE, RankError, Ranks
from test_distributed import cuts, drawn, together
from test_distributed_errors import second_derivative
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from fastmax import fastmax_attention, flash_attention
from fastmax.distributed import (
    Layout,
    context_parallel,
    context_parallel_attention,
    context_parallel_flash_attention,
    contiguous_layout,
    zigzag_layout,
)

pytestmark = pytest.mark.cuda
WORLD = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    backend = "nccl" if torch.cuda.device_count() >= WORLD else LATE
    ranks = Ranks(WORLD, tmp_path_factory.mktemp("ranks"), backend)
    yield ranks
    ranks.close()


def gpu() -> torch.device:
    """Returns the GPU of this rank."""
    return torch.device("cuda", torch.cuda.current_device())


def on_gpu(group, case: dict) -> dict[str, torch.Tensor]:
    tensors = tokens_of(inputs(case), case["layout"], group.rank())
    tensors = {name: x.to(gpu()) for name, x in tensors.items()}
    function = context_parallel_flash_attention if case.get("flash") else context_parallel_attention
    results = differentiated(function, case, tensors, group=group, layout=case["layout"])
    return {name: x.cpu() for name, x in results.items()}


def in_one_process(case: dict, double: bool) -> dict[str, torch.Tensor]:
    function = flash_attention if case.get("flash") else fastmax_attention
    tensors = {name: x.cuda() for name, x in inputs(case).items()}
    if double:
        tensors = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    return {name: x.cpu() for name, x in differentiated(function, case, tensors).items()}


# Chunks, windows and sequences cut, or whole; long enough that the kernels cut their walks too.
CASES = {
    "linear": {"options": {"algorithm": "linear"}},
    "linear, p = 1": {"options": {"algorithm": "linear", "p": 1, "a0": 30.0}},
    "linear, not causal": {"options": {"algorithm": "linear", "causal": False}},
    "linear, decay": {"options": {"algorithm": "linear"}, "decay": 0.02, "resets": 0.001},
    "linear, sequences": {"options": {"algorithm": "linear"}, "cu_seqlens": [0, 700, 701, 1400, 3000]},
    "linear, window, padding": {"options": {"algorithm": "linear", "exact_window": 300}, "padding": True},
    "linear, window, decay": {"options": {"algorithm": "linear", "exact_window": 300}, "decay": 0.02},
    "linear, zigzag": {"options": {"algorithm": "linear"}, "layout": zigzag_layout(3000, WORLD), "decay": 0.02},
    "quadratic": {"options": {"algorithm": "quadratic"}, "layout": zigzag_layout(3000, WORLD)},
    "quadratic, decay": {"options": {"algorithm": "quadratic"}, "decay": 0.02, "resets": 0.001},
    "softmax": {"flash": True, "options": {}, "layout": zigzag_layout(3000, WORLD)},
    "softmax, not causal, padding": {"flash": True, "options": {"causal": False}, "padding": True},
    "softmax, decay": {"flash": True, "options": {}, "decay": 0.02, "layout": zigzag_layout(3000, WORLD)},
    "softmax, sequences": {"flash": True, "options": {}, "cu_seqlens": [0, 700, 701, 1400, 3000]},
    "softmax, window": {"flash": True, "options": {"window": 300}},
    "linear, gate": {"options": {"algorithm": "linear"}, "gate": "ordinary", "layout": zigzag_layout(3000, WORLD)},
    "linear, p = 1, gate": {"options": {"algorithm": "linear", "p": 1, "a0": 30.0}, "gate": "ordinary"},
    "linear, gate, sequences": {
        "options": {"algorithm": "linear"},
        "gate": "ordinary",
        "cu_seqlens": [0, 700, 701, 1400, 3000],
    },
    "linear, gate, decay": {"options": {"algorithm": "linear"}, "gate": "ordinary", "decay": 0.02, "resets": 0.001},
    "linear, window, gate": {"options": {"algorithm": "linear", "exact_window": 300}, "gate": "ordinary", "decay": 0.02},
    "quadratic, gate": {"options": {"algorithm": "quadratic"}, "gate": "ordinary", "padding": True},
    "softmax, gate": {"flash": True, "options": {}, "gate": "ordinary", "layout": zigzag_layout(3000, WORLD)},
    "softmax, window, gate": {"flash": True, "options": {"window": 300}, "gate": "ordinary", "decay": 0.02},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_process_does(ranks, name, dtype):
    case = {"shape": (1, 4, 2, 3000, 64, 64), "layout": Layout([[(0, 1234)], [(1234, 3000)]]), "dtype": dtype} | CASES[name]
    scale = {} if case.get("flash") else {"temperature": 8.0}
    case["options"] = {"causal": True} | scale | case["options"]
    results = [together(ranks.run(on_gpu, case), case["layout"]) for _ in range(3)]
    exact, one = in_one_process(case, double=True), in_one_process(case, double=False)
    for key, x in exact.items():
        assert results[0][key].dtype == one[key].dtype, key
        assert all(torch.equal(results[0][key], again[key]) for again in results[1:]), key
        finite = x.isfinite()
        assert torch.equal(results[0][key].isfinite(), finite), key
        assert relative(results[0][key][finite], x[finite]) <= 2 * relative(one[key][finite], x[finite]) + 1e-5, key


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("gate", [False, True], ids=["", "gate"])
def test_any_parts_and_options_in_float64(ranks, gate, seed):
    case = drawn(seed, gate)
    case["layout"] = cuts(random.Random(seed), case["shape"][3], WORLD)
    got, expected = together(ranks.run(on_gpu, case), case["layout"]), in_one_process(case, double=True)
    for name, x in expected.items():
        finite = x.isfinite()
        assert torch.equal(got[name].isfinite(), finite), name
        assert torch.equal(got[name][finite], x[finite]) or relative(got[name][finite], x[finite]) < 1e-9, name


def recomputed_in_a_block(group) -> list[torch.Tensor | bool]:
    """Returns a gradient through activations that the backward recomputes in the GPU's autograd thread."""
    n, threads = 64, []
    mesh = DeviceMesh.from_group(group, "cpu")  # a context asks it for the group alone
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(1, 2, n, 16, dtype=torch.float64, generator=generator).to(gpu()).requires_grad_()

    def attend(x: torch.Tensor) -> torch.Tensor:
        threads.append(threading.get_ident())
        return fastmax_attention(x, x, x, causal=True, exact_window=8).square()

    fastmax_attention(whole, whole, whole, causal=True, exact_window=8).square().sum().backward()
    own = slice(group.rank() * n // 2, (group.rank() + 1) * n // 2)
    part = whole.detach()[:, :, own].clone().requires_grad_()
    with context_parallel(mesh):
        checkpoint(attend, part, use_reentrant=False).sum().backward()
    return [len(set(threads)) == 2, relative(part.grad, whole.grad[:, :, own])]


def test_the_thread_of_the_backward_is_in_the_context(ranks):
    for in_other_thread, error in ranks.run(recomputed_in_a_block):
        assert in_other_thread
        assert error < 1e-10


def changing_tokens(group) -> None:
    """Calls with numbers of tokens that change on both ranks, then on one."""
    for counts in ((16, 16), (24, 20), (16, 20)):
        case = {"shape": (1, 2, 1, sum(counts), 16, 16), "layout": contiguous_layout(counts)}
        case["options"] = {"causal": True, "algorithm": "linear", "rpe_matrix": "sinusoidal"}
        expected, tensors = in_one_process(case, double=False), tokens_of(inputs(case), case["layout"], group.rank())
        tensors = {name: x.to(gpu()) for name, x in tensors.items()}
        got = differentiated(context_parallel_attention, case, tensors, group=group)
        own = slice(sum(counts[: group.rank()]), sum(counts[: group.rank() + 1]))
        for name, x in expected.items():
            assert relative(got[name].cpu(), x[:, :, own]) < 1e-10, (counts, name)


def test_tokens_that_change_on_another_rank_alone(ranks):
    ranks.run(changing_tokens)


def different(group) -> None:
    q = torch.ones(1, 1, 4, 8, device="cuda", dtype=torch.float16 if group.rank() else torch.bfloat16)
    context_parallel_attention(q, q, q, group=group, causal=True)


def test_errors_are_those_of_the_cpu(ranks):
    ranks.start(different)
    for error in ranks.results():
        with pytest.raises(RankError, match="dtype of q must be the same on all ranks"):
            raise error
    ranks.start(second_derivative_on_gpu)
    for error in ranks.results():
        with pytest.raises(RankError, match="no second derivative"):
            raise error


def second_derivative_on_gpu(group) -> None:
    with gpu():
        second_derivative(group, algorithm="linear")
