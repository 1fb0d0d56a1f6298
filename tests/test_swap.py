"""swap_attention: the definition of nn.MultiheadAttention with f in place of exp, alone and inside torch's transformer
layers."""

import copy
import io
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastmax.integrations.mha import SwappedMultiheadAttention, swap_attention

E, HEADS = 12, 3
DTYPE = torch.float64


def polynomial_mha(mha, query, key, value, ignored=None, blocked=None, temperature=None, p=2) -> Tensor:
    """Computes nn.MultiheadAttention's formula, dense and batch first, with 1 + s + s^2 / 2 (p = 2) or 1 + s in place of
    exp(s). ignored (b, m) and blocked (n, m) are bool, True = not visible."""
    if mha.in_proj_weight is not None:
        weights = mha.in_proj_weight.chunk(3)
    else:
        weights = (mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight)
    biases = (None,) * 3 if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)
    q, k, v = (F.linear(x, w, c) for x, w, c in zip((query, key, value), weights, biases, strict=True))
    b, n, m = q.shape[0], q.shape[1], k.shape[1]
    hidden = torch.zeros(b, n, m, dtype=torch.bool)
    if ignored is not None:
        hidden = hidden | ignored[:, None, :]
    if blocked is not None:
        hidden = hidden | blocked
    if mha.bias_k is not None:
        k, v = torch.cat((k, mha.bias_k.expand(b, 1, -1)), 1), torch.cat((v, mha.bias_v.expand(b, 1, -1)), 1)
        hidden = F.pad(hidden, (0, 1))
    if mha.add_zero_attn:
        k, v, hidden = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), F.pad(hidden, (0, 1))
    q, k, v = (x.unflatten(-1, (mha.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    s = q @ k.mT / (math.sqrt(mha.head_dim) if temperature is None else temperature)
    w = torch.where(hidden[:, None], 0.0, 1 + s + (s * s / 2 if p == 2 else 0))
    o = w / w.sum(-1, keepdim=True) @ v
    return mha.out_proj(o.transpose(1, 2).flatten(2))


def make_mha(**options) -> nn.MultiheadAttention:
    mha = nn.MultiheadAttention(E, HEADS, dtype=DTYPE, **options)
    with torch.no_grad():
        for parameter in mha.parameters():  # biases start at zero, which would hide their absence
            parameter.copy_(torch.randn_like(parameter) / math.sqrt(E))
    return mha


def swapped(mha: nn.MultiheadAttention, **options) -> SwappedMultiheadAttention:
    model = nn.Sequential(mha)
    swap_attention(model, **options)
    return model[0]


def causal_mask(n: int, m: int | None = None, diagonal: int = 1) -> Tensor:
    return torch.ones(n, n if m is None else m, dtype=torch.bool).triu(diagonal)


def as_float(mask: Tensor, dtype=DTYPE) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -math.inf)


def padding(b: int, m: int) -> Tensor:
    """Returns a mask, True = padding, with a different number of padded keys on the right of each row."""
    return torch.arange(m) >= m - torch.arange(b)[:, None]


# ---- the module alone


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "sequence_first"])
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"kdim": 5, "vdim": 7},
        {"kdim": 5, "vdim": 7, "bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_equals_definition(options, masks, batch_first):
    mha = make_mha(batch_first=batch_first, **options)
    b, n = 3, 6
    query = torch.randn(b, n, E, dtype=DTYPE, requires_grad=True)
    key = torch.randn(b, n, mha.kdim, dtype=DTYPE, requires_grad=True)
    value = torch.randn(b, n, mha.vdim, dtype=DTYPE, requires_grad=True)
    ignored = padding(b, n) if masks in ("padding", "both") else None
    blocked = causal_mask(n) if masks in ("causal", "both") else None

    leaves = (query, key, value, *mha.parameters())
    expected = polynomial_mha(mha, query, key, value, ignored, blocked)
    grad = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, leaves, grad)

    inputs = (query, key, value) if batch_first else tuple(x.transpose(0, 1) for x in (query, key, value))
    o, weights = swapped(mha)(*inputs, key_padding_mask=ignored, attn_mask=blocked)
    o = o if batch_first else o.transpose(0, 1)
    assert weights is None
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.autograd.grad(o, leaves, grad), expected_grads, rtol=1e-9, atol=1e-9)


