// Tensor-core operands ("fragments"): loads from tiles, from global memory and from accumulators, and their products.
//
// Products are acc (m x n, fp32) += A (m x k) B (k x n). A fragment covers 16 of the summed index k ("k16") in every arithmetic
// mode, so that one main loop serves them all: A is 16 x 16, B is 16 x 8, an accumulator 16 x 8.
//
// Lane l holds, with g = l / 4 and t = l % 4, rows g and g + 8 and columns 2t and 2t + 1 of an accumulator:
//
//     column     0    1     2    3     4    5     6    7
//     row 0    | lane 0   | lane 1   | lane 2   | lane 3   |     acc[0], acc[1]
//     row 1    | lane 4   | lane 5   | lane 6   | lane 7   |
//      ..                                                        four lanes of a row: a quad
//     row 8    | lane 0   | lane 1   | lane 2   | lane 3   |     acc[2], acc[3]
//      ..
//     row 15   | lane 28  | lane 29  | lane 30  | lane 31  |
//
// It holds rows g and g + 8 of A (a[0], a[2], .. and a[1], a[3], ..), and column g of B. Their summed indices have one of two
// orders:
//
//                          k of a row's, or a column's, registers: in 16 bits          in fp32                  product
//   FragmentA, FragmentB   (2t, 2t+1), (2t+8, 2t+9)                                    t, t+4, t+8, t+12        mma
//   WeightsA, WeightsB     bf16 (2t, 2t+1), (2t+8, 2t+9), fp16 as tf32: as fp32        2t, 2t+1, 2t+8, 2t+9     mma_weights
//
// The first order is that of ldmatrix, the second is that of columns in accumulators: weights go from accumulators into the
// next product within a thread.
//
// A loader's name gives the operand and the index order of the tile that it reads, with the slower index first:
//   load_a_mk, load_b_nk                   FragmentA from an [m][k] tile, FragmentB from [n][k]
//   load_weights_a_mk, load_weights_a_km   WeightsA from [m][k], from [k][m]
//   load_weights_b_nk, load_weights_b_kn   WeightsB from [n][k], from [k][n]
//   ..._pair, _octet, _octets              16 columns (two fragments of B); 8 columns; twice 8 columns, anywhere
//   ..._at                                 from an address that holds this lane's offset (lane_offset_*), for inner loops
//   ..._global                             from global memory, for operands that stay in registers
//   weights_a_from_accumulator             WeightsA (16 x 16) from two neighbouring accumulators
// Products:
//   mma, mma_weights                       of one block of columns (_pair: of two)
//   multiply_slab                          rows that stay in registers times 16 streamed tokens
//   accumulate_slab                        weights of 16 streamed tokens times their columns
//   store_rows                             accumulators to global memory
// fp32 elements are rounded to tf32 by the loaders (Tf32), or loaded whole and split in the product (Fp32).
// Fp16 weights (operands of mma_weights) are tf32: they have ten mantissa bits like fp16, but eight exponent bits, so that
// f(s), which grows like s^2, cannot overflow. That halves the tensor rate of the product.
#pragma once

#include "core/tiles.h"

