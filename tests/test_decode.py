"""The recurrent form: `init_state`, `step`, `step_` and `prefill` against the parallel form, which is causal."""

import copy
import inspect
from dataclasses import replace

import pytest
import torch
from common import (
    CHUNK,
    DTYPES,
    Case,
    assert_within_contract,
    by_order,
    capture,
    check_operator,
    definition,
    dtype_id,
    exactly,
    make_inputs,
    torch_warns,
)
from hypothesis import example, given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import fastmax
from fastmax import eager, fastmax_attention
from fastmax.core.call import Call
from fastmax.core.score import Score
from fastmax.decoding import init_state
from fastmax.eager import features

CASE = Case("", n=12, b=2, h=4, hk=2, d=5, dv=7)
OPTIONS = {
    "defaults": {},
    "p=1": {"p": 1},
    "temperature": {"temperature": 2.5},
    "coefficients": {"a0": 2.0, "a1": 0.7, "a2": 0.3},
    "normalize=token": {"normalize": "token", "lim": 0.5},
    "sinusoidal": {"rpe_matrix": "sinusoidal", "temperature": 4.0},
    "everything": {"rpe_matrix": "sinusoidal", "normalize": "token", "lim": 0.8, "temperature": 3.0, "a0": 1.5, "a2": 0.4},
    "exact window": {"exact_window": 3, "temperature": 2.5},
    "exact window, everything": {
        "exact_window": 4, "rpe_matrix": "sinusoidal", "normalize": "token", "lim": 0.8, "temperature": 3.0, "a2": 0.4,
    },
}  # fmt: skip
by_decode_option = pytest.mark.parametrize("option", OPTIONS)


def new_state(case, device="cpu", dtype=torch.float64, **options):
    return fastmax.decoding.init_state(case.b, case.hk, case.d, case.dv, dtype=dtype, device=device, **options)


def pieces(inputs, sizes=1):
    return zip(*(x.split(sizes, dim=2) for x in inputs.values()), strict=True)


def first_token(inputs):
    return [x[:, :, :1] for x in inputs.values()]


def each_alone(attend, inputs, mask=None, log_decay=None, **options):
    """Returns `attend` of the real tokens of each sequence alone, causally, and 0 at masked ones."""
    options |= {"causal": True}
    if mask is None:
        return attend(**inputs, **options, log_decay=log_decay)
    outputs = []
    for i, real in enumerate(mask):
        own = {name: x[i : i + 1, :, real] for name, x in inputs.items()}
        (_, h, n, _), dv = inputs["q"].shape, inputs["v"].shape[3]
        o = own["q"].new_zeros(1, h, n, dv)
        if real.any():
            decay = None if log_decay is None else log_decay[i : i + 1, :, real]
            o = o.index_copy(2, real.nonzero().squeeze(1), attend(**own, **options, log_decay=decay))
        outputs.append(o)
    return torch.cat(outputs)


def at_real(o, mask):
    """Returns outputs with 0 at masked tokens, where they have no meaning."""
    return o if mask is None else torch.where(mask[:, None, :, None], o, 0)


def advance(inputs, sizes, state, mask=None, in_place=False):
    """Passes the tokens in pieces, to `step` (or `step_`) for one token and to `prefill` for more. Returns all outputs and the
    last state."""
    outputs = []
    for piece in pieces(inputs, sizes):
        start = sum(o.shape[2] for o in outputs)
        n = piece[0].shape[2]
        part = None if mask is None else mask[:, start : start + n]
        if n == 1 and in_place:
            o = fastmax.decoding.step_(*piece, state, attention_mask=part)
        else:
            o, state = (fastmax.decoding.step if n == 1 else fastmax.decoding.prefill)(*piece, state, attention_mask=part)
        outputs.append(o)
    with torch.autocast(o.device.type, enabled=False):
        return torch.cat(outputs, dim=2), state


def assert_states_close(actual, expected):
    for name in ("kv_state", "k_sum"):
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
    o, state = fastmax.decoding.prefill(*inputs.values(), new_state(CASE, device, **OPTIONS[option]))
    torch.testing.assert_close(o, definition(**inputs, causal=True, **OPTIONS[option]), rtol=1e-10, atol=1e-10)
    _, stepped = advance(inputs, [1] * CASE.n, new_state(CASE, device, **OPTIONS[option]))
    assert_states_close(state, stepped)


@by_order
@pytest.mark.parametrize("sizes", [(CHUNK + 7, 1, 1), (1, CHUNK - 1, 2), (3, 2 * CHUNK + 1)], ids=str)
def test_prefill_across_chunks(sizes, p, device):
    inputs, _ = make_inputs(Case("", n=sum(sizes), h=2, hk=1, d=17, dv=4), torch.float64, device)
    state = fastmax.decoding.init_state(1, 1, 17, 4, dtype=torch.float64, device=device, p=p)
    o, _ = advance(inputs, sizes, state)
    torch.testing.assert_close(o, definition(**inputs, causal=True, p=p), rtol=1e-9, atol=1e-10)


@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 5, 17, 64, 70]), min_size=1, max_size=5),
    option=st.sampled_from(sorted(OPTIONS)),
    padded=st.booleans(),
    in_place=st.booleans(),
)
@example(sizes=[0], option="everything", padded=False, in_place=False)
def test_splitting_and_resuming_equals_one_call(sizes, option, padded, in_place):
    """Any split of the sequence into pieces, empty ones too, gives the output of the definition and the state of one call."""
    case = Case("", n=max(sum(sizes), 1), b=2, h=4, hk=2, d=5, dv=3)
    inputs, _ = make_inputs(case, torch.float64)
    inputs = {name: x[:, :, : sum(sizes)] for name, x in inputs.items()}
    mask = torch.rand(2, sum(sizes)) > 0.4 if padded else None
    options = OPTIONS[option]
    whole, state = fastmax.decoding.prefill(*inputs.values(), new_state(case, **options), attention_mask=mask)
    o, resumed = advance(inputs, sizes, new_state(case, **options), mask, in_place)
    expected = each_alone(definition, inputs, mask, **options)
    for x in (o, whole):
        torch.testing.assert_close(at_real(x, mask), expected, rtol=1e-10, atol=1e-10)
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
    o, state = fastmax.decoding.prefill(*inputs.values(), new_state(CASE, device, torch.bfloat16))
    assert o.shape == (CASE.b, CASE.h, CASE.n, CASE.dv) and o.dtype == torch.bfloat16
    assert o.transpose(1, 2).is_contiguous()
    o, _ = fastmax.decoding.step(*(x[:, :, :1] for x in inputs.values()), state)
    assert o.shape == (CASE.b, CASE.h, 1, CASE.dv) and o.dtype == torch.bfloat16


