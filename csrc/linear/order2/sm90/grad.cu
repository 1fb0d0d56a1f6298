// Gradients by states on Hopper, by wgmma and TMA, at head dims up to 64 with grad_v and grad_k from one load of every tile:
//
//   pass (Grads)      x    x2    y    y2    e of   time       result
//   kQueries          q    g     k    v     x      forward    grad_q = sum (g0 + g1 x.y) (x2.y2 + e) y
//   kKeys             k    v     q    g     y      backward   grad_k, the same sum
//   kKeysAndValues    k    v     q    g     y      backward   grad_k, and grad_v = sum f(x.y) y2
//
// A warpgroup owns 64 rows of x and x2, which stay in shared memory; persistent blocks of two warpgroups. For each tile T (64 features x
// all channels) of the snapshot W = x2 T^T on the tensor cores, and the product rule on the CUDA cores: with
//   P = sum_xg x[8s + x] x[8b + g] W[8x + g],    grad[8b + g] += sum_x x[8s + x] W[8x + g],  grad[8s + x] += sum_g x[8b + g] W[8x + g],
// which covers the tiles (s, s) with no special case, as the snapshot has weights for that. The gradient has the layout of an
// accumulator: block j of columns is registers 4j .. 4j + 3, of rows g and g + 8. Blocks are reached by constant indices, because the
// gradient is rotated by two blocks after every two stars; at head dim 128 it lies in shared memory. grad_v += features(x) T runs beside it.
//
// Where rows fade, what is read of the state fades with each row of x, and the sum over the pairs of a row, p = f(x.y) (x2.y2 + e), comes
// beside the gradient (portable/grad.cu). Sums of pairs wait in shared memory while there are tiles.
//
// The second moment needs no tiles of pairs: sum e y y^T is one product. Own chunk: scores and x2 . y2 by two products, both kinds of
// weights in registers as operands of the next two.

#include <algorithm>
#include <type_traits>

#include "core/launch.h"
#include "core/sm90/pipeline.h"
#include "core/sm90/ptx.h"
#include "core/sm90/wgmma.h"
#include "linear/order2/features.h"
#include "linear/order2/sm90/hopper_walk.h"
#include "linear/order2/sm90/kernels.h"

namespace fastmax {
namespace {

// Passes of the table above.
enum class Grads { kQueries, kKeys, kKeysAndValues };

template <int kHeadDim>
struct GradTileSm90 : HopperState<kHeadDim> {
  using State = HopperState<kHeadDim>;
  static constexpr int kWarpgroups = 2, kWarps = 4 * kWarpgroups;
  // A warpgroup more issues loads; but grad_v needs all registers, and the warps that compute take turns.
  static constexpr int threads(Grads grads) { return 128 * (kWarpgroups + (grads == Grads::kKeysAndValues ? 0 : 1)); }
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
  static constexpr int kRows = kWarpgroups * kTileRows;
  static constexpr int kStages = kHeadDim <= 64 ? 8 : 3;
  static constexpr int kStageBytes = 2 * State::kTileBytes;
  static constexpr int kStateStages = State::kTiles / 2;
  static constexpr int kXBuffers = kHeadDim <= 64 ? 2 : 1, kXBytes = 2 * State::kTileBytes;  // x and x2 of a warpgroup
  // The gradient while there are tiles of pairs: in registers, or of wide heads, where it would take half of them, in fp32 in shared memory.
  static constexpr bool kSumsInShared = kHeadDim == 128;
  static constexpr int kSumBytes = kSumsInShared ? kTileRows * kHeadDim * 4 : 0;  // of a warpgroup

