"""`torch.ops.fastmax.exact_window_forward` and its gradient on CUDA: the kernels against float64."""

import math
from functools import partial

import pytest
import torch
from common import Case, dtype_id, make_decay, make_inputs, relative, run
from test_sm90 import ON_HOPPER, taken  # noqa: F401

from fastmax import eager, fastmax_attention
from fastmax.core.call import Call
from fastmax.testing.errors import ROUNDING
from fastmax.testing.poison import poison_free_memory

pytestmark = pytest.mark.cuda

# Relative errors of results and gradients, and of the gradients of log_decay and log_input_gate.
LIMITS = {torch.bfloat16: (1.2e-2, 4e-2), torch.float16: (3e-3, 1e-2), torch.float32: (1e-4, 5e-4)}
OF_KEYS = ("grad log_decay", "grad log_input_gate")
by_order = pytest.mark.parametrize("p", [1, 2])
by_algorithm = pytest.mark.parametrize("algorithm", ["linear", "quadratic"])
by_gate = pytest.mark.parametrize("gate", [False, True], ids=["", "gate"])
with_lse = partial(fastmax_attention, return_lse=True, causal=True, temperature=2.5)


def make(case, dtype=torch.bfloat16, decay=None, layout="contiguous", gate=False):
    """Returns inputs, and gradients of the output and of lse."""
    inputs, grad_o = make_inputs(case, dtype, "cuda", layout)
    if decay is not None:
        inputs["log_decay"] = make_decay(decay, case.b, case.hk, case.m, device="cuda")
    if gate:
        inputs["log_input_gate"] = 2.0 * torch.randn(case.b, case.hk, case.m, device="cuda")
    return inputs, (grad_o, torch.randn(case.b, case.h, case.n, device="cuda"))


def in_float64(inputs, grads, **options):
    wide = {name: x.double() for name, x in inputs.items()}, tuple(x.double() for x in grads)
    return run(partial(with_lse, **options), *wide)


def check(inputs, grads, dtype=torch.bfloat16, **options):
    """Compares results and gradients with those of float64, and returns them."""
    exact = in_float64(inputs, grads, **options)
    actual = run(partial(with_lse, **options), inputs, grads)
    plain, of_decay = LIMITS[dtype]
    for name, x in exact.items():
        y, seen = actual[name].double(), x.isfinite()
        assert torch.equal(y.isfinite(), seen), name
        # Decays, or a window of all keys, leave almost no gradient of gates.
        size = max(x[seen].norm().item(), 1e-3 * grads[0].double().norm().item() if name in OF_KEYS else 0.0)
        error = (y[seen] - x[seen]).norm().item() / size
        assert error <= (of_decay if name in OF_KEYS else plain), (name, error)
    return actual


SIZES = {
    "one chunk": (Case("", n=70, m=90, b=2, h=4, hk=2, d=32), 16),
    "chunks": (Case("", n=900, m=900, b=1, h=4, hk=2, d=64), 128),
    "fewer queries": (Case("", n=333, m=1111, b=2, h=2, hk=1, d=64), 100),
    "odd": (Case("", n=517, m=517, b=1, h=3, hk=3, d=40, dv=72), 37),
    "unaligned": (Case("", n=300, m=301, b=1, h=2, hk=1, d=37, dv=19), 50),
    "wide": (Case("", n=600, m=600, b=1, h=2, hk=2, d=128), 65),
    "256": (Case("", n=280, m=280, b=1, h=2, hk=1, d=200), 33),
    "window of 1": (Case("", n=300, m=300, b=1, h=2, hk=2, d=64), 1),
    "window of all": (Case("", n=300, m=300, b=1, h=2, hk=2, d=64), 300),
}


@by_gate
@pytest.mark.parametrize("decay", [None, "weak", "ordinary"])
@pytest.mark.parametrize("size", SIZES)
@by_order
@by_algorithm
def test_sizes(algorithm, p, size, decay, gate):
    case, window = SIZES[size]
    check(*make(case, decay=decay, gate=gate), algorithm=algorithm, p=p, exact_window=window)


