// In place of csrc/linear/ptx.h.
#pragma once

#include <cstdint>

#include "core/ptx.h"

namespace fastmax::ptx {

template <int kOctetLane>
uint32_t shuffle_octet(uint32_t value) {
  return emulator::exchange("shfl", value)[4 * kOctetLane + emulator::lane_index() % 4];
}
inline uint32_t shuffle_octet(uint32_t value, int octet_lane) {
  return emulator::exchange("shfl", value)[4 * (octet_lane % 8) + emulator::lane_index() % 4];
}

inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  const auto product = [](uint32_t x, uint32_t y) {
    return emulator::bf16_to_float(static_cast<uint16_t>(x)) * emulator::bf16_to_float(static_cast<uint16_t>(y));
  };
  return pack_bf16x2(product(a, b), product(a >> 16, b >> 16));
}
template <int kHalf>
uint32_t duplicate_half(uint32_t x) {
  return kHalf == 0 ? (x & 0xffffu) * 0x10001u : (x >> 16) * 0x10001u;
}
inline uint32_t pair_of_low(uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; }
inline uint32_t pair_of_high(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); }
inline uint32_t pair_of_inner(uint32_t a, uint32_t b) { return a >> 16 | b << 16; }
inline float low_bf16(uint32_t x) { return __uint_as_float(x << 16); }
inline float high_bf16(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

inline void ldmatrix_x2(uint32_t (&r)[2], uint32_t address) { ldmatrix<2>(r, address, false); }

inline float2 load_global_f32x2(const float* address) { return *reinterpret_cast<const float2*>(address); }

}  // namespace fastmax::ptx
