// Softmax attention on Hopper: the backward, with a window and no other bounds of keys.

#include "quadratic/bwd_sm90.h"

namespace fastmax {

void flash_window_bwd_sm90(const BwdParams& p, cudaStream_t stream) {
  using Launch = LaunchQuadraticBwdSm90<SoftmaxScore, WindowVisibility>;
  dispatch_head_dim(QuadraticSm90HeadDims(), p.head_dim, [&](auto head_dim) { Launch::run<Bf16, head_dim>(p, stream); });
}

}  // namespace fastmax
