// Fastmax by the quadratic algorithm with bounds of keys: the forward.

#include "quadratic/bounds.h"
#include "quadratic/fwd.h"

namespace fastmax {

template <>
void quadratic_packed_fwd<FASTMAX_MATH>(const FwdParams& call, cudaStream_t stream) {
  FwdParams p = call;
  fill_bound_tables(p, p.workspace, Direction::kForward, stream);
  using Launch = LaunchQuadraticFwd<PolynomialScore, TableVisibility>;
  dispatch_head_dim(QuadraticHeadDims(), p.head_dim, [&](auto head_dim) { Launch::run<FASTMAX_MATH, head_dim>(p, stream); });
}

}  // namespace fastmax