namespace fastmax {

// Registers per lane. A: of a 16 x 16 block; B: of a 16 x 8 block.
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

// A fragment of rows [row, row + 16), columns [k, k + 16) of an [m][k] tile.
template <class Math, int kCols>
__device__ __forceinline__ void load_a_mk(FragmentA<Math>& a, uint32_t tile, int row, int k) {
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

// The same from global memory. Rows from row_end on and columns from cols on read as zeros. For operands that stay in registers
// for the whole kernel.
template <class Math>
__device__ __forceinline__ void load_a_mk_global(FragmentA<Math>& a, const typename Math::Element* src, int64_t token_stride, int row,
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

// This lane's offset for load_b_nk_pair_at and load_weights_b_kn_pair_at, to be added to the address of a tile row that is a
// multiple of 16. lane_offset_b_kn: for columns from first_col on, a multiple of the power of two that the number of columns
// is.
template <class Math, int kCols>
__device__ __forceinline__ uint32_t lane_offset_b_nk() {
  using Layout = TileLayout<typename Math::Element, kCols>;
  const int lane = threadIdx.x % kWarpSize;
  if constexpr (kIs16Bit<Math>) return Layout::chunk_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  return Layout::chunk_offset(lane % 8, lane / 8);
}
template <class Math, int kCols>
__device__ __forceinline__ uint32_t lane_offset_b_kn(int first_col = 0) {
  using Layout = TileLayout<typename Math::Element, kCols>;
  const int lane = threadIdx.x % kWarpSize;
  if constexpr (kIs16Bit<Math>) return Layout::chunk_offset(lane % 16, lane / 16 + first_col / Layout::kChunkElements);
  return Layout::offset(2 * (lane % 4), lane / 4 + first_col);
}

// Loads two B fragments from an [n][k] tile: columns n .. n + 7 and n + 8 .. n + 15, summed indices [k, k + 16). n is the row
// that `base` was computed for, plus n_offset, a multiple of 16.
template <class Math, int kCols>
__device__ __forceinline__ void load_b_nk_pair_at(FragmentB<Math>& b0, FragmentB<Math>& b1, uint32_t base, int k, int n_offset = 0) {
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
__device__ __forceinline__ void load_b_nk_pair(FragmentB<Math>& b0, FragmentB<Math>& b1, uint32_t tile, int n, int k) {
  using Layout = TileLayout<typename Math::Element, kCols>;
  load_b_nk_pair_at<Math, kCols>(b0, b1, tile + n * Layout::kRowBytes + lane_offset_b_nk<Math, kCols>(), k);
}

// The same operand, 8 columns at a time: kOctetFragments B fragments of consecutive k16 blocks, columns n .. n + 7, summed
// indices from k on. n is the row that `base` was computed for (with lane_offset_b_nk_octet).
template <class Math, int kCols>
inline constexpr int kOctetFragments = kIs16Bit<Math> ? 2 : 1;
template <class Math, int kCols>
__device__ __forceinline__ uint32_t lane_offset_b_nk_octet() {
  using Layout = TileLayout<typename Math::Element, kCols>;
  const int lane = threadIdx.x % kWarpSize;
  return Layout::chunk_offset(lane % 8, lane / 8 % (kIs16Bit<Math> ? 2 * kOctetFragments<Math, kCols> : 4));
}
template <class Math, int kCols>
__device__ __forceinline__ void load_b_nk_octet_at(FragmentB<Math> (&b)[kOctetFragments<Math, kCols>], uint32_t base, int k) {
  using Layout = TileLayout<typename Math::Element, kCols>;
  const uint32_t address = Layout::move_right(base, k / Layout::kChunkElements);
  if constexpr (!kIs16Bit<Math>) {
    ptx::ldmatrix_x4(b[0], address);
    round_to_mode<Math>(b[0]);
  } else {
    static_assert(kCols % 32 == 0, "two fragments at a time");
    uint32_t r[4];
    ptx::ldmatrix_x4(r, address);
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
  }
}

// Loads two B fragments for mma_weights from a [k][n] tile: columns n .. n + 7 and n + 8 .. n + 15, summed indices [k, k + 16).
// k is the row that `base` was computed for, plus k_offset, a multiple of 16.
template <class Math, int kCols>
__device__ __forceinline__ void load_weights_b_kn_pair_at(WeightsB<Math>& b0, WeightsB<Math>& b1, uint32_t base, int n,
                                                          int k_offset = 0) {
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
    // Summed indices 2t and 2t + 1 in place of t and t + 4: the order of columns in accumulators, without bank conflicts under
    // the swizzle.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr int kOddRow = Layout::kRowShift == 0 ? 1 : 0;  // effect of the swizzle on the next row
      const uint32_t row = Layout::move_right(base, i % 2 == 1 ? kOddRow : 0) + (i % 2 + i / 2 * 8 + k_offset) * Layout::kRowBytes;
      b0[i] = ptx::load_shared_u32(Layout::move_right(row, n / 4));
      b1[i] = ptx::load_shared_u32(Layout::move_right(row, n / 4 + 2));
    }
    round_to_mode<Math>(b0);
    round_to_mode<Math>(b1);
  }
}
template <class Math, int kCols>
__device__ __forceinline__ void load_weights_b_kn_pair(WeightsB<Math>& b0, WeightsB<Math>& b1, uint32_t tile, int n, int k) {
  load_weights_b_kn_pair_at<Math, kCols>(
      b0, b1, tile + k * TileLayout<typename Math::Element, kCols>::kRowBytes + lane_offset_b_kn<Math, kCols>(), n);
}

// Loads a B fragment from an fp32 [k][n] tile: columns n .. n + 7, summed indices [k, k + 16). Not rounded.
template <class Math, int kCols>
__device__ __forceinline__ void load_weights_b_kn_octet(WeightsB<Math>& b, uint32_t tile, int n, int k) {
  using Layout = TileLayout<typename Math::Element, kCols>;
  const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = ptx::load_shared_u32(tile + Layout::offset(k + i / 2 * 8 + 2 * t + i % 2, n + g));
}

// Loads two of them, columns n0 .. n0 + 7 and n1 .. n1 + 7, in every mode.
template <class Math, int kCols>
__device__ __forceinline__ void load_weights_b_kn_octets(WeightsB<Math>& b0, WeightsB<Math>& b1, uint32_t tile, int n0, int n1,
                                                         int k) {
  if constexpr (kIs16Bit<Math>) {
    using Layout = TileLayout<typename Math::Element, kCols>;
    const int lane = lane_index();
    uint32_t r[4];
    ptx::ldmatrix_x4_trans(r, tile + Layout::chunk_offset(k + lane % 16, (lane < 16 ? n0 : n1) / 8));
    b0[0] = r[0], b0[1] = r[1], b1[0] = r[2], b1[1] = r[3];
  } else {
    load_weights_b_kn_octet<Math, kCols>(b0, tile, n0, k);
    load_weights_b_kn_octet<Math, kCols>(b1, tile, n1, k);
  }
}

// The tile column, of 16, that row g (half 0) or g + 8 (half 1) of a fragment from load_weights_a_km holds. In fp32 they are
// neighbours, so that one load serves both.
template <class Math>
__device__ __forceinline__ int weights_a_km_row(int g, int half) {
  return kIs16Bit<Math> ? g + 8 * half : 2 * g + half;
}

// Loads an A fragment from a [k][m] tile. Its rows are columns [row, row + 16) of the tile in the order of weights_a_km_row;
// summed indices [k, k + 16).
template <class Math, int kCols>
__device__ __forceinline__ void load_weights_a_km(WeightsA<Math>& a, uint32_t tile, int row, int k) {
  using Layout = TileLayout<typename Math::Element, kCols>;
  const int lane = lane_index();
  if constexpr (kIs16Bit<Math>) {
    ptx::ldmatrix_x4_trans(a, tile + Layout::chunk_offset(k + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2));
  } else {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::load_shared_u32x2(a + 2 * i, tile + Layout::offset(k + i / 2 * 8 + 2 * t + i % 2, row + 2 * g));
    }
    round_to_mode<Math>(a);
  }
}

// Loads an A fragment in the order of weights from an [m][k] tile: rows [row, row + 16), columns [k, k + 16).
template <class Math, int kCols>
__device__ __forceinline__ void load_weights_a_mk(WeightsA<Math>& a, uint32_t tile, int row, int k) {
  using Layout = TileLayout<typename Math::Element, kCols>;
  const int lane = lane_index();
  if constexpr (kIs16Bit<Math>) {
    ptx::ldmatrix_x4(a, tile + Layout::chunk_offset(row + lane % 16, k / 8 + lane / 16));
  } else {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      a[i] = ptx::load_shared_u32(tile + Layout::offset(row + g + i % 2 * 8, k + i / 4 * 8 + 2 * t + i / 2 % 2));
    }
    round_to_mode<Math>(a);
  }
}

