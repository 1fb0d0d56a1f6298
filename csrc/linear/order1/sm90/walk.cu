// Passes of order 1 on Hopper, by wgmma and TMA; portable/walk.cu and portable/pair_walk.cu compute the same:
//
//   pass (Walk)    x    x2    y    w    e of    time        result
//   kForward       q          k    v            forward     o = sum (c0 + c1 x.y) w / z
//   kGradQ         g          v    k    x       forward     grad_q = sum c1 (x.y + e) w
//   kPair          k    v     q    g    y       backward    grad_v = sum (c0 + c1 x.y) w, grad_k = sum c1 (x2.w + e) y
//
// A segment of x is shared by a group of `a.group` blocks. Each adds all rows of the segment to its copy of the state, in tiles of 64, and
// computes the result of every a.group-th tile, its own tiles. The blocks of a group read the same rows at about the same time, from the L2
// cache. In a block the roles of warps communicate by rings alone:
//
//   warp 0           fills a ring with tiles of y and w, and another one with the block's own tiles of x
//   warps 1, 2       sums of y and of w, as vectors
//   warpgroup 1      the state, in its accumulators; before an own tile, rounded into shared memory
//   warpgroups 2, 3  results of own tiles, from the state and the vectors before them and the tile's own scores: one tile each, in turn,
//                    or, in kPair, one gradient each
//
// Where there are several segments, the first three roles alone compute sums over parts of y (linear1_sums_sm90_kernel), which a scan
// (portable/sums.cu) turns into the state before each segment.
//
// A backward can read grad_o in place of g (Linear1Walks::divides): the pass of grad_q divides its results by z and stores e and 1 / z of
// its rows. The pass of grad_k and grad_v multiplies scores, and rows of q where it adds them to the state, by 1 / z.
//
// Rows of q and k can be shortened (linear1.h). The factors F of rows of y or w multiply scores, rows that are added to the state, and
// sums. Those of rows of x divide the constant in place of multiplying the scores: all weights of a row are then 1 / F times as large. F
// of a row of x comes from its tile. The gradient F (grad - q (grad . q) / q . q) of a shortened row is made of its result.
#include <type_traits>

#include "core/launch.h"
#include "core/sm90/pipeline.h"
#include "core/sm90/wgmma.h"
#include "linear/order1/sm90/kernels.h"
#include "linear/order1/tile.h"
#include "linear/order2/sm90/hopper_walk.h"

namespace fastmax {
namespace {

enum class Walk { kForward, kGradQ, kPair };

// The most that a factor of a shortened row is: others are exactly 1.
constexpr float kBelowOne = 0x1.fffffep-1f;

// Coefficients of the rows of y and w, behind the rows of a stage: so many tiles of them, and which one (or none, -1) has those of sum y,
// of sum w and of the matrix sum y w^T.
template <int kTiles_, int kY_, int kW_, int kMatrix_>
struct ScaleTiles {
  static constexpr int kTiles = kTiles_, kY = kY_, kW = kW_, kMatrix = kMatrix_, kBytes = kTiles * kScaleBytes;
};
using NoScales = ScaleTiles<0, -1, -1, -1>;
using EScales = ScaleTiles<1, 0, -1, -1>;        // e, for sum e y
using DividingScales = ScaleTiles<2, 0, 1, 1>;   // e and 1 / z, where w is grad_o
using FactorsOfY = ScaleTiles<1, 0, -1, 0>;      // F, of rows of y that are shortened
using FactorsOfW = ScaleTiles<1, -1, 0, 0>;      // the same of w
using ShorteningScales = ScaleTiles<3, 0, 1, 2>; // F e, 1 / z and F / z

template <Walk kWalk, bool kDivides, bool kShortens>
using ScalesOf = std::conditional_t<
    kWalk == Walk::kPair, std::conditional_t<kShortens, ShorteningScales, std::conditional_t<kDivides, DividingScales, EScales>>,
    std::conditional_t<!kShortens, NoScales, std::conditional_t<kWalk == Walk::kForward, FactorsOfY, FactorsOfW>>>;

// kDivides: x or w is grad_o. kShortens: rows of q and k are shortened; gradients then divide.
template <int kHeadDim, Walk kWalk, bool kDivides, bool kShortens>
struct WalkTileSm90 {
  using RowTile = RowTileSm90<kHeadDim>;
  using StateTile = SwizzledTile<kHeadDim, kHeadDim>;  // [column of y][column of w]
  static constexpr bool kPair = kWalk == Walk::kPair;
  using Scales = ScalesOf<kWalk, kDivides, kShortens>;
  static constexpr bool kScalesState = Scales::kMatrix >= 0;
  static constexpr int kThreads = 512;
  static constexpr bool kTwoX = kPair || kDivides, kThreeX = kWalk == Walk::kGradQ && kShortens;
  static constexpr int kStages = kHeadDim == 64 ? (kThreeX ? 6 : 8) : (kPair || kThreeX ? 3 : 4);
  // Even: of two warpgroups that take turns each has stages of its own. Of a stage that both read, one would take the parity of the
  // phase before last for its own.
  static constexpr int kXStages = kHeadDim == 64 ? 4 : 2;
  static constexpr int kVectors = 2, kStateBarriers = 2;
  static constexpr int kStates = kHeadDim == 64 ? 2 : 1;  // copies of the state, announced at those barriers in turn
  static constexpr int kResultWarps = kPair ? 8 : 4;  // that read a tile
  // At head dim 128 warpgroups have as many registers as their accumulators ask for.
  static constexpr int kProducerRegisters = 64, kStateRegisters = kScalesState ? 176 : 160;
  static constexpr int kResultRegisters = kScalesState ? 136 : 144;
  static_assert(kProducerRegisters + kStateRegisters + 2 * kResultRegisters <= 4 * ptx::registers_at_launch(kThreads));

  static constexpr int kTileBytes = RowTile::kBytes, kStageBytes = 2 * kTileBytes;  // y, w
  static constexpr int kXBytes = (kThreeX ? 3 : kTwoX ? 2 : 1) * kTileBytes;        // x; x2 or o; q
  // sum w; sum e y, or of the forward sum y as operands: rounded, and what was left
  static constexpr int kVectorBytes = (kWalk == Walk::kGradQ ? 1 : 2) * kHeadDim * 4;

