// The arithmetic modes as types: storage element and conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/params.h"
#include "core/ptx.h"

namespace fastmax {

struct Bf16 {
  using Element = __nv_bfloat16;
  static constexpr MathMode kMode = MathMode::kBF16;
};
struct Fp16 {
  using Element = __half;
  static constexpr MathMode kMode = MathMode::kFP16;
};
struct Tf32 {
  using Element = float;
  static constexpr MathMode kMode = MathMode::kTF32;
};
// fp32 precision on the tensor cores: x = hi + lo in tf32, x y ~ hi hi + hi lo + lo hi.
struct Fp32 {
  using Element = float;
  static constexpr MathMode kMode = MathMode::kFP32;
};

template <class Math>
inline constexpr bool kIs16Bit = sizeof(typename Math::Element) == 2;

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

template <class Element>
__device__ __forceinline__ Element from_float(float x);
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ float from_float(float x) {
  return x;
}

// Two neighbouring elements as one store or load.
__device__ __forceinline__ void store_pair(__nv_bfloat16* p, float x, float y) {
  *reinterpret_cast<uint32_t*>(p) = ptx::pack_bf16x2(x, y);
}
__device__ __forceinline__ void store_pair(__half* p, float x, float y) {
  *reinterpret_cast<uint32_t*>(p) = ptx::pack_fp16x2(x, y);
}
__device__ __forceinline__ void store_pair(float* p, float x, float y) { *reinterpret_cast<float2*>(p) = make_float2(x, y); }

__device__ __forceinline__ float2 load_pair(const __nv_bfloat16* p) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p));
}
__device__ __forceinline__ float2 load_pair(const __half* p) { return __half22float2(*reinterpret_cast<const __half2*>(p)); }
__device__ __forceinline__ float2 load_pair(const float* p) { return *reinterpret_cast<const float2*>(p); }

}  // namespace fastmax
