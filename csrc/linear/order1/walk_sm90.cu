// Order 1 on Hopper: the walks of walk_sm80.cu and pair_walk_sm80.cu, by wgmma and TMA.
//
// A segment of x is shared by a group of `a.group` blocks. Each adds up the state of all of the segment's rows, in tiles of 64, and gives
// the result of every a.group-th tile: no sum is made by reading rows once more, and what the blocks of a group read at about the same
// time comes from the L2 cache. In a block, roles of warps are tied by rings alone:
//
//   warp 0           fills a ring with tiles of y and w, and another one with the block's own tiles of x
//   warps 1, 2       sums of y and of w, as vectors
//   warpgroup 1      the state, in its accumulators; before an own tile, rounded into shared memory
//   warpgroups 2, 3  results of own tiles, from the state and the vectors before them and the tile's own scores: one tile each, in turn,
//                    or, where a walk has two gradients, one gradient each
#include <type_traits>

#include "core/launch.h"
#include "core/sm90/pipeline.h"
#include "core/sm90/wgmma.h"
#include "linear/order1/linear1_sm90.h"
#include "linear/order1/tile.h"
#include "linear/order2/hopper_walk.h"

namespace fastmax {
namespace {

enum class Walk { kForward, kGradQ, kPair };

template <int kHeadDim, Walk kWalk>
struct WalkTileSm90 {
  using RowTile = RowTileSm90<kHeadDim>;
  using StateTile = SwizzledTile<kHeadDim, kHeadDim>;  // [column of y][column of w]
  static constexpr bool kPair = kWalk == Walk::kPair;
  static constexpr int kThreads = 512;
  static constexpr int kStages = kHeadDim == 64 ? 8 : kPair ? 3 : 4;
  static constexpr int kXStages = kHeadDim == 64 ? 4 : kPair ? 2 : 3;
  static constexpr int kStates = kHeadDim == 64 ? 2 : 1;
  static constexpr int kVectors = 2;
  static constexpr int kResultWarps = kPair ? 8 : 4;  // that read a tile
  // At head dim 128 warpgroups have as many registers as their accumulators ask for.
  static constexpr int kProducerRegisters = 72, kStateRegisters = 168, kResultRegisters = 136;
  static_assert(kProducerRegisters + kStateRegisters + 2 * kResultRegisters <= 4 * ptx::registers_at_launch(kThreads));

  static constexpr int kTileBytes = RowTile::kBytes, kStageBytes = 2 * kTileBytes;  // y, w
  static constexpr int kXBytes = (kPair ? 2 : 1) * kTileBytes;                      // x, x2
  static constexpr int kVectorBytes = 2 * kHeadDim * 4;  // sum w; sum e y, or of the forward sum y as operands: rounded, and what was left

  // Shared memory, from a multiple of 1024 bytes on.
  static constexpr int kX = kStages * kStageBytes;
  static constexpr int kState = kX + kXStages * kXBytes;
  static constexpr int kVector = kState + kStates * StateTile::kBytes;
  static constexpr int kScales = kVector + kVectors * kVectorBytes;  // e of the rows of each stage
  static constexpr int kBarriers = kScales + (kPair ? kStages * kScaleBytes : 0);
  static constexpr int kXBarriers = kBarriers + Ring<kStages>::kBarrierBytes;
  static constexpr int kStateBarriers = kXBarriers + Ring<kXStages>::kBarrierBytes;
  static constexpr int kVectorBarriers = kStateBarriers + Ring<kStates>::kBarrierBytes;
  static constexpr int kSharedBytes = kSwizzledTileAlignment + kVectorBarriers + Ring<kVectors>::kBarrierBytes;
  static_assert(kSharedBytes <= shared_limit(90), "rings, states and barriers do not fit");
};

// Where a number of a state is in what the sums write (tile.h), that of an even column and the next.
template <int kHeadDim>
__device__ __forceinline__ float2 load_prefix(const float* state, int row, int column) {
  using Tile = Linear1Tile<Bf16, kHeadDim>;
  constexpr int kRows = 16 * Tile::kStateM;  // of a pair of warps
  const int warp = row / kRows * 2 + column / 16 % 2, lane = row % 8 * 4 + column % 8 / 2;
  const int block = row % kRows / 16 * Tile::kStateN + column / 32 * 2 + column / 8 % 2;
  const float* numbers = state + ((block * Tile::kWarps + warp) * kWarpSize + lane) * 4 + row % 16 / 8 * 2;
  return *reinterpret_cast<const float2*>(numbers);
}

// Columns of a tile added up over its rows, times weights: of column 16 m + lane / 4, and + 8, in elements 0 and 2 of lanes 0 of quads.
template <int kHeadDim>
struct ColumnSumsSm90 {
  using RowTile = RowTileSm90<kHeadDim>;
  float sums[kHeadDim / 16][4];

