// The linear algorithm of order 2 as a sequence of passes (launch.cu). Its kernels compute order 1 too, where wide heads leave no
// other (linear/algorithm.h).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "core/params.h"

namespace fastmax {

void launch_linear2_fwd(const FwdParams& p, cudaStream_t stream);
void launch_linear2_bwd(const BwdParams& p, cudaStream_t stream);
size_t linear2_fwd_workspace_bytes(const FwdParams& p);
size_t linear2_bwd_workspace_bytes(const BwdParams& p);

}  // namespace fastmax
