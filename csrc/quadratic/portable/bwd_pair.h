// Backward kernels for wide heads. Two resident operands and two sums would leave a warp registers for one row tile only, and
// every streamed token would be read from shared memory for just 16 rows. Here two warps, a pair, own the same rows. One
// computes x = q . k, the other dp = grad_o . v, so that each holds one resident operand and one sum of twice as many rows.
// They exchange fp32 accumulators through shared memory, each lane with the same lane of the other warp.
//   grad_k, grad_v: the first warp hands over x (softmax: p), computes p and sums grad_v; the second computes ds, sums grad_k.
//   grad_q:         each warp computes one factor of ds and takes the other's; each sums half of grad_q's columns.
#pragma once

#include <type_traits>

#include "core/fragments.h"
#include "core/heads.h"
#include "core/ptx.h"
#include "core/score.h"
#include "core/visibility.h"
#include "quadratic/portable/bwd_common.h"
#include "quadratic/portable/decay.h"
#include "quadratic/portable/tile_config.h"

namespace fastmax {

// Waits for the other warp of the pair, once per slab after handing over. Two slots alternate: before a slot is written again,
// the other warp has reached the next slab's barrier and has finished reading the slot.
__device__ __forceinline__ void wait_for_pair(int pair) { ptx::barrier_wait<2 * kWarpSize>(1 + pair); }

// Address at which this lane hands over accumulator (row tile i, half) of a slab.
__device__ __forceinline__ uint32_t lane_slot(uint32_t slot, int i, int half) {
  return slot + ((i * 2 + half) * kWarpSize + threadIdx.x % kWarpSize) * 16;
}
__device__ __forceinline__ void hand_over(uint32_t lane_slot, const float (&x)[4]) {
  ptx::store_shared_f32x4(lane_slot, make_float4(x[0], x[1], x[2], x[3]));
}
__device__ __forceinline__ void take_over(float (&x)[4], uint32_t lane_slot) {
  const float4 y = ptx::load_shared_f32x4(lane_slot);
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}

// grad_k and grad_v: a block owns kRows keys of one key/value head and streams the queries of its group's heads.
template <class Score, class Visibility, class Math, int kHeadDim>
__global__ void __launch_bounds__(QuadraticBwdKvPairTile<Math, kHeadDim>::kThreads,
                                  QuadraticBwdKvPairTile<Math, kHeadDim>::kMinBlocks)
    quadratic_bwd_kv_pair_kernel(const BwdParams p, const float4* row_scores, const void* grad_o_base, const Stride grad_o_stride,
                                 const PairSums pair_sums, const int row_blocks) {
  using Tile = QuadraticBwdKvPairTile<Math, kHeadDim>;
  using Element = typename Math::Element;
  constexpr int kRowTiles = Tile::kRowTiles;
  extern __shared__ __align__(128) char shared[];
  const uint32_t ring = ptx::smem_address(shared);

  // The first keys are seen by most queries, so the longest blocks come first. The column parts of a block are next to each
  // other.
  const KvPosition in = kv_position<Tile::kRows>(p, blockIdx.x / Tile::kColumnParts, row_blocks);
  const int first_col = static_cast<int>(blockIdx.x % Tile::kColumnParts) * Tile::kOutputCols;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const int pair = warp % Tile::kPairs;
  const bool sums_v = warp < Tile::kPairs;  // whether this is the first warp of the pair, which sums grad_v
  const int warp_row = in.block_row + pair * kRowTiles * 16;
  FragmentA<Math> rows[kRowTiles][kHeadDim / 16];
  {
    const Element* k = head_of<Element>(p.k, p.k_stride, in.batch, in.kv_head);
    const Element* v = head_of<Element>(p.v, p.v_stride, in.batch, in.kv_head);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int kk = 0; kk < kHeadDim / 16; ++kk) {
        load_a_mk_global<Math>(rows[i][kk], sums_v ? k : v, sums_v ? p.k_stride.token : p.v_stride.token, warp_row + i * 16, p.m,
                            kk * 16, sums_v ? p.d : p.dv);
      }
    }
  }

  const Score score(p);
  float grad[kRowTiles][Tile::kOutputCols / 8][4] = {};
  // A stage holds q, grad_o and row scores. The first warp multiplies with q and sums grad_o, the second the other way round.
  const uint32_t lane_b = ptx::keep_in_register(ring + (sums_v ? 0 : Tile::kTileBytes) + lane_offset_b_nk<Math, kHeadDim>());
  const uint32_t lane_b_trans = ptx::keep_in_register(ring + (sums_v ? Tile::kTileBytes : 0) +
                                                      lane_offset_b_kn<Math, kHeadDim>(first_col));
  const uint32_t exchange = ring + Tile::kRingBytes + pair * Tile::kSlots * Tile::kExchangeBytes;
  const int state = in.batch * p.hk + in.kv_head;
  const QueryDecayScratch<Tile> scratch{ring + Tile::kSharedBytes};
  if (Visibility::kMayDecay && p.decay_sums != nullptr) scratch.clear_sums();

  // A block whose keys are all masked has nothing to sum.
  const KeptKeys<BwdParams> kept_keys(p, row_blocks * Tile::kColumnParts * p.hk);
  const bool keeps_some = kept_keys.template tile<Tile::kRows>(in.block_row) != Kept::kNone;
  for (int head_in_group = keeps_some ? 0 : p.h / p.hk; head_in_group < p.h / p.hk; ++head_in_group) {
    // fp32: recomputed for each head, so that the inner loop does not hold it in registers.
    const KvPosition at =
        Tile::k16 ? in : kv_position<Tile::kRows>(p, ptx::keep_in_register(blockIdx.x) / Tile::kColumnParts, row_blocks);
    const QueryStream<Element> stream(p, row_scores, grad_o_base, grad_o_stride, at.batch, at.kv_head, head_in_group);
    const auto load_stage = [&](int tile) {
      // The loader is rebuilt for each stage, so that the inner loop does not hold it in registers.
      stream.template load<Tile>(StreamLoader<Tile, Element, kHeadDim>(ptx::keep_in_register(threadIdx.x)), ring, tile, p);
    };

    const Range tiles = query_tiles<Tile::kStream>(Visibility(p, state), at.block_row, at.block_row + Tile::kRows - 1).seen;
    __syncthreads();  // all threads have finished reading the stages of the previous head
    load_stage(tiles.begin);
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // the stage is complete for all threads, and all have finished reading the other one and the slots
      if (tile + 1 < tiles.end) load_stage(tile + 1);

      const uint32_t stage = tile % Tile::kStages * Tile::kStageBytes;
      const uint32_t scores = ring + stage + 2 * Tile::kTileBytes + t * 32;
      const int begin = tile * Tile::kStream;
      // Recomputes the rows' bounds for each tile, if registers for them would spill.
      const int first_row = Tile::kKeepsBounds ? warp_row : static_cast<int>(ptx::keep_in_register(warp_row));
      const int last_row = first_row + kRowTiles * 16 - 1;
      const Visibility sees = visibility_of<Visibility>(p, state);
      // Adds one slab of 16 queries. masked: some pairs may be invisible.
      const auto add_slab = [&](int slab, auto masked, auto&& maybe_decay) {
        constexpr bool kMasked = decltype(masked)::value;
        const uint32_t tokens = stage + slab * Tile::kRowBytes;
        const uint32_t slot = exchange + slab / 16 % Tile::kSlots * Tile::kExchangeBytes;
        float x[kRowTiles][2][4];  // first warp: x, then p; second warp: dp, then ds
        multiply_slab<Math, kHeadDim, kRowTiles>(x, rows, tokens + lane_b);
        const auto make_weights = [&] {
          maybe_decay.visit([&](auto&& decay) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int token = begin + slab + half * 8 + t * 2;
              const auto queries = decay.at(token);
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const float4 row = decay.row(scores + (slab + half * 8 + e) * 16, token + e);
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
                  for (int r = 0; r < 4; r += 2) {
                    x[i][half][r + e] = decay.weight(row, x[i][half][r + e], queries, e, i, r / 2);
                  }
                }
              }
            }
          });
        };
        if (sums_v) {
          if constexpr (Score::kSlopeIsWeight) make_weights();
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) hand_over(lane_slot(slot, i, half), x[i][half]);
          }
          wait_for_pair(pair);
          if constexpr (!Score::kSlopeIsWeight) make_weights();
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const Line centre = score.centre_line(ptx::load_shared_f32(scores + (slab + half * 8 + e) * 16 + 12));
#pragma unroll
              for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
                for (int r = 0; r < 4; r += 2) x[i][half][r + e] = centre.at(x[i][half][r + e]);
              }
            }
          }
          wait_for_pair(pair);
          maybe_decay.visit([&](auto&& decay) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float other[kRowTiles][4];  // x, or the weight if it is the slope
#pragma unroll
              for (int i = 0; i < kRowTiles; ++i) take_over(other[i], lane_slot(slot, i, half));
              const int token = begin + slab + half * 8 + t * 2;
              const auto queries = decay.at(token);
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float4 row{};
                if constexpr (!Score::kSlopeIsWeight) {
                  row = decay.row(scores + (slab + half * 8 + e) * 16, token + e);
                }
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
                  for (int r = 0; r < 4; r += 2) {
                    const int key = first_row + i * 16 + r * 4 + g;
                    auto pair = decay.pair_of_centred(row, other[i][r + e], x[i][half][r + e], queries, e, i, r / 2);
                    if (std::decay_t<decltype(decay)>::kHasDecay && kMasked && !sees.key_is_seen(key, token + e)) pair = {};
                    x[i][half][r + e] = pair.ds;
                    decay.add_flow(pair, i, r / 2, key, token + e);
                  }
                }
              }
            }
            decay.finish_slab(scratch);
          });
        }
        if constexpr (kMasked) {
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const int query = begin + slab + half * 8 + t * 2 + e % 2;
                if (!sees.key_is_seen(first_row + i * 16 + e / 2 * 8 + g, query)) x[i][half][e] = 0.f;
              }
            }
          }
        }
        WeightsA<Math> weights[kRowTiles];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) weights_a_from_accumulator<Math>(weights[i], x[i][0], x[i][1]);
        accumulate_slab<Math, kHeadDim>(grad, weights, tokens + lane_b_trans);
      };
      const auto add_whole_tile = [&](auto&& decay) {
#pragma unroll(Tile::kUnroll)
        for (int slab = 0; slab < Tile::kStream; slab += 16) add_slab(slab, std::false_type{}, decay);
      };
      const auto add_masked_tile = [&](auto&& decay) {
#pragma unroll 1
        for (int slab = 0; slab < Tile::kStream; slab += 16) {
          bool sees_some = begin + slab + 15 >= sees.queries_of(first_row).begin;
          if constexpr (Visibility::kBoundsBothSides) sees_some = sees_some && begin + slab < sees.queries_of(last_row).end;
          if (sees_some) {
            add_slab(slab, std::true_type{}, decay);
          } else {
            wait_for_pair(pair);  // racecheck (compute-sanitizer) needs equally many barriers in all warps
          }
        }
      };
      const bool whole = query_tiles<Tile::kStream>(sees, first_row, last_row).whole.contains(tile);
      add_query_tile<Score, Visibility>(p, state, scratch, ring + stage + 2 * Tile::kTileBytes, whole, tile, first_row, add_whole_tile,
                                        add_masked_tile);
    }
  }

  // Recomputed, so that the main loop does not hold it in registers.
  const KvPosition out = kv_position<Tile::kRows>(p, ptx::keep_in_register(blockIdx.x) / Tile::kColumnParts, row_blocks);
  const PaddedKeysAreZero finish{p.attention_mask, p.mask_batch_stride, out.batch};
  const Stride& stride = sums_v ? p.grad_v_stride : p.grad_k_stride;
  Element* dst =
      static_cast<Element*>(sums_v ? p.grad_v : p.grad_k) + out.batch * stride.batch + out.kv_head * stride.head + first_col;
  store_rows(grad, dst, stride.token, warp_row, p.m, (sums_v ? p.dv : p.d) - first_col, finish);
  if constexpr (Visibility::kMayDecay) {
    if (!sums_v && first_col == 0) store_sums_by_key<Score>(p, pair_sums, scratch, out.batch, out.kv_head, warp_row);
  }
}

