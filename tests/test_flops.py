"""PyTorch's `FlopCounterMode` on the registered operators, against numbers computed by hand and pairs counted one by one."""

from functools import partial

import pytest
import torch
from common import by_algorithm, by_causal, make_decay
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import fastmax
from fastmax import fastmax_attention, flash_attention, ops
from fastmax.core.call import Call
from fastmax.core.score import Score
from fastmax.ops.registration import FLOP_FORMULAS
from fastmax.testing import reference


def tensors(n, m=0, b=1, h=2, hk=0, d=3, dv=5):
    m, hk = m or n, hk or h
    shapes = ((b, h, n, d), (b, hk, m, d), (b, hk, m, dv))
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def count(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def both(attention, inputs, **options) -> tuple[int, int]:
    """Returns the flop of the forward and of the backward that autograd runs."""
    outputs = []
    forward = count(lambda: outputs.append(attention(*inputs, **options)))
    return forward, count(lambda: torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs]))


def of_pairs(inputs, pairs: int) -> tuple[int, int]:
    d, dv = inputs[0].shape[3], inputs[2].shape[3]
    return 2 * (d + dv) * pairs, 2 * (3 * d + 2 * dv) * pairs


@pytest.mark.parametrize("n, m, causal, pairs", [(7, 9, False, 63), (9, 7, False, 63), (7, 9, True, 42), (1, 9, True, 9)])
def test_quadratic_and_softmax(n, m, causal, pairs):
    """In the causal call, 7 queries at the end of 9 keys see 3 + 4 + ... + 9 of them."""
    inputs = tensors(n, m, b=3, h=4, hk=2)
    expected = of_pairs(inputs, 12 * pairs)
    quadratic = partial(fastmax_attention, algorithm="quadratic", a0=9.0)
    for attention in (flash_attention, partial(quadratic, p=1), partial(quadratic, p=2)):
        attention = partial(attention, causal=causal)
        assert both(attention, inputs) == expected
        with torch.no_grad():
            assert count(partial(attention, *inputs)) == expected[0]


def test_softmax_is_counted_as_pytorch_counts_its_own():
    inputs = tensors(7, 9, h=4, hk=2)
    shapes = [x.shape for x in inputs]
    own = sdpa_flop_count(*shapes), sdpa_backward_flop_count((1, 4, 7, 5), *shapes)
    assert both(flash_attention, inputs) == own


