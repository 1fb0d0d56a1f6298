// Head dims of the linear kernels: 16 runs as 32 with zero-filled columns.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "core/dispatch.h"
#include "core/dtype.h"
#include "linear/linear.h"

namespace fastmax {

inline int linear_head_dim(int head_dim) { return head_dim < 32 ? 32 : head_dim; }

// Shared memory that a block may use.
inline int shared_limit(int sm_arch) {
  const int kilobytes = sm_arch == 80 ? 163 : sm_arch >= 90 && sm_arch < 120 ? 227 : 99;
  return kilobytes * 1024;
}

// Calls Launch::run<Math, head_dim>(args...), for head dims up to kWidest. fp16 has no kernels of its own: it is widened to fp32 and runs as tf32.
template <class Launch, class Math, int kWidest = 256, class... Args>
void dispatch_linear(int head_dim, const Args&... args) {
  if constexpr (std::is_same_v<Math, Fp16>) {
    throw std::logic_error("fastmax: fp16 runs on the tf32 linear kernels");
  } else {
    switch (linear_head_dim(head_dim)) {
      case 32: return Launch::template run<Math, 32>(args...);
      case 64: return Launch::template run<Math, 64>(args...);
      case 96: return Launch::template run<Math, 96>(args...);
      case 128: return Launch::template run<Math, 128>(args...);
      case 256:
        if constexpr (kWidest >= 256) return Launch::template run<Math, 256>(args...);
        [[fallthrough]];
      default: throw std::runtime_error("fastmax: no linear kernel for head_dim " + std::to_string(head_dim));
    }
  }
}

}  // namespace fastmax
