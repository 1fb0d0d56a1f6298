"""Bounds of keys (packed sequences, what a decay of -inf resets) in the quadratic CUDA kernels of Fastmax and of softmax."""

import os
import subprocess
import sys
from pathlib import Path

import invalid_bounds
import pytest
import test_flash_window_kernels as flash
import test_kernels as fastmax_kernels
import torch
from common import relative
from test_kernels import DEVICE, HEAD_DIMS, NOTHING, WHY_NOT, by_mode, by_order, precision  # noqa: F401

from fastmax.testing.errors import ROUNDING
from fastmax.testing.poison import poison_free_memory

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"the CUDA kernels do not run: {WHY_NOT}"),
]

LENGTHS = {
    "one": [300],
    "tiles": [64, 64, 128],
    "beside tiles": [63, 65, 1, 127, 129],
    "short": [1, 2, 0, 3, 15, 16, 17, 0, 31, 5, 1, 1, 1],
    "one long": [7, 500, 0, 3],
    "many": [1] * 70 + [2] * 70,
}
by_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
by_causal = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


def bounds(lengths, causal, hk=2):
    """Returns k_start, and k_end if not causal, of packed sequences, expanded over the heads."""
    ends = torch.tensor(lengths, device=DEVICE).cumsum(0)
    sizes = torch.tensor(lengths, device=DEVICE)
    first, end = (x.repeat_interleave(sizes).to(torch.int32).expand(2, hk, -1) for x in (ends - sizes, ends))
    return first, None if causal else end


def of_fastmax(lengths, mode, causal, d=64, p=2, h=4, hk=2, mask=False, noise=False, bound=None):
    """Returns the arguments of torch.ops.fastmax.forward, and grad_o."""
    n = sum(lengths)
    case = fastmax_kernels.size("", n, d=d, h=h, hk=hk, p=p, causal=causal, mask=mask, noise=noise)
    arguments, grad_o = fastmax_kernels.operands(case, mode, "quadratic")
    first, end = bound or bounds(lengths, causal, hk)
    return (*arguments[:7], first, end, *arguments[9:]), grad_o


def of_softmax(lengths, mode, causal, d=64, left=-1, right=-1, mask=False, h=4, hk=2):
    n = sum(lengths)
    arguments, grads = flash.operands(flash.Case(n, n, left, right, d, d, h, hk, causal, mask), mode)
    return (*arguments[:5], *bounds(lengths, causal, hk), *arguments[7:]), grads


def definition(arguments, grad_o, grad_z, dtype):
    """Returns o, z and the gradients of q, k and v of Fastmax, from the whole matrix of weights."""
    q, k, v, mask, noise, _, _, first, end, _, scale, a0, a1, a2, p, causal, dropout, *_ = arguments
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    n, m, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    keys = torch.arange(m, device=DEVICE)
    sees = torch.ones(n, m, dtype=torch.bool, device=DEVICE).tril(m - n if causal else m)
    for bound, within in ((first, keys.ge), (end, keys.lt)):
        if bound is not None:
            sees = sees & within(bound.repeat_interleave(group, 1)[..., None])
    sees = sees if mask is None else sees & mask[:, None, None, :]
    s = scale * (q @ k.repeat_interleave(group, 1).mT)
    w = torch.where(sees, a0 + s * (a1 + (a2 * s if p == 2 else 0.0)), 0.0)
    z = w.sum(-1)
    o = (w / torch.where(z == 0, 1.0, z)[..., None]) @ v.repeat_interleave(group, 1)
    if noise is not None:
        o = o * (1 + dropout * noise.to(dtype))
    loss = (o * grad_o.to(dtype)).sum() + (z * grad_z.to(dtype)).sum()
    return o.detach(), z.detach(), *torch.autograd.grad(loss, (q, k, v))


def both(arguments, grad_o, grad_z):
    poison_free_memory(DEVICE)
    o, z = torch.ops.fastmax.forward(*arguments)
    poison_free_memory(DEVICE)
    return o, z, *torch.ops.fastmax.backward(grad_o, grad_z, *arguments[:3], o, z, *arguments[3:])[:3]


def check(actual, exact, plain, mode):
    dtype = actual[0].dtype
    rounding = ROUNDING["tf32" if mode == "tf32" else str(dtype).removeprefix("torch.")]
    for name, x, y, z in zip(("o", "z", "q", "k", "v"), actual, exact, plain, strict=True):
        seen = y.isfinite()  # a log-sum-exp of no keys
        assert torch.equal(x.isfinite(), seen), name
        assert relative(x[seen], y[seen]) <= max(2 * relative(z[seen], y[seen]) + flash.FLOOR, 2 * rounding), name


def check_fastmax(arguments, grad_o, mode):
    grad_z = torch.randn(grad_o.shape[:3], device=DEVICE) / 30
    actual = both(arguments, grad_o, grad_z)
    check(actual, *(definition(arguments, grad_o, grad_z, dtype) for dtype in (torch.float64, grad_o.dtype)), mode)
    assert all(map(torch.equal, actual, both(arguments, grad_o, grad_z)))


@by_mode
@by_causal
@by_lengths
def test_fastmax_against_float64(lengths, causal, mode, precision):  # noqa: F811
    for d in (64, 128):
        check_fastmax(*of_fastmax(lengths, mode, causal, d, noise=True, mask=d == 128), mode)


