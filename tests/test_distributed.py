"""Attention over the parts of a sequence on several ranks, against one process."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from common import relative
from distributed_cases import (
    compiled,
    copied,
    counted,
    differentiated,
    inputs,
    masks_of_kernels,
    measured,
    on_rank,
    order_of_events,
    previous,
    with_a_message_of,
)
from ranks import Ranks

from benchmarks import distributed
from benchmarks.messages import as_rank
from benchmarks.timing import Protocol
from fastmax import fastmax_attention, flash_attention
from fastmax.distributed import Layout, contiguous_layout, zigzag_layout

WORLD = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(WORLD, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


# ---- against one process


def together(results: list[dict], layout: Layout) -> dict[str, torch.Tensor]:
    """Returns the results of all tokens from those of each rank."""
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
    """Returns a layout of any kind: contiguous, zigzag, or pieces dealt out at random. Some pieces, or all of a rank's, are
    empty."""
    kind = random.choice(["contiguous", "zigzag", "dealt"])
    if kind == "zigzag":
        return zigzag_layout(n, world)
    pieces = world if kind == "contiguous" else random.randint(world, 3 * world)
    bounds = [0, *sorted(random.randint(0, n) for _ in range(pieces - 1)), n]
    stretches: list[list] = [[] for _ in range(world)]
    for i, pair in enumerate(pairwise(bounds)):
        stretches[i if kind == "contiguous" else random.randrange(world)].append(pair)
    return Layout(stretches)


def drawn(seed: int, gate: bool = False) -> dict:
    """Returns a random case with any options. With `gate` it is causal and has input gates."""
    draw = random.Random(seed)
    n, world = draw.choice([7, 40, 300]), draw.randint(2, WORLD)
    b, (h, hk) = draw.choice([1, 2]), draw.choice([(2, 2), (4, 2), (3, 1)])
    causal, packed = draw.random() < (1.0 if gate else 0.7), draw.random() < 0.4
    case = {"seed": seed, "shape": (1 if packed else b, h, hk, n, 5, 4), "layout": cuts(draw, n, world), "options": {}}
    case |= {"padding": draw.random() < 0.4, "flash": draw.random() < 0.3}
    if gate:
        case["gate"] = "beyond" if seed % 4 == 0 else "ordinary"
    if causal and draw.random() < 0.5:
        case |= {"decay": draw.choice([0.02, 1.0]), "resets": draw.choice([0.0, 0.05])}
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
    if draw.random() < 0.2:
        case["options"] |= {"dropout": 0.3}
    if case["options"]["p"] == 1:  # scores of all sizes, and denominators away from 0
        case["options"] |= {"a0": 30.0}
    return case


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("gate", [False, True], ids=["", "gate"])
def test_any_parts_and_options(ranks, gate, seed):
    check(ranks, drawn(seed, gate))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "algorithm": "linear", "rpe_matrix": "sinusoidal"},
        {"causal": True, "algorithm": "linear", "rpe_matrix": "sinusoidal", "exact_window": 3},
        {"causal": True, "algorithm": "quadratic"},
    ],
    ids=["sinusoidal", "window", "ring"],
)
def test_tokens_that_change_on_another_rank_alone(ranks, options):
    for counts in ((16, 16), (24, 20), (16, 20), (24, 16), (16, 16)):
        layout = contiguous_layout(counts)
        check(ranks, {"shape": (1, 2, 1, sum(counts), 4, 4), "layout": layout, "options": options, "passes_layout": False})


@pytest.mark.parametrize("given", ["decay", "gate", "decay, gate"])
@pytest.mark.parametrize("bounds", ["none", "packed, padding"])
@pytest.mark.parametrize("kind", ["linear", "quadratic", "softmax", "linear, window", "quadratic, window", "softmax, window"])
def test_decays_above_zero_and_nan(ranks, kind, bounds, given):
    """A NaN decay reaches the queries of other ranks that see a key before it, a NaN gate those that weigh its key by it, and
    no others."""
    kind, window, n = kind.split(",")[0], 9 if "window" in kind else None, 60
    options = (
        {"causal": True, "window": window}
        if kind == "softmax"
        else {"causal": True, "algorithm": kind, "exact_window": window or 0}
    )
    layout = Layout((((0, 10), (40, 50)), ((10, 25), (55, 60)), ((25, 40), (50, 55))))
    case = {"shape": (1, 4, 2, n, 5, 4), "layout": layout, "options": options}
    case |= {"flash": kind == "softmax", "padding": "padding" in bounds}
    case |= {"decay": 0.1, "resets": 0.02, "odd": given == "decay"} if "decay" in given else {}
    case |= {"gate": "odd"} if "gate" in given else {}
    if "packed" in bounds:
        case["cu_seqlens"] = [0, 7, 33, 33, n]
    for seed in range(2):
        case["seed"] = seed
        got, tensors = together(ranks.run(on_rank, case, world=3), layout), inputs(case)
        expected = differentiated(flash_attention if case["flash"] else fastmax_attention, case, tensors)
        for name in ("o", "lse"):
            torch.testing.assert_close(got[name], expected[name], rtol=1e-9, atol=1e-9, equal_nan=True)
        assert expected["o"].isnan().any() or window is not None
        if "decay" in given:
            assert not got["grad_log_decay"][tensors["log_decay"] > 0].any()


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


@pytest.mark.parametrize("gate", ["", "ordinary"], ids=["", "gate"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["linear", "quadratic", "softmax"])
def test_the_error_is_at_most_twice_that_of_plain_operations(ranks, algorithm, dtype, gate):
    layout = cuts(random.Random(0), 300, 3)
    flash = algorithm == "softmax"
    options = {"causal": True} if flash else {"causal": True, "algorithm": algorithm, "temperature": 4.0}
    case = {
        "shape": (1, 4, 2, 300, 16, 16),
        "layout": layout,
        "decay": 0.05,
        "gate": gate,
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


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("gate", ["", "ordinary"], ids=["", "gate"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_states_by_shares_are_those_that_are_gathered(ranks, decay, gate, p):
    layout = Layout((((0, 5), (70, 100)), (), ((5, 30), (40, 70)), ((30, 40),)))
    options = {"causal": True, "algorithm": "linear", "p": p, "a0": 30.0}
    case = {"shape": (1, 2, 2, 100, 5, 4), "layout": layout, "decay": decay, "resets": 0.02, "options": options}
    case["gate"] = gate
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


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("gate", [False, True], ids=["", "gate"])
def test_the_formula_says_how_many_bytes_are_exchanged(ranks, gate, seed):
    case = drawn(seed + 1000, gate)
    case["dtype"] = random.Random(seed).choice([torch.float64, torch.float32, torch.bfloat16])
    case["options"].pop("rpe_matrix", None)  # a head dim of its own
    if case["flash"]:
        case["options"].pop("window")
    for bytes_of_a_message in (1 << 40, -1):
        for received, expected in ranks.run(counted, case, bytes_of_a_message, world=case["layout"].world):
            assert received == expected


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["linear", "quadratic", "softmax"])
def test_a_window_longer_than_the_sequence(ranks, kind, causal):
    """A halo of the window's length would not fit in memory."""
    longest = 2**31 - 1
    case = {"shape": (1, 2, 2, 20, 4, 4), "layout": zigzag_layout(20, 2), "flash": kind == "softmax", "dtype": torch.float64}
    own = {"window": longest} if case["flash"] else {"algorithm": kind, "exact_window": longest}
    case["options"] = {"causal": causal} | own
    check(ranks, case)
    if not case["flash"]:
        for received, expected in ranks.run(counted, case, 1 << 40, world=2):
            assert received == expected


