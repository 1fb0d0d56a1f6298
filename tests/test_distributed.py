"""Attention over parts of a sequence, against one process."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from common import relative
from ranks import Ranks

from benchmarks.distributed import Received
from fastmax import fastmax_attention, flash_attention
from fastmax.distributed import (
    Layout,
    context_parallel_attention,
    context_parallel_flash_attention,
    exchanged_bytes,
    states,
    tokens_before,
    zigzag_layout,
)

WORLD = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(WORLD, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


# ---- a call and its gradients, on one process and on many


def inputs(case: dict) -> dict[str, torch.Tensor]:
    """Of all tokens: what a call takes and gradients of what it returns."""
    made = torch.Generator().manual_seed(case.get("seed", 0))
    b, h, hk, n, d, dv = case["shape"]
    dtype = case.get("dtype", torch.float64)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    tensors = {"q": normal(b, h, n, d), "k": normal(b, hk, n, d), "v": normal(b, hk, n, dv)}
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    if case.get("decay"):
        decay = -normal(b, hk, n).abs() * case["decay"]
        forgets = torch.rand(b, hk, n, generator=made) < case.get("forgets", 0.0)
        tensors["log_decay"] = decay.masked_fill(forgets, -torch.inf).to(dtype)
    if case.get("padding"):
        tensors["key_padding_mask"] = torch.rand(b, n, generator=made) > 0.3
    tensors |= {
        "grad_o": normal(b, h, n, dv).to(dtype),
        "grad_lse": normal(b, h, n).to(torch.promote_types(dtype, torch.float32)),
    }
    return tensors


def differentiated(function, case: dict, tensors: dict[str, torch.Tensor], **options) -> dict[str, torch.Tensor]:
    """Output, lse and all gradients, of these tokens."""
    leaves = {name: tensors[name].detach().clone().requires_grad_() for name in ("q", "k", "v", "log_decay") if name in tensors}
    q, k, v = (leaves[name] for name in "qkv")
    accompanying = {name: leaves.get(name, tensors.get(name)) for name in ("log_decay", "key_padding_mask")}
    accompanying = {name: x for name, x in accompanying.items() if x is not None}
    cu_seqlens = case.get("cu_seqlens")
    if cu_seqlens is not None:
        accompanying["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32, device=q.device)
    o, lse = function(q, k, v, **accompanying, **case["options"], **options, return_lse=True)
    # An lse of no key is infinite.
    seen = lse.detach().isfinite()
    loss = (o * tensors["grad_o"]).sum() + torch.where(seen, lse, 0.0).mul(tensors["grad_lse"]).sum()
    loss.backward()
    return {"o": o.detach(), "lse": lse.detach()} | {f"grad_{name}": x.grad for name, x in leaves.items()}


def tokens_of(tensors: dict, layout: Layout, rank: int) -> dict:
    """The tokens of a rank."""

    def take(name: str, x: torch.Tensor) -> torch.Tensor:
        dim = 1 if name == "key_padding_mask" else 2
        pieces = [x.narrow(dim, part.start, part.tokens) for part in layout.of(rank)]
        return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0)

    return {name: take(name, x) for name, x in tensors.items()}


def on_rank(group, case: dict) -> dict[str, torch.Tensor]:
    layout = case["layout"]
    function = context_parallel_flash_attention if case.get("flash") else context_parallel_attention
    passed = layout if case.get("passes_layout", True) else None
    return differentiated(function, case, tokens_of(inputs(case), layout, group.rank()), group=group, layout=passed)


def together(results: list[dict], layout: Layout) -> dict[str, torch.Tensor]:
    """Of all tokens, from those of each rank."""
    order = torch.cat([torch.arange(part.start, part.stop) for rank in range(layout.world) for part in layout.of(rank)])
    return {name: torch.cat([x[name] for x in results], dim=2)[:, :, order.argsort()] for name in results[0]}


def check(ranks: Ranks, case: dict, tolerance: float = 1e-10) -> None:
    got = together(ranks.run(on_rank, case, world=case["layout"].world), case["layout"])
    function = flash_attention if case.get("flash") else fastmax_attention
    expected = differentiated(function, case, inputs(case))
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert got[name].shape == x.shape and got[name].dtype == x.dtype, name
        assert torch.equal(got[name].isfinite(), x.isfinite()), name
        finite = x.isfinite()
        error = relative(got[name][finite], x[finite].double()) if x[finite].any() else got[name][finite].abs().max()
        assert error < tolerance, (name, error)


def cuts(random: random.Random, n: int, world: int) -> Layout:
    """Any parts: contiguous, zigzag, or pieces dealt out, some of them, or all of a rank's, empty."""
    kind = random.choice(["contiguous", "zigzag", "dealt"])
    if kind == "zigzag":
        return zigzag_layout(n, world)
    pieces = world if kind == "contiguous" else random.randint(world, 3 * world)
    bounds = [0, *sorted(random.randint(0, n) for _ in range(pieces - 1)), n]
    stretches: list[list] = [[] for _ in range(world)]
    for i, pair in enumerate(pairwise(bounds)):
        stretches[i if kind == "contiguous" else random.randrange(world)].append(pair)
    return Layout(stretches)


