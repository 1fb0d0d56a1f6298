// Softmax of rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/params.h"

namespace fastmax {

// Elements of a row are counted in int, rounded up to whole chunks of the kernel.
inline constexpr int64_t kMaxSoftmaxWidth = int64_t{1} << 30;

struct SoftmaxParams {
  int64_t rows;  // > 0
  int width;     // 1 to kMaxSoftmaxWidth
  MathMode math; // of x and y; the arithmetic is fp32
  bool online;   // whether maximum and sum take one pass over the row, else two
  int sm_count;

  const void* x;       // (rows, width), unit stride in a row, any alignment
  int64_t row_stride;  // of x, in elements
  void* y;             // (rows, width) contiguous
};

void launch_softmax(const SoftmaxParams& p, cudaStream_t stream);

}  // namespace fastmax
