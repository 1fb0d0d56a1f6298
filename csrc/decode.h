// One token of generation from a constant-size state.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"

namespace fastmax {

// A state of (batch, key/value head), fp32, rows of dv + 1 columns padded to decode_columns(dv): the values' columns, then the
// denominator's. Rows (decode_rows(d, order)):
//   0           sum v, and the count of tokens
//   1 .. d      sum k_a v
//   then, order 2, for a <= b in the order (0,0), (0,1), ..., (0,d-1), (1,1), ...:   sum k_a k_b v
constexpr __host__ __device__ int64_t decode_rows(int d, int order) { return 1 + d + (order == 2 ? int64_t{d} * (d + 1) / 2 : 0); }
constexpr __host__ __device__ int decode_columns(int dv) { return (dv + 1 + 3) / 4 * 4; }

struct DecodeParams {
  int b, h, hk, d, dv;
  MathMode math;  // of q, k, v and o
  float scale, a0, a1, a2;
  int order;
  int sm_count;

  const void* q;  // (b, h, d)
  const void* k;  // (b, hk, d)
  const void* v;  // (b, hk, dv)
  int64_t q_batch, q_head, k_batch, k_head, v_batch, v_head;  // strides in elements
  float* state;   // (b, hk, decode_rows, decode_columns) contiguous; updated in place
  void* o;        // (b, h, dv)
  int64_t o_batch, o_head;
  float* partial;  // decode_workspace_bytes()
};

size_t decode_workspace_bytes(const DecodeParams& p);

// state += features(k) (v, 1)^T, then o = f-weighted mean read with q: a row of state is read and written once, for all query
// heads of its group.
void launch_decode(const DecodeParams& p, cudaStream_t stream);

}  // namespace fastmax
