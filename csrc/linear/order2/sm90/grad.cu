// Gradient kernels of order 2 on Hopper, by wgmma and TMA. At head dims up to 64 one kernel computes grad_v and grad_k:
//
//   pass (Grads)      x    x2    y    y2    e of   time       result
//   kQueries          q    g     k    v     x      forward    grad_q = sum (g0 + g1 x.y) (x2.y2 + e) y
//   kKeys             k    v     q    g     y      backward   grad_k, the same sum
//   kKeysAndValues    k    v     q    g     y      backward   grad_k, and grad_v = sum f(x.y) y2
//
// A warpgroup owns 64 rows of x and x2, which stay in shared memory; persistent blocks of two warpgroups. For each tile T (64 features x
// all channels) of the snapshot W = x2 T^T on the tensor cores, and the product rule on the CUDA cores: with
//   P = sum_xg x[8s + x] x[8b + g] W[8x + g],    grad[8b + g] += sum_x x[8s + x] W[8x + g],  grad[8s + x] += sum_g x[8b + g] W[8x + g],
// which covers the tiles (s, s) with no special case, as the snapshot has weights for that. Where diagonals are packed (snapshot.h),
// lanes exchange what diagonal tiles give to columns of other lanes, and W of opposite columns. The gradient has the layout of an
// accumulator: block j of columns is registers 4j .. 4j + 3, of rows g and g + 8. Blocks are reached by constant indices, because the
// gradient is rotated by two blocks after every two stars. grad_v += features(x) T runs beside it. At head dim 128 x2 is an operand in
// registers: read from shared memory for each tile, it would make that slower than the tensor cores.
//
// With decays, the inter-chunk part of each row of x is multiplied by its decay. Where their gradient is wanted, the kernel also
// computes the sum over the pairs of a row, p = f(x.y) (x2.y2 + e) (portable/grad.cu). These sums are in shared memory while tiles
// of pairs are added.
//
// The second moment needs no tiles of pairs: sum e y y^T is one product. Intra-chunk: scores and x2 . y2 by two products, whose weights are
// operands of the next two in registers. With an exact window states lag, and the last of these tiles have local pairs (window.h).
//
// Roles: a producer thread fills a ring of stages, two consumer warpgroups compute. With grad_v, the consumers issue the loads themselves.

#include <algorithm>
#include <type_traits>

#include "core/launch.h"
#include "core/sm90/pipeline.h"
#include "core/sm90/ptx.h"
#include "core/sm90/wgmma.h"
#include "linear/order2/features.h"
#include "linear/order2/sm90/hopper_walk.h"
#include "linear/order2/sm90/kernels.h"
#include "linear/order2/sm90/window.h"

namespace fastmax {
namespace {

// Passes of the table above.
enum class Grads { kQueries, kKeys, kKeysAndValues };

template <int kHeadDim>
struct GradTileSm90 : HopperState<kHeadDim> {
  using State = HopperState<kHeadDim>;
  static constexpr int kWarpgroups = 2, kWarps = 4 * kWarpgroups;
  // One more warpgroup has the producer. With grad_v all registers are needed, and the consumers issue loads in turn.
  static constexpr int threads(Grads grads) { return 128 * (kWarpgroups + (grads == Grads::kKeysAndValues ? 0 : 1)); }
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
  static constexpr int kRows = kWarpgroups * kTileRows;
  static constexpr int kStages = kHeadDim <= 64 ? 8 : 5;
  static constexpr int kStageBytes = State::kStateStageBytes;
  static constexpr int kXBuffers = kHeadDim <= 64 ? 2 : 1, kXBytes = 2 * State::kTileBytes;  // x and x2 of a warpgroup
  static constexpr bool kIsWide = kHeadDim == 128;

  // Shared memory, from a multiple of 1024 bytes on.
  static constexpr int kX = kStages * kStageBytes;
  static constexpr int kScales = kX + kXBuffers * kWarpgroups * kXBytes;
  static constexpr int kPairSums = kScales + kStages * kScaleBytes;  // of rows
  // Decays of tiles of x, and of y of each stage. For wide heads they are read from memory.
  static constexpr int kDecayBytes = kIsWide ? 0 : static_cast<int>(sizeof(DecayTile));
  static constexpr int kXDecay = kPairSums + kRows * 4, kYDecay = kXDecay + kXBuffers * kWarpgroups * kDecayBytes;
  static constexpr int kXFull = kYDecay + kStages * kDecayBytes;
  static constexpr int kBarriers = kXFull + 8 * kWarpgroups * kXBuffers;
  static constexpr int kQueues = kBarriers + Ring<kStages>::kBarrierBytes;  // of each warp
  static constexpr int kQueueBytes = grads_with_values_sm90(kHeadDim) ? kWarps * SourceQueue::kBytes : 0;
  // With an exact window: the shifts of the rows of y of each stage. For wide heads they are read from memory.
  static constexpr int kShifts = kQueues + kQueueBytes, kShiftBytes = kIsWide ? 0 : kScaleBytes;
  static constexpr int kSharedBytes = kSwizzledTileAlignment + kShifts + kStages * kShiftBytes;
  static_assert(kBarriers % 16 == 0 && kQueues % 16 == 0, "barriers and sources are aligned");
  static_assert(kSharedBytes <= shared_limit(90), "stages, x and barriers do not fit");
};

struct GradMaps {
  CUtensorMap x, x2, y, y2, grad, values;
};

// What all roles of a block share: the arguments, the layout of shared memory, and the loads of tiles. A stage holds two tiles of a
// snapshot, or for the intra-chunk part a tile of y and one of y2, the y heads of a state in turn. Members are references to variables of
// the kernel: the compiler then allocates registers as for lambdas.
// kWindow: with an exact window.
template <int kHeadDim, Grads kGrads, DecayKind kDecayKind, bool kWindow_>
struct GradBlock {
  using Tile = GradTileSm90<kHeadDim>;
  using RowTile = RowTileSm90<kHeadDim>;
  static constexpr bool kBack = kGrads != Grads::kQueries, kValues = kGrads == Grads::kKeysAndValues, kWindow = kWindow_;
  static constexpr bool kHasDecay = kDecayKind != DecayKind::kNone, kSumsPairs = kDecayKind == DecayKind::kDecaysAndSums;
  static constexpr bool kDecays = kDecayKind == DecayKind::kDecays || kSumsPairs;
  static constexpr int kStages = Tile::kStages, kTileBytes = Tile::kTileBytes, kWarpgroups = Tile::kWarpgroups;
  static constexpr int kDecayBytes = kHasDecay ? Tile::kDecayBytes : 0, kShiftBytes = kWindow && kBack ? Tile::kShiftBytes : 0;

