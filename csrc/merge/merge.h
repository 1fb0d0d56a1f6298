// Merges of attention over parts of the keys, and what the backward of an exact window's global keys takes.
#pragma once

#include <cuda_runtime.h>

#include "core/params.h"

namespace fastmax {

// The merge of local (softmax) and global (polynomial) attention of an exact window, in place.
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

// Attention over part of the keys: o and the log of the sums of weights, -inf where a query sees no key of the part.
struct AttentionPart {
  const void* o;  // (b, h, n, dv), unit stride in the last dimension
  const float* lse;  // (b, h, n)
  Stride o_stride, lse_stride;
};

struct PartsParams {
  int b, h, n, dv;
  MathMode math;  // of all o; the arithmetic is fp32
  bool aligned;   // whether all rows are whole 16-byte words at multiples of 16 bytes
  AttentionPart first, second;
};

// Writes attention over the keys of both parts: o is 0 and lse -inf where a query sees no key.
struct MergePartsParams : PartsParams {
  void* o;  // (b, h, n, dv), unit stride in the last dimension
  float* lse;  // (b, h, n) contiguous
  Stride o_stride;
};

void launch_merge_parts(const MergePartsParams& p, cudaStream_t stream);

// The gradients of what is merged. With w = exp(lse of a part - lse), they are w grad_o and w (grad_o . (o of the part - o) + grad_lse),
// and 0 where lse is -inf.
struct MergePartsBackwardParams : PartsParams {
  const void* grad_o;  // (b, h, n, dv), unit stride in the last dimension; null: 0
  const float* grad_lse;  // (b, h, n); null: 0
  Stride grad_o_stride, grad_lse_stride;
  // Unit stride in the last dimension; those of lse are contiguous.
  void *grad_first_o, *grad_second_o;
  float *grad_first_lse, *grad_second_lse;
  Stride grad_first_o_stride, grad_second_o_stride;
};

void launch_merge_parts_backward(const MergePartsBackwardParams& p, cudaStream_t stream);

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
