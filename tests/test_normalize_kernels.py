"""The CUDA kernels of `normalize="token"`, row by row against float64, in any layout, on poisoned memory. Rows of up to 8, 16,
.. 256 numbers are read by 1, 2, .. 32 lanes; rows aligned to 16 bytes by words, others by elements. A block has 256 lanes,
which take turns at rows of q or of k."""

import os
import subprocess
import sys

import pytest
import torch
from common import assert_replayed, capture, pytorch_implementation
from test_kernels import DEVICE, WHY_NOT

from fastmax import eager, fastmax_attention
from fastmax.testing import evaluation
from fastmax.testing.errors import ROUNDING
from fastmax.testing.poison import poison_free_memory
from fastmax.testing.reference import normalized
from fastmax.testing.tensors import unaligned

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"the CUDA kernels do not run: {WHY_NOT}"),
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
OPERATOR, GRADIENT = torch.ops.fastmax.normalize_tokens, torch.ops.fastmax.normalize_tokens_backward


def token_major(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


LAYOUTS = {
    "contiguous": lambda x: x.clone(),
    "token-major": token_major,
    "unaligned": unaligned,
    "of a projection": lambda x: (
        torch.cat([x, x, x], dim=1).transpose(1, 2).contiguous().transpose(1, 2)[:, x.shape[1] : -x.shape[1]]
    ),
    "some heads": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "one head expanded": lambda x: x[:, :1].expand_as(x),
    "every second column": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "columns first": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
}
by_layout = pytest.mark.parametrize("layout", LAYOUTS)


def rows(*shape, dtype, lim=1.0):
    """Returns rows of which some are longer than lim, some shorter, and some zero."""
    x = torch.randn(shape, device=DEVICE) * (2 * lim / shape[-1] ** 0.5) * torch.rand(*shape[:-1], 1, device=DEVICE)
    x = torch.where(torch.rand(*shape[:-1], 1, device=DEVICE) < 0.1, 0.0, x)
    return x.to(dtype)


def assert_rows_are_near(actual, exact, scale, rounding):
    """Checks the error of each row, relative to `scale` (b, h, n)."""
    floor = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps * actual.shape[-1] ** 0.5
    error = (actual.double() - exact).norm(dim=-1)
    # Written so that a NaN fails.
    assert (error <= rounding * scale + floor).all(), f"{(error / scale.clamp(min=1e-300)).max():.3g} of a row"


def check(q, k, lim=1.0):
    """Checks forward and backward against float64."""
    poison_free_memory(DEVICE)
    *outputs, q_factor, k_factor = OPERATOR(q, k, lim)
    grads = [torch.randn_like(x) for x in (q, k)]
    poison_free_memory(DEVICE)
    gradients = GRADIENT(*grads, *outputs, q_factor, k_factor, lim)
    rounding = torch.finfo(q.dtype).eps / 2 + 6e-7  # of the result, and of fp32 arithmetic
    for x, o, factor, grad, of_x in zip((q, k), outputs, (q_factor, k_factor), grads, gradients, strict=True):
        like = eager.empty_like_layout(x, x.shape[-1])
        for y in (o, of_x):
            assert y.dtype == x.dtype and y.shape == x.shape and y.stride() == like.stride()
        assert factor.dtype == torch.float32 and factor.stride() == eager.empty_factors(x).stride()
        wide = x.double().requires_grad_()
        exact = normalized(wide, "token", lim)
        (exact_grad,) = torch.autograd.grad(exact, wide, grad.double())
        exact, length = exact.detach(), wide.detach().norm(dim=-1)
        exact_grad = torch.where(length.unsqueeze(-1) > 0, exact_grad, grad.double())  # the definition's is NaN
        exact_factor = torch.where(length > lim, lim / length, 1.0)
        assert_rows_are_near(o, exact, exact.norm(dim=-1), rounding)
        assert_rows_are_near(factor.unsqueeze(-1), exact_factor.unsqueeze(-1), exact_factor, 6e-7)
        assert torch.equal(factor < 1, length > lim) and (factor <= 1).all()
        # o is rounded, too.
        assert_rows_are_near(of_x, exact_grad, exact_factor * grad.double().norm(dim=-1), 4 * rounding)
        short = (length <= lim).unsqueeze(-1)
        assert torch.equal(torch.where(short, o, x), x) and torch.equal(torch.where(short, of_x, grad), grad)
    again = OPERATOR(q, k, lim)
    assert all(map(torch.equal, again, (*outputs, q_factor, k_factor)))
    assert all(map(torch.equal, GRADIENT(*grads, *again, lim), gradients))


@by_dtype
@pytest.mark.parametrize("d", [1, 2, 7, 8, 9, 16, 31, 32, 40, 64, 65, 96, 100, 128, 129, 200, 255, 256])
def test_head_dims(d, dtype):
    check(rows(2, 3, 37, d, dtype=dtype), token_major(rows(2, 2, 50, d, dtype=dtype)), 0.7)


@by_dtype
@by_layout
@pytest.mark.parametrize("d", [64, 72])
def test_layouts(d, layout, dtype):
    q, k = rows(2, 4, 65, d, dtype=dtype), rows(2, 2, 129, d, dtype=dtype)
    check(LAYOUTS[layout](q), LAYOUTS[layout](k))
    check(LAYOUTS[layout](q), k)
    check(q, LAYOUTS[layout](k))


@pytest.mark.parametrize("d", [8, 64, 256])
@pytest.mark.parametrize(
    "of_q, of_k",
    [
        ((1, 1, 1), (1, 1, 1)),
        ((5, 1, 300), (5, 1, 1)),
        ((1, 64, 33), (1, 1, 33)),
        ((3, 7, 129), (3, 7, 64)),
        ((300, 3, 1), (300, 1, 2)),
        ((1, 3, 4099), (1, 3, 17)),
        ((2, 3, 0), (2, 3, 70)),
        ((2, 3, 70), (2, 3, 0)),
        ((2, 3, 0), (2, 1, 0)),
        ((0, 3, 5), (0, 1, 5)),
    ],
    ids=str,
)
def test_numbers_of_rows(of_q, of_k, d):
    """There are fewer rows than a block takes at once, or more, by heads or by tokens."""
    for layout in (torch.clone, token_major):
        check(*(layout(rows(*shape, d, dtype=torch.bfloat16)) for shape in (of_q, of_k)))


@by_dtype
@by_layout
def test_gradients_in_any_layout(layout, dtype):
    """The gradients are of the results themselves and of copies in other layouts, factors included."""
    q, k = rows(2, 4, 65, 64, dtype=dtype), token_major(rows(2, 2, 129, 64, dtype=dtype))
    results = OPERATOR(q, k, 1.0)
    grads = [LAYOUTS[layout](torch.randn_like(x)) for x in (q, k)]
    expected = GRADIENT(*(x.clone(memory_format=torch.contiguous_format) for x in grads), *results, 1.0)
    moved = [LAYOUTS[layout](x) if layout != "one head expanded" else x for x in results[:2]]
    factors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in results[2:]], [x.contiguous() for x in results[2:]]
    for of_rows, rows_factors in ((results[:2], results[2:]), (moved, factors[0]), (moved, factors[1])):
        for x, y in zip(GRADIENT(*grads, *of_rows, *rows_factors, 1.0), expected, strict=True):
            # Other lanes have other elements where rows are not aligned.
            assert_rows_are_near(x, y.double(), y.double().norm(dim=-1), torch.finfo(dtype).eps + 1e-6)


