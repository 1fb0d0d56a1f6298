"""`torch.ops.fastmax.merge_` merges global keys into local results in place; it has a kernel on CUDA."""

import math

import pytest
import torch
from common import DTYPES, check_operator, dtype_id, in_turn, relative

from fastmax import eager
from fastmax.testing.errors import ROUNDING

merge_ = torch.ops.fastmax.merge_.default


def operands(device, b=2, h=4, n=37, dv=24, dtype=torch.float32):
    """Returns o, lse, o_global and z_global of ordinary size."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    o, o_global = (torch.randn(b, h, n, dv, device=device).to(dtype) for _ in range(2))
    lse, z_global = torch.randn(b, h, n, device=device, dtype=wide), 3.0 * torch.rand(b, h, n, device=device, dtype=wide) + 0.1
    return o, lse, o_global, z_global


def merged(o, lse, o_global, z_global):
    """Returns o and lse after `merge_` by its definition, in float64."""
    o, lse, o_global, z_global = (x.double() for x in (o, lse, o_global, z_global))
    far = z_global.log()
    total = torch.logaddexp(lse, far)
    weights = [torch.exp(x - total).unsqueeze(-1) for x in (lse, far)]
    return weights[0] * o + weights[1] * o_global, total


@in_turn("dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("dv", [1, 7, 16, 24, 64, 128, 256, 700])
def test_against_float64(dv, dtype, device):
    given = operands(device, n=300 if dv == 64 else 37, dv=dv, dtype=dtype)
    exact = merged(*given)
    assert merge_(*given) is None
    tolerance = {torch.float64: 1e-14, torch.float32: 3e-7}.get(dtype, ROUNDING[dtype_id(dtype)])
    assert relative(given[0], exact[0]) <= tolerance
    assert relative(given[1], exact[1]) <= (1e-14 if dtype == torch.float64 else 3e-7)


LAYOUTS = {
    "later queries": lambda x: torch.cat((x, x), dim=2)[:, :, x.shape[2] :],
    "token-major": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "unaligned": lambda x: torch.cat((x[..., :1], x, x[..., :2]), dim=-1)[..., 1:-2] if x.dim() == 4 else x,
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
}


@in_turn("dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("far", [*LAYOUTS, "dense"])
@pytest.mark.parametrize("near", LAYOUTS)
def test_any_strides(near, far, dtype, device):
    """Results are those of contiguous tensors, and memory around them is not written."""
    dense = operands(device, dtype=dtype)
    o, lse = (LAYOUTS[near](x.clone()) for x in dense[:2])
    rest = [LAYOUTS.get(far, lambda x: x)(x) for x in dense[2:]]
    around = {x: x._base.clone() if x._base is not None else None for x in (o, lse)}
    merge_(o, lse, *rest)
    merge_(*dense)
    for x, y in ((o, dense[0]), (lse, dense[1])):
        torch.testing.assert_close(x, y, rtol=1e-6 if dtype == torch.float32 else 0.01, atol=1e-6)
    for x, before in around.items():
        if before is not None:
            assert int((x._base != before).sum()) <= x.numel()


def one_row(device, lse, z_global):
    o, o_global = torch.full((1, 1, 1, 8), 2.0, device=device), torch.full((1, 1, 1, 8), 5.0, device=device)
    lse, z_global = (torch.full((1, 1, 1), x, device=device) for x in (lse, z_global))
    merge_(o, lse, o_global, z_global)
    assert (o == o[..., :1]).all() or o.isnan().all()
    return o[0, 0, 0, 0].item(), lse.item()


def test_limits(device):
    """The checked numbers are the output and the log of the sum."""
    inf = math.inf
    assert one_row(device, 0.5, 0.0) == (2.0, 0.5), "no global keys"
    assert one_row(device, -inf, 0.0)[1] == -inf, "no keys"
    assert one_row(device, -inf, 1.0) == (5.0, 0.0), "no local keys"
    assert one_row(device, 300.0, 1.0) == (2.0, 300.0), "local keys outweigh all"
    assert one_row(device, -300.0, 1.0) == (5.0, 0.0), "global keys outweigh all"
    assert one_row(device, 0.0, 3.0) == pytest.approx(((2.0 + 3.0 * 5.0) / 4.0, math.log(4.0)), rel=1e-6)
    for negative in (one_row(device, 0.5, -1.0), one_row(device, -inf, -1.0), one_row(device, math.nan, 1.0)):
        assert all(map(math.isnan, negative)), "the log of a negative sum"


def test_rows_are_on_their_own(device):
    """Rows without global keys keep their bits, and NaN stays in its row."""
    o, lse, o_global, z_global = operands(device, n=70)
    z_global[:, :, ::3] = 0.0
    z_global[:, 1, 4] = -1.0
    before = o.clone()
    merge_(o, lse, o_global, z_global)
    assert torch.equal(o[:, :, ::3], before[:, :, ::3]) and (o[:, :, 1::3] != before[:, :, 1::3]).any(-1).all()
    assert o.isnan().any(-1).sum() == 2 and o[:, 1, 4].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_id)
def test_opcheck(dtype, device):
    check_operator(merge_, operands(device, dtype=dtype), traced=dtype == torch.bfloat16)


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8)], ids=str)
def test_empty(shape, device):
    merge_(*operands(device, *shape))


def test_it_records_nothing(device):
    o, lse, *rest = operands(device)
    with pytest.raises(RuntimeError, match="merge_ has no gradient: use fastmax.merge_attention"):
        merge_(o, lse, rest[0].requires_grad_(), *rest[1:])
    with torch.no_grad():
        merge_(o, lse, *rest)
    x = torch.ones_like(o, requires_grad=True)
    y = x * o
    with torch.no_grad():
        merge_(o, lse, *rest)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


REFUSED = {
    "rank of o": (0, lambda x: x[0], "o must be 4-dimensional"),
    "shape of o_global": (2, lambda x: x[:, :, :-1], "o_global must have shape"),
    "dtype of o_global": (2, lambda x: x.double(), "o_global must (be torch.float32|have o's dtype)"),
    "shape of lse": (1, lambda x: x[..., :-1], "lse must have shape"),
    "dtype of lse": (1, lambda x: x.half(), "lse must be (torch.)?float32"),
    "shape of z_global": (3, lambda x: x[:, :1], "z_global must have shape"),
    "dtype of z_global": (3, lambda x: x.double(), "z_global must be (torch.)?float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, device):
    given = list(operands(device))
    index, change, message = REFUSED[name]
    given[index] = change(given[index])
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        merge_(*given)


def test_what_is_written_over_is_not_read_as_something_else(device):
    o, lse, o_global, z_global = operands(device)
    with pytest.raises((ValueError, RuntimeError), match="o_global must not"):
        merge_(o, lse, o, z_global)
    with pytest.raises((ValueError, RuntimeError), match="z_global must not"):
        merge_(o, lse, o_global, lse)
    with pytest.raises(RuntimeError, match="expanded|single memory location"):
        merge_(o[:, :1].expand(-1, 4, -1, -1), lse, o_global, z_global)


@pytest.mark.cuda
def test_a_tensor_on_the_cpu_is_named():
    for index, name in ((2, "o_global"), (3, "z_global")):
        given = list(operands("cuda"))
        given[index] = given[index].cpu()
        with pytest.raises(RuntimeError, match=f"{name} is on cpu, and o is on cuda:0"):
            merge_(*given)


@pytest.mark.cuda
def test_the_kernel_merges(monkeypatch):
    """The kernel computes all dtypes that it covers, and PyTorch operations compute float64."""
    calls = []
    right = eager.merge_
    monkeypatch.setattr(eager, "merge_", lambda *given: calls.append(None) or right(*given))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        merge_(*operands("cuda", dtype=dtype, dv=7))
    assert not calls
    merge_(*operands("cuda", dtype=torch.float64))
    assert len(calls) == 1


@pytest.mark.cuda
def test_many_rows():
    """There are more heads than the y dimension of a grid, and strides beyond 2^31 elements."""
    given = operands("cuda", b=300, h=300, n=3, dv=8, dtype=torch.bfloat16)
    exact = merged(*given)
    merge_(*given)
    assert relative(given[0], exact[0]) <= 2.0**-8
    lse, z_global = torch.randn(1, 2, 3, device="cuda"), torch.rand(1, 2, 3, device="cuda") + 0.1
    o = (
        torch.empty(2, 2**31 + 64, device="cuda", dtype=torch.bfloat16)[:, -24:]
        .unflatten(1, (1, 3, 8))
        .transpose(0, 1)
        .normal_()
    )
    o_global = torch.randn(1, 2, 3, 8, device="cuda", dtype=torch.bfloat16)
    exact = merged(o, lse, o_global, z_global)
    merge_(o, lse, o_global, z_global)
    assert o.stride(1) > 2**31 and relative(o, exact[0]) <= 2.0**-8
