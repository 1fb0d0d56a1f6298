// Keys that fade: G, the running sum of log_decay over the keys of a state, and the gradient of log_decay from sums of pairs.
//
// A pair (i, j) has the factor exp(G_pos(i) - G_j), pos(i) = i + m - n. Sums are kept in units of log 2 as a float and what it leaves,
// so that a difference has the digits of a float however long the sequence is.
#pragma once

#include <cuda_runtime.h>

#include "core/params.h"

namespace fastmax {

// What forgets all before it, in place of -inf: 2^kReset is 0 in fp32, and sums of a million of them leave differences exact.
inline constexpr float kReset = -2900.f;

// log_decay as it is given, with -inf where a token forgets all before it, taken apart into finite decays, 0 there, and a bound on keys
// for each token, as a query at its place has it. Decays above 0 become 0, NaN stays NaN.
struct FiniteDecayParams {
  int b, hk, m;
  MathMode dtype;         // of log_decay; fp32 is kFP32
  const void* log_decay;  // (b, hk, m)
  Stride log_decay_stride;
  bool continues;      // from a state: what no token forgot reaches before the first one
  float* finite;       // (b, hk, m) contiguous
  int32_t* k_start;  // (b, hk, m) contiguous: the last token up to this one that forgets, else 0, where the call continues -1
};
size_t finite_decay_workspace_bytes(const FiniteDecayParams& p);
void launch_finite_decay(const FiniteDecayParams& p, void* workspace, cudaStream_t stream);

// Where sums start anew (Resets::kAtFirstKeys) is where a sequence of k_start does; sums then say all that k_start does. The
// linear kernels read them so, the quadratic ones look at k_start. There is nothing before the first token, unless the call
// continues from a state (kAtFirstKeysAndFirstToken): a k_start of 0 hides that, and one of -1 does not.
enum class Resets { kNone, kAtFirstKeys, kAtFirstKeysAndFirstToken };

// Sums take a decay of NaN for 0; after all other kernels of the forward this makes NaN of the rows of o and z that see a key before such
// a token, and of a state in which the call ends, where one of its keys is. With NaN in sums all later rows would be NaN.
void launch_nan_rows(const FwdParams& p, cudaStream_t stream);

// Fills p.decay_sums, which lie in `workspace`: decay_sum_bytes, 256-byte aligned. Without log_decay, decays of 0.
size_t decay_sum_bytes(const AttentionParams& p);
void fill_decay_sums(AttentionParams& p, Resets resets, void* workspace, cudaStream_t stream);

// Sums of pairs, by query and by key, of p_ij, the derivative by the logarithm of the weight of (i, j): kernels of the backward fill
// them. A pair of a token with itself does not fade and is in neither.
//
// A state that a call continues from counts as a key before the first token, one that it ends in as a query behind the last. Both sums
// have pairs with them too; what these two sum to is theirs times their gradients (BwdParams::state).
struct PairSums {
  float* by_query;  // (b, h, n)
  float* by_key;    // (b, hk, m)
};
size_t pair_sum_bytes(const BwdParams& p);
PairSums pair_sums(const BwdParams& p, void* workspace);

// p.grad_log_decay: of token t, the sum of p_ij over j < t <= pos(i), which is that of by_query minus that of by_key from t on. All of
// both are the same sum, and are made to be. States are read here, and so is the gradient that a state was given.
// workspace: decay_gradient_bytes.
size_t decay_gradient_bytes(const BwdParams& p);
void fill_decay_gradient(const BwdParams& p, const PairSums& sums, void* workspace, cudaStream_t stream);

#ifdef __CUDACC__
// log2 of the factor between two tokens, <= 0.
__device__ __forceinline__ float decay(const float2& later, const float2& earlier) {
  return (later.x - earlier.x) + (later.y - earlier.y);
}
#endif

}  // namespace fastmax
