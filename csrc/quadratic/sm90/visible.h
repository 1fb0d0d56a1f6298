// Masks of the visible pairs of a partly visible tile, as bits in the order of a thread's accumulators (wgmma.h).
// visible[half][i] belongs to row g + 8 half and to the 32 columns from 32 i on. Its bits are shifted down by 2t, so that the
// bit index of each accumulator is a compile-time constant.
#pragma once

#include <climits>

#include "core/visibility.h"
#include "quadratic/sm90/decay.h"
#include "quadratic/sm90/kept_keys.h"

namespace fastmax {

// Whether the pair of accumulator i is visible.
template <int kWords>
__device__ __forceinline__ bool is_visible(const uint32_t (&visible)[2][kWords], int i) {
  return (visible[i >> 1 & 1][i >> 4] & 1u << ((i >> 2 & 3) * 8 + (i & 1))) != 0;
}

// Returns word `word` of a bit string whose lowest `count` bits are ones.
__device__ __forceinline__ uint32_t low_bits(int count, int word) {
  return static_cast<uint32_t>((uint64_t{1} << min(max(count - 32 * word, 0), 32)) - 1);
}

// Hides from the compiler that `row` is the same in every tile. Otherwise it would keep the row's bounds in registers between
// tiles.
template <class Visibility>
__device__ __forceinline__ int row_again(int row) {
  if constexpr (Visibility::kBoundsBothSides && !Visibility::kHasTables) {
    return static_cast<int>(ptx::keep_in_register(row));
  } else {
    return row;
  }
}

// Tables as a lane reads them: the ranges of its rows `row` and row + 8, loaded once.
template <bool kOfKeys>
struct LaneVisibility {
  static constexpr bool kBoundsBothSides = true, kHasTables = true;
  int row;
  Range ranges[2];

  __device__ __forceinline__ LaneVisibility(const TableVisibility& sees, int row) : row(row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) ranges[half] = kOfKeys ? sees.queries_of(row + 8 * half) : sees.keys_of(row + 8 * half);
  }
  __device__ __forceinline__ Range keys_of(int query) const { return ranges[(query - row) / 8]; }
  __device__ __forceinline__ Range queries_of(int key) const { return ranges[(key - row) / 8]; }
};

// Marks the visible keys of the queries `row` and row + 8. Columns are the 32 kWords keys of a tile. t: lane % 4.
template <int kWords, class Visibility>
__device__ __forceinline__ void visible_keys(uint32_t (&visible)[2][kWords], const Visibility& sees, const KeptWords& kept, int batch,
                                             int tile, int row, int t) {
  constexpr int kKeys = 32 * kWords;
  uint32_t words[kWords];
  kept.load(words, batch, tile);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Range keys = sees.keys_of(row_again<Visibility>(row) + 8 * half);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint32_t bits = words[i] & low_bits(keys.end - tile * kKeys, i);
      if constexpr (Visibility::kBoundsBothSides) bits &= ~low_bits(keys.begin - tile * kKeys, i);
      visible[half][i] = bits >> (2 * t);
    }
  }
}

// Sets the scores of invisible keys to -infinity. It does the job of visible_keys row by row, in fewer registers, if only
// scores are needed.
template <class Visibility, int kCount>
__device__ __forceinline__ void hide_keys(float (&scores)[kCount], const Visibility& sees, const KeptWords& kept, int batch, int tile,
                                          int row, int t) {
  constexpr int kWords = kCount / 16, kKeys = 32 * kWords;
  const auto bits_below = [](int count, int word) { return __funnelshift_lc(~0u, 0u, max(count - 32 * word, 0)); };  // low_bits
  uint32_t words[kWords];
  kept.load(words, batch, tile);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Range keys = sees.keys_of(row_again<Visibility>(row) + 8 * half);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t bits =
          (words[i] & bits_below(keys.end - tile * kKeys, i) & ~bits_below(keys.begin - tile * kKeys, i)) >> (2 * t);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float& x = scores[16 * i + j / 2 * 4 + 2 * half + j % 2];
        x = (bits >> (j / 2 * 8 + j % 2) & 1u) != 0 ? x : -INFINITY;
      }
    }
  }
}

// Marks the queries of a tile that see the keys `row` and row + 8. Columns are the 32 kWords queries of the tile. Bits of
// queries beyond the last one may be set; these queries are zeros.
template <int kWords, class Visibility>
__device__ __forceinline__ void visible_queries(uint32_t (&visible)[2][kWords], const Visibility& sees, int tile, int row, int t) {
  constexpr int kQueries = 32 * kWords;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Range queries = sees.queries_of(row_again<Visibility>(row) + 8 * half);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint32_t bits = ~low_bits(queries.begin - tile * kQueries, i);
      if constexpr (Visibility::kBoundsBothSides) bits &= low_bits(queries.end - tile * kQueries, i);
      visible[half][i] = bits >> (2 * t);
    }
  }
}

// All tiles of a block. The producer loads the tiles of the block, and every consumer waits for each of them once. The tiles of
// a consumer must therefore lie within those of its block. That holds for bounds that never decrease; tables may hold invalid
// bounds that do, and the tiles of a consumer are clamped to those of its block.
inline constexpr Range kAllTiles{0, INT_MAX};

template <class Visibility>
__device__ __forceinline__ Range clamped_to_block(Range tiles, Range block) {
  if constexpr (Visibility::kHasTables) return {max(tiles.begin, block.begin), min(tiles.end, block.end)};
  else return tiles;
}

// Return the tiles that rows first .. last see, and the wholly visible ones among them. If there are none of these, `whole` is
// an empty range where the loop arrives last: at the beginning for keys, which are processed downwards, and at the end for
// queries, which are processed upwards. block: tiles of the consumer's block.
template <int kTile, class Visibility>
__device__ __forceinline__ TileRanges key_tile_ranges(const Visibility& sees, const KeptWords& kept, int batch, int first, int last,
                                                     Range block = kAllTiles) {
  TileRanges tiles = key_tiles<kTile>(sees, first, last);
  if constexpr (kHasDecay<Visibility>) {  // all keys of a whole tile come before all rows
    tiles.whole = tiles_within<kTile>({sees.keys_of(last).begin, sees.keys_of(first).end - 1});
  }
  tiles.seen = clamped_to_block<Visibility>(kept.trim<kTile>(batch, tiles.seen), block);
  tiles.whole = {max(tiles.whole.begin, tiles.seen.begin), min(tiles.whole.end, tiles.seen.end)};
  if (!kept.keeps_all() || tiles.whole.end <= tiles.whole.begin) tiles.whole = {tiles.seen.begin, tiles.seen.begin};
  return tiles;
}
template <int kTile, class Visibility>
__device__ __forceinline__ TileRanges query_tile_ranges(const Visibility& sees, int first, int last, Range block = kAllTiles) {
  TileRanges tiles = query_tiles<kTile>(sees, first, last);
  tiles.seen = clamped_to_block<Visibility>(tiles.seen, block);
  // All queries of a whole tile come after all rows.
  if constexpr (kHasDecay<Visibility>) tiles.whole.begin = tiles_within<kTile>({sees.queries_of(last).begin + 1, 0}).begin;
  tiles.whole = {max(tiles.whole.begin, tiles.seen.begin), min(tiles.whole.end, tiles.seen.end)};
  if (tiles.whole.end <= tiles.whole.begin) tiles.whole = {tiles.seen.end, tiles.seen.end};
  return tiles;
}

}  // namespace fastmax
