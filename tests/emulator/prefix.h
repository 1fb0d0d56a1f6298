// Included before each source of csrc/ that is compiled for the emulator: CUDA C++ as C++.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "machine.h"

#define __CUDACC__
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
// A block is a thread of the operating system: static shared memory is its own, and dynamic shared memory a symbol that machine.cpp
// has under the names that kernels give it.
#define __shared__ thread_local

#define threadIdx (::emulator::thread_index())
#define blockIdx (::emulator::block_index())
#define blockDim (::emulator::block_size())
#define gridDim (::emulator::grid_size())

// ---- what CUDA has in the global namespace

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
using std::isfinite;
using std::isinf;
using std::isnan;

inline float emulator_rsqrt(float x) { return 1.f / std::sqrt(x); }
#define rsqrtf emulator_rsqrt

template <class To, class From>
inline To emulator_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}
inline float __uint_as_float(unsigned x) { return emulator_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator_bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulator_bits<float>(x); }
inline int __float_as_int(float x) { return emulator_bits<int>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __funnelshift_lc(unsigned lo, unsigned hi, unsigned shift) {
  return static_cast<unsigned>(((uint64_t{hi} << 32 | lo) << (shift < 32 ? shift : 32)) >> 32);
}

template <class T>
inline T __ldg(const T* p) { return *p; }
template <class T>
inline T __ldcg(const T* p) { return *p; }
template <class T>
inline T __ldcs(const T* p) { return *p; }
template <class T>
inline void __stcg(T* p, T x) { *p = x; }
template <class T>
inline void __stcs(T* p, T x) { *p = x; }

inline void __threadfence() {}
inline void __threadfence_block() {}
inline long long clock64() { return ::emulator::clock(); }

// ---- collectives

inline void __syncthreads() { ::emulator::barrier_sync(0, 0); }
inline int __syncthreads_or(int x) { return ::emulator::barrier_sync(0, 0, x != 0) != 0; }
inline int __syncthreads_count(int x) { return ::emulator::barrier_sync(0, 0, x != 0); }
inline void __syncwarp(unsigned mask = ::emulator::kAllLanes) { ::emulator::exchange("__syncwarp", 0, mask); }

template <class T>
inline T __shfl_sync(unsigned mask, T x, int lane, int width = 32) {
  const auto lanes = ::emulator::exchange("__shfl_sync", x, mask);
  return lanes[(::emulator::lane_index() & ~(width - 1)) | (lane & (width - 1))];
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32) {
  const auto lanes = ::emulator::exchange("__shfl_xor_sync", x, mask);
  const int other = ::emulator::lane_index() ^ bits;
  return other / width == ::emulator::lane_index() / width ? lanes[other] : x;
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T x, unsigned count, int width = 32) {
  const auto lanes = ::emulator::exchange("__shfl_up_sync", x, mask);
  const int lane = ::emulator::lane_index();
  return lane % width >= static_cast<int>(count) ? lanes[lane - static_cast<int>(count)] : x;
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T x, unsigned count, int width = 32) {
  const auto lanes = ::emulator::exchange("__shfl_down_sync", x, mask);
  const int lane = ::emulator::lane_index();
  return lane % width + static_cast<int>(count) < width ? lanes[lane + static_cast<int>(count)] : x;
}

template <class T, class Combine>
inline T emulator_reduce(const char* what, unsigned mask, T x, const Combine& combine) {
  const auto lanes = ::emulator::exchange(what, x, mask);
  bool first = true;
  T result{};
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1u) == 0) continue;
    result = first ? lanes[i] : combine(result, lanes[i]);
    first = false;
  }
  return result;
}
inline unsigned __ballot_sync(unsigned mask, int x) {
  const auto lanes = ::emulator::exchange("__ballot_sync", x, mask);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (mask >> i & 1u) != 0 && lanes[i] != 0 ? 1u << i : 0u;
  return bits;
}
inline int __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }
inline int __all_sync(unsigned mask, int x) { return __ballot_sync(mask, x) == mask; }
template <class T>
inline T __reduce_min_sync(unsigned mask, T x) {
  return emulator_reduce("__reduce_min_sync", mask, x, [](T a, T b) { return a < b ? a : b; });
}
template <class T>
inline T __reduce_max_sync(unsigned mask, T x) {
  return emulator_reduce("__reduce_max_sync", mask, x, [](T a, T b) { return a > b ? a : b; });
}
template <class T>
inline T __reduce_and_sync(unsigned mask, T x) {
  return emulator_reduce("__reduce_and_sync", mask, x, [](T a, T b) { return a & b; });
}
template <class T>
inline T __reduce_or_sync(unsigned mask, T x) {
  return emulator_reduce("__reduce_or_sync", mask, x, [](T a, T b) { return a | b; });
}
template <class T>
inline T __reduce_add_sync(unsigned mask, T x) {
  return emulator_reduce("__reduce_add_sync", mask, x, [](T a, T b) { return a + b; });
}

// ---- atomics: blocks are threads of their own

template <class T, class Change>
inline T emulator_atomic(T* p, const Change& change) {
  ::emulator::touch();
  T old;
  __atomic_load(p, &old, __ATOMIC_SEQ_CST);
  for (T next = change(old); !__atomic_compare_exchange(p, &old, &next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);) next = change(old);
  return old;
}
template <class T>
inline T atomicAdd(T* p, std::type_identity_t<T> x) { return emulator_atomic(p, [x](T old) { return static_cast<T>(old + x); }); }
template <class T>
inline T atomicMin(T* p, std::type_identity_t<T> x) { return emulator_atomic(p, [x](T old) { return old < x ? old : x; }); }
template <class T>
inline T atomicMax(T* p, std::type_identity_t<T> x) { return emulator_atomic(p, [x](T old) { return old > x ? old : x; }); }
template <class T>
inline T atomicExch(T* p, std::type_identity_t<T> x) { return emulator_atomic(p, [x](T) { return x; }); }
template <class T>
inline T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> x) {
  return emulator_atomic(p, [=](T old) { return old == expected ? x : old; });
}
