// Warps that walk along tokens: which heads and tokens a warp owns, rows that arrive through shared memory, sums over a head.
#pragma once

#include "core/dtype.h"
#include "core/ptx.h"
#include "layer/divide.h"
#include "layer/layer.h"

namespace fastmax {

// Neighbouring elements of a row, in registers.
template <class Element, int kElements>
struct Slice {
  static constexpr int kBytes = kElements * sizeof(Element);
  static constexpr int kUnit = kBytes < 16 ? kBytes : 16;  // bytes of a load or store
  static constexpr int kUnits = kBytes / kUnit;
  static_assert(kUnit == 8 || kUnit == 16);
  struct alignas(kUnit) Unit {
    uint32_t r[kUnit / 4];
  };
  Unit units[kUnits];

  __device__ __forceinline__ void load(const Element* source) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) units[i] = reinterpret_cast<const Unit*>(source)[i];
  }
  __device__ __forceinline__ void unpack(float (&x)[kElements]) const {
    constexpr int kOfUnit = kElements / kUnits;
#pragma unroll
    for (int i = 0; i < kElements; i += 2) {
      const float2 pair = load_pair(reinterpret_cast<const Element*>(units[i / kOfUnit].r) + i % kOfUnit);
      x[i] = pair.x, x[i + 1] = pair.y;
    }
  }
  static __device__ __forceinline__ void store(Element* target, const float (&x)[kElements]) {
    constexpr int kOfUnit = kElements / kUnits;
    Slice packed;
#pragma unroll
    for (int i = 0; i < kElements; i += 2) {
      store_pair(reinterpret_cast<Element*>(packed.units[i / kOfUnit].r) + i % kOfUnit, x[i], x[i + 1]);
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) reinterpret_cast<Unit*>(target)[i] = packed.units[i];
  }
};

// Shared memory through which a lane's slices of kTensors rows per token arrive, with slots for kStages tokens. A lane reads
// only what it copied itself, so no barrier is needed.
template <class Element, int kElements, int kTensors, int kStages, int kThreads>
struct Ring {
  using Slice = fastmax::Slice<Element, kElements>;
  typename Slice::Unit slots[kStages][kTensors][Slice::kUnits][kThreads];

  // Where the slices of the thread lie, which it holds in a register.
  __device__ __forceinline__ uint32_t address() const {
    return ptx::keep_in_register(ptx::smem_address(&slots[0][0][0][threadIdx.x]));
  }
  // Copies a slice from global memory, or zeros if it does not exist; then `source` is not read.
  static __device__ __forceinline__ void copy(uint32_t address, int slot, int tensor, const Element* source, bool exists) {
#pragma unroll
    for (int i = 0; i < Slice::kUnits; ++i) {
      const uint32_t target = unit(address, slot, tensor, i);
      const char* from = reinterpret_cast<const char*>(source) + i * Slice::kUnit;
      if constexpr (Slice::kUnit == 16) ptx::cp_async_16(target, from, exists ? 16 : 0);
      else ptx::cp_async_small<Slice::kUnit>(target, from, exists ? Slice::kUnit : 0);
    }
  }
  static __device__ __forceinline__ void read(uint32_t address, int slot, int tensor, float (&x)[kElements]) {
    Slice slice;
#pragma unroll
    for (int i = 0; i < Slice::kUnits; ++i) {
      const uint32_t source = unit(address, slot, tensor, i);
      if constexpr (Slice::kUnit == 16) ptx::load_shared_u32x4(slice.units[i].r, source);
      else ptx::load_shared_u32x2(slice.units[i].r, source);
    }
    slice.unpack(x);
  }

 private:
  static __device__ __forceinline__ uint32_t unit(uint32_t address, int slot, int tensor, int i) {
    return address + ((slot * kTensors + tensor) * Slice::kUnits + i) * kThreads * Slice::kUnit;
  }
};

