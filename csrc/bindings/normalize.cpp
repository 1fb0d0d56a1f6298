// fastmax_cuda::normalize_tokens and its gradient (normalize/normalize.h).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <tuple>
#include <vector>

#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/debug.h"
#include "bindings/layout.h"
#include "bindings/torch_abi.h"
#include "normalize/normalize.h"

namespace fastmax {
namespace {

void check_rows(const Tensor& q, const Tensor& k, double lim) {
  FASTMAX_CHECK(q.dim() == 4 && k.dim() == 4, "q and k must be 4-dimensional, got ", q.dim(), " and ", k.dim(), " dimensions");
  check_device("k", k, q);
  FASTMAX_CHECK(k.scalar_type() == q.scalar_type(), "k must have q's dtype");
  check_shape("k", k, {q.size(0), k.size(1), k.size(2), q.size(3)});
  FASTMAX_CHECK(std::isfinite(lim) && lim > 0, "lim must be finite and > 0, got ", lim);
}

// Checks the gradient of a forward result x (q's or k's) and the factors of its rows.
void check_normalized(const char* grad_name, const OptionalTensor& grad, const char* factor_name, const Tensor& factor, const Tensor& x,
                      const Tensor& q) {
  if (grad.has_value()) {
    check_device(grad_name, *grad, q);
    check_shape(grad_name, *grad, {x.size(0), x.size(1), x.size(2), x.size(3)});
    FASTMAX_CHECK(grad->scalar_type() == q.scalar_type(), grad_name, " must have q's dtype");
  }
  check_device(factor_name, factor, q);
  check_shape(factor_name, factor, {x.size(0), x.size(1), x.size(2)});
  const bool wide = q.scalar_type() == ScalarType::Double;
  FASTMAX_CHECK(factor.scalar_type() == (wide ? ScalarType::Double : ScalarType::Float), factor_name, " must be ",
                wide ? "float64" : "float32");
}

// Checks that the kernels compute this call.
void check_covered(const Tensor& q, const Tensor& k, double lim) {
  check_kernels_run_on("q", q);
  FASTMAX_CHECK(q.size(3) <= kMaxNormalizedDim, "q and k must have a head_dim up to ", kMaxNormalizedDim, ", got ", q.size(3));
  FASTMAX_CHECK(std::max(q.numel(), k.numel()) <= kMaxNormalizedRows * q.size(3), "q and k must have at most ", kMaxNormalizedRows, " rows");
  FASTMAX_CHECK(lim <= kMaxNormalizedLim && lim >= 1 / kMaxNormalizedLim, "lim must be from 2**-60 to 2**60, got ", lim);
}

// Returns x if the elements of its rows are contiguous, else a copy.
Tensor with_rows(const Tensor& x) {
  if (has_dense_rows(x)) return x;
  Tensor copy = empty_like_layout(x, x.size(3));
  return torch::stable::copy_(copy, x);
}

// Uninitialised, a number for each row of x, in the order of the rows in a dense tensor of x's layout.
Tensor empty_factors(const Tensor& x) {
  const int64_t b = x.size(0), h = x.size(1), n = x.size(2), h1 = std::max<int64_t>(1, h), n1 = std::max<int64_t>(1, n);
  const std::vector<int64_t> strides = is_token_major(x) ? std::vector<int64_t>{n1 * h1, 1, h1} : std::vector<int64_t>{h1 * n1, n1, 1};
  return empty_strided({b, h, n}, strides, ScalarType::Float, x.get_device_index());
}

// Returns factor in the layout of empty_factors, as a copy if needed.
Tensor factors_in_order(const Tensor& x, const Tensor& factor) {
  Tensor ordered = empty_factors(x);
  for (int i = 0; i < 3; ++i) {
    if (factor.stride(i) != ordered.stride(i) && factor.size(i) > 1) return torch::stable::copy_(ordered, factor);
  }
  return factor;
}

// rows: x, or a copy of it.
NormalizedTensor normalized_tensor(const Tensor& x, const Tensor& rows, const Tensor& out, const Tensor& factor) {
  NormalizedTensor t{};
  t.rows = is_empty(x) ? 0 : static_cast<int>(x.size(0) * x.size(1) * x.size(2));
  t.token_major = is_token_major(x);
  t.inner = static_cast<int>(x.size(t.token_major ? 1 : 2)), t.outer = static_cast<int>(x.size(t.token_major ? 2 : 1));
  t.x = rows.data_ptr(), t.x_stride = stride_of(rows);
  t.out = out.data_ptr(), t.factor = static_cast<float*>(factor.data_ptr());
  return t;
}

NormalizeParams make_params(const Tensor& q, double lim) {
  NormalizeParams p{};
  p.d = static_cast<int>(q.size(3));
  p.math = math_mode(q.scalar_type(), /*allow_tf32=*/false);
  p.lim = static_cast<float>(lim);
  return p;
}

void print_call(const char* name, const NormalizeParams& p) {
  if (!is_debugging()) return;
  std::fprintf(stderr, "fastmax::%s: normalize_sm80: rows %d and %d, d %d%s\n", name, p.tensors[0].rows, p.tensors[1].rows, p.d,
               p.aligned ? "" : ", unaligned");
}

bool has_rows(const NormalizeParams& p) { return p.tensors[0].rows > 0 || p.tensors[1].rows > 0; }

std::tuple<Tensor, Tensor, Tensor, Tensor> normalize_tokens(const Tensor& q, const Tensor& k, double lim) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q));
  check_rows(q, k, lim);
  check_covered(q, k, lim);
  const Tensor q_rows = with_rows(q), k_rows = with_rows(k);
  const Tensor q_out = empty_like_layout(q, q.size(3)), k_out = empty_like_layout(k, k.size(3));
  const Tensor q_factor = empty_factors(q), k_factor = empty_factors(k);
  NormalizeParams p = make_params(q, lim);
  p.aligned = is_aligned(q_rows) && is_aligned(k_rows);
  p.tensors[0] = normalized_tensor(q, q_rows, q_out, q_factor);
  p.tensors[1] = normalized_tensor(k, k_rows, k_out, k_factor);
  print_call("normalize_tokens", p);
  if (has_rows(p)) launch_normalize_tokens(p, current_stream(q.get_device_index()));
  return {q_out, k_out, q_factor, k_factor};
}

