"""Phases of the linear kernels (csrc/linear/order2/plan.h, compiled alone) walk every row once, in order, in bounded memory."""

import itertools
import random
import subprocess
from typing import NamedTuple

import pytest
from common import compile_probe

PROBE = """
#include <cstdio>
#include "linear/order2/plan.h"
using namespace fastmax;

int main() {
  int math, causal, reversed, carries, lag, backward;
  Problem p{};
  while (std::scanf("%d %d %d %d %d %d %d %d %d %d %d %d %d %d", &p.b, &p.h, &p.hk, &p.n, &p.m, &p.head_dim_qk, &p.order,
                    &causal, &math, &p.sm_count, &reversed, &carries, &lag, &backward) == 14) {
    p.head_dim_v = p.d = p.dv = p.head_dim_qk, p.causal = causal, p.causal_offset = p.m - p.n;
    p.math = static_cast<MathMode>(math);
    const StateSizes sizes = state_sizes(p.head_dim_qk, p.head_dim_v, p.order, p.math);
    const Time time = reversed ? Time::kBackward : Time::kForward;
    const int x_heads = reversed ? p.hk : p.h, y_heads = reversed ? p.h : p.hk;
    const int nx = reversed ? p.m : p.n, ny = reversed ? p.n : p.m, before = reversed ? 0 : p.causal_offset;
    const LinearProblem r = carries ? make_problem_after_state(p, sizes, x_heads, y_heads, time, carries != 2, carries == 3)
                                    : make_problem(p, sizes, x_heads, y_heads, nx, ny, before, time, lag);
    const int64_t phase_bytes = backward ? bwd_phase_bytes(p) : kPhaseBytes;
    const StatePlan plan(r, sizes, p.sm_count, carries, carries == 4, carries == 5, phase_bytes);
    const auto bytes = [](int64_t count, int64_t each) { return static_cast<long long>(count * each); };
    std::printf("plan %d %d %d %d %d %d %d %lld %lld %lld %lld %lld\\n", r.pad, r.boundary, r.chunk, r.chunks, r.groups(),
                r.groups_of_all(), plan.segments, bytes(plan.slots(), sizes.snapshot_bytes),
                bytes(plan.slots(), 4 * sizes.sum_floats), bytes(plan.accumulators(), 4),
                bytes(plan.parts(), 4 * sizes.part_floats), bytes(1, sizes.snapshot_bytes));
    for (int i = 0; i < plan.phases(); ++i) {
      const Phase phase = plan.phase(i);
      const LinearProblem& x = phase.problem;
      std::printf("%d %d %d %d %d %d %d %d %d %d %d %d %d %d\\n", phase.first_batch, x.batch, phase.first_head, x.state_heads,
                  phase.first_state, phase.first_row, phase.first_token, x.nx, x.boundary, x.chunks, phase.begin, phase.loads,
                  phase.stores, plan.hands_on());
    }
  }
}
"""
MIB = 2**20
BF16, FP32 = 0, 3


class Call(NamedTuple):
    """The arguments of a call in the order in which the probe reads them. reversed: the keys see the queries, as in the states
    of grad_k and grad_v. carries: 1: a state goes in and comes out; 2: the walk ends before the last chunk, because nothing
    reads the state after it; 3: only the state is wanted; 4: all snapshots are saved; 5: memory is saved if there are more
    snapshots than may be saved. lag: rows by which states lag behind the queries that read them. backward: of a backward, as
    far as memory is concerned."""

    b: int
    h: int
    hk: int
    n: int
    m: int
    head_dim: int
    order: int = 2
    causal: int = 1
    math: int = BF16
    sm_count: int = 132
    reversed: int = 0
    carries: int = 0
    lag: int = 0
    backward: int = 0


class Plan(NamedTuple):
    pad: int
    boundary: int
    chunk: int
    chunks: int
    groups: int
    groups_of_all: int
    segments: int
    snapshots: int
    sums: int
    accumulators: int
    parts: int
    snapshot: int
    phases: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def plan():
    """Returns a function that makes the plans of a list of calls."""
    probe = compile_probe(PROBE)

    def run(calls):
        lines = "\n".join(" ".join(map(str, call)) for call in calls)
        output = subprocess.run([probe], input=lines, check=True, capture_output=True, text=True).stdout
        plans = []
        for line in output.splitlines():
            if line.startswith("plan "):
                plans.append(Plan(*map(int, line.split()[1:]), []))
            else:
                plans[-1].phases.append(tuple(map(int, line.split())))
        assert len(plans) == len(calls)
        return plans

    return run


