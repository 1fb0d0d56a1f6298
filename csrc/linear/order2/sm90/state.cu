// States of the linear algorithm on Hopper: what portable/state.cu computes, by wgmma and TMA, in snapshots of snapshot.h:
//
//   state             y    w    e of    time        read by
//   prefix of keys    k    v            forward     o, grad_q
//   suffix of queries q    g    y       backward    grad_k, grad_v
//
// A consumer warpgroup has up to kOwnTiles tiles of 64 features x all channels in its accumulators, and adds y in stages of 64 rows. A stage
// is a tile of w and one of y. Products take the transposed features of y from registers (ldmatrix of y, times scalars of y) and w, or for
// moments y, from shared memory. At the beginning of a chunk the sums are rounded into shared memory. A copier warp stores them while the
// consumers go on; with decays (linear/decay.h) the sums then decay. A third warpgroup has the producer, the copiers, and with decays a
// warp that scales rows.

#include "core/lanes.h"
#include "core/launch.h"
#include "core/sm90/pipeline.h"
#include "core/sm90/ptx.h"
#include "core/sm90/wgmma.h"
#include "linear/order2/linear2.h"
#include "linear/order2/row_walk.h"
#include "linear/order2/sm90/hopper_walk.h"
#include "linear/order2/sm90/kernels.h"

namespace fastmax {
namespace {

template <int kHeadDim, bool kFine>
struct StateTileSm90 : HopperShares<kHeadDim, kFine> {
  using State = HopperShares<kHeadDim, kFine>;
  // The producer and the copiers are a warpgroup of their own, which gives its registers to the consumers.
  static constexpr int kThreads = 256, kAllThreads = kThreads + 128;  // of the consumers, and all
  static constexpr int kResident = kHeadDim == 32 ? 2 : 1;  // blocks that share a multiprocessor, where there are as many
  static constexpr int kStages = kHeadDim <= 64 ? 8 : 4;
  static constexpr int kStageBytes = 2 * State::kTileBytes;  // w, y
  // Whether a run's first rows stay in registers from the last stage of the run before; else they are read again after the snapshot.
  static constexpr bool kKeepsRows = kHeadDim <= 64;

  // Shared memory, from a multiple of 1024 bytes on.
  static constexpr int kStaging = kStages * kStageBytes;  // a snapshot's tiles, of each warpgroup
  static constexpr int kStagingBytes = State::kOwnTiles * State::kTileBytes;
  static constexpr int kScales = kStaging + 2 * kStagingBytes;  // e of the rows of each stage
  static constexpr int kFactors = kScales + kStages * kScaleBytes;  // their decays until their chunk's end
  static constexpr int kBarriers = kFactors + kStages * kScaleBytes;
  static constexpr int kCopied = kBarriers + Ring<kStages>::kBarrierBytes;  // barriers of stages whose rows are not yet scaled
  static constexpr int kAlignment = 128;  // of dynamic shared memory
  static constexpr int kSharedBytes = kSwizzledTileAlignment - kAlignment + kCopied + Ring<kStages>::kBarrierBytes;
  static_assert(kResident * kSharedBytes <= shared_limit(90), "stages, staging and barriers do not fit");
};

// Kinds of rows of y: without e; with e (moments and sums of e y); with decays of 0 or 1 only, which e includes; with decays, by which
// w is multiplied too.
enum class Rows { kPlain, kScaled, kBounded, kDecay };

// Division by a number that the launch knows, as one multiplication: exact where what is divided is not negative, and its product
// with that number below 2^32.
struct Divisor {
  uint32_t multiplier;  // 2^32 / number, rounded up; 0: by 1

  explicit Divisor(int number)
      : multiplier(number == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + number - 1) / number)) {}
  __device__ __forceinline__ int quotient(int x) const {
    return multiplier == 0 ? x : static_cast<int>(uint64_t{static_cast<uint32_t>(x)} * multiplier >> 32);
  }
};
// Constants of a launch for the producer.
struct Loads {
  Divisor y_group, state_heads;
  bool has_e;  // besides decays
};

// What all roles of a block share: arguments, position in the launch, shared memory. A launch has the segments from first_segment on. A
// state pass writes snapshots at the boundaries in [begin, end) and, in the last segment, at its end. Of several segments the first is
// passed over beside sums (`totals`) of the rows of those behind it, but for the last; these have a launch of their own (linear.h).
//
// Members are references to variables of run_roles: the compiler then allocates registers as for lambdas.
template <int kHeadDim, Rows kRows, bool kFine>
struct StateBlock {
  using Tile = StateTileSm90<kHeadDim, kFine>;
  using RowTile = RowTileSm90<kHeadDim>;
  using Share = StateShare<kHeadDim, kFine>;
  static constexpr bool kScaled = kRows != Rows::kPlain, kHasDecay = kRows == Rows::kDecay;
  static constexpr bool kBounded = kRows == Rows::kBounded || kHasDecay;
  static constexpr int kStages = Tile::kStages, kTileBytes = Tile::kTileBytes;
  static constexpr uint32_t kOnes = 0x3f803f80u;  // two, in bf16
  static constexpr bool kRoundsScales = kHasDecay && kHeadDim <= 64;  // at 128 consumers have no register left for one more address
  // The more registers the warp that scales rows has, the more of them are in flight. At head dim 128 the consumers need all others.
  static constexpr int kProducerRegisters = !kHasDecay || kHeadDim == 128 ? 24 : kHeadDim == 32 ? 32 : 40;
  static constexpr int kConsumerRegisters = kHeadDim == 32 ? 104 : kHasDecay && kHeadDim == 64 ? 232 : 240;
  static_assert(2 * kConsumerRegisters + kProducerRegisters <= 3 * ptx::registers_at_launch(Tile::kAllThreads * Tile::kResident),
                "the producer has fewer registers to give");
  // Named barriers of a warpgroup and of the warp that copies its snapshots: its staging may be written; is.
  static constexpr int kWithCopier = 128 + 32;
  __device__ __forceinline__ static int staging_is_free(int wg) { return 1 + wg; }
  __device__ __forceinline__ static int staging_is_full(int wg) { return 3 + wg; }

