// Layouts: strides, alignment, copies for the kernels, and results in the caller's layout.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "bindings/torch_abi.h"
#include "core/params.h"

namespace fastmax {

// Uninitialised. Strides match PyTorch's own, also for tensors without elements.
inline Tensor empty_contiguous(const std::vector<int64_t>& sizes, ScalarType dtype, int device_index) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= std::max<int64_t>(1, sizes[i])) strides[i] = step;
  return empty_strided(sizes, strides, dtype, device_index);
}

// Uninitialised, contiguous, with like's shape.
inline Tensor empty_dense(const Tensor& like, ScalarType dtype) {
  const auto shape = like.sizes();
  return empty_contiguous({shape.begin(), shape.end()}, dtype, like.get_device_index());
}

// A contiguous copy. The stable ABI has functions for copies and zeros, but they do not report that memory ran out.
inline Tensor dense_copy(const Tensor& x, ScalarType dtype) {
  Tensor copy = empty_dense(x, dtype);
  return torch::stable::copy_(copy, x);
}

// Whether the elements of each row are contiguous.
inline bool has_dense_rows(const Tensor& x) { return x.stride(3) == 1 || x.size(3) == 1; }

// Returns x (b, h, tokens, d) if its rows are dense, else a contiguous copy.
inline Tensor with_dense_rows(const Tensor& x) { return has_dense_rows(x) ? x : dense_copy(x, x.scalar_type()); }

inline Tensor dense(const Tensor& x) { return x.is_contiguous() ? x : dense_copy(x, x.scalar_type()); }

inline bool is_token_major(const Tensor& x) { return x.stride(1) < x.stride(2); }

// Uninitialised, (b, h, tokens, d), in like's memory order: token-major (b, tokens, h, d) or contiguous.
inline Tensor empty_like_layout(const Tensor& like, int64_t d) {
  const int64_t b = like.size(0), h = like.size(1), n = like.size(2);
  const int64_t h1 = std::max<int64_t>(1, h), n1 = std::max<int64_t>(1, n);  // strides match PyTorch's own
  const std::vector<int64_t> strides = is_token_major(like) ? std::vector<int64_t>{n1 * h1 * d, d, h1 * d, 1}
                                                            : std::vector<int64_t>{h1 * n1 * d, n1 * d, d, 1};
  return empty_strided({b, h, n, d}, strides, like.scalar_type(), like.get_device_index());
}

inline Tensor zeros_like_layout(const Tensor& like, int64_t d) {
  Tensor x = empty_like_layout(like, d);
  return torch::stable::zero_(x);
}

inline Stride stride_of(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }

inline bool begins_aligned(const Tensor& x) { return reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0; }

// Whether the kernels can access the rows of x, 16 bytes at a time.
inline bool is_aligned(const Tensor& x) {
  const int64_t elements = 16 / static_cast<int64_t>(x.element_size()), last = x.dim() - 1;
  if (!begins_aligned(x) || x.stride(last) != 1 || x.size(last) % elements != 0) return false;
  for (int64_t i = 0; i < last; ++i) {
    if (x.stride(i) % elements != 0 && x.size(i) > 1) return false;
  }
  return true;
}

// Returns x if it is contiguous and begins at a multiple of 16 bytes, else a copy.
inline Tensor aligned_dense(const Tensor& x) { return x.is_contiguous() && begins_aligned(x) ? x : dense_copy(x, x.scalar_type()); }

// Returns x if the kernels can read its rows, else a contiguous copy. Rows are multiples of 16 bytes.
inline Tensor readable_or_dense(const Tensor& x) { return is_aligned(x) ? x : dense_copy(x, x.scalar_type()); }

// Returns x if the kernels can read it, else a copy whose last dimension is zero-padded to a multiple of 16 bytes.
inline Tensor readable(const Tensor& x) {
  if (is_aligned(x)) return x;
  const int64_t elements = 16 / static_cast<int64_t>(x.element_size());
  const int64_t d = x.size(3), padded = (d + elements - 1) / elements * elements;
  if (padded == d) {
    Tensor copy = empty_like_layout(x, d);
    torch::stable::copy_(copy, x);
    return copy;
  }
  Tensor copy = zeros_like_layout(x, padded);
  Tensor columns = torch::stable::narrow(copy, 3, 0, d);
  torch::stable::copy_(columns, x);
  return copy;
}

// An output: stored aligned for the kernels, and narrowed to the caller's columns by result().
struct Output {
  Tensor storage;
  int64_t columns;

  Output(const Tensor& like, int64_t d, int64_t padded) : storage(empty_like_layout(like, padded)), columns(d) {}
  explicit Output(const Tensor& storage) : storage(storage), columns(storage.size(3)) {}

  Tensor result() const {
    if (storage.size(3) == columns) return storage;
    Tensor dense = empty_like_layout(storage, columns);
    torch::stable::copy_(dense, torch::stable::narrow(const_cast<Tensor&>(storage), 3, 0, columns));
    return dense;
  }
};

// The gradient of an absent input: a tensor without elements.
inline Tensor no_elements(const Tensor& like) { return empty_strided({0}, {1}, like.scalar_type(), like.get_device_index()); }

// The gradient of an input with a number per token, uninitialised; in a call without tokens, of zeros.
inline Tensor empty_token_gradient(const OptionalTensor& x, const Tensor& like) {
  return x.has_value() ? empty_dense(*x, x->scalar_type()) : no_elements(like);
}
inline Tensor zero_token_gradient(const OptionalTensor& x, const Tensor& like) {
  Tensor gradient = empty_token_gradient(x, like);
  return torch::stable::zero_(gradient);
}

// The range of memory that a tensor covers.
struct Extent {
  const char* begin;
  const char* end;
};

inline Extent extent(const Tensor& x) {
  int64_t last = 0;
  for (int64_t i = 0; i < x.dim(); ++i) last += (x.size(i) - 1) * x.stride(i);
  const char* begin = static_cast<const char*>(x.data_ptr());
  return {begin, x.numel() == 0 ? begin : begin + (last + 1) * x.element_size()};
}

inline bool overlap(const Tensor& x, const Tensor& y) {
  const Extent a = extent(x), b = extent(y);
  return a.begin < b.end && b.begin < a.end;
}

inline bool is_empty(const Tensor& x) { return x.numel() == 0; }

}  // namespace fastmax
