// Coverage: the calls that have kernels. The PyTorch implementation computes all others.
#pragma once

#include <algorithm>
#include <climits>

#include "bindings/checks.h"
#include "bindings/torch_abi.h"
#include "core/device.h"
#include "core/dispatch.h"
#include "core/params.h"
#include "linear/algorithm.h"

namespace fastmax {

// Whether kernels exist for the dtype of q, and the library has code for its device.
inline bool kernels_run_on(const Tensor& q) {
  const ScalarType dtype = q.scalar_type();
  return (dtype == ScalarType::BFloat16 || dtype == ScalarType::Half || dtype == ScalarType::Float) &&
         get_device(q.get_device_index()).problem.empty();
}

inline MathMode math_mode(ScalarType dtype, bool allow_tf32) {
  switch (dtype) {
    case ScalarType::BFloat16: return MathMode::kBF16;
    case ScalarType::Half: return MathMode::kFP16;
    default: return allow_tf32 ? MathMode::kTF32 : MathMode::kFP32;
  }
}

// The native head dim that holds the columns of q and v, as the kernels have one for both; 0 if none does.
inline int head_dim_of(const Tensor& q, const Tensor& v) {
  const int64_t widest = std::max(q.size(3), v.size(3));
  return widest > INT_MAX ? 0 : NativeHeadDims::at_least(static_cast<int>(widest));
}

// Whether the algorithm has kernels for a call.
inline bool has_attention_kernels(const AttentionInputs& x, const Algorithm& algorithm, bool causal) {
  const bool has_bounds = x.k_start.has_value() || x.k_end.has_value();
  return kernels_run_on(x.q) && head_dim_of(x.q, x.v) != 0 && !x.rpe_matrix.has_value() &&
         (causal || !has_bounds || &algorithm != &kLinearAlgorithm);
}

}  // namespace fastmax
