// The merge of local (softmax) and global (polynomial) attention of an exact window.
#pragma once

#include <cuda_runtime.h>

#include "core/params.h"

namespace fastmax {

struct MergeParams {
  int b, h, n, dv;
  int shift_heads;  // divides h
  MathMode math;    // of o and o_global; the arithmetic is fp32
  bool aligned;     // whether rows of o and o_global are whole 16-byte words at multiples of 16 bytes

  void* o;  // (b, h, n, dv): attention to the local keys; receives the merged attention
  const void* o_global;  // (b, h, n, dv): attention to the global keys
  Stride o_stride, o_global_stride;  // unit stride in the last dimension, any alignment

  float* lse;             // (b, h, n): log of the local keys' sum of weights; receives that of all keys
  const float* z_global;  // (b, h, n): the global keys' sum of weights is z_global exp(shift)
  const float* shift;     // (b, shift_heads, n); null: 0
  Stride lse_stride, z_global_stride, shift_stride;
  float* z;  // (b, h, n) contiguous result: sum of weights of all keys, divided by exp(shift); 0 if there are no global keys
};

void launch_merge(const MergeParams& p, cudaStream_t stream);

}  // namespace fastmax
