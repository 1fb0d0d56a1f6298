// Functions of the driver, found through the runtime: the library does not link to libcuda, which machines without a GPU do not have.
#pragma once

#include <cuda.h>

namespace fastmax {

// As of CUDA 12; null where the driver does not have it.
void* driver_function(const char* name);

// Null where this thread has none. A device has contexts beside its own, such as green ones.
CUcontext current_context();

}  // namespace fastmax
