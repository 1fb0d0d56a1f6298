// Forward over tiles of scores on Hopper, for both score policies (score.h). It computes what quadratic/portable/fwd.h
// computes, with wgmma on tiles that the copy engine loads.
//
// Blocks are persistent (work_order.h). One thread of the last warpgroup, the producer, fills a ring of stages with K and V,
// 128 keys each. Every other warpgroup, a consumer, owns 64 queries and processes the block's tiles from the last visible one
// down, so that partly visible tiles come first. The tensor core computes the scores of the next tile and the output of the
// current one at the same time; the weights of the next tile are computed while that output is computed:
//
//   tensor core    S(1)        | S(2)  P(1)V(1) | S(3)  P(2)V(2) | ...
//   CUDA cores           w(1)  |       w(2)     |       w(3)     |
//
// Exponentials of softmax take as long as the products. Its consumers therefore take turns at starting products (kTakesTurns).
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/fragments.h"
#include "core/heads.h"
#include "core/launch.h"
#include "core/score.h"
#include "core/sm90/pipeline.h"
#include "core/sm90/store.h"
#include "core/sm90/tensor_map.h"
#include "core/sm90/tiles.h"
#include "core/sm90/wgmma.h"
#include "core/visibility.h"
#include "quadratic/bounds.h"
#include "quadratic/sm90/decay.h"
#include "quadratic/sm90/exact_window.h"
#include "quadratic/sm90/kept_keys.h"
#include "quadratic/sm90/kernels.h"
#include "quadratic/sm90/visible.h"
#include "quadratic/sm90/work_order.h"

namespace fastmax {

template <class Score, class Visibility, int kHeadDim>
struct QuadraticFwdSm90Tile {
  // Registers: kHeadDim / 2 for sums, 64 for scores, 32 for weights. At head dims up to 64 three consumers have 160 each; at
  // larger ones, and with decay or an exact window, two consumers have 240 each.
  static constexpr int kConsumers = kHeadDim <= 64 && !kHasDecay<Visibility> && !Score::kHasLocalKeys ? 3 : 2;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kRows = 64;  // per consumer
  static constexpr int kBlockRows = kConsumers * kRows;
  static constexpr int kKeys = KeptWords::kKeysPerBlock;
  static constexpr int kPart = 64, kParts = kKeys / kPart;  // parts of a tile with kinds of their own, in an exact window
  static constexpr int kStages = kHeadDim <= 64 ? 5 : 3;
  static constexpr int kQueryBuffers = kHeadDim <= 64 ? 2 : 1;  // per consumer; 2: the next queries load early
  static constexpr bool kTakesTurns = Score::kFollowsRowMax && !Score::kHasLocalKeys;
  // Queries as an operand in registers. From shared memory the products would read them again for each tile, and with K, V and
  // the loads that takes almost as long as the products. Exact windows have registers for them up to head dim 64; of other calls,
  // those without exponentials and tables from head dim 96 on.
  static constexpr bool kKeepsQueries =
      Score::kHasLocalKeys ? kHeadDim <= 64 : kHeadDim >= 96 && !Score::kFollowsRowMax && !Visibility::kHasTables;

  using QueryTile = SwizzledTile<kRows, kHeadDim>;
  using KeyTile = SwizzledTile<kKeys, kHeadDim>;    // also for values

  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kStageBytes = 2 * KeyTile::kBytes;
  static constexpr int kQueries = kStages * kStageBytes;  // from here on: offsets in shared memory
  static constexpr int kBarriers = kQueries + kQueryBuffers * kConsumers * QueryTile::kBytes;
  static constexpr int kQueryBarriers = kBarriers + Ring<kStages>::kBarrierBytes;
  using FactorTile = DecayTile<Score, true, kKeys>;
  // Whether shared memory has room for more than the columns of a tile.
  static constexpr bool kLoadsAllFactors = kHeadDim <= 96;
  static constexpr DecayColumns kLoadedColumns =
      Score::kHasLocalKeys && !kLoadsAllFactors ? DecayColumns::kAlone : DecayColumns::kWithAll;
  static constexpr int kFactorBytes = !kHasDecay<Visibility> ? 0 : kLoadsAllFactors ? FactorTile::kBytes : FactorTile::kPowers;  // per stage
  static constexpr int kFactors = kQueryBarriers + kConsumers * Ring<kQueryBuffers>::kBarrierBytes;
  static constexpr int kEnd = kFactors + kStages * kFactorBytes;
  static constexpr int kSharedBytes = kSwizzledTileAlignment + kEnd;
  static_assert(kSharedBytes <= shared_limit(90), "the stages do not fit in shared memory");
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * ptx::registers_at_launch(kThreads),
                "consumers would wait for registers that nobody gives up");
};

// Softmax weighs relative to the largest weight of a row, so its weights fit in fp16. The largest weight is 2^14 there. The
// smallest fp16 number, 2^-24, is 2^-38 of it.
template <class Score>
inline constexpr bool kWeighsInFp16 = Score::kFollowsRowMax && !Score::kHasLocalKeys;
template <class Math>
inline constexpr float kLog2OfLargestWeight = Math::kMode == MathMode::kFP16 ? 14.f : 0.f;

