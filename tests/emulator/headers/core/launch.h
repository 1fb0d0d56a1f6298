// In place of csrc/core/launch.h: a launch is a call of the emulator, and ends before it returns.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "machine.h"

namespace fastmax {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("fastmax: ") + what + ": error " + std::to_string(error));
}

inline unsigned grid_1d(int64_t blocks) {
  if (blocks > INT_MAX) throw std::runtime_error("fastmax: too many blocks for one launch: " + std::to_string(blocks));
  return static_cast<unsigned>(blocks);
}

template <class... Params, class... Args>
void launch_kernel(const char* name, void (*kernel)(Params...), dim3 grid, int threads, int smem_bytes, cudaStream_t, const Args&... args) {
  emulator::run({name, grid, threads, smem_bytes}, [&] { kernel(args...); });
}

template <class... Params, class... Args>
void launch_waiting_kernel(const char* name, void (*kernel)(Params...), dim3 grid, int threads, int smem_bytes, cudaStream_t stream,
                           const Args&... args) {
  launch_kernel(name, kernel, grid, threads, smem_bytes, stream, args...);
}

}  // namespace fastmax