  // Shared memory, from a multiple of 1024 bytes on.
  static constexpr int kX = kStages * kStageBytes;
  static constexpr int kState = kX + kXStages * kXBytes;
  static constexpr int kVector = kState + kStates * StateTile::kBytes;
  static constexpr int kScaleTiles = kVector + kVectors * kVectorBytes;  // of the rows of each stage
  static constexpr int kBarriers = kScaleTiles + kStages * Scales::kBytes;
  static constexpr int kXBarriers = kBarriers + Ring<kStages>::kBarrierBytes;
  static constexpr int kStateRing = kXBarriers + Ring<kXStages>::kBarrierBytes;
  static constexpr int kVectorBarriers = kStateRing + Ring<kStateBarriers>::kBarrierBytes;
  static constexpr int kSharedBytes = kSwizzledTileAlignment + kVectorBarriers + Ring<kVectors>::kBarrierBytes;
  static_assert(kSharedBytes <= shared_limit(90), "rings, states and barriers do not fit");
};

// The offset of an even column of a state, and of the next one, in the format that tile.h stores.
template <int kHeadDim>
__device__ __forceinline__ int prefix_offset(int row, int column) {
  using Tile = Linear1Tile<Bf16, kHeadDim>;
  constexpr int kRows = 16 * Tile::kStateM;  // of a pair of warps
  const int warp = row / kRows * 2 + column / 16 % 2, lane = row % 8 * 4 + column % 8 / 2;
  const int block = row % kRows / 16 * Tile::kStateN + column / 32 * 2 + column / 8 % 2;
  return ((block * Tile::kWarps + warp) * kWarpSize + lane) * 4 + row % 16 / 8 * 2;
}

// The state of a warpgroup.
template <int kHeadDim>
struct StateSm90 {
  using RowTile = RowTileSm90<kHeadDim>;
  using Products = Wgmma<Bf16, kHeadDim>;
  static constexpr int kBlocks = kHeadDim / kTileRows;  // of 64 columns of y
  float acc[kBlocks][kHeadDim / 2];

  // f(two accumulators of a row, prefix_offset)
  template <class F>
  __device__ __forceinline__ void for_each(int w4, F&& f) {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; i += 2) {
        const int row = 64 * m + 16 * w4 + lane_index() / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane_index() % 4 * 2;
        f(acc[m][i], acc[m][i + 1], prefix_offset<kHeadDim>(row, column));
      }
    }
  }
  __device__ __forceinline__ void load(const float* before, int w4) {
    for_each(w4, [&](float& x, float& y, int at) {
      const float2 v = before == nullptr ? float2{} : *reinterpret_cast<const float2*>(before + at);
      x = v.x, y = v.y;
    });
  }
  __device__ __forceinline__ void store(float* state, int w4) {
    for_each(w4, [&](float& x, float& y, int at) { *reinterpret_cast<float2*>(state + at) = make_float2(x, y); });
  }

  // Adds the rows of a stage, y and w. kScaled: times the scales.
  template <bool kScaled>
  __device__ __forceinline__ void add(uint32_t stage, uint32_t scales, int w4) {
    const Operand<RowTile> y(stage), w = y.behind(RowTile::kBytes);
    if constexpr (!kScaled) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTileRows / 16; ++k) {
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) Products::template ss<Major::kMN, Major::kMN>(acc[m], y.mn_major(k, m), w.mn_major(k));
      }
      wgmma_commit();
      wgmma_wait<0>();
    } else {
      const int lane = lane_index(), t = lane % 4;
      uint32_t f[2][kBlocks][4];
#pragma unroll
      for (int k = 0; k < kTileRows / 16; ++k) {
        if (k >= 2) wgmma_wait<1>();  // for the products that read these registers
        const float2 low = ptx::load_shared_f32x2(scales + (16 * k + 2 * t) * 4);
        const float2 high = ptx::load_shared_f32x2(scales + (16 * k + 8 + 2 * t) * 4);
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) {
          uint32_t a[4];
          ptx::ldmatrix_x4_trans(a, stage + RowTile::chunk_offset(16 * k + lane % 8 + lane / 16 * 8, 8 * m + 2 * w4 + lane / 8 % 2));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 scale = i < 2 ? low : high;
            f[k % 2][m][i] = ptx::pack_bf16x2(low_bf16(a[i]) * scale.x, high_bf16(a[i]) * scale.y);
          }
          keep(f[k % 2][m]);
        }
        wgmma_fence();
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) Products::template rs<Major::kMN>(acc[m], f[k % 2][m], w.mn_major(k));
        wgmma_commit();
      }
      wgmma_wait<0>();
    }
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) keep(acc[m]);
  }
};

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

// This lane's part, of four, of the product of a row of two tiles.
template <int kHeadDim>
__device__ __forceinline__ float row_product(uint32_t tile, uint32_t other, int row) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kHeadDim / 32; ++i) {
    const uint32_t at = RowTileSm90<kHeadDim>::chunk_offset(row, (i ^ row & 1) * 4 + lane_index() % 4);  // lanes in different banks
    uint32_t x[4], y[4];
    ptx::load_shared_u32x4(x, tile + at);
    ptx::load_shared_u32x4(y, other + at);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum = fmaf(low_bf16(x[j]), low_bf16(y[j]), fmaf(high_bf16(x[j]), high_bf16(y[j]), sum));
  }
  return sum;
}

// Starts the loads of a stage: y, w and the coefficients of their rows.
template <int kHeadDim, class Scales, class Args>
__device__ __forceinline__ void load_rows(const Args& a, const CUtensorMap& y_map, const CUtensorMap& w_map, uint32_t stage, uint32_t scales,
                                          uint32_t barrier, int token, int head, int batch) {
  using RowTile = RowTileSm90<kHeadDim>;
  ptx::mbarrier_arrive_expect(barrier, 2 * RowTile::kBytes + Scales::kBytes);
  RowTile::load(stage, y_map, barrier, token, head, batch);
  RowTile::load(stage + RowTile::kBytes, w_map, barrier, token, head, batch);
  if constexpr (Scales::kTiles > 0) {
    const int64_t y_head = int64_t{batch} * a.state_heads * a.y_group + head;
    const auto load = [&](int tile, const RowScale& scale) {
      ptx::bulk_load(scales + tile * kScaleBytes, tile_scales(scale, a.ny, y_head, token), kScaleBytes, barrier);
    };
    if constexpr (Scales::kY >= 0) load(Scales::kY, a.y_scale);
    if constexpr (Scales::kW >= 0) load(Scales::kW, a.w_scale);
    if constexpr (Scales::kTiles == 3) load(Scales::kMatrix, a.matrix_scale);
  }
}

