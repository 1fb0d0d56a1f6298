// Snapshots of the portable kernels: their format, their sizes, and how the blocks of the state kernel share a state. Only the kernels
// use the format; the plan uses the sizes (state_sizes()). An architecture with another format has a file of its own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/params.h"

namespace fastmax {

// Features are products of head_dim_qk columns of y; head_dim_v counts the columns of the values w. The kernels have one number for both.

// Value columns of an order-2 state block, and blocks for the features of these columns: as few as hold the accumulators, but two for
// 32 columns, for parallelism. full: fp32 mode, whose split operands leave registers for half the value columns.
constexpr __host__ __device__ int state_values(int head_dim_v, bool full) {
  return full ? 32 : head_dim_v <= 64 ? head_dim_v : head_dim_v == 96 ? 48 : 64;
}
constexpr __host__ __device__ int state_group_blocks(int head_dim_qk) {
  return head_dim_qk == 32 ? 2 : head_dim_qk == 64 ? 4 : head_dim_qk == 96 ? 10 : head_dim_qk == 128 ? 16 : 64;
}
constexpr __host__ __device__ int state_blocks(int head_dim_qk, int head_dim_v, bool full) {
  return head_dim_v / state_values(head_dim_v, full) * state_group_blocks(head_dim_qk);
}
// Accumulators of a thread: 8 + 2 octets times the values, and the sum of e.
constexpr __host__ __device__ int state_accumulators(int head_dim_v, bool full) {
  return 10 * 4 * state_values(head_dim_v, full) / 16 + 1;
}
inline constexpr int kStateThreads = 256;

// Rows per snapshot, a multiple of every kernel's rows per block: snapshot traffic, ~ head_dim_qk^2 / chunk per value, against
// the quadratic work within a chunk.
constexpr __host__ __device__ int chunk_length(int head_dim_qk, int order, bool bf16) {
  if (order == 1) return 256;
  if (head_dim_qk == 64) return bf16 ? 256 : 512;  // fp32 snapshots are twice as large
  return head_dim_qk <= 32 ? 256 : head_dim_qk <= 96 ? 512 : head_dim_qk <= 128 ? 1024 : 2048;
}

// A snapshot: octet pairs (16 features) one after the other, each a row of blocks of 16 values.
//
//   | second moment: D / 16 pairs | first order: D / 16 pairs | tile 0: 4 pairs | tile 1: 4 pairs | ...
//   a pair     | values 0..15 | values 16..31 | ...
//
//   a block           features 0..7 (octet 0)    features 8..15 (octet 1)
//   values 0..7       words  0..31               words 32..63
//   values 8..15      words 64..95               words 96..127
//
// A quarter is an 8 x 8 matrix: a row is a value, word t of its four holds features 2t and 2t + 1 (bf16x2, or float2 in the fp32 modes).
// That is the order of the state kernel's accumulators, and what ldmatrix takes apart in either orientation.
constexpr __host__ __device__ int state_tiles(int head_dim_qk) { return head_dim_qk / 8 * (head_dim_qk / 8 + 1) / 2; }
constexpr __host__ __device__ int state_pairs(int head_dim_qk, int order) {
  return 2 * (head_dim_qk / 16) + (order == 2 ? 4 * state_tiles(head_dim_qk) : 0);
}
// A pair has head_dim_v / 16 blocks; one of the second moment, whose columns are those of y, has head_dim_qk / 16.
constexpr __host__ __device__ int64_t state_words(int head_dim_qk, int head_dim_v, int order) {
  const int moment_pairs = head_dim_qk / 16, more_blocks = head_dim_qk / 16 - head_dim_v / 16;
  return (int64_t{state_pairs(head_dim_qk, order)} * (head_dim_v / 16) + int64_t{moment_pairs} * more_blocks) * 128;
}
constexpr __host__ __device__ int state_sums(int head_dim_qk, int head_dim_v) { return head_dim_v + head_dim_qk + 4; }
constexpr __host__ __device__ int64_t part_floats(int head_dim_qk, int head_dim_v, int order) {
  return 2 * state_words(head_dim_qk, head_dim_v, order) + state_sums(head_dim_qk, head_dim_v);
}

template <class Math>
inline constexpr bool kBf16State = Math::kMode == MathMode::kBF16;
// fp32 mode: operands are split, and take twice the registers.
template <class Math>
inline constexpr bool kSplitOperands = Math::kMode == MathMode::kFP32;

template <class Math, int kHeadDim>
struct StateLayout {
  static constexpr bool kBf16 = kBf16State<Math>;
  static constexpr int kWordBytes = kBf16 ? 4 : 8;
  static constexpr int kBlockWords = 128;                         // 16 features x 16 values
  static constexpr int kPairWords = kHeadDim / 16 * kBlockWords;  // two octets x all values
  static constexpr int kPairBytes = kPairWords * kWordBytes;
  static constexpr int kTileBytes = 4 * kPairBytes;
  static constexpr int kLinearPairs = kHeadDim / 16;

  // Positions of octet pairs: second moment of y, first order, then the tiles (absent for order 1).
  static constexpr int kMomentPair = 0;
  static constexpr int kLinearPair = kLinearPairs;
  static constexpr int kTilePair = 2 * kLinearPairs;
  static constexpr __host__ __device__ int64_t words(int order) { return state_words(kHeadDim, kHeadDim, order); }

  // sum w, sum e y, sum e
  static constexpr int kSumW = 0, kSumY = kHeadDim, kSumOne = 2 * kHeadDim, kSums = state_sums(kHeadDim, kHeadDim);
};

// Shared memory of kernels that add a state to the snapshots that they read (tile_config.h), more than some devices have.
inline constexpr int kAddingSharedBytes = 120 << 10;

// Sizes of states and snapshots for the plan.
struct StateSizes {
  int chunk;                   // x rows per snapshot
  int64_t snapshot_bytes;
  int64_t sum_floats;          // sums beside a snapshot
  int64_t part_floats;         // order 1: of a part
  int blocks;                  // of the state kernel, per state
  int64_t accumulator_floats;  // of a block
  int saved_chunk = 0;          // x rows per snapshot where snapshots are saved; 0: the same
};

inline StateSizes state_sizes(int head_dim_qk, int head_dim_v, int order, MathMode math) {
  const bool bf16 = math == MathMode::kBF16, full = math == MathMode::kFP32;
  return {chunk_length(head_dim_qk, order, bf16),
          state_words(head_dim_qk, head_dim_v, order) * (bf16 ? 4 : 8),
          state_sums(head_dim_qk, head_dim_v),
          part_floats(head_dim_qk, head_dim_v, order),
          state_blocks(head_dim_qk, head_dim_v, full),
          int64_t{state_accumulators(head_dim_v, full)} * kStateThreads};
}

}  // namespace fastmax
