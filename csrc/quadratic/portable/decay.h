// Decay (decay/decay.h) in the portable quadratic main loops. The pair of query i and key j has the factor
// 2^decay(G_(pos(i) + lag), G_j). With a lag, read G_pos(i) as G_(pos(i) + lag) below.
//
// A warp owns rows of one side and streams tiles of the other. Seen from its rows, a tile is separable or pairwise:
//
//     keys        0 1 2 3|4 5 6 7|8 9 . .
//     queries                ^ ^ ^ ^
//                 separable pairwise pairwise
//
// Separable: all keys come before all queries, so that one token of the rows, the reference, lies between them. The factor is
// then 2^decay(G_pos(i), G_ref) times 2^decay(G_ref, G_j), a number per row and a number per key, neither above 1.
// Pairwise: the factor is computed from the difference of G of each pair, which stays accurate for large sums.
//
// Partly visible tiles, which mask single pairs anyway, are pairwise too. Score policies define how a factor joins a pair
// (score.h): query_factor, key_factor, decay_row and apply_decay.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <type_traits>

#include "core/device.h"
#include "core/fragments.h"
#include "core/params.h"
#include "core/ptx.h"
#include "core/score.h"
#include "core/tiles.h"
#include "decay/decay.h"

namespace fastmax {

// K of the keys of a head, and G of their tokens and of queries. Positions outside the keys get those of the nearest key; their pairs have
// no weight.
struct DecaySums {
  const AttentionParams& p;
  const float2 *sums, *key_sums;

  __device__ __forceinline__ DecaySums(const AttentionParams& p, int state)
      : p(p),
        sums(p.decay_sums + static_cast<int64_t>(state) * p.decay_tokens()),
        key_sums(p.key_sums + static_cast<int64_t>(state) * p.key_sum_tokens) {}

  __device__ __forceinline__ bool has_decay() const { return p.decay_sums != nullptr; }
  __device__ __forceinline__ int position(int query) const { return max(0, min(query + p.causal_offset, p.m - 1)); }
  __device__ __forceinline__ float2 of_key(int key) const { return __ldg(key_sums + min(key, p.m - 1)); }
  __device__ __forceinline__ float2 of_token(int key) const { return __ldg(sums + min(key, p.m - 1)); }
  __device__ __forceinline__ float2 of_query(int query) const { return __ldg(sums + position(query) + p.lag); }

  // The first tile of keys that is pairwise to the queries from `query` on; the tiles before it are separable.
  template <int kStream>
  __device__ __forceinline__ int first_pairwise_tile(int query) const {
    return position(query) / kStream;
  }
};

// Shared memory after a kernel's tiles, in calls with decay. Each warp has a Factor for every token of a tile. Each thread of a
// backward (kSumsPairs) has its pair sums, which in registers would slow down the loops of calls without decay.
template <class TileOfKernel, class Factor, bool kSumsPairs>
struct DecayScratch {
  using Tile = TileOfKernel;
  static constexpr int kWarpBytes = Tile::kStream * static_cast<int>(sizeof(Factor));
  static constexpr int kFactorBytes = Tile::kThreads / kWarpSize * kWarpBytes;
  static constexpr int kSums = kSumsPairs ? Tile::kRowTiles * 2 : 0;
  static constexpr int kBytes = kFactorBytes + Tile::kThreads * kSums * static_cast<int>(sizeof(float));
  static_assert(Tile::kSharedBytes + kBytes <= kMaxSharedBytes, "what fades does not fit in shared memory beside the stages");

  static constexpr int bytes(const AttentionParams& p) { return !p.has_decay() ? 0 : kBytes; }

  uint32_t base;

  // Address of the factor of token 0, for a tile whose tokens begin at `begin`.
  __device__ __forceinline__ uint32_t factors(int begin) const {
    return base + threadIdx.x / kWarpSize * kWarpBytes - static_cast<uint32_t>(begin) * sizeof(Factor);
  }
  __device__ __forceinline__ uint32_t sum(int i, int half) const {
    return base + kFactorBytes + ((i * 2 + half) * Tile::kThreads + threadIdx.x) * sizeof(float);
  }

