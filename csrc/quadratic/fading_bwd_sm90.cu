// Fastmax by the quadratic algorithm on Hopper: the backward, where keys fade.

#include "quadratic/bwd_sm90.h"

namespace fastmax {

void quadratic_fading_bwd_sm90(const BwdParams& p, cudaStream_t stream) {
  using Launch = LaunchQuadraticBwdSm90<PolynomialScore, FadingVisibility>;
  dispatch_head_dim(QuadraticSm90HeadDims(), p.head_dim, [&](auto head_dim) { Launch::run<Bf16, head_dim>(p, stream); });
}

}  // namespace fastmax
