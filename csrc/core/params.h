// Arguments of a call, which the bindings fill and the kernels read: plain structs, passed by value.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace fastmax {

// Arithmetic of the matrix products. fp32 tensors use kTF32 where PyTorch allows it, else kFP32 (three TF32 products).
enum class MathMode : int { kBF16 = 0, kFP16 = 1, kTF32 = 2, kFP32 = 3 };

// Strides in elements; the last dimension has unit stride. Pointers and strides are multiples of 16 bytes.
struct Stride {
  int64_t batch;
  int64_t head;
  int64_t token;
};

struct Range;  // visibility.h

// A bound on the visible keys of each query of a key/value head, (b, hk, n) of any strides.
struct KeyBounds {
  const int32_t* data;  // null: none
  Stride stride;
};

// Sizes and formula of a call, and what selects its kernels. Options that change the formula or the visibility (a window, decays)
// are fields of it.
struct Problem {
  // sizes
  int b;         // batch
  int h;         // query heads
  int hk;        // key/value heads; query head i reads key/value head i / (h / hk)
  int n;         // queries
  int m;         // keys
  int d;         // columns of q and k, <= head_dim_qk, a multiple of 16 bytes
  int dv;        // columns of v and o, a multiple of 16 bytes; <= head_dim_v in a run of kernels (value_blocks.h)
  int sm_count;  // multiprocessors of the current device
  MathMode math;

  // formula
  float scale;       // s = scale * q.k
  float a0, a1, a2;  // f(s) = a0 + a1 s + a2 s^2; a2 = 0 when order == 1
  int order;         // 1 or 2
  bool causal;       // key j is visible to query i iff j <= i + causal_offset
  bool window;       // softmax: and iff i + causal_offset - left <= j <= i + causal_offset + right
  int causal_offset; // m - n
  // Tokens by which the decays of a query reach beyond its position: log_decay and its sums have m + lag tokens, and a pair has the
  // decays of the tokens j + 1 to i + causal_offset + lag. Not 0 only with log_decay: for the global keys of an exact window, whose
  // queries are that many tokens later. Visibility does not depend on it. Such a call has no state.
  int lag;
  int left, right;   // of a window; right = 0 where causal
  int exact_window;  // local keys, |i + causal_offset - j| < exact_window, have weight exp(s); 0: there are none
  float dropout;     // o *= 1 + dropout * noise

  // kernels
  int sm_arch;      // compute capability * 10 of the current device: 80, 90, ...
  int head_dim_qk;  // columns of q and k in the kernels, one of NativeHeadDims (dispatch.h)
  int head_dim_v;   // columns of v and o in the kernels, likewise; as many as head_dim_qk (common_head_dim)

  __host__ __device__ int decay_tokens() const { return m + lag; }
};

// Bytes of an element of q, k, v, o and their gradients.
inline int tensor_element_bytes(const Problem& p) { return p.math == MathMode::kBF16 || p.math == MathMode::kFP16 ? 2 : 4; }

// Inputs of both directions.
struct AttentionParams : Problem {
  // operands
  const void* q;  // (b, h, n, d)
  const void* k;  // (b, hk, m, d)
  const void* v;  // (b, hk, m, dv)
  Stride q_stride, k_stride, v_stride;

  // Optional inputs per token; null: not given. A new one is added here and in Operands of bindings/operands.h.
  const uint8_t* attention_mask;  // (b, m), nonzero = the key is attended; null: all keys are
  int64_t mask_batch_stride;
  const void* noise;  // (b, h, n, dv) in q's dtype, or null
  Stride noise_stride;
  // A query sees keys [k_start, k_end). Neither bound decreases from query to query; the host does not check their values. With
  // other values results are not specified, but kernels must end and stay inside memory.
  KeyBounds k_start, k_end;
  const float* log_decay;        // (b, hk, m + lag), finite and <= 0, or NaN; causal only
  Stride log_decay_stride;
  // (b, hk, m), between -60 and 30 or NaN; causal only. Multiplies the weights of a key by its exp: of an exact window, of global keys.
  const float* log_input_gate;
  Stride log_input_gate_stride;

