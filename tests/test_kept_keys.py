"""`kept_keys` of `FastmaxSelfAttention`: the choice with ties, block boundaries, gradients, states and refusals.

`test_self_attention` and `test_self_attention_state` compare the layer with its definition on every path.
"""

import copy
import math
from itertools import chain

import pytest
import torch
from common import relative
from test_self_attention import (  # noqa: F401
    BLOCK,
    GATED,
    OFF,
    C,
    gradients,
    in_pieces,
    kept,
    make,
    ranks,
    small_blocks,
    tokens,
    written_out,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck

from fastmax import FastmaxSelfAttention, eager
from fastmax.nn import kept_keys
from fastmax.nn.kept_keys import KeptKeys

HEADS, WINDOW, KEPT = 4, 4, 3
LAYER = GATED | {"kept_keys": KEPT, "num_kv_heads": 2}
LONG = 3 * BLOCK + 5 + WINDOW
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, LONG, 17, 40]
SPLITS = [[LONG], [1] * LONG, [BLOCK] * 6, [2, 1, BLOCK + 3, 1, 1, LONG - BLOCK - 8], [5, 13]]


def close(actual, expected, limit=1e-9):
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit)


def tied() -> tuple[FastmaxSelfAttention, torch.Tensor]:
    """Returns a layer without decay, and x, whose gates have three values, exactly: equal ones are equal on every path."""
    layer, x = make(**LAYER, decay=False), tokens(2, LONG)
    with torch.no_grad():
        layer.input_gate_proj.weight.zero_()
        layer.input_gate_proj.weight[:, 0] = torch.tensor([1.0, -2.0])
        layer.input_gate_proj.bias.zero_()
        x[..., 0] = torch.randint(-1, 2, x.shape[:2])
    return layer, x


def positions_of(state, stop) -> list:
    """Returns the positions of the kept keys that a state holds for the query at `stop`, for each entry and head, sorted."""
    first = stop // BLOCK * BLOCK - WINDOW
    return [[sorted(p for p in head if 0 <= p < first) for head in entry] for entry in state.kept.positions.tolist()]


def expected_positions(layer, x) -> list:
    """Returns the positions of the keys that are kept for the query after the tokens x."""
    rank = torch.nn.functional.pad(ranks(layer, x).detach(), (0, 1))  # the next query's own key is no candidate
    of_query = kept(rank, layer.kept_keys, layer.exact_window)[:, :, -1]
    return [[head.nonzero().flatten().tolist() for head in entry] for entry in of_query]


# ---- the function


@pytest.mark.parametrize("n", LENGTHS)
def test_lengths_around_the_blocks(n):
    layer, x = make(**LAYER), tokens(2, n).requires_grad_()
    y, expected = layer(x), written_out(layer, x)
    close(y, expected)
    for (name, actual), gradient in zip(gradients(y, x, layer).items(), gradients(expected, x, layer).values(), strict=True):
        assert (actual - gradient).norm() <= 1e-8 * gradient.norm() + 1e-13, name


@pytest.mark.parametrize("window", [1, 2, BLOCK, BLOCK + 1, 3 * BLOCK, LONG])
@torch.no_grad()
def test_windows_around_the_blocks(window):
    layer, x = make(**LAYER | {"exact_window": window}), tokens(2, LONG)
    expected = written_out(layer, x)
    close(layer(x), expected)
    close(in_pieces(layer, x, [4, 1, 1, LONG - 6])[0], expected)


@pytest.mark.parametrize("count", [1, BLOCK, LONG - WINDOW, 100])
@torch.no_grad()
def test_numbers_of_kept_keys(count):
    """Also as many as there are keys beyond the window, and more."""
    layer, x = make(**LAYER | {"kept_keys": count}), tokens(2, LONG)
    expected = written_out(layer, x)
    close(layer(x), expected)
    close(in_pieces(layer, x, [4, 1, 1, LONG - 6])[0], expected)


def one_head(gates, log_decay=0.0, **options) -> tuple[FastmaxSelfAttention, torch.Tensor]:
    """Returns a layer whose scores are 0 and whose output is the mean of the inputs, and x with these gates in channel 0."""
    layer = FastmaxSelfAttention(4, 1, input_gate=True, exact_window=1, dtype=torch.float64, **OFF | {"decay": True} | options)
    eye = torch.eye(4, dtype=torch.float64)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.zero_()
        layer.qkv_proj.weight[8:] = eye
        layer.out_proj.weight.copy_(eye)
        layer.decay_proj.bias.fill_(-math.log(math.expm1(-log_decay)) if log_decay else 1e3)
        layer.input_gate_proj.weight[0, 0] = 1.0
    x = torch.zeros(1, len(gates), 4, dtype=torch.float64)
    x[0, :, 0] = 8 * torch.atanh(torch.tensor(gates, dtype=torch.float64) / 8)
    return layer, x


