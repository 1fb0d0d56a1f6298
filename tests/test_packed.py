"""`cu_seqlens`: sequences packed end to end in a batch of one, against each sequence alone and against the definition."""

import math
import warnings
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
from common import (
    CHUNK,
    DTYPES,
    Case,
    Expected,
    assert_equals_definition,
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
    run,
)

from fastmax import fastmax_attention, flash_attention
from fastmax.prepare.padding import RealFirst
from fastmax.testing.reference import naive_softmax_attention

with_lse = partial(fastmax_attention, return_lse=True)
flash_with_lse = partial(flash_attention, return_lse=True)
reference = partial(definition, return_lse=True)

LENGTHS = {
    "none, one and two tokens": (0, 1, 2, 0, 0, 5, 1, 0),
    "chunk +- 1": (CHUNK - 1, CHUNK, CHUNK + 1, 63, 64, 65),
    "one long": (3, 2 * CHUNK + 30, 1),
    "many short": tuple((7 * i) % 9 for i in range(20)),
    "one token each": (1,) * 12,
}
SHORT = (0, 5, 1, 12, 0, 8, 2)
# Both algorithms where causal, the quadratic one where not.
WAYS = {
    "causal, quadratic": partial(with_lse, causal=True, algorithm="quadratic"),
    "causal, linear": partial(with_lse, causal=True, algorithm="linear"),
    "causal, linear, p=1": partial(with_lse, causal=True, algorithm="linear", p=1, temperature=2.0),
    "full, quadratic": partial(with_lse, algorithm="quadratic"),
    "full, auto, p=1": partial(with_lse, p=1, temperature=2.0),
    "causal, linear, exact window": partial(with_lse, causal=True, algorithm="linear", exact_window=9),
    "causal, quadratic, exact window": partial(with_lse, causal=True, algorithm="quadratic", exact_window=70),
    "full, exact window": partial(with_lse, exact_window=9),
    "flash, causal": partial(flash_with_lse, causal=True),
    "flash, full": flash_with_lse,
    "flash, causal, window": partial(flash_with_lse, causal=True, window=6),
    "flash, full, window": partial(flash_with_lse, window=(5, 2)),
}
by_way = pytest.mark.parametrize("way", WAYS)
by_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
by_reentrant = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def bounds(lengths, device="cpu"):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def make(lengths, dtype=torch.float32, device="cpu", h=2, hk=1, d=6, dv=5):
    case = Case("", n=sum(lengths), h=h, hk=hk, d=d, dv=dv)
    inputs, grad_o = make_inputs(case, dtype, device)
    grad_lse = torch.randn(1, h, case.n).to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    return inputs, (grad_o, grad_lse)


def one_by_one(attention, inputs, grads, lengths, **by_token):
    """Returns outputs and gradients of each sequence alone, joined end to end. `by_token` are options with a dimension 2 of
    tokens."""
    results = []
    for begin, end in pairwise(accumulate(lengths, initial=0)):
        if begin == end:
            continue
        part = {name: x[:, :, begin:end] for name, x in inputs.items()}
        options = {name: x[:, begin:end] if name == "attention_mask" else x[:, :, begin:end] for name, x in by_token.items()}
        results.append(run(attention, part, tuple(x[:, :, begin:end] for x in grads), **options))
    return {name: torch.cat([x[name] for x in results], dim=2) for name in results[0]}


def assert_close_in_float64(actual, expected):
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


# ---- against the sequences one by one


@by_lengths
@by_way
@by_gradient
def test_every_way_and_length(custom, way, lengths, device):
    if not custom and sum(lengths) > 3 * CHUNK:
        pytest.skip("the autograd side is asked with the other lengths")
    inputs, grads = make(lengths, torch.float64, device)
    attention = partial(WAYS[way], use_custom_gradient=custom)
    actual = run(attention, inputs, grads, cu_seqlens=bounds(lengths, device))
    assert_close_in_float64(actual, one_by_one(attention, inputs, grads, lengths))


@pytest.mark.parametrize("way", [way for way in WAYS if "causal" in way])
@by_gradient
def test_with_decay(custom, way, device):
    lengths = (63, 1, 0, CHUNK + 3, 2, 40)
    inputs, grads = make(lengths, torch.float64, device, h=4, hk=2)
    inputs["log_decay"] = make_decay("none, ordinary or strong", 1, 2, sum(lengths), dtype=torch.float64, device=device)
    inputs["log_decay"][:, :, 20::17] = -math.inf
    attention = partial(WAYS[way], use_custom_gradient=custom)
    actual = run(attention, inputs, grads, cu_seqlens=bounds(lengths, device))
    assert_close_in_float64(actual, one_by_one(attention, inputs, grads, lengths))


