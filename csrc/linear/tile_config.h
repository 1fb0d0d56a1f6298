// Tile shapes of the portable linear kernels: rows, warps, stages, registers; static_asserts report what does not fit.
// Chunks and blocks of a state are in order2/state_format.h.
#pragma once

#include "core/device.h"
#include "core/sequence.h"
#include "core/tiles.h"
#include "linear/order1/linear1.h"
#include "linear/order2/state_format.h"

namespace fastmax {

// ---- order 2

// The state kernel. Accumulators per thread: (8 + 2) octets x kValues / 16 x 4, at most 160; the rest of 255 registers holds operands.
template <class Math, int kHeadDim>
struct StateTile {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * kWarpSize;
  static_assert(kThreads == kStateThreads, "the layout of accumulators in memory");
  static constexpr int kValues = state_values(kHeadDim, kSplitOperands<Math>);
  static constexpr int kValueGroups = kHeadDim / kValues;
  static constexpr int kBlocks = state_blocks(kHeadDim, kHeadDim, kSplitOperands<Math>);
  static constexpr int kAccumulators = state_accumulators(kHeadDim, kSplitOperands<Math>);
  static constexpr int kGroupBlocks = kBlocks / kValueGroups;
  static_assert(kBlocks % kValueGroups == 0, "every value group takes as many blocks");
  // Within a value group: a tile per warp, and the tiles left over cut into four octet pairs, one per warp, as are the
  // second moment, the first order and the sums.
  static constexpr int kTiles = state_tiles(kHeadDim);
  static constexpr int kUnits = kGroupBlocks * kWarps;
  static constexpr int kMainTiles = kTiles < kUnits ? kTiles : kUnits;
  static constexpr int kLeftover = kTiles - kMainTiles;
  static constexpr int kPlainPairs = kHeadDim / 16;
  static_assert(4 * kLeftover + 2 * kPlainPairs + 2 <= kUnits, "an octet pair is left without a warp");

  static constexpr int kTokens = kIs16Bit<Math> ? (kHeadDim <= 64 ? 128 : kHeadDim <= 128 ? 64 : 32) : kHeadDim <= 128 ? 32 : 16;
  static_assert(kBoundary % kTokens == 0, "chunks begin at stages");
  static constexpr int kElementBytes = static_cast<int>(sizeof(typename Math::Element));
  static constexpr int kYBytes = kTokens * kHeadDim * kElementBytes;
  static constexpr int kWBytes = kTokens * kValues * kElementBytes;
  static constexpr int kStageBytes = kYBytes + kWBytes + kTokens * 4;  // y, w, e
  static constexpr int kStages = 3;  // in use, next, and being loaded
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes, "stages do not fit in shared memory");
  // Octets whose operands are held at once. Pipelined: half of them are in use while the other half is made.
  static constexpr int kOctets = kSplitOperands<Math> ? 2 : 8;
  static constexpr bool kPipelined = kIs16Bit<Math>;
};

// Partial sums of order 1. A warp owns 16 value columns times all first-order features, a block up to 128.
template <class Math, int kHeadDim>
struct PartTile {
  static constexpr int kValues = kHeadDim < 128 ? kHeadDim : 128;
  static constexpr int kGroups = kHeadDim / kValues;
  static constexpr int kWarps = kValues / 16;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kTokens = kIs16Bit<Math> ? 32 : 16;
  static constexpr int kElementBytes = static_cast<int>(sizeof(typename Math::Element));
  static constexpr int kYBytes = kTokens * kHeadDim * kElementBytes, kWBytes = kTokens * kValues * kElementBytes;
  static constexpr int kStageBytes = kYBytes + kWBytes + kTokens * 4;
  static constexpr int kStages = 3;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes, "stages do not fit in shared memory");
  static_assert(kThreads >= kTokens, "one thread per row loads its e");
};