def test_self_attention_shares_one_projection():
    mha = make_mha(batch_first=True)
    x = torch.randn(2, 5, E, dtype=DTYPE)
    with mock.patch("fastmax.integrations.mha.F.linear", wraps=F.linear) as linear:
        o, _ = swapped(mha)(x, x, x)
    assert linear.call_count == 2  # this one, and out_proj
    torch.testing.assert_close(o, polynomial_mha(mha, x, x, x))


@pytest.mark.parametrize("batch_first", [True, False])
def test_unbatched(batch_first):
    mha = make_mha(batch_first=batch_first)
    query, key = torch.randn(4, E, dtype=DTYPE), torch.randn(6, E, dtype=DTYPE)
    ignored = torch.tensor([False, True, False, False, False, True])
    o, _ = swapped(mha)(query, key, key, key_padding_mask=ignored)
    assert o.shape == (4, E)
    torch.testing.assert_close(o, polynomial_mha(mha, query[None], key[None], key[None], ignored[None])[0])


def test_small_scores_approach_softmax():
    """The default temperature is softmax attention's scale, so f agrees with exp to second order."""
    mha = make_mha(batch_first=True)
    x = 0.05 * torch.randn(2, 8, E, dtype=DTYPE)
    with torch.no_grad():
        mha.in_proj_bias.zero_()
    softmax, _ = mha(x, x, x, need_weights=False)
    second, _ = swapped(mha)(x, x, x)
    other_scale, _ = swapped(mha, temperature=1.0)(x, x, x)
    assert (second - softmax).abs().max() < 1e-6
    assert (other_scale - softmax).abs().max() > 1e-5


@pytest.mark.filterwarnings("ignore:fastmax. f.s. = .* is not positive:RuntimeWarning")  # p = 1
def test_options_reach_the_operator():
    mha = make_mha(batch_first=True)
    x = torch.randn(2, 5, E, dtype=DTYPE)
    o, _ = swapped(mha, p=1, temperature=40.0, use_custom_gradient=False)(x, x, x)
    torch.testing.assert_close(o, polynomial_mha(mha, x, x, x, temperature=40.0, p=1))


REFUSED_DROPOUT = r"no attention weights to drop, got dropout = 0\.5: set .* to 0\.0, or .* the option dropout"


def test_attention_dropout_is_refused_by_a_swap_in_training_mode():
    model = nn.Sequential(make_mha(batch_first=True), make_mha(batch_first=True, dropout=0.5))
    children = list(model)
    with pytest.raises(ValueError, match=f"'1': .*{REFUSED_DROPOUT}"):
        swap_attention(model, temperature=2.0)
    assert list(model) == children
    model[1].dropout = 0.0  # the advice, followed
    swap_attention(model)


def test_attention_dropout_is_refused_when_training_begins():
    mha = make_mha(batch_first=True, dropout=0.5)
    x = torch.randn(2, 5, E, dtype=DTYPE)
    exact = polynomial_mha(mha, x, x, x)
    attention = swapped(mha.eval())
    torch.testing.assert_close(attention(x, x, x)[0], exact)
    with pytest.raises(ValueError, match=f"training mode: .*{REFUSED_DROPOUT}"):
        attention.train()(x, x, x)
    attention.dropout = 0.0
    torch.testing.assert_close(attention(x, x, x)[0], exact)


def test_the_option_dropout_takes_the_place_of_attention_dropout():
    mha = make_mha(batch_first=True, dropout=0.5)
    x = torch.randn(2, 5, E, dtype=DTYPE)
    plain, noisy = swapped(mha, dropout=0.0), swapped(mha, dropout=0.5)
    exact = polynomial_mha(mha, x, x, x)
    torch.testing.assert_close(plain(x, x, x)[0], exact)
    assert (noisy(x, x, x)[0] - exact).abs().max() > 1e-2
    torch.testing.assert_close(noisy.eval()(x, x, x)[0], exact)


def test_pytorch_s_default_dropout():
    """PyTorch's layers have dropout 0.1, also in their attention."""
    with pytest.raises(ValueError, match=r"'self_attn': .*dropout = 0\.1"):
        swap_attention(nn.TransformerEncoderLayer(E, 2))
    layer = nn.TransformerEncoderLayer(E, 2)
    swap_attention(layer, dropout=0.0)
    assert layer(torch.randn(3, 2, E)).shape == (3, 2, E)