// What a lane owns: columns of a head, and a strip of tokens of one sequence.
struct Place {
  bool is_idle;  // the whole warp has nothing to do
  int group;     // index of the group of heads
  int unit;      // of the group
  int head, column;
  bool exists;  // the head and the columns do
  int lanes;    // per head
  int batch, begin, end;

  // Index of the strip, counted over all sequences. It is not held in a register meanwhile.
  __device__ __forceinline__ int64_t strip(const Strips& strips) const {
    return int64_t{batch} * strips.per_sequence + begin / strips.tokens;
  }
};

// kElements: columns of a lane.
template <int kElements, int kThreads>
__device__ __forceinline__ Place place_of_lane(const HeadGroup* groups, int count, const Strips& strips, int n) {
  Place at{};
  const int64_t warp = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  at.is_idle = warp >= strips.warps;
  if (at.is_idle) return at;
  int units = 0;
  for (int i = 0; i < count; ++i) units += groups[i].units;
  const int64_t strip = warp / units;
  // Each strip begins with other units, as costs differ among groups: the blocks that a multiprocessor gets are of all groups.
  at.unit = static_cast<int>((warp + strip * (kThreads / 32)) % units);
  while (at.unit >= groups[at.group].units) at.unit -= groups[at.group++].units;
  const HeadGroup& group = groups[at.group];
  const int lane = threadIdx.x % 32;
  at.lanes = 1 << group.lanes_log2;
  at.head = at.unit * (32 >> group.lanes_log2) + (lane >> group.lanes_log2);
  at.column = (lane & (at.lanes - 1)) * kElements;
  at.exists = at.head < group.heads && at.column < group.width;
  at.batch = static_cast<int>(strip / strips.per_sequence);
  at.begin = static_cast<int>(strip % strips.per_sequence) * strips.tokens;
  at.end = min(at.begin + strips.tokens, n);
  return at;
}

// Means over the columns of a head. All lanes of the head get the same bits.
struct HeadMean {
  int lanes;  // of the head
  float factor;

  __device__ __forceinline__ HeadMean(int lanes, int width) : lanes(lanes), factor(1.f / width) {}

  template <int kSums>
  __device__ __forceinline__ void of(float (&sums)[kSums]) const {
    if (lanes > 16) add<16>(sums);
    if (lanes > 8) add<8>(sums);
    if (lanes > 4) {  // one branch for all heads but narrow ones
      add<4>(sums), add<2>(sums), add<1>(sums);
    } else {
      if (lanes > 2) add<2>(sums);
      if (lanes > 1) add<1>(sums);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] *= factor;
  }

 private:
  template <int kBit, int kSums>
  static __device__ __forceinline__ void add(float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] += __shfl_xor_sync(~0u, sums[i], kBit);
  }
};

// Sums over the heads of a warp. All lanes take part.
template <int kElements>
__device__ __forceinline__ void sum_over_heads(float (&sums)[kElements], int lanes) {
  for (int bit = 16; bit >= lanes; bit /= 2) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) sums[i] += __shfl_xor_sync(~0u, sums[i], bit);
  }
}

// Stores sums in the workspace.
template <int kElements>
__device__ __forceinline__ void store_sums(float* target, const float (&sums)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; i += 4) {
    *reinterpret_cast<float4*>(target + i) = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
  }
}

template <class Element>
__device__ __forceinline__ float load_weight(const Weight& weight, int64_t i) {
  const float x = weight.is_float ? static_cast<const float*>(weight.data)[i] : to_float(static_cast<const Element*>(weight.data)[i]);
  return to_float(from_float<Element>(x));
}

// The weights of a group's norm for a lane's columns; ones without a norm.
template <class Element, int kElements>
__device__ __forceinline__ void load_gain(const HeadGroup& group, const Place& at, float (&gain)[kElements]) {
  const bool is_normalized = group.norm.data != nullptr && at.exists;
#pragma unroll
  for (int i = 0; i < kElements; ++i) gain[i] = is_normalized ? load_weight<Element>(group.norm, at.column + i) : 1.f;
}

}  // namespace fastmax
