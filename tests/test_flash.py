"""`flash_attention`: softmax attention against its definition in float64 and PyTorch's own, inside PyTorch, and its kernels."""

import math
from functools import lru_cache, partial

import pytest
import torch
from common import (
    COLS,
    CPU,
    ROWS,
    Case,
    Expected,
    Memory,
    assert_gradients_of,
    assert_replayed,
    by_causal,
    by_dtype,
    by_gradient,
    by_layout,
    by_size,
    capture,
    check_export,
    check_operator,
    compare,
    dtype_id,
    in_turn,
    make_inputs,
    pytorch_implementation,
    run,
    torch_warns,
)
from test_kernels import (
    DEVICE,
    HEAD_DIMS,
    MODES,
    UNSAFE,
    WHY_NOT,
    by_mode,
    case_id,
    in_mode,
    on_a_late_stream,
    relative,
    safe_operands,
    widened,
)
from test_validation import BAD, assert_refused, good
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from fastmax import eager, flash_attention
from fastmax.testing import checks, configurations, evaluation, reference
from fastmax.testing.configurations import LAYOUTS
from fastmax.testing.evaluation import matmul_precision
from fastmax.testing.poison import poison_free_memory
from fastmax.testing.tensors import random_tensors

SMALL = Case("small", n=30, m=35, b=2, h=4, hk=2, d=8, dv=6)
TILES = Case("a tile and more", n=ROWS + 13, m=COLS + 20, b=2, h=2, hk=1, d=8, dv=6)
SQUARE = Case("square", n=40, b=2, h=3, d=8)
TINY = Case("tiny", n=3, m=4, b=1, h=2, hk=1, d=3, dv=2)

with_lse = partial(flash_attention, return_lse=True)


def visible_pairs(q, k, causal, attention_mask):
    """Returns (b, h, n, m), True if query i sees key j."""
    visible = reference.visible_pairs(q, k, causal=causal, attention_mask=attention_mask)
    return visible.expand(*q.shape[:3], k.shape[2])


by_padding = pytest.mark.parametrize("padding", [False, True], ids=["no mask", "mask"])


def softmax_definition(q, k, v, *, causal=False, scale=None, attention_mask=None, hold_denominator=False):
    """Returns output and log-sum-exp of 4-d or 3-d tensors by the definition, in the dtype of q."""
    if q.dim() == 3:
        batch = 1 if attention_mask is None else attention_mask.shape[0]
        q, k, v = (x.unflatten(0, (batch, -1)) for x in (q, k, v))
        options = {"causal": causal, "scale": scale, "attention_mask": attention_mask, "hold_denominator": hold_denominator}
        return tuple(x.flatten(0, 1) for x in softmax_definition(q, k, v, **options))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    visible = visible_pairs(q, k, causal, attention_mask)
    seen = visible.any(-1, keepdim=True)
    s = (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale) * (q @ k.mT)
    s = torch.where(visible, s, -torch.inf)
    largest = torch.where(seen, s.detach().amax(-1, keepdim=True), 0.0)
    w = torch.exp(s - largest)
    z = torch.where(seen, w.sum(-1, keepdim=True), 1.0)
    lse = torch.where(seen, largest + z.log(), -torch.inf).squeeze(-1)
    return (w @ v) / (z.detach() if hold_denominator else z), lse if q.dtype == torch.float64 else lse.float()


class ExpectedFlash(Expected):
    """Expected results of softmax attention, the gradient of the log-sum-exp among them."""

    definition = staticmethod(softmax_definition)

    def check(self, *, custom):
        return self.hold(partial(with_lse, use_custom_gradient=custom))


