// Queries that fastmax/ops/extension.py sends to the library through ctypes.

#include <cuda_runtime.h>

#include <string>

#include "bindings/debug.h"
#include "core/device.h"
#include "core/dispatch.h"
#include "linear/algorithm.h"
#include "quadratic/algorithm.h"

namespace fastmax {
namespace {

std::string build_info() {
  std::string info = "architectures " FASTMAX_ARCHS "; bf16, fp16, tf32, fp32; head dims up to" + NativeHeadDims::list() + "; CUDA " +
                     std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10) + "; kernels";
  for (const Algorithm* algorithm : {&kQuadraticAlgorithm, &kLinearAlgorithm, &kFlashAlgorithm}) {
    for (const Kernels& kernels : *algorithm) info += std::string(" ") + kernels.name;
  }
  return info;
}

}  // namespace
}  // namespace fastmax

#define FASTMAX_EXPORT extern "C" __attribute__((visibility("default")))

// Version of the schemas that the bindings implement; SCHEMA_VERSION in fastmax/ops/extension.py must match.
FASTMAX_EXPORT int fastmax_schema_version() { return 24; }

// Why kernels cannot run on a device, a sentence without a full stop; null if they can.
FASTMAX_EXPORT const char* fastmax_device_problem(int index) {
  const std::string& problem = fastmax::get_device(index).problem;
  return problem.empty() ? nullptr : problem.c_str();
}

FASTMAX_EXPORT const char* fastmax_build_info() {
  static const std::string info = fastmax::build_info();
  return info.c_str();
}

FASTMAX_EXPORT void fastmax_set_debugging(int on) { fastmax::debugging() = on != 0; }
