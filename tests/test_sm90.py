"""The Hopper kernels of the quadratic algorithm and of softmax attention: which calls take them, and their results. Tiles: a
warpgroup owns 64 queries (blocks of 192 at head dims 32 and 64, of 128 above) and walks over 128 keys at a time. In the
backward it owns 64 keys and walks over 64 queries, or owns 64 queries (blocks of 192 at head dim 32) and walks over 128 keys,
over 64 at head dims other than 64. Large enough calls at head dims 32, 64 and 128 have a backward in one kernel, whose blocks
of 128 keys walk over 64 queries and pass grad_q on from one to the next, at 32 in steps of 256 queries, at 64 of 128.
test_padding.py has the masks."""

import ctypes
import itertools
import math
import re
import threading
from contextlib import contextmanager

import pytest
import torch
from common import assert_replayed
from test_kernels import DEVICE, WHY_NOT, capture, operands, size

import fastmax
from fastmax.ops import extension
from fastmax.testing import checks, evaluation, verify
from fastmax.testing.debug_log import ATTENTION_CALL
from fastmax.testing.errors import ROUNDING, measure
from fastmax.testing.evaluation import implementation
from fastmax.testing.random_configurations import hopper_indices
from fastmax.testing.tensors import random_tensors

ON_HOPPER = WHY_NOT is None and torch.cuda.get_device_capability() == (9, 0) and "quadratic_sm90" in extension.build_info()
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not ON_HOPPER, reason=f"the Hopper kernels do not run: {WHY_NOT or 'another device, or not built'}"),
]

by_attention = pytest.mark.parametrize("softmax", [False, True], ids=["fastmax", "flash"])
by_head_dim = pytest.mark.parametrize("d", [32, 64, 96, 128], ids=lambda d: f"d{d}")


@pytest.fixture
def taken(capfd):
    """Returns taken(), which lists the kernels of the calls since the last time, like "backward: quadratic_sm90"."""

    def lines():
        return [": ".join(call) for call in ATTENTION_CALL.findall(capfd.readouterr().err)]

    extension.set_debugging(True)
    lines()
    yield lines
    extension.set_debugging(False)


def case_of(softmax, *args, **options):
    """Returns a bf16 case for the kernels of the quadratic algorithm or of softmax attention."""
    case = size("", *args, **options)
    for_softmax = {"causal": case.options["causal"]}
    options = for_softmax if softmax else case.options | {"algorithm": "quadratic"}
    return case._replace(options=options, softmax=softmax, dtype=torch.bfloat16, noise=case.noise and not softmax)


def expected_kernels(softmax, bounded=False, fused=False):
    if bounded:
        return {line.replace("_sm90", "_bounded_sm90") for line in expected_kernels(softmax)}
    if fused:
        return {re.sub("(backward.*)_sm90", r"\1_fused_sm90", line) for line in expected_kernels(softmax)}
    return (
        {"flash_forward: flash_sm90", "flash_backward: flash_sm90"}
        if softmax
        else {
            "forward: quadratic_sm90",
            "backward: quadratic_sm90",
        }
    )


def expected_decay_kernels(softmax):
    return {line.replace("_sm90", "_decay_sm90") for line in expected_kernels(softmax)}


# ---- against float64, on poisoned memory, bit by bit repeatable

# The first that fails says most: one tile, several, both kinds of tails, blocks beside each other, everything else.
ROWS = [
    dict(n=64, m=128, causal=False, b=1, h=1),
    dict(n=64, b=1, h=1),
    dict(n=128, b=1, h=1),
    dict(n=64, m=1024, causal=False, b=1, h=1),
    dict(n=1024, m=128, causal=False, b=1, h=1),
    *(dict(n=n) for n in (1, 8, 63, 65, 127, 129, 191, 192, 193, 255, 256, 257, 383, 385, 512, 577, 1000, 1025)),
    *(
        dict(n=n, m=m, causal=c)
        for n, m in ((1, 300), (17, 64), (64, 129), (129, 1000), (300, 301), (200, 455))
        for c in (True, False)
    ),
    *(dict(n=n, m=m, causal=False) for n, m in ((300, 1), (300, 17), (129, 65), (1000, 130))),
    dict(n=300, m=333, h=8, hk=2),
    dict(n=190, m=450, h=6, hk=1),
    dict(n=200, h=6, hk=2, causal=False),
    dict(n=300, m=400, mask=True, h=4, hk=2),
    dict(n=300, m=200, mask=True, causal=False),
    dict(n=300, noise=True),
    dict(n=300, m=333, mask=True, noise=True, layout="packed", h=4, hk=2),
    dict(n=300, layout="token-major", h=4),
    dict(n=300, layout="unaligned", h=4),
    dict(n=300, b=4, h=40),
    dict(n=700, b=3, h=30, hk=10, m=777),
    dict(n=4096, b=1, h=2, hk=1),
    dict(n=5, m=9, b=1, h=70_000, hk=35_000, mask=True),
    dict(n=5, m=7, b=70_000, h=1),
]


