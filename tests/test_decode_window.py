"""States with an exact window: `step`, `step_` and `prefill` in any split against one call of `fastmax_attention` for the real
tokens of each sequence, whose window `test_exact_window.py` checks, and against the definition. Options of the state: rows of
`test_decode.OPTIONS`."""

import copy
from dataclasses import replace

import pytest
import torch
from common import (
    CHUNK,
    DTYPES,
    Case,
    assert_within_contract,
    by_order,
    definition,
    dtype_id,
    exactly,
    in_turn,
    make_decay,
    make_inputs,
    torch_warns,
)
from hypothesis import given
from hypothesis import strategies as st
from test_decode import Calls, assert_same_states, at_real, check_replays, each_alone, first_token, pieces

import fastmax
from fastmax import fastmax_attention, flash_attention

CASE = Case("", n=16, b=2, h=4, hk=2, d=5, dv=7)


def new_state(case, window, device="cpu", dtype=torch.float64, **options):
    return fastmax.decoding.init_state(
        case.b, case.hk, case.d, case.dv, dtype=dtype, device=device, exact_window=window, **options
    )


def advance(inputs, sizes, state, in_place=False, mask=None, log_decay=None):
    """Passes the tokens in pieces, pieces of one token to `step` or `step_`. Returns all outputs and the last state."""
    start, outputs = 0, []
    for size in sizes:
        part = slice(start, start + size)
        tokens = [x[:, :, part] for x in inputs.values()]
        options = {
            "attention_mask": None if mask is None else mask[:, part],
            "log_decay": None if log_decay is None else log_decay[:, :, part],
        }
        if size == 1 and in_place:
            o = fastmax.decoding.step_(*tokens, state, **options)
        else:
            o, state = (fastmax.decoding.step if size == 1 else fastmax.decoding.prefill)(*tokens, state, **options)
        outputs.append(o)
        start += size
    return torch.cat(outputs, dim=2), state


def accompany(case, device, padded, decay):
    mask = torch.rand(case.b, case.n, device=device) > 0.3 if padded else None
    log_decay = make_decay(decay, case.b, case.hk, case.n, dtype=torch.float64, device=device) if decay else None
    return {"mask": mask, "log_decay": log_decay}


def assert_splits_equal_one_call(case, window, sizes, device, in_place=False, padded=False, decay=None, **options):
    inputs, _ = make_inputs(case, torch.float64, device)
    given = accompany(case, device, padded, decay)
    actual, state = advance(inputs, sizes, new_state(case, window, device, **options), in_place, **given)
    actual = at_real(actual, given["mask"])
    for attend in (fastmax_attention, definition):
        expected = each_alone(attend, inputs, **given, exact_window=window, **options)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)
    assert state.tokens == case.n and state.exact_window == window


# ---- against one call


@in_turn("p")
@by_order
@pytest.mark.parametrize("window", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 10 * CHUNK])
@pytest.mark.parametrize("sizes", [(CHUNK + 3, 1, CHUNK, 1, 1), (1, 3, 2 * CHUNK)], ids=str)
def test_every_window(sizes, window, p, device):
    case = Case("", n=sum(sizes), b=2, h=4, hk=2, d=5, dv=7)
    assert_splits_equal_one_call(case, window, sizes, device, padded=True, decay="-inf at places", p=p, temperature=2.0)


@given(
    sizes=st.lists(st.sampled_from([0, 1, 1, 2, 5, 17, 70]), min_size=1, max_size=6).filter(sum),
    window=st.sampled_from([0, 1, 2, 5, 16, 17, 18, 64, 200]),
    decay=st.sampled_from([None, "none", "ordinary", "none, ordinary or strong", "-inf at places", "-inf everywhere"]),
    padded=st.booleans(),
    in_place=st.booleans(),
)
def test_any_split(sizes, window, decay, padded, in_place):
    case = Case("", n=sum(sizes), b=2, h=4, hk=2, d=5, dv=3)
    assert_splits_equal_one_call(case, window, sizes, "cpu", in_place, padded, decay)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("prompt", [0, 9, 16], ids=lambda n: f"prompt of {n}")
