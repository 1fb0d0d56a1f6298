// States of the Hopper kernels: the tiles of a state, their shares for warpgroups, and the format of a snapshot.
//
// The columns of y come in blocks of eight. A tile (s, b) of a state has 64 features f = 8 x + g, of the value y[8s + x] y[8b + g],
// times all channels of w. Star s owns the tiles (s, s), (s, s + 1), ..., (s, s + kBlocks / 2 - 1), blocks modulo kBlocks, and for
// s < kBlocks / 2 also (s, s + kBlocks / 2): every pair of blocks once, as in features.h. So all stars have room for
// kBlocks / 2 + 1 tiles, and that of the upper ones takes what else there is:
//
//   star kBlocks / 2 + 0 ..            first order: y^T w, 64 columns of y each (kPanels of them)
//                    + kPanels ..      second moment: e y^T y, likewise
//                    + 2 kPanels       sum w
//                    + 2 kPanels + 1   sum e y
//
// At head dim 32 there are two upper stars, and columns of y fill half of a tile: the sums are a row of the tiles of first order
// and second moment, the first behind their columns (kOnesRow).
//
// A tile (s, s) has most products twice. At head dim 64 stars own no such tiles; other tiles have each of these products once
// (kPacksDiagonal), by the distance of its two columns in their block, modulo eight:
//
//   diagonal tile i    distances 0 to 3 in the blocks 2i and 2i + 1: octet 2 distance + j has y[c] y[c + distance], c = 0 .. 7 of block 2i + j
//   opposite columns   distance 4 in all blocks, half a tile: octet j has y[c] y[c + 4], c = 0 .. 3 of the blocks 2j and 2j + 1
//
// The lower stars have a diagonal tile each, and sum w shares a tile with the opposite columns, which are its even octets.
//
// A snapshot is a row of tiles in bf16: second moment, first order, then the tiles of star 0, of star 1, ..., the diagonal tiles and the
// opposite columns. Each tile is what wgmma reads in shared memory (core/sm90/tiles.h), so that output kernels copy it as it is: kPanels
// panels of 64 features x 64 channels, at head dim 32 one of 32. A feature is a row of a panel, whose 16-byte chunks are swizzled by the
// row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "core/dispatch.h"
#include "core/sm90/tensor_map.h"
#include "linear/order2/state_format.h"

namespace fastmax {

// What there are kernels for.
using HopperLinear2HeadDims = HeadDims<32, 64, 128>;

inline constexpr int kTileRows = 64;  // rows of y or x in a tile of wgmma

// Two columns of y.
struct ColumnPair {
  int a, b;
};

// The columns of features of a tile (star, block), a diagonal tile and the opposite columns.
constexpr __host__ __device__ ColumnPair pair_columns(int star, int block, int feature) {
  return {8 * star + feature / 8, 8 * block + feature % 8};
}
constexpr __host__ __device__ ColumnPair diagonal_columns(int tile, int feature) {
  const int first = 8 * (2 * tile + feature / 8 % 2), column = feature % 8, distance = feature / 16;
  return {first + column, first + (column + distance) % 8};
}
constexpr __host__ __device__ ColumnPair opposite_columns(int feature) {
  const int first = 8 * (2 * (feature / 8) + feature % 8 / 4);
  return {first + feature % 8, first + (feature + 4) % 8};
}

template <int kHeadDim>
struct HopperState {
  static_assert(kHeadDim == 32 || kHeadDim == 64 || kHeadDim == 128, "accumulators of a warpgroup in registers");
  static constexpr int kPanelCols = panel_cols(kHeadDim), kPanels = kHeadDim / kPanelCols;
  static constexpr int kBlocks = kHeadDim / 8;
  static constexpr bool kPacksDiagonal = kHeadDim == 64;
  static constexpr int kFirstOffset = kPacksDiagonal ? 1 : 0;  // of a star's first tile
  static constexpr int kStarTiles = kBlocks / 2 + 1 - kFirstOffset;  // of a lower star, which has one more than an upper one
  static constexpr int kPairTiles = kBlocks / 2 * (2 * kStarTiles - 1);
  static constexpr int kDiagonalTiles = kPacksDiagonal ? kBlocks / 2 : 0;
  static constexpr int kMomentTile = 0, kLinearTile = kPanels, kFirstPair = 2 * kPanels, kFirstDiagonal = kFirstPair + kPairTiles;
  static constexpr int kTiles = kFirstDiagonal + kDiagonalTiles;  // of a snapshot, before the opposite columns
  static constexpr int kTileBytes = kTileRows * kHeadDim * 2;
  static constexpr int kOppositeBytes = kPacksDiagonal ? kTileBytes / 2 : 0;
  static constexpr int kSnapshotBytes = kTiles * kTileBytes + kOppositeBytes;
  static constexpr bool kSharesOnes = kHeadDim == 32;  // the sums are a row of first order and moment
  static constexpr int kOnesRow = kSharesOnes ? kHeadDim : kPacksDiagonal ? 8 : 0;  // of the tile that has them
  // sum w, sum e y, sum e; of rows without an e, of which readers know how many they see, that of a carried state alone
  static constexpr int kSumW = 0, kSumY = kHeadDim, kSumOne = 2 * kHeadDim, kSums = 2 * kHeadDim + 4;