def test_gradient_of_one_alone():
    q, k = rows(2, 4, 65, 64, dtype=torch.bfloat16), rows(2, 2, 129, 64, dtype=torch.bfloat16)
    results, grads = OPERATOR(q, k, 1.0), (torch.randn_like(q), torch.randn_like(k))
    both = GRADIENT(*grads, *results, 1.0)
    for i in range(2):
        alone = GRADIENT(*(x if i == j else None for j, x in enumerate(grads)), *results, 1.0)
        assert torch.equal(alone[i], both[i]) and alone[1 - i].shape == (0,)
    assert [x.shape for x in GRADIENT(None, None, *results, 1.0)] == [(0,), (0,)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("lim", [1e-15, 1.0, 1e15])
def test_neither_overflows_nor_underflows(lim, dtype):
    """Rows have elements down to the least denormal number and up to the largest, side by side."""
    sizes = torch.logspace(-44, 38.4, 700, dtype=torch.float64, device=DEVICE)
    x = (torch.rand(1, 2, 700, 64, dtype=torch.float64, device=DEVICE) * sizes[:, None]).to(dtype)
    o, _, factor, _ = OPERATOR(x, x, lim)
    exact = normalized(x.double(), "token", lim)
    assert exact.isfinite().all()
    assert_rows_are_near(o, exact, exact.norm(dim=-1), torch.finfo(dtype).eps / 2 + 6e-7)
    assert torch.equal(factor < 1, x.double().norm(dim=-1) > lim)


@by_dtype
def test_rows_that_are_not_numbers_stay_alone(dtype):
    x = rows(1, 2, 300, 64, dtype=dtype)
    spoilt = x.clone()
    spoilt[0, 0, 7, 3], spoilt[0, 1, 200, 63], spoilt[0, 0, 100, 0] = float("nan"), float("inf"), -float("inf")
    (o, *_), (expected, *_) = OPERATOR(spoilt, x, 1.0), OPERATOR(x, x, 1.0)
    spoilt = ~spoilt.isfinite().all(-1, keepdim=True)
    assert torch.equal(torch.where(spoilt, 0, o), torch.where(spoilt, 0, expected))
    assert o.isnan().any(-1, keepdim=True)[spoilt].all()


def test_more_elements_than_an_int_counts():
    tokens = 2**23 + 37
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    x = torch.randn(1, 1, tokens, 256, dtype=torch.bfloat16, device=DEVICE)
    o, _, factor, _ = OPERATOR(x, x[:, :, :0], 8.0)
    last = slice(tokens - 300, tokens)
    expected = OPERATOR(x[:, :, last], x[:, :, :0], 8.0)
    assert torch.equal(o[:, :, last], expected[0]) and torch.equal(factor[..., last], expected[2])
    (grad, _) = GRADIENT(x, None, o, x[:, :, :0], factor, factor[..., :0], 8.0)
    (of_last, _) = GRADIENT(x[:, :, last], None, expected[0], x[:, :, :0], expected[2], factor[..., :0], 8.0)
    assert torch.equal(grad[:, :, last], of_last)


@pytest.mark.parametrize("what", ["float64", "head dim 300", "tiny lim", "huge lim"])
def test_what_is_not_covered_runs_on_pytorch_operations(what):
    dtype = torch.float64 if what == "float64" else torch.float32
    q, k = (rows(2, 3, n, 300 if what == "head dim 300" else 64, dtype=dtype) for n in (37, 50))
    lim = {"tiny lim": 1e-32, "huge lim": 1e32}.get(what, 1.0)
    results = OPERATOR(q, k, lim)
    assert all(map(torch.equal, results, pytorch_implementation("normalize_tokens")(q, k, lim)))
    arguments = (torch.randn_like(q), torch.randn_like(k), *results, lim)
    assert all(map(torch.equal, GRADIENT(*arguments), pytorch_implementation("normalize_tokens_backward")(*arguments)))


def test_debug_prints_the_kernels():
    """The public function calls the kernels in the forward and in the backward."""
    code = """
import torch, fastmax
q = torch.rand(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
k = torch.rand(1, 1, 80, 64, device="cuda", dtype=torch.bfloat16)
fastmax.fastmax_attention(q, k, k, causal=True, p=1, normalize="token", temperature=1.1).sum().backward()
fastmax.fastmax_attention(q[..., 1:], k[..., 1:], k, normalize="token")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"FASTMAX_DEBUG": "1"}, capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stderr.splitlines() if "normalize" in line]
    assert lines == [
        "fastmax::normalize_tokens: normalize_sm80: rows 128 and 80, d 64",
        "fastmax::normalize_tokens_backward: normalize_sm80: rows 128 and 80, d 64",
        "fastmax::normalize_tokens: normalize_sm80: rows 128 and 80, d 63, unaligned",
    ]


@pytest.mark.parametrize("p", [1, 2])
@by_dtype
def test_attention_trains_as_with_pytorch_operations(dtype, p):
    """Gradients through the scaling are equal by the operator and by autograd, with grouped heads and masked keys."""
    q, k, v = (
        4 * torch.randn(2, n, h, 64, device=DEVICE, dtype=dtype).transpose(1, 2) for n, h in ((300, 4), (317, 2), (317, 2))
    )
    options = {"causal": True, "p": p, "normalize": "token", "lim": 2.0, "temperature": 5.0}
    options["attention_mask"] = torch.rand(2, 317, device=DEVICE) < 0.9
    exact = evaluation.run(fastmax_attention, {"q": q, "k": k, "v": v}, options | {"use_custom_gradient": False}, torch.float64)
    actual = evaluation.run(fastmax_attention, {"q": q, "k": k, "v": v}, options)
    for name, x in exact.items():
        error = ((actual[name].double() - x).norm() / x.norm()).item()
        assert error <= (1e-5 if dtype == torch.float32 else 4 * ROUNDING[str(dtype)[6:]]), name


def test_cuda_graph():
    q, k, v = (torch.randn(2, 3, 200, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def train():
        o = fastmax_attention(q, k, v, causal=True, p=1, normalize="token", temperature=1.1)
        return o.detach(), *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))

    graph, captured = capture(train)
    with torch.no_grad():
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
    assert_replayed(graph, captured, train())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device():
    """The tensors are on a device that is not the current one."""
    q, k = rows(2, 3, 37, 64, dtype=torch.bfloat16), rows(2, 3, 50, 64, dtype=torch.bfloat16)
    expected = OPERATOR(q, k, 1.0)
    there = OPERATOR(q.to("cuda:1"), k.to("cuda:1"), 1.0)
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(x, y.to(DEVICE)) for x, y in zip(expected, there, strict=True))


def test_the_library_registers_them():
    for name in ("normalize_tokens", "normalize_tokens_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmax_cuda::{name}", "CUDA"), name
