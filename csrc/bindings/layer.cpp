// fastmax_cuda::split_heads, join_heads and their gradients (layer/layer.h).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <tuple>
#include <vector>

#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/debug.h"
#include "bindings/layout.h"
#include "bindings/torch_abi.h"
#include "layer/layer.h"

namespace fastmax {
namespace {

void check_dtype(const char* name, const Tensor& x, const Tensor& like, const char* like_name) {
  FASTMAX_CHECK(x.scalar_type() == like.scalar_type(), name, " must have ", like_name, "'s dtype");
}

void check_eps(const char* name, double eps) { FASTMAX_CHECK(std::isfinite(eps) && eps >= 0, name, " must be finite and >= 0, got ", eps); }

// Checks a learned weight.
void check_weight(const char* name, const OptionalTensor& weight, std::initializer_list<int64_t> shape, const Tensor& x, const char* x_name) {
  if (!weight.has_value()) return;
  check_device(name, *weight, x, x_name);
  check_shape(name, *weight, shape);
  FASTMAX_CHECK(weight->scalar_type() == x.scalar_type() || weight->scalar_type() == ScalarType::Float, name, " must be float32 or have ",
                x_name, "'s dtype");
}

// Checks that the heads have kernels.
void check_width(const char* name, int64_t width) {
  FASTMAX_CHECK(width % 8 == 0 && width <= kMaxLayerHeadDim, name, " must be a multiple of 8 up to ", kMaxLayerHeadDim, ", got ", width);
}

void check_tokens(const char* name, int64_t batch, int64_t tokens) {
  FASTMAX_CHECK(batch <= INT_MAX && tokens <= kMaxLayerTokens, name, " has too many tokens: ", batch, " x ", tokens);
}

Tensor zeros_like(const Tensor& x) {
  Tensor zeros = empty_dense(x, x.scalar_type());
  return torch::stable::zero_(zeros);
}

// ---- split_heads

struct SplitArguments {
  const Tensor& qkv;
  const OptionalTensor &recent, &conv_weight, &q_weight, &k_weight, &cos, &sin, &places;
  int64_t heads, kv_heads, head_dim;
  double q_eps, k_eps;

