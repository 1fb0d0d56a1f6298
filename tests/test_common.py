"""The tools of this suite can fail: the definition against loops, the contract against a perturbed tensor, the poison."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from common import (
    Case,
    assert_within_contract,
    by_causal,
    compare,
    definition,
    in_turn,
    make_decay,
    make_inputs,
    make_options,
    run,
)

from fastmax.testing.reference import naive_softmax_attention, sinusoidal_rows


def test_uninitialised_memory_is_poisoned():
    assert torch.empty(1000).isnan().all()
    assert torch.empty(7, 3, dtype=torch.float64).transpose(0, 1).isnan().all()


def test_products_depend_on_addresses_with_unaligned(pytestconfig):
    """Products of the same tensors have the same bits when repeated, with and without the option."""
    x, copies = torch.randn(5, 8), [torch.ones(8, 3) for _ in range(20)]
    products = [x @ y for y in copies]
    assert all(map(torch.equal, products, [x @ y for y in copies]))
    assert not pytestconfig.getoption("--unaligned") or len({tuple(y.flatten().tolist()) for y in products}) > 1


@by_causal
def test_definition_equals_loops(causal):
    case = Case("loops", n=3, m=4, b=2, h=2, hk=1, d=3, dv=2)
    inputs, _ = make_inputs(case, torch.float64)
    options = make_options("everything", case, torch.float64)
    mask, noise = options["attention_mask"], options["drop_noise"]
    mask[1] = torch.tensor([False, False, True, True])
    o = definition(**inputs, causal=causal, **options)
    rpe = sinusoidal_rows(case.n, case.m, case.d).tolist()

    def row(x):
        length = math.sqrt(sum(c * c for c in x))
        return [c * min(1.0, options["lim"] / length) for c in x]

    for b in range(case.b):
        for h in range(case.h):
            for i in range(case.n):
                numerator, z = [0.0] * case.dv, 0.0
                q = row(inputs["q"][b, h, i].tolist())
                for j in range(case.m):
                    if not mask[b, j] or (causal and j > i + case.m - case.n):
                        continue
                    k = row(inputs["k"][b, 0, j].tolist())
                    r = rpe[j - i + case.n - 1]
                    s = sum(x * (y + t) for x, y, t in zip(q, k, r, strict=True)) / options["temperature"]
                    w = options["a0"] + options["a1"] * s + options["a2"] * s**2
                    z += w
                    numerator = [x + w * y for x, y in zip(numerator, inputs["v"][b, 0, j].tolist(), strict=True)]
                for c in range(case.dv):
                    expected = (1 + options["dropout"] * noise[b, h, i, c].item()) * (numerator[c] / z if z else 0.0)
                    assert math.isclose(o[b, h, i, c].item(), expected, rel_tol=1e-12, abs_tol=1e-14)


@pytest.mark.parametrize("dtype, relative", [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_contract_fails_on_a_perturbed_tensor(dtype, relative):
    exact = torch.randn(2, 3, 50, 8, dtype=torch.float64)
    plain = exact.to(dtype)
    assert_within_contract("as good as plain", plain.clone(), plain, exact)
    with pytest.raises(AssertionError, match="spread: error"):
        assert_within_contract("spread", plain + relative * torch.randn(exact.shape, dtype=dtype), plain, exact)
    row = plain.clone()
    row[1, 2, 37] = 0.0
    with pytest.raises(AssertionError, match="one row: error"):
        assert_within_contract("one row", row, plain, exact)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["NaN", "inf"])
def test_contract_fails_on_one_bad_element(bad):
    exact = torch.randn(5, 5, dtype=torch.float64)
    actual = exact.float()
    actual[2, 3] = bad
    with pytest.raises(AssertionError):
        assert_within_contract("x", actual, exact.float(), exact)


def test_contract_fails_on_a_wrong_shape_or_dtype():
    exact = torch.zeros(5, 1, dtype=torch.float64)
    with pytest.raises(AssertionError, match="shape"):
        assert_within_contract("x", torch.zeros(5, 5), exact.float(), exact)
    with pytest.raises(AssertionError, match="dtype"):
        assert_within_contract("x", exact.clone(), exact.float(), exact)


# ---- decay, windows and packed sequences


def loops(inputs, weight, options, b, h, i):
    """Output row and logarithm of the sum of weights of one query; `weight` of a score, `near` or not."""
    n, m, group = inputs["q"].shape[2], inputs["k"].shape[2], inputs["q"].shape[1] // inputs["k"].shape[1]
    at, hk = i + m - n, h // group
    cu_seqlens, mask = options.get("cu_seqlens", torch.tensor([0, m])), options["attention_mask"]
    begin, end = next((x, y) for x, y in pairwise(cu_seqlens.tolist()) if x <= at < y)
    decays = inputs["log_decay"][b, hk].tolist() if "log_decay" in inputs else [0.0] * m
    left, right = options.get("window", (m, m))
    numerator, z = [0.0] * inputs["v"].shape[3], 0.0
    for j in range(begin, end):
        if not mask[b, j] or (options["causal"] and j > at) or at - j > left or j - at > right:
            continue
        s = sum(x * y for x, y in zip(inputs["q"][b, h, i].tolist(), inputs["k"][b, hk, j].tolist(), strict=True))
        w = weight(s, abs(at - j) < options.get("exact_window", 0)) * math.prod(math.exp(x) for x in decays[j + 1 : at + 1])
        z += w
        numerator = [x + w * y for x, y in zip(numerator, inputs["v"][b, hk, j].tolist(), strict=True)]
    return [x / z if z else 0.0 for x in numerator], math.log(z) if z else -math.inf


PLACES = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "causal, packed": {"causal": True, "cu_seqlens": torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)},
    "full, packed": {"causal": False, "cu_seqlens": torch.tensor([0, 0, 5, 9], dtype=torch.int32)},
}


@pytest.mark.parametrize("softmax", [False, True], ids=["fastmax", "flash"])
@pytest.mark.parametrize("places", PLACES)
def test_definitions_equal_loops_with_everything(places, softmax):
    packed = "packed" in places
    case = Case("loops", n=9 if packed else 7, m=9, b=1 if packed else 2, h=2, hk=1, d=3, dv=2)
    inputs, _ = make_inputs(case, torch.float64)
    options = PLACES[places] | {"attention_mask": torch.rand(case.b, case.m) > 0.2}
    options["attention_mask"][0, :3] = False  # the first query sees no key where it is causal
    if options["causal"]:
        inputs["log_decay"] = make_decay("ordinary", case.b, 1, case.m, dtype=torch.float64)
        inputs["log_decay"][:, :, 5] = -math.inf
    if softmax:
        options["window"] = (4, 2)
        o, lse = naive_softmax_attention(**inputs, **options, scale=0.7)
    else:
        options["exact_window"] = 2
        polynomial = {"temperature": 1.3, "a0": 1.5, "a1": 0.9, "a2": 0.4}
        o, lse = definition(**inputs, **options, **polynomial, return_lse=True)

    def weight(s, near):
        s = s * 0.7 if softmax else s / 1.3
        return math.exp(s) if softmax or near else 1.5 + 0.9 * s + 0.4 * s * s

    for b in range(case.b):
        for h in range(case.h):
            for i in range(case.n):
                row, logarithm = loops(inputs, weight, options, b, h, i)
                torch.testing.assert_close(o[b, h, i], torch.tensor(row, dtype=torch.float64), rtol=1e-12, atol=1e-13)
                assert math.isclose(lse[b, h, i].item(), logarithm, rel_tol=1e-12, abs_tol=1e-13)


@pytest.mark.parametrize("softmax", [False, True], ids=["fastmax", "flash"])
@pytest.mark.parametrize("exact_window", [0, 4])
def test_definitions_at_minus_infinity_are_the_limit(exact_window, softmax):
    """exp(-800) is 0 in float64: outputs and gradients as with -inf, and gradients of 0 there."""
    case = Case("", n=20, m=23, b=2, h=4, hk=2, d=3, dv=2)
    inputs, grad_o = make_inputs(case, torch.float64)
    inputs["log_decay"] = make_decay("-inf at places", case.b, case.hk, case.m, dtype=torch.float64)
    infinite = inputs["log_decay"].isinf()
    assert infinite.any() and not infinite.all()
    grads = grad_o, grad_o[..., 0]
    attention = partial(naive_softmax_attention, causal=True)
    if not softmax:
        attention = partial(definition, causal=True, exact_window=exact_window, return_lse=True)
    actual = run(attention, inputs, grads)
    compare(actual, run(attention, inputs | {"log_decay": inputs["log_decay"].clamp(min=-800.0)}, grads))
    assert not actual["grad log_decay"][infinite].any() and actual["grad log_decay"].any()


@pytest.mark.parametrize("score", [300.0, -300.0])
def test_definition_with_large_scores_in_the_exact_window(score):
    """exp(300) is infinite in float32 and exp(-300) is 0, so the definition must not compute them alone."""
    case = Case("", n=20, h=1, d=1, dv=2)
    inputs, grad_o = make_inputs(case, torch.float32)
    inputs |= {"q": torch.ones_like(inputs["q"]), "k": torch.full_like(inputs["k"], score)}
    attention = partial(definition, causal=True, exact_window=20, return_lse=True)
    actual = run(attention, inputs, (grad_o, grad_o[..., 0]))
    expected = score + torch.arange(1.0, 21.0).log()
    torch.testing.assert_close(actual["lse"], expected.expand(1, 1, -1))
    assert all(x.isfinite().all() for x in actual.values())


def test_parameters_in_turn_keep_all_pairs(monkeypatch):
    """On a CPU all pairs of values occur. With a CUDA device every combination does."""
    sizes = {"a": 2, "b": 3, "c": 4}

    def decorated():
        def test(a, b, c):
            pass

        for name, count in sizes.items():
            test = pytest.mark.parametrize(name, range(count))(test)
        return in_turn("a")(test).pytestmark

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert len(decorated()) == 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (mark,) = decorated()
    rows = [dict(zip(mark.args[0].split(", "), row.values, strict=True)) for row in mark.args[1]]
    assert len(rows) == 12 and len({row.id for row in mark.args[1]}) == 12
    for x, y in (("a", "b"), ("a", "c"), ("b", "c")):
        assert len({(row[x], row[y]) for row in rows}) == sizes[x] * sizes[y]
