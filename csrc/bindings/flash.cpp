// fastmax_cuda::flash_forward and fastmax_cuda::flash_backward (flash.h): like attention.cpp, for softmax.

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

void check_window(int64_t left, int64_t right) {
  for (const auto& [name, bound] : {std::pair("left", left), std::pair("right", right)}) {
    FASTMAX_CHECK(bound >= -1, name, " must be at least -1 (no bound), got ", bound);
  }
}

}  // namespace

std::tuple<Tensor, Tensor> flash_forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                         const OptionalTensor& attention_mask, const OptionalTensor& log_decay,
                                         const OptionalTensor& k_start, const OptionalTensor& k_end, double scale, bool causal,
                                         int64_t left, int64_t right, bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q_in));
  const AttentionInputs inputs{q_in, k_in, v_in, attention_mask, log_decay, k_start, k_end};
  check_inputs(inputs, scale, causal);
  check_window(left, right);
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

std::tuple<Tensor, Tensor, Tensor, Tensor> flash_backward(
    const Tensor& grad_o_in, const OptionalTensor& grad_lse, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
    const Tensor& o_in, const Tensor& lse, const OptionalTensor& attention_mask, const OptionalTensor& log_decay,
    const OptionalTensor& k_start, const OptionalTensor& k_end, double scale, bool causal, int64_t left, int64_t right,
    bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q_in));
  const AttentionInputs inputs{q_in, k_in, v_in, attention_mask, log_decay, k_start, k_end};
  check_inputs(inputs, scale, causal);
  check_window(left, right);
  check_results(q_in, v_in, o_in, grad_o_in, "lse", lse);
  if (grad_lse.has_value()) check_per_query("grad_lse", *grad_lse, q_in);
  check_kernels_cover(inputs);
  check_float("lse", lse);
  if (grad_lse.has_value()) check_float("grad_lse", *grad_lse);
  if (is_empty(q_in) || is_empty(k_in) || is_empty(v_in)) {
    return {zeros_like_layout(q_in, q_in.size(3)), zeros_like_layout(k_in, k_in.size(3)), zeros_like_layout(v_in, v_in.size(3)),
            zero_decay_gradient(log_decay, q_in)};
  }

  const Operands x(inputs);
  const Gradients gradients(q_in, k_in, v_in, x, o_in, grad_o_in, lse, grad_lse);
  BwdParams p{};
  x.fill(p, scale, causal, {left, right}, allow_tf32);
  gradients.fill(p);
  run("flash_backward", kFlashAlgorithm, p, q_in.get_device_index());
  return {gradients.grad_q.result(), gradients.grad_k.result(), gradients.grad_v.result(), gradients.grad_log_decay};
}

}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("flash_forward", TORCH_BOX(&fastmax::flash_forward));
  m.impl("flash_backward", TORCH_BOX(&fastmax::flash_backward));
}
