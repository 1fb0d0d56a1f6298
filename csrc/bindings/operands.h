// Conversion of tensors to params: operands and results in the layout that the kernels need. The tensors have been checked
// (checks.h). The objects keep copies alive until the launch.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/layout.h"
#include "bindings/torch_abi.h"
#include "core/device.h"
#include "core/params.h"

namespace fastmax {

// Number of visible keys before and after a query's own position; -1: no bound.
struct Window {
  int64_t left, right;
};
inline constexpr Window kNoWindow{-1, -1};

// Fills in sizes, arithmetic, scale, visibility and device of a call.
inline void fill_problem(Problem& p, const Tensor& q, const Tensor& k, const Tensor& v, double scale, bool causal, Window window,
                         bool allow_tf32) {
  p.b = static_cast<int>(q.size(0));
  p.h = static_cast<int>(q.size(1));
  p.hk = static_cast<int>(k.size(1));
  p.n = static_cast<int>(q.size(2));
  p.m = static_cast<int>(k.size(2));
  p.d = static_cast<int>(q.size(3));
  p.dv = static_cast<int>(v.size(3));
  p.head_dim_qk = p.head_dim_v = head_dim_of(q, v);  // the kernels have one for both; fit_head_dim may choose a narrower one
  p.math = math_mode(q.scalar_type(), allow_tf32);

  p.scale = static_cast<float>(scale);
  p.causal = causal;
  p.causal_offset = p.m - p.n;
  // No key is more than m - 1 before a query or n - 1 after it, so wider windows have no effect.
  p.left = static_cast<int>(window.left < 0 ? p.m : std::min<int64_t>(window.left, p.m));
  p.right = causal ? 0 : static_cast<int>(window.right < 0 ? p.n : std::min<int64_t>(window.right, p.n));
  p.window = p.left < p.m - 1 || (!causal && p.right < p.n - 1);

  const Device& device = get_device(q.get_device_index());
  p.sm_arch = device.arch;
  p.sm_count = device.sm_count;
}

// q, k, v and the inputs that accompany their tokens, as the kernels read them.
struct Operands {
  Tensor q, k, v;
  OptionalTensor mask, k_start, k_end, log_decay, log_input_gate;

  explicit Operands(const AttentionInputs& x)
      : q(readable(x.q)),
        k(readable(x.k)),
        v(readable(x.v)),
        mask(x.attention_mask),
        k_start(x.k_start),
        k_end(x.k_end),
        log_decay(x.log_decay),
        log_input_gate(x.log_input_gate) {
    if (mask.has_value() && mask->stride(1) != 1) mask = dense(*mask);
  }

  static KeyBounds bounds(const OptionalTensor& x) {
    if (!x.has_value()) return {};
    return {static_cast<const int32_t*>(x->data_ptr()), stride_of(*x)};
  }

  void fill(AttentionParams& p, double scale, bool causal, Window window, bool allow_tf32) const {
    fill_problem(p, q, k, v, scale, causal, window, allow_tf32);
    p.q = q.data_ptr(), p.q_stride = stride_of(q);
    p.k = k.data_ptr(), p.k_stride = stride_of(k);
    p.v = v.data_ptr(), p.v_stride = stride_of(v);
    p.attention_mask = mask.has_value() ? static_cast<const uint8_t*>(mask->data_ptr()) : nullptr;
    p.mask_batch_stride = mask.has_value() ? mask->stride(0) : 0;
    p.k_start = bounds(k_start), p.k_end = bounds(k_end);
    p.log_decay = log_decay.has_value() ? static_cast<const float*>(log_decay->data_ptr()) : nullptr;
    p.log_decay_stride = log_decay.has_value() ? stride_of(*log_decay) : Stride{};
    p.log_input_gate = log_input_gate.has_value() ? static_cast<const float*>(log_input_gate->data_ptr()) : nullptr;
    p.log_input_gate_stride = log_input_gate.has_value() ? stride_of(*log_input_gate) : Stride{};
  }
};

// The output and the per-query result: z or lse.
struct Results {
  Output o;
  Tensor z;

  Results(const Tensor& q, const Tensor& v, const Operands& x, const Tensor& z) : o(q, v.size(3), x.v.size(3)), z(z) {}

