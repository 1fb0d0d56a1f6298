"""csrc/quadratic/sm90/work_order.h on the host: persistent blocks process each work tile once, and take equally long."""

import heapq
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
#include "quadratic/sm90/work_order.h"
using namespace fastmax;

int main() {
  long long heads;
  int row_blocks, triangular, last_rows_first;
  while (std::scanf("%d %lld %u %d %d", &row_blocks, &heads, &gridDim.x, &triangular, &last_rows_first) == 5) {
    try {
      const WorkOrder order = WorkOrder::of(row_blocks, heads, gridDim.x, triangular, last_rows_first);
      std::printf("%d", order.paired_heads);
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        std::printf(";");
        for (WorkTileLoop loop(order); !loop.done(); loop.next()) {
          std::printf(" %d %d", loop.work_tile().row_block, loop.work_tile().head);
        }
      }
      std::printf("\\n");
    } catch (const std::runtime_error& error) {
      std::printf("%s\\n", error.what());
    }
  }
}
"""


@pytest.fixture(scope="module")
def walks():
    """Returns walks(calls), one line of the probe for each call."""
    probe = compile_probe(PROBE)

    def run(calls):
        lines = "".join(" ".join(str(int(x)) for x in call) + "\n" for call in calls)
        return subprocess.run([probe], input=lines, capture_output=True, text=True, check=True).stdout.splitlines()

    return run


def parsed(line):
    paired_heads, *blocks = line.split(";")
    numbers = [[int(x) for x in block.split()] for block in blocks]
    return int(paired_heads), [list(zip(x[::2], x[1::2], strict=True)) for x in numbers]


def test_every_item_once(walks):
    draw = random.Random(1)
    calls = [(1, 1, 1, True, True), (7, 1, 7, True, True), (1, 300, 132, False, True), (40, 33, 132, True, True)]
    for _ in range(60):
        row_blocks, heads = draw.randint(1, 40), draw.choice([1, 2, 7, 64, 199])
        blocks = draw.randint(1, min(50, row_blocks * heads))
        calls.append((row_blocks, heads, blocks, draw.random() < 0.7, draw.random() < 0.5))
    for (row_blocks, heads, count, triangular, last_rows_first), line in zip(calls, walks(calls), strict=True):
        paired_heads, blocks = parsed(line)
        assert sorted(itertools.chain(*blocks)) == list(itertools.product(range(row_blocks), range(heads)))
        if triangular:
            assert paired_heads % 2 == 0
            assert paired_heads == 0 or (heads - paired_heads) * row_blocks >= 5 * count, "rounds at the end"
        else:
            assert paired_heads == 0
        # Pairs, then single items, as they begin: rounds in turn, every second one backwards.
        length = {row: row + 1 if last_rows_first else row_blocks - row for row in range(row_blocks)}
        pairs, singles = [], []
        for block in blocks:
            cut = sum(head < paired_heads for _, head in block)
            assert all(head < paired_heads for _, head in block[:cut]) and cut % 2 == 0, "pairs first"
            pairs += zip(block[:cut:2], block[1:cut:2], strict=True)
            singles.append([None] * (cut // 2) + block[cut:])
        assert all(length[first[0]] + length[second[0]] == row_blocks + 1 for first, second in pairs), "all as long"
        assert all(first[1] // 2 == second[1] // 2 for first, second in pairs), "of the same two heads"
        rounds = itertools.zip_longest(*singles)
        begun = [item for i, items in enumerate(rounds) for item in items[:: -1 if i % 2 else 1] if item is not None]
        places = [(-length[row], head) if triangular else (head, -length[row]) for row, head in begun]
        assert places == sorted(places), "those first that see most; or head by head"


def test_blocks_have_the_same_to_do(walks):
    """Causal items of a head take times 1, 2, ... If all rounds ran forwards, the first block would have 60 more than the
    last."""
    (line,) = walks([(64, 4, 64, True, True)])
    _, blocks = parsed(line)
    assert {sum(row + 1 for row, _ in block) for block in blocks} == {4 * (64 + 1) // 2}


def test_share_of_the_time_that_multiprocessors_are_busy(walks):
    """Causal calls on 132 multiprocessors are compared with the best schedule of a list of items: the longest item always goes
    to the first free one."""
    fixed = 1.5  # what an item takes beside its tiles, in tiles
    multiprocessors = 132
    shapes = [
        (rows, tokens, heads)
        for rows, tokens in itertools.product((128, 192), (512, 1000, 1024, 2048, 3000, 4096, 8192, 16384, 65536))
        for heads in (8, 12, 16, 32, 40, 96, 256, 1024)
        if heads * tokens <= 1 << 20
    ]
    calls = []
    for rows, tokens, heads in shapes:
        row_blocks = -(-tokens // rows)
        calls.append((row_blocks, heads, min(multiprocessors, row_blocks * heads), True, True))
    for shape, call, line in zip(shapes, calls, walks(calls), strict=True):
        rows, tokens, heads = shape
        cost = [fixed + -(-min(rows * (i + 1), tokens) // 128) for i in range(call[0])]
        slowest = max(sum(cost[row] for row, _ in block) for block in parsed(line)[1])
        free = [0.0] * multiprocessors
        for x in reversed(cost):
            for _ in range(heads):
                heapq.heapreplace(free, free[0] + x)
        assert max(free) / slowest >= 0.95, shape
        if call[0] * heads >= 3 * multiprocessors:
            assert sum(cost) * heads / multiprocessors / slowest >= 0.89, shape


def test_more_items_than_numbers(walks):
    fits, too_many = walks([(1, 1, 1, True, True), (1 << 15, 1 << 16, 1, True, True)])
    assert parsed(fits)[1] == [[(0, 0)]]
    assert too_many == f"fastmax: too many blocks of rows: {1 << 31}"
