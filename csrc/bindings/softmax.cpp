// fastmax_cuda::softmax (softmax.h).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdio>
#include <string>

#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/debug.h"
#include "bindings/layout.h"
#include "bindings/torch_abi.h"
#include "core/device.h"
#include "softmax/softmax.h"

namespace fastmax {
namespace {

// The stride from each row of x to the next, in elements; -1 if it differs between rows, in which case the kernel gets a copy.
int64_t row_stride(const Tensor& x) {
  const int64_t dims = x.dim();
  if (x.stride(dims - 1) != 1 && x.size(dims - 1) > 1) return -1;
  int64_t stride = -1, rows = 1;  // rows: in the dimensions after i
  for (int64_t i = dims - 2; i >= 0; --i) {
    if (x.size(i) == 1) continue;
    if (rows == 1) {
      stride = x.stride(i);
    } else if (x.stride(i) != stride * rows) {
      return -1;
    }
    rows *= x.size(i);
  }
  return rows == 1 ? x.size(dims - 1) : stride;
}

Tensor softmax(const Tensor& x_in, const std::string& algorithm) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("x", x_in));
  FASTMAX_CHECK(x_in.dim() > 0, "x must have at least one dimension");
  FASTMAX_CHECK(algorithm == "safe" || algorithm == "online", "algorithm must be safe or online, got ", algorithm);
  check_kernels_run_on("x", x_in);
  FASTMAX_CHECK(x_in.size(x_in.dim() - 1) <= kMaxSoftmaxWidth, "x must have at most ", kMaxSoftmaxWidth, " columns");

  const Tensor x = row_stride(x_in) < 0 ? dense(x_in) : x_in;
  const Tensor y = empty_dense(x, x.scalar_type());
  if (x.numel() == 0) return y;

  SoftmaxParams p{};
  p.width = static_cast<int>(x.size(x.dim() - 1));
  p.rows = x.numel() / p.width;
  p.math = math_mode(x.scalar_type(), /*allow_tf32=*/false);
  p.online = algorithm == "online";
  p.sm_count = get_device(x.get_device_index()).sm_count;
  p.x = x.data_ptr(), p.row_stride = row_stride(x);
  p.y = y.data_ptr();
  if (is_debugging()) std::fprintf(stderr, "fastmax::softmax: softmax_sm80: rows %lld, width %d\n", static_cast<long long>(p.rows), p.width);
  launch_softmax(p, current_stream(x.get_device_index()));
  return y;
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("softmax", TORCH_BOX(&fastmax::softmax));
}