  const GradMaps& maps;
  const GradArgs& a;
  const ItemsOf<kWindow>& items;
  const uint32_t &stages_at, &x_at, &scales_at, &x_full;
  const Ring<kStages>& ring;
  const int &warp, &lane, &warpgroup;

  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == 0) {
      ring.init(4 * kWarpgroups);
      for (int i = 0; i < kWarpgroups * Tile::kXBuffers; ++i) ptx::mbarrier_init(x_full + 8 * i, 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
  }

  __device__ __forceinline__ uint32_t stage(RingPosition at) const { return stages_at + at.stage * Tile::kStageBytes; }

  // That are loaded with a tile of x or y.
  __device__ __forceinline__ int decay_bytes() const {
    if constexpr (kDecayBytes != 0 && kDecayKind == DecayKind::kBounds) return offsetof(DecayTile, gates);
    else if constexpr (kDecayBytes != 0) return a.decay.tile_bytes;
    else return 0;
  }

  __device__ __forceinline__ void load_snapshot(RingPosition at, const char* snapshot, int i) const {
    const int bytes = Tile::state_stage_bytes(i);
    ring.wait_until_empty(at);
    ring.expect(at, bytes);
    ptx::bulk_load(stages_at + at.stage * Tile::kStageBytes, snapshot + i * Tile::kStageBytes, bytes, ring.full(at));
  }

  __device__ __forceinline__ void load_own(RingPosition at, int own, int first_token, int first_y_head, int batch) const {
    const uint32_t stage = stages_at + at.stage * Tile::kStageBytes;
    const int token = first_token + (kBack ? -(own / a.y_group) : own) * kTileRows, y_head = first_y_head + (kBack ? own % a.y_group : 0);
    ring.wait_until_empty(at);
    ring.expect(at, Tile::kStageBytes + (kBack ? kScaleBytes : 0) + decay_bytes() + kShiftBytes);
    if constexpr (kDecayBytes != 0) {
      const int64_t state = int64_t{batch} * a.state_heads + first_y_head / a.y_group;
      ptx::bulk_load(stages_at + Tile::kYDecay + at.stage * kDecayBytes, decay_tile_at(a, state, token), decay_bytes(), ring.full(at));
    }
    RowTile::load(stage, maps.y, ring.full(at), token, y_head, batch);
    RowTile::load(stage + kTileBytes, maps.y2, ring.full(at), token, y_head, batch);
    if (kBack) {
      ptx::bulk_load(scales_at + at.stage * kScaleBytes,
                     tile_scales(a.y_scale, a.ny, int64_t{batch} * a.state_heads * a.y_group + y_head, token), kScaleBytes, ring.full(at));
    }
    if constexpr (kShiftBytes != 0) {
      ptx::bulk_load(shifts(at), tile_scales(a.y_shift, a.ny, int64_t{batch} * a.state_heads * a.y_group + y_head, token), kShiftBytes,
                     ring.full(at));
    }
  }
  __device__ __forceinline__ uint32_t shifts(RingPosition at) const {
    return static_cast<uint32_t>(stages_at + Tile::kShifts + at.stage * kShiftBytes);
  }

  // The buffers of x and x2, their decays and their barrier, of this thread's warpgroup.
  __device__ __forceinline__ uint32_t x_tile(int buffer) const { return x_at + (kWarpgroups * buffer + warpgroup) * Tile::kXBytes; }
  __device__ __forceinline__ uint32_t x_decay_at(int buffer) const {
    return static_cast<uint32_t>(stages_at + Tile::kXDecay + (kWarpgroups * buffer + warpgroup) * kDecayBytes);
  }
  __device__ __forceinline__ uint32_t x_barrier(int buffer) const { return x_full + 8 * (kWarpgroups * buffer + warpgroup); }

  // The last row of y, less the lag of states, that the first row of the warpgroup's tile of x sees.
  __device__ __forceinline__ int last_seen(const ItemsOfRows::Item& item) const {
    return a.seen_end(item.row + warpgroup * kTileRows) + (kWindow ? a.lag : 0);
  }

  // Loads x and x2 of a work tile; count: how many tiles the block had before. By one thread of the warpgroup.
  __device__ __forceinline__ void load_x(int index, int count) const {
    if (index >= items.count) return;
    const ItemsOfRows::Item item = items.at(a, index);
    const int buffer = count % Tile::kXBuffers;
    const uint32_t barrier = x_barrier(buffer);
    const uint32_t x = x_tile(buffer);
    const int token = tile_token(a, a.nx, item.row + warpgroup * kTileRows);
    prefetch_sums<Tile::kSums>(a, a.sums, item);
    ptx::mbarrier_arrive_expect(barrier, Tile::kXBytes + decay_bytes());
    if constexpr (kDecayBytes != 0) {
      const int64_t state = static_cast<int64_t>(item.batch) * a.state_heads + item.state_head;
      ptx::bulk_load(x_decay_at(buffer), x_decay_tile(a, state, last_seen(item)), decay_bytes(), barrier);
    }
    RowTile::load(x, maps.x, barrier, token, item.x_head, item.batch);
    RowTile::load(x + kTileBytes, maps.x2, barrier, token, item.x_head, item.batch);
  }
};

// The producer: one thread that fills the ring of stages. Without grad_v; with it the consumers issue the loads (StageLoads).
template <class Block>
__device__ __forceinline__ void produce(const Block& b) {
  using Tile = typename Block::Tile;
  ptx::fewer_registers<Tile::kProducerRegisters>();
  if (b.warp != 4 * Block::kWarpgroups || b.lane != 0) return;
  RingPosition at;
  for (int index = blockIdx.x; index < b.items.count; index += gridDim.x) {
    const ItemSource source(b.a, b.items, index, b.a.snapshots, Tile::kStateStages, Tile::kSnapshotBytes);
    for (int i = 0; i < source.state_stages; ++i, at.template advance<Block::kStages>()) {
      b.load_snapshot(at, source.snapshot, i);
    }
    for (int own = 0; own < source.own_stages; ++own, at.template advance<Block::kStages>()) {
      b.load_own(at, own, source.token, source.y_head, source.batch);
    }
  }
}

// The next load of StageLoads: stage `stage` of the `stages` of the block's work tile `item`. count: loads before it.
struct LoadPosition {
  int count, stages, stage, item;
};

// Loads that the consumers issue, the warps in turn: kAhead stages before they are needed, one for each stage that is used.
template <class Block>
struct StageLoads {
  using Tile = typename Block::Tile;
  static constexpr int kStages = Block::kStages, kAhead = kStages - 2;
  // Whether load_state_stage knows that its stage is of a snapshot. With decays or a window, code that can load everything at each place
  // would need more instructions than a cache of them holds (128 KB).
  static constexpr int kLongStages = 1 + Tile::kBlocks / 4 * Tile::star_tiles(0);  // to the end of the longer passes
  static constexpr bool kLongLoadState =
      (Block::kHasDecay || Block::kWindow) && Block::kValues && kLongStages - 1 + kAhead < Tile::kStateStages;  // not at head_dim 32

  const Block b;
  const SourceQueue& queue;
  LoadPosition& next;

  __device__ __forceinline__ StageLoads(const Block& b, const SourceQueue& queue, LoadPosition& next) : b(b), queue(queue), next(next) {}

  // By any lane.
  __device__ __forceinline__ void put_source(int item) const { 
    queue.put(item, ItemSource(b.a, b.items, blockIdx.x + item * gridDim.x, b.a.snapshots, Tile::kStateStages, Tile::kSnapshotBytes));
  }

  __device__ __forceinline__ void begin() {
    if (b.lane < SourceQueue::kItems - 1) put_source(b.lane);
    __syncwarp();
    next.stages = queue.stages(0);
    for (int i = 0; i < kAhead; ++i) load_stage();
  }

  __device__ __forceinline__ void load_stage() {
    if (!Block::kValues || next.stages == 0) return;
    if (b.lane == 0 && b.warp == next.count % Tile::kWarps) {
      const RingPosition at{next.count % kStages, static_cast<uint32_t>(next.count / kStages % 2)};
      const int own = next.stage - queue.state_stages(next.item);
      if (own < 0) b.load_snapshot(at, queue.snapshot(next.item), next.stage);
      else b.load_own(at, own, queue.token(next.item), queue.y_head(next.item), queue.batch(next.item));
    }
    __syncwarp();
    ++next.count;
    if (++next.stage == next.stages) next.stage = 0, next.stages = queue.stages(++next.item);
  }

  // The same where the next.stage kAhead from here is of the work tile's snapshot too.
  __device__ __forceinline__ void load_state_stage() {
    if constexpr (kLongLoadState) {
      if (b.lane == 0 && b.warp == next.count % Tile::kWarps) {
        const RingPosition at{next.count % kStages, static_cast<uint32_t>(next.count / kStages % 2)};
        b.load_snapshot(at, queue.snapshot(next.item), next.stage);
      }
      __syncwarp();
      ++next.count, ++next.stage;
    } else {
      load_stage();
    }
  }
};

// A star of tiles of pairs for rows `row` and `row + 8` of x: its block of columns of x, and what its tiles add to that block.
template <class RowTile, bool kValues>
struct Star {
  float x[2][8], sum[2][8];
  uint32_t scalar[kValues ? 2 : 1][8];  // x in bf16, twice in a word: scalars of features

  __device__ __forceinline__ void load(uint32_t x_tile, int row, int star) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t columns[4];
      ptx::load_shared_u32x4(columns, x_tile + RowTile::chunk_offset(row + 8 * r, star));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[r][2 * i] = ptx::low_bf16(columns[i]), x[r][2 * i + 1] = ptx::high_bf16(columns[i]);
        if constexpr (kValues) scalar[r][2 * i] = ptx::duplicate_half<0>(columns[i]), scalar[r][2 * i + 1] = ptx::duplicate_half<1>(columns[i]);
        sum[r][2 * i] = sum[r][2 * i + 1] = 0.f;
      }
    }
  }

  // The product rule for a tile. w: its W; base: the other block of x, as ldmatrix reads it; gradient: the registers of that block.
  __device__ __forceinline__ void add_products(const float* w, float* gradient, const uint32_t* base) {
    const float b0 = ptx::low_bf16(base[0]), b1 = ptx::high_bf16(base[0]);
    const float b2 = ptx::low_bf16(base[1]), b3 = ptx::high_bf16(base[1]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      gradient[0] = fmaf(x[0][i], w[4 * i], gradient[0]), gradient[1] = fmaf(x[0][i], w[4 * i + 1], gradient[1]);
      gradient[2] = fmaf(x[1][i], w[4 * i + 2], gradient[2]), gradient[3] = fmaf(x[1][i], w[4 * i + 3], gradient[3]);
      sum[0][i] = fmaf(b1, w[4 * i + 1], fmaf(b0, w[4 * i], sum[0][i]));
      sum[1][i] = fmaf(b3, w[4 * i + 3], fmaf(b2, w[4 * i + 2], sum[1][i]));
    }
  }

  // Adds the star's sums to the gradient of its own block: reduced over the lanes of a row, each of which keeps its two columns.
  __device__ __forceinline__ void add_to(float* gradient, int t) const {
    const bool upper = t & 2, odd = t & 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = (upper ? sum[r][i + 4] : sum[r][i]) + __shfl_xor_sync(0xffffffffu, upper ? sum[r][i] : sum[r][i + 4], 2);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        gradient[2 * r + i] += (odd ? v[i + 2] : v[i]) + __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 2], 1);
      }
    }
  }
};