// A stage holds octet pairs of a snapshot, whole tiles where they fit, or rows of y and as many of their values.
template <class Math, int kHeadDim>
struct StreamStage {
  static constexpr bool k16 = kIs16Bit<Math>;
  static constexpr int kPairs = kHeadDim == 32 ? (k16 ? 16 : 8) : kHeadDim == 64 && k16 ? 8 : kHeadDim <= 128 ? 4 : 2;
  static constexpr int kPairBytes = StateLayout<Math, kHeadDim>::kPairBytes;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(typename Math::Element));
  static constexpr int kFittingKeys = kPairs * kPairBytes / (2 * kRowBytes);
  static constexpr int kKeys = kFittingKeys < 64 ? kFittingKeys : 64;
  static_assert(kBoundary % kKeys == 0, "own chunks begin at stages");
  static constexpr int kValueOffset = kKeys * kRowBytes;
  static constexpr int kScaleOffset = kPairs * kPairBytes;        // e of the keys
  static constexpr int kDecayOffset = kScaleOffset + 4 * kKeys;  // and their sums of decays
  static constexpr int kBytes = (kDecayOffset + 8 * kKeys + 127) / 128 * 128;  // swizzles are of the address
  static constexpr int kStateBytes = kPairs * kPairBytes;
};

// The read kernel.
template <class Math, int kHeadDim>
struct ReadTile {
  using Stage = StreamStage<Math, kHeadDim>;
  static constexpr int kWarps = kIs16Bit<Math> || kHeadDim <= 64 ? 8 : kHeadDim <= 128 ? 4 : 2;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kRowTiles = kHeadDim <= 128 && (kIs16Bit<Math> || (kHeadDim <= 64 && !kSplitOperands<Math>)) ? 2 : 1;
  static constexpr bool kEarlyFactors = kHeadDim < 128;  // registers for the next tile's factors
  static constexpr int kRows = kWarps * kRowTiles * 16;
  // Two blocks share a multiprocessor, where it has 130 KB of shared memory: registers for 16 scores at once, not for 32.
  static constexpr bool kTwoBlocks = kHeadDim == 32 && kIs16Bit<Math>;
  static constexpr int kSlab = kSplitOperands<Math> || kHeadDim >= 128 || kTwoBlocks ? 16 : 32;  // keys whose scores are held at once
  static_assert(Stage::kKeys % kSlab == 0, "stages hold whole slabs");
  static constexpr int kXBytes = kRows * Stage::kRowBytes;
  static constexpr int kStages = kXBytes + 3 * Stage::kBytes <= kMaxSharedBytes ? 3 : 2;
  static constexpr int kSharedBytes = kXBytes + kStages * Stage::kBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes, "x and the ring do not fit in shared memory");
  // Whether there are kernels that add a state to snapshots, whose stages come with as much of it.
  static constexpr bool kAdds = Math::kMode == MathMode::kBF16 && (kHeadDim == 64 || kHeadDim == 128);
  static constexpr int kAddingBytes = kSharedBytes + (kStages - 1) * Stage::kStateBytes;
  static_assert(!kAdds || kAddingBytes <= kAddingSharedBytes, "see state_format.h");
};

// The gradient kernel.
template <class Math, int kHeadDim>
struct GradTile {
  using Stage = StreamStage<Math, kHeadDim>;
  static constexpr int kRowTiles = kIs16Bit<Math> && kHeadDim <= 128 ? 2 : 1;
  static constexpr int kWarpRows = kRowTiles * 16;
  // x2's fragments stay in registers, but for head_dim 256 in fp32, where each is read when it is needed.
  static constexpr bool kKeepX2 = kIs16Bit<Math> || kHeadDim <= 128;
  // Where x2 and the sums of two row tiles do not fit in registers, the intra-chunk part adds to the gradient in shared memory.
  static constexpr bool kSumsInShared = kRowTiles == 2 && kHeadDim > 64;
  static constexpr int kSlab = kSplitOperands<Math> || kHeadDim > 128 ? 16 : 32;
  static_assert(Stage::kKeys % kSlab == 0, "stages hold whole slabs");
  static constexpr int kRowBytes = Stage::kRowBytes + 4 * kHeadDim;  // x and the gradient
  static constexpr int kRowSharedBytes = kRowBytes + 4;              // and the sum of pairs
  // More rows share the ring's traffic; two small blocks hide each other's barriers.
  static constexpr int kMaxWarps = kHeadDim <= 64 ? 4 : 8;
  static constexpr int kStages = 2, kRingBytes = kStages * Stage::kBytes;

  static constexpr int shared_bytes(int warps) { return warps * kWarpRows * kRowSharedBytes + kRingBytes; }
  static_assert(shared_bytes(1) <= kMaxSharedBytes, "a warp does not fit on the smallest devices");
  // As in ReadTile; two blocks still share a multiprocessor of sm_90. At 128 rows would have to give way, which is slower.
  static constexpr bool kAdds = Math::kMode == MathMode::kBF16 && kHeadDim == 64;
  static constexpr int kAddedAt = shared_bytes(kMaxWarps), kAddingBytes = kAddedAt + (kStages - 1) * Stage::kStateBytes;
  static_assert(!kAdds || kAddingBytes <= kAddingSharedBytes, "see state_format.h");
};

