// Shared by the decoding kernels: features of the rows of a state, sums over lanes, decay, and stores of the output.
#pragma once

#include "core/dtype.h"
#include "decay/decay.h"
#include "decode/decode.h"

namespace fastmax {

__device__ __forceinline__ float multiply_add(float a, float x, float y) { return fmaf(a, x, y); }
__device__ __forceinline__ float4 multiply_add(float a, float4 x, float4 y) {
  return make_float4(fmaf(a, x.x, y.x), fmaf(a, x.y, y.y), fmaf(a, x.z, y.z), fmaf(a, x.w, y.w));
}

// x times the factor; 0 if the factor is 0, even if x is not finite.
__device__ __forceinline__ float decayed(float x, float factor) { return factor == 0.f ? 0.f : __fmul_rn(x, factor); }
__device__ __forceinline__ float4 decayed(float4 x, float factor) {
  return make_float4(decayed(x.x, factor), decayed(x.y, factor), decayed(x.z, factor), decayed(x.w, factor));
}

// Sums over the lanes whose indices differ only in the bits from first_bit up.
__device__ __forceinline__ float sum_lanes(float x, int first_bit) {
  for (int bit = first_bit; bit < 32; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
  return x;
}
__device__ __forceinline__ float4 sum_lanes(float4 x, int first_bit) {
  return make_float4(sum_lanes(x.x, first_bit), sum_lanes(x.y, first_bit), sum_lanes(x.z, first_bit), sum_lanes(x.w, first_bit));
}

// Columns a, b of the second-order row r, counted from the first second-order row: a is the largest with first(a) <= r.
__device__ __forceinline__ void pair_of_row(int r, int d, int& a, int& b) {
  const auto first = [d](int i) { return i * d - i * (i - 1) / 2; };
  const float n = 2.f * d + 1.f;
  a = static_cast<int>((n - sqrtf(n * n - 8.f * r)) * 0.5f);
  a = max(0, min(a, d - 1));
  while (a > 0 && first(a) > r) --a;
  while (a + 1 < d && first(a + 1) <= r) ++a;
  b = a + r - first(a);
}

// The two columns whose product is the feature of a row of the state; -1 stands for a factor 1.
struct Feature {
  int a, b;

  __device__ __forceinline__ Feature(int row, int d) : a(-1), b(row - 1) {
    if (row > d) pair_of_row(row - 1 - d, d, a, b);
  }
  __device__ __forceinline__ float of(const float* x) const { return (a < 0 ? 1.f : x[a]) * (b < 0 ? 1.f : x[b]); }
};

// Whether the token is added to the state.
__device__ __forceinline__ bool joins_state(const DecodeParams& p, int batch) {
  return p.attention_mask == nullptr || p.attention_mask[batch * p.mask_stride] != 0;
}

// log_decay of the token, at most 0; NaN stays NaN.
__device__ __forceinline__ float decay_of_token(const DecodeParams& p, int batch, int kv_head) {
  if (p.log_decay == nullptr) return 0.f;
  const float decay = p.log_decay[batch * p.decay_batch_stride + kv_head * p.decay_head_stride];
  return decay > 0.f ? 0.f : decay;
}

// log_input_gate of the token, in its range; NaN stays NaN. Its exp is the factor of the token's features in the state.
__device__ __forceinline__ float gate_of_token(const DecodeParams& p, int batch, int kv_head) {
  if (p.log_input_gate == nullptr) return 0.f;
  const float gate = p.log_input_gate[batch * p.gate_batch_stride + kv_head * p.gate_head_stride];
  return isnan(gate) ? gate : fminf(fmaxf(gate, kLeastGate), kMostGate);
}

__device__ __forceinline__ void store(void* x, MathMode dtype, int64_t i, float value) {
  switch (dtype) {
    case MathMode::kBF16: static_cast<__nv_bfloat16*>(x)[i] = from_float<__nv_bfloat16>(value); break;
    case MathMode::kFP16: static_cast<__half*>(x)[i] = from_float<__half>(value); break;
    default: static_cast<float*>(x)[i] = value;
  }
}

}  // namespace fastmax