  const CUtensorMap &y_map, &zeroed_y_map, &w_map, &zeroed_w_map;
  const StateArgs& a;
  const Loads& loads;
  const uint32_t& stages_at;
  const Ring<kStages>&ring, &copied;  // copied: stages that are loaded, and not yet scaled; without decays the ring itself
  const int &warp, &lane, &warpgroup;
  const int &state, &begin, &end;  // the segment's state, and its virtual rows of y
  const int &first_segment, &segment, &blocks, &state_block;  // blocks: of a segment of all states
  const bool is_last, totals;
  const int &y_group, &stages;

  // With decays: e of a stage's rows, which is their decays where there is no other, and what RowScaler makes of it, in the other's place.
  __device__ __forceinline__ uint32_t scales(RingPosition at) const {
    return static_cast<uint32_t>(stages_at + (loads.has_e ? Tile::kScales : Tile::kFactors) + at.stage * kScaleBytes);
  }
  __device__ __forceinline__ uint32_t rounded_scales(RingPosition at) const {
    return static_cast<uint32_t>(stages_at + (loads.has_e ? Tile::kFactors : Tile::kScales) + at.stage * kScaleBytes);
  }
  // The tiles of a snapshot in shared memory, from which they are copied to memory.
  __device__ __forceinline__ uint32_t staging_of(int wg) const {
    return static_cast<uint32_t>(stages_at + Tile::kStaging + wg * Tile::kStagingBytes);
  }
};

// The producer of the stages of y and w: one thread.
template <class Block>
struct StateProducer {
  using Tile = typename Block::Tile;
  using RowTile = typename Block::RowTile;
  static constexpr int kStages = Block::kStages, kTileBytes = Block::kTileBytes;
  static constexpr bool kScaled = Block::kScaled, kHasDecay = Block::kHasDecay, kBounded = Block::kBounded;
  const Block& b;

  __device__ __forceinline__ void run() const {
    for (int i = 0; b.lane == 0 && i < b.stages; ++i) load_stage(i);
  }

  __device__ __forceinline__ void load_stage(int i) const {
    const StateArgs& a = b.a;
    const RingPosition at{i % kStages, static_cast<uint32_t>(i / kStages % 2)};
    const uint32_t w = b.stages_at + at.stage * Tile::kStageBytes;
    const int own_state = static_cast<int>(ptx::keep_in_register(b.state));  // or what depends on it would take registers of the loop
    const int tile = kScaled ? b.loads.y_group.quotient(i) : i, y_head = i - tile * b.y_group, row = b.begin + tile * kTileRows;
    const int token = tile_token(a, a.ny, a.y_row(row)), batch = b.loads.state_heads.quotient(own_state);
    const int head = (own_state - batch * a.state_heads) * b.y_group + y_head;
    bool is_whole = true;
    if constexpr (kBounded) {
      is_whole = a.attended.whole[(int64_t{own_state} * b.y_group + y_head) * a.attended.groups + row / kBoundary] != 0;
    }
    b.ring.wait_until_empty(at);
    b.copied.expect(at, Tile::kStageBytes + (kHasDecay ? 1 + b.loads.has_e : kScaled ? 1 : 0) * kScaleBytes);
    if (is_whole) {
      RowTile::load(w, b.w_map, b.copied.full(at), token, head, batch);
      RowTile::load(w + kTileBytes, b.y_map, b.copied.full(at), token, head, batch);
    } else {
      RowTile::load(w, b.zeroed_w_map, b.copied.full(at), token - b.a.first_zeroed, head, batch);
      RowTile::load(w + kTileBytes, b.zeroed_y_map, b.copied.full(at), token - b.a.first_zeroed, head, batch);
    }
    if (kHasDecay) {
      ptx::bulk_load(b.stages_at + Tile::kFactors + at.stage * kScaleBytes, tile_scales(a.y_factors, a.ny, b.state, token), kScaleBytes,
                     b.copied.full(at));
    }
    if (kHasDecay ? b.loads.has_e : kScaled) {
      ptx::bulk_load(b.stages_at + Tile::kScales + at.stage * kScaleBytes,
                     tile_scales(a.y_scale, a.ny, int64_t{own_state} * b.y_group + y_head, token), kScaleBytes, b.copied.full(at));
    }
  }
};

// The scaler: multiplies rows of w by their decays until their chunk's end, rounds e, and hands the stage to the consumers. One warp, whose
// products hide behind those of the tensor cores; the consumers would have to multiply features, which are more.
template <class Block>
struct RowScaler {
  using Tile = typename Block::Tile;
  static constexpr int kHeadDim = Tile::kPanelCols * Tile::kPanels;
  using RowTile = typename Block::RowTile;
  const Block& b;

