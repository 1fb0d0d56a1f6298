// Softmax attention: the forward.

#include "quadratic/fwd.h"

namespace fastmax {

template <>
void flash_fwd<FASTMAX_MATH>(const FwdParams& p, cudaStream_t stream) {
  dispatch_head_dim<LaunchQuadraticFwd<SoftmaxScore>, FASTMAX_MATH>(p, p, stream);
}

}  // namespace fastmax
