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

// Shared memory through which a lane's slices of kTensors rows per token arrive, kStages tokens in turn. A lane reads only what
// it copied itself, so no barrier is needed.
template <class Element, int kElements, int kTensors, int kStages, int kThreads>
struct Ring {
  using Slice = fastmax::Slice<Element, kElements>;
  static_assert((kStages & (kStages - 1)) == 0);
  typename Slice::Unit slots[kStages][kTensors][Slice::kUnits][kThreads];

  // Copies a slice from global memory, or zeros if it does not exist; then `source` is not read. Tokens are counted from the first
  // that the lane copies.
  __device__ __forceinline__ void copy(int token, int tensor, const Element* source, bool exists) {
#pragma unroll
    for (int i = 0; i < Slice::kUnits; ++i) {
      const uint32_t target = ptx::smem_address(&slots[token & (kStages - 1)][tensor][i][threadIdx.x]);
      const char* from = reinterpret_cast<const char*>(source) + i * Slice::kUnit;
      if constexpr (Slice::kUnit == 16) ptx::cp_async_16(target, from, exists ? 16 : 0);
      else ptx::cp_async_small<Slice::kUnit>(target, from, exists ? Slice::kUnit : 0);
    }
  }
  __device__ __forceinline__ void read(int token, int tensor, float (&x)[kElements]) const {
    Slice slice;
#pragma unroll
    for (int i = 0; i < Slice::kUnits; ++i) slice.units[i] = slots[token & (kStages - 1)][tensor][i][threadIdx.x];
    slice.unpack(x);
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
  int64_t strip;  // counted over all sequences
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
  at.unit = static_cast<int>(warp % units);
  at.strip = warp / units;
  while (at.unit >= groups[at.group].units) at.unit -= groups[at.group++].units;
  const HeadGroup& group = groups[at.group];
  const int lane = threadIdx.x % 32;
  at.lanes = 1 << group.lanes_log2;
  at.head = at.unit * (32 >> group.lanes_log2) + (lane >> group.lanes_log2);
  at.column = (lane & (at.lanes - 1)) * kElements;
  at.exists = at.head < group.heads && at.column < group.width;
  at.batch = static_cast<int>(at.strip / strips.per_sequence);
  at.begin = static_cast<int>(at.strip % strips.per_sequence) * strips.tokens;
  at.end = min(at.begin + strips.tokens, n);
  return at;
}

// Means over the columns of a head, without branches: a lane adds its own sum where a warp has more lanes than a head, which
// doubles the sum exactly. All lanes of the head get the same bits.
struct HeadMean {
  int others[5];  // lanes
  float factor;

  __device__ __forceinline__ HeadMean(int lanes, int width) : factor(lanes / (32.f * width)) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 5; ++i) others[i] = 16 >> i < lanes ? lane ^ 16 >> i : lane;
  }

  template <int kSums>
  __device__ __forceinline__ void of(float (&sums)[kSums]) const {
#pragma unroll
    for (int level = 0; level < 5; ++level) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += __shfl_sync(~0u, sums[i], others[level]);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] *= factor;
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

}  // namespace fastmax