  __device__ __forceinline__ explicit ColumnSumsSm90(const float* before) {
#pragma unroll
    for (int m = 0; m < kHeadDim / 16; ++m) {
      const bool has = before != nullptr && lane_index() % 4 == 0;
      sums[m][0] = has ? before[16 * m + lane_index() / 4] : 0.f, sums[m][2] = has ? before[16 * m + 8 + lane_index() / 4] : 0.f;
      sums[m][1] = sums[m][3] = 0.f;
    }
  }
  __device__ __forceinline__ void add(uint32_t tile, const float* weights) {
    const int lane = lane_index();
    const int row = lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < kTileRows / 16; ++k) {
      uint32_t b[2];
      if (weights != nullptr) weights_column<Bf16>(b, weights + 16 * k);
      else b[0] = b[1] = lane < 4 ? 0x3f803f80u : 0u;
#pragma unroll
      for (int m = 0; m < kHeadDim / 16; ++m) {
        uint32_t a[4];
        ptx::ldmatrix_x4_trans(a, tile + RowTile::chunk_offset(16 * k + row, 2 * m + lane / 8 % 2));
        ptx::mma_bf16(sums[m], a, b[0], b[1]);
      }
    }
  }
  // f(column, its sum), in one lane of four.
  template <class F>
  __device__ __forceinline__ void for_each(F&& f) const {
    if (lane_index() % 4 != 0) return;
#pragma unroll
    for (int m = 0; m < kHeadDim / 16; ++m) {
      f(16 * m + lane_index() / 4, sums[m][0] + sums[m][1]);
      f(16 * m + 8 + lane_index() / 4, sums[m][2] + sums[m][3]);
    }
  }
};

template <int kHeadDim, Walk kWalk, class Args>
__global__ void __launch_bounds__(WalkTileSm90<kHeadDim, kWalk>::kThreads, 1)
    linear1_walk_sm90_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap x2_map,
                             const __grid_constant__ CUtensorMap y_map, const __grid_constant__ CUtensorMap w_map, const Args a) {
  using Tile = WalkTileSm90<kHeadDim, kWalk>;
  using RowTile = typename Tile::RowTile;
  using StateTile = typename Tile::StateTile;
  using Products = Wgmma<Bf16, kHeadDim>;
  constexpr bool kPair = Tile::kPair, kNormalises = kWalk == Walk::kForward;
  constexpr int kStages = Tile::kStages, kXStages = Tile::kXStages, kStates = Tile::kStates, kVectors = Tile::kVectors;
  constexpr int kTileBytes = Tile::kTileBytes, kDepth = kHeadDim / 16;
  extern __shared__ char shared[];
  const uint32_t stages_at = first_tile(shared);
  const char* shared_tiles = shared + (stages_at - ptx::smem_address(shared));
  const Ring<kStages> ring(stages_at + Tile::kBarriers);
  const Ring<kXStages> x_ring(stages_at + Tile::kXBarriers);
  const Ring<kStates> states(stages_at + Tile::kStateBarriers);
  const Ring<kVectors> vectors(stages_at + Tile::kVectorBarriers);
  const int warp = warp_index(), lane = lane_index(), warpgroup = warp / 4, w4 = warp % 4;

  const int group = a.group, rank = blockIdx.x % group, x_heads = a.state_heads * a.x_group, heads = a.batch * x_heads;
  const int head_index = blockIdx.x / group % heads, segment = blockIdx.x / group / heads;
  const int batch = head_index / x_heads, x_head = head_index % x_heads, kv_head = x_head / a.x_group;
  const int first_row = segment * a.segment;
  const int tiles = (min(a.segment, a.nx - first_row) + kTileRows - 1) / kTileRows;
  const int own = tiles > rank ? (tiles - 1 - rank) / group + 1 : 0;  // tile `rank` and every group-th behind it
  const int count = own > 0 ? rank + (own - 1) * group + 1 : 0;        // tiles up to the last own one
  const int part = a.part_before(segment);
  const float* before =
      part < 0 ? nullptr : a.prefixes + (int64_t{batch * a.state_heads + kv_head} * a.parts + part) * linear1_state_floats(kHeadDim);

  if (threadIdx.x == 0) {
    ring.init(4 + 2 + Tile::kResultWarps);
    x_ring.init(Tile::kResultWarps);
    states.init(Tile::kResultWarps, 4);
    vectors.init(Tile::kResultWarps, 2);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    if constexpr (kHeadDim == 128) ptx::fewer_registers<Tile::kProducerRegisters>();
    if (warp == 0 && lane == 0) {
      for (int j = 0; j < count; ++j) {
        const int row = first_row + j * kTileRows;
        const bool is_own = j % group == rank;
        if (is_own) {
          const RingPosition at = RingPosition::of<kXStages>(j / group);
          const uint32_t x = stages_at + Tile::kX + at.stage * Tile::kXBytes;
          const int token = tile_token(a, a.nx, row);
          x_ring.wait_until_empty(at);
          x_ring.expect(at, Tile::kXBytes);
          RowTile::load(x, x_map, x_ring.full(at), token, x_head, batch);
          if constexpr (kPair) RowTile::load(x + kTileBytes, x2_map, x_ring.full(at), token, x_head, batch);
        }
        const RingPosition at = RingPosition::of<kStages>(j);
        const uint32_t y = stages_at + at.stage * Tile::kStageBytes;
        const int token = tile_token(a, a.ny, a.y_row(a.boundary + row));
        ring.wait_until_empty(at);
        ring.expect(at, Tile::kStageBytes + (kPair ? kScaleBytes : 0));
        RowTile::load(y, y_map, ring.full(at), token, kv_head, batch);
        RowTile::load(y + kTileBytes, w_map, ring.full(at), token, kv_head, batch);
        if constexpr (kPair) {
          ptx::bulk_load(stages_at + Tile::kScales + at.stage * kScaleBytes, tile_scales(a.y_scale, a.ny, head_index, token), kScaleBytes,
                         ring.full(at));
        }
        if (!is_own) ptx::mbarrier_arrive_many(ring.empty(at), Tile::kResultWarps);
      }
    } else if (warp == 1 || warp == 2) {
      const bool of_y = warp == 1;
      ColumnSumsSm90<kHeadDim> sums(before == nullptr ? nullptr : before + kHeadDim * kHeadDim + (of_y ? kHeadDim : 0));
      for (int j = 0; j < count; ++j) {
        if (j % group == rank) {
          const RingPosition at = RingPosition::of<kVectors>(j / group);
          const uint32_t vector = stages_at + Tile::kVector + at.stage * Tile::kVectorBytes;
          vectors.wait_until_empty(at);
          if (!of_y) {
            sums.for_each([&](int column, float sum) { ptx::store_shared_f32(vector + 4 * column, sum); });
          } else if constexpr (kPair) {
            sums.for_each([&](int column, float sum) { ptx::store_shared_f32(vector + 4 * (kHeadDim + column), sum); });
          } else if constexpr (kNormalises) {
            auto* rounded = reinterpret_cast<__nv_bfloat16*>(const_cast<char*>(shared_tiles) + (vector - stages_at)) + 2 * kHeadDim;
            sums.for_each([&](int column, float sum) {
              const __nv_bfloat16 high = __float2bfloat16_rn(sum);
              rounded[column] = high, rounded[kHeadDim + column] = __float2bfloat16_rn(sum - __bfloat162float(high));
            });
          }
          vectors.publish(at, lane);
        }
        const RingPosition at = RingPosition::of<kStages>(j);
        ring.wait_until_full(at);
        if (!of_y || kWalk != Walk::kGradQ) {
          const float* scales = kPair && of_y ? reinterpret_cast<const float*>(shared_tiles + Tile::kScales + at.stage * kScaleBytes) : nullptr;
          sums.add(stages_at + at.stage * Tile::kStageBytes + (of_y ? 0 : kTileBytes), scales);
        }
        ring.release(at, lane);
      }
    }
  } else if (warpgroup == 1) {
    if constexpr (kHeadDim == 128) ptx::more_registers<Tile::kStateRegisters>();
    constexpr int kBlocks = kHeadDim / kTileRows;  // of 64 columns of y
    float acc[kBlocks][kHeadDim / 2];
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; i += 2) {
        const int row = 64 * m + 16 * w4 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2;
        const float2 v = before == nullptr ? float2{} : load_prefix<kHeadDim>(before, row, column);
        acc[m][i] = v.x, acc[m][i + 1] = v.y;
      }
    }
    for (int j = 0; j < count; ++j) {
      if (j % group == rank) {
        const RingPosition at = RingPosition::of<kStates>(j / group);
        const uint32_t tile = stages_at + Tile::kState + at.stage * StateTile::kBytes;
        states.wait_until_empty(at);
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) store_accumulator<Bf16, StateTile>(tile, 64 * m, acc[m], a.c1, a.c1, w4, lane);
        ptx::fence_proxy_async();
        states.publish(at, lane);
      }
      const RingPosition at = RingPosition::of<kStages>(j);
      const Operand<RowTile> y(stages_at + at.stage * Tile::kStageBytes), w = y.behind(kTileBytes);
      ring.wait_until_full(at);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTileRows / 16; ++k) {
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) Products::template ss<Major::kMN, Major::kMN>(acc[m], y.mn_major(k, m), w.mn_major(k));
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) keep(acc[m]);
      ring.release(at, lane);
    }
  } else {
    if constexpr (kHeadDim == 128) ptx::more_registers<Tile::kResultRegisters>();
    const int g = lane / 4, t = lane % 4, tile_row = 16 * w4 + g;
    // is_second: of a pair, grad_y = sum c1 (x2.w + e_y) y, which reads the state the other way round.
    const auto results = [&](auto is_second, int first, int step) {
      constexpr bool kSecond = decltype(is_second)::value;
      for (int i = first; i < own; i += step) {
        const int row = first_row + (rank + i * group) * kTileRows;
        const RingPosition at = RingPosition::of<kStages>(rank + i * group), x_at = RingPosition::of<kXStages>(i);
        const RingPosition state_at = RingPosition::of<kStates>(i), vector_at = RingPosition::of<kVectors>(i);
        const uint32_t x_tile = stages_at + Tile::kX + x_at.stage * Tile::kXBytes + (kSecond ? kTileBytes : 0);
        const uint32_t vector = stages_at + Tile::kVector + vector_at.stage * Tile::kVectorBytes;
        const Operand<RowTile> x(x_tile), tile(stages_at + at.stage * Tile::kStageBytes);
        const Operand<RowTile> keys = tile.behind(kSecond ? kTileBytes : 0), values = tile.behind(kSecond ? 0 : kTileBytes);
        const Operand<StateTile> state(stages_at + Tile::kState + state_at.stage * StateTile::kBytes);

        float constant[2] = {1.f, 1.f};  // of the vector, and but for a second gradient of scores; of rows g and g + 8
        if constexpr (kWalk == Walk::kGradQ) {
          const float* e = a.x_scale.data + head_index * a.x_scale.head;
#pragma unroll
          for (int r = 0; r < 2; ++r) constant[r] = a.c1 * __ldg(e + min(row + tile_row + 8 * r, a.nx - 1));
        } else {
          constant[0] = constant[1] = kSecond ? a.c1 : a.c0;
        }
        x_ring.wait_until_full(x_at);
        ring.wait_until_full(at);
        states.wait_until_full(state_at);
        vectors.wait_until_full(vector_at);

        float s[kTileRows / 2], out[kHeadDim / 2];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDepth; ++k) {
          if (k == 0) Wgmma<Bf16, kTileRows>::template ss_first<Major::kK, Major::kK>(s, x.k_major(k), keys.k_major(k));
          else Wgmma<Bf16, kTileRows>::template ss<Major::kK, Major::kK>(s, x.k_major(k), keys.k_major(k));
        }
        wgmma_commit();
#pragma unroll
        for (int k = 0; k < kDepth; ++k) {
          constexpr Major kState = kSecond ? Major::kK : Major::kMN;
          const uint64_t rows = kSecond ? state.k_major(k) : state.mn_major(k);
          if (k == 0) Products::template ss_first<Major::kK, kState>(out, x.k_major(k), rows);
          else Products::template ss<Major::kK, kState>(out, x.k_major(k), rows);
        }
        wgmma_commit();

        [[maybe_unused]] float z[2] = {};  // this lane's part of the denominators
        if constexpr (kNormalises) {
          float product[4] = {};
          const uint32_t sums = vector + 4 * kHeadDim + (g % 2 * kHeadDim + 2 * t) * 2;
#pragma unroll
          for (int k = 0; k < kDepth; ++k) {
            uint32_t rows[4];
            ptx::ldmatrix_x4(rows, x_tile + RowTile::chunk_offset(16 * w4 + lane % 16, 2 * k + lane / 16));
            const uint32_t low = ptx::load_shared_u32(sums + 32 * k), high = ptx::load_shared_u32(sums + 32 * k + 16);
            ptx::mma_bf16(product, rows, g < 2 ? low : 0u, g < 2 ? high : 0u);
          }
          z[0] = a.c1 * (product[0] + product[1]), z[1] = a.c1 * (product[2] + product[3]);
        }

        wgmma_wait<1>();
        keep(s);
        uint32_t weights[kTileRows / 4];
#pragma unroll
        for (int j = 0; j < kTileRows / 2; j += 2) {
          const int column = j / 4 * 8 + 2 * t, r = j / 2 % 2;
          float2 e = make_float2(constant[r], constant[r]);
          if constexpr (kSecond) {
            e = ptx::load_shared_f32x2(stages_at + Tile::kScales + at.stage * kScaleBytes + 4 * column);
            e.x *= a.c1, e.y *= a.c1;
          }
          // In memory a walk back in time goes from later rows to earlier ones.
          const int seen_row = tile_row + 8 * r;
          const float low = (kPair ? column >= seen_row : column <= seen_row) ? fmaf(a.c1, s[j], e.x) : 0.f;
          const float high = (kPair ? column + 1 >= seen_row : column + 1 <= seen_row) ? fmaf(a.c1, s[j + 1], e.y) : 0.f;
          if constexpr (kNormalises) z[r] += low + high;
          weights[j / 2] = ptx::pack_bf16x2(low, high);
        }
        wgmma_wait<0>();
        keep(out);
        states.release(state_at, lane);
        keep(weights);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTileRows / 16; ++k) Products::template rs<Major::kMN>(out, weights + 4 * k, values.mn_major(k));
        wgmma_commit();
        wgmma_wait<0>();
        keep(out);
        ring.release(at, lane);
        x_ring.release(x_at, lane);
#pragma unroll
        for (int j = 0; j < kHeadDim / 8; ++j) {
          const float2 sum = ptx::load_shared_f32x2(vector + (kSecond ? 4 * kHeadDim : 0) + (8 * j + 2 * t) * 4);
#pragma unroll
          for (int e = 0; e < 4; ++e) out[4 * j + e] = fmaf(constant[e / 2], e % 2 == 0 ? sum.x : sum.y, out[4 * j + e]);
        }
        vectors.release(vector_at, lane);

        const int token = tile_token(a, a.nx, row) + tile_row;
        float factor[2] = {1.f, 1.f};
        if constexpr (kNormalises) {
          const float rows_before = static_cast<float>(a.y_row(a.boundary) + row);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float row_sum = fmaf(a.c0, rows_before, quad_sum(z[r]));
            factor[r] = row_sum == 0.f ? 0.f : 1.f / row_sum;
            if (t == 0 && token + 8 * r < a.nx) a.z[int64_t{head_index} * a.nx + token + 8 * r] = row_sum;
          }
        }
        auto& blocks = reinterpret_cast<float(&)[kHeadDim / 8][4]>(out);
        if constexpr (kPair) {
          store_result<Bf16>(kSecond ? a.grad_y : a.grad_w, false, batch, x_head, token, a.nx, 0, kSecond ? a.y_columns : a.w_columns,
                             blocks, factor);
        } else {
          store_result<Bf16>(a.out, false, batch, x_head, token, a.nx, 0, a.w_columns, blocks, factor);
        }
      }
    };
    const int consumer = warpgroup - 2;
    if constexpr (kPair) {
      if (consumer == 0) results(std::false_type{}, 0, 1);
      else results(std::true_type{}, 0, 1);
    } else {
      results(std::false_type{}, consumer, 2);
    }
  }
}

