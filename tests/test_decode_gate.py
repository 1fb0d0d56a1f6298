"""`log_input_gate` in `prefill`, `step` and `step_`: the outputs and gradients are those of one call, whatever the state keeps.

`weighed` of `test_input_gate` is the formula.
"""

import copy
import io
import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from common import Case, check_operator, in_turn, make_decay, make_inputs, run
from test_input_gate import GREATEST, LEAST, assert_equal, make_gate, weighed
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradgradcheck

from fastmax import ops
from fastmax.core.call import Call
from fastmax.core.score import Score
from fastmax.decoding import DecodeState, init_state, prefill, step, step_

INF, NAN = math.inf, math.nan
CASE = Case("", n=40, m=40, b=2, h=4, hk=2, d=4, dv=3)
FORMS = {  # lengths of the calls; a length of one is a step unless the form says otherwise
    "prefill": [40],
    "prefill in parts": [7, 1, 0, 32],
    "step": [1] * 40,
    "step_": [1] * 40,
    "step_ and prefill": [1] * 6 + [11] + [1] * 12 + [3] + [1] * 8,
}
by_form = pytest.mark.parametrize("form", FORMS)
by_state = pytest.mark.parametrize(
    "window, flush_interval", [(0, 1), (0, 4), (1, 1), (5, 1), (5, 4), (60, 1), (60, 7)], ids=lambda x: str(x)
)


def make(case=CASE, kind="", decay=None, dtype=torch.float64):
    inputs, _ = make_inputs(case, dtype)
    inputs["log_input_gate"] = make_gate(case.b, case.hk, case.m, kind)
    if decay is not None:
        inputs["log_decay"] = make_decay(decay, case.b, case.hk, case.m, dtype=torch.float64)
    return inputs


def new_state(window=0, flush_interval=1, case=CASE, dtype=torch.float64, **options):
    sizes = case.b, case.hk, case.d, case.dv
    return init_state(*sizes, dtype=dtype, exact_window=window, flush_interval=flush_interval, temperature=3.0, **options)


def advance(form, state, mask=None, lengths=None, **inputs):
    """Returns the outputs of all tokens and the last state."""
    outputs, start = [], 0
    for length in lengths or FORMS[form]:
        stop = start + length
        given = {name: x[:, :, start:stop] for name, x in inputs.items() if x is not None}
        if mask is not None:
            given["attention_mask"] = mask[:, start:stop]
        if length == 1 and form.startswith("step_"):
            o = step_(**given, state=state)
        else:
            o, state = (step if length == 1 and form.startswith("step") else prefill)(**given, state=state)
        outputs.append(o)
        start = stop
    return torch.cat(outputs, dim=2), state


def each_alone(inputs, mask, window, **options):
    """Returns the formula of the real tokens of each batch entry, with 0 for the others."""
    expected = torch.zeros(CASE.b, CASE.h, CASE.n, CASE.dv, dtype=torch.float64)
    for entry, taken in enumerate(mask):
        alone = {name: x[entry : entry + 1, :, taken] for name, x in inputs.items()}
        expected[entry : entry + 1, :, taken] = weighed(**alone, exact_window=window, temperature=3.0, **options)[0]
    return expected


@pytest.mark.parametrize("decay", [None, "-inf at places"], ids=["plain", "decay"])
@by_form
@by_state
def test_outputs_are_those_of_one_call(window, flush_interval, form, decay):
    inputs = make(kind="beyond", decay=decay)
    expected = weighed(**inputs, exact_window=window, temperature=3.0)[0]
    o, _ = advance(form, new_state(window, flush_interval), **inputs)
    torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-9)


@in_turn("decay")
@pytest.mark.parametrize("decay", [None, "-inf at places"], ids=["plain", "decay"])
@by_form
@by_state
def test_masked_tokens(window, flush_interval, form, decay):
    """Masked tokens are skipped, and their gates with them, whatever they are."""
    inputs = make(decay=decay)
    mask = torch.rand(CASE.b, CASE.n) < 0.6
    mask[1] = False
    mask[1, 9:12] = True
    inputs["log_input_gate"] = inputs["log_input_gate"].masked_fill(~mask[:, None], NAN)
    expected = each_alone(inputs, mask, window)
    o, _ = advance(form, new_state(window, flush_interval), mask, **inputs)
    torch.testing.assert_close(torch.where(mask[:, None, :, None], o, 0.0), expected, rtol=1e-9, atol=1e-9)


