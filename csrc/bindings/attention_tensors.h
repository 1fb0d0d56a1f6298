// What the bindings of both attentions share: layouts, alignment, sizes; and filling of params from tensors.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <climits>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/dispatch.h"
#include "core/params.h"
#include "bindings/tensors.h"

namespace fastmax {

// Whether there are kernels for these tensors. If not, the PyTorch implementation computes the call.
inline bool has_kernels(const Tensor& q, const Tensor& v) {
  const int64_t widest = std::max(q.size(3), v.size(3));
  return kernels_run_on(q) && widest <= INT_MAX && NativeHeadDims::at_least(static_cast<int>(widest)) != 0;
}

inline bool is_token_major(const Tensor& x) { return x.stride(1) < x.stride(2); }

// (b, h, tokens, d), token-major (b, tokens, h, d) in memory or contiguous.
inline Tensor empty_like_layout(const Tensor& like, int64_t d) {
  const int64_t b = like.size(0), h = like.size(1), n = like.size(2);
  const std::vector<int64_t> strides = is_token_major(like) ? std::vector<int64_t>{n * h * d, d, h * d, 1}
                                                            : std::vector<int64_t>{h * n * d, n * d, d, 1};
  return empty_strided({b, h, n, d}, strides, like.scalar_type(), like.get_device_index());
}

inline Stride stride_of(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }

// The kernels move 16 bytes at a time.
inline bool is_aligned(const Tensor& x) {
  const int64_t elements = 16 / static_cast<int64_t>(x.element_size());
  if (reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 != 0 || x.stride(3) != 1 || x.size(3) % elements != 0) return false;
  for (int i = 0; i < 3; ++i) {
    if (x.stride(i) % elements != 0 && x.size(i) > 1) return false;
  }
  return true;
}

// x itself where the kernels can read it, else a copy whose last dimension is padded with zeros to a multiple of 16 bytes.
inline Tensor readable(const Tensor& x) {
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

inline OptionalTensor readable(const OptionalTensor& x) { return x.has_value() ? OptionalTensor(readable(*x)) : std::nullopt; }

// Sizes, arithmetic, scale and mask of a problem; checks what would be unsafe.
inline void fill_shapes(Problem& p, const Tensor& q, const Tensor& k, const Tensor& v, double scale, bool causal, bool allow_tf32) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "fastmax: q, k and v must be 4-dimensional");
  STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "fastmax: q, k and v differ in dtype");
  STD_TORCH_CHECK(k.get_device_index() == q.get_device_index() && v.get_device_index() == q.get_device_index(),
                  "fastmax: q, k and v are on different devices");
  STD_TORCH_CHECK(k.size(0) == q.size(0) && v.size(0) == q.size(0) && v.size(1) == k.size(1) && v.size(2) == k.size(2) &&
                      k.size(3) == q.size(3) && k.size(1) > 0 && q.size(1) % k.size(1) == 0,
                  "fastmax: shapes of q, k and v do not match");
  STD_TORCH_CHECK(q.size(2) <= INT_MAX / 2 && k.size(2) <= INT_MAX / 2, "fastmax: too many tokens");
  STD_TORCH_CHECK(!causal || q.size(2) <= k.size(2), "fastmax: causal attention needs n <= m");

  p.b = static_cast<int>(q.size(0));
  p.h = static_cast<int>(q.size(1));
  p.hk = static_cast<int>(k.size(1));
  p.n = static_cast<int>(q.size(2));
  p.m = static_cast<int>(k.size(2));
  p.d = static_cast<int>(q.size(3));
  p.dv = static_cast<int>(v.size(3));
  p.head_dim = NativeHeadDims::at_least(p.d > p.dv ? p.d : p.dv);
  p.math = math_mode(q.scalar_type(), allow_tf32);

  p.scale = static_cast<float>(scale);
  p.causal = causal;
  p.causal_offset = p.m - p.n;

  const Device& device = get_device(q.get_device_index());
  p.sm_arch = device.arch;
  p.sm_count = device.sm_count;
}

