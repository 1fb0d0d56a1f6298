// Tiles in shared memory: their layout, and copies from global memory.
//
// A tile has kRows tokens x kCols elements, one token per row: [token][column]. Its readers (fragments.h) decide which index a
// product sums over.
//   TileLoader              for a loop over tiles
//   load_tile_async         one tile
//   load_masked_tile_async  one tile, without masked tokens
//   load_bytes_async        contiguous bytes, already in the order of a tile
// All copy asynchronously, and the caller commits. Elements outside the tensor are filled with zeros.
#pragma once

#include <cuda_runtime.h>

#include "core/device.h"
#include "core/dtype.h"
#include "core/ptx.h"

namespace fastmax {

inline constexpr int kWarpSize = 32;

__device__ __forceinline__ int lane_index() { return threadIdx.x % kWarpSize; }

// Rows are contiguous. Within a row, 16-byte chunks are permuted by XOR with the row index, so that 8 rows of one chunk column
// (ldmatrix) are in different banks. Chunk c of row r, for rows of 128 bytes or more:
//   row 0   0 1 2 3 4 5 6 7
//   row 1   1 0 3 2 5 4 7 6
//   row 2   2 3 0 1 6 7 4 5   ...   shorter rows: the same for every second or fourth row
template <class Element, int kCols>
struct TileLayout {
  static constexpr int kChunkElements = 16 / static_cast<int>(sizeof(Element));
  static constexpr int kChunks = kCols / kChunkElements;
  static constexpr int kRowBytes = kCols * static_cast<int>(sizeof(Element));
  static constexpr int kPeriod = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
  static constexpr int kRowShift = kPeriod == 8 ? 0 : kPeriod == 4 ? 1 : 2;
  static_assert(kCols % 16 == 0, "tiles are multiples of 16 elements wide");

  static constexpr __host__ __device__ int bytes(int rows) { return rows * kRowBytes; }

  // Byte offset of a 16-byte chunk.
  static __device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ ((row >> kRowShift) & (kPeriod - 1))) << 4));
  }

  // Moves an address right by `chunks`, whose bits must be zero in the chunk index of the address. If the number is a
  // compile-time constant, this is an XOR and an addition of constants.
  static __device__ __forceinline__ uint32_t move_right(uint32_t address, int chunks) {
    return (address ^ static_cast<uint32_t>((chunks & (kPeriod - 1)) << 4)) + static_cast<uint32_t>((chunks & ~(kPeriod - 1)) << 4);
  }

  // Byte offset of an element.
  static __device__ __forceinline__ uint32_t offset(int row, int col) {
    return chunk_offset(row, col / kChunkElements) + static_cast<uint32_t>((col % kChunkElements) * sizeof(Element));
  }
};

// Copies rows [row_begin, row_begin + kRows) of a tensor to shared memory, 16 bytes per cp.async, by all kThreads threads. src
// points at row 0. Rows from row_end on and columns from cols on are zeros. The caller commits.
template <class Element, int kRows, int kCols, int kThreads>
__device__ __forceinline__ void load_tile_async(uint32_t tile, const Element* src, int64_t token_stride, int row_begin, int row_end,
                                                int cols) {
  using Layout = TileLayout<Element, kCols>;
  constexpr int kTotal = kRows * Layout::kChunks;
#pragma unroll
  for (int i = 0; i < (kTotal + kThreads - 1) / kThreads; ++i) {
    const int index = i * kThreads + static_cast<int>(threadIdx.x);
    if (kTotal % kThreads != 0 && index >= kTotal) break;
    const int row = index / Layout::kChunks;
    const int chunk = index % Layout::kChunks;
    const int col = chunk * Layout::kChunkElements;
    const bool inside = row_begin + row < row_end && col < cols;
    const Element* address = inside ? src + (row_begin + row) * token_stride + col : src;
    ptx::cp_async_16(tile + Layout::chunk_offset(row, chunk), address, inside ? 16 : 0);
  }
}

// Copies tiles of kRows rows in a loop. Values that are the same for all tiles are computed once, so that a tile costs a few
// instructions per 16 bytes.
template <class Element, int kRows, int kCols, int kThreads>
struct TileLoader {
  using Layout = TileLayout<Element, kCols>;
  // A row is divided into segments of a power of two chunks. One pass of all threads loads kPassRows rows of a segment.
  static constexpr int kSegment = Layout::kChunks & -Layout::kChunks;
  static constexpr int kSegments = Layout::kChunks / kSegment;
  static constexpr int kPassRows = kThreads / kSegment;
  static constexpr int kPasses = (kRows + kPassRows - 1) / kPassRows;
  static_assert(kThreads % kSegment == 0 && (kRows % kPassRows == 0 || kPasses == 1), "passes cover the tile");

  int row;          // row of this thread in the first pass
  int col;          // column of this thread in the first segment
  uint32_t offset;  // offset of this thread's first chunk in a tile

  __device__ __forceinline__ explicit TileLoader(unsigned thread) {
    row = static_cast<int>(thread) / kSegment;
    const int chunk = static_cast<int>(thread) % kSegment;
    col = chunk * Layout::kChunkElements;
    offset = Layout::chunk_offset(row, chunk);
  }

  __device__ __forceinline__ void load(uint32_t tile, const Element* src, int64_t token_stride, int row_begin, int row_end,
                                       int cols) const {
    if (kPassRows > kRows && row >= kRows) return;
    const Element* address = src + (row_begin + row) * token_stride + col;
    const int64_t step = token_stride * kPassRows;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool row_inside = row_begin + row + pass * kPassRows < row_end;
      const uint32_t destination = kPassRows % 8 == 0
                                       ? tile + offset + pass * kPassRows * Layout::kRowBytes
                                       : tile + Layout::chunk_offset(row + pass * kPassRows, col / Layout::kChunkElements);
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        const int shift = segment * kSegment;
        const bool inside = row_inside && col + shift * Layout::kChunkElements < cols;
        ptx::cp_async_16(Layout::move_right(destination, shift), address + shift * Layout::kChunkElements, inside ? 16 : 0);
      }
      address += step;
    }
  }
};

// Like load_tile_async, for kRows rows from row_begin on, which may be negative. Rows outside [0, rows) and masked rows are
// zeros.
template <class Element, int kRows, int kCols>
__device__ __forceinline__ void load_masked_tile_async(uint32_t tile, const Element* src, int64_t token_stride, int row_begin,
                                                       int rows, int cols, const uint8_t* mask, int mask_stride) {
  using Layout = TileLayout<Element, kCols>;
  for (int index = threadIdx.x; index < kRows * Layout::kChunks; index += blockDim.x) {
    const int row = index / Layout::kChunks;
    const int chunk = index % Layout::kChunks;
    const int col = chunk * Layout::kChunkElements;
    const int source = row_begin + row;
    bool inside = source >= 0 && source < rows && col < cols;
    if (inside && mask != nullptr) inside = mask[static_cast<int64_t>(source) * mask_stride] != 0;
    ptx::cp_async_16(tile + Layout::chunk_offset(row, chunk), inside ? src + source * token_stride + col : src, inside ? 16 : 0);
  }
}

// Copies contiguous bytes, a multiple of 16.
__device__ __forceinline__ void load_bytes_async(uint32_t dst, const void* src, int bytes) {
  const char* from = static_cast<const char*>(src);
  for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) ptx::cp_async_16(dst + i, from + i, 16);
}

}  // namespace fastmax