@in_turn("decay")
@pytest.mark.parametrize("decay", [None, "ordinary"], ids=["plain", "decay"])
@pytest.mark.parametrize("form", ["prefill", "prefill in parts", "step"])
@by_state
def test_gradients_are_those_of_one_call(window, flush_interval, form, decay):
    """Also of the gates of tokens that a state passes on, and of those that it does not: they are in the window at the end."""
    inputs = make(decay=decay)
    grad_o = torch.randn(CASE.b, CASE.h, CASE.n, CASE.dv, dtype=torch.float64)
    expected = run(lambda **x: weighed(**x, exact_window=window, temperature=3.0)[0], inputs, grad_o)

    def attention(**inputs):
        return advance(form, new_state(window, flush_interval), **inputs)[0]

    assert_equal(run(attention, inputs, grad_o), expected, grad_o.norm().item())


@pytest.mark.parametrize("window", [0, 3])
def test_gradient_of_a_state(window):
    """The loss of later tokens, which have no gate, reaches the gates of earlier ones through the state."""
    inputs = make()
    gate = inputs.pop("log_input_gate")
    late = slice(30, None)

    def whole(gate):
        given = torch.cat([gate, torch.zeros_like(gate)[:, :, :10]], dim=2)
        return weighed(**inputs, log_input_gate=given, exact_window=window, temperature=3.0)[0][:, :, late].sin().sum()

    def in_parts(gate):
        _, state = prefill(*(x[:, :, :30] for x in inputs.values()), new_state(window), log_input_gate=gate)
        return prefill(*(x[:, :, late] for x in inputs.values()), state)[0].sin().sum()

    gate = gate[:, :, :30].clone().requires_grad_()
    (expected,) = torch.autograd.grad(whole(gate), gate)
    (actual,) = torch.autograd.grad(in_parts(gate), gate)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(actual, expected)


def test_second_derivatives_of_steps():
    case = Case("", n=3, m=3, b=1, h=1, hk=1, d=2, dv=2)
    inputs = make(case)
    gate = inputs.pop("log_input_gate").requires_grad_()

    def attention(gate):
        return advance("step", new_state(1, case=case), lengths=[1] * 3, **inputs, log_input_gate=gate)[0]

    assert gradgradcheck(attention, gate)


@pytest.mark.parametrize("window", [0, 5])
def test_packed_sequences(window):
    """Each sequence continues from its entry of the state, with the gates of its own window."""
    inputs = make(Case("", n=57, m=57, b=1, h=4, hk=2, d=4, dv=3))
    bounds = [0, 20, 20, 23, 57]
    state = new_state(window, case=Case("", n=1, b=4, h=4, hk=2, d=4, dv=3))
    for part in (0, 1):
        given = {name: x + part for name, x in inputs.items()}
        o, state = prefill(**given, state=state, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    for i, (first, last) in enumerate(pairwise(bounds)):
        both = {name: torch.cat([x[:, :, first:last], x[:, :, first:last] + 1], dim=2) for name, x in inputs.items()}
        if first < last:
            expected = weighed(**both, exact_window=window, temperature=3.0)[0][:, :, last - first :]
            torch.testing.assert_close(o[:, :, first:last], expected, rtol=1e-9, atol=1e-9)
            if window:
                gates = both["log_input_gate"].clamp(LEAST, GREATEST)[0, :, -window:]
                assert torch.equal(state.local_gates[i, :, -gates.shape[1] :], gates)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"])
@by_state
def test_extreme_gates(window, flush_interval, dtype, tolerance):
    inputs = make(kind="ends", dtype=dtype)
    expected = weighed(**{name: x.double() for name, x in inputs.items()}, exact_window=window, temperature=3.0)[0]
    inputs["log_input_gate"] = inputs["log_input_gate"].to(dtype)
    for form in FORMS:
        o, _ = advance(form, new_state(window, flush_interval, dtype=dtype), **inputs)
        assert (o.double() - expected).norm() <= tolerance * expected.norm()


# ---- NaN


@pytest.mark.parametrize("padding", [False, True], ids=["all tokens", "padding"])
@by_form
@by_state
def test_nan(window, flush_interval, form, padding):
    """The rows that weigh the key by its gate are NaN, until a reset. Those that have it in their window are not."""
    inputs = make(decay="ordinary")
    inputs["log_input_gate"][0, 1, 4] = inputs["log_input_gate"][1, 0, [0, 39]] = NAN
    inputs["log_decay"][0, 1, [4, 22]] = inputs["log_decay"][1, 0, 30] = -INF
    mask = torch.rand(CASE.b, CASE.n) < 0.6 if padding else torch.ones(CASE.b, CASE.n, dtype=torch.bool)
    mask[0, [4, 22]] = mask[1, [0, 30]] = True
    expected = each_alone(inputs, mask, window)
    o, _ = advance(form, new_state(window, flush_interval), mask if padding else None, **inputs)
    o = torch.where(mask[:, None, :, None], o, 0.0)
    assert torch.equal(o.isnan(), expected.isnan()) and (window >= 30 or expected.isnan().any())
    torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


# ---- what a state keeps


@pytest.mark.parametrize("flush_interval", [1, 4])
@pytest.mark.parametrize("form", ["step", "step_", "prefill in parts"])
def test_gates_that_begin_and_end(form, flush_interval):
    """A state keeps gates from the first one on. Tokens without one count as tokens with a gate of 0."""
    inputs = make()
    gate = inputs["log_input_gate"]
    gate[:, :, :10] = gate[:, :, 30:] = 0.0
    expected = weighed(**inputs, exact_window=5, temperature=3.0)[0]
    state, outputs = new_state(5, flush_interval), []
    assert state.local_gates is None
    for start, length in ((0, 10), (10, 20), (30, 10)):
        part = {name: x[:, :, start : start + length] for name, x in inputs.items()}
        part["log_input_gate"] = part["log_input_gate"] if start == 10 else None
        o, state = advance(form, state, lengths=[1] * length if form != "prefill in parts" else [length], **part)
        assert (state.local_gates is None) == (start == 0)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 2), expected, rtol=1e-9, atol=1e-9)


