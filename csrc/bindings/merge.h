// fastmax_cuda::merge_, for other bindings.
#pragma once

#include "bindings/torch_abi.h"

namespace fastmax {

// Merges o_global and z_global into o and lse in place. Checks its arguments.
void merge(const Tensor& o, const Tensor& lse, const Tensor& o_global, const Tensor& z_global);

}  // namespace fastmax
