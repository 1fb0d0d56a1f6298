// Reductions and scans over the lanes of a warp. All lanes take part.
#pragma once

#include <cuda_runtime.h>

namespace fastmax {

constexpr unsigned kAllLanes = 0xffffffffu;

// Combines the values of each kLanes neighbours, a power of two. All of them get the result, with the same bits.
template <int kLanes = 32, class T, class Combine>
__device__ __forceinline__ T reduce_lanes(T x, const Combine& combine) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) x = combine(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}

template <int kLanes = 32, class T>
__device__ __forceinline__ T sum_of_lanes(T x) {
  return reduce_lanes<kLanes>(x, [](T a, T b) { return a + b; });
}

template <int kLanes = 32>
__device__ __forceinline__ float max_of_lanes(float x) {
  return reduce_lanes<kLanes>(x, [](float a, float b) { return fmaxf(a, b); });
}

template <int kLanes = 32>
__device__ __forceinline__ float min_of_lanes(float x) {
  return reduce_lanes<kLanes>(x, [](float a, float b) { return fminf(a, b); });
}

// Combines the values of all lanes up to this one.
template <class T, class Combine>
__device__ __forceinline__ T scan_lanes(T x, const Combine& combine) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T before = __shfl_up_sync(kAllLanes, x, distance);
    if (threadIdx.x % 32 >= distance) x = combine(x, before);
  }
  return x;
}

}  // namespace fastmax