  __device__ __forceinline__ void run() const {
    RingPosition at;
    for (int i = 0; i < b.stages; ++i, at.template advance<Block::kStages>()) {
      b.copied.wait_until_full(at);
      scale(b.stages_at + at.stage * Tile::kStageBytes, b.stages_at + Tile::kFactors + at.stage * kScaleBytes);
      if constexpr (Block::kRoundsScales) {
        __syncwarp();  // the factors may be written over
        round_scales(b.scales(at), b.rounded_scales(at));
      }
      ptx::fence_proxy_async();
      b.ring.publish(at, b.lane);
    }
  }

  // As the consumers take e: in bf16, and behind it ones, for shares without e.
  __device__ __forceinline__ void round_scales(uint32_t e, uint32_t rounded) const {
    const float2 pair = ptx::load_shared_f32x2(e + 8 * b.lane);
    ptx::store_shared_u32(rounded + 4 * b.lane, ptx::pack_bf16x2(pair.x, pair.y));
    ptx::store_shared_u32(rounded + kScaleBytes / 2 + 4 * b.lane, Block::kOnes);
  }

  // Rows as they lie: the chunks of a row have one factor, whatever their order. A row of a panel per kRowChunks lanes.
  __device__ __forceinline__ void scale(uint32_t w, uint32_t factors) const {
    constexpr int kRowChunks = RowTile::kRowBytes / 16, kPassRows = 32 / kRowChunks;
    constexpr int kPasses = kHeadDim == 64 ? 4 : kHeadDim == 32 ? 2 : 1;  // in flight
    uint32_t at = w + 16 * b.lane, factor_at = factors + b.lane / kRowChunks * 4;
#pragma unroll 1
    for (int row = 0; row < kTileRows; row += kPasses * kPassRows) {
      uint32_t x[kPasses][RowTile::kPanels][4];
      float factor[kPasses];
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        factor[i] = ptx::load_shared_f32(factor_at + i * kPassRows * 4);
#pragma unroll
        for (int j = 0; j < RowTile::kPanels; ++j) ptx::load_shared_u32x4(x[i][j], at + i * 512 + j * RowTile::kPanelBytes);
      }
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
#pragma unroll
        for (int j = 0; j < RowTile::kPanels; ++j) {
#pragma unroll
          for (uint32_t& pair : x[i][j]) pair = multiply_bf16x2(pair, ptx::pack_bf16x2(factor[i], factor[i]));
          ptx::store_shared_u32x4(at + i * 512 + j * RowTile::kPanelBytes, x[i][j]);
        }
      }
      at += kPasses * 512, factor_at += kPasses * kPassRows * 4;
    }
  }
};

// The copier of a warpgroup's snapshots from shared memory to memory: one warp.
template <class Block>
struct SnapshotCopier {
  using Tile = typename Block::Tile;
  const Block& b;
  int wg;  // the warpgroup

  __device__ __forceinline__ void run(int first_chunk) const {
    const typename Block::Share share(b.state_block % Tile::kStateBlocks * 2 + wg);
    for (int c = first_chunk; b.a.chunk_begin(c) < b.end + b.is_last; ++c) {
      ptx::barrier_arrive<Block::kWithCopier>(Block::staging_is_free(wg));
      ptx::barrier_wait<Block::kWithCopier>(Block::staging_is_full(wg));
      if (b.lane == 0) copy(share, b.staging_of(wg), c), ptx::bulk_wait_read<0>();
      __syncwarp();
    }
    if (b.lane == 0) ptx::bulk_wait<0>();
  }

  // By one thread.
  __device__ __forceinline__ void copy(const typename Block::Share& share, uint32_t staging, int c) const {
    constexpr int kTileBytes = Tile::kTileBytes;
    uint8_t* snapshot = static_cast<uint8_t*>(b.a.snapshots) + b.a.slot(b.state, c) * Tile::kSnapshotBytes;
    if (share.pairs > 0) {
      const int tile = Tile::kFirstPair + Tile::pair_index(share.star, share.first);
      ptx::bulk_store(snapshot + tile * kTileBytes, staging, share.pairs * kTileBytes);
    }
    const uint32_t last = staging + (share.tiles - 1) * kTileBytes;
    if (share.last == LastTile::kColumns) {
      const int tile = (share.of_y ? Tile::kMomentTile : Tile::kLinearTile) + share.half;
      ptx::bulk_store(snapshot + tile * kTileBytes, last, kTileBytes);
    } else if (share.last == LastTile::kDiagonal) {
      ptx::bulk_store(snapshot + (Tile::kFirstDiagonal + share.star) * kTileBytes, last, kTileBytes);
    } else if (share.has_opposite()) {
      ptx::bulk_store(snapshot + Tile::kTiles * kTileBytes, last, Tile::kOppositeBytes);
    }
    ptx::bulk_commit();
  }
};

