// Head dims of the linear kernels: 16 runs as 32 with zero-filled columns.
#pragma once

#include <stdexcept>
#include <type_traits>

#include "core/device.h"
#include "core/dispatch.h"
#include "core/launch.h"
#include "linear/linear.h"

namespace fastmax {

using LinearHeadDims = HeadDims<32, 64, 96, 128, 256>;
using Linear1HeadDims = HeadDims<32, 64, 96, kLinear1HeadDim>;

inline int linear_head_dim(int head_dim) { return LinearHeadDims::at_least(head_dim); }

// Calls Launch::run<Math, head_dim>(args...). fp16 has no kernels of its own: it is widened to fp32 and runs as tf32.
template <class Launch, class Math, class Dims = LinearHeadDims, class... Args>
void dispatch_linear(int head_dim, const Args&... args) {
  if constexpr (std::is_same_v<Math, Fp16>) {
    throw std::logic_error("fastmax: fp16 runs on the tf32 linear kernels");
  } else {
    dispatch_head_dim(Dims(), head_dim, [&](auto dim) { Launch::template run<Math, dim>(args...); });
  }
}

}  // namespace fastmax
