"""States of `FastmaxSelfAttention` against the layer's call on each sequence alone: padding wherever it stands, packed
sequences, states joined by `cat`, and how a `KeyValueCache` grows."""

import copy
import io
import math
import threading
from itertools import accumulate

import pytest
import torch
from common import in_turn, relative
from test_self_attention import FASTMAX, GATED, KEPT, SOFTMAX, C, gradients, make, small_blocks  # noqa: F401
from torch.utils import _pytree as pytree

import fastmax
from fastmax import FastmaxSelfAttention, SelfAttentionState
from fastmax.decoding import DecodeState
from fastmax.nn.key_value_cache import KeyValueCache, Memory

LAYERS = {
    "fastmax": FASTMAX | {"num_kv_heads": 2},
    "p1": FASTMAX | {"p": 1},
    "no window": {"exact_window": 0},
    "no decay": FASTMAX | {"decay": False},
    "no conv": FASTMAX | {"conv": 0},
    "input gate": GATED | {"num_kv_heads": 2},
    "input gate, no window": {"exact_window": 0, "input_gate": True},
    "kept keys": KEPT | {"num_kv_heads": 2},
    "softmax": SOFTMAX | {"num_kv_heads": 2},
    "softmax, no decay, no conv": SOFTMAX | {"decay": False, "conv": 0},
    "softmax, window": SOFTMAX | {"window": 4},
    "softmax, window of one": SOFTMAX | {"window": 1},
}
by_layer = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
SIDES = ("right", "left", "middle")
# Real tokens of each of four sequences in one call after the other, and the tokens of the call.
CALLS = [((5, 13, 0, 8), 13), ((3, 0, 7, 1), 7), ((1, 0, 1, 1), 1), ((1, 1, 0, 1), 1), ((1,) * 4, 1), ((0, 2, 6, 1), 6)]
CALLS += [((1, 0, 1, 1), 1)] * 3


def mask_of(counts, n, side):
    mask = torch.zeros(len(counts), n, dtype=torch.bool)
    for row, count in zip(mask, counts, strict=True):
        places = {"right": torch.arange(count), "left": torch.arange(n - count, n), "middle": torch.randperm(n)[:count]}
        row[places[side]] = True
    return mask


def close(actual, expected, limit=1e-9):
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit)


class Sequences:
    """Inputs and outputs of each sequence, to compare with the layer's call on it alone."""

    def __init__(self, count):
        self.x, self.y = ([[] for _ in range(count)] for _ in range(2))

    def add(self, i, x, y):
        self.x[i].append(x)
        self.y[i].append(y)

    def add_rows(self, x, y, mask):
        for i, real in enumerate(mask):
            self.add(i, x[i, real], y[i, real])

    def check(self, layer, state, limit=1e-9):
        for x, y, position in zip(self.x, self.y, state.positions.tolist(), strict=True):
            x = torch.cat(x)
            assert position == len(x)
            close(torch.cat(y), layer(x.unsqueeze(0)).squeeze(0), limit)


# ---- padding


@in_turn("side")
@torch.no_grad()
@by_layer
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("steps", ["step", "step_", "step_ that buffers"])
def test_padded_sequences_continue_as_each_alone(steps, side, options):
    """Padding in any call has no effect, whatever it holds. Calls of one token run in place too."""
    softmax = "attention" in options
    if softmax and steps != "step":
        pytest.skip("the state of a softmax layer grows")
    layer = make(**options)
    state = layer.init_state(4, **({"flush_interval": 3} if "buffers" in steps else {}))
    sequences = Sequences(4)
    for counts, n in CALLS:
        mask = mask_of(counts, n, side)
        x = torch.randn(4, n, C, dtype=torch.float64).masked_fill(~mask.unsqueeze(-1), torch.nan)
        if n == 1 and steps != "step":
            y = layer.step_(x, state, attention_mask=mask)
        else:
            y, state = layer(x, state, attention_mask=mask)
        sequences.add_rows(x, y, mask)
    sequences.check(layer, state)


