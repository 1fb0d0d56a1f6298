// Calls of kernels from Python (__init__.py, by ctypes): tensors and numbers by name, then the algorithm that runs. Between here and
// the kernels is what is there on a device too: tables of kernels, workspaces, launches.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "core/algorithm.h"
#include "core/dispatch.h"
#include "core/value_blocks.h"
#include "decay/decay.h"
#include "decode/buffered.h"
#include "kept/kept.h"
#include "layer/layer.h"
#include "layer/rotary.h"
#include "linear/algorithm.h"
#include "machine.h"
#include "merge/merge.h"
#include "quadratic/algorithm.h"

namespace fastmax {
namespace {

struct Given {
  void* data;
  int64_t sizes[4], strides[4];
};

std::map<std::string, Given> tensors;
std::map<std::string, double> numbers;
std::string error, kernels_name;

bool has(const char* name) { return tensors.count(name) > 0; }
const Given& tensor(const char* name) {
  if (!has(name)) throw std::runtime_error(std::string("emulator: no tensor ") + name);
  return tensors[name];
}
template <class T>
void take(const char* name, T*& pointer) {
  pointer = has(name) ? static_cast<T*>(tensor(name).data) : nullptr;
}
template <class T>
void take(const char* name, T*& pointer, Stride& stride) {
  take(name, pointer);
  if (has(name)) stride = {tensor(name).strides[0], tensor(name).strides[1], tensor(name).strides[2]};
}
void take(const char* name, KeyBounds& bounds) { take(name, bounds.data, bounds.stride); }
void take(const char* name, const char* is_float, Weight& weight) {
  take(name, weight.data);
  weight.is_float = numbers.count(is_float) > 0;
}
double number(const char* name, double otherwise) { return numbers.count(name) > 0 ? numbers[name] : otherwise; }
int integer(const char* name, int otherwise) { return static_cast<int>(number(name, otherwise)); }

// As bindings/operands.h.
void fill(AttentionParams& p) {
  const Given &q = tensor("q"), &k = tensor("k"), &v = tensor("v");
  const auto size = [](const Given& x, int i) { return static_cast<int>(x.sizes[i]); };
  p.b = size(q, 0), p.h = size(q, 1), p.n = size(q, 2), p.d = size(q, 3);
  p.hk = size(k, 1), p.m = size(k, 2), p.dv = size(v, 3);
  p.head_dim_qk = p.head_dim_v = integer("kernels_head_dim", NativeHeadDims::at_least(std::max(p.d, p.dv)));
  p.math = static_cast<MathMode>(integer("math", 0));
  p.scale = static_cast<float>(number("scale", 1));
  p.order = integer("order", 2);
  p.a0 = static_cast<float>(number("a0", 1)), p.a1 = static_cast<float>(number("a1", 1));
  p.a2 = p.order == 2 ? static_cast<float>(number("a2", 0.5)) : 0.f;
  p.causal = integer("causal", 0) != 0, p.causal_offset = p.m - p.n, p.lag = integer("lag", 0);
  p.dropout = static_cast<float>(number("dropout", 0));
  const int left = integer("left", -1), right = integer("right", -1);
  p.left = left < 0 ? p.m : std::min(left, p.m);
  p.right = p.causal ? 0 : right < 0 ? p.n : std::min(right, p.n);
  p.window = p.left < p.m - 1 || (!p.causal && p.right < p.n - 1);
  p.exact_window = integer("exact_window", 0);
  p.sm_arch = 90, p.sm_count = integer("sm_count", 2);
  take("q", p.q, p.q_stride), take("k", p.k, p.k_stride), take("v", p.v, p.v_stride);
  take("attention_mask", p.attention_mask);
  p.mask_batch_stride = has("attention_mask") ? tensor("attention_mask").strides[0] : 0;
  take("noise", p.noise, p.noise_stride);
  take("k_start", p.k_start), take("k_end", p.k_end);
  take("log_decay", p.log_decay, p.log_decay_stride);
  take("log_input_gate", p.log_input_gate, p.log_input_gate_stride);
  p.lim = static_cast<float>(number("lim", 0)), take("k_factor", p.k_factor);
}

void fill(FwdParams& p) {
  take("o", p.o, p.o_stride), take("z", p.z);
  take("kv_state", p.state.kv_state), take("k_sum", p.state.k_sum);
  take("new_kv_state", p.state.new_kv_state), take("new_k_sum", p.state.new_k_sum);
  p.state.d = integer("state_d", p.d), p.state.dv = integer("state_dv", p.dv);
  take("saved", p.saved);
  const bool saves = p.saved != nullptr;
  if (p.state.kv_state == nullptr) p.mode = FwdMode::kOutputs;
  else if (p.o == nullptr) p.mode = saves ? FwdMode::kStateAndSaved : FwdMode::kState;
  else if (saves) p.mode = FwdMode::kOutputsFromSaved;
  else p.mode = p.state.new_kv_state == nullptr ? FwdMode::kOutputsFromState : FwdMode::kOutputsAndState;
}

void fill(BwdParams& p) {
  take("o", p.o, p.o_stride), take("grad_o", p.grad_o, p.grad_o_stride), take("z", p.z), take("grad_z", p.grad_z);
  take("grad_q", p.grad_q, p.grad_q_stride), take("grad_k", p.grad_k, p.grad_k_stride), take("grad_v", p.grad_v, p.grad_v_stride);
  take("grad_log_decay", p.grad_log_decay), take("grad_log_input_gate", p.grad_log_input_gate);
  take("kv_state", p.state.kv_state), take("k_sum", p.state.k_sum);
  take("new_kv_state", p.state.new_kv_state), take("new_k_sum", p.state.new_k_sum);
  take("grad_new_kv_state", p.state.grad_new_kv_state), take("grad_new_k_sum", p.state.grad_new_k_sum);
  take("grad_kv_state", p.state.grad_kv_state), take("grad_k_sum", p.state.grad_k_sum);
  p.state.d = integer("state_d", p.d), p.state.dv = integer("state_dv", p.dv);
  take("saved", p.saved);
  const bool saves = p.saved != nullptr;
  if (p.state.kv_state == nullptr) p.mode = BwdMode::kInputs;
  else if (p.grad_q != nullptr) p.mode = p.grad_k == nullptr ? BwdMode::kQueries : BwdMode::kInputsAndState;
  else if (p.grad_k != nullptr) p.mode = saves ? BwdMode::kKeysFromSaved : BwdMode::kKeys;
  else p.mode = saves ? BwdMode::kStateAndSaved : BwdMode::kState;
}

// What later versions of the params have beside these.
template <class Params>
void fill_more(Params& p) {
  if constexpr (requires { p.local_lse; }) {
    take("local_lse", p.local_lse);
    p.local_lse_head = has("local_lse") ? tensor("local_lse").strides[1] : 0;
  }
  if constexpr (requires { p.from_zero_state; }) p.from_zero_state = integer("from_nothing", 0) != 0;
  if constexpr (requires { p.adds; }) p.adds = integer("adds", 0) != 0;
  if constexpr (requires { p.g_stride; }) take("g", p.g, p.g_stride), take("e", p.e);
  if constexpr (requires { p.pairs_by_query; }) take("pairs_by_query", p.pairs_by_query);
  if constexpr (requires { p.pairs_of_states; }) take("pairs_of_states", p.pairs_of_states);
}

const Algorithm& algorithm_of(const std::string& name) {
  for (const Algorithm* algorithm : {&kQuadraticAlgorithm, &kFlashAlgorithm, &kExactWindowAlgorithm, &kLinearAlgorithm, &kLinearFromState,
                                     &kLinearOfShortened, &kLinearExactWindow}) {
    if (name == algorithm->name) return *algorithm;
  }
  throw std::runtime_error("emulator: no algorithm " + name);
}

// A workspace full of NaN, between bytes that nobody may write.
class Workspace {
 public:
  explicit Workspace(size_t bytes) : bytes_(bytes), data_(static_cast<unsigned char*>(std::aligned_alloc(256, size()))) {
    std::memset(data_.get(), 0xff, size());
  }
  void* get() const { return bytes_ == 0 ? nullptr : data_.get() + kGuard; }
  void check() const {
    const size_t end = (size() - kGuard) - kGuard;
    for (size_t i = 0; i < kGuard; ++i) {
      if (data_.get()[i] != 0xff) throw std::runtime_error("emulator: a write before the workspace");
    }
    for (size_t i = bytes_; i < end + kGuard; ++i) {
      if (data_.get()[kGuard + i] != 0xff) throw std::runtime_error("emulator: a write behind the workspace");
    }
  }

