// fastmax_cuda::decode_step, decode_step_ and buffered_step_: one token of generation (decode.h, buffered.h).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <tuple>

#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/debug.h"
#include "bindings/layout.h"
#include "bindings/torch_abi.h"
#include "core/device.h"
#include "decode/decode.h"
#include "decode/buffered.h"

namespace fastmax {
namespace {

TokenStride token_stride(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(3)}; }

void check_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_state, const Tensor& k_sum,
                const OptionalTensor& attention_mask, const OptionalTensor& log_decay, const OptionalTensor& log_input_gate, double scale,
                int64_t order) {
  check_inputs({q, k, v, attention_mask, log_decay, log_input_gate, kNotGiven, kNotGiven}, scale, /*causal=*/true);
  FASTMAX_CHECK(q.size(2) == 1 && k.size(2) == 1, "q, k and v must hold one token, got ", q.size(2), " queries and ",
                  k.size(2), " keys");
  check_state(q, k, v, kv_state, k_sum, order);
}

// Checks that the kernel computes this call.
void check_covered(const Tensor& q, const Tensor& v) {
  check_kernels_run_on("q", q);
  FASTMAX_CHECK(std::max(q.size(3), v.size(3)) <= kMaxDecodeHeadDim, "q and v must have a head_dim up to ", kMaxDecodeHeadDim, ", got ",
                q.size(3), " and ", v.size(3));
}

// Uninitialised, (b, h, 1, dv).
Tensor empty_output(const Tensor& q, const Tensor& v) {
  return empty_contiguous({q.size(0), q.size(1), 1, v.size(3)}, q.scalar_type(), q.get_device_index());
}

DecodeParams params_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_state, const Tensor& k_sum,
                       const Tensor& new_kv_state, const Tensor& new_k_sum, const OptionalTensor& attention_mask,
                       const OptionalTensor& log_decay, const OptionalTensor& log_input_gate, const Tensor& o, double scale, double a0,
                       double a1, double a2, int64_t order) {
  const int64_t b = q.size(0), h = q.size(1), hk = k.size(1), d = q.size(3), dv = v.size(3);
  const bool has_mask = attention_mask.has_value(), has_decay = log_decay.has_value(), has_gate = log_input_gate.has_value();
  DecodeParams p{};
  p.b = static_cast<int>(b), p.h = static_cast<int>(h), p.hk = static_cast<int>(hk);
  p.d = static_cast<int>(d), p.dv = static_cast<int>(dv), p.order = static_cast<int>(order);
  p.math = math_mode(q.scalar_type(), /*allow_tf32=*/false);
  p.scale = static_cast<float>(scale), p.a0 = static_cast<float>(a0), p.a1 = static_cast<float>(a1), p.a2 = static_cast<float>(a2);
  p.sm_count = get_device(q.get_device_index()).sm_count;
  p.q = q.data_ptr(), p.q_stride = token_stride(q);
  p.k = k.data_ptr(), p.k_stride = token_stride(k);
  p.v = v.data_ptr(), p.v_stride = token_stride(v);
  p.attention_mask = has_mask ? static_cast<const uint8_t*>(attention_mask->data_ptr()) : nullptr;
  p.mask_stride = has_mask ? attention_mask->stride(0) : 0;
  p.log_decay = has_decay ? static_cast<const float*>(log_decay->data_ptr()) : nullptr;
  p.decay_batch_stride = has_decay ? log_decay->stride(0) : 0, p.decay_head_stride = has_decay ? log_decay->stride(1) : 0;
  p.log_input_gate = has_gate ? static_cast<const float*>(log_input_gate->data_ptr()) : nullptr;
  p.gate_batch_stride = has_gate ? log_input_gate->stride(0) : 0, p.gate_head_stride = has_gate ? log_input_gate->stride(1) : 0;
  p.kv_state = static_cast<const float*>(kv_state.data_ptr()), p.new_kv_state = static_cast<float*>(new_kv_state.data_ptr());
  p.k_sum = static_cast<const float*>(k_sum.data_ptr()), p.new_k_sum = static_cast<float*>(new_k_sum.data_ptr());
  p.o = o.data_ptr();
  return p;
}

void print_kernel(const char* name, const DecodeParams& p) {
  if (!is_debugging()) return;
  std::fprintf(stderr, "fastmax::%s: b %d, h %d, hk %d, d %d, dv %d, order %d\n", name, p.b, p.h, p.hk, p.d, p.dv, p.order);
}