def test_without_local_tokens_a_state_keeps_none():
    inputs = make()
    for form in ("step", "step_", "prefill"):
        _, state = advance(form, new_state(0), **inputs)
        assert state.local_gates is None


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


COPIES = {
    "saved": saved,
    "copied": copy.deepcopy,
    "cloned": DecodeState.clone,
    "selected": lambda state: state.select([1, 0]).select([1, 0]),
    "joined": lambda state: DecodeState.cat([state.select([0]), state.select([1])]),
    "repeated": lambda state: state.repeat(2).select([1, 3]),
    "in a tree": lambda state: torch.utils._pytree.tree_map(torch.clone, state),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("flush_interval", [1, 4])
def test_copies_of_states_hold_the_gates(flush_interval, copied):
    inputs = make()
    first, last = ({name: x[:, :, part] for name, x in inputs.items()} for part in (slice(0, 17), slice(17, 40)))
    _, state = advance("step_", new_state(5, flush_interval), lengths=[1] * 17, **first)
    again = copied(state)
    assert torch.equal(again.local_gates, state.local_gates) and again.local_gates.any()
    expected, _ = advance("step_", state, lengths=[1] * 23, **last)
    actual, _ = advance("step_", again, lengths=[1] * 23, **last)
    assert torch.equal(actual, expected)


def test_gates_have_the_dtype_of_the_sums():
    _, state = prefill(**make(), state=new_state(5))
    for dtype in (torch.float32, torch.bfloat16):
        assert state.to(dtype).local_gates.dtype == state.to(dtype).kv_state.dtype == torch.float32


def test_states_with_and_without_gates_are_joined():
    inputs = make()
    (one, two), plain = ({name: x[i : i + 1] for name, x in inputs.items()} for i in (0, 1)), new_state(5).select([0])
    gate = two.pop("log_input_gate")
    _, with_gates = prefill(**one, state=plain)
    _, without = prefill(**two, state=plain)
    for states in ([with_gates, without], [without, with_gates]):
        joined = DecodeState.cat(states)
        assert joined.local_gates.shape == (2, 2, 5)
        for i, state in enumerate(states):
            token = {name: x[:1, :, :1] for name, x in inputs.items()}
            expected, _ = step(**token, state=state)
            o, _ = step(**{name: x.repeat(2, 1, 1, *[1] * (x.dim() - 3)) for name, x in token.items()}, state=joined)
            torch.testing.assert_close(o[i : i + 1], expected)
    assert gate.any()


def test_sizes_of_states_are_checked():
    inputs = make()
    _, state = prefill(**inputs, state=new_state(5))
    token = {name: x[:, :, :1] for name, x in inputs.items()}
    for wrong in (state.local_gates[..., 1:], state.local_gates.float()):
        state.local_gates = wrong
        with pytest.raises(ValueError, match=r"^state must have local_gates \(2, 2, 5\) of torch.float64"):
            step(**token, state=state)


# ---- compilers, operators and errors


@pytest.mark.parametrize("window, flush_interval", [(0, 1), (3, 1), (3, 4)])
def test_compiled_steps(window, flush_interval):
    inputs = {name: x.float() for name, x in make().items()}
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(step_, backend=counter, fullgraph=True)
    states = [new_state(window, flush_interval, dtype=torch.float32) for _ in range(2)]
    outputs = [[], []]
    with torch.no_grad():
        for i in range(8):
            token = {name: x[:, :, i : i + 1] for name, x in inputs.items()}
            for function, state, given in zip((compiled, step_), states, outputs, strict=True):
                given.append(function(**token, state=state))
    torch.testing.assert_close(*(torch.cat(given, 2) for given in outputs))
    assert counter.frame_count > 0


def test_compiled_prefill():
    inputs = {name: x.float() for name, x in make(decay="ordinary").items()}
    state = new_state(3, dtype=torch.float32)
    attention = partial(prefill, state=state)
    expected = attention(**inputs)
    actual = torch.compile(attention, fullgraph=True, backend="aot_eager")(**inputs)
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1].local_gates, expected[1].local_gates)
    torch.testing.assert_close(actual[1].kv_state, expected[1].kv_state)


