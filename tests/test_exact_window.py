"""`exact_window`: the nearest keys are weighed by exp(s) in place of the polynomial, with a common denominator."""

import math
from functools import partial

import pytest
import torch
from common import (
    CHUNK,
    DTYPES,
    Case,
    Expected,
    Memory,
    assert_equals_definition,
    by_algorithm,
    by_causal,
    by_gradient,
    check_checkpointing,
    check_compiled,
    check_one_graph_for_all_lengths,
    compare,
    definition,
    dtype_id,
    in_turn,
    make_decay,
    make_inputs,
    make_options,
    opcheck,
    relative,
    run,
)
from test_validation import good
from torch.autograd import gradgradcheck

from fastmax import eager, fastmax_attention, flash_attention
from fastmax.core.call import Call
from fastmax.ops import sequences

SMALL = Case("small", n=24, m=30, b=2, h=4, hk=2, d=8, dv=6)
LONG = Case("", n=100, m=CHUNK + 40, h=2, hk=1, d=8, dv=6)
TINY = Case("tiny", n=5, m=6, b=1, h=2, hk=1, d=3, dv=2)

with_lse = partial(fastmax_attention, return_lse=True)
reference = partial(definition, return_lse=True)
by_reentrant = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def make(case, dtype=torch.float32, device="cpu"):
    inputs, grad_o = make_inputs(case, dtype, device)
    return inputs, (
        grad_o,
        torch.randn(case.b, case.h, case.n).to(device, torch.float64 if dtype == torch.float64 else torch.float32),
    )


WINDOWS = (0, 1, 2, 63, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1, LONG.n, LONG.m - 1, LONG.m, LONG.m + 1, 10**6)


@pytest.mark.parametrize("window", WINDOWS)
@by_causal
@by_gradient
@by_algorithm
def test_every_window_in_float64(algorithm, custom, causal, window, device):
    inputs, grads = make(LONG, torch.float64, device)
    attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
    options = {"causal": causal, "exact_window": window, "temperature": 0.4}
    assert_equals_definition(attention, reference, inputs, grads, **options)


OPTIONS = ("temperature", "coefficients", "p=1", "p=1 coefficients", "no constant term", "normalize=sequence", "key padding",
           "noise", "sinusoidal", "everything")  # fmt: skip


@in_turn("causal")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("decay", [False, True], ids=["plain", "decay"])
@by_causal
@by_gradient
@by_algorithm
def test_options_in_float64(algorithm, custom, causal, decay, option, device):
    inputs, grads = make(SMALL, torch.float64, device)
    options = make_options(option, SMALL, torch.float64, device) | {"causal": causal, "exact_window": 5}
    if decay:
        if not causal:
            pytest.skip("decay is causal")
        inputs["log_decay"] = make_decay("-inf at places", 2, 2, SMALL.m, dtype=torch.float64, device=device)
    attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
    assert_equals_definition(attention, reference, inputs, grads, **options)


@pytest.mark.parametrize("decay", ["none", "weak", "strong", "none, ordinary or strong", "-inf everywhere"])
@by_gradient
@by_algorithm
def test_decays_in_float64(algorithm, custom, decay, device):
    inputs, grads = make(LONG, torch.float64, device)
    inputs["log_decay"] = make_decay(decay, 1, 1, LONG.m, dtype=torch.float64, device=device)
    attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
    assert_equals_definition(attention, reference, inputs, grads, causal=True, exact_window=20)


@pytest.mark.parametrize("decay", [None, "ordinary", "none, ordinary or strong", "-inf at places"])
@pytest.mark.parametrize("masked", [False, True])
def test_parts_of_the_quadratic_algorithm(masked, decay, device, monkeypatch):
    """A GPU computes float64 by parts, a CPU in one pass."""
    monkeypatch.setattr(sequences, "_takes_one_pass", lambda *call: False)
    inputs, grads = make(LONG, torch.float64, device)
    options = {"causal": True, "exact_window": 20}
    if decay is not None:
        inputs["log_decay"] = make_decay(decay, 1, 1, LONG.m, dtype=torch.float64, device=device)
    if masked:
        options["attention_mask"] = torch.rand(1, LONG.m, device=device) > 0.5
    assert_equals_definition(partial(with_lse, algorithm="quadratic"), reference, inputs, grads, **options)


