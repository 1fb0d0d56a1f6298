// fastmax_cuda::forward and backward: checks, params, choice of the algorithm. Python declares the schemas (fastmax/ops/).
//
// fastmax_cuda::global_forward_ and global_backward_ compute a causal call for the global keys of an exact window, and merge it in
// place with the result of the local keys. Kernels that cannot merge write to memory of their own, which is merged afterwards.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>
#include <tuple>

#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/layout.h"
#include "bindings/merge.h"
#include "bindings/operands.h"
#include "bindings/run.h"
#include "bindings/torch_abi.h"
#include "core/cost_model.h"
#include "linear/algorithm.h"
#include "quadratic/algorithm.h"

namespace fastmax {
namespace {

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

// Checks the arguments of both directions that check_inputs does not cover.
void check_options(const Tensor& q, const Tensor& v, const OptionalTensor& drop_noise, int64_t order, const std::string& algorithm) {
  FASTMAX_CHECK(order == 1 || order == 2, "p must be 1 or 2, got ", order);
  FASTMAX_CHECK(algorithm == "auto" || algorithm == "quadratic" || algorithm == "linear",
                "algorithm must be auto, quadratic or linear, got ", algorithm);
  if (drop_noise.has_value()) {
    check_device("drop_noise", *drop_noise, q);
    check_shape("drop_noise", *drop_noise, {q.size(0), q.size(1), q.size(2), v.size(3)});
  }
}

// The linear algorithm has no bounds of keys without `causal`.
const Algorithm& choose(const std::string& name, const AttentionInputs& x, bool causal, int64_t order) {
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
  p.attention_mask = x.attention_mask.has_value() ? static_cast<const uint8_t*>(x.attention_mask->data_ptr()) : nullptr;
  return linear_is_faster(p) ? kLinearAlgorithm : kQuadraticAlgorithm;
}

std::tuple<Tensor, Tensor> forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const OptionalTensor& attention_mask,
                                   const OptionalTensor& drop_noise, const OptionalTensor& log_decay,
                                   const OptionalTensor& k_start, const OptionalTensor& k_end,
                                   double scale, double a0, double a1, double a2, int64_t order, bool causal, double dropout,
                                   const std::string& algorithm, bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q_in));
  const AttentionInputs inputs{q_in, k_in, v_in, attention_mask, log_decay, k_start, k_end};
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

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad_o_in, const OptionalTensor& grad_z, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& o_in,
    const Tensor& z, const OptionalTensor& attention_mask, const OptionalTensor& drop_noise, const OptionalTensor& log_decay,
    const OptionalTensor& k_start, const OptionalTensor& k_end, double scale, double a0, double a1,
    double a2, int64_t order, bool causal, double dropout, const std::string& algorithm, bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q_in));
  const AttentionInputs inputs{q_in, k_in, v_in, attention_mask, log_decay, k_start, k_end};
  check_inputs(inputs, scale, causal);
  check_options(q_in, v_in, drop_noise, order, algorithm);
  check_results(q_in, v_in, o_in, grad_o_in, "z", z);
  if (grad_z.has_value()) check_per_query("grad_z", *grad_z, q_in);
  check_kernels_cover(inputs);
  const Algorithm& chosen = choose(algorithm, inputs, causal, order);
  check_float("z", z);
  if (grad_z.has_value()) check_float("grad_z", *grad_z);

  if (is_empty(q_in) || is_empty(k_in) || is_empty(v_in)) {
    return {zeros_like_layout(q_in, q_in.size(3)), zeros_like_layout(k_in, k_in.size(3)), zeros_like_layout(v_in, v_in.size(3)),
            zero_decay_gradient(log_decay, q_in)};
  }

  const Operands x(inputs);
  const Noise noise(drop_noise, q_in);
  const Gradients gradients(q_in, k_in, v_in, x, o_in, grad_o_in, z, grad_z);
  BwdParams p{};
  x.fill(p, scale, causal, kNoWindow, allow_tf32);
  noise.fill(p, dropout);
  Polynomial{a0, a1, a2, order}.fill(p);
  gradients.fill(p);
  run("backward", chosen, p, q_in.get_device_index());
  return {gradients.grad_q.result(), gradients.grad_k.result(), gradients.grad_v.result(), gradients.grad_log_decay};
}

// Checks the arguments of both directions for global keys.
void check_global(const AttentionInputs& x, double scale, int64_t order, const std::string& algorithm) {
  check_inputs(x, scale, /*causal=*/true);
  check_options(x.q, x.v, kNotGiven, order, algorithm);
}

// Checks a tensor (b, h, n, d) that is added to in place; it must be like a tensor of the call.
void check_written(const char* name, const Tensor& x, const char* like_name, const Tensor& like) {
  check_device(name, x, like, like_name);
  const auto shape = like.sizes();
  FASTMAX_CHECK(x.dim() == 4, name, " must be 4-dimensional, got ", x.dim(), " dimensions");
  check_shape(name, x, {shape[0], shape[1], shape[2], shape[3]});
  FASTMAX_CHECK(x.scalar_type() == like.scalar_type(), name, " must have ", like_name, "'s dtype");
}

