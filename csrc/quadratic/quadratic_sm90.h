// The Hopper kernels of the quadratic algorithm and of softmax attention: bf16, head dims 64 and 128.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "core/algorithm.h"
#include "core/dispatch.h"
#include "core/params.h"

namespace fastmax {

using QuadraticSm90HeadDims = HeadDims<64, 128>;

// Calls without bounds of keys, windows or decays, of tensors that tensor maps can express.
bool covers_quadratic_sm90(const AttentionParams& p, Direction direction);

size_t quadratic_fwd_sm90_workspace_bytes(const FwdParams& p);
void quadratic_fwd_sm90(const FwdParams& p, cudaStream_t stream);
void flash_fwd_sm90(const FwdParams& p, cudaStream_t stream);

size_t quadratic_bwd_sm90_workspace_bytes(const BwdParams& p);
void quadratic_bwd_sm90(const BwdParams& p, cudaStream_t stream);
void flash_bwd_sm90(const BwdParams& p, cudaStream_t stream);

}  // namespace fastmax