// Whether masks are applied row by row (hide_keys). The bits of a window take registers to compute.
template <class Score, class Visibility>
inline constexpr bool kHidesKeys = Score::kFollowsRowMax && Visibility::kBoundsBothSides && !Visibility::kHasTables;

struct QuadraticFwdMaps {
  CUtensorMap q, k, v;
};

// State of a consumer's rows, of which each warp holds 16 in the layout of accumulators (wgmma.h).
template <class Score, class Visibility, class Math, int kHeadDim>
struct QuadraticFwdRows {
  using Tile = QuadraticFwdSm90Tile<Score, Visibility, kHeadDim>;
  using ScoreProduct = Wgmma<Math, Tile::kKeys>;
  using ValueProduct = Wgmma<Math, kHeadDim>;
  static constexpr bool kDecays = kHasDecay<Visibility>;

  float o[kHeadDim / 2];
  float s[Tile::kKeys / 2];  // scores, then weights
  float z[2];                // this lane's part of the row sums of weights
  float reference[Score::kFollowsRowMax ? 2 : 1];  // softmax: weights of a row are relative to 2^reference
  uint32_t q[Tile::kKeepsQueries ? kHeadDim / 16 : 1][4];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (float& x : o) x = 0.f;
    z[0] = z[1] = 0.f;
    if constexpr (Score::kFollowsRowMax) reference[0] = reference[1] = Score::kNoReference;
  }

  // Loads q from the consumer's tile of queries.
  __device__ __forceinline__ void load_queries(uint32_t tile) {
    const int lane = lane_index(), row = static_cast<int>(threadIdx.x) / kWarpSize % 4 * 16 + lane % 16;
#pragma unroll
    for (int kk = 0; kk < kHeadDim / 16; ++kk) ptx::ldmatrix_x4(q[kk], tile + Tile::QueryTile::chunk_offset(row, 2 * kk + lane / 16));
  }

  // queries: the tile; not read where q has them.
  __device__ __forceinline__ void start_scores(const Operand<typename Tile::QueryTile>& queries, const Operand<typename Tile::KeyTile>& k) {
    if constexpr (Tile::kKeepsQueries) {
      ScoreProduct::template rs_first<Major::kK>(s, q[0], k.k_major(0));
#pragma unroll
      for (int kk = 1; kk < kHeadDim / 16; ++kk) ScoreProduct::template rs<Major::kK>(s, q[kk], k.k_major(kk));
    } else {
      ScoreProduct::template ss_first<Major::kK, Major::kK>(s, queries.k_major(0), k.k_major(0));
#pragma unroll
      for (int kk = 1; kk < kHeadDim / 16; ++kk) ScoreProduct::template ss<Major::kK, Major::kK>(s, queries.k_major(kk), k.k_major(kk));
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void start_output(const uint32_t (&w)[Tile::kKeys / 4], const Operand<typename Tile::KeyTile>& v) {
#pragma unroll
    for (int kk = 0; kk < Tile::kKeys / 16; ++kk) ValueProduct::template rs<Major::kMN>(o, w + 4 * kk, v.mn_major(kk));
    wgmma_commit();
  }

  __device__ __forceinline__ void pack_weights(uint32_t (&w)[Tile::kKeys / 4]) const {
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 4; ++i) w[i] = pack_16bit<Math>(s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void shrink_output(const float (&shrink)[2]) {
    if constexpr (Score::kFollowsRowMax) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) o[i] *= shrink[i >> 1 & 1];
    }
  }

  // Converts the scores of the tile that begins at key_begin to weights. visible: bits of visible_keys. factors: shared-memory
  // address of the keys' decay factors. shrink: set to the factors for the sums so far.
  template <bool kMasked, class Decay>
  __device__ __forceinline__ void weigh(Score score, const uint32_t (&visible)[2][Tile::kKeys / 32], Decay& decay,
                                        uint32_t factors, int key_begin, float (&shrink)[2]) {
    if constexpr (kHasDecay<Visibility>) {
      decay.template start<kMasked>(factors);
      if (kMasked && decay.takes_pairs) {
#pragma unroll
        for (int i = 0; i < Tile::kKeys / 4; ++i) {
          const float2 key = decay.sum_of_column(key_begin + i / 2 * 8 + lane_index() % 4 * 2 + i % 2);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& x = s[i / 2 * 4 + half * 2 + i % 2];
            if constexpr (!Score::kFollowsRowMax) x = score.weight(x);
            x = score.apply_decay(x, decay.factor(key, half));
          }
        }
      } else {
        const typename Score::DecayedRow rows[2] = {score.decayed_row(decay.of_rows[0]), score.decayed_row(decay.of_rows[1])};
#pragma unroll
        for (int j = 0; j < Tile::kKeys / 8; ++j) {
          const float2 keys = load_key_factors(factors, 8 * j + lane_index() % 4 * 2);
#pragma unroll
          for (int e = 0; e < 4; ++e) s[4 * j + e] = rows[e / 2].at(s[4 * j + e], e % 2 == 0 ? keys.x : keys.y);
        }
      }
      score = score.of_decayed();
    }
    const auto sees = [&](int i) { return !kMasked || is_visible(visible, i); };
    if constexpr (Score::kFollowsRowMax) {
      float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < Tile::kKeys / 2; ++i) {
        if (kMasked) s[i] = sees(i) ? s[i] : -INFINITY;
        largest[i >> 1 & 1] = fmaxf(largest[i >> 1 & 1], s[i]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        raise_reference(half, fmaf(score.c, quad_max(largest[half]), -kLog2OfLargestWeight<Math>), shrink);
      }
    }
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 2; ++i) {
      if constexpr (Score::kFollowsRowMax) {
        s[i] = score.weight(s[i], reference[i >> 1 & 1]);
      } else {
        const float weight = kHasDecay<Visibility> ? s[i] : score.weight(s[i]);
        s[i] = sees(i) ? weight : 0.f;
      }
      z[i >> 1 & 1] += s[i];
    }
  }

  // An exact window: begins with a reference for a row's global keys. y: of the key that decays least; without global keys, kNoReference.
  __device__ __forceinline__ void begin_reference(int half, float y) { reference[half] = y; }

  __device__ __forceinline__ void raise_reference(int half, float largest, float (&shrink)[2]) {
    const float raised = fmaxf(reference[half], largest);
    shrink[half] = ptx::exp2_approx(reference[half] - raised);
    reference[half] = raised;
    z[half] *= shrink[half];
  }

  // An exact window: tiles with local keys or partly visible ones, in parts of kPart keys. of_visible: sets visible keys of a part.
  // tile: what is known of its keys (DecayTile) in global memory. gated: whether keys have gates. The references cover global keys already,
  // but not their gates.
  template <class Decay, class OfVisible>
  __device__ __forceinline__ void weigh_parts(Score score, TileKind (&kinds)[Tile::kParts], const OfVisible& of_visible,
                                              Decay& decay, uint32_t factors, const uint8_t* tile, bool gated, int key_begin, int window,
                                              int position, float (&shrink)[2]) {
    decay.template start<true>(factors);
    constexpr int kWords = Tile::kPart / 32, kBlocks = Tile::kPart / 8;
    const int t = lane_index() % 4;
    // In registers, so that it is selected by one instruction.
    score.c = ptx::compute_first(score.c);
    float2 rows[2] = {make_float2(0.f, 0.f), make_float2(0.f, 0.f)};  // exponents and their rounding errors
    if constexpr (kDecays) {
#pragma unroll
      for (int half = 0; half < 2; ++half) rows[half] = make_float2(decay.of_rows[half], decay.errors[half]);
      // Of a tile that decays by so much factors might overflow, and rounding errors matter.
#pragma unroll
      for (TileKind& kind : kinds) {
        if (decay.takes_pairs && kind != TileKind::kHidden) kind = TileKind::kMixed;
      }
    }
    // Of two keys, what is at an offset of the tile; `otherwise` where it is known that nothing else is there.
    const auto load = [&](int offset, int j, bool is_needed, float otherwise) {
      float2 x = make_float2(otherwise, otherwise);
      if constexpr (kDecays) {
        const int column = 8 * j + 2 * t;
        if (!is_needed) return x;
        if constexpr (Tile::kLoadsAllFactors) x = load_key_factors(factors + offset, column);
        else x = ptx::load_global_here(reinterpret_cast<const float2*>(tile + offset) + column / 2);
      }
      return x;
    };
    using FactorTile = typename Tile::FactorTile;
    const auto of_keys = [&](int j) {
      float2 x = make_float2(0.f, 0.f);
      if constexpr (kDecays) x = load_key_factors(factors, 8 * j + 2 * t);
      if constexpr (kDecays && !Tile::kLoadsAllFactors) {  // these have the gates
        if (gated) x = load(FactorTile::kPowers, j, true, 0.f);
      }
      return x;
    };
    const auto errors_of_keys = [&](int j) {
      if constexpr (kDecays) return load(FactorTile::kErrors, j, Tile::kLoadsAllFactors || decay.takes_pairs, 0.f);
      else return make_float2(0.f, 0.f);
    };
    const auto gates_of_keys = [&](int j) { return load(FactorTile::kGates, j, gated, 1.f); };
    // Calls run(i, exponent of the pair) for the accumulators of a part.
    const auto for_each_pair = [&](auto kind, int part, const auto& run) {
      constexpr bool kMixed = decltype(kind)::value == TileKind::kMixed;
#pragma unroll
      for (int j = kBlocks * part; j < kBlocks * (part + 1); ++j) {
        const float2 keys = of_keys(j);
        float2 of_errors;
        if constexpr (kMixed) of_errors = errors_of_keys(j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float exponent = rows[i / 2].x + (i % 2 == 0 ? keys.x : keys.y);
          if constexpr (kMixed && kDecays) exponent += rows[i / 2].y + (i % 2 == 0 ? of_errors.x : of_errors.y);
          run(4 * j + i, exponent);
        }
      }
    };

    uint32_t visible[Tile::kParts][2][kWords], local[Tile::kParts][2][kWords];
    float largest[2] = {-INFINITY, -INFINITY};  // of local keys
    // Finds these, and sets the scores of parts without global keys to y.
    const auto prepare = [&](auto kind, int part) {
      constexpr TileKind kKind = decltype(kind)::value;
      if constexpr (kKind != TileKind::kWhole) {
        if constexpr (kMasksPairs<kKind>) of_visible(visible[part], part);
        if constexpr (kSelectsPairs<kKind>) local_columns(local[part], window, position, key_begin + part * Tile::kPart, t);
        for_each_pair(kind, part, [&](int i, float exponent) {
          float y = ptx::compute_first(fmaf(score.c, s[i], exponent));
          const int in_part = i % (Tile::kPart / 2);
          bool counts = true;
          if constexpr (kMasksPairs<kKind>) counts = is_visible(visible[part], in_part);
          if constexpr (kSelectsPairs<kKind>) counts = counts && is_visible(local[part], in_part);
          y = counts ? y : -INFINITY;
          if constexpr (!kSelectsPairs<kKind>) s[i] = y;
          largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], y);
        });
      }
    };
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part) {
      if (kinds[part] != TileKind::kHidden) with_kind(kinds[part], [&](auto kind) { prepare(kind, part); });
    }
    PolynomialScore::DecayedRow global_rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      raise_reference(half, quad_max(largest[half]), shrink);
      const float2 relative = exact_sum(rows[half].x, -reference[half]);
      rows[half] = make_float2(relative.x, relative.y + rows[half].y);
      global_rows[half] = score.global.decayed_row(ptx::exp2_approx(relative.x));
    }
    const auto weigh_part = [&](auto kind, int part) {
      constexpr TileKind kKind = decltype(kind)::value;
      if constexpr (kKind == TileKind::kWhole) {
        weigh_global_keys(global_rows, factors, kBlocks * part, kBlocks * (part + 1));
      } else if constexpr (kSelectsPairs<kKind>) {
        float2 of_gates;
        for_each_pair(kind, part, [&](int i, float exponent) {
          const int in_part = i % (Tile::kPart / 2);
          const bool is_local = is_visible(local[part], in_part);
          if (i % 4 == 0) of_gates = gates_of_keys(i / 4);
          const float power = ptx::exp2_approx(fmaf(is_local ? score.c : 0.f, s[i], exponent));
          float of_global = score.global.weight(s[i]) * power;
          if constexpr (kDecays) of_global *= i % 2 == 0 ? of_gates.x : of_gates.y;
          of_global = ptx::compute_first(of_global);
          s[i] = is_local ? power : of_global;
          if constexpr (kMasksPairs<kKind>) s[i] = is_visible(visible[part], in_part) ? s[i] : 0.f;
        });
      } else {
#pragma unroll
        for (int i = Tile::kPart / 2 * part; i < Tile::kPart / 2 * (part + 1); ++i) {
          s[i] = ptx::exp2_approx(s[i] - reference[i / 2 % 2]);
        }
      }
    };
