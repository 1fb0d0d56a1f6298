// An exact window in the main loops of Hopper (ExactWindowScore). Tiles that all rows see and that hold no local key of any row
// are whole. In other tiles a warp decides for each group, its 16 rows and 16 columns, whether the pairs are all local, all global or
// all hidden. Only where they differ does it decide for each pair.
#pragma once

#include <climits>

#include "core/params.h"
#include "core/visibility.h"
#include "quadratic/sm90/visible.h"

namespace fastmax {

// Which columns of a tile are local to a lane's rows.
struct LocalColumns {
  int first[2];    // the first one of each row, counted from the lane's first column
  unsigned count;  // of each row

  // i: index of an accumulator (wgmma.h).
  __device__ __forceinline__ bool has(int i) const {
    return static_cast<unsigned>(i / 4 * 8 + i % 2 - first[i / 2 % 2]) < count;
  }
};

// The rows `row` and row + 8 of a lane. position: that of `row` among the columns' tokens.
struct LocalKeys {
  int window, position;

  __device__ __forceinline__ LocalColumns columns(int tile_begin, int t) const {
    const int first = position - window + 1 - tile_begin - 2 * t;
    return {{first, first + 8}, 2 * static_cast<unsigned>(window) - 1};
  }
};

// How a warp processes its groups of columns. Groups that are none of these are mixed. Narrower groups would be mixed less often, but
// branches take longer than the pairs that they save.
struct ColumnGroups {
  static constexpr int kBlocks = 2;  // of a group, 8 columns each
  uint32_t hidden, local, global;    // bit kBlocks i belongs to group i

  constexpr __device__ __forceinline__ bool is_hidden(int i) const { return (hidden >> kBlocks * i & 1u) != 0; }
  constexpr __device__ __forceinline__ bool is_local(int i) const { return (local >> kBlocks * i & 1u) != 0; }
  constexpr __device__ __forceinline__ bool is_global(int i) const { return (global >> kBlocks * i & 1u) != 0; }

  static constexpr __device__ __forceinline__ ColumnGroups all_global() { return {0u, 0u, ~0u}; }

  // visible: as visible_keys and visible_queries fill it. row: position of the warp's first row among the columns' tokens. Groups
  // with a pair of a token with itself are mixed.
  template <int kWords>
  static __device__ __forceinline__ ColumnGroups of(const uint32_t (&visible)[2][kWords], int window, int row, int tile_begin) {
    uint32_t all = 0, any = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t both = visible[0][i] & visible[1][i], either = visible[0][i] | visible[1][i];
      all |= bit_per_byte(__reduce_and_sync(0xffffffffu, both & both >> 1)) << (4 * i);
      any |= bit_per_byte(__reduce_or_sync(0xffffffffu, either | either >> 1)) << (4 * i);
    }
    // Block j has columns 8 j .. 8 j + 7, and rows have the columns `first` .. first + 15 as their own.
    const int first = row - tile_begin;
    const uint32_t itself = bits(first - 7, first + 15), before_local = bits(INT_MIN / 2, first - window - 7);
    const uint32_t behind_local = bits(first + 15 + window, INT_MAX / 2);
    const uint32_t local = bits(first + 15 - window + 1, first + window - 1 - 7);
    return {both_blocks(~any), both_blocks(all & local & ~itself), both_blocks(all & (before_local | behind_local))};
  }

 private:
  static __device__ __forceinline__ uint32_t both_blocks(uint32_t bits) { return bits & bits >> 1; }
  // Blocks whose first column is in [from, to].
  static __device__ __forceinline__ uint32_t bits(int from, int to) {
    const int begin = min(max((from + 7) >> 3, 0), 16), end = min(max((to >> 3) + 1, begin), 16);
    return (1u << end) - (1u << begin);
  }
  // Packs the lowest bit of each byte.
  static __device__ __forceinline__ uint32_t bit_per_byte(uint32_t x) { return ((x & 0x01010101u) * 0x10204080u) >> 28; }
};

// What the pairs of a tile are.
enum class TileKind {
  kWhole,  // all visible, and global if there are local keys
  kLocal,  // all visible and local
  kMixed,
};

// Tiles that rows see. Those of `local` are wholly visible too, and hold local keys alone.
struct TileKindRanges : TileRanges {
  Range local{0, 0};

  __device__ __forceinline__ TileKind kind_of(int tile) const {
    return whole.contains(tile) ? TileKind::kWhole : local.contains(tile) ? TileKind::kLocal : TileKind::kMixed;
  }
};

// Marks local columns in the order of visible_keys (visible.h). row: position of a lane's first row among the columns' tokens.
template <int kWords>
__device__ __forceinline__ void local_columns(uint32_t (&local)[2][kWords], int window, int row, int tile_begin, int t) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = row + 8 * half - tile_begin;
#pragma unroll
    for (int i = 0; i < kWords; ++i) local[half][i] = (low_bits(own + window, i) & ~low_bits(own - window + 1, i)) >> (2 * t);
  }
}

// Tiles of local keys alone among those that all rows see. first, last: positions of the rows among the columns' tokens.
template <int kTile>
__device__ __forceinline__ Range local_tiles(Range whole, int window, int first, int last) {
  const Range local = tiles_within<kTile>({max(0, last - window + 1), max(0, first + window)});
  return {max(whole.begin, local.begin), min(whole.end, local.end)};
}

// Tiles without local keys: the longer of the two parts of `whole` before and behind the tiles with local tokens. first, last:
// positions of the rows among the columns' tokens. empty: what to return if no tile is left.
template <int kTile>
__device__ __forceinline__ Range without_local_tiles(Range whole, int window, int first, int last, Range empty) {
  const Range local = tiles_with<kTile>({max(0, first - window + 1), max(0, last + window)});
  const Range before{whole.begin, min(whole.end, local.begin)}, behind{max(whole.begin, local.end), whole.end};
  const Range longer = before.end - before.begin >= behind.end - behind.begin ? before : behind;
  return longer.end > longer.begin ? longer : empty;
}

}  // namespace fastmax
