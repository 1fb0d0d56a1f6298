// What kernels take whose copy engine moves whole tiles: rows that take no part as zeros, and how rows fade.

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

// A thread per virtual row of y.
__global__ void __launch_bounds__(256) linear_fade_pairs_kernel(const FadePairsArgs a, const int rows) {
  const int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t state = index / rows;
  if (state >= a.states()) return;
  const int row = static_cast<int>(index % rows), y_row = a.y_row(row);
  const int token = a.time == Time::kForward ? y_row : a.ny - 1 - y_row;
  const uint8_t* mask = mask_pointer(a.mask, static_cast<int>(state) / a.state_heads);
  const bool taken = y_row >= 0 && y_row < a.ny && (mask == nullptr || mask[static_cast<int64_t>(token) * a.mask.token] != 0);
  const WalkSum own = WalkSum::of(a, a.fading.at_row(a, state, y_row));
  const WalkSum end = WalkSum::of(a, a.fading.at_row(a, state, a.y_row(row / kFadingTile * kFadingTile + kFadingTile - 1)));
  a.y_sums[state * a.fading.y_rows + token] = taken ? own.g : make_float2(INFINITY, 0.f);
  a.y_factors[state * a.fading.y_rows + token] = taken ? exp2f(end.since(own)) : 0.f;
}

}  // namespace

void linear_fade_pairs(const FadePairsArgs& a, cudaStream_t stream) {
  const int rows = a.groups() * kBoundary;
  constexpr int kThreads = 256;
  launch_kernel("linear_fade_pairs", linear_fade_pairs_kernel, grid_1d((int64_t{a.states()} * rows + kThreads - 1) / kThreads), kThreads, 0,
                stream, a, rows);
}

void linear_zero_masked(const ZeroArgs& a, cudaStream_t stream) {
  const int64_t rows = int64_t{a.batch} * a.heads * a.tokens;
  constexpr int kThreads = 256, kRows = kThreads / kLanes;
  launch_kernel("linear_zero_masked", linear_zero_masked_kernel, grid_1d((rows + kRows - 1) / kRows), kThreads, 0, stream, a, rows);
  launch_kernel("linear_count_rows", linear_count_rows_kernel, grid_1d(a.batch), 1024, 0, stream, a);
}

}  // namespace fastmax
