// Output kernel of order 2 on Hopper, by wgmma and TMA; portable/read.cu computes the same:
//
//   pass      x    y    w    time        result
//   o         q    k    v    forward     o = sum f(x.y) w / z
//   grad_v    k    q    g    backward    grad_v = sum f(x.y) w, for wide heads (for others grad.cu computes it)
//
// Persistent blocks take work tiles of kRows rows of x, the last rows of all heads first, which see the most intra-chunk rows. Two consumer
// warpgroups have two tiles of 64 rows each, a low and a high one, so that both do the same amount of work. Their operands come through one
// ring of stages of two tiles: the snapshot (second moment, first order, tiles of pairs), then intra-chunk y and w. Features are made in
// registers, from x in shared memory.
//
// The constant term of the denominator is not summed: it is c0 times the number of rows of y that are seen, in a carried state too. With
// decays it is summed with the rest, and the inter-chunk part of each row of x is multiplied by its decay, in registers.
//
// An exact window (window.h) has local keys in the last intra-chunk tiles of a row, and states that lag. A forward then stores the logarithm
// of the denominator, of which every term is summed.
//
// Roles: a producer thread fills the ring of stages, two consumer warpgroups compute. Where a state is added to the snapshots (kAdds), the
// other warps of the producer's warpgroup are adders: a stage goes from the producer to them, and from them to the consumers. The
// consumers' steps are in the kernel: with several of them as functions the compiler allocates their registers otherwise.

#include <algorithm>
#include <type_traits>

#include "core/launch.h"
#include "core/score.h"
#include "core/sm90/pipeline.h"
#include "core/sm90/ptx.h"
#include "core/sm90/wgmma.h"
#include "linear/order2/features.h"
#include "linear/order2/sm90/hopper_walk.h"
#include "linear/order2/sm90/kernels.h"
#include "linear/order2/sm90/window.h"

namespace fastmax {
namespace {

template <int kHeadDim, bool kHasDecay, bool kAdds>
struct ReadTileSm90 : HopperState<kHeadDim> {
  using State = HopperState<kHeadDim>;
  static constexpr int kWarpgroups = 2, kRowTiles = 2;  // of a warpgroup
  static constexpr int kItemTiles = kWarpgroups * kRowTiles, kRows = kItemTiles * kTileRows;
  // Two sums of 64 rows take more than the third of the registers that a warpgroup has at first, where products are always in flight; so
  // do factors.
  static constexpr bool kMovesRegisters = (kHeadDim >= 64 && !kAdds) || kHasDecay;
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);  // and one that issues loads
  static constexpr int kPartBytes = State::kStateStageBytes;
  // Where a state is added to the snapshot, its tiles come beside those of the snapshot.
  static constexpr int kStages = kHeadDim <= 64 && !kAdds ? 8 : 4, kStageBytes = (kAdds ? 2 : 1) * kPartBytes;
  static constexpr int kAdders = 96;  // the threads beside the warp that issues loads
  static constexpr int kXBuffers = kHeadDim <= 64 ? 2 : 1;
  static constexpr int kXBytes = kItemTiles * State::kTileBytes;

  // Shared memory, from a multiple of 1024 bytes on.
  static constexpr int kX = kStages * kStageBytes;
  static constexpr int kDecayBytes = kHasDecay ? static_cast<int>(sizeof(DecayTile)) : 0;  // of a tile of x, and of y of each stage
  static constexpr int kXDecay = kX + kXBuffers * kXBytes, kYDecay = kXDecay + kXBuffers * kItemTiles * kDecayBytes;
  static constexpr int kXFull = kYDecay + kStages * kDecayBytes;
  static constexpr int kBarriers = kXFull + 8 * kWarpgroups * kXBuffers;
  static constexpr int kCopied = kBarriers + Ring<kStages>::kBarrierBytes;  // barriers of what is not yet added
  static constexpr int kSharedBytes = kSwizzledTileAlignment + kCopied + (kAdds ? Ring<kStages>::kBarrierBytes : 0);
  static_assert(kBarriers % 8 == 0, "barriers are aligned");
  static_assert(!kAdds || !kMovesRegisters, "adding takes registers");
  static_assert(kSharedBytes <= shared_limit(90), "stages, x and barriers do not fit");
};

// How many rows of y a row of x sees.
__device__ __forceinline__ int rows_seen(const ReadArgs& a, int batch, int x_row) {
  const int end = a.causal ? min(a.y_row(a.seen_end(x_row)) + 1, a.ny) : a.ny;
  return a.y_counts.data == nullptr ? end : a.y_counts.data[batch * a.y_counts.batch + end - 1];
}

// With bounds, the first row of y that a row of x sees.
__device__ __forceinline__ int first_seen(const ReadArgs& a, const ItemsOfRows::Item& item, int x_row) {
  const KeyBounds& first = a.k_start;
  return first.data[item.batch * first.stride.batch + item.state_head * first.stride.head + x_row * first.stride.token];
}

// With decays: whether a row of x sees nothing because its k_start is after its own token.
__device__ __forceinline__ bool is_blind(const ReadArgs& a, const ItemsOfRows::Item& item, int x_row, int lag) {
  if (a.k_start.data == nullptr || x_row >= a.nx) return false;
  return first_seen(a, item, x_row) > a.y_row(a.seen_end(x_row) + lag);
}

// With a window: how many rows of y before `y_row` are attended.
__device__ __forceinline__ int attended_before(const ReadArgs& a, int batch, int y_row) {
  if (y_row <= 0 || a.y_counts.data == nullptr) return max(y_row, 0);
  return a.y_counts.data[batch * a.y_counts.batch + min(y_row, a.ny) - 1];
}
// An accumulator's rows row and row + 8 of x times 1 + dropout noise.
template <int kCount>
__device__ __forceinline__ void multiply_noise(const ReadArgs& a, const ItemsOfRows::Item& item, int row, float (&acc)[kCount]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + 8 * r >= a.nx) continue;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int column = 8 * j + 2 * t;
      if (column >= a.dv) break;
      const float2 noise = load_row_pair<__nv_bfloat16>(a.noise, false, item.batch, item.x_head, row + 8 * r, column);
      acc[4 * j + 2 * r] *= fmaf(a.dropout, noise.x, 1.f), acc[4 * j + 2 * r + 1] *= fmaf(a.dropout, noise.y, 1.f);
    }
  }
}

