// In place of csrc/core/ptx.h.
#pragma once

#include <cstdint>

#include "machine.h"

namespace fastmax::ptx {

inline uint32_t smem_address(const void* p) { return emulator::shared_address(p); }

inline void load_global_or_zero(uint32_t (&r)[4], const void* address, bool wanted) {
  std::memset(r, 0, sizeof(r));
  if (wanted) std::memcpy(r, address, sizeof(r));
}

inline void cp_async_16(uint32_t dst, const void* src, int src_bytes) { emulator::copy_async(dst, src, 16, src_bytes); }
template <int kBytes>
void cp_async_small(uint32_t dst, const void* src, int src_bytes) {
  emulator::copy_async(dst, src, kBytes, src_bytes);
}
inline void cp_async_commit() { emulator::copy_async_commit(); }
template <int kPending>
void cp_async_wait() {
  emulator::copy_async_wait(kPending);
}

template <int kThreads>
void barrier_wait(int barrier) {
  emulator::barrier_sync(barrier, kThreads);
}

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return std::fabs(y) < 1.17549435e-38f ? 0.f : y;
}

inline float rcp_approx(float x) {
  const float y = 1.f / x;
  return std::fabs(y) < 1.17549435e-38f ? 0.f : y;
}

// Matrix l / 8, row l % 8 is where lane l says.
template <int kMatrices>
void ldmatrix(uint32_t* r, uint32_t address, bool transposed) {
  emulator::touch();
  const int lane = emulator::lane_index();
  if (lane < 8 * kMatrices && address % 16 != 0) emulator::fail("ldmatrix: a row that does not begin at a multiple of 16 bytes");
  const auto rows = emulator::exchange("ldmatrix", address);
  for (int i = 0; i < kMatrices; ++i) {
    if (!transposed) {
      std::memcpy(r + i, emulator::shared_to_read(rows[8 * i + lane / 4] + lane % 4 * 4, 4), 4);
      continue;
    }
    uint16_t halves[2];
    for (int half = 0; half < 2; ++half) {
      std::memcpy(halves + half, emulator::shared_to_read(rows[8 * i + lane % 4 * 2 + half] + lane / 4 * 2, 2), 2);
    }
    std::memcpy(r + i, halves, 4);
  }
  emulator::exchange("ldmatrix", 0);  // nobody writes before all have read
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { ldmatrix<4>(r, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { ldmatrix<4>(r, address, true); }

inline uint32_t load_shared_u32(uint32_t address) { return emulator::load_shared<uint32_t>(address); }
inline float load_shared_f32(uint32_t address) { return emulator::load_shared<float>(address); }
inline float2 load_shared_f32x2(uint32_t address) { return emulator::load_shared<float2>(address); }
inline float4 load_shared_f32x4(uint32_t address) { return emulator::load_shared<float4>(address); }
inline void load_shared_u32x2(uint32_t* r, uint32_t address) {
  const uint2 x = emulator::load_shared<uint2>(address);
  r[0] = x.x, r[1] = x.y;
}
inline void load_shared_u32x4(uint32_t* r, uint32_t address) {
  const uint4 x = emulator::load_shared<uint4>(address);
  r[0] = x.x, r[1] = x.y, r[2] = x.z, r[3] = x.w;
}
inline void store_shared_f32(uint32_t address, float v) { emulator::store_shared(address, v); }
inline void store_shared_u32(uint32_t address, uint32_t v) { emulator::store_shared(address, v); }
inline void store_shared_f32x2(uint32_t address, float2 v) { emulator::store_shared(address, v); }
inline void store_shared_f32x4(uint32_t address, float4 v) { emulator::store_shared(address, v); }
inline void store_shared_u32x4(uint32_t address, const uint32_t* r) { emulator::store_shared(address, uint4{r[0], r[1], r[2], r[3]}); }

// A: rows g and g + 8 of lane 4 g + t; B: column g. Both have kPairs registers of the sum's first half, then as many of the second.
template <class ToFloat>
void mma_16bit(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const ToFloat& to_float) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  emulator::use_in_mma();
  const auto lanes = emulator::exchange("mma", Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int g = emulator::lane_index() / 4, t = emulator::lane_index() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; ++k) {
      const int pair = k % 8 / 2, second = k / 8;
      const uint32_t x = lanes[row % 8 * 4 + pair].a[2 * second + row / 8], y = lanes[column * 4 + pair].b[second];
      sum += to_float(static_cast<uint16_t>(x >> (k % 2 * 16))) * to_float(static_cast<uint16_t>(y >> (k % 2 * 16)));
    }
    acc[i] += sum;
  }
}
inline void mma_bf16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_16bit(acc, a, b0, b1, emulator::bf16_to_float);
}
inline void mma_fp16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_16bit(acc, a, b0, b1, emulator::fp16_to_float);
}
inline void mma_tf32(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  emulator::use_in_mma();
  const auto lanes = emulator::exchange("mma", Operands{{a0, a1, a2, a3}, {b0, b1}});
  const int g = emulator::lane_index() / 4, t = emulator::lane_index() % 4;
  const auto truncated = [](uint32_t x) { return __uint_as_float(x & 0xffffe000u); };
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 8; ++k) {
      sum += truncated(lanes[row % 8 * 4 + k % 4].a[2 * (k / 4) + row / 8]) * truncated(lanes[column * 4 + k % 4].b[k / 4]);
    }
    acc[i] += sum;
  }
}

inline uint32_t pack_bf16x2(float lo, float hi) {
  const __nv_bfloat162 pair(__float2bfloat16_rn(lo), __float2bfloat16_rn(hi));
  return emulator_bits<uint32_t>(pair);
}
inline uint32_t pack_fp16x2(float lo, float hi) {
  const __half2 pair(__float2half_rn(lo), __float2half_rn(hi));
  return emulator_bits<uint32_t>(pair);
}

inline uint32_t to_tf32(float x) { return (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }
inline uint32_t to_tf32_here(float x) { return to_tf32(x); }
inline uint32_t keep_in_register(uint32_t x) { return x; }
inline float compute_first(float x) { return x; }

}  // namespace fastmax::ptx