@by_order
def test_state_has_constant_symmetric_size(p, device):
    """The state has dv + 1 numbers for each of 1 + d + d (d + 1) / 2 features (1 + d for p = 1), for any number of tokens."""
    inputs, _ = make_inputs(Case("", n=300, b=2, h=4, hk=2, d=5, dv=7), torch.float32, device)
    features = 1 + 5 + (15 if p == 2 else 0)
    start = fastmax.decoding.init_state(2, 2, 5, 7, device=device, p=p)
    _, state = fastmax.decoding.prefill(*inputs.values(), start)
    _, state = fastmax.decoding.step(*first_token(inputs), state)
    for x in (start, state):
        tensors = [y for y in vars(x).values() if isinstance(y, torch.Tensor)]
        assert sum(y.numel() for y in tensors) == 2 * 2 * features * (7 + 1)
        assert x.nbytes == 4 * 2 * 2 * features * (7 + 1)


def test_a_state_passed_in_is_not_modified(device):
    """The state of a prompt may be continued in several ways."""
    inputs, _ = make_inputs(CASE, torch.float64, device)
    _, state = fastmax.decoding.prefill(*inputs.values(), new_state(CASE, device))
    before = copy.deepcopy(state)
    token = first_token(inputs)
    first, _ = fastmax.decoding.step(*token, state)
    fastmax.decoding.prefill(*inputs.values(), state)
    again, _ = fastmax.decoding.step(*token, state)
    assert torch.equal(first, again)
    assert torch.equal(state.kv_state, before.kv_state) and torch.equal(state.k_sum, before.k_sum)
    assert state.tokens == before.tokens


def test_padding(device):
    """A masked token has no effect, and a sequence of only masked tokens outputs 0."""
    inputs, _ = make_inputs(CASE, torch.float64, device)
    mask = torch.ones(2, CASE.n, dtype=torch.bool, device=device)
    mask[0, :5] = False
    mask[1, 3] = False
    expected = definition(**inputs, causal=True, attention_mask=mask)
    for sizes in ([CASE.n], [1] * CASE.n):
        o, _ = advance(inputs, sizes, new_state(CASE, device), mask)
        torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-10)
        assert torch.equal(o[0, :, :5], torch.zeros_like(o[0, :, :5]))


def test_gradients_flow_through_the_state(device):
    """Gradients through a prefill and two steps are those of one causal call."""
    inputs, grad_o = make_inputs(CASE, torch.float64, device)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    o, _ = advance(leaves, [CASE.n - 2, 1, 1], new_state(CASE, device))
    grads = torch.autograd.grad(o, list(leaves.values()), grad_o)
    expected = torch.autograd.grad(definition(**leaves, causal=True), list(leaves.values()), grad_o)
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-9, atol=1e-10)


# ---- in place


@by_decode_option
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=dtype_id)
def test_step_in_place_equals_step(dtype, option, device):
    """The results have the bits of `step` and lie in the memory of the state; no other state changes."""
    inputs, _ = make_inputs(CASE, dtype, device)
    mask = torch.tensor([[True], [False]], device=device)
    start = new_state(CASE, device, dtype, **OPTIONS[option])
    state, given = start.clone(), copy.deepcopy(start)
    addresses = [x.data_ptr() for x in state.tensors().values()]
    expected = start
    for token in pieces(inputs):
        o = fastmax.decoding.step_(*token, state, attention_mask=mask)
        expected_o, expected = fastmax.decoding.step(*token, expected, attention_mask=mask)
        assert torch.equal(o, expected_o)
        assert_same_states(state, expected)
    assert [x.data_ptr() for x in state.tensors().values()] == addresses
    assert_same_states(start, given)


def assert_same_states(actual, expected):
    assert actual.tensors().keys() == expected.tensors().keys() and actual.tokens == expected.tokens
    for name, x in expected.tensors().items():
        assert torch.equal(getattr(actual, name), x), name


