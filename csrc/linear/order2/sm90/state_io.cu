// Conversion of a carried state to and from the accumulators of the Hopper state kernel.

#include "core/launch.h"
#include "linear/order2/carried_state.h"
#include "linear/order2/features.h"
#include "linear/order2/sm90/kernels.h"
#include "linear/order2/sm90/snapshot.h"

namespace fastmax {
namespace {

// A thread's accumulators: those of wgmma, tile after tile.
template <int kHeadDim, bool kFine>
struct PlacesSm90 : StateShare<kHeadDim, kFine>, StatePlaces {
  using State = HopperShares<kHeadDim, kFine>;
  static constexpr int kBlocks = State::kStateBlocks, kThreads = kStateThreads;
  static constexpr int kTogether = 8, kTileGroups = kHeadDim / 2 / kTogether, kGroups = State::kOwnTiles * kTileGroups;
  static_assert(kGroups * kTogether + 1 == State::kAccumulators, "a tile has whole groups");

  int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

  __device__ __forceinline__ PlacesSm90(const CarriedArgs& a, int block)
      : StateShare<kHeadDim, kFine>(2 * block + static_cast<int>(threadIdx.x) / 128), StatePlaces(a) {}

  __device__ __forceinline__ Place operator()(int group, int i) const {
    const int tile = group / kTileGroups;
    const int feature = 16 * warp + g + 8 * (i / 2 % 2);                               // row of the tile
    const int column = 16 * (group % kTileGroups) + 8 * (i / 4) + 2 * t + i % 2;       // of w, or of y
    if (tile < this->pairs) return pair(pair_columns(this->star, this->block(tile), feature), column);
    if (tile != this->tiles - 1) return {};
    if (this->last == LastTile::kDiagonal) return pair(diagonal_columns(this->star, feature), column);
    if (this->has_opposite() && feature / 8 % 2 == 0) return pair(opposite_columns(feature / 16 * 8 + feature % 8), column);
    if (this->last == LastTile::kColumns && feature < State::kPanelCols) {
      const int a = 64 * this->half + feature;
      return this->of_y ? moment(a, column) : first_order(a, column);
    }
    if (!this->is_there || feature != State::kOnesRow) return {};
    return this->of_y ? sum_y(column) : sum_w(column);
  }
  __device__ __forceinline__ Place pair(const ColumnPair& y, int column) const {
    if (State::kPacksDiagonal) return second_order(min(y.a, y.b), max(y.a, y.b), column);  // no other accumulator has it
    return second_order(y.a, y.b, column);
  }
  // Whether the warp has the sum of ones, in parts of its lanes.
  __device__ __forceinline__ bool has_count() const {
    return this->has_ones() && this->is_there && this->of_y && warp == State::kOnesRow / 16;
  }
};

template <int kHeadDim, bool kFine, bool kLoads>
__global__ void __launch_bounds__(kStateThreads) linear_carried_state_sm90_kernel(const CarriedArgs a) {
  carry_state<kLoads, PlacesSm90<kHeadDim, kFine>>(a);
}

template <int kHeadDim, bool kFine, bool kLoads>
void launch(const CarriedArgs& a, cudaStream_t stream) {
  launch_kernel(kLoads ? "linear_load_state_sm90" : "linear_store_state_sm90", linear_carried_state_sm90_kernel<kHeadDim, kFine, kLoads>,
                grid_1d(int64_t{a.states} * HopperShares<kHeadDim, kFine>::kStateBlocks * kCarryShares), kStateThreads, 0, stream, a);
}

template <bool kLoads>
void launch(const CarriedArgs& a, int head_dim, bool is_fine, cudaStream_t stream) {
  dispatch_shares(head_dim, is_fine, [&](auto dim, auto fine) { launch<dim, fine, kLoads>(a, stream); });
}

}  // namespace

void linear_load_state_sm90(const CarriedArgs& a, int head_dim, bool is_fine, cudaStream_t stream) {
  launch<true>(a, head_dim, is_fine, stream);
}
void linear_store_state_sm90(const CarriedArgs& a, int head_dim, bool is_fine, cudaStream_t stream) {
  launch<false>(a, head_dim, is_fine, stream);
}

}  // namespace fastmax