  int64_t channels() const { return qkv.size(2); }
  int64_t value_dim() const { return (channels() - (heads + kv_heads) * head_dim) / kv_heads; }
  int64_t width() const { return conv_weight.has_value() ? conv_weight->size(2) : 1; }
};

void check_split(const SplitArguments& x) {
  const Tensor& qkv = x.qkv;
  FASTMAX_CHECK(qkv.dim() == 3, "qkv must be 3-dimensional, got ", qkv.dim(), " dimensions");
  for (const auto& [name, value] : {std::pair("heads", x.heads), std::pair("kv_heads", x.kv_heads), std::pair("head_dim", x.head_dim)}) {
    FASTMAX_CHECK(value >= 1, name, " must be at least 1, got ", value);
    FASTMAX_CHECK(value <= x.channels(), name, " must be at most qkv's channels ", x.channels(), ", got ", value);
  }
  const int64_t b = qkv.size(0), n = qkv.size(1), values = x.channels() - (x.heads + x.kv_heads) * x.head_dim;
  FASTMAX_CHECK(values > 0 && values % x.kv_heads == 0, "qkv must have (heads + kv_heads) * head_dim channels and a positive multiple of ",
                "kv_heads more, got ", x.channels(), " for ", x.heads, ", ", x.kv_heads, " and ", x.head_dim);
  FASTMAX_CHECK(!x.conv_weight.has_value() || x.conv_weight->dim() == 3, "conv_weight must be 3-dimensional");
  FASTMAX_CHECK(x.width() >= 1, "conv_weight must have a width of at least 1");
  check_weight("conv_weight", x.conv_weight, {x.channels(), 1, x.width()}, qkv, "qkv");
  check_weight("q_weight", x.q_weight, {x.head_dim}, qkv, "qkv");
  check_weight("k_weight", x.k_weight, {x.head_dim}, qkv, "qkv");
  FASTMAX_CHECK(x.conv_weight.has_value() || !x.recent.has_value(), "recent needs conv_weight");
  FASTMAX_CHECK(x.conv_weight.has_value() || !x.places.has_value(), "places needs conv_weight");
  if (x.recent.has_value()) {
    check_device("recent", *x.recent, qkv, "qkv");
    check_shape("recent", *x.recent, {b, x.width() - 1, x.channels()});
    check_dtype("recent", *x.recent, qkv, "qkv");
  }
  if (x.places.has_value()) {
    check_device("places", *x.places, qkv, "qkv");
    check_shape("places", *x.places, {n});
    FASTMAX_CHECK(x.places->scalar_type() == ScalarType::Int || x.places->scalar_type() == ScalarType::Long, "places must be int32 or int64");
  }
  FASTMAX_CHECK(x.cos.has_value() == x.sin.has_value(), "cos and sin must be given together");
  for (const auto& [name, factor] : {std::pair("cos", &x.cos), std::pair("sin", &x.sin)}) {
    if (!factor->has_value()) continue;
    const Tensor& y = **factor;
    check_device(name, y, qkv, "qkv");
    const int64_t dims = y.dim();
    FASTMAX_CHECK(dims == 3 || dims == 4, name, " must be 3- or 4-dimensional, got ", dims, " dimensions");
    const int64_t r = x.cos->size(x.cos->dim() - 1);
    if (x.cos->dim() == 3) check_shape(name, y, {n, 1, r});
    else check_shape(name, y, {b, n, 1, r});
    FASTMAX_CHECK(r % 2 == 0 && r <= x.head_dim, "cos must have an even number of channels up to head_dim ", x.head_dim, ", got ", r);
    FASTMAX_CHECK(y.scalar_type() == ScalarType::Float || qkv.scalar_type() == ScalarType::Double, name, " must be float32");
  }
  check_eps("q_eps", x.q_eps);
  check_eps("k_eps", x.k_eps);
}

void check_split_covered(const SplitArguments& x) {
  check_kernels_run_on("qkv", x.qkv);
  check_width("head_dim", x.head_dim);
  check_width("value_dim", x.value_dim());
  FASTMAX_CHECK(x.width() <= kMaxConvolution, "conv_weight must have a width up to ", kMaxConvolution, ", got ", x.width());
  FASTMAX_CHECK(x.channels() <= INT_MAX / kMaxConvolution, "qkv has too many channels: ", x.channels());
  check_tokens("qkv", x.qkv.size(0), x.qkv.size(1));
}

// Tensors that must live until the launch, and the params that point to them.
struct SplitCall {
  std::vector<Tensor> operands;
  SplitHeadsParams p{};

  explicit SplitCall(const SplitArguments& x) {
    p.b = static_cast<int>(x.qkv.size(0)), p.n = static_cast<int>(x.qkv.size(1)), p.channels = static_cast<int>(x.channels());
    p.math = math_mode(x.qkv.scalar_type(), /*allow_tf32=*/false);
    p.sm_count = get_device(x.qkv.get_device_index()).sm_count;
    const Tensor& qkv = hold(readable_or_dense(x.qkv));
    p.x = qkv.data_ptr(), p.x_batch = qkv.stride(0), p.x_token = qkv.stride(1);
    p.width = static_cast<int>(x.width());
    p.convolution = weight(x.conv_weight);
    if (x.recent.has_value() && p.width > 1) {
      const Tensor& recent = hold(readable_or_dense(*x.recent));
      p.recent = recent.data_ptr(), p.recent_batch = recent.stride(0), p.recent_token = recent.stride(1);
    }
    if (x.places.has_value()) {
      p.places = hold(dense(*x.places)).data_ptr();
      p.wide_places = x.places->scalar_type() == ScalarType::Long;
    }
    if (x.cos.has_value()) {
      p.cos = static_cast<const float*>(hold(aligned_dense(*x.cos)).data_ptr());
      p.sin = static_cast<const float*>(hold(aligned_dense(*x.sin)).data_ptr());
      p.rotated = static_cast<int>(x.cos->size(x.cos->dim() - 1));
      p.rotation_batch = x.cos->dim() == 3 ? 0 : x.qkv.size(1) * p.rotated;
    }
    const int64_t widths[3] = {x.head_dim, x.head_dim, x.value_dim()}, heads[3] = {x.heads, x.kv_heads, x.kv_heads};
    int64_t channel = 0;
    for (int i = 0; i < 3; channel += heads[i] * widths[i], ++i) {
      HeadGroup& group = p.groups[i];
      group.heads = static_cast<int>(heads[i]), group.width = static_cast<int>(widths[i]), group.first_channel = static_cast<int>(channel);
    }
    p.groups[0].norm = weight(x.q_weight), p.groups[1].norm = weight(x.k_weight);
    p.groups[0].eps = static_cast<float>(x.q_eps), p.groups[1].eps = static_cast<float>(x.k_eps);
  }

