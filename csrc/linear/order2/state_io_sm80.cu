// A carried state to and from the accumulators of the state kernel. Both hold plain sums in fp32, so that nothing is rounded. The
// gradient of a state holds sums of f's coefficients times features of queries: factors lie between it and the accumulators.
//
// The state has every product of two columns once. A diagonal tile and the second moment have k_a k_b and k_b k_a, which are the same
// number: both are loaded from its place, and one is stored. Columns that only the kernels have are loaded as zeros and not stored.

#include "decode/decode.h"
#include "linear/dispatch.h"
#include "linear/order2/state_share.h"

namespace fastmax {
namespace {

// Where an accumulator lies in a state.
struct Place {
  enum class In { kNothing, kValues, kWeights };
  In in = In::kNothing;
  int64_t index = 0;
  float factor = 1.f;
  bool again = false;  // another accumulator is the one that is stored

  __device__ __forceinline__ float load(const float* values, const float* weights) const {
    return in == In::kNothing ? 0.f : (in == In::kValues ? values[index] : weights[index]) * factor;
  }
  __device__ __forceinline__ void store(float* values, float* weights, float sum) const {
    if (in == In::kNothing || again) return;
    if (in == In::kValues) values[index] = sum * factor;
    else weights[index] = sum * factor;
  }
};

// A thread's accumulators.
template <class Math, int kHeadDim>
struct Places : WarpShare<Math, kHeadDim> {
  int d, dv;
  StateFactors factors;
  int g = lane_index() / 4, t = lane_index() % 4;

  __device__ __forceinline__ Places(const CarriedArgs& a, int block)
      : WarpShare<Math, kHeadDim>(StateWeights{}, block), d(a.state.d), dv(a.state.dv), factors(a.factors) {}

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
  __device__ __forceinline__ Place sum_y(int a) const {
    if (a >= d) return {};
    return {Place::In::kWeights, 1 + a, factors.first};
  }

  // As of accumulator_index.
  __device__ __forceinline__ Place operator()(int octet, int block, int e) const {
    const int row = this->first_value + 16 * block + weights_a_km_row<Math>(g, e / 2);  // column of w, or of y
    const int feature = 2 * t + e % 2;                                                   // of its octet
    if (octet < 8) {
      if (!this->has_main) return {};
      return second_order(8 * this->star + octet, 8 * this->base_block + feature, row);
    }
    const int column = (octet == 8 ? this->extra_column0 : this->extra_column1) + feature;
    const bool is_one = octet == 8 && feature == 0;
    switch (this->extra) {
      case Extra::kNone: return {};
      case Extra::kTile: return second_order(this->extra_column1 + this->extra_octet + octet - 8, this->extra_column0 + feature, row);
      case Extra::kLinear: return first_order(column, row);
      case Extra::kMoment: return moment(row, column);
      case Extra::kSumW: return is_one ? value(0, row, factors.one) : Place{};
      case Extra::kSumY: return is_one ? sum_y(row) : Place{};
    }
    return {};
  }
  // Whether the warp has the sum of ones, in parts of its lanes.
  __device__ __forceinline__ bool has_count() const { return this->extra == Extra::kSumY && this->first_value == 0; }
};

// A block of the grid is one of the state kernel.
template <class Math, int kHeadDim, bool kLoads>
__global__ void __launch_bounds__(kStateThreads) linear_carried_state_kernel(const CarriedArgs a) {
  using Tile = StateTile<Math, kHeadDim>;
  const Places<Math, kHeadDim> places(a, static_cast<int>(blockIdx.x) % Tile::kBlocks);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) / Tile::kBlocks * decode_rows(a.state.d, 2);
  const int64_t first_value = first_row * a.state.dv;
  float* accumulators = a.accumulators + static_cast<int64_t>(blockIdx.x) * Tile::kAccumulators * Tile::kThreads + threadIdx.x;

#pragma unroll 1
  for (int block = 0; block < Tile::kValues / 16; ++block) {
#pragma unroll 1
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int octet = 0; octet < 10; ++octet) {
        const Place place = places(octet, block, e);
        float& sum = accumulators[accumulator_index(octet, block, e) * Tile::kThreads];
        if constexpr (kLoads) sum = place.load(a.state.values + first_value, a.state.weights + first_row);
        else place.store(a.state.new_values + first_value, a.state.new_weights + first_row, sum);
      }
    }
  }

  float& count = accumulators[(Tile::kAccumulators - 1) * Tile::kThreads];
  if constexpr (kLoads) {
    count = places.has_count() && lane_index() == 0 ? a.state.weights[first_row] * a.factors.one : 0.f;
  } else if (places.has_count()) {
    const float total = warp_sum(count);
    if (lane_index() == 0) a.state.new_weights[first_row] = total * a.factors.one;
  }
}

template <bool kLoads>
struct LaunchCarriedState {
  template <class Math, int kHeadDim>
  static void run(const CarriedArgs& a, cudaStream_t stream) {
    using Tile = StateTile<Math, kHeadDim>;
    launch_kernel(kLoads ? "linear_load_state" : "linear_store_state", linear_carried_state_kernel<Math, kHeadDim, kLoads>,
                  grid_1d(int64_t{a.states} * Tile::kBlocks), Tile::kThreads, 0, stream, a);
  }
};

}  // namespace

template <>
void linear_load_state<FASTMAX_MATH>(const CarriedArgs& a, int head_dim, cudaStream_t stream) {
  dispatch_linear<LaunchCarriedState<true>, FASTMAX_MATH>(head_dim, a, stream);
}
template <>
void linear_store_state<FASTMAX_MATH>(const CarriedArgs& a, int head_dim, cudaStream_t stream) {
  dispatch_linear<LaunchCarriedState<false>, FASTMAX_MATH>(head_dim, a, stream);
}

}  // namespace fastmax
