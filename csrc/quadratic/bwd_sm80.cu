// Fastmax by the quadratic algorithm: the backward.

#include "quadratic/bwd.h"

namespace fastmax {

template <>
void quadratic_bwd<FASTMAX_MATH>(const BwdParams& p, cudaStream_t stream) {
  dispatch_head_dim<LaunchQuadraticBwd<PolynomialScore>, FASTMAX_MATH>(p, p, stream);
}

}  // namespace fastmax