def drawn(seed: int) -> dict:
    """A case with any options."""
    draw = random.Random(seed)
    n, world = draw.choice([7, 40, 300]), draw.randint(2, WORLD)
    b, (h, hk) = draw.choice([1, 2]), draw.choice([(2, 2), (4, 2), (3, 1)])
    causal, packed = draw.random() < 0.7, draw.random() < 0.4
    case = {"seed": seed, "shape": (1 if packed else b, h, hk, n, 5, 4), "layout": cuts(draw, n, world), "options": {}}
    case |= {"padding": draw.random() < 0.4, "flash": draw.random() < 0.3}
    if causal and draw.random() < 0.5:
        case |= {"decay": draw.choice([0.02, 1.0]), "forgets": draw.choice([0.0, 0.05])}
    if packed:
        case["cu_seqlens"] = [0, *sorted(draw.randint(0, n) for _ in range(draw.choice([1, 4]))), n]
    if case["flash"]:
        window = draw.choice([None, None, 1, 9, n]) if causal else draw.choice([None, None, 1, 9, (3, 0), (2, 11)])
        case["options"] = {"causal": causal, "window": window}
        return case
    window = draw.choice([0, 0, 1, 6, 50, 2 * n])
    algorithm = draw.choice(["linear", "quadratic"]) if causal or not packed else "quadratic"
    case["options"] = {"causal": causal, "p": draw.choice([1, 2]), "exact_window": window, "algorithm": algorithm}
    case["options"]["temperature"] = draw.choice([2.0, 8.0])
    if draw.random() < 0.3:
        case["options"] |= {"normalize": "token"}
    if draw.random() < 0.3:
        case["options"] |= {"rpe_matrix": "sinusoidal"}
    if case["options"]["p"] == 1:  # scores of all sizes, and denominators away from 0
        case["options"] |= {"a0": 30.0}
    return case


@pytest.mark.parametrize("seed", range(60))
def test_any_parts_and_options(ranks, seed):
    check(ranks, drawn(seed))


def previous(group, x: torch.Tensor, count: int, layout: Layout) -> list[torch.Tensor]:
    own = tokens_of({"q": x.unsqueeze(1)}, layout, group.rank())["q"].squeeze(1).requires_grad_()
    before = tokens_before(own, count, group=group, layout=layout)
    sum((i + 1.0) * y.square().sum() for i, y in enumerate(before)).backward()
    return [own.grad, *(y.detach() for y in before)]


def test_tokens_before_come_from_any_rank_and_their_gradients_go_there(ranks):
    layout, count = Layout((((0, 2), (3, 9)), (), ((2, 3), (9, 20)))), 4
    x = torch.randn(2, 20, 3, dtype=torch.float64)
    results = ranks.run(previous, x, count, layout, world=3)
    grad = torch.zeros_like(x)
    for rank, (own_grad, *before) in enumerate(results):
        assert len(before) == max(1, len(layout.of(rank))) and own_grad.shape[1] == layout.count(rank)
        for i, (part, y) in enumerate(zip(layout.of(rank), before, strict=False)):
            expected = torch.nn.functional.pad(x, (0, 0, count, 0))[:, part.start : part.start + count]
            assert torch.equal(y, expected)
            first = max(0, part.start - count)
            grad[:, first : part.start] += 2.0 * (i + 1.0) * x[:, first : part.start]
    for rank, (own_grad, *_) in enumerate(results):
        pieces = [grad[:, part.start : part.stop] for part in layout.of(rank)]
        assert torch.allclose(own_grad, torch.cat(pieces, 1) if pieces else grad[:, :0])


