// Tiles in shared memory: swizzled layout, asynchronous loads, tensor-core fragments, products of fragments.
//
// A tile is kRows tokens x kCols elements. Fragments cover 16 elements of the summed dimension ("k16") in every arithmetic
// mode, so one main loop serves them all:
//   FragmentA, FragmentB   operand registers of one 16 x 16, or of one 16 x 8 block (WeightsA, WeightsB for mma_weights)
//   load_a             A from a [row][k] tile; load_a_global: from global memory, for operands that stay in registers
//   load_b_pair        B from a [n][k] tile               load_b_trans_pair   B from a [k][n] tile
//   ..._at             the same from an address that holds this lane's offset, for inner loops
//   a_from_accumulator A from two neighbouring accumulators (16 x 16), to be multiplied with load_b_trans fragments
//   mma                acc += A B for load_a with load_b operands (mma_pair: two neighbouring accumulators)
//   mma_weights        acc += A B for a_from_accumulator with load_b_trans operands (likewise)
//   multiply_slab      rows that stay in registers times 16 streamed tokens        accumulate_slab  weights times 16 tokens
//   store_rows         accumulators to global memory
// fp32 elements are rounded to tf32 on the way (Tf32) or kept whole and split in the product (Fp32).
// Fp16 weights (operands of mma_weights) are tf32: ten mantissa bits as fp16 has, but eight exponent bits, so that f(s), which
// grows like s^2, cannot overflow. It costs that product half the tensor rate.
#pragma once

#include <cuda_runtime.h>

#include "core/dtype.h"
#include "core/ptx.h"

namespace fastmax {

inline constexpr int kWarpSize = 32;

// 16-byte chunks of a row are permuted by XOR with the row index, so that 8 rows of one chunk column (ldmatrix) fall in
// different banks.
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

  // An address, moved right by a number of chunks whose bits are zero in the chunk index that the address was made for: a
  // constant XOR and a constant addition, once the number is known to the compiler.
  static __device__ __forceinline__ uint32_t move_right(uint32_t address, int chunks) {
    return (address ^ static_cast<uint32_t>((chunks & (kPeriod - 1)) << 4)) + static_cast<uint32_t>((chunks & ~(kPeriod - 1)) << 4);
  }

  // Byte offset of an element.
  static __device__ __forceinline__ uint32_t offset(int row, int col) {
    return chunk_offset(row, col / kChunkElements) + static_cast<uint32_t>((col % kChunkElements) * sizeof(Element));
  }
};

// Global -> shared, 16 bytes per cp.async, by all kThreads threads. Rows at or past row_end and columns at or past cols are
// zero-filled. src points at row 0 of the tensor; the tile is its rows [row_begin, row_begin + kRows). The caller commits.
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

// The same for a loop over tiles: what does not change from tile to tile is computed once, and a tile costs a few instructions
// per 16 bytes. Tiles are kRows rows from row_begin on.
template <class Element, int kRows, int kCols, int kThreads>
struct TileLoader {
  using Layout = TileLayout<Element, kCols>;
  // A row is cut in segments of a power of two chunks; one pass of all threads loads kPassRows rows of a segment.
  static constexpr int kSegment = Layout::kChunks & -Layout::kChunks;
  static constexpr int kSegments = Layout::kChunks / kSegment;
  static constexpr int kPassRows = kThreads / kSegment;
  static constexpr int kPasses = (kRows + kPassRows - 1) / kPassRows;
  static_assert(kThreads % kSegment == 0 && (kRows % kPassRows == 0 || kPasses == 1), "passes cover the tile");

  int row;          // of this thread in the first pass
  int col;          // of this thread in the first segment
  uint32_t offset;  // of this thread's first chunk in a tile

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

// A: registers of a 16 x 16 block; B: of a 16 x 8 block.
template <class Math>
struct FragmentSize {
  static constexpr int kA = kIs16Bit<Math> ? 4 : 8;
  static constexpr int kB = kIs16Bit<Math> ? 2 : 4;
  static constexpr bool kWeightsAreBf16 = Math::kMode == MathMode::kBF16;
  static constexpr int kWeightsA = kWeightsAreBf16 ? 4 : 8;
  static constexpr int kWeightsB = kWeightsAreBf16 ? 2 : 4;
};
template <class Math>
using FragmentA = uint32_t[FragmentSize<Math>::kA];
template <class Math>
using FragmentB = uint32_t[FragmentSize<Math>::kB];
template <class Math>
using WeightsA = uint32_t[FragmentSize<Math>::kWeightsA];
template <class Math>
using WeightsB = uint32_t[FragmentSize<Math>::kWeightsB];

template <class Math, int kCount>
__device__ __forceinline__ void round_to_mode(uint32_t (&r)[kCount]) {
  if constexpr (Math::kMode == MathMode::kTF32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) r[i] = ptx::to_tf32(__uint_as_float(r[i]));
  }
}

