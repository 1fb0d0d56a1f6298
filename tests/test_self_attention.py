"""`FastmaxSelfAttention` against the same layer written out in float64: calls in parts, packed sequences, padding, states,
refusals."""

import copy
import io
import math
import pickle
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from common import capture, relative
from torch.utils import _pytree as pytree

import fastmax
from fastmax import FastmaxSelfAttention
from fastmax.nn import kept_keys

C, N, BLOCK = 24, 13, 3
FASTMAX = {"exact_window": 4}
SOFTMAX = {"attention": "softmax"}
GATED = FASTMAX | {"input_gate": True}
KEPT = GATED | {"kept_keys": 2}
OFF = {"qk_norm": False, "rope": False, "decay": False, "output_norm": False, "conv": 0, "output_gate": False}
OPTIONS = {
    "all": FASTMAX,
    **{f"no {name}": FASTMAX | {name: off} for name, off in OFF.items()},
    "no exact_window": {"exact_window": 0},
    "nothing": OFF | {"exact_window": 0},
    "default window": {},
    "grouped": FASTMAX | {"num_kv_heads": 2, "head_dim": 10, "bias": True, "conv": 2, "rope_base": 50.0},
    "every channel turns": FASTMAX | {"rope_dim": 6},
    "odd head_dim": FASTMAX | {"head_dim": 7},
    "wide values": FASTMAX | {"value_dim": 11, "num_kv_heads": 2, "bias": True},
    "narrow values": {"exact_window": 0, "head_dim": 8, "value_dim": 3, "p": 1},
    "one kv head": FASTMAX | {"num_kv_heads": 1},
    "p1": FASTMAX | {"p": 1},
    "coefficients": FASTMAX | {"a0": 2.0, "a1": 1.5, "a2": 0.75},
    "token": FASTMAX | {"normalize": "token", "temperature": 0.5},
    "linear": FASTMAX | {"algorithm": "linear"},
    "autograd": FASTMAX | {"use_custom_gradient": False},
    "input gate": GATED | {"num_kv_heads": 2},
    "input gate, no exact_window": {"exact_window": 0, "input_gate": True},
    "input gate alone": GATED | OFF,
    "input gate, linear": GATED | {"algorithm": "linear", "p": 1},
    "input gate, autograd": GATED | {"use_custom_gradient": False},
    "kept keys": KEPT | {"num_kv_heads": 2},
    "kept keys alone": KEPT | OFF,
    "kept keys, token": KEPT | {"kept_keys": 3, "normalize": "token", "p": 1},
    "kept keys, autograd": KEPT | {"use_custom_gradient": False, "value_dim": 11},
    "all keys are kept": KEPT | {"kept_keys": 30, "exact_window": 1},
    "softmax": SOFTMAX,
    "softmax, nothing": SOFTMAX | OFF,
    "softmax, wide values": SOFTMAX | {"value_dim": 11, "num_kv_heads": 2},
    "softmax, window": SOFTMAX | {"window": 4, "num_kv_heads": 2},
}
by_option = pytest.mark.parametrize("option", OPTIONS)
by_attention = pytest.mark.parametrize(
    "options",
    [FASTMAX, GATED, KEPT, SOFTMAX, SOFTMAX | {"window": 4}],
    ids=["fastmax", "input gate", "kept keys", "softmax", "window"],
)
by_graph = pytest.mark.parametrize(
    "options", [FASTMAX, GATED, KEPT, SOFTMAX | {"window": 4}], ids=["fastmax", "input gate", "kept keys", "window"]
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a few tokens are in several blocks of queries that share kept keys."""
    monkeypatch.setattr(kept_keys, "_BLOCK", BLOCK)


def make(dtype=torch.float64, **options) -> FastmaxSelfAttention:
    """Returns a layer in which every weight matters."""
    layer = FastmaxSelfAttention(C, 4, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


def tokens(b=2, n=N, dtype=torch.float64):
    return torch.randn(b, n, C, dtype=dtype)


def rms(x, norm):
    return x if norm is None else x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def turned(x, layer):
    """Rotates (b, h, n, d), whose first channels are pairs of real and imaginary parts."""
    n, half = x.shape[2], layer.rope_dim // 2
    angles = torch.outer(torch.arange(n), layer.rope_base ** (torch.arange(half, dtype=torch.float64) / -half))
    z = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag, x[..., 2 * half :]], dim=-1)


def each_alone(layer, x, mask):
    """Returns `written_out` of the real tokens of each sequence alone, and 0 at the others."""
    y = torch.zeros_like(x)
    for i, real in enumerate(mask):
        y[i, real] = written_out(layer, x[i : i + 1, real])[0]
    return y


def kept(rank, count, window):
    """Returns which of n keys are kept for each query by ranks (b, h, n), bool (b, h, n, n). Of equal ones the later is."""
    b, h, n = rank.shape
    is_kept = torch.zeros(b, h, n, n, dtype=torch.bool)
    for i, j, query in product(range(b), range(h), range(n)):
        far = range(max(0, query // BLOCK * BLOCK - window))
        is_kept[i, j, query, sorted(far, key=lambda key: (-rank[i, j, key].item(), -key))[:count]] = True
    return is_kept


def ranks(layer, x):
    """Returns log_input_gate_j - G_j, (b, hk, n)."""
    gate = 8 * torch.tanh(layer.input_gate_proj(x) / 8)
    sums = 0.0 if layer.decay_proj is None else torch.sigmoid(layer.decay_proj(x)).log().cumsum(1)
    return (gate - sums).mT


def written_out(layer, x):
    """Computes the layer with the (n, n) matrix of weights."""
    n = x.shape[1]
    h, hk, d = layer.num_heads, layer.num_kv_heads, layer.head_dim
    qkv = layer.qkv_proj(x)
    if layer.conv is not None:
        width = layer.conv.width
        qkv = F.conv1d(F.pad(qkv.mT, (width - 1, 0)), layer.conv.weight, groups=qkv.shape[-1]).mT
    dv = layer.value_dim
    parts = qkv.split([h * d, hk * d, hk * dv], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part, width in zip(parts, (d, d, dv), strict=True))
    q, k = rms(q, layer.q_norm), rms(k, layer.k_norm)
    if layer.rope_dim:
        q, k = turned(q, layer), turned(k, layer)
    k, v = (rows.repeat_interleave(h // hk, dim=1) for rows in (k, v))
    distance = torch.arange(n)[:, None] - torch.arange(n)
    if layer.attention == "softmax":
        weights = (q @ k.mT * d**-0.5).exp()
        seen = (distance >= 0) & (distance < (layer.window or n))
    else:
        if layer.options["normalize"] == "token":
            q, k = (rows / rows.norm(dim=-1, keepdim=True).clamp(min=1.0) for rows in (q, k))
        s = q @ k.mT / layer.options["temperature"]
        a0, a1, a2 = (layer.options[name] for name in ("a0", "a1", "a2"))
        f = a0 + a1 * s + (a2 * s * s if layer.options["p"] == 2 else 0)
        weights, seen = torch.where(distance < layer.options["exact_window"], s.exp(), f), distance >= 0
    decay = 1.0
    if layer.decay_proj is not None:
        log_decay = torch.sigmoid(layer.decay_proj(x)).log()  # (b, n, hk)
        sums = log_decay.cumsum(1).mT.repeat_interleave(h // hk, dim=1)
        decay = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).clamp(max=0).exp()
        weights = weights * decay
    if layer.input_gate_proj is not None:
        gate = (8 * torch.tanh(layer.input_gate_proj(x) / 8)).exp()  # (b, n, hk)
        gate = gate.mT.repeat_interleave(h // hk, dim=1).unsqueeze(-2)
        weights = weights * torch.where(distance < layer.options["exact_window"], 1.0, gate)
        if layer.kept_keys > 0:
            window, i = layer.options["exact_window"], torch.arange(n)
            is_kept = kept(ranks(layer, x).detach(), layer.kept_keys, window).repeat_interleave(h // hk, dim=1)
            is_kept = is_kept | ((distance >= window) & (i >= (i // BLOCK * BLOCK - window)[:, None]))
            weights = weights + torch.where(is_kept, s.exp() * gate * decay, 0.0)
    weights = weights * seen
    o = (weights @ v) / weights.sum(-1, keepdim=True)
    o = rms(o.transpose(1, 2), layer.output_norm).flatten(2)
    if layer.gate_proj is not None:
        gate = layer.gate_proj(x)
        o = o * gate * torch.sigmoid(gate)
    return layer.out_proj(o)


def gradients(y, x, layer):
    grads = torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y).cumsum(1).cos())
    return dict(zip(["x", *dict(layer.named_parameters())], grads, strict=True))


def assert_same(actual, expected):
    """Checks outputs and all gradients, none of which is zero."""
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-9, atol=1e-10)
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 1e-6, f"{name} has no gradient"
        assert relative(actual[1][name], gradient) < 1e-8, name


def in_pieces(layer, x, sizes, state=None, mask=None):
    state = layer.init_state(x.shape[0]) if state is None else state
    outputs, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        y, state = layer(x[:, part], state, attention_mask=None if mask is None else mask[:, part])
        outputs.append(y)
        start += size
    return torch.cat(outputs, dim=1), state


# ---- the function


@by_option
def test_is_what_is_written_out(option):
    layer, x = make(**OPTIONS[option]), tokens().requires_grad_()
    y, expected = layer(x), written_out(layer, x)
    assert_same((y, gradients(y, x, layer)), (expected, gradients(expected, x, layer)))


def test_window_matters_beyond_its_tokens():
    """With 200 tokens and the default window of 128, weights differ from softmax and equal the definition."""
    layer, x = make(conv=0), tokens(1, 200)
    torch.testing.assert_close(layer(x), written_out(layer, x), rtol=1e-8, atol=1e-9)
    other = make(conv=0, exact_window=200)
    other.load_state_dict(layer.state_dict())
    assert relative(other(x), layer(x)) > 1e-3


@by_attention
@pytest.mark.parametrize("conv", [0, 4])
def test_padding(conv, options):
    layer, x, mask = make(num_kv_heads=2, conv=conv, **options), tokens(), torch.rand(2, N) > 0.4
    y = layer(x, attention_mask=mask)
    torch.testing.assert_close(y[mask], each_alone(layer, x, mask)[mask], rtol=1e-8, atol=1e-9)
    for held in (100.0, torch.nan, torch.inf):
        x[~mask] = held  # in place: equal bits need equal addresses
        torch.testing.assert_close(layer(x, attention_mask=mask)[mask], y[mask], rtol=0, atol=0)
        in_turn, _ = in_pieces(layer, x, [3, 1, 5, 1, 3], mask=mask)
        torch.testing.assert_close(in_turn[mask], y[mask], rtol=1e-8, atol=1e-9)


@by_attention
def test_padding_on_the_left_is_not_there(options):
    layer, x = make(**options), tokens()
    padded = torch.cat([torch.randn(2, 5, C, dtype=x.dtype), x], dim=1)
    mask = torch.arange(N + 5).expand(2, -1) >= 5
    torch.testing.assert_close(layer(padded, attention_mask=mask)[:, 5:], layer(x), rtol=1e-9, atol=1e-10)


@by_attention
def test_future_changes_nothing(options):
    layer, x = make(**options), tokens()
    y = layer(x)
    changed = x.clone()
    changed[:, 8:] = 3.0
    torch.testing.assert_close(layer(changed)[:, :8], y[:, :8], rtol=0, atol=1e-13)
    assert not torch.allclose(layer(changed)[:, 8:], y[:, 8:])


@by_attention
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_packed_sequences_are_those_one_by_one(options, padded):
    layer, x, lengths = make(num_kv_heads=2, **options), tokens(1, 21).requires_grad_(), [6, 0, 1, 2, 12]
    mask = torch.arange(21).expand(1, -1) % 4 != 1 if padded else None
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = layer(x, cu_seqlens=cu_seqlens, attention_mask=mask)
    masks = [None] * len(lengths) if mask is None else mask.split(lengths, dim=1)
    alone = torch.cat([layer(part, attention_mask=m) for part, m in zip(x.split(lengths, dim=1), masks, strict=True)], dim=1)
    assert_same((packed, gradients(packed, x, layer)), (alone, gradients(alone, x, layer)))


@by_attention
def test_of_no_tokens(options):
    layer = make(**options)
    assert layer(tokens(2, 0)).shape == (2, 0, C) and layer(tokens(0, 3)).shape == (0, 3, C)
    y, state = layer(tokens(2, 0), layer.init_state(2))
    assert y.shape == (2, 0, C) and state.positions.tolist() == [0, 0]
    assert layer(tokens(1, 0), cu_seqlens=torch.zeros(2, dtype=torch.int32)).shape == (1, 0, C)


# ---- states


@by_option
@pytest.mark.parametrize("sizes", [[N], [1] * N, [2, 3, 1, 7]], ids=str)
def test_pieces_are_one_call(option, sizes):
    layer, x = make(**OPTIONS[option]), tokens()
    y, state = in_pieces(layer, x, sizes)
    torch.testing.assert_close(y, layer(x), rtol=1e-8, atol=1e-9)
    assert state.positions.tolist() == [N, N]


@by_attention
def test_pieces_with_padding(options):
    layer, x, mask = make(**options), tokens(), torch.rand(2, N) > 0.4
    mask[:, 0] = True
    y, state = in_pieces(layer, x, [3, 1, 5, 1, 3], mask=mask)
    torch.testing.assert_close(y[mask], layer(x, attention_mask=mask)[mask], rtol=1e-8, atol=1e-9)
    assert state.positions.tolist() == mask.sum(1).tolist()


@by_attention
def test_gradients_through_states(options):
    layer, x = make(**options), tokens().requires_grad_()
    pieces, whole = in_pieces(layer, x, [4, 1, 6, 2])[0], layer(x)
    assert_same((pieces, gradients(pieces, x, layer)), (whole, gradients(whole, x, layer)))


@by_attention
def test_state_that_is_given_is_not_modified(options):
    layer, x = make(**options), tokens()
    _, state = in_pieces(layer, x, [5])
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    for n in (1, 4):
        layer(x[:, :n], state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())


@torch.no_grad()
@pytest.mark.parametrize("option", ["all", "nothing", "p1", "input gate", "input gate, no exact_window"])
def test_in_place(option):
    layer, x = make(**OPTIONS[option]), tokens()
    y, state = in_pieces(layer, x[:, :6], [6])
    addresses = {name: tensor.data_ptr() for name, tensor in state.tensors().items()}
    y = torch.cat([y, *(layer.step_(x[:, i : i + 1], state) for i in range(6, N))], dim=1)
    torch.testing.assert_close(y, layer(x), rtol=1e-8, atol=1e-9)
    assert {name: tensor.data_ptr() for name, tensor in state.tensors().items()} == addresses


@pytest.mark.parametrize("option", ["all", "no exact_window", "grouped", "p1", "input gate", "input gate, no exact_window"])
@torch.no_grad()
def test_in_place_with_buffered_tokens(option):
    """Calls of several tokens may come between steps in place, with tokens left in the buffer."""
    layer, x = make(**OPTIONS[option]), tokens()
    y, state = in_pieces(layer, x[:, :3], [3], layer.init_state(2, flush_interval=3))
    outputs = [y, *(layer.step_(x[:, i : i + 1], state) for i in range(3, 8))]
    y, state = in_pieces(layer, x[:, 8:11], [1, 2], state)
    outputs += [y, *(layer.step_(x[:, i : i + 1], state) for i in range(11, N))]
    torch.testing.assert_close(torch.cat(outputs, dim=1), layer(x), rtol=1e-8, atol=1e-9)
    with pytest.raises(ValueError, match='flush_interval must be 1 with attention="softmax", got 3'):
        make(**SOFTMAX).init_state(2, flush_interval=3)


def test_in_place_leaves_the_state_where_it_refuses():
    layer, x = make(**FASTMAX), tokens(n=1)
    state = layer.init_state(2)
    with pytest.raises(RuntimeError, match="writes over the state"):
        layer.step_(x, state)
    assert all(tensor.count_nonzero() == 0 for tensor in state.tensors().values())
    with torch.inference_mode():
        state = layer.init_state(2, flush_interval=3)
    with torch.no_grad(), pytest.raises(RuntimeError, match="state was made in inference mode"):
        layer.step_(x, state)
    assert all(tensor.count_nonzero() == 0 for tensor in state.tensors().values())


@by_attention
def test_beams(options):
    layer, x = make(**options), tokens(3)
    _, state = in_pieces(layer, x[:, :8], [8])
    rest = x[:, 8:]
    expected = layer(x)[:, 8:]
    for order in ([2, 0], [1, 1, 0, 2]):
        y, _ = in_pieces(layer, rest[order], [1, 4], state.select(order))
        torch.testing.assert_close(y, expected[order], rtol=1e-8, atol=1e-9)
    y, _ = in_pieces(layer, rest.repeat_interleave(2, 0), [5], state.repeat(2))
    torch.testing.assert_close(y, expected.repeat_interleave(2, 0), rtol=1e-8, atol=1e-9)
    with pytest.raises(IndexError, match="indices must be from 0 to 2"):
        state.select([3])


@torch.no_grad()
@by_attention
def test_copies_of_states(options):
    """States can be cloned, saved (with `weights_only=True`), deep-copied, passed through a pytree, and converted to float32
    and back."""
    layer, x = make(**options), tokens()
    _, state = in_pieces(layer, x[:, :8], [8])
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    leaves, spec = pytree.tree_flatten(state)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves) and len(leaves) == len(state.tensors())
    copies = [state.clone(), state.detach(), torch.load(file), copy.deepcopy(state), pytree.tree_unflatten(leaves, spec)]
    expected, _ = layer(x[:, 8:], state)
    for other in copies:
        assert all(map(torch.equal, other.tensors().values(), state.tensors().values()))
        torch.testing.assert_close(layer(x[:, 8:], other)[0], expected)  # keys and sums at other addresses
    narrow = state.to(torch.float32)
    assert narrow.dtype == torch.float32 and narrow.nbytes < state.nbytes and narrow.device == state.device
    torch.testing.assert_close(layer(x[:, 8:], narrow.to(dtype=torch.float64))[0], expected, rtol=1e-4, atol=1e-4)


def test_sizes_of_states():
    """The size of Fastmax's state is constant, that of a window is bounded, and that of softmax grows."""

    def nbytes(options, n):
        layer = make(**options)
        return in_pieces(layer, tokens(n=n), [n])[1].nbytes

    assert nbytes(FASTMAX, 6) == nbytes(FASTMAX, 30)
    window = SOFTMAX | {"window": 4}
    assert nbytes(window, 6) == nbytes(window, 30) < nbytes(SOFTMAX, 6) < nbytes(SOFTMAX, 30)


# ---- as a module


@by_graph
def test_compiles_into_one_graph(options, fresh_dynamo):
    layer, x = make(**options), tokens().requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, expected = compiled(x), layer(x)
    assert_same((y, gradients(y, x, layer)), (expected, gradients(expected, x, layer)))
    cu_seqlens = torch.tensor([0, 5, N], dtype=torch.int32)
    x = tokens(1)
    torch.testing.assert_close(compiled(x, cu_seqlens=cu_seqlens), layer(x, cu_seqlens=cu_seqlens))


def test_compiled_code_computes_the_angles_once(fresh_dynamo):
    """They are one operator, because Inductor would compute the sines again for each head and batch entry."""
    layer, x, called = make(), tokens(), []

    def backend(graph, example_inputs):
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend=backend)(x), layer(x))
    assert sum("rotary_factors" in name for name in called) == 1
    assert not {"sin", "cos"} & set(called)


