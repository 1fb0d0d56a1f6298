// fastmax_cuda::rotary_factors (layer/rotary.h).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <cstdio>
#include <tuple>
#include <vector>

#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/debug.h"
#include "bindings/layout.h"
#include "bindings/torch_abi.h"
#include "layer/rotary.h"

namespace fastmax {
namespace {

std::tuple<Tensor, Tensor> rotary_factors(const Tensor& positions, int64_t half, double base, bool wide) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("positions", positions));
  FASTMAX_CHECK(positions.dim() == 1 || positions.dim() == 2, "positions must be 1- or 2-dimensional, got ", positions.dim(),
                " dimensions");
  const bool is_long = positions.scalar_type() == ScalarType::Long;
  FASTMAX_CHECK(is_long || positions.scalar_type() == ScalarType::Int, "positions must be int32 or int64");
  FASTMAX_CHECK(half >= 1, "half must be at least 1, got ", half);
  FASTMAX_CHECK(std::isfinite(base) && base > 0, "base must be finite and > 0, got ", base);
  check_device_has_kernels(positions);
  FASTMAX_CHECK(!wide, "wide must be False for the CUDA kernels");
  FASTMAX_CHECK(half <= kMaxRotaryAngles, "half must be up to ", kMaxRotaryAngles, ", got ", half);
  const int device = positions.get_device_index();
  const auto shape = positions.sizes();
  std::vector<int64_t> sizes(shape.begin(), shape.end());
  sizes.insert(sizes.end(), {1, 2 * half});
  const Tensor cos = empty_contiguous(sizes, ScalarType::Float, device);
  const Tensor sin = empty_contiguous(sizes, ScalarType::Float, device);
  if (is_empty(positions)) return {cos, sin};

  const Tensor contiguous = dense(positions);
  RotaryParams p{};
  p.tokens = positions.numel(), p.half = static_cast<int>(half), p.base = base;
  p.positions = contiguous.data_ptr(), p.wide_positions = is_long;
  p.cos = static_cast<float*>(cos.data_ptr()), p.sin = static_cast<float*>(sin.data_ptr());
  if (is_debugging()) {
    std::fprintf(stderr, "fastmax::rotary_factors: rotary_factors_sm80: tokens %lld, rotated %d\n", static_cast<long long>(p.tokens),
                 2 * p.half);
  }
  launch_rotary_factors(p, current_stream(device));
  return {cos, sin};
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("rotary_factors", TORCH_BOX(&fastmax::rotary_factors));
}
