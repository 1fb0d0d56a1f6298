// wgmma: products D (64 x kN, fp32) += A (64 x 16) B (16 x kN) of a warpgroup: four warps, the first a multiple of four.
//
//   Wgmma<Math, kN>::rs<kB>(d, a, b)         A from registers, B from shared memory
//   Wgmma<Math, kN>::ss<kA, kB>(d, a, b)     both from shared memory, by their descriptors (tiles.h)
//   ... ::rs_first, ::ss_first               D = A B: outputs only, so that no zeros are written before
//   ... ::rs_if<kB>(goes_on, d, a, b)        D += A B if goes_on, else D = A B; decided at run time
//
// D: warp w of the warpgroup holds rows 16 w .. 16 w + 15. With g = lane / 4 and t = lane % 4, of columns 8j .. 8j + 7:
//   d[4j], d[4j + 1]: row g, columns 8j + 2t and the next;   d[4j + 2], d[4j + 3]: row g + 8
// A in registers: as for mma.sync, pairs of (g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..). Pairs packed from d[8k
// .. 8k + 7] are therefore A of columns 16k .. 16k + 15.
//
// All are asynchronous. Call wgmma_fence() before the first of a group whose registers other instructions wrote. wgmma_commit()
// ends a group, wgmma_wait<n>() waits until at most n groups are in flight, and keep(d) after it stops reads of d from moving
// before it. The compiler serialises products (C7510 .. C7515, which build.py reports) if registers in flight cross a branch,
// or if it cannot prove that nothing else accesses them.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace fastmax {

// The index that runs along the rows (128 bytes) of an operand in shared memory. kK: the summed index; kMN: the row of A or
// the column of B (transposed).
enum class Major : int { kK = 0, kMN = 1 };

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: keeps reads and writes of these registers on their side of the call.
template <int kCount>
__device__ __forceinline__ void keep(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void keep(uint32_t (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

template <class Math, int kN>
struct Wgmma;

// Operand lists and register texts, by the number of accumulators.
#define FASTMAX_INOUT(x) "+f"(x)
#define FASTMAX_OUT(x) "=f"(x)
#define FASTMAX_LIST_8(io, d, i) io(d[i]), io(d[i + 1]), io(d[i + 2]), io(d[i + 3]), io(d[i + 4]), io(d[i + 5]), io(d[i + 6]), io(d[i + 7])
#define FASTMAX_LIST_16(io, d, i) FASTMAX_LIST_8(io, d, i), FASTMAX_LIST_8(io, d, i + 8)
#define FASTMAX_LIST_32(io, d, i) FASTMAX_LIST_16(io, d, i), FASTMAX_LIST_16(io, d, i + 16)
#define FASTMAX_LIST_48(io, d, i) FASTMAX_LIST_32(io, d, i), FASTMAX_LIST_16(io, d, i + 32)
#define FASTMAX_LIST_64(io, d, i) FASTMAX_LIST_32(io, d, i), FASTMAX_LIST_32(io, d, i + 32)
#define FASTMAX_TEXT_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FASTMAX_TEXT_32 FASTMAX_TEXT_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FASTMAX_TEXT_48 FASTMAX_TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FASTMAX_TEXT_64                                                                                                 \
  FASTMAX_TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "   \
                  "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// first: 0 for D = A B, 1 for D += A B. o0 .. o5: indices of the operands after the kN / 2 accumulators.
#define FASTMAX_WGMMA_RS(name, n, type, count, io, first, o0, o1, o2, o3, o4, o5)                                                 \
  template <Major kB>                                                                                                             \
  static __device__ __forceinline__ void name(float (&d)[count], const uint32_t* a, uint64_t b) {                                 \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " #first ", 0;\n"                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FASTMAX_TEXT_##count "}, {" o0 ", " o1      \
                 ", " o2 ", " o3 "}, " o4 ", p, 1, 1, " o5 ";}\n"                                                                 \
                 : FASTMAX_LIST_##count(io, d, 0)                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(static_cast<int>(kB)));                                \
  }
// goes_on: D += A B; else D = A B, and the previous D is ignored.
#define FASTMAX_WGMMA_RS_IF(n, type, count, o0, o1, o2, o3, o4, o5, o6)                                                           \
  template <Major kB>                                                                                                             \
  static __device__ __forceinline__ void rs_if(bool goes_on, float (&d)[count], const uint32_t* a, uint64_t b) {                  \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " o6 ", 0;\n"                                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FASTMAX_TEXT_##count "}, {" o0 ", " o1      \
                 ", " o2 ", " o3 "}, " o4 ", p, 1, 1, " o5 ";}\n"                                                                 \
                 : FASTMAX_LIST_##count(FASTMAX_INOUT, d, 0)                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(static_cast<int>(kB)),                                 \
                   "r"(static_cast<uint32_t>(goes_on)));                                                                          \
  }
#define FASTMAX_WGMMA_SS(name, n, type, count, io, first, o0, o1, o2, o3)                                                         \
  template <Major kA, Major kB>                                                                                                   \
  static __device__ __forceinline__ void name(float (&d)[count], uint64_t a, uint64_t b) {                                        \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " #first ", 0;\n"                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" FASTMAX_TEXT_##count "}, " o0 ", " o1       \
                 ", p, 1, 1, " o2 ", " o3 ";}\n"                                                                                  \
                 : FASTMAX_LIST_##count(io, d, 0)                                                                                 \
                 : "l"(a), "l"(b), "n"(static_cast<int>(kA)), "n"(static_cast<int>(kB)));                                         \
  }
