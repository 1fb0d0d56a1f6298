#include "core/launch.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "core/driver.h"

namespace fastmax {

void allow_shared_memory(const char* name, const void* kernel, int bytes) {
  constexpr size_t kUnasked = 48 * 1024;
  struct Allowed {
    int bytes = 0;
    std::set<CUcontext> contexts;  // contexts in which this many bytes are allowed
  };
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Allowed> kernels;  // by kernel and device, each of which has its own function

  int device = 0;
  check_cuda(cudaGetDevice(&device), name);
  const CUcontext context = current_context();
  const std::lock_guard<std::mutex> lock(mutex);
  Allowed& allowed = kernels[{kernel, device}];
  if (bytes <= allowed.bytes && allowed.contexts.count(context) > 0) return;
  const int most = std::max(bytes, allowed.bytes);
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), name);
  if (attributes.sharedSizeBytes + most > kUnasked) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), name);
  }
  if (most > allowed.bytes) allowed.contexts.clear();
  allowed.bytes = most;
  allowed.contexts.insert(context);
}

}  // namespace fastmax