  // Stores factor_of(token) of the tile's tokens for this warp, which must have finished the previous tile.
  template <class FactorOf>
  __device__ __forceinline__ void fill(int begin, const FactorOf& factor_of) const {
#pragma unroll
    for (int i = 0; i < Tile::kStream; i += kWarpSize) {
      const int token = begin + i + lane_index();
      if (Tile::kStream % kWarpSize == 0 || token < begin + Tile::kStream) {
        const uint32_t address = factors(begin) + token * sizeof(Factor);
        if constexpr (sizeof(Factor) == sizeof(float)) ptx::store_shared_f32(address, factor_of(token));
        else ptx::store_shared_f32x4(address, factor_of(token));
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void clear_sums() const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) ptx::store_shared_f32(sum(i / 2, i % 2), 0.f);
  }
  __device__ __forceinline__ void add_sums(const float (&x)[Tile::kRowTiles][2]) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      ptx::store_shared_f32(sum(i / 2, i % 2), ptx::load_shared_f32(sum(i / 2, i % 2)) + x[i / 2][i % 2]);
    }
  }
  // Stores the pair sums of a warp's rows to global memory.
  template <class FinishRow>
  __device__ __forceinline__ void store_sums(float* dst, int warp_row, int row_end, const FinishRow& finish_row) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const float x = quad_sum(ptx::load_shared_f32(sum(i / 2, i % 2)));
      const int row = warp_row + i * 8 + lane_index() / 4;
      if (lane_index() % 4 == 0 && row < row_end) dst[row] = finish_row(row, x);
    }
  }
};

// Scratch of a backward that streams keys, or queries.
template <class Tile>
using KeyDecayScratch = DecayScratch<Tile, float, true>;
template <class Tile>
using QueryDecayScratch = DecayScratch<Tile, float4, true>;

// Interface of decay factors in the main loops:
//   visit(f)          calls f with an object that has the members below
//   at(token)         data of the streamed tokens `token` and `token` + 1
//   row(address, token)  score of a streamed query, in a backward that owns keys; `address` is its place in the stage
//   factor, pair      factor, or weight and derivative, of streamed token e (0 or 1) with row (i, half) of this lane
//   weight, pair_of_centred  the same for pairs of warps, from x (or the weight, if it is the slope) and the centred line
//   add_flow          adds to the pair sums (decay/decay.h) of a lane's rows
// NoDecay is for calls without decay.
template <class Score>
struct NoDecay {
  static constexpr bool kHasDecay = false;
  struct Pair {};

  template <class Function>
  __device__ __forceinline__ void visit(const Function& function) const {
    function(*this);
  }
  __device__ __forceinline__ Pair at(int) const { return {}; }
  __device__ __forceinline__ float4 row(uint32_t address, int) const { return ptx::load_shared_f32x4(address); }
  __device__ __forceinline__ WeightAndDerivative pair(const float4& row, float x, float dp, Pair, int, int, int) const {
    return Score::weight_and_derivative(row, x, dp);
  }
  __device__ __forceinline__ float weight(const float4& row, float x, Pair, int, int, int) const {
    return Score::weight(row, x);
  }
  __device__ __forceinline__ WeightAndDerivative pair_of_centred(const float4& row, float x, float centred, Pair, int, int, int) const {
    return {0.f, centred * (Score::kSlopeIsWeight ? x : Score::slope(Score::slope_line(row).at(x)))};
  }
  __device__ __forceinline__ void add_flow(const WeightAndDerivative&, int, int, int, int) const {}
  template <class Scratch>
  __device__ __forceinline__ void finish_slab(const Scratch&) const {}
};

// Pair functions in terms of Self::factor.
template <class Score, class Self>
struct DecayPairs {
  static constexpr bool kHasDecay = true;

  template <class Pair>
  __device__ __forceinline__ DecayedPair pair(const float4& row, float x, float dp, const Pair& at, int e, int i, int half) const {
    return Score::decayed(row, x, dp, self().factor(at, e, i, half));
  }
  template <class Pair>
  __device__ __forceinline__ float weight(const float4& row, float x, const Pair& at, int e, int i, int half) const {
    return Score::decayed(row, x, 0.f, self().factor(at, e, i, half)).p;
  }
  template <class Pair>
  __device__ __forceinline__ DecayedPair pair_of_centred(const float4& row, float x, float centred, const Pair& at, int e, int i,
                                                       int half) const {
    return Score::decayed_of_centred(row, x, centred, Score::kSlopeIsWeight ? 0.f : self().factor(at, e, i, half));
  }

 private:
  __device__ __forceinline__ const Self& self() const { return static_cast<const Self&>(*this); }
};

// Factors in separable tiles. kOwnsQueries: the row's part is in the data that the loop holds per row; else a streamed query's
// part is in its score.
template <class Score, int kRowTiles, bool kOwnsQueries>
struct SeparableDecay : DecayPairs<Score, SeparableDecay<Score, kRowTiles, kOwnsQueries>> {
  struct None {};
  using Pair = std::conditional_t<kOwnsQueries, float2, None>;
  uint32_t factors;  // address of token 0; kOwnsQueries: factors of keys, else row scores
  float key_factor[kOwnsQueries ? 1 : kRowTiles][2];
  float flow[kRowTiles][2];

