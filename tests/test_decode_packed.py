"""`prefill` of packed sequences, each of which continues from a batch entry of the state, against one prefill per sequence."""

import math
import warnings
from itertools import accumulate, pairwise

import pytest
import torch
from common import Case, definition, in_turn, make_decay, make_inputs
from test_decode import OPTIONS, assert_same_states, at_real, by_decode_option
from torch.utils import _pytree as pytree

import fastmax
from fastmax.decoding.varlen import blocks_of

# Lengths of the sequences in one call after the other. Blocks have 64 tokens, or as many as a sequence has on average.
CALLS = {
    "none, one and two tokens": [(0, 1, 2, 0, 5), (2, 0, 1, 0, 0)],
    "block +- 1": [(63, 64, 65), (127, 1, 0)],
    "one long": [(3, 300, 0, 1)],
    "first and last of none": [(0, 70, 0), (0, 0, 0), (0, 1, 70)],
    "many short": [tuple((7 * i) % 9 for i in range(15))],
    "one sequence": [(90,), (1,)],
}
by_calls = pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
HEADS, KV_HEADS, D, DV = 4, 2, 5, 3


def new_state(sequences, device="cpu", dtype=torch.float64, **options):
    return fastmax.decoding.init_state(sequences, KV_HEADS, D, DV, dtype=dtype, device=device, **options)


def bounds(lengths, device="cpu"):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def tokens_of(lengths, device="cpu", dtype=torch.float64, accompanied=True):
    """Returns arguments of a prefill. Tokens are dimension 2 of all but the mask."""
    n = sum(lengths)
    inputs, _ = make_inputs(Case("", n=n, h=HEADS, hk=KV_HEADS, d=D, dv=DV), dtype, device)
    if accompanied:
        inputs["attention_mask"] = torch.rand(1, n, device=device) > 0.3
        inputs["log_decay"] = make_decay("-inf at places", 1, KV_HEADS, n, device=device, dtype=torch.float64)
    return inputs


def one_by_one(arguments, lengths, states):
    outputs, after = [], []
    for state, (begin, end) in zip(states, pairwise(accumulate(lengths, initial=0)), strict=True):
        part = {name: x[:, begin:end] if name == "attention_mask" else x[:, :, begin:end] for name, x in arguments.items()}
        o, state = fastmax.decoding.prefill(**part, state=state)
        outputs.append(o)
        after.append(state)
    return torch.cat(outputs, dim=2), after


def assert_states_close(state, states):
    """Checks states, except where no token or only a masked one has been stored."""
    for name, x in state.tensors().items():
        expected = torch.cat([getattr(other, name) for other in states])
        if name in ("local_keys", "local_values"):
            x, expected = (y * state.local_mask[:, None, :, None] for y in (x, expected))
        torch.testing.assert_close(x, expected, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@in_turn("accompanied")
@by_calls
@pytest.mark.parametrize("accompanied", [False, True], ids=["plain", "mask and decay"])
@by_decode_option
def test_equals_one_by_one(option, accompanied, calls, device):
    state = new_state(len(calls[0]), device, **OPTIONS[option])
    states = [new_state(1, device, **OPTIONS[option]) for _ in calls[0]]
    for lengths in calls:
        arguments = tokens_of(lengths, device, accompanied=accompanied)
        o, state = fastmax.decoding.prefill(**arguments, state=state, cu_seqlens=bounds(lengths, device))
        expected, states = one_by_one(arguments, lengths, states)
        o, expected = (at_real(x, arguments.get("attention_mask")) for x in (o, expected))
        torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-10)
        assert_states_close(state, states)
    assert state.tokens == sum(map(sum, calls))