// Merges the local keys of a row (ReadArgs::local_lse) into the result of its global keys, as merge/merge.cu does. z and factor, by which
// the row's accumulators are multiplied, become those of all keys. r: the half of the accumulator that has the row. kHasDecay: a factor of
// 0 gives 0, even of NaN and infinities.
template <bool kHasDecay, int kCount>
__device__ __forceinline__ void join_local(const ReadArgs& a, const ItemsOfRows::Item& item, int x_row, float& z, float& factor,
                                          float (&acc)[kCount], int r) {
  const int t = static_cast<int>(ptx::keep_in_register(threadIdx.x)) % 4;
  float* lse = a.local_lse.data + item.x_head_index * a.local_lse.head + x_row;
  float near = t == 0 && x_row < a.nx ? *lse : 0.f;
  near = __shfl_sync(0xffffffffu, near, 0, 4);  // from the lane that writes over it
  if (x_row >= a.nx) return;
  float of_local = 1.f;
  if (z != 0.f) {
    const float far = logf(z), base = fmaxf(near, far), local_weight = expf(near - base), global_weight = expf(far - base);
    const float total = local_weight + global_weight;
    of_local = local_weight / total, factor *= global_weight / total;
    z = isnan(total) ? total : z + expf(near);
    if (t == 0) *lse = base + logf(total);
  }
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int column = 8 * j + 2 * t;
    if (column >= a.dv) break;
    const float2 o = load_row_pair<__nv_bfloat16>(a.out, false, item.batch, item.x_head, x_row, column);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& x = acc[4 * j + 2 * r + i];
      x = fmaf(of_local, i == 0 ? o.x : o.y, kHasDecay ? decayed(x, factor) : x * factor);
    }
  }
  factor = 1.f;
}

// What all roles of a block share: the arguments, the layout of shared memory, and the loads of tiles. A stage holds two tiles of a
// snapshot, or for the intra-chunk part a tile of y and one of w, the y heads of a state in turn. Members are references to variables of
// the kernel: the compiler then allocates registers as for lambdas.
// kValues: grad_v, over reversed rows, without denominators; else a forward.
// kAdds: a.added is added to snapshots, only without decays.
// kWindow: with an exact window.
template <int kHeadDim_, bool kValues_, DecayKind kDecayKind_, bool kAdds_, bool kWindow_>
struct ReadBlock {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kValues = kValues_, kAdds = kAdds_, kWindow = kWindow_, kHasDecay = kDecayKind_ != DecayKind::kNone;
  static constexpr DecayKind kDecayKind = kDecayKind_;
  using Tile = ReadTileSm90<kHeadDim, kHasDecay, kAdds>;
  using RowTile = RowTileSm90<kHeadDim>;
  static constexpr int kStages = Tile::kStages, kTileBytes = Tile::kTileBytes, kXBuffers = Tile::kXBuffers;
  static constexpr int kRowTiles = Tile::kRowTiles, kWarpgroups = Tile::kWarpgroups, kProducerWarp = 4 * kWarpgroups;

  const CUtensorMap &x_map, &y_map, &w_map, &out_map;
  const ReadArgs& a;
  const ItemsOf<kWindow>& items;
  const uint32_t &stages_at, &x_at, &x_full;
  const Ring<kStages>&ring, &copied;  // copied: stages that are loaded, and not yet added; without kAdds the ring itself
  const int &warp, &lane, &warpgroup;

  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == 0) {
      ring.init(4 * kWarpgroups);
      if constexpr (kAdds) copied.init(1);
      for (int i = 0; i < kWarpgroups * kXBuffers; ++i) ptx::mbarrier_init(x_full + 8 * i, 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
  }

  __device__ __forceinline__ uint32_t stage(RingPosition at) const { return stages_at + at.stage * Tile::kStageBytes; }
  __device__ __forceinline__ SharedDecayTile y_decay(RingPosition at) const {
    return {static_cast<uint32_t>(stages_at + Tile::kYDecay + at.stage * Tile::kDecayBytes)};
  }

  // That are loaded with a tile of x or y.
  __device__ __forceinline__ int decay_bytes() const {
    if constexpr (kDecayKind == DecayKind::kBounds) return offsetof(DecayTile, gates);
    else if constexpr (kHasDecay) return a.decay.tile_bytes;
    else return 0;
  }

  __device__ __forceinline__ void load_snapshot(RingPosition at, const ItemSource& source, int i) const {
    const uint32_t stage = this->stage(at);
    ring.wait_until_empty(at);
    const int bytes = Tile::state_stage_bytes(i);
    copied.expect(at, (kAdds ? 2 : 1) * bytes);
    ptx::bulk_load(stage, source.snapshot + i * Tile::kPartBytes, bytes, copied.full(at));
    if constexpr (kAdds) {
      const char* added = static_cast<const char*>(a.added) + source.state(a) * Tile::kSnapshotBytes;
      ptx::bulk_load(stage + Tile::kPartBytes, added + i * Tile::kPartBytes, bytes, copied.full(at));
    }
  }

  __device__ __forceinline__ void load_own(RingPosition at, const ItemSource& source, int own) const {
    const uint32_t stage = this->stage(at);
    const int token = source.token + (kValues ? -(own / a.y_group) : own) * kTileRows;
    const int y_head = source.y_head + (kValues ? own % a.y_group : 0);
    ring.wait_until_empty(at);
    copied.expect(at, Tile::kPartBytes + decay_bytes());
    if constexpr (kHasDecay) {
      ptx::bulk_load(y_decay(at).address, decay_tile_at(a, source.state(a), token), decay_bytes(), copied.full(at));
    }
    RowTile::load(stage, y_map, copied.full(at), token, y_head, source.batch);
    RowTile::load(stage + kTileBytes, w_map, copied.full(at), token, y_head, source.batch);
  }

  // This warpgroup's tiles of x: their places within the work tile, their buffers, their decays and their barrier.
  __device__ __forceinline__ int tile_of(int m) const { return m == 0 ? warpgroup : Tile::kItemTiles - 1 - warpgroup; }
  __device__ __forceinline__ uint32_t x_tile(int buffer) const {
    return x_at + buffer * Tile::kXBytes + warpgroup * kRowTiles * kTileBytes;
  }
  __device__ __forceinline__ SharedDecayTile x_decay(int buffer, int m) const {
    const int tile = buffer * Tile::kItemTiles + warpgroup * kRowTiles + m;
    return {static_cast<uint32_t>(stages_at + Tile::kXDecay + tile * Tile::kDecayBytes)};
  }
  __device__ __forceinline__ uint32_t x_barrier(int buffer) const { return x_full + 8 * (kWarpgroups * buffer + warpgroup); }

  // Loads x of a work tile; count: how many tiles the block had before. By one thread of the warpgroup.
  __device__ __forceinline__ void load_x(int index, int count) const {
    if (index >= items.count) return;
    const ItemsOfRows::Item item = items.at(a, index);
    const int buffer = count % kXBuffers;
    const uint32_t barrier = x_barrier(buffer);
    prefetch_sums<Tile::kSums>(a, a.sums, item);
    ptx::mbarrier_arrive_expect(barrier, kRowTiles * (kTileBytes + decay_bytes()));
    for (int m = 0; m < kRowTiles; ++m) {
      const uint32_t x = x_at + buffer * Tile::kXBytes + (warpgroup * kRowTiles + m) * kTileBytes;
      const int row = item.row + tile_of(m) * kTileRows;
      if constexpr (kHasDecay) {
        const int64_t state = static_cast<int64_t>(item.batch) * a.state_heads + item.state_head;
        const int last_seen = a.seen_end(row) + (kWindow ? state_lag(a.window) : 0);
        ptx::bulk_load(x_decay(buffer, m).address, x_decay_tile(a, state, last_seen), decay_bytes(), barrier);
      }
      RowTile::load(x, x_map, barrier, tile_token(a, a.nx, row), item.x_head, item.batch);
    }
  }
};