def test_compiled_code_calls_it_from_outside(ranks):
    options = {"causal": True, "algorithm": "linear"}
    case = {"shape": (1, 2, 2, 20, 4, 4), "layout": Layout([[(0, 9)], [(9, 20)]]), "options": options}
    for plain, other in ranks.run(compiled, case, world=2):
        assert all(torch.equal(x, y) for x, y in zip(plain, other, strict=True))


def test_local_keys_are_attended_to_while_states_are_on_their_way(ranks):
    options = {"causal": True, "algorithm": "linear", "exact_window": 3}
    case = {"shape": (1, 2, 2, 20, 4, 4), "layout": Layout([[(0, 9)], [(9, 20)]]), "options": options}
    for events in ranks.run(order_of_events, case, world=2):
        assert events == ["begins", "local", "waits", "begins", "waits"]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("algorithm", ["linear", "quadratic"])
def test_a_window_needs_no_mask(ranks, algorithm, causal):
    """Kernels without a mask are faster. The halo ends where the sequence does, so it has no tokens that a mask must hide."""
    options = {"causal": causal, "algorithm": algorithm, "exact_window": 5}
    case = {"shape": (1, 2, 2, 20, 4, 4), "layout": Layout([[(0, 9)], [(9, 20)]]), "options": options}
    for masks in ranks.run(masks_of_kernels, case, world=2):
        assert masks and not any(masks)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_tokens_that_lie_together_are_not_copied(ranks, decay):
    case = {"shape": (1, 2, 2, 80, 4, 4), "options": {"causal": True, "algorithm": "linear"}, "decay": decay}
    assert ranks.run(copied, case | {"layout": Layout([[(0, 39)], [(39, 80)]])}, world=2) == [[], []]
    joined = ranks.run(copied, case | {"layout": zigzag_layout(80, 2)}, world=2)
    assert all("aten::cat" in names for names in joined), "what is counted would be seen"


