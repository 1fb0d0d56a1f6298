#include "core/device.h"

#include <cuda_runtime.h>

#include <array>
#include <mutex>

namespace fastmax {
namespace {

// Compiled for the same architectures as every other kernel: if it can be loaded, they can.
__global__ void probe_kernel() {}

std::string describe(cudaError_t error) {
  return error == cudaErrorInsufficientDriver ? "the CUDA driver is older than the CUDA " + std::to_string(CUDART_VERSION / 1000) +
                                                    " runtime that the extension was built with: update the driver"
                                              : std::string("CUDA reports: ") + cudaGetErrorString(error);
}

Device query(int index) {
  Device device;
  int major = 0, minor = 0, previous = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&device.sm_count, cudaDevAttrMultiProcessorCount, index);
  if (error == cudaSuccess) error = cudaGetDevice(&previous);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    device.problem = describe(error);
    return device;
  }
  device.arch = major * 10 + minor;
  const std::string name = std::to_string(major) + "." + std::to_string(minor);
  if (device.arch < kMinArch) {
    device.problem = "its compute capability is " + name + ", and the kernels need " + std::to_string(kMinArch / 10) + "." +
                     std::to_string(kMinArch % 10) + " or newer";
    return device;
  }
  cudaFuncAttributes attributes;
  error = cudaSetDevice(index);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, probe_kernel);
  const cudaError_t restored = cudaSetDevice(previous);
  if (error == cudaSuccess) error = restored;
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    device.problem = error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction
                         ? "the extension was built for architectures " FASTMAX_ARCHS ", not for compute capability " + name +
                               ": rebuild it with FASTMAX_CUDA_ARCHS=" + std::to_string(device.arch)
                         : describe(error);
  }
  return device;
}

}  // namespace

const Device& get_device(int index) {
  constexpr int kMaxDevices = 64;
  static std::array<Device, kMaxDevices> devices;
  static std::array<std::once_flag, kMaxDevices> queried;
  if (index < 0 || index >= kMaxDevices) {
    static const Device unknown{0, 0, "the extension counts devices from 0 to " + std::to_string(kMaxDevices - 1)};
    return unknown;
  }
  std::call_once(queried[index], [index] { devices[index] = query(index); });
  return devices[index];
}

}  // namespace fastmax
