// Hopper's additions to core/ptx.h: one PTX instruction per function. In brackets: the instruction's title in the PTX ISA
// manual. wgmma is in wgmma.h. Addresses of shared memory are 32-bit (ptx::smem_address); a barrier takes 8 bytes.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fastmax::ptx {

// [mbarrier.init] A phase ends when `arrivals` threads have arrived and all expected bytes have been written.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// [fence] Makes initialised barriers visible to the copy engine and to other blocks of a cluster.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// [mbarrier.arrive] Predicated: a branch between wgmmas would make the compiler serialise them (C7513).
__device__ __forceinline__ void mbarrier_arrive_if(uint32_t barrier, bool condition) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(barrier),
               "r"(static_cast<uint32_t>(condition))
               : "memory");
}

// [mbarrier.arrive] Arrives, and makes the phase wait for `bytes` more bytes.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// [mbarrier.arrive] Arrives in place of `arrivals` threads.
__device__ __forceinline__ void mbarrier_arrive_many(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// [griddepcontrol.wait] Waits until the previous kernels in the stream have ended and their writes are visible (launch.h).
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// [mbarrier.try_wait] Returns whether the phase of this parity has ended, after a wait whose limit the hardware chooses. Not
// `.acquire.cluster`, which invalidates L1 at every wait.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

// Waits until the phase of this parity has ended. In a build with FASTMAX_TRAP_DEADLOCKS (build.py --trap-deadlocks) a kernel
// that would hang ends in an error after seconds, by a store to address 0; a trap would make the compiler serialise wgmma
// (C7512).
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#ifdef FASTMAX_TRAP_DEADLOCKS
  for (uint32_t tries = 0; !mbarrier_try_wait(barrier, parity); ++tries) {
    asm volatile("{.reg .pred p; setp.gt.u32 p, %0, 0x400000; @p st.global.u32 [%1], 0;}" ::"r"(tries), "l"(uint64_t{0}) : "memory");
  }
#else
  while (!mbarrier_try_wait(barrier, parity)) {
  }
#endif
}

// [cp.async.bulk.tensor] Copies a box of a tensor {column, token, head, batch} to shared memory. Elements outside the tensor
// arrive as zeros and count as bytes.
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap& map, uint32_t barrier, int column, int token, int head,
                                         int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
      "l"(&map), "r"(barrier), "r"(column), "r"(token), "r"(head), "r"(batch)
      : "memory");
}

// [cp.async.bulk.tensor] Copies a box from shared memory to a tensor, except elements beyond its ends. Coordinates must not be
// negative. Joins this thread's bulk group.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, uint32_t src, int column, int token, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map), "r"(src),
               "r"(column), "r"(token), "r"(head), "r"(batch)
               : "memory");
}

// [cp.reduce.async.bulk.tensor] Like tma_store, but adds to the tensor; each sum is rounded once to the tensor's type.
__device__ __forceinline__ void tma_add(const CUtensorMap& map, uint32_t src, int column, int token, int head, int batch) {
  asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map), "r"(src),
               "r"(column), "r"(token), "r"(head), "r"(batch)
               : "memory");
}

// [cp.async.bulk] Copies contiguous bytes to shared memory. Size and addresses are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src),
               "r"(bytes), "r"(barrier)
               : "memory");
}

// [cp.async.bulk.prefetch] Copies contiguous bytes to the L2 cache for later loads.
__device__ __forceinline__ void bulk_prefetch(const void* src, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

// [cp.async.bulk] Copies contiguous bytes from shared memory to global memory. Joins this thread's bulk group.
__device__ __forceinline__ void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}

// [cp.reduce.async.bulk] Adds floats of shared memory to floats of global memory. Joins this thread's bulk group.
__device__ __forceinline__ void bulk_add_f32(float* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}

// [cp.async.bulk.commit_group]
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// [cp.async.bulk.wait_group] Waits until at most kPending of this thread's newest groups are unfinished. With .read: until
// their shared memory has been read and may be overwritten.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// [fence.proxy] Orders this thread's ordinary writes of shared memory before reads by the copy engine or wgmma. Every thread
// that wrote calls it before the barrier that announces the writes.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// [fence.proxy] The same for global memory, in both directions.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// [ld], [st] A word by which blocks signal progress to each other.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
// Waits until the word has this value; FASTMAX_TRAP_DEADLOCKS as in mbarrier_wait.
__device__ __forceinline__ void wait_acquire(const uint32_t* p, uint32_t value) {
#ifdef FASTMAX_TRAP_DEADLOCKS
  for (uint32_t tries = 0; load_acquire(p) != value; ++tries) {
    asm volatile("{.reg .pred p; setp.gt.u32 p, %0, 0x4000000; @p st.global.u32 [%1], 0;}" ::"r"(tries), "l"(uint64_t{0}) : "memory");
  }
#else
  while (load_acquire(p) != value) {
  }
#endif
}
__device__ __forceinline__ void store_release(uint32_t* p, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// [bar] Arrives at a named barrier (1 to 15) of kThreads threads without waiting; others wait in barrier_wait (core/ptx.h).
template <int kThreads>
__device__ __forceinline__ void barrier_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Initial registers per thread of a kernel with __launch_bounds__(threads, 1). setmaxnreg moves them between warpgroups.
constexpr int registers_at_launch(int threads) { return 65536 / threads / 8 * 8; }

// [setmaxnreg] Sets the registers per thread of this warpgroup. All its warps execute it.
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// [ld] Loads global memory that no thread writes meanwhile, in place: the compiler may not load it earlier and hold it in
// registers.
__device__ __forceinline__ float2 load_global_here(const float2* p) {
  float2 v;
  asm volatile("ld.volatile.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}

// [stmatrix] Lane l gives the row address of matrix l / 8, row l % 8; register i of lane l is row l / 4, 4-byte word l % 4 of
// matrix i.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

}  // namespace fastmax::ptx
