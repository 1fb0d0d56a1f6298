"""Windows of `flash_attention` in the CUDA kernels: every instance against float64 on poisoned memory.

Blocks own 16 to 128 rows and stream tiles of 16 to 128 tokens: windows are narrower, as wide and wider, and end between tiles.
"""

from typing import NamedTuple

import pytest
import torch
from common import relative
from test_kernels import DEVICE, HEAD_DIMS, MODES, WHY_NOT, by_mode, precision  # noqa: F401

from fastmax.testing import configurations
from fastmax.testing.errors import ROUNDING
from fastmax.testing.poison import poison_free_memory
from fastmax.testing.tensors import random_tensors

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"the CUDA kernels do not run: {WHY_NOT}"),
]


# Where a query sees one key, grad_o . v and grad_o . o cancel but for a rounding of them, which the plain formula has none of.
FLOOR = 1e-5


class Case(NamedTuple):
    n: int
    m: int
    left: int
    right: int
    d: int = 64
    dv: int = 64
    h: int = 2
    hk: int = 2
    causal: bool = False
    mask: bool = False
    layout: str = "contiguous"

    @property
    def name(self):
        kind = "causal" if self.causal else "full"
        heads = "" if self.h == self.hk else f" h{self.h} hk{self.hk}"
        mask = " mask" if self.mask else ""
        return f"{kind} n{self.n} m{self.m} left{self.left} right{self.right} d{self.d} dv{self.dv}{heads}{mask} {self.layout}"


def window(w, n, m=None, d=64, **options):
    return Case(n, m or n, w - 1, w - 1, d, options.pop("dv", d), **options)


CASES = [
    *(window(w, 300, d=d, causal=causal) for d in HEAD_DIMS for w in (2, 17, 100) for causal in (True, False)),
    *(window(70, 333, d=d, h=4, hk=2, mask=True, causal=causal) for d in HEAD_DIMS for causal in (True, False)),
    *(Case(150, 333, 40, 3, d, d, 6, 2, mask=True, layout="packed") for d in HEAD_DIMS),
    *(window(w, 515, causal=True) for w in (2, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 256, 513, 514)),
    *(window(100, n, causal=True) for n in (1, 2, 17, 99, 100, 101, 127, 128, 129, 257)),
    *(Case(400, 400, left, right) for left, right in ((0, 0), (-1, 0), (0, -1), (-1, 37), (64, -1), (130, 5), (398, 398))),
    *(Case(n, m, 20, -1, causal=True) for n, m in ((1, 300), (17, 64), (64, 129), (129, 1000), (300, 301))),
    *(Case(n, m, 20, 9) for n, m in ((1, 300), (17, 64), (129, 1000))),
    *(Case(n, m, 30, 12, d, d) for n, m in ((300, 1), (300, 17), (129, 65), (1000, 130)) for d in (64, 128)),  # blind rows
    window(50, 300, d=37, dv=51, causal=True, mask=True),
    window(50, 300, d=40, dv=24, layout="token-major", h=4),
    window(50, 300, d=256, dv=40, layout="unaligned", mask=True),
    window(50, 300, d=16, dv=128, causal=True),
    window(60, 1000, d=200, h=4, hk=2, causal=True, mask=True),
    window(1000, 4096, causal=True, h=2, hk=1),
    Case(1, 1, 0, 0, 1, 1),
]


def operands(case, mode, seed=0):
    """Returns the arguments of torch.ops.fastmax.flash_forward, and the gradients of its outputs."""
    dtype, _ = MODES[mode]
    sizes = configurations.Case(
        "", {}, heads=case.h, kv_heads=case.hk, queries=case.n, keys=case.m, head_dim=case.d, value_dim=case.dv, dtype=dtype,
        layout=case.layout, padding=case.mask, softmax=True,
    )  # fmt: skip
    tensors = random_tensors(sizes, DEVICE, seed)
    q, k, v = (tensors[name] for name in "qkv")
    options = (case.d**-0.5, case.causal, case.left, case.right, mode == "tf32")
    grad_o = torch.randn(2, case.h, case.n, case.dv, device=DEVICE).to(dtype)
    grad_lse = torch.randn(2, case.h, case.n, device=DEVICE)
    return (q, k, v, tensors.get("attention_mask"), *[None] * 4, *options), (grad_o, grad_lse)


def both(arguments, grads):
    """Returns o, lse and the gradients of q, k and v."""
    poison_free_memory(DEVICE)
    o, lse = torch.ops.fastmax.flash_forward(*arguments)
    poison_free_memory(DEVICE)
    return o, lse, *torch.ops.fastmax.flash_backward(*grads, *arguments[:3], o, lse, *arguments[3:])[:3]


