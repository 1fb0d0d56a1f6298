// Keys that fade (decay/decay.h) in Hopper's main loops: the pair of query i and key j has the factor 2^fading(G_pos(i), G_j).
//
// Of a wholly visible tile all keys are before all queries that look at it, so that there is a token between them: the last key of a tile
// of keys, the first query of a tile of queries. The factor is then a number per row times a number per column (for softmax a sum of
// exponents), neither above 1. Partly visible tiles take the difference of each pair, which loses no digits where sums are large.
#pragma once

#include <type_traits>

#include "core/score.h"
#include "core/sm90/ptx.h"
#include "core/visibility.h"
#include "decay/decay.h"

namespace fastmax {

// What tables say, and keys fade.
struct FadingVisibility : TableVisibility {
  static constexpr bool kFades = true;
  using TableVisibility::TableVisibility;
};

template <class Visibility>
inline constexpr bool kFades = std::is_same_v<Visibility, FadingVisibility>;

// For loops where nothing fades.
struct NoTileFading {
  struct Columns {};
  template <bool kMasked>
  __device__ __forceinline__ void start(int) {}
  template <bool kMasked>
  __device__ __forceinline__ Columns columns(int) const {
    return {};
  }
};

// kOwnsKeys: rows are keys, columns queries; else the other way round. Rows are `row` and row + 8 of this lane. kTile: columns.
template <class Score, bool kOwnsKeys, int kTile>
struct TileFading {
  const AttentionParams& p;
  int state;
  float2 rows[2];      // G
  float2 reference;    // of a whole tile
  float of_rows[2];    // their factors

  struct Columns {
    float2 sums[2];
    float factors[2];  // of a whole tile
  };

  __device__ __forceinline__ TileFading(const AttentionParams& p, int state, int row) : p(p), state(state) {
#pragma unroll
    for (int half = 0; half < 2; ++half) rows[half] = kOwnsKeys ? of_key(row + 8 * half) : of_query(row + 8 * half);
  }

  // Tokens outside are as the nearest one: what they are part of has no weight.
  __device__ __forceinline__ float2 of_key(int key) const {
    return ptx::load_global_here(p.decay_sums + static_cast<int64_t>(state) * p.m + max(0, min(key, p.m - 1)));
  }
  __device__ __forceinline__ float2 of_query(int query) const { return of_key(query + p.causal_offset); }

  // Before the pairs of the tile that begins at this token.
  template <bool kMasked>
  __device__ __forceinline__ void start(int begin) {
    if constexpr (!kMasked) {
      reference = kOwnsKeys ? of_query(begin) : of_key(begin + kTile - 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        of_rows[half] = Score::key_factor(kOwnsKeys ? fading(reference, rows[half]) : fading(rows[half], reference));
      }
    }
  }

  // Of a token and the next.
  template <bool kMasked>
  __device__ __forceinline__ Columns columns(int token) const {
    Columns columns;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      columns.sums[e] = kOwnsKeys ? of_query(token + e) : of_key(token + e);
      if constexpr (!kMasked) {
        columns.factors[e] = Score::key_factor(kOwnsKeys ? fading(columns.sums[e], reference) : fading(reference, columns.sums[e]));
      }
    }
    return columns;
  }

  template <bool kMasked>
  __device__ __forceinline__ float factor(const Columns& columns, int e, int half) const {
    if constexpr (kMasked) {
      return Score::key_factor(kOwnsKeys ? fading(columns.sums[e], rows[half]) : fading(rows[half], columns.sums[e]));
    } else {
      return Score::fade_line(columns.factors[e], of_rows[half]);
    }
  }
};

}  // namespace fastmax