@torch.no_grad()
@by_graph
def test_compiles_with_a_state(options, fresh_dynamo):
    layer, x = make(**options), tokens()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    state = layer.init_state(2)
    y, state = compiled(x[:, :4], state)
    z, _ = compiled(x[:, 4:5], state)
    torch.testing.assert_close(torch.cat([y, z], dim=1), layer(x[:, :5]), rtol=1e-8, atol=1e-9)


@by_attention
def test_autocast(options):
    layer, x = make(torch.float32, **options), tokens(dtype=torch.float32)
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        pieces, state = in_pieces(layer, x, [5, 1, 7], layer.init_state(2, dtype=torch.bfloat16))
    assert y.dtype == pieces.dtype == torch.bfloat16 and state.dtype == torch.bfloat16
    assert relative(y.float(), exact) < 0.03 and relative(pieces.float(), exact) < 0.03
    y.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@by_attention
def test_dtypes(options, dtype):
    layer, x = make(dtype, **options), tokens(dtype=dtype)
    y, _ = in_pieces(layer, x, [5, 1, 7])
    exact = copy.deepcopy(layer).double()(x.double())
    limit = 0.05 if dtype == torch.bfloat16 else 1e-5
    assert y.dtype == dtype and relative(y.double(), exact) < limit and relative(layer(x).double(), exact) < limit