def decays(case, device, dtype=torch.float64, seed=0):
    """Returns decays (b, hk, n) with resets (-inf) at a tenth of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    x = -torch.rand(case.b, case.hk, case.n, generator=generator, dtype=dtype)
    return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.1, -torch.inf).to(device)


@by_order
@pytest.mark.parametrize("in_place", [False, True], ids=["step", "step_"])
@pytest.mark.parametrize("padded", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("sizes", [(1,) * 12, (5, 0, 1, 6), (CHUNK + 3, 1, 2 * CHUNK)], ids=str)
def test_decay_in_any_split_equals_one_call(sizes, padded, in_place, p, device):
    """The state decays with every real token that follows."""
    case = Case("", n=sum(sizes), b=2, h=4, hk=2, d=5, dv=7)
    inputs, _ = make_inputs(case, torch.float64, device)
    log_decay = decays(case, device)
    mask = torch.rand(2, case.n, device=device) > 0.3 if padded else None
    state, start, outputs = new_state(case, device, p=p), 0, []
    for size in sizes:
        part = slice(start, start + size)
        tokens = [x[:, :, part] for x in inputs.values()]
        options = {"attention_mask": None if mask is None else mask[:, part], "log_decay": log_decay[:, :, part]}
        if size == 1 and in_place:
            outputs.append(fastmax.decoding.step_(*tokens, state, **options))
        else:
            o, state = (fastmax.decoding.step if size == 1 else fastmax.decoding.prefill)(*tokens, state, **options)
            outputs.append(o)
        start += size
    expected = each_alone(fastmax_attention, inputs, mask, log_decay, p=p)
    torch.testing.assert_close(at_real(torch.cat(outputs, dim=2), mask), expected, rtol=1e-10, atol=1e-10)


def test_gradients_of_decays_flow_through_the_state(device):
    inputs, grad_o = make_inputs(CASE, torch.float64, device)
    log_decay = decays(CASE, device).clamp(min=-3.0).requires_grad_()
    leaves = [x.requires_grad_() for x in (*inputs.values(), log_decay)]

    def split(q, k, v, log_decay):
        state, outputs = new_state(CASE, device), []
        for tokens in zip(*(x.split((7, 1, 4), dim=2) for x in (q, k, v, log_decay)), strict=True):
            function = fastmax.decoding.step if tokens[0].shape[2] == 1 else fastmax.decoding.prefill
            o, state = function(*tokens[:3], state, log_decay=tokens[3])
            outputs.append(o)
        return torch.cat(outputs, dim=2)

    def whole(q, k, v, log_decay):
        return fastmax_attention(q, k, v, causal=True, log_decay=log_decay)

    actual, expected = (torch.autograd.grad(f(*leaves), leaves, grad_o) for f in (split, whole))
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("what", ["log_decay", "kv_state", "k_sum", "v"])
def test_a_prefill_records_what_it_is_given(what, device):
    """Each argument requires a gradient alone. The path with kernels that write in place must then not be taken."""
    inputs, grad_o = make_inputs(CASE, torch.float64, device)
    given = inputs | {"log_decay": decays(CASE, device).clamp(min=-3.0)}
    _, start = fastmax.decoding.prefill(*inputs.values(), new_state(CASE, device))
    given |= {"kv_state": start.kv_state, "k_sum": start.k_sum}
    x = given[what].clone()

    def loss(x):
        q, k, v, log_decay, kv_state, k_sum = (given | {what: x}).values()
        o, state = fastmax.decoding.prefill(q, k, v, replace(start, kv_state=kv_state, k_sum=k_sum), log_decay=log_decay)
        return (o * grad_o).sum() + 1e-3 * state.kv_state.square().sum() + 1e-3 * state.k_sum.square().sum()

    (grad,) = torch.autograd.grad(loss(x.requires_grad_()), x)
    direction = torch.randn_like(grad)
    with torch.no_grad():
        slope = (loss(x + 1e-5 * direction) - loss(x - 1e-5 * direction)) / 2e-5
    torch.testing.assert_close((grad * direction).sum(), slope, rtol=1e-5, atol=1e-8)


def test_step_in_place_refuses_to_record_a_decay(device):
    inputs, _ = make_inputs(CASE, torch.float64, device)
    log_decay = decays(CASE, device)[:, :, :1].requires_grad_()
    state = new_state(CASE, device)
    with pytest.raises(RuntimeError, match="use fastmax.decoding.step"):
        fastmax.decoding.step_(*first_token(inputs), state, log_decay=log_decay)


@pytest.mark.parametrize("function", [fastmax.decoding.step, fastmax.decoding.step_], ids=["step", "step_"])
def test_a_state_that_is_forgotten_leaves_nothing(function, device):
    """A reset removes NaN and infinity in the state too."""
    inputs, _ = make_inputs(CASE, torch.float64, device)
    token, decay = first_token(inputs), torch.full((2, 2, 1), -torch.inf, device=device)
    state = new_state(CASE, device).map(lambda x: torch.full_like(x, torch.nan))
    o = function(*token, state, log_decay=decay)
    o, after = o if isinstance(o, tuple) else (o, state)
    expected_o, expected = fastmax.decoding.step(*token, new_state(CASE, device))
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(after.tensors(), expected.tensors())


@pytest.mark.parametrize(
    "function", [fastmax.decoding.step, fastmax.decoding.step_, fastmax.decoding.prefill], ids=["step", "step_", "prefill"]
)
def test_bad_decays(function):
    inputs, _ = make_inputs(CASE, torch.float64)
    with pytest.raises(ValueError, match=r"log_decay must have shape \(2, 2, 1\)"):
        function(*first_token(inputs), new_state(CASE), log_decay=torch.zeros(2, 4, 1))


def shifted(x):
    """Returns the same numbers one element past the start of an allocation."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


@pytest.mark.parametrize("function", [fastmax.decoding.step, fastmax.decoding.step_], ids=["step", "step_"])
def test_a_mask_of_any_stride_and_a_state_at_any_address(function, device):
    """Kernels read masks by bytes and states by vectors if their addresses are aligned, so both must be tested unaligned."""
    inputs, _ = make_inputs(Case("", n=2, b=3, h=4, hk=2, d=16, dv=8), torch.float32, device)
    first, second = pieces(inputs)
    _, state = fastmax.decoding.step(*first, fastmax.decoding.init_state(3, 2, 16, 8, dtype=torch.float32, device=device))
    columns = torch.tensor([[True, False, False], [True, True, False], [False, False, True]], device=device)
    results = []
    for mask, start in (
        (columns[:, 1:2], replace(state, kv_state=shifted(state.kv_state), k_sum=shifted(state.k_sum))),
        (columns[:, 1:2].clone(memory_format=torch.contiguous_format), state.clone()),
    ):
        out = function(*second, start, attention_mask=mask)
        o, after = (out, start) if function is fastmax.decoding.step_ else out
        results.append((o, after.kv_state, after.k_sum))
    torch.testing.assert_close(*results)


def test_the_state_after_no_tokens_has_memory_of_its_own(device):
    inputs, _ = make_inputs(CASE, torch.float64, device)
    state = new_state(CASE, device)
    before = copy.deepcopy(state)
    _, after = fastmax.decoding.prefill(*(x[:, :, :0] for x in inputs.values()), state)
    fastmax.decoding.step_(*first_token(inputs), after)
    assert_same_states(state, before)


def recorded(what, token, state):
    if what == "a token":
        return [token[0].requires_grad_(), *token[1:]], state
    if what == "kv_state":
        return token, replace(state, kv_state=state.kv_state.requires_grad_())
    return token, fastmax.decoding.step(token[0], token[1].clone().requires_grad_(), token[2], state)[1]


@pytest.mark.parametrize("what", ["a token", "kv_state", "a state with a graph"])
def test_step_in_place_refuses_to_record(what, device):
    inputs, _ = make_inputs(CASE, torch.float64, device)
    token, state = recorded(what, first_token(inputs), new_state(CASE, device))
    before = [x.detach().clone() for x in state.tensors().values()]
    with pytest.raises(RuntimeError, match=r"step_ writes .*gradient.*fastmax\.decoding\.step"):
        fastmax.decoding.step_(*token, state)
    with pytest.raises(RuntimeError, match="gradient"):
        torch.ops.fastmax.decode_step_(*token, state.kv_state, state.k_sum, None, None, None, *state.score)
    assert all(torch.equal(x, y) for x, y in zip(state.tensors().values(), before, strict=True)) and state.tokens <= 1
    expected, _ = fastmax.decoding.step(*token, state)
    with torch.no_grad():
        assert torch.equal(fastmax.decoding.step_(*token, state), expected)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_step_in_place_refuses_transforms(transform):
    inputs, _ = make_inputs(CASE, torch.float64)
    q, k, v = first_token(inputs)
    state = new_state(CASE)
    with pytest.raises(RuntimeError, match=r"fastmax\.decoding\.step"):
        transform(lambda x: fastmax.decoding.step_(x, k, v, state).sum())(q.unsqueeze(0) if transform is torch.func.vmap else q)


