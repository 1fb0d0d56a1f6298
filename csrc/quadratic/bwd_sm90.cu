// Fastmax by the quadratic algorithm on Hopper: the backward.

#include "quadratic/bwd_sm90.h"

namespace fastmax {

size_t quadratic_bwd_sm90_workspace_bytes(const BwdParams& p) { return QuadraticBwdSm90Workspace(p).bytes; }

void quadratic_bwd_sm90(const BwdParams& p, cudaStream_t stream) {
  using Launch = LaunchQuadraticBwdSm90<PolynomialScore, DenseVisibility>;
  dispatch_head_dim(QuadraticSm90HeadDims(), p.head_dim, [&](auto head_dim) { Launch::run<Bf16, head_dim>(p, stream); });
}

}  // namespace fastmax