@by_causal
@by_gradient
@by_algorithm
def test_queries_without_local_or_global_or_any_keys(algorithm, custom, causal, device):
    inputs, grads = make(Case("", n=40, b=3, h=2, hk=1, d=4), torch.float64, device)
    mask = torch.ones(3, 40, dtype=torch.bool, device=device)
    mask[0] = False
    mask[1, 8:] = False  # later queries have no near key
    mask[2, :30] = False  # causal: the first queries have no key
    attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
    options = {"causal": causal, "exact_window": 6, "attention_mask": mask}
    actual = assert_equals_definition(attention, reference, inputs, grads, **options)
    assert actual["lse"][0].isneginf().all() and actual["lse"][1].isfinite().any()


@in_turn("p, custom")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@by_causal
@pytest.mark.parametrize("p, custom", [(1, True), (2, True), (2, False)], ids=["p1-custom", "p2-custom", "p2-autograd"])
@by_algorithm
def test_dtypes(algorithm, p, custom, causal, dtype, device):
    inputs, (grad_o, _) = make(LONG, dtype, device)
    Expected(inputs, grad_o, causal=causal, p=p, exact_window=50).check(custom=custom, algorithm=algorithm)


@in_turn("custom")
@by_causal
@by_gradient
@by_algorithm
def test_no_window_changes_no_bit(algorithm, custom, causal, device):
    inputs, grads = make(SMALL, device=device)
    attention = partial(with_lse, causal=causal, use_custom_gradient=custom, algorithm=algorithm)
    plain = run(attention, inputs, grads)
    assert all(torch.equal(x, plain[name]) for name, x in run(attention, inputs, grads, exact_window=0).items())


@in_turn("custom")
@pytest.mark.parametrize("window", [SMALL.m, 10**6])
@by_causal
@by_gradient
@by_algorithm
@pytest.mark.parametrize("decay", [False, True], ids=["plain", "decay"])
def test_a_window_over_everything_is_softmax(decay, algorithm, custom, causal, window, device):
    inputs, grads = make(SMALL, device=device)
    if decay and causal:
        inputs["log_decay"] = make_decay("ordinary", 2, 2, SMALL.m, device=device)
    fastmax = partial(with_lse, temperature=0.3, exact_window=window, algorithm=algorithm)
    softmax = partial(flash_attention, scale=1.0 / 0.3, return_lse=True)
    shared = {"causal": causal, "use_custom_gradient": custom}
    compare(run(fastmax, inputs, grads, **shared), run(softmax, inputs, grads, **shared))


# ---- scores that overflow


SCORES = {
    "300": lambda x: torch.full_like(x, 300.0),
    "-300": lambda x: torch.full_like(x, -300.0),
    "300 and -300": lambda x: torch.where(x < 0.5, -300.0, 300.0),
    "-300 to 300": lambda x: 600.0 * x - 300.0,
}


@in_turn("dtype")
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=dtype_id)
@by_causal
@by_gradient
@by_algorithm
def test_scores_of_hundreds(algorithm, custom, causal, dtype, scores, device):
    """exp(300) is infinite in float32 and exp(-300) is 0. The sums of both kinds of weights must be neither."""
    inputs, grads = make(Case("", n=50, h=1, d=2), dtype, device)
    inputs["q"] = torch.tensor([1.0, 0.1], device=device, dtype=dtype).expand_as(inputs["q"]).contiguous()
    inputs["k"][..., 0] = SCORES[scores](torch.rand(1, 1, 50, dtype=torch.float64)).to(device, dtype)
    options = {"causal": causal, "exact_window": 8}
    attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
    exact = run(reference, *({name: x.double() for name, x in inputs.items()}, tuple(x.double() for x in grads)), **options)
    actual = run(attention, inputs, grads, **options)
    incoming = grads[0].double().norm().item()
    for name, x in exact.items():
        assert actual[name].isfinite().all(), name
        # The gradient of q is that of a score times keys of 300, and a score of 300 in float32 is right to 1e-5.
        size = max(x.norm().item(), incoming * (300.0 if name == "grad q" else 1.0))
        error = (actual[name].double() - x).norm().item()
        assert error <= (1e-9 if dtype == torch.float64 else 2e-4) * size, (name, error, size)


