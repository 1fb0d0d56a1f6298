// Which pairs of a partly visible tile count, as bits that a thread looks at by its accumulators (wgmma.h): visible[half][i], of row
// g + 8 half and the 32 columns from 32 i on, a bit for each column, moved down by 2t, so that the number of an accumulator's bit is
// known to the compiler.
#pragma once

#include "core/visibility.h"
#include "quadratic/kept_keys_sm90.h"

namespace fastmax {

// Of accumulator i.
template <int kWords>
__device__ __forceinline__ bool is_visible(const uint32_t (&visible)[2][kWords], int i) {
  return (visible[i >> 1 & 1][i >> 4] >> ((i >> 2 & 3) * 8 + (i & 1)) & 1u) != 0;
}

// The lowest `count` bits of 32 are ones; of word i where the count is over several.
__device__ __forceinline__ uint32_t low_bits(int count, int word) {
  return static_cast<uint32_t>((uint64_t{1} << min(max(count - 32 * word, 0), 32)) - 1);
}

// Rows are queries: `row` and row + 8. Columns are the 32 kWords keys of a tile. t: lane % 4.
template <int kWords>
__device__ __forceinline__ void visible_keys(uint32_t (&visible)[2][kWords], const DenseVisibility& sees, const KeptWords& kept,
                                             int batch, int tile, int row, int t) {
  uint32_t words[kWords];
  kept.load(words, batch, tile);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int end = sees.keys_of(row + 8 * half).end - tile * (32 * kWords);
#pragma unroll
    for (int i = 0; i < kWords; ++i) visible[half][i] = (words[i] & low_bits(end, i)) >> (2 * t);
  }
}

// Rows are keys, columns the 32 kWords queries of a tile. Those behind the last query count, and are zeros.
template <int kWords>
__device__ __forceinline__ void visible_queries(uint32_t (&visible)[2][kWords], const DenseVisibility& sees, int tile, int row, int t) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int begin = sees.queries_of(row + 8 * half).begin - tile * (32 * kWords);
#pragma unroll
    for (int i = 0; i < kWords; ++i) visible[half][i] = ~low_bits(begin, i) >> (2 * t);
  }
}

}  // namespace fastmax
