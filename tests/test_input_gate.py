"""`log_input_gate`: exp of it multiplies a key's weight wherever the polynomial, or softmax attention, weighs the key.

`weighed` is the formula, written here a second time: every call is compared with it in float64.
"""

import math
from functools import partial

import pytest
import torch
from common import (
    CHUNK,
    CHUNK_P1,
    ROWS,
    Case,
    by_algorithm,
    by_gradient,
    by_order,
    check_checkpointing,
    check_compiled,
    check_one_graph_for_all_lengths,
    in_turn,
    make_decay,
    make_inputs,
    opcheck,
    run,
)
from torch.autograd import gradcheck, gradgradcheck

from fastmax import FastmaxSelfAttention, FASTMultiHeadAttention, fastmax_attention, flash_attention
from fastmax.core.call import Call
from fastmax.core.score import Score
from fastmax.eager.blocks import Scan
from fastmax.ops import normalizes_during_attention, sequences

INF, NAN = math.inf, math.nan
LEAST, GREATEST = -60.0, 30.0
SMALL = Case("", n=24, m=30, b=2, h=4, hk=2, d=8, dv=6)
LONG = Case("", n=100, m=CHUNK + 40, h=2, hk=1, d=8, dv=6)
TINY = Case("", n=5, m=6, b=1, h=2, hk=1, d=3, dv=2)

by_window = pytest.mark.parametrize("window", [0, 1, 9, 30, 10**6])


def weighed(
    q, k, v, log_input_gate, *, scale=None, temperature=1.0, a0=1.0, a1=1.0, a2=0.5, p=2, exact_window=0, window=None,
    attention_mask=None, log_decay=None, cu_seqlens=None, drop_noise=None, dropout=0.0, rpe_matrix=None, normalize=False,
    lim=1.0, softmax=False,
):  # fmt: skip
    """Returns output and log of the sums of weights of a causal call. With `softmax` all weights are exponentials."""
    (n, h), (m, hk) = (q.shape[-2], q.shape[1]), (k.shape[-2], k.shape[1])
    if normalize == "token":
        q, k = (x * lim / x.norm(dim=-1, keepdim=True).clamp(min=lim) for x in (q, k))
    of_head = torch.arange(h) // (h // hk)
    i, j = torch.arange(n)[:, None] + m - n, torch.arange(m)[None, :]
    s = torch.einsum("bhid,bhjd->bhij", q, k[:, of_head])
    if rpe_matrix is not None:
        s = s + torch.einsum("bhid,ijd->bhij", q, rpe_matrix[j - i + m - 1])
    s = s * (q.shape[-1] ** -0.5 if softmax and scale is None else scale if softmax else 1.0 / temperature)
    visible = (j <= i).expand(s.shape)
    if window is not None:
        visible = visible & (i - j < window)
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None, :]
    if cu_seqlens is not None:
        sequence = (torch.arange(m)[:, None] >= cu_seqlens[None, 1:]).sum(-1)
        visible = visible & (sequence[None, :] == sequence[-n:, None])
    exponent = torch.zeros_like(s)
    if log_decay is not None:
        resets = (log_decay == -INF).cumsum(-1)[:, of_head]
        visible = visible & (resets[:, :, None, :] == resets[:, :, m - n :, None])
        sums = log_decay.masked_fill(log_decay == -INF, 0.0).cumsum(-1)[:, of_head]
        exponent = (sums[:, :, m - n :, None] - sums[:, :, None, :]).masked_fill(j > i, 0.0)
    gate = log_input_gate.clamp(LEAST, GREATEST)[:, of_head, None, :]
    if softmax:
        log_weight, factor = s + exponent + gate, torch.ones_like(s)
    else:
        local = i - j < exact_window
        log_weight = exponent + torch.where(local, s, gate)
        factor = torch.where(local, 1.0, a0 + a1 * s + (a2 * s * s if p == 2 else 0.0))
    w = torch.where(visible, factor * torch.where(visible, log_weight, 0.0).exp(), 0.0)
    z = w.sum(-1)
    seen = visible.any(-1)
    safe = torch.where(seen, z, 1.0)
    o = (w / safe.unsqueeze(-1)) @ v[:, of_head]
    if drop_noise is not None:
        o = o * (1.0 + dropout * drop_noise)
    return o, torch.where(seen, safe.log(), -INF)


