// Fastmax by the quadratic algorithm on Hopper: the backward in one kernel.

#include "quadratic/fused_bwd_launch.h"

namespace fastmax {

size_t quadratic_fused_bwd_sm90_workspace_bytes(const BwdParams& p) {
  return fused_bwd_workspace_bytes<PolynomialScore>(p);
}

void quadratic_fused_bwd_sm90(const BwdParams& p, cudaStream_t stream) { launch_fused_bwd<PolynomialScore, Bf16>(p, stream); }

}  // namespace fastmax
