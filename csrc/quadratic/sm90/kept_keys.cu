#include "quadratic/sm90/kept_keys.h"

#include "core/launch.h"

namespace fastmax {
namespace {

constexpr int kThreads = 1024;

int blocks_of(const AttentionParams& p) { return (p.m + KeptWords::kKeysPerBlock - 1) / KeptWords::kKeysPerBlock; }

size_t word_bytes(const AttentionParams& p) { return static_cast<size_t>(p.b) * blocks_of(p) * sizeof(uint4); }

// One block per batch entry; each warp makes one word per step.
__global__ void __launch_bounds__(kThreads) kept_words_kernel(const uint8_t* mask, int64_t batch_stride, int m, int words_per_batch,
                                                              uint32_t* words, Range* ranges) {
  __shared__ int range[2];
  if (threadIdx.x == 0) range[0] = m, range[1] = 0;
  __syncthreads();
  const uint8_t* of_batch = mask + blockIdx.x * batch_stride;
  const int lane = lane_index();
  Range kept{m, 0};
#pragma unroll 4
  for (int word = threadIdx.x / kWarpSize; word < words_per_batch; word += kThreads / kWarpSize) {
    const int key = word * 32 + lane;
    const bool keeps = key < m && of_batch[key] != 0;
    if (keeps) kept = {min(kept.begin, key), key + 1};
    const uint32_t bits = __ballot_sync(0xffffffffu, keeps);
    if (lane == 0) words[static_cast<int64_t>(blockIdx.x) * words_per_batch + word] = bits;
  }
  kept = {__reduce_min_sync(0xffffffffu, kept.begin), __reduce_max_sync(0xffffffffu, kept.end)};
  if (lane == 0) atomicMin(range, kept.begin), atomicMax(range + 1, kept.end);
  __syncthreads();
  if (threadIdx.x == 0) ranges[blockIdx.x] = {range[0], range[1]};
}

}  // namespace

size_t kept_words_bytes(const AttentionParams& p) {
  return p.attention_mask == nullptr ? 0 : (word_bytes(p) + p.b * sizeof(Range) + 255) / 256 * 256;
}

KeptWords fill_kept_words(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  if (p.attention_mask == nullptr) return {nullptr, nullptr, 0};
  uint32_t* words = static_cast<uint32_t*>(workspace);
  Range* ranges = reinterpret_cast<Range*>(static_cast<char*>(workspace) + word_bytes(p));
  launch_kernel("kept_words", kept_words_kernel, grid_1d(p.b), kThreads, 0, stream, p.attention_mask, p.mask_batch_stride, p.m,
                blocks_of(p) * (KeptWords::kKeysPerBlock / 32), words, ranges);
  return {reinterpret_cast<const uint4*>(words), ranges, blocks_of(p)};
}

}  // namespace fastmax
