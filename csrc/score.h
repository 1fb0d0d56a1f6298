// Score policies (weight and derivative as functions of the scaled dot product) and which keys a query sees.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace fastmax {

// f(s) = a0 + a1 s + a2 s^2 with s = scale * x, as a polynomial in the unscaled dot product x: two FMAs per weight.
// A policy with kNeedsRowMax = true would ask the main loop to track row maxima and rescale (softmax); this one needs neither.
template <int kOrder>
struct PolynomialScore {
  static_assert(kOrder == 1 || kOrder == 2, "polynomial order is 1 or 2");
  static constexpr bool kNeedsRowMax = false;

  float c0, c1, c2;  // f = c0 + x (c1 + c2 x)
  float g0, g1;      // scale * f'(s) = g0 + g1 x: the factor that grad_q and grad_k need

  __host__ __device__ explicit PolynomialScore(const Problem& p)
      : c0(p.a0),
        c1(p.a1 * p.scale),
        c2(kOrder == 2 ? p.a2 * p.scale * p.scale : 0.f),
        g0(p.a1 * p.scale),
        g1(kOrder == 2 ? 2.f * p.a2 * p.scale * p.scale : 0.f) {}

  __device__ __forceinline__ float weight(float x) const {
    if constexpr (kOrder == 2) return fmaf(x, fmaf(c2, x, c1), c0);
    return fmaf(c1, x, c0);
  }

  __device__ __forceinline__ float scaled_derivative(float x) const {
    if constexpr (kOrder == 2) return fmaf(g1, x, g0);
    return g0;
  }
};

// Key j is visible to query i iff j <= last_visible_key(i) and the padding mask keeps it.
__host__ __device__ __forceinline__ int last_visible_key(const Problem& p, int query) {
  const int last = p.m - 1;
  if (!p.causal) return last;
  const int diagonal = query + p.causal_offset;
  return diagonal < last ? diagonal : last;
}

// The first query that sees key j (0 when not causal).
__host__ __device__ __forceinline__ int first_query(const Problem& p, int key) {
  if (!p.causal) return 0;
  const int diagonal = key - p.causal_offset;
  return diagonal > 0 ? diagonal : 0;
}

// Whether the padding mask, if there is one, keeps key j (clamped to the last key) of a batch entry.
__device__ __forceinline__ bool keeps_key(const uint8_t* key_padding_mask, int64_t batch_stride, int batch, int key, int m) {
  return key_padding_mask == nullptr || key_padding_mask[batch * batch_stride + min(key, m - 1)] != 0;
}

// Where a (batch, query head) index points.
struct HeadIndex {
  int batch, head, kv_head;
};
__device__ __forceinline__ HeadIndex head_index(const Problem& p, int index) {
  const int head = index % p.h;
  return {index / p.h, head, head / (p.h / p.hk)};
}

}  // namespace fastmax
