// Rows that take no part as zeros, for kernels whose copy engine cannot leave out rows.

#include "core/launch.h"
#include "linear/order2/features.h"

namespace fastmax {
namespace {

// A row per 8 lanes, 16 bytes a load.
constexpr int kLanes = 8;

__global__ void __launch_bounds__(256) linear_zero_masked_kernel(const ZeroArgs a, const int64_t rows) {
  const int64_t row = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kLanes;
  if (row >= rows) return;
  const int head_index = static_cast<int>(row / a.tokens), token = static_cast<int>(row % a.tokens);
  const int batch = head_index / a.heads, head = head_index % a.heads;
  const bool taken = mask_pointer(a.mask, batch)[static_cast<int64_t>(token) * a.mask.token] != 0;
  const auto copy = [&](const View& from, void* to, int columns) {
    const auto* source = head_pointer<__nv_bfloat16>(from, batch, head) + token * from.token;
    auto* target = static_cast<__nv_bfloat16*>(to) + row * columns;
    for (int c = threadIdx.x % kLanes * 8; c < columns; c += kLanes * 8) {
      *reinterpret_cast<uint4*>(target + c) = taken ? *reinterpret_cast<const uint4*>(source + c) : uint4{};
    }
  };
  copy(a.k, a.zeroed_k, a.d);
  copy(a.v, a.zeroed_v, a.dv);
}

// A block per batch entry: each thread counts the rows of a piece, then those before it.
__global__ void __launch_bounds__(1024) linear_count_rows_kernel(const ZeroArgs a) {
  __shared__ int sums[1024];
  const uint8_t* mask = mask_pointer(a.mask, blockIdx.x);
  int32_t* counts = a.counts + static_cast<int64_t>(blockIdx.x) * a.tokens;
  const int piece = (a.tokens + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x);
  const int begin = min(static_cast<int>(threadIdx.x) * piece, a.tokens), end = min(begin + piece, a.tokens);
  int sum = 0;
  for (int i = begin; i < end; ++i) sum += mask[static_cast<int64_t>(i) * a.mask.token] != 0;
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int step = 1; step < static_cast<int>(blockDim.x); step *= 2) {
    const int before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
    __syncthreads();
  }
  int count = sums[threadIdx.x] - sum;
  for (int i = begin; i < end; ++i) counts[i] = count += mask[static_cast<int64_t>(i) * a.mask.token] != 0;
}

}  // namespace

void linear_zero_masked(const ZeroArgs& a, cudaStream_t stream) {
  const int64_t rows = int64_t{a.batch} * a.heads * a.tokens;
  constexpr int kThreads = 256, kRows = kThreads / kLanes;
  launch_kernel("linear_zero_masked", linear_zero_masked_kernel, grid_1d((rows + kRows - 1) / kRows), kThreads, 0, stream, a, rows);
  launch_kernel("linear_count_rows", linear_count_rows_kernel, grid_1d(a.batch), 1024, 0, stream, a);
}

}  // namespace fastmax