// A fragment of rows [row, row + 16), columns [k, k + 16) of a [row][k] tile.
template <class Math, int kCols>
__device__ __forceinline__ void load_a(FragmentA<Math>& a, uint32_t tile, int row, int k) {
  using Layout = TileLayout<typename Math::Element, kCols>;
  const int lane = threadIdx.x % kWarpSize;
  const int r = row + lane % 16;
  const int chunk = k / Layout::kChunkElements + lane / 16;
  if constexpr (kIs16Bit<Math>) {
    ptx::ldmatrix_x4(a, tile + Layout::chunk_offset(r, chunk));
  } else {
    uint32_t lo[4], hi[4];
    ptx::ldmatrix_x4(lo, tile + Layout::chunk_offset(r, chunk));
    ptx::ldmatrix_x4(hi, tile + Layout::chunk_offset(r, chunk + 2));
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = lo[i], a[4 + i] = hi[i];
    round_to_mode<Math>(a);
  }
}

// The same, straight from global memory (rows at or past row_end and columns at or past cols read as zero). For operands that
// stay in registers for the whole kernel.
template <class Math>
__device__ __forceinline__ void load_a_global(FragmentA<Math>& a, const typename Math::Element* src, int64_t token_stride, int row,
                                              int row_end, int k, int cols) {
  const int lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  constexpr int kWord = kIs16Bit<Math> ? 2 : 1;       // elements per register
  constexpr int kStep = kIs16Bit<Math> ? 8 : 4;       // columns between the registers of one row
#pragma unroll
  for (int i = 0; i < FragmentSize<Math>::kA; ++i) {
    const int r = row + g + (i % 2) * 8;
    const int c = k + t * kWord + (i / 2) * kStep;
    const bool inside = r < row_end && c < cols;
    a[i] = inside ? __ldg(reinterpret_cast<const uint32_t*>(src + r * token_stride + c)) : 0u;
  }
  round_to_mode<Math>(a);
}

// This lane's offset for load_b_pair_at and load_b_trans_pair_at: add the address of a tile row that is a multiple of 16. The
// latter for columns from first_col on, a multiple of the power of two of columns that will be read from there.
template <class Math, int kCols>
__device__ __forceinline__ uint32_t lane_offset_b() {
  using Layout = TileLayout<typename Math::Element, kCols>;
  const int lane = threadIdx.x % kWarpSize;
  if constexpr (kIs16Bit<Math>) return Layout::chunk_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  return Layout::chunk_offset(lane % 8, lane / 8);
}
template <class Math, int kCols>
__device__ __forceinline__ uint32_t lane_offset_b_trans(int first_col = 0) {
  using Layout = TileLayout<typename Math::Element, kCols>;
  const int lane = threadIdx.x % kWarpSize;
  if constexpr (kIs16Bit<Math>) return Layout::chunk_offset(lane % 16, lane / 16 + first_col / Layout::kChunkElements);
  return Layout::offset(2 * (lane % 4), lane / 4 + first_col);
}

// Two B fragments: columns n..n+7 and n+8..n+15 with n the row that base was made for, or n_offset (a multiple of 16) more, summed
// indices [k, k + 16), from a [n][k] tile.
template <class Math, int kCols>
__device__ __forceinline__ void load_b_pair_at(FragmentB<Math>& b0, FragmentB<Math>& b1, uint32_t base, int k, int n_offset = 0) {
  using Layout = TileLayout<typename Math::Element, kCols>;
  const uint32_t address = Layout::move_right(base, k / Layout::kChunkElements) + n_offset * Layout::kRowBytes;
  if constexpr (kIs16Bit<Math>) {
    uint32_t r[4];
    ptx::ldmatrix_x4(r, address);
    b0[0] = r[0], b0[1] = r[1], b1[0] = r[2], b1[1] = r[3];
  } else {
    ptx::ldmatrix_x4(b0, address);
    ptx::ldmatrix_x4(b1, address + 8 * Layout::kRowBytes);
    round_to_mode<Math>(b0);
    round_to_mode<Math>(b1);
  }
}
template <class Math, int kCols>
__device__ __forceinline__ void load_b_pair(FragmentB<Math>& b0, FragmentB<Math>& b1, uint32_t tile, int n, int k) {
  load_b_pair_at<Math, kCols>(b0, b1, tile + n * TileLayout<typename Math::Element, kCols>::kRowBytes + lane_offset_b<Math, kCols>(),
                              k);
}