  // Shared memory, from a multiple of 1024 bytes on.
  static constexpr int kX = kStages * kStageBytes;
  static constexpr int kScales = kX + kXBuffers * kWarpgroups * kXBytes;
  static constexpr int kSumsAt = kScales + kStages * kScaleBytes;
  static constexpr int kPairSums = kSumsAt + kWarpgroups * kSumBytes;  // of rows
  // How tiles of x, and of y of each stage, fade. Of wide heads it is read from memory.
  static constexpr int kDecayBytes = kSumsInShared ? 0 : static_cast<int>(sizeof(DecayTile));
  static constexpr int kXDecay = kPairSums + kRows * 4, kYDecay = kXDecay + kXBuffers * kWarpgroups * kDecayBytes;
  static constexpr int kXFull = kYDecay + kStages * kDecayBytes;
  static constexpr int kBarriers = kXFull + 8 * kWarpgroups * kXBuffers;
  static constexpr int kQueues = kBarriers + Ring<kStages>::kBarrierBytes;  // of each warp
  static constexpr int kQueueBytes = grads_with_values_sm90(kHeadDim) ? kWarps * SourceQueue::kBytes : 0;
  static constexpr int kSharedBytes = kSwizzledTileAlignment + kQueues + kQueueBytes;
  static_assert(kBarriers % 16 == 0 && kQueues % 16 == 0, "barriers and sources are aligned");
  static_assert(kSharedBytes <= shared_limit(90), "stages, x and barriers do not fit");
};

struct GradMaps {
  CUtensorMap x, x2, y, y2, grad, values;
};

template <int kHeadDim, Grads kGrads, DecayKind kDecayKind>
__global__ void __launch_bounds__(GradTileSm90<kHeadDim>::threads(kGrads), 1)
    linear_grad_sm90_kernel(const __grid_constant__ GradMaps maps, const GradArgs a, const View values_out,
                            const ItemsOfRows items) {
  using Tile = GradTileSm90<kHeadDim>;
  using RowTile = RowTileSm90<kHeadDim>;
  using Rows = Operand<RowTile>;
  using Products = Wgmma<Bf16, kHeadDim>;
  using Scores = Wgmma<Bf16, 64>;
  using Panel = Wgmma<Bf16, Tile::kPanelCols>;
  constexpr bool kBack = kGrads != Grads::kQueries, kValues = kGrads == Grads::kKeysAndValues;
  constexpr int kBlocks = Tile::kBlocks, kSteps = kHeadDim / 16;  // of 16 columns
  constexpr int kStages = Tile::kStages, kTileBytes = Tile::kTileBytes, kWarpgroups = Tile::kWarpgroups;
  constexpr bool kHasDecay = kDecayKind != DecayKind::kNone, kDecays = kDecayKind == DecayKind::kDecays;
  constexpr int kDecayBytes = kHasDecay ? Tile::kDecayBytes : 0;
  extern __shared__ uint8_t shared[];
  const uint32_t stages_at = first_tile(shared), x_at = stages_at + Tile::kX, scales_at = stages_at + Tile::kScales;
  const uint32_t x_full = stages_at + Tile::kXFull;
  const Ring<kStages> ring(stages_at + Tile::kBarriers);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32, warpgroup = warp / 4;
  if (threadIdx.x == 0) {
    ring.init(4 * kWarpgroups);
    for (int i = 0; i < kWarpgroups * Tile::kXBuffers; ++i) ptx::mbarrier_init(x_full + 8 * i, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  // A stage: two tiles of a snapshot; or a tile of y and one of y2, the heads of y in turn.
  const auto load_snapshot = [&](RingPosition at, const char* source) {
    ring.wait_until_empty(at);
    ring.expect(at, Tile::kStageBytes);
    ptx::bulk_load(stages_at + at.stage * Tile::kStageBytes, source, Tile::kStageBytes, ring.full(at));
  };
  const auto load_own = [&](RingPosition at, int own, int first_token, int first_y_head, int batch) {
    const uint32_t stage = stages_at + at.stage * Tile::kStageBytes;
    const int token = first_token + (kBack ? -(own / a.y_group) : own) * kTileRows, y_head = first_y_head + (kBack ? own % a.y_group : 0);
    ring.wait_until_empty(at);
    ring.expect(at, Tile::kStageBytes + (kBack ? kScaleBytes : 0) + kDecayBytes);
    if constexpr (kDecayBytes != 0) {
      const int64_t state = int64_t{batch} * a.state_heads + first_y_head / a.y_group;
      ptx::bulk_load(stages_at + Tile::kYDecay + at.stage * kDecayBytes, decay_tile_at(a, state, token), kDecayBytes, ring.full(at));
    }
    RowTile::load(stage, maps.y, ring.full(at), token, y_head, batch);
    RowTile::load(stage + kTileBytes, maps.y2, ring.full(at), token, y_head, batch);
    if (kBack) {
      ptx::bulk_load(scales_at + at.stage * kScaleBytes,
                     tile_scales(a.y_scale, a.ny, int64_t{batch} * a.state_heads * a.y_group + y_head, token), kScaleBytes, ring.full(at));
    }
  };
  if (!kValues && warpgroup == kWarpgroups) {
    ptx::fewer_registers<Tile::kProducerRegisters>();
    if (warp != 4 * kWarpgroups || lane != 0) return;
    RingPosition at;
    for (int index = blockIdx.x; index < items.count; index += gridDim.x) {
      const ItemSource source(a, items, index, a.snapshots, Tile::kStateStages, Tile::kSnapshotBytes);
      for (int i = 0; i < source.state_stages; ++i, at.template advance<kStages>()) {
        load_snapshot(at, source.snapshot + i * Tile::kStageBytes);
      }
      for (int own = 0; own < source.own_stages; ++own, at.template advance<kStages>()) {
        load_own(at, own, source.token, source.y_head, source.batch);
      }
    }
    return;
  }
  if constexpr (!kValues) ptx::more_registers<Tile::kConsumerRegisters>();

  // With values: loads are issued kAhead stages before they are needed, one for each stage that is used.
  constexpr int kAhead = kStages - 2;
  const SourceQueue queue{stages_at + Tile::kQueues + warp * SourceQueue::kBytes};
  const auto put_source = [&](int item) {  // the block's, by any lane
    queue.put(item, ItemSource(a, items, blockIdx.x + item * gridDim.x, a.snapshots, Tile::kStateStages, Tile::kSnapshotBytes));
  };
  struct {
    int item, stage, stages, count;
  } loads = {0, 0, 0, 0};
  const auto load_stage = [&] {
    if (!kValues || loads.stages == 0) return;
    if (lane == 0 && warp == loads.count % Tile::kWarps) {
      const RingPosition at{loads.count % kStages, static_cast<uint32_t>(loads.count / kStages % 2)};
      const int own = loads.stage - queue.state_stages(loads.item);
      if (own < 0) load_snapshot(at, queue.snapshot(loads.item) + loads.stage * Tile::kStageBytes);
      else load_own(at, own, queue.token(loads.item), queue.y_head(loads.item), queue.batch(loads.item));
    }
    __syncwarp();
    ++loads.count;
    if (++loads.stage == loads.stages) loads.stage = 0, loads.stages = queue.stages(++loads.item);
  };
  // The same where the stage kAhead from here is of the item's snapshot too. Where rows fade, and each place that loads can load
  // everything, there are more instructions than a cache of them holds (128 KB).
  constexpr int kLongStages = 1 + kBlocks / 4 * Tile::star_tiles(0);  // to the end of the longer passes
  constexpr bool kLongLoadState = kHasDecay && kValues && kLongStages - 1 + kAhead < Tile::kStateStages;  // not at head_dim 32
  const auto load_state_stage = [&] {
    if constexpr (kLongLoadState) {
      if (lane == 0 && warp == loads.count % Tile::kWarps) {
        const RingPosition at{loads.count % kStages, static_cast<uint32_t>(loads.count / kStages % 2)};
        load_snapshot(at, queue.snapshot(loads.item) + loads.stage * Tile::kStageBytes);
      }
      __syncwarp();
      ++loads.count, ++loads.stage;
    } else {
      load_stage();
    }
  };
  if constexpr (kValues) {
    if (lane < SourceQueue::kItems - 1) put_source(lane);
    __syncwarp();
    loads.stages = queue.stages(0);
    for (int i = 0; i < kAhead; ++i) load_stage();
  }

  [[maybe_unused]] const auto x_decay_at = [&](int buffer) {
    return static_cast<uint32_t>(stages_at + Tile::kXDecay + (kWarpgroups * buffer + warpgroup) * kDecayBytes);
  };
  const auto load_x = [&](int index, int count) {  // a thread of the warpgroup
    if (index >= items.count) return;
    const ItemsOfRows::Item item = items.at(a, index);
    const int buffer = count % Tile::kXBuffers;
    const uint32_t barrier = x_full + 8 * (kWarpgroups * buffer + warpgroup);
    const uint32_t x = x_at + (kWarpgroups * buffer + warpgroup) * Tile::kXBytes;
    const int token = tile_token(a, a.nx, item.row + warpgroup * kTileRows);
    prefetch_sums<Tile::kSums>(a, a.sums, item);
    ptx::mbarrier_arrive_expect(barrier, Tile::kXBytes + kDecayBytes);
    if constexpr (kDecayBytes != 0) {
      const int64_t state = static_cast<int64_t>(item.batch) * a.state_heads + item.state_head;
      ptx::bulk_load(x_decay_at(buffer), decay_tile(a, state, a.seen_end(item.row + warpgroup * kTileRows)), kDecayBytes, barrier);
    }
    RowTile::load(x, maps.x, barrier, token, item.x_head, item.batch);
    RowTile::load(x + kTileBytes, maps.x2, barrier, token, item.x_head, item.batch);
  };
  if (threadIdx.x % 128 == 0) {
    for (int i = 0; i < Tile::kXBuffers; ++i) load_x(blockIdx.x + i * gridDim.x, i);
  }

  const int w4 = warp % 4, t = lane % 4, g = lane / 4, row = 16 * w4 + g;
  RingPosition at;
  const auto stage = [&] { return stages_at + at.stage * Tile::kStageBytes; };
  // Of the block's items only the number is kept in a register: what an item is is worked out again where it is needed.
  for (int count = 0;; ++count) {
    const int index = blockIdx.x + count * gridDim.x;
    if (index >= items.count) break;
    const auto item_again = [&] { return items.at(a, blockIdx.x + ptx::keep_in_register(count) * gridDim.x); };
    const ItemsOfRows::Item item = items.at(a, index);
    if constexpr (kValues) {
      __syncwarp();
      if (lane == 0) put_source(count + SourceQueue::kItems - 1);
      __syncwarp();
    }
    const int buffer = count % Tile::kXBuffers;
    const bool has_state = a.has_state(item.chunk);
    const uint32_t x = x_at + (kWarpgroups * buffer + warpgroup) * Tile::kXBytes, x2 = x + kTileBytes;
    float grad[kHeadDim / 2], values[kValues ? kHeadDim / 2 : 1], x_e[2] = {0.f, 0.f};
    ptx::mbarrier_wait(x_full + 8 * (kWarpgroups * buffer + warpgroup), count / Tile::kXBuffers % 2);
    // Lanes may leave the wait apart, and nothing before the first product brings them together: but one of them issues loads there, by
    // uniform registers, which the others would write to meanwhile.
    if constexpr (kValues) __syncwarp();
    const auto load_x_e = [&](const ItemsOfRows::Item& item) {
      if (kBack) return;
      const float* e = a.x_scale.data + item.x_head_index * a.x_scale.head;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int x_row = item.row + warpgroup * kTileRows + row + 8 * r;
        x_e[r] = x_row < a.nx ? e[x_row] : 0.f;
      }
    };

    // Of rows row and row + 8 of x, or of x2 behind it, two columns of block j. Where they lie is worked out at each use of this: from one
    // to the next it would take registers of the loops between.
    const auto lane_columns = [&] {
      return [first = x + 4 * t, own_row = static_cast<int>(ptx::keep_in_register(row))](int r, int j, int behind = 0) {
        const uint32_t pair = ptx::load_shared_u32(first + RowTile::chunk_offset(own_row + 8 * r, j) + behind);
        return make_float2(ptx::low_bf16(pair), ptx::high_bf16(pair));
      };
    };
    const auto pair_sum_at = [&](int r) { return stages_at + Tile::kPairSums + (warpgroup * kTileRows + row + 8 * r) * 4; };
    if (has_state) {
      // Second moment and first order.
      {
        load_x_e(item);
        ring.wait_until_full(at), load_state_stage();
        const Rows x_operand(x), x2_operand = x_operand.behind(kTileBytes), moment(stage());
        float m[kHeadDim / 2];
        wgmma_fence();
        Products::template ss_first<Major::kK, Major::kMN>(m, x_operand.k_major(0), moment.mn_major(0));
#pragma unroll
        for (int k = 1; k < kSteps; ++k) {
          Products::template ss<Major::kK, Major::kMN>(m, x_operand.k_major(k), moment.behind(k / 4 * kTileBytes).mn_major(k % 4));
        }
        if constexpr (Tile::kPanels == 2) {
          wgmma_commit();
          wgmma_wait<0>();
          ring.release(at, lane);
          at.template advance<kStages>();
          ring.wait_until_full(at);
          wgmma_fence();
        }
        const Rows linear(stage() + (Tile::kPanels == 1 ? kTileBytes : 0));
#pragma unroll
        for (int panel = 0; panel < Tile::kPanels; ++panel) {  // of the gradient: a tile has as many columns of y
          constexpr int kPanelSums = Tile::kPanelCols / 2;
          float(&of_panel)[kPanelSums] = reinterpret_cast<float(&)[kPanelSums]>(grad[kPanelSums * panel]);
          const Rows features = linear.behind(panel * kTileBytes);
          Panel::template ss_first<Major::kK, Major::kK>(of_panel, x2_operand.k_major(0), features.k_major(0));
#pragma unroll
          for (int k = 1; k < kSteps; ++k) Panel::template ss<Major::kK, Major::kK>(of_panel, x2_operand.k_major(k), features.k_major(k));
        }
        if constexpr (kValues) {
          Products::template ss_first<Major::kK, Major::kMN>(values, x_operand.k_major(0), linear.mn_major(0));
#pragma unroll
          for (int k = 1; k < kSteps; ++k) Products::template ss<Major::kK, Major::kMN>(values, x_operand.k_major(k), linear.mn_major(k));
        }
        wgmma_commit();
        wgmma_wait<0>();
        keep(m), keep(grad);
        if constexpr (kValues) keep(values);
        ring.release(at, lane);
        at.template advance<kStages>();
        const float* state_sums = a.sums + item.slot * Tile::kSums;
        // What the rows' pairs have of orders 0 and 1, and half of order 1 less, which the gradient brings further down.
        [[maybe_unused]] const auto columns = lane_columns();
        [[maybe_unused]] float order0[2] = {0.f, 0.f}, order1[2] = {0.f, 0.f};
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          const float2 y = ptx::load_global_f32x2(state_sums + Tile::kSumY + 8 * j + 2 * t);
          [[maybe_unused]] float2 w;
          if constexpr (kValues || kDecays) w = ptx::load_global_f32x2(state_sums + Tile::kSumW + 8 * j + 2 * t);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float e = kBack ? 1.f : x_e[r];
            float &grad0 = grad[4 * j + 2 * r], &grad1 = grad[4 * j + 2 * r + 1];
            if constexpr (kDecays) {
              const float2 x_pair = columns(r, j), x2_pair = columns(r, j, kTileBytes);
              order0[r] = fmaf(x2_pair.x, w.x, fmaf(x2_pair.y, w.y, order0[r]));
              order1[r] = fmaf(x_pair.x, fmaf(e * a.g0, y.x, grad0), order1[r]);
              order1[r] = fmaf(x_pair.y, fmaf(e * a.g0, y.y, grad1), order1[r]);
            }
            grad0 += e * fmaf(a.g0, y.x, m[4 * j + 2 * r]);
            grad1 += e * fmaf(a.g0, y.y, m[4 * j + 2 * r + 1]);
            if constexpr (kValues) {
              values[4 * j + 2 * r] = fmaf(a.c0, w.x, values[4 * j + 2 * r]);
              values[4 * j + 2 * r + 1] = fmaf(a.c0, w.y, values[4 * j + 2 * r + 1]);
            }
          }
        }
        if constexpr (kDecays) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if (t == 0) order0[r] += (kBack ? 1.f : x_e[r]) * state_sums[Tile::kSumOne];
            const float sum = quad_sum(fmaf(a.c0, order0[r], 0.5f * order1[r]));
            if (t == 0) ptx::store_shared_f32(pair_sum_at(r), sum);
          }
        }
      }

