// Launches of the Hopper kernels of order 1 (arguments: linear1.h): bf16, causal, without masks.
#pragma once

#include <cuda_runtime.h>

#include "core/algorithm.h"
#include "linear/order1/linear1.h"

namespace fastmax {

extern const Linear1Walks kLinear1WalksSm90;
bool linear1_sm90_covers(const AttentionParams& p, Direction direction);

// head_dim: 64 or 128.
void linear1_sums_sm90(const Linear1SumArgs& a, int head_dim, cudaStream_t stream);
void linear1_walk_sm90(const Linear1WalkArgs& a, int head_dim, cudaStream_t stream);
void linear1_pair_walk_sm90(const Linear1PairWalkArgs& a, int head_dim, cudaStream_t stream);

}  // namespace fastmax
