// fastmax_cuda::exact_window_forward, exact_window_backward and exact_window_backward_qkv, causal. Some architectures have
// kernels that compute local and global keys in one pass. Other calls are computed in two parts: softmax attention to the local
// keys (flash.h), then attention with the polynomial to the global keys, which is merged into it in place. Kernels that cannot
// merge write to memory of their own. All agree on o and lse.
//
// The global keys are all keys but the last `exact_window`. They are the keys of a causal call for the last queries, each at the position
// of the key `exact_window` tokens before it; a lag gives them the decays of the tokens between (Problem::lag).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <climits>
#include <optional>
#include <string>
#include <tuple>

#include "bindings/attention.h"
#include "bindings/checks.h"
#include "bindings/coverage.h"
#include "bindings/flash.h"
#include "bindings/layout.h"
#include "bindings/merge.h"
#include "bindings/operands.h"
#include "bindings/run.h"
#include "bindings/torch_abi.h"
#include "merge/merge.h"
#include "quadratic/algorithm.h"

namespace fastmax {
namespace {

struct Options {
  double scale;
  Polynomial polynomial;
  const std::string& algorithm;
  int64_t window;
  bool allow_tf32;
};

void check(const AttentionInputs& x, const Options& options, bool causal) {
  check_inputs(x, options.scale, causal);
  check_options(x.q, x.v, kNotGiven, options.polynomial.order, options.algorithm);
  FASTMAX_CHECK(options.window >= 1 && options.window <= INT_MAX, "exact_window must be at least 1, got ", options.window);
  FASTMAX_CHECK(causal, "calls with exact_window need causal = True for the CUDA kernels");
  check_kernels_cover(x);
}

// ---- in one pass

// Fills the params of one pass and returns the table of its kernels, or null if there are none.
const Algorithm* fill_one_pass(AttentionParams& p, const AttentionInputs& x, const Operands& operands, const Options& options,
                               Direction direction) {
  operands.fill(p, options.scale, /*causal=*/true, kNoWindow, options.allow_tf32);
  options.polynomial.fill(p);
  p.exact_window = static_cast<int>(std::min<int64_t>(options.window, p.m));  // no query is further behind a key than m - 1
  const bool is_linear = &choose(options.algorithm, x, /*causal=*/true, options.polynomial.order) == &kLinearAlgorithm;
  const Algorithm& algorithm = is_linear ? kLinearExactWindow : kExactWindowAlgorithm;
  fit_head_dim(p, algorithm, direction);
  // Two parts in value blocks are faster than one pass of wider kernels.
  if (is_linear && p.head_dim_v > fit(kLinearAlgorithm, p, direction).head_dim) return nullptr;
  return find(algorithm, p, direction) == nullptr ? nullptr : &algorithm;
}

// Returns o and lse, or nothing if there are no kernels for the call.
std::optional<std::tuple<Tensor, Tensor>> forward_in_one_pass(const AttentionInputs& x, const Options& options) {
  if (is_empty(x.q) || is_empty(x.k) || is_empty(x.v)) return std::nullopt;
  const Operands operands(x);
  FwdParams p{};
  const Algorithm* algorithm = fill_one_pass(p, x, operands, options, Direction::kForward);
  if (algorithm == nullptr) return std::nullopt;
  const Tensor lse = empty_per_query(x.q);
  const Results results(x.q, x.v, operands, lse);
  results.fill(p);
  run("exact_window_forward", *algorithm, p, x.q.get_device_index());
  return std::tuple(results.o.result(), lse);
}

// Returns the gradients, or nothing if there are no kernels for the call.
std::optional<InputGradients> backward_in_one_pass(const AttentionInputs& x, const Options& options, const Tensor& grad_o,
                                                   const OptionalTensor& grad_lse, const Tensor& o, const Tensor& lse,
                                                   bool wants_decay) {
  if (is_empty(x.q) || is_empty(x.k) || is_empty(x.v)) return std::nullopt;
  const Operands operands(x);
  BwdParams p{};
  const Algorithm* algorithm = fill_one_pass(p, x, operands, options, Direction::kBackward);
  if (algorithm == nullptr) return std::nullopt;
  const Gradients gradients(x.q, x.k, x.v, operands, o, grad_o, lse, grad_lse, wants_decay);
  gradients.fill(p);
  run("exact_window_backward", *algorithm, p, x.q.get_device_index());
  return gradients.results();
}

// ---- in parts

// A view of some tokens.
Tensor tokens(const Tensor& x, int64_t dim, int64_t begin, int64_t count) {
  return torch::stable::narrow(const_cast<Tensor&>(x), dim, begin, count);
}
OptionalTensor tokens(const OptionalTensor& x, int64_t dim, int64_t begin, int64_t count) {
  return x.has_value() ? OptionalTensor(tokens(*x, dim, begin, count)) : OptionalTensor();
}

// The call for the global keys. It keeps views of the tensors.
struct GlobalKeys {
  int64_t window, keys, queries, first_query;