      // Tiles of pairs, two stars a pass.
      const Rows x2_operand(x2);
      float star_x[2][8], star_sum[2][8];
      uint32_t scalar[kValues ? 2 : 1][8];
      const auto load_star = [&](int star) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          uint32_t columns[4];
          ptx::load_shared_u32x4(columns, x + RowTile::chunk_offset(row + 8 * r, star));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            star_x[r][2 * i] = ptx::low_bf16(columns[i]), star_x[r][2 * i + 1] = ptx::high_bf16(columns[i]);
            if constexpr (kValues) scalar[r][2 * i] = ptx::duplicate_half<0>(columns[i]), scalar[r][2 * i + 1] = ptx::duplicate_half<1>(columns[i]);
            star_sum[r][2 * i] = star_sum[r][2 * i + 1] = 0.f;
          }
        }
      };
      // Of a tile: base is what ldmatrix read of x's other block, gradient the registers of that block.
      const auto add_products = [&](const float* w, float* gradient, const uint32_t* base) {
        const float b0 = ptx::low_bf16(base[0]), b1 = ptx::high_bf16(base[0]);
        const float b2 = ptx::low_bf16(base[1]), b3 = ptx::high_bf16(base[1]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          gradient[0] = fmaf(star_x[0][i], w[4 * i], gradient[0]), gradient[1] = fmaf(star_x[0][i], w[4 * i + 1], gradient[1]);
          gradient[2] = fmaf(star_x[1][i], w[4 * i + 2], gradient[2]), gradient[3] = fmaf(star_x[1][i], w[4 * i + 3], gradient[3]);
          star_sum[0][i] = fmaf(b1, w[4 * i + 1], fmaf(b0, w[4 * i], star_sum[0][i]));
          star_sum[1][i] = fmaf(b3, w[4 * i + 3], fmaf(b2, w[4 * i + 2], star_sum[1][i]));
        }
      };
      // What a star's tiles gave its own block: summed over the lanes of a row, each of which keeps its two columns.
      const auto add_star = [&](float* gradient) {
        const bool upper = t & 2, odd = t & 1;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float v[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            v[i] = (upper ? star_sum[r][i + 4] : star_sum[r][i]) + __shfl_xor_sync(0xffffffffu, upper ? star_sum[r][i] : star_sum[r][i + 4], 2);
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            gradient[2 * r + i] += (odd ? v[i + 2] : v[i]) + __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 2], 1);
          }
        }
      };
      const auto rotate = [&] {
        float first[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) first[i] = grad[i];
#pragma unroll
        for (int i = 0; i < kHeadDim / 2 - 8; ++i) grad[i] = grad[i + 8];
#pragma unroll
        for (int i = 0; i < 8; ++i) grad[kHeadDim / 2 - 8 + i] = first[i];
      };
      // kTiles: of each of the two stars, star and star + 1; tile u of the pass is (star + u / kTiles, that + u % kTiles).
      const auto load_base = [&](uint32_t(&base)[2], int star, int block) {
        ptx::ldmatrix_x2(base, x + RowTile::chunk_offset(16 * w4 + lane % 16, (star + block) % kBlocks));
      };
      // Without grad_v, up to head dim 64: W of a stage at a time, two of them in flight.
      const auto pass = [&](auto tiles, int star) {
        constexpr int kTiles = decltype(tiles)::value;
        float w[2][64];
        uint32_t base[2][2];
        RingPosition used = at;
        const auto issue = [&](int i) {
          used = at;
          ring.wait_until_full(at);
          const Rows features(stage());  // of both tiles of the stage
          at.template advance<kStages>();
          wgmma_fence();
          Wgmma<Bf16, 128>::template ss_first<Major::kK, Major::kK>(w[i % 2], x2_operand.k_major(0), features.k_major(0));
#pragma unroll
          for (int k = 1; k < kSteps; ++k) Wgmma<Bf16, 128>::template ss<Major::kK, Major::kK>(w[i % 2], x2_operand.k_major(k), features.k_major(k));
          wgmma_commit();
        };
        load_star(star);
        issue(0);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const RingPosition own = used;
#pragma unroll
          for (int j = 0; j < 2; ++j) load_base(base[j], star, (2 * i + j) / kTiles + (2 * i + j) % kTiles);
          if (i + 1 < kTiles) issue(i + 1), wgmma_wait<1>();
          else wgmma_wait<0>();
          keep(w[i % 2]);
          ring.release(own, lane);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int u = 2 * i + j;
            add_products(w[i % 2] + 32 * j, grad + 4 * (u / kTiles + u % kTiles), base[j]);
            if (u % kTiles == kTiles - 1) {
              add_star(grad + 4 * (u / kTiles));
              if (u + 1 < 2 * kTiles) load_star(star + 1);
            }
          }
        }
        rotate();
      };
      // W and grad_v in turn: the products of W run on the CUDA cores while those of grad_v run on the tensor cores.
      const auto pass_with_values = [&](auto tiles, int star) {
        constexpr int kTiles = decltype(tiles)::value;
        float w[32];
        uint32_t base[2], next_base[2], f[16];  // f: features, of the tile whose products with them are in flight
        Rows features(stages_at);  // of the tile
        RingPosition used = at;
        const auto issue_w = [&](int u) {
          if (u % 2 == 0) {
            used = at;
            ring.wait_until_full(at);
            features = Rows(stage());
            at.template advance<kStages>();
          } else {
            features = features.behind(kTileBytes);
          }
          wgmma_fence();
          Scores::template ss_first<Major::kK, Major::kK>(w, x2_operand.k_major(0), features.k_major(0));
#pragma unroll
          for (int k = 1; k < kSteps; ++k) Scores::template ss<Major::kK, Major::kK>(w, x2_operand.k_major(k), features.k_major(k));
          wgmma_commit();
          if (u % 2 == 0 && kTiles == Tile::star_tiles(0)) load_state_stage();
          else if (u % 2 == 0) load_stage();
        };
        const auto issue_values = [&] {
          if constexpr (kValues) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#pragma unroll
              for (int i = 0; i < 4; ++i) f[4 * k + i] = ptx::multiply_bf16x2(base[i % 2], scalar[i % 2][2 * k + i / 2]);
            }
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) Products::template rs<Major::kMN>(values, f + 4 * k, features.mn_major(k));
            wgmma_commit();
          }
        };
        load_star(star);
        load_base(base, star, 0);
        issue_w(0);
        issue_values();
