// The portable forward of the quadratic algorithm and of softmax attention.
//
// shards: FASTMAX_SCORE=PolynomialScore,SoftmaxScore FASTMAX_VISIBILITY=DenseVisibility,TableVisibility FASTMAX_MATH

#include "quadratic/portable/bounded.h"
#include "quadratic/portable/fwd.h"

namespace fastmax {

template <>
void quadratic_fwd<FASTMAX_SCORE, FASTMAX_VISIBILITY, FASTMAX_MATH>(const FwdParams& call, cudaStream_t stream) {
  const FwdParams p = with_sums_and_tables<FASTMAX_SCORE, FASTMAX_VISIBILITY>(call, stream);
  using Launch = LaunchQuadraticFwd<FASTMAX_SCORE, FASTMAX_VISIBILITY>;
  dispatch_head_dim(QuadraticHeadDims(), common_head_dim(p), [&](auto head_dim) { Launch::run<FASTMAX_MATH, head_dim>(p, stream); });
}

}  // namespace fastmax
