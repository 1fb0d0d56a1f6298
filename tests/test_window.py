"""`window` of `flash_attention` against the definition, with every other option, and inside PyTorch's transforms and
compilers."""

from functools import partial

import pytest
import torch
from common import (
    COLS,
    DTYPES,
    ROWS,
    Case,
    assert_equals_definition,
    by_causal,
    by_gradient,
    check_checkpointing,
    check_compiled,
    check_one_graph_for_all_lengths,
    compare,
    dtype_id,
    in_turn,
    make_decay,
    make_inputs,
    opcheck,
    run,
)
from test_flash import ExpectedFlash
from test_validation import good

from fastmax import flash_attention
from fastmax.testing.reference import naive_softmax_attention

SMALL = Case("small", n=30, m=35, b=2, h=4, hk=2, d=8, dv=6)
TILES = Case("a tile and more", n=ROWS + 13, m=COLS + 30, b=1, h=2, hk=1, d=4)

with_lse = partial(flash_attention, return_lse=True)
# Bounds on both sides, one side and none; windows of one key, of a tile and of more than there is.
WINDOWS = (1, 2, 7, 34, 35, 36, 1000, (0, 0), (3, 0), (0, 3), (5, -1), (-1, 2), (-1, 0), (2, 5), (-1, -1), (1000, 1000))
by_window = pytest.mark.parametrize("window", WINDOWS, ids=str)
by_reentrant = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def make(case, dtype=torch.float32, device="cpu"):
    inputs, grad_o = make_inputs(case, dtype, device)
    return inputs, (
        grad_o,
        torch.randn(case.b, case.h, case.n).to(device, torch.float64 if grad_o.dtype == torch.float64 else torch.float32),
    )


class ExpectedWindow(ExpectedFlash):
    definition = staticmethod(lambda *args, hold_denominator=False, **options: naive_softmax_attention(*args, **options))


@in_turn("custom")
@by_window
@by_causal
@by_gradient
def test_every_window_in_float64(custom, causal, window, device):
    attention = partial(with_lse, use_custom_gradient=custom)
    mask = torch.rand(SMALL.b, SMALL.m, device=device) > 0.3
    for options in ({}, {"attention_mask": mask, "scale": 0.7}):
        inputs, grads = make(SMALL, torch.float64, device)
        assert_equals_definition(attention, naive_softmax_attention, inputs, grads, causal=causal, window=window, **options)


@in_turn("custom")
@pytest.mark.parametrize("window", [1, 64, COLS, COLS + 1, (COLS, 3), (17, -1), (-1, 17)], ids=str)
@by_causal
@by_gradient
def test_across_tiles_in_float64(custom, causal, window, device):
    inputs, grads = make(TILES, torch.float64, device)
    attention = partial(with_lse, use_custom_gradient=custom)
    assert_equals_definition(attention, naive_softmax_attention, inputs, grads, causal=causal, window=window)


@pytest.mark.parametrize("window", [1, 5, (3, -1), (-1, 2)], ids=str)
@by_gradient
def test_more_queries_than_keys(custom, window, device):
    """Query i is aligned with key i + m - n, which is negative for the first queries: most of them see no key."""
    inputs, grads = make(Case("", n=60, m=35, h=2, hk=1, d=4), torch.float64, device)
    attention = partial(with_lse, use_custom_gradient=custom)
    actual = assert_equals_definition(attention, naive_softmax_attention, inputs, grads, window=window)
    blind = actual["lse"].isneginf()
    assert blind.any() == (window != (3, -1)) and not actual["o"][blind].any() and not actual["grad q"][blind].any()


@by_gradient
@pytest.mark.parametrize("window", [4, (6, 0), (-1, 0)], ids=str)
def test_with_decay(window, custom, device):
    inputs, grads = make(SMALL, torch.float64, device)
    inputs["log_decay"] = make_decay("-inf at places", 2, 2, 35, dtype=torch.float64, device=device)
    attention = partial(with_lse, use_custom_gradient=custom)
    assert_equals_definition(attention, naive_softmax_attention, inputs, grads, causal=True, window=window)


@in_turn("custom")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@by_causal
@by_gradient
def test_dtypes(custom, causal, dtype, device):
    ExpectedWindow(*make(TILES, dtype, device), causal=causal, window=40).check(custom=custom)


@by_causal
@by_gradient
def test_a_window_over_everything_changes_nothing(custom, causal, device):
    inputs, grads = make(SMALL, device=device)
    attention = partial(with_lse, causal=causal, use_custom_gradient=custom)
    plain = run(attention, inputs, grads)
    for window in (SMALL.m, 10**6, (-1, -1), (SMALL.m, SMALL.m)):
        compare(run(attention, inputs, grads, window=window), plain)