def test_numerical_contract(prompt, dtype, device):
    inputs, _ = make_inputs(CASE, dtype, device)
    options = {"causal": True, "exact_window": 4}
    o, _ = advance(inputs, [prompt] * (prompt > 0) + [1] * (CASE.n - prompt), new_state(CASE, 4, device, dtype))
    assert o.dtype == dtype
    exact = definition(**{name: exactly(x) for name, x in inputs.items()}, **options)
    assert_within_contract("o", o, definition(**inputs, **options), exact)


@pytest.mark.parametrize("score", [300.0, -300.0, 2000.0])
@pytest.mark.parametrize("sizes", [(16,), (9, 1, 1, 5), (1,) * 16], ids=str)
def test_large_scores(sizes, score, device):
    """Scores of 300 have weights exp(300), which float32 cannot represent."""
    inputs, _ = make_inputs(CASE, torch.float32, device)
    inputs["q"], inputs["k"] = torch.full_like(inputs["q"], score / 5), torch.ones_like(inputs["k"])
    o, _ = advance(inputs, sizes, new_state(CASE, 4, device, torch.float32))
    exact = definition(**{name: x.double() for name, x in inputs.items()}, causal=True, exact_window=4)
    torch.testing.assert_close(o.double(), exact, rtol=1e-4, atol=1e-4)


def test_a_window_over_everything_is_softmax(device):
    inputs, _ = make_inputs(CASE, torch.float64, device)
    o, _ = advance(inputs, (5, 1, 10), new_state(CASE, CASE.n, device, temperature=0.3))
    torch.testing.assert_close(o, flash_attention(**inputs, causal=True, scale=1 / 0.3), rtol=1e-10, atol=1e-10)


def test_a_state_without_a_window_keeps_its_bits(device):
    inputs, _ = make_inputs(CASE, torch.float64, device)
    for sizes in ((16,), (9, 1, 6)):
        plain = fastmax.decoding.init_state(CASE.b, CASE.hk, CASE.d, CASE.dv, dtype=torch.float64, device=device)
        (o, state), (expected_o, expected) = (advance(inputs, sizes, x) for x in (new_state(CASE, 0, device), plain))
        assert torch.equal(o, expected_o)
        assert_same_states(state, expected)


# ---- gradients


