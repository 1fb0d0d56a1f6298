// Softmax attention on Hopper: the backward in one kernel.

#include "quadratic/fused_bwd_sm90.h"

namespace fastmax {

void flash_fused_bwd_sm90(const BwdParams& p, cudaStream_t stream) { launch_fused_bwd<SoftmaxScore, Bf16>(p, stream); }

}  // namespace fastmax
