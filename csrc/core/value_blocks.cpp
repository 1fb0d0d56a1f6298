#include "core/value_blocks.h"

#include <type_traits>

#include "core/launch.h"
#include "core/rows.h"
#include "core/workspace.h"
#include "decode/decode.h"

namespace fastmax {
namespace {

template <class Pointer>
void move_columns(Pointer& x, const Problem& p, int columns) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
  if (x != nullptr) x = static_cast<Byte*>(x) + int64_t{columns} * tensor_element_bytes(p);
}

Stride contiguous_rows(int heads, int tokens, int columns) {
  return {int64_t{heads} * tokens * columns, int64_t{tokens} * columns, columns};
}

// Columns of a state, of which blocks have copies without the other columns.
struct StateColumns {
  int heads, rows;  // rows of each head
  int all, first, count;

  template <class State>
  StateColumns(const Problem& p, const State& state, int block)
      : heads(p.b * p.hk),
        rows(decode_rows(state.d, p.order)),
        all(state.dv),
        first(block * p.head_dim_v),
        count(std::min(p.head_dim_v, state.dv - first)) {}

  int64_t sums() const { return int64_t{heads} * rows; }
  int64_t values() const { return sums() * count; }
  void read(float* copy, const float* state, cudaStream_t stream) const { copy_columns(copy, count, state + first, all, stream); }
  void write(float* state, const float* copy, cudaStream_t stream) const { copy_columns(state + first, all, copy, count, stream); }

 private:
  void copy_columns(float* to, int to_columns, const float* from, int from_columns, cudaStream_t stream) const {
    launch_copy_rows({1, heads, rows, count, MathMode::kFP32, to, contiguous_rows(heads, rows, to_columns), from,
                      contiguous_rows(heads, rows, from_columns)},
                     stream);
  }
};

// The params of a block, but for memory of its own.
template <class Params>
Params params(const Params& p, int block) {
  Params x = p;
  const int first = block * p.head_dim_v;
  x.dv = std::min(p.head_dim_v, p.dv - first);
  move_columns(x.v, p, first), move_columns(x.noise, p, first), move_columns(x.o, p, first);
  if constexpr (std::is_same_v<Params, BwdParams>) {
    move_columns(x.grad_o, p, first), move_columns(x.grad_v, p, first);
    if (block > 0) x.grad_z = nullptr;
  }
  return x;
}

template <class Params>
size_t kernel_bytes(const Params& p, size_t (*workspace_bytes)(const Params&)) {
  size_t bytes = 0;
  for (int i = 0; i < value_blocks(p); ++i) bytes = std::max(bytes, workspace_bytes(params(p, i)));
  return bytes;
}

struct FwdMemory {
  void* kernels;
  float* local_lse = nullptr;  // [block - 1]: copies, since kernels merge global keys into it in place
  float *kv_state = nullptr, *new_kv_state = nullptr;

  FwdMemory(const Kernels& rows, const FwdParams& p, Workspace& w)
      : kernels(w.take<char>(static_cast<int64_t>(kernel_bytes(p, rows.fwd_workspace_bytes)))) {
    if (p.local_lse != nullptr) local_lse = w.take<float>((value_blocks(p) - 1) * int64_t{p.b} * p.h * p.n);
    if (!p.has_state()) return;
    const StateColumns columns(p, p.state, 0);
    kv_state = w.take<float>(columns.values()), new_kv_state = w.take<float>(columns.values());
  }
};

struct BwdMemory {
  void* kernels;
  char *grad_q = nullptr, *grad_k = nullptr;  // of a block but the first, contiguous
  float *grad_log_decay = nullptr, *grad_log_input_gate = nullptr;
  float *kv_state = nullptr, *new_kv_state = nullptr, *grad_new_kv_state = nullptr, *grad_kv_state = nullptr;
  float *grad_k_sum = nullptr, *zeros = nullptr;  // zeros: in place of grad_new_k_sum

  BwdMemory(const Kernels& rows, const BwdParams& p, Workspace& w)
      : kernels(w.take<char>(static_cast<int64_t>(kernel_bytes(p, rows.bwd_workspace_bytes)))) {
    if (!p.adds) {
      const int bytes = tensor_element_bytes(p);
      grad_q = w.take<char>(int64_t{p.b} * p.h * p.n * p.d * bytes), grad_k = w.take<char>(int64_t{p.b} * p.hk * p.m * p.d * bytes);
      if (p.grad_log_decay != nullptr) grad_log_decay = w.take<float>(int64_t{p.b} * p.hk * p.decay_tokens());
      if (p.grad_log_input_gate != nullptr) grad_log_input_gate = w.take<float>(int64_t{p.b} * p.hk * p.m);
    }
    if (!p.has_state()) return;
    const StateColumns columns(p, p.state, 0);
    for (float** copy : {&kv_state, &new_kv_state, &grad_new_kv_state, &grad_kv_state}) *copy = w.take<float>(columns.values());
    grad_k_sum = w.take<float>(columns.sums()), zeros = w.take<float>(columns.sums());
  }
};

// Adds contiguous rows.
void add(int b, int heads, int tokens, int columns, MathMode math, void* sum, const Stride& stride, const void* x, cudaStream_t stream) {
  launch_add_rows({b, heads, tokens, columns, math, sum, stride, x, contiguous_rows(heads, tokens, columns)}, stream);
}
void add_floats(float* sum, const float* x, int b, int heads, int count, cudaStream_t stream) {
  add(b, heads, count, /*columns=*/1, MathMode::kFP32, sum, contiguous_rows(heads, count, 1), x, stream);
}

// The bytes of all blocks. of_one: of a call with one.
template <class Memory, class Params>
size_t all_workspace_bytes(const Kernels& kernels, const Params& p, size_t (*of_one)(const Params&)) {
  if (value_blocks(p) == 1) return of_one(p);
  Workspace w(nullptr);
  const Memory memory(kernels, p, w);
  return w.used();
}

}  // namespace