@torch.no_grad()
@by_layer
def test_right_padded_prompts_of_60_tokens(options):
    """Prompts are padded as by a tokenizer, in float32 with the default window. Steps without a mask follow."""
    layer = FastmaxSelfAttention(C, 4, **{name: x for name, x in options.items() if name != "exact_window"})
    state, sequences = layer.init_state(3), Sequences(3)
    mask = mask_of((5, 37, 60), 60, "right")
    x = torch.randn(3, 60, C)
    y, state = layer(x, state, attention_mask=mask)
    sequences.add_rows(x, y, mask)
    for _ in range(3):
        x = torch.randn(3, 1, C)
        y, state = layer(x, state)
        sequences.add_rows(x, y, torch.ones(3, 1, dtype=torch.bool))
    sequences.check(layer, state, 2e-5)


@torch.no_grad()
@by_layer
def test_a_masked_token_leaves_the_state(options):
    layer, real = make(**options), torch.tensor([[True], [False]])
    _, state = layer(torch.randn(2, 9, C, dtype=torch.float64), layer.init_state(2))
    x = torch.randn(2, 5, C, dtype=torch.float64)
    _, after = layer(x[:, :1], state, attention_mask=real)
    assert after.positions.tolist() == [10, 9]
    close(layer(x[1:, 1:], after.select([1]))[0], layer(x[1:, 1:], state.select([1]))[0])
    if "attention" not in options:
        for name, tensor in after.tensors().items():
            assert torch.equal(tensor[1], state.tensors()[name][1]), name


@by_layer
@pytest.mark.parametrize("side", SIDES)
def test_gradients_through_padded_calls(side, options):
    """Gradients of x, of every weight and through the state are right, and padding gets none."""
    layer, masks = make(**options), [mask_of((7, 3, 9), 9, side), mask_of((1, 4, 2), 5, side)]
    x = torch.randn(3, 14, C, dtype=torch.float64, requires_grad=True)
    mask, state, outputs = torch.cat(masks, dim=1), layer.init_state(3), []
    for part, real in zip(x.split((9, 5), dim=1), masks, strict=True):
        y, state = layer(part, state, attention_mask=real)
        outputs.append(y)
    y = torch.where(mask.unsqueeze(-1), torch.cat(outputs, dim=1), 0)
    alone = [torch.zeros_like(row).index_put((real,), layer(row[None, real])[0]) for row, real in zip(x, mask, strict=True)]
    expected = torch.stack(alone)
    close(y, expected)
    actual, expected = gradients(y, x, layer), gradients(expected, x, layer)
    assert not actual["x"][~mask].any()
    for name, gradient in expected.items():
        close(actual[name], gradient, 1e-8)


@by_layer
@pytest.mark.parametrize("side", SIDES)
def test_without_a_state_the_rule_is_the_same(side, options):
    layer, mask, x = make(**options), mask_of((5, 13, 1), 13, side), torch.randn(3, 13, C, dtype=torch.float64)
    y = layer(x, attention_mask=mask)
    for i, real in enumerate(mask):
        close(y[i, real], layer(x[i : i + 1, real])[0])


@in_turn("side, bad")
@by_layer
@pytest.mark.parametrize("side, bad", [("right", math.nan), ("left", math.inf), ("middle", math.nan)])
@pytest.mark.parametrize("given", ["no state", "state", "packed", "packed state"])
def test_what_padding_holds_does_not_reach_gradients(given, bad, side, options):
    """Gradients of the weights and of x have the bits of a call with zeros at padding."""
    layer, b = make(bias=True, **options), 1 if "packed" in given else 3
    mask, x = mask_of((7, 3, 9)[:b], 9, side), torch.randn(b, 9, C, dtype=torch.float64)
    rest = {"attention_mask": mask}
    if b == 1:
        rest["cu_seqlens"] = torch.tensor([0, 4, 9], dtype=torch.int32)
    actual, expected = {}, {}
    for found, filling in ((actual, bad), (expected, 0.0)):
        leaf = torch.where(mask.unsqueeze(-1), x, filling).requires_grad_()
        state = layer.init_state(2 if b == 1 else b) if "state" in given else None
        y = layer(leaf, state, **rest)
        y = (y if state is None else y[0])[mask]
        grads = torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])
        found |= dict(zip(["x", *dict(layer.named_parameters())], grads, strict=True))
    for name, gradient in expected.items():
        assert gradient.isfinite().all() and torch.equal(actual[name], gradient), name


