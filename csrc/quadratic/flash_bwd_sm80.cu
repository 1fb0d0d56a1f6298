// Softmax attention: the backward.

#include "quadratic/bwd.h"

namespace fastmax {

template <>
void flash_bwd<FASTMAX_MATH>(const BwdParams& p, cudaStream_t stream) {
  dispatch_head_dim<LaunchQuadraticBwd<SoftmaxScore>, FASTMAX_MATH>(p, p, stream);
}

}  // namespace fastmax