def test_options_are_attributes_of_the_attention_inside():
    mha = make_mha(batch_first=True)
    x = torch.randn(2, 5, E, dtype=DTYPE)
    attention = swapped(mha)
    with pytest.raises(AttributeError, match=r"temperature is .* set attention\.temperature = 40\.0"):
        attention.temperature = 40.0
    attention.attention.temperature = 40.0
    torch.testing.assert_close(attention(x, x, x)[0], polynomial_mha(mha, x, x, x, temperature=40.0))


# ---- masks


@pytest.mark.parametrize(
    "form",
    [
        lambda mask, b: mask,
        lambda mask, b: as_float(mask),
        lambda mask, b: as_float(mask, torch.float32),
        lambda mask, b: mask.expand(b * HEADS, -1, -1),
    ],
    ids=["bool", "float", "other float", "per head"],
)
@pytest.mark.parametrize("n, m, diagonal", [(5, 5, 1), (3, 5, 1), (3, 5, 3), (1, 4, 1)], ids=str)
def test_causal_masks_are_recognised(n, m, diagonal, form):
    mha = make_mha(batch_first=True)
    query, key = torch.randn(2, n, E, dtype=DTYPE), torch.randn(2, m, E, dtype=DTYPE)
    blocked = causal_mask(n, m, diagonal)
    ignored = padding(2, m)
    for mask in (None, ignored, as_float(ignored)):
        o, _ = swapped(mha)(query, key, key, attn_mask=form(blocked, 2), key_padding_mask=mask)
        expected = polynomial_mha(mha, query, key, key, None if mask is None else ignored, blocked)
        torch.testing.assert_close(o, expected)


@pytest.mark.parametrize("mask", [torch.zeros(3, 5, dtype=torch.bool), torch.zeros(3, 5)], ids=["bool", "float"])
def test_all_visible_mask_is_no_mask(mask):
    mha = make_mha(batch_first=True)
    query, key = torch.randn(2, 3, E, dtype=DTYPE), torch.randn(2, 5, E, dtype=DTYPE)
    torch.testing.assert_close(swapped(mha)(query, key, key, attn_mask=mask)[0], polynomial_mha(mha, query, key, key))


@pytest.mark.parametrize("n, m", [(5, 5), (3, 5)])
@pytest.mark.parametrize("given", [True, False], ids=["with mask", "hint alone"])
def test_is_causal_is_aligned_at_the_start(n, m, given):
    mha = make_mha(batch_first=True)
    query, key = torch.randn(2, n, E, dtype=DTYPE), torch.randn(2, m, E, dtype=DTYPE)
    blocked = causal_mask(n, m)
    o, _ = swapped(mha)(query, key, key, attn_mask=blocked if given else None, is_causal=True)
    torch.testing.assert_close(o, polynomial_mha(mha, query, key, key, blocked=blocked))


@pytest.mark.parametrize("hint", [True, False], ids=["hint", "no hint"])
def test_the_mask_decides_where_n_differs_from_m(hint):
    """A causal mask aligned at the end counts with or without a hint, which alone would mean alignment at the start."""
    mha = make_mha(batch_first=True)
    query, key = torch.randn(2, 3, E, dtype=DTYPE), torch.randn(2, 5, E, dtype=DTYPE)
    blocked = causal_mask(3, 5, diagonal=3)
    o, _ = swapped(mha)(query, key, key, attn_mask=blocked, is_causal=hint)
    torch.testing.assert_close(o, polynomial_mha(mha, query, key, key, blocked=blocked))


def test_is_causal_spares_reading_the_mask():
    mha = swapped(make_mha(batch_first=True))
    x = torch.randn(2, 5, E, dtype=DTYPE)
    with mock.patch("fastmax.integrations.mha._blocked", side_effect=AssertionError("the mask was read")):
        mha(x, x, x, need_weights=False, attn_mask=causal_mask(5), is_causal=True)
        for given in ({"need_weights": False}, {"is_causal": True}):
            with pytest.raises(AssertionError, match="was read"):
                mha(x, x, x, attn_mask=causal_mask(5), **given)