  const Tensor& hold(const Tensor& x) { return operands.emplace_back(x); }
  Weight weight(const OptionalTensor& x) {
    if (!x.has_value()) return {};
    return {hold(dense(*x)).data_ptr(), x->scalar_type() == ScalarType::Float};
  }

  void print(const char* name) const {
    if (!is_debugging()) return;
    std::fprintf(stderr, "fastmax::%s: split_heads_sm80: b %d, n %d, heads %d and %d, d %d and %d, width %d, rotated %d\n", name, p.b, p.n,
                 p.groups[0].heads, p.groups[1].heads, p.groups[0].width, p.groups[2].width, p.width, p.rotated);
  }
};

std::tuple<Tensor, Tensor, Tensor> split_heads(const Tensor& qkv, const OptionalTensor& recent, const OptionalTensor& conv_weight,
                                               const OptionalTensor& q_weight, const OptionalTensor& k_weight, const OptionalTensor& cos,
                                               const OptionalTensor& sin, const OptionalTensor& places, int64_t heads, int64_t kv_heads,
                                               int64_t head_dim, double q_eps, double k_eps) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("qkv", qkv));
  const SplitArguments given{qkv, recent, conv_weight, q_weight, k_weight, cos, sin, places, heads, kv_heads, head_dim, q_eps, k_eps};
  check_split(given);
  check_split_covered(given);
  const int64_t b = qkv.size(0), n = qkv.size(1);
  const int index = qkv.get_device_index();
  const Tensor q = empty_contiguous({b, n, heads, head_dim}, qkv.scalar_type(), index);
  const Tensor k = empty_contiguous({b, n, kv_heads, head_dim}, qkv.scalar_type(), index);
  const Tensor v = empty_contiguous({b, n, kv_heads, given.value_dim()}, qkv.scalar_type(), index);
  if (is_empty(qkv)) return {q, k, v};
  SplitCall call(given);
  call.p.groups[0].out = q.data_ptr(), call.p.groups[1].out = k.data_ptr(), call.p.groups[2].out = v.data_ptr();
  call.print("split_heads");
  launch_split_heads(call.p, current_stream(index));
  return {q, k, v};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> split_heads_backward(
    const OptionalTensor& grad_q, const OptionalTensor& grad_k, const OptionalTensor& grad_v, const Tensor& qkv, const OptionalTensor& recent,
    const OptionalTensor& conv_weight, const OptionalTensor& q_weight, const OptionalTensor& k_weight, const OptionalTensor& cos,
    const OptionalTensor& sin, const OptionalTensor& places, int64_t heads, int64_t kv_heads, int64_t head_dim, double q_eps, double k_eps) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("qkv", qkv));
  const SplitArguments given{qkv, recent, conv_weight, q_weight, k_weight, cos, sin, places, heads, kv_heads, head_dim, q_eps, k_eps};
  check_split(given);
  const OptionalTensor* grads[3] = {&grad_q, &grad_k, &grad_v};
  const char* names[3] = {"grad_q_rows", "grad_k_rows", "grad_v_rows"};
  for (int i = 0; i < 3; ++i) {
    if (!grads[i]->has_value()) continue;
    check_device(names[i], **grads[i], qkv, "qkv");
    check_shape(names[i], **grads[i], {qkv.size(0), qkv.size(1), i == 0 ? heads : kv_heads, i == 2 ? given.value_dim() : head_dim});
    check_dtype(names[i], **grads[i], qkv, "qkv");
  }
  check_split_covered(given);
  const int index = qkv.get_device_index();
  // The gradient of a tensor that is not given has no elements.
  const auto like = [&](const OptionalTensor& x) {
    return !x.has_value() ? no_elements(qkv) : is_empty(qkv) ? zeros_like(*x) : empty_dense(*x, x->scalar_type());
  };
  const Tensor of_qkv = empty_dense(qkv, qkv.scalar_type()), of_recent = like(recent), of_conv = like(conv_weight);
  const Tensor of_q_weight = like(q_weight), of_k_weight = like(k_weight);
  if (is_empty(qkv)) return {of_qkv, of_recent, of_conv, of_q_weight, of_k_weight};
  SplitCall call(given);
  SplitHeadsParams& p = call.p;
  for (int i = 0; i < 3; ++i) {
    if (!grads[i]->has_value()) continue;
    const Tensor& grad = call.hold(readable_or_dense(**grads[i]));
    p.groups[i].grad = grad.data_ptr(), p.groups[i].grad_stride = {grad.stride(0), grad.stride(2), grad.stride(1)};
  }
  p.grad_x = of_qkv.data_ptr();
  if (p.recent != nullptr) p.grad_recent = of_recent.data_ptr();
  if (conv_weight.has_value()) p.grad_convolution = of_conv.data_ptr();
  if (q_weight.has_value()) p.groups[0].grad_norm = of_q_weight.data_ptr();
  if (k_weight.has_value()) p.groups[1].grad_norm = of_k_weight.data_ptr();
  const Tensor workspace = empty_strided({split_heads_workspace(p)}, {1}, ScalarType::Float, index);
  p.workspace = static_cast<float*>(workspace.data_ptr());
  call.print("split_heads_backward");
  launch_split_heads_backward(p, current_stream(index));
  return {of_qkv, of_recent, of_conv, of_q_weight, of_k_weight};
}