@pytest.mark.parametrize("options", [FASTMAX, GATED], ids=["fastmax", "input gate"])
def test_copies_of_the_layer(options):
    layer, x = make(num_kv_heads=2, **options), tokens()
    other = FastmaxSelfAttention(C, 4, num_kv_heads=2, dtype=torch.float64, **options)
    other.load_state_dict(layer.state_dict())
    for twin in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert all(map(torch.equal, twin.state_dict().values(), layer.state_dict().values()))
        torch.testing.assert_close(twin(x), layer(x))  # weights at other addresses


def test_softmax_has_the_same_weights():
    """The weights have the same names, shapes and, from the same seed, numbers."""
    states = []
    for attention in ("fastmax", "softmax"):
        torch.manual_seed(0)
        states.append(FastmaxSelfAttention(C, 4, attention=attention).state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "head_dim": 10}])
def test_default_temperature_is_softmax_s_where_a_window_is(options):
    layer = make(exact_window=N, **options)
    softmax = FastmaxSelfAttention(C, 4, dtype=torch.float64, attention="softmax", **options)
    softmax.load_state_dict(layer.state_dict())
    x = tokens()
    torch.testing.assert_close(layer(x), softmax(x))


@pytest.mark.parametrize(
    "options, temperature", [({}, (C / 4) ** 0.5), ({"exact_window": 0}, 1.0), ({"p": 1}, 1.1), ({"temperature": 3.0}, 3.0)]
)
def test_default_temperature(options, temperature):
    assert FastmaxSelfAttention(C, 4, **options).options["temperature"] == pytest.approx(temperature)


