"""Normalisation alone: both gradients against float64, what it saves, extreme inputs, and the operator that scales tokens."""

import pytest
import torch
from common import by_dtype, by_gradient, check_operator, in_turn, relative, torch_warns
from torch.autograd import gradcheck

from fastmax.prepare.normalization import normalize_queries_and_keys, normalize_rows
from fastmax.testing.reference import normalized

by_kind = pytest.mark.parametrize("kind", ["sequence", "token"])
# Half types: 1.2 times what rounding the result alone comes to (2.1e-4 and 1.7e-3); norms in half would add as much again.
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2.5e-4, torch.bfloat16: 2e-3}


def normalize(x, kind, lim, custom=False, takes_part=None):
    """Returns x normalized as the keys of a call."""
    return normalize_queries_and_keys(x.detach()[..., :1, :], x, kind, lim, custom, takes_part)[1]


@in_turn("custom")
@by_gradient
@by_dtype
@by_kind
@pytest.mark.parametrize("lim", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 10.0])
def test_against_float64(magnitude, lim, kind, dtype, custom, device):
    """Rows are token-major, some are zero, and one head is all zero. At every `lim` some rows are short and some long."""
    spread = torch.rand(2, 37, 3, 1, device=device) * 2 * magnitude
    x = (spread * torch.randn(2, 37, 3, 17, device=device)).to(dtype).transpose(1, 2)
    x[0, 0, 3], x[1, 1] = 0, 0
    grad_o = torch.randn(2, 37, 3, 17, device=device).to(dtype).transpose(1, 2)
    x.requires_grad_()
    x64 = x.detach().double().requires_grad_()
    exact = normalized(x64, kind, lim)
    o = normalize(x, kind, lim, custom)
    assert o.dtype == dtype and o.shape == x.shape and o.stride() == x.stride()
    assert relative(o, exact.detach()) < LIMITS[dtype]
    (grad,) = torch.autograd.grad(o, x, grad_o)
    # A row of zeros: its length has no derivative, and the definition's is NaN.
    (exact_grad,) = torch.autograd.grad(exact, x64, grad_o.double())
    known = exact_grad.isfinite()
    assert known.any(-1)[0, 1:].all() and grad.isfinite().all()
    assert relative(torch.where(known, grad, 0), torch.where(known, exact_grad, 0.0)) < LIMITS[dtype]


