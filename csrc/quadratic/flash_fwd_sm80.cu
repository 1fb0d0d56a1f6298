// Softmax attention: the forward.

#include "quadratic/fwd.h"

namespace fastmax {

template <>
void flash_fwd<FASTMAX_MATH>(const FwdParams& p, cudaStream_t stream) {
  using Launch = LaunchQuadraticFwd<SoftmaxScore, DenseVisibility>;
  dispatch_head_dim(QuadraticHeadDims(), p.head_dim, [&](auto head_dim) { Launch::run<FASTMAX_MATH, head_dim>(p, stream); });
}

}  // namespace fastmax
