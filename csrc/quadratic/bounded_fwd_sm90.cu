// Fastmax by the quadratic algorithm on Hopper: the forward, with bounds of keys and windows.

#include "quadratic/fwd_sm90.h"

namespace fastmax {

void quadratic_bounded_fwd_sm90(const FwdParams& p, cudaStream_t stream) {
  LaunchQuadraticFwdSm90<PolynomialScore, TableVisibility>::run(p, stream);
}

}  // namespace fastmax
