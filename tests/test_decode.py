"""The recurrent form: `init_state`, `step` and `prefill` against the parallel form, which is causal."""

import copy
import inspect

import pytest
import torch
from common import CHUNK, DTYPES, Case, assert_within_contract, by_order, definition, dtype_id, exactly, make_inputs
from hypothesis import given
from hypothesis import strategies as st

import fastmax
from fastmax import fastmax_attention

CASE = Case("", n=12, b=2, h=4, hk=2, d=5, dv=7)
OPTIONS = {
    "defaults": {},
    "p=1": {"p": 1},
    "temperature": {"temperature": 2.5},
    "coefficients": {"a0": 2.0, "a1": 0.7, "a2": 0.3},
    "normalize=token": {"normalize": "token", "lim": 0.5},
    "sinusoidal": {"rpe_matrix": "sinusoidal", "temperature": 4.0},
    "everything": {"rpe_matrix": "sinusoidal", "normalize": "token", "lim": 0.8, "temperature": 3.0, "a0": 1.5, "a2": 0.4},
}
by_decode_option = pytest.mark.parametrize("option", OPTIONS)


def new_state(case, device="cpu", dtype=torch.float64, **options):
    return fastmax.init_state(case.b, case.hk, case.d, case.dv, dtype=dtype, device=device, **options)


def advance(inputs, sizes, state, mask=None):
    """Feed the tokens in pieces: `step` for a piece of one, `prefill` for any other. Output of all of them, last state."""
    outputs = []
    for piece in zip(*(x.split(sizes, dim=2) for x in inputs.values()), strict=True):
        start = sum(o.shape[2] for o in outputs)
        n = piece[0].shape[2]
        part = None if mask is None else mask[:, start : start + n]
        function = fastmax.step if n == 1 else fastmax.prefill
        o, state = function(*piece, state, key_padding_mask=part)
        outputs.append(o)
    return torch.cat(outputs, dim=2), state


def assert_states_close(actual, expected):
    for name in ("values", "weights"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=1e-10, atol=1e-10)
    assert actual.tokens == expected.tokens


@by_decode_option
def test_steps_equal_the_parallel_form(option, device):
    inputs, _ = make_inputs(CASE, torch.float64, device)
    o, state = advance(inputs, [1] * CASE.n, new_state(CASE, device, **OPTIONS[option]))
    torch.testing.assert_close(o, definition(**inputs, causal=True, **OPTIONS[option]), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(o, fastmax_attention(**inputs, causal=True, **OPTIONS[option]), rtol=1e-10, atol=1e-10)
    assert state.tokens == CASE.n


@by_decode_option
def test_prefill_equals_the_parallel_form_and_the_steps(option, device):
    inputs, _ = make_inputs(CASE, torch.float64, device)
    o, state = fastmax.prefill(*inputs.values(), new_state(CASE, device, **OPTIONS[option]))
    torch.testing.assert_close(o, definition(**inputs, causal=True, **OPTIONS[option]), rtol=1e-10, atol=1e-10)
    _, stepped = advance(inputs, [1] * CASE.n, new_state(CASE, device, **OPTIONS[option]))
    assert_states_close(state, stepped)


@by_order
@pytest.mark.parametrize("sizes", [(CHUNK + 7, 1, 1), (1, CHUNK - 1, 2), (3, 2 * CHUNK + 1)], ids=str)
def test_prefill_across_chunks(sizes, p, device):
    inputs, _ = make_inputs(Case("", n=sum(sizes), h=2, hk=1, d=17, dv=4), torch.float64, device)
    state = fastmax.init_state(1, 1, 17, 4, dtype=torch.float64, device=device, p=p)
    o, _ = advance(inputs, sizes, state)
    torch.testing.assert_close(o, definition(**inputs, causal=True, p=p), rtol=1e-9, atol=1e-10)


@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 5, 17, 64, 70]), min_size=1, max_size=5),
    option=st.sampled_from(sorted(OPTIONS)),
    padded=st.booleans(),
)
def test_splitting_and_resuming_equals_one_call(sizes, option, padded):
    """Any cut of the sequence into pieces, pieces of nothing too, gives one call's output and state."""
    case = Case("", n=max(sum(sizes), 1), b=2, h=4, hk=2, d=5, dv=3)
    inputs, _ = make_inputs(case, torch.float64)
    inputs = {name: x[:, :, : sum(sizes)] for name, x in inputs.items()}
    mask = torch.rand(2, sum(sizes)) > 0.4 if padded else None
    options = OPTIONS[option]
    whole, state = fastmax.prefill(*inputs.values(), new_state(case, **options), key_padding_mask=mask)
    o, resumed = advance(inputs, sizes, new_state(case, **options), mask)
    torch.testing.assert_close(o, whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        whole, fastmax_attention(**inputs, causal=True, key_padding_mask=mask, **options), rtol=1e-10, atol=1e-10
    )
    assert_states_close(resumed, state)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("prompt", [0, 9, 12], ids=lambda n: f"prompt of {n}")