// Adds a stage's rows of y or of w.
template <int kHeadDim, class Scales>
__device__ __forceinline__ void add_columns(ColumnSumsSm90<kHeadDim>& sums, bool of_y, uint32_t stage, const char* scales) {
  const float* weights = nullptr;
  if (of_y && Scales::kY >= 0) weights = reinterpret_cast<const float*>(scales + Scales::kY * kScaleBytes);
  if (!of_y && Scales::kW >= 0) weights = reinterpret_cast<const float*>(scales + Scales::kW * kScaleBytes);
  sums.add(stage + (of_y ? 0 : RowTileSm90<kHeadDim>::kBytes), weights);
}

// What all roles of a block share: arguments, shared memory, and its tiles. Members are references to variables of the kernel: the
// compiler then allocates registers as for lambdas.
template <int kHeadDim, Walk kWalk, bool kDivides, bool kShortens_, class Args>
struct WalkBlock {
  using Tile = WalkTileSm90<kHeadDim, kWalk, kDivides, kShortens_>;
  using RowTile = typename Tile::RowTile;
  using StateTile = typename Tile::StateTile;
  static constexpr int kDim = kHeadDim;
  static constexpr Walk kPass = kWalk;
  static constexpr bool kPair = Tile::kPair, kNormalises = kWalk == Walk::kForward, kHasZ = kDivides, kShortens = kShortens_;
  using Scales = typename Tile::Scales;
  static constexpr int kStages = Tile::kStages, kXStages = Tile::kXStages, kStates = Tile::kStates, kVectors = Tile::kVectors;
  static constexpr int kStateBarriers = Tile::kStateBarriers, kTileBytes = Tile::kTileBytes;

  const Args& a;
  const uint32_t& stages_at;
  char* const shared;  // dynamic shared memory; stages_at lies in it
  const Ring<kStages>& ring;
  const Ring<kXStages>& x_ring;
  const Ring<kStateBarriers>& states;
  const Ring<kVectors>& vectors;
  const int &lane, &w4;
  const int &group, &rank;  // blocks that share a segment, and which of them this one is
  const int &head_index, &batch, &x_head, &kv_head;
  const int& first_row;
  const int &own, &count;  // the block's own tiles of x; tiles of the segment up to the last of these
  const int& y_group;      // stages of a tile: heads of y that share a state
  const float* const& before;  // the sums before the segment; null: nothing is

  __device__ __forceinline__ static int scales_at(int stage) { return Tile::kScaleTiles + stage * Tile::Scales::kBytes; }
};

// The producer of stages of y and w, and of own tiles of x: one thread.
template <class Block>
__device__ __forceinline__ void produce(const Block& b, const CUtensorMap& x_map, const CUtensorMap& x2_map, const CUtensorMap& x3_map,
                                        const CUtensorMap& y_map, const CUtensorMap& w_map) {
  using Tile = typename Block::Tile;
  using RowTile = typename Block::RowTile;
  const auto& a = b.a;
  for (int j = 0; j < b.count; ++j) {
    const int row = b.first_row + j * kTileRows;
    const bool is_own = j % b.group == b.rank;
    if (is_own) {
      const RingPosition at = RingPosition::of<Block::kXStages>(j / b.group);
      const uint32_t x = b.stages_at + Tile::kX + at.stage * Tile::kXBytes;
      const int token = tile_token(a, a.nx, row);
      b.x_ring.wait_until_empty(at);
      b.x_ring.expect(at, Tile::kXBytes);
      RowTile::load(x, x_map, b.x_ring.full(at), token, b.x_head, b.batch);
      if constexpr (Tile::kTwoX) RowTile::load(x + Block::kTileBytes, x2_map, b.x_ring.full(at), token, b.x_head, b.batch);
      if constexpr (Tile::kThreeX) RowTile::load(x + 2 * Block::kTileBytes, x3_map, b.x_ring.full(at), token, b.x_head, b.batch);
    }
    for (int i = 0; i < b.y_group; ++i) {
      const RingPosition at = RingPosition::of<Block::kStages>(j * b.y_group + i);
      b.ring.wait_until_empty(at);
      load_rows<Block::kDim, typename Block::Scales>(a, y_map, w_map, b.stages_at + at.stage * Tile::kStageBytes, b.stages_at + b.scales_at(at.stage),
                                             b.ring.full(at), tile_token(a, a.ny, a.y_row(a.boundary + row)),
                                             b.kv_head * b.y_group + i, b.batch);
      if (!is_own) ptx::mbarrier_arrive_many(b.ring.empty(at), Tile::kResultWarps);
    }
  }
}

// The sum of y or of w over the rows before each own tile, as a vector: one warp.
template <class Block>
struct VectorConsumer {
  using Tile = typename Block::Tile;
  static constexpr int kHeadDim = Block::kDim;
  const Block& b;
  const bool& of_y;
  ColumnSumsSm90<kHeadDim>& sums;

  __device__ __forceinline__ void run() const {
    for (int j = 0; j < b.count; ++j) {
      if (j % b.group == b.rank) publish(j / b.group);
      for (int i = 0; i < b.y_group; ++i) {
        const RingPosition at = RingPosition::of<Block::kStages>(j * b.y_group + i);
        b.ring.wait_until_full(at);
        if (!of_y || Block::kPass != Walk::kGradQ) {
          add_columns<kHeadDim, typename Block::Scales>(sums, of_y, b.stages_at + at.stage * Tile::kStageBytes,
                                                (b.shared + (b.stages_at - ptx::smem_address(b.shared))) + b.scales_at(at.stage));
          ptx::fence_proxy_async();  // the last loads may be under way where nothing was made of them yet
        }
        b.ring.release(at, b.lane);
      }
    }
  }