// ---- order 1

template <class Math, int kHeadDim>
struct Linear1Tile {
  using Element = typename Math::Element;
  using Layout = TileLayout<Element, kHeadDim>;
  static constexpr bool k16 = kIs16Bit<Math>;
  static constexpr int kWarps = kHeadDim <= 64 ? 4 : kHeadDim / 16;
  static constexpr int kThreads = kWarps * kWarpSize;

  // Rows of x, and of y, per step; a warp owns 16 rows of x and kColumns columns of the result.
  static constexpr int kRows = kHeadDim <= 32 ? 64 : k16 ? (kHeadDim == 96 ? 32 : 64) : (kHeadDim <= 96 ? 32 : 16);
  static constexpr int kRowGroups = kRows / 16;
  static constexpr int kColumns = kHeadDim * kRowGroups / kWarps;
  static_assert(kColumns % 16 == 0 && kBoundary % kRows == 0, "warps cover a step, steps end at the boundary");

  // Scores of a step are made kSlab keys at a time: more of them are more independent products, and more registers.
  static constexpr int kSlab = Math::kMode == MathMode::kBF16 && kHeadDim == 128 ? 32 : 16;

  // A warp owns 16 kStateM rows (columns of y) times 8 kStateN columns (of w) of the state; the two warps of a row take turns by 16
  // columns, so that addresses differ in free bits of the swizzle.
  static constexpr int kStateM = kHeadDim / (kWarps / 2) / 16;
  static constexpr int kStateN = kHeadDim / 2 / 8;
  static_assert(kStateN % 2 == 0 && kStateN <= 8 && kStateM <= 2 && kWarps >= 4, "pairs of columns; sums and roles below");

  static constexpr int kTileBytes = Layout::bytes(kRows);
  static constexpr int kStateBytes = Layout::bytes(kHeadDim);
  static constexpr int kSumBytes = 2 * kHeadDim * 4;                      // sum w and sum y
  static constexpr int kSumTileBytes = Layout::bytes(8);                  // sum y as an operand: publish_sum_y
  static constexpr int kScaleBytes = kRows * 4 < 128 ? 128 : kRows * 4;  // e of the rows of a step
  static_assert(kTileBytes % 128 == 0 && kSumTileBytes % 128 == 0 && kSumBytes % 128 == 0,
                "tiles start where the swizzle may be applied to addresses");

  static constexpr int stage_bytes(int tiles) { return tiles * kTileBytes + kScaleBytes; }

  // Blocks per multiprocessor for which a pass limits its registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kMinBlocks = 1;
#else
  static constexpr int kMinBlocks = linear1_blocks(kHeadDim, k16, 90);
#endif
};

template <class Math, int kHeadDim>
struct SumTile : Linear1Tile<Math, kHeadDim> {
  using Base = Linear1Tile<Math, kHeadDim>;
  static constexpr int kStages = 3;
  static constexpr int kStageBytes = Base::stage_bytes(2);
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes, "stages do not fit in shared memory");
  static constexpr int kMinBlocks = linear1_sum_blocks(kHeadDim, Base::k16);
};

template <class Math, int kHeadDim>
struct WalkTile : Linear1Tile<Math, kHeadDim> {
  using Base = Linear1Tile<Math, kHeadDim>;
  // Shared memory: the state, sum y as an operand, sum w and sum y, the ring.
  static constexpr int kSumTile = Base::kStateBytes, kSums = kSumTile + Base::kSumTileBytes, kRing = kSums + Base::kSumBytes;
  static constexpr int kStageBytes = Base::stage_bytes(3);
};

template <class Math, int kHeadDim>
struct PairWalkTile : Linear1Tile<Math, kHeadDim> {
  using Base = Linear1Tile<Math, kHeadDim>;
  // Shared memory: the state, sum w and sum e y, the ring.
  static constexpr int kSums = Base::kStateBytes, kRing = kSums + Base::kSumBytes;
  static constexpr int kStageBytes = Base::stage_bytes(4);
};

}  // namespace fastmax
