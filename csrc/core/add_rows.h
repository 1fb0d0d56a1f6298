// Adds rows to other rows in place.
#pragma once

#include <cuda_runtime.h>

#include "core/params.h"

namespace fastmax {

struct AddRowsParams {
  int b, heads, tokens, columns;
  MathMode math;  // dtype of both; each sum is computed in fp32 and rounded once
  void* sum;      // (b, heads, tokens, columns)
  Stride sum_stride;
  const void* x;  // likewise, contiguous
};

// Rows of whole 16-byte words must begin at multiples of 16 bytes.
void launch_add_rows(const AddRowsParams& p, cudaStream_t stream);

}  // namespace fastmax