#define FASTMAX_WGMMA(Math, type, n, count, o0, o1, o2, o3, o4, o5, o6)                           \
  template <>                                                                                     \
  struct Wgmma<Math, n> {                                                                         \
    FASTMAX_WGMMA_RS(rs, n, type, count, FASTMAX_INOUT, 1, o0, o1, o2, o3, o4, o5)                \
    FASTMAX_WGMMA_RS(rs_first, n, type, count, FASTMAX_OUT, 0, o0, o1, o2, o3, o4, o5)            \
    FASTMAX_WGMMA_RS_IF(n, type, count, o0, o1, o2, o3, o4, o5, o6)                               \
    FASTMAX_WGMMA_SS(ss, n, type, count, FASTMAX_INOUT, 1, o0, o1, o2, o3)                        \
    FASTMAX_WGMMA_SS(ss_first, n, type, count, FASTMAX_OUT, 0, o0, o1, o2, o3)                    \
  };
#define FASTMAX_WGMMA_TYPE(Math, type)                                                      \
  FASTMAX_WGMMA(Math, type, 64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")        \
  FASTMAX_WGMMA(Math, type, 128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")

FASTMAX_WGMMA_TYPE(Bf16, "bf16")
FASTMAX_WGMMA_TYPE(Fp16, "f16")

FASTMAX_WGMMA(Bf16, "bf16", 32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
FASTMAX_WGMMA(Bf16, "bf16", 96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
FASTMAX_WGMMA(Fp16, "f16", 32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
FASTMAX_WGMMA(Fp16, "f16", 96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")

#undef FASTMAX_WGMMA_TYPE
#undef FASTMAX_WGMMA
#undef FASTMAX_WGMMA_SS
#undef FASTMAX_WGMMA_RS_IF
#undef FASTMAX_WGMMA_RS
#undef FASTMAX_TEXT_64
#undef FASTMAX_TEXT_48
#undef FASTMAX_TEXT_32
#undef FASTMAX_TEXT_16
#undef FASTMAX_LIST_64
#undef FASTMAX_LIST_48
#undef FASTMAX_LIST_32
#undef FASTMAX_LIST_16
#undef FASTMAX_LIST_8
#undef FASTMAX_OUT
#undef FASTMAX_INOUT

}  // namespace fastmax