// The producer: one thread that fills the ring of stages.
template <class Block>
__device__ __forceinline__ void produce(const Block& b) {
  using Tile = typename Block::Tile;
  RingPosition at;
  for (int index = blockIdx.x; index < b.items.count; index += gridDim.x) {
    const ItemSource source(b.a, b.items, index, b.a.snapshots, Tile::kStateStages, Tile::kSnapshotBytes);
    for (int i = 0; i < source.state_stages; ++i, at.template advance<Block::kStages>()) b.load_snapshot(at, source, i);
    for (int own = 0; own < source.own_stages; ++own, at.template advance<Block::kStages>()) b.load_own(at, source, own);
  }
}

// The adders: add a.added to the snapshots of a block's work tiles, stage by stage as they arrive. Tile::kAdders threads.
template <class Block>
__device__ __forceinline__ void add_states(const Block& b) {
  using Tile = typename Block::Tile;
  const int thread = static_cast<int>(threadIdx.x) - (Tile::kThreads - Tile::kAdders);
  RingPosition at;
  for (int index = blockIdx.x; index < b.items.count; index += gridDim.x) {
    const ItemSource source(b.a, b.items, index, b.a.snapshots, Tile::kStateStages, Tile::kSnapshotBytes);
    for (int i = 0; i < source.state_stages + source.own_stages; ++i, at.template advance<Block::kStages>()) {
      b.copied.wait_until_full(at);
      if (i < source.state_stages) {
        const uint32_t stage = b.stage(at);
        const int bytes = Tile::state_stage_bytes(i);
#pragma unroll 4
        for (int j = 16 * thread; j < bytes; j += 16 * Tile::kAdders) {
          uint32_t x[4], y[4];
          ptx::load_shared_u32x4(x, stage + j), ptx::load_shared_u32x4(y, stage + Tile::kPartBytes + j);
#pragma unroll
          for (int e = 0; e < 4; ++e) x[e] = add_bf16x2(x[e], y[e]);
          ptx::store_shared_u32x4(stage + j, x);
        }
        ptx::fence_proxy_async();
      }
      // Of every stage: a warp that fell two rounds of the ring behind would take the parity of a phase for that of the one before last.
      ptx::barrier_wait<Tile::kAdders>(1 + Tile::kWarpgroups);
      ptx::mbarrier_arrive_if(b.ring.full(at), thread == 0);
    }
  }
}

