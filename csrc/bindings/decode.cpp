// fastmax::decode_step and decode_step_ for CUDA tensors, one token of generation (decode.h); and fastmax::prefill, many tokens that
// continue from the same state, by the linear algorithm.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdio>
#include <tuple>
#include <utility>

#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/debug.h"
#include "bindings/layout.h"
#include "bindings/operands.h"
#include "bindings/run.h"
#include "bindings/torch_abi.h"
#include "core/device.h"
#include "decode/decode.h"
#include "linear/algorithm.h"

namespace fastmax {
namespace {

TokenStride token_stride(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(3)}; }

// The state of a direct call, for the kernels and for the PyTorch implementation behind them; q, k and v were checked.
void check_state(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& values, const Tensor& weights, int64_t order) {
  FASTMAX_CHECK(q.size(1) > 0, "q must have at least one head");
  FASTMAX_CHECK(order == 1 || order == 2, "p must be 1 or 2, got ", order);
  const int64_t b = k.size(0), hk = k.size(1), rows = decode_rows(static_cast<int>(k.size(3)), static_cast<int>(order));
  check_shape("values", values, {b, hk, rows, v.size(3)});
  check_shape("weights", weights, {b, hk, rows});
  const bool wide = q.scalar_type() == ScalarType::Double;
  for (const auto& [name, x] : {std::pair("values", &values), std::pair("weights", &weights)}) {
    check_device(name, *x, q);
    FASTMAX_CHECK(x->scalar_type() == (wide ? ScalarType::Double : ScalarType::Float), name, " must be ",
                    wide ? "float64" : "float32");
  }
}

void check_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& values, const Tensor& weights,
                const OptionalTensor& key_padding_mask, double scale, int64_t order) {
  check_attention(q, k, v, key_padding_mask, scale, /*causal=*/true);
  FASTMAX_CHECK(q.size(2) == 1 && k.size(2) == 1, "q, k and v must hold one token, got ", q.size(2), " queries and ",
                  k.size(2), " keys");
  check_state(q, k, v, values, weights, order);
}

// Whether the kernel computes this call.
bool is_covered(const Tensor& q, const Tensor& v) {
  return kernels_run_on(q) && std::max(q.size(3), v.size(3)) <= kMaxDecodeHeadDim;
}

// The state is written to new_values and new_weights, which may be values and weights themselves; returns o.
Tensor advance(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& values, const Tensor& weights,
               const Tensor& new_values, const Tensor& new_weights, const OptionalTensor& key_padding_mask, double scale, double a0,
               double a1, double a2, int64_t order) {
  const int64_t b = q.size(0), h = q.size(1), hk = k.size(1), d = q.size(3), dv = v.size(3);
  const bool has_mask = key_padding_mask.has_value();
  DecodeParams p{};
  p.b = static_cast<int>(b), p.h = static_cast<int>(h), p.hk = static_cast<int>(hk);
  p.d = static_cast<int>(d), p.dv = static_cast<int>(dv), p.order = static_cast<int>(order);
  p.math = math_mode(q.scalar_type(), /*allow_tf32=*/false);
  p.scale = static_cast<float>(scale), p.a0 = static_cast<float>(a0), p.a1 = static_cast<float>(a1), p.a2 = static_cast<float>(a2);
  p.sm_count = get_device(q.get_device_index()).sm_count;
  p.q = q.data_ptr(), p.q_stride = token_stride(q);
  p.k = k.data_ptr(), p.k_stride = token_stride(k);
  p.v = v.data_ptr(), p.v_stride = token_stride(v);
  p.key_padding_mask = has_mask ? static_cast<const uint8_t*>(key_padding_mask->data_ptr()) : nullptr;
  p.mask_stride = has_mask ? key_padding_mask->stride(0) : 0;
  p.values = static_cast<const float*>(values.data_ptr()), p.new_values = static_cast<float*>(new_values.data_ptr());
  p.weights = static_cast<const float*>(weights.data_ptr()), p.new_weights = static_cast<float*>(new_weights.data_ptr());

  const Tensor o = empty_strided({b, h, 1, dv}, {h * dv, dv, dv, 1}, q.scalar_type(), q.get_device_index());
  p.o = o.data_ptr();
  if (is_debugging()) {
    std::fprintf(stderr, "fastmax::decode_step: decode_sm80: b %d, h %d, hk %d, d %d, dv %d, order %d\n", p.b, p.h, p.hk, p.d, p.dv,
                 p.order);
  }
  if (b > 0 && d > 0 && dv > 0) launch_decode(p, current_stream(q.get_device_index()));
  return o;
}

