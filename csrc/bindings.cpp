// fastmax::forward and fastmax::backward for CUDA tensors, against the libtorch stable ABI: tensors to params, allocation,
// device guard, stream. The schemas are declared in Python, where arguments were validated; checked again here is only what
// would be unsafe. Calls that the kernels do not cover go to the PyTorch implementation, fastmax::eager_forward and _backward.

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <climits>
#include <string>
#include <tuple>
#include <vector>

#include "cost_model.h"
#include "device.h"
#include "dispatch.h"
#include "launch.h"
#include "params.h"
#include "tensors.h"

namespace fastmax {
namespace {

// Whether the kernels compute this call. If not, the PyTorch implementation does.
bool is_covered(const Tensor& q, const Tensor& v, const OptionalTensor& rpe_matrix) {
  const int64_t widest = std::max(q.size(3), v.size(3));
  return !rpe_matrix.has_value() && kernels_run_on(q) && widest <= INT_MAX && native_head_dim(static_cast<int>(widest)) != 0;
}

bool is_token_major(const Tensor& x) { return x.stride(1) < x.stride(2); }

// (b, h, tokens, d), token-major (b, tokens, h, d) in memory or contiguous.
Tensor empty_like_layout(const Tensor& like, int64_t d) {
  const int64_t b = like.size(0), h = like.size(1), n = like.size(2);
  const std::vector<int64_t> strides = is_token_major(like) ? std::vector<int64_t>{n * h * d, d, h * d, 1}
                                                            : std::vector<int64_t>{h * n * d, n * d, d, 1};
  return empty_strided({b, h, n, d}, strides, like.scalar_type(), like.get_device_index());
}

Stride stride_of(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }

// The kernels move 16 bytes at a time.
bool is_aligned(const Tensor& x) {
  const int64_t elements = 16 / static_cast<int64_t>(x.element_size());
  if (reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 != 0 || x.stride(3) != 1 || x.size(3) % elements != 0) return false;
  for (int i = 0; i < 3; ++i) {
    if (x.stride(i) % elements != 0 && x.size(i) > 1) return false;
  }
  return true;
}

// x itself where the kernels can read it, else a copy whose last dimension is padded with zeros to a multiple of 16 bytes.
Tensor readable(const Tensor& x) {
  if (is_aligned(x)) return x;
  const int64_t elements = 16 / static_cast<int64_t>(x.element_size());
  const int64_t d = x.size(3), padded = (d + elements - 1) / elements * elements;
  if (padded == d) {
    Tensor copy = empty_like_layout(x, d);
    torch::stable::copy_(copy, x);
    return copy;
  }
  const std::vector<int64_t> sizes{x.size(0), x.size(1), x.size(2), padded};
  Tensor copy = torch::stable::new_zeros(x, sizes);
  Tensor columns = torch::stable::narrow(copy, 3, 0, d);
  torch::stable::copy_(columns, x);
  return copy;
}

// An output: aligned as the kernels need it, and narrowed to the caller's columns at the end.
struct Output {
  Tensor storage;
  int64_t columns;

  Output(const Tensor& like, int64_t d, int64_t padded) : storage(empty_like_layout(like, padded)), columns(d) {}

