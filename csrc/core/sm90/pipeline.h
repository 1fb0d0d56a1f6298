// A ring of stages in shared memory, filled by the copy engine and read by warps: per stage a barrier that says it is full, and one
// that says all readers are done with it.
//
//   producer (one thread)                          reader (every thread)
//   for (RingPosition at; ...; at.advance<S>())    for (RingPosition at; ...; at.advance<S>())
//     ring.wait_until_empty(at)                      ring.wait_until_full(at)
//     ring.expect(at, bytes)                         ... read ...
//     copies, at barrier ring.full(at)               ring.release(at, lane): once per warp, after its last read
//
// Both walk over the same stages in the same order. Readers that read by wgmma release after they waited for it.
// Those that read by ordinary loads or ldmatrix release behind ptx::fence_proxy_async(), or behind a wgmma that takes what they read in
// registers and is waited for: a load whose result nothing waits for may still be on its way when the copy engine fills the stage again.
// The assembler moves what uses it behind the release as it likes, mma too. The emulator (tests/emulator) refuses other releases.
//
// A warp's wait for a wgmma says nothing of the other warps of the warpgroup, which read the same operands: between it and ordinary
// stores over an operand is a barrier.
#pragma once

#include <cstdint>

#include "core/sm90/ptx.h"

namespace fastmax {

struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;  // of the phase in which the stage is full

  // Of the i-th stage that is filled.
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

  uint32_t barriers;  // address of kBarrierBytes, a multiple of 8

  explicit __device__ __forceinline__ Ring(uint32_t barriers) : barriers(barriers) {}

  // By one thread, before the block's barrier; then ptx::fence_mbarrier_init(). writers: that arrive where warps fill the stages.
  __device__ __forceinline__ void init(int reader_warps, int writers = 1) const {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(barriers + 16 * i, writers);
      ptx::mbarrier_init(barriers + 16 * i + 8, reader_warps);
    }
  }

  __device__ __forceinline__ uint32_t full(RingPosition at) const { return barriers + 16 * at.stage; }
  __device__ __forceinline__ uint32_t empty(RingPosition at) const { return barriers + 16 * at.stage + 8; }

  // At once in the first round, before anything was filled.
  __device__ __forceinline__ void wait_until_empty(RingPosition at) const { ptx::mbarrier_wait(empty(at), at.parity ^ 1); }
  __device__ __forceinline__ void expect(RingPosition at, uint32_t bytes) const { ptx::mbarrier_arrive_expect(full(at), bytes); }
  __device__ __forceinline__ void wait_until_full(RingPosition at) const { ptx::mbarrier_wait(full(at), at.parity); }
  // Asked before the stage is needed; where it is not, wait_until_full follows.
  __device__ __forceinline__ bool is_full(RingPosition at) const { return ptx::mbarrier_try_wait(full(at), at.parity); }

  // A writer's warp, in place of `expect`, after its writes.
  __device__ __forceinline__ void publish(RingPosition at, int lane) const {
    __syncwarp();
    ptx::mbarrier_arrive_if(full(at), lane == 0);
  }

  // Without a branch (ptx.h). condition: the same in all lanes.
  __device__ __forceinline__ void release(RingPosition at, int lane, bool condition = true) const {
    __syncwarp();
    ptx::mbarrier_arrive_if(empty(at), lane == 0 && condition);
  }
};

}  // namespace fastmax
