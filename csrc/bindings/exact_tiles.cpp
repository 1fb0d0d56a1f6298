// fastmax_cuda::exact_tiles_forward and exact_tiles_backward
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <limits>
#include <tuple>

#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/layout.h"
#include "bindings/operands.h"
#include "bindings/run.h"
#include "bindings/torch_abi.h"
#include "quadratic/algorithm.h"

namespace fastmax {
namespace {

void fill_formula(Problem& p, double a0, double a1, double a2, int64_t order, int64_t exact_window) {
  p.a0 = static_cast<float>(a0);
  p.a1 = static_cast<float>(a1);
  p.a2 = order == 2 ? static_cast<float>(a2) : 0.f;
  p.order = static_cast<int>(order);
  p.exact_window = static_cast<int>(std::min<int64_t>(exact_window, std::max(p.n, p.m)));
}

std::tuple<Tensor, Tensor> exact_tiles_forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                               const OptionalTensor& attention_mask, const OptionalTensor& log_decay,
                                               const OptionalTensor& k_start, const OptionalTensor& k_end, double scale, double a0,
                                               double a1, double a2, int64_t order, bool causal, int64_t exact_window, bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q_in));
  const AttentionInputs inputs{q_in, k_in, v_in, attention_mask, log_decay, k_start, k_end};
  check_inputs(inputs, scale, causal);
  check_kernels_cover(inputs);
  Tensor lse = empty_per_query(q_in);
  if (is_empty(q_in) || is_empty(k_in) || is_empty(v_in)) {
    return {zeros_like_layout(q_in, v_in.size(3)), torch::stable::fill_(lse, -std::numeric_limits<double>::infinity())};
  }
  const Operands x(inputs);
  const Results results(q_in, v_in, x, lse);
  FwdParams p{};
  x.fill(p, scale, causal, kNoWindow, allow_tf32);
  fill_formula(p, a0, a1, a2, order, exact_window);
  results.fill(p);
  run("exact_tiles_forward", kExactWindowAlgorithm, p, q_in.get_device_index());
  return {results.o.result(), lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> exact_tiles_backward(
    const Tensor& grad_o_in, const OptionalTensor& grad_lse, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
    const Tensor& o_in, const Tensor& lse, const OptionalTensor& attention_mask, const OptionalTensor& log_decay,
    const OptionalTensor& k_start, const OptionalTensor& k_end, double scale, double a0, double a1, double a2, int64_t order, bool causal,
    int64_t exact_window, bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q_in));
  const AttentionInputs inputs{q_in, k_in, v_in, attention_mask, log_decay, k_start, k_end};
  check_inputs(inputs, scale, causal);
  check_results(q_in, v_in, o_in, grad_o_in, "lse", lse);
  if (grad_lse.has_value()) check_per_query("grad_lse", *grad_lse, q_in);
  check_kernels_cover(inputs);
  const Operands x(inputs);
  const Gradients gradients(q_in, k_in, v_in, x, o_in, grad_o_in, lse, grad_lse);
  BwdParams p{};
  x.fill(p, scale, causal, kNoWindow, allow_tf32);
  fill_formula(p, a0, a1, a2, order, exact_window);
  gradients.fill(p);
  run("exact_tiles_backward", kExactWindowAlgorithm, p, q_in.get_device_index());
  return {gradients.grad_q.result(), gradients.grad_k.result(), gradients.grad_v.result(), gradients.grad_log_decay};
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("exact_tiles_forward", TORCH_BOX(&fastmax::exact_tiles_forward));
  m.impl("exact_tiles_backward", TORCH_BOX(&fastmax::exact_tiles_backward));
}
