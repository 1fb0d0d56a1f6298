// An exact window in the main loops of Hopper (ExactWindowScore). Tiles that hold global keys alone or local keys alone, and that all
// rows see, have code of their own. In mixed tiles each pair selects, without branches.
#pragma once

#include "core/params.h"
#include "core/visibility.h"
#include "quadratic/sm90/visible.h"

namespace fastmax {

// What the pairs of a tile are.
enum class TileKind {
  kHidden,
  kWhole,  // all visible, and global if there are local keys
  kLocal,  // all visible and local
  kMixed,
};

// Tiles that rows see. Those of `local` are wholly visible too, and hold local keys alone.
struct TileKindRanges : TileRanges {
  Range local{0, 0};

  __device__ __forceinline__ TileKind kind_of(int tile) const {
    if (!seen.contains(tile)) return TileKind::kHidden;
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

// The global key of a query that decays least, -1 if there is none. seen: the keys that the query sees, masked ones included.
__device__ __forceinline__ int nearest_global_key(const AttentionParams& p, const KeptWords& kept, int batch, Range seen, int query) {
  const int position = query + p.causal_offset;
  const int before = kept.find<true>(batch, {seen.begin, min(position - p.exact_window + 1, seen.end)});
  return before >= 0 ? before : kept.find<false>(batch, {max(position + p.exact_window, seen.begin), seen.end});
}

// Divides the tiles that all rows see. `whole` is left the longer of the two parts before and behind the tiles with local tokens; if
// both are empty it begins and ends at `none`. first, last: positions of the rows among the columns' tokens.
template <int kTile>
__device__ __forceinline__ TileKindRanges tile_kinds(const TileRanges& tiles, int window, int first, int last, int none) {
  const Range whole = tiles.whole, local = tiles_with<kTile>({max(0, first - window + 1), max(0, last + window)});
  const Range all_local = tiles_within<kTile>({max(0, last - window + 1), max(0, first + window)});
  const Range before{whole.begin, min(whole.end, local.begin)}, behind{max(whole.begin, local.end), whole.end};
  const Range longer = before.end - before.begin >= behind.end - behind.begin ? before : behind;
  return {{tiles.seen, longer.end > longer.begin ? longer : Range{none, none}},
          {max(whole.begin, all_local.begin), min(whole.end, all_local.end)}};
}

}  // namespace fastmax
