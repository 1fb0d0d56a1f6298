"""The Hopper kernels of the linear algorithm of order 2: which calls take them, and their results. State kernel: stages of 64
rows; chunks of 256 rows at head dims 32 and 64, 1024 at 128. Read kernel: items of 256 rows, a low and a high tile of 64 for
each warpgroup. Gradients: items of 128 rows; at head dim 128 the read kernel computes grad_v."""

import math

import pytest
import test_decay_kernels as decays
import test_prefill_kernels as prefill
import torch
from common import assert_replayed, relative
from test_decay_kernels import of_fastmax
from test_kernels import (
    DEVICE,
    NOTHING,
    WHY_NOT,
    both,
    capture,
    denominators,
    operands,
    peak_of_both,
    size,
    widened,
    with_gradient_of_the_denominators,
)
from test_packed_kernels import bounds
from test_sm90 import row_id, taken  # noqa: F401

import fastmax
from fastmax.ops import extension
from fastmax.testing import checks, evaluation
from fastmax.testing.errors import ROUNDING, measure
from fastmax.testing.poison import poison_free_memory
from fastmax.testing.tensors import random_tensors

ON_HOPPER = WHY_NOT is None and torch.cuda.get_device_capability() == (9, 0) and "linear2_sm90" in extension.build_info()
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not ON_HOPPER, reason=f"the Hopper kernels do not run: {WHY_NOT or 'another device, or not built'}"),
]


def case_of(*args, **options):
    """Returns a bf16 case for the linear algorithm."""
    case = size("", *args, **options)
    return case._replace(options=case.options | {"algorithm": "linear"}, dtype=torch.bfloat16)


EXPECTED = {"forward: linear2_sm90", "backward: linear2_sm90"}


def kernels_of_attention(taken):  # noqa: F811
    """Returns the kernels without those that make decays finite."""
    return {name for name in taken() if not name.startswith("finite_decay")}


def check_replayed(call, *others):
    """Checks that a graph of a call, (arguments, grad_o, ...), that is replayed over the numbers of other calls gives the bits
    of these calls."""
    arguments, *grads = call
    graph, captured = capture(lambda: both(arguments, *grads))
    for other_arguments, *other_grads in others:
        for x, y in zip((*arguments, *grads), (*other_arguments, *other_grads), strict=True):
            if isinstance(x, torch.Tensor):
                x.copy_(y)
        assert_replayed(graph, captured, both(arguments, *grads))


def run_without_reference(case, seed=0):
    tensors = random_tensors(case, DEVICE, seed)
    return evaluation.run(fastmax.fastmax_attention, tensors, case.options)


# ---- against float64, on poisoned memory, bit by bit repeatable

# The first that fails says most.
OWN_CHUNK = [dict(n=n, b=1, h=1) for n in (64, 1, 17, 63, 65, 128, 129, 191, 193, 255, 256)]
ONE_SNAPSHOT = [  # not causal: a state of all keys, and nothing but that
    dict(n=64, m=64, causal=False, b=1, h=1),
    dict(n=300, m=1, causal=False, b=1, h=1),
    dict(n=1, m=300, causal=False, b=1, h=1),
    dict(n=300, m=200, causal=False),
    dict(n=200, m=700, causal=False, h=4, hk=2),
]
BACK_IN_TIME = [  # tiles that begin before the first token: of x they are not stored by the copy engine, of y not loaded
    *(dict(n=n, m=m, b=2, h=2) for n, m in ((1, 1), (63, 63), (65, 65), (1, 129), (300, 300), (300, 333))),
    dict(n=300, m=333, h=8, hk=2),
    dict(n=1, m=3000, b=1, h=1),
    dict(n=300, m=300, causal=False),
    dict(n=129, m=65, causal=False),
]
CHUNKS = [  # few heads cut the walk into segments from two chunks on, many walk once
    *(dict(n=n, b=1, h=1) for n in (257, 320, 511, 512, 513, 769, 1025)),
    *(dict(n=n, b=1, h=40) for n in (257, 512, 513, 700)),
    dict(n=3000, b=1, h=1),
]
FINE = [  # as many states as are shared by twice the blocks, with room for one segment or, of 8, three
    *(dict(n=n, b=1, h=12) for n in (1, 65, 257, 512, 513, 700, 1025)),
    dict(n=3000, b=1, h=8),
    dict(n=700, m=801, b=2, h=16, hk=8, mask=True, noise=True, layout="packed"),
    dict(n=1, m=1300, b=2, h=7),
    dict(n=300, m=700, b=2, h=8, causal=False, mask=True),
    dict(n=700, b=2, h=17),
]
OFFSETS = [dict(n=n, m=m) for n, m in ((1, 300), (17, 64), (64, 129), (300, 301), (129, 1000), (255, 1023), (700, 777))]
SHARED_HEADS = [
    dict(n=300, h=4, hk=2),
    dict(n=700, m=777, h=6, hk=1),
    dict(n=1025, h=12, hk=3, b=3),
]
OPTIONS = [
    dict(n=300, mask=True),
    dict(n=700, m=801, h=4, hk=2, mask=True),
    dict(n=300, m=500, causal=False, mask=True),
    dict(n=700, noise=True),
    dict(n=700, layout="token-major", h=4),
    dict(n=700, layout="packed", h=4),
    dict(n=300, layout="unaligned", h=4),
    dict(n=600, m=700, h=4, hk=2, mask=True, noise=True, layout="packed"),
    dict(n=700, a0=0.7, a1=-0.3, a2=1.1),
    dict(n=700, a0=1e-3, a1=0.0, a2=1.0),
    dict(n=700, magnitude=30.0, temperature=1.0),
    dict(n=1300, b=4, h=40, hk=20),
]
ROWS = [*OWN_CHUNK, *ONE_SNAPSHOT, *BACK_IN_TIME, *CHUNKS, *FINE, *OFFSETS, *SHARED_HEADS, *OPTIONS]


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_against_float64(row, taken):  # noqa: F811
    assert checks.check(case_of(d=64, **row), DEVICE, 1234).wrong == []
    assert set(taken()) == EXPECTED


