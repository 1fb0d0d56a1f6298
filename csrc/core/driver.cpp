#include "core/driver.h"

#include <cuda_runtime.h>

namespace fastmax {

void* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
}

CUcontext current_context() {
  static const auto get_current = reinterpret_cast<decltype(&cuCtxGetCurrent)>(driver_function("cuCtxGetCurrent"));
  CUcontext context = nullptr;
  return get_current != nullptr && get_current(&context) == CUDA_SUCCESS ? context : nullptr;
}

}  // namespace fastmax