  // Stores the sums for the results of own tile i.
  __device__ __forceinline__ void publish(int i) const {
    const RingPosition at = RingPosition::of<Block::kVectors>(i);
    const uint32_t vector = b.stages_at + Tile::kVector + at.stage * Tile::kVectorBytes;
    b.vectors.wait_until_empty(at);
    if (!of_y) {
      sums.for_each([&](int column, float sum) { ptx::store_shared_f32(vector + 4 * column, sum); });
    } else if constexpr (Block::kPair) {
      sums.for_each([&](int column, float sum) { ptx::store_shared_f32(vector + 4 * (kHeadDim + column), sum); });
    } else if constexpr (Block::kNormalises) {
      auto* rounded = reinterpret_cast<__nv_bfloat16*>((b.shared + (b.stages_at - ptx::smem_address(b.shared))) + (vector - b.stages_at)) + 2 * kHeadDim;
      sums.for_each([&](int column, float sum) {
        const __nv_bfloat16 high = __float2bfloat16_rn(sum);
        rounded[column] = high, rounded[kHeadDim + column] = __float2bfloat16_rn(sum - __bfloat162float(high));
      });
    }
    b.vectors.publish(at, b.lane);
  }
};

// The state of the rows before each own tile: a warpgroup.
template <class Block>
struct StateConsumer {
  using Tile = typename Block::Tile;
  using StateTile = typename Block::StateTile;
  const Block& b;
  StateSm90<Block::kDim>& state;

  __device__ __forceinline__ void run() const {
    state.load(b.before, b.w4);
    for (int j = 0; j < b.count; ++j) {
      if (j % b.group == b.rank) publish(j / b.group);
      for (int i = 0; i < b.y_group; ++i) {
        const RingPosition at = RingPosition::of<Block::kStages>(j * b.y_group + i);
        b.ring.wait_until_full(at);
        state.template add<Tile::kScalesState>(b.stages_at + at.stage * Tile::kStageBytes,
                                               b.stages_at + b.scales_at(at.stage) + Block::Scales::kMatrix * kScaleBytes, b.w4);
        b.ring.release(at, b.lane);
      }
    }
  }

  // Stores a rounded copy for the results of own tile i.
  __device__ __forceinline__ void publish(int i) const {
    const RingPosition at = RingPosition::of<Block::kStateBarriers>(i);
    const uint32_t tile = b.stages_at + Tile::kState + i % Block::kStates * StateTile::kBytes;
    if (i >= Block::kStates) {  // until the results have read the copy that was here
      const RingPosition last = RingPosition::of<Block::kStateBarriers>(i - Block::kStates);
      ptx::mbarrier_wait(b.states.empty(last), last.parity);
    }
#pragma unroll
    for (int m = 0; m < state.kBlocks; ++m) store_accumulator<Bf16, StateTile>(tile, 64 * m, state.acc[m], b.a.c1, b.a.c1, b.w4, b.lane);
    ptx::fence_proxy_async();
    b.states.publish(at, b.lane);
  }
};

// The results of own tiles: a warpgroup. kSecond: of a pair, grad_y = sum c1 (x2.w + e_y) y, which reads the state transposed.
template <class Block, bool kSecond>
struct ResultConsumer {
  using Tile = typename Block::Tile;
  using RowTile = typename Block::RowTile;
  using StateTile = typename Block::StateTile;
  using Products = Wgmma<Bf16, Block::kDim>;
  static constexpr int kHeadDim = Block::kDim, kDepth = kHeadDim / 16, kTileBytes = Block::kTileBytes;
  static constexpr bool kPair = Block::kPair, kNormalises = Block::kNormalises;
  static constexpr bool kHasZ = Block::kHasZ, kGivenZ = Block::kPass == Walk::kGradQ && kHasZ, kShortens = Block::kShortens;
  using Scales = typename Block::Scales;
  // Results that are gradients of rows that may be shortened, which are tile kRowsTile of x.
  static constexpr bool kOfShortened = kShortens && (Block::kPass == Walk::kGradQ || kSecond);
  static constexpr int kRowsTile = Block::kPass == Walk::kGradQ ? 2 : 0;

  // A tile in registers: its scores and results, and coefficients of rows g and g + 8.
  struct Registers {
    float (&s)[kTileRows / 2];
    float (&out)[kHeadDim / 2];
    uint32_t (&weights)[kTileRows / 4];
    float (&constant)[2];  // of the vector, and but for a second gradient of scores
    float (&factor)[2];    // of the result
    float (&z)[2];         // this lane's part of the denominators
    float (&length)[2];    // F of rows of x, of a result that is not a gradient of theirs
  };

  const Block& b;
  const int &g, &t, &tile_row;

  // Own tiles first, first + step, ...
  __device__ __forceinline__ void run(int first, int step) const {
    for (int i = first; i < b.own; i += step) compute(i);
  }

