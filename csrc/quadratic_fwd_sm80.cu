// Quadratic forward: o_i = sum_j f(s_ij) v_j / sum_j f(s_ij) over tiles of f(Q K^T), as FlashAttention-2 tiles softmax, but
// with no running maximum and no rescaling: a polynomial needs neither.
//
// A block owns kRows queries of one head; Q stays in registers, K and V pass through a double-buffered cp.async ring. Each
// warp works on slabs of 16 keys: scores in the accumulators, two FMAs each, rounded to the operand type in place, times V.

#include "dispatch.h"
#include "launch.h"
#include "score.h"
#include "tile_config.h"
#include "tile_ops.h"

namespace fastmax {
namespace {

using Score = PolynomialScore<2>;  // order 1 is a2 = 0

template <class Math, int kHeadDim>
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

  // Adds the 16 keys from key on, which are at k_slab and v_slab.
  template <bool kMasked>
  __device__ __forceinline__ void add_slab(const FwdParams& p, const Score& score, uint32_t k_slab, uint32_t v_slab, int key,
                                           int warp_row, int blocks_per_head) {
    float s[kRowTiles][2][4];
    multiply_slab<Math, kHeadDim, kRowTiles>(s, q, k_slab);

    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    WeightsA<Math> w[kRowTiles];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float weight = score.weight(s[i][half][e]);
          if constexpr (kMasked) {
            const int column = key + half * 8 + t * 2 + e % 2;
            bool visible = column <= last_visible_key(p, warp_row + i * 16 + e / 2 * 8 + g);
            visible = visible && keeps_key(p.key_padding_mask, p.mask_batch_stride, blockIdx.x / blocks_per_head / p.h, column, p.m);
            weight = visible ? weight : 0.f;
          }
          s[i][half][e] = weight;
          z[i][e / 2] += weight;
        }
      }
      a_from_accumulator<Math>(w[i], s[i][0], s[i][1]);
    }
    accumulate_slab<Math, kOutputCols>(o, w, v_slab);
  }

  // Adds one stage of keys, those from key_begin on. k_base and v_base: the stage's tiles plus this lane's offsets.
  template <bool kMasked>
  __device__ __forceinline__ void add_tile(const FwdParams& p, const Score& score, uint32_t k_base, uint32_t v_base, int key_begin,
                                           int warp_row, int blocks_per_head) {
    const int slabs = kMasked ? min(kSlabs, (last_visible_key(p, warp_row + kRowTiles * 16 - 1) - key_begin) / 16 + 1) : kSlabs;
#pragma unroll(kMasked ? 1 : Tile::kUnroll)
    for (int slab = 0; slab < slabs; ++slab) {
      add_slab<kMasked>(p, score, k_base + slab * kSlabBytes, v_base + slab * kSlabBytes / Tile::kColumnParts, key_begin + slab * 16,
                        warp_row, blocks_per_head);
    }
  }
};