def test_initialisation():
    layer = FastmaxSelfAttention(64, 8, num_kv_heads=4, longest_half_life=500.0, dtype=torch.float64)
    decays = F.logsigmoid(layer.decay_proj.bias)
    half_lives = -torch.log(torch.tensor(2.0, dtype=torch.float64)) / decays
    torch.testing.assert_close(half_lives, torch.tensor([4.0, 20.0, 100.0, 500.0], dtype=torch.float64))
    for steady, expected in ((2, [4.0, 500.0, 2.0**24, 2.0**24]), (3, [500.0] + [2.0**24] * 3), (4, [2.0**24] * 4)):
        layer.steady_heads = steady
        layer.reset_parameters()
        half_lives = -math.log(2.0) / F.logsigmoid(layer.decay_proj.bias)
        torch.testing.assert_close(half_lives, torch.tensor(expected, dtype=torch.float64))
        same = FastmaxSelfAttention(64, 8, num_kv_heads=4, longest_half_life=500.0, steady_heads=steady, dtype=torch.float64)
        assert torch.equal(same.decay_proj.bias, layer.decay_proj.bias)
    assert layer.decay_proj.weight.count_nonzero() == 0
    assert layer.qkv_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    qkv = torch.randn(1, 5, 128, dtype=torch.float64)
    assert torch.equal(layer.conv(qkv)[0], qkv)
    single = FastmaxSelfAttention(8, 1, longest_half_life=500.0)
    assert torch.sigmoid(single.decay_proj.bias).item() ** 500 == pytest.approx(0.5, rel=1e-3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(7.0)
    layer.reset_parameters()
    assert all((parameter != 7.0).all() for parameter in layer.parameters())


def test_made_on_a_device_of_its_own():
    layer = FastmaxSelfAttention(C, 4, device="meta", dtype=torch.bfloat16)
    assert {(parameter.device.type, parameter.dtype) for parameter in layer.parameters()} == {("meta", torch.bfloat16)}
    assert layer(torch.empty(2, 3, C, device="meta", dtype=torch.bfloat16)).shape == (2, 3, C)
    assert layer.init_state(2).device.type == "meta"


def test_what_is_switched_off_has_no_weights():
    layer = FastmaxSelfAttention(C, 4, **OFF, exact_window=0)
    assert set(layer.state_dict()) == {"qkv_proj.weight", "out_proj.weight"}
    assert "exact_window=0" in repr(layer) and "window=3" in repr(FastmaxSelfAttention(C, 4, window=3, **SOFTMAX))


# ---- on a GPU


@pytest.mark.cuda
@by_attention
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels(options, dtype):
    """Outputs and gradients on the kernels are right, for packed sequences and calls in parts too."""
    layer = FastmaxSelfAttention(64, 4, num_kv_heads=2, head_dim=64, device="cuda", dtype=dtype, **options)
    exact = copy.deepcopy(layer).cpu().double()
    x = torch.randn(1, 150, 64, device="cuda", dtype=dtype, requires_grad=True)
    x_exact = x.detach().cpu().double().requires_grad_()
    limit = 0.08 if dtype == torch.bfloat16 else 0.01
    for cu_seqlens in (None, torch.tensor([0, 70, 71, 150], dtype=torch.int32)):
        expected = exact(x_exact, cu_seqlens=cu_seqlens)
        y = layer(x, cu_seqlens=None if cu_seqlens is None else cu_seqlens.cuda())
        assert y.dtype == dtype and relative(y.cpu().double(), expected) < limit
        expected = gradients(expected, x_exact, exact)
        of_layer = gradients(y, x, layer)
        if dtype == torch.bfloat16:
            for name in ("decay_proj.bias", "input_gate_proj.bias"):  # sums over tokens that cancel
                of_layer.pop(name, None)
        for name, gradient in of_layer.items():
            assert relative(gradient.cpu().double(), expected[name]) < limit, name
    y, _ = in_pieces(layer, x, [70, 1, 79])
    assert relative(y.cpu().double(), exact(x_exact)) < limit


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options, flush_interval",
    [(FASTMAX, 1), (FASTMAX, 3), (GATED, 1), (GATED, 3), (KEPT, 1), (KEPT, 3)],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, dict) else str(x),
)
@torch.no_grad()
def test_a_replayed_graph_advances_the_state(options, flush_interval):
    layer = make(torch.float32, **options).cuda()
    x = tokens(dtype=torch.float32).cuda()
    state, token = layer.init_state(2, flush_interval=flush_interval), x[:, :1].clone()
    graph, y = capture(lambda: layer.step_(token, state), warm_up=lambda: layer.step_(token, state.clone()))
    outputs = []
    for i in range(N):
        token.copy_(x[:, i : i + 1])
        graph.replay()
        outputs.append(y.clone())
    assert relative(torch.cat(outputs, dim=1), layer(x)) < 1e-2 and state.positions.tolist() == [N, N]