  Tensor result() const {
    if (storage.size(3) == columns) return storage;
    Tensor dense = empty_like_layout(storage, columns);
    torch::stable::copy_(dense, torch::stable::narrow(const_cast<Tensor&>(storage), 3, 0, columns));
    return dense;
  }
};

OptionalTensor readable(const OptionalTensor& x) { return x.has_value() ? OptionalTensor(readable(*x)) : std::nullopt; }

struct Parameters {
  double scale, a0, a1, a2;
  int64_t order;
  bool causal;
  double dropout;
  bool allow_tf32;
};

void fill_problem(Problem& p, const Tensor& q, const Tensor& k, const Tensor& v, const Parameters& x) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "fastmax: q, k and v must be 4-dimensional");
  STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "fastmax: q, k and v differ in dtype");
  STD_TORCH_CHECK(k.get_device_index() == q.get_device_index() && v.get_device_index() == q.get_device_index(),
                  "fastmax: q, k and v are on different devices");
  STD_TORCH_CHECK(k.size(0) == q.size(0) && v.size(0) == q.size(0) && v.size(1) == k.size(1) && v.size(2) == k.size(2) &&
                      k.size(3) == q.size(3) && k.size(1) > 0 && q.size(1) % k.size(1) == 0,
                  "fastmax: shapes of q, k and v do not match");
  STD_TORCH_CHECK(x.order == 1 || x.order == 2, "fastmax: p must be 1 or 2, got ", x.order);
  STD_TORCH_CHECK(q.size(2) <= INT_MAX / 2 && k.size(2) <= INT_MAX / 2, "fastmax: too many tokens");
  STD_TORCH_CHECK(!x.causal || q.size(2) <= k.size(2), "fastmax: causal attention needs n <= m");

  p.b = static_cast<int>(q.size(0));
  p.h = static_cast<int>(q.size(1));
  p.hk = static_cast<int>(k.size(1));
  p.n = static_cast<int>(q.size(2));
  p.m = static_cast<int>(k.size(2));
  p.d = static_cast<int>(q.size(3));
  p.dv = static_cast<int>(v.size(3));
  p.head_dim = native_head_dim(p.d > p.dv ? p.d : p.dv);
  p.math = math_mode(q.scalar_type(), x.allow_tf32);

  p.scale = static_cast<float>(x.scale);
  p.a0 = static_cast<float>(x.a0);
  p.a1 = static_cast<float>(x.a1);
  p.a2 = x.order == 2 ? static_cast<float>(x.a2) : 0.f;
  p.order = static_cast<int>(x.order);
  p.causal = x.causal;
  p.causal_offset = p.m - p.n;
  p.dropout = static_cast<float>(x.dropout);

  const Device& device = get_device(q.get_device_index());
  p.sm_arch = device.arch;
  p.sm_count = device.sm_count;
}

template <class Params>
void fill_optional(Params& p, const OptionalTensor& mask, const OptionalTensor& noise) {
  p.key_padding_mask = mask.has_value() ? static_cast<const uint8_t*>(mask->data_ptr()) : nullptr;
  p.mask_batch_stride = mask.has_value() ? mask->stride(0) : 0;
  p.noise = noise.has_value() ? noise->data_ptr() : nullptr;
  p.noise_stride = noise.has_value() ? stride_of(*noise) : Stride{};
}

OptionalTensor contiguous_mask(const OptionalTensor& mask, const Tensor& k) {
  if (!mask.has_value()) return std::nullopt;
  STD_TORCH_CHECK(mask->dim() == 2 && mask->size(0) == k.size(0) && mask->size(1) == k.size(2) &&
                      mask->scalar_type() == ScalarType::Bool,
                  "fastmax: key_padding_mask must be bool of shape (batch, keys)");
  return mask->stride(1) == 1 ? mask : OptionalTensor(torch::stable::contiguous(*mask));
}

OptionalTensor checked_noise(const OptionalTensor& noise, const Tensor& q, const Tensor& v) {
  if (!noise.has_value()) return std::nullopt;
  STD_TORCH_CHECK(noise->dim() == 4 && noise->size(0) == q.size(0) && noise->size(1) == q.size(1) && noise->size(2) == q.size(2) &&
                      noise->size(3) == v.size(3),
                  "fastmax: drop_noise must have the output's shape");
  if (noise->scalar_type() == q.scalar_type()) return readable(noise);
  return readable(torch::stable::to(*noise, q.scalar_type()));
}

Algorithm resolve(const std::string& algorithm, const Problem& p) {
  if (algorithm == "quadratic") return Algorithm::kQuadratic;
  if (algorithm == "linear") return Algorithm::kLinear;
  STD_TORCH_CHECK(algorithm == "auto", "fastmax: algorithm must be auto, quadratic or linear, got ", algorithm);
  return choose_algorithm(p);
}

Tensor allocate_workspace(size_t bytes, int device_index) {
  return empty_strided({static_cast<int64_t>(bytes)}, {1}, ScalarType::Byte, device_index);
}

bool is_empty(const Tensor& x) { return x.numel() == 0; }

Tensor zeros_like_layout(const Tensor& like, int64_t d) {
  Tensor x = empty_like_layout(like, d);
  return torch::stable::zero_(x);
}

