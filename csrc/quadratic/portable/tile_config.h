// Tile shapes of the portable quadratic kernels by kernel, arithmetic mode and head dim, with the reason for each number.
//
// A warp owns kRowTiles * 16 rows (queries in the forward and in grad_q, keys in grad_k/grad_v) and streams the other side
// through shared memory. More rows per warp mean fewer shared-memory reads per product, and are limited by registers:
// accumulators and resident operands take kRowTiles * head_dim / 2 registers each in fp32 and half of that in 16 bits.
//
// Measured numbers ("ms") are from one H200: bf16, causal, 4096 tokens, 2^26 elements of q.
#pragma once

#include "core/device.h"
#include "core/dtype.h"
#include "core/tiles.h"

namespace fastmax {

template <class Math, int kHeadDim>
struct QuadraticFwdTile {
  static constexpr bool k16 = kIs16Bit<Math>;
  static constexpr int kWarps = kHeadDim <= 128 ? 4 : 8;  // 8: half the reads of K and V from L2
  // head_dim 32: 2 tiles 1.82 ms, 4 tiles 2.03. head_dim 128: 2 tiles 1.45, 1 tile 1.65 (bound by shared memory).
  static constexpr int kRowTiles =
      Math::kMode == MathMode::kFP32 || kHeadDim > 128 ? 1 : Math::kMode == MathMode::kBF16 || kHeadDim <= 64 ? 2 : 1;
  // The output's columns are divided over this many blocks if Q and the sums fill the registers. Each of these blocks computes
  // the scores.
  static constexpr int kColumnParts = !k16 && kHeadDim > 128 ? 2 : 1;
  // Keys per stage.
  static constexpr int kStream = kHeadDim <= 32                             ? 128
                                 : kHeadDim <= 64 || (k16 && kHeadDim <= 128) ? 64
                                 : k16 || kHeadDim <= 128                     ? 32
                                                                              : 16;
  static constexpr int kStages = 2;
  // At head_dim 64: three blocks 1.50 ms, two 1.59.
  static constexpr int kMinBlocks = kHeadDim > 128   ? 1
                                    : kHeadDim > 64  ? 2
                                    : kHeadDim > 32  ? (Math::kMode == MathMode::kBF16 ? 3 : 2)
                                                     : (Math::kMode == MathMode::kBF16 ? 4 : 3);
  static constexpr int kUnroll = kHeadDim <= 32 ? 2 : 1;  // slabs of 16 keys

  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kWarps * kRowTiles * 16;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(typename Math::Element));
  static constexpr int kOutputCols = kHeadDim / kColumnParts;
  static constexpr int kTileBytes = kStream * kRowBytes;  // of K; V's tile is 1 / kColumnParts of it
  static constexpr int kStageBytes = kTileBytes + kTileBytes / kColumnParts;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes, "key/value stages do not fit in shared memory");
};

// Both backward kernels. kOperandsInRegisters: the two resident operands (k and v, or q and grad_o) are fragments in registers;
// else they stay in shared memory and are read again for every slab (fp32, where they would not fit beside the sums).
// kHalvesTogether: the products of a slab's two halves start together (2: more independent products in flight) or one after the
// other (1: fewer registers).
template <class Math, int kHeadDim>
struct QuadraticBwdTile {
  static constexpr bool k16 = kIs16Bit<Math>;
  static constexpr int kWarps = 4;
  // head_dim 64: 2 tiles 3.27 + 2.29 ms (grad_k/v + grad_q), 1 tile 3.61 + 2.44. head_dim 32: 2 tiles 3.52 + 2.61, 4 tiles 4.06
  // + 3.00. fp16 at head_dim 64 has one tile: its weights take twice the registers.
  static constexpr int kRowTiles = kHeadDim <= 32 && k16 ? 2 : kHeadDim <= 64 && Math::kMode == MathMode::kBF16 ? 2 : 1;
  static constexpr bool kOperandsInRegisters = k16 || (Math::kMode == MathMode::kTF32 && kHeadDim <= 64);
  static constexpr int kStream = kHeadDim <= 32 ? 128 : k16 ? 64 : kHeadDim <= 64 ? 32 : 16;  // tokens per stage
  static constexpr int kStages = 2;
  static constexpr int kColumnParts = 1;

  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kWarps * kRowTiles * 16;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(typename Math::Element));
  static constexpr int kTileBytes = kStream * kRowBytes;
  static constexpr int kResidentBytes = kOperandsInRegisters ? 0 : 2 * kRows * kRowBytes;
};

// grad_k and grad_v: streams q, grad_o and the row scores.
template <class Math, int kHeadDim>
struct QuadraticBwdKvTile : QuadraticBwdTile<Math, kHeadDim> {
  using Base = QuadraticBwdTile<Math, kHeadDim>;
  static constexpr int kMinBlocks = kHeadDim <= 64 || Base::k16 ? 2 : 1;
  static constexpr bool kKeepsBounds = !Base::k16;  // see QuadraticBwdKvPairTile
  // head_dim 64: together 3.45 ms (spills), one after the other 3.27.
  static constexpr int kHalvesTogether = kHeadDim == 64 || Math::kMode != MathMode::kBF16 ? 1 : 2;
  static constexpr int kUnroll = Math::kMode == MathMode::kBF16 && kHeadDim <= 32 ? 2 : 1;  // slabs: 3.42 ms, 1: 3.52
  static constexpr int kStageBytes = 2 * Base::kTileBytes + Base::kStream * 16;
  static constexpr int kSharedBytes = Base::kResidentBytes + Base::kStages * kStageBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes, "query stages do not fit in shared memory");
};

