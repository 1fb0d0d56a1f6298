// Softmax attention on Hopper: the backward in five products.

#include "quadratic/bwd_five_sm90.h"

namespace fastmax {

void flash_bwd_five_sm90(const BwdParams& p, cudaStream_t stream) {
  using Launch = LaunchQuadraticBwdFiveSm90<SoftmaxScore>;
  dispatch_head_dim(QuadraticBwdFiveSm90HeadDims(), p.head_dim,
                    [&](auto head_dim) { Launch::run<Bf16, head_dim>(p, heads_at_once_of_trial(), stream); });
}

}  // namespace fastmax