// Writes the new state to new_kv_state and new_k_sum, which may be kv_state and k_sum themselves. Returns o.
Tensor advance(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_state, const Tensor& k_sum,
               const Tensor& new_kv_state, const Tensor& new_k_sum, const OptionalTensor& attention_mask,
               const OptionalTensor& log_decay, const OptionalTensor& log_input_gate, double scale, double a0, double a1, double a2,
               int64_t order) {
  const Tensor o = empty_output(q, v);
  const DecodeParams p =
      params_of(q, k, v, kv_state, k_sum, new_kv_state, new_k_sum, attention_mask, log_decay, log_input_gate, o, scale, a0, a1, a2, order);
  print_kernel("decode_step: decode_sm80", p);
  if (p.b > 0) launch_decode(p, current_stream(q.get_device_index()));
  return o;
}

std::tuple<Tensor, Tensor, Tensor> decode_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_state_in,
                                               const Tensor& k_sum_in, const OptionalTensor& attention_mask,
                                               const OptionalTensor& log_decay, const OptionalTensor& log_input_gate, double scale,
                                               double a0, double a1, double a2, int64_t order) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q));
  check_step(q, k, v, kv_state_in, k_sum_in, attention_mask, log_decay, log_input_gate, scale, order);
  check_covered(q, v);
  const Tensor kv_state = dense(kv_state_in), k_sum = dense(k_sum_in);
  const Tensor new_kv_state = torch::stable::empty_like(kv_state), new_k_sum = torch::stable::empty_like(k_sum);
  const Tensor o = advance(q, k, v, kv_state, k_sum, new_kv_state, new_k_sum, attention_mask, log_decay, log_input_gate, scale, a0, a1, a2,
                           order);
  return {o, new_kv_state, new_k_sum};
}

Tensor decode_step_in_place(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_state, const Tensor& k_sum,
                            const OptionalTensor& attention_mask, const OptionalTensor& log_decay, const OptionalTensor& log_input_gate,
                            double scale, double a0, double a1, double a2, int64_t order) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q));
  check_step(q, k, v, kv_state, k_sum, attention_mask, log_decay, log_input_gate, scale, order);
  FASTMAX_CHECK(kv_state.is_contiguous() && k_sum.is_contiguous(),
                  "kv_state and k_sum must be contiguous to be written in place");
  FASTMAX_CHECK(!overlap(kv_state, k_sum), "kv_state and k_sum must not overlap to be written in place");
  for (const Tensor& x : {q, k, v}) {
    FASTMAX_CHECK(!overlap(kv_state, x) && !overlap(k_sum, x),
                    "q, k and v must not overlap kv_state and k_sum, which are written in place");
  }
  for (const auto& [name, x] : {std::pair("log_decay", &log_decay), std::pair("log_input_gate", &log_input_gate)}) {
    FASTMAX_CHECK(!x->has_value() || (!overlap(kv_state, **x) && !overlap(k_sum, **x)), name,
                  " must not overlap kv_state and k_sum, which are written in place");
  }
  check_covered(q, v);
  return advance(q, k, v, kv_state, k_sum, kv_state, k_sum, attention_mask, log_decay, log_input_gate, scale, a0, a1, a2, order);
}

// The buffers of local and buffered tokens in a state.
struct LocalTokens {
  const Tensor &keys, &values, &mask, &decays, &buffered;
  const OptionalTensor& gates;
};

void check_written(const char* name, const Tensor& x, const Tensor& q, ScalarType dtype) {
  check_device(name, x, q);
  FASTMAX_CHECK(x.scalar_type() == dtype, name, " has the wrong dtype for q's");
  FASTMAX_CHECK(x.is_contiguous(), name, " must be contiguous to be written in place");
}

void check_local(const LocalTokens& local, const Tensor& q, const Tensor& k, const Tensor& v, int64_t exact_window) {
  const int64_t b = k.size(0), hk = k.size(1);
  FASTMAX_CHECK(local.keys.dim() == 4, "local_keys must be 4-dimensional, got ", local.keys.dim(), " dimensions");
  const int64_t places = local.keys.size(2);
  FASTMAX_CHECK(exact_window >= 0 && exact_window < places, "exact_window must be from 0 to the places of local_keys, ", places,
                ", less 1, got ", exact_window);
  check_shape("local_keys", local.keys, {b, hk, places, k.size(3)});
  check_shape("local_values", local.values, {b, hk, places, v.size(3)});
  check_shape("local_mask", local.mask, {b, hk, places});
  check_shape("local_decays", local.decays, {b, hk, places});
  check_shape("buffered", local.buffered, {b, hk});
  const ScalarType wide = q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const std::tuple<const char*, const Tensor*, ScalarType> expected[] = {{"local_keys", &local.keys, q.scalar_type()},
                                                                         {"local_values", &local.values, q.scalar_type()},
                                                                         {"local_mask", &local.mask, ScalarType::Bool},
                                                                         {"local_decays", &local.decays, wide},
                                                                         {"buffered", &local.buffered, ScalarType::Int}};
  for (const auto& [name, x, dtype] : expected) check_written(name, *x, q, dtype);
  if (local.gates.has_value()) {
    check_shape("local_gates", *local.gates, {b, hk, places});
    check_written("local_gates", *local.gates, q, wide);
  }
}

