// Softmax attention: the forward.

#include "quadratic/fwd.h"

namespace fastmax {

template <>
void flash_fwd<FASTMAX_MATH>(const FwdParams& p, cudaStream_t stream) {
  dispatch_head_dim(QuadraticHeadDims(), p.head_dim,
                    [&](auto head_dim) { LaunchQuadraticFwd<SoftmaxScore>::template run<FASTMAX_MATH, head_dim>(p, stream); });
}

}  // namespace fastmax
