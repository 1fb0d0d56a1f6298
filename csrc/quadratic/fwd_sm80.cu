// Fastmax by the quadratic algorithm: the forward.

#include "quadratic/fwd.h"

namespace fastmax {

template <>
void quadratic_fwd<FASTMAX_MATH>(const FwdParams& p, cudaStream_t stream) {
  dispatch_head_dim<LaunchQuadraticFwd<PolynomialScore>, FASTMAX_MATH>(p, p, stream);
}

}  // namespace fastmax
