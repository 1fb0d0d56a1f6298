// Softmax attention on Hopper: the backward.

#include "quadratic/bwd_sm90.h"

namespace fastmax {

void flash_bwd_sm90(const BwdParams& p, cudaStream_t stream) {
  using Launch = LaunchQuadraticBwdSm90<SoftmaxScore, DenseVisibility>;
  dispatch_head_dim(QuadraticSm90HeadDims(), p.head_dim, [&](auto head_dim) { Launch::run<Bf16, head_dim>(p, stream); });
}

}  // namespace fastmax
