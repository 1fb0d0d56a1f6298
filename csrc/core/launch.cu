#include "core/launch.h"

#include <map>
#include <mutex>
#include <utility>

namespace fastmax {

void allow_shared_memory(const char* name, const void* kernel, int bytes) {
  constexpr size_t kUnasked = 48 * 1024;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> allowed;  // by kernel and device: a function of each device's own

  int device = 0;
  check_cuda(cudaGetDevice(&device), name);
  const std::lock_guard<std::mutex> lock(mutex);
  int& limit = allowed[{kernel, device}];
  if (bytes <= limit) return;
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), name);
  if (attributes.sharedSizeBytes + bytes > kUnasked) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), name);
  }
  limit = bytes;
}

}  // namespace fastmax
