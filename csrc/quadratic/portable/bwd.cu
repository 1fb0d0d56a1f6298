// The portable backward of the quadratic algorithm and of softmax attention.
//
// shards: FASTMAX_SCORE=PolynomialScore,SoftmaxScore FASTMAX_VISIBILITY=DenseVisibility,TableVisibility FASTMAX_MATH

#include "quadratic/portable/bounded.h"
#include "quadratic/portable/bwd.h"

namespace fastmax {

template <>
void quadratic_bwd<FASTMAX_SCORE, FASTMAX_VISIBILITY, FASTMAX_MATH>(const BwdParams& call, cudaStream_t stream) {
  using Launch = LaunchQuadraticBwd<FASTMAX_SCORE, FASTMAX_VISIBILITY>;
  with_decay_gradient<FASTMAX_SCORE, FASTMAX_VISIBILITY>(call, stream, [&](const BwdParams& p, const PairSums& sums) {
    dispatch_head_dim(QuadraticHeadDims(), common_head_dim(p), [&](auto dim) { Launch::run<FASTMAX_MATH, dim>(p, stream, sums); });
  });
}

}  // namespace fastmax