def check_cover(call, plan):
    """Checks that every x row of every head is in one phase, and that the phases of a state are in order, each starting where
    the last one ended. A carried state enters before the first phase and leaves after the last, which ends behind the last row
    of y."""
    rows = call.m if call.reversed else call.n
    first_begin = plan.boundary if call.carries else 0
    next_row, walked, stored = {}, {}, set()
    for phase in plan.phases:
        first_batch, batches, first_head, heads, first_state, first_row, first_token, nx, boundary, chunks, begin = phase[:11]
        loads, stores, hands_on = phase[11:]
        assert first_state == first_batch * call.hk + first_head
        assert heads == call.hk or batches == 1, "(batch, head) flattened counts the heads of a batch entry"
        assert first_token == (rows - first_row - nx if call.reversed else first_row)
        assert chunks > 0 and boundary == plan.boundary + first_row
        assert nx > 0 or (call.carries and chunks == 1 and first_row >= rows)
        assert hands_on or len({x[4] for x in plan.phases}) == len(plan.phases)
        for state in itertools.product(range(first_batch, first_batch + batches), range(first_head, first_head + heads)):
            assert next_row.get(state, 0) == min(first_row, rows)
            assert walked.get(state, first_begin) == begin
            assert loads == (call.carries and state not in walked) and state not in stored
            next_row[state] = min(first_row, rows) + nx
            walked[state] = boundary + (chunks - 1) * plan.chunk
            if stores:
                stored.add(state)
    assert set(next_row) == set(itertools.product(range(call.b), range(call.hk)))
    assert set(next_row.values()) == {rows}
    assert 128 * plan.groups >= max(walked.values()), "what says which groups of rows are whole covers the walk"
    last_seen = plan.boundary + call.lag + -(-rows // 256) * 256
    assert plan.boundary % 128 == 0 and 128 * plan.groups_of_all >= max(last_seen, 128 * plan.groups)
    if call.causal and not call.reversed and not call.carries:
        assert plan.boundary + call.lag - plan.pad == call.m - call.n, "the last query sees the last key"
    assert stored == (set(walked) if call.carries else set())
    if call.carries:
        assert plan.pad == plan.boundary == 128 and plan.chunk % 256 == 0 and plan.accumulators > 0
        beyond = [end - plan.boundary - call.n for end in walked.values()]  # the last row
        assert all(0 <= x < 256 * plan.chunks if call.carries != 2 else -plan.chunk <= x < 0 for x in beyond)
        assert call.carries != 3 or call.order == 1 or plan.chunks == 2


def check_memory(call, plan):
    snapshots = plan.snapshots + plan.parts
    whole = plan.snapshot * plan.chunks + plan.parts  # order 1 does not cut sequences
    tensors = 4 * call.b * (call.h * call.n + call.hk * call.m) * call.head_dim * (2 if call.math == BF16 else 4)
    most = min(max(420 * MIB, tensors // 5), 832 * MIB) if call.backward and call.order == 2 else 832 * MIB
    assert snapshots <= most or (call.order == 1 and snapshots <= whole)
    assert plan.sums <= plan.snapshots // (50 if call.order == 2 else 10)
    assert plan.accumulators <= 128 * MIB


def test_what_the_issue_measured(plan):
    """A plan with one chunk of all 1024 states would take 2.2 GiB, and as many accumulators between phases 5 GiB."""
    call = Call(64, 16, 16, 2048, 2048, 128)
    for p in plan([call, call._replace(reversed=1)]):
        check_cover(call, p)
        check_memory(call, p)
        assert p.accumulators == 0, "whole sequences: nothing is handed on"
        assert len(p.phases) == 6 and p.segments == 1


def test_few_states_are_cut_as_before(plan):
    """Few states are cut in time alone and into segments. The cuts decide which rows are added up together, and so the bits of
    a result."""
    one, five = plan([Call(1, 1, 1, 420_000, 420_000, 128), Call(1, 5, 5, 90_000, 90_000, 128)])
    assert len(one.phases) == 2 and one.segments > 1 and [x[:4] for x in one.phases] == [(0, 1, 0, 1)] * 2
    assert len(five.phases) == 2 and five.segments == 1 and [x[:4] for x in five.phases] == [(0, 1, 0, 5)] * 2
    (wide,) = plan([Call(1, 16, 16, 65_536, 65_536, 128)])
    assert len(wide.phases) == 3 and wide.accumulators == 16 * 32 * 161 * 256 * 4
    small = plan([Call(1, h, h, 4096, 4096, d) for h in (1, 8, 32) for d in (32, 64, 128)])
    assert all(len(x.phases) == 1 for x in small)


def test_long_walks_save_memory_where_they_are_asked_to(plan):
    """Such a walk has a third of the snapshots at a time. Walks whose snapshots can all be saved are cut as without the
    request."""
    long = Call(1, 16, 16, 524_288, 524_288, 64, reversed=1, carries=1)
    short = long._replace(h=32, hk=32, n=65_536, m=65_536)
    plain, saving, short_plain, short_saving = plan([long, long._replace(carries=5), short, short._replace(carries=5)])
    check_cover(long, saving)
    assert saving.snapshots <= 832 * MIB // 3 < plain.snapshots
    assert short_plain == short_saving and len(short_plain.phases) > 1


def test_backwards_take_less_memory_than_their_tensors(plan):
    """A fifth of inputs, results and gradients, between 420 and 832 MiB. The cost is in phases: 3 of 86 chunks in the forward
    become 6 of 43."""
    forward = Call(1, 32, 32, 65_536, 65_536, 64)
    calls = [forward, forward._replace(backward=1), forward._replace(backward=1, reversed=1)]
    calls += [x._replace(n=m, m=m) for m in (8192, 98_304, 262_144) for x in calls[1:]]
    plans = plan(calls)
    for call, p in zip(calls, plans, strict=True):
        check_cover(call, p)
        check_memory(call, p)
    assert [(len(p.phases), p.snapshots // (32 * p.snapshot)) for p in plans[:3]] == [(3, 86), (6, 43), (6, 43)]
    (short,) = plan([Call(2, 32, 32, 16_384, 16_384, 64, backward=1)])
    assert len(short.phases) == 3 and short.phases[0][9] == 22
    assert [p.snapshots // MIB for p in plans[3::2]] == [304, 608, 817] and [len(p.phases) for p in plans[3::2]] == [1, 6, 12]


def test_segments_fill_the_device(plan):
    """While the first segment is walked, others are summed: 16 states of 4 blocks take two thirds of the time of a walk, in
    three segments."""
    calls = {heads: Call(1, heads, heads, 65_536, 65_536, 64) for heads in (1, 4, 8, 16, 17, 33, 40)}
    assert [p.segments for p in plan(calls.values())] == [34, 9, 5, 3, 1, 1, 1]
    full = Call(1, 4, 4, 65_536, 65_536, 64, causal=0)
    assert [p.segments for p in plan([full, full._replace(h=16, hk=16)])] == [9, 3]  # the last without rows


def test_one_chunk_without_a_state_takes_nothing(plan):
    (p,) = plan([Call(1, 70_000, 70_000, 5, 5, 256)])
    assert len(p.phases) == 1 and p.snapshots == p.accumulators == p.parts == 0


def test_many_states(plan):
    """The calls have more states than the second dimension of a grid, wide heads, both orders, and states of which each phase
    walks a part."""
    calls = [
        Call(70_000, 1, 1, 200, 600, 32, causal=1),
        Call(1, 70_000, 35_000, 200, 600, 64, causal=0, math=FP32),
        Call(66_000, 1, 1, 3, 5, 256, order=1, causal=0),
        Call(3, 40, 20, 70_000, 70_000, 256, order=1),
        Call(16, 64, 64, 131_072, 131_072, 128),
        Call(7, 12, 4, 300_000, 300_000, 256, math=FP32),
    ]
    for call, p in zip(calls, plan(calls), strict=True):
        check_cover(call, p)
        check_memory(call, p)
        assert len(p.phases) > 1


def test_states_that_are_carried(plan):
    """Accumulators of all states of a phase enter and leave, so many states are cut even if their snapshots fit. There is a
    chunk more than the rows need, which may be a phase of its own; few rows are walked without need."""
    calls = [
        Call(1, 32, 32, n, n, d, carries=1) for n in (1, 17, 255, 256, 257, 1025, 2049, 65_536) for d in (32, 64, 96, 128, 256)
    ]
    calls += [Call(1, 32, 8, n, n, 64, reversed=1, carries=1) for n in (1, 255, 256, 257, 2049)]
    calls += [Call(2, 8, 4, n, n, 64, order=order, carries=2) for n in (1, 255, 256, 257, 2049) for order in (1, 2)]
    calls += [Call(1, 32, 32, n, n, d, order=1, carries=1) for n in (1, 257, 65_536) for d in (32, 256)]
    calls += [Call(1, 32, 8, n, n, d, order=p, carries=3) for n in (1, 257, 65_536) for d in (64, 128) for p in (1, 2)]
    calls += [Call(64, 16, 16, 2048, 2048, 128, carries=1), Call(1, 1, 1, 437_000, 437_000, 128, carries=1)]
    plans = plan(calls)
    for call, p in zip(calls, plans, strict=True):
        check_cover(call, p)
        check_memory(call, p)
    one_token, *_, many, long = plans
    assert (one_token.chunk, one_token.chunks, len(one_token.phases)) == (256, 2, 1)
    assert len(many.phases) > 40 and len(long.phases) > 1 and long.segments > 1


def test_states_that_lag(plan):
    """Chunks begin as much earlier among the keys, also before the first one, whose rows are then none."""
    sizes = [(1, 1), (700, 700), (300, 345), (257, 400), (70, 700), (65_536, 65_536), (1000, 5000)]
    calls = [Call(2, 8, 4, n, m, d, lag=lag) for n, m in sizes for d in (32, 64, 128) for lag in (0, 64, 192, 256)]
    for call, p in zip(calls, plan(calls), strict=True):
        check_cover(call, p)
        check_memory(call, p)
        assert 0 <= p.pad < 128 + call.lag and p.boundary >= 0
    (plain, lagging) = plan([Call(1, 1, 1, 700, 700, 64), Call(1, 1, 1, 700, 700, 64, lag=192)])
    assert (plain.pad, plain.boundary, lagging.pad, lagging.boundary) == (0, 0, 192, 0) and plain.chunks == lagging.chunks


def test_saved_states(plan):
    """States of all chunks are saved where the accumulators of all states fit; the plan itself has one snapshot per state."""
    calls = [Call(1, h, h, n, n, d) for h in (1, 32, 60) for n in (1, 256, 257, 65_536) for d in (32, 64, 128, 256)]
    calls += [call._replace(h=4 * call.h, reversed=1) for call in calls]
    saved, not_saved = (plan([call._replace(carries=carries) for call in calls]) for carries in (4, 1))
    for call, p, other in zip(calls, saved, not_saved, strict=True):
        check_cover(call._replace(carries=4), p)
        check_memory(call, p)
        assert (p.chunk, p.chunks) == (other.chunk, other.chunks)
        assert all(phase[9] == p.chunks for phase in p.phases)
        assert p.snapshots == p.snapshot * max(phase[1] * phase[3] for phase in p.phases)
    (many,) = [p for call, p in zip(calls, saved, strict=True) if call == Call(1, 60, 60, 65_536, 65_536, 128)]
    assert len(many.phases) == 3


def test_random_calls(plan):
    random.seed(5)
    calls = []
    for _ in range(150):
        hk, n = random.choice([1, 2, 3, 7, 16, 33, 100]), int(2 ** random.uniform(0, 17))
        calls.append(
            Call(
                b=random.choice([1, 2, 5, 64, 301]),
                h=hk * random.choice([1, 1, 4]),
                hk=hk,
                n=n,
                m=n + random.choice([0, 0, 77, 5000]),
                head_dim=random.choice([32, 64, 96, 128, 256]),
                causal=random.randrange(2),
                math=random.choice([BF16, FP32]),
                sm_count=random.choice([40, 108, 132]),
                reversed=random.randrange(2),
                backward=random.randrange(2),
            )
        )
    calls += [call._replace(m=call.n, causal=1, carries=1) for call in calls[:80]]
    calls += [call._replace(m=call.n, causal=1, reversed=0, carries=2) for call in calls[:40]]
    calls += [call._replace(m=call.n, causal=1, carries=3) for call in calls[40:80]]
    plans = plan(calls)
    for call, p in zip(calls, plans, strict=True):
        check_cover(call, p)
        check_memory(call, p)
    assert sum(len(p.phases) > 1 for p in plans) > 30


def test_hopper_states_are_shared_finely_where_that_is_faster():
    """At head dim 64, four or eight blocks share a state on 132 multiprocessors: eight if four per state would leave enough of
    them idle."""
    text = """
#include <cstdio>
#include "linear/order2/sm90/snapshot.h"

int main() {
  for (int states = 1; states <= 256; ++states) {
    fastmax::Problem p{};
    p.b = 1, p.hk = states, p.head_dim_qk = p.head_dim_v = 64, p.sm_count = 132;
    if (fastmax::has_fine_shares(p)) std::printf("%d ", states);
  }
}
"""
    found = subprocess.run([compile_probe(text)], capture_output=True, text=True, check=True).stdout.split()
    assert [int(x) for x in found] == [*range(12, 17)]


def test_hopper_states_of_64_columns_have_each_product_once():
    text = """
#include <cstdio>
#include "linear/order2/sm90/snapshot.h"

using State = fastmax::HopperState<64>;
void print(const fastmax::ColumnPair& y) { std::printf("%d %d\\n", y.a, y.b); }

int main() {
  for (int star = 0; star < State::kBlocks; ++star) {
    for (int i = 0; i < State::star_tiles(star); ++i) {
      for (int f = 0; f < 64; ++f) print(fastmax::pair_columns(star, (star + State::kFirstOffset + i) % State::kBlocks, f));
    }
  }
  for (int tile = 0; tile < State::kDiagonalTiles; ++tile) {
    for (int f = 0; f < 64; ++f) print(fastmax::diagonal_columns(tile, f));
  }
  for (int f = 0; f < 32; ++f) print(fastmax::opposite_columns(f));
  std::printf("%d %d\\n", State::kSnapshotBytes, State::kStateStages);
}
"""
    output = subprocess.run([compile_probe(text)], capture_output=True, text=True, check=True).stdout
    *products, (snapshot_bytes, stages) = (tuple(map(int, line.split())) for line in output.splitlines())
    assert sorted(tuple(sorted(pair)) for pair in products) == [(a, b) for a in range(64) for b in range(a, 64)]
    assert snapshot_bytes == 2 * 64 * (len(products) + 2 * 64)
    assert stages == -(-snapshot_bytes // (2 * 64 * 64 * 2))


def test_sizes_of_a_state_with_two_widths():
    """Features come from the columns of keys, and each has the columns of values; the second moment has those of keys twice."""
    text = """
#include <cstdio>
#include "linear/order2/state_format.h"

int main() {
  for (const int d : {32, 64, 96, 128, 256}) {
    for (const int dv : {32, 64, 96, 128, 256}) {
      const auto second = fastmax::state_sizes(d, dv, 2, fastmax::MathMode::kBF16);
      const auto first = fastmax::state_sizes(d, dv, 1, fastmax::MathMode::kFP32);
      std::printf("%d %d %d %lld %lld %lld %d\\n", d, dv, second.chunk, static_cast<long long>(second.snapshot_bytes),
                  static_cast<long long>(second.sum_floats), static_cast<long long>(first.part_floats), second.blocks);
    }
  }
}
"""
    output = subprocess.run([compile_probe(text)], capture_output=True, text=True, check=True).stdout
    rows = {tuple(row[:2]): row[2:] for row in (tuple(map(int, line.split())) for line in output.splitlines())}
    assert len(rows) == 25
    for (d, dv), (chunk, snapshot_bytes, sums, part_floats, blocks) in rows.items():
        products = 64 * (d // 8 * (d // 8 + 1) // 2)  # in tiles of eight columns by eight
        assert snapshot_bytes == 2 * (d * d + (d + products) * dv)
        assert sums == d + dv + 4
        assert part_floats == d * d + d * dv + sums
        assert chunk == rows[d, d][0], "as the width of keys"
        assert blocks * {32: 32, 64: 64, 96: 48, 128: 64, 256: 64}[dv] == rows[d, 64][4] * dv, "values of a block"