  static constexpr __host__ __device__ int star_tiles(int star) { return star < kBlocks / 2 ? kStarTiles : kStarTiles - 1; }
  // Of the tile (star, star + offset), from the first pair on.
  static constexpr __host__ __device__ int pair_index(int star, int offset) {
    constexpr int kHalf = kBlocks / 2;
    const int stars_before = star < kHalf ? star * kStarTiles : kHalf * kStarTiles + (star - kHalf) * (kStarTiles - 1);
    return stars_before + offset - kFirstOffset;
  }

  // Output and gradient kernels read a snapshot in stages of two tiles; the last one may have less.
  static constexpr int kStateStageBytes = 2 * kTileBytes;
  static constexpr int kStateStages = (kSnapshotBytes + kStateStageBytes - 1) / kStateStageBytes;
  static constexpr __host__ __device__ int state_stage_bytes(int stage) {
    return stage < kStateStages - 1 ? kStateStageBytes : kSnapshotBytes - (kStateStages - 1) * kStateStageBytes;
  }
};

// How the state kernel shares a state: warpgroups with up to kOwnTiles tiles each, neighbours in a star; two of them a block. Where stars
// are not equally long (head dim 64), a block's are a lower and an upper one. kFine: twice the blocks, each with a star, whose first three
// tiles are the first warpgroup's. The tensor cores have as much to do as with an even share, as both warpgroups are on the same.
template <int kHeadDim, bool kFine>
struct HopperShares : HopperState<kHeadDim> {
  using State = HopperState<kHeadDim>;
  static_assert(kHeadDim == 64 || !kFine, "wide heads have blocks enough, and of 32 a star is one warpgroup's");
  static constexpr int kSlots = State::kBlocks / 2 + 1;  // a star's tiles, and what else it takes
  static constexpr int kOwnTiles = kHeadDim == 64 && !kFine ? 5 : 3;
  static constexpr int kStarShares = (kSlots + kOwnTiles - 1) / kOwnTiles;
  static constexpr bool kPairsStars = State::kPacksDiagonal && kStarShares == 1;
  static constexpr int kLastTiles = kPairsStars ? kOwnTiles - 1 : kSlots - (kStarShares - 1) * kOwnTiles;  // of a block's last warpgroup
  static_assert(kLastTiles == kOwnTiles || State::kPacksDiagonal, "warpgroups share a star evenly");
  static constexpr int kStateBlocks = State::kBlocks * kStarShares / 2;
  static constexpr int kAccumulators = kOwnTiles * kHeadDim / 2 + 1;  // of a thread; the last has its part of sum e
};

#ifdef __CUDACC__
// What the last tile of a warpgroup is: of a star, a diagonal tile, columns of y, or sums.
enum class LastTile { kPair, kDiagonal, kColumns, kOnes };

// A warpgroup's tiles.
template <int kHeadDim, bool kFine>
struct StateShare {
  using State = HopperShares<kHeadDim, kFine>;
  int star, first;  // tiles (star, star + first), ...
  int pairs;        // of them
  int tiles;        // with the last one; between them there may be one that another warpgroup has too
  LastTile last = LastTile::kPair;
  int half = 0;           // kColumns: columns of y from 64 half on
  bool of_y = false;      // neither kPair nor kDiagonal: sums of e y in place of w
  bool is_there = true;