// The same from global memory. Rows outside [0, rows) and columns from cols on read as zeros.
template <class Math>
__device__ __forceinline__ void load_weights_a_mk_global(WeightsA<Math>& a, const typename Math::Element* src, int64_t token_stride,
                                                         int row, int rows, int k, int cols) {
  const int lane = lane_index(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < FragmentSize<Math>::kWeightsA; ++i) {
    const int r = row + g + i % 2 * 8;
    const int c = kIs16Bit<Math> ? k + 2 * t + i / 2 * 8 : k + i / 4 * 8 + 2 * t + i / 2 % 2;
    a[i] = r < rows && c < cols ? __ldg(reinterpret_cast<const uint32_t*>(src + r * token_stride + c)) : 0u;
  }
  round_to_mode<Math>(a);
}

// Loads two B fragments in the order of weights from an [n][k] tile: columns n .. n + 7 and n + 8 .. n + 15, summed indices [k,
// k + 16).
template <class Math, int kCols>
__device__ __forceinline__ void load_weights_b_nk_pair(WeightsB<Math>& b0, WeightsB<Math>& b1, uint32_t tile, int n, int k) {
  if constexpr (kIs16Bit<Math>) {
    load_b_nk_pair<Math, kCols>(b0, b1, tile, n, k);
  } else {
    using Layout = TileLayout<typename Math::Element, kCols>;
    const int lane = lane_index(), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = k + i / 2 * 8 + 2 * t + i % 2;
      b0[i] = ptx::load_shared_u32(tile + Layout::offset(n + g, c));
      b1[i] = ptx::load_shared_u32(tile + Layout::offset(n + 8 + g, c));
    }
    round_to_mode<Math>(b0);
    round_to_mode<Math>(b1);
  }
}