  void fill(FwdParams& p) const {
    p.o = o.storage.data_ptr(), p.o_stride = stride_of(o.storage);
    p.z = static_cast<float*>(z.data_ptr());
  }
};

// Uninitialised, (b, h, n) fp32 on q's device.
inline Tensor empty_per_query(const Tensor& q) {
  const int64_t b = q.size(0), h = q.size(1), n = q.size(2);
  return empty_contiguous({b, h, n}, ScalarType::Float, q.get_device_index());
}

// The results of a backward.
struct InputGradients {
  // log_decay, log_input_gate: without elements if the call has none, and unspecified if their gradients are not wanted.
  Tensor q, k, v, log_decay, log_input_gate;
};

// The results as an operator returns them: the gradients of q, k and v, and with kOfDecay of log_decay and log_input_gate.
template <bool kOfDecay>
auto as_results(const InputGradients& x) {
  if constexpr (kOfDecay) return std::tuple(x.q, x.k, x.v, x.log_decay, x.log_input_gate);
  else return std::tuple(x.q, x.k, x.v);
}
template <bool kOfDecay>
using GradientResults = decltype(as_results<kOfDecay>(std::declval<InputGradients>()));

// The results of a call without queries, keys or columns.
inline InputGradients zero_gradients(const AttentionInputs& x) {
  return {zeros_like_layout(x.q, x.q.size(3)), zeros_like_layout(x.k, x.k.size(3)), zeros_like_layout(x.v, x.v.size(3)),
          zero_token_gradient(x.log_decay, x.q), zero_token_gradient(x.log_input_gate, x.q)};
}

// The gradients of q, k and v, and the forward's results and grad_o as the kernels read them.
struct Gradients {
  Tensor o, grad_o, z;
  OptionalTensor grad_z;
  Output grad_q, grad_k, grad_v;
  Tensor grad_log_decay, grad_log_input_gate;  // without elements where there is no such input, or its gradient is not wanted

  struct Outputs {
    Output q, k, v;
  };
  Gradients(const Outputs& grads, const Operands& x, const Tensor& o_in, const Tensor& grad_o_in, const Tensor& z_in,
            const OptionalTensor& grad_z_in, bool wants_decay = true)
      : o(readable(o_in)),
        grad_o(readable(grad_o_in)),
        z(dense(z_in)),
        grad_q(grads.q),
        grad_k(grads.k),
        grad_v(grads.v),
        grad_log_decay(wants_decay ? empty_token_gradient(x.log_decay, o_in) : no_elements(o_in)),
        grad_log_input_gate(wants_decay ? empty_token_gradient(x.log_input_gate, o_in) : no_elements(o_in)) {
    if (grad_z_in.has_value()) grad_z = dense(*grad_z_in);
  }
  Gradients(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Operands& x, const Tensor& o_in, const Tensor& grad_o_in,
            const Tensor& z_in, const OptionalTensor& grad_z_in, bool wants_decay = true)
      : Gradients({Output(q_in, q_in.size(3), x.q.size(3)), Output(k_in, k_in.size(3), x.k.size(3)), Output(v_in, v_in.size(3), x.v.size(3))},
                  x, o_in, grad_o_in, z_in, grad_z_in, wants_decay) {}

  InputGradients results() const { return {grad_q.result(), grad_k.result(), grad_v.result(), grad_log_decay, grad_log_input_gate}; }

  void fill(BwdParams& p) const {
    p.o = o.data_ptr(), p.o_stride = stride_of(o);
    p.grad_o = grad_o.data_ptr(), p.grad_o_stride = stride_of(grad_o);
    p.z = static_cast<const float*>(z.data_ptr());
    p.grad_z = grad_z.has_value() ? static_cast<const float*>(grad_z->data_ptr()) : nullptr;
    p.grad_q = grad_q.storage.data_ptr(), p.grad_q_stride = stride_of(grad_q.storage);
    p.grad_k = grad_k.storage.data_ptr(), p.grad_k_stride = stride_of(grad_k.storage);
    p.grad_v = grad_v.storage.data_ptr(), p.grad_v_stride = stride_of(grad_v.storage);
    p.grad_log_decay = grad_log_decay.numel() > 0 ? static_cast<float*>(grad_log_decay.data_ptr()) : nullptr;
    p.grad_log_input_gate = grad_log_input_gate.numel() > 0 ? static_cast<float*>(grad_log_input_gate.data_ptr()) : nullptr;
  }
};

}  // namespace fastmax