size_t fwd_workspace_bytes(const Kernels& kernels, const FwdParams& p) {
  return all_workspace_bytes<FwdMemory>(kernels, p, kernels.fwd_workspace_bytes);
}
size_t bwd_workspace_bytes(const Kernels& kernels, const BwdParams& p) {
  return all_workspace_bytes<BwdMemory>(kernels, p, kernels.bwd_workspace_bytes);
}

void launch_fwd(const Kernels& kernels, const FwdParams& p, cudaStream_t stream) {
  if (value_blocks(p) == 1) return kernels.fwd(p, stream);
  Workspace w(p.workspace);
  FwdMemory memory(kernels, p, w);
  const int heads = p.b * p.h;
  const int64_t queries = int64_t{heads} * p.n;
  const Stride of_lse{heads * p.local_lse_head, p.local_lse_head, 1};
  for (int i = 1; p.local_lse != nullptr && i < value_blocks(p); ++i) {
    float* copy = memory.local_lse + (i - 1) * queries;
    launch_copy_rows({1, heads, p.n, /*columns=*/1, MathMode::kFP32, copy, contiguous_rows(heads, p.n, 1), p.local_lse, of_lse}, stream);
  }
  for (int i = 0; i < value_blocks(p); ++i) {
    FwdParams block = params(p, i);
    block.workspace = memory.kernels;
    if (p.local_lse != nullptr && i > 0) block.local_lse = memory.local_lse + (i - 1) * queries, block.local_lse_head = p.n;
    if (!p.has_state()) {
      kernels.fwd(block, stream);
      continue;
    }
    const StateColumns columns(p, p.state, i);
    columns.read(memory.kv_state, p.state.kv_state, stream);
    block.state.kv_state = memory.kv_state, block.state.new_kv_state = memory.new_kv_state, block.state.dv = columns.count;
    kernels.fwd(block, stream);
    columns.write(p.state.new_kv_state, memory.new_kv_state, stream);
  }
}

void launch_bwd(const Kernels& kernels, const BwdParams& p, cudaStream_t stream) {
  if (value_blocks(p) == 1) return kernels.bwd(p, stream);
  Workspace w(p.workspace);
  BwdMemory memory(kernels, p, w);
  for (int i = 0; i < value_blocks(p); ++i) {
    BwdParams block = params(p, i);
    block.workspace = memory.kernels;
    const bool is_added = i > 0 && !p.adds;
    if (is_added) {
      block.grad_q = memory.grad_q, block.grad_q_stride = contiguous_rows(p.h, p.n, p.d);
      block.grad_k = memory.grad_k, block.grad_k_stride = contiguous_rows(p.hk, p.m, p.d);
      block.grad_log_decay = memory.grad_log_decay, block.grad_log_input_gate = memory.grad_log_input_gate;
    }
    const StateColumns columns(p, p.state, i);  // meaningless without a state
    if (p.has_state()) {
      const CarriedGradients& state = p.state;
      columns.read(memory.kv_state, state.kv_state, stream);
      columns.read(memory.new_kv_state, state.new_kv_state, stream);
      columns.read(memory.grad_new_kv_state, state.grad_new_kv_state, stream);
      block.state.kv_state = memory.kv_state, block.state.new_kv_state = memory.new_kv_state;
      block.state.grad_new_kv_state = memory.grad_new_kv_state, block.state.grad_kv_state = memory.grad_kv_state;
      block.state.dv = columns.count;
      if (i == 1) check_cuda(cudaMemsetAsync(memory.zeros, 0, columns.sums() * sizeof(float), stream), "value_blocks");
      if (i > 0) block.state.grad_new_k_sum = memory.zeros, block.state.grad_k_sum = memory.grad_k_sum;
    }
    kernels.bwd(block, stream);
    if (p.has_state()) {
      columns.write(p.state.grad_kv_state, memory.grad_kv_state, stream);
      if (i > 0) add_floats(p.state.grad_k_sum, memory.grad_k_sum, p.b, p.hk, columns.rows, stream);
    }
    if (!is_added) continue;
    add(p.b, p.h, p.n, p.d, p.math, p.grad_q, p.grad_q_stride, memory.grad_q, stream);
    add(p.b, p.hk, p.m, p.d, p.math, p.grad_k, p.grad_k_stride, memory.grad_k, stream);
    if (p.grad_log_decay != nullptr) add_floats(p.grad_log_decay, memory.grad_log_decay, p.b, p.hk, p.decay_tokens(), stream);
    if (p.grad_log_input_gate != nullptr) add_floats(p.grad_log_input_gate, memory.grad_log_input_gate, p.b, p.hk, p.m, stream);
  }
}

}  // namespace fastmax
