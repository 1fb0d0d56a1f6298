"""States with a buffer of new tokens (`flush_interval`): `step`, `step_` and `prefill` in any split against one call of
`fastmax_attention` for the real tokens of each sequence, and moving, saving and joining such states. Splits are those of
`test_decode_window.py`."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from common import DTYPES, Case, assert_within_contract, by_order, definition, dtype_id, exactly, make_decay, make_inputs
from hypothesis import given
from hypothesis import strategies as st
from test_decode import (
    OPTIONS,
    Calls,
    assert_same_states,
    at_real,
    by_decode_option,
    check_replays,
    each_alone,
    first_token,
    pieces,
)
from test_decode_window import accompany, advance, check_within_contract

import fastmax
from fastmax import eager, fastmax_attention
from fastmax.core.score import Score
from fastmax.decoding.buffered import flushed
from fastmax.testing.errors import ROUNDING
from fastmax.testing.poison import poison_free_memory
from fastmax.testing.tensors import unaligned

CASE = Case("", n=16, b=2, h=4, hk=2, d=5, dv=7)


def new_state(case, window, flush_interval, device="cpu", dtype=torch.float64, **options):
    sizes = case.b, case.hk, case.d, case.dv
    return fastmax.decoding.init_state(
        *sizes, dtype=dtype, device=device, exact_window=window, flush_interval=flush_interval, **options
    )


# ---- against one call


@given(
    sizes=st.lists(st.sampled_from([1, 1, 1, 2, 7, 30]), min_size=1, max_size=25),
    window=st.sampled_from([0, 1, 3, 8, 40]),
    flush_interval=st.sampled_from([2, 3, 8, 33]),
    decay=st.sampled_from([None, "ordinary", "none, ordinary or strong", "-inf at places"]),
    padded=st.booleans(),
    in_place=st.sampled_from([True, True, False]),
)
def test_any_split(sizes, window, flush_interval, decay, padded, in_place):
    """Outputs are right for any split, and 0 if a query sees no key."""
    case = Case("", n=sum(sizes), b=2, h=4, hk=2, d=4, dv=3)
    inputs, _ = make_inputs(case, torch.float64)
    given = accompany(case, "cpu", padded, decay)
    actual, state = advance(inputs, sizes, new_state(case, window, flush_interval), in_place, **given)
    expected = each_alone(fastmax_attention, inputs, **given, exact_window=window)
    torch.testing.assert_close(at_real(actual, given["mask"]), expected, rtol=1e-9, atol=1e-10)
    assert state.tokens == case.n and state.flush_interval == flush_interval


@by_decode_option
@pytest.mark.parametrize("window", [0, 3])
def test_every_option(option, window, device):
    inputs, _ = make_inputs(CASE, torch.float64, device)
    sizes, options = (3, *[1] * 13), {name: x for name, x in OPTIONS[option].items() if name != "exact_window"}
    actual, state = advance(inputs, sizes, new_state(CASE, window, 4, device, **options), True)
    expected, plain = advance(inputs, sizes, new_state(CASE, window, 1, device, **options))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(flushed(state).tensors(), plain.tensors(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_every_dtype(dtype, device):
    """Buffered tokens are not rounded before they join the sums, which are as precise as if each token joined at once."""
    case = replace(CASE, n=60, m=60)
    inputs, _ = make_inputs(case, dtype, device)
    log_decay = make_decay("ordinary", case.b, case.hk, case.n, device=device)
    actual, state = advance(inputs, [1] * case.n, new_state(case, 0, 16, device, dtype), True, log_decay=log_decay)
    exactly_of = {name: exactly(x) for name, x in inputs.items()}
    exact, sums = advance(exactly_of, [1] * case.n, new_state(case, 0, 1, device), log_decay=exactly(log_decay))
    assert actual.dtype == dtype
    assert_within_contract("o", actual, definition(**inputs, causal=True, log_decay=log_decay), exact)
    if device.type != "cpu":  # `flushed` runs the kernels of prefill, which round products of 16-bit tokens
        return
    for x, y in ((flushed(state).kv_state, sums.kv_state), (flushed(state).k_sum, sums.k_sum)):
        assert (x.double() - y).norm() <= (1e-12 if dtype == torch.float64 else 3e-6) * y.norm()


@pytest.mark.parametrize("held", [torch.nan, torch.inf])
@pytest.mark.parametrize("decay", [None, "-inf at places"])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("flush_interval", [1, 4])
def test_what_a_masked_token_holds_leaves_no_trace(flush_interval, window, decay, held, device):
    inputs, _ = make_inputs(CASE, torch.float32, device)
    given = accompany(CASE, device, True, decay)
    masked = ~given["mask"][:, None, :, None]
    assert masked[0, 0, :6].any() and masked[0, 0, 6:].any()
    ways = (([1] * 16, True), ([1] * 16, False), ([16], False), ([1, 1, 1, 1, 1, 7, 1, 1, 2], True))

    def all_ways():
        start = new_state(CASE, window, flush_interval, device, torch.float32)
        return [advance(inputs, sizes, start.clone(), in_place, **given) for sizes, in_place in ways]

    expected = all_ways()
    for name in ("k", "v"):
        inputs[name].masked_fill_(masked, held)  # in place: equal bits need equal addresses
    for (actual, same), (outputs, state) in zip(all_ways(), expected, strict=True):
        assert torch.equal(actual, outputs) and outputs.isfinite().all()
        assert torch.equal(flushed(same).kv_state, flushed(state).kv_state)
        assert torch.equal(flushed(same).k_sum, flushed(state).k_sum)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("sizes", [[1] * 16, [16]], ids=["step", "prefill"])
def test_gradients_beside_what_a_masked_token_holds(sizes, window, device):
    inputs, grad_o = make_inputs(CASE, torch.float64, device)
    given = accompany(CASE, device, True, "ordinary")
    masked = ~given["mask"][:, None, :, None]

    def gradients(held):
        leaves = {name: x if name == "q" else x.masked_fill(masked, held) for name, x in inputs.items()}
        leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        o, _ = advance(leaves, sizes, new_state(CASE, window, 1, device), **given)
        return torch.autograd.grad(o, tuple(leaves.values()), grad_o)

    torch.testing.assert_close(gradients(torch.nan), gradients(0.0), rtol=1e-9, atol=1e-10)
    assert not gradients(torch.nan)[1].masked_select(masked).any()


# ---- what is buffered


def test_the_sums_are_written_at_every_fourth_token():
    inputs, _ = make_inputs(CASE, torch.float64)
    state, written, counts = new_state(CASE, 2, 4), [], []
    for token in pieces(inputs):
        before = state.kv_state.clone()
        fastmax.decoding.step_(*token, state)
        written.append(not torch.equal(state.kv_state, before))
        counts.append(state.buffered.unique().tolist())
    # The fourth to leave the window is buffered; the step after it takes all four in. Two of the first have no token in them.
    assert counts == [[1], [2], [3], [4]] * 4
    assert written == [False] * 4 + [True, False, False, False] * 3


def test_a_step_leaves_the_given_state_as_it_was(device):
    inputs, _ = make_inputs(CASE, torch.float64, device)
    _, state = advance(inputs, [1] * 7, new_state(CASE, 2, 4, device), True)
    before = copy.deepcopy(state)
    for token in pieces(inputs):
        fastmax.decoding.step(*token, state)
    fastmax.decoding.prefill(*inputs.values(), state)
    assert_same_states(state, before)


def test_gradients(device):
    """Gradients through steps and a prefill, those of buffered tokens too, are those of a state without a buffer."""
    inputs, _ = make_inputs(CASE, torch.float64, device)
    inputs = {name: x[:, :, :9] for name, x in inputs.items()}
    log_decay = make_decay("ordinary", CASE.b, CASE.hk, 9, dtype=torch.float64, device=device)
    grads = []
    for flush_interval in (1, 4):
        with torch.no_grad():
            _, state = advance(inputs, [1] * 6, new_state(CASE, 2, flush_interval, device), True)
        state = state.map(lambda x: x.requires_grad_() if x.is_floating_point() else x)
        leaves = {name: x.clone().requires_grad_() for name, x in (inputs | {"log_decay": log_decay}).items()}
        decays = leaves["log_decay"]
        o, _ = advance({name: leaves[name] for name in inputs}, [1, 4, 1, 3], state, log_decay=decays)
        grads.append(torch.autograd.grad(o.square().sum(), [*leaves.values(), state.kv_state, state.k_sum]))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-8, atol=1e-10)


def test_step_in_place_refuses_to_record():
    inputs, _ = make_inputs(CASE, torch.float64)
    q, k, v = first_token(inputs)
    with pytest.raises(RuntimeError, match="torch.no_grad"):
        fastmax.decoding.step_(q, k, v.requires_grad_(), new_state(CASE, 2, 4))


# ---- between tokens


def some_steps(device="cpu", dtype=torch.float64, window=2):
    """Returns a state with three buffered tokens, and the inputs that follow."""
    inputs, _ = make_inputs(CASE, dtype, device)
    _, state = advance(inputs, [1] * 7, new_state(CASE, window, 4, device, dtype), True)
    return state, {name: x[:, :, 7:] for name, x in inputs.items()}


def proceed(state, inputs):
    return advance(inputs, [1] * 6 + [3], state.clone(), True)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_save_and_load(dtype, device):
    state, rest = some_steps(device, dtype)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)
    assert_same_states(loaded, state)
    assert loaded.flush_interval == 4 and "flush_interval=4" in repr(loaded)
    torch.testing.assert_close(proceed(loaded, rest), proceed(state, rest))


@pytest.mark.parametrize("window", [0, 2])
def test_beams(window, device):
    """Batch entries with different numbers of buffered tokens can be joined and continue."""
    state, rest = some_steps(device, window=window)
    _, other = advance({name: x[:, :, :2] for name, x in rest.items()}, [1] * 2, state.clone(), True)
    assert state.buffered.unique().tolist() == [3] and other.buffered.unique().tolist() == [1]
    mixed = replace(state, **{name: torch.stack([x[1], getattr(other, name)[0]]) for name, x in state.tensors().items()})
    expected = {name: torch.stack([x[1], x[0]]) for name, x in rest.items()}
    separate = torch.stack(
        [proceed(state.select([1]), {name: x[:1] for name, x in expected.items()})[0],
         proceed(other.select([0]), {name: x[1:] for name, x in expected.items()})[0]]
    )  # fmt: skip
    torch.testing.assert_close(proceed(mixed, expected), separate)
    twice = proceed(state.repeat(2), {name: x.repeat_interleave(2, 0) for name, x in rest.items()})
    torch.testing.assert_close(twice, proceed(state, rest).repeat_interleave(2, 0))


def test_to_another_dtype():
    state, rest = some_steps(dtype=torch.float32)
    wide = state.to(torch.float64)
    assert wide.local_keys.dtype == torch.float64 and wide.buffered.dtype == torch.int32
    actual = proceed(wide, {name: x.double() for name, x in rest.items()})
    torch.testing.assert_close(actual.float(), proceed(state, rest), rtol=1e-4, atol=1e-5)


def test_packed_prefill_continues(device):
    state, rest = some_steps(device)
    cu_seqlens = torch.tensor([0, 3, 4], dtype=torch.int32, device=device)
    packed = {name: torch.cat([x[:1, :, :3], x[1:, :, :1]], dim=2) for name, x in rest.items()}
    o, after = fastmax.decoding.prefill(*packed.values(), state, cu_seqlens=cu_seqlens)
    first = fastmax.decoding.prefill(*(x[:1, :, :3] for x in rest.values()), state.select([0]))[0]
    torch.testing.assert_close(o[:, :, :3], first)
    assert after.flush_interval == 4 and after.buffered.eq(0).all()


# ---- arguments and compilers


@pytest.mark.parametrize("flush_interval, error", [(0, ValueError), (2.0, TypeError), (True, TypeError)], ids=str)
def test_bad_numbers(flush_interval, error):
    with pytest.raises(error, match="flush_interval"):
        new_state(CASE, 0, flush_interval)


BAD_STATES = {
    "another number": (lambda x: replace(x, flush_interval=3), r"local_keys \(2, 2, 5, 5\).*got \(2, 2, 6, 5\)"),
    "no count": (lambda x: replace(x, buffered=None), r"buffered \(2, 2\).*got None"),
    "a long count": (lambda x: replace(x, buffered=x.buffered.long()), r"buffered \(2, 2\) of torch.int32.*int64"),
    "a mask for all heads": (lambda x: replace(x, local_mask=x.local_mask[:, 0]), r"local_mask \(2, 2, 6\)"),
}


@pytest.mark.parametrize(
    "function", [fastmax.decoding.step, fastmax.decoding.step_, fastmax.decoding.prefill], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", BAD_STATES)
def test_bad_states(name, function):
    change, message = BAD_STATES[name]
    inputs, _ = make_inputs(CASE, torch.float64)
    with pytest.raises(ValueError, match=message):
        function(*first_token(inputs), change(new_state(CASE, 2, 4)))


def test_compiled_step(device, fresh_dynamo):
    inputs, _ = make_inputs(CASE, torch.float32, device)
    state, calls = new_state(CASE, 2, 4, device, torch.float32), Calls()
    expected = state.clone()
    compiled = torch.compile(fastmax.decoding.step_, fullgraph=True, backend=calls)
    with torch.no_grad():
        for token in list(pieces(inputs))[:7]:
            torch.testing.assert_close(compiled(*token, state), fastmax.decoding.step_(*token, expected))
            torch.testing.assert_close(state.tensors(), expected.tensors())
    assert "fastmax.buffered_step_.default" in calls.operators and calls.frame_count <= 2


def test_the_operator_itself_refuses_to_record():
    state, _ = some_steps()
    q = torch.randn(2, 4, 1, 5, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, 2, 1, 5, dtype=torch.float64), torch.randn(2, 2, 1, 7, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="torch.no_grad"):
        torch.ops.fastmax.buffered_step_(q, k, v, *state.tensors().values(), *[None] * 4, 2, 1.0, 1.0, 1.0, 0.5, 2)


# ---- CUDA


def buffered_state(window, flush_interval, buffered, hk, d, dv, dtype, gates, device="cuda"):
    """Returns filled tensors for `ops.buffered_step_`. Places without a token hold arbitrary finite numbers."""
    generator = torch.Generator(device).manual_seed(window + flush_interval + buffered)
    k, v = (torch.randn(3, hk, 40, x, generator=generator, device=device, dtype=torch.float64) for x in (d, dv))
    state = fastmax.decoding.init_state(3, hk, d, dv, dtype=torch.float64, device=device, temperature=d**0.5)
    _, state = fastmax.decoding.prefill(k, k, v, state)
    wide, places = eager.compute_dtype(dtype), (3, hk, window + flush_interval)
    near = (torch.randn(*places, x, generator=generator, device=device).to(dtype) for x in (d, dv))
    mask = torch.rand(places, generator=generator, device=device) > 0.2
    decays = -torch.rand(places, generator=generator, device=device, dtype=wide) / 8
    decays[:, :, 1::7] = 0.0
    decays[0, :, window // 2] = -torch.inf
    count = torch.full((3, hk), buffered, dtype=torch.int32, device=device)
    count[1] = flush_interval  # entries of their own
    local_gates = 2.0 * torch.randn(places, generator=generator, device=device, dtype=wide) if gates else None
    return [state.kv_state.to(wide), state.k_sum.to(wide), *near, mask, decays, count, local_gates]


@pytest.mark.cuda
@pytest.mark.parametrize("d, dv", [(64, 64), (128, 128), (96, 32), (37, 51), (1, 1), (5, 130), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=dtype_id)
@pytest.mark.parametrize(
    "window, flush_interval, buffered", [(0, 32, 0), (0, 32, 32), (128, 32, 5), (128, 32, 32), (3, 70, 70), (50, 2, 1)]
)
@pytest.mark.parametrize("gate", ["", "gate", "local gates alone"])
@by_order
def test_the_kernel(p, gate, window, flush_interval, buffered, dtype, d, dv):
    """The kernel agrees with the PyTorch implementation in float64, with and without groups, and gives the same bits twice."""
    for h, hk, layout in ((8, 2, unaligned), (3, 3, torch.clone), (20, 1, torch.clone), (6, 3, unaligned)):
        state = buffered_state(window, flush_interval, buffered, hk, d, dv, dtype, gate != "")
        if p == 1:
            state[0], state[1] = state[0][:, :, : 1 + d].contiguous(), state[1][:, :, : 1 + d].contiguous()
        q, k, v = (layout(torch.randn(3, heads, 1, x, device="cuda").to(dtype)) for heads, x in ((h, d), (hk, d), (hk, dv)))
        mask = torch.tensor([[True], [False], [True]], device="cuda")
        log_decay = torch.tensor([-0.3, -0.1, 0.0], dtype=state[1].dtype, device="cuda")[:, None, None].expand(3, hk, 1)
        of_token = torch.randn(3, hk, 1, dtype=state[1].dtype, device="cuda") if gate == "gate" else None
        score = Score(0.05 / d if p == 1 else d**-0.5, 1.0, 1.0, 0.5, p)
        exactly_of = [x if x is None else x.to(torch.float64 if x.is_floating_point() else x.dtype, copy=True) for x in state]
        token = mask, log_decay.double(), None if of_token is None else of_token.double()
        exact, of_exact = eager.buffered_step_(*(x.double() for x in (q, k, v)), *exactly_of, *token, window, score)
        poison_free_memory(torch.device("cuda"))
        twice = []
        for _ in range(2):
            new = [None if x is None else x.clone() for x in state]
            o, lse = torch.ops.fastmax.buffered_step_(q, k, v, *new, mask, log_decay, of_token, window, *score)
            twice.append((o, lse, *(x for x in new if x is not None)))
        assert all(torch.equal(x, y) for x, y in zip(*twice, strict=True))
        o, lse, kv_state, k_sum, *kept = twice[0]
        limit = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype) or ROUNDING[str(dtype)[6:]]
        assert o.dtype == dtype and o.shape == (3, h, 1, dv) and relative(o, exact) <= limit
        assert lse.dtype == state[1].dtype and lse.shape == (3, h, 1) and torch.equal(lse.isfinite(), of_exact.isfinite())
        of_q = limit if dtype in (torch.float16, torch.bfloat16) else 0.0  # scores round with q and k
        torch.testing.assert_close(lse.double(), of_exact, rtol=1e-5, atol=1e-5 + of_q)
        for x, y in ((kv_state, exactly_of[0]), (k_sum, exactly_of[1])):
            assert relative(x, y) <= (1e-12 if dtype == torch.float64 else 2e-6)
        count = kept.pop(4)
        assert torch.equal(count, exactly_of[6])
        there = torch.arange(window + flush_interval, device="cuda") < window + count.unsqueeze(-1)
        of_places = [x for i, x in enumerate(exactly_of[2:]) if i != 4 and x is not None]
        for x, y in zip(kept, of_places, strict=True):
            assert torch.equal(x.double()[there], y.double()[there])


def relative(x, y):
    return ((x.double() - y).norm() / y.norm()).item()


@pytest.mark.cuda
@by_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("window", [0, 1, 64, 128])
def test_generating_on_the_kernels(window, dtype, p):
    case = Case("", n=500, b=2, h=4, hk=2, d=64, dv=64)
    check_within_contract(case, (200, *[1] * 150, 70, *[1] * 80), window, dtype, p, flush_interval=32)


@pytest.mark.cuda
@pytest.mark.parametrize("window", [0, 4])
def test_a_replayed_graph_folds(window):
    """One graph serves steps that add to the buffer and steps that fold it into the sums."""
    inputs, _ = make_inputs(CASE, torch.float32, "cuda")
    check_replays(inputs, new_state(CASE, window, 3, "cuda", torch.float32))
