"""`torch.ops.fastmax.global_forward_` and `global_backward_`: they add global keys to results for local keys, in place."""

import pytest
import torch
from common import CHUNK, DTYPES, check_operator, dtype_id, relative
from torch.testing import assert_close

from fastmax import eager
from fastmax.eager import compute_dtype
from fastmax.testing import verify

global_forward_ = torch.ops.fastmax.global_forward_.default
global_backward_ = torch.ops.fastmax.global_backward_.default
SCORE = (0.3, 1.0, 1.0, 0.5)  # scale and coefficients


def operands(device, dtype=torch.float32, b=2, h=4, hk=2, n=70, m=90, d=24, dv=16):
    """Returns q, k, v; o and lse of local keys; grad_o and grad_z; and the gradients by local keys."""
    wide = compute_dtype(dtype)

    def token(heads, tokens, columns):
        return torch.randn(b, heads, tokens, columns, device=device).to(dtype)

    # Scores for which no sum of weights vanishes, of p = 1 either.
    tensors = 0.3 * token(h, n, d), 0.3 * token(hk, m, d), token(hk, m, dv)
    lse, grad_z = (torch.randn(b, h, n, device=device, dtype=wide) for _ in range(2))
    near = token(h, n, dv), lse + 3.0
    return tensors, near, (token(h, n, dv), 1e-3 * grad_z), tuple([torch.randn_like(x) for x in tensors])