@pytest.mark.parametrize(
    "row",
    [
        *OWN_CHUNK,
        *ONE_SNAPSHOT,
        *BACK_IN_TIME,
        *CHUNKS,
        *OFFSETS,
        *SHARED_HEADS,
        *OPTIONS,
        *(dict(n=700, b=b, h=h) for b, h in ((1, 66), (2, 66), (3, 88))),  # one block a multiprocessor, two, and waves
    ],
    ids=row_id,
)
def test_against_float64_at_head_dim_32(row, taken):  # noqa: F811
    assert checks.check(case_of(d=32, **row), DEVICE, 1234).wrong == []
    assert set(taken()) == EXPECTED


@pytest.mark.parametrize(
    "row",
    [
        *(dict(n=n, b=1, h=1) for n in (64, 1, 65, 129, 255, 257, 1023, 1024)),
        *BACK_IN_TIME,
        dict(n=300, m=200, causal=False, b=1, h=1),
        *(dict(n=n, b=1, h=1) for n in (1025, 2049, 2500)),
        dict(n=2100, b=1, h=6),
        *(dict(n=n, m=m, h=2, hk=1) for n, m in ((1, 300), (1100, 1301), (70, 3000))),
        dict(n=1300, m=1400, h=4, hk=2, mask=True, noise=True, layout="packed"),
    ],
    ids=row_id,
)
def test_against_float64_at_head_dim_128(row, taken):  # noqa: F811
    assert checks.check(case_of(d=128, **row), DEVICE, 1234).wrong == []
    assert set(taken()) == EXPECTED


@pytest.mark.parametrize(
    "d, dv",
    [
        *((32, 16), (8, 32), (24, 24), (17, 5), (3, 7)),
        *((40, 24), (37, 51), (33, 8), (8, 64), (64, 1), (56, 40), (72, 100), (128, 16), (16, 128), (127, 127)),
    ],
)
def test_narrower_heads(d, dv, taken):  # noqa: F811
    """The copy engine fills missing columns with zeros, and must not write them."""
    for causal in (True, False):
        case = case_of(600, 700, d=d, dv=dv, h=4, hk=2, mask=True, noise=True, causal=causal)
        assert checks.check(case, DEVICE, 5).wrong == []
    assert set(taken()) == EXPECTED


def test_features_that_cancel(taken):  # noqa: F811
    """With few keys and scores of hundreds, sums of f are small beside their terms. The error must not exceed that of the
    portable kernels, which take expanded keys. test_sm90.py has the random configurations."""
    b, n, m, d = 32, 256, 4, 64
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()

    q, k, v, grad_o = 5 * normal(b, 2, n, d), 5 * normal(b, 1, m, d), normal(b, 1, m, d), normal(b, 2, n, d)
    options = (*NOTHING, 0.1, 1.0, 1.0, 0.5, 2, False, 0.0, "linear", False)
    expanded = (q, k.expand(b, 2, m, d), v.expand(b, 2, m, d), *options)
    portable = both(expanded, grad_o)
    assert set(taken()) == {"forward: linear2_sm80", "backward: linear2_sm80"}
    here = both((q, *(x.contiguous() for x in expanded[1:3]), *options), grad_o)
    assert set(taken()) == EXPECTED
    exact = both(widened(expanded), grad_o.double())
    for name, x, y, z in zip(("o", "z", "grad_q", "grad_k", "grad_v"), here, portable, exact, strict=True):
        assert relative(x, z) < 1.25 * relative(y, z) + ROUNDING["bfloat16"], name
    assert relative(here[2], exact[2]) > 4 * ROUNDING["bfloat16"], "they do cancel"


