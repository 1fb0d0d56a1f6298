// The linear algorithm: Fastmax by a state of fixed size in place of the keys.
#pragma once

#include <algorithm>

#include "core/algorithm.h"

namespace fastmax {

extern const Algorithm kLinearAlgorithm;
// Causal calls that continue from a state and end in one (FwdParams::state, BwdParams::state), n = m.
extern const Algorithm kLinearFromState;
// Causal calls of order 1 whose rows of q and k are shortened (AttentionParams::lim). No portable kernels.
extern const Algorithm kLinearOfShortened;
// Causal calls with an exact window, local and global keys in one pass. z is the logarithm of the sums. No portable kernels.
extern const Algorithm kLinearExactWindow;

// The widest head dim with kernels for order 1 alone (order1/), whose state fits the registers of a block. Wider heads, and calls with
// decays, run the kernels for order 2, which skip the second-order part.
inline constexpr int kLinear1HeadDim = 128;
inline bool uses_linear1(const Problem& p) { return p.order == 1 && std::max(p.head_dim_qk, p.head_dim_v) <= kLinear1HeadDim; }

// Whether a call needs decays of states. Bounds of packed sequences are decays to 0.
inline bool has_decay(const AttentionParams& p) { return p.has_decay() || p.k_start.data != nullptr; }

// g = grad_o / z and e = grad_z - grad_o . o / z, as BwdParams has them; g and e contiguous, both 0 where z is.
void launch_gradients_of_sums(const BwdParams& p, void* g, float* e, cudaStream_t stream);

}  // namespace fastmax