@by_gradient
@by_algorithm
def test_first_queries_that_see_only_scores_of_minus_hundreds(algorithm, custom, device):
    """The log of their sums must be -300 and not -inf, and the output the mean of the values."""
    v = torch.randn(1, 1, 20, 3, device=device)
    q, k = torch.ones(1, 1, 20, 1, device=device), torch.full((1, 1, 20, 1), -300.0, device=device)
    o, lse = with_lse(q, k, v, causal=True, exact_window=20, use_custom_gradient=custom, algorithm=algorithm)
    count = torch.arange(1.0, 21.0, device=device)
    torch.testing.assert_close(lse[0, 0], -300.0 + count.log())
    torch.testing.assert_close(o[0, 0], v[0, 0].cumsum(0) / count[:, None])


@by_causal
@by_algorithm
def test_scores_of_hundreds_beyond_the_window_are_the_polynomial(algorithm, causal, device):
    """Global keys with scores of 300 weigh f(300) = 45301, against local ones of exp(5)."""
    inputs, grads = make(Case("", n=60, h=1, d=1, dv=3), torch.float64, device)
    inputs["q"] = torch.ones_like(inputs["q"])
    inputs["k"] = torch.where(torch.arange(60, device=device)[:, None] < 10, 300.0, 5.0).expand(1, 1, 60, 1).double()
    actual = assert_equals_definition(
        partial(with_lse, algorithm=algorithm), reference, inputs, grads, causal=causal, exact_window=4
    )
    far = math.log(10 * (1.0 + 300.0 + 45000.0) + 46 * (1.0 + 5.0 + 12.5) + 4 * math.exp(5.0))
    torch.testing.assert_close(actual["lse"][0, 0, -1].item(), far, rtol=1e-12, atol=0.0)


@by_gradient
@by_algorithm
def test_first_queries_of_a_global_part_that_see_none_of_it(algorithm, custom, device):
    """Their local scores of -300 have weights that add up to 0 in float32. All their global keys are hidden, so the global sum
    must not be divided by that 0."""
    inputs, grads = make(Case("", n=40, h=2, hk=1, d=2), device=device)
    inputs["q"] = torch.tensor([1.0, 0.01], device=device).expand_as(inputs["q"]).contiguous()
    inputs["k"][..., 0] = torch.where(torch.arange(40, device=device) < 30, -300.0, 1.0)
    mask = torch.arange(40, device=device)[None] >= 12
    options = {"causal": True, "exact_window": 8, "attention_mask": mask}
    wide = {name: x.double() for name, x in inputs.items()}, tuple(x.double() for x in grads)
    exact = run(reference, *wide, **options)
    actual = run(partial(with_lse, use_custom_gradient=custom, algorithm=algorithm), inputs, grads, **options)
    assert actual["lse"][..., 12:20].lt(-290.0).all() and actual["lse"][..., :12].isneginf().all()
    for name, x in exact.items():
        y, seen = actual[name].double(), x.isfinite()
        size = max(x[seen].norm().item(), grads[0].norm().item() * (300.0 if name == "grad q" else 1.0))
        assert torch.equal(y.isfinite(), seen) and (y[seen] - x[seen]).norm().item() <= 1e-4 * size, name


# ---- decays between a query and its global keys


@pytest.mark.parametrize("decay", [0.0, -1e-3, -50.0, -200.0])
@pytest.mark.parametrize("hidden", ["none", "near", "far"])
@by_gradient
@by_algorithm
def test_a_decay_across_the_window(algorithm, custom, hidden, decay, device):
    """One token decays strongly. If the local keys are hidden, the small remainder of the global keys is the whole sum."""
    inputs, grads = make(Case("", n=40, m=43, h=2, hk=1, d=3), torch.float64, device)
    token = torch.arange(43, device=device)
    inputs["log_decay"] = torch.where(token == 24, decay, -0.05).double().expand(1, 1, 43)
    hides = {"none": token < 0, "near": (token >= 9) & (token < 40), "far": token <= 26}
    options = {"causal": True, "exact_window": 8, "attention_mask": ~hides[hidden][None]}
    attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
    assert_equals_definition(attention, reference, inputs, grads, **options)