// Converts a 16 x 8 accumulator to one half (8 of 16 summed indices) of an A fragment.
template <class Math>
__device__ __forceinline__ void half_weights_a_from_accumulator(WeightsA<Math>& a, int half, const float (&acc)[4]) {
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
// Converts two neighbouring 16 x 8 accumulators to an A fragment (16 rows x 16 summed indices).
template <class Math>
__device__ __forceinline__ void weights_a_from_accumulator(WeightsA<Math>& a, const float (&left)[4], const float (&right)[4]) {
  half_weights_a_from_accumulator<Math>(a, 0, left);
  half_weights_a_from_accumulator<Math>(a, 1, right);
}

// Two m16n8k8 products of fragments in tf32.
__device__ __forceinline__ void mma_tf32_k16(float (&acc)[4], const uint32_t (&a)[8], const uint32_t (&b)[4]) {
  ptx::mma_tf32(acc, a[0], a[1], a[2], a[3], b[0], b[1]);
  ptx::mma_tf32(acc, a[4], a[5], a[6], a[7], b[2], b[3]);
}

// An fp32 operand as tf32 hi + lo; lo lo is below fp32's rounding. The tensor core truncates when it accumulates, so each k16
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

// acc = resident rows times the 16 tokens at base (load_b_nk_pair_at).
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
    load_b_nk_pair_at<Math, kCols>(b0, b1, base, kk * 16);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) mma_pair<Math>(acc[i][0], acc[i][1], rows[i][kk], b0, b1);
  }
}

// acc += weights (16 x 16) times the 16 tokens at base (load_weights_b_kn_pair_at), kOctets * 8 columns of them.
template <class Math, int kCols, int kRowTiles, int kOctets>
__device__ __forceinline__ void accumulate_slab(float (&acc)[kRowTiles][kOctets][4], const WeightsA<Math> (&w)[kRowTiles],
                                                uint32_t base) {
#pragma unroll
  for (int c = 0; c < kOctets / 2; ++c) {
    WeightsB<Math> b0, b1;
    load_weights_b_kn_pair_at<Math, kCols>(b0, b1, base, c * 16);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) mma_weights_pair<Math>(acc[i][2 * c], acc[i][2 * c + 1], w[i], b0, b1);
  }
}

// Stores the accumulators of a warp (rows from warp_row on, columns from 0 on) to global memory, except rows from row_end on
// and columns from cols on. finish_row(i, half, row) returns a function of (column, two neighbouring sums) whose result is
// stored.
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

// Sum and maximum over the four lanes that hold a row of an accumulator.
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
