#include "core/dtype.h"
#include "core/lanes.h"
#include "core/launch.h"
#include "decay/decay.h"

namespace fastmax {
namespace {

// The last reset up to each token of a head, in tiles: one launch computes the last reset of each tile, another continues from
// them.
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kPerThread = 8;
constexpr int kTile = kThreads * kPerThread;
constexpr int kNone = -1;

int tiles_of(const FiniteDecayParams& p) { return (p.m + kTile - 1) / kTile; }

struct DecayTile {
  float log_decay[kPerThread];
  int last;  // last reset among this thread's tokens
};

template <class Element>
__device__ __forceinline__ DecayTile load_tile(const FiniteDecayParams& p, int head, int begin) {
  const Stride& s = p.log_decay_stride;
  const Element* log_decay = static_cast<const Element*>(p.log_decay) + head / p.hk * s.batch + head % p.hk * s.head;
  DecayTile tile{{}, kNone};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int token = begin + i;
    const float x = token < p.m ? to_float(log_decay[token * s.token]) : 0.f;
    tile.log_decay[i] = x > 0.f ? 0.f : x;
    if (tile.log_decay[i] == -INFINITY) tile.last = token;
  }
  return tile;
}

// Returns the largest x of all threads before this one; largest: the largest of the block.
__device__ __forceinline__ int block_max_before(int x, int& largest) {
  __shared__ int warps[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  x = scan_lanes(x, [](int a, int b) { return max(a, b); });
  __syncthreads();  // the previous call may still read `warps`
  if (lane == 31) warps[warp] = x;
  __syncthreads();
  const int before = __shfl_up_sync(0xffffffffu, x, 1);
  int result = lane == 0 ? kNone : before;
  largest = kNone;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) result = max(result, warps[i]);
    largest = max(largest, warps[i]);
  }
  return result;
}

// lasts: (heads, tiles)
template <class Element>
__global__ void __launch_bounds__(kThreads) last_reset_kernel(const FiniteDecayParams p, int* __restrict__ lasts, const int tiles) {
  const int head = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  int last;
  block_max_before(load_tile<Element>(p, head, tile * kTile + static_cast<int>(threadIdx.x) * kPerThread).last, last);
  if (threadIdx.x == 0) lasts[blockIdx.x] = last;
}

template <class Element>
__global__ void __launch_bounds__(kThreads) finite_decay_kernel(const FiniteDecayParams p, const int* __restrict__ lasts, const int tiles) {
  const int head = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int begin = tile * kTile + static_cast<int>(threadIdx.x) * kPerThread;
  int last = kNone, ignored;
  for (int i = threadIdx.x; i < tile; i += kThreads) last = max(last, lasts[static_cast<int64_t>(head) * tiles + i]);
  block_max_before(last, last);
  const DecayTile x = load_tile<Element>(p, head, begin);
  last = max(last, block_max_before(x.last, ignored));
  const int none = p.continues ? -1 : 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int token = begin + i;
    if (token >= p.m) break;
    const bool resets = x.log_decay[i] == -INFINITY;
    if (resets) last = token;
    const int64_t at = static_cast<int64_t>(head) * p.m + token;
    p.finite[at] = resets ? 0.f : x.log_decay[i];
    p.k_start[at] = last == kNone ? none : last;
  }
}

template <class Element>
void launch(const FiniteDecayParams& p, int* lasts, cudaStream_t stream) {
  const int tiles = tiles_of(p);
  const unsigned grid = grid_1d(int64_t{p.b} * p.hk * tiles);
  if (tiles > 1) launch_kernel("last_reset", last_reset_kernel<Element>, grid, kThreads, 0, stream, p, lasts, tiles);
  launch_kernel("finite_decay", finite_decay_kernel<Element>, grid, kThreads, 0, stream, p, lasts, tiles);
}

}  // namespace

size_t finite_decay_workspace_bytes(const FiniteDecayParams& p) {
  return static_cast<size_t>(p.b) * p.hk * tiles_of(p) * sizeof(int);
}

void launch_finite_decay(const FiniteDecayParams& p, void* workspace, cudaStream_t stream) {
  int* lasts = static_cast<int*>(workspace);
  switch (p.dtype) {
    case MathMode::kBF16: return launch<__nv_bfloat16>(p, lasts, stream);
    case MathMode::kFP16: return launch<__half>(p, lasts, stream);
    default: return launch<float>(p, lasts, stream);
  }
}

}  // namespace fastmax
