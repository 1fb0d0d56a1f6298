"""The tools of this suite can fail: the definition against loops, the contract against a perturbed tensor, the poison."""

import math

import pytest
import torch
from common import Case, assert_within_contract, by_causal, definition, make_inputs, make_options, sinusoidal_rows


def test_uninitialised_memory_is_poisoned():
    assert torch.empty(1000).isnan().all()
    assert torch.empty(7, 3, dtype=torch.float64).transpose(0, 1).isnan().all()


@by_causal
def test_definition_equals_loops(causal):
    case = Case("loops", n=3, m=4, b=2, h=2, hk=1, d=3, dv=2)
    inputs, _ = make_inputs(case, torch.float64)
    options = make_options("everything", case, torch.float64)
    mask, noise = options["key_padding_mask"], options["drop_noise"]
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