// The product rule for half of a diagonal tile, a block of columns: of its W this lane has that of its own columns times those at each
// distance. gradient: the registers of the block.
template <class RowTile>
__device__ __forceinline__ void add_diagonal_products(const float* w, const BlockColumns<RowTile>& columns, float* gradient, int t) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t (&words)[3] = columns.words[r];
    const float x[5] = {ptx::low_bf16(words[0]), ptx::high_bf16(words[0]), ptx::low_bf16(words[1]), ptx::high_bf16(words[1]),
                        ptx::low_bf16(words[2])};
    const float* v = w + 2 * r;  // of distance d: 8 d, 8 d + 1
    float &first = gradient[2 * r], &second = gradient[2 * r + 1];
    first = fmaf(x[0] + x[0], v[0], first), second = fmaf(x[1] + x[1], v[1], second);
#pragma unroll
    for (int distance = 1; distance < 4; ++distance) {
      first = fmaf(x[distance], v[8 * distance], first), second = fmaf(x[distance + 1], v[8 * distance + 1], second);
    }
    // For the other column: this lane's second one, columns of the next lane, or of the one after it.
    second = fmaf(x[0], v[8], second);
    const float next_first = fmaf(x[1], v[9], x[0] * v[16]), next_second = fmaf(x[1], v[17], x[0] * v[24]), after_first = x[1] * v[25];
    const int before = (t + 3) % 4;
    first += __shfl_sync(0xffffffffu, next_first, before, 4) + __shfl_xor_sync(0xffffffffu, after_first, 2);
    second += __shfl_sync(0xffffffffu, next_second, before, 4);
  }
}

// The same for the opposite columns: this lane has W of two columns in one of an octet's blocks, and the lane with the opposite columns
// that in the other block.
template <class RowTile>
__device__ __forceinline__ void add_opposite_products(const float (&w)[16], uint32_t x_tile, int row, float* gradient, int t) {
  const uint32_t opposite = x_tile + (t + 2) % 4 * 4;
#pragma unroll
  for (int octet = 0; octet < 4; ++octet) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* own = w + 4 * octet + 2 * r;
      const float other[2] = {__shfl_xor_sync(0xffffffffu, own[0], 2), __shfl_xor_sync(0xffffffffu, own[1], 2)};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t x = ptx::load_shared_u32(opposite + RowTile::chunk_offset(row, 2 * octet + j) + 8 * r * RowTile::kRowBytes);
        const bool is_own = t / 2 == j;
        float* pair = gradient + 4 * (2 * octet + j) + 2 * r;
        pair[0] = fmaf(ptx::low_bf16(x), is_own ? own[0] : other[0], pair[0]);
        pair[1] = fmaf(ptx::high_bf16(x), is_own ? own[1] : other[1], pair[1]);
      }
    }
  }
}

// A consumer: one of the two warpgroups that compute, each for its 64 rows of every work tile of the block.
template <int kHeadDim, Grads kGrads, DecayKind kDecayKind, bool kWindow>
struct GradConsumer {
  using Block = GradBlock<kHeadDim, kGrads, kDecayKind, kWindow>;
  using Tile = typename Block::Tile;
  using RowTile = typename Block::RowTile;
  using Rows = Operand<RowTile>;
  using Products = Wgmma<Bf16, kHeadDim>;
  using Scores = Wgmma<Bf16, 64>;
  using Panel = Wgmma<Bf16, Tile::kPanelCols>;
  using Item = ItemsOfRows::Item;
  // A copy or a reference: the choice orders instructions, and this one is what was measured.
  using Position = std::conditional_t<Tile::kIsWide && !Block::kHasDecay, RingPosition, RingPosition&>;
  static constexpr bool kBack = Block::kBack, kValues = Block::kValues, kHasDecay = Block::kHasDecay, kDecays = Block::kDecays;
  static constexpr bool kSumsPairs = Block::kSumsPairs;
  static constexpr int kBlocks = Tile::kBlocks, kSteps = kHeadDim / 16;  // of 16 columns
  static constexpr int kStages = Tile::kStages, kTileBytes = Tile::kTileBytes, kDecayBytes = Block::kDecayBytes;

  // x2 as an operand in registers: for wide heads, during a whole work tile; with decays of all rows, which need registers elsewhere, for
  // the tiles of pairs alone.
  using Fragments = uint32_t[Tile::kIsWide ? kSteps : 1][4];
  static constexpr bool kKeepsFragments = Tile::kIsWide && !kDecays;

  // A work tile: the warpgroup's rows in shared memory, and its accumulators in registers. Only the number of the work tile stays in a
  // register: its Item is computed again where it is needed.
  struct WorkTile {
    const int& count;
    uint32_t x, x2;
    float (&grad)[kHeadDim / 2];
    float (&values)[kValues ? kHeadDim / 2 : 1];
    float (&x_e)[2];
    Fragments& x2_fragments;
  };

  const Block b;
  const GradArgs& a;
  const View& values_out;
  StageLoads<Block> loads;
  const int w4, t, g, row;
  Position at;

  __device__ __forceinline__ GradConsumer(const Block& b, const View& values_out, StageLoads<Block>& loads, RingPosition& at)
      : b(b), a(b.a), values_out(values_out), loads(loads), at(at), w4(b.warp % 4), t(b.lane % 4), g(b.lane / 4), row(16 * w4 + g) {}

  __device__ __forceinline__ void run() {
    for (int count = 0;; ++count) {
      const int index = blockIdx.x + count * gridDim.x;
      if (index >= b.items.count) break;
      compute(count, index);
    }
    if (w4 == 0 && b.lane == 0) ptx::bulk_wait<0>();
  }

  __device__ __forceinline__ void compute(const int& count, int index) {
    const Item item = b.items.at(a, index);
    if constexpr (kValues) {
      __syncwarp();
      if (b.lane == 0) loads.put_source(count + SourceQueue::kItems - 1);
      __syncwarp();
    }
    const int buffer = count % Tile::kXBuffers;
    const bool has_state = a.has_state(item.chunk);
    const uint32_t x = b.x_tile(buffer), x2 = x + kTileBytes;
    float grad[kHeadDim / 2], values[kValues ? kHeadDim / 2 : 1], x_e[2] = {0.f, 0.f};
    ptx::mbarrier_wait(b.x_barrier(buffer), count / Tile::kXBuffers % 2);
    // Lanes may leave the wait apart, and nothing before the first product brings them together: but one of them issues loads there, by
    // uniform registers, which the others would write to meanwhile.
    if constexpr (kValues) __syncwarp();
    Fragments x2_fragments;
    const WorkTile tile{count, x, x2, grad, values, x_e, x2_fragments};
    if constexpr (kKeepsFragments) load_fragments(tile);
    if (has_state) {
      add_moments(item, tile);
      add_pairs(tile);
    } else {
      clear(tile);
    }
    keep(grad);
    if constexpr (kValues) keep(values);

    [[maybe_unused]] WalkSum x_sums[2];
    [[maybe_unused]] float pairs[2] = {0.f, 0.f};  // this lane's part of the sums of pairs
    if constexpr (kHasDecay) decay_inter_chunk(tile, has_state, x_sums, pairs);
    add_intra_chunk(tile, x_sums, pairs);
    store(tile, pairs);
  }

  __device__ __forceinline__ uint32_t stage() const { return b.stage(at); }
  __device__ __forceinline__ Item item_again(const WorkTile& tile) const {
    return b.items.at(a, blockIdx.x + ptx::keep_in_register(tile.count) * gridDim.x);
  }

