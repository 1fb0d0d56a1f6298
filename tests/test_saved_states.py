"""States that `state_of_keys` and `state_of_queries` save on the CUDA kernels. Results of `prefill_saved_` and
`prefill_backward_of_keys_`, which read them, are compared with float64 on poisoned memory. Sizes as in
tests/test_prefill_kernels.py."""

import pytest
import torch
from common import relative
from test_kernels import DEVICE, WHY_NOT, by_mode, precision  # noqa: F401
from test_prefill_kernels import CASES, LEAVES, Case, arguments, compare, in_float64, operator, output_grads, rounding
from test_state_operators import pairs_of

from fastmax.testing.poison import poison_free_memory

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"the CUDA kernels do not run: {WHY_NOT}"),
]
OPERATORS = torch.ops.fastmax
CASES = {name: case for name, case in CASES.items() if case.p == 2}


def is_saved(k, saved):
    return saved.shape[:2] == k.shape[:2] and saved.numel() > 0


def saved_of_keys(given):
    _, k, v, mask, log_decay, first, gate, _, _, *options = given
    *state, saved = OPERATORS.state_of_keys(k, v, mask, log_decay, first, gate, *options, True)
    return state, saved


def forward(given):
    """Returns output and denominators, computed from saved states."""
    *tokens, kv_state, k_sum = given[:9]
    poison_free_memory(DEVICE)
    _, saved = saved_of_keys(given)
    assert is_saved(given[1], saved)
    poison_free_memory(DEVICE)
    return OPERATORS.prefill_saved_(*tokens, kv_state, k_sum, saved, *given[9:])


def backward(given, o, z, grads, whole):
    """Returns the gradients of q, k, v and log_decay, computed from saved states. `whole` has those of the undivided call."""
    q, k, v, mask, log_decay, first, gate, kv_state, k_sum, *options = given
    poison_free_memory(DEVICE)
    g, e = OPERATORS.gradients_of_sums(grads["o"], grads["z"], o, z)
    *_, saved = OPERATORS.state_of_queries(g, e, q, k, v, log_decay, first, gate, *options, True)
    assert is_saved(k, saved)
    poison_free_memory(DEVICE)
    tokens = q, k, v, mask, log_decay, first, gate
    grad_q, pairs = OPERATORS.prefill_backward_of_queries(g, e, *tokens, kv_state, k_sum, *options)
    of_state = list(grads.values())[2:]
    of_states = pairs_of(whole["new"], of_state, given[7:9], whole["of_state"])
    poison_free_memory(DEVICE)
    of_keys = OPERATORS.prefill_backward_of_keys_(g, e, *of_state, *tokens, pairs, of_states, saved, *options)
    return [x for x in (grad_q, *of_keys) if x.shape != (0,)]


def in_one_piece(given, grads):
    """Returns the results of one call in float64."""
    wide = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in given]
    o, z, *state = operator(wide)
    of = [x.double() for x in grads.values()]
    results = OPERATORS.prefill_backward(*of, *wide[:3], o, z, *state, *wide[3:])
    return {"gradients": [x for x in results[:5] if x.shape != (0,)], "new": state, "of_state": results[5:]}


def check(given, mode):
    before = [x.clone() for x in given[7:9]]
    actual = forward(given)
    for name, x, y in zip("oz", actual, in_float64(given)[:2], strict=True):
        assert x.shape == y.shape and x.dtype == (given[0].dtype if name == "o" else torch.float32), name
        assert relative(x, y) <= 1.5 * rounding(mode), f"{name}: {relative(x, y):.1e}"
    assert all(map(torch.equal, given[7:9], before))
    assert all(map(torch.equal, forward(given), actual)), "the same bits again"
    grads = output_grads(given)
    whole = in_one_piece(given, grads)
    of_tokens = backward(given, *actual, grads, whole)
    names = [name for name, i in LEAVES.items() if i < 7 and given[i] is not None]
    compare(*(dict(zip(names, x, strict=True)) for x in (of_tokens, whole["gradients"])), mode)
    assert all(map(torch.equal, backward(given, *actual, grads, whole), of_tokens)), "the same bits again"


@by_mode
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_float64(case, mode, precision):  # noqa: F811
    check(arguments(case, mode), mode)


@by_mode
@pytest.mark.parametrize("d, n", [(32, 700), (64, 1300), (128, 2500)])
def test_sequences(d, n, mode, precision):  # noqa: F811
    """The given state reaches the first sequence of each head: no token of one head, all tokens of another."""
    given = list(arguments(Case(n, d), mode))
    begin = torch.tensor([0, n - 50, 300, n], device=DEVICE, dtype=torch.int32).view(2, 2, 1)
    token = torch.arange(n, device=DEVICE)
    given[5] = torch.where(token >= begin, begin, -1)
    check(given, mode)


@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("expanded", ["q", "k", "v"])
def test_expanded_tensors(expanded, d):
    """The kernels for Hopper leave expanded tensors to other kernels, whose saved states have another format.
    If one call saves and another reads, the bits must be the same."""
    given = list(arguments(Case(1300, d), "bf16"))
    copied, i = list(given), "qkv".index(expanded)
    given[i] = given[i][:, :1].expand(given[i].shape)
    copied[i] = given[i].contiguous()
    check(given, "bf16")
    expected = forward(copied)
    for keys_of, going_on in ((given, copied), (copied, given)):
        _, saved = saved_of_keys(keys_of)
        got = OPERATORS.prefill_saved_(*going_on[:9], saved, *going_on[9:])
        assert all(map(torch.equal, got, expected))