def definition(arguments, grads, dtype):
    """Returns the same results from the whole matrix of weights, in a dtype."""
    q, k, v, mask, _, first, end, _, scale, causal, left, right, _ = arguments
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    n, m, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    distance = (torch.arange(n, device=DEVICE) + m - n)[:, None] - torch.arange(m, device=DEVICE)
    sees = torch.ones(n, m, dtype=torch.bool, device=DEVICE)
    if causal:
        sees &= distance >= 0
    if left >= 0:
        sees &= distance <= left
    if right >= 0:
        sees &= -distance <= right
    sees = sees if mask is None else sees & mask[:, None, None, :]
    if first is not None:
        sees = sees & (torch.arange(m, device=DEVICE) >= first.repeat_interleave(group, 1)[..., None])
    if end is not None:
        sees = sees & (torch.arange(m, device=DEVICE) < end.repeat_interleave(group, 1)[..., None])
    s = scale * (q @ k.repeat_interleave(group, 1).mT)
    s = torch.where(sees, s, -torch.inf)
    largest = s.detach().amax(-1, keepdim=True)
    w = torch.exp(s - torch.where(largest == -torch.inf, 0.0, largest))
    z = w.sum(-1, keepdim=True)
    blind = z == 0
    z = torch.where(blind, 1.0, z)
    o = (w / z) @ v.repeat_interleave(group, 1)
    lse = torch.where(blind, -torch.inf, z.log() + largest).squeeze(-1)
    grad_o, grad_lse = (x.to(dtype) for x in grads)
    loss = (o * grad_o).sum() + torch.where(blind.squeeze(-1), 0.0, lse * grad_lse).sum()
    return o.detach(), lse.detach(), *torch.autograd.grad(loss, (q, k, v))


@by_mode
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(case, mode, precision):  # noqa: F811
    """The error is at most twice that of the plain formula, and a repetition has the same bits."""
    arguments, grads = operands(case, mode)
    actual = both(arguments, grads)
    exact, plain = (definition(arguments, grads, dtype) for dtype in (torch.float64, arguments[0].dtype))
    sees = exact[1].isfinite()
    assert torch.equal(actual[1] == -torch.inf, ~sees), "-inf exactly where a query sees no key"
    assert not actual[0][~sees].any(), "and an output of zeros"
    rounding = ROUNDING["tf32" if mode == "tf32" else str(arguments[0].dtype).removeprefix("torch.")]
    for name, x, y, z in zip(("o", "lse", "q", "k", "v"), actual, exact, plain, strict=True):
        if name == "lse":
            x, y, z = x[sees], y[sees], z[sees]
        assert relative(x, y) <= max(2 * relative(z, y) + FLOOR, 2 * rounding), name
    assert all(map(torch.equal, actual, both(arguments, grads)))


@by_mode
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_window_that_hides_nothing_is_none(causal, mode, precision):  # noqa: F811
    """Results are equal bit for bit to those without a window. A window one token narrower hides one pair and runs other
    kernels."""
    case = Case(200, 217, -1, -1, causal=causal, mask=True)
    arguments, grads = operands(case, mode)
    expected = both(arguments, grads)
    for left, right in ((216, 199), (-1, 10**12), (10**12, -1)):
        given = (*arguments[:10], left, right, arguments[-1])
        assert all(map(torch.equal, both(given, grads), expected))
    if causal:
        given = (*arguments[:10], -1, 0, arguments[-1])
        assert all(map(torch.equal, both(given, grads), expected))
    narrow = both((*arguments[:10], 215, -1, arguments[-1]), grads)
    for x, y in zip(narrow[2:], expected[2:], strict=True):
        assert relative(x, y.double()) < 0.05


@by_mode
@pytest.mark.parametrize("d", HEAD_DIMS, ids=lambda d: f"d{d}")
def test_every_kernel_at_small_sizes(d, mode, precision):  # noqa: F811
    """This test has no reference. It is run under compute-sanitizer."""
    for n, m, left, right in ((1, 1, 0, 0), (17, 17, 3, -1), (150, 150, 20, 5), (129, 200, 64, -1), (200, 129, 5, 5)):
        odd = n == 150
        case = Case(n, m, left, right, d - odd, d - odd, 2, 1, causal=n in (17, 150), mask=odd)
        assert not any(x.isnan().any() for x in both(*operands(case, mode)))


def test_covered_calls_do_not_reach_the_pytorch_implementation(kernels_alone):
    for mode in MODES:
        both(*operands(window(9, 50, causal=True, mask=True), mode))
    arguments, grads = operands(window(9, 50, causal=True, mask=True), "fp32")
    arguments = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in arguments]
    with pytest.raises(AssertionError):  # and the rest does
        both(arguments, [x.double() for x in grads])
