"""Arguments of `FastmaxSelfAttention`'s constructor that are set later take effect, or an error names them."""

import copy
import pickle
import re

import pytest
import torch
from torch.utils import _pytree as pytree

import fastmax
from fastmax import FastmaxSelfAttention

C, HEADS = 32, 4
SET = {
    "p": 1,
    "temperature": 5.0,
    "normalize": "token",
    "exact_window": 3,
    "a0": 2.0,
    "a1": 0.5,
    "a2": 0.25,
    "rope_dim": 2,
    "rope_base": 10.0,
}
BAD = {
    "p": (3, r"p must be 1 or 2, got 3"),
    "temperature": (0.0, r"temperature must be > 0"),
    "normalize": ("sequence", r"normalize must be False or .token."),
    "exact_window": (-1, r"exact_window must be at least 0, got -1"),
    "algorithm": ("fast", r"algorithm must be one of"),
    "a0": ("1", r"a0 must be a real number, got '1'"),
    "rope_dim": (3, r"rope_dim must be even"),
    "rope_base": (0.0, r"rope_base must be > 0"),
    "longest_half_life": (-1.0, r"longest_half_life must be > 0"),
    "steady_heads": (HEADS + 1, r"steady_heads must be at most num_kv_heads 4, got 5"),
    "use_custom_gradient": (1, r"use_custom_gradient must be a bool"),
    "window": (3, r"window needs attention=.softmax., got 3"),
    "attention": ("linear", r"attention must be .fastmax. or .softmax., got 'linear'"),
    "conv": (3, r"conv must be a module or None, got 3"),
    "output_norm": (False, r"output_norm must be a module or None, got False"),
    "qk_norm": (False, r"qk_norm .*got False .*q_norm and k_norm"),
    "rope": (False, r"rope .*got False .*rope_dim"),
    "decay": (False, r"decay .*got False .*decay_proj"),
    "input_gate": (True, r"input_gate .*got True .*input_gate_proj"),
    "output_gate": (False, r"output_gate .*got False .*gate_proj"),
    "bias": (True, r"bias .*got True .*qkv_proj"),
    "norm_eps": (1e-3, r"norm_eps .*got 0\.001 .*eps"),
    "embed_dim": (C, r"embed_dim cannot be set, got 32"),
    "num_heads": (2 * HEADS, r"num_heads cannot be set, got 8 .*weights have the shapes for 4; make a new layer"),
    "num_kv_heads": (2, r"num_kv_heads cannot be set, got 2"),
    "head_dim": (4, r"head_dim cannot be set, got 4"),
    "context": (5, r"context must be None or a fastmax\.distributed\.Context, got 5"),
}


