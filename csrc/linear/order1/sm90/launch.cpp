// The calls that the Hopper kernels of order 1 cover, and their Linear1Walks for ../launch.cpp.

#include "core/dispatch.h"
#include "core/sm90/tensor_map.h"
#include "linear/algorithm.h"
#include "linear/order1/sm90/kernels.h"

namespace fastmax {

// Not covered: masked keys, queries before the first key.
bool linear1_sm90_covers(const AttentionParams& p, Direction) {
  const bool has_head_dim = HeadDims<64, 128>::has(common_head_dim(p));
  if (p.sm_arch != 90 || p.math != MathMode::kBF16 || p.order != 1 || !has_head_dim || has_decay(p)) return false;
  if (!p.causal || p.causal_offset < 0 || p.attention_mask != nullptr) return false;
  const auto is_copied = [&](const void* data, const Stride& stride, int heads, int tokens, int columns) {
    return has_tensor_map({data, stride, p.b, heads, tokens, columns, p.math});
  };
  return is_copied(p.q, p.q_stride, p.h, p.n, p.d) && is_copied(p.k, p.k_stride, p.hk, p.m, p.d) &&
         is_copied(p.v, p.v_stride, p.hk, p.m, p.dv) && driver_makes_tensor_maps();
}

constexpr Linear1Walks kLinear1WalksSm90 = {
    [](const Problem& p) { return p.sm_count; },
    // Blocks of a group read the rows of y twice, from the L2 cache, and both make the state; segments read half of the rows once more,
    // from memory. At head_dim 128 two blocks took 1.4 times what one takes for the same rows (one H200).
    [](const Problem& p, int64_t walks) { return common_head_dim(p) == 64 && 2 * walks <= p.sm_count ? 2 : 1; },
    [](const Problem& p) { return p.sm_count; },
    [](const Problem& p, const Linear1SumArgs& a, cudaStream_t stream) { linear1_sums_sm90(a, common_head_dim(p), stream); },
    [](const Problem& p, const Linear1WalkArgs& a, cudaStream_t stream) { linear1_walk_sm90(a, common_head_dim(p), stream); },
    [](const Problem& p, const Linear1PairWalkArgs& a, cudaStream_t stream) { linear1_pair_walk_sm90(a, common_head_dim(p), stream); },
    /*divides=*/
    [](const BwdParams& p) {
      const auto is_copied = [&](const void* data, const Stride& stride) {
        return has_tensor_map({data, stride, p.b, p.h, p.n, p.dv, p.math});
      };
      return !p.has_gradients_of_sums() && p.noise == nullptr && is_copied(p.grad_o, p.grad_o_stride) && is_copied(p.o, p.o_stride);
    },
};

}  // namespace fastmax
