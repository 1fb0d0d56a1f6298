// Decay (decay/decay.h) in the main loops of Hopper. The pair of query i and key j has the factor 2^decay(G_(pos(i) + lag), K_j).
//
// Each tile of columns has a reference token: the last key of a tile of keys, the first query of a tile of queries. A pair's
// factor is then a factor of the row times a factor of the column (softmax: a sum of exponents). The factors of the columns are
// computed once for all blocks and are loaded with the tile; a query as a column has its factor in its row score. If all keys
// of the tile come before all queries that see it, no factor of a query exceeds 1, and no factor of a key its gate. If the tile as a
// whole decays by no more than kMostSpan, none exceeds that by more than 2^kMostSpan. Other partly visible tiles take the difference of
// sums for each pair, which stays accurate for large sums. An exact window has exponents with their rounding errors instead.
//
// A factor below 2^-126 is 0. Without gates pairs are then fully decayed; with gates, which are below 2^44, pairs below 2^-82 may be lost.
#pragma once

#include <climits>
#include <type_traits>

#include "core/launch.h"
#include "core/score.h"
#include "core/sm90/ptx.h"
#include "core/visibility.h"
#include "decay/decay.h"

namespace fastmax {

// Visible ranges from tables, with decay.
struct DecayVisibility : TableVisibility {
  static constexpr bool kHasDecay = true;
  using TableVisibility::TableVisibility;
};

template <class Visibility>
inline constexpr bool kHasDecay = std::is_same_v<Visibility, DecayVisibility>;

// Largest decay within a tile, in units of log 2, up to which a partly visible tile uses factors of rows and columns. In the forward
// of an exact window, all pairs of a tile that decays by more take exponents with rounding errors.
inline constexpr float kMostSpan = 48.f;

// In calls with input gates, a tile counts as decaying by this much more: factors of keys are smaller by up to 2^-86, and the reciprocals
// of the rows' sums of weights as much larger.
inline constexpr float kSpanOfGates = 22.f;

// Shared by all columns of a tile; stored after the columns.
struct TileReference {
  float2 sum;  // G of the reference token
  float span;  // decay from the first to the last token of the tile, in units of log 2, >= 0; with gates kSpanOfGates more
  float unused;
};

// A tile of columns in memory: factors of keys, or row scores of queries multiplied by their factors. Tiles are contiguous: of all
// key/value heads, or of the queries of all heads. In an exact window factors are exponents, of keys without their gates. They are
// followed, for keys, by the powers, with gates; for both, by the rounding errors of the exponents (of a query, y of its row score); and
// for keys by exp of the gates. If a kernel loads no more than the columns (DecayColumns::kAlone), these have the gates, and exponents
// without gates are in place of the powers.
template <class Score, bool kOfKeys, int kTile>
struct DecayTile {
  using Column = std::conditional_t<kOfKeys, float, float4>;
  static constexpr int kFloats = kTile * static_cast<int>(sizeof(float));
  static constexpr int kReference = kTile * static_cast<int>(sizeof(Column));  // offsets in bytes
  static constexpr int kPowers = kReference + static_cast<int>(sizeof(TileReference));
  static constexpr int kErrors = kPowers + (kOfKeys ? kFloats : 0);
  static constexpr int kGates = kErrors + kFloats;
  static constexpr int kBytes = !Score::kHasLocalKeys ? kPowers : kGates + (kOfKeys ? kFloats : 0);

