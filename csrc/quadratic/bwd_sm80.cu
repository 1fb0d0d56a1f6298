// Fastmax by the quadratic algorithm: the backward.

#include "quadratic/bwd.h"

namespace fastmax {

template <>
void quadratic_bwd<FASTMAX_MATH>(const BwdParams& p, cudaStream_t stream) {
  dispatch_head_dim(QuadraticHeadDims(), p.head_dim,
                    [&](auto head_dim) { LaunchQuadraticBwd<PolynomialScore>::template run<FASTMAX_MATH, head_dim>(p, stream); });
}

}  // namespace fastmax
