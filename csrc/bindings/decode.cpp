// fastmax::decode_step and decode_step_ for CUDA tensors: one token of generation (decode.h).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdio>
#include <tuple>

#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/debug.h"
#include "bindings/layout.h"
#include "bindings/torch_abi.h"
#include "core/device.h"
#include "decode/decode.h"

namespace fastmax {
namespace {

TokenStride token_stride(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(3)}; }

void check_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& values, const Tensor& weights,
                const OptionalTensor& key_padding_mask, const OptionalTensor& log_decay, double scale, int64_t order) {
  const OptionalTensor none;
  check_inputs({q, k, v, key_padding_mask, none, log_decay, none, none}, scale, /*causal=*/true);
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
               const Tensor& new_values, const Tensor& new_weights, const OptionalTensor& key_padding_mask,
               const OptionalTensor& log_decay, double scale, double a0, double a1, double a2, int64_t order) {
  const int64_t b = q.size(0), h = q.size(1), hk = k.size(1), d = q.size(3), dv = v.size(3);
  const bool has_mask = key_padding_mask.has_value(), has_decay = log_decay.has_value();
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
  p.log_decay = has_decay ? static_cast<const float*>(log_decay->data_ptr()) : nullptr;
  p.decay_batch_stride = has_decay ? log_decay->stride(0) : 0, p.decay_head_stride = has_decay ? log_decay->stride(1) : 0;
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
                                               const Tensor& weights_in, const OptionalTensor& key_padding_mask,
                                               const OptionalTensor& log_decay, double scale, double a0, double a1, double a2,
                                               int64_t order) {
  check_cuda_tensor("q", q);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  check_step(q, k, v, values_in, weights_in, key_padding_mask, log_decay, scale, order);
  if (!is_covered(q, v)) {
    const auto [o, new_values, new_weights] = call_operator<3>("fastmax::eager_decode_step", q, k, v, values_in, weights_in,
                                                               key_padding_mask, log_decay, scale, a0, a1, a2, order);
    return {o, new_values, new_weights};
  }
  const Tensor values = dense(values_in), weights = dense(weights_in);
  const Tensor new_values = torch::stable::empty_like(values), new_weights = torch::stable::empty_like(weights);
  const Tensor o = advance(q, k, v, values, weights, new_values, new_weights, key_padding_mask, log_decay, scale, a0, a1, a2, order);
  return {o, new_values, new_weights};
}

Tensor decode_step_in_place(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& values, const Tensor& weights,
                            const OptionalTensor& key_padding_mask, const OptionalTensor& log_decay, double scale, double a0,
                            double a1, double a2, int64_t order) {
  check_cuda_tensor("q", q);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  check_step(q, k, v, values, weights, key_padding_mask, log_decay, scale, order);
  FASTMAX_CHECK(values.is_contiguous() && weights.is_contiguous(),
                  "values and weights must be contiguous to be written in place");
  FASTMAX_CHECK(!overlap(values, weights), "values and weights must not overlap to be written in place");
  for (const Tensor& x : {q, k, v}) {
    FASTMAX_CHECK(!overlap(values, x) && !overlap(weights, x),
                    "q, k and v must not overlap values and weights, which are written in place");
  }
  FASTMAX_CHECK(!log_decay.has_value() || (!overlap(values, *log_decay) && !overlap(weights, *log_decay)),
                  "log_decay must not overlap values and weights, which are written in place");
  if (!is_covered(q, v)) {
    return call_operator<1>("fastmax::eager_decode_step_", q, k, v, values, weights, key_padding_mask, log_decay, scale, a0, a1, a2,
                            order)[0];
  }
  return advance(q, k, v, values, weights, values, weights, key_padding_mask, log_decay, scale, a0, a1, a2, order);
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax, CUDA, m) {
  m.impl("decode_step", TORCH_BOX(&fastmax::decode_step));
  m.impl("decode_step_", TORCH_BOX(&fastmax::decode_step_in_place));
}