  GlobalKeys(const AttentionInputs& x, int64_t window)
      : window(window),
        keys(std::max<int64_t>(0, x.k.size(2) - window)),
        queries(is_empty(x.q) || is_empty(x.k) ? 0 : std::min(x.q.size(2), keys)),
        first_query(x.q.size(2) - queries) {}

  bool exist() const { return queries > 0; }
  Tensor of_queries(const Tensor& x) const { return tokens(x, 2, first_query, queries); }
  OptionalTensor of_queries(const OptionalTensor& x) const { return tokens(x, 2, first_query, queries); }
  Tensor of_keys(const Tensor& x) const { return tokens(x, 2, 0, keys); }
};

struct GlobalCall {
  const GlobalKeys& part;
  Tensor q, k, v;
  OptionalTensor attention_mask, log_decay, log_input_gate, k_start;
  const Options& options;
  AttentionInputs inputs{q, k, v, attention_mask, log_decay, log_input_gate, k_start, kNotGiven};
  const Algorithm& algorithm;
  Operands operands;

  GlobalCall(const AttentionInputs& x, const GlobalKeys& part, const Options& options)
      : part(part),
        q(part.of_queries(x.q)),
        k(part.of_keys(x.k)),
        v(part.of_keys(x.v)),
        attention_mask(tokens(x.attention_mask, 1, 0, part.keys)),
        log_decay(x.log_decay),
        log_input_gate(tokens(x.log_input_gate, 2, 0, part.keys)),
        k_start(part.of_queries(x.k_start)),
        options(options),
        algorithm(choose(options.algorithm, inputs, /*causal=*/true, options.polynomial.order)),
        operands(inputs) {}
  GlobalCall(const GlobalCall&) = delete;

  void fill(AttentionParams& p, Direction direction) const {
    operands.fill(p, options.scale, /*causal=*/true, kNoWindow, options.allow_tf32);
    options.polynomial.fill(p);
    p.lag = log_decay.has_value() ? static_cast<int>(part.window) : 0;
    fit_head_dim(p, algorithm, direction);
  }
  int device() const { return q.get_device_index(); }
};

// Computes attention to the global keys, and merges it into o and lse of the local keys.
void join_global_keys(const GlobalCall& call, const Tensor& o, const Tensor& lse) {
  FwdParams p{};
  call.fill(p, Direction::kForward);
  const Tensor z = empty_per_query(call.q);
  if (is_aligned(o) && select(call.algorithm, p, Direction::kForward).joins_parts) {
    p.o = o.data_ptr(), p.o_stride = stride_of(o);
    p.z = static_cast<float*>(z.data_ptr());
    p.local_lse = static_cast<float*>(lse.data_ptr()), p.local_lse_head = lse.stride(1);
    return run("exact_window_forward", call.algorithm, p, call.device());
  }
  const Results results(call.q, call.v, call.operands, z);
  results.fill(p);
  run("exact_window_forward", call.algorithm, p, call.device());
  merge(o, lse, results.o.result(), z);
}

// The denominators of the global keys' backward, and the gradient of them.
struct Denominators {
  Tensor z;
  OptionalTensor grad_z;