@torch.no_grad()
def test_padded_calls_compile(fresh_dynamo):
    layer, mask = make(**LAYERS["softmax, window"]), mask_of((5, 9), 9, "right")
    x, state = torch.randn(2, 9, C, dtype=torch.float64), layer.init_state(2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(*(f(x, state, attention_mask=mask) for f in (compiled, layer)), strict=True):
        if isinstance(actual, torch.Tensor):
            close(actual[mask], expected[mask])
        else:
            close(actual.tensors(), expected.tensors())


# ---- packed


@by_layer
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_packed_sequences_continue(padded, options):
    """Several packed calls, with empty sequences too, are followed by calls of all sequences as a batch."""
    layer, sequences = make(**options), Sequences(3)
    state = layer.init_state(3)
    for lengths in ((70, 0, 3), (2, 5, 0), (0, 0, 0), (1, 1, 20)):
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        x = torch.randn(1, sum(lengths), C, dtype=torch.float64)
        mask = torch.rand(1, sum(lengths)) > 0.4 if padded else torch.ones(1, sum(lengths), dtype=torch.bool)
        y, state = layer(x, state, cu_seqlens=cu_seqlens, attention_mask=mask if padded else None)
        for i, (own, out, real) in enumerate(zip(*(z[0].split(lengths) for z in (x, y, mask)), strict=True)):
            sequences.add(i, own[real], out[real])
    for n in (1, 4):
        x, mask = torch.randn(3, n, C, dtype=torch.float64), torch.ones(3, n, dtype=torch.bool)
        y, state = layer(x, state)
        sequences.add_rows(x, y, mask)
    sequences.check(layer, state)


@by_layer
def test_gradients_through_packed_states(options):
    layer, lengths = make(**options), (6, 1, 3)
    x = torch.randn(1, 20, C, dtype=torch.float64, requires_grad=True)
    cu_seqlens, state, outputs = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), layer.init_state(3), []
    for part in x.split(10, dim=1):
        y, state = layer(part, state, cu_seqlens=cu_seqlens)
        outputs.append(y)
    first, second = (part[0].split(lengths) for part in x.split(10, dim=1))
    alone = [layer(torch.cat([a, b]).unsqueeze(0))[0].split([len(a), len(b)]) for a, b in zip(first, second, strict=True)]
    expected = torch.cat([torch.cat([y[i] for y in alone]) for i in range(2)]).unsqueeze(0)
    y = torch.cat(outputs, dim=1)
    close(y, expected)
    actual, expected = gradients(y, x, layer), gradients(expected, x, layer)
    for name, gradient in expected.items():
        close(actual[name], gradient, 1e-8)


# ---- cat


@torch.no_grad()
@by_layer
@pytest.mark.parametrize("flush_interval", [1, 3])
def test_prompts_that_were_read_apart_go_on_together(flush_interval, options):
    """The joined states have different numbers of buffered tokens."""
    softmax = "attention" in options
    if softmax and flush_interval > 1:
        pytest.skip("a softmax layer refuses a buffer")
    layer, sequences, states = make(**options), Sequences(4), []
    for i, (lengths, batch) in enumerate([((2, 1, 1), 1), ((9, 1), 2), ((1, 1), 1)]):
        state = layer.init_state(batch, **({} if softmax else {"flush_interval": flush_interval}))
        for n in lengths:
            x = torch.randn(batch, n, C, dtype=torch.float64)
            if n == 1 and not softmax:
                y = layer.step_(x, state)
            else:
                y, state = layer(x, state)
            for entry in range(batch):
                sequences.add((0, 1, 3)[i] + entry, x[entry], y[entry])
        states.append(state)
    state = SelfAttentionState.cat(states)
    for n in (1, 1, 1, 1, 5):
        x = torch.randn(4, n, C, dtype=torch.float64)
        if n == 1 and not softmax:
            y = layer.step_(x, state)
        else:
            y, state = layer(x, state)
        sequences.add_rows(x, y, torch.ones(4, n, dtype=torch.bool))
    sequences.check(layer, state)


