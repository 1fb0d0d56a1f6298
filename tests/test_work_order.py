"""csrc/quadratic/work_order.h, compiled for the host: what persistent blocks work on, each item once, longest first."""

import itertools
import random
import subprocess

import pytest
from common import compile_probe

PROBE = """
#include <algorithm>
#include <cstdio>
#include <cuda_runtime.h>

using std::min;
static struct { unsigned x; } gridDim, blockIdx;
#define __CUDACC__
#include "quadratic/work_order.h"
using namespace fastmax;

int main() {
  long long heads, stream_bytes;
  int row_blocks, last_rows_first;
  while (std::scanf("%d %lld %lld %d %u", &row_blocks, &heads, &stream_bytes, &last_rows_first, &gridDim.x) == 5) {
    try {
      const WorkOrder order = WorkOrder::of(row_blocks, heads, stream_bytes, last_rows_first);
      std::printf("%d", order.heads_per_group);
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        std::printf(";");
        for (WorkWalk walk(order); !walk.done(); walk.next()) std::printf(" %d %d", walk.item().row_block, walk.item().head);
      }
      std::printf("\\n");
    } catch (const std::runtime_error& error) {
      std::printf("%s\\n", error.what());
    }
  }
}
"""


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """walks(calls): for each call a line of the probe."""
    probe = compile_probe(tmp_path_factory.mktemp("work_order"), PROBE)

    def run(calls):
        lines = "".join(" ".join(str(int(x)) for x in call) + "\n" for call in calls)
        return subprocess.run([probe], input=lines, capture_output=True, text=True, check=True).stdout.splitlines()

    return run


def parsed(line):
    group, *blocks = line.split(";")
    numbers = [[int(x) for x in block.split()] for block in blocks]
    return int(group), [list(zip(x[::2], x[1::2], strict=True)) for x in numbers]


def test_every_item_once_and_longest_first(walks):
    draw = random.Random(1)
    calls = [(1, 1, 0, True, 1), (7, 1, 1, False, 7), (1, 300, 1 << 40, True, 132), (40, 33, 3 << 20, True, 132)]
    for _ in range(60):
        row_blocks, heads = draw.randint(1, 40), draw.choice([1, 2, 7, 64])
        stream_bytes, blocks = draw.choice([1, 1 << 20, 5 << 20, 1 << 30]), draw.randint(1, min(50, row_blocks * heads))
        calls.append((row_blocks, heads, stream_bytes, draw.random() < 0.5, blocks))
    for (row_blocks, heads, stream_bytes, last_rows_first, _), line in zip(calls, walks(calls), strict=True):
        group, blocks = parsed(line)
        assert group == min(heads, max(1, (24 << 20) // max(1, stream_bytes))), "the heads of a group fit in L2"
        # As items begin: rounds in turn, every second one backwards.
        rounds = itertools.zip_longest(*blocks)
        begun = [item for i, items in enumerate(rounds) for item in items[:: -1 if i % 2 else 1] if item is not None]
        assert sorted(begun) == list(itertools.product(range(row_blocks), range(heads)))
        places = [(head // group, row_blocks - 1 - row if last_rows_first else row, head) for row, head in begun]
        assert places == sorted(places), "group after group, and in each those first that see most"


def test_blocks_have_the_same_to_do(walks):
    """Causal items of a head take 1, 2, .. so long. With all rounds forwards the first block had 60 more than the last."""
    (line,) = walks([(64, 4, 1 << 20, True, 64)])
    _, blocks = parsed(line)
    assert {sum(row + 1 for row, _ in block) for block in blocks} == {4 * (64 + 1) // 2}


def test_more_items_than_numbers(walks):
    fits, too_many = walks([(1, 1, 1, True, 1), (1 << 15, 1 << 16, 1, True, 1)])
    assert parsed(fits)[1] == [[(0, 0)]]
    assert too_many == f"fastmax: too many blocks of rows: {1 << 31}"
