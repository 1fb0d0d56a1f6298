// fastmax::decode_step and decode_step_ for CUDA tensors: one token of generation (decode.h).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <initializer_list>
#include <tuple>

#include "decode/decode.h"
#include "core/device.h"
#include "bindings/coverage.h"
#include "bindings/layout.h"
#include "bindings/torch_abi.h"

namespace fastmax {
namespace {

TokenStride token_stride(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(3)}; }

bool is_state(const Tensor& x, const Tensor& q, std::initializer_list<int64_t> sizes) {
  if (x.scalar_type() != ScalarType::Float || x.get_device_index() != q.get_device_index() || !x.is_contiguous() ||
      x.dim() != static_cast<int64_t>(sizes.size())) {
    return false;
  }
  int64_t i = 0;
  for (const int64_t size : sizes) {
    if (x.size(i++) != size) return false;
  }
  return true;
}

// Whether the kernel computes this call.
bool is_covered(const Tensor& q, const Tensor& v) {
  return kernels_run_on(q) && std::max(q.size(3), v.size(3)) <= kMaxDecodeHeadDim;
}

// The memory that a tensor reaches, in bytes.
struct Extent {
  const char* begin;
  const char* end;
};

Extent extent(const Tensor& x) {
  int64_t last = 0;
  for (int64_t i = 0; i < x.dim(); ++i) last += (x.size(i) - 1) * x.stride(i);
  const char* begin = static_cast<const char*>(x.data_ptr());
  return {begin, x.numel() == 0 ? begin : begin + (last + 1) * x.element_size()};
}

bool overlap(const Tensor& x, const Tensor& y) {
  const Extent a = extent(x), b = extent(y);
  return a.begin < b.end && b.begin < a.end;
}

// The state is written to new_values and new_weights, which may be values and weights themselves; returns o.
Tensor advance(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& values, const Tensor& weights,
               const Tensor& new_values, const Tensor& new_weights, const OptionalTensor& key_padding_mask, double scale, double a0,
               double a1, double a2, int64_t order) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "fastmax: q, k and v must be 4-dimensional");
  STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "fastmax: q, k and v differ in dtype");
  STD_TORCH_CHECK(k.get_device_index() == q.get_device_index() && v.get_device_index() == q.get_device_index(),
                  "fastmax: q, k and v are on different devices");
  const int64_t b = q.size(0), h = q.size(1), hk = k.size(1), d = q.size(3), dv = v.size(3);
  STD_TORCH_CHECK(q.size(2) == 1 && k.size(2) == 1 && v.size(2) == 1, "fastmax: q, k and v must hold one token");
  STD_TORCH_CHECK(k.size(0) == b && v.size(0) == b && v.size(1) == hk && k.size(3) == d && hk > 0 && h > 0 && h % hk == 0,
                  "fastmax: shapes of q, k and v do not match");
  STD_TORCH_CHECK(order == 1 || order == 2, "fastmax: p must be 1 or 2, got ", order);
  const int64_t rows = decode_rows(static_cast<int>(d), static_cast<int>(order));
  STD_TORCH_CHECK(is_state(values, q, {b, hk, rows, dv}) && is_state(weights, q, {b, hk, rows}),
                  "fastmax: values and weights must be float32 of shape (", b, ", ", hk, ", ", rows, ", ", dv, ") and (", b,
                  ", ", hk, ", ", rows, ")");
  const bool has_mask = key_padding_mask.has_value();
  STD_TORCH_CHECK(!has_mask || (key_padding_mask->dim() == 2 && key_padding_mask->size(0) == b && key_padding_mask->size(1) == 1 &&
                                key_padding_mask->scalar_type() == ScalarType::Bool &&
                                key_padding_mask->get_device_index() == q.get_device_index()),
                  "fastmax: key_padding_mask must be bool of shape (batch, 1)");

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
  if (b > 0 && d > 0 && dv > 0) launch_decode(p, current_stream(q.get_device_index()));
  return o;
}

std::tuple<Tensor, Tensor, Tensor> decode_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& values_in,
                                               const Tensor& weights_in, const OptionalTensor& key_padding_mask, double scale,
                                               double a0, double a1, double a2, int64_t order) {
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
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
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  if (!is_covered(q, v)) {
    return call_operator<1>("fastmax::eager_decode_step_", q, k, v, values, weights, key_padding_mask, scale, a0, a1, a2, order)[0];
  }
  STD_TORCH_CHECK(values.is_contiguous() && weights.is_contiguous(),
                  "fastmax: values and weights must be contiguous to be written in place");
  STD_TORCH_CHECK(!overlap(values, weights), "fastmax: values and weights must not overlap to be written in place");
  for (const Tensor& x : {q, k, v}) {
    STD_TORCH_CHECK(!overlap(values, x) && !overlap(weights, x),
                    "fastmax: q, k and v must not overlap values and weights, which are written in place");
  }
  return advance(q, k, v, values, weights, values, weights, key_padding_mask, scale, a0, a1, a2, order);
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax, CUDA, m) {
  m.impl("decode_step", TORCH_BOX(&fastmax::decode_step));
  m.impl("decode_step_", TORCH_BOX(&fastmax::decode_step_in_place));
}