@by_way
@by_gradient
def test_with_padding_and_noise(custom, way, device):
    inputs, grads = make(SHORT, torch.float64, device)
    n = sum(SHORT)
    options = {"attention_mask": torch.rand(1, n, device=device) > 0.3}
    if "flash" not in way:
        options["drop_noise"] = torch.randn(1, 2, n, 5, dtype=torch.float64, device=device)
    attention = partial(WAYS[way], use_custom_gradient=custom, **({} if "flash" in way else {"dropout": 0.3}))
    actual = run(attention, inputs, grads, cu_seqlens=bounds(SHORT, device), **options)
    assert_close_in_float64(actual, one_by_one(attention, inputs, grads, SHORT, **options))


@in_turn("custom")
@pytest.mark.parametrize("option", ["normalize=sequence", "normalize=token", "sinusoidal", "temperature", "coefficients"])
@pytest.mark.parametrize("way", [way for way in WAYS if "flash" not in way and "p=1" not in way])
@by_gradient
def test_options_take_each_sequence_on_its_own(custom, way, option, device):
    """Options apply to each sequence alone: the longest row of one sequence scales no other."""
    inputs, grads = make(SHORT, torch.float64, device)
    inputs["k"] = inputs["k"] * torch.linspace(1.0, 3.0, sum(SHORT), device=device)[:, None]
    options = make_options(option, Case("", n=sum(SHORT)), torch.float64, device)
    attention = partial(WAYS[way], use_custom_gradient=custom, **options)
    actual = run(attention, inputs, grads, cu_seqlens=bounds(SHORT, device))
    assert_close_in_float64(actual, one_by_one(attention, inputs, grads, SHORT))


@by_causal
@by_gradient
def test_normalize_of_each_sequence_leaves_out_its_masked_keys(custom, causal, device):
    inputs, grads = make(SHORT, torch.float64, device)
    mask = torch.rand(1, sum(SHORT), device=device) > 0.3
    inputs["k"] = torch.where(mask[:, None, :, None], inputs["k"], 100.0)
    attention = partial(with_lse, causal=causal, normalize="sequence", use_custom_gradient=custom)
    actual = run(attention, inputs, grads, cu_seqlens=bounds(SHORT, device), attention_mask=mask)
    assert_close_in_float64(actual, one_by_one(attention, inputs, grads, SHORT, attention_mask=mask))


def test_a_sequence_that_begins_late(device):
    """Its sinusoids and the scale by its longest row do not depend on the tokens before it."""
    lengths = (3000, 20)
    inputs, grads = make(lengths, torch.float32, device, h=1)
    for options in ({"rpe_matrix": "sinusoidal", "temperature": 4.0}, {"normalize": "sequence", "lim": 0.7}):
        attention = partial(with_lse, causal=True, algorithm="linear", **options)
        actual = run(attention, inputs, grads, cu_seqlens=bounds(lengths, device))
        tail = {name: x[:, :, 3000:] for name, x in actual.items()}
        alone = run(attention, {name: x[:, :, 3000:] for name, x in inputs.items()}, tuple(x[:, :, 3000:] for x in grads))
        compare(tail, alone)


def test_rpe_tensor(device):
    inputs, grads = make(SHORT, torch.float64, device)
    inputs["rpe_matrix"] = torch.randn(2 * sum(SHORT) - 1, 6, dtype=torch.float64).to(device)
    for causal in (False, True):
        for custom in (False, True):
            attention = partial(with_lse, use_custom_gradient=custom)
            options = {"causal": causal, "cu_seqlens": bounds(SHORT, device)}
            assert_equals_definition(attention, reference, inputs, grads, **options)


# ---- against the definition


