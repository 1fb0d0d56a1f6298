"""Properties that hold for every size and option, on sizes and options that hypothesis draws."""

import pytest
import torch
from common import ALGORITHMS, Case, by_algorithm, by_gradient, definition, make_inputs, run
from hypothesis import given
from hypothesis import strategies as st

from fastmax import fastmax_attention

# float64 throughout: what is left between two ways of computing one number is rounding.
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


@st.composite
def calls(draw, causal=(False, True), normalize=(False, "sequence", "token")):
    """Draws inputs, grad_o and options of a call."""
    hk = draw(st.integers(1, 3))
    n = draw(st.sampled_from([1, 2, 3, 7, 16, 17, 31, 64, 65, 130, 300]))
    is_causal = draw(st.sampled_from(causal))
    m = n + draw(st.sampled_from([0, 1, 5, 70])) if is_causal else draw(st.integers(1, 140))
    case = Case(
        "drawn", n=n, m=m, b=draw(st.integers(1, 2)), h=hk * draw(st.integers(1, 3)), hk=hk,
        d=draw(st.sampled_from([1, 2, 3, 8, 16, 17, 33])), dv=draw(st.sampled_from([1, 4, 9])),
    )  # fmt: skip
    torch.manual_seed(draw(st.integers(0, 2**31)))
    inputs, grad_o = make_inputs(case, torch.float64)
    p = draw(st.sampled_from([1, 2]))
    real_roots = p == 2 and draw(st.booleans())
    options = {
        "causal": is_causal,
        "p": p,
        "a0": draw(st.floats(1.0, 3.0)),
        "a1": draw(st.floats(-1.0, 1.0)),
        "a2": draw(st.floats(0.3, 1.0)),
        "temperature": draw(st.floats(1.5, 4.0)),
        "normalize": draw(st.sampled_from(normalize)),
    }
    if real_roots:  # on positive scores, where f is positive all the same
        inputs |= {name: inputs[name].abs() for name in "qk"}
        options |= {"a1": draw(st.floats(3.5, 5.0)), "a2": draw(st.sampled_from([0.0, -0.5, 0.5, 1.0]))}
    if draw(st.booleans()):
        options["attention_mask"] = torch.rand(case.b, m) > 0.4
    if not real_roots and draw(st.booleans()):
        options["rpe_matrix"] = "sinusoidal"
        # |q.r| <= sqrt(d / 2): keep f positive, as a relative comparison needs.
        options["temperature"] *= 1.0 + case.d**0.5
    return inputs, grad_o, options


def assert_all_close(actual, expected):
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@given(call=calls())
def test_both_algorithms_and_gradients_equal_the_definition(call):
    inputs, grad_o, options = call
    exact = run(definition, inputs, grad_o, **options)
    for algorithm in ALGORITHMS:
        for custom in (True, False):
            assert_all_close(
                run(fastmax_attention, inputs, grad_o, algorithm=algorithm, use_custom_gradient=custom, **options), exact
            )


@given(call=calls(causal=(False,)), algorithm=st.sampled_from(ALGORITHMS))
def test_permuting_keys_changes_nothing(call, algorithm):
    inputs, grad_o, options = call
    if "rpe_matrix" in options:
        del options["rpe_matrix"]  # positions are what it is about
    order = torch.randperm(inputs["k"].shape[2])
    shuffled = dict(inputs, k=inputs["k"][:, :, order], v=inputs["v"][:, :, order])
    out = run(fastmax_attention, inputs, grad_o, algorithm=algorithm, **options)
    if "attention_mask" in options:
        options["attention_mask"] = options["attention_mask"][:, order]
    again = run(fastmax_attention, shuffled, grad_o, algorithm=algorithm, **options)
    for name in ("grad k", "grad v"):
        out[name] = out[name][:, :, order]
    assert_all_close(again, out)


@given(call=calls(), algorithm=st.sampled_from(ALGORITHMS), data=st.data())
def test_permuting_heads_and_batch_permutes_the_output(call, algorithm, data):
    inputs, grad_o, options = call
    b, hk = inputs["k"].shape[:2]
    batch, heads = data.draw(st.permutations(range(b))), data.draw(st.permutations(range(hk)))

    def permute(x):
        return x.unflatten(1, (hk, -1))[:, heads].flatten(1, 2)[batch]

    out = run(fastmax_attention, inputs, grad_o, algorithm=algorithm, **options)
    if "attention_mask" in options:
        options["attention_mask"] = options["attention_mask"][batch]
    moved = {name: permute(x) for name, x in inputs.items()}
    again = run(fastmax_attention, moved, permute(grad_o), algorithm=algorithm, **options)
    assert_all_close(again, {name: permute(x) for name, x in out.items()})


@given(call=calls(causal=(True,), normalize=(False, "token")), algorithm=st.sampled_from(ALGORITHMS), data=st.data())
def test_causal_output_does_not_depend_on_the_future(call, algorithm, data):
    """A change of every query, key and value after one position changes no bit of the output up to it, and no gradient flows
    back."""
    inputs, grad_o, options = call
    n, m = inputs["q"].shape[2], inputs["k"].shape[2]
    last = data.draw(st.integers(0, n - 1))
    future = {name: x[:, :, last + 1 + (m - n if name in "kv" else 0) :] for name, x in inputs.items()}
    grad_o[:, :, last + 1 :] = 0.0
    out = run(fastmax_attention, inputs, grad_o, algorithm=algorithm, **options)
    for name in "kv":
        leak = out[f"grad {name}"][:, :, last + 1 + m - n :]
        assert torch.equal(leak, torch.zeros_like(leak))

    o = fastmax_attention(**inputs, algorithm=algorithm, **options)
    for x in future.values():
        x.copy_(torch.randn_like(x))  # in place: equal bits need equal addresses
    again = fastmax_attention(**inputs, algorithm=algorithm, **options)
    assert torch.equal(o[:, :, : last + 1], again[:, :, : last + 1])


