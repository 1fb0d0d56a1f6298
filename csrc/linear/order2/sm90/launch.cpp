// The calls that the Hopper kernels of order 2 cover, and their StatePasses for ../launch.cpp.

#include "core/dispatch.h"
#include "core/sm90/tensor_map.h"
#include "linear/algorithm.h"
#include "linear/order2/linear2.h"
#include "linear/order2/sm90/kernels.h"
#include "linear/order2/sm90/snapshot.h"

namespace fastmax {

// Few keys and large scores are no exception: features that cancel (docs/algorithm.md) are rounded here as by the portable kernels.
bool linear2_sm90_covers(const AttentionParams& p, Direction) {
  const bool has_head_dim = HopperLinear2HeadDims::has(common_head_dim(p));
  if (p.sm_arch != 90 || p.math != MathMode::kBF16 || p.order != 2 || !has_head_dim) return false;
  const auto is_copied = [&](const void* data, const Stride& stride, int heads, int tokens, int columns) {
    return has_tensor_map({data, stride, p.b, heads, tokens, columns, p.math});
  };
  return is_copied(p.q, p.q_stride, p.h, p.n, p.d) && is_copied(p.k, p.k_stride, p.hk, p.m, p.d) &&
         is_copied(p.v, p.v_stride, p.hk, p.m, p.dv) && driver_makes_tensor_maps();
}

// States lag by the window: a wider one than a chunk has more intra-chunk tiles than it saves. Without global keys no state is needed.
bool linear2_window_sm90_covers(const AttentionParams& p, Direction direction) {
  if (!p.causal || p.exact_window < 1 || p.exact_window >= p.m) return false;
  return linear2_sm90_covers(p, direction) && p.exact_window <= kStatePassesSm90.sizes(p).chunk;
}

constexpr StatePasses kStatePassesSm90 = {
    /*takes_zeros=*/true,
    [](const Problem& p) {
      StateSizes sizes;
      dispatch_shares(common_head_dim(p), has_fine_shares(p), [&](auto dim, auto fine) { sizes = hopper_state_sizes<dim, fine>(); });
      return sizes;
    },
    [](const Problem& p, const StateArgs& a, cudaStream_t stream) {
      linear_state_sm90(a, common_head_dim(p), has_fine_shares(p), stream);
    },
    [](const Problem& p, const ReadArgs& a, cudaStream_t stream) { linear_read_sm90(a, common_head_dim(p), p.sm_count, stream); },
    [](const Problem& p, const GradArgs& a, cudaStream_t stream) { linear_grad_sm90(a, common_head_dim(p), p.sm_count, stream); },
    /*writes_over_x2=*/true,
    [](const Problem& p, const ReadArgs& values, const GradArgs& a, cudaStream_t stream) {
      linear_grads_sm90(values, a, common_head_dim(p), p.sm_count, stream);
    },
    [](const Problem& p, const CarriedArgs& a, cudaStream_t stream) {
      linear_load_state_sm90(a, common_head_dim(p), has_fine_shares(p), stream);
    },
    [](const Problem& p, const CarriedArgs& a, cudaStream_t stream) {
      linear_store_state_sm90(a, common_head_dim(p), has_fine_shares(p), stream);
    },
    [](const Problem&, const AddArgs& a, cudaStream_t stream) { linear_add_state<Bf16>(a, stream); },
    // The gradient kernels have no registers and threads left for it.
    /*adds_while_reading=*/
    [](const Problem& p, Time time) { return time == Time::kForward && reads_add_sm90(common_head_dim(p)); },
};

}  // namespace fastmax
