// Shuffles of the linear kernels, one instruction per function.
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

}  // namespace fastmax::ptx
