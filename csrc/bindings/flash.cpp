// fastmax::flash_forward and fastmax::flash_backward for CUDA tensors, as bindings.cpp does it for the polynomial.

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <limits>
#include <tuple>

#include "bindings/attention_tensors.h"
#include "core/algorithm.h"
#include "core/params.h"
#include "bindings/tensors.h"
#include "quadratic/algorithm.h"

namespace fastmax {
namespace {

std::tuple<Tensor, Tensor> flash_forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                         const OptionalTensor& key_padding_mask, double scale, bool causal, bool allow_tf32) {
  const int device_index = q_in.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  if (!has_kernels(q_in, v_in)) {
    const auto [o, lse] =
        call_operator<2>("fastmax::eager_flash_forward", q_in, k_in, v_in, key_padding_mask, scale, causal, allow_tf32);
    return {o, lse};
  }
  const int64_t b = q_in.size(0), h = q_in.size(1), n = q_in.size(2);

  Tensor lse = empty_strided({b, h, n}, {h * n, n, 1}, ScalarType::Float, device_index);
  if (is_empty(q_in) || is_empty(k_in) || is_empty(v_in)) {
    return {zeros_like_layout(q_in, v_in.size(3)), torch::stable::fill_(lse, -std::numeric_limits<double>::infinity())};
  }

  const Operands x(q_in, k_in, v_in, key_padding_mask);
  const Output o(q_in, v_in.size(3), x.v.size(3));
  FwdParams p{};
  x.fill(p, scale, causal, allow_tf32);
  p.o = o.storage.data_ptr(), p.o_stride = stride_of(o.storage);
  p.z = static_cast<float*>(lse.data_ptr());
  const Kernels& kernels = select(kFlashAlgorithm, p, Direction::kForward);
  const Tensor workspace = allocate_workspace(kernels.fwd_workspace_bytes(p), device_index);
  p.workspace = workspace.data_ptr();
  kernels.fwd(p, current_stream(device_index));
  return {o.result(), lse};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad_o_in, const OptionalTensor& grad_lse, const Tensor& q_in,
                                                  const Tensor& k_in, const Tensor& v_in, const Tensor& o_in, const Tensor& lse,
                                                  const OptionalTensor& key_padding_mask, double scale, bool causal, bool allow_tf32) {
  const int device_index = q_in.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  if (!has_kernels(q_in, v_in)) {
    const auto [grad_q, grad_k, grad_v] = call_operator<3>("fastmax::eager_flash_backward", grad_o_in, grad_lse, q_in, k_in, v_in, o_in,
                                                           lse, key_padding_mask, scale, causal, allow_tf32);
    return {grad_q, grad_k, grad_v};
  }
  if (is_empty(q_in) || is_empty(k_in) || is_empty(v_in)) {
    return {zeros_like_layout(q_in, q_in.size(3)), zeros_like_layout(k_in, k_in.size(3)), zeros_like_layout(v_in, v_in.size(3))};
  }

  const Operands x(q_in, k_in, v_in, key_padding_mask);
  const Gradients gradients(q_in, k_in, v_in, x, o_in, grad_o_in);
  BwdParams p{};
  x.fill(p, scale, causal, allow_tf32);
  gradients.fill(p, lse, "lse");
  OptionalTensor grad_z;
  if (grad_lse.has_value()) {
    STD_TORCH_CHECK(grad_lse->scalar_type() == ScalarType::Float && grad_lse->numel() == lse.numel(),
                    "fastmax: grad_lse must have lse's shape and dtype");
    grad_z = torch::stable::contiguous(*grad_lse);
    p.grad_z = static_cast<const float*>(grad_z->data_ptr());
  }

  const Kernels& kernels = select(kFlashAlgorithm, p, Direction::kBackward);
  const Tensor workspace = allocate_workspace(kernels.bwd_workspace_bytes(p), device_index);
  p.workspace = workspace.data_ptr();
  kernels.bwd(p, current_stream(device_index));
  return {gradients.grad_q.result(), gradients.grad_k.result(), gradients.grad_v.result()};
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax, CUDA, m) {
  m.impl("flash_forward", TORCH_BOX(&fastmax::flash_forward));
  m.impl("flash_backward", TORCH_BOX(&fastmax::flash_backward));
}