inline OptionalTensor contiguous_mask(const OptionalTensor& mask, const Tensor& k) {
  if (!mask.has_value()) return std::nullopt;
  STD_TORCH_CHECK(mask->dim() == 2 && mask->size(0) == k.size(0) && mask->size(1) == k.size(2) &&
                      mask->scalar_type() == ScalarType::Bool,
                  "fastmax: key_padding_mask must be bool of shape (batch, keys)");
  return mask->stride(1) == 1 ? mask : OptionalTensor(torch::stable::contiguous(*mask));
}

inline Tensor allocate_workspace(size_t bytes, int device_index) {
  return empty_strided({static_cast<int64_t>(bytes)}, {1}, ScalarType::Byte, device_index);
}

inline bool is_empty(const Tensor& x) { return x.numel() == 0; }

inline Tensor zeros_like_layout(const Tensor& like, int64_t d) {
  Tensor x = empty_like_layout(like, d);
  return torch::stable::zero_(x);
}

// Operands as the kernels read them, and where they are.
struct Operands {
  Tensor q, k, v;
  OptionalTensor mask;

  Operands(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const OptionalTensor& key_padding_mask)
      : q(readable(q_in)), k(readable(k_in)), v(readable(v_in)), mask(contiguous_mask(key_padding_mask, k)) {}

  // Params: FwdParams or BwdParams.
  template <class Params>
  void fill(Params& p, double scale, bool causal, bool allow_tf32) const {
    fill_shapes(p, q, k, v, scale, causal, allow_tf32);
    p.q = q.data_ptr(), p.q_stride = stride_of(q);
    p.k = k.data_ptr(), p.k_stride = stride_of(k);
    p.v = v.data_ptr(), p.v_stride = stride_of(v);
    p.key_padding_mask = mask.has_value() ? static_cast<const uint8_t*>(mask->data_ptr()) : nullptr;
    p.mask_batch_stride = mask.has_value() ? mask->stride(0) : 0;
  }
};

// The gradients of q, k and v, and o and grad_o as the kernels read them.
struct Gradients {
  Tensor o, grad_o;
  Output grad_q, grad_k, grad_v;

  Gradients(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Operands& x, const Tensor& o_in, const Tensor& grad_o_in)
      : o(readable(o_in)),
        grad_o(readable(grad_o_in)),
        grad_q(q_in, q_in.size(3), x.q.size(3)),
        grad_k(k_in, k_in.size(3), x.k.size(3)),
        grad_v(v_in, v_in.size(3), x.v.size(3)) {}

  // After Operands::fill. z: the forward's second output.
  void fill(BwdParams& p, const Tensor& z, const char* z_name) const {
    STD_TORCH_CHECK(z.scalar_type() == ScalarType::Float && z.is_contiguous() && z.numel() == int64_t{p.b} * p.h * p.n, "fastmax: ",
                    z_name, " must be the forward's second output");
    STD_TORCH_CHECK(o.numel() == int64_t{p.b} * p.h * p.n * p.dv && grad_o.numel() == o.numel() &&
                        grad_o.scalar_type() == grad_q.storage.scalar_type() && o.scalar_type() == grad_o.scalar_type(),
                    "fastmax: o and grad_o must have the output's shape and dtype");
    p.o = o.data_ptr(), p.o_stride = stride_of(o);
    p.grad_o = grad_o.data_ptr(), p.grad_o_stride = stride_of(grad_o);
    p.z = static_cast<const float*>(z.data_ptr());
    p.grad_q = grad_q.storage.data_ptr(), p.grad_q_stride = stride_of(grad_q.storage);
    p.grad_k = grad_k.storage.data_ptr(), p.grad_k_stride = stride_of(grad_k.storage);
    p.grad_v = grad_v.storage.data_ptr(), p.grad_v_stride = stride_of(grad_v.storage);
  }
};

}  // namespace fastmax
