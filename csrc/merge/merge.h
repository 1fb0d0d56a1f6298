// Attention over far keys joined to attention over near ones, which the exact window is made of.
#pragma once

#include <cuda_runtime.h>

#include "core/params.h"

namespace fastmax {

struct MergeParams {
  int b, h, n, dv;
  int shift_heads;  // h is a multiple of it
  MathMode math;    // of o and o_global; the arithmetic is fp32
  bool aligned;     // rows of o and o_global are whole 16-byte words at multiples of 16 bytes

  void* o;  // (b, h, n, dv), written over
  const void* o_global;
  Stride o_stride, o_global_stride;  // the last dimension has unit stride, any alignment

  float* lse;  // (b, h, n), written over: the log of the near keys' sum of weights, then of both
  const float* z_global;  // (b, h, n): the far keys' sum of weights is z_global exp(shift)
  const float* shift;  // (b, shift_heads, n); null: 0
  Stride lse_stride, z_global_stride, shift_stride;
  float* z;  // (b, h, n) contiguous: the sum of both, divided by exp(shift); 0 where there are no far keys
};

void launch_merge(const MergeParams& p, cudaStream_t stream);

}  // namespace fastmax
