"""`log_decay` of `fastmax_attention` and `flash_attention`: against the definition, at its extremes, inside PyTorch."""

import math
from functools import partial

import pytest
import torch
from common import (
    CHUNK,
    DTYPES,
    Case,
    Expected,
    assert_equals_definition,
    by_algorithm,
    by_decay,
    by_gradient,
    by_order,
    check_checkpointing,
    check_compiled,
    check_one_graph_for_all_lengths,
    compare,
    definition,
    dtype_id,
    in_turn,
    make_decay,
    make_inputs,
    make_odd_decay,
    make_options,
    opcheck,
    relative,
    run,
)
from test_flash import ExpectedFlash
from test_validation import good
from torch.autograd import gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import fastmax
from fastmax import fastmax_attention, flash_attention
from fastmax.core.call import Call
from fastmax.core.score import Score
from fastmax.eager.decay import Decay, Factor
from fastmax.eager.exponential import exp_of_decayed, exp_of_relative
from fastmax.eager.workspace import Workspace
from fastmax.prepare.bounds import with_bounds
from fastmax.testing.reference import naive_softmax_attention

SMALL = Case("small", n=24, m=30, b=2, h=4, hk=2, d=8, dv=6)
TINY = Case("tiny", n=5, m=6, b=1, h=2, hk=1, d=3, dv=2)
SIZES = {
    "GQA, n < m": SMALL,
    "GQA, a chunk of keys and more before the queries": Case("", n=70, m=70 + CHUNK + 5, b=2, h=4, hk=2, d=8, dv=6),
    "chunks and a ragged one": Case("", n=CHUNK + 67, h=1, d=8),
    "one query, as in decoding": Case("", n=1, m=CHUNK + 1, h=2, hk=1, d=8),
}

with_lse = partial(fastmax_attention, causal=True, return_lse=True)
flash_with_lse = partial(flash_attention, causal=True, return_lse=True)
by_reentrant = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


# ---- the factors of a tile and of a state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("kind", ["weak", "ordinary", "strong", "none, ordinary or strong", "-inf at places"])
def test_exponents_in_buffers_are_those_that_autograd_records(kind, dtype):
    """Exponents on and off the diagonal are computed in buffers or recorded. After 500 tokens their decays must not cost the
    differences any digits."""
    call = with_bounds(Call(Score(1.0, 1.0, 1.0, 0.5, 2), causal=True), *[torch.zeros(2, 3, 600, 1, dtype=dtype)] * 2,
                       make_decay(kind, 2, 3, 600, dtype=torch.float64))  # fmt: skip
    decay = Decay(call.log_decay, call.k_start, None, shift=0, dtype=dtype)
    exact = Decay(call.log_decay, call.k_start, None, shift=0, dtype=torch.float64)
    for place in ((500, 500, 100, 100), (500, 480, 100, 60), (300, 300, 100, 100, 3), (500, 20, 100, 300)):
        expected = exact.exponent(*place)
        for workspace in (None, Workspace(dtype, torch.device("cpu"))):
            exponent = decay.exponent(*place, workspace=workspace)
            assert exponent.dtype == dtype
            assert torch.equal(exponent.isinf(), expected.isinf())
            # Relative: what is near 0 is a weight that is near 1.
            torch.testing.assert_close(exponent.double(), expected, rtol=2e-6, atol=1e-12)


def test_a_tile_of_which_nothing_is_hidden_has_no_exponent():
    first = torch.tensor([0, 0, 0, 3, 3, 3], dtype=torch.int32).expand(1, 2, 6)
    decay = Decay(None, first, None, shift=0, dtype=torch.float32)
    workspace = Workspace(torch.float32, torch.device("cpu"))
    assert decay.exponent(0, 0, 3, 3, workspace=workspace) is None
    assert decay.exponent(3, 3, 3, 3, workspace=workspace) is None
    assert decay.exponent(3, 0, 3, 3, workspace=workspace).isinf().all()
    assert decay.exponent(2, 0, 3, 3, workspace=workspace).isinf().sum() == 2 * 2 * 3
    end = Decay(None, None, first + 3, shift=0, dtype=torch.float32)
    assert end.exponent(0, 0, 3, 3, workspace=workspace) is None
    assert end.exponent(0, 3, 3, 3, workspace=workspace).isinf().all()


