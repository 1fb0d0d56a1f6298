// Softmax attention with bounds of keys, windows and decays: the backward.

#include "quadratic/bounded.h"
#include "quadratic/bwd.h"

namespace fastmax {

template <>
void flash_bounded_bwd<FASTMAX_MATH>(const BwdParams& call, cudaStream_t stream) {
  using Launch = LaunchQuadraticBwd<SoftmaxScore, TableVisibility>;
  run_bounded_bwd<SoftmaxScore>(call, stream, [&](const BwdParams& p, const PairSums& sums) {
    dispatch_head_dim(QuadraticHeadDims(), p.head_dim, [&](auto head_dim) { Launch::run<FASTMAX_MATH, head_dim>(p, stream, sums); });
  });
}

}  // namespace fastmax
