// Softmax attention on Hopper: the forward.

#include "quadratic/fwd_sm90.h"

namespace fastmax {

void flash_fwd_sm90(const FwdParams& p, cudaStream_t stream) {
  LaunchQuadraticFwdSm90<SoftmaxScore, DenseVisibility>::run(p, stream);
}

}  // namespace fastmax
