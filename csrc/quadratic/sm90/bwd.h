// Backward over tiles of scores on Hopper, for both score policies (score.h). It computes what quadratic/portable/bwd.h
// computes, with wgmma on tiles that the copy engine loads. There are two kernels: one owns keys and streams queries (grad_k,
// grad_v), the other owns queries and streams keys (grad_q). Scores are computed twice, and every sum has one owner and a fixed
// order. Calls that are large enough run the fused backward instead (fused_bwd_plan.h).
//
// A consumer is a warpgroup that owns 64 rows X and Y (keys and values, or queries and grad_o). It streams tiles A and B of the
// other side (queries and grad_o, or keys and values) through a ring that the producer, a warp of the last warpgroup, fills:
//   S = X A^T, D = Y B^T   (64 rows x kStream columns)    P, dS = weights and derivatives from the scores
//   dX += dS A,  dY += P B (keys only)
// The rows of all four products belong to the owner, so P and dS go from accumulators to operands within a thread. If registers
// allow (kPipelined), the tensor core computes S and D of the next tile at the same time as dX and dY of the current one, as in
// fwd.h.
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
#include "decay/decay.h"
#include "quadratic/bounds.h"
#include "quadratic/row_score.h"
#include "quadratic/sm90/decay.h"
#include "quadratic/sm90/exact_window.h"
#include "quadratic/sm90/kept_keys.h"
#include "quadratic/sm90/kernels.h"
#include "quadratic/sm90/visible.h"
#include "quadratic/sm90/work_order.h"

namespace fastmax {

// Number of row scores per head. Zeros pad it to whole tiles of queries.
inline int row_scores_per_head(const Problem& p) { return (p.n + 127) / 128 * 128; }

template <class Score, class Visibility, int kHeadDim, bool kOwnsKeys>
struct QuadraticBwdSm90Tile {
  // Rows of queries at head_dim 32 take few enough registers for three consumers, which hide each other's waits better than two
  // with larger tiles. Rows of keys take a few registers too many.
  static constexpr bool kNarrow = kHeadDim <= 32 && !kHasDecay<Visibility> && !Score::kHasLocalKeys;
  static constexpr int kConsumers = kNarrow && !kOwnsKeys ? 3 : 2;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kRows = 64;  // per consumer
  static constexpr int kBlockRows = kConsumers * kRows;
  // Registers: sums kHeadDim / 2, twice that for keys; S and D kStream; P and dS half of that, or dS alone a quarter; X and Y
  // kHeadDim / 4 each if they are in registers. Decays take registers too, but those of an exact window are exponents in shared
  // memory. Products of 64 x 64 with both operands in shared memory use all of its bandwidth.
  static constexpr bool kPlain = !kHasDecay<Visibility> && !Score::kHasLocalKeys;
  static constexpr int kStream = !kOwnsKeys && kHeadDim <= 64 && !kNarrow && kPlain ? 128 : 64;
  static constexpr bool kXInRegisters =
      kStream == 64 && (kOwnsKeys ? (kPlain || Score::kHasLocalKeys) && kHeadDim <= 64 : kPlain || kHeadDim <= 96);
  static constexpr bool kYInRegisters = kXInRegisters && (!kOwnsKeys || kHeadDim <= 32 || Score::kHasLocalKeys);
  static constexpr bool kPipelined = !(kOwnsKeys && kHeadDim > 64);
  static constexpr int kStages = kNarrow || (kOwnsKeys && kHeadDim <= 64) ? 6 : 4;
  static constexpr int kRowBuffers = kHeadDim <= 64 ? 2 : 1;  // per consumer; 2: the next rows load early

  using RowTile = SwizzledTile<kRows, kHeadDim>;
  using StreamTile = SwizzledTile<kStream, kHeadDim>;

  static constexpr int kThreads = (kConsumers + 1) * 128;
  // A stage holds A, B and the data of its columns: row scores of queries, multiplied by decay factors if there is decay; for
  // keys only decay factors.
  using ColumnTile = DecayTile<Score, !kOwnsKeys, kStream>;
  static constexpr int kScoreBytes = kHasDecay<Visibility> ? ColumnTile::kBytes
                                     : kOwnsKeys        ? kStream * static_cast<int>(sizeof(float4))
                                                        : 0;
  static constexpr int kStageBytes =
      2 * StreamTile::kBytes + (kScoreBytes + kSwizzledTileAlignment - 1) / kSwizzledTileAlignment * kSwizzledTileAlignment;
  static constexpr int kRowsAt = kStages * kStageBytes;  // from here on: offsets in shared memory
  static constexpr int kBarriers = kRowsAt + kRowBuffers * kConsumers * 2 * RowTile::kBytes;
  static constexpr int kRowBarriers = kBarriers + Ring<kStages>::kBarrierBytes;
  static constexpr int kEnd = kRowBarriers + kConsumers * Ring<kRowBuffers>::kBarrierBytes;
  static constexpr int kSharedBytes = kSwizzledTileAlignment + kEnd;
  static_assert(kSharedBytes <= shared_limit(90), "the stages do not fit in shared memory");
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * ptx::registers_at_launch(kThreads),
                "consumers would wait for registers that nobody gives up");
};

struct QuadraticBwdMaps {
  CUtensorMap x, y, a, b;  // operands as above
  CUtensorMap dx, dy;      // results, for kernels that store with the copy engine
};

// State of a consumer's rows, in the layout of accumulators (wgmma.h).
template <class Score, class Visibility, class Math, int kHeadDim, bool kOwnsKeys>
struct QuadraticBwdRows {
  using Tile = QuadraticBwdSm90Tile<Score, Visibility, kHeadDim, kOwnsKeys>;
  using RowTile = typename Tile::RowTile;
  using StreamTile = typename Tile::StreamTile;
  static constexpr int kStream = Tile::kStream;
  static constexpr bool kDecays = kHasDecay<Visibility>;
  using ColumnTile = typename Tile::ColumnTile;
  using ScoreProduct = Wgmma<Math, kStream>;
  using SumProduct = Wgmma<Math, kHeadDim>;

