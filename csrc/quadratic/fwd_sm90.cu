// Fastmax by the quadratic algorithm on Hopper: the forward.

#include "quadratic/fwd_sm90.h"

namespace fastmax {

size_t quadratic_fwd_sm90_workspace_bytes(const FwdParams& p) { return QuadraticFwdSm90Workspace(p).bytes; }

void quadratic_fwd_sm90(const FwdParams& p, cudaStream_t stream) {
  LaunchQuadraticFwdSm90<PolynomialScore, DenseVisibility>::run(p, stream);
}

}  // namespace fastmax
