// Backward kernels in which a warp computes both factors of a pair's derivative and holds both sums.
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

// An operand that a block owns: fragments in registers, or a tile in shared memory that is read again for each slab.
template <class Math, int kHeadDim, int kRowTiles, bool kInRegisters>
struct ResidentOperand;

template <class Math, int kHeadDim, int kRowTiles>
struct ResidentOperand<Math, kHeadDim, kRowTiles, true> {
  static constexpr int kUnroll = kHeadDim / 16;  // registers cannot be indexed at run time
  FragmentA<Math> fragment[kRowTiles][kHeadDim / 16];

  __device__ __forceinline__ ResidentOperand(const typename Math::Element* src, int64_t token_stride, int warp_row, int row_end,
                                             int cols, uint32_t, int) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int kk = 0; kk < kHeadDim / 16; ++kk) {
        load_a_mk_global<Math>(fragment[i][kk], src, token_stride, warp_row + i * 16, row_end, kk * 16, cols);
      }
    }
  }
  __device__ __forceinline__ void read(FragmentA<Math>& a, int i, int kk) const {
#pragma unroll
    for (int r = 0; r < FragmentSize<Math>::kA; ++r) a[r] = fragment[i][kk][r];
  }
};

template <class Math, int kHeadDim, int kRowTiles>
struct ResidentOperand<Math, kHeadDim, kRowTiles, false> {
  static constexpr int kUnroll = 2;
  uint32_t tile;
  int row;  // first row of this warp in the tile

  // The tile arrives with the first stage of the ring: this neither commits nor waits.
  __device__ __forceinline__ ResidentOperand(const typename Math::Element* src, int64_t token_stride, int warp_row, int row_end,
                                             int cols, uint32_t tile, int block_row)
      : tile(tile), row(warp_row - block_row) {
    using Tile = QuadraticBwdTile<Math, kHeadDim>;
    load_tile_async<typename Math::Element, Tile::kRows, kHeadDim, Tile::kThreads>(tile, src, token_stride, block_row, row_end, cols);
  }
  __device__ __forceinline__ void read(FragmentA<Math>& a, int i, int kk) const {
    load_a_mk<Math, kHeadDim>(a, tile, row + i * 16, kk * 16);
  }
};

// Multiplies 8 or 16 streamed tokens with the owned rows: x = first rows x tokens at base, dp = second rows x tokens at base +
// second_offset. The two products are interleaved, because a single chain of dependent tensor-core instructions would wait for
// itself. kHalves = 2: 16 tokens, base for load_b_nk_pair_at; kHalves = 1: 8 tokens, base for load_b_nk_octet_at.
template <class Math, int kHeadDim, int kRowTiles, int kHalves, class Operand>
__device__ __forceinline__ void multiply_tokens(float (&x)[kHalves][kRowTiles][4], float (&dp)[kHalves][kRowTiles][4],
                                                const Operand& first, const Operand& second, uint32_t base, int second_offset) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[half][i][e] = dp[half][i][e] = 0.f;
    }
  }
  // B fragments per step: two token halves of one k16 block, or consecutive k16 blocks of one half.
  constexpr int kBlocks = kHalves == 2 ? 1 : kOctetFragments<Math, kHeadDim>;
#pragma unroll(Operand::kUnroll)
  for (int kk = 0; kk < kHeadDim / 16; kk += kBlocks) {
    FragmentB<Math> b[kBlocks * kHalves], c[kBlocks * kHalves];
    if constexpr (kHalves == 2) {
      load_b_nk_pair_at<Math, kHeadDim>(b[0], b[1], base, kk * 16);
      load_b_nk_pair_at<Math, kHeadDim>(c[0], c[1], base + second_offset, kk * 16);
    } else {
      load_b_nk_octet_at<Math, kHeadDim>(b, base, kk * 16);
      load_b_nk_octet_at<Math, kHeadDim>(c, base + second_offset, kk * 16);
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        FragmentA<Math> a;
        first.read(a, i, kk + block);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) mma<Math>(x[half][i], a, b[block + half]);
        second.read(a, i, kk + block);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) mma<Math>(dp[half][i], a, c[block + half]);
      }
    }
  }
}

