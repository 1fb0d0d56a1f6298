#include "merge/merge.h"

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
__global__ void __launch_bounds__(kThreads) merge_kernel(const MergeParams p, const int lanes, const int head_blocks) {
  const int head_index = blockIdx.x / head_blocks, batch = head_index / p.h, head = head_index % p.h;
  const int row = blockIdx.x % head_blocks * (kThreads / lanes) + static_cast<int>(threadIdx.x) / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const bool exists = row < p.n;

  float* lse = nullptr;
  float local = 0.f, z_global = 0.f, shift = 0.f;
  if (exists) {
    lse = head_of<float>(p.lse, p.lse_stride, batch, head) + row * p.lse_stride.token;
    local = *lse;
    z_global = head_of<float>(p.z_global, p.z_global_stride, batch, head)[row * p.z_global_stride.token];
    if (p.shift != nullptr) {
      shift = head_of<float>(p.shift, p.shift_stride, batch, head / (p.h / p.shift_heads))[row * p.shift_stride.token];
    }
  }
  __syncwarp();  // all lanes of the row have read lse before the first one overwrites it
  const bool blind = z_global == 0.f || shift == -INFINITY;
  if (exists && blind && lane == 0) p.z[int64_t{head_index} * p.n + row] = 0.f;
  if (!exists || blind) return;

  // Compared in units of the global weights: if the two are close, a large shift then rounds neither. A negative z_global makes
  // everything NaN.
  const float in_units = local - shift, global = logf(z_global), base = fmaxf(in_units, global);
  const float of_local = expf(in_units - base), of_global = expf(global - base), total = of_local + of_global;
  const float local_factor = of_local / total, global_factor = of_global / total;
  if (lane == 0) {
    *lse = (in_units >= global ? local : global + shift) + logf(total);
    p.z[int64_t{head_index} * p.n + row] = isnan(total) ? total : z_global + expf(in_units);
  }

  struct alignas(kElements * sizeof(Element)) Vector {
    Element x[kElements];
  };
  Element* o = head_of<Element>(p.o, p.o_stride, batch, head) + row * p.o_stride.token;
  const Element* o_global = head_of<Element>(p.o_global, p.o_global_stride, batch, head) + row * p.o_global_stride.token;
  for (int c = kElements * lane; c < p.dv; c += kElements * lanes) {
    Vector x = *reinterpret_cast<const Vector*>(o + c);
    const Vector y = *reinterpret_cast<const Vector*>(o_global + c);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      x.x[i] = from_float<Element>(fmaf(local_factor, to_float(x.x[i]), global_factor * to_float(y.x[i])));
    }
    *reinterpret_cast<Vector*>(o + c) = x;
  }
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
  dispatch_math(p.math, [&](auto math) {
    using Element = typename decltype(math)::type::Element;
    if (p.aligned) launch<Element, 16 / sizeof(Element)>(p, stream);
    else launch<Element, 1>(p, stream);
  });
}

}  // namespace fastmax