  // Bytes of a whole tile that a call loads.
  static __device__ __forceinline__ int bytes(const AttentionParams& p) {
    return kOfKeys && Score::kHasLocalKeys && p.log_input_gate == nullptr ? kGates : kBytes;
  }
};
enum class DecayColumns { kWithAll, kAlone };

// Return K of a key, and G of a key's token and of a query. Positions outside the sequence get those of the nearest token; their pairs
// have no weight.
__device__ __forceinline__ float2 decay_sum_of_key(const AttentionParams& p, int state, int key) {
  return ptx::load_global_here(p.key_sums + static_cast<int64_t>(state) * p.key_sum_tokens + max(0, min(key, p.m - 1)));
}
__device__ __forceinline__ float2 decay_sum_of_token(const AttentionParams& p, int state, int key) {
  return ptx::load_global_here(p.decay_sums + static_cast<int64_t>(state) * p.decay_tokens() + max(0, min(key, p.m - 1)));
}
__device__ __forceinline__ float2 decay_sum_of_query(const AttentionParams& p, int state, int query) {
  const int position = max(0, min(query + p.causal_offset, p.m - 1));
  return ptx::load_global_here(p.decay_sums + static_cast<int64_t>(state) * p.decay_tokens() + position + p.lag);
}

// Position of the key whose pair with query 0 does not count; if all pairs count, no key has this position.
__device__ __forceinline__ int offset_of_own_key(const AttentionParams& p) {
  return p.own_pairs_count() ? INT_MIN / 2 : p.causal_offset;
}

// One thread per column. tiles: per head. kOfKeys: factors of keys, with the tiles of key/value heads; else row scores
// (b, h, rows_per_head) of queries multiplied by their factors.
inline constexpr int kDecayColumnThreads = 256;
template <class Score, bool kOfKeys, int kTile, DecayColumns kLoaded>
__global__ void __launch_bounds__(kDecayColumnThreads) decay_columns_kernel(const AttentionParams p, const int tiles,
                                                                            const float4* row_scores, const int rows_per_head,
                                                                            uint8_t* result) {
  using Tile = DecayTile<Score, kOfKeys, kTile>;
  const int64_t index = int64_t{blockIdx.x} * (kDecayColumnThreads / kTile) + threadIdx.x / kTile, head = index / tiles;
  if (head >= int64_t{p.b} * (kOfKeys ? p.hk : p.h)) return;
  const int begin = static_cast<int>(index % tiles) * kTile, column = static_cast<int>(threadIdx.x % kTile);
  const int state = static_cast<int>(kOfKeys ? head : head / (p.h / p.hk));
  uint8_t* tile = result + index * Tile::kBytes;
  auto* columns = reinterpret_cast<typename Tile::Column*>(tile);
  const auto sum_of = [&](int i) {
    return kOfKeys ? decay_sum_of_token(p, state, begin + i) : decay_sum_of_query(p, state, begin + i);
  };
  const float2 sum = sum_of(column), first = sum_of(0), last = sum_of(kTile - 1);
  const auto floats = [&](int offset) { return reinterpret_cast<float*>(tile + offset); };
  if constexpr (kOfKeys && Score::kHasLocalKeys) {
    const float2 exponent = exact_decay(last, sum), key = decay_sum_of_key(p, state, begin + column);
    const float with_gate = exact_decay(last, key).x;
    columns[column] = kLoaded == DecayColumns::kAlone ? with_gate : exponent.x;
    floats(Tile::kPowers)[column] = kLoaded == DecayColumns::kAlone ? exponent.x : ptx::exp2_approx(with_gate);
    floats(Tile::kErrors)[column] = exponent.y;
    floats(Tile::kGates)[column] = ptx::exp2_approx(decay(sum, key));
  } else if constexpr (kOfKeys) {
    columns[column] = Score::key_factor(decay(last, decay_sum_of_key(p, state, begin + column)));
  } else {
    const float4 row = row_scores[head * rows_per_head + begin + column];
    if constexpr (Score::kHasLocalKeys) {
      const float2 exponent = exact_decay(sum, first), y = exact_sum(row.z, exponent.x);
      columns[column] = Score::row_of(y.x, row.w);
      floats(Tile::kErrors)[column] = y.y + exponent.y;
    } else {
      columns[column] = Score::decay_row(row, Score::query_factor(decay(sum, first)));
    }
  }
  if (column == 0) {
    const float span = -decay(last, first) + (p.log_input_gate == nullptr ? 0.f : kSpanOfGates);
    *reinterpret_cast<TileReference*>(tile + Tile::kReference) = {kOfKeys ? last : first, span, 0.f};
  }
}

inline size_t key_factor_bytes(const AttentionParams& p, int tile) {
  const size_t floats = p.exact_window > 0 ? 4 : 1;  // of a key: DecayTile
  return static_cast<size_t>(p.b) * p.hk * ((p.m + tile - 1) / tile) * (tile * floats * sizeof(float) + sizeof(TileReference));
}
template <class Score, bool kOfKeys, int kTile, DecayColumns kLoaded>
void launch_decay_columns(const char* name, const AttentionParams& p, const float4* row_scores, int rows_per_head, void* result,
                          cudaStream_t stream) {
  const int tiles = ((kOfKeys ? p.m : p.n) + kTile - 1) / kTile;
  constexpr int kTilesPerBlock = kDecayColumnThreads / kTile;
  const int64_t blocks = (int64_t{p.b} * (kOfKeys ? p.hk : p.h) * tiles + kTilesPerBlock - 1) / kTilesPerBlock;
  launch_kernel(name, decay_columns_kernel<Score, kOfKeys, kTile, kLoaded>, grid_1d(blocks), kDecayColumnThreads, 0, stream, p, tiles, row_scores,
                rows_per_head, static_cast<uint8_t*>(result));
}
template <class Score, int kTile, DecayColumns kLoaded = DecayColumns::kWithAll>
void fill_key_factors(const AttentionParams& p, void* result, cudaStream_t stream) {
  launch_decay_columns<Score, true, kTile, kLoaded>("decay_keys", p, nullptr, 0, result, stream);
}

inline constexpr int kDecayQueries = 64;  // queries per tile
inline size_t decayed_row_score_bytes(const AttentionParams& p) {
  const int tile = p.exact_window > 0 ? DecayTile<ExactWindowScore, false, kDecayQueries>::kBytes
                                      : DecayTile<PolynomialScore, false, kDecayQueries>::kBytes;  // as of softmax
  return static_cast<size_t>(p.b) * p.h * ((p.n + kDecayQueries - 1) / kDecayQueries) * tile;
}
template <class Score>
void decay_row_scores(const AttentionParams& p, const float4* row_scores, int rows_per_head, void* result, cudaStream_t stream) {
  launch_decay_columns<Score, false, kDecayQueries, DecayColumns::kWithAll>("decay_queries", p, row_scores, rows_per_head, result, stream);
}

// In place of TileDecay in calls without decay.
struct NoTileDecay {
  template <bool kMasked>
  __device__ __forceinline__ void start(uint32_t) {}
};

// Factors of two neighbouring keys that are columns. factors: shared-memory address of those of the tile.
__device__ __forceinline__ float2 load_key_factors(uint32_t factors, int column) {
  return ptx::load_shared_f32x2(factors + column * static_cast<int>(sizeof(float)));
}

// Factors of this lane's rows, `row` and row + 8. kOwnsKeys: rows are keys and columns are queries; else rows are queries.
// kTile: columns per tile.
template <class Score, bool kOwnsKeys, int kTile>
struct TileDecay {
  using Tile = DecayTile<Score, !kOwnsKeys, kTile>;
  const AttentionParams& p;
  int state;  // key/value head over the whole batch
  float2 rows[2];     // G of the rows, or K where they are keys with gates for all queries
  float of_rows[2];   // factors of the rows in the current tile
  float errors[2];    // of an exact window, in partly visible tiles: rounding errors of these exponents
  float gates[kOwnsKeys && Score::kHasLocalKeys ? 2 : 1];  // of an exact window: exp of the gates of rows that are keys
  bool takes_pairs;   // whether the current tile is partly visible and its span is above kMostSpan