@pytest.mark.parametrize("p, features", [(1, 3), (2, 9)])
def test_linear(p, features):
    """With d = 3 there are 3 features, and with p = 2 six products more."""
    options = {"p": p, "a0": 9.0, "algorithm": "linear"}
    inputs = tensors(40, 70, b=3, h=4, hk=2)  # dv = 5
    of_queries, of_keys = 3 * 4 * 40, 3 * 2 * 70
    forward = 2 * features * 5 * (of_queries + of_keys)
    backward = 2 * features * 5 * (2 * of_queries + 3 * of_keys)
    assert both(fastmax_attention, inputs, **options) == (forward, backward)

    # Chunks of 256, 256 and 88 queries. All but the first read a state, in which all keys but the last 88 are.
    inputs = tensors(600, h=2, hk=1)
    pairs = 2 * (2 * 256 * 257 // 2 + 88 * 89 // 2)
    of_queries, of_keys = 2 * 344, 512
    forward = 2 * features * 5 * (of_queries + of_keys) + 2 * (3 + 5) * pairs
    backward = 2 * features * 5 * (2 * of_queries + 3 * of_keys) + 2 * (9 + 10) * pairs
    assert both(fastmax_attention, inputs, causal=True, **options) == (forward, backward)
    # With keys before the queries the first chunk reads one too.
    inputs = tensors(600, 601, h=2, hk=1)
    forward = 2 * features * 5 * (2 * 600 + 513) + 2 * (3 + 5) * pairs
    assert both(fastmax_attention, inputs, causal=True, **options)[0] == forward
    # A single chunk has no state.
    inputs = tensors(256)
    assert both(fastmax_attention, inputs, causal=True, **options) == of_pairs(inputs, 2 * 256 * 257 // 2)


@by_causal
def test_auto_counts_what_runs(causal):
    few, many = (tensors(n, h=1, d=16, dv=16) for n in (16, 2048))
    for inputs, algorithm in ((few, "quadratic"), (many, "linear")):
        auto, chosen = (both(fastmax_attention, inputs, causal=causal, algorithm=x) for x in ("auto", algorithm))
        assert auto == chosen
    quadratic = both(fastmax_attention, many, causal=causal, algorithm="quadratic")
    assert sum(chosen) < sum(quadratic)


@pytest.mark.parametrize("window", [1, 4, (3, -1), (-1, 2), (0, 5), 100])
@pytest.mark.parametrize("n, m, causal", [(13, 13, True), (7, 13, True), (7, 13, False), (13, 7, False)])
def test_windows(n, m, causal, window):
    inputs = tensors(n, m, hk=1)
    left, right = (window - 1, window - 1) if isinstance(window, int) else window
    ahead = torch.arange(m) - torch.arange(n)[:, None] - (m - n)
    visible = torch.ones(n, m, dtype=torch.bool)
    for hidden, applies in ((ahead > 0, causal), (-ahead > left, left >= 0), (ahead > right, right >= 0)):
        visible &= ~hidden | (not applies)
    assert both(flash_attention, inputs, causal=causal, window=window) == of_pairs(inputs, 2 * int(visible.sum()))


@by_causal
def test_packed_sequences_and_decays(causal):
    """The pairs are those of the definition. Decays add no products."""
    inputs = tensors(40, h=4, hk=2)
    cu_seqlens = torch.tensor([0, 0, 11, 12, 40], dtype=torch.int32)
    options = {"causal": causal, "cu_seqlens": cu_seqlens}
    if causal:
        options["log_decay"] = make_decay("-inf at places", 1, 2, 40)
    visible = reference.visible_pairs(*inputs[:2], **{"log_decay": None} | options)
    visible = visible.expand(1, 4, 40, 40)
    pairs = int((visible.tril() if causal else visible).sum())
    assert 0 < pairs < (4 * 820 if causal else 6400)
    expected = of_pairs(inputs, pairs)
    assert both(flash_attention, inputs, **options) == expected
    assert both(fastmax_attention, inputs, algorithm="quadratic", **options) == expected


def test_exact_window_is_two_attentions():
    """With 100 tokens these are the local pairs, and those of 90 queries with as many global keys. Calls that are not causal
    have global keys on either side."""
    inputs = tensors(100)
    options = {"exact_window": 10, "algorithm": "quadratic"}
    near, far = 2 * (10 * 100 - 45), 2 * 90 * 91 // 2
    assert both(fastmax_attention, inputs, causal=True, **options) == of_pairs(inputs, near + far)
    assert both(fastmax_attention, inputs, **options) == of_pairs(inputs, 2 * near - 2 * 100 + 2 * far)


def test_gates_are_no_products():
    inputs = [torch.randn(1, heads, 40, 8, requires_grad=True) for heads in (4, 2, 2)]
    gate = torch.randn(1, 2, 40, requires_grad=True)
    for options in ({"algorithm": "linear"}, {"algorithm": "quadratic"}, {"exact_window": 5}):

        def attend(gate, options=options):
            return fastmax_attention(*inputs, causal=True, log_input_gate=gate, **options).sum().backward()

        assert count(partial(attend, gate)) == count(partial(attend, None)) > 0


def test_rpe_matrix():
    inputs = tensors(5, 7)
    pairs = 2 * 35
    counted = both(fastmax_attention, inputs, rpe_matrix=torch.randn(11, 3, requires_grad=True))
    assert counted == (2 * (2 * 3 + 5) * pairs, 2 * (6 * 3 + 2 * 5) * pairs)


def test_decoding():
    state = fastmax.decoding.init_state(3, 2, 4, 5)
    q, k, v = torch.randn(3, 6, 1, 4), torch.randn(3, 2, 1, 4), torch.randn(3, 2, 1, 5)
    expected = 2 * 3 * (2 + 6) * (4 + 10) * 5  # every state is added to, every query reads one
    assert count(lambda: fastmax.decoding.step(q, k, v, state)) == expected
    assert count(lambda: fastmax.decoding.step_(q, k, v, state)) == expected
    n = 600  # chunks of 256, 256 and 88 tokens, each of which has pairs of its own
    q, k, v = torch.randn(3, 6, n, 4), torch.randn(3, 2, n, 4), torch.randn(3, 2, n, 5)
    pairs = 3 * 6 * (2 * 256 * 257 + 88 * 89) // 2
    assert count(lambda: fastmax.decoding.prefill(q, k, v, state)) == n * expected + 2 * (4 + 5) * pairs
    call = Call(Score(1.0, 1.0, 1.0, 0.5, 2), causal=True)
    o, z = torch.randn(3, 6, n, 5), torch.ones(3, 6, n)
    assert count(lambda: ops.state_of_keys(k, v, call)) == 2 * 3 * 2 * n * (4 + 10) * 5
    g, e = ops.gradients_of_sums(o, None, o, z)
    assert count(lambda: ops.state_of_queries(g, e, q, k, v, call)) == 2 * 3 * 6 * n * (4 + 10) * 5
    nothing, sums = torch.empty(3, 2, 0, dtype=torch.uint8), (state.kv_state, state.k_sum)
    assert count(lambda: ops.prefill_saved_(q, k, v, call, *sums, nothing)) == n * expected + 2 * (4 + 5) * pairs
    backward = 2 * 3 * (3 * 2 + 2 * 6) * n * (4 + 10) * 5 + 2 * (3 * 4 + 2 * 5) * pairs
    of_queries = count(lambda: ops.prefill_backward_of_queries(g, e, q, k, v, call, *sums))
    of_keys = count(lambda: ops.prefill_backward_of_keys_(g, e, sums, q, k, v, call, None, None, nothing))
    assert of_queries == n * expected + 2 * (2 * 4 + 5) * pairs and of_queries + of_keys == backward
    # Keys are added and read for grad_k and grad_v, queries read for grad_q and are added; five products a pair.
    inputs = [x.requires_grad_() for x in (q, k, v)]
    counted = both(lambda *tokens: fastmax.decoding.prefill(*tokens, state)[0], inputs)[1]
    assert counted == backward


@by_algorithm
def test_fake_tensors(algorithm):
    """Bounds of fake tensors have no values, so all pairs are counted."""
    options = {"causal": True, "algorithm": algorithm}
    dense = both(fastmax_attention, tensors(300), **options)
    with FakeTensorMode():
        cu_seqlens = torch.empty(4, dtype=torch.int32)
        assert both(fastmax_attention, tensors(300), cu_seqlens=cu_seqlens, **options) == dense


def test_nothing_is_counted_where_nothing_is_computed():
    assert both(fastmax_attention, tensors(0), causal=True, algorithm="linear") == (0, 0)
    assert both(flash_attention, tensors(0, 3)) == (0, 0)
    assert count(lambda: torch.ops.fastmax.softmax(torch.randn(3, 4), "online")) == 0


def test_every_operator_of_products_has_a_formula():
    names = {name.removeprefix("fastmax::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastmax::")}
    of_rows = "softmax", "merge_", "merge_parts", "merge_parts_backward", "normalize_tokens", "normalize_tokens_backward"
    of_layer = "split_heads", "split_heads_backward", "join_heads", "join_heads_backward"
    of_keys = "finite_decay", "decay_sums", "largest_so_far", "gather_kept", "gather_kept_backward"
    without_products = *of_rows, *of_layer, *of_keys, "rotary_factors", "gradients_of_sums"
    assert names <= {*FLOP_FORMULAS, *without_products}
    assert names >= {*FLOP_FORMULAS}