// A consumer: a warpgroup that adds rows to its kOwn tiles of the state, and stores them at the boundaries of chunks. Members are
// references to variables of consume, as those of StateBlock.
template <class Block, int kOwn>
struct StateConsumer {
  using Tile = typename Block::Tile;
  using RowTile = typename Block::RowTile;
  using Share = typename Block::Share;
  using Products = Wgmma<Bf16, Tile::kPanelCols * Tile::kPanels>;
  static constexpr int kHeadDim = Tile::kPanelCols * Tile::kPanels;
  static constexpr int kStages = Block::kStages, kTileBytes = Block::kTileBytes;
  static constexpr bool kScaled = Block::kScaled, kHasDecay = Block::kHasDecay, kBounded = Block::kBounded;
  static constexpr bool kRoundsScales = Block::kRoundsScales;
  static constexpr int kRegs = kHeadDim / 2;  // accumulators of a tile
  // Products of a step go in two groups, the first kFirst tiles and the rest: features of one are made while the other runs.
  static constexpr int kFirst = (kOwn + 1) / 2;
  static constexpr int kColumnWarps = Tile::kPanelCols / 16, kOnesWarp = Tile::kOnesRow / 16;  // of a tile of columns, and of ones
  static constexpr int kPairs = kOwn / 2 + 1;
  static constexpr uint32_t kOne = Block::kOnes;
  // What the last tile may be: where diagonals are packed, of a block's first warpgroup a diagonal tile, and of the second one columns or
  // sums; where a block has one star, all of the second one.
  static constexpr bool kMayBeColumns = !Tile::kPacksDiagonal || kOwn == Tile::kLastTiles;
  static constexpr bool kMayBeDiagonal = Tile::kPacksDiagonal && (kOwn == Tile::kOwnTiles) == Tile::kPairsStars;
  static constexpr bool kPacksLast = kMayBeDiagonal || Tile::kPacksDiagonal && kMayBeColumns;

  const Block& b;
  const Share& share;
  const bool &of_columns, &of_ones, &of_diagonal;
  const int &w4, &t, &partner;
  const uint32_t (&pair_offset)[kOwn / 2];
  const uint32_t &last_offset, &scalars_offset, &next_scalars_offset, &ones_row;
  // count: this lane's part of sum e; where rows are plain, of what was carried in alone.
  float (&acc)[kOwn][kRegs];
  float& count;
  // Of 16 rows: y^T of the tiles' blocks, two tiles each, of a tile two registers of 8 rows; the last tile may have two blocks.
  uint32_t (&blocks_of_y)[kPairs][4];
  uint32_t (&scalars)[2][2];  // as they lie, of 8 rows each those of a row and of the next
  uint32_t (&f)[kOwn][4];     // features: of one group of products, while those of the other are in flight