#pragma unroll
        for (int u = 0; u < 2 * kTiles; ++u) {
          if (u + 1 < 2 * kTiles) load_base(next_base, star, (u + 1) / kTiles + (u + 1) % kTiles);
          const RingPosition own = used;
          wgmma_wait<1>();
          keep(w);
          add_products(w, grad + 4 * (u / kTiles + u % kTiles), base);
          if (u % kTiles == kTiles - 1) {
            add_star(grad + 4 * (u / kTiles));
            if (u + 1 < 2 * kTiles) load_star(star + 1);
          }
          base[0] = next_base[0], base[1] = next_base[1];
          if (u + 1 < 2 * kTiles) {
            issue_w(u + 1);
            wgmma_wait<1>();
            if (u % 2 == 1) ring.release(own, lane);
            issue_values();
          } else {
            wgmma_wait<0>();
            ring.release(own, lane);
          }
        }
        rotate();
        if constexpr (kValues) keep(values);
      };
      constexpr auto kLong = std::integral_constant<int, Tile::star_tiles(0)>{};  // the lower stars have one tile more
      constexpr auto kShort = std::integral_constant<int, Tile::star_tiles(kBlocks - 1)>{};
      if constexpr (!Tile::kSumsInShared) {
        const auto run = [&](auto tiles, int star) {
          if constexpr (kValues) pass_with_values(tiles, star);
          else pass(tiles, star);
        };
        // At head dim 32 each loop has one pass. Without loops the compiler would mix passes, and run out of registers (C7512).
        const int half = kBlocks == 4 ? static_cast<int>(ptx::keep_in_register(kBlocks / 2)) : kBlocks / 2;
        for (int star = 0; star < half; star += 2) run(kLong, star);
        for (int star = half; star < kBlocks; star += 2) run(kShort, star);
      } else {
        // Of a lane, block after block. While one warpgroup has products on the CUDA cores, the other has its W made.
        const uint32_t sums_at = stages_at + Tile::kSumsAt + warpgroup * Tile::kSumBytes + threadIdx.x % 128 * 16;
        const auto sum_of = [&](int block) { return sums_at + block * 128 * 16; };
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          ptx::store_shared_f32x4(sum_of(j), make_float4(grad[4 * j], grad[4 * j + 1], grad[4 * j + 2], grad[4 * j + 3]));
        }
        const auto add_to = [&](int block, const auto& add) {
          const float4 before = ptx::load_shared_f32x4(sum_of(block));
          float sum[4] = {before.x, before.y, before.z, before.w};
          add(sum);
          ptx::store_shared_f32x4(sum_of(block), make_float4(sum[0], sum[1], sum[2], sum[3]));
        };
        int half = 0;  // of the stage
        const auto pass_in_shared = [&](auto tiles, int star) {  // of a star; W of a tile is made beside the products of the one before
          constexpr int kTiles = decltype(tiles)::value;
          float w[2][32];
          const auto issue = [&](float(&w)[32]) {
            ring.wait_until_full(at);
            const Rows features(stage() + half * kTileBytes);
            wgmma_fence();
            Scores::template ss_first<Major::kK, Major::kK>(w, x2_operand.k_major(0), features.k_major(0));
#pragma unroll
            for (int k = 1; k < kSteps; ++k) Scores::template ss<Major::kK, Major::kK>(w, x2_operand.k_major(k), features.k_major(k));
            wgmma_commit();
          };
          load_star(star);
          issue(w[0]);
#pragma unroll
          for (int offset = 0; offset < kTiles; ++offset) {
            const RingPosition own = at;
            const bool releases = half == 1;
            if (releases) at.template advance<kStages>();
            half ^= 1;
            if (offset + 1 < kTiles) issue(w[(offset + 1) % 2]), wgmma_wait<1>();
            else wgmma_wait<0>();
            keep(w[offset % 2]);
            ring.release(own, lane, releases);
            uint32_t base[2];
            load_base(base, star, offset);
            add_to((star + offset) % kBlocks, [&](float* sum) { add_products(w[offset % 2], sum, base); });
          }
          add_to(star, add_star);
        };
        for (int star = 0; star < kBlocks / 2; ++star) pass_in_shared(kLong, star);
        for (int star = kBlocks / 2; star < kBlocks; ++star) pass_in_shared(kShort, star);
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          const float4 sum = ptx::load_shared_f32x4(sum_of(j));
          grad[4 * j] = sum.x, grad[4 * j + 1] = sum.y, grad[4 * j + 2] = sum.z, grad[4 * j + 3] = sum.w;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) grad[i] = 0.f;
      if constexpr (kValues) {
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) values[i] = 0.f;
      }
    }
    keep(grad);
    if constexpr (kValues) keep(values);

    // What is left of earlier chunks.
    [[maybe_unused]] WalkSum x_sums[2];
    [[maybe_unused]] float pairs[2] = {0.f, 0.f};  // this lane's part of the sums of pairs
    const auto x_decay = [&](const ItemsOfRows::Item& item) {
      if constexpr (kDecayBytes != 0) {
        return SharedDecayTile{x_decay_at(static_cast<int>(ptx::keep_in_register(count)) % Tile::kXBuffers)};
      } else {
        const int64_t state = static_cast<int64_t>(item.batch) * a.state_heads + item.state_head;
        return GlobalDecayTile{decay_tile(a, state, a.seen_end(item.row + warpgroup * kTileRows))};
      }
    };
    if constexpr (kHasDecay) {
      const auto decay = x_decay(item_again());
      x_sums[0] = decay.sum(row), x_sums[1] = decay.sum(row + 8);
      if (has_state) {
        [[maybe_unused]] const auto columns = lane_columns();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float factor = decay.since_chunk(row + 8 * r);
          float of_gradient = 0.f;
#pragma unroll
          for (int j = 0; j < kBlocks; ++j) {
            float2 x_pair;
            if constexpr (kDecays) x_pair = columns(r, j);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float& of_column = grad[4 * j + 2 * r + i];
              if (kDecays) of_gradient = fmaf(i == 0 ? x_pair.x : x_pair.y, of_column, of_gradient);
              of_column = decayed(of_column, factor);
              if constexpr (kValues) values[4 * j + 2 * r + i] = decayed(values[4 * j + 2 * r + i], factor);
            }
          }
          if (kDecays) pairs[r] = decayed(fmaf(0.5f, of_gradient, t == 0 ? ptx::load_shared_f32(pair_sum_at(r)) : 0.f), factor);
        }
      }
    }

    // The own chunk.
    {
      const ItemsOfRows::Item item = item_again();
      load_x_e(item);
      const Rows x_operand(x), x2_operand = x_operand.behind(kTileBytes);
      uint32_t slopes[16], weights[kValues ? 16 : 1];
      RingPosition before;  // the stage before, not yet released
      bool releases = false;
      const auto y_decay = [&]([[maybe_unused]] int tile) {  // of the stage's tile of y
        if constexpr (kDecayBytes != 0) {
          return SharedDecayTile{static_cast<uint32_t>(stages_at + Tile::kYDecay + at.stage * kDecayBytes)};
        } else {
          const int64_t state = static_cast<int64_t>(item.batch) * a.state_heads + item.state_head;
          return GlobalDecayTile{decay_tile(a, state, a.chunk_begin(item.chunk)) + tile};
        }
      };
      const auto add_tile = [&](auto is_diagonal, auto pair_factors, [[maybe_unused]] int tile) {
        constexpr bool kDiagonal = decltype(is_diagonal)::value;
        constexpr PairFactors kFactors = decltype(pair_factors)::value;
        ring.wait_until_full(at);
        if constexpr (!kHasDecay) load_stage();
        const Rows y(stage()), y2 = y.behind(kTileBytes);
        const uint32_t y_e = scales_at + at.stage * kScaleBytes;
        float s[32], p[32];
        wgmma_fence();
        Scores::template ss_first<Major::kK, Major::kK>(s, x_operand.k_major(0), y.k_major(0));
#pragma unroll
        for (int k = 1; k < kSteps; ++k) Scores::template ss<Major::kK, Major::kK>(s, x_operand.k_major(k), y.k_major(k));
        Scores::template ss_first<Major::kK, Major::kK>(p, x2_operand.k_major(0), y2.k_major(0));
#pragma unroll
        for (int k = 1; k < kSteps; ++k) Scores::template ss<Major::kK, Major::kK>(p, x2_operand.k_major(k), y2.k_major(k));
        wgmma_commit();
        const auto weigh = [&](int j, [[maybe_unused]] const float(&factors)[2][2]) {
          float2 column_e = make_float2(0.f, 0.f);
          if (kBack) column_e = ptx::load_shared_f32x2(y_e + (8 * j + 2 * t) * 4);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float slope[2], weight[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const float score = s[4 * j + 2 * r + i], e = kBack ? (i == 0 ? column_e.x : column_e.y) : x_e[r];
              // In memory a walk back in time goes from later rows to earlier ones.
              const int column = 8 * j + 2 * t + i, x_row = row + 8 * r;
              const bool seen = !kDiagonal || (kBack ? column >= x_row : column <= x_row);
              float centred = p[4 * j + 2 * r + i] + e, f = 0.f;
              if (kValues || kDecays) f = fmaf(score, fmaf(score, 0.5f * a.g1, a.g0), a.c0);
              if constexpr (kHasDecay) {
                centred *= factors[r][i];
                // A row's pair with its own token does not fade, and does not count.
                if (kDecays) pairs[r] = seen && (!kDiagonal || column != x_row) ? fmaf(f, centred, pairs[r]) : pairs[r];
                f *= factors[r][i];
              }
              slope[i] = seen ? fmaf(score, a.g1, a.g0) * centred : 0.f;
              if (kValues) weight[i] = seen ? f : 0.f;
            }
            slopes[2 * j + r] = ptx::pack_bf16x2(slope[0], slope[1]);
            if constexpr (kValues) weights[2 * j + r] = ptx::pack_bf16x2(weight[0], weight[1]);
          }
        };
        // Before the wait: what is in memory comes beside the products.
        const PairDecay<kBack, kFactors, decltype(y_decay(0))> decay(y_decay(tile), x_sums[0], x_sums[1]);
        wgmma_wait<0>();
        keep(s), keep(p);
        ring.release(before, lane, releases);
        decay.for_each_block(weigh);
        keep(slopes);
        if constexpr (kValues) keep(weights);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) Products::template rs<Major::kMN>(grad, slopes + 4 * k, y.mn_major(k));
        if constexpr (kValues) {
#pragma unroll
          for (int k = 0; k < 4; ++k) Products::template rs<Major::kMN>(values, weights + 4 * k, y2.mn_major(k));
        }
        wgmma_commit();
        wgmma_wait<0>();
        keep(grad);
        if constexpr (kValues) keep(values);
        before = at, releases = true;
        at.template advance<kStages>();
      };
      const auto skip_tile = [&] {
        ring.release(before, lane, releases);  // or the ring would fill up
        releases = false;
        ring.wait_until_full(at);
        if constexpr (!kHasDecay) load_stage();
        ring.release(at, lane);
        at.template advance<kStages>();
      };
      const int y_group = kBack ? a.y_group : 1;
      const int own_stages = item.own_tiles * y_group, diagonal = (item.first_own + warpgroup) * y_group;
      const int diagonal_end = min(diagonal + y_group, own_stages);
      int own = 0;
      const auto tile_at = [&](int own) { return kBack ? own / y_group : own; };
      // Which factors a tile has is known before its products.
      constexpr OfPairFactors<PairFactors::kOne> kOne;
      constexpr OfPairFactors<PairFactors::kRowsAndColumns> kRowsAndColumns;
      constexpr OfPairFactors<PairFactors::kPairs> kPairs;
      [[maybe_unused]] WalkSum first_x{};
      if constexpr (kHasDecay) first_x = x_decay(item).sum(kFirstOfTile<kBack>);
      for (; own < diagonal && own < own_stages; ++own) {
        const int tile = tile_at(own);
        if constexpr (!kHasDecay) {
          add_tile(std::false_type{}, kOne, tile);
        } else {
          if constexpr (kDecayBytes != 0) ring.wait_until_full(at), load_stage();
          if (is_fully_decayed(first_x, y_decay(tile).sum(kLastOfTile<kBack>))) skip_tile();
          else if constexpr (kDecays) add_tile(std::false_type{}, kRowsAndColumns, tile);
          else if (is_whole<kBack>(x_decay(item), y_decay(tile))) add_tile(std::false_type{}, kOne, tile);
          else add_tile(std::false_type{}, kPairs, tile);
        }
      }
      wgmma_wait<0>();
      for (; own < diagonal_end; ++own) {
        const int tile = tile_at(own);
        if constexpr (!kHasDecay) {
          add_tile(std::true_type{}, kOne, tile);
        } else if constexpr (kDecays && kGrads == Grads::kQueries && kHeadDim == 64) {  // whose loads are another warp's
          add_tile(std::true_type{}, kPairs, tile);  // of two kinds the compiler would take registers from tiles of the state
        } else {
          if constexpr (kDecayBytes != 0) ring.wait_until_full(at), load_stage();
          const bool is_plain = kDecays ? !is_far<kBack>(y_decay(tile)) : is_whole<kBack>(x_decay(item), y_decay(tile));
          if (is_plain) add_tile(std::true_type{}, std::conditional_t<kDecays, decltype(kRowsAndColumns), decltype(kOne)>{}, tile);
          else add_tile(std::true_type{}, kPairs, tile);
        }
      }
      wgmma_wait<0>();
      for (; own < own_stages; ++own) {  // of the other warpgroup alone
        if constexpr (kHasDecay) load_stage();
        skip_tile();
      }
      ring.release(before, lane, releases);
    }

    // The gradients, into the places of x and x2, and from there to memory.
    const ItemsOfRows::Item here = item_again();
    const int token = tile_token(a, a.nx, here.row + warpgroup * kTileRows);
    keep(grad);
    if constexpr (kValues) keep(values);
    if (kBack && a.x_mask.data != nullptr) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int x_token = token + row + 8 * r;
        const bool is_dropped = x_token >= 0 && x_token < a.nx && mask_pointer(a.x_mask, here.batch)[static_cast<int64_t>(x_token) * a.x_mask.token] == 0;
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (is_dropped) grad[4 * j + 2 * r + i] = 0.f;
            if constexpr (kValues) {
              if (is_dropped) values[4 * j + 2 * r + i] = 0.f;
            }
          }
        }
      }
    }
    if (kDecays && a.pair_sums.data != nullptr) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int x_token = token + row + 8 * r;
        const float sum = quad_sum(pairs[r]);
        if (t != 0 || x_token < 0 || x_token >= a.nx) continue;
        const bool is_dropped = kBack && a.x_mask.data != nullptr &&
                                mask_pointer(a.x_mask, here.batch)[static_cast<int64_t>(x_token) * a.x_mask.token] == 0;
        a.pair_sums.data[here.x_head_index * a.pair_sums.head + x_token] = is_dropped ? 0.f : sum;
      }
    }
    ptx::barrier_wait<128>(1 + warpgroup);  // other warps may still have products of x and x2 (read.cu)
    store_accumulator<Bf16, RowTile>(x, 0, grad, 1.f, 1.f, w4, lane);
    if constexpr (kValues) store_accumulator<Bf16, RowTile>(x2, 0, values, 1.f, 1.f, w4, lane);
    ptx::fence_proxy_async();
    ptx::barrier_wait<128>(1 + warpgroup);
    const bool begins_before = kBack && token < 0;
    if (begins_before) {
      store_rows<kHeadDim>(x, a.out, here.batch, here.x_head, token, a.nx, a.d, a.adds);
      if (kValues) store_rows<kHeadDim>(x2, values_out, here.batch, here.x_head, token, a.nx, a.dv, a.adds);
      ptx::barrier_wait<128>(1 + warpgroup);
    }
    if (w4 == 0 && lane == 0) {
      if (!begins_before) {
        store_tile<RowTile>(x, maps.grad, token, here.x_head, here.batch, a.adds);
        if (kValues) store_tile<RowTile>(x2, maps.values, token, here.x_head, here.batch, a.adds);
      }
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
      load_x(blockIdx.x + (count + Tile::kXBuffers) * gridDim.x, count + Tile::kXBuffers);
    }
  }
  if (w4 == 0 && lane == 0) ptx::bulk_wait<0>();
}