@pytest.mark.parametrize(
    ("algorithm", "sizes"),
    [
        ("linear", {"decay": True, "gate": True, "exact_window": 5}),
        ("softmax", {"gate": True}),
        ("quadratic", {}),
        ("linear", {"mode": "memory"}),
    ],
)
def test_the_benchmark_measures_and_checks(ranks, algorithm, sizes):
    for rows in ranks.run(measured, algorithm, sizes):
        assert [row["provider"] for row in rows] == [f"{WORLD} GPUs"] if "mode" in sizes else ["one GPU", f"{WORLD} GPUs"]
        assert all(row["median"] > 0 for row in rows) and "as by formula" in rows[-1]["note"]


@pytest.mark.parametrize("algorithm, sizes", [("linear", {"decay": True, "exact_window": 5}), ("softmax", {})])
def test_the_benchmark_measures_ranks_without_the_others(algorithm, sizes):
    case = distributed.Case(64, 8, heads=2, dtype="fp32", algorithm=algorithm, **sizes)
    rows = distributed.measure_alone(case, torch.device("cpu"), Protocol(dropped=0, rounds=1, seconds=0.0), 3)
    assert [row["provider"] for row in rows] == ["one GPU", "rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    assert all(row["median"] > 0 for row in rows) and "without messages" in rows[-1]["note"]


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_without_the_others_computes_with_numbers(first):
    case = distributed.Case(64, 8, heads=2, dtype="fp32", decay=True, exact_window=5)
    tensors = distributed.make_inputs(case, 64, torch.device("cpu"), seed=0)
    with as_rank(0 if first else 1, 2):
        o = distributed.attend(case, tensors, case.layout(2))
        grads = torch.autograd.grad(o, [tensors[name] for name in ("q", "k", "v", "log_decay")], tensors["g"])
    assert all(x.isfinite().all() for x in (o, *grads))
    if first:  # nothing comes before it
        assert torch.allclose(o, distributed.attend(case, tensors, None), rtol=1e-4, atol=1e-5)
