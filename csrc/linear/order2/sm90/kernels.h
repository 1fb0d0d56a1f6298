// Launches of the Hopper kernels of order 2; their arguments say which pass they compute (linear/linear.h).
#pragma once

#include <cuda_runtime.h>

#include "core/algorithm.h"
#include "linear/linear.h"
#include "linear/order2/linear2.h"

namespace fastmax {

extern const StatePasses kStatePassesSm90;  // bf16, p = 2, head dims 32, 64 and 128
bool linear2_sm90_covers(const AttentionParams& p, Direction direction);
bool linear2_window_sm90_covers(const AttentionParams& p, Direction direction);  // calls of kLinearExactWindow

// Whether the output kernel of a forward adds ReadArgs::added: at head dim 128 the ring would have two stages left.
constexpr bool reads_add_sm90(int head_dim) { return head_dim <= 64; }

// Whether the kernel for grad_k computes grad_v too; else the output kernel does. At head dim 128 registers suffice for one of the two.
constexpr bool grads_with_values_sm90(int head_dim) { return head_dim <= 64; }
// But not of a call with an exact window, decays and the gradient of log_decay at head dim 64: that kernel is larger than the instruction
// cache. On an H200 at (1, 32, 65536, 64) it takes 5.6 ms, and without the gradient of log_decay 3.6.
constexpr bool splits_window_grads_sm90(int head_dim) { return head_dim == 64; }

// head_dim: of HopperLinear2HeadDims. is_fine: how a state is shared (snapshot.h).
void linear_state_sm90(const StateArgs& a, int head_dim, bool is_fine, cudaStream_t stream);
void linear_read_sm90(const ReadArgs& a, int head_dim, int sm_count, cudaStream_t stream);

// grad_q; and grad_v (of `values`) with grad_k, of the same rows.
void linear_grad_sm90(const GradArgs& a, int head_dim, int sm_count, cudaStream_t stream);
void linear_grads_sm90(const ReadArgs& values, const GradArgs& a, int head_dim, int sm_count, cudaStream_t stream);

// Carried state -> accumulators, and accumulators -> new carried state
void linear_load_state_sm90(const CarriedArgs& a, int head_dim, bool is_fine, cudaStream_t stream);
void linear_store_state_sm90(const CarriedArgs& a, int head_dim, bool is_fine, cudaStream_t stream);

}  // namespace fastmax