def make_gate(b, hk, m, kind="", dtype=torch.float64, device="cpu"):
    """Gates of a few decades; with `kind` also the ends of the range beside each other, or values beyond them."""
    gate = 3.0 * torch.randn(b, hk, m, dtype=torch.float64)
    values = {"": (), "ends": (LEAST, GREATEST), "beyond": (LEAST, -61.0, -1e9, -INF, GREATEST, 31.0, 1e9, INF)}[kind]
    for value in values:
        gate[torch.rand(b, hk, m) < 1.0 / (len(values) + 1)] = value
    return gate.to(device, dtype)


def make(case, kind="", dtype=torch.float64, device="cpu"):
    """Returns q, k, v and gates, and the gradients of output and log-sum."""
    inputs, grad_o = make_inputs(case, dtype, device)
    inputs["log_input_gate"] = make_gate(case.b, case.hk, case.m, kind, device=device).to(
        torch.promote_types(dtype, torch.float32)
    )
    return inputs, (grad_o, torch.randn(case.b, case.h, case.n, dtype=inputs["log_input_gate"].dtype).to(device))


def assert_equal(actual, expected, incoming=1.0, tolerance=1e-9):
    """Compares by the norm, relative to the expected tensor or to the incoming gradient, if that is larger."""
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        x, y = x.cpu(), actual[name].double().cpu()
        assert torch.equal(y.isinf(), x.isinf()), name
        error = torch.where(x.isinf(), 0.0, y - x).norm()
        assert error <= tolerance * max(torch.where(x.isinf(), 0.0, x).norm().item(), incoming), (name, error.item())


def check(attention, inputs, grads, formula=None, **options):
    """Compares outputs and all gradients with the formula. `options` are for both; `formula` for it alone."""
    on_host = {name: x.cpu() for name, x in inputs.items()}
    host_options = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    expected = run(weighed, on_host, tuple(x.cpu() for x in grads), **host_options, **(formula or {}))
    assert_equal(run(attention, inputs, grads, **options), expected, grads[0].norm().item())


with_lse = partial(fastmax_attention, causal=True, return_lse=True)
flash = partial(flash_attention, causal=True, return_lse=True)


# ---- equal to the formula in float64


@pytest.mark.parametrize("n, m", [(1, 1), (1, 17), (17, 17), (24, 30)])
@by_order
@by_window
@by_gradient
@by_algorithm
def test_small_sizes(algorithm, custom, window, p, n, m, device):
    inputs, grads = make(Case("", n=n, m=m, b=2, h=4, hk=2, d=5, dv=3), device=device)
    attention = partial(with_lse, algorithm=algorithm, use_custom_gradient=custom)
    check(attention, inputs, grads, p=p, exact_window=window, temperature=9.0, a0=2.0, a1=0.7, a2=0.4)


@in_turn("custom")
@pytest.mark.parametrize("change", [-1, 0, 1])
@pytest.mark.parametrize("before", [0, 70])
@by_order
@by_gradient
@by_algorithm
def test_sizes_of_chunks(algorithm, custom, p, before, change, device):
    n = (CHUNK if p == 2 else CHUNK_P1) + change
    inputs, grads = make(Case("", n=n, m=n + before, h=2, hk=1, d=16, dv=16), device=device)
    attention = partial(with_lse, algorithm=algorithm, use_custom_gradient=custom)
    check(attention, inputs, grads, p=p, temperature=40.0)


OPTIONS = ("key padding", "one sequence of padding", "packed", "noise", "sinusoidal", "rpe matrix", "normalize", "decay",
           "decay and padding", "decay and packed")  # fmt: skip