  template <class Function>
  __device__ __forceinline__ void visit(const Function& function) {
    function(*this);
  }
  __device__ __forceinline__ Pair at(int token) const {
    if constexpr (kOwnsQueries) return ptx::load_shared_f32x2(factors + token * sizeof(float));
    else return {};
  }
  __device__ __forceinline__ float4 row(uint32_t, int token) const { return ptx::load_shared_f32x4(factors + token * sizeof(float4)); }
  __device__ __forceinline__ float factor(const Pair& at, int e, int i, int half) const {
    if constexpr (kOwnsQueries) return e == 0 ? at.x : at.y;
    else return key_factor[i][half];
  }
  __device__ __forceinline__ void add_flow(const DecayedPair& pair, int i, int half, int, int) { flow[i][half] += pair.flow; }
  template <class Scratch>
  __device__ __forceinline__ void finish_slab(const Scratch&) const {}
};

// Factors in pairwise tiles, from differences of running sums.
template <class Score, int kRowTiles, bool kOwnsQueries>
struct PairwiseDecay : DecayPairs<Score, PairwiseDecay<Score, kRowTiles, kOwnsQueries>> {
  struct Pair {
    float2 first, second;
  };
  const DecaySums& sums;
  float2 rows[kRowTiles][2];
  float flow[kRowTiles][2];

  __device__ __forceinline__ Pair at(int token) const {
    if constexpr (kOwnsQueries) return {sums.of_key(token), sums.of_key(token + 1)};
    else return {sums.of_query(token), sums.of_query(token + 1)};
  }
  __device__ __forceinline__ float4 row(uint32_t address, int) const { return ptx::load_shared_f32x4(address); }
  __device__ __forceinline__ float factor(const Pair& at, int e, int i, int half) const {
    const float2& token = e == 0 ? at.first : at.second;
    return Score::key_factor(kOwnsQueries ? decay(rows[i][half], token) : decay(token, rows[i][half]));
  }
  // Pairs of a token with itself may not count.
  __device__ __forceinline__ void add_flow(const DecayedPair& pair, int i, int half, int key, int query) {
    if (key != query + sums.p.causal_offset || sums.p.own_pairs_count()) flow[i][half] += pair.flow;
  }
  template <class Scratch>
  __device__ __forceinline__ void finish_slab(const Scratch& scratch) const {
    scratch.add_sums(flow);
  }
};

// Factors in masked tiles: pairwise, or none in calls without decay. Everything is computed where it is used; held in
// registers, it would slow down calls without decay. separable: the rows of a loop that owns queries are relative to the
// reference, the first row.
template <class Score, int kRowTiles, bool kOwnsQueries>
struct MaskedDecay {
  const AttentionParams& p;
  int state, warp_row;
  bool separable;

  template <class Function>
  __device__ __forceinline__ void visit(const Function& function) const {
    if (p.decay_sums == nullptr) {
      function(NoDecay<Score>{});
    } else {
      const DecaySums sums(p, static_cast<int>(ptx::keep_in_register(state)));
      const int first_row = static_cast<int>(ptx::keep_in_register(warp_row));
      PairwiseDecay<Score, kRowTiles, kOwnsQueries> pairwise{{}, sums, {}, {}};
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first_row + (separable ? 0 : i * 16 + half * 8 + lane_index() / 4);
          pairwise.rows[i][half] = kOwnsQueries ? sums.of_query(row) : sums.of_key(row);
        }
      }
      function(pairwise);
    }
  }
};

// The first tile of keys that is pairwise to the queries from `query` on; beyond all tiles without decay.
template <int kStream>
__device__ __forceinline__ int first_pairwise_tile_of(const AttentionParams& p, int state, int query) {
  const DecaySums sums(p, state);
  return sums.has_decay() ? sums.first_pairwise_tile<kStream>(query) : INT_MAX;
}

// Loads the row scores of a warp's queries before its first tile, in a loop over keys: load(decay_row), where decay_row(row,
// query) returns a score relative to the first query if that tile is separable. Before the first pairwise tile, scores are
// reloaded without change (AsItIs).
struct AsItIs {
  __device__ __forceinline__ float4 operator()(const float4& row, int) const { return row; }
};
template <class Score, class Visibility, int kStream, class Load>
__device__ __forceinline__ void load_query_rows(const AttentionParams& p, int state, int first_tile, int first_row, const Load& load) {
  if constexpr (Visibility::kMayDecay) {
    const DecaySums sums(p, state);
    if (sums.has_decay() && first_tile < sums.first_pairwise_tile<kStream>(first_row)) {
      const float2 reference = sums.of_query(first_row);
      load([&](const float4& row, int query) {
        return Score::decay_row(row, Score::query_factor(decay(sums.of_query(query), reference)));
      });
      return;
    }
  }
  load(AsItIs{});
}

