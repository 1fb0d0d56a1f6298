// An exact window in the main loops of Hopper (ExactWindowScore). A kernel has code for each kind of tile; in tiles with pairs of
// several kinds each pair selects, without branches.
#pragma once

#include <type_traits>

#include "core/params.h"
#include "core/visibility.h"
#include "quadratic/sm90/visible.h"

namespace fastmax {

// What the pairs of a tile are.
enum class TileKind {
  kHidden,
  kWhole,        // all visible, and global if there are local keys
  kLocal,        // all visible and local
  kMaskedLocal,  // local where visible
  kDivided,      // all visible, some local
  kMixed,
};
template <TileKind kKind>
inline constexpr bool kMasksPairs = kKind == TileKind::kMaskedLocal || kKind == TileKind::kMixed;
template <TileKind kKind>
inline constexpr bool kSelectsPairs = kKind == TileKind::kDivided || kKind == TileKind::kMixed;

// Calls run(kind) with the kind of a tile that is not hidden as a constant.
template <class Run>
__device__ __forceinline__ void with_kind(TileKind kind, const Run& run) {
  if (kind == TileKind::kWhole) run(std::integral_constant<TileKind, TileKind::kWhole>());
  else if (kind == TileKind::kLocal) run(std::integral_constant<TileKind, TileKind::kLocal>());
  else if (kind == TileKind::kMaskedLocal) run(std::integral_constant<TileKind, TileKind::kMaskedLocal>());
  else if (kind == TileKind::kDivided) run(std::integral_constant<TileKind, TileKind::kDivided>());
  else run(std::integral_constant<TileKind, TileKind::kMixed>());
}

// The kinds of the tiles that rows see.
struct TileKinds {
  Range seen, visible, local, some_local;  // in which some pair is visible, all are visible, all are local, some are

  __device__ __forceinline__ TileKind kind_of(int tile) const {
    if (!seen.contains(tile)) return TileKind::kHidden;
    if (local.contains(tile)) return visible.contains(tile) ? TileKind::kLocal : TileKind::kMaskedLocal;
    if (!visible.contains(tile)) return TileKind::kMixed;
    return some_local.contains(tile) ? TileKind::kDivided : TileKind::kWhole;
  }
};

// first, last: positions of the rows among the columns' tokens.
template <int kTile>
__device__ __forceinline__ TileKinds tile_kinds(const TileRanges& tiles, int window, int first, int last) {
  return {tiles.seen, tiles.whole, tiles_within<kTile>({max(0, last - window + 1), max(0, first + window)}),
          tiles_with<kTile>({max(0, first - window + 1), max(0, last + window)})};
}

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

}  // namespace fastmax