def test_mask_that_is_causal_contradicts():
    """nn.MultiheadAttention adds such a mask to its scores, unless need_weights is False."""
    mha, bias = swapped(make_mha(batch_first=True)), torch.full((5, 5), 0.5, dtype=DTYPE)
    x = torch.randn(2, 5, E, dtype=DTYPE)
    with pytest.raises(ValueError, match="attn_mask must hold 0 and -inf only"):
        mha(x, x, x, attn_mask=bias, is_causal=True)
    other = causal_mask(5)
    other[3, 0] = True
    for mask in (other, torch.zeros(5, 5, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"attn_mask must be the causal mask.*got shape \(5, 5\) with"):
            mha(x, x, x, attn_mask=mask, is_causal=True)
    compiled = torch.compile(mha, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, x, x, attn_mask=causal_mask(5), is_causal=True)[0], mha(x, x, x, is_causal=True)[0])
    with pytest.raises(RuntimeError, match="attn_mask must be the causal mask"):
        compiled(x, x, x, attn_mask=other, is_causal=True)


@pytest.mark.parametrize("options", [{"exact_window": 2}, {"rpe_matrix": "sinusoidal"}], ids=["exact window", "sinusoidal"])
def test_positions_of_cross_attention(options):
    layer = nn.TransformerDecoderLayer(E, HEADS, 16, dropout=0.0, batch_first=True, dtype=DTYPE).eval()
    swap_attention(layer, **options)
    target, memory = torch.randn(2, 7, E, dtype=DTYPE), torch.randn(2, 5, E, dtype=DTYPE)
    y = layer(target, memory, tgt_is_causal=True)
    torch.testing.assert_close(layer(target, memory.flip(1), tgt_is_causal=True), y)  # memory has no positions
    plain = nn.TransformerDecoderLayer(E, HEADS, 16, dropout=0.0, batch_first=True, dtype=DTYPE).eval()
    swap_attention(plain)
    plain.load_state_dict(layer.state_dict())
    assert not torch.allclose(plain(target, memory, tgt_is_causal=True), y)  # the target has

    mha = swapped(make_mha(batch_first=True), **options)
    (name,) = options
    with pytest.raises(ValueError, match=rf"{name} compares positions within a sequence.*set attention\.{name} = "):
        mha(target, memory, memory)
    if name == "exact_window":
        mha.attention.exact_window = 0
    else:
        mha.attention.rpe_matrix = None
    mha(target, memory, memory)


def test_self_attention_whose_arguments_are_views():
    """Hooks and checkpoints rewrap arguments."""
    mha, x = swapped(make_mha(batch_first=True), exact_window=2), torch.randn(2, 7, E, dtype=DTYPE, requires_grad=True)
    expected, _ = mha(x, x, x)
    torch.testing.assert_close(mha(x, x[:], x)[0], expected)
    torch.testing.assert_close(mha(x[0], x[0], x[0])[0], expected[0])
    torch.testing.assert_close(checkpoint(mha, x, x, x, use_reentrant=True)[0], expected)
    checkpoint(mha, x, x, x, use_reentrant=True)[0].sum().backward()
    mha.register_full_backward_hook(lambda *given: None)
    torch.testing.assert_close(mha(x, x, x)[0], expected)


@pytest.mark.parametrize("causal", [False, True], ids=["all visible", "causal"])
@pytest.mark.filterwarnings("ignore:.*later tokens leak")
def test_padding_does_not_scale_the_queries(causal):
    """Queries at padding would be the longest of their sequence."""
    mha, x = swapped(make_mha(batch_first=True), normalize="sequence", lim=1.5), torch.randn(3, 7, E, dtype=DTYPE)
    ignored = padding(3, 7)
    x[ignored] *= 50
    x.requires_grad_()
    y, _ = mha(x, x, x, key_padding_mask=ignored, is_causal=causal)
    (grad,) = torch.autograd.grad(y[~ignored].square().sum(), x)
    assert not grad[ignored].any()
    for row, keep in enumerate(~ignored):
        one = x[row : row + 1, keep].detach().requires_grad_()
        alone, _ = mha(one, one, one, is_causal=causal)
        torch.testing.assert_close(y[row, keep], alone[0])
        torch.testing.assert_close(grad[row, keep], torch.autograd.grad(alone.square().sum(), one)[0][0])