  __device__ __forceinline__ void compute(int i) const {
    const auto& a = b.a;
    const int row = b.first_row + (b.rank + i * b.group) * kTileRows;
    const int first_stage = (b.rank + i * b.group) * b.y_group;
    const RingPosition x_at = RingPosition::of<Block::kXStages>(i);
    const RingPosition state_at = RingPosition::of<Block::kStateBarriers>(i), vector_at = RingPosition::of<Block::kVectors>(i);
    const uint32_t x_stage = b.stages_at + Tile::kX + x_at.stage * Tile::kXBytes;
    const uint32_t x_tile = x_stage + (kSecond ? kTileBytes : 0);
    const uint32_t vector = b.stages_at + Tile::kVector + vector_at.stage * Tile::kVectorBytes;
    const Operand<RowTile> x(x_tile);
    const Operand<StateTile> state(b.stages_at + Tile::kState + i % Block::kStates * StateTile::kBytes);

    float constant[2], factor[2] = {1.f, 1.f};
    if constexpr (Block::kPass != Walk::kGradQ) {
      constant[0] = constant[1] = kSecond ? a.c1 : a.c0;
    } else if constexpr (!kHasZ) {
      const float* e = a.x_scale.data + b.head_index * a.x_scale.head;
#pragma unroll
      for (int r = 0; r < 2; ++r) constant[r] = a.c1 * __ldg(e + min(row + tile_row + 8 * r, a.nx - 1));
    }
    [[maybe_unused]] float given_z[2] = {}, grad_z[2] = {};
    if constexpr (kGivenZ) load_z(row, given_z, grad_z);
    b.x_ring.wait_until_full(x_at);
    [[maybe_unused]] float length[2] = {1.f, 1.f};
    if constexpr (kShortens && !kOfShortened) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        length[r] = length_factor(squared_length(x_stage, r));
        constant[r] /= length[r];
        if constexpr (kPair) factor[r] = length[r];
      }
    }
    if constexpr (kGivenZ) divide(row, x_tile, given_z, grad_z, constant, factor);
    // Before the ring: a state has all rows before the tile, so what was in its stages before had come, and the parity is right though
    // a warpgroup that takes turns did not look at it.
    b.states.wait_until_full(state_at);
    b.vectors.wait_until_full(vector_at);

    float s[kTileRows / 2], out[kHeadDim / 2];
    [[maybe_unused]] float z[2] = {};
    uint32_t weights[kTileRows / 4];
    const Registers tile{s, out, weights, constant, factor, z, length};
    if constexpr (kPair) {
      wgmma_fence();
      start_result(tile, x, state);
      wgmma_wait<0>();
      keep(out);
      b.states.release(state_at, b.lane);
      for (int head = 0; head < b.y_group; ++head) {
        const RingPosition at = RingPosition::of<Block::kStages>(first_stage + head);
        const Operand<RowTile> y(b.stages_at + at.stage * Tile::kStageBytes), w = y.behind(kTileBytes);
        b.ring.wait_until_full(at);
        wgmma_fence();
        start_scores(tile, x, kSecond ? w : y);
        wgmma_wait<0>();
        keep(s);
        make_weights(tile, at.stage);
        add_values(tile, kSecond ? y : w);
        b.ring.release(at, b.lane);
      }
    } else {
      const RingPosition at = RingPosition::of<Block::kStages>(first_stage);
      const Operand<RowTile> y(b.stages_at + at.stage * Tile::kStageBytes);
      b.ring.wait_until_full(at);
      wgmma_fence();
      start_scores(tile, x, y);
      start_result(tile, x, state);
      if constexpr (kNormalises) begin_z(z, x_tile, vector);
      wgmma_wait<1>();
      keep(s);
      make_weights(tile, at.stage);
      wgmma_wait<0>();
      keep(out);
      b.states.release(state_at, b.lane);
      add_values(tile, y.behind(kTileBytes));
      b.ring.release(at, b.lane);
    }
    if constexpr (!kOfShortened) {
      // The product of x with the rounded sums goes into z alone, which the assembler may make behind the release (pipeline.h). So may
      // what the length of rows of x goes into.
      if constexpr (kNormalises || kShortens) ptx::fence_proxy_async();
      b.x_ring.release(x_at, b.lane);
    }
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      const float2 sum = ptx::load_shared_f32x2(vector + (kSecond ? 4 * kHeadDim : 0) + (8 * j + 2 * t) * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) out[4 * j + e] = fmaf(constant[e / 2], e % 2 == 0 ? sum.x : sum.y, out[4 * j + e]);
    }
    b.vectors.release(vector_at, b.lane);
    if constexpr (kOfShortened) {
      project(tile, x_stage + kRowsTile * kTileBytes);
      ptx::fence_proxy_async();
      b.x_ring.release(x_at, b.lane);
    }
    store(tile, row);
  }

  __device__ __forceinline__ float squared_length(uint32_t tile, int r) const {
    return quad_sum(row_product<kHeadDim>(tile, tile, tile_row + 8 * r));
  }
  // F of a row; 1 exactly if it is not shortened.
  __device__ __forceinline__ float length_factor(float squares) const {
    const float lim = b.a.lim;
    return squares > lim * lim ? fminf(lim * rsqrtf(squares), kBelowOne) : 1.f;
  }

  // From gradients of shortened rows, those of the rows.
  __device__ __forceinline__ void project(const Registers& tile, uint32_t rows) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float squares = squared_length(rows, r), length = length_factor(squares);
      float along = 0.f;
      for_each_pair(rows, r, [&](int at, float x, float y) { along = fmaf(tile.out[at], x, fmaf(tile.out[at + 1], y, along)); });
      along = quad_sum(along);
      along = length < 1.f ? along / squares : 0.f;
      for_each_pair(rows, r, [&](int at, float x, float y) {
        tile.out[at] = fmaf(-along, x, tile.out[at]), tile.out[at + 1] = fmaf(-along, y, tile.out[at + 1]);
      });
      tile.factor[r] *= length;
    }
  }
  // f(accumulator, a row's element there, the next one) for the columns of a lane.
  template <class F>
  __device__ __forceinline__ void for_each_pair(uint32_t rows, int r, F&& f) const {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      const uint32_t x = ptx::load_shared_u32(rows + RowTile::chunk_offset(tile_row + 8 * r, j) + 4 * t);
      f(4 * j + 2 * r, low_bf16(x), high_bf16(x));
    }
  }

  __device__ __forceinline__ void load_z(int row, float (&given_z)[2], float (&grad_z)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t at = int64_t{b.head_index} * b.a.nx + min(row + tile_row + 8 * r, b.a.nx - 1);
      given_z[r] = __ldg(b.a.given_z + at);
      if (b.a.grad_z != nullptr) grad_z[r] = __ldg(b.a.grad_z + at);
    }
  }

  // e and 1 / z of the rows, where x is grad_o: for the result, and stored for the pass of grad_k and grad_v.
  __device__ __forceinline__ void divide(int row, uint32_t x_tile, const float (&given_z)[2], float (&grad_z)[2], float (&constant)[2],
                                         float (&factor)[2]) const {
    const auto& a = b.a;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float dot = quad_sum(row_product<kHeadDim>(x_tile, x_tile + kTileBytes, tile_row + 8 * r));
      factor[r] = given_z[r] == 0.f ? 0.f : 1.f / given_z[r];
      if (given_z[r] == 0.f) grad_z[r] = 0.f;
      constant[r] = a.c1 * fmaf(grad_z[r], given_z[r], -dot);
      [[maybe_unused]] const float length = kShortens ? length_factor(squared_length(x_tile + kRowsTile * kTileBytes, r)) : 1.f;
      if (t == 0 && row + tile_row + 8 * r < a.nx) {
        const int64_t at = b.head_index * a.e_head + row + tile_row + 8 * r;
        const float e = fmaf(-dot, factor[r], grad_z[r]);
        a.e[at] = length * e, a.inverse_z[at] = factor[r];
        if constexpr (kShortens) a.shortened_z[at] = length * factor[r];
      }
    }
  }

  __device__ __forceinline__ void start_scores(const Registers& tile, const Operand<RowTile>& x, const Operand<RowTile>& keys) const {
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      if (k == 0) Wgmma<Bf16, kTileRows>::template ss_first<Major::kK, Major::kK>(tile.s, x.k_major(k), keys.k_major(k));
      else Wgmma<Bf16, kTileRows>::template ss<Major::kK, Major::kK>(tile.s, x.k_major(k), keys.k_major(k));
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void start_result(const Registers& tile, const Operand<RowTile>& x, const Operand<StateTile>& state) const {
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      constexpr Major kState = kSecond ? Major::kK : Major::kMN;
      const uint64_t rows = kSecond ? state.k_major(k) : state.mn_major(k);
      if (k == 0) Products::template ss_first<Major::kK, kState>(tile.out, x.k_major(k), rows);
      else Products::template ss<Major::kK, kState>(tile.out, x.k_major(k), rows);
    }
    wgmma_commit();
  }

  // The denominators' part of earlier tiles: products of x with the sum of y.
  __device__ __forceinline__ void begin_z(float (&z)[2], uint32_t x_tile, uint32_t vector) const {
    float product[4] = {};
    const uint32_t sums = vector + 4 * kHeadDim + (g % 2 * kHeadDim + 2 * t) * 2;
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      uint32_t rows[4];
      ptx::ldmatrix_x4(rows, x_tile + RowTile::chunk_offset(16 * b.w4 + b.lane % 16, 2 * k + b.lane / 16));
      const uint32_t low = ptx::load_shared_u32(sums + 32 * k), high = ptx::load_shared_u32(sums + 32 * k + 16);
      ptx::mma_bf16(product, rows, g < 2 ? low : 0u, g < 2 ? high : 0u);
    }
    z[0] = b.a.c1 * (product[0] + product[1]), z[1] = b.a.c1 * (product[2] + product[3]);
  }

  __device__ __forceinline__ void make_weights(const Registers& tile, int stage) const {
    const auto& a = b.a;
    auto& s = tile.s;
#pragma unroll
    for (int j = 0; j < kTileRows / 2; j += 2) {
      const int column = j / 4 * 8 + 2 * t, r = j / 2 % 2, seen_row = tile_row + 8 * r;
      float2 constant = make_float2(tile.constant[r], tile.constant[r]);
      [[maybe_unused]] float2 scale = make_float2(1.f, 1.f);
      if constexpr (kSecond) constant = scales(stage, Scales::kY, column);
      if constexpr (Scales::kMatrix >= 0) scale = scales(stage, Scales::kMatrix, column);
      float low, high;
      if constexpr (kSecond) {
        low = a.c1 * fmaf(s[j], scale.x, constant.x), high = a.c1 * fmaf(s[j + 1], scale.y, constant.y);
      } else if constexpr (Scales::kW == Scales::kMatrix) {
        low = fmaf(a.c1, s[j], constant.x) * scale.x, high = fmaf(a.c1, s[j + 1], constant.y) * scale.y;
      } else {  // the constant has the scale of sum w
        if constexpr (Scales::kW >= 0) {
          const float2 of_w = scales(stage, Scales::kW, column);
          constant.x *= of_w.x, constant.y *= of_w.y;
        }
        low = fmaf(a.c1 * s[j], scale.x, constant.x), high = fmaf(a.c1 * s[j + 1], scale.y, constant.y);
      }
      // Reversed rows lie in memory in the order of tokens: later rows come first.
      if (kPair ? column < seen_row : column > seen_row) low = 0.f;
      if (kPair ? column + 1 < seen_row : column + 1 > seen_row) high = 0.f;
      if constexpr (kNormalises) tile.z[r] += low + high;
      tile.weights[j / 2] = ptx::pack_bf16x2(low, high);
    }
    keep(tile.weights);
  }

  // Of two rows of a stage, from `row` on.
  __device__ __forceinline__ float2 scales(int stage, int tile, int row) const {
    return ptx::load_shared_f32x2(b.stages_at + b.scales_at(stage) + tile * kScaleBytes + 4 * row);
  }

  __device__ __forceinline__ void add_values(const Registers& tile, const Operand<RowTile>& values) const {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileRows / 16; ++k) Products::template rs<Major::kMN>(tile.out, tile.weights + 4 * k, values.mn_major(k));
    wgmma_commit();
    wgmma_wait<0>();
    keep(tile.out);
  }

  __device__ __forceinline__ void store(const Registers& tile, int row) const {
    const auto& a = b.a;
    const int token = tile_token(a, a.nx, row) + tile_row;
    if constexpr (kNormalises) {
      const float rows_before = static_cast<float>(a.y_row(a.boundary) + row);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float row_sum = fmaf(kShortens ? tile.constant[r] : a.c0, rows_before, quad_sum(tile.z[r]));
        tile.factor[r] = row_sum == 0.f ? 0.f : 1.f / row_sum;
        const float z = kShortens ? tile.length[r] * row_sum : row_sum;
        if (t == 0 && token + 8 * r < a.nx) a.z[int64_t{b.head_index} * a.nx + token + 8 * r] = z;
      }
    }
    auto& blocks = reinterpret_cast<float(&)[kHeadDim / 8][4]>(tile.out);
    if constexpr (kNormalises && !kShortens) {
      if (a.noise.data != nullptr) multiply_noise<Bf16>(a.noise, false, a.dropout, b.batch, b.x_head, token, a.nx, 0, a.w_columns, blocks);
    }
    if constexpr (kPair) {
      store_result<Bf16>(kSecond ? a.grad_y : a.grad_w, false, b.batch, b.x_head, token, a.nx, 0, kSecond ? a.y_columns : a.w_columns,
                         blocks, tile.factor);
    } else {
      store_result<Bf16>(a.out, false, b.batch, b.x_head, token, a.nx, 0, a.w_columns, blocks, tile.factor);
    }
  }
};

