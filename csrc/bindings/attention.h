// Shared by the bindings of attention with a polynomial score: checks, the score's coefficients, and the choice of the algorithm.
#pragma once

#include <string>

#include "bindings/checks.h"
#include "bindings/operands.h"
#include "bindings/torch_abi.h"
#include "core/cost_model.h"
#include "linear/algorithm.h"
#include "quadratic/algorithm.h"

namespace fastmax {

struct Polynomial {
  double a0, a1, a2;
  int64_t order;

  void fill(Problem& p) const {
    p.a0 = static_cast<float>(a0);
    p.a1 = static_cast<float>(a1);
    p.a2 = order == 2 ? static_cast<float>(a2) : 0.f;
    p.order = static_cast<int>(order);
  }
};

// Checks the arguments of both directions that check_inputs does not cover.
inline void check_options(const Tensor& q, const Tensor& v, const OptionalTensor& drop_noise, int64_t order,
                          const std::string& algorithm) {
  FASTMAX_CHECK(order == 1 || order == 2, "p must be 1 or 2, got ", order);
  FASTMAX_CHECK(algorithm == "auto" || algorithm == "quadratic" || algorithm == "linear",
                "algorithm must be auto, quadratic or linear, got ", algorithm);
  if (drop_noise.has_value()) {
    check_device("drop_noise", *drop_noise, q);
    check_shape("drop_noise", *drop_noise, {q.size(0), q.size(1), q.size(2), v.size(3)});
  }
}

// The linear algorithm has no bounds of keys without `causal`.
inline const Algorithm& choose(const std::string& name, const AttentionInputs& x, bool causal, int64_t order) {
  const bool has_bounds = x.k_start.has_value() || x.k_end.has_value();
  if (name == "quadratic" || (has_bounds && !causal)) return kQuadraticAlgorithm;
  if (name == "linear") return kLinearAlgorithm;
  AttentionParams p{};
  fill_problem(p, x.q, x.k, x.v, /*scale=*/1.0, causal, kNoWindow, /*allow_tf32=*/false);
  p.order = static_cast<int>(order);
  // Coverage depends on strides and on the inputs that are present. Tensors that would be copied first count as not covered.
  p.q_stride = stride_of(x.q), p.k_stride = stride_of(x.k), p.v_stride = stride_of(x.v);
  p.k_start = Operands::bounds(x.k_start), p.k_end = Operands::bounds(x.k_end);
  p.log_decay = x.log_decay.has_value() ? static_cast<const float*>(x.log_decay->data_ptr()) : nullptr;
  p.log_input_gate = x.log_input_gate.has_value() ? static_cast<const float*>(x.log_input_gate->data_ptr()) : nullptr;
  p.attention_mask = x.attention_mask.has_value() ? static_cast<const uint8_t*>(x.attention_mask->data_ptr()) : nullptr;
  return linear_is_faster(p) ? kLinearAlgorithm : kQuadraticAlgorithm;
}

}  // namespace fastmax
