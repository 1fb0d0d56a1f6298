// fastmax_cuda::forward, backward and backward_qkv: checks, params, choice of the algorithm. Python declares the schemas (fastmax/ops/).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>
#include <tuple>

#include "bindings/attention.h"
#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/layout.h"
#include "bindings/operands.h"
#include "bindings/run.h"
#include "bindings/torch_abi.h"

namespace fastmax {
namespace {

// Dropout noise that multiplies the output.
struct Noise {
  OptionalTensor noise;

  Noise(const OptionalTensor& x, const Tensor& q) {
    if (x.has_value()) noise = readable(x->scalar_type() == q.scalar_type() ? *x : dense_copy(*x, q.scalar_type()));
  }

  void fill(AttentionParams& p, double dropout) const {
    p.noise = noise.has_value() ? noise->data_ptr() : nullptr;
    p.noise_stride = noise.has_value() ? stride_of(*noise) : Stride{};
    p.dropout = static_cast<float>(dropout);
  }
};

std::tuple<Tensor, Tensor> forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const OptionalTensor& attention_mask,
                                   const OptionalTensor& drop_noise, const OptionalTensor& log_decay, const OptionalTensor& k_start,
                                   const OptionalTensor& k_end, const OptionalTensor& log_input_gate,
                                   double scale, double a0, double a1, double a2, int64_t order, bool causal, double dropout,
                                   const std::string& algorithm, bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q_in));
  const AttentionInputs inputs{q_in, k_in, v_in, attention_mask, log_decay, log_input_gate, k_start, k_end};
  check_inputs(inputs, scale, causal);
  check_options(q_in, v_in, drop_noise, order, algorithm);
  check_kernels_cover(inputs);
  const Algorithm& chosen = choose(algorithm, inputs, causal, order);

  Tensor z = empty_per_query(q_in);
  if (is_empty(q_in) || is_empty(k_in) || is_empty(v_in)) {
    return {zeros_like_layout(q_in, v_in.size(3)), torch::stable::zero_(z)};
  }

  const Operands x(inputs);
  const Noise noise(drop_noise, q_in);
  const Results results(q_in, v_in, x, z);
  FwdParams p{};
  x.fill(p, scale, causal, kNoWindow, allow_tf32);
  noise.fill(p, dropout);
  Polynomial{a0, a1, a2, order}.fill(p);
  results.fill(p);
  run("forward", chosen, p, q_in.get_device_index());
  return {results.o.result(), z};
}

template <bool kOfDecay>
GradientResults<kOfDecay> backward(
    const Tensor& grad_o_in, const OptionalTensor& grad_z, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& o_in,
    const Tensor& z, const OptionalTensor& attention_mask, const OptionalTensor& drop_noise, const OptionalTensor& log_decay,
    const OptionalTensor& k_start, const OptionalTensor& k_end, const OptionalTensor& log_input_gate, double scale, double a0, double a1,
    double a2, int64_t order, bool causal, double dropout, const std::string& algorithm, bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q_in));
  const AttentionInputs inputs{q_in, k_in, v_in, attention_mask, log_decay, log_input_gate, k_start, k_end};
  check_inputs(inputs, scale, causal);
  check_options(q_in, v_in, drop_noise, order, algorithm);
  check_results(q_in, v_in, o_in, grad_o_in, "z", z);
  if (grad_z.has_value()) check_per_query("grad_z", *grad_z, q_in);
  check_kernels_cover(inputs);
  const Algorithm& chosen = choose(algorithm, inputs, causal, order);
  check_float("z", z);
  if (grad_z.has_value()) check_float("grad_z", *grad_z);

  if (is_empty(q_in) || is_empty(k_in) || is_empty(v_in)) return as_results<kOfDecay>(zero_gradients(inputs));

  const Operands x(inputs);
  const Noise noise(drop_noise, q_in);
  const Gradients gradients(q_in, k_in, v_in, x, o_in, grad_o_in, z, grad_z, kOfDecay);
  BwdParams p{};
  x.fill(p, scale, causal, kNoWindow, allow_tf32);
  noise.fill(p, dropout);
  Polynomial{a0, a1, a2, order}.fill(p);
  gradients.fill(p);
  run("backward", chosen, p, q_in.get_device_index());
  return as_results<kOfDecay>(gradients.results());
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("forward", TORCH_BOX(&fastmax::forward));
  m.impl("backward", TORCH_BOX(&fastmax::backward<true>));
  m.impl("backward_qkv", TORCH_BOX(&fastmax::backward<false>));
}