template <int kHeadDim, bool kValues, DecayKind kDecayKind, bool kAdds, bool kWindow>
__global__ void __launch_bounds__(ReadTileSm90<kHeadDim, kDecayKind != DecayKind::kNone, kAdds>::kThreads, 1)
    linear_read_sm90_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap y_map,
                            const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap out_map, const ReadArgs a,
                            const ItemsOf<kWindow> items) {
  static_assert(!kWindow || !kAdds, "calls with an exact window have no state");
  constexpr bool kHasDecay = kDecayKind != DecayKind::kNone;
  using Tile = ReadTileSm90<kHeadDim, kHasDecay, kAdds>;
  using RowTile = RowTileSm90<kHeadDim>;
  using Products = Wgmma<Bf16, kHeadDim>;
  using Scores = Wgmma<Bf16, 64>;
  using Panel = Wgmma<Bf16, Tile::kPanelCols>;
  constexpr int kPanelCols = Tile::kPanelCols;
  constexpr int kBlocks = Tile::kBlocks, kStages = Tile::kStages, kTileBytes = Tile::kTileBytes;
  constexpr int kRowTiles = Tile::kRowTiles, kWarpgroups = Tile::kWarpgroups, kXBuffers = Tile::kXBuffers;
  constexpr int kSteps = kHeadDim / 16;  // of 16 columns
  extern __shared__ uint8_t shared[];
  const uint32_t stages_at = first_tile(shared), x_at = stages_at + Tile::kX, x_full = stages_at + Tile::kXFull;
  const Ring<kStages> ring(stages_at + Tile::kBarriers), copied(stages_at + (kAdds ? Tile::kCopied : Tile::kBarriers));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Loops over tiles depend on it: what they change is kept in uniform registers where it is known to be the same in all lanes. At head
  // dim 128 that spills.
  const int warpgroup = kHeadDim == 128 ? warp / 4 : warp_uniform(warp / 4);
  using Block = ReadBlock<kHeadDim, kValues, kDecayKind, kAdds, kWindow>;
  const Block block{x_map, y_map, w_map, out_map, a, items, stages_at, x_at, x_full, ring, copied, warp, lane, warpgroup};
  block.init_barriers();
  // This warpgroup's tiles of x within the work tile.
  const auto tile_of = [&](int m) { return m == 0 ? warpgroup : Tile::kItemTiles - 1 - warpgroup; };

  if (warpgroup == kWarpgroups) {
    if constexpr (Tile::kMovesRegisters) ptx::fewer_registers<Tile::kProducerRegisters>();
    if constexpr (kAdds) {
      if (warp > 4 * kWarpgroups) return add_states(block);
    }
    if (warp != 4 * kWarpgroups || lane != 0) return;
    produce(block);
    return;
  }
  if constexpr (Tile::kMovesRegisters) ptx::more_registers<Tile::kConsumerRegisters>();

  [[maybe_unused]] const auto x_decay = [&](int buffer, int m) {
    const int tile = buffer * Tile::kItemTiles + warpgroup * kRowTiles + m;
    return SharedDecayTile{static_cast<uint32_t>(stages_at + Tile::kXDecay + tile * Tile::kDecayBytes)};
  };
  if (threadIdx.x % 128 == 0) {
    for (int i = 0; i < kXBuffers; ++i) block.load_x(blockIdx.x + i * gridDim.x, i);
  }

  const int w4 = warp % 4, t = lane % 4, g = lane / 4;
  const int row = 16 * w4 + g;  // of a tile, and row + 8
  RingPosition at;
  // Only the number of the work tile stays in a register: its Item is computed again where it is needed.
  for (int count = 0;; ++count) {
    const int index = blockIdx.x + count * gridDim.x;
    if (index >= items.count) break;
    const auto item_again = [&] { return items.at(a, blockIdx.x + ptx::keep_in_register(count) * gridDim.x); };
    const ItemsOfRows::Item item = items.at(a, index);
    const int buffer = count % kXBuffers;
    const uint32_t x = block.x_tile(buffer);
    const Operand<RowTile> x_operand(x);  // of the low tile; the high one follows it
    float acc[kRowTiles][kHeadDim / 2], sums[kRowTiles][2] = {};  // sums: this lane's part of the denominators
    const bool has_state = a.has_state(item.chunk);
    ptx::mbarrier_wait(block.x_barrier(buffer), count / kXBuffers % 2);

    RingPosition before;  // the stage before, whose products may still be under way
    bool releases = false;
    if (has_state) {
      ring.wait_until_full(at);
      if constexpr (!kValues) {
        // The inter-chunk denominator: x . (moment x + c1 sum y).
        const float* state_sums = a.sums + item.slot * Tile::kSums;
        const Operand<RowTile> moment(stages_at + at.stage * Tile::kStageBytes);
#pragma unroll
        for (int panel = 0; panel < Tile::kPanels; ++panel) {
          float v[kRowTiles][kPanelCols / 2];
          wgmma_fence();
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
              const uint64_t columns = x_operand.behind(m * kTileBytes).k_major(k);
              const uint64_t features = moment.behind(k / 4 * kTileBytes).mn_major(k % 4, panel);
              if (k == 0) Panel::template ss_first<Major::kK, Major::kMN>(v[m], columns, features);
              else Panel::template ss<Major::kK, Major::kMN>(v[m], columns, features);
            }
            wgmma_commit();
          }
          float2 sum_y[kPanelCols / 8];
#pragma unroll
          for (int j = 0; j < kPanelCols / 8; ++j) {
            sum_y[j] = ptx::load_global_f32x2(state_sums + Tile::kSumY + kPanelCols * panel + 8 * j + 2 * t);
          }
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            if (m == 0) wgmma_wait<kRowTiles - 1>();
            else wgmma_wait<0>();
            keep(v[m]);
#pragma unroll
            for (int j = 0; j < kPanelCols / 8; ++j) {
              const uint32_t address = x + m * kTileBytes + RowTile::chunk_offset(row, kPanelCols / 8 * panel + j) + 4 * t;
              const uint32_t x0 = ptx::load_shared_u32(address), x1 = ptx::load_shared_u32(address + 8 * RowTile::kRowBytes);
              const float2 s = sum_y[j];
              sums[m][0] += low_bf16(x0) * fmaf(a.c1, s.x, v[m][4 * j]) + high_bf16(x0) * fmaf(a.c1, s.y, v[m][4 * j + 1]);
              sums[m][1] += low_bf16(x1) * fmaf(a.c1, s.x, v[m][4 * j + 2]) + high_bf16(x1) * fmaf(a.c1, s.y, v[m][4 * j + 3]);
            }
          }
        }
      }
      if constexpr (Tile::kPanels == 2) ring.release(at, lane), at.template advance<kStages>(), ring.wait_until_full(at);

      // First order.
      const Operand<RowTile> linear(stages_at + at.stage * Tile::kStageBytes + (Tile::kPanels == 1 ? kTileBytes : 0));
      wgmma_fence();
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          const uint64_t columns = x_operand.behind(m * kTileBytes).k_major(k), features = linear.behind(k / 4 * kTileBytes).mn_major(k % 4);
          if (k == 0) Products::template ss_first<Major::kK, Major::kMN>(acc[m], columns, features);
          else Products::template ss<Major::kK, Major::kMN>(acc[m], columns, features);
        }
      }
      wgmma_commit();
      before = at, releases = true;  // while features of the first tile are made
      at.template advance<kStages>();

      // Tiles of pairs, star by star, two a stage: the star's block of x gives scalars, the other one bases.
      int half = 0;  // of the stage
      bool is_full = false;  // the stage of the next tile
      uint32_t base[kRowTiles][2], f[kRowTiles][16];  // f: features
      // A tile of some steps. make(m): its features of a tile of x, while products of the other one run.
      const auto add_features = [&](auto steps, bool is_last, const auto& make) {
        if (!is_full) ring.wait_until_full(at);
        __syncwarp();
        const RingPosition own = at;
        const Operand<RowTile> features(stages_at + own.stage * Tile::kStageBytes + half * kTileBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          wgmma_wait<kRowTiles - 1>();
          if (m == kRowTiles - 1) ring.release(before, lane, half == 0 && releases);
          make(m);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < decltype(steps)::value; ++k) Products::template rs<Major::kMN>(acc[m], f[m] + 4 * k, features.mn_major(k));
          wgmma_commit();
          if (m == 0) {  // asked beside products, well before it is used
            if (half == 1) at.template advance<kStages>();
            is_full = ring.is_full(is_last ? own : at);
          }
        }
        if (half == 1) before = own, releases = true;
        half ^= 1;
      };
      const auto load_base = [&](int block) {
        const uint32_t offset = RowTile::chunk_offset(16 * w4 + lane % 16, block);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix_x2(base[m], x + m * kTileBytes + offset);
      };
      constexpr int kFirstOffset = Tile::kFirstOffset;
      load_base(kFirstOffset);
      for (int star = 0; star < kBlocks; ++star) {
        // Of rows row and row + 8: in both halves, or, where registers are short, in pairs, of which a multiplication takes a half.
        constexpr bool kDuplicated = kHeadDim <= 64;
        uint32_t scalars[kRowTiles][2][kDuplicated ? 8 : 4];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const uint32_t address = x + m * kTileBytes + RowTile::chunk_offset(row, star);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            uint32_t columns[4];
            ptx::load_shared_u32x4(columns, address + r * 8 * RowTile::kRowBytes);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if constexpr (kDuplicated) {
                scalars[m][r][2 * i] = ptx::duplicate_half<0>(columns[i]), scalars[m][r][2 * i + 1] = ptx::duplicate_half<1>(columns[i]);
              } else {
                scalars[m][r][i] = columns[i];
              }
            }
          }
        }
        const auto scalar = [&](int m, int r, int i) {
          if constexpr (kDuplicated) return scalars[m][r][i];
          else return duplicate_half(scalars[m][r][i / 2], i % 2);
        };
        const int tiles = Tile::star_tiles(star);
        for (int j = 0; j < tiles; ++j) {
          const auto make = [&](int m) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              f[m][4 * k + 0] = ptx::multiply_bf16x2(base[m][0], scalar(m, 0, 2 * k));
              f[m][4 * k + 1] = ptx::multiply_bf16x2(base[m][1], scalar(m, 1, 2 * k));
              f[m][4 * k + 2] = ptx::multiply_bf16x2(base[m][0], scalar(m, 0, 2 * k + 1));
              f[m][4 * k + 3] = ptx::multiply_bf16x2(base[m][1], scalar(m, 1, 2 * k + 1));
            }
            if (m == kRowTiles - 1) load_base(((j + 1 < tiles ? star + j + 1 : star + 1) + kFirstOffset) % kBlocks);  // of the next tile
          };
          const bool is_last = !Tile::kPacksDiagonal && star + 1 == kBlocks && j + 1 == tiles;
          add_features(std::integral_constant<int, 4>{}, is_last, make);
        }
      }
      // The products within blocks.
      if constexpr (Tile::kPacksDiagonal) {
        // Not a loop: where states are added it would leave products too few registers (C7512).
#pragma unroll
        for (int tile = 0; tile < Tile::kDiagonalTiles; ++tile) {
          add_features(std::integral_constant<int, 4>{}, false, [&](int m) {
            BlockColumns<RowTile> columns[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) columns[j].load(x + m * kTileBytes, row, 2 * tile + j, t);
#pragma unroll
            for (int i = 0; i < 16; ++i) f[m][i] = columns[i / 2 % 2].product(i % 2, i / 4);
          });
        }
        add_features(std::integral_constant<int, 2>{}, true, [&](int m) {
          OppositeColumns<RowTile> opposite;
          opposite.load(x + m * kTileBytes, row, t);
#pragma unroll
          for (int i = 0; i < 8; ++i) f[m][i] = opposite.product(i % 2, i / 2);
        });
        before = at, releases = true;
        at.template advance<kStages>();  // it had half a stage
      }
      wgmma_wait<0>();
      ring.release(before, lane);
      releases = false;
    } else {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) acc[m][i] = 0.f;
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) keep(acc[m]);

    const ItemsOfRows::Item own_item = item_again();
    if ((kHasDecay || kWindow) && a.has_state(own_item.chunk)) {
      const float* state_sums = a.sums + own_item.slot * Tile::kSums;
      float factor[kRowTiles][2];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if constexpr (!kHasDecay) {
            factor[m][r] = 1.f;
            continue;
          }
          factor[m][r] = x_decay(buffer, m).since_chunk(row + 8 * r);
          if (!kValues) sums[m][r] = decayed(sums[m][r] + (t == 0 ? a.c0 * state_sums[Tile::kSumOne] : 0.f), factor[m][r]);
        }
      }
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        const float2 w = ptx::load_global_f32x2(state_sums + Tile::kSumW + 8 * j + 2 * t);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            acc[m][4 * j + 2 * r] = decayed(fmaf(a.c0, w.x, acc[m][4 * j + 2 * r]), factor[m][r]);
            acc[m][4 * j + 2 * r + 1] = decayed(fmaf(a.c0, w.y, acc[m][4 * j + 2 * r + 1]), factor[m][r]);
          }
        }
      }
    }

    // Intra-chunk.
    [[maybe_unused]] const auto y_decay = [&] {
      return SharedDecayTile{static_cast<uint32_t>(stages_at + Tile::kYDecay + at.stage * Tile::kDecayBytes)};
    };
    [[maybe_unused]] const int first_y_row = a.y_row(a.chunk_begin(own_item.chunk));
    int own = 0;  // the tile
    float s[32];
    uint32_t weights[16];
    const auto make_scores = [&](int m, const Operand<RowTile>& y) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const uint64_t columns = x_operand.behind(m * kTileBytes).k_major(k);
        if (k == 0) Scores::ss_first<Major::kK, Major::kK>(s, columns, y.k_major(k));
        else Scores::ss<Major::kK, Major::kK>(s, columns, y.k_major(k));
      }
      wgmma_commit();
    };
    const auto make_weights = [&](int m, auto is_diagonal) {
      constexpr bool kDiagonal = decltype(is_diagonal)::value;
      keep(s);
      // Reversed rows lie in memory in the order of tokens: later rows come first.
      const auto is_seen = [&](int r, int column) { return !kDiagonal || (kValues ? column >= row + 8 * r : column <= row + 8 * r); };
      if constexpr (kHasDecay) {
        const SharedDecayTile x = x_decay(buffer, m), y = y_decay();
        const auto decay_block = [&](int j, const float(&factors)[2][2]) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& score = s[4 * j + i];
            const float weight = fmaf(score, fmaf(score, a.c2, a.c1), a.c0) * factors[i / 2][i % 2];
            score = is_seen(i / 2, 8 * j + 2 * t + i % 2) ? weight : 0.f;
            if (!kValues) sums[m][i / 2] += score;
          }
        };
        const auto apply_decay = [&](auto factors) {
          const WalkSum x0 = gated_sum<kValues, kDecayKind>(a.decay, x, row), x1 = gated_sum<kValues, kDecayKind>(a.decay, x, row + 8);
          PairDecay<kValues, kDecayKind, decltype(factors)::value, SharedDecayTile>(a.decay, y, x0, x1).for_each_block(decay_block);
        };
        if constexpr (kDecayKind == DecayKind::kDecays) {
          if (kDiagonal && is_far<kValues>(y)) apply_decay(OfPairFactors<PairFactors::kPairs>());
          else apply_decay(OfPairFactors<PairFactors::kRowsAndColumns>());
        } else {
          const bool has_no_row = kWindow && !kValues && first_y_row + kTileRows * own < 0;  // some row of the tile is before the first one
          if (a.y_mask.data == nullptr && !has_no_row && is_whole<kValues>(x, y)) apply_decay(OfPairFactors<PairFactors::kOne>());
          else apply_decay(OfPairFactors<PairFactors::kPairs>());
        }
      } else {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int r = i / 2 % 2;
          const bool seen = is_seen(r, 8 * (i / 4) + 2 * t + i % 2);
          const float u = fmaf(s[i], a.c2, a.c1);
          if (!kValues) sums[m][r] = seen ? fmaf(s[i], u, sums[m][r]) : sums[m][r];
          s[i] = seen ? fmaf(s[i], u, a.c0) : 0.f;
        }
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) weights[i] = ptx::pack_bf16x2(s[2 * i], s[2 * i + 1]);
    };
    // An exact window: tiles from the diagonal less this many on have local keys.
    [[maybe_unused]] const int window_tiles = state_lag(a.window) / kTileRows;
    [[maybe_unused]] WindowRows window_rows[kRowTiles];
    const auto begin_window = [&](int m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if constexpr (kHasDecay) {
          window_rows[m].begin(r, !(fabsf(quad_sum(sums[m][r])) < PolynomialScore::kSmallestSum));  // NaN is one
        } else {
          const int before = attended_before(a, own_item.batch, first_y_row + kTileRows * own);
          if (t == 0) sums[m][r] = fmaf(a.c0, static_cast<float>(before), sums[m][r]);
          window_rows[m].begin(r, before > 0);
        }
      }
    };
    const auto make_window_weights = [&](int m) {
      keep(s);
      const int y_row = first_y_row + kTileRows * own, rows_between = kTileRows * (own_item.first_own + tile_of(m) - own);
      WindowTile tile(rows_between, row, t);
      if (a.y_mask.data != nullptr || y_row < 0) {
        uint32_t attended[2];
        attended_rows(a, own_item.batch, y_row, attended);
        tile.hide_others(attended[0], attended[1], t);
      }
      if (kHasDecay && a.k_start.data != nullptr) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int x_row = own_item.row + tile_of(m) * kTileRows + row + 8 * r;
          if (x_row < a.nx) tile.hide_before(r, first_seen(a, own_item, x_row) - y_row, t);
        }
      }
      float shrink[2];
      const auto weigh = [&](auto local, auto masked, auto gated) {
        // Without decays of tokens there are none between a row and what it sees.
        using Decays = std::conditional_t<kDecayKind == DecayKind::kDecays, WindowDecay<false, decltype(gated)::value>, NoWindowDecay>;
        Decays decay(x_decay(buffer, m), y_decay(), row, t);
        window_rows[m].template weigh<decltype(local)::value, decltype(masked)::value>(a, tile, decay, s, sums[m], shrink);
      };
      using MayHaveGates = std::bool_constant<kDecayKind == DecayKind::kDecays>;
      const auto weigh_masked = [&](auto masked) {
        if (rows_between + kTileRows > a.window) weigh(OfLocalPairs<LocalPairs::kSome>(), masked, std::false_type());
        else weigh(OfLocalPairs<LocalPairs::kAll>(), masked, std::false_type());
      };
      if (MayHaveGates::value && a.decay.is_gated() && rows_between + kTileRows > a.window) {
        weigh(OfLocalPairs<LocalPairs::kSome>(), std::true_type(), MayHaveGates());
      } else if (tile.is_whole()) weigh_masked(std::false_type());
      else weigh_masked(std::true_type());