@by_gate
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("decay", [None, "ordinary"])
@by_order
@by_algorithm
def test_dtypes(algorithm, p, decay, dtype, gate):
    for size in ("one chunk", "chunks", "odd"):
        case, window = SIZES[size]
        check(*make(case, dtype, decay, gate=gate), dtype=dtype, algorithm=algorithm, p=p, exact_window=window)


SMALL = Case("", n=500, m=530, b=2, h=4, hk=2, d=64)


def packed_bounds():
    return torch.tensor([0, 3, 40, 41, 300, 330, 500], dtype=torch.int32, device="cuda")


@by_gate
@pytest.mark.parametrize("decay", [None, "ordinary", "none, ordinary or strong", "-inf at places"])
@by_order
@by_algorithm
def test_masks(algorithm, p, decay, gate):
    inputs, grads = make(SMALL, decay=decay, gate=gate)
    mask = torch.rand(SMALL.b, SMALL.m, device="cuda") > 0.3
    mask[0, :200] = False  # some queries see local keys alone, others none
    check(inputs, grads, algorithm=algorithm, p=p, exact_window=40, attention_mask=mask)


@by_gate
@pytest.mark.parametrize("decay", [None, "ordinary", "-inf at places"])
@by_order
@by_algorithm
def test_packed(algorithm, p, decay, gate):
    inputs, grads = make(Case("", n=500, b=1, h=4, hk=2, d=64), decay=decay, gate=gate)
    check(inputs, grads, algorithm=algorithm, p=p, exact_window=20, cu_seqlens=packed_bounds())


@by_gate
@pytest.mark.parametrize("decay", ["none", "weak", "strong", "none, ordinary or strong", "-inf at places", "-inf everywhere"])
@by_algorithm
def test_decays(algorithm, decay, gate):
    inputs, grads = make(SMALL, decay=decay, gate=gate)
    exact = in_float64(inputs, grads, algorithm=algorithm, exact_window=9)
    actual = run(partial(with_lse, algorithm=algorithm, exact_window=9), inputs, grads)
    for name, x in exact.items():
        y = actual[name].double()
        size = max(x.norm().item(), 1e-3 * grads[0].double().norm().item())  # strong decays leave almost no gradient
        assert (y - x).norm().item() <= LIMITS[torch.bfloat16][name in OF_KEYS] * size, name


@by_algorithm
def test_decays_of_nan(algorithm):
    """Rows that see a key before a NaN decay are NaN, and no others."""
    inputs, _ = make(SMALL, decay="weak")
    inputs["log_decay"][:, 0, [100, 470]] = math.nan
    mask = torch.rand(SMALL.b, SMALL.m, device="cuda") > 0.5
    mask[:, :450] = False
    options = {"algorithm": algorithm, "exact_window": 20, "attention_mask": mask}
    wide = {name: x.double() for name, x in inputs.items()}
    exact, actual = with_lse(**wide, **options), with_lse(**inputs, **options)
    for x, y in zip(exact, actual, strict=True):
        assert x.isnan().any() and torch.equal(x.isnan(), y.isnan())


SCORES = {
    "300": lambda x: torch.full_like(x, 300.0),
    "-300": lambda x: torch.full_like(x, -300.0),
    "-300 to 300": lambda x: 600.0 * x - 300.0,
}


@pytest.mark.parametrize("decay", [None, "weak"])
@pytest.mark.parametrize("scores", SCORES)
@by_algorithm
def test_scores_of_hundreds(algorithm, scores, decay):
    """exp(300) is infinite in float32 and exp(-300) is 0. The global keys then have no weight, or all of it."""
    inputs, grads = make(Case("", n=400, h=2, d=8), torch.float32, decay)
    inputs["q"] = torch.tensor([1.0] + [0.1] * 7, device="cuda").expand_as(inputs["q"]).contiguous()
    inputs["k"][..., 0] = SCORES[scores](torch.rand(1, 2, 400, device="cuda"))
    options = {"algorithm": algorithm, "exact_window": 30, "temperature": 1.0}
    exact, actual = in_float64(inputs, grads, **options), run(partial(with_lse, **options), inputs, grads)
    incoming = grads[0].norm().item()
    for name, x in exact.items():
        assert actual[name].isfinite().all(), name
        size = max(x.norm().item(), incoming * (300.0 if name == "grad q" else 1.0))
        assert (actual[name].double() - x).norm().item() <= 1e-3 * size, name


