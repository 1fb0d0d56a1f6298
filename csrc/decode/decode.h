// One token of generation from a constant-size state.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/params.h"

namespace fastmax {

// Rows of a state: 1, k_a and, order 2, k_a k_b for a <= b in the order (0,0), (0,1), ..., (0,d-1), (1,1), ...
constexpr __host__ __device__ int decode_rows(int d, int order) { return 1 + d + (order == 2 ? d * (d + 1) / 2 : 0); }

constexpr int kMaxDecodeHeadDim = 256;

// Strides in elements, of any size.
struct TokenStride {
  int64_t batch;
  int64_t head;
  int64_t column;
};

struct DecodeParams {
  int b, h, hk, d, dv;  // d, dv <= kMaxDecodeHeadDim
  MathMode math;        // of q, k, v and o; the arithmetic is fp32
  float scale;          // s = scale * q.k
  float a0, a1, a2;     // f(s) = a0 + a1 s + a2 s^2
  int order;            // 1 or 2
  int sm_count;

  const void* q;  // (b, h, d)
  const void* k;  // (b, hk, d)
  const void* v;  // (b, hk, dv)
  TokenStride q_stride, k_stride, v_stride;
  const uint8_t* attention_mask;  // (b), zero = the token does not join the state; null: all do
  int64_t mask_stride;
  const float* log_decay;  // (b, hk), the state's decay before the token joins: <= 0, -inf or NaN, > 0 counts as 0; null: 0
  int64_t decay_batch_stride, decay_head_stride;

  const float* values;   // (b, hk, rows, dv) contiguous: sum of features(k) v
  const float* weights;  // (b, hk, rows) contiguous: sum of features(k)
  float* new_values;     // like values: values and weights themselves, or memory that overlaps nothing else
  float* new_weights;
  void* o;               // (b, h, dv) contiguous
};

// new state = exp(log_decay) state + features(k) (v, 1); o = its values over its weights, both summed with f's weights of features(q). The state is
// read and written once for up to 8 query heads per key/value head, and read once more for every 8 beyond.
void launch_decode(const DecodeParams& p, cudaStream_t stream);

}  // namespace fastmax