def test_operators():
    inputs = {name: x.float() for name, x in make(Case("", n=9, m=9, b=2, h=4, hk=2, d=4, dv=3)).items()}
    gate = inputs.pop("log_input_gate")
    state = new_state(dtype=torch.float32)
    sums = state.kv_state.normal_(), state.k_sum.uniform_(1, 2)
    token, of_token = [x[:, :, :1] for x in inputs.values()], gate[:, :, :1]
    for name in ("decode_step", "decode_step_"):
        operator = getattr(torch.ops.fastmax, name).default
        check_operator(operator, (*token, *sums, None, None, of_token, *state.score), traced=False)
    arguments = *inputs.values(), None, None, None, gate, *sums, *state.score, False
    check_operator(torch.ops.fastmax.prefill.default, arguments, traced=False)
    results = torch.ops.fastmax.prefill(*arguments)
    grads = [torch.randn_like(x) for x in results]
    arguments = *grads, *arguments[:3], *results, *arguments[3:]
    check_operator(torch.ops.fastmax.prefill_backward.default, arguments, traced=False)
    buffered = new_state(3, 4, dtype=torch.float32).with_gates()
    arguments = *token, *buffered.tensors().values(), None, None, of_token, 3, *state.score
    check_operator(torch.ops.fastmax.buffered_step_.default, arguments, traced=False)
    with pytest.raises(ValueError, match="log_input_gate needs local_gates"):
        torch.ops.fastmax.buffered_step_(*arguments[:10], None, *arguments[11:])


def test_pieces_of_a_prefill():
    """The operators that compute a prefill in pieces give the gradients of the whole, with that of the gates."""
    inputs = make(Case("", n=300, m=300, b=2, h=4, hk=2, d=4, dv=3))
    gate = inputs.pop("log_input_gate")
    q, k, v = inputs.values()
    call = Call(Score(0.3, 1.0, 1.0, 0.5, 2), causal=True, log_input_gate=gate)
    *state, _ = ops.state_of_keys(0.5 * k, v, call)
    o, z, *new = ops.prefill(q, k, v, call, *state)
    from_zeros = ops.prefill(q, k, v, call, *(torch.zeros_like(x) for x in state))
    *of_keys, saved = ops.state_of_keys(k, v, call)
    torch.testing.assert_close(of_keys, list(from_zeros[2:]))
    torch.testing.assert_close(ops.prefill_saved_(q, k, v, call, *state, saved), (o, z))
    grads = [torch.randn_like(x) for x in (o, z, *new)]
    expected = ops.prefill_backward(grads, q, k, v, (o, z, *new), call, *state)
    g, e = ops.gradients_of_sums(*grads[:2], o, z)
    *_, saved = ops.state_of_queries(g, e, q, k, v, call)
    grad_q, pairs = ops.prefill_backward_of_queries(g, e, q, k, v, call, *state)
    results = grad_q, *ops.prefill_backward_of_keys_(g, e, grads[2:], q, k, v, call, pairs, None, saved)
    assert results[4].shape == gate.shape
    torch.testing.assert_close(results, expected[:5])


@pytest.mark.parametrize("function", [prefill, step, step_])
def test_errors(function):
    inputs = {name: x[:, :, :1] for name, x in make().items()}
    gate = inputs.pop("log_input_gate")
    for wrong, error, message in (
        (gate[:1], ValueError, r"^log_input_gate must have shape \(2, 2, 1\), .* got \(1, 2, 1\)$"),
        (gate.int(), TypeError, "^log_input_gate must be float64, float32, float16 or bfloat16, got torch.int32$"),
        (0.5, TypeError, r"^log_input_gate must be a tensor of shape .*, got 0.5 \(float\)$"),
    ):
        state = new_state(3)
        with pytest.raises(error, match=message):
            function(**inputs, state=state, log_input_gate=wrong)
        assert state.tokens == 0 and state.local_gates is None


@pytest.mark.parametrize("window, flush_interval", [(0, 1), (3, 1), (3, 4)])
def test_steps_in_place_are_not_recorded(window, flush_interval):
    inputs = {name: x[:, :, :1] for name, x in make().items()}
    inputs["log_input_gate"] = inputs["log_input_gate"].clone().requires_grad_()
    state = new_state(window, flush_interval)
    with pytest.raises(RuntimeError, match="torch.no_grad"):
        step_(**inputs, state=state)
    assert state.local_gates is None and not state.k_sum.any()
