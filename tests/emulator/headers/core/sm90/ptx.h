// In place of csrc/core/sm90/ptx.h.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "machine.h"

namespace fastmax::ptx {

inline void mbarrier_init(uint32_t barrier, int arrivals) { emulator::mbarrier_init(barrier, arrivals); }
inline void fence_mbarrier_init() {}
inline void wait_for_earlier_kernels() {}
inline void mbarrier_arrive_if(uint32_t barrier, bool condition) {
  if (condition) emulator::mbarrier_arrive(barrier, 1);
}
inline void mbarrier_arrive_many(uint32_t barrier, int arrivals) { emulator::mbarrier_arrive(barrier, arrivals); }
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  emulator::mbarrier_expect(barrier, bytes);
  emulator::mbarrier_arrive(barrier, 1);
}
inline bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) { return emulator::mbarrier_test(barrier, parity); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) { emulator::mbarrier_wait(barrier, parity); }

inline void tma_load(uint32_t dst, const CUtensorMap& map, uint32_t barrier, int column, int token, int head, int batch) {
  emulator::load_box(dst, map, barrier, {{column, token, head, batch}});
}
inline void tma_store(const CUtensorMap& map, uint32_t src, int column, int token, int head, int batch) {
  emulator::store_box(map, src, {{column, token, head, batch}}, emulator::Combine::kReplace);
}
inline void tma_add(const CUtensorMap& map, uint32_t src, int column, int token, int head, int batch) {
  emulator::store_box(map, src, {{column, token, head, batch}}, emulator::Combine::kAdd16);
}
inline void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier) { emulator::load_bulk(dst, src, bytes, barrier); }
inline void bulk_prefetch(const void* src, uint32_t bytes) { emulator::prefetch_bulk(src, bytes); }
inline void bulk_store(void* dst, uint32_t src, uint32_t bytes) { emulator::store_bulk(dst, src, bytes, emulator::Combine::kReplace); }
inline void bulk_add_f32(float* dst, uint32_t src, uint32_t bytes) {
  emulator::store_bulk(dst, src, bytes, emulator::Combine::kAddFloat);
}
inline void bulk_commit() { emulator::bulk_commit(); }
template <int kPending>
void bulk_wait() {
  emulator::bulk_wait(kPending, false);
}
template <int kPending>
void bulk_wait_read() {
  emulator::bulk_wait(kPending, true);
}

inline void fence_proxy_async() { emulator::fence_proxy_async(); }
inline void fence_proxy_async_global() {}

inline uint32_t load_acquire(const uint32_t* p) {
  emulator::spin();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline void wait_acquire(const uint32_t* p, uint32_t value) {
  while (load_acquire(p) != value) {
  }
}
inline void store_release(uint32_t* p, uint32_t value) {
  emulator::touch();
  __atomic_store_n(p, value, __ATOMIC_RELEASE);
}

template <int kThreads>
void barrier_arrive(int barrier) {
  emulator::barrier_arrive(barrier, kThreads);
}

constexpr int registers_at_launch(int threads) { return 65536 / threads / 8 * 8; }
template <int kRegisters>
void more_registers() {
  emulator::set_registers(kRegisters, true);
}
template <int kRegisters>
void fewer_registers() {
  emulator::set_registers(kRegisters, false);
}

inline float2 load_global_here(const float2* p) { return *p; }

inline void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  emulator::touch();
  if (address % 16 != 0) emulator::fail("stmatrix: a row that does not begin at a multiple of 16 bytes");
  struct Row {
    uint32_t address, r[4];
  };
  const auto lanes = emulator::exchange("stmatrix", Row{address, {r0, r1, r2, r3}});
  const int lane = emulator::lane_index(), matrix = lane / 8, row = lane % 8;  // this lane writes its own row
  uint32_t words[4];
  for (int i = 0; i < 4; ++i) words[i] = lanes[4 * row + i].r[matrix];
  std::memcpy(emulator::shared_to_write(address, 16), words, 16);
}

}  // namespace fastmax::ptx
