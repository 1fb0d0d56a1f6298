// Forward over tiles of scores: o_i = sum_j w_ij v_j / sum_j w_ij. It uses FlashAttention-2's tiling (Dao 2023) for two score
// policies (score.h): w = f(s) of Fastmax, which needs no running maximum and no rescaling, and w = exp(s) of softmax, which
// needs both.
//
// A block owns kRows queries of one head. Q stays in registers; K and V pass through a double-buffered cp.async ring. Each warp
// processes slabs of 16 keys: scores in accumulators, weights rounded to the operand type in place, then the product with V.
//
// With decay (decay.h), sums over separable tiles are relative to the reference token. They are multiplied by each row's own
// factor before the row's first pairwise tile.
#pragma once

#include <type_traits>

#include "core/dispatch.h"
#include "core/launch.h"
#include "core/fragments.h"
#include "core/heads.h"
#include "core/score.h"
#include "core/visibility.h"
#include "quadratic/portable/decay.h"
#include "quadratic/portable/kernels.h"
#include "quadratic/portable/tile_config.h"

namespace fastmax {

template <class Score, class Visibility, class Math, int kHeadDim>
struct QuadraticFwd {
  using Tile = QuadraticFwdTile<Math, kHeadDim>;
  static constexpr int kRowTiles = Tile::kRowTiles;
  static constexpr int kDepth = kHeadDim / 16;  // k16 steps over the head dim
  static constexpr int kSlabs = Tile::kStream / 16;
  static constexpr int kOutputCols = Tile::kOutputCols;
  static constexpr int kSlabBytes = 16 * Tile::kRowBytes;

  FragmentA<Math> q[kRowTiles][kDepth];
  float o[kRowTiles][kOutputCols / 8][4] = {};
  float z[kRowTiles][2] = {};  // this lane's part of the row sums
  float reference[Score::kFollowsRowMax ? kRowTiles : 1][2];  // softmax: weights of a row are relative to 2^reference

  // If scores exceed the reference of a row by too much, makes the row's maximum the reference and rescales its sums. This is
  // rare, so the lanes first vote, each on its own scores.
  __device__ __forceinline__ void raise_references(const Score& score, const float (&s)[kRowTiles][2][4]) {
    float largest[kRowTiles][2];
    bool exceeds = false;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int e = 2 * half;
        largest[i][half] = score.c * fmaxf(fmaxf(s[i][0][e], s[i][0][e + 1]), fmaxf(s[i][1][e], s[i][1][e + 1]));
        exceeds = exceeds || largest[i][half] > reference[i][half] + Score::kSlack;
      }
    }
    if (!__any_sync(0xffffffffu, exceeds)) return;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float raised = fmaxf(reference[i][half], quad_max(largest[i][half]));
        const float shrink = ptx::exp2_approx(reference[i][half] - raised);
        reference[i][half] = raised;
        z[i][half] *= shrink;
#pragma unroll
        for (int c = 0; c < kOutputCols / 8; ++c) o[i][c][2 * half] *= shrink, o[i][c][2 * half + 1] *= shrink;
      }
    }
  }

  // Called after the last separable tile. Rescales the sums from the reference token, the first row's, to each row's own token.
  __device__ __forceinline__ void decay_on(const DecaySums& sums, int warp_row) {
    const int g = threadIdx.x % kWarpSize / 4;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor =
            Score::query_factor(decay(sums.of_query(warp_row + i * 16 + half * 8 + g), sums.of_query(warp_row)));
        if constexpr (Score::kFollowsRowMax) {
          reference[i][half] += factor;
        } else {
          z[i][half] *= factor;
#pragma unroll
          for (int c = 0; c < kOutputCols / 8; ++c) o[i][c][2 * half] *= factor, o[i][c][2 * half + 1] *= factor;
        }
      }
    }
  }

  // Adds the 16 keys from `key` on, whose rows are at k_slab and v_slab. kept: one bit per key, set if it is unmasked.
  template <bool kMasked, class MaybeDecay>
  __device__ __forceinline__ void add_slab(const Visibility& sees, const Score& score, uint32_t k_slab, uint32_t v_slab, int key,
                                           int warp_row, uint32_t kept, MaybeDecay& maybe_decay) {
    float s[kRowTiles][2][4];
    multiply_slab<Math, kHeadDim, kRowTiles>(s, q, k_slab);

    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    Score made_of_s = score;
    const auto apply_decay = [&](auto&& decay) {
      if constexpr (std::decay_t<decltype(decay)>::kHasDecay) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto keys = decay.at(key + half * 8 + t * 2);
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[i][half][e] = score.apply_decay(s[i][half][e], decay.factor(keys, e % 2, i, e / 2));
          }
        }
        made_of_s = score.of_decayed();
      }
    };
    const auto visible = [&](int i, int half, int e) {
      const int column = half * 8 + t * 2 + e % 2;
      return sees.query_sees(warp_row + i * 16 + e / 2 * 8 + g, key + column) && (kept >> column & 1u);
    };
    if constexpr (Score::kFollowsRowMax) {
      maybe_decay.visit(apply_decay);
      if constexpr (kMasked) {  // invisible keys must not raise a reference
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s[i][half][e] = visible(i, half, e) ? s[i][half][e] : -INFINITY;
          }
        }
      }
      raise_references(made_of_s, s);
    }

    if constexpr (!Score::kFollowsRowMax) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][half][e] = score.weight(s[i][half][e]);
        }
      }
      maybe_decay.visit(apply_decay);
    }

    WeightsA<Math> w[kRowTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (Score::kFollowsRowMax) {
            s[i][half][e] = made_of_s.weight(s[i][half][e], reference[i][e / 2]);
          } else {
            if (kMasked && !visible(i, half, e)) s[i][half][e] = 0.f;
          }
          z[i][e / 2] += s[i][half][e];
        }
      }
      weights_a_from_accumulator<Math>(w[i], s[i][0], s[i][1]);
    }
    accumulate_slab<Math, kOutputCols>(o, w, v_slab);
  }

  // Adds one stage of keys, from key_begin on. k_base and v_base: addresses of the stage's tiles plus this lane's offsets.
  template <bool kMasked, class Decay>
  __device__ __forceinline__ void add_tile(const Visibility& sees, const Score& score, uint32_t k_base, uint32_t v_base,
                                           int key_begin, int warp_row, const KeptKeys<FwdParams>& kept_keys, Decay& decay) {
    const int key_end = sees.keys_of(warp_row + kRowTiles * 16 - 1).end;
    const int slabs = kMasked ? min(kSlabs, (key_end - key_begin + 15) / 16) : kSlabs;
    int first = 0;
    if constexpr (kMasked && Visibility::kBoundsBothSides) first = max(0, (sees.keys_of(warp_row).begin - key_begin) / 16);
#pragma unroll(kMasked ? 1 : Tile::kUnroll)
    for (int slab = first; slab < slabs; ++slab) {
      add_slab<kMasked>(sees, score, k_base + slab * kSlabBytes, v_base + slab * kSlabBytes / Tile::kColumnParts, key_begin + slab * 16,
                        warp_row, kMasked ? kept_keys.slab(key_begin + slab * 16) : 0u, decay);
    }
  }
};

