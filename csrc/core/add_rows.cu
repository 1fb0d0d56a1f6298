#include "core/add_rows.h"

#include <cstdint>

#include "core/dispatch.h"
#include "core/dtype.h"
#include "core/heads.h"
#include "core/launch.h"

namespace fastmax {
namespace {

constexpr int kThreads = 256;

// A power of two of neighbouring lanes share a row; each moves kElements at a time.
template <class Element, int kElements>
__global__ void __launch_bounds__(kThreads) add_rows_kernel(const AddRowsParams p, const int lanes, const int head_blocks) {
  const int head_index = blockIdx.x / head_blocks;
  const int row = blockIdx.x % head_blocks * (kThreads / lanes) + static_cast<int>(threadIdx.x) / lanes;
  if (row >= p.tokens) return;

  struct alignas(kElements * sizeof(Element)) Vector {
    Element x[kElements];
  };
  Element* sum = head_of<Element>(p.sum, p.sum_stride, head_index / p.heads, head_index % p.heads) + row * p.sum_stride.token;
  const Element* x = static_cast<const Element*>(p.x) + (int64_t{head_index} * p.tokens + row) * p.columns;
  for (int c = kElements * (static_cast<int>(threadIdx.x) % lanes); c < p.columns; c += kElements * lanes) {
    Vector total = *reinterpret_cast<const Vector*>(sum + c);
    const Vector more = *reinterpret_cast<const Vector*>(x + c);
#pragma unroll
    for (int i = 0; i < kElements; ++i) total.x[i] = from_float<Element>(to_float(total.x[i]) + to_float(more.x[i]));
    *reinterpret_cast<Vector*>(sum + c) = total;
  }
}

template <class Element, int kElements>
void launch(const AddRowsParams& p, cudaStream_t stream) {
  int lanes = 1;
  while (lanes < 32 && lanes * kElements < p.columns) lanes *= 2;
  const int rows = kThreads / lanes, head_blocks = (p.tokens + rows - 1) / rows;
  launch_kernel("add_rows", add_rows_kernel<Element, kElements>, grid_1d(int64_t{head_blocks} * p.b * p.heads), kThreads, 0, stream, p,
                lanes, head_blocks);
}

}  // namespace

void launch_add_rows(const AddRowsParams& p, cudaStream_t stream) {
  dispatch_math(p.math, [&](auto math) {
    using Element = typename decltype(math)::type::Element;
    constexpr int kWord = 16 / sizeof(Element);
    if (p.columns % kWord == 0) launch<Element, kWord>(p, stream);
    else launch<Element, 1>(p, stream);
  });
}

}  // namespace fastmax