@pytest.mark.parametrize("option", ["defaults", "exact window, everything"])
def test_a_batch_goes_on(option, device):
    """Packed prompts, followed by steps of all sequences as a batch, equal the definition of each sequence."""
    lengths, steps = (3, 70, 1, 8), 2
    prompts = tokens_of(lengths, device, accompanied=False)
    following, _ = make_inputs(Case("", n=steps, b=len(lengths), h=HEADS, hk=KV_HEADS, d=D, dv=DV), torch.float64, device)
    state = new_state(len(lengths), device, **OPTIONS[option])
    _, state = fastmax.decoding.prefill(**prompts, state=state, cu_seqlens=bounds(lengths, device))
    outputs = []
    for token in zip(*(x.split(1, dim=2) for x in following.values()), strict=True):
        outputs.append(fastmax.decoding.step_(*token, state))
    for i, (begin, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
        whole = {name: torch.cat((x[:, :, begin:end], following[name][i : i + 1]), dim=2) for name, x in prompts.items()}
        expected = definition(**whole, causal=True, **OPTIONS[option])[:, :, -steps:]
        torch.testing.assert_close(torch.cat(outputs, dim=2)[i : i + 1], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("option", ["defaults", "p=1", "exact window, everything"])
def test_gradients_through_the_states(option, device):
    calls = [(3, 0, 70, 2), (1, 5, 64, 0)]
    arguments = [tokens_of(lengths, device) for lengths in calls]
    leaves = [x.requires_grad_() for given in arguments for x in given.values() if x.is_floating_point()]

    def packed():
        state, outputs = new_state(4, device, **OPTIONS[option]), []
        for lengths, given in zip(calls, arguments, strict=True):
            o, state = fastmax.decoding.prefill(**given, state=state, cu_seqlens=bounds(lengths, device))
            outputs.append(o)
        return real(outputs)

    def apart():
        states, outputs = [new_state(1, device, **OPTIONS[option]) for _ in calls[0]], []
        for lengths, given in zip(calls, arguments, strict=True):
            o, states = one_by_one(given, lengths, states)
            outputs.append(o)
        return real(outputs)

    def real(outputs):
        masks = [given["attention_mask"] for given in arguments]
        return at_real(torch.cat(outputs, dim=2), torch.cat(masks, dim=1))

    grad_o = torch.randn(1, HEADS, sum(map(sum, calls)), DV, dtype=torch.float64).to(device)
    actual, expected = (torch.autograd.grad(f(), leaves, grad_o) for f in (packed, apart))
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("option", ["defaults", "exact window"])
@pytest.mark.parametrize("poisoned", range(3))
def test_poison_does_not_travel(poisoned, option, device):
    """If one sequence holds NaN, outputs, states and gradients of the others keep their bits, because each sequence has blocks
    of its own in this call."""
    lengths = (40, 70, 30)
    arguments = tokens_of(lengths, device, accompanied=False)
    leaves = {name: x.requires_grad_() for name, x in arguments.items()}
    cu_seqlens = bounds(lengths, device)
    begin, end = cu_seqlens[poisoned : poisoned + 2].tolist()
    bad = torch.zeros(sum(lengths), dtype=torch.bool, device=device)
    bad[begin:end] = True

    def run():
        o, state = fastmax.decoding.prefill(**leaves, state=new_state(3, device, **OPTIONS[option]), cu_seqlens=cu_seqlens)
        others = [i for i in range(3) if i != poisoned]
        loss = o[:, :, ~bad].sum() + state.select(others).kv_state.sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        return [o[:, :, ~bad], *state.select(others).tensors().values(), *(x[:, :, ~bad] for x in grads)]

    clean = run()
    with torch.no_grad():
        for x in leaves.values():
            x[:, :, bad] = math.nan  # in place: equal bits need equal addresses
    poison = run()
    for x, y in zip(clean, poison, strict=True):
        assert torch.equal(x, y)


def test_a_state_passed_in_is_not_modified(device):
    state = new_state(3, device, **OPTIONS["exact window"])
    before = pytree.tree_map(torch.clone, pytree.tree_leaves(state))
    for lengths in ((3, 4, 0), (0, 0, 0)):
        arguments = tokens_of(lengths, device)
        _, after = fastmax.decoding.prefill(**arguments, state=state, cu_seqlens=bounds(lengths, device))
        fastmax.decoding.step_(*(x.new_ones(3, *x.shape[1:2], 1, x.shape[3]) for x in list(arguments.values())[:3]), after)
    assert all(map(torch.equal, pytree.tree_leaves(state)[: len(before)], before))


@pytest.mark.parametrize(
    "lengths", [(5,), (0, 0, 200), (1,) * 300, (64,) * 9, (1000, 1)], ids=lambda x: f"{len(x)} of {max(x)}"
)
def test_blocks_are_about_as_many_as_needed(lengths):
    """Blocks hold at most about 2 n tokens, or 64 tokens per sequence if that is more, so memory and work stay linear."""
    n = sum(lengths)
    blocks = blocks_of(bounds(lengths), n)
    assert blocks.token.numel() <= max(2 * n + blocks.token.shape[1], 128 * len(lengths))
    assert blocks.count.sum() == n
    assert torch.equal(blocks.token.flatten()[blocks.place], torch.arange(n))


@pytest.mark.parametrize("values", [(9, -5, 100, 3), (0, 2**31 - 1, -(2**31), 5)], ids=str)
def test_values_that_nobody_checked_index_no_other_memory(values):
    """Values of `cu_seqlens` on a GPU are not checked, so indices made from them must stay in range."""
    blocks = blocks_of(torch.tensor(values, dtype=torch.int32), 10)
    for x, size in ((blocks.sequence, 3), (blocks.token, 10), (blocks.place, blocks.token.numel())):
        assert x.min() >= 0 and x.max() < size


BAD = {
    "more sequences": (lambda: {"cu_seqlens": bounds((4, 1, 1))}, r"cu_seqlens must have shape \(3,\).*got \(4,\)"),
    "not the tokens": (lambda: {"cu_seqlens": bounds((4, 1))}, "cu_seqlens must go from 0 to n = 6"),
    "a batch": (
        lambda: {"cu_seqlens": bounds((4, 2))} | {x: torch.zeros(2, 2, 6, D).double() for x in "qk"}
        | {"v": torch.zeros(2, 2, 6, DV).double()},
        "batch of one",
    ),
    "other heads": (
        lambda: {"cu_seqlens": bounds((4, 2)), "k": torch.zeros(1, 4, 6, D).double(), "v": torch.zeros(1, 4, 6, DV).double()},
        "k must have the state's shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        fastmax.decoding.prefill(**(tokens_of((6,), accompanied=False) | {"state": new_state(2)} | change()))


def test_compiled(device, fresh_dynamo):
    lengths = (3, 70, 0)
    arguments = tokens_of(lengths, device, torch.float32, accompanied=False)
    state, cu_seqlens = new_state(3, device, torch.float32), bounds(lengths, device)
    compiled = torch.compile(fastmax.decoding.prefill, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        o, after = compiled(**arguments, state=state, cu_seqlens=cu_seqlens)
        expected_o, expected = fastmax.decoding.prefill(**arguments, state=state, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(after.tensors(), expected.tensors())


@pytest.mark.cuda
@pytest.mark.parametrize("option", ["defaults", "p=1", "exact window, everything"])
def test_nothing_is_copied_to_the_host(option):
    lengths = (3, 0, 300, 40)
    arguments = tokens_of(lengths, "cuda", torch.float32)
    state, cu_seqlens = new_state(4, "cuda", torch.float32, **OPTIONS[option]), bounds(lengths, "cuda")
    expected_o, expected = fastmax.decoding.prefill(**arguments, state=state, cu_seqlens=cu_seqlens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            o, after = fastmax.decoding.prefill(**arguments, state=state, cu_seqlens=cu_seqlens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(o, expected_o)
    assert_same_states(after, expected)
