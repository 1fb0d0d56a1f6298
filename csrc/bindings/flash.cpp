// fastmax_cuda::flash_forward, flash_backward and flash_backward_qkv (flash.h): like attention.cpp, for softmax.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <limits>
#include <tuple>
#include <utility>

#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/flash.h"
#include "bindings/layout.h"
#include "bindings/operands.h"
#include "bindings/run.h"
#include "bindings/torch_abi.h"
#include "quadratic/algorithm.h"

namespace fastmax {
namespace {

void check_window(Window window) {
  for (const auto& [name, bound] : {std::pair("left", window.left), std::pair("right", window.right)}) {
    FASTMAX_CHECK(bound >= -1, name, " must be at least -1 (no bound), got ", bound);
  }
}

}  // namespace

std::tuple<Tensor, Tensor> flash_forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const OptionalTensor& attention_mask,
                                         const OptionalTensor& log_decay, const OptionalTensor& k_start, const OptionalTensor& k_end,
                                         const OptionalTensor& log_input_gate, double scale, bool causal, int64_t left, int64_t right,
                                         bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q_in));
  const AttentionInputs inputs{q_in, k_in, v_in, attention_mask, log_decay, log_input_gate, k_start, k_end};
  check_inputs(inputs, scale, causal);
  check_window({left, right});
  check_kernels_cover(inputs);

  Tensor lse = empty_per_query(q_in);
  if (is_empty(q_in) || is_empty(k_in) || is_empty(v_in)) {
    return {zeros_like_layout(q_in, v_in.size(3)), torch::stable::fill_(lse, -std::numeric_limits<double>::infinity())};
  }

  const Operands x(inputs);
  const Results results(q_in, v_in, x, lse);
  FwdParams p{};
  x.fill(p, scale, causal, {left, right}, allow_tf32);
  results.fill(p);
  run("flash_forward", kFlashAlgorithm, p, q_in.get_device_index());
  return {results.o.result(), lse};
}

InputGradients flash_gradients(const Tensor& grad_o, const OptionalTensor& grad_lse, const AttentionInputs& inputs, const Tensor& o,
                               const Tensor& lse, double scale, bool causal, Window window, bool allow_tf32, bool wants_decay) {
  const auto& [q, k, v, attention_mask, log_decay, log_input_gate, k_start, k_end] = inputs;
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q));
  check_inputs(inputs, scale, causal);
  check_window(window);
  check_results(q, v, o, grad_o, "lse", lse);
  if (grad_lse.has_value()) check_per_query("grad_lse", *grad_lse, q);
  check_kernels_cover(inputs);
  check_float("lse", lse);
  if (grad_lse.has_value()) check_float("grad_lse", *grad_lse);
  if (is_empty(q) || is_empty(k) || is_empty(v)) return zero_gradients(inputs);

  const Operands x(inputs);
  const Gradients gradients(q, k, v, x, o, grad_o, lse, grad_lse, wants_decay);
  BwdParams p{};
  x.fill(p, scale, causal, window, allow_tf32);
  gradients.fill(p);
  run("flash_backward", kFlashAlgorithm, p, q.get_device_index());
  return gradients.results();
}

namespace {

template <bool kOfDecay>
GradientResults<kOfDecay> flash_backward(const Tensor& grad_o, const OptionalTensor& grad_lse, const Tensor& q, const Tensor& k,
                                         const Tensor& v, const Tensor& o, const Tensor& lse, const OptionalTensor& attention_mask,
                                         const OptionalTensor& log_decay, const OptionalTensor& k_start, const OptionalTensor& k_end,
                                         const OptionalTensor& log_input_gate, double scale, bool causal, int64_t left, int64_t right,
                                         bool allow_tf32) {
  return as_results<kOfDecay>(flash_gradients(grad_o, grad_lse, {q, k, v, attention_mask, log_decay, log_input_gate, k_start, k_end}, o,
                                              lse, scale, causal,
                                              {left, right}, allow_tf32, kOfDecay));
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("flash_forward", TORCH_BOX(&fastmax::flash_forward));
  m.impl("flash_backward", TORCH_BOX(&fastmax::flash_backward<true>));
  m.impl("flash_backward_qkv", TORCH_BOX(&fastmax::flash_backward<false>));
}