def test_a_state_that_no_token_sees_is_not_read():
    given = list(arguments(Case(1300), "bf16"))
    given[5] = torch.zeros(2, 2, 1300, dtype=torch.int32, device=DEVICE)
    expected = forward(given)
    given[7], given[8] = (torch.full_like(x, torch.nan) for x in given[7:9])
    assert all(map(torch.equal, forward(given), expected))


def test_states_of_all_heads_and_a_chunk_more():
    """There are more states than accumulators at a time, each with several chunks, and with a last chunk that is full or
    not."""
    for n in (1024, 1025, 1100):
        check(arguments(Case(n, 128, b=1, h=60, hk=30), "bf16"), "bf16")


def test_the_state_is_that_of_keys_alone():
    for mode in ("bf16", "fp32"):
        given = arguments(Case(1300), mode)
        k, v, *options = given[1:3] + given[9:]
        state, _ = saved_of_keys(given)
        *expected, nothing = OPERATORS.state_of_keys(k, v, *[None] * 4, *options, False)
        assert nothing.numel() == 0
        assert all(relative(x, y.double()) < 1e-4 for x, y in zip(state, expected, strict=True))


def test_what_keeps_nothing():
    """If nothing is saved, the second call still gives the right result by reading the keys again."""
    given = list(arguments(Case(300, p=1), "bf16"))
    _, saved = saved_of_keys(given)
    assert saved.shape == (2, 2, 0)
    o, z = OPERATORS.prefill_saved_(*given[:9], saved, *given[9:])
    assert all(map(torch.equal, (o, z), operator(given)[:2]))
    grads, tokens = output_grads(given), given[:7]
    expected = OPERATORS.prefill_backward(*grads.values(), *given[:3], o, z, None, None, *given[3:])[:3]
    g, e = OPERATORS.gradients_of_sums(grads["o"], grads["z"], o, z)
    of_q, _ = OPERATORS.prefill_backward_of_queries(g, e, *tokens, *given[7:])
    of_state = list(grads.values())[2:]
    of_keys = OPERATORS.prefill_backward_of_keys_(g, e, *of_state, *tokens, None, None, saved, *given[9:])[:2]
    assert all(map(torch.equal, (of_q, *of_keys), expected)), "the same bits as in one piece"


@by_mode
@pytest.mark.parametrize("decay", [None, "ordinary"], ids=["", "decay"])
@pytest.mark.parametrize("d, n", [(32, 700), (64, 1300), (128, 2500)])
def test_from_nothing(d, n, decay, mode, precision):  # noqa: F811
    """A state of None has the results of a state of zeros."""
    given = list(arguments(Case(n, d, decay=decay), mode))
    zeros = [torch.zeros_like(x) for x in given[7:9]]
    _, saved = saved_of_keys(given)
    results = OPERATORS.prefill_saved_(*given[:7], None, None, saved, *given[9:])
    _, saved = saved_of_keys(given)
    for x, y in zip(results, OPERATORS.prefill_saved_(*given[:7], *zeros, saved, *given[9:]), strict=True):
        assert relative(x, y.double()) <= rounding(mode)
    for x, y in zip(results, in_float64([*given[:7], *zeros, *given[9:]])[:2], strict=True):
        assert relative(x, y) <= rounding(mode)
    grads = output_grads(given)
    g, e = OPERATORS.gradients_of_sums(grads["o"], grads["z"], *results)
    tokens, options = given[:7], given[9:]
    for state in ((None, None), zeros):
        of_q, pairs = OPERATORS.prefill_backward_of_queries(g, e, *tokens, *state, *options)
        *_, saved = OPERATORS.state_of_queries(g, e, *tokens[:3], *tokens[4:], *options, True)
        of_states = torch.zeros(*tokens[1].shape[:2], 2, dtype=torch.float64, device=DEVICE)
        of_keys = OPERATORS.prefill_backward_of_keys_(g, e, *state, *tokens, pairs, of_states, saved, *options)
        if state[0] is None:
            expected = (of_q, *of_keys)
    grads["kv_state"], grads["k_sum"] = map(torch.zeros_like, zeros)
    exact = in_one_piece([*given[:7], *zeros, *given[9:]], grads)["gradients"]
    for x, y, z in zip((of_q, *of_keys), expected, exact, strict=False):
        assert relative(x, y.double()) <= 4 * rounding(mode) and relative(x, z) <= 4 * rounding(mode)


def test_states_saved_of_other_tokens_are_refused():
    given = arguments(Case(700), "bf16")
    _, saved = saved_of_keys(arguments(Case(100), "bf16"))
    with pytest.raises(
        RuntimeError, match="saved must be what state_of_keys or state_of_queries saved of the same tokens, .* bytes"
    ):
        OPERATORS.prefill_saved_(*given[:9], saved, *given[9:])


def test_more_than_four_and_a_half_gib_is_not_saved():
    """32 heads of 128 channels and 65536 tokens take 4.8 GB in bf16."""
    for heads, is_saved in ((32, True), (36, False)):
        k = torch.zeros(1, heads, 65_536, 128, dtype=torch.bfloat16, device=DEVICE)
        *_, saved = OPERATORS.state_of_keys(k, k, *[None] * 4, 0.125, 1.0, 1.0, 0.5, 2, False, True)
        assert (saved.numel() > 0) == is_saved