#pragma unroll
      for (int i = 0; i < 16; ++i) weights[i] = ptx::pack_bf16x2(s[2 * i], s[2 * i + 1]);
      if (__any_sync(0xffffffffu, shrink[0] != 1.f || shrink[1] != 1.f)) {
        keep(acc[m]);
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) acc[m][i] *= shrink[i / 2 % 2];
      }
    };
    // grad_v: of the stage's rows of y, whose shifts are in memory.
    const auto make_window_values = [&](int m) {
      keep(s);
      const int y_tile = own / a.y_group, rows_between = kTileRows * (own_item.first_own + tile_of(m) - y_tile);
      const int64_t y_head = (static_cast<int64_t>(own_item.batch) * a.state_heads + own_item.state_head) * a.y_group + own % a.y_group;
      const float* shifts = tile_scales(a.y_shift, a.ny, y_head, tile_token(a, a.ny, first_y_row + kTileRows * y_tile)) + 2 * t;
      const uint32_t attended[2] = {~0u, ~0u};  // rows that are not there have no values
      const WindowDistances<true> distances(rows_between, a.window, row, t, attended);
      const auto weigh = [&](auto gated) {
        using Decays = std::conditional_t<kHasDecay, WindowDecay<true, decltype(gated)::value>, NoWindowDecay>;
        Decays decay(x_decay(buffer, m), y_decay(), row, t);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 shift = ptx::load_global_f32x2(shifts + 8 * j);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& x = s[4 * j + i];
            const bool local = distances.is_local(j, i / 2, i % 2);
            const float e = decay.of(j, i), of_global = e + decay.gate(j, i), f = local ? 1.f : fmaf(x, fmaf(x, a.c2, a.c1), a.c0);
            const float weight = f * ptx::exp2_approx(local ? fmaf(a.local_scale, x, e - (i % 2 == 0 ? shift.x : shift.y)) : of_global);
            x = distances.is_seen(j, i / 2, i % 2) ? weight : 0.f;
          }
        }
      };
      using MayHaveGates = std::bool_constant<kDecayKind == DecayKind::kDecays>;
      if (MayHaveGates::value && a.decay.is_gated()) weigh(MayHaveGates());
      else weigh(std::false_type());