def test_cat_of_decode_states():
    def after(n, batch=1, **options):
        q, k, v = (torch.randn(batch, 2, n, 4, dtype=torch.float64) for _ in range(3))
        state = fastmax.decoding.init_state(batch, 2, 4, dtype=torch.float64, **({"exact_window": 3} | options))
        return fastmax.decoding.prefill(q, k, v, state)[1]

    states = [after(5), after(2, 2)]
    state = DecodeState.cat(states)
    assert state.tokens == 5
    for name, x in state.tensors().items():
        assert torch.equal(x, torch.cat([getattr(other, name) for other in states])), name
    for others, error, message in (
        ([], ValueError, "states must hold at least one DecodeState, got none"),
        ([states[0], states[0].kv_state], TypeError, r"states\[1\] must be a DecodeState, got"),
        ([states[0], after(2, exact_window=4)], ValueError, r"states\[1\] must have the exact_window of states\[0\], 3, got 4"),
        ([states[0], after(2, temperature=2.0)], ValueError, r"states\[1\] must have the score of states\[0\]"),
        ([states[0], states[1].to(torch.float32)], ValueError, r"states\[1\] must have the dtype of states\[0\]"),
        ([states[0], states[1].to("meta")], ValueError, r"states\[1\] must have the device of states\[0\]"),
        (
            [states[0], after(2, flush_interval=2)],
            ValueError,
            r"states\[1\] must have the flush_interval of states\[0\], 1, got 2",
        ),
    ):
        with pytest.raises(error, match=message):
            DecodeState.cat(others)