  // Calls f(sum, saved) for each accumulator and its place in a slot of StateArgs::accumulators.
  template <class F>
  __device__ __forceinline__ void for_each_accumulator(int slot, const F& f) const {
    float* saved = b.a.accumulators +
                   (static_cast<int64_t>(slot) * b.blocks + b.state_block) * (Tile::kAccumulators * Tile::kThreads) + threadIdx.x;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
#pragma unroll
      for (int i = 0; i < kRegs; ++i) f(acc[j][i], saved[(j * kRegs + i) * Tile::kThreads]);
    }
    f(count, saved[(Tile::kAccumulators - 1) * Tile::kThreads]);
  }

  __device__ __forceinline__ void load_rows(uint32_t y) const {
#pragma unroll
    for (int i = 0; i < kPairs - 1; ++i) ptx::ldmatrix_x4_trans(blocks_of_y[i], y + pair_offset[i]);
    ptx::ldmatrix_x4_trans(blocks_of_y[kPairs - 1], y + last_offset);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scalars[h][0] = ptx::load_shared_u32(y + scalars_offset + 8 * h * RowTile::kRowBytes);
      scalars[h][1] = ptx::load_shared_u32(y + next_scalars_offset + 8 * h * RowTile::kRowBytes);
    }
  }

  // Features of tiles [first, end) of pairs. m: their scalars.
  __device__ __forceinline__ void make_features(const uint32_t (&m)[2][2], int first, int end) const {
#pragma unroll
    for (int j = first; j < end; ++j) {
      const uint32_t* x = blocks_of_y[j / 2] + j % 2 * 2;
      f[j][0] = ptx::multiply_bf16x2(x[0], m[0][0]), f[j][1] = ptx::multiply_bf16x2(x[0], m[1][0]);
      f[j][2] = ptx::multiply_bf16x2(x[1], m[0][1]), f[j][3] = ptx::multiply_bf16x2(x[1], m[1][1]);
    }
  }

  // The last tile, which may be of columns or of ones where diagonals are not packed: scale is then e of the rows.
  __device__ __forceinline__ void make_last_features(const uint32_t (&m)[2][2], const uint32_t (&scale)[2]) const {
    const uint32_t (&pairs)[4] = blocks_of_y[kPairs - 1];
    const bool takes_ones = of_ones && (!Tile::kSharesOnes || w4 >= kOnesWarp);
    uint32_t x[4];
    x[3] = takes_ones ? 0 : pairs[3], x[2] = takes_ones ? 0 : pairs[2];
    x[1] = takes_ones ? ones_row : pairs[1], x[0] = takes_ones ? ones_row : pairs[0];
    const bool plain = of_columns || of_ones;
    f[kOwn - 1][0] = ptx::multiply_bf16x2(x[0], plain ? scale[0] : m[0][0]);
    f[kOwn - 1][1] = ptx::multiply_bf16x2(x[2], plain ? scale[0] : m[1][0]);
    f[kOwn - 1][2] = ptx::multiply_bf16x2(x[1], plain ? scale[1] : m[0][1]);
    f[kOwn - 1][3] = ptx::multiply_bf16x2(x[3], plain ? scale[1] : m[1][1]);
  }

  // Where diagonals are packed: what the last tile's blocks are multiplied by, of 8 rows each for the even octets and the odd ones. Of a
  // diagonal tile, the columns at the warp's distance; of opposite columns, those of the other half of the block, whose octets have halves
  // of two blocks. scale: of columns and ones.
  __device__ __forceinline__ void load_factors(uint32_t (&factors)[2][2], const uint32_t (&scale)[2]) const {
    const uint32_t (&x)[4] = blocks_of_y[kPairs - 1];
    const bool sends_next = kMayBeColumns && of_ones && b.lane < 16;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t even = ptx::shuffle_octet(sends_next ? x[2 + h] : x[h], partner);
      uint32_t odd = scale[h];
      if constexpr (kMayBeDiagonal) odd = ptx::shuffle_octet(x[2 + h], partner);
      factors[h][0] = kMayBeColumns && of_columns ? scale[h] : even;
      factors[h][1] = kMayBeColumns && !of_diagonal ? scale[h] : odd;
    }
    keep(factors[0]), keep(factors[1]);
  }
  __device__ __forceinline__ void make_packed_features(const uint32_t (&factors)[2][2]) const {
    const uint32_t (&x)[4] = blocks_of_y[kPairs - 1];
    const bool takes_next = kMayBeColumns && of_ones && b.lane >= 16, takes_ones = kMayBeColumns && of_ones;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      f[kOwn - 1][2 * h] = ptx::multiply_bf16x2(takes_next ? x[2 + h] : x[h], factors[h][0]);
      f[kOwn - 1][2 * h + 1] = ptx::multiply_bf16x2(takes_ones ? ones_row : x[2 + h], factors[h][1]);
    }
  }

  // Coefficients of a step's rows, from the address of those of the lane's first row.
  __device__ __forceinline__ static void load_pairs(uint32_t (&x)[2], uint32_t address, int k) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 pair = ptx::load_shared_f32x2(address + (16 * k + 8 * h) * 4);
      x[h] = ptx::pack_bf16x2(pair.x, pair.y);
    }
  }

  __device__ __forceinline__ void store_sums(int64_t slot) const {
    float* sums = b.a.sums + slot * Tile::kSums;
    const float total = sum_of_lanes(count);
    if (share.of_y && b.lane == 0) sums[Tile::kSumOne] = total;
    sums += (share.of_y ? Tile::kSumY : Tile::kSumW) + 2 * b.lane;
    constexpr int kFirst = Tile::kOnesRow % 16 / 8 * 2;
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      const float* pair = acc[kOwn - 1] + 4 * j + kFirst;
      if (b.lane < 4) *reinterpret_cast<float2*>(sums + 8 * j) = make_float2(pair[0], pair[1]);
    }
  }

  __device__ __forceinline__ void store_snapshot(int c) const {
    const StateArgs& a = b.a;
    const uint32_t staging = b.staging_of(b.warpgroup);
    const int64_t slot = a.slot(b.state, c);
    // First of all: the fence below waits for these stores.
    if (of_ones && share.is_there && w4 == kOnesWarp) store_sums(slot);
    ptx::barrier_wait<Block::kWithCopier>(Block::staging_is_free(b.warpgroup));
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      bool is_once = share.block(j) == share.star;  // the products, which otherwise stand for two
      if (j == kOwn - 1 && of_diagonal) is_once = w4 == 0;
      float weight = is_once ? a.weights.pair : 2.f * a.weights.pair;
      if (j == kOwn - 1 && of_columns) weight = share.of_y ? a.weights.moment : a.weights.linear;
      if (Tile::kPacksDiagonal && kMayBeColumns && j == kOwn - 1) {
        // Of the sums' tile the even octets alone are features.
        const int octet_rows = of_ones ? 8 * w4 + b.lane / 8 % 2 * 32 : 16 * w4 + b.lane / 8 % 2 * 8;
        store_accumulator_at<Bf16, RowTile>(staging + j * kTileBytes, octet_rows + b.lane % 8, acc[j], weight, weight, b.lane);
      } else if (j < kOwn - 1 || Tile::kSharesOnes || !of_ones) {
        store_accumulator<Bf16, RowTile>(staging + j * kTileBytes, 0, acc[j], weight, weight, w4, b.lane);
      }
    }
    ptx::fence_proxy_async();
    ptx::barrier_arrive<Block::kWithCopier>(Block::staging_is_full(b.warpgroup));
  }

  // A stage of 64 rows, in steps of 16. left: stages that are not yet begun; goes_on: whether the accumulators are not zeros.
  __device__ __forceinline__ void add_stage(RingPosition& at, int& left, bool& goes_on) const {
    const bool is_first = left == b.stages;
    --left;
    const RingPosition own = at;
    const uint32_t w = b.stages_at + own.stage * Tile::kStageBytes, y = w + kTileBytes;
    const uint32_t e = kHasDecay ? b.scales(own) : b.stages_at + Tile::kScales + own.stage * kScaleBytes;
    [[maybe_unused]] uint32_t last_at;  // e of this lane's first rows
    if constexpr (kRoundsScales) last_at = ptx::keep_in_register(b.rounded_scales(own) + (share.of_y ? 0 : kScaleBytes / 2) + 4 * t);
    else if constexpr (kBounded) last_at = ptx::keep_in_register(e + 8 * t);
    const Operand<RowTile> values(w), last_values(share.of_y ? y : w);
    bool next_is_full = false;
    if constexpr (kScaled) {
      const float2 pair = ptx::load_shared_f32x2(e + 8 * b.lane);
      count += pair.x + pair.y;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      // What the next stage needs is asked for beside this one's products, and its first rows are read beside the last of them.
      if (k == 1) {
        at.template advance<kStages>();
        next_is_full = b.ring.is_full(left > 0 ? at : own);
      }
      if (k == 3) {
        if (!next_is_full) b.ring.wait_until_full(left > 0 ? at : own);
        __syncwarp();
      }
      // What is loaded is, before a wait, beside products.
      uint32_t m[2][2], scale[2] = {kOne, kOne};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        m[0][h] = ptx::pair_of_low(scalars[h][0], scalars[h][1]), m[1][h] = ptx::pair_of_high(scalars[h][0], scalars[h][1]);
      }
      const uint64_t rows = values.mn_major(k), last_rows = last_values.mn_major(k);
      const auto add = [&](int j, uint64_t w) {
        if (kBounded && k == 0) Products::template rs_if<Major::kMN>(goes_on, acc[j], f[j], w);
        else Products::template rs<Major::kMN>(acc[j], f[j], w);
      };
      wgmma_wait<1>();
      make_features(m, 0, kFirst);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < kFirst; ++j) add(j, rows);
      wgmma_commit();
      if constexpr (kMayBeColumns && kRoundsScales) {
#pragma unroll
        for (int h = 0; h < 2; ++h) scale[h] = ptx::load_shared_u32(last_at + (16 * k + 8 * h) * 2);
        keep(scale);
      } else if constexpr (kMayBeColumns && kBounded) {
        load_pairs(scale, last_at, k);
        if (!share.of_y) scale[0] = scale[1] = kOne;
        keep(scale);
      } else if constexpr (kMayBeColumns && kScaled) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 pair = ptx::load_shared_f32x2(e + (16 * k + 8 * h + 2 * t) * 4);
          scale[h] = share.of_y ? ptx::pack_bf16x2(pair.x, pair.y) : kOne;
        }
        keep(scale);
      }
      [[maybe_unused]] uint32_t factors[2][2];
      if constexpr (kPacksLast) load_factors(factors, scale);
      wgmma_wait<1>();
      // The stage before, whose products are done: also where it was the last of its run.
      if (k == 0) b.ring.release({own.stage == 0 ? kStages - 1 : own.stage - 1}, b.lane, !is_first);
      make_features(m, kFirst, kOwn - 1);
      if constexpr (kPacksLast) make_packed_features(factors);
      else make_last_features(m, scale);
      // Behind the last rows of a run, the first of the next one; behind the last of all, not used.
      load_rows(k < 3 ? y + (k + 1) * 16 * RowTile::kRowBytes : b.stages_at + at.stage * Tile::kStageBytes + kTileBytes);
      wgmma_fence();