// The same operand, 8 columns at a time: kFragments B fragments of consecutive k16 blocks, columns n..n+7 with n the row that
// base was made for (with lane_offset_b8), summed indices from k on.
template <class Math, int kCols>
inline constexpr int kB8Fragments = kIs16Bit<Math> && kCols % 32 == 0 ? 2 : 1;
template <class Math, int kCols>
__device__ __forceinline__ uint32_t lane_offset_b8() {
  using Layout = TileLayout<typename Math::Element, kCols>;
  const int lane = threadIdx.x % kWarpSize;
  return Layout::chunk_offset(lane % 8, lane / 8 % (kIs16Bit<Math> ? 2 * kB8Fragments<Math, kCols> : 4));
}
template <class Math, int kCols>
__device__ __forceinline__ void load_b8_at(FragmentB<Math> (&b)[kB8Fragments<Math, kCols>], uint32_t base, int k) {
  using Layout = TileLayout<typename Math::Element, kCols>;
  const uint32_t address = Layout::move_right(base, k / Layout::kChunkElements);
  if constexpr (!kIs16Bit<Math>) {
    ptx::ldmatrix_x4(b[0], address);
    round_to_mode<Math>(b[0]);
  } else if constexpr (kB8Fragments<Math, kCols> == 2) {
    uint32_t r[4];
    ptx::ldmatrix_x4(r, address);
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
  } else {
    ptx::ldmatrix_x2(b[0], address);
  }
}

// Two B fragments: columns n..n+7 and n+8..n+15, summed indices [k, k + 16) with k the row that base was made for, or k_offset (a
// multiple of 16) more, from a [k][n] tile, for mma_weights.
template <class Math, int kCols>
__device__ __forceinline__ void load_b_trans_pair_at(WeightsB<Math>& b0, WeightsB<Math>& b1, uint32_t base, int n, int k_offset = 0) {
  using Layout = TileLayout<typename Math::Element, kCols>;
  if constexpr (kIs16Bit<Math>) {
    uint32_t r[4];
    ptx::ldmatrix_x4_trans(r, Layout::move_right(base, n / Layout::kChunkElements) + k_offset * Layout::kRowBytes);
    if constexpr (Math::kMode == MathMode::kBF16) {
      b0[0] = r[0], b0[1] = r[1], b1[0] = r[2], b1[1] = r[3];
    } else {
      // fp16 is exact in tf32.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&r[i]));
        const float2 y = __half22float2(*reinterpret_cast<const __half2*>(&r[2 + i]));
        b0[2 * i] = __float_as_uint(x.x), b0[2 * i + 1] = __float_as_uint(x.y);
        b1[2 * i] = __float_as_uint(y.x), b1[2 * i + 1] = __float_as_uint(y.y);
      }
    }
  } else {
    // Summed index 2t and 2t+1 in place of t and t+4: the order in which accumulators hold their columns, and free of bank
    // conflicts under the swizzle.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr int kOddRow = Layout::kRowShift == 0 ? 1 : 0;  // what the swizzle does to the next row
      const uint32_t row = Layout::move_right(base, i % 2 == 1 ? kOddRow : 0) + (i % 2 + i / 2 * 8 + k_offset) * Layout::kRowBytes;
      b0[i] = ptx::load_shared_u32(Layout::move_right(row, n / 4));
      b1[i] = ptx::load_shared_u32(Layout::move_right(row, n / 4 + 2));
    }
    round_to_mode<Math>(b0);
    round_to_mode<Math>(b1);
  }
}
template <class Math, int kCols>
__device__ __forceinline__ void load_b_trans_pair(WeightsB<Math>& b0, WeightsB<Math>& b1, uint32_t tile, int n, int k) {
  load_b_trans_pair_at<Math, kCols>(
      b0, b1, tile + k * TileLayout<typename Math::Element, kCols>::kRowBytes + lane_offset_b_trans<Math, kCols>(), n);
}