  // warpgroup: among all of a state.
  __device__ __forceinline__ StateShare(int warpgroup) {
    star = State::kPairsStars ? warpgroup % 2 * (State::kBlocks / 2) + warpgroup / 2 : warpgroup / State::kStarShares;
    const int begin = State::kPairsStars ? 0 : warpgroup % State::kStarShares * State::kOwnTiles;
    const bool ends_star = begin + State::kOwnTiles >= State::kSlots;
    const int extra = star - State::kBlocks / 2;
    first = State::kFirstOffset + begin;
    tiles = (State::kPairsStars ? extra >= 0 : ends_star) ? State::kLastTiles : State::kOwnTiles;
    pairs = min(tiles, State::star_tiles(star) - begin);
    if (!ends_star) return;
    if (extra < 0) {
      if (State::kPacksDiagonal) last = LastTile::kDiagonal;
      return;
    }
    is_there = extra < 2 * State::kPanels + 2;
    if (extra < 2 * State::kPanels) last = LastTile::kColumns, half = extra % State::kPanels, of_y = extra >= State::kPanels;
    else last = LastTile::kOnes, of_y = extra == 2 * State::kPanels + 1;
  }
  __device__ __forceinline__ bool has_ones() const {
    return last == (State::kSharesOnes ? LastTile::kColumns : LastTile::kOnes);
  }
  // Whether it has the opposite columns, beside sum w.
  __device__ __forceinline__ bool has_opposite() const { return State::kPacksDiagonal && last == LastTile::kOnes && !of_y; }
  __device__ __forceinline__ int block(int tile) const { return (star + first + tile) % State::kBlocks; }
};
#endif

// Chunk lengths balance the traffic of snapshots against intra-chunk products; a prototype took 2.65 ms at (1, 32, 65536, 64) with 256
// rows and 2.6 to 2.7 with 512, 8.25 and 8.4 in the backward, and 8.0 at (1, 16, 65536, 128) with 1024. Saved snapshots
// take memory and are read and written where a state is added, so they have twice the chunk length.
template <int kHeadDim, bool kFine>
inline StateSizes hopper_state_sizes() {
  using State = HopperShares<kHeadDim, kFine>;
  constexpr int64_t kAccumulatorFloats = int64_t{State::kAccumulators} * 256;
  if (kHeadDim <= 64) return {256, State::kSnapshotBytes, State::kSums, 0, State::kStateBlocks, kAccumulatorFloats, 512};
  return {1024, State::kSnapshotBytes, State::kSums, 0, State::kStateBlocks, kAccumulatorFloats};
}

// Calls function(head_dim, is_fine), both as constants.
template <class Function>
void dispatch_shares(int head_dim, bool is_fine, Function&& function) {
  dispatch_head_dim(HopperLinear2HeadDims(), head_dim, [&](auto dim) {
    if constexpr (dim == 64) {
      if (is_fine) return function(dim, std::true_type());
    }
    function(dim, std::false_type());
  });
}

// Whether a call's states are shared finely: a state pass then takes less time, but twice the multiprocessors, which few states can also
// use by segments (plan.h).
inline bool has_fine_shares(const Problem& p) {
  if (common_head_dim(p) != 64) return false;
  const int64_t states = int64_t{p.b} * p.hk;
  // One H200: 16 heads in eight blocks take 0.95 of the time that they take in four and three segments, 8 heads 1.08.
  constexpr double kFineWalk = 0.71, kSegments = 1.1;
  const auto walks = [&](int64_t blocks) {  // rounds of state passes, one block per multiprocessor
    const int64_t together = p.sm_count / blocks;
    if (together >= 2) return kSegments * 2. / static_cast<double>(together + 1);
    return static_cast<double>((blocks + p.sm_count - 1) / p.sm_count);
  };
  return kFineWalk * walks(states * HopperShares<64, true>::kStateBlocks) < walks(states * HopperShares<64, false>::kStateBlocks);
}

}  // namespace fastmax
