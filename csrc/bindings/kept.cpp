// fastmax_cuda::largest_so_far, gather_kept and its gradient, and kept_step_ (kept/kept.h).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <climits>
#include <cstdio>
#include <tuple>

#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/debug.h"
#include "bindings/layout.h"
#include "bindings/torch_abi.h"
#include "kept/kept.h"

namespace fastmax {
namespace {

void check_dtype(const char* name, const Tensor& x, ScalarType dtype, const char* dtype_name) {
  FASTMAX_CHECK(x.scalar_type() == dtype, name, " must be ", dtype_name);
}

void check_count(const char* name, int64_t x, int64_t most) {
  FASTMAX_CHECK(x >= 1 && x <= most, name, " must be from 1 to ", most, " for the CUDA kernels, got ", x);
}

Stride4 all_strides_of(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2), x.stride(3)}; }

Tensor largest_so_far(const Tensor& key_rank, const Tensor& key_index, const Tensor& earlier, int64_t count) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("key_rank", key_rank));
  FASTMAX_CHECK(key_rank.dim() == 4, "key_rank must have shape (b, hk, blocks, candidates), got ", shape_text(key_rank.sizes()));
  const int64_t b = key_rank.size(0), hk = key_rank.size(1), blocks = key_rank.size(2), candidates = key_rank.size(3);
  check_device_has_kernels(key_rank);
  check_dtype("key_rank", key_rank, ScalarType::Double, "float64 for the CUDA kernels");
  check_device("key_index", key_index, key_rank, "key_rank");
  check_shape("key_index", key_index, {b, hk, blocks, candidates});
  check_dtype("key_index", key_index, ScalarType::Long, "int64");
  check_device("earlier", earlier, key_rank, "key_rank");
  check_shape("earlier", earlier, {blocks});
  check_dtype("earlier", earlier, ScalarType::Long, "int64");
  FASTMAX_CHECK(b <= INT_MAX && hk <= INT_MAX && blocks <= INT_MAX && b * hk <= INT_MAX, "key_rank is too large: ", shape_text(key_rank.sizes()));
  check_count("the number of candidates", candidates, kMaxCandidates);
  check_count("count", count, kMaxKept);
  const int device = key_rank.get_device_index();
  const Tensor kept = empty_contiguous({b, hk, blocks, count}, ScalarType::Long, device);
  if (is_empty(kept)) return kept;

  ChoiceParams p{};
  p.b = static_cast<int>(b), p.hk = static_cast<int>(hk), p.blocks = static_cast<int>(blocks);
  p.candidates = static_cast<int>(candidates), p.count = static_cast<int>(count);
  p.rank = static_cast<const double*>(key_rank.data_ptr()), p.rank_stride = all_strides_of(key_rank);
  p.index = static_cast<const int64_t*>(key_index.data_ptr()), p.index_stride = all_strides_of(key_index);
  p.earlier = static_cast<const int64_t*>(earlier.data_ptr()), p.earlier_stride = earlier.stride(0);
  p.kept = static_cast<int64_t*>(kept.data_ptr());
  if (is_debugging()) {
    std::fprintf(stderr, "fastmax::largest_so_far: choice_sm80: b %d, hk %d, blocks %d, candidates %d, count %d\n", p.b, p.hk, p.blocks,
                 p.candidates, p.count);
  }
  const Tensor workspace = allocate_workspace(choice_workspace_bytes(p), device);
  launch_choice(p, workspace.data_ptr(), current_stream(device));
  return kept;
}

// The arguments kept and recent_keys, as the kernels read them.
struct Places {
  Tensor kept, recent;

  Places(const Tensor& kept_in, const Tensor& recent_in, const Tensor& of, const char* of_name, int64_t b, int64_t hk) {
    FASTMAX_CHECK(kept_in.dim() == 4, "kept must have shape (b, hk, blocks, kept), got ", shape_text(kept_in.sizes()));
    const int64_t blocks = kept_in.size(2);
    check_device("kept", kept_in, of, of_name);
    check_shape("kept", kept_in, {b, hk, blocks, kept_in.size(3)});
    check_dtype("kept", kept_in, ScalarType::Long, "int64");
    check_device("recent_keys", recent_in, of, of_name);
    check_shape("recent_keys", recent_in, {b, blocks, 3});
    check_dtype("recent_keys", recent_in, ScalarType::Long, "int64");
    check_count("the number of kept keys", kept_in.size(3), kMaxKept);
    kept = dense(kept_in);
    recent = recent_in.stride(1) == 3 && recent_in.stride(2) == 1 ? recent_in : dense_copy(recent_in, ScalarType::Long);
  }