def test_exact_window_of_causal_attention_with_other_keys():
    mha = swapped(make_mha(batch_first=True), exact_window=5)
    x, key = torch.randn(2, 5, E, dtype=DTYPE), torch.randn(2, 5, E, dtype=DTYPE)
    blocked = causal_mask(5)
    o, _ = mha(x, key, key, attn_mask=blocked)
    q, k, v = (
        F.linear(y, w, c).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for y, w, c in zip((x, key, key), mha.in_proj_weight.chunk(3), mha.in_proj_bias.chunk(3), strict=True)
    )
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # the window has all keys
    torch.testing.assert_close(o, mha.out_proj(expected.transpose(1, 2).flatten(2)))


def test_query_without_keys_gets_the_output_bias():
    mha = make_mha(batch_first=True)
    x = torch.randn(2, 4, E, dtype=DTYPE)
    ignored = torch.tensor([[True] * 4, [False] * 4])
    o, _ = swapped(mha)(x, x, x, key_padding_mask=ignored)
    torch.testing.assert_close(o[0], mha.out_proj.bias.expand(4, E))
    torch.testing.assert_close(o[1:], polynomial_mha(mha, x[1:], x[1:], x[1:]))


def arbitrary_mask():
    mask = causal_mask(4)
    mask[3, 0] = True
    return mask


REFUSED = {
    "arbitrary attn_mask": ({"attn_mask": arbitrary_mask()}, ValueError, "attn_mask is neither all visible nor the causal"),
    "anti-causal": ({"attn_mask": causal_mask(4).mT}, ValueError, "attn_mask is neither"),
    "includes the diagonal": ({"attn_mask": causal_mask(4, diagonal=0)}, ValueError, "attn_mask is neither"),
    "additive bias": ({"attn_mask": torch.full((4, 4), 0.5)}, ValueError, "attn_mask must hold 0 and -inf only"),
    "nan": ({"attn_mask": torch.full((4, 4), math.nan)}, ValueError, "attn_mask must hold 0 and -inf only"),
    "attn_mask dtype": ({"attn_mask": torch.zeros(4, 4, dtype=torch.uint8)}, TypeError, "attn_mask must be bool"),
    "attn_mask shape": ({"attn_mask": causal_mask(3)}, ValueError, r"attn_mask must have shape .*\(4, 4\)"),
    "attn_mask shape, hinted": ({"attn_mask": causal_mask(3), "is_causal": True}, ValueError, "attn_mask must have shape"),
    "float padding": ({"key_padding_mask": torch.full((2, 4), -1e9)}, ValueError, "key_padding_mask must hold 0 and -inf"),
    "padding dtype": ({"key_padding_mask": torch.zeros(2, 4, dtype=torch.long)}, TypeError, "key_padding_mask must be bool"),
    "padding shape": ({"key_padding_mask": padding(2, 3)}, ValueError, r"key_padding_mask must have shape .*\(2, 4\)"),
}


@pytest.mark.parametrize("arguments, error, message", REFUSED.values(), ids=REFUSED)
def test_refused_masks(arguments, error, message):
    mha = swapped(make_mha(batch_first=True))
    x = torch.randn(2, 4, E, dtype=DTYPE)
    with pytest.raises(error, match=message):
        mha(x, x, x, **arguments)


@pytest.mark.parametrize("arguments", [{"is_causal": True}, {"attn_mask": causal_mask(5, 3)}], ids=["hint", "mask"])
def test_causal_with_more_queries_than_keys_is_refused(arguments):
    mha = swapped(make_mha(batch_first=True))
    query, key = torch.randn(2, 5, E, dtype=DTYPE), torch.randn(2, 3, E, dtype=DTYPE)
    with pytest.raises(ValueError, match="got 5 queries and 3 keys"):
        mha(query, key, key, **arguments)