template <int kHeadDim, Grads kGrads, DecayKind kDecayKind>
void launch_grad(const GradArgs& a, const View& values, int sm_count, cudaStream_t stream) {
  using Tile = GradTileSm90<kHeadDim>;
  const int x_heads = a.state_heads * a.x_group, y_heads = a.state_heads * a.y_group;
  const ItemsOfRows items(a, Tile::kRows);
  GradMaps maps{};
  maps.x = rows_map<kHeadDim>(a.x, a, x_heads, a.nx, a.d), maps.x2 = rows_map<kHeadDim>(a.x2, a, x_heads, a.nx, a.dv);
  maps.y = rows_map<kHeadDim>(a.y, a, y_heads, a.ny, a.d), maps.y2 = rows_map<kHeadDim>(a.y2, a, y_heads, a.ny, a.dv);
  maps.grad = rows_map<kHeadDim>(a.out, a, x_heads, a.nx, a.d);
  if (kGrads == Grads::kKeysAndValues) maps.values = rows_map<kHeadDim>(values, a, x_heads, a.nx, a.dv);
  launch_kernel(kDecayKind == DecayKind::kNone ? "linear_grad_sm90" : "linear_grad_decay_sm90", linear_grad_sm90_kernel<kHeadDim, kGrads, kDecayKind>,
                std::min(sm_count, items.count), Tile::threads(kGrads), Tile::kSharedBytes, stream, maps, a, values, items);
}