def test_numerical_contract(prompt, dtype, device):
    inputs, _ = make_inputs(CASE, dtype, device)
    sizes = [prompt] * (prompt > 0) + [1] * (CASE.n - prompt)
    o, _ = advance(inputs, sizes, new_state(CASE, device, dtype))
    exact = definition(**{name: exactly(x) for name, x in inputs.items()}, causal=True)
    assert_within_contract("o", o, definition(**inputs, causal=True), exact)


def test_output_shape_dtype_and_layout(device):
    inputs, _ = make_inputs(CASE, torch.bfloat16, device, "token-major")
    o, state = fastmax.prefill(*inputs.values(), new_state(CASE, device, torch.bfloat16))
    assert o.shape == (CASE.b, CASE.h, CASE.n, CASE.dv) and o.dtype == torch.bfloat16
    assert o.transpose(1, 2).is_contiguous()
    o, _ = fastmax.step(*(x[:, :, :1] for x in inputs.values()), state)
    assert o.shape == (CASE.b, CASE.h, 1, CASE.dv) and o.dtype == torch.bfloat16


@by_order
def test_state_has_constant_symmetric_size(p, device):
    """dv + 1 numbers for each of 1 + d + d (d + 1) / 2 features (1 + d for p = 1), however many tokens were seen."""
    inputs, _ = make_inputs(Case("", n=300, b=2, h=4, hk=2, d=5, dv=7), torch.float32, device)
    features = 1 + 5 + (15 if p == 2 else 0)
    start = fastmax.init_state(2, 2, 5, 7, device=device, p=p)
    _, state = fastmax.prefill(*inputs.values(), start)
    _, state = fastmax.step(*(x[:, :, :1] for x in inputs.values()), state)
    for x in (start, state):
        tensors = [y for y in vars(x).values() if isinstance(y, torch.Tensor)]
        assert sum(y.numel() for y in tensors) == 2 * 2 * features * (7 + 1)


def test_a_state_passed_in_is_not_modified(device):
    """So a prompt's state may be continued in several ways."""
    inputs, _ = make_inputs(CASE, torch.float64, device)
    _, state = fastmax.prefill(*inputs.values(), new_state(CASE, device))
    before = copy.deepcopy(state)
    token = [x[:, :, :1] for x in inputs.values()]
    first, _ = fastmax.step(*token, state)
    fastmax.prefill(*inputs.values(), state)
    again, _ = fastmax.step(*token, state)
    assert torch.equal(first, again)
    assert torch.equal(state.values, before.values) and torch.equal(state.weights, before.weights)
    assert state.tokens == before.tokens


def test_padding(device):
    """A masked token leaves no trace; a sequence that has seen only masked tokens outputs 0."""
    inputs, _ = make_inputs(CASE, torch.float64, device)
    mask = torch.ones(2, CASE.n, dtype=torch.bool, device=device)
    mask[0, :5] = False
    mask[1, 3] = False
    expected = definition(**inputs, causal=True, key_padding_mask=mask)
    for sizes in ([CASE.n], [1] * CASE.n):
        o, _ = advance(inputs, sizes, new_state(CASE, device), mask)
        torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-10)
        assert torch.equal(o[0, :, :5], torch.zeros_like(o[0, :, :5]))


