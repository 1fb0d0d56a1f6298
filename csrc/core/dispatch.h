// The one table of what is compiled: rows of (compute capability, head dim), each for every arithmetic mode. Dispatch, error texts
// and what `python -m fastmax.info` prints come from it. A newer architecture's kernels are more rows.
#pragma once

#include <climits>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/params.h"

// ROW(arch, head_dim): kernels for compute capability arch / 10 and up, for every arithmetic mode.
#define FASTMAX_HEAD_DIMS(ROW) ROW(80, 32) ROW(80, 64) ROW(80, 96) ROW(80, 128) ROW(80, 256)

namespace fastmax {

inline constexpr int kMinArch = 80;

// " 32 64 ..."
inline std::string head_dims() {
  std::string dims;
#define FASTMAX_APPEND(arch, head_dim) dims += " " #head_dim;
  FASTMAX_HEAD_DIMS(FASTMAX_APPEND)
#undef FASTMAX_APPEND
  return dims;
}

// The smallest compiled head dim that holds d columns, or 0.
inline int native_head_dim(int d) {
#define FASTMAX_FITS(arch, head_dim) \
  if (d <= head_dim) return head_dim;
  FASTMAX_HEAD_DIMS(FASTMAX_FITS)
#undef FASTMAX_FITS
  return 0;
}

// Calls Launch::run<Math, head_dim>(args...) for p.head_dim.
template <class Launch, class Math, class... Args>
void dispatch_head_dim(const Problem& p, Args&&... args) {
  switch (p.head_dim) {
#define FASTMAX_CASE(arch, head_dim) \
  case head_dim:                     \
    return Launch::template run<Math, head_dim>(std::forward<Args>(args)...);
    FASTMAX_HEAD_DIMS(FASTMAX_CASE)
#undef FASTMAX_CASE
    default:
      throw std::runtime_error("fastmax: no kernel for head_dim " + std::to_string(p.head_dim) + "; compiled:" + head_dims());
  }
}

// Calls Function<Math>(args...) for p.math. Function is one of the templates of launch.h.
#define FASTMAX_DISPATCH_MATH(p, function, ...)                                    \
  do {                                                                             \
    switch ((p).math) {                                                            \
      case ::fastmax::MathMode::kBF16: function<::fastmax::Bf16>(__VA_ARGS__); break; \
      case ::fastmax::MathMode::kFP16: function<::fastmax::Fp16>(__VA_ARGS__); break; \
      case ::fastmax::MathMode::kTF32: function<::fastmax::Tf32>(__VA_ARGS__); break; \
      case ::fastmax::MathMode::kFP32: function<::fastmax::Fp32>(__VA_ARGS__); break; \
    }                                                                              \
  } while (0)

// blocks as a one-dimensional grid: the x dimension alone has no 65535 limit.
inline unsigned grid_1d(int64_t blocks) {
  if (blocks > INT_MAX) throw std::runtime_error("fastmax: too many blocks for one launch: " + std::to_string(blocks));
  return static_cast<unsigned>(blocks);
}

}  // namespace fastmax