#pragma unroll
      for (int j = kFirst; j < kOwn - 1; ++j) add(j, rows);
      add(kOwn - 1, last_rows);
      goes_on = true;
      wgmma_commit();
    }
  }

  // Multiplies the sums by what is left of them. Returns whether anything is.
  __device__ __forceinline__ bool decay_sums(const DecayFactor& carry) const {
    const float factor = carry.factor();
    const bool is_left = factor != 0.f;
#pragma unroll
    for (int j = 0; kHasDecay && j < kOwn; ++j) {
#pragma unroll
      for (int i = 0; i < kRegs; ++i) acc[j][i] *= factor;
    }
    count = decayed(count, factor);
    return is_left;
  }

  // All rows of the segment, run by run: a run ends where a snapshot is stored. chunk: the next one that has a snapshot; left: stages
  // that are not yet begun.
  __device__ __forceinline__ void run(int& chunk, int& left, RingPosition& at) const {
    const StateArgs& a = b.a;
    if (Tile::kKeepsRows && b.stages > 0) {
      b.ring.wait_until_full(at);
      load_rows(b.stages_at + kTileBytes);
    }
    for (int row = b.begin;;) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) keep(acc[j]);
      DecayFactor carry{0.f};  // of the sums when the rows from here on join them; looked up before a snapshot is stored
      // A state pass may begin in a phase's chunk before the first; from there on edges are counted.
      if (kBounded && row < b.end && (row == b.begin ? a.decay.begins_chunk(a, row) : row == a.chunk_begin(chunk))) {
        const int edge = row == b.begin ? a.decay.edge_at(a, row) : a.decay.first_chunk + chunk;
        carry.code = __ldg(a.decay.carries + static_cast<int64_t>(b.state) * a.decay.chunks + edge);
      }
      if (row == a.chunk_begin(chunk) && (row < b.end || b.is_last)) {
        if (!b.totals) store_snapshot(chunk);
        ++chunk;
      }
      if (row == b.end) break;
      [[maybe_unused]] bool goes_on = true;  // something is left of the sums
      if constexpr (kBounded) goes_on = decay_sums(carry);
      const int next = b.totals && !kBounded ? b.end : min(a.chunk_begin(chunk), b.end);
      int run = (next - row) / kTileRows * b.y_group;
      row = next;
      if constexpr (!Tile::kKeepsRows) {
        b.ring.wait_until_full(at);
        load_rows(b.stages_at + at.stage * Tile::kStageBytes + kTileBytes);
      }
      for (; run > 0; --run) add_stage(at, left, goes_on);
      wgmma_wait<0>();