  // Calls through kLinearOfShortened (linear/algorithm.h): the length to which rows of q and k are shortened, and the factors of k, lim / |k|
  // or 1 (normalize/normalize.h). 0: q and k are as they are.
  float lim;
  const float* k_factor;         // (b, hk, m) contiguous

  // Tables that the launchers of the quadratic kernels fill from bounds, causality and window (quadratic/bounds.h).
  const Range* key_table;    // (b, hk, n): the keys that a query sees
  const Range* query_table;  // (b, hk, m): the queries that see a key
  // Running sums of log_decay (b, hk, m + lag), and those of the keys' tokens less their gates (b, hk, key_sum_tokens). The launchers of
  // every algorithm fill both (decay/decay.h).
  const float2* decay_sums;
  const float2* key_sums;
  int key_sum_tokens;

  // Whether the weights of pairs have factors by token. Packed sequences alone are not among them.
  __host__ __device__ bool has_decay() const { return log_decay != nullptr || log_input_gate != nullptr; }
  // Whether pairs of a token with itself have such a factor.
  __host__ __device__ bool own_pairs_count() const { return lag > 0 || log_input_gate != nullptr; }
};

// The state of a causal call through kLinearFromState: sums over the tokens before the call, and the new sums, which include the
// call's tokens. decode/decode.h describes the rows of a state.
struct CarriedState {
  const float* kv_state;  // (b, hk, rows, dv) contiguous; null: a call without a state
  const float* k_sum;     // (b, hk, rows) contiguous
  float* new_kv_state;    // like kv_state; null: not wanted
  float* new_k_sum;
  int d, dv;              // columns of the tokens, without the padding to 16 bytes
};

// What a forward computes. Modes other than kOutputs are for calls through kLinearFromState (linear/algorithm.h).
enum class FwdMode : uint8_t {
  kOutputs,           // o and z of a call without a state
  kOutputsAndState,   // o, z and the new state, from `state` and the tokens
  kOutputsFromState,  // o and z, from `state` and the tokens
  kOutputsFromSaved,  // the same from `saved`, to which `state` is added in place; the keys are not accumulated again
  kState,             // the new state
  kStateAndSaved,     // the new state, from a `state` of zeros; its intermediate states are written to `saved`
};

struct FwdParams : AttentionParams {
  // results
  void* o;  // (b, h, n, dv); null where the mode computes the state alone
  Stride o_stride;
  float* z;  // (b, h, n) contiguous: sum_j f(s_ij); softmax: log sum_j exp(s_ij)
  // For kernels with Kernels::joins_parts (algorithm.h), (b, h, n), heads local_lse_head apart, or null. o and local_lse hold
  // attention over the local keys and its log-sum-exp; the kernels merge the global keys (these k and v) into both. z is then the sum
  // of weights over local and global keys, and 0 where a query has no global keys.
  float* local_lse;
  int64_t local_lse_head;

  CarriedState state;
  void* saved;  // intermediate states, Kernels::fwd_saved_bytes (algorithm.h), in the modes that name them
  bool from_zero_state;  // `state` is of zeros; kOutputsFromSaved then neither reads it nor changes `saved`
  FwdMode mode;
  void* workspace;  // fwd_workspace_bytes (algorithm.h), 256-byte aligned, or null when that is 0

  bool has_state() const { return mode != FwdMode::kOutputs; }
  bool wants_outputs() const { return mode != FwdMode::kState && mode != FwdMode::kStateAndSaved; }
  bool wants_new_state() const { return mode == FwdMode::kOutputsAndState || !wants_outputs(); }
  bool reads_saved() const { return mode == FwdMode::kOutputsFromSaved; }
  bool uses_saved() const { return reads_saved() || mode == FwdMode::kStateAndSaved; }
};

