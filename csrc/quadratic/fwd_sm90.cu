// Fastmax by the quadratic algorithm on Hopper: the forward.

#include "quadratic/fwd_sm90.h"

namespace fastmax {

void quadratic_fwd_sm90(const FwdParams& p, cudaStream_t stream) {
  dispatch_head_dim(QuadraticSm90HeadDims(), p.head_dim,
                    [&](auto head_dim) { LaunchQuadraticFwdSm90<PolynomialScore>::run<Bf16, head_dim>(p, stream); });
}

}  // namespace fastmax