#pragma unroll
      for (int j = 0; j < kOwn; ++j) keep(acc[j]);
    }
  }
};

// The consumer's variables: where its lanes read y, and its registers.
template <int kOwn, class Block>
__device__ __forceinline__ void consume(const Block& block, int& chunk) {
  using Consumer = StateConsumer<Block, kOwn>;
  using RowTile = typename Block::RowTile;
  const StateArgs& a = block.a;
  const typename Block::Share share(block.state_block % Block::Tile::kStateBlocks * 2 + block.warpgroup);
  const bool of_columns = share.last == LastTile::kColumns, of_ones = share.has_ones(), of_diagonal = share.last == LastTile::kDiagonal;
  const int w4 = block.warp % 4, t = block.lane % 4, row8 = block.lane % 8, row_half = block.lane / 8 % 2, block_half = block.lane / 16;
  // Where a lane's row of an ldmatrix begins in 16 rows of y, of a block of columns.
  const auto address_of = [&](int block) {
    constexpr int kChunks = RowTile::kPanelCols / 8;  // of a row of a panel; row8 is below eight (chunk_offset)
    const int swizzle = kChunks == 8 ? row8 : row8 / 2;
    return static_cast<uint32_t>(block / kChunks * RowTile::kPanelBytes + (row8 + 8 * row_half) * RowTile::kRowBytes +
                                 ((block % kChunks ^ swizzle) << 4));
  };
  uint32_t pair_offset[kOwn / 2];
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i) pair_offset[i] = address_of(share.block(2 * i + block_half));
  const int first_column = 8 * share.half + 2 * (w4 % Consumer::kColumnWarps);
  const int last_block = of_diagonal ? 2 * share.star + block_half
                         : of_columns || Block::Tile::kPacksDiagonal && of_ones ? first_column + block_half
                                                                                : share.block(kOwn - 1);
  const uint32_t last_offset = address_of(last_block);
  const int partner = (block.lane / 4 + (of_diagonal ? w4 : 4)) % 8;  // the octet of lanes whose columns a packed tile takes
  // Where the scalars of this lane's features lie: two columns of the star's block, in 16 rows those of 2t and 2t + 8, and the next rows.
  const uint32_t scalars_offset = RowTile::chunk_offset(2 * t, share.star) + 4 * w4;
  const uint32_t next_scalars_offset = RowTile::chunk_offset(2 * t + 1, share.star) + 4 * w4;
  const uint32_t ones_row = w4 == Consumer::kOnesWarp && block.lane < 4 ? Consumer::kOne : 0;

  float acc[kOwn][Consumer::kRegs], count;
  uint32_t blocks_of_y[Consumer::kPairs][4], scalars[2][2], f[kOwn][4];
  const Consumer consumer{block, share, of_columns, of_ones, of_diagonal, w4, t, partner, pair_offset, last_offset, scalars_offset, next_scalars_offset,
                          ones_row, acc, count, blocks_of_y, scalars, f};

  // Without a branch around it, behind which the compiler would serialise products (C7515).
  const bool goes_on = !block.totals && block.begin > 0;
  consumer.for_each_accumulator(block.segment == 0 ? 0 : 1 + block.segment,
                                [&](float& sum, const float& saved) { sum = goes_on ? saved : 0.f; });
  // The order of these, and the lambda, order instructions; this is what was measured.
  if constexpr (Block::Tile::kLastTiles != Block::Tile::kOwnTiles && kOwn == Block::Tile::kOwnTiles) {
    RingPosition at;
    int left = block.stages;
    const auto run = [&] { consumer.run(chunk, left, at); };
    run();
  } else {
    int left = block.stages;
    RingPosition at;
    consumer.run(chunk, left, at);
  }
  if (block.is_last ? a.hands_on : block.first_segment == 0) {
    consumer.for_each_accumulator(block.is_last ? 0 : 1 + block.segment, [](float& sum, float& saved) { saved = sum; });
  }
}

// A warpgroup's role: a consumer, of kOwn tiles; of kOwnTiles also the warpgroup of the producer and the copiers.
template <int kHeadDim, Rows kRows, bool kFine, int kOwn>
__device__ __forceinline__ void run_roles(const CUtensorMap& y_map, const CUtensorMap& zeroed_y_map, const CUtensorMap& w_map,
                                          const CUtensorMap& zeroed_w_map, const StateArgs& a, const int first_segment,
                                          const uint32_t stages_at, const Loads& loads) {
  using Block = StateBlock<kHeadDim, kRows, kFine>;
  using Tile = typename Block::Tile;
  const Ring<Block::kStages> ring(stages_at + Tile::kBarriers), copied(stages_at + (Block::kHasDecay ? Tile::kCopied : Tile::kBarriers));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warpgroup = warp / 4;

  const Work work = locate_segment(a, first_segment * a.states() + blockIdx.x / Tile::kStateBlocks);
  const int state = work.state, begin = work.begin, end = work.end;
  const int blocks = a.states() * Tile::kStateBlocks, segment = first_segment + blockIdx.x / blocks, state_block = blockIdx.x % blocks;
  const bool is_last = segment == a.segments - 1, totals = first_segment == 0 && segment > 0;
  int chunk = a.first_snapshot(begin);
  if (first_segment > 0 && !is_last && a.chunk_begin(chunk) >= end) return;  // no snapshot in it
  const int y_group = Block::kScaled ? a.y_group : 1;  // keys are not shared by heads of y
  const int stages = (end - begin) / kTileRows * y_group;
  const Block block{y_map, zeroed_y_map, w_map, zeroed_w_map, a, loads, stages_at, ring, copied, warp, lane, warpgroup, state, begin, end,
                    first_segment, segment, blocks, state_block, is_last, totals, y_group, stages};

  if (kOwn == Tile::kOwnTiles && warpgroup == 2) {
    ptx::fewer_registers<Block::kProducerRegisters>();
    const int wg = warp - Tile::kThreads / 32 - 1;  // whose snapshots this warp copies
    if constexpr (Block::kHasDecay) {
      if (wg == 2) return RowScaler<Block>{block}.run();
    }
    if (wg < 0) StateProducer<Block>{block}.run();
    else if (wg < 2 && !totals) SnapshotCopier<Block>{block, wg}.run(chunk);
    return;
  }
  ptx::more_registers<Block::kConsumerRegisters>();
  consume<kOwn>(block, chunk);
}