#pragma unroll
      for (int i = 0; i < 16; ++i) weights[i] = ptx::pack_bf16x2(s[2 * i], s[2 * i + 1]);
    };
    const auto add_values = [&](int m, const Operand<RowTile>& w) {
      keep(weights);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) Products::template rs<Major::kMN>(acc[m], weights + 4 * k, w.mn_major(k));
      wgmma_commit();
      wgmma_wait<0>();  // registers for one group at a time
    };
    const int y_group = kValues ? a.y_group : 1;  // stages of a tile, one after the other
    const auto for_both = [&](auto is_diagonal) {  // a tile of y that both tiles of x see; diagonal: that of the low one
      ring.wait_until_full(at);
      const Operand<RowTile> y(stages_at + at.stage * Tile::kStageBytes), w = y.behind(kTileBytes);
      make_scores(0, y);
      wgmma_wait<0>();
      ring.release(before, lane, releases);
      make_weights(0, is_diagonal);
      add_values(0, w);
      make_scores(1, y);
      wgmma_wait<0>();
      make_weights(1, std::false_type{});
      add_values(1, w);
      before = at, releases = true;
      at.template advance<kStages>();
    };
    const auto for_high = [&](auto is_diagonal) {
      ring.wait_until_full(at);
      const Operand<RowTile> y(stages_at + at.stage * Tile::kStageBytes), w = y.behind(kTileBytes);
      make_scores(1, y);
      wgmma_wait<0>();
      ring.release(before, lane, releases);
      make_weights(1, is_diagonal);
      add_values(1, w);
      before = at, releases = true;
      at.template advance<kStages>();
    };
    const auto skip_tile = [&] {
      ring.release(before, lane, releases);  // or the ring would fill up
      releases = false;
      ring.wait_until_full(at);
      ring.release(at, lane);
      at.template advance<kStages>();
    };
    // A tile from the low tile's first with local keys on. One loop for all of them, as the code of a window is long.
    const auto for_window = [&](int low, int high) {
      ring.wait_until_full(at);
      ring.release(before, lane, releases);
      const Operand<RowTile> y(stages_at + at.stage * Tile::kStageBytes), w = y.behind(kTileBytes);
      if (own <= low) {
        make_scores(0, y);
        wgmma_wait<0>();
        make_window_weights(0);
        add_values(0, w);
      }
      make_scores(1, y);
      wgmma_wait<0>();
      if (own < high - window_tiles) {
        make_weights(1, std::false_type{});
      } else {
        if (own == high - window_tiles) begin_window(1);
        make_window_weights(1);
      }
      add_values(1, w);
      before = at, releases = true;
      at.template advance<kStages>();
    };
    const auto for_window_values = [&](int low, int high) {
      ring.wait_until_full(at);
      ring.release(before, lane, releases);
      const Operand<RowTile> y(stages_at + at.stage * Tile::kStageBytes), w = y.behind(kTileBytes);
      if (own < low + y_group) {
        make_scores(0, y);
        wgmma_wait<0>();
        make_window_values(0);
        add_values(0, w);
      }
      make_scores(1, y);
      wgmma_wait<0>();
      if (own < high - window_tiles * y_group) make_weights(1, std::false_type{});
      else make_window_values(1);
      add_values(1, w);
      before = at, releases = true;
      at.template advance<kStages>();
    };
    // Waiting between the loops keeps registers of products in flight from crossing control flow.
    const int tiles = own_item.own_tiles * y_group;
    const int low = (own_item.first_own + tile_of(0)) * y_group, high = (own_item.first_own + tile_of(1)) * y_group;
    // Tiles before all rows of x of tile m; fully decayed ones are skipped.
    const auto before_rows = [&](int m, int end_own, const auto& add_tile) {
      [[maybe_unused]] WalkSum first_x;
      if constexpr (kHasDecay) first_x = x_decay(buffer, m).sum(kFirstOfTile<kValues>);
      for (; own < end_own && own < tiles; ++own) {
        if constexpr (kHasDecay) {
          ring.wait_until_full(at);
          if (is_fully_decayed(first_x, y_decay().sum(kLastOfTile<kValues>))) {
            ptx::fence_proxy_async();  // for the load above (pipeline.h)
            skip_tile();
            continue;
          }
        }
        add_tile(std::false_type{});
      }
      wgmma_wait<0>();
    };
    const auto diagonal = [&](int first, const auto& add_tile) {
      if constexpr (kValues) {
        for (; own < first + y_group && own < tiles; ++own) add_tile(std::true_type{});
      } else if (own < tiles) {
        add_tile(std::true_type{}), ++own;
      }
      wgmma_wait<0>();
    };
    if constexpr (kWindow && kValues) {
      before_rows(0, low - window_tiles * y_group, for_both);
      for (; own < high + y_group && own < tiles; ++own) for_window_values(low, high);
      wgmma_wait<0>();
    } else if constexpr (kWindow) {
      before_rows(0, low - window_tiles, for_both);
      begin_window(0);
      for (; own <= high && own < tiles; ++own) for_window(low, high);
      wgmma_wait<0>();
    } else {
      before_rows(0, low, for_both);
      diagonal(low, for_both);
      before_rows(1, high, for_high);
      diagonal(high, for_high);
    }
    for (; own < tiles; ++own) skip_tile();  // of the other warpgroup alone
    ring.release(before, lane, releases);

    const ItemsOfRows::Item here = item_again();
    [[maybe_unused]] float rows_before = 0.f;  // what a carried state has of them
    if (!kHasDecay && !kWindow && a.has_state(here.chunk)) {
      const float* sum_w = a.sums + here.slot * Tile::kSums + Tile::kSumW;
      if constexpr (!kValues) rows_before = __ldg(a.sums + here.slot * Tile::kSums + Tile::kSumOne);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) keep(acc[m]);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        const float2 v = ptx::load_global_f32x2(sum_w + 8 * j + 2 * t);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            acc[m][4 * j + 2 * r] = fmaf(a.c0, v.x, acc[m][4 * j + 2 * r]);
            acc[m][4 * j + 2 * r + 1] = fmaf(a.c0, v.y, acc[m][4 * j + 2 * r + 1]);
          }
        }
      }
    }

    // The result: divided, into the place of x, and from there to memory. The barrier is for products of x by other warps:
    // wgmma.wait_group waits for the "wgmma-groups committed by the executing threads" (PTX ISA), and says nothing of others.
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      keep(acc[m]);
      const int first = here.row + tile_of(m) * kTileRows;
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if constexpr (kValues) {
          const int token = tile_token(a, a.nx, first) + row + 8 * r;
          factor[r] = a.x_mask.data == nullptr || token < 0 || token >= a.nx ||
                              mask_pointer(a.x_mask, here.batch)[static_cast<int64_t>(token) * a.x_mask.token] != 0
                          ? 1.f
                          : 0.f;
        } else {
          const int x_row = first + row + 8 * r;
          float z = quad_sum(sums[m][r]);
          if constexpr (kWindow) z = window_rows[m].is_empty(r) || (kHasDecay && is_blind(a, here, x_row, state_lag(a.window))) ? 0.f : z;
          else if constexpr (!kHasDecay) z = fmaf(a.c0, static_cast<float>(rows_seen(a, here.batch, x_row)) + rows_before, z);
          else if (is_blind(a, here, x_row, 0) || fabsf(z) < PolynomialScore::kSmallestSum) z = 0.f;
          factor[r] = z == 0.f ? 0.f : 1.f / z;
          if constexpr (kWindow) z = ExactWindowScore::log_sum(z, window_rows[m].reference[r]);
          else if (a.local_lse.data != nullptr) join_local<kHasDecay>(a, here, x_row, z, factor[r], acc[m], r);
          if (t == 0 && x_row < a.nx) a.z[here.x_head_index * a.z_head + x_row] = z;
        }
      }
      // In a window, products of masked keys may be infinite.
      if constexpr (kValues ? kWindow : kHasDecay) {
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) acc[m][i] = decayed(acc[m][i], factor[i / 2 % 2]);
        factor[0] = factor[1] = 1.f;
      }
      if (!kValues && a.noise.data != nullptr) multiply_noise(a, here, first + row, acc[m]);
      if (m == 0) ptx::barrier_wait<128>(1 + warpgroup);
      store_accumulator<Bf16, RowTile>(x + m * kTileBytes, 0, acc[m], factor[0], factor[1], w4, lane);
    }
    ptx::fence_proxy_async();
    ptx::barrier_wait<128>(1 + warpgroup);
    if constexpr (kValues) {
      for (int m = 0; m < kRowTiles; ++m) {
        const int token = tile_token(a, a.nx, here.row + tile_of(m) * kTileRows);
        if (token < 0) store_rows<kHeadDim>(x + m * kTileBytes, a.out, here.batch, here.x_head, token, a.nx, a.dv, a.adds);
      }
      ptx::barrier_wait<128>(1 + warpgroup);
    }
    if (w4 == 0 && lane == 0) {
      for (int m = 0; m < kRowTiles; ++m) {
        const int token = tile_token(a, a.nx, here.row + tile_of(m) * kTileRows);
        if (!kValues || token >= 0) {
          store_tile<RowTile>(x + m * kTileBytes, out_map, token, here.x_head, here.batch, kValues && a.adds);
        }
      }
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
      block.load_x(blockIdx.x + (count + kXBuffers) * gridDim.x, count + kXBuffers);
    }
  }
  if (w4 == 0 && lane == 0) ptx::bulk_wait<0>();
}

