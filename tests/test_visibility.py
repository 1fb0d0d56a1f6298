"""csrc/core/visibility.h, compiled for the host: ranges of tiles are compared with every pair of a query and a key."""

import random
import subprocess
from itertools import pairwise

import pytest
from common import compile_probe

PROBE = """
#include <algorithm>
#include <cstdio>
#include <vector>
#include "core/visibility.h"
using namespace fastmax;

// Sequences behind each other; bounds of their queries and of their keys. Causal: a sequence's last query sees its last key.
struct Packed {
  int n, m;
  bool causal;
  std::vector<int> queries, keys;
  Range keys_of(int i) const {
    const int s = sequence(queries, i), end = i + 1 + keys[s + 1] - queries[s + 1];
    return {keys[s], causal ? (end > keys[s] ? end : keys[s]) : keys[s + 1]};
  }
  Range queries_of(int j) const {
    const int s = sequence(keys, j), begin = j - keys[s + 1] + queries[s + 1];
    return {causal && begin > queries[s] ? begin : queries[s], queries[s + 1]};
  }
  static int sequence(const std::vector<int>& bounds, int i) {
    int s = 0;
    while (s + 2 < static_cast<int>(bounds.size()) && bounds[s + 1] <= i) ++s;
    return s;
  }
};

void print(const TileRanges& t) { std::printf("%d %d %d %d\\n", t.seen.begin, t.seen.end, t.whole.begin, t.whole.end); }
template <class Visibility>
void ranges(const Visibility& sees, int tile, bool rows_are_keys, int first, int last) {
  switch (tile) {
#define TILE(size) \\
  case size: return print(rows_are_keys ? query_tiles<size>(sees, first, last) : key_tiles<size>(sees, first, last));
    TILE(16) TILE(32) TILE(64) TILE(128)
  }
}

constexpr DenseVisibility kConstant(5, 9, 4, true);
static_assert(key_tiles<16>(kConstant, 0, 4).seen.end == 1, "ranges are constants where their inputs are");

int main() {
  char kind;
  int n, m, a, b, c, tile, rows_are_keys, first, last;
  while (std::scanf(" %c %d %d %d %d %d %d %d %d %d", &kind, &n, &m, &a, &b, &c, &tile, &rows_are_keys, &first, &last) == 10) {
    if (kind == 'd') {
      const DenseVisibility sees(n, m, m - n, a);
      for (int i = 0; i < n; ++i) {
        for (int j = 0; j < m; ++j) {
          if (sees.query_sees(i, j) != (!a || j <= i + m - n) || sees.key_is_seen(j, i) != sees.query_sees(i, j)) return 1;
        }
      }
      ranges(sees, tile, rows_are_keys, first, last);
    } else {
      const Packed packed{n, m, c != 0, {0, n / 3, n / 3 + a, n}, {0, m / 4, m / 4 + b, m}};
      std::vector<Range> keys, queries;
      // kind w: from b keys before a query's position, which is i + a, to c keys behind it.
      const bool window = kind == 'w';
      for (int i = 0; i < n; ++i) {
        keys.push_back(window ? Range{std::max(0, i + a - b), std::min(m, i + a + c + 1)} : packed.keys_of(i));
      }
      for (int j = 0; j < m; ++j) {
        queries.push_back(window ? Range{std::max(0, j - a - c), std::min(n, j - a + b + 1)} : packed.queries_of(j));
      }
      AttentionParams p{};
      p.n = n, p.m = m, p.key_table = keys.data(), p.query_table = queries.data();
      const TableVisibility sees(p, 0);
      for (int i = 0; i < n; ++i) {
        for (int j = 0; j < m; ++j) {
          if (sees.query_sees(i, j) != sees.key_is_seen(j, i)) return 1;
        }
        if (sees.query_sees(i, m) || sees.query_sees(n + 15, m + 15)) return 1;
      }
      if (window) {
        const WindowVisibility computed(n, m, a, b, c);
        const auto differ = [](Range x, Range y) {
          return x.begin < x.end ? x.begin != y.begin || x.end != y.end : y.begin < y.end;
        };
        for (int i = 0; i < n; ++i) if (differ(keys[i], computed.keys_of(i))) return 1;
        for (int j = 0; j < m; ++j) if (differ(queries[j], computed.queries_of(j))) return 1;
        ranges(computed, tile, rows_are_keys, first, last);
        continue;
      }
      ranges(sees, tile, rows_are_keys, first, last);
    }
  }
}
"""


@pytest.fixture(scope="module")
def probe():
    return compile_probe(PROBE, device_code=True)


