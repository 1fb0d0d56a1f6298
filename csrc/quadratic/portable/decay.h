// Keys that fade (decay/decay.h) in the quadratic main loops: the pair of query i and key j has the factor
// 2^fading(G_pos(i), G_j).
//
// A warp owns rows of one side and streams tiles of the other. Seen from its rows, a tile is far or near:
//
//     keys        0 1 2 3|4 5 6 7|8 9 . .
//     queries                ^ ^ ^ ^         far: no key of it is at or behind a query, so that a token of the rows, the reference,
//                  far     near    near           is between them, and 2^fading(G_pos(i), G_ref) times 2^fading(G_ref, G_j),
//                                                 neither above 1, is the factor: a number per row and a number per key
//                                            near: the difference of the pair itself, which loses no digits where sums are large
//
// What is near is taken pair by pair, and so is what is partly visible: masked tiles, which look at single pairs anyway.
//
// Score policies say how a factor joins a pair (score.h): query_factor and key_factor of its logarithm, decay_row, fade.
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

// G of the keys of a head. Tokens outside of the keys are as the nearest one: what they are part of has no weight.
struct DecaySums {
  const AttentionParams& p;
  const float2* sums;

  __device__ __forceinline__ DecaySums(const AttentionParams& p, int state)
      : p(p), sums(p.decay_sums + static_cast<int64_t>(state) * p.m) {}

  __device__ __forceinline__ bool has_decay() const { return p.decay_sums != nullptr; }
  __device__ __forceinline__ int position(int query) const { return max(0, min(query + p.causal_offset, p.m - 1)); }
  __device__ __forceinline__ float2 of_key(int key) const { return __ldg(sums + min(key, p.m - 1)); }
  __device__ __forceinline__ float2 of_query(int query) const { return __ldg(sums + position(query)); }

  // Tiles of keys before this one are far from queries from `query` on.
  template <int kStream>
  __device__ __forceinline__ int near_tile(int query) const {
    return position(query) / kStream;
  }
};

// Shared memory behind a kernel's tiles, there where something fades: of each warp, a Factor for each token of a tile; of each thread
// of a backward (kSumsPairs), its sums of pairs, which would fill registers of the loops of calls where nothing fades.
template <class TileOfKernel, class Factor, bool kSumsPairs>
struct DecayScratch {
  using Tile = TileOfKernel;
  static constexpr int kWarpBytes = Tile::kStream * static_cast<int>(sizeof(Factor));
  static constexpr int kFactorBytes = Tile::kThreads / kWarpSize * kWarpBytes;
  static constexpr int kSums = kSumsPairs ? Tile::kRowTiles * 2 : 0;
  static constexpr int kBytes = kFactorBytes + Tile::kThreads * kSums * static_cast<int>(sizeof(float));
  static_assert(Tile::kSharedBytes + kBytes <= kMaxSharedBytes, "what fades does not fit in shared memory beside the stages");

  static constexpr int bytes(const AttentionParams& p) { return p.log_decay == nullptr ? 0 : kBytes; }

  uint32_t base;

  // Of token 0, where a tile's tokens are from begin on.
  __device__ __forceinline__ uint32_t factors(int begin) const {
    return base + threadIdx.x / kWarpSize * kWarpBytes - static_cast<uint32_t>(begin) * sizeof(Factor);
  }
  __device__ __forceinline__ uint32_t sum(int i, int half) const {
    return base + kFactorBytes + ((i * 2 + half) * Tile::kThreads + threadIdx.x) * sizeof(float);
  }

  // factor_of(token) of the tokens of a tile, for this warp, which has left the tile before.
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
  // Sums of a warp's rows to global memory.
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

// Where keys, or queries, stream by in a backward.
template <class Tile>
using KeyDecayScratch = DecayScratch<Tile, float, true>;
template <class Tile>
using QueryDecayScratch = DecayScratch<Tile, float4, true>;

// What main loops take factors from: at(token), of the streamed tokens `token` and the next; then, of the first (e = 0) or second
// of them and the row (i, half) of this lane, what joins the pair; row(), of a backward that owns keys, the score of a streamed query,
// which the stage has at an address, with what it takes of the factor; pair(), weight and derivative of a pair. visit(f) calls f with
// one that has them, or that has none. Sums of pairs (decay/decay.h) are those of a lane's rows. weight() and pair_of_centred() are for
// pairs of warps: of x, or of the weight where it is the slope, and of the centred line.
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

// Pairs with the key factors of Self.
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

// Of far tiles. kOwnsQueries: the rows' part is not here but in what the loop keeps of a row; else a streamed query's is in its score.
template <class Score, int kRowTiles, bool kOwnsQueries>
struct FarDecay : DecayPairs<Score, FarDecay<Score, kRowTiles, kOwnsQueries>> {
  struct None {};
  using Pair = std::conditional_t<kOwnsQueries, float2, None>;
  uint32_t factors;  // of token 0; kOwnsQueries: of keys, else row scores
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

// Of near tiles: from differences of running sums.
template <class Score, int kRowTiles, bool kOwnsQueries>
struct NearDecay : DecayPairs<Score, NearDecay<Score, kRowTiles, kOwnsQueries>> {
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
  // A pair of a token with itself does not fade.
  __device__ __forceinline__ void add_flow(const DecayedPair& pair, int i, int half, int key, int query) {
    if (key != query + sums.p.causal_offset) flow[i][half] += pair.flow;
  }
  template <class Scratch>
  __device__ __forceinline__ void finish_slab(const Scratch& scratch) const {
    scratch.add_sums(flow);
  }
};

// Of masked tiles: the pairs' own factors, if anything fades. All of it is made where it is used: kept, it would take the registers
// of calls where nothing fades. far: the tile is far, and rows count from the reference, that is the first row (of a loop that owns
// queries).
template <class Score, int kRowTiles, bool kOwnsQueries>
struct MaskedDecay {
  const AttentionParams& p;
  int state, warp_row;
  bool far;

