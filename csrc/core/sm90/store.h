// Stores an accumulator (64 x kCols, wgmma.h) directly to global memory, 16 bytes per lane. Of the four lanes that share a row,
// each takes the columns of one of four matrices. Shared memory is not used, so the copy engine may refill it before the sums
// are complete.
#pragma once

#include <cstdint>

#include "core/sm90/tiles.h"

namespace fastmax {

// Transposes over four lanes: x[i] of lane t becomes x[t] of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int t) {
  const bool odd = (t & 1) != 0, high = (t & 2) != 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? x[i] : x[i + 2], 2);
    (high ? x[i] : x[i + 2]) = other;
  }
}

// Stores rows `row` and row + 8 of this lane, times scale0 and scale1, to a head that begins at dst. Skips rows from `end` on
// and columns from `cols` on, a multiple of 8. Called by whole warps.
template <class Math, int kCount>
__device__ __forceinline__ void store_accumulator_rows(typename Math::Element* dst, int64_t token_stride, int row, int end, int cols,
                                                       const float (&d)[kCount], float scale0, float scale1) {
  static_assert(kCount % 16 == 0, "matrices come four at a time");
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scale = half == 0 ? scale0 : scale1;
    typename Math::Element* to = dst + (row + 8 * half) * token_stride + 8 * t;
#pragma unroll
    for (int j = 0; j < kCount / 4; j += 4) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = d + 4 * (j + i) + 2 * half;
        x[i] = pack_16bit<Math>(pair[0] * scale, pair[1] * scale);
      }
      transpose_quad(x, t);
      if (row + 8 * half < end && 8 * (j + t) < cols) *reinterpret_cast<uint4*>(to + 8 * j) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

}  // namespace fastmax