@torch.no_grad()
def test_weights_of_one_key():
    """A key weighs exp(b) + exp(b) exp(s) while it is exact, then half as much unless it is kept, and decays all the time."""
    gates = [2.0, 1.0, *[-5.0] * (LONG - 2)]
    for count in (0, 1, 2):
        layer, x = one_head(gates, -0.1, kept_keys=count)
        own = []
        for position in (0, 1):
            x[..., 1:] = 0
            x[0, position, 1] = 1.0
            own.append(layer(x)[0, :, 1])
        for i in range(3, LONG):
            exact = [0, 1] if i // BLOCK * BLOCK - 1 <= 0 else [0, 1][:count]
            weights = [math.exp(gates[j] - 0.1 * (i - j)) * (2.0 if count and j in exact else 1.0) for j in (0, 1)]
            close(own[0][i] / own[1][i], torch.tensor(weights[0] / weights[1], dtype=torch.float64))


@torch.no_grad()
def test_the_choice_weighs_gates_against_decays():
    """With half a nat of decay between two tokens, a gate that is larger by 1 is worth two tokens."""
    later, earlier = LONG // BLOCK * BLOCK - 2, LONG // BLOCK * BLOCK - 5
    for lead, expected in ((1.4, later), (1.6, earlier)):
        gates = [-8 + 1e-6] * LONG
        gates[later], gates[earlier] = 0.0, lead
        layer, x = one_head(gates, -0.5, kept_keys=1)
        for sizes in ([LONG], [1] * LONG, [4, 1, LONG - 5]):
            _, state = in_pieces(layer, x, sizes)
            first = LONG // BLOCK * BLOCK - 1
            assert [p for p in state.kept.positions.flatten().tolist() if 0 <= p < first] == [expected]


