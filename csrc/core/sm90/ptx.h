// What Hopper adds to core/ptx.h: one PTX instruction per function; in brackets, the instruction as the PTX ISA manual titles it.
// wgmma is in wgmma.h. Addresses of shared memory are 32-bit (ptx::smem_address); barriers are 8 bytes of it.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fastmax::ptx {

// [mbarrier.init] A phase ends when `arrivals` threads have arrived and all expected bytes are there.
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

// [mbarrier.arrive] And makes the phase wait for so many more bytes.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// [mbarrier.arrive] In the place of so many threads.
__device__ __forceinline__ void mbarrier_arrive_many(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// [griddepcontrol.wait] Until the kernels before this one in its stream have ended and all that they wrote is there (launch.h).
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// [mbarrier.try_wait] Whether the phase of this parity has ended; waits for a time that the system chooses. Not `.acquire.cluster`,
// which empties L1 at every wait.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

// Until the phase of this parity has ended. A build with FASTMAX_TRAP_DEADLOCKS (build.py --trap-deadlocks) ends in an error
// where a kernel would hang, after seconds: by a store to address 0, since a trap would make the compiler serialise wgmma (C7512).
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

// [cp.async.bulk.tensor] A box of a tensor {column, token, head, batch} to shared memory; what lies outside of the tensor arrives as
// zeros, and counts as bytes like the rest.
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap& map, uint32_t barrier, int column, int token, int head,
                                         int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
      "l"(&map), "r"(barrier), "r"(column), "r"(token), "r"(head), "r"(batch)
      : "memory");
}

// [cp.async.bulk.tensor] A box of shared memory to a tensor, less what lies behind its ends; no coordinate may be negative.
// Joins this thread's bulk group.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, uint32_t src, int column, int token, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map), "r"(src),
               "r"(column), "r"(token), "r"(head), "r"(batch)
               : "memory");
}

// [cp.reduce.async.bulk.tensor] As tma_store, but adds to what is there, each number rounded once to the tensor's type.
__device__ __forceinline__ void tma_add(const CUtensorMap& map, uint32_t src, int column, int token, int head, int batch) {
  asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map), "r"(src),
               "r"(column), "r"(token), "r"(head), "r"(batch)
               : "memory");
}

// [cp.async.bulk] Contiguous bytes, a multiple of 16 at multiples of 16, to shared memory.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src),
               "r"(bytes), "r"(barrier)
               : "memory");
}

// [cp.async.bulk.prefetch] Likewise into the L2 cache, for those who will read it from there.
__device__ __forceinline__ void bulk_prefetch(const void* src, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

// [cp.async.bulk] Likewise from shared memory. Joins this thread's bulk group.
__device__ __forceinline__ void bulk_store(void* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}

// [cp.reduce.async.bulk] Adds floats of shared memory to those of global memory, one by one. Joins this thread's bulk group.
__device__ __forceinline__ void bulk_add_f32(float* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}

// [cp.async.bulk.commit_group]
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// [cp.async.bulk.wait_group] Until at most kPending of this thread's newest groups have still to be written; with .read: to be read
// from shared memory, which may then be written again.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// [fence.proxy] This thread's ordinary writes of shared memory, before the copy engine or wgmma reads them. Before the barrier that
// tells so, in every thread that wrote.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// [fence.proxy] Likewise of global memory, in both directions.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// [ld], [st] A word by which blocks tell each other that something is done.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
// Until the word is this one; in a build with FASTMAX_TRAP_DEADLOCKS as mbarrier_wait.
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

// [bar] At a named barrier (1 to 15) of kThreads threads: arrives without waiting, for those in barrier_wait (core/ptx.h).
template <int kThreads>
__device__ __forceinline__ void barrier_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Registers of each thread of a kernel with __launch_bounds__(threads, 1), which setmaxnreg moves between its warpgroups.
constexpr int registers_at_launch(int threads) { return 65536 / threads / 8 * 8; }

// [setmaxnreg] Registers of each thread of this warpgroup, from here on. All its warps execute it.
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// [ld] Global memory that no one writes meanwhile, read where it stands: the compiler must not load it earlier and keep it.
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
