// Fastmax by the quadratic algorithm on Hopper: the forward, where keys fade.

#include "quadratic/fwd_sm90.h"

namespace fastmax {

void quadratic_fading_fwd_sm90(const FwdParams& p, cudaStream_t stream) {
  using Launch = LaunchQuadraticFwdSm90<PolynomialScore, FadingVisibility>;
  dispatch_head_dim(QuadraticSm90HeadDims(), p.head_dim, [&](auto head_dim) { Launch::run<Bf16, head_dim>(p, stream); });
}

}  // namespace fastmax