  void fill(PlacesParams& p, int64_t block, int64_t m, int64_t d, int64_t dv, ScalarType dtype) const {
    check_count("block", block, kMaxKept);
    const int64_t b = kept.size(0), hk = kept.size(1), blocks = kept.size(2);
    FASTMAX_CHECK(b <= INT_MAX && hk <= INT_MAX && blocks <= INT_MAX && b * hk <= INT_MAX && m <= INT_MAX / 2, "too many keys: ", m, ", or ",
                  "blocks: ", shape_text(kept.sizes()));
    p.b = static_cast<int>(b), p.hk = static_cast<int>(hk), p.blocks = static_cast<int>(blocks);
    p.kept = static_cast<int>(kept.size(3)), p.block = static_cast<int>(block), p.m = static_cast<int>(m);
    p.kept_keys = static_cast<const int64_t*>(kept.data_ptr());
    p.recent = static_cast<const int64_t*>(recent.data_ptr()), p.recent_batch = recent.stride(0);
    p.d = static_cast<int>(d), p.dv = static_cast<int>(dv);
    p.math = math_mode(dtype, /*allow_tf32=*/false);
  }
};

void print_call(const char* name, const PlacesParams& p) {
  if (!is_debugging()) return;
  std::fprintf(stderr, "fastmax::%s: gather_sm80: b %d, hk %d, m %d, blocks %d of %d, kept %d, d %d, dv %d%s\n", name, p.b, p.hk, p.m, p.blocks,
               p.block, p.kept, p.d, p.dv, p.aligned ? "" : ", unaligned");
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gather_kept(const Tensor& k, const Tensor& v, const Tensor& log_factor,
                                                                       const Tensor& kept, const Tensor& recent_keys, int64_t block, bool decays) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("k", k));
  FASTMAX_CHECK(k.dim() == 4 && v.dim() == 4, "k and v must be 4-dimensional, got ", k.dim(), " and ", v.dim(), " dimensions");
  const int64_t b = k.size(0), hk = k.size(1), m = k.size(2), d = k.size(3), dv = v.size(3);
  check_kernels_run_on("k", k);
  check_device("v", v, k, "k");
  check_shape("v", v, {b, hk, m, dv});
  FASTMAX_CHECK(v.scalar_type() == k.scalar_type(), "k and v differ in dtype");
  check_device("log_factor", log_factor, k, "k");
  check_shape("log_factor", log_factor, {b, hk, m});
  check_dtype("log_factor", log_factor, ScalarType::Double, "float64");
  const Places places(kept, recent_keys, k, "k", b, hk);
  const Tensor k_rows = with_dense_rows(k), v_rows = with_dense_rows(v);
  GatherParams p{};
  places.fill(p, block, m, d, dv, k.scalar_type());
  p.aligned = is_aligned(k_rows) && is_aligned(v_rows);

  const int device = k.get_device_index();
  const int64_t batch = b * p.blocks, count = int64_t{p.kept} + block;
  const auto empty = [&](std::vector<int64_t> sizes, ScalarType dtype) { return empty_contiguous(sizes, dtype, device); };
  const Tensor keys = empty({batch, hk, count, d}, k.scalar_type()), values = empty({batch, hk, count, dv}, k.scalar_type());
  const Tensor gate = empty({batch, hk, count}, ScalarType::Float);
  const Tensor log_decay = decays ? empty({batch, hk, count}, ScalarType::Float) : empty({0}, ScalarType::Float);
  const Tensor least = decays ? empty({batch, hk, block}, ScalarType::Double) : empty({0}, ScalarType::Double);
  Tensor has_key = empty({batch, count}, ScalarType::Bool);
  if (is_empty(gate)) {
    torch::stable::zero_(has_key);
  } else {
    p.k = k_rows.data_ptr(), p.k_stride = stride_of(k_rows);
    p.v = v_rows.data_ptr(), p.v_stride = stride_of(v_rows);
    p.log_factor = static_cast<const double*>(log_factor.data_ptr()), p.log_factor_stride = stride_of(log_factor);
    p.keys = keys.data_ptr(), p.values = values.data_ptr(), p.gate = static_cast<float*>(gate.data_ptr());
    if (decays) p.log_decay = static_cast<float*>(log_decay.data_ptr()), p.least = static_cast<double*>(least.data_ptr());
    p.has_key = static_cast<bool*>(has_key.data_ptr());
    print_call("gather_kept", p);
    launch_gather(p, current_stream(device));
  }
  return {keys, values, gate, log_decay, least, has_key};
}