  float dx[kHeadDim / 2];
  float dy[kOwnsKeys ? kHeadDim / 2 : 1];
  float s[kStream / 2];  // scores, then weights
  float d[kStream / 2];  // grad_o . v, then derivatives
  uint32_t x[Tile::kXInRegisters ? kHeadDim / 4 : 1], y[Tile::kYInRegisters ? kHeadDim / 4 : 1];
  float4 row_scores[kOwnsKeys ? 1 : 2];  // of rows that are queries
  float flow[kHasDecay<Visibility> ? 2 : 1];  // this lane's part of the rows' pair sums (decay/decay.h)
  // Of keys of an exact window: the sums over local pairs, which `flow` has not in calls with gates; else zeros.
  static constexpr bool kSumsApart = kDecays && kOwnsKeys && Score::kHasLocalKeys;
  float local_flow[kSumsApart ? 2 : 1];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (float& sum : dx) sum = 0.f;
#pragma unroll
    for (float& sum : dy) sum = 0.f;
#pragma unroll
    for (float& sum : flow) sum = 0.f;
#pragma unroll
    for (float& sum : local_flow) sum = 0.f;
  }

  // Loads X and Y as A operands, if they are held in registers.
  __device__ __forceinline__ void load_operands(uint32_t x_tile, int warp, int lane) {
    if constexpr (Tile::kXInRegisters) load_fragments(x, x_tile, warp, lane);
    if constexpr (Tile::kYInRegisters) load_fragments(y, x_tile + RowTile::kBytes, warp, lane);
  }

  __device__ __forceinline__ void start_scores(uint32_t x_tile, uint32_t stage) {
    multiply<Tile::kXInRegisters>(s, x, x_tile, stage);
    multiply<Tile::kYInRegisters>(d, y, x_tile + RowTile::kBytes, stage + StreamTile::kBytes);
    wgmma_commit();
  }

  __device__ __forceinline__ void start_sums(const uint32_t (&p)[kOwnsKeys ? kStream / 4 : 1], const uint32_t (&ds)[kStream / 4],
                                             uint32_t stage) {
    const Operand<StreamTile> a(stage), b(stage + StreamTile::kBytes);
#pragma unroll
    for (int kk = 0; kk < kStream / 16; ++kk) SumProduct::template rs<Major::kMN>(dx, ds + 4 * kk, a.mn_major(kk));
    if constexpr (kOwnsKeys) {
#pragma unroll
      for (int kk = 0; kk < kStream / 16; ++kk) SumProduct::template rs<Major::kMN>(dy, p + 4 * kk, b.mn_major(kk));
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void pack(uint32_t (&p)[kOwnsKeys ? kStream / 4 : 1], uint32_t (&ds)[kStream / 4]) const {
#pragma unroll
    for (int i = 0; i < kStream / 4; ++i) {
      ds[i] = pack_16bit<Math>(d[2 * i], d[2 * i + 1]);
      if constexpr (kOwnsKeys) p[i] = pack_16bit<Math>(s[2 * i], s[2 * i + 1]);
    }
  }

  __device__ __forceinline__ void keep_sums() {
    keep(dx);
    if constexpr (kOwnsKeys) keep(dy);
  }

  // Converts S and D of the tile that begins at token `begin` to P and dS. visible: bits of visible_keys or visible_queries, read
  // only for kinds that mask pairs. stage: address of the stage, for the data of its columns. lane_row: first row of this lane.
  // streamed: row scores of the streamed head.
  template <TileKind kKind, class Decay>
  __device__ __forceinline__ void differentiate(uint32_t stage, const uint32_t (&visible)[2][kStream / 32], Decay& decay, int begin,
                                                int lane_row, const BwdParams& p, const float4* streamed) {
    constexpr bool kMasked = kMasksPairs<kKind>;
    const uint32_t columns = stage + 2 * StreamTile::kBytes;
    decay.template start<kMasked>(columns);
    if constexpr (Score::kHasLocalKeys) {
      if constexpr (kKind == TileKind::kWhole) differentiate_global(Score(p), columns, decay);
      else differentiate_near<kKind>(Score(p), columns, visible, decay, begin, lane_row, p);
    } else {
      if constexpr (kHasDecay<Visibility>) {
        if (kMasked && decay.takes_pairs) {
          differentiate_by_score<kMasked, true>(columns, visible, decay, begin, lane_row, offset_of_own_key(p), streamed);
          return;
        }
      }
      differentiate_by_score<kMasked, false>(columns, visible, decay, begin, lane_row, offset_of_own_key(p), streamed);
    }
  }

 private:
  // An exact window: tiles of global keys that all rows see. No pair is one of a token with itself.
  template <class Decay>
  __device__ __forceinline__ void differentiate_global(const Score& score, uint32_t columns, const Decay& decay) {
    PolynomialScore::DecayedRow f[2];
    float2 rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float factor = 1.f;
      if constexpr (kOwnsKeys) {
        if constexpr (kDecays) factor = ptx::exp2_approx(decay.of_rows[half]) * decay.gates[half];
      } else {
        float4 row = row_scores[half];
        if constexpr (kDecays) row = Score::decay_row(row, decay.of_rows[half]);
        rows[half] = make_float2(row.x, row.y);
      }
      f[half] = score.global.decayed_row(factor);
    }
#pragma unroll
    for (int j = 0; j < kStream / 8; ++j) {
      const int column = 8 * j + 2 * (lane_index() % 4);
      float2 queries[2], keys;
      if constexpr (kOwnsKeys) load_queries<0>(queries, columns, column);
      else if constexpr (kDecays) keys = load_key_factors(columns + ColumnTile::kPowers, column);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 4 * j + e;
        const float2& row = kOwnsKeys ? queries[e % 2] : rows[e / 2];
        float centred = fmaf(d[i], row.x, row.y);
        if constexpr (kDecays && !kOwnsKeys) centred *= e % 2 == 0 ? keys.x : keys.y;
        const DecayedPair pair = Score::global_pair(f[e / 2], s[i], centred, row.x);
        d[i] = pair.ds;
        if constexpr (kOwnsKeys) s[i] = pair.p;
        if constexpr (kDecays) flow[e / 2] += pair.flow;
      }
    }
  }

  // Tiles with local keys.
  template <TileKind kKind, class Decay>
  __device__ __forceinline__ void differentiate_near(Score score, uint32_t columns, const uint32_t (&visible)[2][kStream / 32],
                                                     const Decay& decay, int begin, int lane_row, const BwdParams& p) {
    constexpr bool kMasks = kMasksPairs<kKind>, kSelects = kSelectsPairs<kKind>;
    const int t = lane_index() % 4;
    const int position = kOwnsKeys ? lane_row - p.causal_offset : lane_row + p.causal_offset;  // among the streamed tokens
    const bool gated = p.log_input_gate != nullptr, sums_apart = kSumsApart && gated;
    float of_local[2] = {0.f, 0.f};  // of tiles of local keys: what their pairs are added to
    if constexpr (kDecays && !kSelects) {
#pragma unroll
      for (int half = 0; half < 2; ++half) of_local[half] = sums_apart ? local_flow[kSumsApart ? half : 0] : flow[half];
    }
    uint32_t local[2][kStream / 32];
    [[maybe_unused]] uint32_t flows[2][kStream / 32];
    if constexpr (kSelects) local_columns(local, p.exact_window, position, begin, t);
    // In registers, so that they are selected by one instruction.
    if constexpr (kSelects) score.c = ptx::compute_first(score.c), score.scale = ptx::compute_first(score.scale);
    float2 rows[2];  // exponents and their rounding errors, which matter where keys may come after queries
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half] = make_float2(0.f, 0.f);
      if constexpr (kDecays) rows[half] = make_float2(decay.of_rows[half], kMasks ? decay.errors[half] : 0.f);
      if constexpr (!kOwnsKeys) {
        const float2 sum = exact_sum(row_scores[half].z, rows[half].x);
        rows[half] = make_float2(sum.x, sum.y + rows[half].y);
      }
      if constexpr (kDecays && kMasks) {
        const int own = position + 8 * half - begin;
#pragma unroll
        for (int i = 0; i < kStream / 32; ++i) {  // a pair of a token with itself does not decay
          flows[half][i] = visible[half][i] & ~((low_bits(own + 1, i) & ~low_bits(own, i)) >> (2 * t));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kStream / 8; ++j) {
      const int column = 8 * j + 2 * t;
      float2 queries[2], keys = make_float2(0.f, 0.f), errors = make_float2(0.f, 0.f);
      if constexpr (kOwnsKeys) load_queries<1>(queries, columns, column);
      else if constexpr (kDecays) keys = load_key_factors(columns, column);
      if constexpr (kDecays && kMasks) errors = load_key_factors(columns + ColumnTile::kErrors, column);
      [[maybe_unused]] float2 gates = make_float2(1.f, 1.f);
      if constexpr (kDecays && kSelects && !kOwnsKeys) {
        if (gated) gates = load_key_factors(columns + ColumnTile::kGates, column);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 4 * j + e, half = e / 2;
        const float centred = d[i] - (kOwnsKeys ? queries[e % 2].y : row_scores[half].w);
        float exponent = rows[half].x + (kOwnsKeys ? queries[e % 2].x : e % 2 == 0 ? keys.x : keys.y);
        if constexpr (kDecays && kMasks) exponent += rows[half].y + (e % 2 == 0 ? errors.x : errors.y);
        DecayedPair pair;
        bool is_local = true;
        if constexpr (kSelects) {
          is_local = is_visible(local, i);
          float gate = e % 2 == 0 ? gates.x : gates.y;
          if constexpr (kSumsApart) gate = decay.gates[half];
          pair = score.pair(is_local, s[i], centred, fmaf(is_local ? score.c : 0.f, s[i], exponent), gate);
        } else {
          pair = score.local_pair(centred, fmaf(score.c, s[i], exponent));
        }
        if constexpr (kDecays) {
          float x = pair.flow;
          if constexpr (kMasks) x = is_visible(flows, i) ? x : 0.f;
          if constexpr (!kSelects) {
            of_local[half] += x;
          } else if constexpr (kSumsApart) {
            flow[half] += sums_apart && is_local ? 0.f : x;
            local_flow[half] += sums_apart && is_local ? x : 0.f;
          } else {
            flow[half] += x;
          }
        }
        const bool counts = !kMasks || is_visible(visible, i);
        d[i] = counts ? pair.ds : 0.f;
        if constexpr (kOwnsKeys) s[i] = counts ? pair.p : 0.f;
      }
    }
    if constexpr (kDecays && !kSelects) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        flow[half] = sums_apart ? flow[half] : of_local[half];
        if constexpr (kSumsApart) local_flow[half] = sums_apart ? of_local[half] : local_flow[half];
      }
    }
  }

  // Loads a half of the row scores of two neighbouring queries.
  template <int kHalf>
  static __device__ __forceinline__ void load_queries(float2 (&queries)[2], uint32_t columns, int column) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint32_t row_score = columns + (column + e) * static_cast<int>(sizeof(float4));
      queries[e] = ptx::load_shared_f32x2(row_score + kHalf * static_cast<int>(sizeof(float2)));
    }
  }

  template <bool kMasked, bool kTakesPairs, class Decay>
  __device__ __forceinline__ void differentiate_by_score(uint32_t columns, const uint32_t (&visible)[2][kStream / 32], const Decay& decay,
                                                int begin, int lane_row, int causal_offset, const float4* streamed) {
    const int t = lane_index() % 4;
    float4 rows[kOwnsKeys ? 1 : 2];
    if constexpr (!kOwnsKeys) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[half] = row_scores[half];
        if constexpr (kHasDecay<Visibility> && !kTakesPairs) rows[half] = Score::decay_row(rows[half], decay.of_rows[half]);
      }
    }
