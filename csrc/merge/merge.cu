#include "merge/merge.h"

#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/heads.h"
#include "core/lanes.h"
#include "core/launch.h"
#include "core/score.h"
#include "core/vector.h"

namespace fastmax {
namespace {

constexpr int kThreads = 256;

// A power of two of neighbouring lanes share a row. `head_blocks` thread blocks have a head.
struct Grid {
  int lanes, head_blocks;
  unsigned blocks;

  template <class Params>
  Grid(const Params& p, int elements) : lanes(1) {
    while (lanes < 32 && lanes * elements < p.dv) lanes *= 2;
    const int rows = kThreads / lanes;
    head_blocks = (p.n + rows - 1) / rows;
    blocks = grid_1d(int64_t{head_blocks} * p.b * p.h);
  }
};

// A query of a head, and the lane among those that share its row.
struct Place {
  int batch, head, row, lane;
  bool exists;

  template <class Params>
  __device__ Place(const Params& p, int lanes, int head_blocks) {
    const int head_index = blockIdx.x / head_blocks, thread = static_cast<int>(threadIdx.x);
    batch = head_index / p.h, head = head_index % p.h;
    row = blockIdx.x % head_blocks * (kThreads / lanes) + thread / lanes, lane = thread % lanes;
    exists = row < p.n;
  }

  // In a contiguous tensor (b, h, n).
  __device__ int64_t index(const PartsParams& p) const { return (int64_t{batch} * p.h + head) * p.n + row; }

  template <class T>
  __device__ T* row_of(T* x, const Stride& stride) const {
    return head_of<std::remove_const_t<T>>(x, stride, batch, head) + row * stride.token;
  }
};

// The share of each of two parts in the sum of weights, and the log of the sum, given those of the parts.
struct Shares {
  float first = 0.f, second = 0.f, lse = 0.f;

  Shares() = default;

  __device__ Shares(float first_lse, float second_lse) {
    const float largest = fmaxf(first_lse, second_lse), base = largest == -INFINITY ? 0.f : largest;
    first = expf(first_lse - base), second = expf(second_lse - base);
    const float total = first + second;
    lse = total == 0.f ? -INFINITY : base + logf(total);
    if (total != 0.f) first /= total, second /= total;
  }

  __device__ Shares(const PartsParams& p, const Place& at)
      : Shares(*at.row_of(p.first.lse, p.first.lse_stride), *at.row_of(p.second.lse, p.second.lse_stride)) {}
};

template <class Element, int kElements>
__global__ void __launch_bounds__(kThreads) merge_kernel(const MergeParams p, const int lanes, const int head_blocks) {
  const Place at(p, lanes, head_blocks);
  float* lse = nullptr;
  float local = 0.f, z_global = 0.f;
  if (at.exists) {
    lse = at.row_of(p.lse, p.lse_stride);
    local = *lse, z_global = *at.row_of(p.z_global, p.z_global_stride);
  }
  __syncwarp();  // all lanes of the row have read lse before the first one overwrites it
  if (!at.exists || z_global == 0.f) return;

  const Shares share(local, logf(z_global));  // a negative z_global makes everything NaN
  if (at.lane == 0) *lse = share.lse;

  using Words = Vector<Element, kElements>;
  Element* o = at.row_of(static_cast<Element*>(p.o), p.o_stride);
  const Element* o_global = at.row_of(static_cast<const Element*>(p.o_global), p.o_global_stride);
  for (int c = kElements * at.lane; c < p.dv; c += kElements * lanes) {
    Words x = *reinterpret_cast<const Words*>(o + c);
    const Words y = *reinterpret_cast<const Words*>(o_global + c);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      x.x[i] = from_float<Element>(fmaf(share.first, to_float(x.x[i]), share.second * to_float(y.x[i])));
    }
    *reinterpret_cast<Words*>(o + c) = x;
  }
}

template <class Element, int kElements>
__global__ void __launch_bounds__(kThreads) merge_parts_kernel(const MergePartsParams p, const int lanes, const int head_blocks) {
  const Place at(p, lanes, head_blocks);
  if (!at.exists) return;
  const Shares share(p, at);
  if (at.lane == 0) p.lse[at.index(p)] = share.lse;

  using Words = Vector<Element, kElements>;
  const Element* first = at.row_of(static_cast<const Element*>(p.first.o), p.first.o_stride);
  const Element* second = at.row_of(static_cast<const Element*>(p.second.o), p.second.o_stride);
  Element* o = at.row_of(static_cast<Element*>(p.o), p.o_stride);
  for (int c = kElements * at.lane; c < p.dv; c += kElements * lanes) {
    const Words x = *reinterpret_cast<const Words*>(first + c), y = *reinterpret_cast<const Words*>(second + c);
    Words merged;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      merged.x[i] = from_float<Element>(fmaf(share.first, to_float(x.x[i]), share.second * to_float(y.x[i])));
    }
    *reinterpret_cast<Words*>(o + c) = merged;
  }
}

