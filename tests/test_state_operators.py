"""The parts of `prefill` and of its gradient: `state_of_keys` and `state_of_queries` make the state, or its gradient, alone;
`prefill_saved_` computes the rest of the forward, `prefill_backward_of_queries` and `prefill_backward_of_keys_` the rest of the
backward."""

import pytest
import torch
from common import by_order, in_turn, relative

from fastmax import ops
from fastmax.core.call import Call
from fastmax.core.score import Score
from fastmax.ops.registration import Operator

CASES = {
    "one token": {"n": 1},
    "a chunk and a token": {"n": 257},
    "chunks": {"n": 1300},
    "GQA": {"n": 300, "h": 6, "hk": 2},
    "many states": {"n": 300, "b": 3, "h": 40, "hk": 40},
    "decay": {"n": 700, "decay": True},
    "decay, resets": {"n": 700, "decay": True, "resets": 0.01},
    "sequences": {"n": 700, "resets": 0.01},
    "mask": {"n": 300, "mask": True},
    "head dims 5 and 7": {"n": 300, "d": 5, "dv": 7},
    "head dim 128": {"n": 300, "h": 1, "hk": 1, "d": 128, "dv": 128},
}
DTYPES = {"cpu": (torch.float64,), "cuda": (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
# For sums over tokens that are made in two orders; kernels round what decays to the end of a chunk, and chunks differ.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}


def given(device, dtype, p, n, b=1, h=2, hk=2, d=32, dv=32, decay=False, resets=0.0, mask=False):
    """Returns q, k, v and the call. On a CPU there are few heads, since more would only repeat a loop."""
    if torch.device(device).type == "cpu" and h == hk:
        h = hk = min(h, 2)
    q, k, v = (torch.randn(b, heads, n, x, device=device, dtype=dtype) for heads, x in ((h, d), (hk, d), (hk, dv)))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    log_decay = -0.1 * torch.rand(b, hk, n, device=device, dtype=wide) if decay else None
    first = None
    if resets > 0.0:
        last = torch.where(torch.rand(b, hk, n, device=device) < resets, torch.arange(n, device=device), -1)
        first = last.cummax(-1).values.to(torch.int32)
    padding = torch.rand(b, n, device=device) > 0.3 if mask else None
    score = Score(0.1 / d if p == 1 else d**-0.5, 1.0, 0.7, 0.5, p)
    return q, k, v, Call(score, causal=True, attention_mask=padding, log_decay=log_decay, k_start=first)


@by_order
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_they_are_those_of_prefill(device, case, p):
    for dtype in DTYPES[device.type]:
        q, k, v, call = given(device, dtype, p, **case)
        kv_state, k_sum, _ = ops.state_of_keys(k, v, call)
        o, z, *expected = ops.prefill(q, k, v, call, torch.zeros_like(kv_state), torch.zeros_like(k_sum))
        for got, x in zip((kv_state, k_sum), expected, strict=True):
            assert got.shape == x.shape and got.dtype == x.dtype
            assert relative(got, x.double()) < TOLERANCE[dtype]
        grad_o, grad_z = torch.randn_like(o), torch.randn_like(z)
        for of_z in (None, grad_z):
            *got, _ = ops.state_of_queries(*ops.gradients_of_sums(grad_o, of_z, o, z), q, k, v, call)
            grads, results = (grad_o, of_z, None, None), (o, z, None, None)
            expected = ops.prefill_backward(grads, q, k, v, results, call, torch.zeros_like(kv_state), torch.zeros_like(k_sum))[
                -2:
            ]
            for x, y in zip(got, expected, strict=True):
                assert x.shape == y.shape and x.dtype == y.dtype
                assert relative(x, y.double()) < TOLERANCE[dtype]
        assert all(torch.equal(x, y) for x, y in zip(ops.state_of_keys(k, v, call)[:2], (kv_state, k_sum), strict=True))


def pairs_of(new, of_new, state, of_state):
    """Returns the sums of the products of states and their gradients, float64 (b, hk, 2), 0 without a gradient."""
    zero = torch.zeros(state[0].shape[:2], dtype=torch.float64, device=state[0].device)

    def pairs(states, grads):
        products = [x.double() * grad for x, grad in zip(states, grads, strict=True) if grad is not None]
        return sum((x.flatten(2).sum(-1) for x in products), zero)

    return torch.stack([pairs(new, of_new), pairs(state, of_state)], dim=-1)


@in_turn("p")
@by_order
@pytest.mark.parametrize("carries", [True, False], ids=["from a state", "from nothing"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_they_keep_is_enough_to_go_on(device, case, p, carries):
    for dtype in DTYPES[device.type]:
        q, k, v, call = given(device, dtype, p, **case)
        _, earlier, of_earlier, _ = given(device, dtype, p, **case)
        *_, saved = ops.state_of_keys(k, v, call, keep=True)
        state = ops.state_of_keys(earlier, of_earlier, call._replace(attention_mask=None, k_start=None))[:2]
        state, given_state = (state, state) if carries else (tuple(map(torch.zeros_like, state)), (None, None))
        is_saved = device.type == "cuda" and dtype != torch.float64 and p == 2
        assert saved.dtype == torch.uint8 and saved.shape[:2] == k.shape[:2] and (saved.numel() > 0) == is_saved
        o, z, *new = ops.prefill(q, k, v, call, *state)
        for got, x in zip(ops.prefill_saved_(q, k, v, call, *given_state, saved), (o, z), strict=True):
            assert got.shape == x.shape and got.dtype == x.dtype
            assert relative(got, x.double()) < TOLERANCE[dtype]
        grad_o, grad_z, *of_state = (torch.randn_like(x) for x in (o, z, *new))
        of_state = of_state if carries else [None, None]
        expected = ops.prefill_backward((grad_o, grad_z, *of_state), q, k, v, (o, z, *new), call, *state)
        g, e = ops.gradients_of_sums(grad_o, grad_z, o, z)
        *_, saved = ops.state_of_queries(g, e, q, k, v, call, keep=True)
        assert (saved.numel() > 0) == is_saved
        grad_q, pairs = ops.prefill_backward_of_queries(g, e, q, k, v, call, *given_state)
        of_states = pairs_of(new, of_state, state, expected[5:])
        of_keys = [
            ops.prefill_backward_of_keys_(g, e, of_state, q, k, v, call, pairs, of_states, x.clone())
            for x in (saved, saved[..., :0])
        ]
        for grad_k, grad_v, of_decay, of_gate in of_keys:
            for got, x in zip((grad_q, grad_k, grad_v, of_decay, of_gate), expected[:5], strict=True):
                assert got.shape == x.shape and got.dtype == x.dtype
                assert x.numel() == 0 or relative(got, x.double()) < 2 * TOLERANCE[dtype]


def test_gradients_of_sums(device):
    for dtype in DTYPES[device.type]:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        o, grad_o = (torch.randn(2, 3, 17, 7, device=device, dtype=dtype) for _ in range(2))
        z, grad_z = (torch.randn(2, 3, 17, device=device, dtype=wide) for _ in range(2))
        z[:, :, 3] = 0.0
        inverse = torch.where(z == 0.0, 0.0, 1.0 / z.double())
        for of_z in (None, grad_z):
            g, e = ops.gradients_of_sums(grad_o.transpose(0, 1).contiguous().transpose(0, 1), of_z, o, z)
            assert g.dtype == (torch.float32 if dtype == torch.float16 else dtype) and e.dtype == wide
            assert g.is_contiguous() and e.is_contiguous()
            assert relative(g, grad_o.double() * inverse.unsqueeze(-1)) < TOLERANCE[dtype]
            exact = -(g.double() * o.double()).sum(-1) + (0.0 if of_z is None else torch.where(z == 0.0, 0.0, of_z.double()))
            assert relative(e, exact) < 1e-5


GOES_ON = {"state_of_keys": "prefill_saved_", "state_of_queries": "prefill_backward_of_keys_"}


@pytest.mark.parametrize("keeps, goes_on", GOES_ON.items())
def test_what_keeps_is_told_what_goes_on_is(keeps, goes_on):
    """The operator that saves states and the one that reads them have the same score options, because saved states contain the
    coefficients of the score."""

    def options(name):
        arguments = getattr(torch.ops.fastmax, name).default._schema.arguments
        return [x.name for x in arguments if str(x.type) in ("float", "int", "bool")]

    assert options(keeps) == [*options(goes_on), "keep"]
    assert options(goes_on)[:4] == ["scale", "a0", "a1", "a2"]


def test_every_operator_gets_the_score_of_the_call(monkeypatch):
    """`ops` passes the score of the call to the operators that make states and to those that read them."""
    q, k, v, call = given("cpu", torch.float32, 2, 3)
    seen = {}

    def record(operator, *arguments):
        seen[operator] = dict(zip((x.name for x in operator.overload._schema.arguments), arguments, strict=True))
        return operator.run(*arguments)

    monkeypatch.setattr(Operator, "__call__", record)
    *state, saved = ops.state_of_keys(k, v, call, keep=True)
    o, z = ops.prefill_saved_(q, k, v, call, *state, saved)
    g, e = ops.gradients_of_sums(o, None, o, z)
    *of_state, saved = ops.state_of_queries(g, e, q, k, v, call, keep=True)
    ops.prefill_backward_of_queries(g, e, q, k, v, call, *state)
    ops.prefill_backward_of_keys_(g, e, of_state, q, k, v, call, None, None, saved)
    seen = [arguments for arguments in seen.values() if "scale" in arguments]
    assert len(seen) == 5
    for arguments in seen:
        assert Score(*(arguments[name] for name in ("scale", "a0", "a1", "a2", "p"))) == call.score


def test_of_no_tokens_they_are_zeros(device):
    q, k, v, call = given(device, torch.float32, 2, 0)
    sums = ops.gradients_of_sums(torch.empty_like(q), None, torch.empty_like(q), q.new_empty(q.shape[:3]))
    for state in (ops.state_of_keys(k, v, call, keep=True), ops.state_of_queries(*sums, q, k, v, call, keep=True)):
        assert not any(x.any() for x in state) and state[2].numel() == 0


def test_a_derivative_is_refused_by_name(device):
    _, k, v, _ = given(device, torch.float32, 2, 3)
    score = Score(1.0, 1.0, 1.0, 0.5, 2)
    kv_state, *_ = torch.ops.fastmax.state_of_keys(k.requires_grad_(), v, *[None] * 4, *score, False, False)
    with pytest.raises(RuntimeError, match="state_of_keys and state_of_queries have no gradient"):
        kv_state.sum().backward()
