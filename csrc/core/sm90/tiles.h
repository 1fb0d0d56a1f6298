// Tiles in shared memory in the layout that the copy engine writes and wgmma reads: kRows tokens x kCols columns of 16 bits, in
// contiguous panels of 64 columns. A panel has a row of 128 bytes per token, whose 16-byte chunks are permuted by XOR with the
// row index mod 8 (the 128-byte swizzle, over 8 rows = 1024 bytes). Tiles begin at multiples of 1024 bytes.
//
//            panel 0 (columns 0 .. 63)     panel 1 (columns 64 .. 127)
//   row 0    chunks 0 1 2 3 4 5 6 7        0 1 2 3 4 5 6 7
//   row 1    chunks 1 0 3 2 5 4 7 6        1 0 3 2 5 4 7 6   ...
//
// If kCols is not a multiple of 64, panels have 32 columns and rows of 64 bytes. Their four chunks are permuted by XOR with
// half the row index mod 4 (the 64-byte swizzle, over 8 rows = 512 bytes):
//
//   rows 0, 1    chunks 0 1 2 3        rows 2, 3    chunks 1 0 3 2        rows 4, 5    chunks 2 3 0 1   ...
//
// As an operand, a tile is read in steps of 16 along the sum:
//   k_major    the sum runs over columns (Q K^T: both): step k is 32 bytes to the right, in panel k / 4 (k / 2)
//   mn_major   the sum runs over tokens (P V: V): step k is 16 rows down; further panels are further columns of the result
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/ptx.h"
#include "core/sm90/ptx.h"
#include "core/sm90/tensor_map.h"

namespace fastmax {

// Broadcasts a value that is the same in all lanes, so that the compiler holds it in a uniform register.
template <class T>
__device__ __forceinline__ T warp_uniform(T x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

inline constexpr int kSwizzledTileAlignment = 1024;

template <int kRows, int kCols>
struct SwizzledTile {
  static constexpr int kPanelCols = panel_cols(kCols);
  static constexpr int kRowBytes = kPanelCols * 2;  // per row of a panel
  static_assert(kRows % 8 == 0 && kCols % kPanelCols == 0, "tiles are whole swizzle periods");
  static constexpr int kPanels = kCols / kPanelCols;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;

  // Byte offset of a 16-byte chunk; chunk: column / 8.
  static __device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
    if constexpr (kPanelCols == 64) {
      return static_cast<uint32_t>((chunk >> 3) * kPanelBytes + row * 128 + (((chunk ^ row) & 7) << 4));
    } else {
      return static_cast<uint32_t>((chunk >> 2) * kPanelBytes + row * 64 + (((chunk ^ (row >> 1)) & 3) << 4));
    }
  }

  // Load, store and add a whole tile, from column 0 of the tensor on. The caller expects kBytes at the barrier of a load.
  static __device__ __forceinline__ void load(uint32_t tile, const CUtensorMap& map, uint32_t barrier, int token, int head, int batch) {
#pragma unroll
    for (int i = 0; i < kPanels; ++i) ptx::tma_load(tile + i * kPanelBytes, map, barrier, i * kPanelCols, token, head, batch);
  }
  static __device__ __forceinline__ void store(uint32_t tile, const CUtensorMap& map, int token, int head, int batch) {
#pragma unroll
    for (int i = 0; i < kPanels; ++i) ptx::tma_store(map, tile + i * kPanelBytes, i * kPanelCols, token, head, batch);
  }
  static __device__ __forceinline__ void add(uint32_t tile, const CUtensorMap& map, int token, int head, int batch) {
#pragma unroll
    for (int i = 0; i < kPanels; ++i) ptx::tma_add(map, tile + i * kPanelBytes, i * kPanelCols, token, head, batch);
  }
};

// A tile as an operand of wgmma: the lower word of its descriptor. It holds the address and the distance of panels (used by
// mn_major only), both in units of 16 bytes. It is uniform; otherwise it is moved to a uniform register between any two
// products, which costs up to 15% (one H200).
template <class Tile>
struct Operand {
  uint32_t low;