#pragma unroll
    for (int j = 0; j < kStream / 8; ++j) {
      const int column = 8 * j + 2 * t;
      float4 of_columns[2];
      if constexpr (kOwnsKeys && !kTakesPairs) {
        const uint32_t scores = columns + column * static_cast<int>(sizeof(float4));
        of_columns[0] = ptx::load_shared_f32x4(scores), of_columns[1] = ptx::load_shared_f32x4(scores + sizeof(float4));
      }
      float2 keys, sums[2];
      if constexpr (kTakesPairs) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if constexpr (kOwnsKeys) of_columns[e] = streamed[begin + column + e];
          sums[e] = decay.sum_of_column(begin + column + e);
        }
      } else if constexpr (kHasDecay<Visibility> && !kOwnsKeys) {
        keys = load_key_factors(columns, column);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 4 * j + e;
        const float4& row = kOwnsKeys ? of_columns[e % 2] : rows[e / 2];
        const bool counts = !kMasked || is_visible(visible, i);
        WeightAndDerivative pair;
        if constexpr (kHasDecay<Visibility>) {
          float factor;
          if constexpr (kTakesPairs) {
            factor = decay.factor(sums[e % 2], e / 2);
          } else if constexpr (kOwnsKeys) {
            factor = decay.of_rows[e / 2];
          } else {
            factor = e % 2 == 0 ? keys.x : keys.y;
          }
          const DecayedPair decayed = Score::decayed(row, s[i], d[i], factor);
          // A pair of a token with itself does not decay. Whole tiles have none.
          const int own = lane_row + 8 * (e / 2), other = begin + column + e % 2;
          const bool itself = kMasked && (kOwnsKeys ? other + causal_offset == own : own + causal_offset == other);
          flow[e / 2] += counts && !itself ? decayed.flow : 0.f;
          pair = decayed;
        } else if constexpr (kOwnsKeys) {
          pair = Score::weight_and_derivative(row, s[i], d[i]);
        } else {
          pair.ds = Score::derivative(row, s[i], d[i]);
        }
        d[i] = counts ? pair.ds : 0.f;
        if constexpr (kOwnsKeys) s[i] = counts ? pair.p : 0.f;
      }
    }
  }

  static __device__ __forceinline__ void load_fragments(uint32_t (&fragments)[kHeadDim / 4], uint32_t tile, int warp, int lane) {
#pragma unroll
    for (int kk = 0; kk < kHeadDim / 16; ++kk) {
      uint32_t of_step[4];
      ptx::ldmatrix_x4(of_step, tile + RowTile::chunk_offset(16 * warp + lane % 16, 2 * kk + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) fragments[4 * kk + i] = of_step[i];
    }
  }

  template <bool kInRegisters, int kCount>
  static __device__ __forceinline__ void multiply(float (&result)[kStream / 2], const uint32_t (&fragments)[kCount], uint32_t rows,
                                                  uint32_t columns) {
    const Operand<StreamTile> b(columns);
    if constexpr (kInRegisters) {
      ScoreProduct::template rs_first<Major::kK>(result, fragments, b.k_major(0));
#pragma unroll
      for (int kk = 1; kk < kHeadDim / 16; ++kk) ScoreProduct::template rs<Major::kK>(result, fragments + 4 * kk, b.k_major(kk));
    } else {
      const Operand<RowTile> a(rows);
      ScoreProduct::template ss_first<Major::kK, Major::kK>(result, a.k_major(0), b.k_major(0));
#pragma unroll
      for (int kk = 1; kk < kHeadDim / 16; ++kk) {
        ScoreProduct::template ss<Major::kK, Major::kK>(result, a.k_major(kk), b.k_major(kk));
      }
    }
  }
};