// ---- join_heads

void check_join(const Tensor& o, const OptionalTensor& norm_weight, const OptionalTensor& gate, double eps) {
  FASTMAX_CHECK(o.dim() == 4, "o must be 4-dimensional, got ", o.dim(), " dimensions");
  check_weight("norm_weight", norm_weight, {o.size(3)}, o, "o");
  if (gate.has_value()) {
    check_device("gate", *gate, o, "o");
    check_shape("gate", *gate, {o.size(0), o.size(2), o.size(1) * o.size(3)});
    check_dtype("gate", *gate, o, "o");
  }
  check_eps("eps", eps);
}

void check_join_covered(const Tensor& o) {
  check_kernels_run_on("o", o);
  check_width("value_dim", o.size(3));
  FASTMAX_CHECK(o.size(1) <= INT_MAX / std::max<int64_t>(1, o.size(3)), "o has too many heads: ", o.size(1));
  check_tokens("o", o.size(0), o.size(2));
}

struct JoinCall {
  std::vector<Tensor> operands;
  JoinHeadsParams p{};

  JoinCall(const Tensor& o, const OptionalTensor& norm_weight, const OptionalTensor& gate, double eps) {
    p.b = static_cast<int>(o.size(0)), p.n = static_cast<int>(o.size(2));
    p.math = math_mode(o.scalar_type(), /*allow_tf32=*/false);
    p.sm_count = get_device(o.get_device_index()).sm_count;
    const Tensor& rows = hold(readable(o));
    p.o = rows.data_ptr(), p.o_stride = stride_of(rows);
    if (gate.has_value()) {
      const Tensor& tokens = hold(readable_or_dense(*gate));
      p.gate = tokens.data_ptr(), p.gate_batch = tokens.stride(0), p.gate_token = tokens.stride(1);
    }
    p.group.heads = static_cast<int>(o.size(1)), p.group.width = static_cast<int>(o.size(3)), p.group.eps = static_cast<float>(eps);
    if (norm_weight.has_value()) p.group.norm = {hold(dense(*norm_weight)).data_ptr(), norm_weight->scalar_type() == ScalarType::Float};
  }