// grad_q: a block owns kRows queries of one head and streams the keys that they see.
template <class Score, class Visibility, class Math, int kHeadDim>
__global__ void __launch_bounds__(QuadraticBwdQPairTile<Math, kHeadDim>::kThreads, QuadraticBwdQPairTile<Math, kHeadDim>::kMinBlocks)
    quadratic_bwd_q_pair_kernel(const BwdParams p, const float4* row_scores, const void* grad_o_base, const Stride grad_o_stride,
                                const PairSums pair_sums, const int row_blocks) {
  using Tile = QuadraticBwdQPairTile<Math, kHeadDim>;
  using Element = typename Math::Element;
  constexpr int kRowTiles = Tile::kRowTiles;
  extern __shared__ __align__(128) char shared[];
  const uint32_t ring = ptx::smem_address(shared);

  const int block_row = (row_blocks - 1 - static_cast<int>(blockIdx.x) % row_blocks) * Tile::kRows;
  const HeadIndex in = head_index(p, blockIdx.x / row_blocks);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const int pair = warp % Tile::kPairs;
  const int role = warp / Tile::kPairs;  // 0: x and the first half of the columns; 1: dp and the second half
  const int warp_row = block_row + pair * kRowTiles * 16;

  const Element* k = head_of<Element>(p.k, p.k_stride, in.batch, in.kv_head);
  const Element* v = head_of<Element>(p.v, p.v_stride, in.batch, in.kv_head);
  const int state = in.batch * p.hk + in.kv_head;
  const KeyDecayScratch<Tile> scratch{ring + Tile::kSharedBytes};
  if (Visibility::kMayDecay && p.decay_sums != nullptr) scratch.clear_sums();
  const KeptKeys<BwdParams> kept_keys(p, row_blocks * p.h);
  const Range keys = keys_seen(Visibility(p, state), block_row, min(block_row + Tile::kRows, p.n) - 1);
  const Range tiles = tiles_with<Tile::kStream>(kept_keys.trim<Tile::kThreads>(keys, reinterpret_cast<int*>(shared)));
  const auto load_stage = [&](int tile) {
    // The loader is rebuilt for each stage, so that the products do not hold it in registers.
    load_key_stage<Tile>(StreamLoader<Tile, Element, kHeadDim>(ptx::keep_in_register(threadIdx.x)), ring, tile, p, k, v);
  };
  load_stage(tiles.begin);

  const Score score(p);
  FragmentA<Math> rows[kRowTiles][kHeadDim / 16];
  Line line[kRowTiles][2];      // this warp's factor of ds, before Score::slope
  float at_zero[kRowTiles][2];  // Fastmax with decay: weight at x = 0, to compute weights for pair sums
  {
    const Element* q = head_of<Element>(p.q, p.q_stride, in.batch, in.head);
    const Element* grad_o = head_of<Element>(grad_o_base, grad_o_stride, in.batch, in.head);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int kk = 0; kk < kHeadDim / 16; ++kk) {
        load_a_mk_global<Math>(rows[i][kk], role == 0 ? q : grad_o, role == 0 ? p.q_stride.token : grad_o_stride.token,
                            warp_row + i * 16, p.n, kk * 16, role == 0 ? p.d : p.dv);
      }
    }
  }
  const auto load_rows = [&](const auto& decay_row) {
    const int64_t head = static_cast<int>(ptx::keep_in_register(blockIdx.x)) / row_blocks;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = min(warp_row + i * 16 + half * 8 + g, p.n - 1);
        const float4 row = decay_row(row_scores[head * p.n + query], query);
        line[i][half] = role == 0 ? Score::slope_line(row) : score.centre_line(row.w);
        at_zero[i][half] = row.x;
      }
    }
  };
  load_query_rows<Score, Visibility, Tile::kStream>(p, state, tiles.begin, warp_row, load_rows);

  float grad_q[kRowTiles][Tile::kOutputCols / 8][4] = {};
  const uint32_t lane_b = ptx::keep_in_register(ring + role * Tile::kTileBytes + lane_offset_b_nk<Math, kHeadDim>());
  const int first_col = role * Tile::kOutputCols;
  const uint32_t lane_b_trans = ptx::keep_in_register(ring + lane_offset_b_kn<Math, kHeadDim>(first_col));
  const uint32_t exchange = ring + Tile::kRingBytes + pair * Tile::kSlots * 2 * Tile::kExchangeBytes;

  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // the stage is complete for all threads, and all have finished reading the other one and the slots
    if (tile + 1 < tiles.end) load_stage(tile + 1);

    const uint32_t stage = tile % Tile::kStages * Tile::kStageBytes;
    const int begin = tile * Tile::kStream;
    const Kept kept = kept_keys.template tile<Tile::kStream>(begin);
    const Visibility sees = visibility_of<Visibility>(p, state);
    if constexpr (Visibility::kMayDecay) {
      if (tile > tiles.begin && tile == first_pairwise_tile_of<Tile::kStream>(p, state, warp_row)) load_rows(AsItIs{});
    }
    if (kept == Kept::kNone) continue;
    const int first_row = static_cast<int>(ptx::keep_in_register(warp_row));  // recomputes bounds, to save registers
    const int last_row = first_row + kRowTiles * 16 - 1;
    // Adds one slab of 16 keys. masked: some pairs may be invisible.
    const auto add_slab = [&](int slab, auto masked, auto&& maybe_decay) {
      constexpr bool kMasked = decltype(masked)::value;
      const uint32_t tokens = stage + slab * Tile::kRowBytes;
      const uint32_t kept_bits = kMasked ? kept_keys.slab(begin + slab) : 0u;
      float x[kRowTiles][2][4];
      multiply_slab<Math, kHeadDim, kRowTiles>(x, rows, tokens + lane_b);
      float weight[kRowTiles][2][4];  // with decay, if the slope is not the weight
      maybe_decay.visit([&](auto&& decay) {
        constexpr bool kHasDecay = std::decay_t<decltype(decay)>::kHasDecay;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto keys = decay.at(begin + slab + half * 8 + t * 2);
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const Line& of_row = line[i][e / 2];
              float factor = of_row.at(x[i][half][e]);
              if constexpr (kHasDecay) {
                if constexpr (!Score::kSlopeIsWeight) {
                  weight[i][half][e] = fmaf(0.5f * x[i][half][e], factor + of_row.offset, at_zero[i][e / 2]);
                }
                // The first warp has the slope, the second the centred factor.
                if ((role == 0) == Score::kSlopeIsWeight) factor = Score::decay_line(factor, decay.factor(keys, e % 2, i, e / 2));
              }
              if (role == 0) factor = Score::slope(factor);
              if constexpr (kMasked) {
                const int column = half * 8 + t * 2 + e % 2;
                const bool visible = sees.query_sees(first_row + i * 16 + e / 2 * 8 + g, begin + slab + column);
                factor = visible && (kept_bits >> column & 1u) ? factor : 0.f;
              }
              x[i][half][e] = factor;
            }
          }
        }
      });
      const uint32_t slot = exchange + slab / 16 % Tile::kSlots * 2 * Tile::kExchangeBytes;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) hand_over(lane_slot(slot + role * Tile::kExchangeBytes, i, half), x[i][half]);
      }
      wait_for_pair(pair);
      maybe_decay.visit([&](auto&& decay) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float other[4];
            take_over(other, lane_slot(slot + (1 - role) * Tile::kExchangeBytes, i, half));
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              x[i][half][e] *= other[e];
              // Used by the first warp, which has the slope.
              if constexpr (std::decay_t<decltype(decay)>::kHasDecay) {
                const float flow = Score::kSlopeIsWeight ? x[i][half][e] : weight[i][half][e] * other[e];
                decay.add_flow({{0.f, x[i][half][e]}, flow}, i, e / 2, begin + slab + half * 8 + t * 2 + e % 2,
                                first_row + i * 16 + e / 2 * 8 + g);
              }
            }
          }
        }
        decay.finish_slab(scratch);
      });
      WeightsA<Math> derivatives[kRowTiles];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) weights_a_from_accumulator<Math>(derivatives[i], x[i][0], x[i][1]);
      accumulate_slab<Math, kHeadDim>(grad_q, derivatives, tokens + lane_b_trans);
    };
    const auto add_whole_tile = [&](auto&& decay) {
#pragma unroll(Tile::kUnroll)
      for (int slab = 0; slab < Tile::kStream; slab += 16) add_slab(slab, std::false_type{}, decay);
    };
    const auto add_masked_tile = [&](auto&& decay) {
#pragma unroll 1
      for (int slab = 0; slab < Tile::kStream; slab += 16) {
        bool sees_some = begin + slab < sees.keys_of(last_row).end;
        if constexpr (Visibility::kBoundsBothSides) sees_some = sees_some && begin + slab + 15 >= sees.keys_of(first_row).begin;
        if (sees_some) {
          add_slab(slab, std::true_type{}, decay);
        } else {
          wait_for_pair(pair);
        }
      }
    };
    const bool whole = kept == Kept::kAll && key_tiles<Tile::kStream>(sees, first_row, last_row).whole.contains(tile);
    add_key_tile<Score, Visibility>(p, state, scratch, whole, tile, first_row, add_whole_tile, add_masked_tile);
  }

  // Recomputed, so that the main loop does not hold it in registers.
  const HeadIndex out = head_index(p, static_cast<int>(ptx::keep_in_register(blockIdx.x)) / row_blocks);
  Element* dst = head_of<Element>(p.grad_q, p.grad_q_stride, out.batch, out.head) + first_col;
  store_rows(grad_q, dst, p.grad_q_stride.token, warp_row, p.n, p.d - first_col, StoreAsIs{});
  if constexpr (Visibility::kMayDecay) {
    if (role == 0) store_sums_by_query<Score>(p, pair_sums, scratch, out.batch, out.head, warp_row);
  }
}

}  // namespace fastmax