template <class Score, class Visibility, class Math, int kHeadDim, bool kOwnsKeys>
__global__ void __launch_bounds__(QuadraticBwdSm90Tile<Score, Visibility, kHeadDim, kOwnsKeys>::kThreads, 1)
    quadratic_bwd_sm90_kernel(const __grid_constant__ QuadraticBwdMaps maps, const BwdParams p, const KeptWords kept,
                              const float4* row_scores, const int rows_per_head, const int group, const WorkOrder order,
                              const PairSums pair_sums, const uint8_t* decay_columns) {
  using Tile = QuadraticBwdSm90Tile<Score, Visibility, kHeadDim, kOwnsKeys>;
  using RowTile = typename Tile::RowTile;
  using StreamTile = typename Tile::StreamTile;
  using Element = typename Math::Element;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (ptx::smem_address(shared) + kSwizzledTileAlignment - 1) & ~uint32_t{kSwizzledTileAlignment - 1};
  const Ring<Tile::kStages> ring(base + Tile::kBarriers);
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize), lane = lane_index();
  const int consumer = warp / 4;
  // The ring of a consumer's buffers for X and Y, which are released as soon as no product needs them.
  const auto row_ring = [&](int i) {
    return Ring<Tile::kRowBuffers>(base + Tile::kRowBarriers + i * Ring<Tile::kRowBuffers>::kBarrierBytes);
  };
  const auto row_tile = [&](int i, RingPosition at) {
    return base + Tile::kRowsAt + (i * Tile::kRowBuffers + at.stage) * 2 * RowTile::kBytes;
  };

  if (threadIdx.x == 0) {
    ring.init(4 * Tile::kConsumers);
    for (int i = 0; i < Tile::kConsumers; ++i) row_ring(i).init(4);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::wait_for_earlier_kernels();

  // Rows of a work tile and their head; first_head: first of the heads_streamed heads of the other side that they read. group:
  // query heads per key/value head.
  struct WorkTileInfo {
    int row, batch, head, first_head;
  };
  const int heads_streamed = kOwnsKeys ? group : 1;
  const auto info_of = [&](const WorkTile& work_tile) {
    const int heads = kOwnsKeys ? p.hk : p.h, head = work_tile.head % heads;
    return WorkTileInfo{work_tile.row_block * Tile::kBlockRows, work_tile.head / heads, head, kOwnsKeys ? head * group : head / group};
  };
  const int rows = kOwnsKeys ? p.m : p.n;
  const auto visibility = [&](const WorkTileInfo& work_tile) {
    return Visibility(p, work_tile.batch * p.hk + (kOwnsKeys ? work_tile.head : work_tile.first_head));
  };
  // Tiles of `block` that the `count` rows from `row` on see.
  const auto tiles_of = [&](const WorkTileInfo& work_tile, int row, int count, Range block) {
    const int last = min(row + count, rows) - 1;
    if constexpr (kOwnsKeys) return query_tile_ranges<Tile::kStream>(visibility(work_tile), row, last, block);
    else return key_tile_ranges<Tile::kStream>(visibility(work_tile), kept, work_tile.batch, row, last, block);
  };
  const auto tiles_of_block = [&](const WorkTileInfo& work_tile) { return tiles_of(work_tile, work_tile.row, Tile::kBlockRows, kAllTiles).seen; };

  if (consumer == Tile::kConsumers) {
    ptx::fewer_registers<Tile::kProducerRegisters>();
    if (warp == 4 * Tile::kConsumers && lane == 0) {  // producer of A and B, with row scores
      RingPosition at;
      for (WorkTileLoop loop(order); !loop.done(); loop.next()) {
        const WorkTileInfo work_tile = info_of(loop.work_tile());
        const Range tiles = tiles_of_block(work_tile);
        for (int i = 0; i < heads_streamed; ++i) {
          const int head = work_tile.first_head + i;
          // Partly visible tiles first: upwards for queries, downwards for keys.
          for (int tile = kOwnsKeys ? tiles.begin : tiles.end - 1; kOwnsKeys ? tile < tiles.end : tile >= tiles.begin;
               tile += kOwnsKeys ? 1 : -1) {
            const int token = tile * Tile::kStream;
            const uint32_t stage = base + at.stage * Tile::kStageBytes;
            ring.wait_until_empty(at);
            int column_bytes = Tile::kScoreBytes;
            if constexpr (kHasDecay<Visibility>) column_bytes = Tile::ColumnTile::bytes(p);
            ring.expect(at, 2 * StreamTile::kBytes + column_bytes);
            StreamTile::load(stage, maps.a, ring.full(at), token, head, work_tile.batch);
            StreamTile::load(stage + StreamTile::kBytes, maps.b, ring.full(at), token, head, work_tile.batch);
            if constexpr (kHasDecay<Visibility>) {
              const int tokens = kOwnsKeys ? p.n : p.m, heads = kOwnsKeys ? p.h : p.hk;
              const int64_t of_head = (static_cast<int64_t>(work_tile.batch) * heads + head) * ((tokens + Tile::kStream - 1) / Tile::kStream);
              ptx::bulk_load(stage + 2 * StreamTile::kBytes, decay_columns + (of_head + tile) * Tile::kScoreBytes, column_bytes, ring.full(at));
            } else if constexpr (kOwnsKeys) {
              const int64_t of_head = (static_cast<int64_t>(work_tile.batch) * p.h + head) * rows_per_head;
              ptx::bulk_load(stage + 2 * StreamTile::kBytes, row_scores + of_head + token, Tile::kScoreBytes, ring.full(at));
            }
            at.advance<Tile::kStages>();
          }
        }
      }
    } else if (warp == 4 * Tile::kConsumers + 1 && lane == 0) {  // producer of X and Y, once a consumer has a free buffer
      RingPosition at;
      for (WorkTileLoop loop(order); !loop.done(); loop.next(), at.advance<Tile::kRowBuffers>()) {
        const WorkTileInfo work_tile = info_of(loop.work_tile());
        for (int i = 0; i < Tile::kConsumers; ++i) {
          const Ring<Tile::kRowBuffers> buffers = row_ring(i);
          const uint32_t tile = row_tile(i, at);
          buffers.wait_until_empty(at);
          buffers.expect(at, 2 * RowTile::kBytes);
          RowTile::load(tile, maps.x, buffers.full(at), work_tile.row + i * Tile::kRows, work_tile.head, work_tile.batch);
          RowTile::load(tile + RowTile::kBytes, maps.y, buffers.full(at), work_tile.row + i * Tile::kRows, work_tile.head, work_tile.batch);
        }
      }
    }
  } else {
    ptx::more_registers<Tile::kConsumerRegisters>();
    const int warp_in_group = warp % 4, t = lane % 4;
    RingPosition at, buffer;  // positions of A and B, and of this consumer's rows
    for (WorkTileLoop loop(order); !loop.done(); loop.next()) {
      const WorkTileInfo work_tile = info_of(loop.work_tile());
      const Range block_tiles = tiles_of_block(work_tile);
      const int row = work_tile.row + consumer * Tile::kRows;           // first row of the warpgroup
      const int lane_row = row + warp_in_group * 16 + lane / 4;  // and lane_row + 8
      TileRanges tiles{{0, 0}, {0, 0}};
      if (row < rows) tiles = tiles_of(work_tile, row, Tile::kRows, block_tiles);
      // The tiles of the block, in the order of the loop: tiles that only other consumers see (`before`), tiles that this
      // consumer sees, then others. The seen tiles: partly visible ones below index `masked`, wholly visible ones below
      // `whole`, partly visible ones up to `seen`.
      const int in_block = warp_uniform(max(block_tiles.end - block_tiles.begin, 0));
      const int seen = warp_uniform(max(tiles.seen.end - tiles.seen.begin, 0));
      const int before = warp_uniform(kOwnsKeys ? tiles.seen.begin - block_tiles.begin : block_tiles.end - tiles.seen.end);
      const int masked = warp_uniform(kOwnsKeys ? tiles.whole.begin - tiles.seen.begin : tiles.seen.end - tiles.whole.end);
      const int whole = warp_uniform(kOwnsKeys ? tiles.whole.end - tiles.seen.begin : tiles.seen.end - tiles.whole.begin);
      const int first = warp_uniform(kOwnsKeys ? tiles.seen.begin : tiles.seen.end - 1);
      const auto skip_tiles = [&](RingPosition& at, int count) {
        for (int i = 0; i < count; ++i) {
          ring.wait_until_full(at);
          ring.release(at, lane);
          at.template advance<Tile::kStages>();
        }
      };

      QuadraticBwdRows<Score, Visibility, Math, kHeadDim, kOwnsKeys> sums;
      sums.reset();
      row_ring(consumer).wait_until_full(buffer);
      const uint32_t x_tile = row_tile(consumer, buffer);
      sums.load_operands(x_tile, warp_in_group, lane);
      if constexpr (!kOwnsKeys) {
        const float4* of_head = row_scores + (static_cast<int64_t>(work_tile.batch) * p.h + work_tile.head) * rows_per_head;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int query = lane_row + 8 * half;
          sums.row_scores[half] = query < rows_per_head ? of_head[query] : make_float4(0.f, 0.f, 0.f, 0.f);
        }
      }

      const auto stage_of = [&](RingPosition at) { return base + at.stage * Tile::kStageBytes; };
      auto decay = [&] {
        if constexpr (kHasDecay<Visibility>) {
          return TileDecay<Score, kOwnsKeys, Tile::kStream>(p, work_tile.batch * p.hk + (kOwnsKeys ? work_tile.head : work_tile.first_head), lane_row);
        } else {
          return NoTileDecay();
        }
      }();
      const auto of_lane = [&] {
        if constexpr (Score::kHasLocalKeys) return LaneVisibility<kOwnsKeys>(visibility(work_tile), lane_row);
        else return visibility(work_tile);
      }();
      uint32_t visible[2][Tile::kStream / 32];
      // Converts S and D of the i-th tile of a head, which is in the stage, to P and dS.
      int head_streamed = 0;
      const auto differentiate = [&](auto kind, int i, RingPosition at) {
        constexpr TileKind kKind = decltype(kind)::value;
        if constexpr (kMasksPairs<kKind>) {
          if constexpr (kOwnsKeys) {
            visible_queries(visible, of_lane, first + i, lane_row, t);
          } else {
            visible_keys(visible, of_lane, kept, work_tile.batch, first - i, lane_row, t);
          }
        }
        const float4* streamed = nullptr;
        if constexpr (kOwnsKeys && kHasDecay<Visibility>) {
          streamed = row_scores + (static_cast<int64_t>(work_tile.batch) * p.h + work_tile.first_head + head_streamed) * rows_per_head;
        }
        sums.template differentiate<kKind>(stage_of(at), visible, decay, (kOwnsKeys ? first + i : first - i) * Tile::kStream, lane_row,
                                            p, streamed);
      };

      const std::integral_constant<TileKind, TileKind::kWhole> all_visible;
      const std::integral_constant<TileKind, TileKind::kMixed> mixed;
      // An exact window: the kinds of the seen tiles, and `differentiate` for the kind of a tile.
      TileKinds kinds{};
      if constexpr (Score::kHasLocalKeys) {
        const int position = kOwnsKeys ? row - p.causal_offset : row + p.causal_offset;
        kinds = tile_kinds<Tile::kStream>(tiles, p.exact_window, position, position + min(Tile::kRows, rows - row) - 1);
      }
      const auto differentiate_by_kind = [&](int i, RingPosition at) {
        with_kind(kinds.kind_of(kOwnsKeys ? first + i : first - i), [&](auto kind) { differentiate(kind, i, at); });
      };

      // Without overlap: `score_tile` computes S and D of the current stage, `visit` also P and dS of this i-th tile of its head, and
      // add_tile adds it to the sums.
      const auto score_tile = [&] {
        ring.wait_until_full(at);
        wgmma_fence();
        sums.start_scores(x_tile, stage_of(at));
        wgmma_wait<0>();
        keep(sums.s);
        keep(sums.d);
      };
      const auto visit = [&](auto kind, int i) {
        score_tile();
        if constexpr (Score::kHasLocalKeys) differentiate_by_kind(i, at);
        else differentiate(kind, i, at);
      };
      const auto add_tile = [&] {
        uint32_t packed_p[kOwnsKeys ? Tile::kStream / 4 : 1], packed_ds[Tile::kStream / 4];
        sums.pack(packed_p, packed_ds);
        if constexpr (kOwnsKeys) keep(packed_p);
        keep(packed_ds);
        wgmma_fence();
        sums.start_sums(packed_p, packed_ds, stage_of(at));
        wgmma_wait<0>();
        sums.keep_sums();
        ring.release(at, lane);
        at.template advance<Tile::kStages>();
      };

      const auto release_rows = [&](bool condition = true) { row_ring(consumer).release(buffer, lane, condition); };
      if (seen == 0) {
        ptx::fence_proxy_async();  // no product reads the rows that were loaded (pipeline.h)
        release_rows();
        for (int head = 0; head < heads_streamed; ++head) skip_tiles(at, in_block);
      } else if constexpr (Tile::kPipelined) {
        int i = 0;
        // Starts S and D of the next tile and adds the current one to the sums; returns as soon as S and D are there.
        const auto start_next = [&](RingPosition next) {
          ring.wait_until_full(next);
          uint32_t packed_p[kOwnsKeys ? Tile::kStream / 4 : 1], packed_ds[Tile::kStream / 4];
          sums.pack(packed_p, packed_ds);
          if constexpr (kOwnsKeys) keep(packed_p);
          keep(packed_ds);
          wgmma_fence();
          sums.start_scores(x_tile, stage_of(next));
          sums.start_sums(packed_p, packed_ds, stage_of(at));
          wgmma_wait<1>();
          keep(sums.s);
          keep(sums.d);
        };
        // Starts with P and dS of the current tile and ends with those of the next, the i-th tile of its head.
        const auto step = [&](auto kind) {
          RingPosition next = at;
          next.template advance<Tile::kStages>();
          if constexpr (!Visibility::kBoundsBothSides && decltype(kind)::value == TileKind::kMixed) {
            if (i == 0) skip_tiles(next, in_block - seen);
          }
          start_next(next);
          differentiate(kind, i, next);
          wgmma_wait<0>();
          sums.keep_sums();
          ring.release(at, lane);
          at = next;
          ++i;
        };
        const auto start = [&] {
          skip_tiles(at, before);
          visit(mixed, 0);
          i = 1;
        };
        if constexpr (Score::kHasLocalKeys) {
          // Like below, in a loop that has the code of each kind of tile once.
          for (head_streamed = 0; head_streamed < heads_streamed; ++head_streamed) {
            skip_tiles(at, before);
            score_tile();
            RingPosition previous = at;
            for (i = 0;; ++i) {
              differentiate_by_kind(i, at);
              wgmma_wait<0>();
              sums.keep_sums();
              ring.release(previous, lane, i > 0);
              if (i == seen - 1) break;
              RingPosition next = at;
              next.template advance<Tile::kStages>();
              start_next(next);
              previous = at, at = next;
            }
            release_rows(head_streamed == heads_streamed - 1);
            add_tile();
            skip_tiles(at, in_block - seen - before);
          }
        } else if constexpr (Visibility::kBoundsBothSides) {
          // Each head by itself: with tables this consumer may skip any number of tiles that others see, and the ring has to
          // turn meanwhile.
          for (head_streamed = 0; head_streamed < heads_streamed; ++head_streamed) {
            start();
            while (i < masked) step(mixed);
            while (i < whole) step(all_visible);
            while (i < seen) step(mixed);
            release_rows(head_streamed == heads_streamed - 1);
            add_tile();
            skip_tiles(at, in_block - seen - before);
          }
        } else {
          static_assert(Tile::kStages >= 2 + Tile::kBlockRows / Tile::kStream, "a step skips tiles and holds one");
          start();
          for (int head = 0; head < heads_streamed; ++head) {
            while (i < max(masked, 1)) step(mixed);
            while (i < whole) step(all_visible);
            i = 0;
          }
          release_rows();
          add_tile();
        }
      } else {
        int i = 0;
        const auto step = [&](auto kind) {
          visit(kind, i);
          release_rows(i == seen - 1 && head_streamed == heads_streamed - 1);
          add_tile();
          ++i;
        };
        for (head_streamed = 0; head_streamed < heads_streamed; ++head_streamed) {
          i = 0;
          skip_tiles(at, before);
          if constexpr (Score::kHasLocalKeys) {
            while (i < seen) step(mixed);  // of any kind: `visit` looks it up
          } else {
            while (i < masked) step(mixed);
            while (i < whole) step(all_visible);
            if constexpr (Visibility::kBoundsBothSides) {
              while (i < seen) step(mixed);
            }
          }
          if constexpr (Visibility::kBoundsBothSides) skip_tiles(at, in_block - seen - before);
        }
      }

      if constexpr (kHasDecay<Visibility>) {
        const int heads = kOwnsKeys ? p.hk : p.h;
        float* of_head = kOwnsKeys ? pair_sums.by_key : pair_sums.by_query;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int own = lane_row + 8 * half;
          const float flow = quad_sum(sums.flow[half]) * Score(p).flow_scale();
          float sum = flow;
          if constexpr (sums.kSumsApart) sum += quad_sum(sums.local_flow[half]);
          if (of_head != nullptr && t == 0 && own < rows) {
            const int64_t at = (static_cast<int64_t>(work_tile.batch) * heads + work_tile.head) * rows + own;
            const bool keeps = !kOwnsKeys || kept.keeps(work_tile.batch, own);
            of_head[at] = keeps ? sum : 0.f;
            if (sums.kSumsApart && pair_sums.by_global_key != nullptr) pair_sums.by_global_key[at] = keeps ? flow : 0.f;
          }
        }
      }
      if constexpr (kOwnsKeys) {  // a masked key has no weight in any row
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool keeps = kept.keeps(work_tile.batch, lane_row + 8 * half);
#pragma unroll
          for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& dx = sums.dx[4 * j + 2 * half + e];
              float& dy = sums.dy[4 * j + 2 * half + e];
              dx = keeps ? dx : 0.f, dy = keeps ? dy : 0.f;
            }
          }
        }
        store_accumulator_rows<Math>(head_of<Element>(p.grad_v, p.grad_v_stride, work_tile.batch, work_tile.head), p.grad_v_stride.token, lane_row,
                                     rows, p.dv, sums.dy, 1.f, 1.f);
      }
      const Stride& stride = kOwnsKeys ? p.grad_k_stride : p.grad_q_stride;
      store_accumulator_rows<Math>(head_of<Element>(kOwnsKeys ? p.grad_k : p.grad_q, stride, work_tile.batch, work_tile.head), stride.token, lane_row,
                                   rows, p.d, sums.dx, 1.f, 1.f);
      buffer.template advance<Tile::kRowBuffers>();
    }
  }
}

