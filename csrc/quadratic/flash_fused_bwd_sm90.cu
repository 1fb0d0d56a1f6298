// Softmax attention on Hopper: the backward in one kernel.

#include "quadratic/fused_bwd_launch.h"

namespace fastmax {

size_t flash_fused_bwd_sm90_workspace_bytes(const BwdParams& p) { return fused_bwd_workspace_bytes<SoftmaxScore>(p); }

void flash_fused_bwd_sm90(const BwdParams& p, cudaStream_t stream) { launch_fused_bwd<SoftmaxScore, Bf16>(p, stream); }

}  // namespace fastmax