@pytest.mark.parametrize("at", [20, 21])
@by_gradient
@by_algorithm
def test_resets_at_the_border_of_the_window(algorithm, custom, at, device):
    """Later queries are at every distance from the reset, so that it hides none, some or all of their global keys."""
    inputs, grads = make(Case("", n=40, h=4, hk=2, d=3), torch.float64, device)
    decay = -0.1 * torch.rand(1, 2, 40, dtype=torch.float64)
    decay[:, 0, at] = decay[:, 1, 5] = decay[:, 1, 13] = -math.inf
    inputs["log_decay"] = decay.to(device)
    attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
    assert_equals_definition(attention, reference, inputs, grads, causal=True, exact_window=8)


def run_with_one_decay(decay, device):
    """Returns exact and float32 results where the last 10 of 50 queries see global keys alone, which have this decay."""
    inputs, grads = make(Case("", n=50, h=2, hk=1, d=3), device=device)
    grads[0][:, :, :40], grads[1][..., :40] = 0.0, 0.0
    token = torch.arange(50, device=device)
    inputs["log_decay"] = torch.where(token == 20, decay, -0.01).expand(1, 1, 50)
    options = {"causal": True, "exact_window": 30, "attention_mask": token[None] < 10}
    wide = {name: x.double() for name, x in inputs.items()}, tuple(x.double() for x in grads)
    return run(reference, *wide, **options), run(partial(with_lse, algorithm="linear"), inputs, grads, **options)


def test_float32_keeps_its_digits_with_a_long_decay(device):
    """The logs of the sums are -60, so their exponential functions, which the backward divides by, are right to 1e-5."""
    exact, actual = run_with_one_decay(-60.0, device)
    assert exact["lse"][..., 40:].lt(-55.0).all()
    for name, rows in {"o": 40, "grad q": 40, "grad k": 0, "grad v": 0, "grad log_decay": 0}.items():
        assert relative(actual[name][..., rows:, :], exact[name][..., rows:, :]) <= 1e-5, name


def test_fully_decayed_global_keys_count_as_none(device):
    """exp(-4000) is 0. These queries have no keys then, and nothing is NaN."""
    _, actual = run_with_one_decay(-4000.0, device)
    assert (actual["o"][:, :, 40:] == 0).all() and (actual["lse"][..., 40:] == -math.inf).all()
    for name, x in actual.items():
        assert name in ("o", "lse") or (x == 0).all(), name


def test_rounding_does_not_flow_to_tokens_long_before():
    """The gradient of a thousand earlier decays is the difference of two equal sums, one over queries and one over keys. Their
    rounding errors must cancel."""
    inputs, grads = make(Case("", n=59, m=1100, b=3, h=1, d=32))
    inputs["log_decay"] = make_decay("ordinary", 3, 1, 1100)
    options = {"causal": True, "exact_window": 3, "temperature": 6.6}
    wide = {name: x.double() for name, x in inputs.items()}, tuple(x.double() for x in grads)
    exact = run(reference, *wide, **options)["grad log_decay"]
    error = run(partial(with_lse, algorithm="linear"), inputs, grads, **options)["grad log_decay"] - exact
    assert error.norm() <= 6e-7 * exact.norm() and error[..., :900].norm() <= 1e-7 * exact.norm()


# ---- what is asked of one of the outputs alone, and of how tensors lie


@in_turn("custom")
@pytest.mark.parametrize("output", [0, 1], ids=["o", "lse"])
@by_causal
@by_gradient
@by_algorithm
def test_gradient_of_one_output(algorithm, custom, causal, output, device):
    inputs, grads = make(SMALL, torch.float64, device)
    if causal:
        inputs["log_decay"] = make_decay("ordinary", 2, 2, SMALL.m, dtype=torch.float64, device=device)

    def one(attention):
        return lambda v, **options: attention(v=v, **options)[output] + 0.0 * v.sum()  # of which lse is no function

    attention = one(partial(with_lse, use_custom_gradient=custom, algorithm=algorithm))
    assert_equals_definition(attention, one(reference), inputs, grads[output], causal=causal, exact_window=7)


@pytest.mark.parametrize("layout", ["token-major", "packed qkv", "transposed"])
@by_causal
def test_any_strides(causal, layout, device):
    """Strides of q, k, v and of the incoming gradients do not matter."""
    inputs, _ = make_inputs(Case("", n=30, b=2, h=2, d=8), device=device, layout=layout)
    attention = partial(with_lse, causal=causal, exact_window=6)
    dense = {name: x.contiguous() for name, x in inputs.items()}
    turned = torch.randn(8, 30, 2, 2, device=device).permute(2, 3, 1, 0), torch.randn(30, 2, 2, device=device).permute(1, 2, 0)
    for grads in (turned, (torch.ones((), device=device).expand(2, 2, 30, 8), torch.ones((), device=device).expand(2, 2, 30))):
        compare(run(attention, inputs, grads), run(attention, dense, tuple(x.contiguous() for x in grads)))


