// fastmax_cuda::finite_decay (decay/decay.h).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <climits>
#include <cstdio>
#include <tuple>

#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/debug.h"
#include "bindings/layout.h"
#include "bindings/torch_abi.h"
#include "decay/decay.h"

namespace fastmax {
namespace {

std::tuple<Tensor, Tensor> finite_decay(const Tensor& log_decay, bool continues, bool wide) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("log_decay", log_decay));
  FASTMAX_CHECK(log_decay.dim() == 3, "log_decay must have shape (b, hk, m), got ", shape_text(log_decay.sizes()));
  const int64_t b = log_decay.size(0), hk = log_decay.size(1), m = log_decay.size(2);
  check_kernels_run_on("log_decay", log_decay);
  FASTMAX_CHECK(!wide, "wide must be False for the CUDA kernels");
  FASTMAX_CHECK(m <= INT_MAX / 2 && b <= INT_MAX && hk <= INT_MAX && b * hk <= INT_MAX, "log_decay is too large: ", shape_text(log_decay.sizes()));
  const int device = log_decay.get_device_index();
  const Tensor finite = empty_dense(log_decay, ScalarType::Float);
  const Tensor k_start = empty_dense(log_decay, ScalarType::Int);
  if (log_decay.numel() == 0) return {finite, k_start};

  FiniteDecayParams p{};
  p.b = static_cast<int>(b), p.hk = static_cast<int>(hk), p.m = static_cast<int>(m);
  p.dtype = math_mode(log_decay.scalar_type(), /*allow_tf32=*/false);
  p.log_decay = log_decay.data_ptr(), p.log_decay_stride = stride_of(log_decay);
  p.continues = continues;
  p.finite = static_cast<float*>(finite.data_ptr());
  p.k_start = static_cast<int32_t*>(k_start.data_ptr());
  if (is_debugging()) std::fprintf(stderr, "fastmax::finite_decay: finite_decay_sm80: b %d, hk %d, m %d\n", p.b, p.hk, p.m);
  const Tensor workspace = allocate_workspace(finite_decay_workspace_bytes(p), device);
  launch_finite_decay(p, workspace.data_ptr(), current_stream(device));
  return {finite, k_start};
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("finite_decay", TORCH_BOX(&fastmax::finite_decay));
}
