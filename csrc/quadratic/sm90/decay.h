// Keys that fade (decay/decay.h) in Hopper's main loops: the pair of query i and key j has the factor 2^fading(G_pos(i), G_j).
//
// A tile of columns has a token that its columns count from, the last key of a tile of keys, the first query of a tile of queries: the
// factor is a number per row times a number per column (for softmax a sum of exponents). Those of columns are made once for all blocks
// and come with the tile; a query as a column has it in its row score. Neither is above 1 where all keys of the tile are before all
// queries that look at it, and none above 2^kMostSpan where the tile as a whole fades by no more. What else is partly visible takes the
// difference of each pair, which loses no digits where sums are large.
#pragma once

#include <type_traits>

#include "core/launch.h"
#include "core/score.h"
#include "core/sm90/ptx.h"
#include "core/visibility.h"
#include "decay/decay.h"

namespace fastmax {

// What tables say, and keys fade.
struct DecayVisibility : TableVisibility {
  static constexpr bool kHasDecay = true;
  using TableVisibility::TableVisibility;
};

template <class Visibility>
inline constexpr bool kHasDecay = std::is_same_v<Visibility, DecayVisibility>;

inline constexpr float kMostSpan = 48.f;

// What all columns of a tile share, behind their numbers.
struct TileReference {
  float2 sum;  // G of the token that columns count from
  float span;  // log2 of what is left of the first token at the last one, negated
  float unused;
};

// In memory: a tile of columns behind the other, each with its TileReference; of all key/value heads, or of queries of all heads.
template <class Column, int kTile>
inline constexpr int kDecayTileBytes = kTile * static_cast<int>(sizeof(Column)) + static_cast<int>(sizeof(TileReference));

// Tokens outside are as the nearest one: what they are part of has no weight.
__device__ __forceinline__ float2 decay_sum_of_key(const AttentionParams& p, int state, int key) {
  return ptx::load_global_here(p.decay_sums + static_cast<int64_t>(state) * p.m + max(0, min(key, p.m - 1)));
}
__device__ __forceinline__ float2 decay_sum_of_query(const AttentionParams& p, int state, int query) {
  return decay_sum_of_key(p, state, query + p.causal_offset);
}

// A block per tile and head, a thread per column. kOfKeys: factors of keys, heads are those of keys; else row scores of queries with
// their factors, from row_scores (b, h, rows_per_head).
template <class Score, bool kOfKeys, int kTile>
__global__ void __launch_bounds__(kTile) decay_columns_kernel(const AttentionParams p, const int tiles, const float4* row_scores,
                                                               const int rows_per_head, uint8_t* result) {
  using Column = std::conditional_t<kOfKeys, float, float4>;
  const int64_t head = blockIdx.x / tiles;
  const int begin = static_cast<int>(blockIdx.x % tiles) * kTile, column = static_cast<int>(threadIdx.x);
  const int state = static_cast<int>(kOfKeys ? head : head / (p.h / p.hk));
  uint8_t* tile = result + static_cast<int64_t>(blockIdx.x) * kDecayTileBytes<Column, kTile>;
  Column* columns = reinterpret_cast<Column*>(tile);
  const auto sum_of = [&](int i) {
    return kOfKeys ? decay_sum_of_key(p, state, begin + i) : decay_sum_of_query(p, state, begin + i);
  };
  const float2 sum = sum_of(column), first = sum_of(0), last = sum_of(kTile - 1);
  if constexpr (kOfKeys) {
    columns[column] = Score::key_factor(decay(last, sum));
  } else {
    columns[column] = Score::decay_row(row_scores[head * rows_per_head + begin + column], Score::query_factor(decay(sum, first)));
  }
  if (column == 0) {
    *reinterpret_cast<TileReference*>(tile + kTile * sizeof(Column)) = {kOfKeys ? last : first, -decay(last, first), 0.f};
  }
}

inline size_t key_factor_bytes(const AttentionParams& p, int tile) {
  return static_cast<size_t>(p.b) * p.hk * ((p.m + tile - 1) / tile) * (tile * sizeof(float) + sizeof(TileReference));
}
template <class Score, int kTile>
void fill_key_factors(const AttentionParams& p, void* result, cudaStream_t stream) {
  const int tiles = (p.m + kTile - 1) / kTile;
  launch_kernel("decay_keys", decay_columns_kernel<Score, true, kTile>, grid_1d(int64_t{p.b} * p.hk * tiles), kTile, 0, stream, p, tiles,
                static_cast<const float4*>(nullptr), 0, static_cast<uint8_t*>(result));
}

inline constexpr int kDecayQueries = 64;  // of a tile
inline size_t decayed_row_score_bytes(const Problem& p) {
  return static_cast<size_t>(p.b) * p.h * ((p.n + kDecayQueries - 1) / kDecayQueries) * kDecayTileBytes<float4, kDecayQueries>;
}
template <class Score>
void decay_row_scores(const AttentionParams& p, const float4* row_scores, int rows_per_head, void* result, cudaStream_t stream) {
  const int tiles = (p.n + kDecayQueries - 1) / kDecayQueries;
  launch_kernel("decay_queries", decay_columns_kernel<Score, false, kDecayQueries>, grid_1d(int64_t{p.b} * p.h * tiles), kDecayQueries,
                0, stream, p, tiles, row_scores, rows_per_head, static_cast<uint8_t*>(result));
}

// For loops where nothing fades.
struct NoTileDecay {
  template <bool kMasked>
  __device__ __forceinline__ void start(uint32_t) {}
};

// kOwnsKeys: rows are keys, columns queries; else the other way round. Rows are `row` and row + 8 of this lane. kTile: columns.
template <class Score, bool kOwnsKeys, int kTile>
struct TileDecay {
  using Column = std::conditional_t<kOwnsKeys, float4, float>;
  const AttentionParams& p;
  int state;
  float2 rows[2];     // G
  float of_rows[2];   // their factors, of a tile
  bool takes_pairs;   // of a masked tile

  __device__ __forceinline__ TileDecay(const AttentionParams& p, int state, int row) : p(p), state(state) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half] = kOwnsKeys ? decay_sum_of_key(p, state, row + 8 * half) : decay_sum_of_query(p, state, row + 8 * half);
    }
  }

  // Before the pairs of the tile whose columns lie there in shared memory.
  template <bool kMasked>
  __device__ __forceinline__ void start(uint32_t columns) {
    const float4 reference = ptx::load_shared_f32x4(columns + kTile * static_cast<int>(sizeof(Column)));
    const float2 sum = make_float2(reference.x, reference.y);
    takes_pairs = kMasked && reference.z > kMostSpan;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      of_rows[half] = Score::key_factor(kOwnsKeys ? decay(sum, rows[half]) : decay(rows[half], sum));
    }
  }

  // Of keys that are columns: of two, one behind the other.
  __device__ __forceinline__ static float2 columns(uint32_t columns, int column) {
    return ptx::load_shared_f32x2(columns + column * static_cast<int>(sizeof(float)));
  }

  // Of a pair, with a column that is this token.
  __device__ __forceinline__ float factor(const float2& column, int half) const {
    return Score::key_factor(kOwnsKeys ? decay(column, rows[half]) : decay(rows[half], column));
  }
  __device__ __forceinline__ float2 sum_of_column(int token) const {
    return kOwnsKeys ? decay_sum_of_query(p, state, token) : decay_sum_of_key(p, state, token);
  }
};

}  // namespace fastmax
