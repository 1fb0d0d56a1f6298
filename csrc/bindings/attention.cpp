// fastmax::forward and fastmax::backward for CUDA tensors, against the libtorch stable ABI: tensors to params, allocation,
// device guard, stream. The schemas are declared in Python, where arguments were validated; checked again here is only what
// would be unsafe. Calls that the kernels do not cover go to the PyTorch implementation, fastmax::eager_forward and _backward.

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "bindings/attention_tensors.h"
#include "core/cost_model.h"
#include "core/device.h"
#include "core/launch.h"
#include "core/params.h"
#include "bindings/tensors.h"

namespace fastmax {
namespace {

struct Polynomial {
  double a0, a1, a2;
  int64_t order;

  void fill(Problem& p) const {
    STD_TORCH_CHECK(order == 1 || order == 2, "fastmax: p must be 1 or 2, got ", order);
    p.a0 = static_cast<float>(a0);
    p.a1 = static_cast<float>(a1);
    p.a2 = order == 2 ? static_cast<float>(a2) : 0.f;
    p.order = static_cast<int>(order);
  }
};

// Noise that is added to the output. Params: FwdParams or BwdParams.
struct Noise {
  OptionalTensor noise;

  Noise(const OptionalTensor& x, const Tensor& q, const Tensor& v) {
    if (!x.has_value()) return;
    STD_TORCH_CHECK(x->dim() == 4 && x->size(0) == q.size(0) && x->size(1) == q.size(1) && x->size(2) == q.size(2) &&
                        x->size(3) == v.size(3),
                    "fastmax: drop_noise must have the output's shape");
    noise = readable(x->scalar_type() == q.scalar_type() ? *x : torch::stable::to(*x, q.scalar_type()));
  }