  // A number per row of x: e or shift.
  __device__ __forceinline__ void load_x_scales(const RowScale& scales, const Item& item, float (&x_e)[2]) const {
    if (kBack) return;
    const float* e = scales.data + item.x_head_index * scales.head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int x_row = item.row + b.warpgroup * kTileRows + row + 8 * r;
      x_e[r] = x_row < a.nx ? e[x_row] : 0.f;
    }
  }

  // Of rows row and row + 8 of x, or of x2 behind it, two columns of block j. Their addresses are computed at each use of this: from
  // one use to the next they would take registers of the loops between.
  __device__ __forceinline__ auto lane_columns(uint32_t x) const {
    return [first = x + 4 * t, own_row = static_cast<int>(ptx::keep_in_register(row))](int r, int j, int behind = 0) {
      const uint32_t pair = ptx::load_shared_u32(first + RowTile::chunk_offset(own_row + 8 * r, j) + behind);
      return make_float2(ptx::low_bf16(pair), ptx::high_bf16(pair));
    };
  }
  __device__ __forceinline__ uint32_t pair_sum_at(int r) const {
    return b.stages_at + Tile::kPairSums + (b.warpgroup * kTileRows + row + 8 * r) * 4;
  }

  // With an exact window and gates: this lane's part of the sums of a key's pairs with queries for which it is global. They are in shared
  // memory, behind the last use of those of the inter-chunk part.
  __device__ __forceinline__ void add_global_pairs(const float (&pairs)[2], bool first) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(pairs[r]);
      if (t == 0) ptx::store_shared_f32(pair_sum_at(r), first ? sum : sum + ptx::load_shared_f32(pair_sum_at(r)));
    }
  }

  __device__ __forceinline__ void clear(const WorkTile& tile) const {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) tile.grad[i] = 0.f;
    if constexpr (kValues) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) tile.values[i] = 0.f;
    }
  }

  __device__ __forceinline__ void load_fragments(const WorkTile& tile) const {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      ptx::ldmatrix_x4(tile.x2_fragments[k], tile.x2 + RowTile::chunk_offset(16 * w4 + b.lane % 16, 2 * k + b.lane / 16));
    }
  }
  // d = x2 rows^T, outside of the tiles of pairs.
  template <class Product, int kCount>
  __device__ __forceinline__ static void multiply_x2(float (&d)[kCount], const WorkTile& tile, const Rows& x2_operand, const Rows& rows) {
    if constexpr (kKeepsFragments) {
      Product::template rs_first<Major::kK>(d, tile.x2_fragments[0], rows.k_major(0));
#pragma unroll
      for (int k = 1; k < kSteps; ++k) Product::template rs<Major::kK>(d, tile.x2_fragments[k], rows.k_major(k));
    } else {
      Product::template ss_first<Major::kK, Major::kK>(d, x2_operand.k_major(0), rows.k_major(0));
#pragma unroll
      for (int k = 1; k < kSteps; ++k) Product::template ss<Major::kK, Major::kK>(d, x2_operand.k_major(k), rows.k_major(k));
    }
  }

  // ---- inter-chunk: what the snapshot gives

  // The first accumulators: second moment, first order, and the sums beside the snapshot.
  __device__ __forceinline__ void add_moments(const Item& item, const WorkTile& tile) {
    auto& grad = tile.grad;
    auto& values = tile.values;
    auto& x_e = tile.x_e;
    load_x_scales(a.x_scale, item, x_e);
    b.ring.wait_until_full(at), loads.load_state_stage();
    const Rows x_operand(tile.x), x2_operand = x_operand.behind(kTileBytes), moment(stage());
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
      b.ring.release(at, b.lane);
      at.template advance<kStages>();
      b.ring.wait_until_full(at);
      wgmma_fence();
    }
    const Rows linear(stage() + (Tile::kPanels == 1 ? kTileBytes : 0));
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {  // of the gradient: a tile has as many columns of y
      constexpr int kPanelSums = Tile::kPanelCols / 2;
      float(&of_panel)[kPanelSums] = reinterpret_cast<float(&)[kPanelSums]>(grad[kPanelSums * panel]);
      const Rows features = linear.behind(panel * kTileBytes);
      multiply_x2<Panel>(of_panel, tile, x2_operand, features);
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
    b.ring.release(at, b.lane);
    at.template advance<kStages>();
    const float* state_sums = a.sums + item.slot * Tile::kSums;
    // The sums of pairs of orders 0 and 1, less half of order 1, which the gradient adds in decay_inter_chunk.
    [[maybe_unused]] const auto columns = lane_columns(tile.x);
    [[maybe_unused]] float order0[2] = {0.f, 0.f}, order1[2] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float2 y = ptx::load_global_f32x2(state_sums + Tile::kSumY + 8 * j + 2 * t);
      [[maybe_unused]] float2 w;
      if constexpr (kValues || kSumsPairs) w = ptx::load_global_f32x2(state_sums + Tile::kSumW + 8 * j + 2 * t);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float e = kBack ? 1.f : x_e[r];
        float &grad0 = grad[4 * j + 2 * r], &grad1 = grad[4 * j + 2 * r + 1];
        if constexpr (kSumsPairs) {
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
    if constexpr (kSumsPairs) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (t == 0) order0[r] += (kBack ? 1.f : x_e[r]) * state_sums[Tile::kSumOne];
        const float sum = quad_sum(fmaf(a.c0, order0[r], 0.5f * order1[r]));
        if (t == 0) ptx::store_shared_f32(pair_sum_at(r), sum);
      }
    }
  }

  // The tiles of pairs, two stars a pass.
  __device__ __forceinline__ void add_pairs(const WorkTile& tile) {
    const Rows x2_operand(tile.x2);
    Star<RowTile, kValues> star;
    constexpr int kLong = Tile::star_tiles(0), kShort = Tile::star_tiles(kBlocks - 1);  // the lower stars have one tile more
    if constexpr (Tile::kIsWide) {
      if constexpr (!kKeepsFragments) load_fragments(tile);
      for (int s = 0; s < kBlocks / 2; s += 2) pass_by_tiles<kLong>(tile, star, s);
      for (int s = kBlocks / 2; s < kBlocks; s += 2) pass_by_tiles<kShort>(tile, star, s);
    } else {
      // At head dim 32 each loop has one pass. Without loops the compiler would mix passes, and run out of registers (C7512).
      const int half = kBlocks == 4 ? static_cast<int>(ptx::keep_in_register(kBlocks / 2)) : kBlocks / 2;
      for (int s = 0; s < half; s += 2) {
        if constexpr (kValues) pass_with_values<kLong>(tile, star, x2_operand, s);
        else pass<kLong>(tile, star, x2_operand, s);
      }
      for (int s = half; s < kBlocks; s += 2) {
        if constexpr (kValues) pass_with_values<kShort>(tile, star, x2_operand, s);
        else pass<kShort>(tile, star, x2_operand, s);
      }
      if constexpr (Tile::kPacksDiagonal) {
        if constexpr (kValues) add_blocks_with_values(tile, x2_operand);
        else add_blocks(tile, x2_operand);
      }
    }
  }

  // kTiles: of each of the two stars of a pass, s and s + 1; tile u of the pass is (s + u / kTiles, that + kFirstOffset + u % kTiles).
  template <int kTiles>
  static constexpr __host__ __device__ int base_block(int u) {  // from s on
    return u / kTiles + Tile::kFirstOffset + u % kTiles;
  }
  __device__ __forceinline__ void load_base(uint32_t (&base)[2], const WorkTile& tile, int s, int block) const {
    ptx::ldmatrix_x2(base, tile.x + RowTile::chunk_offset(16 * w4 + b.lane % 16, (s + block) % kBlocks));
  }

  // After a pass: the next two stars' blocks come first.
  __device__ __forceinline__ static void rotate(float (&grad)[kHeadDim / 2]) {
    float first[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) first[i] = grad[i];
#pragma unroll
    for (int i = 0; i < kHeadDim / 2 - 8; ++i) grad[i] = grad[i + 8];
#pragma unroll
    for (int i = 0; i < 8; ++i) grad[kHeadDim / 2 - 8 + i] = first[i];
  }

  // Without grad_v, up to head dim 64: W of a stage at a time, two of them in flight.
  __device__ __forceinline__ void issue_stage(float (&w)[64], RingPosition& used, const Rows& x2_operand) {
    used = at;
    b.ring.wait_until_full(at);
    const Rows features(stage());  // of both tiles of the stage
    at.template advance<kStages>();
    wgmma_fence();
    Wgmma<Bf16, 128>::template ss_first<Major::kK, Major::kK>(w, x2_operand.k_major(0), features.k_major(0));
#pragma unroll
    for (int k = 1; k < kSteps; ++k) Wgmma<Bf16, 128>::template ss<Major::kK, Major::kK>(w, x2_operand.k_major(k), features.k_major(k));
    wgmma_commit();
  }
  template <int kTiles>
  __device__ __forceinline__ void pass(const WorkTile& tile, Star<RowTile, kValues>& star, const Rows& x2_operand, int s) {
    float w[2][64];
    uint32_t base[2][2];
    RingPosition used = at;
    star.load(tile.x, row, s);
    issue_stage(w[0], used, x2_operand);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const RingPosition own = used;
#pragma unroll
      for (int j = 0; j < 2; ++j) load_base(base[j], tile, s, base_block<kTiles>(2 * i + j));
      if (i + 1 < kTiles) issue_stage(w[(i + 1) % 2], used, x2_operand), wgmma_wait<1>();
      else wgmma_wait<0>();
      keep(w[i % 2]);
      b.ring.release(own, b.lane);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int u = 2 * i + j;
        star.add_products(w[i % 2] + 32 * j, tile.grad + 4 * base_block<kTiles>(u), base[j]);
        if (u % kTiles == kTiles - 1) {
          star.add_to(tile.grad + 4 * (u / kTiles), t);
          if (u + 1 < 2 * kTiles) star.load(tile.x, row, s + 1);
        }
      }
    }
    rotate(tile.grad);
  }

  // W and grad_v in turn: the products of W run on the CUDA cores while those of grad_v run on the tensor cores.
  // kIsLong: of the longer passes.
  template <bool kIsLong>
  __device__ __forceinline__ void issue_w(float (&w)[32], Rows& features, RingPosition& used, const Rows& x2_operand, int u) {
    if (u % 2 == 0) {
      used = at;
      b.ring.wait_until_full(at);
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
    if (u % 2 == 0 && kIsLong) loads.load_state_stage();
    else if (u % 2 == 0) loads.load_stage();
  }
  __device__ __forceinline__ static void make_features(uint32_t (&f)[16], const uint32_t (&base)[2], const Star<RowTile, kValues>& star) {
#pragma unroll
    for (int i = 0; i < 16; ++i) f[i] = ptx::multiply_bf16x2(base[i % 2], star.scalar[i % 2][i / 2]);
  }
  template <int kFeatureSteps>
  __device__ __forceinline__ static void issue_values(const WorkTile& tile, const uint32_t (&f)[16], const Rows& features) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kFeatureSteps; ++k) Products::template rs<Major::kMN>(tile.values, f + 4 * k, features.mn_major(k));
    wgmma_commit();
  }
  template <int kTiles>
  __device__ __forceinline__ void pass_with_values(const WorkTile& tile, Star<RowTile, kValues>& star, const Rows& x2_operand, int s) {
    float w[32];
    uint32_t base[2], next_base[2], f[16];  // f: features, of the tile whose products with them are in flight
    Rows features(b.stages_at);             // of the tile
    RingPosition used = at;
    star.load(tile.x, row, s);
    load_base(base, tile, s, base_block<kTiles>(0));
    issue_w<kTiles == Tile::kStarTiles>(w, features, used, x2_operand, 0);
    make_features(f, base, star);
    issue_values<4>(tile, f, features);
#pragma unroll
    for (int u = 0; u < 2 * kTiles; ++u) {
      if (u + 1 < 2 * kTiles) load_base(next_base, tile, s, base_block<kTiles>(u + 1));
      const RingPosition own = used;
      wgmma_wait<1>();
      keep(w);
      star.add_products(w, tile.grad + 4 * base_block<kTiles>(u), base);
      if (u % kTiles == kTiles - 1) {
        star.add_to(tile.grad + 4 * (u / kTiles), t);
        if (u + 1 < 2 * kTiles) star.load(tile.x, row, s + 1);
      }
      base[0] = next_base[0], base[1] = next_base[1];
      if (u + 1 < 2 * kTiles) {
        issue_w<kTiles == Tile::kStarTiles>(w, features, used, x2_operand, u + 1);
        wgmma_wait<1>();
        if (u % 2 == 1) b.ring.release(own, b.lane);
        make_features(f, base, star);
        issue_values<4>(tile, f, features);
      } else {
        wgmma_wait<0>();
        b.ring.release(own, b.lane);
      }
    }
    rotate(tile.grad);
    if constexpr (kValues) keep(tile.values);
  }

  // The products within blocks (kPacksDiagonal), after the last pass: columns of the gradient are in order again.
  __device__ __forceinline__ void issue_opposite(float (&w)[16], RingPosition& used, const Rows& x2_operand) {
    using Half = Wgmma<Bf16, 32>;
    used = at;
    b.ring.wait_until_full(at);
    const Rows features(stage());
    at.template advance<kStages>();
    wgmma_fence();
    Half::template ss_first<Major::kK, Major::kK>(w, x2_operand.k_major(0), features.k_major(0));
#pragma unroll
    for (int k = 1; k < kSteps; ++k) Half::template ss<Major::kK, Major::kK>(w, x2_operand.k_major(k), features.k_major(k));
    wgmma_commit();
  }
  using TwoBlocks = BlockColumns<RowTile>[2];
  __device__ __forceinline__ void load_blocks(TwoBlocks& columns, const WorkTile& tile, int i) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) columns[j].load(tile.x, row, 2 * i + j, t);
  }
  __device__ __forceinline__ void add_diagonal(const float* w, const TwoBlocks& columns, const WorkTile& tile, int i) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) add_diagonal_products<RowTile>(w + 4 * j, columns[j], tile.grad + 4 * (2 * i + j), t);
  }
  __device__ __forceinline__ void add_blocks(const WorkTile& tile, const Rows& x2_operand) {
    float w[2][64], opposite[16];
    TwoBlocks columns;
    RingPosition used = at, last = at;
    issue_stage(w[0], used, x2_operand);
#pragma unroll
    for (int stage = 0; stage < 2; ++stage) {
      const RingPosition own = used;
      if (stage == 0) issue_stage(w[1], used, x2_operand);
      else issue_opposite(opposite, last, x2_operand);
      load_blocks(columns, tile, 2 * stage);
      wgmma_wait<1>();
      keep(w[stage]);
      b.ring.release(own, b.lane);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (j == 1) load_blocks(columns, tile, 2 * stage + 1);
        add_diagonal(w[stage] + 32 * j, columns, tile, 2 * stage + j);
      }
    }
    wgmma_wait<0>();
    keep(opposite);
    b.ring.release(last, b.lane);
    add_opposite_products<RowTile>(opposite, tile.x, row, tile.grad, t);
  }
  __device__ __forceinline__ static void make_features(uint32_t (&f)[16], const TwoBlocks& columns) {
#pragma unroll
    for (int i = 0; i < 16; ++i) f[i] = columns[i / 2 % 2].product(i % 2, i / 4);
  }
  __device__ __forceinline__ void add_blocks_with_values(const WorkTile& tile, const Rows& x2_operand) {
    float w[32], of_opposite[16];
    uint32_t f[16];
    TwoBlocks columns, next_columns;
    Rows features(b.stages_at);
    RingPosition used = at;
    load_blocks(columns, tile, 0);
    issue_w<false>(w, features, used, x2_operand, 0);
    make_features(f, columns);
    issue_values<4>(tile, f, features);
#pragma unroll
    for (int u = 0; u < Tile::kDiagonalTiles; ++u) {
      if (u + 1 < Tile::kDiagonalTiles) load_blocks(next_columns, tile, u + 1);
      const RingPosition own = used;
      wgmma_wait<1>();
      keep(w);
      add_diagonal(w, columns, tile, u);
      if (u + 1 < Tile::kDiagonalTiles) {
        columns[0] = next_columns[0], columns[1] = next_columns[1];
        issue_w<false>(w, features, used, x2_operand, u + 1);
        wgmma_wait<1>();
        if (u % 2 == 1) b.ring.release(own, b.lane);
        make_features(f, columns);
        issue_values<4>(tile, f, features);
      } else {
        OppositeColumns<RowTile> opposite;
        opposite.load(tile.x, row, t);
        features = Rows(stage());
        issue_opposite(of_opposite, used, x2_operand);
        loads.load_stage();
        wgmma_wait<1>();
        b.ring.release(own, b.lane);
#pragma unroll
        for (int i = 0; i < 8; ++i) f[i] = opposite.product(i % 2, i / 2);
        issue_values<2>(tile, f, features);
      }
    }
    wgmma_wait<1>();
    keep(of_opposite);
    add_opposite_products<RowTile>(of_opposite, tile.x, row, tile.grad, t);
    wgmma_wait<0>();
    b.ring.release(used, b.lane);
    keep(tile.values);
  }

  // At head dim 128: W of a tile at a time, two of them in flight.
  __device__ __forceinline__ void issue_tile(float (&w)[32], RingPosition& used, const Fragments& fragments, int u) {
    if (u % 2 == 0) used = at, b.ring.wait_until_full(at);
    const Rows features(b.stage(used) + u % 2 * kTileBytes);
    if (u % 2 == 1) at.template advance<kStages>();
    wgmma_fence();
    // Not rs_first: with W as an output alone, the compiler moves the products with the W before behind this, and two more W take registers.
    Scores::template rs_if<Major::kK>(false, w, fragments[0], features.k_major(0));
#pragma unroll
    for (int k = 1; k < kSteps; ++k) Scores::template rs<Major::kK>(w, fragments[k], features.k_major(k));
    wgmma_commit();
  }
  template <int kTiles>
  __device__ __forceinline__ void pass_by_tiles(const WorkTile& tile, Star<RowTile, kValues>& star, int s) {
    float w[2][32];
    uint32_t base[2];
    RingPosition used = at;
    star.load(tile.x, row, s);
    issue_tile(w[0], used, tile.x2_fragments, 0);
#pragma unroll
    for (int u = 0; u < 2 * kTiles; ++u) {
      const RingPosition own = used;
      load_base(base, tile, s, base_block<kTiles>(u));
      if (u + 1 < 2 * kTiles) issue_tile(w[(u + 1) % 2], used, tile.x2_fragments, u + 1), wgmma_wait<1>();
      else wgmma_wait<0>();
      keep(w[u % 2]);
      if (u % 2 == 1) b.ring.release(own, b.lane);
      star.add_products(w[u % 2], tile.grad + 4 * base_block<kTiles>(u), base);
      if (u % kTiles == kTiles - 1) {
        star.add_to(tile.grad + 4 * (u / kTiles), t);
        if (u + 1 < 2 * kTiles) star.load(tile.x, row, s + 1);
      }
    }
    rotate(tile.grad);
  }

  // ---- decays

  __device__ __forceinline__ auto x_decay(const WorkTile& tile, const Item& item) const {
    if constexpr (kDecayBytes != 0) {
      return SharedDecayTile{b.x_decay_at(static_cast<int>(ptx::keep_in_register(tile.count)) % Tile::kXBuffers)};
    } else {
      const int64_t state = static_cast<int64_t>(item.batch) * a.state_heads + item.state_head;
      return GlobalDecayTile{x_decay_tile(a, state, b.last_seen(item))};
    }
  }

  // Decays the inter-chunk part of each row of x, and begins its sum of pairs.
  __device__ __forceinline__ void decay_inter_chunk(const WorkTile& tile, bool has_state, WalkSum (&x_sums)[2], float (&pairs)[2]) const {
    const auto decay = x_decay(tile, item_again(tile));
    x_sums[0] = gated_sum<kBack, kDecayKind>(a.decay, decay, row), x_sums[1] = gated_sum<kBack, kDecayKind>(a.decay, decay, row + 8);
    if (has_state) {
      [[maybe_unused]] const auto columns = lane_columns(tile.x);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float factor = decay.since_chunk(row + 8 * r);
        float of_gradient = 0.f;
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          float2 x_pair;
          if constexpr (kSumsPairs) x_pair = columns(r, j);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& of_column = tile.grad[4 * j + 2 * r + i];
            if (kSumsPairs) of_gradient = fmaf(i == 0 ? x_pair.x : x_pair.y, of_column, of_gradient);
            of_column = decayed(of_column, factor);
            if constexpr (kValues) tile.values[4 * j + 2 * r + i] = decayed(tile.values[4 * j + 2 * r + i], factor);
          }
        }
        if (kSumsPairs) pairs[r] = decayed(fmaf(0.5f, of_gradient, t == 0 ? ptx::load_shared_f32(pair_sum_at(r)) : 0.f), factor);
      }
    }
  }

  // ---- intra-chunk: pairs of x with rows y of the same chunk

  struct IntraChunk {
    GradConsumer& c;
    const WorkTile& tile;
    const Item& item;
    const WalkSum (&x_sums)[2];
    float (&pairs)[2];
    const Rows x_operand, x2_operand;
    bool releases = false;  // the stage before, which is not released yet
    RingPosition before;
    int y_head = 0;  // of those of a state, of a tile with local pairs

    __device__ __forceinline__ IntraChunk(GradConsumer& c, const WorkTile& tile, const Item& item, const WalkSum (&x_sums)[2], float (&pairs)[2])
        : c(c), tile(tile), item(item), x_sums(x_sums), pairs(pairs), x_operand(tile.x), x2_operand(x_operand.behind(kTileBytes)) {}

    __device__ __forceinline__ auto y_decay([[maybe_unused]] int y_tile) const {  // of the stage's tile of y
      if constexpr (kDecayBytes != 0) {
        return SharedDecayTile{static_cast<uint32_t>(c.b.stages_at + Tile::kYDecay + c.at.stage * kDecayBytes)};
      } else {
        const int64_t state = static_cast<int64_t>(item.batch) * c.a.state_heads + item.state_head;
        return GlobalDecayTile{decay_tile(c.a, state, c.a.chunk_begin(item.chunk)) + y_tile};
      }
    }

    template <bool kDiagonal, PairFactors kFactors>
    __device__ __forceinline__ void add_tile(int y_tile) {
      const GradArgs& a = c.a;
      c.b.ring.wait_until_full(c.at);
      if constexpr (!kHasDecay) c.loads.load_stage();
      const Rows y(c.stage()), y2 = y.behind(kTileBytes);
      const uint32_t y_e = c.b.scales_at + c.at.stage * kScaleBytes;
      float s[32], p[32];
      uint32_t slopes[16], weights[kValues ? 16 : 1];
      begin_products(s, p, y, y2);
      const auto weigh = [&](int j, [[maybe_unused]] const float (&factors)[2][2]) {
        float2 column_e = make_float2(0.f, 0.f);
        if (kBack) column_e = ptx::load_shared_f32x2(y_e + (8 * j + 2 * c.t) * 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float slope[2], weight[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float score = s[4 * j + 2 * r + i], e = kBack ? (i == 0 ? column_e.x : column_e.y) : tile.x_e[r];
            // Reversed rows lie in memory in the order of tokens: later rows come first.
            const int column = 8 * j + 2 * c.t + i, x_row = c.row + 8 * r;
            const bool seen = !kDiagonal || (kBack ? column >= x_row : column <= x_row);
            float centred = p[4 * j + 2 * r + i] + e, f = 0.f;
            if (kValues || kSumsPairs) f = fmaf(score, fmaf(score, 0.5f * a.g1, a.g0), a.c0);
            if constexpr (kHasDecay) {
              centred *= factors[r][i];
              if (kSumsPairs) {
                const bool counts = seen && (!kDiagonal || column != x_row || a.decay.own_pairs_count);
                pairs[r] = counts ? fmaf(f, centred, pairs[r]) : pairs[r];
              }
              f *= factors[r][i];
            }
            slope[i] = seen ? fmaf(score, a.g1, a.g0) * centred : 0.f;
            if (kValues) weight[i] = seen ? f : 0.f;
          }
          slopes[2 * j + r] = ptx::pack_bf16x2(slope[0], slope[1]);
          if constexpr (kValues) weights[2 * j + r] = ptx::pack_bf16x2(weight[0], weight[1]);
        }
      };
      // Before the wait: loads from memory overlap the products.
      const PairDecay<kBack, kDecayKind, kFactors, decltype(y_decay(0))> decay(a.decay, y_decay(y_tile), x_sums[0], x_sums[1]);
      wgmma_wait<0>();
      keep(s), keep(p);
      c.b.ring.release(before, c.b.lane, releases);
      decay.for_each_block(weigh);
      add_products(slopes, weights, y, y2);
    }

    // x . y and x2 . y2.
    __device__ __forceinline__ void begin_products(float (&s)[32], float (&p)[32], const Rows& y, const Rows& y2) const {
      wgmma_fence();
      Scores::template ss_first<Major::kK, Major::kK>(s, x_operand.k_major(0), y.k_major(0));
#pragma unroll
      for (int k = 1; k < kSteps; ++k) Scores::template ss<Major::kK, Major::kK>(s, x_operand.k_major(k), y.k_major(k));
      multiply_x2<Scores>(p, tile, x2_operand, y2);
      wgmma_commit();
    }
    // The gradients' sums over a tile, which ends the stage.
    __device__ __forceinline__ void add_products(uint32_t (&slopes)[16], uint32_t (&weights)[kValues ? 16 : 1], const Rows& y,
                                                 const Rows& y2) {
      keep(slopes);
      if constexpr (kValues) keep(weights);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) Products::template rs<Major::kMN>(tile.grad, slopes + 4 * k, y.mn_major(k));
      if constexpr (kValues) {
#pragma unroll
        for (int k = 0; k < 4; ++k) Products::template rs<Major::kMN>(tile.values, weights + 4 * k, y2.mn_major(k));
      }
      wgmma_commit();
      wgmma_wait<0>();
      keep(tile.grad);
      if constexpr (kValues) keep(tile.values);
      before = c.at, releases = true;
      c.at.template advance<kStages>();
    }

    __device__ __forceinline__ void skip_tile() {
      c.b.ring.release(before, c.b.lane, releases);  // or the ring would fill up
      releases = false;
      c.b.ring.wait_until_full(c.at);
      if constexpr (!kHasDecay) c.loads.load_stage();
      c.b.ring.release(c.at, c.b.lane);
      c.at.template advance<kStages>();
    }

    // A tile of y before the diagonal one. Which factors a tile needs is known before its products.
    __device__ __forceinline__ void add_earlier_tile(int y_tile, [[maybe_unused]] const WalkSum& first_x) {
      if constexpr (!kHasDecay) {
        add_tile<false, PairFactors::kOne>(y_tile);
      } else {
        if constexpr (kDecayBytes != 0) c.b.ring.wait_until_full(c.at), c.loads.load_stage();
        const bool is_skipped = is_fully_decayed(first_x, y_decay(y_tile).sum(kLastOfTile<kBack>));
        if constexpr (kDecayBytes != 0) ptx::fence_proxy_async();  // for the load above (pipeline.h)
        if (is_skipped) skip_tile();
        else if constexpr (kDecays) add_tile<false, PairFactors::kRowsAndColumns>(y_tile);
        else if (is_whole<kBack>(c.x_decay(tile, item), y_decay(y_tile))) add_tile<false, PairFactors::kOne>(y_tile);
        else add_tile<false, PairFactors::kPairs>(y_tile);
      }
    }
    __device__ __forceinline__ void add_diagonal_tile(int y_tile) {
      if constexpr (!kHasDecay) {
        add_tile<true, PairFactors::kOne>(y_tile);
      } else if constexpr (kSumsPairs && kGrads == Grads::kQueries && kHeadDim == 64) {  // whose loads are another warp's
        add_tile<true, PairFactors::kPairs>(y_tile);  // of two kinds the compiler would take registers from tiles of the state
      } else {
        if constexpr (kDecayBytes != 0) c.b.ring.wait_until_full(c.at), c.loads.load_stage();
        const bool is_plain = kDecays ? !is_far<kBack>(y_decay(y_tile)) : is_whole<kBack>(c.x_decay(tile, item), y_decay(y_tile));
        if (is_plain) add_tile<true, kDecays ? PairFactors::kRowsAndColumns : PairFactors::kOne>(y_tile);
        else add_tile<true, PairFactors::kPairs>(y_tile);
      }
    }

    // ---- tiles with local pairs

    // kMasked: some pairs are not seen. kDecayed: they decay. kGated: global keys have gates.
    template <LocalPairs kPairs, bool kMasked, bool kDecayed, bool kGated = false>
    __device__ __forceinline__ void add_local_tile(int y_tile, const WindowDistances<kBack>& distances, const float (&x_shift)[2]) {
      const GradArgs& a = c.a;
      const Rows y(c.stage()), y2 = y.behind(kTileBytes);
      const uint32_t y_e = c.b.scales_at + c.at.stage * kScaleBytes;
      float s[32], p[32];
      uint32_t slopes[16], weights[kValues ? 16 : 1];
      [[maybe_unused]] float global_pairs[2] = {0.f, 0.f}, x_gates[2] = {0.f, 0.f};
      begin_products(s, p, y, y2);
      wgmma_wait<0>();
      keep(s), keep(p);
      c.b.ring.release(before, c.b.lane, releases);
      if constexpr (kGated && kBack) {
        const auto decay = c.x_decay(tile, item);
        x_gates[0] = decay.gate(c.row), x_gates[1] = decay.gate(c.row + 8);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int first = 8 * j + 2 * c.t;
        float2 column_e = make_float2(0.f, 0.f), column_shift = make_float2(0.f, 0.f);
        if (kBack) column_e = ptx::load_shared_f32x2(y_e + first * 4), column_shift = y_shift(y_tile, first);
        [[maybe_unused]] float4 sums;
        [[maybe_unused]] float2 gates = make_float2(0.f, 0.f);
        if constexpr (kDecayed) sums = y_decay(y_tile).sums(first);
        if constexpr (kGated && !kBack) gates = y_decay(y_tile).gates(first);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float slope[2], weight[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float score = s[4 * j + 2 * r + i], e = kBack ? (i == 0 ? column_e.x : column_e.y) : tile.x_e[r];
            [[maybe_unused]] const float gate = kBack ? x_gates[r] : i == 0 ? gates.x : gates.y;
            const float shift = kBack ? (i == 0 ? column_shift.x : column_shift.y) : x_shift[r];
            float exponent = 0.f;
            if constexpr (kDecayed) exponent = x_sums[r].since({i == 0 ? make_float2(sums.x, sums.y) : make_float2(sums.z, sums.w)});
            const float centred = p[4 * j + 2 * r + i] + e;
            const bool seen = !kMasked || distances.is_seen(j, r, i);
            WindowPair pair;
            if constexpr (kPairs == LocalPairs::kAll) pair = WindowPair::local(a, score, centred, exponent, shift);
            else pair = WindowPair::any(a, distances.is_local(j, r, i), score, centred, exponent, gate, shift);
            if (kSumsPairs) pairs[r] += seen && (!kMasked || !distances.is_own_token(j, r, i)) ? pair.flow : 0.f;
            if (kGated && kBack && kSumsPairs) global_pairs[r] += seen && !distances.is_local(j, r, i) ? pair.flow : 0.f;
            slope[i] = seen ? pair.slope : 0.f;
            if (kValues) weight[i] = seen ? pair.weight : 0.f;
          }
          slopes[2 * j + r] = ptx::pack_bf16x2(slope[0], slope[1]);
          if constexpr (kValues) weights[2 * j + r] = ptx::pack_bf16x2(weight[0], weight[1]);
        }
      }
      if constexpr (kGated && kBack && kSumsPairs) c.add_global_pairs(global_pairs, /*first=*/false);
      add_products(slopes, weights, y, y2);
    }

    // The shifts of two rows of y.
    __device__ __forceinline__ float2 y_shift([[maybe_unused]] int y_tile, int row) const {
      if constexpr (Block::kShiftBytes != 0) {
        return ptx::load_shared_f32x2(c.b.shifts(c.at) + row * 4);
      } else {
        const int token = tile_token(c.a, c.a.ny, c.a.y_row(c.a.chunk_begin(item.chunk) + y_tile * kTileRows));
        const int64_t head = (static_cast<int64_t>(item.batch) * c.a.state_heads + item.state_head) * c.a.y_group + y_head;
        return ptx::load_global_f32x2(tile_scales(c.a.y_shift, c.a.ny, head, token) + row);
      }
    }

    // rows_between: from the tile of y to that of x.
    __device__ __forceinline__ void add_local_tile(int y_tile, int rows_between, const float (&x_shift)[2]) {
      const GradArgs& a = c.a;
      c.b.ring.wait_until_full(c.at);
      c.loads.load_stage();
      uint32_t attended[2] = {~0u, ~0u};
      if constexpr (!kBack) {
        const int y_row = a.y_row(a.chunk_begin(item.chunk) + y_tile * kTileRows);
        if constexpr (kHasDecay) attended_rows(y_decay(y_tile), attended);
        else if (a.y_mask.data != nullptr || y_row < 0) attended_rows(a, item.batch, y_row, attended);
      }
      const WindowDistances<kBack> distances(rows_between, a.window, c.row, c.t, attended);
      const bool all_local = rows_between + kTileRows <= a.window;
      bool is_plain = all_local && rows_between > 0 && (attended[0] & attended[1]) == ~0u;
      if constexpr (kHasDecay && !kDecays) is_plain = is_plain && is_whole<kBack>(c.x_decay(tile, item), y_decay(y_tile));
      if (is_plain) add_local_tile<LocalPairs::kAll, false, kDecays>(y_tile, distances, x_shift);
      else if (all_local) add_local_tile<LocalPairs::kAll, true, kHasDecay>(y_tile, distances, x_shift);
      else if (kDecays && a.decay.is_gated()) add_local_tile<LocalPairs::kSome, true, kHasDecay, kDecays>(y_tile, distances, x_shift);
      else add_local_tile<LocalPairs::kSome, true, kHasDecay>(y_tile, distances, x_shift);
    }
  };

  __device__ __forceinline__ void add_intra_chunk(const WorkTile& tile, WalkSum (&x_sums)[2], float (&pairs)[2]) {
    const Item item = item_again(tile);
    load_x_scales(a.x_scale, item, tile.x_e);
    IntraChunk chunk(*this, tile, item, x_sums, pairs);
    const int y_group = kBack ? a.y_group : 1;
    const int own_stages = item.own_tiles * y_group, diagonal = (item.first_own + b.warpgroup) * y_group;
    const int diagonal_end = min(diagonal + y_group, own_stages);
    int own = 0;
    const auto tile_at = [&](int own) { return kBack ? own / y_group : own; };
    [[maybe_unused]] WalkSum first_x{};
    if constexpr (kHasDecay) first_x = x_decay(tile, item).sum(kFirstOfTile<kBack>);
    // The first tile with local pairs, or the diagonal one.
    const int local = kWindow ? diagonal - a.lag / kTileRows * y_group : diagonal;
    for (; own < local && own < own_stages; ++own) chunk.add_earlier_tile(tile_at(own), first_x);
    wgmma_wait<0>();
    if constexpr (kWindow) {
      float x_shift[2] = {0.f, 0.f};
      load_x_scales(a.x_shift, item, x_shift);
      if constexpr (kBack && kDecays) {
        if (a.decay.is_gated()) {  // from here on apart from the sums of decays, as local pairs do not have them
          const auto decay = x_decay(tile, item);
#pragma unroll
          for (int r = 0; r < 2; ++r) x_sums[r] = decay.sum(row + 8 * r);
          if constexpr (kSumsPairs) add_global_pairs(pairs, /*first=*/true);
        }
      }
      for (; own < diagonal_end; ++own) {
        if (kBack) chunk.y_head = own % y_group;
        chunk.add_local_tile(tile_at(own), kTileRows * (tile_at(diagonal) - tile_at(own)), x_shift);
      }
    } else {
      for (; own < diagonal_end; ++own) chunk.add_diagonal_tile(tile_at(own));
    }
    wgmma_wait<0>();
    for (; own < own_stages; ++own) {  // of the other warpgroup alone
      if constexpr (kHasDecay) loads.load_stage();
      chunk.skip_tile();
    }
    b.ring.release(chunk.before, b.lane, chunk.releases);
    if constexpr (kWindow && kBack && kSumsPairs) {
      if (a.global_pair_sums.data != nullptr) {
        const float sums[2] = {t == 0 ? ptx::load_shared_f32(pair_sum_at(0)) : 0.f, t == 0 ? ptx::load_shared_f32(pair_sum_at(1)) : 0.f};
        store_pair_sums(a.global_pair_sums, item, tile_token(a, a.nx, item.row + b.warpgroup * kTileRows), sums);
      }
    }
  }

  // ---- results

  // Whether a token of x is masked.
  __device__ __forceinline__ bool is_masked(const Item& item, int x_token) const {
    return mask_pointer(a.x_mask, item.batch)[static_cast<int64_t>(x_token) * a.x_mask.token] == 0;
  }

  // The gradients of masked rows are zeros.
  __device__ __forceinline__ void clear_masked(const WorkTile& tile, const Item& item, int token) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int x_token = token + row + 8 * r;
      const bool is_dropped = x_token >= 0 && x_token < a.nx && is_masked(item, x_token);
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (is_dropped) tile.grad[4 * j + 2 * r + i] = 0.f;
          if constexpr (kValues) {
            if (is_dropped) tile.values[4 * j + 2 * r + i] = 0.f;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void store_pair_sums(const RowOutput& sums, const Item& item, int token, const float (&pairs)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int x_token = token + row + 8 * r;
      const float sum = quad_sum(pairs[r]);
      if (t != 0 || x_token < 0 || x_token >= a.nx) continue;
      const bool is_dropped = kBack && a.x_mask.data != nullptr && is_masked(item, x_token);
      sums.data[item.x_head_index * sums.head + x_token] = is_dropped ? 0.f : sum;
    }
  }

  // The gradients replace x and x2 in shared memory, and are copied from there; then the next x and x2 of the buffer are loaded.
  __device__ __forceinline__ void store(const WorkTile& tile, const float (&pairs)[2]) const {
    const Item here = item_again(tile);
    const int token = tile_token(a, a.nx, here.row + b.warpgroup * kTileRows);
    keep(tile.grad);
    if constexpr (kValues) keep(tile.values);
    if (kBack && a.x_mask.data != nullptr) clear_masked(tile, here, token);
    if (kSumsPairs) store_pair_sums(a.pair_sums, here, token, pairs);
    ptx::barrier_wait<128>(1 + b.warpgroup);  // other warps may still have products of x and x2 (read.cu)
    store_accumulator<Bf16, RowTile>(tile.x, 0, tile.grad, 1.f, 1.f, w4, b.lane);
    if constexpr (kValues) store_accumulator<Bf16, RowTile>(tile.x2, 0, tile.values, 1.f, 1.f, w4, b.lane);
    ptx::fence_proxy_async();
    ptx::barrier_wait<128>(1 + b.warpgroup);
    const bool begins_before = kBack && token < 0;
    if (begins_before) {
      store_rows<kHeadDim>(tile.x, a.out, here.batch, here.x_head, token, a.nx, a.d, a.adds);
      if (kValues) store_rows<kHeadDim>(tile.x2, values_out, here.batch, here.x_head, token, a.nx, a.dv, a.adds);
      ptx::barrier_wait<128>(1 + b.warpgroup);
    }
    if (w4 == 0 && b.lane == 0) {
      if (!begins_before) {
        store_tile<RowTile>(tile.x, b.maps.grad, token, here.x_head, here.batch, a.adds);
        if (kValues) store_tile<RowTile>(tile.x2, b.maps.values, token, here.x_head, here.batch, a.adds);
      }
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
      b.load_x(blockIdx.x + (tile.count + Tile::kXBuffers) * gridDim.x, tile.count + Tile::kXBuffers);
    }
  }
};