# ---- fp32, the ways of an exchange, repeatability


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["linear", "quadratic", "softmax"])
def test_the_error_is_at_most_twice_that_of_plain_operations(ranks, algorithm, dtype, seed):
    layout = cuts(random.Random(seed), 300, 3)
    flash = algorithm == "softmax"
    options = {"causal": True} if flash else {"causal": True, "algorithm": algorithm, "temperature": 4.0}
    case = {
        "shape": (1, 4, 2, 300, 16, 16),
        "layout": layout,
        "decay": 0.05,
        "flash": flash,
        "options": options,
        "dtype": dtype,
    }
    got = together(ranks.run(on_rank, case, world=3), layout)
    tensors = inputs(case)
    function = flash_attention if flash else fastmax_attention
    exact = differentiated(function, case, {name: x.double() for name, x in tensors.items()})
    plain = differentiated(function, case, tensors, use_custom_gradient=False)
    for name, x in exact.items():
        assert relative(got[name], x) <= 2 * relative(plain[name], x) + 1e-6, name


def with_a_message_of(group, bytes_of_a_message: int, case: dict):
    states._BYTES_OF_A_MESSAGE, before = bytes_of_a_message, states._BYTES_OF_A_MESSAGE
    try:
        return on_rank(group, case)
    finally:
        states._BYTES_OF_A_MESSAGE = before


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_states_by_shares_are_those_that_are_gathered(ranks, decay, p):
    layout = Layout((((0, 5), (70, 100)), (), ((5, 30), (40, 70)), ((30, 40),)))
    options = {"causal": True, "algorithm": "linear", "p": p, "a0": 30.0}
    case = {"shape": (1, 2, 2, 100, 5, 4), "layout": layout, "decay": decay, "forgets": 0.02, "options": options}
    gathered, shared = (ranks.run(with_a_message_of, size, case) for size in (1 << 40, -1))
    for one, other in zip(gathered, shared, strict=True):
        assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_results_repeat_bit_by_bit(ranks):
    for algorithm in ("linear", "quadratic"):
        options = {"causal": True, "algorithm": algorithm, "exact_window": 9}
        case = {"shape": (1, 4, 2, 90, 8, 8), "layout": zigzag_layout(90, 3), "options": options, "decay": 0.1}
        case["dtype"] = torch.float32
        first, second = (ranks.run(on_rank, case, world=3) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            assert all(torch.equal(x, other[name]) for name, x in one.items())


# ---- bytes


def counted(group, case: dict, bytes_of_a_message: int) -> list[int]:
    states._BYTES_OF_A_MESSAGE, before = bytes_of_a_message, states._BYTES_OF_A_MESSAGE
    layout, rank = case["layout"], group.rank()
    try:
        with Received(group) as received:
            on_rank(group, case)
        d, dv = case["shape"][4:]
        given = {name: name in case for name in ("cu_seqlens",)} | {"log_decay": bool(case.get("decay"))}
        given["key_padding_mask"] = bool(case.get("padding"))
        options = {name: x for name, x in case["options"].items() if name in ("causal", "algorithm", "p", "exact_window")}
        options = {"algorithm": "softmax"} | options if case.get("flash") else options
        sizes = {
            "kv_heads": case["shape"][2],
            "head_dim": d,
            "value_dim": dv,
            "batch": case["shape"][0],
            "dtype": case["dtype"],
        }
        return [received.bytes, sum(exchanged_bytes(layout, rank, **sizes, **given, **options))]
    finally:
        states._BYTES_OF_A_MESSAGE = before


@pytest.mark.parametrize("seed", range(24))
def test_the_formula_says_how_many_bytes_are_exchanged(ranks, seed):
    case = drawn(seed + 1000)
    case["dtype"] = random.Random(seed).choice([torch.float64, torch.float32, torch.bfloat16])
    case["options"].pop("rpe_matrix", None)  # a head dim of its own
    if case["flash"]:
        case["options"].pop("window")
    for bytes_of_a_message in (1 << 40, -1):
        for received, expected in ranks.run(counted, case, bytes_of_a_message, world=case["layout"].world):
            assert received == expected


def compiled(group, case: dict) -> list[torch.Tensor]:
    tensors = tokens_of(inputs(case), case["layout"], group.rank())

    def attend(q, k, v):
        return context_parallel_attention(2.0 * q, k, v, group=group, **case["options"]) + 1.0

    results = []
    for function in (attend, torch.compile(attend, backend="eager")):
        q, k, v = (tensors[name].clone().requires_grad_() for name in "qkv")
        o = function(q, k, v)
        results.append([o.detach(), *torch.autograd.grad(o.square().sum(), (q, k, v))])
    return results


def test_compiled_code_calls_it_from_outside(ranks):
    options = {"causal": True, "algorithm": "linear"}
    case = {"shape": (1, 2, 2, 20, 4, 4), "layout": Layout([[(0, 9)], [(9, 20)]]), "options": options}
    for plain, other in ranks.run(compiled, case, world=2):
        assert all(torch.equal(x, y) for x, y in zip(plain, other, strict=True))