template <int kHeadDim, Walk kWalk, bool kDivides, bool kShortens, class Args>
__global__ void __launch_bounds__(WalkTileSm90<kHeadDim, kWalk, kDivides, kShortens>::kThreads, 1)
    linear1_walk_sm90_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap x2_map,
                             const __grid_constant__ CUtensorMap x3_map, const __grid_constant__ CUtensorMap y_map,
                             const __grid_constant__ CUtensorMap w_map, const Args a) {
  using Block = WalkBlock<kHeadDim, kWalk, kDivides, kShortens, Args>;
  using Tile = typename Block::Tile;
  extern __shared__ char shared[];
  const uint32_t stages_at = first_tile(shared);
  const Ring<Tile::kStages> ring(stages_at + Tile::kBarriers);
  const Ring<Tile::kXStages> x_ring(stages_at + Tile::kXBarriers);
  const Ring<Tile::kStateBarriers> states(stages_at + Tile::kStateRing);
  const Ring<Tile::kVectors> vectors(stages_at + Tile::kVectorBarriers);
  const int warp = warp_index(), lane = lane_index(), warpgroup = warp / 4, w4 = warp % 4;

  const int group = a.group, rank = blockIdx.x % group, x_heads = a.state_heads * a.x_group, heads = a.batch * x_heads;
  const int head_index = blockIdx.x / group % heads, segment = blockIdx.x / group / heads;
  const int batch = head_index / x_heads, x_head = head_index % x_heads, kv_head = x_head / a.x_group;
  const int first_row = segment * a.segment;
  const int tiles = (min(a.segment, a.nx - first_row) + kTileRows - 1) / kTileRows;
  const int own = tiles > rank ? (tiles - 1 - rank) / group + 1 : 0;  // tile `rank` and every group-th behind it
  const int count = own > 0 ? rank + (own - 1) * group + 1 : 0;
  const int y_group = Tile::kPair ? a.y_group : 1;
  const int part = a.part_before(segment);
  const float* before =
      part < 0 ? nullptr
               : a.prefixes + (int64_t{batch * a.state_heads + kv_head} * a.parts + part) * linear1_state_floats(kHeadDim, kHeadDim);
  const Block block{a, stages_at, shared, ring, x_ring, states, vectors, lane, w4, group, rank, head_index, batch, x_head, kv_head,
                    first_row, own, count, y_group, before};

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
      produce(block, x_map, x2_map, x3_map, y_map, w_map);
    } else if (warp == 1 || warp == 2) {
      const bool of_y = warp == 1;
      ColumnSumsSm90<kHeadDim> sums(before == nullptr ? nullptr : before + kHeadDim * kHeadDim + (of_y ? kHeadDim : 0));
      VectorConsumer<Block>{block, of_y, sums}.run();
    }
  } else if (warpgroup == 1) {
    if constexpr (kHeadDim == 128) ptx::more_registers<Tile::kStateRegisters>();
    StateSm90<kHeadDim> state;
    StateConsumer<Block>{block, state}.run();
  } else {
    if constexpr (kHeadDim == 128) ptx::more_registers<Tile::kResultRegisters>();
    const int g = lane / 4, t = lane % 4, tile_row = 16 * w4 + g, consumer = warpgroup - 2;
    if constexpr (Tile::kPair) {
      if (consumer == 0) ResultConsumer<Block, false>{block, g, t, tile_row}.run(0, 1);
      else ResultConsumer<Block, true>{block, g, t, tile_row}.run(0, 1);
    } else {
      ResultConsumer<Block, false>{block, g, t, tile_row}.run(consumer, 2);
    }
  }
}

