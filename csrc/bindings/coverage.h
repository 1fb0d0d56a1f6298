// Coverage: the calls that have kernels. fastmax/ops/ sends no other calls to the library; direct calls of torch.ops.fastmax_cuda
// get an error.
#pragma once

#include <algorithm>
#include <climits>

#include "bindings/checks.h"
#include "bindings/torch_abi.h"
#include "core/device.h"
#include "core/dispatch.h"
#include "core/params.h"

namespace fastmax {

// Checks that the library has code for the device of x.
inline void check_device_has_kernels(const Tensor& x) {
  const std::string& problem = get_device(x.get_device_index()).problem;
  FASTMAX_CHECK(problem.empty(), problem);
}

// Checks that kernels exist for the dtype of x, and that the library has code for its device.
inline void check_kernels_run_on(const char* name, const Tensor& x) {
  const ScalarType dtype = x.scalar_type();
  FASTMAX_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half || dtype == ScalarType::Float, name,
                " must be bfloat16, float16 or float32 for the CUDA kernels");
  check_device_has_kernels(x);
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

// Checks that attention kernels exist for the inputs of a call.
inline void check_kernels_cover(const AttentionInputs& x) {
  check_kernels_run_on("q", x.q);
  FASTMAX_CHECK(head_dim_of(x.q, x.v) != 0, "q and v must have a head_dim up to", NativeHeadDims::list(), ", got ", x.q.size(3), " and ",
                x.v.size(3));
}

}  // namespace fastmax