@pytest.mark.parametrize("whole", [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_a_state_decays_in_place_as_it_does_elsewhere(whole):
    factor = Factor(torch.tensor(whole).view(2, 1, 1), torch.tensor([-1e-7, 0.0]).view(2, 1, 1))
    x = torch.randn(2, 30, 5)
    x[1, 0, 0] = math.inf if whole[1] == 0.0 else 1.0
    expected = factor(x)
    assert torch.equal(expected[1], x[1] if whole[1] == 1.0 else torch.zeros(30, 5))
    factor.multiply_(x)
    torch.testing.assert_close(x, expected, rtol=1e-7, atol=0.0)


def make(case, decay="ordinary", dtype=torch.float32, device="cpu", decay_dtype=None):
    """Returns q, k, v and log_decay, which is at least float32, and the gradients of o and lse."""
    inputs, grad_o = make_inputs(case, dtype, device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs["log_decay"] = make_decay(decay, case.b, case.hk, case.m, device=device, dtype=decay_dtype or wide)
    return inputs, (grad_o, torch.randn(case.b, case.h, case.n).to(device, wide))


# ---- against the definition


@by_decay
@pytest.mark.parametrize("p, custom", [(1, True), (2, True), (2, False)], ids=["p1-custom", "p2-custom", "p2-autograd"])
@by_algorithm
def test_every_decay_in_float64(algorithm, p, custom, decay, device):
    """The call has two chunks, so that strong decays cross the boundary between them too."""
    inputs, grads = make(Case("", n=CHUNK + 20, h=2, hk=1, d=4, dv=3), decay, torch.float64, device)
    attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm, p=p)
    actual = assert_equals_definition(attention, partial(definition, causal=True, return_lse=True, p=p), inputs, grads)
    assert not actual["grad log_decay"][inputs["log_decay"].isinf()].any()


@in_turn("custom")
@pytest.mark.parametrize("size", SIZES)
@by_gradient
@by_algorithm
def test_sizes_in_float64(algorithm, custom, size, device):
    inputs, grads = make(SIZES[size], "none, ordinary or strong", torch.float64, device)
    attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
    assert_equals_definition(attention, partial(definition, causal=True, return_lse=True), inputs, grads)


OPTIONS = (
    "temperature",
    "coefficients",
    "p=1 coefficients",
    "normalize=token",
    "key padding",
    "noise",
    "sinusoidal",
    "everything",
)


@in_turn("custom")
@pytest.mark.parametrize("option", OPTIONS)
@by_gradient
@by_algorithm
def test_options_in_float64(algorithm, custom, option, device):
    inputs, grads = make(SMALL, "-inf at places", torch.float64, device)
    options = make_options(option, SMALL, torch.float64, device)
    attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
    assert_equals_definition(attention, partial(definition, causal=True, return_lse=True), inputs, grads, **options)


@by_gradient
@by_algorithm
def test_resets_before_the_queries(algorithm, custom, device):
    """A reset among the keys before all queries hides the earlier ones."""
    inputs, grads = make(SMALL, "ordinary", torch.float64, device)
    before = SMALL.m - SMALL.n
    inputs["log_decay"][:, 0, before - 3] = inputs["log_decay"][:, 1, before] = -math.inf
    attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
    assert_equals_definition(attention, partial(definition, causal=True, return_lse=True), inputs, grads)


@by_gradient
def test_rpe_tensor_in_float64(custom, device):
    inputs, grads = make(SMALL, "-inf at places", torch.float64, device)
    inputs["rpe_matrix"] = torch.randn(SMALL.n + SMALL.m - 1, SMALL.d, dtype=torch.float64).to(device)
    attention = partial(with_lse, use_custom_gradient=custom)
    assert_equals_definition(attention, partial(definition, causal=True, return_lse=True), inputs, grads)


@by_gradient
def test_queries_without_keys(custom, device):
    """One sequence is all padding and one begins with padding. Queries without keys have output and gradients 0, never NaN."""
    inputs, grads = make(SMALL, "-inf at places", torch.float64, device)
    mask = torch.ones(SMALL.b, SMALL.m, dtype=torch.bool, device=device)
    mask[0] = False
    mask[1, : SMALL.m - SMALL.n + 3] = False
    reference = partial(definition, causal=True, return_lse=True)
    for algorithm in ("quadratic", "linear"):
        attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
        actual = assert_equals_definition(attention, reference, inputs, grads, attention_mask=mask)
        assert actual["lse"][0].isneginf().all() and not actual["o"][0].any() and not actual["grad log_decay"][0].any()


@in_turn("custom")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@by_order
@by_gradient
@by_algorithm
def test_dtypes(algorithm, custom, p, dtype, device):
    case = SIZES["GQA, a chunk of keys and more before the queries"]
    inputs, (grad_o, _) = make(case, "ordinary", dtype, device)
    Expected(inputs, grad_o, causal=True, p=p).check(custom=custom, algorithm=algorithm)


@by_decay
@by_algorithm
def test_every_decay_in_float32(algorithm, decay, device):
    inputs, (grad_o, _) = make(Case("", n=CHUNK + 20, h=2, hk=1, d=8), decay, torch.float32, device)
    Expected(inputs, grad_o, causal=True).check(custom=True, algorithm=algorithm)


@by_decay
@by_gradient
def test_flash_in_float64(custom, decay, device):
    inputs, grads = make(SIZES["GQA, a chunk of keys and more before the queries"], decay, torch.float64, device)
    mask = torch.rand(2, inputs["k"].shape[2], device=device) > 0.3
    attention = partial(flash_with_lse, use_custom_gradient=custom)
    assert_equals_definition(attention, partial(naive_softmax_attention, causal=True), inputs, grads)
    assert_equals_definition(
        attention, partial(naive_softmax_attention, causal=True), inputs, grads, attention_mask=mask, scale=0.7
    )


class ExpectedDecayedFlash(ExpectedFlash):
    definition = staticmethod(lambda *args, hold_denominator=False, **options: naive_softmax_attention(*args, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@by_gradient
def test_flash_dtypes(custom, dtype, device):
    ExpectedDecayedFlash(*make(SMALL, "ordinary", dtype, device), causal=True).check(custom=custom)


# ---- what it means


@by_gradient
@pytest.mark.parametrize("attention", [with_lse, flash_with_lse], ids=["fastmax", "flash"])
def test_no_decay_is_no_decay(attention, custom, device):
    inputs, grads = make(SMALL, "none", torch.float32, device)
    attention = partial(attention, use_custom_gradient=custom)
    actual = run(attention, inputs, grads)
    del inputs["log_decay"]
    compare(actual, run(attention, inputs, grads))


@by_gradient
@pytest.mark.parametrize("attention", ["quadratic", "linear", "flash"])
def test_minus_infinity_starts_anew(attention, custom, device):
    """Tokens before -inf have no effect, and their gradients are 0."""
    inputs, grads = make(Case("", n=60, h=2, hk=1, d=8), "ordinary", torch.float64, device)
    inputs["log_decay"][:, :, 23] = -math.inf
    attention = flash_with_lse if attention == "flash" else partial(with_lse, algorithm=attention)
    attention = partial(attention, use_custom_gradient=custom)
    whole = run(attention, inputs, grads)
    for rows in (slice(0, 23), slice(23, 60)):
        part = {name: x[:, :, rows] for name, x in inputs.items()}
        part["log_decay"] = part["log_decay"].clamp(min=-1.0)  # of the first token: decays nothing that is there
        expected = run(attention, part, tuple(x[:, :, rows] for x in grads))
        compare({name: x[:, :, rows] for name, x in whole.items()}, expected)


@by_algorithm
def test_equal_scores_leave_the_decays(algorithm, device):
    """With q = 0 the weights are a0 times the decays, so the output is a mean weighted by decays."""
    inputs, grads = make(Case("", n=CHUNK + 30, h=2, hk=1, d=4), "ordinary", torch.float64, device)
    inputs["q"] = torch.zeros_like(inputs["q"])
    actual = assert_equals_definition(
        partial(with_lse, algorithm=algorithm), partial(definition, causal=True, return_lse=True), inputs, grads
    )
    total, rows = 0.0, []
    for x in inputs["log_decay"][0, 0].exp().tolist():
        total = total * x + 1.0
        rows.append(math.log(total))
    torch.testing.assert_close(actual["lse"][0, 0].cpu(), torch.tensor(rows, dtype=torch.float64))


def last_rows_exactly(inputs, rows, log_weight):
    """Returns the last `rows` queries of one head in float64, with the weight of each key from its own sum of decays."""
    q, k, v, log_decay = (inputs[name].double() for name in ("q", "k", "v", "log_decay"))
    s = q[:, :, -rows:] @ k.mT
    sums = log_decay.cumsum(-1)
    at = sums.shape[-1] - rows + torch.arange(rows, device=q.device)
    ahead = torch.arange(sums.shape[-1], device=q.device) > at[:, None]
    exponent = (sums[..., -rows:, None] - sums[..., None, :]).masked_fill(ahead, -math.inf)
    w = exponent.exp() * log_weight(s)
    z = w.sum(-1, keepdim=True)
    return (w @ v) / z, z.log().squeeze(-1)


def check_long(n, attention, log_weight, device, decay=-1e-6, tolerance=1e-5):
    """Checks a call whose values rise along the tokens, so that the output shows how much each token counts."""
    case = Case("", n=n, h=1, d=4, dv=2)
    inputs, grad_o = make_inputs(case, torch.float32, device)
    inputs["v"] = torch.linspace(0.0, 1.0, n, device=device)[None, None, :, None] + 0.1 * inputs["v"]
    inputs["log_decay"] = torch.full((1, 1, n), decay, device=device)
    rows, grad_lse = 5, torch.zeros(1, 1, n, device=device)
    grad_o[:, :, :-rows] = 0.0
    grad_lse[:, :, -rows:] = 1.0
    actual = run(attention, inputs, (grad_o, grad_lse))
    leaves = {name: x.double().requires_grad_() for name, x in inputs.items()}
    exact = last_rows_exactly(leaves, rows, log_weight)
    last = grad_o[:, :, -rows:].double(), grad_lse[:, :, -rows:].double()
    gradients = torch.autograd.grad(exact, list(leaves.values()), last)
    for name, x in zip(("o", "lse"), exact, strict=True):
        assert relative(actual[name][:, :, -rows:], x.detach()) <= tolerance, name
    for name, x in zip(leaves, gradients, strict=True):
        assert relative(actual[f"grad {name}"], x) <= 10 * tolerance, name


def taylor(s):
    return 1.0 + s + 0.5 * s * s


@by_gradient
def test_many_tokens_lose_no_digits(custom, device):
    check_long(2**14, partial(with_lse, algorithm="linear", use_custom_gradient=custom), taylor, device, decay=-1e-4)


def test_many_tokens_lose_no_digits_quadratic(device):
    check_long(3000, partial(with_lse, algorithm="quadratic"), taylor, device, decay=-1e-6)
    check_long(3000, partial(flash_with_lse, scale=1.0), torch.exp, device, decay=-1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("decay", [-1e-6, -1e-3])
def test_a_million_tokens_lose_no_digits(decay):
    check_long(2**20, partial(with_lse, algorithm="linear"), taylor, torch.device("cuda"), decay)


# ---- shapes, dtypes and strides of log_decay


@in_turn("custom")
@by_gradient
@by_algorithm
@pytest.mark.parametrize("layout", ["expanded over heads", "expanded over tokens", "token-major", "sliced"])
def test_strides(layout, algorithm, custom, device):
    case = Case("", n=40, b=2, h=4, hk=2, d=8)
    inputs, grads = make(case, device=device)
    dense = inputs["log_decay"]
    inputs["log_decay"] = {
        "expanded over heads": dense[:, :1].expand_as(dense),
        "expanded over tokens": dense[:, :, :1].expand_as(dense),
        "token-major": dense.mT.contiguous().mT,
        "sliced": torch.stack([dense, dense], dim=-1)[..., 1],
    }[layout]
    attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
    actual = run(attention, inputs, grads)
    compare(actual, run(attention, inputs | {"log_decay": inputs["log_decay"].contiguous()}, grads))
    flash = partial(flash_with_lse, use_custom_gradient=custom)
    compare(run(flash, inputs, grads), run(flash, inputs | {"log_decay": inputs["log_decay"].contiguous()}, grads))


@in_turn("custom")
@by_gradient
@pytest.mark.parametrize("decay_dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("attention", [with_lse, flash_with_lse], ids=["fastmax", "flash"])
def test_any_float_dtype(attention, decay_dtype, custom, device):
    """log_decay of any float dtype is widened before use, and its gradient has its own dtype."""
    inputs, grads = make(SMALL, device=device, decay_dtype=decay_dtype)
    attention = partial(attention, use_custom_gradient=custom)
    actual = run(attention, inputs, grads)
    assert actual["grad log_decay"].dtype == decay_dtype
    wide = run(attention, inputs | {"log_decay": inputs["log_decay"].float()}, grads)
    wide["grad log_decay"] = wide["grad log_decay"].to(decay_dtype)
    compare(actual, wide)


@by_gradient
@pytest.mark.parametrize("attention", [with_lse, flash_with_lse], ids=["fastmax", "flash"])
def test_three_dimensions(attention, custom, device):
    inputs, grads = make(SMALL, device=device)
    mask = torch.rand(SMALL.b, SMALL.m, device=device) > 0.2
    attention = partial(attention, use_custom_gradient=custom, attention_mask=mask)
    flat = run(attention, {name: x.flatten(0, 1) for name, x in inputs.items()}, tuple(x.flatten(0, 1) for x in grads))
    compare(flat, {name: x.flatten(0, 1) for name, x in run(attention, inputs, grads).items()})


@by_gradient
@by_algorithm
def test_only_log_decay_needs_a_gradient(algorithm, custom, device):
    inputs, grads = make(SMALL, device=device)
    attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
    expected = run(attention, inputs, grads)
    leaf = inputs["log_decay"].requires_grad_()
    o, lse = attention(**inputs)
    torch.autograd.backward((o, lse), grads)
    torch.testing.assert_close(leaf.grad, expected["grad log_decay"])
    q = inputs["q"].requires_grad_()
    o, lse = attention(**inputs | {"log_decay": leaf.detach()})
    torch.testing.assert_close(torch.autograd.grad((o, lse), q, grads)[0], expected["grad q"])


def test_inputs_are_never_written(device):
    inputs, grads = make(SMALL, "-inf at places", device=device)
    before = {name: x.clone() for name, x in inputs.items()}
    for attention in (with_lse, flash_with_lse):
        run(attention, inputs, grads)
    assert all(torch.equal(x, before[name]) for name, x in inputs.items())


@pytest.mark.parametrize("case", [Case("", n=0, b=2), Case("", n=5, b=0)], ids=["no tokens", "no batch"])
def test_empty(case, device):
    if case.n == 0:
        object.__setattr__(case, "m", 0)
    inputs, grads = make(case, device=device)
    for attention in (with_lse, flash_with_lse):
        actual = run(attention, inputs, grads)
        assert all(actual[f"grad {name}"].shape == x.shape for name, x in inputs.items())


@by_algorithm
def test_bitwise_repeatable(algorithm, device, several_threads):
    inputs, grads = make(Case("", n=CHUNK + 40, b=2, h=4, hk=2, d=16), device=device)
    first, second = (run(partial(with_lse, algorithm=algorithm), inputs, grads) for _ in range(2))
    assert all(torch.equal(x, second[name]) for name, x in first.items())


# ---- inside PyTorch


@pytest.mark.parametrize("algorithm, p", [("quadratic", 2), ("linear", 1)])
def test_opcheck(algorithm, p, device):
    inputs, grads = make(SMALL, device=device)
    log_decay = inputs.pop("log_decay")
    mask = torch.rand(SMALL.b, SMALL.m, device=device) > 0.3
    rest = (mask, None, None, log_decay, None, None, None, 0.5, 1.0, 1.0, 0.5, p, True, 0.0, algorithm, False)
    opcheck("", inputs, grads, *rest)


def test_opcheck_flash(device):
    inputs, grads = make(SMALL, device=device)
    log_decay = inputs.pop("log_decay")
    opcheck("flash_", inputs, grads, None, log_decay, None, None, None, 0.5, True, -1, -1, False)


@pytest.mark.parametrize("attention", [with_lse, flash_with_lse], ids=["fastmax", "flash"])
def test_compile(attention, device, fresh_dynamo):
    check_compiled(attention, *make(SMALL, "-inf at places", device=device))


def test_compile_dynamic_is_one_graph_for_all_lengths(device, fresh_dynamo):
    check_one_graph_for_all_lengths(with_lse, lambda n: (*make(Case("", n=n, d=4), device=device), {}))


@by_gradient
@pytest.mark.parametrize("attention", [with_lse, flash_with_lse], ids=["fastmax", "flash"])
def test_autocast_leaves_log_decay(attention, custom, device):
    """Autocast casts q, k, v to bfloat16 and leaves log_decay as it is."""
    inputs, (grad_o, grad_lse) = make(SMALL, device=device)
    inputs["log_decay"] *= 1.001  # no number of bfloat16
    grads = grad_o.bfloat16(), grad_lse
    attention = partial(attention, use_custom_gradient=custom)
    half = {name: x.bfloat16() if name in "qkv" else x for name, x in inputs.items()}
    expected = run(attention, half, grads)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    with torch.autocast(device.type, torch.bfloat16):
        o, lse = attention(**leaves)
    assert torch.equal(o, expected["o"]) and torch.equal(lse, expected["lse"])
    torch.autograd.backward((o, lse), grads)
    for name, x in leaves.items():
        assert torch.equal(x.grad, expected[f"grad {name}"].float()), name


@by_gradient
@by_reentrant
def test_activation_checkpointing(reentrant, custom, device):
    inputs, grads = make(SMALL, "-inf at places", device=device)
    for attention in (with_lse, flash_with_lse):
        check_checkpointing(partial(attention, use_custom_gradient=custom), inputs, grads, reentrant)


@by_algorithm
def test_torch_func_and_second_derivatives_by_autograd(algorithm, device):
    inputs, _ = make(TINY, "ordinary", torch.float64, device)
    attention = partial(fastmax_attention, causal=True, algorithm=algorithm, use_custom_gradient=False)

    def loss(log_decay):
        return attention(**inputs | {"log_decay": log_decay}).square().sum()

    leaf = inputs["log_decay"].clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(leaf.detach()), torch.autograd.grad(loss(leaf), leaf)[0])
    assert gradgradcheck(lambda log_decay: attention(**inputs | {"log_decay": log_decay}), leaf)


class Names(TorchDispatchMode):
    """Collects the names of operators of fastmax."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "fastmax":
            self.seen.append(operator._schema.name)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "attention, prefix",
    [
        (partial(fastmax_attention, algorithm="linear"), ""),
        (partial(fastmax_attention, algorithm="quadratic"), ""),
        (partial(fastmax_attention, algorithm="linear", exact_window=5), "exact_window_"),
        (partial(fastmax_attention, algorithm="quadratic", exact_window=5), "exact_window_"),
        (flash_attention, "flash_"),
    ],
    ids=["linear", "quadratic", "linear, exact window", "quadratic, exact window", "softmax"],
)
def test_the_gradient_of_a_decay_is_not_computed_where_nothing_wants_it(attention, prefix, device):
    inputs, (grad_o, _) = make(SMALL, "ordinary", device=device)

    def gradients(of_decay: bool):
        leaves = {name: x.detach().requires_grad_(name != "log_decay" or of_decay) for name, x in inputs.items()}
        o = attention(**leaves, causal=True)
        with Names() as names:
            grads = torch.autograd.grad(o, [leaves[name] for name in "qkv"], grad_o)
        return grads, names.seen[0]

    expected, with_decay = gradients(of_decay=True)
    actual, without = gradients(of_decay=False)
    assert (with_decay, without) == (f"fastmax::{prefix}backward", f"fastmax::{prefix}backward_qkv")
    for name, x, y in zip("qkv", actual, expected, strict=True):
        torch.testing.assert_close(x, y, msg=name)


def test_second_derivative_of_the_custom_gradient_is_refused(device):
    inputs, _ = make(TINY, "ordinary", torch.float64, device)
    leaf = inputs["log_decay"].requires_grad_()
    grad = torch.autograd.grad(fastmax_attention(**inputs, causal=True).square().sum(), leaf, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="use_custom_gradient=False"):
        torch.autograd.grad(grad.sum(), leaf)


# ---- refused


def log_decay(*shape, **options):
    return torch.zeros(*shape, **options)


REFUSED = {
    "without causal": (log_decay(2, 2, 7), {"causal": False}, ValueError, "log_decay.*causal"),
    "no tensor": (0.5, {}, TypeError, "log_decay must.*0.5"),
    "of query heads": (log_decay(2, 4, 7), {}, ValueError, r"log_decay must.*\(2, 2, 7\).*\(2, 4, 7\)"),
    "of queries": (log_decay(2, 2, 5), {}, ValueError, r"log_decay must.*\(2, 2, 7\).*\(2, 2, 5\)"),
    "per channel": (log_decay(2, 2, 7, 8), {}, ValueError, r"log_decay must.*\(2, 2, 7\).*\(2, 2, 7, 8\)"),
    "to be broadcast": (log_decay(1, 1, 7), {}, ValueError, r"log_decay must.*\(2, 2, 7\).*\(1, 1, 7\)"),
    "of integers": (log_decay(2, 2, 7, dtype=torch.int32), {}, TypeError, "log_decay must.*int32"),
    "of bools": (log_decay(2, 2, 7, dtype=torch.bool), {}, TypeError, "log_decay must.*bool"),
    "complex": (log_decay(2, 2, 7, dtype=torch.complex64), {}, TypeError, "log_decay must.*complex64"),
    "elsewhere": (log_decay(2, 2, 7, device="meta"), {}, ValueError, "log_decay must.*device.*meta"),
    "sparse": (log_decay(2, 2, 7).to_sparse(), {}, TypeError, "log_decay must.*dense"),
}


@in_turn("custom")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("attention", [fastmax_attention, flash_attention], ids=["fastmax", "flash"])
@by_gradient
def test_refused(attention, custom, name):
    value, options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        attention(**good(), **{"causal": True, "log_decay": value, "use_custom_gradient": custom} | options)


def test_three_dimensions_take_a_decay_of_two():
    flat = {name: x.flatten(0, 1) for name, x in good().items()}
    assert fastmax_attention(**flat, causal=True, log_decay=log_decay(4, 7)).shape == (8, 5, 6)
    with pytest.raises(ValueError, match=r"log_decay must.*\(4, 7\).*\(2, 2, 7\)"):
        fastmax_attention(**flat, causal=True, log_decay=log_decay(2, 2, 7))


# ---- denormal numbers, which a CPU multiplies a hundred times slower


@pytest.mark.parametrize("exp, least", [(exp_of_decayed, {4: -80.0, 8: -701.0}), (exp_of_relative, {4: -64.0, 8: -64.0})])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exp_of_weights_has_no_denormal_numbers(exp, least, in_place, dtype):
    least = least[dtype.itemsize]
    x = torch.cat((torch.linspace(1.1 * least, 0.0, 1001, dtype=dtype), torch.tensor([-1e4, -torch.inf], dtype=dtype)))
    y, exact = exp(x.clone(), in_place), x.exp()
    assert torch.equal(y[x > least + 1.0], exact[x > least + 1.0])
    assert not y[x < least - 1.0].any()
    assert y[y > 0].min() > 100.0 * torch.finfo(dtype).tiny
    assert exp(torch.tensor([torch.nan], dtype=dtype), in_place).isnan()


# ---- keys that have decayed to nothing


@pytest.mark.parametrize("custom", [True, False], ids=["analytic", "autograd"])
@pytest.mark.parametrize("algorithm", ["quadratic", "linear"])
@pytest.mark.parametrize(
    "dtype, least, gone", [(torch.float32, -69.0, (-70.0, -79.0, -85.0)), (torch.float64, -690.0, (-691.0, -700.0, -705.0))]
)
def test_a_query_that_sees_decayed_keys_alone(dtype, least, gone, algorithm, custom):
    """The query's own key is padding. While the sum of the weights is at least 2^-100, the output is the definition's, which
    does not depend on a common factor; below, no key is seen. Large gradients stay finite in between."""
    q, k, v = (0.1 * torch.randn(1, 2, 2, 8, dtype=dtype) for _ in range(3))
    mask = torch.tensor([[True, False]])

    def outputs(last, **options):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        log_decay = torch.tensor([0.0, last], dtype=dtype).expand(1, 2, 2).clone().requires_grad_()
        options |= {"attention_mask": mask, "log_decay": log_decay, "algorithm": algorithm, "use_custom_gradient": custom}
        o, lse = fastmax_attention(*leaves, causal=True, return_lse=True, **options)
        grads = torch.autograd.grad((65536.0 * o).sum(), [*leaves, log_decay])
        assert all(x.isfinite().all() for x in grads), last
        return o[:, :, 1], lse[:, :, 1]

    o, lse = outputs(least)
    torch.testing.assert_close(o, v[:, :, 0])  # the only key
    torch.testing.assert_close(lse, least + (1 + (s := (q[:, :, 1] * k[:, :, 0]).sum(-1)) + s * s / 2).log())
    for last in gone:
        o, lse = outputs(last)
        assert not o.any() and lse.isneginf().all()
        # One pass over tiles, as in softmax attention, weighs keys relative to the largest weight.
        expected = v[:, :, 0] if algorithm == "quadratic" and custom else torch.zeros_like(o)
        torch.testing.assert_close(outputs(last, exact_window=1)[0], expected)


# ---- values that are no logarithms of a factor up to 1


def assert_same_but_for_nan(actual, expected):
    """Checks that NaN is in the same places, and that all other numbers, infinities too, equal those of float64."""
    assert torch.equal(actual.isnan(), expected.isnan())
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@in_turn("custom")
@by_gradient
@pytest.mark.parametrize("option", ["plain", "key padding", "packed", "fewer queries"])
@pytest.mark.parametrize("window", [0, 9])
@by_algorithm
def test_values_above_zero_and_nan(algorithm, window, option, custom):
    """A row is NaN only if it sees a key before a NaN, so other packed sequences are not. Values above 0 count as 0 and have
    gradient 0."""
    n = CHUNK + 67
    case = Case("", n=n - 90 * (option == "fewer queries"), m=n, b=1, h=4, hk=2, d=4, dv=3)
    inputs, grads = make(case, dtype=torch.float64)
    inputs["log_decay"] = make_odd_decay(1, 2, n)
    options = {"exact_window": window, "causal": True, "return_lse": True}
    if option == "key padding":
        options["attention_mask"] = torch.rand(1, n) < 0.3
    if option == "packed":
        options["cu_seqlens"] = torch.tensor([0, 1, 50, 50, CHUNK + 3, n], dtype=torch.int32)
    expected = definition(**inputs, **options)
    assert 0 < expected[0].isnan().sum() < expected[0].numel()
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    actual = fastmax_attention(**leaves, algorithm=algorithm, use_custom_gradient=custom, **options)
    for x, y in zip(actual, expected, strict=True):
        assert_same_but_for_nan(x.detach(), y.detach())
    gradient = torch.autograd.grad(actual, leaves["log_decay"], grads)[0]
    assert not gradient[leaves["log_decay"] > 0].any()


@by_gradient
@pytest.mark.parametrize("window", [None, 2, 30, 300])
def test_values_above_zero_and_nan_in_flash_attention(window, custom):
    """A NaN that has left the window, with all keys before it, is of no effect."""
    inputs, _ = make(Case("", n=300, m=340, b=2, h=4, hk=2, d=4, dv=3), dtype=torch.float64)
    inputs["log_decay"] = make_odd_decay(2, 2, 340)
    options = {"window": window, "attention_mask": torch.rand(2, 340) < 0.5, "causal": True}
    expected = naive_softmax_attention(**inputs, **options)
    assert 0 < expected[0].isnan().sum() < expected[0].numel()
    for x, y in zip(flash_attention(**inputs, use_custom_gradient=custom, return_lse=True, **options), expected, strict=True):
        assert_same_but_for_nan(x, y)


@by_gradient
@by_algorithm
def test_gradients_of_values_above_zero(algorithm, custom):
    """Values above 0 have a gradient of exactly 0. All other values have the gradient of a call with 0 in the place of
    those."""
    inputs, grads = make(SIZES["chunks and a ragged one"], dtype=torch.float64)
    given = make_odd_decay(*inputs["log_decay"].shape).nan_to_num(nan=-0.1, posinf=math.inf, neginf=-math.inf)
    attention = partial(with_lse, algorithm=algorithm, use_custom_gradient=custom)
    actual = run(attention, inputs | {"log_decay": given}, grads)
    is_above = given > 0
    expected = run(
        partial(definition, causal=True, return_lse=True), inputs | {"log_decay": given.masked_fill(is_above, 0.0)}, grads
    )
    gradient = expected["grad log_decay"]
    assert gradient[given == 0].abs().min() > 0
    expected["grad log_decay"] = gradient.masked_fill(is_above, 0.0)
    assert not actual["grad log_decay"][is_above].any()
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-8, atol=1e-9)


@by_gradient
@by_algorithm
def test_long_sums_of_values_above_zero(algorithm, custom):
    """Jumps of 16 over 8192 tokens and 600 tokens of 0.3 have sums whose exponentials would overflow."""
    for n, log_decay in (
        (8192 if algorithm == "linear" else 2048, 32 * torch.rand(1, 1, 8192) - 16),
        (600, torch.full((1, 1, 600), 0.3)),
    ):
        inputs, grads = make(Case("", n=n, h=1, hk=1, d=4))
        log_decay = log_decay[..., :n]
        attention = partial(with_lse, algorithm=algorithm, use_custom_gradient=custom)
        actual = run(attention, inputs | {"log_decay": log_decay}, grads)
        expected = run(attention, inputs | {"log_decay": log_decay.clamp(max=0.0)}, grads)
        expected["grad log_decay"] = expected["grad log_decay"].masked_fill(log_decay > 0, 0.0)
        for name, x in actual.items():
            assert x.isfinite().all(), name
            assert torch.equal(x, expected[name]), name


@in_turn("flush_interval")
@pytest.mark.parametrize("form", ["step", "step, recorded", "step_", "step_ and prefill", "prefill in parts"])
@pytest.mark.parametrize("flush_interval", [1, 8])
@pytest.mark.parametrize("window, padding", [(0, False), (5, True), (30, False)])
def test_values_above_zero_and_nan_in_states(padding, window, flush_interval, form):
    """Outputs equal those of one call on the real tokens. A NaN at the first token, where the state is empty, has no effect."""
    n = 70
    inputs, _ = make(Case("", n=n, b=2, h=4, hk=2, d=4, dv=3), dtype=torch.float64)
    inputs["log_decay"] = make_odd_decay(2, 2, n, underflows=True)
    mask = torch.rand(2, n) < 0.5 if padding else torch.ones(2, n, dtype=torch.bool)
    expected = torch.zeros(2, 4, n, 3, dtype=torch.float64)
    for entry, taken in enumerate(mask):
        alone = {name: x[entry : entry + 1, :, taken] for name, x in inputs.items()}
        expected[entry : entry + 1, :, taken] = definition(**alone, causal=True, exact_window=window)
    assert 0 < expected.isnan().sum() < expected.numel()
    lengths = {"prefill": [n], "prefill in parts": [20, 1, 30, 19], "step_ and prefill": [1] * 12 + [21] + [1] * 37}.get(
        form, [1] * n
    )
    state = fastmax.decoding.init_state(2, 2, 4, 3, dtype=torch.float64, exact_window=window, flush_interval=flush_interval)
    inputs["log_decay"].requires_grad_(form == "step, recorded")
    outputs, start = [], 0
    for length in lengths:
        token = [x[:, :, start : start + length] for x in inputs.values()]
        accompanying = {"log_decay": token.pop()}
        if padding:
            accompanying["attention_mask"] = mask[:, start : start + length]
        start += length
        if length == 1 and form.startswith("step_"):
            o = fastmax.decoding.step_(*token, state, **accompanying)
        elif length == 1 and form.startswith("step"):
            o, state = fastmax.decoding.step(*token, state, **accompanying)
        else:
            o, state = fastmax.decoding.prefill(*token, state, **accompanying)
        outputs.append(o)
    o = torch.cat(outputs, dim=2)
    assert_same_but_for_nan(o.detach().where(mask[:, None, :, None], 0.0), expected.detach())
    if form == "step, recorded":
        gradient = torch.autograd.grad(o[o.isfinite()].sum(), inputs["log_decay"])[0]
        assert not gradient[inputs["log_decay"] > 0].any()


@pytest.mark.parametrize("window", [0, 9])
def test_nan_stays_in_its_packed_sequence_of_prefill(window):
    inputs, _ = make(Case("", n=200, h=2, hk=2, d=4, dv=3), dtype=torch.float64)
    inputs["log_decay"] = make_odd_decay(1, 2, 200)
    cu_seqlens = torch.tensor([0, 20, 20, 150, 200], dtype=torch.int32)
    expected = definition(**inputs, causal=True, exact_window=window, cu_seqlens=cu_seqlens)
    state = fastmax.decoding.init_state(4, 2, 4, 3, dtype=torch.float64, exact_window=window)
    o, _ = fastmax.decoding.prefill(*list(inputs.values())[:3], state, log_decay=inputs["log_decay"], cu_seqlens=cu_seqlens)
    assert_same_but_for_nan(o, expected)


@pytest.mark.parametrize("form", [fastmax.decoding.step, fastmax.decoding.prefill])
def test_a_state_of_nan_is_forgotten(form):
    """A reset (-inf) after a NaN hides it together with the keys before it."""
    inputs, _ = make(Case("", n=4, h=2, hk=2, d=4, dv=3), dtype=torch.float64)
    inputs["log_decay"] = torch.tensor([-0.1, math.nan, -math.inf, -0.1], dtype=torch.float64).expand(1, 2, 4)
    expected = definition(**inputs, causal=True)
    q, k, v, log_decay = inputs.values()
    _, state = fastmax.decoding.prefill(
        q[:, :, :2],
        k[:, :, :2],
        v[:, :, :2],
        fastmax.decoding.init_state(1, 2, 4, 3, dtype=torch.float64),
        log_decay=log_decay[..., :2],
    )
    assert state.kv_state.isnan().all() and state.k_sum.isnan().all()
    o, state = form(q[:, :, 2:3], k[:, :, 2:3], v[:, :, 2:3], state, log_decay=log_decay[..., 2:3])
    torch.testing.assert_close(o, expected[:, :, 2:3])
    torch.testing.assert_close(
        fastmax.decoding.prefill(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], state, log_decay=log_decay[..., 3:])[0],
        expected[:, :, 3:],
    )
