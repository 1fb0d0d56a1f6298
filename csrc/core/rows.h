// Copies of rows, and sums of rows in place.
#pragma once

#include <cuda_runtime.h>

#include "core/params.h"

namespace fastmax {

struct RowsParams {
  int b, heads, tokens, columns;
  MathMode math;  // dtype of both tensors
  void* to;       // (b, heads, tokens, columns)
  Stride to_stride;
  const void* from;
  Stride from_stride;
};

void launch_copy_rows(const RowsParams& p, cudaStream_t stream);
// to += from. Each sum is computed in fp32 and rounded once.
void launch_add_rows(const RowsParams& p, cudaStream_t stream);

}  // namespace fastmax