std::tuple<Tensor, Tensor> forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const OptionalTensor& key_padding_mask,
                                   const OptionalTensor& drop_noise, const OptionalTensor& rpe_matrix, double scale, double a0,
                                   double a1, double a2, int64_t order, bool causal, double dropout, const std::string& algorithm, bool allow_tf32) {
  const int device_index = q_in.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  if (!is_covered(q_in, v_in, rpe_matrix)) {
    const auto [o, z] = call_operator<2>("fastmax::eager_forward", q_in, k_in, v_in, key_padding_mask, drop_noise, rpe_matrix, scale,
                                         a0, a1, a2, order, causal, dropout, algorithm, allow_tf32);
    return {o, z};
  }
  const int64_t b = q_in.size(0), h = q_in.size(1), n = q_in.size(2);

  Tensor z = empty_strided({b, h, n}, {h * n, n, 1}, ScalarType::Float, device_index);
  if (is_empty(q_in) || is_empty(k_in) || is_empty(v_in)) {
    return {zeros_like_layout(q_in, v_in.size(3)), torch::stable::zero_(z)};
  }

  const Tensor q = readable(q_in), k = readable(k_in), v = readable(v_in);
  FwdParams p{};
  fill_problem(p, q, k, v, {scale, a0, a1, a2, order, causal, dropout, allow_tf32});
  const OptionalTensor mask = contiguous_mask(key_padding_mask, k), noise = checked_noise(drop_noise, q, v_in);
  fill_optional(p, mask, noise);
  p.q = q.data_ptr(), p.q_stride = stride_of(q);
  p.k = k.data_ptr(), p.k_stride = stride_of(k);
  p.v = v.data_ptr(), p.v_stride = stride_of(v);

  Output o(q_in, v_in.size(3), v.size(3));
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
  if (!is_covered(q_in, v_in, rpe_matrix)) {
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

  const Tensor q = readable(q_in), k = readable(k_in), v = readable(v_in), o = readable(o_in), grad_o = readable(grad_o_in);
  BwdParams p{};
  fill_problem(p, q, k, v, {scale, a0, a1, a2, order, causal, dropout, allow_tf32});
  STD_TORCH_CHECK(z.scalar_type() == ScalarType::Float && z.is_contiguous() && z.numel() == int64_t{p.b} * p.h * p.n,
                  "fastmax: z must be the forward's second output");
  STD_TORCH_CHECK(o.numel() == int64_t{p.b} * p.h * p.n * p.dv && grad_o.numel() == o.numel() &&
                      grad_o.scalar_type() == q.scalar_type() && o.scalar_type() == q.scalar_type(),
                  "fastmax: o and grad_o must have the output's shape and dtype");
  const OptionalTensor mask = contiguous_mask(key_padding_mask, k), noise = checked_noise(drop_noise, q, v_in);
  fill_optional(p, mask, noise);
  p.q = q.data_ptr(), p.q_stride = stride_of(q);
  p.k = k.data_ptr(), p.k_stride = stride_of(k);
  p.v = v.data_ptr(), p.v_stride = stride_of(v);
  p.o = o.data_ptr(), p.o_stride = stride_of(o);
  p.grad_o = grad_o.data_ptr(), p.grad_o_stride = stride_of(grad_o);
  p.z = static_cast<const float*>(z.data_ptr());

  Output grad_q(q_in, q_in.size(3), q.size(3)), grad_k(k_in, k_in.size(3), k.size(3)), grad_v(v_in, v_in.size(3), v.size(3));
  p.grad_q = grad_q.storage.data_ptr(), p.grad_q_stride = stride_of(grad_q.storage);
  p.grad_k = grad_k.storage.data_ptr(), p.grad_k_stride = stride_of(grad_k.storage);
  p.grad_v = grad_v.storage.data_ptr(), p.grad_v_stride = stride_of(grad_v.storage);

  const cudaStream_t stream = current_stream(device_index);
  if (resolve(algorithm, p) == Algorithm::kLinear) {
    const Tensor workspace = allocate_workspace(linear_bwd_workspace_bytes(p), device_index);
    p.workspace = workspace.data_ptr();
    launch_linear_bwd(p, stream);
  } else {
    const Tensor workspace = allocate_workspace(quadratic_bwd_workspace_bytes(p), device_index);
    p.workspace = workspace.data_ptr();
    FASTMAX_DISPATCH_MATH(p, quadratic_bwd, p, stream);
  }
  return {grad_q.result(), grad_k.result(), grad_v.result(), grad_rpe};
}

}  // namespace
}  // namespace fastmax

// For fastmax/extension.py, which reads them through ctypes.
#define FASTMAX_EXPORT extern "C" __attribute__((visibility("default")))

// SCHEMA_VERSION in fastmax/extension.py: the schemas that these functions are written for.
FASTMAX_EXPORT int fastmax_schema_version() { return 1; }

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