@by_causal
def test_tensors_saved_for_the_backward(causal, device):
    """The backward needs q, k, v, the output and a number per query."""
    inputs, grads = make(LONG, device=device)
    saved = []
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o, lse = with_lse(**leaves, causal=causal, exact_window=20, algorithm="linear")
    shapes = [tuple(x.shape) for x in saved if x.dim() == 4]
    assert sorted(shapes) == sorted(tuple(x.shape) for x in (*inputs.values(), o))
    assert sum(x.numel() for x in saved if x.dim() != 4) == lse.numel()
    torch.autograd.backward((o, lse), grads)


# ---- the operators


OPERATOR_CALLS = {
    "causal": {},
    "full": {"causal": False},
    "linear, mask": {"algorithm": "linear", "mask": True},
    "decay": {"decay": True},
    "decay, wider than the keys": {"decay": True, "window": 40},
    "wider than the keys": {"window": 40, "causal": False},
    "bfloat16, token-major": {"dtype": torch.bfloat16, "layout": "token-major", "decay": True},
    "empty": {"case": Case("", n=0, b=2)},
}


def operator_arguments(device, case=None, dtype=torch.float32, layout="contiguous", causal=True,
                       algorithm="auto", window=5, mask=False, decay=False):  # fmt: skip
    """Returns q, k and v, gradients of o and lse, and the other arguments of the forward operator."""
    case = case or (SMALL if layout == "contiguous" else Case("", n=30, b=2, h=2, d=8))
    inputs, grad_o = make_inputs(case, dtype, device, layout)
    mask = torch.rand(case.b, case.m, device=device) > 0.3 if mask else None
    decay = make_decay("ordinary", case.b, case.hk, case.m, device=device) if decay else None
    options = (mask, decay, None, None, None, 0.5, 1.0, 1.0, 0.5, 2, causal, algorithm, window, False)
    return inputs, (grad_o, torch.randn(grad_o.shape[:3], device=device)), options


@pytest.mark.parametrize("call", OPERATOR_CALLS)
def test_opcheck(call, device):
    inputs, grads, options = operator_arguments(device, **OPERATOR_CALLS[call])
    opcheck("exact_window_", inputs, grads, *options, traced=call in ("full", "decay"))


@pytest.mark.parametrize("call", OPERATOR_CALLS)
def test_fake_tensors_have_the_real_layout(call, device):
    inputs, grads, options = operator_arguments(device, **OPERATOR_CALLS[call])

    def both(*tensors):
        q, k, v, grad_o, grad_lse, mask, decay = tensors
        rest = (mask, decay, *options[2:])
        outputs = torch.ops.fastmax.exact_window_forward(q, k, v, *rest)
        given = grad_o, grad_lse, q, k, v, *outputs, *rest
        gradients, of_qkv = torch.ops.fastmax.exact_window_backward, torch.ops.fastmax.exact_window_backward_qkv
        return *outputs, *gradients(*given), *of_qkv(*given)

    tensors = (*inputs.values(), *grads, *options[:2])
    real = both(*tensors)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = both(*(None if x is None else mode.from_tensor(x) for x in tensors))
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)


WRONG = {
    "a window of 0": ("exact_window", 0, "exact_window must be at least 1, got 0"),
    "lse of one head": ("lse", torch.ones(2, 1, 24), "lse must have shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_direct_call_is_refused_by_name(name):
    inputs, grads, options = operator_arguments(torch.device("cpu"), decay=True)
    outputs = torch.ops.fastmax.exact_window_forward(*inputs.values(), *options)
    operator = torch.ops.fastmax.exact_window_backward.default
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, (*grads, *inputs.values(), *outputs, *options), strict=True))
    operator(*given.values())
    argument, value, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=message):
        operator(*(given | {argument: value}).values())


def test_more_queries_than_keys_in_a_direct_call():
    inputs, _, options = operator_arguments(torch.device("cpu"), causal=False)
    inputs |= {name: inputs[name][:, :, :9] for name in "kv"}
    with pytest.raises(ValueError, match="exact_window takes at most as many queries as keys"):
        torch.ops.fastmax.exact_window_forward(*inputs.values(), *options)


