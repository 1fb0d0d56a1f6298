// The backward of the quadratic algorithm and of softmax attention on Hopper, in two kernels.
//
// shards: FASTMAX_SCORE=PolynomialScore FASTMAX_VISIBILITY=DenseVisibility,TableVisibility,DecayVisibility
// shards: FASTMAX_SCORE=SoftmaxScore FASTMAX_VISIBILITY=DenseVisibility,WindowVisibility,TableVisibility,DecayVisibility
// shards: FASTMAX_SCORE=ExactWindowScore FASTMAX_VISIBILITY=TableVisibility,DecayVisibility

#include "quadratic/sm90/bwd.h"

namespace fastmax {

template <>
size_t quadratic_bwd_sm90_workspace_bytes<FASTMAX_SCORE, FASTMAX_VISIBILITY>(const BwdParams& p) {
  return QuadraticBwdSm90Workspace(p).bytes;
}

template <>
void quadratic_bwd_sm90<FASTMAX_SCORE, FASTMAX_VISIBILITY>(const BwdParams& p, cudaStream_t stream) {
  using Launch = LaunchQuadraticBwdSm90<FASTMAX_SCORE, FASTMAX_VISIBILITY>;
  dispatch_head_dim(QuadraticSm90HeadDims(), common_head_dim(p), [&](auto head_dim) { Launch::run<Bf16, head_dim>(p, stream); });
}

}  // namespace fastmax