template <int kHeadDim, Grads kGrads, DecayKind kDecayKind, bool kWindow>
__global__ void __launch_bounds__(GradTileSm90<kHeadDim>::threads(kGrads), 1)
    linear_grad_sm90_kernel(const __grid_constant__ GradMaps maps, const GradArgs a, const View values_out,
                            const ItemsOf<kWindow> items) {
  using Block = GradBlock<kHeadDim, kGrads, kDecayKind, kWindow>;
  using Tile = typename Block::Tile;
  constexpr bool kValues = Block::kValues;
  extern __shared__ uint8_t shared[];
  const uint32_t stages_at = first_tile(shared), x_at = stages_at + Tile::kX, scales_at = stages_at + Tile::kScales;
  const uint32_t x_full = stages_at + Tile::kXFull;
  const Ring<Block::kStages> ring(stages_at + Tile::kBarriers);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32, warpgroup = warp / 4;
  const Block block{maps, a, items, stages_at, x_at, scales_at, x_full, ring, warp, lane, warpgroup};
  block.init_barriers();
  if (!kValues && block.warpgroup == Block::kWarpgroups) return produce(block);
  if constexpr (!kValues) ptx::more_registers<Tile::kConsumerRegisters>();

  const SourceQueue queue{stages_at + Tile::kQueues + warp * SourceQueue::kBytes};
  LoadPosition next{0,0,0,0};
  StageLoads<Block> loads(block, queue, next);
  if constexpr (kValues) loads.begin();
  if (threadIdx.x % 128 == 0) {
    for (int i = 0; i < Tile::kXBuffers; ++i) block.load_x(blockIdx.x + i * gridDim.x, i);
  }
  RingPosition at;
  GradConsumer<kHeadDim, kGrads, kDecayKind, kWindow>(block, values_out, loads, at).run();
}