std::tuple<Tensor, Tensor> normalize_tokens_backward(const OptionalTensor& grad_q, const OptionalTensor& grad_k, const Tensor& q,
                                                     const Tensor& k, const Tensor& q_factor, const Tensor& k_factor, double lim) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q));
  check_rows(q, k, lim);
  check_normalized("grad_q", grad_q, "q_factor", q_factor, q, q);
  check_normalized("grad_k", grad_k, "k_factor", k_factor, k, q);
  check_covered(q, k, lim);
  NormalizeParams p = make_params(q, lim);
  p.aligned = true;
  Tensor copies[2][3];  // operands, possibly copies, that must live until the launch
  const auto gradient = [&](int i, const OptionalTensor& grad, const Tensor& x, const Tensor& factor) {
    if (!grad.has_value()) return no_elements(x);
    auto& [rows, grad_rows, factors] = copies[i];
    rows = with_rows(x), grad_rows = with_rows(*grad), factors = factors_in_order(x, factor);
    Tensor out = empty_like_layout(x, x.size(3));
    p.tensors[i] = normalized_tensor(x, rows, out, factors);
    p.tensors[i].grad = grad_rows.data_ptr(), p.tensors[i].grad_stride = stride_of(grad_rows);
    p.aligned = p.aligned && is_aligned(rows) && is_aligned(grad_rows);
    return out;
  };
  const Tensor of_q = gradient(0, grad_q, q, q_factor), of_k = gradient(1, grad_k, k, k_factor);
  print_call("normalize_tokens_backward", p);
  if (has_rows(p)) launch_normalize_tokens_backward(p, current_stream(q.get_device_index()));
  return {of_q, of_k};
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("normalize_tokens", TORCH_BOX(&fastmax::normalize_tokens));
  m.impl("normalize_tokens_backward", TORCH_BOX(&fastmax::normalize_tokens_backward));
}
