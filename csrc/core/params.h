// The vocabulary of a call, from the bindings to the kernels: plain structs, passed by value.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace fastmax {

// Arithmetic of the matrix products. fp32 tensors use kTF32 when PyTorch allows it, else kFP32 (three TF32 products).
enum class MathMode : int { kBF16 = 0, kFP16 = 1, kTF32 = 2, kFP32 = 3 };

// Strides in elements; the last dimension has unit stride. Pointers and strides are multiples of 16 bytes.
struct Stride {
  int64_t batch;
  int64_t head;
  int64_t token;
};

struct Range;  // visibility.h

// A bound on keys for each query of a key/value head, (b, hk, n) of any strides.
struct KeyBounds {
  const int32_t* data;  // null: none
  Stride stride;
};

// Sizes, formula and device of a call. An option that changes the formula or what is visible (a window, decay) is added here.
struct Problem {
  // sizes
  int b;         // batch
  int h;         // query heads
  int hk;        // key/value heads; query head i reads key/value head i / (h / hk)
  int n;         // queries
  int m;         // keys
  int d;         // columns of q and k, <= head_dim, a multiple of 16 bytes
  int dv;        // columns of v and o, <= head_dim, a multiple of 16 bytes
  int head_dim;  // the smallest of NativeHeadDims (dispatch.h) that holds d and dv
  MathMode math;

  // formula
  float scale;       // s = scale * q.k
  float a0, a1, a2;  // f(s) = a0 + a1 s + a2 s^2; a2 = 0 when order == 1
  int order;         // 1 or 2
  bool causal;       // key j is visible to query i iff j <= i + causal_offset
  bool window;       // softmax: and iff i + causal_offset - left <= j <= i + causal_offset + right
  int causal_offset; // m - n
  int left, right;   // of a window; right = 0 where causal
  float dropout;     // o *= 1 + dropout * noise

  // device
  int sm_arch;   // compute capability * 10 of the current device: 80, 90, ...
  int sm_count;  // multiprocessors of the current device
};

// What both directions read.
struct AttentionParams : Problem {
  // operands
  const void* q;  // (b, h, n, d)
  const void* k;  // (b, hk, m, d)
  const void* v;  // (b, hk, m, dv)
  Stride q_stride, k_stride, v_stride;

  // what accompanies the tokens, null where it is absent. A per-token input (decay) is added here and in Operands of
  // bindings/operands.h.
  const uint8_t* attention_mask;  // (b, m), nonzero = the key takes part; null: all do
  int64_t mask_batch_stride;
  const void* noise;  // (b, h, n, dv) in q's dtype, or null
  Stride noise_stride;
  // A query sees keys [k_start, k_end); neither falls from query to query. The host does not read their values. Kernels must end, and
  // stay inside memory, with any other values too; results are not specified then.
  KeyBounds k_start, k_end;
  const float* log_decay;        // (b, hk, m), finite and <= 0, or NaN; causal only
  Stride log_decay_stride;

  // tables of what these bounds, causality and a window come to, which the quadratic kernels make for themselves (quadratic/bounds.h)
  const Range* key_table;    // (b, hk, n): the keys that a query sees
  const Range* query_table;  // (b, hk, m): the queries that see a key
  // running sums of log_decay (b, hk, m), which the kernels of every algorithm make for themselves (decay/decay.h)
  const float2* decay_sums;
};

// Sums over earlier tokens that a causal call continues from, and where those over all tokens go; rows of a state as in decode/decode.h.
struct CarriedState {
  const float* values;   // (b, hk, rows, dv) contiguous; null: the call continues from nothing, and leaves nothing
  const float* weights;  // (b, hk, rows) contiguous
  float* new_values;     // like values
  float* new_weights;
  int d, dv;             // columns of the tokens, without what pads them to 16 bytes
};

struct FwdParams : AttentionParams {
  // results
  void* o;  // (b, h, n, dv); null: of a call from a state, the state alone is wanted
  Stride o_stride;
  float* z;  // (b, h, n) contiguous: sum_j f(s_ij); softmax: log sum_j exp(s_ij)
  // Of calls for kernels that join parts (algorithm.h), (b, h, n), heads local_lse_head apart, or null: o and local_lse hold attention over
  // near keys and the logs of its sums of weights, and become those of near and far keys, z the sums of both; 0 where there are no far keys.
  float* local_lse;
  int64_t local_lse_head;

  CarriedState state;  // of calls through kLinearFromState (linear/algorithm.h)
  // Of those, states on the way, Kernels::fwd_kept_bytes (algorithm.h) of them, or null. Of a call that wants the state alone: it begins
  // with nothing and leaves them here. Else they are those that such a call left: `state` is added to them, in place, and the keys are not
  // once more; new_values is null then.
  void* kept;
  bool from_nothing;  // `state` is of zeros: kept states are what they are
  void* workspace;  // fwd_workspace_bytes (algorithm.h), 256-byte aligned, or null when that is 0
};

// What a call continued from and ended in, for the gradient: rows of all as in CarriedState.
struct CarriedGradients {
  const float* values;       // null: the call continued from nothing, and left nothing
  const float* weights;
  const float* new_values;   // read where there is a gradient of log_decay
  const float* new_weights;
  const float* grad_new_values;
  const float* grad_new_weights;
  float* grad_values;
  float* grad_weights;
  int d, dv;
};

struct BwdParams : AttentionParams {
  // of the forward, and gradients of its results
  const void* o;       // noise included
  const void* grad_o;  // (b, h, n, dv)
  const float* z;      // (b, h, n) contiguous
  const float* grad_z; // (b, h, n) contiguous, or null
  Stride o_stride, grad_o_stride;
  // Or what they come to, the gradients of the sums over keys (gradients_of_sums of linear/algorithm.h); null: of calls that have not
  // made it before.
  const void* g;       // (b, h, n, dv), fp32 where q is fp16
  Stride g_stride;
  const float* e;      // (b, h, n) contiguous

  // results. Of a call from a state grad_q, or grad_k and grad_v, may be null and are not wanted; without all of them, the gradient of
  // that state alone is.
  void* grad_q;  // (b, h, n, d)
  void* grad_k;  // (b, hk, m, d)
  void* grad_v;  // (b, hk, m, dv)
  Stride grad_q_stride, grad_k_stride, grad_v_stride;
  float* grad_log_decay;  // (b, hk, m) contiguous; null without log_decay, and of grad_q alone
  // (b, h, n) contiguous, sums of pairs (decay/decay.h): of grad_q alone a result, of grad_k and grad_v alone read; null: of neither, and
  // without log_decay.
  float* pairs_by_query;
  // (b, hk, 2), of grad_k and grad_v alone with log_decay: what the pairs with the state that the call ended in sum to, and those with
  // the one that it continued from; null: `state` has what they are made of.
  const double* pairs_of_states;
  bool adds;  // of calls for kernels that join parts (algorithm.h): grad_q, grad_k and grad_v are added to what is there

  void* workspace;  // bwd_workspace_bytes (algorithm.h), 256-byte aligned, or null when that is 0
  CarriedGradients state;  // of calls through kLinearFromState (linear/algorithm.h)
  // As FwdParams::kept, of the walk back in time: of a call that wants the gradient of the state alone, or of a later one, whose
  // state.grad_values is null.
  void* kept;
  bool from_nothing;  // state.grad_new_values is of zeros
};

}  // namespace fastmax