@pytest.mark.parametrize("padded", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("decay", ["none, ordinary or strong", "-inf at places"])
@pytest.mark.parametrize("sizes", [(7, 1, 8), (1, 1, 3, 11), (16,)], ids=str)
def test_gradients_through_the_state(sizes, decay, padded, device):
    inputs, grad_o = make_inputs(CASE, torch.float64, device)
    given = accompany(CASE, device, padded, decay)
    leaves = [x.requires_grad_() for x in (*inputs.values(), given["log_decay"])]
    actual, _ = advance(inputs, sizes, new_state(CASE, 4, device), **given)
    expected = each_alone(fastmax_attention, inputs, **given, exact_window=4, use_custom_gradient=False)
    outputs = at_real(actual, given["mask"]), expected
    for x, y in zip(*(torch.autograd.grad(o, leaves, grad_o) for o in outputs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


def test_second_derivatives_of_steps():
    case = Case("", n=3, d=2, dv=1)
    inputs, _ = make_inputs(case, torch.float64)
    state = new_state(case, 1)
    leaves = [x.requires_grad_() for x in inputs.values()]

    def outputs(*tokens):
        return advance(dict(zip("qkv", tokens, strict=True)), (1,) * case.n, state)[0]

    torch.autograd.gradgradcheck(outputs, leaves)


# ---- the state


def test_constant_size(device):
    inputs, _ = make_inputs(Case("", n=300, b=2, h=4, hk=2, d=5, dv=7), torch.bfloat16, device)
    start = new_state(CASE, 6, device, torch.bfloat16)
    shapes = {"local_keys": (2, 2, 6, 5), "local_values": (2, 2, 6, 7), "local_mask": (2, 6), "local_decays": (2, 2, 6)}
    _, state = fastmax.decoding.prefill(*inputs.values(), start)
    _, after = fastmax.decoding.step(*first_token(inputs), state)
    for x in (start, state, after):
        assert {name: tuple(tensor.shape) for name, tensor in x.tensors().items() if name.startswith("local_")} == shapes
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in x.tensors().values()), "nothing beside it"
        assert x.nbytes == start.nbytes


def test_a_state_passed_in_is_not_modified(device):
    inputs, _ = make_inputs(CASE, torch.float64, device)
    _, state = fastmax.decoding.prefill(*inputs.values(), new_state(CASE, 4, device))
    before = copy.deepcopy(state)
    fastmax.decoding.step(*first_token(inputs), state)
    fastmax.decoding.prefill(*inputs.values(), state)
    _, after = fastmax.decoding.prefill(*(x[:, :, :0] for x in inputs.values()), state)
    fastmax.decoding.step_(*first_token(inputs), after)
    assert_same_states(state, before)


def test_in_place_with_mask_and_decay(device):
    """Results have the bits of `step` and lie where the state was."""
    inputs, _ = make_inputs(CASE, torch.float32, device)
    given = accompany(CASE, device, True, "-inf at places")
    start = new_state(CASE, 4, device, torch.float32)
    state = start.clone()
    addresses = [x.data_ptr() for x in state.tensors().values()]
    o, _ = advance(inputs, (1,) * CASE.n, state, in_place=True, **given)
    expected_o, expected = advance(inputs, (1,) * CASE.n, start, **given)
    assert torch.equal(o, expected_o)
    assert_same_states(state, expected)
    assert [x.data_ptr() for x in state.tensors().values()] == addresses


def test_step_in_place_refuses_to_record_local_keys(device):
    inputs, _ = make_inputs(CASE, torch.float64, device)
    state = new_state(CASE, 4, device)
    state = replace(state, local_keys=state.local_keys.requires_grad_())
    with pytest.raises(RuntimeError, match=r"use fastmax\.decoding\.step"):
        fastmax.decoding.step_(*first_token(inputs), state)


def test_to_dtype(device):
    """Local keys get the dtype of the tokens, and decays that of the sums."""
    inputs, _ = make_inputs(CASE, torch.float32, device)
    _, state = fastmax.decoding.prefill(*inputs.values(), new_state(CASE, 4, device, torch.float32))
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        other = state.to(dtype)
        assert other.local_keys.dtype == other.local_values.dtype == dtype
        assert other.local_decays.dtype == other.kv_state.dtype == wide and other.local_mask.dtype == torch.bool
        token = [x.to(dtype) for x in first_token(inputs)]
        expected, _ = fastmax.decoding.step(*first_token(inputs), state)
        torch.testing.assert_close(fastmax.decoding.step(*token, other)[0].float(), expected, rtol=0.03, atol=0.03)


def test_repr_names_the_window():
    assert "exact_window=4" in repr(new_state(CASE, 4)) and "exact_window" not in repr(new_state(CASE, 0))


# ---- arguments


BAD_WINDOWS = {"negative": (-1, ValueError), "float": (2.0, TypeError), "bool": (True, TypeError)}


@pytest.mark.parametrize("name", BAD_WINDOWS)
def test_bad_windows(name):
    window, exception = BAD_WINDOWS[name]
    with pytest.raises(exception, match="exact_window"):
        new_state(CASE, window)


BAD_STATES = {
    "another window": (lambda x: replace(x, exact_window=3), r"local_keys \(2, 2, 3, 5\).*got \(2, 2, 4, 5\)"),
    "no values": (lambda x: replace(x, local_values=None), r"local_values \(2, 2, 4, 7\).*got None"),
    "a mask of floats": (lambda x: replace(x, local_mask=x.local_mask.float()), r"local_mask \(2, 4\) of torch.bool"),
    "narrow decays": (lambda x: replace(x, local_decays=x.local_decays.half()), "local_decays .* of torch.float64"),
    "another batch": (lambda x: replace(x, local_mask=x.local_mask[:1]), r"local_mask \(2, 4\)"),
}


@pytest.mark.parametrize(
    "function", [fastmax.decoding.step, fastmax.decoding.step_, fastmax.decoding.prefill], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", BAD_STATES)
def test_bad_states(name, function):
    change, message = BAD_STATES[name]
    inputs, _ = make_inputs(CASE, torch.float64)
    with pytest.raises(ValueError, match=message):
        function(*first_token(inputs), change(new_state(CASE, 4)))


@pytest.mark.parametrize("window, options", [(4, {}), (0, {"rpe_matrix": "sinusoidal"})], ids=["window", "positions"])
def test_a_state_of_inference_mode_is_not_written_outside(window, options):
    """The call is refused and leaves the state unchanged."""
    inputs, _ = make_inputs(CASE, torch.float64)
    with torch.inference_mode():
        _, state = fastmax.decoding.prefill(*inputs.values(), new_state(CASE, window, **options))
        before = state.clone()
    token = first_token(inputs)
    with pytest.raises(RuntimeError, match="state was made in inference mode.*state.clone"):
        fastmax.decoding.step_(*token, state)
    assert_same_states(state, before)
    expected, _ = fastmax.decoding.step(*token, state)
    assert torch.equal(fastmax.decoding.step_(*token, state.clone()), expected)


# ---- compilers


OPERATORS = {fastmax.decoding.step: "decode_step", fastmax.decoding.step_: "decode_step_"}


@pytest.mark.parametrize("function", OPERATORS, ids=lambda f: f.__name__)
def test_compiled_steps(function, device, fresh_dynamo):
    """All tokens after the first share one graph."""
    inputs, _ = make_inputs(CASE, torch.float32, device)
    state = new_state(CASE, 4, device, torch.float32)
    expected, calls = state.clone(), Calls()
    compiled = torch.compile(function, fullgraph=True, backend=calls)
    with torch.no_grad():
        for token in list(pieces(inputs))[:7]:
            o = compiled(*token, state)
            o, state = o if isinstance(o, tuple) else (o, state)
            torch.testing.assert_close(o, fastmax.decoding.step_(*token, expected))
            torch.testing.assert_close(state.tensors(), expected.tensors())
    assert f"fastmax.{OPERATORS[function]}.default" in calls.operators
    assert calls.frame_count <= 2, "no graph for each count of tokens"


@torch_warns
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiled_prefill(device, fresh_dynamo):
    inputs, _ = make_inputs(CASE, torch.float32, device)
    state = new_state(CASE, 4, device, torch.float32)
    log_decay = make_decay("-inf at places", CASE.b, CASE.hk, CASE.n, device=device)
    compiled = torch.compile(fastmax.decoding.prefill, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        o, after = compiled(*inputs.values(), state, log_decay=log_decay)
        expected_o, expected = fastmax.decoding.prefill(*inputs.values(), state, log_decay=log_decay)
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(after.tensors(), expected.tensors())


# ---- CUDA


@pytest.mark.cuda
@by_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("window", [1, 64, 128, 3000])
def test_on_the_kernels(window, dtype, p):
    """Resets (-inf) among the local keys hide the tokens that left the window before them."""
    case = Case("", n=1500, b=2, h=4, hk=2, d=64, dv=64)
    check_within_contract(case, (700, 1, 1, 300, 497, 1), window, dtype, p)


def check_within_contract(case, sizes, window, dtype, p, **of_state):
    """Checks pieces on the kernels, pieces of one token in place, with padding and decays of all kinds."""
    inputs, _ = make_inputs(case, dtype, "cuda")
    given = accompany(case, "cuda", True, "-inf at places")
    given["log_decay"] = given["log_decay"].float()
    options = {"temperature": 8.0, "p": p, "a0": 3.0}
    o, _ = advance(inputs, sizes, new_state(case, window, "cuda", dtype, **options, **of_state), True, **given)
    options |= given | {"exact_window": window}
    exact = each_alone(definition, {name: exactly(x) for name, x in inputs.items()}, **options)
    assert_within_contract("o", at_real(o, given["mask"]), each_alone(definition, inputs, **options), exact)


@pytest.mark.cuda
def test_a_replayed_graph_advances_the_state():
    inputs, _ = make_inputs(CASE, torch.float32, "cuda")
    log_decay = make_decay("-inf at places", CASE.b, CASE.hk, CASE.n, device="cuda")
    check_replays(inputs, new_state(CASE, 4, "cuda", torch.float32), log_decay)
