// Fastmax by the quadratic algorithm on Hopper: the forward, with bounds of keys and windows.

#include "quadratic/fwd_sm90.h"

namespace fastmax {

void quadratic_bounded_fwd_sm90(const FwdParams& p, cudaStream_t stream) {
  using Launch = LaunchQuadraticFwdSm90<PolynomialScore, TableVisibility>;
  dispatch_head_dim(QuadraticSm90HeadDims(), p.head_dim, [&](auto head_dim) { Launch::run<Bf16, head_dim>(p, stream); });
}

}  // namespace fastmax