@by_gradient
def test_what_no_window_reaches_leaves_no_trace(custom, device):
    """Huge keys and values outside of all windows change no result."""
    inputs, grads = make(Case("", n=1, m=500, h=2, hk=1, d=8), device=device)
    attention = partial(with_lse, causal=True, window=20, use_custom_gradient=custom)
    before = run(attention, inputs, grads)
    after = run(attention, inputs | {name: torch.cat([0.0 * x[:, :, :-20] + 1e6, x[:, :, -20:]], 2)
                                     for name, x in inputs.items() if name in "kv"}, grads)  # fmt: skip
    compare(after, before)
    assert not after["grad v"][:, :, :-20].any() and after["grad v"][:, :, -20:].any()


def test_three_dimensions(device):
    inputs, grads = make(SMALL, device=device)
    attention = partial(with_lse, causal=True, window=(9, 0))
    flat = run(attention, {name: x.flatten(0, 1) for name, x in inputs.items()}, tuple(x.flatten(0, 1) for x in grads))
    compare(flat, {name: x.flatten(0, 1) for name, x in run(attention, inputs, grads).items()})


# ---- inside PyTorch


@pytest.mark.parametrize("causal, left, right", [(True, 4, -1), (False, 0, 3)])
def test_opcheck(causal, left, right, device):
    inputs, grads = make(SMALL, device=device)
    opcheck("flash_", inputs, grads, *[None] * 5, 0.5, causal, left, right, False)


def test_compile(device, fresh_dynamo):
    check_compiled(with_lse, *make(SMALL, device=device), window=(3, 2))


def test_compile_dynamic_is_one_graph_for_all_lengths(device, fresh_dynamo):
    attention = partial(with_lse, causal=True, window=20)
    check_one_graph_for_all_lengths(attention, lambda n: (*make(Case("", n=n, d=4), device=device), {}))


@by_gradient
@by_reentrant
def test_activation_checkpointing(reentrant, custom, device):
    inputs, grads = make(SMALL, device=device)
    check_checkpointing(partial(with_lse, window=5, use_custom_gradient=custom), inputs, grads, reentrant)


@by_gradient
def test_autocast(custom, device):
    inputs, _ = make(SMALL, device=device)
    attention = partial(with_lse, window=6, use_custom_gradient=custom)
    with torch.autocast(device.type, torch.bfloat16):
        o, lse = attention(**inputs)
    expected = attention(**{name: x.bfloat16() for name, x in inputs.items()})
    assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])


def test_torch_func_by_autograd(device):
    inputs, _ = make(Case("", n=6, h=2, hk=1, d=3), torch.float64, device)

    def loss(q):
        return flash_attention(q, inputs["k"], inputs["v"], window=(2, 1), use_custom_gradient=False).square().sum()

    q = inputs["q"].clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(q.detach()), torch.autograd.grad(loss(q), q)[0])
    torch.testing.assert_close(torch.func.hessian(loss)(q.detach()), torch.autograd.functional.hessian(loss, q))


@pytest.mark.cuda
def test_cost_does_not_grow_with_what_is_not_visited():
    """A window of 128 over 2^19 tokens takes milliseconds; all pairs, 2^38, would take minutes."""
    q, k, v = (torch.randn(1, 1, 2**19, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    flash_attention(q, k, v, causal=True, window=128)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    flash_attention(q, k, v, causal=True, window=128)
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) < 200.0


# ---- refused

REFUSED = {
    "of zero": (0, ValueError, "window must.*0"),
    "negative": (-3, ValueError, "window must.*-3"),
    "a bool": (True, TypeError, "window must.*True"),
    "a float": (4.0, TypeError, "window must.*4.0"),
    "text": ("4", TypeError, "window must.*'4'"),
    "a tensor": (torch.tensor(4), TypeError, "window must.*tensor"),
    "one bound": ((4,), (TypeError, ValueError), r"window must.*\(4,\)"),
    "three bounds": ((4, 4, 4), (TypeError, ValueError), r"window must.*\(4, 4, 4\)"),
    "a bound below -1": ((-2, 0), ValueError, r"window must.*-2"),
    "a bound that is a float": ((4, 0.5), TypeError, r"window must.*0\.5"),
    "a bound that is a bool": ((True, 0), TypeError, r"window must.*True"),
    "a bound that is None": ((None, 0), TypeError, r"window must.*None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    value, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        flash_attention(**good(), window=value)
