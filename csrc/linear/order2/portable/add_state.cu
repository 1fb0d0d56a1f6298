// Adds a carried state to saved snapshots, with its decay until each chunk's beginning. Snapshots are rows of numbers here, so the kernel
// serves every format.
//
// shards: FASTMAX_MATH

#include <stdexcept>
#include <string>
#include <type_traits>

#include "linear/dispatch.h"
#include "linear/order2/features.h"

namespace fastmax {
namespace {

constexpr int kThreads = 256;
constexpr int kChunks = 32;  // of a thread, which reads what it adds once
constexpr int kAhead = 4;    // loads in flight

// 16 bytes of a snapshot.
template <class Math>
__device__ __forceinline__ uint4 added(const uint4& x, const uint4& y, const DecayFactor& left) {
  const auto add = [&](uint32_t x, uint32_t y) {
    if constexpr (kBf16State<Math>) {
      return ptx::pack_bf16x2(low_bf16(x) + left(low_bf16(y)), high_bf16(x) + left(high_bf16(y)));
    } else {
      return __float_as_uint(as_operand<Math>(__uint_as_float(x) + left(__uint_as_float(y))));
    }
  };
  return make_uint4(add(x.x, y.x), add(x.y, y.y), add(x.z, y.z), add(x.w, y.w));
}

// A thread has 16 bytes of the snapshots of up to kChunks chunks. pieces: of 16 bytes of a snapshot; chunks: from the first one on.
template <class Math, bool kHasDecay>
__global__ void __launch_bounds__(kThreads) linear_add_state_kernel(const AddArgs a, const uint4* state, uint4* snapshots, const int pieces,
                                                                    const int chunks) {
  const int blocks = (pieces + kThreads - 1) / kThreads, runs = (chunks + kChunks - 1) / kChunks;
  const int piece = static_cast<int>(blockIdx.x) % blocks * kThreads + static_cast<int>(threadIdx.x);
  if (piece >= pieces) return;
  const int first = static_cast<int>(blockIdx.x) / blocks % runs * kChunks, end = min(first + kChunks, chunks);
  const int64_t index = static_cast<int64_t>(blockIdx.x) / blocks / runs;
  const uint4 y = state[index * pieces + piece];
  uint4* x = snapshots + a.slot(index, 0) * pieces + piece;
  for (int c = first; c < end; c += kAhead) {
    uint4 before[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (c + i < end) before[i] = x[static_cast<int64_t>(c + i) * pieces];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (c + i >= end) break;
      const DecayFactor left = kHasDecay ? DecayFactor::of(a.decay.passing(a, index, 0, c + i)) : DecayFactor{0.f};
      x[static_cast<int64_t>(c + i) * pieces] = added<Math>(before[i], y, left);
    }
  }
}

// bytes: of a snapshot, a multiple of 16.
template <class Math>
void launch(const char* name, const AddArgs& a, const void* state, void* snapshots, int64_t bytes, cudaStream_t stream) {
  if (bytes % 16 != 0) throw std::logic_error(std::string("fastmax: ") + name + ": snapshots and sums are taken 16 bytes at a time");
  const int pieces = static_cast<int>(bytes / 16), chunks = (a.nx + a.chunk - 1) / a.chunk;
  const int64_t blocks = int64_t{a.states()} * ((pieces + kThreads - 1) / kThreads) * ((chunks + kChunks - 1) / kChunks);
  launch_kernel(name, a.decay ? linear_add_state_kernel<Math, true> : linear_add_state_kernel<Math, false>, grid_1d(blocks), kThreads, 0,
                stream, a, static_cast<const uint4*>(state), static_cast<uint4*>(snapshots), pieces, chunks);
}

}  // namespace

template <>
void linear_add_state<FASTMAX_MATH>(const AddArgs& a, cudaStream_t stream) {
  if constexpr (std::is_same_v<FASTMAX_MATH, Fp16>) {
    throw std::logic_error("fastmax: fp16 runs on the tf32 linear kernels");
  } else {
    if (a.state != nullptr) launch<FASTMAX_MATH>("linear_add_state", a, a.state, a.snapshots, a.snapshot_bytes, stream);
    launch<Fp32>("linear_add_sums", a, a.state_sums, a.sums, a.sum_floats * 4, stream);
  }
}

}  // namespace fastmax
