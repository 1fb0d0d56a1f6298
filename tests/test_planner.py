"""The algorithm that "auto" takes, and the numbers of heads, tokens and keys that are handled together."""

import pytest
import torch
from common import CPU, Case, Memory, by_algorithm, by_causal, by_gradient, check, in_turn, make_inputs, make_options, run

from fastmax import eager, fastmax_attention
from fastmax.eager.planner import LinearPlan, QuadraticPlan, choose_algorithm, plan_linear, plan_quadratic

# n = m and d = dv where the linear algorithm begins to pay: (d, p, query heads a kv head, causal) -> tokens.
CROSSOVERS = {
    (16, 1, 1, False): 17,
    (16, 1, 1, True): 288,
    (64, 1, 1, False): 65,
    (64, 1, 8, False): 37,
    (64, 1, 8, True): 328,
    (16, 2, 1, False): 273,
    (16, 2, 8, False): 154,
    (16, 2, 1, True): 800,
    (64, 2, 1, False): 2625,
    (64, 2, 8, False): 1477,
    (64, 2, 1, True): 5504,
    (64, 2, 8, True): 3208,
    (128, 2, 1, True): 18944,
}


@pytest.mark.parametrize("d, p, group, causal", CROSSOVERS)
def test_crossovers(d, p, group, causal):
    n = CROSSOVERS[d, p, group, causal]
    choices = [choose_algorithm(tokens, tokens, d, d, causal, p, group) for tokens in (n // 2, n - 1, n, 2 * n)]
    assert choices == ["quadratic", "quadratic", "linear", "linear"]


def test_choices_where_n_is_not_m_and_dv_not_d():
    assert choose_algorithm(1, 10_000, 16, 16, True, 2) == "quadratic", "one query does not pay for a state"
    assert choose_algorithm(100, 4000, 16, 16, True, 2) == "quadratic"
    assert choose_algorithm(200, 4000, 16, 16, True, 2) == "linear"
    assert choose_algorithm(273, 273, 16, 64, False, 2) == "quadratic", "a wide v makes the state dear"
    assert choose_algorithm(273, 273, 16, 4, False, 2) == "linear"


def bounds(sequences):
    """Returns the cu_seqlens of 600 tokens in sequences of equal length."""
    return torch.arange(0, 601, 600 // sequences, dtype=torch.int32)


# Sizes between the crossovers of two orders, or of two groups.
AUTO = {
    "p=1": (Case("", n=100, h=1, d=16), {"p": 1}, "linear"),
    "p=2": (Case("", n=100, h=1, d=16), {"p": 2}, "quadratic"),
    "8 heads, 8 kv heads": (Case("", n=200, h=8, d=16), {}, "quadratic"),
    "8 heads, 1 kv head": (Case("", n=200, h=8, hk=1, d=16), {}, "linear"),
    "full": (Case("", n=500, h=1, d=16), {}, "linear"),
    "causal": (Case("", n=500, h=1, d=16), {"causal": True}, "quadratic"),
    "dv": (Case("", n=300, h=1, d=16, dv=64), {}, "quadratic"),
    "m": (Case("", n=20, m=2000, h=1, d=16), {}, "quadratic"),
    # Packed sequences go by their mean length.
    "packed, short": (Case("", n=600, h=1, d=16), {"p": 1, "causal": True, "cu_seqlens": bounds(6)}, "quadratic"),
    "packed, long": (Case("", n=600, h=1, d=16), {"p": 1, "causal": True, "cu_seqlens": bounds(2)}, "linear"),
}


@by_gradient
@pytest.mark.parametrize("name", AUTO)
def test_auto_takes_the_planned_algorithm(name, custom, monkeypatch):
    """Forward and backward take the algorithm that is planned for the call's order, group and sizes."""
    case, options, expected = AUTO[name]
    ran = []

    def spy(module, function):
        original = getattr(module, function)
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, function, lambda *args: ran.append((name, function)) or original(*args))

    for module in (eager.linear, eager.quadratic):
        spy(module, "forward")
        spy(module, "backward")
    inputs, grad_o = make_inputs(case)
    run(fastmax_attention, inputs, grad_o, use_custom_gradient=custom, **options)
    assert set(ran) == {(expected, function) for function in (("forward", "backward") if custom else ("forward",))}


def test_block_sizes():
    """Many heads share a block, a wide state leaves space for few, and a group of queries counts as many rows."""
    assert plan_linear(CPU, heads=1, group=1, d=64, dv=64, order=2) == (426, 2, 1)
    assert plan_linear(CPU, heads=512, group=1, d=64, dv=64, order=2) == (426, 1, 2)
    assert plan_linear(CPU, heads=512, group=8, d=64, dv=64, order=2) == (64, 1, 2)
    assert plan_linear(CPU, heads=512, group=1, d=64, dv=64, order=1) == (128, 1, 64)
    assert plan_quadratic(CPU, heads=512, group=1, n=4096, m=4096) == (256, 256, 16)
    assert plan_quadratic(CPU, heads=512, group=8, n=4096, m=4096) == (32, 256, 16)
    assert plan_quadratic(CPU, heads=3, group=1, n=5, m=7) == (16, 7, 3)
    assert plan_quadratic(torch.device("meta"), heads=1, group=1, n=4096, m=8192) == (1024, 4096, 1)


@by_algorithm
@pytest.mark.parametrize("b, h, causal", [(32, 8, True), (4, 64, False)], ids=["batch", "heads"])
def test_no_temporary_grows_with_the_heads(b, h, causal, algorithm):
    """Heads are computed in groups, whose largest temporary stays within the budget of 2^22 elements."""
    case = Case("", n=256, b=b, h=h, d=4) if algorithm == "quadratic" else Case("", n=16, b=b // 2, h=h, d=64)
    inputs, grad_o = make_inputs(case)
    with Memory() as memory:
        run(fastmax_attention, inputs, grad_o, causal=causal, algorithm=algorithm)
    assert memory.largest <= 2**22


@in_turn("custom")
@by_algorithm
@by_gradient
@by_causal
@pytest.mark.parametrize("b, h, hk", [(20, 2, 1), (3, 6, 6)], ids=["batch", "heads"])
def test_a_padded_batch_in_several_groups(b, h, hk, causal, custom, algorithm, monkeypatch):
    """Each group gets its own heads' part of every tensor, of the mask and noise too."""
    monkeypatch.setattr(eager.planner, "plan_linear", lambda *args: LinearPlan(16, 2, 2))
    monkeypatch.setattr(eager.planner, "plan_quadratic", lambda *args: QuadraticPlan(16, 16, 2))
    case = Case("groups", n=40, m=45, b=b, h=h, hk=hk, d=5, dv=3)
    inputs, grad_o = make_inputs(case)
    options = make_options("everything", case)
    check(inputs, grad_o, custom=custom, algorithm=algorithm, causal=causal, **options)