@given(call=calls(causal=(True,), normalize=(False, "token")), algorithm=st.sampled_from(ALGORITHMS), data=st.data())
def test_splitting_queries_equals_one_call(call, algorithm, data):
    """Causal queries are aligned with the last keys. So the last queries see all keys, and the first ones are called with the
    keys that they see."""
    inputs, _, options = call
    n, m = inputs["q"].shape[2], inputs["k"].shape[2]
    cut = data.draw(st.integers(0, n))
    whole = fastmax_attention(**inputs, algorithm=algorithm, **options)
    first = {"q": inputs["q"][:, :, :cut]} | {name: inputs[name][:, :, : cut + m - n] for name in "kv"}
    second = dict(inputs, q=inputs["q"][:, :, cut:])
    first_options = dict(options)
    if "attention_mask" in options:
        first_options["attention_mask"] = options["attention_mask"][:, : cut + m - n]
    parts = [
        fastmax_attention(**first, algorithm=algorithm, **first_options),
        fastmax_attention(**second, algorithm=algorithm, **options),
    ]
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, **CLOSE)


@given(call=calls(), algorithm=st.sampled_from(ALGORITHMS))
def test_grouped_heads_equal_repeated_heads(call, algorithm):
    inputs, grad_o, options = call
    group = inputs["q"].shape[1] // inputs["k"].shape[1]
    repeated = dict(inputs) | {name: inputs[name].repeat_interleave(group, dim=1) for name in "kv"}
    out = run(fastmax_attention, inputs, grad_o, algorithm=algorithm, **options)
    again = run(fastmax_attention, repeated, grad_o, algorithm=algorithm, **options)
    for name in ("grad k", "grad v"):
        again[name] = again[name].unflatten(1, (-1, group)).sum(2)
    assert_all_close(again, out)


@given(call=calls(normalize=(False,)), factor=st.floats(0.25, 4.0))
def test_temperature_divides_scores(call, factor):
    """Without positions, a scaled q has the effect of a scaled temperature."""
    inputs, _, options = call
    scaled = dict(inputs, q=factor * inputs["q"])
    expected = fastmax_attention(**inputs, **options)
    options["temperature"] *= factor
    torch.testing.assert_close(fastmax_attention(**scaled, **options), expected, **CLOSE)


@given(call=calls(), factor=st.floats(0.1, 10.0))
def test_coefficients_have_no_common_scale(call, factor):
    inputs, _, options = call
    expected = fastmax_attention(**inputs, **options)
    for name in ("a0", "a1", "a2"):
        options[name] *= factor
    torch.testing.assert_close(fastmax_attention(**inputs, **options), expected, **CLOSE)


@given(call=calls(), algorithm=st.sampled_from(ALGORITHMS), factor=st.floats(-5.0, 5.0), shift=st.floats(-5.0, 5.0))
def test_output_is_affine_in_v(call, algorithm, factor, shift):
    """Weights sum to one, so `v -> factor v + shift` does the same to the output of every query that sees a key."""
    inputs, _, options = call
    o = fastmax_attention(**inputs, algorithm=algorithm, **options)
    moved = fastmax_attention(**dict(inputs, v=factor * inputs["v"] + shift), algorithm=algorithm, **options)
    ones = fastmax_attention(**dict(inputs, v=torch.ones_like(inputs["v"])), algorithm=algorithm, **options)
    torch.testing.assert_close(moved, factor * o + shift * ones, **CLOSE)
    assert ((ones - 1.0).abs().min(ones.abs()) < 1e-9).all(), "1 where a key is seen, else 0"


@given(call=calls(normalize=("sequence",)), factor=st.floats(1e-3, 1e3))
def test_normalize_sequence_ignores_the_scale_of_q_and_k(call, factor):
    inputs, _, options = call
    scaled = dict(inputs, q=factor * inputs["q"], k=inputs["k"] / factor)
    torch.testing.assert_close(fastmax_attention(**scaled, **options), fastmax_attention(**inputs, **options), **CLOSE)


@pytest.mark.parametrize("lim", [0.2, 1.0, 30.0])
@by_gradient
def test_normalize_token_leaves_short_rows_alone(lim, custom):
    inputs, grad_o = make_inputs(Case("", n=50, d=6), torch.float64)
    for name in "qk":
        inputs[name] = 0.99 * lim * inputs[name] / 0.9
    options = {"use_custom_gradient": custom, "temperature": 2.0 * lim * lim}
    out = run(fastmax_attention, inputs, grad_o, normalize="token", lim=lim, **options)
    assert_all_close(out, run(fastmax_attention, inputs, grad_o, **options))


@by_algorithm
@by_gradient
def test_duplicating_every_key_changes_nothing(algorithm, custom):
    inputs, _ = make_inputs(Case("", n=33, m=70, d=5), torch.float64)
    doubled = dict(inputs) | {name: torch.cat([inputs[name]] * 2, dim=2) for name in "kv"}
    options = {"algorithm": algorithm, "use_custom_gradient": custom}
    torch.testing.assert_close(fastmax_attention(**doubled, **options), fastmax_attention(**inputs, **options), **CLOSE)
