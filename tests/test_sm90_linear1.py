"""The Hopper kernels of the linear algorithm of order 1: which calls take them, and their results. Tiles have 64 rows; the two
blocks of a group take turns at them, and so do two warpgroups in a block. Few heads cut the walk into segments of at least 256
rows, which start from sums over parts; more heads than half of the multiprocessors have one block each. A backward reads grad_o
directly if it can; if not, g and e are made first."""

import pytest
import torch
from common import relative
from test_kernels import DEVICE, WHY_NOT, both, operands, size, widened, with_gradient_of_the_denominators
from test_sm90 import row_id, taken  # noqa: F401
from test_sm90_linear import check_replayed

import fastmax
from fastmax.ops import extension
from fastmax.testing import checks, evaluation
from fastmax.testing.errors import ROUNDING

ON_HOPPER = WHY_NOT is None and torch.cuda.get_device_capability() == (9, 0) and "linear1_sm90" in extension.build_info()
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not ON_HOPPER, reason=f"the Hopper kernels do not run: {WHY_NOT or 'another device, or not built'}"),
]

EXPECTED = {"forward: linear1_sm90", "backward: linear1_sm90"}


def case_of(*args, **options):
    case = size("", *args, p=1, **options)
    return case._replace(options=case.options | {"algorithm": "linear"}, dtype=torch.bfloat16)


# The first that fails says most.
ONE_SEGMENT = [dict(n=n, b=1, h=1) for n in (64, 1, 17, 63, 65, 127, 128, 129, 192, 193, 255, 256)]
SEGMENTS = [dict(n=n, b=1, h=1) for n in (257, 320, 511, 512, 513, 769, 1025, 4500)]
HEADS = [  # one block a head; two, in one segment; in several
    dict(n=700, b=2, h=100),
    dict(n=700, b=2, h=30),
    dict(n=3000, b=1, h=13),
]
OFFSETS = [dict(n=n, m=m) for n, m in ((1, 300), (17, 64), (64, 129), (300, 301), (129, 1000), (255, 1023), (700, 777))]
SHARED_HEADS = [  # which are stages of a tile, one after the other
    dict(n=300, h=4, hk=2),
    dict(n=700, m=777, h=6, hk=1),
    dict(n=1025, h=12, hk=3, b=3),
]
OPTIONS = [
    dict(n=700, layout="token-major", h=4),
    dict(n=700, layout="packed", h=4),
    dict(n=300, layout="unaligned", h=4),
    dict(n=700, noise=True),
    dict(n=300, m=333, h=4, hk=2, noise=True, layout="packed"),
    dict(n=700, a0=0.7, a1=-0.3),
    dict(n=700, magnitude=30.0, temperature=2000.0),
]
ROWS = [*ONE_SEGMENT, *SEGMENTS, *HEADS, *OFFSETS, *SHARED_HEADS, *OPTIONS]