template <class Element, int kElements>
__global__ void __launch_bounds__(kThreads)
    merge_parts_backward_kernel(const MergePartsBackwardParams p, const int lanes, const int head_blocks) {
  const Place at(p, lanes, head_blocks);
  Shares share{};
  if (at.exists) share = Shares(p, at);
  float of_first = 0.f, of_second = 0.f;  // grad_o . o of each part

  if (at.exists) {
    using Words = Vector<Element, kElements>;
    const Element* first = at.row_of(static_cast<const Element*>(p.first.o), p.first.o_stride);
    const Element* second = at.row_of(static_cast<const Element*>(p.second.o), p.second.o_stride);
    const Element* grad = p.grad_o == nullptr ? nullptr : at.row_of(static_cast<const Element*>(p.grad_o), p.grad_o_stride);
    Element* grad_first = at.row_of(static_cast<Element*>(p.grad_first_o), p.grad_first_o_stride);
    Element* grad_second = at.row_of(static_cast<Element*>(p.grad_second_o), p.grad_second_o_stride);
    for (int c = kElements * at.lane; c < p.dv; c += kElements * lanes) {
      Words x{}, y{}, g{}, to_first, to_second;
      if (grad != nullptr) {
        x = *reinterpret_cast<const Words*>(first + c), y = *reinterpret_cast<const Words*>(second + c);
        g = *reinterpret_cast<const Words*>(grad + c);
      }
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const float of_o = to_float(g.x[i]);
        of_first = fmaf(of_o, to_float(x.x[i]), of_first), of_second = fmaf(of_o, to_float(y.x[i]), of_second);
        to_first.x[i] = from_float<Element>(share.first * of_o), to_second.x[i] = from_float<Element>(share.second * of_o);
      }
      *reinterpret_cast<Words*>(grad_first + c) = to_first, *reinterpret_cast<Words*>(grad_second + c) = to_second;
    }
  }
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    of_first += __shfl_xor_sync(kAllLanes, of_first, distance), of_second += __shfl_xor_sync(kAllLanes, of_second, distance);
  }
  if (!at.exists || at.lane != 0) return;
  // The gradient of an lse of -inf may be NaN.
  const float of_lse = p.grad_lse == nullptr || share.lse == -INFINITY ? 0.f : *at.row_of(p.grad_lse, p.grad_lse_stride);
  // o of a part less o is the other part's share of the difference of the two.
  const float both = share.first * share.second * (of_first - of_second);
  p.grad_first_lse[at.index(p)] = both + share.first * of_lse;
  p.grad_second_lse[at.index(p)] = share.second * of_lse - both;
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

}  // namespace

void launch_merge(const MergeParams& p, cudaStream_t stream) {
  dispatch_words(p.math, p.aligned, [&](auto element, auto elements) {
    const Grid grid(p, elements());
    launch_kernel("merge", merge_kernel<decltype(element), elements()>, grid.blocks, kThreads, 0, stream, p, grid.lanes, grid.head_blocks);
  });
}

void launch_merge_parts(const MergePartsParams& p, cudaStream_t stream) {
  dispatch_words(p.math, p.aligned, [&](auto element, auto elements) {
    const Grid grid(p, elements());
    launch_kernel("merge_parts", merge_parts_kernel<decltype(element), elements()>, grid.blocks, kThreads, 0, stream, p, grid.lanes,
                  grid.head_blocks);
  });
}

void launch_merge_parts_backward(const MergePartsBackwardParams& p, cudaStream_t stream) {
  dispatch_words(p.math, p.aligned, [&](auto element, auto elements) {
    const Grid grid(p, elements());
    launch_kernel("merge_parts_backward", merge_parts_backward_kernel<decltype(element), elements()>, grid.blocks, kThreads, 0, stream, p,
                  grid.lanes, grid.head_blocks);
  });
}

void launch_denominators(const DenominatorParams& p, cudaStream_t stream) {
  const int64_t rows = int64_t{p.b} * p.h * p.n;
  launch_kernel("denominators", denominators_kernel, grid_1d((rows + kThreads - 1) / kThreads), kThreads, 0, stream, p, rows);
}

}  // namespace fastmax