template <int kHeadDim, Grads kGrads, DecayKind kDecayKind, bool kWindow>
void launch_grad(const GradArgs& a, const View& values, int sm_count, cudaStream_t stream) {
  using Tile = GradTileSm90<kHeadDim>;
  const int x_heads = a.state_heads * a.x_group, y_heads = a.state_heads * a.y_group;
  const ItemsOf<kWindow> items(a, Tile::kRows);
  GradMaps maps{};
  maps.x = rows_map<kHeadDim>(a.x, a, x_heads, a.nx, a.d), maps.x2 = rows_map<kHeadDim>(a.x2, a, x_heads, a.nx, a.dv);
  maps.y = rows_map<kHeadDim>(a.y, a, y_heads, a.ny, a.d), maps.y2 = rows_map<kHeadDim>(a.y2, a, y_heads, a.ny, a.dv);
  maps.grad = rows_map<kHeadDim>(a.out, a, x_heads, a.nx, a.d);
  if (kGrads == Grads::kKeysAndValues) maps.values = rows_map<kHeadDim>(values, a, x_heads, a.nx, a.dv);
  launch_kernel(kDecayKind == DecayKind::kNone ? "linear_grad_sm90" : "linear_grad_decay_sm90",
                linear_grad_sm90_kernel<kHeadDim, kGrads, kDecayKind, kWindow>, std::min(sm_count, items.count), Tile::threads(kGrads),
                Tile::kSharedBytes, stream, maps, a, values, items);
}