def test_refused_inputs():
    mha = swapped(make_mha(batch_first=True))
    x = torch.randn(2, 4, E, dtype=DTYPE)
    with pytest.raises(ValueError, match=r"all 3-d, or all 2-d .*\(3, 2, 2\)"):
        mha(x, x[0], x[0])
    nested = torch.nested.as_nested_tensor([x[0], x[1, :2]], layout=torch.jagged)
    with pytest.raises(TypeError, match="must not be nested"):
        mha(nested, nested, nested)
    with pytest.raises(TypeError, match=r"key must be a tensor, got None"):
        mha(x, None, x)
    with pytest.raises(TypeError, match=r"value must have the dtype of the weights torch.float64, got torch.float32"):
        mha(x, x, x.float())
    with pytest.raises(ValueError, match=rf"query must have {E} channels, got shape \(2, 4, {E - 1}\)"):
        mha(x[..., 1:], x, x)
    with pytest.raises(ValueError, match=r"key must be on the device of the weights cpu, got meta"):
        mha(x, x.to("meta"), x)
    for name in ("attn_mask", "key_padding_mask"):
        with pytest.raises(TypeError, match=rf"{name} must be a tensor or None, got 'causal' \(str\)"):
            mha(x, x, x, **{name: "causal"})
    with pytest.raises(TypeError, match=r"is_causal must be a bool, got a tensor of shape \(4, 4\)"):
        mha(x, x, x, is_causal=causal_mask(4))
    with pytest.raises(TypeError, match=r"model must be an nn.Module, got \[\] \(list\)"):
        swap_attention([])


# ---- the swap


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = make_mha(batch_first=True)
        self.again = self.first
        self.layers = nn.ModuleList([make_mha(batch_first=True)])
        self.linear = nn.Linear(E, E)

    def forward(self, x):
        return self.again(self.first(x, x, x)[0], x, x)[0] + self.layers[0](x, x, x)[0]


def test_returns_what_it_replaced_and_can_be_undone():
    model = Block().eval()
    originals = {"first": model.first, "again": model.first, "layers.0": model.layers[0]}
    x = torch.randn(2, 5, E, dtype=DTYPE)
    before = model(x)
    replaced = swap_attention(model)
    assert replaced == originals
    assert model.first is model.again
    assert isinstance(model.first, SwappedMultiheadAttention) and isinstance(model.layers[0], SwappedMultiheadAttention)
    assert not model.first.training
    assert not torch.allclose(model(x), before)
    with pytest.raises(ValueError, match=r"model \(Block\) has no nn\.MultiheadAttention left: 2 are already swapped"):
        swap_attention(model)
    for name, original in replaced.items():
        model.set_submodule(name, original)
    assert torch.equal(model(x), before)


def test_parameters_and_state_dict_are_kept():
    model = Block()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = copy.deepcopy(model.state_dict())
    model.first.out_proj.weight.requires_grad_(False)
    swap_attention(model)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(parameters)
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert not model.first.out_proj.weight.requires_grad
    assert list(model.state_dict()) == list(state)

    x = torch.randn(2, 5, E, dtype=DTYPE)
    expected = model(x)
    fresh = Block()
    swap_attention(fresh)
    assert not torch.allclose(fresh(x), expected)
    fresh.load_state_dict(state)
    torch.testing.assert_close(fresh(x), expected)


@pytest.mark.filterwarnings("ignore:fastmax. f.s. = .* is not positive:RuntimeWarning")  # p = 1
def test_deepcopy_and_pickle():
    model = Block()
    swap_attention(model, p=1, temperature=50.0)
    x = torch.randn(2, 5, E, dtype=DTYPE)
    copied = copy.deepcopy(model)
    assert copied.first is copied.again and copied.first.in_proj_weight is not model.first.in_proj_weight
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copied, loaded):
        torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    expected = model(x)
    torch.testing.assert_close(copied(x), expected)
    torch.testing.assert_close(loaded(x), expected)