// Offsets in the workspace, after the row scores: a copy of grad_o (if noise multiplies it or no tensor map can express its
// strides), bits of the padding mask, tables of bounds, and the data of decay/decay.h.
struct QuadraticBwdSm90Workspace {
  size_t grad_o, kept, tables, decay_sums, pair_sums, decay_gradient, key_factors, decayed_row_scores, bytes;
  bool copies_grad_o;

  explicit QuadraticBwdSm90Workspace(const BwdParams& p)
      : copies_grad_o(p.noise != nullptr || !has_tensor_map({p.grad_o, p.grad_o_stride, p.b, p.h, p.n, p.dv, p.math})) {
    const auto align = [](size_t offset) { return (offset + 255) / 256 * 256; };
    grad_o = align(static_cast<size_t>(p.b) * p.h * row_scores_per_head(p) * sizeof(float4));
    kept = align(grad_o + (copies_grad_o ? static_cast<size_t>(p.b) * p.h * p.n * p.dv * 2 : 0));
    tables = kept + kept_words_bytes(p);
    decay_sums = align(tables + (is_bounded(p) && !has_window_alone(p) ? bound_table_bytes(p, Direction::kBackward) : 0));
    pair_sums = align(decay_sums + (!p.has_decay() ? 0 : decay_sum_bytes(p)));
    decay_gradient = align(pair_sums + (!p.wants_pair_sums() ? 0 : pair_sum_bytes(p)));
    key_factors = align(decay_gradient + (!p.wants_pair_sums() ? 0 : decay_gradient_bytes(p)));
    decayed_row_scores = align(key_factors + (!p.has_decay() ? 0 : key_factor_bytes(p, kDecayQueries)));
    bytes = decayed_row_scores + (!p.has_decay() ? 0 : decayed_row_score_bytes(p));
  }
};