 private:
  static constexpr size_t kGuard = 4096;
  size_t size() const { return (bytes_ + 255) / 256 * 256 + 2 * kGuard; }
  struct Free {
    void operator()(unsigned char* p) const { std::free(p); }
  };
  size_t bytes_;
  std::unique_ptr<unsigned char, Free> data_;
};

template <class Params>
size_t saved_bytes(const Algorithm& algorithm, Direction direction, size_t (*Kernels::*bytes)(const Params&)) {
  Params p{};
  fill(static_cast<AttentionParams&>(p)), fill(p), fill_more(p);
  const auto function = select(algorithm, p, direction).*bytes;
  return function == nullptr ? 0 : function(p);
}

template <class Params>
void run(const Algorithm& algorithm, Direction direction, size_t (*workspace_bytes)(const Kernels&, const Params&),
         void (*launch)(const Kernels&, const Params&, cudaStream_t)) {
  Params p{};
  fill(static_cast<AttentionParams&>(p)), fill(p), fill_more(p);
  const Kernels& kernels = select(algorithm, p, direction);
  kernels_name = kernels.name;
  const Workspace workspace(workspace_bytes(kernels, p));
  p.workspace = workspace.get();
  launch(kernels, p, nullptr);
  if constexpr (std::is_same_v<Params, FwdParams>) {  // as bindings/run.h
    if (p.has_decay()) launch_nan_rows(p, nullptr);
  }
  workspace.check();
}

// As bindings/layer.cpp.
void run_split_heads(bool backward) {
  SplitHeadsParams p{};
  const Given& x = tensor("x");
  p.b = static_cast<int>(x.sizes[0]), p.n = static_cast<int>(x.sizes[1]), p.channels = static_cast<int>(x.sizes[2]);
  p.math = static_cast<MathMode>(integer("math", 0)), p.sm_count = integer("sm_count", 2);
  p.x = x.data, p.x_batch = x.strides[0], p.x_token = x.strides[1];
  take("recent", p.recent), take("convolution", "float_convolution", p.convolution);
  p.width = p.convolution.data == nullptr ? 1 : static_cast<int>(tensor("convolution").sizes[2]);
  if (p.recent != nullptr) p.recent_batch = tensor("recent").strides[0], p.recent_token = tensor("recent").strides[1];
  take("places", p.places), p.wide_places = true;
  take("cos", p.cos), take("sin", p.sin);
  if (p.cos != nullptr) p.rotated = static_cast<int>(tensor("cos").sizes[2]), p.rotation_batch = tensor("cos").strides[0];
  const int heads[3] = {integer("heads", 1), integer("kv_heads", 1), integer("kv_heads", 1)}, head_dim = integer("head_dim", 64);
  const int widths[3] = {head_dim, head_dim, (p.channels - (heads[0] + heads[1]) * head_dim) / heads[2]};
  const char* outs[3] = {"out_q", "out_k", "out_v"};
  const char* grads[3] = {"grad_q", "grad_k", "grad_v"};
  for (int i = 0, channel = 0; i < 3; channel += heads[i] * widths[i], ++i) {
    HeadGroup& group = p.groups[i];
    group.heads = heads[i], group.width = widths[i], group.first_channel = channel;
    take(outs[i], group.out), take(grads[i], group.grad);
    if (group.grad != nullptr) {
      const Given& grad = tensor(grads[i]);
      group.grad_stride = {grad.strides[0], grad.strides[2], grad.strides[1]};
    }
  }
  take("norm_q", "float_norm", p.groups[0].norm), take("norm_k", "float_norm", p.groups[1].norm);
  take("grad_norm_q", p.groups[0].grad_norm), take("grad_norm_k", p.groups[1].grad_norm);
  p.groups[0].eps = static_cast<float>(number("q_eps", 1e-5)), p.groups[1].eps = static_cast<float>(number("k_eps", 1e-5));
  take("grad_x", p.grad_x), take("grad_recent", p.grad_recent), take("grad_convolution", p.grad_convolution);
  if (!backward) return launch_split_heads(p, nullptr);
  const Workspace workspace(split_heads_workspace(p) * sizeof(float));
  p.workspace = static_cast<float*>(workspace.get());
  launch_split_heads_backward(p, nullptr);
  workspace.check();
}

void run_join_heads(bool backward) {
  JoinHeadsParams p{};
  const Given& o = tensor("o");
  p.b = static_cast<int>(o.sizes[0]), p.n = static_cast<int>(o.sizes[2]);
  p.math = static_cast<MathMode>(integer("math", 0)), p.sm_count = integer("sm_count", 2);
  take("o", p.o, p.o_stride), take("gate", p.gate);
  if (p.gate != nullptr) p.gate_batch = tensor("gate").strides[0], p.gate_token = tensor("gate").strides[1];
  p.group.heads = static_cast<int>(o.sizes[1]), p.group.width = static_cast<int>(o.sizes[3]);
  p.group.eps = static_cast<float>(number("eps", 1e-5));
  take("norm", "float_norm", p.group.norm), take("y", p.group.out), take("grad_y", p.group.grad);
  if (p.group.grad != nullptr) p.group.grad_stride = {tensor("grad_y").strides[0], p.group.width, tensor("grad_y").strides[1]};
  take("grad_o", p.grad_o, p.grad_o_stride), take("grad_gate", p.grad_gate), take("grad_norm", p.group.grad_norm);
  if (!backward) return launch_join_heads(p, nullptr);
  const Workspace workspace(join_heads_workspace(p) * sizeof(float));
  p.workspace = static_cast<float*>(workspace.get());
  launch_join_heads_backward(p, nullptr);
  workspace.check();
}

// As bindings/kept.cpp.
void run_choice() {
  ChoiceParams p{};
  const Given &rank = tensor("rank"), &kept = tensor("kept");
  const auto size = [](const Given& x, int i) { return static_cast<int>(x.sizes[i]); };
  const auto strides = [](const Given& x) { return Stride4{x.strides[0], x.strides[1], x.strides[2], x.strides[3]}; };
  p.b = size(rank, 0), p.hk = size(rank, 1), p.blocks = size(rank, 2), p.candidates = size(rank, 3), p.count = size(kept, 3);
  take("rank", p.rank), p.rank_stride = strides(rank);
  take("index", p.index), p.index_stride = strides(tensor("index"));
  take("earlier", p.earlier), p.earlier_stride = 1;
  take("kept", p.kept);
  const Workspace workspace(choice_workspace_bytes(p));
  launch_choice(p, workspace.get(), nullptr);
  workspace.check();
}

void fill(PlacesParams& p, const Given& keys, const Given& values) {
  const Given& kept = tensor("kept");
  const auto size = [](const Given& x, int i) { return static_cast<int>(x.sizes[i]); };
  p.b = size(kept, 0), p.hk = size(kept, 1), p.blocks = size(kept, 2), p.kept = size(kept, 3);
  p.block = integer("block", 1), p.m = integer("tokens", 1);
  take("kept", p.kept_keys), take("recent_keys", p.recent), p.recent_batch = tensor("recent_keys").strides[0];
  p.d = size(keys, 3), p.dv = size(values, 3);
  p.math = static_cast<MathMode>(integer("math", 0)), p.aligned = integer("aligned", 1) != 0;
}

void run_gather(bool backward) {
  if (!backward) {
    GatherParams p{};
    fill(p, tensor("k"), tensor("v"));
    take("k", p.k, p.k_stride), take("v", p.v, p.v_stride), take("log_factor", p.log_factor, p.log_factor_stride);
    take("keys", p.keys), take("values", p.values), take("gate", p.gate), take("has_key", p.has_key);
    take("log_decay", p.log_decay), take("least", p.least);
    return launch_gather(p, nullptr);
  }
  GatherBackwardParams p{};
  fill(p, tensor("grad_keys"), tensor("grad_values"));
  take("grad_keys", p.grad_keys), take("grad_values", p.grad_values), take("grad_gate", p.grad_gate);
  take("grad_k", p.grad_k, p.grad_k_stride), take("grad_v", p.grad_v, p.grad_v_stride);
  take("grad_log_factor", p.grad_log_factor, p.grad_log_factor_stride);
  const Workspace workspace(gather_backward_workspace_bytes(p));
  launch_gather_backward(p, workspace.get(), nullptr);
  workspace.check();
}

void run_kept_step() {
  KeptStepParams p{};
  const Given &q = tensor("q"), &keys = tensor("keys"), &values = tensor("values");
  const auto size = [](const Given& x, int i) { return static_cast<int>(x.sizes[i]); };
  p.b = size(q, 0), p.h = size(q, 1), p.hk = size(keys, 1), p.slots = size(keys, 2), p.d = size(keys, 3), p.dv = size(values, 3);
  p.kept = integer("kept", 1), p.window = integer("window", 1), p.block = integer("block", 1);
  p.scale = static_cast<float>(number("scale", 1));
  p.math = static_cast<MathMode>(integer("math", 0)), p.aligned = integer("aligned", 1) != 0;
  take("q", p.q, p.q_stride), take("k", p.k, p.k_stride), take("v", p.v, p.v_stride);
  take("gate", p.log_input_gate, p.log_input_gate_stride), take("log_decay", p.log_decay, p.log_decay_stride);
  take("token_positions", p.token_positions), take("token_count", p.token_count);
  take("keys", p.keys), take("values", p.values), take("log_factors", p.log_factors), take("positions", p.positions);
  take("other", p.other, p.other_stride), take("other_lse", p.other_lse, p.other_lse_stride), take("o", p.o);
  launch_kept_step(p, nullptr);
}

// As bindings/decode.cpp.
void run_buffered_step() {
  BufferedParams p{};
  DecodeParams& s = p.step;
  const Given &q = tensor("q"), &keys = tensor("local_keys"), &values = tensor("local_values");
  s.b = q.sizes[0], s.h = q.sizes[1], s.hk = keys.sizes[1], s.d = keys.sizes[3], s.dv = values.sizes[3];
  s.math = static_cast<MathMode>(integer("math", 0)), s.order = integer("order", 2), s.sm_count = integer("sm_count", 2);
  s.scale = number("scale", 1), s.a0 = number("a0", 1), s.a1 = number("a1", 1), s.a2 = number("a2", 0.5);
  const auto take_token = [](const char* name, const void*& pointer, TokenStride& stride) {
    take(name, pointer);
    const Given& x = tensor(name);
    stride = {x.strides[0], x.strides[1], x.strides[3]};
  };
  take_token("q", s.q, s.q_stride), take_token("k", s.k, s.k_stride), take_token("v", s.v, s.v_stride);
  take("attention_mask", s.attention_mask), take("log_decay", s.log_decay), take("log_input_gate", s.log_input_gate);
  if (has("attention_mask")) s.mask_stride = tensor("attention_mask").strides[0];
  if (has("log_decay")) s.decay_batch_stride = tensor("log_decay").strides[0], s.decay_head_stride = tensor("log_decay").strides[1];
  if (has("log_input_gate")) s.gate_batch_stride = tensor("log_input_gate").strides[0], s.gate_head_stride = tensor("log_input_gate").strides[1];
  take("kv_state", s.new_kv_state), take("k_sum", s.new_k_sum);
  s.kv_state = s.new_kv_state, s.k_sum = s.new_k_sum;
  take("local_keys", p.local_keys), take("local_values", p.local_values), take("local_mask", p.local_mask);
  take("local_decays", p.local_decays), take("local_gates", p.local_gates), take("buffered", p.buffered);
  take("o", s.o), take("lse", p.lse);
  p.exact_window = integer("window", 0), p.flush_interval = static_cast<int>(keys.sizes[2]) - p.exact_window;
  const Workspace workspace(buffered_workspace_bytes(p));
  p.workspace = workspace.get();
  launch_buffered(p, nullptr);
  workspace.check();
}

// As bindings/merge.cpp.
void run_merge() {
  MergeParams p{};
  const Given& o = tensor("o");
  p.b = o.sizes[0], p.h = o.sizes[1], p.n = o.sizes[2], p.dv = o.sizes[3];
  p.math = static_cast<MathMode>(integer("math", 0)), p.aligned = integer("aligned", 1) != 0;
  take("o", p.o, p.o_stride), take("lse", p.lse, p.lse_stride);
  take("o_global", p.o_global, p.o_global_stride), take("z_global", p.z_global, p.z_global_stride);
  launch_merge(p, nullptr);
}

void fill(PartsParams& p) {
  const Given& o = tensor("first");
  p.b = o.sizes[0], p.h = o.sizes[1], p.n = o.sizes[2], p.dv = o.sizes[3];
  p.math = static_cast<MathMode>(integer("math", 0)), p.aligned = integer("aligned", 1) != 0;
  take("first", p.first.o, p.first.o_stride), take("first_lse", p.first.lse, p.first.lse_stride);
  take("second", p.second.o, p.second.o_stride), take("second_lse", p.second.lse, p.second.lse_stride);
}

void run_merge_parts(bool backward) {
  if (!backward) {
    MergePartsParams p{};
    fill(p);
    take("o", p.o, p.o_stride), take("lse", p.lse);
    return launch_merge_parts(p, nullptr);
  }
  MergePartsBackwardParams p{};
  fill(p);
  take("grad_o", p.grad_o, p.grad_o_stride), take("grad_lse", p.grad_lse, p.grad_lse_stride);
  take("grad_first", p.grad_first_o, p.grad_first_o_stride), take("grad_second", p.grad_second_o, p.grad_second_o_stride);
  take("grad_first_lse", p.grad_first_lse), take("grad_second_lse", p.grad_second_lse);
  launch_merge_parts_backward(p, nullptr);
}

// As bindings/rotary.cpp.
void run_rotary_factors() {
  RotaryParams p{};
  take("positions", p.positions), p.tokens = tensor("positions").sizes[0];
  p.wide_positions = numbers.count("wide_positions") > 0;
  p.half = integer("half", 1), p.base = number("base", 1);
  take("cos", p.cos), take("sin", p.sin);
  launch_rotary_factors(p, nullptr);
}

}  // namespace
}  // namespace fastmax