@by_causal
@by_gradient
def test_everything_at_once_in_float64(custom, causal, device):
    inputs, grads = make(SHORT, torch.float64, device, h=4, hk=2, dv=6)
    options = make_options("everything", Case("", n=sum(SHORT), h=4, dv=6), torch.float64, device)
    options |= {"cu_seqlens": bounds(SHORT, device), "causal": causal, "exact_window": 4}
    if causal:
        inputs["log_decay"] = make_decay("-inf at places", 1, 2, sum(SHORT), dtype=torch.float64, device=device)
    for algorithm in ("quadratic", "linear") if causal else ("quadratic", "auto"):
        attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
        assert_equals_definition(attention, reference, inputs, grads, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("algorithm", ["quadratic", "linear"])
@pytest.mark.parametrize("p, custom", [(1, True), (2, True), (2, False)], ids=["p1-custom", "p2-custom", "p2-autograd"])
def test_dtypes(p, custom, algorithm, dtype, device):
    lengths = (CHUNK + 3, 1, 0, 70, 20)
    inputs, (grad_o, _) = make(lengths, dtype, device)
    inputs["log_decay"] = make_decay(
        "ordinary", 1, 1, sum(lengths), device=device, dtype=torch.promote_types(dtype, torch.float32)
    )
    Expected(inputs, grad_o, causal=True, p=p, cu_seqlens=bounds(lengths, device)).check(custom=custom, algorithm=algorithm)


@by_causal
@by_gradient
def test_flash_against_its_definition(custom, causal, device):
    inputs, grads = make(SHORT, torch.float64, device, h=4, hk=2)
    attention = partial(flash_with_lse, use_custom_gradient=custom)
    options = {"causal": causal, "cu_seqlens": bounds(SHORT, device), "window": 4, "scale": 0.7}
    if causal:
        inputs["log_decay"] = make_decay("-inf at places", 1, 2, sum(SHORT), dtype=torch.float64, device=device)
    assert_equals_definition(attention, naive_softmax_attention, inputs, grads, **options)


# ---- what it means


@by_way
def test_one_sequence_is_a_dense_call(way, device):
    inputs, grads = make((50,), device=device)
    compare(run(WAYS[way], inputs, grads, cu_seqlens=bounds((50,), device)), run(WAYS[way], inputs, grads))


@pytest.mark.parametrize("way", [way for way in WAYS if "causal" in way])
@by_gradient
def test_minus_infinity_at_first_tokens_is_packing(custom, way, device):
    lengths = (63, 1, CHUNK + 3, 2, 40)
    inputs, grads = make(lengths, torch.float64, device, hk=2)
    inputs["log_decay"] = make_decay("ordinary", 1, 2, sum(lengths), dtype=torch.float64, device=device)
    attention = partial(WAYS[way], use_custom_gradient=custom)
    packed = run(attention, inputs, grads, cu_seqlens=bounds(lengths, device))
    first = bounds(lengths)[:-1].tolist()
    inputs["log_decay"][:, :, first] = -math.inf
    assert_close_in_float64(run(attention, inputs, grads), packed)


@in_turn("custom")
@by_way
@by_gradient
@pytest.mark.parametrize("huge", [0, 1, 2])
def test_large_numbers_in_one_sequence_do_not_reach_the_others(huge, custom, way, device):
    """Finite numbers of one sequence have no effect on others, because they are never added to and subtracted from a common
    sum."""
    lengths = (30, CHUNK + 10, 25)
    inputs, grads = make(lengths, device=device)
    attention = partial(WAYS[way], use_custom_gradient=custom, cu_seqlens=bounds(lengths, device))
    before = run(attention, inputs, grads)
    begin = sum(lengths[:huge])
    inside = torch.zeros(sum(lengths), 1, dtype=torch.bool, device=device)
    inside[begin : begin + lengths[huge]] = True
    after = run(attention, inputs | {name: torch.where(inside, 1e4 * x, x) for name, x in inputs.items()}, grads)
    for name, x in before.items():
        others = ~inside[:, 0]
        torch.testing.assert_close(after[name][:, :, others], x[:, :, others], rtol=1e-5, atol=1e-6)


@by_way
def test_order_of_the_sequences_does_not_matter(way, device):
    lengths = (30, 9, 25)
    inputs, grads = make(lengths, torch.float64, device)
    turned = [torch.arange(64)[begin:end] for begin, end in pairwise(accumulate(lengths, initial=0))]
    order = torch.cat([turned[2], turned[0], turned[1]]).to(device)
    first = run(WAYS[way], inputs, grads, cu_seqlens=bounds(lengths, device))
    second = run(WAYS[way], {name: x[:, :, order] for name, x in inputs.items()}, tuple(x[:, :, order] for x in grads),
                 cu_seqlens=bounds((25, 30, 9), device))  # fmt: skip
    assert_close_in_float64(second, {name: x[:, :, order] for name, x in first.items()})


def test_no_tokens(device):
    for attention in WAYS.values():
        for lengths in ((0,), (0, 0, 0)):
            inputs, grads = make((0,), device=device)
            actual = run(attention, inputs, grads, cu_seqlens=bounds(lengths, device))
            assert actual["o"].shape == (1, 2, 0, 5) and actual["lse"].shape == (1, 2, 0)


@by_way
def test_three_dimensions(way, device):
    """3-d tensors are the heads of one batch entry."""
    inputs, grads = make(SHORT, device=device)
    attention = partial(WAYS[way], cu_seqlens=bounds(SHORT, device))
    flat = run(attention, {name: x.flatten(0, 1) for name, x in inputs.items()}, tuple(x.flatten(0, 1) for x in grads))
    compare(flat, {name: x.flatten(0, 1) for name, x in run(attention, inputs, grads).items()})


@pytest.mark.parametrize("way", ["causal, linear, exact window", "full, quadratic", "flash, causal"])
def test_bitwise_repeatable(way, device, several_threads):
    lengths = (CHUNK + 3, 1, 0, 70, 20)
    inputs, grads = make(lengths, device=device)
    first, second = (run(WAYS[way], inputs, grads, cu_seqlens=bounds(lengths, device)) for _ in range(2))
    assert all(torch.equal(x, second[name]) for name, x in first.items())


@pytest.mark.cuda
@by_way
def test_values_are_not_copied_to_the_host(way):
    lengths = (100, 300, 1, 0, 50)
    inputs, grads = make(lengths, device="cuda")
    cu_seqlens = bounds(lengths, "cuda")
    run(WAYS[way], inputs, grads, cu_seqlens=cu_seqlens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            run(WAYS[way], inputs, grads, cu_seqlens=cu_seqlens)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# ---- inside PyTorch


def first_keys(lengths, device):
    """Returns first and last keys (1, 1, n), expanded over two kv heads with stride 0."""
    starts = [begin for begin, end in pairwise(accumulate(lengths, initial=0)) for _ in range(end - begin)]
    ends = [end for begin, end in pairwise(accumulate(lengths, initial=0)) for _ in range(end - begin)]
    return tuple(torch.tensor(x, dtype=torch.int32, device=device).expand(1, 2, -1) for x in (starts, ends))


@pytest.mark.parametrize("algorithm, causal", [("linear", True), ("quadratic", False)])
def test_opcheck(algorithm, causal, device):
    inputs, grads = make(SHORT, device=device, h=4, hk=2)
    first, end = first_keys(SHORT, device)
    rest = (None, None, None, None, first, None if causal else end, None, 0.5, 1.0, 1.0, 0.5, 2, causal, 0.0, algorithm, False)
    opcheck("", inputs, grads, *rest, traced=causal)


def test_opcheck_flash(device):
    inputs, grads = make(SHORT, device=device, h=4, hk=2)
    opcheck("flash_", inputs, grads, None, None, *first_keys(SHORT, device), None, 0.5, False, 3, -1, False)


@pytest.mark.parametrize("way", ["full, exact window", "flash, full, window"])
def test_compile(way, device, fresh_dynamo):
    check_compiled(WAYS[way], *make(SHORT, device=device), cu_seqlens=bounds(SHORT, device))


def test_compile_normalize_of_each_sequence(device, fresh_dynamo):
    attention = partial(with_lse, causal=True, normalize="sequence", rpe_matrix="sinusoidal", temperature=4.0)
    check_compiled(attention, *make(SHORT, device=device), cu_seqlens=bounds(SHORT, device))


@pytest.mark.parametrize("way", ["causal, linear"])
def test_compile_dynamic_is_one_graph_for_all_lengths(way, device, fresh_dynamo):
    """One graph serves any number of tokens and of sequences."""

    def of_length(n):
        lengths = (n // 3, 2, n - n // 3 - 2) if n < 100 else (n // 4, 0, n // 4, n - 2 * (n // 4))
        return *make(lengths, device=device), {"cu_seqlens": bounds(lengths, device)}

    check_one_graph_for_all_lengths(WAYS[way], of_length)


@by_gradient
@by_reentrant
def test_activation_checkpointing(reentrant, custom, device):
    inputs, grads = make(SHORT, device=device)
    for way in ("causal, linear", "causal, linear, exact window", "flash, full"):
        attention = partial(WAYS[way], use_custom_gradient=custom, cu_seqlens=bounds(SHORT, device))
        check_checkpointing(attention, inputs, grads, reentrant)


@by_gradient
@by_way
def test_autocast(way, custom, device):
    inputs, _ = make(SHORT, device=device)
    attention = partial(WAYS[way], use_custom_gradient=custom, cu_seqlens=bounds(SHORT, device))
    with torch.autocast(device.type, torch.bfloat16):
        o, lse = attention(**inputs)
    expected = attention(**{name: x.bfloat16() for name, x in inputs.items()})
    assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])


def test_torch_func_by_autograd(device):
    inputs, _ = make((2, 0, 3), torch.float64, device, d=3, dv=2)
    for way in ("causal, quadratic", "causal, linear", "full, quadratic", "flash, full"):

        def loss(q, way=way):
            attention = partial(WAYS[way], use_custom_gradient=False, cu_seqlens=bounds((2, 0, 3), device))
            return attention(q, inputs["k"], inputs["v"])[0].square().sum()

        q = inputs["q"].clone().requires_grad_()
        torch.testing.assert_close(torch.func.grad(loss)(q.detach()), torch.autograd.grad(loss(q), q)[0])


# ---- refused


def packed():
    return {"q": torch.ones(1, 4, 7, 8), "k": torch.ones(1, 2, 7, 8), "v": torch.ones(1, 2, 7, 6)}


def cu(*values, dtype=torch.int32, **options):
    return torch.tensor(values, dtype=dtype, **options)


REFUSED = {
    "a list": ({"cu_seqlens": [0, 3, 7]}, TypeError, r"cu_seqlens must.*\[0, 3, 7\]"),
    "int64": ({"cu_seqlens": cu(0, 3, 7, dtype=torch.int64)}, TypeError, "cu_seqlens must.*int64"),
    "floats": ({"cu_seqlens": cu(0, 3, 7, dtype=torch.float32)}, TypeError, "cu_seqlens must.*float32"),
    "two dimensions": ({"cu_seqlens": cu([0, 3, 7])}, ValueError, r"cu_seqlens must.*\(1, 3\)"),
    "no dimension": ({"cu_seqlens": cu(0)[0]}, ValueError, r"cu_seqlens must.*\(\)"),
    "one number": ({"cu_seqlens": cu(0)}, ValueError, r"cu_seqlens must.*\(1,\)"),
    "no element": ({"cu_seqlens": cu()}, ValueError, r"cu_seqlens must.*\(0,\)"),
    "not from 0": ({"cu_seqlens": cu(1, 3, 7)}, ValueError, "cu_seqlens must go from 0 to n = 7.*1, 3, 7"),
    "not to n": ({"cu_seqlens": cu(0, 3, 8)}, ValueError, "cu_seqlens must go from 0 to n = 7.*0, 3, 8"),
    "unsorted": ({"cu_seqlens": cu(0, 5, 2, 7)}, ValueError, "cu_seqlens must go from 0 to n = 7 without falling"),
    "a fall that int32 differences hide": (
        {"cu_seqlens": cu(0, 2**31 - 1, -(2**31), -1, 7)},
        ValueError,
        "cu_seqlens must go from 0 to n = 7 without falling",
    ),
    "elsewhere": ({"cu_seqlens": cu(0, 3, 7, device="meta")}, ValueError, "cu_seqlens must.*device.*meta"),
    "a batch of two": (
        {name: x.expand(2, -1, -1, -1) for name, x in packed().items()},
        ValueError,
        "cu_seqlens.*batch.*2",
    ),
    "fewer queries than keys": ({"q": torch.ones(1, 4, 5, 8)}, ValueError, "cu_seqlens.*5.*7"),
    "more queries than keys": ({"q": torch.ones(1, 4, 9, 8), "causal": False}, ValueError, "cu_seqlens.*9.*7"),
}


@in_turn("custom")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("attention", [fastmax_attention, flash_attention], ids=["fastmax", "flash"])
@by_gradient
def test_refused(custom, attention, name):
    change, error, message = REFUSED[name]
    arguments = packed() | {"cu_seqlens": cu(0, 3, 7), "causal": True, "use_custom_gradient": custom} | change
    with pytest.raises(error, match=message):
        attention(**arguments)


@by_gradient
def test_full_attention_has_no_linear_algorithm(custom):
    shared = packed() | {"cu_seqlens": cu(0, 3, 7), "use_custom_gradient": custom}
    with pytest.raises(ValueError, match="cu_seqlens.*linear|linear.*cu_seqlens"):
        fastmax_attention(**shared, algorithm="linear")
    torch.testing.assert_close(fastmax_attention(**shared), fastmax_attention(**shared, algorithm="quadratic"))


def test_real_tokens_come_first_in_each_sequence():
    mask, bounds = torch.rand(1, 40) < 0.5, [0, 7, 7, 20, 40]
    order = RealFirst.of(mask, torch.tensor(bounds, dtype=torch.int32))
    for begin, end in pairwise(bounds):
        real, padding = (begin + x[0, begin:end].nonzero()[:, 0] for x in (mask, ~mask))
        assert torch.equal(order.token[0, begin:end], torch.cat([real, padding]))
        assert order.mask[0, begin:end].sum() == len(real) and order.mask[0, begin : begin + len(real)].all()
    x = torch.randn(1, 40, 3)
    assert torch.equal(order.back(order.first(x)), x)
