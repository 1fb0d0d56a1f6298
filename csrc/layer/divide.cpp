#include <algorithm>

#include "layer/divide.h"

namespace fastmax {

namespace {
constexpr int kMinTokens = 8, kMaxTokens = 256;  // of a strip, where a sequence has so many
constexpr int kMaxWaves = 16;
}  // namespace

void divide(HeadGroup* groups, int count, Strips& strips, int b, int n, int elements, int warps_of_device, int overhead) {
  int64_t units = 0;
  for (int i = 0; i < count; ++i) {
    HeadGroup& group = groups[i];
    group.lanes_log2 = 0;
    while ((elements << group.lanes_log2) < group.width) ++group.lanes_log2;
    const int heads = 32 >> group.lanes_log2;
    group.units = (group.heads + heads - 1) / heads;
    units += group.units;
  }
  // Warps that fill the device a whole number of times end together. Each number of times is tried, and longer strips are
  // preferred, which have less overhead.
  const int64_t rows = int64_t{b} * units;  // warps, were each sequence one strip
  int64_t best = 0, lowest = 0;
  for (int waves = 1; waves <= kMaxWaves; ++waves) {
    const int64_t wanted = std::max<int64_t>(1, int64_t{warps_of_device} * waves / rows);  // strips per sequence
    const int64_t tokens = std::clamp<int64_t>((n + wanted - 1) / wanted, std::min(kMinTokens, n), kMaxTokens);
    const int64_t made = (n + tokens - 1) / tokens;
    const int64_t cost = (rows * made + warps_of_device - 1) / warps_of_device * (tokens + overhead);
    if (best == 0 || cost < lowest) best = tokens, lowest = cost;
  }
  strips.per_sequence = static_cast<int>((n + best - 1) / best);
  strips.tokens = (n + strips.per_sequence - 1) / strips.per_sequence;
  strips.per_sequence = (n + strips.tokens - 1) / strips.tokens;
  strips.warps = rows * strips.per_sequence;
}

}  // namespace fastmax