  __device__ __forceinline__ TileDecay(const AttentionParams& p, int state, int row) : p(p), state(state) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half] = kOwnsKeys ? sum_of_key(row + 8 * half) : decay_sum_of_query(p, state, row + 8 * half);
      if constexpr (kOwnsKeys && Score::kHasLocalKeys) {
        gates[half] = 1.f;
        if (p.log_input_gate == nullptr) continue;
        gates[half] = ptx::exp2_approx(decay(rows[half], decay_sum_of_key(p, state, row + 8 * half)));
      }
    }
  }

  // Prepares a tile. columns: shared-memory address of its columns.
  template <bool kMasked>
  __device__ __forceinline__ void start(uint32_t columns) {
    const float4 reference = ptx::load_shared_f32x4(columns + Tile::kReference);
    const float2 sum = make_float2(reference.x, reference.y);
    takes_pairs = kMasked && reference.z > kMostSpan;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 &later = kOwnsKeys ? sum : rows[half], &earlier = kOwnsKeys ? rows[half] : sum;
      if constexpr (Score::kHasLocalKeys && kMasked) {
        const float2 exponent = exact_decay(later, earlier);
        of_rows[half] = exponent.x, errors[half] = exponent.y;
      } else {
        of_rows[half] = Score::key_factor(decay(later, earlier));
      }
    }
  }

  // Factor of a single pair. column: G of the column.
  __device__ __forceinline__ float factor(const float2& column, int half) const {
    return Score::key_factor(kOwnsKeys ? decay(column, rows[half]) : decay(rows[half], column));
  }
  __device__ __forceinline__ float2 sum_of_column(int token) const {
    return kOwnsKeys ? decay_sum_of_query(p, state, token) : sum_of_key(token);
  }

 private:
  // Local keys of an exact window have no gates.
  __device__ __forceinline__ float2 sum_of_key(int key) const {
    return Score::kHasLocalKeys ? decay_sum_of_token(p, state, key) : decay_sum_of_key(p, state, key);
  }
};

}  // namespace fastmax
