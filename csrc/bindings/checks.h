// Checks that make direct calls of the operators safe; functional.py has already checked what users pass. Each error names the
// argument.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <initializer_list>
#include <string>
#include <utility>

#include "bindings/torch_abi.h"
#include "decode/decode.h"

namespace fastmax {

inline std::string device_name(const Tensor& x) {
  return x.is_cuda() ? "cuda:" + std::to_string(x.get_device_index()) : x.is_cpu() ? "cpu" : "another kind of device";
}

// Sizes: an initializer list, or the type that sizes() returns.
template <class Sizes>
std::string shape_text(const Sizes& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

// The inputs of an attention operator, without options, results and their gradients.
struct AttentionInputs {
  const Tensor &q, &k, &v;
  const OptionalTensor &attention_mask, &log_decay, &log_input_gate, &k_start, &k_end;
};

// For inputs that an operator does not have.
inline const OptionalTensor kNotGiven;

// Returns the CUDA device of x, for a device guard. The operator is called for CUDA if any tensor is there, so x may be
// elsewhere.
inline int32_t cuda_device_of(const char* name, const Tensor& x) {
  FASTMAX_CHECK(x.is_cuda(), name, " is on ", device_name(x), ", and other arguments are on CUDA");
  return x.get_device_index();
}

inline void check_device(const char* name, const Tensor& x, const Tensor& q, const char* q_name = "q") {
  FASTMAX_CHECK(x.is_cuda() && x.get_device_index() == q.get_device_index(), name, " is on ", device_name(x), ", and ", q_name,
                " is on ", device_name(q));
}

inline void check_shape(const char* name, const Tensor& x, std::initializer_list<int64_t> shape) {
  const auto got = x.sizes();
  FASTMAX_CHECK(std::equal(got.begin(), got.end(), shape.begin(), shape.end()), name, " must have shape ",
                shape_text(shape), ", got ", shape_text(got));
}

// Checks q, k, v, mask, scale and causality of an attention operator, for the kernels and the PyTorch implementation.
inline void check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& attention_mask, double scale,
                            bool causal) {
  FASTMAX_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v must be 4-dimensional, got ", q.dim(), ", ",
                k.dim(), " and ", v.dim(), " dimensions");
  check_device("k", k, q);
  check_device("v", v, q);
  FASTMAX_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "q, k and v differ in dtype");
  FASTMAX_CHECK(q.size(3) > 0 && v.size(3) > 0, "q and v must have a head_dim of at least 1");
  const int64_t b = q.size(0), h = q.size(1), n = q.size(2), hk = k.size(1), m = k.size(2);
  check_shape("k", k, {b, hk, m, q.size(3)});
  check_shape("v", v, {b, hk, m, v.size(3)});
  FASTMAX_CHECK(hk > 0 ? h % hk == 0 : h == 0, "q's heads must be a multiple of k's, got ", h, " and ", hk);
  // Heads over the whole batch, and rounded-up token counts, are int.
  FASTMAX_CHECK(b <= INT_MAX && h <= INT_MAX && b * h <= INT_MAX, "q has too many heads: ", b, " x ", h);
  FASTMAX_CHECK(n <= INT_MAX / 2 && m <= INT_MAX / 2, "too many tokens: ", n, " queries, ", m, " keys");
  FASTMAX_CHECK(!causal || n <= m, "causal attention needs n <= m, got ", n, " queries and ", m, " keys");
  FASTMAX_CHECK(std::isfinite(scale) && scale > 0, "scale must be finite and > 0, got ", scale);
  if (attention_mask.has_value()) {
    check_device("attention_mask", *attention_mask, q);
    check_shape("attention_mask", *attention_mask, {b, m});
    FASTMAX_CHECK(attention_mask->scalar_type() == ScalarType::Bool, "attention_mask must be bool");
  }
}

// Checks an input with a number for every token of every head.
inline void check_per_token(const char* name, const OptionalTensor& x, ScalarType dtype, const char* dtype_name, int64_t heads,
                            int64_t tokens, const Tensor& q) {
  if (!x.has_value()) return;
  check_device(name, *x, q);
  check_shape(name, *x, {q.size(0), heads, tokens});
  FASTMAX_CHECK(x->scalar_type() == dtype, name, " must be ", dtype_name);
}

// Checks all inputs. Values of decays and bounds stay on the device. The caller must ensure that decays are finite and <= 0, or
// NaN; results are unspecified if bounds decrease.
inline void check_inputs(const AttentionInputs& x, double scale, bool causal) {
  check_attention(x.q, x.k, x.v, x.attention_mask, scale, causal);
  const int64_t hk = x.k.size(1), n = x.q.size(2), m = x.k.size(2);
  const bool wide = x.q.scalar_type() == ScalarType::Double;
  for (const auto& [name, tensor] : {std::pair("log_decay", &x.log_decay), std::pair("log_input_gate", &x.log_input_gate)}) {
    check_per_token(name, *tensor, wide ? ScalarType::Double : ScalarType::Float, wide ? "float64" : "float32", hk, m, x.q);
    FASTMAX_CHECK(causal || !tensor->has_value(), name, " needs causal = True");
  }
  check_per_token("k_start", x.k_start, ScalarType::Int, "int32", hk, n, x.q);
  check_per_token("k_end", x.k_end, ScalarType::Int, "int32", hk, n, x.q);
}

// Checks a tensor with a number per query: z, lse or a gradient of theirs.
inline void check_per_query(const char* name, const Tensor& x, const Tensor& q) {
  check_device(name, x, q);
  check_shape(name, x, {q.size(0), q.size(1), q.size(2)});
}

// Checks the forward's results and the gradient of the output.
inline void check_results(const Tensor& q, const Tensor& v, const Tensor& o, const Tensor& grad_o, const char* z_name, const Tensor& z) {
  for (const auto& [name, x] : {std::pair("o", &o), std::pair("grad_o", &grad_o)}) {
    check_device(name, *x, q);
    check_shape(name, *x, {q.size(0), q.size(1), q.size(2), v.size(3)});
    FASTMAX_CHECK(x->scalar_type() == q.scalar_type(), name, " must have q's dtype");
  }
  check_per_query(z_name, z, q);
}

// Checks the state of a direct call, for the kernels and the PyTorch implementation. q, k and v have been checked.
inline void check_state(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_state, const Tensor& k_sum, int64_t order,
                        const char* kv_state_name = "kv_state", const char* k_sum_name = "k_sum") {
  FASTMAX_CHECK(q.size(1) > 0, "q must have at least one head");
  FASTMAX_CHECK(order == 1 || order == 2, "p must be 1 or 2, got ", order);
  const int64_t b = k.size(0), hk = k.size(1), rows = decode_rows(static_cast<int>(k.size(3)), static_cast<int>(order));
  check_shape(kv_state_name, kv_state, {b, hk, rows, v.size(3)});
  check_shape(k_sum_name, k_sum, {b, hk, rows});
  const bool wide = q.scalar_type() == ScalarType::Double;
  for (const auto& [name, x] : {std::pair(kv_state_name, &kv_state), std::pair(k_sum_name, &k_sum)}) {
    check_device(name, *x, q);
    FASTMAX_CHECK(x->scalar_type() == (wide ? ScalarType::Double : ScalarType::Float), name, " must be ",
                    wide ? "float64" : "float32");
  }
}

// Checks a tensor that the kernels read as fp32.
inline void check_float(const char* name, const Tensor& x) {
  FASTMAX_CHECK(x.scalar_type() == ScalarType::Float, name, " must be float32");
}

}  // namespace fastmax