template <int kHeadDim, Grads kGrads>
void launch(const GradArgs& a, const View& values, int sm_count, cudaStream_t stream) {
  if (!a.decay) launch_grad<kHeadDim, kGrads, DecayKind::kNone>(a, values, sm_count, stream);
  else if (a.decay.bounds_alone) launch_grad<kHeadDim, kGrads, DecayKind::kBounds>(a, values, sm_count, stream);
  else launch_grad<kHeadDim, kGrads, DecayKind::kDecays>(a, values, sm_count, stream);
}

}  // namespace

void linear_grad_sm90(const GradArgs& a, int head_dim, int sm_count, cudaStream_t stream) {
  dispatch_head_dim(HopperLinear2HeadDims(), head_dim,
                    [&](auto dim) { launch<dim, Grads::kQueries>(a, {}, sm_count, stream); });
}
void linear_grads_sm90(const ReadArgs& values, const GradArgs& a, int head_dim, int sm_count, cudaStream_t stream) {
  dispatch_head_dim(HopperLinear2HeadDims(), head_dim, [&](auto dim) {
    if constexpr (grads_with_values_sm90(dim)) {
      launch<dim, Grads::kKeysAndValues>(a, values.out, sm_count, stream);
    } else {
      linear_read_sm90(values, head_dim, sm_count, stream);
      launch<dim, Grads::kKeys>(a, {}, sm_count, stream);
    }
  });
}

}  // namespace fastmax
