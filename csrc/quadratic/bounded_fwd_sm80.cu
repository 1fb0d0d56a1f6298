// Fastmax by the quadratic algorithm with bounds of keys, windows and decays: the forward.

#include "quadratic/bounded.h"
#include "quadratic/fwd.h"

namespace fastmax {

template <>
void quadratic_bounded_fwd<FASTMAX_MATH>(const FwdParams& call, cudaStream_t stream) {
  const FwdParams p = with_sums_and_tables<PolynomialScore>(call, stream);
  using Launch = LaunchQuadraticFwd<PolynomialScore, TableVisibility>;
  dispatch_head_dim(QuadraticHeadDims(), p.head_dim, [&](auto head_dim) { Launch::run<FASTMAX_MATH, head_dim>(p, stream); });
}

}  // namespace fastmax