  const Tensor& hold(const Tensor& x) { return operands.emplace_back(x); }

  void print(const char* name) const {
    if (!is_debugging()) return;
    std::fprintf(stderr, "fastmax::%s: join_heads_sm80: b %d, n %d, heads %d, d %d%s%s\n", name, p.b, p.n, p.group.heads, p.group.width,
                 p.group.norm.data == nullptr ? "" : ", norm", p.gate == nullptr ? "" : ", gate");
  }
};

Tensor join_heads(const Tensor& o, const OptionalTensor& norm_weight, const OptionalTensor& gate, double eps) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("o", o));
  check_join(o, norm_weight, gate, eps);
  check_join_covered(o);
  const int index = o.get_device_index();
  const Tensor y = empty_contiguous({o.size(0), o.size(2), o.size(1) * o.size(3)}, o.scalar_type(), index);
  if (is_empty(o)) return y;
  JoinCall call(o, norm_weight, gate, eps);
  call.p.group.out = y.data_ptr();
  call.print("join_heads");
  launch_join_heads(call.p, current_stream(index));
  return y;
}

std::tuple<Tensor, Tensor, Tensor> join_heads_backward(const Tensor& grad_y, const Tensor& o, const OptionalTensor& norm_weight,
                                                       const OptionalTensor& gate, double eps) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("o", o));
  check_join(o, norm_weight, gate, eps);
  check_device("grad_y", grad_y, o, "o");
  check_shape("grad_y", grad_y, {o.size(0), o.size(2), o.size(1) * o.size(3)});
  check_dtype("grad_y", grad_y, o, "o");
  check_join_covered(o);
  const int index = o.get_device_index();
  const auto like = [&](const OptionalTensor& x) {
    return !x.has_value() ? no_elements(o) : is_empty(o) ? zeros_like(*x) : empty_dense(*x, x->scalar_type());
  };
  const Tensor of_o = empty_like_layout(o, o.size(3)), of_weight = like(norm_weight), of_gate = like(gate);
  if (is_empty(o)) return {of_o, of_weight, of_gate};
  JoinCall call(o, norm_weight, gate, eps);
  JoinHeadsParams& p = call.p;
  const Tensor& grad = call.hold(readable_or_dense(grad_y));
  p.group.grad = grad.data_ptr(), p.group.grad_stride = {grad.stride(0), o.size(3), grad.stride(1)};
  p.grad_o = of_o.data_ptr(), p.grad_o_stride = stride_of(of_o);
  if (gate.has_value()) p.grad_gate = of_gate.data_ptr();
  if (norm_weight.has_value()) p.group.grad_norm = of_weight.data_ptr();
  const Tensor workspace = empty_strided({join_heads_workspace(p)}, {1}, ScalarType::Float, index);
  p.workspace = static_cast<float*>(workspace.data_ptr());
  call.print("join_heads_backward");
  launch_join_heads_backward(p, current_stream(index));
  return {of_o, of_weight, of_gate};
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("split_heads", TORCH_BOX(&fastmax::split_heads));
  m.impl("split_heads_backward", TORCH_BOX(&fastmax::split_heads_backward));
  m.impl("join_heads", TORCH_BOX(&fastmax::join_heads));
  m.impl("join_heads_backward", TORCH_BOX(&fastmax::join_heads_backward));
}