#pragma unroll
    for (int part = 0; part < Tile::kParts; ++part) {
      if (kinds[part] == TileKind::kHidden) {
#pragma unroll
        for (int i = 0; i < Tile::kPart / 2; ++i) s[Tile::kPart / 2 * part + i] = 0.f;
      } else {
        with_kind(kinds[part], [&](auto kind) { weigh_part(kind, part); });
      }
    }
    add_weights();
  }

  // Converts scores of global keys, in blocks of 8, that all rows see.
  __device__ __forceinline__ void weigh_global_keys(const typename PolynomialScore::DecayedRow (&rows)[2], uint32_t factors, int begin,
                                                    int end) {
#pragma unroll
    for (int j = begin; j < end; ++j) {
      float2 keys = make_float2(1.f, 1.f);
      if constexpr (kDecays) {
        const int column = 8 * j + lane_index() % 4 * 2;
        if constexpr (Tile::kLoadsAllFactors) {
          keys = load_key_factors(factors + Tile::FactorTile::kPowers, column);
        } else {
          keys = load_key_factors(factors, column);
          keys = make_float2(ptx::exp2_approx(keys.x), ptx::exp2_approx(keys.y));
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) s[4 * j + e] = rows[e / 2].at(s[4 * j + e], e % 2 == 0 ? keys.x : keys.y);
    }
  }

  // An exact window: a tile of global keys that all rows see.
  template <class Decay>
  __device__ __forceinline__ void weigh_global(const Score& score, Decay& decay, uint32_t factors) {
    decay.template start<false>(factors);
    typename PolynomialScore::DecayedRow rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float exponent = -reference[half];
      if constexpr (kDecays) exponent += decay.of_rows[half];
      rows[half] = score.global.decayed_row(ptx::exp2_approx(exponent));
    }
    weigh_global_keys(rows, factors, 0, Tile::kKeys / 8);
    add_weights();
  }

  __device__ __forceinline__ void add_weights() {
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 2; ++i) z[i / 2 % 2] += s[i];
  }
};

