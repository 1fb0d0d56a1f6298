// fastmax_cuda::merge_ (merge.h).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <climits>
#include <cstdio>
#include <utility>

#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/debug.h"
#include "bindings/layout.h"
#include "bindings/merge.h"
#include "bindings/torch_abi.h"
#include "merge/merge.h"

namespace fastmax {
namespace {

void check_merge(const Tensor& o, const Tensor& lse, const Tensor& o_global, const Tensor& z_global) {
  FASTMAX_CHECK(o.dim() == 4, "o must be 4-dimensional, got ", o.dim(), " dimensions");
  const int64_t b = o.size(0), h = o.size(1), n = o.size(2);
  FASTMAX_CHECK(b <= INT_MAX && h <= INT_MAX && b * h <= INT_MAX, "o has too many heads: ", b, " x ", h);
  FASTMAX_CHECK(n <= INT_MAX / 2 && o.size(3) <= INT_MAX / 2, "o is too large: ", n, " queries, ", o.size(3), " columns");
  check_device("o_global", o_global, o, "o");
  check_shape("o_global", o_global, {b, h, n, o.size(3)});
  FASTMAX_CHECK(o_global.scalar_type() == o.scalar_type(), "o_global must have o's dtype");
  const auto check_number = [&](const char* name, const Tensor& x) {
    const bool wide = o.scalar_type() == ScalarType::Double;
    check_device(name, x, o, "o");
    check_shape(name, x, {b, h, n});
    FASTMAX_CHECK(x.scalar_type() == (wide ? ScalarType::Double : ScalarType::Float), name, " must be ", wide ? "float64" : "float32");
  };
  check_number("lse", lse);
  check_number("z_global", z_global);
  for (const auto& [name, x] : {std::pair("o", &o), std::pair("lse", &lse)}) {
    for (int i = 0; i < x->dim(); ++i) FASTMAX_CHECK(x->stride(i) != 0 || x->size(i) <= 1, name, " is written over and must not be expanded");
  }
  FASTMAX_CHECK(!overlap(o, o_global), "o_global must not overlap o, which is written over");
  FASTMAX_CHECK(!overlap(lse, z_global), "z_global must not overlap lse, which is written over");
}

}  // namespace

void merge(const Tensor& o, const Tensor& lse, const Tensor& o_global_in, const Tensor& z_global) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("o", o));
  check_merge(o, lse, o_global_in, z_global);
  check_kernels_run_on("o", o);
  FASTMAX_CHECK(has_dense_rows(o), "o must have unit stride in its last dimension");

  if (is_empty(z_global)) return;
  const Tensor o_global = with_dense_rows(o_global_in);
  MergeParams p{};
  p.b = static_cast<int>(o.size(0)), p.h = static_cast<int>(o.size(1)), p.n = static_cast<int>(o.size(2));
  p.dv = static_cast<int>(o.size(3));
  p.math = math_mode(o.scalar_type(), /*allow_tf32=*/false);
  p.aligned = is_aligned(o) && is_aligned(o_global);
  p.o = o.data_ptr(), p.o_stride = stride_of(o);
  p.o_global = o_global.data_ptr(), p.o_global_stride = stride_of(o_global);
  p.lse = static_cast<float*>(lse.data_ptr()), p.lse_stride = stride_of(lse);
  p.z_global = static_cast<const float*>(z_global.data_ptr()), p.z_global_stride = stride_of(z_global);
  if (is_debugging()) {
    std::fprintf(stderr, "fastmax::merge_: merge_sm80: b %d, h %d, n %d, dv %d\n", p.b, p.h, p.n, p.dv);
  }
  launch_merge(p, current_stream(o.get_device_index()));
}

}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("merge_", TORCH_BOX(&fastmax::merge));
}