  template <class Params>
  void fill(Params& p, double dropout) const {
    p.noise = noise.has_value() ? noise->data_ptr() : nullptr;
    p.noise_stride = noise.has_value() ? stride_of(*noise) : Stride{};
    p.dropout = static_cast<float>(dropout);
  }
};

Algorithm resolve(const std::string& algorithm, const Problem& p) {
  if (algorithm == "quadratic") return Algorithm::kQuadratic;
  if (algorithm == "linear") return Algorithm::kLinear;
  STD_TORCH_CHECK(algorithm == "auto", "fastmax: algorithm must be auto, quadratic or linear, got ", algorithm);
  return choose_algorithm(p);
}

std::tuple<Tensor, Tensor> forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const OptionalTensor& key_padding_mask,
                                   const OptionalTensor& drop_noise, const OptionalTensor& rpe_matrix, double scale, double a0,
                                   double a1, double a2, int64_t order, bool causal, double dropout, const std::string& algorithm, bool allow_tf32) {
  const int device_index = q_in.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  if (rpe_matrix.has_value() || !has_kernels(q_in, v_in)) {
    const auto [o, z] = call_operator<2>("fastmax::eager_forward", q_in, k_in, v_in, key_padding_mask, drop_noise, rpe_matrix, scale,
                                         a0, a1, a2, order, causal, dropout, algorithm, allow_tf32);
    return {o, z};
  }
  const int64_t b = q_in.size(0), h = q_in.size(1), n = q_in.size(2);

  Tensor z = empty_strided({b, h, n}, {h * n, n, 1}, ScalarType::Float, device_index);
  if (is_empty(q_in) || is_empty(k_in) || is_empty(v_in)) {
    return {zeros_like_layout(q_in, v_in.size(3)), torch::stable::zero_(z)};
  }

  const Operands x(q_in, k_in, v_in, key_padding_mask);
  const Noise noise(drop_noise, q_in, v_in);
  const Output o(q_in, v_in.size(3), x.v.size(3));
  FwdParams p{};
  x.fill(p, scale, causal, allow_tf32);
  noise.fill(p, dropout);
  Polynomial{a0, a1, a2, order}.fill(p);
  p.o = o.storage.data_ptr(), p.o_stride = stride_of(o.storage);
  p.z = static_cast<float*>(z.data_ptr());

  const cudaStream_t stream = current_stream(device_index);
  if (resolve(algorithm, p) == Algorithm::kLinear) {
    const Tensor workspace = allocate_workspace(linear_fwd_workspace_bytes(p), device_index);
    p.workspace = workspace.data_ptr();
    launch_linear_fwd(p, stream);
  } else {
    FASTMAX_DISPATCH_MATH(p, quadratic_fwd, p, stream);
  }
  return {o.result(), z};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_o_in, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                                    const Tensor& o_in, const Tensor& z, const OptionalTensor& key_padding_mask,
                                                    const OptionalTensor& drop_noise, const OptionalTensor& rpe_matrix, double scale,
                                                    double a0, double a1, double a2, int64_t order, bool causal, double dropout,
                                                    const std::string& algorithm, bool allow_tf32) {
  const int device_index = q_in.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  if (rpe_matrix.has_value() || !has_kernels(q_in, v_in)) {
    const auto [grad_q, grad_k, grad_v, grad_rpe] =
        call_operator<4>("fastmax::eager_backward", grad_o_in, q_in, k_in, v_in, o_in, z, key_padding_mask, drop_noise, rpe_matrix,
                         scale, a0, a1, a2, order, causal, dropout, algorithm, allow_tf32);
    return {grad_q, grad_k, grad_v, grad_rpe};
  }

  Tensor grad_rpe = empty_strided({0}, {1}, q_in.scalar_type(), device_index);
  if (is_empty(q_in) || is_empty(k_in) || is_empty(v_in)) {
    return {zeros_like_layout(q_in, q_in.size(3)), zeros_like_layout(k_in, k_in.size(3)), zeros_like_layout(v_in, v_in.size(3)),
            grad_rpe};
  }

  const Operands x(q_in, k_in, v_in, key_padding_mask);
  const Noise noise(drop_noise, q_in, v_in);
  const Gradients gradients(q_in, k_in, v_in, x, o_in, grad_o_in);
  BwdParams p{};
  x.fill(p, scale, causal, allow_tf32);
  noise.fill(p, dropout);
  Polynomial{a0, a1, a2, order}.fill(p);
  gradients.fill(p, z, "z");

  const cudaStream_t stream = current_stream(device_index);
  const bool linear = resolve(algorithm, p) == Algorithm::kLinear;
  const Tensor workspace = allocate_workspace(linear ? linear_bwd_workspace_bytes(p) : quadratic_bwd_workspace_bytes(p), device_index);
  p.workspace = workspace.data_ptr();
  if (linear) {
    launch_linear_bwd(p, stream);
  } else {
    FASTMAX_DISPATCH_MATH(p, quadratic_bwd, p, stream);
  }
  return {gradients.grad_q.result(), gradients.grad_k.result(), gradients.grad_v.result(), grad_rpe};
}

}  // namespace
}  // namespace fastmax

// For fastmax/extension.py, which reads them through ctypes.
#define FASTMAX_EXPORT extern "C" __attribute__((visibility("default")))

// SCHEMA_VERSION in fastmax/extension.py: the schemas that these functions are written for.
FASTMAX_EXPORT int fastmax_schema_version() { return 3; }

// Why kernels do not run on a device, or null when they do.
FASTMAX_EXPORT const char* fastmax_device_problem(int index) {
  const std::string& problem = fastmax::get_device(index).problem;
  return problem.empty() ? nullptr : problem.c_str();
}

FASTMAX_EXPORT const char* fastmax_build_info() {
  static const std::string info = "architectures " FASTMAX_ARCHS "; bf16, fp16, tf32, fp32; head dims up to" +
                                  fastmax::head_dims() + "; CUDA " + std::to_string(CUDART_VERSION / 1000) + "." +
                                  std::to_string(CUDART_VERSION % 1000 / 10);
  return info.c_str();
}

STABLE_TORCH_LIBRARY_IMPL(fastmax, CUDA, m) {
  m.impl("forward", TORCH_BOX(&fastmax::forward));
  m.impl("backward", TORCH_BOX(&fastmax::backward));
}
