#include <algorithm>

#include "layer/divide.h"

namespace fastmax {

namespace {
constexpr int kMinTokens = 8, kMaxTokens = 256;  // of a strip, where a sequence has so many
constexpr int kMultiple = 4;                     // tokens of a strip, as warps take several at once
constexpr int kMaxWaves = 16;

int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }
}  // namespace

void divide(HeadGroup* groups, int count, Strips& strips, int b, int n, int elements, int warps_of_device, int overhead) {
  int64_t units = 0;
  for (int i = 0; i < count; ++i) {
    HeadGroup& group = groups[i];
    group.lanes_log2 = 0;
    while ((elements << group.lanes_log2) < group.width) ++group.lanes_log2;
    const int heads = 32 >> group.lanes_log2;
    group.units = static_cast<int>(divide_up(group.heads, heads));
    units += group.units;
  }
  // Warps that fill the device a whole number of times end together. Each number of times is tried, and longer strips are
  // preferred, which have less overhead.
  const int64_t rows = int64_t{b} * units;  // warps, were each sequence one strip
  int64_t best = 0, lowest = 0;
  for (int waves = 1; waves <= kMaxWaves; ++waves) {
    const int64_t wanted = std::max<int64_t>(1, int64_t{warps_of_device} * waves / rows);  // strips per sequence
    const int64_t tokens = std::clamp<int64_t>(divide_up(n, wanted), std::min(kMinTokens, n), kMaxTokens);
    const int64_t made = divide_up(n, tokens);
    const int64_t cost = divide_up(rows * made, warps_of_device) * (tokens + overhead);
    if (best == 0 || cost < lowest) best = tokens, lowest = cost;
  }
  strips.tokens = static_cast<int>(divide_up(divide_up(n, divide_up(n, best)), kMultiple)) * kMultiple;
  strips.per_sequence = static_cast<int>(divide_up(n, strips.tokens));
  strips.warps = rows * strips.per_sequence;
}

}  // namespace fastmax
