// Conversion of a carried state to and from the accumulators of the state kernel.
//
// shards: FASTMAX_MATH

#include "linear/dispatch.h"
#include "linear/order2/carried_state.h"
#include "linear/order2/portable/state_share.h"

namespace fastmax {
namespace {

// A thread's accumulators.
template <class Math, int kHeadDim>
struct Places : WarpShare<Math, kHeadDim>, StatePlaces {
  using Tile = StateTile<Math, kHeadDim>;
  static constexpr int kBlocks = Tile::kBlocks, kThreads = Tile::kThreads;
  static constexpr int kTogether = 10, kGroups = 4 * Tile::kValues / 16;
  static_assert(kGroups * kTogether + 1 == Tile::kAccumulators && accumulator_index(9, 1, 3) == 7 * kTogether + 9, "as of accumulator_index");

  int g = lane_index() / 4, t = lane_index() % 4;

  __device__ __forceinline__ Places(const CarriedArgs& a, int block) : WarpShare<Math, kHeadDim>(StateWeights{}, block), StatePlaces(a) {}

  __device__ __forceinline__ Place operator()(int group, int octet) const {
    const int block = group / 4, e = group % 4;
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
      case Extra::kSumW: return is_one ? sum_w(row) : Place{};
      case Extra::kSumY: return is_one ? sum_y(row) : Place{};
    }
    return {};
  }
  // Whether the warp has the sum of ones, in parts of its lanes.
  __device__ __forceinline__ bool has_count() const { return this->extra == Extra::kSumY && this->first_value == 0; }
};

template <class Math, int kHeadDim, bool kLoads>
__global__ void __launch_bounds__(kStateThreads) linear_carried_state_kernel(const CarriedArgs a) {
  carry_state<kLoads, Places<Math, kHeadDim>>(a);
}

template <bool kLoads>
struct LaunchCarriedState {
  template <class Math, int kHeadDim>
  static void run(const CarriedArgs& a, cudaStream_t stream) {
    using Tile = StateTile<Math, kHeadDim>;
    launch_kernel(kLoads ? "linear_load_state" : "linear_store_state", linear_carried_state_kernel<Math, kHeadDim, kLoads>,
                  grid_1d(int64_t{a.states} * Tile::kBlocks * kCarryShares), Tile::kThreads, 0, stream, a);
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