def test_gradients_flow_through_the_state(device):
    """Back through a prefill and two steps: the gradients of one causal call."""
    inputs, grad_o = make_inputs(CASE, torch.float64, device)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    o, _ = advance(leaves, [CASE.n - 2, 1, 1], new_state(CASE, device))
    grads = torch.autograd.grad(o, list(leaves.values()), grad_o)
    expected = torch.autograd.grad(definition(**leaves, causal=True), list(leaves.values()), grad_o)
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-9, atol=1e-10)


def test_options_are_keywords():
    for function, positional in ((fastmax.init_state, 4), (fastmax.step, 4), (fastmax.prefill, 4)):
        kinds = [x.kind for x in inspect.signature(function).parameters.values()]
        assert kinds[:positional] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * positional
        assert set(kinds[positional:]) == {inspect.Parameter.KEYWORD_ONLY}


BAD_STATES = {
    "normalize=True": ({"normalize": True}, ValueError, "normalize"),
    "normalize=sequence": ({"normalize": "sequence"}, ValueError, "normalize"),
    "rpe tensor": ({"rpe_matrix": torch.zeros(3, 5)}, (TypeError, ValueError), "rpe_matrix"),
    "head_dim of 0": ({"head_dim": 0}, ValueError, "head_dim"),
    "value_dim of 0": ({"value_dim": 0}, ValueError, "value_dim"),
    "negative batch": ({"batch": -1}, ValueError, "batch"),
    "kv_heads of text": ({"kv_heads": "2"}, TypeError, "kv_heads"),
    "dtype": ({"dtype": torch.int64}, TypeError, "dtype"),
    "temperature": ({"temperature": 0.0}, ValueError, "temperature"),
    "a1": ({"a1": float("nan")}, ValueError, "a1"),
    "p": ({"p": 3}, ValueError, "p must"),
    "lim": ({"lim": -1.0}, ValueError, "lim"),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_bad_states(name):
    changes, exception, message = BAD_STATES[name]
    with pytest.raises(exception, match=message):
        fastmax.init_state(**({"batch": 2, "kv_heads": 2, "head_dim": 5} | changes))


BAD_TOKENS = {
    "no state": ({"state": None}, TypeError, "state"),
    "rank 3": ({name: torch.zeros(2, 1, 5) for name in "qkv"}, ValueError, "4-d"),
    "another batch": ({name: torch.zeros(3, 2, 1, 5) for name in "qkv"}, ValueError, "state"),
    "other kv heads": ({name: torch.zeros(2, 1, 1, 5) for name in "kv"}, ValueError, "state"),
    "another head_dim": ({name: torch.zeros(2, 2, 1, 6) for name in "qk"}, ValueError, "state"),
    "another value_dim": ({"v": torch.zeros(2, 2, 1, 6)}, ValueError, "value_dim"),
    "another dtype": ({name: torch.zeros(2, 2, 1, 5).double() for name in "qkv"}, TypeError, "float32.*float64"),
    "keys without queries": ({name: torch.zeros(2, 2, 3, 5) for name in "kv"}, ValueError, "token"),
    "a mask for all": ({"key_padding_mask": torch.ones(2, 9, dtype=torch.bool)}, ValueError, "key_padding_mask"),
    "a mask of floats": ({"key_padding_mask": torch.ones(2, 1)}, TypeError, "key_padding_mask"),
}


@pytest.mark.parametrize("function", [fastmax.step, fastmax.prefill], ids=["step", "prefill"])
@pytest.mark.parametrize("name", BAD_TOKENS)
def test_bad_tokens(name, function):
    changes, exception, message = BAD_TOKENS[name]
    good = {name: torch.zeros(2, 2, 1, 5) for name in "qkv"} | {"state": fastmax.init_state(2, 2, 5)}
    with pytest.raises(exception, match=message):
        function(**(good | changes))


def test_step_takes_one_token():
    x = torch.zeros(2, 2, 3, 5)
    with pytest.raises(ValueError, match=r"one token.*prefill"):
        fastmax.step(x, x, x, fastmax.init_state(2, 2, 5))
