// 16 bytes of a row, held in registers.
#pragma once

#include "core/dtype.h"

namespace fastmax {

// Elements keep their type: as fp32, 16-bit elements would take twice the registers.
template <class Element>
struct Word {
  static constexpr int kElements = 16 / sizeof(Element);
  static constexpr int kPairs = kElements / 2;
  static constexpr int kPairRegisters = 2 * sizeof(Element) / 4;
  alignas(16) uint32_t r[4];

  __device__ __forceinline__ float2 pair(int i) const {  // elements 2i and 2i + 1
    return load_pair(reinterpret_cast<const Element*>(r + i * kPairRegisters));
  }
  __device__ __forceinline__ void set_pair(int i, float x, float y) {
    store_pair(reinterpret_cast<Element*>(r + i * kPairRegisters), x, y);
  }
};

}  // namespace fastmax
