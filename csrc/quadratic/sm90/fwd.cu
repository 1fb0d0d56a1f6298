// The forward of the quadratic algorithm and of softmax attention on Hopper.
//
// shards: FASTMAX_SCORE=PolynomialScore FASTMAX_VISIBILITY=DenseVisibility,TableVisibility,DecayVisibility
// shards: FASTMAX_SCORE=SoftmaxScore FASTMAX_VISIBILITY=DenseVisibility,WindowVisibility,TableVisibility,DecayVisibility
// shards: FASTMAX_SCORE=ExactWindowScore FASTMAX_VISIBILITY=TableVisibility,DecayVisibility

#include "quadratic/sm90/fwd.h"

namespace fastmax {

template <>
size_t quadratic_fwd_sm90_workspace_bytes<FASTMAX_SCORE, FASTMAX_VISIBILITY>(const FwdParams& p) {
  return QuadraticFwdSm90Workspace(p).bytes;
}

template <>
void quadratic_fwd_sm90<FASTMAX_SCORE, FASTMAX_VISIBILITY>(const FwdParams& p, cudaStream_t stream) {
  LaunchQuadraticFwdSm90<FASTMAX_SCORE, FASTMAX_VISIBILITY>::run(p, stream);
}

}  // namespace fastmax
