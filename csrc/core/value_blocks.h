// Calls whose values are wider than the kernels that run them. Attention is linear in the values, so the kernels run once for each block of
// as many columns of v and o as they have; all runs compute the same z.
//
//   o[:, block] = attention(q, k, v[:, block])
//   grad_v[:, block] from grad_o[:, block]; the gradients of q, k and log_decay are sums over the blocks
//
// The gradient of z enters one block alone, as the gradient of a state's k_sum does. Sums are computed in fp32 and rounded to q's dtype
// after each block. A call has blocks where its head_dim_v is less than its dv (Fit in core/cost_model.h).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "core/algorithm.h"
#include "core/cost_model.h"
#include "core/dispatch.h"

namespace fastmax {

inline int value_blocks(const Problem& p) { return p.dv <= p.head_dim_v ? 1 : (p.dv + p.head_dim_v - 1) / p.head_dim_v; }

// Whether a call of this mode may have blocks. Intermediate states, which calls save for others, are those of one run.
inline bool may_have_blocks(const FwdParams& p) { return p.mode == FwdMode::kOutputs || p.mode == FwdMode::kOutputsAndState; }
inline bool may_have_blocks(const BwdParams& p) { return p.wants_all_inputs(); }

// Sets the head dim of the kernels that run the call faster: one that holds all columns, or one of blocks.
inline void fit_head_dim(AttentionParams& p, const Algorithm& algorithm, Direction direction, bool has_state = false) {
  if (NativeHeadDims::at_least(p.d) >= p.dv) return;
  if (const int head_dim = fit(algorithm, p, direction, has_state).head_dim; head_dim != 0) p.head_dim_qk = p.head_dim_v = head_dim;
}

// As Kernels::fwd_workspace_bytes, fwd, bwd_workspace_bytes and bwd, with all blocks.
size_t fwd_workspace_bytes(const Kernels& kernels, const FwdParams& p);
size_t bwd_workspace_bytes(const Kernels& kernels, const BwdParams& p);
void launch_fwd(const Kernels& kernels, const FwdParams& p, cudaStream_t stream);
void launch_bwd(const Kernels& kernels, const BwdParams& p, cudaStream_t stream);

}  // namespace fastmax
