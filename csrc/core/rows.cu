#include "core/rows.h"

#include <cstdint>

#include "core/dispatch.h"
#include "core/dtype.h"
#include "core/heads.h"
#include "core/launch.h"

namespace fastmax {
namespace {

constexpr int kThreads = 256;

// A power of two of neighbouring lanes share a row; each moves kElements at a time.
template <class Element, int kElements, bool kAdds>
__global__ void __launch_bounds__(kThreads) rows_kernel(const RowsParams p, const int lanes, const int head_blocks) {
  const int head_index = blockIdx.x / head_blocks, batch = head_index / p.heads, head = head_index % p.heads;
  const int row = blockIdx.x % head_blocks * (kThreads / lanes) + static_cast<int>(threadIdx.x) / lanes;
  if (row >= p.tokens) return;

  struct alignas(kElements * sizeof(Element)) Vector {
    Element x[kElements];
  };
  Element* to = head_of<Element>(p.to, p.to_stride, batch, head) + row * p.to_stride.token;
  const Element* from = head_of<Element>(p.from, p.from_stride, batch, head) + row * p.from_stride.token;
  for (int c = kElements * (static_cast<int>(threadIdx.x) % lanes); c < p.columns; c += kElements * lanes) {
    Vector x = *reinterpret_cast<const Vector*>(from + c);
    if constexpr (kAdds) {
      const Vector sum = *reinterpret_cast<const Vector*>(to + c);
#pragma unroll
      for (int i = 0; i < kElements; ++i) x.x[i] = from_float<Element>(to_float(sum.x[i]) + to_float(x.x[i]));
    }
    *reinterpret_cast<Vector*>(to + c) = x;
  }
}

// Whether all rows are whole 16-byte words that begin at multiples of 16 bytes.
bool are_words(const RowsParams& p, int elements_of_word) {
  for (const Stride& s : {p.to_stride, p.from_stride}) {
    if ((s.batch | s.head | s.token) % elements_of_word != 0) return false;
  }
  const bool begin_aligned = (reinterpret_cast<uintptr_t>(p.to) | reinterpret_cast<uintptr_t>(p.from)) % 16 == 0;
  return begin_aligned && p.columns % elements_of_word == 0;
}

template <class Element, int kElements, bool kAdds>
void launch(const RowsParams& p, cudaStream_t stream) {
  int lanes = 1;
  while (lanes < 32 && lanes * kElements < p.columns) lanes *= 2;
  const int rows = kThreads / lanes, head_blocks = (p.tokens + rows - 1) / rows;
  launch_kernel(kAdds ? "add_rows" : "copy_rows", rows_kernel<Element, kElements, kAdds>,
                grid_1d(int64_t{head_blocks} * p.b * p.heads), kThreads, 0, stream, p, lanes, head_blocks);
}

template <bool kAdds>
void dispatch(const RowsParams& p, cudaStream_t stream) {
  dispatch_math(p.math, [&](auto math) {
    using Element = typename decltype(math)::type::Element;
    constexpr int kWord = 16 / sizeof(Element);
    if (are_words(p, kWord)) launch<Element, kWord, kAdds>(p, stream);
    else launch<Element, 1, kAdds>(p, stream);
  });
}

}  // namespace

void launch_copy_rows(const RowsParams& p, cudaStream_t stream) { dispatch<false>(p, stream); }
void launch_add_rows(const RowsParams& p, cudaStream_t stream) { dispatch<true>(p, stream); }

}  // namespace fastmax
