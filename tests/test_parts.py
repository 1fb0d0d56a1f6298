"""Modules in the places of `FastmaxSelfAttention`'s parts are called, or refused by name."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from common import relative
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.testing import assert_close

from fastmax import FastmaxSelfAttention
from fastmax.nn.plain import is_plain
from fastmax.nn.short_convolution import ShortConvolution

C, HEADS = 16, 2
CALLED = ("decay_proj", "input_gate_proj", "q_norm", "k_norm", "output_norm")
CUT = torch.tensor([0, 4, 9], dtype=torch.int32)


def make(dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = FastmaxSelfAttention(C, HEADS, dtype=dtype, **{"exact_window": 3, "input_gate": True} | options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


def rows(dtype=torch.float64):
    return torch.randn(1, 9, C, dtype=dtype, generator=torch.Generator().manual_seed(1))


class Adapted(nn.Module):
    """A module with trained low-rank weights beside its own, as LoRA has them."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(base.in_features, 1, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(1, base.out_features, dtype=torch.float64))

    weight, bias = property(lambda self: self.base.weight), property(lambda self: self.base.bias)

    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b


@pytest.mark.parametrize("parts", [["decay_proj"], ["input_gate_proj"], ["decay_proj", "input_gate_proj"]], ids=" and ".join)
def test_adapters_of_gates(parts):
    layer, x = make(), rows()
    merged = copy.deepcopy(layer)
    for name in parts:
        adapter = Adapted(getattr(layer, name))
        setattr(layer, name, adapter)
        with torch.no_grad():
            getattr(merged, name).weight += (adapter.a @ adapter.b).T
    y = layer(x)
    assert relative(y, merged(x)) < 1e-12
    y.square().sum().backward()
    assert all(getattr(layer, name).a.grad.any() for name in parts)