extern "C" {

void emulator_begin() { fastmax::tensors.clear(), fastmax::numbers.clear(); }

void emulator_tensor(const char* name, void* data, int dims, const int64_t* sizes, const int64_t* strides) {
  fastmax::Given x{data, {1, 1, 1, 1}, {0, 0, 0, 0}};
  for (int i = 0; i < std::min(dims, 4); ++i) x.sizes[i] = sizes[i], x.strides[i] = strides[i];
  fastmax::tensors[name] = x;
}

void emulator_number(const char* name, double x) { fastmax::numbers[name] = x; }

// What went wrong, or an empty text.
const char* emulator_run(const char* algorithm, int backward) {
  using namespace fastmax;
  error.clear(), kernels_name.clear();
  try {
    emulator::configure(static_cast<uint64_t>(number("schedule", 0)), integer("resident", 2));
    const std::string name = algorithm;
    if (name == "split_heads") return run_split_heads(backward != 0), error.c_str();
    if (name == "join_heads") return run_join_heads(backward != 0), error.c_str();
    if (name == "largest_so_far") return run_choice(), error.c_str();
    if (name == "gather_kept") return run_gather(backward != 0), error.c_str();
    if (name == "kept_step") return run_kept_step(), error.c_str();
    if (name == "buffered_step") return run_buffered_step(), error.c_str();
    if (name == "merge") return run_merge(), error.c_str();
    if (name == "merge_parts") return run_merge_parts(backward != 0), error.c_str();
    if (name == "rotary_factors") return run_rotary_factors(), error.c_str();
    const Algorithm& chosen = algorithm_of(name);
    if (backward != 0) {
      run(chosen, Direction::kBackward, bwd_workspace_bytes, launch_bwd);
    } else {
      run(chosen, Direction::kForward, fwd_workspace_bytes, launch_fwd);
    }
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  return error.c_str();
}

// The row of the algorithm's table that ran.
const char* emulator_kernels() { return fastmax::kernels_name.c_str(); }

// Bytes of the intermediate states that a call saves (Kernels::fwd_saved_bytes).
int64_t emulator_saved_bytes(const char* algorithm, int backward) {
  using namespace fastmax;
  const Algorithm& chosen = algorithm_of(algorithm);
  return static_cast<int64_t>(backward != 0 ? saved_bytes(chosen, Direction::kBackward, &Kernels::bwd_saved_bytes)
                                            : saved_bytes(chosen, Direction::kForward, &Kernels::fwd_saved_bytes));
}
}