@pytest.mark.parametrize("decay", [None, "weak"])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("d", [32, 64, 128])
def test_scores_of_hundreds_in_bf16(d, scores, decay):
    """The same in the kernels of bf16."""
    inputs, grads = make(Case("", n=400, h=2, d=d), decay=decay)
    inputs["q"], inputs["k"] = torch.zeros_like(inputs["q"]), torch.zeros_like(inputs["k"])
    inputs["q"][..., 0], inputs["k"][..., 0] = 1.0, SCORES[scores](torch.rand(1, 2, 400, device="cuda")).bfloat16()
    options = {"algorithm": "linear", "exact_window": 30, "temperature": 1.0}
    exact, actual = in_float64(inputs, grads, **options), run(partial(with_lse, **options), inputs, grads)
    incoming = grads[0].double().norm().item()
    for name, x in exact.items():
        assert actual[name].isfinite().all(), name
        size = max(x.norm().item(), incoming * (300.0 if name in ("grad q", "grad log_decay") else 1.0))
        assert (actual[name].double() - x).norm().item() <= LIMITS[torch.bfloat16][0] * size, name


@pytest.mark.skipif(not ON_HOPPER, reason="other kernels")
@pytest.mark.parametrize("d, window, p, in_one_pass", [
    (32, 1, 2, True), (64, 128, 2, True), (64, 256, 2, True), (128, 1024, 2, True),
    (64, 257, 2, False), (64, 1200, 2, False), (64, 128, 1, False), (96, 128, 2, False),
])  # fmt: skip
@by_gate
@pytest.mark.parametrize("decay", [None, "ordinary"])
def test_one_pass_on_hopper(d, window, p, in_one_pass, decay, gate, taken):  # noqa: F811
    """The linear algorithm takes one pass where a window is no longer than a chunk, and there are global keys."""
    inputs, grads = make(Case("", n=1200, h=2, d=d), decay=decay, gate=gate)
    taken()
    check(inputs, grads, algorithm="linear", p=p, exact_window=window)
    one_pass = {f"exact_window_{direction}: linear2_window_sm90" for direction in ("forward", "backward")}
    seen = set(taken())
    assert seen == one_pass if in_one_pass else not seen & one_pass


@pytest.mark.parametrize("decay", [None, "ordinary"])
@pytest.mark.parametrize("layout", ["token-major", "packed qkv", "transposed"])
def test_strides(layout, decay):
    case = Case("", n=300, b=2, h=2, d=64)
    inputs, grads = make(case, decay=decay, layout=layout)
    grads = (
        torch.randn(64, 300, 2, 2, device="cuda").permute(2, 3, 1, 0).bfloat16(),
        grads[1].permute(2, 0, 1).contiguous().permute(1, 2, 0),
    )
    if decay is not None:
        inputs["log_decay"] = inputs["log_decay"].mT.contiguous().mT
    check(inputs, grads, algorithm="linear", exact_window=40)


@pytest.mark.parametrize("output", [0, 1], ids=["o", "lse"])
@by_algorithm
def test_gradient_of_one_output(algorithm, output):
    inputs, grads = make(SMALL, decay="ordinary")

    def one(v, **options):
        return with_lse(v=v, **options)[output] + 0.0 * v.sum()

    options = {"algorithm": algorithm, "exact_window": 40}
    wide = {name: x.double() for name, x in inputs.items()}, grads[output].double()
    exact, actual = run(partial(one, **options), *wide), run(partial(one, **options), inputs, grads[output])
    for name, x in exact.items():
        if x.norm() > 0:
            assert relative(actual[name], x) <= LIMITS[torch.bfloat16][name in OF_KEYS], name


