// Fastmax by the quadratic algorithm on Hopper: the forward.

#include "quadratic/fwd_sm90.h"

namespace fastmax {

size_t quadratic_fwd_sm90_workspace_bytes(const FwdParams& p) { return QuadraticFwdSm90Workspace(p).bytes; }

void quadratic_fwd_sm90(const FwdParams& p, cudaStream_t stream) {
  using Launch = LaunchQuadraticFwdSm90<PolynomialScore, DenseVisibility>;
  dispatch_head_dim(QuadraticSm90HeadDims(), p.head_dim, [&](auto head_dim) { Launch::run<Bf16, head_dim>(p, stream); });
}

}  // namespace fastmax