template <int kHeadDim, Rows kRows, bool kFine>
__global__ void __launch_bounds__(StateTileSm90<kHeadDim, kFine>::kAllThreads, StateTileSm90<kHeadDim, kFine>::kResident)
    linear_state_sm90_kernel(const __grid_constant__ CUtensorMap y_map, const __grid_constant__ CUtensorMap zeroed_y_map,
                             const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap zeroed_w_map,
                             const __grid_constant__ StateArgs a, const int first_segment,
                             const __grid_constant__ Loads loads) {
  using Tile = StateTileSm90<kHeadDim, kFine>;
  extern __shared__ __align__(Tile::kAlignment) uint8_t shared[];
  uint32_t stages_at = first_tile(shared);
  if constexpr (kHeadDim > 32) stages_at = ptx::keep_in_register(stages_at);  // or it is worked out again where it is used
  if (threadIdx.x == 0) {
    Ring<Tile::kStages>(stages_at + Tile::kBarriers).init(Tile::kThreads / 32);
    if constexpr (kRows == Rows::kDecay) Ring<Tile::kStages>(stages_at + Tile::kCopied).init(1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (Tile::kLastTiles != Tile::kOwnTiles) {
    if (__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0) == 1) {
      return run_roles<kHeadDim, kRows, kFine, Tile::kLastTiles>(y_map, zeroed_y_map, w_map, zeroed_w_map, a, first_segment, stages_at, loads);
    }
  }
  run_roles<kHeadDim, kRows, kFine, Tile::kOwnTiles>(y_map, zeroed_y_map, w_map, zeroed_w_map, a, first_segment, stages_at, loads);
}

template <int kHeadDim, bool kFine>
void launch_state(const StateArgs& a, cudaStream_t stream) {
  if (a.end() == 0) return;  // nothing before the last chunk
  using Tile = StateTileSm90<kHeadDim, kFine>;
  const int64_t blocks = int64_t{a.states()} * Tile::kStateBlocks;
  const int y_heads = a.state_heads * a.y_group;
  const CUtensorMap y_map = rows_map<kHeadDim>(a.y, a, y_heads, a.ny, a.d);
  const CUtensorMap w_map = rows_map<kHeadDim>(a.w, a, y_heads, a.ny, a.dv);
  const int walked = a.end() - a.begin;
  const CUtensorMap zeroed_y_map = a.zeroed_y.data == nullptr ? y_map : rows_map<kHeadDim>(a.zeroed_y, a, y_heads, walked, a.d);
  const CUtensorMap zeroed_w_map = a.zeroed_w.data == nullptr ? w_map : rows_map<kHeadDim>(a.zeroed_w, a, y_heads, walked, a.dv);
  const auto launch = [&](int first_segment, int segments) {
    const auto run = [&](auto kernel) {
      launch_kernel("linear_state_sm90", kernel, grid_1d(segments * blocks), Tile::kAllThreads, Tile::kSharedBytes, stream, y_map,
                    zeroed_y_map, w_map, zeroed_w_map, a, first_segment,
                    Loads{Divisor(a.y_group), Divisor(a.state_heads), a.y_scale.data != a.y_factors.data});
    };
    if (a.decay && a.decay.bounds_alone) run(linear_state_sm90_kernel<kHeadDim, Rows::kBounded, kFine>);
    else if (a.decay) run(linear_state_sm90_kernel<kHeadDim, Rows::kDecay, kFine>);
    else if (a.y_scale.data != nullptr) run(linear_state_sm90_kernel<kHeadDim, Rows::kScaled, kFine>);
    else run(linear_state_sm90_kernel<kHeadDim, Rows::kPlain, kFine>);
  };
  if (a.segments == 1) return launch(0, 1);
  launch(0, a.segments - 1);
  linear_scan_segments(a, blocks * Tile::kAccumulators * Tile::kThreads, stream);
  launch(1, a.segments - 1);
}

}  // namespace

void linear_state_sm90(const StateArgs& a, int head_dim, bool is_fine, cudaStream_t stream) {
  dispatch_shares(head_dim, is_fine, [&](auto dim, auto fine) { launch_state<dim, fine>(a, stream); });
}

}  // namespace fastmax
