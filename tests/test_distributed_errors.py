"""Ranks that pass different options, refuse their arguments, fail to arrive, or end: all ranks raise errors that name the
cause."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
from ranks import RankError, Ranks
from torch import distributed as dist

from fastmax.distributed import (
    Layout,
    context_parallel_attention,
    context_parallel_flash_attention,
    contiguous_layout,
    exchanged_bytes,
    rank_consistency,
    set_time_limit,
    states,
    tokens_before,
    zigzag_layout,
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def attend(group, *options: dict, limit: float = 20.0) -> list[float]:
    """Runs a call on each rank with its own options, some of which change q, k and v."""
    set_time_limit(limit)
    given = {"causal": True, "algorithm": "linear"} | options[group.rank()]
    tokens, dtype = given.pop("tokens", 6), given.pop("dtype", torch.float32)
    heads, d = given.pop("heads", 2), given.pop("d", 4)
    q, k, v = (torch.ones(1, heads, tokens, d, dtype=dtype) for _ in range(3))
    q.requires_grad_(given.pop("requires_grad", True))
    o = context_parallel_attention(q, k, v, group=group, **given)
    return o.detach()[0, 0, :, 0].tolist()


def both_raise(ranks: Ranks, *options: dict) -> list[RankError]:
    ranks.start(attend, *options)
    results = ranks.results()
    assert all(isinstance(x, RankError) for x in results), results
    return results


DIFFERENT = {
    "causal": ({}, {"causal": False}, "causal must be the same on all ranks, got True on rank 0 and False on rank 1"),
    "dtype": ({}, {"dtype": torch.float64}, "dtype of q .* got torch.float32 on rank 0 and torch.float64 on rank 1"),
    "heads": ({"heads": 4}, {}, "heads of q .* got 4 on rank 0 and 2 on rank 1"),
    "head_dim": ({}, {"d": 5}, "head_dim of q .* got 4 on rank 0 and 5 on rank 1"),
    "temperature": ({}, {"temperature": 2.0}, "score must be the same on all ranks"),
    "algorithm": ({}, {"algorithm": "quadratic"}, "algorithm .* got linear on rank 0 and quadratic on rank 1"),
    "window": ({"exact_window": 3}, {}, "exact_window .* got 3 on rank 0 and 0 on rank 1"),
    "mask": ({}, {"attention_mask": torch.ones(1, 6, dtype=torch.bool)}, "presence of attention_mask .* got False on rank 0"),
    "decay": ({"log_decay": torch.zeros(1, 2, 6)}, {}, "log_decay .* got given on rank 0 and None on rank 1"),
    "gate": ({}, {"log_input_gate": torch.zeros(1, 2, 6)}, "log_input_gate .* got None on rank 0 and given on rank 1"),
    "dropout": ({"dropout": 0.5}, {"dropout": 0.25}, "dropout must be the same on all ranks, got 0.5 on rank 0 and 0.25"),
    "sequences": (
        {"cu_seqlens": torch.tensor([0, 5, 12], dtype=torch.int32)},
        {"cu_seqlens": torch.tensor([0, 7, 12], dtype=torch.int32)},
        r"cu_seqlens must be the same on all ranks, got .*\[0, 5, 12\] on rank 0 and .*\[0, 7, 12\] on rank 1",
    ),
    "gradients": ({}, {"requires_grad": False}, "tensors with gradients .* got .'q'. on rank 0"),
    "gradients of gates": (
        {"log_input_gate": torch.zeros(1, 2, 6)},
        {"log_input_gate": torch.zeros(1, 2, 6, requires_grad=True)},
        "tensors with gradients .* got .'q'. on rank 0 and .'q', 'log_input_gate'. on rank 1",
    ),
    "layout": ({"layout": Layout([[(0, 6)], [(6, 12)]])}, {}, "layout must be the same on all ranks"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_rank_that_differs_is_an_error_on_all(ranks, case):
    *options, message = DIFFERENT[case]
    a0 = 2.0 + list(DIFFERENT).index(case)  # so that neither rank has called with these options before
    for error in both_raise(ranks, *({"a0": a0} | x for x in options)):
        assert error.kind == "ValueError"
        with pytest.raises(RankError, match=message):
            raise error
    assert ranks.run(attend, {}, {}) == [[1.0] * 6] * 2  # all of it works again


REFUSED = {
    "shape": ({"log_decay": torch.zeros(1, 2, 5)}, "log_decay must have shape"),
    "shape of a gate": ({"log_input_gate": torch.zeros(1, 2, 5)}, "log_input_gate must have shape"),
    "gate without causal": ({"log_input_gate": torch.zeros(1, 2, 6), "causal": False}, "log_input_gate needs causal=True"),
    "type of a gate": ({"log_input_gate": torch.zeros(1, 2, 6).int()}, "log_input_gate must be"),
    "sequence": ({"normalize": "sequence"}, "normalize must be False or .token."),
    "a matrix": ({"rpe_matrix": torch.zeros(11, 4)}, "rpe_matrix must be .sinusoidal. or None"),
    "tokens": ({"layout": [[(0, 7)], [(7, 14)]]}, "q must have the 7 tokens that layout.[01]. holds, got 6"),
    "world": ({"layout": [[(0, 6)]]}, "layout must be for 2 ranks, got one for 1"),
    "a type": ({"cu_seqlens": [0, 12]}, "cu_seqlens must be an int32 tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_rank_that_refuses_its_arguments_tells_the_others(ranks, case):
    options, message = REFUSED[case]
    for refuses in (0, 1):
        a0 = {"a0": 20.0 + 2 * list(REFUSED).index(case) + refuses}
        both = [a0, a0]
        both[refuses] = a0 | options
        errors = both_raise(ranks, *both)
        with pytest.raises(RankError, match=message):
            raise errors[refuses]
        with pytest.raises(RankError, match=f"rank {refuses} refused its arguments: .*{message}"):
            raise errors[1 - refuses]
    assert ranks.run(attend, {}, {}) == [[1.0] * 6] * 2


def test_ranks_may_hold_different_numbers_of_tokens(ranks):
    assert ranks.run(attend, {"tokens": 1}, {"tokens": 9}) == [[1.0], [1.0] * 9]
    assert ranks.run(attend, {"tokens": 0}, {"tokens": 3}) == [[], [1.0] * 3]


def second_derivative(group, **options) -> None:
    q = torch.randn(1, 1, 3, 2, requires_grad=True)
    o = context_parallel_attention(q, q, q, group=group, causal=True, **options)
    (grad,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    grad.sum().backward()


@pytest.mark.parametrize("options", [{"algorithm": "linear"}, {"algorithm": "quadratic", "exact_window": 2}])
def test_a_second_derivative_is_an_error(ranks, options):
    ranks.start(partial(second_derivative, **options))
    for error in ranks.results():
        with pytest.raises(RankError, match="no second derivative"):
            raise error


@pytest.fixture
def mortal(tmp_path):
    """Starts ranks that cannot be used afterwards."""
    ranks = Ranks(2, tmp_path)
    yield ranks
    ranks.close()


def test_a_rank_that_does_not_come_or_ends_is_named(mortal):
    started = time.monotonic()
    mortal.start(limited, {}, {}, ranks=[0])
    (error,) = mortal.results()
    with pytest.raises(
        RankError, match="rank 1 of 2 did not call within 0:00:02: it has exited, or calls with other arguments"
    ):
        raise error
    mortal.start(limited, {}, {}, ranks=[1])  # finds what rank 0 said
    (error,) = mortal.results()
    with pytest.raises(RankError, match="rank 1 of 2 did not call within 0:00:02"):
        raise error
    assert mortal.run(attend, {}, {}) == [[1.0] * 6] * 2  # they are in step again
    mortal.start(limited, {}, {}, ranks=[1])
    (error,) = mortal.results()
    with pytest.raises(RankError, match="rank 0 of 2 did not call within 0:00:02 to compare arguments with 1: it has exited"):
        raise error
    mortal.start(limited, {}, {}, ranks=[0])  # rank 1 has given up
    (error,) = mortal.results()
    with pytest.raises(RankError, match="rank 0 of 2 did not call within 0:00:02"):
        raise error
    assert mortal.run(attend, {}, {}) == [[1.0] * 6] * 2
    mortal.start(ending, {}, {})
    errors = mortal.results(ranks=[0])
    with pytest.raises(RankError, match="the exchange of states failed on rank 0 of 2: a rank has exited"):
        raise errors[0]
    assert time.monotonic() - started < 50.0


def ending(group, *options: dict) -> None:
    """Ends rank 1 when it reaches the exchange of states."""
    if group.rank() == 1:
        with mock.patch.object(states, "all_gather", lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)):
            attend(group, *options)
    attend(group, *options)


def test_ranks_that_each_called_with_other_options_before(ranks):
    both = [{"temperature": 2.0}, {"temperature": 3.0}]
    for options in both:
        ranks.run(attend, options, options)
    layouts = [{"layout": Layout([[(0, 6)], [(6, 12)]])}, {"layout": Layout([[(6, 12)], [(0, 6)]])}]
    for options in layouts:
        ranks.run(attend, options, options)
    for options, message in ((both, "score must be the same"), (layouts, "layout must be the same")):
        for error in both_raise(ranks, *options):
            assert error.kind == "ValueError"
            with pytest.raises(RankError, match=message):
                raise error
    assert ranks.run(attend, {}, {}) == [[1.0] * 6] * 2


@pytest.mark.parametrize("refuses", [0, 1])
def test_the_call_after_an_error_is_in_step(ranks, refuses):
    good = {"a0": 40.0 + refuses}
    assert ranks.run(attend, good, good) == [[1.0] * 6] * 2
    for _ in range(3):  # arguments that both have passed before, but for what one refuses
        both = [good, good]
        both[refuses] = good | {"log_decay": torch.zeros(1, 2, 5)}
        errors = both_raise(ranks, *both)
        with pytest.raises(RankError, match="log_decay must have shape"):
            raise errors[refuses]
        with pytest.raises(RankError, match=f"rank {refuses} refused its arguments: .*log_decay must have shape"):
            raise errors[1 - refuses]
    other = {"a0": 42.0 + refuses}
    assert ranks.run(attend, other, other) == [[1.0] * 6] * 2
    assert ranks.run(attend, good, good) == [[1.0] * 6] * 2


class _Group:
    """The part of a process group that an exchange of arguments uses."""

    def __init__(self, rank: int, world: int, store: dist.Store):
        self.rank, self.size, self.get_group_store = (lambda: rank), (lambda: world), (lambda: store)


def in_threads(groups: list[_Group], *wanted: object) -> list:
    """Returns the results of `check_consistency` on each rank. An exception takes the place of a result."""

    def ask(group: _Group, options: object) -> object:
        try:
            if isinstance(options, Exception):
                with rank_consistency.report_errors(group):
                    raise options
            return rank_consistency.check_consistency(group, options, tokens=group.rank())
        except (ValueError, RuntimeError) as error:
            return str(error)

    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(ask, groups, wanted))


def test_exchanges_leave_nothing_behind_and_see_nothing_that_is_left():
    store = dist.HashStore()
    for lifetime in range(3):  # of a group that is destroyed and made again on one store
        groups = [_Group(rank, 3, store) for rank in range(3)]
        options = {"lifetime": str(lifetime)}
        assert in_threads(groups, options, options, options) == [(0, 1, 2)] * 3
        found = in_threads(groups, options, ValueError("x must be y"), {"lifetime": "other"})
        told = "fastmax.distributed: rank 1 refused its arguments: ValueError: x must be y"
        assert found == [told, "x must be y", told]
        assert in_threads(groups, ValueError("x must be y"), options, options)[1:] == [told.replace("rank 1", "rank 0")] * 2
        for _ in range(5):
            assert in_threads(groups, options, options, options) == [(0, 1, 2)] * 3
        left = [key for key in store.list_keys() if "lifetimes" not in key]
        assert len(left) == lifetime + 1, left  # the last verdict of each


def test_an_option_that_one_rank_lacks_is_named():
    store = dist.HashStore()
    groups = [_Group(rank, 2, store) for rank in range(2)]
    error = "fastmax.distributed: b must be the same on all ranks, got None on rank 0 and 2 on rank 1"
    assert in_threads(groups, {"a": "1"}, {"a": "1", "b": "2"}) == [error] * 2


def test_threads_exchange_in_groups_of_their_own(monkeypatch):
    monkeypatch.setattr(rank_consistency, "_time_limit", timedelta(seconds=20))
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_ranks = [master, dist.TCPStore("127.0.0.1", master.port, is_master=False)]
    groups = [[_Group(rank, 2, dist.PrefixStore(name, of_ranks[rank])) for rank in range(2)] for name in "ab"]
    # Rank 0 asks in the first group first, rank 1 in the second.
    order = [groups[0][0], groups[1][1], groups[1][0], groups[0][1]]
    assert in_threads(order, *[{"a": "1"}] * 4) == [(0, 1)] * 4


def limited(group, *options: dict) -> None:
    attend(group, *options, limit=2.0)


# ---- what takes no other rank


def test_without_a_group_the_error_says_what_is_missing():
    q = torch.ones(1, 1, 2, 2)
    for function in (context_parallel_attention, context_parallel_flash_attention):
        with pytest.raises(RuntimeError, match="init_process_group"):
            function(q, q, q)
    with pytest.raises(RuntimeError, match="init_process_group"):
        tokens_before(q[0], 2)


@pytest.mark.parametrize(
    ("stretches", "message"),
    [
        ([[(0, 3)], [(4, 6)]], "misses token 3"),
        ([[(0, 3)], [(2, 6)]], "repeats token 2"),
        ([[(1, 3)]], "misses token 0"),
        ([[(3, 6), (0, 3)]], r"layout\[0\] must be in ascending order"),
        ([[(0, 3, 6)]], r"layout\[0\]\[0\] must be a range"),
        ([[(3, 0)]], r"layout\[0\]\[0\] must be a range"),
        ([[(0, 1.5)]], r"layout\[0\]\[0\] must be a range"),
        ([3], r"layout\[0\] must be a sequence"),
        ("zigzag", "layout must be a sequence"),
    ],
)
def test_layouts_that_are_none(stretches, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Layout(stretches)


def test_layouts():
    assert contiguous_layout((2, 0, 3)).stretches == (((0, 2),), (), ((2, 5),))
    layout = zigzag_layout(17, 2)
    assert layout.stretches == (((0, 4), (12, 17)), ((4, 8), (8, 12)))
    assert layout.tokens == 17 and [layout.count(rank) for rank in range(2)] == [9, 8]
    assert layout.mirrored().mirrored() == layout
    assert [part.rank for part in layout.parts] == [0, 1, 1, 0] and layout.most_parts == 2
    assert [(part.rank, a, b) for part, a, b in layout.overlapping(2, 9)] == [(0, 2, 4), (1, 4, 8), (1, 8, 9)]
    assert exchanged_bytes(contiguous_layout((7,)), kv_heads=2, head_dim=4) == (0, 0)
    for world in range(1, 5):
        for n in range(12):
            counts = [zigzag_layout(n, world).count(rank) for rank in range(world)]
            assert sum(counts) == n and max(counts) - min(counts) <= 2
    for wrong in (-1, 2.0, True):
        with pytest.raises((TypeError, ValueError), match="tokens"):
            zigzag_layout(wrong, 2)
    with pytest.raises(ValueError, match="seconds must be > 0"):
        set_time_limit(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": [[(0, 4)]]}, "layout must be a Layout"),
        ({"rank": 2}, "rank must be below the layout's 2 ranks, got 2"),
        ({"rank": -1}, "rank must be at least 0, got -1"),
        ({"kv_heads": 0}, "kv_heads must be at least 1, got 0"),
        ({"head_dim": 4.0}, "head_dim must be an int, got 4.0"),
        ({"value_dim": 0}, "value_dim must be at least 1, got 0"),
        ({"batch": True}, "batch must be an int, got True"),
        ({"dtype": torch.int8}, "dtype must be float64, float32, float16 or bfloat16, got torch.int8"),
        ({"algorithm": "linaer"}, 'algorithm must be "linear", "quadratic" or "softmax", got .linaer'),
        ({"p": 3}, "p must be 1 or 2, got 3"),
        ({"exact_window": -5}, "exact_window must be at least 0, got -5"),
        ({"algorithm": "softmax", "exact_window": 2}, 'exact_window must be 0 with algorithm="softmax", got 2'),
    ],
    ids=str,
)
def test_exchanged_bytes_names_what_is_wrong(options, message):
    options = {"layout": contiguous_layout((4, 4)), "rank": 0, "kv_heads": 2, "head_dim": 4} | options
    with pytest.raises((TypeError, ValueError), match=message):
        exchanged_bytes(options.pop("layout"), options.pop("rank"), **options)
