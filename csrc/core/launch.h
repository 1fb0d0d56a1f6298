// Launchers: each owns its grid, shared-memory attribute, launch and error check. They throw std::runtime_error.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "core/params.h"

namespace fastmax {

// Arithmetic modes as types (dtype.h).
struct Bf16;
struct Fp16;
struct Tf32;
struct Fp32;

// One arithmetic mode of a launcher: a source that names FASTMAX_MATH is compiled once per mode and specialises these.
template <class Math>
void quadratic_fwd(const FwdParams& p, cudaStream_t stream);
template <class Math>
void quadratic_bwd(const BwdParams& p, cudaStream_t stream);
template <class Math>
void flash_fwd(const FwdParams& p, cudaStream_t stream);
template <class Math>
void flash_bwd(const BwdParams& p, cudaStream_t stream);

// Row scores, float4 (b, h, n); with noise also grad_o (1 + dropout noise), contiguous (b, h, n, dv).
inline size_t quadratic_row_score_bytes(const BwdParams& p) {
  return (static_cast<size_t>(p.b) * p.h * p.n * sizeof(float4) + 255) / 256 * 256;
}
inline size_t quadratic_bwd_workspace_bytes(const BwdParams& p) {
  const size_t element = p.math == MathMode::kBF16 || p.math == MathMode::kFP16 ? 2 : 4;
  return quadratic_row_score_bytes(p) + (p.noise == nullptr ? 0 : static_cast<size_t>(p.b) * p.h * p.n * p.dv * element);
}

// The widest head dim with kernels for order 1 alone (linear1*): its state fits the registers of a block. Wider ones run the order-2
// kernels, which skip what is absent.
inline constexpr int kLinear1HeadDim = 128;
inline bool uses_linear1(const Problem& p) { return p.order == 1 && p.head_dim <= kLinear1HeadDim; }

void launch_linear_fwd(const FwdParams& p, cudaStream_t stream);
void launch_linear_bwd(const BwdParams& p, cudaStream_t stream);
size_t linear_fwd_workspace_bytes(const FwdParams& p);
size_t linear_bwd_workspace_bytes(const BwdParams& p);

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("fastmax: ") + what + ": " + cudaGetErrorString(error));
}

#ifdef __CUDACC__
// Raises the dynamic shared-memory limit where needed, launches, and checks. The attribute belongs to the current device's
// copy of the kernel; setting it again is cheap and allowed under stream capture.
template <class Kernel, class... Args>
void launch_kernel(const char* name, Kernel kernel, dim3 grid, int threads, int smem_bytes, cudaStream_t stream,
                   const Args&... args) {
  if (smem_bytes > 48 * 1024) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes), name);
  }
  kernel<<<grid, threads, smem_bytes, stream>>>(args...);
  check_cuda(cudaGetLastError(), name);
}
#endif

}  // namespace fastmax
