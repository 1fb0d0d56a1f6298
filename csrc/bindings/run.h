// Runs a call: selects the kernels, allocates their workspace and launches them.
#pragma once

#include <cstdio>

#include "bindings/debug.h"
#include "bindings/torch_abi.h"
#include "core/algorithm.h"
#include "core/value_blocks.h"
#include "decay/decay.h"

namespace fastmax {

inline void print_kernels(const char* operation, const Algorithm& algorithm, const Kernels& kernels, const AttentionParams& p) {
  constexpr const char* kModes[] = {"bf16", "fp16", "tf32", "fp32"};  // MathMode
  std::fprintf(stderr,
               "fastmax::%s: %s, %s: b %d, h %d, hk %d, n %d, m %d, d %d, dv %d, head_dim_qk %d, head_dim_v %d, %s, order %d"
               "%s%s%s%s%s%s%s%s, sm_%d\n",
               operation, algorithm.name, kernels.name, p.b, p.h, p.hk, p.n, p.m, p.d, p.dv, p.head_dim_qk, p.head_dim_v,
               kModes[static_cast<int>(p.math)], p.order, value_blocks(p) > 1 ? ", value blocks" : "", p.causal ? ", causal" : "",
               p.window ? ", window" : "",
               p.k_start.data != nullptr || p.k_end.data != nullptr ? ", bounds of keys" : "",
               p.log_decay != nullptr ? ", decay" : "", p.log_input_gate != nullptr ? ", gate" : "",
               p.attention_mask != nullptr ? ", mask" : "", p.noise != nullptr ? ", noise" : "", p.sm_arch);
}

// operation: the operator's name.
template <class Params>
void run(const char* operation, const Algorithm& algorithm, Direction direction,
         size_t (*workspace_bytes)(const Kernels&, const Params&), void (*launch)(const Kernels&, const Params&, cudaStream_t), Params p,
         int device_index) {
  if (may_have_blocks(p)) fit_head_dim(p, algorithm, direction, p.has_state());
  const Kernels& kernels = select(algorithm, p, direction);
  if (is_debugging()) print_kernels(operation, algorithm, kernels, p);
  std::optional<Tensor> workspace;
  if (const size_t bytes = workspace_bytes(kernels, p); bytes > 0) {
    workspace = allocate_workspace(bytes, device_index);
    p.workspace = workspace->data_ptr();
  }
  launch(kernels, p, current_stream(device_index));
}

inline void run(const char* operation, const Algorithm& algorithm, const FwdParams& p, int device_index) {
  run(operation, algorithm, Direction::kForward, fwd_workspace_bytes, launch_fwd, p, device_index);
  if (p.has_decay()) launch_nan_rows(p, current_stream(device_index));
}
inline void run(const char* operation, const Algorithm& algorithm, const BwdParams& p, int device_index) {
  run(operation, algorithm, Direction::kBackward, bwd_workspace_bytes, launch_bwd, p, device_index);
}

}  // namespace fastmax
