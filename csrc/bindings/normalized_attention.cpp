// fastmax_cuda::normalized_forward and normalized_backward: causal attention of order 1 by the linear algorithm whose kernels scale the
// rows of q and k as normalize_tokens does (kLinearOfShortened). Python sends calls for which fastmax_shortens_rows (library.cpp) is not 0.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <tuple>

#include "bindings/attention.h"
#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/layout.h"
#include "bindings/operands.h"
#include "bindings/run.h"
#include "bindings/torch_abi.h"
#include "normalize/normalize.h"

namespace fastmax {
namespace {

// Returns x, or a copy if dimensions of it are expanded, which the copy engine cannot read.
Tensor unexpanded(const Tensor& x) {
  for (int i = 0; i < 3; ++i) {
    if (x.stride(i) != 0 || x.size(i) <= 1) continue;
    Tensor copy = empty_like_layout(x, x.size(3));
    return torch::stable::copy_(copy, x);
  }
  return x;
}

void check_call(const AttentionInputs& x, double lim, double scale) {
  check_inputs(x, scale, /*causal=*/true);
  FASTMAX_CHECK(std::isfinite(lim) && lim > 0, "lim must be finite and > 0, got ", lim);
  FASTMAX_CHECK(lim <= kMaxNormalizedLim && lim >= 1 / kMaxNormalizedLim, "lim must be from 2**-60 to 2**60, got ", lim);
  check_kernels_cover(x);
}

// The operands of a call, and what both directions know.
struct Call {
  Tensor q, k, v;
  Operands x;
  double lim, scale;
  Polynomial polynomial;

  Call(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, double lim, double scale, double a0, double a1)
      : q(unexpanded(q_in)),
        k(unexpanded(k_in)),
        v(unexpanded(v_in)),
        x({q, k, v, kNotGiven, kNotGiven, kNotGiven, kNotGiven, kNotGiven}),
        lim(lim),
        scale(scale),
        polynomial{a0, a1, 0, 1} {}

  void fill(AttentionParams& p, const Tensor& k_factor, Direction direction) const {
    x.fill(p, scale, /*causal=*/true, kNoWindow, /*allow_tf32=*/false);
    polynomial.fill(p);
    p.lim = static_cast<float>(lim), p.k_factor = static_cast<const float*>(k_factor.data_ptr());
    fit_head_dim(p, kLinearOfShortened, direction);
    FASTMAX_CHECK(find(kLinearOfShortened, p, direction) != nullptr,
                  "no kernels normalise rows during attention for this device, dtype or head_dim: normalize_tokens does before it");
  }

  // Writes the factors of the rows of k: lim / |k|, or 1.
  void find_factors(const FwdParams& p, const Tensor& k_factor) const {
    NormalizeParams n{};
    n.d = static_cast<int>(x.k.size(3)), n.math = p.math, n.lim = p.lim, n.aligned = true;
    NormalizedTensor& rows = n.tensors[1];
    rows.rows = static_cast<int>(k_factor.numel()), rows.inner = p.m, rows.outer = p.hk;
    rows.x = p.k, rows.x_stride = p.k_stride;
    rows.factor = static_cast<float*>(k_factor.data_ptr());
    launch_token_factors(n, current_stream(q.get_device_index()));
  }
};

std::tuple<Tensor, Tensor, Tensor> normalized_forward(const Tensor& q, const Tensor& k, const Tensor& v, double lim, double scale, double a0,
                                                      double a1) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q));
  check_call({q, k, v, kNotGiven, kNotGiven, kNotGiven, kNotGiven, kNotGiven}, lim, scale);
  FASTMAX_CHECK(k.numel() <= kMaxNormalizedRows * k.size(3), "k must have at most ", kMaxNormalizedRows, " rows");
  Tensor z = empty_per_query(q), k_factor = empty_per_query(k);
  if (is_empty(q) || is_empty(k) || is_empty(v)) {
    return {zeros_like_layout(q, v.size(3)), torch::stable::zero_(z), torch::stable::zero_(k_factor)};
  }

  const Call call(q, k, v, lim, scale, a0, a1);
  const Results results(q, v, call.x, z);
  FwdParams p{};
  call.fill(p, k_factor, Direction::kForward);
  results.fill(p);
  call.find_factors(p, k_factor);
  run("normalized_forward", kLinearOfShortened, p, q.get_device_index());
  return {results.o.result(), z, k_factor};
}

std::tuple<Tensor, Tensor, Tensor> normalized_backward(const Tensor& grad_o, const OptionalTensor& grad_z, const Tensor& q, const Tensor& k,
                                                       const Tensor& v, const Tensor& o, const Tensor& z, const Tensor& k_factor,
                                                       double lim, double scale, double a0, double a1) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q));
  check_call({q, k, v, kNotGiven, kNotGiven, kNotGiven, kNotGiven, kNotGiven}, lim, scale);
  check_results(q, v, o, grad_o, "z", z);
  check_float("z", z);
  if (grad_z.has_value()) check_per_query("grad_z", *grad_z, q), check_float("grad_z", *grad_z);
  check_per_query("k_factor", k_factor, k);
  check_float("k_factor", k_factor);
  if (is_empty(q) || is_empty(k) || is_empty(v)) {
    return {zeros_like_layout(q, q.size(3)), zeros_like_layout(k, k.size(3)), zeros_like_layout(v, v.size(3))};
  }

  const Call call(q, k, v, lim, scale, a0, a1);
  const Gradients gradients(q, k, v, call.x, unexpanded(o), unexpanded(grad_o), z, grad_z);
  const Tensor factors = dense(k_factor);
  BwdParams p{};
  call.fill(p, factors, Direction::kBackward);
  gradients.fill(p);
  run("normalized_backward", kLinearOfShortened, p, q.get_device_index());
  return {gradients.grad_q.result(), gradients.grad_k.result(), gradients.grad_v.result()};
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("normalized_forward", TORCH_BOX(&fastmax::normalized_forward));
  m.impl("normalized_backward", TORCH_BOX(&fastmax::normalized_backward));
}
