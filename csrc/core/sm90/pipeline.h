// A ring of stages in shared memory, filled by the copy engine and read by warps. Each stage has two barriers: one signals that
// the stage is full, the other that all readers have finished with it.
//
//   producer (one thread)                          reader (every thread)
//   for (RingPosition at; ...; at.advance<S>())    for (RingPosition at; ...; at.advance<S>())
//     ring.wait_until_empty(at)                      ring.wait_until_full(at)
//     ring.expect(at, bytes)                         ... read ...
//     copies, at barrier ring.full(at)               ring.release(at, lane): once per warp, after its last read
//
// Both sides process the same stages in the same order. Readers that read by wgmma release a stage after they have waited for
// the product. Readers that use ordinary loads or ldmatrix must release after ptx::fence_proxy_async(), or after a completed
// wgmma that takes the loaded values from registers. Otherwise a load whose result nothing has waited for may still be in
// flight when the copy engine refills the stage: the assembler is free to move uses of the values, mma included, behind the
// release. The emulator (tests/emulator) refuses other releases.
//
// A warp's wait for a wgmma does not cover the other warps of the warpgroup, which read the same operands. Ordinary stores over
// an operand therefore need a barrier after the wait.
#pragma once

#include <cstdint>

#include "core/sm90/ptx.h"

namespace fastmax {

struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;  // parity of the phase in which the stage is full

  // Position of the i-th stage that is filled.
  template <int kStages>
  static __device__ __forceinline__ RingPosition of(int i) {
    return {i % kStages, static_cast<uint32_t>(i / kStages % 2)};
  }

  template <int kStages>
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <int kStages_>
struct Ring {
  static constexpr int kStages = kStages_;
  static constexpr int kBarrierBytes = 16 * kStages;

  uint32_t barriers;  // shared-memory address of kBarrierBytes, a multiple of 8

  explicit __device__ __forceinline__ Ring(uint32_t barriers) : barriers(barriers) {}

  // Called by one thread before the block's barrier, followed by ptx::fence_mbarrier_init(). writers: warps that fill a stage,
  // if warps do.
  __device__ __forceinline__ void init(int reader_warps, int writers = 1) const {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(barriers + 16 * i, writers);
      ptx::mbarrier_init(barriers + 16 * i + 8, reader_warps);
    }
  }

  __device__ __forceinline__ uint32_t full(RingPosition at) const { return barriers + 16 * at.stage; }
  __device__ __forceinline__ uint32_t empty(RingPosition at) const { return barriers + 16 * at.stage + 8; }

  // Returns at once in the first round, before anything was filled.
  __device__ __forceinline__ void wait_until_empty(RingPosition at) const { ptx::mbarrier_wait(empty(at), at.parity ^ 1); }
  __device__ __forceinline__ void expect(RingPosition at, uint32_t bytes) const { ptx::mbarrier_arrive_expect(full(at), bytes); }
  __device__ __forceinline__ void wait_until_full(RingPosition at) const { ptx::mbarrier_wait(full(at), at.parity); }
  // Whether the stage is full. An early query; if it returns false, wait_until_full must follow.
  __device__ __forceinline__ bool is_full(RingPosition at) const { return ptx::mbarrier_try_wait(full(at), at.parity); }

  // Arrives for a writer's warp after its writes, in place of `expect`.
  __device__ __forceinline__ void publish(RingPosition at, int lane) const {
    __syncwarp();
    ptx::mbarrier_arrive_if(full(at), lane == 0);
  }

  // Arrives without a branch (ptx.h). condition: the same in all lanes.
  __device__ __forceinline__ void release(RingPosition at, int lane, bool condition = true) const {
    __syncwarp();
    ptx::mbarrier_arrive_if(empty(at), lane == 0 && condition);
  }
};

}  // namespace fastmax