def row_id(row):
    return " ".join(f"{name} {value}" for name, value in row.items())


@by_head_dim
@by_attention
@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_against_float64(row, d, softmax, taken):
    if softmax and row.get("noise") and not row.get("mask"):
        pytest.skip("softmax attention has no noise")
    case = case_of(softmax, d=d, **row)
    assert checks.check(case, DEVICE, 1234).wrong == []
    assert set(taken()) == expected_kernels(softmax)


@by_attention
@pytest.mark.parametrize(
    "d, dv",
    [
        *((24, 24), (16, 32), (32, 8), (1, 1), (17, 24), (24, 7), (40, 24), (32, 40), (37, 51), (33, 8)),
        *((96, 96), (80, 80), (65, 65), (88, 32), (24, 96), (48, 128), (128, 16), (72, 100), (1, 100), (127, 127), (128, 64)),
    ],
)
def test_narrower_heads(d, dv, softmax, taken):
    """The copy engine fills missing columns with zeros, and must not write them."""
    for n, m, causal in ((200, 333, True), (200, 333, False), (385, 385, True)):
        case = case_of(softmax, n, m, d=d, dv=dv, h=4, hk=2, mask=n < m, noise=True, causal=causal)
        assert checks.check(case, DEVICE, 5).wrong == []
    assert set(taken()) == expected_kernels(softmax)


@by_attention
@pytest.mark.parametrize("d", [24, 80, 100])
def test_options_of_narrower_heads(d, softmax, taken):
    """The options are bounds, windows and decays."""
    case = case_of(softmax, 500, d=d, b=1, h=4, hk=2)
    assert checks.check(case._replace(sequences=5), DEVICE, 13).wrong == []
    assert set(taken()) == expected_kernels(softmax, bounded=True)
    if softmax:
        assert checks.check(case._replace(options=case.options | {"window": 100}), DEVICE, 14).wrong == []
        assert set(taken()) == {"flash_forward: flash_window_sm90", "flash_backward: flash_window_sm90"}
        assert checks.check(case._replace(dtype=torch.float16), DEVICE, 15).wrong == []
        assert set(taken()) == {"flash_forward: flash_sm90", "flash_backward: flash_sm80"}
    assert checks.check(case._replace(decay=True), DEVICE, 16).wrong == []
    assert set(taken()) == expected_decay_kernels(softmax)


@by_head_dim
@pytest.mark.parametrize(
    "options",
    [dict(p=1), dict(a0=0.7, a1=-0.3, a2=1.1), dict(a0=1e-3, a1=0.0, a2=1.0), dict(magnitude=30.0, temperature=1.0)],
    ids=["p = 1", "other coefficients", "hardly a constant", "large scores"],
)
def test_scores(options, d, taken):
    assert checks.check(case_of(False, 300, 350, d=d, **options), DEVICE, 6).wrong == []
    assert set(taken()) == expected_kernels(False)


@by_head_dim
def test_softmax_of_large_scores(d, taken):
    """The maximum of a row rises or falls from tile to tile."""
    q, k, v = (torch.randn(1, 2, 700, d, device=DEVICE) for _ in range(3))
    ramp = torch.linspace(0.1, 12.0, 700, device=DEVICE)[:, None]
    for keys in (k * ramp, k * ramp.flip(0)):
        narrow = [x.bfloat16() for x in (q, keys, v)]
        o = fastmax.flash_attention(*narrow, causal=True)
        exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in narrow), is_causal=True)
        assert (o.double() - exact).norm() <= 2.0**-7 * exact.norm()
    assert set(taken()) == {"flash_forward: flash_sm90"}