@by_kind
def test_gradcheck(kind, device):
    x = torch.randn(2, 2, 9, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert gradcheck(lambda x: normalize(x, kind, 1.5, True), x)


@in_turn("custom")
@by_gradient
@by_kind
@pytest.mark.parametrize("size", [1e-40, 1e-25, 1e25, 3e37])
def test_neither_overflows_nor_underflows(size, kind, custom, device):
    x = torch.randn(2, 2, 9, 4, device=device)
    exact = normalized((size * x).double(), kind, 1.0)
    o = normalize((size * x).requires_grad_(), kind, 1.0, custom)
    torch.testing.assert_close(o.double(), exact, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("size", [1e-42, 1e-25, 1e25, 2e38])
def test_packed_sequences_neither_overflow_nor_underflow(size, device):
    sizes = torch.tensor([1.0] * 4 + [size] * 5, dtype=torch.float64, device=device)[:, None]
    x = ((torch.rand(2, 2, 9, 4, dtype=torch.float64, device=device) + 0.5) * sizes).float()
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    o = normalize_rows(x.requires_grad_(), "sequence", 1.0, cu_seqlens=bounds)
    exact = torch.cat([normalized(part.double(), "sequence", 1.0) for part in x.detach().split((4, 5), 2)], 2)
    torch.testing.assert_close(o.double(), exact, rtol=1e-5, atol=0.0)
    if size > 1e-38:  # 1 / size is finite
        assert torch.autograd.grad(o.sum(), x)[0].isfinite().all()


@by_gradient
def test_short_rows_stay_bit_for_bit(custom, device):
    x = torch.randn(2, 3, 50, 8, device=device, requires_grad=True)
    longest = x.detach().norm(dim=-1).amax().item()
    assert torch.equal(normalize(x, "token", 1.01 * longest, custom), x)


@by_gradient
@by_dtype
def test_rows_that_are_longest_together(dtype, custom, device):
    """Rows of equal length share the factor's derivative, as the definition's maximum does. In bf16 rows often have equal
    lengths."""
    x = torch.tensor([3.0, -3.0, 1.0, 3.0], dtype=dtype, device=device).view(1, 1, 4, 1).requires_grad_()
    grad_o = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype, device=device).view(1, 1, 4, 1)
    (grad,) = torch.autograd.grad(normalize(x, "sequence", 1.0, custom), x, grad_o)
    x64 = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(normalized(x64, "sequence", 1.0), x64, grad_o.double())
    assert relative(grad, exact) < LIMITS[dtype]


@by_kind
def test_custom_keeps_only_the_result(kind):
    x = torch.randn(2, 3, 50, 8, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = normalize(x, kind, 1.0, True)
    assert [x.data_ptr() for x in saved if x.shape == o.shape] == [o.data_ptr()]
    of_query = 9 * o[..., :1, 0].numel() if kind == "token" else 0  # beside the keys
    assert sum(x.numel() for x in saved) <= o.numel() + 2 * o[..., 0].numel() + of_query


@by_kind
def test_second_derivatives(kind):
    x = torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(normalize(x, kind, 1.5, True).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivative.*use_custom_gradient=False"):
        grad.sum().backward()
    (grad,) = torch.autograd.grad(normalize(x, kind, 1.5).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert x.grad.isfinite().all()


@by_kind
def test_no_rows(kind):
    x = torch.randn(2, 3, 0, 8, requires_grad=True)
    assert normalize(x, kind, 1.0, True).shape == x.shape


@in_turn("custom")
@by_gradient
@by_dtype
@pytest.mark.parametrize("three_d", [False, True], ids=["4-d", "3-d"])
@pytest.mark.parametrize("padding", [30.0, 3e3], ids=["longer", "far longer"])
def test_rows_that_take_no_part(padding, three_d, dtype, custom, device):
    """Masked rows do not count, become zeros and get no gradient. A head with only masked rows is zero."""
    x = torch.randn(3, 20, 2, 8, device=device)
    takes_part = torch.rand(3, 20, device=device) < 0.6
    takes_part[2] = False
    x = torch.where(takes_part[..., None, None], x, padding * x).to(dtype).transpose(1, 2)
    grad_o = torch.randn(3, 20, 2, 8, device=device).to(dtype).transpose(1, 2)
    x64 = x.double().requires_grad_()
    exact = normalized(x64, "sequence", 1.5, takes_part) * takes_part[:, None, :, None]
    (exact_grad,) = torch.autograd.grad(exact, x64, grad_o.double())

    x = x.requires_grad_()
    rows = x.flatten(0, 1) if three_d else x
    o = normalize(rows, "sequence", 1.5, custom, takes_part)
    (grad,) = torch.autograd.grad(o, x, grad_o.flatten(0, 1) if three_d else grad_o)
    o = o.unflatten(0, (3, 2)) if three_d else o
    assert o.dtype == dtype and (three_d or o.stride() == x.stride())
    assert (o.double().norm(dim=-1) < 1.51).all()
    assert relative(o, exact.detach()) < LIMITS[dtype]
    hidden = ~takes_part[:, None, :].expand(3, 2, 20)
    assert (grad[hidden] == 0).all() and (o[hidden] == 0).all()
    # The definition divides by the length of a row of zeros.
    exact_grad = torch.where(hidden[..., None], 0.0, exact_grad)
    assert relative(grad, exact_grad) < LIMITS[dtype]


@by_gradient
def test_a_mask_changes_nothing_for_token(custom, device):
    x = torch.randn(2, 3, 9, 4, device=device)
    mask = torch.rand(2, 9, device=device) < 0.5
    assert torch.equal(normalize(x, "token", 0.5, custom, mask), normalize(x, "token", 0.5, custom))


# ---- the operator


def queries_and_keys(dtype=torch.float32, device="cpu", d=17):
    """Returns q and k of different sizes and layouts, with rows of zeros, some rows longer than 1 and some shorter."""
    q, k = torch.randn(2, 11, 4, d, device=device), torch.randn(2, 3, 23, d, device=device)
    q, k = (x * 2 * torch.rand(*x.shape[:3], 1, device=device) / d**0.5 for x in (q, k))
    q[0, 3], k[1, 2, :5] = 0.0, 0.0
    return q.to(dtype).transpose(1, 2), k.to(dtype)


@by_dtype
@pytest.mark.parametrize("three_d", [False, True], ids=["4-d", "3-d"])
@pytest.mark.parametrize("wanted", ["q", "k", "qk"])
def test_both_at_once(wanted, three_d, dtype, device):
    """One call scales q and k. It may be differentiated by only one of them."""
    q, k = (x.flatten(0, 1) if three_d else x for x in queries_and_keys(dtype, device))
    grads = [torch.randn_like(x) for x in (q, k)]
    results = {}
    for custom in (True, False):
        leaves = [x.detach().requires_grad_(name in wanted) for name, x in (("q", q), ("k", k))]
        outputs = normalize_queries_and_keys(*leaves, "token", 1.0, custom)
        used = [i for i, name in enumerate("qk") if name in wanted]
        of = torch.autograd.grad([outputs[i] for i in used], [leaves[i] for i in used], [grads[i] for i in used])
        results[custom] = *(x.detach() for x in outputs), *of
    for x, y in zip(results[True], results[False], strict=True):
        assert x.dtype == dtype and x.shape == y.shape and x.stride() == y.stride()
        assert relative(x, y.double()) < 2 * LIMITS[dtype]


def test_factors_tell_which_rows_were_scaled(device):
    """Factors tell it even if a row is longer by so little that its factor rounds to 1."""
    x = torch.zeros(1, 1, 4, 2, device=device)
    x[0, 0, :, 0] = torch.tensor([1.0, 1.0 + 2**-23, 0.5, 2.0])
    o, _, factor, _ = torch.ops.fastmax.normalize_tokens(x, x, 1.0)
    assert (factor.flatten() < 1.0).tolist() in ([False, True, False, True], [False, False, False, True])
    assert (o <= 1.0).all() and factor[0, 0, 3] == 0.5 and factor[0, 0, 2] == 1.0


def test_opcheck():
    q, k = queries_and_keys(d=3)
    check_operator(torch.ops.fastmax.normalize_tokens.default, (q.requires_grad_(), k.requires_grad_(), 1.0), traced=True)
    results = [x.detach() for x in torch.ops.fastmax.normalize_tokens(q, k, 1.0)]
    for grads in ((torch.randn_like(q), torch.randn_like(k)), (None, torch.randn_like(k)), (None, None)):
        arguments = *grads, *results, 1.0
        check_operator(torch.ops.fastmax.normalize_tokens_backward.default, arguments, traced=grads[0] is not None)


def test_normalized_attention_is_attention_to_normalized_rows():
    """The operator for kernels that do both, in PyTorch operations."""
    q, k, v, lim, score = (
        *(torch.randn(2, h, n, 5, dtype=torch.float64) for h, n in ((4, 7), (2, 9), (2, 9))),
        1.5,
        (0.4, 1.0, 0.5),
    )
    expected, actual = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    rows = torch.ops.fastmax.normalize_tokens(*expected[:2], lim)
    options = (None,) * 7, (*score, 0.0, 1), (True, 0.0, "linear", False)
    outputs = torch.ops.fastmax.forward(*rows[:2], expected[2], *sum(options, ()))
    o, z, k_factor = torch.ops.fastmax.normalized_forward(*actual, lim, *score)
    torch.testing.assert_close((o, z, k_factor), (*outputs, rows[3]))
    assert 0 < (k_factor < 1).sum() < k_factor.numel() and not k_factor.requires_grad
    weights = torch.randn_like(o), torch.randn_like(z)
    for x in (outputs, (o, z)):
        sum((w * result).sum() for w, result in zip(weights, x, strict=True)).backward()
    torch.testing.assert_close([x.grad for x in actual], [x.grad for x in expected])
    check_operator(torch.ops.fastmax.normalized_forward.default, (*actual, lim, *score), traced=True)
    results = [x.detach() for x in (*actual, o, z, k_factor)]
    for grad_z in (weights[1], None):
        check_operator(torch.ops.fastmax.normalized_backward.default, (weights[0], grad_z, *results, lim, *score), traced=True)


@torch_warns
@by_kind
def test_compiled(kind, device):
    q, k = queries_and_keys(device=device)

    def both(q, k):
        q, k = (x.detach().requires_grad_() for x in (q, k))
        outputs = normalize_queries_and_keys(q, k, kind, 1.0)
        return *outputs, *torch.autograd.grad([x.sin().sum() for x in outputs], (q, k))

    def forward(q, k):
        return normalize_queries_and_keys(q, k, kind, 1.0)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    outputs = compiled(*leaves)
    grads = torch.autograd.grad([x.sin().sum() for x in outputs], leaves)
    for x, y in zip((*outputs, *grads), both(q, k), strict=True):
        torch.testing.assert_close(x, y)


@torch_warns
def test_the_operator_in_compiled_code(device):
    """Forward and backward are one graph and give the same bits."""
    q, k = queries_and_keys(device=device)
    results = []
    for run in (
        torch.ops.fastmax.normalize_tokens,
        torch.compile(torch.ops.fastmax.normalize_tokens, fullgraph=True, backend="aot_eager"),
    ):
        leaves = [x.detach().requires_grad_() for x in (q, k)]
        outputs = run(*leaves, 1.0)
        results.append((*outputs, *torch.autograd.grad([x.sin().sum() for x in outputs[:2]], leaves)))
    assert all(map(torch.equal, *results))


def test_autocast_leaves_the_operator_alone(device):
    q, k = queries_and_keys(device=device)
    expected = torch.ops.fastmax.normalize_tokens(q, k, 1.0)
    with torch.autocast(q.device.type, torch.bfloat16):
        outputs = torch.ops.fastmax.normalize_tokens(q, k, 1.0)
    assert all(map(torch.equal, outputs, expected))
