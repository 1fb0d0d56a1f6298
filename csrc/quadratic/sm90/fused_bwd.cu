// The backward of the quadratic algorithm and of softmax attention on Hopper, in one kernel.
//
// shards: FASTMAX_SCORE=PolynomialScore,SoftmaxScore

#include "quadratic/sm90/fused_bwd_launch.h"

namespace fastmax {

template <>
size_t quadratic_fused_bwd_sm90_workspace_bytes<FASTMAX_SCORE>(const BwdParams& p) {
  return fused_bwd_workspace_bytes<FASTMAX_SCORE>(p);
}

template <>
void quadratic_fused_bwd_sm90<FASTMAX_SCORE>(const BwdParams& p, cudaStream_t stream) {
  launch_fused_bwd<FASTMAX_SCORE, Bf16>(p, stream);
}

}  // namespace fastmax