// log_factor: read for its shape.
std::tuple<Tensor, Tensor, Tensor> gather_kept_backward(const Tensor& kept, const Tensor& recent_keys, const Tensor& log_factor,
                                                        const Tensor& grad_keys, const Tensor& grad_values, const Tensor& grad_gate) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("grad_keys", grad_keys));
  FASTMAX_CHECK(grad_keys.dim() == 4 && grad_values.dim() == 4 && kept.dim() == 4, "grad_keys, grad_values and kept must be 4-dimensional, got ",
                grad_keys.dim(), ", ", grad_values.dim(), " and ", kept.dim(), " dimensions");
  const int64_t b = kept.size(0), hk = kept.size(1), d = grad_keys.size(3), dv = grad_values.size(3);
  check_kernels_run_on("grad_keys", grad_keys);
  const Places places(kept, recent_keys, grad_keys, "grad_keys", b, hk);
  const int64_t batch = b * kept.size(2), count = grad_keys.size(2);
  check_shape("grad_keys", grad_keys, {batch, hk, count, d});
  check_device("grad_values", grad_values, grad_keys, "grad_keys");
  check_shape("grad_values", grad_values, {batch, hk, count, dv});
  FASTMAX_CHECK(grad_values.scalar_type() == grad_keys.scalar_type(), "grad_keys and grad_values differ in dtype");
  check_device("grad_gate", grad_gate, grad_keys, "grad_keys");
  check_shape("grad_gate", grad_gate, {batch, hk, count});
  check_float("grad_gate", grad_gate);
  FASTMAX_CHECK(log_factor.dim() == 3, "log_factor must have shape (b, hk, m), got ", shape_text(log_factor.sizes()));
  const int64_t tokens = log_factor.size(2);
  check_shape("log_factor", log_factor, {b, hk, tokens});
  GatherBackwardParams p{};
  places.fill(p, count - kept.size(3), tokens, d, dv, grad_keys.scalar_type());

  const int device = grad_keys.get_device_index();
  const Tensor keys = aligned_dense(grad_keys), values = aligned_dense(grad_values), gate = dense(grad_gate);
  const auto zeros = [&](std::vector<int64_t> sizes, ScalarType dtype) {
    Tensor x = empty_contiguous(sizes, dtype, device);
    return torch::stable::zero_(x);
  };
  const Tensor grad_k = zeros({b, hk, tokens, d}, grad_keys.scalar_type()), grad_v = zeros({b, hk, tokens, dv}, grad_keys.scalar_type());
  const Tensor grad_log_factor = zeros({b, hk, tokens}, ScalarType::Double);
  p.aligned = is_aligned(keys) && is_aligned(values) && is_aligned(grad_k) && is_aligned(grad_v);
  if (is_empty(gate) || tokens == 0) return {grad_k, grad_v, grad_log_factor};
  p.grad_keys = keys.data_ptr(), p.grad_values = values.data_ptr(), p.grad_gate = static_cast<const float*>(gate.data_ptr());
  p.grad_k = grad_k.data_ptr(), p.grad_k_stride = stride_of(grad_k);
  p.grad_v = grad_v.data_ptr(), p.grad_v_stride = stride_of(grad_v);
  p.grad_log_factor = static_cast<double*>(grad_log_factor.data_ptr()), p.grad_log_factor_stride = stride_of(grad_log_factor);
  print_call("gather_kept_backward", p);
  const Tensor workspace = allocate_workspace(gather_backward_workspace_bytes(p), device);
  launch_gather_backward(p, workspace.data_ptr(), current_stream(device));
  return {grad_k, grad_v, grad_log_factor};
}