# Rows as above, for bounds and decays too.
@by_head_dim
@pytest.mark.parametrize(
    "row, kind",
    [
        (dict(n=64, m=128, causal=False, b=1, h=1), ""),
        (dict(n=300, m=400, mask=True, h=4, hk=2), ""),
        (dict(n=1025, layout="unaligned"), ""),
        (dict(n=700, b=1, h=4, hk=2), "bounded_"),
        (dict(n=500, m=577), "decay_"),
    ],
    ids=str,
)
def test_softmax_in_fp16(row, kind, d, taken):
    """The forward is a Hopper kernel, the backward a portable one."""
    case = case_of(True, d=d, **row)._replace(dtype=torch.float16)
    case = case._replace(decay=kind == "decay_", sequences=3 if kind == "bounded_" else 0)
    assert checks.check(case, DEVICE, 12).wrong == []
    portable = "flash_bounded_sm80" if kind else "flash_sm80"
    assert set(taken()) == {f"flash_forward: flash_{kind}sm90", f"flash_backward: {portable}"}


@by_head_dim
def test_small_weights_in_fp16(d, taken):
    """One key has e^15 times the weight of any other, and all others together have a third of its weight."""
    n = 1 << 20
    q, k, v = (torch.zeros(1, 1, rows, d, device=DEVICE, dtype=torch.float16) for rows in (1, n, n))
    q[..., 0], k[..., 0, 0], v[..., 1:, :] = 15.0, 1.0, 1.0
    o = fastmax.flash_attention(q, k, v, scale=1.0, causal=False)
    expected = (n - 1) / (n - 1 + math.exp(15.0))
    assert expected > 0.2 and (o.double() / expected - 1).abs().max() < 2.0**-9
    assert set(taken()) == {"flash_forward: flash_sm90"}


@pytest.mark.parametrize("seed", [0, 1000, 2000, 3000])
def test_random_configurations(seed, capsys):
    """The configurations take these kernels and those of the linear algorithm. `fastmax.testing.verify --hopper --random 2000`
    has more."""
    indices = hopper_indices(100, seed, "cuda")
    assert verify.run_random(indices, seed, "cuda", hopper=True) == 0
    counts = dict(re.findall(r"^(\w+: \w+) +(\d+) configurations$", capsys.readouterr().out, re.MULTILINE))
    of_fastmax = {f"forward: {name}_sm90" for name in ("quadratic", "quadratic_bounded", "quadratic_decay", "linear2")}
    assert of_fastmax | {f"flash_forward: {name}_sm90" for name in ("flash", "flash_window")} <= counts.keys()


# ---- the backward in one kernel

# Calls with enough keys and blocks for the fused backward (quadratic/sm90/fused_bwd_plan.h) on up to 132 multiprocessors, the
# simplest first: whole tiles, both kinds of tails, groups of heads, everything else.
FUSED_ROWS = [
    dict(n=64, m=1024, causal=False, b=4, h=9),
    dict(n=128, m=1152, b=1, h=16),
    dict(n=1024, m=1024, causal=False, b=3, h=11),
    dict(n=2048, b=1, h=9),
    *(
        dict(n=n, m=m, b=2, h=16, causal=c)
        for n, m in ((65, 1100), (100, 1151), (127, 1153), (129, 1215), (192, 1217))
        for c in (True, False)
    ),
    dict(n=3000, m=1030, b=2, h=16, causal=False),
    dict(n=1025, m=2048, b=1, h=16),
    dict(n=2100, b=1, h=8),
    dict(n=300, m=1333, b=2, h=16, hk=8),
    dict(n=300, m=1333, b=3, h=32, hk=8, causal=False),
    dict(n=190, m=1450, b=2, h=42, hk=7),
    dict(n=2100, b=2, h=8, hk=4),
    dict(n=300, m=1400, b=2, h=16, hk=8, mask=True),
    dict(n=300, m=1200, b=4, h=8, causal=False, mask=True),
    dict(n=300, m=1333, b=2, h=16, noise=True),
    dict(n=300, m=1333, b=2, h=16, hk=8, mask=True, noise=True, layout="packed"),
    dict(n=300, m=1333, b=2, h=8, layout="token-major"),
    dict(n=300, m=1333, b=2, h=8, layout="unaligned"),
    dict(n=100, m=1100, b=10, h=40),
    dict(n=4096, b=1, h=10, hk=5),
]


