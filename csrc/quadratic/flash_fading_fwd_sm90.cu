// Softmax attention on Hopper: the forward, where keys fade.

#include "quadratic/fwd_sm90.h"

namespace fastmax {

void flash_fading_fwd_sm90(const FwdParams& p, cudaStream_t stream) {
  LaunchQuadraticFwdSm90<SoftmaxScore, FadingVisibility>::run(p, stream);
}

}  // namespace fastmax