// grad_k and grad_v: a block owns kRows keys of one key/value head and streams the queries of its group's heads.
template <class Score, class Visibility, class Math, int kHeadDim>
__global__ void __launch_bounds__(QuadraticBwdKvTile<Math, kHeadDim>::kThreads, QuadraticBwdKvTile<Math, kHeadDim>::kMinBlocks)
    quadratic_bwd_kv_kernel(const BwdParams p, const float4* row_scores, const void* grad_o_base, const Stride grad_o_stride,
                            const PairSums pair_sums, const int row_blocks) {
  using Tile = QuadraticBwdKvTile<Math, kHeadDim>;
  using Element = typename Math::Element;
  using Operand = ResidentOperand<Math, kHeadDim, Tile::kRowTiles, Tile::kOperandsInRegisters>;
  constexpr int kRowTiles = Tile::kRowTiles, kHalves = Tile::kHalvesTogether;
  extern __shared__ __align__(128) char shared[];
  const uint32_t ring = ptx::smem_address(shared) + Tile::kResidentBytes;

  // The first keys are seen by most queries, so the longest blocks come first.
  const KvPosition in = kv_position<Tile::kRows>(p, blockIdx.x, row_blocks);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const int warp_row = in.block_row + warp * kRowTiles * 16;
  const Element* k = head_of<Element>(p.k, p.k_stride, in.batch, in.kv_head);
  const Element* v = head_of<Element>(p.v, p.v_stride, in.batch, in.kv_head);
  const Operand k_rows(k, p.k_stride.token, warp_row, p.m, p.d, ptx::smem_address(shared), in.block_row);
  const Operand v_rows(v, p.v_stride.token, warp_row, p.m, p.dv, ptx::smem_address(shared) + Tile::kResidentBytes / 2, in.block_row);

  float grad_k[kRowTiles][kHeadDim / 8][4] = {};
  float grad_v[kRowTiles][kHeadDim / 8][4] = {};
  const uint32_t lane_b =
      ptx::keep_in_register(ring + (kHalves == 2 ? lane_offset_b_nk<Math, kHeadDim>() : lane_offset_b_nk_octet<Math, kHeadDim>()));
  const uint32_t lane_b_trans = ptx::keep_in_register(ring + lane_offset_b_kn<Math, kHeadDim>());
  const int state = in.batch * p.hk + in.kv_head;
  const StreamLoader<Tile, Element, kHeadDim> loader(threadIdx.x);
  const QueryDecayScratch<Tile> scratch{ptx::smem_address(shared) + Tile::kSharedBytes};
  if (Visibility::kMayDecay && p.decay_sums != nullptr) scratch.clear_sums();

  // A block whose keys are all masked has nothing to sum.
  const KeptKeys<BwdParams> kept_keys(p, row_blocks * p.hk);
  const bool keeps_some = kept_keys.template tile<Tile::kRows>(in.block_row) != Kept::kNone;
  for (int head_in_group = keeps_some ? 0 : p.h / p.hk; head_in_group < p.h / p.hk; ++head_in_group) {
    // fp32: recomputed for each head, because the inner loop spills otherwise. 16 bits: held, measured 5% faster (H200).
    const KvPosition at = Tile::k16 ? in : kv_position<Tile::kRows>(p, ptx::keep_in_register(blockIdx.x), row_blocks);
    const QueryStream<Element> stream(p, row_scores, grad_o_base, grad_o_stride, at.batch, at.kv_head, head_in_group);
    const auto load_stage = [&](int tile) { stream.template load<Tile>(loader, ring, tile, p); };

    const Range tiles = query_tiles<Tile::kStream>(Visibility(p, state), at.block_row, at.block_row + Tile::kRows - 1).seen;
    __syncthreads();  // all threads have finished reading the stages of the previous head
    load_stage(tiles.begin);
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // the stage is complete for all threads, and all have finished reading the other one
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
        const uint32_t rows = stage + slab * Tile::kRowBytes + lane_b;  // of q; those of grad_o are kTileBytes further on
        const uint32_t rows_trans = stage + slab * Tile::kRowBytes + lane_b_trans;
        WeightsA<Math> weights[kRowTiles], derivatives[kRowTiles];
#pragma unroll
        for (int first_half = 0; first_half < 2; first_half += kHalves) {
          float x[kHalves][kRowTiles][4], dp[kHalves][kRowTiles][4];
          multiply_tokens<Math, kHeadDim, kRowTiles, kHalves>(x, dp, k_rows, v_rows, rows + first_half * 8 * Tile::kRowBytes,
                                                              Tile::kTileBytes);
          maybe_decay.visit([&](auto&& decay) {
#pragma unroll
            for (int j = 0; j < kHalves; ++j) {
              const int half = first_half + j, token = begin + slab + half * 8 + t * 2;
              const auto queries = decay.at(token);
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                const float4 row = decay.row(scores + (slab + half * 8 + e) * 16, token + e);
                const int query = token + e;
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
                  for (int r = 0; r < 2; ++r) {
                    const int key = warp_row + i * 16 + r * 8 + g;
                    auto pair = decay.pair(row, x[j][i][2 * r + e], dp[j][i][2 * r + e], queries, e, i, r);
                    if (kMasked && !sees.key_is_seen(key, query)) pair = {};
                    x[j][i][2 * r + e] = pair.p;
                    dp[j][i][2 * r + e] = pair.ds;
                    decay.add_flow(pair, i, r, key, query);
                  }
                }
              }
            }
            decay.finish_slab(scratch);
          });
#pragma unroll
          for (int j = 0; j < kHalves; ++j) {
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
              half_weights_a_from_accumulator<Math>(weights[i], first_half + j, x[j][i]);
              half_weights_a_from_accumulator<Math>(derivatives[i], first_half + j, dp[j][i]);
            }
          }
        }
        accumulate_slab<Math, kHeadDim>(grad_v, weights, rows_trans + Tile::kTileBytes);
        accumulate_slab<Math, kHeadDim>(grad_k, derivatives, rows_trans);
      };
      const auto add_whole_tile = [&](auto&& decay) {
#pragma unroll(Tile::kUnroll)
        for (int slab = 0; slab < Tile::kStream; slab += 16) add_slab(slab, std::false_type{}, decay);
      };
      const auto add_masked_tile = [&](auto&& decay) {
#pragma unroll 1
        for (int slab = 0; slab < Tile::kStream; slab += 16) {
          if constexpr (Visibility::kBoundsBothSides) {
            if (sees.queries_of(last_row).end <= begin + slab) break;
          }
          if (begin + slab + 15 >= sees.queries_of(first_row).begin) add_slab(slab, std::true_type{}, decay);
        }
      };
      const bool whole = query_tiles<Tile::kStream>(sees, first_row, last_row).whole.contains(tile);
      add_query_tile<Score, Visibility>(p, state, scratch, ring + stage + 2 * Tile::kTileBytes, whole, tile, first_row, add_whole_tile,
                                        add_masked_tile);
    }
  }

  // Recomputed, so that the main loop does not hold it in registers.
  const KvPosition out = kv_position<Tile::kRows>(p, ptx::keep_in_register(blockIdx.x), row_blocks);
  const PaddedKeysAreZero finish{p.attention_mask, p.mask_batch_stride, out.batch};
  Element* dst_k = head_of<Element>(p.grad_k, p.grad_k_stride, out.batch, out.kv_head);
  Element* dst_v = head_of<Element>(p.grad_v, p.grad_v_stride, out.batch, out.kv_head);
  store_rows(grad_k, dst_k, p.grad_k_stride.token, warp_row, p.m, p.d, finish);
  store_rows(grad_v, dst_v, p.grad_v_stride.token, warp_row, p.m, p.dv, finish);
  if constexpr (Visibility::kMayDecay) store_sums_by_key<Score>(p, pair_sums, scratch, out.batch, out.kv_head, warp_row);
}

