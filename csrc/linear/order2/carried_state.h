// Conversion of a carried state to and from the accumulators of a state kernel, in any format. Both hold the same sums in fp32, so nothing
// is rounded. The gradient of a state also has the coefficients of f as factors.
//
// The state has every product of two columns once. A tile (s, s) and the second moment have both k_a k_b and k_b k_a: both are loaded
// from one element, and one of them is stored. Padded columns are loaded as zeros and not stored.
#pragma once

#include "core/fragments.h"
#include "core/lanes.h"
#include "decode/decode.h"
#include "linear/linear.h"

namespace fastmax {

// The element of a state that an accumulator holds.
struct Place {
  enum class In { kNothing, kValues, kWeights };
  In in = In::kNothing;
  int64_t index = 0;
  float factor = 1.f;
  bool again = false;  // the same element as another accumulator, which is stored

  __device__ __forceinline__ float load(const float* values, const float* weights) const {
    return in == In::kNothing ? 0.f : (in == In::kValues ? values[index] : weights[index]) * factor;
  }
  __device__ __forceinline__ void store(float* values, float* weights, float sum) const {
    if (in == In::kNothing || again) return;
    if (in == In::kValues) values[index] = sum * factor;
    else weights[index] = sum * factor;
  }
};

// Elements of a state by the columns of y and w.
struct StatePlaces {
  int d, dv;
  StateFactors factors;

  explicit __device__ __forceinline__ StatePlaces(const CarriedArgs& a) : d(a.state.d), dv(a.state.dv), factors(a.factors) {}

  // The row of k_a k_b, a <= b.
  __device__ __forceinline__ int pair_row(int a, int b) const { return 1 + d + a * d - a * (a - 1) / 2 + b - a; }

  __device__ __forceinline__ float pair_factor(int a, int b) const { return a == b ? factors.square : factors.product; }

  __device__ __forceinline__ Place value(int row, int column, float factor) const {
    if (column >= dv) return {};
    return {Place::In::kValues, static_cast<int64_t>(row) * dv + column, factor};
  }
  __device__ __forceinline__ Place first_order(int a, int column) const {
    if (a >= d) return {};
    return value(1 + a, column, factors.first);
  }
  __device__ __forceinline__ Place second_order(int a, int b, int column) const {
    if (a >= d || b >= d) return {};
    Place place = value(pair_row(min(a, b), max(a, b)), column, pair_factor(a, b));
    place.again = a / 8 == b / 8 && a > b;  // on the diagonal, where the tile has both
    return place;
  }
  __device__ __forceinline__ Place moment(int a, int b) const {
    if (a >= d || b >= d) return {};
    return {Place::In::kWeights, pair_row(min(a, b), max(a, b)), pair_factor(a, b), a > b};
  }
  __device__ __forceinline__ Place sum_w(int column) const { return value(0, column, factors.one); }
  __device__ __forceinline__ Place sum_y(int a) const {
    if (a >= d) return {};
    return {Place::In::kWeights, 1 + a, factors.first};
  }
};

// Blocks for each block of the state kernel, with as many threads: more of them hide the latency of memory where states are few.
inline constexpr int kCarryShares = 4;

// Loads or stores the accumulators of a block. Places: the elements of a thread's accumulators, kGroups times kTogether of them; the last
// accumulator is the thread's part of the sum of ones.
template <bool kLoads, class Places>
__device__ __forceinline__ void carry_state(const CarriedArgs& a) {
  const int share = static_cast<int>(blockIdx.x) % kCarryShares, block = static_cast<int>(blockIdx.x) / kCarryShares;
  const int state = block / Places::kBlocks;
  const Places places(a, block % Places::kBlocks);
  const int64_t first_row = static_cast<int64_t>(state) * decode_rows(a.state.d, 2), first_value = first_row * a.state.dv;
  constexpr int kSums = Places::kGroups * Places::kTogether;
  float* accumulators = a.accumulators + static_cast<int64_t>(block) * (kSums + 1) * Places::kThreads + threadIdx.x;

#pragma unroll 1
  for (int group = share; group < Places::kGroups; group += kCarryShares) {
#pragma unroll
    for (int i = 0; i < Places::kTogether; ++i) {
      const Place place = places(group, i);
      float& sum = accumulators[(group * Places::kTogether + i) * Places::kThreads];
      if constexpr (kLoads) sum = place.load(a.state.kv_state + first_value, a.state.k_sum + first_row);
      else place.store(a.state.new_kv_state + first_value, a.state.new_k_sum + first_row, sum);
    }
  }

  if (share != 0) return;
  float& count = accumulators[kSums * Places::kThreads];
  const bool is_first = threadIdx.x % 32 == 0;
  if constexpr (kLoads) {
    count = places.has_count() && is_first ? a.state.k_sum[first_row] * a.factors.one : 0.f;
  } else if (places.has_count()) {
    const float total = sum_of_lanes(count) + static_cast<float>(a.uncounted.of(state / a.state_heads));
    if (is_first) a.state.new_k_sum[first_row] = total * a.factors.one;
  }
}

}  // namespace fastmax