def test_follows_dtype():
    model = Block()
    swap_attention(model)
    model.to(torch.bfloat16)
    assert model(torch.randn(2, 5, E, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_autocast():
    """bias_k stays in float32 where the projections are bfloat16."""
    model = nn.Sequential(nn.MultiheadAttention(E, HEADS, batch_first=True, add_bias_kv=True, add_zero_attn=True))
    swap_attention(model)
    x = torch.randn(2, 5, E)
    exact = model[0](x, x, x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = model[0](x, x, x)[0]
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.float(), exact, rtol=0.05, atol=0.05)


class OtherAttention(nn.MultiheadAttention):
    def forward(self, query, key, value):
        return query, None


def with_hook():
    mha = make_mha()
    mha.register_forward_hook(lambda module, args, output: None)
    return mha


def with_own_forward():
    mha = make_mha()
    mha.forward = lambda query, key, value: (query, None)
    return mha


def parametrized():
    mha = make_mha()
    nn.utils.parametrizations.spectral_norm(mha, "in_proj_weight")
    return mha


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: OtherAttention(E, HEADS), "is a OtherAttention"),
        (with_hook, "_forward_hooks"),
        (with_own_forward, "forward of its own"),
        (parametrized, "ParametrizedMultiheadAttention"),
    ],
    ids=["subclass", "hook", "instance forward", "parametrized"],
)
def test_what_cannot_be_swapped_is_refused_by_name_and_nothing_changes(make, message):
    model = nn.ModuleDict({"plain": make_mha(), "odd": make()})
    children = dict(model)
    with pytest.raises(TypeError, match=rf"'odd'.*{message}"):
        swap_attention(model)
    assert dict(model) == children


