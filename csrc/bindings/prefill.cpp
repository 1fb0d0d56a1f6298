// Operators on many tokens with a state of decode/decode.h, for CUDA tensors, by the linear algorithm:
//
//   prefill, prefill_backward            outputs and the new state from a state and tokens, and their gradients
//   state_of_keys, state_of_queries      the new state alone, and the gradient of the state alone; both can save intermediate states
//   prefill_saved_                       prefill's outputs, from the intermediate states that state_of_keys saved
//   gradients_of_sums                    g and e, which the next two take
//   prefill_backward_of_queries, _of_keys_   the gradients of q, and of k and v; the latter reads what state_of_queries saved

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <utility>

#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/layout.h"
#include "bindings/operands.h"
#include "bindings/run.h"
#include "bindings/torch_abi.h"
#include "linear/algorithm.h"

namespace fastmax {
namespace {

const float* floats(const Tensor& x) { return static_cast<const float*>(x.data_ptr()); }
float* mutable_floats(const Tensor& x) { return static_cast<float*>(x.data_ptr()); }

void check_tokens(const AttentionInputs& x, double scale, int64_t order) {
  check_inputs(x, scale, /*causal=*/true);
  FASTMAX_CHECK(x.q.size(2) == x.k.size(2), "k and v must have q's number of tokens ", x.q.size(2), ", got ", x.k.size(2));
  FASTMAX_CHECK(x.q.size(1) > 0, "q must have at least one head");
  FASTMAX_CHECK(order == 1 || order == 2, "p must be 1 or 2, got ", order);
}

void fill(AttentionParams& p, const Operands& x, double scale, double a0, double a1, double a2, int64_t order, bool allow_tf32) {
  x.fill(p, scale, /*causal=*/true, kNoWindow, allow_tf32);
  p.a0 = static_cast<float>(a0), p.a1 = static_cast<float>(a1), p.a2 = order == 2 ? static_cast<float>(a2) : 0.f;
  p.order = static_cast<int>(order);
}

// The state that a call continues from, and the buffers of the new one; dense tensors.
CarriedState carried(const Tensor& kv_state, const Tensor& k_sum, const Tensor& new_kv_state, const Tensor& new_k_sum, const Tensor& q,
                     const Tensor& v) {
  return {floats(kv_state), floats(k_sum), mutable_floats(new_kv_state), mutable_floats(new_k_sum), static_cast<int>(q.size(3)),
          static_cast<int>(v.size(3))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> prefill(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                                   const OptionalTensor& attention_mask, const OptionalTensor& log_decay,
                                                   const OptionalTensor& k_start, const OptionalTensor& log_input_gate,
                                                   const Tensor& kv_state_in, const Tensor& k_sum_in,
                                                   double scale, double a0, double a1, double a2, int64_t order, bool allow_tf32) {
  const int device = cuda_device_of("q", q_in);
  const torch::stable::accelerator::DeviceGuard guard(device);
  const AttentionInputs inputs{q_in, k_in, v_in, attention_mask, log_decay, log_input_gate, k_start, kNotGiven};
  check_tokens(inputs, scale, order);
  check_state(q_in, k_in, v_in, kv_state_in, k_sum_in, order, "kv_state", "k_sum");
  check_kernels_cover(inputs);
  const Tensor z = empty_per_query(q_in);
  if (is_empty(q_in)) {
    return {empty_like_layout(q_in, v_in.size(3)), z, dense_copy(kv_state_in, ScalarType::Float), dense_copy(k_sum_in, ScalarType::Float)};
  }

  const Tensor kv_state = dense(kv_state_in), k_sum = dense(k_sum_in);
  const Tensor new_kv_state = empty_dense(kv_state, ScalarType::Float), new_k_sum = empty_dense(k_sum, ScalarType::Float);
  const Operands x(inputs);
  const Results results(q_in, v_in, x, z);
  FwdParams p{};
  fill(p, x, scale, a0, a1, a2, order, allow_tf32);
  results.fill(p);
  p.mode = FwdMode::kOutputsAndState;
  p.state = carried(kv_state, k_sum, new_kv_state, new_k_sum, q_in, v_in);
  run("prefill", kLinearFromState, p, device);
  return {results.o.result(), z, new_kv_state, new_k_sum};
}

// Whether several rows of a tensor share memory.
bool is_expanded(const Tensor& x) {
  bool found = false;
  for (int i = 0; i < 3; ++i) found = found || (x.stride(i) == 0 && x.size(i) > 1);
  return found;
}

// Operands with copies of expanded tensors. Some kernels do not cover expanded tensors, and saved states have the format of the kernels
// that wrote them: the call that reads them must select the same kernels, whatever the strides of its tensors.
Operands unexpanded(const AttentionInputs& inputs) {
  Operands x(inputs);
  for (Tensor* tensor : {&x.q, &x.k, &x.v}) {
    if (!is_expanded(*tensor)) continue;
    Tensor copy = empty_like_layout(*tensor, tensor->size(3));
    torch::stable::copy_(copy, *tensor);
    *tensor = copy;
  }
  return x;
}

// A buffer for intermediate states of `bytes` in all: (b, hk, bytes of each).
Tensor empty_saved(const Tensor& k, size_t bytes) {
  const int64_t b = k.size(0), hk = k.size(1);
  return empty_contiguous({b, hk, static_cast<int64_t>(bytes) / std::max<int64_t>(1, b * hk)}, ScalarType::Byte, k.get_device_index());
}

// Makes a call of mode kState save its intermediate states; returns them, an empty tensor where the kernels save none. The call's scale
// and coefficients are part of them: the call that reads them must have the same.
template <class Params>
Tensor save_states(Params& p, const Tensor& k, Direction direction, size_t (*Kernels::*saved_bytes)(const Params&)) {
  const auto bytes = select(kLinearFromState, p, direction).*saved_bytes;
  const Tensor saved = empty_saved(k, bytes == nullptr ? 0 : bytes(p));
  if (!is_empty(saved)) p.saved = saved.data_ptr(), p.mode = decltype(p.mode)::kStateAndSaved;
  return saved;
}

// Makes a call read saved states, in `mode`; without any it keeps its mode.
template <class Params, class Mode>
void use_saved_states(Params& p, const Tensor& saved, Mode mode, Direction direction, size_t (*Kernels::*saved_bytes)(const Params&)) {
  if (is_empty(saved)) return;
  const auto bytes = select(kLinearFromState, p, direction).*saved_bytes;
  const int64_t expected = bytes == nullptr ? 0 : static_cast<int64_t>(bytes(p));
  FASTMAX_CHECK(saved.numel() == expected, "saved must be what state_of_keys or state_of_queries saved of the same tokens, ", expected,
                " bytes, got ", saved.numel());
  p.saved = saved.data_ptr(), p.mode = mode;
}

void check_saved(const Tensor& saved, const Tensor& q, const Tensor& k) {
  check_device("saved", saved, q);
  FASTMAX_CHECK(saved.scalar_type() == ScalarType::Byte && saved.dim() == 3 && saved.size(0) == k.size(0) && saved.size(1) == k.size(1) &&
                    (is_empty(saved) || saved.is_contiguous()),
                "saved must be contiguous uint8 (b, hk, bytes)");
  FASTMAX_CHECK(reinterpret_cast<uintptr_t>(saved.data_ptr()) % 16 == 0, "saved must begin at a multiple of 16 bytes");
}

// Uninitialised tensors of a state of these keys.
std::pair<Tensor, Tensor> empty_state(const Tensor& k, const Tensor& v, int64_t order) {
  const int64_t b = k.size(0), hk = k.size(1), rows = decode_rows(static_cast<int>(k.size(3)), static_cast<int>(order));
  Tensor kv_state = empty_contiguous({b, hk, rows, v.size(3)}, ScalarType::Float, k.get_device_index());
  Tensor k_sum = empty_contiguous({b, hk, rows}, ScalarType::Float, k.get_device_index());
  return {std::move(kv_state), std::move(k_sum)};
}

std::pair<Tensor, Tensor> zero_state(const Tensor& k, const Tensor& v, int64_t order) {
  auto [kv_state, k_sum] = empty_state(k, v, order);
  return {torch::stable::zero_(kv_state), torch::stable::zero_(k_sum)};
}

std::tuple<Tensor, Tensor, Tensor> state_of_keys(const Tensor& k_in, const Tensor& v_in, const OptionalTensor& attention_mask,
                                                 const OptionalTensor& log_decay, const OptionalTensor& k_start,
                                                 const OptionalTensor& log_input_gate, double scale, double a0,
                                                 double a1, double a2, int64_t order, bool allow_tf32, bool keep) {
  const int device = cuda_device_of("k", k_in);
  const torch::stable::accelerator::DeviceGuard guard(device);
  const AttentionInputs inputs{k_in, k_in, v_in, attention_mask, log_decay, log_input_gate, k_start, kNotGiven};
  check_tokens(inputs, scale, order);
  check_kernels_cover(inputs);
  const auto [kv_state, k_sum] = zero_state(k_in, v_in, order);
  if (is_empty(k_in)) return {kv_state, k_sum, empty_saved(k_in, 0)};

  const Tensor new_kv_state = empty_dense(kv_state, ScalarType::Float), new_k_sum = empty_dense(k_sum, ScalarType::Float);
  const Operands x = unexpanded(inputs);
  FwdParams p{};
  fill(p, x, scale, a0, a1, a2, order, allow_tf32);
  p.mode = FwdMode::kState;
  p.state = carried(kv_state, k_sum, new_kv_state, new_k_sum, k_in, v_in);
  const Tensor saved = keep ? save_states(p, k_in, Direction::kForward, &Kernels::fwd_saved_bytes) : empty_saved(k_in, 0);
  run(p.uses_saved() ? "state_of_keys, saving states" : "state_of_keys", kLinearFromState, p, device);
  return {new_kv_state, new_k_sum, saved};
}

// Checks a tensor with the shape and dtype of a state: the new state, or a gradient of it.
void check_like_state(const char* name, const OptionalTensor& x, const Tensor& state) {
  if (!x.has_value()) return;
  const auto sizes = state.sizes(), got = x->sizes();
  check_device(name, *x, state);
  FASTMAX_CHECK(std::equal(got.begin(), got.end(), sizes.begin(), sizes.end()), name, " must have shape ", shape_text(sizes), ", got ",
                shape_text(got));
  FASTMAX_CHECK(x->scalar_type() == state.scalar_type(), name, " must have the state's dtype");
}

// Checks the arguments of prefill_backward, except those for the gradient of log_decay.
void check_backward(const AttentionInputs& x, const Tensor& grad_o, const OptionalTensor& grad_z, const OptionalTensor& grad_new_kv_state,
                    const OptionalTensor& grad_new_k_sum, const Tensor& o, const Tensor& z, const Tensor& kv_state, const Tensor& k_sum,
                    double scale, int64_t order) {
  check_tokens(x, scale, order);
  check_state(x.q, x.k, x.v, kv_state, k_sum, order, "kv_state", "k_sum");
  check_results(x.q, x.v, o, grad_o, "z", z);
  if (grad_z.has_value()) check_per_query("grad_z", *grad_z, x.q);
  check_like_state("grad_new_kv_state", grad_new_kv_state, kv_state);
  check_like_state("grad_new_k_sum", grad_new_k_sum, k_sum);
}

Tensor dense_or_zeros(const OptionalTensor& x, const Tensor& like) {
  if (x.has_value()) return dense(*x);
  Tensor zeros = empty_dense(like, ScalarType::Float);
  return torch::stable::zero_(zeros);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> prefill_backward(
    const Tensor& grad_o_in, const OptionalTensor& grad_z, const OptionalTensor& grad_new_kv_state_in,
    const OptionalTensor& grad_new_k_sum_in, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& o_in,
    const Tensor& z, const OptionalTensor& new_kv_state_in, const OptionalTensor& new_k_sum_in, const OptionalTensor& attention_mask,
    const OptionalTensor& log_decay, const OptionalTensor& k_start, const OptionalTensor& log_input_gate, const Tensor& kv_state_in,
    const Tensor& k_sum_in, double scale, double a0, double a1, double a2, int64_t order, bool allow_tf32) {
  const int device = cuda_device_of("q", q_in);
  const torch::stable::accelerator::DeviceGuard guard(device);
  const AttentionInputs inputs{q_in, k_in, v_in, attention_mask, log_decay, log_input_gate, k_start, kNotGiven};
  check_backward(inputs, grad_o_in, grad_z, grad_new_kv_state_in, grad_new_k_sum_in, o_in, z, kv_state_in, k_sum_in, scale, order);
  check_like_state("new_kv_state", new_kv_state_in, kv_state_in);
  check_like_state("new_k_sum", new_k_sum_in, k_sum_in);
  // The gradient of log_decay needs products of the new state and its gradient.
  const bool reads_state = log_decay.has_value() && (grad_new_kv_state_in.has_value() || grad_new_k_sum_in.has_value());
  FASTMAX_CHECK(!reads_state || (new_kv_state_in.has_value() && new_k_sum_in.has_value()),
                "the gradient of log_decay needs new_kv_state and new_k_sum beside their gradients");
  check_kernels_cover(inputs);
  check_float("z", z);
  if (grad_z.has_value()) check_float("grad_z", *grad_z);

  const Tensor kv_state = dense(kv_state_in), k_sum = dense(k_sum_in);
  const Tensor grad_new_kv_state = dense_or_zeros(grad_new_kv_state_in, kv_state), grad_new_k_sum = dense_or_zeros(grad_new_k_sum_in, k_sum);
  if (is_empty(q_in)) {
    return {zeros_like_layout(q_in, q_in.size(3)),         zeros_like_layout(k_in, k_in.size(3)),
            zeros_like_layout(v_in, v_in.size(3)),         zero_token_gradient(log_decay, q_in), zero_token_gradient(log_input_gate, q_in),
            dense_copy(grad_new_kv_state, ScalarType::Float), dense_copy(grad_new_k_sum, ScalarType::Float)};
  }

  // A new state that is not read, or whose gradient is zero, may be any finite numbers.
  const Tensor new_kv_state = reads_state ? dense(*new_kv_state_in) : grad_new_kv_state;
  const Tensor new_k_sum = reads_state ? dense(*new_k_sum_in) : grad_new_k_sum;
  const Tensor grad_kv_state = empty_dense(kv_state, ScalarType::Float), grad_k_sum = empty_dense(k_sum, ScalarType::Float);
  const Operands x(inputs);
  const Gradients gradients(q_in, k_in, v_in, x, o_in, grad_o_in, z, grad_z);
  BwdParams p{};
  fill(p, x, scale, a0, a1, a2, order, allow_tf32);
  gradients.fill(p);
  p.mode = BwdMode::kInputsAndState;
  p.state = {floats(kv_state),
             floats(k_sum),
             floats(new_kv_state),
             floats(new_k_sum),
             floats(grad_new_kv_state),
             floats(grad_new_k_sum),
             mutable_floats(grad_kv_state),
             mutable_floats(grad_k_sum),
             static_cast<int>(q_in.size(3)),
             static_cast<int>(v_in.size(3))};
  run("prefill_backward", kLinearFromState, p, device);
  return {gradients.grad_q.result(), gradients.grad_k.result(), gradients.grad_v.result(), gradients.grad_log_decay,
          gradients.grad_log_input_gate, grad_kv_state,
          grad_k_sum};
}

void check_gradients_of_sums(const Tensor& g, const Tensor& e, const Tensor& q, const Tensor& v) {
  check_device("g", g, q);
  check_shape("g", g, {q.size(0), q.size(1), q.size(2), v.size(3)});
  const bool is_half = q.scalar_type() == ScalarType::Half;
  FASTMAX_CHECK(g.scalar_type() == (is_half ? ScalarType::Float : q.scalar_type()), "g must have q's dtype, or float32 for float16");
  check_per_query("e", e, q);
  const bool wide = q.scalar_type() == ScalarType::Double;
  FASTMAX_CHECK(e.scalar_type() == (wide ? ScalarType::Double : ScalarType::Float), "e must be ", wide ? "float64" : "float32");
}

// Checks the arguments that all pieces of the backward share: no states, nothing for the gradient of log_decay.
void check_piece(const AttentionInputs& x, const Tensor& g, const Tensor& e, double scale, int64_t order) {
  check_tokens(x, scale, order);
  check_gradients_of_sums(g, e, x.q, x.v);
}

// g and e as all kernels read them: g with the padded columns of v, aligned and not expanded.
struct GradientsOfSums {
  Tensor g, e;

  GradientsOfSums(const Tensor& g_in, const Tensor& e_in, const Operands& x) : g(g_in), e(dense(e_in)) {
    const int64_t columns = x.v.size(3);
    if (g.size(3) == columns && is_aligned(g) && !is_expanded(g)) return;
    g = zeros_like_layout(g_in, columns);
    Tensor own = torch::stable::narrow(g, 3, 0, g_in.size(3));
    torch::stable::copy_(own, g_in);
  }
  void fill(BwdParams& p) const { p.g = g.data_ptr(), p.g_stride = stride_of(g), p.e = floats(e); }
};

std::tuple<Tensor, Tensor> gradients_of_sums(const Tensor& grad_o_in, const OptionalTensor& grad_z, const Tensor& o_in, const Tensor& z) {
  const int device = cuda_device_of("o", o_in);
  const torch::stable::accelerator::DeviceGuard guard(device);
  const AttentionInputs inputs{o_in, o_in, o_in, kNotGiven, kNotGiven, kNotGiven, kNotGiven, kNotGiven};
  check_inputs(inputs, 1., /*causal=*/true);
  check_results(o_in, o_in, o_in, grad_o_in, "z", z);
  if (grad_z.has_value()) check_per_query("grad_z", *grad_z, o_in);
  check_kernels_cover(inputs);
  check_float("z", z);
  if (grad_z.has_value()) check_float("grad_z", *grad_z);
  const Tensor o = readable(o_in), grad_o = readable(grad_o_in), dense_z = dense(z);
  OptionalTensor dense_grad_z;
  if (grad_z.has_value()) dense_grad_z = dense(*grad_z);
  const bool is_half = o.scalar_type() == ScalarType::Half;
  const int64_t b = o.size(0), h = o.size(1), n = o.size(2), dv = o_in.size(3);
  const Tensor g = empty_contiguous({b, h, n, o.size(3)}, is_half ? ScalarType::Float : o.scalar_type(), device), e = empty_per_query(o_in);
  if (!is_empty(o_in)) {
    BwdParams p{};
    fill_problem(p, o, o, o, 1., /*causal=*/true, kNoWindow, /*allow_tf32=*/false);
    p.o = o.data_ptr(), p.o_stride = stride_of(o);
    p.grad_o = grad_o.data_ptr(), p.grad_o_stride = stride_of(grad_o);
    p.z = floats(dense_z), p.grad_z = dense_grad_z.has_value() ? floats(*dense_grad_z) : nullptr;
    launch_gradients_of_sums(p, g.data_ptr(), mutable_floats(e), current_stream(device));
  }
  if (o.size(3) == dv) return {g, e};
  return {dense_copy(torch::stable::narrow(const_cast<Tensor&>(g), 3, 0, dv), g.scalar_type()), e};
}

std::tuple<Tensor, Tensor, Tensor> state_of_queries(const Tensor& g, const Tensor& e, const Tensor& q_in, const Tensor& k_in,
                                                    const Tensor& v_in, const OptionalTensor& log_decay,
                                                    const OptionalTensor& k_start, const OptionalTensor& log_input_gate,
                                                    double scale, double a0, double a1, double a2, int64_t order, bool allow_tf32,
                                                    bool keep) {
  const int device = cuda_device_of("q", q_in);
  const torch::stable::accelerator::DeviceGuard guard(device);
  const AttentionInputs inputs{q_in, k_in, v_in, kNotGiven, log_decay, log_input_gate, k_start, kNotGiven};
  check_piece(inputs, g, e, scale, order);
  check_kernels_cover(inputs);
  const auto [kv_state, k_sum] = zero_state(k_in, v_in, order);
  if (is_empty(q_in)) return {kv_state, k_sum, empty_saved(k_in, 0)};

  const Tensor grad_kv_state = empty_dense(kv_state, ScalarType::Float), grad_k_sum = empty_dense(k_sum, ScalarType::Float);
  const Operands x = unexpanded(inputs);
  const GradientsOfSums sums(g, e, x);
  BwdParams p{};
  fill(p, x, scale, a0, a1, a2, order, allow_tf32);
  sums.fill(p);
  // The gradient of the new state is zero, and no kernel reads the states.
  p.mode = BwdMode::kState;
  p.state = {floats(kv_state),
             floats(k_sum),
             floats(kv_state),
             floats(k_sum),
             floats(kv_state),
             floats(k_sum),
             mutable_floats(grad_kv_state),
             mutable_floats(grad_k_sum),
             static_cast<int>(q_in.size(3)),
             static_cast<int>(v_in.size(3))};
  const Tensor saved = keep ? save_states(p, k_in, Direction::kBackward, &Kernels::bwd_saved_bytes) : empty_saved(k_in, 0);
  run(p.uses_saved() ? "state_of_queries, saving states" : "state_of_queries", kLinearFromState, p, device);
  return {grad_kv_state, grad_k_sum, saved};
}

// A dense state, or gradient of one. Where it is not given: zeros, or uninitialised for a call from saved states, which does not read it.
std::pair<Tensor, Tensor> given_state(const OptionalTensor& kv_state, const OptionalTensor& k_sum, const Tensor& k, const Tensor& v,
                                      int64_t order, bool from_saved) {
  if (kv_state.has_value()) return {dense(*kv_state), dense(*k_sum)};
  return from_saved ? empty_state(k, v, order) : zero_state(k, v, order);
}

void check_given_state(const char* kv_state_name, const char* k_sum_name, const OptionalTensor& kv_state, const OptionalTensor& k_sum,
                       const Tensor& q, const Tensor& k, const Tensor& v, int64_t order) {
  FASTMAX_CHECK(kv_state.has_value() == k_sum.has_value(), kv_state_name, " and ", k_sum_name, " must be given together");
  if (kv_state.has_value()) check_state(q, k, v, *kv_state, *k_sum, order, kv_state_name, k_sum_name);
}

std::tuple<Tensor, Tensor> prefill_saved(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const OptionalTensor& attention_mask,
                                        const OptionalTensor& log_decay, const OptionalTensor& k_start,
                                        const OptionalTensor& log_input_gate, const OptionalTensor& kv_state_in,
                                        const OptionalTensor& k_sum_in, const Tensor& saved, double scale, double a0, double a1, double a2,
                                        int64_t order, bool allow_tf32) {
  const int device = cuda_device_of("q", q_in);
  const torch::stable::accelerator::DeviceGuard guard(device);
  const AttentionInputs inputs{q_in, k_in, v_in, attention_mask, log_decay, log_input_gate, k_start, kNotGiven};
  check_tokens(inputs, scale, order);
  check_given_state("kv_state", "k_sum", kv_state_in, k_sum_in, q_in, k_in, v_in, order);
  check_saved(saved, q_in, k_in);
  check_kernels_cover(inputs);
  const Tensor z = empty_per_query(q_in);
  if (is_empty(q_in)) return {empty_like_layout(q_in, v_in.size(3)), z};

  const auto [kv_state, k_sum] = given_state(kv_state_in, k_sum_in, k_in, v_in, order, !is_empty(saved));
  const Operands x = unexpanded(inputs);
  const Results results(q_in, v_in, x, z);
  FwdParams p{};
  fill(p, x, scale, a0, a1, a2, order, allow_tf32);
  results.fill(p);
  p.mode = FwdMode::kOutputsFromState;
  p.state = {floats(kv_state), floats(k_sum), nullptr, nullptr, static_cast<int>(q_in.size(3)), static_cast<int>(v_in.size(3))};
  p.from_zero_state = !kv_state_in.has_value();
  use_saved_states(p, saved, FwdMode::kOutputsFromSaved, Direction::kForward, &Kernels::fwd_saved_bytes);
  run("prefill_saved_", kLinearFromState, p, device);
  return {results.o.result(), z};
}

std::tuple<Tensor, Tensor> prefill_backward_of_queries(const Tensor& g, const Tensor& e, const Tensor& q_in, const Tensor& k_in,
                                                       const Tensor& v_in, const OptionalTensor& attention_mask,
                                                       const OptionalTensor& log_decay, const OptionalTensor& k_start,
                                                       const OptionalTensor& log_input_gate, const OptionalTensor& kv_state_in,
                                                       const OptionalTensor& k_sum_in, double scale, double a0, double a1, double a2,
                                                       int64_t order, bool allow_tf32) {
  const int device = cuda_device_of("q", q_in);
  const torch::stable::accelerator::DeviceGuard guard(device);
  const AttentionInputs inputs{q_in, k_in, v_in, attention_mask, log_decay, log_input_gate, k_start, kNotGiven};
  check_piece(inputs, g, e, scale, order);
  check_given_state("kv_state", "k_sum", kv_state_in, k_sum_in, q_in, k_in, v_in, order);
  check_kernels_cover(inputs);
  const Tensor pairs = log_decay.has_value() ? empty_per_query(q_in) : no_elements(e);
  if (is_empty(q_in)) return {zeros_like_layout(q_in, q_in.size(3)), pairs};

  const auto [kv_state, k_sum] = given_state(kv_state_in, k_sum_in, k_in, v_in, order, /*from_saved=*/false);
  const Operands x(inputs);
  const GradientsOfSums sums(g, e, x);
  const Output grad_q(q_in, q_in.size(3), x.q.size(3));
  BwdParams p{};
  fill(p, x, scale, a0, a1, a2, order, allow_tf32);
  sums.fill(p);
  p.mode = BwdMode::kQueries;
  p.grad_q = grad_q.storage.data_ptr(), p.grad_q_stride = stride_of(grad_q.storage);
  if (log_decay.has_value()) p.pairs_by_query = mutable_floats(pairs);
  p.state.kv_state = floats(kv_state), p.state.k_sum = floats(k_sum);
  p.state.d = static_cast<int>(q_in.size(3)), p.state.dv = static_cast<int>(v_in.size(3));
  run("prefill_backward_of_queries", kLinearFromState, p, device);
  return {grad_q.result(), pairs};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> prefill_backward_of_keys(
    const Tensor& g, const Tensor& e, const OptionalTensor& grad_new_kv_state_in, const OptionalTensor& grad_new_k_sum_in,
    const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const OptionalTensor& attention_mask, const OptionalTensor& log_decay,
    const OptionalTensor& k_start, const OptionalTensor& log_input_gate, const OptionalTensor& pairs, const OptionalTensor& pairs_of_states,
    const Tensor& saved, double scale, double a0, double a1, double a2, int64_t order, bool allow_tf32) {
  const int device = cuda_device_of("q", q_in);
  const torch::stable::accelerator::DeviceGuard guard(device);
  const AttentionInputs inputs{q_in, k_in, v_in, attention_mask, log_decay, log_input_gate, k_start, kNotGiven};
  check_piece(inputs, g, e, scale, order);
  check_given_state("grad_new_kv_state", "grad_new_k_sum", grad_new_kv_state_in, grad_new_k_sum_in, q_in, k_in, v_in, order);
  check_saved(saved, q_in, k_in);
  FASTMAX_CHECK(!log_decay.has_value() || (pairs.has_value() && pairs_of_states.has_value()),
                "the gradient of log_decay needs pairs and pairs_of_states");
  if (log_decay.has_value() && pairs.has_value() && pairs_of_states.has_value()) {
    check_per_query("pairs", *pairs, q_in);
    check_device("pairs_of_states", *pairs_of_states, q_in);
    check_shape("pairs_of_states", *pairs_of_states, {k_in.size(0), k_in.size(1), 2});
    FASTMAX_CHECK(pairs_of_states->scalar_type() == ScalarType::Double, "pairs_of_states must be float64");
  }
  check_kernels_cover(inputs);
  if (is_empty(q_in)) {
    return {zeros_like_layout(k_in, k_in.size(3)), zeros_like_layout(v_in, v_in.size(3)), zero_token_gradient(log_decay, q_in),
            zero_token_gradient(log_input_gate, q_in)};
  }

  const auto [grad_new_kv_state, grad_new_k_sum] = given_state(grad_new_kv_state_in, grad_new_k_sum_in, k_in, v_in, order, !is_empty(saved));
  const Operands x = unexpanded(inputs);
  const GradientsOfSums sums(g, e, x);
  const Output grad_k(k_in, k_in.size(3), x.k.size(3)), grad_v(v_in, v_in.size(3), x.v.size(3));
  const Tensor grad_log_decay = empty_token_gradient(log_decay, q_in), grad_log_input_gate = empty_token_gradient(log_input_gate, q_in);
  OptionalTensor dense_pairs, dense_pairs_of_states;
  BwdParams p{};
  fill(p, x, scale, a0, a1, a2, order, allow_tf32);
  sums.fill(p);
  p.mode = BwdMode::kKeys;
  p.grad_k = grad_k.storage.data_ptr(), p.grad_k_stride = stride_of(grad_k.storage);
  p.grad_v = grad_v.storage.data_ptr(), p.grad_v_stride = stride_of(grad_v.storage);
  if (log_decay.has_value()) {
    check_float("pairs", *pairs);
    dense_pairs = dense(*pairs), dense_pairs_of_states = dense(*pairs_of_states);
    p.grad_log_decay = mutable_floats(grad_log_decay);
    p.pairs_by_query = mutable_floats(*dense_pairs);
    p.pairs_of_states = static_cast<const double*>(dense_pairs_of_states->data_ptr());
  }
  if (log_input_gate.has_value()) p.grad_log_input_gate = mutable_floats(grad_log_input_gate);
  // The state before these keys is not read; a pointer to it says that there is one (decay/decay.h).
  p.state.kv_state = floats(grad_new_kv_state), p.state.k_sum = floats(grad_new_k_sum);
  p.state.grad_new_kv_state = floats(grad_new_kv_state), p.state.grad_new_k_sum = floats(grad_new_k_sum);
  p.state.d = static_cast<int>(q_in.size(3)), p.state.dv = static_cast<int>(v_in.size(3));
  p.from_zero_state = !grad_new_kv_state_in.has_value();
  use_saved_states(p, saved, BwdMode::kKeysFromSaved, Direction::kBackward, &Kernels::bwd_saved_bytes);
  run("prefill_backward_of_keys_", kLinearFromState, p, device);
  return {grad_k.result(), grad_v.result(), grad_log_decay, grad_log_input_gate};
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("prefill", TORCH_BOX(&fastmax::prefill));
  m.impl("prefill_backward", TORCH_BOX(&fastmax::prefill_backward));
  m.impl("state_of_keys", TORCH_BOX(&fastmax::state_of_keys));
  m.impl("state_of_queries", TORCH_BOX(&fastmax::state_of_queries));
  m.impl("gradients_of_sums", TORCH_BOX(&fastmax::gradients_of_sums));
  m.impl("prefill_saved_", TORCH_BOX(&fastmax::prefill_saved));
  m.impl("prefill_backward_of_queries", TORCH_BOX(&fastmax::prefill_backward_of_queries));
  m.impl("prefill_backward_of_keys_", TORCH_BOX(&fastmax::prefill_backward_of_keys));
}