template <class Score, class Visibility>
struct LaunchQuadraticBwdSm90 {
  template <class Math, int kHeadDim>
  static void run(const BwdParams& call, cudaStream_t stream) {
    using Element = typename Math::Element;
    BwdParams p = call;
    const QuadraticBwdSm90Workspace at(p);
    char* workspace = static_cast<char*>(p.workspace);
    float4* row_scores = reinterpret_cast<float4*>(workspace);
    Element* grad_o_copy = at.copies_grad_o ? reinterpret_cast<Element*>(workspace + at.grad_o) : nullptr;
    launch_row_scores<Score, Element, kHeadDim>(p, row_scores_per_head(p), row_scores, grad_o_copy, stream);
    const KeptWords kept = fill_kept_words(p, workspace + at.kept, stream);
    PairSums sums{};
    uint8_t* columns[2] = {};  // decay factors of keys; decayed row scores of queries
    if constexpr (kHasDecay<Visibility>) {
      columns[0] = reinterpret_cast<uint8_t*>(workspace + at.key_factors);
      columns[1] = reinterpret_cast<uint8_t*>(workspace + at.decayed_row_scores);
      fill_decay_sums(p, Resets::kNone, workspace + at.decay_sums, stream);
      fill_key_factors<Score, QuadraticBwdSm90Tile<Score, Visibility, kHeadDim, false>::kStream>(p, columns[0], stream);
      decay_row_scores<Score>(p, row_scores, row_scores_per_head(p), columns[1], stream);
      if (p.wants_pair_sums()) sums = pair_sums(p, workspace + at.pair_sums);
    }
    if constexpr (Visibility::kHasTables) fill_bound_tables(p, Score::kFullyDecayed, workspace + at.tables, Direction::kBackward, stream);

    const TokenTensor q{p.q, p.q_stride, p.b, p.h, p.n, p.d, p.math}, k{p.k, p.k_stride, p.b, p.hk, p.m, p.d, p.math};
    const TokenTensor v{p.v, p.v_stride, p.b, p.hk, p.m, p.dv, p.math};
    TokenTensor grad_o{p.grad_o, p.grad_o_stride, p.b, p.h, p.n, p.dv, p.math};
    if (at.copies_grad_o) {
      grad_o.data = grad_o_copy;
      grad_o.stride = {int64_t{p.h} * p.n * p.dv, int64_t{p.n} * p.dv, p.dv};
    }
    run_kernel<Math, kHeadDim, true>("quadratic_bwd_kv_sm90", p, k, v, q, grad_o, kept, row_scores, p.m, p.hk,
                                     sums, columns[1], stream);
    run_kernel<Math, kHeadDim, false>("quadratic_bwd_q_sm90", p, q, grad_o, k, v, kept, row_scores, p.n, p.h,
                                      sums, columns[0], stream);
    if (kHasDecay<Visibility> && p.wants_pair_sums()) fill_decay_gradient(p, sums, workspace + at.decay_gradient, stream);
  }