@pytest.mark.parametrize("d, dv, heads", [(64, 64, 32), (64, 40, 32), (128, 128, 16)])
@pytest.mark.parametrize("what", ["plain", "decay", "packed"])
def test_memory_beside_the_tensors(d, dv, heads, what, taken):  # noqa: F811
    """The backward takes snapshots of up to 420 MiB, accumulators of up to 73 MiB, and some numbers a row: less than sums
    of grad_q in fp32. g = grad_o / z is in grad_q. Dropped rows are copied for a phase at a time."""
    n = 65_536
    q, k = (torch.randn(1, heads, n, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    v, grad_o = (torch.randn(1, heads, n, dv, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    decay = -torch.rand(1, heads, n, device=DEVICE) if what == "decay" else None
    first = (torch.arange(n, device=DEVICE) // 5000 * 5000).to(torch.int32).expand(1, heads, n) if what == "packed" else None
    arguments = (q, k, v, *NOTHING[:3], decay, first, None, None, d**-0.5, 1.0, 1.0, 0.5, 2, True, 0.0, "linear", False)
    peak = peak_of_both(arguments, grad_o)
    assert set(taken()) == EXPECTED
    row = 4 * heads * n  # a float per query
    results = grad_o.nbytes + row + q.nbytes + k.nbytes + v.nbytes
    copies = 0 if what == "plain" else 12 * row + (q.nbytes + grad_o.nbytes) // 5
    assert peak <= results + row + copies + 2**20 * (420 + 80), f"{peak / 2**20:.0f} MiB"


# ---- decays and packed sequences: test_decay_kernels.py checks them too, in bf16 on these kernels


def check_decay(taken, *args, **options):  # noqa: F811
    decays.check(of_fastmax("bf16", "linear", *args, **options), "bf16")
    assert set(taken()) == EXPECTED


def check_bounds(taken, *args, **options):  # noqa: F811
    """Checks packed sequences without a decay, which have their own kernels."""
    decays.check(of_fastmax("bf16", "linear", *args, decay="none", **options), "bf16", bounds_alone=True)
    assert set(taken()) == EXPECTED


@pytest.mark.parametrize("decay", decays.KINDS)
@pytest.mark.parametrize(
    "n, m",
    [
        *((n, n) for n in (1, 17, 64, 65, 128, 129, 192, 256)),  # the own chunk alone: tiles before the diagonal, and on it
        *((n, n) for n in (257, 320, 512, 513, 777, 1100)),
        *((1, 300), (17, 64), (63, 127), (64, 128), (100, 333), (300, 301), (129, 1000)),
    ],
)
def test_decays(n, m, decay, taken):  # noqa: F811
    check_decay(taken, n, m, decay=decay, h=2, hk=1)


@pytest.mark.parametrize("decay", decays.KINDS)
@pytest.mark.parametrize("n, m", [(65, 65), (257, 257), (700, 777)])
def test_decays_of_finely_shared_states(n, m, decay, taken):  # noqa: F811
    check_decay(taken, n, m, decay=decay, b=2, h=12, hk=6)


@pytest.mark.parametrize("decay", decays.KINDS)
@pytest.mark.parametrize("n, m", [(1, 1), (65, 65), (256, 256), (257, 257), (777, 777), (1100, 1100), (17, 64), (129, 1000)])
def test_decays_at_head_dim_32(n, m, decay, taken):  # noqa: F811
    check_decay(taken, n, m, d=32, decay=decay, h=2, hk=1)


@pytest.mark.parametrize("decay", decays.KINDS)
def test_decays_at_head_dim_128(decay, taken):  # noqa: F811
    for n, m in ((1, 1), (65, 65), (300, 300), (1024, 1024), (1025, 1025), (2100, 2100), (70, 1300), (1100, 1333)):
        check_decay(taken, n, m, d=128, decay=decay, h=2, hk=1)


@pytest.mark.parametrize("d", [32, 64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("bits", [30, 60, 63, 64, 65, 70, 140])
def test_decays_about_the_range_of_a_tile(bits, d, taken):  # noqa: F811
    """In the 64 tokens of a diagonal tile, kernels use factors per row and per column down to 2^-64, and factors per pair
    beyond."""
    problem = of_fastmax("bf16", "linear", 600, d=d, h=2, hk=1)
    decay = torch.full_like(problem.arguments["log_decay"], -bits / 63 * math.log(2))
    decay[1] *= 0.9 + 0.2 * torch.rand_like(decay[1])
    decays.check(problem.replace(log_decay=decay), "bf16")
    assert set(taken()) == EXPECTED


@pytest.mark.parametrize("d, dv", [(32, 32), (64, 64), (128, 128), (24, 16), (40, 24), (33, 8), (8, 64), (72, 100), (128, 16)])
def test_decays_with_everything(d, dv, taken):  # noqa: F811
    first = torch.arange(600, device=DEVICE)
    first = torch.where(torch.rand(600, device=DEVICE) < 0.01, first + 133, 0).cummax(0)[0].to(torch.int32).expand(2, 2, -1)
    for options in (
        dict(mask=True, noise=True),
        dict(layout="packed" if d == dv else "unaligned"),
        dict(layout="token-major", mask=True),
        dict(first=first),
    ):
        check_decay(taken, 600, 733, d=d, dv=dv, h=4, hk=2, **options)
    for options in (dict(mask=True, noise=True), dict(layout="token-major")):
        check_bounds(taken, 600, 733, d=d, dv=dv, h=4, hk=2, first=first, **options)


@pytest.mark.parametrize("d, chunk", [(32, 256), (64, 256), (128, 1024)])
def test_sequences_that_begin_at_chunks_and_tiles(d, chunk, taken):  # noqa: F811
    """Sequences begin at, just before and just after borders, and in some chunks none begins. The second walk counts chunks
    from the end."""
    for lengths in (
        [chunk, chunk, 17],
        [17, chunk, chunk],
        [chunk - 1, 2, chunk - 1, 1],
        [chunk + 1, chunk - 1, chunk],
        [64, 0, 64, 63, 1, 65, chunk - 1],
        [1] * 70 + [2] * 100,
        [3 * chunk, 1],
    ):
        first, _ = bounds(lengths, True)
        for decay in ("none", "ordinary"):
            check_decay(taken, sum(lengths), d=d, decay=decay, first=first)
        check_bounds(taken, sum(lengths), d=d, first=first)


@pytest.mark.parametrize("kind", ["strong", "millionth", "none"])
@pytest.mark.parametrize("where", [0, 1, 255, 256, 257, 383, 384, 511, 512, 699])
def test_resets(where, kind, taken):  # noqa: F811
    """The public function turns decays of -inf into bounds of keys."""
    case = case_of(700, h=2, hk=1)._replace(decay=True)
    tensors = random_tensors(case, DEVICE, where)
    tensors["log_decay"].fill_({"strong": -3.0, "millionth": -1e-6, "none": 0.0}[kind])
    tensors["log_decay"][:, :, where] = -torch.inf
    rows = measure(tensors, case.options, ROUNDING["bfloat16"], case.softmax)
    assert [row for row in rows if not row.passed] == []
    assert kernels_of_attention(taken) == EXPECTED


@pytest.mark.parametrize("d", [32, 64, 128], ids=lambda d: f"d{d}")
def test_segments_and_phases_with_decays(d, taken):  # noqa: F811
    """One head is cut into segments; many long heads run in phases that pass on sums; nine at head dim 64 run in phases of four
    segments. Results are compared with the portable kernels in fp32."""
    for b, h, hk, n in ((1, 1, 1, 20_000), (2, 40, 20, 20480), (1, 12, 12, 80_000), (1, 9, 9, 100_000)):
        q, grad_o = (torch.randn(b, h, n, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.randn(b, hk, n, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        rates = torch.logspace(-5, -1, hk, device=DEVICE)[:, None]
        log_decay = -rates * torch.rand(b, hk, n, device=DEVICE)
        first = torch.where(torch.rand(n, device=DEVICE) < 2e-4, torch.arange(n, device=DEVICE), 0).cummax(0)[0]
        options = (None, None, None, log_decay, first.to(torch.int32).expand(b, hk, n), None, None)
        score = (d**-0.5, 1.0, 1.0, 0.5, 2, True, 0.0, "linear")
        results = both((q, k, v, *options, *score, False), grad_o)
        assert set(taken()) == EXPECTED
        exact = both((*(x.float() for x in (q, k, v)), *options, *score, True), grad_o.float())
        for name, x, y in zip(("o", "z", "grad_q", "grad_k", "grad_v"), results, exact, strict=True):
            assert relative(x, y) < 2 * ROUNDING["bfloat16"], name
        taken()


@pytest.mark.parametrize("d", [32, 64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("alone", [False, True], ids=["decay", "bounds"])
def test_a_sequence_of_no_numbers(d, alone, taken):  # noqa: F811
    """A sequence of NaN must not change chunks without its tokens, neither their states nor the sums that continue after it."""
    chunk = 256 if d <= 64 else 1024
    spoils, end = slice(chunk, 2 * chunk + 88), 3 * chunk + 132
    lengths = [chunk, chunk + 88, 3 * chunk + 32]
    first, _ = bounds(lengths, True)
    clean = of_fastmax("bf16", "linear", sum(lengths), decay="none", d=d, first=first)
    if alone:
        clean = clean.replace(log_decay=None)
    spoilt = {name: clean.arguments[name].clone() for name in "qkv"}
    for x in spoilt.values():
        x[:, :, spoils] = torch.nan
    expected, actual = decays.run(clean), decays.run(clean.replace(**spoilt))
    for name, x in actual.items():
        if name == "log_decay":  # all of a head's pairs
            continue
        assert x[:, :, spoils].isnan().any()
        for tokens in (slice(0, 100), slice(end, None)):
            assert torch.equal(x[:, :, tokens], expected[name][:, :, tokens]), name
    assert set(taken()) == EXPECTED


def test_graphs_with_decays(taken):  # noqa: F811
    """A replay must read the decays and bounds that are then in memory."""
    lengths = [300, 1, 256, 143]
    orders = lengths, lengths[::-1], [700]
    calls = [of_fastmax("bf16", "linear", 700, first=bounds(order, True)[0].contiguous()) for order in orders]
    check_replayed(*((list(call.arguments.values()), *call.grads) for call in calls))
    assert set(taken()) == EXPECTED


# ---- algorithm="auto"


@pytest.mark.parametrize(
    "tokens, forward, backward, d, dtype, options",
    [
        (2300, "quadratic_sm90", "quadratic_fused_sm90", 32, torch.bfloat16, ()),
        (2600, "linear2_sm90", "linear2_sm90", 32, torch.bfloat16, ()),
        (4900, "quadratic_sm90", "quadratic_fused_sm90", 64, torch.bfloat16, ()),
        (5400, "linear2_sm90", "linear2_sm90", 64, torch.bfloat16, ()),
        (19_500, "quadratic_sm90", "quadratic_fused_sm90", 128, torch.bfloat16, ()),
        (21_500, "linear2_sm90", "linear2_sm90", 128, torch.bfloat16, ()),
        (17_500, "quadratic_decay_sm90", "quadratic_decay_sm90", 128, torch.bfloat16, ("decay",)),
        (19_500, "linear2_sm90", "linear2_sm90", 128, torch.bfloat16, ("decay",)),
        (4600, "quadratic_sm80", "quadratic_sm80", 64, torch.float16, ()),
        (4900, "linear2_sm80", "linear2_sm80", 64, torch.float16, ()),
        (4600, "quadratic_sm80", "quadratic_sm80", 64, torch.bfloat16, ("expanded",)),
        (4900, "linear2_sm80", "linear2_sm80", 64, torch.bfloat16, ("expanded",)),
    ],
)
def test_auto_counts_the_kernels_that_run(tokens, forward, backward, d, dtype, options, taken):  # noqa: F811
    q, k, v, grad_o = (torch.randn(1, 64, tokens, d, device=DEVICE, dtype=dtype) for _ in range(4))
    if "expanded" in options:  # not for tensor maps
        k = k[:, :1].expand(1, 64, tokens, d)
    log_decay = -torch.rand(1, 64, tokens, device=DEVICE) / 100 if "decay" in options else None
    variables = [x.detach().requires_grad_() for x in (q, k, v)]
    o = fastmax.fastmax_attention(*variables, causal=True, temperature=d**0.5, log_decay=log_decay)
    torch.autograd.grad(o, variables, grad_o)
    assert kernels_of_attention(taken) == {f"forward: {forward}", f"backward: {backward}"}


# ---- the operators


@pytest.mark.parametrize("d", [32, 64, 128], ids=lambda d: f"d{d}")
def test_denominators(d, taken):  # noqa: F811
    """The constant term is an exact number of keys and not a sum, so it is 0 exactly where a query sees no key."""
    for case in (
        size("", 700, 717, d=d, h=4, hk=2, mask=True, noise=True),
        size("", 1300, d=d, h=1, a0=0.3),
        size("", 300, 900, d=d, causal=False, mask=True),
    ):
        arguments, _ = operands(case, "bf16", "linear")
        if case.padding:
            arguments[3][:, : case.keys // 2] = False
        _, z = torch.ops.fastmax.forward(*arguments)
        exact = denominators(*widened(arguments))
        assert torch.equal(z == 0, exact == 0)
        assert relative(z, exact) <= ROUNDING["bfloat16"]
    assert set(taken()) == {"forward: linear2_sm90"}


def test_dropped_keys_are_not_read(taken):  # noqa: F811
    """NaN and infinity at masked keys change no bit."""
    case = size("", 600, 700, h=4, hk=2, mask=True)
    arguments, grad_o = operands(case, "bf16", "linear")
    q, k, v, mask, *rest = arguments
    first = both(arguments, grad_o)
    dropped = ~mask[:, None, :, None]
    spoilt = (q, k.masked_fill(dropped, float("nan")), v.masked_fill(dropped, float("inf")), mask, *rest)
    for x, y in zip(first, both(spoilt, grad_o), strict=True):
        assert torch.equal(x, y)
    assert set(taken()) == EXPECTED


def test_gradient_of_the_denominators(taken):  # noqa: F811
    case = size("", 600, 700, h=4, hk=2, mask=True, noise=True)
    arguments, grad_o = operands(case, "bf16", "linear")
    grad_z, exact = with_gradient_of_the_denominators(arguments, grad_o)
    taken()
    for name, x, y in zip("qkv", both(arguments, grad_o, grad_z.float())[2:], exact, strict=True):
        assert relative(x, y) <= 4 * ROUNDING["bfloat16"], name
    assert set(taken()) == EXPECTED


@pytest.mark.parametrize(
    "b, h, hk, n, m, d",
    [(2, 40, 20, 16384, 16500, 64), (1, 1, 1, 800_000, 800_000, 64), (2, 144, 144, 16384, 16384, 32)],
    ids=["heads", "one head", "heads of 32"],
)
def test_phases(b, h, hk, n, m, d, taken):  # noqa: F811
    """States beyond 832 MiB are made in phases that pass on sums. Results are compared with the portable kernels in fp32."""
    q, grad_o = (torch.randn(b, h, n, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(b, hk, m, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    score = (d**-0.5, 1.0, 1.0, 0.5, 2, True, 0.0, "linear")
    results = both((q, k, v, *NOTHING, *score, False), grad_o)
    assert set(taken()) == EXPECTED
    exact = both((*(x.float() for x in (q, k, v)), *NOTHING, *score, True), grad_o.float())
    for name, x, y in zip(("o", "z", "grad_q", "grad_k", "grad_v"), results, exact, strict=True):
        assert relative(x, y) < 2 * ROUNDING["bfloat16"], name


def test_bitwise_repeatable_on_a_full_device(taken):  # noqa: F811
    for d in (32, 64, 128):
        case = case_of(2100, d=d, b=4, h=24, hk=8, mask=True)
        first = run_without_reference(case)
        for _ in range(10):
            poison_free_memory(DEVICE)
            again = run_without_reference(case)
            assert all(torch.equal(x, again[name]) for name, x in first.items())
        assert set(taken()) == EXPECTED


def test_heads_do_not_touch_each_other(taken):  # noqa: F811
    """The last head of the last batch entry is computed alone and among others that are NaN. Segments may differ."""
    case = case_of(700, 756, b=2, h=3, hk=3)
    arguments, grad_o = operands(case, "bf16", "linear")
    for decay in (None, decays.decays("ordinary", 3, 756)):
        given = (*arguments[:3], decay, grad_o)
        alone = [None if x is None else x[1:, 2:].contiguous() for x in given]
        among = [None if x is None else torch.full_like(x, float("nan")) for x in given]
        for x, y in zip(among, given, strict=True):
            if x is not None:
                x[1, 2] = y[1, 2]
        expected, actual = (
            both((q, k, v, *[None] * 3, of_heads, *arguments[7:]), g) for q, k, v, of_heads, g in (alone, among)
        )
        for x, y in zip(actual, expected, strict=True):
            assert relative(x[1, 2], y[0, 0]) < ROUNDING["bfloat16"]
    assert set(taken()) == EXPECTED


def test_graphs(taken):  # noqa: F811
    """Forward and backward are in one graph, which is replayed over new inputs."""
    case = size("", 700, 801, h=4, hk=2, mask=True)
    check_replayed(*(operands(case, "bf16", "linear", seed) for seed in (0, 3, 4)))
    assert set(taken()) == EXPECTED


def test_every_kernel_at_small_sizes(taken):  # noqa: F811
    """This test has no reference. It is run under compute-sanitizer."""
    for d in (32, 64, 128):
        for n, m, h, hk in ((1, 1, 1, 1), (65, 65, 2, 1), (150, 200, 2, 2), (600, 700, 2, 1), (17, 3000, 1, 1)):
            case = case_of(n, m, d=d, b=1, h=h, hk=hk, mask=n == 150, noise=n == 150)
            assert all(x.isfinite().all() for x in run_without_reference(case).values())
    assert set(taken()) == EXPECTED


# ---- states that are carried

PREFILL = {"prefill: linear2_sm90"}
PREFILL_BACKWARD = PREFILL | {"prefill_backward: linear2_sm90"}
CARRIED = {
    **{f"length {n}": prefill.Case(n) for n in prefill.LENGTHS},
    **{f"length {n}, head dim 128": prefill.Case(n, 128) for n in (1, 63, 64, 65, 255, 256, 257, 300, 1023, 1024, 1025, 2500)},
    **{f"length {n}, head dim 32": prefill.Case(n, 32) for n in (1, 63, 64, 65, 255, 256, 257, 300, 1025)},
    **{
        f"head dims {d}, {dv}": prefill.Case(300, d, dv)
        for d, dv in ((24, 16), (8, 32), (40, 24), (37, 51), (64, 8), (72, 100), (128, 16))
    },
    **{
        f"one head, {n}, head dim {d}": prefill.Case(n, d, b=1, h=1, hk=1)
        for n, d in ((700, 32), (5000, 32), (700, 64), (5000, 64), (4500, 128))
    },
    "GQA, head dim 32": prefill.Case(700, 32, h=8, hk=2, mask=True),
    "many states, head dim 32": prefill.Case(300, 32, b=5, h=60, hk=60),
    "GQA": prefill.Case(700, h=8, hk=2),
    **{f"finely shared states, {n}": prefill.Case(n, b=2, h=12, hk=6, mask=n == 700) for n in (1, 257, 700)},
    "GQA, head dim 128": prefill.Case(1300, 128, h=8, hk=2, mask=True),
    "mask": prefill.Case(700, h=8, hk=2, mask=True),
    "token-major": prefill.Case(700, layout="token-major", mask=True),
    "many states": prefill.Case(300, b=5, h=60, hk=60),
    "many states, head dim 128": prefill.Case(600, 128, b=3, h=40, hk=20, mask=True),
}


@pytest.mark.parametrize("case", CARRIED.values(), ids=CARRIED)
def test_carried_states(case, taken):  # noqa: F811
    """Outputs, the new state and all gradients, that of the given state too, are compared."""
    prefill.check(prefill.arguments(case, "bf16"), "bf16")
    assert set(taken()) == PREFILL
    prefill.check_gradients(prefill.arguments(case, "bf16"), "bf16")
    assert set(taken()) == PREFILL_BACKWARD


@pytest.mark.parametrize("decay", ["ordinary", "strong", "-inf at places", "-inf at the first token", "-inf everywhere"])
@pytest.mark.parametrize("n, d", [(1, 32), (700, 32), (1, 64), (65, 64), (256, 64), (700, 64), (300, 128), (1500, 128)])
def test_carried_states_with_decays(n, d, decay, taken):  # noqa: F811
    given = prefill.arguments(prefill.Case(n, d, decay=decay, mask=d <= 64 and decay != "strong"), "bf16")
    prefill.check(given, "bf16")
    if decay != "strong":  # sums of pairs of the little that is left cancel, as in tests/test_prefill_kernels.py
        prefill.check_gradients(given, "bf16")
    assert set(taken()) == (PREFILL if decay == "strong" else PREFILL_BACKWARD)


@pytest.mark.parametrize("n, d", [(1, 32), (700, 32), (1, 64), (700, 64), (1300, 128)])
@pytest.mark.parametrize("mask", [False, True], ids=["", "mask"])
def test_the_number_of_tokens_of_a_state(n, d, mask, taken):  # noqa: F811
    """The first element of k_sum is the number of tokens. Without decays it is counted apart and must be exact."""
    case = prefill.Case(n, d, h=4, hk=2, mask=mask)
    given = prefill.arguments(case, "bf16")
    *_, k_sum = torch.ops.fastmax.prefill(*given)
    joined = given[3].sum(1) if mask else torch.full((2,), n, device=DEVICE)
    assert torch.equal(k_sum[..., 0], given[8][..., 0] + joined[:, None])
    _, k_sum, _ = torch.ops.fastmax.state_of_keys(*given[1:4], None, None, None, *given[9:], False)
    assert torch.equal(k_sum[..., 0], joined[:, None].float().expand(2, 2))
    assert set(taken()) == PREFILL | {"state_of_keys: linear2_sm90"}


@pytest.mark.parametrize("decay", [None, "-inf at places"], ids=["", "decay"])
@pytest.mark.parametrize("d", [32, 64, 128], ids=lambda d: f"d{d}")
def test_states_alone(d, decay, taken):  # noqa: F811
    """The states of keys and of queries alone; all tokens are one chunk."""
    for n in (1, 65, 1300):
        given = list(prefill.arguments(prefill.Case(n, d, h=4, hk=2, decay=decay), "bf16"))
        q, k, v, _, log_decay, first, gate, kv_state, k_sum, *options = given
        given[7:9] = kv_state, k_sum = torch.zeros_like(kv_state), torch.zeros_like(k_sum)
        o, z, *expected = prefill.in_float64(given)
        state = torch.ops.fastmax.state_of_keys(k, v, None, log_decay, first, gate, *options, False)[:2]
        for x, y in zip(state, expected, strict=True):
            assert relative(x, y) <= prefill.rounding("bf16"), n
        grad_o = torch.randn_like(q)
        wide = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in given]
        leaves = [x.double().requires_grad_() for x in (kv_state, k_sum)]
        exact = torch.autograd.grad(prefill.in_float64([*wide[:7], *leaves, *wide[9:]])[0], leaves, grad_o.double())
        g, e = torch.ops.fastmax.gradients_of_sums(grad_o, None, o.to(q.dtype), z.float())
        found = torch.ops.fastmax.state_of_queries(g, e, q, k, v, log_decay, first, gate, *options, False)[:2]
        for x, y in zip(found, exact, strict=True):
            assert (x - y).norm() <= 4 * prefill.rounding("bf16") * max(y.norm(), 1e-2 * exact[0].norm()), n
    assert set(taken()) == {"state_of_keys: linear2_sm90", "state_of_queries: linear2_sm90"}


@pytest.mark.parametrize("first", [False, True], ids=["", "sequences"])
@pytest.mark.parametrize("n, d", [(1, 32), (1300, 32), (1, 64), (300, 64), (1300, 64), (2500, 128)])
def test_saved_states(n, d, first, taken):  # noqa: F811
    """Up to head dim 64 without packed sequences, the given state is added to saved ones as they are read, else in memory."""
    given = list(prefill.arguments(prefill.Case(n, d, h=4, hk=2, mask=True), "bf16"))
    q, k, v, mask, *_, kv_state, k_sum = given[:9]
    if first:
        given[5] = torch.where(torch.arange(n, device=DEVICE) >= n // 2, n // 2, -1).int().expand(2, 2, n)
    *_, saved = torch.ops.fastmax.state_of_keys(k, v, mask, None, given[5], None, *given[9:], True)
    assert saved.numel() > 0
    actual = torch.ops.fastmax.prefill_saved_(q, k, v, mask, None, given[5], None, kv_state, k_sum, saved, *given[9:])
    for x, y in zip(actual, prefill.in_float64(given)[:2], strict=True):
        assert relative(x, y) <= 1.5 * prefill.rounding("bf16")
    assert set(taken()) == {"prefill_saved_: linear2_sm90"}


@pytest.mark.parametrize("b, h, n, d", [(1, 32, 33_000, 64), (1, 8, 47_000, 128)], ids=["d64", "d128"])
def test_carried_states_in_phases(b, h, n, d, taken):  # noqa: F811
    """Snapshots take more than 832 MiB. Results are compared with the portable kernels in fp32."""
    given = prefill.arguments(prefill.Case(n, d, b=b, h=h, hk=h), "bf16")
    grads = prefill.output_grads(given)
    actual, found = torch.ops.fastmax.prefill(*given), prefill.gradients(prefill.operator, given, grads)
    assert set(taken()) == PREFILL_BACKWARD
    wide = [x.float() if torch.is_tensor(x) and x.is_floating_point() else x for x in given]
    for x, y in zip(actual, torch.ops.fastmax.prefill(*wide), strict=True):
        assert relative(x, y) <= prefill.rounding("bf16")
    exact = prefill.gradients(prefill.operator, wide, {name: x.float() for name, x in grads.items()})
    prefill.compare(found, exact, "bf16")


# ---- what they leave to the portable kernels


def test_what_is_not_covered(taken):  # noqa: F811
    q = torch.randn(1, 4, 200, 64, device=DEVICE, dtype=torch.bfloat16)
    calls = {
        "fp16": lambda f: f(q.half(), q.half(), q.half()),
        "fp32": lambda f: f(q.float(), q.float(), q.float()),
        "head dim 96": lambda f: f(*(torch.cat((q, q[..., :32]), -1),) * 3),
        "head dim 256": lambda f: f(*(torch.cat((q,) * 4, -1),) * 3),
        "expanded keys": lambda f: f(q, q[:, :1].expand(1, 4, 200, 64), q),
    }
    for name, call in calls.items():
        call(lambda *x, **options: fastmax.fastmax_attention(*x, causal=True, algorithm="linear", **options))
        assert taken() == ["forward: linear2_sm80"], name
    fastmax.fastmax_attention(q, q, q, causal=True, algorithm="linear", p=1, a0=2.0)
    assert taken() == ["forward: linear1_sm90"]
    for name in ("fp16", "head dim 96", "expanded keys"):
        calls[name](
            lambda *x: fastmax.decoding.prefill(
                *x, fastmax.decoding.init_state(1, 4, x[1].shape[3], dtype=x[1].dtype, device=DEVICE)
            )
        )
        assert taken() == ["prefill: linear2_sm80"], name