  explicit __device__ __forceinline__ Operand(uint32_t tile)
      : low(warp_uniform(((tile >> 4) & 0x3fffu) | (static_cast<uint32_t>(Tile::kPanelBytes >> 4) << 16))) {}

  // The operand of a tile that begins `bytes` after this one.
  __device__ __forceinline__ Operand behind(int bytes) const {
    Operand other = *this;
    other.low += bytes >> 4;
    return other;
  }

  // Descriptors of step k, from row `row` (a multiple of 8; k_major) or from panel `panel` (mn_major) on.
  __device__ __forceinline__ uint64_t k_major(int k, int row = 0) const {
    constexpr int kLog2Steps = Tile::kPanelCols == 64 ? 2 : 1;  // per panel
    return descriptor(low + (k >> kLog2Steps) * (Tile::kPanelBytes >> 4) + (k & ((1 << kLog2Steps) - 1)) * 2 +
                      row * (Tile::kRowBytes >> 4));
  }
  __device__ __forceinline__ uint64_t mn_major(int k, int panel = 0) const {
    return descriptor(low + k * Tile::kRowBytes + panel * (Tile::kPanelBytes >> 4));  // 16 rows
  }

 private:
  // Upper word: 128-byte swizzle (1) or 64-byte swizzle (2), and 1024 or 512 bytes between groups of 8 rows.
  static __device__ __forceinline__ uint64_t descriptor(uint32_t low) {
    constexpr uint32_t kHigh = Tile::kPanelCols == 64 ? 0x40000040u : 0x80000020u;
    return (uint64_t{kHigh} << 32) | low;
  }
};

template <class Math>
__device__ __forceinline__ uint32_t pack_16bit(float lo, float hi) {
  static_assert(kIs16Bit<Math>, "pairs of 16 bits");
  if constexpr (Math::kMode == MathMode::kBF16) {
    return ptx::pack_bf16x2(lo, hi);
  } else {
    return ptx::pack_fp16x2(lo, hi);
  }
}

// Stores an accumulator (64 x kCols, wgmma.h) as rows of a tile; row g + 8i of a warp is multiplied by scale_i. lane_row: the row in the
// tile of row lane % 8 + 8 (lane / 8 % 2) of the warp. stmatrix and the swizzle avoid bank conflicts of row-wise stores.
template <class Math, class Tile, int kCount>
__device__ __forceinline__ void store_accumulator_at(uint32_t tile, int lane_row, const float (&d)[kCount], float scale0, float scale1,
                                                     int lane) {
  const int matrix = lane >> 3;  // matrix whose row address this lane gives: rows + 8 if odd, columns + 8 from 2 on
#pragma unroll
  for (int j = 0; j < kCount / 4; j += 2) {
    const float* x = d + 4 * j;
    ptx::stmatrix_x4(tile + Tile::chunk_offset(lane_row, j + (matrix >> 1)), pack_16bit<Math>(x[0] * scale0, x[1] * scale0),
                     pack_16bit<Math>(x[2] * scale1, x[3] * scale1), pack_16bit<Math>(x[4] * scale0, x[5] * scale0),
                     pack_16bit<Math>(x[6] * scale1, x[7] * scale1));
  }
}

// Stores an accumulator as rows row .. row + 63 of a tile. Called by all four warps; `warp` is the index in the warpgroup.
template <class Math, class Tile, int kCount>
__device__ __forceinline__ void store_accumulator(uint32_t tile, int row, const float (&d)[kCount], float scale0, float scale1,
                                                  int warp, int lane) {
  store_accumulator_at<Math, Tile>(tile, row + 16 * warp + (lane & 15), d, scale0, scale1, lane);
}

}  // namespace fastmax
