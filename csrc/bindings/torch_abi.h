// The part of the libtorch stable ABI that the bindings use: names, errors, allocation and the stream.
#pragma once

#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

// Declared by libtorch only when it is built with CUDA; this library must also build against a CPU-only one.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
// Exists in PyTorch 2.13 and newer; null in older versions.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace fastmax {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Throws "fastmax: " and the parts. STD_TORCH_CHECK would prepend a function and a source path of the build machine.
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  text << "fastmax: ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}
#define FASTMAX_CHECK(condition, ...) \
  do {                                \
    if (!(condition)) ::fastmax::refuse(__VA_ARGS__); \
  } while (0)

// The message of the PyTorch call that failed; its C interface does not pass the exception's type on. Empty if there is none.
inline std::string failure() {
  const char* what = torch_exception_get_what_without_backtrace == nullptr ? nullptr : torch_exception_get_what_without_backtrace();
  return what == nullptr ? "" : what;
}

// If memory runs out, the message contains "out of memory", and fastmax.ops.registration.Kernel raises torch.OutOfMemoryError.
inline Tensor empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType dtype, int device_index) {
  AtenTensorHandle handle = nullptr;
  const int32_t dtype_code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype_code,
                               aoti_torch_device_type_cuda(), device_index, &handle) == AOTI_TORCH_SUCCESS) {
    return Tensor(handle);
  }
  std::string what = failure();
  if (what.empty()) {  // sizes and device are valid, so memory ran out or the device has an earlier error
    size_t free = 0, total = 0;
    const cudaError_t error = cudaMemGetInfo(&free, &total);
    what = error == cudaSuccess ? "CUDA out of memory, " + std::to_string(free >> 20) + " of " + std::to_string(total >> 20) + " MiB are free"
                                : cudaGetErrorString(error);
  }
  refuse("allocation on cuda:", device_index, " failed: ", what);
}

inline Tensor allocate_workspace(size_t bytes, int device_index) {
  return empty_strided({static_cast<int64_t>(bytes)}, {1}, ScalarType::Byte, device_index);
}

inline cudaStream_t current_stream(int device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace fastmax