// grad_q: streams k and v.
template <class Math, int kHeadDim>
struct QuadraticBwdQTile : QuadraticBwdTile<Math, kHeadDim> {
  using Base = QuadraticBwdTile<Math, kHeadDim>;
  static constexpr int kMinBlocks = kHeadDim <= 32 ? 3 : kHeadDim <= 64 || Base::k16 ? 2 : 1;
  static constexpr int kHalvesTogether = 2;
  static constexpr int kUnroll = 1;  // slabs; 2 at head_dim 64: 2.26 ms, but spills; 1: 2.30
  static constexpr int kStageBytes = 2 * Base::kTileBytes;
  static constexpr int kSharedBytes = Base::kResidentBytes + Base::kStages * kStageBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes, "key/value stages do not fit in shared memory");
};

// Whether pairs of warps share rows (bwd_pair.h). Otherwise two row tiles, or at head_dim 256 one, would not fit in registers.
// grad_k/grad_v at head_dim 128: bf16 3.1 ms (without pairs 3.55), fp16 4.4 (5.0), tf32 10.1 (12.7), fp32 28.6 (36.2).
// grad_q: tf32 6.9 (8.3), but bf16 2.5 (2.3), fp16 3.2 (3.0), fp32 22.2 (21.7).
template <class Math, int kHeadDim>
inline constexpr bool kPairsForKv = kHeadDim >= 128;
template <class Math, int kHeadDim>
inline constexpr bool kPairsForQ = kHeadDim > 128 || (kHeadDim == 128 && Math::kMode == MathMode::kTF32);

template <class Math, int kHeadDim>
struct QuadraticBwdPairTile {
  static constexpr bool k16 = kIs16Bit<Math>;
  static constexpr int kWarps = kHeadDim <= 128 ? 4 : 8;  // 8: half the reads of the stream from L2
  static constexpr int kPairs = kWarps / 2;
  static constexpr int kMinBlocks = 8 / kWarps;
  static constexpr int kRowTiles = kHeadDim <= 128 && k16 ? 2 : 1;
  static constexpr int kStream = !k16 ? 16 : kHeadDim <= 128 ? 64 : 32;  // tokens per stage
  static constexpr int kStages = 2;
  static constexpr int kSlots = kStream > 16 ? 2 : 1;  // slabs whose exchanged values are held
  static constexpr int kColumnParts = 1;

  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kPairs * kRowTiles * 16;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(typename Math::Element));
  static constexpr int kTileBytes = kStream * kRowBytes;
  // Bytes that a warp hands over per slab.
  static constexpr int kExchangeBytes = kRowTiles * 16 * 16 * static_cast<int>(sizeof(float));
  static_assert(kPairs < 16, "a barrier per pair");
};

// grad_k and grad_v: streams q, grad_o and the row scores.
template <class Math, int kHeadDim>
struct QuadraticBwdKvPairTile : QuadraticBwdPairTile<Math, kHeadDim> {
  using Base = QuadraticBwdPairTile<Math, kHeadDim>;
  // The columns of grad_k and grad_v are divided over this many blocks if resident rows and sums fill the registers. Each of
  // these blocks computes the scores.
  static constexpr int kColumnParts = !Base::k16 && kHeadDim > 128 ? 2 : 1;
  static constexpr int kOutputCols = kHeadDim / kColumnParts;
  // Whether the rows' bounds are held in registers. Spilled bytes, recomputed / held: bf16 128: 8 / 16, fp16 256: 228 / 144.
  static constexpr bool kKeepsBounds = !Base::k16 || (kHeadDim > 128 && Math::kMode == MathMode::kFP16);
  static constexpr int kUnroll = 2;  // slabs; with softmax at head_dim 128 forward + backward 7.29 ms, 1: 7.37; 4 spills more
  static_assert((kOutputCols & (kOutputCols - 1)) == 0, "see lane_offset_b_kn");
  static constexpr int kStageBytes = 2 * Base::kTileBytes + Base::kStream * 16;
  static constexpr int kRingBytes = Base::kStages * kStageBytes;
  static constexpr int kSharedBytes = kRingBytes + Base::kPairs * Base::kSlots * Base::kExchangeBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes, "query stages do not fit in shared memory");
};

// grad_q: streams k and v.
template <class Math, int kHeadDim>
struct QuadraticBwdQPairTile : QuadraticBwdPairTile<Math, kHeadDim> {
  using Base = QuadraticBwdPairTile<Math, kHeadDim>;
  // 3 blocks fit in 168 registers without spills.
  static constexpr int kMinBlocks = kHeadDim == 128 && !Base::k16 ? 3 : Base::kMinBlocks;
  static constexpr int kOutputCols = kHeadDim / 2;  // per warp
  static_assert((kOutputCols & (kOutputCols - 1)) == 0, "see lane_offset_b_kn");
  static constexpr int kStageBytes = 2 * Base::kTileBytes;
  static constexpr int kRingBytes = Base::kStages * kStageBytes;
  static constexpr int kUnroll = Base::k16 ? 2 : 1;  // slabs: head_dim 256: 3.10 ms, 1: 3.29
  static constexpr int kSharedBytes = kRingBytes + Base::kPairs * Base::kSlots * 2 * Base::kExchangeBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes, "key/value stages do not fit in shared memory");
};

}  // namespace fastmax
