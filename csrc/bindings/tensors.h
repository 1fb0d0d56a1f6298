// What the bindings need of the libtorch stable ABI: its names, allocation, the stream, calls to other operators.
#pragma once

#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <vector>

#include "core/device.h"
#include "core/params.h"

// Declared by libtorch only when it is built with CUDA; this library must also build against a CPU-only one.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace fastmax {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Whether there are kernels for the dtype of q, and the library has code for its device.
inline bool kernels_run_on(const Tensor& q) {
  const ScalarType dtype = q.scalar_type();
  return (dtype == ScalarType::BFloat16 || dtype == ScalarType::Half || dtype == ScalarType::Float) &&
         get_device(q.get_device_index()).problem.empty();
}

inline MathMode math_mode(ScalarType dtype, bool allow_tf32) {
  switch (dtype) {
    case ScalarType::BFloat16: return MathMode::kBF16;
    case ScalarType::Half: return MathMode::kFP16;
    default: return allow_tf32 ? MathMode::kTF32 : MathMode::kFP32;
  }
}

// Calls an operator of fastmax that returns Outputs tensors.
template <size_t Outputs, class... Args>
std::array<Tensor, Outputs> call_operator(const char* name, const Args&... args) {
  static_assert(Outputs <= sizeof...(Args));
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  std::array<Tensor, Outputs> outputs;
  for (size_t i = 0; i < Outputs; ++i) outputs[i] = torch::stable::detail::to<Tensor>(stack[i]);
  return outputs;
}

inline Tensor empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType dtype, int device_index) {
  AtenTensorHandle handle = nullptr;
  const int32_t dtype_code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype_code,
                                                         aoti_torch_device_type_cuda(), device_index, &handle));
  return Tensor(handle);
}

inline cudaStream_t current_stream(int device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace fastmax