  template <class Function>
  __device__ __forceinline__ void visit(const Function& function) const {
    if (p.decay_sums == nullptr) {
      function(NoDecay<Score>{});
    } else {
      const DecaySums sums(p, static_cast<int>(ptx::keep_in_register(state)));
      const int first_row = static_cast<int>(ptx::keep_in_register(warp_row));
      NearDecay<Score, kRowTiles, kOwnsQueries> near{{}, sums, {}, {}};
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first_row + (far ? 0 : i * 16 + half * 8 + lane_index() / 4);
          near.rows[i][half] = kOwnsQueries ? sums.of_query(row) : sums.of_key(row);
        }
      }
      function(near);
    }
  }
};

// The tile from which on keys are near to queries from `query` on; beyond all tiles where nothing fades.
template <int kStream>
__device__ __forceinline__ int near_tile_of(const AttentionParams& p, int state, int query) {
  const DecaySums sums(p, state);
  return sums.has_decay() ? sums.near_tile<kStream>(query) : INT_MAX;
}

// Loads what a loop over keys keeps of its warp's queries, before its first tile: load(fade), where fade(row, query) is a row score
// that counts from the first query while keys are far. They are loaded again, as they are, for near keys.
struct AsItIs {
  __device__ __forceinline__ float4 operator()(const float4& row, int) const { return row; }
};
template <class Score, class Visibility, int kStream, class Load>
__device__ __forceinline__ void load_query_rows(const AttentionParams& p, int state, int first_tile, int first_row, const Load& load) {
  if constexpr (Visibility::kMayDecay) {
    const DecaySums sums(p, state);
    if (sums.has_decay() && first_tile < sums.near_tile<kStream>(first_row)) {
      const float2 reference = sums.of_query(first_row);
      load([&](const float4& row, int query) {
        return Score::decay_row(row, Score::query_factor(decay(sums.of_query(query), reference)));
      });
      return;
    }
  }
  load(AsItIs{});
}

// Adds a tile of keys to a warp's queries from first_row on, or of queries to its keys: calls add_whole(fading) where all pairs are
// visible and far, or nothing fades, else add_masked(fading). row_scores: of the tile's queries, in shared memory.
template <class Score, class Visibility, class Scratch, class AddWhole, class AddMasked>
__device__ __forceinline__ void add_key_tile(const AttentionParams& p, int state, const Scratch& scratch, bool whole, int tile,
                                             int first_row, const AddWhole& add_whole, const AddMasked& add_masked) {
  using Tile = typename Scratch::Tile;
  if constexpr (!Visibility::kMayDecay) {
    if (whole) add_whole(NoDecay<Score>{});
    else add_masked(NoDecay<Score>{});
  } else {
    const DecaySums sums(p, state);
    const bool far = tile < near_tile_of<Tile::kStream>(p, state, first_row);
    if (whole && !sums.has_decay()) {
      add_whole(NoDecay<Score>{});
    } else if (whole && far) {
      const int begin = tile * Tile::kStream;
      const float2 reference = sums.of_query(first_row);
      scratch.fill(begin, [&](int key) { return Score::key_factor(decay(reference, sums.of_key(key))); });
      FarDecay<Score, Tile::kRowTiles, true> factors{{}, scratch.factors(begin), {}, {}};
      add_whole(factors);
      scratch.add_sums(factors.flow);
    } else {
      add_masked(MaskedDecay<Score, Tile::kRowTiles, true>{p, state, first_row, far});
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
      const float2 reference = sums.of_key(last_row);
      scratch.fill(begin, [&](int query) {
        const float4 row = ptx::load_shared_f32x4(row_scores + (query - begin) * sizeof(float4));
        return Score::decay_row(row, Score::query_factor(decay(sums.of_query(query), reference)));
      });
      FarDecay<Score, Tile::kRowTiles, false> factors{{}, scratch.factors(begin), {}, {}};
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

// Sums of pairs of a warp's rows, by their owner.
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