def test_autograd_notices_a_state_that_was_written_over(device):
    """A recorded step saves the state that it read, and its backward must refuse a later write to it."""
    inputs, _ = make_inputs(CASE, torch.float64, device)
    q, k, v = first_token(inputs)
    o, state = fastmax.decoding.step(q.requires_grad_(), k, v, new_state(CASE, device))
    with torch.no_grad():
        fastmax.decoding.step_(q, k, v, state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def shared_memory(what, state):
    """Returns a state that must not be written in place, or k that overlaps it."""
    kv_state, k_sum = state.kv_state, state.k_sum
    if what == "expanded batch":
        return {"state": state.select([0]).map(lambda x: x.expand(2, *x.shape[1:]))}, "state.kv_state must be contiguous"
    if what == "strided":
        return {"state": replace(state, k_sum=k_sum.repeat_interleave(2, 2)[..., ::2])}, "state.k_sum must be contiguous"
    if what == "k_sum in kv_state":
        inside = kv_state.flatten()[: k_sum.numel()].view(k_sum.shape)
        return {"state": replace(state, k_sum=inside)}, "state.kv_state must not overlap state.k_sum"
    if what == "positions in kv_state":
        inside = kv_state.view(torch.int64).flatten()[:2]
        return {"state": replace(state, positions=inside)}, "state.kv_state must not overlap state.positions"
    return {"k": kv_state.flatten()[:20].view(2, 2, 1, 5)}, "state.kv_state must not overlap k"


@pytest.mark.parametrize("what", ["expanded batch", "strided", "k_sum in kv_state", "positions in kv_state", "k in kv_state"])
def test_step_in_place_refuses_shared_memory(what, device):
    inputs, _ = make_inputs(CASE, torch.float64, device)
    state = new_state(CASE, device, rpe_matrix="sinusoidal")
    changes, message = shared_memory(what, state)
    arguments = dict(zip("qkv", first_token(inputs), strict=True)) | {"state": state} | changes
    before = copy.deepcopy(arguments["state"])
    with pytest.raises(ValueError, match=message):
        fastmax.decoding.step_(**arguments)
    assert_same_states(arguments["state"], before)
    expected, _ = fastmax.decoding.step(**arguments)
    arguments["state"] = arguments["state"].clone()  # as the message says
    torch.testing.assert_close(fastmax.decoding.step_(**arguments), expected)


def test_a_state_may_lie_in_one_buffer(device):
    """Tensors of the state that are adjacent in one buffer do not overlap and are accepted."""
    inputs, _ = make_inputs(CASE, torch.float64, device)
    state = new_state(CASE, device)
    sizes = [state.kv_state.numel(), state.k_sum.numel()]
    kv_state, k_sum = torch.zeros(sum(sizes), dtype=torch.float64, device=device).split(sizes)
    joined = replace(state, kv_state=kv_state.view_as(state.kv_state), k_sum=k_sum.view_as(state.k_sum))
    for token in pieces(inputs):
        torch.testing.assert_close(fastmax.decoding.step_(*token, joined), fastmax.decoding.step_(*token, state))
    torch.testing.assert_close(joined.tensors(), state.tensors())


# ---- the operators


by_operator = pytest.mark.parametrize("operator", ["decode_step", "decode_step_"])
OPERATOR_CALLS = {
    "defaults": {},
    "mask": {"mask": True},
    "decay": {"decay": True},
    "p=1": {"p": 1},
    "one value channel": {"dv": 1},
    "bfloat16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64, "decay": True},
    "no batch": {"b": 0, "decay": True},
}


def operator_arguments(device, b=2, dv=7, dtype=torch.float32, mask=False, decay=False, p=2):
    q, k, v = (torch.randn(b, *shape, device=device).to(dtype) for shape in ((4, 1, 5), (2, 1, 5), (2, 1, dv)))
    state = fastmax.decoding.init_state(b, 2, 5, dv, dtype=dtype, device=device, p=p)
    mask = torch.arange(b, device=device).view(b, 1) > 0 if mask else None
    log_decay = -torch.rand(b, 2, 1, dtype=state.kv_state.dtype, device=device) if decay else None
    return q, k, v, state.kv_state.normal_(), state.k_sum.uniform_(1, 2), mask, log_decay, None, *state.score


@by_operator
@pytest.mark.parametrize("call", OPERATOR_CALLS)
def test_opcheck(call, operator, device):
    operator = getattr(torch.ops.fastmax, operator).default
    check_operator(operator, operator_arguments(device, **OPERATOR_CALLS[call]), traced=call in ("mask", "float64"))


def test_opcheck_of_a_state_that_is_not_contiguous(device):
    q, k, v, kv_state, k_sum, *rest = operator_arguments(device)
    kv_state, k_sum = kv_state.mT.contiguous().mT, k_sum.repeat_interleave(2, 2)[..., ::2]
    check_operator(torch.ops.fastmax.decode_step.default, (q, k, v, kv_state, k_sum, *rest), traced=False)


TRACED = ("defaults", "all", "no token")  # whose programs are checked too
PREFILLS = {
    "defaults": {},
    "mask": {"mask": True},
    "decay": {"decay": True},
    "bounds": {"first": True},
    "all": {"mask": True, "decay": True, "first": True, "layout": "token-major", "dtype": torch.bfloat16},
    "p=1": {"p": 1},
    "token-major": {"layout": "token-major"},
    "float64": {"dtype": torch.float64},
    "one token": {"n": 1},
    "no token": {"n": 0},
    "no batch": {"b": 0},
}


def prefill_arguments(
    device, b=2, n=9, d=5, dv=7, dtype=torch.float32, mask=False, decay=False, first=False, layout="contiguous", p=2
):
    case = Case("", n=n, b=b, h=4, hk=2, d=d, dv=dv)
    inputs, _ = make_inputs(case, dtype, device, layout)
    state = fastmax.decoding.init_state(b, 2, d, dv, dtype=dtype, device=device, p=p, temperature=2.0)
    mask = torch.rand(b, n, device=device) > 0.3 if mask else None
    log_decay = -torch.rand(b, 2, n, dtype=state.kv_state.dtype, device=device) if decay else None
    position = torch.arange(n, device=device)
    first = torch.where(torch.rand(b, 2, n, device=device) < 0.2, position, -1).cummax(-1)[0].to(torch.int32) if first else None
    return (
        *inputs.values(),
        mask,
        log_decay,
        first,
        None,
        state.kv_state.normal_(),
        state.k_sum.uniform_(1, 2),
        *state.score,
        False,
    )


@pytest.mark.parametrize("call", PREFILLS)
def test_opcheck_prefill(call, device):
    arguments = prefill_arguments(device, **PREFILLS[call])
    before = [x.clone() for x in arguments[7:9]]
    check_operator(torch.ops.fastmax.prefill.default, arguments, traced=call in TRACED)
    outputs = torch.ops.fastmax.prefill(*arguments)
    assert all(map(torch.equal, arguments[7:9], before)) and all(x.is_contiguous() for x in outputs[1:])


def test_opcheck_prefill_of_a_state_that_is_not_contiguous(device):
    *first, kv_state, k_sum, scale, a0, a1, a2, p, tf32 = prefill_arguments(device)
    kv_state, k_sum = kv_state.mT.contiguous().mT, k_sum.repeat_interleave(2, 2)[..., ::2]
    arguments = (*first, kv_state, k_sum, scale, a0, a1, a2, p, tf32)
    check_operator(torch.ops.fastmax.prefill.default, arguments, traced=False)


# Positions of a prefill's arguments that have gradients: q, k, v, log_decay, kv_state, k_sum.
LEAVES = (0, 1, 2, 4, 7, 8)


@pytest.mark.parametrize("call", PREFILLS)
def test_opcheck_of_a_prefill_that_is_recorded(call, device):
    arguments = list(prefill_arguments(device, **PREFILLS[call]))
    for i in LEAVES:
        arguments[i] = None if arguments[i] is None else arguments[i].requires_grad_()
    check_operator(torch.ops.fastmax.prefill.default, tuple(arguments), traced=call in TRACED)


@pytest.mark.parametrize("given", ["all", "no grad_z", "kv_state alone", "o alone"])
@pytest.mark.parametrize("call", PREFILLS)
def test_opcheck_prefill_backward(call, given, device):
    arguments = prefill_arguments(device, **PREFILLS[call])
    o, z, kv_state, k_sum = torch.ops.fastmax.prefill(*arguments)
    grad_z, grad_kv_state, grad_k_sum = (torch.randn_like(x) for x in (z, kv_state, k_sum))
    if given in ("no grad_z", "o alone"):
        grad_z = None
    if given in ("kv_state alone", "o alone"):
        grad_k_sum = None
    if given == "o alone":
        kv_state = k_sum = grad_kv_state = None
    inputs = torch.randn_like(o), grad_z, grad_kv_state, grad_k_sum, *arguments[:3], o, z, kv_state, k_sum, *arguments[3:]
    traced = given in ("all", "o alone") and call in TRACED
    check_operator(torch.ops.fastmax.prefill_backward.default, inputs, traced)


def prefill_gradients(function, arguments, seed=0):
    """Returns the gradients of all outputs with respect to all differentiable arguments."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [arguments[i] for i in LEAVES if arguments[i] is not None]
    outputs = function(*arguments)
    grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outputs]
    return torch.autograd.grad(outputs, leaves, grads)


def recorded_prefill(q, k, v, mask, log_decay, first, gate, kv_state, k_sum, *options):
    call = Call(Score(*options[:5]), causal=True, attention_mask=mask, log_decay=log_decay, k_start=first)
    return eager.forward_from_state(q, k, v, call, kv_state, k_sum)


COEFFICIENTS = {"a1 = 0": (1.0, 0.0, 0.5), "a0 = 0": (0.0, 1.0, 0.5), "a2 = 0": (1.0, 0.1, 0.0), "a1 < 0": (1.0, -0.1, 0.3),
                "a0 alone": (2.0, 0.0, 0.0), "a2 alone": (0.0, 0.0, 1.0), "a1 is tiny": (1.0, 1e-30, 0.5)}  # fmt: skip


@by_order
@pytest.mark.parametrize(
    "n, coefficients",
    # On a CPU coefficients matter to the state alone, not to how chunks follow each other.
    [
        (n, x)
        for n in (1, 17, 2 * CHUNK + 3)
        for x in (None, *COEFFICIENTS)
        if n <= 17 or x is None or torch.cuda.is_available()
    ],
)
def test_the_gradient_of_prefill_is_that_of_the_recorded_operations(n, coefficients, p, device):
    """The analytic gradient equals autograd's, through both states. State that no query reads has a gradient too."""
    for options in ({}, {"mask": True, "decay": True, "first": True}, {"d": 20, "decay": True}):
        arguments = list(prefill_arguments(device, n=n, dtype=torch.float64, p=p, **options))
        arguments[8][..., 0] += 10.0  # so that no sum of weights is near 0
        if p == 1:
            arguments[9] = 0.02
        arguments[10:13] = COEFFICIENTS.get(coefficients, arguments[10:13])
        if p == 1 and coefficients == "a2 alone":
            continue
        for i in LEAVES:
            arguments[i] = None if arguments[i] is None else arguments[i].requires_grad_()
        actual = prefill_gradients(torch.ops.fastmax.prefill, arguments)
        for x, y in zip(actual, prefill_gradients(recorded_prefill, arguments), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9 * y.abs().max().item())


@pytest.mark.parametrize("index", LEAVES)
def test_a_direct_prefill_records(index, device):
    arguments = list(prefill_arguments(device, decay=True))
    arguments[index] = arguments[index].clone().requires_grad_()
    o, z, kv_state, k_sum = torch.ops.fastmax.prefill(*arguments)
    assert o.requires_grad and z.requires_grad and kv_state.requires_grad and k_sum.requires_grad
    for x in (o, z, kv_state, k_sum):
        (grad,) = torch.autograd.grad(x.sum(), arguments[index], retain_graph=True)
        assert grad.shape == arguments[index].shape and grad.isfinite().all()
    with torch.no_grad():
        assert not any(x.requires_grad for x in torch.ops.fastmax.prefill(*arguments))


def test_prefill_has_no_second_derivative(device):
    inputs, _ = make_inputs(CASE, torch.float64, device)
    q = inputs["q"].requires_grad_()
    o, _ = fastmax.decoding.prefill(*inputs.values(), new_state(CASE, device))
    (grad,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative; fastmax\.decoding\.step"):
        grad.sum().backward()


def test_prefill_under_torch_func_and_forward_mode(device):
    """These transforms run PyTorch operations, which have every derivative rule."""
    inputs, grad_o = make_inputs(CASE, torch.float64, device)
    q, k, v = inputs.values()

    def loss(q):
        o, state = fastmax.decoding.prefill(q, k, v, new_state(CASE, device))
        return (o * grad_o).sum() + state.kv_state.sum()

    (expected,) = torch.autograd.grad(loss(leaf := q.clone().requires_grad_()), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(q), expected)
    tangent = torch.randn_like(q)
    _, slope = torch.func.jvp(loss, (q,), (tangent,))
    torch.testing.assert_close(slope, (expected * tangent).sum())


@by_order
def test_gradients_of_any_split_are_those_of_one_call(p, device):
    """The loss of several prefills depends on all outputs and on the last state."""
    case = Case("", n=3 * CHUNK + 5, b=2, h=4, hk=2, d=5, dv=7)
    inputs, grad_o = make_inputs(case, torch.float64, device)
    log_decay = decays(case, device).clamp(min=-3.0) * 0.1
    mask = torch.rand(2, case.n, device=device) > 0.3
    leaves = [x.requires_grad_() for x in (*inputs.values(), log_decay)]

    def gradients(*sizes):
        state, outputs = new_state(case, device, p=p, temperature=20.0), []
        for q, k, v, decay, keep in zip(*(x.split(sizes, dim=2) for x in leaves), mask.split(sizes, dim=1), strict=True):
            o, state = fastmax.decoding.prefill(q, k, v, state, log_decay=decay, attention_mask=keep)
            outputs.append(o)
        loss = (torch.cat(outputs, dim=2) * grad_o).sum() + state.kv_state.square().sum() + state.k_sum.square().sum()
        return torch.autograd.grad(loss, leaves)

    whole = gradients(case.n)
    for x, y in zip(gradients(CHUNK - 1, 1, 2 * CHUNK, 5), whole, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9 * y.abs().max().item())


def test_a_forgotten_state_has_no_gradient(device):
    """A state before a reset has gradient 0, and its values reach no other gradient."""
    arguments = list(prefill_arguments(device, dtype=torch.float64, decay=True))
    arguments[5] = torch.zeros(2, 2, 9, dtype=torch.int32, device=device)
    for i in LEAVES:
        arguments[i].requires_grad_()
    expected = prefill_gradients(torch.ops.fastmax.prefill, arguments)
    for i in (7, 8):
        arguments[i] = torch.full_like(arguments[i], 1e3).requires_grad_()
    actual = prefill_gradients(torch.ops.fastmax.prefill, arguments)
    assert all(map(torch.equal, actual, expected)) and not actual[-1].any() and not actual[-2].any()


class Calls(CompileCounterWithBackend):
    """Counts graphs and records the operators in them."""

    def __init__(self):
        super().__init__("aot_eager")
        self.operators = set()

    def __call__(self, graph, inputs):
        self.operators |= {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        return super().__call__(graph, inputs)


@by_operator
def test_compiled_steps(operator, device, fresh_dynamo):
    """All tokens after the first share one graph, which contains the operator."""
    option = "everything"
    inputs, _ = make_inputs(CASE, device=device)
    state = new_state(CASE, device, torch.float32, **OPTIONS[option])
    expected = state.clone()
    function = {"decode_step": fastmax.decoding.step, "decode_step_": fastmax.decoding.step_}[operator]
    calls = Calls()
    compiled = torch.compile(function, fullgraph=True, backend=calls)
    with torch.no_grad():
        for token in list(pieces(inputs))[:5]:
            o = compiled(*token, state)
            o, state = o if isinstance(o, tuple) else (o, state)
            torch.testing.assert_close(o, fastmax.decoding.step_(*token, expected))
            torch.testing.assert_close(state.tensors(), expected.tensors())
            assert state.tokens == expected.tokens
    assert f"fastmax.{operator}.default" in calls.operators
    assert calls.frame_count <= 2, "no graph for each count of tokens"


@torch_warns
def test_compiled_step_in_place_inductor(device, fresh_dynamo):
    """Inductor has to keep writes in place."""
    inputs, _ = make_inputs(CASE, device=device)
    state = new_state(CASE, device, torch.float32)
    expected = state.clone()
    compiled = torch.compile(fastmax.decoding.step_, fullgraph=True)
    with torch.no_grad():
        for token in list(pieces(inputs))[:3]:
            torch.testing.assert_close(compiled(*token, state), fastmax.decoding.step_(*token, expected))
            torch.testing.assert_close(state.tensors(), expected.tensors())


@torch_warns
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiled_prefill(device, fresh_dynamo):
    inputs, _ = make_inputs(CASE, device=device)
    state = new_state(CASE, device, torch.float32)
    log_decay = decays(CASE, device, torch.float32)
    calls = Calls()
    compiled = torch.compile(fastmax.decoding.prefill, fullgraph=True, backend=calls)
    with torch.no_grad():
        o, after = compiled(*inputs.values(), state, log_decay=log_decay)
    assert "fastmax.prefill.default" in calls.operators
    expected_o, expected = fastmax.decoding.prefill(*inputs.values(), state, log_decay=log_decay)
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(after.tensors(), expected.tensors())
    leaves = [x.requires_grad_() for x in (*inputs.values(), log_decay, state.kv_state, state.k_sum)]
    calls.operators.clear()
    grads = []
    for function in (compiled, fastmax.decoding.prefill):
        o, after = function(*inputs.values(), state, log_decay=log_decay)
        torch.testing.assert_close(o, expected_o)
        loss = o.square().sum() + 1e-3 * after.kv_state.square().sum() + 1e-3 * after.k_sum.square().sum()
        grads.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(*grads)
    assert "fastmax.prefill.default" in calls.operators


# ---- autocast


def generate(inputs, grad_o, state, recorded, in_place=False):
    """Returns outputs, sums and gradients of a prefill and two steps."""
    leaves = {name: x.detach().requires_grad_(recorded) for name, x in inputs.items()}  # at the same addresses in every call
    o, state = advance(leaves, [CASE.n - 2, 1, 1], state, in_place=in_place)
    return o, state, leaves, grad_o


def results(o, state, leaves, grad_o):
    if o.requires_grad:
        o.backward(grad_o.to(o.dtype))
    return [o.detach(), *state.detach().tensors().values(), *(x.grad for x in leaves.values() if x.grad is not None)]


@pytest.mark.parametrize("recorded", [False, True, "in place"], ids=["quiet", "recorded", "in place"])
@pytest.mark.parametrize("option", ["defaults", "p=1", "everything", "exact window"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_autocast_changes_nothing(dtype, option, recorded, device):
    """Tokens have the dtype of the state. Outputs, state and gradients then have the same bits inside autocast of any dtype."""
    inputs, grad_o = make_inputs(CASE, dtype, device)
    start = new_state(CASE, device, dtype, **OPTIONS[option])
    in_place = recorded == "in place"
    outside = results(*generate(inputs, grad_o, start, recorded is True, in_place))
    with torch.autocast(device.type, torch.bfloat16):
        inside = generate(inputs, grad_o, start, recorded is True, in_place)
    inside = results(*inside)
    assert len(inside) == len(outside) > 3 * (recorded is True)
    for x, y in zip(inside, outside, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.parametrize("recorded", [False, True], ids=["quiet", "recorded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_autocast_casts_to_the_dtype_of_the_state(dtype, recorded, device):
    """Tokens are fp32 for a bfloat16 state, the output of autocast's linear layers for an fp32 state, and a mixture."""
    inputs, grad_o = make_inputs(CASE, torch.float32, device)
    inputs["v"] = inputs["v"].bfloat16()
    start = new_state(CASE, device, dtype)
    expected = results(*generate({name: x.to(dtype) for name, x in inputs.items()}, grad_o, start, recorded))
    with torch.autocast(device.type, torch.bfloat16):
        actual = generate(inputs, grad_o, start, recorded)
    for x, y in zip(results(*actual), expected, strict=True):
        torch.testing.assert_close(x, y.to(x.dtype))
    assert actual[0].dtype == dtype


@pytest.mark.parametrize(
    "function", [fastmax.decoding.step, fastmax.decoding.step_, fastmax.decoding.prefill], ids=lambda f: f.__name__
)
def test_autocast_leaves_float64(function, device):
    inputs, _ = make_inputs(CASE, torch.float64, device)
    wide = first_token(inputs)
    with torch.autocast(device.type, torch.bfloat16):
        with pytest.raises(TypeError, match=r"state's dtype torch\.float32, got torch\.float64"):
            function(*wide, new_state(CASE, device, torch.float32))
        with pytest.raises(TypeError, match=r"state's dtype torch\.float64, got torch\.float32"):
            function(*(x.float() for x in wide), new_state(CASE, device, torch.float64))


# ---- arguments


def test_options_are_keywords():
    for function, positional in (
        (fastmax.decoding.init_state, 4),
        (fastmax.decoding.step, 4),
        (fastmax.decoding.step_, 4),
        (fastmax.decoding.prefill, 4),
    ):
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
        fastmax.decoding.init_state(**({"batch": 2, "kv_heads": 2, "head_dim": 5} | changes))


BAD_TOKENS = {
    "no state": ({"state": None}, TypeError, "state"),
    "rank 3": ({name: torch.zeros(2, 1, 5) for name in "qkv"}, ValueError, "4-d"),
    "no query heads": ({"q": torch.zeros(2, 0, 1, 5)}, ValueError, "q must have at least one head"),
    "another batch": ({name: torch.zeros(3, 2, 1, 5) for name in "qkv"}, ValueError, "state"),
    "other kv heads": ({name: torch.zeros(2, 1, 1, 5) for name in "kv"}, ValueError, "state"),
    "another head_dim": ({name: torch.zeros(2, 2, 1, 6) for name in "qk"}, ValueError, "state"),
    "another value_dim": ({"v": torch.zeros(2, 2, 1, 6)}, ValueError, "value_dim"),
    "another dtype": ({name: torch.zeros(2, 2, 1, 5).double() for name in "qkv"}, TypeError, "float32.*float64"),
    "keys without queries": ({name: torch.zeros(2, 2, 3, 5) for name in "kv"}, ValueError, "token"),
    "a mask for all": ({"attention_mask": torch.ones(2, 9, dtype=torch.bool)}, ValueError, "attention_mask"),
    "a mask of floats": ({"attention_mask": torch.ones(2, 1)}, TypeError, "attention_mask"),
    "another device": ({"state": init_state(2, 2, 5, device="meta")}, ValueError, "state's device meta, got cpu"),
    "another order": (
        {"state": replace(fastmax.decoding.init_state(2, 2, 5), score=fastmax.decoding.init_state(2, 2, 5, p=1).score)},
        ValueError, r"state must have kv_state \(2, 2, 6, 5\)",
    ),
    "one row": (
        {"state": fastmax.decoding.init_state(2, 2, 5).map(lambda x: x[:, :, :1])},
        ValueError, r"state must have kv_state \(2, 2, 21, 5\)",
    ),
    "k_sum of another batch": (
        {"state": replace(init_state(2, 2, 5), k_sum=torch.zeros(1, 2, 21))}, ValueError, r"k_sum \(2, 2, 21\)",
    ),
    "sums in half": ({"state": fastmax.decoding.init_state(2, 2, 5).map(torch.Tensor.half)}, ValueError, "of torch.float32"),
}  # fmt: skip


@pytest.mark.parametrize(
    "function", [fastmax.decoding.step, fastmax.decoding.step_, fastmax.decoding.prefill], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", BAD_TOKENS)
def test_bad_tokens(name, function):
    changes, exception, message = BAD_TOKENS[name]
    good = {name: torch.zeros(2, 2, 1, 5) for name in "qkv"} | {"state": fastmax.decoding.init_state(2, 2, 5)}
    with pytest.raises(exception, match=message):
        function(**(good | changes))


@pytest.mark.parametrize("function", [fastmax.decoding.step, fastmax.decoding.step_], ids=lambda f: f.__name__)
def test_step_takes_one_token(function):
    x = torch.zeros(2, 2, 3, 5)
    with pytest.raises(ValueError, match=r"one token.*prefill"):
        function(x, x, x, fastmax.decoding.init_state(2, 2, 5))


@pytest.mark.parametrize(
    "function", [fastmax.decoding.step, fastmax.decoding.step_, fastmax.decoding.prefill], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("option", ["defaults", "everything", "exact window"])
def test_meta_tensors(option, function):
    """Calls on meta tensors give shapes, with which memory can be planned."""
    inputs, _ = make_inputs(CASE, torch.bfloat16)
    state = new_state(CASE, "meta", torch.bfloat16, **OPTIONS[option])
    o = function(*(x[:, :, :1].to("meta") for x in inputs.values()), state)
    o, state = o if isinstance(o, tuple) else (o, state)
    assert o.shape == (CASE.b, CASE.h, 1, CASE.dv) and o.dtype == torch.bfloat16 and o.is_meta
    assert state.tokens == 1 and all(x.is_meta for x in state.tensors().values())


# ---- CUDA


@pytest.mark.cuda
@pytest.mark.parametrize(
    "b, hk, group, d, dv",
    [(80, 1, 5, 24, 68), (1, 1, 8, 24, 128), (200, 1, 8, 24, 128), (1, 70_000, 1, 2, 4), (70_000, 1, 2, 2, 4)],
    ids=["group 5, wide", "group 8, one state", "group 8, many states", "many heads", "many batch entries"],
)
def test_launch_limits(b, hk, group, d, dv):
    """The sizes need more than 48 KB of shared memory, and more states than the second dimension of a grid can have."""
    case = Case("", n=3, b=b, h=hk * group, hk=hk, d=d, dv=dv)
    inputs, _ = make_inputs(case, torch.float32, "cuda")
    options = {"temperature": d**0.5}
    start = fastmax.decoding.init_state(b, hk, d, dv, device="cuda", **options)
    exact = definition(**{name: exactly(x) for name, x in inputs.items()}, causal=True, **options)
    for in_place in (False, True):
        o, _ = advance(inputs, [1] * 3, start.clone(), in_place=in_place)
        assert_within_contract("o", o, definition(**inputs, causal=True, **options), exact)


@pytest.mark.cuda
@by_order
@pytest.mark.parametrize("group", [1, 3, 20], ids=lambda n: f"group of {n}")
@pytest.mark.parametrize("states", [1, 3, 400], ids=lambda n: f"{n} states")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_in_place_kernels_give_the_same_bits(dtype, states, group, p):
    """With few states each is cut into slices of columns, all of which read the k_sum that one step writes; with 400 none is
    cut. Products of two bfloat16 numbers are exact in float32, those of two float32 numbers are rounded."""
    case = Case("", n=5, b=states, h=group, hk=1, d=64, dv=128)
    inputs, _ = make_inputs(case, dtype, "cuda")
    mask = torch.arange(states, device="cuda").view(-1, 1) % 2 == 0
    log_decay = torch.where(torch.rand(states, 1, 5, device="cuda") < 0.2, -torch.inf, -0.1)
    state = fastmax.decoding.init_state(states, 1, 64, 128, dtype=dtype, device="cuda", p=p, temperature=8.0)
    expected = state.clone()
    for i, token in enumerate(pieces(inputs)):
        options = {"attention_mask": mask, "log_decay": log_decay[..., i : i + 1] if i > 1 else None}
        expected_o, expected = fastmax.decoding.step(*token, expected, **options)
        assert torch.equal(fastmax.decoding.step_(*token, state, **options), expected_o)
        assert_same_states(state, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("in_state", ["k_sum", "k"])
def test_the_in_place_operator_refuses_shared_memory_on_cuda(in_state):
    q, k, v, kv_state, k_sum, *rest = operator_arguments("cuda")
    with pytest.raises(RuntimeError, match="contiguous"):
        torch.ops.fastmax.decode_step_(q, k, v, kv_state.mT.contiguous().mT, k_sum, *rest)
    if in_state == "k_sum":
        k_sum = kv_state.flatten()[: k_sum.numel()].view(k_sum.shape)
    else:
        k = kv_state.flatten()[: k.numel()].view(k.shape)
    with pytest.raises(RuntimeError, match="overlap"):
        torch.ops.fastmax.decode_step_(q, k, v, kv_state, k_sum, *rest)


@pytest.mark.cuda
@pytest.mark.parametrize("option", ["defaults", "everything"])
def test_a_replayed_graph_advances_the_state(option):
    """Each replay is one token further, for sinusoidal positions too."""
    device = torch.device("cuda")
    inputs, _ = make_inputs(CASE, torch.float32, device)
    check_replays(inputs, new_state(CASE, device, torch.float32, **OPTIONS[option]))


def check_replays(inputs, state, log_decay=None):
    """Checks that a graph of `step_` that is replayed for each token gives the bits of calls."""
    expected, decays = state.clone(), () if log_decay is None else (log_decay.unsqueeze(-1),)

    def step_(state, q, k, v, decay=None):
        return fastmax.decoding.step_(q, k, v, state, log_decay=None if decay is None else decay.squeeze(-1))

    tokens = list(zip(*(x.split(1, dim=2) for x in (*inputs.values(), *decays)), strict=True))
    static = [x.clone() for x in tokens[0]]
    graph, o = capture(lambda: step_(state, *static), warm_up=lambda: step_(state.clone(), *static))
    for token in tokens:
        for x, y in zip(static, token, strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(o, step_(expected, *token))
        for name, x in expected.tensors().items():
            assert torch.equal(getattr(state, name), x), name


@pytest.mark.parametrize("mode", [torch.device("meta"), torch.inference_mode()], ids=["meta", "inference"])
def test_indices_of_features_are_of_no_mode(mode):
    """The indices are cached. A first call on the meta device or in inference mode must not affect later calls."""
    state = torch.randn(1, features.feature_count(features.padded_head_dim(19)), 3)
    with mode:
        features.triangle_index(19)
    index = features.triangle_index(19)
    assert index.device.type == "cpu" and not index.is_inference()
    rows = features.fold_pairs(state, 19).requires_grad_()
    features.unfold_pairs(rows, 19).sum().backward()
    assert rows.grad.shape == (1, 19 * 20 // 2, 3)
