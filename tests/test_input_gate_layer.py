"""`input_gate` of `FastmaxSelfAttention`: its gates, its start, its gradient, its states and refusals.

`test_self_attention` and `test_self_attention_state` compare the layer with its definition on every path.
"""

import pytest
import torch
import torch.nn.functional as F
from test_self_attention import GATED, OFF, C, in_pieces, make, tokens
from torch.autograd import gradcheck

from fastmax import FastmaxSelfAttention, fastmax_attention
from fastmax.nn import self_attention
from fastmax.nn.gates import INPUT_GATE_BOUND

N, HEADS = 13, 4
SMALL = {"qk_norm": False, "rope": False, "conv": 0, "output_norm": False, "output_gate": False}
by_window = pytest.mark.parametrize("window", [0, 4])


def passed(monkeypatch) -> list[torch.Tensor]:
    """Returns a list that gets the log_input_gate of each call of attention without a state."""
    gates = []

    def attention(*tensors, log_input_gate, **options):
        gates.append(log_input_gate)
        return fastmax_attention(*tensors, log_input_gate=log_input_gate, **options)

    monkeypatch.setattr(self_attention, "fastmax_attention", attention)
    return gates


# ---- the gates


@by_window
def test_is_the_operator_with_gates_made_by_hand(window):
    layer, x = make(**OFF, exact_window=window, input_gate=True), tokens()
    q, k, v = (rows.unflatten(-1, (HEADS, -1)).transpose(1, 2) for rows in layer.qkv_proj(x).chunk(3, dim=-1))
    weight, bias = layer.input_gate_proj.parameters()
    gate = 8 * torch.tanh((x @ weight.T + bias).mT / 8)
    o = fastmax_attention(
        q, k, v, causal=True, exact_window=window, temperature=layer.temperature, log_input_gate=gate, use_custom_gradient=False
    )
    torch.testing.assert_close(layer(x), layer.out_proj(o.transpose(1, 2).flatten(2)), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "dtype, autocast",
    [(torch.float64, False), (torch.float32, False), (torch.bfloat16, False), (torch.float32, True), (torch.bfloat16, True)],
    ids=str,
)
def test_gates_are_float32_or_float64(dtype, autocast, monkeypatch):
    """Only the product is in a narrow dtype. The bias is added in float32, where bfloat16 would round it."""
    layer, x, gates = make(torch.float32, **GATED), tokens(dtype=dtype), passed(monkeypatch)
    if not autocast:
        layer = layer.to(dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layer.input_gate_proj.bias.copy_(torch.tensor([0.3, 2.0, -5.01, 40.0]))
        layer(x)
        product = F.linear(x, layer.input_gate_proj.weight)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bias = layer.input_gate_proj.bias.to(wide)
    expected = 8 * torch.tanh((product.to(wide) + bias) / 8)
    (gate,) = gates
    assert gate.dtype == wide and gate.abs().max() <= INPUT_GATE_BOUND
    torch.testing.assert_close(gate, expected.mT)


# ---- the start


@by_window
@pytest.mark.parametrize("algorithm", ["quadratic", "linear"])
@torch.no_grad()
def test_gates_of_zero_are_no_gates(window, algorithm):
    """Bit for bit, in whole sequences and in calls in parts."""
    layer, x = FastmaxSelfAttention(C, HEADS, exact_window=window, algorithm=algorithm, input_gate=True), tokens().float()
    y, (pieces, _) = layer(x), in_pieces(layer, x, [3, 1, 1, 8])
    layer.input_gate_proj = None
    assert torch.equal(y, layer(x)) and torch.equal(pieces, in_pieces(layer, x, [3, 1, 1, 8])[0])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_initial_weights_are_those_of_a_layer_without_it(dtype, device):
    layers, after = [], []
    for gate in (False, True):
        torch.manual_seed(0)
        layers.append(FastmaxSelfAttention(C, HEADS, num_kv_heads=2, input_gate=gate, dtype=dtype, device=device))
        after.append(torch.rand(()))
    plain, gated = (layer.state_dict() for layer in layers)
    assert after[0] == after[1] and gated.keys() - plain.keys() == {"input_gate_proj.weight", "input_gate_proj.bias"}
    gate = layers[1].input_gate_proj
    assert type(gate) is torch.nn.Linear and gate.weight.shape == (2, C) and gate.bias.shape == (2,)
    assert {(x.dtype, x.device.type) for x in gated.values()} == {(dtype, device)}
    if device == "cpu":
        assert all(torch.equal(x, gated[name]) for name, x in plain.items())
        assert not gate.weight.any() and not gate.bias.any()
        torch.nn.init.ones_(gate.weight)
        torch.nn.init.ones_(gate.bias)
        layers[1].reset_parameters()
        assert not gate.weight.any() and not gate.bias.any()


def test_weights_of_a_layer_without_it_do_not_fit():
    layer = FastmaxSelfAttention(C, HEADS, input_gate=True)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "input_gate_proj.weight", "input_gate_proj.bias"'):
        layer.load_state_dict(FastmaxSelfAttention(C, HEADS).state_dict())


# ---- gradients


@by_window
@pytest.mark.parametrize("start", [True, False], ids=["at the start", "later"])
def test_gradients_of_its_weights(window, start):
    """They are right and not 0, from the first step of training on."""
    layer = FastmaxSelfAttention(6, 2, exact_window=window, input_gate=True, dtype=torch.float64, **SMALL)
    if not start:
        torch.nn.init.normal_(layer.input_gate_proj.weight)
        torch.nn.init.normal_(layer.input_gate_proj.bias, std=4.0)
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    weights = {f"input_gate_proj.{name}": weight for name, weight in layer.input_gate_proj.named_parameters()}

    def of(weight, bias):
        return 1000 * torch.func.functional_call(layer, dict(zip(weights, (weight, bias), strict=True)), (x,))

    assert gradcheck(of, tuple(weights.values()))
    for gradient in torch.autograd.grad(of(*weights.values()).square().sum(), weights.values()):
        assert gradient.count_nonzero() == gradient.numel()


# ---- states


@pytest.mark.parametrize("window, flush_interval, local", [(4, 1, 4), (4, 3, 7), (0, 3, 3), (0, 1, None)])
@torch.no_grad()
def test_states_have_gates_from_the_start(window, flush_interval, local):
    """So that a graph of steps needs no step before it: a step allocates nothing of the state."""
    layer, x = make(exact_window=window, input_gate=True), tokens()
    state = layer.init_state(2, flush_interval=flush_interval)
    gates, addresses = state.attention.local_gates, {name: y.data_ptr() for name, y in state.tensors().items()}
    assert gates is None if local is None else gates.shape == (2, HEADS, local) and not gates.any()
    y = torch.cat([layer.step_(x[:, i : i + 1], state) for i in range(N)], dim=1)
    torch.testing.assert_close(y, layer(x), rtol=1e-8, atol=1e-9)
    assert {name: y.data_ptr() for name, y in state.tensors().items()} == addresses
    assert local is None or state.attention.local_gates.any()
    plain = make(exact_window=window)
    assert plain.init_state(2, flush_interval=flush_interval).attention.local_gates is None


@torch.no_grad()
def test_a_state_without_gates_gets_them():
    """As where the part is put into a layer between two tokens: earlier tokens have gates of 0."""
    layer, x = make(**GATED), tokens()
    gate, layer.input_gate_proj = layer.input_gate_proj, None
    y, state = in_pieces(layer, x[:, :6], [6])
    assert state.attention.local_gates is None
    layer.input_gate_proj = gate
    for rest in (in_pieces(layer, x[:, 6:], [7], state)[0], in_pieces(layer, x[:, 6:], [1] * 7, state)[0]):
        q, k, v, _ = layer._heads(x, None, None, None)
        log_decay, gates = layer._log_gates(x, None)
        gates[:, :, :6] = 0.0
        o = fastmax_attention(q, k, v, causal=True, log_decay=log_decay, log_input_gate=gates, **layer.options)
        torch.testing.assert_close(torch.cat([y, rest], dim=1), layer._output(o, x), rtol=1e-8, atol=1e-9)