// One half (8 of 16 summed indices) of an A fragment from a 16 x 8 accumulator.
template <class Math>
__device__ __forceinline__ void half_a_from_accumulator(WeightsA<Math>& a, int half, const float (&acc)[4]) {
  if constexpr (Math::kMode == MathMode::kBF16) {
    a[2 * half] = ptx::pack_bf16x2(acc[0], acc[1]);
    a[2 * half + 1] = ptx::pack_bf16x2(acc[2], acc[3]);
  } else {
    constexpr int kOrder[4] = {0, 2, 1, 3};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = acc[kOrder[i]];
      a[4 * half + i] = Math::kMode == MathMode::kFP32 ? __float_as_uint(x) : ptx::to_tf32(x);
    }
  }
}
// A fragment (16 rows x 16 summed indices) from two neighbouring 16 x 8 accumulators.
template <class Math>
__device__ __forceinline__ void a_from_accumulator(WeightsA<Math>& a, const float (&left)[4], const float (&right)[4]) {
  half_a_from_accumulator<Math>(a, 0, left);
  half_a_from_accumulator<Math>(a, 1, right);
}

// Two m16n8k8 products of fragments in tf32.
__device__ __forceinline__ void mma_tf32_k16(float (&acc)[4], const uint32_t (&a)[8], const uint32_t (&b)[4]) {
  ptx::mma_tf32(acc, a[0], a[1], a[2], a[3], b[0], b[1]);
  ptx::mma_tf32(acc, a[4], a[5], a[6], a[7], b[2], b[3]);
}

// fp32 operands as tf32 hi + lo; lo lo is below fp32's rounding. The tensor core truncates when it accumulates, so each k16
// block is summed from zero, small terms first, and added in true fp32.
struct SplitTf32 {
  uint32_t hi, lo;
  __device__ __forceinline__ explicit SplitTf32(uint32_t x) {
    hi = ptx::to_tf32_here(__uint_as_float(x));
    lo = ptx::to_tf32(__uint_as_float(x) - __uint_as_float(hi));
  }
};
__device__ __forceinline__ void mma_fp32_k16_pair(float (&acc0)[4], float (&acc1)[4], const uint32_t (&a)[8], const uint32_t (&b0)[4],
                                                  const uint32_t (&b1)[4]) {
  float sum0[4] = {}, sum1[4] = {};
#pragma unroll
  for (int step = 0; step < 2; ++step) {  // k8
    const SplitTf32 x0(a[4 * step]), x1(a[4 * step + 1]), x2(a[4 * step + 2]), x3(a[4 * step + 3]);
    const SplitTf32 y0(b0[2 * step]), y1(b0[2 * step + 1]), w0(b1[2 * step]), w1(b1[2 * step + 1]);
    ptx::mma_tf32(sum0, x0.lo, x1.lo, x2.lo, x3.lo, y0.hi, y1.hi);
    ptx::mma_tf32(sum1, x0.lo, x1.lo, x2.lo, x3.lo, w0.hi, w1.hi);
    ptx::mma_tf32(sum0, x0.hi, x1.hi, x2.hi, x3.hi, y0.lo, y1.lo);
    ptx::mma_tf32(sum1, x0.hi, x1.hi, x2.hi, x3.hi, w0.lo, w1.lo);
    ptx::mma_tf32(sum0, x0.hi, x1.hi, x2.hi, x3.hi, y0.hi, y1.hi);
    ptx::mma_tf32(sum1, x0.hi, x1.hi, x2.hi, x3.hi, w0.hi, w1.hi);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) acc0[i] += sum0[i], acc1[i] += sum1[i];
}

__device__ __forceinline__ void mma_fp32_k16(float (&acc)[4], const uint32_t (&a)[8], const uint32_t (&b)[4]) {
  float sum[4] = {};
#pragma unroll
  for (int step = 0; step < 2; ++step) {  // k8
    const SplitTf32 x0(a[4 * step]), x1(a[4 * step + 1]), x2(a[4 * step + 2]), x3(a[4 * step + 3]);
    const SplitTf32 y0(b[2 * step]), y1(b[2 * step + 1]);
    ptx::mma_tf32(sum, x0.lo, x1.lo, x2.lo, x3.lo, y0.hi, y1.hi);
    ptx::mma_tf32(sum, x0.hi, x1.hi, x2.hi, x3.hi, y0.lo, y1.lo);
    ptx::mma_tf32(sum, x0.hi, x1.hi, x2.hi, x3.hi, y0.hi, y1.hi);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) acc[i] += sum[i];
}

template <class Math>
__device__ __forceinline__ void mma(float (&acc)[4], const FragmentA<Math>& a, const FragmentB<Math>& b) {
  if constexpr (Math::kMode == MathMode::kBF16) {
    ptx::mma_bf16(acc, a, b[0], b[1]);
  } else if constexpr (Math::kMode == MathMode::kFP16) {
    ptx::mma_fp16(acc, a, b[0], b[1]);
  } else if constexpr (Math::kMode == MathMode::kTF32) {
    mma_tf32_k16(acc, a, b);
  } else {
    mma_fp32_k16(acc, a, b);
  }
}