def make(**options):
    torch.manual_seed(0)
    options = {"exact_window": 5, "temperature": 2.0, "normalize": False} | options
    layer = FastmaxSelfAttention(C, HEADS, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return layer


def rows():
    return torch.randn(2, 9, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:fastmax. f.s. = .* is not positive:RuntimeWarning")  # p = 1
@pytest.mark.parametrize("name", SET)
def test_what_is_set_holds(name):
    base = {"a0": 20.0} if name == "p" else {}  # a denominator that does not vanish
    layer, x = make(**base), rows()
    before = layer(x)
    setattr(layer, name, SET[name])
    assert getattr(layer, name) == SET[name] and f"{name}={SET[name]!r}" in repr(layer)
    made = make(**base, **{name: SET[name]})
    assert torch.equal(layer(x), made(x)) and not torch.equal(layer(x), before)
    state = layer.init_state(2)
    torch.testing.assert_close(layer(x, state)[0], layer(x))


def test_one_that_is_set_changes_no_other():
    layer = make()
    layer.temperature, layer.a1 = 5.0, 0.5
    assert layer.options == make().options | {"temperature": 5.0, "a1": 0.5}


def test_none_is_the_default_for_the_other_options():
    layer = make()
    layer.temperature = None
    assert layer.temperature == make(temperature=None).temperature == 8**0.5
    layer.p = 1
    layer.temperature = layer.normalize = None
    assert (layer.temperature, layer.normalize) == (1.1, "token")


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_set_is_an_error(name):
    layer, (value, message) = make(), BAD[name]
    before = layer(rows())
    with pytest.raises((AttributeError, TypeError, ValueError), match=message):
        setattr(layer, name, value)
    assert torch.equal(layer(rows()), before)


@pytest.mark.parametrize("name", ["p", "temperature", "normalize", "exact_window", "algorithm", "a0", "a1", "a2"])
def test_options_of_fastmax_in_a_layer_of_softmax(name):
    layer = FastmaxSelfAttention(C, HEADS, attention="softmax")
    with pytest.raises(ValueError, match=f'{name} has no effect with attention="softmax", got 1'):
        setattr(layer, name, 1)
    assert not hasattr(layer, name)


def test_a_layer_of_softmax():
    layer, x = FastmaxSelfAttention(C, HEADS, attention="softmax", dtype=torch.float64), rows()
    before = layer(x)
    layer.window = 2
    assert not torch.equal(layer(x), before)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        layer.window = 0
    with pytest.raises(ValueError, match=r'attention must stay "softmax".*fastmax\.convert\.swap'):
        layer.attention = "fastmax"


@pytest.mark.parametrize("name", ["temperature", "p", "a1", "exact_window", "rope_base", "rope_dim", "num_heads", "context"])
def test_a_parameter_in_the_place_of_an_option(name):
    layer, before = make(), set(dict(make().named_parameters()))
    with pytest.raises((AttributeError, TypeError, ValueError), match=rf"{name} (must|cannot) .*got "):
        setattr(layer, name, torch.nn.Parameter(torch.ones(())))
    assert set(dict(layer.named_parameters())) == before


@pytest.mark.parametrize("value", [False, True, None, -2, 2.0])
def test_rope_dim_is_an_int(value):
    layer = make()
    with pytest.raises((TypeError, ValueError), match=f"rope_dim must be .*got {value}"):
        layer.rope_dim = value
    layer.rope_dim = 0
    assert torch.equal(layer(rows()), make(rope=False)(rows()))


def test_numbers_become_those_of_the_constructor():
    layer = make()
    layer.rope_base, layer.longest_half_life = 100, 16
    assert isinstance(layer.rope_base, float) and "rope_base=100.0" in repr(layer)
    assert isinstance(layer.longest_half_life, float)
    with pytest.raises(ValueError, match="longest_half_life must be at least 4 tokens, got 2"):
        layer.longest_half_life = 2


def test_back_from_softmax_with_a_window():
    layer = make()
    before = layer(rows())
    layer.attention = "softmax"
    layer.window = 3
    with pytest.raises(ValueError, match='window must be None before attention is set to "fastmax", got 3'):
        layer.attention = "fastmax"
    layer.window = None
    layer.attention = "fastmax"
    assert torch.equal(layer(rows()), before)


def test_parts_are_switched_off_by_none():
    layer, x = make(), rows()
    before = layer(x)
    for name in ("conv", "q_norm", "k_norm", "output_norm", "gate_proj", "decay_proj"):
        setattr(layer, name, None)
    assert not torch.equal(layer(x), before)
    layer = make(input_gate=True)
    before = layer(x)
    layer.input_gate_proj = None
    assert not torch.equal(layer(x), before)
    with pytest.raises(TypeError, match="gate_proj must be a module or None, got True"):
        layer.gate_proj = True


def test_an_input_gate_needs_fastmax():
    layer, x = make(input_gate=True), rows()
    gate, before = layer.input_gate_proj, layer(x)
    with pytest.raises(ValueError, match='input_gate_proj must be None before attention is set to "softmax", got Linear'):
        layer.attention = "softmax"
    assert torch.equal(layer(x), before)
    layer.input_gate_proj = None
    layer.attention = "softmax"
    with pytest.raises(ValueError, match='input_gate_proj needs attention="fastmax", got Linear.* with "softmax"'):
        layer.input_gate_proj = gate
    layer.attention = "fastmax"
    layer.input_gate_proj = gate
    assert torch.equal(layer(x), before)


def through_pickle(layer):
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_copies_have_what_was_set(duplicate):
    layer, x = make(), rows()
    layer.temperature, layer.rope_base = 5.0, 10.0
    again = duplicate(layer)
    assert again.temperature == 5.0 and torch.equal(again(x), layer(x))
    again.temperature = 3.0
    assert layer.temperature == 5.0


def test_a_state_of_other_options_is_refused():
    layer, x = make(), rows()
    state = layer.init_state(2)
    layer.exact_window = 3
    with pytest.raises(ValueError, match="state must have this layer's exact_window 3, got 5"):
        layer(x, state)


@pytest.mark.parametrize("options", [{}, {"kept_keys": 2}, {"attention": "softmax", "exact_window": None}], ids=str)
def test_a_state_of_another_rotation_is_refused(options):
    options = {"exact_window": 5} | options
    layer, x = FastmaxSelfAttention(C, HEADS, **{name: x for name, x in options.items() if x is not None}), rows().float()
    with torch.no_grad():
        state = layer(x[:, :3], layer.init_state(2))[1]
    moved = (state, state.clone(), state.select([1, 0]), state.to(torch.float64).to(torch.float32), through_pickle(state))
    leaves, spec = pytree.tree_flatten(state)
    moved += type(state).cat([state.select([0]), state.select([1])]), pytree.tree_unflatten(leaves, spec)
    for again in moved:
        layer(x[:, 3:], again)
    rope_dim, rope_base = layer.rope_dim, layer.rope_base
    for name, value, other in (("rope_base", 50.0, (rope_dim, 50.0)), ("rope_dim", 2, (2, rope_base)), ("rope_dim", 0, None)):
        before = getattr(layer, name)
        setattr(layer, name, value)
        expected = re.escape(f"state must have this layer's (rope_dim, rope_base) {other}, got {(rope_dim, rope_base)}")
        for again in moved:
            with pytest.raises(ValueError, match=expected):
                layer(x[:, 3:], again)
        with pytest.raises(ValueError, match=r"states\[1\] must have the rope_dim and rope_base of states\[0\]"):
            type(state).cat([state, layer.init_state(2)])
        setattr(layer, name, before)
    layer.rope_dim = 0
    state = layer.init_state(2)
    layer.rope_base = 50.0  # nothing is rotated
    layer(x, state)


def test_compiled_code_sees_what_is_set(fresh_dynamo):
    layer, x = make(), rows()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    layer.temperature = 5.0
    torch.testing.assert_close(compiled(x), layer(x))


def test_a_converted_layer_has_the_attributes():
    layer = FastmaxSelfAttention(C, HEADS, attention="softmax")
    fastmax.convert.swap(layer, exact_window=4)
    assert (layer.attention, layer.exact_window, layer.p) == ("fastmax", 4, 2)
    layer.p = 1
    assert layer.options["p"] == 1