// Passes a turn around the consumers in a circle, by named barriers 8 and up.
template <int kConsumers, bool kTakesTurns>
struct Turns {
  int consumer;

  __device__ __forceinline__ void begin() const {
    if (kTakesTurns && consumer == kConsumers - 1) pass();
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (kTakesTurns) ptx::barrier_wait<256>(8 + consumer);
  }
  __device__ __forceinline__ void pass() const {
    if constexpr (kTakesTurns) ptx::barrier_arrive<256>(8 + (consumer + 1 == kConsumers ? 0 : consumer + 1));
  }
};

template <class Score, class Visibility, class Math, int kHeadDim>
__global__ void __launch_bounds__(QuadraticFwdSm90Tile<Score, Visibility, kHeadDim>::kThreads, 1)
    quadratic_fwd_sm90_kernel(const __grid_constant__ QuadraticFwdMaps maps, const FwdParams p, const KeptWords kept,
                              const WorkOrder order, const uint8_t* key_factors) {
  using Tile = QuadraticFwdSm90Tile<Score, Visibility, kHeadDim>;
  using KeyTile = typename Tile::KeyTile;
  using QueryTile = typename Tile::QueryTile;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (ptx::smem_address(shared) + kSwizzledTileAlignment - 1) & ~uint32_t{kSwizzledTileAlignment - 1};
  const Ring<Tile::kStages> ring(base + Tile::kBarriers);
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize), lane = lane_index();
  const int consumer = warp / 4;
  // The ring of a consumer's query buffers, which are released as soon as all scores are computed.
  const auto query_ring = [&](int i) {
    return Ring<Tile::kQueryBuffers>(base + Tile::kQueryBarriers + i * Ring<Tile::kQueryBuffers>::kBarrierBytes);
  };
  const auto query_tile = [&](int i, RingPosition at) {
    return base + Tile::kQueries + (i * Tile::kQueryBuffers + at.stage) * QueryTile::kBytes;
  };

  const auto factors = [&](RingPosition at) { return base + Tile::kFactors + at.stage * Tile::kFactorBytes; };
  const auto factors_in_memory = [&](const HeadIndex& head, int tile) {
    const int64_t of_head = int64_t{head.batch * p.hk + head.kv_head} * ((p.m + Tile::kKeys - 1) / Tile::kKeys);
    return key_factors + (of_head + tile) * Tile::FactorTile::kBytes;
  };

  if (threadIdx.x == 0) {
    ring.init(4 * Tile::kConsumers);
    for (int i = 0; i < Tile::kConsumers; ++i) query_ring(i).init(4);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::wait_for_earlier_kernels();

  // Tiles of `tile_keys` keys of `block` that the `rows` queries from `row` on see.
  const auto tiles_of = [&](auto tile_keys, const HeadIndex& head, int row, int rows, Range block) {
    const Visibility sees(p, head.batch * p.hk + head.kv_head);
    return key_tile_ranges<decltype(tile_keys)::value>(sees, kept, head.batch, row, min(row + rows, p.n) - 1, block);
  };
  const std::integral_constant<int, Tile::kKeys> whole_tiles;
  // If the last block of a head does not fill up, the first block leaves out consumers instead: the last rows see most keys,
  // and no consumer of that block should wait in vain. Consumers that are left out get rows beyond the last one.
  const int rows_of_blocks = order.row_blocks * Tile::kBlockRows;
  const int lacking = rows_of_blocks - (p.n + Tile::kRows - 1) / Tile::kRows * Tile::kRows;
  const auto row_of = [&](const WorkTile& work_tile, int consumer) {
    const int row = work_tile.row_block * Tile::kBlockRows - lacking + consumer * Tile::kRows;
    return row < 0 ? row + rows_of_blocks : row;
  };
  const auto tiles_of_block = [&](const WorkTile& work_tile, const HeadIndex& head) {
    const int end = (work_tile.row_block + 1) * Tile::kBlockRows - lacking, rows = min(end, Tile::kBlockRows);
    return tiles_of(whole_tiles, head, end - rows, rows, kAllTiles).seen;
  };

  if (consumer == Tile::kConsumers) {
    ptx::fewer_registers<Tile::kProducerRegisters>();
    if (warp == 4 * Tile::kConsumers && lane == 0) {  // producer of K and V
      RingPosition at;
      for (WorkTileLoop loop(order); !loop.done(); loop.next()) {
        const WorkTile work_tile = loop.work_tile();
        const HeadIndex head = head_index(p, work_tile.head);
        const Range tiles = tiles_of_block(work_tile, head);
        for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
          const uint32_t stage = base + at.stage * Tile::kStageBytes;
          ring.wait_until_empty(at);
          int factor_bytes = Tile::kFactorBytes;
          if constexpr (kHasDecay<Visibility> && Tile::kLoadsAllFactors) factor_bytes = Tile::FactorTile::bytes(p);
          ring.expect(at, Tile::kStageBytes + factor_bytes);
          if constexpr (kHasDecay<Visibility>) {
            ptx::bulk_load(factors(at), factors_in_memory(head, tile), factor_bytes, ring.full(at));
          }
          KeyTile::load(stage, maps.k, ring.full(at), tile * Tile::kKeys, head.kv_head, head.batch);
          KeyTile::load(stage + KeyTile::kBytes, maps.v, ring.full(at), tile * Tile::kKeys, head.kv_head, head.batch);
          at.advance<Tile::kStages>();
        }
      }
    } else if (warp == 4 * Tile::kConsumers + 1 && lane == 0) {  // producer of queries, once a consumer has a free buffer
      RingPosition at;
      for (WorkTileLoop loop(order); !loop.done(); loop.next(), at.advance<Tile::kQueryBuffers>()) {
        const WorkTile work_tile = loop.work_tile();
        const HeadIndex head = head_index(p, work_tile.head);
        for (int i = 0; i < Tile::kConsumers; ++i) {
          const Ring<Tile::kQueryBuffers> buffers = query_ring(i);
          buffers.wait_until_empty(at);
          buffers.expect(at, QueryTile::kBytes);
          QueryTile::load(query_tile(i, at), maps.q, buffers.full(at), row_of(work_tile, i), head.head, head.batch);
        }
      }
    }
  } else {
    ptx::more_registers<Tile::kConsumerRegisters>();
    const int warp_in_group = warp % 4, t = lane % 4;
    const Score score(p);
    const Turns<Tile::kConsumers, Tile::kTakesTurns> turns{consumer};
    turns.begin();
    RingPosition at, queries;  // positions of K and V, and of this consumer's queries
    for (WorkTileLoop loop(order); !loop.done(); loop.next()) {
      const WorkTile work_tile = loop.work_tile();
      const HeadIndex head = head_index(p, work_tile.head);
      const Range block_tiles = tiles_of_block(work_tile, head);
      const int row = row_of(work_tile, consumer);                    // first row of the warpgroup
      const int lane_row = row + warp_in_group * 16 + lane / 4;  // and lane_row + 8
      TileRanges tiles{{0, 0}, {0, 0}};
      if (row < p.n) tiles = tiles_of(whole_tiles, head, row, Tile::kRows, block_tiles);
      if (tiles.seen.end <= tiles.seen.begin) tiles = {{block_tiles.begin, block_tiles.begin}, {block_tiles.begin, block_tiles.begin}};
      const int first_tile = tiles.seen.begin, last_tile = tiles.seen.end - 1;
      const int first_whole = tiles.whole.begin, end_whole = tiles.whole.end;

      int tile = block_tiles.end - 1;
      // Skips tiles that only other rows of the block see.
      const auto skip_tiles = [&](int before) {
        for (; tile > before; --tile) {
          turns.wait();
          turns.pass();
          ring.wait_until_full(at);
          ring.release(at, lane);
          at.template advance<Tile::kStages>();
        }
      };
      skip_tiles(last_tile);

      QuadraticFwdRows<Score, Visibility, Math, kHeadDim> rows;
      rows.reset();
      query_ring(consumer).wait_until_full(queries);
      if constexpr (Tile::kKeepsQueries) {
        rows.load_queries(query_tile(consumer, queries));
        ptx::fence_proxy_async();
        query_ring(consumer).release(queries, lane);
      }
      if (tile >= first_tile) {
        const auto sees = [&] {
          const Visibility of_head(p, head.batch * p.hk + head.kv_head);
          if constexpr (Score::kHasLocalKeys) return LaneVisibility<false>(of_head, lane_row);
          else return of_head;
        }();
        const Operand<QueryTile> q(query_tile(consumer, queries));
        uint32_t visible[2][Tile::kKeys / 32];
        float shrink[2];
        auto decay = [&] {
          if constexpr (kHasDecay<Visibility>) {
            return TileDecay<Score, false, Tile::kKeys>(p, head.batch * p.hk + head.kv_head, lane_row);
          } else {
            return NoTileDecay();
          }
        }();

        TileKinds parts{};
        if constexpr (Score::kHasLocalKeys) {
          const Range of_block{block_tiles.begin * Tile::kParts, block_tiles.end * Tile::kParts};
          const TileRanges in_parts = tiles_of(std::integral_constant<int, Tile::kPart>(), head, row, Tile::kRows, of_block);
          const int first = row + p.causal_offset;
          parts = tile_kinds<Tile::kPart>(in_parts, p.exact_window, first, first + min(Tile::kRows, p.n - row) - 1);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int key = nearest_global_key(p, kept, head.batch, sees.keys_of(lane_row + 8 * half), lane_row + 8 * half);
            float exponent = 0.f;
            if constexpr (kHasDecay<Visibility>) exponent = decay.factor(decay.sum_of_column(key), half);
            rows.begin_reference(half, key < 0 ? Score::kNoReference : exponent);
          }
        }
        const auto weigh_masked = [&](int tile, uint32_t key_factors) {
          if constexpr (Score::kHasLocalKeys) {
            TileKind kinds[Tile::kParts];
#pragma unroll
            for (int i = 0; i < Tile::kParts; ++i) kinds[i] = parts.kind_of(tile * Tile::kParts + i);
            const auto of_visible = [&](uint32_t (&of_part)[2][Tile::kPart / 32], int part) {
              visible_keys(of_part, sees, kept, head.batch, tile * Tile::kParts + part, lane_row, t);
            };
            const uint8_t* in_memory = kHasDecay<Visibility> ? factors_in_memory(head, tile) : nullptr;
            rows.weigh_parts(score, kinds, of_visible, decay, key_factors, in_memory, p.log_input_gate != nullptr, tile * Tile::kKeys,
                             p.exact_window, lane_row + p.causal_offset, shrink);
          } else if constexpr (kHidesKeys<Score, Visibility>) {
            hide_keys(rows.s, sees, kept, head.batch, tile, lane_row, t);
            rows.template weigh<false>(score, visible, decay, key_factors, tile * Tile::kKeys, shrink);
          } else {
            visible_keys(visible, sees, kept, head.batch, tile, lane_row, t);
            rows.template weigh<true>(score, visible, decay, key_factors, tile * Tile::kKeys, shrink);
          }
        };

        ring.wait_until_full(at);
        turns.wait();
        wgmma_fence();
        rows.start_scores(q, Operand<KeyTile>(base + at.stage * Tile::kStageBytes));
        turns.pass();
        wgmma_wait<0>();
        keep(rows.s);

        // Starts the scores of the tile below and the output of the current one; returns as soon as the scores are there.
        const auto start_below = [&](RingPosition below) {
          const Operand<KeyTile> v(base + at.stage * Tile::kStageBytes + KeyTile::kBytes);
          const Operand<KeyTile> k(base + below.stage * Tile::kStageBytes);
          ring.wait_until_full(below);
          uint32_t w[Tile::kKeys / 4];
          rows.pack_weights(w);
          turns.wait();
          keep(w);
          wgmma_fence();
          rows.start_scores(q, k);
          rows.start_output(w, v);
          turns.pass();
          wgmma_wait<1>();
          keep(rows.s);
        };
        // Starts with the weights of the current tile and ends with those of the tile below.
        const auto step = [&](auto is_masked) {
          constexpr bool kMasked = decltype(is_masked)::value;
          RingPosition below = at;
          below.advance<Tile::kStages>();
          start_below(below);
          if constexpr (kMasked) weigh_masked(tile - 1, factors(below));
          else rows.template weigh<false>(score, visible, decay, factors(below), (tile - 1) * Tile::kKeys, shrink);
          wgmma_wait<0>();
          keep(rows.o);
          rows.shrink_output(shrink);
          ring.release(at, lane);
          at = below;
          --tile;
        };
        const std::true_type masked;
        const std::false_type all_visible;
        if constexpr (Score::kHasLocalKeys) {
          // Like below, in a loop that has the code of each kind of tile once.
          RingPosition above = at;
          for (;;) {
            bool is_global = true;
#pragma unroll
            for (int i = 0; i < Tile::kParts; ++i) is_global = is_global && parts.kind_of(tile * Tile::kParts + i) == TileKind::kWhole;
            if (is_global) rows.weigh_global(score, decay, factors(at));
            else weigh_masked(tile, factors(at));
            wgmma_wait<0>();
            keep(rows.o);
            if (!is_global) rows.shrink_output(shrink);
            ring.release(above, lane, tile < last_tile);
            if (tile == first_tile) break;
            RingPosition below = at;
            below.template advance<Tile::kStages>();
            start_below(below);
            above = at, at = below;
            --tile;
          }
        } else {
          weigh_masked(tile, factors(at));
          while (tile > end_whole) step(masked);
          while (tile > first_whole) step(all_visible);
          if constexpr (Visibility::kBoundsBothSides) {
            while (tile > first_tile) step(masked);
          }
        }

        if constexpr (!Tile::kKeepsQueries) query_ring(consumer).release(queries, lane);
        const Operand<KeyTile> v(base + at.stage * Tile::kStageBytes + KeyTile::kBytes);
        uint32_t w[Tile::kKeys / 4];
        rows.pack_weights(w);
        keep(w);
        wgmma_fence();
        rows.start_output(w, v);
        wgmma_wait<0>();
        keep(rows.o);
        ring.release(at, lane);
        at.template advance<Tile::kStages>();
        --tile;
      } else if constexpr (!Tile::kKeepsQueries) {
        query_ring(consumer).release(queries, lane);
      }
      queries.template advance<Tile::kQueryBuffers>();
      if constexpr (Visibility::kBoundsBothSides) skip_tiles(block_tiles.begin - 1);

      float inverse[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float z = quad_sum(rows.z[half]);
        if (kHasDecay<Visibility> && fabsf(z) < Score::kSmallestSum) z = 0.f;
        inverse[half] = z == 0.f ? 0.f : 1.f / z;
        const int query = lane_row + 8 * half;
        if (t == 0 && query < p.n) {
          float* result = p.z + (static_cast<int64_t>(head.batch) * p.h + head.head) * p.n + query;
          if constexpr (Score::kFollowsRowMax) {
            *result = Score::log_sum(z, rows.reference[half]);
          } else {
            *result = z;
          }
        }
        if (p.noise != nullptr && query < p.n) {
          using Element = typename Math::Element;
          const Element* noise =
              head_of<Element>(p.noise, p.noise_stride, head.batch, head.head) + query * p.noise_stride.token + 2 * t;
#pragma unroll
          for (int j = 0; j < kHeadDim / 8; ++j) {
            if (8 * j >= p.dv) break;
            const float2 x = load_pair(noise + 8 * j);
            rows.o[4 * j + 2 * half] *= fmaf(p.dropout, x.x, 1.f);
            rows.o[4 * j + 2 * half + 1] *= fmaf(p.dropout, x.y, 1.f);
          }
        }
      }
      using Element = typename Math::Element;
      store_accumulator_rows<Math>(head_of<Element>(p.o, p.o_stride, head.batch, head.head), p.o_stride.token, lane_row, p.n, p.dv, rows.o,
                                   inverse[0], inverse[1]);
    }
  }
}

