// Decay: G, the running sum of log_decay over the keys of a head, and the gradient of log_decay from sums over pairs.
//
// A pair (i, j) has the factor exp(G_(pos(i) + lag) - K_j) with pos(i) = i + m - n and K_j = G_j - log_input_gate_j; G has m + lag tokens
// (Problem::lag). The sums are in units of log 2 and are stored as a float and its rounding error, so that differences have the precision of
// a float for any sequence length. G does not increase from token to token; K may. No factor is above 2^kLargestGate.
#pragma once

#include <cuda_runtime.h>

#include "core/params.h"

namespace fastmax {

// Stands for a decay of -inf, a reset. 2^kReset is 0 in fp32, and a million resets still leave differences exact.
inline constexpr float kReset = -2900.f;

// The range of log_input_gate, and a bound on it in units of log 2.
inline constexpr float kLeastGate = -60.f, kMostGate = 30.f, kLargestGate = 43.3f;

// Splits log_decay, in which -inf resets everything before its token. Results: finite decays, 0 at a reset, and for the query
// at each token a lower bound on its keys. Decays above 0 become 0; NaN stays NaN.
struct FiniteDecayParams {
  int b, hk, m;
  MathMode dtype;         // dtype of log_decay; fp32 is kFP32
  const void* log_decay;  // (b, hk, m)
  Stride log_decay_stride;
  bool continues;    // whether the call continues from a state, which is visible until the first reset
  float* finite;     // (b, hk, m) contiguous
  int32_t* k_start;  // (b, hk, m) contiguous: last reset up to this token; if none, 0, or -1 if the call continues
};
size_t finite_decay_workspace_bytes(const FiniteDecayParams& p);
void launch_finite_decay(const FiniteDecayParams& p, void* workspace, cudaStream_t stream);

// Where running sums reset. kAtFirstKeys: at tokens where k_start begins a sequence. The sums then contain everything that
// k_start says; the linear kernels read them, the quadratic kernels read k_start. The first token needs no reset unless the
// call continues from a state (kAtFirstKeysAndFirstToken): a k_start of 0 hides the state, and one of -1 does not.
enum class Resets { kNone, kAtFirstKeys, kAtFirstKeysAndFirstToken };

// Applies NaN decays and gates after all other kernels of the forward. In the sums they count as 0, because otherwise all later rows
// would be NaN. This sets rows of o and z to NaN if they see a key before a NaN decay, or with a NaN gate, and the final state if it has
// such a key.
void launch_nan_rows(const FwdParams& p, cudaStream_t stream);

// Fills p.decay_sums and p.key_sums, which are in `workspace`: decay_sum_bytes, 256-byte aligned. Without log_decay all decays are 0;
// without log_input_gate both are the same. Gates beyond the range count as its nearest end, and NaN as 0 (launch_nan_rows).
size_t decay_sum_bytes(const AttentionParams& p);
void fill_decay_sums(AttentionParams& p, Resets resets, void* workspace, cudaStream_t stream);

// Sums over pairs, by query and by key, of p_ij: the derivative with respect to the log of the weight of (i, j). The kernels of
// the backward fill them. Pairs of a token with itself are left out unless they count (AttentionParams::own_pairs_count).
//
// The initial state counts as a key before the first token, the final state as a query after the last one. The sums include
// pairs with these; each state's own sum of pairs is the sum of its elements times their gradients (BwdParams::state).
struct PairSums {
  float* by_query;  // (b, h, n)
  float* by_key;    // (b, hk, m)
  float* by_global_key;  // (b, hk, m): of an exact window with gates, over the pairs with global keys; else null
};
size_t pair_sum_bytes(const BwdParams& p);
PairSums pair_sums(const BwdParams& p, void* workspace);

// Computes p.grad_log_input_gate, which is by_global_key or by_key, and p.grad_log_decay, each where it is wanted. For token t the latter
// is the sum of p_ij over j < t <= pos(i) + lag: the sum of by_query, of which a query counts at token pos(i) + lag, from t on minus that
// of by_key. The totals of both are equal, and rounding errors are removed. Reads the states and their gradients. workspace:
// decay_gradient_bytes.
size_t decay_gradient_bytes(const BwdParams& p);
void fill_decay_gradient(const BwdParams& p, const PairSums& sums, void* workspace, cudaStream_t stream);

#ifdef __CUDACC__
// log2 of the decay factor between two tokens, <= 0.
__device__ __forceinline__ float decay(const float2& later, const float2& earlier) {
  return (later.x - earlier.x) + (later.y - earlier.y);
}

// Sums as a float and its rounding error; 0 where the float is infinite.
__device__ __forceinline__ float2 exact_sum(float x, float y) {
  const float sum = x + y, of_y = sum - x;
  return make_float2(sum, isinf(sum) ? 0.f : (x - (sum - of_y)) + (y - of_y));
}
__device__ __forceinline__ float2 exact_decay(const float2& later, const float2& earlier) {
  const float2 whole = exact_sum(later.x, -earlier.x);
  return make_float2(whole.x, whole.y + (later.y - earlier.y));
}
#endif

}  // namespace fastmax