# ---- refusals


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"num_heads": 5}, ValueError, "embed_dim must be a multiple of num_heads"),
        ({"num_kv_heads": 3}, ValueError, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1"),
        ({"embed_dim": 24.0}, TypeError, "embed_dim must be an int"),
        ({"head_dim": True}, TypeError, "head_dim must be an int"),
        ({"head_dim": 1}, ValueError, "head_dim must be at least 2 for rope"),
        ({"rope_dim": 3}, ValueError, "rope_dim must be even and at most head_dim 6, got 3"),
        ({"rope_dim": 8}, ValueError, "rope_dim must be even and at most head_dim 6, got 8"),
        ({"rope_dim": 0}, ValueError, "rope_dim must be at least 1, got 0"),
        ({"rope_dim": 2.0}, TypeError, "rope_dim must be an int"),
        ({"rope_dim": 2, "rope": False}, ValueError, "rope_dim needs rope=True, got 2 with rope=False"),
        ({"attention": "linear"}, ValueError, 'attention must be "fastmax" or "softmax"'),
        ({"decay": 1}, TypeError, "decay must be a bool"),
        ({"input_gate": 1}, TypeError, "input_gate must be a bool"),
        ({"rope_base": 0}, ValueError, "rope_base must be > 0"),
        ({"longest_half_life": 3.0}, ValueError, "longest_half_life must be at least 4 tokens"),
        ({"steady_heads": 1.0}, TypeError, "steady_heads must be an int"),
        ({"steady_heads": -1}, ValueError, "steady_heads must be at least 0, got -1"),
        ({"steady_heads": 5}, ValueError, "steady_heads must be at most num_kv_heads 4, got 5"),
        ({"steady_heads": 1, "decay": False}, ValueError, "steady_heads needs decay gates, got 1 without them"),
        ({"norm_eps": -1e-6}, ValueError, "norm_eps must be > 0"),
        ({"dtype": torch.int8}, TypeError, "dtype must be float64, float32, float16 or bfloat16"),
        ({"conv": -1}, ValueError, "conv must be at least 0"),
        ({"conv": True}, TypeError, "conv must be an int"),
        ({"exact_window": -1}, ValueError, "exact_window must be at least 0"),
        ({"window": 4}, ValueError, 'window needs attention="softmax"'),
        ({"normalize": True}, ValueError, 'normalize must be False or "token" in a causal layer'),
        ({"temperature": 0.0}, ValueError, "temperature must be > 0"),
        ({"p": 3}, ValueError, "p must be 1 or 2"),
        ({"algorithm": "fast"}, ValueError, "algorithm must be one of"),
        (SOFTMAX | {"exact_window": 16}, ValueError, "exact_window has no effect with .*softmax"),
        (SOFTMAX | {"temperature": 1.0}, ValueError, "temperature has no effect"),
        (SOFTMAX | {"p": 1}, ValueError, "p has no effect"),
        (SOFTMAX | {"a1": 1.5}, ValueError, "a1 has no effect"),
        ({"a2": float("nan")}, ValueError, "a2"),
        (SOFTMAX | {"algorithm": "linear"}, ValueError, "algorithm has no effect"),
        (SOFTMAX | {"normalize": False}, ValueError, "normalize has no effect"),
        (SOFTMAX | {"window": 0}, ValueError, "window must be at least 1"),
        (SOFTMAX | {"input_gate": True}, ValueError, 'input_gate needs attention="fastmax", got True .* with "softmax"'),
    ],
)
def test_options_that_are_refused(options, error, message):
    sizes = {"embed_dim": C, "num_heads": 4}
    with pytest.raises(error, match=message):
        FastmaxSelfAttention(**(sizes | options))


