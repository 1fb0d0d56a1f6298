// The merge of local (softmax) and global (polynomial) attention of an exact window, and what the backward of the global part takes.
#pragma once

#include <cuda_runtime.h>

#include "core/params.h"

namespace fastmax {

struct MergeParams {
  int b, h, n, dv;
  MathMode math;    // of o and o_global; the arithmetic is fp32
  bool aligned;     // whether rows of o and o_global are whole 16-byte words at multiples of 16 bytes

  void* o;  // (b, h, n, dv): attention to the local keys; receives the merged attention
  const void* o_global;  // (b, h, n, dv): attention to the global keys
  Stride o_stride, o_global_stride;  // unit stride in the last dimension, any alignment

  float* lse;             // (b, h, n): log of the local keys' sum of weights; receives that of all keys
  const float* z_global;  // (b, h, n): the global keys' sum of weights; 0: the query sees none
  Stride lse_stride, z_global_stride;
};

void launch_merge(const MergeParams& p, cudaStream_t stream);

// The denominators of the global keys' backward, from the log-sum-exp of all keys.
struct DenominatorParams {
  int b, h, hk, n;    // n queries, which are last
  int causal_offset;  // of the call for the global keys
  bool has_decay;
  const float* lse;       // (b, h, n)
  const float* grad_lse;  // (b, h, n), or null
  Stride lse_stride, grad_lse_stride;
  KeyBounds k_start;  // of the call for the global keys, with a number per query
  // (b, h, n) contiguous: exp(lse). It may be infinite: the global keys then have no weight. 0 where k_start hides all of them, so that a
  // NaN of the query does not reach them, and with decays where they all count as fully decayed (PolynomialScore::kSmallestSum).
  float* z;
  float* grad_z;  // (b, h, n) contiguous: grad_lse / z; 0 where z is 0 or infinite. Null without grad_lse
};

void launch_denominators(const DenominatorParams& p, cudaStream_t stream);

}  // namespace fastmax
