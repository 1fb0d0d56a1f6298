// Fastmax by the quadratic algorithm with bounds of keys: the backward.

#include "quadratic/bounds.h"
#include "quadratic/bwd.h"

namespace fastmax {

template <>
void quadratic_packed_bwd<FASTMAX_MATH>(const BwdParams& call, cudaStream_t stream) {
  BwdParams p = call;
  fill_bound_tables(p, static_cast<char*>(p.workspace) + quadratic_bwd_workspace_bytes(p), Direction::kBackward, stream);
  using Launch = LaunchQuadraticBwd<PolynomialScore, TableVisibility>;
  dispatch_head_dim(QuadraticHeadDims(), p.head_dim, [&](auto head_dim) { Launch::run<FASTMAX_MATH, head_dim>(p, stream); });
}

}  // namespace fastmax