@by_mode
@by_order
@pytest.mark.parametrize("d", HEAD_DIMS, ids=lambda d: f"d{d}")
def test_fastmax_head_dims(d, p, mode, precision):  # noqa: F811
    for causal in (True, False):
        check_fastmax(*of_fastmax([100, 30, 170], mode, causal, d, p, h=3, hk=1), mode)


@by_mode
@pytest.mark.parametrize("n, m", [(300, 300), (70, 333), (1, 200)])
def test_bounds_that_differ_from_head_to_head(n, m, mode, precision):  # noqa: F811
    """Resets make such bounds. They have any strides, and the queries are at the end of the keys."""
    case = fastmax_kernels.size("", n, m, h=6, hk=3)
    arguments, grad_o = fastmax_kernels.operands(case, mode, "quadratic")
    position = torch.arange(n, device=DEVICE) + m - n
    first = torch.where(torch.rand(n, 2, 3, device=DEVICE) < 0.02, position[:, None, None], 0).cummax(0)[0]
    first = first.to(torch.int32).permute(1, 2, 0)
    assert not first.is_contiguous() or n == 1
    check_fastmax((*arguments[:7], first, None, *arguments[9:]), grad_o, mode)


@by_mode
def test_queries_without_keys(mode, precision):  # noqa: F811
    """Bounds that leave no key, also bounds beyond the keys, give zeros and no gradient."""
    arguments, grad_o = of_fastmax([200], mode, False)
    first = torch.arange(200, device=DEVICE, dtype=torch.int32).expand(2, 2, 200)
    for end in (first, first - 10, first.clamp(max=50)):
        given = (*arguments[:7], first * 2, end * 2, *arguments[9:])
        o, z, *grads = both(given, grad_o, torch.full(grad_o.shape[:3], torch.nan, device=DEVICE))
        assert not any(x.any() for x in (o, z, *grads))


@by_mode
@by_causal
@by_lengths
@pytest.mark.parametrize("left, right", [(-1, -1), (20, 9)], ids=["all", "window"])
def test_softmax_against_float64(left, right, lengths, causal, mode, precision):  # noqa: F811
    for d in (64, 128):
        arguments, grads = of_softmax(lengths, mode, causal, d, left, right, mask=d == 128)
        actual = flash.both(arguments, grads)
        check(actual, *(flash.definition(arguments, grads, dtype) for dtype in (torch.float64, grads[0].dtype)), mode)
        assert all(map(torch.equal, actual, flash.both(arguments, grads)))


@by_mode
@pytest.mark.parametrize("d", HEAD_DIMS, ids=lambda d: f"d{d}")
def test_softmax_head_dims(d, mode, precision):  # noqa: F811
    for causal in (True, False):
        arguments, grads = of_softmax([100, 30, 170], mode, causal, d, h=3, hk=1)
        check(
            flash.both(arguments, grads),
            *(flash.definition(arguments, grads, x) for x in (torch.float64, grads[0].dtype)),
            mode,
        )


@by_mode
def test_packed_equals_one_by_one(mode, precision):  # noqa: F811
    lengths = [130, 1, 64, 200]
    arguments, grad_o = of_fastmax(lengths, mode, True)
    packed = both(arguments, grad_o, None)
    pieces = [x.split(lengths, dim=2) for x in (*arguments[:3], grad_o)]
    alone = [both((q, k, v, *NOTHING, *arguments[10:]), g, None) for q, k, v, g in zip(*pieces, strict=True)]
    for x, parts in zip(packed, zip(*alone, strict=True), strict=True):
        assert relative(x, torch.cat(parts, dim=2).double()) <= ROUNDING["bfloat16" if mode == "bf16" else "tf32"]


@pytest.mark.parametrize("part", invalid_bounds.PARTS)
def test_invalid_bounds_end(part):
    """Runs in a process of its own, so that a kernel that hangs can be stopped. A valid call after it is right."""
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, invalid_bounds.__file__, part]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"this call does not end: {last_line(error.stdout)}")
    assert done.returncode == 0, f"{last_line(done.stdout)}\n{done.stderr}"
    assert last_line(done.stdout) == "done"


def last_line(output: str | bytes | None) -> str:
    text = output.decode() if isinstance(output, bytes) else output or ""
    return text.splitlines()[-1] if text else "none has started"


def test_covered_calls_do_not_reach_the_pytorch_implementation(kernels_alone):
    both(*of_fastmax([20, 30], "bf16", True), None)
    flash.both(*of_softmax([20, 30], "bf16", True))
    arguments, grad_o = of_fastmax([20, 30], "bf16", True)
    both((*arguments[:-2], "linear", False), grad_o, None)
    arguments, grad_o = of_fastmax([20, 30], "bf16", False)
    linear, quadratic = (both((*arguments[:-2], algorithm, False), grad_o, None) for algorithm in ("linear", "quadratic"))
    assert all(map(torch.equal, linear, quadratic)), "the linear kernels have bounds in causal attention only"


@by_mode
@pytest.mark.parametrize("d", HEAD_DIMS, ids=lambda d: f"d{d}")
def test_every_kernel_at_small_sizes(d, mode, precision):  # noqa: F811
    """This test has no reference. It is run under compute-sanitizer."""
    for causal in (True, False):
        results = both(*of_fastmax([17, 1, 40, 90], mode, causal, d, h=2, hk=1, noise=True), None)
        results += flash.both(*of_softmax([17, 1, 40, 90], mode, causal, d, h=2, hk=1))
        assert all(x.isfinite().all() for x in results)