// grad_q: a block owns kRows queries of one head and streams the keys that they see.
template <class Score, class Visibility, class Math, int kHeadDim>
__global__ void __launch_bounds__(QuadraticBwdQTile<Math, kHeadDim>::kThreads, QuadraticBwdQTile<Math, kHeadDim>::kMinBlocks)
    quadratic_bwd_q_kernel(const BwdParams p, const float4* row_scores, const void* grad_o_base, const Stride grad_o_stride,
                           const PairSums pair_sums, const int row_blocks) {
  using Tile = QuadraticBwdQTile<Math, kHeadDim>;
  using Element = typename Math::Element;
  using Operand = ResidentOperand<Math, kHeadDim, Tile::kRowTiles, Tile::kOperandsInRegisters>;
  constexpr int kRowTiles = Tile::kRowTiles, kHalves = Tile::kHalvesTogether;
  extern __shared__ __align__(128) char shared[];
  const uint32_t ring = ptx::smem_address(shared) + Tile::kResidentBytes;

  const int block_row = (row_blocks - 1 - static_cast<int>(blockIdx.x) % row_blocks) * Tile::kRows;
  const HeadIndex in = head_index(p, blockIdx.x / row_blocks);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const int warp_row = block_row + warp * kRowTiles * 16;

  const Element* q = head_of<Element>(p.q, p.q_stride, in.batch, in.head);
  const Element* k = head_of<Element>(p.k, p.k_stride, in.batch, in.kv_head);
  const Element* v = head_of<Element>(p.v, p.v_stride, in.batch, in.kv_head);
  const Element* grad_o = head_of<Element>(grad_o_base, grad_o_stride, in.batch, in.head);

  const Operand q_rows(q, p.q_stride.token, warp_row, p.n, p.d, ptx::smem_address(shared), block_row);
  const Operand grad_o_rows(grad_o, grad_o_stride.token, warp_row, p.n, p.dv, ptx::smem_address(shared) + Tile::kResidentBytes / 2,
                            block_row);

  const int state = in.batch * p.hk + in.kv_head;
  const KeyDecayScratch<Tile> scratch{ptx::smem_address(shared) + Tile::kSharedBytes};
  if (Visibility::kMayDecay && p.decay_sums != nullptr) scratch.clear_sums();
  const KeptKeys<BwdParams> kept_keys(p, row_blocks * p.h);
  const Range keys = keys_seen(Visibility(p, state), block_row, min(block_row + Tile::kRows, p.n) - 1);
  const Range tiles = tiles_with<Tile::kStream>(kept_keys.trim<Tile::kThreads>(keys, reinterpret_cast<int*>(shared + Tile::kResidentBytes)));
  const StreamLoader<Tile, Element, kHeadDim> loader(threadIdx.x);
  const auto load_stage = [&](int tile) { load_key_stage<Tile>(loader, ring, tile, p, k, v); };
  load_stage(tiles.begin);

  float4 row[kRowTiles][2];
  const auto load_rows = [&](const auto& decay_row) {
    const int64_t head = static_cast<int>(ptx::keep_in_register(blockIdx.x)) / row_blocks;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = min(warp_row + i * 16 + half * 8 + g, p.n - 1);
        row[i][half] = decay_row(row_scores[head * p.n + query], query);
      }
    }
  };
  load_query_rows<Score, Visibility, Tile::kStream>(p, state, tiles.begin, warp_row, load_rows);
  float grad_q[kRowTiles][kHeadDim / 8][4] = {};
  const uint32_t lane_b =
      ptx::keep_in_register(ring + (kHalves == 2 ? lane_offset_b_nk<Math, kHeadDim>() : lane_offset_b_nk_octet<Math, kHeadDim>()));
  const uint32_t lane_b_trans = ptx::keep_in_register(ring + lane_offset_b_kn<Math, kHeadDim>());

  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // the stage is complete for all threads, and all have finished reading the other one
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
      const uint32_t rows = stage + slab * Tile::kRowBytes + lane_b;  // of k; those of v are kTileBytes further on
      const uint32_t kept_bits = kMasked ? kept_keys.slab(begin + slab) : 0u;
      WeightsA<Math> derivatives[kRowTiles];