template <int kHeadDim, class Scales_>
struct SumTileSm90 {
  using Scales = Scales_;
  static constexpr int kThreads = 256;
  static constexpr int kStages = kHeadDim == 64 ? 12 : 6;
  static constexpr int kStageBytes = 2 * RowTileSm90<kHeadDim>::kBytes;
  static constexpr int kScaleTiles = kStages * kStageBytes;
  static constexpr int kBarriers = kScaleTiles + kStages * Scales::kBytes;
  static constexpr int kSharedBytes = kSwizzledTileAlignment + kBarriers + Ring<kStages>::kBarrierBytes;
  static_assert(kSharedBytes <= shared_limit(90), "stages and barriers do not fit");
};

template <int kHeadDim, class Scales>
__global__ void __launch_bounds__(SumTileSm90<kHeadDim, Scales>::kThreads, 1)
    linear1_sums_sm90_kernel(const __grid_constant__ CUtensorMap y_map, const __grid_constant__ CUtensorMap w_map, const Linear1SumArgs a) {
  using Tile = SumTileSm90<kHeadDim, Scales>;
  constexpr int kStages = Tile::kStages;
  extern __shared__ char shared[];
  const uint32_t stages_at = first_tile(shared);
  const char* shared_tiles = shared + (stages_at - ptx::smem_address(shared));
  const Ring<kStages> ring(stages_at + Tile::kBarriers);
  const int warp = warp_index(), lane = lane_index();

  const int state_index = blockIdx.x % a.states(), part = blockIdx.x / a.states();
  const int begin = max(a.part_begin(part), 0), end = min(a.part_begin(part) + a.part, a.y_end());
  const int tiles = end > begin ? (end - begin + kTileRows - 1) / kTileRows : 0, stages = tiles * a.y_group;
  float* out = a.prefixes + (int64_t{state_index} * a.parts + part) * linear1_state_floats(kHeadDim, kHeadDim);

  if (threadIdx.x == 0) {
    ring.init(4 + 2);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warp == 0 && lane == 0) {
    for (int i = 0; i < stages; ++i) {
      // From the end of the part: what is read last, the beginning, is still in the L2 cache when the next kernel starts there.
      const int row = a.y_row(begin) + (tiles - 1 - i / a.y_group) * kTileRows;
      const RingPosition at = RingPosition::of<kStages>(i);
      ring.wait_until_empty(at);
      load_rows<kHeadDim, Scales>(a, y_map, w_map, stages_at + at.stage * Tile::kStageBytes,
                                   stages_at + Tile::kScaleTiles + at.stage * Tile::Scales::kBytes, ring.full(at), tile_token(a, a.ny, row),
                                   state_index % a.state_heads * a.y_group + i % a.y_group, state_index / a.state_heads);
    }
  } else if (warp == 1 || warp == 2) {
    const bool of_y = warp == 1;
    ColumnSumsSm90<kHeadDim> sums(nullptr);
    for (int i = 0; i < stages; ++i) {
      const RingPosition at = RingPosition::of<kStages>(i);
      ring.wait_until_full(at);
      add_columns<kHeadDim, Scales>(sums, of_y, stages_at + at.stage * Tile::kStageBytes,
                                     shared_tiles + Tile::kScaleTiles + at.stage * Tile::Scales::kBytes);
      ptx::fence_proxy_async();  // as in VectorConsumer
      ring.release(at, lane);
    }
    float* vector = out + kHeadDim * kHeadDim + (of_y ? kHeadDim : 0);
    sums.for_each([&](int column, float sum) { vector[column] = sum; });
    if (of_y && lane < 4) vector[kHeadDim + lane] = 0.f;
  } else if (warp >= 4) {
    StateSm90<kHeadDim> state;
    state.load(nullptr, warp % 4);
    for (int i = 0; i < stages; ++i) {
      const RingPosition at = RingPosition::of<kStages>(i);
      ring.wait_until_full(at);
      state.template add<(Scales::kMatrix >= 0)>(
          stages_at + at.stage * Tile::kStageBytes,
          stages_at + Tile::kScaleTiles + at.stage * Tile::Scales::kBytes + Scales::kMatrix * kScaleBytes, warp % 4);
      ring.release(at, lane);
    }
    state.store(out, warp % 4);
  }
}