class Doubled(nn.RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class OfSize(nn.Module):
    """Has an attribute of the name that PyTorch's norms have, of another type."""

    normalized_shape = 8

    def forward(self, x):
        return 3 * x


NORMS = {
    "a class of one's own": (lambda width: OfSize(), lambda x: 3 * x),
    "subclass": (lambda width: Doubled(width, 1e-6), lambda x: 2 * F.rms_norm(x, x.shape[-1:], eps=1e-6)),
    "LayerNorm": (nn.LayerNorm, lambda x: F.layer_norm(x, x.shape[-1:])),
    "none": (lambda width: nn.Identity(), lambda x: x),
}


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("name", ["q_norm", "k_norm", "output_norm"])
def test_norms_of_another_kind(name, kind, rope):
    """Such a norm computes what an RMS norm whose result is replaced by that of the formula does."""
    layer, x = make(rope=rope, value_dim=6), rows()
    kind, formula = NORMS[kind]
    expected = copy.deepcopy(layer)
    hook = getattr(expected, name).register_forward_hook(lambda module, arguments, y: formula(arguments[0]))
    setattr(layer, name, kind(6 if name == "output_norm" else 8).double())
    y = layer(x)
    assert relative(y, expected(x)) < 1e-12
    hook.remove()
    assert not torch.allclose(y, expected(x))


@pytest.mark.parametrize("name", [*CALLED, "conv", "gate_proj"])
def test_hooks_run(name):
    layer, x, seen = make(), rows(), []
    expected = layer(x)
    getattr(layer, name).register_forward_hook(lambda *given: seen.append(given))
    assert relative(layer(x), expected) < 1e-12 and len(seen) == 1


@pytest.mark.parametrize("name", CALLED)
def test_hooks_see_the_gradient(name):
    layer, seen = make(), []
    getattr(layer, name).register_full_backward_hook(lambda *given: seen.append(given))
    layer(rows().requires_grad_()).sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize("name", [*CALLED, "conv"])
def test_pruned_parts_are_trained(name):
    """A pruned weight is computed in a hook, from the parameter `weight_orig`."""
    layer, x = make(), rows()
    part = getattr(layer, name)
    prune.random_unstructured(part, "weight", 0.5)
    before = layer(x)
    with torch.no_grad():
        part.weight_orig.mul_(3.0)
    y = layer(x)
    assert not torch.allclose(y, before)
    y.square().sum().backward()
    assert torch.equal(part.weight_orig.grad == 0, part.weight_mask == 0)


class Negative(nn.Module):
    def forward(self, x):
        return -x


def test_parametrized_parts_are_not_called():
    """Reading a parametrized weight computes it, so kernels may use it."""
    layer, x = make(), rows()
    negative = copy.deepcopy(layer)
    for name in (*CALLED, "conv"):
        part, kind = getattr(layer, name), type(getattr(layer, name))
        parametrize.register_parametrization(part, "weight", Negative())
        assert is_plain(part, kind) and not is_plain(part, nn.Module)
        with torch.no_grad():
            getattr(negative, name).weight.neg_()
    assert relative(layer(x), negative(x)) < 1e-12


SOFTMAX = {"attention": "softmax", "input_gate": False, "exact_window": None}


@pytest.mark.parametrize("options", [{}, SOFTMAX], ids=["fastmax", "softmax"])
def test_called_parts_in_generation(options):
    layer, x = make(**options), rows()
    for name in ("q_norm", "output_norm"):
        setattr(layer, name, nn.LayerNorm(8, dtype=torch.float64))
    layer.decay_proj = Adapted(layer.decay_proj)
    mask = torch.arange(9).unsqueeze(0) > 1
    packed = torch.cat([layer(part) for part in x.split((4, 5), 1)], 1)
    assert relative(layer(x, cu_seqlens=CUT), packed) < 1e-12
    assert relative(layer(x, attention_mask=mask)[:, 2:], layer(x[:, 2:])) < 1e-12
    state, outputs = layer.init_state(1), []
    for piece in x.split((5, 1, 3), 1):
        y, state = layer(piece, state)
        outputs.append(y)
    assert relative(torch.cat(outputs, 1), layer(x)) < 1e-12


def test_called_parts_of_lower_precision():
    """Results keep their dtypes: those of norms that of q and k, and gates float32."""
    layer, x = make(torch.bfloat16), rows(torch.bfloat16)
    expected = layer(x)
    for name in CALLED:
        getattr(layer, name).register_forward_hook(lambda module, arguments, y: y.float())
    y = layer(x)
    assert y.dtype == torch.bfloat16 and relative(y.double(), expected.double()) < 2e-2


def test_called_parts_compile(fresh_dynamo):
    layer, x = make(), rows()
    layer.q_norm, layer.output_norm = Doubled(8, dtype=torch.float64), nn.LayerNorm(8, dtype=torch.float64)
    layer.decay_proj = Adapted(layer.decay_proj)
    layer.k_norm.register_forward_hook(lambda module, arguments, y: -y)
    parametrize.register_parametrization(layer.conv, "weight", Negative())
    assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


class Last(nn.Module):
    """Returns less than it is given."""

    def forward(self, x):
        return x[..., 1:]


@pytest.mark.parametrize(
    "name, module, message",
    [
        (
            "decay_proj",
            nn.Linear(C, HEADS, bias=False),
            r"decay_proj must be an nn.Linear\(16, 2\) .*got nn.Linear\(16, 2, .*False",
        ),
        ("decay_proj", nn.Linear(C, 3), r"decay_proj must be an nn.Linear\(16, 2\) .*got nn.Linear\(16, 3, bias=True"),
        ("input_gate_proj", nn.Linear(8, HEADS), r"input_gate_proj must be an nn.Linear\(16, 2\) .*got nn.Linear\(8, 2, "),
        ("conv", nn.Identity(), "conv must be a ShortConvolution, a wrapper with its attributes or None, got Identity"),
        ("conv", ShortConvolution(C, 4), "conv must have 48 channels, those of q, k and v, got 16"),
        ("q_norm", nn.RMSNorm(C), r"q_norm must normalise heads of 8 channels, got RMSNorm with normalized_shape \(16,\)"),
        ("k_norm", nn.LayerNorm((2, 8)), r"k_norm must normalise heads of 8 channels, got LayerNorm with .* \(2, 8\)"),
        ("output_norm", nn.RMSNorm(1), r"output_norm must normalise heads of 8 channels, got RMSNorm with .* \(1,\)"),
        ("output_norm", nn.GroupNorm(1, 8), "output_norm must normalise each head of a token by itself, got GroupNorm"),
    ],
)
def test_modules_that_do_not_fit_are_refused(name, module, message):
    layer, x = make(), rows()
    before, part = layer(x), getattr(layer, name)
    with pytest.raises((TypeError, ValueError), match=message):
        setattr(layer, name, module)
    assert getattr(layer, name) is part and torch.equal(layer(x), before)


@pytest.mark.parametrize("name", CALLED)
def test_results_that_do_not_fit_are_refused(name):
    layer, shape = make(), (1, 9, HEADS) if name.endswith("proj") else (1, 9, HEADS, 8)
    setattr(layer, name, Last())
    with pytest.raises(ValueError, match=re.escape(f"{name} (Last) must return a tensor of shape {shape}, got a tensor of")):
        layer(rows())


@pytest.mark.parametrize("name, needed", [("decay_proj", "weight and bias"), ("q_norm", "reset_parameters")])
def test_parts_that_cannot_be_initialised(name, needed):
    layer = make()
    setattr(layer, name, nn.Identity())
    before = layer.qkv_proj.weight.clone()
    with pytest.raises(TypeError, match=f"{name} must have {needed} for reset_parameters, got Identity"):
        layer.reset_parameters()
    assert torch.equal(layer.qkv_proj.weight, before)


def test_a_convolution_that_is_called_does_not_continue_packed_sequences():
    """Its call takes one sequence, or sequences from their first tokens on."""
    layer, x = make(), rows()
    state = layer.init_state(2)
    y, _ = layer(x, state, cu_seqlens=CUT)
    layer.qkv_proj.register_forward_hook(lambda *_: pytest.fail("computed before it was refused"))
    layer.conv.register_forward_hook(lambda module, arguments, y: None)
    with pytest.raises(
        ValueError, match="conv must be a ShortConvolution without hooks .*got ShortConvolution with cu_seqlens"
    ):
        layer(x, state, cu_seqlens=CUT)
    layer.qkv_proj._forward_hooks.clear()
    assert relative(layer(x, cu_seqlens=CUT), y) < 1e-12