@pytest.mark.parametrize("d", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_against_float64(row, d, taken):  # noqa: F811
    assert checks.check(case_of(d=d, **row), DEVICE, 1234).wrong == []
    assert set(taken()) == EXPECTED


@pytest.mark.parametrize(
    "d, dv", [(40, 24), (37, 51), (33, 8), (8, 64), (64, 1), (56, 40), (72, 100), (128, 16), (16, 128), (127, 127)]
)
def test_narrower_heads(d, dv, taken):  # noqa: F811
    """The copy engine fills missing columns with zeros, and must not write them."""
    for noise in (False, True):
        assert checks.check(case_of(600, 700, d=d, dv=dv, h=4, hk=2, noise=noise), DEVICE, 5).wrong == []
    assert set(taken()) == EXPECTED


@pytest.mark.parametrize("d", [64, 128], ids=lambda d: f"d{d}")
def test_a_gradient_of_the_denominators(d, taken):  # noqa: F811
    for n, m in ((17, 17), (300, 333), (1100, 1100)):
        arguments, grad_o = operands(size("", n, m, d=d, p=1), "bf16", "linear")
        grad_z, exact = with_gradient_of_the_denominators(arguments, grad_o)
        for x, y in zip(both(arguments, grad_o, grad_z.float())[2:], exact, strict=True):
            assert relative(x, y) <= 4 * ROUNDING["bfloat16"], (n, m)
    assert set(taken()) == EXPECTED


@pytest.mark.parametrize("d", [64, 128], ids=lambda d: f"d{d}")
@pytest.mark.parametrize("n, m, h, hk", [(17, 17, 1, 1), (300, 333, 4, 2), (1100, 1100, 2, 2)])
def test_prepared_gradients(n, m, h, hk, d, taken):  # noqa: F811
    """The copy engine cannot read this grad_o, or the call has noise, so g and e are made first."""
    for noise in (False, True):
        arguments, grad_o = operands(size("", n, m, d=d, h=h, hk=hk, p=1, noise=noise), "bf16", "linear")
        if not noise:
            grad_o = grad_o[:, :, :1].expand(grad_o.shape)
        exact = both(widened(arguments), grad_o.double())
        for x, y in zip(both(arguments, grad_o), exact, strict=True):
            assert relative(x, y) <= 4 * ROUNDING["bfloat16"], noise
    assert set(taken()) == EXPECTED


NORMALIZED = {"normalized_forward: linear1_sm90", "normalized_backward: linear1_sm90"}


def rows_of_some_lengths(*shape, token_major=False):
    """Returns rows up to about twice as long as 1, of bf16; one is longer and one has zeros."""
    x = torch.randn(*shape, device=DEVICE) * torch.rand(*shape[:3], 1, device=DEVICE) * (2 / shape[3] ** 0.5)
    x[..., shape[2] // 2, :] *= 1e4
    x[..., shape[2] // 3, :] = 0.0
    x = x.bfloat16()
    return x.transpose(1, 2).contiguous().transpose(1, 2) if token_major else x


@pytest.mark.parametrize("d, dv", [(64, 64), (128, 128), (40, 24), (37, 51), (72, 100)])
@pytest.mark.parametrize(
    "n, m, h, hk",
    [(17, 17, 1, 1), (64, 64, 1, 1), (300, 333, 4, 2), (1024, 1024, 2, 2), (3000, 3000, 13, 13), (129, 1000, 6, 1)],
)
@pytest.mark.parametrize("token_major", [False, True], ids=["heads first", "tokens first"])
def test_shortened_rows(n, m, h, hk, d, dv, token_major, taken):  # noqa: F811
    """normalize="token" is a part of the walk, with the results of normalisation before attention."""
    q, k = (rows_of_some_lengths(2, *x, d, token_major=token_major) for x in ((h, n), (hk, m)))
    tensors = {"q": q, "k": k, "v": torch.randn(2, hk, m, dv, device=DEVICE).bfloat16()}
    for options in ({}, {"lim": 0.5, "temperature": 0.4, "a0": 1.3}, {"return_lse": True}):
        options = {"causal": True, "p": 1, "algorithm": "linear", "normalize": "token", "lim": 0.8} | options
        exact = evaluation.run(fastmax.fastmax_attention, tensors, options | {"use_custom_gradient": False}, torch.float64)
        taken()
        actual = evaluation.run(fastmax.fastmax_attention, tensors, options, poison=True)
        assert set(taken()) == NORMALIZED
        for name, x in exact.items():
            assert relative(actual[name], x) <= 4 * ROUNDING["bfloat16"], name


def test_a_shortened_gradient_that_is_expanded(taken):  # noqa: F811
    q, k, v = (rows_of_some_lengths(1, 2, 300, 64) for _ in range(3))
    grads = []
    for dtype, custom in ((torch.float64, False), (torch.bfloat16, True)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        options = {"algorithm": "linear", "normalize": "token", "use_custom_gradient": custom}
        o = fastmax.fastmax_attention(*leaves, causal=True, p=1, **options)
        o.sum().backward()
        grads.append([x.grad for x in leaves])
    assert set(taken()) == NORMALIZED
    for exact, x in zip(*grads, strict=True):
        assert relative(x, exact) <= 4 * ROUNDING["bfloat16"]


def test_which_calls_shorten_rows(taken):  # noqa: F811
    q = rows_of_some_lengths(2, 32, 2048, 64)
    options = {"causal": True, "p": 1, "normalize": "token"}

    def kernels(*x, **more):
        fastmax.fastmax_attention(*x, **(options | more))
        return taken()

    assert kernels(q, q, q) == ["normalized_forward: linear1_sm90"]
    assert kernels(q, q, q, algorithm="quadratic") == ["forward: quadratic_sm90"]
    short = q[:1, :1, :128]
    assert kernels(short, short, short) == ["forward: quadratic_sm90"]
    expanded = q[:, :1].expand(q.shape)
    assert kernels(q, expanded, q) == ["normalized_forward: linear1_sm90"]
    mask = torch.ones(2, 2048, device=DEVICE, dtype=torch.bool)
    assert kernels(q, q, q, algorithm="linear", attention_mask=mask) == ["forward: linear1_sm80"]
    assert kernels(q, q, q, algorithm="linear", dropout=0.1) == ["forward: linear1_sm90"]


@pytest.mark.parametrize("d", [64, 128], ids=lambda d: f"d{d}")
def test_graphs(d, taken):  # noqa: F811
    calls = [operands(size("", 900, 900, d=d, p=1), "bf16", "linear", seed) for seed in range(3)]
    check_replayed(*calls)
    assert set(taken()) == EXPECTED


@pytest.mark.parametrize("b, h, n, d", [(2, 32, 16384, 64), (1, 16, 65536, 128)], ids=["d64", "d128"])
def test_many_tokens(b, h, n, d, taken):  # noqa: F811
    """Results are compared with the portable kernels in fp32, and a repetition gives the same bits."""
    arguments, grad_o = operands(size("", n, d=d, b=b, h=h, p=1), "bf16", "linear")
    first, second = both(arguments, grad_o), both(arguments, grad_o)
    assert set(taken()) == EXPECTED
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    wide = [x.float() if torch.is_tensor(x) and x.is_floating_point() else x for x in arguments]
    for x, y in zip(first, both(wide, grad_o.float()), strict=True):
        assert relative(x, y) <= 2 * ROUNDING["bfloat16"]


def test_what_is_not_covered(taken):  # noqa: F811
    q = torch.randn(1, 4, 200, 64, device=DEVICE, dtype=torch.bfloat16)
    mask = torch.ones(1, 200, device=DEVICE, dtype=torch.bool)
    calls = {
        "fp16": lambda f: f(q.half(), q.half(), q.half()),
        "fp32": lambda f: f(q.float(), q.float(), q.float()),
        "head dim 32": lambda f: f(*(q[..., :32].contiguous(),) * 3),
        "head dim 96": lambda f: f(*(torch.cat((q, q[..., :32]), -1),) * 3),
        "expanded keys": lambda f: f(q, q[:, :1].expand(1, 4, 200, 64), q),
        "not causal": lambda f: f(q, q, q, causal=False),
        "masked keys": lambda f: f(q, q, q, attention_mask=mask),
    }
    for name, call in calls.items():
        call(
            lambda *x, **options: fastmax.fastmax_attention(
                *x, **({"causal": True, "algorithm": "linear", "p": 1, "a0": 2.0} | options)
            )
        )
        assert taken() == ["forward: linear1_sm80"], name
