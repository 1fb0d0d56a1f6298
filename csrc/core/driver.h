// Functions of the CUDA driver, looked up through the runtime. The library does not link to libcuda, which machines without a
// GPU lack.
#pragma once

#include <cuda.h>

namespace fastmax {

// Returns a driver function as of CUDA 12; null if the driver lacks it.
void* driver_function(const char* name);

// Returns the calling thread's context; null if it has none. A device may have other contexts than its primary one, such as
// green contexts.
CUcontext current_context();

}  // namespace fastmax