// Whether kernels can write to x in place: aligned, and no element at several indices.
bool is_writable(const Tensor& x) {
  for (int i = 0; i < 3; ++i) {
    if (x.stride(i) == 0 && x.size(i) > 1) return false;
  }
  return is_aligned(x);
}

Tensor global_forward(const Tensor& o, const Tensor& local_lse, const Tensor& q, const Tensor& k, const Tensor& v,
                      const OptionalTensor& attention_mask, const OptionalTensor& log_decay, const OptionalTensor& k_start, double scale,
                      double a0, double a1, double a2, int64_t order, const std::string& algorithm, bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q));
  const AttentionInputs inputs{q, k, v, attention_mask, log_decay, k_start, kNotGiven};
  check_global(inputs, scale, order, algorithm);
  check_kernels_cover(inputs);
  check_device("o", o, q);
  check_shape("o", o, {q.size(0), q.size(1), q.size(2), v.size(3)});
  FASTMAX_CHECK(o.scalar_type() == q.scalar_type(), "o must have q's dtype");
  check_per_query("lse", local_lse, q);
  check_float("lse", local_lse);
  const bool is_one_head_after_the_other = local_lse.stride(2) == 1 && local_lse.stride(0) == local_lse.stride(1) * local_lse.size(1);
  if (is_writable(o) && is_one_head_after_the_other && !is_empty(q) && !is_empty(k)) {
    const Algorithm& chosen = choose(algorithm, inputs, /*causal=*/true, order);
    const Operands x(inputs);
    FwdParams p{};
    x.fill(p, scale, /*causal=*/true, kNoWindow, allow_tf32);
    Polynomial{a0, a1, a2, order}.fill(p);
    if (select(chosen, p, Direction::kForward).joins_parts && !has_decay(p)) {
      const Tensor z = empty_per_query(q);
      p.o = o.data_ptr(), p.o_stride = stride_of(o);
      p.z = static_cast<float*>(z.data_ptr());
      p.local_lse = static_cast<float*>(local_lse.data_ptr()), p.local_lse_head = local_lse.stride(1);
      run("global_forward_", chosen, p, q.get_device_index());
      return z;
    }
  }
  const auto [o_global, z_global] = forward(q, k, v, attention_mask, kNotGiven, log_decay, k_start, kNotGiven, scale, a0, a1, a2,
                                            order, /*causal=*/true, /*dropout=*/0., algorithm, allow_tf32);
  return merge(o, local_lse, o_global, z_global, kNotGiven);
}

// Adds x to sum in place.
void add(const Tensor& x, const Tensor& sum) {
  Tensor written = sum;
  torch::stable::copy_(written, torch::stable::subtract(sum, x, /*alpha=*/-1.));
}

Tensor global_backward(const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v, const Tensor& grad_o, const OptionalTensor& grad_z,
                       const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& z,
                       const OptionalTensor& attention_mask, const OptionalTensor& log_decay, const OptionalTensor& k_start, double scale,
                       double a0, double a1, double a2, int64_t order, const std::string& algorithm, bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q));
  const AttentionInputs inputs{q, k, v, attention_mask, log_decay, k_start, kNotGiven};
  check_global(inputs, scale, order, algorithm);
  check_kernels_cover(inputs);
  check_results(q, v, o, grad_o, "z", z);
  if (grad_z.has_value()) check_per_query("grad_z", *grad_z, q);
  check_written("grad_q", grad_q, "q", q);
  check_written("grad_k", grad_k, "k", k);
  check_written("grad_v", grad_v, "v", v);
  if (is_writable(grad_q) && is_writable(grad_k) && is_writable(grad_v) && !is_empty(q) && !is_empty(k)) {
    const Algorithm& chosen = choose(algorithm, inputs, /*causal=*/true, order);
    const Operands x(inputs);
    BwdParams p{};
    x.fill(p, scale, /*causal=*/true, kNoWindow, allow_tf32);
    Polynomial{a0, a1, a2, order}.fill(p);
    if (select(chosen, p, Direction::kBackward).joins_parts) {
      check_float("z", z);
      if (grad_z.has_value()) check_float("grad_z", *grad_z);
      const Gradients gradients({Output(grad_q), Output(grad_k), Output(grad_v)}, x, o, grad_o, z, grad_z);
      gradients.fill(p);
      p.adds = true;
      run("global_backward_", chosen, p, q.get_device_index());
      return gradients.grad_log_decay;
    }
  }
  const auto [of_q, of_k, of_v, of_log_decay] =
      backward(grad_o, grad_z, q, k, v, o, z, attention_mask, kNotGiven, log_decay, k_start, kNotGiven, scale, a0, a1, a2, order,
               /*causal=*/true, /*dropout=*/0., algorithm, allow_tf32);
  add(of_q, grad_q), add(of_k, grad_k), add(of_v, grad_v);
  return of_log_decay;
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("forward", TORCH_BOX(&fastmax::forward));
  m.impl("backward", TORCH_BOX(&fastmax::backward));
  m.impl("global_forward_", TORCH_BOX(&fastmax::global_forward));
  m.impl("global_backward_", TORCH_BOX(&fastmax::global_backward));
}
