// In place of csrc/core/sm90/wgmma.h.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "machine.h"

namespace fastmax {

enum class Major : int { kK = 0, kMN = 1 };

inline void wgmma_fence() { emulator::product_fence(); }
inline void wgmma_commit() { emulator::product_commit(); }
template <int kPending>
void wgmma_wait() {
  emulator::product_wait(kPending);
}
template <int kCount>
void keep(float (&)[kCount]) {}
template <int kCount>
void keep(uint32_t (&)[kCount]) {}

template <class Math, int kN>
struct Wgmma {
  static_assert(kN % 8 == 0 && kIs16Bit<Math>);
  static constexpr bool kIsBf16 = Math::kMode == MathMode::kBF16;
  using Accumulator = float[kN / 2];

  template <Major kB>
  static void rs(Accumulator& d, const uint32_t* a, uint64_t b) {
    rs_if<kB>(true, d, a, b);
  }
  template <Major kB>
  static void rs_first(Accumulator& d, const uint32_t* a, uint64_t b) {
    rs_if<kB>(false, d, a, b);
  }
  template <Major kB>
  static void rs_if(bool goes_on, Accumulator& d, const uint32_t* a, uint64_t b) {
    emulator::start_product({kN, kIsBf16, goes_on, true, false, kB == Major::kMN, 0, b}, d, a);
  }
  template <Major kA, Major kB>
  static void ss(Accumulator& d, uint64_t a, uint64_t b) {
    emulator::start_product({kN, kIsBf16, true, false, kA == Major::kMN, kB == Major::kMN, a, b}, d, nullptr);
  }
  template <Major kA, Major kB>
  static void ss_first(Accumulator& d, uint64_t a, uint64_t b) {
    emulator::start_product({kN, kIsBf16, false, false, kA == Major::kMN, kB == Major::kMN, a, b}, d, nullptr);
  }
};

}  // namespace fastmax
