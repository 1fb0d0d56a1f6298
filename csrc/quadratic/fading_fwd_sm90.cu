// Fastmax by the quadratic algorithm on Hopper: the forward, where keys fade.

#include "quadratic/fwd_sm90.h"

namespace fastmax {

void quadratic_fading_fwd_sm90(const FwdParams& p, cudaStream_t stream) {
  LaunchQuadraticFwdSm90<PolynomialScore, FadingVisibility>::run(p, stream);
}

}  // namespace fastmax
