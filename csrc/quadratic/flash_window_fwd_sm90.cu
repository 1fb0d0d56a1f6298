// Softmax attention on Hopper: the forward, with a window and no other bounds of keys.

#include "quadratic/fwd_sm90.h"

namespace fastmax {

void flash_window_fwd_sm90(const FwdParams& p, cudaStream_t stream) {
  LaunchQuadraticFwdSm90<SoftmaxScore, WindowVisibility>::run(p, stream);
}

}  // namespace fastmax