  Denominators(const GlobalCall& call, const Tensor& lse, const OptionalTensor& grad_lse) : z(empty_per_query(call.q)) {
    if (grad_lse.has_value()) grad_z = empty_per_query(call.q);
    DenominatorParams p{};
    p.b = static_cast<int>(call.q.size(0)), p.h = static_cast<int>(call.q.size(1)), p.hk = static_cast<int>(call.k.size(1));
    p.n = static_cast<int>(call.part.queries), p.causal_offset = static_cast<int>(call.part.keys - call.part.queries);
    p.has_decay = call.log_decay.has_value() || call.log_input_gate.has_value();
    p.lse = static_cast<const float*>(lse.data_ptr()), p.lse_stride = stride_of(lse);
    p.k_start = Operands::bounds(call.k_start);
    p.z = static_cast<float*>(z.data_ptr());
    if (grad_lse.has_value()) {
      p.grad_lse = static_cast<const float*>(grad_lse->data_ptr()), p.grad_lse_stride = stride_of(*grad_lse);
      p.grad_z = static_cast<float*>(grad_z->data_ptr());
    }
    launch_denominators(p, current_stream(call.device()));
  }
};

// Adds x to sum in place.
void add(const Tensor& x, const Tensor& sum) {
  Tensor written = sum;
  torch::stable::copy_(written, torch::stable::subtract(sum, x, /*alpha=*/-1.));
}

// Adds the gradients through the global keys to those through the local keys.
void add_global_gradients(const GlobalCall& call, const Tensor& o, const Tensor& grad_o, const Denominators& denominators,
                          const InputGradients& sums, bool wants_decay) {
  BwdParams p{};
  call.fill(p, Direction::kBackward);
  const bool writable = is_aligned(sums.q) && is_aligned(sums.k) && is_aligned(sums.v);
  if (writable && select(call.algorithm, p, Direction::kBackward).joins_parts) {
    const Gradients gradients({Output(sums.q), Output(sums.k), Output(sums.v)}, call.operands, o, grad_o, denominators.z,
                              denominators.grad_z, /*wants_decay=*/false);
    gradients.fill(p);
    if (p.log_decay != nullptr && wants_decay) p.grad_log_decay = static_cast<float*>(sums.log_decay.data_ptr());
    if (p.log_input_gate != nullptr && wants_decay) p.grad_log_input_gate = static_cast<float*>(sums.log_input_gate.data_ptr());
    p.adds = true;
    return run("exact_window_backward", call.algorithm, p, call.device());
  }
  const Gradients gradients(call.q, call.k, call.v, call.operands, o, grad_o, denominators.z, denominators.grad_z, wants_decay);
  gradients.fill(p);
  run("exact_window_backward", call.algorithm, p, call.device());
  add(gradients.grad_q.result(), sums.q), add(gradients.grad_k.result(), sums.k), add(gradients.grad_v.result(), sums.v);
  if (p.grad_log_decay != nullptr) add(gradients.grad_log_decay, sums.log_decay);
  if (p.grad_log_input_gate != nullptr) add(gradients.grad_log_input_gate, sums.log_input_gate);
}

std::tuple<Tensor, Tensor> forward_by_parts(const AttentionInputs& x, const Options& options) {
  const auto [o, lse] = flash_forward(x.q, x.k, x.v, x.attention_mask, x.log_decay, x.k_start, x.k_end, kNotGiven, options.scale,
                                      /*causal=*/true, /*left=*/options.window - 1, /*right=*/-1, options.allow_tf32);
  const GlobalKeys part(x, options.window);
  if (part.exist()) join_global_keys(GlobalCall(x, part, options), part.of_queries(o), part.of_queries(lse));
  return {o, lse};
}

InputGradients backward_by_parts(const AttentionInputs& x, const Options& options, const Tensor& grad_o, const OptionalTensor& grad_lse,
                                 const Tensor& o, const Tensor& lse, bool wants_decay) {
  const AttentionInputs local{x.q, x.k, x.v, x.attention_mask, x.log_decay, kNotGiven, x.k_start, x.k_end};
  InputGradients sums = flash_gradients(grad_o, grad_lse, local, o, lse, options.scale, /*causal=*/true,
                                        {/*left=*/options.window - 1, /*right=*/-1}, options.allow_tf32, wants_decay);
  if (wants_decay) sums.log_input_gate = zero_token_gradient(x.log_input_gate, x.q);
  const GlobalKeys part(x, options.window);
  if (part.exist()) {
    const GlobalCall call(x, part, options);
    const Denominators denominators(call, part.of_queries(lse), part.of_queries(grad_lse));
    // Kernels write the gradient of the gates densely.
    const Tensor of_gates = wants_decay ? zero_token_gradient(call.log_input_gate, x.q) : sums.log_input_gate;
    add_global_gradients(call, part.of_queries(o), part.of_queries(grad_o), denominators,
                         {part.of_queries(sums.q), part.of_keys(sums.k), part.of_keys(sums.v), sums.log_decay, of_gates}, wants_decay);
    if (wants_decay && call.log_input_gate.has_value()) {
      Tensor written = part.of_keys(sums.log_input_gate);
      torch::stable::copy_(written, of_gates);
    }
  }
  return sums;
}

std::tuple<Tensor, Tensor> exact_window_forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& attention_mask,
                                                const OptionalTensor& log_decay, const OptionalTensor& k_start, const OptionalTensor& k_end,
                                                const OptionalTensor& log_input_gate, double scale, double a0, double a1, double a2,
                                                int64_t order, bool causal, const std::string& algorithm, int64_t exact_window,
                                                bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q));
  const AttentionInputs inputs{q, k, v, attention_mask, log_decay, log_input_gate, k_start, k_end};
  const Options options{scale, {a0, a1, a2, order}, algorithm, exact_window, allow_tf32};
  check(inputs, options, causal);
  if (auto results = forward_in_one_pass(inputs, options)) return *results;
  return forward_by_parts(inputs, options);
}

