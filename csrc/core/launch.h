// Kernel launches: grid, shared-memory attribute and error check. They throw std::runtime_error.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fastmax {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("fastmax: ") + what + ": " + cudaGetErrorString(error));
}

// A one-dimensional grid. Counts that grow with batch, heads or tokens belong in x, because y and z are limited to 65535.
inline unsigned grid_1d(int64_t blocks) {
  if (blocks > INT_MAX) throw std::runtime_error("fastmax: too many blocks for one launch: " + std::to_string(blocks));
  return static_cast<unsigned>(blocks);
}

// Allows `bytes` of dynamic shared memory for a kernel on the current device, beside its static shared memory. CUDA requires
// this for more than 48 KB of both together. Never lowers an earlier allowance, by any thread.
void allow_shared_memory(const char* name, const void* kernel, int bytes);

#ifdef __CUDACC__
template <class Kernel, class... Args>
void launch_kernel(const char* name, Kernel kernel, dim3 grid, int threads, int smem_bytes, cudaStream_t stream,
                   const Args&... args) {
  if (grid.y > 65535 || grid.z > 65535) throw std::logic_error(std::string("fastmax: ") + name + ": grid.y or grid.z above 65535");
  if (smem_bytes > 0) allow_shared_memory(name, reinterpret_cast<const void*>(kernel), smem_bytes);
  kernel<<<grid, threads, smem_bytes, stream>>>(args...);
  check_cuda(cudaGetLastError(), name);
}

// Like launch_kernel, for kernels whose threads all call ptx::wait_for_earlier_kernels() before they access global memory.
// Their blocks start as soon as the blocks of the previous kernel have ended, without waiting for its memory flush. From
// compute capability 9.0 on.
template <class Kernel, class... Args>
void launch_waiting_kernel(const char* name, Kernel kernel, dim3 grid, int threads, int smem_bytes, cudaStream_t stream,
                           const Args&... args) {
  if (smem_bytes > 0) allow_shared_memory(name, reinterpret_cast<const void*>(kernel), smem_bytes);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = smem_bytes, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, args...);
  check_cuda(cudaGetLastError(), name);  // also clears the error
}
#endif

}  // namespace fastmax