#pragma unroll
      for (int first_half = 0; first_half < 2; first_half += kHalves) {
        float x[kHalves][kRowTiles][4], dp[kHalves][kRowTiles][4];
        multiply_tokens<Math, kHeadDim, kRowTiles, kHalves>(x, dp, q_rows, grad_o_rows, rows + first_half * 8 * Tile::kRowBytes,
                                                            Tile::kTileBytes);
        maybe_decay.visit([&](auto&& decay) {
#pragma unroll
          for (int j = 0; j < kHalves; ++j) {
            const auto keys = decay.at(begin + slab + (first_half + j) * 8 + t * 2);
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                auto pair = decay.pair(row[i][e / 2], x[j][i][e], dp[j][i][e], keys, e % 2, i, e / 2);
                const int column = (first_half + j) * 8 + t * 2 + e % 2;
                const int query = first_row + i * 16 + e / 2 * 8 + g, key = begin + slab + column;
                if (kMasked && !(sees.query_sees(query, key) && (kept_bits >> column & 1u))) pair = {};
                dp[j][i][e] = pair.ds;
                decay.add_flow(pair, i, e / 2, key, query);
              }
            }
          }
          decay.finish_slab(scratch);
        });
#pragma unroll
        for (int j = 0; j < kHalves; ++j) {
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) half_weights_a_from_accumulator<Math>(derivatives[i], first_half + j, dp[j][i]);
        }
      }
      accumulate_slab<Math, kHeadDim>(grad_q, derivatives, stage + slab * Tile::kRowBytes + lane_b_trans);
    };
    const auto add_whole_tile = [&](auto&& decay) {
#pragma unroll(Tile::kUnroll)
      for (int slab = 0; slab < Tile::kStream; slab += 16) add_slab(slab, std::false_type{}, decay);
    };
    const auto add_masked_tile = [&](auto&& decay) {
#pragma unroll 1
      for (int slab = 0; slab < Tile::kStream && begin + slab < sees.keys_of(last_row).end; slab += 16) {
        if constexpr (Visibility::kBoundsBothSides) {
          if (sees.keys_of(first_row).begin >= begin + slab + 16) continue;
        }
        add_slab(slab, std::true_type{}, decay);
      }
    };
    const bool whole = kept == Kept::kAll && key_tiles<Tile::kStream>(sees, first_row, last_row).whole.contains(tile);
    add_key_tile<Score, Visibility>(p, state, scratch, whole, tile, first_row, add_whole_tile, add_masked_tile);
  }

  // Recomputed, so that the main loop does not hold it in registers.
  const HeadIndex out = head_index(p, static_cast<int>(ptx::keep_in_register(blockIdx.x)) / row_blocks);
  Element* dst = head_of<Element>(p.grad_q, p.grad_q_stride, out.batch, out.head);
  store_rows(grad_q, dst, p.grad_q_stride.token, warp_row, p.n, p.d, StoreAsIs{});
  if constexpr (Visibility::kMayDecay) store_sums_by_query<Score>(p, pair_sums, scratch, out.batch, out.head, warp_row);
}

}  // namespace fastmax