template <class Math, int kHeadDim>
__global__ void __launch_bounds__(QuadraticFwdTile<Math, kHeadDim>::kThreads, QuadraticFwdTile<Math, kHeadDim>::kMinBlocks)
    quadratic_fwd_kernel(const FwdParams p, const int row_blocks) {
  using Tile = QuadraticFwdTile<Math, kHeadDim>;
  using Element = typename Math::Element;
  constexpr int kRowTiles = Tile::kRowTiles;
  extern __shared__ __align__(128) char shared[];
  const uint32_t ring = ptx::smem_address(shared);

  // Blocks of one head are neighbours (its keys stay in L2), the longest first, and the column parts of a row block next to
  // each other.
  const int blocks_per_head = row_blocks * Tile::kColumnParts;
  const int block_in_head = static_cast<int>(blockIdx.x) % blocks_per_head;
  const int block_row = (row_blocks - 1 - block_in_head / Tile::kColumnParts) * Tile::kRows;
  const int first_col = block_in_head % Tile::kColumnParts * Tile::kOutputCols;
  if (first_col >= p.dv) return;
  const HeadIndex in = head_index(p, blockIdx.x / blocks_per_head);
  const int warp_row = block_row + static_cast<int>(threadIdx.x) / kWarpSize * kRowTiles * 16;

  const Element* q = static_cast<const Element*>(p.q) + in.batch * p.q_stride.batch + in.head * p.q_stride.head;
  const Element* k = static_cast<const Element*>(p.k) + in.batch * p.k_stride.batch + in.kv_head * p.k_stride.head;
  const Element* v = static_cast<const Element*>(p.v) + in.batch * p.v_stride.batch + in.kv_head * p.v_stride.head;

  const int key_end = last_visible_key(p, min(block_row + Tile::kRows, p.n) - 1) + 1;
  const int tiles = (key_end + Tile::kStream - 1) / Tile::kStream;
  const TileLoader<Element, Tile::kStream, kHeadDim, Tile::kThreads> load_k(threadIdx.x);
  const TileLoader<Element, Tile::kStream, Tile::kOutputCols, Tile::kThreads> load_v(threadIdx.x);
  const auto load_stage = [&](int tile) {
    const uint32_t stage = ring + tile % Tile::kStages * Tile::kStageBytes;
    const int begin = tile * Tile::kStream;
    load_k.load(stage, k, p.k_stride.token, begin, p.m, p.d);
    load_v.load(stage + Tile::kTileBytes, v + first_col, p.v_stride.token, begin, p.m, p.dv - first_col);
    ptx::cp_async_commit();
  };
  load_stage(0);

  QuadraticFwd<Math, kHeadDim> state;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int kk = 0; kk < kHeadDim / 16; ++kk) {
      load_a_global<Math>(state.q[i][kk], q, p.q_stride.token, warp_row + i * 16, p.n, kk * 16, p.d);
    }
  }

  const Score score(p);
  const uint32_t k_lane = ptx::keep_in_register(lane_offset_b<Math, kHeadDim>());
  const uint32_t v_lane = ptx::keep_in_register(lane_offset_b_trans<Math, Tile::kOutputCols>()) + Tile::kTileBytes;
  const int unmasked_end = p.key_padding_mask == nullptr ? last_visible_key(p, warp_row) + 1 : 0;
  for (int tile = 0; tile < tiles; ++tile) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // the stage is complete for all threads, and all are done with the other one
    if (tile + 1 < tiles) load_stage(tile + 1);

    const uint32_t stage = ring + tile % Tile::kStages * Tile::kStageBytes;
    const int key_begin = tile * Tile::kStream;
    if (key_begin + Tile::kStream <= unmasked_end) {
      state.template add_tile<false>(p, score, stage + k_lane, stage + v_lane, key_begin, warp_row, blocks_per_head);
    } else {
      state.template add_tile<true>(p, score, stage + k_lane, stage + v_lane, key_begin, warp_row, blocks_per_head);
    }
  }

  // Computed again, so that the main loop need not keep it in registers.
  const HeadIndex out = head_index(p, static_cast<int>(ptx::keep_in_register(blockIdx.x)) / blocks_per_head);
  Element* o = static_cast<Element*>(p.o) + out.batch * p.o_stride.batch + out.head * p.o_stride.head + first_col;
  const Element* noise = p.noise == nullptr ? nullptr
                                            : static_cast<const Element*>(p.noise) + out.batch * p.noise_stride.batch +
                                                  out.head * p.noise_stride.head + first_col;
  float* z = p.z + (static_cast<int64_t>(out.batch) * p.h + out.head) * p.n;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) state.z[i][half] = quad_sum(state.z[i][half]);
  }
  store_rows(state.o, o, p.o_stride.token, warp_row, p.n, p.dv - first_col, [&](int i, int half, int row) {
    const float row_sum = state.z[i][half];
    if (threadIdx.x % 4 == 0 && first_col == 0) z[row] = row_sum;
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

struct LaunchQuadraticFwd {
  template <class Math, int kHeadDim>
  static void run(const FwdParams& p, cudaStream_t stream) {
    using Tile = QuadraticFwdTile<Math, kHeadDim>;
    const int row_blocks = (p.n + Tile::kRows - 1) / Tile::kRows;
    launch_kernel("quadratic_fwd_sm80", quadratic_fwd_kernel<Math, kHeadDim>,
                  grid_1d(int64_t{row_blocks} * Tile::kColumnParts * p.b * p.h), Tile::kThreads, Tile::kSharedBytes, stream, p,
                  row_blocks);
  }
};

}  // namespace

template <>
void quadratic_fwd<FASTMAX_MATH>(const FwdParams& p, cudaStream_t stream) {
  dispatch_head_dim<LaunchQuadraticFwd, FASTMAX_MATH>(p, p, stream);
}

}  // namespace fastmax