@pytest.mark.parametrize("algorithm, one_pass", [("auto", True), ("quadratic", True), ("linear", False)])
@by_causal
def test_one_pass_over_the_tiles_on_a_cpu(causal, algorithm, one_pass, monkeypatch):
    """The implementation of the operator chooses, so that a compiled graph has no guard for it."""
    windows = []
    for name in ("forward", "backward"):
        function = getattr(eager, name)

        def record(*args, function=function, **options):
            windows.append(next(x for x in args if isinstance(x, Call)).exact_window)
            return function(*args, **options)

        monkeypatch.setattr(eager, name, record)
    inputs, (grad_o, _) = make(SMALL)
    run(partial(fastmax_attention, exact_window=5, algorithm=algorithm, causal=causal), inputs, grad_o)
    assert windows == ([5, 5] if one_pass else [0] * (4 if causal else 6))


# ---- inside PyTorch


@by_causal
@by_gradient
def test_three_dimensions(custom, causal, device):
    inputs, grads = make(SMALL, device=device)
    mask = torch.rand(SMALL.b, SMALL.m, device=device) > 0.2
    attention = partial(with_lse, causal=causal, exact_window=6, attention_mask=mask, use_custom_gradient=custom)
    flat = run(attention, {name: x.flatten(0, 1) for name, x in inputs.items()}, tuple(x.flatten(0, 1) for x in grads))
    compare(flat, {name: x.flatten(0, 1) for name, x in run(attention, inputs, grads).items()})


@by_causal
@by_gradient
def test_inputs_are_never_written(custom, causal, device):
    inputs, grads = make(SMALL, device=device)
    before = {name: x.clone() for name, x in inputs.items()}
    run(partial(with_lse, use_custom_gradient=custom), inputs, grads, causal=causal, exact_window=6)
    assert all(torch.equal(x, before[name]) for name, x in inputs.items())


@by_gradient
@pytest.mark.parametrize("layout", ["token-major", "packed qkv"])
def test_outputs_lie_as_q_does(layout, custom, device):
    inputs, _ = make_inputs(Case("", n=30, b=2, h=2, d=8), device=device, layout=layout)
    plain = fastmax_attention(**inputs, causal=True, use_custom_gradient=custom)
    assert fastmax_attention(**inputs, causal=True, exact_window=5, use_custom_gradient=custom).stride() == plain.stride()


@pytest.mark.parametrize("case", [Case("", n=0, b=2), Case("", n=5, b=0)], ids=["no tokens", "no batch"])
@by_causal
def test_empty(causal, case, device):
    inputs, grads = make(case, device=device)
    for custom in (True, False):
        actual = run(partial(with_lse, use_custom_gradient=custom), inputs, grads, causal=causal, exact_window=4)
        assert all(actual[f"grad {name}"].shape == x.shape for name, x in inputs.items())


@by_causal
@by_algorithm
def test_bitwise_repeatable(algorithm, causal, device, several_threads):
    inputs, grads = make(LONG, device=device)
    attention = partial(with_lse, algorithm=algorithm, causal=causal, exact_window=30)
    first, second = (run(attention, inputs, grads) for _ in range(2))
    assert all(torch.equal(x, second[name]) for name, x in first.items())


@pytest.mark.parametrize(
    "algorithm, causal, custom", [("linear", True, True), ("linear", False, True), ("quadratic", True, False)]
)
def test_compile(algorithm, causal, custom, device, fresh_dynamo):
    attention = partial(with_lse, causal=causal, algorithm=algorithm, exact_window=6, use_custom_gradient=custom)
    inputs, grads = make(SMALL, device=device)
    if causal and custom:
        inputs["log_decay"] = make_decay("ordinary", 2, 2, SMALL.m, device=device)
    check_compiled(attention, inputs, grads)


def test_compile_dynamic_is_one_graph_for_all_lengths(device, fresh_dynamo):
    attention = partial(with_lse, causal=True, exact_window=10)
    check_one_graph_for_all_lengths(attention, lambda n: (*make(Case("", n=n, d=4), device=device), {}), (20, 37))