def tokens_of(tensors, mask=False, decay=False, first=False):
    """Returns the tensors that accompany the tokens."""
    (b, _, n, _), (hk, m), device = tensors[0].shape, tensors[1].shape[1:3], tensors[0].device
    real = (torch.arange(m, device=device) % 5 != 1).expand(b, m).contiguous() if mask else None
    if mask:
        real[0, : m - n // 2] = False  # the first queries see none
    log_decay = -0.1 * torch.rand(b, hk, m, device=device, dtype=compute_dtype(tensors[0].dtype)) if decay else None
    begins = torch.arange(n, device=device).sub_(n // 3).clamp_(min=0).int().expand(b, hk, n).contiguous() if first else None
    return real, log_decay, begins


def by_parts(tensors, near, of_output, grads, tokens, p, algorithm):
    """Returns the expected results of the operators, computed by those that merge nothing in place."""
    mask, log_decay, first = tokens
    call = (mask, None, None, log_decay, first, None, *SCORE, p, True, 0.0, algorithm, False)
    o_global, z_global = torch.ops.fastmax.forward(*tensors, *call)
    o, lse = (x.clone() for x in near)
    z = torch.ops.fastmax.merge_(o, lse, o_global, z_global, None)
    of_global = torch.ops.fastmax.backward(*of_output, *tensors, o, z, *call)
    return (o, lse, z), [x + y for x, y in zip(grads, of_global, strict=False)], of_global[-1]


def joined(tensors, near, of_output, grads, tokens, p, algorithm, results=None):
    """Returns the same by the operators, with the gradients of given results."""
    call = (*tokens, *SCORE, p, algorithm, False)
    o, lse = (x.clone(memory_format=torch.preserve_format) for x in near)
    z = global_forward_(o, lse, *tensors, *call)
    into = [x.clone(memory_format=torch.preserve_format) for x in grads]
    of_decay = global_backward_(*into, *of_output, *tensors, *((o, z) if results is None else results), *call)
    return (o, lse, z), into, of_decay


def check(given, tokens, p=2, algorithm="linear"):
    exact = by_parts(*given, tokens, p, algorithm)
    (o, lse, z), grads, of_decay = joined(*given, tokens, p, algorithm, results=(exact[0][0], exact[0][2]))
    rounding = verify.ROUNDING[dtype_id(o.dtype)] if o.dtype.itemsize == 2 else 1e-6
    assert o.numel() == 0 or relative(o, exact[0][0]) <= rounding
    for x, y in ((lse, exact[0][1]), (z, exact[0][2])):
        assert_close(x, y, rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, grads, exact[1])), "a sum of two rounded numbers, rounded once"
    assert torch.equal(of_decay, exact[2])


TOKENS = {"plain": {}, "mask": {"mask": True}, "decay": {"decay": True, "mask": True}, "first": {"first": True}}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("algorithm", ["linear", "quadratic"])
def test_as_the_parts_on_their_own(algorithm, p, tokens, dtype, device):
    given = operands(device, dtype)
    check(given, tokens_of(given[0], **TOKENS[tokens]), p, algorithm)


# Of Hopper's kernels: tiles of 64 rows, items of 128 and 256, that end and begin anywhere.
SIZES = ((1, 1), (17, 17), (63, 200), (300, 300), (256, 256), (CHUNK + 1, CHUNK + 129), (1000, 1031))


@pytest.mark.cuda
@pytest.mark.parametrize("n, m", SIZES, ids=str)
@pytest.mark.parametrize("d, dv", [(32, 32), (24, 16), (64, 64), (40, 64), (128, 128), (128, 72)])
@pytest.mark.parametrize("tokens", TOKENS)
def test_kernels_join(tokens, d, dv, n, m):
    given = operands("cuda", torch.bfloat16, n=n, m=m, d=d, dv=dv)
    check(given, tokens_of(given[0], **TOKENS[tokens]))


LAYOUTS = {
    "later tokens": lambda x: torch.cat((x, x), dim=2)[:, :, x.shape[2] :],
    "token-major": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x,
    "unaligned": lambda x: torch.cat((x[..., :1], x), dim=-1)[..., 1:] if x.dim() == 4 else x,
}


@pytest.mark.parametrize("d", [24, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_into_views_alone(layout, dtype, d, device):
    tensors, near, of_output, grads = operands(device, dtype, d=d, dv=d)
    exact = joined(tensors, near, of_output, grads, (None, None, None), 2, "linear")
    o, lse, *into = views = [LAYOUTS[layout](x.clone()) for x in (*near, *grads)]
    around = [x if x._base is None else x._base for x in views]
    before = [x.clone() for x in around]
    call = (None, None, None, *SCORE, 2, "linear", False)
    z = global_forward_(o, lse, *tensors, *call)
    global_backward_(*into, *of_output, *tensors, o, z, *call)
    for x, y in zip((o, lse, z, *into), (*exact[0], *exact[1]), strict=True):
        if dtype == torch.float32:
            assert_close(x, y, rtol=1e-6, atol=1e-5)
        else:  # global keys of views that a kernel cannot join are rounded before they are added
            assert relative(x, y) <= verify.ROUNDING[dtype_id(dtype)]
    for x, y, view in zip(around, before, views, strict=True):
        assert int((x != y).sum()) <= view.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_id)
def test_opcheck(dtype, device):
    tensors, near, of_output, grads = operands(device, dtype)
    call = (*tokens_of(tensors, mask=True, decay=True), *SCORE, 2, "linear", False)
    traced = dtype == torch.bfloat16
    check_operator(global_forward_, (*near, *tensors, *call), traced)
    check_operator(global_backward_, (*grads, *of_output, *tensors, *near, *call), traced)


def test_they_record_nothing(device):
    tensors, near, of_output, grads = operands(device)
    call = (None, None, None, *SCORE, 2, "linear", False)
    tensors[1].requires_grad_()
    with pytest.raises(RuntimeError, match="global_forward_ has no gradient: use fastmax.fastmax_attention"):
        global_forward_(*near, *tensors, *call)
    with pytest.raises(RuntimeError, match="global_backward_ has no gradient"):
        global_backward_(*grads, *of_output, *tensors, *near, *call)
    x = torch.ones_like(near[0], requires_grad=True)
    y = x * near[0]
    with torch.no_grad():
        global_forward_(*near, *tensors, *call)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("shape", [{"b": 0}, {"n": 0}, {"h": 0, "hk": 0}], ids=str)
def test_empty(shape, device):
    given = operands(device, **shape)
    check(given, (None, None, None))


@pytest.mark.parametrize("index, name", [*enumerate(("grad_q", "grad_k", "grad_v"))])
def test_refused_by_name(index, name, device):
    tensors, near, of_output, grads = operands(device)
    call = (None, None, None, *SCORE, 2, "linear", False)
    for wrong, message in (
        (grads[index][:, :, :-1], "must have shape"),
        (grads[index].double(), "must (be|have q's|have k's|have v's)"),
    ):
        into = [*grads[:index], wrong, *grads[index + 1 :]]
        with pytest.raises((ValueError, TypeError, RuntimeError), match=f"{name} {message}"):
            global_backward_(*into, *of_output, *tensors, *near, *call)
    for wrong in ((near[0][..., :-1], near[1]), (near[0], near[1][..., :-1])):
        with pytest.raises((ValueError, RuntimeError), match="(o|lse) must have shape"):
            global_forward_(*wrong, *tensors, *call)


@pytest.mark.cuda
def test_repeatable_and_without_pytorch_operations(monkeypatch):
    """Kernels that cannot add in place leave the sums to PyTorch, which also computes all of float64."""
    given = operands("cuda", torch.bfloat16, n=700, m=800, d=64, dv=64)
    monkeypatch.setattr(torch.Tensor, "add_", None)
    first, second = (joined(*given, (None, None, None), 2, "linear") for _ in range(2))
    for x, y in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
        assert torch.equal(x, y)
    monkeypatch.undo()
    calls = []
    right = eager.merge_
    monkeypatch.setattr(eager, "merge_", lambda *given: calls.append(None) or right(*given))
    joined(*operands("cuda", torch.float64), (None, None, None), 2, "linear")
    assert len(calls) == 1


@pytest.mark.cuda
def test_a_tensor_on_the_cpu_is_named():
    tensors, near, of_output, grads = operands("cuda")
    call = (None, None, None, *SCORE, 2, "linear", False)
    given = {"o": near[0], "lse": near[1], "q": tensors[0], "k": tensors[1], "v": tensors[2]}
    of_backward = {"grad_q": grads[0], "grad_k": grads[1], "grad_v": grads[2], "grad_o": of_output[0], "grad_z": of_output[1]}
    of_backward |= dict(zip(("q", "k", "v", "o", "z"), (*tensors, *near), strict=True))
    for operator, arguments in ((global_forward_, given), (global_backward_, of_backward)):
        for name in arguments:
            wrong = [x.cpu() if other == name else x for other, x in arguments.items()]
            named = f"{name} (is on cpu, and |must be on q's device cuda)|k must be on q's device cpu"
            with pytest.raises((ValueError, RuntimeError), match=named):
                operator(*wrong, *call)