CUtensorMap rows_map(const View& x, const Linear1Problem& p, int heads, int tokens, int columns) {
  return tensor_map({x.data, {x.batch, x.head, x.token}, p.batch, heads, tokens, columns, MathMode::kBF16}, kTileRows);
}

template <int kHeadDim, Walk kWalk, bool kDivides, bool kShortens, class Args>
void launch(const char* name, const Args& a, const View& x2, int x2_columns, const View& x3, cudaStream_t stream) {
  using Tile = WalkTileSm90<kHeadDim, kWalk, kDivides, kShortens>;
  const int x_heads = a.state_heads * a.x_group, y_heads = a.state_heads * a.y_group;
  const CUtensorMap x_map = rows_map(a.x, a, x_heads, a.nx, a.y_columns), x2_map = rows_map(x2, a, x_heads, a.nx, x2_columns);
  const CUtensorMap x3_map = Tile::kThreeX ? rows_map(x3, a, x_heads, a.nx, a.w_columns) : x_map;
  const CUtensorMap y_map = rows_map(a.y, a, y_heads, a.ny, a.y_columns), w_map = rows_map(a.w, a, y_heads, a.ny, a.w_columns);
  launch_kernel(name, linear1_walk_sm90_kernel<kHeadDim, kWalk, kDivides, kShortens, Args>,
                grid_1d(int64_t{a.batch} * x_heads * a.segments * a.group), Tile::kThreads, Tile::kSharedBytes, stream, x_map, x2_map, x3_map,
                y_map, w_map, a);
}

template <int kHeadDim>
void launch_walk(const Linear1WalkArgs& a, cudaStream_t stream) {
  constexpr const char* kName = "linear1_walk_sm90";
  if (a.z != nullptr) {
    if (a.lim > 0.f) launch<kHeadDim, Walk::kForward, false, true>(kName, a, a.x, a.y_columns, a.x, stream);
    else launch<kHeadDim, Walk::kForward, false, false>(kName, a, a.x, a.y_columns, a.x, stream);
  } else if (a.o.data == nullptr) {
    launch<kHeadDim, Walk::kGradQ, false, false>(kName, a, a.x, a.y_columns, a.x, stream);
  } else {
    if (a.lim > 0.f) launch<kHeadDim, Walk::kGradQ, true, true>(kName, a, a.o, a.y_columns, a.q, stream);
    else launch<kHeadDim, Walk::kGradQ, true, false>(kName, a, a.o, a.y_columns, a.x, stream);
  }
}

template <int kHeadDim>
void launch_pair_walk(const Linear1PairWalkArgs& a, cudaStream_t stream) {
  constexpr const char* kName = "linear1_pair_walk_sm90";
  if (a.w_scale.data == nullptr) launch<kHeadDim, Walk::kPair, false, false>(kName, a, a.x2, a.w_columns, a.x, stream);
  else if (a.lim > 0.f) launch<kHeadDim, Walk::kPair, true, true>(kName, a, a.x2, a.w_columns, a.x, stream);
  else launch<kHeadDim, Walk::kPair, true, false>(kName, a, a.x2, a.w_columns, a.x, stream);
}

template <int kHeadDim, class Scales>
void launch_sums(const Linear1SumArgs& a, cudaStream_t stream) {
  using Tile = SumTileSm90<kHeadDim, Scales>;
  const int y_heads = a.state_heads * a.y_group;
  const CUtensorMap y_map = rows_map(a.y, a, y_heads, a.ny, a.y_columns), w_map = rows_map(a.w, a, y_heads, a.ny, a.w_columns);
  launch_kernel("linear1_sums_sm90", linear1_sums_sm90_kernel<kHeadDim, Scales>, grid_1d(int64_t{a.states()} * a.parts), Tile::kThreads,
                Tile::kSharedBytes, stream, y_map, w_map, a);
}

template <int kHeadDim>
void launch_sums(const Linear1SumArgs& a, cudaStream_t stream) {
  const float *y = a.y_scale.data, *w = a.w_scale.data, *matrix = a.matrix_scale.data;
  if (matrix == nullptr) y == nullptr ? launch_sums<kHeadDim, NoScales>(a, stream) : launch_sums<kHeadDim, EScales>(a, stream);
  else if (w == nullptr) launch_sums<kHeadDim, FactorsOfY>(a, stream);
  else if (y == nullptr) launch_sums<kHeadDim, FactorsOfW>(a, stream);
  else if (w == matrix) launch_sums<kHeadDim, DividingScales>(a, stream);
  else launch_sums<kHeadDim, ShorteningScales>(a, stream);
}

}  // namespace

void linear1_sums_sm90(const Linear1SumArgs& a, int head_dim, cudaStream_t stream) {
  if (a.parts == 0) return;
  if (head_dim == 64) launch_sums<64>(a, stream);
  else launch_sums<128>(a, stream);
  linear1_scan<Bf16>(a, head_dim, stream);
}

void linear1_walk_sm90(const Linear1WalkArgs& a, int head_dim, cudaStream_t stream) {
  if (head_dim == 64) launch_walk<64>(a, stream);
  else launch_walk<128>(a, stream);
}

void linear1_pair_walk_sm90(const Linear1PairWalkArgs& a, int head_dim, cudaStream_t stream) {
  if (head_dim == 64) launch_pair_walk<64>(a, stream);
  else launch_pair_walk<128>(a, stream);
}

}  // namespace fastmax
