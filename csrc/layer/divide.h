// How a call is divided among warps, and the sums over warps that follow a backward.
#pragma once

#include "layer/layer.h"

namespace fastmax {

// Sets lanes and units of the groups, and the strips. elements: columns of a lane. overhead: the cost of a strip beside its
// tokens, in tokens.
void divide(HeadGroup* groups, int count, Strips& strips, int b, int n, int elements, int warps_of_device, int overhead);

// The gradient of a weight: sums of the columns of a float32 matrix.
struct ColumnSums {
  const float* data;  // (rows, columns)
  int64_t rows;
  int columns;
  int width;  // column j is element j % (columns / width) * width + width - 1 - j / (columns / width) of the result
  void* out;
  bool is_float;  // out is float32; otherwise it has the dtype of the tokens
};

// Sums columns in an order that depends on the sizes alone. Matrices without a result are left out.
void launch_column_sums(const ColumnSums* sums, int count, MathMode math, cudaStream_t stream);

}  // namespace fastmax