def make(case, dtype=torch.float32, device=CPU, layout="contiguous", padding=False, **q_and_k):
    """Returns inputs, gradients of both outputs, and options with a mask: some keys, and for the last sequence its first
    third."""
    inputs, grad_o = make_inputs(case, dtype, device, layout, **q_and_k)
    grad_lse = torch.randn(case.b, case.h, case.n).to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    options = {}
    if padding:
        mask = torch.rand(case.b, case.m) > 0.3
        mask[-1, : case.m // 3] = False  # causal: the first queries see no key
        if case.b > 1:
            mask[0] = False
        options["attention_mask"] = mask.to(device)
    return inputs, (grad_o, grad_lse), options


@lru_cache(maxsize=1)  # the parametrisation below runs through both gradients first
def expected(case, dtype, device, causal, padding=False, scale=None):
    inputs, grads, options = make(case, dtype, device, padding=padding)
    return ExpectedFlash(inputs, grads, causal=causal, scale=scale, **options)


def check(inputs, grads, *, custom, **options):
    return ExpectedFlash(inputs, grads, **options).check(custom=custom)


def spread(size):
    """Returns normal rows. With scale = 1 their scores are about size^2 sqrt(d)."""

    def normal(*shape, dtype, device):
        return size * torch.randn(shape, dtype=torch.float64).to(device, dtype)

    return normal


# ---- output, log-sum-exp and gradients


def test_definition_equals_pytorch():
    inputs, _, options = make(SMALL, torch.float64, padding=True)
    inputs |= {name: inputs[name].repeat_interleave(2, dim=1) for name in "kv"}
    visible = visible_pairs(inputs["q"], inputs["k"], True, options["attention_mask"])
    seen = visible.any(-1)
    assert 0 < seen.sum() < seen.numel()
    o, lse = softmax_definition(**inputs, causal=True, scale=0.7, **options)
    plain = scaled_dot_product_attention(**dict(zip(("query", "key", "value"), inputs.values(), strict=True)),
                                         attn_mask=visible, scale=0.7)  # fmt: skip
    torch.testing.assert_close(o[seen], plain[seen])
    s = 0.7 * torch.einsum("bhid,bhjd->bhij", inputs["q"], inputs["k"])
    torch.testing.assert_close(lse, s.masked_fill(~visible, -torch.inf).logsumexp(-1))


@by_gradient
@by_size
def test_sizes(case, causal, custom, device):
    expected(case, torch.float32, device, causal).check(custom=custom)


@in_turn("custom")
@by_gradient
@by_causal
@by_padding
@by_dtype
def test_dtypes(dtype, padding, causal, custom, device):
    expected(TILES, dtype, device, causal, padding).check(custom=custom)


@in_turn("custom")
@by_gradient
@by_causal
@pytest.mark.parametrize("scale", [1.0, 0.1, 7, 1e-6])
def test_scale(scale, causal, custom, device):
    expected(SMALL, torch.float32, device, causal, True, scale).check(custom=custom)


@in_turn("custom")
@by_layout
@by_causal
@by_gradient
def test_strides(layout, causal, custom, device):
    inputs, grads, _ = make(SQUARE, device=device, layout=layout)
    check(inputs, grads, custom=custom, causal=causal)


@in_turn("custom")
@by_gradient
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("case", [SMALL, SQUARE, TILES], ids=lambda case: case.name)
@by_causal
def test_against_pytorch(causal, case, dtype, custom, device):
    """Results and gradients equal those of scaled_dot_product_attention."""
    inputs, (grad_o, _), _ = make(case, dtype, device)
    visible = visible_pairs(inputs["q"], inputs["k"], causal, None)

    def plain(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)

    theirs = run(plain, inputs, grad_o)
    ours = run(flash_attention, inputs, grad_o, causal=causal, use_custom_gradient=custom)
    for name, x in theirs.items():
        assert relative(ours[name], x.double()) <= (1e-2 if dtype == torch.bfloat16 else 2e-6), name


@in_turn("custom")
@by_gradient
@by_causal
@by_dtype
def test_large_scores(dtype, causal, custom, device):
    """Entries of magnitude 50 give scores of thousands and weights of 0 and 1. There is neither overflow nor NaN."""
    inputs, grads, options = make(TILES, dtype, device, padding=True, q_and_k=spread(50.0))
    exact = ExpectedFlash(inputs, grads, causal=causal, scale=1.0, **options).exact
    actual = run(partial(with_lse, use_custom_gradient=custom), inputs, grads, causal=causal, scale=1.0, **options)
    assert exact["lse"].max() > 3000.0 and exact["lse"].min() == -torch.inf
    for name, x in exact.items():
        assert not actual[name].isnan().any()
        infinite = x.isinf()
        assert torch.equal(actual[name].isinf(), infinite), name
        # fp32 scores of 4000 are right to 2^-12: so are the weights, and the gradients that are their differences.
        assert relative(actual[name][~infinite], x[~infinite]) <= (1e-12 if dtype == torch.float64 else 1e-2), name


@in_turn("custom")
@by_gradient
@pytest.mark.parametrize("direction", [1.0, -1.0], ids=["rising", "falling"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_id)
def test_the_maximum_moves_from_tile_to_tile(dtype, direction, custom, device):
    """If scores rise, each tile rescales the earlier sums; if they fall, later tiles add less and less."""
    case = Case("", n=5, m=4 * COLS + 7, h=1, d=4, dv=3)
    inputs, grads, _ = make(case, dtype, device)
    inputs["q"][..., 0] = 1.0
    inputs["k"][..., 0] = direction * torch.linspace(-10.0, 10.0, case.m).to(device, dtype)
    check(inputs, grads, custom=custom, scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_log_sum_exp_is_not_rounded_to_half_precision(dtype, device):
    inputs, _, options = make(TILES, dtype, device, padding=True)
    _, lse = flash_attention(**inputs, return_lse=True, causal=True, **options)
    _, exact = softmax_definition(**{name: x.double() for name, x in inputs.items()}, causal=True, **options)
    seen = exact.isfinite()
    assert lse.dtype == torch.float32 and torch.equal(lse.isfinite(), seen)
    assert relative(lse[seen], exact[seen]) <= 1e-5


@by_gradient
def test_attention_to_parts_of_the_keys_joins_by_the_log_sum_exp(custom, device):
    """Sequence-parallel attention needs this, through both outputs and their gradients."""
    inputs, (grad_o, _), _ = make(SMALL, torch.float64, device)
    attention = partial(with_lse, use_custom_gradient=custom)

    def joined(q, k, v):
        parts = [attention(q, k[:, :, rows], v[:, :, rows]) for rows in (slice(0, 12), slice(12, None))]
        lse = torch.stack([lse for _, lse in parts])
        return sum(x * o for x, (o, _) in zip(lse.softmax(0).unsqueeze(-1), parts, strict=True))

    actual, whole = run(joined, inputs, grad_o), run(flash_attention, inputs, grad_o, use_custom_gradient=custom)
    for name, x in whole.items():
        torch.testing.assert_close(actual[name], x)


# ---- shapes


@in_turn("custom")
@by_gradient
@by_causal
@by_padding
def test_three_dimensions(padding, causal, custom, device):
    inputs, grads, options = make(SMALL, device=device, padding=padding)
    flat = {name: x.flatten(0, 1) for name, x in inputs.items()}
    out = check(flat, tuple(x.flatten(0, 1) for x in grads), custom=custom, causal=causal, **options)
    assert out["o"].shape == (SMALL.b * SMALL.h, SMALL.n, SMALL.dv) and out["lse"].shape == (SMALL.b * SMALL.h, SMALL.n)
    whole = with_lse(**inputs, causal=causal, use_custom_gradient=custom, **options)
    torch.testing.assert_close((out["o"], out["lse"]), tuple(x.flatten(0, 1) for x in whole))


@in_turn("custom")
@by_gradient
@by_dtype
@pytest.mark.parametrize("layout", ["contiguous", "packed qkv", "token-major"])
def test_outputs(layout, dtype, custom, device):
    """o lies in memory as q does; lse is contiguous and wide; without `return_lse` there is only o."""
    inputs, grads, _ = make(SQUARE, dtype, device, layout)
    out = run(partial(with_lse, use_custom_gradient=custom), inputs, grads)
    o, lse = out["o"], out["lse"]
    assert o.shape == (SQUARE.b, SQUARE.h, SQUARE.n, SQUARE.dv) and lse.shape == o.shape[:3]
    assert o.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (o if layout == "contiguous" else o.transpose(1, 2)).is_contiguous() and lse.is_contiguous()
    for name in "qkv":
        assert out[f"grad {name}"].shape == inputs[name].shape and out[f"grad {name}"].dtype == dtype
    alone = flash_attention(**inputs, use_custom_gradient=custom)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, o)


@in_turn("custom")
@by_gradient
@by_causal
@pytest.mark.parametrize(
    "shape", [{"b": 0}, {"h": 0}, {"n": 0}, {"n": 0, "m": 0}], ids=["no batch", "no heads", "no queries", "no tokens"]
)
def test_empty(shape, causal, custom, device):
    b, h, n, m = (shape.get(name, size) for name, size in (("b", 2), ("h", 4), ("n", 5), ("m", 5)))
    inputs = {name: torch.randn(b, heads, tokens, 8, device=device) for name, heads, tokens in
              (("q", h, n), ("k", h // 2, m), ("v", h // 2, m))}  # fmt: skip
    grads = torch.randn(b, h, n, 8, device=device), torch.randn(b, h, n, device=device)
    out = run(partial(with_lse, use_custom_gradient=custom), inputs, grads, causal=causal)
    assert out["o"].shape == (b, h, n, 8) and out["lse"].shape == (b, h, n)
    for name, x in inputs.items():
        assert torch.equal(out[f"grad {name}"], torch.zeros_like(x))


@by_gradient
def test_no_keys(custom, device):
    inputs = {"q": torch.randn(2, 4, 5, 8, device=device)} | {name: torch.randn(2, 2, 0, 8, device=device) for name in "kv"}
    grads = torch.randn(2, 4, 5, 8, device=device), torch.randn(2, 4, 5, device=device)
    out = run(partial(with_lse, use_custom_gradient=custom), inputs, grads)
    assert torch.equal(out["o"], torch.zeros_like(grads[0]))
    assert torch.equal(out["lse"], torch.full_like(grads[1], -torch.inf))
    assert torch.equal(out["grad q"], torch.zeros_like(inputs["q"]))


@by_gradient
@by_layout
def test_inputs_are_never_written(layout, custom, device):
    inputs, grads, options = make(SQUARE, device=device, layout=layout, padding=True)
    tensors = [*inputs.values(), *grads, options["attention_mask"]]
    before, versions = [x.clone() for x in tensors], [x._version for x in tensors]
    run(partial(with_lse, use_custom_gradient=custom), inputs, grads, causal=True, **options)
    assert [x._version for x in tensors] == versions
    for x, y in zip(tensors, before, strict=True):
        assert torch.equal(x, y)


# ---- key padding mask


@by_gradient
@by_causal
def test_hidden_keys_leave_no_trace(causal, custom, device):
    """Huge keys and values in the padding change no result."""
    inputs, grads, options = make(TILES, device=device, padding=True)
    attention = partial(with_lse, use_custom_gradient=custom, causal=causal, **options)
    before = run(attention, inputs, grads)
    hidden = ~options["attention_mask"][:, None, :, None]
    for name in "kv":
        inputs[name].masked_fill_(hidden, 1e6)  # in place: equal bits need equal addresses
    after = run(attention, inputs, grads)
    for name, x in before.items():
        assert torch.equal(x, after[name]), name


@by_gradient
@by_causal
def test_queries_without_keys(causal, custom, device):
    """They have output 0, lse -inf and gradient 0, whatever the gradient of their lse is. There is no NaN, and other rows do
    not change."""
    inputs, (grad_o, grad_lse), options = make(TILES, device=device, padding=True)
    visible = visible_pairs(inputs["q"], inputs["k"], causal, options["attention_mask"]).any(-1)
    assert not visible[0].any() and visible[1].any() and visible[1].all() != causal
    attention = partial(with_lse, use_custom_gradient=custom, causal=causal, **options)
    out = run(attention, inputs, (grad_o, grad_lse))
    assert torch.equal(out["o"] == 0.0, ~visible.unsqueeze(-1).expand_as(out["o"]))
    assert torch.equal(out["lse"] == -torch.inf, ~visible)
    assert torch.equal((out["grad q"] == 0.0).all(-1), ~visible)
    for name in "kv":
        assert torch.equal(out[f"grad {name}"][0], torch.zeros_like(inputs[name][0]))
    for other in (0.0, torch.nan, torch.inf) if custom else (0.0,):
        again = run(attention, inputs, (grad_o, grad_lse.masked_fill(~visible, other)))
        for name, x in out.items():
            assert torch.equal(again[name], x), f"{name}, {other}"


# ---- derivatives


def tiny_leaves(device):
    return tuple(x.requires_grad_() for x in make(TINY, torch.float64, device)[0].values())


def finite_lse(*leaves, **options):
    """Returns outputs for finite differences, without the -inf of queries that see no key."""
    o, lse = with_lse(*leaves, **options)
    return o, torch.where(lse.isinf(), 0.0, lse)


@in_turn("custom")
@by_gradient
@by_causal
@by_padding
def test_gradcheck(padding, causal, custom, device):
    mask = torch.tensor([[False, False, True, True]], device=device) if padding else None
    assert gradcheck(
        partial(finite_lse, causal=causal, scale=0.8, attention_mask=mask, use_custom_gradient=custom), tiny_leaves(device)
    )


@by_gradient
def test_gradcheck_across_tiles(custom, device):
    inputs, _, options = make(Case("", n=ROWS + 3, h=1, d=2, dv=1), torch.float64, device, padding=True)
    leaves = tuple(x.requires_grad_() for x in inputs.values())
    assert gradcheck(partial(finite_lse, causal=True, use_custom_gradient=custom, **options), leaves, fast_mode=True)


def test_second_and_forward_derivatives_by_autograd(device):
    attention = partial(finite_lse, causal=True, use_custom_gradient=False)
    assert gradgradcheck(attention, tiny_leaves(device))
    assert gradcheck(attention, tiny_leaves(device), check_forward_ad=True, fast_mode=True)
    q, k, v = (x.detach() for x in tiny_leaves(device))

    def loss(q):
        o, lse = attention(q, k, v)
        return o.square().sum() + lse.square().sum()

    torch.testing.assert_close(torch.func.grad(loss)(q), torch.autograd.functional.jacobian(loss, q))
    torch.testing.assert_close(torch.func.hessian(loss)(q), torch.autograd.functional.hessian(loss, q))


def test_second_and_forward_derivatives_of_the_custom_gradient_are_refused(device):
    leaves = tiny_leaves(device)
    first = torch.autograd.grad(flash_attention(*leaves).square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivative.*use_custom_gradient=False"):
        torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
    q, k, v = (x.detach() for x in leaves)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"forward-mode.*use_custom_gradient=False"):
        flash_attention(q, forward_ad.make_dual(k, torch.ones_like(k)), v)


@by_gradient
@pytest.mark.parametrize("names", ["q", "k", "v", "qk", "kv"])
def test_only_some_inputs_need_a_gradient(names, custom, device):
    inputs, grads, _ = make(TINY, torch.float64, device)
    attention = partial(with_lse, causal=True, use_custom_gradient=custom)
    everything = run(attention, inputs, grads)
    leaves = {name: x.requires_grad_() if name in names else x for name, x in inputs.items()}
    o, lse = attention(**leaves)
    if names == "v":
        o.backward(grads[0])
    else:
        torch.autograd.backward((o, lse), grads)
    assert_gradients_of(names, leaves, everything)


@by_gradient
@pytest.mark.parametrize("name", ["o", "lse"])
def test_a_gradient_of_one_output_alone(name, custom, device):
    inputs, grads, _ = make(SMALL, torch.float64, device)
    index = ("o", "lse").index(name)
    used = [g if i == index else torch.zeros_like(g) for i, g in enumerate(grads)]
    attention = partial(with_lse, causal=True, use_custom_gradient=custom)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    output = attention(**leaves)[index]
    actual = torch.autograd.grad(output, list(leaves.values()), grads[index], materialize_grads=True)
    for x, key in zip(actual, "qkv", strict=True):
        torch.testing.assert_close(x, run(attention, inputs, tuple(used))[f"grad {key}"])


# ---- inside PyTorch


def operator_arguments(case, device, dtype=torch.float32, layout="contiguous", *, padding=False, causal=False, leaves=True):
    """Returns the arguments of torch.ops.fastmax.flash_forward, and the gradients of its outputs."""
    inputs, grads, options = make(case, dtype, device, layout, padding)
    tensors = [x.detach().requires_grad_(leaves) for x in inputs.values()]
    return (*tensors, options.get("attention_mask"), *[None] * 4, 0.5, causal, -1, -1, False), grads


OPERATOR_CALLS = {
    "mask, causal": (SMALL, {"padding": True, "causal": True}),
    "token-major": (SQUARE, {"layout": "token-major"}),
    "bfloat16": (SMALL, {"dtype": torch.bfloat16}),
    "empty": (Case("", n=0, b=2), {}),
}


@pytest.mark.parametrize("call", OPERATOR_CALLS)
def test_opcheck(call, device):
    case, options = OPERATOR_CALLS[call]
    arguments, _ = operator_arguments(case, device, **options)
    traced = call == "mask, causal"
    check_operator(torch.ops.fastmax.flash_forward.default, arguments, traced)
    arguments, (grad_o, grad_lse) = operator_arguments(case, device, **options, leaves=False)
    o, lse = torch.ops.fastmax.flash_forward(*arguments)
    second = None if call == "bfloat16" else grad_lse
    arguments = grad_o, second, *arguments[:3], o, lse, *arguments[3:]
    for backward in (torch.ops.fastmax.flash_backward, torch.ops.fastmax.flash_backward_qkv):
        check_operator(backward.default, arguments, traced)


@by_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_fake_tensors_have_the_real_layout(layout, dtype, device):
    arguments, grads = operator_arguments(SQUARE, device, dtype, layout, leaves=False)

    def both(q, k, v, grad_o, grad_lse):
        o, lse = torch.ops.fastmax.flash_forward(q, k, v, *arguments[3:])
        return o, lse, *torch.ops.fastmax.flash_backward(grad_o, grad_lse, q, k, v, o, lse, *arguments[3:])

    real = both(*arguments[:3], *grads)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = both(*(mode.from_tensor(x) for x in (*arguments[:3], *grads)))
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)


@pytest.mark.parametrize("causal, padding", [(True, False), (False, True)])
def test_compile(causal, padding, device, fresh_dynamo):
    inputs, grads, options = make(SMALL, device=device, padding=padding)
    compiled = torch.compile(with_lse, fullgraph=True, backend="aot_eager")
    compare(run(compiled, inputs, grads, causal=causal, **options), run(with_lse, inputs, grads, causal=causal, **options))


def test_compile_dynamic_is_one_graph_for_all_lengths(device, fresh_dynamo):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(with_lse, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for n in (12, 37, ROWS + COLS + 5):
        inputs, grads, _ = make(Case("", n=n, d=4), device=device)
        compare(run(compiled, inputs, grads, causal=True), run(with_lse, inputs, grads, causal=True))
        graphs.append(counter.frame_count)
    assert graphs[-1] == graphs[0] > 0  # the first call may trace twice, to find out that the options are constants


class Block(nn.Module):
    """A projection before the attention, as in a model; the log-sum-exp is used too."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        o, lse = flash_attention(q, k, v, causal=True, return_lse=True)
        return o.transpose(1, 2).flatten(2), lse


@torch_warns
def test_compile_inductor(device, fresh_dynamo):
    block = Block().to(device)
    x = torch.randn(2, 20, 16, device=device)
    results = []
    for module in (block, torch.compile(block, fullgraph=True)):
        block.zero_grad()
        o, lse = module(x)
        (o.square().sum() + lse.sum()).backward()
        results.append([o, lse, *(p.grad.clone() for p in block.parameters())])
    torch.testing.assert_close(results[1], results[0])


def test_export_with_dynamic_length(device):
    check_export(Block().to(device).eval(), device)


@by_gradient
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_autocast(dtype, custom, device):
    """The call runs in autocast's dtype, lse is float32, and gradients have the dtypes of the leaves."""
    inputs, (grad_o, grad_lse), _ = make(SMALL, device=device)
    grads = grad_o.to(dtype), grad_lse
    attention = partial(with_lse, causal=True, use_custom_gradient=custom)
    cast = run(attention, {name: x.to(dtype) for name, x in inputs.items()}, grads)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    with torch.autocast(device.type, dtype):
        o, lse = attention(**leaves)
        wide = attention(*(x.double() for x in inputs.values()))[0]
    assert o.dtype == dtype and torch.equal(o, cast["o"]) and lse.dtype == torch.float32 and torch.equal(lse, cast["lse"])
    assert wide.dtype == torch.float64
    torch.autograd.backward((o, lse), grads)
    for name, x in leaves.items():
        assert torch.equal(x.grad, cast[f"grad {name}"].float())


@by_causal
def test_autocast_around_the_backward(causal, device):
    """The backward may run inside autocast too."""
    inputs, grads, options = make(TILES, torch.bfloat16, device, padding=True)
    expected = run(with_lse, inputs, grads, causal=causal, **options)
    with torch.autocast(device.type, torch.bfloat16):
        actual = run(with_lse, inputs, grads, causal=causal, **options)
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name


@by_gradient
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpointing(reentrant, custom, device):
    inputs, grads, _ = make(SMALL, device=device)
    attention = partial(with_lse, causal=True, use_custom_gradient=custom)
    plain = run(attention, inputs, grads)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    o, lse = checkpoint(attention, *leaves.values(), use_reentrant=reentrant)
    torch.autograd.backward((o, lse), grads)  # the reentrant form refuses autograd.grad
    assert torch.equal(o, plain["o"]) and torch.equal(lse, plain["lse"])
    for name, x in leaves.items():
        assert torch.equal(x.grad, plain[f"grad {name}"])


@by_gradient
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_bitwise_repeatable(dtype, custom, device, several_threads):
    inputs, grads, options = make(Case("", n=ROWS + 13, b=2, h=4, hk=2), dtype, device, padding=True)
    attention = partial(with_lse, causal=True, use_custom_gradient=custom, **options)
    first = run(attention, inputs, grads)
    for _ in range(3):
        for name, x in run(attention, inputs, grads).items():
            assert torch.equal(x, first[name]), name


def test_training_and_inference_agree(device):
    inputs, _, options = make(SMALL, device=device, padding=True)
    with torch.no_grad():
        quiet = with_lse(**inputs, **options)
    with torch.inference_mode():
        inference = with_lse(**inputs, **options)
    recorded = with_lse(**{name: x.requires_grad_() for name, x in inputs.items()}, **options)
    for x, y, z in zip(quiet, inference, recorded, strict=True):
        assert torch.equal(x, z) and torch.equal(y, z)


@by_causal
def test_saved_for_backward(causal, device):
    """The backward saves q, k, v, o, lse and the mask, and nothing else."""
    inputs, _, options = make(SMALL, device=device, padding=True)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o, lse = with_lse(**inputs, causal=causal, **options)
    known = {x.untyped_storage().data_ptr() for x in (*inputs.values(), o, lse, *options.values())}
    assert len(known) == 6 and {x.untyped_storage().data_ptr() for x in saved} == known


def footprint(n, d, custom):
    inputs, grads, _ = make(Case("", n=n, h=1, d=d))
    with Memory() as memory:
        run(partial(with_lse, use_custom_gradient=custom), inputs, grads, causal=True)
    return memory


@by_gradient
def test_memory_is_linear_in_tokens(custom):
    """No (n, m) tensor: doubling n adds O(n d) and the largest tensor stays small."""
    n, d = 4096, 64
    half, whole = (footprint(size, d, custom) for size in (n // 2, n))
    assert whole.largest < n * d * d / 2 and whole.largest < n * n / 2
    assert whole.peak - half.peak < 4 * 40 * (n // 2) * d  # as fastmax_attention: q, k, v, o, gradients, working copies


# ---- errors

PARAMETERS = {"q", "k", "v", "causal", "attention_mask"}
BAD_CALLS = {name: bad for name, bad in BAD.items() if set(bad[0]) <= PARAMETERS} | {
    f"scale {value}": ({"scale": value}, error, ["scale must", str(value)])
    for value, error in ((0.0, ValueError), (-1.0, ValueError), (torch.inf, ValueError), (torch.nan, ValueError),
                         (True, TypeError), ("1", TypeError), ([0.5], TypeError))
}  # fmt: skip


@by_gradient
@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input(name, custom):
    changes, *refusal = BAD_CALLS[name]
    assert_refused(partial(flash_attention, use_custom_gradient=custom), good() | changes, *refusal)


def test_bad_input_has_the_rules_of_fastmax_attention():
    assert len(BAD_CALLS) > 30 and {"heads do not divide", "causal is a tensor", "q of rank 2"} <= BAD_CALLS.keys()


# ---- the kernels

needs_kernels = pytest.mark.skipif(WHY_NOT is not None, reason=f"the CUDA kernels do not run: {WHY_NOT}")


def size(name, n, m=None, d=64, dv=None, *, h=2, hk=None, b=2, causal=True, mask=False, layout="contiguous", magnitude=1.0,
         scale=None):  # fmt: skip
    return configurations.Case(
        name, {"causal": causal, "scale": scale}, batch=b, heads=h, kv_heads=hk or h, queries=n, keys=m or n, head_dim=d,
        value_dim=dv or d, padding=mask, layout=layout, magnitude=magnitude, softmax=True,
    )  # fmt: skip


ON_KERNELS = [
    *(size(f"head dim {d}", 200, d=d, causal=causal) for d in HEAD_DIMS for causal in (True, False)),
    *(size(f"head dim {d}, all options", 150, 333, d=d, h=4, hk=2, mask=True, layout="packed") for d in HEAD_DIMS),
    *(size(f"length {n}", n) for n in (1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513, 1025)),
    *(size("n < m", n, m, causal=c) for n, m in ((1, 300), (17, 64), (64, 129), (300, 301)) for c in (True, False)),
    *(size("n > m", n, m, causal=False) for n, m in ((300, 1), (300, 17), (129, 65), (1000, 130))),
    *(size(f"wide heads, head dim {d}", 1000, d=d, h=4, hk=2, mask=True) for d in (128, 200, 256)),
    size("one head", 700, b=1, h=1),
    size("MQA", 130, 190, d=32, h=6, hk=1),
    size("padding mask", 300, mask=True),
    size("padding mask, not causal", 300, 200, mask=True, causal=False),
    size("other scale", 300, scale=1.0),
    size("token-major", 300, h=4, layout="token-major"),
    size("unaligned view", 150, layout="unaligned", mask=True),
    size("ragged head dim", 150, d=40, dv=24),
    size("odd head dim", 150, d=37, dv=51, mask=True),
    size("head dim 1", 150, d=1, dv=1),
    size("dv > d", 150, d=16, dv=128),
    size("dv < d", 150, d=128, dv=16),
    size("head dims 130, 256", 129, d=130, dv=256, mask=True),
    size("head dims 256, 40", 300, 500, d=256, dv=40, h=4),
    size("long", 4096, b=1, h=2, hk=1),
    size("70000 sequences", 5, 7, b=70000, h=1, d=16),
    size("70000 heads", 3, 9, b=1, h=70000, hk=35000, d=16, mask=True),
]


def on_kernels(case, mode, seed=0):
    """Returns the arguments of torch.ops.fastmax.flash_forward, and the gradients of its outputs."""
    tensors = random_tensors(in_mode(case, mode), DEVICE, seed)
    grad_o = torch.randn(*tensors["q"].shape[:3], case.value_dim, device=DEVICE, dtype=tensors["q"].dtype)
    grad_lse = torch.randn(tensors["q"].shape[:3], device=DEVICE)
    scale = case.options["scale"] or case.head_dim**-0.5
    options = tensors.get("attention_mask"), *[None] * 4, scale, case.options["causal"], -1, -1, mode == "tf32"
    return (tensors["q"], tensors["k"], tensors["v"], *options), (grad_o, grad_lse)


def both(arguments, grads):
    """Returns o, lse and the gradients of q, k and v."""
    o, lse = torch.ops.fastmax.flash_forward(*arguments)
    return o, lse, *torch.ops.fastmax.flash_backward(*grads, *arguments[:3], o, lse, *arguments[3:])[:3]


@pytest.mark.cuda
@needs_kernels
class TestKernels:
    def test_the_library_registers_them(self):
        for name in ("flash_forward", "flash_backward", "flash_backward_qkv"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmax_cuda::{name}", "CUDA"), name

    @by_mode
    @pytest.mark.parametrize("case", [pytest.param(case, id=case_id(case)) for case in ON_KERNELS])
    def test_against_float64(self, case, mode):
        """Results on poisoned memory agree with float64, and a repetition has the same bits."""
        assert checks.check(in_mode(case, mode), DEVICE, 1234).wrong == []

    @by_mode
    @pytest.mark.parametrize("d", HEAD_DIMS, ids=lambda d: f"d{d}")
    def test_every_kernel_at_small_sizes(self, d, mode):
        """This test has no reference. It is run under compute-sanitizer."""
        for n, m in ((1, 1), (17, 17), (150, 150), (129, 200)):
            odd = n == 150
            arguments, grads = on_kernels(size("", n, m, d=d - odd, b=1, h=2, hk=1, mask=odd, causal=n != 129), mode)
            assert not any(x.isnan().any() for x in both(arguments, grads))

    @by_mode
    def test_log_sum_exp(self, mode):
        for case in (
            size("", 300, 317, h=4, hk=2, mask=True),
            size("", 700, d=37, dv=16),
            size("", 300, 900, d=128, causal=False),
        ):
            arguments, _ = on_kernels(case, mode)
            _, lse = torch.ops.fastmax.flash_forward(*arguments)
            q, k, v, mask, *_, scale, causal, _, _, _ = widened(arguments)
            _, exact = softmax_definition(q, k, v, attention_mask=mask, scale=scale, causal=causal)
            seen = exact.isfinite()
            assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == exact.shape
            assert torch.equal(lse == -torch.inf, ~seen), "-inf exactly where a query sees no key"
            assert relative(lse[seen], exact[seen]) <= (5e-4 if mode == "tf32" else 3e-6)

    @by_mode
    @pytest.mark.parametrize("magnitude", [7.0, 50.0])
    def test_large_scores(self, magnitude, mode):
        """Entries of magnitude 50 give scores of thousands and weights of 0 and 1. There is neither overflow nor NaN."""
        case = in_mode(size("", 300, mask=True, magnitude=magnitude, scale=1.0), mode)
        arguments, grads = on_kernels(case, mode)
        o, lse, *gradients = both(arguments, grads)
        assert o.isfinite().all() and all(x.isfinite().all() for x in gradients)
        assert (lse.isfinite() | (lse == -torch.inf)).all()
        if mode != "tf32":  # whose scores are right to tens here
            q, k, v, mask, *_, scale, causal, _, _, _ = widened(arguments)
            exact, _ = softmax_definition(q, k, v, attention_mask=mask, scale=scale, causal=causal)
            assert relative(o, exact) <= 1e-2

    @by_mode
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_operands_are_not_written(self, layout, mode):
        arguments, grads = on_kernels(size("", 300, h=4, mask=True, layout=layout), mode)
        o, lse = torch.ops.fastmax.flash_forward(*arguments)
        given = [*grads, o, lse, *(x for x in arguments if isinstance(x, torch.Tensor))]
        before = [x.clone() for x in given]
        torch.ops.fastmax.flash_backward(*grads, *arguments[:3], o, lse, *arguments[3:])
        for x, y in zip(given, before, strict=True):
            assert torch.equal(x, y)

    @by_mode
    def test_gradient_of_lse_is_optional_and_may_have_strides(self, mode):
        arguments, (grad_o, grad_lse) = on_kernels(size("", 150, h=4, mask=True), mode)
        without, zero = (both(arguments, (grad_o, g)) for g in (None, torch.zeros_like(grad_lse)))
        strided = both(arguments, (grad_o, grad_lse.transpose(1, 2).contiguous().transpose(1, 2)))
        expanded = both(arguments, (grad_o, grad_lse[..., :1].expand_as(grad_lse)))
        dense = both(arguments, (grad_o, grad_lse[..., :1].repeat(1, 1, 150)))
        for pair in ((without, zero), (strided, both(arguments, (grad_o, grad_lse))), (expanded, dense)):
            for x, y in zip(*pair, strict=True):
                assert torch.equal(x, y)
        assert not torch.equal(strided[2], zero[2])

    @by_mode
    def test_bitwise_repeatable_on_a_full_device(self, mode):
        arguments, grads = on_kernels(size("", 2000, b=2, h=16, hk=4, mask=True), mode)
        first = both(arguments, grads)
        for _ in range(4):
            poison_free_memory(DEVICE)
            for x, y in zip(first, both(arguments, grads), strict=True):
                assert torch.equal(x, y)

    @pytest.mark.parametrize("d", [64, 37], ids=["aligned", "padded"])
    def test_side_stream(self, d):
        """The operands arrive late on a stream of their own, and the kernels must wait for that stream."""
        arguments, grads = on_kernels(size("", 300, d=d, mask=True), "bf16")
        first = both(arguments, grads)
        actual = on_a_late_stream(arguments[:3], lambda *late: both((*late, *arguments[3:]), grads))
        for x, y in zip(actual, first, strict=True):
            assert torch.equal(x, y)

    @by_mode
    def test_cuda_graph(self, mode):
        """Forward and backward are captured once and replayed on other inputs."""
        case = size("", 700, h=4, hk=2, mask=True)
        static, grads = on_kernels(case, mode, 1)
        graph, captured = capture(lambda: both(static, grads))
        for seed in (2, 3):
            for x, y in zip(static[:4], on_kernels(case, mode, seed)[0][:4], strict=True):
                x.copy_(y)
            assert_replayed(graph, captured, both(static, grads))

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    @by_mode
    def test_second_device(self, mode):
        case = in_mode(size("", 700, d=40, h=4, hk=2, mask=True), mode)
        assert torch.cuda.current_device() == 0
        assert checks.check(case, "cuda:1", 5).wrong == []
        assert torch.cuda.current_device() == 0

    def test_highest_and_high_are_two_arithmetics(self):
        """True fp32 is right to 1e-6, TF32 to 1e-3 and visibly worse than fp32."""
        case = size("", 600, h=4, hk=2)
        tensors = random_tensors(case, DEVICE)
        exact = evaluation.run(softmax_definition, tensors, case.options, torch.float64)
        for precision, least, most in (("highest", 0.0, 4e-6), ("high", 1e-5, 4e-3)):
            with matmul_precision(precision):
                actual = evaluation.run(with_lse, tensors, case.options)
            for name, x in exact.items():
                assert least <= relative(actual[name], x) <= most, (precision, name)

    def test_who_computes(self, monkeypatch):
        """Kernels compute what they cover; PyTorch operations compute float64 and head dims above 256."""
        calls = []

        def counted(right):
            return lambda *args, **options: calls.append(None) or right(*args, **options)

        for name in ("forward", "backward"):
            monkeypatch.setattr(eager, name, counted(getattr(eager, name)))
        for mode in MODES:
            for d in (1, 16, 37, 128, 256):
                both(*on_kernels(size("", 50, d=d, mask=True), mode))
                assert not calls, (mode, d)
        for change in ({"d": 300}, {"dv": 300}, "float64"):
            arguments, grads = on_kernels(
                size("", 70, 90, h=4, hk=2, mask=True, **({} if change == "float64" else change)), "fp32"
            )
            if change == "float64":
                arguments, grads = widened(arguments), widened(grads)
            del calls[:]
            actual = both(arguments, grads)
            assert len(calls) == 2, change
            o, lse = pytorch_implementation("flash_forward")(*arguments)
            gradients = pytorch_implementation("flash_backward")(*grads, *arguments[:3], o, lse, *arguments[3:])
            for x, y in zip(actual, (o, lse, *gradients[:3]), strict=True):
                assert torch.equal(x, y)

    @pytest.mark.parametrize("change, message", UNSAFE.values(), ids=UNSAFE)
    def test_unsafe_operands_are_refused(self, change, message):
        """The operators refuse them, since they may be called without `flash_attention`."""
        x = change(safe_operands())
        with pytest.raises(RuntimeError, match=message):
            torch.ops.fastmax.flash_forward(x["q"], x["k"], x["v"], x["mask"], *[None] * 4, 0.1, x["causal"], -1, -1, False)

    @by_mode
    def test_memory_is_linear_in_tokens(self, mode):
        """Beside q, k, v, o and the gradients at most as many bytes again, fp32 copies of fp16 heads included."""
        peaks = []
        for n in (32768, 65536):
            arguments, grads = on_kernels(size("", n, b=1, h=4), mode)
            both(arguments, grads)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            both(arguments, grads)
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - before + 4 * grads[0].nbytes)
        assert peaks[0] < peaks[1] <= 2.1 * peaks[0] and peaks[1] <= 16 * grads[0].nbytes