std::tuple<Tensor, Tensor> buffered_step_in_place(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_state, const Tensor& k_sum,
                              const Tensor& local_keys, const Tensor& local_values, const Tensor& local_mask, const Tensor& local_decays,
                              const Tensor& buffered, const OptionalTensor& local_gates, const OptionalTensor& attention_mask,
                              const OptionalTensor& log_decay, const OptionalTensor& log_input_gate, int64_t exact_window, double scale, double a0, double a1, double a2, int64_t order) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q));
  check_step(q, k, v, kv_state, k_sum, attention_mask, log_decay, log_input_gate, scale, order);
  check_local({local_keys, local_values, local_mask, local_decays, buffered, local_gates}, q, k, v, exact_window);
  FASTMAX_CHECK(!log_input_gate.has_value() || local_gates.has_value(), "log_input_gate needs local_gates, got None");
  FASTMAX_CHECK(kv_state.is_contiguous() && k_sum.is_contiguous(),
                  "kv_state and k_sum must be contiguous to be written in place");
  const Tensor* const written[] = {&kv_state, &k_sum, &local_keys, &local_values, &local_mask, &local_decays, &buffered,
                                   local_gates.has_value() ? &*local_gates : nullptr};
  const Tensor* const read[] = {&q, &k, &v, attention_mask.has_value() ? &*attention_mask : nullptr,
                                log_decay.has_value() ? &*log_decay : nullptr, log_input_gate.has_value() ? &*log_input_gate : nullptr};
  for (const Tensor* const* x = std::begin(written); x != std::end(written); ++x) {
    if (*x == nullptr) continue;
    for (const Tensor* const* y = x + 1; y != std::end(written); ++y) {
      FASTMAX_CHECK(*y == nullptr || !overlap(**x, **y), "the tensors of the state must not overlap to be written in place");
    }
    for (const Tensor* y : read) {
      FASTMAX_CHECK(y == nullptr || !overlap(**x, *y), "the token must not overlap the state, which is written in place");
    }
  }
  const int64_t places = local_keys.size(2);
  check_covered(q, v);
  FASTMAX_CHECK(places <= kMaxBufferedPlaces, "local_keys must have at most ", kMaxBufferedPlaces, " places, got ", places);
  const int device = q.get_device_index();
  const Tensor o = empty_output(q, v), lse = empty_contiguous({q.size(0), q.size(1), 1}, ScalarType::Float, device);
  BufferedParams p{};
  p.step = params_of(q, k, v, kv_state, k_sum, kv_state, k_sum, attention_mask, log_decay, log_input_gate, o, scale, a0, a1, a2, order);
  p.exact_window = static_cast<int>(exact_window), p.flush_interval = static_cast<int>(places - exact_window);
  p.local_keys = local_keys.data_ptr(), p.local_values = local_values.data_ptr();
  p.local_mask = static_cast<uint8_t*>(local_mask.data_ptr()), p.local_decays = static_cast<float*>(local_decays.data_ptr());
  p.local_gates = local_gates.has_value() ? static_cast<float*>(local_gates->data_ptr()) : nullptr;
  p.buffered = static_cast<int*>(buffered.data_ptr()), p.lse = static_cast<float*>(lse.data_ptr());
  print_kernel("buffered_step_: buffered_sm80", p.step);
  if (p.step.b == 0) return {o, lse};
  const Tensor workspace = allocate_workspace(buffered_workspace_bytes(p), device);
  p.workspace = workspace.data_ptr();
  launch_buffered(p, current_stream(device));
  return {o, lse};
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("decode_step", TORCH_BOX(&fastmax::decode_step));
  m.impl("decode_step_", TORCH_BOX(&fastmax::decode_step_in_place));
  m.impl("buffered_step_", TORCH_BOX(&fastmax::buffered_step_in_place));
}
