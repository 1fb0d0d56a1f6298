// Shares of a state for the warps of the state kernel, and the layout of their accumulators in memory.
#pragma once

#include "linear/order2/features.h"

namespace fastmax {

enum class Extra { kNone, kTile, kLinear, kMoment, kSumW, kSumY };

// A warp's share of a state: a tile and at most one extra octet pair.
template <class Math, int kHeadDim>
struct WarpShare {
  using Tile = StateTile<Math, kHeadDim>;
  using Layout = StateLayout<Math, kHeadDim>;

  int first_value;
  bool has_main;
  int tile = 0, star = 0, base_block = 0;
  Extra extra = Extra::kNone;
  int extra_column0 = 0, extra_column1 = 0, extra_octet = 0, extra_pair = 0;  // columns of the octets that it loads
  float extra_weight = 0.f;

  __device__ __forceinline__ WarpShare(const StateWeights& weights, int block) {
    first_value = block % Tile::kValueGroups * Tile::kValues;
    const int unit = threadIdx.x / kWarpSize * Tile::kGroupBlocks + block / Tile::kValueGroups;
    has_main = Tile::kMainTiles == Tile::kUnits || unit < Tile::kMainTiles;
    if (has_main) tile = unit;
    Stars<kHeadDim>::locate(tile, star, base_block);

    int i = unit;
    const auto take = [&](int count) {
      const bool mine = i >= 0 && i < count;
      if (!mine) i -= count;
      return mine;
    };
    if (take(4 * Tile::kLeftover)) {
      const int leftover = Tile::kMainTiles + i / 4;
      int s, b;
      Stars<kHeadDim>::locate(leftover, s, b);
      extra = Extra::kTile;
      extra_column0 = 8 * b, extra_column1 = 8 * s;
      extra_octet = i % 4 * 2;
      extra_pair = Layout::kTilePair + leftover * 4 + i % 4;
      extra_weight = weights.pair * (s == b ? 1.f : 2.f);
    } else if (take(Tile::kPlainPairs)) {
      extra = Extra::kLinear;
      extra_column0 = 16 * i, extra_column1 = 16 * i + 8;
      extra_pair = Layout::kLinearPair + i;
      extra_weight = weights.linear;
    } else if (take(Tile::kPlainPairs)) {
      extra = Extra::kMoment;
      extra_column0 = 16 * i, extra_column1 = 16 * i + 8;
      extra_pair = Layout::kMomentPair + i;
      extra_weight = weights.moment;
    } else if (take(1)) {
      extra = Extra::kSumW;
    } else if (take(1)) {
      extra = Extra::kSumY;
    }
  }

  __device__ __forceinline__ bool is_sum() const { return extra == Extra::kSumW || extra == Extra::kSumY; }
};

// Accumulators of a thread in memory, a step of the block's threads apart: octets 0 to 7 are those of the tile, 8 and 9 the extra
// pair, of values [16 block, 16 block + 16) and element e of a fragment; the sum of e is the last of StateTile::kAccumulators.
constexpr __host__ __device__ int accumulator_index(int octet, int block, int e) { return (4 * block + e) * 10 + octet; }

}  // namespace fastmax
