// Softmax attention on Hopper: the forward, with bounds of keys and windows.

#include "quadratic/fwd_sm90.h"

namespace fastmax {

void flash_bounded_fwd_sm90(const FwdParams& p, cudaStream_t stream) {
  LaunchQuadraticFwdSm90<SoftmaxScore, TableVisibility>::run(p, stream);
}

}  // namespace fastmax
