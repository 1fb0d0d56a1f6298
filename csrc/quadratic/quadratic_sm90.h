// The Hopper kernels of the quadratic algorithm and of softmax attention: bf16, head dims up to 64 and up to 128.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "core/algorithm.h"
#include "core/dispatch.h"
#include "core/params.h"

namespace fastmax {

using QuadraticSm90HeadDims = HeadDims<64, 128>;

// Calls of tensors that tensor maps can express: without bounds of keys and windows, and with them; none that fade.
bool covers_quadratic_sm90(const AttentionParams& p, Direction direction);
bool covers_bounded_sm90(const AttentionParams& p, Direction direction);

size_t quadratic_fwd_sm90_workspace_bytes(const FwdParams& p);
size_t quadratic_bwd_sm90_workspace_bytes(const BwdParams& p);

void quadratic_fwd_sm90(const FwdParams& p, cudaStream_t stream);
void quadratic_bwd_sm90(const BwdParams& p, cudaStream_t stream);
void flash_fwd_sm90(const FwdParams& p, cudaStream_t stream);
void flash_bwd_sm90(const BwdParams& p, cudaStream_t stream);
void quadratic_bounded_fwd_sm90(const FwdParams& p, cudaStream_t stream);
void quadratic_bounded_bwd_sm90(const BwdParams& p, cudaStream_t stream);
void flash_bounded_fwd_sm90(const FwdParams& p, cudaStream_t stream);
void flash_bounded_bwd_sm90(const BwdParams& p, cudaStream_t stream);

}  // namespace fastmax