by_fused_head_dim = pytest.mark.parametrize("d", [32, 64, 128], ids=lambda d: f"d{d}")


@by_fused_head_dim
@by_attention
@pytest.mark.parametrize("row", FUSED_ROWS, ids=row_id)
def test_fused_against_float64(row, d, softmax, taken):
    if softmax and row.get("noise") and not row.get("mask"):
        pytest.skip("softmax attention has no noise")
    assert checks.check(case_of(softmax, d=d, **row), DEVICE, 1234).wrong == []
    assert set(taken()) == expected_kernels(softmax, fused=True)


@by_attention
@pytest.mark.parametrize(
    "d, dv",
    [
        *((97, 97), (100, 128), (128, 16), (24, 104), (127, 120)),
        *((24, 24), (16, 32), (32, 8), (31, 17), (40, 24), (32, 64), (57, 8)),
    ],
)
def test_fused_narrower_heads(d, dv, softmax, taken):
    for causal in (True, False):
        case = case_of(softmax, 200, 1133, d=d, dv=dv, b=2, h=32, hk=16, mask=True, noise=True, causal=causal)
        assert checks.check(case, DEVICE, 5).wrong == []
    assert set(taken()) == expected_kernels(softmax, fused=True)


@by_fused_head_dim
@pytest.mark.parametrize(
    "options",
    [dict(p=1), dict(a0=0.7, a1=-0.3, a2=1.1), dict(a0=1e-3, a1=0.0, a2=1.0), dict(magnitude=30.0, temperature=1.0)],
    ids=["p = 1", "other coefficients", "hardly a constant", "large scores"],
)
def test_fused_scores(options, d, taken):
    assert checks.check(case_of(False, 300, 1350, d=d, h=16, **options), DEVICE, 6).wrong == []
    assert set(taken()) == expected_kernels(False, fused=True)


@by_fused_head_dim
@by_attention
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_fused_bitwise_repeatable_on_a_full_device(causal, d, softmax, taken):
    """Blocks must add to grad_q in one order, however fast each is. Several groups of heads run one after the other."""
    case = case_of(softmax, 2200, d=d, b=4, h=24 * 128 // d, hk=8 * 128 // d, mask=True, causal=causal)
    tensors = random_tensors(case, DEVICE)
    first = evaluation.run(implementation(softmax), tensors, case.options)
    for _ in range(10):
        again = evaluation.run(implementation(softmax), tensors, case.options)
        assert all(torch.equal(x, again[name]) for name, x in first.items())
    assert set(taken()) == expected_kernels(softmax, fused=True)


@contextmanager
def green_context():
    """Makes a context of 16 multiprocessors current. Skips the test if the device has no such contexts."""
    try:
        green = torch.cuda.GreenContext.create(num_sms=16, device_id=torch.cuda.current_device())
        green.set_context()
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"no green contexts here: {error}")
    try:
        yield
    finally:
        green.pop_context()


def fused_backward(softmax, d, n=2200, b=2, h=8):
    """Returns a function without arguments that computes the gradients of a call with a backward in one kernel."""
    q, k, v, grad_o = (torch.randn(b, h, n, d, device=DEVICE).mul_(0.5).bfloat16() for _ in range(4))
    if softmax:
        arguments = (*[None] * 5, 0.1, True, -1, -1, False)
        forward, backward = torch.ops.fastmax.flash_forward, torch.ops.fastmax.flash_backward
    else:
        arguments = (None,) * 7 + (0.1, 1.0, 1.0, 0.5, 2, True, 0.0, "quadratic", False)
        forward, backward = torch.ops.fastmax.forward, torch.ops.fastmax.backward
    o, z = forward(q, k, v, *arguments)
    return lambda: backward(grad_o, None, q, k, v, o, z, *arguments)[:3]