template <int kHeadDim, Grads kGrads, bool kWindow>
void launch(const GradArgs& a, const View& values, int sm_count, cudaStream_t stream) {
  if (!a.decay) launch_grad<kHeadDim, kGrads, DecayKind::kNone, kWindow>(a, values, sm_count, stream);
  else if (a.decay.bounds_alone) launch_grad<kHeadDim, kGrads, DecayKind::kBounds, kWindow>(a, values, sm_count, stream);
  else if (a.pair_sums.data == nullptr) launch_grad<kHeadDim, kGrads, DecayKind::kDecays, kWindow>(a, values, sm_count, stream);
  else if constexpr (kGrads != Grads::kKeysAndValues || !kWindow || !splits_window_grads_sm90(kHeadDim)) {
    launch_grad<kHeadDim, kGrads, DecayKind::kDecaysAndSums, kWindow>(a, values, sm_count, stream);
  } else {
    throw std::logic_error("fastmax: linear_grads_sm90 splits this call");
  }
}
template <int kHeadDim, Grads kGrads>
void launch(const GradArgs& a, const View& values, int sm_count, cudaStream_t stream) {
  if (a.window > 0) launch<kHeadDim, kGrads, true>(a, values, sm_count, stream);
  else launch<kHeadDim, kGrads, false>(a, values, sm_count, stream);
}

}  // namespace

void linear_grad_sm90(const GradArgs& a, int head_dim, int sm_count, cudaStream_t stream) {
  dispatch_head_dim(HopperLinear2HeadDims(), head_dim,
                    [&](auto dim) { launch<dim, Grads::kQueries>(a, {}, sm_count, stream); });
}
void linear_grads_sm90(const ReadArgs& values, const GradArgs& a, int head_dim, int sm_count, cudaStream_t stream) {
  dispatch_head_dim(HopperLinear2HeadDims(), head_dim, [&](auto dim) {
    if constexpr (splits_window_grads_sm90(dim)) {
      if (a.window > 0 && a.pair_sums.data != nullptr) {
        linear_read_sm90(values, head_dim, sm_count, stream);
        return launch_grad<dim, Grads::kKeys, DecayKind::kDecaysAndSums, true>(a, {}, sm_count, stream);
      }
    }
    if constexpr (grads_with_values_sm90(dim)) {
      launch<dim, Grads::kKeysAndValues>(a, values.out, sm_count, stream);
    } else {
      linear_read_sm90(values, head_dim, sm_count, stream);
      launch<dim, Grads::kKeys>(a, {}, sm_count, stream);
    }
  });
}

}  // namespace fastmax