  // rows: rows per head on the owner's side.
  template <class Math, int kHeadDim, bool kOwnsKeys>
  static void run_kernel(const char* name, const BwdParams& p, const TokenTensor& x, const TokenTensor& y, const TokenTensor& a,
                         const TokenTensor& b, const KeptWords& kept,
                         const float4* row_scores, int rows, int heads, const PairSums& sums, const uint8_t* decay_columns,
                         cudaStream_t stream) {
    using Tile = QuadraticBwdSm90Tile<Score, Visibility, kHeadDim, kOwnsKeys>;
    const auto tensor_map = [](const TokenTensor& x, int box_tokens) {
      return fastmax::tensor_map(x, box_tokens, panel_cols(kHeadDim));
    };
    const QuadraticBwdMaps maps{tensor_map(x, Tile::kRows), tensor_map(y, Tile::kRows), tensor_map(a, Tile::kStream),
                                tensor_map(b, Tile::kStream)};
    const WorkOrder order = WorkOrder::of((rows + Tile::kBlockRows - 1) / Tile::kBlockRows, int64_t{p.b} * heads, p.sm_count,
                                          p.causal && !p.window, !kOwnsKeys);
    launch_waiting_kernel(name, quadratic_bwd_sm90_kernel<Score, Visibility, Math, kHeadDim, kOwnsKeys>,
                          grid_1d(std::min(order.work_tiles(), p.sm_count)), Tile::kThreads, Tile::kSharedBytes, stream, maps, p, kept,
                          row_scores, row_scores_per_head(p), p.h / p.hk, order, sums, decay_columns);
  }
};

}  // namespace fastmax