@by_fused_head_dim
@by_attention
def test_fused_in_a_graph(softmax, d, taken):
    """Every replay must begin with counters of 0."""
    gradients = fused_backward(softmax, d)
    expected = gradients()
    graph, captured = capture(gradients)
    for _ in range(3):
        assert_replayed(graph, captured, expected)
    assert expected_kernels(softmax, fused=True) == set(taken())


@by_fused_head_dim
@by_attention
def test_fused_beside_itself(softmax, d):
    """Two streams run the kernel at once, so neither has the whole device. Blocks that wait for each other must still end."""
    calls = [fused_backward(softmax, d), fused_backward(softmax, d, n=2300, h=10)]
    expected = [call() for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    results = [[], []]
    for _ in range(5):
        for call, stream, found in zip(calls, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(call())
    torch.cuda.synchronize()
    for found, exact in zip(results, expected, strict=True):
        assert all(torch.equal(x, y) for gradients in found for x, y in zip(gradients, exact, strict=True))


@by_fused_head_dim
@by_attention
def test_fused_on_a_part_of_the_device(softmax, d):
    """A green context starts most blocks of the grid only after others have ended."""
    gradients = fused_backward(softmax, d)
    expected = gradients()
    torch.cuda.synchronize()
    with green_context():
        found = gradients()
        torch.cuda.synchronize()
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


# ---- windows and packed sequences


@by_head_dim
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("window", [2, 63, 64, 65, 127, 128, 129, 200, (0, 100), (130, 5)], ids=str)
def test_windows(window, causal, d, taken):
    if causal and isinstance(window, tuple):
        pytest.skip("causal windows end at the query")
    for n, m in ((500, 500), (333, 700)):
        case = case_of(True, n, m, d=d, h=4, hk=2, mask=n == 333, causal=causal)
        case = case._replace(options=case.options | {"window": window})
        assert checks.check(case, DEVICE, 8).wrong == []
        assert set(taken()) == {"flash_forward: flash_window_sm90", "flash_backward: flash_window_sm90"}


@by_head_dim
@by_attention
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sequences, n", [(2, 130), (3, 700), (40, 900), (300, 257)])
def test_packed_sequences(sequences, n, causal, d, softmax, taken):
    case = case_of(softmax, n, d=d, b=1, h=4, hk=2, causal=causal, noise=True)._replace(sequences=sequences)
    assert checks.check(case, DEVICE, 9).wrong == []
    assert set(taken()) == expected_kernels(softmax, bounded=True)


# Of a block of 128 keys, few queries see the 64 of one warpgroup, and many those of the other: between two heads of a group one
# of them skips more tiles than the ring has stages.
@by_head_dim
@by_attention
@pytest.mark.parametrize("decay", [False, True], ids=["", "decay"])
@pytest.mark.parametrize("lengths", [(64, 1000), (1088, 64, 200), (1, 63, 64, 900, 60)], ids=str)
def test_warpgroups_that_see_other_tiles(lengths, decay, d, softmax, taken):
    for causal in (True,) if decay else (True, False):
        case = case_of(softmax, sum(lengths), d=d, b=1, h=6, hk=2, causal=causal)._replace(decay=decay, sequences=len(lengths))
        tensors = random_tensors(case, DEVICE)
        ends = list(itertools.accumulate(lengths, initial=0))
        tensors["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        errors = measure(tensors, case.options, ROUNDING[case.mode], softmax)
        assert all(row.passed for row in errors), errors
    kind = "decay" if decay else "bounded"
    assert f"{'flash_forward: flash' if softmax else 'forward: quadratic'}_{kind}_sm90" in taken()


# ---- decays


@by_head_dim
@by_attention
@pytest.mark.parametrize(
    "row", [dict(n=64, b=1, h=1), dict(n=500, m=577), dict(n=1000, b=1), dict(n=130, m=1300, mask=True)], ids=row_id
)
def test_decays(row, d, softmax, taken):
    for sequences in (0, 3) if row.get("b") == 1 else (0,):
        case = case_of(softmax, d=d, **{"h": 4, "hk": 2 if row.get("h") != 1 else 1} | row)._replace(
            decay=True, sequences=sequences
        )
        assert checks.check(case, DEVICE, 10).wrong == []
        assert set(taken()) == expected_decay_kernels(softmax)


# ---- the operators


@by_head_dim
@by_attention
def test_gradient_of_an_expanded_sum(d, softmax, taken):
    """grad_o has stride 0 between heads, which a tensor map cannot express. The bits must be those of a copy."""
    case = case_of(softmax, 300, 333, d=d, h=4, hk=2)
    (q, k, v, *_), _ = operands(case._replace(options={"causal": True, "p": 2, "temperature": 8.0}), "bf16", "quadratic")
    one_head = torch.randn(2, 1, 300, d, device=DEVICE, dtype=torch.bfloat16)
    if softmax:
        arguments = (*[None] * 5, 0.1, True, -1, -1, False)
        o, z = torch.ops.fastmax.flash_forward(q, k, v, *arguments)
    else:
        arguments = (None,) * 7 + (0.1, 1.0, 1.0, 0.5, 2, True, 0.0, "quadratic", False)
        o, z = torch.ops.fastmax.forward(q, k, v, *arguments)
    backward = torch.ops.fastmax.flash_backward if softmax else torch.ops.fastmax.backward
    expanded, copied = (
        backward(grad_o, None, q, k, v, o, z, *arguments)[:3]
        for grad_o in (one_head.expand(o.shape), one_head.expand(o.shape).contiguous())
    )
    for x, y in zip(expanded, copied, strict=True):
        assert torch.equal(x, y)
    assert set(taken()) == expected_kernels(softmax)


@by_head_dim
@by_attention
def test_bitwise_repeatable_on_a_full_device(d, softmax, taken):
    case = case_of(softmax, 1500, d=d, b=4, h=24, hk=8, mask=True)
    tensors = random_tensors(case, DEVICE)
    first = evaluation.run(implementation(softmax), tensors, case.options)
    for _ in range(10):
        again = evaluation.run(implementation(softmax), tensors, case.options)
        assert all(torch.equal(x, again[name]) for name, x in first.items())
    assert set(taken()) == expected_kernels(softmax)


@by_head_dim
@by_attention
def test_heads_do_not_touch_each_other(d, softmax, taken):
    """The last head of the last batch entry has the same bits alone as among others that are NaN."""
    case = case_of(softmax, 333, 400, d=d, b=2, h=3, hk=3)
    tensors = random_tensors(case, DEVICE)
    alone = {name: x[1:, 2:].contiguous() for name, x in tensors.items()}
    among = {name: torch.full_like(x, float("nan")) for name, x in tensors.items()}
    for name, x in among.items():
        x[1, 2] = tensors[name][1, 2]
    grad_o = torch.randn_like(tensors["v"][..., :1, :].expand(2, 3, 333, d))

    def run(tensors, grad_o):
        variables = [tensors[name].detach().requires_grad_() for name in ("q", "k", "v")]
        outputs = implementation(softmax)(**dict(zip("qkv", variables, strict=True)), **case.options)
        o = outputs[0] if isinstance(outputs, tuple) else outputs
        return o, *torch.autograd.grad(o, variables, grad_o)

    in_both = zip(run(alone, grad_o[1:, 2:]), run(among, grad_o), strict=True)
    for name, (x, y) in zip(("o", "q", "k", "v"), in_both, strict=True):
        assert torch.equal(x[0, 0], y[1, 2]), name
    assert set(taken()) == expected_kernels(softmax)


@by_attention
def test_many_calls_in_a_graph_keep_their_tensors(softmax, taken):
    """Tensor maps are cached by shape and address. One graph has more calls than the cache has entries, and the calls are
    replayed in turn."""
    case = case_of(softmax, 130, d=64, b=1)
    options = case.options
    inputs = [random_tensors(case, DEVICE, seed) for seed in range(70)]
    function = implementation(softmax)

    def results():
        outputs = [function(**x, **options) for x in inputs]
        return [x[0] for x in outputs] if softmax else outputs

    with torch.no_grad():
        expected = results()
        graph, captured = capture(results)
        assert_replayed(graph, captured, expected)
    assert "sm80" not in "".join(taken())


@by_head_dim
@by_attention
def test_heads_far_from_each_other(d, softmax, taken):
    """With more than 2^31 elements between heads, the bits are those of contiguous tensors."""
    n, gap = 200, 2**31 + 64
    memory = torch.empty(gap + 4 * n * d, dtype=torch.bfloat16, device=DEVICE)
    far = [torch.as_strided(memory, (1, 2, n, d), (2 * gap, gap, d, 1), i * n * d) for i in range(4)]
    for x in far:
        x.normal_()

    def results(q, k, v, grad_o):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        outputs = implementation(softmax)(q=q, k=k, v=v, **case_of(softmax, n, d=d).options)
        o = outputs[0] if softmax else outputs
        return o, *torch.autograd.grad(o, (q, k, v), grad_o)

    for x, y in zip(results(*far), results(*(x.contiguous() for x in far)), strict=True):
        assert torch.equal(x, y)
    assert set(taken()) == expected_kernels(softmax)


@by_attention
def test_in_a_thread_that_has_not_used_the_device(softmax, taken):
    """The driver makes tensor maps only in a thread with a current context."""
    case = case_of(softmax, 130, d=64, b=1)
    tensors = random_tensors(case, DEVICE)
    function, results = implementation(softmax), []

    def call():
        with torch.no_grad():
            o = function(**tensors, **case.options)
        results.append(o[0] if softmax else o)

    call()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert torch.equal(*results)
    assert "sm80" not in "".join(taken())


def current_context():
    context = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value


def test_the_current_context_stays(taken):
    """Making tensor maps must not change the current context, even if that is not the device's own, such as a green context."""
    case = case_of(True, 130, d=64, b=1)
    tensors = random_tensors(case, DEVICE)
    function = implementation(softmax=True)
    expected, _ = function(**tensors, **case.options)
    with green_context():
        before = current_context()
        moved = {name: x.clone() for name, x in tensors.items()}  # of which there are no maps yet
        o, _ = function(**moved, **case.options)
        torch.cuda.synchronize()
        assert current_context() == before
    assert torch.equal(o, expected)
    assert set(taken()) == {"flash_forward: flash_sm90"}


# ---- what they leave to the portable kernels


def test_what_is_not_covered(taken):
    q = torch.randn(1, 4, 200, 64, device=DEVICE, dtype=torch.bfloat16)
    calls = {
        "fp16": lambda f: f(q.half(), q.half(), q.half()),
        "fp32": lambda f: f(q.float(), q.float(), q.float()),
        "head dim 136": lambda f: f(*(torch.cat((q, q, q[..., :8]), -1),) * 3),
        "head dim 256": lambda f: f(*(torch.cat((q,) * 4, -1),) * 3),
        "expanded keys": lambda f: f(q, q[:, :1].expand(1, 4, 200, 64), q),
        "decay, fp16": lambda f: f(*(q.half(),) * 3, causal=True, log_decay=-torch.rand(1, 4, 200, device=DEVICE)),
        "packed, fp16": lambda f: f(
            q.half(), q.half(), q.half(), causal=True, cu_seqlens=torch.tensor([0, 90, 200], dtype=torch.int32, device=DEVICE)
        ),
    }
    functions = {"quadratic": lambda *x, **options: fastmax.fastmax_attention(*x, **options, algorithm="quadratic")}
    functions["flash"] = fastmax.flash_attention
    for (name, call), (algorithm, function) in itertools.product(calls.items(), functions.items()):
        call(lambda *x, f=function, **options: f(*x, **({"causal": False} | options)))
        lines = taken()
        if algorithm == "flash" and "fp16" in name:
            assert len(lines) == 1 and lines[0].endswith("_sm90"), (name, lines)
            continue
        assert len(lines) == 1 and lines[0].split(": ")[1] in (f"{algorithm}_sm80", f"{algorithm}_bounded_sm80"), (name, lines)
    fastmax.flash_attention(q, q, q, causal=True, window=20)
    assert taken() == ["flash_forward: flash_window_sm90"]
    fastmax.flash_attention(q, q, q, causal=True, window=200)
    assert taken() == ["flash_forward: flash_sm90"], "there is nothing that it hides"