// Adds a tile of keys to a warp's queries from first_row on, or of queries to its keys. Calls add_whole(decay) if all pairs are
// visible and the tile is separable or there is no decay; else add_masked(decay). row_scores: shared-memory address of the row
// scores of the tile's queries.
template <class Score, class Visibility, class Scratch, class AddWhole, class AddMasked>
__device__ __forceinline__ void add_key_tile(const AttentionParams& p, int state, const Scratch& scratch, bool whole, int tile,
                                             int first_row, const AddWhole& add_whole, const AddMasked& add_masked) {
  using Tile = typename Scratch::Tile;
  if constexpr (!Visibility::kMayDecay) {
    if (whole) add_whole(NoDecay<Score>{});
    else add_masked(NoDecay<Score>{});
  } else {
    const DecaySums sums(p, state);
    const bool separable = tile < first_pairwise_tile_of<Tile::kStream>(p, state, first_row);
    if (whole && !sums.has_decay()) {
      add_whole(NoDecay<Score>{});
    } else if (whole && separable) {
      const int begin = tile * Tile::kStream;
      const float2 reference = sums.of_query(first_row);
      scratch.fill(begin, [&](int key) { return Score::key_factor(decay(reference, sums.of_key(key))); });
      SeparableDecay<Score, Tile::kRowTiles, true> factors{{}, scratch.factors(begin), {}, {}};
      add_whole(factors);
      scratch.add_sums(factors.flow);
    } else {
      add_masked(MaskedDecay<Score, Tile::kRowTiles, true>{p, state, first_row, separable});
    }
  }
}
template <class Score, class Visibility, class Scratch, class AddWhole, class AddMasked>
__device__ __forceinline__ void add_query_tile(const AttentionParams& p, int state, const Scratch& scratch, uint32_t row_scores,
                                               bool whole, int tile, int first_row, const AddWhole& add_whole,
                                               const AddMasked& add_masked) {
  using Tile = typename Scratch::Tile;
  if constexpr (!Visibility::kMayDecay) {
    if (whole) add_whole(NoDecay<Score>{});
    else add_masked(NoDecay<Score>{});
  } else {
    const DecaySums sums(p, state);
    const int begin = tile * Tile::kStream, last_row = first_row + Tile::kRowTiles * 16 - 1;
    if (whole && !sums.has_decay()) {
      add_whole(NoDecay<Score>{});
    } else if (whole && begin + p.causal_offset > last_row) {
      const float2 reference = sums.of_token(last_row);
      scratch.fill(begin, [&](int query) {
        const float4 row = ptx::load_shared_f32x4(row_scores + (query - begin) * sizeof(float4));
        return Score::decay_row(row, Score::query_factor(decay(sums.of_query(query), reference)));
      });
      SeparableDecay<Score, Tile::kRowTiles, false> factors{{}, scratch.factors(begin), {}, {}};
#pragma unroll
      for (int i = 0; i < Tile::kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = first_row + i * 16 + half * 8 + lane_index() / 4;
          factors.key_factor[i][half] = Score::key_factor(decay(reference, sums.of_key(key)));
        }
      }
      add_whole(factors);
      scratch.add_sums(factors.flow);
    } else {
      add_masked(MaskedDecay<Score, Tile::kRowTiles, false>{p, state, first_row, false});
    }
  }
}

// Store the pair sums of a warp's rows.
template <class Score, class Scratch>
__device__ __forceinline__ void store_sums_by_query(const BwdParams& p, const PairSums& sums, const Scratch& scratch, int batch,
                                                    int head, int warp_row) {
  if (sums.by_query == nullptr) return;
  const float scale = Score(p).flow_scale();
  scratch.store_sums(sums.by_query + (static_cast<int64_t>(batch) * p.h + head) * p.n, warp_row, p.n,
                     [scale](int, float x) { return x * scale; });
}
template <class Score, class Scratch>
__device__ __forceinline__ void store_sums_by_key(const BwdParams& p, const PairSums& sums, const Scratch& scratch, int batch,
                                                  int kv_head, int warp_row) {
  if (sums.by_key == nullptr) return;
  const float scale = Score(p).flow_scale();
  const uint8_t* mask = p.attention_mask == nullptr ? nullptr : p.attention_mask + batch * p.mask_batch_stride;
  scratch.store_sums(sums.by_key + (static_cast<int64_t>(batch) * p.hk + kv_head) * p.m, warp_row, p.m,
                     [scale, mask](int key, float x) { return mask != nullptr && mask[key] == 0 ? 0.f : x * scale; });
}

}  // namespace fastmax
