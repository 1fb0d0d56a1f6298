"""The operator `merge_parts` merges attention over two parts of the keys. It and its gradient have kernels on CUDA."""

import math
from typing import NamedTuple

import pytest
import test_merge_in_place
import torch
from common import DTYPES, check_operator, dtype_id, in_turn, relative
from torch import Tensor
from torch.autograd import forward_ad

from fastmax import eager, merge_attention
from fastmax.ops import extension
from fastmax.testing.errors import ROUNDING
from fastmax.testing.poison import poison_free_memory

merge_parts, merge_parts_backward = torch.ops.fastmax.merge_parts.default, torch.ops.fastmax.merge_parts_backward.default
LAYOUTS = {"dense": torch.clone, **test_merge_in_place.LAYOUTS}


class Parts(NamedTuple):
    """Arguments of `merge_parts`, and gradients of its results."""

    first: Tensor
    first_lse: Tensor
    second: Tensor
    second_lse: Tensor
    grad_o: Tensor
    grad_lse: Tensor


def make_parts(b=2, h=3, n=37, dv=24, dtype=torch.float32, device="cpu") -> Parts:
    """Some queries see no key of one part or of both, or weigh the keys of one part far more."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    first, second, grad_o = (torch.randn(b, h, n, dv, device=device).to(dtype) for _ in range(3))
    first_lse, second_lse, grad_lse = (torch.randn(b, h, n, device=device, dtype=wide) for _ in range(3))
    first_lse[..., 1::9], second_lse[..., 2::9] = -torch.inf, -torch.inf
    first_lse[..., 3::9], first_lse[..., 4::9] = -torch.inf, 200.0
    second_lse[..., 3::9], second_lse[..., 5::9] = -torch.inf, 200.0
    first[first_lse == -torch.inf], second[second_lse == -torch.inf] = 0, 0
    return Parts(first, first_lse, second, second_lse, grad_o, grad_lse)


def merged_by_definition(parts: Parts) -> list[Tensor]:
    """Returns the results and the gradients in float64."""
    given = [x.double().requires_grad_() for x in parts[:4]]
    lses = torch.stack(given[1::2])
    base = lses.detach().amax(0)
    weights = (lses - base.where(base > -torch.inf, torch.zeros_like(base))).exp()
    total = weights.sum(0)
    shares = weights / total.where(total > 0, torch.ones_like(total))
    o = (shares.unsqueeze(-1) * torch.stack(given[0::2])).sum(0)
    lse = lses.logsumexp(0)
    seen = lse > -torch.inf
    of_lse = (lse * parts.grad_lse.double())[seen].sum()
    grads = torch.autograd.grad((o * parts.grad_o.double()).sum() + of_lse, given)
    return [o.detach(), lse.detach(), *(x.nan_to_num(nan=0.0) for x in grads)]  # of a logsumexp of no keys


def check_merged(results, expected: list[Tensor], dtype: torch.dtype) -> None:
    """Checks o, lse and the gradients of the four arguments."""
    narrow = {torch.float64: 1e-14, torch.float32: 3e-7}.get(dtype, ROUNDING[dtype_id(dtype)])
    wide = 1e-14 if dtype == torch.float64 else 1e-6
    names = "o", "lse", "of first", "of first_lse", "of second", "of second_lse"
    for name, x, y in zip(names, results, expected, strict=True):
        assert torch.equal(x.isneginf(), y.isneginf()) and x.dtype in (dtype, eager.compute_dtype(dtype)), name
        seen = ~y.isneginf()
        x, y = x[seen], y[seen]
        assert relative(x, y) <= (wide if "lse" in name else narrow) or not (x.any() or y.any()), name


@in_turn("dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("dv", [1, 7, 16, 24, 64, 128, 256, 700])
def test_against_float64(dv, dtype, device):
    parts = make_parts(dv=dv, n=300 if dv == 64 else 37, dtype=dtype, device=device)
    arguments = [x.requires_grad_() for x in parts[:4]]
    o, lse = merge_attention(arguments[0::2], arguments[1::2])
    grads = torch.autograd.grad((o, lse), arguments, parts[4:])
    check_merged([o, lse, *grads], merged_by_definition(parts), dtype)


@in_turn("dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_any_strides(first, second, dtype, device):
    parts = make_parts(dtype=dtype, device=device)
    layouts = [LAYOUTS[x] for x in (first, first, second, second, second, first)]
    given = [change(x) for change, x in zip(layouts, parts, strict=True)]
    results = [*merge_parts(*given[:4]), *merge_parts_backward(*given[4:], *given[:4])]
    check_merged(results, merged_by_definition(parts), dtype)
    for x, like in zip(results[::2], (given[0], given[0], given[2]), strict=True):
        assert eager.token_major(x) is eager.token_major(like)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_gradient_of_one_result_alone(absent, device):
    parts = make_parts(dtype=torch.float64, device=device)
    grads = [None if i == absent else x for i, x in enumerate(parts[4:])]
    without = parts._replace(**{("grad_o", "grad_lse")[absent]: torch.zeros_like(parts[4 + absent])})
    expected = merged_by_definition(without)
    for x, y in zip(merge_parts_backward(*grads, *parts[:4]), expected[2:], strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-14)
    arguments = [x.requires_grad_() for x in parts[:4]]
    result = merge_attention(arguments[0::2], arguments[1::2])[1 - absent]
    seen = ~result.isneginf()
    weight = without[5 - absent]
    loss = (result[seen] * weight[seen]).sum()
    recorded = torch.autograd.grad(loss, arguments, allow_unused=True)
    for x, y in zip(recorded, expected[2:], strict=True):
        torch.testing.assert_close(torch.zeros_like(y) if x is None else x, y, rtol=0, atol=1e-14)


def test_derivatives():
    """Any number of them, in reverse, forward and both."""
    given = tuple(
        x[:1, :1, :6, :2].clone().requires_grad_() if x.dim() == 4 else x[:1, :1, :6].clone()
        for x in make_parts(dtype=torch.float64)
    )
    o, lse = given[0], given[1].nan_to_num(neginf=-1.0).clamp(max=2.0).requires_grad_()
    second, second_lse = given[2], given[3].nan_to_num(neginf=-1.0).clamp(max=2.0).requires_grad_()

    def merged(*x):
        return merge_attention(x[0::2], x[1::2])

    arguments = (o, lse, second, second_lse)
    assert torch.autograd.gradcheck(merged, arguments, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(merged, arguments)
    (once,) = torch.autograd.grad(sum(x.sin().sum() for x in merged(*arguments)), lse, create_graph=True)
    (plain,) = torch.autograd.grad(
        sum(x.sin().sum() for x in eager.merged(arguments[0::2], arguments[1::2])), lse, create_graph=True
    )
    (twice,), (expected,) = (torch.autograd.grad(x.cos().sum(), lse, create_graph=True) for x in (once, plain))
    torch.testing.assert_close(torch.autograd.grad(twice.sum(), lse), torch.autograd.grad(expected.sum(), lse))


def test_no_key_has_no_nan(device):
    """Queries that see no key of either part have output 0, lse -inf and gradients of 0, not NaN."""
    parts = make_parts(device=device)
    none = (parts.first_lse == -torch.inf) & (parts.second_lse == -torch.inf)
    o, lse = merge_parts(*parts[:4])
    assert none.any() and not o[none].any() and lse[none].eq(-torch.inf).all()
    grads = merge_parts_backward(*parts[4:], *parts[:4])
    assert all(x.isfinite().all() and not x[none].any() for x in grads)


@pytest.mark.parametrize("absent", [torch.nan, torch.inf])
def test_gradients_of_no_key_do_not_count(absent, device):
    """The gradient of an lse of -inf is often not finite, as that of a logsumexp of two of them."""
    parts = make_parts(device=device)
    _, lse = merge_parts(*parts[:4])
    grad_lse = torch.where(lse == -torch.inf, absent, parts.grad_lse)
    assert not grad_lse.isfinite().all()
    grads = (merge_parts_backward(parts.grad_o, x, *parts[:4]) for x in (grad_lse, parts.grad_lse))
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


def test_tangents_of_gradients():
    """A tangent may enter in the backward alone."""
    parts = make_parts(n=5, dv=3, dtype=torch.float64)
    arguments = [x.clone().requires_grad_() for x in parts[:4]]
    o, _ = merge_attention(arguments[0::2], arguments[1::2])
    direction = torch.randn_like(o)
    with forward_ad.dual_level():
        grads = torch.autograd.grad(o, arguments, forward_ad.make_dual(parts.grad_o, direction), retain_graph=True)
        tangents = [forward_ad.unpack_dual(x).tangent for x in grads]
    for x, y in zip(tangents, torch.autograd.grad(o, arguments, direction), strict=True):
        torch.testing.assert_close(x, y)


def test_operators(device):
    parts = make_parts(n=5, dv=3, device=device)
    check_operator(merge_parts, parts[:4], traced=False)
    check_operator(merge_parts_backward, (*parts[4:], *parts[:4]), traced=False)
    check_operator(merge_parts_backward, (None, parts.grad_lse, *parts[:4]), traced=False)


WRONG = {
    "three dimensions": (lambda x: [y.flatten(0, 1) for y in x], "first must be 4-dimensional, got 3"),
    "another shape": (lambda x: [x[0], x[1], x[2][:, :, 1:], x[3]], "second"),
    "another dtype": (lambda x: [x[0], x[1].double(), *x[2:]], "first_lse"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name, device):
    change, message = WRONG[name]
    parts = make_parts(device=device)
    for operator, grads in ((merge_parts, ()), (merge_parts_backward, parts[4:])):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            operator(*grads, *change(list(parts[:4])))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=dtype_id)
def test_kernels_run(dtype, capfd):
    device = torch.device("cuda")
    if extension.problem(device) is not None:
        pytest.skip(extension.problem(device))
    poison_free_memory(device)
    extension.set_debugging(True)
    try:
        for dv in (64, 7):
            parts = make_parts(dv=dv, dtype=dtype, device=device)
            arguments = [x.requires_grad_() for x in parts[:4]]
            torch.autograd.grad(merge_attention(arguments[0::2], arguments[1::2]), arguments, parts[4:])
    finally:
        extension.set_debugging(False)
    printed = capfd.readouterr().err
    for name in ("merge_parts", "merge_parts_backward"):
        assert printed.count(f"fastmax::{name}: merge_sm80") == 2
    assert math.isfinite(parts.first.float().sum().item())