template <class Math>
__device__ __forceinline__ void mma_weights(float (&acc)[4], const WeightsA<Math>& a, const WeightsB<Math>& b) {
  if constexpr (Math::kMode == MathMode::kBF16) {
    ptx::mma_bf16(acc, a, b[0], b[1]);
  } else if constexpr (Math::kMode == MathMode::kFP32) {
    mma_fp32_k16(acc, a, b);
  } else {
    mma_tf32_k16(acc, a, b);
  }
}

template <class Math>
__device__ __forceinline__ void mma_pair(float (&acc0)[4], float (&acc1)[4], const FragmentA<Math>& a, const FragmentB<Math>& b0,
                                         const FragmentB<Math>& b1) {
  if constexpr (Math::kMode == MathMode::kBF16) {
    ptx::mma_bf16(acc0, a, b0[0], b0[1]);
    ptx::mma_bf16(acc1, a, b1[0], b1[1]);
  } else if constexpr (Math::kMode == MathMode::kFP16) {
    ptx::mma_fp16(acc0, a, b0[0], b0[1]);
    ptx::mma_fp16(acc1, a, b1[0], b1[1]);
  } else if constexpr (Math::kMode == MathMode::kTF32) {
    mma_tf32_k16(acc0, a, b0);
    mma_tf32_k16(acc1, a, b1);
  } else {
    mma_fp32_k16_pair(acc0, acc1, a, b0, b1);
  }
}

template <class Math>
__device__ __forceinline__ void mma_weights_pair(float (&acc0)[4], float (&acc1)[4], const WeightsA<Math>& a, const WeightsB<Math>& b0,
                                                 const WeightsB<Math>& b1) {
  if constexpr (Math::kMode == MathMode::kFP16) {
    mma_tf32_k16(acc0, a, b0);
    mma_tf32_k16(acc1, a, b1);
  } else {
    mma_pair<Math>(acc0, acc1, a, b0, b1);
  }
}

// acc = resident rows times the 16 tokens at base (load_b_pair_at).
template <class Math, int kCols, int kRowTiles>
__device__ __forceinline__ void multiply_slab(float (&acc)[kRowTiles][2][4], const FragmentA<Math> (&rows)[kRowTiles][kCols / 16],
                                              uint32_t base) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[i][0][e] = acc[i][1][e] = 0.f;
  }
#pragma unroll
  for (int kk = 0; kk < kCols / 16; ++kk) {
    FragmentB<Math> b0, b1;
    load_b_pair_at<Math, kCols>(b0, b1, base, kk * 16);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) mma_pair<Math>(acc[i][0], acc[i][1], rows[i][kk], b0, b1);
  }
}

// acc += weights (16 x 16) times the 16 tokens at base (load_b_trans_pair_at), kOctets * 8 columns of them.
template <class Math, int kCols, int kRowTiles, int kOctets>
__device__ __forceinline__ void accumulate_slab(float (&acc)[kRowTiles][kOctets][4], const WeightsA<Math> (&w)[kRowTiles],
                                                uint32_t base) {
#pragma unroll
  for (int c = 0; c < kOctets / 2; ++c) {
    WeightsB<Math> b0, b1;
    load_b_trans_pair_at<Math, kCols>(b0, b1, base, c * 16);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) mma_weights_pair<Math>(acc[i][2 * c], acc[i][2 * c + 1], w[i], b0, b1);
  }
}

// Accumulators of a warp (rows from warp_row on, columns from 0 on) to global memory, without the rows from row_end and the
// columns from cols on. finish_row(i, half, row) gives a function of (column, two neighbouring sums): what is stored of them.
template <class Element, int kRowTiles, int kOctets, class FinishRow>
__device__ __forceinline__ void store_rows(const float (&acc)[kRowTiles][kOctets][4], Element* dst, int64_t token_stride, int warp_row,
                                           int row_end, int cols, const FinishRow& finish_row) {
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + i * 16 + half * 8 + g;
      if (row >= row_end) continue;
      const auto finish = finish_row(i, half, row);
#pragma unroll
      for (int c = 0; c < kOctets; ++c) {
        const int col = c * 8 + t * 2;
        if (col >= cols) break;
        const float2 x = finish(col, make_float2(acc[i][c][2 * half], acc[i][c][2 * half + 1]));
        store_pair(dst + row * token_stride + col, x.x, x.y);
      }
    }
  }
}

// Sum and maximum over the four lanes that hold one accumulator row.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  x += __shfl_xor_sync(0xffffffffu, x, 2);
  return x;
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

}  // namespace fastmax
