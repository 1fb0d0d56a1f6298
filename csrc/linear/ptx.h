// More of core/ptx.h, for the linear kernels: one instruction per function.
#pragma once

#include <cstdint>

namespace fastmax::ptx {

// [9.7.9.6] The value of lane 4 octet_lane + lane % 4: segments of lanes that agree in their two low bits.
template <int kOctetLane>
__device__ __forceinline__ uint32_t shuffle_octet(uint32_t value) {
  uint32_t r;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x31f, 0xffffffff;" : "=r"(r) : "r"(value), "n"(4 * kOctetLane));
  return r;
}
__device__ __forceinline__ uint32_t shuffle_octet(uint32_t value, int octet_lane) {
  uint32_t r;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x31f, 0xffffffff;" : "=r"(r) : "r"(value), "r"(4 * octet_lane));
  return r;
}

// [mul] Two bf16 products, made where they stand: behind the wait for the products that still read the registers.
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm volatile("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// [prmt] One half of a register in both halves. Kept in a register, not made again at each use.
template <int kHalf>
__device__ __forceinline__ uint32_t duplicate_half(uint32_t x) {
  uint32_t r;
  asm volatile("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(x), "n"(kHalf == 0 ? 0x1010 : 0x3232));
  return r;
}

// [prmt] The low halves of two registers in one, the first one's as the low half; and the high halves.
__device__ __forceinline__ uint32_t pair_of_low(uint32_t a, uint32_t b) {
  uint32_t r;
  asm volatile("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t pair_of_high(uint32_t a, uint32_t b) {
  uint32_t r;
  asm volatile("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// [prmt] The high half of a register as the low one, and behind it the low half of another.
__device__ __forceinline__ uint32_t pair_of_inner(uint32_t a, uint32_t b) {
  uint32_t r;
  asm volatile("prmt.b32 %0, %1, %2, 0x5432;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// [shl], [and] A bf16 of a pair as fp32, likewise.
__device__ __forceinline__ float low_bf16(uint32_t x) {
  uint32_t r;
  asm volatile("shl.b32 %0, %1, 16;" : "=r"(r) : "r"(x));
  return __uint_as_float(r);
}
__device__ __forceinline__ float high_bf16(uint32_t x) {
  uint32_t r;
  asm volatile("and.b32 %0, %1, 0xffff0000;" : "=r"(r) : "r"(x));
  return __uint_as_float(r);
}

// [ldmatrix] Two matrices: lanes 0 .. 15 give their rows (core/ptx.h).
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}

// [ld] Global memory that an earlier kernel wrote.
__device__ __forceinline__ float2 load_global_f32x2(const float* address) {
  float2 v;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(address) : "memory");
  return v;
}

}  // namespace fastmax::ptx
