#include "merge/merge.h"

#include <cstdint>

#include "core/dtype.h"
#include "core/heads.h"
#include "core/launch.h"
#include "core/score.h"
#include "core/vector.h"

namespace fastmax {
namespace {

constexpr int kThreads = 256;

// A power of two of neighbouring lanes share a row; each moves kElements at a time.
template <class Element, int kElements>
__global__ void __launch_bounds__(kThreads) merge_kernel(const MergeParams p, const int lanes, const int head_blocks) {
  const int head_index = blockIdx.x / head_blocks, batch = head_index / p.h, head = head_index % p.h;
  const int row = blockIdx.x % head_blocks * (kThreads / lanes) + static_cast<int>(threadIdx.x) / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const bool exists = row < p.n;

  float* lse = nullptr;
  float local = 0.f, z_global = 0.f;
  if (exists) {
    lse = head_of<float>(p.lse, p.lse_stride, batch, head) + row * p.lse_stride.token;
    local = *lse;
    z_global = head_of<float>(p.z_global, p.z_global_stride, batch, head)[row * p.z_global_stride.token];
  }
  __syncwarp();  // all lanes of the row have read lse before the first one overwrites it
  if (!exists || z_global == 0.f) return;

  // A negative z_global makes everything NaN.
  const float global = logf(z_global), base = fmaxf(local, global);
  const float of_local = expf(local - base), of_global = expf(global - base), total = of_local + of_global;
  const float local_factor = of_local / total, global_factor = of_global / total;
  if (lane == 0) *lse = base + logf(total);

  using Words = Vector<Element, kElements>;
  Element* o = head_of<Element>(p.o, p.o_stride, batch, head) + row * p.o_stride.token;
  const Element* o_global = head_of<Element>(p.o_global, p.o_global_stride, batch, head) + row * p.o_global_stride.token;
  for (int c = kElements * lane; c < p.dv; c += kElements * lanes) {
    Words x = *reinterpret_cast<const Words*>(o + c);
    const Words y = *reinterpret_cast<const Words*>(o_global + c);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      x.x[i] = from_float<Element>(fmaf(local_factor, to_float(x.x[i]), global_factor * to_float(y.x[i])));
    }
    *reinterpret_cast<Words*>(o + c) = x;
  }
}

__global__ void __launch_bounds__(kThreads) denominators_kernel(const DenominatorParams p, const int64_t rows) {
  const int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (index >= rows) return;
  const int head_index = static_cast<int>(index / p.n), row = static_cast<int>(index % p.n);
  const int batch = head_index / p.h, head = head_index % p.h;
  float z = expf(head_of<float>(p.lse, p.lse_stride, batch, head)[row * p.lse_stride.token]);
  if (p.has_decay && z < PolynomialScore::kSmallestSum) z = 0.f;
  if (p.k_start.data != nullptr) {
    const Stride& s = p.k_start.stride;
    const int first = p.k_start.data[batch * s.batch + head / (p.h / p.hk) * s.head + row * s.token];
    if (first > row + p.causal_offset) z = 0.f;
  }
  p.z[index] = z;
  if (p.grad_z == nullptr) return;
  const float grad = head_of<float>(p.grad_lse, p.grad_lse_stride, batch, head)[row * p.grad_lse_stride.token];
  p.grad_z[index] = z == 0.f || isinf(z) ? 0.f : grad / z;
}

template <class Element, int kElements>
void launch(const MergeParams& p, cudaStream_t stream) {
  int lanes = 1;
  while (lanes < 32 && lanes * kElements < p.dv) lanes *= 2;
  const int rows = kThreads / lanes, head_blocks = (p.n + rows - 1) / rows;
  launch_kernel("merge", merge_kernel<Element, kElements>, grid_1d(int64_t{head_blocks} * p.b * p.h), kThreads, 0, stream, p, lanes,
                head_blocks);
}

}  // namespace

void launch_merge(const MergeParams& p, cudaStream_t stream) {
  dispatch_words(p.math, p.aligned, [&](auto element, auto elements) { launch<decltype(element), elements()>(p, stream); });
}

void launch_denominators(const DenominatorParams& p, cudaStream_t stream) {
  const int64_t rows = int64_t{p.b} * p.h * p.n;
  launch_kernel("denominators", denominators_kernel, grid_1d((rows + kThreads - 1) / kThreads), kThreads, 0, stream, p, rows);
}

}  // namespace fastmax
