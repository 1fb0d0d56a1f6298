// Sums of columns: the last step of the gradients of weights.

#include <stdexcept>

#include "core/launch.h"
#include "layer/walk.h"

namespace fastmax {
namespace {

constexpr int kColumns = 8;  // of a block: 32 bytes, a sector
constexpr int kRows = 64;    // that a block reads at once
constexpr int kThreads = kColumns * kRows;
constexpr int kMaxMatrices = 3;

struct Matrices {
  ColumnSums sums[kMaxMatrices];
  unsigned end[kMaxMatrices];  // block after the last one of each matrix
};

template <class Element>
__global__ void __launch_bounds__(kThreads) column_sums_kernel(const __grid_constant__ Matrices matrices) {
  __shared__ float sums[kRows][kColumns + 1];
  int which = 0;
  while (blockIdx.x >= matrices.end[which]) ++which;
  const ColumnSums& matrix = matrices.sums[which];
  const unsigned first = which == 0 ? 0 : matrices.end[which - 1];
  const int row = threadIdx.x / kColumns, own = threadIdx.x % kColumns;
  const int column = static_cast<int>(blockIdx.x - first) * kColumns + own;
  const bool exists = column < matrix.columns;
  float sum = 0.f;
  if (exists) {
#pragma unroll 4
    for (int64_t i = row; i < matrix.rows; i += kRows) sum += matrix.data[i * matrix.columns + column];
  }
  sums[row][own] = sum;
  for (int half = kRows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) sums[row][own] += sums[row + half][own];
  }
  if (row > 0 || !exists) return;  // the thread reads its own sum
  const int per_width = matrix.columns / matrix.width;
  const int64_t at = int64_t{column % per_width} * matrix.width + matrix.width - 1 - column / per_width;
  if (matrix.is_float) static_cast<float*>(matrix.out)[at] = sums[0][own];
  else static_cast<Element*>(matrix.out)[at] = from_float<Element>(sums[0][own]);
}

}  // namespace

void launch_column_sums(const ColumnSums* sums, int count, MathMode math, cudaStream_t stream) {
  Matrices matrices{};
  int used = 0;
  unsigned blocks = 0;
  for (int i = 0; i < count; ++i) {
    if (sums[i].out == nullptr) continue;
    if (used == kMaxMatrices) throw std::logic_error("fastmax: too many matrices for one launch");
    blocks += (sums[i].columns + kColumns - 1) / kColumns;
    matrices.sums[used] = sums[i], matrices.end[used++] = blocks;
  }
  if (blocks == 0) return;
  const auto launch = [&](auto kernel) { launch_kernel("column_sums", kernel, dim3(blocks), kThreads, 0, stream, matrices); };
  switch (math) {
    case MathMode::kBF16: return launch(column_sums_kernel<__nv_bfloat16>);
    case MathMode::kFP16: return launch(column_sums_kernel<__half>);
    default: return launch(column_sums_kernel<float>);
  }
}

}  // namespace fastmax
