// fastmax_cuda::merge_, merge_parts and its gradient (merge.h).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <climits>
#include <cstdio>
#include <string>
#include <tuple>
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

// A part of the keys, with rows that kernels can read.
struct Part {
  Tensor o, lse;

  Part(const char* name, const Tensor& o_in, const Tensor& lse_in, const Tensor& like) : o(o_in), lse(lse_in) {
    const std::string of_lse = std::string(name) + "_lse";
    FASTMAX_CHECK(like.dim() == 4, "first must be 4-dimensional, got ", like.dim(), " dimensions");
    check_device(name, o, like, "first");
    check_shape(name, o, {like.size(0), like.size(1), like.size(2), like.size(3)});
    FASTMAX_CHECK(o.scalar_type() == like.scalar_type(), name, " must have the dtype of first");
    check_device(of_lse.c_str(), lse, like, "first");
    check_shape(of_lse.c_str(), lse, {o.size(0), o.size(1), o.size(2)});
    FASTMAX_CHECK(lse.scalar_type() == ScalarType::Float, of_lse, " must be float32 for the CUDA kernels");
    o = with_dense_rows(o);
  }

  AttentionPart params() const {
    return {o.data_ptr(), static_cast<const float*>(lse.data_ptr()), stride_of(o), stride_of(lse)};
  }
};

void check_sizes(const Tensor& o) {
  FASTMAX_CHECK(o.size(0) <= INT_MAX && o.size(1) <= INT_MAX && o.size(0) * o.size(1) <= INT_MAX && o.size(2) <= INT_MAX / 2 && o.size(3) <= INT_MAX / 2,
                "first is too large: ", shape_text(o.sizes()));
}

void fill(PartsParams& p, const Part& first, const Part& second) {
  const Tensor& o = first.o;
  p.b = static_cast<int>(o.size(0)), p.h = static_cast<int>(o.size(1)), p.n = static_cast<int>(o.size(2)), p.dv = static_cast<int>(o.size(3));
  p.math = math_mode(o.scalar_type(), /*allow_tf32=*/false);
  p.aligned = is_aligned(o) && is_aligned(second.o);
  p.first = first.params(), p.second = second.params();
}

void print_merge(const char* name, const PartsParams& p) {
  if (!is_debugging()) return;
  std::fprintf(stderr, "fastmax::%s: merge_sm80: b %d, h %d, n %d, dv %d%s\n", name, p.b, p.h, p.n, p.dv, p.aligned ? "" : ", unaligned");
}

Tensor empty_lse(const Tensor& o) { return empty_contiguous({o.size(0), o.size(1), o.size(2)}, ScalarType::Float, o.get_device_index()); }

std::tuple<Tensor, Tensor> merge_parts(const Tensor& first_in, const Tensor& first_lse, const Tensor& second_in, const Tensor& second_lse) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("first", first_in));
  const Part first("first", first_in, first_lse, first_in), second("second", second_in, second_lse, first_in);
  check_kernels_run_on("first", first_in);
  check_sizes(first_in);
  const Tensor o = empty_like_layout(first_in, first_in.size(3)), lse = empty_lse(first_in);
  if (is_empty(lse)) return {o, lse};
  MergePartsParams p{};
  fill(p, first, second);
  p.aligned = p.aligned && is_aligned(o);
  p.o = o.data_ptr(), p.o_stride = stride_of(o), p.lse = static_cast<float*>(lse.data_ptr());
  print_merge("merge_parts", p);
  launch_merge_parts(p, current_stream(first_in.get_device_index()));
  return {o, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> merge_parts_backward(const OptionalTensor& grad_o, const OptionalTensor& grad_lse,
                                                                const Tensor& first_in, const Tensor& first_lse, const Tensor& second_in,
                                                                const Tensor& second_lse) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("first", first_in));
  const Part first("first", first_in, first_lse, first_in), second("second", second_in, second_lse, first_in);
  check_kernels_run_on("first", first_in);
  check_sizes(first_in);
  const int64_t dv = first_in.size(3);
  const Tensor of_first = empty_like_layout(first_in, dv), of_second = empty_like_layout(second_in, dv);
  const Tensor of_first_lse = empty_lse(first_in), of_second_lse = empty_lse(first_in);
  MergePartsBackwardParams p{};
  fill(p, first, second);
  p.aligned = p.aligned && is_aligned(of_first) && is_aligned(of_second);
  Tensor grad;
  if (grad_o.has_value()) {
    check_device("grad_o", *grad_o, first_in, "first");
    check_shape("grad_o", *grad_o, {first_in.size(0), first_in.size(1), first_in.size(2), dv});
    FASTMAX_CHECK(grad_o->scalar_type() == first_in.scalar_type(), "grad_o must have the dtype of first");
    grad = with_dense_rows(*grad_o);
    p.aligned = p.aligned && is_aligned(grad);
    p.grad_o = grad.data_ptr(), p.grad_o_stride = stride_of(grad);
  }
  if (grad_lse.has_value()) {
    check_device("grad_lse", *grad_lse, first_in, "first");
    check_shape("grad_lse", *grad_lse, {first_in.size(0), first_in.size(1), first_in.size(2)});
    FASTMAX_CHECK(grad_lse->scalar_type() == ScalarType::Float, "grad_lse must be float32 for the CUDA kernels");
    p.grad_lse = static_cast<const float*>(grad_lse->data_ptr()), p.grad_lse_stride = stride_of(*grad_lse);
  }
  if (is_empty(of_first_lse)) return {of_first, of_first_lse, of_second, of_second_lse};
  p.grad_first_o = of_first.data_ptr(), p.grad_first_o_stride = stride_of(of_first);
  p.grad_second_o = of_second.data_ptr(), p.grad_second_o_stride = stride_of(of_second);
  p.grad_first_lse = static_cast<float*>(of_first_lse.data_ptr()), p.grad_second_lse = static_cast<float*>(of_second_lse.data_ptr());
  print_merge("merge_parts_backward", p);
  launch_merge_parts_backward(p, current_stream(first_in.get_device_index()));
  return {of_first, of_first_lse, of_second, of_second_lse};
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
  m.impl("merge_parts", TORCH_BOX(&fastmax::merge_parts));
  m.impl("merge_parts_backward", TORCH_BOX(&fastmax::merge_parts_backward));
}