def test_cat_of_layer_states_that_differ():
    first = make(**FASTMAX).init_state(1)
    for other, message in (
        (make(**SOFTMAX).init_state(1), "kind of attention of states.0., 'DecodeState', got 'KeyValueCache'"),
        (make(conv=0, **FASTMAX).init_state(1), "shape of recent of states.0., .3, 72., got None"),
        (make(exact_window=5).init_state(1), "exact_window of states.0., 4, got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            SelfAttentionState.cat([first, other])
    softmax = make(conv=0, num_kv_heads=2, **SOFTMAX).init_state(1)
    with pytest.raises(ValueError, match="key/value heads of states.0., 2, got 4"):
        SelfAttentionState.cat([softmax, make(conv=0, **SOFTMAX).init_state(1)])
    states = [make(window=window, **SOFTMAX).init_state(1) for window in (4, None)]
    with pytest.raises(ValueError, match="window of states.0., 4, got None"):
        SelfAttentionState.cat(states)


def through_save(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def through_pytree(state):
    return pytree.tree_map(lambda x: x, state)


COPIES = {
    "itself": lambda state: state,
    "clone": SelfAttentionState.clone,
    "select": lambda state: state.select([1, 0]),
    "cat": lambda state: SelfAttentionState.cat([state, state]).select([0, 1]),
    "to": lambda state: state.to(torch.float64),
    "save": through_save,
    "deepcopy": copy.deepcopy,
    "pytree": through_pytree,
    "float32 and back": lambda state: state.to(torch.float32).to(torch.float64),
}


@torch.no_grad()
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("made, then", [(4, 12), (4, None), (12, 4), (None, 4)])
def test_a_state_of_another_window_is_refused(made, then, grad):
    """Such a state holds other tokens than the layer needs. It remembers the window that it was made with."""
    layer, x = make(**SOFTMAX, window=made), torch.randn(2, 20, C, dtype=torch.float64)
    mask = mask_of((15, 9), 15, "middle")
    with torch.set_grad_enabled(grad):
        states = [layer.init_state(2), layer(x[:, :15], layer.init_state(2))[1]]
        states += [layer(x[:, :15], layer.init_state(2), attention_mask=mask)[1]]
        cu_seqlens = torch.tensor([0, 5, 15], dtype=torch.int32)
        states += [layer(x[:1, :15], layer.init_state(2), cu_seqlens=cu_seqlens)[1]]
        states += [layer(x[:, 15:16], states[1])[1]]
    for name, duplicate in COPIES.items():
        for state in states:
            layer.window = made
            if grad and name == "deepcopy":  # PyTorch's, of leaves alone
                state = state.detach()
            other = duplicate(state)
            layer(x[:, 15:], other)
            layer.window = then
            with pytest.raises(ValueError, match=f"state must have this layer's window {then}, got {made}"):
                layer(x[:, 15:], other)


@pytest.mark.parametrize("kind", [SelfAttentionState, DecodeState])
def test_cat_of_what_is_no_sequence(kind):
    state = make(**FASTMAX).init_state(1)
    for given in (state, state.attention, 3, None):
        with pytest.raises(TypeError, match=f"states must be a sequence of {kind.__name__}, got "):
            kind.cat(given)
    assert SelfAttentionState.cat(x for x in (state, state)).positions.shape == (2,)


# ---- how a cache grows

BY_WINDOW = pytest.mark.parametrize("window", [None, 20])


def cache_of(state):
    return state.attention


@torch.no_grad()
@BY_WINDOW
def test_a_cache_copies_its_tokens_seldom(window):
    """Addresses change only when the cache doubles, and the memory of a window is bounded."""
    layer = make(**SOFTMAX, window=window)
    x, state, addresses = torch.randn(1, 200, C, dtype=torch.float64), layer.init_state(1), set()
    outputs = []
    for token in x.split(1, dim=1):
        y, state = layer(token, state)
        outputs.append(y)
        storage = cache_of(state).keys.untyped_storage()
        addresses.add(storage.data_ptr())
        if window is not None:
            assert storage.nbytes() <= 2 * window * 24 * 8
        held = 2 * (cache_of(state).keys.shape[2] + 16) * 24 * 8
        assert storage.nbytes() <= held
    close(torch.cat(outputs, dim=1), layer(x))
    kept = [cache_of(state).keys, cache_of(state).mask]
    assert kept[0].shape[2] == kept[1].shape[1] == (200 if window is None else 19)


@torch.no_grad()
def test_bytes_that_are_copied_grow_with_the_tokens():
    """The test counts the elements that copies write."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Written(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function.name() in ("aten::copy_", "aten::cat", "aten::clone"):
                self.elements += out.numel()
            return out

    cache, (k, v) = KeyValueCache.empty(1, 4, 6, 6, torch.float64, "cpu"), torch.randn(2, 1, 4, 1, 6, dtype=torch.float64)
    with Written() as written:
        for _ in range(512):
            cache = cache.and_then(KeyValueCache(k, v, torch.ones(1, 1, dtype=torch.bool), k.new_zeros(1, 4, 1)))
    # A token has 2 * 24 elements of keys and values, 4 decays and one of the mask; each is written less than four times.
    assert written.elements < 4 * 512 * (2 * 24 + 4 + 1)


@BY_WINDOW
@pytest.mark.parametrize("grad", [False, True])
def test_two_continuations_of_one_state(window, grad):
    """Neither continuation overwrites the tokens of the other or of the state."""
    layer = make(**SOFTMAX, window=window)
    x = torch.randn(3, 1, 30, C, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        state = layer.init_state(1)
        for token in x[0, :, :25].split(1, dim=1):
            _, state = layer(token, state)
        before = {name: y.clone() for name, y in state.tensors().items()}
        branches, outputs = [state, state, state], [[], [], []]
        for i in range(25, 30):
            for b in range(3):
                y, branches[b] = layer(x[b, :, i : i + 1], branches[b])
                outputs[b].append(y)
        for b in range(3):
            whole = torch.cat([x[0, :, :25], x[b, :, 25:]], dim=1)
            close(torch.cat(outputs[b], dim=1), layer(whole)[:, 25:])
        assert all(torch.equal(y, before[name]) for name, y in state.tensors().items())


@BY_WINDOW
def test_a_cache_does_not_write_over_what_a_backward_needs(window):
    """The state is made without gradients, one call records, and later ones do not. If they shared memory, the backward would
    raise an error."""
    layer = make(**SOFTMAX, window=window)
    x = torch.randn(1, 30, C, dtype=torch.float64)
    with torch.no_grad():
        state = layer.init_state(1)
        for token in x[:, :20].split(1, dim=1):
            _, state = layer(token, state)
    y, recorded = layer(x[:, 20:25], state)
    with torch.no_grad():
        for token in x[:, 25:].split(1, dim=1):
            _, state = layer(token, state)
            _, recorded = layer(token, recorded)
    y.square().sum().backward()
    actual = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    with torch.no_grad():
        _, state = layer(x[:, :20], layer.init_state(1))
    layer(x[:, 20:25], state)[0].square().sum().backward()
    for gradient, parameter in zip(actual, layer.parameters(), strict=True):
        close(gradient, parameter.grad)


def test_a_cache_of_inference_mode_goes_on_outside():
    layer, x = make(**SOFTMAX), torch.randn(1, 9, C, dtype=torch.float64)
    with torch.inference_mode():
        state = layer.init_state(1)
        for token in x[:, :5].split(1, dim=1):
            _, state = layer(token, state)
    with torch.no_grad():
        for token in x[:, 5:].split(1, dim=1):
            y, state = layer(token, state)
        close(y, layer(x)[:, 8:])


@torch.no_grad()
def test_a_copy_of_a_cache_holds_its_tokens_alone():
    layer, x = make(**SOFTMAX), torch.randn(1, 40, C, dtype=torch.float64)
    state = layer.init_state(1)
    for token in x[:, :20].split(1, dim=1):
        _, state = layer(token, state)
    assert cache_of(state).keys.untyped_storage().nbytes() > cache_of(state).keys.nbytes
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    leaves, spec = pytree.tree_flatten(state)
    expected = layer(x)[:, 20:]
    for other in (torch.load(file), copy.deepcopy(state), state.clone()):
        assert cache_of(other).keys.untyped_storage().nbytes() == cache_of(other).keys.nbytes
        close(layer(x[:, 20:], other)[0], expected)
    close(layer(x[:, 20:], pytree.tree_unflatten(leaves, spec))[0], expected)


@BY_WINDOW
def test_no_tokens_of_packed_sequences_give_another_cache(window):
    layer, x = make(**SOFTMAX, window=window), torch.randn(2, 3, C, dtype=torch.float64)
    _, state = layer(x, layer.init_state(2))
    y, after = layer(x[:1, :0], state, cu_seqlens=torch.zeros(3, dtype=torch.int32))
    assert y.shape == (1, 0, C) and after.attention is not state.attention
    for name, tensor in after.tensors().items():
        before = state.tensors()[name]
        assert torch.equal(tensor, before) and tensor.data_ptr() != before.data_ptr(), name


@torch.no_grad()
def test_threads_that_continue_one_state(monkeypatch):
    """The second thread comes while the first looks for space. Only one of them may get the space behind the state."""
    layer, x = make(**SOFTMAX), torch.randn(1, 7, C, dtype=torch.float64)
    _, state = layer(x[:, :5], layer.init_state(1))
    continued, threads, capacity = {}, [], Memory.capacity.fget

    def go_on(place):
        with torch.no_grad():
            continued[place] = layer(x[:, place : place + 1], state)[1]

    def and_another_thread(memory):
        if not threads:
            threads.append(threading.Thread(target=go_on, args=(6,)))
            threads[0].start()
            threads[0].join(timeout=1.0)  # it waits where places are taken one after the other
        return capacity(memory)

    monkeypatch.setattr(Memory, "capacity", property(and_another_thread))
    go_on(5)
    threads[0].join()
    monkeypatch.undo()
    for place, actual in continued.items():
        alone = state.clone()
        _, expected = layer(x[:, place : place + 1], alone)
        assert torch.equal(actual.attention.keys, expected.attention.keys)


# ---- on a GPU


@pytest.mark.cuda
@by_layer
@pytest.mark.parametrize("side", SIDES)
@torch.no_grad()
def test_padded_sequences_on_the_kernels(side, options):
    """Padded prompts and then steps, buffered where they can be and some of them masked, equal each sequence alone."""
    layer = FastmaxSelfAttention(64, 4, head_dim=64, device="cuda", **options)
    softmax, sequences = "attention" in options, Sequences(4)
    state = layer.init_state(4, **({} if softmax else {"flush_interval": 3}))
    for counts, n in [((70, 5, 0, 150), 150), *CALLS]:
        mask = mask_of(counts, n, side).cuda()
        x = torch.randn(4, n, 64, device="cuda")
        if n == 1 and not softmax:
            y = layer.step_(x, state, attention_mask=mask)
        else:
            y, state = layer(x, state, attention_mask=mask)
        sequences.add_rows(x, y, mask)
    for x, y in zip(sequences.x, sequences.y, strict=True):
        assert relative(torch.cat(y), layer(torch.cat(x).unsqueeze(0))[0]) < 1e-2


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_packed_prompts_wait_for_no_device(padded):
    layer = FastmaxSelfAttention(64, 4, head_dim=64, device="cuda", **FASTMAX)
    x, state = torch.randn(1, 300, 64, device="cuda"), layer.init_state(3)
    cu_seqlens = torch.tensor([0, 70, 70, 300], dtype=torch.int32, device="cuda")
    mask = torch.rand(1, 300, device="cuda") > 0.3 if padded else None
    layer(x, state, cu_seqlens=cu_seqlens, attention_mask=mask)
    try:
        torch.cuda.set_sync_debug_mode("error")
        y, state = layer(x, state, cu_seqlens=cu_seqlens, attention_mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for i, (begin, end) in enumerate([(0, 70), (70, 300)]):
        real = slice(None) if mask is None else mask[0, begin:end]
        own = x[:, begin:end][:, real]
        assert relative(y[0, begin:end][real], layer(own)[0]) < 1e-2, i