template <class Score, class Visibility, class Math, int kHeadDim>
__global__ void __launch_bounds__(QuadraticFwdTile<Math, kHeadDim>::kThreads, QuadraticFwdTile<Math, kHeadDim>::kMinBlocks)
    quadratic_fwd_kernel(const FwdParams p, const int row_blocks) {
  using Tile = QuadraticFwdTile<Math, kHeadDim>;
  using Element = typename Math::Element;
  constexpr int kRowTiles = Tile::kRowTiles;
  extern __shared__ __align__(128) char shared[];
  const uint32_t ring = ptx::smem_address(shared);

  // Blocks of one head are neighbours, so that its keys stay in L2. The longest blocks come first, and the column parts of a
  // row block are next to each other.
  const int blocks_per_head = row_blocks * Tile::kColumnParts;
  const int block_in_head = static_cast<int>(blockIdx.x) % blocks_per_head;
  const int block_row = (row_blocks - 1 - block_in_head / Tile::kColumnParts) * Tile::kRows;
  const int first_col = block_in_head % Tile::kColumnParts * Tile::kOutputCols;
  if (first_col >= p.dv) return;
  const HeadIndex in = head_index(p, blockIdx.x / blocks_per_head);
  const int warp_row = block_row + static_cast<int>(threadIdx.x) / kWarpSize * kRowTiles * 16;

  const Element* q = head_of<Element>(p.q, p.q_stride, in.batch, in.head);
  const Element* k = head_of<Element>(p.k, p.k_stride, in.batch, in.kv_head);
  const Element* v = head_of<Element>(p.v, p.v_stride, in.batch, in.kv_head);

  const int kv_state = in.batch * p.hk + in.kv_head;
  const KeptKeys<FwdParams> kept_keys(p, blocks_per_head * p.h);
  const Range keys = keys_seen(Visibility(p, kv_state), block_row, min(block_row + Tile::kRows, p.n) - 1);
  const Range tiles = tiles_with<Tile::kStream>(kept_keys.trim<Tile::kThreads>(keys, reinterpret_cast<int*>(shared)));
  const TileLoader<Element, Tile::kStream, kHeadDim, Tile::kThreads> load_k(threadIdx.x);
  const TileLoader<Element, Tile::kStream, Tile::kOutputCols, Tile::kThreads> load_v(threadIdx.x);
  const auto load_stage = [&](int tile) {
    const uint32_t stage = ring + tile % Tile::kStages * Tile::kStageBytes;
    const int begin = tile * Tile::kStream;
    load_k.load(stage, k, p.k_stride.token, begin, p.m, p.d);
    load_v.load(stage + Tile::kTileBytes, v + first_col, p.v_stride.token, begin, p.m, p.dv - first_col);
    ptx::cp_async_commit();
  };
  load_stage(tiles.begin);

  QuadraticFwd<Score, Visibility, Math, kHeadDim> state;
  if constexpr (Score::kFollowsRowMax) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) state.reference[i][0] = state.reference[i][1] = Score::kNoReference;
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int kk = 0; kk < kHeadDim / 16; ++kk) {
      load_a_mk_global<Math>(state.q[i][kk], q, p.q_stride.token, warp_row + i * 16, p.n, kk * 16, p.d);
    }
  }

  const Score score(p);
  const DecayScratch<Tile, float, false> scratch{ring + Tile::kSharedBytes};
  const uint32_t k_lane = ptx::keep_in_register(lane_offset_b_nk<Math, kHeadDim>());
  const uint32_t v_lane = ptx::keep_in_register(lane_offset_b_kn<Math, Tile::kOutputCols>()) + Tile::kTileBytes;
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // the stage is complete for all threads, and all have finished reading the other one
    if (tile + 1 < tiles.end) load_stage(tile + 1);

    const uint32_t stage = ring + tile % Tile::kStages * Tile::kStageBytes;
    const int key_begin = tile * Tile::kStream;
    const Kept kept = kept_keys.tile<Tile::kStream>(key_begin);
    const int row = static_cast<int>(ptx::keep_in_register(warp_row));  // recomputes bounds, to save registers
    const Visibility sees = visibility_of<Visibility>(p, kv_state);
    const auto add_whole_tile = [&](auto&& decay) {
      state.template add_tile<false>(sees, score, stage + k_lane, stage + v_lane, key_begin, row, kept_keys, decay);
    };
    const auto add_masked_tile = [&](auto&& decay) {
      state.template add_tile<true>(sees, score, stage + k_lane, stage + v_lane, key_begin, row, kept_keys, decay);
    };
    const bool whole =
        kept == Kept::kAll && key_tiles<Tile::kStream>(sees, row, row + kRowTiles * 16 - 1).whole.contains(tile);
    if (kept != Kept::kNone) add_key_tile<Score, Visibility>(p, kv_state, scratch, whole, tile, row, add_whole_tile, add_masked_tile);
    if constexpr (Visibility::kMayDecay) {
      const DecaySums sums(p, sees.state);
      if (sums.has_decay() && tile + 1 == min(sums.template first_pairwise_tile<Tile::kStream>(row), tiles.end)) state.decay_on(sums, row);
    }
  }

  // Recomputed, so that the main loop does not hold it in registers.
  const HeadIndex out = head_index(p, static_cast<int>(ptx::keep_in_register(blockIdx.x)) / blocks_per_head);
  Element* o = head_of<Element>(p.o, p.o_stride, out.batch, out.head) + first_col;
  const Element* noise = p.noise == nullptr ? nullptr : head_of<Element>(p.noise, p.noise_stride, out.batch, out.head) + first_col;
  float* z = p.z + (static_cast<int64_t>(out.batch) * p.h + out.head) * p.n;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.z[i][half] = quad_sum(state.z[i][half]);
      if constexpr (Visibility::kMayDecay) {
        if (p.decay_sums != nullptr && fabsf(state.z[i][half]) < Score::kSmallestSum) state.z[i][half] = 0.f;
      }
    }
  }
  store_rows(state.o, o, p.o_stride.token, warp_row, p.n, p.dv - first_col, [&](int i, int half, int row) {
    const float row_sum = state.z[i][half];
    if (threadIdx.x % 4 == 0 && first_col == 0) {
      if constexpr (Score::kFollowsRowMax) {
        z[row] = score.log_sum(row_sum, state.reference[i][half]);
      } else {
        z[row] = row_sum;
      }
    }
    const float inverse = row_sum == 0.f ? 0.f : 1.f / row_sum;
    return [&, row, inverse](int col, float2 x) {
      x.x *= inverse, x.y *= inverse;
      if (noise != nullptr) {
        const float2 r = load_pair(noise + row * p.noise_stride.token + col);
        x.x *= fmaf(p.dropout, r.x, 1.f);
        x.y *= fmaf(p.dropout, r.y, 1.f);
      }
      return x;
    };
  });
}

template <class Score, class Visibility>
struct LaunchQuadraticFwd {
  template <class Math, int kHeadDim>
  static void run(const FwdParams& p, cudaStream_t stream) {
    using Tile = QuadraticFwdTile<Math, kHeadDim>;
    const int row_blocks = (p.n + Tile::kRows - 1) / Tile::kRows;
    launch_kernel("quadratic_fwd", quadratic_fwd_kernel<Score, Visibility, Math, kHeadDim>,
                  grid_1d(int64_t{row_blocks} * Tile::kColumnParts * p.b * p.h), Tile::kThreads,
                  Tile::kSharedBytes + (Visibility::kMayDecay ? DecayScratch<Tile, float, false>::bytes(p) : 0), stream, p, row_blocks);
  }
};

}  // namespace fastmax
