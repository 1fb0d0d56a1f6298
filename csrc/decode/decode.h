// One step of recurrent decoding: one token, with a state of constant size.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/params.h"

namespace fastmax {

// Rows of a state: 1, k_a and, for order 2, k_a k_b for a <= b in the order (0,0), (0,1), ..., (0,d-1), (1,1), ...
constexpr __host__ __device__ int decode_rows(int d, int order) { return 1 + d + (order == 2 ? d * (d + 1) / 2 : 0); }

constexpr int kMaxDecodeHeadDim = 256;

// Strides in elements, any alignment.
struct TokenStride {
  int64_t batch;
  int64_t head;
  int64_t column;
};

struct DecodeParams {
  int b, h, hk, d, dv;  // d, dv <= kMaxDecodeHeadDim
  MathMode math;        // dtype of q, k, v and o; the arithmetic is fp32
  float scale;          // s = scale * q.k
  float a0, a1, a2;     // f(s) = a0 + a1 s + a2 s^2
  int order;            // 1 or 2
  int sm_count;

  const void* q;  // (b, h, d)
  const void* k;  // (b, hk, d)
  const void* v;  // (b, hk, dv)
  TokenStride q_stride, k_stride, v_stride;
  const uint8_t* attention_mask;  // (b), 0 = the token is not added to the state; null: all tokens are added
  int64_t mask_stride;
  // (b, hk): logarithm of the state's decay before the token is added. <= 0, -inf or NaN; values > 0 count as 0. Null: no
  // decay.
  const float* log_decay;
  int64_t decay_batch_stride, decay_head_stride;
  // (b, hk): logarithm of the token's weight, between -60 and 30 or NaN; other values count as the nearest end. Null: 0.
  const float* log_input_gate;
  int64_t gate_batch_stride, gate_head_stride;

  const float* kv_state;  // (b, hk, rows, dv) contiguous: sum of features(k) v
  const float* k_sum;     // (b, hk, rows) contiguous: sum of features(k)
  float* new_kv_state;    // like kv_state. kv_state and k_sum themselves, or memory that overlaps nothing else
  float* new_k_sum;
  void* o;                // (b, h, dv) contiguous
};

// Computes new state = exp(log_decay) state + exp(log_input_gate) features(k) (v, 1), and o: the sum of new_kv_state over the sum of new_k_sum,
// both weighted by f's coefficients and features(q). The state is read and written once for up to 8 query heads per key/value
// head, and read once more for every 8 further heads.
void launch_decode(const DecodeParams& p, cudaStream_t stream);

}  // namespace fastmax