std::tuple<Tensor, Tensor, Tensor> decode_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& values_in,
                                               const Tensor& weights_in, const OptionalTensor& key_padding_mask, double scale,
                                               double a0, double a1, double a2, int64_t order) {
  check_cuda_tensor("q", q);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  check_step(q, k, v, values_in, weights_in, key_padding_mask, scale, order);
  if (!is_covered(q, v)) {
    const auto [o, new_values, new_weights] = call_operator<3>("fastmax::eager_decode_step", q, k, v, values_in, weights_in,
                                                               key_padding_mask, scale, a0, a1, a2, order);
    return {o, new_values, new_weights};
  }
  const Tensor values = dense(values_in), weights = dense(weights_in);
  const Tensor new_values = torch::stable::empty_like(values), new_weights = torch::stable::empty_like(weights);
  const Tensor o = advance(q, k, v, values, weights, new_values, new_weights, key_padding_mask, scale, a0, a1, a2, order);
  return {o, new_values, new_weights};
}

Tensor decode_step_in_place(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& values, const Tensor& weights,
                            const OptionalTensor& key_padding_mask, double scale, double a0, double a1, double a2, int64_t order) {
  check_cuda_tensor("q", q);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  check_step(q, k, v, values, weights, key_padding_mask, scale, order);
  FASTMAX_CHECK(values.is_contiguous() && weights.is_contiguous(),
                  "values and weights must be contiguous to be written in place");
  FASTMAX_CHECK(!overlap(values, weights), "values and weights must not overlap to be written in place");
  for (const Tensor& x : {q, k, v}) {
    FASTMAX_CHECK(!overlap(values, x) && !overlap(weights, x),
                    "q, k and v must not overlap values and weights, which are written in place");
  }
  if (!is_covered(q, v)) {
    return call_operator<1>("fastmax::eager_decode_step_", q, k, v, values, weights, key_padding_mask, scale, a0, a1, a2, order)[0];
  }
  return advance(q, k, v, values, weights, values, weights, key_padding_mask, scale, a0, a1, a2, order);
}

std::tuple<Tensor, Tensor, Tensor> prefill(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                           const OptionalTensor& key_padding_mask, const OptionalTensor& log_decay,
                                           const OptionalTensor& first_key, const Tensor& values_in, const Tensor& weights_in,
                                           double scale, double a0, double a1, double a2, int64_t order, bool allow_tf32) {
  check_cuda_tensor("q", q_in);
  const int device = q_in.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const OptionalTensor none;
  const AttentionInputs inputs{q_in, k_in, v_in, key_padding_mask, none, log_decay, first_key, none};
  check_inputs(inputs, scale, /*causal=*/true);
  FASTMAX_CHECK(q_in.size(2) == k_in.size(2), "k and v must have q's number of tokens ", q_in.size(2), ", got ", k_in.size(2));
  check_state(q_in, k_in, v_in, values_in, weights_in, order);
  if (order != 2 || !has_attention_kernels(inputs, kLinearAlgorithm, /*causal=*/true)) {
    const auto [o, new_values, new_weights] =
        call_operator<3>("fastmax::eager_prefill", q_in, k_in, v_in, key_padding_mask, log_decay, first_key, values_in, weights_in,
                         scale, a0, a1, a2, order, allow_tf32);
    return {o, new_values, new_weights};
  }
  if (is_empty(q_in)) {
    return {empty_like_layout(q_in, v_in.size(3)), dense_copy(values_in, ScalarType::Float), dense_copy(weights_in, ScalarType::Float)};
  }

  const Tensor values = dense(values_in), weights = dense(weights_in);
  const Tensor new_values = empty_dense(values, ScalarType::Float), new_weights = empty_dense(weights, ScalarType::Float);
  const Operands x(inputs);
  const Results results(q_in, v_in, x, empty_per_query(q_in));
  FwdParams p{};
  x.fill(p, scale, /*causal=*/true, kNoWindow, allow_tf32);
  p.a0 = static_cast<float>(a0), p.a1 = static_cast<float>(a1), p.a2 = static_cast<float>(a2);
  p.order = static_cast<int>(order);
  results.fill(p);
  p.state = {static_cast<const float*>(values.data_ptr()), static_cast<const float*>(weights.data_ptr()),
             static_cast<float*>(new_values.data_ptr()),   static_cast<float*>(new_weights.data_ptr()),
             static_cast<int>(q_in.size(3)),               static_cast<int>(v_in.size(3))};
  run("prefill", kLinearFromState, p, device);
  return {results.o.result(), new_values, new_weights};
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax, CUDA, m) {
  m.impl("decode_step", TORCH_BOX(&fastmax::decode_step));
  m.impl("decode_step_", TORCH_BOX(&fastmax::decode_step_in_place));
  m.impl("prefill", TORCH_BOX(&fastmax::prefill));
}