// The states of a backward: those that the call continued from and ended in, and their gradients. Rows as in CarriedState.
struct CarriedGradients {
  const float* kv_state;  // null: a call without a state
  const float* k_sum;
  const float* new_kv_state;  // read where there is a gradient of log_decay
  const float* new_k_sum;
  const float* grad_new_kv_state;
  const float* grad_new_k_sum;
  float* grad_kv_state;
  float* grad_k_sum;
  int d, dv;
};

// What a backward computes. Modes other than kInputs are for calls through kLinearFromState (linear/algorithm.h).
enum class BwdMode : uint8_t {
  kInputs,          // gradients of q, k and v of a call without a state
  kInputsAndState,  // the same of a call with a state, and the gradient of that state
  kQueries,         // the gradient of q
  kKeys,            // the gradients of k and v
  kKeysFromSaved,   // the same from `saved`, to which the gradient of the new state is added in place
  kState,           // the gradient of the state
  kStateAndSaved,   // the same, of a new state whose gradient is of zeros; its intermediate states are written to `saved`
};

struct BwdParams : AttentionParams {
  // results of the forward, and their gradients
  const void* o;       // noise included
  const void* grad_o;  // (b, h, n, dv)
  const float* z;      // (b, h, n) contiguous
  const float* grad_z; // (b, h, n) contiguous, or null
  Stride o_stride, grad_o_stride;
  // Or in their place the gradients of the numerator (g) and the denominator (e), from gradients_of_sums (linear/algorithm.h).
  const void* g;       // (b, h, n, dv), fp32 where q is fp16; null: the kernels compute both
  Stride g_stride;
  const float* e;      // (b, h, n) contiguous

  // results; null where the mode does not compute them
  void* grad_q;  // (b, h, n, d)
  void* grad_k;  // (b, hk, m, d)
  void* grad_v;  // (b, hk, m, dv)
  Stride grad_q_stride, grad_k_stride, grad_v_stride;
  float* grad_log_decay;  // (b, hk, m + lag) contiguous; null without log_decay, where it is not wanted, and in mode kQueries
  float* grad_log_input_gate;  // (b, hk, m) contiguous; null likewise
  // (b, h, n) contiguous, sums of pairs (decay/decay.h). kQueries: a result. kKeys, kKeysFromSaved: an input. Else, and without
  // log_decay: null.
  float* pairs_by_query;
  // (b, hk, 2), an input of kKeys and kKeysFromSaved with log_decay: the sum over pairs with the state that the call ended in, and
  // that over pairs with the state that it continued from. Null: both sums are computed from `state`.
  const double* pairs_of_states;
  bool adds;  // for kernels with Kernels::joins_parts (algorithm.h): the gradients are added to what is there

  void* workspace;  // bwd_workspace_bytes (algorithm.h), 256-byte aligned, or null when that is 0
  CarriedGradients state;
  void* saved;  // intermediate gradients of the state, Kernels::bwd_saved_bytes (algorithm.h), in the modes that name them
  bool from_zero_state;  // the gradient of the new state is of zeros; kKeysFromSaved then neither reads it nor changes `saved`
  BwdMode mode;

  bool wants_pair_sums() const { return grad_log_decay != nullptr || grad_log_input_gate != nullptr; }
  bool has_state() const { return mode != BwdMode::kInputs; }
  bool has_gradients_of_sums() const { return g != nullptr; }
  bool wants_all_inputs() const { return mode == BwdMode::kInputs || mode == BwdMode::kInputsAndState; }
  bool wants_grad_q() const { return wants_all_inputs() || mode == BwdMode::kQueries; }
  bool wants_grad_kv() const { return wants_all_inputs() || mode == BwdMode::kKeys || mode == BwdMode::kKeysFromSaved; }
  bool wants_grad_state() const {
    return mode == BwdMode::kInputsAndState || mode == BwdMode::kState || mode == BwdMode::kStateAndSaved;
  }
  bool reads_saved() const { return mode == BwdMode::kKeysFromSaved; }
  bool uses_saved() const { return reads_saved() || mode == BwdMode::kStateAndSaved; }
};

}  // namespace fastmax