@by_gate
@pytest.mark.parametrize("decay", [None, "ordinary"])
@by_order
@by_algorithm
def test_repeatable_and_without_pytorch_operations(algorithm, p, decay, gate, monkeypatch):
    inputs, grads = make(Case("", n=1500, b=1, h=4, hk=2, d=64), decay=decay, gate=gate)
    for name in ("forward", "backward", "merge_"):
        monkeypatch.setattr(eager, name, None)
    attention = partial(with_lse, algorithm=algorithm, p=p, exact_window=128)
    first, second = (run(attention, inputs, grads) for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


@pytest.mark.parametrize("dtype", LIMITS, ids=dtype_id)
@pytest.mark.parametrize("size", SIZES)
@by_order
@by_algorithm
def test_gradients_without_that_of_the_decay(algorithm, p, size, dtype):
    """Kernels then leave out the sums of pairs, which changes no product."""
    case, window = SIZES[size]
    inputs, grads = make(case, dtype, "ordinary")
    log_decay = inputs.pop("log_decay")
    options = (None, log_decay, None, None, None, 0.5, 1.0, 1.0, 0.5 if p == 2 else 0.0, p, True, algorithm, window, False)
    outputs = torch.ops.fastmax.exact_window_forward(*inputs.values(), *options)
    given = (*grads, *inputs.values(), *outputs, *options)
    expected = torch.ops.fastmax.exact_window_backward(*given)
    poison_free_memory("cuda")
    for name, x, y in zip("qkv", torch.ops.fastmax.exact_window_backward_qkv(*given), expected, strict=False):
        assert relative(x, y.double()) < ROUNDING[dtype_id(dtype)], name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=dtype_id)
def test_calls_without_kernels(dtype, monkeypatch):
    """float64 takes PyTorch operations; a call that is not causal takes the kernels of its parts."""
    lags = []
    right = eager.forward
    monkeypatch.setattr(eager, "forward", lambda *args, **options: lags.append(lag_of(args)) or right(*args, **options))
    inputs, _ = make(Case("", n=300, h=2, d=64), dtype)
    if dtype == torch.float64:
        log_decay = make_decay("ordinary", 1, 2, 300, device="cuda", dtype=dtype)
        with_lse(**inputs, log_decay=log_decay, exact_window=20)
        assert lags == [0, 20]
    else:
        with_lse(**inputs, causal=False, exact_window=20)
        assert lags == []


def lag_of(args):
    return next(x for x in args if isinstance(x, Call)).lag


def test_a_direct_call_is_refused_by_name():
    inputs, grads = make(Case("", n=60, h=2, d=32))
    options = (*[None] * 5, 0.5, 1.0, 1.0, 0.5, 2, True, "linear", 5, False)
    forward, backward = torch.ops.fastmax.exact_window_forward, torch.ops.fastmax.exact_window_backward
    o, lse = forward(*inputs.values(), *options)
    with pytest.raises((ValueError, RuntimeError), match="exact_window must be at least 1, got 0"):
        forward(*inputs.values(), *options[:-2], 0, False)
    with pytest.raises((ValueError, RuntimeError), match="lse must have shape"):
        backward(*grads, *inputs.values(), o, lse[:, :1], *options)
    with pytest.raises((ValueError, RuntimeError), match="lse must be float32"):
        backward(*grads, *inputs.values(), o, lse.double(), *options)
    with pytest.raises((ValueError, RuntimeError), match="grad_lse must have shape"):
        backward(grads[0], grads[1][..., 1:], *inputs.values(), o, lse, *options)


@pytest.mark.parametrize("case", [Case("", n=0, b=2), Case("", n=5, b=0)], ids=["no tokens", "no batch"])
def test_empty(case):
    inputs, grads = make(case, decay="weak")
    actual = run(partial(with_lse, exact_window=4), inputs, grads)
    assert all(actual[f"grad {name}"].shape == x.shape for name, x in inputs.items())


def test_compiled(fresh_dynamo):
    inputs, grads = make(SMALL, decay="ordinary")
    attention = partial(with_lse, exact_window=40, algorithm="linear")
    expected = run(attention, inputs, grads)
    actual = run(torch.compile(attention, fullgraph=True), inputs, grads)
    assert all(torch.equal(x, actual[name]) for name, x in expected.items())