@by_gradient
@by_reentrant
def test_activation_checkpointing(reentrant, custom, device):
    inputs, grads = make(SMALL, device=device)
    attention = partial(with_lse, causal=True, exact_window=5, use_custom_gradient=custom)
    check_checkpointing(attention, inputs, grads, reentrant)


@by_gradient
def test_autocast(custom, device):
    inputs, (grad_o, grad_lse) = make(SMALL, device=device)
    grads = grad_o.bfloat16(), grad_lse
    attention = partial(with_lse, causal=True, exact_window=6, use_custom_gradient=custom)
    expected = run(attention, {name: x.bfloat16() for name, x in inputs.items()}, grads)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    with torch.autocast(device.type, torch.bfloat16):
        o, lse = attention(**leaves)
    assert torch.equal(o, expected["o"]) and torch.equal(lse, expected["lse"])
    torch.autograd.backward((o, lse), grads)
    for name, x in leaves.items():
        assert torch.equal(x.grad, expected[f"grad {name}"].float()), name


@by_causal
def test_torch_func_and_second_derivatives_by_autograd(causal, device):
    inputs, _ = make(TINY, torch.float64, device)

    def attention(q):
        return fastmax_attention(q, inputs["k"], inputs["v"], causal=causal, exact_window=2, use_custom_gradient=False)

    def loss(q):
        return attention(q).square().sum()

    q = inputs["q"].clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(q.detach()), torch.autograd.grad(loss(q), q)[0])
    assert gradgradcheck(attention, q)


def test_second_derivative_of_the_custom_gradient_is_refused(device):
    inputs, _ = make(TINY, torch.float64, device)
    q = inputs["q"].requires_grad_()
    grad = torch.autograd.grad(fastmax_attention(**inputs, causal=True, exact_window=2).square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="use_custom_gradient=False"):
        torch.autograd.grad(grad.sum(), q)


@by_causal
@by_gradient
def test_memory_is_linear_in_tokens(custom, causal):
    """Four times the tokens take at most five times the bytes. There is no (n, m) tensor and none with a window of keys per
    query."""
    peaks = []
    for n in (1000, 4000):
        inputs, (grad_o, _) = make(Case("", n=n, h=1, d=4))
        with Memory() as memory:
            run(
                fastmax_attention,
                inputs,
                grad_o,
                causal=causal,
                exact_window=128,
                algorithm="linear",
                use_custom_gradient=custom,
            )
        peaks.append(memory.peak)
        assert memory.largest < n * n / 2
    assert peaks[1] <= 5 * peaks[0]


def test_close_to_the_softmax_it_stands_for(device):
    """With scores of a few units, a wider window brings the output closer to softmax over all keys."""
    inputs, _ = make(Case("", n=64, h=2, d=8), torch.float64, device)
    softmax = flash_attention(**inputs, causal=True, scale=5.0)
    errors = [
        relative(fastmax_attention(**inputs, causal=True, temperature=0.2, exact_window=window), softmax)
        for window in (0, 8, 32, 60, 64)
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] <= 1e-12 < errors[-2]


# ---- refused

REFUSED = {
    "negative": ({"exact_window": -1}, ValueError, "exact_window must.*-1"),
    "a bool": ({"exact_window": True}, TypeError, "exact_window must.*True"),
    "a float": ({"exact_window": 4.0}, TypeError, "exact_window must.*4.0"),
    "None": ({"exact_window": None}, TypeError, "exact_window must.*None"),
    "two bounds": ({"exact_window": (4, 0)}, TypeError, r"exact_window must.*\(4, 0\)"),
    "a tensor": ({"exact_window": torch.tensor(4)}, TypeError, "exact_window must.*tensor"),
    "an rpe matrix": (
        {"exact_window": 4, "rpe_matrix": torch.zeros(11, 8)},
        (TypeError, ValueError),
        "exact_window.*rpe_matrix|rpe_matrix.*exact_window",
    ),
    "more queries than keys": ({"exact_window": 4, "q": torch.ones(2, 4, 9, 8)}, ValueError, "exact_window.*9.*7"),
}


@pytest.mark.parametrize("name", REFUSED)
@by_gradient
def test_refused(custom, name):
    change, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        fastmax_attention(**good() | change, use_custom_gradient=custom)


def test_more_queries_than_keys_without_a_window():
    assert fastmax_attention(**good() | {"q": torch.ones(2, 4, 9, 8)}, exact_window=0).shape == (2, 4, 9, 6)