// Offsets in the workspace: bits of the padding mask, running sums of decay, tables of bounds, decay factors of keys.
struct QuadraticFwdSm90Workspace {
  size_t decay_sums, tables, key_factors, bytes;

  explicit QuadraticFwdSm90Workspace(const FwdParams& p) : decay_sums(kept_words_bytes(p)) {
    tables = decay_sums + (!p.has_decay() ? 0 : decay_sum_bytes(p));
    key_factors = (tables + (is_bounded(p) && !has_window_alone(p) ? bound_table_bytes(p, Direction::kForward) : 0) + 255) / 256 * 256;
    bytes = key_factors + (!p.has_decay() ? 0 : key_factor_bytes(p, KeptWords::kKeysPerBlock));
  }
};

template <class Score, class Visibility>
struct LaunchQuadraticFwdSm90 {
  static void run(const FwdParams& p, cudaStream_t stream) {
    dispatch_head_dim(QuadraticSm90HeadDims(), common_head_dim(p), [&](auto head_dim) {
      if constexpr (kWeighsInFp16<Score>) {
        if (p.math == MathMode::kFP16) return run<Fp16, head_dim>(p, stream);
      }
      run<Bf16, head_dim>(p, stream);
    });
  }

 private:
  template <class Math, int kHeadDim>
  static void run(const FwdParams& call, cudaStream_t stream) {
    using Tile = QuadraticFwdSm90Tile<Score, Visibility, kHeadDim>;
    FwdParams p = call;
    const auto tensor_map = [](const TokenTensor& x, int box_tokens) {
      return fastmax::tensor_map(x, box_tokens, panel_cols(kHeadDim));
    };
    const KeptWords kept = fill_kept_words(p, p.workspace, stream);
    uint8_t* key_factors = nullptr;
    if constexpr (Visibility::kHasTables) {
      const QuadraticFwdSm90Workspace at(p);
      char* workspace = static_cast<char*>(p.workspace);
      if constexpr (kHasDecay<Visibility>) {
        fill_decay_sums(p, Resets::kNone, workspace + at.decay_sums, stream);
        key_factors = reinterpret_cast<uint8_t*>(workspace + at.key_factors);
        fill_key_factors<Score, Tile::kKeys, Tile::kLoadedColumns>(p, key_factors, stream);
      }
      fill_bound_tables(p, Score::kFullyDecayed, workspace + at.tables, Direction::kForward, stream);
    }
    const TokenTensor q{p.q, p.q_stride, p.b, p.h, p.n, p.d, p.math}, k{p.k, p.k_stride, p.b, p.hk, p.m, p.d, p.math};
    const TokenTensor v{p.v, p.v_stride, p.b, p.hk, p.m, p.dv, p.math};
    const QuadraticFwdMaps maps{tensor_map(q, Tile::kRows), tensor_map(k, Tile::kKeys), tensor_map(v, Tile::kKeys)};
    const WorkOrder order = WorkOrder::of((p.n + Tile::kBlockRows - 1) / Tile::kBlockRows, int64_t{p.b} * p.h, p.sm_count,
                                          p.causal && !p.window, true);
    launch_waiting_kernel("quadratic_fwd_sm90", quadratic_fwd_sm90_kernel<Score, Visibility, Math, kHeadDim>,
                          grid_1d(std::min(order.work_tiles(), p.sm_count)), Tile::kThreads, Tile::kSharedBytes, stream, maps, p, kept, order,
                          key_factors);
  }
};

}  // namespace fastmax