CUtensorMap rows_map(const View& x, const Linear1Problem& p, int heads, int tokens, int columns) {
  return tensor_map({x.data, {x.batch, x.head, x.token}, p.batch, heads, tokens, columns, MathMode::kBF16}, kTileRows);
}

template <int kHeadDim, Walk kWalk, class Args>
void launch(const char* name, const Args& a, const View& x2, cudaStream_t stream) {
  using Tile = WalkTileSm90<kHeadDim, kWalk>;
  const int x_heads = a.state_heads * a.x_group, y_heads = a.state_heads * a.y_group;
  const CUtensorMap x_map = rows_map(a.x, a, x_heads, a.nx, a.y_columns), x2_map = rows_map(x2, a, x_heads, a.nx, Tile::kPair ? a.w_columns : a.y_columns);
  const CUtensorMap y_map = rows_map(a.y, a, y_heads, a.ny, a.y_columns), w_map = rows_map(a.w, a, y_heads, a.ny, a.w_columns);
  launch_kernel(name, linear1_walk_sm90_kernel<kHeadDim, kWalk, Args>, grid_1d(int64_t{a.batch} * x_heads * a.segments * a.group),
                Tile::kThreads, Tile::kSharedBytes, stream, x_map, x2_map, y_map, w_map, a);
}

template <int kHeadDim>
void launch_walk(const Linear1WalkArgs& a, cudaStream_t stream) {
  if (a.z != nullptr) launch<kHeadDim, Walk::kForward>("linear1_walk_sm90", a, a.x, stream);
  else launch<kHeadDim, Walk::kGradQ>("linear1_walk_sm90", a, a.x, stream);
}

}  // namespace

void linear1_walk_sm90(const Linear1WalkArgs& a, int head_dim, cudaStream_t stream) {
  if (head_dim == 64) launch_walk<64>(a, stream);
  else launch_walk<128>(a, stream);
}

void linear1_pair_walk_sm90(const Linear1PairWalkArgs& a, int head_dim, cudaStream_t stream) {
  if (head_dim == 64) launch<64, Walk::kPair>("linear1_pair_walk_sm90", a, a.x2, stream);
  else launch<128, Walk::kPair>("linear1_pair_walk_sm90", a, a.x2, stream);
}

}  // namespace fastmax