def make_option(option, case, device):
    """Returns the options of the call. For "sinusoidal" the formula has the matrix of the reference in its place."""
    options = {}
    if "padding" in option:
        options["attention_mask"] = torch.rand(case.b, case.m) < 0.6
        if option == "one sequence of padding":
            options["attention_mask"][0] = False
    if "packed" in option:
        options["cu_seqlens"] = torch.tensor([0, 1, 9, 9, 22, case.m], dtype=torch.int32)
    if option == "noise":
        options |= {"dropout": 0.3, "drop_noise": torch.randn(case.b, case.h, case.n, case.dv, dtype=torch.float64)}
    if option == "normalize":
        options |= {"normalize": "token", "lim": 1.3}
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


@in_turn("custom")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("window", [0, 5])
@by_gradient
@by_algorithm
def test_options(algorithm, custom, window, option, device):
    if option == "rpe matrix" and (window or algorithm == "linear"):
        pytest.skip("refused")
    case = Case("", n=30, m=30, b=1, h=4, hk=2, d=8, dv=6) if "packed" in option else SMALL
    inputs, grads = make(case, device=device)
    options = make_option(option, case, device) | {"exact_window": window, "temperature": 3.0}
    if "decay" in option:
        inputs["log_decay"] = make_decay("-inf at places", case.b, case.hk, case.m, dtype=torch.float64, device=device)
    if option == "rpe matrix":
        inputs["rpe_matrix"] = torch.randn(case.n + case.m - 1, case.d, dtype=torch.float64, device=device)
    attention = partial(with_lse, algorithm=algorithm, use_custom_gradient=custom)
    if option != "sinusoidal":
        check(attention, inputs, grads, **options)
        return
    row = case.m - 1 - torch.arange(case.n + case.m - 1.0, dtype=torch.float64)[:, None]
    column = torch.arange(case.d, dtype=torch.float64)
    angle = row * 10000.0 ** (-2.0 * (column // 2) / case.d)
    matrix = torch.where(column % 2 == 1, angle.cos(), angle.sin())
    check(partial(attention, rpe_matrix="sinusoidal"), inputs, grads, formula={"rpe_matrix": matrix}, **options)


@in_turn("custom")
@pytest.mark.parametrize("decay", [None, "ordinary", "none, ordinary or strong", "-inf at places", "-inf everywhere"])
@pytest.mark.parametrize("window", [0, 20, LONG.m - 1, LONG.m])
@by_gradient
@by_algorithm
def test_decays(algorithm, custom, window, decay, device):
    inputs, grads = make(LONG, device=device)
    if decay is not None:
        inputs["log_decay"] = make_decay(decay, 1, 1, LONG.m, dtype=torch.float64, device=device)
    attention = partial(with_lse, algorithm=algorithm, use_custom_gradient=custom)
    check(attention, inputs, grads, exact_window=window, temperature=3.0)


@pytest.mark.parametrize("masked", [False, True], ids=["all keys", "masked"])
@pytest.mark.parametrize("decay", [None, "ordinary"])
def test_parts_of_the_quadratic_algorithm(decay, masked, device, monkeypatch):
    """A GPU computes float64 by parts, a CPU in one pass."""
    monkeypatch.setattr(sequences, "_takes_one_pass", lambda *call: False)
    inputs, grads = make(LONG, device=device)
    if decay is not None:
        inputs["log_decay"] = make_decay(decay, 1, 1, LONG.m, dtype=torch.float64, device=device)
    options = {"attention_mask": torch.rand(1, LONG.m, device=device) < 0.5} if masked else {}
    check(partial(with_lse, algorithm="quadratic"), inputs, grads, exact_window=20, temperature=3.0, **options)


@in_turn("custom")
@pytest.mark.parametrize("option", ["plain", "key padding", "packed", "decay", "decay and padding"])
@pytest.mark.parametrize("window", [None, 1, 9, 10**6])
@by_gradient
def test_flash_attention(custom, window, option, device):
    case = Case("", n=30, m=30, b=1, h=4, hk=2, d=8, dv=6) if option == "packed" else SMALL
    inputs, grads = make(case, device=device)
    if "decay" in option:
        inputs["log_decay"] = make_decay("-inf at places", case.b, case.hk, case.m, dtype=torch.float64, device=device)
    options = make_option(option, case, device) | {"window": window, "scale": 0.4}
    check(partial(flash, use_custom_gradient=custom), inputs, grads, formula={"softmax": True}, **options)


def test_long_flash_attention(device):
    inputs, grads = make(LONG, device=device)
    for window in (None, 30):
        check(flash, inputs, grads, formula={"softmax": True}, window=window)


@by_algorithm
def test_layouts(algorithm, device):
    """Gates and tokens of any strides, and 3-d tensors, give the numbers of contiguous 4-d ones."""
    inputs, grads = make(SMALL, device=device)
    attention = partial(with_lse, algorithm=algorithm, exact_window=4)
    expected = run(attention, inputs, grads)
    b, hk, m = inputs["log_input_gate"].shape
    wide = torch.randn(m, 3 * hk, b, dtype=torch.float64, device=device)
    strided = wide[:, 1::3].permute(2, 1, 0)
    assert not strided.is_contiguous()
    strided.copy_(inputs["log_input_gate"])
    token_major = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items() if name in "qkv"}
    assert_equal(run(attention, token_major | {"log_input_gate": strided}, grads), expected)
    expanded = inputs["log_input_gate"][:1, :1].expand(b, hk, m)
    same = run(attention, inputs | {"log_input_gate": expanded.contiguous()}, grads)
    assert_equal(run(attention, inputs | {"log_input_gate": expanded}, grads), same)
    flat = run(attention, {name: x.flatten(0, 1) for name, x in inputs.items()}, tuple(x.flatten(0, 1) for x in grads))
    assert_equal(flat, {name: x.flatten(0, 1) for name, x in expected.items()})


@by_algorithm
def test_a_gate_of_zero_changes_nothing(algorithm, device):
    inputs, (grad_o, _) = make(SMALL, device=device)
    plain = {name: x for name, x in inputs.items() if name != "log_input_gate"}
    attention = partial(fastmax_attention, causal=True, algorithm=algorithm)
    expected = run(attention, plain, grad_o)
    actual = run(attention, plain | {"log_input_gate": torch.zeros_like(inputs["log_input_gate"])}, grad_o)
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name


def test_no_tokens(device):
    for n, m in ((0, 0), (0, 5)):
        inputs, grads = make(Case("", n=n, m=m, b=1, h=2, hk=1, d=3, dv=2), device=device)
        for custom in (True, False):
            for attention in (with_lse, flash):
                result = run(partial(attention, use_custom_gradient=custom), inputs, grads)
                assert result["o"].shape == (1, 2, n, 2) and not result["grad log_input_gate"].any()


@by_gradient
@by_algorithm
def test_a_window_of_all_keys_has_gradient_zero(algorithm, custom, device):
    inputs, (grad_o, _) = make(SMALL, device=device)
    attention = partial(fastmax_attention, causal=True, algorithm=algorithm, use_custom_gradient=custom, exact_window=SMALL.m)
    result = run(attention, inputs, grad_o)
    assert not result["grad log_input_gate"].any() and result["grad k"].any()


# ---- the range


@by_gradient
@pytest.mark.parametrize("attention", [partial(with_lse, algorithm="quadratic"), partial(with_lse, algorithm="linear"), flash])
def test_values_outside_the_range(attention, custom, device):
    """They count as the nearest end, also -inf, which does not hide its key; their gradient is 0, that of the ends is not."""
    inputs, grads = make(SMALL, "beyond", device=device)
    gate = inputs["log_input_gate"]
    outside = (gate < LEAST) | (gate > GREATEST)
    assert (gate == -INF).any() and (gate == LEAST).any() and (gate == GREATEST).any()
    attention = partial(attention, use_custom_gradient=custom)
    actual = run(attention, inputs, grads)
    expected = run(attention, inputs | {"log_input_gate": gate.clamp(LEAST, GREATEST)}, grads)
    assert not actual["grad log_input_gate"][outside].any()
    assert (expected["grad log_input_gate"][outside] != 0).any()
    expected["grad log_input_gate"] = expected["grad log_input_gate"].masked_fill(outside, 0.0)
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name
    assert actual["grad log_input_gate"][gate == GREATEST].any()
    single = {name: x[:, :, :1] for name, x in inputs.items()}
    single["log_input_gate"] = torch.full_like(single["log_input_gate"], -INF)
    o = attention(**single)[0]
    torch.testing.assert_close(o, single["v"].repeat_interleave(2, dim=1))


@pytest.mark.parametrize("decay", [False, True], ids=["plain", "decay"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["fastmax", "exact window", "flash"])
@by_gradient
@by_algorithm
def test_extreme_gates(algorithm, custom, kind, dtype, tolerance, decay, device):
    """Ends of the range beside each other: weights of one row differ by exp(90), and sums of rows too."""
    if kind == "flash" and algorithm == "linear":
        pytest.skip("flash_attention has one algorithm")
    case = Case("", n=CHUNK + 30, m=CHUNK + 30, b=1, h=2, hk=2, d=8, dv=8)
    inputs, grads = make(case, "ends", dtype, device)
    inputs["log_input_gate"][:, :, : CHUNK + 5] = LEAST  # rows that see weak keys alone
    inputs["log_input_gate"][:, 1, 3] = GREATEST
    assert inputs["log_input_gate"].dtype == torch.float32
    options, formula = {"flash": ({"scale": 0.3}, {"softmax": True})}.get(kind, ({"temperature": 3.0}, {}))
    if kind == "exact window":
        options["exact_window"] = 7
    if decay:
        inputs["log_decay"] = make_decay("ordinary", 1, 2, case.m, dtype=torch.float32, device=device)
    attention = flash if kind == "flash" else partial(with_lse, algorithm=algorithm)
    exact_grads = tuple(x.double().cpu() for x in grads)
    exact = run(weighed, {name: x.double().cpu() for name, x in inputs.items()}, exact_grads, **options, **formula)
    actual = run(partial(attention, use_custom_gradient=custom), inputs, grads, **options)
    for name, x in exact.items():
        assert actual[name].isfinite().all(), name
        assert (actual[name].double().cpu() - x).norm() <= tolerance * max(x.norm().item(), grads[0].double().norm().item()), (
            name
        )
    assert (actual["lse"].double().cpu() - exact["lse"]).abs().max() <= 20 * tolerance
    assert kind == "exact window" or exact["lse"].min() < -50 < 20 < exact["lse"].max()


@by_algorithm
def test_dtypes_of_gates(algorithm, device):
    """A gate in any floating dtype counts in float32 beside float32 and half tokens, and its gradient has its dtype."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        inputs, grads = make(SMALL, dtype=dtype, device=device)
        attention = partial(with_lse, algorithm=algorithm)
        for gate_dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            gate = inputs["log_input_gate"].to(gate_dtype)
            actual = run(attention, inputs | {"log_input_gate": gate}, grads)
            assert actual["grad log_input_gate"].dtype == gate_dtype and actual["o"].dtype == dtype
            expected = run(attention, inputs | {"log_input_gate": gate.float()}, grads)
            assert torch.equal(actual["o"], expected["o"]) and torch.equal(actual["lse"], expected["lse"])
            expected = expected["grad log_input_gate"].to(gate_dtype)
            torch.testing.assert_close(actual["grad log_input_gate"], expected)


@by_gradient
def test_autocast(custom, device):
    """q, k and v are cast, the gate is not: one that is no bfloat16 number changes the log-sum by itself."""
    inputs, _ = make(TINY, dtype=torch.float32, device=device)
    gate = torch.full_like(inputs.pop("log_input_gate"), 10.0009765625)
    with torch.autocast(device.type if hasattr(device, "type") else device, torch.bfloat16):
        o, lse = with_lse(**inputs, log_input_gate=gate, use_custom_gradient=custom)
        _, plain = with_lse(**inputs, use_custom_gradient=custom)
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(lse - plain, gate.new_full((), 10.0009765625).expand_as(lse), rtol=0, atol=1e-5)


# ---- NaN


@in_turn("custom")
@pytest.mark.parametrize("option", ["plain", "key padding", "packed", "decay"])
@pytest.mark.parametrize("window", [0, 9])
@by_gradient
@by_algorithm
def test_nan(algorithm, window, option, custom, device):
    """A gate of NaN makes the rows NaN that weigh its key by it. Masked keys, keys in the window, keys before a reset and other
    sequences do not count."""
    n = CHUNK + 67
    inputs, _ = make(Case("", n=n, m=n, b=1, h=4, hk=2, d=4, dv=3), device=device)
    options = {"exact_window": window, "temperature": 3.0}
    inputs["log_input_gate"][0, 0, 40] = inputs["log_input_gate"][0, 1, [7, n - 9, n - 1]] = NAN
    if option == "key padding":
        options["attention_mask"] = torch.rand(1, n, device=device) < 0.5
        options["attention_mask"][0, [7, 40]] = torch.tensor([False, True], device=device)
    if option == "packed":
        options["cu_seqlens"] = torch.tensor([0, 5, 39, 39, CHUNK - 3, CHUNK + 3, n], dtype=torch.int32, device=device)
    if option == "decay":
        inputs["log_decay"] = make_decay("ordinary", 1, 2, n, dtype=torch.float64, device=device)
        inputs["log_decay"][0, 0, [2, 90, CHUNK + 5]] = -INF
    host = {name: x.cpu() for name, x in inputs.items()}
    expected = weighed(**host, **{name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()})
    assert 0 < expected[0].isnan().sum() < expected[0].numel()
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    actual = with_lse(**leaves, algorithm=algorithm, use_custom_gradient=custom, **options)
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x.isnan().cpu(), y.isnan())
        torch.testing.assert_close(x.detach().cpu(), y, rtol=1e-9, atol=1e-9, equal_nan=True)
    grad_q = torch.autograd.grad(actual[0].sum(), leaves["q"])[0]
    assert torch.equal(grad_q.isnan().any(-1), actual[0].isnan().any(-1))


@by_gradient
@pytest.mark.parametrize("window", [None, 1, 30])
def test_nan_in_flash_attention(window, custom, device):
    """A NaN that has left the window is of no effect."""
    inputs, _ = make(Case("", n=300, m=340, b=2, h=4, hk=2, d=4, dv=3), device=device)
    inputs["log_input_gate"][1, 0, [70, 200, 339]] = NAN
    options = {"window": window, "attention_mask": torch.rand(2, 340, device=device) < 0.5, "scale": 0.4}
    options["attention_mask"][1, [70, 200, 339]] = torch.tensor([True, False, True], device=device)
    host = {name: x.cpu() for name, x in inputs.items()}
    expected = weighed(**host, softmax=True, **options | {"attention_mask": options["attention_mask"].cpu()})
    assert 0 < expected[0].isnan().sum() < expected[0].numel()
    for x, y in zip(flash(**inputs, use_custom_gradient=custom, **options), expected, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-9, atol=1e-9, equal_nan=True)


# ---- transforms and compilers


@pytest.mark.parametrize("algorithm, window", [("quadratic", 0), ("linear", 0), ("linear", 2)])
def test_derivatives_of_autograd(algorithm, window, device):
    inputs, _ = make(TINY, device=device)
    leaves = [x.requires_grad_() for x in inputs.values()]

    def attention(q, k, v, gate):
        return with_lse(
            q, k, v, log_input_gate=gate, use_custom_gradient=False, algorithm=algorithm, exact_window=window, temperature=2.0
        )

    assert gradcheck(attention, leaves, check_forward_ad=True)
    assert gradgradcheck(attention, leaves)


def test_derivatives_of_flash_attention(device):
    inputs, _ = make(TINY, device=device)
    leaves = [x.requires_grad_() for x in inputs.values()]

    def attention(q, k, v, gate):
        return flash(q, k, v, log_input_gate=gate, use_custom_gradient=False, window=3)

    assert gradcheck(attention, leaves)
    assert gradgradcheck(attention, leaves)


@by_algorithm
def test_second_derivatives_of_the_custom_gradient_are_refused(algorithm, device):
    inputs, _ = make(TINY, device=device)
    gate = inputs["log_input_gate"].requires_grad_()
    o, _ = with_lse(**inputs, algorithm=algorithm)
    (gradient,) = torch.autograd.grad(o.sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="use_custom_gradient=False"):
        gradient.sum().backward()


@by_algorithm
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_and_grad(algorithm, device):
    inputs, _ = make(TINY, device=device)
    q, k, v, gate = inputs.values()

    def loss(gate, q):
        return with_lse(q, k, v, log_input_gate=gate, use_custom_gradient=False, algorithm=algorithm)[0].square().sum()

    gates, queries = torch.stack([gate, gate - 1.0, 2.0 * gate]), torch.stack([q, 2.0 * q, -q])
    actual = torch.func.vmap(torch.func.grad(loss))(gates, queries)
    for x, given, q in zip(actual, gates, queries, strict=True):
        leaf = given.clone().requires_grad_()
        torch.testing.assert_close(x, torch.autograd.grad(loss(leaf, q), leaf)[0])


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing(reentrant, device):
    inputs, grads = make(SMALL, device=device)
    check_checkpointing(partial(with_lse, exact_window=3), inputs, grads, reentrant)


def test_spans_are_checkpointed(device, monkeypatch):
    """`use_custom_gradient=False` records gates through checkpoints too, which a long call has."""
    called = []
    original = Scan.call
    monkeypatch.setattr(Scan, "call", lambda self, *arguments: called.append(self.checkpointing) or original(self, *arguments))
    inputs, grads = make(Case("", n=2 * ROWS, m=2 * ROWS + 5, b=1, h=1, hk=1, d=4, dv=3), device=device)
    check(partial(with_lse, algorithm="quadratic", use_custom_gradient=False), inputs, grads, temperature=2.0)
    assert any(called)


@pytest.mark.parametrize("algorithm, window, custom", [("linear", 0, True), ("quadratic", 6, True), ("linear", 0, False)])
def test_compiled(algorithm, window, custom, device):
    inputs, grads = make(SMALL, dtype=torch.float32, device=device)
    inputs["log_decay"] = make_decay("ordinary", SMALL.b, SMALL.hk, SMALL.m, dtype=torch.float32, device=device)
    attention = partial(with_lse, algorithm=algorithm, use_custom_gradient=custom, exact_window=window)
    check_compiled(attention, inputs, grads)


def test_compiled_flash_attention(device):
    inputs, grads = make(SMALL, dtype=torch.float32, device=device)
    check_compiled(flash, inputs, grads)


def test_one_graph_for_all_lengths(device):
    def make_length(n):
        return *make(Case("", n=n, m=n, b=2, h=4, hk=2, d=8, dv=6), dtype=torch.float32, device=device), {}

    check_one_graph_for_all_lengths(with_lse, make_length)


def test_operators(device):
    inputs, grads = make(TINY, dtype=torch.float32, device=device)
    gate = inputs.pop("log_input_gate")
    mask = torch.tensor([[True, False, True, True, True, True]], device=device)
    first = torch.zeros(1, 1, TINY.n, dtype=torch.int32, device=device)
    score, polynomial = 0.5, (0.5, 1.0, 1.0, 0.5, 2)
    opcheck("", inputs, grads, mask, None, None, None, first, None, gate, *polynomial, True, 0.0, "linear", False, traced=False)
    opcheck("flash_", inputs, grads, mask, None, first, None, gate, score, True, -1, -1, False, traced=False)
    opcheck("exact_window_", inputs, grads, mask, None, first, None, gate, *polynomial, True, "auto", 2, False, traced=False)


# ---- dispatch and errors


def test_kernels_take_gates(device):
    """Those that normalise rows do not, and no call of them is chosen that drops a gate."""
    for name in ("forward", "backward", "flash_forward", "exact_window_forward", "prefill"):
        arguments = [x.name for x in getattr(torch.ops.fastmax, name).default._schema.arguments]
        of_kernel = [x.name for x in getattr(torch.ops.fastmax_cuda, name).default._schema.arguments]
        assert "log_input_gate" in arguments
        assert of_kernel == [x for x in arguments if x != "rpe_matrix"]
    gate = torch.zeros(1, 1, 4)
    call = Call(Score(1.0, 1.0, 1.0, 0.5, 1), causal=True, log_input_gate=gate)
    assert not normalizes_during_attention(*torch.zeros(3, 1, 1, 4, 8, device=device), call, 1.0)


@pytest.mark.parametrize("attention", [fastmax_attention, flash_attention])
def test_errors(attention, device):
    inputs, _ = make(TINY, device=device)
    gate = inputs.pop("log_input_gate")
    call = partial(attention, **inputs)
    with pytest.raises(ValueError, match=r"^log_input_gate needs causal=True, got causal = False$"):
        call(log_input_gate=gate)
    for wrong, error, message in (
        (gate[..., 1:], ValueError, r"^log_input_gate must have shape \(1, 1, 6\), .* got \(1, 1, 5\)$"),
        (gate.expand(1, 2, 6), ValueError, r"^log_input_gate must have shape"),
        (gate.squeeze(0), ValueError, r"^log_input_gate must have shape"),
        (gate.long(), TypeError, r"^log_input_gate must be float64, float32, float16 or bfloat16, got torch.int64$"),
        (1.0, TypeError, r"^log_input_gate must be a tensor .*, got 1.0 \(float\)$"),
        (True, TypeError, r"^log_input_gate must be a tensor"),
        (gate.to_sparse(), TypeError, r"^log_input_gate must be a dense tensor"),
    ):
        with pytest.raises(error, match=message):
            call(causal=True, log_input_gate=wrong)


def test_errors_of_operators(device):
    inputs, _ = make(TINY, dtype=torch.float32, device=device)
    gate = inputs.pop("log_input_gate")
    rest = 0.5, 1.0, 1.0, 0.5, 2

    def call(gate, causal=True):
        return torch.ops.fastmax.forward(*inputs.values(), *[None] * 6, gate, *rest, causal, 0.0, "auto", False)

    call(gate)
    for wrong, causal, error in (
        (gate[..., 1:], True, ValueError),
        (gate.double(), True, TypeError),
        (gate, False, ValueError),
    ):
        with pytest.raises(error if device.type == "cpu" else RuntimeError, match="log_input_gate "):
            call(wrong, causal)


# ---- where it is not known, it is refused by name


def test_layers_refuse_it():
    layer, gate = FastmaxSelfAttention(16, 2), torch.zeros(1, 2, 4)
    with pytest.raises(TypeError, match="log_input_gate"):
        layer(torch.randn(1, 4, 16), log_input_gate=gate)
    for module, sizes in ((FASTMultiHeadAttention, ()), (FastmaxSelfAttention, (16, 2))):
        with pytest.raises(TypeError, match="log_input_gate"):
            module(*sizes, log_input_gate=gate)