template <int kHeadDim, bool kValues, DecayKind kDecayKind, bool kAdds, bool kWindow>
void launch_read(const ReadArgs& a, int sm_count, cudaStream_t stream) {
  constexpr bool kHasDecay = kDecayKind != DecayKind::kNone;
  using Tile = ReadTileSm90<kHeadDim, kHasDecay, kAdds>;
  const int x_heads = a.state_heads * a.x_group, y_heads = a.state_heads * a.y_group;
  const ItemsOf<kWindow> items(a, Tile::kRows);
  const CUtensorMap x_map = rows_map<kHeadDim>(a.x, a, x_heads, a.nx, a.d);
  const CUtensorMap y_map = rows_map<kHeadDim>(a.y, a, y_heads, a.ny, a.d);
  const CUtensorMap w_map = rows_map<kHeadDim>(a.w, a, y_heads, a.ny, a.dv);
  const CUtensorMap out_map = rows_map<kHeadDim>(a.out, a, x_heads, a.nx, a.dv);
  launch_kernel(kHasDecay ? "linear_read_decay_sm90" : "linear_read_sm90",
                linear_read_sm90_kernel<kHeadDim, kValues, kDecayKind, kAdds, kWindow>, std::min(sm_count, items.count), Tile::kThreads,
                Tile::kSharedBytes, stream, x_map, y_map, w_map, out_map, a, items);
}