def packed(n, m, a, b):
    """Returns the bounds of the queries and of the keys of three sequences."""
    return [0, n // 3, n // 3 + a, n], [0, m // 4, m // 4 + b, m]


def sees(kind, n, m, a, b, c, i, j):
    if kind == "d":
        return not a or j <= i + m - n
    if kind == "w":
        return i + a - b <= j <= i + a + c
    for (query, query_end), (key, key_end) in zip(*(list(pairwise(bounds)) for bounds in packed(n, m, a, b)), strict=True):
        if query <= i < query_end and key <= j < key_end:
            return not c or j - key_end <= i - query_end
    return False


def draw(kind, rng):
    n, m = rng.randint(1, 120), rng.randint(1, 120)
    if kind == "d":
        return n, m, rng.randint(0, 1), 0, 0
    if kind == "w":
        return n, m, rng.choice([m - n, 0, rng.randint(-60, 60)]), rng.choice([0, 3, 40]), rng.choice([0, 0, 5, 200])
    return n, m, rng.randint(0, n - n // 3), rng.randint(0, m - m // 4), rng.randint(0, 1)


@pytest.mark.parametrize("kind", ["d", "w", "p"], ids=["dense", "window", "packed"])
def test_ranges_of_tiles(probe, kind):
    """No pair outside of `seen` is visible, every pair in `whole` is, and both ranges are as tight as possible."""
    rng = random.Random(kind)
    rows, lines = [], []
    for _ in range(60):
        problem = draw(kind, rng)
        by_key, tile = rng.randint(0, 1), rng.choice([16, 32, 64, 128])
        count = problem[1 if by_key else 0]
        first = rng.randrange(count)
        last = min(count, first + rng.choice([1, 16, 64])) - 1
        rows.append((problem, by_key, tile, first, last))
        lines.append(" ".join(map(str, (kind, *problem, tile, by_key, first, last))))
    output = subprocess.run([probe], input="\n".join(lines), check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(output) == len(rows)

    partial = whole = empty = 0
    for (problem, by_key, tile, first, last), line in zip(rows, output, strict=True):
        seen_begin, seen_end, whole_begin, whole_end = map(int, line.split())
        tokens = problem[0 if by_key else 1]
        for index in range(-(-tokens // tile)):
            inside = [
                sees(kind, *problem, *((token, row) if by_key else (row, token)))
                for row in range(first, last + 1)
                for token in range(index * tile, min(tokens, (index + 1) * tile))
            ]
            # Behind the last key is a token that must not count, behind the last query one that does no harm.
            cut = not by_key and (index + 1) * tile > tokens
            what = (kind, problem, by_key, tile, first, last, index, line)
            if not seen_begin <= index < seen_end:
                assert not any(inside), what
                empty += 1
            elif whole_begin <= index < whole_end:
                assert all(inside) and not cut, what
                whole += 1
            else:
                # Rows that see nothing may name a tile; between packed sequences a range may have a gap.
                nothing = seen_end - seen_begin == 1 and not any(inside)
                assert kind == "p" or nothing or (any(inside) and (cut or not all(inside))), what
                partial += 1
    assert min(partial, whole, empty) > 10


TABLES = """
#include <cstdio>
#include <vector>
#include "quadratic/bounds.cu"
using namespace fastmax;

namespace fastmax {
void allow_shared_memory(const char*, const void*, int) {}
}

int main() {
  int b = 2, hk, n, m, causal, left, right, has_first, has_end;
  while (std::scanf("%d %d %d %d %d %d %d %d", &hk, &n, &m, &causal, &left, &right, &has_first, &has_end) == 8) {
    // (n, b, hk) in memory, and one pair of bounds a query.
    std::vector<int> first(n * b * hk), end(n * b * hk);
    for (std::vector<int>* x : {&first, &end}) {
      for (int& value : *x) std::scanf("%d", &value);
    }
    AttentionParams p{};
    p.b = b, p.hk = hk, p.n = n, p.m = m, p.causal_offset = m - n, p.left = left, p.right = right, p.causal = causal != 0;
    const Stride stride{hk, 1, int64_t{b} * hk};
    if (has_first) p.k_start = {first.data(), stride};
    if (has_end) p.k_end = {end.data(), stride};
    std::vector<Range> keys, queries;
    for (int batch = 0; batch < b; ++batch) {
      for (int head = 0; head < hk; ++head) {
        for (int i = 0; i < n; ++i) keys.push_back(keys_of(p, batch, head, i));
        for (int j = 0; j < m; ++j) queries.push_back(queries_of(p, batch, head, j));
      }
    }
    p.key_table = keys.data(), p.query_table = queries.data();
    for (int state = 0; state < b * hk; ++state) {
      const TableVisibility sees(p, state);
      for (int i = 0; i < n; ++i) {
        for (int j = 0; j < m; ++j) {
          std::putchar(sees.query_sees(i, j) == sees.key_is_seen(j, i) ? '0' + sees.query_sees(i, j) : 'x');
        }
      }
    }
    std::putchar('\\n');
  }
}
"""


def test_tables_of_bounds():
    """The tables of csrc/quadratic/bounds.cu agree with every pair: bounds, beyond the keys too, causality and a window."""
    probe = compile_probe(TABLES, device_code=True)
    rng = random.Random(0)
    lines, expected = [], []
    for index in range(30):
        n, m, hk, b = rng.randint(1, 40), rng.randint(1, 40), rng.randint(1, 2), 2
        causal, has_first, has_end = index % 2 and n <= m, index % 3 > 0, index % 3 != 1
        left, right = rng.choice([m, 0, 5]), 0 if causal else rng.choice([n, 0, 7])
        heads = [[sorted(rng.choices(range(-5, m + 9), k=n)) for _ in range(b * hk)] for _ in range(2)]
        values = [str(head[i]) for bound in heads for i in range(n) for head in bound]
        lines.append(
            " ".join(map(str, (hk, n, m, int(causal), left, right, int(has_first), int(has_end)))) + " " + " ".join(values)
        )

        def visible(head, i, j, heads=heads, n=n, m=m, left=left, right=right, has_first=has_first, has_end=has_end):
            near = i + m - n - left <= j <= i + m - n + right
            return near and (not has_first or j >= heads[0][head][i]) and (not has_end or j < heads[1][head][i])

        expected.append("".join(str(int(visible(head, i, j))) for head in range(b * hk) for i in range(n) for j in range(m)))
    output = subprocess.run([probe], input="\n".join(lines), check=True, capture_output=True, text=True).stdout.splitlines()
    assert output == expected
    assert sum(row.count("1") for row in expected) > 1000