@torch.no_grad()
def test_a_dropped_key_never_comes_back():
    layer, x = make(**LAYER), tokens(2, LONG)
    before, state = None, layer.init_state(2)
    for i in range(LONG):
        _, state = layer(x[:, i : i + 1], state)
        candidates = positions_of(state, i + 1)
        if before is not None:
            for new, old in zip(*map(chain.from_iterable, (candidates, before)), strict=True):
                assert all(p in old or p >= max(i // BLOCK * BLOCK - WINDOW, 0) for p in new)
        before = candidates


# ---- the layer without


@pytest.mark.parametrize("n", [1, WINDOW, LONG])
def test_rows_with_the_window_alone_are_those_of_a_layer_without(n):
    """Bit for bit, and so are their gradients."""
    layer, x = make(**LAYER), tokens(2, n).requires_grad_()
    results = []
    for count in (KEPT, 0):
        layer.kept_keys = count
        y = layer(x)[:, :WINDOW]
        results.append([y, *torch.autograd.grad(y.sum(), [x, *layer.parameters()])])
    for actual, expected in zip(*results, strict=True):
        if n == LONG:
            close(actual, expected, 1e-12)  # gradients of 0 from the other rows are added
        else:
            assert torch.equal(actual, expected)
    assert torch.equal(results[0][0], results[1][0])


def test_zero_is_a_layer_without():
    layer, x = make(**LAYER | {"kept_keys": 0}), tokens(2, LONG).requires_grad_()
    other = make(**GATED | {"num_kv_heads": 2})
    other.load_state_dict(layer.state_dict())
    y, expected = layer(x), other(x)
    assert torch.equal(y, expected) and layer.init_state(1).kept is None
    for actual, gradient in zip(gradients(y, x, layer).values(), gradients(expected, x, other).values(), strict=True):
        assert torch.equal(actual, gradient)


# ---- the choice


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@torch.no_grad()
def test_of_equal_gates_the_later_key_is_kept(sizes):
    layer, x = tied()
    x = x[:, : sum(sizes)]
    y, state = in_pieces(layer, x, sizes)
    close(y, written_out(layer, x))
    close(layer(x), y)
    assert positions_of(state, sum(sizes)) == expected_positions(layer, x)


@torch.no_grad()
def test_with_gates_of_zero_the_latest_keys_are_kept():
    """With decay too: they have decayed least."""
    first = LONG // BLOCK * BLOCK - WINDOW
    for decay in (False, True):
        layer = FastmaxSelfAttention(C, HEADS, dtype=torch.float64, decay=decay, **LAYER)
        _, state = layer(tokens(1, LONG), layer.init_state(1))
        assert positions_of(state, LONG) == [[list(range(first - KEPT, first))] * 2]


@pytest.mark.parametrize("n", [1, 4, 10, 30])
def test_the_choice_alone(n):
    """Random ranks with ties, against a sort of all candidates."""
    rank = torch.randint(-3, 4, (2, 3, n)).double()
    begin = torch.arange(-(-n // BLOCK)) * BLOCK
    for count in (1, KEPT, 10):
        blocks = kept_keys._WholeBlocks(n, WINDOW, rank.device)
        by_index = kept_keys._candidates_at(rank, begin[None], 0 * begin[None], WINDOW)
        candidates = blocks.candidates(rank)
        for x, y in zip(candidates, by_index, strict=True):
            assert torch.equal(*(z.masked_fill(by_index[0] == -torch.inf, 0) for z in (x, y)))
        index = eager.largest_so_far(*candidates, blocks.earlier, count)
        expected = kept(rank, count, WINDOW)[:, :, ::BLOCK]
        actual = torch.zeros_like(expected)
        for place in (index >= 0).nonzero().tolist():
            actual[(*place[:3], index[tuple(place)])] = True
        assert torch.equal(actual, expected) and torch.equal((index >= 0).sum(-1), expected.sum(-1))


# ---- states


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@torch.no_grad()
def test_states_hold_the_same_keys_on_every_path(sizes):
    layer, x = make(**LAYER), tokens(2, sum(sizes))
    y, state = in_pieces(layer, x, sizes)
    close(y, written_out(layer, x))
    assert positions_of(state, sum(sizes)) == expected_positions(layer, x)
    slots = KEPT + WINDOW + BLOCK
    assert {x.shape[:3] for x in state.kept.tensors().values()} == {(2, 2, slots)}
    recent = range(max(0, sum(sizes) // BLOCK * BLOCK - WINDOW), sum(sizes))
    for head in state.kept.positions.flatten(0, 1).tolist():
        taken = [p for p in head if p >= 0]
        assert len(set(taken)) == len(taken) and set(recent) <= set(taken)


@pytest.mark.parametrize("flush_interval", [1, 2, 50])
@torch.no_grad()
def test_steps_in_place(flush_interval):
    layer, x = make(**LAYER), tokens(2, LONG)
    state = layer.init_state(2, flush_interval=flush_interval)
    addresses = {name: y.data_ptr() for name, y in state.tensors().items()}
    y = torch.cat([layer.step_(x[:, i : i + 1], state) for i in range(LONG)], dim=1)
    close(y, written_out(layer, x))
    assert {name: y.data_ptr() for name, y in state.tensors().items()} == addresses
    assert positions_of(state, LONG) == expected_positions(layer, x)


@pytest.mark.parametrize("step", ["step", "step_"])
@torch.no_grad()
def test_steps_copy_nothing_to_the_host(step):
    """Tensors of the device "meta" have no values, so a branch on one raises an error: steps fit into CUDA graphs."""
    layer = FastmaxSelfAttention(C, HEADS, device="meta", **LAYER)
    state, x = layer.init_state(2), torch.empty(2, 1, C, device="meta")
    y = layer.step_(x, state) if step == "step_" else layer(x, state)[0]
    assert y.shape == x.shape


@pytest.mark.parametrize("normalize", [False, "token"])
def test_states_with_a_buffer(normalize):
    """Steps in place leave tokens in the buffer. All other calls continue from them, with gradients too."""
    layer, prompt = make(**LAYER | {"normalize": normalize}), LONG - 10
    x = tokens(2, LONG).requires_grad_()
    state = layer.init_state(2, flush_interval=5)
    with torch.no_grad():
        y, state = layer(x[:, :prompt], state)
        steps = [layer.step_(x[:, i : i + 1], state) for i in range(prompt, LONG - 3)]
    assert (state.attention.buffered == 2).all()
    step, state = layer(x[:, -3:-2], state)
    last, state = layer(x[:, -2:], state)
    expected = layer(x)
    close(torch.cat([y, *steps, step, last], dim=1), expected)
    weight = torch.randn_like(last)
    actual, exact = (torch.autograd.grad((y[:, -2:] * weight).sum(), x)[0][:, -3:] for y in (last, expected))
    close(actual, exact, 1e-8)


@torch.no_grad()
def test_a_packed_call_of_one_token_leaves_the_states_of_other_sequences():
    """Their rows hold that token as padding. Neither its key nor its decay counts there."""
    layer, x = make(**LAYER), tokens(2, LONG)
    _, state = in_pieces(layer, x[:, :-1], [LONG - 1])
    _, after = layer(x[:1, -1:], state, cu_seqlens=torch.tensor([0, 1, 1], dtype=torch.int32))
    for name, y in state.kept.tensors().items():
        assert torch.equal(after.kept.tensors()[name][1], y[1]), name
    close(layer(x[1:, -1:], after.select([1]))[0], written_out(layer, x[1:])[:, -1:])


@torch.no_grad()
def test_a_prefill_clears_free_slots():
    """Steps leave dropped keys in theirs. So the state after a prefill depends on the tokens alone."""
    layer, x = make(**LAYER), tokens(2, 2 * LONG)
    _, state = in_pieces(layer, x, [1] * LONG + [LONG])
    free = state.kept.positions < 0
    assert free.any() and all((y[free] == (-1 if name == "positions" else 0)).all() for name, y in state.kept.tensors().items())


@torch.no_grad()
def test_batches_of_states_at_different_positions():
    layer, lengths, more = make(**LAYER), [0, 1, BLOCK, BLOCK + 2, 2 * BLOCK + 1, 17], 9
    x = [tokens(1, n + more) for n in lengths]
    states = [in_pieces(layer, y, [n])[1] for y, n in zip(x, lengths, strict=True)]
    state, expected = type(states[0]).cat(states), torch.cat([written_out(layer, y)[:, -more:] for y in x])
    assert state.positions.tolist() == lengths
    new = torch.cat([y[:, -more:] for y in x])
    for sizes in ([more], [1] * more, [1, 5, 3]):
        y, after = in_pieces(layer, new, sizes, state)
        close(y, expected)
        for i, (row, n) in enumerate(zip(x, lengths, strict=True)):
            assert positions_of(after.select([i]), n + more) == expected_positions(layer, row)
    in_place = state.clone()
    close(torch.cat([layer.step_(new[:, i : i + 1], in_place) for i in range(more)], dim=1), expected)


@torch.no_grad()
def test_states_for_another_dtype_and_device():
    layer, x = make(**LAYER), tokens(2, LONG)
    _, state = in_pieces(layer, x[:, :-2], [LONG - 2])
    narrow = state.to(torch.bfloat16)
    of_kept = {name: y.dtype for name, y in narrow.kept.tensors().items()}
    assert of_kept == {"keys": torch.bfloat16, "values": torch.bfloat16, "log_factors": torch.float64, "positions": torch.int64}
    assert narrow.nbytes < state.nbytes and state.to("meta").kept.device.type == "meta"
    y, _ = layer(x[:, -2:], narrow.to(torch.float64))
    close(y, layer(x)[:, -2:], 0.1)


@torch.no_grad()
def test_states_of_other_sizes_do_not_go_together():
    layer, other = make(**LAYER), make(**LAYER | {"kept_keys": KEPT + 1})
    with pytest.raises(ValueError, match=r"states\[1\] must have the kept keys of states\[0\]"):
        type(layer.init_state(1)).cat([layer.init_state(1), other.init_state(1)])
    with pytest.raises(ValueError, match=r"state must have 10 slots of kept keys, for this layer's kept_keys 3 .*, got 11"):
        layer(tokens(1, 2), other.init_state(1))
    plain = make(**GATED | {"num_kv_heads": 2})
    with pytest.raises(ValueError, match="state must have 10 slots of kept keys, .*, got 0"):
        layer(tokens(1, 2), plain.init_state(1))
    with pytest.raises(ValueError, match="state must have 0 slots of kept keys, .*, got 10"):
        plain.step_(tokens(1, 1), layer.init_state(1))
    with pytest.raises(ValueError, match=r"states\[1\] must have the kept keys of states\[0\]"):
        type(layer.init_state(1)).cat([plain.init_state(1), layer.init_state(1)])


@torch.no_grad()
def test_a_batch_of_none():
    layer, x = make(**LAYER), tokens(0, LONG)
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        assert torch.autograd.grad(layer(leaf).sum(), leaf)[0].shape == (0, LONG, C)
    y, state = layer(x[:, 1:], layer.init_state(0))
    assert layer(x).shape == x.shape and y.shape == x[:, 1:].shape
    assert layer.step_(x[:, :1], state).shape == (0, 1, C)


@torch.no_grad()
@pytest.mark.parametrize("bias", [-5.0, -40.0], ids=str)
def test_large_scores_outweigh_strong_decays(bias):
    """No bound on gates applies to the decays of a key: queries repeat the keys of `LONG` tokens before, and score 100."""
    options = OFF | {"input_gate": True, "kept_keys": LONG, "exact_window": 2, "dtype": torch.float64}
    layer = FastmaxSelfAttention(2 * C, 1, head_dim=C, **options)
    weight, one = layer.qkv_proj.weight.zero_(), torch.eye(C)
    weight[:C, :C], weight[C : 2 * C, C:], weight[2 * C :, C:] = one, one, one
    layer.decay_proj = torch.nn.Linear(2 * C, 1, dtype=torch.float64)
    layer.decay_proj.weight.zero_()
    layer.decay_proj.bias.fill_(bias)
    x = torch.randn(1, 2 * LONG, 2 * C, dtype=torch.float64)
    x[0, LONG:, :C] = x[0, :LONG, C:]
    x[..., :C] *= 100.0 * layer.temperature / x[..., :C].square().sum(-1, keepdim=True)
    expected = written_out(layer, x)
    for sizes in ([2 * LONG], [1] * 2 * LONG, [LONG + 3, LONG - 3]):
        close(in_pieces(layer, x, sizes)[0], expected)
    close(layer(x), expected)


@torch.no_grad()
def test_a_decay_of_minus_infinity_resets():
    layer, x = make(**LAYER), tokens(2, LONG)
    layer.decay_proj.bias[0] = -torch.inf
    expected = layer(x)
    layer.decay_proj.bias[0] = -800.0
    assert expected.isfinite().all()
    close(layer(x), expected)
    close(in_pieces(layer, x, [5, 1, LONG - 6])[0], expected)


# ---- gradients

SMALL = {"qk_norm": False, "rope": False, "conv": 0, "output_norm": False, "output_gate": False}


def small(**options) -> FastmaxSelfAttention:
    layer = FastmaxSelfAttention(4, 2, kept_keys=2, exact_window=2, dtype=torch.float64, **SMALL, **options)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(torch.randn_like(weight))
    return layer


@pytest.mark.parametrize("sizes", [None, [7], [4, 1, 2]], ids=str)
def test_gradcheck(sizes):
    layer, x = small(), torch.randn(1, 7, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda y: layer(y) if sizes is None else in_pieces(layer, y, sizes)[0], x)


@pytest.mark.parametrize("sizes", [None, [1] * 5], ids=["whole", "steps"])
def test_second_derivatives(sizes):
    layer, x = small(use_custom_gradient=False, num_kv_heads=1), torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(lambda y: layer(y) if sizes is None else in_pieces(layer, y, sizes)[0], x)


def test_steps_have_second_derivatives_with_a_custom_gradient():
    layer, x, results = small(), torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True), []
    for custom in (True, False):
        layer.use_custom_gradient = custom
        (gradient,) = torch.autograd.grad(in_pieces(layer, x, [1] * 5)[0].cos().sum(), x, create_graph=True)
        results += torch.autograd.grad(gradient.cos().sum(), x)
    close(*results)


def test_forward_mode_and_functional_gradients():
    layer, x = make(**LAYER | {"use_custom_gradient": False}), tokens(2, LONG)
    of_y, direction = torch.randn(2, LONG, C, dtype=x.dtype), torch.randn_like(x)
    _, tangent = torch.func.jvp(layer, (x,), (direction,))
    gradient = torch.func.grad(lambda y: (layer(y) * of_y).sum())(x)
    x.requires_grad_()
    (expected,) = torch.autograd.grad((layer(x) * of_y).sum(), x)
    close(gradient, expected)
    close((tangent * of_y).sum(), (expected * direction).sum(), 1e-8)


@pytest.mark.parametrize("decay", [False, True])
def test_nan_reaches_no_earlier_row(decay):
    """Masked places of the gathered keys hold any keys, later ones too."""
    shapes = {"q": (5,), "k": (5,), "v": (3,), "gate": (), "log_decay": ()}
    given = {name: torch.randn(2, 2, LONG, *d, dtype=torch.float64) for name, d in shapes.items()}
    given["log_decay"] = -given["log_decay"].exp() if decay else None
    options, results = kept_keys.KeptOptions(LONG, WINDOW, 0.5, True), []
    for last in (1.0, torch.nan):
        tensors = {name: x.clone().requires_grad_() for name, x in given.items() if x is not None}
        with torch.no_grad():
            for name, x in tensors.items():
                if name not in ("q", "log_decay"):  # which are of the last query too
                    x[:, :, -1] = last
        o, lse = kept_keys.attend(kept_keys.LayerTokens(**{"log_decay": None} | tensors), options)
        seen = lse > -torch.inf
        assert seen[0, 0].tolist() == [i >= WINDOW for i in range(LONG)]
        results.append([o, lse, *torch.autograd.grad(o.cos().sum() + lse[seen].sum(), list(tensors.values()))])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected) and not actual.isnan().any()


@torch.no_grad()
def test_masked_places_have_gates_of_zero(monkeypatch):
    """Like their keys and values: a kernel may compute with what it masks."""
    layer, x, calls = make(**LAYER), tokens(1, LONG), []
    attention = kept_keys.flash_attention
    monkeypatch.setattr(kept_keys, "flash_attention", lambda *args, **given: calls.append(given) or attention(*args, **given))
    layer(x)
    (options,) = calls
    masked = ~options["attention_mask"].unsqueeze(1).expand_as(options["log_input_gate"])
    assert masked.any() and not options["log_input_gate"][masked].any()


def test_nan_in_a_packed_sequence_reaches_no_other_with_a_state():
    layer = FastmaxSelfAttention(4, 1, dtype=torch.float64, **LAYER | {"num_kv_heads": 1, "conv": 0, "exact_window": 1})
    x = torch.randn(1, 9, 4, dtype=torch.float64)
    x[:, 4:] = torch.nan
    x.requires_grad_()
    y, _ = layer(x, layer.init_state(2), cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32))
    (gradient,) = torch.autograd.grad(y[:, :4].sum(), x)
    assert y[:, :4].isfinite().all() and gradient[:, :4].isfinite().all()


def test_steps_have_second_derivatives_by_the_state_alone():
    layer, x = small().requires_grad_(False), torch.randn(1, 4, 4, dtype=torch.float64, requires_grad=True)

    def gradient(layer):
        _, state = in_pieces(layer, x[:, :3], [1, 1, 1])
        y, _ = layer(x[:, 3:].detach(), state)
        (first,) = torch.autograd.grad(y.cos().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = copy.deepcopy(layer)
    expected.use_custom_gradient = False
    close(gradient(layer), gradient(expected))


# ---- dtypes, padding, packed sequences and compilers


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_bfloat16(autocast):
    """The input gate stays exact, so the choice does: its product has one term."""
    layer, x = tied()
    x = x.bfloat16().double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(weight.bfloat16())
    expected = written_out(layer, x)
    layer = layer.float() if autocast else layer.bfloat16()
    x = x.float() if autocast else x.bfloat16()
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
        (pieces, state) = in_pieces(layer, x.detach(), [4, 1, 1, LONG - 6])
    assert y.dtype == torch.bfloat16 and state.kept.keys.dtype == (torch.float32 if autocast else torch.bfloat16)
    for actual in (y, pieces):
        assert (actual.double() - expected).norm() < 0.05 * expected.norm()
    y.float().sum().backward()
    assert x.grad.isfinite().all() and layer.input_gate_proj.weight.grad.any()


def test_packed_sequences_of_many_blocks():
    lengths = [LONG, 0, 1, 2 * BLOCK + 1, LONG + 3]
    layer, x = make(**LAYER), tokens(1, sum(lengths)).requires_grad_()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    y = layer(x, cu_seqlens=cu_seqlens)
    expected = torch.cat([written_out(layer, part) for part in x.split(lengths, dim=1) if part.shape[1] > 0], dim=1)
    close(y, expected)
    for actual, gradient in zip(gradients(y, x, layer).values(), gradients(expected, x, layer).values(), strict=True):
        close(actual, gradient, 1e-8)


def test_compiles_with_many_blocks(fresh_dynamo):
    layer, x = make(**LAYER), tokens(2, LONG).requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, expected = compiled(x), layer(x)
    close(y, expected)
    for actual, gradient in zip(gradients(y, x, layer).values(), gradients(expected, x, layer).values(), strict=True):
        close(actual, gradient, 1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks_of_256_against_float64(dtype, device, monkeypatch):
    """Whole, packed and in parts, with kernels on a GPU. Gates are the same in each dtype, so the choice is."""
    monkeypatch.setattr(kept_keys, "_BLOCK", 256)
    options = {"num_kv_heads": 2, "head_dim": 64, "input_gate": True, "kept_keys": 100}
    layer = FastmaxSelfAttention(64, HEADS, device=device, dtype=dtype, **options)
    x, of_y = (torch.randn(1, 900, 64, device=device, dtype=dtype) for _ in range(2))
    with torch.no_grad():
        layer.input_gate_proj.weight[:, 0] = 1.0
        x[..., 0] = torch.randint(-1, 2, x.shape[:2])
    exact, x_exact = copy.deepcopy(layer).cpu().double(), x.cpu().double().requires_grad_()
    limit = 0.08 if dtype == torch.bfloat16 else 0.01
    x.requires_grad_()
    for ends in ([0, 900], [0, 300, 301, 900]):
        cu_seqlens = torch.tensor(ends, dtype=torch.int32) if len(ends) > 2 else None
        y = layer(x, cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(device))
        expected = exact(x_exact, cu_seqlens=cu_seqlens)
        assert relative(y.cpu(), expected) < limit
        weights = [[z.qkv_proj.weight, z.out_proj.weight, z.input_gate_proj.weight] for z in (layer, exact)]
        actual = torch.autograd.grad(y, [x, *weights[0]], of_y)
        expected = torch.autograd.grad(expected, [x_exact, *weights[1]], of_y.cpu().double())
        for gradient, of_exact in zip(actual, expected, strict=True):
            assert relative(gradient.cpu(), of_exact) < limit
    with torch.no_grad():
        pieces, state = in_pieces(layer, x[:, :800], [500, 1, 299])
        steps = [layer.step_(x[:, i : i + 1], state) for i in range(800, 900)]
        assert relative(torch.cat([pieces, *steps], dim=1).cpu(), exact(x_exact)) < limit


def test_one_training_graph_for_all_lengths(fresh_dynamo):
    layer = make(**LAYER)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for n in (17, 29, 40):
        x = tokens(2, n).requires_grad_()
        gradients = [torch.autograd.grad(function(x).sin().sum(), x)[0] for function in (compiled, layer)]
        close(*gradients)
        graphs.append(counter.frame_count)
    assert graphs[-1] == graphs[0] > 0


@pytest.mark.cuda
def test_compiled_training_on_a_gpu(monkeypatch, fresh_dynamo):
    """The compiled code, with its own kernels around ours, computes what the layer does, in training and in inference.

    In one process, since PyTorch 2.11's compiler failed on an index only after it had compiled another length.
    """
    monkeypatch.setattr(kept_keys, "_BLOCK", 256)
    layer = FastmaxSelfAttention(512, 8, kept_keys=256, device="cuda")
    for n in (256, 1024, 8192):
        torch.compiler.reset()
        x = torch.randn(4, n, 512, device="cuda", requires_grad=True)
        results = []
        for function in (layer, torch.compile(layer, fullgraph=True)):
            with torch.autocast("cuda", torch.bfloat16):
                y = function(x)
                with torch.no_grad():  # another graph
                    inferred = function(x)
            results.append([y, inferred, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])])
        for actual, expected in zip(*results, strict=True):
            assert relative(actual, expected.double()) < 0.05


# ---- refusals


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"kept_keys": -1}, ValueError, "kept_keys must be at least 0, got -1"),
        ({"kept_keys": 2.0}, TypeError, r"kept_keys must be an int, got 2\.0"),
        ({"kept_keys": True}, TypeError, "kept_keys must be an int, got True"),
        ({"kept_keys": 2, "input_gate": False}, ValueError, "kept_keys needs an input gate.* got 2 with input_gate=False"),
        ({"kept_keys": 2, "exact_window": 0}, ValueError, "kept_keys needs an exact_window of at least 1, got 2"),
        (
            {"kept_keys": 2, "input_gate": None, "attention": "softmax", "exact_window": None},
            ValueError,
            'kept_keys needs attention="fastmax", got 2 with "softmax"',
        ),
        (
            {"kept_keys": 2, "input_gate": False, "attention": "softmax", "exact_window": None},
            ValueError,
            'kept_keys needs attention="fastmax", got 2 with "softmax"',
        ),
    ],
    ids=str,
)
def test_refused_options(options, error, message):
    with pytest.raises(error, match=message):
        FastmaxSelfAttention(C, HEADS, **GATED | options)