template <int kHeadDim, bool kValues, bool kWindow>
void launch(const ReadArgs& a, int sm_count, cudaStream_t stream) {
  if (a.decay && a.decay.bounds_alone) return launch_read<kHeadDim, kValues, DecayKind::kBounds, false, kWindow>(a, sm_count, stream);
  if (a.decay) return launch_read<kHeadDim, kValues, DecayKind::kDecays, false, kWindow>(a, sm_count, stream);
  if constexpr (reads_add_sm90(kHeadDim) && !kWindow) {
    if (a.added != nullptr) return launch_read<kHeadDim, kValues, DecayKind::kNone, true, false>(a, sm_count, stream);
  }
  launch_read<kHeadDim, kValues, DecayKind::kNone, false, kWindow>(a, sm_count, stream);
}

}  // namespace

void linear_read_sm90(const ReadArgs& a, int head_dim, int sm_count, cudaStream_t stream) {
  dispatch_head_dim(HopperLinear2HeadDims(), head_dim, [&](auto dim) {
    if constexpr (splits_window_grads_sm90(dim)) {
      if (a.z == nullptr) return launch_read<dim, true, DecayKind::kDecays, false, true>(a, sm_count, stream);
    }
    if constexpr (!grads_with_values_sm90(dim)) {
      if (a.z == nullptr && a.window > 0) return launch<dim, true, true>(a, sm_count, stream);
      if (a.z == nullptr) return launch<dim, true, false>(a, sm_count, stream);
    }
    if (a.window > 0) launch<dim, false, true>(a, sm_count, stream);
    else launch<dim, false, false>(a, sm_count, stream);
  });
}

}  // namespace fastmax