class OwnAttention(nn.Module):
    """Softmax attention of a class that fastmax does not know."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("model", [OwnAttention(), nn.Sequential(nn.Linear(2, 2), OwnAttention()), nn.Sequential()])
def test_a_model_without_attention_is_an_error_not_softmax(model):
    with pytest.raises(ValueError, match=rf"{type(model).__name__}\) holds no torch\.nn\.MultiheadAttention, the only class"):
        swap_attention(model)


def test_model_that_is_itself_an_attention():
    mha = make_mha(batch_first=True)
    with pytest.raises(ValueError, match="cannot be replaced in place"):
        swap_attention(mha)
    x = torch.randn(2, 5, E, dtype=DTYPE)
    torch.testing.assert_close(SwappedMultiheadAttention(mha)(x, x, x)[0], polynomial_mha(mha, x, x, x))


@pytest.mark.parametrize("option", [{"mask": True}, {"causal": True}, {"nonsense": 1}], ids=["mask", "causal", "unknown"])
def test_refused_options_leave_the_model_alone(option):
    model = nn.Sequential(make_mha())
    with pytest.raises(TypeError, match=next(iter(option))):
        swap_attention(model, **option)
    assert type(model[0]) is nn.MultiheadAttention


# ---- torch's transformer layers, whose fast paths do not call their attention


def calls_and_output(model, *args, **kwargs):
    """Returns the number of attention calls, and the output."""
    with mock.patch.object(
        SwappedMultiheadAttention, "forward", autospec=True, side_effect=SwappedMultiheadAttention.forward
    ) as forward:
        o = model(*args, **kwargs)
    return forward.call_count, o


def encoder_layer(**options):
    options = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True, "dtype": DTYPE} | options
    return nn.TransformerEncoderLayer(E, 2, **options)


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "sequence_first"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norm_first", "norm_last"])
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
def test_encoder_layer_in_eval_mode(batch_first, norm_first, masks):
    layer = encoder_layer(batch_first=batch_first, norm_first=norm_first)
    original = copy.deepcopy(layer)
    swap_attention(layer)
    x = torch.randn(2, 6, E, dtype=DTYPE) if batch_first else torch.randn(6, 2, E, dtype=DTYPE)
    kwargs = {}
    if masks in ("padding", "both"):
        kwargs["src_key_padding_mask"] = padding(2, 6)
    if masks in ("causal", "both"):
        kwargs["src_mask"] = causal_mask(6)
    expected = layer.train()(x, **kwargs)
    with torch.no_grad():
        calls, o = calls_and_output(layer.eval(), x, **kwargs)
        softmax = original.eval()(x, **kwargs)
    assert calls == 1
    torch.testing.assert_close(o, expected)
    assert not torch.allclose(o, softmax)


@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
def test_encoder_in_eval_mode(masks):
    """An unswapped encoder in eval mode turns padded input into a nested tensor."""
    encoder = nn.TransformerEncoder(encoder_layer(), num_layers=3)
    swap_attention(encoder)
    x = torch.randn(3, 6, E, dtype=DTYPE)
    ignored = padding(3, 6)
    kwargs = {}
    if masks in ("padding", "both"):
        kwargs["src_key_padding_mask"] = ignored
    if masks in ("causal", "both"):
        kwargs["mask"] = nn.Transformer.generate_square_subsequent_mask(6)
        if masks == "both":
            kwargs["src_key_padding_mask"] = as_float(ignored, torch.float32)  # torch wants one type for both
    expected = encoder.train()(x, **kwargs)
    with torch.no_grad():
        calls, o = calls_and_output(encoder.eval(), x, **kwargs)
    assert calls == 3
    torch.testing.assert_close(o, expected)
    if masks == "padding":  # each sequence as if it were alone
        with torch.no_grad():
            alone = encoder(x[2:, :4])
        torch.testing.assert_close(o[2:, :4], alone)


def test_encoder_built_from_a_swapped_layer():
    layer = encoder_layer()
    swap_attention(layer)
    with pytest.warns(UserWarning, match="use_nested_tensor is False"):
        encoder = nn.TransformerEncoder(layer, num_layers=2)
    x = torch.randn(3, 6, E, dtype=DTYPE)
    expected = encoder(x, src_key_padding_mask=padding(3, 6))
    with torch.no_grad():
        calls, o = calls_and_output(encoder.eval(), x, src_key_padding_mask=padding(3, 6))
    assert calls == 2
    torch.testing.assert_close(o, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_swapping_behind_the_encoder_s_back_is_an_error_not_softmax():
    encoder = nn.TransformerEncoder(encoder_layer(), num_layers=1).eval()
    swap_attention(encoder.layers[0])
    with torch.no_grad(), pytest.raises(TypeError, match="use_nested_tensor"):
        encoder(torch.randn(3, 6, E, dtype=DTYPE), src_key_padding_mask=padding(3, 6))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "sequence_first"])
def test_transformer(batch_first):
    """The model has an encoder, a decoder, cross attention and all masks. Causality and padding are checked by changing
    inputs."""
    options = {"num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 16, "dropout": 0.0, "dtype": DTYPE}
    model = nn.Transformer(E, 2, batch_first=batch_first, **options)
    replaced = swap_attention(model)
    assert len(replaced) == 6

    def run(source, target):
        if not batch_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        calls, o = calls_and_output(
            model,
            source,
            target,
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=DTYPE),
            src_key_padding_mask=ignored,
            memory_key_padding_mask=ignored,
            tgt_is_causal=True,
        )
        assert calls == 6
        return o if batch_first else o.transpose(0, 1)

    source, target = torch.randn(2, 7, E, dtype=DTYPE), torch.randn(2, 5, E, dtype=DTYPE)
    ignored = padding(2, 7)
    expected = run(source, target)
    with torch.no_grad():
        torch.testing.assert_close(model.eval() and run(source, target), expected)
        source[1, 6], target[:, 3:] = 5.0, -5.0
        changed = run(source, target)
    torch.testing.assert_close(changed[:, :3], expected[:, :3])
    assert not torch.allclose(changed[:, 3:], expected[:, 3:])


# ---- torch.compile


@pytest.mark.parametrize("masks", ["padding", "causal"])
def test_compiled_encoder_layer(masks):
    torch.compiler.reset()
    layer = encoder_layer()
    swap_attention(layer)
    x = torch.randn(2, 6, E, dtype=DTYPE)
    kwargs = {
        "padding": {"src_key_padding_mask": padding(2, 6)},  # the layer makes a float mask of it
        "causal": {"src_mask": causal_mask(6), "is_causal": True},
    }[masks]
    expected = layer(x, **kwargs)
    expected_grads = torch.autograd.grad(expected.square().sum(), tuple(layer.parameters()))
    o = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, **kwargs)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(torch.autograd.grad(o.square().sum(), tuple(layer.parameters())), expected_grads)


def test_compiled_float_padding_is_still_checked():
    torch.compiler.reset()
    mha = swapped(make_mha(batch_first=True))
    x = torch.randn(2, 4, E, dtype=DTYPE)
    compiled = torch.compile(mha, fullgraph=True, backend="aot_eager")
    mask = as_float(padding(2, 4))
    torch.testing.assert_close(compiled(x, x, x, key_padding_mask=mask)[0], mha(x, x, x, key_padding_mask=mask)[0])
    with pytest.raises(RuntimeError, match="key_padding_mask must hold 0 and -inf"):
        compiled(x, x, x, key_padding_mask=mask + 0.5)