def test_input_gates_come_with_kept_keys():
    layers = [FastmaxSelfAttention(C, HEADS, kept_keys=kept, exact_window=4) for kept in (2, 0)]
    assert [layer.input_gate_proj is not None for layer in layers] == [True, False]


def test_attributes():
    layer, x = make(**LAYER), tokens(1, LONG)
    y, gate = layer(x), layer.input_gate_proj
    for name, value, message in (
        ("exact_window", 0, "kept_keys needs an exact_window of at least 1, got 3 with exact_window 0"),
        ("input_gate_proj", None, "kept_keys needs an input gate"),
        ("attention", "softmax", 'input_gate_proj must be None before attention is set to "softmax"'),
        ("kept_keys", -1, "kept_keys must be at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            setattr(layer, name, value)
    assert torch.equal(layer(x), y) and layer.input_gate_proj is gate and "kept_keys=3" in repr(layer)
    layer.kept_keys = 0
    layer.input_gate_proj = None
    with pytest.raises(ValueError, match="kept_keys needs an input gate, which chooses the keys, got 3"):
        layer.kept_keys = KEPT
    layer.input_gate_proj = gate
    layer.exact_window = 0
    with pytest.raises(ValueError, match="kept_keys needs an exact_window of at least 1, got 3"):
        layer.kept_keys = KEPT
    layer.exact_window = WINDOW
    layer.kept_keys = KEPT
    assert torch.equal(layer(x), y)


def test_kept_keys_are_a_state_of_their_own():
    state = KeptKeys.empty(2, 3, 4, 5, torch.bfloat16, None, 6, 7)
    assert state.dtype == torch.bfloat16 and state.device.type == "cpu" and (state.positions == -1).all()
    assert state.values.shape == (2, 3, kept_keys.slots_of(6, 7), 5) == (2, 3, 6 + 7 + BLOCK, 5)
    assert state.repeat(2).keys.shape[0] == 4 and KeptKeys.cat([state, state]).log_factors.dtype == torch.float64
    with pytest.raises(ValueError, match=r"states\[1\] must have the shape of kept values of states\[0\], \(3, 16, 5\)"):
        KeptKeys.cat([state, KeptKeys.empty(2, 3, 4, 8, torch.bfloat16, None, 6, 7)])


def test_gradient_of_the_state_alone():
    """Rows of q have no gradient then, and those of k have one."""
    layer, x = make(**LAYER, normalize="token"), tokens(1, 6).requires_grad_()
    _, state = layer(x, layer.init_state(1))
    (gradient,) = torch.autograd.grad(state.kept.keys.sum(), x)
    assert gradient.any()


@pytest.mark.parametrize("seed", range(30))
@torch.no_grad()
def test_state_of_parts_is_that_of_the_whole(seed):
    """Parts of a sequence leave what all its tokens leave, also where gates are equal."""
    torch.manual_seed(seed)
    options = kept_keys.KeptOptions(seed % 4 + 1, seed % 5 + 1, 1.0, True)
    sizes = torch.randint(0, 9, (seed % 3 + 2,)).tolist()
    n = sum(sizes)
    q, k, v = (torch.randn(2, 2, n, 3, dtype=torch.float64) for _ in range(3))
    gate = torch.randint(0, seed % 3 + 1, (2, 2, n)).double()
    log_decay = -torch.rand(2, 2, n).double() if seed % 2 else None
    whole = kept_keys.LayerTokens(q, k, v, gate, log_decay)
    empty = KeptKeys.empty(2, 2, 3, 3, torch.float64, None, options.kept, options.window)
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    left = []
    for begin, size in zip(begins, sizes, strict=True):
        part = whole.map(lambda x, begin=begin, size=size: x[:, :, begin : begin + size])
        left.append(kept_keys.state_of_part(part, begin, options))
    got = kept_keys.state_of_parts(left, n, options)
    expected = empty if n == 0 else kept_keys.prefill(whole, empty, torch.zeros(2).long(), None, options)[2]
    for state in (got, expected):
        order = state.positions.argsort(dim=-1, stable=True)
        for name, x in state.tensors().items():
            setattr(state, name, x.gather(2, eager.slots_like(order, x)))
    close(got.tensors(), expected.tensors())


def test_compiled_code_views_whole_blocks(monkeypatch):
    """Exported programs index the queries of blocks, which copies them; compiled ones must not."""
    monkeypatch.setattr(kept_keys, "_IndexedBlocks", None)
    layer, x = make(**LAYER), tokens(2, LONG)
    close(torch.compile(layer, backend="eager")(x), layer(x))


@torch.no_grad()
def test_exported_with_any_number_of_tokens():
    """An exported program takes any number of tokens above the block size and the window, if its example had so many."""
    layer = make(**LAYER)
    dynamic = {"x": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(layer, (tokens(3, LONG),), dynamic_shapes=dynamic).module()
    for batch, n in ((2, WINDOW + 1), (2, 2 * BLOCK), (3, 3 * BLOCK), (5, 3 * BLOCK + 1), (2, 100)):
        x = tokens(batch, n)
        close(program(x), layer(x))