Tensor kept_step(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& log_input_gate,
                 const OptionalTensor& log_decay, const Tensor& other_in, const Tensor& other_lse, const Tensor& keys, const Tensor& values,
                 const Tensor& factors, const Tensor& key_positions, const Tensor& token_positions, const OptionalTensor& token_count,
                 int64_t kept, int64_t window, int64_t block, double scale) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q_in));
  const OptionalTensor& none = kNotGiven;
  check_inputs({q_in, k_in, v_in, none, log_decay, log_input_gate, none, none}, scale, /*causal=*/true);
  check_kernels_cover({q_in, k_in, v_in, none, log_decay, log_input_gate, none, none});
  FASTMAX_CHECK(q_in.size(2) == 1 && k_in.size(2) == 1, "q and k must have one token, got ", q_in.size(2), " and ", k_in.size(2));
  FASTMAX_CHECK(keys.dim() == 4, "slot_keys must be 4-dimensional, got ", keys.dim(), " dimensions");
  const int64_t b = q_in.size(0), h = q_in.size(1), hk = k_in.size(1), d = q_in.size(3), dv = v_in.size(3), slots = keys.size(2);
  FASTMAX_CHECK(slots <= kMaxSlots, "slot_keys must have at most ", kMaxSlots, " slots for the CUDA kernels, got ", slots);
  const auto check_slots = [&](const char* name, const Tensor& x, ScalarType dtype, const char* dtype_name) {
    check_device(name, x, q_in);
    check_dtype(name, x, dtype, dtype_name);
    FASTMAX_CHECK(x.is_contiguous(), name, " must be contiguous for the CUDA kernels");
  };
  check_slots("slot_keys", keys, q_in.scalar_type(), "in q's dtype");
  check_shape("slot_keys", keys, {b, hk, slots, d});
  check_slots("slot_values", values, q_in.scalar_type(), "in q's dtype");
  check_shape("slot_values", values, {b, hk, slots, dv});
  check_slots("slot_factors", factors, ScalarType::Double, "float64");
  check_shape("slot_factors", factors, {b, hk, slots});
  check_slots("slot_positions", key_positions, ScalarType::Long, "int64");
  check_shape("slot_positions", key_positions, {b, hk, slots});
  check_device("other", other_in, q_in);
  check_dtype("other", other_in, q_in.scalar_type(), "in q's dtype");
  check_shape("other", other_in, {b, h, 1, dv});
  check_device("other_lse", other_lse, q_in);
  check_dtype("other_lse", other_lse, ScalarType::Float, "float32 for the CUDA kernels");
  check_shape("other_lse", other_lse, {b, h, 1});
  check_device("token_positions", token_positions, q_in);
  check_shape("token_positions", token_positions, {b});
  check_dtype("token_positions", token_positions, ScalarType::Long, "int64");
  if (token_count.has_value()) {
    check_device("token_count", *token_count, q_in);
    check_shape("token_count", *token_count, {b});
    check_dtype("token_count", *token_count, ScalarType::Long, "int64");
  }
  check_count("kept", kept, kMaxKept);
  FASTMAX_CHECK(block >= 1 && block <= INT_MAX && window >= 1 && window <= INT_MAX, "window and block must be from 1 to ", INT_MAX, ", got ",
                window, " and ", block);

  const Tensor q = with_dense_rows(q_in), k = with_dense_rows(k_in), v = with_dense_rows(v_in), other = with_dense_rows(other_in);
  const Tensor positions = dense(token_positions);
  const OptionalTensor count = token_count.has_value() ? OptionalTensor(dense(*token_count)) : OptionalTensor();
  const int device = q_in.get_device_index();
  const Tensor o = empty_contiguous({b, h, 1, dv}, q_in.scalar_type(), device);
  if (is_empty(o)) return o;
  FASTMAX_CHECK(slots >= 1, "slot_keys must have at least one slot");
  KeptStepParams p{};
  p.b = static_cast<int>(b), p.h = static_cast<int>(h), p.hk = static_cast<int>(hk), p.slots = static_cast<int>(slots);
  p.d = static_cast<int>(d), p.dv = static_cast<int>(dv);
  p.kept = static_cast<int>(kept), p.window = static_cast<int>(window), p.block = static_cast<int>(block);
  p.scale = static_cast<float>(scale);
  p.math = math_mode(q_in.scalar_type(), /*allow_tf32=*/false);
  p.aligned = is_aligned(keys) && is_aligned(values);
  p.q = q.data_ptr(), p.q_stride = stride_of(q);
  p.k = k.data_ptr(), p.k_stride = stride_of(k);
  p.v = v.data_ptr(), p.v_stride = stride_of(v);
  p.log_input_gate = static_cast<const float*>(log_input_gate.data_ptr()), p.log_input_gate_stride = stride_of(log_input_gate);
  if (log_decay.has_value()) {
    p.log_decay = static_cast<const float*>(log_decay->data_ptr()), p.log_decay_stride = stride_of(*log_decay);
  }
  p.token_positions = static_cast<const int64_t*>(positions.data_ptr());
  if (count.has_value()) p.token_count = static_cast<const int64_t*>(count->data_ptr());
  p.keys = keys.data_ptr(), p.values = values.data_ptr();
  p.log_factors = static_cast<double*>(factors.data_ptr()), p.positions = static_cast<int64_t*>(key_positions.data_ptr());
  p.other = other.data_ptr(), p.other_stride = stride_of(other);
  p.other_lse = static_cast<const float*>(other_lse.data_ptr()), p.other_lse_stride = stride_of(other_lse);
  p.o = o.data_ptr();
  if (is_debugging()) {
    std::fprintf(stderr, "fastmax::kept_step_: kept_step_sm80: b %d, h %d, hk %d, slots %d, d %d, dv %d%s\n", p.b, p.h, p.hk, p.slots, p.d, p.dv,
                 p.aligned ? "" : ", unaligned");
  }
  launch_kept_step(p, current_stream(device));
  return o;
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("largest_so_far", TORCH_BOX(&fastmax::largest_so_far));
  m.impl("gather_kept", TORCH_BOX(&fastmax::gather_kept));
  m.impl("gather_kept_backward", TORCH_BOX(&fastmax::gather_kept_backward));
  m.impl("kept_step_", TORCH_BOX(&fastmax::kept_step));
}
