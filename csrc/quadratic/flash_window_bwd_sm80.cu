// Softmax attention in a window: the backward.

#include "quadratic/bwd.h"

namespace fastmax {

template <>
void flash_window_bwd<FASTMAX_MATH>(const BwdParams& p, cudaStream_t stream) {
  using Launch = LaunchQuadraticBwd<SoftmaxScore, WindowVisibility>;
  dispatch_head_dim(QuadraticHeadDims(), p.head_dim, [&](auto head_dim) { Launch::run<FASTMAX_MATH, head_dim>(p, stream); });
}

}  // namespace fastmax