def test_calls_that_are_refused():
    layer, x = make(**FASTMAX), tokens()
    state, cu_seqlens = layer.init_state(2), torch.tensor([0, 5, N], dtype=torch.int32)
    for arguments, options, error, message in (
        ((x.numpy(),), {}, TypeError, "x must be a tensor of shape"),
        ((x[0],), {}, ValueError, "x must be a tensor of shape .batch, tokens, 24., got shape"),
        ((x[..., 1:],), {}, ValueError, "x must be a tensor of shape"),
        ((x.float(),), {}, TypeError, "x must have the dtype of the weights torch.float64"),
        ((x.to("meta"),), {}, ValueError, "x must be on the device of the weights"),
        ((x,), {"attention_mask": torch.ones(2, N)}, TypeError, "attention_mask must be bool"),
        ((x,), {"attention_mask": torch.ones(2, 3, dtype=torch.bool)}, ValueError, "attention_mask must have shape"),
        ((x,), {"cu_seqlens": cu_seqlens}, ValueError, "cu_seqlens takes a batch of one"),
        ((x[:1],), {"cu_seqlens": cu_seqlens - 1}, ValueError, "cu_seqlens must go from 0"),
        (
            (x[:1], layer.init_state(1)),
            {"cu_seqlens": cu_seqlens},
            ValueError,
            "state must have a batch entry for each of the 2 sequences of cu_seqlens, got 1",
        ),
        ((x, state.attention), {}, TypeError, "state must come from this layer's init_state"),
        ((x[:1], state), {}, ValueError, "state must have x's batch 1, got 2"),
        ((x, state.to("meta")), {}, ValueError, "state must be on x's device"),
        ((x, state.to(torch.float32)), {}, TypeError, "state must be for x's dtype"),
        ((x, replace(state, recent=None)), {}, ValueError, "state must have a recent of shape"),
        ((x, make(**SOFTMAX).init_state(2)), {}, TypeError, 'state must come from a layer of attention="fastmax"'),
        ((x, make(exact_window=3).init_state(2)), {}, ValueError, "state must have this layer's exact_window 4, got 3"),
        ((x, make(temperature=2.0, **FASTMAX).init_state(2)), {}, ValueError, "state must have this layer's score"),
        ((x, make(normalize="token", **FASTMAX).init_state(2)), {}, ValueError, "state must have this layer's normalize"),
    ):
        with pytest.raises(error, match=message):
            layer(*arguments, **options)
    with pytest.raises(ValueError, match="state must have this layer.s .num_kv_heads, head_dim."):
        make(conv=0, **SOFTMAX)(x, make(conv=0, num_kv_heads=2, **SOFTMAX).init_state(2))
    with pytest.raises(ValueError, match="x must hold one token"):
        layer.step_(x, state)
    with pytest.raises(TypeError, match="state must come from"):
        layer.step_(x, None)
    with pytest.raises(ValueError, match="step_ needs attention="):
        make(**SOFTMAX).step_(x, state)
    for options, error, message in (
        ({"batch": -1}, ValueError, "batch must be at least 0"),
        ({"batch": 2, "dtype": torch.int32}, TypeError, "dtype must be float64"),
    ):
        with pytest.raises(error, match=message):
            layer.init_state(**options)


def test_is_public():
    assert fastmax.FastmaxSelfAttention is FastmaxSelfAttention
    assert isinstance(make(**FASTMAX).init_state(1), fastmax.SelfAttentionState)