template <bool kOfDecay>
GradientResults<kOfDecay> exact_window_backward(
    const Tensor& grad_o, const OptionalTensor& grad_lse, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
    const Tensor& lse, const OptionalTensor& attention_mask, const OptionalTensor& log_decay, const OptionalTensor& k_start,
    const OptionalTensor& k_end, const OptionalTensor& log_input_gate, double scale, double a0, double a1, double a2, int64_t order,
    bool causal, const std::string& algorithm, int64_t exact_window, bool allow_tf32) {
  const torch::stable::accelerator::DeviceGuard guard(cuda_device_of("q", q));
  const AttentionInputs inputs{q, k, v, attention_mask, log_decay, log_input_gate, k_start, k_end};
  const Options options{scale, {a0, a1, a2, order}, algorithm, exact_window, allow_tf32};
  check(inputs, options, causal);
  check_results(q, v, o, grad_o, "lse", lse);
  check_float("lse", lse);
  if (grad_lse.has_value()) check_per_query("grad_lse", *grad_lse, q), check_float("grad_lse", *grad_lse);
  std::optional<InputGradients> grads = backward_in_one_pass(inputs, options, grad_o, grad_lse, o, lse, kOfDecay);
  if (!grads.has_value()) grads = backward_by_parts(inputs, options, grad_o, grad_lse, o, lse, kOfDecay);
  return as_results<kOfDecay>(*grads);
}

}  // namespace
}  // namespace fastmax

STABLE_TORCH_LIBRARY_IMPL(fastmax_cuda, CUDA, m) {
  m.impl("exact_window_forward", TORCH_BOX(&fastmax::exact_window_forward));
  m.impl("exact_window_backward", TORCH_BOX(&fastmax::exact_window_backward<true>));
  m.impl("exact_window_backward_qkv", TORCH_BOX(&fastmax::exact_window_backward<false>));
}
